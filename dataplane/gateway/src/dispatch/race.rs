//! Two legs in flight: both get there, or the first failure ends them.

use super::Failed;

/// The first of two legs to fail.
pub(super) enum Lost {
    /// The prefill; the decode was still wanted.
    Prefill(Failed),
    /// The decode.
    Decode {
        /// Its failure.
        failed: Failed,
        /// Whether the prefill leg had got there by then.
        prefill_done: bool,
    },
}

/// Waits for both legs, or for the first failure. Dropping the futures closes whichever leg is still waiting.
///
/// Prefill first: when both fail in the same instant, the decode's failure is most likely the consequence.
pub(super) async fn both<P, D>(
    prefill: impl Future<Output = Result<P, Failed>>,
    decode: impl Future<Output = Result<D, Failed>>,
) -> Result<(P, D), Lost> {
    tokio::pin!(prefill, decode);
    let (mut prefilled, mut decoded) = (None, None);
    loop {
        tokio::select! {
            biased;
            done = &mut prefill, if prefilled.is_none() => prefilled = Some(done.map_err(Lost::Prefill)?),
            done = &mut decode, if decoded.is_none() => match done {
                Ok(done) => decoded = Some(done),
                Err(failed) => return Err(Lost::Decode { failed, prefill_done: prefilled.is_some() }),
            },
        }
        match (prefilled, decoded) {
            (Some(prefill), Some(decode)) => return Ok((prefill, decode)),
            (one, other) => (prefilled, decoded) = (one, other),
        }
    }
}
