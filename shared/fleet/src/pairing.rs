//! Which prefill can hand its KV cache to which decode.
//!
//! A prefill and a decode can pair only when they speak the same KV transfer protocol. Each leg has a [`Descriptor`]; [`mismatch`] compares
//! two of them under a [`PairingMode`] and names every component that differs. The rules and the order of comparison are those of the
//! documented system (SMG PD docs, "Prefill/Decode Pairing"): runtime, explicit protocol, transport, KV layout, and in strict mode the
//! engine version.
//!
//! Legs on different wires never pair, whatever the mode: an HTTP leg and a gRPC leg have no common way to run a handoff. Over gRPC both
//! legs are of one runtime, whatever the mode.

use std::fmt;

use crate::worker::{Runtime, Wire, Worker, WorkerType, named};

named! {
    /// How strictly two legs must share a KV transfer protocol.
    PairingMode {
        /// Every prefill may pair with every decode of its wire.
        Off = "off",
        /// Known facts must agree; unknown ones are ignored.
        #[default]
        Lenient = "lenient",
        /// As lenient, and the facts must be known.
        Strict = "strict",
    }
}

/// Layout facts, in the order of the key: label, its alias, its short name in the key.
const LAYOUT: [(&str, Option<&str>, &str); 4] = [
    ("kv_cache_dtype", None, "dtype"),
    ("page_size", Some("block_size"), "page"),
    ("attention_backend", None, "attn"),
    ("model_dtype", None, "model"),
];

/// What one leg says about its KV transfer protocol.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Descriptor {
    /// The wire; not part of the key.
    pub wire: Wire,
    /// The engine; `None` = unknown.
    pub runtime: Option<Runtime>,
    /// The KV transport; `None` = unknown.
    pub transport: Option<String>,
    /// The KV layout, in the order of [`LAYOUT`], lower-cased.
    pub layout: [Option<String>; 4],
    /// The engine version; not part of the key.
    pub version: Option<String>,
    /// A declared protocol, which replaces everything but the runtime.
    pub protocol: Option<String>,
}

impl Descriptor {
    /// The descriptor of a prefill or decode worker; `None` for other roles.
    pub fn of(worker: &Worker) -> Option<Self> {
        if !matches!(worker.spec.worker_type, WorkerType::Prefill | WorkerType::Decode) {
            return None;
        }
        let runtime = Some(worker.runtime()).filter(|runtime| *runtime != Runtime::Unspecified);
        let layout = LAYOUT.map(|(label, alias, _)| {
            let value = worker.label(label).or_else(|| alias.and_then(|alias| worker.label(alias)));
            value.filter(|value| !value.is_empty()).map(str::to_lowercase)
        });
        // What was declared, label before field, before what the engine says.
        let declared = worker.spec.labels.get("pairing_protocol").or(worker.spec.pairing_protocol.as_ref());
        let explicit = declared.map(String::as_str).or_else(|| worker.label("pairing_protocol"));
        Some(Self {
            wire: worker.wire(),
            runtime,
            transport: transport(worker),
            layout,
            version: worker.label("version").filter(|version| !version.is_empty()).map(str::to_owned),
            protocol: explicit.map(str::trim).filter(|protocol| !protocol.is_empty()).map(str::to_owned),
        })
    }

    /// The key shown as `pd_pairing`: the explicit protocol, else `runtime/transport/layout` with `?` for an unknown part.
    pub fn key(&self) -> String {
        self.to_string()
    }

    /// What this leg says of a component that [`mismatch`] names, without its `unknown`; `None` when it says nothing.
    pub fn component(&self, name: &str) -> Option<String> {
        match name {
            "connection_mode" => Some(self.wire.as_str().to_owned()),
            "runtime" => self.runtime.map(|runtime| runtime.as_str().to_owned()),
            "pairing_protocol" => self.protocol.clone(),
            "transport" => self.transport.clone(),
            "version" => self.version.clone(),
            label => {
                let position = LAYOUT.iter().position(|(layout, _, _)| *layout == label)?;
                self.layout.get(position)?.clone()
            }
        }
    }
}

