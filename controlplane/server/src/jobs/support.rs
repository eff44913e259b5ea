//! Which workers this version can serve. A worker it cannot is accepted like any other; its registration fails with the reason. Pure.

use smg_fleet::mooncake::BOOTSTRAP_PORT;
use smg_fleet::url::Scheme;
use smg_fleet::{Runtime, Wire, Worker, WorkerSpec, WorkerType, WorkerUrl};

/// Why registration must fail; `None` when the engine decides.
pub(super) fn unsupported(spec: &WorkerSpec) -> Option<String> {
    let url = match WorkerUrl::parse(&spec.url) {
        Ok(url) => url,
        Err(error) => return Some(error.to_string()),
    };
    let role = spec.worker_type;
    match url.scheme() {
        Scheme::Http | Scheme::Https => {}
        // Whatever engine it is: what has no handoff there is refused when it is asked for one.
        Scheme::Grpc | Scheme::Grpcs => return None,
        Scheme::Ipc if role != WorkerType::Regular => {
            return Some(format!("an ipc:// worker cannot be a {role} worker: the ZMQ wire has no KV handoff"));
        }
        Scheme::Ipc => return Some("ipc:// workers are not supported by this version".to_owned()),
    }
    let is_leg = matches!(role, WorkerType::Prefill | WorkerType::Decode);
    if is_leg && matches!(spec.runtime, Runtime::Trtllm | Runtime::Mlx | Runtime::Tokenspeed) {
        return Some(format!(
            "{} has no prefill/decode handoff over HTTP: use grpc:// or a regular worker",
            spec.runtime
        ));
    }
    None
}

/// The bootstrap port that partners of this prefill are handed: the registered one, else the default for Mooncake on vLLM
/// and for every engine that meets its partners over gRPC.
pub(super) fn bootstrap_port(worker: &Worker) -> Option<u16> {
    let spec = &worker.spec;
    if spec.worker_type != WorkerType::Prefill {
        return None;
    }
    match worker.runtime() {
        Runtime::Vllm => {
            let connector = smg_fleet::pairing::connector_transport(worker.kv_connector()?);
            (connector == "mooncake").then(|| spec.bootstrap_port.unwrap_or(BOOTSTRAP_PORT))
        }
        Runtime::Sglang | Runtime::Tokenspeed if worker.wire() == Wire::Grpc => {
            Some(spec.bootstrap_port.unwrap_or(BOOTSTRAP_PORT))
        }
        _ => spec.bootstrap_port,
    }
}

/// Warns when an engine says that it has another KV engine id than the one it was registered with, which counts all the same.
pub(crate) fn warn_of_another_engine_id(worker: &Worker) {
    if let (Some(registered), Some(engine)) = (worker.spec.kv_engine_id.as_deref(), worker.learned_engine_id())
        && registered != engine
    {
        tracing::warn!(
            target: "smg", worker = worker.spec.url, registered, engine,
            "the engine has another kv_engine_id than it was registered with: decode engines will not find its KV; \
             register it anew, with that id or with none"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_served_fails_with_its_reason() {
        let spec = |url: &str, role, runtime| WorkerSpec { runtime, ..WorkerSpec::new(url, role) };
        let refused = [
            ("ipc:///tmp/p", WorkerType::Prefill, Runtime::Vllm, "cannot be a prefill"),
            ("ipc:///tmp/d", WorkerType::Decode, Runtime::Vllm, "cannot be a decode"),
            ("ipc:///tmp/e", WorkerType::Encode, Runtime::Vllm, "cannot be a encode"),
            ("ipc:///tmp/r", WorkerType::Regular, Runtime::Vllm, "not supported"),
            ("http://h:1", WorkerType::Prefill, Runtime::Trtllm, "trtllm"),
            ("http://h:1", WorkerType::Decode, Runtime::Mlx, "mlx"),
            ("http://h:1", WorkerType::Decode, Runtime::Tokenspeed, "tokenspeed"),
        ];
        for (url, role, runtime, reason) in refused {
            let message = unsupported(&spec(url, role, runtime)).unwrap_or_default();
            assert!(message.contains(reason), "{url}: {message}");
        }
        assert_eq!(unsupported(&spec("http://h:1", WorkerType::Regular, Runtime::Trtllm)), None);
        assert_eq!(unsupported(&spec("grpc://h:1", WorkerType::Decode, Runtime::Tokenspeed)), None);
        assert_eq!(unsupported(&spec("grpcs://h:1", WorkerType::Prefill, Runtime::Unspecified)), None);
        assert_eq!(unsupported(&spec("http://h:1", WorkerType::Prefill, Runtime::Unspecified)), None);
    }

    fn worker(spec: &WorkerSpec, runtime: Runtime) -> Worker {
        Worker {
            id: smg_fleet::WorkerId(uuid::Uuid::nil()),
            spec: WorkerSpec { runtime, ..spec.clone() },
            facts: None,
            health: smg_fleet::Health::Ready,
            intent: smg_fleet::Intent::Active,
            origin: smg_fleet::Origin::Api,
            job: None,
            create_revision: 1,
            mod_revision: 1,
        }
    }

    #[test]
    fn the_bootstrap_port_is_the_one_that_partners_are_handed() {
        let mut spec = WorkerSpec::new("http://h:1", WorkerType::Prefill);
        let port = |spec: &WorkerSpec, runtime| bootstrap_port(&worker(spec, runtime));
        assert_eq!(port(&spec, Runtime::Sglang), None);
        assert_eq!(port(&spec, Runtime::Vllm), None);
        spec.kv_connector = Some("MooncakeConnector".into());
        assert_eq!(port(&spec, Runtime::Vllm), Some(8998));
        spec.bootstrap_port = Some(9000);
        assert_eq!(port(&spec, Runtime::Vllm), Some(9000));
        assert_eq!(port(&spec, Runtime::Sglang), Some(9000));
        spec.kv_connector = Some("NixlConnector".into());
        assert_eq!(port(&spec, Runtime::Vllm), None);
        spec.kv_connector = Some("MooncakeStoreConnector".into());
        assert_eq!(port(&spec, Runtime::Vllm), None);
        spec.worker_type = WorkerType::Decode;
        assert_eq!(port(&spec, Runtime::Sglang), None);
        let spec = WorkerSpec::new("grpc://h:1", WorkerType::Prefill);
        assert_eq!(port(&spec, Runtime::Sglang), Some(8998));
        assert_eq!(port(&spec, Runtime::Tokenspeed), Some(8998));
        assert_eq!(port(&spec, Runtime::Vllm), None);
    }
}
