//! What engines say about the slots of gateways that are not heard of any more.
//!
//! Such slots stay occupied in the ledger until somebody knows better, at worst until the last deadline of their requests. The engine knows
//! how many requests it holds; of these, gateways that are heard of know which are surely theirs. What is left is the most that the silent
//! can have there.
//!
//! The two are numbers of different places, and must be of one moment. Messages bracket it, not clocks: gateways are sent a mark and
//! repeat it; then the engine is asked; then they are sent another one, and say with it what was there all the time between the two. What
//! an engine has ended is known at the gateway within [`HEARD`], so that the second mark comes so much later.
//!
//! Invariants
//! * requests that may be under way when the engine is asked are not concluded from: see [`smg_admission::Deadlines::dispatch`];
//! * a gateway that does not repeat both marks surely has nothing there, which errs on the side of too many slots kept.

use std::collections::BTreeMap;
use std::time::Duration;

use futures::StreamExt;
use futures::stream;
use smg_admission::{Event, ProcessId, WorkerKey};
use smg_fleet::{Runtime, Worker};
use tokio::time::{Instant, interval, sleep};

use super::{Shared, gated};
use crate::probe::engine::Address;

/// How often it is looked whether there is anything to find out.
const LOOKS: Duration = Duration::from_millis(250);
/// How long gateways have to repeat a mark.
const REPEATS: Duration = Duration::from_millis(700);
/// How long an engine has to answer.
const ANSWERS: Duration = Duration::from_secs(2);
/// Within this time a gateway has heard of the end of a request, by the engine's word or by that of its connection.
const HEARD: Duration = Duration::from_millis(200);
/// Engines asked at a time.
const AT_A_TIME: usize = 16;

/// An engine to be asked, and the last zombie that its answer says something about.
struct Question {
    worker: std::sync::Arc<Worker>,
    key: WorkerKey,
    last: u64,
}

/// Asks engines as long as there are slots of the silent. Never ends.
pub(super) async fn gather(shared: &Shared) {
    let mut looks = interval(LOOKS);
    loop {
        looks.tick().await;
        if questions(shared).is_empty() {
            continue;
        }
        let Some(before) = marked(shared).await else { continue };
        let asked = questions(shared);
        let counts: Vec<(Question, u32)> = stream::iter(asked)
            .map(|question| async { Some((count(shared, &question).await?, question)) })
            .buffer_unordered(AT_A_TIME)
            .filter_map(|counted| async { counted.map(|(count, question)| (question, count)) })
            .collect()
            .await;
        if counts.is_empty() {
            // Nobody answered: that will not have changed in a moment.
            sleep(ANSWERS).await;
            continue;
        }
        sleep(HEARD).await;
        let Some(after) = marked(shared).await else { continue };
        let mut term = shared.term.lock();
        let Some(term) = &mut *term else { continue };
        for (question, requests) in counts {
            let surely = after
                .iter()
                .filter(|(gateway, (process, _))| before.get(*gateway).is_some_and(|(before, _)| before == process));
            let surely = surely.filter_map(|(_, (_, surely))| surely.get(&question.key));
            let surely = surely.fold(0u32, |sum, count| sum.saturating_add(*count));
            let occupied = requests.saturating_sub(surely);
            term.leader.push(Event::Evidence { worker: question.key, last: question.last, occupied });
        }
    }
}

/// The workers with slots of the silent, of whose requests none can be under way any more.
fn questions(shared: &Shared) -> Vec<Question> {
    let state = shared.writer.store().local();
    let mut term = shared.term.lock();
    let Some(term) = &mut *term else { return Vec::new() };
    let now = term.begun.elapsed();
    let pools = state.ledger().pools();
    let dead = |key: &WorkerKey| pools.get(key).is_some_and(|pool| !pool.zombies().is_empty());
    if !pools.keys().any(dead) {
        return Vec::new();
    }
    let question = |worker: std::sync::Arc<Worker>| {
        let key = worker.id.0.as_u128();
        let last = term.leader.settled(pools.get(&key)?.zombies(), now)?;
        Some(Question { worker, key, last })
    };
    gated(&state).filter_map(question).collect()
}

/// What gateways that repeated the mark said with it, by name.
type Marked = BTreeMap<String, (ProcessId, BTreeMap<WorkerKey, u32>)>;

/// Lets gateways repeat a new mark. `None` when this node does not lead any more.
async fn marked(shared: &Shared) -> Option<Marked> {
    let mark = shared.mark()?;
    let until = Instant::now() + REPEATS;
    loop {
        sleep(LOOKS / 25).await;
        let term = shared.term.lock();
        let term = term.as_ref().filter(|term| term.mark == mark)?;
        let repeated = term.seats.iter().filter(|(_, seat)| seat.answer.0 == mark);
        if repeated.clone().count() == term.seats.len() || Instant::now() >= until {
            let said = repeated.map(|(gateway, seat)| (gateway.clone(), (seat.process, seat.answer.1.clone())));
            return Some(said.collect());
        }
    }
}

/// How many requests the engine holds; `None` when it does not say.
async fn count(shared: &Shared, question: &Question) -> Option<u32> {
    let worker = &question.worker;
    let runtime = worker.runtime();
    let (url, key) = (worker.dp_base_url().unwrap_or(worker.spec.url.as_str()), worker.spec.api_key.as_deref());
    let at = Address { url, key, limit: ANSWERS };
    let runtime = if runtime == Runtime::Unspecified { Runtime::Sglang } else { runtime };
    match shared.client.engines().requests(at, runtime).await {
        Ok(counts) => {
            let rank = worker.label("dp_rank").and_then(|rank| rank.parse::<u32>().ok());
            let of_it = counts?.into_iter().filter(|count| rank.is_none_or(|rank| count.rank == rank));
            Some(of_it.fold(0u32, |sum, count| sum.saturating_add(count.requests)))
        }
        Err(error) => {
            tracing::debug!(target: "smg", worker = url, %error, "an engine does not say how many requests it holds");
            None
        }
    }
}
