//! Scripts of engine output for tests, and what clients make of the answers.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use bytes::BytesMut;
use proptest::prelude::*;
use serde_json::Value;

use crate::answer::{Answer, Origin};
use crate::output::{Finish, FinishReason, MatchedStop, Piece, Step, TokenLogprob, Usage};

/// A part of a script.
#[derive(Debug, Clone)]
pub enum Event {
    Step(Step),
    Finish(Finish),
}

pub fn origin(id: &str) -> Origin {
    Origin { id: id.to_owned(), created: 1_700_000_000, model: "m".to_owned(), prompt_tokens: 9, weight_version: None }
}

pub fn content(text: &str) -> Piece {
    Piece::Content(text.to_owned())
}

pub fn reasoning(text: &str) -> Piece {
    Piece::Reasoning(text.to_owned())
}

pub fn call(index: usize, name: &str) -> Piece {
    Piece::ToolCall { index, id: format!("call_{index}"), name: name.to_owned() }
}

pub fn arguments(index: usize, fragment: &str) -> Piece {
    Piece::ToolArguments { index, fragment: fragment.to_owned() }
}

/// A step of one token.
pub fn step(sample: u32, pieces: Vec<Piece>) -> Event {
    Event::Step(Step { sample, pieces, token_ids: vec![5], logprobs: Vec::new() })
}

/// A step of one token with its log probability and one rival's.
pub fn logged(sample: u32, token: &str, pieces: Vec<Piece>) -> Event {
    Event::Step(Step { sample, pieces, token_ids: vec![5], logprobs: vec![logprob(token)] })
}

pub fn logprob(token: &str) -> TokenLogprob {
    TokenLogprob {
        token_id: 5,
        text: token.to_owned(),
        logprob: Some(-0.5),
        top: vec![(5, token.to_owned(), -0.5), (6, "~".to_owned(), -1.5)],
    }
}

pub fn usage() -> Usage {
    Usage { prompt_tokens: 9, completion_tokens: 4, cached_tokens: 2, reasoning_tokens: 1 }
}

pub fn finish(sample: u32, reason: FinishReason) -> Event {
    Event::Finish(Finish { sample, reason, matched_stop: None, usage: usage(), prompt_logprobs: Vec::new() })
}

pub fn stopped_by(sample: u32, stop: MatchedStop) -> Event {
    Event::Finish(Finish {
        sample,
        reason: FinishReason::Stop,
        matched_stop: Some(stop),
        usage: usage(),
        prompt_logprobs: Vec::new(),
    })
}

/// Everything that an answer writes.
pub fn drive(answer: &mut dyn Answer, script: &[Event]) -> String {
    let mut out = BytesMut::new();
    answer.start(&mut out);
    for event in script {
        match event {
            Event::Step(step) => answer.step(step, &mut out),
            Event::Finish(finish) => answer.finish(finish, &mut out),
        }
    }
    answer.end(&mut out);
    String::from_utf8(out.to_vec()).unwrap()
}

/// A document.
pub fn document(body: &str) -> Value {
    serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {body}"))
}

/// The events of a stream: name and data. `[DONE]` must be the last if it comes, and is left out.
pub fn events(stream: &str) -> Vec<(Option<String>, Value)> {
    let mut events = Vec::new();
    let frames: Vec<_> = stream.strip_suffix("\n\n").expect("a stream ends with an event").split("\n\n").collect();
    for (at, frame) in frames.iter().enumerate() {
        let (name, data) = match frame.strip_prefix("event: ") {
            Some(rest) => rest.split_once('\n').map(|(name, data)| (Some(name.to_owned()), data)).unwrap(),
            None => (None, *frame),
        };
        let data = data.strip_prefix("data: ").expect("data");
        assert!(!data.contains('\n'));
        if data == "[DONE]" {
            assert_eq!(at + 1, frames.len(), "nothing follows the end");
        } else {
            events.push((name, document(data)));
        }
    }
    events
}

/// The data of a stream's events.
pub fn data(stream: &str) -> Vec<Value> {
    events(stream).into_iter().map(|(_, data)| data).collect()
}

/// Appends text to a string member, or sets it.
pub fn append(target: &mut Value, more: &Value) {
    match (target.as_str(), more.as_str()) {
        (Some(before), Some(more)) => *target = Value::from(format!("{before}{more}")),
        _ => *target = more.clone(),
    }
}

/// An output of one sample, cut into steps in any way: reasoning, content, calls, content.
pub fn scripts(sample: u32) -> impl Strategy<Value = (Vec<Event>, Vec<Event>)> {
    let text = || prop_oneof![Just(String::new()), any::<String>(), "[a-z\"\\\\\n🙂]{0,12}"];
    let calls = prop::collection::vec(("[a-z_]{1,6}", "\\{\"[a-z]{0,3}\":[1-9][0-9]{0,3}\\}"), 0..3);
    let cuts = || prop::collection::vec(1..6_usize, 1..8);
    let reasons = prop_oneof![
        Just(FinishReason::Stop),
        Just(FinishReason::Length),
        Just(FinishReason::Abort),
        Just(FinishReason::Other("odd".to_owned()))
    ];
    (text(), text(), calls, text(), cuts(), cuts(), reasons).prop_map(
        move |(thought, before, calls, after, sizes, groups, reason)| {
            let mut pieces = vec![reasoning(&thought), content(&before)];
            for (index, (name, json)) in calls.iter().enumerate() {
                pieces.extend([call(index, name), arguments(index, json)]);
            }
            pieces.push(content(&after));
            let all_at_once = vec![step(sample, pieces.clone()), finish(sample, reason.clone())];
            let mut sizes = sizes.into_iter().cycle();
            let fragments: Vec<_> = pieces.into_iter().flat_map(|piece| cut(piece, &mut sizes)).collect();
            let mut groups = groups.into_iter().cycle();
            let mut steps = Vec::new();
            let mut left = fragments.as_slice();
            while !left.is_empty() {
                let (now, later) = left.split_at(groups.next().unwrap().min(left.len()));
                steps.extend([step(sample, now.to_vec()), step(sample, Vec::new())]);
                left = later;
            }
            // As many tokens as in the other script, for what counts them.
            for event in steps.iter_mut().skip(1) {
                if let Event::Step(step) = event {
                    step.token_ids.clear();
                }
            }
            steps.push(finish(sample, reason));
            (all_at_once, steps)
        },
    )
}

fn cut(piece: Piece, sizes: &mut impl Iterator<Item = usize>) -> Vec<Piece> {
    let mut chop = |text: &str| -> Vec<String> {
        let characters: Vec<char> = text.chars().collect();
        let mut left = characters.as_slice();
        let mut fragments = vec![String::new()];
        while !left.is_empty() {
            let (now, later) = left.split_at(sizes.next().unwrap().min(left.len()));
            fragments.push(now.iter().collect());
            left = later;
        }
        fragments
    };
    match piece {
        Piece::Content(text) => chop(&text).into_iter().map(Piece::Content).collect(),
        Piece::Reasoning(text) => chop(&text).into_iter().map(Piece::Reasoning).collect(),
        Piece::ToolArguments { index, fragment } => {
            chop(&fragment).into_iter().map(|fragment| Piece::ToolArguments { index, fragment }).collect()
        }
        call => vec![call],
    }
}
