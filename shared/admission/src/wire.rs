//! Disk and wire form of the ledger, of what is reported and of what is told. Canonical: equal values have equal bytes.

use std::time::Duration;

use smg_messages::admission as pb;
use thiserror::Error;

use crate::ledger::{Event, Grant, Ledger, Report, ReportRow, Session};
use crate::pool::{Counters, Pool, Row, Zombie};
use crate::share::Update;

/// A message cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("field {0} is missing or malformed")]
pub struct WireError(pub &'static str);

fn key(bytes: &[u8], field: &'static str) -> Result<u128, WireError> {
    bytes.try_into().map(u128::from_be_bytes).map_err(|_| WireError(field))
}

fn bytes(key: u128) -> Vec<u8> {
    key.to_be_bytes().to_vec()
}

/// A report as a message; `sent` on the gateway's clock.
pub fn report_to_pb(report: &Report, sent: Duration) -> pb::Report {
    pb::Report {
        gateway: report.gateway.clone(),
        process: bytes(report.process),
        epoch: report.epoch,
        number: report.number,
        rows: report
            .rows
            .iter()
            .map(|row| pb::ReportRow {
                worker: bytes(row.worker),
                applied: row.applied,
                in_use: row.in_use,
                wants: row.wants,
                surely: row.surely,
            })
            .collect(),
        sent_micros: u64::try_from(sent.as_micros()).unwrap_or(u64::MAX),
        leaving: report.leaving,
        mark: report.mark,
    }
}

/// A report from a message, and when it was sent.
///
/// # Errors
/// When a field is malformed.
pub fn report_from_pb(report: pb::Report) -> Result<(Report, Duration), WireError> {
    let row = |row: pb::ReportRow| {
        let worker = key(&row.worker, "report.worker")?;
        let (applied, in_use, wants, surely) = (row.applied, row.in_use, row.wants, row.surely);
        Ok(ReportRow { worker, applied, in_use, wants, surely })
    };
    let sent = Duration::from_micros(report.sent_micros);
    Ok((
        Report {
            process: key(&report.process, "report.process")?,
            gateway: report.gateway,
            epoch: report.epoch,
            number: report.number,
            rows: report.rows.into_iter().map(row).collect::<Result<_, _>>()?,
            leaving: report.leaving,
            mark: report.mark,
        },
        sent,
    ))
}

/// What a gateway is told, as a message.
pub fn update_to_pb(update: &Update, float: Duration, anchor: Duration) -> pb::Update {
    let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    pb::Update {
        epoch: update.epoch,
        echo_micros: update.echo.map(|echo| u64::try_from(echo.as_micros()).unwrap_or(u64::MAX)),
        grants: update.grants.iter().map(grant_to_pb).collect(),
        float_millis: millis(float),
        anchor_millis: millis(anchor),
        mark: update.mark,
    }
}

/// What is told of one worker, as a message.
pub fn grant_to_pb(grant: &Grant) -> pb::Grant {
    pb::Grant { worker: bytes(grant.worker), seq: grant.seq, limit: grant.limit, anchored: grant.anchored }
}

/// What `gateway` was told of one worker.
///
/// # Errors
/// When a field is malformed.
pub fn grant_from_pb(grant: &pb::Grant, gateway: &str, process: u128, epoch: u64) -> Result<Grant, WireError> {
    Ok(Grant {
        gateway: gateway.to_owned(),
        process,
        epoch,
        worker: key(&grant.worker, "grant.worker")?,
        seq: grant.seq,
        limit: grant.limit,
        anchored: grant.anchored,
    })
}

/// What a gateway is told, from a message on its own stream.
///
/// # Errors
/// When a field is malformed.
pub fn update_from_pb(update: pb::Update, gateway: &str, process: u128) -> Result<Update, WireError> {
    let epoch = update.epoch;
    let grants = update.grants.iter().map(|grant| grant_from_pb(grant, gateway, process, epoch));
    let grants = grants.collect::<Result<_, _>>()?;
    Ok(Update { epoch, echo: update.echo_micros.map(Duration::from_micros), grants, mark: update.mark })
}

/// An event as a message.
pub fn event_to_pb(event: &Event) -> pb::Event {
    use pb::event::Event as Pb;
    let event = match event {
        Event::Window(worker, window) => Pb::Window(pb::Window { worker: bytes(*worker), window: *window }),
        Event::Foreign(worker, slots) => Pb::Foreign(pb::Foreign { worker: bytes(*worker), slots: *slots }),
        Event::Report(report) => Pb::Report(report_to_pb(report, Duration::ZERO)),
        Event::FloatExpired(gateway) => Pb::FloatExpired(gateway.clone()),
        Event::AnchorExpired(gateway) => Pb::AnchorExpired(gateway.clone()),
        Event::AnchorsFollow => Pb::AnchorsFollow(pb::AnchorsFollow {}),
        Event::ZombiesEnded(worker, ids) => {
            Pb::ZombiesEnded(pb::ZombiesEnded { worker: bytes(*worker), ids: ids.clone() })
        }
        Event::Fenced(worker, process) => Pb::Fenced(pb::Fenced { worker: bytes(*worker), process: bytes(*process) }),
        Event::Evidence { worker, last, occupied } => {
            Pb::Evidence(pb::Evidence { worker: bytes(*worker), last: *last, occupied: *occupied })
        }
    };
    pb::Event { event: Some(event) }
}

/// An event from a message. One this version does not know is an error: it must never be skipped.
///
/// # Errors
/// When a field is missing or malformed.
pub fn event_from_pb(event: pb::Event) -> Result<Event, WireError> {
    use pb::event::Event as Pb;
    Ok(match event.event.ok_or(WireError("event"))? {
        Pb::Window(window) => Event::Window(key(&window.worker, "window.worker")?, window.window),
        Pb::Foreign(foreign) => Event::Foreign(key(&foreign.worker, "foreign.worker")?, foreign.slots),
        Pb::Report(report) => Event::Report(report_from_pb(report)?.0),
        Pb::FloatExpired(gateway) => Event::FloatExpired(gateway),
        Pb::AnchorExpired(gateway) => Event::AnchorExpired(gateway),
        Pb::AnchorsFollow(pb::AnchorsFollow {}) => Event::AnchorsFollow,
        Pb::ZombiesEnded(ended) => Event::ZombiesEnded(key(&ended.worker, "ended.worker")?, ended.ids),
        Pb::Fenced(fenced) => {
            Event::Fenced(key(&fenced.worker, "fenced.worker")?, key(&fenced.process, "fenced.process")?)
        }
        Pb::Evidence(evidence) => Event::Evidence {
            worker: key(&evidence.worker, "evidence.worker")?,
            last: evidence.last,
            occupied: evidence.occupied,
        },
    })
}

/// A ledger as a message.
pub fn ledger_to_pb(ledger: &Ledger) -> pb::Ledger {
    pb::Ledger {
        rounds: ledger.rounds,
        last_seq: ledger.counters.seq,
        last_zombie: ledger.counters.zombie,
        last_epoch: ledger.counters.epoch,
        sessions: ledger
            .sessions
            .iter()
            .map(|(gateway, session)| pb::Session {
                gateway: gateway.clone(),
                process: bytes(session.process),
                epoch: session.epoch,
                number: session.number,
                heard: session.heard,
                replaced: session.replaced.iter().map(|process| bytes(*process)).collect(),
            })
            .collect(),
        pools: ledger.pools.iter().map(|(worker, pool)| pool_to_pb(*worker, pool)).collect(),
    }
}

fn pool_to_pb(worker: u128, pool: &Pool) -> pb::Pool {
    pb::Pool {
        worker: bytes(worker),
        window: pool.window,
        foreign: pool.foreign,
        rows: pool
            .rows
            .iter()
            .map(|(gateway, row)| pb::Row {
                gateway: gateway.clone(),
                share: row.share,
                anchored: row.anchored,
                limit: row.limit,
                anchored_told: row.anchored_told,
                seq: row.seq,
                in_use: row.in_use,
                wants: row.wants,
                member: row.member,
                steady: row.steady,
                followed: row.followed,
            })
            .collect(),
        zombies: pool
            .zombies
            .iter()
            .map(|zombie| pb::Zombie {
                id: zombie.id,
                slots: zombie.slots,
                gateway: zombie.gateway.clone(),
                process: bytes(zombie.process),
            })
            .collect(),
    }
}

/// A ledger from a message.
///
/// # Errors
/// When a field is malformed.
pub fn ledger_from_pb(ledger: pb::Ledger) -> Result<Ledger, WireError> {
    let session = |session: pb::Session| {
        let replaced =
            session.replaced.iter().map(|process| key(process, "session.replaced")).collect::<Result<_, _>>()?;
        let process = key(&session.process, "session.process")?;
        let (epoch, number, heard) = (session.epoch, session.number, session.heard);
        Ok((session.gateway, Session { process, epoch, number, heard, replaced }))
    };
    Ok(Ledger {
        rounds: ledger.rounds,
        counters: Counters { seq: ledger.last_seq, zombie: ledger.last_zombie, epoch: ledger.last_epoch },
        sessions: ledger.sessions.into_iter().map(session).collect::<Result<_, _>>()?,
        pools: ledger.pools.into_iter().map(pool_from_pb).collect::<Result<_, _>>()?,
    })
}

fn pool_from_pb(pool: pb::Pool) -> Result<(u128, Pool), WireError> {
    let row = |row: pb::Row| {
        let (share, anchored, limit, anchored_told) = (row.share, row.anchored, row.limit, row.anchored_told);
        let (seq, in_use, wants, member) = (row.seq, row.in_use, row.wants, row.member);
        let (steady, followed) = (row.steady, row.followed);
        (row.gateway, Row { share, anchored, limit, anchored_told, seq, in_use, wants, member, steady, followed })
    };
    let zombie = |zombie: pb::Zombie| {
        let process = key(&zombie.process, "zombie.process")?;
        Ok(Zombie { id: zombie.id, slots: zombie.slots, gateway: zombie.gateway, process })
    };
    let worker = key(&pool.worker, "pool.worker")?;
    let zombies = pool.zombies.into_iter().map(zombie).collect::<Result<_, _>>()?;
    let (window, foreign) = (pool.window, pool.foreign);
    Ok((worker, Pool { window, foreign, rows: pool.rows.into_iter().map(row).collect(), zombies }))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_ledger_in_use_survives_its_encoding() {
        let mut ledger = Ledger::default();
        let report = |number, process| {
            let rows = vec![ReportRow { worker: 7, applied: 0, in_use: 3, wants: 5, surely: 2 }];
            let gateway = "a".to_owned();
            Event::Report(Report { gateway, process, epoch: 0, number, rows, leaving: false, mark: 0 })
        };
        let follow = Event::AnchorsFollow;
        let events = [Event::Window(7, Some(32)), Event::Foreign(7, 2), report(1, 1), follow, report(2, 2)];
        events.iter().for_each(|event| drop(ledger.round(std::slice::from_ref(event))));
        assert!(!ledger.pools()[&7].zombies().is_empty() || !ledger.pools()[&7].rows().is_empty());
        assert_eq!(ledger_from_pb(ledger_to_pb(&ledger)).unwrap(), ledger);
    }

    #[test]
    fn events_survive_their_encoding() {
        let events = [
            Event::Window(1, None),
            Event::Window(1, Some(9)),
            Event::Foreign(2, 3),
            Event::FloatExpired("a".to_owned()),
            Event::AnchorExpired("b".to_owned()),
            Event::AnchorsFollow,
            Event::ZombiesEnded(3, vec![1, 2]),
            Event::Fenced(4, 5),
            Event::Evidence { worker: 6, last: 7, occupied: 8 },
        ];
        for event in events {
            assert_eq!(event_from_pb(event_to_pb(&event)).unwrap(), event);
        }
        assert_eq!(event_from_pb(pb::Event { event: None }), Err(WireError("event")));
        let short = pb::Window { worker: vec![1], window: None };
        let event = pb::Event { event: Some(pb::event::Event::Window(short)) };
        assert_eq!(event_from_pb(event), Err(WireError("window.worker")));
    }

    #[test]
    fn updates_and_reports_survive_their_encoding() {
        let rows = vec![ReportRow { worker: 7, applied: 4, in_use: 3, wants: 5, surely: 2 }];
        let gateway = "a".to_owned();
        let report = Report { gateway, process: 9, epoch: 2, number: 3, rows, leaving: true, mark: 4 };
        let sent = Duration::from_micros(123_456);
        assert_eq!(report_from_pb(report_to_pb(&report, sent)).unwrap(), (report, sent));
        let grant = Grant { gateway: "a".to_owned(), process: 9, epoch: 2, worker: 7, seq: 1, limit: 8, anchored: 4 };
        let update = Update { epoch: 2, echo: Some(sent), grants: vec![grant], mark: 8 };
        let message = update_to_pb(&update, Duration::from_secs(10), Duration::from_secs(900));
        assert_eq!((message.float_millis, message.anchor_millis), (10_000, 900_000));
        assert_eq!(update_from_pb(message, "a", 9).unwrap(), update);
    }
}
