//! How long the requests in flight have been there (SMG metrics reference, `smg_http_inflight_request_age_count`).
//!
//! A request that hangs shows in no histogram until it ends. This family counts the requests that have not ended, by age, when it is
//! collected: each series counts the ages above `gt` and up to `le` seconds, so they are not cumulative and their sum is the number of
//! requests.
//!
//! Invariant: ages are known to the second, so that what is remembered grows with the seconds that have requests in flight, never with the
//! requests.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{IntGaugeVec, Opts};

/// Bounds between the series, in seconds; below the first one an age counts from 0, above the last one to infinity.
pub const BOUNDS: [u64; 11] = [30, 60, 180, 300, 600, 1200, 3600, 7200, 14400, 28800, 86400];

/// The family. Cheap to clone.
#[derive(Debug, Clone)]
pub struct InflightAges {
    gauges: IntGaugeVec,
    arrivals: Arc<Arrivals>,
}

#[derive(Debug)]
struct Arrivals {
    begun: Instant,
    /// Requests in flight by the second of their arrival.
    seconds: Mutex<BTreeMap<u64, i64>>,
}

impl Arrivals {
    fn seconds(&self) -> MutexGuard<'_, BTreeMap<u64, i64>> {
        // A count is never half changed.
        self.seconds.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One request in flight. Dropping it ends it.
#[derive(Debug)]
pub struct Arrival {
    arrivals: Arc<Arrivals>,
    second: u64,
}

impl InflightAges {
    /// A family of this name, help and labels (`gt`, `le`), with no request in it.
    ///
    /// # Errors
    /// When the names are none that metrics may have.
    pub fn new(options: Opts, labels: &[&str]) -> Result<Self, prometheus::Error> {
        let arrivals = Arrivals { begun: Instant::now(), seconds: Mutex::default() };
        Ok(Self { gauges: IntGaugeVec::new(options, labels)?, arrivals: Arc::new(arrivals) })
    }

    /// A request has arrived now.
    pub fn arrive(&self) -> Arrival {
        let second = self.arrivals.begun.elapsed().as_secs();
        *self.arrivals.seconds().entry(second).or_insert(0) += 1;
        Arrival { arrivals: Arc::clone(&self.arrivals), second }
    }

    /// How many requests there are in each series when `now` seconds have passed since the beginning.
    fn counts(&self, now: u64) -> [i64; BOUNDS.len() + 1] {
        let mut counts = [0; BOUNDS.len() + 1];
        for (second, requests) in &*self.arrivals.seconds() {
            let age = now.saturating_sub(*second);
            let series = BOUNDS.partition_point(|bound| *bound < age);
            if let Some(count) = counts.get_mut(series) {
                *count += requests;
            }
        }
        counts
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        let mut seconds = self.arrivals.seconds();
        if let Some(count) = seconds.get_mut(&self.second) {
            *count -= 1;
            if *count == 0 {
                seconds.remove(&self.second);
            }
        }
    }
}

impl Collector for InflightAges {
    fn desc(&self) -> Vec<&Desc> {
        self.gauges.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let bounds = BOUNDS.map(|bound| bound.to_string());
        let below = std::iter::once("0").chain(bounds.iter().map(String::as_str));
        let above = bounds.iter().map(String::as_str).chain(["+Inf"]);
        let counts = self.counts(self.arrivals.begun.elapsed().as_secs());
        for ((gt, le), count) in below.zip(above).zip(counts) {
            self.gauges.with_label_values(&[gt, le]).set(count);
        }
        self.gauges.collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_request_in_flight_is_in_the_series_of_its_age_until_it_ends() {
        let ages = InflightAges::new(Opts::new("ages", "Ages."), &["gt", "le"]).unwrap();
        let (one, other) = (ages.arrive(), ages.arrive());
        let series = |now: u64| ages.counts(now).iter().position(|count| *count == 2);
        for (age, expected) in [(0, 0), (29, 0), (32, 1), (61, 2), (599, 4), (602, 5), (86_399, 10), (90_000, 11)] {
            assert_eq!(series(age), Some(expected), "{age} s");
        }
        drop(one);
        assert_eq!(ages.counts(0).iter().sum::<i64>(), 1);
        drop(other);
        assert!(ages.arrivals.seconds().is_empty());
    }

    #[test]
    fn all_series_are_there_with_their_bounds() {
        let ages = InflightAges::new(Opts::new("ages", "Ages."), &["gt", "le"]).unwrap();
        let _request = ages.arrive();
        let text = prometheus::TextEncoder::new().encode_to_string(&ages.collect()).unwrap();
        assert_eq!(text.lines().filter(|line| line.starts_with("ages{")).count(), BOUNDS.len() + 1);
        for series in [r#"{gt="0",le="30"} 1"#, r#"{gt="30",le="60"} 0"#, r#"{gt="86400",le="+Inf"} 0"#] {
            assert!(text.contains(series), "{text}");
        }
    }
}
