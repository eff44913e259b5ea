//! The replicated state machine: commands, apply, read model.
