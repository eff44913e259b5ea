//! Completions as a stream of chunks.
//!
//! A choice that echoes its prompt begins with a chunk that is the prompt, so the prompt's log probabilities have to be known by then.

use bytes::BytesMut;

use super::columns::{Columns, Listing};
use super::{Form, text_of};
use crate::answer::{Answer, Costs, Failure, Origin, write_end_of_choice};
use crate::output::{Finish, MatchedStop, Step, TokenLogprob};
use crate::write::{DONE, END_OF_EVENT, Put as _};

pub(super) struct Stream {
    form: Form,
    /// Texts of the prompts, when they are echoed.
    prompts: Vec<String>,
    choices: Vec<Choice>,
    costs: Costs,
    head: String,
    tail: &'static str,
}

#[derive(Default)]
struct Choice {
    started: bool,
    listing: Listing,
    /// The entries of the prompt, until it is echoed.
    prompt: Columns,
}

impl Stream {
    pub fn new(origin: Origin, form: Form, prompts: Vec<String>) -> Self {
        let mut head = BytesMut::new();
        head.raw("data: {\"id\":").string(&origin.id).raw(",\"object\":\"text_completion\",\"created\":");
        head.number(origin.created).raw(",\"model\":").string(&origin.model).raw(",\"choices\":[");
        Self {
            form,
            choices: (0..form.choices()).map(|index| Choice::after(form.prompt_of(&prompts, index))).collect(),
            prompts,
            costs: Costs::new(form.prompts, form.samples),
            head: String::from_utf8_lossy(&head).into_owned(),
            tail: if form.stream_usage { "],\"usage\":null}" } else { "]}" },
        }
    }

    fn chunk(&self, index: u32, text: &str, columns: &Columns, end: End<'_>, out: &mut BytesMut) {
        out.raw(&self.head).raw("{\"index\":").number(index).raw(",\"text\":").string(text).raw(",\"logprobs\":");
        columns.write(out);
        let (reason, matched) = end.unzip();
        write_end_of_choice(out, reason, matched.flatten());
        out.raw("}").raw(self.tail).raw(END_OF_EVENT);
    }

    /// Echoes the prompt before anything else of a choice.
    fn begin(&mut self, index: u32, out: &mut BytesMut) {
        let Some(choice) = self.choices.get_mut(index as usize) else { return };
        if std::mem::replace(&mut choice.started, true) {
            return;
        }
        let columns = std::mem::take(&mut choice.prompt);
        if let Some(prompt) = self.form.prompt_of(&self.prompts, index as usize) {
            self.chunk(index, prompt, &columns, None, out);
        }
    }
}

impl Choice {
    fn after(prompt: Option<&str>) -> Self {
        Self { listing: Listing::after(prompt), ..Self::default() }
    }
}

/// Why a choice ended, and what matched.
type End<'a> = Option<(&'a str, Option<&'a MatchedStop>)>;

impl Answer for Stream {
    fn start(&mut self, _: &mut BytesMut) {}

    fn prompt_logprobs(&mut self, sample: u32, logprobs: &[TokenLogprob]) {
        let (Some(choice), Some(top)) = (self.choices.get_mut(sample as usize), self.form.top_logprobs) else { return };
        if !choice.started && choice.prompt.is_empty() {
            choice.prompt = Columns::of_prompt(logprobs, top);
        }
    }

    fn step(&mut self, step: &Step, out: &mut BytesMut) {
        self.begin(step.sample, out);
        let Some(choice) = self.choices.get_mut(step.sample as usize) else { return };
        if let Some(top) = self.form.top_logprobs {
            choice.listing.add(&step.logprobs, top);
        }
        for text in step.pieces.iter().map(text_of).filter(|text| !text.is_empty()) {
            // All of the step's entries go with its first text.
            let columns = self.choices.get_mut(step.sample as usize).map(|choice| choice.listing.take());
            self.chunk(step.sample, text, &columns.unwrap_or_default(), None, out);
        }
    }

    fn finish(&mut self, finish: &Finish, out: &mut BytesMut) {
        if finish.sample as usize >= self.choices.len() {
            return;
        }
        self.prompt_logprobs(finish.sample, &finish.prompt_logprobs);
        self.begin(finish.sample, out);
        let end = (finish.reason.word(), finish.matched_stop.as_ref());
        self.chunk(finish.sample, "", &Columns::default(), Some(end), out);
        self.costs.add(finish.sample, &finish.usage);
    }

    fn end(&mut self, out: &mut BytesMut) {
        if self.form.stream_usage {
            out.raw(&self.head).raw("],\"usage\":");
            self.costs.write(out);
            out.raw("}").raw(END_OF_EVENT);
        }
        out.raw(DONE);
    }

    fn fail(&mut self, failure: &Failure, out: &mut BytesMut) {
        failure.write(out);
    }
}
