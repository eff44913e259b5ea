//! Which workers this version can serve. A worker it cannot is accepted like any other; its registration fails with the reason. Pure.

use smg_fleet::url::Scheme;
use smg_fleet::{Runtime, WorkerSpec, WorkerType, WorkerUrl};

/// Why registration must fail; `None` when the engine decides.
pub(super) fn unsupported(spec: &WorkerSpec) -> Option<String> {
    let url = match WorkerUrl::parse(&spec.url) {
        Ok(url) => url,
        Err(error) => return Some(error.to_string()),
    };
    let role = spec.worker_type;
    match url.scheme() {
        Scheme::Http | Scheme::Https => {}
        Scheme::Ipc if role != WorkerType::Regular => {
            return Some(format!("an ipc:// worker cannot be a {role} worker: the ZMQ wire has no KV handoff"));
        }
        Scheme::Ipc => return Some("ipc:// workers are not supported by this version".to_owned()),
        Scheme::Grpc | Scheme::Grpcs => {
            return Some("gRPC workers are not supported by this version: use the engine's HTTP server".to_owned());
        }
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

/// The bootstrap port that partners of this prefill are handed: the registered one, else Mooncake's default on vLLM.
pub(super) fn bootstrap_port(spec: &WorkerSpec, runtime: Runtime) -> Option<u16> {
    if spec.worker_type != WorkerType::Prefill {
        return None;
    }
    if runtime != Runtime::Vllm {
        return spec.bootstrap_port;
    }
    let connector = smg_fleet::pairing::connector_transport(spec.kv_connector.as_deref()?);
    (connector == "mooncake").then(|| spec.bootstrap_port.unwrap_or(DEFAULT_MOONCAKE_PORT))
}

/// Where vLLM's Mooncake bootstrap server listens unless told otherwise.
const DEFAULT_MOONCAKE_PORT: u16 = 8998;

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
            ("grpc://h:1", WorkerType::Prefill, Runtime::Vllm, "gRPC"),
            ("grpcs://h:1", WorkerType::Regular, Runtime::Vllm, "gRPC"),
            ("http://h:1", WorkerType::Prefill, Runtime::Trtllm, "trtllm"),
            ("http://h:1", WorkerType::Decode, Runtime::Mlx, "mlx"),
            ("http://h:1", WorkerType::Decode, Runtime::Tokenspeed, "tokenspeed"),
        ];
        for (url, role, runtime, reason) in refused {
            let message = unsupported(&spec(url, role, runtime)).unwrap_or_default();
            assert!(message.contains(reason), "{url}: {message}");
        }
        assert_eq!(unsupported(&spec("http://h:1", WorkerType::Regular, Runtime::Trtllm)), None);
        assert_eq!(unsupported(&spec("http://h:1", WorkerType::Prefill, Runtime::Unspecified)), None);
    }

    #[test]
    fn the_bootstrap_port_is_the_one_that_partners_are_handed() {
        let mut spec = WorkerSpec::new("http://h:1", WorkerType::Prefill);
        assert_eq!(bootstrap_port(&spec, Runtime::Sglang), None);
        assert_eq!(bootstrap_port(&spec, Runtime::Vllm), None);
        spec.kv_connector = Some("MooncakeConnector".into());
        assert_eq!(bootstrap_port(&spec, Runtime::Vllm), Some(8998));
        spec.bootstrap_port = Some(9000);
        assert_eq!(bootstrap_port(&spec, Runtime::Vllm), Some(9000));
        assert_eq!(bootstrap_port(&spec, Runtime::Sglang), Some(9000));
        spec.kv_connector = Some("NixlConnector".into());
        assert_eq!(bootstrap_port(&spec, Runtime::Vllm), None);
        spec.kv_connector = Some("MooncakeStoreConnector".into());
        assert_eq!(bootstrap_port(&spec, Runtime::Vllm), None);
        spec.worker_type = WorkerType::Decode;
        assert_eq!(bootstrap_port(&spec, Runtime::Sglang), None);
    }
}
