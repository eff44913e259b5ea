//! Native generation as a stream: every event tells all of one sample so far, and its `index`.

use bytes::BytesMut;

use super::Form;
use super::meta::Sample;
use crate::answer::{Answer, Failure, Origin};
use crate::output::{Finish, Step, TokenLogprob};
use crate::write::{DONE, END_OF_EVENT, Put as _};

pub(super) struct Stream {
    origin: Origin,
    form: Form,
    samples: Vec<Sample>,
}

impl Stream {
    pub fn new(origin: Origin, form: Form) -> Self {
        Self { origin, form, samples: (0..form.samples).map(|_| Sample::default()).collect() }
    }

    fn event(&self, index: u32, out: &mut BytesMut) {
        let Some(sample) = self.samples.get(index as usize) else { return };
        out.raw("data: ");
        sample.write(index, &self.origin, self.form, out);
        out.raw(",\"index\":").number(index).raw("}").raw(END_OF_EVENT);
    }
}

impl Answer for Stream {
    fn start(&mut self, _: &mut BytesMut) {}

    fn prompt_logprobs(&mut self, sample: u32, logprobs: &[TokenLogprob]) {
        if let Some(sample) = self.samples.get_mut(sample as usize) {
            sample.prompt_logprobs(logprobs, self.form);
        }
    }

    fn step(&mut self, step: &Step, out: &mut BytesMut) {
        let Some(sample) = self.samples.get_mut(step.sample as usize) else { return };
        sample.step(step, self.form);
        self.event(step.sample, out);
    }

    fn finish(&mut self, finish: &Finish, out: &mut BytesMut) {
        let Some(sample) = self.samples.get_mut(finish.sample as usize) else { return };
        sample.finish(finish, self.form);
        self.event(finish.sample, out);
    }

    fn end(&mut self, out: &mut BytesMut) {
        out.raw(DONE);
    }

    fn fail(&mut self, failure: &Failure, out: &mut BytesMut) {
        failure.write(out);
    }
}
