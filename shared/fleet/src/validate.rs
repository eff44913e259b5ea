//! Bounds on what operators may register. Checked before anything is queued and again when the command is applied.

use thiserror::Error;

use crate::access::Secret;
use crate::url::{UrlError, WorkerUrl};
use crate::worker::{WorkerPatch, WorkerSpec};

/// Most labels of one worker.
pub const MAX_LABELS: usize = 128;
/// Longest label key, in bytes.
pub const MAX_LABEL_KEY_BYTES: usize = 128;
/// Longest label value, in bytes.
pub const MAX_LABEL_VALUE_BYTES: usize = 4096;
/// Most models of one worker.
pub const MAX_MODELS: usize = 256;
/// Longest key of a worker, in bytes.
pub const MAX_API_KEY_BYTES: usize = 4096;
/// Largest encoded worker, in bytes.
pub const MAX_WORKER_BYTES: usize = 64 * 1024;

/// Fields of the documented worker spec that this version keeps and shows but does not act on.
const KEPT_FIELDS: [&str; 7] = [
    "constrained_decoding",
    "http_pool",
    "load_monitor_interval_secs",
    "multimodal_shm_min_bytes",
    "multimodal_tensor_transport",
    "overload",
    "zmq_handshake_address",
];

/// Why a spec was refused.
#[derive(Debug, Clone, PartialEq, Error)]
#[allow(missing_docs)]
pub enum SpecError {
    #[error("invalid url '{url}': {error}")]
    Url { url: String, error: UrlError },
    #[error("bootstrap_port must be between 1 and 65535")]
    BootstrapPort,
    #[error("cost must be a finite number above 0")]
    Cost,
    #[error("kv_block_size must be at least 1")]
    KvBlockSize,
    #[error("more than {MAX_LABELS} labels")]
    TooManyLabels,
    #[error("label key '{0}' must be 1 to {MAX_LABEL_KEY_BYTES} printable ASCII characters without spaces")]
    LabelKey(String),
    #[error("value of label '{0}' must be at most {MAX_LABEL_VALUE_BYTES} bytes without control characters")]
    LabelValue(String),
    #[error("label '{0}' must be a positive integer")]
    PositiveLabel(&'static str),
    #[error("label '{0}' must be \"true\" or \"false\"")]
    BooleanLabel(&'static str),
    #[error("more than {MAX_MODELS} models")]
    TooManyModels,
    #[error("a model needs an id of 1 to 512 bytes without control characters")]
    ModelId,
    #[error("{0} must be at least 1")]
    Threshold(&'static str),
    #[error("overload needs waiting_requests of at least 1 or token_usage above 0 and at most 1")]
    Overload,
    #[error(
        "api_key must be 1 to {MAX_API_KEY_BYTES} printable ASCII characters, the first and the last of them no space"
    )]
    ApiKey,
    #[error("the worker is larger than {MAX_WORKER_BYTES} bytes")]
    TooLarge,
}

/// Validates `spec` and brings it into the one form that is stored: normalised URL, connector labels moved into their fields, unknown
/// fields dropped.
///
/// # Errors
/// The first bound that is broken.
pub fn worker_spec(spec: &mut WorkerSpec) -> Result<WorkerUrl, SpecError> {
    let url = WorkerUrl::parse(&spec.url).map_err(|error| SpecError::Url { url: shorten(&spec.url), error })?;
    spec.url = url.as_str().to_owned();
    if spec.bootstrap_port == Some(0) {
        return Err(SpecError::BootstrapPort);
    }
    cost(spec.cost)?;
    if spec.kv_block_size == Some(0) {
        return Err(SpecError::KvBlockSize);
    }
    api_key(spec.api_key.as_ref())?;
    labels(&spec.labels)?;
    thresholds(&spec.health)?;
    if spec.models.len() > MAX_MODELS {
        return Err(SpecError::TooManyModels);
    }
    let ids = spec.models.iter().flat_map(|card| std::iter::once(&card.id).chain(&card.aliases));
    for id in ids {
        if id.is_empty() || id.len() > 512 || id.chars().any(char::is_control) {
            return Err(SpecError::ModelId);
        }
    }
    for (field, label) in [
        (&mut spec.kv_connector, "kv_connector"),
        (&mut spec.kv_role, "kv_role"),
        (&mut spec.kv_engine_id, "kv_engine_id"),
    ] {
        let labelled = spec.labels.remove(label);
        *field = field.take().or(labelled).filter(|value| !value.is_empty());
    }
    spec.extra.retain(|name, value| KEPT_FIELDS.contains(&name.as_str()) && !value.is_null());
    if !spec.extra.get("overload").is_none_or(crate::protection::is_valid_block) {
        return Err(SpecError::Overload);
    }
    if crate::wire::spec_bytes(spec) > MAX_WORKER_BYTES {
        return Err(SpecError::TooLarge);
    }
    Ok(url)
}

/// Validates the body of a PATCH.
///
/// # Errors
/// The first bound that is broken.
pub fn worker_patch(patch: &WorkerPatch) -> Result<(), SpecError> {
    if let Some(value) = patch.cost {
        cost(value)?;
    }
    api_key(patch.api_key.as_ref())?;
    thresholds(&patch.health)?;
    labels(&patch.labels)
}

/// A key travels in a header, over gRPC too: what no header can carry would fail each request to the worker.
fn api_key(key: Option<&Secret>) -> Result<(), SpecError> {
    let Some(key) = key.map(|key| &**key) else { return Ok(()) };
    let printable = key.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic());
    let fits = (1..=MAX_API_KEY_BYTES).contains(&key.len()) && key.trim() == key;
    if printable && fits { Ok(()) } else { Err(SpecError::ApiKey) }
}

