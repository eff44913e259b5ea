//! The documented flags. What is understood but absent is not here: the command line's own table lists it.

use super::{By, Table};

pub const TABLES: &[Table] = &[
    (
        "Flags of workers and legs",
        &[
            (
                "pd-disaggregation, prefill, decode",
                By(&[
                    ("src/cli/tests.rs", "every_documented_http_start_command_parses_as_written"),
                    ("src/cli/tests.rs", "a_prefill_takes_a_port_none_or_nothing_and_keeps_its_order"),
                    (
                        "tests/registration.rs",
                        "a_start_with_dead_workers_serves_with_the_rest_and_they_join_when_they_come_up",
                    ),
                ]),
            ),
            ("worker-urls", By(&[("tests/flags.rs", "regular_workers_of_the_start_command_serve")])),
            (
                "policy, prefill-policy, decode-policy",
                By(&[
                    (
                        "tests/affinity.rs",
                        "cache_aware_spreads_unrelated_prompts_and_sends_repeats_where_they_went_first",
                    ),
                    ("tests/planes.rs", "a_policy_written_by_api_holds_until_the_flags_change"),
                ]),
            ),
            (
                "pd-pairing-mode",
                By(&[
                    ("tests/pairing.rs", "each_rule_keeps_legs_apart_as_its_mode_says"),
                    ("tests/pairing.rs", "a_models_document_overrides_the_fleets_pairing_mode"),
                ]),
            ),
            ("dp-aware", By(&[("tests/ranks.rs", "each_data_parallel_rank_is_a_worker_and_its_legs_carry_it")])),
            (
                "dp-minimum-tokens-scheduler",
                By(&[("tests/ranks.rs", "the_rank_with_the_fewest_tokens_is_taken_where_operators_ask_for_it")]),
            ),
            ("enable-igw", By(&[("src/cli/tests/policy.rs", "an_explicit_power_of_two_needs_two_workers_on_its_leg")])),
            ("backend, runtime", By(&[("src/cli/tests.rs", "backends_without_an_http_pd_protocol_are_refused")])),
            (
                "pd-admission-wait-secs",
                By(&[("src/cli/tests/policy.rs", "every_fleet_wide_flag_reaches_the_startup_policy")]),
            ),
            (
                "chat-template",
                By(&[("tests/grpc/texts.rs", "a_chat_template_on_disk_is_used_before_that_of_the_model")]),
            ),
            (
                "reasoning-parser, tool-call-parser",
                By(&[(
                    "tests/grpc/texts.rs",
                    "reasoning_and_tool_calls_are_told_apart_by_the_parsers_that_flags_name",
                )]),
            ),
            (
                "model-path, model, tokenizer-path",
                By(&[
                    ("src/cli/tests.rs", "every_documented_grpc_start_command_parses_and_keeps_its_model"),
                    ("tests/grpc/texts.rs", "a_tokenizer_on_disk_is_used_before_that_of_an_engine"),
                ]),
            ),
            (
                "job-queue-capacity, job-queue-concurrency",
                By(&[("src/cli/tests.rs", "numbers_outside_their_bounds_are_usage_errors")]),
            ),
            (
                "worker-startup-timeout-secs",
                By(&[
                    ("tests/rejections.rs", "workers_that_cannot_be_reached_or_never_become_healthy_fail_readably"),
                    ("src/cli/tests/policy.rs", "every_fleet_wide_flag_reaches_the_startup_policy"),
                ]),
            ),
            (
                "worker-startup-check-interval, worker-startup-delay",
                By(&[("src/cli/tests/policy.rs", "every_fleet_wide_flag_reaches_the_startup_policy")]),
            ),
        ],
    ),
    (
        "Flags of policies",
        &[
            (
                "cache-threshold, cache-match-threshold",
                By(&[
                    ("dataplane/policies/tests/affinity.rs", "a_match_decides_only_above_the_threshold"),
                    ("src/cli/tests/policy.rs", "every_tuning_flag_reaches_the_startup_policy"),
                ]),
            ),
            (
                "balance-abs-threshold, balance-rel-threshold, spill-abs-threshold, spill-rel-threshold",
                By(&[
                    ("dataplane/policies/tests/affinity.rs", "a_holder_far_busier_than_the_rest_is_passed_over"),
                    ("dataplane/policies/tests/load.rs", "the_least_laden_worker_serves_while_characters_are_uneven"),
                    ("src/cli/tests/policy.rs", "every_tuning_flag_reaches_the_startup_policy"),
                ]),
            ),
            (
                "balance-token-usage-threshold, overload-token-usage-threshold",
                By(&[
                    ("dataplane/policies/tests/affinity.rs", "pressure_on_the_kv_cache_suspends_affinity"),
                    ("src/cli/tests/policy.rs", "every_tuning_flag_reaches_the_startup_policy"),
                ]),
            ),
            (
                "max-tree-size",
                By(&[
                    ("tests/affinity.rs", "the_record_of_prompts_is_bounded_shown_and_forgets_removed_workers"),
                    ("tests/affinity.rs", "memory_stays_flat_while_prompts_never_repeat"),
                ]),
            ),
            (
                "cache-index, cache-ttl-secs, cache-boundaries",
                By(&[
                    (
                        "dataplane/policies/tests/affinity.rs",
                        "the_hash_index_follows_the_longest_known_head_of_token_prompts_for_a_time",
                    ),
                    (
                        "dataplane/policies/tests/affinity.rs",
                        "the_deepest_boundary_makes_the_key_and_shallower_ones_take_over",
                    ),
                    ("src/cli/tests/policy.rs", "every_tuning_flag_reaches_the_startup_policy"),
                ]),
            ),
            (
                "eviction-interval, eviction-interval-secs",
                By(&[("src/cli/tests/policy.rs", "every_tuning_flag_reaches_the_startup_policy")]),
            ),
            (
                "prefix-token-count",
                By(&[
                    ("dataplane/policies/tests/affinity.rs", "prompts_that_begin_alike_share_a_worker"),
                    ("src/cli/tests/policy.rs", "every_tuning_flag_reaches_the_startup_policy"),
                ]),
            ),
            (
                "prefix-hash-load-factor, prefix-hash-balance-abs-threshold",
                By(&[
                    ("dataplane/policies/tests/affinity.rs", "an_overloaded_worker_sheds_its_prefixes_together"),
                    ("src/cli/tests/policy.rs", "every_tuning_flag_reaches_the_startup_policy"),
                ]),
            ),
            (
                "least-load-kv-pressure-weight, least-load-default-throughput, least-load-mean-prefill-tokens",
                By(&[
                    ("dataplane/policies/src/wait.rs", "each_term_of_the_formula_counts_in_seconds"),
                    ("src/cli/tests/policy.rs", "every_tuning_flag_reaches_the_startup_policy"),
                ]),
            ),
            (
                "least-load-max-waiting-requests",
                By(&[
                    (
                        "dataplane/policies/tests/load.rs",
                        "workers_at_the_waiting_cap_are_passed_over_and_all_at_the_cap_is_no_pick",
                    ),
                    ("src/cli/tests/policy.rs", "every_tuning_flag_reaches_the_startup_policy"),
                ]),
            ),
            (
                "power-of-two-load-metric",
                By(&[
                    ("dataplane/policies/tests/load.rs", "power_of_two_compares_what_its_metric_says"),
                    ("src/cli/tests/policy.rs", "every_tuning_flag_reaches_the_startup_policy"),
                ]),
            ),
            (
                "assignment-mode",
                By(&[("tests/affinity.rs", "manual_keeps_a_key_on_its_pair_and_leaves_other_keys_alone")]),
            ),
            (
                "max-idle-secs, sticky-key-idle-secs",
                By(&[
                    ("dataplane/policies/tests/affinity.rs", "an_idle_key_is_forgotten_at_its_time_and_not_before"),
                    ("src/cli/tests/policy.rs", "every_tuning_flag_reaches_the_startup_policy"),
                ]),
            ),
            (
                "routing-key-override, sticky-sessions",
                By(&[
                    ("tests/affinity.rs", "sessions_stay_on_their_pair_whatever_the_policy_until_it_is_full"),
                    ("src/cli/tests/policy.rs", "every_tuning_flag_reaches_the_startup_policy"),
                ]),
            ),
            ("routing-key-headers", By(&[("tests/affinity.rs", "a_key_that_is_too_long_is_no_key_and_no_error")])),
            (
                "bucket-adjust-interval-secs",
                By(&[
                    (
                        "dataplane/policies/tests/load.rs",
                        "ranges_are_cut_anew_so_that_each_worker_gets_the_same_characters",
                    ),
                    ("src/cli/tests/policy.rs", "every_tuning_flag_reaches_the_startup_policy"),
                ]),
            ),
        ],
    ),
    (
        "Flags of resilience and protection",
        &[
            (
                "retry-max-retries, disable-retries",
                By(&[
                    ("tests/resilience.rs", "exhausted_retries_answer_with_the_engines_own_error_and_are_counted"),
                    ("tests/connectors.rs", "a_mooncake_pair_meets_through_an_id_minted_for_each_request"),
                    ("src/cli/tests/policy.rs", "every_fleet_wide_flag_reaches_the_startup_policy"),
                ]),
            ),
            (
                "retry-initial-backoff-ms, retry-max-backoff-ms, retry-backoff-multiplier, retry-jitter-factor",
                By(&[
                    ("shared/net/src/backoff.rs", "delays_grow_to_the_cap_and_no_further"),
                    ("shared/net/src/backoff.rs", "jitter_varies_a_delay_by_its_share_either_way"),
                    ("src/cli/tests/policy.rs", "every_fleet_wide_flag_reaches_the_startup_policy"),
                ]),
            ),
            (
                "cb-failure-threshold, cb-success-threshold, cb-timeout-duration-secs",
                By(&[
                    ("tests/breakers.rs", "a_breaker_opens_tries_a_few_and_closes"),
                    ("tests/breakers.rs", "of_a_crowd_a_half_open_worker_gets_its_trial_and_the_others_the_rest"),
                    ("src/cli/tests/policy.rs", "every_fleet_wide_flag_reaches_the_startup_policy"),
                ]),
            ),
            (
                "cb-window-duration-secs",
                By(&[
                    (
                        "dataplane/gateway/src/resilience/breaker.rs",
                        "failures_further_apart_than_the_window_do_not_add_up",
                    ),
                    ("src/cli/tests/policy.rs", "every_fleet_wide_flag_reaches_the_startup_policy"),
                ]),
            ),
            (
                "disable-circuit-breaker",
                By(&[
                    ("dataplane/gateway/src/resilience/breaker.rs", "a_disabled_breaker_never_opens"),
                    ("src/cli/tests/policy.rs", "every_fleet_wide_flag_reaches_the_startup_policy"),
                ]),
            ),
            (
                "health-check-interval-secs, health-failure-threshold, health-success-threshold",
                By(&[("tests/breakers.rs", "probes_take_a_worker_out_of_rotation_and_bring_it_back")]),
            ),
            (
                "health-check-timeout-secs",
                By(&[(
                    "tests/registration.rs",
                    "a_busy_worker_stays_in_rotation_and_one_that_leaves_it_ends_what_it_runs",
                )]),
            ),
            (
                "health-check-endpoint, disable-health-check",
                By(&[("tests/flags.rs", "workers_are_probed_where_operators_say_or_not_at_all")]),
            ),
            ("drain-settle-secs", By(&[("tests/drain.rs", "a_removed_worker_ends_what_it_runs_and_gets_nothing_new")])),
            (
                "worker-overload-protection, worker-overload-waiting-requests, worker-overload-token-usage",
                By(&[
                    ("tests/overload.rs", "overloaded_workers_are_passed_over_while_others_exist"),
                    (
                        "shared/fleet/src/protection.rs",
                        "protection_is_on_by_default_and_steers_at_eight_waiting_or_four_fifths_of_the_cache",
                    ),
                    ("src/cli/tests/policy.rs", "every_fleet_wide_flag_reaches_the_startup_policy"),
                ]),
            ),
            (
                "disable-worker-overload-protection",
                By(&[("tests/overload.rs", "a_workers_own_thresholds_protect_it_where_protection_is_off")]),
            ),
            (
                "worker-overload-shed",
                By(&[("tests/overload.rs", "with_the_shed_flag_requests_are_refused_with_a_hint_and_not_retried")]),
            ),
            (
                "prefill-max-inflight-requests-per-worker",
                By(&[(
                    "tests/overload.rs",
                    "a_prefill_worker_computes_no_more_prompts_than_its_limit_and_the_rest_wait_in_line",
                )]),
            ),
            (
                "prefill-queue-size, prefill-queue-timeout-secs",
                By(&[(
                    "tests/overload.rs",
                    "a_full_queue_and_a_wait_that_is_over_are_refused_with_a_hint_and_not_retried",
                )]),
            ),
            (
                "load-monitor-interval",
                By(&[("tests/loads.rs", "engines_are_asked_for_their_load_in_the_way_each_of_them_knows")]),
            ),
            (
                "disable-load-monitoring",
                By(&[("tests/overload.rs", "a_leg_that_met_a_closed_connection_is_sent_again_once")]),
            ),
            (
                "engine-metrics",
                By(&[(
                    "tests/loads.rs",
                    "engines_are_asked_for_their_load_where_it_is_wanted_though_nothing_needs_it",
                )]),
            ),
            (
                "worker-stall-secs",
                By(&[("tests/loads.rs", "an_engine_that_is_gone_leaves_rotation_before_a_request_meets_it")]),
            ),
        ],
    ),
    (
        "Flags of the client edge",
        &[
            (
                "host, port",
                By(&[
                    ("src/cli/tests/edge.rs", "metrics_listen_on_all_addresses_of_the_family_of_the_host"),
                    ("src/cli/tests/edge.rs", "listeners_need_different_ports"),
                    ("tests/metrics.rs", "the_debug_log_names_both_workers_of_each_selected_pair"),
                ]),
            ),
            ("api-key", By(&[("tests/access.rs", "inference_needs_the_key_probes_and_inventory_do_not")])),
            (
                "tenant-api-key",
                By(&[(
                    "tests/access.rs",
                    "without_tokens_the_gateways_key_opens_the_admin_api_and_a_tenants_does_not",
                )]),
            ),
            (
                "control-plane-api-keys",
                By(&[(
                    "tests/access.rs",
                    "each_role_reaches_as_far_as_documented_at_the_control_plane_and_through_a_gateway",
                )]),
            ),
            (
                "control-plane-audit-enabled, disable-audit-logging",
                By(&[
                    ("src/cli/tests/edge.rs", "admin_tokens_come_from_the_flag_or_else_the_environment"),
                    ("src/cli/tests/edge.rs", "changes_are_logged_unless_that_is_switched_off"),
                ]),
            ),
            (
                "tls-cert-path, tls-key-path",
                By(&[
                    ("tests/tls.rs", "a_certificate_is_replaced_without_a_restart_and_a_broken_one_changes_nothing"),
                    ("tests/tls.rs", "files_that_cannot_be_used_stop_the_start_and_are_named"),
                ]),
            ),
            (
                "ca-cert-paths",
                By(&[(
                    "tests/tls.rs",
                    "https_workers_are_served_when_their_root_is_trusted_and_fail_registration_with_the_reason_otherwise",
                )]),
            ),
            (
                "client-cert-path, client-key-path",
                By(&[("tests/tls.rs", "a_worker_that_wants_a_certificate_of_its_clients_gets_the_gateways")]),
            ),
            ("cors-allowed-origins", By(&[("tests/edge.rs", "pages_of_named_origins_may_call_and_others_may_not")])),
            (
                "max-concurrent-requests, queue-size, queue-timeout-secs",
                By(&[("tests/edge.rs", "requests_beyond_the_limit_wait_and_those_beyond_the_queue_are_refused")]),
            ),
            (
                "rate-limit-tokens-per-second",
                By(&[("tests/flags.rs", "a_rate_lets_a_burst_through_and_the_rest_come_later")]),
            ),
            (
                "max-payload-size",
                By(&[("tests/uploads.rs", "bodies_over_the_limit_are_refused_announced_or_not_and_reach_no_engine")]),
            ),
            ("stream-body-stall-timeout-secs", By(&[("tests/uploads.rs", "an_upload_that_stands_still_is_given_up")])),
            (
                "header-read-timeout-secs, idle-connection-timeout-secs",
                By(&[("tests/edge.rs", "a_slow_head_and_an_unused_connection_each_have_their_own_limit")]),
            ),
            (
                "request-timeout-secs",
                By(&[("tests/errors.rs", "a_prefill_response_that_breaks_off_or_never_ends_is_the_prefills_failure")]),
            ),
            (
                "sse-keepalive-secs",
                By(&[("tests/flags.rs", "a_silent_stream_gets_comments_at_the_interval_asked_for")]),
            ),
            (
                "upstream-pool-idle-timeout-secs",
                By(&[("tests/disconnects.rs", "a_client_that_leaves_closes_its_legs_at_once_in_every_phase")]),
            ),
            (
                "request-id-headers",
                By(&[("tests/flags.rs", "a_request_id_is_looked_for_in_the_headers_that_were_named")]),
            ),
        ],
    ),
    (
        "Flags of the process",
        &[
            (
                "prometheus-host, prometheus-port",
                By(&[("src/cli/tests/edge.rs", "metrics_listen_on_all_addresses_of_the_family_of_the_host")]),
            ),
            (
                "prometheus-duration-buckets, log-json, runtime-worker-threads",
                By(&[("tests/flags.rs", "the_process_runs_and_logs_and_measures_as_it_was_told")]),
            ),
            (
                "log-dir",
                By(&[(
                    "tests/flags.rs",
                    "a_console_that_takes_nothing_holds_no_request_up_and_what_it_misses_is_counted",
                )]),
            ),
            ("log-level", By(&[("tests/access.rs", "a_workers_key_is_sent_to_that_worker_and_shown_nowhere")])),
            (
                "enable-trace, otlp-traces-endpoint",
                By(&[("tests/traces.rs", "one_trace_covers_both_legs_of_each_dispatch_with_a_span_per_phase")]),
            ),
            (
                "shutdown-grace-period-secs",
                By(&[("tests/drain.rs", "streams_that_outlast_the_grace_period_end_as_errors_and_engines_see_it")]),
            ),
            ("version, version-verbose", By(&[("src/cli/tests.rs", "help_and_versions_print_and_start_nothing")])),
        ],
    ),
];
