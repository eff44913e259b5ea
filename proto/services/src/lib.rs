//! gRPC services between the planes. Generated from `proto/`.
#![allow(missing_docs, clippy::large_enum_variant)]

/// The snapshot subscription of gateways.
pub mod sync {
    tonic::include_proto!("smg.sync.v1");
}

/// What members of the control plane say to each other.
pub mod raft {
    tonic::include_proto!("smg.raft.v1");
}
