//! A transport inside the process.
//!
//! A [`Connector`] makes both ends of a byte pipe and hands the far end to the [`Listener`], which serves it as it would serve a socket.
//! The queue of connections not yet accepted is bounded, as a socket's backlog is.

use std::io;

use tokio::io::DuplexStream;
use tokio::sync::mpsc;

/// Bytes each direction holds before the writer waits.
const PIPE_BYTES: usize = 256 * 1024;
/// Connections that wait to be accepted.
const BACKLOG: usize = 16;

/// The dialing side. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Connector {
    backlog: mpsc::Sender<DuplexStream>,
}

/// The accepting side.
#[derive(Debug)]
pub struct Listener {
    backlog: mpsc::Receiver<DuplexStream>,
}

/// A connected pair.
pub fn transport() -> (Connector, Listener) {
    let (sender, receiver) = mpsc::channel(BACKLOG);
    (Connector { backlog: sender }, Listener { backlog: receiver })
}

impl Connector {
    /// Opens a connection.
    ///
    /// # Errors
    /// `ConnectionRefused` when nobody listens any more.
    pub async fn connect(&self) -> io::Result<DuplexStream> {
        let (near, far) = tokio::io::duplex(PIPE_BYTES);
        self.backlog.send(far).await.map_err(|_| io::Error::from(io::ErrorKind::ConnectionRefused))?;
        Ok(near)
    }
}

impl Listener {
    /// The next connection; `None` when every connector is gone.
    pub async fn accept(&mut self) -> Option<DuplexStream> {
        self.backlog.recv().await
    }
}
