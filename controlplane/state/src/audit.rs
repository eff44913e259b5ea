//! What operators changed: who, what, from what to what.
//!
//! Problem: a log line of the process that took a change is lost with that process, and two members would tell two stories. So the record of a
//! change is part of the state it changes: written by the same command, the same on every member, in every snapshot and backup.
//!
//! Invariants
//! * a command that an operator or a start-up flag authored and that changed something has one record; what jobs and probes find out has none;
//! * no secret is in a record: of keys and tokens it says that they changed, not what they are;
//! * records, their changes and their texts are bounded; the oldest records are forgotten first.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use serde_json::{Value, json};
use smg_fleet::{Revision, Worker, WorkerId};
use uuid::Uuid;

use crate::command::{Command, CommandId, Envelope, Outcome};
use crate::state::State;

/// Most records.
pub const MAX_RECORDS: usize = 1_000;
/// Most named changes of a record.
const MAX_CHANGES: usize = 24;
/// Longest field name or value, in bytes.
const MAX_TEXT_BYTES: usize = 160;
/// Stands for a value that is never shown.
const HIDDEN: &str = "(hidden)";

/// One field that a command changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditChange {
    /// Its name; dots lead into an object.
    pub field: String,
    /// Its value before, as JSON; empty = it was absent.
    pub before: String,
    /// Its value after, as JSON; empty = it is absent.
    pub after: String,
}

/// What one command changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditRecord {
    /// The revision that holds the change.
    pub revision: Revision,
    /// The author's clock.
    pub at_unix_ms: u64,
    /// Who asked.
    pub actor: String,
    /// The command's identity: the caller's `Idempotency-Key` is part of it.
    pub command_id: CommandId,
    /// What was done, as in [`Command::name`].
    pub action: String,
    /// To what: `worker/<id>`, `policy/<model>`, `token/<id>`, `settings`, `members`, `startup`.
    pub object: String,
    /// The fields that changed; the first [`MAX_CHANGES`].
    pub changes: Vec<AuditChange>,
}

/// The newest records.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct AuditTrail {
    records: VecDeque<Arc<AuditRecord>>,
}

impl AuditTrail {
    pub fn add(&mut self, record: AuditRecord) {
        self.records.push_back(Arc::new(record));
        while self.records.len() > MAX_RECORDS {
            self.records.pop_front();
        }
    }

    /// Oldest first.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &Arc<AuditRecord>> {
        self.records.iter()
    }
}

/// What a command is about, before it is applied.
pub(crate) struct Before {
    subject: Subject,
    fields: BTreeMap<String, Value>,
    revision: Revision,
}

/// What a record speaks of.
#[derive(Debug, Clone)]
enum Subject {
    Worker(WorkerId),
    Policy(String),
    Token(Uuid),
    Settings,
    Members,
    StartupWorkers,
    StartupTokens,
}

impl Subject {
    /// The subject of a command that leaves a record.
    fn of(command: &Command) -> Option<Self> {
        Some(match command {
            Command::CreateWorker { id, .. }
            | Command::ReplaceWorker { id, .. }
            | Command::PatchWorker { id, .. }
            | Command::RemoveWorker { id }
            | Command::SetIntent { id, .. } => Self::Worker(*id),
            Command::ReconcileStartup { .. } => Self::StartupWorkers,
            Command::PutPolicy { model, .. } | Command::DeletePolicy { model } => Self::Policy(model.clone()),
            Command::ApplyStartupPolicy { .. } => Self::Policy(String::new()),
            Command::CreateToken { id, .. } | Command::RevokeToken { id } => Self::Token(*id),
            Command::ReconcileStartupTokens { .. } => Self::StartupTokens,
            Command::PutSettings { .. } => Self::Settings,
            Command::RetireMembers { .. } => Self::Members,
            Command::InitCluster { .. }
            | Command::RegisterMember { .. }
            | Command::LedgerRound { .. }
            | Command::CompleteJob { .. }
            | Command::ReportJob { .. }
            | Command::SetHealth { .. }
            | Command::RefreshFacts { .. }
            | Command::ForgetJob { .. } => return None,
        })
    }

    fn name(&self) -> String {
        match self {
            Self::Worker(id) => format!("worker/{id}"),
            Self::Policy(model) if model.is_empty() => "policy/default".to_owned(),
            Self::Policy(model) => format!("policy/{model}"),
            Self::Token(id) => format!("token/{id}"),
            Self::Settings => "settings".to_owned(),
            Self::Members => "members".to_owned(),
            Self::StartupWorkers | Self::StartupTokens => "startup".to_owned(),
        }
    }

