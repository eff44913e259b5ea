//! Disk and wire form of commands, outcomes and the whole state. Canonical: equal values have equal bytes.

use std::sync::Arc;

use prost::Message;
use smg_fleet::wire::{self, WireError};
use smg_fleet::worker::WorkerPatch;
use smg_fleet::{ClusterSettings, StartupToken, TokenHash, Worker, WorkerId};
use smg_messages::state as pb;
use uuid::Uuid;

use crate::audit::{AuditChange, AuditRecord};
use crate::command::{Command, Envelope, Outcome, Rejection, RejectionCode};
use crate::departures::{Departed, Departures};
use crate::members::Member;
use crate::memory::Remembered;
use crate::state::State;

fn uuid(bytes: &[u8], field: &'static str) -> Result<Uuid, WireError> {
    Uuid::from_slice(bytes).map_err(|_| WireError::Field(field))
}

fn required<T>(value: Option<T>, field: &'static str) -> Result<T, WireError> {
    value.ok_or(WireError::Field(field))
}

fn id_bytes(id: &WorkerId) -> Vec<u8> {
    wire::worker_id_bytes(*id)
}

fn ledger(error: smg_admission::wire::WireError) -> WireError {
    WireError::Field(error.0)
}

fn settings_to_pb(settings: &ClusterSettings) -> pb::ClusterSettings {
    pb::ClusterSettings { name: settings.name.clone() }
}

fn settings_from_pb(settings: Option<pb::ClusterSettings>) -> ClusterSettings {
    ClusterSettings { name: settings.and_then(|settings| settings.name) }
}

fn token_to_pb(id: &Uuid, token: &StartupToken) -> pb::CreateToken {
    pb::CreateToken {
        id: id.as_bytes().to_vec(),
        name: token.name.clone(),
        role: wire::role_number(token.role),
        sha256: token.hash.as_bytes().to_vec(),
    }
}

fn token_from_pb(token: pb::CreateToken) -> Result<(Uuid, StartupToken), WireError> {
    let hash = required(TokenHash::from_bytes(&token.sha256), "sha256")?;
    let id = uuid(&token.id, "token id")?;
    Ok((id, StartupToken { name: token.name, role: wire::role(token.role)?, hash }))
}

/// An envelope as a message.
pub fn envelope_to_pb(envelope: &Envelope) -> pb::Envelope {
    use pb::envelope::Command as Pb;
    let command = match &envelope.command {
        Command::InitCluster { cluster_id, history_id } => Pb::InitCluster(pb::InitCluster {
            cluster_id: cluster_id.as_bytes().to_vec(),
            history_id: history_id.as_bytes().to_vec(),
        }),
        Command::RegisterMember { node_id, storage_id, peer_address, api_address } => {
            Pb::RegisterMember(pb::RegisterMember {
                node_id: *node_id,
                storage_id: storage_id.as_bytes().to_vec(),
                peer_address: peer_address.clone(),
                api_address: api_address.clone(),
            })
        }
        Command::RetireMembers { node_ids } => Pb::RetireMembers(pb::RetireMembers { node_ids: node_ids.clone() }),
        Command::LedgerRound { number, events } => Pb::LedgerRound(pb::LedgerRound {
            number: *number,
            events: events.iter().map(smg_admission::wire::event_to_pb).collect(),
        }),
        Command::PutSettings { settings } => {
            Pb::PutSettings(pb::PutSettings { settings: Some(settings_to_pb(settings)) })
        }
        Command::CreateWorker { id, spec, origin } => Pb::CreateWorker(pb::CreateWorker {
            id: id_bytes(id),
            spec: Some(wire::spec_to_pb(spec)),
            origin: wire::origin_number(*origin),
        }),
        Command::ReplaceWorker { id, spec } => {
            Pb::ReplaceWorker(pb::ReplaceWorker { id: id_bytes(id), spec: Some(wire::spec_to_pb(spec)) })
        }
        Command::PatchWorker { id, patch } => Pb::PatchWorker(pb::PatchWorker {
            id: id_bytes(id),
            priority: patch.priority,
            cost: patch.cost,
            labels: patch.labels.clone(),
            api_key: patch.api_key.as_deref().map(str::to_owned),
            health: Some(wire::health_override_to_pb(&patch.health)),
        }),
        Command::RemoveWorker { id } => Pb::RemoveWorker(pb::RemoveWorker { id: id_bytes(id) }),
        Command::CompleteJob { id, number, facts } => Pb::CompleteJob(pb::CompleteJob {
            id: id_bytes(id),
            number: *number,
            facts: facts.as_deref().map(wire::facts_to_pb),
        }),
        Command::ReportJob { id, number, status, message } => Pb::ReportJob(pb::ReportJob {
            id: id_bytes(id),
            number: *number,
            status: wire::job_status_number(*status),
            message: message.clone(),
        }),
        Command::SetHealth { id, health } => {
            Pb::SetHealth(pb::SetHealth { id: id_bytes(id), health: wire::health_number(*health) })
        }
        Command::RefreshFacts { id, facts, health } => Pb::RefreshFacts(pb::RefreshFacts {
            id: id_bytes(id),
            facts: Some(wire::facts_to_pb(facts)),
            health: wire::health_number(*health),
        }),
        Command::SetIntent { id, intent } => {
            Pb::SetIntent(pb::SetIntent { id: id_bytes(id), intent: wire::intent_number(*intent) })
        }
        Command::ForgetJob { id, number } => Pb::ForgetJob(pb::ForgetJob { id: id_bytes(id), number: *number }),
        Command::ReconcileStartup { workers } => Pb::ReconcileStartup(pb::ReconcileStartup {
            workers: workers
                .iter()
                .map(|(id, spec)| pb::StartupWorker { id: id_bytes(id), spec: Some(wire::spec_to_pb(spec)) })
                .collect(),
        }),
        Command::PutPolicy { model, document } => {
            Pb::PutPolicy(pb::PutPolicy { model: model.clone(), document: Some(wire::document_to_pb(document)) })
        }
        Command::DeletePolicy { model } => Pb::DeletePolicy(pb::DeletePolicy { model: model.clone() }),
        Command::ApplyStartupPolicy { document } => {
            Pb::ApplyStartupPolicy(pb::ApplyStartupPolicy { document: Some(wire::document_to_pb(document)) })
        }
        Command::CreateToken { id, token } => Pb::CreateToken(token_to_pb(id, token)),
        Command::RevokeToken { id } => Pb::RevokeToken(pb::RevokeToken { id: id.as_bytes().to_vec() }),
        Command::ReconcileStartupTokens { tokens } => Pb::ReconcileStartupTokens(pb::ReconcileStartupTokens {
            tokens: tokens.iter().map(|(id, token)| token_to_pb(id, token)).collect(),
        }),
    };
    pb::Envelope {
        command_id: envelope.command_id.as_bytes().to_vec(),
        actor: envelope.actor.clone(),
        proposed_at_unix_ms: envelope.proposed_at_unix_ms,
        expected_revision: envelope.expected_revision,
        command: Some(command),
    }
}

