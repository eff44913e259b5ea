//! What engines say over gRPC about their load, in the shape in which the rest of the gateway reads it.
//!
//! Nothing an engine says is trusted: numbers count where they are finite and not negative.

use smg_services::engines::{sglang, tokenspeed, vllm};
use tonic::Status;

use super::client::Client;
use crate::load::report::{Memory, Queues, RankLoad};

/// What is asked for.
const SECTIONS: [&str; 4] = ["core", "disagg", "queues", "memory"];
/// Most ranks of one engine.
const MAX_RANKS: usize = 1024;

/// Asks an engine for the load of its ranks.
///
/// # Errors
/// What the engine says instead; `Unimplemented` when it tells none.
pub async fn ask(client: &Client) -> Result<Vec<RankLoad>, Status> {
    let include = || SECTIONS.map(str::to_owned).to_vec();
    Ok(match client.clone() {
        Client::Sglang(mut client) => {
            let request = sglang::GetLoadsRequest { dp_rank: None, include: include() };
            let answer = client.get_loads(request).await?.into_inner();
            answer.loads.iter().take(MAX_RANKS).map(of_sglang).collect()
        }
        Client::Vllm(mut client) => {
            let request = vllm::GetLoadsRequest { dp_rank: None, include: include() };
            let answer = client.get_loads(request).await?.into_inner();
            answer.loads.iter().take(MAX_RANKS).map(of_vllm).collect()
        }
        Client::Tokenspeed(mut client) => {
            let request = tokenspeed::GetLoadsRequest { dp_rank: None, include: include() };
            let answer = client.get_loads(request).await?.into_inner();
            answer.loads.iter().take(MAX_RANKS).map(of_tokenspeed).collect()
        }
    })
}

fn count(number: i32) -> u64 {
    u64::try_from(number).unwrap_or(0)
}

fn amount(number: f64) -> f64 {
    if number.is_finite() && number >= 0.0 { number } else { 0.0 }
}

fn some_amount(number: f64) -> Option<f64> {
    (number.is_finite() && number > 0.0).then_some(number)
}

fn total(reported: i32, running: i32, waiting: i32) -> u64 {
    count(reported).max(count(running).saturating_add(count(waiting)))
}

fn of_sglang(load: &sglang::SchedulerLoad) -> RankLoad {
    let disaggregation = load.disaggregation.as_ref();
    let sum = |queues: &[i32]| queues.iter().fold(0, |sum, queue| count(*queue).saturating_add(sum));
    RankLoad {
        dp_rank: count(load.dp_rank),
        num_running_reqs: count(load.num_running_reqs),
        num_waiting_reqs: count(load.num_waiting_reqs),
        num_waiting_uncached_tokens: count(load.num_waiting_uncached_tokens),
        num_total_reqs: total(load.num_total_reqs, load.num_running_reqs, load.num_waiting_reqs),
        num_used_tokens: count(load.num_used_tokens),
        max_total_num_tokens: count(load.max_total_num_tokens),
        token_usage: amount(load.token_usage),
        active_token_usage: None,
        gen_throughput: amount(load.gen_throughput),
        cache_hit_rate: amount(load.cache_hit_rate),
        utilization: amount(load.utilization),
        max_running_requests: count(load.max_running_requests),
        memory: load.memory.as_ref().map(|memory| Memory {
            weight_gb: amount(memory.weight_gb),
            kv_cache_gb: amount(memory.kv_cache_gb),
            graph_gb: amount(memory.graph_gb),
            token_capacity: count(memory.token_capacity),
        }),
        queues: load.queues.as_ref().map(|queues| Queues {
            waiting: count(queues.waiting),
            grammar: count(queues.grammar),
            paused: count(queues.paused),
            retracted: count(queues.retracted),
        }),
        kv_transfer_latency_ms: disaggregation.and_then(|of| some_amount(of.kv_transfer_latency_ms)),
        kv_transfer_speed_gb_s: disaggregation.and_then(|of| some_amount(of.kv_transfer_speed_gb_s)),
        prefill_queue_reqs: disaggregation
            .map(|of| sum(&[of.prefill_prealloc_queue_reqs, of.prefill_inflight_queue_reqs])),
        decode_queue_reqs: disaggregation.map(|of| {
            sum(&[of.decode_prealloc_queue_reqs, of.decode_transfer_queue_reqs, of.decode_retracted_queue_reqs])
        }),
        disagg_mode: disaggregation.map(|of| of.mode.clone()).filter(|mode| !mode.is_empty() && mode.len() <= 32),
    }
}

