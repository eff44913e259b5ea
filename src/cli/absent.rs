//! Flags of the documented gateway whose feature this version does not have.
//!
//! Problem: a flag that is silently ignored is worse than an error: `--tenant-rate-limit-enabled` would look like
//! protection. So each such flag is a row of [`GROUPS`]; giving it refuses the start and names the missing feature,
//! unless the value given is one that switches the feature off, which is what this version does anyway, or the documented
//! default of a flag that only tunes its feature: a start without the flag means the same.
//!
//! A feature that arrives takes its rows out of this table and becomes a field of a group.

use clap::{Arg, ArgAction, ArgMatches, Command};

use super::error::CliError;

/// How many words a flag takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shape {
    /// None: being there switches the feature on.
    Switch,
    /// None: being there switches the feature off, so the flag is accepted.
    OffSwitch,
    /// One, repeatable.
    One,
    /// None or one, the latter only after `=`.
    MaybeOne,
    /// Any number; none at all is "off".
    Many,
}

/// One absent flag.
struct Flag {
    /// Spellings without dashes, the documented one first.
    names: &'static [&'static str],
    shape: Shape,
    /// Values that switch the feature off, and the documented default.
    off: &'static [&'static str],
}

/// Flags that miss the same feature.
struct Group {
    /// The feature, as it completes "… is not available in this version".
    feature: &'static str,
    flags: &'static [Flag],
}

const fn switch(names: &'static [&'static str]) -> Flag {
    Flag { names, shape: Shape::Switch, off: &[] }
}

const fn off_switch(names: &'static [&'static str]) -> Flag {
    Flag { names, shape: Shape::OffSwitch, off: &[] }
}

const fn one(names: &'static [&'static str]) -> Flag {
    Flag { names, shape: Shape::One, off: &[] }
}

const fn one_or_off(names: &'static [&'static str], off: &'static [&'static str]) -> Flag {
    Flag { names, shape: Shape::One, off }
}

const fn many(names: &'static [&'static str]) -> Flag {
    Flag { names, shape: Shape::Many, off: &[] }
}