/// An envelope from a message. A command this version does not know is an error: it must never be skipped.
///
/// # Errors
/// When a field is missing or unknown.
pub fn envelope_from_pb(envelope: pb::Envelope) -> Result<Envelope, WireError> {
    use pb::envelope::Command as Pb;
    let command = match required(envelope.command, "command")? {
        Pb::InitCluster(c) => Command::InitCluster {
            cluster_id: uuid(&c.cluster_id, "cluster_id")?,
            history_id: uuid(&c.history_id, "history_id")?,
        },
        Pb::RegisterMember(c) => Command::RegisterMember {
            node_id: c.node_id,
            storage_id: uuid(&c.storage_id, "storage_id")?,
            peer_address: c.peer_address,
            api_address: c.api_address,
        },
        Pb::LedgerRound(c) => Command::LedgerRound {
            number: c.number,
            events: c
                .events
                .into_iter()
                .map(smg_admission::wire::event_from_pb)
                .collect::<Result<_, _>>()
                .map_err(ledger)?,
        },
        Pb::RetireMembers(c) => Command::RetireMembers { node_ids: c.node_ids },
        Pb::PutSettings(c) => Command::PutSettings { settings: settings_from_pb(c.settings) },
        Pb::CreateWorker(c) => Command::CreateWorker {
            id: wire::worker_id(&c.id)?,
            spec: Box::new(wire::spec_from_pb(required(c.spec, "spec")?)?),
            origin: wire::origin(c.origin)?,
        },
        Pb::ReplaceWorker(c) => Command::ReplaceWorker {
            id: wire::worker_id(&c.id)?,
            spec: Box::new(wire::spec_from_pb(required(c.spec, "spec")?)?),
        },
        Pb::PatchWorker(c) => Command::PatchWorker {
            id: wire::worker_id(&c.id)?,
            patch: Box::new(WorkerPatch {
                priority: c.priority,
                cost: c.cost,
                labels: c.labels,
                api_key: c.api_key.map(Into::into),
                health: wire::health_override_from_pb(c.health),
            }),
        },
        Pb::RemoveWorker(c) => Command::RemoveWorker { id: wire::worker_id(&c.id)? },
        Pb::CompleteJob(c) => Command::CompleteJob {
            id: wire::worker_id(&c.id)?,
            number: c.number,
            facts: c.facts.map(wire::facts_from_pb).transpose()?.map(Box::new),
        },
        Pb::ReportJob(c) => Command::ReportJob {
            id: wire::worker_id(&c.id)?,
            number: c.number,
            status: wire::job_status(c.status)?,
            message: c.message,
        },
        Pb::SetHealth(c) => Command::SetHealth { id: wire::worker_id(&c.id)?, health: wire::health(c.health)? },
        Pb::RefreshFacts(c) => Command::RefreshFacts {
            id: wire::worker_id(&c.id)?,
            facts: Box::new(wire::facts_from_pb(required(c.facts, "facts")?)?),
            health: wire::health(c.health)?,
        },
        Pb::SetIntent(c) => Command::SetIntent { id: wire::worker_id(&c.id)?, intent: wire::intent(c.intent)? },
        Pb::ForgetJob(c) => Command::ForgetJob { id: wire::worker_id(&c.id)?, number: c.number },
        Pb::ReconcileStartup(c) => Command::ReconcileStartup {
            workers: c
                .workers
                .into_iter()
                .map(|w| Ok((wire::worker_id(&w.id)?, wire::spec_from_pb(required(w.spec, "spec")?)?)))
                .collect::<Result<_, WireError>>()?,
        },
        Pb::PutPolicy(c) => Command::PutPolicy {
            model: c.model,
            document: Box::new(wire::document_from_pb(required(c.document, "document")?)?),
        },
        Pb::DeletePolicy(c) => Command::DeletePolicy { model: c.model },
        Pb::ApplyStartupPolicy(c) => Command::ApplyStartupPolicy {
            document: Box::new(wire::document_from_pb(required(c.document, "document")?)?),
        },
        Pb::CreateToken(c) => {
            let (id, token) = token_from_pb(c)?;
            Command::CreateToken { id, token }
        }
        Pb::RevokeToken(c) => Command::RevokeToken { id: uuid(&c.id, "token id")? },
        Pb::ReconcileStartupTokens(c) => Command::ReconcileStartupTokens {
            tokens: c.tokens.into_iter().map(token_from_pb).collect::<Result<_, _>>()?,
        },
    };
    Ok(Envelope {
        command_id: uuid(&envelope.command_id, "command_id")?,
        actor: envelope.actor,
        proposed_at_unix_ms: envelope.proposed_at_unix_ms,
        expected_revision: envelope.expected_revision,
        command,
    })
}

