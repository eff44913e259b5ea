//! The field numbers and types of what engines take and give, pinned.
//!
//! Engines are built elsewhere: a number that moves here is a request they misread in silence. Each case encodes one
//! message with every field set and lists what must be on the wire: field number and value, as a reader that knows no
//! names sees them.
#![allow(clippy::unwrap_used, clippy::panic)]

use prost::Message;
use smg_messages::engines::{common, sglang, tokenspeed, vllm};

/// A value on the wire.
#[derive(Debug, PartialEq)]
enum Wire {
    Varint(u64),
    Fixed64(u64),
    Fixed32(u32),
    Bytes(Vec<u8>),
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let mut value = 0;
    for shift in (0..).step_by(7) {
        let (first, rest) = bytes.split_first().unwrap();
        *bytes = rest;
        value |= u64::from(first & 0x7f) << shift;
        if first & 0x80 == 0 {
            break;
        }
    }
    value
}

fn take(bytes: &mut &[u8], length: usize) -> Vec<u8> {
    let (taken, rest) = bytes.split_at(length);
    *bytes = rest;
    taken.to_vec()
}

/// The fields of an encoded message, in the order they are written.
fn fields(message: &impl Message) -> Vec<(u64, Wire)> {
    let encoded = message.encode_to_vec();
    let (mut bytes, mut found) = (encoded.as_slice(), Vec::new());
    while !bytes.is_empty() {
        let tag = varint(&mut bytes);
        let value = match tag & 7 {
            0 => Wire::Varint(varint(&mut bytes)),
            1 => Wire::Fixed64(u64::from_le_bytes(take(&mut bytes, 8).try_into().unwrap())),
            2 => {
                let length = varint(&mut bytes) as usize;
                Wire::Bytes(take(&mut bytes, length))
            }
            5 => Wire::Fixed32(u32::from_le_bytes(take(&mut bytes, 4).try_into().unwrap())),
            other => panic!("wire type {other}"),
        };
        found.push((tag >> 3, value));
    }
    found.sort_by_key(|(number, _)| *number);
    found
}

fn int(number: u64, value: i64) -> (u64, Wire) {
    (number, Wire::Varint(value as u64))
}

fn float(number: u64, value: f32) -> (u64, Wire) {
    (number, Wire::Fixed32(value.to_bits()))
}

fn double(number: u64, value: f64) -> (u64, Wire) {
    (number, Wire::Fixed64(value.to_bits()))
}

fn bytes(number: u64, value: impl AsRef<[u8]>) -> (u64, Wire) {
    (number, Wire::Bytes(value.as_ref().to_vec()))
}

/// A message within a message.
fn message(number: u64, value: &impl Message) -> (u64, Wire) {
    (number, Wire::Bytes(value.encode_to_vec()))
}

/// Floats in a row, packed.
fn floats(number: u64, values: &[f32]) -> (u64, Wire) {
    (number, Wire::Bytes(values.iter().flat_map(|value| value.to_le_bytes()).collect()))
}

/// An entry of a map from text to a number.
fn biased(number: u64, token: &str, bias: f32) -> (u64, Wire) {
    let mut entry = vec![0x0a, token.len() as u8];
    entry.extend(token.as_bytes());
    entry.push(0x15);
    entry.extend(bias.to_le_bytes());
    (number, Wire::Bytes(entry))
}

