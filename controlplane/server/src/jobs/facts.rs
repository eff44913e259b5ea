//! What engines say about themselves, reduced to facts. Pure.
//!
//! The endpoints and the meaning of their fields are those of vLLM 0.32 (`/v1/models`, `/version`) and SGLang 0.5 (`/server_info`,
//! `/model_info`, `/v1/models`); which of them become labels is the documented system's choice. Nothing an engine says is trusted: labels
//! come from a fixed list, values are bounded, and what does not fit is left out.

use std::collections::BTreeMap;

use serde_json::Value;
use smg_fleet::listing::{ListedModel, bounded};
use smg_fleet::validate::MAX_MODELS;
use smg_fleet::{ModelCard, Runtime};

/// What SGLang's `/server_info` and `/model_info` say that becomes labels.
const SGLANG_LABELS: [&str; 21] = [
    "model_path",
    "served_model_name",
    "tp_size",
    "dp_size",
    "attn_dp_size",
    "pp_size",
    "load_balance_method",
    "disaggregation_mode",
    "version",
    "is_embedding",
    "context_length",
    "max_total_tokens",
    "max_running_requests",
    "enable_dp_attention",
    "weight_version",
    "tokenizer_path",
    "is_generation",
    "has_image_understanding",
    "has_audio_understanding",
    "model_type",
    "architectures",
];

/// Labels that say how long a context is, best first.
const CONTEXT_LABELS: [&str; 5] =
    ["context_length", "max_context_length", "max_model_len", "max_total_tokens", "max_seq_len"];

/// The runtime that the owner of the first listed model names.
pub(super) fn runtime_of(models: &[ListedModel]) -> Option<Runtime> {
    match models.first()?.owned_by.as_deref()? {
        "sglang" | "nvidia" => Some(Runtime::Sglang),
        "vllm" => Some(Runtime::Vllm),
        _ => None,
    }
}

/// The runtime, when the models do not name it: who answers `/version` is vLLM, who answers `/server_info` is SGLang, who lists models is
/// some OpenAI-compatible server. `None` = nothing is known.
pub(super) fn runtime_by_endpoints(lists_models: bool, has_version: bool, has_server_info: bool) -> Option<Runtime> {
    match (has_version, has_server_info, lists_models) {
        (true, _, _) => Some(Runtime::Vllm),
        (_, true, _) => Some(Runtime::Sglang),
        (_, _, true) => Some(Runtime::Generic),
        _ => None,
    }
}

/// Labels from SGLang's answers; what the server says wins over what the model says.
pub(super) fn sglang_labels(
    server_info: Option<&Value>,
    model_info: Option<&Value>,
    models: &[ListedModel],
) -> BTreeMap<String, String> {
    let said =
        |name: &str| [server_info, model_info].into_iter().flatten().find_map(|answer| scalar(answer.get(name)?));
    let mut labels: BTreeMap<String, String> =
        SGLANG_LABELS.iter().filter_map(|name| Some(((*name).to_owned(), said(name)?))).collect();
    if let Some(model) = models.first() {
        labels.entry("served_model_name".to_owned()).or_insert_with(|| model.id.clone());
    }
    labels
}

/// Labels from vLLM's answers.
pub(super) fn vllm_labels(version: Option<&Value>, models: &[ListedModel]) -> BTreeMap<String, String> {
    let mut labels = BTreeMap::new();
    let mut say = |name: &str, value: Option<String>| value.map(|value| labels.insert(name.to_owned(), value));
    say("version", version.and_then(|answer| scalar(answer.get("version")?)));
    if let Some(model) = models.first() {
        say("served_model_name", Some(model.id.clone()));
        say("model_path", model.root.clone());
        say("max_model_len", model.max_model_len.map(|length| length.to_string()));
    }
    labels
}

/// The models a worker serves: the one its labels name first, then what it lists. `labels` are the merged ones, the operator's first.
pub(super) fn cards(labels: &BTreeMap<String, String>, models: &[ListedModel]) -> Vec<ModelCard> {
    let named = ["served_model_name", "model_id", "model_path"].iter().find_map(|name| labels.get(*name));
    let named = named.map(String::as_str).filter(|id| !id.is_empty() && id.len() <= 512);
    let mut ids: Vec<&str> = named.into_iter().collect();
    for model in models {
        if !ids.contains(&model.id.as_str()) {
            ids.push(&model.id);
        }
    }
    let fallback = CONTEXT_LABELS.iter().find_map(|name| labels.get(*name)?.parse().ok());
    let card = |id: &str| ModelCard {
        id: id.to_owned(),
        context_length: models.iter().find(|model| model.id == id).and_then(|model| model.max_model_len).or(fallback),
        ..Default::default()
    };
    ids.into_iter().take(MAX_MODELS).map(card).collect()
}

