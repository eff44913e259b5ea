//! What a test holds of an engine: it starts and stops it, asks what it has seen, and tells it what to do next.

use super::*;
use crate::vocabulary;

/// A condition did not come true in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimedOut;

impl std::fmt::Display for TimedOut {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("the condition did not come true in time")
    }
}

impl std::error::Error for TimedOut {}

/// A running mock engine. Dropping it stops it.
pub struct MockEngine {
    core: Arc<Core>,
}

impl MockEngine {
    pub(crate) async fn start(settings: Settings, ports: Ports, engine_id: Option<String>) -> io::Result<Self> {
        let load = Load::default();
        load.limit(settings.max_running);
        let recorder = Arc::new(Recorder::new(settings.records, settings.patience));
        let engine_id = settings.connector.projected_id().map(str::to_owned).or(engine_id);
        let core = Arc::new(Core {
            calls: Calls::new(settings.records, Arc::clone(&recorder)),
            call_faults: CallFaults::default(),
            call_counts: Mutex::default(),
            script: Mutex::default(),
            healthy: AtomicBool::new(true),
            recorder,
            faults: Faults::default(),
            load,
            fabric: Fabric::default(),
            blocks: AtomicU64::new(1),
            handoff_patch: Mutex::default(),
            ports: Mutex::new(ports),
            incarnation: Mutex::new(Incarnation {
                engine_id: engine_id.unwrap_or_else(new_engine_id).into(),
                started: now(),
                ledger: Arc::new(Ledger::new(settings.patience)),
            }),
            life: Mutex::new(Life::new()),
            connections_seen: AtomicU64::new(0),
            settings,
        });
        core.listen().await?;
        Ok(MockEngine { core })
    }

    /// An engine to be set up.
    pub fn builder() -> Builder {
        Builder::new()
    }

    /// `http://127.0.0.1:<port>`, or `grpc://127.0.0.1:<port>`.
    pub fn url(&self) -> String {
        let scheme = if self.core.settings.grpc { "grpc" } else { "http" };
        format!("{scheme}://127.0.0.1:{}", self.port())
    }

    /// HTTP or gRPC port.
    pub fn port(&self) -> u16 {
        self.core.ports().http
    }

    /// Bootstrap port, where there is one: SGLang and Mooncake prefill engines.
    pub fn bootstrap_port(&self) -> Option<u16> {
        self.core.ports().bootstrap
    }

    /// Side channel port, where there is one: vLLM with NIXL or Mooncake; MoRI-IO's handshake port.
    pub fn side_channel_port(&self) -> Option<u16> {
        self.core.ports().side_channel
    }

    /// MoRI-IO's notify port.
    pub fn notify_port(&self) -> Option<u16> {
        self.core.ports().notify
    }

    /// Falsifies the handoffs that a MoRI-IO prefill engine returns from now on: the fields of an object replace the
    /// true ones, any other value replaces `kv_transfer_params`. `None` makes the engine honest again.
    pub fn alter_handoffs(&self, patch: Option<serde_json::Value>) {
        *self.core.handoff_patch.lock() = patch;
    }

    /// The id of this incarnation.
    pub fn engine_id(&self) -> String {
        self.core.engine_id().to_string()
    }

    /// Everything received, oldest first, as far as it is remembered.
    pub fn requests(&self) -> Vec<Recorded> {
        self.core.recorder.all()
    }

    /// The generation requests received.
    pub fn generations(&self) -> Vec<Recorded> {
        let mut requests = self.requests();
        requests.retain(Recorded::is_generation);
        requests
    }

    /// How many generation requests were received, forgotten and unrecorded ones included.
    pub fn generation_count(&self) -> u64 {
        self.core.recorder.generations()
    }

    /// How what was posted has ended since the start, generations and all else. It does not depend on recording.
    pub fn tally(&self) -> Tally {
        self.core.recorder.tally()
    }

    /// The ids of requests that were answered, to the last byte and over HTTP, with 408, 500, 502, 503 or 504, for whatever reason: the first
    /// 65,536 since the start. One that was sent again stands here again. It does not depend on recording.
    pub fn refusals(&self) -> Vec<String> {
        self.core.recorder.refusals()
    }

    /// Forgets what was received.
    pub fn clear_requests(&self) {
        self.core.recorder.clear();
        self.core.calls.clear();
    }

    /// The `Generate` calls received over gRPC, oldest first, as far as they are remembered.
    pub fn calls(&self) -> Vec<Call> {
        self.core.calls.all()
    }

    /// How many calls of this gRPC method were received, for example `GetServerInfo`.
    pub fn call_count(&self, method: &str) -> u64 {
        self.core.call_counts.lock().get(method).copied().unwrap_or(0)
    }

