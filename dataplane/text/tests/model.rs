//! A model's files to prompts and ids, and ids back to an answer.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;
use std::sync::{Arc, OnceLock};

use proptest::prelude::*;
use serde_json::{Value, json};
use smg_apis::generation::{ChatPrompt, Reading, ToolChoice};
use smg_apis::{MatchedStop, Piece};
use smg_text::detokenize::Detokenizer;
use smg_text::reader::{Parsers, Reader, Task};
use smg_text::source::{Files, SourceError};
use smg_text::template::TemplateError;
use smg_text::{ChatTemplate, Sample, SampleRules, TextModel, Tokenizer};

const EOS: u32 = 318;

fn model() -> Arc<TextModel> {
    static MODEL: OnceLock<Arc<TextModel>> = OnceLock::new();
    let read = || {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokenizer");
        Arc::new(TextModel::new(&Files::at(&folder).unwrap(), None, 1 << 20).unwrap())
    };
    Arc::clone(MODEL.get_or_init(read))
}

fn user(text: &str) -> Vec<Value> {
    vec![json!({"role": "user", "content": text})]
}

/// The text of ids that arrive one by one, after a prompt.
fn detokenized(tokenizer: &Tokenizer, prompt: &[u32], ids: &[u32], skip: bool) -> String {
    let mut detokenizer = Detokenizer::new(tokenizer, prompt, skip).unwrap();
    let mut text = String::new();
    for id in ids {
        detokenizer.push(tokenizer, *id, &mut text).unwrap();
    }
    detokenizer.finish(tokenizer, &mut text).unwrap();
    text
}

#[test]
fn a_conversation_becomes_the_models_prompt_and_ids() {
    let model = model();
    let chat = ChatPrompt { messages: user("Hello"), ..ChatPrompt::default() };
    let prompt = model.render(&chat, 0).unwrap();
    assert_eq!(
        prompt.text,
        "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    );
    let ids = model.encode(&prompt.text, false).unwrap();
    assert_eq!(ids.iter().filter(|id| **id == 317).count(), 3, "special tokens are one id each");
    assert!(ids.len() > 8, "a truncation that the file was saved with does not apply");
    assert_eq!(model.tokenizer.decode(&ids, false).unwrap(), prompt.text);
    model.encode(&prompt.text, false).unwrap();
    assert_eq!((model.cache.numbers().hits, model.cache.numbers().misses), (1, 1));
}

#[test]
fn tools_calls_and_variables_reach_the_template() {
    let model = model();
    let mut chat = ChatPrompt { messages: user("Hi"), ..ChatPrompt::default() };
    chat.tools = vec![json!({"type": "function"})];
    chat.variables.insert("enable_thinking".to_owned(), json!(false));
    chat.messages.push(json!({
        "role": "assistant", "content": null,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "now", "arguments": "{\"a\":[1]}"}}],
    }));
    let text = model.render(&chat, 0).unwrap().text;
    assert!(text.contains("<tools>\n{\"type\": \"function\"}\n</tools>"), "{text}");
    assert!(text.contains("<tool_call>\n{\"name\": \"now\", \"arguments\": {\"a\": [1]}}\n</tool_call>"), "{text}");
    assert!(text.ends_with("assistant\n<think>\n\n</think>\n\n"), "{text}");
    let parsers = Parsers::choose(None, None, "qwen3").unwrap();
    assert_eq!(parsers.reasoning.opened_by(&text, None), Some(false));
}

/// What Jinja2 (set up as `transformers` does it) and Hugging Face's tokenizers made of the same, once.
#[test]
fn prompts_and_ids_are_those_of_the_reference_libraries() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let cases: Vec<Value> = serde_json::from_slice(&std::fs::read(folder.join("reference.json")).unwrap()).unwrap();
    let own = model();
    for case in &cases {
        let other = case["template"].as_str().map(|source| {
            let tokens = [("bos_token", "<|endoftext|>"), ("eos_token", "<|im_end|>")];
            let tokens = tokens.map(|(name, text)| (name.to_owned(), text.to_owned()));
            ChatTemplate::new(vec![("default".to_owned(), source.to_owned())], &tokens).unwrap()
        });
        let chat = ChatPrompt {
            messages: case["messages"].as_array().unwrap().clone(),
            tools: case["tools"].as_array().cloned().unwrap_or_default(),
            variables: case["variables"].as_object().cloned().unwrap_or_default(),
            continue_final_message: false,
        };
        let template = other.as_ref().or(own.template.as_ref()).unwrap();
        let text = template.render(&chat, 1_700_000_000).unwrap().text;
        assert_eq!(text, case["text"].as_str().unwrap());
        let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        assert_eq!(*own.encode(&text, false).unwrap(), *ids);
    }
}

