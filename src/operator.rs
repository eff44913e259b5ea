//! An operator's way to the admin API: which member is asked, what is trusted and shown, and what became of a request.
//!
//! Servers are asked in turn until one answers; one that cannot read just now (503) counts only if no other one can. A change that may have
//! arrived is sent to another one only under an `Idempotency-Key`: there it is the same change.

use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{Client, Error};
use hyper_util::rt::TokioExecutor;
use serde_json::Value;
use smg_net::mutual;
use smg_net::mutual::connect::Connector;
use smg_net::mutual::explain::is_refusal;
use smg_net::tls::{ClientFiles, WorkerConnector, worker_connector};
use thiserror::Error;
use uuid::Uuid;

use crate::admin::contexts::{self, ContextError};
use crate::cli::TargetArgs;

/// For one answer: longer than the control plane waits for a change of its members.
const TIMEOUT: Duration = Duration::from_secs(30);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Largest accepted answer, in bytes.
const MAX_ANSWER: usize = 64 << 20;

/// Why there is no answer.
#[derive(Debug, Error)]
pub enum AskError {
    /// What the command line names cannot be used.
    #[error("{0}")]
    Setup(String),
    /// The configuration file cannot be used.
    #[error(transparent)]
    Context(#[from] ContextError),
    /// None of the members answers; nothing was done.
    #[error("the control plane cannot be reached: {0}")]
    Unreachable(String),
    /// It may have been done.
    #[error("the outcome is unknown: {0}. Look at the status, or ask again")]
    Unknown(String),
}

/// The connections of an operator.
struct Ways {
    plain: Client<HttpConnector, Full<Bytes>>,
    /// To members over TLS, when certificates are given.
    members: Option<Client<Connector, Full<Bytes>>>,
    /// To servers that are known by their host names.
    named: Client<WorkerConnector, Full<Bytes>>,
}

/// A request.
#[derive(Debug, Clone)]
pub struct Question {
    /// Its method.
    pub method: Method,
    /// Its path and query.
    pub path: String,
    /// Its JSON body; none = empty.
    pub body: Option<Value>,
    /// The `mod_revision` that the object must have.
    pub if_match: Option<u64>,
    /// Its identity.
    pub idempotency_key: Option<Uuid>,
}

impl Question {
    /// A read.
    pub fn get(path: impl Into<String>) -> Self {
        Self::new(Method::GET, path, None)
    }

    /// A request without conditions.
    pub fn new(method: Method, path: impl Into<String>, body: Option<Value>) -> Self {
        Self { method, path: path.into(), body, if_match: None, idempotency_key: None }
    }

    /// Whether it may be sent twice.
    fn is_repeatable(&self) -> bool {
        self.method == Method::GET || self.idempotency_key.is_some()
    }

    fn request(&self, server: &str, bearer: Option<&HeaderValue>) -> Result<Request<Full<Bytes>>, http::Error> {
        let body = self.body.as_ref().map(Value::to_string).unwrap_or_default();
        let mut request = Request::builder()
            .method(self.method.clone())
            .uri(format!("{server}{}", self.path))
            .header(header::CONTENT_TYPE, "application/json");
        if let Some(revision) = self.if_match {
            request = request.header(header::IF_MATCH, format!("\"{revision}\""));
        }
        if let Some(key) = self.idempotency_key {
            request = request.header("idempotency-key", key.to_string());
        }
        if let Some(bearer) = bearer {
            request = request.header(header::AUTHORIZATION, bearer.clone());
        }
        request.body(Full::new(Bytes::from(body)))
    }
}

/// What a server said.
#[derive(Debug)]
pub struct Answer {
    /// Its status.
    pub status: StatusCode,
    /// Its body.
    pub body: Bytes,
    /// What it says of how old it is.
    pub age: Age,
}

/// How old an answer is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Age {
    /// It holds what was acknowledged before.
    Current,
    /// It is what one member had, which may be old: the revision.
    AsOf(String),
    /// It is what a gateway heard last, without a control plane: the gateway, and for how many seconds it has heard nothing.
    Cut(String, String),
}

impl Age {
    fn of(question: &Question, address: &str, headers: &HeaderMap) -> Self {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
        match text("x-smg-stale") {
            Some(seconds) => Self::Cut(address.to_owned(), seconds),
            None if question.path.contains("consistency=stale") => {
                Self::AsOf(text("x-smg-revision").unwrap_or_default())
            }
            None => Self::Current,
        }
    }
}

/// Why one server did not answer.
struct Silence {
    /// Whether the request cannot have been looked at.
    unseen: bool,
    why: String,
}

/// Asks the admin API.
pub struct Operator {
    ways: Ways,
    addresses: Vec<String>,
    bearer: Option<HeaderValue>,
}

