//! What a gateway may use of each decode worker: what it was told, and how long ago the control plane was heard of.
//!
//! Slots float or are anchored. Floating ones end with a short lease, so that the slots of a dead gateway soon serve others; anchored ones
//! last, so that a gateway serves on while the control plane is away.
//!
//! Invariants
//! * a lease runs from the *sending* of the last report that was answered, on this machine's clock, suspended time included, and ends here
//!   before it ends at the control plane, whatever the two clocks' rates are within [`Times::drift`];
//! * updates count in their order only, and what was told in an earlier epoch not at all.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::ledger::{Grant, Report, ReportRow};
use crate::mutant::{Mutant, planted};
use crate::{ProcessId, WorkerKey};

/// How long leases last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Times {
    /// The short lease.
    pub float: Duration,
    /// The long one.
    pub anchor: Duration,
    /// How much faster or slower than true a clock may run, in parts per thousand.
    pub drift: u32,
    /// What a gateway's lease is shorter for besides.
    pub margin: Duration,
}

impl Default for Times {
    fn default() -> Self {
        Self {
            float: Duration::from_secs(10),
            anchor: Duration::from_secs(900),
            drift: 2,
            margin: Duration::from_millis(250),
        }
    }
}

impl Times {
    /// How long a lease of `time` lasts for the gateway.
    pub fn at_gateway(&self, time: Duration) -> Duration {
        if planted(Mutant::LeaseWithoutMargin) {
            return time + time * (2 * self.drift) / 1000 + self.margin * 3;
        }
        (time - time * self.drift / 1000).saturating_sub(self.margin)
    }

    /// How long it lasts for the control plane.
    pub fn at_control_plane(&self, time: Duration) -> Duration {
        if planted(Mutant::ExpiredEarly) {
            return (time - time * (3 * self.drift) / 1000).saturating_sub(self.margin * 3 + Duration::from_secs(4));
        }
        time + time * self.drift / 1000
    }
}

/// How much of a share counts, by how long ago the control plane was heard of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// All of it.
    Whole,
    /// The anchored part.
    Anchored,
    /// Nothing.
    Nothing,
}

impl Standing {
    /// Most slots in use.
    pub fn of(self, limit: u32, anchored: u32) -> u32 {
        match self {
            Self::Whole => limit,
            Self::Anchored => limit.min(anchored),
            Self::Nothing => 0,
        }
    }
}

/// What the control plane answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Update {
    /// The epoch of the session.
    pub epoch: u64,
    /// When the report that it answers was sent, on the gateway's clock.
    pub echo: Option<Duration>,
    /// What is new.
    pub grants: Vec<Grant>,
    /// To be repeated in the reports that follow; 0 = nothing is asked.
    pub mark: u64,
}

/// What one gateway was told of one worker.
#[derive(Debug, Clone, Copy, Default)]
struct Share {
    limit: u32,
    anchored: u32,
    seq: u64,
}

/// What one gateway may use.
#[derive(Debug)]
pub struct Shares {
    gateway: String,
    process: ProcessId,
    times: Times,
    /// Whether anchored slots are kept when even their lease is over.
    hold: bool,
    epoch: u64,
    number: u64,
    mark: u64,
    /// When the last report that was answered had been sent.
    heard: Option<Duration>,
    shares: BTreeMap<WorkerKey, Share>,
    reported: BTreeMap<WorkerKey, ReportRow>,
}

impl Shares {
    /// A process that holds nothing. `hold`: serve on from anchored slots for ever rather than stop.
    pub fn new(gateway: &str, process: ProcessId, times: Times, hold: bool) -> Self {
        Self {
            gateway: gateway.to_owned(),
            process,
            times,
            hold,
            epoch: 0,
            number: 0,
            mark: 0,
            heard: None,
            shares: BTreeMap::new(),
            reported: BTreeMap::new(),
        }
    }

    /// Most slots of `worker` in use at `now`.
    pub fn limit(&self, worker: WorkerKey, now: Duration) -> u32 {
        let Some(share) = self.shares.get(&worker) else { return 0 };
        self.standing(now).of(share.limit, share.anchored)
    }

    /// How much of the shares counts at `now`.
    pub fn standing(&self, now: Duration) -> Standing {
        let Some([float, anchor]) = self.ends() else { return Standing::Nothing };
        if now < float {
            Standing::Whole
        } else if now < anchor || self.hold {
            Standing::Anchored
        } else {
            Standing::Nothing
        }
    }

    /// When the leases end, the short one and the long one; `None` when nothing was ever heard.
    pub fn ends(&self) -> Option<[Duration; 2]> {
        let heard = self.heard?;
        Some([self.times.float, self.times.anchor].map(|time| heard + self.times.at_gateway(time)))
    }

