//! Output taken apart: reasoning, tool calls, and the answer itself.
//!
//! Models write their reasoning and their calls into the text, each family in a way of its own. A [`Reader`] turns the text
//! of one sample into [`Piece`]s while it arrives; which formats it expects is a matter of two names ([`Parsers`]), given by
//! flags, by a worker's labels, or by the model's id.
//!
//! Invariants, for every format:
//! - The pieces, adjacent ones of a kind joined, depend on the text alone, not on how it was cut.
//! - No text is lost: what looks like a call and is none becomes content, from its first character when nothing of it has
//!   been output yet, and otherwise from the character at which it stopped being one. Left out are only the markup and the
//!   white space that touches it.
//! - Arguments are passed on while they arrive wherever the format writes them as JSON. Formats that write them as tags give
//!   them parameter by parameter, and Python calls one by one, as they have to be translated.
//!
//! No parser library is used, for any family: those that exist hold a call back until it is over, change or lose text, and
//! lack formats ("Why not a parser library" in the documentation of gRPC workers).

mod arguments;
mod cursor;
mod forced;
mod harmony;
mod json;
mod names;
mod pythonic;
mod reasoning;
mod tagged;

use serde_json::Value;
use smg_apis::Piece;
use smg_apis::generation::{Reading, ToolChoice};

pub use names::{Parsers, ReasoningParser, ToolParser, UnknownParser};

use cursor::{Coroutine, Cursor, Malformed, Sink};

use crate::markers::Markers;

/// What turns text into pieces.
pub trait OutputReader: Send {
    /// Takes the next piece of text and returns what is certain by now.
    fn push(&mut self, text: &str) -> Vec<Piece>;

    /// The text has ended: returns what was held back. Called once, last.
    fn finish(&mut self) -> Vec<Piece>;

    /// Whether what comes next is reasoning, as far as is known; the tokens of reasoning are counted by it.
    fn reasoning(&self) -> bool;
}

/// Adds a piece; text that goes on joins the piece before.
pub(crate) fn append(pieces: &mut Vec<Piece>, piece: Piece) {
    match (pieces.last_mut(), &piece) {
        (Some(Piece::Content(last)), Piece::Content(text)) | (Some(Piece::Reasoning(last)), Piece::Reasoning(text)) => {
            last.push_str(text);
        }
        (Some(Piece::ToolArguments { index: last, fragment }), Piece::ToolArguments { index, fragment: more })
            if last == index =>
        {
            fragment.push_str(more)
        }
        _ => pieces.push(piece),
    }
}

/// What a reader has to know about the request.
#[derive(Debug, Clone)]
pub struct Task<'a> {
    /// What is to be told apart.
    pub reading: &'a Reading,
    /// The tools that were offered, as in the OpenAI chat API.
    pub tools: &'a [Value],
    /// What the prompt ends with, as far as the reasoning parser can tell (see [`ReasoningParser::opened_by`]): inside the
    /// reasoning, behind it, or neither.
    pub opened: Option<bool>,
    /// The random part of the calls' ids, another one for each sample.
    pub random: u128,
}

/// The reader of one sample's text.
pub struct Reader {
    coroutine: Option<Coroutine>,
}

impl Reader {
    /// A reader for what `parsers` write, as far as `task` wants it told apart.
    #[must_use]
    pub fn new(parsers: Parsers, task: &Task<'_>) -> Self {
        let reasoning = if task.reading.separate_reasoning { parsers.reasoning } else { ReasoningParser::PASSTHROUGH };
        let opened = task.opened;
        let calls = Calls::new(parsers.tools, task);
        let choice = task.reading.tools.clone();
        if parsers.harmony() {
            let (separate, tools) = (task.reading.separate_reasoning, choice != ToolChoice::None);
            return Self::of(move |cursor| harmony::read(cursor, calls, separate, tools));
        }
        if let ToolChoice::Required | ToolChoice::Function(_) = choice {
            return Self::of(move |cursor| forced::read(cursor, calls, reasoning, opened, choice));
        }
        let tools = if choice == ToolChoice::Auto { parsers.tools } else { ToolParser::Passthrough };
        if reasoning.is_passthrough() && tools == ToolParser::Passthrough {
            return Self { coroutine: None };
        }
        Self::of(move |cursor| read(cursor, calls, reasoning, opened, tools))
    }

    fn of<F: Future<Output = ()> + Send + 'static>(parse: impl FnOnce(Cursor) -> F) -> Self {
        Self { coroutine: Some(Coroutine::start(parse)) }
    }
}

impl OutputReader for Reader {
    fn push(&mut self, text: &str) -> Vec<Piece> {
        match &mut self.coroutine {
            _ if text.is_empty() => Vec::new(),
            Some(coroutine) => coroutine.push(text),
            None => vec![Piece::Content(text.to_owned())],
        }
    }

    fn finish(&mut self) -> Vec<Piece> {
        self.coroutine.as_mut().map(Coroutine::finish).unwrap_or_default()
    }

    fn reasoning(&self) -> bool {
        self.coroutine.as_ref().is_some_and(Coroutine::reasoning)
    }
}

impl std::fmt::Debug for Reader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reader").field("reasoning", &self.reasoning()).finish_non_exhaustive()
    }
}

