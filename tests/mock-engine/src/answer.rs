//! From a job to its answer: the work up to the first token, then the text, whole or streamed.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::engine::Core;
use crate::generate::{Events, Job, WriteStep};
use crate::http::{Body, Pieces, Reply};
use crate::load::Running;

/// Why a request gets no text.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) status: u16,
    pub(crate) message: String,
}

impl Failure {
    pub(crate) fn new(status: u16, message: impl Into<String>) -> Self {
        Failure { status, message: message.into() }
    }
}

/// What stands before the first token once it is there.
pub(crate) struct Prefilled {
    pub(crate) running: Running,
    /// `kv_transfer_params` of the answer, as JSON.
    pub(crate) transfer: Option<String>,
}

/// How an engine writes its answers.
pub(crate) struct Format {
    pub(crate) step: WriteStep,
    pub(crate) whole: fn(&Job, Option<&str>) -> Vec<u8>,
    /// The JSON of an error.
    pub(crate) error: fn(&Job, &Failure) -> String,
}

/// Does `work`, which ends when the first token is there, and answers with the job's text.
pub(crate) async fn deliver(
    core: &Arc<Core>,
    job: Arc<Job>,
    format: &'static Format,
    work: impl Future<Output = Result<Prefilled, Failure>> + Send + 'static,
) -> Reply {
    let token_delay = core.settings.token_delay;
    let generated = job.completion_tokens() as u64;
    if job.stream && core.settings.early_head {
        let core = Arc::clone(core);
        return Reply::events(Body::Later(Box::pin(async move {
            match work.await {
                Ok(prefilled) => {
                    core.load.generated_tokens.fetch_add(generated, Ordering::Relaxed);
                    Box::new(Events::new(job, format.step, token_delay, prefilled.running)) as Box<dyn Pieces>
                }
                Err(failure) => Box::new(FailedEvents::new((format.error)(&job, &failure))),
            }
        })));
    }
    let prefilled = match work.await {
        Ok(prefilled) => prefilled,
        Err(failure) => return Reply::json(failure.status, (format.error)(&job, &failure)),
    };
    core.load.generated_tokens.fetch_add(generated, Ordering::Relaxed);
    if job.stream {
        let events = Events::new(job, format.step, token_delay, prefilled.running);
        return Reply::events(Body::Pieces(Box::new(events)));
    }
    let rest = u32::try_from(job.length - 1).unwrap_or(u32::MAX);
    if !token_delay.is_zero() && rest > 0 {
        tokio::time::sleep(token_delay.saturating_mul(rest)).await;
    }
    Reply::json(200, (format.whole)(&job, prefilled.transfer.as_deref()))
}

/// A stream that has failed after its head: the error as an event, then the end marker.
struct FailedEvents(std::array::IntoIter<String, 2>);

impl FailedEvents {
    fn new(error: String) -> Self {
        FailedEvents([format!("data: {error}\n\n"), "data: [DONE]\n\n".to_owned()].into_iter())
    }
}

impl Pieces for FailedEvents {
    fn next(&mut self, out: &mut Vec<u8>) -> Option<Duration> {
        out.extend_from_slice(self.0.next()?.as_bytes());
        Some(Duration::ZERO)
    }
}
