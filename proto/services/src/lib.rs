//! gRPC services between the planes, and those of engines. Generated from `proto/`, here and in `smg-messages`.
#![allow(missing_docs, clippy::large_enum_variant)]

/// The snapshot subscription of gateways.
pub mod sync {
    tonic::include_proto!("smg.sync.v1");
}

/// The admin API.
pub mod admin {
    tonic::include_proto!("smg.admin.v1");
}

/// The schema of [`admin`], as reflection shows it: an encoded `FileDescriptorSet`.
pub const ADMIN_DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/admin.bin"));

/// What members of the control plane say to each other.
pub mod raft {
    tonic::include_proto!("smg.raft.v1");
}

/// What the store uses of etcd.
pub mod etcd {
    tonic::include_proto!("etcdserverpb");
}

/// The services of engines, with their messages.
pub mod engines {
    /// What all engines share.
    pub use smg_messages::engines::common;

    /// SGLang's scheduler.
    pub mod sglang {
        pub use smg_messages::engines::sglang::*;
        tonic::include_proto!("sglang.grpc.scheduler");
    }
    /// vLLM's engine.
    pub mod vllm {
        pub use smg_messages::engines::vllm::*;
        tonic::include_proto!("vllm.grpc.engine");
    }
    /// TokenSpeed's scheduler.
    pub mod tokenspeed {
        pub use smg_messages::engines::tokenspeed::*;
        tonic::include_proto!("tokenspeed.grpc.scheduler");
    }
}
