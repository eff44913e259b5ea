//! Which workers a request goes to: the documented policies, pairing, and how operators verify both.

use super::{By, Table};

pub const TABLES: &[Table] = &[
    (
        "Per-Phase Policies",
        &[
            (
                "cache_aware",
                By(&[(
                    "tests/affinity.rs",
                    "cache_aware_spreads_unrelated_prompts_and_sends_repeats_where_they_went_first",
                )]),
            ),
            (
                "prefix_hash, consistent_hashing",
                By(&[("tests/affinity.rs", "hash_policies_place_alike_on_every_gateway")]),
            ),
            ("power_of_two", By(&[("tests/policies.rs", "power_of_two_goes_to_the_less_loaded_worker")])),
            (
                "power_of_two at start-up",
                By(&[("src/cli/tests/policy.rs", "an_explicit_power_of_two_needs_two_workers_on_its_leg")]),
            ),
            (
                "least_load",
                By(&[("tests/affinity.rs", "load_policies_count_their_own_requests_where_engines_report_nothing")]),
            ),
            ("round_robin", By(&[("tests/policies.rs", "round_robin_is_even_on_each_leg")])),
            ("random", By(&[("tests/policies.rs", "random_reaches_every_worker")])),
            ("manual", By(&[("tests/affinity.rs", "manual_keeps_a_key_on_its_pair_and_leaves_other_keys_alone")])),
            ("bucket", By(&[("tests/affinity.rs", "bucket_gives_each_prefill_prompts_of_like_length")])),
            (
                "bucket as a decode policy",
                By(&[("src/cli/tests/policy.rs", "bucket_is_refused_for_decode_also_when_inherited")]),
            ),
            (
                "passthrough",
                By(&[(
                    "src/cli/tests/policy.rs",
                    "every_policy_but_passthrough_is_available_and_unknown_ones_are_usage_errors",
                )]),
            ),
            ("a rotation of its own for each leg", By(&[("tests/policies.rs", "round_robin_is_even_on_each_leg")])),
            (
                "all tuning applies to both legs",
                By(&[("src/cli/tests/policy.rs", "every_tuning_flag_reaches_the_startup_policy")]),
            ),
            (
                "hint headers that mean nothing are ignored",
                By(&[
                    ("tests/affinity.rs", "a_key_that_is_too_long_is_no_key_and_no_error"),
                    ("tests/affinity.rs", "a_client_that_names_a_worker_gets_that_one_or_an_error"),
                ]),
            ),
            (
                "sticky sessions",
                By(&[("tests/affinity.rs", "sessions_stay_on_their_pair_whatever_the_policy_until_it_is_full")]),
            ),
        ],
    ),
    (
        "Pairing",
        &[
            (
                "every component in every mode",
                By(&[("tests/pairing.rs", "each_rule_keeps_legs_apart_as_its_mode_says")]),
            ),
            (
                "runtime",
                By(&[("shared/fleet/src/pairing.rs", "known_facts_that_differ_keep_legs_apart_and_each_is_named")]),
            ),
            ("transport", By(&[("shared/fleet/src/pairing.rs", "connector_names_fold_to_their_transport")])),
            (
                "KV layout",
                By(&[("shared/fleet/src/pairing.rs", "a_layout_fact_of_one_leg_only_matters_in_strict_mode")]),
            ),
            (
                "engine version",
                By(&[(
                    "shared/fleet/src/pairing.rs",
                    "versions_are_compared_in_strict_mode_when_both_legs_report_one",
                )]),
            ),
            (
                "the key in /workers",
                By(&[(
                    "shared/fleet/src/pairing.rs",
                    "the_key_is_runtime_transport_layout_with_question_marks_for_the_unknown",
                )]),
            ),
            (
                "off, lenient, strict",
                By(&[
                    ("shared/fleet/src/pairing.rs", "lenient_ignores_what_is_unknown_and_strict_does_not"),
                    ("tests/pairing.rs", "each_rule_keeps_legs_apart_as_its_mode_says"),
                ]),
            ),
            (
                "an explicit protocol",
                By(&[("shared/fleet/src/pairing.rs", "an_explicit_protocol_replaces_everything_but_the_runtime")]),
            ),
            (
                "the sources of an explicit protocol, in their order",
                By(&[
                    (
                        "shared/fleet/src/pairing.rs",
                        "a_protocol_is_that_of_the_label_else_of_the_field_else_of_the_engine",
                    ),
                    (
                        "controlplane/server/src/jobs/tests.rs",
                        "engines_that_speak_grpc_are_recognised_by_the_health_check_they_answer",
                    ),
                ]),
            ),
            (
                "no pair at all",
                By(&[("tests/pairing.rs", "an_incompatible_fleet_is_refused_at_once_and_said_in_the_log")]),
            ),
            (
                "some prefill without a partner",
                By(&[("tests/pairing.rs", "a_prefill_without_a_compatible_decode_gets_nothing_while_others_can_pair")]),
            ),
            (
                "worked out when workers join or leave",
                By(&[("tests/pairing.rs", "pairs_follow_the_workers_that_join_and_leave")]),
            ),
        ],
    ),
    (
        "Troubleshooting: symptoms",
        &[
            (
                "503 no_available_workers: the message names the leg",
                By(&[("tests/breakers.rs", "a_leg_whose_only_worker_is_gone_is_named_with_the_time_to_come_back")]),
            ),
            (
                "503 no_compatible_pd_pair: the keys in /workers tell what differs",
                By(&[("tests/pairing.rs", "each_rule_keeps_legs_apart_as_its_mode_says")]),
            ),
            (
                "503 worker_overload_protection_shed: a full window, or a leg that is overloaded",
                By(&[
                    ("tests/grpc/refusals.rs", "a_decode_window_lets_in_what_the_engine_runs_and_sheds_the_rest"),
                    ("tests/overload.rs", "with_the_shed_flag_requests_are_refused_with_a_hint_and_not_retried"),
                ]),
            ),
            (
                "400 context_length_exceeded",
                By(&[("tests/grpc/refusals.rs", "a_prompt_longer_than_the_smaller_window_reaches_no_engine")]),
            ),
            (
                "decode recomputes prompts: passthrough is counted, and params that do not come",
                By(&[
                    ("tests/connectors.rs", "passthrough_relays_what_comes_back_or_nothing"),
                    ("tests/connectors.rs", "a_nixl_prefill_that_hands_nothing_over_is_counted_and_decode_recomputes"),
                ]),
            ),
            (
                "n>1 completions of SGLang over HTTP are refused instead of stalling",
                By(&[("tests/connectors.rs", "several_samples_of_a_completion_are_refused_before_any_sglang_leg")]),
            ),
            (
                "high time to first token: the time of prefills is measured",
                By(&[(
                    "tests/metrics.rs",
                    "every_documented_series_of_http_serving_moves_under_its_documented_name_and_labels",
                )]),
            ),
        ],
    ),
    (
        "Troubleshooting and verification",
        &[
            ("debug logging", By(&[("tests/metrics.rs", "the_debug_log_names_both_workers_of_each_selected_pair")])),
            (
                "GET /workers",
                By(&[
                    ("tests/registration.rs", "one_address_is_one_worker_however_it_is_spelled"),
                    ("shared/fleet/src/info.rs", "the_shape_is_the_documented_one_and_the_key_is_never_shown"),
                ]),
            ),
            (
                "GET /readiness",
                By(&[
                    ("tests/breakers.rs", "a_leg_whose_only_worker_is_gone_is_named_with_the_time_to_come_back"),
                    ("tests/errors.rs", "a_fleet_that_cannot_serve_a_request_says_what_is_missing"),
                ]),
            ),
            (
                "the start commands over HTTP",
                By(&[("src/cli/tests.rs", "every_documented_http_start_command_parses_as_written")]),
            ),
            (
                "the start commands over gRPC",
                By(&[("src/cli/tests.rs", "every_documented_grpc_start_command_parses_and_keeps_its_model")]),
            ),
        ],
    ),
];
