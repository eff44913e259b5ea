//! W3C trace context: who this request belongs to (Trace Context Level 1, `traceparent` of version 00).
//!
//! A header that breaks the rules is ignored and the request begins a trace of its own, as the standard asks.

use std::fmt;

/// Name of the header.
pub const TRACEPARENT: &str = "traceparent";

/// One span of one trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpanContext {
    /// The trace; not zero.
    pub trace_id: u128,
    /// The span; not zero.
    pub span_id: u64,
}

/// What a client's header says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parent {
    /// The client's span: this request is part of its trace.
    Sampled(SpanContext),
    /// The client's trace is not recorded, so neither is this request's part.
    NotSampled,
}

impl SpanContext {
    /// A span of a new trace.
    pub fn new_trace() -> Self {
        Self { trace_id: rand::random::<u128>() | 1, span_id: new_span_id() }
    }

    /// Another span of the same trace.
    pub fn sibling(self) -> Self {
        Self { span_id: new_span_id(), ..self }
    }
}

/// A random id that is not zero.
fn new_span_id() -> u64 {
    rand::random::<u64>() | 1
}

/// The value of a `traceparent` header: this span, recorded.
impl fmt::Display for SpanContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{:032x}-{:016x}-01", self.trace_id, self.span_id)
    }
}

impl Parent {
    /// Reads a header; `None` when it is malformed.
    pub fn parse(header: &str) -> Option<Self> {
        let mut fields = header.trim().split('-');
        let (version, trace, span, flags) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
        let version = hexadecimal(version, 2).filter(|version| *version != 0xff)?;
        // Later versions may have further fields; this one has not.
        if version == 0 && fields.next().is_some() {
            return None;
        }
        let trace_id = hexadecimal(trace, 32).filter(|id| *id != 0)?;
        let span_id = u64::try_from(hexadecimal(span, 16)?).ok().filter(|id| *id != 0)?;
        let sampled = hexadecimal(flags, 2)? & 1 == 1;
        Some(if sampled { Self::Sampled(SpanContext { trace_id, span_id }) } else { Self::NotSampled })
    }
}

/// A number of exactly `digits` lower-case hexadecimal digits.
fn hexadecimal(text: &str, digits: usize) -> Option<u128> {
    let fits = text.len() == digits && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    fits.then(|| u128::from_str_radix(text, 16).ok()).flatten()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
    const SPAN: &str = "00f067aa0ba902b7";

    #[test]
    fn a_span_reads_as_it_is_written() {
        let context = SpanContext::new_trace();
        assert_eq!(Parent::parse(&context.to_string()), Some(Parent::Sampled(context)));
        assert_eq!(context.sibling().trace_id, context.trace_id);
        assert_ne!(context.sibling().span_id, context.span_id);
    }

    #[test]
    fn a_trace_that_is_not_recorded_stays_unrecorded() {
        assert_eq!(Parent::parse(&format!("00-{TRACE}-{SPAN}-00")), Some(Parent::NotSampled));
        assert_eq!(Parent::parse(&format!("00-{TRACE}-{SPAN}-02")), Some(Parent::NotSampled));
    }

    #[test]
    fn later_versions_are_read_by_what_is_known_of_them() {
        assert!(matches!(Parent::parse(&format!("01-{TRACE}-{SPAN}-01-more")), Some(Parent::Sampled(_))));
    }

    #[test]
    fn malformed_headers_are_ignored() {
        let zero_trace = "0".repeat(32);
        for header in [
            String::new(),
            format!("00-{TRACE}-{SPAN}"),
            format!("00-{TRACE}-{SPAN}-01-more"),
            format!("ff-{TRACE}-{SPAN}-01"),
            format!("00-{zero_trace}-{SPAN}-01"),
            format!("00-{TRACE}-0000000000000000-01"),
            format!("00-{}-{SPAN}-01", TRACE.to_uppercase()),
            format!("00-{TRACE}-{SPAN}-1"),
            format!("00-{TRACE}-+0f067aa0ba902b7-01"),
        ] {
            assert_eq!(Parent::parse(&header), None, "{header}");
        }
    }
}
