//! `--watch`: a list that is followed.
//!
//! Lists that the server follows come as one line an event, in steps that a bookmark ends. A step is shown when all of it is there, so a watch
//! that breaks off goes on after the last one shown, at any server, and shows nothing twice. One whose past is no longer known starts anew,
//! and says so. What the server does not follow is asked for again and again, and shown when it has changed.

use std::time::Duration;

use http::StatusCode;
use http_body_util::BodyExt;
use serde_json::Value;

use super::Session;
use super::failure::Failure;
use super::show::note;
use super::table::Column;
use crate::operator::{AskError, Question};

/// Longest line of a watch, in bytes.
const MAX_LINE: usize = 16 << 20;
/// Largest step of a watch, in bytes: the first one is the whole list.
const MAX_STEP: usize = 256 << 20;
/// Before a watch is tried again, and between two looks at what the server does not follow.
const PAUSE: Duration = Duration::from_secs(2);
/// A watch that is silent for so long is broken: the server says something every ten seconds.
const SILENCE: Duration = Duration::from_secs(30);

/// The place in a watch from which it goes on.
#[derive(Debug, Clone, Default)]
struct Place(Option<(u64, String)>);

impl Place {
    fn of(event: &Value) -> Self {
        let history = event["history_id"].as_str().unwrap_or_default().to_owned();
        Self(event["revision"].as_u64().map(|revision| (revision, history)))
    }

    fn question(&self, path: &str, resumes: bool) -> Question {
        let separator = if path.contains('?') { '&' } else { '?' };
        let from = match &self.0 {
            Some((revision, history)) if resumes => format!("&from={revision}&history={history}"),
            _ => String::new(),
        };
        Question::get(format!("{path}{separator}watch=true{from}"))
    }
}

/// Follows a list until it cannot be any more. `resumes` says whether the server remembers where a watch was.
///
/// # Errors
/// What the first attempt meets, or a refusal later.
pub async fn list(session: &Session, path: &str, resumes: bool, columns: &[Column]) -> Result<(), Failure> {
    let (mut place, mut first) = (Place::default(), true);
    session.show.titles(columns)?;
    loop {
        match once(session, path, resumes, columns, &mut place).await {
            Ok(()) => {}
            Err(Failure::Ask(AskError::Unreachable(why))) if !first => note(&format!("the watch broke off: {why}")),
            Err(Failure::Refused { status: StatusCode::SERVICE_UNAVAILABLE, message, .. }) if !first => {
                note(&format!("the watch broke off: {message}"));
            }
            Err(failure) => return Err(failure),
        }
        first = false;
        tokio::time::sleep(PAUSE).await;
    }
}

/// One watch, to its end.
async fn once(
    session: &Session,
    path: &str,
    resumes: bool,
    columns: &[Column],
    place: &mut Place,
) -> Result<(), Failure> {
    let mut body = session.open(&place.question(path, resumes)).await?;
    let mut pending: Vec<u8> = Vec::new();
    let (mut step, mut size): (Vec<Value>, usize) = (Vec::new(), 0);
    loop {
        let Ok(Some(Ok(frame))) = tokio::time::timeout(SILENCE, body.frame()).await else { return Ok(()) };
        let Ok(data) = frame.into_data() else { continue };
        pending.extend_from_slice(&data);
        while let Some(end) = pending.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = pending.drain(..=end).collect();
            let event: Value = serde_json::from_slice(&line).map_err(|error| Failure::Answer(error.to_string()))?;
            let kind = event["type"].as_str().unwrap_or_default();
            if !matches!(kind, "bookmark" | "end") {
                size += line.len();
                step.push(event);
                continue;
            }
            for event in step.drain(..) {
                session.show.event(&event, columns)?;
            }
            (size, *place) = (0, Place::of(&event));
            if kind == "end" {
                if event["reason"] == "compacted" {
                    note("it is no longer known what happened meanwhile: the watch starts anew with the whole list");
                    *place = Place::default();
                }
                return Ok(());
            }
        }
        if pending.len() > MAX_LINE || size > MAX_STEP {
            return Err(Failure::Answer("more comes of the watch than a list can have".to_owned()));
        }
    }
}

/// Shows an answer whenever it has changed.
///
/// # Errors
/// What the first attempt meets, or a refusal later.
pub async fn again(
    session: &Session,
    question: &Question,
    show: impl Fn(&Value) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut shown: Option<Value> = None;
    loop {
        match session.read(question).await {
            Ok(answer) if shown.as_ref() == Some(&answer) => {}
            Ok(answer) => {
                show(&answer)?;
                shown = Some(answer);
            }
            Err(Failure::Ask(AskError::Unreachable(why))) if shown.is_some() => note(&why),
            Err(failure) => return Err(failure),
        }
        tokio::time::sleep(PAUSE).await;
    }
}
