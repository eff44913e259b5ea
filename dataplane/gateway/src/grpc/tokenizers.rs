//! The tokenizers of the models that are served over gRPC.
//!
//! A model's tokenizer is loaded once, as soon as the fleet has a gRPC worker of it, in a task of its own and off the threads that serve
//! requests. It comes from the path that a worker reports or its operator gave it (`tokenizer_path`, else `model_path`), from the process's
//! own `--tokenizer-path` or `--model-path` where workers report none, and else, or when that fails, from any healthy worker of the model
//! (`GetTokenizer`). A request that comes while it is being loaded waits for it, but not long.
//!
//! Invariants
//! * there is at most one entry a model, and none of a model that is no longer served;
//! * at most [`AT_ONCE`] tokenizers are loaded at a time, and each load ends within [`LOADING`];
//! * a failed load is tried again when a request wants it, but not within [`AGAIN`].

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::StatusCode;
use parking_lot::Mutex;
use smg_fleet::Wire;
use smg_telemetry::SMG;
use smg_text::source::{Bundle, Files, SourceError};
use smg_text::{Parsers, TextModel};
use tokio::sync::{Semaphore, watch};

use super::client::Client;
use super::refusal::Refusal;
use crate::core::Core;
use crate::fleet::table::ModelPool;
use crate::fleet::worker::RoutedWorker;

/// Tokenizers loaded at a time.
const AT_ONCE: usize = 2;
/// How long loading one may take.
const LOADING: Duration = Duration::from_secs(120);
/// How long a request waits for a tokenizer that is being loaded.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long a failed load is not tried again.
const AGAIN: Duration = Duration::from_secs(5);

/// Where tokenizers are, and how output is taken apart, unless workers say otherwise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextOptions {
    /// A directory with a tokenizer, or a file in it.
    pub tokenizer_path: Option<PathBuf>,
    /// The directory of a model.
    pub model_path: Option<PathBuf>,
    /// A file with a chat template that replaces those of all models.
    pub chat_template: Option<PathBuf>,
    /// Name of the parser of tool calls.
    pub tool_parser: Option<String>,
    /// Name of the parser of reasoning.
    pub reasoning_parser: Option<String>,
    /// Bytes of tokenizations that are kept for each model.
    pub cache_bytes: usize,
}

impl Default for TextOptions {
    fn default() -> Self {
        Self {
            tokenizer_path: None,
            model_path: None,
            chat_template: None,
            tool_parser: None,
            reasoning_parser: None,
            cache_bytes: 64 * 1024 * 1024,
        }
    }
}

impl TextOptions {
    /// Whether the parsers exist.
    ///
    /// # Errors
    /// One does not; the message names those that do.
    pub fn check(&self) -> Result<(), String> {
        let chosen = Parsers::choose(self.reasoning_parser.as_deref(), self.tool_parser.as_deref(), "");
        chosen.map(drop).map_err(|error| error.to_string())
    }
}

/// What turns the requests of one model into token ids, and ids into answers.
#[derive(Debug)]
pub struct Model {
    /// Its tokenizer and chat template.
    pub text: Arc<TextModel>,
    /// How its output is taken apart.
    pub parsers: Parsers,
}

#[derive(Debug, Clone)]
enum State {
    Loading,
    Ready(Arc<Model>),
    Failed(Arc<str>),
}

#[derive(Debug)]
struct Entry {
    state: watch::Receiver<State>,
    begun: Instant,
}

/// The tokenizers of a gateway.
#[derive(Debug)]
pub struct Tokenizers {
    entries: Mutex<HashMap<Arc<str>, Entry>>,
    loads: Arc<Semaphore>,
}

impl Default for Tokenizers {
    fn default() -> Self {
        Self { entries: Mutex::default(), loads: Arc::new(Semaphore::new(AT_ONCE)) }
    }
}

/// Loads the tokenizers of models as they come, and forgets those of models that are gone, until the gateway closes.
pub async fn follow_the_fleet(core: Arc<Core>) {
    let mut revision = core.revision.subscribe();
    loop {
        let table = core.table.load_full();
        let served: HashMap<&Arc<str>, &Arc<ModelPool>> =
            table.pools().filter(|pool| pool.wires.grpc).map(|pool| (&pool.model, pool)).collect();
        core.tokenizers.entries.lock().retain(|model, _| served.contains_key(model));
        for pool in served.values() {
            core.tokenizers.state_of(&core, pool);
        }
        tokio::select! {
            () = core.closing.cancelled() => return,
            changed = revision.changed() => if changed.is_err() { return },
        }
    }
}

