//! The documented metrics. Those of the documented system that have no meaning here are listed, with the reason, by the tests of metrics.

use super::{By, Table};

pub const TABLES: &[Table] = &[
    (
        "PD Metrics",
        &[
            (
                "smg_pd_ttft_seconds",
                By(&[(
                    "tests/metrics.rs",
                    "every_documented_series_of_http_serving_moves_under_its_documented_name_and_labels",
                )]),
            ),
            (
                "smg_pd_prefill_duration_seconds",
                By(&[(
                    "tests/metrics.rs",
                    "every_documented_series_of_http_serving_moves_under_its_documented_name_and_labels",
                )]),
            ),
            (
                "smg_pd_decode_ttft_seconds",
                By(&[(
                    "tests/metrics.rs",
                    "every_documented_series_of_http_serving_moves_under_its_documented_name_and_labels",
                )]),
            ),
            (
                "smg_pd_kv_transfer_duration_seconds",
                By(&[(
                    "tests/grpc/answers.rs",
                    "the_time_between_a_handoff_and_its_decode_is_measured_where_legs_are_sequential",
                )]),
            ),
            (
                "smg_pd_kv_connector_mode_total",
                By(&[(
                    "tests/metrics.rs",
                    "every_documented_series_of_http_serving_moves_under_its_documented_name_and_labels",
                )]),
            ),
            (
                "smg_pd_kv_transfer_failures_total",
                By(&[
                    (
                        "tests/metrics.rs",
                        "every_documented_series_of_http_serving_moves_under_its_documented_name_and_labels",
                    ),
                    ("tests/metrics.rs", "a_moriio_pair_or_handoff_that_fails_its_check_counts_as_a_failed_transfer"),
                ]),
            ),
            (
                "smg_pd_bootstrap_failures_total",
                By(&[(
                    "tests/metrics.rs",
                    "every_documented_series_of_http_serving_moves_under_its_documented_name_and_labels",
                )]),
            ),
            (
                "smg_pd_rendezvous_failures_total",
                By(&[(
                    "tests/metrics.rs",
                    "every_documented_series_of_http_serving_moves_under_its_documented_name_and_labels",
                )]),
            ),
            (
                "smg_pd_admission_waits_total",
                By(&[(
                    "tests/grpc/refusals.rs",
                    "requests_beyond_a_decode_window_wait_for_a_place_and_are_all_served",
                )]),
            ),
            (
                "smg_pd_admission_sheds_total",
                By(&[("tests/grpc/refusals.rs", "a_decode_window_lets_in_what_the_engine_runs_and_sheds_the_rest")]),
            ),
            (
                "smg_pd_admission_window",
                By(&[("tests/grpc/refusals.rs", "a_decode_window_lets_in_what_the_engine_runs_and_sheds_the_rest")]),
            ),
            (
                "smg_pd_prefill_admission_inflight, smg_pd_prefill_admission_queued, smg_pd_prefill_admission_wait_seconds",
                By(&[(
                    "tests/overload.rs",
                    "a_prefill_worker_computes_no_more_prompts_than_its_limit_and_the_rest_wait_in_line",
                )]),
            ),
            (
                "smg_pd_prefill_admission_rejections_total",
                By(&[(
                    "tests/overload.rs",
                    "a_full_queue_and_a_wait_that_is_over_are_refused_with_a_hint_and_not_retried",
                )]),
            ),
        ],
    ),
    (
        "Related series of PD serving",
        &[(
            "smg_router_ttft_seconds, smg_router_tpot_seconds, smg_router_generation_duration_seconds, smg_router_tokens_total",
            By(&[("tests/grpc/answers.rs", "tokens_and_the_time_they_take_are_shown_under_the_documented_names")]),
        )],
    ),
    (
        "Metrics of the edge and the router",
        &[
            (
                "smg_http_requests_total, smg_http_request_duration_seconds, smg_http_responses_total, smg_http_connections_active",
                By(&[(
                    "tests/metrics.rs",
                    "every_documented_series_of_http_serving_moves_under_its_documented_name_and_labels",
                )]),
            ),
            (
                "smg_http_inflight_request_age_count",
                By(&[("tests/metrics.rs", "what_is_in_flight_is_counted_by_age_and_its_connections_by_role")]),
            ),
            (
                "smg_http_connection_timeouts_total",
                By(&[("tests/edge.rs", "a_slow_head_and_an_unused_connection_each_have_their_own_limit")]),
            ),
            (
                "smg_http_rate_limit_total, smg_admission_queue_depth, smg_admission_inflight, smg_admission_queue_rejected_total",
                By(&[("tests/edge.rs", "requests_beyond_the_limit_wait_and_those_beyond_the_queue_are_refused")]),
            ),
            (
                "smg_router_requests_total, smg_router_request_duration_seconds, smg_router_request_errors_total, smg_router_stage_duration_seconds, smg_router_upstream_responses_total",
                By(&[(
                    "tests/metrics.rs",
                    "every_documented_series_of_http_serving_moves_under_its_documented_name_and_labels",
                )]),
            ),
            (
                "smg_router_upstream_send_retries_total",
                By(&[("tests/overload.rs", "a_leg_that_met_a_closed_connection_is_sent_again_once")]),
            ),
            (
                "smg_log_dropped_lines",
                By(&[
                    (
                        "tests/flags.rs",
                        "a_console_that_takes_nothing_holds_no_request_up_and_what_it_misses_is_counted",
                    ),
                    (
                        "tests/flags.rs",
                        "a_request_is_served_and_a_line_counted_where_logs_have_no_room_and_files_go_on_when_they_have",
                    ),
                ]),
            ),
            (
                "smg_tokio_workers, smg_tokio_alive_tasks, smg_tokio_global_queue_depth, smg_tokio_worker_parks_total, smg_tokio_worker_busy_ratio, smg_tokio_event_loop_delay_seconds, smg_tokio_event_loop_stalls_total",
                By(&[(
                    "tests/metrics.rs",
                    "every_documented_series_of_http_serving_moves_under_its_documented_name_and_labels",
                )]),
            ),
        ],
    ),
    (
        "Metrics of workers",
        &[
            (
                "smg_worker_pool_size, smg_worker_requests_active, smg_worker_health, smg_worker_requests_total, smg_worker_health_checks_total, smg_worker_selection_total, smg_worker_errors_total",
                By(&[(
                    "tests/metrics.rs",
                    "every_documented_series_of_http_serving_moves_under_its_documented_name_and_labels",
                )]),
            ),
            (
                "smg_worker_http2",
                By(&[(
                    "tests/grpc/refusals.rs",
                    "requests_beyond_a_decode_window_wait_for_a_place_and_are_all_served",
                )]),
            ),
            (
                "smg_worker_connections_active",
                By(&[("tests/metrics.rs", "what_is_in_flight_is_counted_by_age_and_its_connections_by_role")]),
            ),
            (
                "smg_worker_cb_state, smg_worker_cb_consecutive_failures, smg_worker_cb_consecutive_successes, smg_worker_cb_transitions_total, smg_worker_cb_outcomes_total",
                By(&[(
                    "tests/metrics.rs",
                    "every_documented_series_of_http_serving_moves_under_its_documented_name_and_labels",
                )]),
            ),
            (
                "smg_worker_cb_health_readmissions_total",
                By(&[(
                    "tests/breakers.rs",
                    "a_worker_whose_health_returns_is_tried_at_once_though_its_breaker_is_open",
                )]),
            ),
            (
                "smg_worker_retries_total, smg_worker_retries_exhausted_total, smg_worker_retry_backoff_seconds",
                By(&[(
                    "tests/metrics.rs",
                    "every_documented_series_of_http_serving_moves_under_its_documented_name_and_labels",
                )]),
            ),
            (
                "smg_workers_overloaded, smg_worker_overload_fallback_total",
                By(&[
                    ("tests/overload.rs", "overloaded_workers_are_passed_over_while_others_exist"),
                    ("tests/overload.rs", "where_every_worker_is_overloaded_the_least_loaded_one_serves"),
                ]),
            ),
            (
                "smg_worker_overload_shed_total",
                By(&[
                    ("tests/overload.rs", "with_the_shed_flag_requests_are_refused_with_a_hint_and_not_retried"),
                    (
                        "tests/overload.rs",
                        "with_the_shed_flag_a_decode_worker_that_became_overloaded_during_prefill_gets_no_leg",
                    ),
                ]),
            ),
            (
                "smg_worker_stalled, smg_worker_stall_transitions_total",
                By(&[
                    (
                        "tests/metrics.rs",
                        "every_documented_series_of_http_serving_moves_under_its_documented_name_and_labels",
                    ),
                    ("tests/loads.rs", "an_engine_that_is_gone_leaves_rotation_before_a_request_meets_it"),
                ]),
            ),
            (
                "smg_engine_running_requests, smg_engine_load_polls_total, smg_engine_pd_prefill_queue_reqs",
                By(&[("tests/loads.rs", "engines_are_asked_for_their_load_in_the_way_each_of_them_knows")]),
            ),
            (
                "smg_engine_waiting_requests, smg_engine_token_usage, smg_engine_gen_throughput, smg_engine_cache_hit_rate, smg_engine_pd_decode_queue_reqs, smg_engine_pd_kv_transfer_latency_ms, smg_engine_pd_kv_transfer_speed_gb_s",
                By(&[("tests/loads.rs", "what_an_engine_reports_is_shown_under_the_documented_names")]),
            ),
        ],
    ),
    (
        "Metrics of policies",
        &[
            (
                "smg_manual_policy_branch_total, smg_consistent_hashing_policy_branch_total, smg_prefix_hash_policy_branch_total, smg_cache_aware_policy_branch_total, smg_manual_policy_cache_entries, smg_worker_routing_keys_active, smg_routing_key_source_total, smg_cache_aware_match_ratio, smg_cache_tree_chars, smg_cache_tree_tenants, smg_cache_placement_entries",
                By(&[("tests/metrics.rs", "every_documented_series_of_policies_moves_while_its_policy_is_used")]),
            ),
            (
                "smg_cache_tree_tokens",
                By(&[("tests/metrics.rs", "every_documented_series_of_policies_moves_while_its_policy_is_used")]),
            ),
        ],
    ),
    (
        "PromQL Queries",
        &[("the four documented queries on a live scrape", By(&[("tests/prometheus/check.py", "check_queries")]))],
    ),
];
