//! The documented tables of requests over gRPC, row by row: sampling parameters, rendezvous, handoffs, samples.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use smg_apis::Generation;
use smg_apis::generation::{Constraint, Logprobs, Prompt, Reading, Sampling};
use smg_engines::grpc::vllm::{HandoffSource, MoriioUnsupported, Prefill};
use smg_engines::grpc::{
    Ask, Message, Reader, Rendezvous, RequestError, Residue, SamplingDefaults, sglang, tokenspeed, vllm,
};
use smg_engines::sglang::Ranks;
use smg_engines::vllm::{Connector, MooncakePeer};
use smg_messages::engines::vllm::{ChoiceConstraint, KvTransferParams};
use smg_messages::engines::{sglang as sglang_wire, tokenspeed as tokenspeed_wire, vllm as vllm_wire};
use uuid::Uuid;

const TRANSFER: Uuid = Uuid::from_u128(0x0190_0000_0000_7000_8000_0000_0000_0001);

fn generation() -> Generation {
    Generation {
        model: None,
        request_id: None,
        prompt: Prompt::Tokens(vec![vec![5, 6]]),
        sampling: Sampling::default(),
        samples: 1,
        stream: true,
        stream_usage: false,
        logprobs: None,
        constraint: None,
        reading: Reading { skip_special_tokens: true, ..Reading::default() },
    }
}

fn ask<'a>(generation: &'a Generation, defaults: &'a SamplingDefaults) -> Ask<'a> {
    Ask {
        request_id: "chatcmpl-1",
        generation,
        token_ids: &[5, 6],
        stop_tokens: &[],
        defaults,
        samples: generation.samples,
        stream: generation.stream,
    }
}

const NO_DEFAULTS: SamplingDefaults = SamplingDefaults::NONE;

fn on_sglang(generation: &Generation) -> (sglang_wire::GenerateRequest, sglang_wire::SamplingParams) {
    let request = sglang::request(&ask(generation, &NO_DEFAULTS)).unwrap();
    let params = request.sampling_params.clone().unwrap();
    (request, params)
}

fn on_vllm(generation: &Generation) -> (vllm_wire::GenerateRequest, vllm_wire::SamplingParams) {
    let request = vllm::request(&ask(generation, &NO_DEFAULTS)).unwrap();
    let params = request.sampling_params.clone().unwrap();
    (request, params)
}

fn on_tokenspeed(generation: &Generation) -> (tokenspeed_wire::GenerateRequest, tokenspeed_wire::SamplingParams) {
    let request = tokenspeed::request(&ask(generation, &NO_DEFAULTS)).unwrap();
    let params = request.sampling_params.clone().unwrap();
    (request, params)
}

#[test]
fn what_the_client_leaves_open_has_its_documented_value() {
    let generation = generation();
    let (request, params) = on_sglang(&generation);
    let expected = sglang_wire::SamplingParams {
        temperature: 1.0,
        top_p: 1.0,
        top_k: -1,
        repetition_penalty: 1.0,
        skip_special_tokens: true,
        spaces_between_special_tokens: true,
        n: 1,
        ..Default::default()
    };
    assert_eq!(params, expected);
    assert_eq!((request.return_logprob, request.logprob_start_len, request.top_logprobs_num), (false, -1, 0));

    let (_, params) = on_vllm(&generation);
    let expected = vllm_wire::SamplingParams {
        temperature: None,
        top_p: 1.0,
        top_k: 0,
        repetition_penalty: 1.0,
        skip_special_tokens: true,
        spaces_between_special_tokens: true,
        n: 1,
        ..Default::default()
    };
    assert_eq!(params, expected);

    let (request, params) = on_tokenspeed(&generation);
    let expected = tokenspeed_wire::SamplingParams {
        temperature: Some(1.0),
        top_p: Some(1.0),
        top_k: Some(-1),
        min_p: Some(0.0),
        frequency_penalty: Some(0.0),
        presence_penalty: Some(0.0),
        repetition_penalty: Some(1.0),
        skip_special_tokens: true,
        spaces_between_special_tokens: true,
        n: 1,
        ..Default::default()
    };
    assert_eq!(params, expected);
    assert_eq!(request.logprob_start_len, Some(-1));
}

