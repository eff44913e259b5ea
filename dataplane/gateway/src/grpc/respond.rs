//! From running legs to the answer.
//!
//! The reader of the answer drives everything: when it asks for more, messages of the legs are taken in, turned into text and written in the
//! client's API. What it does not ask for waits in the legs' channels, and then in the engines. Nobody else holds the legs, so that they
//! notice at once when the client leaves.
//!
//! An answer that is no stream is written at its end; until then a failure is still an error status, and another attempt is possible.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant as StdInstant;

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use futures::stream::{SelectAll, StreamExt, select_all};
use http::{HeaderValue, Response, StatusCode, header};
use http_body::Frame;
use prometheus::Histogram;
use smg_apis::{Answer, Failure, Finish, FinishReason, Usage};
use smg_engines::grpc::Message;
use tokio::time::{Instant, Sleep};

use super::assemble::{Assembly, Taken};
use super::leg::Part;
use super::prepare::Prepared;
use super::refusal::Refusal;
use super::responses::Shelf;
use super::running::Running;
use super::status::{FailureKind, LegFailure};
use crate::dispatch::scope::Scope;
use crate::dispatch::{Failed, Job};
use crate::fleet::worker::RoutedWorker;
use crate::front::error::GatewayError;
use crate::front::observe::ROUTED_WORKER;
use crate::relay::Dialect;

/// Events that are there together are sent together, as long as they are smaller than this.
const GATHERED: usize = 16 * 1024;

/// When the legs were sent, and what is measured from there.
pub(super) struct Timing {
    /// When the leg was sent whose output is the answer.
    pub dispatched: StdInstant,
    /// What the first output ends.
    pub first_output: Vec<(Histogram, StdInstant)>,
}

/// Answers with the output of running legs.
pub(super) async fn answer(
    job: &Job<'_>,
    request: &Arc<Prepared>,
    running: Vec<Running>,
    timing: Timing,
    worker: &RoutedWorker,
    scope: &mut Option<Scope>,
) -> Result<Response<Body>, Failed> {
    let assemblies =
        request.assemblies(worker.engine()).map_err(|refusal| Failed::gateway(GatewayError::Refused(refusal), None))?;
    let mut output = Output::new(job, request, (assemblies, running), timing, worker, scope.take());
    let streamed = request.generation().stream;
    let body = if streamed {
        let keep_alive = Some(job.core.options.sse_keep_alive).filter(|period| !period.is_zero());
        let dialect = if job.request.route.is_anthropic() { Dialect::Anthropic } else { Dialect::OpenAi };
        Body::new(Events { output, dialect, keep_alive, heard: Instant::now(), deadline: job.deadline, timer: None })
    } else {
        match output.collect().await {
            Ok(body) => Body::from(body),
            Err((part, failure)) => {
                *scope = output.scope.take();
                let refusal = Refusal::collected(part, &failure);
                let blamed = (refusal.retryable && part != Part::Prefill).then(|| worker.id());
                return Err(Failed::gateway(GatewayError::Refused(refusal), blamed));
            }
        }
    };
    Ok(with_head(body, streamed, Some(worker.url.as_str())))
}

/// Answers a request for no tokens at all: the prompt is counted.
pub(super) fn nothing(job: &Job<'_>, request: &Prepared, scope: &mut Option<Scope>) -> Response<Body> {
    let (generation, mut body) = (request.generation(), BytesMut::new());
    let mut answer = request.begin_answer(job, None);
    answer.start(&mut body);
    let prompts = request.prompts.iter().flat_map(|prompt| {
        let tokens = u32::try_from(prompt.ids.len()).unwrap_or(u32::MAX);
        std::iter::repeat_n(tokens, generation.samples as usize)
    });
    for (sample, prompt_tokens) in (0..).zip(prompts) {
        let usage = Usage { prompt_tokens, ..Usage::default() };
        let reason = FinishReason::Length;
        let finish = Finish { sample, reason, matched_stop: None, usage, prompt_logprobs: Vec::new() };
        answer.finish(&finish, &mut body);
    }
    answer.end(&mut body);
    if let Some(mut scope) = scope.take() {
        scope.complete(StatusCode::OK);
    }
    with_head(Body::from(body.freeze()), generation.stream, None)
}

/// The response with this body.
fn with_head(body: Body, streamed: bool, worker: Option<&str>) -> Response<Body> {
    let mut response = Response::new(body);
    let kind = if streamed { "text/event-stream" } else { "application/json" };
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    if streamed {
        response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    }
    if let Some(url) = worker.and_then(|url| HeaderValue::from_str(url).ok()) {
        response.headers_mut().insert(ROUTED_WORKER, url);
    }
    response
}

