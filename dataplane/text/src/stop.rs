//! Stop strings, over the boundaries of whatever the text came in.
//!
//! The output ends with the stop string that is complete first; of two complete at the same character the longer one (it
//! began earlier). Until then only the longest end of the text that may still become a stop string is held back, never a
//! part of a character.

use crate::markers::{Markers, Search};

/// Looks for stop strings in one sample's text.
#[derive(Debug, Clone)]
pub struct StopMatcher {
    stops: Vec<String>,
    markers: Markers,
    search: Search,
    /// The end of the text that is held back.
    held: String,
    keep: bool,
    matched: Option<usize>,
}

impl StopMatcher {
    /// A matcher of `stops`; empty ones never match. `keep`: whether the stop string stays in the text.
    #[must_use]
    pub fn new(stops: Vec<String>, keep: bool) -> Self {
        let markers = Markers::new(&stops);
        Self { search: markers.search(), markers, stops, held: String::new(), keep, matched: None }
    }

    /// Takes the next piece of text and returns what is certain to be output; nothing after a match.
    pub fn push(&mut self, text: &str) -> String {
        if self.matched.is_some() {
            return String::new();
        }
        if self.markers.is_empty() {
            return text.to_owned();
        }
        let before = self.held.len();
        let found = self.search.feed(&self.markers, text);
        self.held.push_str(text);
        let Some(found) = found else { return self.release() };
        self.matched = Some(found.number);
        let end = before + found.end;
        self.held.truncate(if self.keep { end } else { end - found.length });
        std::mem::take(&mut self.held)
    }

    /// The same for text within which the output may not end yet: a stop string that is complete by now does not count.
    pub fn pass(&mut self, text: &str) -> String {
        if self.matched.is_some() || self.markers.is_empty() {
            return self.push(text);
        }
        let mut rest = text;
        while let Some(found) = self.search.feed(&self.markers, rest) {
            rest = rest.get(found.end..).unwrap_or_default();
        }
        self.held.push_str(text);
        self.release()
    }

    /// What may not become a stop string any more.
    fn release(&mut self) -> String {
        let kept = self.held.split_off(self.held.len() - self.search.held());
        std::mem::replace(&mut self.held, kept)
    }

    /// The text has ended: what was held back was no stop string.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// The stop string that matched.
    #[must_use]
    pub fn matched(&self) -> Option<&str> {
        self.matched.and_then(|number| self.stops.get(number)).map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What a whole text becomes: cut at the stop that is complete first.
    fn oracle(text: &str, stops: &[String], keep: bool) -> (String, Option<String>) {
        for end in (0..=text.len()).filter(|end| text.is_char_boundary(*end)) {
            let ended = stops.iter().filter(|stop| !stop.is_empty() && text[..end].ends_with(stop.as_str()));
            if let Some(stop) = ended.max_by_key(|stop| stop.len()) {
                let visible = if keep { end } else { end - stop.len() };
                return (text[..visible].to_owned(), Some(stop.clone()));
            }
        }
        (text.to_owned(), None)
    }

    proptest! {
        #[test]
        fn any_cutting_gives_what_the_whole_text_gives(
            pieces in prop::collection::vec("[ab<é🦀]{0,5}", 0..8),
            stops in prop::collection::vec("[ab<é🦀]{0,4}", 0..4),
            keep: bool,
        ) {
            let mut matcher = StopMatcher::new(stops.clone(), keep);
            let mut output: String = pieces.iter().map(|piece| matcher.push(piece)).collect();
            output.push_str(&matcher.finish());
            let expected = oracle(&pieces.concat(), &stops, keep);
            prop_assert_eq!((output, matcher.matched().map(str::to_owned)), expected);
        }

        #[test]
        fn no_more_is_held_than_may_become_a_stop(text in "[ab<é]{0,12}", stops in prop::collection::vec("[ab<é]{1,4}", 1..4)) {
            let mut matcher = StopMatcher::new(stops.clone(), false);
            let output = matcher.push(&text);
            if matcher.matched().is_none() {
                let held = &text[output.len()..];
                prop_assert!(held.is_empty() || stops.iter().any(|stop| stop.starts_with(held) && stop != held));
            }
        }
    }

    #[test]
    fn a_stop_within_text_that_may_not_end_does_not_count_but_one_that_ends_behind_it_does() {
        let mut matcher = StopMatcher::new(vec!["END".to_owned()], false);
        assert_eq!(matcher.pass("one END two E"), "one END two ");
        assert_eq!(matcher.push("ND three"), "");
        assert_eq!(matcher.matched(), Some("END"));
        let mut without = StopMatcher::new(Vec::new(), false);
        assert_eq!(without.pass("one END"), "one END");
    }

    #[test]
    fn nothing_is_output_after_a_stop() {
        let mut matcher = StopMatcher::new(vec!["END".to_owned()], false);
        assert_eq!(matcher.push("one EN"), "one ");
        assert_eq!(matcher.push("D two"), "");
        assert_eq!(matcher.push("three") + &matcher.finish(), "");
        assert_eq!(matcher.matched(), Some("END"));
    }
}
