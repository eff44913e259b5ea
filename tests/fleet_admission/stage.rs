//! A fleet of real processes under load, and what is seen of it over time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use mock_engine::Builder;
use reqwest::Client;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time::{sleep, sleep_until};

use crate::support::cluster::*;
use crate::support::*;

pub const CHAT: &str = "/v1/chat/completions";
/// Requests that a decode engine runs at a time.
pub const WINDOW: usize = 32;
pub const ENGINES: usize = 3;
/// Slots of all decode engines.
pub const ALL: usize = WINDOW * ENGINES;
pub const GATEWAYS: [&str; 4] = ["a", "b", "c", "d"];
/// What a gateway's clients ask for at a time: together three times what there is.
pub const DEMAND: usize = 3 * ALL / GATEWAYS.len();
/// An answer takes six seconds.
const TOKENS: u32 = 30;
const TOKEN: Duration = Duration::from_millis(200);
/// Between two looks at the engines.
const LOOKS: Duration = Duration::from_millis(50);
/// For a process to say what it holds. One that is frozen says nothing.
const SAYS: Duration = Duration::from_millis(500);

/// A gRPC engine of this role.
pub fn engine(role: Role) -> Builder {
    MockEngine::builder().grpc().engine(Engine::Sglang).role(role).model(MODEL)
}

/// Decode engines with a window, and the time they take for a token.
pub async fn decodes(count: usize, token: Duration) -> Vec<MockEngine> {
    let mut engines = Vec::new();
    for _ in 0..count {
        engines.push(engine(Role::Decode).max_running(WINDOW).token_delay(token).start().await.unwrap());
    }
    engines
}

/// Registers engines and waits until every gateway has slots of them.
pub async fn register(gateways: &[Smg], prefill: &MockEngine, decodes: &[MockEngine]) {
    let mut ids = vec![gateways[0].register(&spec(prefill, "prefill")).await];
    for decode in decodes {
        ids.push(gateways[0].register(&spec(decode, "decode")).await);
    }
    for gateway in gateways {
        for id in &ids {
            gateway.until_healthy(id).await;
        }
        until_granted(gateway, decodes.len()).await;
    }
}

/// Waits until a gateway has slots of so many workers.
pub async fn until_granted(gateway: &Smg, workers: usize) {
    eventually_within(Duration::from_secs(30), &format!("slots; log:\n{}", gateway.log()), || async {
        let granted = samples(&gateway.metrics().await, "smg_gateway_decode_slots", &[("state", "granted")]);
        (granted.values().filter(|slots| **slots > 0.0).count() >= workers).then_some(())
    })
    .await;
}

pub async fn assert_invariants_held(processes: impl IntoIterator<Item = &Smg>) {
    for smg in processes {
        assert_eq!(smg.metric("smg_slot_invariant_failures_total", &[]).await, 0.0, "{}", smg.log());
    }
}

/// A request that was not answered as it should be. What nothing reads is shown by assertions that fail.
#[derive(Debug)]
#[allow(dead_code)]
pub struct Failure {
    /// Since the beginning.
    pub at: Duration,
    pub gateway: &'static str,
    /// 0 = there was no answer, or it broke off.
    pub status: u16,
    pub code: String,
    pub text: String,
}

impl Failure {
    /// What a gateway without a slot says when a request has waited long enough.
    pub fn is_shed(&self) -> bool {
        self.status == 503 && self.code == "worker_overload_protection_shed"
    }
}

/// How requests ended.
#[derive(Default)]
pub struct Tally {
    pub served: AtomicU64,
    pub failures: Mutex<Vec<Failure>>,
}

/// Clients who ask a gateway one request after another. They leave when this is dropped.
pub struct Load(Vec<JoinHandle<()>>);

impl Drop for Load {
    fn drop(&mut self) {
        self.0.iter().for_each(JoinHandle::abort);
    }
}

/// What was seen of the engines at one moment.
pub struct Moment {
    pub at: Duration,
    pub active: [usize; ENGINES],
    pub served: u64,
}

/// What processes said to hold at one moment.
pub struct Said {
    pub at: Duration,
    /// Slots that each gateway may use by its own account; `None` = it says nothing.
    pub granted: [Option<f64>; GATEWAYS.len()],
    /// Slots that are kept for the silent, by the ledger; `None` = nobody leads.
    pub zombies: Option<f64>,
}

/// What was seen.
#[derive(Default)]
pub struct Seen {
    pub moments: Vec<Moment>,
    pub said: Vec<Said>,
    /// What was done when.
    pub notes: Vec<(Duration, String)>,
}

