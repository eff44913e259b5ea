//! Models whose workers speak HTTP and gRPC, and `grpcs://` workers.

use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::net::{TcpListener, TcpStream};

use super::*;

#[tokio::test]
async fn http_and_grpc_workers_serve_one_model_and_never_pair_with_each_other() {
    let pair = Pair::of(Engine::Sglang, &["--policy", "round_robin"]).await;
    let (prefill, decode) = (sglang(Role::Prefill).await, sglang(Role::Decode).await);
    pair.smg.register_pair(&prefill, &decode).await;
    for _ in 0..8 {
        let response = pair.smg.post(CHAT, &chat()).await;
        assert_eq!(response.status(), StatusCode::OK, "{}", response.text().await.unwrap());
    }
    let [grpc_prefills, grpc_decodes] = pair.engines().map(|engine| engine.calls().len());
    assert_eq!(grpc_prefills, grpc_decodes);
    assert!(grpc_prefills > 0 && grpc_prefills < 8, "{grpc_prefills}");
    pair.is_clean().await;
}

/// A gRPC pair and an HTTP pair of one model, which are selected in turn.
async fn mixed() -> (Pair, MockEngine, MockEngine) {
    let pair = Pair::of(Engine::Sglang, &["--policy", "round_robin", "--drain-settle-secs", "1"]).await;
    let (prefill, decode) = (sglang(Role::Prefill).await, sglang(Role::Decode).await);
    pair.smg.register_pair(&prefill, &decode).await;
    (pair, prefill, decode)
}

#[tokio::test]
async fn what_only_workers_over_http_can_serve_is_never_refused_because_a_grpc_pair_was_selected() {
    let (pair, prefill, decode) = mixed().await;
    for engine in [&prefill, &decode] {
        engine.set_fault(anything());
    }
    let image = json!([{"type": "image_url", "image_url": {"url": "http://x/y.png"}}, {"type": "text", "text": "?"}]);
    let mut unknown = chat();
    unknown["lora_path"] = json!("adapter");
    let requests = [
        (CHAT, json!({"model": MODEL, "messages": [{"role": "user", "content": image}], "max_tokens": 2})),
        (CHAT, unknown),
        (CHAT, json!({"model": MODEL, "messages": [{"role": "user", "content": [{"type": "x_new"}]}]})),
        ("/generate", json!({"text": ["one", "two"], "image_data": "x"})),
        ("/v1/responses", json!({"model": MODEL, "input": "hi", "previous_response_id": "resp_elsewhere"})),
    ];
    for (path, body) in &requests {
        // Both kinds of pairs are selected in turn.
        for number in 0..4 {
            let id = format!("{path}-{number}");
            let response = pair.smg.post_as(&id, path, body).await;
            assert_eq!(response.status(), StatusCode::OK, "{path} {body} {}", response.text().await.unwrap());
            assert_eq!(response.headers()["x-smg-routed-worker-id"], decode.url());
        }
    }
    assert!(pair.engines().iter().all(|engine| engine.calls().is_empty()));
    // What both can serve, both serve.
    for _ in 0..4 {
        assert_eq!(pair.smg.post(CHAT, &chat()).await.status(), StatusCode::OK);
    }
    assert!(!pair.decode.calls().is_empty());
    pair.is_clean().await;

    // Where no pair speaks HTTP the refusal is the answer.
    let id = pair.smg.get_json("/workers").await["workers"]
        .as_array()
        .unwrap()
        .iter()
        .find(|worker| worker["url"] == decode.url())
        .unwrap()["id"]
        .as_str()
        .unwrap()
        .to_owned();
    pair.smg.remove(&id).await;
    assert_refused(&pair.smg, CHAT, &requests[0].1, 400, "multimodal_not_supported").await;
}

#[tokio::test]
async fn a_kept_response_is_gone_on_from_where_it_is_known() {
    let (pair, _prefill, decode) = mixed().await;
    let first = json!({"model": MODEL, "input": "hi", "max_output_tokens": 4});
    let kept = eventually("a response of a gRPC pair", || async {
        let response = pair.smg.post("/v1/responses", &first).await;
        let mine = response.headers()["x-smg-routed-worker-id"] == pair.decode.url();
        let answer: Value = response.json().await.unwrap();
        mine.then(|| answer["id"].as_str().unwrap().to_owned())
    })
    .await;
    decode.clear_requests();
    let next = json!({"model": MODEL, "input": "and", "max_output_tokens": 4, "previous_response_id": kept});
    for _ in 0..4 {
        let response = pair.smg.post("/v1/responses", &next).await;
        assert_eq!(response.status(), StatusCode::OK, "{}", response.text().await.unwrap());
        assert_eq!(response.headers()["x-smg-routed-worker-id"], pair.decode.url());
    }
    assert!(decode.generations().is_empty());
}

/// Puts TLS in front of an engine that speaks gRPC. Returns its port, and the certificate of who vouches for it.
async fn behind_tls(engine: &MockEngine) -> (u16, String) {
    let authority = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let root = params.self_signed(&authority).unwrap().pem();
    let issuer = Issuer::new(params, authority);
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::new(vec!["localhost".to_owned()]).unwrap().signed_by(&key, &issuer).unwrap();
    let chain = vec![CertificateDer::from_pem_slice(certificate.pem().as_bytes()).unwrap()];
    let key = PrivateKeyDer::from_pem_slice(key.serialize_pem().as_bytes()).unwrap();
    let mut config = ServerConfig::builder().with_no_client_auth().with_single_cert(chain, key).unwrap();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (port, inner) = (listener.local_addr().unwrap().port(), engine.port());
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let Ok(mut outer) = acceptor.accept(stream).await else { return };
                let Ok(mut inner) = TcpStream::connect(("127.0.0.1", inner)).await else { return };
                let _ = tokio::io::copy_bidirectional(&mut outer, &mut inner).await;
            });
        }
    });
    (port, root)
}

#[tokio::test]
async fn workers_over_grpc_with_tls_are_served_when_their_root_is_trusted() {
    let directory = tempfile::tempdir().unwrap();
    let (prefill, decode) = (grpc(Engine::Vllm, Role::Prefill).await, grpc(Engine::Vllm, Role::Decode).await);
    let (mut roots, mut specs) = (String::new(), Vec::new());
    for (engine, role) in [(&prefill, "prefill"), (&decode, "decode")] {
        let (port, root) = behind_tls(engine).await;
        roots.push_str(&root);
        specs.push(spec_with(engine, role, json!({"url": format!("grpcs://localhost:{port}")})));
    }
    let path = directory.path().join("roots.pem");
    std::fs::write(&path, roots).unwrap();
    let smg = Smg::launch(&["--ca-cert-paths", path.to_str().unwrap()]).await;
    for spec in &specs {
        smg.register(spec).await;
    }
    for body in [chat(), chat_stream()] {
        let response = smg.post(CHAT, &body).await;
        assert_eq!(response.status(), StatusCode::OK, "{}", response.text().await.unwrap());
        assert!(!response.text().await.unwrap().contains("\"error\""));
    }
    assert_eq!((prefill.calls().len(), decode.calls().len()), (2, 2));
    // Nobody is trusted without being told to.
    let distrustful = Smg::launch(&["--worker-startup-timeout-secs", "1"]).await;
    let accepted = distrustful.post("/workers", &specs[1]).await;
    let location = accepted.headers()["location"].to_str().unwrap().to_owned();
    eventually("it is not let in", || async {
        (distrustful.get_json(&location).await["job_status"]["status"] == "failed").then_some(())
    })
    .await;
}
