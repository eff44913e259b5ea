//! What routing reads from a body, and which bodies are refused.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use bytes::Bytes;
use smg_engines::{BodyError, ClientBody, Field, Prompt, Route};

use Route::{ChatCompletions, Completions, Generate};

fn try_parse(text: &str, route: Route) -> Result<ClientBody, BodyError> {
    ClientBody::parse(Bytes::copy_from_slice(text.as_bytes()), route)
}

fn parse(text: &str, route: Route) -> ClientBody {
    try_parse(text, route).unwrap()
}

#[test]
fn what_is_no_json_is_refused_with_the_position() {
    for text in [
        "",
        " ",
        "{",
        "}",
        "not json",
        r#"{"a":1"#,
        r#"{"a":1,}"#,
        r#"{"a" 1}"#,
        r#"{a:1}"#,
        r#"{"a":01}"#,
        r#"{"a":NaN}"#,
        r#"{"a":1}x"#,
        r#"{"a":1}{}"#,
        r#"{"a":[1,{"b":]}"#,
        "{\"a\":\"line\nbreak\"}",
        r#"{"a":"\x"}"#,
        "\u{feff}{}",
    ] {
        let error = try_parse(text, ChatCompletions).unwrap_err();
        assert!(matches!(error, BodyError::NotJson(_)), "{text}: {error}");
    }
    for bytes in [&b"{\"a\":\"\xff\"}"[..], b"\xff{}", b"{\"\xc3\":1}"] {
        let error = ClientBody::parse(Bytes::copy_from_slice(bytes), ChatCompletions).unwrap_err();
        assert!(matches!(error, BodyError::NotJson(_)), "{error}");
    }
}

#[test]
fn json_that_is_no_object_is_refused() {
    for text in ["[]", "[1,2]", "\"text\"", "1", "null", "true", " [ {} ] "] {
        assert_eq!(try_parse(text, Completions).unwrap_err(), BodyError::NotAnObject, "{text}");
    }
}

