//! Every documented flag and start command parses as written, and what is absent is refused by name.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeSet;

use smg_fleet::pairing::PairingMode;
use smg_fleet::policy::{BreakerPolicy, HealthPolicy, PolicyName, RegistrationPolicy, RetryPolicy};
use smg_fleet::protection::{OverloadPolicy, PrefillAdmissionPolicy};
use smg_fleet::{PolicyDocument, Role, Runtime, StartupToken, TokenHash, WorkerSpec, WorkerType};

use super::*;

/// The start commands of the documented gateway's PD page that run HTTP workers.
const HTTP_STARTS: [&str; 4] = [
    "smg launch --pd-disaggregation --host 0.0.0.0 --port 30000",
    "smg launch --pd-disaggregation --prefill http://prefill-0:8000 8998 --prefill http://prefill-1:8000 8998 \
     --decode http://decode-0:8000 --decode http://decode-1:8000 --decode-policy power_of_two",
    "smg launch --pd-disaggregation --prefill http://prefill-0:8000 8998 --prefill http://prefill-1:8000 8998 \
     --decode http://decode-0:8000 --decode http://decode-1:8000 \
     --prefill-policy cache_aware --decode-policy power_of_two",
    "smg launch --pd-disaggregation --prefill http://prefill-0:8000 8998 --prefill http://prefill-1:8000 8998 \
     --decode http://decode-0:8000 --decode http://decode-1:8000 \
     --prefill-policy cache_aware --decode-policy least_load",
];

/// Those that run gRPC workers.
const GRPC_STARTS: [&str; 3] = [
    "smg launch --pd-disaggregation --prefill grpc://prefill-0:50051 8998 --decode grpc://decode-0:50061 \
     --model-path meta-llama/Llama-3.1-8B-Instruct",
    "smg launch --pd-disaggregation --prefill grpc://prefill-0:50051 --decode grpc://decode-0:50052 \
     --model-path meta-llama/Llama-3.1-8B-Instruct",
    "smg launch --pd-disaggregation --prefill grpc://prefill-0:50051 8998 --prefill grpc://prefill-1:50051 8999 \
     --decode grpc://decode-0:50052 --model-path meta-llama/Llama-3.1-8B-Instruct",
];

/// Those that need a whole feature this version does not have, with the flag that stops them.
const STARTS_REFUSED_FOR_A_FEATURE: [(&str, &str); 2] = [
    (
        "smg launch --epd-disaggregation --encode grpc://encode-0:50060 8995 --prefill grpc://prefill-0:50061 8998 \
         --decode grpc://decode-0:50062 --model-path m",
        "--epd-disaggregation",
    ),
    (
        "smg launch --service-discovery --pd-disaggregation --prefill-selector app=sglang role=prefill \
         --decode-selector app=sglang role=decode --service-discovery-namespace inference \
         --service-discovery-port 8000 --prefill-policy cache_aware --decode-policy least_load",
        "--service-discovery",
    ),
];

