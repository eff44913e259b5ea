//! The gateway's side of the subscription to the control plane.
//!
//! One task keeps a stream to some control plane node: it says what it has, receives a full snapshot or deltas, validates each with the
//! same code as the control plane by building the routing table from it, swaps the table, and acknowledges. What does not validate is
//! refused with a reason and the last good table stays in use. When the stream breaks, the gateway routes on exactly as before and dials
//! again with backoff.

pub mod dial;
pub mod freshness;
pub mod last_known_good;
mod subscription;

use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use bytes::Bytes;
use http::{Request, Response};
use parking_lot::Mutex;
use smg_fleet::Snapshot;
use smg_net::mutual::explain::is_refusal;
use tonic::transport::Channel;
use tower::ServiceExt;

use crate::core::Core;
use crate::fleet::table::RoutingTable;
use dial::Dial;
use last_known_good::LastKnownGood;

/// What the gateway knows about its control plane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkStatus {
    /// Whether a stream is up.
    pub connected: bool,
    /// Seconds since the control plane was last heard, or, until it is, since the snapshot in use was stored; none = neither.
    pub stale_seconds: Option<u64>,
    /// Why the control plane's store has stopped, when this process runs it.
    pub store_failure: Option<String>,
}

/// The way to the control plane: the channel in use, and what is known about it.
pub struct Link {
    channel: ArcSwapOption<Channel>,
    news: Mutex<Option<News>>,
    connected: std::sync::atomic::AtomicBool,
    store_failure: Mutex<Option<String>>,
}

/// The latest that is known of the fleet.
#[derive(Debug, Clone, Copy)]
struct News {
    at: Instant,
    /// How old it was by then.
    age: Duration,
}

impl Default for Link {
    fn default() -> Self {
        Self {
            channel: ArcSwapOption::empty(),
            news: Mutex::new(None),
            connected: std::sync::atomic::AtomicBool::new(false),
            store_failure: Mutex::new(None),
        }
    }
}

impl Link {
    /// The state of the link.
    pub fn status(&self) -> LinkStatus {
        LinkStatus {
            connected: self.connected.load(std::sync::atomic::Ordering::Acquire),
            stale_seconds: self.news.lock().map(|news| (news.age + news.at.elapsed()).as_secs()),
            store_failure: self.store_failure.lock().clone(),
        }
    }

    /// Notes that the control plane's store, run by this process, has stopped.
    pub fn note_store_failure(&self, reason: String) {
        *self.store_failure.lock() = Some(reason);
    }

    /// Sends an admin request to the control plane.
    ///
    /// # Errors
    /// When there is no connection, or it breaks; the two are kept apart.
    pub async fn request(&self, request: Request<Bytes>) -> Result<Response<tonic::body::Body>, RequestError> {
        let channel = self.channel.load_full().ok_or_else(|| RequestError::NotSent("not connected".to_owned()))?;
        let request = request.map(|body| tonic::body::Body::new(http_body_util::Full::new(body)));
        let response = Channel::clone(&channel).oneshot(request).await;
        response.map_err(|error| {
            let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
            while let Some(inner) = cause {
                if inner.is::<tonic::ConnectError>() || is_refusal(inner) {
                    return RequestError::NotSent(crate::relay::describe(&error));
                }
                cause = inner.source();
            }
            RequestError::Lost(crate::relay::describe(&error))
        })
    }

    fn heard(&self) {
        self.learned(Duration::ZERO);
    }

    fn learned(&self, age: Duration) {
        *self.news.lock() = Some(News { at: Instant::now(), age });
    }
}

/// Why an admin request has no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// It cannot have arrived.
    #[error("{0}")]
    NotSent(String),
    /// It may have arrived.
    #[error("{0}")]
    Lost(String),
}

/// Why a snapshot was not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Refused(String);

/// Builds the routing table of a snapshot and puts it into use.
pub(crate) fn install(core: &Arc<Core>, snapshot: Snapshot) -> Result<(), Refused> {
    let previous = core.table.load_full();
    let revision = snapshot.revision;
    let built = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        RoutingTable::build(Arc::new(snapshot), &previous, core.clock, &core.metrics)
    }));
    let table = match built {
        Ok(Ok(table)) => Arc::new(table),
        Ok(Err(error)) => return Err(Refused(error.to_string())),
        // A poisoned snapshot must not take the gateway down with it.
        Err(_) => return Err(Refused("building the routing table panicked".to_owned())),
    };
    core.table.store(Arc::clone(&table));
    table.forget_departed(&previous);
    let departed: Vec<_> = previous.departed(&table).collect();
    departed.iter().for_each(|runtime| runtime.forget());
    let mut series: std::collections::BTreeSet<&str> = departed.iter().map(|runtime| runtime.url()).collect();
    // A worker that was removed and registered anew goes on under the same label.
    table.workers.values().for_each(|worker| {
        series.remove(worker.spec.url.as_str());
    });
    core.metrics.forget_workers(&series);
    core.gauges.lock().show(&core.metrics, table.workers.values().map(AsRef::as_ref));
    core.metrics.config_revision.set(i64::try_from(revision).unwrap_or(i64::MAX));
    core.revision.send_replace(revision);
    Ok(())
}

/// Starts the subscription: from the last-known-good file if there is one, then from the control plane.
pub fn start(core: Arc<Core>, dial: Dial) -> Arc<Link> {
    let link = Arc::clone(&core.link);
    let stored = core.options.data_dir.clone().map(LastKnownGood::new);
    if let Some(age) = stored.as_ref().and_then(|stored| stored.restore(&core)) {
        link.learned(age);
    }
    smg_net::spawn("sync", subscription::run(core, Arc::clone(&link), dial, stored));
    link
}
