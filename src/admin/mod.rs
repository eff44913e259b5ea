//! The commands of operators, over the admin API of a member of the control plane or of any gateway.
//!
//! Standard output is data and nothing else; what is for people goes to standard error. Exit codes keep the outcomes apart ([`failure`]).
//! Every change has an identity (`--idempotency-key`, or a new one): when an answer is lost, another server can be asked for the same change.

use std::cell::Cell;
use std::fs;
use std::io::Read;
use std::path::Path;

use http::Method;
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::cli::{
    AdminArgs, AuditFlags, ChangeFlags, ContextArgs, FollowFlags, PairingFlags, PairingVerb, PoliciesVerb, TargetArgs,
    TokensVerb, Verb,
};
use crate::operator::{Age, Operator, Question};

pub mod contexts;
pub mod failure;
mod follow;
pub mod show;
pub mod table;
mod workers;

pub use failure::Failure;
pub use follow::again;
use show::{Show, note};

/// Largest accepted input file, in bytes.
const MAX_INPUT: u64 = 4 << 20;

/// Longest accepted refusal, in bytes.
const MAX_ERROR: usize = 1 << 20;

/// An operator's conversation with a fleet.
pub struct Session {
    operator: Operator,
    /// Where results go.
    pub show: Show,
    /// Whether the last answer was old, and that was said.
    old: Cell<bool>,
}

impl Session {
    /// With the fleet that the command line or its context names.
    ///
    /// # Errors
    /// When a file cannot be used.
    pub fn new(target: &TargetArgs, show: Show) -> Result<Self, Failure> {
        Ok(Self { operator: Operator::new(target)?, show, old: Cell::new(false) })
    }

    /// An answer as JSON. Of one that may be old, people are told so.
    ///
    /// # Errors
    /// When nobody answers, or says no.
    pub async fn read(&self, question: &Question) -> Result<Value, Failure> {
        let answer = self.operator.ask(question).await?;
        let read = Failure::read(answer.status, &answer.body)?;
        let warning = match answer.age {
            Age::Current => None,
            Age::AsOf(revision) => {
                Some(format!("stale: revision {revision}, as one server has it; what is newer is missing"))
            }
            Age::Cut(gateway, seconds) => Some(format!(
                "stale: {gateway} does not reach the control plane, and shows what it heard last, {seconds} s ago"
            )),
        };
        // Once, where the same is asked again and again.
        if self.old.replace(warning.is_some()) != warning.is_some() {
            warning.iter().for_each(|warning| note(warning));
        }
        Ok(read)
    }

    /// An answer that is read as it comes.
    ///
    /// # Errors
    /// When nobody answers, or says no.
    pub async fn open(&self, question: &Question) -> Result<Incoming, Failure> {
        let response = self.operator.open(question).await?;
        let (status, body) = (response.status(), response.into_body());
        if status.is_success() {
            return Ok(body);
        }
        let whole = Limited::new(body, MAX_ERROR).collect().await;
        let whole = whole.map_err(|error| Failure::Answer(error.to_string()))?.to_bytes();
        Err(Failure::read(status, &whole).err().unwrap_or_else(|| Failure::Answer(status.to_string())))
    }

    async fn get(&self, path: impl Into<String>) -> Result<Value, Failure> {
        self.read(&Question::get(path)).await
    }

    /// Asks for a change under an identity of its own.
    async fn change(
        &self,
        method: Method,
        path: &str,
        body: Option<Value>,
        flags: &ChangeFlags,
    ) -> Result<Value, Failure> {
        let path = if flags.dry_run { format!("{path}?dry_run=true") } else { path.to_owned() };
        let mut question = Question::new(method, path, body);
        question.if_match = flags.expected_revision;
        question.idempotency_key = Some(flags.idempotency_key.unwrap_or_else(Uuid::new_v4));
        self.read(&question).await
    }

    /// Shows what a change led to, or would.
    fn changed(&self, answer: &Value, flags: &ChangeFlags, columns: &[table::Column]) -> Result<(), Failure> {
        if flags.dry_run { self.show.rehearsal(answer) } else { self.show.one(answer, columns) }
    }
}

/// Runs a command to its end.
///
/// # Errors
/// When there is no result.
pub fn run(args: &AdminArgs) -> Result<(), Failure> {
    block_on(async {
        let session = Session::new(&args.target, Show::new(args.output))?;
        match &args.verb {
            Verb::Workers(verb) => workers::run(&session, verb).await,
            Verb::Policies(verb) => policies(&session, verb).await,
            Verb::Pairing(verb) => pairing(&session, verb).await,
            Verb::Gateways(flags) if flags.watch => {
                follow::list(&session, "/fleet/gateways", false, table::GATEWAYS).await
            }
            Verb::Gateways(_) => session.show.list(&session.get("/fleet/gateways").await?, "gateways", table::GATEWAYS),
            Verb::Admission(flags) => admission(&session, flags.stale).await,
            Verb::Tokens(verb) => tokens(&session, verb).await,
            Verb::Audit(flags) => audit(&session, flags).await,
        }
    })
}

