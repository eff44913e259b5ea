//! Every documented flag and start command parses as written, and what is absent is refused by name.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod edge;
mod fleet;
mod policy;

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
    let named = launch("smg launch --model m").text.model_path;
    assert_eq!(named.as_deref(), Some(std::path::Path::new("m")), "the other name of the flag");
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
    let alone = launch("smg --dp-minimum-tokens-scheduler");
    assert!(alone.warnings.iter().any(|warning| warning.starts_with("--dp-minimum-tokens-scheduler")));
}

#[test]
fn absent_flags_are_refused_unless_they_switch_their_feature_off() {
    for (line, flag) in [
        ("smg --jwt-issuer https://issuer", "--jwt-issuer"),
        ("smg --enable-mesh", "--enable-mesh"),
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
