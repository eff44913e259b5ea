#![allow(clippy::unwrap_used, clippy::panic)]
use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

fn waits(claim: Claim) -> Ticket {
    match claim {
        Claim::Waits(ticket) => ticket,
        other => panic!("{other:?}"),
    }
}

fn released(window: &mut Window, rooms: u32) -> Vec<Ticket> {
    let mut granted = Vec::new();
    window.release(rooms, &mut granted);
    granted
}

#[test]
fn a_claim_takes_all_its_rooms_or_waits() {
    let mut window = Window::new(Some(4), 8);
    assert_eq!(window.claim(3), Claim::Granted);
    let wide = waits(window.claim(2));
    assert_eq!((window.in_use(), window.free(), window.wanted()), (3, Some(1), 2));
    assert_eq!(released(&mut window, 3), [wide]);
    assert_eq!(window.in_use(), 2);
}

#[test]
fn a_claim_wider_than_the_engines_window_is_refused_at_once() {
    let mut window = Window::new(Some(4), 8);
    assert_eq!(window.claim(5), Claim::TooWide);
    window.resize(Some(4), Some(2), &mut Vec::new(), &mut Vec::new());
    assert!(matches!(window.claim(3), Claim::Waits(_)), "this gateway's part may grow");
}

#[test]
fn a_worker_that_reports_no_window_is_not_gated() {
    let mut window = Window::new(None, 0);
    for _ in 0..100 {
        assert_eq!(window.claim(1000), Claim::Granted);
    }
    assert_eq!((window.free(), window.limit(), window.in_use()), (None, None, 100_000));
}

#[test]
fn equal_claims_are_granted_in_the_order_of_arrival() {
    let mut window = Window::new(Some(1), 8);
    assert_eq!(window.claim(1), Claim::Granted);
    let tickets: Vec<_> = (0..3).map(|_| waits(window.claim(1))).collect();
    for ticket in tickets {
        assert_eq!(released(&mut window, 1), [ticket]);
    }
}

#[test]
fn a_narrow_claim_passes_a_wide_one_but_not_for_ever() {
    let mut window = Window::new(Some(4), 8);
    assert_eq!(window.claim(3), Claim::Granted);
    let wide = waits(window.claim(4));
    let mut passed = 0;
    while window.claim(1) == Claim::Granted {
        passed += 1;
        assert_eq!(released(&mut window, 1), []);
        assert!(passed <= 4, "the wide claim starves");
    }
    assert_eq!(passed, 4, "a whole window's worth of rooms passes, then nobody");
    assert_eq!(released(&mut window, 3), [wide]);
}

#[test]
fn whoever_gives_up_lets_those_behind_move_up() {
    let mut window = Window::new(Some(2), 8);
    assert_eq!(window.claim(1), Claim::Granted);
    let (first, second) = (waits(window.claim(2)), waits(window.claim(2)));
    let mut granted = Vec::new();
    assert!(window.give_up(first, &mut granted));
    assert_eq!(granted, []);
    assert!(!window.give_up(first, &mut granted), "it does not wait any more");
    assert_eq!(released(&mut window, 1), [second]);
}

#[test]
fn the_line_is_bounded() {
    let mut window = Window::new(Some(1), 1);
    assert_eq!(window.claim(1), Claim::Granted);
    waits(window.claim(1));
    assert_eq!(window.claim(1), Claim::LineFull);
}

#[test]
fn a_window_that_shrinks_admits_nobody_until_enough_has_ended() {
    let mut window = Window::new(Some(4), 8);
    assert_eq!(window.claim(4), Claim::Granted);
    let (narrow, wide) = (waits(window.claim(1)), waits(window.claim(3)));
    let (mut granted, mut refused) = (Vec::new(), Vec::new());
    window.resize(Some(2), None, &mut granted, &mut refused);
    assert_eq!((granted.as_slice(), refused.as_slice()), (&[][..], &[wide][..]));
    assert_eq!(released(&mut window, 2), []);
    assert_eq!(released(&mut window, 1), [narrow]);
}

#[test]
fn a_window_that_is_lifted_lets_everybody_in() {
    let mut window = Window::new(Some(1), 8);
    assert_eq!(window.claim(1), Claim::Granted);
    let ticket = waits(window.claim(1));
    let mut granted = Vec::new();
    window.resize(None, None, &mut granted, &mut Vec::new());
    assert_eq!((granted, window.in_use()), (vec![ticket], 2));
}

#[derive(Debug, Clone)]
enum Step {
    Claim(u32),
    Release(usize),
    GiveUp(usize),
    Resize(Option<u32>, Option<u32>),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        5 => (1u32..6).prop_map(Step::Claim),
        4 => any::<usize>().prop_map(Step::Release),
        1 => any::<usize>().prop_map(Step::GiveUp),
        1 => (proptest::option::weighted(0.9, 1u32..10), proptest::option::of(0u32..12))
            .prop_map(|(window, limit)| Step::Resize(window, limit)),
    ];
    proptest::collection::vec(step, 0..200)
}

proptest! {
    #[test]
    fn rooms_never_grow_past_the_limit_and_everybody_is_served_in_the_end(steps in steps(), window in 1u32..10) {
        let mut subject = Window::new(Some(window), 16);
        let mut held: Vec<u32> = Vec::new();
        let mut waiting: HashMap<Ticket, u32> = HashMap::new();
        for step in steps {
            let before = subject.in_use();
            let (mut granted, mut refused) = (Vec::new(), Vec::new());
            match step {
                Step::Claim(rooms) => match subject.claim(rooms) {
                    Claim::Granted => held.push(rooms),
                    Claim::Waits(ticket) => prop_assert!(waiting.insert(ticket, rooms).is_none()),
                    Claim::TooWide => prop_assert!(rooms > subject.window().unwrap()),
                    Claim::LineFull => prop_assert_eq!(subject.waiting(), 16),
                },
                Step::Release(which) if !held.is_empty() => {
                    let rooms = held.swap_remove(which % held.len());
                    subject.release(rooms, &mut granted);
                }
                Step::GiveUp(which) if !waiting.is_empty() => {
                    let mut tickets: Vec<_> = waiting.keys().copied().collect();
                    tickets.sort();
                    let ticket = tickets[which % tickets.len()];
                    waiting.remove(&ticket);
                    prop_assert!(subject.give_up(ticket, &mut granted));
                }
                Step::Resize(window, limit) => subject.resize(window, limit, &mut granted, &mut refused),
                _ => {}
            }
            for ticket in granted {
                held.push(waiting.remove(&ticket).unwrap());
            }
            for ticket in refused {
                prop_assert!(waiting.remove(&ticket).unwrap() > subject.window().unwrap());
            }
            prop_assert_eq!(u64::from(subject.in_use()), held.iter().map(|rooms| u64::from(*rooms)).sum::<u64>());
            prop_assert_eq!(subject.waiting(), waiting.len());
            if let Some(limit) = subject.limit() {
                prop_assert!(subject.in_use() <= limit.max(before), "{} in use, limit {}", subject.in_use(), limit);
            }
        }
        // Liveness: with the whole window and nothing but releases, everybody who waits gets rooms.
        let whole = subject.window();
        let (mut granted, mut refused) = (Vec::new(), Vec::new());
        subject.resize(whole, None, &mut granted, &mut refused);
        loop {
            for ticket in granted.drain(..) {
                held.push(waiting.remove(&ticket).unwrap());
            }
            let Some(rooms) = held.pop() else { break };
            subject.release(rooms, &mut granted);
        }
        prop_assert!(waiting.is_empty());
        prop_assert_eq!(subject.in_use(), 0);
    }
}
