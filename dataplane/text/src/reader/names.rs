//! Parsers by name, and by a model's id.
//!
//! The names are those of the documented system's `--reasoning-parser` and `--tool-call-parser`, and beside them what vLLM
//! and SGLang call the same formats. Formats that are not built have no name here: asking for one is an error that lists
//! those that exist.

use smg_apis::generation::{Reading, ToolChoice};
use thiserror::Error;

use crate::tokenizer::Tokenizer;

/// No parser of that name.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum UnknownParser {
    /// No reasoning parser.
    #[error("unknown reasoning parser `{0}`; there are {known}", known = ReasoningParser::names().join(", "))]
    Reasoning(String),
    /// No tool call parser.
    #[error("unknown tool call parser `{0}`; there are {known}", known = ToolParser::names().join(", "))]
    Tools(String),
}

/// The two parsers of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Parsers {
    /// How it writes its reasoning.
    pub reasoning: ReasoningParser,
    /// How it writes its calls.
    pub tools: ToolParser,
}

impl Parsers {
    /// The parsers of these names; where none is given, those that the model's id suggests.
    ///
    /// # Errors
    /// A name that no parser has.
    pub fn choose(reasoning: Option<&str>, tools: Option<&str>, model: &str) -> Result<Self, UnknownParser> {
        Ok(Self {
            reasoning: match reasoning {
                Some(name) => ReasoningParser::named(name)?,
                None => ReasoningParser::of_model(model),
            },
            tools: match tools {
                Some(name) => ToolParser::named(name)?,
                None => ToolParser::of_model(model),
            },
        })
    }

    /// Whether one of them is Harmony, which has both in one format.
    pub(super) fn harmony(self) -> bool {
        self.reasoning.is_harmony() || self.tools == ToolParser::Harmony
    }

    /// Whether special tokens have to be spelled out, as what the parsers look for may be such. `reading`: what is looked for.
    #[must_use]
    pub fn need_special_tokens(self, reading: &Reading, tokenizer: &Tokenizer) -> bool {
        let special = |text: &&str| tokenizer.id_of(text).is_some_and(|id| tokenizer.is_special(id));
        let marks = self.reasoning.marks().map_or([""; 2], |marks| [marks.open, marks.close]);
        self.harmony()
            || (reading.separate_reasoning && marks.iter().any(special))
            || (reading.tools == ToolChoice::Auto && self.tools != ToolParser::Passthrough)
    }
}

/// How a family marks its reasoning.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Marks {
    pub open: &'static str,
    pub close: &'static str,
    /// The output begins inside, though nothing says so.
    pub habit: bool,
    /// A call may come without the closing mark.
    pub calls_end_it: bool,
}

const fn marks(open: &'static str, close: &'static str) -> Marks {
    Marks { open, close, habit: false, calls_end_it: false }
}

const THINK: &Marks = &marks("<think>", "</think>");
const THINKING: &Marks = &Marks { habit: true, ..marks("<think>", "</think>") };
const THINK_OR_CALL: &Marks = &Marks { calls_end_it: true, ..marks("<think>", "</think>") };
const THINKING_OR_CALL: &Marks = &Marks { habit: true, calls_end_it: true, ..marks("<think>", "</think>") };
const KIMI: &Marks = &marks("◁think▷", "◁/think▷");
const COHERE: &Marks = &marks("<|START_THINKING|>", "<|END_THINKING|>");
const MINIMAX_M3: &Marks = &marks("<mm:think>", "</mm:think>");
const MISTRAL: &Marks = &marks("[THINK]", "[/THINK]");

/// How a model writes its reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReasoningParser(Reasoning);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Reasoning {
    #[default]
    Passthrough,
    Marks(&'static Marks),
    Harmony,
}

/// Name, and what it stands for.
const REASONING: &[(&str, Reasoning)] = &[
    ("passthrough", Reasoning::Passthrough),
    ("base", Reasoning::Marks(THINK)),
    ("deepseek_r1", Reasoning::Marks(THINKING)),
    ("deepseek_v31", Reasoning::Marks(THINK)),
    ("deepseek_v4", Reasoning::Marks(THINK_OR_CALL)),
    ("qwen3", Reasoning::Marks(THINK)),
    ("qwen3_thinking", Reasoning::Marks(THINKING)),
    ("kimi", Reasoning::Marks(KIMI)),
    ("kimi_k25", Reasoning::Marks(THINK_OR_CALL)),
    ("kimi_thinking", Reasoning::Marks(THINKING_OR_CALL)),
    ("glm45", Reasoning::Marks(THINK)),
    ("step3", Reasoning::Marks(THINKING)),
    ("minimax", Reasoning::Marks(THINKING_OR_CALL)),
    ("minimax_m3", Reasoning::Marks(MINIMAX_M3)),
    ("cohere_cmd", Reasoning::Marks(COHERE)),
    ("nano_v3", Reasoning::Marks(THINK_OR_CALL)),
    ("mistral", Reasoning::Marks(MISTRAL)),
    ("gpt_oss", Reasoning::Harmony),
    ("harmony", Reasoning::Harmony),
];

