//! Who may call what: keys of the client edge, tokens of the admin API, and that no secret is shown or carried on.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use reqwest::{Method, RequestBuilder, Response, StatusCode};
use serde_json::{Value, json};
use support::*;

const KEY: &str = "edge-key-3f9c";
const TENANT_KEY: &str = "tenant-key-77aa";
const ADMIN: &str = "admin-key-51d2";

/// A request under a bearer secret, if there is one.
fn request(smg: &Smg, method: &str, path: &str, secret: Option<&str>) -> RequestBuilder {
    let request = smg.client.request(Method::from_bytes(method.as_bytes()).unwrap(), format!("{}{path}", smg.url));
    match secret {
        Some(secret) => request.bearer_auth(secret),
        None => request,
    }
}

async fn call(smg: &Smg, method: &str, path: &str, secret: Option<&str>, body: &Value) -> Response {
    request(smg, method, path, secret).json(body).send().await.unwrap()
}

async fn ask(smg: &Smg, method: &str, path: &str, secret: Option<&str>) -> Response {
    request(smg, method, path, secret).send().await.unwrap()
}

/// Registers a worker under a secret and waits until it is healthy.
async fn register(smg: &Smg, secret: Option<&str>, spec: &Value) -> String {
    let response = call(smg, "POST", "/workers", secret, spec).await;
    assert_eq!(response.status(), StatusCode::ACCEPTED, "{}", response.text().await.unwrap());
    let id = response.json::<Value>().await.unwrap()["worker_id"].as_str().unwrap().to_owned();
    eventually("the worker is healthy", || async {
        let worker: Value = ask(smg, "GET", &format!("/workers/{id}"), secret).await.json().await.unwrap();
        (worker["is_healthy"] == true).then_some(())
    })
    .await;
    id
}

/// Rows of the route table of the documented system: what stays open when a key is configured.
const OPEN: [&str; 9] = [
    "/health",
    "/liveness",
    "/readiness",
    "/health_generate",
    "/engine_metrics",
    "/v1/models",
    "/v1/models/m",
    "/get_server_info",
    "/get_model_info",
];

#[tokio::test]
async fn inference_needs_the_key_probes_and_inventory_do_not() {
    let smg = Smg::launch(&["--api-key", KEY, "--tenant-api-key", &format!("acme:{TENANT_KEY}")]).await;
    let (prefill, decode) = (sglang(Role::Prefill).await, sglang(Role::Decode).await);
    register(&smg, Some(KEY), &spec(&prefill, "prefill")).await;
    register(&smg, Some(KEY), &spec(&decode, "decode")).await;
    for path in OPEN {
        assert_ne!(ask(&smg, "GET", path, None).await.status(), StatusCode::UNAUTHORIZED, "{path}");
    }
    let inference =
        ["/v1/chat/completions", "/v1/completions", "/generate", "/v1/responses", "/v1/embeddings", "/v1/classify"];
    for path in inference.into_iter().chain(["/rerank", "/v1/rerank"]) {
        let refused = call(&smg, "POST", path, None, &chat()).await;
        assert_eq!(refused.status(), StatusCode::UNAUTHORIZED, "{path}");
        assert_eq!(refused.headers()["www-authenticate"], "Bearer realm=\"data-plane\"", "{path}");
        assert_eq!(refused.headers()["x-smg-error-code"], "invalid_api_key", "{path}");
        let error = refused.json::<Value>().await.unwrap()["error"].clone();
        assert_eq!((&error["code"], &error["type"]), (&json!("invalid_api_key"), &json!("invalid_request_error")));
    }
    let wrong = call(&smg, "POST", "/v1/chat/completions", Some("edge-key-3f9d"), &chat()).await;
    assert_eq!(wrong.status(), StatusCode::UNAUTHORIZED);
    assert_eq!(wrong.headers()["www-authenticate"], "Bearer realm=\"data-plane\", error=\"invalid_token\"");
    let message = call(&smg, "POST", "/v1/messages", None, &chat()).await.json::<Value>().await.unwrap();
    assert_eq!(message["error"]["type"], "authentication_error", "{message}");
    assert!(prefill.requests().iter().chain(&decode.requests()).all(|seen| seen.path != "/v1/chat/completions"));
    for key in [KEY, TENANT_KEY] {
        let served = call(&smg, "POST", "/v1/chat/completions", Some(key), &chat()).await;
        assert_eq!(served.status(), StatusCode::OK);
        let x_api_key = request(&smg, "POST", "/v1/chat/completions", None).header("x-api-key", key);
        assert_eq!(x_api_key.json(&chat()).send().await.unwrap().status(), StatusCode::OK);
    }
    // No engine saw the key, in any header.
    for seen in prefill.requests().iter().chain(&decode.requests()) {
        for (name, value) in &seen.headers {
            let value = String::from_utf8_lossy(value);
            assert!(!value.contains(KEY) && !value.contains(TENANT_KEY), "{name}: {value}");
        }
    }
}