    /// What was told of `worker`: the limit and its anchored part.
    pub fn told(&self, worker: WorkerKey) -> (u32, u32) {
        self.shares.get(&worker).map_or((0, 0), |share| (share.limit, share.anchored))
    }

    /// The session that it is in.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// A new stream begins: marks count from the beginning.
    pub fn forget_mark(&mut self) {
        self.mark = 0;
    }

    /// The last mark that it was sent.
    pub fn mark(&self) -> u64 {
        self.mark
    }

    /// Which run of the gateway this is.
    pub fn process(&self) -> ProcessId {
        self.process
    }

    /// When the last report that was answered had been sent.
    pub fn heard(&self) -> Option<Duration> {
        self.heard
    }

    /// The leases, which are the control plane's to choose.
    pub fn set_times(&mut self, float: Duration, anchor: Duration) {
        (self.times.float, self.times.anchor) = (float, anchor);
    }

    /// Whether anchored slots are kept when even their lease is over.
    pub fn set_hold(&mut self, hold: bool) {
        self.hold = hold;
    }

    /// Everything that it was told, to be kept.
    pub fn grants(&self) -> Vec<Grant> {
        let grant = |(worker, share): (&WorkerKey, &Share)| Grant {
            gateway: self.gateway.clone(),
            process: self.process,
            epoch: self.epoch,
            worker: *worker,
            seq: share.seq,
            limit: share.limit,
            anchored: share.anchored,
        };
        self.shares.iter().map(grant).collect()
    }

    /// Goes on as the process that these were told to, which has ended, and of which nothing runs any more. Its reports are to have larger
    /// numbers than any of that process: `number` and above.
    pub fn resume(&mut self, process: ProcessId, epoch: u64, number: u64, heard: Duration, grants: &[Grant]) {
        (self.process, self.epoch, self.number, self.heard) = (process, epoch, number, Some(heard));
        let share = |grant: &Grant| Share { limit: grant.limit, anchored: grant.anchored, seq: grant.seq };
        self.shares = grants.iter().map(|grant| (grant.worker, share(grant))).collect();
        self.reported.clear();
    }

    /// When limits change next because nothing was heard.
    pub fn next_expiry(&self, now: Duration) -> Option<Duration> {
        self.ends()?.into_iter().find(|end| *end > now)
    }

    /// Takes in an answer. True if something was learned that is to be reported at once.
    pub fn apply(&mut self, update: &Update, now: Duration) -> bool {
        if update.epoch < self.epoch {
            return false;
        }
        if let Some(echo) = update.echo {
            let heard = if planted(Mutant::LeaseFromAnswer) { now } else { echo };
            self.heard = Some(self.heard.map_or(heard, |before| before.max(heard)));
        }
        self.mark = self.mark.max(update.mark);
        if update.epoch > self.epoch {
            self.epoch = update.epoch;
            // What was told before counts for nothing: the answer that renews the lease must not renew slots that were taken meanwhile.
            self.shares.values_mut().for_each(|share| *share = Share::default());
            self.reported.clear();
        }
        let mut news = false;
        for grant in update.grants.iter().filter(|grant| grant.process == self.process) {
            let share = self.shares.entry(grant.worker).or_default();
            if grant.seq > share.seq || planted(Mutant::UpdatesOutOfOrder) {
                *share = Share { limit: grant.limit, anchored: grant.anchored, seq: grant.seq };
                news = true;
            }
        }
        news
    }

    /// The next report. `use_of` gives slots in use, slots in use or waited for, and requests that were surely in the engine ever since the
    /// last report. With `all`, it says everything again, which is due whenever an earlier report may have been lost.
    pub fn report(
        &mut self,
        workers: impl Iterator<Item = WorkerKey>,
        use_of: impl Fn(WorkerKey) -> (u32, u32, u32),
        all: bool,
    ) -> Report {
        self.number += 1;
        let mut rows = Vec::new();
        for worker in workers {
            let (in_use, wants, surely) = use_of(worker);
            let applied = self.shares.get(&worker).map_or(0, |share| share.seq);
            let row = ReportRow { worker, applied, in_use, wants, surely };
            let known = ReportRow { surely: 0, ..row };
            if all || surely > 0 || self.reported.get(&worker) != Some(&known) {
                self.reported.insert(worker, known);
                rows.push(row);
            }
        }
        let (gateway, process) = (self.gateway.clone(), self.process);
        Report { gateway, process, epoch: self.epoch, number: self.number, rows, leaving: false, mark: self.mark }
    }

    /// Forgets a worker that left the fleet.
    pub fn forget(&mut self, worker: WorkerKey) {
        self.shares.remove(&worker);
        self.reported.remove(&worker);
    }
}

#[cfg(test)]
#[path = "share_test.rs"]
mod tests;
