//! TLS towards clients and towards workers, with certificates made here.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use reqwest::StatusCode;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use serde_json::json;
use support::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// A certificate authority of a test.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Authority {
    fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).unwrap().pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    /// A certificate and its key, as PEM.
    fn issue(&self) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["localhost".to_owned(), "127.0.0.1".to_owned()]).unwrap();
        (params.signed_by(&key, &self.issuer).unwrap().pem(), key.serialize_pem())
    }

    /// What a client that trusts this authority uses.
    fn client(&self, identity: Option<&(String, String)>) -> Arc<ClientConfig> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(self.pem.as_bytes()).unwrap()).unwrap();
        let builder = ClientConfig::builder().with_root_certificates(roots);
        Arc::new(match identity {
            None => builder.with_no_client_auth(),
            Some((certificate, key)) => builder.with_client_auth_cert(chain(certificate), private(key)).unwrap(),
        })
    }
}

fn chain(pem: &str) -> Vec<CertificateDer<'static>> {
    vec![CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()]
}

fn private(pem: &str) -> PrivateKeyDer<'static> {
    PrivateKeyDer::from_pem_slice(pem.as_bytes()).unwrap()
}

fn write(path: &Path, text: &str) -> String {
    std::fs::write(path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

/// The answer to a probe over TLS.
async fn probe(port: u16, config: Arc<ClientConfig>) -> std::io::Result<String> {
    let stream = TcpStream::connect(("127.0.0.1", port)).await?;
    let mut stream = TlsConnector::from(config).connect(ServerName::try_from("localhost").unwrap(), stream).await?;
    stream.write_all(b"GET /liveness HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").await?;
    let mut said = String::new();
    stream.read_to_string(&mut said).await?;
    Ok(said)
}

/// A gateway behind TLS, answering probes of `client`.
async fn serve(flags: &[&str], client: Arc<ClientConfig>) -> Smg {
    let port = free_port();
    let text = port.to_string();
    let mut all = vec!["launch", "--host", "127.0.0.1", "--port", &text];
    all.extend(flags);
    let smg = Smg::spawn(&all, port, &[]);
    eventually(&format!("it answers over TLS; log:\n{}", smg.log()), || async {
        probe(port, Arc::clone(&client)).await.ok().filter(|said| said.starts_with("HTTP/1.1 200"))
    })
    .await;
    smg
}

struct Files {
    _directory: tempfile::TempDir,
    certificate: PathBuf,
    key: PathBuf,
}

impl Files {
    fn new((certificate, key): &(String, String)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let files = Self {
            certificate: directory.path().join("cert.pem"),
            key: directory.path().join("key.pem"),
            _directory: directory,
        };
        files.replace(certificate, key);
        files
    }

    fn replace(&self, certificate: &str, key: &str) {
        write(&self.certificate, certificate);
        write(&self.key, key);
    }

    fn flags(&self) -> [&str; 4] {
        ["--tls-cert-path", self.certificate.to_str().unwrap(), "--tls-key-path", self.key.to_str().unwrap()]
    }
}

#[tokio::test]
async fn a_certificate_is_replaced_without_a_restart_and_a_broken_one_changes_nothing() {
    let (old, new) = (Authority::new(), Authority::new());
    let files = Files::new(&old.issue());
    let smg = serve(&files.flags(), old.client(None)).await;
    assert!(probe(smg.port, new.client(None)).await.is_err());
    let (certificate, key) = new.issue();
    files.replace("no certificate", &key);
    eventually("the broken file is reported", || async {
        smg.log().contains("the new certificate cannot be used").then_some(())
    })
    .await;
    assert!(probe(smg.port, old.client(None)).await.is_ok());
    files.replace(&certificate, &key);
    eventually("the new certificate is served", || async { probe(smg.port, new.client(None)).await.ok() }).await;
    assert!(probe(smg.port, old.client(None)).await.is_err());
    // Whoever speaks without TLS gets no answer and harms nobody.
    assert!(smg.client.get(format!("{}/liveness", smg.url)).send().await.is_err());
    assert!(probe(smg.port, new.client(None)).await.is_ok());
}

#[tokio::test]
async fn with_roots_of_clients_a_client_needs_a_certificate() {
    let (servers, clients, strangers) = (Authority::new(), Authority::new(), Authority::new());
    let files = Files::new(&servers.issue());
    let directory = tempfile::tempdir().unwrap();
    let roots = write(&directory.path().join("clients.pem"), &clients.pem);
    let mut flags = files.flags().to_vec();
    flags.extend(["--tls-client-ca-paths", &roots]);
    let smg = serve(&flags, servers.client(Some(&clients.issue()))).await;
    assert!(probe(smg.port, servers.client(None)).await.is_err());
    assert!(probe(smg.port, servers.client(Some(&strangers.issue()))).await.is_err());
    assert!(probe(smg.port, servers.client(Some(&clients.issue()))).await.unwrap().starts_with("HTTP/1.1 200"));
}

#[tokio::test]
async fn files_that_cannot_be_used_stop_the_start_and_are_named() {
    let authority = Authority::new();
    let ((certificate, key), (_, other_key)) = (authority.issue(), authority.issue());
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| write(&directory.path().join(name), text);
    let (certificate, key) = (file("cert.pem", &certificate), file("key.pem", &key));
    let (other, empty) = (file("other.pem", &other_key), file("empty.pem", ""));
    let missing = directory.path().join("missing.pem").to_str().unwrap().to_owned();
    for (flags, named) in [
        (["--tls-cert-path", &missing, "--tls-key-path", &key], "missing.pem: No such file"),
        (["--tls-cert-path", &empty, "--tls-key-path", &key], "empty.pem: no certificate in PEM form"),
        (["--tls-cert-path", &certificate, "--tls-key-path", &empty], "empty.pem: no private key in PEM form"),
        (["--tls-cert-path", &certificate, "--tls-key-path", &other], "other.pem"),
        (["--ca-cert-paths", &empty, "--port", "0"], "empty.pem: no certificate in PEM form"),
    ] {
        let mut all = vec!["launch", "--host", "127.0.0.1"];
        if !flags.contains(&"--port") {
            all.extend(["--port", "0"]);
        }
        all.extend(flags);
        let mut smg = Smg::spawn(&all, 0, &[]);
        assert_eq!(smg.exited().await.code(), Some(1), "{flags:?}");
        assert!(smg.log().contains(named), "{named}: {}", smg.log());
    }
}

/// Puts TLS in front of an engine. Returns its port.
async fn behind_tls(engine: &MockEngine, (certificate, key): &(String, String)) -> u16 {
    let config = ServerConfig::builder().with_no_client_auth().with_single_cert(chain(certificate), private(key));
    behind(engine, config.unwrap()).await
}

async fn behind(engine: &MockEngine, config: ServerConfig) -> u16 {
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (port, inner) = (listener.local_addr().unwrap().port(), engine.port());
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let Ok(mut outer) = acceptor.accept(stream).await else { return };
                let Ok(mut inner) = TcpStream::connect(("127.0.0.1", inner)).await else { return };
                let _ = copy_bidirectional(&mut outer, &mut inner).await;
            });
        }
    });
    port
}