impl Tokenizers {
    /// What serves a model.
    ///
    /// # Errors
    /// It is not there: still being loaded (503, try again), or it could not be (503).
    pub async fn of(&self, core: &Arc<Core>, pool: &ModelPool) -> Result<Arc<Model>, Refusal> {
        let mut state = self.state_of(core, pool);
        let settled = state.wait_for(|state| !matches!(state, State::Loading));
        let state = match tokio::time::timeout(PATIENCE, settled).await {
            Ok(Ok(state)) => state.clone(),
            _ => State::Loading,
        };
        match state {
            State::Ready(model) => Ok(model),
            State::Loading => {
                let message = format!("The tokenizer of model '{}' is still being loaded", pool.model);
                let refusal = Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "tokenizer_not_ready", message);
                Err(Refusal { retry_after: Some(1), ..refusal })
            }
            State::Failed(reason) => {
                let message = format!("The tokenizer of model '{}' could not be loaded: {reason}", pool.model);
                Err(Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "tokenizer_load_failed", message))
            }
        }
    }

    /// Where a model's tokenizer stands. Loading begins if it has to.
    fn state_of(&self, core: &Arc<Core>, pool: &ModelPool) -> watch::Receiver<State> {
        let mut entries = self.entries.lock();
        if let Some(entry) = entries.get(&pool.model) {
            // A task that went away without a word has failed.
            let gone = entry.state.has_changed().is_err() && matches!(*entry.state.borrow(), State::Loading);
            let failed = matches!(*entry.state.borrow(), State::Failed(_)) || gone;
            if !failed || entry.begun.elapsed() < AGAIN {
                return entry.state.clone();
            }
        }
        let (sender, state) = watch::channel(State::Loading);
        entries.insert(Arc::clone(&pool.model), Entry { state: state.clone(), begun: Instant::now() });
        drop(entries);
        let job = Job::of(core, pool);
        let (loads, closing) = (Arc::clone(&self.loads), core.closing.clone());
        smg_net::spawn("tokenizer", async move {
            let model = Arc::clone(&job.model);
            let load = async {
                // The semaphore is never closed.
                let _slot = loads.acquire_owned().await;
                job.load().await
            };
            let loaded = tokio::select! {
                () = closing.cancelled() => return,
                loaded = tokio::time::timeout(LOADING, load) => loaded.unwrap_or_else(|_| Err("it took too long".to_owned())),
            };
            sender.send_replace(match loaded {
                Ok(loaded) => {
                    tracing::info!(target: SMG, %model, "the tokenizer is loaded");
                    State::Ready(Arc::new(loaded))
                }
                Err(reason) => {
                    tracing::warn!(target: SMG, %model, reason, "the tokenizer cannot be loaded");
                    State::Failed(reason.into())
                }
            });
        });
        state
    }
}

/// One load.
struct Job {
    model: Arc<str>,
    options: TextOptions,
    /// Where workers say that it lies.
    reported: Vec<PathBuf>,
    /// Who may be asked for it.
    engines: Vec<(String, Client)>,
    reasoning_parser: Option<String>,
    tool_parser: Option<String>,
}

impl Job {
    fn of(core: &Core, pool: &ModelPool) -> Self {
        let prefills = pool.prefills.iter().map(|entry| &entry.worker);
        let workers: Vec<&Arc<RoutedWorker>> = prefills
            .chain(&pool.decodes)
            .chain(&pool.regulars)
            .filter(|worker| worker.record.wire() == Wire::Grpc)
            .collect();
        let label = |name: &str| {
            let values = workers.iter().filter_map(|worker| worker.record.label(name));
            values.filter(|value| !value.is_empty()).min().map(str::to_owned)
        };
        let mut reported: Vec<PathBuf> = Vec::new();
        for worker in &workers {
            let path = ["tokenizer_path", "model_path"]
                .iter()
                .find_map(|name| worker.record.label(name).filter(|path| !path.is_empty()));
            let path = path.map(PathBuf::from);
            reported.extend(path.filter(|path| !reported.contains(path)));
        }
        let healthy = workers.iter().filter(|worker| worker.record.is_routable() && !worker.runtime.is_unreachable());
        let engines = healthy.filter_map(|worker| Some((worker.url.as_str().to_owned(), core.client_of(worker)?)));
        Self {
            model: Arc::clone(&pool.model),
            reported,
            engines: engines.collect(),
            reasoning_parser: label("reasoning_parser").or_else(|| core.options.text.reasoning_parser.clone()),
            tool_parser: label("tool_parser").or_else(|| core.options.text.tool_parser.clone()),
            options: core.options.text.clone(),
        }
    }

    async fn load(self) -> Result<Model, String> {
        let parsers = Parsers::choose(self.reasoning_parser.as_deref(), self.tool_parser.as_deref(), &self.model)
            .map_err(|error| error.to_string())?;
        let mut reasons = Vec::new();
        let own = [&self.options.tokenizer_path, &self.options.model_path].into_iter().flatten();
        for path in self.reported.iter().chain(own) {
            match self.at(path).await {
                Ok(text) => return Ok(Model { text: Arc::new(text), parsers }),
                Err(reason) => reasons.push(reason),
            }
        }
        for (url, client) in &self.engines {
            match self.of_engine(client).await {
                Ok(text) => return Ok(Model { text: Arc::new(text), parsers }),
                Err(reason) => reasons.push(format!("{url}: {reason}")),
            }
        }
        if reasons.is_empty() {
            reasons.push("no worker reports a path, and none could be asked".to_owned());
        }
        Err(reasons.join("; "))
    }

    async fn at(&self, path: &Path) -> Result<TextModel, String> {
        let path = path.to_owned();
        self.read(move || Files::at(&path)).await
    }

    async fn of_engine(&self, client: &Client) -> Result<TextModel, String> {
        let mut chunks = client.tokenizer().await.map_err(|status| status.message().to_owned())?;
        let mut bundle = Bundle::default();
        while let Some(chunk) = chunks.message().await.map_err(|status| status.message().to_owned())? {
            bundle.push(&chunk.data, &chunk.sha256).map_err(|error| error.to_string())?;
        }
        self.read(move || bundle.finish()).await
    }

    async fn read(
        &self,
        files: impl FnOnce() -> Result<Files, SourceError> + Send + 'static,
    ) -> Result<TextModel, String> {
        let (template, cache) = (self.options.chat_template.clone(), self.options.cache_bytes);
        let read = tokio::task::spawn_blocking(move || {
            let template = template
                .map(|path| std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display())));
            let files = files().map_err(|error| error.to_string())?;
            TextModel::new(&files, template.transpose()?.as_deref(), cache).map_err(|error| error.to_string())
        });
        read.await.unwrap_or_else(|_| Err("reading it failed".to_owned()))
    }
}
