//! Harmony, the format of gpt-oss: messages with a channel each.
//!
//! `<|channel|>analysis<|message|>..<|end|><|start|>assistant<|channel|>commentary to=functions.name
//! <|constrain|>json<|message|>{..}<|call|>`, and at last `<|channel|>final<|message|>..<|return|>`. The prompt ends with
//! `<|start|>assistant`, so the output begins with the header of a message.

use super::Calls;
use super::cursor::{Cursor, Malformed, Sink};
use super::json::NAME;
use crate::markers::Markers;

/// What ends a message: its own end, or the header of the next one.
const ENDS: [&str; 5] = ["<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>"];
const START: usize = 3;
const CHANNEL: usize = 4;

/// Reads messages to the end. `separate`: reasoning is told apart; `tools`: calls are.
pub(super) async fn read(mut cursor: Cursor, mut calls: Calls, separate: bool, tools: bool) {
    let cursor = &mut cursor;
    let ends = Markers::new(ENDS);
    // Text before the first header is an answer without one.
    let mut end = if cursor.follows("<|start|>").await {
        Some(START)
    } else if cursor.follows("<|channel|>").await {
        Some(CHANNEL)
    } else {
        cursor.pass(&ends, Sink::Content).await
    };
    while let Some(number) = end {
        if number != START && number != CHANNEL {
            // Between messages.
            end = cursor.pass(&ends, Sink::Content).await;
            continue;
        }
        cursor.mark_after(ENDS[number]);
        end = match message(cursor, &mut calls, separate, tools).await {
            Ok((sink, index)) => {
                cursor.settle();
                cursor.set_reasoning(sink == Sink::Reasoning);
                let bare = cursor.peek().await.is_none() || cursor.follows("<|call|>").await;
                let end = if bare { None } else { cursor.pass(&ends, sink).await };
                if let Some(index) = index.filter(|_| bare) {
                    cursor.write(Sink::Arguments(index), "{}");
                }
                cursor.set_reasoning(false);
                if bare { cursor.pass(&ends, Sink::Content).await } else { end }
            }
            Err(Malformed) => {
                cursor.recover();
                cursor.pass(&ends, Sink::Content).await
            }
        };
    }
}

/// The header of a message up to its text: where that goes, and the call that it makes.
async fn message(
    cursor: &mut Cursor,
    calls: &mut Calls,
    separate: bool,
    tools: bool,
) -> Result<(Sink, Option<usize>), Malformed> {
    let (header, _) = cursor.until(&["<|message|>"], NAME).await?;
    let channel = header.rsplit_once("<|channel|>").map_or(header.as_str(), |(_, channel)| channel);
    let recipient = header.split_once("to=").and_then(|(_, rest)| rest.split([' ', '<', '\n']).next());
    match recipient.and_then(|recipient| recipient.strip_prefix("functions.")) {
        Some(name) if tools => {
            let index = calls.begin(cursor, name, None)?;
            Ok((Sink::Arguments(index), Some(index)))
        }
        _ if channel.trim_start().starts_with("analysis") && separate => Ok((Sink::Reasoning, None)),
        _ => Ok((Sink::Content, None)),
    }
}
