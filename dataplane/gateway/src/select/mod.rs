//! Choosing the workers of one attempt.
//!
//! The prefill policy picks among the prefills that have an available compatible decode, then the decode policy picks among that prefill's
//! available partners. An attempt avoids what the attempts before it tried, as long as something else is there. Pure but for the claims
//! and the policies' own memory: availability and loads are read once, time and randomness are passed in.

use std::sync::Arc;

use smallvec::SmallVec;
use smg_engines::Legs;
use smg_fleet::{Wire, WorkerId};
use smg_policies::{Candidate, Leg};

use crate::decision::{Exclusion, Picked};
use crate::fleet::table::ModelPool;
use crate::fleet::worker::{InFlight, RoutedWorker, Standing};
use crate::hints::Hints;

mod error;
mod tried;
mod usable;

pub use error::SelectError;
use error::why_nothing;
use tried::Avoid;
pub use tried::Tried;
use usable::{Indices, Usable};

/// The workers of one attempt, claimed.
#[derive(Debug)]
pub enum Selection {
    /// One worker serves the whole request.
    Regular(InFlight),
    /// A prefill hands over to a decode.
    Pair {
        /// The prefill.
        prefill: InFlight,
        /// The decode.
        decode: InFlight,
    },
}

impl Selection {
    /// The wire of its workers.
    pub fn wire(&self) -> Wire {
        match self {
            Self::Regular(worker) | Self::Pair { prefill: worker, .. } => worker.worker().record.wire(),
        }
    }

    /// Prefill and decode; twice the same when there is only one worker.
    pub fn ids(&self) -> [WorkerId; 2] {
        match self {
            Self::Regular(worker) => [worker.worker().id(); 2],
            Self::Pair { prefill, decode } => [prefill.worker().id(), decode.worker().id()],
        }
    }
}

/// What an attempt chooses by.
#[derive(Debug)]
pub struct Choice<'a> {
    /// The workers and policies.
    pub pool: &'a ModelPool,
    /// What earlier attempts tried.
    pub tried: &'a Tried,
    /// The request.
    pub hints: &'a Hints<'a>,
    /// The wire that the workers must speak; `None` = any. The legs of a pair speak one anyway.
    pub wire: Option<Wire>,
    /// Time, in milliseconds of the gateway's clock.
    pub now_ms: u64,
    /// How often engines are asked for their load, in seconds.
    pub load_interval_secs: u32,
}

/// How a selection came about.
#[derive(Debug, Default)]
pub struct Trace {
    /// Why workers were passed over.
    pub exclusions: Vec<Exclusion>,
    /// What policies decided, in order.
    pub picks: Vec<Picked>,
}

/// Picks and claims the workers of an attempt. `entropy` yields random numbers; `trace` receives how it came about.
///
/// # Errors
/// When nothing can be picked, and why.
pub fn select(
    choice: &Choice<'_>,
    mut entropy: impl FnMut() -> u64,
    trace: &mut Trace,
) -> Result<Selection, SelectError> {
    let pool = choice.pool;
    let regulars = choice.usable(pool.regulars.iter(), &mut trace.exclusions);
    let mut prefills = choice.usable(pool.prefills.iter().map(|entry| &entry.worker), &mut trace.exclusions);
    let decodes = choice.usable(pool.decodes.iter(), &mut trace.exclusions);
    let full =
        pool.settings.prefill_admission.limit.is_some() && prefills.keep_those_with_room(pool, &mut trace.exclusions);
    let paired = !prefills.is_empty() && !decodes.is_empty() && pool.mismatch.is_none();
    // Where a model has both kinds of workers, each kind gets its share of the traffic.
    let regular_share = regulars.len() as u64;
    let pair_share = if paired { (prefills.len() + decodes.len()) as u64 } else { 0 };
    if regular_share > 0 && (pair_share == 0 || entropy() % (regular_share + pair_share) < regular_share) {
        return choice.regular(regulars, &mut entropy, trace);
    }
    if !paired {
        let waits = full && prefills.is_empty() && !decodes.is_empty() && pool.mismatch.is_none();
        return Err(if waits { SelectError::PrefillFull } else { why_nothing(pool, prefills.is_empty()) });
    }
    choice.pair(prefills, decodes, &mut entropy, trace).map_err(|error| match error {
        // Another request may have taken the last place in between, or the one that the client insists on is taken.
        SelectError::NoPartner | SelectError::Declined { leg: "prefill", .. }
            if full || pool.prefills.iter().any(|entry| entry.worker.is_full()) =>
        {
            SelectError::PrefillFull
        }
        error => error,
    })
}