#[tokio::test]
async fn without_tokens_the_gateways_key_opens_the_admin_api_and_a_tenants_does_not() {
    let smg = Smg::launch(&["--api-key", KEY, "--tenant-api-key", &format!("acme:{TENANT_KEY}")]).await;
    for path in ["/workers", "/fleet/policies", "/fleet/decisions", "/fleet/tokens"] {
        for (secret, status) in [(None, 401), (Some(TENANT_KEY), 401), (Some("x"), 401), (Some(KEY), 200)] {
            let response = ask(&smg, "GET", path, secret).await;
            assert_eq!(response.status().as_u16(), status, "{path} {secret:?}");
            if status == 401 {
                assert!(response.headers()["www-authenticate"].to_str().unwrap().contains("control-plane"));
                assert_eq!(response.json::<Value>().await.unwrap()["code"], "UNAUTHORIZED", "{path}");
            }
        }
    }
    // A change that is refused says that it was not made, whoever refuses it.
    for path in ["/workers", "/flush_cache"] {
        let refused = call(&smg, "POST", path, Some("x"), &json!({"url": "http://h:1"})).await;
        assert_eq!(refused.status(), StatusCode::UNAUTHORIZED);
        let answer: Value = refused.json().await.unwrap();
        assert_eq!((&answer["code"], &answer["outcome"]), (&json!("UNAUTHORIZED"), &json!("did_not_happen")), "{path}");
    }
    let read: Value = ask(&smg, "GET", "/workers", Some("x")).await.json().await.unwrap();
    assert_eq!(read.get("outcome"), None, "a read has no outcome");
    let tenants_only = Smg::launch(&["--tenant-api-key", &format!("acme:{TENANT_KEY}")]).await;
    for secret in [None, Some(TENANT_KEY)] {
        assert_eq!(ask(&tenants_only, "GET", "/workers", secret).await.status(), StatusCode::UNAUTHORIZED);
    }
}