/// Reasoning, then the answer with calls in it.
async fn read(
    mut cursor: Cursor,
    mut calls: Calls,
    reasoning: ReasoningParser,
    opened: Option<bool>,
    tools: ToolParser,
) {
    reasoning::read(&mut cursor, reasoning, opened, tools.begins()).await;
    match tools {
        ToolParser::Passthrough | ToolParser::Harmony => {
            cursor.pass(&Markers::default(), Sink::Content).await;
        }
        ToolParser::Pythonic => pythonic::read(&mut cursor, &mut calls).await,
        ToolParser::Json => {
            tagged::read_bare(&mut cursor, &mut calls).await;
            cursor.pass_trimmed(&Markers::default(), calls.count > 0).await;
        }
        ToolParser::Llama => {
            tagged::read_bare(&mut cursor, &mut calls).await;
            tagged::read(&mut cursor, &mut calls, tools).await;
        }
        _ => tagged::read(&mut cursor, &mut calls, tools).await,
    }
}

/// How a call's id is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ids {
    /// `call_` and 24 hexadecimal digits, as the OpenAI API has them.
    Long,
    /// Nine letters and digits: Mistral's chat templates refuse any other.
    Nine,
}

/// The calls of one sample: how many there are, and what may be called.
#[derive(Debug)]
struct Calls {
    tools: Vec<(String, Value)>,
    /// Only the tools offered: for formats that anything might look like.
    strict: bool,
    count: usize,
    ids: Ids,
    random: u128,
}

impl Calls {
    fn new(parser: ToolParser, task: &Task<'_>) -> Self {
        let tools = task.tools.iter().filter_map(|tool| tool.get("function"));
        let tools = tools.filter_map(|function| {
            let name = function.get("name")?.as_str()?.to_owned();
            Some((name, function.get("parameters").cloned().unwrap_or_default()))
        });
        Self {
            tools: tools.collect(),
            strict: parser.is_bare(),
            count: 0,
            ids: if parser == ToolParser::Mistral { Ids::Nine } else { Ids::Long },
            random: task.random,
        }
    }

    /// Begins a call: from here on it is one. Returns its position. [`Malformed`] if nothing of that name can be called.
    fn begin(&mut self, cursor: &mut Cursor, name: &str, id: Option<&str>) -> Result<usize, Malformed> {
        if name.is_empty() || (self.strict && !self.tools.iter().any(|(tool, _)| tool == name)) {
            return Err(Malformed);
        }
        cursor.settle();
        let index = self.count;
        self.count += 1;
        let id = id.map_or_else(|| self.id(index), str::to_owned);
        cursor.piece(Piece::ToolCall { index, id, name: name.to_owned() });
        Ok(index)
    }

    /// Ids of one sample differ by their position, those of two samples by the random part.
    fn id(&self, index: usize) -> String {
        let number = self.random.wrapping_add(index as u128);
        match self.ids {
            Ids::Long => format!("call_{:024x}", number & ((1 << 96) - 1)),
            Ids::Nine => {
                const DIGITS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
                let powers = (0..9).map(|power| number / 62u128.pow(power) % 62);
                powers.map(|digit| char::from(DIGITS[digit as usize])).collect()
            }
        }
    }

    /// The schema of a tool's parameter, if the tool declares one.
    fn schema(&self, tool: &str, parameter: &str) -> Option<&Value> {
        let (_, parameters) = self.tools.iter().find(|(name, _)| name == tool)?;
        parameters.get("properties")?.get(parameter)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod testing {
    use serde_json::json;

    use super::*;

    /// Tools that tests offer.
    pub(crate) fn tools() -> Vec<Value> {
        let tool = |name: &str, properties: Value| json!({"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}});
        vec![
            tool("weather", json!({"city": {"type": "string"}, "days": {"type": "integer"}, "units": {}})),
            tool("now", json!({})),
        ]
    }

    /// The pieces of a text that comes in these parts, joined.
    pub(crate) fn read_parts(
        parsers: Parsers,
        choice: &ToolChoice,
        opened: Option<bool>,
        parts: &[&str],
    ) -> Vec<Piece> {
        let reading = Reading { tools: choice.clone(), separate_reasoning: true, skip_special_tokens: false };
        let tools = tools();
        let mut reader = Reader::new(parsers, &Task { reading: &reading, tools: &tools, opened, random: 7 });
        let mut pieces = Vec::new();
        let pushed = parts.iter().flat_map(|part| reader.push(part)).collect::<Vec<_>>();
        for piece in pushed.into_iter().chain(reader.finish()) {
            append(&mut pieces, piece);
        }
        pieces
    }

    /// The pieces of a text, after a check that every cutting into two, many into three, and single characters give the same.
    pub(crate) fn read_as(parsers: Parsers, choice: &ToolChoice, opened: Option<bool>, text: &str) -> Vec<Piece> {
        let whole = read_parts(parsers, choice, opened, &[text]);
        let mut bytes = [0; 4];
        let characters: Vec<String> = text.chars().map(|next| next.encode_utf8(&mut bytes).to_owned()).collect();
        let characters: Vec<&str> = characters.iter().map(String::as_str).collect();
        assert_eq!(read_parts(parsers, choice, opened, &characters), whole, "character by character: {text}");
        let bounds: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
        for (number, first) in bounds.iter().enumerate() {
            let (left, right) = text.split_at(*first);
            assert_eq!(read_parts(parsers, choice, opened, &[left, right]), whole, "{left}|{right}");
            for second in bounds.iter().skip(number).step_by(7) {
                let (middle, right) = text[*first..].split_at(second - first);
                assert_eq!(
                    read_parts(parsers, choice, opened, &[left, middle, right]),
                    whole,
                    "{left}|{middle}|{right}"
                );
            }
        }
        whole
    }

    /// The same with calls looked for.
    pub(crate) fn read(parsers: Parsers, opened: Option<bool>, text: &str) -> Vec<Piece> {
        read_as(parsers, &ToolChoice::Auto, opened, text)
    }
}
