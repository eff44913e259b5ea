//! Which engine answers at an address, by the models it lists (`GET /v1/models` of vLLM 0.32 and SGLang 0.5).
//!
//! An address outlives the engine behind it: what comes back there after a restart may be another engine of another model. Both planes
//! tell that from the list, the control plane with each probe and a gateway before it takes a worker back.
//!
//! Invariants
//! * an engine that lists nothing contradicts nothing: not every engine has a list;
//! * one model that was known is enough: adapters are loaded and unloaded while an engine runs;
//! * a name that an operator declared beside those which the engine listed is no claim about the engine;
//! * an owner is compared with the owner that was listed at registration, never with the runtime that an operator declared: that
//!   declaration was accepted beside it.

use serde_json::Value;

use crate::validate::{MAX_LABEL_VALUE_BYTES, MAX_MODELS};
use crate::worker::{Runtime, Worker};

/// Where engines list their models.
pub const PATH: &str = "/v1/models";

/// One entry of the list.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ListedModel {
    /// Its name.
    pub id: String,
    /// Who serves it: by default the name of the engine.
    pub owned_by: Option<String>,
    /// What it was loaded from.
    pub root: Option<String>,
    /// Longest prompt and answer together, in tokens.
    pub max_model_len: Option<u64>,
}

/// The entries of an answer; `None` when it is not a list.
pub fn models(body: &[u8]) -> Option<Vec<ListedModel>> {
    let body: Value = serde_json::from_slice(body).ok()?;
    let entry = |entry: &Value| {
        let text = |name: &str| entry.get(name).and_then(Value::as_str).and_then(bounded);
        Some(ListedModel {
            id: text("id").filter(|id| id.len() <= 512)?,
            owned_by: text("owned_by"),
            root: text("root"),
            max_model_len: entry.get("max_model_len").and_then(Value::as_u64),
        })
    };
    Some(body.get("data")?.as_array()?.iter().filter_map(entry).take(MAX_MODELS).collect())
}

/// A text of an engine's that may become a label's value.
pub fn bounded(text: &str) -> Option<String> {
    let fits = !text.is_empty() && text.len() <= MAX_LABEL_VALUE_BYTES && !text.chars().any(char::is_control);
    fits.then(|| text.to_owned())
}

/// How an engine differs from the one that a worker was registered with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Contradiction {
    /// What differs, for people.
    pub reason: String,
    /// It differs in what the operator declared: asking the engine again settles nothing.
    pub declared: bool,
}

/// How the engine that lists `listed` differs from the one the worker was registered with; `None` = nothing speaks against the same one.
pub fn contradiction(worker: &Worker, listed: &[ListedModel]) -> Option<Contradiction> {
    let (facts, now) = (worker.facts.as_ref()?, listed.first()?);
    if let (Some(before), Some(owner)) = (&facts.owned_by, &now.owned_by)
        && before != owner
    {
        let reason = format!("its models are served by '{owner}' now and not by '{before}'");
        return Some(Contradiction { reason, declared: worker.spec.runtime != Runtime::Unspecified });
    }
    let known = |model: &ListedModel| facts.models.iter().any(|card| card.id == model.id);
    if facts.models.is_empty() || listed.iter().any(known) {
        return None;
    }
    let reason = format!("it serves '{}' now and not '{}'", now.id, worker.model_id());
    Some(Contradiction { reason, declared: declared_what_was_served(worker) })
}

