//! What vLLM says of itself: models, metrics.

use std::fmt::Write as _;
use std::sync::atomic::Ordering;

use crate::CREATED;
use crate::engine::Core;
use crate::json::quoted;

pub(super) fn models(core: &Core) -> String {
    let settings = &core.settings;
    let model = quoted(&settings.model);
    format!(
        r#"{{"object":"list","data":[{{"id":{model},"object":"model","created":{CREATED},"owned_by":"vllm","root":{model},"parent":null,"max_model_len":{},"permission":[{{"id":"modelperm-{CREATED:016x}","object":"model_permission","created":{CREATED},"allow_create_engine":false,"allow_sampling":true,"allow_logprobs":true,"allow_search_indices":false,"allow_view":true,"allow_fine_tuning":false,"organization":"*","group":null,"is_blocking":false}}]}}]}}"#,
        settings.max_model_len
    )
}

pub(super) fn metrics(core: &Core) -> String {
    let mut out = String::with_capacity(2048);
    let model = quoted(&core.settings.model);
    let load = &core.load;
    let running = load.running() as f64;
    let local = load.local_tokens.load(Ordering::Relaxed) as f64;
    let external = load.external_tokens.load(Ordering::Relaxed) as f64;
    let generated = load.generated_tokens.load(Ordering::Relaxed) as f64;
    let usage = match core.settings.max_running {
        Some(places) if places > 0 => (running / places as f64).min(1.0),
        _ => 0.0,
    };
    let _ = writeln!(
        out,
        "# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.\n# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds {:?}",
        core.started()
    );
    let mut family = |name: &str, kind: &str, help: &str, series: &[(&str, f64)]| {
        let sample = name.strip_suffix("_total").unwrap_or(name);
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
        let suffix = if kind == "counter" { "_total" } else { "" };
        for (labels, value) in series {
            let _ = writeln!(out, "{sample}{suffix}{{engine=\"0\",model_name={model}{labels}}} {value:?}");
        }
    };
    family("vllm:num_requests_running", "gauge", "Number of requests in model execution batches.", &[("", running)]);
    family(
        "vllm:num_requests_waiting",
        "gauge",
        "Number of requests waiting to be processed.",
        &[("", load.waiting() as f64)],
    );
    family("vllm:kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage.", &[("", usage)]);
    family("vllm:prompt_tokens_total", "counter", "Number of prefill tokens processed.", &[("", local + external)]);
    family(
        "vllm:prompt_tokens_by_source_total",
        "counter",
        "Number of prompt tokens by source.",
        &[(",source=\"local_compute\"", local), (",source=\"external_kv_transfer\"", external)],
    );
    family("vllm:generation_tokens_total", "counter", "Number of generation tokens processed.", &[("", generated)]);
    out
}
