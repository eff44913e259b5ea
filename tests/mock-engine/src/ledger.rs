//! The KV ledger of a prefill engine: which prompt's KV it holds, for whom, and whether it was fetched.
//!
//! Invariants:
//! - KV is handed out only after the prefill of exactly that prompt has finished;
//! - a key (bootstrap room, request id, transfer id) is used by one prefill and fetched by one decode, once;
//! - a decode that waits for a key fails as soon as its prefill goes away, and the other way round;
//! - the ledger is bounded: the oldest finished keys are forgotten first.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::text::Prompt;

/// Keys remembered, finished ones included.
const REMEMBERED: usize = 65_536;

/// What a piece of KV is filed under.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum Key {
    /// SGLang `bootstrap_room`.
    Room(u64),
    /// vLLM NIXL `remote_request_id`.
    Request(String),
    /// vLLM Mooncake or MoRI-IO `transfer_id`.
    Transfer(String),
}

/// The KV of one prompt.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kv {
    pub(crate) prompt: Prompt,
    /// Data parallel rank that computed it, when one was asked for.
    pub(crate) rank: Option<u64>,
}

#[derive(Clone, Debug)]
enum Phase {
    /// A decode asks for it, no prefill yet.
    Awaited,
    Computing,
    Ready(Kv, Instant),
    Taken,
    Failed(String),
}

struct Slot {
    phase: watch::Sender<Phase>,
    /// Which sides have come: each may come once.
    sides: Mutex<Sides>,
}

#[derive(Default)]
struct Sides {
    prefill: bool,
    decode: bool,
}

impl Slot {
    fn fail(&self, reason: &str) {
        self.phase.send_if_modified(|phase| {
            let open = !matches!(phase, Phase::Taken | Phase::Failed(_));
            if open {
                *phase = Phase::Failed(reason.to_owned());
            }
            open
        });
    }
}

#[derive(Default)]
struct Slots {
    by_key: HashMap<Key, Arc<Slot>>,
    in_order: VecDeque<Key>,
}

/// See the module's head.
pub(crate) struct Ledger {
    slots: Mutex<Slots>,
    /// How long a side waits for the other, and how long unfetched KV is kept.
    patience: Duration,
}

impl Ledger {
    pub(crate) fn new(patience: Duration) -> Self {
        Ledger { slots: Mutex::default(), patience }
    }

    fn slot(&self, key: &Key) -> Arc<Slot> {
        let mut slots = self.slots.lock();
        if let Some(slot) = slots.by_key.get(key) {
            return Arc::clone(slot);
        }
        let slot = Arc::new(Slot { phase: watch::Sender::new(Phase::Awaited), sides: Mutex::default() });
        slots.by_key.insert(key.clone(), Arc::clone(&slot));
        slots.in_order.push_back(key.clone());
        if slots.in_order.len() > REMEMBERED
            && let Some(oldest) = slots.in_order.pop_front()
            && let Some(slot) = slots.by_key.remove(&oldest)
        {
            slot.fail("the engine has forgotten this transfer");
        }
        slot
    }

    /// The prefill side begins to compute what `key` stands for.
    pub(crate) fn begin(&self, key: &Key) -> Result<Hold, String> {
        let slot = self.slot(key);
        {
            let mut sides = slot.sides.lock();
            if sides.prefill {
                return Err(format!("{key:?} is in use or was used before"));
            }
            sides.prefill = true;
        }
        let mut failed = None;
        slot.phase.send_modify(|phase| match phase {
            Phase::Failed(reason) => failed = Some(reason.clone()),
            other => *other = Phase::Computing,
        });
        match failed {
            Some(reason) => Err(reason),
            None => Ok(Hold { slot, kept: false, until: Instant::now() + self.patience }),
        }
    }

    /// The decode side fetches the KV of `prompt`, once. With `wait` it waits for a prefill still to come or to finish.
    pub(crate) async fn take(&self, key: &Key, prompt: u64, rank: Option<u64>, wait: bool) -> Result<Kv, String> {
        if !wait && !self.slots.lock().by_key.contains_key(key) {
            return Err(format!("{key:?} is not known here"));
        }
        let slot = self.slot(key);
        {
            let mut sides = slot.sides.lock();
            if sides.decode {
                return Err(format!("{key:?} was fetched before"));
            }
            sides.decode = true;
        }
        // A decode that stops waiting, for whatever reason, leaves a prefill that nobody will ever collect.
        let waiting = FailOnDrop(&slot, "the decode engine went away");
        let mut phases = slot.phase.subscribe();
        let settled = |phase: &Phase| !wait || !matches!(phase, Phase::Awaited | Phase::Computing);
        let phase = match tokio::time::timeout(self.patience, phases.wait_for(settled)).await {
            Err(_) => Err("no prefill has finished this transfer in time".to_owned()),
            Ok(Err(_)) => Err("the engine is gone".to_owned()),
            Ok(Ok(phase)) => Ok(phase.clone()),
        };
        let result = phase.and_then(|phase| match phase {
            Phase::Ready(_, since) if since.elapsed() > self.patience => Err("the KV has expired".to_owned()),
            Phase::Ready(kv, _) if kv.prompt.digest != prompt => Err("the KV belongs to another prompt".to_owned()),
            Phase::Ready(kv, _) if rank.is_some() && kv.rank.is_some() && kv.rank != rank => {
                Err("the KV was computed by another data parallel rank".to_owned())
            }
            Phase::Ready(kv, _) => Ok(kv),
            Phase::Failed(reason) => Err(reason),
            Phase::Taken => Err("the KV was fetched before".to_owned()),
            Phase::Awaited | Phase::Computing => Err("the prefill has not finished".to_owned()),
        });
        match &result {
            Ok(_) => {
                slot.phase.send_replace(Phase::Taken);
            }
            Err(reason) => slot.fail(reason),
        }
        drop(waiting);
        result
    }

