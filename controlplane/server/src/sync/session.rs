//! What one gateway is sent, and when: the pure part of a subscription.
//!
//! Invariants
//! * at most one message is un-acknowledged; the next one is computed from the acknowledged revision, so a slow gateway skips the states
//!   it missed instead of queueing them;
//! * a snapshot on its way is the one that all subscribers share, cut up as it is sent: however many gateways are slow, it is not copied;
//! * a refused revision is not sent again before [`Pauses::refused`] unless a newer one exists;
//! * a gateway that asks for everything over and over gets it at most once in [`Pauses::full`].

use std::time::Duration;

use bytes::Bytes;
use smg_fleet::Revision;
use smg_fleet::wire::delta_to_pb;
use smg_services::sync::{DeltaMessage, Down, FullChunk, down};
use tokio::time::Instant;
use uuid::Uuid;

use super::feed::{Feed, Published};

/// Largest part of a snapshot in one message, in bytes. A delta larger than this is sent as a full snapshot instead.
pub const CHUNK_BYTES: usize = 1024 * 1024;

/// How long a session waits before it repeats itself.
#[derive(Debug, Clone, Copy)]
pub struct Pauses {
    /// Before a refused revision is sent again.
    pub refused: Duration,
    /// Between two full snapshots that the gateway asks for.
    pub full: Duration,
}

/// What was sent and is not yet acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct InFlight {
    nonce: u64,
    history_id: Uuid,
    revision: Revision,
    sent_at: Instant,
    /// When the snapshot was published; absent when its age says nothing about propagation.
    published_at: Option<Instant>,
}

/// One gateway's subscription.
#[derive(Debug)]
pub struct Session {
    pauses: Pauses,
    acked: Option<(Uuid, Revision)>,
    in_flight: Option<InFlight>,
    refused: Option<(Revision, Instant)>,
    last_full: Option<Instant>,
    next_nonce: u64,
}

/// What to do now.
#[derive(Debug)]
pub enum Step {
    /// Send these, in this order.
    Send(Outgoing),
    /// Nothing before this instant, unless something changes.
    WaitUntil(Instant),
    /// Nothing until something changes.
    Wait,
}

/// What one step sends, made as it is taken.
#[derive(Debug)]
pub enum Outgoing {
    /// One message; `None` = it was taken.
    One(Option<Box<Down>>),
    /// A snapshot in parts.
    Parts {
        /// What it is acknowledged by.
        nonce: u64,
        /// Its revision.
        revision: Revision,
        /// What is left of it; `None` = the last part was taken.
        rest: Option<Bytes>,
    },
}

impl Iterator for Outgoing {
    type Item = Down;

    fn next(&mut self) -> Option<Down> {
        match self {
            Self::One(message) => message.take().map(|message| *message),
            Self::Parts { nonce, revision, rest } => {
                let mut left = rest.take()?;
                let data = left.split_to(left.len().min(CHUNK_BYTES)).to_vec();
                let last = left.is_empty();
                *rest = (!last).then_some(left);
                let (nonce, revision) = (*nonce, *revision);
                Some(down(down::Message::Full(FullChunk { nonce, revision, data, last })))
            }
        }
    }
}

impl Session {
    /// A session of a gateway that has `have`.
    pub fn new(pauses: Pauses, have: Option<(Uuid, Revision)>) -> Self {
        Self { pauses, acked: have, in_flight: None, refused: None, last_full: None, next_nonce: 1 }
    }

    /// When the un-acknowledged message was sent.
    pub fn unacked_since(&self) -> Option<Instant> {
        self.in_flight.map(|sent| sent.sent_at)
    }

    /// What to send given the newest snapshot.
    ///
    /// The first message after a connect may be an empty delta: its checksum tells the gateway whether what it has is what it should be.
    pub fn step(&mut self, feed: &Feed, latest: &Published, now: Instant) -> Step {
        let target = (latest.snapshot.history_id, latest.snapshot.revision);
        let first = self.next_nonce == 1;
        // A node that is behind what the gateway has must not take it back; an unnamed cluster has nothing to say yet.
        let behind = |have: (Uuid, Revision)| have.0 == target.0 && have.1 >= target.1;
        let up_to_date = self.acked.is_some_and(|have| behind(have) && !(first && have == target));
        if self.in_flight.is_some() || target.1 == 0 || up_to_date {
            return Step::Wait;
        }
        if let Some((revision, at)) = self.refused
            && revision == target.1
            && now < at + self.pauses.refused
        {
            return Step::WaitUntil(at + self.pauses.refused);
        }
        let delta = self.acked.and_then(|(history_id, revision)| feed.delta(history_id, revision, latest));
        if let Some(delta) = delta {
            let message = DeltaMessage { nonce: self.next_nonce, delta: Some(delta_to_pb(&delta)) };
            if prost::Message::encoded_len(&message) <= CHUNK_BYTES {
                self.sent(latest, now, !first);
                return Step::Send(Outgoing::One(Some(Box::new(down(down::Message::Delta(message))))));
            }
        }
        if let Some(last) = self.last_full
            && now < last + self.pauses.full
        {
            return Step::WaitUntil(last + self.pauses.full);
        }
        self.last_full = Some(now);
        let nonce = self.sent(latest, now, false);
        Step::Send(Outgoing::Parts { nonce, revision: target.1, rest: Some(latest.bytes.clone()) })
    }