/// Part of a model's id in lower case, and the name of its parser; the first that fits counts.
const REASONING_MODELS: &[(&str, &str)] = &[
    ("deepseek-r1", "deepseek_r1"),
    ("deepseek-v4", "deepseek_v4"),
    ("deepseek_v4", "deepseek_v4"),
    ("deepseek-v3.1", "deepseek_v31"),
    ("deepseek-v3-1", "deepseek_v31"),
    ("deepseek-v3.2", "deepseek_v31"),
    ("qwen3-thinking", "qwen3_thinking"),
    ("qwen-thinking", "qwen3_thinking"),
    ("qwen", "qwen3"),
    ("qwq", "qwen3_thinking"),
    ("glm-4.5", "glm45"),
    ("glm-4.6", "glm45"),
    ("glm-4.7", "glm45"),
    ("glm-5", "glm45"),
    ("glm45", "glm45"),
    ("glm47", "glm45"),
    ("kimi-k2-thinking", "kimi_thinking"),
    ("kimi-k2.5", "kimi_k25"),
    ("kimi", "kimi"),
    ("step3", "step3"),
    ("step-3", "step3"),
    ("minimax-m3", "minimax_m3"),
    ("mm-m3", "minimax_m3"),
    ("minimax", "minimax"),
    ("mm-m2", "minimax"),
    ("command-r", "cohere_cmd"),
    ("command-a", "cohere_cmd"),
    ("c4ai-command", "cohere_cmd"),
    ("cohere", "cohere_cmd"),
    ("nemotron-nano", "nano_v3"),
    ("nemotron-super", "nano_v3"),
    ("nemotron-3", "nano_v3"),
    ("nano-v3", "nano_v3"),
    ("magistral", "mistral"),
    ("gpt-oss", "gpt_oss"),
    ("gpt_oss", "gpt_oss"),
];

impl ReasoningParser {
    /// Reasoning is not told apart.
    pub const PASSTHROUGH: Self = Self(Reasoning::Passthrough);

    /// The parser of this name.
    ///
    /// # Errors
    /// There is none.
    pub fn named(name: &str) -> Result<Self, UnknownParser> {
        let found = REASONING.iter().find(|(known, _)| *known == name);
        found.map(|(_, reasoning)| Self(*reasoning)).ok_or_else(|| UnknownParser::Reasoning(name.to_owned()))
    }

    /// The parser that a model's id suggests.
    #[must_use]
    pub fn of_model(model: &str) -> Self {
        let model = model.to_lowercase();
        let name = REASONING_MODELS.iter().find(|(part, _)| model.contains(part)).map(|(_, name)| *name);
        name.and_then(|name| Self::named(name).ok()).unwrap_or_default()
    }

    /// All names.
    #[must_use]
    pub fn names() -> Vec<&'static str> {
        REASONING.iter().map(|(name, _)| *name).collect()
    }

    /// Whether a prompt of this text leaves the output inside the reasoning (true), behind it (false), or neither.
    ///
    /// Only the end of the prompt counts, where the template may have opened or closed the reasoning: marks that anyone
    /// wrote into a message say nothing. `continued`: the message of the assistant's that the output goes on with, which
    /// counts as a whole.
    #[must_use]
    pub fn opened_by(self, prompt: &str, continued: Option<&str>) -> Option<bool> {
        let marks = self.marks()?;
        if let Some(message) = continued {
            let (open, close) = (message.rfind(marks.open), message.rfind(marks.close));
            return (open.is_some() || close.is_some()).then_some(open > close);
        }
        let prompt = prompt.trim_end();
        match (prompt.ends_with(marks.open), prompt.ends_with(marks.close)) {
            (false, false) => None,
            (open, _) => Some(open),
        }
    }

    pub(super) fn marks(self) -> Option<&'static Marks> {
        if let Reasoning::Marks(marks) = self.0 { Some(marks) } else { None }
    }

    pub(super) fn is_harmony(self) -> bool {
        self.0 == Reasoning::Harmony
    }

    pub(super) fn is_passthrough(self) -> bool {
        self.0 == Reasoning::Passthrough
    }
}

