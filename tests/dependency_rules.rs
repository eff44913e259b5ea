//! The architecture's dependency rules, checked on what cargo resolves.
//!
//! Dependencies point `src → {controlplane, dataplane} → shared → proto/messages`, the two planes never meet below `src`,
//! and the crates that decide things stay free of clocks, sockets and randomness, so that every replica and every gateway
//! reaches the same verdict. A comment cannot keep that; this test does.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeSet;
use std::process::Command;

use cargo_metadata::{DependencyKind, Metadata, MetadataCommand, Package};

/// Crates whose code must be a pure function of its arguments.
const PURE: [&str; 5] = ["smg-fleet", "smg-admission", "smg-state", "smg-policies", "smg-apis"];

/// What a pure crate must not even link: runtimes, sockets and sources of randomness.
const IMPURE: [&str; 9] = ["tokio", "tokio-util", "tonic", "hyper", "mio", "socket2", "rand", "rand_core", "getrandom"];

/// What the engine adapters and the text crate must not link: they describe and translate, the gateway sends. The text crate
/// is as pure as its code (no clock, no randomness), but links `rand` with the tokenizers, which train with it.
const SENDS: [&str; 5] = ["tokio", "tonic", "hyper", "mio", "socket2"];

fn workspace() -> Metadata {
    MetadataCommand::new().manifest_path(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")).no_deps().exec().unwrap()
}

/// The folder of the top level a package lies in; the root package is `src`.
fn folder<'a>(metadata: &'a Metadata, package: &'a Package) -> &'a str {
    let path = package.manifest_path.strip_prefix(&metadata.workspace_root).unwrap();
    let mut components = path.components().map(|component| component.as_str());
    components.next().filter(|first| *first != "Cargo.toml").unwrap_or("src")
}

/// Declared dependencies of `package` that are packages of this workspace.
fn inner<'a>(metadata: &'a Metadata, package: &Package, kinds: &[DependencyKind]) -> Vec<&'a Package> {
    let names = package.dependencies.iter().filter(|dependency| kinds.contains(&dependency.kind));
    let names: BTreeSet<&str> = names.map(|dependency| dependency.name.as_str()).collect();
    metadata.packages.iter().filter(|candidate| names.contains(candidate.name.as_str())).collect()
}

/// Names of everything `package` links on this platform, itself included, with the features it asks for itself.
fn closure(package: &str) -> BTreeSet<String> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let output = Command::new(cargo)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(["tree", "--locked", "--offline", "--edges", "normal", "--prefix", "none", "--package", package])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines = String::from_utf8(output.stdout).unwrap();
    let names: BTreeSet<String> =
        lines.lines().filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect();
    assert!(names.contains(package), "{lines}");
    names
}

#[test]
fn dependencies_point_from_the_binary_over_the_planes_and_shared_crates_to_the_messages() {
    let metadata = workspace();
    for package in &metadata.packages {
        let from = folder(&metadata, package);
        for dependency in inner(&metadata, package, &[DependencyKind::Normal, DependencyKind::Build]) {
            let to = folder(&metadata, dependency);
            let allowed = match from {
                "src" => to != "tests",
                "controlplane" | "dataplane" => to == from || to == "shared" || to == "proto",
                "shared" => to == "shared" || dependency.name.as_str() == "smg-messages",
                "proto" => to == "proto",
                // A mock that shared more than the wire with what it tests would share its mistakes.
                "tests" => to == "proto",
                other => panic!("{} lies in the unknown folder {other}", package.name),
            };
            assert!(allowed, "{} ({from}) must not depend on {} ({to})", package.name, dependency.name);
        }
    }
}

#[test]
fn the_two_planes_never_link_each_other() {
    let metadata = workspace();
    let crates_of = |plane: &str| -> BTreeSet<String> {
        let packages = metadata.packages.iter().filter(|package| folder(&metadata, package) == plane);
        packages.map(|package| package.name.to_string()).collect()
    };
    for (plane, other) in [("controlplane", "dataplane"), ("dataplane", "controlplane")] {
        let other = crates_of(other);
        for name in crates_of(plane) {
            let linked = closure(&name);
            let foreign: Vec<_> = linked.intersection(&other).collect();
            assert!(foreign.is_empty(), "{name} links {foreign:?}");
        }
    }
}

#[test]
fn pure_crates_link_no_runtime_no_socket_and_no_randomness() {
    for name in PURE {
        let linked = closure(name);
        let impure: Vec<_> = IMPURE.iter().filter(|impure| linked.contains(**impure)).collect();
        assert!(impure.is_empty(), "{name} links {impure:?}");
    }
}

#[test]
fn engine_adapters_and_text_cannot_send_anything() {
    for name in ["smg-engines", "smg-text"] {
        let linked = closure(name);
        let senders: Vec<_> = SENDS.iter().filter(|sender| linked.contains(**sender)).collect();
        assert!(senders.is_empty(), "{name} links {senders:?}");
    }
}

#[test]
fn only_the_store_names_openraft_and_redb() {
    for package in &workspace().packages {
        for dependency in &package.dependencies {
            let guarded = dependency.name.starts_with("openraft") || dependency.name == "redb";
            assert!(!guarded || package.name.as_str() == "smg-store", "{} names {}", package.name, dependency.name);
        }
    }
}

#[test]
fn messages_depend_on_prost_alone() {
    let metadata = workspace();
    let messages = metadata.packages.iter().find(|package| package.name.as_str() == "smg-messages").unwrap();
    let normal = messages.dependencies.iter().filter(|dependency| dependency.kind == DependencyKind::Normal);
    let names: Vec<&str> = normal.map(|dependency| dependency.name.as_str()).collect();
    assert!(names.iter().all(|name| ["prost", "prost-types"].contains(name)), "{names:?}");
}

#[test]
fn the_mock_engine_is_a_dev_dependency_only() {
    for package in &workspace().packages {
        for dependency in package.dependencies.iter().filter(|dependency| dependency.name == "mock-engine") {
            assert_eq!(dependency.kind, DependencyKind::Development, "{} links mock-engine", package.name);
        }
    }
    assert!(!closure("smg").contains("mock-engine"));
}

#[test]
fn versions_are_declared_in_the_root_manifest_only() {
    for package in &workspace().packages {
        let manifest = std::fs::read_to_string(&package.manifest_path).unwrap();
        let mut in_dependencies = false;
        for line in manifest.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
            if line.starts_with('[') {
                in_dependencies = line.contains("dependencies") && !line.starts_with("[workspace");
            } else if in_dependencies {
                assert!(line.contains("workspace = true"), "{}: {line}", package.name);
            }
        }
    }
}
