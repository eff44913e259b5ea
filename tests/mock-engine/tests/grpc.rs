//! The gRPC servicers: what they answer, and what they do not let a gateway get away with.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::time::Duration;

use mock_engine::{
    CallEnd, CallFault, Connector, Engine, MockEngine, Role, decode, encode, end_of_answer, expected_tokens,
};
use sha2::{Digest as _, Sha256};
use smg_services::engines::common::GetTokenizerRequest;
use smg_services::engines::sglang::sglang_scheduler_client::SglangSchedulerClient;
use smg_services::engines::tokenspeed::token_speed_scheduler_client::TokenSpeedSchedulerClient;
use smg_services::engines::vllm::vllm_engine_client::VllmEngineClient;
use smg_services::engines::{sglang, tokenspeed, vllm};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status, Streaming};

/// Longest wait for what takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(20);

async fn channel(engine: &MockEngine) -> Channel {
    Endpoint::from_shared(engine.url().replacen("grpc", "http", 1)).unwrap().connect().await.unwrap()
}

async fn on_sglang(engine: &MockEngine) -> SglangSchedulerClient<Channel> {
    SglangSchedulerClient::new(channel(engine).await)
}

async fn on_vllm(engine: &MockEngine) -> VllmEngineClient<Channel> {
    VllmEngineClient::new(channel(engine).await)
}

async fn on_tokenspeed(engine: &MockEngine) -> TokenSpeedSchedulerClient<Channel> {
    TokenSpeedSchedulerClient::new(channel(engine).await)
}

async fn engine(engine: Engine, role: Role) -> MockEngine {
    MockEngine::builder().engine(engine).role(role).grpc().start().await.unwrap()
}

fn sglang_request(id: &str, tokens: u32) -> sglang::GenerateRequest {
    sglang::GenerateRequest {
        request_id: id.into(),
        tokenized: Some(sglang::TokenizedInput { original_text: String::new(), input_ids: vec![5, 6, 7] }),
        sampling_params: Some(sglang::SamplingParams { n: 1, max_new_tokens: Some(tokens), ..Default::default() }),
        stream: true,
        ..Default::default()
    }
}

fn meeting(request: sglang::GenerateRequest, prefill: &MockEngine, room: i32) -> sglang::GenerateRequest {
    let disaggregated_params = Some(sglang::DisaggregatedParams {
        bootstrap_host: "127.0.0.1".into(),
        bootstrap_port: prefill.bootstrap_port().unwrap().into(),
        bootstrap_room: room,
    });
    sglang::GenerateRequest { disaggregated_params, ..request }
}

fn vllm_request(id: &str, tokens: u32) -> vllm::GenerateRequest {
    let tokenized = vllm::TokenizedInput { original_text: String::new(), input_ids: vec![5, 6, 7] };
    vllm::GenerateRequest {
        request_id: id.into(),
        input: Some(vllm::generate_request::Input::Tokenized(tokenized)),
        sampling_params: Some(vllm::SamplingParams { max_tokens: Some(tokens), ..Default::default() }),
        ..Default::default()
    }
}

fn tokenspeed_request(id: &str, tokens: u32) -> tokenspeed::GenerateRequest {
    tokenspeed::GenerateRequest {
        request_id: id.into(),
        tokenized: Some(tokenspeed::TokenizedInput { original_text: String::new(), input_ids: vec![5, 6, 7] }),
        sampling_params: Some(tokenspeed::SamplingParams { max_new_tokens: Some(tokens), ..Default::default() }),
        stream: true,
        ..Default::default()
    }
}

/// The messages of an answer, or the status it ends with.
async fn all<T>(mut stream: Streaming<T>) -> Result<Vec<T>, Status> {
    let mut messages = Vec::new();
    while let Some(message) = stream.message().await? {
        messages.push(message);
    }
    Ok(messages)
}

async fn sglang_answer(
    engine: &MockEngine,
    request: sglang::GenerateRequest,
) -> Result<(Vec<sglang::GenerateStreamChunk>, sglang::GenerateComplete), Status> {
    let messages = all(on_sglang(engine).await.generate(request).await?.into_inner()).await?;
    let mut chunks = Vec::new();
    for message in messages {
        match message.response.unwrap() {
            sglang::generate_response::Response::Chunk(chunk) => chunks.push(chunk),
            sglang::generate_response::Response::Complete(complete) => return Ok((chunks, complete)),
        }
    }
    panic!("no end")
}

