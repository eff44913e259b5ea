//! What a large fleet says to keep its slots: a hundred gateways before five hundred workers.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use prost::Message;

use crate::{Deadlines, Event, Leader, Ledger, Report, Shares, Times, WorkerKey, wire};

const GATEWAYS: usize = 100;
const WORKERS: WorkerKey = 500;
const TICKS_A_SECOND: usize = 10;

/// A small generator: the same numbers in every run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

struct Gateway {
    shares: Shares,
    in_use: std::collections::BTreeMap<WorkerKey, u32>,
    is_to_report: bool,
}

impl Gateway {
    /// Requests come and go: of a worker in three something has changed within a second.
    fn churn(&mut self, numbers: &mut Numbers, now: Duration) {
        for worker in 0..WORKERS {
            let limit = self.shares.limit(worker, now);
            if limit > 0 && numbers.below(3) == 0 {
                self.in_use.insert(worker, numbers.below(u64::from(limit) + 1) as u32);
            }
        }
    }

    fn report(&mut self, all: bool) -> Report {
        self.is_to_report = false;
        let in_use = &self.in_use;
        let use_of = |worker: WorkerKey| {
            let used = in_use.get(&worker).copied().unwrap_or(0);
            (used, used, 0)
        };
        self.shares.report(0..WORKERS, use_of, all)
    }
}

#[test]
fn a_hundred_gateways_before_five_hundred_workers_say_less_than_200_kilobytes_a_second() {
    let deadlines = Deadlines { request: Duration::from_secs(1800), dispatch: Duration::from_secs(2) };
    let (mut ledger, mut leader) = (Ledger::default(), Leader::new(Times::default(), deadlines));
    let mut numbers = Numbers(7);
    let mut gateways: Vec<Gateway> = (0..GATEWAYS)
        .map(|number| Gateway {
            shares: Shares::new(&format!("gateway-{number}"), number as u128 + 1, Times::default(), false),
            in_use: Default::default(),
            is_to_report: true,
        })
        .collect();
    let windows: Vec<Event> = (0..WORKERS).map(|worker| Event::Window(worker, Some(32))).collect();
    ledger.round(&windows);
    let (mut bytes, mut seconds, mut log) = (0usize, 0usize, 0usize);
    for tick in 0..12 * TICKS_A_SECOND {
        let now = Duration::from_millis(100 * tick as u64 + 1);
        // The first seconds hand everything out.
        let counts = tick >= 4 * TICKS_A_SECOND;
        seconds += usize::from(counts && tick % TICKS_A_SECOND == 0);
        for (number, gateway) in gateways.iter_mut().enumerate() {
            let is_its_second = tick % TICKS_A_SECOND == number % TICKS_A_SECOND;
            if is_its_second {
                gateway.churn(&mut numbers, now);
            }
            if is_its_second || gateway.is_to_report {
                let report = gateway.report(tick == 0);
                bytes += if counts { wire::report_to_pb(&report, now).encoded_len() } else { 0 };
                leader.hear(&ledger, report, now, now);
            }
        }
        let events = leader.round(&ledger, |_| None, now);
        log += if counts { events.iter().map(|event| wire::event_to_pb(event).encoded_len()).sum() } else { 0 };
        let grants = ledger.round(&events).grants;
        for answer in leader.answers(&ledger, grants) {
            let message = wire::update_to_pb(&answer.update, Duration::from_secs(10), Duration::from_secs(900));
            bytes += if counts { message.encoded_len() } else { 0 };
            let number: usize = answer.gateway.trim_start_matches("gateway-").parse().unwrap();
            gateways[number].is_to_report |= gateways[number].shares.apply(&answer.update, now);
        }
    }
    let held: u64 = ledger.pools().values().map(crate::pool::Pool::held).sum();
    assert!(held > 500 * 30, "the slots are handed out: {held}");
    println!("{} bytes a second between gateways and the leader, {} in the log", bytes / seconds, log / seconds);
    assert!(bytes / seconds < 200_000, "{} bytes a second", bytes / seconds);
}