const GROUPS: &[Group] = &[
    Group {
        feature: "an index of KV blocks for the cache_aware policy",
        flags: &[
            one_or_off(&["block-size"], &["16"]),
            one_or_off(&["kv-index"], &["positional"]),
            one(&["kv-indexer-ttl-secs"]),
            one(&["kv-indexer-max-entries"]),
        ],
    },
    Group {
        feature: "scoring by the cache_aware policy",
        flags: &[
            one_or_off(&["overlap-decay"], &["0"]),
            one_or_off(&["selection-temperature"], &["0"]),
            one_or_off(&["selection-policy"], &["cache-aware-default"]),
            one_or_off(&["selection-accounting-ttl-ms"], &["0"]),
        ],
    },
    Group {
        feature: "warming up new workers",
        flags: &[
            one_or_off(&["worker-warmup-secs"], &["0", "60"]),
            one_or_off(&["worker-warmup-share"], &["0", "0.25"]),
            one_or_off(&["worker-warmup-blocks"], &["1024"]),
            one_or_off(&["worker-warmup-thin-ratio"], &["0", "0.5"]),
            one_or_off(&["worker-warmup-divert-every"], &["0", "8"]),
        ],
    },
    Group {
        feature: "judging workers by their silence",
        flags: &[one_or_off(&["worker-wedge-secs"], &["3"]), one_or_off(&["worker-stale-secs"], &["0", "15"])],
    },
    Group {
        feature: "the reinforcement-learning control API",
        flags: &[
            switch(&["enable-rl"]),
            one_or_off(&["rl-control-timeout-secs"], &["600"]),
            one_or_off(&["rl-fanout-concurrency"], &["32"]),
        ],
    },
    Group {
        feature: "encode/prefill/decode serving",
        flags: &[switch(&["epd-disaggregation"]), many(&["encode"]), one(&["encode-policy"])],
    },
    Group {
        feature: "preparing media in the gateway",
        flags: &[
            one_or_off(&["multimodal-tensor-transport"], &["inline"]),
            one(&["multimodal-shm-min-bytes"]),
            one(&["multimodal-max-inflight-bytes"]),
            one(&["mm-per-request-image-limit"]),
            one_or_off(&["mm-processing"], &["worker", "auto"]),
            one_or_off(&["mm-pixel-cache-mb"], &["0"]),
            switch(&["mm-pixel-rdma"]),
            one(&["mm-allowed-media-domains"]),
            switch(&["mm-allow-private-media-hosts"]),
            one(&["rdma-listen-ip"]),
            one(&["rdma-slot-ttl-s"]),
            switch(&["log-mm-timing"]),
        ],
    },
    Group {
        feature: "service discovery",
        flags: &[
            switch(&["service-discovery"]),
            one_or_off(&["discovery-provider"], &["kubernetes"]),
            one(&["discovery-file"]),
            one_or_off(&["discovery-check-interval-secs"], &["30"]),
            many(&["selector"]),
            many(&["encode-selector"]),
            many(&["prefill-selector"]),
            many(&["decode-selector"]),
            many(&["router-selector"]),
            one_or_off(&["service-discovery-port"], &["80"]),
            one(&["service-discovery-namespace"]),
            one_or_off(&["kv-connector-annotation"], &["smg.ai/kv-connector"]),
            one_or_off(&["kv-engine-id-annotation"], &["smg.ai/kv-engine-id"]),
            one(&["model-id-from"]),
        ],
    },
    Group {
        feature: "removing workers that failed for good",
        flags: &[
            Flag {
                names: &["remove-unhealthy-workers", "worker-auto-recovery"],
                shape: Shape::MaybeOne,
                off: &["false"],
            },
            off_switch(&["no-remove-unhealthy-workers", "no-worker-auto-recovery"]),
        ],
    },
    Group { feature: "a second name for a model", flags: &[one(&["model-alias"])] },
    Group { feature: "heap profiling", flags: &[one(&["jemalloc-prof-dir"])] },
    Group { feature: "a separate listener for probes", flags: &[one(&["health-check-port"])] },
    Group { feature: "HTTP/2 towards engines", flags: &[switch(&["upstream-http2"])] },
    Group { feature: "the ZMQ wire", flags: &[one(&["zmq-engine-count"])] },
    Group {
        feature: "telling tenants apart",
        flags: &[
            switch(&["trust-tenant-header"]),
            one_or_off(&["tenant-header-name"], &["x-smg-tenant-id"]),
            switch(&["tenant-rate-limit-enabled"]),
            one(&["tenant-rate-limit-config"]),
        ],
    },
    Group {
        feature: "streaming request bodies past the router",
        flags: &[one_or_off(&["max-buffered-request-bytes"], &["1048576"])],
    },
    Group { feature: "background responses", flags: &[one_or_off(&["max-background-responses"], &["0", "1024"])] },
    Group {
        feature: "the priority scheduler",
        flags: &[
            switch(&["priority-scheduler-enabled"]),
            one_or_off(&["priority-scheduler-default-max-class"], &["default"]),
            one(&["priority-scheduler-config"]),
            one_or_off(&["priority-scheduler-tenant-metric-top-n"], &["32"]),
        ],
    },
    Group {
        feature: "tokenizing in the gateway",
        flags: &[
            off_switch(&["disable-tokenizer-autoload"]),
            switch(&["tokenizer-cache-enable-l0"]),
            switch(&["tokenizer-cache-enable-l1"]),
            one_or_off(&["tokenizer-cache-l0-max-entries"], &["10000"]),
            one_or_off(&["tokenizer-cache-l0-max-memory"], &["268435456"]),
            one_or_off(&["tokenizer-cache-l1-max-memory"], &["52428800"]),
        ],
    },
    Group { feature: "parsing reasoning and tool calls in the gateway", flags: &[one(&["parser"])] },
    Group { feature: "calling MCP servers", flags: &[one(&["mcp-config-path"])] },
    Group {
        feature: "storing conversations",
        flags: &[
            one_or_off(&["history-backend"], &["none"]),
            one_or_off(&["history-memory-max-responses"], &["10000"]),
            one_or_off(&["history-memory-max-items"], &["100000"]),
            one_or_off(&["history-memory-retention-secs"], &["86400"]),
            many(&["storage-context-headers"]),
            one(&["storage-hook-wasm-path"]),
            one(&["schema-config"]),
            one(&["oracle-wallet-path"]),
            one(&["oracle-tns-alias"]),
            one(&["oracle-connect-descriptor"]),
            one(&["oracle-username"]),
            one(&["oracle-password"]),
            switch(&["oracle-external-auth"]),
            one(&["oracle-pool-min"]),
            one(&["oracle-pool-max"]),
            one(&["oracle-pool-timeout-secs"]),
            one(&["postgres-db-url"]),
            one(&["postgres-pool-max"]),
            one(&["postgres-op-timeout-secs"]),
            one(&["redis-url"]),
            one(&["redis-pool-max"]),
            one(&["redis-retention-days"]),
            one(&["redis-op-timeout-secs"]),
        ],
    },
    Group { feature: "WebAssembly modules", flags: &[switch(&["enable-wasm"])] },
    Group {
        feature: "authentication by JWT",
        flags: &[
            one(&["jwt-issuer"]),
            one(&["jwt-audience"]),
            one(&["jwt-jwks-uri"]),
            one_or_off(&["jwt-role-claim"], &["roles"]),
            many(&["jwt-role-mapping"]),
        ],
    },
    Group {
        feature: "the gateway mesh (gateways share one control plane instead)",
        flags: &[
            switch(&["enable-mesh"]),
            one(&["mesh-server-name"]),
            one_or_off(&["mesh-host"], &["0.0.0.0"]),
            one(&["mesh-advertise-host"]),
            one_or_off(&["mesh-port"], &["39527"]),
            many(&["mesh-peer-urls"]),
            one(&["mesh-tls-ca-cert"]),
            one(&["mesh-tls-cert"]),
            one(&["mesh-tls-key"]),
        ],
    },
    Group { feature: "WebRTC", flags: &[one(&["webrtc-bind-addr"]), one(&["webrtc-stun-server"])] },
];

