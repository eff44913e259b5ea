//! What engines say about themselves over gRPC, reduced to facts. Pure.
//!
//! Everything that an engine says of its model becomes a label of the same name, and so does what vLLM says of itself; of
//! the arguments that SGLang and TokenSpeed were started with, those that somebody acts on do (SMG worker metadata). What
//! says nothing (an empty text or list, zero) is no label. Other names of one thing become one name, which pairing and
//! policies then read whatever engine it is.

use std::collections::BTreeMap;

use prost_types::Struct;
use prost_types::value::Kind;
use serde_json::Value;
use smg_fleet::Worker;
use smg_fleet::listing::{Contradiction, bounded, declared_what_was_served};
use smg_services::engines::{sglang, tokenspeed, vllm};

use crate::probe::engine::{ModelInfo, ServerInfo};

/// Arguments of SGLang that become labels.
const SGLANG_ARGUMENTS: [&str; 26] = [
    "model_path",
    "served_model_name",
    "tokenizer_path",
    "tp_size",
    "dp_size",
    "pp_size",
    "context_length",
    "max_total_tokens",
    "max_running_requests",
    "enable_dp_attention",
    "attn_dp_size",
    "load_balance_method",
    "disaggregation_mode",
    "is_embedding",
    "vocab_size",
    "weight_version",
    "disaggregation_transfer_backend",
    "disaggregation_bootstrap_port",
    "kv_cache_dtype",
    "page_size",
    "attention_backend",
    "pairing_protocol",
    "mm_item_limits",
    "engine_reasoning_parser",
    "constrained_decoding_start",
    "supports_vision",
];

/// Arguments of TokenSpeed that become labels, besides those that begin with `rl.`.
const TOKENSPEED_ARGUMENTS: [&str; 25] = [
    "model",
    "served_model_name",
    "tokenizer",
    "tp_size",
    "attn_tp_size",
    "dp_size",
    "data_parallel_size",
    "pp_size",
    "pipeline_parallel_size",
    "context_length",
    "max_total_tokens",
    "max_num_seqs",
    "max_running_requests",
    "load_balance_method",
    "is_embedding",
    "vocab_size",
    "weight_version",
    "disaggregation_mode",
    "disaggregation_transfer_backend",
    "disaggregation_bootstrap_port",
    "kv_cache_dtype",
    "attention_backend",
    "pairing_protocol",
    "mm_item_limits",
    "engine_reasoning_parser",
];

/// Other names, and the one that is used.
const RENAMED: [(&str, &str); 6] = [
    ("tensor_parallel_size", "tp_size"),
    ("attn_tp_size", "tp_size"),
    ("pipeline_parallel_size", "pp_size"),
    ("context_parallel_size", "cp_size"),
    ("data_parallel_size", "dp_size"),
    ("block_size", "page_size"),
];

/// Most arguments of one engine that begin with `rl.`.
const MOST_RL_ARGUMENTS: usize = 32;

/// What is known of an engine.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Said {
    pub labels: BTreeMap<String, String>,
    pub kv_connector: Option<String>,
    pub kv_role: Option<String>,
    pub kv_engine_id: Option<String>,
}

