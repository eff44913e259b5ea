//! Answers over gRPC: three ways of counting become one, and what breaks the protocol is an error.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use smg_apis::output::{FinishReason, MatchedStop};
use smg_engines::grpc::{Chunk, Complete, Message, ReadError, Reader, sglang, tokenspeed, vllm};
use smg_messages::engines::{sglang as sglang_wire, tokenspeed as tokenspeed_wire, vllm as vllm_wire};

fn sglang_chunk(chunk: sglang_wire::GenerateStreamChunk) -> sglang_wire::GenerateResponse {
    let response = Some(sglang_wire::generate_response::Response::Chunk(chunk));
    sglang_wire::GenerateResponse { request_id: "id".into(), response }
}

fn sglang_complete(complete: sglang_wire::GenerateComplete) -> sglang_wire::GenerateResponse {
    let response = Some(sglang_wire::generate_response::Response::Complete(complete));
    sglang_wire::GenerateResponse { request_id: "id".into(), response }
}

fn vllm_chunk(chunk: vllm_wire::GenerateStreamChunk) -> vllm_wire::GenerateResponse {
    vllm_wire::GenerateResponse { response: Some(vllm_wire::generate_response::Response::Chunk(chunk)) }
}

fn vllm_complete(complete: vllm_wire::GenerateComplete) -> vllm_wire::GenerateResponse {
    vllm_wire::GenerateResponse { response: Some(vllm_wire::generate_response::Response::Complete(complete)) }
}

fn tokenspeed_chunk(chunk: tokenspeed_wire::GenerateStreamChunk) -> tokenspeed_wire::GenerateResponse {
    let response = Some(tokenspeed_wire::generate_response::Response::Chunk(chunk));
    tokenspeed_wire::GenerateResponse { request_id: "id".into(), response }
}

fn tokenspeed_complete(complete: tokenspeed_wire::GenerateComplete) -> tokenspeed_wire::GenerateResponse {
    let response = Some(tokenspeed_wire::generate_response::Response::Complete(complete));
    tokenspeed_wire::GenerateResponse { request_id: "id".into(), response }
}

/// The tokens of an answer in order, and the counts seen on the way.
fn joined(messages: Vec<Message>) -> (Vec<u32>, Vec<u32>, Complete) {
    let (mut tokens, mut counts, mut end) = (Vec::new(), Vec::new(), None);
    for message in messages {
        match message {
            Message::Chunk(Chunk { token_ids, usage, .. }) => {
                tokens.extend(token_ids);
                counts.push(usage.completion_tokens);
            }
            Message::Complete(complete) => {
                tokens.extend(&complete.token_ids);
                counts.push(complete.usage.completion_tokens);
                end = Some(complete);
            }
        }
    }
    (tokens, counts, end.unwrap())
}

