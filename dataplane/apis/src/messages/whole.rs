//! A message as one document.

use bytes::BytesMut;
use serde_json::value::RawValue;

use super::{stop_reason, write_usage};
use crate::answer::{Answer, Failure, Origin};
use crate::blocks::{Block, Blocks, Kind};
use crate::output::{Finish, Step, Usage};
use crate::write::Put as _;

pub(super) struct Whole {
    origin: Origin,
    blocks: Blocks,
    finish: Option<Finish>,
}

impl Whole {
    pub fn new(origin: Origin, parallel: bool) -> Self {
        Self { origin, blocks: Blocks::new(true, parallel), finish: None }
    }
}

impl Answer for Whole {
    fn start(&mut self, _: &mut BytesMut) {}

    fn step(&mut self, step: &Step, _: &mut BytesMut) {
        if step.sample == 0 {
            for piece in &step.pieces {
                self.blocks.place(piece);
            }
        }
    }

    fn finish(&mut self, finish: &Finish, _: &mut BytesMut) {
        if finish.sample == 0 && self.finish.is_none() {
            self.finish = Some(Finish { prompt_logprobs: Vec::new(), ..finish.clone() });
        }
    }

    fn end(&mut self, out: &mut BytesMut) {
        out.raw("{\"id\":").string(&self.origin.id).raw(",\"type\":\"message\",\"role\":\"assistant\",\"model\":");
        out.string(&self.origin.model).raw(",\"content\":[");
        for (at, block) in self.blocks.list.iter().enumerate() {
            write_block(block, out.comma(at == 0));
        }
        out.raw("],\"stop_reason\":");
        match &self.finish {
            Some(finish) => {
                let (reason, sequence) = stop_reason(finish, self.blocks.calls());
                out.string(reason).raw(",\"stop_sequence\":").maybe_string(sequence).raw(",\"usage\":");
                write_usage(&finish.usage, out);
            }
            None => {
                out.raw("null,\"stop_sequence\":null,\"usage\":");
                write_usage(&Usage { prompt_tokens: self.origin.prompt_tokens, ..Usage::default() }, out);
            }
        }
        out.raw("}");
    }

    fn fail(&mut self, _: &Failure, _: &mut BytesMut) {}
}

fn write_block(block: &Block, out: &mut BytesMut) {
    match block.kind {
        Kind::Text => out.raw("{\"type\":\"text\",\"text\":").string(&block.text),
        Kind::Reasoning => {
            out.raw("{\"type\":\"thinking\",\"thinking\":").string(&block.text).raw(",\"signature\":\"\"")
        }
        Kind::Call => {
            out.raw("{\"type\":\"tool_use\",\"id\":").string(&block.id).raw(",\"name\":").string(&block.name);
            out.raw(",\"input\":").raw(object(&block.text))
        }
    };
    out.raw("}");
}

/// Arguments as the object that the API wants; what a limit cut off is none, and becomes an empty one.
fn object(arguments: &str) -> &str {
    match serde_json::from_str::<&RawValue>(arguments) {
        Ok(value) if value.get().starts_with('{') => value.get(),
        _ => "{}",
    }
}
