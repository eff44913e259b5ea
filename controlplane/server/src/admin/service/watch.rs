//! Watches: a list, then every change of it.
//!
//! Problem: whoever wants to follow the fleet must not have to ask for everything again and again, must not miss a deletion, and must not
//! cost the control plane memory when it reads slowly.
//!
//! So a watch is pulled, not pushed: its next step is worked out when the reader has taken the last one, from the feed that gateways follow
//! too ([`crate::sync::feed`]). Changes in between come as one, newest values alone. The first step is the whole list, or, for a reader that
//! comes back with a revision of an earlier step, what changed since. Where that is no longer known, or of another history, the watch says
//! `compacted` and ends: the reader starts anew.
//!
//! Bounds: a number of watches per process; a watch lasts at most half an hour, since who may read can change.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use smg_fleet::info::serves;
use smg_fleet::{AdminToken, PolicyRecord, Revision, Worker};
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::time::{Instant, sleep_until, timeout};
use uuid::Uuid;

use super::Service;
use crate::admin::error::ApiError;
use crate::sync::everywhere::Seen;
use crate::sync::feed::Published;

/// Longest time without a step: a reader knows by it that the watch is alive.
const QUIET: Duration = Duration::from_secs(10);
/// Between two looks at what has no revision.
const LOOK: Duration = Duration::from_secs(2);
/// Longest watch.
const LONGEST: Duration = Duration::from_secs(1_800);
/// How long the first step waits until the feed holds every acknowledged write.
const CATCH_UP: Duration = Duration::from_secs(5);

/// What is followed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Followed {
    /// Workers, or those that serve a model. Always whole workers, never their ranks.
    Workers { model: Option<String> },
    /// Policy documents.
    Policies,
    /// Admin tokens.
    Tokens,
    /// Gateways, of all members.
    Gateways,
}

/// Where an earlier watch ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Resume {
    /// The revision of its last step.
    pub revision: Revision,
    /// The history of that revision; absent = this one.
    pub history_id: Option<Uuid>,
}

/// An object as it is now.
#[derive(Debug, Clone)]
pub(crate) enum Object {
    Worker(Arc<Worker>),
    Policy(Arc<PolicyRecord>),
    Token(Arc<AdminToken>),
    Gateway(Box<Seen>),
}

/// One step of a watch.
#[derive(Debug, Clone, Default)]
pub(crate) struct Batch {
    /// The revision after it.
    pub revision: Revision,
    /// The history of that revision.
    pub history_id: Uuid,
    /// Objects that are new or changed.
    pub put: Vec<Object>,
    /// Names of objects that are gone, or no longer in the list.
    pub deleted: Vec<String>,
    /// Why nothing follows, if nothing does: `compacted`, `expired` or `shutdown`.
    pub end: Option<&'static str>,
}

impl Service {
    /// Follows a list. `resume` is for workers and policies.
    pub(crate) async fn watch(
        &self,
        followed: Followed,
        resume: Option<Resume>,
    ) -> Result<impl Stream<Item = Batch> + Send + use<>, ApiError> {
        if resume.is_some() && matches!(followed, Followed::Tokens | Followed::Gateways) {
            return Err(ApiError::BadRequest("this list has no past: watch it without 'from'".to_owned()));
        }
        let seat = Arc::clone(&self.watches).try_acquire_owned();
        let seat = seat.map_err(|_| ApiError::Busy("this member serves as many watches as it may: try another one"))?;
        let revision = self.writer.barrier().await?;
        let mut latest = self.feed.subscribe();
        match timeout(CATCH_UP, latest.wait_for(|published| published.snapshot.revision >= revision)).await {
            Ok(Ok(published)) => drop(published),
            _ => return Err(ApiError::Internal("the feed of changes is late")),
        }
        let have = resume.map(|resume| (resume.history_id, resume.revision));
        let watch = Watch {
            service: self.clone(),
            followed,
            latest,
            have,
            shown: BTreeMap::new(),
            until: Instant::now() + LONGEST,
            started: false,
            ended: false,
            _seat: seat,
        };
        Ok(futures::stream::unfold(watch, |mut watch| async move { watch.next().await.map(|batch| (batch, watch)) }))
    }
}

/// A watch between two steps.
struct Watch {
    service: Service,
    followed: Followed,
    latest: watch::Receiver<Arc<Published>>,
    /// What the reader has.
    have: Option<(Option<Uuid>, Revision)>,
    /// What the reader was shown of a list without a past: names, and what tells two values apart.
    shown: BTreeMap<String, String>,
    until: Instant,
    started: bool,
    ended: bool,
    _seat: OwnedSemaphorePermit,
}

