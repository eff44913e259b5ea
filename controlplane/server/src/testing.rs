//! What the tests of this crate share: a control plane on a store in memory, and engines that answer as they are told.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, Request, Response, StatusCode};
use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use http_body_util::BodyExt;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::Value;
use smg_fleet::{Revision, Worker, WorkerId};
use smg_net::memory;
use smg_state::{Command, Envelope, Outcome, State};
use smg_store::cluster::ClusterStatus;
use smg_store::memory::MemoryStore;
use smg_store::{ClusterStore, Leadership, StoreError};
use smg_telemetry::Metrics;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::transport::{Channel, Endpoint, Uri};
use tower::ServiceExt;
use uuid::Uuid;

use crate::jobs::Budget;
use crate::{ControlPlane, ControlPlaneOptions};

/// How long anything in a test may take.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);
/// What a second of the settings lasts in tests.
pub(crate) const SECOND: Duration = Duration::from_millis(20);

/// A store in memory that can be told to fail, and whose leadership can be taken away.
pub(crate) struct TestStore {
    inner: MemoryStore,
    errors: Mutex<Vec<StoreError>>,
    leadership: watch::Sender<Leadership>,
    in_contact: AtomicBool,
}

impl TestStore {
    /// A store that has named its cluster, as every store does before it is opened to others.
    pub(crate) fn new(leadership: Leadership) -> Arc<Self> {
        let store = Self::unnamed(leadership);
        store.name();
        store
    }

    pub(crate) fn name(&self) {
        let envelope = Envelope {
            command_id: Uuid::now_v7(),
            actor: "test".to_owned(),
            proposed_at_unix_ms: smg_net::unix_millis(),
            expected_revision: None,
            command: Command::InitCluster { cluster_id: Uuid::now_v7(), history_id: Uuid::now_v7() },
        };
        self.inner.propose(envelope).now_or_never().expect("memory answers at once").unwrap();
    }

    pub(crate) fn unnamed(leadership: Leadership) -> Arc<Self> {
        let (inner, errors) = (MemoryStore::default(), Mutex::default());
        Arc::new(Self { inner, errors, leadership: watch::Sender::new(leadership), in_contact: AtomicBool::new(true) })
    }

    /// The next calls fail with these, the last one first.
    pub(crate) fn fail(&self, errors: Vec<StoreError>) {
        *self.errors.lock() = errors;
    }

    pub(crate) fn lose_contact(&self) {
        self.in_contact.store(false, Ordering::Relaxed);
    }

    pub(crate) fn lead(&self, leadership: Leadership) {
        self.leadership.send_replace(leadership);
    }
}

impl ClusterStore for TestStore {
    fn propose(&self, envelope: Envelope) -> BoxFuture<'_, Result<Outcome, StoreError>> {
        match self.errors.lock().pop() {
            Some(error) => async move { Err(error) }.boxed(),
            None => self.inner.propose(envelope),
        }
    }

    fn read_barrier(&self) -> BoxFuture<'_, Result<Revision, StoreError>> {
        match self.errors.lock().pop() {
            Some(error) => async move { Err(error) }.boxed(),
            None => self.inner.read_barrier(),
        }
    }

    fn local(&self) -> Arc<State> {
        self.inner.local()
    }

    fn changes(&self) -> watch::Receiver<Revision> {
        self.inner.changes()
    }

    fn leadership(&self) -> watch::Receiver<Leadership> {
        self.leadership.subscribe()
    }

    fn failure(&self) -> watch::Receiver<Option<String>> {
        self.inner.failure()
    }

    fn cluster(&self, local: bool) -> BoxFuture<'_, Result<ClusterStatus, StoreError>> {
        self.inner.cluster(local)
    }

    fn in_contact(&self) -> bool {
        self.in_contact.load(Ordering::Relaxed)
    }

    fn shutdown(&self) -> BoxFuture<'_, ()> {
        self.inner.shutdown()
    }
}

/// An answer of the admin API.
#[derive(Debug)]
pub(crate) struct Reply {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Value,
}

impl Reply {
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }

    pub(crate) fn code(&self) -> (u16, &str) {
        (self.status.as_u16(), self.body["code"].as_str().unwrap_or(""))
    }

    pub(crate) fn id(&self) -> WorkerId {
        self.body["worker_id"].as_str().unwrap().parse().unwrap()
    }
}

/// A control plane under test. Its tasks end with it.
pub(crate) struct Plane {
    pub plane: Arc<ControlPlane>,
    pub store: Arc<TestStore>,
    pub metrics: Arc<Metrics>,
    router: Router,
    _shutdown: DropGuard,
}

