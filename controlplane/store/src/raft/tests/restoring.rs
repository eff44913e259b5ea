//! A backup becomes the first state of a new history.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_restored_directory_is_a_member_that_nobody_was_and_goes_on_from_the_state() {
    let (old, new) = (fast_directory(), fast_directory());
    let store = open(old.path()).await;
    propose_all(&store, (0..30).map(put_policy), 4).await;
    let state = store.local();
    store.shutdown().await;
    let (identity, history) = restore(new.path(), State::clone(&state)).unwrap();
    assert!(identity.node_id > state.last_node_id() && identity.node_id > FOUNDER);
    let restored = open(new.path()).await;
    assert_eq!(restored.identity(), identity);
    let begun = restored.local();
    assert_eq!((begun.cluster_id(), begun.history_id()), (state.cluster_id(), history));
    assert_eq!(begun.revision(), state.revision() + 1);
    assert!(begun.policies().eq(state.policies()));
    propose_all(&restored, (30..40).map(put_policy), 4).await;
    let revision = restored.local().revision();
    restored.shutdown().await;
    let again = open(new.path()).await;
    assert_eq!(again.local().revision(), revision);
    again.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_with_data_is_not_restored_into() {
    let directory = fast_directory();
    let store = open(directory.path()).await;
    let state = State::clone(&store.local());
    store.shutdown().await;
    let names = dir::names(directory.path()).unwrap();
    assert!(matches!(restore(directory.path(), state.clone()), Err(OpenError::Taken(_))));
    assert_eq!(dir::names(directory.path()).unwrap(), names);
    let foreign = fast_directory();
    std::fs::write(foreign.path().join("notes"), "mine").unwrap();
    assert!(matches!(restore(foreign.path(), state), Err(OpenError::Foreign { .. })));
}
