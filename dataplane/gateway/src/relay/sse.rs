//! Reading server-sent events without decoding them. Pure.
//!
//! The relay forwards bytes as they come; it needs to know three things about them: whether output has begun (comments are not output),
//! whether the stream stands between two events (only there may something be put in), and where the end marker `data: [DONE]` with its
//! blank line ends. Lines end with LF, CR or CRLF; chunks may cut anywhere, within a character too.

/// Longest line prefix that matters: `data: [DONE]` and one byte more, to tell a longer line from it.
const PREFIX: usize = 13;

/// The state of a scan over one stream.
#[derive(Debug)]
pub struct Scanner {
    prefix: [u8; PREFIX],
    line_len: usize,
    after_cr: bool,
    done_line: bool,
    boundary: bool,
    output: bool,
}

impl Default for Scanner {
    fn default() -> Self {
        Self { prefix: [0; PREFIX], line_len: 0, after_cr: false, done_line: false, boundary: true, output: false }
    }
}

impl Scanner {
    /// Whether an event with data has been seen.
    pub fn has_output(&self) -> bool {
        self.output
    }

    /// Whether the stream stands between two events.
    pub fn at_boundary(&self) -> bool {
        self.boundary && self.line_len == 0
    }

    /// Reads the next bytes. `Some(n)`: the end marker is complete with the first `n` of them.
    pub fn feed(&mut self, bytes: &[u8]) -> Option<usize> {
        let mut start = 0;
        if self.after_cr && bytes.first() == Some(&b'\n') {
            start = 1;
        }
        if !bytes.is_empty() {
            self.after_cr = false;
        }
        while let Some(found) = bytes.get(start..).and_then(|rest| memchr::memchr2(b'\n', b'\r', rest)) {
            let end = start + found;
            self.extend(bytes.get(start..end).unwrap_or_default());
            let mut next = end + 1;
            if bytes.get(end) == Some(&b'\r') {
                match bytes.get(next) {
                    Some(b'\n') => next += 1,
                    Some(_) => {}
                    None => self.after_cr = true,
                }
            }
            if self.end_line() {
                return Some(next);
            }
            start = next;
        }
        self.extend(bytes.get(start..).unwrap_or_default());
        None
    }

    fn extend(&mut self, part: &[u8]) {
        for (slot, byte) in self.prefix.iter_mut().skip(self.line_len).zip(part) {
            *slot = *byte;
        }
        self.line_len = self.line_len.saturating_add(part.len());
        if !part.is_empty() {
            self.boundary = false;
        }
    }

    /// Ends a line; true when it was the blank line after the end marker.
    fn end_line(&mut self) -> bool {
        let line = self.prefix.get(..self.line_len.min(PREFIX)).unwrap_or_default();
        let blank = line.is_empty();
        let ended = blank && self.done_line;
        if blank {
            self.boundary = true;
        } else {
            self.done_line = matches!(line, b"data: [DONE]" | b"data:[DONE]");
            self.output |= line.starts_with(b"data:") && !self.done_line;
        }
        self.line_len = 0;
        ended
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn scan(stream: &[u8], cuts: &[usize]) -> (Option<usize>, bool) {
        let mut scanner = Scanner::default();
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut % (stream.len() + 1)).collect();
        cuts.extend([0, stream.len()]);
        cuts.sort_unstable();
        for pair in cuts.windows(2) {
            if let Some(end) = scanner.feed(&stream[pair[0]..pair[1]]) {
                return (Some(pair[0] + end), scanner.has_output());
            }
        }
        (None, scanner.has_output())
    }

    proptest! {
        #[test]
        fn the_end_marker_is_found_however_the_stream_is_cut(cuts in proptest::collection::vec(0usize..200, 0..12)) {
            for end in ["\n", "\r\n", "\r"] {
                let stream = format!(": ping{end}{end}data: {{\"a\":\"[DONE]🙂\"}}{end}{end}data: [DONE]{end}{end}");
                let (found, output) = scan(stream.as_bytes(), &cuts);
                // A CRLF cut in two leaves its LF behind the marker.
                prop_assert!(found == Some(stream.len()) || (end == "\r\n" && found == Some(stream.len() - 1)));
                prop_assert!(output);
            }
        }
    }

    #[test]
    fn comments_are_not_output_and_text_that_looks_like_the_marker_does_not_end_the_stream() {
        assert_eq!(scan(b": ping\n\n: ping\n\n", &[]), (None, false));
        for stream in ["data: [DONE]x\n\n", "x data: [DONE]\n\n", "data: [DONE]\nmore\n\n", "data: [DONE]\n"] {
            assert_eq!(scan(stream.as_bytes(), &[]).0, None, "{stream:?}");
        }
    }

    #[test]
    fn the_stream_is_between_events_only_after_a_blank_line() {
        let mut scanner = Scanner::default();
        assert!(scanner.at_boundary());
        for (bytes, between) in [("data: a", false), ("b\n", false), ("\n", true), (":", false), ("\n\n", true)] {
            scanner.feed(bytes.as_bytes());
            assert_eq!(scanner.at_boundary(), between, "{bytes:?}");
        }
    }

    #[test]
    fn what_follows_the_marker_in_the_same_chunk_is_left_out() {
        assert_eq!(scan(b"data: [DONE]\n\ndata: late\n\n", &[]).0, Some(14));
    }
}
