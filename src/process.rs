//! The life of a process: limits, runtime, logs, metrics, signals, drain.
//!
//! ```text
//!  first SIGTERM or SIGINT ──► not ready, connections close after their request, new ones are still answered   (notice)
//!                          ──► nothing is accepted any more, running requests go on                            (drain)
//!  all ended, grace period over, or second signal ──► exit
//! ```

use std::future::Future;
use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use smg_controlplane::admin::access::AccessOptions;
use smg_fleet::{Role, Secret, StartupToken, TokenHash};
use smg_net::serve::{ConnectionEvent, ConnectionObserver, ServeOptions, Server, Shutdown, bind};
use smg_net::tls::{ClientConfig, ClientFiles};
use smg_telemetry::logs::{self, LogOptions};
use smg_telemetry::metrics::{CONTENT_TYPE, DURATION_BUCKETS};
use smg_telemetry::{Metrics, SMG};
use thiserror::Error;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::cli::{BOOTSTRAP, ProcessArgs, TokenArgs};
use crate::{descriptors, runtime};

/// Shortest token accepted from a file: anything shorter can be guessed from its digest.
const MIN_TOKEN_BYTES: usize = 16;
/// Longest notice given before the listener closes.
const MAX_NOTICE: Duration = Duration::from_secs(5);

/// Why a process ended with an error.
#[derive(Debug, Error)]
pub enum RunError {
    /// It could not start.
    #[error("{0}")]
    Start(String),
    /// Its data directory cannot be used.
    #[error("{0}")]
    Data(#[from] smg_store::raft::OpenError),
    /// Its data in etcd cannot be used, or etcd does not answer.
    #[cfg(feature = "etcd")]
    #[error("{0}")]
    Etcd(#[from] smg_store::etcd::EtcdError),
    /// Its logs cannot be set up.
    #[error("logs: {0}")]
    Logs(#[from] logs::LogError),
    /// It was removed from the cluster.
    #[error("this member was removed from the cluster for good: its data directory is of no more use")]
    Retired,
    /// Its store stopped after a storage error.
    #[error("the store has stopped: {0}")]
    StoreFailed(String),
}

impl RunError {
    /// A failed start.
    pub fn start(what: &str, error: impl std::fmt::Display) -> Self {
        Self::Start(format!("{what}: {error}"))
    }

    /// The exit code: 1, or those of sysexits for an unusable directory (73), a failed store (74) and a
    /// member that is none any more (77).
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self::Start(_) => ExitCode::FAILURE,
            #[cfg(feature = "etcd")]
            Self::Etcd(smg_store::etcd::EtcdError::Start(_)) => ExitCode::FAILURE,
            #[cfg(feature = "etcd")]
            Self::Etcd(_) => ExitCode::from(73),
            Self::Logs(logs::LogError::Directory { .. }) | Self::Data(_) => ExitCode::from(73),
            Self::Logs(_) => ExitCode::FAILURE,
            Self::StoreFailed(_) => ExitCode::from(74),
            Self::Retired => ExitCode::from(77),
        }
    }
}

/// Runs a process to its end.
///
/// # Errors
/// What `main` returned, or a runtime that cannot be built.
pub fn run(args: &ProcessArgs, main: impl Future<Output = Result<(), RunError>>) -> Result<(), RunError> {
    let level = args.log_level.as_str().to_owned();
    // Dropped last: what was logged to the very end is written.
    let _logs = logs::init(&LogOptions { level, json: args.log_json, directory: args.log_dir.clone() })?;
    descriptors::raise_limit();
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.enable_all();
    if let Some(threads) = args.runtime_worker_threads {
        builder.worker_threads(usize::from(threads));
    }
    let runtime = builder.build().map_err(|error| RunError::start("runtime", error))?;
    let ended = runtime.block_on(main);
    // What is still running was given its time already.
    runtime.shutdown_timeout(Duration::from_secs(1));
    ended
}

/// The metrics of a process.
///
/// # Errors
/// When the bucket bounds are not usable.
pub fn metrics(args: &ProcessArgs) -> Result<Arc<Metrics>, RunError> {
    let buckets = &args.prometheus_duration_buckets;
    let bounds: &[f64] = if buckets.is_empty() { &DURATION_BUCKETS } else { buckets };
    Metrics::new(bounds).map(Arc::new).map_err(|error| RunError::start("metrics", error))
}

/// Counts connections to a listener on which TLS was not agreed on.
pub fn count_refusals(metrics: &Metrics, listener: &str) -> ConnectionObserver {
    let refused = metrics.tls_refused.with_label_values(&[listener]);
    Arc::new(move |event| {
        if event == ConnectionEvent::Refused {
            refused.inc();
        }
    })
}

/// Serves `/metrics` on a port of its own, until the process ends.
///
/// # Errors
/// When the address cannot be bound.
pub fn serve_metrics(address: SocketAddr, metrics: Arc<Metrics>) -> Result<SocketAddr, RunError> {
    let measured = Arc::clone(&metrics);
    let render = move || {
        runtime::show(&metrics);
        let rendered = metrics.render();
        async move {
            match rendered {
                Ok(text) => ([(header::CONTENT_TYPE, HeaderValue::from_static(CONTENT_TYPE))], text).into_response(),
                Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
            }
        }
    };
    smg_net::spawn("runtime-metrics", runtime::measure(measured));
    let router: Router = Router::new().route("/metrics", get(render));
    let listener = bind(address).map_err(|error| RunError::start(&format!("metrics on {address}"), error))?;
    let bound = listener.local_addr().map_err(|error| RunError::start("metrics", error))?;
    let server = Server::new(ServeOptions::default(), Shutdown::default());
    smg_net::spawn("metrics", async move { server.listen(listener, router).await });
    Ok(bound)
}

/// Who may call the admin API, as the flags say it. `shared_key` is the key of a client edge in the same process.
///
/// # Errors
/// When the file with a token cannot be read, or holds none.
pub fn access(args: &TokenArgs, shared_key: Option<TokenHash>) -> Result<AccessOptions, RunError> {
    let mut startup_tokens = args.tokens.clone();
    if let Some(file) = &args.file {
        let what = format!("--admin-token-file {}", file.display());
        let content = std::fs::read_to_string(file).map_err(|error| RunError::start(&what, error))?;
        let secret = content.trim();
        if secret.len() < MIN_TOKEN_BYTES || secret.contains(char::is_whitespace) {
            let rule = format!("the file must hold one token of at least {MIN_TOKEN_BYTES} characters");
            return Err(RunError::start(&what, rule));
        }
        let (name, hash) = (BOOTSTRAP.to_owned(), TokenHash::of(secret));
        startup_tokens.push(StartupToken { name, role: Role::Admin, hash });
    }
    let backup_key = args.backup_key_file.as_deref().map(passphrase).transpose();
    let backup_key = backup_key.map_err(|error| RunError::start("--backup-key-file", error))?;
    Ok(AccessOptions { startup_tokens, shared_key, audit: args.audit, backup_key })
}

/// The passphrase in a file.
///
/// # Errors
/// When the file cannot be read, or holds none that is worth the name.
pub fn passphrase(file: &Path) -> Result<Secret, String> {
    let content = std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
    match content.trim() {
        secret if secret.len() >= MIN_TOKEN_BYTES => Ok(Secret::from(secret)),
        _ => Err(format!("{}: the file must hold at least {MIN_TOKEN_BYTES} characters", file.display())),
    }
}

/// What connections to `https://` workers trust and present.
///
/// # Errors
/// When a file cannot be used.
pub fn worker_tls(files: &ClientFiles) -> Result<ClientConfig, RunError> {
    files.load().map_err(|error| RunError::start("TLS towards workers", error))
}

/// The name of this host, as the kernel knows it.
pub fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "localhost".to_owned() } else { name.to_owned() }
}

