//! Calls to etcd: one of its endpoints after the other, each for a bounded time.
//!
//! Nothing is asked of an etcd member that does not hear its own leader (`hasleader`), and no answer of another etcd cluster than the one
//! that answered first is taken: after a restore from a backup its revisions mean something else.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use smg_net::tls::ClientConfig;
use smg_services::etcd as pb;
use smg_services::etcd::kv_client::KvClient;
use smg_services::etcd::lease_client::LeaseClient;
use smg_services::etcd::watch_client::WatchClient;
use tokio::time::{Instant, sleep, timeout};
use tonic::metadata::MetadataValue;
use tonic::transport::Channel;
use tonic::{Code, Request, Response, Status};

use crate::StoreError;
use crate::call::CallError;
use crate::failure::Failure;

/// For the answer to one call.
pub(crate) const LIMIT: Duration = Duration::from_secs(2);
/// Before a call is made again.
const PAUSE: Duration = Duration::from_millis(50);
/// Largest answer, in bytes: a page of the log, each entry as large as a request may be.
const MAX_ANSWER: usize = 64 << 20;

/// The connections to an etcd cluster.
#[derive(Debug)]
pub(crate) struct Etcd {
    channels: Vec<Channel>,
    /// Which of them is asked.
    current: AtomicUsize,
    /// The number of the etcd cluster that answered first.
    cluster: Mutex<Option<u64>>,
    failure: Arc<Failure>,
}

/// A request that only an etcd member with a leader takes.
pub(crate) fn request<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("hasleader", MetadataValue::from_static("true"));
    request
}

/// What a status says about the call.
fn classify(status: &Status) -> CallError {
    let text = status.message();
    // These are etcd's own words for what it has not begun.
    let not_begun = ["etcdserver: no leader", "etcdserver: too many requests", "etcdserver: not capable"];
    let refused = match status.code() {
        Code::InvalidArgument
        | Code::NotFound
        | Code::AlreadyExists
        | Code::PermissionDenied
        | Code::ResourceExhausted
        | Code::FailedPrecondition
        | Code::OutOfRange
        | Code::Unimplemented
        | Code::Unauthenticated => true,
        Code::Unavailable => not_begun.iter().any(|words| text.starts_with(words)),
        _ => false,
    };
    if refused && std::error::Error::source(status).is_none() {
        return CallError::Refused(text.to_owned());
    }
    CallError::of_transport(status)
}

impl Etcd {
    /// Connections to these endpoints, `http://` or `https://`. They are made when first used, and again after they broke. Must be called
    /// within the runtime that uses them.
    pub fn new(endpoints: &[String], tls: Option<&ClientConfig>, failure: Arc<Failure>) -> Result<Self, String> {
        let channel = |url: &String| {
            let url = match url.strip_prefix("https://") {
                Some(rest) => format!("grpcs://{rest}"),
                None => format!("grpc://{}", url.strip_prefix("http://").unwrap_or(url)),
            };
            smg_net::engine::channel(&url, tls).map_err(|error| error.to_string())
        };
        let channels = endpoints.iter().map(channel).collect::<Result<Vec<_>, _>>()?;
        if channels.is_empty() {
            return Err("no endpoint of etcd is named".to_owned());
        }
        Ok(Self { channels, current: AtomicUsize::new(0), cluster: Mutex::default(), failure })
    }

    /// Which endpoint is asked, and its connection.
    pub fn channel(&self) -> (usize, Channel) {
        let at = self.current.load(Ordering::Relaxed) % self.channels.len();
        (at, self.channels[at].clone())
    }

