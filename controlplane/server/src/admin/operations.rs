//! Every operation of the admin API over REST: the one list from which the router is built and the OpenAPI document is written.

use axum::handler::Handler;
use axum::routing::{MethodFilter, MethodRouter, on};
use axum::{Json, Router};
use schemars::generate::{SchemaGenerator, SchemaSettings};
use schemars::{JsonSchema, Schema};
use serde_json::{Map, Value, json};
use smg_fleet::worker::WorkerPatch;
use smg_fleet::{ClusterSettings, PolicyDocument, WorkerSpec};

use super::{Admin, admission, audit, backups, cluster, fleet, pairing, policies, settings, shapes, tokens, workers};

/// Makes the schema of a type.
type Shape = fn(&mut SchemaGenerator) -> Schema;

/// A query parameter.
type Parameter = (&'static str, &'static str, &'static str);

const STALE: Parameter = ("consistency", "string", "`stale` reads what this member has, without a barrier");
const WATCH: Parameter = ("watch", "boolean", "follow the list: a line of JSON for each change");
const FROM: Parameter = ("from", "integer", "of a watch: go on from the revision of a bookmark");
const HISTORY: Parameter = ("history", "string", "of a watch: the history of that revision");
const MODEL: Parameter = ("model", "string", "only what serves this model, by id or alias");
const DRY_RUN: Parameter = ("dry_run", "boolean", "say what would come of it, and change nothing");

const PAIRING: &[Parameter] = &[
    MODEL,
    ("prefill", "string", "one prefill, by id or URL"),
    ("decode", "string", "one decode, by id or URL"),
    ("pairs", "boolean", "only pairs, or only those that are none"),
    ("limit", "integer", "most cells, at most 1000"),
    ("offset", "integer", "cells passed over"),
];
const AUDIT: &[Parameter] = &[
    ("actor", "string", "only authors whose name begins with this"),
    ("object", "string", "only objects whose name begins with this"),
    ("action", "string", "only actions whose name begins with this"),
    ("limit", "integer", "most records, at most 1000"),
];

/// One operation.
pub(super) struct Operation {
    method: &'static str,
    path: &'static str,
    summary: &'static str,
    query: Vec<Parameter>,
    body: Option<Shape>,
    status: u16,
    answer: Option<Shape>,
    /// Whether it is for the parts of the fleet, who are nobody to the admin API.
    for_parts: bool,
    handler: MethodRouter<Admin>,
}

fn shape<T: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    generator.subschema_for::<T>()
}

