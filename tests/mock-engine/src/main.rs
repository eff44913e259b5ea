//! `mock-engine`: one mock engine as a process, for demonstrations and load tests.

use std::io::{self, Write as _};
use std::time::Duration;

use clap::Parser;
use mock_engine::{Connector, Engine, MockEngine, Role};
use tokio::signal::unix::{SignalKind, signal};

/// A mock SGLang, vLLM or TokenSpeed engine on 127.0.0.1. Prints `ready <url>` when it listens; ends on SIGTERM or SIGINT.
#[derive(Parser)]
#[command(name = "mock-engine", version)]
struct Arguments {
    /// Which engine is played
    #[arg(long, value_enum, default_value = "vllm")]
    engine: Engine,
    /// Its part in disaggregated serving
    #[arg(long, value_enum, default_value = "regular")]
    role: Role,
    /// vLLM's KV connector: none, nixl, mooncake, moriio-read, moriio-write, or any other connector's name
    #[arg(long, default_value = "none")]
    connector: Connector,
    /// HTTP port; 0 takes a free one
    #[arg(long, default_value_t = 0)]
    port: u16,
    /// Bootstrap port of a prefill engine (SGLang, Mooncake); a free one by default
    #[arg(long)]
    bootstrap_port: Option<u16>,
    /// Side channel port (NIXL, Mooncake); a free one by default
    #[arg(long)]
    side_channel_port: Option<u16>,
    /// Name of the served model
    #[arg(long, default_value = "m")]
    model: String,
    /// Engine id; random by default
    #[arg(long)]
    engine_id: Option<String>,
    /// Longest prompt and answer together, in tokens
    #[arg(long)]
    max_model_len: Option<usize>,
    /// Places in the running batch
    #[arg(long)]
    max_running: Option<usize>,
    /// Milliseconds to compute a prompt
    #[arg(long, default_value_t = 0)]
    prefill_delay_ms: u64,
    /// Milliseconds between two tokens
    #[arg(long, default_value_t = 0)]
    token_delay_ms: u64,
    /// Key that every request must bear
    #[arg(long)]
    api_key: Option<String>,
    /// Keep no record of requests
    #[arg(long)]
    no_record: bool,
    /// Data parallel ranks
    #[arg(long)]
    dp_size: Option<u64>,
    /// Speak gRPC instead of HTTP
    #[arg(long)]
    grpc: bool,
    /// Tokens in one message of a streamed answer over gRPC
    #[arg(long, default_value_t = 1)]
    tokens_per_chunk: usize,

    /// Text that every answer over gRPC says, instead of words that follow from the prompt
    #[arg(long)]
    reply: Option<String>,
}

#[tokio::main]
async fn main() -> io::Result<()> {
    let arguments = Arguments::parse();
    let mut builder = MockEngine::builder()
        .engine(arguments.engine)
        .role(arguments.role)
        .connector(arguments.connector)
        .model(arguments.model)
        .port(arguments.port)
        .prefill_delay(Duration::from_millis(arguments.prefill_delay_ms))
        .token_delay(Duration::from_millis(arguments.token_delay_ms));
    if let Some(port) = arguments.bootstrap_port {
        builder = builder.bootstrap_port(port);
    }
    if let Some(port) = arguments.side_channel_port {
        builder = builder.side_channel_port(port);
    }
    if let Some(id) = arguments.engine_id {
        builder = builder.engine_id(id);
    }
    if let Some(tokens) = arguments.max_model_len {
        builder = builder.max_model_len(tokens);
    }
    if let Some(requests) = arguments.max_running {
        builder = builder.max_running(requests);
    }
    if let Some(key) = arguments.api_key {
        builder = builder.api_key(key);
    }
    if let Some(ranks) = arguments.dp_size {
        builder = builder.dp_size(ranks);
    }
    if arguments.grpc {
        builder = builder.grpc().tokens_per_chunk(arguments.tokens_per_chunk);
    }
    if arguments.no_record {
        builder = builder.records(0);
    }
    let mut terminated = signal(SignalKind::terminate())?;
    let mut interrupted = signal(SignalKind::interrupt())?;
    let engine = builder.start().await?;
    engine.replies_with(arguments.reply.as_deref());
    {
        let mut out = io::stdout().lock();
        writeln!(out, "ready {}", engine.url())?;
        out.flush()?;
    }
    tokio::select! {
        _ = terminated.recv() => {}
        _ = interrupted.recv() => {}
    }
    engine.stop().await;
    Ok(())
}
