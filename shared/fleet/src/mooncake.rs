//! Who a Mooncake prefill engine is, by its bootstrap server (vLLM 0.32, `GET /query`).
//!
//! vLLM's HTTP server does not tell an engine's KV engine id, without which no decode engine finds its KV. Its bootstrap server does:
//! `{"<rank>": {"engine_id": "…", "worker_addr": {…}}, …}`.
//!
//! Invariants
//! * an id that was learned there is a fact, and replaced when the engine is started anew under another one;
//! * an id that an operator wrote is the operator's: it counts, whatever the engine says, and is never replaced.

use serde_json::Value;

use crate::validate::MAX_LABEL_VALUE_BYTES;
use crate::worker::{Runtime, WorkerSpec, WorkerType};

/// Where vLLM's bootstrap server listens unless told otherwise.
pub const BOOTSTRAP_PORT: u16 = 8998;

/// The port of a worker's bootstrap server; `None` for all but vLLM prefill workers with a Mooncake connector.
pub fn bootstrap_port(spec: &WorkerSpec, runtime: Runtime) -> Option<u16> {
    let is_prefill = spec.worker_type == WorkerType::Prefill && runtime == Runtime::Vllm;
    let transport = crate::pairing::connector_transport(spec.kv_connector.as_deref().filter(|_| is_prefill)?);
    (transport == "mooncake").then(|| spec.bootstrap_port.unwrap_or(BOOTSTRAP_PORT))
}

/// Where to ask for the id of a worker whose bootstrap server is on `host` (an IPv6 address in brackets).
pub fn query_url(spec: &WorkerSpec, runtime: Runtime, host: &str) -> Option<String> {
    Some(format!("http://{host}:{}/query", bootstrap_port(spec, runtime)?))
}

/// The engine id in an answer of `/query`, as an operator would write it: that of an engine with several data-parallel ranks (`width`, or as
/// many as answer) without the `_dp<rank>` that tells these apart. `None` when the answer does not settle it.
pub fn engine_id(answer: &[u8], width: u32) -> Option<String> {
    let answer: Value = serde_json::from_slice(answer).ok()?;
    let ranks = answer.as_object()?;
    let several = ranks.len() > 1 || width > 1;
    let mut ids = ranks.iter().map(|(rank, entry)| {
        let id = entry.get("engine_id")?.as_str()?;
        if several { id.strip_suffix(rank.as_str())?.strip_suffix("_dp") } else { Some(id) }
    });
    let first = ids.next()??;
    let fits = !first.is_empty() && first.len() <= MAX_LABEL_VALUE_BYTES && !first.chars().any(char::is_control);
    (fits && ids.all(|id| id == Some(first))).then(|| first.to_owned())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_learned_where_all_ranks_agree_on_it() {
        let one = r#"{"0":{"engine_id":"354f0fe8","worker_addr":{"0":{"0":"tcp://127.0.0.1:34647"}}}}"#;
        assert_eq!(engine_id(one.as_bytes(), 1).as_deref(), Some("354f0fe8"));
        let two = r#"{"0":{"engine_id":"E_dp0"},"1":{"engine_id":"E_dp1"}}"#;
        assert_eq!(engine_id(two.as_bytes(), 1).as_deref(), Some("E"));
        // A server of one rank of two.
        assert_eq!(engine_id(br#"{"1":{"engine_id":"E_dp1"}}"#, 2).as_deref(), Some("E"));
        for unsettled in [
            "",
            "[]",
            "{}",
            r#"{"0":{}}"#,
            r#"{"0":{"engine_id":""}}"#,
            r#"{"0":{"engine_id":7}}"#,
            r#"{"0":{"engine_id":"a\n"}}"#,
            r#"{"0":{"engine_id":"E_dp0"},"1":{"engine_id":"F_dp1"}}"#,
            r#"{"0":{"engine_id":"E"},"1":{"engine_id":"E"}}"#,
        ] {
            assert_eq!(engine_id(unsettled.as_bytes(), 1), None, "{unsettled}");
        }
    }

    #[test]
    fn only_vllm_prefill_workers_with_mooncake_are_asked() {
        let mut spec = WorkerSpec::new("http://h:1", WorkerType::Prefill);
        assert_eq!(query_url(&spec, Runtime::Vllm, "h"), None);
        spec.kv_connector = Some("MooncakeConnector".into());
        assert_eq!(query_url(&spec, Runtime::Vllm, "[::1]").as_deref(), Some("http://[::1]:8998/query"));
        spec.bootstrap_port = Some(9000);
        assert_eq!(query_url(&spec, Runtime::Vllm, "h").as_deref(), Some("http://h:9000/query"));
        assert_eq!(query_url(&spec, Runtime::Sglang, "h"), None);
        spec.worker_type = WorkerType::Decode;
        assert_eq!(query_url(&spec, Runtime::Vllm, "h"), None);
    }
}