#[test]
fn what_the_client_asks_for_arrives() {
    let mut generation = generation();
    generation.samples = 3;
    generation.sampling = Sampling {
        temperature: Some(0.0),
        top_p: Some(0.5),
        top_k: Some(7),
        min_p: Some(0.25),
        frequency_penalty: Some(0.125),
        presence_penalty: Some(-0.5),
        repetition_penalty: Some(1.25),
        max_tokens: Some(9),
        min_tokens: Some(2),
        stop: vec!["END".into()],
        stop_token_ids: vec![11],
        ignore_eos: true,
        keep_stop: true,
        seed: Some(42),
        logit_bias: vec![(3, 1.5)],
    };
    let (request, params) = on_sglang(&generation);
    assert_eq!(
        params,
        sglang_wire::SamplingParams {
            temperature: 0.0,
            top_p: 0.5,
            top_k: 7,
            min_p: 0.25,
            frequency_penalty: 0.125,
            presence_penalty: -0.5,
            repetition_penalty: 1.25,
            max_new_tokens: Some(9),
            stop: vec![],
            stop_token_ids: vec![11],
            skip_special_tokens: true,
            spaces_between_special_tokens: true,
            n: 3,
            min_new_tokens: 2,
            ignore_eos: true,
            no_stop_trim: true,
            stream_interval: None,
            logit_bias: [("3".to_owned(), 1.5)].into(),
            constraint: None,
        }
    );
    assert_eq!(request.request_id, "chatcmpl-1");
    assert_eq!(request.tokenized.unwrap().input_ids, [5, 6]);
    assert!(request.stream);

    let (request, params) = on_vllm(&generation);
    assert_eq!(
        params,
        vllm_wire::SamplingParams {
            temperature: Some(0.0),
            top_p: 0.5,
            top_k: 7,
            min_p: 0.25,
            frequency_penalty: 0.125,
            presence_penalty: -0.5,
            repetition_penalty: 1.25,
            max_tokens: Some(9),
            min_tokens: 2,
            stop: vec!["END".into()],
            stop_token_ids: vec![11],
            skip_special_tokens: true,
            spaces_between_special_tokens: true,
            ignore_eos: true,
            n: 3,
            seed: Some(42),
            include_stop_str_in_output: true,
            logit_bias: [(3, 1.5)].into(),
            ..Default::default()
        }
    );
    let Some(vllm_wire::generate_request::Input::Tokenized(tokenized)) = request.input else { panic!() };
    assert_eq!((tokenized.input_ids, tokenized.original_text.as_str()), (vec![5, 6], ""));

    let (request, params) = on_tokenspeed(&generation);
    assert_eq!(
        params,
        tokenspeed_wire::SamplingParams {
            temperature: Some(0.0),
            top_p: Some(0.5),
            top_k: Some(7),
            min_p: Some(0.25),
            frequency_penalty: Some(0.125),
            presence_penalty: Some(-0.5),
            repetition_penalty: Some(1.25),
            max_new_tokens: Some(9),
            min_new_tokens: 2,
            stop: vec!["END".into()],
            stop_token_ids: vec![11],
            ignore_eos: true,
            skip_special_tokens: true,
            spaces_between_special_tokens: true,
            n: 3,
            logit_bias: [("3".to_owned(), 1.5)].into(),
            no_stop_trim: true,
            sampling_seed: Some(42),
            constraint: None,
        }
    );
    assert_eq!(request.tokenized.unwrap().input_ids, [5, 6]);
}

#[test]
fn an_engine_without_a_tokenizer_gets_the_stop_strings_that_are_one_token() {
    let mut generation = generation();
    generation.sampling.stop = vec!["</s>".into(), "a longer one".into()];
    generation.sampling.stop_token_ids = vec![11];
    let ask = Ask { stop_tokens: &[2, 11], ..ask(&generation, &NO_DEFAULTS) };
    let params = sglang::request(&ask).unwrap().sampling_params.unwrap();
    assert_eq!((params.stop, params.stop_token_ids), (vec![], vec![11, 2]));
    assert_eq!(vllm::request(&ask).unwrap().sampling_params.unwrap().stop_token_ids, [11]);
}

#[test]
fn candidates_and_seeds_stay_within_what_each_engine_takes() {
    let mut generation = generation();
    generation.sampling.top_k = Some(-1);
    assert_eq!(on_vllm(&generation).1.top_k, 0);
    generation.sampling.seed = Some(i64::MAX);
    assert_eq!(on_vllm(&generation).1.seed, Some(i32::MAX));
    assert_eq!(on_tokenspeed(&generation).1.sampling_seed, Some(i64::MAX as u64));
    generation.sampling.seed = Some(-1);
    assert_eq!(on_vllm(&generation).1.seed, Some(-1));
    let refused = tokenspeed::request(&ask(&generation, &NO_DEFAULTS)).unwrap_err();
    assert_eq!(refused, RequestError::NegativeSeed { seed: -1 });
}

