//! Standard output: data and nothing else, in the form that was asked for.

use std::io::{self, Write};

use serde_json::{Value, json};

use super::failure::Failure;
use super::table::{self, Column};
use crate::cli::Output;

/// Writes results.
#[derive(Debug, Clone, Copy)]
pub struct Show {
    output: Output,
}

impl Show {
    /// In this form.
    pub fn new(output: Output) -> Self {
        Self { output }
    }

    /// Whether people read it.
    pub fn is_table(self) -> bool {
        matches!(self.output, Output::Table | Output::Wide)
    }

    fn is_wide(self) -> bool {
        self.output == Output::Wide
    }

    /// An answer: as a table of `rows`, or whole.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn answer(self, answer: &Value, columns: &[Column], rows: &[Value]) -> Result<(), Failure> {
        match self.output {
            Output::Table | Output::Wide => self.text(&table::table(columns, self.is_wide(), rows)),
            Output::Json => self.text(&format!("{answer:#}\n")),
            Output::Yaml => self.text(&yaml(answer)?),
        }
    }

    /// An answer that is one row.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn one(self, answer: &Value, columns: &[Column]) -> Result<(), Failure> {
        self.answer(answer, columns, std::slice::from_ref(answer))
    }

    /// An answer of a list.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn list(self, answer: &Value, name: &str, columns: &[Column]) -> Result<(), Failure> {
        self.answer(answer, columns, answer[name].as_array().map(Vec::as_slice).unwrap_or_default())
    }

    /// What a rehearsal would lead to: for people whole too, since it has no columns of its own.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn rehearsal(self, answer: &Value) -> Result<(), Failure> {
        match self.output {
            Output::Yaml => self.text(&yaml(answer)?),
            _ => self.text(&format!("{answer:#}\n")),
        }
    }

    /// The titles of a list that is followed.
    ///
    /// # Errors
    /// When they cannot be written.
    pub fn titles(self, columns: &[Column]) -> Result<(), Failure> {
        if !self.is_table() {
            return Ok(());
        }
        self.row("EVENT".to_owned(), table::titles(columns, self.is_wide()))
    }

    /// One event of a list that is followed: `put` with the object, or `deleted` with its name.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn event(self, event: &Value, columns: &[Column]) -> Result<(), Failure> {
        match self.output {
            Output::Json => self.text(&format!("{event}\n")),
            Output::Yaml => self.text(&format!("---\n{}", yaml(event)?)),
            Output::Table | Output::Wide => {
                let kind = event["type"].as_str().unwrap_or_default().to_owned();
                match event["object"].is_object() {
                    true => self.row(kind, table::cells(columns, self.is_wide(), &event["object"])),
                    false => self.row(kind, vec![table::cell(&event["name"])]),
                }
            }
        }
    }

    fn row(self, first: String, rest: Vec<String>) -> Result<(), Failure> {
        let row: Vec<String> = std::iter::once(first).chain(rest).collect();
        let widths = vec![8; row.len()];
        self.text(&(table::line(&row, &widths) + "\n"))
    }

    /// Text as it is.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn text(self, text: &str) -> Result<(), Failure> {
        let mut out = io::stdout().lock();
        Ok(out.write_all(text.as_bytes()).and_then(|()| out.flush())?)
    }
}

fn yaml(value: &Value) -> Result<String, Failure> {
    let text = serde_saphyr::to_string(value).map_err(|error| Failure::Answer(error.to_string()))?;
    Ok(if text.ends_with('\n') { text } else { text + "\n" })
}

/// Says something to people, who may be gone.
pub fn note(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Cells of a pairing matrix with their reasons in words.
pub fn cells(answer: &Value) -> Vec<Value> {
    let list = answer["cells"].as_array().cloned().unwrap_or_default();
    let worded = |mut cell: Value| {
        let reasons = cell["reasons"].as_array().cloned().unwrap_or_default();
        let word = |reason: &Value| {
            let leg = |leg: &str| table::cell(&reason[leg]);
            format!("{}: {} / {}", table::cell(&reason["component"]), leg("prefill"), leg("decode"))
        };
        cell["reasons_text"] = json!(reasons.iter().map(word).collect::<Vec<_>>().join("; "));
        cell
    };
    list.into_iter().map(worded).collect()
}

/// Audit records with their changes and time in words.
pub fn records(answer: &Value) -> Vec<Value> {
    let list = answer["records"].as_array().cloned().unwrap_or_default();
    let worded = |mut record: Value| {
        let changes = record["changes"].as_array().cloned().unwrap_or_default();
        let word = |change: &Value| {
            let value = |name: &str| table::cell(&change[name]);
            format!("{}: {} → {}", value("field"), value("before"), value("after"))
        };
        record["changes_text"] = json!(changes.iter().map(word).collect::<Vec<_>>().join("; "));
        record["time"] = json!(table::time(record["at_unix_ms"].as_u64().unwrap_or_default()));
        record
    };
    list.into_iter().map(worded).collect()
}