#[test]
fn an_sglang_request() {
    let tokenized = sglang::TokenizedInput { original_text: "t".into(), input_ids: vec![5, 6] };
    let params = sglang::SamplingParams {
        temperature: 0.5,
        top_p: 0.25,
        top_k: -1,
        min_p: 0.125,
        frequency_penalty: 1.5,
        presence_penalty: 2.5,
        repetition_penalty: 3.5,
        max_new_tokens: Some(8),
        stop: vec!["s".into()],
        stop_token_ids: vec![10],
        skip_special_tokens: true,
        spaces_between_special_tokens: true,
        n: 17,
        min_new_tokens: 18,
        ignore_eos: true,
        no_stop_trim: true,
        stream_interval: Some(21),
        logit_bias: [("7".to_owned(), 22.5)].into(),
        constraint: Some(sglang::sampling_params::Constraint::Regex("r".into())),
    };
    let meeting =
        sglang::DisaggregatedParams { bootstrap_host: "h".into(), bootstrap_port: 8998, bootstrap_room: i32::MAX - 1 };
    assert_eq!(fields(&tokenized), [bytes(1, "t"), bytes(2, [5, 6])]);
    assert_eq!(fields(&meeting), [bytes(1, "h"), int(2, 8998), int(3, i64::from(i32::MAX - 1))]);
    assert_eq!(
        fields(&params),
        [
            float(1, 0.5),
            float(2, 0.25),
            int(3, -1),
            float(4, 0.125),
            float(5, 1.5),
            float(6, 2.5),
            float(7, 3.5),
            int(8, 8),
            bytes(9, "s"),
            bytes(10, [10]),
            int(11, 1),
            int(12, 1),
            bytes(13, "r"),
            int(17, 17),
            int(18, 18),
            int(19, 1),
            int(20, 1),
            int(21, 21),
            biased(22, "7", 22.5),
        ]
    );
    let request = sglang::GenerateRequest {
        request_id: "id".into(),
        tokenized: Some(tokenized.clone()),
        sampling_params: Some(params.clone()),
        return_logprob: true,
        logprob_start_len: -1,
        top_logprobs_num: 7,
        token_ids_logprob: vec![8],
        disaggregated_params: Some(meeting.clone()),
        lora_id: "l".into(),
        data_parallel_rank: Some(0),
        stream: true,
        require_reasoning: true,
    };
    assert_eq!(
        fields(&request),
        [
            bytes(1, "id"),
            message(2, &tokenized),
            message(4, &params),
            int(5, 1),
            int(6, -1),
            int(7, 7),
            bytes(8, [8]),
            message(10, &meeting),
            bytes(15, "l"),
            int(16, 0),
            int(17, 1),
            int(18, 1),
        ]
    );
}

#[test]
fn constraints() {
    use sglang::sampling_params::Constraint as Sglang;
    use tokenspeed::sampling_params::Constraint as TokenSpeed;
    use vllm::sampling_params::Constraint as Vllm;
    let text = || "c".to_owned();
    for (constraint, number) in
        [(Sglang::JsonSchema(text()), 14), (Sglang::EbnfGrammar(text()), 15), (Sglang::StructuralTag(text()), 16)]
    {
        let params = sglang::SamplingParams { constraint: Some(constraint), ..Default::default() };
        assert_eq!(fields(&params), [bytes(number, "c")]);
    }
    for (constraint, number) in [
        (TokenSpeed::Regex(text()), 17),
        (TokenSpeed::JsonSchema(text()), 18),
        (TokenSpeed::EbnfGrammar(text()), 19),
        (TokenSpeed::StructuralTag(text()), 20),
    ] {
        let params = tokenspeed::SamplingParams { constraint: Some(constraint), ..Default::default() };
        assert_eq!(fields(&params), [bytes(number, "c")]);
    }
    for (constraint, number) in [
        (Vllm::JsonSchema(text()), 16),
        (Vllm::Regex(text()), 17),
        (Vllm::Grammar(text()), 18),
        (Vllm::StructuralTag(text()), 19),
    ] {
        let params = vllm::SamplingParams { constraint: Some(constraint), ..Default::default() };
        assert_eq!(fields(&params), [bytes(number, "c")]);
    }
    let params = vllm::SamplingParams { constraint: Some(Vllm::JsonObject(true)), ..Default::default() };
    assert_eq!(fields(&params), [int(20, 1)]);
    let choice = vllm::ChoiceConstraint { choices: vec![text(), "d".to_owned()] };
    let params = vllm::SamplingParams { constraint: Some(Vllm::Choice(choice.clone())), ..Default::default() };
    assert_eq!(fields(&params), [message(21, &choice)]);
    assert_eq!(fields(&choice), [bytes(1, "c"), bytes(1, "d")]);
}

