//! Noticing that an engine was started anew. Pure.
//!
//! An engine that comes back on the same address may be another one: another version, another model, other limits. A process that reports
//! when it was started (`process_start_time_seconds`, which Prometheus clients report by default, vLLM's among them) gives it away even if
//! no probe failed in between. One that does not is only asked again after its health had been lost.

/// Start times closer than this are one start: some clients compute them anew for each scrape.
const SAME_START_SECS: f64 = 1.5;
/// How often an engine is asked what it is until what was known stands.
const MOST: u32 = 3;

/// The start times of one engine.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Restarts {
    known: Option<f64>,
    id: Option<String>,
}

impl Restarts {
    /// Takes in what the engine says now. True if it was started anew since the last time.
    pub fn observe(&mut self, start: Option<f64>) -> bool {
        let Some(start) = start else { return false };
        let anew = self.known.is_some_and(|known| (start - known).abs() > SAME_START_SECS);
        self.known = Some(start);
        anew
    }
}

impl Restarts {
    /// Takes in the engine's id, which each start changes unless its operator pinned it. True if it is another one than
    /// last time, or than the one it `had` when it is seen for the first time.
    pub fn observe_id(&mut self, id: Option<&str>, had: Option<&str>) -> bool {
        let Some(id) = id else { return false };
        let anew = self.id.as_deref().or(had).is_some_and(|known| known != id);
        self.id = Some(id.to_owned());
        anew
    }
}

/// Attempts to learn what an engine is by now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Attempts {
    wanted: bool,
    made: u32,
}

impl Attempts {
    /// The engine must be asked although its health was never lost.
    pub fn after_restart() -> Self {
        Self { wanted: true, made: 0 }
    }

    /// Whether to ask now.
    pub fn are_due(&self) -> bool {
        self.wanted && !self.are_over()
    }

    /// Whether it was asked often enough: an engine that is healthy and says nothing is not kept out for ever.
    pub fn are_over(&self) -> bool {
        self.made >= MOST
    }

    /// It is asked once more.
    pub fn note(&mut self) {
        self.made = self.made.saturating_add(1);
    }
}

/// The start time in a Prometheus text.
pub fn start_time(text: &[u8]) -> Option<f64> {
    let text = std::str::from_utf8(text).ok()?;
    let value = text.lines().find_map(|line| {
        let rest = line.strip_prefix("process_start_time_seconds")?;
        let value = if rest.starts_with('{') { rest.rsplit_once('}')?.1 } else { rest };
        value.starts_with(' ').then(|| value.split_whitespace().next()).flatten()
    })?;
    value.parse().ok().filter(|start: &f64| start.is_finite() && *start > 0.0)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn only_another_start_time_is_a_restart() {
        let mut restarts = Restarts::default();
        let seen = [Some(100.0), Some(100.5), None, Some(100.0), Some(160.0), Some(160.0), Some(90.0)];
        let anew: Vec<bool> = seen.into_iter().map(|start| restarts.observe(start)).collect();
        assert_eq!(anew, [false, false, false, false, true, false, true]);
    }

    #[test]
    fn another_id_is_a_restart() {
        let mut restarts = Restarts::default();
        let anew = [Some("a"), None, Some("a"), Some("b"), Some("b")].map(|id| restarts.observe_id(id, Some("a")));
        assert_eq!(anew, [false, false, false, true, false]);
        assert!(Restarts::default().observe_id(Some("b"), Some("a")));
        assert!(!Restarts::default().observe_id(Some("b"), None));
    }

    #[test]
    fn the_start_time_is_found_among_other_metrics() {
        let text = "# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds_total 3\n\
                    process_start_time_seconds{pid=\"1\"} 1.7e+09\n";
        assert_eq!(start_time(text.as_bytes()), Some(1.7e9));
        assert_eq!(start_time(b"process_start_time_seconds 12.5\n"), Some(12.5));
        for nothing in [&b"process_start_time_seconds NaN\n"[..], b"", b"\xff", b"process_start_time_seconds x\n"] {
            assert_eq!(start_time(nothing), None);
        }
    }

    #[test]
    fn an_engine_is_asked_a_few_times_and_then_left_alone() {
        let mut attempts = Attempts::after_restart();
        (0..MOST).for_each(|_| {
            assert!(attempts.are_due());
            attempts.note();
        });
        assert!(attempts.are_over() && !attempts.are_due() && !Attempts::default().are_due());
    }
}
