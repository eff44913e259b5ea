//! Log probabilities of the prompt, which only the prefill knows (SMG PD docs, "Failures, Cancellation, and Streaming").
//!
//! The decode engine took the prompt's KV over without computing it, so its `meta_info.input_token_logprobs` lacks what the prefill's has.
//! The merged answer is the decode's, byte for byte, but for these lists, which become the prefill's entries followed by the decode's. The
//! number texts of both stay as the engines wrote them. A batch is a list of answers and is merged one by one.
//!
//! An answer that cannot be merged (no JSON, no lists) stays the decode's own.

use std::ops::Range;

use crate::json;

/// The lists to merge. An answer without the first has nothing to merge.
const LISTS: [&str; 3] = ["input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs"];

/// The decode's answer with the prefill's entries in it; none when they cannot be merged.
pub fn merge(prefill: &str, decode: &str) -> Option<String> {
    if !decode.trim_start().starts_with('[') {
        return apply(decode, edits(prefill, decode, decode)?);
    }
    let (mut prefills, mut decodes) = (Vec::new(), Vec::new());
    json::each_element(prefill, |answer| prefills.push(answer)).ok()?;
    json::each_element(decode, |answer| decodes.push(answer)).ok()?;
    if prefills.len() != decodes.len() {
        return None;
    }
    let each = prefills.iter().zip(&decodes).map(|(prefill, answer)| edits(prefill, answer, decode));
    apply(decode, each.collect::<Option<Vec<_>>>()?.into_iter().flatten().collect())
}

/// The answers in a prefill's stream of events, each to be merged into the first event of the same place in the batch.
#[derive(Debug)]
pub struct StreamedAnswers(Vec<(String, String)>);

impl StreamedAnswers {
    /// Reads the stream: of each place the last event has the whole list.
    pub fn read(stream: &str) -> Self {
        let mut answers: Vec<(String, String)> = Vec::new();
        for data in stream.lines().filter_map(|line| line.strip_prefix("data:")).map(str::trim) {
            if !data.starts_with('{') {
                continue;
            }
            match answers.iter_mut().find(|(place, _)| *place == place_of(data)) {
                Some((_, answer)) => data.clone_into(answer),
                None => answers.push((place_of(data).to_owned(), data.to_owned())),
            }
        }
        Self(answers)
    }

    /// The decode's event with the prefill's entries in it; none when it stays as it is.
    pub fn merge(&mut self, event: &str) -> Option<String> {
        if self.0.is_empty() || !event.starts_with('{') {
            return None;
        }
        let place = place_of(event);
        let found = self.0.iter().position(|(other, _)| other == place)?;
        merge(&self.0.swap_remove(found).1, event)
    }
}

/// The place of an event's answer in the batch. A lone answer may do without it.
fn place_of(event: &str) -> &str {
    json::member(event, "index").unwrap_or("0")
}

/// What to write in the place of a piece of text.
pub(crate) type Edit = (Range<usize>, String);

/// What to replace in `whole`, of which `decode` is a part.
fn edits(prefill: &str, decode: &str, whole: &str) -> Option<Vec<Edit>> {
    let (prefill, decode) = (json::member(prefill, "meta_info")?, json::member(decode, "meta_info")?);
    let mut edits = Vec::new();
    for name in LISTS {
        let list = |meta| json::member(meta, name).filter(|list| list.starts_with('['));
        match (list(prefill), list(decode)) {
            (Some(before), Some(after)) => {
                let start = after.as_ptr().addr() - whole.as_ptr().addr();
                edits.push((start..start + after.len(), concatenated(before, after)));
            }
            _ if name == LISTS[0] => return None,
            _ => {}
        }
    }
    Some(edits)
}

fn concatenated(one: &str, other: &str) -> String {
    // Only the outermost bracket goes: entries are lists themselves.
    let strip = |list: &str| list.get(1..list.len() - 1).unwrap_or_default().trim().to_owned();
    let (one, other) = (strip(one), strip(other));
    let separator = if one.is_empty() || other.is_empty() { "" } else { "," };
    format!("[{one}{separator}{other}]")
}