async fn vllm_whole(engine: &MockEngine, request: vllm::GenerateRequest) -> Result<vllm::GenerateComplete, Status> {
    let messages = all(on_vllm(engine).await.generate(request).await?.into_inner()).await?;
    let [vllm::GenerateResponse { response: Some(vllm::generate_response::Response::Complete(complete)) }] =
        &messages[..]
    else {
        panic!("{messages:?}")
    };
    Ok(complete.clone())
}

async fn tokenspeed_end(
    engine: &MockEngine,
    request: tokenspeed::GenerateRequest,
) -> Result<(Vec<u32>, tokenspeed::GenerateComplete), Status> {
    let messages = all(on_tokenspeed(engine).await.generate(request).await?.into_inner()).await?;
    let mut tokens = Vec::new();
    for message in messages {
        match message.response.unwrap() {
            tokenspeed::generate_response::Response::Chunk(chunk) => tokens.extend(chunk.token_ids),
            tokenspeed::generate_response::Response::Complete(complete) => return Ok((tokens, complete)),
        }
    }
    panic!("no end")
}

fn nothing_is_left(engines: &[&MockEngine]) {
    for engine in engines {
        assert_eq!((engine.open_requests(), engine.held_kv()), (vec![], 0));
    }
}

#[tokio::test]
async fn an_engine_answers_its_own_service_only() {
    let engines = [Engine::Sglang, Engine::Vllm, Engine::Tokenspeed];
    for (position, kind) in engines.into_iter().enumerate() {
        let engine = engine(kind, Role::Regular).await;
        let answered = [
            on_sglang(&engine).await.health_check(sglang::HealthCheckRequest {}).await.map(|_| ()),
            on_vllm(&engine).await.health_check(vllm::HealthCheckRequest {}).await.map(|_| ()),
            on_tokenspeed(&engine).await.health_check(tokenspeed::HealthCheckRequest {}).await.map(|_| ()),
        ];
        for (other, answer) in answered.into_iter().enumerate() {
            match answer {
                Ok(()) => assert_eq!(other, position),
                Err(status) => assert_eq!((status.code(), other != position), (Code::Unimplemented, true)),
            }
        }
    }
    assert!(MockEngine::builder().engine(Engine::Tokenspeed).start().await.is_err(), "it has no HTTP");
}

#[tokio::test]
async fn each_engine_counts_in_its_own_way() {
    let engine = engine(Engine::Sglang, Role::Regular).await;
    let (chunks, end) = sglang_answer(&engine, sglang_request("a", 3)).await.unwrap();
    let counts: Vec<_> = chunks.iter().map(|chunk| (chunk.token_ids.len(), chunk.completion_tokens)).collect();
    assert_eq!(counts, [(1, 1), (1, 2), (1, 3)], "all so far");
    let tokens: Vec<u32> = chunks.iter().flat_map(|chunk| chunk.token_ids.clone()).collect();
    assert_eq!(tokens, expected_tokens(&[5, 6, 7], 3));
    assert_eq!((end.output_ids, end.completion_tokens), (tokens[2..].to_vec(), 3), "the last again");
    assert_eq!((end.finish_reason.as_str(), end.prompt_tokens), ("length", 3));
    let whole = sglang::GenerateRequest { stream: false, ..sglang_request("b", 3) };
    let (chunks, end) = sglang_answer(&engine, whole).await.unwrap();
    assert_eq!((chunks.len(), end.output_ids), (0, tokens.clone()));

    let engine = self::engine(Engine::Vllm, Role::Regular).await;
    let streamed = vllm::GenerateRequest { stream: true, ..vllm_request("a", 3) };
    let messages = all(on_vllm(&engine).await.generate(streamed).await.unwrap().into_inner()).await.unwrap();
    let counts: Vec<u32> = messages
        .iter()
        .map(|message| match message.response.as_ref().unwrap() {
            vllm::generate_response::Response::Chunk(chunk) => chunk.completion_tokens,
            vllm::generate_response::Response::Complete(complete) => complete.completion_tokens,
        })
        .collect();
    assert_eq!(counts, [1, 1, 1, 1], "new ones only, and the last again");
    assert_eq!(vllm_whole(&engine, vllm_request("b", 3)).await.unwrap().output_ids, tokens);

    let engine = self::engine(Engine::Tokenspeed, Role::Regular).await;
    let (streamed, end) = tokenspeed_end(&engine, tokenspeed_request("a", 3)).await.unwrap();
    assert_eq!((streamed, end.completion_tokens), (tokens, 3));
    nothing_is_left(&[&engine]);
}

