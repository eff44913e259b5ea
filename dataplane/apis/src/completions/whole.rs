//! Completions as one document.

use bytes::BytesMut;

use super::columns::{Columns, Listing};
use super::{Form, text_of};
use crate::answer::{Answer, Costs, Failure, Origin, write_end_of_choice};
use crate::output::{Finish, FinishReason, MatchedStop, Step, TokenLogprob};
use crate::write::Put as _;

pub(super) struct Whole {
    origin: Origin,
    form: Form,
    /// Texts of the prompts, when they are echoed.
    prompts: Vec<String>,
    choices: Vec<Choice>,
    costs: Costs,
}

/// A choice so far. The text is the inside of a JSON string.
#[derive(Default)]
struct Choice {
    text: BytesMut,
    listing: Listing,
    /// Entries of visible text.
    columns: Columns,
    /// Entries of the prompt, which may be known only at the end.
    prompt: Columns,
    finish: Option<(FinishReason, Option<MatchedStop>)>,
}

impl Whole {
    pub fn new(origin: Origin, form: Form, prompts: Vec<String>) -> Self {
        let choice = |index| {
            let listing = Listing::after(form.prompt_of(&prompts, index));
            Choice { listing, ..Choice::default() }
        };
        let choices = (0..form.choices()).map(choice).collect();
        Self { origin, form, choices, prompts, costs: Costs::new(form.prompts, form.samples) }
    }
}

impl Answer for Whole {
    fn start(&mut self, _: &mut BytesMut) {}

    fn prompt_logprobs(&mut self, sample: u32, logprobs: &[TokenLogprob]) {
        let (Some(choice), Some(top)) = (self.choices.get_mut(sample as usize), self.form.top_logprobs) else { return };
        if choice.prompt.is_empty() {
            choice.prompt = Columns::of_prompt(logprobs, top);
        }
    }

    fn step(&mut self, step: &Step, _: &mut BytesMut) {
        let Some(choice) = self.choices.get_mut(step.sample as usize) else { return };
        if let Some(top) = self.form.top_logprobs {
            choice.listing.add(&step.logprobs, top);
        }
        let before = choice.text.len();
        for text in step.pieces.iter().map(text_of) {
            choice.text.inside(text);
        }
        if choice.text.len() > before {
            choice.columns.append(&choice.listing.take());
        }
    }

    fn finish(&mut self, finish: &Finish, _: &mut BytesMut) {
        self.prompt_logprobs(finish.sample, &finish.prompt_logprobs);
        let Some(choice) = self.choices.get_mut(finish.sample as usize) else { return };
        choice.finish = Some((finish.reason.clone(), finish.matched_stop.clone()));
        self.costs.add(finish.sample, &finish.usage);
    }

    fn end(&mut self, out: &mut BytesMut) {
        out.raw("{\"id\":").string(&self.origin.id).raw(",\"object\":\"text_completion\",\"created\":");
        out.number(self.origin.created).raw(",\"model\":").string(&self.origin.model).raw(",\"choices\":[");
        for (index, choice) in self.choices.iter_mut().enumerate() {
            let prompt = self.form.prompt_of(&self.prompts, index);
            out.comma(index == 0).raw("{\"index\":").number(index as u64).raw(",\"text\":\"");
            out.inside(prompt.unwrap_or_default()).extend_from_slice(&choice.text);
            out.raw("\",\"logprobs\":");
            if prompt.is_some() {
                choice.prompt.append(&choice.columns);
                choice.prompt.write(out);
            } else {
                choice.columns.write(out);
            }
            let reason = choice.finish.as_ref().map(|(reason, _)| reason.word());
            let matched = choice.finish.as_ref().and_then(|(_, matched)| matched.as_ref());
            write_end_of_choice(out, reason, matched);
            out.raw("}");
        }
        out.raw("],\"usage\":");
        self.costs.write(out);
        out.raw("}");
    }

    fn fail(&mut self, _: &Failure, _: &mut BytesMut) {}
}
