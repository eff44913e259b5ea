//! A message as a stream of events.
//!
//! `message_start`, then for every block `content_block_start`, deltas and `content_block_stop`, then `message_delta` with the reason
//! and the usage, and `message_stop` (Anthropic, "Streaming messages"). A thinking block ends with its signature, which is empty: these
//! models do not sign.

use bytes::BytesMut;

use super::{stop_reason, write_usage};
use crate::answer::{Answer, Failure, Origin};
use crate::blocks::{Block, Blocks, Kind};
use crate::output::{Finish, Step, Usage};
use crate::write::{END_OF_EVENT, Put as _};

pub(super) struct Stream {
    origin: Origin,
    blocks: Blocks,
    finished: bool,
}

impl Stream {
    pub fn new(origin: Origin, parallel: bool) -> Self {
        Self { origin, blocks: Blocks::new(false, parallel), finished: false }
    }

    fn close(&self, block: usize, out: &mut BytesMut) {
        if self.blocks.list.get(block).is_some_and(|block| block.kind == Kind::Reasoning) {
            delta(block, "signature_delta\",\"signature", "", out);
        }
        out.raw("event: content_block_stop\ndata: {\"type\":\"content_block_stop\",\"index\":").number(block as u64);
        out.raw("}").raw(END_OF_EVENT);
    }
}

fn open(index: usize, block: &Block, out: &mut BytesMut) {
    out.raw("event: content_block_start\ndata: {\"type\":\"content_block_start\",\"index\":").number(index as u64);
    out.raw(",\"content_block\":");
    match block.kind {
        Kind::Text => out.raw("{\"type\":\"text\",\"text\":\"\"}"),
        Kind::Reasoning => out.raw("{\"type\":\"thinking\",\"thinking\":\"\",\"signature\":\"\"}"),
        Kind::Call => {
            out.raw("{\"type\":\"tool_use\",\"id\":").string(&block.id).raw(",\"name\":").string(&block.name);
            out.raw(",\"input\":{}}")
        }
    };
    out.raw("}").raw(END_OF_EVENT);
}

/// A delta, whose `kind` is its type and the name of its text.
fn delta(index: usize, kind: &str, text: &str, out: &mut BytesMut) {
    out.raw("event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":").number(index as u64);
    out.raw(",\"delta\":{\"type\":\"").raw(kind).raw("\":").string(text).raw("}}").raw(END_OF_EVENT);
}

impl Answer for Stream {
    fn start(&mut self, out: &mut BytesMut) {
        out.raw("event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"id\":").string(&self.origin.id);
        out.raw(",\"type\":\"message\",\"role\":\"assistant\",\"model\":").string(&self.origin.model);
        out.raw(",\"content\":[],\"stop_reason\":null,\"stop_sequence\":null,\"usage\":");
        write_usage(&Usage { prompt_tokens: self.origin.prompt_tokens, ..Usage::default() }, out);
        out.raw("}}").raw(END_OF_EVENT);
    }

    fn step(&mut self, step: &Step, out: &mut BytesMut) {
        if step.sample != 0 {
            return;
        }
        for piece in &step.pieces {
            let Some(placed) = self.blocks.place(piece) else { continue };
            if let Some(closed) = placed.closed {
                self.close(closed, out);
            }
            let Some(block) = self.blocks.list.get(placed.block) else { continue };
            if placed.opened {
                open(placed.block, block, out);
            }
            if !placed.delta.is_empty() {
                let kind = match block.kind {
                    Kind::Text => "text_delta\",\"text",
                    Kind::Reasoning => "thinking_delta\",\"thinking",
                    Kind::Call => "input_json_delta\",\"partial_json",
                };
                delta(placed.block, kind, placed.delta, out);
            }
        }
    }

    fn finish(&mut self, finish: &Finish, out: &mut BytesMut) {
        if finish.sample != 0 || std::mem::replace(&mut self.finished, true) {
            return;
        }
        if let Some(closed) = self.blocks.close() {
            self.close(closed, out);
        }
        let (reason, sequence) = stop_reason(finish, self.blocks.calls());
        out.raw("event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":").string(reason);
        out.raw(",\"stop_sequence\":").maybe_string(sequence).raw("},\"usage\":");
        write_usage(&finish.usage, out);
        out.raw("}").raw(END_OF_EVENT);
    }

    fn end(&mut self, out: &mut BytesMut) {
        out.raw("event: message_stop\ndata: {\"type\":\"message_stop\"}").raw(END_OF_EVENT);
    }

    fn fail(&mut self, failure: &Failure, out: &mut BytesMut) {
        let kind = match failure.kind {
            kind @ ("authentication_error"
            | "permission_error"
            | "not_found_error"
            | "rate_limit_error"
            | "invalid_request_error") => kind,
            _ => "api_error",
        };
        out.raw("event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":").string(kind);
        out.raw(",\"message\":").string(&failure.message).raw("}}").raw(END_OF_EVENT);
    }
}