#[tokio::test]
async fn an_answer_says_what_it_is_told_to_and_then_ends() {
    let text = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": \"é🙂\"}}\n</tool_call>";
    let engine = engine(Engine::Sglang, Role::Regular).await;
    engine.replies_with(Some(text));
    let (chunks, end) = sglang_answer(&engine, sglang_request("a", 500)).await.unwrap();
    let tokens: Vec<u32> = chunks.into_iter().flat_map(|chunk| chunk.token_ids).collect();
    assert_eq!((decode(&tokens).as_str(), tokens.last()), (text, Some(&end_of_answer())));
    let stop = sglang::generate_complete::MatchedStop::MatchedTokenId(end_of_answer());
    assert_eq!((end.finish_reason.as_str(), end.matched_stop), ("stop", Some(stop)));

    let engine = self::engine(Engine::Tokenspeed, Role::Regular).await;
    engine.replies_with(Some("river summit"));
    let (tokens, end) = tokenspeed_end(&engine, tokenspeed_request("a", 500)).await.unwrap();
    assert_eq!(tokens, encode("river summit"), "the token that ended it is trimmed");
    assert_eq!(end.finish_reason, "stop");

    let engine = self::engine(Engine::Vllm, Role::Regular).await;
    engine.replies_with(Some("river summit END more"));
    let mut request = vllm_request("a", 500);
    request.sampling_params.as_mut().unwrap().stop = vec!["END".into()];
    let end = vllm_whole(&engine, request).await.unwrap();
    assert_eq!(decode(&end.output_ids), "river summit END");
    assert_eq!(end.matched_stop, Some(vllm::generate_complete::MatchedStop::MatchedStopStr("END".into())));
    engine.replies_with(None);
    let end = vllm_whole(&engine, vllm_request("b", 4)).await.unwrap();
    assert_eq!(end.output_ids, expected_tokens(&[5, 6, 7], 4));
}

#[tokio::test]
async fn an_sglang_pair_meets_in_a_room_and_answers_as_one_engine() {
    let (prefill, decode) = (engine(Engine::Sglang, Role::Prefill).await, engine(Engine::Sglang, Role::Decode).await);
    let request = |stream| sglang::GenerateRequest { stream, ..sglang_request("a", 4) };
    let (first, second) = tokio::join!(
        sglang_answer(&prefill, meeting(request(true), &prefill, 7)),
        sglang_answer(&decode, meeting(request(true), &prefill, 7)),
    );
    let tokens: Vec<u32> = second.as_ref().unwrap().0.iter().flat_map(|chunk| chunk.token_ids.clone()).collect();
    assert_eq!(tokens, expected_tokens(&[5, 6, 7], 4));
    assert_eq!(first.unwrap().1.cached_tokens, 0);
    assert_eq!(second.unwrap().1.cached_tokens, 3, "to the decode all of the prompt looks cached");
    assert_eq!((decode.external_prompt_tokens(), decode.local_prompt_tokens()), (3, 0));

    let (first, second) = tokio::join!(
        sglang_answer(&prefill, meeting(sglang_request("b", 4), &prefill, 7)),
        sglang_answer(&decode, meeting(sglang_request("b", 4), &prefill, 7)),
    );
    assert_eq!(
        (first.unwrap_err().code(), second.unwrap_err().code()),
        (Code::Internal, Code::Internal),
        "a room serves once"
    );
    nothing_is_left(&[&prefill, &decode]);
}

