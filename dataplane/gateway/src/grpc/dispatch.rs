//! From a selected pair to running legs.
//!
//! A request is one dispatch for each of its prompts. On engines that meet at a rendezvous it is one for each prompt and sample, because a
//! rendezvous serves one sequence (SMG PD docs, "Parallel Sampling"). The dispatches of a request start together and fail together: the
//! first leg that does not start answers the client, and the others are dropped, which aborts them by the rules of their leg.
//!
//! Both legs of a dispatch go by one request id, a new one at each attempt: an engine may keep an id alive after its request is over.

use std::sync::Arc;
use std::time::Instant;

use futures::future::try_join_all;
use smg_engines::grpc::Message;
use smg_engines::grpc::request::sample_id;
use smg_fleet::Runtime;
use smg_telemetry::trace::{SpanContext, TRACEPARENT};
use tonic::metadata::{MetadataMap, MetadataValue};
use uuid::Uuid;

use super::claim::{Claim, Holding};
use super::client::{Call, Client, EngineRequest};
use super::leg::{self, Leg, Order, Part};
use super::prepare::Prepared;
use super::refusal::Refusal;
use super::rooms::Room;
use super::running::Running;
use super::status::LegFailure;
use super::{parallel, sequential};
use crate::admission::decode::Shed;
use crate::dispatch::{Failed, Job};
use crate::fleet::worker::RoutedWorker;
use crate::front::error::GatewayError;

/// Longest part of a client's id in the ids that engines see.
const LONGEST_BASE: usize = 128;

/// One worker of an attempt.
pub(super) struct Side {
    /// Which one.
    pub worker: Arc<RoutedWorker>,
    /// How it is spoken to.
    pub client: Client,
    /// What it is for.
    pub part: Part,
}

/// The claims on the workers of an attempt. Legs take shares of them, so that a worker is free when its last leg is over.
pub(super) struct Claims {
    /// None where one worker serves alone.
    pub prefill: Option<Claim>,
    /// On the one whose output is the answer.
    pub output: Claim,
}

/// One dispatch of a request.
#[derive(Debug, Clone)]
pub(super) struct Share {
    /// Which of its prompts.
    pub prompt: usize,
    /// Which sample of the prompt, where each is a dispatch of its own.
    pub sample: Option<u32>,
    /// The number of its first sample in the whole answer.
    pub base: u32,
    /// How many samples it has.
    pub samples: u32,
    /// The id of the prompt's dispatches, before samples are told apart.
    pub dispatch_id: String,
    /// By what id its engines know it.
    pub request_id: String,
}

/// What ties a leg to its other one, beside the request id.
#[derive(Debug, Clone)]
pub(super) enum Tie {
    /// Nothing, or what the engine says in its answer.
    None,
    /// Both meet here; it is held until both are over.
    Room(Arc<Room>),
    /// What was agreed on beforehand: the prefill holds it once it has ended, and does not say so.
    Handoff(String),
}

/// What all dispatches of an attempt share.
pub(super) struct Attempt<'a> {
    pub job: &'a Job<'a>,
    pub request: &'a Prepared,
    /// None where one worker serves alone.
    pub prefill: Option<Side>,
    /// The worker whose output is the answer.
    pub output: Side,
}

/// Whether engines of this runtime get one dispatch for each sample.
pub(super) fn fans_out(runtime: Runtime) -> bool {
    runtime != Runtime::Vllm
}

/// How many requests of its engines a request is.
pub(super) fn engine_requests(request: &Prepared, runtime: Runtime) -> u32 {
    let prompts = u32::try_from(request.prompts.len()).unwrap_or(u32::MAX);
    let samples = if fans_out(runtime) { request.generation().samples } else { 1 };
    prompts.saturating_mul(samples).max(1)
}

