//! TLS between the parts of a fleet, over real sockets: who is let in where, what everybody else is told, and how certificates are replaced.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client as Https;
use hyper_util::rt::TokioExecutor;
use rcgen::string::Ia5String;
use rcgen::{CertificateParams, DistinguishedName, DnType, Issuer, KeyPair, SanType};
use reqwest::{Client, StatusCode};
use serde_json::{Value, json};
use smg_net::mutual::connect::Connector as Tls;
use smg_net::mutual::identity::Part;
use smg_net::mutual::{Files, MutualTls, operator};
use smg_services::raft::peer_client::PeerClient;
use smg_services::sync::sync_client::SyncClient;
use support::*;
use tonic::Code;
use tonic::transport::{Channel, Endpoint};

/// An admin's token, as a flag of the control plane.
const TOKEN: &str = "1:alice:admin:0123456789abcdef-admin";
const SECRET: &str = "0123456789abcdef-admin";
const VIEWER: &str = "2:bob:viewer:0123456789abcdef-viewer";
const VIEWER_SECRET: &str = "0123456789abcdef-viewer";

fn smg(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_smg")).args(arguments).output().unwrap()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// An authority in a directory, as an operator makes it.
struct Authority(tempfile::TempDir);

impl Authority {
    fn new(cluster: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let made = smg(&["cluster", "ca", "init", text(&directory.path().join("ca")), "--cluster-name", cluster]);
        assert!(made.status.success(), "{made:?}");
        Self(directory)
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("ca")
    }

    fn roots(&self) -> PathBuf {
        self.path().join("ca.crt")
    }

    /// A directory with a part's certificate.
    fn issue(&self, role: &str, name: &str) -> PathBuf {
        let issued = smg(&["cluster", "ca", "issue", text(&self.path()), "--role", role, "--name", name]);
        assert!(issued.status.success(), "{issued:?}");
        PathBuf::from(String::from_utf8(issued.stdout).unwrap().trim())
    }

    /// As [`Authority::issue`], with a certificate that ended yesterday.
    fn issue_expired(&self, role: &str, name: &str, cluster: &str) -> PathBuf {
        let directory = self.issue(role, name);
        let authority = KeyPair::from_pem(&std::fs::read_to_string(self.path().join("ca.key")).unwrap()).unwrap();
        let mut issuer = CertificateParams::new(Vec::new()).unwrap();
        issuer.distinguished_name = DistinguishedName::new();
        issuer.distinguished_name.push(DnType::CommonName, format!("smg {cluster} authority"));
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        let name = format!("spiffe://{cluster}/{role}/{name}");
        params.subject_alt_names = vec![SanType::URI(Ia5String::try_from(name).unwrap())];
        let now = rcgen::date_time_ymd(1970, 1, 1) + Duration::from_millis(smg_net::unix_millis());
        params.not_before = now - Duration::from_secs(200_000);
        params.not_after = now - Duration::from_secs(86_400);
        let certificate = params.signed_by(&key, &Issuer::new(issuer, authority)).unwrap();
        std::fs::write(directory.join("tls.crt"), certificate.pem()).unwrap();
        std::fs::write(directory.join("tls.key"), key.serialize_pem()).unwrap();
        directory
    }
}

/// A member's place, which outlives its process.
struct Place {
    directory: tempfile::TempDir,
    certificate: PathBuf,
    port: u16,
    peer_port: u16,
}

impl Place {
    fn new(certificate: PathBuf) -> Self {
        Self { directory: tempfile::tempdir().unwrap(), certificate, port: free_port(), peer_port: free_port() }
    }

    fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    fn peer_address(&self) -> String {
        format!("127.0.0.1:{}", self.peer_port)
    }

    /// Starts the member, over TLS unless `flags` say otherwise.
    fn start(&self, flags: &[&str]) -> Smg {
        let (listen, peer_listen) = (self.address(), self.peer_address());
        let mut all = vec!["controlplane", "--data-dir", text(self.directory.path()), "--listen", &listen];
        all.extend(["--peer-listen", &peer_listen, "--shutdown-grace-period-secs", "1"]);
        if !flags.contains(&"--insecure") {
            all.extend(["--tls-dir", text(&self.certificate), "--control-plane-api-keys", TOKEN, VIEWER]);
        }
        all.extend(flags);
        Smg::spawn(&all, self.port, &[])
    }

    /// A fleet of one member, over TLS.
    async fn founder(authority: &Authority) -> (Self, Smg) {
        let place = Self::new(authority.issue("controlplane", "cp1"));
        let member = place.start(&["--bootstrap"]);
        let operator = authority.issue("admin", "root");
        eventually(&format!("it answers an operator; log:\n{}", member.log()), || async {
            status(&place.address(), &operator)
        })
        .await;
        (place, member)
    }
}

/// A gateway over TLS, whose `client` has the admin's token.
async fn gateway(addresses: &str, certificate: &Path) -> Smg {
    let mut gateway = start_gateway(addresses, &["--tls-dir", text(certificate)]).await;
    let bearer = HeaderValue::from_str(&format!("Bearer {SECRET}")).unwrap();
    let headers = HeaderMap::from_iter([(http::header::AUTHORIZATION, bearer)]);
    gateway.client = Client::builder().no_proxy().default_headers(headers).build().unwrap();
    gateway
}

async fn start_gateway(addresses: &str, flags: &[&str]) -> Smg {
    let port = free_port();
    let port_text = port.to_string();
    let mut all = vec!["gateway", "--controlplane", addresses, "--host", "127.0.0.1", "--port", &port_text];
    all.extend(flags);
    let gateway = Smg::spawn(&all, port, &[]);
    eventually(&format!("the gateway lives; log:\n{}", gateway.log()), || async {
        gateway.client.get(format!("{}/liveness", gateway.url)).send().await.ok()
    })
    .await;
    gateway
}

/// What the members say of themselves, if they answer.
fn status(addresses: &str, certificate: &Path) -> Option<Value> {
    let arguments = ["cluster", "status", "-o", "json", "--controlplane", addresses, "--tls-dir", text(certificate)];
    let output = smg(&arguments);
    output.status.success().then(|| serde_json::from_slice(&output.stdout).unwrap())
}

async fn until_voters(places: &[Place], operator: &Path, count: usize) {
    for place in places {
        eventually(&format!("{count} voters, says {}", place.address()), || async {
            let status = status(&place.address(), operator)?;
            let members = status["members"].as_array()?;
            let well = members.iter().filter(|member| member["health"] == "ok" && member["role"] != "learner").count();
            (well == count && members.len() == count).then_some(())
        })
        .await;
    }
}

async fn until_logged(smg: &Smg, words: &str) {
    eventually(&format!("'{words}' in the log:\n{}", smg.log()), || async { smg.log().contains(words).then_some(()) })
        .await;
}

/// Calls the admin API of a member over TLS. `certificate` = what is presented, if anything; `secret` = the token, if any.
async fn call(
    place: &Place,
    roots: &Path,
    certificate: Option<&Path>,
    secret: Option<&str>,
    method: &str,
    path: &str,
) -> (u16, Value) {
    let files = certificate.map(Files::within);
    let identity = files.as_ref().map(|files| (files.certificate.as_path(), files.key.as_path()));
    let config = operator(roots, identity).unwrap();
    let client: Https<_, Full<Bytes>> =
        Https::builder(TokioExecutor::new()).build(Tls::of_operator(config, Duration::from_secs(10)));
    let mut request = Request::builder().method(method).uri(format!("https://{}{path}", place.address()));
    request = request.header("content-type", "application/json");
    if let Some(secret) = secret {
        request = request.header("authorization", format!("Bearer {secret}"));
    }
    let response = client.request(request.body(Full::new(Bytes::from_static(b"{}"))).unwrap()).await.unwrap();
    let status = response.status().as_u16();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, serde_json::from_slice(&body).unwrap_or_default())
}

