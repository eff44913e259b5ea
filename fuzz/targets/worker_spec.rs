//! Worker specs: what is accepted is within its bounds, is accepted again unchanged, and comes back the same from disk, wire and REST.
//!
//! Input: the body of `POST /workers`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use prost::Message;
use smg_fleet::pairing::Descriptor;
use smg_fleet::validate::{MAX_LABELS, MAX_MODELS, MAX_WORKER_BYTES, worker_spec};
use smg_fleet::wire::{spec_from_pb, spec_to_pb, worker_from_pb, worker_to_pb};
use smg_fleet::{Facts, Worker, WorkerId, WorkerSpec};
use smg_messages::state as pb;

fuzz_target!(|data: &[u8]| {
    let Ok(mut spec) = serde_json::from_slice::<WorkerSpec>(data) else { return };
    let Ok(url) = worker_spec(&mut spec) else { return };
    assert!(spec.labels.len() <= MAX_LABELS && spec.models.len() <= MAX_MODELS);
    assert!(spec.cost.is_finite() && spec.bootstrap_port != Some(0));
    assert_eq!(spec.url, url.as_str());

    let mut again = spec.clone();
    assert_eq!(worker_spec(&mut again).as_ref(), Ok(&url));
    assert_eq!(again, spec);

    let bytes = spec_to_pb(&spec).encode_to_vec();
    assert!(bytes.len() <= MAX_WORKER_BYTES);
    let decoded = spec_from_pb(pb::WorkerSpec::decode(&*bytes).expect("these bytes were encoded here"));
    let decoded = decoded.expect("a stored spec is read back");
    assert_eq!(decoded, spec);
    assert_eq!(spec_to_pb(&decoded).encode_to_vec(), bytes);

    let shown = serde_json::to_vec(&spec).expect("a spec is shown");
    let mut read: WorkerSpec = serde_json::from_slice(&shown).expect("what is shown can be registered");
    read.api_key.clone_from(&spec.api_key);
    assert_eq!(read, spec);

    let worker = Worker {
        id: WorkerId(uuid::Uuid::nil()),
        facts: Some(Facts::default()),
        spec,
        health: Default::default(),
        intent: Default::default(),
        origin: Default::default(),
        job: None,
        create_revision: 1,
        mod_revision: 1,
    };
    let _ = (Descriptor::of(&worker), smg_fleet::info::worker_info(&worker), worker.model_id());
    assert_eq!(worker.url().as_ref(), Ok(&url));
    assert_eq!(worker_from_pb(worker_to_pb(&worker)).as_ref(), Ok(&worker));
});
