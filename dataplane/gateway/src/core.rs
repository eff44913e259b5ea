//! What every part of a gateway shares.

use std::sync::Arc;

use arc_swap::ArcSwap;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use smg_net::tls::{WorkerConnector, worker_connector};
use smg_telemetry::Metrics;
use smg_telemetry::fleet::FleetGauges;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use crate::admission::lease::Lease;
use crate::clock::Clock;
use crate::connections::Connections;
use crate::decision::Decisions;
use crate::dispatch::leg::LegBody;
use crate::fleet::table::RoutingTable;
use crate::front::admission::Admission;
use crate::grpc::responses::Shelf;
use crate::grpc::rooms::Rooms;
use crate::grpc::tokenizers::Tokenizers;
use crate::heavy::Heavy;
use crate::hops::Hops;
use crate::options::GatewayOptions;
use crate::sync::Link;
use crate::sync::freshness::Freshness;

/// The HTTP client of probes and of what operators ask engines.
pub type HttpClient = Client<WorkerConnector, LegBody>;

/// Most bytes of a worker's response that one connection reads ahead, its head included. What a client that stopped reading costs is a
/// small multiple of it: frames that wait for the client hold the buffers they were read into.
const LEG_BUFFER: usize = 64 * 1024;

/// What every part of a gateway shares.
pub struct Core {
    /// Settings of the process.
    pub options: GatewayOptions,
    /// The routing table in use. One pointer; replaced whole.
    pub table: ArcSwap<RoutingTable>,
    /// The revision of that table, for those who wait for it.
    pub revision: watch::Sender<u64>,
    /// Connections of legs to workers.
    pub connections: Connections,
    /// For everything else that is asked of workers.
    pub client: HttpClient,
    /// The tokenizers of models that are served over gRPC.
    pub tokenizers: Tokenizers,
    /// Where large requests are read and prepared.
    pub heavy: Heavy,
    /// The responses that are kept for later requests.
    pub responses: Arc<Shelf>,
    /// The bootstrap rooms in use over gRPC.
    pub rooms: Arc<Rooms>,
    /// What the ids of all requests to engines over gRPC begin with: no other gateway process has the same.
    pub request_prefix: String,
    /// How requests to workers say that they have come through here.
    pub hops: Hops,
    /// Who this process is to the control plane, in its subscription and in its reports of slots alike.
    pub process: watch::Sender<Uuid>,
    /// How many requests are served at once, if that is limited.
    pub admission: Option<Admission>,
    /// The way to the control plane.
    pub link: Arc<Link>,
    /// Whether this gateway knows what the control plane knows.
    pub freshness: Freshness,
    /// Metrics of the process.
    pub metrics: Arc<Metrics>,
    /// Decision records.
    pub decisions: Decisions,
    /// Gauges that mirror the snapshot in use.
    pub gauges: parking_lot::Mutex<FleetGauges>,
    /// Monotonic time.
    pub clock: Clock,
    /// Work that outlives its request: prefill drains, and all legs over gRPC.
    pub background: TaskTracker,
    /// Set when the process is about to stop: readiness turns false.
    pub draining: CancellationToken,
    /// Set when background work must end.
    pub closing: CancellationToken,
}

impl Core {
    /// A gateway with an empty fleet.
    pub fn new(options: GatewayOptions, metrics: Arc<Metrics>) -> Arc<Self> {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(options.connect_timeout));
        connector.set_keepalive(Some(std::time::Duration::from_secs(30)));
        let connector = worker_connector(connector, options.worker_tls.as_ref());
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(options.pool_idle_timeout)
            .pool_max_idle_per_host(500)
            .http1_max_buf_size(LEG_BUFFER)
            .build(connector.clone());
        let connections = Connections::new(connector, LEG_BUFFER, options.pool_idle_timeout);
        let admission = options.admission.map(|limits| Admission::new(limits, Arc::clone(&metrics)));
        let process = format!("{:012x}", rand::random::<u64>() >> 16);
        Arc::new(Self {
            connections,
            client,
            tokenizers: Tokenizers::default(),
            heavy: Heavy::default(),
            responses: Arc::default(),
            rooms: Arc::default(),
            hops: Hops::new(&process),
            process: watch::Sender::new(Uuid::new_v4()),
            request_prefix: format!("{process}-"),
            admission,
            link: Arc::default(),
            freshness: Freshness::default(),
            table: ArcSwap::from_pointee(RoutingTable::empty(Arc::new(Lease::new(options.alone)))),
            revision: watch::Sender::new(0),
            decisions: Decisions::new(Arc::clone(&metrics)),
            gauges: parking_lot::Mutex::default(),
            clock: Clock::start(),
            background: TaskTracker::new(),
            draining: CancellationToken::new(),
            closing: CancellationToken::new(),
            options,
            metrics,
        })
    }
}