#[tokio::test]
async fn a_decode_whose_prefill_never_comes_is_silent_and_an_abort_frees_it() {
    let (prefill, decode) = (engine(Engine::Sglang, Role::Prefill).await, engine(Engine::Sglang, Role::Decode).await);
    let mut client = on_sglang(&decode).await;
    let request = meeting(sglang_request("a", 4), &prefill, 7);
    let waiting = tokio::spawn({
        let mut client = client.clone();
        async move { client.generate(request).await }
    });
    decode.wait_until(PATIENCE, |engine| engine.open_requests() == ["a"]).await.unwrap();
    assert!(!waiting.is_finished(), "headers go out with the first message");
    let abort = |id: &str| sglang::AbortRequest { request_id: id.into(), reason: "Stream dropped".into() };
    let unknown = client.abort(abort("b")).await.unwrap().into_inner();
    assert_eq!((unknown.success, unknown.message.as_str()), (false, "Request b not found"));
    assert!(client.abort(abort("a")).await.unwrap().into_inner().success);
    assert!(!client.abort(abort("a")).await.unwrap().into_inner().success, "again is no error");
    let answer = all(waiting.await.unwrap().unwrap().into_inner()).await.unwrap();
    let Some(sglang::generate_response::Response::Complete(end)) = &answer[0].response else { panic!() };
    assert_eq!(end.finish_reason, "abort");
    let calls = decode.calls();
    assert_eq!((calls[0].end.clone(), calls[0].dropped_at), (Some(CallEnd::Aborted), None));
    let known: Vec<_> = decode.aborts().iter().map(|abort| (abort.request_id.clone(), abort.known)).collect();
    assert_eq!(known, [("b".to_owned(), false), ("a".to_owned(), true), ("a".to_owned(), false)]);
    nothing_is_left(&[&prefill, &decode]);
}

#[tokio::test]
async fn an_abort_of_sglang_means_every_request_whose_id_begins_so() {
    let engine = engine(Engine::Sglang, Role::Regular).await;
    engine.set_call_fault(CallFault::generate().hang());
    let mut client = on_sglang(&engine).await;
    for id in ["a-1", "a-10", "b"] {
        let mut client = client.clone();
        let request = sglang_request(id, 4);
        tokio::spawn(async move { client.generate(request).await });
    }
    engine.wait_until(PATIENCE, |engine| engine.open_requests().len() == 3).await.unwrap();
    client.abort(sglang::AbortRequest { request_id: "a-1".into(), reason: String::new() }).await.unwrap();
    engine.wait_until(PATIENCE, |engine| engine.open_requests() == ["b"]).await.unwrap();
}

#[tokio::test]
async fn a_dropped_call_ends_its_request_unless_the_engine_overlooks_it() {
    for overlooks in [false, true] {
        let engine = MockEngine::builder()
            .engine(Engine::Vllm)
            .grpc()
            .token_delay(Duration::from_secs(60))
            .overlooks_dropped_calls(overlooks)
            .start()
            .await
            .unwrap();
        let mut client = on_vllm(&engine).await;
        let request = vllm::GenerateRequest { stream: true, ..vllm_request("a", 4) };
        let mut stream = client.generate(request).await.unwrap().into_inner();
        stream.message().await.unwrap().unwrap();
        drop(stream);
        engine.wait_until(PATIENCE, |engine| engine.calls()[0].dropped_at.is_some()).await.unwrap();
        if overlooks {
            assert_eq!(engine.open_requests(), ["a"]);
            client.abort(vllm::AbortRequest { request_ids: vec!["a".into(), "x".into()] }).await.unwrap();
        }
        engine.wait_until(PATIENCE, |engine| engine.open_requests().is_empty()).await.unwrap();
        let end = if overlooks { CallEnd::Aborted } else { CallEnd::Dropped };
        assert_eq!(engine.calls()[0].end, Some(end));
    }
}

#[tokio::test]
async fn sglang_refuses_what_needs_a_tokenizer_and_a_leg_without_its_rendezvous() {
    let engine = engine(Engine::Sglang, Role::Decode).await;
    let mut request = sglang_request("a", 4);
    request.sampling_params.as_mut().unwrap().stop = vec!["END".into()];
    assert_eq!(sglang_answer(&engine, request).await.unwrap_err().code(), Code::InvalidArgument);
    let without = sglang_answer(&engine, sglang_request("b", 4)).await.unwrap_err();
    assert_eq!(without.code(), Code::InvalidArgument);
    let mut request = sglang_request("c", 4);
    request.sampling_params.as_mut().unwrap().n = 0;
    assert_eq!(sglang_answer(&engine, request).await.unwrap_err().code(), Code::InvalidArgument);
    assert!(matches!(engine.calls()[0].end, Some(CallEnd::Failed(Code::InvalidArgument, _))));
    nothing_is_left(&[&engine]);
}