#[test]
fn special_tokens_of_all_configurations_are_known() {
    let model = model();
    assert_eq!(model.tokenizer.eos_ids(), [316, EOS]);
    let named: Vec<(&str, &str)> =
        model.tokenizer.named_tokens().iter().map(|(name, text)| (name.as_str(), text.as_str())).collect();
    assert_eq!(named, [("eos_token", "<|im_end|>"), ("pad_token", "<|endoftext|>")]);
    assert!(model.tokenizer.is_special(EOS) && !model.tokenizer.is_special(319));
    assert_eq!(model.tokenizer.text_of(EOS), "<|im_end|>");
    assert_eq!(model.tokenizer.single_token("</think>"), Some(320));
    assert_eq!(model.tokenizer.single_token(" world"), model.encode(" world", false).unwrap().first().copied());
    assert_eq!(model.tokenizer.single_token("Hello world"), None);
}

#[test]
fn a_model_without_a_template_says_so_and_takes_one_from_the_flag() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokenizer");
    let json = std::fs::read(folder.join("tokenizer.json")).unwrap();
    let files = Files::of([("tokenizer.json", json)]);
    let chat = ChatPrompt { messages: user("Hello"), ..ChatPrompt::default() };
    let bare = TextModel::new(&files, None, 0).unwrap();
    assert_eq!(bare.render(&chat, 0), Err(TemplateError::Missing));
    let given = TextModel::new(&files, Some("{{ messages[0].content }}!"), 0).unwrap();
    assert_eq!(given.render(&chat, 0).unwrap().text, "Hello!");
    let broken = TextModel::new(&files, Some("{% if %}"), 0).unwrap_err();
    assert!(matches!(broken, SourceError::Unreadable { .. }), "{broken}");
}

#[test]
fn templates_are_found_wherever_models_keep_them() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokenizer");
    let json = std::fs::read_to_string(folder.join("tokenizer.json")).unwrap();
    let chat = ChatPrompt { messages: user("Hello"), ..ChatPrompt::default() };
    let rendered = |files: &[(&str, &str)]| {
        let all = files.iter().map(|(name, text)| (*name, *text)).chain([("tokenizer.json", json.as_str())]);
        TextModel::new(&Files::of(all), None, 0).unwrap().render(&chat, 0).unwrap().text
    };
    let config = ("tokenizer_config.json", r#"{"chat_template": "config"}"#);
    let own = ("chat_template.json", r#"{"chat_template": "json"}"#);
    assert_eq!(rendered(&[config]), "config");
    assert_eq!(rendered(&[config, own]), "json");
    assert_eq!(rendered(&[config, own, ("chat_template.jinja", "jinja")]), "jinja");
    let named =
        r#"{"chat_template": [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named"}]}"#;
    assert_eq!(rendered(&[("tokenizer_config.json", named)]), "named");
}

#[test]
fn a_character_of_many_tokens_comes_out_whole() {
    let model = model();
    // Four tokens of one byte each.
    let ids = "😀".bytes().map(u32::from).collect::<Vec<_>>();
    let mut detokenizer = Detokenizer::new(&model.tokenizer, &[], true).unwrap();
    let mut steps = Vec::new();
    for id in &ids {
        let mut text = String::new();
        detokenizer.push(&model.tokenizer, *id, &mut text).unwrap();
        steps.push(text);
    }
    assert_eq!(steps, ["", "", "", "😀"]);
}

#[test]
fn half_a_character_at_the_end_is_not_lost_and_garbage_is_not_held_for_ever() {
    let model = model();
    let half: Vec<u32> = "a😀".bytes().take(3).map(u32::from).collect();
    assert_eq!(detokenized(&model.tokenizer, &[], &half, true), "a\u{fffd}");
    let garbage = vec![0x80; 1000];
    let text = detokenized(&model.tokenizer, &[], &garbage, true);
    assert!(text.chars().all(|next| next == '\u{fffd}') && text.chars().count() >= 900, "{}", text.chars().count());
}

#[test]
fn a_prompt_that_ends_within_a_character_is_completed() {
    let model = model();
    let smile: Vec<u32> = "😀".bytes().map(u32::from).collect();
    assert_eq!(detokenized(&model.tokenizer, &smile[..2], &smile[2..], true), "😀");
}

#[test]
fn tokens_have_their_bytes_and_unknown_ones_none() {
    let model = model();
    assert_eq!(model.tokenizer.bytes_of(0xf0), Some([0xf0].as_slice()));
    assert_eq!(model.tokenizer.bytes_of(320), Some(b"</think>".as_slice()));
    assert_eq!(model.tokenizer.bytes_of(1_000_000), Some([].as_slice()));
    assert_eq!(model.tokenizer.fewest_tokens(1000), 1000usize.div_ceil("<|endoftext|>".len()));
    for id in 0..model.tokenizer.vocabulary() as u32 {
        assert_eq!(model.tokenizer.text_of(id), model.tokenizer.decode(&[id], false).unwrap(), "{id}");
    }
}

#[test]
fn special_tokens_are_spelled_out_where_they_mark_something() {
    let model = model();
    let need = |parsers: &str, tools: ToolChoice| {
        let reading = Reading { tools, separate_reasoning: true, skip_special_tokens: true };
        let parsers = Parsers::choose(None, None, parsers).unwrap();
        parsers.need_special_tokens(&reading, &model.tokenizer)
    };
    assert!(!need("qwen3", ToolChoice::None), "<think> is no special token here");
    assert!(need("qwen3", ToolChoice::Auto));
    assert!(!need("qwen3", ToolChoice::Required), "the output is JSON then");
    assert!(need("gpt-oss", ToolChoice::None));
}

#[test]
fn a_continuation_keeps_the_space_that_a_beginning_would_lose() {
    // A tokenizer in the manner of SentencePiece: the first word of a text loses the space before it.
    let json = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": true},
        "post_processor": null,
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": true},
        "model": {"type": "WordLevel", "vocab": {"▁one": 0, "▁two": 1, "?": 2}, "unk_token": "?"},
    });
    let tokenizer = Tokenizer::new(&Files::of([("tokenizer.json", json.to_string())])).unwrap();
    assert_eq!(detokenized(&tokenizer, &[], &[1, 0], true), "two one");
    assert_eq!(detokenized(&tokenizer, &[0], &[1, 0], true), " two one");
}

