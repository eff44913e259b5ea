//! Flags of tracing.

use clap::Args;
use smg_telemetry::trace;

/// Where traces go.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Tracing")]
pub struct TraceArgs {
    /// Send traces to an OpenTelemetry collector
    #[arg(long)]
    pub enable_trace: bool,
    /// The collector's OTLP/gRPC endpoint
    #[arg(long, value_name = "HOST:PORT", default_value = "localhost:4317", value_parser = collector)]
    pub otlp_traces_endpoint: String,
}

impl TraceArgs {
    /// The collector, if traces are wanted.
    pub fn collector(&self) -> Option<&str> {
        self.enable_trace.then_some(self.otlp_traces_endpoint.as_str())
    }
}

fn collector(text: &str) -> Result<String, String> {
    match trace::endpoint(text) {
        Ok(_) => Ok(text.to_owned()),
        Err(error) => Err(error.to_string()),
    }
}