/// Runs `work` on a runtime of its own.
///
/// # Errors
/// When there is no runtime, or what the work met.
pub fn block_on(work: impl Future<Output = Result<(), Failure>>) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(Failure::Runtime)?.block_on(work)
}

/// Does what `smg context` says.
///
/// # Errors
/// When the configuration file cannot be used.
pub fn run_context(args: &ContextArgs) -> Result<(), Failure> {
    let configuration = contexts::run(&args.verb, &args.target)?;
    let rows: Vec<Value> = configuration
        .contexts
        .iter()
        .map(|(name, context)| {
            let current = configuration.current.as_ref() == Some(name);
            json!({"current": current, "name": name, "server": context.server, "credentials": context.credentials(),
                   "ca": context.ca})
        })
        .collect();
    let answer = json!({"current": configuration.current, "contexts": rows});
    Show::new(args.output).answer(&answer, table::CONTEXTS, &rows)
}

/// The path of a list as it is to be read.
fn list_path(path: &str, follow: &FollowFlags, query: &[(&str, Option<&str>)]) -> String {
    let stale = follow.stale.then_some("stale");
    let given = query.iter().copied().chain([("consistency", stale)]);
    let given: Vec<String> = given.filter_map(|(name, value)| Some(format!("{name}={}", encode(value?)))).collect();
    if given.is_empty() { path.to_owned() } else { format!("{path}?{}", given.join("&")) }
}

/// Text as it may stand in a path or query.
fn encode(text: &str) -> String {
    text.bytes().fold(String::new(), |mut encoded, byte| {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
        encoded
    })
}

/// A JSON object in a file; `-` = standard input.
fn object_in(file: &Path) -> Result<Value, Failure> {
    let failed = |error: &dyn std::fmt::Display| Failure::Input(format!("{}: {error}", file.display()));
    let mut text = String::new();
    let read = if file == Path::new("-") {
        std::io::stdin().lock().take(MAX_INPUT).read_to_string(&mut text)
    } else {
        fs::File::open(file).and_then(|file| file.take(MAX_INPUT).read_to_string(&mut text))
    };
    read.map_err(|error| failed(&error))?;
    let value: Value = serde_json::from_str(&text).map_err(|error| failed(&error))?;
    if value.is_object() { Ok(value) } else { Err(failed(&"not a JSON object")) }
}

/// Who holds slots of which decode worker.
async fn admission(session: &Session, stale: bool) -> Result<(), Failure> {
    let path = if stale { "/fleet/admission?consistency=stale" } else { "/fleet/admission" };
    let answer = session.get(path).await?;
    let holder = |holder: &Value| {
        let gateway = holder["gateway_id"].as_str().unwrap_or_default();
        format!("{gateway} {}/{} ({} anchored)", holder["in_use"], holder["limit"], holder["anchored"])
    };
    let mut workers = answer["workers"].as_array().cloned().unwrap_or_default();
    for worker in &mut workers {
        let holders: Vec<String> = worker["holders"].as_array().into_iter().flatten().map(holder).collect();
        worker["holders_text"] = json!(holders);
    }
    session.show.answer(&answer, table::ADMISSION, &workers)
}

async fn policies(session: &Session, verb: &PoliciesVerb) -> Result<(), Failure> {
    let path = |model: &str| format!("/fleet/policies/{}", encode(model));
    match verb {
        PoliciesVerb::List { follow } if follow.watch => {
            follow::list(session, "/fleet/policies", true, table::POLICIES).await
        }
        PoliciesVerb::List { follow } => {
            let answer = session.get(list_path("/fleet/policies", follow, &[])).await?;
            session.show.list(&answer, "policies", table::POLICIES)
        }
        PoliciesVerb::Get { model } => session.show.one(&session.get(path(model)).await?, table::POLICIES),
        PoliciesVerb::Set { model, fields, file, change } => {
            let mut change = change.clone();
            let document = match file {
                Some(file) => object_in(file)?,
                None => {
                    let current = match session.get(path(model)).await {
                        Err(Failure::Refused { code, .. }) if code == "POLICY_NOT_FOUND" => json!({}),
                        current => current?,
                    };
                    // What was read is what is changed: nobody else's change in between is lost.
                    let read = current["mod_revision"].as_u64().unwrap_or(0);
                    change.expected_revision = change.expected_revision.or(Some(read));
                    edited(current["document"].clone(), fields)
                }
            };
            let answer = session.change(Method::PUT, &path(model), Some(document), &change).await?;
            session.changed(&answer, &change, table::POLICIES)
        }
        PoliciesVerb::Delete { model, change } => {
            let answer = session.change(Method::DELETE, &path(model), None, change).await?;
            if change.dry_run { session.show.rehearsal(&answer) } else { Ok(()) }
        }
    }
}

