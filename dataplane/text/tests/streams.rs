//! Whole outputs of model families, read however they are cut.
//!
//! Each file in `data/streams` has an output with two calls in a row, one of them without arguments, a brace inside a string,
//! and text around them where the family allows it, and what it has to turn into.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;

use proptest::prelude::*;
use serde::Deserialize;
use serde_json::{Value, json};
use smg_apis::Piece;
use smg_apis::generation::{Reading, ToolChoice};
use smg_text::reader::{OutputReader, Parsers, Reader, Task};

#[derive(Debug, Deserialize)]
struct Stream {
    reasoning_parser: String,
    tool_parser: String,
    text: String,
    reasoning: String,
    content: String,
    calls: Vec<Call>,
}

#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
struct Call {
    #[serde(default)]
    id: Option<String>,
    name: String,
    arguments: String,
}

/// What pieces say, joined.
#[derive(Debug, PartialEq, Default)]
struct Answer {
    reasoning: String,
    content: String,
    calls: Vec<Call>,
}

fn tools() -> Vec<Value> {
    let city = json!({"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}});
    vec![
        json!({"type": "function", "function": {"name": "weather", "parameters": city}}),
        json!({"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}),
    ]
}

fn read(parsers: Parsers, choice: ToolChoice, parts: &[&str]) -> Answer {
    let reading = Reading { tools: choice, separate_reasoning: true, skip_special_tokens: false };
    let tools = tools();
    let task = Task { reading: &reading, tools: &tools, opened: None, random: 1 << 95 };
    let mut reader = Reader::new(parsers, &task);
    let mut answer = Answer::default();
    let mut pieces: Vec<Piece> = parts.iter().flat_map(|part| reader.push(part)).collect();
    pieces.extend(reader.finish());
    for piece in pieces {
        match piece {
            Piece::Content(text) => answer.content += &text,
            Piece::Reasoning(text) => answer.reasoning += &text,
            Piece::ToolCall { index, id, name } => {
                assert_eq!(index, answer.calls.len());
                answer.calls.push(Call { id: Some(id), name, arguments: String::new() });
            }
            Piece::ToolArguments { index, fragment } => {
                assert_eq!(index + 1, answer.calls.len(), "arguments of a call that is over");
                answer.calls[index].arguments += &fragment;
            }
        }
    }
    answer
}

fn stream(name: &str) -> Stream {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/data/streams/{name}.json"));
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn check(name: &str) {
    let stream = stream(name);
    let parsers = Parsers::choose(Some(&stream.reasoning_parser), Some(&stream.tool_parser), "").unwrap();
    let text = stream.text.as_str();
    let whole = read(parsers, ToolChoice::Auto, &[text]);
    assert_eq!(whole.reasoning, stream.reasoning);
    assert_eq!(whole.content, stream.content);
    let mut seen = std::collections::HashSet::new();
    for (call, expected) in whole.calls.iter().zip(&stream.calls) {
        assert_eq!((&call.name, &call.arguments), (&expected.name, &expected.arguments));
        serde_json::from_str::<Value>(&call.arguments).unwrap();
        assert!(expected.id.is_none() || call.id == expected.id);
        assert!(seen.insert(call.id.clone()), "two calls with one id");
    }
    assert_eq!(whole.calls.len(), stream.calls.len());

    let bounds: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
    let characters: Vec<&str> = bounds.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
    assert_eq!(read(parsers, ToolChoice::Auto, &characters), whole, "character by character");
    // Every cutting into two, and of those into three one in thirteen, which are all distances and all places.
    for (number, first) in bounds.iter().enumerate() {
        for second in bounds[number..].iter().skip(number * 5 % 13).step_by(13).chain([&text.len()]) {
            let parts = [&text[..*first], &text[*first..*second], &text[*second..]];
            assert_eq!(read(parsers, ToolChoice::Auto, &parts), whole, "{parts:?}");
        }
    }
}

macro_rules! families {
    ($($family:ident),* $(,)?) => {$(
        #[test]
        fn $family() {
            check(stringify!($family));
        }
    )*

        #[test]
        fn every_file_is_read() {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/streams");
            let files = std::fs::read_dir(folder).unwrap().count();
            assert_eq!([$(stringify!($family)),*].len(), files);
        }
    };
}

families!(
    qwen,
    qwen_coder,
    llama,
    llama_python_tag,
    mistral,
    mistral_v11,
    deepseek_r1,
    deepseek_v31,
    deepseek_v32,
    kimi_k2,
    glm,
    minimax,
    step3,
    cohere,
    llama4_pythonic,
    gpt_oss,
    json,
);

/// Parsers that have a format of their own.
const PARSERS: [(&str, &str); 16] = [
    ("qwen3", "qwen"),
    ("passthrough", "qwen_coder"),
    ("passthrough", "llama"),
    ("passthrough", "json"),
    ("mistral", "mistral"),
    ("deepseek_r1", "deepseek"),
    ("deepseek_v4", "deepseek_v4"),
    ("deepseek_v31", "deepseek32"),
    ("kimi_thinking", "kimik2"),
    ("glm45", "glm45_moe"),
    ("minimax", "minimax_m2"),
    ("step3", "step3"),
    ("cohere_cmd", "cohere"),
    ("passthrough", "pythonic"),
    ("gpt_oss", "gpt_oss"),
    ("qwen3", "passthrough"),
];

/// Bits that outputs are made of: marks and pieces of calls, in any order.
fn bits() -> impl Strategy<Value = Vec<&'static str>> {
    let bits = vec![
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "{\"name\": \"now\"",
        ", \"arguments\": {",
        "}",
        "}}",
        "[",
        "]",
        "\n",
        " ",
        "text",
        "é",
        "\"",
        "\\",
        "{",
        ",",
        ";",
        ":",
        "now(",
        ")",
        "city=",
        "'x'",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|python_tag|>",
        "<function=now>",
        "</function>",
        "<parameter=city>",
        "</parameter>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "now\n```json\n",
        "```",
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "functions.now:0",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<|channel|>",
        "<|message|>",
        "<|start|>",
        "<|end|>",
        "<|call|>",
        "analysis",
        "commentary to=functions.now",
        "<minimax:tool_call>",
        "<invoke name=\"now\">",
        "</invoke>",
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        "<",
        "<|",
        "<t",
        "1",
        "-",
        "null",
        "tru",
        "e",
    ];
    prop::collection::vec(prop::sample::select(bits), 0..24)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn any_output_gives_the_same_pieces_however_it_is_cut(
        bits in bits(),
        parser in prop::sample::select(PARSERS.to_vec()),
        choice in prop::sample::select(vec![ToolChoice::Auto, ToolChoice::Required, ToolChoice::Function("now".to_owned()), ToolChoice::None]),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        let parsers = Parsers::choose(Some(parser.0), Some(parser.1), "").unwrap();
        let text = bits.concat();
        let whole = read(parsers, choice.clone(), &[&text]);
        prop_assert_eq!(&read(parsers, choice.clone(), &bits), &whole);
        let mut bounds: Vec<usize> = cuts.iter().map(|cut| cut.index(text.len() + 1)).collect();
        bounds.retain(|at| text.is_char_boundary(*at));
        bounds.extend([0, text.len()]);
        bounds.sort_unstable();
        let parts: Vec<&str> = bounds.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
        prop_assert_eq!(&read(parsers, choice, &parts), &whole);
    }

    #[test]
    fn text_without_marks_comes_back_unchanged(
        text in "[a-z <\\n(){}\\[\\]\"|é]{0,60}",
        parser in prop::sample::select(PARSERS.to_vec()),
    ) {
        let parsers = Parsers::choose(Some(parser.0), Some(parser.1), "").unwrap();
        let answer = read(parsers, ToolChoice::Auto, &[&text]);
        prop_assert_eq!(answer.reasoning + &answer.content, text);
        prop_assert!(answer.calls.is_empty());
    }
}
