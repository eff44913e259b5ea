//! What engines say about their load, read into one shape. Pure.
//!
//! Two sources: `/v1/loads` (SGLang 0.5, TokenSpeed; the documented system's gateways answer the same shape), and the Prometheus text of
//! `/metrics` (vLLM 0.32: `vllm:num_requests_running`, `vllm:num_requests_waiting`, `vllm:kv_cache_usage_perc` …; SGLang: `sglang:…` or
//! `sglang_…`). Counts of several series are summed, shares are averaged.
//!
//! Nothing an engine says is trusted: numbers are taken where they are finite and not negative, everything else counts as not said.

use serde::Serialize;
use serde_json::Value;
use smg_policies::LoadReport;

/// Most ranks of one engine.
const MAX_RANKS: usize = 1024;

/// The load of one rank, with the field names of the documented `/loads`.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
#[allow(missing_docs)]
pub struct RankLoad {
    pub dp_rank: u64,
    pub num_running_reqs: u64,
    pub num_waiting_reqs: u64,
    pub num_waiting_uncached_tokens: u64,
    pub num_total_reqs: u64,
    pub num_used_tokens: u64,
    pub max_total_num_tokens: u64,
    pub token_usage: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub active_token_usage: Option<f64>,
    pub gen_throughput: f64,
    pub cache_hit_rate: f64,
    pub utilization: f64,
    pub max_running_requests: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Memory>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queues: Option<Queues>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_transfer_latency_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_transfer_speed_gb_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_queue_reqs: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decode_queue_reqs: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disagg_mode: Option<String>,
}

/// Memory of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
#[allow(missing_docs)]
pub struct Memory {
    pub weight_gb: f64,
    pub kv_cache_gb: f64,
    pub graph_gb: f64,
    pub token_capacity: u64,
}

/// Queues of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[allow(missing_docs)]
pub struct Queues {
    pub waiting: u64,
    pub grammar: u64,
    pub paused: u64,
    pub retracted: u64,
}

/// An engine's answer of `/v1/loads`; `None` when it is not one.
pub fn from_loads(body: &[u8]) -> Option<Vec<RankLoad>> {
    let body: Value = serde_json::from_slice(body).ok()?;
    let ranks = body.get("loads")?.as_array()?;
    let ranks: Vec<RankLoad> = ranks.iter().take(MAX_RANKS).enumerate().filter_map(rank).collect();
    (!ranks.is_empty()).then_some(ranks)
}

fn rank((position, load): (usize, &Value)) -> Option<RankLoad> {
    load.is_object().then_some(())?;
    let of = Numbers(load);
    let (running, waiting) = (of.count("num_running_reqs")?, of.count("num_waiting_reqs")?);
    let nested = Numbers(load.get("disaggregation").unwrap_or(&Value::Null));
    let memory = load.get("memory").filter(|memory| memory.is_object()).map(|memory| {
        let of = Numbers(memory);
        let amount = |name| of.amount(name).unwrap_or_default();
        Memory {
            weight_gb: amount("weight_gb"),
            kv_cache_gb: amount("kv_cache_gb"),
            graph_gb: amount("graph_gb"),
            token_capacity: of.count("token_capacity").unwrap_or_default(),
        }
    });
    let queues = load.get("queues").filter(|queues| queues.is_object()).map(|queues| {
        let count = |name| Numbers(queues).count(name).unwrap_or_default();
        Queues {
            waiting: count("waiting"),
            grammar: count("grammar"),
            paused: count("paused"),
            retracted: count("retracted"),
        }
    });
    let mode = load.get("disagg_mode").or_else(|| load.get("disaggregation")?.get("mode")).and_then(Value::as_str);
    Some(RankLoad {
        dp_rank: of.count("dp_rank").unwrap_or(position as u64),
        num_running_reqs: running,
        num_waiting_reqs: waiting,
        num_waiting_uncached_tokens: of.count("num_waiting_uncached_tokens").unwrap_or_default(),
        num_total_reqs: of.count("num_total_reqs").unwrap_or_else(|| running.saturating_add(waiting)),
        num_used_tokens: of.count("num_used_tokens").unwrap_or_default(),
        max_total_num_tokens: of.count("max_total_num_tokens").unwrap_or_default(),
        token_usage: of.amount("token_usage").unwrap_or_default(),
        active_token_usage: of.amount("active_token_usage"),
        gen_throughput: of.amount("gen_throughput").unwrap_or_default(),
        cache_hit_rate: of.amount("cache_hit_rate").unwrap_or_default(),
        utilization: of.amount("utilization").unwrap_or_default(),
        max_running_requests: of.count("max_running_requests").unwrap_or_default(),
        memory,
        queues,
        kv_transfer_latency_ms: of.amount("kv_transfer_latency_ms").or_else(|| nested.amount("kv_transfer_latency_ms")),
        kv_transfer_speed_gb_s: of.amount("kv_transfer_speed_gb_s").or_else(|| nested.amount("kv_transfer_speed_gb_s")),
        prefill_queue_reqs: of
            .count("prefill_queue_reqs")
            .or_else(|| nested.sum(["prefill_prealloc_queue_reqs", "prefill_inflight_queue_reqs"])),
        decode_queue_reqs: of
            .count("decode_queue_reqs")
            .or_else(|| nested.sum(["decode_prealloc_queue_reqs", "decode_transfer_queue_reqs"])),
        disagg_mode: mode.filter(|mode| mode.len() <= 32).map(str::to_owned),
    })
}