/// Picks and claims one worker for a route that has no second leg.
///
/// # Errors
/// When nothing can be picked, and why.
pub fn select_one(
    choice: &Choice<'_>,
    legs: Legs,
    mut entropy: impl FnMut() -> u64,
    trace: &mut Trace,
) -> Result<Selection, SelectError> {
    let pool = choice.pool;
    let regulars = choice.usable(pool.regulars.iter(), &mut trace.exclusions);
    if !regulars.is_empty() || legs == Legs::RegularOnly {
        return choice.regular(regulars, &mut entropy, trace);
    }
    let prefills = choice.usable(pool.prefills.iter().map(|entry| &entry.worker), &mut trace.exclusions);
    if prefills.is_empty() {
        return Err(SelectError::NoPrefillServers);
    }
    let (mut rest, standing) = choice.preferred(prefills)?;
    // The policy of whole requests, not that of the prefill leg: no KV cache is built.
    while !rest.is_empty() {
        let picked = choice.pick(Leg::Regular, Leg::Prefill, &rest, standing, entropy(), &mut trace.picks)?;
        if let Some(claim) = choice.claim(Leg::Regular, &pool.prefills[rest[picked]].worker) {
            return Ok(Selection::Regular(claim));
        }
        rest.remove(picked);
    }
    Err(SelectError::NoPrefillServers)
}