#[test]
fn a_streamed_answer_is_the_same_whoever_streams_it() {
    let mut reader = Reader::new(1, true);
    let chunk = |tokens: &[u32], so_far| sglang_wire::GenerateStreamChunk {
        token_ids: tokens.to_vec(),
        prompt_tokens: 4,
        completion_tokens: so_far,
        ..Default::default()
    };
    let end = sglang_wire::GenerateComplete {
        output_ids: vec![3],
        finish_reason: "length".into(),
        prompt_tokens: 4,
        completion_tokens: 3,
        cached_tokens: 2,
        ..Default::default()
    };
    let on_sglang = [sglang_chunk(chunk(&[1, 2], 2)), sglang_chunk(chunk(&[3], 3)), sglang_complete(end)];
    let on_sglang = on_sglang.map(|response| sglang::read(&mut reader, response).unwrap());
    assert!(reader.is_complete());

    let mut reader = Reader::new(1, true);
    let chunk = |tokens: &[u32]| vllm_wire::GenerateStreamChunk {
        token_ids: tokens.to_vec(),
        prompt_tokens: 4,
        completion_tokens: tokens.len() as u32,
        ..Default::default()
    };
    let end = vllm_wire::GenerateComplete {
        output_ids: vec![3],
        finish_reason: "length".into(),
        prompt_tokens: 4,
        completion_tokens: 1,
        cached_tokens: 2,
        ..Default::default()
    };
    let on_vllm = [vllm_chunk(chunk(&[1, 2])), vllm_chunk(chunk(&[3])), vllm_complete(end)];
    let on_vllm = on_vllm.map(|response| vllm::read(&mut reader, response).unwrap());

    let mut reader = Reader::new(1, true);
    let chunk = |tokens: &[u32], so_far| tokenspeed_wire::GenerateStreamChunk {
        token_ids: tokens.to_vec(),
        prompt_tokens: 4,
        completion_tokens: so_far,
        ..Default::default()
    };
    let end = tokenspeed_wire::GenerateComplete {
        output_ids: vec![3],
        finish_reason: "length".into(),
        prompt_tokens: 4,
        completion_tokens: 3,
        cached_tokens: 2,
        ..Default::default()
    };
    let on_tokenspeed =
        [tokenspeed_chunk(chunk(&[1, 2], 2)), tokenspeed_chunk(chunk(&[3], 3)), tokenspeed_complete(end)];
    let on_tokenspeed = on_tokenspeed.map(|response| tokenspeed::read(&mut reader, response).unwrap());

    assert_eq!(on_sglang, on_vllm);
    assert_eq!(on_sglang, on_tokenspeed);
    let (tokens, counts, end) = joined(on_sglang.to_vec());
    assert_eq!((tokens, counts), (vec![1, 2, 3], vec![2, 3, 3]));
    assert_eq!((end.reason, end.usage.cached_tokens, end.usage.prompt_tokens), (FinishReason::Length, 2, 4));
}