    /// The aborts received over gRPC, oldest first, as far as they are remembered.
    pub fn aborts(&self) -> Vec<Abort> {
        self.core.calls.aborts()
    }

    /// Ids of the requests that are inside a gRPC engine. When a test ends there should be none.
    pub fn open_requests(&self) -> Vec<String> {
        self.core.calls.open()
    }

    /// Lets every answer over gRPC say this and then end, instead of words that follow from the prompt. `None` = those
    /// words again. A prefill leg says the first token of it.
    pub fn replies_with(&self, text: Option<&str>) {
        *self.core.script.lock() = text.map(vocabulary::encode);
    }

    /// Adds a fault of gRPC calls. The first one added that meets a call applies, alone.
    pub fn set_call_fault(&self, fault: CallFault) {
        self.core.call_faults.add(fault);
    }

    /// What a gRPC engine says of its health from now on.
    pub fn set_healthy(&self, healthy: bool) {
        self.core.healthy.store(healthy, Ordering::Relaxed);
    }

    /// Waits until `count` generation requests were received since the start.
    pub async fn wait_for_generations(&self, count: u64, limit: Duration) -> Result<(), TimedOut> {
        self.wait_until(limit, |engine| engine.generation_count() >= count).await
    }

    /// Waits until `condition` holds. It is looked at whenever an exchange begins or ends, and now and then.
    pub async fn wait_until(&self, limit: Duration, condition: impl Fn(&MockEngine) -> bool) -> Result<(), TimedOut> {
        let deadline = Instant::now() + limit;
        let mut changes = self.core.recorder.subscribe();
        loop {
            changes.mark_unchanged();
            if condition(self) {
                return Ok(());
            }
            if Instant::now() >= deadline {
                return Err(TimedOut);
            }
            let next_look = (Instant::now() + Duration::from_millis(10)).min(deadline);
            // Either a change or the time for the next look.
            let _ = tokio::time::timeout_at(next_look, changes.changed()).await;
        }
    }

    /// Generation requests inside the engine now: from their last byte read to the end of their answer.
    pub fn active(&self) -> usize {
        self.core.load.active()
    }

    /// The most generation requests that were ever inside at once.
    pub fn peak_active(&self) -> usize {
        self.core.load.peak_active()
    }

    /// Requests in the running batch now.
    pub fn running(&self) -> usize {
        self.core.load.running()
    }

    /// The most requests that ever ran at once.
    pub fn peak_running(&self) -> usize {
        self.core.load.peak_running()
    }

    /// Requests that wait for a place in the running batch.
    pub fn waiting(&self) -> usize {
        self.core.load.waiting()
    }

    /// Changes the size of the running batch for requests to come.
    pub fn set_max_running(&self, requests: Option<usize>) {
        self.core.load.limit(requests);
    }

    /// Prompts whose KV is ready here and was not fetched.
    pub fn held_kv(&self) -> usize {
        self.core.ledger().held()
    }

    /// Prompt tokens computed here.
    pub fn local_prompt_tokens(&self) -> u64 {
        self.core.load.local_tokens.load(Ordering::Relaxed)
    }

    /// Prompt tokens whose KV came from a prefill engine.
    pub fn external_prompt_tokens(&self) -> u64 {
        self.core.load.external_tokens.load(Ordering::Relaxed)
    }

    /// Adds a fault. The first one added that meets a request applies, alone.
    pub fn set_fault(&self, fault: Fault) {
        self.core.faults.add(fault);
    }

    /// Removes all faults. Requests that met one keep it.
    pub fn clear_faults(&self) {
        self.core.faults.clear();
        self.core.call_faults.clear();
    }

    /// Stops: connections are reset, new ones refused, all KV is lost.
    pub async fn stop(&self) {
        self.core.stop().await;
    }

    /// Listens again after [`MockEngine::stop`], on the same ports and under the same id.
    pub async fn start_again(&self) -> io::Result<()> {
        self.core.listen().await
    }

    /// Stops and starts as a new process would: same ports, new engine id, no KV.
    pub async fn restart(&self) -> io::Result<()> {
        self.stop().await;
        {
            let mut incarnation = self.core.incarnation.lock();
            *incarnation = Incarnation {
                engine_id: new_engine_id().into(),
                // However fast a test is: no real engine starts within two seconds.
                started: now().max(incarnation.started + 2.0),
                ledger: Arc::new(Ledger::new(self.core.settings.patience)),
            };
        }
        self.core.listen().await
    }
}

impl Drop for MockEngine {
    fn drop(&mut self) {
        self.core.life.lock().accepting.cancel();
        self.core.close_connections();
    }
}
