//! What is written to disk and wire comes back as it was.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use serde_json::json;

use super::{spec_from_pb, spec_to_pb};
use crate::worker::{ModelCard, WorkerSpec, WorkerType};

proptest! {
    /// Replicas and gateways compare checksums of what they have read: a number that comes back as its neighbour would set them apart.
    #[test]
    fn a_number_in_a_kept_field_comes_back_as_it_was(number in proptest::num::f64::NORMAL) {
        let mut spec = WorkerSpec::new("http://w:1", WorkerType::Prefill);
        spec.extra.insert("overload".to_owned(), json!({"limit": number}));
        spec.models = vec![ModelCard { id: "m".to_owned(), ..ModelCard::default() }];
        spec.models[0].extra.insert("scale".to_owned(), json!(number));
        let message = spec_to_pb(&spec);
        let read = spec_from_pb(message.clone()).unwrap();
        prop_assert_eq!(spec_to_pb(&read), message);
        prop_assert_eq!(read, spec);
    }
}