    /// Its fields as they are.
    fn fields(&self, state: &State) -> BTreeMap<String, Value> {
        let mut fields = BTreeMap::new();
        match self {
            Self::Worker(id) => {
                if let Some(worker) = state.workers.get(id) {
                    worker_fields(worker, &mut fields);
                }
            }
            Self::Policy(model) => {
                if let Some(record) = state.policies.get(model) {
                    flatten("", &json!(record.document), &mut fields);
                }
            }
            Self::Token(id) => {
                if let Some(token) = state.tokens.get(id) {
                    fields.insert("name".to_owned(), json!(token.name));
                    fields.insert("role".to_owned(), json!(token.role.as_str()));
                }
            }
            Self::Settings => flatten("", &json!(state.settings), &mut fields),
            Self::Members => {
                let retired = state.members.values().filter(|member| member.retired);
                fields.extend(retired.map(|member| (format!("{}.retired", member.node_id), json!(true))));
            }
            Self::StartupWorkers => {
                let named = state.workers.values().filter(|worker| worker.origin == smg_fleet::Origin::Startup);
                fields.extend(named.map(|worker| (worker.spec.url.clone(), json!(worker.intent.as_str()))));
            }
            Self::StartupTokens => {
                let named = state.tokens.values().filter(|token| token.origin == smg_fleet::Origin::Startup);
                fields.extend(named.map(|token| (token.name.clone(), json!(token.role.as_str()))));
            }
        }
        fields
    }
}

/// The fields of a worker that operators change. Of an update that is not carried out yet: those it asks for.
fn worker_fields(worker: &Worker, fields: &mut BTreeMap<String, Value>) {
    let spec = worker.job.as_ref().and_then(|job| job.proposed.as_deref()).unwrap_or(&worker.spec);
    flatten("", &json!(spec), fields);
    fields.insert("intent".to_owned(), json!(worker.intent.as_str()));
    if let Some(key) = &spec.api_key {
        // A digest tells two keys apart and is not shown.
        let digest = smg_fleet::TokenHash::of(key);
        fields.insert("api_key".to_owned(), json!(digest.as_bytes().to_vec()));
    }
}

/// The leaves of an object, by the names that lead to them.
fn flatten(path: &str, value: &Value, fields: &mut BTreeMap<String, Value>) {
    match value {
        Value::Object(object) => {
            for (name, value) in object {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                flatten(&path, value, fields);
            }
        }
        Value::Null => {}
        leaf => drop(fields.insert(path.to_owned(), leaf.clone())),
    }
}

fn shown(field: &str, value: Option<&Value>) -> String {
    match value {
        None => String::new(),
        Some(_) if field == "api_key" => format!("\"{HIDDEN}\""),
        Some(value) => clip(&value.to_string()).to_owned(),
    }
}

fn clip(text: &str) -> &str {
    let mut end = text.len().min(MAX_TEXT_BYTES);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.get(..end).unwrap_or_default()
}

/// What changed between two views of an object.
fn differences(before: &BTreeMap<String, Value>, after: &BTreeMap<String, Value>) -> Vec<AuditChange> {
    let names: std::collections::BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    let changed = names.into_iter().filter(|name| before.get(*name) != after.get(*name));
    let change = |name: &String| AuditChange {
        field: clip(name).to_owned(),
        before: shown(name, before.get(name)),
        after: shown(name, after.get(name)),
    };
    changed.take(MAX_CHANGES).map(change).collect()
}

impl Before {
    /// What the record of `command` needs to know before it is applied; `None` when it leaves no record.
    pub fn look(state: &State, command: &Command) -> Option<Self> {
        let subject = Subject::of(command)?;
        Some(Self { fields: subject.fields(state), subject, revision: state.revision })
    }

    /// The record of a command that was accepted; `None` when it changed nothing.
    pub fn record(self, state: &State, envelope: &Envelope, outcome: &Outcome) -> Option<AuditRecord> {
        // A URL that had an id already keeps it.
        let (subject, before) = match (&self.subject, outcome.worker_id) {
            (Subject::Worker(id), Some(other)) if *id != other => (Subject::Worker(other), BTreeMap::new()),
            _ => (self.subject, self.fields),
        };
        let changes = differences(&before, &subject.fields(state));
        if changes.is_empty() && outcome.revision == self.revision {
            return None;
        }
        Some(AuditRecord {
            revision: outcome.revision,
            at_unix_ms: envelope.proposed_at_unix_ms,
            actor: clip(&envelope.actor).to_owned(),
            command_id: envelope.command_id,
            action: envelope.command.name().to_owned(),
            object: clip(&subject.name()).to_owned(),
            changes,
        })
    }
}

