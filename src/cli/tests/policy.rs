//! Flags that hold for the fleet: which policies they name, and that each reaches the start-up policy document.

use super::*;

#[test]
fn every_policy_but_passthrough_is_available_and_unknown_ones_are_usage_errors() {
    for policy in PolicyName::ALL.iter().map(|policy| policy.as_str()) {
        for flag in ["--policy", "--prefill-policy", "--decode-policy"] {
            let line = format!("smg --pd-disaggregation --enable-igw {flag} {policy}");
            match (policy, flag) {
                ("passthrough", _) => {
                    let (refused, reason) = refusal(&line);
                    assert_eq!(refused, flag);
                    assert!(reason.contains("`passthrough` is not available"), "{reason}");
                }
                ("bucket", "--policy" | "--decode-policy") => assert_eq!(refusal(&line).0, flag),
                _ => drop(launch(&line)),
            }
        }
    }
    assert!(syntax_error("smg --policy fastest").contains("fastest"));
}

#[test]
fn bucket_is_refused_for_decode_also_when_inherited() {
    for (line, flag) in [
        ("smg --pd-disaggregation --decode-policy bucket", "--decode-policy"),
        ("smg --decode-policy bucket", "--decode-policy"),
        ("smg --policy bucket", "--policy"),
        ("smg --pd-disaggregation --policy bucket", "--policy"),
        ("smg --pd-disaggregation --policy bucket --prefill-policy random", "--policy"),
    ] {
        let (refused, reason) = refusal(line);
        assert_eq!(refused, flag, "{line}");
        assert!(reason.contains("cannot choose decode workers"), "{line}: {reason}");
    }
    launch("smg --pd-disaggregation --prefill-policy bucket");
    launch("smg --pd-disaggregation --policy bucket --decode-policy least_load");
}

#[test]
fn every_tuning_flag_reaches_the_startup_policy() {
    let said = launch(
        "smg --cache-threshold 0.4 --balance-abs-threshold 5 --balance-rel-threshold 2.5 \
         --balance-token-usage-threshold 0.6 --overload-token-usage-threshold 0.7 --max-tree-size 1000 \
         --eviction-interval 60 --prefix-token-count 8 --cache-boundaries 16,32 --prefix-hash-load-factor 1.5 \
         --prefix-hash-balance-abs-threshold 4 --least-load-kv-pressure-weight 0.5 --least-load-default-throughput 10 \
         --least-load-mean-prefill-tokens 7 --least-load-max-waiting-requests 3 \
         --power-of-two-load-metric least_requests --assignment-mode min_group --max-idle-secs 9 \
         --bucket-adjust-interval-secs 12 --cache-index hash --cache-ttl-secs 60",
    );
    let expected = serde_json::json!({
        "cache_aware": {"cache_threshold": 0.4, "balance_abs_threshold": 5, "balance_rel_threshold": 2.5,
            "balance_token_usage_threshold": 0.6, "overload_token_usage_threshold": 0.7, "max_tree_size": 1000,
            "index": "hash", "boundaries": [16, 32], "ttl_secs": 60},
        "bucket": {"adjust_interval_secs": 12, "balance_abs_threshold": 5, "balance_rel_threshold": 2.5},
        "prefix_hash": {"prefix_token_count": 8, "boundaries": [16, 32], "load_factor": 1.5, "balance_abs_threshold": 4.0},
        "least_load": {"kv_pressure_weight": 0.5, "default_throughput": 10.0, "mean_prefill_tokens": 7,
            "max_waiting_requests": 3},
        "power_of_two": {"load_metric": "least_requests"},
        "manual": {"assignment_mode": "min_group", "max_idle_secs": 9},
    });
    assert_eq!(serde_json::to_value(&said.startup_policy).unwrap(), expected);
    let aliases = "smg --cache-match-threshold 0.4 --spill-abs-threshold 5 --spill-rel-threshold 2.5 \
                   --eviction-interval-secs 60 --sticky-key-idle-secs 9 --sticky-sessions";
    let aliased = launch(aliases).startup_policy;
    assert_eq!(aliased.cache_aware.unwrap().cache_threshold, Some(0.4));
    let manual = aliased.manual.unwrap();
    assert_eq!((manual.max_idle_secs, manual.sticky_sessions), (Some(9), Some(true)));
}

