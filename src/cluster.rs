//! `smg cluster`: an operator's look at the control plane's members, and changing them.

use http::Method;
use serde_json::{Value, json};

use crate::admin::show::{Show, note};
use crate::admin::table::{self, cell};
use crate::admin::{Failure, Session, again, block_on};
use crate::authority;
use crate::backup;
use crate::cli::{ClusterArgs, ClusterVerb};
use crate::operator::Question;

/// Does what the command line says.
///
/// # Errors
/// When there is no result.
pub fn run(args: &ClusterArgs) -> Result<(), Failure> {
    let show = Show::new(args.output);
    match &args.verb {
        ClusterVerb::Ca(verb) => return show.text(&format!("{}\n", authority::run(verb)?.display())),
        ClusterVerb::Backup { file } => return block_on(backup::save(args, file, show)),
        ClusterVerb::Restore { file, backup_key_file, without_keys, .. } => {
            let state = backup::usable(file, backup_key_file.as_deref(), *without_keys)?;
            return match &args.into {
                Some(into) => backup::restore(state, into, show),
                None => Err(Failure::Input("it is not said where to: --data-dir, or --etcd-endpoints".to_owned())),
            };
        }
        _ => {}
    }
    block_on(async {
        let session = Session::new(&args.target, show)?;
        let question = question(&args.verb);
        match &args.verb {
            ClusterVerb::Status { watch: true, .. } => again(&session, &question, |answer| status(show, answer)).await,
            ClusterVerb::Status { stale, .. } => {
                let answer = session.read(&question).await?;
                status(show, &answer)?;
                if !*stale && knows_no_leader(&answer) {
                    return Err(Failure::NoLeader(cell(&answer["seen_by"])));
                }
                Ok(())
            }
            verb => {
                let answer = session.read(&question).await?;
                let after = if is_rehearsal(verb) { &answer["result"] } else { &answer };
                note(&tolerance(after["voters"].as_array().map_or(0, Vec::len)));
                if is_rehearsal(verb) {
                    return show.rehearsal(&answer);
                }
                if !show.is_table() {
                    return show.one(&answer, &[]);
                }
                show.text(&format!("voters: {}\n", join(&answer["voters"])))
            }
        }
    })
}

fn is_rehearsal(verb: &ClusterVerb) -> bool {
    match verb {
        ClusterVerb::Join { dry_run, .. }
        | ClusterVerb::Remove { dry_run, .. }
        | ClusterVerb::Replace { dry_run, .. } => *dry_run,
        _ => false,
    }
}

fn question(verb: &ClusterVerb) -> Question {
    let change = |path: &str, body: Value| {
        let rehearsal = if is_rehearsal(verb) { "?dry_run=true" } else { "" };
        Question::new(Method::POST, format!("/fleet/cluster/{path}{rehearsal}"), Some(body))
    };
    match verb {
        ClusterVerb::Status { stale: true, .. } => Question::get("/fleet/cluster?consistency=stale"),
        ClusterVerb::Join { node_ids, allow_even, .. } => {
            change("join", json!({"node_ids": node_ids, "allow_even": allow_even}))
        }
        ClusterVerb::Remove { node_ids, allow_even, .. } => {
            change("remove", json!({"node_ids": node_ids, "allow_even": allow_even}))
        }
        ClusterVerb::Replace { node_id, with, .. } => change("replace", json!({"node_id": node_id, "with": with})),
        _ => Question::get("/fleet/cluster"),
    }
}

/// What so many voters survive.
fn tolerance(voters: usize) -> String {
    let losses = match voters.saturating_sub(1) / 2 {
        0 => "the loss of none",
        1 => "the loss of any one",
        _ => "the loss of any two",
    };
    match voters {
        1 => format!(
            "1 voter survives {losses}: without it nothing can be changed, and with its disk the fleet's state is lost"
        ),
        even if even.is_multiple_of(2) => {
            format!("{even} voters survive {losses}, as {} would", even.saturating_sub(1))
        }
        odd => format!("{odd} voters survive {losses}"),
    }
}

fn join(list: &Value) -> String {
    let items = list.as_array().map(Vec::as_slice).unwrap_or_default();
    items.iter().map(cell).collect::<Vec<_>>().join(" ")
}

fn status(show: Show, status: &Value) -> Result<(), Failure> {
    if show.is_table() {
        show.text(&summary(status))?;
    }
    show.list(status, "members", table::MEMBERS)
}

/// Whether the member that answered hears of no leader: then it shows what it last knew.
fn knows_no_leader(status: &Value) -> bool {
    status["in_contact"] == false
}

/// The cluster in one line.
fn summary(status: &Value) -> String {
    let doubt = if knows_no_leader(status) {
        format!("NO LEADER: as member {} last knew it\n", cell(&status["seen_by"]))
    } else {
        String::new()
    };
    format!(
        "{doubt}cluster {} ({})  leader {}  term {}  committed {}  revision {}\n",
        cell(&status["cluster_id"]),
        cell(&status["name"]),
        cell(&status["leader"]),
        cell(&status["term"]),
        cell(&status["committed_index"]),
        cell(&status["revision"]),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cluster_is_named_in_one_line_and_what_is_not_known_is_a_dash() {
        let status = json!({
            "cluster_id": "c", "name": null, "leader": 1, "term": 3, "committed_index": 70, "revision": 12,
        });
        assert_eq!(summary(&status), "cluster c (-)  leader 1  term 3  committed 70  revision 12\n");
        let mut lonely = status;
        lonely["in_contact"] = json!(false);
        lonely["seen_by"] = json!(2);
        assert!(summary(&lonely).starts_with("NO LEADER: as member 2 last knew it\ncluster c"));
    }

    #[test]
    fn what_voters_survive_is_said_and_an_even_number_is_no_gain() {
        assert!(tolerance(1).starts_with("1 voter survives the loss of none"), "{}", tolerance(1));
        assert!(tolerance(2).starts_with("2 voters survive the loss of none") && tolerance(2).ends_with("as 1 would"));
        assert_eq!(tolerance(3), "3 voters survive the loss of any one");
        assert_eq!(tolerance(4), "4 voters survive the loss of any one, as 3 would");
        assert_eq!(tolerance(5), "5 voters survive the loss of any two");
    }

    #[test]
    fn a_rehearsal_asks_for_one() {
        let verb = ClusterVerb::Replace { node_id: 3, with: None, dry_run: true };
        let asked = question(&verb);
        assert_eq!((asked.method, asked.path.as_str()), (Method::POST, "/fleet/cluster/replace?dry_run=true"));
        assert_eq!(asked.body, Some(json!({"node_id": 3, "with": null})));
    }
}