/// The numbers of a JSON object.
struct Numbers<'a>(&'a Value);

impl Numbers<'_> {
    fn amount(&self, name: &str) -> Option<f64> {
        self.0.get(name)?.as_f64().filter(|number| number.is_finite() && *number >= 0.0)
    }

    fn count(&self, name: &str) -> Option<u64> {
        self.amount(name).map(|number| number as u64)
    }

    fn sum(&self, names: [&str; 2]) -> Option<u64> {
        names.iter().filter_map(|name| self.count(name)).reduce(u64::saturating_add)
    }
}

/// An engine's metrics as its load, all ranks together; `None` when they do not tell it.
pub fn from_metrics(text: &str) -> Option<RankLoad> {
    let vllm = Families { text, prefix: "vllm:" };
    if let Some(token_usage) = vllm.mean(&["gpu_cache_usage_perc", "kv_cache_usage_perc"]) {
        return Some(load_of(
            vllm.sum("num_requests_running"),
            vllm.sum("num_requests_waiting"),
            RankLoad {
                token_usage,
                cache_hit_rate: vllm.mean(&["gpu_prefix_cache_hit_rate"]).unwrap_or_default(),
                ..Default::default()
            },
        ));
    }
    ["sglang:", "sglang_"].into_iter().find_map(|prefix| {
        let sglang = Families { text, prefix };
        let token_usage = sglang.mean(&["token_usage"])?;
        Some(load_of(
            sglang.sum("num_running_reqs"),
            sglang.sum("num_queue_reqs"),
            RankLoad {
                token_usage,
                gen_throughput: sglang.sum("gen_throughput"),
                cache_hit_rate: sglang.mean(&["cache_hit_rate"]).unwrap_or_default(),
                utilization: sglang.mean(&["utilization"]).unwrap_or_default(),
                ..Default::default()
            },
        ))
    })
}

fn load_of(running: f64, waiting: f64, rest: RankLoad) -> RankLoad {
    let (running, waiting) = (running as u64, waiting as u64);
    let total = running.saturating_add(waiting);
    RankLoad { num_running_reqs: running, num_waiting_reqs: waiting, num_total_reqs: total, ..rest }
}

/// The series of one engine in an exposition text.
struct Families<'a> {
    text: &'a str,
    prefix: &'a str,
}

impl Families<'_> {
    fn values(&self, name: &str) -> impl Iterator<Item = f64> {
        self.text.lines().filter_map(move |line| {
            let rest = line.strip_prefix(self.prefix)?.strip_prefix(name)?;
            let value = match rest.strip_prefix('{') {
                Some(labels) => labels.rsplit_once('}')?.1,
                None => rest.strip_prefix(' ')?,
            };
            let value: f64 = value.split_whitespace().next()?.parse().ok()?;
            (value.is_finite() && value >= 0.0).then_some(value)
        })
    }

    fn sum(&self, name: &str) -> f64 {
        self.values(name).sum()
    }

    fn mean(&self, names: &[&str]) -> Option<f64> {
        names.iter().find_map(|name| {
            let (count, sum) = self.values(name).fold((0u32, 0.0), |(count, sum), value| (count + 1, sum + value));
            (count > 0).then(|| sum / f64::from(count))
        })
    }
}

/// The tokens that `rank`, or all ranks together, hold in their cache or have still to compute.
pub fn tokens(ranks: &[RankLoad], rank: Option<u32>) -> u64 {
    let mine = ranks.iter().filter(|load| rank.is_none_or(|rank| load.dp_rank == u64::from(rank)));
    mine.map(|load| load.num_used_tokens.saturating_add(load.num_waiting_uncached_tokens)).fold(0, u64::saturating_add)
}

