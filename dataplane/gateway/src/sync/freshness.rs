//! Whether this gateway knows what the control plane knows.
//!
//! Problem: behind one DNS name a client may register a model through one gateway and ask for it at another, which learns of it a moment
//! later, or, cut off from the control plane, not yet. "No such model" would be a lie that the client believes.
//!
//! Rule: a gateway says "no such model" only when the control plane confirms, after the request came, that this gateway's revision holds
//! every acknowledged write. If the control plane is ahead, the request waits a moment for the change to arrive; if it cannot be asked,
//! or the change does not arrive, the client is told to try again.
//!
//! One question to the control plane is on its way at a time, however many requests for unknown models there are: all that came before it
//! was asked share its answer.

use std::time::Duration;

use bytes::Bytes;
use http::Request;
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout_at};

use crate::core::Core;

/// How long a request waits for the answer, and for the change.
const PATIENCE: Duration = Duration::from_secs(2);

/// What the control plane last confirmed.
#[derive(Debug, Default)]
pub struct Freshness {
    confirmed: Mutex<Option<Confirmed>>,
}

#[derive(Debug, Clone, Copy)]
struct Confirmed {
    /// When it was asked.
    asked: Instant,
    /// The revision that held every write acknowledged until then.
    revision: u64,
}

impl Freshness {
    /// Whether the routing table in use holds everything that was acknowledged before the call. Waits a moment until it does.
    pub async fn is_current(&self, core: &Core) -> bool {
        let came = Instant::now();
        let deadline = came + PATIENCE;
        let Ok(Some(revision)) = timeout_at(deadline, self.confirm(core, came)).await else { return false };
        let mut have = core.revision.subscribe();
        matches!(timeout_at(deadline, have.wait_for(|have| *have >= revision)).await, Ok(Ok(_)))
    }

    /// A revision that held every write acknowledged until `came`.
    async fn confirm(&self, core: &Core, came: Instant) -> Option<u64> {
        let mut confirmed = self.confirmed.lock().await;
        if let Some(Confirmed { asked, revision }) = *confirmed
            && asked >= came
        {
            return Some(revision);
        }
        let asked = Instant::now();
        let request = Request::get("/fleet/revision").body(Bytes::new()).ok()?;
        let response = core.link.request(request).await.ok()?;
        let revision = response.headers().get("x-smg-revision")?.to_str().ok()?.parse().ok()?;
        if !response.status().is_success() {
            return None;
        }
        *confirmed = Some(Confirmed { asked, revision });
        Some(revision)
    }
}
