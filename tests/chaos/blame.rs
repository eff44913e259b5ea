//! Who is to blame: what breakers were told of each engine, against what the engine did and what clients were told.
//!
//! * No more: a breaker hears of no failure that its engine did not have, by the engine's own account.
//! * No less, as engines tell it: where one leg runs at a time, nothing but its answer ends a leg whose client stays. So each answer with a
//!   status that blames the engine was charged, whatever attempt it was of.
//! * No less, as clients tell it: an error that names a leg, unless its status says that the request or the load was to blame, and an answer
//!   that breaks off before the request's time is over, were charged in that leg.
//!
//! Where both legs run at once the first failure ends the other leg, which then says nothing of its engine: there only clients know.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use crate::REQUEST_TIMEOUT;
use crate::fleet::{Fleet, Kind, is_mortal};
use crate::support::{Role, samples};
use crate::traffic::{Case, Ending};

/// Statuses that say that an engine failed (429 says that it is full, and any other that the request is wrong).
const BLAMING: [u16; 5] = [408, 500, 502, 503, 504];
const ROLES: [Role; 3] = [Role::Prefill, Role::Decode, Role::Regular];

/// What clients know of failures.
#[derive(Default)]
pub struct Witnesses {
    /// The ids of requests whose clients stayed to the end.
    stayed: HashSet<String>,
    /// Failures that clients were told of, by model and role of the engine.
    told: BTreeMap<(&'static str, &'static str), u64>,
}

impl Witnesses {
    /// A request of `kind` has ended, after `took`.
    pub fn note(&mut self, kind: &Kind, case: &Case, id: &str, ending: &Ending, took: Duration) {
        if *ending == Ending::Left {
            return;
        }
        self.stayed.insert(id.to_owned());
        let role = match ending {
            Ending::Error { status, code } => named(*status, code),
            // Later it may be the time that ended an answer, of an engine that was still sending.
            Ending::BrokenOff if took < REQUEST_TIMEOUT => Some(kind.answering(case)),
            _ => None,
        };
        if let Some(role) = role {
            *self.told.entry((kind.model, label(role))).or_default() += 1;
        }
    }

    fn told(&self, kind: &Kind, role: Role) -> u64 {
        self.told.get(&(kind.model, label(role))).copied().unwrap_or_default()
    }
}

/// How error codes name an engine.
fn label(role: Role) -> &'static str {
    match role {
        Role::Prefill => "prefill_",
        Role::Decode => "decode_",
        Role::Regular => "worker_",
    }
}

/// The engine that an error says has failed: it gave no answer, or one that blames it (API reference, errors of inference).
fn named(status: u16, code: &str) -> Option<Role> {
    let role = ROLES.into_iter().find(|role| code.starts_with(label(*role)))?;
    (code.ends_with("_failed") || BLAMING.contains(&status)).then_some(role)
}

/// What breakers were charged with.
pub struct Charged {
    /// Failures of prefills, of decodes, and of workers without a partner.
    pub failures: [u64; 3],
    /// How many of them somebody beside the gateway can prove.
    pub proven: u64,
}

/// Checks what breakers were told, and sums it up.
pub async fn charged(fleet: &Fleet, witnesses: &Witnesses) -> Charged {
    let metrics = fleet.smg.metrics().await;
    let count = |name: &str, labels: &[(&str, &str)]| samples(&metrics, name, labels).into_values().sum::<f64>() as u64;
    let mut sum = Charged { failures: [0; 3], proven: 0 };
    for family in &fleet.families {
        let (kind, model) = (&family.kind, family.kind.model);
        for (place, role) in ROLES.into_iter().enumerate() {
            let (mut failures_of_leg, mut proven_of_leg) = (0, 0);
            for (_, index, engine) in family.engines().filter(|(of, ..)| *of == role) {
                let url = engine.url();
                let failures = count("smg_worker_cb_outcomes_total", &[("worker", &url), ("outcome", "failure")]);
                let own = engine.tally();
                // Whoever cannot be reached knows nothing of it: then whatever was sent and did not arrive may be charged.
                let lost = match is_mortal(index) {
                    true => count("smg_worker_requests_total", &[("worker", &url)]).saturating_sub(own.arrived),
                    false => 0,
                };
                let due = own.faulty + own.failed + own.cut + own.abandoned_late + lost;
                // What a stopped engine has written may not have been read.
                let proven = match is_mortal(index) || kind.runs_legs_at_once() {
                    true => 0,
                    false => engine.refusals().iter().filter(|id| witnesses.stayed.contains(*id)).count() as u64,
                };
                println!("{model} {role:?} {index}: charged {failures}, at least {proven}, at most {due} due");
                let account = format!("{model} {role:?} {index}: charged {failures}, lost {lost}, {own:?}");
                assert!(failures <= due, "{account}: at most {due} are due");
                assert!(failures >= proven, "{account}: answered {proven} clients that stayed with a failure");
                failures_of_leg += failures;
                proven_of_leg += proven;
            }
            let told = witnesses.told(kind, role);
            println!("{model} {role:?}: charged {failures_of_leg}, clients were told of {told}");
            assert!(
                failures_of_leg >= told,
                "{model} {role:?}: charged {failures_of_leg}, clients were told of {told}"
            );
            sum.failures[place] += failures_of_leg;
            sum.proven += proven_of_leg.max(told);
        }
    }
    sum
}