/// An outcome as a message.
pub fn outcome_to_pb(outcome: &Outcome) -> pb::Outcome {
    pb::Outcome {
        revision: outcome.revision,
        rejected: outcome.rejection.is_some(),
        rejection: outcome.rejection.as_ref().map_or(0, |rejection| rejection.code as i32),
        message: outcome.rejection.as_ref().map(|rejection| rejection.message.clone()).unwrap_or_default(),
        worker_id: outcome.worker_id.map(wire::worker_id_bytes).unwrap_or_default(),
        node_id: outcome.node_id.unwrap_or_default(),
    }
}

/// An outcome from a message.
///
/// # Errors
/// When a field is missing or unknown.
pub fn outcome_from_pb(outcome: pb::Outcome) -> Result<Outcome, WireError> {
    let rejection = if outcome.rejected {
        let code = RejectionCode::ALL.into_iter().find(|code| *code as i32 == outcome.rejection);
        Some(Rejection { code: required(code, "rejection")?, message: outcome.message })
    } else {
        None
    };
    let worker_id = if outcome.worker_id.is_empty() { None } else { Some(wire::worker_id(&outcome.worker_id)?) };
    let node_id = Some(outcome.node_id).filter(|node_id| *node_id != 0);
    Ok(Outcome { revision: outcome.revision, worker_id, node_id, rejection })
}

fn member_to_pb(member: &Member) -> pb::Member {
    pb::Member {
        node_id: member.node_id,
        storage_id: member.storage_id.as_bytes().to_vec(),
        peer_address: member.peer_address.clone(),
        api_address: member.api_address.clone(),
        retired: member.retired,
    }
}

fn member_from_pb(member: pb::Member) -> Result<Member, WireError> {
    Ok(Member {
        node_id: member.node_id,
        storage_id: uuid(&member.storage_id, "storage_id")?,
        peer_address: member.peer_address,
        api_address: member.api_address,
        retired: member.retired,
    })
}

/// An audit record as a message.
pub fn audit_to_pb(record: &AuditRecord) -> pb::AuditRecord {
    let change = |change: &AuditChange| pb::AuditChange {
        field: change.field.clone(),
        before: change.before.clone(),
        after: change.after.clone(),
    };
    pb::AuditRecord {
        revision: record.revision,
        at_unix_ms: record.at_unix_ms,
        actor: record.actor.clone(),
        command_id: record.command_id.as_bytes().to_vec(),
        action: record.action.to_owned(),
        object: record.object.clone(),
        changes: record.changes.iter().map(change).collect(),
    }
}

