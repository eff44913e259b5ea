//! Output that has to be a call: JSON after the schema of [`crate::forced`].

use smg_apis::generation::ToolChoice;

use super::cursor::{Cursor, Malformed, Sink};
use super::json::FIELDS;
use super::names::ReasoningParser;
use super::{Calls, reasoning, tagged};
use crate::markers::Markers;

/// Reads the calls; output that is no JSON, because the engine did not hold to the schema, is content.
pub(super) async fn read(
    mut cursor: Cursor,
    mut calls: Calls,
    parser: ReasoningParser,
    opened: Option<bool>,
    choice: ToolChoice,
) {
    let (cursor, calls) = (&mut cursor, &mut calls);
    // Whether the schema holds from the first token on, or from behind the reasoning, is the engine's business.
    cursor.mark();
    cursor.space().await;
    if !matches!(cursor.peek().await, Some('{' | '[')) {
        let inside = opened == Some(true);
        cursor.recover_to(if inside { Sink::Reasoning } else { Sink::Content });
        reasoning::read(cursor, parser, opened, &[]).await;
        cursor.mark();
        cursor.space().await;
    }
    let well = match (choice, cursor.peek().await) {
        (ToolChoice::Function(name), Some('{')) => match calls.begin(cursor, &name, None) {
            Ok(index) => cursor.value(Sink::Arguments(index)).await,
            Err(malformed) => Err(malformed),
        },
        (_, Some('[')) => tagged::array(cursor, calls, FIELDS).await,
        (_, Some('{')) => cursor.call(calls, FIELDS).await,
        _ => Err(Malformed),
    };
    cursor.conclude(well, calls.count > 0).await;
    cursor.pass_trimmed(&Markers::default(), calls.count > 0).await;
}