/// `text` with the edits made; none when they overlap or stand outside.
pub(crate) fn apply(text: &str, mut edits: Vec<Edit>) -> Option<String> {
    edits.sort_by_key(|(range, _)| range.start);
    let mut merged = String::with_capacity(text.len() + edits.iter().map(|(_, new)| new.len()).sum::<usize>());
    let mut position = 0;
    for (range, new) in edits {
        merged.push_str(text.get(position..range.start)?);
        merged.push_str(&new);
        position = range.end;
    }
    merged.push_str(text.get(position..)?);
    Some(merged)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const PREFILL: &str = r#"{"text":"","meta_info":{"input_token_logprobs":[[null,1,null],[-0.5,2,null]],"input_top_logprobs":[null,[[-1.25,3,null]]]}}"#;

    #[test]
    fn the_prefills_entries_come_first_and_everything_else_stays_as_the_decode_wrote_it() {
        let decode = r#"{ "text":"é", "meta_info": {"input_token_logprobs": [ ], "input_top_logprobs":[], "output_token_logprobs":[[-2.0,4,null]]} }"#;
        let expected = r#"{ "text":"é", "meta_info": {"input_token_logprobs": [[null,1,null],[-0.5,2,null]], "input_top_logprobs":[null,[[-1.25,3,null]]], "output_token_logprobs":[[-2.0,4,null]]} }"#;
        assert_eq!(merge(PREFILL, decode).unwrap(), expected);
    }

    #[test]
    fn lists_of_both_are_joined() {
        let decode = r#"{"meta_info":{"input_token_logprobs":[[-9.0,9,null]]}}"#;
        let expected = r#"{"meta_info":{"input_token_logprobs":[[null,1,null],[-0.5,2,null],[-9.0,9,null]]}}"#;
        assert_eq!(merge(PREFILL, decode).unwrap(), expected);
    }

    #[test]
    fn a_batch_is_merged_one_by_one() {
        let decode = r#"{"meta_info":{"input_token_logprobs":[]}}"#;
        let merged = merge(&format!("[{PREFILL}, {PREFILL}]"), &format!("[{decode}, {decode}]")).unwrap();
        assert_eq!(merged.matches("-0.5").count(), 2);
        assert_eq!(merge(&format!("[{PREFILL}]"), &format!("[{decode},{decode}]")), None);
    }

    #[test]
    fn what_cannot_be_merged_is_left_alone() {
        let decode = r#"{"meta_info":{"input_token_logprobs":[]}}"#;
        for (prefill, decode) in [
            ("not json", decode),
            ("{}", decode),
            (PREFILL, "not json"),
            (PREFILL, r#"{"meta_info":{}}"#),
            (PREFILL, r#"{"meta_info":{"input_token_logprobs":null}}"#),
        ] {
            assert_eq!(merge(prefill, decode), None, "{prefill} {decode}");
        }
    }

    #[test]
    fn each_answer_of_a_streamed_batch_gets_its_own_entries_once() {
        let event = |index: usize, entry: &str| {
            format!(r#"{{"index":{index},"meta_info":{{"input_token_logprobs":[{entry}]}}}}"#)
        };
        let prefill = format!(
            "data: {}\n\ndata: {}\n\ndata: {}\r\n\r\ndata: [DONE]\n\n",
            event(0, ""),
            event(1, "[-2.0,2]"),
            event(0, "[-1.0,1]")
        );
        let mut answers = StreamedAnswers::read(&prefill);
        assert_eq!(answers.merge(&event(1, "")), Some(event(1, "[-2.0,2]")));
        assert_eq!(answers.merge(&event(1, "")), None);
        assert_eq!(answers.merge("[DONE]"), None);
        assert_eq!(answers.merge(&event(0, "")), Some(event(0, "[-1.0,1]")));
        assert_eq!(answers.merge(&event(0, "")), None);
    }

    #[test]
    fn a_lone_answer_needs_no_place() {
        let mut answers = StreamedAnswers::read(&format!(": ping\n\ndata: {PREFILL}\n\n"));
        assert!(answers.merge(r#"{"index":0,"meta_info":{"input_token_logprobs":[]}}"#).unwrap().contains("-0.5"));
        assert_eq!(StreamedAnswers::read(": ping\n\n").merge("{}"), None);
    }
}
