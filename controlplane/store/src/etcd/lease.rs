//! The lease of a member: what it holds in etcd - being the writer, being listed - is gone some seconds after its process is.
//!
//! * It is kept by a thread with a runtime and connections of its own: no load of the process delays it.
//! * It counts from when a sign of life was sent, not from when its answer came: so this member gives up before etcd does.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::sync::CancellationToken;

use super::EtcdOptions;
use super::client::Etcd;
use crate::failure::Failure;

/// Before a lease is asked for again.
const PAUSE: Duration = Duration::from_millis(100);
/// For giving the lease back at the end.
const FAREWELL: Duration = Duration::from_secs(1);

/// Keeps the lease of a member.
#[derive(Debug)]
pub(crate) struct Keeper {
    held: watch::Receiver<Option<i64>>,
    thread: Mutex<Option<std::thread::JoinHandle<()>>>,
}

impl Keeper {
    /// Starts the thread. It ends after `stop`, and gives the lease back then.
    pub fn start(options: &EtcdOptions, failure: Arc<Failure>, stop: CancellationToken) -> Result<Self, String> {
        let (held, receiver) = watch::channel(None);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| error.to_string())?;
        let options = options.clone();
        let work = move || {
            runtime.block_on(async move {
                match Etcd::new(&options.endpoints, options.tls.as_ref(), Arc::clone(&failure)) {
                    Ok(etcd) => keep(&etcd, options.lease, &held, &stop).await,
                    Err(reason) => drop(failure.fail(reason)),
                }
            });
        };
        let thread = std::thread::Builder::new().name("etcd-lease".to_owned()).spawn(work);
        let thread = thread.map_err(|error| error.to_string())?;
        Ok(Self { held: receiver, thread: Mutex::new(Some(thread)) })
    }

    /// The lease that this member has; none = it has none, and nothing of what it held.
    pub fn held(&self) -> watch::Receiver<Option<i64>> {
        self.held.clone()
    }

    /// The lease, now.
    pub fn now(&self) -> Option<i64> {
        *self.held.borrow()
    }

    /// Waits until the thread has ended.
    pub async fn ended(&self) {
        let Some(thread) = self.thread.lock().take() else { return };
        // A thread that panicked has ended too.
        let _ = tokio::task::spawn_blocking(move || thread.join()).await;
    }
}

async fn keep(etcd: &Etcd, length: Duration, held: &watch::Sender<Option<i64>>, stop: &CancellationToken) {
    let seconds = i64::try_from(length.as_secs().max(1)).unwrap_or(i64::MAX);
    while !stop.is_cancelled() {
        let asked = Instant::now();
        let lease = tokio::select! {
            lease = etcd.grant(seconds) => lease,
            () = stop.cancelled() => return,
        };
        match lease {
            Ok(lease) => {
                held.send_replace(Some(lease));
                hold(etcd, lease, asked + length, length, stop).await;
                held.send_replace(None);
                if stop.is_cancelled() {
                    // Where etcd does not answer, it ends by itself.
                    let _ = tokio::time::timeout(FAREWELL, etcd.revoke(lease)).await;
                }
            }
            Err(error) => {
                tracing::warn!(target: "smg", reason = error.message(), "etcd gives this member no lease");
                tokio::select! {
                    () = sleep(PAUSE) => {}
                    () = stop.cancelled() => return,
                }
            }
        }
    }
}

/// Keeps a lease until it is lost.
async fn hold(etcd: &Etcd, lease: i64, mut until: Instant, length: Duration, stop: &CancellationToken) {
    let beat = length / 4;
    loop {
        tokio::select! {
            () = sleep(beat) => {}
            () = stop.cancelled() => return,
        }
        let sent = Instant::now();
        match timeout_at(until, etcd.keep(lease)).await {
            Ok(Ok(true)) => until = sent + length,
            Ok(Ok(false)) => {
                tracing::warn!(target: "smg", "the lease of this member has ended");
                return;
            }
            // There is time for another endpoint.
            Ok(Err(_)) if Instant::now() < until => {}
            Ok(Err(error)) => {
                tracing::warn!(target: "smg", reason = error.message(), "the lease of this member could not be kept");
                return;
            }
            Err(_) => {
                tracing::warn!(target: "smg", "the lease of this member could not be kept in time");
                return;
            }
        }
    }
}
