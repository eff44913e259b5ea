//! The fleet's domain model: workers, pairing, policies, snapshots.
