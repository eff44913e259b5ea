//! What the checker accepts and refuses.

use super::Answer::{Conflict, Is};
use super::Operation::{CompareAndSet, Read, Write};
use super::*;
use crate::random::Random;

fn call(at: (u64, u64), operation: Operation, answer: Option<Answer>) -> Call {
    let answer = answer.map(|answer| (Duration::from_millis(at.1), answer));
    Call { document: 0, operation, invoked: Duration::from_millis(at.0), answer }
}

fn is(value: u64, revision: u64) -> Option<Answer> {
    Some(Is { value: Some(value), revision })
}

const NOTHING: Option<Answer> = Some(Is { value: None, revision: 0 });

fn set(expected: u64, value: u64) -> Operation {
    CompareAndSet { expected, value }
}

/// Two writes, one after the other.
fn two() -> Vec<Call> {
    vec![call((0, 10), Write(1), is(1, 5)), call((20, 30), Write(2), is(2, 6))]
}

fn with(more: impl IntoIterator<Item = Call>) -> Vec<Call> {
    two().into_iter().chain(more).collect()
}

#[test]
fn what_one_order_explains_is_accepted() {
    let accepted = [
        with([call((40, 50), Read, is(2, 6))]),
        // A read beside a write sees the old or the new.
        with([call((25, 28), Read, is(1, 5)), call((26, 29), Read, is(2, 6))]),
        with([call((0, 5), Read, NOTHING)]),
        // What is unknown may have happened at once, late, or never.
        vec![
            call((0, 10), Write(1), is(1, 5)),
            call((11, 0), Write(9), None),
            call((12, 13), Read, is(9, 6)),
            call((20, 30), Write(2), is(2, 7)),
        ],
        with([call((11, 0), Write(9), None), call((40, 50), Read, is(9, 7))]),
        with([call((11, 0), Write(9), None), call((40, 50), Read, is(2, 6))]),
        with([call((35, 0), set(6, 9), None), call((40, 50), Read, is(9, 7))]),
        with([call((35, 0), set(5, 9), None), call((40, 50), Read, is(2, 6))]),
        // A conflict shows a change that nobody saw otherwise.
        with([call((31, 0), Write(9), None), call((40, 50), set(6, 3), Some(Conflict))]),
        with([call((31, 0), set(6, 9), None), call((40, 50), set(6, 3), Some(Conflict))]),
        with([call((31, 32), set(6, 3), is(3, 7)), call((33, 34), set(6, 4), Some(Conflict))]),
        vec![
            call((0, 10), Write(1), is(1, 5)),
            call((11, 0), Write(9), None),
            call((12, 13), set(5, 3), Some(Conflict)),
            call((20, 30), Write(2), is(2, 7)),
        ],
    ];
    for calls in accepted {
        assert_eq!(check(&calls), Ok(()), "{calls:#?}");
    }
}

#[test]
fn what_no_order_explains_is_refused() {
    let refused = [
        ("a stale read", with([call((40, 50), Read, is(1, 5))])),
        ("a lost write", with([call((40, 50), Read, NOTHING)])),
        ("the new, then the old", with([call((21, 22), Read, is(2, 6)), call((23, 24), Read, is(1, 5))])),
        ("a value that nobody wrote", with([call((40, 50), Read, is(8, 7))])),
        ("another revision of the value", with([call((40, 50), Read, is(2, 7))])),
        ("a value before it was written", with([call((11, 12), Read, is(2, 6))])),
        (
            "two compared with one revision",
            with([call((31, 40), set(6, 3), is(3, 7)), call((31, 40), set(6, 4), is(4, 8))]),
        ),
        ("a comparison with what is past", with([call((31, 32), set(5, 3), is(3, 7))])),
        ("a conflict with what is there", with([call((31, 32), set(6, 3), Some(Conflict))])),
        ("a revision that goes back", with([call((31, 32), Write(3), is(3, 4))])),
        ("a revision that stays", with([call((31, 32), Write(3), is(3, 6))])),
        ("an unknown one before it began", with([call((31, 0), Write(9), None), call((11, 12), Read, is(9, 6))])),
        (
            "an unknown one that came and went",
            with([call((31, 0), Write(9), None), call((40, 41), Read, is(9, 7)), call((42, 43), Read, is(2, 6))]),
        ),
        (
            "an unknown comparison with what is past",
            with([call((31, 0), set(5, 9), None), call((40, 41), Read, is(9, 7))]),
        ),
        (
            "a conflict that only a later unknown one explains",
            with([call((31, 32), set(6, 3), Some(Conflict)), call((33, 0), Write(9), None)]),
        ),
        (
            "a conflict with one for which there is no revision",
            vec![
                call((0, 10), Write(1), is(1, 5)),
                call((11, 0), Write(9), None),
                call((12, 13), set(5, 3), Some(Conflict)),
                call((20, 30), Write(2), is(2, 6)),
            ],
        ),
        ("an answer to something else", with([call((31, 32), Write(3), is(4, 7))])),
    ];
    for (what, calls) in refused {
        assert!(matches!(check(&calls), Err(Refused::Unexplained(_))), "{what}: {calls:#?}");
    }
}

#[test]
fn revisions_of_all_documents_are_one_order() {
    assert_eq!(check_revisions(&two()), Ok(()));
    let elsewhere = |revision| Call { document: 1, ..call((40, 50), Write(3), is(3, revision)) };
    assert_eq!(check_revisions(&with([elsewhere(7)])), Ok(()));
    for revision in [4, 5, 6] {
        assert!(check_revisions(&with([elsewhere(revision)])).is_err(), "{revision}");
    }
    let beside = Call { document: 1, ..call((5, 25), Write(3), is(3, 4)) };
    assert_eq!(check_revisions(&with([beside])), Ok(()));
}