/// Environment variables that switch authentication on in the documented gateway. Ignoring one would leave an
/// administration API open that its operator believes closed.
const ENVIRONMENT: [&str; 3] = ["JWT_ISSUER", "JWT_AUDIENCE", "JWT_JWKS_URI"];

/// Declares every absent flag on `command`: parsed, hidden among the options, named at the end of the help.
pub(super) fn declare(command: Command) -> Command {
    let named = GROUPS.iter().map(|group| {
        let flags: Vec<String> = group.flags.iter().map(|flag| format!("--{}", flag.names[0])).collect();
        format!("  {}:\n    {}", group.feature, flags.join(" "))
    });
    let named: Vec<String> = named.collect();
    let help = format!(
        "Understood, but not available in this version; each refuses the start unless it switches its feature off:\n{}",
        named.join("\n")
    );
    let flags = GROUPS.iter().flat_map(|group| group.flags);
    command
        .args(flags.map(argument))
        .after_long_help(help)
        .after_help("Further flags are understood whose features are not available in this version; --help lists them.")
}

fn argument(flag: &Flag) -> Arg {
    let (name, aliases) = (flag.names[0], &flag.names[1..]);
    let argument = Arg::new(name).long(name).aliases(aliases).hide(true);
    match flag.shape {
        Shape::Switch | Shape::OffSwitch => argument.action(ArgAction::SetTrue),
        Shape::One => argument.num_args(1).allow_negative_numbers(true).action(ArgAction::Append),
        Shape::MaybeOne => argument.num_args(0..=1).require_equals(true).action(ArgAction::Append),
        Shape::Many => argument.num_args(0..).action(ArgAction::Append),
    }
}

/// Refuses the first absent flag that was given with a value other than "off".
pub(super) fn refuse_given(matches: &ArgMatches) -> Result<(), CliError> {
    for group in GROUPS {
        for flag in group.flags {
            if switches_on(flag, matches) {
                return Err(CliError::refused(&format!("--{}", flag.names[0]), reason(group, flag)));
            }
        }
    }
    Ok(())
}

/// Refuses environment variables that would switch on a feature this version does not have.
pub(super) fn refuse_environment(environment: impl Fn(&str) -> Option<String>) -> Result<(), CliError> {
    match ENVIRONMENT.into_iter().find(|name| environment(name).is_some()) {
        Some(name) => Err(CliError::refused(name, "authentication by JWT is not available in this version; unset it")),
        None => Ok(()),
    }
}

fn switches_on(flag: &Flag, matches: &ArgMatches) -> bool {
    let name = flag.names[0];
    match flag.shape {
        Shape::OffSwitch => false,
        Shape::Switch => matches.get_flag(name),
        Shape::One => values(matches, name).any(|value| !is_off(flag, value)),
        Shape::Many => values(matches, name).next().is_some(),
        // Given without a value it means `true`.
        Shape::MaybeOne => {
            let mut occurrences = matches.get_occurrences::<String>(name).into_iter().flatten();
            occurrences.any(|mut words| words.next().is_none_or(|value| !is_off(flag, value)))
        }
    }
}

fn values<'a>(matches: &'a ArgMatches, name: &str) -> impl Iterator<Item = &'a str> {
    matches.get_many::<String>(name).into_iter().flatten().map(String::as_str)
}

/// Compares numbers by value, so that `0.0` is as good as `0`.
fn is_off(flag: &Flag, value: &str) -> bool {
    flag.off.iter().any(|off| {
        let numbers = off.parse::<f64>().ok().zip(value.parse::<f64>().ok());
        numbers.map_or(*off == value, |(off, value)| off == value)
    })
}

fn reason(group: &Group, flag: &Flag) -> String {
    let missing = format!("{} is not available in this version", group.feature);
    if flag.off.is_empty() {
        missing
    } else {
        format!("{missing}; the flag is accepted only with the value {}", flag.off.join(" or "))
    }
}

#[cfg(test)]
pub(super) fn flag_names() -> impl Iterator<Item = &'static str> {
    GROUPS.iter().flat_map(|group| group.flags).flat_map(|flag| flag.names).copied()
}