impl Operator {
    /// As the command line and, where it leaves something open, the context says.
    ///
    /// # Errors
    /// When a file cannot be used.
    pub fn new(target: &TargetArgs) -> Result<Self, AskError> {
        let setup = |error: &dyn std::fmt::Display| AskError::Setup(error.to_string());
        let target = &contexts::complete(target)?;
        let connector = || {
            let mut connector = HttpConnector::new();
            connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
            connector
        };
        let members = match &target.tls {
            None => None,
            Some(tls) => {
                let identity = tls.identity.as_ref().map(|(certificate, key)| (certificate.as_path(), key.as_path()));
                let config = mutual::operator(&tls.roots, identity).map_err(|error| setup(&error))?;
                Some(Client::builder(TokioExecutor::new()).build(Connector::of_operator(config, CONNECT_TIMEOUT)))
            }
        };
        let trusted = if target.controlplane.iter().any(|address| address.starts_with("https://")) {
            let files = ClientFiles {
                roots: target.tls.iter().map(|tls| tls.roots.clone()).collect(),
                identity: target.tls.as_ref().and_then(|tls| tls.identity.clone()),
            };
            Some(files.load().map_err(|error| setup(&error))?)
        } else {
            None
        };
        let ways = Ways {
            plain: Client::builder(TokioExecutor::new()).build(connector()),
            members,
            named: Client::builder(TokioExecutor::new()).build(worker_connector(connector(), trusted.as_ref())),
        };
        let secret = match (&target.token, &target.token_file) {
            (Some(secret), _) => Some(secret.trim().to_owned()),
            (None, Some(file)) => Some(read_token(file)?),
            (None, None) => None,
        };
        let bearer = secret.map(|secret| HeaderValue::from_str(&format!("Bearer {secret}"))).transpose();
        let mut bearer = bearer.map_err(|_| setup(&"the token has characters that no token has"))?;
        if let Some(bearer) = &mut bearer {
            bearer.set_sensitive(true);
        }
        Ok(Self { ways, addresses: target.controlplane.clone(), bearer })
    }

    /// Sends a request and reads the whole answer.
    ///
    /// # Errors
    /// When nobody answers.
    pub async fn ask(&self, question: &Question) -> Result<Answer, AskError> {
        let whole = async |address: &str| {
            let asked = async {
                let response = self.send(question, address).await?;
                let (status, age) = (response.status(), Age::of(question, address, response.headers()));
                let body = Limited::new(response.into_body(), MAX_ANSWER).collect().await;
                let body = body.map_err(|error| Silence { unseen: false, why: error.to_string() })?.to_bytes();
                Ok(Answer { status, body, age })
            };
            in_time(asked).await
        };
        self.in_turn(question, whole, |answer| answer.status).await
    }

    /// Sends a read whose answer goes on.
    ///
    /// # Errors
    /// When nobody answers.
    pub async fn open(&self, question: &Question) -> Result<Response<Incoming>, AskError> {
        self.in_turn(question, async |address: &str| in_time(self.send(question, address)).await, Response::status)
            .await
    }

    /// Asks one server after the other, until one answers. After a silent one that may have done it, only an answer counts that settles what
    /// became of it.
    async fn in_turn<T>(
        &self,
        question: &Question,
        ask: impl AsyncFn(&str) -> Result<T, Silence>,
        status: impl Fn(&T) -> StatusCode,
    ) -> Result<T, AskError> {
        let mut unreachable = "no address is given".to_owned();
        let (mut lost, mut unable) = (None, None);
        for address in &self.addresses {
            match ask(address).await {
                // Another one may be able to.
                Ok(answer) if question.method == Method::GET && status(&answer) == StatusCode::SERVICE_UNAVAILABLE => {
                    unable = unable.or(Some(answer));
                }
                Ok(answer) if lost.is_none() || settles(status(&answer)) => return Ok(answer),
                Ok(_) => {}
                // Nothing was sent, or it was not looked at: another server may do it.
                Err(Silence { unseen: true, why }) => unreachable = format!("{address}: {why}"),
                Err(Silence { why, .. }) if question.method == Method::GET => unreachable = format!("{address}: {why}"),
                Err(Silence { why, .. }) => {
                    lost = Some(format!("{address}: {why}"));
                    if !question.is_repeatable() {
                        break;
                    }
                }
            }
        }
        unable.ok_or_else(|| lost.map_or(AskError::Unreachable(unreachable), AskError::Unknown))
    }

    async fn send(&self, question: &Question, address: &str) -> Result<Response<Incoming>, Silence> {
        let bearer = self.bearer.as_ref();
        let unsent = |error: http::Error| Silence { unseen: true, why: error.to_string() };
        let sent = if address.starts_with("https://") {
            self.ways.named.request(question.request(address, bearer).map_err(unsent)?).await
        } else if let Some(members) = self.ways.members.as_ref().filter(|_| !address.starts_with("http://")) {
            members.request(question.request(&format!("https://{address}"), bearer).map_err(unsent)?).await
        } else {
            let server = if address.contains("://") { address.to_owned() } else { format!("http://{address}") };
            self.ways.plain.request(question.request(&server, bearer).map_err(unsent)?).await
        };
        sent.map_err(|error: Error| Silence { unseen: error.is_connect() || is_refusal(&error), why: describe(&error) })
    }
}