/// A document with fields set, or with those removed that have no value.
fn edited(document: Value, fields: &[(String, String)]) -> Value {
    let mut document = if document.is_object() { document } else { json!({}) };
    for (name, text) in fields {
        let mut place = &mut document;
        let mut names: Vec<&str> = name.split('.').collect();
        let last = names.pop().unwrap_or_default();
        for name in names {
            if !place[name].is_object() {
                place[name] = json!({});
            }
            place = &mut place[name];
        }
        if text.is_empty() {
            place.as_object_mut().map(|object| object.remove(last));
        } else {
            place[last] = serde_json::from_str(text).unwrap_or_else(|_| json!(text));
        }
    }
    document
}

fn pairing_path(path: &str, of: &PairingFlags) -> String {
    let (pairs, limit, offset) = (of.pairs.map(|pairs| pairs.to_string()), of.limit.to_string(), of.offset.to_string());
    let query = [
        ("model", of.model.as_deref()),
        ("prefill", of.prefill.as_deref()),
        ("decode", of.decode.as_deref()),
        ("pairs", pairs.as_deref()),
        ("limit", Some(&limit)),
        ("offset", Some(&offset)),
    ];
    list_path(path, &FollowFlags::default(), &query)
}

async fn pairing(session: &Session, verb: &PairingVerb) -> Result<(), Failure> {
    let show = |answer: &Value| session.show.answer(answer, table::CELLS, &show::cells(answer));
    match verb {
        PairingVerb::Show { of, watch } => {
            let question = Question::get(pairing_path("/fleet/pairing", of));
            if *watch { again(session, &question, show).await } else { show(&session.read(&question).await?) }
        }
        PairingVerb::Explain { spec, pairs } => {
            let of = PairingFlags { pairs: *pairs, limit: 1000, ..PairingFlags::default() };
            let path = pairing_path("/fleet/pairing/explain", &of);
            show(&session.read(&Question::new(Method::POST, path, Some(workers::spec(spec)?))).await?)
        }
    }
}

async fn tokens(session: &Session, verb: &TokensVerb) -> Result<(), Failure> {
    match verb {
        TokensVerb::List { follow } if follow.watch => {
            follow::list(session, "/fleet/tokens", false, table::TOKENS).await
        }
        TokensVerb::List { follow } => {
            let answer = session.get(list_path("/fleet/tokens", follow, &[])).await?;
            session.show.list(&answer, "tokens", table::TOKENS)
        }
        TokensVerb::Create { name, role, change } => {
            let body = json!({"name": name, "role": role.as_str()});
            let answer = session.change(Method::POST, "/fleet/tokens", Some(body), change).await?;
            session.changed(&answer, change, table::NEW_TOKEN)
        }
        TokensVerb::Revoke { revoked: token, change } => {
            let id = match Uuid::parse_str(token) {
                Ok(id) => id.to_string(),
                Err(_) => {
                    let list = session.get("/fleet/tokens").await?;
                    let mut named = list["tokens"].as_array().into_iter().flatten();
                    let found = named.find(|known| known["name"] == token.as_str());
                    let id = found.and_then(|known| known["id"].as_str()).map(str::to_owned);
                    id.ok_or_else(|| Failure::NotFound(format!("no token is named '{token}'")))?
                }
            };
            let answer = session.change(Method::DELETE, &format!("/fleet/tokens/{id}"), None, change).await?;
            session.changed(&answer, change, &[("ID", "id", false), ("STATUS", "status", false)])
        }
    }
}

async fn audit(session: &Session, flags: &AuditFlags) -> Result<(), Failure> {
    let limit = flags.limit.to_string();
    let query =
        [("actor", flags.actor.as_deref()), ("object", flags.object.as_deref()), ("limit", Some(limit.as_str()))];
    let question = Question::get(list_path("/fleet/audit", &FollowFlags::default(), &query));
    let show = |answer: &Value| session.show.answer(answer, table::AUDIT, &show::records(answer));
    if flags.watch { again(session, &question, show).await } else { show(&session.read(&question).await?) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_a_document_are_set_and_removed_by_name() {
        let document = json!({"policy": "random", "retry": {"max_retries": 2}});
        let fields = [
            ("policy", "round_robin"),
            ("retry.max_retries", ""),
            ("retry.disabled", "true"),
            ("prefill_admission.queue_size", "7"),
        ];
        let fields: Vec<_> = fields.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        let expected =
            json!({"policy": "round_robin", "retry": {"disabled": true}, "prefill_admission": {"queue_size": 7}});
        assert_eq!(edited(document, &fields), expected);
        assert_eq!(edited(Value::Null, &fields[..1]), json!({"policy": "round_robin"}));
    }

    #[test]
    fn names_are_encoded_where_they_stand_in_a_url() {
        assert_eq!(encode("org/m 7B"), "org%2Fm%207B");
        let of = PairingFlags { model: Some("a&b".into()), limit: 5, ..PairingFlags::default() };
        assert_eq!(pairing_path("/p", &of), "/p?model=a%26b&limit=5&offset=0");
    }
}
