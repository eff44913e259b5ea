//! Commands that start parts of a fleet or ask them, those of the deployment files among them.

use super::*;

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
fn what_every_command_takes_may_stand_before_it_and_nothing_else_is_taken_for_a_command() {
    for line in [
        "smg -o json --server a workers list --stale",
        "smg workers -o json list --stale --server a",
        "smg workers list --stale --server a -o json",
        "smg --output=json --server=a workers list --stale",
    ] {
        let Ok(Invocation::Admin(arguments)) = parse_line(line) else { panic!("{line}") };
        assert!(matches!(&arguments.verb, Verb::Workers(WorkersVerb::List { follow, .. }) if follow.stale), "{line}");
        assert_eq!((arguments.output, arguments.target.controlplane.join(" ").as_str()), (Output::Json, "a:7400"));
    }
    let Ok(Invocation::Admin(named)) = parse_line("smg --context workers gateways") else { panic!("a context's name") };
    assert_eq!((named.verb, named.target.context.as_deref()), (Verb::Gateways(Default::default()), Some("workers")));
    assert!(matches!(parse_line("smg -o wide cluster status"), Ok(Invocation::Cluster(_))));
    launch("smg --model-path cluster");
    syntax_error("smg --drain-settle-secs 1 workers list");
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
    assert_eq!(refusal("smg controlplane --insecure").0, "--data-dir");
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
fn etcd_keeps_the_state_where_it_was_built_in_and_is_refused_in_words_where_it_was_not() {
    let line =
        "smg controlplane --insecure --store etcd --etcd-endpoints http://a:2379,https://b:2379 --etcd-prefix /x";
    if cfg!(feature = "etcd") {
        let Ok(Invocation::ControlPlane(arguments)) = parse_line(line) else { panic!("{line}") };
        let StoreArgs::Etcd(etcd) = arguments.store else { panic!("{:?}", arguments.store) };
        assert_eq!(etcd.endpoints, ["http://a:2379", "https://b:2379"]);
        assert_eq!((etcd.prefix.as_str(), etcd.compact), ("/x", true));
        assert_eq!(refusal("smg controlplane --insecure --store etcd --etcd-endpoints a:1").0, "--etcd-endpoints");
        assert_eq!(refusal(&format!("{line} --join a")).0, "--join");
    } else {
        let (flag, reason) = refusal(line);
        assert_eq!(flag, "--store etcd");
        assert!(reason.contains("this smg was built without etcd") && reason.contains("--features etcd"), "{reason}");
    }
    assert_eq!(refusal("smg controlplane --insecure --store etcd").0, "--store etcd");
    let restore = "smg cluster restore f --etcd-endpoints http://a:2379 --etcd-prefix /x";
    if cfg!(feature = "etcd") {
        let Ok(Invocation::Cluster(arguments)) = parse_line(restore) else { panic!("{restore}") };
        let Some(StoreArgs::Etcd(etcd)) = arguments.into else { panic!("{:?}", arguments.into) };
        assert_eq!((etcd.endpoints.join(" ").as_str(), etcd.prefix.as_str()), ("http://a:2379", "/x"));
    } else {
        assert!(refusal(restore).1.contains("built without etcd"));
    }
    syntax_error(&format!("{restore} --data-dir d"));
    syntax_error("smg cluster restore f");
    assert_eq!(
        refusal("smg controlplane --insecure --data-dir d --etcd-endpoints http://a:1").0,
        "--etcd-endpoints",
        "one of the two is a mistake"
    );
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

/// The arguments of every `command:` of the compose file; they are written as JSON lists.
fn compose_commands() -> Vec<Vec<String>> {
    let lines = include_str!("../../../deploy/compose.yaml").lines();
    let lists = lines.filter_map(|line| line.trim().strip_prefix("command: "));
    lists.map(|list| serde_json::from_str(list).unwrap()).collect()
}

/// The arguments of the `ExecStart=` of every unit, with systemd's variables filled in.
fn unit_commands() -> Vec<Vec<String>> {
    let units = [
        include_str!("../../../deploy/systemd/smg.service"),
        include_str!("../../../deploy/systemd/smg-controlplane.service"),
        include_str!("../../../deploy/systemd/smg-gateway.service"),
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
