//! Reading request bodies: bounded in size and in patience.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, header};
use http_body::Body;
use http_body_util::BodyExt;
use tokio::time::Instant;

use super::error::GatewayError;
use crate::options::GatewayOptions;
use crate::relay::describe;

/// Space reserved on the word of a content length alone.
const MAX_RESERVED: usize = 1024 * 1024;
/// How much of a refused upload is still taken, and for how long: a client that is cut while it sends never reads why.
const LINGER_BYTES: usize = 16 * 1024 * 1024;
const LINGER: Duration = Duration::from_secs(2);

/// How patient a reader is.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Most bytes.
    pub bytes: usize,
    /// How long nothing may come.
    pub stall: Duration,
    /// How long the whole may take: a byte now and then ends no stall.
    pub total: Duration,
}

impl Limits {
    /// Those of a gateway's clients.
    pub fn of(options: &GatewayOptions) -> Self {
        Self {
            bytes: options.max_payload_bytes,
            stall: options.upload_stall_timeout,
            total: options.upload_timeout.min(options.request_timeout),
        }
    }
}

/// Reads a whole body. One that comes in one piece is not copied.
///
/// # Errors
/// When it is too large (before reading, if it says so), stands still, takes too long, or breaks off.
pub async fn read<B>(headers: &HeaderMap, mut body: B, limits: Limits) -> Result<Bytes, GatewayError>
where
    B: Body<Data = Bytes, Error: std::error::Error> + Unpin + Send + 'static,
{
    let limit = limits.bytes;
    let announced = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if announced.is_some_and(|length| length > limit as u64) {
        linger(body);
        return Err(GatewayError::BodyTooLarge(limit));
    }
    let mut first: Option<Bytes> = None;
    let mut whole = Vec::new();
    let end = Instant::now() + limits.total;
    loop {
        let stalled = Instant::now() + limits.stall;
        let frame = tokio::time::timeout_at(end.min(stalled), body.frame()).await;
        let frame =
            frame.map_err(|_| if end <= stalled { GatewayError::BodyTimeout } else { GatewayError::BodyStalled })?;
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
            whole.reserve_exact(announced.map_or(0, |length| (length as usize).min(MAX_RESERVED)));
            whole.extend_from_slice(&first);
        }
        make_room(&mut whole, data.len(), announced, limit);
        whole.extend_from_slice(&data);
    }
    Ok(first.unwrap_or_else(|| Bytes::from(whole)))
}

/// Makes room for `more` bytes of a body of at most `limit`. Growing copies, and both copies take memory: it happens rarely, and never
/// beyond what the body may become. Room that stays unused costs addresses only.
fn make_room(whole: &mut Vec<u8>, more: usize, announced: Option<u64>, limit: usize) {
    let needed = whole.len().saturating_add(more);
    if needed <= whole.capacity() {
        return;
    }
    let next = match announced {
        Some(length) if needed > MAX_RESERVED => length as usize,
        _ => whole.capacity().max(64 * 1024).saturating_mul(8),
    };
    whole.reserve_exact(next.min(limit).max(needed) - whole.len());
}

/// Takes and drops the rest of a refused upload while its answer is on the way, within bounds.
pub fn linger<B: Body<Data = Bytes> + Unpin + Send + 'static>(mut body: B) {
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
            let read = read(&HeaderMap::new(), chunked(chunks), limits(6)).await.unwrap();
            assert_eq!(read, "abcdef");
        }
    }

    #[tokio::test]
    async fn one_byte_over_the_limit_is_refused_announced_or_not() {
        let mut headers = HeaderMap::new();
        let refused = read(&headers, chunked(&["abc", "def"]), limits(5)).await;
        assert!(matches!(refused, Err(GatewayError::BodyTooLarge(5))));
        headers.insert(header::CONTENT_LENGTH, 6.into());
        let refused = read(&headers, chunked(&[]), limits(5)).await;
        assert!(matches!(refused, Err(GatewayError::BodyTooLarge(5))));
    }

    fn limits(bytes: usize) -> Limits {
        Limits { bytes, stall: Duration::from_secs(300), total: Duration::from_secs(600) }
    }

    #[tokio::test(start_paused = true)]
    async fn a_byte_now_and_then_does_not_keep_an_upload_alive() {
        let drops = stream::unfold((), |()| async {
            tokio::time::sleep(Duration::from_secs(25)).await;
            Some((Ok::<_, std::io::Error>(Bytes::from_static(b"x")), ()))
        });
        let begun = Instant::now();
        let refused = read(&HeaderMap::new(), Body::from_stream(drops), limits(1000)).await;
        assert!(matches!(refused, Err(GatewayError::BodyTimeout)));
        assert_eq!(begun.elapsed(), Duration::from_secs(600));
    }

    #[tokio::test(start_paused = true)]
    async fn an_upload_that_stands_still_is_given_up() {
        let body = Body::from_stream(stream::pending::<Result<Bytes, std::io::Error>>());
        let refused = read(&HeaderMap::new(), body, limits(5)).await;
        assert!(matches!(refused, Err(GatewayError::BodyStalled)));
    }
}