impl State {
    /// What operators changed, oldest first; the newest [`MAX_RECORDS`].
    pub fn audit(&self) -> impl DoubleEndedIterator<Item = &Arc<AuditRecord>> {
        self.audit.iter()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use smg_fleet::worker::WorkerPatch;
    use smg_fleet::{Intent, Origin, PolicyDocument, Role, StartupToken, TokenHash, WorkerSpec, WorkerType};

    use super::*;
    use crate::codec;

    fn apply(state: &mut State, n: u128, command: Command) -> Outcome {
        let envelope = Envelope {
            command_id: Uuid::from_u128(n),
            actor: "token:ada".to_owned(),
            proposed_at_unix_ms: 7,
            expected_revision: None,
            command,
        };
        let outcome = state.apply(&envelope);
        assert_eq!(codec::decode_state(&codec::encode_state(state)).unwrap(), *state);
        outcome
    }

    fn create(state: &mut State) -> WorkerId {
        let id = WorkerId(Uuid::from_u128(1));
        let mut spec = WorkerSpec::new("http://p:1", WorkerType::Prefill);
        spec.api_key = Some("hush".into());
        apply(state, 100, Command::CreateWorker { id, spec: Box::new(spec), origin: Origin::Api });
        id
    }

    fn last(state: &State) -> AuditRecord {
        AuditRecord::clone(state.audit().next_back().unwrap())
    }

    fn change(record: &AuditRecord, field: &str) -> (String, String) {
        let found = record.changes.iter().find(|change| change.field == field);
        found.map(|change| (change.before.clone(), change.after.clone())).unwrap()
    }

    #[test]
    fn a_change_is_recorded_with_its_author_and_what_it_changed() {
        let state = &mut State::default();
        let id = create(state);
        let created = last(state);
        assert_eq!((created.actor.as_str(), created.action.as_str()), ("token:ada", "create_worker"));
        assert_eq!((created.object.clone(), created.revision), (format!("worker/{id}"), state.revision()));
        assert_eq!(change(&created, "url"), (String::new(), "\"http://p:1\"".to_owned()));
        let patch = WorkerPatch { priority: Some(9), api_key: Some("hush2".into()), ..WorkerPatch::default() };
        apply(state, 101, Command::PatchWorker { id, patch: Box::new(patch) });
        let patched = last(state);
        assert_eq!(change(&patched, "priority").1, "9");
        assert_eq!(change(&patched, "api_key"), ("\"(hidden)\"".to_owned(), "\"(hidden)\"".to_owned()));
        assert_eq!(patched.changes.len(), 2);
        apply(state, 102, Command::SetIntent { id, intent: Intent::Cordoned });
        assert_eq!(change(&last(state), "intent"), ("\"active\"".to_owned(), "\"cordoned\"".to_owned()));
        let document =
            PolicyDocument { policy: Some(smg_fleet::policy::PolicyName::Random), ..PolicyDocument::default() };
        apply(state, 103, Command::PutPolicy { model: String::new(), document: Box::new(document) });
        assert_eq!(
            (last(state).object.as_str(), change(&last(state), "policy").1.as_str()),
            ("policy/default", "\"random\"")
        );
        let token = StartupToken { name: "bob".to_owned(), role: Role::Admin, hash: TokenHash::of("s3cret") };
        apply(state, 104, Command::CreateToken { id: Uuid::from_u128(5), token });
        assert_eq!(change(&last(state), "role").1, "\"admin\"");
        assert!(!format!("{:?}", state.audit().collect::<Vec<_>>()).contains("hush"));
    }

    #[test]
    fn what_changes_nothing_or_was_refused_leaves_no_record() {
        let state = &mut State::default();
        let id = create(state);
        let count = state.audit().count();
        apply(state, 101, Command::SetIntent { id, intent: Intent::Active });
        apply(state, 102, Command::RemoveWorker { id: WorkerId(Uuid::from_u128(9)) });
        apply(state, 100, Command::SetIntent { id, intent: Intent::Cordoned });
        assert_eq!(state.audit().count(), count, "a repeated command is the first one");
    }

    #[test]
    fn the_trail_is_bounded() {
        let state = &mut State::default();
        let id = create(state);
        for n in 0..(MAX_RECORDS as u128 + 5) {
            let intent = if n % 2 == 0 { Intent::Cordoned } else { Intent::Active };
            let envelope = Envelope {
                command_id: Uuid::from_u128(1_000 + n),
                actor: "a".repeat(1_000),
                proposed_at_unix_ms: 7,
                expected_revision: None,
                command: Command::SetIntent { id, intent },
            };
            state.apply(&envelope);
        }
        assert_eq!(state.audit().count(), MAX_RECORDS);
        assert!(state.audit().all(|record| record.actor.len() <= MAX_TEXT_BYTES));
    }
}
