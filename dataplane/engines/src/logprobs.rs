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

/// The answer in a prefill's stream of events: its last event with data.
pub fn last_event(stream: &str) -> Option<&str> {
    let mut events = stream.lines().filter_map(|line| line.strip_prefix("data:")).map(str::trim);
    events.rfind(|data| data.starts_with(['{', '[']) && *data != "[DONE]")
}

type Edit = (Range<usize>, String);

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

fn apply(text: &str, mut edits: Vec<Edit>) -> Option<String> {
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
    fn the_last_event_of_a_stream_is_the_prefills_answer() {
        assert_eq!(last_event("data: {\"a\":1}\n\ndata: {\"a\":2}\r\n\r\ndata: [DONE]\n\n"), Some("{\"a\":2}"));
        assert_eq!(last_event(": ping\n\n"), None);
    }
}