#[test]
fn a_vllm_request() {
    let tokenized = vllm::TokenizedInput { original_text: "t".into(), input_ids: vec![5, 6] };
    let legacy = vllm::KvTransferParams { remote_host: "h".into(), remote_port: 8998 };
    let params = vllm::SamplingParams {
        temperature: Some(0.0),
        top_p: 0.25,
        top_k: 3,
        min_p: 0.125,
        frequency_penalty: 1.5,
        presence_penalty: 2.5,
        repetition_penalty: 3.5,
        max_tokens: Some(8),
        min_tokens: 9,
        stop: vec!["s".into()],
        stop_token_ids: vec![11],
        skip_special_tokens: true,
        spaces_between_special_tokens: true,
        ignore_eos: true,
        n: 15,
        logprobs: Some(0),
        prompt_logprobs: Some(0),
        seed: Some(-24),
        include_stop_str_in_output: true,
        logit_bias: [(7, 26.5)].into(),
        truncate_prompt_tokens: Some(27),
        grammar_from_first_token: true,
        constraint: None,
    };
    assert_eq!(fields(&tokenized), [bytes(1, "t"), bytes(2, [5, 6])]);
    assert_eq!(fields(&legacy), [bytes(1, "h"), int(2, 8998)]);
    let mut bias = vec![0x08, 7, 0x15];
    bias.extend(26.5f32.to_le_bytes());
    assert_eq!(
        fields(&params),
        [
            float(1, 0.0),
            float(2, 0.25),
            int(3, 3),
            float(4, 0.125),
            float(5, 1.5),
            float(6, 2.5),
            float(7, 3.5),
            int(8, 8),
            int(9, 9),
            bytes(10, "s"),
            bytes(11, [11]),
            int(12, 1),
            int(13, 1),
            int(14, 1),
            int(15, 15),
            int(22, 0),
            int(23, 0),
            int(24, -24),
            int(25, 1),
            bytes(26, bias),
            int(27, 27),
            int(28, 1),
        ]
    );
    let request = vllm::GenerateRequest {
        request_id: "id".into(),
        input: Some(vllm::generate_request::Input::Tokenized(tokenized.clone())),
        sampling_params: Some(params.clone()),
        stream: true,
        kv_transfer_params: Some(legacy.clone()),
        kv_transfer_params_json: Some(String::new()),
        data_parallel_rank: Some(0),
    };
    assert_eq!(
        fields(&request),
        [
            bytes(1, "id"),
            message(2, &tokenized),
            message(4, &params),
            int(5, 1),
            message(6, &legacy),
            bytes(8, ""),
            int(9, 0),
        ]
    );
}

#[test]
fn a_tokenspeed_request() {
    let tokenized = tokenspeed::TokenizedInput { input_ids: vec![5, 6], original_text: "t".into() };
    let meeting =
        tokenspeed::KvBootstrapInfo { bootstrap_host: "h".into(), bootstrap_port: 8998, bootstrap_room: i64::MAX - 1 };
    let params = tokenspeed::SamplingParams {
        temperature: Some(0.0),
        top_p: Some(0.0),
        top_k: Some(-1),
        min_p: Some(0.0),
        frequency_penalty: Some(0.0),
        presence_penalty: Some(0.0),
        repetition_penalty: Some(0.0),
        max_new_tokens: Some(0),
        min_new_tokens: 9,
        stop: vec!["s".into()],
        stop_token_ids: vec![11],
        ignore_eos: true,
        skip_special_tokens: true,
        spaces_between_special_tokens: true,
        n: 15,
        logit_bias: [("7".to_owned(), 16.5)].into(),
        no_stop_trim: true,
        sampling_seed: Some(0),
        constraint: None,
    };
    assert_eq!(fields(&tokenized), [bytes(1, [5, 6]), bytes(2, "t")], "not in the order of the other engines");
    assert_eq!(fields(&meeting), [bytes(1, "h"), int(2, 8998), int(3, i64::MAX - 1)]);
    assert_eq!(
        fields(&params),
        [
            float(1, 0.0),
            float(2, 0.0),
            int(3, -1),
            float(4, 0.0),
            float(5, 0.0),
            float(6, 0.0),
            float(7, 0.0),
            int(8, 0),
            int(9, 9),
            bytes(10, "s"),
            bytes(11, [11]),
            int(12, 1),
            int(13, 1),
            int(14, 1),
            int(15, 15),
            biased(16, "7", 16.5),
            int(22, 1),
            int(23, 0),
        ]
    );
    let request = tokenspeed::GenerateRequest {
        request_id: "id".into(),
        tokenized: Some(tokenized.clone()),
        sampling_params: Some(params.clone()),
        return_logprob: true,
        logprob_start_len: Some(-1),
        top_logprobs_num: 6,
        token_ids_logprob: vec![7],
        stream: true,
        kv_bootstrap_info: Some(meeting.clone()),
        data_parallel_rank: Some(0),
    };
    assert_eq!(
        fields(&request),
        [
            bytes(1, "id"),
            message(2, &tokenized),
            message(3, &params),
            int(4, 1),
            int(5, -1),
            int(6, 6),
            bytes(7, [7]),
            int(8, 1),
            message(11, &meeting),
            int(12, 0),
        ]
    );
}

