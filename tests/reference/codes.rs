//! The documented error codes.

use super::{By, Table};

pub const TABLES: &[Table] = &[
    (
        "Error Codes of prefill/decode serving",
        &[
            (
                "no_available_workers",
                By(&[
                    ("tests/errors.rs", "a_fleet_that_cannot_serve_a_request_says_what_is_missing"),
                    ("tests/breakers.rs", "a_leg_whose_only_worker_is_gone_is_named_with_the_time_to_come_back"),
                ]),
            ),
            (
                "no_compatible_pd_pair",
                By(&[("tests/pairing.rs", "an_incompatible_fleet_is_refused_at_once_and_said_in_the_log")]),
            ),
            (
                "worker_overload_protection_shed",
                By(&[
                    ("tests/overload.rs", "with_the_shed_flag_requests_are_refused_with_a_hint_and_not_retried"),
                    (
                        "tests/overload.rs",
                        "with_the_shed_flag_a_decode_worker_that_became_overloaded_during_prefill_gets_no_leg",
                    ),
                ]),
            ),
            (
                "prefill_upstream_error",
                By(&[(
                    "tests/resilience.rs",
                    "an_engines_refusal_reaches_the_client_as_it_is_and_is_neither_retried_nor_charged",
                )]),
            ),
            (
                "prefill_request_failed, decode_request_failed",
                By(&[("tests/codes.rs", "what_breaks_behind_the_gateway_has_the_code_of_its_leg")]),
            ),
            (
                "prefill_read_failed",
                By(&[("tests/errors.rs", "a_prefill_response_that_breaks_off_or_never_ends_is_the_prefills_failure")]),
            ),
            (
                "decode_read_failed, worker_read_failed, worker_request_failed",
                By(&[("tests/codes.rs", "what_breaks_behind_the_gateway_has_the_code_of_its_leg")]),
            ),
            (
                "prefill_bad_request, prefill_not_found, prefill_internal_error, prefill_bad_gateway, prefill_unavailable, prefill_error",
                By(&[("tests/codes.rs", "what_engines_answer_passes_with_the_code_of_its_leg_and_status")]),
            ),
            (
                "decode_bad_request, decode_not_found, decode_internal_error, decode_bad_gateway, decode_unavailable, decode_error",
                By(&[("tests/codes.rs", "what_engines_answer_passes_with_the_code_of_its_leg_and_status")]),
            ),
            (
                "worker_upstream_error",
                By(&[("tests/codes.rs", "what_engines_answer_passes_with_the_code_of_its_leg_and_status")]),
            ),
            (
                "parallel_sampling_unsupported",
                By(&[("tests/connectors.rs", "several_samples_of_a_completion_are_refused_before_any_sglang_leg")]),
            ),
            (
                "too_many_samples",
                By(&[("tests/errors.rs", "more_samples_than_rooms_are_minted_for_are_refused_and_reach_no_engine")]),
            ),
            ("pd_route_unsupported", By(&[("tests/routes.rs", "embeddings_and_classification_need_a_regular_worker")])),
            (
                "no_healthy_worker_pair, health_generate_failed, no_engine_metrics",
                By(&[("tests/routes.rs", "operators_can_ask_engines_through_the_gateway")]),
            ),
            (
                "prefill_count_tokens_failed, no_prefill_servers",
                By(&[
                    ("tests/codes.rs", "what_breaks_behind_the_gateway_has_the_code_of_its_leg"),
                    ("tests/codes.rs", "what_the_gateway_refuses_has_its_code_and_envelope"),
                ]),
            ),
            (
                "pd_prefill_queue_full, pd_prefill_queue_timeout",
                By(&[(
                    "tests/overload.rs",
                    "a_full_queue_and_a_wait_that_is_over_are_refused_with_a_hint_and_not_retried",
                )]),
            ),
            (
                "moriio_pair_misconfigured",
                By(&[("tests/moriio.rs", "a_misconfigured_pair_is_refused_before_either_leg_and_the_log_says_why")]),
            ),
            (
                "moriio_fanout_unsupported",
                By(&[("tests/moriio.rs", "requests_that_moriio_cannot_serve_reach_no_engine")]),
            ),
            (
                "moriio_prompt_logprobs_unsupported",
                By(&[("tests/moriio.rs", "requests_that_moriio_cannot_serve_reach_no_engine")]),
            ),
            (
                "moriio_request_id_reserved",
                By(&[("tests/moriio.rs", "requests_that_moriio_cannot_serve_reach_no_engine")]),
            ),
            (
                "moriio_route_unsupported",
                By(&[("tests/moriio.rs", "requests_that_moriio_cannot_serve_reach_no_engine")]),
            ),
            (
                "moriio_handoff_invalid",
                By(&[("tests/moriio.rs", "a_handoff_of_a_wrong_shape_reaches_no_decode_engine")]),
            ),
            (
                "context_length_exceeded",
                By(&[("tests/grpc/refusals.rs", "a_prompt_longer_than_the_smaller_window_reaches_no_engine")]),
            ),
            (
                "runtime_pd_not_supported",
                By(&[("dataplane/gateway/src/grpc/flow_tests.rs", "a_pair_of_another_engine_is_refused")]),
            ),
            (
                "prefill_worker_failed_to_start, decode_worker_failed_to_start",
                By(&[("tests/grpc/failures.rs", "a_leg_that_an_engine_refuses_answers_with_its_status_and_words")]),
            ),
            (
                "moriio_grpc_pd_unsupported",
                By(&[("tests/grpc/refusals.rs", "pairs_that_cannot_hand_over_on_this_wire_reach_no_engine")]),
            ),
            (
                "worker_failed_to_start, prefill_stream_error, worker_stream_failed, no_responses_from_server, constraint_failed",
                By(&[("tests/grpc/failures.rs", "what_engines_do_wrong_has_a_code")]),
            ),
            (
                "process_messages_failed, unsupported_content_part, invalid_tool_configuration, resolve_input_failed, multimodal_not_supported, unsupported_parameter, previous_response_not_found",
                By(&[("tests/grpc/refusals.rs", "requests_that_cannot_be_served_reach_no_engine")]),
            ),
            (
                "response_not_found",
                By(&[("tests/grpc/answers.rs", "a_kept_response_can_be_read_gone_on_from_and_deleted")]),
            ),
            (
                "tokenizer_not_ready, tokenizer_load_failed",
                By(&[("tests/grpc/texts.rs", "a_tokenizer_that_is_not_there_is_waited_for_or_said_to_be_missing")]),
            ),
        ],
    ),
    (
        "Errors of the client edge",
        &[
            ("the envelope", By(&[("tests/codes.rs", "what_the_gateway_refuses_has_its_code_and_envelope")])),
            (
                "json_parse_error, invalid_type",
                By(&[("tests/errors.rs", "bodies_that_routing_cannot_read_are_refused_and_reach_no_engine")]),
            ),
            (
                "missing_required_parameter, model_not_found",
                By(&[("tests/errors.rs", "an_unknown_model_is_not_found_and_one_of_several_must_be_named")]),
            ),
            ("unknown_url, method_not_allowed", By(&[("tests/errors.rs", "unknown_routes_and_methods_are_named")])),
            (
                "request_body_too_large",
                By(&[("tests/uploads.rs", "bodies_over_the_limit_are_refused_announced_or_not_and_reach_no_engine")]),
            ),
            (
                "request_body_broken",
                By(&[("tests/uploads.rs", "an_upload_that_breaks_off_is_answered_and_reaches_no_engine")]),
            ),
            (
                "invalid_value",
                By(&[(
                    "tests/errors.rs",
                    "paths_and_queries_that_do_not_decode_are_refused_in_the_words_of_their_api",
                )]),
            ),
            (
                "model_not_known_yet",
                By(&[(
                    "tests/edge.rs",
                    "a_model_that_a_gateway_does_not_know_is_unknown_only_if_the_control_plane_says_so",
                )]),
            ),
            ("loop_detected", By(&[("tests/edge.rs", "a_request_that_comes_back_is_refused_and_multiplies_nothing")])),
            (
                "request_timeout",
                By(&[(
                    "tests/flags.rs",
                    "a_request_whose_time_is_over_before_its_turn_asks_no_worker_and_blames_none",
                )]),
            ),
            ("request_body_stalled", By(&[("tests/uploads.rs", "an_upload_that_stands_still_is_given_up")])),
            (
                "request_body_timeout",
                By(&[("tests/uploads.rs", "slow_uploads_end_before_any_worker_is_chosen_and_keep_nobody_out")]),
            ),
            ("invalid_api_key", By(&[("tests/access.rs", "inference_needs_the_key_probes_and_inventory_do_not")])),
            (
                "admission_queue_full, admission_queue_timeout",
                By(&[("tests/edge.rs", "requests_beyond_the_limit_wait_and_those_beyond_the_queue_are_refused")]),
            ),
            (
                "no_models_available",
                By(&[("tests/errors.rs", "a_fleet_that_cannot_serve_a_request_says_what_is_missing")]),
            ),
            (
                "the shape of the Messages API",
                By(&[("tests/routes.rs", "errors_on_messages_have_the_shape_of_that_api")]),
            ),
        ],
    ),
    (
        "Errors of the worker API",
        &[
            (
                "WORKER_NOT_FOUND, BAD_REQUEST, WORKER_ALREADY_EXISTS, PROVIDER_NOT_COMPILED",
                By(&[("tests/rejections.rs", "malformed_registrations_are_refused_and_leave_nothing")]),
            ),
            (
                "WORKER_CREATE_IN_PROGRESS",
                By(&[(
                    "controlplane/server/src/admin/tests.rs",
                    "of_concurrent_creations_of_one_url_exactly_one_is_accepted",
                )]),
            ),
            (
                "ALREADY_HAPPENED, CONTROL_PLANE_UNAVAILABLE, STORE_FAILED",
                By(&[("controlplane/server/src/admin/rpc_test.rs", "errors_carry_the_codes_and_outcomes_of_rest")]),
            ),
            (
                "OUTCOME_UNKNOWN",
                By(&[(
                    "tests/durability.rs",
                    "a_full_disk_ends_writes_and_not_serving_and_loses_nothing_acknowledged",
                )]),
            ),
            (
                "BUSY",
                By(&[(
                    "controlplane/server/src/admin/operations_test.rs",
                    "a_member_that_serves_as_many_watches_as_it_may_says_so_until_one_ends",
                )]),
            ),
            (
                "REVISION_CONFLICT",
                By(&[("tests/policies.rs", "of_two_writers_who_read_the_same_document_one_is_told")]),
            ),
            (
                "LAST_ADMIN_TOKEN, TOKEN_NOT_FOUND, TOKEN_ALREADY_EXISTS",
                By(&[("tests/access.rs", "a_tokens_secret_is_shown_once_and_a_revoked_one_opens_nothing")]),
            ),
            (
                "PAYLOAD_TOO_LARGE",
                By(&[("tests/uploads.rs", "bodies_over_the_limit_are_refused_announced_or_not_and_reach_no_engine")]),
            ),
            (
                "PUT to another URL",
                By(&[("tests/rejections.rs", "malformed_registrations_are_refused_and_leave_nothing")]),
            ),
            (
                "PUT under --dp-aware",
                By(&[("tests/ranks.rs", "each_data_parallel_rank_is_a_worker_and_its_legs_carry_it")]),
            ),
            ("bounds of labels and numbers", By(&[("shared/fleet/src/validate.rs", "every_bound_is_checked")])),
        ],
    ),
];