impl Operation {
    fn new<H, T>(method: &'static str, path: &'static str, summary: &'static str, handler: H) -> Self
    where
        H: Handler<T, Admin>,
        T: 'static,
    {
        let filter = match method {
            "POST" => MethodFilter::POST,
            "PUT" => MethodFilter::PUT,
            "PATCH" => MethodFilter::PATCH,
            "DELETE" => MethodFilter::DELETE,
            _ => MethodFilter::GET,
        };
        let query = if method == "GET" { vec![STALE] } else { vec![DRY_RUN] };
        let handler = on(filter, handler);
        Self { method, path, summary, query, body: None, status: 200, answer: None, for_parts: false, handler }
    }

    fn query(mut self, parameters: &[Parameter]) -> Self {
        self.query.extend_from_slice(parameters);
        self
    }

    /// Asks nothing of the store, so that there is no choice.
    fn local(mut self) -> Self {
        self.query.clear();
        self
    }

    fn body<T: JsonSchema>(mut self) -> Self {
        self.body = Some(shape::<T>);
        self
    }

    fn answers<T: JsonSchema>(mut self, status: u16) -> Self {
        self.status = status;
        self.answer = Some(shape::<T>);
        self
    }

    fn answers_nothing(mut self) -> Self {
        self.status = 204;
        self
    }

    fn for_parts(mut self) -> Self {
        self.for_parts = true;
        self
    }

    /// The path as OpenAPI writes it.
    fn template(&self) -> String {
        self.path.replace("{*", "{")
    }

    fn changes(&self) -> bool {
        self.query.contains(&DRY_RUN)
    }

    fn document(&self, generator: &mut SchemaGenerator) -> Value {
        let name = |text: &str| text.split(['{', '}', '*']).nth(1).filter(|name| !name.is_empty()).map(str::to_owned);
        let in_path = name(&self.template()).map(|name| {
            json!({
                "name": name, "in": "path", "required": true, "schema": {"type": "string"},
            })
        });
        let in_query = self.query.iter().map(|(name, kind, description)| {
            json!({
                "name": name, "in": "query", "description": description, "schema": {"type": kind},
            })
        });
        let conditions: &[(&str, &str)] = match self.method {
            _ if !self.changes() => &[],
            "POST" => &[("Idempotency-Key", "a UUID: repeated under it, it is the same change")],
            _ => &[
                ("Idempotency-Key", "a UUID: repeated under it, it is the same change"),
                ("If-Match", "the object's mod_revision that the caller saw, quoted or bare"),
            ],
        };
        let in_head = conditions.iter().map(|(name, description)| {
            json!({
                "name": name, "in": "header", "description": description, "schema": {"type": "string"},
            })
        });
        let parameters: Vec<Value> = in_path.into_iter().chain(in_query).chain(in_head).collect();
        let mut answers = Map::new();
        let mut answer = json!({"description": self.summary});
        if let Some(shape) = self.answer {
            answer["content"] = json!({"application/json": {"schema": shape(generator)}});
        }
        if self.path == "/fleet/backup" {
            answer["content"] = json!({"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}});
        }
        if self.query.contains(&WATCH) {
            answer["content"]["application/x-ndjson"] = json!({"schema": shape::<shapes::WatchEvent>(generator)});
        }
        answers.insert(self.status.to_string(), answer);
        if self.changes() {
            let rehearsed = json!({"schema": shape::<shapes::Rehearsal>(generator)});
            let entry = answers.entry("200").or_insert_with(|| json!({"description": "A rehearsal"}));
            match entry["content"].get("application/json").cloned() {
                None => entry["content"] = json!({"application/json": rehearsed}),
                Some(made) => {
                    let either = json!({"schema": {"oneOf": [made["schema"], rehearsed["schema"]]}});
                    entry["content"]["application/json"] = either;
                }
            }
        }
        let failed = json!({"schema": shape::<shapes::Failure>(generator)});
        answers.insert(
            "default".to_owned(),
            json!({"description": "Refused, or not done", "content": {"application/json": failed}}),
        );
        let mut document = json!({"summary": self.summary, "parameters": parameters, "responses": answers});
        if let Some(shape) = self.body {
            document["requestBody"] =
                json!({"required": true, "content": {"application/json": {"schema": shape(generator)}}});
        }
        document
    }
}

/// The operations, in the order of their paths.
#[rustfmt::skip]
pub(super) fn operations() -> Vec<Operation> {
    vec![
        Operation::new("GET", "/workers", "List workers", workers::list)
            .query(&[MODEL, WATCH, FROM, HISTORY]).answers::<shapes::WorkerList>(200),
        Operation::new("POST", "/workers", "Register a worker", workers::create)
            .body::<WorkerSpec>().answers::<shapes::Accepted>(202),
        Operation::new("GET", "/workers/{id}", "Show a worker", workers::show)
            .answers::<shapes::WorkerInfo>(200),
        Operation::new("PUT", "/workers/{id}", "Register a worker again with a new spec", workers::replace)
            .body::<WorkerSpec>().answers::<shapes::Accepted>(202),
        Operation::new("PATCH", "/workers/{id}", "Change fields of a worker", workers::patch)
            .body::<WorkerPatch>().answers::<shapes::Accepted>(202),
        Operation::new("DELETE", "/workers/{id}", "Drain a worker and remove it", workers::remove)
            .answers::<shapes::Accepted>(202),
        Operation::new("GET", "/fleet/workers/{id}/intent", "Show whether a worker is in rotation, and idle", workers::show_intent)
            .answers::<shapes::Occupation>(200),
        Operation::new("PUT", "/fleet/workers/{id}/intent", "Take a worker out of rotation, or bring it back", workers::put_intent)
            .body::<workers::NewIntent>().answers::<shapes::IntentSet>(200),
        Operation::new("GET", "/fleet/policies", "List policy documents", policies::list)
            .query(&[WATCH, FROM, HISTORY]).answers::<shapes::PolicyList>(200),
        Operation::new("GET", "/fleet/policies/{*model}", "Show a policy document", policies::show)
            .answers::<shapes::Policy>(200),
        Operation::new("PUT", "/fleet/policies/{*model}", "Store a policy document", policies::put)
            .body::<PolicyDocument>().answers::<shapes::Policy>(200),
        Operation::new("DELETE", "/fleet/policies/{*model}", "Delete a policy document", policies::delete)
            .answers_nothing(),
        Operation::new("GET", "/fleet/pairing", "Show which prefill pairs with which decode", pairing::show)
            .query(PAIRING).answers::<shapes::Matrix>(200),
        Operation::new("POST", "/fleet/pairing/explain", "Show with whom a worker would pair", pairing::explain)
            .local().query(&[STALE]).query(PAIRING).body::<WorkerSpec>().answers::<shapes::Explanation>(200),
        Operation::new("GET", "/fleet/settings", "Show the settings of the cluster", settings::show)
            .answers::<shapes::Settings>(200),
        Operation::new("PUT", "/fleet/settings", "Replace the settings of the cluster", settings::put)
            .body::<ClusterSettings>().answers::<shapes::Settings>(200),
        Operation::new("GET", "/fleet/tokens", "List admin tokens, without their secrets", tokens::list)
            .query(&[WATCH]).answers::<shapes::TokenList>(200),
        Operation::new("POST", "/fleet/tokens", "Create an admin token", tokens::create)
            .body::<tokens::NewToken>().answers::<shapes::CreatedToken>(201),
        Operation::new("GET", "/fleet/tokens/{id}", "Show an admin token, without its secret", tokens::show)
            .answers::<shapes::Token>(200),
        Operation::new("DELETE", "/fleet/tokens/{id}", "Revoke an admin token", tokens::revoke)
            .answers::<shapes::Revoked>(200),
        Operation::new("GET", "/fleet/whoami", "Show as whom the caller is known", tokens::whoami)
            .local().answers::<shapes::Whoami>(200),
        Operation::new("GET", "/fleet/gateways", "List the gateways of all members", fleet::gateways)
            .query(&[WATCH]).answers::<shapes::GatewayList>(200),
        Operation::new("GET", "/fleet/admission", "Show the slots of decode workers, who holds them, and why", admission::show)
            .answers::<admission::Shown>(200),
        Operation::new("GET", "/fleet/audit", "Show who changed what, newest first", audit::list)
            .query(AUDIT).answers::<shapes::AuditList>(200),
        Operation::new("GET", "/fleet/backup", "The whole state as one file", backups::show).local(),
        Operation::new("GET", "/fleet/cluster", "Show the members of the control plane", cluster::show)
            .answers::<super::service::cluster::Cluster>(200),
        Operation::new("POST", "/fleet/cluster/join", "Let members that follow vote", cluster::join)
            .body::<cluster::Members>().answers::<shapes::Voters>(200),
        Operation::new("POST", "/fleet/cluster/remove", "Remove members for good", cluster::remove)
            .body::<cluster::Members>().answers::<shapes::Voters>(200),
        Operation::new("POST", "/fleet/cluster/replace", "Replace a voter by a member that has caught up", cluster::replace)
            .body::<cluster::Replacement>().answers::<shapes::Voters>(200),
        Operation::new("GET", "/fleet/openapi.json", "This document", describe)
            .local().answers::<Value>(200),
        Operation::new("GET", "/fleet/revision", "The revision that holds every acknowledged write", fleet::revision)
            .local().answers::<shapes::Revision>(200).for_parts(),
    ]
}

/// The routes of the operations that are, or are not, for the parts of the fleet.
pub(super) fn router(for_parts: bool) -> Router<Admin> {
    let wanted = operations().into_iter().filter(|operation| operation.for_parts == for_parts);
    wanted.fold(Router::new(), |router, operation| router.route(operation.path, operation.handler))
}

async fn describe() -> Json<Value> {
    Json(openapi())
}

/// The OpenAPI document of the admin API.
fn openapi() -> Value {
    let mut generator = SchemaSettings::openapi3().into_generator();
    let mut paths = Map::new();
    for operation in operations() {
        let path = paths.entry(operation.template()).or_insert_with(|| json!({}));
        path[operation.method.to_ascii_lowercase()] = operation.document(&mut generator);
    }
    json!({
        "openapi": "3.0.3",
        "info": {
            "title": "smg admin API",
            "version": env!("CARGO_PKG_VERSION"),
            "license": {"name": "Apache-2.0"},
            "description": "Served by every member of the control plane and, forwarded, by every gateway. See api.md.",
        },
        "paths": paths,
        "components": {
            "schemas": generator.take_definitions(true),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use serde::Serialize;
    use serde::de::DeserializeOwned;

    use super::*;
    use crate::testing::{FakeEngine, Plane};

    #[test]
    fn the_openapi_document_is_current() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/openapi.json");
        let now = openapi();
        if std::env::var_os("UPDATE_DOCS").is_some() {
            std::fs::write(path, format!("{now:#}\n")).unwrap();
        }
        let written: Value = serde_json::from_slice(&std::fs::read(path).unwrap_or_default()).unwrap_or_default();
        assert!(written == now, "docs/reference/openapi.json is not current: run this test with UPDATE_DOCS=1");
    }

    #[test]
    fn every_reference_of_the_document_leads_somewhere() {
        fn references(value: &Value, found: &mut Vec<String>) {
            match value {
                Value::Object(object) => object.iter().for_each(|(name, value)| match value.as_str() {
                    Some(text) if name == "$ref" => found.push(text.to_owned()),
                    _ => references(value, found),
                }),
                Value::Array(items) => items.iter().for_each(|item| references(item, found)),
                _ => {}
            }
        }
        let (document, mut found) = (openapi(), Vec::new());
        references(&document, &mut found);
        assert!(found.len() > 30, "{found:?}");
        for reference in found {
            let place = reference.strip_prefix('#').unwrap();
            assert!(document.pointer(place).is_some(), "{reference}");
        }
    }

    /// Reads an answer as its shape, and finds nothing in it that the shape does not have.
    async fn is<T: Serialize + DeserializeOwned>(plane: &Plane, path: &str) {
        let answer = plane.get(path).await.body;
        let read: T =
            serde_json::from_value(answer.clone()).unwrap_or_else(|error| panic!("{path}: {error}: {answer}"));
        let shown = serde_json::to_value(read).unwrap();
        for name in answer.as_object().unwrap().keys() {
            assert!(shown.get(name).is_some(), "{path}: {name}");
        }
    }

    #[tokio::test]
    async fn answers_have_the_shapes_that_the_document_shows() {
        let plane = Plane::start();
        let engine = FakeEngine::vllm().await;
        let id = plane.register(json!({"url": engine.url, "worker_type": "prefill"})).await;
        plane.call("PUT", "/fleet/policies/default", Some(json!({"policy": "random"}))).await;
        is::<shapes::WorkerList>(&plane, "/workers").await;
        is::<shapes::WorkerInfo>(&plane, &format!("/workers/{id}")).await;
        is::<shapes::Occupation>(&plane, &format!("/fleet/workers/{id}/intent")).await;
        is::<shapes::PolicyList>(&plane, "/fleet/policies").await;
        is::<shapes::Policy>(&plane, "/fleet/policies/default").await;
        is::<shapes::Matrix>(&plane, "/fleet/pairing").await;
        is::<shapes::Settings>(&plane, "/fleet/settings").await;
        is::<shapes::Whoami>(&plane, "/fleet/whoami").await;
        is::<shapes::GatewayList>(&plane, "/fleet/gateways").await;
        is::<admission::Shown>(&plane, "/fleet/admission").await;
        is::<shapes::AuditList>(&plane, "/fleet/audit").await;
        is::<shapes::Revision>(&plane, "/fleet/revision").await;
        is::<shapes::Failure>(&plane, "/workers/7").await;
        is::<shapes::TokenList>(&plane, "/fleet/tokens").await;
    }
}