impl Choice<'_> {
    /// Who can serve, and why others cannot. A further attempt leaves workers that asked for a pause in peace.
    fn usable<'a>(
        &self,
        workers: impl Iterator<Item = &'a Arc<RoutedWorker>>,
        exclusions: &mut Vec<Exclusion>,
    ) -> Usable {
        let mut usable = Usable::default();
        for (index, worker) in workers.enumerate() {
            if self.wire.is_some_and(|wire| worker.record.wire() != wire) {
                continue;
            }
            let reason = match worker.standing(self.now_ms) {
                Ok(Standing::Fine) => {
                    usable.fine.push(index);
                    continue;
                }
                Ok(Standing::Paced) if self.tried.is_empty() => {
                    usable.paced.push(index);
                    "retry_after"
                }
                Ok(Standing::Paced) => "retry_after",
                Ok(Standing::Overloaded) => {
                    usable.overloaded.push(index);
                    "overloaded"
                }
                Err(reason) => reason,
            };
            exclusions.push(Exclusion { worker: worker.url.as_str().to_owned(), reason });
        }
        usable
    }

    /// The workers to choose among where one leg is enough. Overloaded ones only where they are not refused.
    fn preferred(&self, usable: Usable) -> Result<(Indices, Standing), SelectError> {
        let (indices, standing) = usable.best();
        self.allow(standing)?;
        Ok((indices, standing))
    }

    fn allow(&self, standing: Standing) -> Result<(), SelectError> {
        if standing == Standing::Overloaded && self.pool.settings.overload.shed {
            return Err(SelectError::Overloaded {
                model: Arc::clone(&self.pool.model),
                retry_after_secs: self.load_interval_secs,
            });
        }
        Ok(())
    }

    fn regular(
        &self,
        usable: Usable,
        entropy: &mut impl FnMut() -> u64,
        trace: &mut Trace,
    ) -> Result<Selection, SelectError> {
        let pool = self.pool;
        if usable.is_empty() {
            return Err(SelectError::Unavailable("regular"));
        }
        let (available, standing) = self.preferred(usable)?;
        let untried = |index: &usize| !self.tried.failed.contains(&pool.regulars[*index].id());
        let mut rest: Indices = available.iter().copied().filter(untried).collect();
        if rest.is_empty() {
            rest = available;
        }
        // A breaker may close its door between the check and the claim: then the next candidate is asked.
        while !rest.is_empty() {
            let picked = self.pick(Leg::Regular, Leg::Regular, &rest, standing, entropy(), &mut trace.picks)?;
            if let Some(claim) = self.claim(Leg::Regular, &pool.regulars[rest[picked]]) {
                return Ok(Selection::Regular(claim));
            }
            rest.remove(picked);
        }
        Err(SelectError::Unavailable("regular"))
    }

    /// Each leg chooses among its best workers. Only where none of these pair, the others are looked at too.
    fn pair(
        &self,
        prefills: Usable,
        decodes: Usable,
        entropy: &mut impl FnMut() -> u64,
        trace: &mut Trace,
    ) -> Result<Selection, SelectError> {
        let ((some_prefills, prefill), (some_decodes, decode)) = (prefills.best(), decodes.best());
        self.allow(prefill.max(decode))?;
        let first = self.pair_of((&some_prefills, prefill), (&some_decodes, decode), entropy, &mut trace.picks);
        let all = (some_prefills.len(), some_decodes.len()) == (prefills.len(), decodes.len());
        if all || !matches!(first, Err(SelectError::NoPartner)) {
            return first;
        }
        for standing in [Standing::Paced, Standing::Overloaded] {
            let (prefills, decodes) = (prefills.up_to(standing), decodes.up_to(standing));
            if standing == Standing::Overloaded {
                self.allow(standing)?;
            }
            let wider = self.pair_of((&prefills, standing), (&decodes, standing), entropy, &mut trace.picks);
            if !matches!(wider, Err(SelectError::NoPartner)) {
                return wider;
            }
        }
        first
    }

    fn pair_of(
        &self,
        (prefills, prefill_standing): (&Indices, Standing),
        (decodes, decode_standing): (&Indices, Standing),
        entropy: &mut impl FnMut() -> u64,
        picks: &mut Vec<Picked>,
    ) -> Result<Selection, SelectError> {
        let (pool, tried) = (self.pool, self.tried);
        let levels: &[Avoid] = if tried.is_empty() {
            &[Avoid::Nothing]
        } else {
            &[Avoid::FailedWorkers, Avoid::TriedPairs, Avoid::Nothing]
        };
        let mut reason = SelectError::NoPartner;
        for avoid in levels {
            let partners = |prefill: usize| {
                let entry = &pool.prefills[prefill];
                let allowed = |decode: &usize| avoid.allows(tried, &entry.worker, &pool.decodes[*decode]);
                both(&entry.partners, decodes).filter(allowed)
            };
            let mut candidates: Indices =
                prefills.iter().copied().filter(|index| partners(*index).next().is_some()).collect();
            while !candidates.is_empty() {
                let picked =
                    match self.pick(Leg::Prefill, Leg::Prefill, &candidates, prefill_standing, entropy(), picks) {
                        Ok(picked) => picked,
                        Err(declined) => {
                            reason = declined;
                            break;
                        }
                    };
                let index = candidates.remove(picked);
                let Some(prefill) = self.claim(Leg::Prefill, &pool.prefills[index].worker) else { continue };
                match self.decode(partners(index).collect(), decode_standing, entropy, picks) {
                    Ok(Some(decode)) => return Ok(Selection::Pair { prefill, decode }),
                    Ok(None) => {}
                    Err(declined) => reason = declined,
                }
            }
        }
        Err(reason)
    }

    /// Picks and claims one of `rest`; none if all of them closed their door.
    fn decode(
        &self,
        mut rest: Indices,
        standing: Standing,
        entropy: &mut impl FnMut() -> u64,
        picks: &mut Vec<Picked>,
    ) -> Result<Option<InFlight>, SelectError> {
        // Whoever has a room at once is chosen before whoever has to be waited for. A worker that the client names is waited for.
        if self.hints.target_worker().is_none() {
            let has_room = |index: &usize| !self.pool.decodes[*index].runtime.window.is_full();
            let roomy: Indices = rest.iter().copied().filter(has_room).collect();
            if !roomy.is_empty() {
                rest = roomy;
            }
        }
        while !rest.is_empty() {
            let picked = self.pick(Leg::Decode, Leg::Decode, &rest, standing, entropy(), picks)?;
            if let Some(claim) = self.claim(Leg::Decode, &self.pool.decodes[rest[picked]]) {
                return Ok(Some(claim));
            }
            rest.remove(picked);
        }
        Ok(None)
    }

    /// Claims a worker that the policy of `leg` chose.
    fn claim(&self, leg: Leg, worker: &Arc<RoutedWorker>) -> Option<InFlight> {
        // A prefill worker that serves a route of one leg computes no prompt: its limit does not count.
        let mut claim = if leg == Leg::Prefill { worker.claim_prefill()? } else { worker.claim()? };
        let policy = self.pool.policies.of(leg);
        if policy.reads_session() {
            let candidate = Candidate::new(worker.key(), worker.url.as_str(), worker.runtime.load());
            claim.hold(policy.begin(&candidate, &self.hints.view(&self.pool.model, &**policy, self.now_ms)));
        }
        if self.pool.settings.dp_minimum_tokens && worker.dp_rank.is_some() {
            worker.runtime.add_tokens(self.hints.prompt_cost());
        }
        Some(claim)
    }

    /// Asks the policy of a leg for one of `rest`, which are places in the list of workers of `role`. Returns the place in `rest`. Among
    /// overloaded workers no policy is asked: the least loaded one is taken.
    fn pick(
        &self,
        leg: Leg,
        role: Leg,
        rest: &Indices,
        standing: Standing,
        entropy: u64,
        picks: &mut Vec<Picked>,
    ) -> Result<usize, SelectError> {
        let pool = self.pool;
        let policy = pool.policies.of(leg);
        let candidate = |index: &usize| {
            let worker = self.worker(role, *index);
            Candidate::new(worker.key(), worker.url.as_str(), worker.runtime.load())
                .with_report(worker.runtime.report.load(self.now_ms))
        };
        let candidates: SmallVec<[Candidate<'_>; 32]> = rest.iter().map(candidate).collect();
        let leg = leg_name(role);
        if standing == Standing::Overloaded {
            let index = least_loaded(&candidates, entropy);
            picks.push(Picked { leg, policy: policy.name(), branch: OVERLOAD_FALLBACK, match_ratio: None });
            return index.ok_or(SelectError::Unavailable(leg));
        }
        // A client names a worker of the leg. If that one is not among the candidates, no other will do.
        let place = |wanted: usize| rest.iter().position(|index| *index == wanted).unwrap_or(usize::MAX);
        let target = self.hints.target_worker().map(place);
        let request = self.hints.view(&pool.model, &**policy, self.now_ms).with_target_worker(target);
        let pick = policy.decide(&candidates, &request, entropy);
        picks.push(Picked { leg, policy: policy.name(), branch: pick.branch, match_ratio: pick.match_ratio });
        let declined = SelectError::Declined { policy: policy.name(), leg };
        let picked = pick.index.filter(|index| *index < rest.len()).ok_or(declined)?;
        let by_tokens = pool.settings.dp_minimum_tokens && target.is_none();
        Ok(if by_tokens { self.rank_with_fewest_tokens(role, rest, picked) } else { picked })
    }

    /// The place of the rank with the fewest tokens, among the candidates that are ranks of the same engine as the one at `picked`.
    fn rank_with_fewest_tokens(&self, role: Leg, rest: &Indices, picked: usize) -> usize {
        let worker = |place: usize| self.worker(role, rest[place]);
        let Some(engine) = worker(picked).record.dp_base_url() else { return picked };
        let ranks = (0..rest.len()).filter(|place| worker(*place).record.dp_base_url() == Some(engine));
        ranks.min_by_key(|place| (worker(*place).runtime.tokens(), *place != picked)).unwrap_or(picked)
    }

    /// The worker of a role at this place in its list.
    fn worker(&self, role: Leg, index: usize) -> &Arc<RoutedWorker> {
        match role {
            Leg::Regular => &self.pool.regulars[index],
            Leg::Prefill => &self.pool.prefills[index].worker,
            Leg::Decode => &self.pool.decodes[index],
        }
    }
}

