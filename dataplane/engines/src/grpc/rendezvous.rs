//! Where two legs that are sent at once meet: the prefill's bootstrap server, and a room number there.
//!
//! A room serves one prompt and sample once. TokenSpeed places both legs on the data-parallel rank that the room leaves
//! as remainder, so a room for one rank is drawn among those with that remainder; the ranks of SGLang are named in the
//! requests, and rooms that agree with them harm nothing. (SMG PD docs, Parallel Dispatch.)

/// Port of a prefill worker's bootstrap server when it was registered without one.
pub const BOOTSTRAP_PORT: u16 = 8998;

/// The meeting point of one attempt of one sample: the same on both legs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendezvous {
    /// Host of the prefill worker, IPv6 in brackets ([`crate::sglang::bootstrap_host`]).
    pub host: String,
    /// Port of its bootstrap server.
    pub port: u16,
    /// The room.
    pub room: u64,
}

impl Rendezvous {
    /// A meeting in `room`, which is one of [`super::sglang::room`] or [`super::tokenspeed::room`]. No `port` =
    /// [`BOOTSTRAP_PORT`].
    pub fn new(host: impl Into<String>, port: Option<u16>, room: u64) -> Self {
        Self { host: host.into(), port: port.unwrap_or(BOOTSTRAP_PORT), room }
    }
}

/// The data-parallel rank that a room must lead to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Residue {
    rank: u32,
    size: u32,
}

impl Residue {
    /// Rank `rank` of `size`; none when there is only one, or no such rank.
    pub fn new(rank: u32, size: u32) -> Option<Self> {
        (size > 1 && rank < size).then_some(Self { rank, size })
    }
}

/// A room below `limit` from a random word, evenly.
pub(super) fn room(random: u64, limit: u64, residue: Option<Residue>) -> u64 {
    // The high half of a product spreads the word over the range without a modulo's bias.
    let below = |limit: u64| ((u128::from(random) * u128::from(limit)) >> 64) as u64;
    match residue {
        None => below(limit),
        Some(Residue { rank, size }) => {
            let (rank, size) = (u64::from(rank), u64::from(size));
            let base = below(limit.saturating_sub(size));
            base - base % size + rank
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_prefill_without_a_bootstrap_port_is_met_on_8998() {
        assert_eq!(Rendezvous::new("h", None, 1).port, 8998);
        assert_eq!(Rendezvous::new("h", Some(9000), 1).port, 9000);
    }

    proptest! {
        #[test]
        fn a_room_lies_below_its_limit_and_leads_to_its_rank(
            random: u64, limit in (1u64 << 31) - 1..1 << 63, size in 1u32..1024, rank in 0u32..1024,
        ) {
            prop_assert!(room(random, limit, None) < limit);
            match Residue::new(rank, size) {
                None => prop_assert!(size == 1 || rank >= size),
                residue => {
                    let room = room(random, limit, residue);
                    prop_assert!(room < limit);
                    prop_assert_eq!(room % u64::from(size), u64::from(rank));
                }
            }
        }
    }
}
