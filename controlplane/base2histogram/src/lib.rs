//! Stands in for the crate of this name, which openraft records its runtime statistics with.
//!
//! Those statistics can be read only with openraft's feature `runtime-stats`, which is off here; they are recorded all the same. The crate
//! of this name computes tables for sixteen scales when its first histogram is made: 25 MiB in every process with a control plane, for one
//! scale that nobody looks at. So histograms keep nothing here. This crate has as much of the interface as openraft uses; whoever turns
//! the feature on takes the line `base2histogram` out of the `[patch.crates-io]` of the workspace first.

use std::fmt;
use std::marker::PhantomData;

/// A histogram that keeps nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Histogram<T = ()>(PhantomData<T>);

impl<T> Histogram<T> {
    /// A histogram.
    pub fn new() -> Self {
        Self(PhantomData)
    }

    /// Forgets a value.
    pub fn record(&mut self, _value: u64) {}

    /// Forgets a value that came several times.
    pub fn record_n(&mut self, _value: u64, _count: u64) {}

    /// No samples.
    pub fn percentile_stats(&self) -> PercentileStats {
        PercentileStats::default()
    }
}

/// Percentiles of a histogram.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they are")]
pub struct PercentileStats {
    pub samples: u64,
    pub p0_1: u64,
    pub p1: u64,
    pub p5: u64,
    pub p10: u64,
    pub p50: u64,
    pub p90: u64,
    pub p99: u64,
    pub p99_9: u64,
}

impl fmt::Display for PercentileStats {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("not kept")
    }
}

/// A chart of nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct AsciiChart;

impl AsciiChart {
    /// A chart.
    pub fn new() -> Self {
        Self
    }

    /// The same chart.
    #[must_use]
    pub fn add(self, _name: &str, _histogram: Histogram) -> Self {
        self
    }

    /// An empty text.
    pub fn detailed(&self) -> impl fmt::Display {
        ""
    }
}