/// The branch of a decision among overloaded workers.
pub const OVERLOAD_FALLBACK: &str = "overload_fallback";

/// The candidate with the fewest requests, in flight here or reported by its engine; any of those that tie.
fn least_loaded(candidates: &[Candidate<'_>], entropy: u64) -> Option<usize> {
    let load = |candidate: &Candidate<'_>| {
        let reported = candidate.report.map_or(0, |report| report.running.saturating_add(report.waiting));
        candidate.load.max(reported)
    };
    let least = candidates.iter().map(load).min()?;
    let tied: Indices = (0..candidates.len()).filter(|index| load(&candidates[*index]) == least).collect();
    tied.get((entropy % tied.len().max(1) as u64) as usize).copied()
}

/// The name of a leg in messages, records and labels.
pub fn leg_name(leg: Leg) -> &'static str {
    match leg {
        Leg::Regular => "regular",
        Leg::Prefill => "prefill",
        Leg::Decode => "decode",
    }
}

/// The common members of two ascending lists.
fn both<'a>(one: &'a [usize], other: &'a [usize]) -> impl Iterator<Item = usize> + 'a {
    let mut other = other.iter().copied().peekable();
    one.iter().copied().filter(move |wanted| {
        while other.next_if(|next| next < wanted).is_some() {}
        other.peek() == Some(wanted)
    })
}
