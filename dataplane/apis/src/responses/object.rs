//! A response and its items, at any time of its making.

use bytes::{Bytes, BytesMut};
use serde_json::Value;

use super::Stored;
use super::entries::Entries;
use super::input::assistant;
use crate::answer::Origin;
use crate::blocks::{Block, Blocks, Kind};
use crate::conversation::tool_call;
use crate::fields::Fields;
use crate::generation::Sampling;
use crate::output::{Finish, FinishReason};
use crate::write::Put as _;

/// What of a request shapes its answer.
pub(super) struct Form {
    pub parallel: bool,
    /// Rivals listed beside each token, when log probabilities are wanted.
    pub top_logprobs: Option<u32>,
    pub echo: String,
    /// The conversation so far, when the response is to be kept.
    pub conversation: Option<Vec<Value>>,
}

/// A response in the making.
pub(super) struct Response {
    pub origin: Origin,
    pub form: Form,
    pub blocks: Blocks,
    /// Log probabilities of the blocks' texts.
    pub entries: Entries,
    pub finish: Option<Finish>,
}

/// What a response says of itself.
#[derive(Clone, Copy)]
pub(super) enum Status<'a> {
    InProgress,
    Completed,
    /// The limit on tokens was hit.
    Incomplete,
    /// Why.
    Failed(&'a str),
}

impl Response {
    pub fn new(origin: Origin, form: Form) -> Self {
        let blocks = Blocks::new(true, form.parallel);
        Self { origin, form, blocks, entries: Entries::default(), finish: None }
    }

    /// How it ended.
    pub fn status(&self) -> Status<'static> {
        match self.finish.as_ref().map(|finish| &finish.reason) {
            Some(FinishReason::Stop) => Status::Completed,
            Some(FinishReason::Length) => Status::Incomplete,
            Some(FinishReason::Abort) => Status::Failed("the engine gave the request up"),
            _ => Status::Failed("the engine ended the request for no documented reason"),
        }
    }

    /// The response, with its items unless it has only begun.
    pub fn write(&self, status: Status<'_>, out: &mut BytesMut) {
        let word = match status {
            Status::InProgress => "in_progress",
            Status::Completed => "completed",
            Status::Incomplete => "incomplete",
            Status::Failed(_) => "failed",
        };
        out.raw("{\"id\":").string(&self.origin.id).raw(",\"object\":\"response\",\"created_at\":");
        out.number(self.origin.created).raw(",\"status\":").string(word).raw(",\"background\":false,\"error\":");
        match status {
            Status::Failed(message) => out.raw("{\"code\":\"server_error\",\"message\":").string(message).raw("}"),
            _ => out.raw("null"),
        };
        out.raw(",\"incomplete_details\":").raw(match status {
            Status::Incomplete => "{\"reason\":\"max_output_tokens\"}",
            _ => "null",
        });
        out.raw(",\"model\":").string(&self.origin.model).raw(",\"output\":[");
        if !matches!(status, Status::InProgress) {
            for at in 0..self.blocks.list.len() {
                let text = self.blocks.list.get(at).map_or("", |block| &block.text);
                self.write_item(at, text, self.item_status(at, status), out.comma(at == 0));
            }
        }
        out.raw("],").raw(&self.form.echo).raw(",\"usage\":");
        self.write_usage(out);
        out.raw("}");
    }

    /// Only the last item can be cut off.
    pub fn item_status(&self, at: usize, status: Status<'_>) -> &'static str {
        match status {
            Status::Completed => "completed",
            _ if at + 1 < self.blocks.list.len() => "completed",
            _ => "incomplete",
        }
    }

    fn write_usage(&self, out: &mut BytesMut) {
        let Some(usage) = self.finish.as_ref().map(|finish| finish.usage) else {
            out.raw("null");
            return;
        };
        out.raw("{\"input_tokens\":").number(usage.prompt_tokens);
        // Nobody charges for what is written to the engines' caches; OpenAI's clients want the member all the same.
        out.raw(",\"input_tokens_details\":{\"cache_write_tokens\":0,\"cached_tokens\":").number(usage.cached_tokens);
        out.raw("},\"output_tokens\":").number(usage.completion_tokens);
        out.raw(",\"output_tokens_details\":{\"reasoning_tokens\":").number(usage.reasoning_tokens);
        let total = u64::from(usage.prompt_tokens) + u64::from(usage.completion_tokens);
        out.raw("},\"total_tokens\":").number(total).raw("}");
    }

    /// The id of an item: the response's own, with the kind and the position.
    pub fn write_item_id(&self, at: usize, out: &mut BytesMut) {
        let kind = match self.blocks.list.get(at).map(|block| block.kind) {
            Some(Kind::Reasoning) => "rs_",
            Some(Kind::Call) => "fc_",
            _ => "msg_",
        };
        let id = self.origin.id.strip_prefix("resp_").unwrap_or(&self.origin.id);
        out.raw("\"").raw(kind).inside(id).raw("_").number(at as u64).raw("\"");
    }

    /// An item that holds `text`.
    pub fn write_item(&self, at: usize, text: &str, status: &str, out: &mut BytesMut) {
        let Some(block) = self.blocks.list.get(at) else { return };
        out.raw("{\"id\":");
        self.write_item_id(at, out);
        match block.kind {
            Kind::Text => out.raw(",\"type\":\"message\",\"role\":\"assistant\""),
            Kind::Reasoning => out.raw(",\"type\":\"reasoning\",\"summary\":[]"),
            Kind::Call => {
                out.raw(",\"type\":\"function_call\",\"call_id\":").string(&block.id);
                out.raw(",\"name\":").string(&block.name).raw(",\"arguments\":").string(text)
            }
        };
        if block.kind != Kind::Call {
            out.raw(",\"content\":[");
            if !text.is_empty() {
                self.write_part(at, text, out);
            }
            out.raw("]");
        }
        out.raw(",\"status\":").string(status).raw("}");
    }

    /// The one part of an item with text.
    pub fn write_part(&self, at: usize, text: &str, out: &mut BytesMut) {
        match self.blocks.list.get(at).map(|block| block.kind) {
            Some(Kind::Reasoning) => out.raw("{\"type\":\"reasoning_text\",\"text\":").string(text).raw("}"),
            _ => {
                out.raw("{\"type\":\"output_text\",\"text\":").string(text).raw(",\"annotations\":[],\"logprobs\":");
                let entries = if text.is_empty() { &[] } else { self.entries.of(at) };
                Entries::write(entries, out);
                out.raw("}")
            }
        };
    }

    /// What later requests may refer to.
    pub fn stored(&mut self) -> Option<Stored> {
        let finish = self.finish.as_ref()?;
        if matches!(finish.reason, FinishReason::Abort | FinishReason::Other(_)) {
            return None;
        }
        let mut conversation = self.form.conversation.take()?;
        conversation.push(self.message());
        let mut response = BytesMut::new();
        self.write(self.status(), &mut response);
        Some(Stored { id: self.origin.id.clone(), response: Bytes::from(response), conversation })
    }

    /// The output as a message of the chat API.
    fn message(&self) -> Value {
        let joined = |kind: Kind| -> String {
            let texts = self.blocks.list.iter().filter(|block| block.kind == kind);
            texts.map(|block| block.text.as_str()).collect()
        };
        let call = |block: &Block| tool_call(&block.id, &block.name, &block.text);
        let calls = self.blocks.list.iter().filter(|block| block.kind == Kind::Call).map(call).collect();
        assistant(joined(Kind::Text).into(), joined(Kind::Reasoning), calls)
    }
}