/// Three members of the control plane, four gateways, three decode engines.
pub struct Stage {
    places: Vec<Place>,
    pub members: Vec<Smg>,
    pub gateways: Vec<Smg>,
    addresses: String,
    _prefill: MockEngine,
    pub engines: Arc<Vec<MockEngine>>,
    loads: [Option<Load>; GATEWAYS.len()],
    pub tally: Arc<Tally>,
    began: Instant,
    pub seen: Arc<Mutex<Seen>>,
    /// Where gateways show their metrics.
    ports: Arc<Mutex<Vec<u16>>>,
    watch: Vec<JoinHandle<()>>,
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.watch.iter().for_each(JoinHandle::abort);
    }
}

impl Stage {
    /// Starts everything, and nobody asks for anything.
    pub async fn open() -> Self {
        let places: Vec<Place> = (0..3).map(|_| Place::new()).collect();
        let members = cluster(&places).await;
        let addresses = places.iter().map(Place::address).collect::<Vec<_>>().join(",");
        let (prefill, engines) = (engine(Role::Prefill).start().await.unwrap(), decodes(ENGINES, TOKEN).await);
        let mut gateways = Vec::new();
        for name in GATEWAYS {
            gateways.push(Smg::gateway(&addresses, &["--gateway-id", name]).await);
        }
        register(&gateways, &prefill, &engines).await;
        let ports = gateways.iter().map(|gateway| gateway.metrics_port).collect();
        let mut stage = Self {
            places,
            members,
            gateways,
            addresses,
            _prefill: prefill,
            engines: Arc::new(engines),
            loads: Default::default(),
            tally: Arc::default(),
            began: Instant::now(),
            seen: Arc::default(),
            ports: Arc::new(Mutex::new(ports)),
            watch: Vec::new(),
        };
        stage.watch();
        stage
    }

    fn watch(&mut self) {
        let (began, seen, tally) = (self.began, Arc::clone(&self.seen), Arc::clone(&self.tally));
        let engines = Arc::clone(&self.engines);
        self.watch.push(tokio::spawn(async move {
            loop {
                let active = std::array::from_fn(|index| engines[index].active());
                let (at, served) = (began.elapsed(), tally.served.load(Ordering::Relaxed));
                seen.lock().unwrap().moments.push(Moment { at, active, served });
                sleep(LOOKS).await;
            }
        }));
        let (seen, ports) = (Arc::clone(&self.seen), Arc::clone(&self.ports));
        let members: Vec<String> = self.members.iter().map(|member| member.url.clone()).collect();
        let client = Client::builder().no_proxy().timeout(SAYS).build().unwrap();
        self.watch.push(tokio::spawn(async move {
            loop {
                let at = began.elapsed();
                let metrics: Vec<String> =
                    ports.lock().unwrap().iter().map(|port| format!("http://127.0.0.1:{port}/metrics")).collect();
                let client = &client;
                let says = metrics.iter().map(|url| async move {
                    let text = client.get(url).send().await.ok()?.text().await.ok()?;
                    Some(samples(&text, "smg_gateway_decode_slots", &[("state", "granted")]).into_values().sum::<f64>())
                });
                let granted: Vec<Option<f64>> = futures::future::join_all(says).await;
                let mut zombies = None;
                for url in &members {
                    let url = format!("{url}/fleet/admission");
                    let Ok(answer) = client.get(url).send().await else { continue };
                    let Ok(shown) = answer.json::<Value>().await else { continue };
                    zombies = total(&shown, |worker| worker["zombie"].as_f64());
                    if zombies.is_some() {
                        break;
                    }
                }
                let granted = std::array::from_fn(|index| granted[index]);
                seen.lock().unwrap().said.push(Said { at, granted, zombies });
                sleep_until((began + at + Duration::from_secs(1)).into()).await;
            }
        }));
    }

    /// Time since the beginning.
    pub fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// Lets time pass.
    pub async fn until(&self, seconds: u64) {
        sleep_until((self.began + Duration::from_secs(seconds)).into()).await;
    }

    /// Remembers what is done.
    pub fn note(&self, what: &str) {
        println!("{:6.1} s: {what}", self.now().as_secs_f64());
        self.seen.lock().unwrap().notes.push((self.now(), what.to_owned()));
    }

    /// Clients for one gateway.
    pub fn clients(&self, gateway: usize, count: usize) -> Load {
        let client = Client::builder().no_proxy().build().unwrap();
        let url = format!("{}{CHAT}", self.gateways[gateway].url);
        let ask = |_| {
            let (client, url, tally, began) = (client.clone(), url.clone(), Arc::clone(&self.tally), self.began);
            tokio::spawn(async move {
                loop {
                    match ask(&client, &url).await {
                        Ok(()) => _ = tally.served.fetch_add(1, Ordering::Relaxed),
                        Err((status, code, text)) => {
                            let (at, gateway) = (began.elapsed(), GATEWAYS[gateway]);
                            tally.failures.lock().unwrap().push(Failure { at, gateway, status, code, text });
                            sleep(Duration::from_millis(200)).await;
                        }
                    }
                }
            })
        };
        Load((0..count).map(ask).collect())
    }

