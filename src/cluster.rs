//! `smg cluster`: an operator's look at the control plane's members, over the admin API.
//!
//! Standard output is the result and nothing else; everything else goes to standard error. The exit code keeps the outcomes apart: a
//! change was made (0), was refused or not made (1), nobody could be reached (69), or nobody knows (75: ask again, it is safe).

use std::io::Write;
use std::process::ExitCode;

use http::{Method, StatusCode};
use serde_json::{Value, json};
use thiserror::Error;

use crate::authority::{self, AuthorityError};
use crate::cli::{ClusterArgs, ClusterVerb, Output};
use crate::operator::{AskError, Operator};

/// Why there is no result.
#[derive(Debug, Error)]
pub enum ClusterError {
    /// No runtime.
    #[error("runtime: {0}")]
    Runtime(std::io::Error),
    /// Nobody answers.
    #[error(transparent)]
    Ask(#[from] AskError),
    /// It said no.
    #[error("{message} ({code})")]
    Refused {
        /// The code of the API.
        code: String,
        /// In words.
        message: String,
    },
    /// The answer makes no sense.
    #[error("the answer cannot be read: {0}")]
    Answer(String),
    /// There is no certificate.
    #[error(transparent)]
    Authority(#[from] AuthorityError),
    /// The result could not be written.
    #[error("writing the result: {0}")]
    Output(std::io::Error),
}

impl ClusterError {
    /// The exit code, of sysexits where there is one.
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self::Ask(AskError::Unreachable(_)) => ExitCode::from(69),
            Self::Ask(AskError::Unknown(_)) => ExitCode::from(75),
            _ => ExitCode::FAILURE,
        }
    }
}

/// Does what the command line says.
pub fn run(args: &ClusterArgs) -> Result<(), ClusterError> {
    let text = match &args.verb {
        ClusterVerb::Ca(verb) => format!("{}\n", authority::run(verb)?.display()),
        verb => {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let answer = runtime.map_err(ClusterError::Runtime)?.block_on(ask(args, verb))?;
            match args.output {
                Output::Json => format!("{answer:#}\n"),
                Output::Table if matches!(verb, ClusterVerb::Status { .. }) => status_table(&answer),
                Output::Table => format!("voters: {}\n", join(&answer["voters"])),
            }
        }
    };
    std::io::stdout().write_all(text.as_bytes()).map_err(ClusterError::Output)
}

fn request_of(verb: &ClusterVerb) -> (Method, &'static str, Option<Value>) {
    match verb {
        ClusterVerb::Status { stale: false } => (Method::GET, "/fleet/cluster", None),
        ClusterVerb::Status { stale: true } => (Method::GET, "/fleet/cluster?consistency=stale", None),
        ClusterVerb::Join { node_ids, allow_even } => {
            (Method::POST, "/fleet/cluster/join", Some(json!({"node_ids": node_ids, "allow_even": allow_even})))
        }
        ClusterVerb::Remove { node_ids, allow_even } => {
            (Method::POST, "/fleet/cluster/remove", Some(json!({"node_ids": node_ids, "allow_even": allow_even})))
        }
        ClusterVerb::Replace { node_id, with } => {
            (Method::POST, "/fleet/cluster/replace", Some(json!({"node_id": node_id, "with": with})))
        }
        // Answered without asking anybody.
        ClusterVerb::Ca(_) => (Method::GET, "/", None),
    }
}

async fn ask(args: &ClusterArgs, verb: &ClusterVerb) -> Result<Value, ClusterError> {
    let (method, path, body) = request_of(verb);
    let (status, body) = Operator::new(&args.target)?.ask(method, path, body.as_ref()).await?;
    read(status, &body)
}

fn read(status: StatusCode, body: &[u8]) -> Result<Value, ClusterError> {
    let answer: Value = serde_json::from_slice(body).map_err(|error| ClusterError::Answer(error.to_string()))?;
    if status.is_success() {
        return Ok(answer);
    }
    let text = |name: &str| answer[name].as_str().unwrap_or_default().to_owned();
    let (code, message) = (text("code"), text("error"));
    Err(if code == "OUTCOME_UNKNOWN" {
        ClusterError::Ask(AskError::Unknown(message))
    } else {
        ClusterError::Refused { code, message }
    })
}

fn join(list: &Value) -> String {
    let items = list.as_array().map(Vec::as_slice).unwrap_or_default();
    items.iter().map(cell).collect::<Vec<_>>().join(" ")
}

/// One value of a table; what is not known is a dash.
fn cell(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) if text.is_empty() => "-".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn status_table(status: &Value) -> String {
    const COLUMNS: [(&str, &str); 8] = [
        ("NODE", "node_id"),
        ("ROLE", "role"),
        ("HEALTH", "health"),
        ("LAG", "lag"),
        ("HEARD-MS", "heard_ms"),
        ("PEERS", "peer_address"),
        ("API", "api_address"),
        ("TROUBLE", "trouble"),
    ];
    let members = status["members"].as_array().map(Vec::as_slice).unwrap_or_default();
    let header = COLUMNS.iter().map(|(title, _)| (*title).to_owned()).collect::<Vec<_>>();
    let rows = members.iter().map(|member| COLUMNS.iter().map(|(_, field)| cell(&member[*field])).collect());
    let rows: Vec<Vec<String>> = std::iter::once(header).chain(rows).collect();
    let mut text = format!(
        "cluster {} ({})  leader {}  term {}  committed {}  revision {}\n",
        cell(&status["cluster_id"]),
        cell(&status["name"]),
        cell(&status["leader"]),
        cell(&status["term"]),
        cell(&status["committed_index"]),
        cell(&status["revision"]),
    );
    let widths: Vec<usize> = (0..COLUMNS.len())
        .map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0))
        .collect();
    for row in &rows {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_a_row_for_each_member_and_a_dash_for_what_is_not_known() {
        let status = json!({
            "cluster_id": "c", "name": null, "leader": 1, "term": 3, "committed_index": 70, "revision": 12,
            "members": [
                {"node_id": 1, "role": "leader", "health": "ok", "lag": 0, "heard_ms": 0, "peer_address": "a:7401",
                 "api_address": "a:7400", "trouble": null},
                {"node_id": 12, "role": "learner", "health": "unknown", "lag": null, "heard_ms": null,
                 "peer_address": "b:7401", "api_address": "", "trouble": "no answer"},
            ],
        });
        let text = status_table(&status);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "cluster c (-)  leader 1  term 3  committed 70  revision 12");
        assert!(lines[2].starts_with("1     leader   ok"), "{text}");
        assert!(lines[3].ends_with("b:7401  -       no answer"), "{text}");
        assert_eq!(lines.len(), 4);
    }

    #[test]
    fn outcomes_stay_apart() {
        let read = |status: u16, code: &str| {
            let body = json!({"error": "why", "code": code}).to_string();
            read(StatusCode::from_u16(status).unwrap(), body.as_bytes()).unwrap_err()
        };
        assert!(matches!(read(503, "OUTCOME_UNKNOWN"), ClusterError::Ask(AskError::Unknown(_))));
        assert!(matches!(read(409, "QUORUM_AT_RISK"), ClusterError::Refused { .. }));
        assert!(matches!(read(503, "CONTROL_PLANE_UNAVAILABLE"), ClusterError::Refused { .. }));
    }
}
