//! Conversions between the domain model and the prost messages of disk and wire.
//!
//! The encoding is canonical: maps are ordered, so equal values have equal bytes. Enum numbers are the declaration order of the domain
//! enums, which the schema repeats; a number from a newer version becomes an error, never a guess.

mod access;
#[cfg(test)]
mod tests;
mod tuning;

use std::collections::BTreeMap;
use std::sync::Arc;

use prost::Message;
use smg_messages::state as pb;
use thiserror::Error;
use uuid::Uuid;

pub use access::{token_from_pb, token_to_pb};

use crate::access::Role;
use crate::policy::{
    BreakerPolicy, HealthPolicy, PolicyDocument, PolicyRecord, PolicySource, RegistrationPolicy, RetryPolicy,
};
use crate::snapshot::{Delta, Snapshot};
use crate::worker::{
    Facts, Health, HealthOverride, Intent, Job, JobKind, JobStatus, ModelCard, Origin, ResilienceOverride, Runtime,
    Wire, Worker, WorkerId, WorkerSpec, WorkerType,
};

/// Why bytes are not a valid message.
#[derive(Debug, Clone, PartialEq, Error)]
#[allow(missing_docs)]
pub enum WireError {
    #[error("malformed message: {0}")]
    Malformed(#[from] prost::DecodeError),
    #[error("field '{0}' is missing or has a value this version does not know")]
    Field(&'static str),
}

macro_rules! enum_numbers {
    ($($domain:ident => $number:ident, $value:ident, $field:literal);+ $(;)?) => {
        $(
            /// The number of the value in the schema.
            pub fn $number(value: $domain) -> i32 {
                $domain::ALL.iter().position(|candidate| *candidate == value).map_or(0, |index| index as i32)
            }

            /// The value of a number of the schema.
            pub fn $value(number: i32) -> Result<$domain, WireError> {
                usize::try_from(number).ok().and_then(|index| $domain::ALL.get(index)).copied().ok_or(WireError::Field($field))
            }
        )+
    };
}

enum_numbers! {
    WorkerType => worker_type_number, worker_type, "worker_type";
    Wire => wire_number, wire, "wire";
    Runtime => runtime_number, runtime, "runtime";
    Health => health_number, health, "health";
    Intent => intent_number, intent, "intent";
    Origin => origin_number, origin, "origin";
    JobKind => job_kind_number, job_kind, "job.kind";
    JobStatus => job_status_number, job_status, "job.status";
    PolicySource => policy_source_number, policy_source, "source";
    Role => role_number, role, "role";
}

/// A CRC-32C of `bytes`.
pub fn checksum(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes)
}

fn id_from_bytes(bytes: &[u8], field: &'static str) -> Result<Uuid, WireError> {
    Uuid::from_slice(bytes).map_err(|_| WireError::Field(field))
}

/// A worker id from its 16 bytes.
///
/// # Errors
/// When there are not 16 of them.
pub fn worker_id(bytes: &[u8]) -> Result<WorkerId, WireError> {
    id_from_bytes(bytes, "worker id").map(WorkerId)
}

/// The 16 bytes of a worker id.
pub fn worker_id_bytes(id: WorkerId) -> Vec<u8> {
    id.0.as_bytes().to_vec()
}

fn extra_to_json(extra: &BTreeMap<String, serde_json::Value>) -> String {
    if extra.is_empty() { String::new() } else { serde_json::to_string(extra).unwrap_or_default() }
}

fn extra_from_json(text: &str) -> Result<BTreeMap<String, serde_json::Value>, WireError> {
    if text.is_empty() {
        return Ok(BTreeMap::new());
    }
    serde_json::from_str(text).map_err(|_| WireError::Field("extra_json"))
}

fn card_to_pb(card: &ModelCard) -> pb::ModelCard {
    pb::ModelCard {
        id: card.id.clone(),
        display_name: card.display_name.clone(),
        aliases: card.aliases.clone(),
        context_length: card.context_length,
        extra_json: extra_to_json(&card.extra),
    }
}

fn card_from_pb(card: pb::ModelCard) -> Result<ModelCard, WireError> {
    Ok(ModelCard {
        id: card.id,
        display_name: card.display_name,
        aliases: card.aliases,
        context_length: card.context_length,
        extra: extra_from_json(&card.extra_json)?,
    })
}

/// A health override as a message.
pub fn health_override_to_pb(health: &HealthOverride) -> pb::HealthOverride {
    pb::HealthOverride {
        timeout_secs: health.timeout_secs,
        check_interval_secs: health.check_interval_secs,
        success_threshold: health.success_threshold,
        failure_threshold: health.failure_threshold,
        disable_health_check: health.disable_health_check,
        drain_settle_secs: health.drain_settle_secs,
    }
}

/// A health override from a message; absent = nothing overridden.
pub fn health_override_from_pb(health: Option<pb::HealthOverride>) -> HealthOverride {
    let health = health.unwrap_or_default();
    HealthOverride {
        timeout_secs: health.timeout_secs,
        check_interval_secs: health.check_interval_secs,
        success_threshold: health.success_threshold,
        failure_threshold: health.failure_threshold,
        disable_health_check: health.disable_health_check,
        drain_settle_secs: health.drain_settle_secs,
    }
}

fn resilience_to_pb(resilience: &ResilienceOverride) -> pb::ResilienceOverride {
    pb::ResilienceOverride {
        max_retries: resilience.max_retries,
        initial_backoff_ms: resilience.initial_backoff_ms,
        max_backoff_ms: resilience.max_backoff_ms,
        backoff_multiplier: resilience.backoff_multiplier,
        jitter_factor: resilience.jitter_factor,
        disable_retry: resilience.disable_retry,
        cb_failure_threshold: resilience.cb_failure_threshold,
        cb_success_threshold: resilience.cb_success_threshold,
        cb_timeout_secs: resilience.cb_timeout_secs,
        cb_window_secs: resilience.cb_window_secs,
        disable_circuit_breaker: resilience.disable_circuit_breaker,
        retryable_status_codes: resilience.retryable_status_codes.iter().map(|code| u32::from(*code)).collect(),
        capacity_status_codes: resilience.capacity_status_codes.iter().map(|code| u32::from(*code)).collect(),
    }
}

fn resilience_from_pb(resilience: pb::ResilienceOverride) -> Result<ResilienceOverride, WireError> {
    let codes = |codes: Vec<u32>| -> Result<Vec<u16>, WireError> {
        codes.into_iter().map(|code| u16::try_from(code).map_err(|_| WireError::Field("status codes"))).collect()
    };
    Ok(ResilienceOverride {
        max_retries: resilience.max_retries,
        initial_backoff_ms: resilience.initial_backoff_ms,
        max_backoff_ms: resilience.max_backoff_ms,
        backoff_multiplier: resilience.backoff_multiplier,
        jitter_factor: resilience.jitter_factor,
        disable_retry: resilience.disable_retry,
        cb_failure_threshold: resilience.cb_failure_threshold,
        cb_success_threshold: resilience.cb_success_threshold,
        cb_timeout_secs: resilience.cb_timeout_secs,
        cb_window_secs: resilience.cb_window_secs,
        disable_circuit_breaker: resilience.disable_circuit_breaker,
        retryable_status_codes: codes(resilience.retryable_status_codes)?,
        capacity_status_codes: codes(resilience.capacity_status_codes)?,
    })
}

/// A spec as a message.
pub fn spec_to_pb(spec: &WorkerSpec) -> pb::WorkerSpec {
    pb::WorkerSpec {
        url: spec.url.clone(),
        models: spec.models.iter().map(card_to_pb).collect(),
        worker_type: worker_type_number(spec.worker_type),
        runtime: runtime_number(spec.runtime),
        provider: spec.provider.clone(),
        labels: spec.labels.clone(),
        priority: spec.priority,
        cost: spec.cost,
        api_key: spec.api_key.as_deref().map(str::to_owned),
        bootstrap_port: spec.bootstrap_port.map(u32::from),
        kv_connector: spec.kv_connector.clone(),
        kv_role: spec.kv_role.clone(),
        kv_engine_id: spec.kv_engine_id.clone(),
        kv_block_size: spec.kv_block_size,
        pairing_protocol: spec.pairing_protocol.clone(),
        health: (!spec.health.is_empty()).then(|| health_override_to_pb(&spec.health)),
        resilience: (!spec.resilience.is_empty()).then(|| resilience_to_pb(&spec.resilience)),
        max_connection_attempts: spec.max_connection_attempts,
        extra_json: extra_to_json(&spec.extra),
    }
}

/// A spec from a message.
///
/// # Errors
/// When a field is missing or unknown.
pub fn spec_from_pb(spec: pb::WorkerSpec) -> Result<WorkerSpec, WireError> {
    let bootstrap_port = spec.bootstrap_port.map(u16::try_from).transpose();
    Ok(WorkerSpec {
        url: spec.url,
        models: spec.models.into_iter().map(card_from_pb).collect::<Result<_, _>>()?,
        worker_type: worker_type(spec.worker_type)?,
        runtime: runtime(spec.runtime)?,
        provider: spec.provider,
        labels: spec.labels,
        priority: spec.priority,
        cost: spec.cost,
        api_key: spec.api_key.map(Into::into),
        bootstrap_port: bootstrap_port.map_err(|_| WireError::Field("bootstrap_port"))?,
        kv_connector: spec.kv_connector,
        kv_role: spec.kv_role,
        kv_engine_id: spec.kv_engine_id,
        kv_block_size: spec.kv_block_size,
        pairing_protocol: spec.pairing_protocol,
        health: health_override_from_pb(spec.health),
        resilience: spec.resilience.map(resilience_from_pb).transpose()?.unwrap_or_default(),
        max_connection_attempts: spec.max_connection_attempts,
        extra: extra_from_json(&spec.extra_json)?,
    })
}

/// Encoded size of a spec, in bytes.
pub fn spec_bytes(spec: &WorkerSpec) -> usize {
    spec_to_pb(spec).encoded_len()
}

/// Facts as a message.
pub fn facts_to_pb(facts: &Facts) -> pb::Facts {
    pb::Facts {
        wire: wire_number(facts.wire),
        runtime: runtime_number(facts.runtime),
        labels: facts.labels.clone(),
        models: facts.models.iter().map(card_to_pb).collect(),
        http2: facts.http2,
        kv_connector: facts.kv_connector.clone(),
        kv_role: facts.kv_role.clone(),
        kv_engine_id: facts.kv_engine_id.clone(),
        owned_by: facts.owned_by.clone(),
    }
}

/// Facts from a message.
///
/// # Errors
/// When a field is missing or unknown.
pub fn facts_from_pb(facts: pb::Facts) -> Result<Facts, WireError> {
    Ok(Facts {
        wire: wire(facts.wire)?,
        runtime: runtime(facts.runtime)?,
        labels: facts.labels,
        models: facts.models.into_iter().map(card_from_pb).collect::<Result<_, _>>()?,
        http2: facts.http2,
        kv_connector: facts.kv_connector,
        kv_role: facts.kv_role,
        kv_engine_id: facts.kv_engine_id,
        owned_by: facts.owned_by,
    })
}

fn job_to_pb(job: &Job) -> pb::Job {
    pb::Job {
        number: job.number,
        kind: job_kind_number(job.kind),
        status: job_status_number(job.status),
        message: job.message.clone(),
        at_unix_ms: job.at_unix_ms,
        proposed: job.proposed.as_deref().map(spec_to_pb),
    }
}

fn job_from_pb(job: pb::Job) -> Result<Job, WireError> {
    Ok(Job {
        number: job.number,
        kind: job_kind(job.kind)?,
        status: job_status(job.status)?,
        message: job.message,
        at_unix_ms: job.at_unix_ms,
        proposed: job.proposed.map(spec_from_pb).transpose()?.map(Box::new),
    })
}

/// A worker as a message.
pub fn worker_to_pb(worker: &Worker) -> pb::Worker {
    pb::Worker {
        id: worker_id_bytes(worker.id),
        spec: Some(spec_to_pb(&worker.spec)),
        facts: worker.facts.as_ref().map(facts_to_pb),
        health: health_number(worker.health),
        intent: intent_number(worker.intent),
        origin: origin_number(worker.origin),
        job: worker.job.as_ref().map(job_to_pb),
        create_revision: worker.create_revision,
        mod_revision: worker.mod_revision,
    }
}

/// A worker from a message.
///
/// # Errors
/// When a field is missing or unknown.
pub fn worker_from_pb(worker: pb::Worker) -> Result<Worker, WireError> {
    Ok(Worker {
        id: worker_id(&worker.id)?,
        spec: spec_from_pb(worker.spec.ok_or(WireError::Field("spec"))?)?,
        facts: worker.facts.map(facts_from_pb).transpose()?,
        health: health(worker.health)?,
        intent: intent(worker.intent)?,
        origin: origin(worker.origin)?,
        job: worker.job.map(job_from_pb).transpose()?,
        create_revision: worker.create_revision,
        mod_revision: worker.mod_revision,
    })
}

/// A policy document as a message.
pub fn document_to_pb(document: &PolicyDocument) -> pb::PolicyDocument {
    let name = |name: &str| name.to_owned();
    pb::PolicyDocument {
        policy: document.policy.map(|policy| name(policy.as_str())),
        prefill_policy: document.prefill_policy.map(|policy| name(policy.as_str())),
        decode_policy: document.decode_policy.map(|policy| name(policy.as_str())),
        pairing_mode: document.pairing_mode.map(|mode| name(mode.as_str())),
        client_handoff_fields: document.client_handoff_fields.map(|fields| name(fields.as_str())),
        retry: document.retry.as_ref().map(|retry| pb::RetryPolicy {
            max_retries: retry.max_retries,
            initial_backoff_ms: retry.initial_backoff_ms,
            max_backoff_ms: retry.max_backoff_ms,
            backoff_multiplier: retry.backoff_multiplier,
            jitter_factor: retry.jitter_factor,
            disabled: retry.disabled,
            budget_ratio: retry.budget_ratio,
            budget_min_per_sec: retry.budget_min_per_sec,
        }),
        circuit_breaker: document.circuit_breaker.as_ref().map(|breaker| pb::BreakerPolicy {
            failure_threshold: breaker.failure_threshold,
            success_threshold: breaker.success_threshold,
            timeout_secs: breaker.timeout_secs,
            window_secs: breaker.window_secs,
            disabled: breaker.disabled,
        }),
        health: document.health.as_ref().map(|health| pb::HealthPolicy {
            endpoint: health.endpoint.clone(),
            timeout_secs: health.timeout_secs,
            check_interval_secs: health.check_interval_secs,
            success_threshold: health.success_threshold,
            failure_threshold: health.failure_threshold,
            disabled: health.disabled,
            drain_settle_secs: health.drain_settle_secs,
            drain_timeout_secs: health.drain_timeout_secs,
        }),
        registration: document.registration.as_ref().map(|registration| pb::RegistrationPolicy {
            timeout_secs: registration.timeout_secs,
            check_interval_secs: registration.check_interval_secs,
            delay_secs: registration.delay_secs,
        }),
        power_of_two: document.power_of_two.as_ref().map(tuning::power_of_two_to_pb),
        least_load: document.least_load.as_ref().map(tuning::least_load_to_pb),
        cache_aware: document.cache_aware.as_ref().map(tuning::cache_aware_to_pb),
        prefix_hash: document.prefix_hash.as_ref().map(tuning::prefix_hash_to_pb),
        manual: document.manual.as_ref().map(tuning::manual_to_pb),
        bucket: document.bucket.as_ref().map(tuning::bucket_to_pb),
        overload: document.overload.as_ref().map(tuning::overload_to_pb),
        prefill_admission: document.prefill_admission.as_ref().map(tuning::prefill_admission_to_pb),
        dp_aware: document.dp_aware,
        pd_admission_wait_secs: document.pd_admission_wait_secs,
        dp_minimum_tokens: document.dp_minimum_tokens,
        expired_slots: document.expired_slots.map(|slots| name(slots.as_str())),
    }
}

fn named<T>(
    name: Option<String>,
    parse: impl Fn(&str) -> Option<T>,
    field: &'static str,
) -> Result<Option<T>, WireError> {
    name.map(|name| parse(&name).ok_or(WireError::Field(field))).transpose()
}

/// A policy document from a message.
///
/// # Errors
/// When a name is unknown.
pub fn document_from_pb(document: pb::PolicyDocument) -> Result<PolicyDocument, WireError> {
    use crate::pairing::PairingMode;
    use crate::policy::{ClientHandoffFields, ExpiredSlots, PolicyName};
    Ok(PolicyDocument {
        policy: named(document.policy, PolicyName::from_name, "policy")?,
        prefill_policy: named(document.prefill_policy, PolicyName::from_name, "prefill_policy")?,
        decode_policy: named(document.decode_policy, PolicyName::from_name, "decode_policy")?,
        pairing_mode: named(document.pairing_mode, PairingMode::from_name, "pairing_mode")?,
        client_handoff_fields: named(
            document.client_handoff_fields,
            ClientHandoffFields::from_name,
            "client_handoff_fields",
        )?,
        retry: document.retry.map(|retry| RetryPolicy {
            max_retries: retry.max_retries,
            initial_backoff_ms: retry.initial_backoff_ms,
            max_backoff_ms: retry.max_backoff_ms,
            backoff_multiplier: retry.backoff_multiplier,
            jitter_factor: retry.jitter_factor,
            disabled: retry.disabled,
            budget_ratio: retry.budget_ratio,
            budget_min_per_sec: retry.budget_min_per_sec,
        }),
        circuit_breaker: document.circuit_breaker.map(|breaker| BreakerPolicy {
            failure_threshold: breaker.failure_threshold,
            success_threshold: breaker.success_threshold,
            timeout_secs: breaker.timeout_secs,
            window_secs: breaker.window_secs,
            disabled: breaker.disabled,
        }),
        health: document.health.map(|health| HealthPolicy {
            endpoint: health.endpoint,
            timeout_secs: health.timeout_secs,
            check_interval_secs: health.check_interval_secs,
            success_threshold: health.success_threshold,
            failure_threshold: health.failure_threshold,
            disabled: health.disabled,
            drain_settle_secs: health.drain_settle_secs,
            drain_timeout_secs: health.drain_timeout_secs,
        }),
        registration: document.registration.map(|registration| RegistrationPolicy {
            timeout_secs: registration.timeout_secs,
            check_interval_secs: registration.check_interval_secs,
            delay_secs: registration.delay_secs,
        }),
        power_of_two: document.power_of_two.map(tuning::power_of_two_from_pb).transpose()?,
        least_load: document.least_load.map(tuning::least_load_from_pb),
        cache_aware: document.cache_aware.map(tuning::cache_aware_from_pb).transpose()?,
        prefix_hash: document.prefix_hash.map(tuning::prefix_hash_from_pb),
        manual: document.manual.map(tuning::manual_from_pb).transpose()?,
        bucket: document.bucket.map(tuning::bucket_from_pb),
        overload: document.overload.map(tuning::overload_from_pb),
        prefill_admission: document.prefill_admission.map(tuning::prefill_admission_from_pb),
        dp_aware: document.dp_aware,
        pd_admission_wait_secs: document.pd_admission_wait_secs,
        dp_minimum_tokens: document.dp_minimum_tokens,
        expired_slots: named(document.expired_slots, ExpiredSlots::from_name, "expired_slots")?,
    })
}

/// A policy record as a message.
pub fn record_to_pb(record: &PolicyRecord) -> pb::PolicyRecord {
    pb::PolicyRecord {
        model: record.model.clone(),
        document: Some(document_to_pb(&record.document)),
        source: policy_source_number(record.source),
        startup: record.startup.as_ref().map(document_to_pb),
        mod_revision: record.mod_revision,
    }
}

/// A policy record from a message.
///
/// # Errors
/// When a field is missing or unknown.
pub fn record_from_pb(record: pb::PolicyRecord) -> Result<PolicyRecord, WireError> {
    Ok(PolicyRecord {
        model: record.model,
        document: document_from_pb(record.document.unwrap_or_default())?,
        source: policy_source(record.source)?,
        startup: record.startup.map(document_from_pb).transpose()?,
        mod_revision: record.mod_revision,
    })
}

/// The canonical bytes of a snapshot.
pub fn encode_snapshot(snapshot: &Snapshot) -> Vec<u8> {
    pb::Snapshot {
        cluster_id: snapshot.cluster_id.as_bytes().to_vec(),
        history_id: snapshot.history_id.as_bytes().to_vec(),
        revision: snapshot.revision,
        workers: snapshot.workers.values().map(|worker| worker_to_pb(worker)).collect(),
        policies: snapshot.policies.values().map(|record| record_to_pb(record)).collect(),
        tokens: snapshot.tokens.values().map(|token| token_to_pb(token)).collect(),
    }
    .encode_to_vec()
}

/// A snapshot from its bytes.
///
/// # Errors
/// When the bytes are malformed or of a newer version.
pub fn decode_snapshot(bytes: &[u8]) -> Result<Snapshot, WireError> {
    let snapshot = pb::Snapshot::decode(bytes)?;
    let workers = snapshot.workers.into_iter().map(|worker| worker_from_pb(worker).map(|w| (w.id, Arc::new(w))));
    let policies =
        snapshot.policies.into_iter().map(|record| record_from_pb(record).map(|r| (r.model.clone(), Arc::new(r))));
    let tokens = snapshot.tokens.into_iter().map(|token| token_from_pb(token).map(|t| (t.id, Arc::new(t))));
    Ok(Snapshot {
        cluster_id: id_from_bytes(&snapshot.cluster_id, "cluster_id")?,
        history_id: id_from_bytes(&snapshot.history_id, "history_id")?,
        revision: snapshot.revision,
        workers: workers.collect::<Result<_, _>>()?,
        policies: policies.collect::<Result<_, _>>()?,
        tokens: tokens.collect::<Result<_, _>>()?,
    })
}

/// A delta as a message.
pub fn delta_to_pb(delta: &Delta) -> pb::Delta {
    pb::Delta {
        history_id: delta.history_id.as_bytes().to_vec(),
        from_revision: delta.from_revision,
        to_revision: delta.to_revision,
        upserted_workers: delta.upserted_workers.iter().map(|worker| worker_to_pb(worker)).collect(),
        removed_workers: delta.removed_workers.iter().map(|id| worker_id_bytes(*id)).collect(),
        upserted_policies: delta.upserted_policies.iter().map(|record| record_to_pb(record)).collect(),
        removed_policies: delta.removed_policies.clone(),
        result_checksum: delta.result_checksum,
        tokens: delta.tokens.iter().map(|token| token_to_pb(token)).collect(),
    }
}

/// A delta from a message.
///
/// # Errors
/// When a field is missing or unknown.
pub fn delta_from_pb(delta: pb::Delta) -> Result<Delta, WireError> {
    let workers = delta.upserted_workers.into_iter().map(|worker| worker_from_pb(worker).map(Arc::new));
    let policies = delta.upserted_policies.into_iter().map(|record| record_from_pb(record).map(Arc::new));
    let tokens = delta.tokens.into_iter().map(|token| token_from_pb(token).map(Arc::new));
    Ok(Delta {
        history_id: id_from_bytes(&delta.history_id, "history_id")?,
        from_revision: delta.from_revision,
        to_revision: delta.to_revision,
        upserted_workers: workers.collect::<Result<_, _>>()?,
        removed_workers: delta.removed_workers.iter().map(|id| worker_id(id)).collect::<Result<_, _>>()?,
        upserted_policies: policies.collect::<Result<_, _>>()?,
        removed_policies: delta.removed_policies,
        result_checksum: delta.result_checksum,
        tokens: tokens.collect::<Result<_, _>>()?,
    })
}

/// The bytes of a delta.
pub fn encode_delta(delta: &Delta) -> Vec<u8> {
    delta_to_pb(delta).encode_to_vec()
}

/// A delta from its bytes.
///
/// # Errors
/// When the bytes are malformed or of a newer version.
pub fn decode_delta(bytes: &[u8]) -> Result<Delta, WireError> {
    delta_from_pb(pb::Delta::decode(bytes)?)
}
