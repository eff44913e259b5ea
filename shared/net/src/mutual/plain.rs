//! A last word to callers who will not be served: to those who do not speak TLS, in their own protocol.
//!
//! A socket that is closed while the caller still sends may lose what was written to it last. So the caller's bytes are read away for a moment,
//! bounded in time and amount.

use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;

/// The first byte of a TLS handshake (RFC 8446 section 5.1).
const HANDSHAKE: u8 = 22;
/// How long a caller has to read the last word.
const LINGER: Duration = Duration::from_secs(1);
/// Most bytes that are read away.
const MAX_UNREAD: u64 = 256 * 1024;

const HTTP_2: &[u8] = b"PRI ";
const WORDS: &str = "this port speaks TLS only: give --tls-dir";

/// What a caller begins with.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Begins {
    /// A TLS handshake.
    Tls,
    /// Anything else.
    Plain,
}

/// Looks at the first byte, and leaves it where it is.
pub(crate) async fn begins(stream: &TcpStream) -> std::io::Result<Begins> {
    let mut first = [0; 1];
    match stream.peek(&mut first).await? {
        0 => Err(std::io::ErrorKind::UnexpectedEof.into()),
        _ if first[0] == HANDSHAKE => Ok(Begins::Tls),
        _ => Ok(Begins::Plain),
    }
}

/// Tells a caller without TLS what is wrong, and hangs up.
pub(crate) async fn refuse(mut stream: TcpStream) {
    let mut first = [0; 4];
    let told = async {
        stream.read_exact(&mut first).await?;
        let answer = if first == HTTP_2 { http_2() } else { http_1() };
        stream.write_all(&answer).await
    };
    if matches!(tokio::time::timeout(LINGER, told).await, Ok(Ok(()))) {
        hang_up(stream).await;
    }
}

/// Closes a connection so that its caller can read what was written last.
pub(crate) async fn hang_up<IO: AsyncRead + AsyncWrite + Unpin>(mut stream: IO) {
    let quiet = async {
        let _ = stream.shutdown().await;
        let _ = tokio::io::copy(&mut (&mut stream).take(MAX_UNREAD), &mut tokio::io::sink()).await;
    };
    let _ = tokio::time::timeout(LINGER, quiet).await;
}

fn http_1() -> Vec<u8> {
    let body = format!("{{\"error\":\"{WORDS}\",\"code\":\"TLS_REQUIRED\"}}");
    let length = body.len();
    format!(
        "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
    )
    .into_bytes()
}

/// A preface of settings, and a GOAWAY that carries the words (RFC 9113 sections 6.5 and 6.8).
fn http_2() -> Vec<u8> {
    const SETTINGS: [u8; 9] = [0, 0, 0, 4, 0, 0, 0, 0, 0];
    const GOAWAY: u8 = 7;
    const INADEQUATE_SECURITY: u8 = 12;
    let length = u8::try_from(8 + WORDS.len()).unwrap_or(8);
    let mut bytes = SETTINGS.to_vec();
    bytes.extend([0, 0, length, GOAWAY, 0, 0, 0, 0, 0]);
    bytes.extend([0, 0, 0, 0, 0, 0, 0, INADEQUATE_SECURITY]);
    bytes.extend(&WORDS.as_bytes()[..usize::from(length) - 8]);
    bytes
}
