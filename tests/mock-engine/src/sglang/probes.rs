//! What SGLang says of itself: models, server info, loads, metrics.

use std::fmt::Write as _;

use serde_json::json;

use crate::engine::{Core, Role};
use crate::json::quoted;
use crate::load::RankLevel;
use crate::{CREATED, VERSION_SGLANG as VERSION};

pub(super) fn models(core: &Core) -> String {
    let model = quoted(&core.settings.model);
    format!(
        r#"{{"object":"list","data":[{{"id":{model},"object":"model","created":{CREATED},"owned_by":"sglang","root":{model},"parent":null,"max_model_len":{}}}]}}"#,
        core.settings.max_model_len
    )
}

pub(super) fn server_info(core: &Core) -> String {
    let settings = &core.settings;
    let mut info = json!({
        "model_path": settings.model,
        "tokenizer_path": settings.model,
        "served_model_name": settings.model,
        "host": "127.0.0.1",
        "port": core.ports().http,
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": settings.dp_size.unwrap_or(1),
        "enable_dp_attention": false,
        "load_balance_method": "round_robin",
        "disaggregation_mode": match settings.role {
            Role::Regular => "null",
            Role::Prefill => "prefill",
            Role::Decode => "decode",
        },
        "disaggregation_bootstrap_port": core.ports().bootstrap.unwrap_or(8998),
        "is_embedding": false,
        "context_length": settings.max_model_len,
        "max_total_tokens": settings.max_model_len,
        "max_total_num_tokens": settings.max_model_len,
        "weight_version": "default",
        "status": "ready",
        "version": VERSION,
    });
    if let Some(places) = settings.max_running {
        info["max_running_requests"] = places.into();
    }
    for (name, value) in &settings.server_info {
        info[name.as_str()] = value.clone();
    }
    info.to_string()
}

pub(super) fn model_info(core: &Core) -> String {
    json!({
        "model_path": core.settings.model,
        "tokenizer_path": core.settings.model,
        "is_generation": true,
        "preferred_sampling_params": null,
        "weight_version": "default",
        "has_image_understanding": false,
        "has_audio_understanding": false,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
    })
    .to_string()
}

/// Share of the places that so many requests take.
fn usage(core: &Core, running: usize) -> f64 {
    match core.settings.max_running {
        Some(places) if places > 0 => (running as f64 / places as f64).min(1.0),
        _ => 0.0,
    }
}

pub(super) fn loads(core: &Core) -> String {
    let (running, waiting) = (core.load.running(), core.load.waiting());
    let usage = usage(core, running);
    let now =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
    let ranks = core.settings.dp_size.unwrap_or(1).max(1);
    let loads: Vec<_> = (0..ranks).map(|rank| rank_load(core, rank)).collect();
    json!({
        "timestamp": now.to_string(),
        "version": VERSION,
        "dp_rank_count": ranks,
        "loads": loads,
        "aggregate": {
            "total_running_reqs": running,
            "total_waiting_reqs": waiting,
            "total_reqs": running + waiting,
            "avg_token_usage": usage,
            "avg_throughput": 0.0,
            "avg_utilization": usage,
        },
    })
    .to_string()
}

fn rank_load(core: &Core, rank: u64) -> serde_json::Value {
    let RankLevel { running, waiting } = core.load.rank(rank);
    let usage = usage(core, running);
    let mut load = json!({
        "dp_rank": rank,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_waiting_uncached_tokens": 0,
        "num_total_reqs": running + waiting,
        "num_used_tokens": (usage * core.settings.max_model_len as f64) as u64,
        "max_total_num_tokens": core.settings.max_model_len,
        "token_usage": usage,
        "gen_throughput": 0.0,
        "cache_hit_rate": 0.0,
        "utilization": usage,
        "max_running_requests": core.settings.max_running.unwrap_or(0),
        "memory": {"weight_gb": 0.0, "kv_cache_gb": 0.0, "graph_gb": 0.0, "token_capacity": core.settings.max_model_len},
        "queues": {"waiting": waiting, "grammar": 0, "paused": 0, "retracted": 0},
    });
    match core.settings.role {
        Role::Regular => {}
        Role::Prefill => {
            load["disagg_mode"] = "prefill".into();
            load["prefill_queue_reqs"] = waiting.into();
        }
        Role::Decode => {
            load["disagg_mode"] = "decode".into();
            load["decode_queue_reqs"] = waiting.into();
        }
    }
    load
}

pub(super) fn metrics(core: &Core) -> String {
    let mut out = String::with_capacity(1024);
    let model = quoted(&core.settings.model);
    let load = &core.load;
    for (name, help, value) in [
        ("num_running_reqs", "The number of running requests.", load.running() as f64),
        ("num_queue_reqs", "The number of requests in the waiting queue.", load.waiting() as f64),
        ("token_usage", "The token usage.", usage(core, load.running())),
        ("gen_throughput", "The generation throughput (token/s).", 0.0),
        ("cache_hit_rate", "The prefix cache hit rate.", 0.0),
        ("utilization", "The utilization.", usage(core, load.running())),
    ] {
        // Writing to a string cannot fail.
        let _ = writeln!(
            out,
            "# HELP sglang:{name} {help}\n# TYPE sglang:{name} gauge\nsglang:{name}{{model_name={model}}} {value:?}"
        );
    }
    out
}
