//! Log probabilities of the prompt on vLLM (`prompt_logprobs`; vLLM 0.32).
//!
//! A decode engine that took a prompt's KV over has not computed the prompt. Asked for the log probabilities of its tokens,
//! vLLM answers all the same, with memory that was never written, or fails on it. So no decode leg with a handoff is asked:
//!
//! * where the answer has them in a member of their own, the prefill is asked, and its list is put into the decode's answer,
//!   which stays as it is otherwise, byte for byte;
//! * where they stand among those of the output (`echo`), or the answer is a stream, there is no handoff: the decode
//!   computes the prompt, and answers as one engine does.

use crate::body::{ClientBody, Route};
use crate::field::Field;
use crate::json;
use crate::logprobs::{Edit, apply};

/// How a request asks for the log probabilities of its prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PromptLogprobs {
    /// Not at all.
    Unasked,
    /// In a member of their own, in an answer that comes whole.
    Apart,
    /// In a way that only the engine can write that computed both prompt and output.
    Mixed,
}

impl PromptLogprobs {
    /// What `body` asks for. With `echo`, vLLM lists them unasked: always in a chat, in a completion beside those of the
    /// output.
    pub fn of(body: &ClientBody) -> Self {
        let asked = body.value(Field::PromptLogprobs).is_some();
        let echo = body.value(Field::Echo).is_some_and(|raw| raw != "false");
        let unasked_too = match body.route() {
            Route::ChatCompletions => true,
            Route::Completions => body.value(Field::Logprobs).is_some(),
            _ => return Self::Unasked,
        };
        match (echo && unasked_too, asked) {
            (false, false) => Self::Unasked,
            (false, true) if !body.stream() => Self::Apart,
            _ => Self::Mixed,
        }
    }
}

/// The decode's answer with the prefill's lists in it: a chat's own, or those of a completion's choices. None when the prefill
/// has none.
pub fn put(prefill: &str, decode: &str) -> Option<String> {
    let (from, into) = (choices(prefill), choices(decode));
    let same = from.len() == into.len();
    let of_choices = from.iter().zip(&into).filter(|_| same).filter_map(|(from, into)| edit(from, into, decode));
    let edits: Vec<Edit> = edit(prefill, decode, decode).into_iter().chain(of_choices).collect();
    if edits.is_empty() { None } else { apply(decode, edits) }
}

fn choices(answer: &str) -> Vec<&str> {
    let mut choices = Vec::new();
    if let Some(list) = json::member(answer, "choices") {
        // The text was checked when the member was found, so the walk cannot fail; what is no list has no choices.
        let _ = json::each_element(list, |choice| choices.push(choice));
    }
    choices
}

/// What to change in `whole` so that its part `into` has the list of `from`.
fn edit(from: &str, into: &str, whole: &str) -> Option<Edit> {
    let name = Field::PromptLogprobs.name();
    let list = json::member(from, name).filter(|list| list.starts_with('['))?;
    let (mut place, mut separator) = (None, "");
    json::each_member(into, |key, value| {
        separator = ",";
        if json::string(key).is_some_and(|key| key == name) {
            place = Some(value);
        }
    })
    .ok()?;
    let at = |part: &str| part.as_ptr().addr() - whole.as_ptr().addr();
    Some(match place {
        Some(value) => (at(value)..at(value) + value.len(), list.to_owned()),
        None => {
            let brace = at(into) + into.trim_end().len() - 1;
            (brace..brace, format!("{separator}\"{name}\":{list}"))
        }
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_requests_own_words_say_where_they_stand() {
        use PromptLogprobs::{Apart, Mixed, Unasked};
        use Route::{ChatCompletions, Completions, Responses};
        let of = |text: &'static str, route| PromptLogprobs::of(&ClientBody::parse(text.into(), route).unwrap());
        for (text, chat, completion) in [
            (r#"{}"#, Unasked, Unasked),
            (r#"{"prompt_logprobs":null,"echo":false}"#, Unasked, Unasked),
            (r#"{"logprobs":1}"#, Unasked, Unasked),
            (r#"{"prompt_logprobs":0}"#, Apart, Apart),
            (r#"{"prompt_logprobs":5,"stream":false,"logprobs":2}"#, Apart, Apart),
            (r#"{"prompt_logprobs":5,"stream":true}"#, Mixed, Mixed),
            (r#"{"echo":true}"#, Mixed, Unasked),
            (r#"{"echo":true,"logprobs":0}"#, Mixed, Mixed),
            (r#"{"echo":true,"prompt_logprobs":0}"#, Mixed, Apart),
            (r#"{"echo":true,"prompt_logprobs":0,"logprobs":1}"#, Mixed, Mixed),
        ] {
            assert_eq!(of(text, ChatCompletions), chat, "chat {text}");
            assert_eq!(of(text, Completions), completion, "completion {text}");
            assert_eq!(of(text, Responses), Unasked, "{text}");
        }
    }

    #[test]
    fn a_chat_gets_the_prefills_list_and_everything_else_stays_as_it_is() {
        let prefill = r#"{"id":"p","prompt_logprobs":[null, {"5":{"logprob":-0.50}}],"choices":[{"text":"x"}]}"#;
        for (decode, expected) in [
            (
                r#"{ "id":"d","choices":[{"a" :1.50}],"prompt_logprobs" : null,"usage":{} } "#,
                r#"{ "id":"d","choices":[{"a" :1.50}],"prompt_logprobs" : [null, {"5":{"logprob":-0.50}}],"usage":{} } "#,
            ),
            (
                r#"{"prompt_logprobs":[null,{"0":{"logprob":7e33}}]}"#,
                r#"{"prompt_logprobs":[null, {"5":{"logprob":-0.50}}]}"#,
            ),
            (r#"{"id":"é"} "#, r#"{"id":"é","prompt_logprobs":[null, {"5":{"logprob":-0.50}}]} "#),
            (r#"{ }"#, r#"{ "prompt_logprobs":[null, {"5":{"logprob":-0.50}}]}"#),
        ] {
            assert_eq!(put(prefill, decode).unwrap(), expected);
        }
    }

    #[test]
    fn each_choice_of_a_completion_gets_the_list_of_its_prompt() {
        let choice = |list: &str| format!(r#"{{"text":"x","prompt_logprobs":{list},"index":0}}"#);
        let answer = |one: &str, two: &str| format!(r#"{{"choices":[{},{}],"n":1}}"#, choice(one), choice(two));
        assert_eq!(put(&answer("[1]", "[2]"), &answer("null", "[9]")).unwrap(), answer("[1]", "[2]"));
        assert_eq!(put(&answer("null", "[2]"), &answer("null", "null")).unwrap(), answer("null", "[2]"));
    }

    #[test]
    fn where_the_prefill_tells_none_the_answer_is_the_decodes_own() {
        let decode = r#"{"choices":[{"prompt_logprobs":null}],"prompt_logprobs":null}"#;
        for prefill in [
            "no json",
            "[]",
            r#"{"prompt_logprobs":null}"#,
            r#"{"prompt_logprobs":5}"#,
            r#"{"choices":{}}"#,
            r#"{"choices":[{"prompt_logprobs":[1]},{"prompt_logprobs":[2]}]}"#,
        ] {
            assert_eq!(put(prefill, decode), None, "{prefill}");
        }
        assert_eq!(put(r#"{"prompt_logprobs":[1]}"#, "cut {"), None);
    }
}