#[test]
fn log_probabilities_are_asked_for_in_each_engines_way() {
    let mut generation = generation();
    for (top, on_vllm_wire) in [(0, 1), (5, 5), (50, 20)] {
        generation.logprobs = Some(Logprobs { top, prompt_from: None });
        let (request, _) = on_sglang(&generation);
        assert_eq!(
            (request.return_logprob, request.top_logprobs_num, request.logprob_start_len),
            (true, top as i32, -1)
        );
        let (request, _) = on_tokenspeed(&generation);
        assert_eq!(
            (request.return_logprob, request.top_logprobs_num, request.logprob_start_len),
            (true, top as i32, Some(-1))
        );
        let (_, params) = on_vllm(&generation);
        assert_eq!((params.logprobs, params.prompt_logprobs), (Some(on_vllm_wire), None));
    }
    generation.logprobs = Some(Logprobs { top: 2, prompt_from: Some(1) });
    assert_eq!(on_sglang(&generation).0.logprob_start_len, 1);
    assert_eq!(on_tokenspeed(&generation).0.logprob_start_len, Some(1));
    assert_eq!(on_vllm(&generation).1.prompt_logprobs, Some(2));
}

#[test]
fn constraints_take_the_form_that_the_engine_knows() {
    use sglang_wire::sampling_params::Constraint as OnSglang;
    use tokenspeed_wire::sampling_params::Constraint as OnTokenSpeed;
    use vllm_wire::sampling_params::Constraint as OnVllm;
    let x = || "x".to_owned();
    let choices = vec!["a.b".to_owned(), "c|d".to_owned()];
    let regex = r"(a\.b|c\|d)".to_owned();
    let cases = [
        (
            Constraint::JsonSchema(x()),
            OnSglang::JsonSchema(x()),
            OnVllm::JsonSchema(x()),
            OnTokenSpeed::JsonSchema(x()),
        ),
        (Constraint::Regex(x()), OnSglang::Regex(x()), OnVllm::Regex(x()), OnTokenSpeed::Regex(x())),
        (Constraint::Grammar(x()), OnSglang::EbnfGrammar(x()), OnVllm::Grammar(x()), OnTokenSpeed::EbnfGrammar(x())),
        (
            Constraint::StructuralTag(x()),
            OnSglang::StructuralTag(x()),
            OnVllm::StructuralTag(x()),
            OnTokenSpeed::StructuralTag(x()),
        ),
        (
            Constraint::Choice(choices.clone()),
            OnSglang::Regex(regex.clone()),
            OnVllm::Choice(ChoiceConstraint { choices }),
            OnTokenSpeed::Regex(regex),
        ),
    ];
    for (constraint, sglang, vllm, tokenspeed) in cases {
        let generation = Generation { constraint: Some(constraint), ..generation() };
        assert_eq!(on_sglang(&generation).1.constraint, Some(sglang));
        assert_eq!(on_vllm(&generation).1.constraint, Some(vllm));
        assert_eq!(on_tokenspeed(&generation).1.constraint, Some(tokenspeed));
    }
}