/// Every flag of the documented gateway (its 1.13.0 help and configuration reference).
const DOCUMENTED_FLAGS: &str = "
    api-key assignment-mode backend balance-abs-threshold balance-rel-threshold balance-token-usage-threshold block-size
    bucket-adjust-interval-secs ca-cert-paths cache-boundaries cache-index cache-match-threshold cache-threshold
    cache-ttl-secs cb-failure-threshold cb-success-threshold cb-timeout-duration-secs cb-window-duration-secs
    chat-template client-cert-path client-key-path control-plane-api-keys control-plane-audit-enabled
    cors-allowed-origins decode decode-policy decode-selector disable-audit-logging disable-circuit-breaker
    disable-health-check disable-load-monitoring disable-retries disable-tokenizer-autoload
    disable-worker-overload-protection discovery-check-interval-secs discovery-file discovery-provider dp-aware
    dp-minimum-tokens-scheduler drain-settle-secs enable-igw enable-mesh enable-rl enable-trace enable-wasm encode
    encode-policy encode-selector engine-metrics epd-disaggregation eviction-interval eviction-interval-secs
    header-read-timeout-secs health-check-endpoint health-check-interval-secs health-check-port
    health-check-timeout-secs health-failure-threshold health-success-threshold history-backend
    history-memory-max-items history-memory-max-responses history-memory-retention-secs host
    idle-connection-timeout-secs jemalloc-prof-dir job-queue-capacity job-queue-concurrency jwt-audience jwt-issuer
    jwt-jwks-uri jwt-role-claim jwt-role-mapping kv-connector-annotation kv-engine-id-annotation kv-index
    kv-indexer-max-entries kv-indexer-ttl-secs least-load-default-throughput least-load-kv-pressure-weight
    least-load-max-waiting-requests least-load-mean-prefill-tokens load-monitor-interval log-dir log-json log-level
    log-mm-timing max-background-responses max-buffered-request-bytes max-concurrent-requests max-idle-secs
    max-payload-size max-tree-size mcp-config-path mesh-advertise-host mesh-host mesh-peer-urls mesh-port
    mesh-server-name mesh-tls-ca-cert mesh-tls-cert mesh-tls-key mm-allow-private-media-hosts mm-allowed-media-domains
    mm-per-request-image-limit mm-pixel-cache-mb mm-pixel-rdma mm-processing model model-alias model-id-from model-path
    multimodal-max-inflight-bytes multimodal-shm-min-bytes multimodal-tensor-transport no-remove-unhealthy-workers
    no-worker-auto-recovery oracle-connect-descriptor oracle-external-auth oracle-password oracle-pool-max
    oracle-pool-min oracle-pool-timeout-secs oracle-tns-alias oracle-username oracle-wallet-path otlp-traces-endpoint
    overlap-decay overload-token-usage-threshold parser pd-admission-wait-secs pd-disaggregation pd-pairing-mode policy
    port postgres-db-url postgres-op-timeout-secs postgres-pool-max power-of-two-load-metric prefill
    prefill-max-inflight-requests-per-worker prefill-policy prefill-queue-size prefill-queue-timeout-secs
    prefill-selector prefix-hash-balance-abs-threshold prefix-hash-load-factor prefix-token-count
    priority-scheduler-config priority-scheduler-default-max-class priority-scheduler-enabled
    priority-scheduler-tenant-metric-top-n prometheus-duration-buckets prometheus-host prometheus-port
    queue-size queue-timeout-secs rate-limit-tokens-per-second rdma-listen-ip rdma-slot-ttl-s reasoning-parser
    redis-op-timeout-secs redis-pool-max redis-retention-days redis-url remove-unhealthy-workers request-id-headers
    request-timeout-secs retry-backoff-multiplier retry-initial-backoff-ms retry-jitter-factor retry-max-backoff-ms
    retry-max-retries rl-control-timeout-secs rl-fanout-concurrency router-selector routing-key-headers
    routing-key-override runtime runtime-worker-threads schema-config selection-accounting-ttl-ms selection-policy
    selection-temperature selector service-discovery service-discovery-namespace service-discovery-port
    shutdown-grace-period-secs spill-abs-threshold spill-rel-threshold sse-keepalive-secs sticky-key-idle-secs
    sticky-sessions storage-context-headers storage-hook-wasm-path stream-body-stall-timeout-secs
    tenant-api-key tenant-header-name tenant-rate-limit-config tenant-rate-limit-enabled tls-cert-path tls-key-path
    tokenizer-cache-enable-l0 tokenizer-cache-enable-l1 tokenizer-cache-l0-max-entries tokenizer-cache-l0-max-memory
    tokenizer-cache-l1-max-memory tokenizer-path tool-call-parser trust-tenant-header upstream-http2
    upstream-pool-idle-timeout-secs version version-verbose webrtc-bind-addr webrtc-stun-server worker-auto-recovery
    worker-overload-protection worker-overload-shed worker-overload-token-usage worker-overload-waiting-requests
    worker-stale-secs worker-stall-secs worker-startup-check-interval worker-startup-delay
    worker-startup-timeout-secs worker-urls worker-warmup-blocks worker-warmup-divert-every worker-warmup-secs
    worker-warmup-share worker-warmup-thin-ratio worker-wedge-secs zmq-engine-count";

fn parse_line(line: &str) -> Result<Invocation, CliError> {
    parse(line.split_whitespace(), |_| None)
}

fn launch(line: &str) -> LaunchArgs {
    match parse_line(line) {
        Ok(Invocation::Launch(arguments)) => *arguments,
        other => panic!("{line}: {other:?}"),
    }
}

/// The flag and the reason of a refused or contradictory command line.
fn refusal(line: &str) -> (String, String) {
    match parse_line(line) {
        Err(CliError::Refused { flag, reason } | CliError::Conflict { flag, reason }) => (flag, reason),
        other => panic!("{line}: {other:?}"),
    }
}

fn syntax_error(line: &str) -> String {
    match parse_line(line) {
        Err(CliError::Syntax(error)) => error.to_string(),
        other => panic!("{line}: {other:?}"),
    }
}

fn prefill(url: &str, bootstrap_port: Option<u16>) -> WorkerSpec {
    WorkerSpec { bootstrap_port, ..WorkerSpec::new(url, WorkerType::Prefill) }
}

fn decode(url: &str) -> WorkerSpec {
    WorkerSpec::new(url, WorkerType::Decode)
}

#[test]
fn the_command_definition_is_consistent() {
    command().debug_assert();
}

