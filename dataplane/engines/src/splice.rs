//! Editing a body without touching what is not edited.
//!
//! A leg's body is the client's bytes with a few members replaced, removed or added. The result is a short list of
//! shared slices of the original with small new pieces in between; nothing large is copied or parsed again.
//!
//! Invariants:
//! - Bytes outside edited members stay as they are: white space, order, key spellings, number texts, and duplicates of
//!   fields that no edit names.
//! - A set field occurs exactly once afterwards, in plain spelling. It takes the place of its last occurrence, or
//!   becomes the last member.
//! - A removed field does not occur afterwards.
//! - A valid object stays a valid object.

use std::convert::Infallible;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{BufMut, Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};
use smallvec::SmallVec;
use smg_fleet::policy::ClientHandoffFields;

use crate::body::{ClientBody, Member};
use crate::field::{Field, HANDOFF_FIELDS};
use crate::json;

/// What to change in a body. Each field has at most one edit; a later one replaces an earlier one.
#[derive(Debug, Clone, Default)]
pub struct Edits {
    /// `None` removes the field.
    edits: SmallVec<[(Field, Option<Bytes>); 14]>,
}

impl Edits {
    /// The edits every leg of `body` starts from: with [`ClientHandoffFields::Strip`], the client's handoff fields are
    /// removed, also where vLLM looks for them a second time.
    pub fn for_leg(body: &ClientBody, client_fields: ClientHandoffFields) -> Self {
        let mut edits = Self::default();
        if client_fields == ClientHandoffFields::Strip {
            for field in HANDOFF_FIELDS {
                edits.remove(field);
            }
            if let Some(extra) = body.value(Field::VllmXargs).and_then(without_handoff) {
                edits.set(Field::VllmXargs, extra);
            }
        }
        edits
    }

    /// Gives `field` the value `json`, which must be the text of one valid JSON value.
    pub fn set(&mut self, field: Field, json: impl Into<Bytes>) {
        self.push(field, Some(json.into()));
    }

    /// Removes every occurrence of `field`.
    pub fn remove(&mut self, field: Field) {
        self.push(field, None);
    }

    /// New members appear in the order in which they were last set.
    fn push(&mut self, field: Field, value: Option<Bytes>) {
        self.edits.retain(|(edited, _)| *edited != field);
        self.edits.push((field, value));
    }

    fn get(&self, field: Field) -> Option<&Option<Bytes>> {
        self.edits.iter().find(|(edited, _)| *edited == field).map(|(_, value)| value)
    }
}

/// The object without its handoff fields; none when it is no object or has none of them.
fn without_handoff(object: &str) -> Option<String> {
    let (mut kept, mut removed) = (String::new(), false);
    json::each_member(object, |key, value| {
        let field = json::string(key).and_then(|name| Field::from_name(&name));
        if field.is_some_and(|field| HANDOFF_FIELDS.contains(&field)) {
            removed = true;
            return;
        }
        let pieces = [if kept.is_empty() { "" } else { "," }, key, ":", value];
        kept.extend(pieces);
    })
    .ok()?;
    removed.then(|| format!("{{{kept}}}"))
}

impl ClientBody {
    /// This body with `edits` applied.
    pub fn splice(&self, edits: &Edits) -> SplicedBody {
        let mut assembly = Assembly::new(self.bytes());
        // Up to the first member; holds no comma.
        assembly.keep(0..self.members.first().map_or(self.inside, |member| member.key.start()));
        let mut first = true;
        let mut previous_end = self.inside;
        for (index, member) in self.members.iter().enumerate() {
            let gap = previous_end..member.key.start();
            previous_end = member.value.end();
            let edit = member.field.and_then(|field| edits.get(field).map(|value| (field, value)));
            // A dropped member takes the gap with the comma in front of it along.
            let replacement = match edit {
                None => None,
                Some((_, None)) => continue,
                Some((field, Some(_))) if self.occurs_after(index, field) => continue,
                Some((field, Some(value))) => Some((field, value)),
            };
            if !first {
                assembly.keep(gap);
            }
            first = false;
            match replacement {
                None => assembly.keep(member.key.start()..member.value.end()),
                Some((field, value)) => assembly.replace(member, field, value),
            }
        }
        for (field, value) in &edits.edits {
            let Some(value) = value else { continue };
            if self.has(*field) {
                continue;
            }
            if !first {
                assembly.write(b",");
            }
            first = false;
            assembly.write_key(*field);
            assembly.write(b":");
            assembly.write(value);
        }
        assembly.keep(previous_end..self.bytes().len());
        assembly.finish()
    }