#[test]
fn the_models_defaults_fill_what_the_client_left_open_and_nothing_else() {
    let defaults = SamplingDefaults::parse(Some(
        r#"{"temperature":0.6,"top_p":0.95,"top_k":20,"min_p":0.1,"repetition_penalty":1.05,"max_tokens":5}"#,
    ));
    let mut generation = generation();
    generation.sampling.temperature = Some(0.0);
    let params = sglang::request(&ask(&generation, &defaults)).unwrap().sampling_params.unwrap();
    assert_eq!((params.temperature, params.top_p, params.top_k), (0.0, 0.95, 20));
    assert_eq!((params.min_p, params.repetition_penalty, params.max_new_tokens), (0.1, 1.05, None));
    generation.sampling.temperature = None;
    let params = vllm::request(&ask(&generation, &defaults)).unwrap().sampling_params.unwrap();
    assert_eq!((params.temperature, params.top_p, params.top_k), (Some(0.6), 0.95, 20));
    for nothing in [None, Some(""), Some("[]"), Some("null"), Some(r#"{"temperature":"hot"}"#)] {
        assert_eq!(SamplingDefaults::parse(nothing), SamplingDefaults::NONE, "{nothing:?}");
    }
}

#[test]
fn both_sglang_legs_meet_in_one_room_and_each_names_its_own_rank() {
    let (request, _) = on_sglang(&generation());
    let rendezvous = Rendezvous::new("[fd00::1]", None, sglang::room(u64::MAX, None));
    let ranks = Ranks { prefill: Some(1), decode: Some(3) };
    let legs = sglang::legs(request, &rendezvous, ranks);
    let meeting = legs.prefill.disaggregated_params.clone().unwrap();
    assert_eq!(
        (meeting.bootstrap_host.as_str(), meeting.bootstrap_port, meeting.bootstrap_room),
        ("[fd00::1]", 8998, i32::MAX - 1)
    );
    assert_eq!((legs.prefill.data_parallel_rank, legs.decode.data_parallel_rank), (Some(1), Some(3)));
    let apart = sglang_wire::GenerateRequest { data_parallel_rank: Some(1), ..legs.decode };
    assert_eq!(legs.prefill, apart, "they differ in nothing else");
    assert_eq!(sglang::room(0, None), 0);
}

#[test]
fn a_tokenspeed_room_leads_both_legs_to_the_prefills_rank() {
    let (request, _) = on_tokenspeed(&generation());
    for random in [0, 1, u64::MAX / 3, u64::MAX] {
        let room = tokenspeed::room(random, Residue::new(2, 4));
        assert_eq!(room % 4, 2);
        let legs = tokenspeed::legs(request.clone(), &Rendezvous::new("h", Some(9000), room));
        assert_eq!(legs.prefill, legs.decode, "neither names a rank");
        let meeting = legs.prefill.kv_bootstrap_info.unwrap();
        assert_eq!((meeting.bootstrap_host.as_str(), meeting.bootstrap_port), ("h", 9000));
        assert_eq!(meeting.bootstrap_room as u64, room);
        assert_eq!(legs.prefill.data_parallel_rank, None);
    }
    assert_eq!(tokenspeed::room(u64::MAX, None), i64::MAX as u64 - 1);
    assert_eq!(Residue::new(4, 4), None, "no such rank");
    assert_eq!(Residue::new(0, 1), None, "there is only one");
}

#[test]
fn samples_are_requests_of_their_own_with_their_own_seeds() {
    let mut generation = generation();
    generation.samples = 3;
    generation.sampling.seed = Some(i64::MAX);
    let (request, _) = on_tokenspeed(&generation);
    let samples: Vec<_> = (0..3).map(|index| tokenspeed::sample(&request, index)).collect();
    let ids: Vec<_> = samples.iter().map(|sample| sample.request_id.as_str()).collect();
    assert_eq!(ids, ["chatcmpl-1-0", "chatcmpl-1-1", "chatcmpl-1-2"]);
    let params: Vec<_> = samples.iter().map(|sample| sample.sampling_params.as_ref().unwrap()).collect();
    assert!(params.iter().all(|params| params.n == 1));
    let seeds: Vec<_> = params.iter().map(|params| params.sampling_seed.unwrap() - i64::MAX as u64).collect();
    assert_eq!(seeds, [0, 1, 2]);
    let (request, _) = on_sglang(&generation);
    let sample = sglang::sample(&request, 2);
    assert_eq!((sample.request_id.as_str(), sample.sampling_params.unwrap().n), ("chatcmpl-1-2", 1));
}

fn prefill<'a>(connector: Connector, mooncake: Option<&'a MooncakePeer>) -> Prefill<'a> {
    Prefill { connector, mooncake, host: "[fd00::1]", bootstrap_port: None }
}

/// Runs one row: the tag of the prefill leg, and what the decode leg carries when the prefill returns `returned`.
fn row(
    connector: Connector,
    mooncake: Option<&MooncakePeer>,
    samples: u32,
    returned: Option<&str>,
) -> (Option<String>, Option<String>, Option<KvTransferParams>) {
    let (request, _) = on_vllm(&generation());
    let plan = vllm::plan(prefill(connector, mooncake), connector, samples, TRANSFER).unwrap();
    let first = vllm::prefill_leg(&request, &plan, None);
    let agreed = match &plan.source {
        HandoffSource::Minted(params) => Some(params.clone()),
        _ => None,
    };
    let answer = vllm_wire::GenerateComplete {
        finish_reason: "length".into(),
        kv_transfer_params_json: returned.map(str::to_owned),
        ..Default::default()
    };
    let answer =
        vllm_wire::GenerateResponse { response: Some(vllm_wire::generate_response::Response::Complete(answer)) };
    let Message::Complete(end) = vllm::read(&mut Reader::new(1, false).handing_over(agreed), answer).unwrap() else {
        panic!("the end of the prefill")
    };
    let second = vllm::decode_leg(request, &plan.source, end.kv_transfer_params, None);
    assert_eq!(first.kv_transfer_params, None);
    (first.kv_transfer_params_json, second.kv_transfer_params_json, second.kv_transfer_params)
}

