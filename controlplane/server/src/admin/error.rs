//! Codes and statuses of the admin API. Every error of every handler passes here.
//!
//! The codes of `/workers` are those of the documented system; `STORE_FAILED`, `CONTROL_PLANE_UNAVAILABLE`, `OUTCOME_UNKNOWN`,
//! `REVISION_CONFLICT`, `POLICY_NOT_FOUND`, those of `/fleet/cluster`, `LIMIT_EXCEEDED`, `NOT_FOUND`, `METHOD_NOT_ALLOWED`,
//! `UNAUTHORIZED`, `FORBIDDEN`, `TOKEN_NOT_FOUND`, `TOKEN_ALREADY_EXISTS`, `LAST_ADMIN_TOKEN`, `ALREADY_HAPPENED` and
//! `BUSY` are additions.
//!
//! The answer to a change that did not succeed says in `outcome` what became of it: `did_not_happen`, `happened` or `unknown`.

use axum::Json;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use smg_fleet::access::Denied;
use smg_state::{Rejection, RejectionCode};
use smg_store::StoreError;
use smg_store::cluster::{ChangeError, Refusal};
use thiserror::Error;

use super::access::challenge;
use crate::writer::WriteError;

/// Why an admin request was not served.
#[derive(Debug, Error)]
pub enum ApiError {
    /// The request is malformed or breaks a rule.
    #[error("{0}")]
    BadRequest(String),
    /// The worker belongs to a provider's API, which this build cannot route to.
    #[error("{0}")]
    Provider(String),
    /// No worker has this id.
    #[error("worker {0} not found")]
    WorkerNotFound(String),
    /// No policy document for this model.
    #[error("no policy document for '{0}'")]
    PolicyNotFound(String),
    /// No token has this id.
    #[error("token {0} not found")]
    TokenNotFound(String),
    /// The caller may not do this.
    #[error(transparent)]
    Denied(Denied),
    /// The body is larger than the limit.
    #[error("the body is larger than {0} bytes")]
    TooLarge(usize),
    /// The state refused the command.
    #[error("{0}")]
    Rejected(Rejection),
    /// The store did not answer.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The members do not change that way.
    #[error("{1}")]
    Members(Refusal, String),
    /// The change was made, but its answer cannot be given.
    #[error("{0}")]
    Happened(&'static str),
    /// This process does as much of that kind as it may.
    #[error("{0}")]
    Busy(&'static str),
    /// No such resource.
    #[error("{0}")]
    UnknownRoute(String),
    /// The resource has no such method.
    #[error("{0}")]
    WrongMethod(String),
    /// A fault of this program.
    #[error("{0}")]
    Internal(&'static str),
}

impl From<WriteError> for ApiError {
    fn from(error: WriteError) -> Self {
        match error {
            WriteError::Store(error) => Self::Store(error),
            WriteError::Rejected(rejection) => Self::Rejected(rejection),
        }
    }
}

impl From<ChangeError> for ApiError {
    fn from(error: ChangeError) -> Self {
        match error {
            ChangeError::Store(error) => Self::Store(error),
            ChangeError::Refused { code, message } => Self::Members(code, message),
        }
    }
}

/// What became of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// Nothing was changed, and nothing will be.
    DidNotHappen,
    /// It was changed.
    Happened,
    /// Nobody knows yet. Repeated under its `Idempotency-Key` it is the same change.
    Unknown,
}

impl Fate {
    /// Its name in answers.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::DidNotHappen => "did_not_happen",
            Self::Happened => "happened",
            Self::Unknown => "unknown",
        }
    }
}

impl ApiError {
    /// What became of a change that is answered with this.
    pub fn fate(&self) -> Fate {
        match self {
            Self::Store(StoreError::Unknown(_)) => Fate::Unknown,
            Self::Happened(_) => Fate::Happened,
            _ => Fate::DidNotHappen,
        }
    }

