//! Routing policies: which of the available workers serves a leg.
//!
//! A policy is pure: candidates, the request and a random word come in, an index goes out. It performs no I/O, reads no
//! clock and draws no randomness of its own, so every decision can be replayed. State that spans requests (a rotation, a
//! record of prompts, pinned keys) is bounded; time, where it matters, comes with the request.
//!
//! The caller has already removed every worker that may not be used; a policy never has to judge health. Each leg has
//! its own instance, so that a rotation over prefills is not disturbed by one over decodes.
//!
//! Placement by hash (`consistent_hashing`, `prefix_hash` while loads are even) depends on the key and the URLs of the
//! candidates alone: every gateway that sees the same candidates chooses the same worker.

mod bucket;
mod cache_aware;
mod consistent_hashing;
mod fingerprint;
mod least_load;
mod lru;
mod manual;
mod pins;
mod power_of_two;
mod prefix_hash;
mod random;
mod request;
mod ring;
mod round_robin;
mod sticky;
mod tuning;
mod wait;

pub use bucket::{Bucket, BucketTuning};
pub use cache_aware::{CacheAware, CacheAwareTuning};
pub use consistent_hashing::ConsistentHashing;
pub use least_load::{LeastLoad, LeastLoadTuning};
pub use manual::{Manual, ManualTuning};
pub use power_of_two::PowerOfTwo;
pub use prefix_hash::{PrefixHash, PrefixHashTuning};
pub use random::Random;
pub use request::{Candidate, LoadReport, Partition, RequestView, WorkerKey};
pub use ring::{MAX_RINGS, VIRTUAL_NODES};
pub use round_robin::{MAX_CANDIDATE_SETS, RoundRobin};
pub use smg_fleet::policy::PolicyName;
pub use smg_fleet::tuning::{AssignmentMode, CacheIndex, LoadMetric};
pub use sticky::{Lease, MAX_CONCURRENT, Sticky};
pub use tuning::Tuning;
pub use wait::WaitTuning;

/// A decision with its reason.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pick {
    /// The chosen candidate.
    pub index: Option<usize>,
    /// Which rule of the policy decided: the `branch` label of its metric. The policy's name if it has one rule only.
    pub branch: &'static str,
    /// The share of the prompt that a record of earlier prompts knew, 0 to 1, where one was asked.
    pub match_ratio: Option<f64>,
}

impl Pick {
    const fn new(index: Option<usize>, branch: &'static str) -> Self {
        Self { index, branch, match_ratio: None }
    }
}

/// What a policy remembers, for gauges.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Entries: pinned keys, or nodes of the record of prompts.
    pub entries: usize,
    /// Bytes they take, bookkeeping included, as the limit counts them.
    pub bytes: usize,
    /// Bytes of prompt text among them.
    pub text_bytes: usize,
    /// Prompt tokens among them.
    pub tokens: usize,
    /// Heads of prompts among the entries.
    pub placements: usize,
    /// Workers they refer to.
    pub workers: usize,
}

/// A routing policy.
pub trait Policy: Send + Sync + std::fmt::Debug {
    /// Its name, as in flags, documents and the `policy` metric label.
    fn name(&self) -> PolicyName;

    /// The index of the chosen candidate. None when there are no candidates, and where a policy says so: a client's
    /// strict wish that cannot be met, a cap that all candidates have reached.
    ///
    /// `entropy` is a fresh, uniformly random word for every call. Candidates come in an order that is stable as long
    /// as the set does not change.
    fn pick(&self, candidates: &[Candidate<'_>], request: &RequestView<'_>, entropy: u64) -> Option<usize>;

    /// As [`Policy::pick`], with the reason.
    fn decide(&self, candidates: &[Candidate<'_>], request: &RequestView<'_>, entropy: u64) -> Pick {
        Pick::new(self.pick(candidates, request, entropy), self.name().as_str())
    }

    /// Whether decisions depend on the prompt: where none of a request's policies asks for it, nobody reads it.
    fn reads_prompt(&self) -> bool {
        false
    }

    /// Whether decisions depend on the session: where they do not, nobody reads it.
    fn reads_session(&self) -> bool {
        false
    }

    /// The chosen candidate was claimed for the request. Whoever holds the lease, if there is one, keeps it counted as running there.
    fn begin(&self, _candidate: &Candidate<'_>, _request: &RequestView<'_>) -> Option<Lease> {
        None
    }

    /// The leg's workers are now exactly these, available or not: what is remembered of others is forgotten.
    fn retain(&self, _workers: &[WorkerKey]) {}

    /// How many keys it keeps on the worker at `url`.
    fn keys_on(&self, _url: &str) -> u64 {
        0
    }

    /// What it remembers at the moment.
    fn footprint(&self) -> Footprint {
        Footprint::default()
    }
}

/// The leg a policy is meant for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leg {
    /// Regular workers: the only leg.
    Regular,
    /// The prefill leg.
    Prefill,
    /// The decode leg.
    Decode,
}

/// Why a policy cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// No policy has this name.
    #[error("unknown policy `{0}`")]
    Unknown(String),
    /// The policy is documented, but this version does not have it.
    #[error("policy `{}` is not available in this version", .0.as_str())]
    NotAvailable(PolicyName),
    /// The policy cannot choose decode workers.
    #[error("policy `{}` cannot be used for the decode leg", .0.as_str())]
    NotForDecode(PolicyName),
}