/// A channel to a member's port with a part's certificate.
fn channel(port: u16, certificate: &Path, part: Part) -> Channel {
    let tls = MutualTls::load(Files::within(certificate), part).unwrap();
    let endpoint = Endpoint::from_shared(format!("https://127.0.0.1:{port}")).unwrap();
    endpoint.connect_with_connector_lazy(Tls::of_part(tls, None, Duration::from_secs(10)))
}

/// Sends requests through a gateway until told to stop. Returns how many were answered, and every failure.
fn traffic(url: String, stop: Arc<AtomicBool>) -> tokio::task::JoinHandle<(u64, Vec<String>)> {
    tokio::spawn(async move {
        let client = Client::builder().no_proxy().build().unwrap();
        let (mut served, mut failures) = (0, Vec::new());
        while !stop.load(Ordering::Relaxed) {
            match client.post(format!("{url}/v1/chat/completions")).json(&chat()).send().await {
                Ok(response) if response.status() == StatusCode::OK => served += 1,
                Ok(response) => failures.push(format!("{}: {}", response.status(), response.text().await.unwrap())),
                Err(error) => failures.push(error.to_string()),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        (served, failures)
    })
}

#[tokio::test]
async fn an_authority_makes_private_files_once_and_renews_certificates_in_place() {
    let authority = Authority::new("prod");
    let again = smg(&["cluster", "ca", "init", text(&authority.path())]);
    assert_eq!(again.status.code(), Some(79));
    assert!(String::from_utf8_lossy(&again.stderr).contains("has an authority already"), "{again:?}");
    let issued = authority.issue("controlplane", "cp1");
    assert_eq!(issued, authority.path().join("controlplane-cp1"));
    let mode = |path: PathBuf| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    for file in ["ca.crt", "ca.key"] {
        assert_eq!(mode(authority.path().join(file)), 0o600, "{file}");
    }
    for file in ["ca.crt", "tls.crt", "tls.key"] {
        assert_eq!(mode(issued.join(file)), 0o600, "{file}");
    }
    assert_eq!((mode(authority.path()), mode(issued.clone())), (0o700, 0o700));
    let tls = MutualTls::load(Files::within(&issued), Part::ControlPlane).unwrap();
    assert_eq!(tls.identity().to_string(), "spiffe://prod/controlplane/cp1");
    let before = tls.validity();
    let old = std::fs::read(issued.join("tls.crt")).unwrap();
    assert_eq!(authority.issue("controlplane", "cp1"), issued);
    assert_ne!(std::fs::read(issued.join("tls.crt")).unwrap(), old);
    let renewed = MutualTls::load(Files::within(&issued), Part::ControlPlane).unwrap();
    assert!(renewed.validity().not_after >= before.not_after);
    // A key that is not the authority's makes certificates that nobody would take: it is found here, not there.
    let other = Authority::new("prod");
    std::fs::copy(other.path().join("ca.key"), authority.path().join("ca.key")).unwrap();
    let refused = smg(&["cluster", "ca", "issue", text(&authority.path()), "--role", "gateway", "--name", "g"]);
    assert_eq!(refused.status.code(), Some(65));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("not the key of the first certificate"), "{refused:?}");
}

#[tokio::test]
async fn a_fleet_lives_through_the_replacement_of_its_certificates_and_of_their_authority() {
    let old = Authority::new("prod");
    let places = ["cp1", "cp2", "cp3"].map(|name| Place::new(old.issue("controlplane", name)));
    let operator = old.issue("admin", "root");
    let founder = places[0].peer_address();
    let mut members = vec![places[0].start(&["--bootstrap"])];
    members.extend(places[1..].iter().map(|place| place.start(&["--join", &founder])));
    until_voters(&places, &operator, 3).await;

    let gateways = [old.issue("gateway", "g1"), old.issue("gateway", "g2")];
    let all = places.iter().map(Place::address).collect::<Vec<_>>().join(",");
    let (first, second) = (gateway(&all, &gateways[0]).await, gateway(&all, &gateways[1]).await);
    let (prefill, decode) = (sglang(Role::Prefill).await, sglang(Role::Decode).await);
    let (prefill_id, decode_id) = first.register_pair(&prefill, &decode).await;
    second.until_healthy(&prefill_id).await;
    second.until_healthy(&decode_id).await;
    let ends = first.metric("smg_tls_certificate_not_after_seconds", &[("certificate", "part")]).await;
    assert!(ends > (smg_net::unix_millis() / 1000) as f64 + 300.0 * 86_400.0, "{ends}");

    let stop = Arc::new(AtomicBool::new(false));
    let streams = [traffic(first.url.clone(), stop.clone()), traffic(second.url.clone(), stop.clone())];
    let directories: Vec<&PathBuf> = places.iter().map(|place| &place.certificate).chain(&gateways).collect();
    let reloads = |smg: &Smg| smg.log().matches("new connections use the new certificate").count();
    let everybody = |members: &[Smg]| members.iter().chain([&first, &second]).map(reloads).collect::<Vec<_>>();
    let until_reloaded = async |members: &[Smg], before: Vec<usize>| {
        eventually("every part reads its files again", || async {
            everybody(members).iter().zip(&before).all(|(now, before)| now > before).then_some(())
        })
        .await;
    };

    // 1. Everybody trusts both authorities. 2. Everybody gets a certificate of the new one. 3. Nobody trusts the old one.
    let new = Authority::new("prod");
    let only_new = std::fs::read_to_string(new.roots()).unwrap();
    let both = format!("{only_new}{}", std::fs::read_to_string(old.roots()).unwrap());
    std::fs::write(new.roots(), &both).unwrap();
    let before = everybody(&members);
    directories.iter().for_each(|directory| std::fs::write(directory.join("ca.crt"), &both).unwrap());
    until_reloaded(&members, before).await;
    let before = everybody(&members);
    for directory in &directories {
        let (role, name) = directory.file_name().unwrap().to_str().unwrap().split_once('-').unwrap();
        let issued = new.issue(role, name);
        for file in ["tls.key", "tls.crt"] {
            std::fs::copy(issued.join(file), directory.join(file)).unwrap();
        }
    }
    until_reloaded(&members, before).await;
    let before = everybody(&members);
    directories.iter().for_each(|directory| std::fs::write(directory.join("ca.crt"), &only_new).unwrap());
    until_reloaded(&members, before).await;

    // Every member in turn connects anew, and so does whoever was connected to it; the last one to stop takes the gateways with it.
    let new_operator = new.issue("admin", "root");
    for n in 0..3 {
        members[n].signal("TERM");
        members[n].exited().await;
        members[n] = places[n].start(&[]);
        until_voters(&places, &new_operator, 3).await;
    }
    let refused = smg(&["cluster", "status", "--controlplane", &all, "--tls-dir", text(&operator)]);
    assert_eq!(refused.status.code(), Some(69), "{refused:?}");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("no authority"), "{refused:?}");
    // Changes still reach both gateways.
    let extra = sglang(Role::Decode).await;
    let id = second.register(&spec(&extra, "decode")).await;
    first.until_healthy(&id).await;
    stop.store(true, Ordering::Relaxed);
    for stream in streams {
        let (served, failures) = stream.await.unwrap();
        assert!(served > 0 && failures.is_empty(), "{failures:?}");
    }
}

