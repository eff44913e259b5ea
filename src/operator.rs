//! An operator's way to the admin API: which member is asked, what is trusted and shown, and what became of a request.
//!
//! Members are asked in turn until one answers. A change that may have arrived is never sent to another one.

use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{Client, Error};
use hyper_util::rt::TokioExecutor;
use serde_json::Value;
use smg_net::mutual;
use smg_net::mutual::connect::Connector;
use smg_net::mutual::explain::is_refusal;
use thiserror::Error;

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
    /// None of the members answers; nothing was done.
    #[error("the control plane cannot be reached: {0}")]
    Unreachable(String),
    /// It may have been done.
    #[error("the outcome is unknown: {0}. Look at the status, or ask again")]
    Unknown(String),
}

/// The connections of an operator.
enum Way {
    Plain(Client<HttpConnector, Full<Bytes>>),
    Tls(Client<Connector, Full<Bytes>>),
}

/// Asks the control plane.
pub struct Operator {
    way: Way,
    addresses: Vec<String>,
    bearer: Option<HeaderValue>,
}

impl Operator {
    /// As the command line says.
    ///
    /// # Errors
    /// When a file cannot be used.
    pub fn new(target: &TargetArgs) -> Result<Self, AskError> {
        let setup = |error: &dyn std::fmt::Display| AskError::Setup(error.to_string());
        let way = match &target.tls {
            None => {
                let mut connector = HttpConnector::new();
                connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
                Way::Plain(Client::builder(TokioExecutor::new()).build(connector))
            }
            Some(tls) => {
                let identity = tls.identity.as_ref().map(|(certificate, key)| (certificate.as_path(), key.as_path()));
                let config = mutual::operator(&tls.roots, identity).map_err(|error| setup(&error))?;
                let connector = Connector::of_operator(config, CONNECT_TIMEOUT);
                Way::Tls(Client::builder(TokioExecutor::new()).build(connector))
            }
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
        Ok(Self { way, addresses: target.controlplane.clone(), bearer })
    }

    /// Sends a request with a JSON body, or none.
    ///
    /// # Errors
    /// When nobody answers.
    pub async fn ask(&self, method: Method, path: &str, body: Option<&Value>) -> Result<(StatusCode, Bytes), AskError> {
        let mut unreachable = "no address is given".to_owned();
        for address in &self.addresses {
            match tokio::time::timeout(TIMEOUT, self.ask_one(&method, address, path, body)).await {
                Ok(Ok(answer)) => return Ok(answer),
                // Nothing was sent, or it was not looked at: another member may do it.
                Ok(Err((true, error))) => unreachable = format!("{address}: {error}"),
                Ok(Err((false, error))) if method == Method::GET => unreachable = format!("{address}: {error}"),
                Err(_) if method == Method::GET => unreachable = format!("{address}: no answer in time"),
                Ok(Err((false, error))) => return Err(AskError::Unknown(format!("{address}: {error}"))),
                Err(_) => return Err(AskError::Unknown(format!("{address}: no answer in time"))),
            }
        }
        Err(AskError::Unreachable(unreachable))
    }

    /// As [`Operator::ask`]; an error says whether the request cannot have been looked at.
    async fn ask_one(
        &self,
        method: &Method,
        address: &str,
        path: &str,
        body: Option<&Value>,
    ) -> Result<(StatusCode, Bytes), (bool, String)> {
        let scheme = match &self.way {
            Way::Plain(_) => "http",
            Way::Tls(_) => "https",
        };
        let mut request = Request::builder()
            .method(method.clone())
            .uri(format!("{scheme}://{address}{path}"))
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(body.map(Value::to_string).unwrap_or_default())))
            .map_err(|error| (true, error.to_string()))?;
        request.headers_mut().extend(self.bearer.clone().map(|bearer| (header::AUTHORIZATION, bearer)));
        let sent = match &self.way {
            Way::Plain(client) => client.request(request).await,
            Way::Tls(client) => client.request(request).await,
        };
        let response: Response<_> = sent.map_err(|error: Error| {
            let unseen = error.is_connect() || is_refusal(&error);
            (unseen, describe(&error))
        })?;
        let status = response.status();
        let body = Limited::new(response.into_body(), MAX_ANSWER).collect().await;
        Ok((status, body.map_err(|error| (false, error.to_string()))?.to_bytes()))
    }
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