#[test]
fn an_answer_that_is_not_streamed_comes_whole() {
    let mut reader = Reader::new(1, false);
    let whole = vllm_wire::GenerateComplete {
        output_ids: vec![1, 2],
        finish_reason: "stop".into(),
        completion_tokens: 2,
        matched_stop: Some(vllm_wire::generate_complete::MatchedStop::MatchedStopStr("END".into())),
        kv_transfer_params_json: Some(r#" {"do_remote_prefill": true}"#.into()),
        ..Default::default()
    };
    let Message::Complete(complete) = vllm::read(&mut reader, vllm_complete(whole)).unwrap() else { panic!() };
    assert_eq!((complete.token_ids, complete.usage.completion_tokens), (vec![1, 2], 2));
    assert_eq!(complete.reason, FinishReason::Stop);
    assert_eq!(complete.matched_stop, Some(MatchedStop::Text("END".into())));
    assert_eq!(complete.kv_transfer_params.as_deref(), Some(r#" {"do_remote_prefill": true}"#), "as it came");
}

#[test]
fn only_a_json_object_is_a_handoff() {
    for nothing in [None, Some(""), Some("null"), Some("[1]"), Some("{"), Some("{}x"), Some("\"x\"")] {
        let whole =
            vllm_wire::GenerateComplete { kv_transfer_params_json: nothing.map(str::to_owned), ..Default::default() };
        let Message::Complete(complete) = vllm::read(&mut Reader::new(1, false), vllm_complete(whole)).unwrap() else {
            panic!()
        };
        assert_eq!(complete.kv_transfer_params, None, "{nothing:?}");
    }
}

#[test]
fn sglang_numbers_all_samples_of_a_whole_answer_0_and_they_are_told_apart() {
    let mut reader = Reader::new(3, false);
    for expected in 0..3 {
        let whole = sglang_wire::GenerateComplete { output_ids: vec![7], ..Default::default() };
        let Message::Complete(complete) = sglang::read(&mut reader, sglang_complete(whole)).unwrap() else { panic!() };
        assert_eq!((complete.index, complete.token_ids), (expected, vec![7]));
    }
    assert!(reader.is_complete());
    let more = sglang_wire::GenerateComplete::default();
    assert_eq!(sglang::read(&mut reader, sglang_complete(more)), Err(ReadError::AfterEnd { index: 0 }));
}

#[test]
fn samples_of_a_stream_are_counted_apart() {
    let mut reader = Reader::new(2, true);
    let chunk = |index| vllm_wire::GenerateStreamChunk {
        token_ids: vec![index],
        completion_tokens: 1,
        index,
        ..Default::default()
    };
    let mut counts = Vec::new();
    for index in [0, 1, 1, 0, 1] {
        let Message::Chunk(read) = vllm::read(&mut reader, vllm_chunk(chunk(index))).unwrap() else { panic!() };
        counts.push((read.index, read.usage.completion_tokens));
    }
    assert_eq!(counts, [(0, 1), (1, 1), (1, 2), (0, 2), (1, 3)]);
    let end = |index| vllm_wire::GenerateComplete { index, finish_reason: "abort".into(), ..Default::default() };
    vllm::read(&mut reader, vllm_complete(end(1))).unwrap();
    assert!(!reader.is_complete());
    assert_eq!(vllm::read(&mut reader, vllm_chunk(chunk(1))), Err(ReadError::AfterEnd { index: 1 }));
    vllm::read(&mut reader, vllm_complete(end(0))).unwrap();
    assert!(reader.is_complete());
}

#[test]
fn log_probabilities_come_once_and_fit_their_tokens() {
    let top = sglang_wire::TopLogProbs { values: vec![-0.5, -1.0], token_ids: vec![1, 9] };
    let logprobs = sglang_wire::OutputLogProbs {
        token_logprobs: vec![-0.5],
        token_ids: vec![1],
        top_logprobs: vec![top.clone()],
        token_ids_logprobs: vec![],
    };
    let input = sglang_wire::InputLogProbs {
        token_logprobs: vec![Default::default(), sglang_wire::InputTokenLogProb { value: Some(-2.0) }],
        token_ids: vec![5, 6],
        top_logprobs: vec![],
    };
    let mut reader = Reader::new(1, true);
    let chunk = sglang_wire::GenerateStreamChunk {
        token_ids: vec![1],
        output_logprobs: Some(logprobs.clone()),
        input_logprobs: Some(input.clone()),
        ..Default::default()
    };
    let Message::Chunk(read) = sglang::read(&mut reader, sglang_chunk(chunk)).unwrap() else { panic!() };
    assert_eq!(read.logprobs.unwrap().top, [[(1, -0.5), (9, -1.0)]]);
    assert_eq!(read.prompt_logprobs.unwrap().logprobs, [None, Some(-2.0)]);
    let end = sglang_wire::GenerateComplete {
        output_ids: vec![1],
        output_logprobs: Some(logprobs.clone()),
        input_logprobs: Some(input),
        ..Default::default()
    };
    let Message::Complete(read) = sglang::read(&mut reader, sglang_complete(end)).unwrap() else { panic!() };
    assert_eq!((read.logprobs, read.prompt_logprobs), (None, None));

    let unequal = [
        sglang_wire::OutputLogProbs { token_ids: vec![1, 2], ..logprobs.clone() },
        sglang_wire::OutputLogProbs { top_logprobs: vec![top.clone(), top], ..logprobs.clone() },
        sglang_wire::OutputLogProbs {
            top_logprobs: vec![sglang_wire::TopLogProbs { values: vec![-1.0], token_ids: vec![] }],
            ..logprobs
        },
    ];
    for logprobs in unequal {
        let chunk = sglang_wire::GenerateStreamChunk { output_logprobs: Some(logprobs), ..Default::default() };
        assert_eq!(sglang::read(&mut Reader::new(1, true), sglang_chunk(chunk)), Err(ReadError::Logprobs));
    }
}

#[test]
fn what_is_no_answer_is_an_error() {
    let empty = sglang_wire::GenerateResponse::default();
    assert_eq!(sglang::read(&mut Reader::new(1, true), empty), Err(ReadError::Empty));
    let stray = tokenspeed_wire::GenerateStreamChunk { index: 1, ..Default::default() };
    let read = tokenspeed::read(&mut Reader::new(1, true), tokenspeed_chunk(stray));
    assert_eq!(read, Err(ReadError::Index { index: 1, samples: 1 }));
    let failed = vllm_wire::GenerateComplete { finish_reason: "error".into(), ..Default::default() };
    let read = vllm::read(&mut Reader::new(1, true), vllm_complete(failed));
    assert_eq!(read, Err(ReadError::EngineFailed));
    assert_eq!(read.unwrap_err().to_string(), "engine finished the request with an error (see engine logs)");
}

#[test]
fn an_engine_that_counts_backwards_does_not_make_the_usage_fall() {
    let mut reader = Reader::new(1, true);
    let chunk =
        tokenspeed_wire::GenerateStreamChunk { token_ids: vec![7, 8], completion_tokens: 3, ..Default::default() };
    tokenspeed::read(&mut reader, tokenspeed_chunk(chunk)).unwrap();
    let end = tokenspeed_wire::GenerateComplete {
        completion_tokens: 2,
        matched_stop: Some(tokenspeed_wire::generate_complete::MatchedStop::MatchedTokenId(2)),
        weight_version: Some("w".into()),
        ..Default::default()
    };
    let Message::Complete(end) = tokenspeed::read(&mut reader, tokenspeed_complete(end)).unwrap() else { panic!() };
    assert_eq!((end.usage.completion_tokens, end.matched_stop), (3, Some(MatchedStop::Token(2))));
    assert_eq!(end.weight_version.as_deref(), Some("w"));
}

#[test]
fn an_end_that_comes_before_its_output_is_an_error_and_no_short_answer() {
    let vllm_end = |tokens: &[u32]| {
        vllm_complete(vllm_wire::GenerateComplete {
            output_ids: tokens.to_vec(),
            completion_tokens: tokens.len() as u32,
            finish_reason: "stop".into(),
            ..Default::default()
        })
    };
    let vllm_piece = |tokens: &[u32]| {
        vllm_chunk(vllm_wire::GenerateStreamChunk {
            token_ids: tokens.to_vec(),
            completion_tokens: tokens.len() as u32,
            ..Default::default()
        })
    };
    let too_early = Err(ReadError::EndBeforeOutput { index: 0 });
    // No chunk at all: with the last tokens, or with a count of more than a stop token that is not told.
    assert_eq!(vllm::read(&mut Reader::new(1, true), vllm_end(&[3])), too_early);
    let counted = |completion_tokens| {
        let stop = tokenspeed_wire::generate_complete::MatchedStop::MatchedTokenId(2);
        let matched_stop = Some(stop);
        tokenspeed_complete(tokenspeed_wire::GenerateComplete { completion_tokens, matched_stop, ..Default::default() })
    };
    assert_eq!(tokenspeed::read(&mut Reader::new(1, true), counted(8)), too_early);
    assert!(tokenspeed::read(&mut Reader::new(1, true), counted(1)).is_ok());
    // The last chunk is missing; so are some, where the end tells all tokens.
    let ends: [(&[u32], bool); 5] =
        [(&[3, 4], false), (&[1, 2, 3, 4], false), (&[1, 2], true), (&[0, 1, 2], true), (&[], true)];
    for (end, holds) in ends {
        let mut reader = Reader::new(1, true);
        vllm::read(&mut reader, vllm_piece(&[0])).unwrap();
        vllm::read(&mut reader, vllm_piece(&[1, 2])).unwrap();
        let read = vllm::read(&mut reader, vllm_end(end));
        assert_eq!(read.is_ok(), holds, "{end:?} {read:?}");
    }
    // What was not asked for in pieces comes whole.
    assert!(vllm::read(&mut Reader::new(1, false), vllm_end(&[1, 2, 3])).is_ok());
}

/// Reads a stream of chunks, given as tokens and count, and its end of so many tokens; what is wrong with it, and with which
/// message.
fn sglang_stream(chunks: &[(&[u32], u32)], counted: u32) -> Result<(), (usize, ReadError)> {
    let mut reader = Reader::new(1, true);
    for (at, (tokens, counted)) in chunks.iter().enumerate() {
        let chunk = sglang_wire::GenerateStreamChunk {
            token_ids: tokens.to_vec(),
            completion_tokens: *counted,
            ..Default::default()
        };
        sglang::read(&mut reader, sglang_chunk(chunk)).map_err(|error| (at, error))?;
    }
    let end = sglang_wire::GenerateComplete {
        output_ids: chunks.last().map(|(tokens, _)| tokens.to_vec()).unwrap_or_default(),
        completion_tokens: counted,
        finish_reason: "length".into(),
        ..Default::default()
    };
    sglang::read(&mut reader, sglang_complete(end)).map(drop).map_err(|error| (chunks.len(), error))
}

/// The same on TokenSpeed; `stop` = the token that ended it, if one did.
fn tokenspeed_stream(chunks: &[(&[u32], u32)], counted: u32, stop: Option<u32>) -> Result<(), (usize, ReadError)> {
    let mut reader = Reader::new(1, true);
    for (at, (tokens, counted)) in chunks.iter().enumerate() {
        let chunk = tokenspeed_wire::GenerateStreamChunk {
            token_ids: tokens.to_vec(),
            completion_tokens: *counted,
            ..Default::default()
        };
        tokenspeed::read(&mut reader, tokenspeed_chunk(chunk)).map_err(|error| (at, error))?;
    }
    let end = tokenspeed_wire::GenerateComplete {
        output_ids: chunks.last().map(|(tokens, _)| tokens.to_vec()).unwrap_or_default(),
        completion_tokens: counted,
        finish_reason: if stop.is_some() { "stop" } else { "length" }.into(),
        matched_stop: stop.map(tokenspeed_wire::generate_complete::MatchedStop::MatchedTokenId),
        ..Default::default()
    };
    tokenspeed::read(&mut reader, tokenspeed_complete(end)).map(drop).map_err(|error| (chunks.len(), error))
}

#[test]
fn a_chunk_that_was_lost_on_the_way_is_noticed_by_the_count_of_the_next() {
    let lost = |at, counted, sent| Err((at, ReadError::Lost { index: 0, counted, sent }));
    assert_eq!(sglang_stream(&[(&[1], 1), (&[2, 3], 3), (&[4], 4)], 4), Ok(()));
    assert_eq!(sglang_stream(&[(&[1], 1), (&[4], 4)], 4), lost(1, 4, 2));
    assert_eq!(sglang_stream(&[(&[2, 3], 3), (&[4], 4)], 4), lost(0, 3, 2), "the first");
    assert_eq!(
        sglang_stream(&[(&[1], 1), (&[2, 3], 3)], 4),
        lost(2, 4, 3),
        "the last, before an end that repeats none"
    );
    // Who does not count, or falls behind, tells of no loss.
    assert_eq!(sglang_stream(&[(&[1], 0), (&[2, 3], 0)], 0), Ok(()));
    assert_eq!(sglang_stream(&[(&[1, 2], 1), (&[3], 3)], 3), Ok(()));
}

#[test]
fn a_stop_token_that_is_counted_and_not_sent_is_no_loss_and_hides_none() {
    let lost = |at, counted, sent| Err((at, ReadError::Lost { index: 0, counted, sent }));
    let whole: &[(&[u32], u32)] = &[(&[1], 1), (&[2], 2)];
    assert_eq!(tokenspeed_stream(whole, 2, None), Ok(()));
    // In the last chunk beside other tokens, as all of it, which is then not sent, or asked for and sent.
    assert_eq!(tokenspeed_stream(&[(&[1], 1), (&[2], 3)], 3, Some(9)), Ok(()));
    assert_eq!(tokenspeed_stream(whole, 3, Some(9)), Ok(()));
    assert_eq!(tokenspeed_stream(&[(&[1], 1), (&[2, 9], 3)], 3, Some(9)), Ok(()));
    assert_eq!(tokenspeed_stream(&[(&[], 1)], 1, Some(9)), Ok(()), "an answer of nothing");
    // One token is lost, then two, then one without a stop token.
    assert_eq!(tokenspeed_stream(&[(&[1], 1), (&[3], 3), (&[4], 4)], 4, Some(9)), lost(2, 4, 3));
    assert_eq!(tokenspeed_stream(&[(&[1], 1), (&[4], 4)], 4, Some(9)), lost(1, 4, 2));
    assert_eq!(tokenspeed_stream(&[(&[1], 1), (&[3], 3)], 4, Some(9)), lost(2, 4, 2));
    assert_eq!(tokenspeed_stream(&[(&[1], 1), (&[3], 3)], 3, None), lost(2, 3, 2));
}

#[test]
fn an_answer_in_one_piece_has_all_tokens_that_its_engine_counts() {
    let read = |output_ids: Vec<u32>| {
        let whole = sglang_wire::GenerateComplete { output_ids, completion_tokens: 3, ..Default::default() };
        sglang::read(&mut Reader::new(1, false), sglang_complete(whole)).map(drop)
    };
    assert_eq!(read(vec![1, 2, 3]), Ok(()));
    assert_eq!(read(vec![1, 2]), Err(ReadError::Lost { index: 0, counted: 3, sent: 2 }));
}

#[test]
fn what_a_mooncake_prefill_holds_is_its_handoff_once_it_has_ended_by_its_limit() {
    for (finish_reason, held) in [("length", true), ("stop", false), ("abort", false)] {
        let mut reader = Reader::new(1, false).handing_over(Some("{}".into()));
        let whole = vllm_wire::GenerateComplete { finish_reason: finish_reason.into(), ..Default::default() };
        let Message::Complete(end) = vllm::read(&mut reader, vllm_complete(whole)).unwrap() else { panic!() };
        assert_eq!(end.kv_transfer_params.is_some(), held, "{finish_reason}");
    }
}

#[test]
fn tokens_with_log_probabilities_are_told_one_by_one_with_their_own() {
    let whole = |logprobs: Option<vllm_wire::OutputLogProbs>| {
        let complete = vllm_wire::GenerateComplete {
            output_ids: vec![1, 2, 3],
            completion_tokens: 3,
            finish_reason: "stop".into(),
            output_logprobs: logprobs,
            ..Default::default()
        };
        vllm::read(&mut Reader::new(1, false), vllm_complete(complete)).unwrap()
    };
    let top = |id: u32| vllm_wire::TopLogProbs { values: vec![-1.0], token_ids: vec![id] };
    let logprobs = vllm_wire::OutputLogProbs {
        token_ids: vec![1, 2, 3],
        token_logprobs: vec![-0.1, -0.2, -0.3],
        top_logprobs: vec![top(7), top(8), top(9)],
    };
    let (chunks, last) = whole(Some(logprobs)).by_token();
    let mut told: Vec<_> = chunks.into_iter().map(|chunk| (chunk.token_ids, chunk.logprobs.unwrap())).collect();
    let Message::Complete(end) = last else { panic!() };
    assert_eq!((&end.reason, end.usage.completion_tokens), (&FinishReason::Stop, 3));
    told.push((end.token_ids, end.logprobs.unwrap()));
    for (number, (tokens, logprobs)) in (1..).zip(told) {
        let value = -0.1 * number as f32;
        assert_eq!((tokens, &logprobs.token_ids), (vec![number], &vec![number]));
        assert!((logprobs.logprobs[0] - value).abs() < 1e-6);
        assert_eq!(logprobs.top, [[(number + 6, -1.0)]]);
    }
    let plain = whole(None);
    assert_eq!(plain.clone().by_token(), (Vec::new(), plain), "without any there is nothing to tell apart");
}
