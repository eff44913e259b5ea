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

/// What the control plane answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Update {
    /// The epoch of the session.
    pub epoch: u64,
    /// When the report that it answers was sent, on the gateway's clock.
    pub echo: Option<Duration>,
    /// What is new.
    pub grants: Vec<Grant>,
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
            heard: None,
            shares: BTreeMap::new(),
            reported: BTreeMap::new(),
        }
    }

    /// Most slots of `worker` in use at `now`.
    pub fn limit(&self, worker: WorkerKey, now: Duration) -> u32 {
        let Some(share) = self.shares.get(&worker) else { return 0 };
        let Some(age) = self.heard.map(|heard| now.saturating_sub(heard)) else { return 0 };
        if age < self.times.at_gateway(self.times.float) {
            share.limit
        } else if age < self.times.at_gateway(self.times.anchor) || self.hold {
            share.limit.min(share.anchored)
        } else {
            0
        }
    }

    /// When limits change next because nothing was heard.
    pub fn next_expiry(&self, now: Duration) -> Option<Duration> {
        let heard = self.heard?;
        let ends = [self.times.float, self.times.anchor].map(|time| heard + self.times.at_gateway(time));
        ends.into_iter().find(|end| *end > now)
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

    /// The next report. `use_of` gives slots in use, and slots in use or waited for. With `all`, it says everything again, which is due
    /// whenever an earlier report may have been lost.
    pub fn report(
        &mut self,
        workers: impl Iterator<Item = WorkerKey>,
        use_of: impl Fn(WorkerKey) -> (u32, u32),
        all: bool,
    ) -> Report {
        self.number += 1;
        let mut rows = Vec::new();
        for worker in workers {
            let (in_use, wants) = use_of(worker);
            let applied = self.shares.get(&worker).map_or(0, |share| share.seq);
            let row = ReportRow { worker, applied, in_use, wants };
            if all || self.reported.get(&worker) != Some(&row) {
                self.reported.insert(worker, row);
                rows.push(row);
            }
        }
        let (gateway, process) = (self.gateway.clone(), self.process);
        Report { gateway, process, epoch: self.epoch, number: self.number, rows }
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