fn of_vllm(load: &vllm::SchedulerLoad) -> RankLoad {
    RankLoad {
        dp_rank: count(load.dp_rank),
        num_running_reqs: count(load.num_running_reqs),
        num_waiting_reqs: count(load.num_waiting_reqs),
        num_waiting_uncached_tokens: count(load.num_waiting_uncached_tokens),
        num_total_reqs: total(load.num_total_reqs, load.num_running_reqs, load.num_waiting_reqs),
        num_used_tokens: count(load.num_used_tokens),
        max_total_num_tokens: count(load.max_total_num_tokens),
        token_usage: amount(load.token_usage),
        gen_throughput: amount(load.gen_throughput),
        cache_hit_rate: amount(load.cache_hit_rate),
        utilization: amount(load.utilization),
        max_running_requests: count(load.max_running_requests),
        ..RankLoad::default()
    }
}

fn of_tokenspeed(load: &tokenspeed::SchedulerLoad) -> RankLoad {
    RankLoad {
        dp_rank: count(load.dp_rank),
        num_running_reqs: count(load.num_running_reqs),
        num_waiting_reqs: count(load.num_waiting_reqs),
        num_waiting_uncached_tokens: count(load.num_waiting_uncached_tokens),
        num_total_reqs: total(load.num_total_reqs, load.num_running_reqs, load.num_waiting_reqs),
        num_used_tokens: count(load.num_used_tokens),
        max_total_num_tokens: count(load.max_total_num_tokens),
        token_usage: amount(load.token_usage),
        active_token_usage: load.active_token_usage.map(amount),
        gen_throughput: amount(load.gen_throughput),
        cache_hit_rate: amount(load.cache_hit_rate),
        utilization: amount(load.utilization),
        max_running_requests: count(load.max_running_requests),
        memory: load.memory.as_ref().map(|memory| Memory {
            weight_gb: amount(memory.weight_gb),
            kv_cache_gb: amount(memory.kv_cache_gb),
            graph_gb: amount(memory.graph_gb),
            token_capacity: count(memory.token_capacity),
        }),
        queues: load.queues.as_ref().map(|queues| Queues {
            waiting: count(queues.waiting),
            grammar: count(queues.grammar),
            paused: count(queues.paused),
            retracted: count(queues.retracted),
        }),
        ..RankLoad::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_of_a_disaggregated_engine_are_summed_and_nonsense_counts_as_nothing() {
        let load = of_sglang(&sglang::SchedulerLoad {
            num_running_reqs: 3,
            num_waiting_reqs: -2,
            token_usage: f64::NAN,
            gen_throughput: -1.0,
            disaggregation: Some(sglang::DisaggregationMetrics {
                mode: "decode".to_owned(),
                prefill_prealloc_queue_reqs: 1,
                prefill_inflight_queue_reqs: 2,
                decode_prealloc_queue_reqs: 4,
                decode_transfer_queue_reqs: i32::MAX,
                decode_retracted_queue_reqs: 8,
                kv_transfer_latency_ms: 1.5,
                ..Default::default()
            }),
            ..Default::default()
        });
        assert_eq!((load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs), (3, 0, 3));
        assert_eq!((load.token_usage, load.gen_throughput), (0.0, 0.0));
        assert_eq!(load.prefill_queue_reqs, Some(3));
        assert_eq!(load.decode_queue_reqs, Some(4 + 8 + i32::MAX as u64));
        assert_eq!((load.kv_transfer_latency_ms, load.kv_transfer_speed_gb_s), (Some(1.5), None));
    }
}
