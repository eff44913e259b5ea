//! Reading request bodies: bounded in size and in patience.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, header};
use http_body::Body;
use http_body_util::BodyExt;

use super::error::GatewayError;
use crate::relay::describe;

/// Space reserved on the word of a content length alone.
const MAX_RESERVED: u64 = 1024 * 1024;
/// How much of a refused upload is still taken, and for how long: a client that is cut while it sends never reads why.
const LINGER_BYTES: usize = 16 * 1024 * 1024;
const LINGER: Duration = Duration::from_secs(2);

/// Reads a whole body of at most `limit` bytes. A body that comes in one piece is not copied.
///
/// # Errors
/// When it is too large (before reading, if it says so), stands still for `stall`, or breaks off.
pub async fn read<B>(headers: &HeaderMap, mut body: B, limit: usize, stall: Duration) -> Result<Bytes, GatewayError>
where
    B: Body<Data = Bytes, Error: std::error::Error> + Unpin + Send + 'static,
{
    let announced = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if announced.is_some_and(|length| length > limit as u64) {
        linger(body);
        return Err(GatewayError::BodyTooLarge(limit));
    }
    let mut first: Option<Bytes> = None;
    let mut whole = BytesMut::new();
    loop {
        let frame = tokio::time::timeout(stall, body.frame()).await.map_err(|_| GatewayError::BodyStalled)?;
        let Some(frame) = frame else { break };
        let frame = frame.map_err(|error| GatewayError::BodyBroken(describe(&error)))?;
        let Ok(data) = frame.into_data() else { continue };
        let have = first.as_ref().map_or(0, Bytes::len) + whole.len();
        if have + data.len() > limit {
            linger(body);
            return Err(GatewayError::BodyTooLarge(limit));
        }
        if have == 0 {
            first = Some(data);
            continue;
        }
        if let Some(first) = first.take() {
            whole.reserve(announced.unwrap_or(0).min(MAX_RESERVED) as usize);
            whole.extend_from_slice(&first);
        }
        whole.extend_from_slice(&data);
    }
    Ok(first.unwrap_or_else(|| whole.freeze()))
}

/// Takes and drops the rest of a refused upload while its answer is on the way, within bounds.
fn linger<B: Body<Data = Bytes> + Unpin + Send + 'static>(mut body: B) {
    let rest = async move {
        let mut taken = 0;
        while taken < LINGER_BYTES
            && let Some(Ok(frame)) = body.frame().await
        {
            taken += frame.data_ref().map_or(0, Bytes::len);
        }
    };
    smg_net::spawn("linger", async move { tokio::time::timeout(LINGER, rest).await });
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use axum::body::Body;
    use futures::stream;

    use super::*;

    fn chunked(chunks: &'static [&'static str]) -> Body {
        Body::from_stream(stream::iter(
            chunks.iter().map(|chunk| Ok::<_, std::io::Error>(Bytes::from_static(chunk.as_bytes()))),
        ))
    }

    #[tokio::test]
    async fn a_body_is_read_whole_however_it_is_cut() {
        for chunks in [&["abcdef"][..], &["ab", "", "cd", "ef"][..], &["", "abcdef"][..]] {
            let read = read(&HeaderMap::new(), chunked(chunks), 6, Duration::from_secs(5)).await.unwrap();
            assert_eq!(read, "abcdef");
        }
    }

    #[tokio::test]
    async fn one_byte_over_the_limit_is_refused_announced_or_not() {
        let mut headers = HeaderMap::new();
        let refused = read(&headers, chunked(&["abc", "def"]), 5, Duration::from_secs(5)).await;
        assert!(matches!(refused, Err(GatewayError::BodyTooLarge(5))));
        headers.insert(header::CONTENT_LENGTH, 6.into());
        let refused = read(&headers, chunked(&[]), 5, Duration::from_secs(5)).await;
        assert!(matches!(refused, Err(GatewayError::BodyTooLarge(5))));
    }

    #[tokio::test]
    async fn an_upload_that_stands_still_is_given_up() {
        let body = Body::from_stream(stream::pending::<Result<Bytes, std::io::Error>>());
        let refused = read(&HeaderMap::new(), body, 5, Duration::from_millis(20)).await;
        assert!(matches!(refused, Err(GatewayError::BodyStalled)));
    }
}