/// A tokenizer whose tokens are not bytes, except for characters that it does not know.
fn with_byte_fallback() -> Tokenizer {
    let mut vocabulary: serde_json::Map<String, Value> =
        (0..256).map(|byte| (format!("<0x{byte:02X}>"), json!(byte))).collect();
    for (id, token) in (256..).zip(["▁", "▁a", "b", "c", "<unk>"]) {
        vocabulary.insert(token.to_owned(), json!(id));
    }
    let json = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": "<unk>", "byte_fallback": true},
    });
    Tokenizer::new(&Files::of([("tokenizer.json", json.to_string())])).unwrap()
}

#[test]
fn garbage_is_not_held_for_ever_where_tokens_are_no_bytes() {
    let tokenizer = with_byte_fallback();
    assert_eq!(tokenizer.bytes_of(0), None);
    let smile: Vec<u32> = [257].into_iter().chain("😀".bytes().map(u32::from)).chain([258]).collect();
    assert_eq!(detokenized(&tokenizer, &[], &smile, true), "a😀b");
    let mut detokenizer = Detokenizer::new(&tokenizer, &[], true).unwrap();
    let mut text = String::new();
    for _ in 0..100 {
        detokenizer.push(&tokenizer, 0x80, &mut text).unwrap();
    }
    assert!(text.chars().count() > 50, "{}", text.chars().count());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn text_comes_out_whole_where_tokens_are_no_bytes(parts in prop::collection::vec(prop::sample::select(vec!["▁", "▁a", "b", "c", "é", "😀"]), 0..20)) {
        let tokenizer = with_byte_fallback();
        let known = ["▁", "▁a", "b", "c"];
        let ids: Vec<u32> = parts.iter().flat_map(|part| match known.iter().position(|token| token == part) {
            Some(at) => vec![256 + at as u32],
            None => part.bytes().map(u32::from).collect(),
        }).collect();
        prop_assert_eq!(detokenized(&tokenizer, &[], &ids, true), tokenizer.decode(&ids, true).unwrap());
    }

    #[test]
    fn ids_that_arrive_one_by_one_give_the_text_that_all_give(text in "(Hello|the|[a-c ]|é|🦀|😀|\n|<\\|im_end\\|>|<think>){0,24}", skip: bool) {
        let model = model();
        let ids = model.encode(&text, false).unwrap();
        let whole = model.tokenizer.decode(&ids, skip).unwrap();
        prop_assert_eq!(detokenized(&model.tokenizer, &[], &ids, skip), whole);
    }

    #[test]
    fn a_sample_does_not_depend_on_how_its_ids_are_cut(
        cuts in prop::collection::vec(1usize..6, 1..60),
        stop in prop::sample::select(vec!["", "OK", "\n", "zzz", "city\": "]),
        keep: bool,
    ) {
        let model = model();
        let output = "<think>\nHm 😀\n</think>\nI look.\n<tool_call>\n{\"name\": \"now\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>OK 🦀!";
        let mut ids = model.encode(output, false).unwrap().to_vec();
        ids.extend([EOS, 65, 66]);
        let whole = answer(&model, &[&ids], stop, keep);
        let mut parts = Vec::new();
        let mut rest = ids.as_slice();
        for cut in cuts.iter().cycle() {
            let (part, after) = rest.split_at((*cut).min(rest.len()));
            parts.push(part);
            rest = after;
            if rest.is_empty() { break; }
        }
        prop_assert_eq!(answer(&model, &parts, stop, keep), whole);
    }
}