fn audit_from_pb(record: pb::AuditRecord) -> Result<AuditRecord, WireError> {
    let change =
        |change: pb::AuditChange| AuditChange { field: change.field, before: change.before, after: change.after };
    Ok(AuditRecord {
        revision: record.revision,
        at_unix_ms: record.at_unix_ms,
        actor: record.actor,
        command_id: uuid(&record.command_id, "command_id")?,
        action: record.action,
        object: record.object,
        changes: record.changes.into_iter().map(change).collect(),
    })
}

fn departure_to_pb((revision, departed): &(u64, Departed)) -> pb::Departure {
    use pb::departure::Name as Pb;
    let name = match departed {
        Departed::Worker(id) => Pb::WorkerId(id_bytes(id)),
        Departed::Policy(model) => Pb::Policy(model.clone()),
    };
    pb::Departure { revision: *revision, name: Some(name) }
}

fn departure_from_pb(departure: pb::Departure) -> Result<(u64, Departed), WireError> {
    use pb::departure::Name as Pb;
    let departed = match required(departure.name, "departed")? {
        Pb::WorkerId(id) => Departed::Worker(wire::worker_id(&id)?),
        Pb::Policy(model) => Departed::Policy(model),
    };
    Ok((departure.revision, departed))
}

/// The canonical bytes of a state.
pub fn encode_state(state: &State) -> Vec<u8> {
    pb::State {
        cluster_id: state.cluster_id.as_bytes().to_vec(),
        history_id: state.history_id.as_bytes().to_vec(),
        revision: state.revision,
        workers: state.workers.values().map(|worker| wire::worker_to_pb(worker)).collect(),
        policies: state.policies.values().map(|record| wire::record_to_pb(record)).collect(),
        remembered: state
            .memory
            .iter()
            .map(|remembered| pb::RememberedCommand {
                command_id: remembered.command_id.as_bytes().to_vec(),
                at_unix_ms: remembered.at_unix_ms,
                outcome: Some(outcome_to_pb(&remembered.outcome)),
            })
            .collect(),
        settings: Some(settings_to_pb(&state.settings)),
        settings_revision: state.settings_revision,
        tokens: state.tokens.values().map(|token| wire::token_to_pb(token)).collect(),
        members: state.members.values().map(|member| member_to_pb(member)).collect(),
        last_node_id: state.last_node_id,
        ledger: Some(smg_admission::wire::ledger_to_pb(&state.ledger)),
        audit: state.audit.iter().map(|record| audit_to_pb(record)).collect(),
        departed: state.departures.names.iter().map(departure_to_pb).collect(),
        departed_since: Some(state.departures.since),
    }
    .encode_to_vec()
}

/// A state from its bytes.
///
/// # Errors
/// When the bytes are malformed or of a newer version.
pub fn decode_state(bytes: &[u8]) -> Result<State, WireError> {
    let message = pb::State::decode(bytes)?;
    let mut state = State {
        cluster_id: uuid(&message.cluster_id, "cluster_id")?,
        history_id: uuid(&message.history_id, "history_id")?,
        revision: message.revision,
        settings: settings_from_pb(message.settings),
        settings_revision: message.settings_revision,
        last_node_id: message.last_node_id,
        departures: Departures {
            // A state that was written before names were kept knows none.
            since: message.departed_since.unwrap_or(message.revision),
            names: message.departed.into_iter().map(departure_from_pb).collect::<Result<_, _>>()?,
        },
        ledger: Arc::new(smg_admission::wire::ledger_from_pb(message.ledger.unwrap_or_default()).map_err(ledger)?),
        ..State::default()
    };
    for worker in message.workers {
        let worker: Worker = wire::worker_from_pb(worker)?;
        state.by_url.insert(worker.spec.url.clone(), worker.id);
        state.workers.insert(worker.id, Arc::new(worker));
    }
    for record in message.policies {
        let record = wire::record_from_pb(record)?;
        state.policies.insert(record.model.clone(), Arc::new(record));
    }
    for token in message.tokens {
        let token = wire::token_from_pb(token)?;
        state.tokens.insert(token.id, Arc::new(token));
    }
    for member in message.members {
        let member = member_from_pb(member)?;
        state.members.insert(member.node_id, Arc::new(member));
    }
    for record in message.audit {
        state.audit.add(audit_from_pb(record)?);
    }
    for remembered in message.remembered {
        state.memory.remember(Remembered {
            command_id: uuid(&remembered.command_id, "command_id")?,
            at_unix_ms: remembered.at_unix_ms,
            outcome: outcome_from_pb(required(remembered.outcome, "outcome")?)?,
        });
    }
    Ok(state)
}