#[test]
fn what_engines_answer() {
    let top = sglang::TopLogProbs { values: vec![0.5], token_ids: vec![9] };
    assert_eq!(fields(&top), [floats(1, &[0.5]), bytes(2, [9])]);
    let logprobs = sglang::OutputLogProbs {
        token_logprobs: vec![-0.5],
        token_ids: vec![2],
        top_logprobs: vec![top.clone()],
        token_ids_logprobs: vec![top.clone()],
    };
    assert_eq!(fields(&logprobs), [floats(1, &[-0.5]), bytes(2, [2]), message(3, &top), message(4, &top)]);
    let chunk = sglang::GenerateStreamChunk {
        token_ids: vec![1],
        prompt_tokens: 2,
        completion_tokens: 3,
        cached_tokens: 4,
        output_logprobs: Some(logprobs.clone()),
        input_logprobs: None,
        index: 8,
        reasoning_tokens: 9,
    };
    let expected = [bytes(1, [1]), int(2, 2), int(3, 3), int(4, 4), message(5, &logprobs), int(8, 8), int(9, 9)];
    assert_eq!(fields(&chunk), expected);
    let complete = sglang::GenerateComplete {
        output_ids: vec![1],
        finish_reason: "stop".into(),
        prompt_tokens: 3,
        completion_tokens: 4,
        cached_tokens: 5,
        output_logprobs: None,
        matched_stop: Some(sglang::generate_complete::MatchedStop::MatchedTokenId(8)),
        input_logprobs: None,
        index: 11,
        reasoning_tokens: 12,
        spec_accepted_tokens: 13,
        spec_draft_tokens: 14,
    };
    let expected = [
        bytes(1, [1]),
        bytes(2, "stop"),
        int(3, 3),
        int(4, 4),
        int(5, 5),
        int(8, 8),
        int(11, 11),
        int(12, 12),
        int(13, 13),
        int(14, 14),
    ];
    assert_eq!(fields(&complete), expected);
    let response = sglang::GenerateResponse {
        request_id: "id".into(),
        response: Some(sglang::generate_response::Response::Complete(complete.clone())),
    };
    assert_eq!(fields(&response), [bytes(1, "id"), message(3, &complete)]);

    let chunk = vllm::GenerateStreamChunk { token_ids: vec![1], index: 7, ..Default::default() };
    assert_eq!(fields(&chunk), [bytes(1, [1]), int(7, 7)]);
    let complete = vllm::GenerateComplete {
        output_ids: vec![1],
        finish_reason: "length".into(),
        index: 8,
        matched_stop: Some(vllm::generate_complete::MatchedStop::MatchedStopStr("x".into())),
        kv_transfer_params_json: Some("{}".into()),
        ..Default::default()
    };
    assert_eq!(fields(&complete), [bytes(1, [1]), bytes(2, "length"), int(8, 8), bytes(11, "x"), bytes(12, "{}")]);
    let response = vllm::GenerateResponse { response: Some(vllm::generate_response::Response::Chunk(chunk.clone())) };
    assert_eq!(fields(&response), [message(1, &chunk)], "this engine's answers carry no request id");

    let complete = tokenspeed::GenerateComplete {
        matched_stop: Some(tokenspeed::generate_complete::MatchedStop::MatchedTokenId(7)),
        index: 9,
        weight_version: Some("w".into()),
        ..Default::default()
    };
    assert_eq!(fields(&complete), [int(7, 7), int(9, 9), bytes(12, "w")]);
    let response = tokenspeed::GenerateResponse {
        request_id: "id".into(),
        response: Some(tokenspeed::generate_response::Response::Chunk(Default::default())),
    };
    assert_eq!(fields(&response), [bytes(1, "id"), bytes(2, "")]);
}