/// What policies and overload protection read: the load of `rank`, or of all ranks together.
pub fn summarize(ranks: &[RankLoad], rank: Option<u32>) -> Option<LoadReport> {
    let mine: Vec<&RankLoad> =
        ranks.iter().filter(|load| rank.is_none_or(|rank| load.dp_rank == u64::from(rank))).collect();
    if mine.is_empty() {
        return None;
    }
    let sum = |field: fn(&RankLoad) -> u64| mine.iter().map(|load| field(load)).fold(0, u64::saturating_add);
    let waiting = sum(|load| load.num_waiting_reqs);
    let uncached = sum(|load| load.num_waiting_uncached_tokens);
    let usage: f64 = mine.iter().map(|load| load.active_token_usage.unwrap_or(load.token_usage)).sum();
    let throughput: f64 = mine.iter().map(|load| load.gen_throughput).sum();
    Some(LoadReport {
        running: sum(|load| load.num_running_reqs),
        waiting,
        // An engine that does not count them says 0 although requests wait.
        waiting_uncached_tokens: (uncached > 0 || waiting == 0).then_some(uncached),
        kv_usage: usage / mine.len() as f64,
        throughput: (throughput > 0.0).then_some(throughput),
        dispatched_requests: 0,
        dispatched_tokens: 0,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn loads_of_ranks_are_read_with_their_documented_names() {
        let body = json!({"timestamp": "1", "version": "0.5", "dp_rank_count": 2, "loads": [
            {"dp_rank": 0, "num_running_reqs": 3, "num_waiting_reqs": 2, "num_waiting_uncached_tokens": 70, "token_usage": 0.5,
             "gen_throughput": 10.5, "max_running_requests": 8, "queues": {"waiting": 2}, "prefill_queue_reqs": 4},
            {"dp_rank": 1, "num_running_reqs": 1, "num_waiting_reqs": 0, "token_usage": 0.7, "active_token_usage": 0.1,
             "disaggregation": {"mode": "decode", "decode_prealloc_queue_reqs": 1, "decode_transfer_queue_reqs": 2,
                                "kv_transfer_latency_ms": 1.5}},
        ]});
        let ranks = from_loads(body.to_string().as_bytes()).unwrap();
        assert_eq!((ranks[0].num_total_reqs, ranks[0].prefill_queue_reqs), (5, Some(4)));
        assert_eq!((ranks[1].decode_queue_reqs, ranks[1].kv_transfer_latency_ms), (Some(3), Some(1.5)));
        assert_eq!(ranks[1].disagg_mode.as_deref(), Some("decode"));
        let whole = summarize(&ranks, None).unwrap();
        assert_eq!((whole.running, whole.waiting, whole.waiting_uncached_tokens), (4, 2, Some(70)));
        assert_eq!((whole.kv_usage, whole.throughput), (0.3, Some(10.5)));
        let second = summarize(&ranks, Some(1)).unwrap();
        assert_eq!((second.running, second.throughput), (1, None));
        assert_eq!(summarize(&ranks, Some(2)), None);
    }

    #[test]
    fn lies_count_as_not_said() {
        for garbage in
            ["", "[]", "{}", r#"{"loads":7}"#, r#"{"loads":[]}"#, r#"{"loads":[7,{"num_running_reqs":"x"}]}"#]
        {
            assert_eq!(from_loads(garbage.as_bytes()), None, "{garbage}");
        }
        let odd = json!({"loads": [{"num_running_reqs": 1, "num_waiting_reqs": 1e300, "token_usage": -1, "gen_throughput": null}]});
        let ranks = from_loads(odd.to_string().as_bytes()).unwrap();
        assert_eq!((ranks[0].num_total_reqs, ranks[0].token_usage, ranks[0].gen_throughput), (u64::MAX, 0.0, 0.0));
        assert_eq!(summarize(&ranks, None).unwrap().waiting_uncached_tokens, None);
    }

    #[test]
    fn vllm_tells_its_load_in_its_metrics() {
        let text = "# HELP vllm:num_requests_running x\nvllm:num_requests_running{engine=\"0\",model_name=\"a} b\"} 2.0\n\
                    vllm:num_requests_running{engine=\"1\"} 3.0\nvllm:num_requests_waiting 4 1700000000\n\
                    vllm:num_requests_waiting_by_reason{x=\"y\"} 9\nvllm:kv_cache_usage_perc{engine=\"0\"} 0.25\n\
                    vllm:kv_cache_usage_perc{engine=\"1\"} 0.75\n";
        let load = from_metrics(text).unwrap();
        assert_eq!((load.num_running_reqs, load.num_waiting_reqs, load.token_usage), (5, 4, 0.5));
    }

    #[test]
    fn sglang_metrics_are_read_under_both_spellings() {
        for prefix in ["sglang:", "sglang_"] {
            let text = format!(
                "{prefix}num_running_reqs 2\n{prefix}num_queue_reqs 1\n{prefix}token_usage{{}} 0.5\n{prefix}gen_throughput 9\n"
            );
            let load = from_metrics(&text).unwrap();
            assert_eq!((load.num_total_reqs, load.token_usage, load.gen_throughput), (3, 0.5, 9.0));
        }
        for nothing in ["", "vllm:num_requests_running 3\n", "sglang:token_usage NaN\n", "sglang:token_usage -1\n"] {
            assert_eq!(from_metrics(nothing), None, "{nothing}");
        }
    }
}
