//! A chat completion as one document.

use bytes::BytesMut;

use super::{Form, finish_reason};
use crate::answer::{Answer, Costs, Failure, Origin, write_end_of_choice};
use crate::logprobs::{self, Waiting};
use crate::output::{Finish, FinishReason, MatchedStop, Piece, Step};
use crate::write::Put as _;

pub(super) struct Whole {
    origin: Origin,
    form: Form,
    samples: Vec<Sample>,
    costs: Costs,
}

/// A sample so far. Texts are the insides of JSON strings.
#[derive(Default)]
struct Sample {
    content: BytesMut,
    reasoning: BytesMut,
    calls: Vec<Call>,
    waiting: Waiting,
    entries: BytesMut,
    finish: Option<(FinishReason, Option<MatchedStop>)>,
}

struct Call {
    index: usize,
    id: String,
    name: String,
    arguments: BytesMut,
}

impl Whole {
    pub fn new(origin: Origin, form: Form) -> Self {
        let samples = (0..form.samples).map(|_| Sample::default()).collect();
        Self { origin, form, samples, costs: Costs::new(1, form.samples) }
    }
}

impl Answer for Whole {
    fn start(&mut self, _: &mut BytesMut) {}

    fn step(&mut self, step: &Step, _: &mut BytesMut) {
        let Some(sample) = self.samples.get_mut(step.sample as usize) else { return };
        let settled = sample.waiting.settle(step, self.form.top_logprobs);
        if !settled.is_empty() {
            let first = sample.entries.is_empty();
            sample.entries.comma(first).extend_from_slice(&settled);
        }
        for piece in step.pieces.iter().filter(|piece| self.form.shows(piece)) {
            match piece {
                Piece::Content(text) => {
                    sample.content.inside(text);
                }
                Piece::Reasoning(text) => {
                    sample.reasoning.inside(text);
                }
                Piece::ToolCall { index, id, name } => {
                    let (id, name) = (id.clone(), name.clone());
                    sample.calls.push(Call { index: *index, id, name, arguments: BytesMut::new() });
                }
                Piece::ToolArguments { index, fragment } => {
                    if let Some(call) = sample.calls.iter_mut().rfind(|call| call.index == *index) {
                        call.arguments.inside(fragment);
                    }
                }
            }
        }
    }

    fn finish(&mut self, finish: &Finish, _: &mut BytesMut) {
        let Some(sample) = self.samples.get_mut(finish.sample as usize) else { return };
        sample.finish = Some((finish.reason.clone(), finish.matched_stop.clone()));
        self.costs.add(finish.sample, &finish.usage);
    }

    fn end(&mut self, out: &mut BytesMut) {
        out.raw("{\"id\":").string(&self.origin.id).raw(",\"object\":\"chat.completion\",\"created\":");
        out.number(self.origin.created).raw(",\"model\":").string(&self.origin.model).raw(",\"choices\":[");
        for (index, sample) in self.samples.iter().enumerate() {
            out.comma(index == 0).raw("{\"index\":").number(index as u64).raw(",\"message\":");
            sample.write_message(out);
            out.raw(",\"logprobs\":");
            logprobs::write(out, &sample.entries);
            let reason = sample.finish.as_ref().map(|(reason, _)| finish_reason(reason, !sample.calls.is_empty()));
            let matched = sample.finish.as_ref().and_then(|(_, matched)| matched.as_ref());
            write_end_of_choice(out, reason, matched);
            out.raw("}");
        }
        out.raw("],\"usage\":");
        self.costs.write(out);
        out.raw("}");
    }

    fn fail(&mut self, _: &Failure, _: &mut BytesMut) {}
}

impl Sample {
    fn write_message(&self, out: &mut BytesMut) {
        let text = |out: &mut BytesMut, inside: &[u8]| {
            out.raw("\"").extend_from_slice(inside);
            out.raw("\"");
        };
        out.raw("{\"role\":\"assistant\",\"content\":");
        if self.content.is_empty() && !self.calls.is_empty() {
            out.raw("null");
        } else {
            text(out, &self.content);
        }
        out.raw(",\"refusal\":null");
        if !self.reasoning.is_empty() {
            out.raw(",\"reasoning_content\":");
            text(out, &self.reasoning);
        }
        for (at, call) in self.calls.iter().enumerate() {
            out.raw(if at == 0 { ",\"tool_calls\":[" } else { "," });
            out.raw("{\"id\":")
                .string(&call.id)
                .raw(",\"type\":\"function\",\"function\":{\"name\":")
                .string(&call.name);
            out.raw(",\"arguments\":");
            text(out, &call.arguments);
            out.raw("}}");
        }
        if !self.calls.is_empty() {
            out.raw("]");
        }
        out.raw("}");
    }
}