    /// Asks another endpoint from now on, unless somebody else has said so already.
    pub fn turn_from(&self, at: usize) {
        let next = (at + 1) % self.channels.len();
        let _ = self.current.compare_exchange(at, next, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// For streams of events.
    pub fn watch_client(channel: Channel) -> WatchClient<Channel> {
        WatchClient::new(channel).max_decoding_message_size(MAX_ANSWER)
    }

    /// Takes the head of an answer: it must be of the etcd cluster that answered before.
    pub fn check(&self, header: Option<&pb::ResponseHeader>) -> Result<i64, CallError> {
        let header = header.ok_or_else(|| CallError::Lost("the answer of etcd is not complete".to_owned()))?;
        let mut known = self.cluster.lock();
        match *known {
            None => *known = Some(header.cluster_id),
            Some(known) if known != header.cluster_id => {
                let other = header.cluster_id;
                let reason =
                    format!("etcd cluster {other:x} answers instead of {known:x}: was it restored from a backup?");
                self.failure.fail(&reason);
                return Err(CallError::Refused(reason));
            }
            Some(_) => {}
        }
        Ok(header.revision)
    }

    async fn call<T, F>(&self, make: impl FnOnce(Channel) -> F) -> Result<T, CallError>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let (at, channel) = self.channel();
        let error = match timeout(LIMIT, make(channel)).await {
            Ok(Ok(answer)) => return Ok(answer.into_inner()),
            Ok(Err(status)) => classify(&status),
            Err(_) => CallError::Lost(format!("etcd did not answer within {} s", LIMIT.as_secs())),
        };
        self.turn_from(at);
        Err(error)
    }

    fn kv(channel: Channel) -> KvClient<Channel> {
        KvClient::new(channel).max_decoding_message_size(MAX_ANSWER)
    }

    /// Reads what is there now, trying until `deadline`.
    pub async fn range(&self, range: pb::RangeRequest, deadline: Instant) -> Result<pb::RangeResponse, StoreError> {
        loop {
            let asked = request(range.clone());
            let answer = self.call(|channel| async move { Self::kv(channel).range(asked).await }).await;
            let error = match answer {
                Ok(answer) => match self.check(answer.header.as_ref()) {
                    Ok(_) => return Ok(answer),
                    Err(error) => error,
                },
                Err(error) => error,
            };
            if let Some(reason) = self.failure.reason() {
                return Err(StoreError::Failed(reason));
            }
            if Instant::now() + PAUSE >= deadline {
                return Err(StoreError::Unavailable(format!("etcd: {}", error.message())));
            }
            sleep(PAUSE).await;
        }
    }

    /// One attempt to do what a transaction says, or to read what it says when its conditions do not hold.
    pub async fn txn(&self, txn: pb::TxnRequest) -> Result<pb::TxnResponse, CallError> {
        let asked = request(txn);
        let answer = self.call(|channel| async move { Self::kv(channel).txn(asked).await }).await?;
        self.check(answer.header.as_ref())?;
        Ok(answer)
    }

    /// One attempt to write a key. Returns the revision.
    pub async fn put(&self, key: Vec<u8>, value: Vec<u8>, lease: i64) -> Result<i64, CallError> {
        let asked = request(pb::PutRequest { key, value, lease });
        let answer = self.call(|channel| async move { Self::kv(channel).put(asked).await }).await?;
        self.check(answer.header.as_ref())
    }

    /// One attempt to delete a key, or a range when there is an end. Returns how many there were.
    pub async fn delete(&self, key: Vec<u8>, range_end: Vec<u8>) -> Result<i64, CallError> {
        let asked = request(pb::DeleteRangeRequest { key, range_end });
        let answer = self.call(|channel| async move { Self::kv(channel).delete_range(asked).await }).await?;
        self.check(answer.header.as_ref())?;
        Ok(answer.deleted)
    }

    /// Lets etcd forget what was before a revision.
    pub async fn compact(&self, revision: i64) -> Result<(), CallError> {
        let asked = request(pb::CompactionRequest { revision });
        self.call(|channel| async move { Self::kv(channel).compact(asked).await }).await.map(drop)
    }

    /// Asks for a lease of so many seconds.
    pub async fn grant(&self, seconds: i64) -> Result<i64, CallError> {
        let asked = request(pb::LeaseGrantRequest { ttl: seconds });
        let answer = self.call(|channel| async move { LeaseClient::new(channel).lease_grant(asked).await }).await?;
        self.check(answer.header.as_ref())?;
        if answer.error.is_empty() { Ok(answer.id) } else { Err(CallError::Refused(answer.error)) }
    }

    /// Gives a lease back, and everything under it.
    pub async fn revoke(&self, id: i64) -> Result<(), CallError> {
        let asked = request(pb::LeaseRevokeRequest { id });
        self.call(|channel| async move { LeaseClient::new(channel).lease_revoke(asked).await }).await.map(drop)
    }

    /// Keeps a lease by one sign of life. False = it is gone.
    pub async fn keep(&self, id: i64) -> Result<bool, CallError> {
        let call = |channel| async move {
            let signs = futures::stream::iter([pb::LeaseKeepAliveRequest { id }]);
            let answers = LeaseClient::new(channel).lease_keep_alive(request(signs)).await?;
            match answers.into_inner().message().await? {
                Some(answer) => Ok(Response::new(answer)),
                None => Err(Status::unavailable("etcd ended the stream without an answer")),
            }
        };
        let answer = self.call(call).await?;
        self.check(answer.header.as_ref())?;
        Ok(answer.ttl > 0)
    }
}