/// How a model writes its calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ToolParser {
    /// Calls are not told apart.
    #[default]
    Passthrough,
    /// A JSON object, or an array of them, and nothing else.
    Json,
    /// The same, or after `<|python_tag|>` (Llama 3).
    Llama,
    /// JSON objects in `<tool_call>` (Hermes, Qwen 2.5 and 3).
    Qwen,
    /// Parameters in tags within `<tool_call>` (Qwen 3 Coder, Nemotron 3).
    QwenXml,
    /// A JSON array, or a name and an object, after `[TOOL_CALLS]`.
    Mistral,
    /// A list of Python calls (Llama 4).
    Pythonic,
    /// DeepSeek V3, R1 and V3.1.
    DeepSeek,
    /// DeepSeek V3.2: invocations in a markup of its own.
    DeepSeek32,
    /// DeepSeek V4: the same under another name.
    DeepSeek4,
    /// Kimi K2.
    Kimi,
    /// GLM 4.5 to 5.
    Glm,
    /// Step 3.
    Step3,
    /// MiniMax M2.
    MiniMax,
    /// JSON after `<|START_ACTION|>` (Command R and A).
    Cohere,
    /// gpt-oss.
    Harmony,
}

const TOOLS: &[(&str, ToolParser)] = &[
    ("passthrough", ToolParser::Passthrough),
    ("json", ToolParser::Json),
    ("llama", ToolParser::Llama),
    ("llama3", ToolParser::Llama),
    ("llama3_json", ToolParser::Llama),
    ("qwen", ToolParser::Qwen),
    ("qwen25", ToolParser::Qwen),
    ("hermes", ToolParser::Qwen),
    ("qwen_xml", ToolParser::QwenXml),
    ("qwen_coder", ToolParser::QwenXml),
    ("qwen3_coder", ToolParser::QwenXml),
    ("nemotron", ToolParser::QwenXml),
    ("mistral", ToolParser::Mistral),
    ("pythonic", ToolParser::Pythonic),
    ("deepseek", ToolParser::DeepSeek),
    ("deepseek_v3", ToolParser::DeepSeek),
    ("deepseekv3", ToolParser::DeepSeek),
    ("deepseek31", ToolParser::DeepSeek),
    ("deepseek_v31", ToolParser::DeepSeek),
    ("deepseek32", ToolParser::DeepSeek32),
    ("deepseek_v32", ToolParser::DeepSeek32),
    ("deepseek_v4", ToolParser::DeepSeek4),
    ("kimik2", ToolParser::Kimi),
    ("kimi_k2", ToolParser::Kimi),
    ("glm45_moe", ToolParser::Glm),
    ("glm47_moe", ToolParser::Glm),
    ("glm45", ToolParser::Glm),
    ("step3", ToolParser::Step3),
    ("minimax_m2", ToolParser::MiniMax),
    ("cohere", ToolParser::Cohere),
    ("gpt_oss", ToolParser::Harmony),
    ("harmony", ToolParser::Harmony),
];

const TOOL_MODELS: &[(&str, &str)] = &[
    ("gpt-oss", "gpt_oss"),
    ("gpt_oss", "gpt_oss"),
    ("mistral", "mistral"),
    ("mixtral", "mistral"),
    ("magistral", "mistral"),
    ("ministral", "mistral"),
    ("devstral", "mistral"),
    ("qwen3.5", "qwen_xml"),
    ("qwen3.6", "qwen_xml"),
    ("qwen3.8", "qwen_xml"),
    ("qwen3-coder", "qwen_xml"),
    ("qwen", "qwen"),
    ("hermes", "hermes"),
    ("nemotron-3", "qwen_xml"),
    ("llama-4", "pythonic"),
    ("llama-3.2", "llama"),
    ("llama-3", "llama"),
    ("llama", "json"),
    ("deepseek-v4", "deepseek_v4"),
    ("deepseek-v3.2-exp", "deepseek31"),
    ("deepseek-v3.2", "deepseek32"),
    ("deepseek-v3.1", "deepseek31"),
    ("deepseek", "deepseek"),
    ("glm-4.5", "glm45_moe"),
    ("glm-4.6", "glm45_moe"),
    ("glm-4.7", "glm47_moe"),
    ("glm-5", "glm47_moe"),
    ("step3", "step3"),
    ("step-3", "step3"),
    ("kimi-k2", "kimik2"),
    ("minimax-m2", "minimax_m2"),
    ("command-r", "cohere"),
    ("command-a", "cohere"),
    ("c4ai-command", "cohere"),
    ("cohere", "cohere"),
];