fn cost(cost: f64) -> Result<(), SpecError> {
    if cost.is_finite() && cost > 0.0 { Ok(()) } else { Err(SpecError::Cost) }
}

fn thresholds(health: &crate::worker::HealthOverride) -> Result<(), SpecError> {
    if health.success_threshold == Some(0) {
        return Err(SpecError::Threshold("health.success_threshold"));
    }
    if health.failure_threshold == Some(0) {
        return Err(SpecError::Threshold("health.failure_threshold"));
    }
    if health.check_interval_secs == Some(0) {
        return Err(SpecError::Threshold("health.check_interval_secs"));
    }
    if health.timeout_secs == Some(0) {
        return Err(SpecError::Threshold("health.timeout_secs"));
    }
    Ok(())
}

fn labels(labels: &std::collections::BTreeMap<String, String>) -> Result<(), SpecError> {
    if labels.len() > MAX_LABELS {
        return Err(SpecError::TooManyLabels);
    }
    for (key, value) in labels {
        if key.is_empty() || key.len() > MAX_LABEL_KEY_BYTES || !key.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(SpecError::LabelKey(shorten(key)));
        }
        if value.len() > MAX_LABEL_VALUE_BYTES || value.chars().any(char::is_control) {
            return Err(SpecError::LabelValue(key.clone()));
        }
    }
    for name in ["max_running_requests", "max_num_seqs", "dp_size"] {
        if let Some(value) = labels.get(name)
            && !value.parse::<u32>().is_ok_and(|n| n > 0)
        {
            return Err(SpecError::PositiveLabel(name));
        }
    }
    for name in ["supports_vision", "realtime"] {
        if let Some(value) = labels.get(name)
            && value != "true"
            && value != "false"
        {
            return Err(SpecError::BooleanLabel(name));
        }
    }
    Ok(())
}

/// Keeps error messages readable when the input is not.
fn shorten(text: &str) -> String {
    const SHOWN: usize = 200;
    if text.chars().count() <= SHOWN {
        text.to_owned()
    } else {
        text.chars().take(SHOWN).chain("...".chars()).collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::worker::WorkerType;

    fn spec() -> WorkerSpec {
        WorkerSpec::new("http://p:1", WorkerType::Prefill)
    }

    #[test]
    fn connector_labels_move_into_their_fields_and_the_field_wins() {
        let mut spec = spec();
        spec.labels.insert("kv_connector".into(), "MooncakeConnector".into());
        spec.labels.insert("kv_engine_id".into(), "E1".into());
        spec.kv_connector = Some("NixlConnector".into());
        worker_spec(&mut spec).unwrap();
        assert_eq!(spec.kv_connector.as_deref(), Some("NixlConnector"));
        assert_eq!(spec.kv_engine_id.as_deref(), Some("E1"));
        assert!(spec.labels.is_empty());
    }

    #[test]
    fn unknown_fields_are_dropped_and_documented_ones_are_kept() {
        let text = r#"{"url":"http://p:1/","overload":{"waiting_requests":4},"dp_size":8,"x":1}"#;
        let mut spec: WorkerSpec = serde_json::from_str(text).unwrap();
        worker_spec(&mut spec).unwrap();
        assert_eq!(spec.extra.keys().collect::<Vec<_>>(), ["overload"]);
        assert_eq!(spec.url, "http://p:1");
    }

    #[test]
    fn a_key_that_no_header_can_carry_is_refused_in_a_spec_and_in_a_patch() {
        let long = "k".repeat(MAX_API_KEY_BYTES + 1);
        for (key, valid) in [
            ("a\r\nx: y", false),
            ("a\tb", false),
            ("", false),
            (" ", false),
            (" a", false),
            ("a ", false),
            ("schl\u{fc}ssel", false),
            (long.as_str(), false),
            (&long[1..], true),
            ("sk-1 ~!", true),
        ] {
            let mut spec = spec();
            spec.api_key = Some(key.into());
            let patch = WorkerPatch { api_key: Some(key.into()), ..WorkerPatch::default() };
            assert_eq!(worker_spec(&mut spec).is_ok(), valid, "{key:?}");
            assert_eq!(worker_patch(&patch), if valid { Ok(()) } else { Err(SpecError::ApiKey) }, "{key:?}");
        }
    }

    #[test]
    fn every_bound_is_checked() {
        let broken: [fn(&mut WorkerSpec); 12] = [
            |s| s.url = "p:1".into(),
            |s| s.bootstrap_port = Some(0),
            |s| s.cost = 0.0,
            |s| s.cost = f64::NAN,
            |s| s.kv_block_size = Some(0),
            |s| s.labels = (0..=MAX_LABELS).map(|n| (n.to_string(), String::new())).collect(),
            |s| drop(s.labels.insert("a b".into(), String::new())),
            |s| drop(s.labels.insert("a".into(), "x".repeat(MAX_LABEL_VALUE_BYTES + 1))),
            |s| drop(s.labels.insert("dp_size".into(), "0".into())),
            |s| drop(s.labels.insert("realtime".into(), "yes".into())),
            |s| s.models = vec![crate::ModelCard::default()],
            |s| s.health.failure_threshold = Some(0),
        ];
        for (index, breaks) in broken.iter().enumerate() {
            let mut spec = spec();
            breaks(&mut spec);
            assert!(worker_spec(&mut spec).is_err(), "bound {index}");
        }
    }
}
