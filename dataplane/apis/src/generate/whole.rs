//! Native generation as one document: an object, or a list of them when several samples were asked for.

use bytes::BytesMut;

use super::Form;
use super::meta::Sample;
use crate::answer::{Answer, Failure, Origin};
use crate::output::{Finish, Step, TokenLogprob};
use crate::write::Put as _;

pub(super) struct Whole {
    origin: Origin,
    form: Form,
    samples: Vec<Sample>,
}

impl Whole {
    pub fn new(origin: Origin, form: Form) -> Self {
        Self { origin, form, samples: (0..form.samples).map(|_| Sample::default()).collect() }
    }
}

impl Answer for Whole {
    fn start(&mut self, _: &mut BytesMut) {}

    fn prompt_logprobs(&mut self, sample: u32, logprobs: &[TokenLogprob]) {
        if let Some(sample) = self.samples.get_mut(sample as usize) {
            sample.prompt_logprobs(logprobs, self.form);
        }
    }

    fn step(&mut self, step: &Step, _: &mut BytesMut) {
        if let Some(sample) = self.samples.get_mut(step.sample as usize) {
            sample.step(step, self.form);
        }
    }

    fn finish(&mut self, finish: &Finish, _: &mut BytesMut) {
        if let Some(sample) = self.samples.get_mut(finish.sample as usize) {
            sample.finish(finish, self.form);
        }
    }

    fn end(&mut self, out: &mut BytesMut) {
        let several = self.form.samples > 1;
        if several {
            out.raw("[");
        }
        for (index, sample) in self.samples.iter().enumerate() {
            out.comma(index == 0);
            sample.write(index as u32, &self.origin, self.form, out);
            out.raw("}");
        }
        if several {
            out.raw("]");
        }
    }

    fn fail(&mut self, _: &Failure, _: &mut BytesMut) {}
}
