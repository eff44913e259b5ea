//! Flags of one process: where it listens, whom it lets in.

use super::*;

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
fn routing_key_headers_are_those_given_or_the_documented_one() {
    assert_eq!(launch("smg").edge.routing_key_headers(), ["x-smg-routing-key"]);
    assert_eq!(launch("smg --routing-key-headers X-Mine x-other").edge.routing_key_headers(), ["x-mine", "x-other"]);
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
fn changes_are_logged_unless_that_is_switched_off() {
    assert!(launch("smg").tokens.audit && launch("smg --control-plane-audit-enabled").tokens.audit);
    assert!(!launch("smg --disable-audit-logging").tokens.audit);
    assert!(syntax_error("smg --control-plane-audit-enabled --disable-audit-logging").contains("cannot be used with"));
}

#[test]
fn an_open_gateway_that_others_reach_is_warned_about() {
    let warned = |line: &str| launch(line).warnings.iter().any(|warning| warning.contains("no --api-key"));
    assert!(warned("smg") && warned("smg --host ::"));
    assert!(!warned("smg --host 127.0.0.1") && !warned("smg --api-key k") && !warned("smg --tenant-api-key a:k"));
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
