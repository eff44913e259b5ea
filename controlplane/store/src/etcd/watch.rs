//! Following the keys below a path, from a revision on.
//!
//! etcd says nothing for as long as nothing happens, and a connection that is dead says nothing either. So progress is asked for every
//! second; a stream that is silent for some of them is given up, and another endpoint is asked. Whoever follows reads the keys anew
//! then: nothing depends on where a stream ended, or on how far back etcd remembers (compaction).

use std::time::Duration;

use smg_services::etcd as pb;
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use super::client::{Etcd, LIMIT, request};
use super::keys::below;

/// Between two requests for progress.
const ASK: Duration = Duration::from_secs(1);
/// A stream that is silent for so long is dead.
pub(crate) const SILENCE: Duration = Duration::from_secs(4);

/// A stream of events.
pub(crate) struct Watcher<'a> {
    etcd: &'a Etcd,
    at: usize,
    ask: mpsc::Sender<pb::WatchRequest>,
    answers: Streaming<pb::WatchResponse>,
    ticks: tokio::time::Interval,
    heard: Instant,
}

fn of(union: pb::watch_request::RequestUnion) -> pb::WatchRequest {
    pb::WatchRequest { request_union: Some(union) }
}

impl<'a> Watcher<'a> {
    /// Follows the keys below `path`, or the one key when it does not end with a slash, from `revision` on.
    pub async fn open(etcd: &'a Etcd, path: Vec<u8>, revision: i64) -> Result<Self, String> {
        use pb::watch_request::RequestUnion;
        let (at, channel) = etcd.channel();
        let range_end = if path.ends_with(b"/") { below(&path) } else { Vec::new() };
        let create = pb::WatchCreateRequest {
            key: path,
            range_end,
            start_revision: revision,
            progress_notify: true,
            fragment: true,
        };
        let (ask, asked) = mpsc::channel(4);
        let _ = ask.try_send(of(RequestUnion::CreateRequest(create)));
        let opening = async {
            let mut client = Etcd::watch_client(channel);
            Ok::<_, tonic::Status>(client.watch(request(ReceiverStream::new(asked))).await?.into_inner())
        };
        let answers = match timeout(LIMIT, opening).await {
            Ok(Ok(answers)) => answers,
            Ok(Err(status)) => {
                etcd.turn_from(at);
                return Err(status.message().to_owned());
            }
            Err(_) => {
                etcd.turn_from(at);
                return Err(format!("etcd did not answer within {} s", LIMIT.as_secs()));
            }
        };
        let mut ticks = interval(ASK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Ok(Self { etcd, at, ask, answers, ticks, heard: Instant::now() })
    }

    /// The next events; none = only a sign of life. An error is the end of the stream: what is followed is to be read anew.
    pub async fn next(&mut self) -> Result<Vec<pb::Event>, String> {
        use pb::watch_request::RequestUnion;
        loop {
            tokio::select! {
                answer = self.answers.message() => {
                    let answer = match answer {
                        Ok(Some(answer)) => answer,
                        Ok(None) => return Err(self.ended("etcd ended the stream")),
                        Err(status) => return Err(self.ended(status.message())),
                    };
                    if let Err(error) = self.etcd.check(answer.header.as_ref()) {
                        return Err(error.message().to_owned());
                    }
                    self.heard = Instant::now();
                    if answer.canceled && answer.compact_revision > 0 {
                        return Err(format!("etcd remembers nothing before revision {}", answer.compact_revision));
                    }
                    if answer.canceled {
                        return Err(self.ended(&answer.cancel_reason));
                    }
                    return Ok(answer.events);
                }
                _ = self.ticks.tick() => {
                    if self.heard.elapsed() > SILENCE {
                        return Err(self.ended("etcd is silent"));
                    }
                    // Full = etcd does not read, which the silence will tell.
                    let _ = self.ask.try_send(of(RequestUnion::ProgressRequest(pb::WatchProgressRequest {})));
                }
            }
        }
    }

    fn ended(&self, why: &str) -> String {
        self.etcd.turn_from(self.at);
        why.to_owned()
    }
}