    /// The status and the code that clients key on.
    pub fn status_and_code(&self) -> (StatusCode, &'static str) {
        match self {
            Self::BadRequest(_) => (StatusCode::BAD_REQUEST, "BAD_REQUEST"),
            Self::Provider(_) => (StatusCode::BAD_REQUEST, "PROVIDER_NOT_COMPILED"),
            Self::WorkerNotFound(_) => (StatusCode::NOT_FOUND, "WORKER_NOT_FOUND"),
            Self::PolicyNotFound(_) => (StatusCode::NOT_FOUND, "POLICY_NOT_FOUND"),
            Self::TokenNotFound(_) => (StatusCode::NOT_FOUND, "TOKEN_NOT_FOUND"),
            Self::Denied(Denied::Role { .. }) => (StatusCode::FORBIDDEN, "FORBIDDEN"),
            Self::Denied(_) => (StatusCode::UNAUTHORIZED, "UNAUTHORIZED"),
            Self::TooLarge(_) => (StatusCode::PAYLOAD_TOO_LARGE, "PAYLOAD_TOO_LARGE"),
            Self::Happened(_) => (StatusCode::CONFLICT, "ALREADY_HAPPENED"),
            Self::Busy(_) => (StatusCode::SERVICE_UNAVAILABLE, "BUSY"),
            Self::UnknownRoute(_) => (StatusCode::NOT_FOUND, "NOT_FOUND"),
            Self::WrongMethod(_) => (StatusCode::METHOD_NOT_ALLOWED, "METHOD_NOT_ALLOWED"),
            Self::Internal(_) => (StatusCode::INTERNAL_SERVER_ERROR, "INTERNAL_SERVER_ERROR"),
            Self::Rejected(rejection) => match rejection.code {
                RejectionCode::WorkerNotFound => (StatusCode::NOT_FOUND, "WORKER_NOT_FOUND"),
                RejectionCode::WorkerAlreadyExists => (StatusCode::CONFLICT, "WORKER_ALREADY_EXISTS"),
                RejectionCode::WorkerCreateInProgress => (StatusCode::CONFLICT, "WORKER_CREATE_IN_PROGRESS"),
                RejectionCode::RevisionConflict => (StatusCode::PRECONDITION_FAILED, "REVISION_CONFLICT"),
                RejectionCode::Invalid => (StatusCode::BAD_REQUEST, "BAD_REQUEST"),
                RejectionCode::PolicyNotFound => (StatusCode::NOT_FOUND, "POLICY_NOT_FOUND"),
                RejectionCode::Limit => (StatusCode::CONFLICT, "LIMIT_EXCEEDED"),
                RejectionCode::TokenNotFound => (StatusCode::NOT_FOUND, "TOKEN_NOT_FOUND"),
                RejectionCode::TokenAlreadyExists => (StatusCode::CONFLICT, "TOKEN_ALREADY_EXISTS"),
                RejectionCode::LastAdminToken => (StatusCode::CONFLICT, "LAST_ADMIN_TOKEN"),
                RejectionCode::MemberNotFound => (StatusCode::NOT_FOUND, "MEMBER_NOT_FOUND"),
                RejectionCode::MemberRetired => (StatusCode::CONFLICT, "MEMBER_RETIRED"),
                RejectionCode::JobSuperseded => (StatusCode::INTERNAL_SERVER_ERROR, "INTERNAL_SERVER_ERROR"),
            },
            Self::Members(refusal, _) => match refusal {
                Refusal::NotAMember => (StatusCode::NOT_FOUND, "MEMBER_NOT_FOUND"),
                Refusal::QuorumAtRisk => (StatusCode::CONFLICT, "QUORUM_AT_RISK"),
                Refusal::EvenVoters => (StatusCode::CONFLICT, "EVEN_VOTERS"),
                Refusal::TooManyVoters => (StatusCode::CONFLICT, "TOO_MANY_VOTERS"),
                Refusal::NotCaughtUp => (StatusCode::CONFLICT, "NOT_CAUGHT_UP"),
                Refusal::InProgress => (StatusCode::CONFLICT, "CHANGE_IN_PROGRESS"),
                Refusal::Unsupported => (StatusCode::CONFLICT, "SINGLE_MEMBER"),
                Refusal::Already => (StatusCode::CONFLICT, "NOTHING_TO_CHANGE"),
            },
            Self::Store(StoreError::TooLarge(_)) => (StatusCode::PAYLOAD_TOO_LARGE, "PAYLOAD_TOO_LARGE"),
            Self::Store(StoreError::Failed(_)) => (StatusCode::SERVICE_UNAVAILABLE, "STORE_FAILED"),
            Self::Store(StoreError::Unknown(_)) => (StatusCode::SERVICE_UNAVAILABLE, "OUTCOME_UNKNOWN"),
            Self::Store(StoreError::Unavailable(_) | StoreError::Closed) => {
                (StatusCode::SERVICE_UNAVAILABLE, "CONTROL_PLANE_UNAVAILABLE")
            }
        }
    }
}

/// An error on its way out.
#[derive(Debug, Clone)]
struct Problem {
    body: Value,
    fate: Fate,
}

/// Says in the answer to a change that did not succeed what became of it.
pub(super) async fn with_fate(request: Request, next: Next) -> Response {
    let changes = !request.method().is_safe();
    let mut response = next.run(request).await;
    match response.extensions_mut().remove::<Problem>() {
        Some(Problem { mut body, fate }) if changes => {
            body["outcome"] = json!(fate.as_str());
            let (mut head, _) = response.into_parts();
            head.headers.remove(header::CONTENT_LENGTH);
            Response::from_parts(head, Body::from(body.to_string()))
        }
        _ => response,
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let (status, code) = self.status_and_code();
        let body = json!({"error": self.to_string(), "code": code});
        let mut response = (status, Json(&body)).into_response();
        response.extensions_mut().insert(Problem { body, fate: self.fate() });
        if let Self::Denied(denied) = self
            && let Some(challenge) = challenge(denied)
        {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, challenge);
        }
        response
    }
}