    /// Pieces of KV that are ready and that no decode has fetched.
    pub(crate) fn held(&self) -> usize {
        let ready = |slot: &&Arc<Slot>| matches!(&*slot.phase.borrow(), Phase::Ready(_, since) if since.elapsed() <= self.patience);
        self.slots.lock().by_key.values().filter(ready).count()
    }

    /// Fails everything that is open, as an engine's death does.
    pub(crate) fn fail_all(&self, reason: &str) {
        for slot in self.slots.lock().by_key.values() {
            slot.fail(reason);
        }
    }
}

struct FailOnDrop<'a>(&'a Slot, &'static str);

impl Drop for FailOnDrop<'_> {
    fn drop(&mut self) {
        self.0.fail(self.1);
    }
}

/// The prefill side's grip on a key. Dropping it before the KV was fetched aborts the transfer, unless it is kept.
pub(crate) struct Hold {
    slot: Arc<Slot>,
    kept: bool,
    until: Instant,
}

impl Hold {
    /// The prompt is computed; its KV can be fetched from now on.
    pub(crate) fn ready(&self, kv: Kv) {
        self.slot.phase.send_if_modified(|phase| {
            let open = matches!(phase, Phase::Computing);
            if open {
                *phase = Phase::Ready(kv, Instant::now());
            }
            open
        });
    }

    /// Waits until a decode has fetched the KV.
    pub(crate) async fn taken(&self) -> Result<(), String> {
        let mut phases = self.slot.phase.subscribe();
        let settled = |phase: &Phase| matches!(phase, Phase::Taken | Phase::Failed(_));
        match tokio::time::timeout_at(self.until.into(), phases.wait_for(settled)).await {
            Err(_) => Err("no decode engine has fetched the KV in time".to_owned()),
            Ok(Err(_)) => Err("the engine is gone".to_owned()),
            Ok(Ok(phase)) => match &*phase {
                Phase::Failed(reason) => Err(reason.clone()),
                _ => Ok(()),
            },
        }
    }

    /// Leaves the KV in the ledger after the prefill's answer is out (vLLM frees its blocks only on fetch or expiry).
    pub(crate) fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if !self.kept {
            self.slot.fail("the prefill was aborted before its KV was fetched");
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const PROMPT: Prompt = Prompt { digest: 7, tokens: 3 };
    const KV: Kv = Kv { prompt: PROMPT, rank: None };

    #[tokio::test(start_paused = true)]
    async fn kv_is_handed_out_once_and_only_when_ready() {
        let ledger = Ledger::new(Duration::from_secs(1));
        let key = Key::Room(1);
        let hold = ledger.begin(&key).unwrap();
        let mut early = Box::pin(ledger.take(&key, 7, None, true));
        assert!(futures::poll!(&mut early).is_pending());
        hold.ready(KV);
        assert_eq!(ledger.held(), 1);
        early.await.unwrap();
        hold.taken().await.unwrap();
        assert_eq!(ledger.held(), 0);
        assert!(ledger.take(&key, 7, None, true).await.is_err());
        assert!(ledger.begin(&key).is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_decode_fails_when_its_prefill_never_comes_goes_away_or_had_another_prompt() {
        let ledger = Ledger::new(Duration::from_secs(1));
        assert!(ledger.take(&Key::Room(1), 7, None, true).await.is_err());

        let hold = ledger.begin(&Key::Room(2)).unwrap();
        let key = Key::Room(2);
        let mut waiting = Box::pin(ledger.take(&key, 7, None, true));
        assert!(futures::poll!(&mut waiting).is_pending());
        drop(hold);
        assert!(waiting.await.is_err());

        let hold = ledger.begin(&Key::Room(3)).unwrap();
        hold.ready(KV);
        assert!(ledger.take(&Key::Room(3), 8, None, true).await.is_err());
        assert!(hold.taken().await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_prefill_fails_when_its_decode_goes_away() {
        let ledger = Ledger::new(Duration::from_secs(1));
        let key = Key::Room(1);
        let mut waiting = Box::pin(ledger.take(&key, 7, None, true));
        assert!(futures::poll!(&mut waiting).is_pending());
        drop(waiting);
        assert!(ledger.begin(&key).is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn of_two_decodes_that_wait_for_one_key_one_gets_the_kv() {
        let ledger = Ledger::new(Duration::from_secs(1));
        let key = Key::Room(1);
        let mut first = Box::pin(ledger.take(&key, 7, None, true));
        assert!(futures::poll!(&mut first).is_pending());
        assert!(ledger.take(&key, 7, None, true).await.is_err());
        ledger.begin(&key).unwrap().ready(KV);
        assert!(first.await.is_err(), "the prefill has dropped its hold");

        let key = Key::Room(2);
        let mut first = Box::pin(ledger.take(&key, 7, None, true));
        assert!(futures::poll!(&mut first).is_pending());
        assert!(ledger.take(&key, 7, None, true).await.is_err());
        let hold = ledger.begin(&key).unwrap();
        hold.ready(KV);
        first.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn who_does_not_wait_gets_nothing_before_the_prefill_has_finished() {
        let ledger = Ledger::new(Duration::from_secs(1));
        let key = Key::Request("r".to_owned());
        assert!(ledger.take(&key, 7, None, false).await.is_err());
        let _hold = ledger.begin(&key).unwrap();
        assert!(ledger.take(&key, 7, None, false).await.is_err());
    }
}