#[tokio::test]
async fn each_role_reaches_as_far_as_documented_at_the_control_plane_and_through_a_gateway() {
    let (directory, port) = (tempfile::tempdir().unwrap(), free_port());
    let keys = format!("k0:root:admin:{ADMIN}");
    let plane = Smg::controlplane(directory.path(), port, &["--control-plane-api-keys", &keys]).await;
    let gateway = Smg::gateway(&format!("127.0.0.1:{port}"), &["--api-key", KEY]).await;
    // The tokens reach the gateway with its snapshot; until then its own key guards the admin API.
    eventually("the gateway forwards with the token", || async {
        ask(&gateway, "GET", "/workers", Some(ADMIN)).await.status().is_success().then_some(())
    })
    .await;
    let create = async |name: &str, role: &str| -> String {
        let created = call(&gateway, "POST", "/fleet/tokens", Some(ADMIN), &json!({"name": name, "role": role})).await;
        assert_eq!(created.status(), StatusCode::CREATED);
        created.json::<Value>().await.unwrap()["token"].as_str().unwrap().to_owned()
    };
    let (viewer, operator, admin) =
        (create("v", "viewer").await, create("o", "operator").await, create("a", "admin").await);
    let engine = sglang(Role::Regular).await;
    let worker = spec(&engine, "regular");
    let secrets = [None, Some("unknown"), Some(KEY), Some(&*viewer), Some(&*operator), Some(&*admin)];
    // Columns: nobody, an unknown token, the key of the client edge, viewer, operator, admin.
    let rows = [
        ("GET", "/workers", json!({}), [401, 401, 401, 200, 200, 200]),
        ("GET", "/fleet/policies", json!({}), [401, 401, 401, 200, 200, 200]),
        ("GET", "/fleet/gateways", json!({}), [401, 401, 401, 200, 200, 200]),
        ("GET", "/fleet/tokens", json!({}), [401, 401, 401, 403, 403, 200]),
        ("POST", "/workers", worker, [401, 401, 401, 403, 202, 409]),
        ("PUT", "/fleet/policies/default", json!({"policy": "random"}), [401, 401, 401, 403, 403, 200]),
        ("PUT", "/fleet/settings", json!({"name": "n"}), [401, 401, 401, 403, 403, 200]),
        ("POST", "/fleet/tokens", json!({"name": "a", "role": "admin"}), [401, 401, 401, 403, 403, 409]),
    ];
    for (method, path, body, statuses) in rows {
        for (secret, status) in secrets.into_iter().zip(statuses) {
            // A worker is created once: at the control plane everybody with the right to meets it.
            let direct = if status == 202 { 409 } else { status };
            let forwarded = call(&gateway, method, path, secret, &body).await;
            assert_eq!(forwarded.status().as_u16(), status, "{method} {path}: {}", forwarded.text().await.unwrap());
            assert_eq!(call(&plane, method, path, secret, &body).await.status().as_u16(), direct, "{method} {path}");
        }
    }
    // Answered by the gateway itself, from the digests in its snapshot.
    for (secret, statuses) in
        secrets.into_iter().zip([[401, 401], [401, 401], [401, 401], [200, 403], [200, 200], [200, 200]])
    {
        let [decisions, flush] = statuses;
        assert_eq!(ask(&gateway, "GET", "/fleet/decisions", secret).await.status().as_u16(), decisions);
        assert_eq!(ask(&gateway, "POST", "/flush_cache", secret).await.status().as_u16(), flush);
    }
    let forbidden = call(&gateway, "PUT", "/fleet/settings", Some(&viewer), &json!({})).await;
    assert_eq!(forbidden.json::<Value>().await.unwrap()["code"], "FORBIDDEN");
    let known = ask(&gateway, "GET", "/fleet/whoami", Some(&operator)).await.json::<Value>().await.unwrap();
    assert_eq!(known, json!({"name": "o", "role": "operator"}));
    // The decision on a request goes to who may read decisions. The registered engine may not be ready yet: the header is on any answer.
    let shows = [("1", 0), ("Bearer unknown", 0), (&*format!("Bearer {KEY}"), 0), (&*format!("Bearer {viewer}"), 1)];
    eventually("the worker is routed to", || async {
        let answer = call(&gateway, "POST", "/generate", Some(KEY), &generate()).await;
        answer.status().is_success().then_some(())
    })
    .await;
    for (asked, shown) in shows {
        let request = request(&gateway, "POST", "/generate", Some(KEY)).header("x-smg-decision", asked);
        let answer = request.json(&generate()).send().await.unwrap();
        assert_eq!(answer.headers().get_all("x-smg-decision").iter().count(), shown, "{asked}");
    }
    assert!(engine.requests().iter().all(|seen| seen.header_values("x-smg-decision").next().is_none()));
    // The key of the client edge is for inference alone, and a token is not one.
    assert_eq!(call(&gateway, "POST", "/generate", Some(&admin), &generate()).await.status(), StatusCode::UNAUTHORIZED);
    assert_ne!(call(&gateway, "POST", "/generate", Some(KEY), &generate()).await.status(), StatusCode::UNAUTHORIZED);
}