/// An answer in the making.
struct Output {
    running: SelectAll<Running>,
    samples: Vec<Assembly>,
    /// Samples that have not ended.
    unfinished: usize,
    answer: Box<dyn Answer>,
    written: BytesMut,
    timing: Timing,
    first_output: Option<StdInstant>,
    shelf: Arc<Shelf>,
    scope: Option<Scope>,
    attempt: usize,
    counts: Counts,
    /// Nothing more is written.
    over: bool,
}

/// What is counted of an answer.
struct Counts {
    metrics: Arc<smg_telemetry::Metrics>,
    labels: [String; 4],
    prompt_tokens: u64,
    output_tokens: u64,
}

impl Output {
    fn new(
        job: &Job<'_>,
        request: &Arc<Prepared>,
        (samples, running): (Vec<Assembly>, Vec<Running>),
        timing: Timing,
        worker: &RoutedWorker,
        scope: Option<Scope>,
    ) -> Self {
        let mut answer = request.begin_answer(job, worker.record.label("weight_version"));
        let mut written = BytesMut::new();
        answer.start(&mut written);
        let backend = scope.as_ref().map_or("pd", |scope| scope.backend().as_str());
        let labels = ["grpc", backend, &*job.model, job.request.route.endpoint_label()].map(str::to_owned);
        let prompt_tokens = request.prompts.iter().map(|prompt| prompt.ids.len() as u64).sum();
        Self {
            running: select_all(running),
            unfinished: samples.len(),
            samples,
            answer,
            written,
            timing,
            first_output: None,
            shelf: Arc::clone(&job.core.responses),
            scope,
            attempt: job.attempt,
            counts: Counts { metrics: Arc::clone(&job.core.metrics), labels, prompt_tokens, output_tokens: 0 },
            over: false,
        }
    }

    /// Takes in one message. True as long as there will be more.
    fn poll_advance(&mut self, cx: &mut Context<'_>) -> Poll<Result<bool, (Part, LegFailure)>> {
        if self.unfinished == 0 {
            return Poll::Ready(Ok(false));
        }
        match ready!(self.running.poll_next_unpin(cx)) {
            Some(Ok((sample, message))) => {
                let (before, last) = message.by_token();
                for message in before.into_iter().map(Message::Chunk).chain([last]) {
                    self.take(sample, message).map_err(|failure| (Part::Decode, failure))?;
                }
                Poll::Ready(Ok(self.unfinished > 0))
            }
            Some(Err(failed)) => Poll::Ready(Err(failed)),
            None => {
                let failure = LegFailure::incomplete();
                Poll::Ready(Err((Part::Decode, failure)))
            }
        }
    }

    fn take(&mut self, sample: u32, message: Message) -> Result<(), LegFailure> {
        let Some(assembly) = self.samples.get_mut(sample as usize) else { return Ok(()) };
        let Taken { prompt_logprobs, step, finish } = assembly.take(message)?;
        if let Some(logprobs) = prompt_logprobs {
            self.answer.prompt_logprobs(sample, &logprobs);
        }
        if let Some(step) = step {
            if self.first_output.is_none() && !step.token_ids.is_empty() {
                self.note_first_output();
            }
            self.counts.output_tokens += step.token_ids.len() as u64;
            self.answer.step(&step, &mut self.written);
        }
        if let Some(finish) = finish {
            self.unfinished -= 1;
            self.answer.finish(&finish, &mut self.written);
        }
        Ok(())
    }

    fn note_first_output(&mut self) {
        let now = StdInstant::now();
        self.first_output = Some(now);
        for (histogram, since) in self.timing.first_output.drain(..) {
            histogram.observe((now - since).as_secs_f64());
        }
        if let Some(scope) = &self.scope {
            scope.decision.attempt(self.attempt, |attempt, now| attempt.first_output_ms = Some(now));
        }
    }

    /// Ends the answer, which is complete.
    fn complete(&mut self) {
        self.over = true;
        self.answer.end(&mut self.written);
        if let Some(stored) = self.answer.stored() {
            self.shelf.keep(stored);
        }
        // Engines that go on although every sample has ended (at a stop string that they do not know) are told now.
        self.running = SelectAll::new();
        self.counts.observe(self.timing.dispatched, self.first_output);
        if let Some(mut scope) = self.scope.take() {
            scope.complete(StatusCode::OK);
        }
    }