    fn occurs_after(&self, index: usize, field: Field) -> bool {
        self.members[index + 1..].iter().any(|member| member.field == Some(field))
    }
}

/// Collects kept and new pieces, joining neighbours. At most one of `kept` and `fresh` is non-empty.
struct Assembly<'a> {
    source: &'a Bytes,
    segments: SmallVec<[Bytes; 8]>,
    kept: Range<usize>,
    fresh: BytesMut,
}

impl<'a> Assembly<'a> {
    fn new(source: &'a Bytes) -> Self {
        Self { source, segments: SmallVec::new(), kept: 0..0, fresh: BytesMut::new() }
    }

    fn keep(&mut self, range: Range<usize>) {
        if range.is_empty() {
            return;
        }
        if self.fresh.is_empty() && self.kept.end == range.start {
            self.kept.end = range.end;
            return;
        }
        self.flush();
        self.kept = range;
    }

    fn write(&mut self, bytes: &[u8]) {
        if !self.kept.is_empty() {
            self.flush();
        }
        self.fresh.put_slice(bytes);
    }

    fn write_key(&mut self, field: Field) {
        self.write(b"\"");
        self.write(field.name().as_bytes());
        self.write(b"\"");
    }

    /// Keeps a member but for its value, and but for its key when that is spelled with escapes.
    fn replace(&mut self, member: &Member, field: Field, value: &[u8]) {
        let plain_length = field.name().len() + 2;
        if member.key.range().len() == plain_length {
            self.keep(member.key.range());
        } else {
            self.write_key(field);
        }
        self.keep(member.key.end()..member.value.start());
        self.write(value);
    }

    fn flush(&mut self) {
        if !self.kept.is_empty() {
            self.segments.push(self.source.slice(self.kept.clone()));
            self.kept = 0..0;
        }
        if !self.fresh.is_empty() {
            self.segments.push(self.fresh.split().freeze());
        }
    }

    fn finish(mut self) -> SplicedBody {
        self.flush();
        let remaining = self.segments.iter().map(|segment| segment.len() as u64).sum();
        SplicedBody { segments: self.segments, next: 0, remaining }
    }
}

/// An edited body, ready to be sent. A clone shares all bytes, so a leg can be sent again.
#[derive(Debug, Clone)]
pub struct SplicedBody {
    /// Non-empty pieces in order.
    segments: SmallVec<[Bytes; 8]>,
    next: usize,
    remaining: u64,
}

impl SplicedBody {
    /// Bytes not yet sent; the content length before the first frame is taken.
    pub fn len(&self) -> u64 {
        self.remaining
    }

    /// Whether everything has been sent.
    pub fn is_empty(&self) -> bool {
        self.remaining == 0
    }

    /// Everything not yet sent as one piece. Copies unless there is only one segment.
    pub fn to_bytes(&self) -> Bytes {
        match &self.segments[self.next..] {
            [] => Bytes::new(),
            [only] => only.clone(),
            several => several.concat().into(),
        }
    }
}

impl Body for SplicedBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let next = self.next;
        // Taking the piece lets its memory go as soon as it is written.
        let Some(segment) = self.segments.get_mut(next).map(std::mem::take) else { return Poll::Ready(None) };
        self.next += 1;
        self.remaining -= segment.len() as u64;
        Poll::Ready(Some(Ok(Frame::data(segment))))
    }

    fn is_end_stream(&self) -> bool {
        self.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.remaining)
    }
}