impl Plane {
    /// Quick, and the leader of its own store.
    pub(crate) fn start() -> Self {
        Self::on(TestStore::new(Leadership::Leader), |_| {})
    }

    /// On a store of its own, with other options.
    pub(crate) fn with(change: impl FnOnce(&mut ControlPlaneOptions)) -> Self {
        Self::on(TestStore::new(Leadership::Leader), change)
    }

    pub(crate) fn on(store: Arc<TestStore>, change: impl FnOnce(&mut ControlPlaneOptions)) -> Self {
        let metrics = Arc::new(Metrics::default());
        let mut options = ControlPlaneOptions::new(store.clone(), metrics.clone());
        options.jobs.second = SECOND;
        options.jobs.first_pause = Duration::from_millis(5);
        options.jobs.report_every = Duration::ZERO;
        options.jobs.sweep_every = Duration::from_millis(20);
        options.jobs.discovery = Budget {
            call: Duration::from_millis(500),
            detection: Duration::from_millis(500),
            pause: Duration::from_millis(10),
        };
        options.probe.second = SECOND;
        options.probe.spread = Duration::from_millis(10);
        options.probe.unready_interval = SECOND;
        change(&mut options);
        let shutdown = options.shutdown.clone();
        let plane = ControlPlane::start(options);
        let router = plane.router();
        Self { plane, store, metrics, router, _shutdown: shutdown.drop_guard() }
    }

    /// Sends a request with a JSON body, or none.
    pub(crate) async fn call(&self, method: &str, path: &str, body: Option<Value>) -> Reply {
        self.call_with(method, path, &[("content-type", "application/json")], body).await
    }

    pub(crate) async fn call_with(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: Option<Value>,
    ) -> Reply {
        let body = body.map_or_else(Body::empty, |body| Body::from(body.to_string()));
        let mut request = Request::builder().method(method).uri(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        self.send(request.body(body).unwrap()).await
    }

    pub(crate) async fn send(&self, request: Request<Body>) -> Reply {
        let answer = timeout(DEADLINE, self.router.clone().oneshot(request)).await.expect("an answer in time").unwrap();
        let (parts, body) = answer.into_parts();
        let bytes = body.collect().await.unwrap().to_bytes();
        let body = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
        Reply { status: parts.status, headers: parts.headers, body }
    }

    /// Asks for an answer that goes on.
    pub(crate) async fn follow(&self, path: &str) -> Lines {
        let request = Request::get(path).body(Body::empty()).unwrap();
        let answer = timeout(DEADLINE, self.router.clone().oneshot(request)).await.expect("an answer in time").unwrap();
        assert_eq!(answer.status(), StatusCode::OK);
        Lines { body: answer.into_body(), pending: Vec::new() }
    }

    pub(crate) async fn get(&self, path: &str) -> Reply {
        self.call("GET", path, None).await
    }

    /// Registers a worker and waits until it is ready.
    pub(crate) async fn register(&self, spec: Value) -> WorkerId {
        let reply = self.call("POST", "/workers", Some(spec)).await;
        assert_eq!(reply.status, StatusCode::ACCEPTED, "{reply:?}");
        let id = reply.id();
        self.until("registered", |state| state.worker(id).is_some_and(|worker| worker.facts.is_some())).await;
        id
    }

    pub(crate) fn worker(&self, id: WorkerId) -> Worker {
        Worker::clone(self.store.local().worker(id).expect("the worker exists"))
    }

    /// Waits until the state is as wanted.
    pub(crate) async fn until(&self, what: &str, wanted: impl Fn(&State) -> bool) -> Arc<State> {
        let mut changes = self.store.changes();
        let wait = async {
            loop {
                changes.borrow_and_update();
                let state = self.store.local();
                if wanted(&state) {
                    return state;
                }
                changes.changed().await.unwrap();
            }
        };
        match timeout(DEADLINE, wait).await {
            Ok(state) => state,
            Err(_) => panic!("never {what}: {:#?}", self.store.local()),
        }
    }
}

/// The lines of an answer that goes on.
pub(crate) struct Lines {
    body: Body,
    pending: Vec<u8>,
}

impl Lines {
    /// The next line; `None` when the answer has ended.
    pub(crate) async fn next(&mut self) -> Option<Value> {
        loop {
            if let Some(end) = self.pending.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.pending.drain(..=end).collect();
                return Some(serde_json::from_slice(&line).unwrap());
            }
            let frame = timeout(DEADLINE, self.body.frame()).await.expect("a line in time");
            self.pending.extend_from_slice(&frame?.unwrap().into_data().unwrap());
        }
    }