#[tokio::test]
async fn https_workers_are_served_when_their_root_is_trusted_and_fail_registration_with_the_reason_otherwise() {
    let authority = Authority::new();
    let (prefill, decode) = (sglang(Role::Prefill).await, sglang(Role::Decode).await);
    let ports = [behind_tls(&prefill, &authority.issue()).await, behind_tls(&decode, &authority.issue()).await];
    let [prefill_spec, decode_spec] = [(&prefill, "prefill", ports[0]), (&decode, "decode", ports[1])]
        .map(|(engine, role, port)| spec_with(engine, role, json!({"url": format!("https://localhost:{port}")})));
    let directory = tempfile::tempdir().unwrap();
    let roots = write(&directory.path().join("roots.pem"), &authority.pem);
    let smg = Smg::launch(&["--ca-cert-paths", &roots]).await;
    smg.register(&prefill_spec).await;
    smg.register(&decode_spec).await;
    for (path, body) in requests() {
        assert_eq!(smg.post(path, &body).await.status(), StatusCode::OK, "{path}");
    }
    let distrustful = Smg::launch(&[]).await;
    let accepted = distrustful.post("/workers", &decode_spec).await;
    let id = accepted.json::<serde_json::Value>().await.unwrap()["worker_id"].as_str().unwrap().to_owned();
    eventually("the reason is readable", || async {
        let worker = distrustful.get_json(&format!("/workers/{id}")).await;
        worker["job_status"]["message"].as_str().filter(|message| message.contains("certificate")).map(drop)
    })
    .await;
}

#[tokio::test]
async fn a_worker_that_wants_a_certificate_of_its_clients_gets_the_gateways() {
    let authority = Authority::new();
    let engine = sglang(Role::Regular).await;
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(authority.pem.as_bytes()).unwrap()).unwrap();
    let clients = WebPkiClientVerifier::builder(Arc::new(roots)).build().unwrap();
    let (certificate, key) = authority.issue();
    let config = ServerConfig::builder().with_client_cert_verifier(clients);
    let port = behind(&engine, config.with_single_cert(chain(&certificate), private(&key)).unwrap()).await;
    let registration = spec_with(&engine, "regular", json!({"url": format!("https://localhost:{port}")}));

    let directory = tempfile::tempdir().unwrap();
    let roots = write(&directory.path().join("roots.pem"), &authority.pem);
    let files = Files::new(&authority.issue());
    let identity = [&files.certificate, &files.key].map(|path| path.to_str().unwrap());
    let flags = ["--ca-cert-paths", &roots, "--client-cert-path", identity[0], "--client-key-path", identity[1]];
    let smg = Smg::launch(&flags).await;
    smg.register(&registration).await;
    for (path, body) in requests() {
        assert_eq!(smg.post(path, &body).await.status(), StatusCode::OK, "{path}");
    }
    let nameless = Smg::launch(&["--ca-cert-paths", &roots, "--worker-startup-timeout-secs", "1"]).await;
    let accepted = nameless.post("/workers", &registration).await;
    let location = accepted.headers()["location"].to_str().unwrap().to_owned();
    eventually("it is not let in", || async {
        (nameless.get_json(&location).await["job_status"]["status"] == "failed").then_some(())
    })
    .await;
}