/// The signals that end a process.
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Starts listening, so that a signal during the start is not lost.
    ///
    /// # Errors
    /// When handlers cannot be installed.
    pub fn install() -> Result<Self, RunError> {
        let handler = |kind| signal(kind).map_err(|error| RunError::start("signals", error));
        Ok(Self { terminate: handler(SignalKind::terminate())?, interrupt: handler(SignalKind::interrupt())? })
    }

    /// Waits for the next one.
    pub async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// Ends a server within `grace`: notice, drain, cut. A signal meanwhile cuts at once.
pub async fn drain(server: &Server, shutdown: &Shutdown, grace: Duration, signals: &mut Signals) {
    let notice = MAX_NOTICE.min(grace / 2);
    tracing::info!(target: SMG, grace_secs = grace.as_secs(), "draining");
    shutdown.notice.cancel();
    let orderly = async {
        tokio::time::sleep(notice).await;
        shutdown.closing.cancel();
        server.drain(grace.saturating_sub(notice)).await
    };
    let cut = tokio::select! {
        cut = orderly => cut,
        () = signals.next() => {
            shutdown.now();
            server.drain(Duration::ZERO).await
        }
    };
    if cut > 0 {
        tracing::warn!(target: SMG, connections = cut, "connections were cut before their requests had ended");
    }
}
