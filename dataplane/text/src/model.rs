//! All that turns one model's conversations into ids.

use std::sync::Arc;

use serde_json::Value;
use smg_apis::generation::ChatPrompt;

use crate::cache::TokenCache;
use crate::source::{Files, SourceError};
use crate::template::{ChatTemplate, Prompt, TemplateError};
use crate::tokenizer::{TokenizeError, Tokenizer};

/// The tokenizer and the chat template of a model, and its tokenizations.
#[derive(Debug)]
pub struct TextModel {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// The chat template, if the model has one.
    pub template: Option<ChatTemplate>,
    /// Tokenizations of its texts.
    pub cache: TokenCache,
}

impl TextModel {
    /// Reads a model's files. `template`: a chat template that replaces the model's own. `cache`: bytes of tokenizations
    /// that are kept.
    ///
    /// # Errors
    /// A file is missing or wrong, or the template is none. Blocks for up to seconds: large vocabularies take time.
    pub fn new(files: &Files, template: Option<&str>, cache: usize) -> Result<Self, SourceError> {
        let tokenizer = Tokenizer::new(files)?;
        let templates = match template {
            Some(text) => vec![("default".to_owned(), text.to_owned())],
            None => templates(files)?,
        };
        let template = if templates.is_empty() {
            None
        } else {
            let template = ChatTemplate::new(templates, tokenizer.named_tokens()).map_err(|error| {
                SourceError::Unreadable { file: "the chat template".to_owned(), reason: error.to_string() }
            })?;
            Some(template)
        };
        Ok(Self { tokenizer, template, cache: TokenCache::new(cache) })
    }

    /// The text of a conversation; `now`: seconds since 1970 (UTC), for templates that write the date.
    ///
    /// # Errors
    /// The model has no chat template, or that refuses the conversation.
    pub fn render(&self, chat: &ChatPrompt, now: i64) -> Result<Prompt, TemplateError> {
        self.template.as_ref().ok_or(TemplateError::Missing)?.render(chat, now)
    }

    /// The ids of a text, from the cache if they are there. `special` as with [`Tokenizer::encode`]. May take long for long
    /// texts: not for a thread that serves others.
    ///
    /// # Errors
    /// The text cannot be tokenized.
    pub fn encode(&self, text: &str, special: bool) -> Result<Arc<[u32]>, TokenizeError> {
        self.cache.get_or_encode(text, special, || self.tokenizer.encode(text, special))
    }
}

/// The chat templates of a model by name: files of their own count more than `chat_template.json`, and that more than the
/// tokenizer's configuration.
fn templates(files: &Files) -> Result<Vec<(String, String)>, SourceError> {
    let own = files.templates()?;
    if !own.is_empty() {
        let name = |name: &str| if name == "chat_template" { "default".to_owned() } else { name.to_owned() };
        return Ok(own.into_iter().map(|(file, text)| (name(file), text.to_owned())).collect());
    }
    for file in ["chat_template.json", "tokenizer_config.json"] {
        let config = files.json(file)?;
        match config.as_ref().and_then(|config| config.get("chat_template")) {
            Some(Value::String(text)) => return Ok(vec![("default".to_owned(), text.clone())]),
            Some(Value::Array(list)) => {
                let text = |entry: &Value, key| entry.get(key).and_then(Value::as_str).map(str::to_owned);
                return Ok(list
                    .iter()
                    .filter_map(|entry| Some((text(entry, "name")?, text(entry, "template")?)))
                    .collect());
            }
            _ => {}
        }
    }
    Ok(Vec::new())
}