impl Watch {
    async fn next(&mut self) -> Option<Batch> {
        if self.ended {
            return None;
        }
        let quiet = Instant::now() + QUIET;
        loop {
            let published = Arc::clone(&self.latest.borrow_and_update());
            let gateways = match self.followed {
                // A member that cannot say is like one without gateways: the next look may find them again.
                Followed::Gateways => self.service.gateways.list(false).await.map(|all| all.gateways),
                _ => Ok(Vec::new()),
            };
            let batch = self.step(&published, gateways.unwrap_or_default());
            let news = !batch.put.is_empty() || !batch.deleted.is_empty() || batch.end.is_some();
            if news || !self.started || Instant::now() >= quiet {
                self.started = true;
                self.ended = batch.end.is_some();
                return Some(batch);
            }
            let look = if self.followed == Followed::Gateways { (Instant::now() + LOOK).min(quiet) } else { quiet };
            let shutdown = self.service.shutdown.clone();
            let end = tokio::select! {
                changed = self.latest.changed() => changed.is_err().then_some("shutdown"),
                () = sleep_until(look) => None,
                () = sleep_until(self.until) => Some("expired"),
                () = shutdown.cancelled() => Some("shutdown"),
            };
            if end.is_some() {
                self.ended = true;
                return Some(Batch { end, ..self.empty(&published) });
            }
        }
    }

    fn empty(&self, published: &Published) -> Batch {
        let snapshot = &published.snapshot;
        Batch { revision: snapshot.revision, history_id: snapshot.history_id, ..Batch::default() }
    }

    /// What the reader does not have yet of `published`.
    fn step(&mut self, published: &Published, gateways: Vec<Seen>) -> Batch {
        let snapshot = &published.snapshot;
        let mut batch = self.empty(published);
        match &self.followed {
            Followed::Tokens => {
                let token = |token: &Arc<AdminToken>| {
                    (token.id.to_string(), token.mod_revision.to_string(), Object::Token(Arc::clone(token)))
                };
                let tokens: Vec<_> = snapshot.tokens.values().map(token).collect();
                self.compare(tokens, &mut batch);
            }
            Followed::Gateways => {
                let gateway = |seen: Seen| {
                    let name = format!("{}/{}", seen.record.gateway_id, seen.record.process_id);
                    let looks = format!("{} {}", seen.member, seen.record.looks());
                    (name, looks, Object::Gateway(Box::new(seen)))
                };
                let gateways: Vec<_> = gateways.into_iter().map(gateway).collect();
                self.compare(gateways, &mut batch);
            }
            Followed::Workers { .. } | Followed::Policies => self.follow(published, &mut batch),
        }
        batch
    }

    /// A list that the feed remembers.
    fn follow(&mut self, published: &Published, batch: &mut Batch) {
        let snapshot = &published.snapshot;
        let have = self.have.replace((Some(snapshot.history_id), snapshot.revision));
        let Some((history, revision)) = have else {
            match &self.followed {
                Followed::Workers { model } => {
                    let wanted = |worker: &&Arc<Worker>| model.as_ref().is_none_or(|model| serves(worker, model));
                    batch.put.extend(snapshot.workers.values().filter(wanted).cloned().map(Object::Worker));
                }
                _ => batch.put.extend(snapshot.policies.values().cloned().map(Object::Policy)),
            }
            return;
        };
        let history = history.unwrap_or(snapshot.history_id);
        if (history, revision) == (snapshot.history_id, snapshot.revision) {
            return;
        }
        let Some(delta) = self.service.feed.delta(history, revision, published) else {
            batch.end = Some("compacted");
            return;
        };
        match &self.followed {
            Followed::Workers { model } => {
                for worker in delta.upserted_workers {
                    if model.as_ref().is_none_or(|model| serves(&worker, model)) {
                        batch.put.push(Object::Worker(worker));
                    } else {
                        batch.deleted.push(worker.id.to_string());
                    }
                }
                batch.deleted.extend(delta.removed_workers.iter().map(ToString::to_string));
            }
            _ => {
                batch.put.extend(delta.upserted_policies.into_iter().map(Object::Policy));
                let name = |model: String| if model.is_empty() { "default".to_owned() } else { model };
                batch.deleted.extend(delta.removed_policies.into_iter().map(name));
            }
        }
    }

    /// A list without a past: what differs from what was shown.
    fn compare(&mut self, now: Vec<(String, String, Object)>, batch: &mut Batch) {
        let mut shown = BTreeMap::new();
        for (name, looks, object) in now {
            if self.shown.get(&name) != Some(&looks) {
                batch.put.push(object);
            }
            shown.insert(name, looks);
        }
        let gone = self.shown.keys().filter(|name| !shown.contains_key(*name));
        batch.deleted.extend(gone.cloned());
        self.shown = shown;
    }
}