/// A value as label text; lists of texts are joined with commas.
fn scalar(value: &Value) -> Option<String> {
    let text = match value {
        Value::String(text) => text.clone(),
        Value::Number(number) => number.to_string(),
        Value::Bool(flag) => flag.to_string(),
        Value::Array(items) => items.iter().map(Value::as_str).collect::<Option<Vec<_>>>()?.join(","),
        Value::Null | Value::Object(_) => return None,
    };
    bounded(&text)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    fn models(body: Value) -> Vec<ListedModel> {
        smg_fleet::listing::models(body.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn the_runtime_is_detected_by_the_documented_table() {
        let owned_by = |owner: &str| runtime_of(&models(json!({"data": [{"id": "m", "owned_by": owner}]})));
        assert_eq!(owned_by("sglang"), Some(Runtime::Sglang));
        assert_eq!(owned_by("nvidia"), Some(Runtime::Sglang));
        assert_eq!(owned_by("vllm"), Some(Runtime::Vllm));
        assert_eq!(owned_by("acme"), None);
        assert_eq!(runtime_of(&models(json!({"data": []}))), None);
        assert_eq!(runtime_by_endpoints(true, true, true), Some(Runtime::Vllm), "/version wins");
        assert_eq!(runtime_by_endpoints(true, false, true), Some(Runtime::Sglang));
        assert_eq!(runtime_by_endpoints(true, false, false), Some(Runtime::Generic));
        assert_eq!(runtime_by_endpoints(false, false, false), None);
    }

    #[test]
    fn vllm_says_its_model_and_version() {
        let models = models(json!({"object": "list", "data": [
            {"id": "tiny", "owned_by": "vllm", "root": "MODELS/tiny-qwen3", "max_model_len": 2048},
            {"id": "tiny-lora", "owned_by": "vllm", "root": "LORAS/x", "parent": "tiny"},
        ]}));
        let labels = vllm_labels(Some(&json!({"version": "0.32.0"})), &models);
        let expected = [
            ("max_model_len", "2048"),
            ("model_path", "MODELS/tiny-qwen3"),
            ("served_model_name", "tiny"),
            ("version", "0.32.0"),
        ];
        assert_eq!(labels.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect::<Vec<_>>(), expected);
        let cards = cards(&labels, &models);
        assert_eq!(cards.iter().map(|card| card.id.as_str()).collect::<Vec<_>>(), ["tiny", "tiny-lora"]);
        assert_eq!(cards[0].context_length, Some(2048));
    }

    #[test]
    fn sglang_says_what_its_two_endpoints_know_and_nothing_else_becomes_a_label() {
        let server = json!({
            "model_path": "/m", "tp_size": 2, "dp_size": 1, "enable_dp_attention": false, "version": "0.5.3",
            "disaggregation_mode": "prefill", "api_key": "secret", "max_running_requests": null, "internal_states": [{}],
        });
        let model = json!({"is_generation": true, "architectures": ["A", "B"], "model_path": "/other"});
        let labels = sglang_labels(Some(&server), Some(&model), &models(json!({"data": [{"id": "m"}]})));
        let expected = [
            ("architectures", "A,B"),
            ("disaggregation_mode", "prefill"),
            ("dp_size", "1"),
            ("enable_dp_attention", "false"),
            ("is_generation", "true"),
            ("model_path", "/m"),
            ("served_model_name", "m"),
            ("tp_size", "2"),
            ("version", "0.5.3"),
        ];
        assert_eq!(labels.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn lies_are_left_out() {
        let labels = sglang_labels(Some(&json!({"version": "v".repeat(5000), "tp_size": {"a": 1}})), None, &[]);
        assert!(labels.is_empty());
    }

    #[test]
    fn the_name_of_a_model_comes_from_the_labels_in_the_documented_order() {
        let labels = |pairs: &[(&str, &str)]| pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let first = |labels: &BTreeMap<String, String>| cards(labels, &[]).first().map(|card| card.id.clone());
        assert_eq!(
            first(&labels(&[("model_path", "/p"), ("model_id", "i"), ("served_model_name", "s")])).unwrap(),
            "s"
        );
        assert_eq!(first(&labels(&[("model_path", "/p"), ("model_id", "i")])).unwrap(), "i");
        assert_eq!(first(&labels(&[("model_path", "/p")])).unwrap(), "/p");
        assert_eq!(first(&labels(&[])), None, "nothing named: any model");
        let sized =
            cards(&labels(&[("served_model_name", "s"), ("max_total_tokens", "9"), ("context_length", "8")]), &[]);
        assert_eq!(sized[0].context_length, Some(8));
    }
}
