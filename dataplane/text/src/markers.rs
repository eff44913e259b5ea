//! Finding strings in a text that comes in pieces.
//!
//! Each string is followed by its own automaton (Knuth, Morris, Pratt), byte by byte, so a piece of text is looked at once
//! and what is found depends on the text alone, not on where it was cut. An automaton's state is the length of the longest
//! prefix of its string that the text ends with: the longest of these is exactly what has to be held back, and as text and
//! strings are UTF-8, it begins at a character.

/// Strings to look for; empty ones are left out.
#[derive(Debug, Clone, Default)]
pub(crate) struct Markers {
    patterns: Vec<Pattern>,
}

#[derive(Debug, Clone)]
struct Pattern {
    /// Which of the given strings it is.
    number: usize,
    bytes: Box<[u8]>,
    /// For each prefix, by length - 1: the length of its longest proper prefix that it also ends with.
    borders: Box<[usize]>,
}

impl Pattern {
    fn new(number: usize, text: &str) -> Self {
        let bytes: Box<[u8]> = text.as_bytes().into();
        let mut borders = vec![0; bytes.len()].into_boxed_slice();
        let mut length = 0;
        for at in 1..bytes.len() {
            while length > 0 && bytes[at] != bytes[length] {
                length = borders[length - 1];
            }
            length += usize::from(bytes[at] == bytes[length]);
            borders[at] = length;
        }
        Self { number, bytes, borders }
    }

    /// The state after one more byte.
    fn step(&self, mut state: usize, byte: u8) -> usize {
        while state > 0 && byte != self.bytes[state] {
            state = self.borders[state - 1];
        }
        state + usize::from(byte == self.bytes[state])
    }
}

/// A marker that was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Found {
    /// Which of the given strings.
    pub number: usize,
    /// Its length in bytes.
    pub length: usize,
    /// Where it ends, in bytes of the piece that was fed.
    pub end: usize,
}

impl Markers {
    pub(crate) fn new<S: AsRef<str>>(texts: impl IntoIterator<Item = S>) -> Self {
        let numbered = texts.into_iter().enumerate().filter(|(_, text)| !text.as_ref().is_empty());
        Self { patterns: numbered.map(|(number, text)| Pattern::new(number, text.as_ref())).collect() }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.patterns.is_empty()
    }

    /// A search at its start.
    pub(crate) fn search(&self) -> Search {
        Search { states: vec![0; self.patterns.len()] }
    }
}

/// A search in progress; it belongs to the markers that it was made from.
#[derive(Debug, Clone)]
pub(crate) struct Search {
    states: Vec<usize>,
}

impl Search {
    /// Goes on with `text`, up to the marker that ends first; of several ending there the longest. Afterwards the search is
    /// at its start again, and what follows the marker has not been looked at.
    pub(crate) fn feed(&mut self, markers: &Markers, text: &str) -> Option<Found> {
        if self.states.is_empty() {
            return None;
        }
        for (at, byte) in text.bytes().enumerate() {
            let mut found: Option<Found> = None;
            for (state, pattern) in self.states.iter_mut().zip(&markers.patterns) {
                *state = pattern.step(*state, byte);
                let length = pattern.bytes.len();
                if *state == length && found.is_none_or(|best| best.length < length) {
                    found = Some(Found { number: pattern.number, length, end: at + 1 });
                }
            }
            if found.is_some() {
                self.states.fill(0);
                return found;
            }
        }
        None
    }

    /// Bytes at the end of what was fed that may be the beginning of a marker.
    pub(crate) fn held(&self) -> usize {
        self.states.iter().copied().max().unwrap_or(0)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_marker_is_found_across_pieces_and_what_may_begin_one_is_held() {
        let markers = Markers::new(["</think>", ""]);
        let mut search = markers.search();
        assert_eq!(search.feed(&markers, "so </th"), None);
        assert_eq!(search.held(), 4);
        assert_eq!(search.feed(&markers, "ink> yes").unwrap(), Found { number: 0, length: 8, end: 4 });
        assert_eq!(search.held(), 0);
    }

    #[test]
    fn a_failed_beginning_may_hold_another() {
        let markers = Markers::new(["aab"]);
        let mut search = markers.search();
        assert_eq!(search.feed(&markers, "aa"), None);
        assert_eq!(search.feed(&markers, "a"), None);
        assert_eq!(search.held(), 2);
        assert_eq!(search.feed(&markers, "b").unwrap().end, 1);
    }

    #[test]
    fn the_marker_that_ends_first_wins_and_of_two_ending_together_the_longer() {
        let markers = Markers::new(["abcd", "bc", "xbc"]);
        let mut search = markers.search();
        assert_eq!(search.feed(&markers, "abcd").unwrap(), Found { number: 1, length: 2, end: 3 });
        assert_eq!(search.feed(&markers, "xbc").unwrap().number, 2);
    }
}
