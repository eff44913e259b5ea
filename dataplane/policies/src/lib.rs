//! Routing policies: which of the available workers serves a leg.
//!
//! A policy is pure: candidates, the request and a random word come in, an index goes out. It performs no I/O, reads no
//! clock and draws no randomness of its own, so every decision can be replayed. State that spans requests (a rotation)
//! is bounded and shared between threads without blocking in the common case.
//!
//! The caller has already removed every worker that may not be used; a policy never has to judge health. Each leg has
//! its own instance, so that a rotation over prefills is not disturbed by one over decodes.

mod power_of_two;
mod random;
mod round_robin;

pub use power_of_two::PowerOfTwo;
pub use random::Random;
pub use round_robin::{MAX_CANDIDATE_SETS, RoundRobin};
pub use smg_fleet::policy::PolicyName;

/// Identity of a worker, stable over its registration: the 128 bits of its id.
pub type WorkerKey = u128;

/// A worker that may serve the leg.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate<'a> {
    /// Its identity.
    pub id: WorkerKey,
    /// Its URL, with the rank suffix if it is one rank of an engine.
    pub url: &'a str,
    /// Requests this gateway has in flight on it.
    pub load: u64,
}

/// What policies may know about the request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RequestView<'a> {
    /// The model that serves the request.
    pub model: &'a str,
}

impl<'a> RequestView<'a> {
    /// A request for `model`.
    pub const fn new(model: &'a str) -> Self {
        Self { model }
    }
}

/// A routing policy.
pub trait Policy: Send + Sync + std::fmt::Debug {
    /// Its name, as in flags, documents and the `policy` metric label.
    fn name(&self) -> PolicyName;

    /// The index of the chosen candidate: none exactly when there are no candidates.
    ///
    /// `entropy` is a fresh, uniformly random word for every call. Candidates come in an order that is stable as long
    /// as the set does not change.
    fn pick(&self, candidates: &[Candidate<'_>], request: &RequestView<'_>, entropy: u64) -> Option<usize>;
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

/// A new instance of `policy` for `leg`.
///
/// # Errors
/// The policy does not fit the leg or is not available.
pub fn build(policy: PolicyName, leg: Leg) -> Result<Box<dyn Policy>, PolicyError> {
    match policy {
        PolicyName::RoundRobin => Ok(Box::new(RoundRobin::default())),
        PolicyName::Random => Ok(Box::new(Random)),
        PolicyName::PowerOfTwo => Ok(Box::new(PowerOfTwo)),
        PolicyName::Bucket if leg == Leg::Decode => Err(PolicyError::NotForDecode(policy)),
        later => Err(PolicyError::NotAvailable(later)),
    }
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
    fn every_documented_name_is_known_and_those_to_come_say_so() {
        for name in ["round_robin", "random", "power_of_two"] {
            for leg in [Leg::Regular, Leg::Prefill, Leg::Decode] {
                let policy = build(parse(name, leg).unwrap(), leg).unwrap();
                assert_eq!(policy.name().as_str(), name);
            }
        }
        for name in
            ["cache_aware", "prefix_hash", "consistent_hashing", "least_load", "manual", "bucket", "passthrough"]
        {
            let error = parse(name, Leg::Prefill).unwrap_err();
            assert_eq!(error, PolicyError::NotAvailable(PolicyName::from_name(name).unwrap()));
            assert!(error.to_string().contains(name));
        }
        assert_eq!(parse("best_effort", Leg::Prefill), Err(PolicyError::Unknown("best_effort".into())));
        assert_eq!(parse("Random", Leg::Prefill), Err(PolicyError::Unknown("Random".into())));
    }

    #[test]
    fn bucket_is_refused_for_decode_with_its_own_reason() {
        assert_eq!(parse("bucket", Leg::Decode), Err(PolicyError::NotForDecode(PolicyName::Bucket)));
    }
}
