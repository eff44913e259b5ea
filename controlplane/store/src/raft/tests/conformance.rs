//! The storage suite that openraft ships: what it expects of any log and state machine.

use openraft::StorageError;
use openraft::testing::log::{StoreBuilder, Suite};
use tempfile::TempDir;

use super::*;

struct Builder;

/// Keeps the directory and the writer's channel until a test of the suite is over.
struct Guard {
    _directory: TempDir,
    _writer: WriterThread,
}

impl StoreBuilder<TypeConfig, LogStore, Machine, Guard> for Builder {
    async fn build(&self) -> Result<(Guard, LogStore, Machine), StorageError<TypeConfig>> {
        let directory = fast_directory();
        let files = Files::open(&options(directory.path())).unwrap();
        let machine = Machine::new(files.snapshots, Arc::clone(&files.shared.failure));
        Ok((Guard { _directory: directory, _writer: files.writer }, files.log, machine))
    }
}

#[test]
fn the_log_and_the_state_machine_pass_the_suite_of_openraft() {
    tokio::runtime::Runtime::new().unwrap().block_on(Suite::test_all(Builder)).unwrap();
}
