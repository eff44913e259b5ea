//! From when to when a certificate is valid, read from its DER form (RFC 5280 section 4.1).
//!
//! The library that verifies certificates keeps this to itself, and operators want to know before it happens. Nothing is decided here:
//! whether a certificate is good is the verifier's word alone.

use std::time::Duration;

const SEQUENCE: u8 = 0x30;
const VERSION: u8 = 0xa0;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;
const DAY: u64 = 86_400;

/// A certificate's time, in seconds since the Unix epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Validity {
    /// When it begins.
    pub not_before: u64,
    /// When it ends.
    pub not_after: u64,
}

/// How a certificate stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Nothing needs to be done.
    Fresh,
    /// It should have been renewed: less than a fifth of its time is left, and less than 30 days.
    Ending,
    /// Nobody accepts it any more.
    Expired,
}

impl Validity {
    /// Reads it from a certificate; `None` when that is none.
    pub fn of(certificate: &[u8]) -> Option<Self> {
        let (tag, certificate, _) = element(certificate)?;
        let (inner_tag, mut fields, _) = element(certificate)?;
        if tag != SEQUENCE || inner_tag != SEQUENCE {
            return None;
        }
        // version (absent in the first one), serial number, signature algorithm, issuer, then the validity.
        if fields.first() == Some(&VERSION) {
            fields = element(fields)?.2;
        }
        for _ in 0..3 {
            fields = element(fields)?.2;
        }
        let (tag, validity, _) = element(fields)?;
        let (from, first, rest) = element(validity)?;
        let (to, second, _) = element(rest)?;
        let whole = tag == SEQUENCE;
        whole.then_some(Self { not_before: time(from, first)?, not_after: time(to, second)? })
    }

    /// How it stands at `now`, in seconds since the Unix epoch.
    pub fn stage(&self, now: u64) -> Stage {
        let left = self.not_after.saturating_sub(now);
        let fifth = self.not_after.saturating_sub(self.not_before) / 5;
        match left {
            0 => Stage::Expired,
            left if left < fifth.min(30 * DAY) => Stage::Ending,
            _ => Stage::Fresh,
        }
    }

    /// What is left of it at `now`.
    pub fn left(&self, now: u64) -> Duration {
        Duration::from_secs(self.not_after.saturating_sub(now))
    }
}

/// The first element of `bytes`: its tag, its content, and what follows.
fn element(bytes: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (tag, rest) = bytes.split_first()?;
    let (first, rest) = rest.split_first()?;
    let (length, rest) = match first {
        0..=0x7f => (usize::from(*first), rest),
        0x81..=0x84 => {
            let (length, rest) = rest.split_at_checked(usize::from(first & 0x7f))?;
            (length.iter().fold(0, |length, byte| (length << 8) | usize::from(*byte)), rest)
        }
        _ => return None,
    };
    let (content, rest) = rest.split_at_checked(length)?;
    Some((*tag, content, rest))
}

/// `YYMMDDhhmmssZ` (years from 1950) or `YYYYMMDDhhmmssZ`.
fn time(tag: u8, text: &[u8]) -> Option<u64> {
    let (year_digits, century) = match tag {
        UTC_TIME => (2, None),
        GENERALIZED_TIME => (4, Some(0)),
        _ => return None,
    };
    let digits = text.strip_suffix(b"Z")?;
    if digits.len() != year_digits + 10 || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let number = |digits: &[u8]| digits.iter().fold(0u64, |number, digit| number * 10 + u64::from(digit - b'0'));
    let (year, rest) = digits.split_at(year_digits);
    let year = number(year);
    let year = century.map_or(if year < 50 { 2000 + year } else { 1900 + year }, |_| year);
    let mut pairs = rest.chunks(2).map(number);
    let mut next = || pairs.next();
    let (month, day, hour, minute, second) = (next()?, next()?, next()?, next()?, next()?);
    if !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    let days = days_since_epoch(year, month, day)?;
    Some(days * DAY + hour * 3_600 + minute * 60 + second)
}

/// Days from 1970-01-01 to a day of the Gregorian calendar; years begin in March, so that a leap day is the last one of its year.
fn days_since_epoch(year: u64, month: u64, day: u64) -> Option<u64> {
    let (year, month) = if month > 2 { (year, month - 3) } else { (year.checked_sub(1)?, month + 9) };
    let days = year * 365 + year / 4 - year / 100 + year / 400 + (month * 153 + 2) / 5 + day - 1;
    // 719,468 days lie between 0000-03-01 and 1970-01-01.
    days.checked_sub(719_468)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use rcgen::{CertificateParams, KeyPair};

    use super::*;

    #[test]
    fn the_time_of_a_certificate_is_what_was_written_into_it() {
        let key = KeyPair::generate().unwrap();
        for (from, to) in
            [((1999, 12, 31), (2000, 2, 29)), ((2026, 1, 1), (2049, 12, 31)), ((2024, 3, 1), (2150, 6, 15))]
        {
            let mut params = CertificateParams::new(Vec::new()).unwrap();
            params.not_before = rcgen::date_time_ymd(from.0, from.1, from.2);
            params.not_after = rcgen::date_time_ymd(to.0, to.1, to.2);
            let expected = Validity {
                not_before: u64::try_from(params.not_before.unix_timestamp()).unwrap(),
                not_after: u64::try_from(params.not_after.unix_timestamp()).unwrap(),
            };
            let certificate = params.self_signed(&key).unwrap();
            assert_eq!(Validity::of(certificate.der()), Some(expected));
            for end in 0..120 {
                assert_eq!(Validity::of(&certificate.der()[..end]), None, "a part is no certificate");
            }
        }
    }

    #[test]
    fn a_certificate_ends_late_in_its_life_and_never_a_month_before() {
        let year = Validity { not_before: 0, not_after: 365 * DAY };
        assert_eq!(year.stage(300 * DAY), Stage::Fresh);
        assert_eq!(year.stage(336 * DAY), Stage::Ending);
        assert_eq!(year.stage(365 * DAY), Stage::Expired);
        let day = Validity { not_before: 0, not_after: DAY };
        assert_eq!(day.stage(DAY / 2), Stage::Fresh);
        assert_eq!(day.stage(DAY / 10 * 9), Stage::Ending);
    }
}
