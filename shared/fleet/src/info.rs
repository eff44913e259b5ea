//! The REST shape of a worker, as the documented system shows it: the id, the flattened spec, and what the fleet knows.

use serde_json::{Map, Value, json};

use crate::pairing::Descriptor;
use crate::worker::{JobStatus, Runtime, Status, Wire, Worker, WorkerType};

/// `WorkerInfo` of `GET /workers`: `{id, model_id, <spec>, connection_mode, is_healthy, status, load, http2, pd_pairing?, job_status?}`.
///
/// `load` is 0 and the health is the fleet's; a gateway lays its own over it. The API key is never part of it.
pub fn worker_info(worker: &Worker) -> Value {
    let status = worker.status();
    let mut info = Map::new();
    info.insert("id".into(), json!(worker.id));
    if worker.facts.is_some() {
        info.insert("model_id".into(), json!(worker.model_id()));
    }
    let mut spec = worker.spec.clone();
    spec.labels = worker.labels();
    spec.models = worker.models().to_vec();
    spec.runtime = worker.runtime();
    spec.kv_connector = worker.kv_connector().map(str::to_owned);
    spec.kv_role = worker.kv_role().map(str::to_owned);
    spec.kv_engine_id = worker.kv_engine_id().map(str::to_owned);
    if let Ok(Value::Object(fields)) = serde_json::to_value(&spec) {
        info.extend(fields);
    }
    if let Some(base) = worker.dp_base_url() {
        let number = |name: &str| worker.label(name).and_then(|text| text.parse::<u64>().ok());
        info.insert("dp_base_url".into(), json!(base));
        info.insert("dp_rank".into(), json!(number("dp_rank")));
        info.insert("dp_size".into(), json!(number("dp_size")));
    }
    info.insert("connection_mode".into(), json!(worker.wire().as_str()));
    info.insert("is_healthy".into(), json!(status == Status::Ready));
    info.insert("status".into(), json!(status.as_str()));
    info.insert("load".into(), json!(0));
    info.insert("http2".into(), json!(worker.facts.as_ref().is_some_and(|facts| facts.http2)));
    if let Some(descriptor) = Descriptor::of(worker) {
        info.insert("pd_pairing".into(), json!(descriptor.key()));
    }
    if runs_undeclared_passthrough(worker) {
        info.insert(
            "warning".into(),
            json!("no kv_connector is declared: PD requests run passthrough and decode recomputes every prompt"),
        );
    } else if has_no_bootstrap_port(worker) {
        info.insert(
            "warning".into(),
            json!("no bootstrap_port is registered: decode engines may not find this prefill"),
        );
    }
    info.insert("intent".into(), json!(worker.intent.as_str()));
    info.insert("origin".into(), json!(worker.origin.as_str()));
    info.insert("mod_revision".into(), json!(worker.mod_revision));
    if let Some(job) = &worker.job {
        let mut status = Map::new();
        status.insert("job_type".into(), json!(job.kind.as_str()));
        status.insert("worker_url".into(), json!(worker.spec.url));
        status.insert("status".into(), json!(job.status.as_str()));
        if let Some(message) = &job.message {
            status.insert("message".into(), json!(message));
        }
        status.insert("timestamp".into(), json!(job.at_unix_ms / 1000));
        info.insert("job_status".into(), Value::Object(status));
    }
    Value::Object(info)
}

/// `GET /workers`: the list, its length and the counts per role.
pub fn worker_list<'a>(workers: impl Iterator<Item = &'a Worker>) -> Value {
    let mut list = Vec::new();
    let (mut prefill, mut decode, mut regular) = (0u64, 0u64, 0u64);
    for worker in workers {
        match worker.spec.worker_type {
            WorkerType::Prefill => prefill += 1,
            WorkerType::Decode => decode += 1,
            WorkerType::Regular => regular += 1,
            WorkerType::Encode => {}
        }
        list.push(worker_info(worker));
    }
    json!({
        "total": list.len(),
        "workers": list,
        "stats": {"prefill_count": prefill, "decode_count": decode, "regular_count": regular},
    })
}

/// Whether the worker serves `model` under its id or an alias; a worker without models serves any.
pub fn serves(worker: &Worker, model: &str) -> bool {
    let models = worker.models();
    models.is_empty() || models.iter().any(|card| card.id == model || card.aliases.iter().any(|alias| alias == model))
}

/// Whether this is a registered vLLM prefill leg whose connector nobody declared: every answer looks right while decode recomputes.
pub fn runs_undeclared_passthrough(worker: &Worker) -> bool {
    worker.facts.is_some()
        && worker.spec.worker_type == WorkerType::Prefill
        && worker.runtime() == Runtime::Vllm
        && worker.kv_connector().is_none()
}

/// Whether a SGLang prefill worker over HTTP was registered without its bootstrap port: engines then get `null`, which most cannot use (SMG
/// PD docs, Bootstrap fields).
pub fn has_no_bootstrap_port(worker: &Worker) -> bool {
    worker.facts.is_some()
        && worker.spec.worker_type == WorkerType::Prefill
        && worker.runtime() == Runtime::Sglang
        && worker.wire() == Wire::Http
        && worker.spec.bootstrap_port.is_none()
}

/// Whether the last job of the worker failed.
pub fn job_failed(worker: &Worker) -> bool {
    worker.job.as_ref().is_some_and(|job| job.status == JobStatus::Failed)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::worker::{Facts, Health, Intent, Job, JobKind, ModelCard, Origin, Wire, WorkerId, WorkerSpec};

    fn worker() -> Worker {
        let mut spec = WorkerSpec::new("http://p:1", WorkerType::Prefill);
        spec.api_key = Some("hush".into());
        spec.kv_connector = Some("NixlConnector".into());
        let models = vec![ModelCard { id: "tiny".into(), context_length: Some(2048), ..Default::default() }];
        let labels = [("version".to_owned(), "0.32.0".to_owned())].into();
        Worker {
            id: WorkerId(Uuid::from_u128(7)),
            spec,
            facts: Some(Facts { wire: Wire::Http, runtime: Runtime::Vllm, labels, models, ..Facts::default() }),
            health: Health::Ready,
            intent: Intent::Active,
            origin: Origin::Api,
            job: None,
            create_revision: 1,
            mod_revision: 2,
        }
    }

    #[test]
    fn the_shape_is_the_documented_one_and_the_key_is_never_shown() {
        let info = worker_info(&worker());
        for field in ["id", "model_id", "url", "worker_type", "connection_mode", "runtime_type", "priority", "cost"] {
            assert!(info.get(field).is_some(), "{field}");
        }
        assert_eq!(info["pd_pairing"], "vllm/nixl/?");
        assert_eq!((info["is_healthy"].as_bool(), info["status"].as_str()), (Some(true), Some("ready")));
        assert_eq!(info["models"][0]["context_length"], 2048);
        assert!(!info.to_string().contains("hush"));
    }

    #[test]
    fn a_failed_job_is_readable() {
        let mut worker = worker();
        worker.facts = None;
        worker.job = Some(Job {
            number: 1,
            kind: JobKind::AddWorker,
            status: JobStatus::Failed,
            message: Some("connection refused".into()),
            at_unix_ms: 5_000,
            proposed: None,
        });
        let info = worker_info(&worker);
        assert_eq!(info["job_status"]["message"], "connection refused");
        assert_eq!((info["job_status"]["timestamp"].as_u64(), info["status"].as_str()), (Some(5), Some("failed")));
        assert!(info.get("model_id").is_none());
    }
}
