//! What engines report about their load.
//!
//! * [`report`]: the two ways in which engines tell it (pure);
//! * [`cell`]: the last report of one worker, read on every selection;
//! * [`monitor`]: asks every engine, again and again.

pub mod cell;
pub mod monitor;
pub mod report;