/// The policy called `name`, for `leg`.
///
/// # Errors
/// See [`PolicyError`]; a name that fits no leg and a policy that is yet to come are told apart.
pub fn parse(name: &str, leg: Leg) -> Result<PolicyName, PolicyError> {
    let policy = PolicyName::from_name(name).ok_or_else(|| PolicyError::Unknown(name.to_owned()))?;
    build(policy, leg).map(|_| policy)
}

/// A new instance of `policy` for `leg`, with the documented tuning.
///
/// # Errors
/// The policy does not fit the leg or is not available.
pub fn build(policy: PolicyName, leg: Leg) -> Result<Box<dyn Policy>, PolicyError> {
    build_with(policy, leg, &Tuning::default())
}

/// A new instance of `policy` for `leg`.
///
/// # Errors
/// The policy does not fit the leg or is not available.
pub fn build_with(policy: PolicyName, leg: Leg, tuning: &Tuning) -> Result<Box<dyn Policy>, PolicyError> {
    let built: Box<dyn Policy> = match policy {
        PolicyName::RoundRobin => Box::new(RoundRobin::default()),
        PolicyName::Random => Box::new(Random),
        PolicyName::PowerOfTwo => Box::new(PowerOfTwo::new(tuning.power_of_two)),
        PolicyName::LeastLoad => Box::new(LeastLoad::new(tuning.least_load.clone())),
        PolicyName::CacheAware => Box::new(CacheAware::new(tuning.cache_aware.clone())),
        PolicyName::PrefixHash => Box::new(PrefixHash::new(tuning.prefix_hash.clone())),
        PolicyName::ConsistentHashing => Box::new(ConsistentHashing::default()),
        PolicyName::Manual => Box::new(Manual::new(tuning.manual.clone())),
        PolicyName::Bucket if leg == Leg::Decode => return Err(PolicyError::NotForDecode(policy)),
        PolicyName::Bucket => Box::new(Bucket::new(tuning.bucket.clone())),
        PolicyName::Passthrough => return Err(PolicyError::NotAvailable(policy)),
    };
    Ok(match &tuning.sticky {
        Some(sessions) if tuning::follows_sessions(policy) => Box::new(Sticky::new(built, sessions.clone())),
        _ => built,
    })
}

/// A uniform index below `length` from a uniform word. The bias is below `length` / 2^64.
fn uniform(word: u64, length: usize) -> usize {
    ((u128::from(word) * length as u128) >> u64::BITS) as usize
}

/// A second word that is independent of the first for the purpose of picking workers (the finaliser of SplitMix64).
fn next_word(word: u64) -> u64 {
    let mut z = word.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;

    #[test]
    fn every_documented_name_is_known_and_builds_the_policy_of_that_name() {
        for name in [
            "round_robin",
            "random",
            "power_of_two",
            "least_load",
            "cache_aware",
            "prefix_hash",
            "consistent_hashing",
            "manual",
        ] {
            for leg in [Leg::Regular, Leg::Prefill, Leg::Decode] {
                let policy = build(parse(name, leg).unwrap(), leg).unwrap();
                assert_eq!(policy.name().as_str(), name);
            }
        }
        assert_eq!(build(parse("bucket", Leg::Prefill).unwrap(), Leg::Prefill).unwrap().name(), PolicyName::Bucket);
        let absent = parse("passthrough", Leg::Regular).unwrap_err();
        assert_eq!(absent, PolicyError::NotAvailable(PolicyName::Passthrough));
        assert!(absent.to_string().contains("passthrough"));
        assert_eq!(parse("best_effort", Leg::Prefill), Err(PolicyError::Unknown("best_effort".into())));
        assert_eq!(parse("Random", Leg::Prefill), Err(PolicyError::Unknown("Random".into())));
    }

    #[test]
    fn bucket_is_refused_for_decode_with_its_own_reason() {
        assert_eq!(parse("bucket", Leg::Decode), Err(PolicyError::NotForDecode(PolicyName::Bucket)));
    }
}
