//! Parallel dispatch: both legs at once around a rendezvous (SMG PD docs, "Parallel Dispatch (SGLang, TokenSpeed)").
//!
//! The first leg that fails before both have answered ends the dispatch. When that is a prefill that never answered, the decode has nothing to
//! receive and is aborted at once; a prefill that breaks off later may be in the middle of its transfer, and the decode's abort waits as
//! ever. When it is the decode, the prefill is aborted at once. When both fail at the same time the prefill's error is the client's: the
//! decode's is most likely the consequence.

use std::sync::Arc;
use std::time::Instant;

use smg_engines::grpc::{self as wire, Message, Rendezvous, Residue};
use smg_engines::sglang::Ranks;
use smg_fleet::Runtime;

use super::claim::Claim;
use super::dispatch::{Attempt, Share, Side, Tie};
use super::leg::Leg;
use super::refusal::Refusal;
use super::running::{PrefillReport, Running};
use super::status::LegFailure;
use crate::dispatch::Failed;

pub(super) async fn run(
    attempt: &Attempt<'_>,
    prefill: &Side,
    claims: (Claim, Claim),
    share: &Share,
) -> Result<Running, Failed> {
    let (job, decode) = (attempt.job, &attempt.output);
    let (prefill_worker, decode_worker) = (&prefill.worker, &decode.worker);
    let width = prefill_worker.record.label("dp_size").and_then(|size| size.parse().ok());
    let residue = width.zip(prefill_worker.dp_rank).and_then(|(width, rank)| Residue::new(rank, width));
    let room = job.core.rooms.take(|| match prefill_worker.engine() {
        Runtime::Tokenspeed => wire::tokenspeed::room(rand::random(), residue),
        _ => wire::sglang::room(rand::random(), residue),
    });
    let port = prefill_worker.record.spec.bootstrap_port;
    let rendezvous = Rendezvous::new(&*prefill_worker.bootstrap_host, port, room.number());
    let ranks = Ranks { prefill: prefill_worker.dp_rank, decode: decode_worker.dp_rank };
    let request =
        attempt.request.for_engine(decode_worker, share).map_err(|refusal| attempt.failed(decode, refusal))?;
    let (prefill_request, decode_request) = request.around(&rendezvous, ranks);
    job.note(|attempt, now| {
        if attempt.bootstrap_rooms.len() < 16 {
            attempt.bootstrap_rooms.push(room.number());
        }
        attempt.prefill_sent_ms = attempt.prefill_sent_ms.or(Some(now));
        attempt.decode_sent_ms = attempt.decode_sent_ms.or(Some(now));
    });
    claims.1.dispatch().map_err(|shed| attempt.shed(decode, shed))?;
    let mut prefill_leg = attempt.start((prefill, &claims.0), share, prefill_request, 1, Tie::Room(Arc::clone(&room)));
    let mut decode_leg = attempt.start((decode, &claims.1), share, decode_request, 1, Tie::Room(room));
    let sent = Instant::now();
    drop(claims);
    let mut answers = Answers { report: PrefillReport::default(), prefilled: false, ended: false, first: None };
    while let Some(lost) = answers.next(&mut prefill_leg, &mut decode_leg).await {
        match lost {
            Step::Prefill => job.note(|attempt, now| attempt.prefill_head_ms = attempt.prefill_head_ms.or(Some(now))),
            Step::Decode => job.note(|attempt, now| attempt.decode_head_ms = attempt.decode_head_ms.or(Some(now))),
            Step::PrefillFailed(failure) if answers.prefilled => {
                return Err(attempt.failed(prefill, Refusal::prefill_stream(&failure)));
            }
            Step::PrefillFailed(failure) => {
                decode_leg.give_up();
                return Err(attempt.not_started(prefill, &failure));
            }
            Step::DecodeFailed(failure) => return Err(attempt.not_started(decode, &failure)),
        }
    }
    let Answers { report, ended, first, .. } = answers;
    let Some(first) = first else { return Err(attempt.not_started(decode, &LegFailure::timed_out())) };
    let rest = (!ended).then_some(prefill_leg);
    Ok(Running::new((decode_leg, sent), decode.part, first, share.base).with_prefill(rest, report))
}

/// What the legs have answered so far.
struct Answers {
    report: PrefillReport,
    prefilled: bool,
    ended: bool,
    first: Option<Message>,
}

enum Step {
    Prefill,
    Decode,
    PrefillFailed(LegFailure),
    DecodeFailed(LegFailure),
}

impl Answers {
    /// What happens next; none when both legs have answered.
    async fn next(&mut self, prefill: &mut Leg<Message>, decode: &mut Leg<Message>) -> Option<Step> {
        if self.prefilled && self.first.is_some() {
            return None;
        }
        tokio::select! {
            biased;
            reply = prefill.next(), if !self.ended => match reply {
                Some(Ok(message)) => {
                    self.prefilled = true;
                    self.report.note(message);
                    Some(Step::Prefill)
                }
                Some(Err(failure)) => Some(Step::PrefillFailed(failure)),
                None => {
                    (self.prefilled, self.ended) = (true, true);
                    Some(Step::Prefill)
                }
            },
            reply = decode.next(), if self.first.is_none() => match reply {
                Some(Ok(message)) => {
                    self.first = Some(message);
                    Some(Step::Decode)
                }
                Some(Err(failure)) => Some(Step::DecodeFailed(failure)),
                None => Some(Step::DecodeFailed(LegFailure::timed_out())),
            },
            else => None,
        }
    }
}