    /// Lets a gateway's steady clients come, or leave.
    pub fn load(&mut self, gateway: usize, is_on: bool) {
        self.loads[gateway] = is_on.then(|| self.clients(gateway, DEMAND));
    }

    /// Kills a gateway. Its clients stay and find nobody.
    pub fn kill_gateway(&mut self, gateway: usize) {
        self.gateways[gateway].kill();
    }

    /// Starts another process of a gateway; its clients go there.
    pub async fn start_gateway(&mut self, gateway: usize) {
        self.loads[gateway] = None;
        self.gateways[gateway] = Smg::gateway(&self.addresses, &["--gateway-id", GATEWAYS[gateway]]).await;
        self.ports.lock().unwrap()[gateway] = self.gateways[gateway].metrics_port;
        self.load(gateway, true);
    }

    /// Starts a member again that was killed.
    pub fn start_member(&mut self, member: usize) {
        self.members[member] = self.places[member].start(&[]);
    }

    pub fn active(&self) -> usize {
        self.engines.iter().map(MockEngine::active).sum()
    }

    /// Waits until so many requests are in the engines at once, and says how long that took.
    pub async fn until_active(&self, count: usize, limit: Duration) -> Duration {
        let began = Instant::now();
        let what = format!("{count} requests at once");
        eventually_within(limit, &what, || async { (self.active() >= count).then_some(()) }).await;
        began.elapsed()
    }

    /// The slots of all workers, as a member of the control plane has them.
    pub async fn ledger(&self, member: usize) -> Option<Value> {
        let url = format!("{}/fleet/admission?consistency=stale", self.members[member].url);
        self.members[member].client.get(url).send().await.ok()?.json().await.ok()
    }

    /// The share of all slots in use on average over a time.
    pub fn used(&self, from: Duration, to: Duration) -> f64 {
        let seen = self.seen.lock().unwrap();
        let span: Vec<_> = seen.moments.iter().filter(|moment| moment.at >= from && moment.at < to).collect();
        let sum: usize = span.iter().map(|moment| moment.active.iter().sum::<usize>()).sum();
        sum as f64 / (span.len().max(1) * ALL) as f64
    }

    /// Requests served each second over a time.
    pub fn rate(&self, from: Duration, to: Duration) -> f64 {
        let seen = self.seen.lock().unwrap();
        let at =
            |time: Duration| seen.moments.iter().rfind(|moment| moment.at <= time).map_or(0, |moment| moment.served);
        (at(to) - at(from)) as f64 / (to - from).as_secs_f64()
    }

    /// The most requests that were ever in one engine.
    pub fn peak(&self) -> usize {
        self.engines.iter().map(MockEngine::peak_active).max().unwrap_or(0)
    }

    /// No engine ever had more requests than its window, but for `late` that a frozen gateway was just sending.
    pub fn assert_never_exceeded(&self, late: usize) {
        assert!(self.peak() <= WINDOW + late, "{} requests in a window of {WINDOW}", self.peak());
    }

    /// Every failure is a shed, or was a client's of this gateway in this time.
    pub fn assert_served(&self, gateway: &str, from: Duration, to: Duration) -> usize {
        let failures = self.tally.failures.lock().unwrap();
        let excused = |failure: &&Failure| failure.gateway == gateway && failure.at >= from && failure.at <= to;
        let others: Vec<_> = failures.iter().filter(|failure| !failure.is_shed() && !excused(failure)).collect();
        assert!(others.is_empty(), "{} failures, the first {:?}", others.len(), others.first());
        failures.iter().filter(|failure| failure.is_shed()).count()
    }
}

/// The sum of something over all workers of what `/fleet/admission` shows.
pub fn total(shown: &Value, of: impl Fn(&Value) -> Option<f64>) -> Option<f64> {
    shown["workers"].as_array()?.iter().map(of).sum()
}

/// The sum of a field of one gateway over all workers.
pub fn held(shown: &Value, gateway: &str, field: &str) -> Option<f64> {
    total(shown, |worker| {
        let holders = worker["holders"].as_array()?.iter();
        Some(holders.filter(|holder| holder["gateway_id"] == gateway).filter_map(|holder| holder[field].as_f64()).sum())
    })
}

async fn ask(client: &Client, url: &str) -> Result<(), (u16, String, String)> {
    let mut body = chat_stream();
    body["max_tokens"] = json!(TOKENS);
    let none = |error: reqwest::Error| (0, String::new(), error.to_string());
    let response = client.post(url).json(&body).send().await.map_err(none)?;
    let status = response.status().as_u16();
    let code = response.headers().get("x-smg-error-code").and_then(|code| code.to_str().ok());
    let code = code.unwrap_or_default().to_owned();
    let text = response.text().await.map_err(none)?;
    if status == 200 && text.contains("[DONE]") && !text.contains("\"error\"") {
        return Ok(());
    }
    Err((if status == 200 { 0 } else { status }, code, text))
}
