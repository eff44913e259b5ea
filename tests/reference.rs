//! Every row of the documented tables names the test that holds it, and those tests exist.
//!
//! The tables are those of the documented system (SMG PD docs). A test that is renamed or removed
//! takes its row with it, or this fails.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;

/// Where a row is held.
enum Held {
    /// By this test in this file.
    By(&'static str, &'static str),
}

use Held::By;

/// One table: its heading, and its rows.
type Table = (&'static str, &'static [(&'static str, Held)]);

const TABLES: &[Table] = &[
    (
        "Supported Engines",
        &[
            ("SGLang", By("tests/serving.rs", "a_pair_answers_byte_for_byte_what_one_engine_answers")),
            ("vLLM", By("tests/serving.rs", "a_pair_that_hands_over_answers_byte_for_byte_what_one_engine_answers")),
            (
                "TokenSpeed",
                By("tests/grpc.rs", "pairs_registered_at_run_time_answer_what_their_decode_says_streamed_or_not"),
            ),
        ],
    ),
    (
        "Connector Modes",
        &[
            ("NixlConnector: tag and relay", By("tests/connectors.rs", "nixl_params_reach_decode_byte_for_byte")),
            (
                "NixlConnector: KV moves",
                By("tests/connectors.rs", "a_nixl_pair_moves_the_kv_and_answers_what_one_engine_answers"),
            ),
            (
                "NIXL prefill returns nothing",
                By("tests/connectors.rs", "a_nixl_prefill_that_hands_nothing_over_is_counted_and_decode_recomputes"),
            ),
            (
                "MooncakeConnector",
                By("tests/connectors.rs", "a_mooncake_pair_meets_through_an_id_minted_for_each_request"),
            ),
            (
                "Mooncake, port 8998 when the worker has none",
                By("tests/connectors.rs", "a_mooncake_prefill_without_a_bootstrap_port_is_addressed_on_8998"),
            ),
            (
                "Mooncake without an engine id",
                By(
                    "tests/connectors.rs",
                    "a_mooncake_prefill_without_an_engine_id_mints_nothing_and_decode_recomputes",
                ),
            ),
            (
                "MoRIIOConnector: READ, WRITE, concurrent WRITE",
                By("tests/moriio.rs", "each_dispatch_answers_byte_for_byte_what_one_engine_answers"),
            ),
            ("None or another connector", By("tests/connectors.rs", "passthrough_relays_what_comes_back_or_nothing")),
            ("n>1", By("tests/connectors.rs", "several_samples_skip_the_prefill_leg_and_leave_the_body_alone")),
        ],
    ),
    (
        "Where the Connector Comes From",
        &[
            (
                "HTTP",
                By(
                    "tests/connectors.rs",
                    "a_vllm_prefill_without_a_declared_connector_is_warned_about_loudly_and_once",
                ),
            ),
            ("gRPC", By("tests/grpc.rs", "pairs_registered_at_run_time_answer_what_their_decode_says_streamed_or_not")),
        ],
    ),
    (
        "MoRI-IO labels",
        &[
            (
                "defaults of every label",
                By("dataplane/engines/tests/moriio.rs", "labels_are_trimmed_and_have_their_documented_defaults"),
            ),
            (
                "values that mean nothing",
                By("dataplane/engines/tests/moriio.rs", "a_label_that_means_nothing_is_named"),
            ),
            (
                "moriio_write_dispatch",
                By("dataplane/engines/tests/moriio.rs", "only_the_decode_worker_asks_for_concurrent_dispatch"),
            ),
        ],
    ),
    (
        "MoRI-IO refusals",
        &[
            (
                "a misconfigured pair",
                By("tests/moriio.rs", "a_misconfigured_pair_is_refused_before_either_leg_and_the_log_says_why"),
            ),
            (
                "a side channel out of reach",
                By("dataplane/engines/tests/moriio.rs", "a_side_channel_must_be_reachable_in_write_mode_only"),
            ),
            (
                "fan-out, reserved ids, other routes",
                By("tests/moriio.rs", "requests_that_moriio_cannot_serve_reach_no_engine"),
            ),
            (
                "their order",
                By("dataplane/engines/tests/moriio.rs", "requests_that_cannot_be_served_are_refused_in_order"),
            ),
        ],
    ),
    (
        "MoRI-IO handoff validation",
        &[
            (
                "shapes that are accepted",
                By("dataplane/engines/tests/moriio.rs", "each_shape_the_decode_engine_parses_is_accepted"),
            ),
            (
                "shapes that are refused, field by field",
                By("dataplane/engines/tests/moriio.rs", "each_field_of_a_wrong_shape_is_refused_by_name"),
            ),
            (
                "missing or foreign",
                By(
                    "dataplane/engines/tests/moriio.rs",
                    "a_handoff_that_is_missing_or_belongs_to_another_request_is_refused",
                ),
            ),
            (
                "the ports the decode leg was told",
                By(
                    "dataplane/engines/tests/moriio.rs",
                    "a_concurrent_handoff_must_report_the_ports_the_decode_leg_was_told",
                ),
            ),
            (
                "a decode response is held until it passes",
                By("tests/moriio.rs", "a_complete_decode_answer_waits_for_the_prefill"),
            ),
        ],
    ),
    (
        "Supported APIs",
        &[
            (
                "Chat Completions, Completions, /generate",
                By("tests/serving.rs", "a_pair_answers_byte_for_byte_what_one_engine_answers"),
            ),
            (
                "Messages, Responses, Rerank",
                By("tests/routes.rs", "messages_responses_and_rerank_reach_both_legs_verbatim_with_a_rendezvous"),
            ),
            ("Messages token counting", By("tests/routes.rs", "counting_tokens_takes_one_prefill_and_no_decode")),
        ],
    ),
    (
        "Per-Phase Policies",
        &[
            (
                "cache_aware",
                By(
                    "tests/affinity.rs",
                    "cache_aware_spreads_unrelated_prompts_and_sends_repeats_where_they_went_first",
                ),
            ),
            ("prefix_hash, consistent_hashing", By("tests/affinity.rs", "hash_policies_place_alike_on_every_gateway")),
            ("power_of_two", By("tests/policies.rs", "power_of_two_goes_to_the_less_loaded_worker")),
            (
                "power_of_two at start-up",
                By("src/cli/tests.rs", "an_explicit_power_of_two_needs_two_workers_on_its_leg"),
            ),
            (
                "least_load",
                By("tests/affinity.rs", "load_policies_count_their_own_requests_where_engines_report_nothing"),
            ),
            ("round_robin", By("tests/policies.rs", "round_robin_is_even_on_each_leg")),
            ("random", By("tests/policies.rs", "random_reaches_every_worker")),
            ("manual", By("tests/affinity.rs", "manual_keeps_a_key_on_its_pair_and_leaves_other_keys_alone")),
            ("bucket", By("tests/affinity.rs", "bucket_gives_each_prefill_prompts_of_like_length")),
            ("bucket as a decode policy", By("src/cli/tests.rs", "bucket_is_refused_for_decode_also_when_inherited")),
        ],
    ),
    (
        "What Is Compared, Pairing Modes, Explicit Pairing Protocol",
        &[
            ("every component in every mode", By("tests/pairing.rs", "each_rule_keeps_legs_apart_as_its_mode_says")),
            ("no pair at all", By("tests/pairing.rs", "an_incompatible_fleet_is_refused_at_once_and_said_in_the_log")),
            (
                "some prefill without a partner",
                By("tests/pairing.rs", "a_prefill_without_a_compatible_decode_gets_nothing_while_others_can_pair"),
            ),
        ],
    ),
    (
        "Error Codes",
        &[
            ("no_available_workers", By("tests/errors.rs", "a_fleet_that_cannot_serve_a_request_says_what_is_missing")),
            (
                "no_compatible_pd_pair",
                By("tests/pairing.rs", "an_incompatible_fleet_is_refused_at_once_and_said_in_the_log"),
            ),
            (
                "prefill_upstream_error",
                By(
                    "tests/resilience.rs",
                    "an_engines_refusal_reaches_the_client_as_it_is_and_is_neither_retried_nor_charged",
                ),
            ),
            (
                "moriio_pair_misconfigured",
                By("tests/moriio.rs", "a_misconfigured_pair_is_refused_before_either_leg_and_the_log_says_why"),
            ),
            ("moriio_fanout_unsupported", By("tests/moriio.rs", "requests_that_moriio_cannot_serve_reach_no_engine")),
            ("moriio_request_id_reserved", By("tests/moriio.rs", "requests_that_moriio_cannot_serve_reach_no_engine")),
            ("moriio_route_unsupported", By("tests/moriio.rs", "requests_that_moriio_cannot_serve_reach_no_engine")),
            ("moriio_handoff_invalid", By("tests/moriio.rs", "a_handoff_of_a_wrong_shape_reaches_no_decode_engine")),
            (
                "context_length_exceeded",
                By("tests/grpc.rs", "a_prompt_longer_than_the_smaller_window_reaches_no_engine"),
            ),
            (
                "runtime_pd_not_supported",
                By("dataplane/gateway/src/grpc/flow_tests.rs", "a_pair_of_another_engine_is_refused"),
            ),
            (
                "prefill_worker_failed_to_start, decode_worker_failed_to_start",
                By("tests/grpc.rs", "a_leg_that_an_engine_refuses_answers_with_its_status_and_words"),
            ),
            (
                "moriio_grpc_pd_unsupported",
                By("tests/grpc.rs", "pairs_that_cannot_hand_over_on_this_wire_reach_no_engine"),
            ),
        ],
    ),
    (
        "Flags",
        &[
            ("every documented flag", By("src/cli/tests.rs", "every_documented_flag_is_understood")),
            (
                "flags of absent features",
                By("src/cli/tests.rs", "absent_flags_are_refused_unless_they_switch_their_feature_off"),
            ),
            (
                "documented start commands over HTTP",
                By("src/cli/tests.rs", "every_documented_http_start_command_parses_as_written"),
            ),
            (
                "documented start commands over gRPC",
                By("src/cli/tests.rs", "every_documented_grpc_start_command_parses_and_keeps_its_model"),
            ),
        ],
    ),
    (
        "PD Metrics and related series",
        &[
            (
                "serving",
                By(
                    "tests/metrics.rs",
                    "every_documented_series_of_http_serving_moves_under_its_documented_name_and_labels",
                ),
            ),
            ("policies", By("tests/metrics.rs", "every_documented_series_of_policies_moves_while_its_policy_is_used")),
            (
                "smg_pd_kv_transfer_failures_total, MoRI-IO",
                By("tests/metrics.rs", "a_moriio_pair_or_handoff_that_fails_its_check_counts_as_a_failed_transfer"),
            ),
            ("PromQL queries", By("tests/prometheus/check.py", "check_queries")),
        ],
    ),
    (
        "Troubleshooting",
        &[
            ("debug logging", By("tests/metrics.rs", "the_debug_log_names_both_workers_of_each_selected_pair")),
            (
                "n>1 over HTTP",
                By("tests/connectors.rs", "several_samples_of_a_completion_are_refused_before_any_sglang_leg"),
            ),
        ],
    ),
];

#[test]
fn every_documented_row_names_a_test_that_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (table, rows) in TABLES {
        for (row, held) in *rows {
            let By(file, test) = held;
            let text = std::fs::read_to_string(root.join(file)).unwrap_or_default();
            let defined = ["fn ", "def "].iter().any(|keyword| text.contains(&format!("{keyword}{test}(")));
            assert!(defined, "{table}: {row}: {file} has no {test}");
        }
    }
}

/// The codes in the first table of the API reference.
fn codes_of_the_reference(page: &str) -> Vec<String> {
    let rows = page.lines().skip_while(|line| !line.starts_with("| status | code")).skip(2);
    let rows = rows.take_while(|line| line.starts_with('|'));
    let codes = rows.filter_map(|row| row.split('|').nth(2));
    codes.flat_map(|cell| cell.split('`').skip(1).step_by(2)).map(str::to_owned).collect()
}

#[test]
fn every_error_code_of_the_reference_is_provoked_by_a_test_and_every_code_of_the_gateway_is_in_it() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = std::fs::read_to_string(root.join("docs/reference/api.md")).unwrap();
    let tests: String = ["tests", "dataplane/engines/tests", "dataplane/gateway/tests"]
        .iter()
        .filter_map(|folder| std::fs::read_dir(root.join(folder)).ok())
        .flatten()
        .map(|entry| entry.unwrap().path())
        .chain([root.join("dataplane/gateway/src/grpc/flow_tests.rs")])
        .filter(|path| !path.ends_with("reference.rs"))
        .filter_map(|path| std::fs::read_to_string(path).ok())
        .collect();
    let codes = codes_of_the_reference(&page);
    assert!(codes.len() > 20, "{codes:?}");
    // The page abbreviates families of codes.
    for code in codes.iter().filter(|code| !code.starts_with('_')) {
        let literal = tests.contains(&format!("\"{code}\""));
        let header = tests.contains(&format!("x-smg-error-code: {code}\""));
        assert!(literal || header, "no test provokes {code}");
    }
    let source = std::fs::read_to_string(root.join("dataplane/gateway/src/front/error.rs")).unwrap();
    let of_the_gateway = source.split("pub fn code(").nth(1).unwrap().split("pub fn ").next().unwrap();
    let arms = of_the_gateway.lines().filter_map(|line| line.split_once("=> \"")?.1.split('"').next());
    for code in arms {
        assert!(page.contains(&format!("`{code}`")), "docs/reference/api.md says nothing of {code}");
    }
}