impl Attempt<'_> {
    /// Starts every dispatch and waits until all of them have answered.
    pub async fn run(&self, claims: Claims) -> Result<Vec<Running>, Failed> {
        let runtime = self.output.worker.engine();
        let shares = self.shares(runtime);
        let Claims { prefill: prefill_claim, output } = claims;
        let (Some(prefill), Some(claim)) = (&self.prefill, prefill_claim) else {
            return try_join_all(shares.iter().map(|share| self.alone(share, output.clone()))).await;
        };
        if runtime != Runtime::Vllm {
            let one = |share| parallel::run(self, prefill, (claim.clone(), output.clone()), share);
            return try_join_all(shares.iter().map(one)).await;
        }
        let begun: Result<Vec<_>, Failed> =
            shares.iter().map(|share| sequential::begin(self, prefill, &claim, share)).collect();
        let begun = begun?;
        // From here on the prefill is held by its legs alone, and the decode by whoever has not sent its leg.
        drop(claim);
        let rest: Vec<_> = begun.into_iter().map(|begun| begun.finish(self, output.clone())).collect();
        drop(output);
        try_join_all(rest).await
    }

    fn shares(&self, runtime: Runtime) -> Vec<Share> {
        let samples = self.request.generation().samples.max(1);
        let apart = fans_out(runtime) && samples > 1;
        let prompts = self.request.prompts.len();
        let mut shares = Vec::new();
        for prompt in 0..prompts {
            let base = u32::try_from(prompt).unwrap_or(u32::MAX).saturating_mul(samples);
            let id = self.request_id((prompts > 1).then_some(prompt));
            if apart {
                shares.extend((0..samples).map(|sample| Share {
                    prompt,
                    sample: Some(sample),
                    base: base.saturating_add(sample),
                    samples: 1,
                    dispatch_id: id.clone(),
                    request_id: sample_id(&id, sample),
                }));
            } else {
                shares.push(Share { prompt, sample: None, base, samples, dispatch_id: id.clone(), request_id: id });
            }
        }
        shares
    }

    /// An id that no engine has seen: this process's prefix, the client's id for those who read engine logs, and what makes it unique.
    fn request_id(&self, prompt: Option<usize>) -> String {
        let base = self.request.base_id.as_str();
        let base = base.get(..base.floor_char_boundary(LONGEST_BASE)).unwrap_or_default();
        let (prefix, unique) = (&self.job.core.request_prefix, Uuid::now_v7());
        match prompt {
            Some(prompt) => format!("{prefix}{base}-p{prompt}-{unique}"),
            None => format!("{prefix}{base}-{unique}"),
        }
    }

    /// Starts a leg. It runs whether or not it is read.
    pub fn start(
        &self,
        (side, claim): (&Side, &Claim),
        share: &Share,
        request: EngineRequest,
        samples: u32,
        tie: Tie,
    ) -> Leg<Message> {
        let (room, handoff) = match tie {
            Tie::None => (None, None),
            Tie::Room(room) => (Some(room), None),
            Tie::Handoff(params) => (None, Some(params)),
        };
        let call = Call::new(side.client.clone(), request, share.request_id.clone(), self.metadata(side), samples);
        let (leg, task) = leg::prepare(Order {
            exchange: call.handing_over(handoff),
            account: Holding::new(self.job.core, claim, side.part, room),
            part: side.part,
            samples,
            deadline: self.job.deadline,
            closing: self.job.core.closing.clone(),
        });
        smg_net::spawn("grpc-leg", self.job.core.background.track_future(task));
        leg
    }

    fn metadata(&self, side: &Side) -> MetadataMap {
        let mut metadata = MetadataMap::new();
        let span: Option<SpanContext> = self.job.spans.map(|spans| match side.part {
            Part::Prefill => spans.prefill,
            Part::Decode | Part::Regular => spans.output,
        });
        let trace = match span {
            Some(span) => Some(span.to_string()),
            // A trace that is not recorded here is passed on as it came.
            None => {
                let given = self.job.request.headers.get(TRACEPARENT);
                given.and_then(|given| given.to_str().ok()).map(str::to_owned)
            }
        };
        if let Some(value) = trace.and_then(|trace| MetadataValue::try_from(trace).ok()) {
            metadata.insert(TRACEPARENT, value);
        }
        let key = side.worker.record.spec.api_key.as_deref();
        if let Some(value) = key.and_then(|key| MetadataValue::try_from(format!("Bearer {key}")).ok()) {
            metadata.insert("authorization", value);
        }
        metadata
    }

    /// A leg failed before it had answered.
    pub fn not_started(&self, side: &Side, failure: &LegFailure) -> Failed {
        self.failed(side, Refusal::not_started(side.part, failure))
    }

    /// The rooms on the decode worker were lost before its leg was sent.
    pub fn shed(&self, side: &Side, shed: Shed) -> Failed {
        Failed::gateway(GatewayError::Refused(super::not_admitted(self.job, &side.worker, shed)), None)
    }

    /// A leg failed.
    pub fn failed(&self, side: &Side, refusal: Refusal) -> Failed {
        let blamed = refusal.retryable.then(|| side.worker.id());
        Failed::gateway(GatewayError::Refused(refusal), blamed)
    }

    async fn alone(&self, share: &Share, claim: Claim) -> Result<Running, Failed> {
        let side = &self.output;
        let request = self.request.for_engine(&side.worker, share).map_err(|refusal| self.failed(side, refusal))?;
        let request = request.alone(side.worker.dp_rank);
        self.job.note(|attempt, now| attempt.decode_sent_ms = attempt.decode_sent_ms.or(Some(now)));
        let mut output = self.start((side, &claim), share, request, share.samples, Tie::None);
        let sent = Instant::now();
        drop(claim);
        let first = self.first(side, &mut output).await?;
        self.job.note(|attempt, now| attempt.decode_head_ms = attempt.decode_head_ms.or(Some(now)));
        Ok(Running::new((output, sent), Part::Regular, first, share.base))
    }

    /// The first message of a leg.
    pub async fn first(&self, side: &Side, leg: &mut Leg<Message>) -> Result<Message, Failed> {
        match leg.next().await {
            Some(Ok(first)) => Ok(first),
            Some(Err(failure)) => Err(self.not_started(side, &failure)),
            None => Err(self.not_started(side, &LegFailure::timed_out())),
        }
    }
}
