//! ClusterStore: the replicated log behind the state machine.