#[tokio::test]
async fn nixl_hands_over_what_a_tagged_prefill_computed_once() {
    let start = |role| MockEngine::builder().engine(Engine::Vllm).role(role).connector(Connector::Nixl).grpc().start();
    let (prefill, decode) = (start(Role::Prefill).await.unwrap(), start(Role::Decode).await.unwrap());
    let untagged = vllm_whole(&prefill, vllm_request("untagged", 1)).await.unwrap();
    assert_eq!(untagged.kv_transfer_params_json, None);
    let tagged = vllm::GenerateRequest {
        kv_transfer_params_json: Some(r#"{"do_remote_decode":true,"do_remote_prefill":false}"#.into()),
        ..vllm_request("a", 1)
    };
    let handoff = vllm_whole(&prefill, tagged.clone()).await.unwrap();
    let legacy = handoff.kv_transfer_params.unwrap();
    assert_eq!(legacy.remote_port, u32::from(prefill.side_channel_port().unwrap()));
    let params = handoff.kv_transfer_params_json.unwrap();
    for field in ["remote_engine_id", "remote_block_ids", "remote_request_id", "remote_host", "remote_port", "tp_size"]
    {
        assert!(params.contains(field), "{field}: {params}");
    }
    assert_eq!(prefill.held_kv(), 1);
    let second = vllm::GenerateRequest { kv_transfer_params_json: Some(params.clone()), ..vllm_request("a", 4) };
    let answer = vllm_whole(&decode, second.clone()).await.unwrap();
    assert_eq!((answer.output_ids, answer.cached_tokens), (expected_tokens(&[5, 6, 7], 4), 3));
    assert_eq!(decode.external_prompt_tokens(), 3);
    assert_eq!(vllm_whole(&decode, second).await.unwrap_err().code(), Code::Internal, "it serves once");
    let again = vllm_whole(&prefill, tagged).await.unwrap_err();
    assert_eq!(again.code(), Code::InvalidArgument, "an id that is used again collides");
    let stopped = vllm::GenerateRequest {
        kv_transfer_params_json: Some(r#"{"do_remote_decode":true}"#.into()),
        ..vllm_request("b", 100)
    };
    prefill.replies_with(Some("x"));
    assert_eq!(vllm_whole(&prefill, stopped).await.unwrap().kv_transfer_params_json, None, "it ended by itself");
    nothing_is_left(&[&prefill, &decode]);
}

#[tokio::test]
async fn mooncake_meets_by_transfer_id_and_the_older_form_moves_nothing() {
    let start =
        |role| MockEngine::builder().engine(Engine::Vllm).role(role).connector(Connector::Mooncake).grpc().start();
    let (prefill, decode) = (start(Role::Prefill).await.unwrap(), start(Role::Decode).await.unwrap());
    let tag = r#"{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"xfer-1"}"#;
    let first = vllm::GenerateRequest { kv_transfer_params_json: Some(tag.into()), ..vllm_request("a", 1) };
    assert_eq!(vllm_whole(&prefill, first).await.unwrap().kv_transfer_params_json, None);
    let params = format!(
        r#"{{"do_remote_prefill":true,"transfer_id":"xfer-1","remote_engine_id":"{}","remote_bootstrap_addr":"http://127.0.0.1:{}"}}"#,
        prefill.engine_id(),
        prefill.bootstrap_port().unwrap(),
    );
    let second = vllm::GenerateRequest { kv_transfer_params_json: Some(params), ..vllm_request("a", 4) };
    assert_eq!(vllm_whole(&decode, second).await.unwrap().output_ids, expected_tokens(&[5, 6, 7], 4));
    assert_eq!(decode.external_prompt_tokens(), 3);

    let legacy = |host: &str, remote_port| vllm::GenerateRequest {
        kv_transfer_params: Some(vllm::KvTransferParams { remote_host: host.into(), remote_port }),
        ..vllm_request("b", 4)
    };
    vllm_whole(&decode, legacy("127.0.0.1", 8998)).await.unwrap();
    assert_eq!(decode.local_prompt_tokens(), 3, "computed again");
    for bad in [legacy("", 8998), legacy("h", 0), legacy("h", 70_000)] {
        assert_eq!(vllm_whole(&decode, bad).await.unwrap_err().code(), Code::InvalidArgument);
    }
    for bad in ["", "[]", "{"] {
        let bad = vllm::GenerateRequest { kv_transfer_params_json: Some(bad.into()), ..vllm_request("c", 4) };
        assert_eq!(vllm_whole(&decode, bad).await.unwrap_err().code(), Code::InvalidArgument);
    }
    nothing_is_left(&[&prefill, &decode]);
}

#[tokio::test]
async fn a_servicer_reports_the_one_child_of_a_multi_connector_that_moves_kv() {
    let reported = async |children: Vec<(Connector, Option<String>)>| {
        let engine = MockEngine::builder()
            .engine(Engine::Vllm)
            .connector(Connector::Multi(children))
            .engine_id("parent")
            .grpc()
            .start()
            .await
            .unwrap();
        let info = on_vllm(&engine).await.get_server_info(vllm::GetServerInfoRequest {}).await.unwrap().into_inner();
        (info.kv_connector, info.kv_engine_id)
    };
    let store = || (Connector::Other("MooncakeStoreConnector".into()), None);
    let own = reported(vec![store(), (Connector::Nixl, Some("child".into()))]).await;
    assert_eq!(own, ("NixlConnector".to_owned(), "child".to_owned()));
    let inherited = reported(vec![(Connector::Mooncake, None), store()]).await;
    assert_eq!(inherited, ("MooncakeConnector".to_owned(), "parent".to_owned()));
    let two = reported(vec![(Connector::Nixl, None), (Connector::Mooncake, None)]).await;
    assert_eq!(two, ("MultiConnector".to_owned(), "parent".to_owned()));
    assert_eq!(reported(vec![store()]).await.0, "MultiConnector");
}

#[tokio::test]
async fn a_tokenspeed_room_decides_the_rank_and_samples_differ_by_seed() {
    let start = |role| MockEngine::builder().engine(Engine::Tokenspeed).role(role).dp_size(4).grpc().start();
    let (prefill, decode) = (start(Role::Prefill).await.unwrap(), start(Role::Decode).await.unwrap());
    let leg = |id: &str, room, seed| {
        let mut request = tokenspeed_request(id, 4);
        request.sampling_params.as_mut().unwrap().sampling_seed = seed;
        request.kv_bootstrap_info = Some(tokenspeed::KvBootstrapInfo {
            bootstrap_host: "127.0.0.1".into(),
            bootstrap_port: prefill.bootstrap_port().unwrap().into(),
            bootstrap_room: room,
        });
        request
    };
    let mut answers = Vec::new();
    for (room, seed) in [(i64::MAX - 1, None), (6, Some(1)), (10, Some(2)), (14, Some(2))] {
        let id = room.to_string();
        let (first, second) =
            tokio::join!(tokenspeed_end(&prefill, leg(&id, room, seed)), tokenspeed_end(&decode, leg(&id, room, seed)));
        first.unwrap();
        answers.push(second.unwrap().0);
    }
    assert_eq!(answers[0], expected_tokens(&[5, 6, 7], 4));
    assert_ne!(answers[1], answers[2]);
    assert_eq!(answers[2], answers[3]);
    assert!(decode.calls().iter().chain(&prefill.calls()).all(|call| call.rank == Some(2)));
    nothing_is_left(&[&prefill, &decode]);
}

#[tokio::test]
async fn the_running_window_holds_and_its_peak_is_remembered() {
    let engine = MockEngine::builder()
        .engine(Engine::Tokenspeed)
        .max_running(2)
        .token_delay(Duration::from_millis(5))
        .grpc()
        .start()
        .await
        .unwrap();
    let answers = (0..6).map(|number| tokenspeed_end(&engine, tokenspeed_request(&number.to_string(), 4)));
    for answer in futures::future::join_all(answers).await {
        answer.unwrap();
    }
    assert_eq!(engine.peak_running(), 2);
    assert!(engine.peak_active() > 2);
    let request = tokenspeed::GetLoadsRequest { dp_rank: None, include: vec!["core".into(), "queues".into()] };
    let loads = on_tokenspeed(&engine).await.get_loads(request).await.unwrap().into_inner();
    assert_eq!((loads.loads[0].max_running_requests, loads.loads[0].num_running_reqs), (2, 0));
    assert!(loads.loads[0].queues.is_some() && loads.loads[0].memory.is_none());
}

#[tokio::test]
async fn the_tokenizer_comes_in_pieces_and_the_last_bears_the_hash() {
    let engine = engine(Engine::Vllm, Role::Regular).await;
    let stream = on_vllm(&engine).await.get_tokenizer(GetTokenizerRequest {}).await.unwrap().into_inner();
    let pieces = all(stream).await.unwrap();
    assert!(pieces.len() >= 2);
    let (last, others) = pieces.split_last().unwrap();
    assert!(others.iter().all(|piece| piece.sha256.is_empty()));
    let archive: Vec<u8> = pieces.iter().flat_map(|piece| piece.data.clone()).collect();
    let hash: String = Sha256::digest(&archive).iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(last.sha256, hash);
    assert!(archive.starts_with(b"PK\x03\x04"));
    let names = ["tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"];
    let held = |name: &str| archive.windows(name.len()).any(|window| window == name.as_bytes());
    assert!(names.into_iter().all(held));
}

#[tokio::test]
async fn faults_spoil_answers_in_the_way_they_say() {
    let engine = engine(Engine::Sglang, Role::Regular).await;
    let answer = async |id: &str, fault: CallFault| {
        engine.set_call_fault(fault.times(1));
        sglang_answer(&engine, sglang_request(id, 4)).await
    };
    let refused = answer(
        "refused",
        CallFault::generate().refuse(Code::FailedPrecondition, "grammar").trailer("smg-constraint-failed", "engine"),
    )
    .await
    .unwrap_err();
    assert_eq!((refused.code(), refused.message()), (Code::FailedPrecondition, "grammar"));
    assert_eq!(refused.metadata().get("smg-constraint-failed").unwrap(), "engine");
    let broken = answer("broken", CallFault::generate().fail_after(2, Code::Internal, "boom")).await.unwrap_err();
    assert_eq!((broken.code(), broken.message()), (Code::Internal, "boom"));
    assert!(answer("cut", CallFault::generate().cut_after(1)).await.is_err());
    let (_, end) = answer("reordered", CallFault::generate().out_of_order()).await.unwrap();
    assert_eq!(end.completion_tokens, 4);
    let (chunks, end) = answer("misnumbered", CallFault::generate().wrong_sample()).await.unwrap();
    assert_eq!((chunks[0].index, end.index), (1, 1));
    let garbage = answer("garbage", CallFault::generate().garbage(b"\xff\xff\xff")).await.unwrap_err();
    assert_ne!(garbage.code(), Code::Ok);
    let large = answer("large", CallFault::generate().too_large(5 << 20)).await.unwrap_err();
    assert_eq!(large.code(), Code::OutOfRange);
    let ends: BTreeMap<String, CallEnd> =
        engine.calls().into_iter().map(|call| (call.request_id().to_owned(), call.end.unwrap())).collect();
    assert_eq!((ends["broken"].clone(), ends["cut"].clone()), (CallEnd::Faulty, CallEnd::Faulty));
    assert!(!ends.contains_key("garbage"), "the engine did not see it");
    engine.set_call_fault(CallFault::method("GetServerInfo").refuse(Code::Unavailable, "starting").times(1));
    let mut client = on_sglang(&engine).await;
    assert_eq!(client.get_server_info(sglang::GetServerInfoRequest {}).await.unwrap_err().code(), Code::Unavailable);
    assert!(client.get_server_info(sglang::GetServerInfoRequest {}).await.is_ok());
    nothing_is_left(&[&engine]);
}

#[tokio::test]
async fn log_probabilities_come_for_new_tokens_and_for_the_prompt_once() {
    let engine = engine(Engine::Sglang, Role::Regular).await;
    let request = sglang::GenerateRequest {
        return_logprob: true,
        top_logprobs_num: 2,
        logprob_start_len: 0,
        ..sglang_request("a", 2)
    };
    let (chunks, end) = sglang_answer(&engine, request).await.unwrap();
    assert_eq!(chunks.iter().filter(|chunk| chunk.input_logprobs.is_some()).count(), 1);
    let input = chunks[0].input_logprobs.as_ref().unwrap();
    assert_eq!((input.token_ids.len(), input.token_logprobs[0].value), (3, None));
    let output = chunks[1].output_logprobs.as_ref().unwrap();
    assert_eq!((output.token_ids.clone(), output.top_logprobs[0].values.len()), (chunks[1].token_ids.clone(), 2));
    assert!(end.input_logprobs.is_none());
}
