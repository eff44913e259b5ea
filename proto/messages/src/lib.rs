//! Prost messages of the state, the snapshots and the disk. Generated; conversions to domain types live beside their user.
#![allow(missing_docs, clippy::large_enum_variant)]

mod generated {
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

/// What the Raft store writes to disk.
pub use generated::disk::v1 as disk;
/// Workers, policies, commands, snapshots and deltas.
pub use generated::state::v1 as state;
