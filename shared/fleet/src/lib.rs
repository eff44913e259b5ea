//! The fleet's domain model, shared by both planes.
//!
//! Everything here is pure: no clock, no randomness, no I/O. The control plane decides with these types and gateways route with them,
//! so both must reach the same verdict on the same bytes.
//!
//! * [`worker`]: what an operator registers, what the engine reported, what the fleet intends with it;
//! * [`url`]: worker addresses, normalised so that one engine is one worker;
//! * [`pairing`]: which prefill can hand its KV cache to which decode;
//! * [`matrix`]: the same, as operators ask it;
//! * [`overrides`]: what a registration overrides of the settings;
//! * [`policy`]: policy documents;
//! * [`settings`]: what holds for a model by them;
//! * [`protection`]: what documents say about overload and admission;
//! * [`tuning`]: what documents say about how policies decide;
//! * [`access`]: admin tokens, their roles, and how a secret is judged;
//! * [`listing`]: which engine answers at an address;
//! * [`mooncake`]: who a Mooncake prefill engine is;
//! * [`dp`]: data-parallel ranks as workers of their own;
//! * [`cluster`]: settings of the cluster as a whole;
//! * [`snapshot`]: what gateways receive, and the deltas between two of them;
//! * [`info`]: the REST shape of a worker;
//! * [`wire`]: conversions to and from the prost messages of disk and wire.

pub mod access;
pub mod cluster;
pub mod dp;
pub mod info;
pub mod listing;
pub mod matrix;
pub mod mooncake;
mod object;
pub mod overrides;
pub mod pairing;
pub mod policy;
pub mod protection;
pub mod settings;
pub mod snapshot;
pub mod tuning;
pub mod url;
pub mod validate;
pub mod wire;
pub mod worker;

pub use access::{AdminToken, Role, Secret, StartupToken, TokenHash};
pub use cluster::ClusterSettings;
pub use policy::{PolicyDocument, PolicyRecord};
pub use settings::Settings;
pub use snapshot::{Delta, Snapshot};
pub use url::WorkerUrl;
pub use worker::{
    Facts, Health, Intent, Job, JobKind, JobStatus, ModelCard, Origin, Runtime, Wire, Worker, WorkerId, WorkerSpec,
    WorkerType,
};

/// Counts state-changing commands. Strictly increasing within one history.
pub type Revision = u64;
