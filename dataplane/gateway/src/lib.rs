//! The data plane: front, select, dispatch, relay.