#[test]
fn many_unknown_outcomes_are_decided_soon() {
    let mut calls: Vec<Call> = (0..500).map(|n| call((n, 0), Write(10_000 + n), None)).collect();
    for n in 1..=500 {
        let at = 1_000 + 10 * n;
        calls.push(call((at, at + 15), Write(n), is(n, n)));
        calls.push(call((at + 16, at + 18), Read, is(n, n)));
        calls.push(call((at + 1, at + 30), set(n, 0), Some(Conflict)));
        calls.push(call((at + 2, 0), set(n, 20_000 + n), None));
    }
    let then = |last| calls.iter().cloned().chain([call((9_000, 9_001), Read, last)]).collect::<Vec<Call>>();
    assert_eq!(check_within(&then(is(500, 500)), 1_000), Ok(()));
    assert!(matches!(check_within(&then(is(499, 499)), 10_000), Err(Refused::Unexplained(_))));
}

#[test]
fn a_search_that_takes_too_long_is_no_success() {
    assert_eq!(check_within(&with([call((40, 50), Read, is(2, 6))]), 1), Err(Refused::Undecided));
}

/// Every order, without a thought.
fn explained(calls: &[Call], placed: u32, document: (Option<u64>, Option<u64>), floor: u64) -> bool {
    let left = || (0..calls.len()).filter(|n| placed & (1_u32 << *n) == 0);
    if left().all(|n| calls[n].answer.is_none()) {
        return true;
    }
    let limit = left().filter_map(|n| calls[n].answer).map(|(ended, _)| ended).min().unwrap_or(Duration::MAX);
    let read = revisions_read(calls);
    left().filter(|n| calls[*n].invoked <= limit).any(|n| {
        let then = |document, floor| explained(calls, placed | (1_u32 << n), document, floor);
        let write = |value: u64, revision: Option<u64>| match revision {
            Some(revision) => revision > floor && then((Some(value), Some(revision)), revision),
            None => then((None, None), floor + 1),
        };
        match (calls[n].operation, calls[n].answer.map(|(_, answer)| answer)) {
            (Read, Some(Is { value, revision })) => document == (value, Some(revision)) && then(document, floor),
            (Write(value), Some(Is { revision, .. })) => write(value, Some(revision)),
            (Write(value), None) => write(value, read.get(&value).copied()),
            (CompareAndSet { expected, .. }, Some(Conflict)) => document.1 != Some(expected) && then(document, floor),
            (CompareAndSet { expected, value }, answer) if document.1 == Some(expected) => match answer {
                Some(Is { revision, .. }) => write(value, Some(revision)),
                _ => write(value, read.get(&value).copied()),
            },
            _ => false,
        }
    })
}

/// What a few clients may see of a real document.
fn random_history(random: &mut Random) -> Vec<Call> {
    let mut times: Vec<(u64, u64, u64)> = (0..7)
        .map(|_| {
            let invoked = random.below(50);
            let happens = invoked + 1 + random.below(15);
            (happens, invoked, happens + 1 + random.below(15))
        })
        .collect();
    times.sort_unstable();
    let (mut now, mut revision) = (Is { value: None, revision: 0 }, 0);
    let mut known = vec![0];
    let mut calls = Vec::new();
    for (n, (_, invoked, ended)) in (1..).zip(times) {
        let operation = match random.below(3) {
            0 => Read,
            1 => Write(n),
            _ => set(known[random.below(known.len() as u64) as usize], n),
        };
        let Is { revision: current, .. } = now else { unreachable!() };
        let fits = matches!(operation, CompareAndSet { expected, .. } if expected == current);
        let unknown = operation != Read && random.below(4) == 0;
        let happens = !unknown || random.below(2) == 0;
        if happens && (fits || operation == Write(n)) {
            revision += 1 + random.below(2);
            now = Is { value: Some(n), revision };
        }
        let conflict = matches!(operation, CompareAndSet { .. }) && !fits;
        let answer = if conflict { Conflict } else { now };
        if let (false, Is { revision, .. }) = (unknown, answer) {
            known.push(revision);
        }
        calls.push(call((invoked, ended), operation, (!unknown).then_some(answer)));
    }
    calls
}

/// Gives a read the answer to another call, a write the revision of another, or turns a conflict.
fn damage(calls: &mut [Call], random: &mut Random) {
    let (at, other) = (random.below(7) as usize, random.below(7) as usize);
    let Some((_, Is { value, revision })) = calls[other].answer else { return };
    let operation = calls[at].operation;
    if let Some((_, answer)) = &mut calls[at].answer {
        *answer = match (operation, *answer) {
            (Read, _) => Is { value, revision },
            (_, Is { value, .. }) => Is { value, revision },
            (CompareAndSet { value, .. }, Conflict) => Is { value: Some(value), revision },
            (_, Conflict) => Conflict,
        };
    }
}

#[test]
fn it_judges_as_one_who_tries_every_order() {
    let mut random = Random::new(7, 0);
    let (mut accepted, mut refused) = (0, 0);
    for n in 0..3_000 {
        let mut calls = random_history(&mut random);
        if n % 2 == 0 {
            assert_eq!(check(&calls), Ok(()), "it happened: {calls:#?}");
        }
        damage(&mut calls, &mut random);
        let right = explained(&calls, 0, (None, Some(0)), 0);
        assert_eq!(check(&calls).is_ok(), right, "{calls:#?}");
        *if right { &mut accepted } else { &mut refused } += 1;
    }
    assert!(accepted > 300 && refused > 300, "{accepted} accepted, {refused} refused");
}