/// What both answers say; the server's wins over the model's.
pub(super) fn said(model: Option<&ModelInfo>, server: Option<&ServerInfo>) -> Said {
    let mut labels = Labels::default();
    match model {
        Some(ModelInfo::Sglang(info)) => sglang_model(&mut labels, info),
        Some(ModelInfo::Vllm(info)) => vllm_model(&mut labels, info),
        Some(ModelInfo::TokenSpeed(info)) => tokenspeed_model(&mut labels, info),
        None => {}
    }
    let mut kv = (None, None, None);
    match server {
        Some(ServerInfo::Sglang(info)) => {
            labels.arguments(info.server_args.as_ref(), &SGLANG_ARGUMENTS);
            labels.text("version", &info.sglang_version);
        }
        Some(ServerInfo::TokenSpeed(info)) => {
            labels.arguments(info.server_args.as_ref(), &TOKENSPEED_ARGUMENTS);
            labels.arguments(info.server_args.as_ref(), &["constrained_decoding_start"]);
            labels.rl_arguments(info.server_args.as_ref());
            labels.arguments(info.scheduler_info.as_ref(), &["shm_namespace_id"]);
            labels.text("version", &info.tokenspeed_version);
        }
        Some(ServerInfo::Vllm(info)) => {
            vllm_server(&mut labels, info);
            kv = (bounded(&info.kv_connector), bounded(&info.kv_role), bounded(&info.kv_engine_id));
        }
        None => {}
    }
    let (kv_connector, kv_role, kv_engine_id) = kv;
    Said { labels: labels.renamed(), kv_connector, kv_role, kv_engine_id }
}

/// How an engine that says this differs from the one a worker was registered with: see [`smg_fleet::listing`].
pub(super) fn contradiction(worker: &Worker, said: &Said) -> Option<Contradiction> {
    let facts = worker.facts.as_ref()?;
    let spec = &worker.spec;
    let label = |name: &'static str| (facts.labels.get(name), said.labels.get(name));
    // Weights may be replaced in a running engine: a path counts only where there is no name.
    let model = match label("served_model_name") {
        named @ (Some(_), Some(_)) => named,
        _ => label("model_path"),
    };
    let compared = [
        ("model", model, declared_what_was_served(worker)),
        ("KV connector", (facts.kv_connector.as_ref(), said.kv_connector.as_ref()), spec.kv_connector.is_some()),
    ];
    compared.into_iter().find_map(|(what, pair, declared)| match pair {
        (Some(before), Some(now)) if before != now => {
            Some(Contradiction { reason: format!("its {what} is '{now}' now and not '{before}'"), declared })
        }
        _ => None,
    })
}

fn sglang_model(labels: &mut Labels, info: &sglang::GetModelInfoResponse) {
    labels.text("model_path", &info.model_path);
    labels.text("tokenizer_path", &info.tokenizer_path);
    labels.flag("is_generation", info.is_generation);
    labels.text("preferred_sampling_params", &info.preferred_sampling_params);
    labels.text("weight_version", &info.weight_version);
    labels.text("served_model_name", &info.served_model_name);
    labels.number("max_context_length", info.max_context_length);
    labels.number("vocab_size", info.vocab_size);
    labels.only_if("supports_vision", info.supports_vision);
    labels.text("model_type", &info.model_type);
    labels.list("eos_token_ids", &info.eos_token_ids);
    labels.number("pad_token_id", info.pad_token_id);
    labels.number("bos_token_id", info.bos_token_id);
    labels.number("max_req_input_len", info.max_req_input_len);
    labels.list("architectures", &info.architectures);
    labels.text("id2label_json", &info.id2label_json);
    labels.number("num_labels", info.num_labels);
    labels.text("default_sampling_params_json", &info.default_sampling_params_json);
}

fn vllm_model(labels: &mut Labels, info: &vllm::GetModelInfoResponse) {
    labels.text("model_path", &info.model_path);
    labels.flag("is_generation", info.is_generation);
    labels.number("max_context_length", info.max_context_length);
    labels.number("vocab_size", info.vocab_size);
    // Of this engine alone a "no" means something: it may be started to take no media.
    labels.flag("supports_vision", info.supports_vision);
    labels.text("served_model_name", &info.served_model_name);
    labels.text("tokenizer_path", &info.tokenizer_path);
    labels.text("model_type", &info.model_type);
    labels.list("architectures", &info.architectures);
    labels.list("eos_token_ids", &info.eos_token_ids);
    labels.number("pad_token_id", info.pad_token_id);
    labels.number("bos_token_id", info.bos_token_id);
    labels.number("max_req_input_len", info.max_req_input_len);
    labels.text("default_sampling_params_json", &info.default_sampling_params_json);
}