#[test]
fn the_connector_decides_what_vllm_legs_carry() {
    let returned = r#"{"do_remote_prefill":true, "remote_engine_id":"e"}"#;
    let tag = r#"{"do_remote_decode":true,"do_remote_prefill":false}"#;
    let relayed = || Some(returned.to_owned());
    assert_eq!(row(Connector::Nixl, None, 1, Some(returned)), (Some(tag.into()), relayed(), None));
    assert_eq!(row(Connector::Nixl, None, 1, None), (Some(tag.into()), None, None), "decode recomputes");
    for connector in [Connector::Passthrough, Connector::Store] {
        assert_eq!(row(connector, None, 1, Some(returned)), (None, relayed(), None));
        assert_eq!(row(connector, None, 1, None), (None, None, None));
    }
    for connector in [Connector::Nixl, Connector::Passthrough, Connector::Store] {
        assert_eq!(row(connector, None, 2, Some(returned)), (None, None, None), "a handoff serves one sample");
    }

    let peer = MooncakePeer::resolve(Some("e"), Some("2"), Some(1), "[fd00::1]", None).unwrap();
    let (tag, minted, legacy) = row(Connector::Mooncake, Some(&peer), 1, Some(returned));
    let id = format!("xfer-{TRANSFER}");
    assert_eq!(tag.unwrap(), format!(r#"{{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"{id}"}}"#));
    let minted: serde_json::Value = serde_json::from_str(&minted.unwrap()).unwrap();
    assert_eq!(
        minted,
        serde_json::json!({
            "do_remote_decode": false, "do_remote_prefill": true, "transfer_id": id,
            "remote_engine_id": "e_dp1", "remote_bootstrap_addr": "http://[fd00::1]:8998",
        })
    );
    assert_eq!(legacy, None);
    let named = KvTransferParams { remote_host: "[fd00::1]".into(), remote_port: 8998 };
    assert_eq!(row(Connector::Mooncake, None, 1, Some(returned)), (None, None, Some(named.clone())));
    assert_eq!(row(Connector::Mooncake, Some(&peer), 2, None), (None, None, Some(named)));
}

#[test]
fn moriio_is_refused_on_either_leg() {
    for (first, second) in [(Connector::Moriio, Connector::Nixl), (Connector::Nixl, Connector::Moriio)] {
        let refused = vllm::plan(prefill(first, None), second, 1, TRANSFER).unwrap_err();
        assert_eq!(refused, MoriioUnsupported);
        assert_eq!(refused.code(), "moriio_grpc_pd_unsupported");
        assert_eq!(refused.to_string(), "MoRIIOConnector PD is supported by the HTTP PD router only");
    }
}

#[test]
fn a_vllm_prefill_leg_ends_after_one_token_whatever_the_client_wants() {
    let mut generation = generation();
    generation.samples = 4;
    generation.sampling.stop = vec!["END".into()];
    generation.sampling.stop_token_ids = vec![11];
    generation.sampling.max_tokens = Some(100);
    generation.sampling.min_tokens = Some(10);
    generation.sampling.temperature = Some(0.5);
    generation.logprobs = Some(Logprobs { top: 2, prompt_from: Some(0) });
    generation.constraint = Some(Constraint::Regex("x".into()));
    let (request, whole) = on_vllm(&generation);
    assert_eq!(whole.prompt_logprobs, Some(2));
    let plan = vllm::plan(prefill(Connector::Passthrough, None), Connector::Passthrough, 4, TRANSFER).unwrap();
    let leg = vllm::prefill_leg(&request, &plan, Some(1));
    assert_eq!((leg.stream, leg.data_parallel_rank, leg.request_id.as_str()), (false, Some(1), "chatcmpl-1"));
    assert_eq!(leg.input, request.input);
    let expected = vllm_wire::SamplingParams {
        max_tokens: Some(1),
        min_tokens: 0,
        n: 1,
        stop: vec![],
        stop_token_ids: vec![],
        ignore_eos: true,
        ..whole.clone()
    };
    assert_eq!(leg.sampling_params, Some(expected));
    let leg = vllm::decode_leg(request, &plan.source, None, Some(2));
    let expected = vllm_wire::SamplingParams { prompt_logprobs: None, ..whole };
    assert_eq!((leg.stream, leg.data_parallel_rank), (true, Some(2)));
    assert_eq!(leg.sampling_params, Some(expected), "what only the prefill knows is not asked of the decode");
    assert_eq!(leg.request_id, "chatcmpl-1", "both legs have one id");
    assert_eq!(plan.source, HandoffSource::None);
}
