//! How prefill/decode serving works: the documented tables and lists of engines, connectors, MoRI-IO, failures and APIs.

use super::{By, Table};

pub const TABLES: &[Table] = &[
    (
        "Supported Engines",
        &[
            ("SGLang over HTTP", By(&[("tests/serving.rs", "a_pair_answers_byte_for_byte_what_one_engine_answers")])),
            (
                "vLLM over HTTP",
                By(&[("tests/serving.rs", "a_pair_that_hands_over_answers_byte_for_byte_what_one_engine_answers")]),
            ),
            (
                "SGLang, vLLM and TokenSpeed over gRPC",
                By(&[(
                    "tests/grpc/answers.rs",
                    "pairs_registered_at_run_time_answer_what_their_decode_says_streamed_or_not",
                )]),
            ),
            (
                "the scheme of a worker's URL selects the path",
                By(&[("tests/grpc/wires.rs", "http_and_grpc_workers_serve_one_model_and_never_pair_with_each_other")]),
            ),
            (
                "other runtimes have no PD protocol",
                By(&[
                    ("src/cli/tests.rs", "backends_without_an_http_pd_protocol_are_refused"),
                    ("controlplane/server/src/jobs/support.rs", "what_cannot_be_served_fails_with_its_reason"),
                ]),
            ),
            (
                "ipc:// legs are refused",
                By(&[
                    ("controlplane/server/src/jobs/support.rs", "what_cannot_be_served_fails_with_its_reason"),
                    ("tests/rejections.rs", "workers_that_cannot_be_reached_or_never_become_healthy_fail_readably"),
                ]),
            ),
        ],
    ),
    (
        "Parallel Dispatch",
        &[
            (
                "bootstrap host, port and room on both legs",
                By(&[("tests/connectors.rs", "sglang_legs_meet_in_one_room_at_the_prefills_bootstrap_server")]),
            ),
            (
                "a batch has a room for each entry",
                By(&[("tests/connectors.rs", "sglang_batches_get_a_room_for_each_entry")]),
            ),
            (
                "rooms are new and 63 bits wide",
                By(&[
                    ("tests/fidelity.rs", "rooms_are_63_bit_integers_equal_on_both_legs_and_never_the_same_twice"),
                    (
                        "dataplane/engines/tests/sglang_legs.rs",
                        "rooms_of_many_requests_are_63_bit_integers_equal_on_both_legs",
                    ),
                ]),
            ),
            (
                "the registered port is forwarded as it is",
                By(&[("tests/connectors.rs", "a_missing_bootstrap_port_is_forwarded_as_null")]),
            ),
            (
                "over gRPC a prefill without a port is addressed on 8998",
                By(&[(
                    "dataplane/engines/src/grpc/rendezvous.rs",
                    "a_prefill_without_a_bootstrap_port_is_met_on_8998",
                )]),
            ),
            (
                "TokenSpeed: rooms land on the rank of the prefill",
                By(&[
                    ("dataplane/engines/src/grpc/rendezvous.rs", "a_room_lies_below_its_limit_and_leads_to_its_rank"),
                    ("tests/grpc/fleets.rs", "each_rank_is_a_worker_and_both_legs_run_on_the_rank_that_was_chosen"),
                ]),
            ),
            (
                "--dp-aware: legs carry the rank",
                By(&[
                    ("tests/ranks.rs", "each_data_parallel_rank_is_a_worker_and_its_legs_carry_it"),
                    ("tests/connectors.rs", "legs_name_the_data_parallel_ranks_of_their_workers"),
                ]),
            ),
        ],
    ),
    (
        "Sequential Dispatch",
        &[
            (
                "one token, no stream, n = 1",
                By(&[(
                    "tests/fidelity.rs",
                    "a_prefill_leg_asks_for_one_token_and_a_decode_leg_for_what_the_client_asked",
                )]),
            ),
            (
                "the cap of each endpoint",
                By(&[
                    ("dataplane/engines/tests/vllm_legs.rs", "the_prefill_leg_asks_for_one_token_without_a_stream"),
                    ("tests/routes.rs", "the_prefill_leg_of_a_response_and_of_a_message_is_capped_in_its_own_field"),
                ]),
            ),
            (
                "decode gets the original request",
                By(&[("tests/fidelity.rs", "a_cap_that_the_client_did_not_set_is_not_set_for_decode")]),
            ),
            (
                "decode waits for prefill",
                By(&[("tests/resilience.rs", "a_refusal_by_prefill_does_not_wait_for_a_silent_decode")]),
            ),
            (
                "--dp-aware: vLLM legs carry the rank",
                By(&[("tests/ranks.rs", "vllm_legs_name_their_rank_in_the_header_that_the_engine_reads")]),
            ),
        ],
    ),
    (
        "Connector Modes",
        &[
            (
                "NixlConnector: tag and relay, verbatim",
                By(&[("tests/connectors.rs", "nixl_params_reach_decode_byte_for_byte")]),
            ),
            (
                "NixlConnector: KV moves",
                By(&[("tests/connectors.rs", "a_nixl_pair_moves_the_kv_and_answers_what_one_engine_answers")]),
            ),
            (
                "NIXL prefill returns nothing",
                By(&[(
                    "tests/connectors.rs",
                    "a_nixl_prefill_that_hands_nothing_over_is_counted_and_decode_recomputes",
                )]),
            ),
            (
                "MooncakeConnector",
                By(&[("tests/connectors.rs", "a_mooncake_pair_meets_through_an_id_minted_for_each_request")]),
            ),
            (
                "Mooncake, port 8998 when the worker has none",
                By(&[("tests/connectors.rs", "a_mooncake_prefill_without_a_bootstrap_port_is_addressed_on_8998")]),
            ),
            (
                "Mooncake without an engine id",
                By(&[(
                    "tests/connectors.rs",
                    "a_mooncake_prefill_without_an_engine_id_mints_nothing_and_decode_recomputes",
                )]),
            ),
            (
                "Mooncake with several ranks",
                By(&[
                    ("tests/ranks.rs", "a_mooncake_prefill_computes_on_the_rank_whose_engine_id_is_minted"),
                    ("dataplane/engines/tests/vllm_legs.rs", "a_mooncake_engine_is_named_only_when_its_id_is_certain"),
                ]),
            ),
            (
                "MoRIIOConnector: READ, WRITE, concurrent WRITE",
                By(&[("tests/moriio.rs", "each_dispatch_answers_byte_for_byte_what_one_engine_answers")]),
            ),
            (
                "MoRIIOConnector: the prefill leg",
                By(&[
                    (
                        "dataplane/engines/tests/moriio.rs",
                        "a_read_prefill_leg_names_no_side_channel_and_cannot_end_before_its_cap",
                    ),
                    ("dataplane/engines/tests/moriio.rs", "labels_are_trimmed_and_have_their_documented_defaults"),
                ]),
            ),
            (
                "MoRIIOConnector: the decode leg",
                By(&[("dataplane/engines/tests/moriio.rs", "the_decode_leg_is_the_clients_request_with_the_handoff")]),
            ),
            (
                "MoRIIOConnector: the decode leg of concurrent WRITE",
                By(&[("dataplane/engines/tests/moriio.rs", "a_concurrent_decode_leg_names_the_prefills_side_channel")]),
            ),
            (
                "a MoRIIOConnector decode takes the MoRI-IO path whatever its prefill is",
                By(&[(
                    "tests/connectors.rs",
                    "a_moriio_decode_with_another_prefill_is_refused_before_any_leg_is_contacted",
                )]),
            ),
            (
                "none or another connector",
                By(&[("tests/connectors.rs", "passthrough_relays_what_comes_back_or_nothing")]),
            ),
            ("n>1", By(&[("tests/connectors.rs", "several_samples_skip_the_prefill_leg_and_leave_the_body_alone")])),
        ],
    ),
    (
        "Where the Connector Comes From",
        &[
            (
                "HTTP: the registration's fields",
                By(&[("shared/fleet/src/validate.rs", "connector_labels_move_into_their_fields_and_the_field_wins")]),
            ),
            (
                "HTTP: a worker registered by URL alone",
                By(&[(
                    "tests/connectors.rs",
                    "a_vllm_prefill_without_a_declared_connector_is_warned_about_loudly_and_once",
                )]),
            ),
            (
                "a registered engine id is kept",
                By(&[
                    (
                        "tests/connectors.rs",
                        "a_registered_engine_id_is_kept_and_a_new_one_counts_from_the_next_request",
                    ),
                    (
                        "tests/connectors.rs",
                        "an_engine_id_that_the_fleet_learned_is_replaced_and_one_that_was_registered_is_warned_about",
                    ),
                ]),
            ),
            (
                "a restarted prefill is asked for its id before it is routed to",
                By(&[(
                    "tests/connectors.rs",
                    "the_engine_id_of_a_mooncake_prefill_is_learned_from_its_bootstrap_server_and_anew_after_each_start",
                )]),
            ),
            (
                "gRPC",
                By(&[(
                    "tests/grpc/answers.rs",
                    "pairs_registered_at_run_time_answer_what_their_decode_says_streamed_or_not",
                )]),
            ),
        ],
    ),
    (
        "MoRI-IO labels",
        &[
            (
                "moriio_mode",
                By(&[
                    ("dataplane/engines/tests/moriio.rs", "a_label_that_means_nothing_is_named"),
                    ("tests/pairing.rs", "each_rule_keeps_legs_apart_as_its_mode_says"),
                ]),
            ),
            (
                "moriio_host",
                By(&[("dataplane/engines/tests/moriio.rs", "labels_are_trimmed_and_have_their_documented_defaults")]),
            ),
            (
                "moriio_handshake_port",
                By(&[
                    ("dataplane/engines/tests/moriio.rs", "labels_are_trimmed_and_have_their_documented_defaults"),
                    ("dataplane/engines/tests/moriio.rs", "a_label_that_means_nothing_is_named"),
                ]),
            ),
            (
                "moriio_notify_port",
                By(&[
                    ("dataplane/engines/tests/moriio.rs", "labels_are_trimmed_and_have_their_documented_defaults"),
                    ("dataplane/engines/tests/moriio.rs", "a_label_that_means_nothing_is_named"),
                ]),
            ),
            (
                "moriio_write_dispatch",
                By(&[
                    ("dataplane/engines/tests/moriio.rs", "only_the_decode_worker_asks_for_concurrent_dispatch"),
                    ("dataplane/engines/tests/moriio.rs", "a_side_channel_must_be_reachable_in_write_mode_only"),
                ]),
            ),
            (
                "tp_size",
                By(&[
                    ("dataplane/engines/tests/moriio.rs", "a_concurrent_decode_leg_names_the_prefills_side_channel"),
                    ("dataplane/engines/tests/moriio.rs", "a_label_that_means_nothing_is_named"),
                ]),
            ),
        ],
    ),
    (
        "MoRI-IO refusals",
        &[
            (
                "a leg that is not a MoRIIOConnector worker",
                By(&[
                    ("tests/moriio.rs", "a_misconfigured_pair_is_refused_before_either_leg_and_the_log_says_why"),
                    ("dataplane/engines/tests/moriio.rs", "a_pair_that_cannot_work_is_refused_with_its_reason"),
                ]),
            ),
            (
                "legs in different modes",
                By(&[
                    ("tests/moriio.rs", "a_misconfigured_pair_is_refused_before_either_leg_and_the_log_says_why"),
                    ("dataplane/engines/tests/moriio.rs", "a_pair_that_cannot_work_is_refused_with_its_reason"),
                ]),
            ),
            (
                "a worker with DP>1",
                By(&[
                    ("tests/moriio.rs", "a_misconfigured_pair_is_refused_before_either_leg_and_the_log_says_why"),
                    ("dataplane/engines/tests/moriio.rs", "a_pair_that_cannot_work_is_refused_with_its_reason"),
                ]),
            ),
            (
                "a missing, unparsable or invalid label",
                By(&[
                    ("tests/moriio.rs", "a_misconfigured_pair_is_refused_before_either_leg_and_the_log_says_why"),
                    ("dataplane/engines/tests/moriio.rs", "a_label_that_means_nothing_is_named"),
                ]),
            ),
            (
                "a loopback or unspecified decode host",
                By(&[
                    ("tests/moriio.rs", "a_misconfigured_pair_is_refused_before_either_leg_and_the_log_says_why"),
                    ("dataplane/engines/tests/moriio.rs", "a_side_channel_must_be_reachable_in_write_mode_only"),
                ]),
            ),
            (
                "the prefill's own side channel",
                By(&[
                    ("tests/moriio.rs", "a_misconfigured_pair_is_refused_before_either_leg_and_the_log_says_why"),
                    ("dataplane/engines/tests/moriio.rs", "a_side_channel_must_be_reachable_in_write_mode_only"),
                ]),
            ),
            (
                "concurrent: a loopback or unspecified prefill host",
                By(&[
                    ("tests/moriio.rs", "a_misconfigured_pair_is_refused_before_either_leg_and_the_log_says_why"),
                    ("dataplane/engines/tests/moriio.rs", "a_side_channel_must_be_reachable_in_write_mode_only"),
                ]),
            ),
            (
                "n>1",
                By(&[
                    ("tests/moriio.rs", "requests_that_moriio_cannot_serve_reach_no_engine"),
                    ("dataplane/engines/tests/moriio.rs", "requests_that_cannot_be_served_are_refused_in_order"),
                ]),
            ),
            (
                "a batched prompt",
                By(&[
                    ("tests/moriio.rs", "requests_that_moriio_cannot_serve_reach_no_engine"),
                    ("dataplane/engines/tests/moriio.rs", "requests_that_cannot_be_served_are_refused_in_order"),
                ]),
            ),
            (
                "batched prompt embeddings",
                By(&[
                    ("tests/moriio.rs", "requests_that_moriio_cannot_serve_reach_no_engine"),
                    ("dataplane/engines/tests/moriio.rs", "requests_that_cannot_be_served_are_refused_in_order"),
                ]),
            ),
            (
                "beam search",
                By(&[
                    ("tests/moriio.rs", "requests_that_moriio_cannot_serve_reach_no_engine"),
                    ("dataplane/engines/tests/moriio.rs", "requests_that_cannot_be_served_are_refused_in_order"),
                ]),
            ),
            (
                "X-Request-Id with markers",
                By(&[
                    ("tests/moriio.rs", "requests_that_moriio_cannot_serve_reach_no_engine"),
                    ("dataplane/engines/tests/moriio.rs", "requests_that_cannot_be_served_are_refused_in_order"),
                ]),
            ),
            (
                "request_id with markers",
                By(&[
                    ("tests/moriio.rs", "requests_that_moriio_cannot_serve_reach_no_engine"),
                    ("dataplane/engines/tests/moriio.rs", "requests_that_cannot_be_served_are_refused_in_order"),
                ]),
            ),
            (
                "other routes",
                By(&[
                    ("tests/moriio.rs", "requests_that_moriio_cannot_serve_reach_no_engine"),
                    ("dataplane/engines/tests/moriio.rs", "requests_that_cannot_be_served_are_refused_in_order"),
                ]),
            ),
            (
                "the order of refusals",
                By(&[
                    ("tests/moriio.rs", "requests_that_moriio_cannot_serve_reach_no_engine"),
                    ("dataplane/engines/tests/moriio.rs", "requests_that_cannot_be_served_are_refused_in_order"),
                ]),
            ),
        ],
    ),
    (
        "MoRI-IO handoff validation",
        &[
            (
                "remote_engine_id",
                By(&[
                    ("tests/moriio.rs", "a_handoff_of_a_wrong_shape_reaches_no_decode_engine"),
                    ("dataplane/engines/tests/moriio.rs", "each_field_of_a_wrong_shape_is_refused_by_name"),
                    ("dataplane/engines/tests/moriio.rs", "each_shape_the_decode_engine_parses_is_accepted"),
                ]),
            ),
            (
                "remote_block_ids",
                By(&[
                    ("tests/moriio.rs", "a_handoff_of_a_wrong_shape_reaches_no_decode_engine"),
                    ("dataplane/engines/tests/moriio.rs", "each_field_of_a_wrong_shape_is_refused_by_name"),
                    ("dataplane/engines/tests/moriio.rs", "each_shape_the_decode_engine_parses_is_accepted"),
                ]),
            ),
            (
                "remote_host",
                By(&[
                    ("tests/moriio.rs", "a_handoff_of_a_wrong_shape_reaches_no_decode_engine"),
                    ("dataplane/engines/tests/moriio.rs", "each_field_of_a_wrong_shape_is_refused_by_name"),
                    ("dataplane/engines/tests/moriio.rs", "each_shape_the_decode_engine_parses_is_accepted"),
                ]),
            ),
            (
                "remote_handshake_port and remote_notify_port",
                By(&[
                    ("tests/moriio.rs", "a_handoff_of_a_wrong_shape_reaches_no_decode_engine"),
                    ("dataplane/engines/tests/moriio.rs", "each_field_of_a_wrong_shape_is_refused_by_name"),
                    ("dataplane/engines/tests/moriio.rs", "each_shape_the_decode_engine_parses_is_accepted"),
                ]),
            ),
            (
                "remote_dp_size, remote_dp_size_local, remote_dp_rank, tp_size, remote_tp_size",
                By(&[
                    ("tests/moriio.rs", "a_handoff_of_a_wrong_shape_reaches_no_decode_engine"),
                    ("dataplane/engines/tests/moriio.rs", "each_field_of_a_wrong_shape_is_refused_by_name"),
                    ("dataplane/engines/tests/moriio.rs", "each_shape_the_decode_engine_parses_is_accepted"),
                ]),
            ),
            (
                "missing, or another transfer_id",
                By(&[(
                    "dataplane/engines/tests/moriio.rs",
                    "a_handoff_that_is_missing_or_belongs_to_another_request_is_refused",
                )]),
            ),
            (
                "concurrent: the ports the decode leg was told",
                By(&[(
                    "dataplane/engines/tests/moriio.rs",
                    "a_concurrent_handoff_must_report_the_ports_the_decode_leg_was_told",
                )]),
            ),
            (
                "remote_host is not compared",
                By(&[(
                    "tests/moriio.rs",
                    "under_concurrent_dispatch_no_answer_comes_out_before_its_handoff_has_passed",
                )]),
            ),
            (
                "concurrent: a decode response is held until it passes",
                By(&[
                    ("tests/moriio.rs", "a_complete_decode_answer_waits_for_the_prefill"),
                    ("tests/moriio.rs", "under_concurrent_dispatch_no_answer_comes_out_before_its_handoff_has_passed"),
                ]),
            ),
            (
                "concurrent: the first leg to fail ends the request",
                By(&[
                    ("tests/moriio.rs", "a_failed_prefill_ends_the_request_and_drops_the_waiting_decode_leg"),
                    ("tests/moriio.rs", "a_failed_decode_ends_the_request_without_waiting_for_the_prefill"),
                ]),
            ),
        ],
    ),
    (
        "Failures, Cancellation, and Streaming",
        &[
            (
                "retries re-select both legs",
                By(&[
                    ("tests/resilience.rs", "a_retry_meets_in_a_new_room_under_the_same_request_id"),
                    ("tests/resilience.rs", "a_retry_takes_another_pair_when_the_failed_worker_is_the_only_one"),
                ]),
            ),
            (
                "a transport error on either leg cancels the other",
                By(&[
                    ("tests/legs.rs", "a_leg_that_is_cut_before_its_head_closes_the_silent_one"),
                    ("tests/legs.rs", "an_engine_that_stops_closes_the_silent_leg_beside_it"),
                ]),
            ),
            (
                "over gRPC a leg that fails to start answers at once",
                By(&[
                    ("tests/grpc/failures.rs", "a_leg_that_an_engine_refuses_answers_with_its_status_and_words"),
                    ("tests/grpc/failures.rs", "a_sample_that_does_not_start_fails_the_request_and_aborts_the_others"),
                ]),
            ),
            (
                "a MoRI-IO leg is dropped when the client hangs up",
                By(&[("tests/moriio.rs", "a_client_that_leaves_ends_both_legs_and_charges_nobody")]),
            ),
            (
                "prefill failures stay on the prefill worker",
                By(&[(
                    "tests/breakers.rs",
                    "a_failed_prefill_never_charges_the_decode_breaker_nor_a_failed_decode_the_prefills",
                )]),
            ),
            (
                "a dropped MoRI-IO leg records no outcome",
                By(&[("tests/moriio.rs", "a_failed_prefill_ends_the_request_and_drops_the_waiting_decode_leg")]),
            ),
            (
                "decode aborts wait for the handoff",
                By(&[(
                    "tests/grpc/leaving.rs",
                    "a_prefill_is_aborted_when_the_client_leaves_and_a_silent_decode_is_not_yet",
                )]),
            ),
            (
                "streams start on the response heads, the prefill drains",
                By(&[
                    ("tests/legs.rs", "a_stream_begins_and_ends_with_its_decode_while_the_prefills_body_goes_on"),
                    ("tests/disconnects.rs", "a_prefill_is_read_to_its_end_though_the_client_has_left_the_stream"),
                ]),
            ),
            (
                "requests with logprobs wait for the prefill body",
                By(&[(
                    "tests/logprobs.rs",
                    "the_prefills_entries_are_merged_into_an_answer_of_the_right_length_and_type",
                )]),
            ),
            (
                "streams are text/event-stream, answers keep the engine's type",
                By(&[(
                    "tests/headers.rs",
                    "a_stream_is_an_event_stream_without_a_length_and_an_answer_is_what_the_engine_says",
                )]),
            ),
            (
                "answers with logprobs are JSON, merged or not",
                By(&[("tests/logprobs.rs", "an_answer_that_cannot_be_merged_is_the_decodes_own")]),
            ),
        ],
    ),
    (
        "Parallel Sampling",
        &[
            (
                "SGLang over HTTP has no fan-out",
                By(&[("tests/connectors.rs", "several_samples_of_a_completion_are_refused_before_any_sglang_leg")]),
            ),
            (
                "vLLM needs none",
                By(&[("tests/connectors.rs", "several_samples_skip_the_prefill_leg_and_leave_the_body_alone")]),
            ),
            (
                "gRPC",
                By(&[("tests/grpc/answers.rs", "samples_are_dispatches_of_their_own_and_come_back_as_one_answer")]),
            ),
        ],
    ),
    (
        "Multimodal Requests",
        &[
            (
                "over HTTP both legs receive the media as sent",
                By(&[("tests/fidelity.rs", "media_arrives_byte_for_byte_on_both_legs")]),
            ),
            ("gRPC", By(&[("tests/grpc/refusals.rs", "requests_that_cannot_be_served_reach_no_engine")])),
        ],
    ),
    (
        "Supported APIs",
        &[
            (
                "Chat Completions, Completions, /generate",
                By(&[("tests/serving.rs", "a_pair_answers_byte_for_byte_what_one_engine_answers")]),
            ),
            (
                "Messages, Responses",
                By(&[(
                    "tests/routes.rs",
                    "messages_and_responses_of_a_pair_are_those_of_one_engine_whole_and_streamed",
                )]),
            ),
            (
                "Rerank",
                By(&[("tests/routes.rs", "messages_responses_and_rerank_reach_both_legs_verbatim_with_a_rendezvous")]),
            ),
            ("Messages token counting", By(&[("tests/routes.rs", "counting_tokens_takes_one_prefill_and_no_decode")])),
            (
                "Embeddings, classification",
                By(&[("tests/routes.rs", "embeddings_and_classification_need_a_regular_worker")]),
            ),
        ],
    ),
];
