//! Dividing slots: integer max-min fairness.
//!
//! Nobody gets more than it asks for while another gets less than it asks for and less than the first. What is left over when all have what
//! they ask for is spread equally over those that belong to the pool, so that the next request needs no message.

/// One who asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claimant {
    /// Slots it uses and waits for.
    pub wants: u32,
    /// Whether it gets a part of what nobody asks for.
    pub belongs: bool,
}

impl Claimant {
    /// What it is given before anything is spread: an eighth more than it wants, one at least, so that a growing demand finds a slot ready.
    fn asks(self) -> u64 {
        let wants = u64::from(self.wants);
        if self.belongs { wants + (wants / 8).max(1) } else { wants }
    }
}

/// Divides `slots`, in the order of `claimants`. The sum is `slots` if anybody belongs, and at most `slots` always.
pub fn divide(slots: u32, claimants: &[Claimant]) -> Vec<u32> {
    let mut given = vec![0u64; claimants.len()];
    let mut left = u64::from(slots);
    let mut asking: Vec<usize> = (0..claimants.len()).filter(|index| claimants[*index].asks() > 0).collect();
    while left > 0 && !asking.is_empty() {
        let part = (left / asking.len() as u64).max(1);
        asking.retain(|&index| {
            let more = part.min(claimants[index].asks() - given[index]).min(left);
            given[index] += more;
            left -= more;
            given[index] < claimants[index].asks()
        });
    }
    let belonging: Vec<usize> = (0..claimants.len()).filter(|index| claimants[*index].belongs).collect();
    if let Some(count) = std::num::NonZeroU64::new(belonging.len() as u64) {
        let (each, odd) = (left / count, left % count);
        for (position, index) in belonging.into_iter().enumerate() {
            given[index] += each + u64::from((position as u64) < odd);
        }
    }
    // No part exceeds `slots`, which is a u32.
    given.into_iter().map(|part| u32::try_from(part).unwrap_or(u32::MAX)).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn asks(wants: &[u32]) -> Vec<Claimant> {
        wants.iter().map(|wants| Claimant { wants: *wants, belongs: true }).collect()
    }

    #[test]
    fn equal_demands_get_equal_parts_and_idle_ones_leave_theirs() {
        assert_eq!(divide(8, &asks(&[100, 100])), [4, 4]);
        assert_eq!(divide(64, &asks(&[1000, 0, 0, 0])), [61, 1, 1, 1]);
        assert_eq!(divide(5, &asks(&[0, 0])), [3, 2], "the odd one goes to the first");
    }

    #[test]
    fn whoever_does_not_belong_gets_what_it_asks_for_and_no_more() {
        let outsider = Claimant { wants: 2, belongs: false };
        assert_eq!(divide(10, &[asks(&[0])[0], outsider]), [8, 2]);
        assert_eq!(divide(10, &[outsider]), [2]);
        assert_eq!(divide(10, &[]), [] as [u32; 0]);
    }

    proptest! {
        #[test]
        fn parts_are_max_min_fair(slots in 0u32..300, wants in proptest::collection::vec((0u32..100, any::<bool>()), 0..12)) {
            let claimants: Vec<_> = wants.into_iter().map(|(wants, belongs)| Claimant { wants, belongs }).collect();
            let given = divide(slots, &claimants);
            let sum: u64 = given.iter().map(|part| u64::from(*part)).sum();
            prop_assert!(sum <= u64::from(slots));
            if claimants.iter().any(|claimant| claimant.belongs) {
                prop_assert_eq!(sum, u64::from(slots), "no slot is left");
            }
            for (index, claimant) in claimants.iter().enumerate() {
                if u64::from(given[index]) < claimant.asks() {
                    // Who gets less than it asks for gets as much as anybody, but for one that does not divide.
                    for other in &given {
                        prop_assert!(*other <= given[index] + 1, "{:?} {:?}", claimants, given);
                    }
                }
            }
        }
    }
}