#[test]
fn every_documented_flag_is_understood() {
    let root = command();
    let launch = root.find_subcommand("launch").unwrap();
    let mut known: BTreeSet<&str> = ["version"].into();
    for argument in launch.get_arguments().chain(root.get_arguments()) {
        known.extend(argument.get_long());
        known.extend(argument.get_all_aliases().into_iter().flatten());
    }
    let missing: Vec<&str> = DOCUMENTED_FLAGS.split_whitespace().filter(|flag| !known.contains(flag)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn every_absent_flag_is_a_documented_one() {
    let documented: BTreeSet<&str> = DOCUMENTED_FLAGS.split_whitespace().collect();
    let invented: Vec<&str> = absent::flag_names().filter(|flag| !documented.contains(flag)).collect();
    assert!(invented.is_empty(), "{invented:?}");
}

#[test]
fn every_documented_http_start_command_parses_as_written() {
    for line in HTTP_STARTS {
        assert!(launch(line).pd_disaggregation, "{line}");
    }
}

#[test]
fn every_documented_grpc_start_command_parses_and_keeps_its_model() {
    for line in GRPC_STARTS {
        let model = launch(line).text.model_path;
        assert_eq!(model.as_deref(), Some(std::path::Path::new("meta-llama/Llama-3.1-8B-Instruct")), "{line}");
    }
}

#[test]
fn start_commands_of_absent_features_are_refused_by_name() {
    for (line, flag) in STARTS_REFUSED_FOR_A_FEATURE {
        let words = line.split_whitespace().collect::<Vec<_>>();
        let refused = refusal(line).0;
        assert!(words.contains(&refused.as_str()), "{refused} is not in {line}");
        assert!(refused.starts_with("--") && words.contains(&flag));
    }
}

#[test]
fn a_prefill_takes_a_port_none_or_nothing_and_keeps_its_order() {
    let arguments = launch(
        "smg launch --pd-disaggregation --prefill http://a:1 8998 --prefill http://b:1 none --prefill http://c:1 \
         --decode http://d:1 --prefill=http://e:1 --prefill http://f:1 NONE --decode=http://g:1",
    );
    let expected = [
        prefill("http://a:1", Some(8998)),
        prefill("http://b:1", None),
        prefill("http://c:1", None),
        prefill("http://e:1", None),
        prefill("http://f:1", None),
        decode("http://d:1"),
        decode("http://g:1"),
    ];
    assert_eq!(arguments.startup_workers, expected);
}

#[test]
fn a_bad_bootstrap_port_is_named_in_the_error() {
    for port in ["0", "65536", "http://b:1", "-5"] {
        let message = syntax_error(&format!("smg launch --pd-disaggregation --prefill http://a:1 {port}"));
        assert!(message.contains(port), "{message}");
    }
    let message = syntax_error("smg launch --pd-disaggregation --prefill a:1");
    assert!(message.contains("'a:1'") && message.contains("http://"), "{message}");
}

#[test]
fn launch_start_and_nothing_are_the_same_command() {
    for line in ["smg launch --port 1234", "smg start --port 1234", "smg --port 1234"] {
        assert_eq!(launch(line).edge.port, 1234, "{line}");
    }
    assert_eq!(launch("smg").edge.address(), "0.0.0.0:30000".parse().unwrap());
}

#[test]
fn metrics_listen_on_all_addresses_of_the_family_of_the_host() {
    for (flags, expected) in [
        ("", "0.0.0.0:29000"),
        ("--host ::1", "[::]:29000"),
        ("--host ::1 --prometheus-host 127.0.0.1 --prometheus-port 1", "127.0.0.1:1"),
    ] {
        let arguments = launch(&format!("smg {flags}"));
        assert_eq!(arguments.process.prometheus_address(arguments.edge.host), expected.parse().unwrap(), "{flags}");
    }
}

#[test]
fn regular_workers_and_empty_lists_parse() {
    let workers = launch("smg --worker-urls http://a:1 http://b:1 --port 3").startup_workers;
    assert_eq!(workers.iter().map(|worker| worker.url.as_str()).collect::<Vec<_>>(), ["http://a:1", "http://b:1"]);
    assert!(workers.iter().all(|worker| worker.worker_type == WorkerType::Regular));
    assert!(launch("smg launch --worker-urls --port 3").startup_workers.is_empty());
    assert!(launch("smg launch --pd-disaggregation").startup_workers.is_empty());
    assert!(launch("smg launch --cors-allowed-origins --control-plane-api-keys").startup_workers.is_empty());
    assert_eq!(launch("smg launch --request-id-headers").edge.request_id_headers().len(), 4);
    assert_eq!(launch("smg launch --request-id-headers X-Mine").edge.request_id_headers(), ["x-mine"]);
}

#[test]
fn every_scheme_parses_because_the_registration_says_more() {
    let line = "smg --pd-disaggregation --prefill ipc:///tmp/a --decode grpcs://b:1 --worker-urls https://c";
    assert_eq!(launch(line).startup_workers.len(), 3);
}

#[test]
fn one_url_in_two_roles_is_a_conflict() {
    let (flag, reason) = refusal("smg --pd-disaggregation --prefill http://a:1 --decode http://A:1/");
    assert_eq!(flag, "--decode");
    assert!(reason.contains("http://a:1"));
}

#[test]
fn pd_flags_without_pd_mode_only_warn() {
    let arguments = launch("smg --prefill http://a:1 8998 --decode http://b:1 --prefill-policy random");
    assert!(arguments.startup_workers.is_empty());
    for flag in ["--prefill ", "--decode ", "--prefill-policy "] {
        assert!(arguments.warnings.iter().any(|warning| warning.starts_with(flag)), "{flag}");
    }
}

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
fn routing_key_headers_are_those_given_or_the_documented_one() {
    assert_eq!(launch("smg").edge.routing_key_headers(), ["x-smg-routing-key"]);
    assert_eq!(launch("smg --routing-key-headers X-Mine x-other").edge.routing_key_headers(), ["x-mine", "x-other"]);
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
fn absent_flags_are_refused_unless_they_switch_their_feature_off() {
    for (line, flag) in [
        ("smg --jwt-issuer https://issuer", "--jwt-issuer"),
        ("smg --enable-mesh", "--enable-mesh"),
        ("smg --log-dir /var/log/smg", "--log-dir"),
        ("smg --remove-unhealthy-workers", "--remove-unhealthy-workers"),
        ("smg --worker-auto-recovery=true", "--remove-unhealthy-workers"),
        ("smg --encode http://a:1 8995", "--encode"),
        ("smg --selector app=a role=b", "--selector"),
        ("smg gateway --controlplane a:1 --insecure --upstream-http2", "--upstream-http2"),
    ] {
        let (refused, reason) = refusal(line);
        assert_eq!(refused, flag, "{line}");
        assert!(reason.contains("is not available in this version"), "{line}: {reason}");
    }
    launch(
        "smg --max-concurrent-requests 0 --prefill-max-inflight-requests-per-worker -1 --worker-auto-recovery=false \
         --balance-token-usage-threshold 1.0 --overlap-decay 0.0 --history-backend none --disable-load-monitoring \
         --disable-worker-overload-protection --disable-tokenizer-autoload --queue-size 0",
    );
}

#[test]
fn an_environment_that_asks_for_authentication_by_jwt_is_refused() {
    let result = parse(["smg"], |name| (name == "JWT_ISSUER").then(|| "https://issuer".to_owned()));
    assert!(matches!(result, Err(CliError::Refused { flag, .. }) if flag == "JWT_ISSUER"));
}

#[test]
fn the_flags_of_the_edge_are_checked_against_each_other() {
    for (line, flag) in [
        ("smg --tls-cert-path c", "--tls-cert-path"),
        ("smg --tls-key-path k", "--tls-key-path"),
        ("smg --tls-client-ca-paths a", "--tls-client-ca-paths"),
        ("smg --client-cert-path c", "--client-cert-path"),
        ("smg --client-key-path k", "--client-key-path"),
        ("smg --queue-timeout-secs 0", "--queue-timeout-secs"),
        ("smg --max-concurrent-requests 0 --rate-limit-tokens-per-second 5", "--rate-limit-tokens-per-second"),
        ("smg --cors-allowed-origins * https://a", "--cors-allowed-origins"),
        ("smg --cors-allowed-origins example.com", "--cors-allowed-origins"),
        ("smg --cors-allowed-origins https://example.com/", "--cors-allowed-origins"),
        ("smg gateway --controlplane a:1 --insecure --tls-cert-path x", "--tls-cert-path"),
        ("smg controlplane --data-dir d --insecure --bootstrap --client-cert-path x", "--client-cert-path"),
    ] {
        assert_eq!(refusal(line).0, flag, "{line}");
    }
    assert!(syntax_error("smg --max-concurrent-requests -2").contains("-2"));
    let edge = launch(
        "smg --queue-timeout-secs 0 --queue-size 0 --tls-cert-path c --tls-key-path k --tls-client-ca-paths a b",
    )
    .edge;
    assert_eq!(edge.tls().unwrap().client_roots.len(), 2);
    let edge = launch("smg --cors-allowed-origins https://a http://localhost:3000").edge;
    assert!(matches!(edge.cors_origins().unwrap(), smg_gateway::Origins::These(origins) if origins.len() == 2));
    assert_eq!(launch("smg --cors-allowed-origins *").edge.cors_origins().unwrap(), smg_gateway::Origins::Any);
    // The documented defaults.
    let edge = launch("smg").edge;
    assert_eq!((edge.max_concurrent_requests, edge.queue_size, edge.queue_timeout_secs), (-1, 100, 60));
    assert_eq!((edge.header_read_timeout_secs, edge.idle_connection_timeout_secs, edge.rate()), (30, 90, None));
}

#[test]
fn keys_are_digested_and_never_shown() {
    let line = "smg --host 127.0.0.1 --api-key hush-1 --tenant-api-key a:hush-2 --tenant-api-key b:hu:sh-3 \
                --worker-api-key hush-4 --worker-urls http://w:1 --control-plane-api-keys k1:ci:admin:hush-5";
    let arguments = launch(line);
    assert_eq!(arguments.keys.gateway, Some(TokenHash::of("hush-1")));
    assert_eq!(arguments.keys.tenants, [TokenHash::of("hush-2"), TokenHash::of("hu:sh-3")]);
    assert_eq!(arguments.startup_workers[0].api_key.as_deref(), Some("hush-4"));
    assert!(!format!("{arguments:?}").contains("hush") && !format!("{arguments:?}").contains("hu:sh"));
    for (line, flag) in [
        ("smg --api-key=", "--api-key"),
        ("smg --tenant-api-key hush", "--tenant-api-key"),
        ("smg --tenant-api-key a:", "--tenant-api-key"),
        ("smg --tenant-api-key :hush", "--tenant-api-key"),
    ] {
        let (refused, reason) = refusal(line);
        assert_eq!(refused, flag, "{line}");
        assert!(!reason.contains("hush"), "{reason}");
    }
}

#[test]
fn admin_tokens_come_from_the_flag_or_else_the_environment() {
    let token = |name: &str, role, key| StartupToken { name: name.to_owned(), role, hash: TokenHash::of(key) };
    let line = "smg --control-plane-api-keys k1:CI:admin:a:b k2:Read:user:c --control-plane-api-keys k3:Ops:operator:d";
    let expected =
        [token("k1:CI", Role::Admin, "a:b"), token("k2:Read", Role::Viewer, "c"), token("k3:Ops", Role::Operator, "d")];
    let with = |line: &str, variable: &str| {
        let variable = variable.to_owned();
        parse(line.split_whitespace(), move |name| (name == "CONTROL_PLANE_API_KEYS").then(|| variable.clone()))
    };
    for (line, variable) in [(line, "x:y:admin:z"), ("smg", "k1:CI:admin:a:b k2:Read:user:c\nk3:Ops:operator:d")] {
        let Ok(Invocation::Launch(arguments)) = with(line, variable) else { panic!("{line}") };
        assert_eq!(arguments.tokens.tokens, expected);
    }
    let line = "smg controlplane --data-dir d --insecure --bootstrap --disable-audit-logging";
    let Ok(Invocation::ControlPlane(arguments)) = with(line, "x:y:admin:z") else { panic!("{line}") };
    assert_eq!((arguments.tokens.tokens.len(), arguments.tokens.audit), (1, false));
    for entry in ["hush", "a:b:hush", "a:b:root:hush", ":b:admin:hush", "a:b:admin:", "a:b:admin:k a:b:admin:hush"] {
        let (flag, reason) = refusal(&format!("smg --control-plane-api-keys {entry}"));
        assert_eq!(flag, "--control-plane-api-keys", "{entry}");
        assert!(!reason.contains("hush"), "{reason}");
        let refused = with("smg", entry);
        assert!(matches!(refused, Err(CliError::Conflict { flag, .. }) if flag == "CONTROL_PLANE_API_KEYS"), "{entry}");
    }
}

#[test]
fn an_open_gateway_that_others_reach_is_warned_about() {
    let warned = |line: &str| launch(line).warnings.iter().any(|warning| warning.contains("no --api-key"));
    assert!(warned("smg") && warned("smg --host ::"));
    assert!(!warned("smg --host 127.0.0.1") && !warned("smg --api-key k") && !warned("smg --tenant-api-key a:k"));
}

#[test]
fn an_unknown_flag_is_a_usage_error_with_a_suggestion() {
    let message = syntax_error("smg launch --pd-disagregation");
    assert!(message.contains("--pd-disaggregation"), "{message}");
    assert!(syntax_error("smg lunch").contains("launch"));
    assert!(syntax_error("smg gateway --controlplane a:1 --insecure --policy random").contains("--policy"));
}

#[test]
fn backends_without_an_http_pd_protocol_are_refused() {
    assert_eq!(launch("smg --backend vllm --worker-urls http://a:1").startup_workers[0].runtime, Runtime::Vllm);
    assert_eq!(launch("smg --runtime sglang --worker-urls http://a:1").startup_workers[0].runtime, Runtime::Sglang);
    assert_eq!(launch("smg --worker-urls http://a:1").startup_workers[0].runtime, Runtime::Unspecified);
    assert_eq!(refusal("smg --backend tokenspeed").0, "--backend");
    syntax_error("smg --backend llamacpp");
}

#[test]
fn numbers_outside_their_bounds_are_usage_errors() {
    for flags in [
        "--cache-threshold 1.5",
        "--balance-rel-threshold 0.5",
        "--overload-token-usage-threshold 0",
        "--max-tree-size 0",
        "--prefix-hash-load-factor inf",
        "--cache-boundaries 0",
        "--least-load-default-throughput 0",
        "--least-load-kv-pressure-weight -1",
        "--power-of-two-load-metric latency",
        "--assignment-mode first",
        "--max-idle-secs 0",
        "--bucket-adjust-interval-secs 0",
        "--routing-key-headers a:b",
        "--retry-max-retries 0",
        "--retry-backoff-multiplier 0.9",
        "--retry-backoff-multiplier inf",
        "--retry-jitter-factor 1.1",
        "--retry-jitter-factor NaN",
        "--cb-failure-threshold 0",
        "--cb-success-threshold 0",
        "--health-failure-threshold 0",
        "--health-success-threshold 0",
        "--health-check-timeout-secs 0",
        "--health-check-interval-secs 0",
        "--health-check-endpoint health",
        "--job-queue-capacity 0",
        "--job-queue-concurrency 100001",
        "--max-payload-size 0",
        "--port 65536",
        "--host localhost",
        "--request-id-headers a:b",
        "--log-level loud",
        "--prometheus-duration-buckets 0 1",
    ] {
        syntax_error(&format!("smg {flags}"));
    }
    assert!(refusal("smg --cache-boundaries 32,16").1.contains("ascending"));
    assert_eq!(refusal("smg --prometheus-duration-buckets 1 1").0, "--prometheus-duration-buckets");
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
         --retry-jitter-factor 0.5 --disable-retries --dp-aware --retry-budget-ratio 0.25 --retry-budget-min-per-sec 17 --cb-failure-threshold 6 --cb-success-threshold 7 \
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

#[test]
fn listeners_need_different_ports() {
    assert_eq!(refusal("smg --port 29000").0, "--prometheus-port");
    assert_eq!(refusal("smg --controlplane-listen 127.0.0.1:30000 --insecure").0, "--controlplane-listen");
    launch("smg --port 0 --prometheus-port 0");
    assert_eq!(
        refusal("smg controlplane --data-dir d --insecure --bootstrap --listen 127.0.0.1:7401").0,
        "--peer-listen"
    );
}

#[test]
fn parts_of_a_fleet_start_with_certificates_or_insecurely_and_never_by_oversight() {
    let parts = ["smg controlplane --data-dir d --bootstrap", "smg gateway --controlplane a:1"];
    for (line, named) in parts.into_iter().zip(["smg controlplane", "smg gateway"]) {
        let (flag, reason) = refusal(line);
        assert_eq!(flag, named);
        assert!(reason.contains("smg cluster ca init") && reason.contains("--insecure"), "{reason}");
        assert!(
            parse_line(&format!("{line} --tls-dir d")).is_ok() && parse_line(&format!("{line} --insecure")).is_ok()
        );
        syntax_error(&format!("{line} --tls-dir d --insecure"));
    }
    let Ok(Invocation::Gateway(gateway)) = parse_line("smg gateway --controlplane a:1 --tls-dir /c") else { panic!() };
    assert_eq!(
        (gateway.tls_dir, gateway.warnings.iter().any(|warning| warning.contains("insecure"))),
        (Some("/c".into()), false)
    );
    assert_eq!(refusal("smg --controlplane-listen 127.0.0.1:7400").0, "--controlplane-listen");
    assert_eq!(refusal("smg --tls-dir d").0, "--tls-dir");
    for safety in ["--insecure", "--tls-dir d"] {
        assert!(launch(&format!("smg --controlplane-listen 127.0.0.1:7400 {safety}")).controlplane_listen.is_some());
    }
}

#[test]
fn an_operator_names_certificates_and_token_by_flags_or_else_in_the_environment() {
    let target = |line: &str, environment: &[(&str, &str)]| {
        let look = |name: &str| {
            let found = environment.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        match parse(line.split_whitespace(), look) {
            Ok(Invocation::Cluster(arguments)) => Ok(arguments.target),
            Err(error) => Err(error.to_string()),
            Ok(other) => panic!("{other:?}"),
        }
    };
    let roots = |line: &str, environment: &[(&str, &str)]| {
        let tls = target(line, environment).unwrap().tls;
        tls.map(|tls| {
            (tls.roots.display().to_string(), tls.identity.map(|(certificate, _)| certificate.display().to_string()))
        })
    };
    let some = |roots: &str, certificate: Option<&str>| Some((roots.to_owned(), certificate.map(str::to_owned)));
    assert_eq!(roots("smg cluster status", &[]), None);
    assert_eq!(roots("smg cluster status --tls-dir d", &[]), some("d/ca.crt", Some("d/tls.crt")));
    assert_eq!(roots("smg cluster status --ca c", &[("SMG_TLS_DIR", "d")]), some("c", None));
    assert_eq!(roots("smg cluster status", &[("SMG_TLS_DIR", "d")]), some("d/ca.crt", Some("d/tls.crt")));
    assert_eq!(
        roots("smg cluster status", &[("SMG_CA", "a"), ("SMG_CERT", "b"), ("SMG_KEY", "k")]),
        some("a", Some("b"))
    );
    for line in
        ["--cert a --key b", "--ca c --cert a", "--ca c --key b", "--ca c --tls-dir d", "--token t --token-file f"]
    {
        assert!(target(&format!("smg cluster status {line}"), &[]).is_err(), "{line}");
    }
    let token = |line: &str, environment: &[(&str, &str)]| {
        target(line, environment).unwrap().token.map(|token| token.to_string())
    };
    assert_eq!(token("smg cluster status", &[("SMG_TOKEN", "t")]).as_deref(), Some("t"));
    assert_eq!(token("smg cluster status --token-file f", &[("SMG_TOKEN", "t")]), None);
    assert_eq!(token("smg cluster status --token u", &[("SMG_TOKEN", "t")]).as_deref(), Some("u"));
    let shown = format!("{:?}", target("smg cluster status --token hush-hush", &[]));
    assert!(!shown.contains("hush-hush"), "{shown}");
}

#[test]
fn operators_name_what_they_mean_and_every_change_can_be_rehearsed() {
    let verb = |line: &str| {
        let Ok(Invocation::Admin(arguments)) = parse_line(line) else { panic!("{line}") };
        (arguments.verb, arguments.output, arguments.target.controlplane.join(" "))
    };
    let (asked, output, server) =
        verb("smg workers drain http://p:1 --dry-run --expected-revision 7 --server https://gw:30000,cp -o wide");
    let Verb::Workers(WorkersVerb::Drain { worker, timeout_secs, change }) = asked else { panic!() };
    assert_eq!(
        (worker.as_str(), timeout_secs, change.dry_run, change.expected_revision),
        ("http://p:1", 1800, true, Some(7))
    );
    assert_eq!((output, server.as_str()), (Output::Wide, "https://gw:30000 cp:7400"));
    let (asked, ..) = verb("smg policies set m policy=random retry.max_retries=");
    let Verb::Policies(PoliciesVerb::Set { fields, .. }) = asked else { panic!() };
    assert_eq!(fields, [("policy".to_owned(), "random".to_owned()), ("retry.max_retries".to_owned(), String::new())]);
    let Ok(Invocation::Admin(revoke)) = parse_line("smg tokens revoke bob --token t") else { panic!() };
    assert_eq!(revoke.target.token.as_deref(), Some("t"));
    assert!(matches!(revoke.verb, Verb::Tokens(TokensVerb::Revoke { revoked, .. }) if revoked == "bob"));
    let (asked, ..) = verb("smg tokens create ada --role user");
    assert!(matches!(asked, Verb::Tokens(TokensVerb::Create { role: smg_fleet::Role::Viewer, .. })), "the older name");
    for line in [
        "smg workers",
        "smg workers add",
        "smg workers add http://p:1 --type both",
        "smg workers add http://p:1 --label zone",
        "smg workers list --watch --stale",
        "smg policies set m",
        "smg policies set m policy=random --file f",
        "smg tokens create ada",
        "smg workers list --server ftp://h",
        "smg workers remove w --idempotency-key mine",
        "smg completions tcsh",
    ] {
        syntax_error(line);
    }
    let Ok(Invocation::Context(arguments)) = parse_line("smg context set prod --controlplane a,b --token t") else {
        panic!()
    };
    assert_eq!(arguments.target.controlplane, ["a:7400", "b:7400"]);
}

#[test]
fn an_authority_takes_names_that_can_stand_in_a_certificate() {
    let line = "smg cluster ca issue /ca --role gateway --name g-1 --host cp1.internal --host 10.0.0.1 --days 7";
    let Ok(Invocation::Cluster(arguments)) = parse_line(line) else { panic!("{line}") };
    let ClusterVerb::Ca(CaVerb::Issue { role, host, days, .. }) = arguments.verb else { panic!("{line}") };
    assert_eq!((role.as_str(), host.len(), days), ("gateway", 2, 7));
    for line in [
        "issue d --role root --name a",
        "issue d --role admin --name a/b",
        "init d --cluster-name A",
        "init d --days 0",
    ] {
        syntax_error(&format!("smg cluster ca {line}"));
    }
}

#[test]
fn a_control_plane_names_its_listeners_and_refuses_what_does_not_exist_yet() {
    let line = "smg controlplane --data-dir /d --listen 127.0.0.1:1 --peer-listen 127.0.0.1:2 --bootstrap --insecure";
    let Ok(Invocation::ControlPlane(arguments)) = parse_line(line) else { panic!("{line}") };
    assert!(arguments.bootstrap);
    assert_eq!((arguments.listen.port(), arguments.peer_listen.port()), (1, 2));
    let line =
        "smg controlplane --data-dir d --insecure --join a,b:9 --advertise cp-2.internal --election-timeout-ms 2000";
    let Ok(Invocation::ControlPlane(joining)) = parse_line(line) else { panic!("{line}") };
    assert_eq!((joining.join.join(" "), joining.advertise.as_deref()), ("a:7401 b:9".into(), Some("cp-2.internal")));
    assert_eq!((joining.heartbeat_interval_ms, joining.election_timeout_ms), (250, 2_000));
    let hasty = "smg controlplane --data-dir d --insecure --bootstrap --election-timeout-ms 500";
    assert_eq!(refusal(hasty).0, "--election-timeout-ms");
    syntax_error("smg controlplane --data-dir d --insecure --bootstrap --advertise host:1");
    assert_eq!(refusal("smg controlplane --data-dir d --insecure --store etcd").0, "--store etcd");
    syntax_error("smg controlplane --insecure");
    let Ok(Invocation::Cluster(asked)) = parse_line("smg cluster replace 3 --with 4 --controlplane a,b:1 -o json")
    else {
        panic!("smg cluster")
    };
    assert_eq!(asked.verb, ClusterVerb::Replace { node_id: 3, with: Some(4), dry_run: false });
    assert_eq!((asked.target.controlplane.join(" "), asked.output), ("a:7400 b:1".into(), Output::Json));
    for line in ["smg cluster", "smg cluster remove", "smg cluster join x", "smg cluster status -o xml"] {
        syntax_error(line);
    }
    syntax_error("smg controlplane --data-dir d --insecure --bootstrap --join a:7401");
}

#[test]
fn a_gateway_lists_control_plane_members_and_adds_the_default_port() {
    let line = "smg gateway --controlplane a:1,cp.internal --controlplane [::1]:3 --gateway-id g1 --insecure --port 0";
    let Ok(Invocation::Gateway(arguments)) = parse_line(line) else { panic!("{line}") };
    assert_eq!(arguments.controlplane, ["a:1", "cp.internal:7400", "[::1]:3"]);
    assert_eq!(arguments.gateway_id.as_deref(), Some("g1"));
    for address in ["http://a:1", "a:0", ":1", "a:b", "::1"] {
        syntax_error(&format!("smg gateway --insecure --controlplane {address}"));
    }
}

#[test]
fn help_and_versions_print_and_start_nothing() {
    for line in ["smg --help", "smg -V", "smg --version", "smg --version-verbose", "smg launch --help"] {
        let Ok(Invocation::Print(text)) = parse_line(line) else { panic!("{line}") };
        assert!(text.contains(if line.contains("elp") { "Usage" } else { env!("CARGO_PKG_VERSION") }), "{text}");
    }
}

#[test]
fn the_help_of_launch_lists_supported_flags_and_names_the_absent_ones() {
    let Ok(Invocation::Print(text)) = parse_line("smg launch --help") else { panic!("help") };
    assert!(text.contains("--prefill <URL> [PORT|none]"), "{text}");
    assert!(text.contains("--service-discovery"), "{text}");
}

/// The arguments of every `command:` of the compose file; they are written as JSON lists.
fn compose_commands() -> Vec<Vec<String>> {
    let lines = include_str!("../../deploy/compose.yaml").lines();
    let lists = lines.filter_map(|line| line.trim().strip_prefix("command: "));
    lists.map(|list| serde_json::from_str(list).unwrap()).collect()
}

/// The arguments of the `ExecStart=` of every unit, with systemd's variables filled in.
fn unit_commands() -> Vec<Vec<String>> {
    let units = [
        include_str!("../../deploy/systemd/smg.service"),
        include_str!("../../deploy/systemd/smg-controlplane.service"),
        include_str!("../../deploy/systemd/smg-gateway.service"),
    ];
    let starts = units.iter().flat_map(|unit| unit.lines().filter_map(|line| line.strip_prefix("ExecStart=")));
    let words = |start: &str| {
        let words = start.split_whitespace().skip(1).filter(|word| !word.ends_with("_FLAGS"));
        words.map(|word| word.replace("${STATE_DIRECTORY}", "/var/lib/smg")).collect()
    };
    starts.map(words).collect()
}

#[test]
fn every_command_of_the_deployment_files_starts_something() {
    let commands = [compose_commands(), unit_commands()].concat();
    assert_eq!(commands.len(), 6);
    for command in commands {
        let line = format!("smg {}", command.join(" "));
        let parsed = parse_line(&line).unwrap_or_else(|error| panic!("{line}: {error}"));
        assert!(!matches!(parsed, Invocation::Print(_)), "{line}");
    }
}
