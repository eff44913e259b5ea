//! Whether a history of calls on one document has an explanation: one order of the calls, each between its begin and its end, in which every
//! answer is what a document gives (Wing and Gong's search, with Lowe's memory of where it has been).
//!
//! A call of unknown outcome may have happened at any time after it began, or never. Four facts keep the search small:
//! * a call that changes nothing can come as soon as it fits: that takes no choice away from any other call;
//! * revisions grow: of the writes whose revision is known, the one with the lowest is the next;
//! * each value is written by one call: a write of unknown outcome whose value was read happened, and has the revision that was read;
//! * one whose value nobody read shows in nothing but conflicts: of two such writes, the one that began first serves as well as the other,
//!   and whoever needed fewer of them to come to a place can do everything that others can from there.
//!
//! Still the search is bounded. A history that takes longer is undecided, which is no success.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Most states of a document that are looked at.
const BOUND: usize = 5_000_000;

/// What is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    Read,
    Write(u64),
    /// Write if the document has this revision.
    CompareAndSet {
        expected: u64,
        value: u64,
    },
}

/// What is answered by a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// It has another revision than it should have had.
    Conflict,
    /// It is then like this; no value and revision 0 = there is none.
    Is { value: Option<u64>, revision: u64 },
}

/// One call that may have happened. A call that is known not to have happened is none.
#[derive(Debug, Clone)]
pub struct Call {
    pub document: u64,
    pub operation: Operation,
    pub invoked: Duration,
    /// When the answer was there, and what it was. Absent: the outcome is unknown.
    pub answer: Option<(Duration, Answer)>,
}

/// Why a history is not accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refused {
    /// No order explains it.
    Unexplained(String),
    /// The search was given up.
    Undecided,
}

/// What a call does, or says, at its place in the order.
#[derive(Debug, Clone, Copy)]
enum Effect {
    Read { value: Option<u64>, revision: u64 },
    Conflict { expected: u64 },
    Write { expected: Option<u64>, value: u64 },
}

#[derive(Debug, Clone, Copy)]
struct Step {
    invoked: Duration,
    ended: Duration,
    effect: Effect,
    /// Of a write: the revision it led to, unless nobody saw it.
    revision: Option<u64>,
}

/// The calls on one document.
#[derive(Debug, Default)]
struct History {
    /// Calls that must have a place, by when they began.
    steps: Vec<Step>,
    /// The writes among them, by revision.
    writes: Vec<usize>,
    /// When the writes began that may have happened unseen, in that order;
    unseen: Vec<Duration>,
    /// and by the revision that they compare with, when the first such write began that compares. One is enough: no revision comes twice.
    unseen_if: BTreeMap<u64, Duration>,
}

/// The document, and which calls have got their places.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct State {
    value: Option<u64>,
    /// No revision: one that nobody saw.
    revision: Option<u64>,
    /// How many of the writes that must have a place have one.
    written: usize,
    /// All steps before this one have a place,
    first: usize,
    /// and of those after it these.
    beyond: BTreeSet<usize>,
}

/// The revision under which each value was read.
fn revisions_read(calls: &[Call]) -> BTreeMap<u64, u64> {
    let read = calls.iter().filter_map(|call| match (call.operation, call.answer) {
        (Operation::Read, Some((_, Answer::Is { value: Some(value), revision }))) => Some((value, revision)),
        _ => None,
    });
    read.collect()
}

impl History {
    fn of(calls: &[Call]) -> Result<Self, Refused> {
        let read = revisions_read(calls);
        let mut history = Self::default();
        for call in calls {
            let (expected, value) = match call.operation {
                Operation::Read => (None, None),
                Operation::Write(value) => (None, Some(value)),
                Operation::CompareAndSet { expected, value } => (Some(expected), Some(value)),
            };
            let (effect, revision) = match (value, call.answer.map(|(_, answer)| answer)) {
                // A read without an answer says nothing.
                (None, None) => continue,
                (None, Some(Answer::Is { value, revision })) => (Effect::Read { value, revision }, None),
                (Some(value), None) => (Effect::Write { expected, value }, read.get(&value).copied()),
                (Some(value), Some(Answer::Is { value: now, revision })) if now == Some(value) => {
                    (Effect::Write { expected, value }, Some(revision))
                }
                (Some(_), Some(Answer::Conflict)) if expected.is_some() => {
                    (Effect::Conflict { expected: expected.unwrap_or_default() }, None)
                }
                _ => return Err(Refused::Unexplained(format!("this answers something else: {call:?}"))),
            };
            let invoked = call.invoked;
            match (call.answer, revision, expected) {
                (None, None, None) => history.unseen.push(invoked),
                (None, None, Some(expected)) => {
                    let first = history.unseen_if.entry(expected).or_insert(invoked);
                    *first = invoked.min(*first);
                }
                (answer, ..) => {
                    let ended = answer.map_or(Duration::MAX, |(ended, _)| ended);
                    history.steps.push(Step { invoked, ended, effect, revision });
                }
            }
        }
        history.steps.sort_by_key(|step| step.invoked);
        history.unseen.sort_unstable();
        let is_write = |n: &usize| matches!(history.steps[*n].effect, Effect::Write { .. });
        history.writes = (0..history.steps.len()).filter(is_write).collect();
        history.writes.sort_by_key(|n| history.steps[*n].revision);
        Ok(history)
    }

