//! Prost messages of the state, the snapshots, the disk and the engines. Generated; conversions to domain types live
//! beside their user.
#![allow(missing_docs, clippy::large_enum_variant)]

mod generated {
    pub mod admission {
        pub mod v1 {
            include!(concat!(env!("OUT_DIR"), "/smg.admission.v1.rs"));
        }
    }
    pub mod state {
        pub mod v1 {
            include!(concat!(env!("OUT_DIR"), "/smg.state.v1.rs"));
        }
    }
    pub mod disk {
        pub mod v1 {
            include!(concat!(env!("OUT_DIR"), "/smg.disk.v1.rs"));
        }
    }
}

/// What engines take and give over gRPC; the services are in `smg-services`.
pub mod engines {
    /// What all engines share.
    pub mod common {
        include!(concat!(env!("OUT_DIR"), "/smg.grpc.common.rs"));
    }
    /// SGLang's scheduler.
    pub mod sglang {
        include!(concat!(env!("OUT_DIR"), "/sglang.grpc.scheduler.rs"));
    }
    /// vLLM's engine.
    pub mod vllm {
        include!(concat!(env!("OUT_DIR"), "/vllm.grpc.engine.rs"));
    }
    /// TokenSpeed's scheduler.
    pub mod tokenspeed {
        include!(concat!(env!("OUT_DIR"), "/tokenspeed.grpc.scheduler.rs"));
    }
}

/// The slot ledger.
pub use generated::admission::v1 as admission;
/// What the Raft store writes to disk.
pub use generated::disk::v1 as disk;
/// Workers, policies, commands, snapshots and deltas.
pub use generated::state::v1 as state;