#[test]
fn only_model_stream_and_n_are_checked_for_their_type() {
    for (text, field, expected) in [
        (r#"{"model":1}"#, "model", "a string"),
        (r#"{"model":["m"]}"#, "model", "a string"),
        (r#"{"stream":"true"}"#, "stream", "a boolean"),
        (r#"{"stream":1}"#, "stream", "a boolean"),
        (r#"{"n":0}"#, "n", "a positive integer"),
        (r#"{"n":-1}"#, "n", "a positive integer"),
        (r#"{"n":1.5}"#, "n", "a positive integer"),
        (r#"{"n":"2"}"#, "n", "a positive integer"),
        (r#"{"n":[2]}"#, "n", "a positive integer"),
        (r#"{"n":1,"n":"2"}"#, "n", "a positive integer"),
    ] {
        assert_eq!(try_parse(text, Completions).unwrap_err(), BodyError::WrongType { field, expected }, "{text}");
    }
    for text in [
        r#"{"max_tokens":"x","prompt":{"a":1},"logprobs":{},"sampling_params":3,"messages":7,"input_ids":"x"}"#,
        r#"{"model":null,"stream":null,"n":null}"#,
        r#"{"n":"2","n":1,"stream":5,"stream":false,"model":5,"model":"m"}"#,
        r#"{"n":2.0}"#,
    ] {
        for route in [ChatCompletions, Completions, Generate] {
            let body = parse(text, route);
            body.samples();
            body.prompt();
            body.routing_text();
            body.wants_logprobs();
        }
    }
}

#[test]
fn the_last_duplicate_counts_and_null_means_absent() {
    let body = parse(r#"{"model":"a","stream":true,"\u006d\u006fdel":"b","stream":null,"n":4}"#, ChatCompletions);
    assert_eq!((body.model(), body.stream(), body.samples()), (Some("b"), false, 4));
    assert!(body.has(Field::Stream));
    assert_eq!(body.value(Field::Stream), None);
    let empty = parse("{}", ChatCompletions);
    assert_eq!((empty.model(), empty.stream(), empty.samples()), (None, false, 1));
}

#[test]
fn samples_of_generate_are_found_in_its_sampling_parameters() {
    for (text, expected) in [
        (r#"{"text":"x"}"#, 1),
        (r#"{"text":"x","sampling_params":{"n":3}}"#, 3),
        (r#"{"text":"x","sampling_params":{"n":3,"n":2}}"#, 2),
        (r#"{"text":["x","y"],"sampling_params":[{"n":1},{"n":5},{}]}"#, 5),
        (r#"{"text":"x","sampling_params":{"n":"many"}}"#, 1),
        (r#"{"text":"x","sampling_params":null,"n":2}"#, 2),
    ] {
        assert_eq!(parse(text, Generate).samples(), expected, "{text}");
    }
    assert_eq!(parse(r#"{"sampling_params":{"n":3}}"#, Completions).samples(), 1);
}

#[test]
fn prompts_are_counted_by_their_shape() {
    for (text, expected) in [
        (r#"{"prompt":"a"}"#, Prompt::One),
        (r#"{"prompt":["a"]}"#, Prompt::Batch(1)),
        (r#"{"prompt": [ "a" , "b","]" ] }"#, Prompt::Batch(3)),
        (r#"{"prompt":[1,2,3]}"#, Prompt::One),
        (r#"{"prompt":[[1,2],[3]]}"#, Prompt::Batch(2)),
        (r#"{"prompt":[[1]]}"#, Prompt::Batch(1)),
        (r#"{"prompt":[]}"#, Prompt::Batch(0)),
        (r#"{"prompt":null}"#, Prompt::Other),
        (r#"{"prompt":7}"#, Prompt::Other),
        (r#"{"prompt":[{"x":1}]}"#, Prompt::Other),
        ("{}", Prompt::Other),
    ] {
        assert_eq!(parse(text, Completions).prompt(), expected, "{text}");
    }
    for (text, expected) in [
        (r#"{"text":"a"}"#, Prompt::One),
        (r#"{"text":["a","b"]}"#, Prompt::Batch(2)),
        (r#"{"input_ids":[1,2,3]}"#, Prompt::One),
        (r#"{"input_ids":[[1],[2],[3]]}"#, Prompt::Batch(3)),
        (r#"{"input_ids":[[1],[2]],"text":null}"#, Prompt::Batch(2)),
        (r#"{"input_ids":null,"text":["a"]}"#, Prompt::Batch(1)),
    ] {
        assert_eq!(parse(text, Generate).prompt(), expected, "{text}");
    }
    assert_eq!(parse(r#"{"messages":[]}"#, ChatCompletions).prompt(), Prompt::One);
}

#[test]
fn each_route_asks_for_logprobs_in_its_own_way() {
    for (text, chat, completions, generate) in [
        ("{}", false, false, false),
        (r#"{"logprobs":true}"#, true, true, false),
        (r#"{"logprobs":false}"#, false, true, false),
        (r#"{"logprobs":0}"#, false, true, false),
        (r#"{"logprobs":5}"#, false, true, false),
        (r#"{"logprobs":null}"#, false, false, false),
        (r#"{"return_logprob":true}"#, false, false, true),
        (r#"{"return_logprob":false}"#, false, false, false),
        (r#"{"return_logprob":[false,true]}"#, false, false, true),
        (r#"{"return_logprob":[false]}"#, false, false, false),
    ] {
        assert_eq!(parse(text, ChatCompletions).wants_logprobs(), chat, "chat {text}");
        assert_eq!(parse(text, Completions).wants_logprobs(), completions, "completions {text}");
        assert_eq!(parse(text, Generate).wants_logprobs(), generate, "generate {text}");
    }
}

#[test]
fn routing_text_is_what_content_based_policies_compare() {
    let chat = r#"{"messages":[
        {"role":"system","content":"be brief"},
        {"role":"user","content":[{"type":"text","text":"a\nb"},{"type":"image_url","image_url":{"url":"u"}},{"type":"text","text":"c"}]},
        {"role":"assistant","content":null,"reasoning_content":"hm"},
        {"role":"assistant","tool_calls":[]},
        {"role":"tool","content":"42"},
        "odd", {"content":{}}]}"#;
    assert_eq!(parse(chat, ChatCompletions).routing_text(), "be brief a\nb c hm 42");
    for (text, route, expected) in [
        (r#"{"prompt":"once"}"#, Completions, "once"),
        (r#"{"prompt":["first","second"]}"#, Completions, "first"),
        (r#"{"prompt":[1,2]}"#, Completions, ""),
        (r#"{"prompt":[]}"#, Completions, ""),
        ("{}", Completions, ""),
        (r#"{"text":"native"}"#, Generate, "native"),
        (r#"{"text":["a","b"]}"#, Generate, "a"),
        (r#"{"input_ids":[1]}"#, Generate, ""),
        ("{}", ChatCompletions, ""),
    ] {
        assert_eq!(parse(text, route).routing_text(), expected, "{text}");
    }
}

#[test]
fn routes_have_their_documented_paths_and_labels() {
    let shown = [ChatCompletions, Completions, Generate].map(|route| (route.path(), route.endpoint_label()));
    assert_eq!(
        shown,
        [("/v1/chat/completions", "chat"), ("/v1/completions", "completions"), ("/generate", "generate")]
    );
}

#[test]
fn deep_nesting_and_many_members_do_no_harm() {
    let deep = format!(r#"{{"a":{}{}}}"#, "[".repeat(100_000), "]".repeat(100_000));
    assert!(try_parse(&deep, ChatCompletions).is_ok());
    let members: Vec<_> = (0..50_000).map(|index| format!("\"k{index}\":0")).collect();
    let body = parse(&format!("{{{}}}", members.join(",")), ChatCompletions);
    assert_eq!(body.model(), None);
}

#[test]
fn token_ids_are_those_of_the_first_prompt() {
    for (text, route, expected) in [
        (r#"{"prompt":[1,2]}"#, Completions, Some(vec![1, 2])),
        (r#"{"prompt":[[3,4],[5]]}"#, Completions, Some(vec![3, 4])),
        (r#"{"prompt":"once"}"#, Completions, None),
        (r#"{"prompt":["a"]}"#, Completions, None),
        (r#"{"prompt":[-1]}"#, Completions, None),
        (r#"{"prompt":[]}"#, Completions, Some(vec![])),
        (r#"{"input_ids":[7],"text":"t"}"#, Generate, Some(vec![7])),
        (r#"{"input_ids":[[8],[9]]}"#, Generate, Some(vec![8])),
        (r#"{"prompt":[1]}"#, Generate, None),
        (r#"{"messages":[1]}"#, ChatCompletions, None),
    ] {
        assert_eq!(parse(text, route).routing_token_ids(), expected, "{text}");
    }
}

#[test]
fn what_keeps_kv_apart_is_compared_as_text_whatever_its_shape() {
    let body = parse(r#"{"cache_salt":"a\"b","extra_key":["x","y"],"lora_path":null}"#, Generate);
    assert_eq!(body.routing_value(Field::CacheSalt).as_deref(), Some("a\"b"));
    assert_eq!(body.routing_value(Field::ExtraKey).as_deref(), Some(r#"["x","y"]"#));
    assert_eq!(body.routing_value(Field::LoraPath), None);
}