#[tokio::test]
async fn a_tokens_secret_is_shown_once_and_a_revoked_one_opens_nothing() {
    let smg = Smg::launch(&[]).await;
    assert_eq!(ask(&smg, "GET", "/workers", None).await.status(), StatusCode::OK, "open without keys and tokens");
    let body = json!({"name": "v", "role": "viewer"});
    let first = call(&smg, "POST", "/fleet/tokens", None, &body).await;
    assert_eq!(first.status(), StatusCode::BAD_REQUEST, "the first token is an admin's");
    let mut secrets = Vec::new();
    let mut ids = Vec::new();
    for (name, role) in [("root", "admin"), ("v", "viewer")] {
        let as_whom = secrets.first().map(String::as_str);
        let created = call(&smg, "POST", "/fleet/tokens", as_whom, &json!({"name": name, "role": role})).await;
        assert_eq!(created.status(), StatusCode::CREATED);
        let location = created.headers()["location"].to_str().unwrap().to_owned();
        let created: Value = created.json().await.unwrap();
        assert_eq!(location, format!("/fleet/tokens/{}", created["id"].as_str().unwrap()));
        secrets.push(created["token"].as_str().unwrap().to_owned());
        ids.push(created["id"].as_str().unwrap().to_owned());
    }
    let (root, viewer) = (&secrets[0], &secrets[1]);
    assert_eq!(ask(&smg, "GET", "/workers", None).await.status(), StatusCode::UNAUTHORIZED, "closed from now on");
    let listed = ask(&smg, "GET", "/fleet/tokens", Some(root)).await.text().await.unwrap();
    assert!(listed.contains("\"root\"") && listed.contains("\"viewer\""), "{listed}");
    let one = ask(&smg, "GET", &format!("/fleet/tokens/{}", ids[1]), Some(root)).await.text().await.unwrap();
    for text in [&listed, &one, &smg.log(), &smg.metrics().await] {
        assert!(!text.contains(root) && !text.contains(viewer), "{text}");
    }
    // The same key of idempotency shows no second secret.
    let again = async || {
        let id = "0b5ad1b4-6f0a-4d1c-9d43-0f6a5f0f8a11";
        let request = request(&smg, "POST", "/fleet/tokens", Some(root)).header("idempotency-key", id);
        request.json(&json!({"name": "w", "role": "viewer"})).send().await.unwrap().status()
    };
    assert_eq!((again().await, again().await), (StatusCode::CREATED, StatusCode::CONFLICT));
    let last = ask(&smg, "DELETE", &format!("/fleet/tokens/{}", ids[0]), Some(root)).await;
    assert_eq!(last.status(), StatusCode::CONFLICT);
    assert_eq!(last.json::<Value>().await.unwrap()["code"], "LAST_ADMIN_TOKEN");
    assert_eq!(ask(&smg, "GET", "/workers", Some(viewer)).await.status(), StatusCode::OK);
    assert_eq!(ask(&smg, "DELETE", &format!("/fleet/tokens/{}", ids[1]), Some(root)).await.status(), StatusCode::OK);
    assert_eq!(ask(&smg, "GET", "/workers", Some(viewer)).await.status(), StatusCode::UNAUTHORIZED);
    assert_eq!(ask(&smg, "GET", "/fleet/decisions", Some(viewer)).await.status(), StatusCode::UNAUTHORIZED);
    let gone = ask(&smg, "DELETE", &format!("/fleet/tokens/{}", ids[1]), Some(root)).await;
    assert_eq!(gone.status(), StatusCode::NOT_FOUND);
    assert_eq!(gone.json::<Value>().await.unwrap()["code"], "TOKEN_NOT_FOUND");
    let taken = call(&smg, "POST", "/fleet/tokens", Some(root), &json!({"name": "root", "role": "viewer"})).await;
    assert_eq!(taken.status(), StatusCode::CONFLICT);
    assert_eq!(taken.json::<Value>().await.unwrap()["code"], "TOKEN_ALREADY_EXISTS");
}

#[tokio::test]
async fn a_token_in_a_file_opens_a_fleet_for_its_first_admin_and_goes_with_the_flag() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("token");
    std::fs::write(&file, format!("{ADMIN}-long-enough\n")).unwrap();
    let (state, file_text) = (directory.path().join("state"), file.to_str().unwrap().to_owned());
    let mut smg = Smg::durable(&state, &["--admin-token-file", &file_text]).await;
    assert_eq!(ask(&smg, "GET", "/workers", None).await.status(), StatusCode::UNAUTHORIZED);
    let secret = format!("{ADMIN}-long-enough");
    let tokens: Value = ask(&smg, "GET", "/fleet/tokens", Some(&secret)).await.json().await.unwrap();
    assert_eq!((&tokens["total"], &tokens["tokens"][0]["name"]), (&json!(1), &json!("bootstrap")));
    assert_eq!(tokens["tokens"][0]["origin"], "startup");
    smg.kill();
    drop(smg);
    let smg = Smg::durable(&state, &[]).await;
    assert_eq!(ask(&smg, "GET", "/workers", None).await.status(), StatusCode::OK);
    std::fs::write(&file, "short").unwrap();
    let mut refused = Smg::spawn(&["launch", "--admin-token-file", &file_text, "--port", "0"], 0, &[]);
    assert_eq!(refused.exited().await.code(), Some(1));
    assert!(refused.log().contains("at least 16 characters") && !refused.log().contains("short\""));
}