/// Whether the operator declared a model that the engine itself named. A declared name of another kind is the operator's own: it says
/// nothing about which engine it is.
pub fn declared_what_was_served(worker: &Worker) -> bool {
    let served = worker.facts.iter().flat_map(|facts| &facts.models);
    worker.spec.models.iter().any(|card| served.clone().any(|known| known.id == card.id))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use crate::worker::{Facts, Health, Intent, ModelCard, Origin, WorkerId, WorkerSpec, WorkerType};

    use super::*;

    fn listed(pairs: &[(&str, Option<&str>)]) -> Vec<ListedModel> {
        let entry = |(id, owner): &(&str, Option<&str>)| ListedModel {
            id: (*id).to_owned(),
            owned_by: owner.map(str::to_owned),
            ..ListedModel::default()
        };
        pairs.iter().map(entry).collect()
    }

    fn worker(owner: Option<&str>, models: &[&str]) -> Worker {
        let card = |id: &&str| ModelCard { id: (*id).to_owned(), ..ModelCard::default() };
        let models = models.iter().map(card).collect();
        Worker {
            id: WorkerId(uuid::Uuid::nil()),
            spec: WorkerSpec::new("http://h:1", WorkerType::Decode),
            facts: Some(Facts { owned_by: owner.map(str::to_owned), models, ..Facts::default() }),
            health: Health::Ready,
            intent: Intent::Active,
            origin: Origin::Api,
            job: None,
            create_revision: 1,
            mod_revision: 1,
        }
    }

    #[test]
    fn another_owner_or_no_known_model_is_another_engine() {
        let known = worker(Some("sglang"), &["m", "m-lora"]);
        for same in [
            &[][..],
            &[("m", Some("sglang"))],
            &[("m", None)],
            &[("m-lora", Some("sglang"))],
            &[("new-lora", Some("sglang")), ("m", Some("sglang"))],
        ] {
            assert_eq!(contradiction(&known, &listed(same)), None, "{same:?}");
        }
        for (other, said) in [(("m", Some("vllm")), "'vllm' now"), (("other", Some("sglang")), "'other' now")] {
            let found = contradiction(&known, &listed(&[other])).unwrap();
            assert!(found.reason.contains(said) && !found.declared, "{found:?}");
        }
    }

    #[test]
    fn what_was_not_known_is_not_compared() {
        assert_eq!(contradiction(&worker(None, &["m"]), &listed(&[("m", Some("vllm"))])), None);
        assert_eq!(contradiction(&worker(None, &[]), &listed(&[("other", Some("vllm"))])), None);
        let registering = Worker { facts: None, ..worker(None, &[]) };
        assert_eq!(contradiction(&registering, &listed(&[("m", None)])), None);
    }

    #[test]
    fn it_is_told_apart_what_the_operator_declared() {
        let other = |worker: &Worker, now| contradiction(worker, &listed(&[now])).unwrap().declared;
        let mut known = worker(Some("sglang"), &["m"]);
        known.spec.runtime = Runtime::Sglang;
        assert!(other(&known, ("m", Some("vllm"))));
        assert!(!other(&known, ("other", Some("sglang"))), "the model was not declared");
        known.spec.models = vec![ModelCard { id: "m".into(), ..ModelCard::default() }];
        assert!(other(&known, ("other", Some("sglang"))));
        known.spec.models[0].id = "a name for clients".into();
        assert!(!other(&known, ("other", Some("sglang"))), "the engine never listed it");
    }

    #[test]
    fn lies_are_left_out() {
        for garbage in [&b"<html>"[..], b"[]", b"{}", b"{\"data\":7}", b"\xff\xfe"] {
            assert_eq!(models(garbage), None);
        }
        let long = "x".repeat(600);
        let body = format!(
            r#"{{"data": [7, {{"id": 7}}, {{"id": ""}}, {{"id": "{long}"}}, {{"id": "ok\n"}}, {{"id": "m", "owned_by": "vllm", "max_model_len": 8}}]}}"#
        );
        let only = ListedModel { max_model_len: Some(8), ..listed(&[("m", Some("vllm"))]).remove(0) };
        assert_eq!(models(body.as_bytes()), Some(vec![only]));
        let many: Vec<String> = (0..1000).map(|n| format!(r#"{{"id":"{n}"}}"#)).collect();
        let body = format!(r#"{{"data":[{}]}}"#, many.join(","));
        assert_eq!(models(body.as_bytes()).unwrap().len(), MAX_MODELS);
    }
}