/// Whether an answer says what became of a change that another server may have made: one that could not do it, or may not say, knows nothing
/// of that.
fn settles(status: StatusCode) -> bool {
    !matches!(status, StatusCode::SERVICE_UNAVAILABLE | StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN)
}

async fn in_time<T>(answer: impl Future<Output = Result<T, Silence>>) -> Result<T, Silence> {
    let late = |_| Err(Silence { unseen: false, why: "no answer in time".to_owned() });
    tokio::time::timeout(TIMEOUT, answer).await.unwrap_or_else(late)
}

/// The token in a file.
fn read_token(file: &PathBuf) -> Result<String, AskError> {
    let content = std::fs::read_to_string(file);
    content
        .map(|content| content.trim().to_owned())
        .map_err(|error| AskError::Setup(format!("{}: {error}", file.display())))
}

/// An error with its causes.
fn describe(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text = format!("{text}: {inner}");
        cause = inner.source();
    }
    text
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    /// A server that answers one request with this, or says nothing and closes.
    async fn server(answer: Option<&'static str>) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        tokio::spawn(async move {
            let (mut connection, _) = listener.accept().await.unwrap();
            let mut request = [0; 4096];
            assert!(connection.read(&mut request).await.unwrap() > 0);
            if let Some(status) = answer {
                let head = format!("HTTP/1.1 {status}\r\ncontent-length: 2\r\n\r\n{{}}");
                connection.write_all(head.as_bytes()).await.unwrap();
            }
        });
        address
    }

    fn operator(addresses: Vec<String>) -> Operator {
        let ways = Ways {
            plain: Client::builder(TokioExecutor::new()).build(HttpConnector::new()),
            members: None,
            named: Client::builder(TokioExecutor::new()).build(worker_connector(HttpConnector::new(), None)),
        };
        Operator { ways, addresses, bearer: None }
    }

    async fn put(addresses: Vec<String>) -> Result<StatusCode, AskError> {
        let question = Question {
            idempotency_key: Some(Uuid::from_u128(1)),
            ..Question::new(Method::PUT, "/fleet/policies/m", Some(json!({})))
        };
        operator(addresses).ask(&question).await.map(|answer| answer.status)
    }

    #[tokio::test]
    async fn a_read_goes_on_to_a_server_that_can_answer_it() {
        let get =
            async |addresses| operator(addresses).ask(&Question::get("/workers")).await.map(|answer| answer.status);
        let unable = "503 Service Unavailable";
        let asked = get(vec![server(Some(unable)).await, server(Some("200 OK")).await]).await;
        assert!(matches!(asked, Ok(StatusCode::OK)), "{asked:?}");
        let asked = get(vec![server(Some(unable)).await, server(None).await]).await;
        assert!(
            matches!(asked, Ok(StatusCode::SERVICE_UNAVAILABLE)),
            "why it cannot says more than silence: {asked:?}"
        );
        let watched = operator(vec![server(Some(unable)).await, server(Some("200 OK")).await]);
        assert_eq!(watched.open(&Question::get("/workers?watch=true")).await.unwrap().status(), StatusCode::OK);
    }

    #[test]
    fn an_answer_says_how_old_it_may_be() {
        let headers = HeaderMap::from_iter([(http::HeaderName::from_static("x-smg-revision"), HeaderValue::from(7))]);
        let age = |path: &str, headers: &HeaderMap| Age::of(&Question::get(path), "g:1", headers);
        assert_eq!(age("/workers", &headers), Age::Current);
        assert_eq!(age("/workers?consistency=stale", &headers), Age::AsOf("7".to_owned()));
        let mut cut = headers;
        cut.insert("x-smg-stale", HeaderValue::from(12));
        assert_eq!(age("/workers", &cut), Age::Cut("g:1".to_owned(), "12".to_owned()));
    }

    #[tokio::test]
    async fn what_a_silent_server_may_have_done_is_not_undone_by_another_that_could_not_do_it() {
        for later in ["503 Service Unavailable", "401 Unauthorized", "403 Forbidden"] {
            let asked = put(vec![server(None).await, server(Some(later)).await]).await;
            assert!(matches!(asked, Err(AskError::Unknown(_))), "{later}: {asked:?}");
        }
        let asked = put(vec![server(None).await, server(Some("200 OK")).await]).await;
        assert!(matches!(asked, Ok(StatusCode::OK)), "{asked:?}");
        let asked = put(vec![server(None).await, server(Some("412 Precondition Failed")).await]).await;
        assert!(matches!(asked, Ok(StatusCode::PRECONDITION_FAILED)), "{asked:?}");
        let asked = put(vec![server(Some("503 Service Unavailable")).await]).await;
        assert!(matches!(asked, Ok(StatusCode::SERVICE_UNAVAILABLE)), "{asked:?}");
    }
}
