//! The matrix says what routing will do: every verdict with its reason, in bounded answers.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::*;
use crate::policy::{PolicyDocument, PolicyRecord};
use crate::worker::{Facts, Runtime, Wire};

fn worker(number: u128, role: WorkerType, connector: &str, models: &[&str]) -> Worker {
    let mut spec = WorkerSpec::new(format!("http://{role}-{number}:1"), role);
    spec.kv_connector = Some(connector.to_owned());
    let card =
        |id: &&str| ModelCard { id: (*id).to_owned(), aliases: vec![format!("{id}-alias")], ..Default::default() };
    spec.models = models.iter().map(card).collect();
    let facts = Facts { wire: Wire::Http, runtime: Runtime::Vllm, ..Facts::default() };
    Worker { id: WorkerId(Uuid::from_u128(number)), facts: Some(facts), ..hypothetical(spec, None) }
}

fn fleet(workers: impl IntoIterator<Item = Worker>) -> Snapshot {
    let workers = workers.into_iter().map(|worker| (worker.id, Arc::new(worker))).collect();
    Snapshot { workers, ..Snapshot::default() }
}

fn two_by_two() -> Snapshot {
    fleet([
        worker(1, WorkerType::Prefill, "NixlConnector", &["m"]),
        worker(2, WorkerType::Prefill, "MooncakeConnector", &["m"]),
        worker(3, WorkerType::Decode, "NixlConnector", &["m"]),
        worker(4, WorkerType::Decode, "NixlConnector", &["m"]),
    ])
}

fn query(parameters: &[(&str, &str)]) -> Query {
    Query::parse(parameters.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))).unwrap()
}

#[test]
fn every_cell_says_whether_it_is_a_pair_and_why_not() {
    let matrix = matrix(&two_by_two(), &Query::default()).unwrap();
    let summary = &matrix.models[0];
    assert_eq!(
        (&*summary.model, summary.prefills, summary.decodes, summary.pairs, summary.non_pairs),
        ("m", 2, 2, 2, 2)
    );
    assert_eq!(summary.reasons, BTreeMap::from([("transport".to_owned(), 2)]));
    assert_eq!((summary.unpaired_prefills, summary.unpaired_decodes), (1, 0));
    assert_eq!(summary.unpaired, ["http://prefill-2:1"]);
    assert_eq!(matrix.total, 4);
    let cells: Vec<_> =
        matrix.cells.iter().map(|cell| (cell.prefill.url.as_str(), cell.decode.url.as_str(), cell.pairs)).collect();
    let (one, two) = ("http://prefill-1:1", "http://prefill-2:1");
    let (three, four) = ("http://decode-3:1", "http://decode-4:1");
    assert_eq!(cells, [(one, three, true), (one, four, true), (two, three, false), (two, four, false)]);
    let reason =
        Reason { component: "transport".into(), prefill: Some("mooncake".into()), decode: Some("nixl".into()) };
    assert_eq!(matrix.cells[2].reasons, [reason]);
    assert_eq!(matrix.cells[2].prefill.pd_pairing, "vllm/mooncake/?");
}

#[test]
fn filters_leave_what_they_name_and_pages_list_it_piece_by_piece() {
    let fleet = two_by_two();
    let listed = |parameters: &[(&str, &str)]| {
        let matrix = matrix(&fleet, &query(parameters)).unwrap();
        let cells = matrix.cells.iter();
        (matrix.total, cells.map(|cell| format!("{} {}", cell.prefill.url, cell.decode.url)).collect::<Vec<_>>())
    };
    let (total, all) = listed(&[]);
    assert_eq!(total, 4);
    for page in 0..=4 {
        let (total, cells) = listed(&[("offset", &page.to_string()), ("limit", "1")]);
        assert_eq!((total, cells.as_slice()), (4, &all[page.min(4)..(page + 1).min(4)]));
    }
    assert_eq!(listed(&[("pairs", "true")]), (2, all[..2].to_vec()));
    assert_eq!(listed(&[("pairs", "false"), ("offset", "1")]), (2, all[3..].to_vec()));
    assert_eq!(listed(&[("prefill", "http://prefill-2:1")]).0, 2);
    assert_eq!(listed(&[("decode", &Uuid::from_u128(3).to_string())]).0, 2);
    assert_eq!(listed(&[("model", "m-alias")]).0, 4);
    assert_eq!(listed(&[("model", "other")]), (0, Vec::new()));
}

#[test]
fn a_parameter_without_meaning_is_refused() {
    for (name, value) in [("limit", "-1"), ("offset", "x"), ("pairs", "maybe")] {
        let refused = Query::parse([(name.to_owned(), value.to_owned())]);
        assert!(matches!(refused, Err(MatrixError::Parameter { .. })), "{name}");
    }
    assert_eq!(query(&[("consistency", "stale")]), Query::default());
}

