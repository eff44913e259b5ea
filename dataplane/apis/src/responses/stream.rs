//! A response as a stream of events (OpenAI, "Streaming events").
//!
//! Every event has a name, a `type` that repeats it and a `sequence_number`. An item is added, its part is added, deltas follow, and
//! then text, part and item are each said to be done, with all of their content. The last event holds the whole response; there is no
//! `[DONE]`.

use bytes::BytesMut;

use super::Stored;
use super::entries::Entries;
use super::object::{Response, Status};
use crate::answer::{Answer, Failure};
use crate::blocks::Kind;
use crate::output::{Finish, Step};
use crate::write::{END_OF_EVENT, Put as _};

pub(super) struct Stream {
    response: Response,
    sequence: u64,
}

impl Stream {
    pub fn new(response: Response) -> Self {
        Self { response, sequence: 0 }
    }

    /// Begins an event: its name and the members that all have.
    fn event<'a>(&mut self, name: &str, out: &'a mut BytesMut) -> &'a mut BytesMut {
        out.raw("event: response.").raw(name).raw("\ndata: {\"type\":\"response.").raw(name);
        out.raw("\",\"sequence_number\":").number(self.sequence);
        self.sequence += 1;
        out
    }

    /// An event that holds the response.
    fn of_response(&mut self, name: &str, status: Status<'_>, out: &mut BytesMut) {
        self.event(name, out).raw(",\"response\":");
        self.response.write(status, out);
        out.raw("}").raw(END_OF_EVENT);
    }

    /// An event that holds an item with its text.
    fn of_item(&mut self, name: &str, at: usize, text: &str, status: &str, out: &mut BytesMut) {
        self.event(name, out).raw(",\"output_index\":").number(at as u64).raw(",\"item\":");
        self.response.write_item(at, text, status, out);
        out.raw("}").raw(END_OF_EVENT);
    }

    /// Begins an event within an item.
    fn within<'a>(&mut self, name: &str, at: usize, out: &'a mut BytesMut) -> &'a mut BytesMut {
        self.event(name, out).raw(",\"item_id\":");
        self.response.write_item_id(at, out);
        out.raw(",\"output_index\":").number(at as u64)
    }

    /// An event that holds a part with its text.
    fn of_part(&mut self, name: &str, at: usize, text: &str, out: &mut BytesMut) {
        self.within(name, at, out).raw(",\"content_index\":0,\"part\":");
        self.response.write_part(at, text, out);
        out.raw("}").raw(END_OF_EVENT);
    }

    /// More of an item's text.
    fn delta(&mut self, at: usize, kind: Kind, text: &str, entries: &[u8], out: &mut BytesMut) {
        let name = match kind {
            Kind::Text => "output_text.delta",
            Kind::Reasoning => "reasoning_text.delta",
            Kind::Call => "function_call_arguments.delta",
        };
        self.within(name, at, out);
        if kind != Kind::Call {
            out.raw(",\"content_index\":0");
        }
        out.raw(",\"delta\":").string(text);
        if kind == Kind::Text {
            out.raw(",\"logprobs\":");
            Entries::write(entries, out);
        }
        out.raw("}").raw(END_OF_EVENT);
    }

    fn open(&mut self, at: usize, kind: Kind, out: &mut BytesMut) {
        self.of_item("output_item.added", at, "", "in_progress", out);
        if kind != Kind::Call {
            self.of_part("content_part.added", at, "", out);
        }
    }

    fn close(&mut self, at: usize, status: &str, out: &mut BytesMut) {
        let Some(block) = self.response.blocks.list.get_mut(at) else { return };
        let kind = block.kind;
        // Lent to the events that repeat it.
        let text = std::mem::take(&mut block.text);
        match kind {
            Kind::Text => {
                self.within("output_text.done", at, out).raw(",\"content_index\":0,\"text\":").string(&text);
                out.raw(",\"logprobs\":");
                Entries::write(self.response.entries.of(at), out);
            }
            Kind::Reasoning => {
                self.within("reasoning_text.done", at, out).raw(",\"content_index\":0,\"text\":").string(&text);
            }
            Kind::Call => {
                self.within("function_call_arguments.done", at, out);
                if let Some(block) = self.response.blocks.list.get(at) {
                    out.raw(",\"name\":").string(&block.name).raw(",\"arguments\":").string(&text);
                }
            }
        }
        out.raw("}").raw(END_OF_EVENT);
        if kind != Kind::Call {
            self.of_part("content_part.done", at, &text, out);
        }
        self.of_item("output_item.done", at, &text, status, out);
        if let Some(block) = self.response.blocks.list.get_mut(at) {
            block.text = text;
        }
    }
}

impl Answer for Stream {
    fn start(&mut self, out: &mut BytesMut) {
        self.of_response("created", Status::InProgress, out);
        self.of_response("in_progress", Status::InProgress, out);
    }

    fn step(&mut self, step: &Step, out: &mut BytesMut) {
        if step.sample != 0 {
            return;
        }
        let mut entries = self.response.entries.settle(step, self.response.form.top_logprobs);
        for piece in &step.pieces {
            let Some(placed) = self.response.blocks.place(piece) else { continue };
            let (at, delta) = (placed.block, placed.delta);
            let Some(kind) = self.response.blocks.list.get(at).map(|block| block.kind) else { continue };
            if let Some(closed) = placed.closed {
                self.close(closed, "completed", out);
            }
            if placed.opened {
                self.open(at, kind, out);
            }
            let with_it = if kind == Kind::Text { std::mem::take(&mut entries) } else { BytesMut::new() };
            self.response.entries.keep(at, &with_it);
            if !delta.is_empty() {
                self.delta(at, kind, delta, &with_it, out);
            }
        }
    }

    fn finish(&mut self, finish: &Finish, out: &mut BytesMut) {
        if finish.sample != 0 || self.response.finish.is_some() {
            return;
        }
        self.response.finish = Some(Finish { prompt_logprobs: Vec::new(), ..finish.clone() });
        if let Some(at) = self.response.blocks.close() {
            let status = self.response.item_status(at, self.response.status());
            self.close(at, status, out);
        }
    }

    fn end(&mut self, out: &mut BytesMut) {
        let status = self.response.status();
        let name = match status {
            Status::Completed => "completed",
            Status::Incomplete => "incomplete",
            Status::InProgress | Status::Failed(_) => "failed",
        };
        self.of_response(name, status, out);
    }

    fn fail(&mut self, failure: &Failure, out: &mut BytesMut) {
        self.of_response("failed", Status::Failed(&failure.message), out);
    }

    fn stored(&mut self) -> Option<Stored> {
        self.response.stored()
    }
}