    /// Steps without a place that began before all steps without a place had ended: one of them is the next.
    fn candidates(&self, state: &State) -> (Vec<usize>, Duration) {
        let mut limit = Duration::MAX;
        let mut candidates = Vec::new();
        for (n, step) in self.steps.iter().enumerate().skip(state.first) {
            if step.invoked > limit {
                break;
            }
            if !state.beyond.contains(&n) {
                limit = limit.min(step.ended);
                candidates.push(n);
            }
        }
        candidates.retain(|n| self.steps[*n].invoked <= limit);
        (candidates, limit)
    }

    /// Gives a place to everything that fits and changes nothing. Returns until when the next call must have begun.
    fn settle(&self, state: &mut State) -> Duration {
        loop {
            let (candidates, limit) = self.candidates(state);
            let fits = |n: &usize| match self.steps[*n].effect {
                Effect::Read { value, revision } => state.value == value && state.revision == Some(revision),
                Effect::Conflict { expected } => state.revision != Some(expected),
                Effect::Write { .. } => false,
            };
            let fitting: Vec<usize> = candidates.into_iter().filter(fits).collect();
            if fitting.is_empty() {
                return limit;
            }
            fitting.into_iter().for_each(|n| state.place(n));
        }
    }

    /// What may come next when so many unseen writes have been, and how many have been then; the likeliest last.
    fn next(&self, state: &State, unseen: usize, limit: Duration) -> Vec<(State, usize)> {
        let mut all = Vec::new();
        // After one write that nobody saw, another one changes nothing.
        if let Some(revision) = state.revision {
            let then = State { value: None, revision: None, ..state.clone() };
            if self.unseen_if.get(&revision).is_some_and(|invoked| *invoked <= limit) {
                all.push((then, unseen));
            } else if self.unseen.get(unseen).is_some_and(|invoked| *invoked <= limit) {
                all.push((then, unseen + 1));
            }
        }
        if let Some(n) = self.writes.get(state.written).copied()
            && let Step { invoked, effect: Effect::Write { expected, value }, revision: Some(revision), .. } =
                self.steps[n]
            && invoked <= limit
            && expected.is_none_or(|expected| state.revision == Some(expected))
            && revision > self.floor(state)
        {
            let written = state.written + 1;
            let mut then = State { value: Some(value), revision: Some(revision), written, ..state.clone() };
            then.place(n);
            all.push((then, unseen));
        }
        all
    }

    /// The revision that the document has at least: one that nobody saw has taken one, too.
    fn floor(&self, state: &State) -> u64 {
        let last = state.written.checked_sub(1).map(|last| self.writes[last]);
        last.and_then(|n| self.steps[n].revision).unwrap_or_default() + u64::from(state.revision.is_none())
    }

    /// Where the search was stuck.
    fn around(&self, state: &State) -> String {
        let stuck: Vec<&Step> = self.candidates(state).0.into_iter().take(8).map(|n| &self.steps[n]).collect();
        format!(
            "no order of {} calls explains them; {} fit, then the document has {:?} at {:?}, and nothing of this fits: {stuck:?}",
            self.steps.len(),
            state.first + state.beyond.len(),
            state.value,
            state.revision,
        )
    }
}

impl State {
    fn new() -> Self {
        Self { value: None, revision: Some(0), written: 0, first: 0, beyond: BTreeSet::new() }
    }

    fn place(&mut self, n: usize) {
        self.beyond.insert(n);
        while self.beyond.remove(&self.first) {
            self.first += 1;
        }
    }
}

/// Looks for an explanation of the calls on one document.
pub fn check(calls: &[Call]) -> Result<(), Refused> {
    check_within(calls, BOUND)
}

fn check_within(calls: &[Call], bound: usize) -> Result<(), Refused> {
    let history = History::of(calls)?;
    let mut open = vec![(State::new(), 0)];
    // With how few unseen writes each state was come to.
    let mut seen: BTreeMap<State, usize> = BTreeMap::new();
    let (mut furthest, mut looked_at) = (State::new(), 0);
    while let Some((mut state, unseen)) = open.pop() {
        let limit = history.settle(&mut state);
        if state.first == history.steps.len() {
            return Ok(());
        }
        if (state.first, state.beyond.len()) > (furthest.first, furthest.beyond.len()) {
            furthest = state.clone();
        }
        if seen.get(&state).is_some_and(|fewest| *fewest <= unseen) {
            continue;
        }
        if looked_at == bound {
            return Err(Refused::Undecided);
        }
        looked_at += 1;
        open.extend(history.next(&state, unseen, limit));
        seen.insert(state, unseen);
    }
    Err(Refused::Unexplained(history.around(&furthest)))
}

/// Over all documents: no two writes share a revision, and revisions grow with time.
pub fn check_revisions(history: &[Call]) -> Result<(), Refused> {
    let writes = history.iter().filter(|call| call.operation != Operation::Read);
    let mut writes: Vec<(u64, Duration, Duration)> = writes
        .filter_map(|call| match call.answer {
            Some((ended, Answer::Is { revision, .. })) => Some((revision, call.invoked, ended)),
            _ => None,
        })
        .collect();
    writes.sort_unstable();
    if let Some(pair) = writes.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(Refused::Unexplained(format!("two writes share revision {}", pair[0].0)));
    }
    let mut latest = Duration::ZERO;
    for (revision, invoked, ended) in writes {
        // Every write with a lower revision must have begun before this one ended.
        if ended < latest {
            let reason = format!("the write of revision {revision} ended before one with a lower revision began");
            return Err(Refused::Unexplained(reason));
        }
        latest = latest.max(invoked);
    }
    Ok(())
}

#[cfg(test)]
#[path = "checker_test.rs"]
mod tests;