fn sample(model: &Arc<TextModel>, rules: SampleRules, tools: ToolChoice) -> Sample {
    let reading = Reading { tools, separate_reasoning: true, skip_special_tokens: rules.skip_special_tokens };
    let parsers = Parsers::choose(None, None, "Qwen3-8B").unwrap();
    let task = Task { reading: &reading, tools: &[], opened: None, random: 3 };
    Sample::new(Arc::clone(model), &[], rules, Box::new(Reader::new(parsers, &task))).unwrap()
}

/// Reasoning, content, arguments, what stopped, and tokens of reasoning.
type Told = (String, String, String, Option<MatchedStop>, u32);

fn answer(model: &Arc<TextModel>, parts: &[&[u32]], stop: &str, keep: bool) -> Told {
    let rules = SampleRules { stop: vec![stop.to_owned()], keep_stop: keep, ..SampleRules::default() };
    let mut sample = sample(model, rules, ToolChoice::Auto);
    let mut pieces: Vec<Piece> = Vec::new();
    for part in parts {
        pieces.extend(sample.push(part).unwrap());
    }
    pieces.extend(sample.finish().unwrap());
    let mut told = Told::default();
    for piece in pieces {
        match piece {
            Piece::Reasoning(text) => told.0 += &text,
            Piece::Content(text) => told.1 += &text,
            Piece::ToolArguments { fragment, .. } => told.2 += &fragment,
            Piece::ToolCall { name, .. } => assert_eq!(name, "now"),
        }
    }
    (told.3, told.4) = (sample.matched_stop(), sample.reasoning_tokens());
    told
}

#[test]
fn a_sample_is_taken_apart_and_ends_at_the_end_of_the_sequence() {
    let model = model();
    let mut ids =
        model.encode("<think>Hm</think>Yes.<tool_call>{\"name\": \"now\"}</tool_call>", false).unwrap().to_vec();
    ids.extend([EOS, 65]);
    let (reasoning, content, arguments, stop, tokens) = answer(&model, &[&ids], "", false);
    assert_eq!((reasoning.as_str(), content.as_str(), arguments.as_str()), ("Hm", "Yes.", "{}"));
    assert_eq!((stop, tokens), (Some(MatchedStop::Token(EOS)), 3));
}

#[test]
fn a_stop_string_hides_itself_and_what_follows_unless_it_is_kept() {
    let model = model();
    let ids = model.encode("one END two", false).unwrap();
    let stopped = Some(MatchedStop::Text("END".to_owned()));
    let (_, content, _, stop, _) = answer(&model, &[&ids], "END", false);
    assert_eq!((content.as_str(), stop), ("one ", stopped.clone()));
    let (_, content, _, stop, _) = answer(&model, &[&ids], "END", true);
    assert_eq!((content.as_str(), stop), ("one END", stopped));
}

#[test]
fn the_end_of_the_sequence_can_be_ignored_and_other_tokens_can_end_it() {
    let model = model();
    let rules = SampleRules { ignore_eos: true, stop_token_ids: vec![66], ..SampleRules::default() };
    let mut sample = sample(&model, rules, ToolChoice::None);
    let pieces = sample.push(&[65, EOS, 65, 66, 67]).unwrap();
    assert_eq!(pieces, [Piece::Content("A<|im_end|>A".to_owned())]);
    assert!(sample.stopped());
    assert_eq!(sample.matched_stop(), Some(MatchedStop::Token(66)));
    assert_eq!(sample.finish().unwrap(), []);
    assert_eq!(sample.push(&[65]).unwrap(), []);
}