impl ToolParser {
    /// The parser of this name.
    ///
    /// # Errors
    /// There is none.
    pub fn named(name: &str) -> Result<Self, UnknownParser> {
        let found = TOOLS.iter().find(|(known, _)| *known == name);
        found.map(|(_, parser)| *parser).ok_or_else(|| UnknownParser::Tools(name.to_owned()))
    }

    /// The parser that a model's id suggests; calls of other models are not told apart.
    #[must_use]
    pub fn of_model(model: &str) -> Self {
        let model = model.to_lowercase();
        let name = TOOL_MODELS.iter().find(|(part, _)| model.contains(part)).map(|(_, name)| *name);
        name.and_then(|name| Self::named(name).ok()).unwrap_or_default()
    }

    /// All names.
    #[must_use]
    pub fn names() -> Vec<&'static str> {
        TOOLS.iter().map(|(name, _)| *name).collect()
    }

    /// Whether nothing but the text itself tells that a call begins.
    pub(super) fn is_bare(self) -> bool {
        matches!(self, Self::Json | Self::Llama | Self::Pythonic)
    }

    /// What begins calls within text.
    pub(super) fn begins(self) -> &'static [&'static str] {
        match self {
            Self::Passthrough | Self::Json | Self::Pythonic | Self::Harmony => &[],
            Self::Llama => &["<|python_tag|>"],
            Self::Qwen | Self::QwenXml | Self::Glm => &["<tool_call>"],
            Self::Mistral => &["[TOOL_CALLS]"],
            Self::DeepSeek => &["<｜tool▁calls▁begin｜>"],
            Self::DeepSeek32 => &["<｜DSML｜function_calls>"],
            Self::DeepSeek4 => &["<｜DSML｜tool_calls>"],
            Self::Kimi => &["<|tool_calls_section_begin|>"],
            Self::Step3 => &["<｜tool_calls_begin｜>"],
            Self::MiniMax => &["<minimax:tool_call>"],
            Self::Cohere => &["<|START_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"],
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_name_that_a_model_leads_to_exists() {
        for (_, name) in REASONING_MODELS {
            ReasoningParser::named(name).unwrap();
        }
        for (_, name) in TOOL_MODELS {
            ToolParser::named(name).unwrap();
        }
    }

    #[test]
    fn a_models_id_leads_to_its_parsers() {
        let of = |model| Parsers::choose(None, None, model).unwrap();
        assert_eq!(of("Qwen/Qwen3-8B").tools, ToolParser::Qwen);
        assert_eq!(of("Qwen/Qwen3-Coder-30B-A3B-Instruct").tools, ToolParser::QwenXml);
        assert_eq!(of("deepseek-ai/DeepSeek-R1").reasoning, ReasoningParser::named("deepseek_r1").unwrap());
        assert_eq!(of("openai/gpt-oss-20b").tools, ToolParser::Harmony);
        assert_eq!(of("tiny"), Parsers::default());
        let named = Parsers::choose(Some("passthrough"), Some("json"), "Qwen/Qwen3-8B").unwrap();
        assert_eq!(named, Parsers { reasoning: ReasoningParser::PASSTHROUGH, tools: ToolParser::Json });
    }

    #[test]
    fn an_unknown_name_is_refused_with_the_known_ones() {
        let refused = Parsers::choose(None, Some("qwne"), "").unwrap_err().to_string();
        assert!(refused.contains("`qwne`") && refused.contains("qwen_coder"), "{refused}");
    }

    #[test]
    fn only_the_end_of_a_prompt_opens_or_closes_reasoning() {
        let qwen = ReasoningParser::named("qwen3").unwrap();
        assert_eq!(qwen.opened_by("<|im_start|>assistant\n<think>\n", None), Some(true));
        assert_eq!(qwen.opened_by("<|im_start|>assistant\n<think>\n\n</think>\n\n", None), Some(false));
        assert_eq!(qwen.opened_by("What does <think> mean?<|im_end|>", None), None);
        assert_eq!(qwen.opened_by("...", Some("<think>so far")), Some(true));
        assert_eq!(qwen.opened_by("...", Some("<think>so</think> far")), Some(false));
        assert_eq!(qwen.opened_by("...", Some("so far")), None);
    }
}