    fn sent(&mut self, latest: &Published, now: Instant, measured: bool) -> u64 {
        let nonce = self.next_nonce;
        self.next_nonce += 1;
        self.in_flight = Some(InFlight {
            nonce,
            history_id: latest.snapshot.history_id,
            revision: latest.snapshot.revision,
            sent_at: now,
            published_at: measured.then_some(latest.at),
        });
        nonce
    }

    /// The gateway routes with what was sent under `nonce`. Returns its revision, and how long it took from publication when that was
    /// measured; `None` when nothing was sent under that nonce.
    pub fn ack(&mut self, nonce: u64, now: Instant) -> Option<(Revision, Option<Duration>)> {
        let sent = self.in_flight.take_if(|sent| sent.nonce == nonce)?;
        self.acked = Some((sent.history_id, sent.revision));
        self.refused = None;
        Some((sent.revision, sent.published_at.map(|at| now.saturating_duration_since(at))))
    }

    /// The gateway cannot use what was sent under `nonce` and keeps what it has. Returns the refused revision.
    pub fn nack(&mut self, nonce: u64, now: Instant) -> Option<Revision> {
        let sent = self.in_flight.take_if(|sent| sent.nonce == nonce)?;
        self.refused = Some((sent.revision, now));
        Some(sent.revision)
    }

    /// The gateway's copy cannot be trusted: it needs everything.
    pub fn resync(&mut self) {
        self.acked = None;
        self.in_flight = None;
    }
}

