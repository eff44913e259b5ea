//! Regular workers: one leg, the client's body.

use smg_fleet::policy::ClientHandoffFields;

use crate::body::ClientBody;
use crate::field::Field;
use crate::splice::{Edits, SplicedBody};

/// The body for a regular worker; `rank` is the data-parallel rank when the worker is one rank of an engine.
pub fn leg(body: &ClientBody, client_fields: ClientHandoffFields, rank: Option<u32>) -> SplicedBody {
    let mut edits = Edits::for_leg(body, client_fields);
    if let Some(rank) = rank {
        edits.set(Field::DataParallelRank, rank.to_string());
    }
    body.splice(&edits)
}