    /// The events up to the next bookmark or the end, which is the last one.
    pub(crate) async fn step(&mut self) -> Vec<Value> {
        let mut events = Vec::new();
        loop {
            let event = self.next().await.expect("more");
            let last = event["type"] == "bookmark" || event["type"] == "end";
            events.push(event);
            if last {
                return events;
            }
        }
    }
}

/// Polls until something outside the state is as wanted.
pub(crate) async fn eventually(what: &str, wanted: impl Fn() -> bool) {
    let poll = async {
        while !wanted() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    assert!(timeout(DEADLINE, poll).await.is_ok(), "never {what}");
}

/// How an engine answers a path.
#[derive(Clone)]
pub(crate) enum Answer {
    Text(u16, String),
    /// To somewhere else.
    Redirect(String),
    /// A body without an end.
    Endless,
    /// Nothing.
    Silence,
}

/// A path that was asked for, and the key it was asked with.
type Asked = (String, Option<String>);

/// An engine that answers as it is told; 404 to what it was not told about.
pub(crate) struct FakeEngine {
    pub url: String,
    answers: Arc<Mutex<HashMap<String, Answer>>>,
    seen: Arc<Mutex<Vec<Asked>>>,
    _stop: DropGuard,
}

impl FakeEngine {
    /// A healthy engine that says nothing else.
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let answers = Arc::new(Mutex::new(HashMap::from([("/health".to_owned(), Answer::Text(200, String::new()))])));
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (told, heard) = (Arc::clone(&answers), Arc::clone(&seen));
        let service = Router::new().fallback(move |request: Request<Body>| {
            let path = request.uri().path().to_owned();
            let key = request.headers().get("authorization").map(|value| value.to_str().unwrap().to_owned());
            heard.lock().push((path.clone(), key));
            let answer = told.lock().get(&path).cloned();
            async move {
                match answer {
                    None => Response::builder().status(404).body(Body::from("{}")).unwrap(),
                    Some(Answer::Text(status, text)) => Response::builder().status(status).body(text.into()).unwrap(),
                    Some(Answer::Redirect(to)) => {
                        Response::builder().status(302).header("location", to).body(Body::empty()).unwrap()
                    }
                    Some(Answer::Endless) => {
                        let piece = || Ok::<_, std::io::Error>(Bytes::from_static(&[b' '; 65_536]));
                        Response::new(Body::from_stream(futures::stream::repeat_with(piece)))
                    }
                    Some(Answer::Silence) => std::future::pending().await,
                }
            }
        });
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        tokio::spawn(async move {
            tokio::select! {
                _ = axum::serve(listener, service) => {}
                () = stopped.cancelled() => {}
            }
        });
        Self { url, answers, seen, _stop: stop.drop_guard() }
    }

    /// vLLM 0.32 as it answers.
    pub(crate) async fn vllm() -> Self {
        let engine = Self::start().await;
        engine.says("/version", 200, r#"{"version":"0.32.0"}"#);
        engine.says(
            "/v1/models",
            200,
            r#"{"object":"list","data":[{"id":"tiny","owned_by":"vllm","root":"MODELS/tiny","max_model_len":2048}]}"#,
        );
        engine
    }

    pub(crate) fn answers(&self, path: &str, answer: Answer) {
        self.answers.lock().insert(path.to_owned(), answer);
    }

    pub(crate) fn says(&self, path: &str, status: u16, text: &str) {
        self.answers(path, Answer::Text(status, text.to_owned()));
    }

    pub(crate) fn asked(&self, path: &str) -> usize {
        self.seen.lock().iter().filter(|(seen, _)| seen == path).count()
    }

    pub(crate) fn keys(&self) -> Vec<Option<String>> {
        self.seen.lock().iter().map(|(_, key)| key.clone()).collect()
    }
}

/// An address where nobody listens.
pub(crate) async fn dead_url() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    format!("http://{}", listener.local_addr().unwrap())
}

/// A plane's router behind an in-memory listener, served as a socket is.
pub(crate) async fn channel(plane: &Plane) -> Channel {
    let (connector, mut listener) = memory::transport();
    let service = plane.plane.router();
    tokio::spawn(async move {
        while let Some(stream) = listener.accept().await {
            let service = hyper_util::service::TowerToHyperService::new(service.clone());
            tokio::spawn(async move {
                let server = hyper_util::server::conn::auto::Builder::new(hyper_util::rt::TokioExecutor::new());
                let _ = server.serve_connection(TokioIo::new(stream), service).await;
            });
        }
    });
    let connect = tower::service_fn(move |_: Uri| {
        let connector = connector.clone();
        async move { connector.connect().await.map(TokioIo::new) }
    });
    Endpoint::from_static("http://control-plane").connect_with_connector(connect).await.unwrap()
}
