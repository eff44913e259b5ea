//! `/fleet/backup`: the whole state as one file; see [`crate::backup`].

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use futures::stream;

use super::error::ApiError;
use super::service::backup::Backup;
use super::{Admin, at_revision};

/// Bytes of one part of the answer.
const PART: usize = 64 * 1024;

pub(super) async fn show(State(admin): State<Admin>) -> Result<Response, ApiError> {
    let Backup { revision, bytes, seat } = admin.service.backup().await?;
    let length = HeaderValue::from(bytes.len());
    let parts = stream::unfold((bytes, seat), |(mut left, seat)| async move {
        let part = left.split_to(left.len().min(PART));
        (!part.is_empty()).then_some((Ok::<_, std::io::Error>(part), (left, seat)))
    });
    let mut response = at_revision(revision, Response::new(Body::from_stream(parts)));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(header::CONTENT_LENGTH, length);
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}