/// Members of a response that repeat its request, defaults filled in.
pub(super) struct Echo {
    out: BytesMut,
}

impl Echo {
    /// Takes a look at what other readers take out of the request.
    pub fn of(fields: &Fields, instructions: Option<&str>) -> Self {
        let mut out = BytesMut::new();
        out.raw("\"instructions\":").maybe_string(instructions);
        for (name, default) in [
            ("tools", "[]"),
            ("tool_choice", "\"auto\""),
            ("text", "{\"format\":{\"type\":\"text\"}}"),
            ("reasoning", "{\"effort\":null,\"summary\":null}"),
            ("metadata", "{}"),
            ("user", "null"),
            ("truncation", "\"disabled\""),
        ] {
            out.raw(",\"").raw(name).raw("\":");
            match fields.peek(name) {
                Some(value) => out.value(value),
                None => out.raw(default),
            };
        }
        Self { out }
    }

    /// Adds what had to be read first.
    pub fn finish(mut self, sampling: &Sampling, store: bool, parallel: bool, previous: Option<&str>) -> String {
        let boolean = |value| if value { "true" } else { "false" };
        let out = &mut self.out;
        out.raw(",\"store\":").raw(boolean(store)).raw(",\"parallel_tool_calls\":").raw(boolean(parallel));
        out.raw(",\"previous_response_id\":").maybe_string(previous);
        out.raw(",\"temperature\":").float(Some(sampling.temperature.unwrap_or(1.0)));
        out.raw(",\"top_p\":").float(Some(sampling.top_p.unwrap_or(1.0))).raw(",\"max_output_tokens\":");
        match sampling.max_tokens {
            Some(tokens) => out.number(tokens),
            None => out.raw("null"),
        };
        String::from_utf8_lossy(out).into_owned()
    }
}