impl fmt::Display for Descriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(protocol) = &self.protocol {
            return f.write_str(protocol);
        }
        let runtime = self.runtime.map_or("?", Runtime::as_str);
        write!(f, "{runtime}/{}/", self.transport.as_deref().unwrap_or("?"))?;
        let mut known =
            LAYOUT.iter().zip(&self.layout).filter_map(|((_, _, short), value)| Some((short, value.as_deref()?)));
        match known.next() {
            None => return f.write_str("?"),
            Some((short, value)) => write!(f, "{short}={value}")?,
        }
        known.try_for_each(|(short, value)| write!(f, ",{short}={value}"))
    }
}

/// The KV transport of a worker, as the documented system derives it per engine.
fn transport(worker: &Worker) -> Option<String> {
    let backend = || {
        let label = worker.label("disaggregation_transfer_backend")?;
        Some(label.to_lowercase()).filter(|label| !label.is_empty())
    };
    match worker.runtime() {
        Runtime::Vllm => worker.kv_connector().map(|connector| {
            let family = connector_transport(connector);
            match (family.as_str(), worker.label("moriio_mode").map(|mode| mode.trim().to_lowercase())) {
                ("moriio", Some(mode)) if mode == "read" || mode == "write" => format!("moriio-{mode}"),
                _ => family,
            }
        }),
        Runtime::Sglang => backend(),
        Runtime::Tokenspeed => Some(backend().unwrap_or_else(|| "mooncake".to_owned())),
        _ => None,
    }
}

/// Reduces a vLLM connector name to its transport: `nixl`, `mooncake`, `moriio`, `<family>-store`, or the lower-cased name.
pub fn connector_transport(connector: &str) -> String {
    let name = connector.to_lowercase();
    let store = name.contains("store") || name.contains("sharedstorage");
    match ["nixl", "mooncake", "moriio"].into_iter().find(|family| name.contains(family)) {
        Some(family) if store => format!("{family}-store"),
        Some(family) => family.to_owned(),
        None if name.starts_with("sharedstorage") => "shared-store".to_owned(),
        None if name.starts_with("flexkv") => "flexkv-store".to_owned(),
        None if name.starts_with("hf3fs") => "hf3fs-store".to_owned(),
        None => name,
    }
}

/// Compares two legs; an empty list means they pair. Otherwise it names each component that keeps them apart.
pub fn mismatch(prefill: &Descriptor, decode: &Descriptor, mode: PairingMode) -> Vec<String> {
    if prefill.wire != decode.wire {
        return vec!["connection_mode".to_owned()];
    }
    if mode == PairingMode::Off {
        let one_runtime = prefill.wire != Wire::Grpc || prefill.runtime == decode.runtime;
        return if one_runtime { Vec::new() } else { vec!["runtime".to_owned()] };
    }
    let strict = mode == PairingMode::Strict;
    let mut differing = Vec::new();
    compare("runtime", &prefill.runtime, &decode.runtime, strict, &mut differing);
    if !differing.is_empty() {
        return differing;
    }
    match (&prefill.protocol, &decode.protocol) {
        (Some(one), Some(other)) if one == other => return differing,
        (Some(_), Some(_)) => return vec!["pairing_protocol".to_owned()],
        (None, None) => {}
        _ if strict => return vec!["pairing_protocol".to_owned()],
        _ => {}
    }
    compare("transport", &prefill.transport, &decode.transport, strict, &mut differing);
    for (index, (label, _, _)) in LAYOUT.iter().enumerate() {
        match (&prefill.layout[index], &decode.layout[index]) {
            (Some(one), Some(other)) if one != other => differing.push((*label).to_owned()),
            (Some(_), None) | (None, Some(_)) if strict => differing.push(format!("unknown {label}")),
            _ => {}
        }
    }
    if strict
        && let (Some(one), Some(other)) = (&prefill.version, &decode.version)
        && one != other
    {
        differing.push("version".to_owned());
    }
    differing
}