fn vllm_server(labels: &mut Labels, info: &vllm::GetServerInfoResponse) {
    labels.number("data_parallel_size", info.data_parallel_size);
    labels.text("shm_namespace_id", &info.shm_namespace_id);
    labels.text("kv_cache_dtype", &info.kv_cache_dtype);
    labels.number("block_size", info.block_size);
    labels.text("attention_backend", &info.attention_backend);
    labels.text("model_dtype", &info.model_dtype);
    labels.text("pairing_protocol", info.pairing_protocol.trim());
    labels.text("mm_processor", &info.mm_processor);
    labels.text("mm_media_ref_schemes", &info.mm_media_ref_schemes);
    labels.text("mm_processor_source", &info.mm_processor_source);
    labels.flag("mm_device_do_normalize", info.mm_device_do_normalize);
    labels.number("max_num_seqs", info.max_num_seqs);
    labels.text("mm_item_limits", &info.mm_item_limits);
    labels.text("multimodal_encoder_dtype", &info.multimodal_encoder_dtype);
    labels.text("engine_reasoning_parser", &info.engine_reasoning_parser);
    labels.text("constrained_decoding_start", &info.constrained_decoding_start);
    labels.number("mm_encoder_budget", info.mm_encoder_budget);
}

fn tokenspeed_model(labels: &mut Labels, info: &tokenspeed::GetModelInfoResponse) {
    labels.text("model_path", &info.model_path);
    labels.text("tokenizer_path", &info.tokenizer_path);
    labels.text("served_model_name", &info.served_model_name);
    labels.text("model_type", &info.model_type);
    labels.list("architectures", &info.architectures);
    labels.number("max_context_length", info.max_context_length);
    labels.number("max_req_input_len", info.max_req_input_len);
    labels.number("vocab_size", info.vocab_size);
    labels.list("eos_token_ids", &info.eos_token_ids);
    labels.number("pad_token_id", info.pad_token_id);
    labels.number("bos_token_id", info.bos_token_id);
    labels.text("weight_version", &info.weight_version);
    labels.text("default_sampling_params_json", &info.default_sampling_params_json);
    labels.only_if("supports_vision", info.supports_vision);
    labels.flag("supports_multimodal", info.supports_multimodal);
    labels.text("model_dtype", &info.model_dtype);
    labels.text("multimodal_encoder_dtype", &info.multimodal_encoder_dtype);
}

/// Labels as they are collected.
#[derive(Default)]
struct Labels(BTreeMap<String, String>);

impl Labels {
    fn text(&mut self, name: &str, text: &str) {
        if let Some(text) = bounded(text).filter(|text| text != "null") {
            self.0.insert(name.to_owned(), text);
        }
    }

    fn number(&mut self, name: &str, number: impl Into<i64>) {
        let number = number.into();
        if number != 0 {
            self.text(name, &number.to_string());
        }
    }

    fn flag(&mut self, name: &str, flag: bool) {
        self.text(name, if flag { "true" } else { "false" });
    }

    fn only_if(&mut self, name: &str, flag: bool) {
        if flag {
            self.flag(name, flag);
        }
    }

    fn list(&mut self, name: &str, items: &[impl serde::Serialize]) {
        if !items.is_empty()
            && let Ok(text) = serde_json::to_string(items)
        {
            self.text(name, &text);
        }
    }

    fn arguments(&mut self, arguments: Option<&Struct>, names: &[&str]) {
        for name in names {
            if let Some(value) = arguments.and_then(|arguments| arguments.fields.get(*name)) {
                self.argument(name, value);
            }
        }
    }

    fn rl_arguments(&mut self, arguments: Option<&Struct>) {
        let all = arguments.into_iter().flat_map(|arguments| &arguments.fields);
        let rl = all.filter(|(name, _)| name.starts_with("rl.") && name.len() <= 64).take(MOST_RL_ARGUMENTS);
        for (name, value) in rl {
            self.argument(name, value);
        }
    }