#[test]
fn models_are_apart_but_for_workers_that_serve_any() {
    let fleet = fleet([
        worker(1, WorkerType::Prefill, "NixlConnector", &["a"]),
        worker(2, WorkerType::Decode, "NixlConnector", &["b"]),
        worker(3, WorkerType::Decode, "NixlConnector", &[]),
    ]);
    let matrix = matrix(&fleet, &Query::default()).unwrap();
    let counts: Vec<_> =
        matrix.models.iter().map(|model| (&*model.model, model.prefills, model.decodes, model.pairs)).collect();
    assert_eq!(counts, [("a", 1, 1, 1), ("b", 0, 2, 0), ("unknown", 0, 1, 0)]);
}

#[test]
fn the_mode_of_the_model_decides() {
    let mut fleet = two_by_two();
    let document = PolicyDocument { pairing_mode: Some(PairingMode::Off), ..PolicyDocument::default() };
    let record =
        PolicyRecord { model: "m".into(), document, source: Default::default(), startup: None, mod_revision: 1 };
    fleet.policies.insert("m".into(), Arc::new(record));
    let summary = matrix(&fleet, &Query::default()).unwrap().models.remove(0);
    assert_eq!((summary.pairing_mode, summary.pairs), (PairingMode::Off, 4));
}

#[test]
fn workers_that_nothing_is_routed_to_are_no_part_of_it() {
    let mut fleet = two_by_two();
    let mut change = |number, change: fn(&mut Worker)| {
        change(Arc::make_mut(fleet.workers.get_mut(&WorkerId(Uuid::from_u128(number))).unwrap()))
    };
    change(1, |worker| worker.facts = None);
    change(3, |worker| worker.intent = Intent::Draining);
    let summary = matrix(&fleet, &Query::default()).unwrap().models.remove(0);
    assert_eq!((summary.prefills, summary.decodes), (1, 1));
}

#[test]
fn a_thousand_by_a_thousand_is_counted_whole_and_listed_in_part() {
    let worker = |number: u128| {
        let role = if number < 1000 { WorkerType::Prefill } else { WorkerType::Decode };
        let connector = if number.is_multiple_of(2) { "NixlConnector" } else { "MooncakeConnector" };
        worker(number + 1, role, connector, &["m"])
    };
    let fleet = fleet((0..2000).map(worker));
    let matrix = matrix(&fleet, &query(&[("pairs", "false"), ("offset", "499999"), ("limit", "9999")])).unwrap();
    assert_eq!((matrix.models[0].pairs, matrix.models[0].non_pairs), (500_000, 500_000));
    assert_eq!((matrix.total, matrix.limit, matrix.cells.len()), (500_000, MAX_LIMIT, 1));
}

#[test]
fn more_combinations_than_an_answer_may_cost_are_refused_until_the_query_is_narrower() {
    let worker = |number: u128| {
        let role = if number < 2001 { WorkerType::Prefill } else { WorkerType::Decode };
        worker(number + 1, role, &format!("Connector{number}"), &["m"])
    };
    let fleet = fleet((0..4002).map(worker));
    assert_eq!(matrix(&fleet, &Query::default()), Err(MatrixError::TooLarge));
    assert_eq!(matrix(&fleet, &query(&[("prefill", "http://prefill-1:1")])).unwrap().total, 2001);
}

#[test]
fn a_worker_that_asks_what_if_is_compared_as_if_it_were_there() {
    let fleet = two_by_two();
    let mut spec = WorkerSpec::new("http://new:1", WorkerType::Prefill);
    (spec.runtime, spec.kv_connector) = (Runtime::Vllm, Some("MooncakeConnector".into()));
    let explanation = explain(&fleet, spec.clone(), &Query::default()).unwrap();
    assert_eq!((explanation.facts_from, explanation.worker.id), ("spec", None));
    assert_eq!(explanation.worker.pd_pairing, "vllm/mooncake/?");
    let models: Vec<_> =
        explanation.matrix.models.iter().map(|model| (&*model.model, model.pairs, model.non_pairs)).collect();
    assert_eq!(models, [("m", 0, 2), ("unknown", 0, 0)]);
    assert!(explanation.matrix.cells.iter().all(|cell| cell.prefill.url == "http://new:1"));

    spec.kv_connector = Some("NixlConnector".into());
    spec.models = vec![ModelCard { id: "m".into(), ..ModelCard::default() }];
    let explanation = explain(&fleet, spec.clone(), &Query::default()).unwrap();
    assert_eq!((explanation.matrix.models.len(), explanation.matrix.models[0].pairs), (1, 2));
    spec.worker_type = WorkerType::Regular;
    assert_eq!(explain(&fleet, spec, &Query::default()), Err(MatrixError::Role(WorkerType::Regular)));
}

#[test]
fn a_registered_worker_lends_its_facts_to_a_new_spec_of_its_url() {
    let fleet = two_by_two();
    let mut spec = WorkerSpec::new("http://prefill-2:1", WorkerType::Prefill);
    spec.kv_connector = Some("NixlConnector".into());
    spec.models = vec![ModelCard { id: "m".into(), ..ModelCard::default() }];
    let explanation = explain(&fleet, spec, &Query::default()).unwrap();
    assert_eq!((explanation.facts_from, explanation.worker.pd_pairing.as_str()), ("registration", "vllm/nixl/?"));
    assert_eq!(explanation.matrix.models[0].pairs, 2);
}
