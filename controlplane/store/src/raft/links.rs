//! The connections to other members.
//!
//! One connection a member for short calls and one for snapshots, so that a snapshot delays no heartbeat. Both are made when first needed
//! and again after they broke, and the member's name is resolved each time. What went wrong last is kept for operators and logged when it
//! changes, not at every attempt.

use std::collections::BTreeMap;
use std::error::Error;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use smg_net::mutual::MutualTls;
use smg_net::mutual::connect::Connector;
use smg_net::mutual::explain::is_refusal;
use smg_services::raft::peer_client::PeerClient;
use smg_state::NodeId;
use tokio::sync::watch;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};
use uuid::Uuid;

use super::identity::{Call, Refusal, refusal};
use super::options::{NodeIdentity, RaftOptions};
use crate::call::{CallError, describe};
use crate::published::Published;

/// Largest message of a member, in bytes.
pub(crate) const MAX_MESSAGE: usize = 32 << 20;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// As [`CONNECT_TIMEOUT`], with a TLS handshake.
const TLS_TIMEOUT: Duration = Duration::from_secs(3);
const KEEP_ALIVE: Duration = Duration::from_secs(2);

/// How other members are called.
#[derive(Debug, Clone, Default)]
pub(crate) struct Way {
    /// The local address of calls; none = the system's choice.
    pub source: Option<IpAddr>,
    /// What is presented to them, and what they must present; none = nothing.
    pub tls: Option<Arc<MutualTls>>,
}

impl Way {
    pub fn of(options: &RaftOptions) -> Self {
        Self { source: options.source, tls: options.tls.clone() }
    }

    /// A channel to an address. Connects when first used, and again after it broke.
    pub fn channel(&self, address: &str) -> Result<Channel, String> {
        let (scheme, limit) = if self.tls.is_some() { ("https", TLS_TIMEOUT) } else { ("http", CONNECT_TIMEOUT) };
        let endpoint = Endpoint::from_shared(format!("{scheme}://{address}"));
        let endpoint = endpoint
            .map_err(|error| format!("{address}: {error}"))?
            .local_address(self.source)
            .connect_timeout(limit)
            .http2_keep_alive_interval(KEEP_ALIVE)
            .keep_alive_timeout(KEEP_ALIVE)
            .keep_alive_while_idle(true)
            .tcp_nodelay(true);
        Ok(match &self.tls {
            None => endpoint.connect_lazy(),
            Some(tls) => {
                let connector = Connector::of_part(Arc::clone(tls), self.source, limit);
                endpoint.connect_with_connector_lazy(connector)
            }
        })
    }
}

/// The connections of one member.
#[derive(Debug)]
pub(crate) struct Links {
    me: NodeIdentity,
    published: Arc<Published>,
    way: Way,
    links: Mutex<BTreeMap<NodeId, Arc<Link>>>,
    /// Turns true when a member says that this one is none any more.
    retired: watch::Sender<bool>,
}

/// The connections to one member.
#[derive(Debug)]
pub(crate) struct Link {
    call: Call,
    published: Arc<Published>,
    address: String,
    channel: Channel,
    bulk: Channel,
    trouble: Mutex<Option<String>>,
    retired: watch::Sender<bool>,
}

/// What an answer other than success means for the caller.
pub(crate) fn classify(status: &Status) -> CallError {
    // Denied = the certificate does not open the members' service; no member says so of anything it has looked at.
    if refusal(status).is_some() || (status.code() == Code::PermissionDenied && status.source().is_none()) {
        return CallError::Refused(status.message().to_owned());
    }
    if is_refusal(status) {
        return CallError::Refused(describe(status.source().unwrap_or(status)));
    }
    CallError::of_transport(status)
}

impl Links {
    /// Those of `me`, whose state is the published one.
    pub fn new(me: NodeIdentity, published: Arc<Published>, way: Way) -> Self {
        Self { me, published, way, links: Mutex::default(), retired: watch::Sender::new(false) }
    }

    /// How members are called.
    pub fn way(&self) -> &Way {
        &self.way
    }

    /// Whether another member has said that this one is none any more.
    pub fn retired(&self) -> &watch::Sender<bool> {
        &self.retired
    }

    /// The connections to a member at an address. The same ones as before, unless it has moved.
    pub fn to(&self, target: NodeId, address: &str, storage_id: Uuid) -> Result<Arc<Link>, String> {
        let call = Call::new(&self.me, target, storage_id);
        let mut links = self.links.lock();
        if let Some(link) = links.get(&target).filter(|link| link.address == address && link.call == call) {
            return Ok(Arc::clone(link));
        }
        let link = Arc::new(Link {
            call,
            published: Arc::clone(&self.published),
            address: address.to_owned(),
            channel: self.way.channel(address)?,
            bulk: self.way.channel(address)?,
            trouble: Mutex::default(),
            retired: self.retired.clone(),
        });
        links.insert(target, Arc::clone(&link));
        Ok(link)
    }

    /// The connections to a member, if it was ever looked for.
    pub fn known(&self, target: NodeId) -> Option<Arc<Link>> {
        self.links.lock().get(&target).cloned()
    }

    /// What went wrong when a member was called last.
    pub fn trouble(&self, target: NodeId) -> Option<String> {
        self.links.lock().get(&target).and_then(|link| link.trouble.lock().clone())
    }
}

impl Link {
    /// For short calls.
    pub fn client(&self) -> PeerClient<Channel> {
        client(self.channel.clone())
    }

    /// For snapshots.
    pub fn bulk_client(&self) -> PeerClient<Channel> {
        client(self.bulk.clone())
    }

    /// A request that names both sides.
    pub fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        self.call.of(self.published.state.load().history_id()).sign(request.metadata_mut());
        request
    }

    /// Waits for an answer, at most `limit`, and notes what is wrong with the member.
    pub async fn answer<T>(
        &self,
        limit: Duration,
        answer: impl Future<Output = Result<tonic::Response<T>, Status>>,
    ) -> Result<T, CallError> {
        let result = match tokio::time::timeout(limit, answer).await {
            Err(_) => Err(CallError::Lost(format!("no answer within {} ms", limit.as_millis()))),
            Ok(Ok(response)) => Ok(response.into_inner()),
            Ok(Err(status)) => {
                if refusal(&status) == Some(Refusal::Retired) {
                    self.retired.send_replace(true);
                }
                Err(classify(&status))
            }
        };
        self.note(result.as_ref().err());
        result
    }

    fn note(&self, error: Option<&CallError>) {
        let now = error.map(|error| error.message().to_owned());
        let mut trouble = self.trouble.lock();
        if *trouble == now {
            return;
        }
        let (member, address) = (self.call.to, &self.address);
        match (error, trouble.is_some()) {
            (Some(CallError::Refused(reason)), _) => {
                tracing::error!(target: "smg", member, address, reason, "a member refuses this one");
            }
            (Some(error), false) => {
                tracing::warn!(target: "smg", member, address, reason = error.message(), "a member does not answer");
            }
            (Some(_), true) => {}
            (None, _) => tracing::info!(target: "smg", member, address, "a member answers again"),
        }
        *trouble = now;
    }
}

fn client(channel: Channel) -> PeerClient<Channel> {
    PeerClient::new(channel).max_decoding_message_size(MAX_MESSAGE).max_encoding_message_size(MAX_MESSAGE)
}