    fn argument(&mut self, name: &str, value: &prost_types::Value) {
        match &value.kind {
            Some(Kind::StringValue(text)) => self.text(name, text.trim()),
            Some(Kind::BoolValue(flag)) => self.flag(name, *flag),
            Some(Kind::NumberValue(number)) if *number != 0.0 => self.text(name, &decimal(*number)),
            Some(Kind::ListValue(list)) if !list.values.is_empty() => self.text(name, &json(value).to_string()),
            Some(Kind::StructValue(fields)) if !fields.fields.is_empty() => self.text(name, &json(value).to_string()),
            _ => {}
        }
    }

    /// The labels, each thing under its one name.
    fn renamed(mut self) -> BTreeMap<String, String> {
        for (other, name) in RENAMED {
            if let Some(value) = self.0.remove(other) {
                self.0.entry(name.to_owned()).or_insert(value);
            }
        }
        self.0
    }
}

/// A number as people write it: whole ones without decimals.
fn decimal(number: f64) -> String {
    if number.fract() == 0.0 && number.abs() < 1e15 { format!("{number:.0}") } else { number.to_string() }
}

fn json(value: &prost_types::Value) -> Value {
    match &value.kind {
        Some(Kind::StringValue(text)) => Value::from(text.as_str()),
        Some(Kind::BoolValue(flag)) => Value::from(*flag),
        Some(Kind::NumberValue(number)) if number.fract() == 0.0 && number.abs() < 1e15 => Value::from(*number as i64),
        Some(Kind::NumberValue(number)) => Value::from(*number),
        Some(Kind::ListValue(list)) => list.values.iter().map(json).collect(),
        Some(Kind::StructValue(fields)) => {
            fields.fields.iter().map(|(name, value)| (name.clone(), json(value))).collect()
        }
        Some(Kind::NullValue(_)) | None => Value::Null,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(fields: &[(&str, Kind)]) -> Option<Struct> {
        let field = |(name, kind): &(&str, Kind)| ((*name).to_owned(), prost_types::Value { kind: Some(kind.clone()) });
        Some(Struct { fields: fields.iter().map(field).collect() })
    }

    fn text(text: &str) -> Kind {
        Kind::StringValue(text.to_owned())
    }

    fn shown(said: &Said) -> Vec<(&str, &str)> {
        said.labels.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect()
    }

    #[test]
    fn vllm_says_its_model_itself_and_its_connector() {
        let model = vllm::GetModelInfoResponse {
            model_path: "/m".into(),
            is_generation: true,
            max_context_length: 2048,
            served_model_name: "tiny".into(),
            architectures: vec!["A".into()],
            eos_token_ids: vec![2, 3],
            ..Default::default()
        };
        let server = vllm::GetServerInfoResponse {
            active_requests: 3,
            uptime_seconds: 5.0,
            server_type: "vllm-grpc".into(),
            kv_connector: "NixlConnector".into(),
            kv_role: "kv_producer".into(),
            kv_engine_id: "e".into(),
            data_parallel_size: 2,
            kv_cache_dtype: "auto".into(),
            block_size: 128,
            model_dtype: "torch.bfloat16".into(),
            pairing_protocol: " mine ".into(),
            max_num_seqs: 8,
            ..Default::default()
        };
        let said = said(Some(&ModelInfo::Vllm(model)), Some(&ServerInfo::Vllm(Box::new(server))));
        let expected = [
            ("architectures", r#"["A"]"#),
            ("dp_size", "2"),
            ("eos_token_ids", "[2,3]"),
            ("is_generation", "true"),
            ("kv_cache_dtype", "auto"),
            ("max_context_length", "2048"),
            ("max_num_seqs", "8"),
            ("mm_device_do_normalize", "false"),
            ("model_dtype", "torch.bfloat16"),
            ("model_path", "/m"),
            ("page_size", "128"),
            ("pairing_protocol", "mine"),
            ("served_model_name", "tiny"),
            ("supports_vision", "false"),
        ];
        assert_eq!(shown(&said), expected, "no version, no moments");
        assert_eq!(said.kv_connector.as_deref(), Some("NixlConnector"));
        assert_eq!((said.kv_role.as_deref(), said.kv_engine_id.as_deref()), (Some("kv_producer"), Some("e")));
    }

    #[test]
    fn an_engine_without_a_connector_has_none() {
        let said = said(None, Some(&ServerInfo::Vllm(Box::default())));
        assert_eq!((said.kv_connector, said.kv_role, said.kv_engine_id), (None, None, None));
    }

    #[test]
    fn sglang_says_the_arguments_that_somebody_acts_on() {
        let model = sglang::GetModelInfoResponse { served_model_name: "m".into(), ..Default::default() };
        let server_args = arguments(&[
            ("served_model_name", text("other")),
            ("api_key", text("secret")),
            ("tp_size", Kind::NumberValue(2.0)),
            ("page_size", Kind::NumberValue(64.0)),
            ("max_running_requests", Kind::NumberValue(0.0)),
            ("enable_dp_attention", Kind::BoolValue(false)),
            ("tokenizer_path", text("")),
            ("weight_version", text("null")),
            ("context_length", Kind::NullValue(0)),
            ("disaggregation_transfer_backend", text("mooncake")),
            ("pairing_protocol", text(" mine ")),
        ]);
        let server =
            sglang::GetServerInfoResponse { server_args, sglang_version: "0.5.23".into(), ..Default::default() };
        let said = said(Some(&ModelInfo::Sglang(model)), Some(&ServerInfo::Sglang(server)));
        let expected = [
            ("disaggregation_transfer_backend", "mooncake"),
            ("enable_dp_attention", "false"),
            ("is_generation", "false"),
            ("page_size", "64"),
            ("pairing_protocol", "mine"),
            ("served_model_name", "other"),
            ("tp_size", "2"),
            ("version", "0.5.23"),
        ];
        assert_eq!(shown(&said), expected);
    }

    #[test]
    fn tokenspeed_has_other_names_for_the_same_things() {
        let server_args = arguments(&[
            ("attn_tp_size", Kind::NumberValue(4.0)),
            ("data_parallel_size", Kind::NumberValue(2.0)),
            ("dp_size", Kind::NumberValue(8.0)),
            ("max_num_seqs", Kind::NumberValue(48.0)),
            ("page_size", Kind::NumberValue(64.0)),
            ("rl.step", Kind::NumberValue(1.5)),
        ]);
        let scheduler_info = arguments(&[("shm_namespace_id", text("n"))]);
        let server = tokenspeed::GetServerInfoResponse {
            server_args,
            scheduler_info,
            tokenspeed_version: "0.4".into(),
            ..Default::default()
        };
        let model = tokenspeed::GetModelInfoResponse { max_context_length: 4096, ..Default::default() };
        let said = said(Some(&ModelInfo::TokenSpeed(model)), Some(&ServerInfo::TokenSpeed(server)));
        let expected = [
            ("dp_size", "8"),
            ("max_context_length", "4096"),
            ("max_num_seqs", "48"),
            ("rl.step", "1.5"),
            ("shm_namespace_id", "n"),
            ("supports_multimodal", "false"),
            ("tp_size", "4"),
            ("version", "0.4"),
        ];
        assert_eq!(shown(&said), expected, "the usual name wins, and there is no page size");
    }

    #[test]
    fn what_does_not_fit_is_left_out() {
        let model = vllm::GetModelInfoResponse {
            model_path: "x".repeat(5000),
            served_model_name: "a\nb".into(),
            ..Default::default()
        };
        let said = said(Some(&ModelInfo::Vllm(model)), None);
        assert!(!said.labels.contains_key("model_path") && !said.labels.contains_key("served_model_name"));
    }
}