#[tokio::test]
async fn without_the_control_plane_only_holders_of_a_token_read_the_snapshot() {
    let (directory, port) = (tempfile::tempdir().unwrap(), free_port());
    let keys = format!("k0:root:admin:{ADMIN}");
    let mut plane = Smg::controlplane(directory.path(), port, &["--control-plane-api-keys", &keys]).await;
    let gateway = Smg::gateway(&format!("127.0.0.1:{port}"), &[]).await;
    eventually("the tokens have arrived", || async {
        (ask(&gateway, "GET", "/fleet/decisions", None).await.status() == StatusCode::UNAUTHORIZED).then_some(())
    })
    .await;
    plane.kill();
    eventually("answers come from the snapshot", || async {
        ask(&gateway, "GET", "/workers", Some(ADMIN)).await.headers().contains_key("x-smg-stale").then_some(())
    })
    .await;
    assert_eq!(ask(&gateway, "GET", "/workers", None).await.status(), StatusCode::UNAUTHORIZED);
    assert_eq!(ask(&gateway, "GET", "/workers", Some("other")).await.status(), StatusCode::UNAUTHORIZED);
}

#[tokio::test]
async fn a_workers_key_is_sent_to_that_worker_and_shown_nowhere() {
    let smg = Smg::launch(&["--log-level", "debug", "--api-key", KEY]).await;
    let hush = ["hush-prefill-9d", "hush-decode-4c"];
    let engine = async |role, key: &str| {
        MockEngine::builder().engine(Engine::Sglang).role(role).model(MODEL).api_key(key).start().await.unwrap()
    };
    let (prefill, decode) = (engine(Role::Prefill, hush[0]).await, engine(Role::Decode, hush[1]).await);
    let key = Some(KEY);
    let id = register(&smg, key, &spec_with(&prefill, "prefill", json!({"api_key": hush[0]}))).await;
    register(&smg, key, &spec_with(&decode, "decode", json!({"api_key": hush[1]}))).await;
    let served = call(&smg, "POST", "/v1/chat/completions", key, &chat()).await;
    assert_eq!(served.status(), StatusCode::OK, "the engines refuse whoever has not their key");
    assert_eq!(ask(&smg, "POST", "/flush_cache", key).await.status(), StatusCode::OK);
    for (engine, own) in [(&prefill, hush[0]), (&decode, hush[1])] {
        for seen in engine.requests() {
            assert_eq!(seen.header("authorization"), Some(&*format!("Bearer {own}")), "{}", seen.path);
        }
    }
    // Errors of all kinds: a refused spec, a worker that fails, one that is not there.
    let broken = json!({"url": "http://127.0.0.1:1", "api_key": "hush-broken-1", "priority": "x"});
    let mut texts = vec![call(&smg, "POST", "/workers", key, &broken).await.text().await.unwrap()];
    let missing = json!({"url": "http://127.0.0.1:9", "api_key": "hush-missing-2", "worker_type": "decode"});
    texts.push(call(&smg, "POST", "/workers", key, &missing).await.text().await.unwrap());
    let patch = json!({"api_key": "hush-patched-3"});
    texts.push(call(&smg, "PATCH", &format!("/workers/{id}"), key, &patch).await.text().await.unwrap());
    texts.push(call(&smg, "POST", "/v1/chat/completions", key, &chat()).await.text().await.unwrap());
    for path in ["/workers", "/fleet/decisions", "/fleet/policies", "/fleet/gateways", "/fleet/cluster", "/readiness"] {
        texts.push(ask(&smg, "GET", path, key).await.text().await.unwrap());
    }
    texts.extend([smg.log(), smg.metrics().await]);
    for text in texts {
        assert!(!text.contains("hush-") && !text.contains(KEY), "{text}");
    }
}
