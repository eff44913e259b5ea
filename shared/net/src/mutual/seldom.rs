//! A line in the log that others can provoke: written at once, and then not again for a while.

use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Between two lines.
const PAUSE: Duration = Duration::from_secs(5);

/// Says whether it may be logged again.
#[derive(Debug, Default)]
pub(crate) struct Seldom(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    spoke: Option<Instant>,
    unsaid: u64,
}

impl Seldom {
    /// How many lines were held back since the last one, if another one may be written now.
    pub fn may_speak(&self) -> Option<u64> {
        let mut state = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if state.spoke.is_some_and(|at| at.elapsed() < PAUSE) {
            state.unsaid += 1;
            return None;
        }
        state.spoke = Some(Instant::now());
        Some(std::mem::take(&mut state.unsaid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_line_in_a_row_is_held_back_and_counted() {
        let seldom = Seldom::default();
        assert_eq!(seldom.may_speak(), Some(0));
        assert_eq!((seldom.may_speak(), seldom.may_speak()), (None, None));
        seldom.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).spoke = None;
        assert_eq!(seldom.may_speak(), Some(2));
    }
}