    /// Ends the answer, which is broken.
    fn fail(&mut self, part: Part, failure: &LegFailure) {
        self.over = true;
        let words = match (failure.status, part) {
            (status, _) if status.is_client_error() => Failure::refused(status.as_u16(), failure.message.clone()),
            (_, Part::Prefill) => {
                Failure { kind: "stream_error", message: format!("Prefill stream error: {}", failure.message) }
            }
            _ => Failure::stream(&failure.message),
        };
        self.answer.fail(&words, &mut self.written);
        self.running = SelectAll::new();
        if let Some(mut scope) = self.scope.take() {
            let message = format!("{}: {}", part.as_str(), failure.message);
            scope.decision.attempt(self.attempt, |attempt, _| attempt.note_error(&message));
            let code = if failure.kind == FailureKind::TimedOut { "stream_timeout" } else { "stream_error" };
            scope.fail(failure.status, code);
        }
    }

    /// Waits for the whole answer.
    async fn collect(&mut self) -> Result<Bytes, (Part, LegFailure)> {
        while std::future::poll_fn(|cx| self.poll_advance(cx)).await? {}
        self.complete();
        Ok(self.written.split().freeze())
    }
}

impl Counts {
    fn observe(&self, dispatched: StdInstant, first_output: Option<StdInstant>) {
        let [router, backend, model, endpoint] = &self.labels;
        let labels = [router.as_str(), backend, model, endpoint];
        let metrics = &self.metrics;
        metrics.router_generation_duration.with_label_values(&labels).observe(dispatched.elapsed().as_secs_f64());
        if let Some(first) = first_output.filter(|_| self.output_tokens > 1) {
            let each = first.elapsed().as_secs_f64() / (self.output_tokens - 1) as f64;
            metrics.router_tpot.with_label_values(&labels).observe(each);
        }
        for (kind, count) in [("input", self.prompt_tokens), ("output", self.output_tokens)] {
            metrics.router_tokens.with_label_values(&[router, backend, model, endpoint, kind]).inc_by(count);
        }
    }
}

/// A streamed answer: a body of events.
struct Events {
    output: Output,
    dialect: Dialect,
    /// After how much silence a comment is sent.
    keep_alive: Option<std::time::Duration>,
    /// The end of the last silence.
    heard: Instant,
    deadline: Instant,
    timer: Option<Pin<Box<Sleep>>>,
}

impl Events {
    /// Ready when time wants something: true = the deadline is over, false = a comment is due.
    fn poll_timers(&mut self, cx: &mut Context<'_>) -> Poll<bool> {
        loop {
            let silence = self.keep_alive.map(|period| self.heard + period);
            let next = silence.map_or(self.deadline, |silence| silence.min(self.deadline));
            let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(next)));
            // A timer that rings too early is asked again: that is cheaper than to set it anew for each token.
            if timer.deadline() > next {
                timer.as_mut().reset(next);
            }
            ready!(timer.as_mut().poll(cx));
            let now = Instant::now();
            if now < next {
                timer.as_mut().reset(next);
                continue;
            }
            self.heard = now;
            return Poll::Ready(now >= self.deadline);
        }
    }
}

impl http_body::Body for Events {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = &mut *self;
        // Engines may have more to say than a slow client takes in time.
        if !this.output.over && Instant::now() >= this.deadline {
            let failure = LegFailure { message: "the request timed out".into(), ..LegFailure::timed_out() };
            this.output.fail(Part::Decode, &failure);
        }
        while !this.output.over && this.output.written.len() < GATHERED {
            match this.output.poll_advance(cx) {
                Poll::Ready(Ok(true)) => {}
                Poll::Ready(Ok(false)) => this.output.complete(),
                Poll::Ready(Err((part, failure))) => this.output.fail(part, &failure),
                Poll::Pending if !this.output.written.is_empty() => break,
                Poll::Pending => {
                    if ready!(this.poll_timers(cx)) {
                        let failure = LegFailure { message: "the request timed out".into(), ..LegFailure::timed_out() };
                        this.output.fail(Part::Decode, &failure);
                    } else {
                        let comment = Bytes::from_static(this.dialect.keep_alive());
                        return Poll::Ready(Some(Ok(Frame::data(comment))));
                    }
                }
            }
        }
        if this.output.written.is_empty() {
            return Poll::Ready(None);
        }
        if this.keep_alive.is_some() {
            this.heard = Instant::now();
        }
        Poll::Ready(Some(Ok(Frame::data(this.output.written.split().freeze()))))
    }

    fn is_end_stream(&self) -> bool {
        self.output.over && self.output.written.is_empty()
    }
}
