//! A chat completion as a stream of chunks.
//!
//! Every sample begins with a chunk that tells its role and ends with one that tells why it finished; with
//! `stream_options.include_usage` a last chunk without choices tells the usage, and all others say `"usage":null` (OpenAI, "Chat
//! completion chunk").

use bytes::BytesMut;

use super::{Form, finish_reason};
use crate::answer::{Answer, Costs, Failure, Origin, write_end_of_choice};
use crate::logprobs::{self, Waiting};
use crate::output::{Finish, Piece, Step};
use crate::write::{DONE, END_OF_EVENT, Put as _};

pub(super) struct Stream {
    form: Form,
    samples: Vec<Sample>,
    costs: Costs,
    frame: Frame,
}

#[derive(Default)]
struct Sample {
    started: bool,
    calls: bool,
    waiting: Waiting,
}

/// What is the same in all chunks.
struct Frame {
    head: String,
    tail: &'static str,
}

impl Stream {
    pub fn new(origin: Origin, form: Form) -> Self {
        let mut head = BytesMut::new();
        head.raw("data: {\"id\":").string(&origin.id).raw(",\"object\":\"chat.completion.chunk\",\"created\":");
        head.number(origin.created).raw(",\"model\":").string(&origin.model).raw(",\"choices\":[");
        let frame = Frame {
            head: String::from_utf8_lossy(&head).into_owned(),
            tail: if form.stream_usage { "],\"usage\":null}" } else { "]}" },
        };
        let samples = (0..form.samples).map(|_| Sample::default()).collect();
        Self { form, samples, costs: Costs::new(1, form.samples), frame }
    }
}

impl Frame {
    /// Up to the inside of the delta.
    fn open<'a>(&self, index: u32, out: &'a mut BytesMut) -> &'a mut BytesMut {
        out.raw(&self.head).raw("{\"index\":").number(index).raw(",\"delta\":{")
    }

    /// From the end of the delta on.
    fn close(&self, entries: &[u8], out: &mut BytesMut) {
        out.raw("},\"logprobs\":");
        logprobs::write(out, entries);
        out.raw(",\"finish_reason\":null}").raw(self.tail).raw(END_OF_EVENT);
    }

    fn role(&self, index: u32, out: &mut BytesMut) {
        self.open(index, out).raw("\"role\":\"assistant\",\"content\":\"\"");
        self.close(&[], out);
    }
}

impl Answer for Stream {
    fn start(&mut self, _: &mut BytesMut) {}

    fn step(&mut self, step: &Step, out: &mut BytesMut) {
        let Some(sample) = self.samples.get_mut(step.sample as usize) else { return };
        if !std::mem::replace(&mut sample.started, true) {
            self.frame.role(step.sample, out);
        }
        let mut entries = sample.waiting.settle(step, self.form.top_logprobs);
        for piece in step.pieces.iter().filter(|piece| self.form.shows(piece)) {
            let delta = self.frame.open(step.sample, out);
            match piece {
                Piece::Content(text) => {
                    delta.raw("\"content\":").string(text);
                    // All of the step's entries go with its first content.
                    self.frame.close(&std::mem::take(&mut entries), out);
                    continue;
                }
                Piece::Reasoning(text) => delta.raw("\"reasoning_content\":").string(text),
                Piece::ToolCall { index, id, name } => {
                    sample.calls = true;
                    delta.raw("\"tool_calls\":[{\"index\":").number(*index as u64).raw(",\"id\":").string(id);
                    delta
                        .raw(",\"type\":\"function\",\"function\":{\"name\":")
                        .string(name)
                        .raw(",\"arguments\":\"\"}}]")
                }
                Piece::ToolArguments { index, fragment } => {
                    delta.raw("\"tool_calls\":[{\"index\":").number(*index as u64);
                    delta.raw(",\"function\":{\"arguments\":").string(fragment).raw("}}]")
                }
            };
            self.frame.close(&[], out);
        }
    }

    fn finish(&mut self, finish: &Finish, out: &mut BytesMut) {
        let Some(sample) = self.samples.get_mut(finish.sample as usize) else { return };
        if !std::mem::replace(&mut sample.started, true) {
            self.frame.role(finish.sample, out);
        }
        self.frame.open(finish.sample, out).raw("},\"logprobs\":null");
        let reason = finish_reason(&finish.reason, sample.calls);
        write_end_of_choice(out, Some(reason), finish.matched_stop.as_ref());
        out.raw("}").raw(self.frame.tail).raw(END_OF_EVENT);
        self.costs.add(finish.sample, &finish.usage);
    }

    fn end(&mut self, out: &mut BytesMut) {
        if self.form.stream_usage {
            out.raw(&self.frame.head).raw("],\"usage\":");
            self.costs.write(out);
            out.raw("}").raw(END_OF_EVENT);
        }
        out.raw(DONE);
    }

    fn fail(&mut self, failure: &Failure, out: &mut BytesMut) {
        failure.write(out);
    }
}
