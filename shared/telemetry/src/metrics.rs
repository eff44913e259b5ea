//! Every metric, declared once.
//!
//! Names, types and labels of `smg_http_*`, `smg_router_*`, `smg_pd_*` and `smg_worker_*` are those of the documented system (SMG metrics
//! reference). Label values never come from clients unchecked: models are labels only once a worker serves them.

use std::collections::{BTreeSet, HashMap};

use prometheus::core::{Collector, MetricVec, MetricVecBuilder};
use prometheus::{
    Encoder, Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec,
    Opts, Registry, TextEncoder,
};

use crate::ages::InflightAges;
use crate::logs::DroppedLines;

/// Buckets of durations, in seconds, unless the process is told others.
pub const DURATION_BUCKETS: [f64; 29] = [
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0,
    240.0, 300.0, 480.0, 900.0, 1200.0, 1800.0, 2700.0, 3600.0, 5400.0, 7200.0,
];
const TENTH_BUCKETS: [f64; 11] = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0];
const DELAY_BUCKETS: [f64; 10] = [0.0, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0];
const BACKOFF_BUCKETS: [f64; 12] = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];

macro_rules! metrics {
    ($($(#[$meta:meta])* $field:ident: $kind:ident($name:literal, $help:literal $(, [$($label:literal),*])? $(, buckets = $buckets:ident)?);)+) => {
        /// The handles of every metric of a process.
        #[derive(Debug, Clone)]
        pub struct Metrics {
            registry: Registry,
            $(#[doc = $help] $(#[$meta])* pub $field: $kind,)+
        }

        /// Name, help and labels of every metric, for the reference pages.
        pub const CATALOGUE: &[(&str, &str, &[&str])] = &[$(($name, $help, &[$($($label),*)?])),+];

        impl Metrics {
            /// A registry of its own with every metric in it.
            ///
            /// # Errors
            /// When bucket bounds are not increasing.
            pub fn new(duration_buckets: &[f64]) -> Result<Self, prometheus::Error> {
                let registry = Registry::new();
                $(
                    let $field = metrics!(@build $kind, $name, $help, [$($($label),*)?], [$($buckets)?], duration_buckets);
                    registry.register(Box::new($field.clone()))?;
                )+
                registry.register(Box::new(prometheus::process_collector::ProcessCollector::for_self()))?;
                Ok(Self { registry, $($field,)+ })
            }
        }
    };
    (@bounds durations $d:ident) => { $d };
    (@bounds tenths $d:ident) => { TENTH_BUCKETS };
    (@bounds backoffs $d:ident) => { BACKOFF_BUCKETS };
    (@bounds delays $d:ident) => { DELAY_BUCKETS };
    (@build IntCounter, $name:literal, $help:literal, [], [], $d:ident) => { IntCounter::new($name, $help)? };
    (@build IntGauge, $name:literal, $help:literal, [], [], $d:ident) => { IntGauge::new($name, $help)? };
    (@build Gauge, $name:literal, $help:literal, [], [], $d:ident) => { Gauge::new($name, $help)? };
    (@build IntCounterVec, $name:literal, $help:literal, [$($label:literal),+], [], $d:ident) => {
        IntCounterVec::new(Opts::new($name, $help), &[$($label),+])?
    };
    (@build InflightAges, $name:literal, $help:literal, [$($label:literal),+], [], $d:ident) => {
        InflightAges::new(Opts::new($name, $help), &[$($label),+])?
    };
    (@build DroppedLines, $name:literal, $help:literal, [$($label:literal),+], [], $d:ident) => {
        DroppedLines::new(Opts::new($name, $help), &[$($label),+])?
    };
    (@build IntGaugeVec, $name:literal, $help:literal, [$($label:literal),+], [], $d:ident) => {
        IntGaugeVec::new(Opts::new($name, $help), &[$($label),+])?
    };
    (@build GaugeVec, $name:literal, $help:literal, [$($label:literal),+], [], $d:ident) => {
        GaugeVec::new(Opts::new($name, $help), &[$($label),+])?
    };
    (@build HistogramVec, $name:literal, $help:literal, [$($label:literal),+], [$buckets:ident], $d:ident) => {
        HistogramVec::new(HistogramOpts::new($name, $help).buckets(metrics!(@bounds $buckets $d).to_vec()), &[$($label),+])?
    };
    (@build Histogram, $name:literal, $help:literal, [], [$buckets:ident], $d:ident) => {
        Histogram::with_opts(HistogramOpts::new($name, $help).buckets(metrics!(@bounds $buckets $d).to_vec()))?
    };
}

metrics! {
    http_requests: IntCounterVec("smg_http_requests_total", "Requests received.", ["method", "path"]);
    http_request_duration: HistogramVec("smg_http_request_duration_seconds", "Time from a request's arrival to the end of its response body.", ["method", "path"], buckets = durations);
    http_responses: IntCounterVec("smg_http_responses_total", "Responses sent.", ["path", "status_code", "error_code"]);
    http_connections_active: IntGauge("smg_http_connections_active", "Open client connections.");
    http_connection_timeouts: IntCounterVec("smg_http_connection_timeouts_total", "Client connections closed because a request head took too long (header_read) or no request came (idle).", ["timeout"]);
    http_rate_limit: IntCounterVec("smg_http_rate_limit_total", "Requests admitted or refused by the limit of concurrent requests.", ["result"]);
    admission_queue_depth: IntGauge("smg_admission_queue_depth", "Requests that wait to be admitted.");
    admission_inflight: IntGauge("smg_admission_inflight", "Admitted requests whose response has not ended.");
    admission_queue_rejected: IntCounterVec("smg_admission_queue_rejected_total", "Requests refused because the admission queue was full, or the wait too long.", ["reason"]);
    http_requests_active: IntGauge("smg_http_requests_active", "Requests between arrival and the end of their response body.");
    http_inflight_ages: InflightAges("smg_http_inflight_request_age_count", "Requests between arrival and the end of their response body whose age in seconds lies above gt and at most at le; not cumulative.", ["gt", "le"]);
    router_requests: IntCounterVec("smg_router_requests_total", "Requests routed to workers.", ["router_type", "backend_type", "connection_mode", "model", "endpoint", "streaming"]);
    router_request_duration: HistogramVec("smg_router_request_duration_seconds", "Time from routing to the end of the response body.", ["router_type", "backend_type", "connection_mode", "model", "endpoint"], buckets = durations);
    router_request_errors: IntCounterVec("smg_router_request_errors_total", "Routed requests that ended in an error.", ["router_type", "backend_type", "connection_mode", "model", "endpoint", "error_type"]);
    router_stage_duration: HistogramVec("smg_router_stage_duration_seconds", "Time that the phases of a request's last attempt took: route, prefill, decode (until its response head), first_byte (decode until the first output), relay.", ["router_type", "stage"], buckets = durations);
    router_upstream_responses: IntCounterVec("smg_router_upstream_responses_total", "Response heads received from workers.", ["router_type", "status_code", "error_code"]);
    router_upstream_send_retries: IntCounterVec("smg_router_upstream_send_retries_total", "Legs sent again at once because a pooled connection had been closed before anything was answered.", ["router_type"]);
    router_ttft: HistogramVec("smg_router_ttft_seconds", "Dispatch of the leg whose output is the answer to its first output (gRPC): of a pair, the decode leg.", ["router_type", "backend_type", "model", "endpoint"], buckets = durations);
    router_tpot: HistogramVec("smg_router_tpot_seconds", "Time per output token after the first, averaged over a streamed answer (gRPC).", ["router_type", "backend_type", "model", "endpoint"], buckets = durations);
    router_generation_duration: HistogramVec("smg_router_generation_duration_seconds", "Dispatch of the leg whose output is the answer to the end of the output (gRPC).", ["router_type", "backend_type", "model", "endpoint"], buckets = durations);
    router_tokens: IntCounterVec("smg_router_tokens_total", "Tokens of prompts (input) and answers (output) that the gateway counted (gRPC).", ["router_type", "backend_type", "model", "endpoint", "token_type"]);
    grpc_legs: IntGaugeVec("smg_grpc_legs", "Legs over gRPC that are not over, deferred aborts included.", ["leg"]);
    grpc_aborts: IntCounterVec("smg_grpc_aborts_total", "Aborts sent to engines over gRPC: taken, or failed.", ["leg", "result"]);
    pd_ttft: HistogramVec("smg_pd_ttft_seconds", "Prefill dispatch to the first decode output.", ["backend_type", "model", "runtime"], buckets = durations);
    pd_prefill_duration: HistogramVec("smg_pd_prefill_duration_seconds", "Duration of the prefill leg.", ["backend_type", "model", "runtime"], buckets = durations);
    pd_decode_ttft: HistogramVec("smg_pd_decode_ttft_seconds", "Decode dispatch to the first decode output.", ["backend_type", "model", "runtime"], buckets = durations);
    pd_kv_transfer_duration: HistogramVec("smg_pd_kv_transfer_duration_seconds", "Prefill completion to decode dispatch (gRPC vLLM).", ["backend_type", "model", "runtime"], buckets = durations);
    pd_kv_connector_mode: IntCounterVec("smg_pd_kv_connector_mode_total", "vLLM dispatches by connector mode.", ["mode"]);
    pd_kv_transfer_failures: IntCounter("smg_pd_kv_transfer_failures_total", "Handoffs that did not happen: a NIXL prefill returned no kv_transfer_params, a Mooncake prefill over gRPC did not end by its limit, or a MoRI-IO pair or handoff failed its check.");
    pd_undeclared_connectors: IntGauge("smg_pd_undeclared_connectors", "Registered vLLM prefill workers without a declared kv_connector: their requests run passthrough and decode recomputes every prompt.");
    pd_orphaned_handoffs: IntCounter("smg_pd_orphaned_handoffs_total", "Prefill handoffs that no decode leg took because the client had left.");
    pd_bootstrap_failures: IntCounter("smg_pd_bootstrap_failures_total", "Bootstrap fields could not be added to a request.");
    pd_rendezvous_failures: IntCounterVec("smg_pd_rendezvous_failures_total", "Bootstrap ports that did not answer.", ["leg", "phase"]);
    pd_admission_waits: IntCounter("smg_pd_admission_waits_total", "Dispatches admitted after waiting for a decode slot (gRPC).");
    pd_admission_sheds: IntCounter("smg_pd_admission_sheds_total", "Dispatches shed at the decode admission window (gRPC).");
    pd_admission_window: IntGaugeVec("smg_pd_admission_window", "Requests that a decode worker runs at a time, as it reports; 0 = it reports none and is not gated (gRPC).", ["worker"]);
    pd_prefill_admission_inflight: IntGaugeVec("smg_pd_prefill_admission_inflight", "Requests in the prefill phase, for prefill workers with a limit.", ["worker"]);
    pd_prefill_admission_queued: IntGauge("smg_pd_prefill_admission_queued", "Requests that wait for a prefill worker.");
    pd_prefill_admission_wait: Histogram("smg_pd_prefill_admission_wait_seconds", "Time that requests waited for a prefill worker.", buckets = durations);
    pd_prefill_admission_rejections: IntCounterVec("smg_pd_prefill_admission_rejections_total", "Requests that waited for a prefill worker in vain, or were not let into the queue.", ["reason"]);
    worker_pool_size: IntGaugeVec("smg_worker_pool_size", "Registered workers.", ["worker_type", "connection_mode", "model"]);
    worker_connections_active: IntGaugeVec("smg_worker_connections_active", "Open connections of legs to workers, those at rest included.", ["worker_type", "connection_mode"]);
    worker_requests_active: IntGaugeVec("smg_worker_requests_active", "In-flight requests of this gateway per worker.", ["worker"]);
    worker_routing_keys_active: IntGaugeVec("smg_worker_routing_keys_active", "Routing keys and sessions that policies keep on a worker.", ["worker"]);
    worker_health: IntGaugeVec("smg_worker_health", "1 = healthy, 0 = not.", ["worker"]);
    worker_http2: IntGaugeVec("smg_worker_http2", "1 = the engine speaks HTTP/2 without TLS, 0 = not.", ["worker"]);
    worker_requests: IntCounterVec("smg_worker_requests_total", "Requests sent to a worker.", ["worker", "model"]);
    worker_health_checks: IntCounterVec("smg_worker_health_checks_total", "Active probes.", ["worker_type", "result"]);
    worker_selection: IntCounterVec("smg_worker_selection_total", "Picks per leg.", ["worker_type", "connection_mode", "model", "policy"]);
    worker_errors: IntCounterVec("smg_worker_errors_total", "Failed legs.", ["worker_type", "connection_mode", "error_type"]);
    worker_cb_state: IntGaugeVec("smg_worker_cb_state", "Circuit breaker: 0 closed, 1 open, 2 half-open.", ["worker"]);
    worker_cb_consecutive_failures: IntGaugeVec("smg_worker_cb_consecutive_failures", "Failures in a row.", ["worker"]);
    worker_cb_consecutive_successes: IntGaugeVec("smg_worker_cb_consecutive_successes", "Successes in a row.", ["worker"]);
    worker_cb_transitions: IntCounterVec("smg_worker_cb_transitions_total", "Circuit breaker transitions.", ["worker", "from", "to"]);
    worker_cb_outcomes: IntCounterVec("smg_worker_cb_outcomes_total", "Outcomes seen by circuit breakers.", ["worker", "outcome"]);
    worker_cb_health_readmissions: IntCounterVec("smg_worker_cb_health_readmissions_total", "Open circuits that were half-opened because the worker's health returned.", ["worker"]);
    worker_retries: IntCounterVec("smg_worker_retries_total", "Further attempts.", ["worker_type", "endpoint"]);
    worker_retries_exhausted: IntCounterVec("smg_worker_retries_exhausted_total", "Requests that failed on their last attempt.", ["worker_type", "endpoint"]);
    worker_retries_refused: IntCounterVec("smg_worker_retries_refused_total", "Further attempts that the retry budget did not allow.", ["worker_type", "endpoint"]);
    worker_retry_backoff: HistogramVec("smg_worker_retry_backoff_seconds", "Delays before further attempts.", ["attempt"], buckets = backoffs);
    worker_paced: IntCounterVec("smg_worker_paced_total", "Answers by which a worker asked for a pause (429 or 503 with Retry-After).", ["worker"]);
    workers_overloaded: IntGaugeVec("smg_workers_overloaded", "Workers that overload protection passes over, as of their last load report.", ["model"]);
    worker_overload_shed: IntCounterVec("smg_worker_overload_shed_total", "Requests refused because every worker that could serve them was overloaded (selection), or the selected one became so before its leg was sent (dispatch).", ["stage"]);
    worker_overload_fallback: IntCounterVec("smg_worker_overload_fallback_total", "Requests sent to the least loaded of overloaded workers.", ["stage"]);
    worker_restarts: IntCounterVec("smg_worker_restarts_total", "Engines that were started anew behind a registered worker, as active probes saw it.", ["worker_type"]);
    worker_stalled: IntGaugeVec("smg_worker_stalled", "1 = this gateway ejected the worker.", ["worker", "reason"]);
    worker_stall_transitions: IntCounterVec("smg_worker_stall_transitions_total", "Ejections by this gateway.", ["worker", "reason"]);
    engine_running_requests: GaugeVec("smg_engine_running_requests", "Running requests, as the engine reports them.", ["worker", "model", "dp_rank"]);
    engine_waiting_requests: GaugeVec("smg_engine_waiting_requests", "Waiting requests, as the engine reports them.", ["worker", "model", "dp_rank"]);
    engine_token_usage: GaugeVec("smg_engine_token_usage", "Share of the KV cache in use, 0 to 1, as the engine reports it.", ["worker", "model", "dp_rank"]);
    engine_gen_throughput: GaugeVec("smg_engine_gen_throughput", "Tokens per second, as the engine reports them.", ["worker", "model", "dp_rank"]);
    engine_cache_hit_rate: GaugeVec("smg_engine_cache_hit_rate", "Hit rate of the prefix cache, 0 to 1, as the engine reports it.", ["worker", "model", "dp_rank"]);
    engine_pd_kv_transfer_latency: GaugeVec("smg_engine_pd_kv_transfer_latency_ms", "Latency of KV transfers in milliseconds, as the engine reports it.", ["worker", "role", "dp_rank"]);
    engine_pd_kv_transfer_speed: GaugeVec("smg_engine_pd_kv_transfer_speed_gb_s", "Speed of KV transfers in gigabytes per second, as the engine reports it.", ["worker", "role", "dp_rank"]);
    engine_pd_prefill_queue: GaugeVec("smg_engine_pd_prefill_queue_reqs", "Requests in the prefill queues of a disaggregated engine, as it reports them.", ["worker", "role", "dp_rank"]);
    engine_pd_decode_queue: GaugeVec("smg_engine_pd_decode_queue_reqs", "Requests in the decode queues of a disaggregated engine, as it reports them.", ["worker", "role", "dp_rank"]);
    engine_load_polls: IntCounterVec("smg_engine_load_polls_total", "Polls of engines for their load: answered by loads or metrics, failed, or absent where an engine reports none.", ["worker", "mode"]);
    manual_policy_branch: IntCounterVec("smg_manual_policy_branch_total", "Decisions of the manual policy by the rule that made them.", ["branch"]);
    consistent_hashing_policy_branch: IntCounterVec("smg_consistent_hashing_policy_branch_total", "Decisions of the consistent_hashing policy by the rule that made them.", ["branch"]);
    prefix_hash_policy_branch: IntCounterVec("smg_prefix_hash_policy_branch_total", "Decisions of the prefix_hash policy by the rule that made them.", ["branch"]);
    cache_aware_policy_branch: IntCounterVec("smg_cache_aware_policy_branch_total", "Decisions of the cache_aware policy by the rule that made them.", ["branch"]);
    cache_aware_match_ratio: Histogram("smg_cache_aware_match_ratio", "Share of a prompt that the cache_aware policy knew from earlier ones.", buckets = tenths);
    manual_policy_cache_entries: IntGauge("smg_manual_policy_cache_entries", "Routing keys that manual policies have pinned.");
    routing_key_source: IntCounterVec("smg_routing_key_source_total", "Selections by where their routing key came from: header, or none.", ["source"]);
    cache_tree_chars: IntGaugeVec("smg_cache_tree_chars", "Bytes of prompt text that the cache_aware policies of a model remember, all legs together.", ["model"]);
    cache_tree_tokens: IntGaugeVec("smg_cache_tree_tokens", "Prompt tokens that the cache_aware policies of a model remember, all legs together.", ["model"]);
    cache_placement_entries: IntGaugeVec("smg_cache_placement_entries", "Heads of prompts that the cache_aware policies of a model remember with --cache-index hash, all legs together.", ["model"]);
    cache_tree_tenants: IntGaugeVec("smg_cache_tree_tenants", "Workers that a cache_aware policy remembers prompts of, per leg.", ["model", "tree"]);
    policy_memory_bytes: IntGaugeVec("smg_policy_memory_bytes", "What the policy of a leg remembers, bookkeeping included.", ["model", "leg", "policy"]);
    decisions_dropped: IntCounter("smg_decisions_dropped_total", "Decision records that left the ring.");
    log_dropped_lines: DroppedLines("smg_log_dropped_lines", "Log lines that were dropped since the start because what they are written to was too slow or failed: the console (standard error), or files.", ["sink"]);
    trace_spans_exported: IntCounter("smg_trace_spans_exported_total", "Spans that the collector took.");
    trace_spans_dropped: IntCounterVec("smg_trace_spans_dropped_total", "Spans that were not sent: queue_full, export_failed, or rejected by the collector.", ["reason"]);
    config_revision: IntGauge("smg_config_revision", "Revision of the snapshot this gateway routes with.");
    config_stale_seconds: IntGauge("smg_config_stale_seconds", "Seconds since the control plane was last heard.");
    config_updates: IntCounterVec("smg_config_updates_total", "Snapshots and deltas received.", ["kind", "result"]);
    sync_subscribers: IntGauge("smg_sync_subscribers", "Gateways subscribed to this control plane node.");
    gateway_decode_slots: IntGaugeVec("smg_gateway_decode_slots", "Slots of a decode worker as this gateway has them, where gateways share it: granted, anchored (of these, those that last without the control plane), in_use, waiting.", ["worker", "state"]);
    decode_slot_lease: IntGauge("smg_decode_slot_lease", "How much of its slots this gateway may use: 2 = all, 1 = the anchored ones, because the control plane is not heard, 0 = none.");
    decode_slots: IntGaugeVec("smg_decode_slots", "Slots of a decode worker in the fleet's ledger, at the control plane node that leads: window, granted, in_use, waiting, zombie (of gateways that are not heard of any more), foreign, free.", ["worker", "state"]);
    slot_invariant_failures: IntCounterVec("smg_slot_invariant_failures_total", "Moments in which the slot ledger was not what it must be. INV-1: more slots of a worker given away than it has, and growing. INV-2: a gateway that uses more than it was given.", ["invariant"]);
    slot_sessions: IntGauge("smg_slot_sessions", "Gateways that report to this control plane node which decode slots they use.");
    sync_propagation: Histogram("smg_sync_propagation_seconds", "Commit to acknowledgement by a gateway.", buckets = durations);
    tls_certificate_not_after: IntGaugeVec("smg_tls_certificate_not_after_seconds", "When a certificate in use ends, in seconds since the Unix epoch: of this process as a part of the fleet, of the authority that ends last, of the client edge.", ["certificate"]);
    tls_refused: IntCounterVec("smg_tls_connections_refused_total", "Connections that were closed because TLS was not agreed on, by listener: edge (clients), control_plane (operators and gateways) or peers (other members).", ["listener"]);
    registration_jobs: IntCounterVec("smg_registration_jobs_total", "Finished registration jobs.", ["job_type", "result"]);
    registration_jobs_active: IntGauge("smg_registration_jobs_active", "Registration jobs running.");
    health_panic: IntCounter("smg_health_panic_total", "Ejections withheld because most of the fleet failed its probes at once.");
    tokio_workers: IntGauge("smg_tokio_workers", "Threads of the runtime.");
    tokio_alive_tasks: IntGauge("smg_tokio_alive_tasks", "Tasks of the runtime that have not ended.");
    tokio_global_queue_depth: IntGauge("smg_tokio_global_queue_depth", "Tasks that wait in the runtime's global queue.");
    tokio_worker_parks: IntCounter("smg_tokio_worker_parks_total", "Times that threads of the runtime went to sleep for want of work.");
    tokio_worker_busy_ratio: Gauge("smg_tokio_worker_busy_ratio", "Share of the last second in which the threads of the runtime had work, on average, 0 to 1.");
    tokio_event_loop_delay: Histogram("smg_tokio_event_loop_delay_seconds", "How late a timer of the runtime fires.", buckets = delays);
    tokio_event_loop_stalls: IntCounter("smg_tokio_event_loop_stalls_total", "Timers of the runtime that fired more than a tenth of a second late.");
    store_commits: IntCounter("smg_store_commits_total", "Durable commits of the store.");
    store_writes: IntCounterVec("smg_store_writes_total", "Writes of this control plane node, by what became of them: happened, rejected, did_not_happen or unknown.", ["outcome"]);
    store_write_duration: Histogram("smg_store_write_duration_seconds", "Time until a write of this control plane node was durable and applied.", buckets = durations);
    store_leading: IntGauge("smg_store_leading", "1 = this control plane node leads, 0 = it does not.");
    store_in_contact: IntGauge("smg_store_in_contact", "1 = this control plane node leads or hears the leader, 0 = what it has may be old.");
    store_term: IntGauge("smg_store_term", "Term of the log, as this control plane node knows it.");
    store_committed_index: IntGauge("smg_store_committed_index", "Last entry of the log that this control plane node knows to be committed.");
    store_applied_index: IntGauge("smg_store_applied_index", "Last entry of the log in this control plane node's state.");
    store_member_lag: IntGaugeVec("smg_store_member_lag_entries", "Entries of the log that a member does not have yet; shown by the node that leads.", ["member"]);
}

impl Metrics {
    /// The exposition text.
    ///
    /// # Errors
    /// When encoding fails.
    pub fn render(&self) -> Result<Vec<u8>, prometheus::Error> {
        let mut text = Vec::with_capacity(16 * 1024);
        TextEncoder::new().encode(&self.registry.gather(), &mut text)?;
        Ok(text)
    }

    /// Removes the series of workers that left the fleet, by URL: what comes and goes must not add up for ever.
    pub fn forget_workers(&self, urls: &BTreeSet<&str>) {
        if urls.is_empty() {
            return;
        }
        forget(&self.worker_requests_active, urls);
        forget(&self.worker_requests, urls);
        forget(&self.worker_cb_state, urls);
        forget(&self.worker_cb_consecutive_failures, urls);
        forget(&self.worker_cb_consecutive_successes, urls);
        forget(&self.worker_cb_transitions, urls);
        forget(&self.worker_cb_outcomes, urls);
        forget(&self.worker_cb_health_readmissions, urls);
        forget(&self.worker_paced, urls);
        forget(&self.pd_admission_window, urls);
        forget(&self.gateway_decode_slots, urls);
        forget(&self.decode_slots, urls);
        forget(&self.pd_prefill_admission_inflight, urls);
        forget(&self.engine_load_polls, urls);
        forget(&self.worker_stalled, urls);
        forget(&self.worker_stall_transitions, urls);
    }
}

/// Removes the series whose label `worker` is one of `urls`.
fn forget<B: MetricVecBuilder>(vec: &MetricVec<B>, urls: &BTreeSet<&str>) {
    for family in vec.collect() {
        for metric in family.get_metric() {
            let labels: HashMap<&str, &str> =
                metric.get_label().iter().map(|label| (label.name(), label.value())).collect();
            if labels.get("worker").is_some_and(|worker| urls.contains(worker)) {
                let _ = vec.remove(&labels);
            }
        }
    }
}

impl Default for Metrics {
    /// With the default buckets. They are increasing, so this cannot fail; a registry that fails all the same is an empty process.
    fn default() -> Self {
        match Self::new(&DURATION_BUCKETS) {
            Ok(metrics) => metrics,
            Err(error) => {
                tracing::error!(target: crate::SMG, %error, "metrics cannot be registered");
                std::process::abort()
            }
        }
    }
}

/// Content type of [`Metrics::render`].
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// The reference page. `UPDATE_DOCS=1` writes it.
    #[test]
    fn the_reference_page_lists_every_metric() {
        let mut page = String::from(
            "# Metrics\n\nServed on `--prometheus-port` under `/metrics`. A series with labels appears with its first use.\n\n| metric | labels | |\n|---|---|---|\n",
        );
        for (name, help, labels) in CATALOGUE {
            let labels = labels.iter().map(|label| format!("`{label}`")).collect::<Vec<_>>().join(", ");
            page.push_str(&format!("| `{name}` | {labels} | {help} |\n"));
        }
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/metrics.md");
        if std::env::var_os("UPDATE_DOCS").is_some() {
            std::fs::write(path, &page).unwrap();
        }
        assert_eq!(std::fs::read_to_string(path).unwrap(), page, "run the tests once with UPDATE_DOCS=1");
    }

    #[test]
    fn the_series_of_a_worker_that_left_are_removed_and_no_others() {
        let metrics = Metrics::default();
        for url in ["http://a:1", "http://b:1"] {
            metrics.worker_requests_active.with_label_values(&[url]).inc();
            metrics.worker_requests.with_label_values(&[url, "m"]).inc();
            metrics.worker_cb_transitions.with_label_values(&[url, "closed", "open"]).inc();
            metrics.worker_cb_outcomes.with_label_values(&[url, "failure"]).inc();
        }
        metrics.forget_workers(&["http://a:1"].into());
        let text = String::from_utf8(metrics.render().unwrap()).unwrap();
        assert!(!text.contains("http://a:1"), "{text}");
        assert_eq!(text.matches("http://b:1").count(), 4, "{text}");
    }

    #[test]
    fn every_metric_has_help_and_counters_end_in_total() {
        let metrics = Metrics::default();
        metrics.pd_kv_connector_mode.with_label_values(&["nixl"]).inc();
        let text = String::from_utf8(metrics.render().unwrap()).unwrap();
        assert!(text.contains("smg_pd_kv_connector_mode_total{mode=\"nixl\"} 1"));
        for (name, help, _) in CATALOGUE {
            assert!(name.starts_with("smg_") && help.ends_with('.'), "{name}");
        }
    }
}