#[tokio::test]
async fn a_certificate_opens_what_its_role_says_and_nothing_else() {
    let authority = Authority::new("prod");
    let (place, member) = Place::founder(&authority).await;
    let [gateway, admin] = [("gateway", "g1"), ("admin", "root")].map(|(role, name)| authority.issue(role, name));
    let member_certificate = &place.certificate;

    // The members' service is for members.
    let asked = |certificate: &Path, part| {
        let mut client = PeerClient::new(channel(place.peer_port, certificate, part));
        async move { client.status(smg_services::raft::StatusRequest {}).await.unwrap_err() }
    };
    for (certificate, part) in [(&gateway, Part::Gateway), (&admin, Part::Admin)] {
        let refused = asked(certificate, part).await;
        assert_eq!(refused.code(), Code::PermissionDenied, "{refused:?}");
        assert!(refused.message().contains("the role controlplane"), "{refused:?}");
    }
    let heard = asked(member_certificate, Part::ControlPlane).await;
    assert_eq!(heard.code(), Code::FailedPrecondition, "it is looked at, and does not say who calls: {heard:?}");

    // The subscription is for gateways.
    for (certificate, part) in [(member_certificate, Part::ControlPlane), (&admin, Part::Admin)] {
        let mut client = SyncClient::new(channel(place.port, certificate, part));
        let refused = client.subscribe(tokio_stream::empty()).await.unwrap_err();
        assert_eq!(refused.code(), Code::PermissionDenied, "{refused:?}");
    }

    // The admin API is for holders of tokens and of an admin's certificate.
    let roots = authority.roots();
    let (get, put) = (("GET", "/fleet/policies"), ("PUT", "/fleet/policies/m"));
    type Case<'a> = (Option<&'a Path>, Option<&'a str>, (&'a str, &'a str), u16);
    let cases: [Case<'_>; 12] = [
        (None, None, get, 401),
        (None, Some("wrong"), get, 401),
        (None, Some(VIEWER_SECRET), get, 200),
        (None, Some(VIEWER_SECRET), put, 403),
        (None, Some(SECRET), put, 200),
        (Some(&gateway), None, get, 401),
        (Some(&gateway), Some(VIEWER_SECRET), put, 403),
        (Some(&gateway), Some(SECRET), put, 200),
        (Some(member_certificate), None, put, 401),
        (Some(&admin), None, put, 200),
        // Whoever shows less means less.
        (Some(&admin), Some(VIEWER_SECRET), put, 403),
        (Some(&admin), Some("wrong"), get, 401),
    ];
    for (certificate, secret, (method, path), expected) in cases {
        let (status, body) = call(&place, &roots, certificate, secret, method, path).await;
        assert_eq!(status, expected, "{certificate:?} {secret:?} {method}: {body}");
    }
    // Whoever comes with the certificate of another part is told so, and what is needed.
    for (certificate, whose) in [(&gateway, "that of a gateway"), (member_certificate, "that of a member")] {
        let said = smg(&["workers", "list", "--controlplane", &place.address(), "--tls-dir", text(certificate)]);
        let words = String::from_utf8_lossy(&said.stderr);
        assert_eq!(said.status.code(), Some(77), "{said:?}");
        assert!([whose, "the role admin", "--role admin", "Bearer"].iter().all(|word| words.contains(word)), "{words}");
    }
    let (_, known) = call(&place, &roots, Some(&admin), None, "GET", "/fleet/whoami").await;
    assert_eq!(known, json!({"name": "root", "role": "admin"}));
    for (certificate, expected) in [(None, 401), (Some(gateway.as_path()), 200)] {
        assert_eq!(call(&place, &roots, certificate, None, "GET", "/fleet/revision").await.0, expected);
    }
    // The audit names the certificate.
    member.logged(&["certificate:root"]).await;
    assert!(!member.log().contains(SECRET));
}