#[test]
fn aborts_tokenizers_and_loads() {
    let abort = sglang::AbortRequest { request_id: "a".into(), reason: "r".into() };
    assert_eq!(fields(&abort), [bytes(1, "a"), bytes(2, "r")]);
    let abort = vllm::AbortRequest { request_ids: vec!["a".into(), "b".into()] };
    assert_eq!(fields(&abort), [bytes(1, "a"), bytes(1, "b")]);
    let chunk = common::GetTokenizerChunk { data: vec![0], sha256: "s".into() };
    assert_eq!(fields(&chunk), [bytes(1, [0]), bytes(2, "s")]);
    let asked = vllm::GetLoadsRequest { dp_rank: Some(0), include: vec!["core".into()] };
    assert_eq!(fields(&asked), [int(1, 0), bytes(2, "core")]);

    let load = sglang::SchedulerLoad {
        token_usage: 7.5,
        max_running_requests: 11,
        num_waiting_uncached_tokens: 17,
        ..Default::default()
    };
    assert_eq!(fields(&load), [double(7, 7.5), int(11, 11), int(17, 17)]);
    let load = vllm::SchedulerLoad {
        token_usage: 7.5,
        max_running_requests: 11,
        num_waiting_uncached_tokens: 12,
        ..Default::default()
    };
    assert_eq!(fields(&load), [double(7, 7.5), int(11, 11), int(12, 12)]);
    let load = tokenspeed::SchedulerLoad {
        max_running_requests: 7,
        token_usage: 8.5,
        num_waiting_uncached_tokens: 14,
        ..Default::default()
    };
    assert_eq!(fields(&load), [int(7, 7), double(8, 8.5), int(14, 14)]);
}

#[test]
fn what_engines_say_of_themselves() {
    let info = sglang::GetModelInfoResponse {
        model_path: "p".into(),
        served_model_name: "m".into(),
        max_context_length: 7,
        default_sampling_params_json: "{}".into(),
        ..Default::default()
    };
    assert_eq!(fields(&info), [bytes(1, "p"), bytes(6, "m"), int(7, 7), bytes(20, "{}")]);
    let info = vllm::GetModelInfoResponse {
        model_path: "p".into(),
        max_context_length: 3,
        served_model_name: "m".into(),
        default_sampling_params_json: "{}".into(),
        ..Default::default()
    };
    assert_eq!(fields(&info), [bytes(1, "p"), int(3, 3), bytes(6, "m"), bytes(14, "{}")]);
    let info = tokenspeed::GetModelInfoResponse {
        model_path: "p".into(),
        served_model_name: "m".into(),
        max_context_length: 6,
        default_sampling_params_json: "{}".into(),
        ..Default::default()
    };
    assert_eq!(fields(&info), [bytes(1, "p"), bytes(3, "m"), int(6, 6), bytes(13, "{}")]);

    let info = vllm::GetServerInfoResponse {
        kv_connector: "c".into(),
        kv_role: "r".into(),
        kv_engine_id: "e".into(),
        data_parallel_size: 9,
        kv_cache_dtype: "auto".into(),
        block_size: 12,
        attention_backend: "a".into(),
        model_dtype: "d".into(),
        pairing_protocol: "p".into(),
        max_num_seqs: 20,
        ..Default::default()
    };
    let expected = [
        bytes(6, "c"),
        bytes(7, "r"),
        bytes(8, "e"),
        int(9, 9),
        bytes(11, "auto"),
        int(12, 12),
        bytes(13, "a"),
        bytes(14, "d"),
        bytes(15, "p"),
        int(20, 20),
    ];
    assert_eq!(fields(&info), expected);
    let info = sglang::GetServerInfoResponse {
        server_args: Some(Default::default()),
        sglang_version: "v".into(),
        ..Default::default()
    };
    assert_eq!(fields(&info), [bytes(1, ""), bytes(7, "v")]);
    let info = tokenspeed::GetServerInfoResponse {
        scheduler_info: Some(Default::default()),
        tokenspeed_version: "v".into(),
        ..Default::default()
    };
    assert_eq!(fields(&info), [bytes(2, ""), bytes(7, "v")]);
}