fn compare<T: PartialEq>(name: &str, one: &Option<T>, other: &Option<T>, strict: bool, differing: &mut Vec<String>) {
    match (one, other) {
        (Some(one), Some(other)) if one != other => differing.push(name.to_owned()),
        (Some(_), Some(_)) => {}
        _ if strict => differing.push(format!("unknown {name}")),
        _ => {}
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::worker::{Facts, Health, Intent, Origin, WorkerId, WorkerSpec};

    fn vllm(transport: Option<&str>) -> Descriptor {
        Descriptor {
            wire: Wire::Http,
            runtime: Some(Runtime::Vllm),
            transport: transport.map(str::to_owned),
            layout: Default::default(),
            version: None,
            protocol: None,
        }
    }

    #[test]
    fn a_protocol_is_that_of_the_label_else_of_the_field_else_of_the_engine() {
        let protocol = |label: Option<&str>, field: Option<&str>, engine: Option<&str>| {
            let labels = |value: Option<&str>| {
                value.map(|value| ("pairing_protocol".to_owned(), value.to_owned())).into_iter().collect()
            };
            let mut spec = WorkerSpec::new("http://p:1", WorkerType::Prefill);
            spec.labels = labels(label);
            spec.pairing_protocol = field.map(str::to_owned);
            let worker = Worker {
                id: WorkerId(uuid::Uuid::from_u128(7)),
                spec,
                facts: Some(Facts { labels: labels(engine), ..Facts::default() }),
                health: Health::Ready,
                intent: Intent::Active,
                origin: Origin::Api,
                job: None,
                create_revision: 1,
                mod_revision: 1,
            };
            Descriptor::of(&worker).unwrap().protocol
        };
        let (label, field, engine) = (Some("label"), Some("field"), Some("engine"));
        for (sources, expected) in [
            ((label, field, engine), label),
            ((label, None, engine), label),
            ((None, field, engine), field),
            ((None, field, None), field),
            ((None, None, engine), engine),
            ((None, None, None), None),
            // An empty one takes back what the engine says.
            ((Some(" "), field, engine), None),
            ((None, Some(" trimmed "), engine), Some("trimmed")),
        ] {
            assert_eq!(protocol(sources.0, sources.1, sources.2).as_deref(), expected, "{sources:?}");
        }
    }

    #[test]
    fn the_key_is_runtime_transport_layout_with_question_marks_for_the_unknown() {
        let mut one = vllm(Some("nixl"));
        assert_eq!(one.key(), "vllm/nixl/?");
        one.layout = [Some("auto".into()), Some("16".into()), Some("flash_attn".into()), Some("torch.bfloat16".into())];
        assert_eq!(one.key(), "vllm/nixl/dtype=auto,page=16,attn=flash_attn,model=torch.bfloat16");
        one.layout[1] = None;
        assert_eq!(one.key(), "vllm/nixl/dtype=auto,attn=flash_attn,model=torch.bfloat16");
        one.protocol = Some("rack-7".into());
        assert_eq!(one.key(), "rack-7");
        assert_eq!(Descriptor { runtime: None, transport: None, protocol: None, ..vllm(None) }.key(), "?/?/?");
    }

    #[test]
    fn connector_names_fold_to_their_transport() {
        for (connector, transport) in [
            ("NixlConnector", "nixl"),
            ("MooncakeConnector", "mooncake"),
            ("MoRIIOConnector", "moriio"),
            ("MooncakeStoreConnector", "mooncake-store"),
            ("LMCacheConnectorV1", "lmcacheconnectorv1"),
        ] {
            assert_eq!(connector_transport(connector), transport);
        }
    }

    #[test]
    fn lenient_ignores_what_is_unknown_and_strict_does_not() {
        let (known, unknown) = (vllm(Some("nixl")), vllm(None));
        assert!(mismatch(&known, &unknown, PairingMode::Lenient).is_empty());
        assert_eq!(mismatch(&known, &unknown, PairingMode::Strict), ["unknown transport"]);
        assert_eq!(mismatch(&unknown, &unknown, PairingMode::Strict), ["unknown transport"]);
    }

    #[test]
    fn known_facts_that_differ_keep_legs_apart_and_each_is_named() {
        let mut one = vllm(Some("nixl"));
        let mut other = vllm(Some("mooncake"));
        one.layout = [Some("auto".into()), Some("16".into()), None, None];
        other.layout = [Some("fp8".into()), Some("16".into()), None, None];
        assert_eq!(mismatch(&one, &other, PairingMode::Lenient), ["transport", "kv_cache_dtype"]);
        assert!(mismatch(&one, &other, PairingMode::Off).is_empty());
        other.runtime = Some(Runtime::Sglang);
        assert_eq!(mismatch(&one, &other, PairingMode::Lenient), ["runtime"]);
    }

    #[test]
    fn a_layout_fact_of_one_leg_only_matters_in_strict_mode() {
        let mut one = vllm(Some("nixl"));
        one.layout[2] = Some("flash_attn".into());
        let other = vllm(Some("nixl"));
        assert!(mismatch(&one, &other, PairingMode::Lenient).is_empty());
        assert_eq!(mismatch(&one, &other, PairingMode::Strict), ["unknown attention_backend"]);
        assert!(mismatch(&other, &other, PairingMode::Strict).is_empty());
    }

    #[test]
    fn versions_are_compared_in_strict_mode_when_both_legs_report_one() {
        let one = Descriptor { version: Some("0.32.0".into()), ..vllm(Some("nixl")) };
        let other = Descriptor { version: Some("0.31.0".into()), ..vllm(Some("nixl")) };
        assert!(mismatch(&one, &other, PairingMode::Lenient).is_empty());
        assert_eq!(mismatch(&one, &other, PairingMode::Strict), ["version"]);
        assert!(mismatch(&one, &vllm(Some("nixl")), PairingMode::Strict).is_empty());
    }

    #[test]
    fn an_explicit_protocol_replaces_everything_but_the_runtime() {
        let explicit =
            |protocol: &str, transport: &str| Descriptor { protocol: Some(protocol.into()), ..vllm(Some(transport)) };
        let modes = [PairingMode::Lenient, PairingMode::Strict];
        for mode in modes {
            assert!(mismatch(&explicit("a", "nixl"), &explicit("a", "mooncake"), mode).is_empty());
            assert_eq!(mismatch(&explicit("a", "nixl"), &explicit("b", "nixl"), mode), ["pairing_protocol"]);
            let sglang = Descriptor { runtime: Some(Runtime::Sglang), ..explicit("a", "nixl") };
            assert_eq!(mismatch(&explicit("a", "nixl"), &sglang, mode), ["runtime"]);
        }
        assert!(mismatch(&explicit("a", "nixl"), &vllm(Some("nixl")), PairingMode::Lenient).is_empty());
        assert_eq!(mismatch(&explicit("a", "nixl"), &vllm(Some("mooncake")), PairingMode::Lenient), ["transport"]);
        assert_eq!(mismatch(&explicit("a", "nixl"), &vllm(Some("nixl")), PairingMode::Strict), ["pairing_protocol"]);
    }

    #[test]
    fn legs_on_different_wires_never_pair() {
        let grpc = Descriptor { wire: Wire::Grpc, ..vllm(Some("nixl")) };
        for mode in PairingMode::ALL {
            assert_eq!(mismatch(&vllm(Some("nixl")), &grpc, *mode), ["connection_mode"]);
        }
    }

    #[test]
    fn over_grpc_both_legs_are_of_one_runtime_whatever_the_mode() {
        let grpc = |runtime| Descriptor { wire: Wire::Grpc, runtime: Some(runtime), ..vllm(None) };
        for mode in PairingMode::ALL {
            assert_eq!(mismatch(&grpc(Runtime::Vllm), &grpc(Runtime::Sglang), *mode), ["runtime"], "{mode}");
        }
        assert!(mismatch(&grpc(Runtime::Vllm), &grpc(Runtime::Vllm), PairingMode::Off).is_empty());
        let http = |runtime| Descriptor { wire: Wire::Http, ..grpc(runtime) };
        assert!(mismatch(&http(Runtime::Vllm), &http(Runtime::Sglang), PairingMode::Off).is_empty());
    }
}