#[test]
fn an_explicit_power_of_two_needs_two_workers_on_its_leg() {
    let one_each = "smg --pd-disaggregation --prefill http://a:1 --decode http://b:1";
    assert_eq!(refusal(&format!("{one_each} --prefill-policy power_of_two")).0, "--prefill-policy");
    assert_eq!(refusal(&format!("{one_each} --decode-policy power_of_two")).0, "--decode-policy");
    launch(&format!("{one_each} --policy power_of_two"));
    launch(&format!("{one_each} --decode-policy power_of_two --enable-igw"));
    launch(&format!("{one_each} --decode http://c:1 --decode-policy power_of_two"));
}

#[test]
fn flags_that_were_not_given_are_absent_from_the_startup_policy() {
    assert_eq!(launch("smg").startup_policy, PolicyDocument::default());
    assert_eq!(launch("smg --pd-disaggregation --port 1 --log-json").startup_policy, PolicyDocument::default());
    let retry = RetryPolicy { jitter_factor: Some(0.0), ..RetryPolicy::default() };
    let only_jitter = PolicyDocument { retry: Some(retry), ..PolicyDocument::default() };
    assert_eq!(launch("smg --retry-jitter-factor 0").startup_policy, only_jitter);
}

#[test]
fn every_fleet_wide_flag_reaches_the_startup_policy() {
    let arguments = launch(
        "smg --pd-disaggregation --policy random --prefill-policy round_robin --decode-policy power_of_two \
         --decode http://a:1 --decode http://b:1 --pd-pairing-mode strict --retry-max-retries 2 \
         --retry-initial-backoff-ms 3 --retry-max-backoff-ms 4 --retry-backoff-multiplier 2.5 \
         --retry-jitter-factor 0.5 --disable-retries --dp-aware --dp-minimum-tokens-scheduler --retry-budget-ratio 0.25 --retry-budget-min-per-sec 17 --cb-failure-threshold 6 --cb-success-threshold 7 \
         --cb-timeout-duration-secs 8 --cb-window-duration-secs 9 --disable-circuit-breaker \
         --health-check-endpoint /ping --health-check-timeout-secs 10 --health-check-interval-secs 11 \
         --health-success-threshold 12 --health-failure-threshold 13 --disable-health-check --drain-settle-secs 0 \
         --drain-timeout-secs 18 --worker-overload-protection --worker-overload-waiting-requests 19 \
         --worker-overload-token-usage 0.7 --worker-overload-shed --prefill-max-inflight-requests-per-worker 20 \
         --prefill-queue-size 21 --prefill-queue-timeout-secs 22 \
         --pd-admission-wait-secs 23 --worker-startup-timeout-secs 14 --worker-startup-check-interval 15 --worker-startup-delay 16",
    );
    let expected = PolicyDocument {
        policy: Some(PolicyName::Random),
        prefill_policy: Some(PolicyName::RoundRobin),
        decode_policy: Some(PolicyName::PowerOfTwo),
        pairing_mode: Some(PairingMode::Strict),
        client_handoff_fields: None,
        dp_aware: Some(true),
        dp_minimum_tokens: Some(true),
        expired_slots: None,
        pd_admission_wait_secs: Some(23),
        retry: Some(RetryPolicy {
            max_retries: Some(2),
            initial_backoff_ms: Some(3),
            max_backoff_ms: Some(4),
            backoff_multiplier: Some(2.5),
            jitter_factor: Some(0.5),
            disabled: Some(true),
            budget_ratio: Some(0.25),
            budget_min_per_sec: Some(17),
        }),
        circuit_breaker: Some(BreakerPolicy {
            failure_threshold: Some(6),
            success_threshold: Some(7),
            timeout_secs: Some(8),
            window_secs: Some(9),
            disabled: Some(true),
        }),
        health: Some(HealthPolicy {
            endpoint: Some("/ping".to_owned()),
            timeout_secs: Some(10),
            check_interval_secs: Some(11),
            success_threshold: Some(12),
            failure_threshold: Some(13),
            disabled: Some(true),
            drain_settle_secs: Some(0),
            drain_timeout_secs: Some(18),
        }),
        registration: Some(RegistrationPolicy {
            timeout_secs: Some(14),
            check_interval_secs: Some(15),
            delay_secs: Some(16),
        }),
        overload: Some(OverloadPolicy {
            disabled: Some(false),
            waiting_requests: Some(19),
            token_usage: Some(0.7),
            shed: Some(true),
        }),
        prefill_admission: Some(PrefillAdmissionPolicy {
            max_inflight_per_worker: Some(20),
            queue_size: Some(21),
            queue_timeout_secs: Some(22),
        }),
        ..PolicyDocument::default()
    };
    assert_eq!(arguments.startup_policy, expected);
    assert_eq!(arguments.startup_policy.validate(""), Ok(()));
}