#[tokio::test]
async fn a_gateway_lends_its_certificate_to_nobody() {
    let authority = Authority::new("prod");
    // Without any token in the fleet only an admin's certificate opens the admin API.
    let place = Place::new(authority.issue("controlplane", "cp1"));
    let (listen, peers) = (place.address(), place.peer_address());
    let flags = ["controlplane", "--bootstrap", "--data-dir", text(place.directory.path()), "--listen", &listen];
    let rest = ["--peer-listen", &peers, "--tls-dir", text(&place.certificate)];
    let _member = Smg::spawn(&[&flags[..], &rest[..]].concat(), place.port, &[]);
    let mut gateway = gateway(&listen, &authority.issue("gateway", "g1")).await;
    gateway.client = Client::builder().no_proxy().build().unwrap();
    eventually(&format!("the gateway follows; log:\n{}", gateway.log()), || async {
        gateway.log().contains("fleet state applied").then_some(())
    })
    .await;
    let bare = spec(&sglang(Role::Decode).await, "decode");
    assert_eq!(gateway.get("/workers").await.status(), StatusCode::UNAUTHORIZED);
    assert_eq!(gateway.post("/workers", &bare).await.status(), StatusCode::UNAUTHORIZED);
    assert_eq!(gateway.post("/flush_cache", &json!({})).await.status(), StatusCode::UNAUTHORIZED);
    let body = json!({"name": "x", "role": "admin"});
    assert_eq!(gateway.post("/fleet/tokens", &body).await.status(), StatusCode::UNAUTHORIZED);
    // An operator makes the first token with a certificate; from then on it works through the gateway.
    let admin = authority.issue("admin", "root");
    let files = Files::within(&admin);
    let config = operator(&authority.roots(), Some((&files.certificate, &files.key))).unwrap();
    let client: Https<_, Full<Bytes>> =
        Https::builder(TokioExecutor::new()).build(Tls::of_operator(config, Duration::from_secs(10)));
    let request = Request::post(format!("https://{listen}/fleet/tokens")).header("content-type", "application/json");
    let response = client.request(request.body(Full::new(Bytes::from(body.to_string()))).unwrap()).await.unwrap();
    assert_eq!(response.status(), 201);
    let created: Value = serde_json::from_slice(&response.into_body().collect().await.unwrap().to_bytes()).unwrap();
    let secret = created["token"].as_str().unwrap();
    let send = async |secret: &str| {
        let request = gateway.client.post(format!("{}/workers", gateway.url)).bearer_auth(secret).json(&bare);
        request.send().await.unwrap().status()
    };
    assert_eq!(send("wrong").await, StatusCode::UNAUTHORIZED);
    assert_eq!(send(secret).await, StatusCode::ACCEPTED);
    assert_eq!(gateway.post("/workers", &bare).await.status(), StatusCode::UNAUTHORIZED);
}