/// Wraps a message.
pub fn down(message: down::Message) -> Down {
    Down { message: Some(message) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use smg_fleet::{PolicyDocument, PolicyRecord, Snapshot, wire};

    use super::*;

    const PAUSES: Pauses = Pauses { refused: Duration::from_secs(5), full: Duration::from_secs(1) };

    fn snapshot(revision: Revision) -> Snapshot {
        let record = PolicyRecord {
            model: String::new(),
            document: PolicyDocument::default(),
            source: Default::default(),
            startup: None,
            mod_revision: revision,
        };
        Snapshot {
            history_id: Uuid::from_u128(1),
            revision,
            policies: [(String::new(), record.into())].into(),
            ..Default::default()
        }
    }

    fn feed(revisions: impl IntoIterator<Item = Revision>) -> Feed {
        let mut revisions = revisions.into_iter();
        let feed = Feed::starting(Published::forgetful(snapshot(revisions.next().unwrap())));
        revisions.for_each(|revision| feed.publish(Published::forgetful(snapshot(revision))));
        feed
    }

    fn step(session: &mut Session, feed: &Feed, now: Instant) -> Step {
        let latest = feed.subscribe().borrow().clone();
        session.step(feed, &latest, now)
    }

    fn delta_of(step: Step) -> (u64, u64, u64) {
        let Step::Send(mut messages) = step else { panic!("{step:?}") };
        let first = messages.next().unwrap();
        let Some(down::Message::Delta(message)) = &first.message else { panic!("{first:?}") };
        let delta = message.delta.as_ref().unwrap();
        (message.nonce, delta.from_revision, delta.to_revision)
    }

    fn is_full(step: &Step) -> bool {
        matches!(step, Step::Send(Outgoing::Parts { .. }))
    }

    #[test]
    fn a_new_gateway_gets_everything_and_then_what_changed_since_it_acknowledged() {
        let (feed, now) = (feed([3]), Instant::now());
        let mut session = Session::new(PAUSES, None);
        assert!(is_full(&step(&mut session, &feed, now)));
        feed.publish(Published::forgetful(snapshot(4)));
        feed.publish(Published::forgetful(snapshot(5)));
        assert!(matches!(step(&mut session, &feed, now), Step::Wait), "one message at a time");
        assert_eq!(session.ack(1, now), Some((3, None)));
        assert_eq!(delta_of(step(&mut session, &feed, now)), (2, 3, 5));
        let (revision, took) = session.ack(2, now + Duration::from_secs(1)).unwrap();
        assert_eq!(revision, 5);
        assert!(took.is_some());
        assert!(matches!(step(&mut session, &feed, now), Step::Wait));
    }

    #[test]
    fn a_returning_gateway_resumes_from_what_it_has_and_checks_it() {
        let feed = feed([3, 4, 5]);
        let history = Uuid::from_u128(1);
        for (have, delta) in [(4, (1, 4, 5)), (5, (1, 5, 5))] {
            let mut session = Session::new(PAUSES, Some((history, have)));
            assert_eq!(delta_of(step(&mut session, &feed, Instant::now())), delta);
        }
        for have in [(history, 2), (Uuid::from_u128(2), 5)] {
            let mut session = Session::new(PAUSES, Some(have));
            assert!(is_full(&step(&mut session, &feed, Instant::now())), "{have:?}");
        }
    }

    #[test]
    fn a_node_that_is_behind_sends_nothing_until_it_has_caught_up() {
        let feed = feed([3]);
        let mut session = Session::new(PAUSES, Some((Uuid::from_u128(1), 4)));
        assert!(matches!(step(&mut session, &feed, Instant::now()), Step::Wait));
        feed.publish(Published::forgetful(snapshot(4)));
        assert!(matches!(step(&mut session, &feed, Instant::now()), Step::Send(_)));
    }

    #[test]
    fn a_refused_revision_waits_for_a_newer_one_or_the_pause() {
        let (feed, now) = (feed([3]), Instant::now());
        let mut session = Session::new(PAUSES, Some((Uuid::from_u128(1), 3)));
        step(&mut session, &feed, now);
        session.ack(1, now);
        feed.publish(Published::forgetful(snapshot(4)));
        step(&mut session, &feed, now);
        assert_eq!(session.nack(2, now), Some(4));
        match step(&mut session, &feed, now) {
            Step::WaitUntil(at) => assert_eq!(at, now + PAUSES.refused),
            other => panic!("{other:?}"),
        }
        feed.publish(Published::forgetful(snapshot(5)));
        assert_eq!(delta_of(step(&mut session, &feed, now)), (3, 3, 5));
        session.nack(3, now);
        assert_eq!(delta_of(step(&mut session, &feed, now + PAUSES.refused)), (4, 3, 5));
    }

    #[test]
    fn a_gateway_that_distrusts_its_copy_gets_everything_but_not_in_a_loop() {
        let (feed, now) = (feed([3, 4]), Instant::now());
        let mut session = Session::new(PAUSES, Some((Uuid::from_u128(1), 3)));
        step(&mut session, &feed, now);
        session.resync();
        assert!(is_full(&step(&mut session, &feed, now)));
        session.resync();
        assert!(matches!(step(&mut session, &feed, now), Step::WaitUntil(_)));
        assert!(is_full(&step(&mut session, &feed, now + PAUSES.full)));
    }

    #[test]
    fn an_answer_to_another_message_changes_nothing() {
        let (feed, now) = (feed([3]), Instant::now());
        let mut session = Session::new(PAUSES, None);
        step(&mut session, &feed, now);
        assert_eq!(session.ack(7, now), None);
        assert_eq!(session.nack(0, now), None);
        assert!(session.unacked_since().is_some());
    }

    #[test]
    fn a_large_snapshot_comes_in_parts_that_make_the_whole() {
        let mut large = snapshot(3);
        for n in 0..40 {
            let model = format!("{n}-{}", "m".repeat(60_000));
            let record = PolicyRecord { model: model.clone(), ..PolicyRecord::clone(&large.policies[""]) };
            large.policies.insert(model, record.into());
        }
        let feed = Feed::starting(Published::forgetful(large.clone()));
        let Step::Send(messages) = step(&mut Session::new(PAUSES, None), &feed, Instant::now()) else { panic!() };
        let Outgoing::Parts { rest: Some(rest), .. } = &messages else { panic!("{messages:?}") };
        let published = feed.subscribe().borrow().bytes.clone();
        assert_eq!(rest.as_ptr(), published.as_ptr(), "what is not sent yet is nobody's copy");
        let messages: Vec<Down> = messages.collect();
        assert!(messages.len() > 2);
        let mut bytes = Vec::new();
        for (index, message) in messages.iter().enumerate() {
            let Some(down::Message::Full(chunk)) = &message.message else { panic!() };
            assert!(chunk.data.len() <= CHUNK_BYTES);
            assert_eq!(chunk.last, index + 1 == messages.len());
            bytes.extend_from_slice(&chunk.data);
        }
        assert_eq!(wire::decode_snapshot(&bytes).unwrap(), large);
    }
}
