//! `GET /loads` (and its older name `/get_loads`): what engines last reported about their load, without asking anyone.
//!
//! The shape is that of the documented system, which is also the one engines answer: a gateway in front of gateways can read it.

use axum::body::Body;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use http::{Response, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};
use smg_fleet::info;

use super::Front;
use super::error::GatewayError;
use super::probes::json_response;
use crate::load::monitor::Reported;
use crate::load::report::RankLoad;

/// Query of `GET /loads`.
#[derive(Debug, Deserialize)]
pub(super) struct LoadsQuery {
    model: Option<String>,
}

/// `GET /loads?model=`: one entry for each rank that reports, with its worker; the aggregate of them.
pub(super) async fn loads(
    State(front): State<Front>,
    query: Result<Query<LoadsQuery>, QueryRejection>,
) -> Response<Body> {
    let model = match query {
        Ok(Query(query)) => query.model,
        Err(rejection) => return GatewayError::Url(rejection.body_text()).into_response(),
    };
    let table = front.core.table.load();
    let now = front.core.clock.now_ms();
    let mut loads = Vec::new();
    let mut ranks = Vec::new();
    for worker in table.workers.values() {
        if model.as_deref().is_some_and(|model| !info::serves(worker, model)) {
            continue;
        }
        let reported = table.runtime(worker.id).and_then(|runtime| runtime.last_report.get());
        let Some(reported) = reported.filter(|reported| reported.expires_ms > now) else { continue };
        for load in &reported.ranks {
            let mut entry = json!({"worker": worker.spec.url, "worker_type": worker.spec.worker_type.as_str()});
            if let (Value::Object(entry), Ok(Value::Object(fields))) = (&mut entry, serde_json::to_value(load)) {
                entry.extend(fields);
            }
            loads.push(entry);
            ranks.push(load.clone());
        }
    }
    let body = json!({
        "timestamp": timestamp(smg_net::unix_millis()),
        "version": concat!("smg-", env!("CARGO_PKG_VERSION")),
        "dp_rank_count": loads.len(),
        "loads": loads,
        "aggregate": aggregate(&ranks),
    });
    json_response(StatusCode::OK, &body)
}

/// The `engine_load` of one worker in `GET /workers`.
pub(super) fn of_worker(reported: &Reported) -> Value {
    json!({
        "timestamp": timestamp(reported.at_unix_ms),
        "dp_rank_count": reported.ranks.len(),
        "loads": reported.ranks,
        "aggregate": aggregate(&reported.ranks),
    })
}

fn aggregate(ranks: &[RankLoad]) -> Value {
    let sum = |field: fn(&RankLoad) -> u64| ranks.iter().map(field).fold(0, u64::saturating_add);
    let mean = |field: fn(&RankLoad) -> f64, scale: f64| {
        let mean = ranks.iter().map(field).sum::<f64>() / ranks.len().max(1) as f64;
        (mean * scale).round() / scale
    };
    json!({
        "total_running_reqs": sum(|load| load.num_running_reqs),
        "total_waiting_reqs": sum(|load| load.num_waiting_reqs),
        "total_reqs": sum(|load| load.num_total_reqs),
        "avg_token_usage": mean(|load| load.token_usage, 1e4),
        "avg_throughput": mean(|load| load.gen_throughput, 1e2),
        "avg_utilization": mean(|load| load.utilization, 1e4),
    })
}

/// A moment as RFC 3339 writes it, in UTC.
fn timestamp(unix_ms: u64) -> String {
    let (seconds, millis) = (unix_ms / 1000, unix_ms % 1000);
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Days since 1 March of the year 0, counted in cycles of 400 years; a year begins in March, so that a leap day is its last.
    let days = days + 719_468;
    let (cycle, day_of_cycle) = (days / 146_097, days % 146_097);
    let year_of_cycle = (day_of_cycle - day_of_cycle / 1_460 + day_of_cycle / 36_524 - day_of_cycle / 146_096) / 365;
    let day_of_year = day_of_cycle - (365 * year_of_cycle + year_of_cycle / 4 - year_of_cycle / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = cycle * 400 + year_of_cycle + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}+00:00")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_written_as_rfc_3339() {
        for (unix_ms, text) in [
            (0, "1970-01-01T00:00:00.000+00:00"),
            (951_827_696_789, "2000-02-29T12:34:56.789+00:00"),
            (1_709_251_199_000, "2024-02-29T23:59:59.000+00:00"),
            (1_709_251_200_000, "2024-03-01T00:00:00.000+00:00"),
            (4_102_444_799_999, "2099-12-31T23:59:59.999+00:00"),
        ] {
            assert_eq!(timestamp(unix_ms), text);
        }
    }

    #[test]
    fn nobody_reports_means_zeroes_and_no_division() {
        assert_eq!(aggregate(&[])["avg_token_usage"], 0.0);
    }
}