#[tokio::test]
async fn whoever_cannot_be_served_is_told_why_and_so_is_the_log() {
    let (authority, foreign) = (Authority::new("prod"), Authority::new("prod"));
    let elsewhere = Authority::new("test");
    let (place, member) = Place::founder(&authority).await;
    let address = place.address();

    // Gateways: another authority, another cluster of the same authority, a certificate that has ended, no TLS at all.
    let stranger = foreign.issue("gateway", "g1");
    let distrustful = start_gateway(&address, &["--tls-dir", text(&stranger)]).await;
    until_logged(&distrustful, "comes from no authority in this side's ca.crt").await;
    // It trusts the members, and they do not trust it.
    std::fs::copy(authority.roots(), stranger.join("ca.crt")).unwrap();
    until_logged(&distrustful, "comes from no authority in the other side's ca.crt").await;
    let ended = authority.issue_expired("gateway", "late", "prod");
    let late = start_gateway(&address, &["--tls-dir", text(&ended)]).await;
    until_logged(&late, "this side's certificate has expired").await;
    until_logged(&late, "a certificate has expired").await;
    let plain = start_gateway(&address, &["--insecure"]).await;
    until_logged(&plain, "this port speaks TLS only").await;
    let refused = member.metric("smg_tls_connections_refused_total", &[("listener", "control_plane")]).await;
    assert!(refused >= 1.0, "{refused}");
    until_logged(&member, "no TLS connection with a caller").await;

    // A process with another part's certificate does not start.
    let mut confused =
        Smg::spawn(&["gateway", "--controlplane", &address, "--tls-dir", text(&place.certificate)], 0, &[]);
    assert_eq!(confused.exited().await.code(), Some(1));
    assert!(confused.log().contains("has the role controlplane"), "{}", confused.log());

    // Members: without TLS, and of another authority. They wait for their cluster and say why.
    let founder = place.peer_address();
    let joining = Place::new(foreign.issue("controlplane", "cp2"));
    let waiting = joining.start(&["--join", &founder]);
    until_logged(&waiting, "comes from no authority in this side's ca.crt").await;
    let joining = Place::new(PathBuf::new());
    let waiting = joining.start(&["--insecure", "--join", &founder]);
    until_logged(&waiting, "this port speaks TLS only").await;

    // Operators.
    let admin = authority.issue("admin", "root");
    let ask = |flags: &[&str]| {
        let output = smg(&[&["cluster", "status", "--controlplane", &address], flags].concat());
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, said) = ask(&[]);
    assert!(code == Some(65) && said.contains("TLS_REQUIRED"), "{code:?} {said}");
    let (code, said) = ask(&["--ca", text(&foreign.roots())]);
    assert!(code == Some(69) && said.contains("no authority in this side's ca.crt"), "{code:?} {said}");
    let (code, said) = ask(&["--tls-dir", text(&elsewhere.issue("admin", "root"))]);
    assert!(code == Some(69) && said.contains("no authority"), "{code:?} {said}");
    let (code, said) = ask(&["--ca", text(&authority.roots())]);
    assert!(code == Some(77) && said.contains("UNAUTHORIZED"), "{code:?} {said}");
    let (code, said) = ask(&["--ca", text(&authority.roots()), "--token", SECRET]);
    assert_eq!(code, Some(0), "{said}");
    // A change that was refused at the door did not happen, and is not called unknown.
    let foreign_admin = foreign.issue("admin", "root");
    std::fs::copy(authority.roots(), foreign_admin.join("ca.crt")).unwrap();
    let change = smg(&["cluster", "remove", "9", "--controlplane", &address, "--tls-dir", text(&foreign_admin)]);
    let said = String::from_utf8_lossy(&change.stderr);
    assert!(change.status.code() == Some(69) && said.contains("no authority in the other side's"), "{change:?}");

    // A control plane without TLS.
    let open = Place::new(PathBuf::new());
    let open_member = open.start(&["--insecure", "--bootstrap"]);
    eventually(&format!("it answers; log:\n{}", open_member.log()), || async {
        open_member.client.get(format!("{}/fleet/cluster", open_member.url)).send().await.ok()
    })
    .await;
    let (code, said) = {
        let output = smg(&["cluster", "status", "--controlplane", &open.address(), "--tls-dir", text(&admin)]);
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    assert!(code == Some(69) && said.contains("does not speak TLS"), "{code:?} {said}");
    let careful = start_gateway(&open.address(), &["--tls-dir", text(&authority.issue("gateway", "g2"))]).await;
    until_logged(&careful, "does not speak TLS").await;
}

#[tokio::test]
async fn a_fleet_in_one_process_serves_further_gateways_over_tls() {
    let authority = Authority::new("prod");
    let (certificate, listen) = (authority.issue("controlplane", "cp1"), format!("127.0.0.1:{}", free_port()));
    let flags = ["--controlplane-listen", &listen, "--tls-dir", text(&certificate), "--control-plane-api-keys", TOKEN];
    let launched = Smg::launch(&flags).await;
    let further = gateway(&listen, &authority.issue("gateway", "g1")).await;
    let (prefill, decode) = (sglang(Role::Prefill).await, sglang(Role::Decode).await);
    further.register_pair(&prefill, &decode).await;
    for smg in [&launched, &further] {
        eventually("it serves", || async {
            (smg.post("/v1/chat/completions", &chat()).await.status() == StatusCode::OK).then_some(())
        })
        .await;
    }
}
