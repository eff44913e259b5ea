//! Duties of the leader: they run while this node leads and end when it no longer does.

use std::future::Future;
use std::sync::Arc;

use smg_store::{ClusterStore, Leadership};
use tokio_util::sync::CancellationToken;

/// Runs `duty` once for each term in which this node leads, until `shutdown`. The token given to the duty ends with the term; the next
/// term starts only after the duty has returned.
pub(crate) async fn while_leading<F>(
    store: Arc<dyn ClusterStore>,
    shutdown: CancellationToken,
    duty: impl Fn(CancellationToken) -> F,
) where
    F: Future<Output = ()> + Send,
{
    let mut leadership = store.leadership();
    loop {
        let leads = tokio::select! {
            leads = leadership.wait_for(|role| *role == Leadership::Leader) => leads.is_ok(),
            () = shutdown.cancelled() => false,
        };
        if !leads {
            return;
        }
        let term = shutdown.child_token();
        let ended = async {
            // A closed channel is a store that is gone: the term has ended too.
            let _ = leadership.wait_for(|role| *role != Leadership::Leader).await;
            term.cancel();
        };
        let work = duty(term.clone());
        tokio::pin!(work, ended);
        tokio::select! {
            () = &mut work => return,
            () = &mut ended => work.await,
        }
    }
}
