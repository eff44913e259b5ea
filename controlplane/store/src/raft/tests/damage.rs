//! Damaged, foreign and incomplete directories: each is refused with words, and nothing in it changes.

use std::fs;

use redb::ReadableTable;

use super::*;
use crate::frame::frame;
use crate::raft::database::{LOG, META};

/// A stopped store with a few writes.
async fn stopped() -> TempDir {
    let directory = fast_directory();
    let store = open(directory.path()).await;
    propose_all(&store, (0..30).map(put_policy), 4).await;
    store.shutdown().await;
    directory
}

fn log_file(directory: &Path) -> PathBuf {
    directory.join("raft.redb")
}

/// Changes the log behind the store's back, as a bug or an operator would.
fn tamper(directory: &Path, change: impl FnOnce(&redb::WriteTransaction)) {
    let database = redb::Database::open(log_file(directory)).unwrap();
    let transaction = database::begin(&database).unwrap();
    change(&transaction);
    transaction.commit().unwrap();
    database.close().unwrap();
}

async fn refusal(directory: &Path) -> OpenError {
    let names = dir::names(directory).unwrap();
    let error = RaftStore::open(options(directory)).await.unwrap_err();
    assert_eq!(dir::names(directory).unwrap(), names, "nothing was removed or added");
    error
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flipped_bit_of_the_log_is_noticed_or_changes_nothing() {
    let directory = stopped().await;
    let file = log_file(directory.path());
    let good = fs::read(&file).unwrap();
    let entries = |database: &redb::Database| {
        use redb::ReadableDatabase;
        let log = database.begin_read().unwrap().open_table(LOG).unwrap();
        log.iter().unwrap().map(|item| item.unwrap().1.value().to_vec()).collect::<Vec<_>>()
    };
    let copy = directory.path().join("copy");
    let open = |bytes: &[u8]| {
        fs::write(&copy, bytes).unwrap();
        database::open(&copy).map(|(database, recovered)| (entries(&database), recovered.last))
    };
    let expected = open(&good).unwrap();
    let (mut choices, mut noticed) = (Choices::fresh(), 0);
    for _ in 0..400 {
        let (at, bit) = (choices.below(good.len() as u64) as usize, choices.below(8));
        let mut bad = good.clone();
        bad[at] ^= 1 << bit;
        match open(&bad) {
            Err(_) => noticed += 1,
            Ok(found) => assert!(found == expected, "bit {bit} of byte {at} went unnoticed"),
        }
    }
    assert!(noticed > 10, "{noticed} of 400: most pages were not in use, or nothing is checked");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_truncated_log_or_another_file_in_its_place_is_refused_and_stays_as_it_is() {
    let directory = stopped().await;
    let file = log_file(directory.path());
    let good = fs::read(&file).unwrap();
    for bad in [good[..good.len() / 2].to_vec(), Vec::new(), b"not a database".to_vec(), vec![0; 1 << 16]] {
        fs::write(&file, &bad).unwrap();
        let error = refusal(directory.path()).await;
        assert!(matches!(error, OpenError::Damaged { .. } | OpenError::Io { .. }), "{error}");
        assert!(error.to_string().contains("raft.redb"), "{error}");
        assert!(fs::read(&file).unwrap() == bad, "{error}");
    }
    fs::write(&file, &good).unwrap();
    open(directory.path()).await.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_frame_a_missing_entry_and_a_wrong_index_are_told_apart() {
    type Change = fn(&redb::WriteTransaction);
    let cases: [(Change, &str); 5] = [
        (
            |transaction| {
                let mut log = transaction.open_table(LOG).unwrap();
                let mut frame = log.get(7).unwrap().unwrap().value().to_vec();
                *frame.last_mut().unwrap() ^= 1;
                log.insert(7, frame.as_slice()).unwrap();
            },
            "entry 7 of the log: the checksum does not match",
        ),
        (|transaction| drop(transaction.open_table(LOG).unwrap().remove(9).unwrap()), "entry 9 of the log is missing"),
        (
            |transaction| {
                let mut log = transaction.open_table(LOG).unwrap();
                let frame = log.get(4).unwrap().unwrap().value().to_vec();
                log.insert(5, frame.as_slice()).unwrap();
            },
            "entry 5 of the log says it is entry 4",
        ),
        (
            |transaction| {
                let mut meta = transaction.open_table(META).unwrap();
                meta.insert(database::VOTE, [1, 2, 3].as_slice()).unwrap();
            },
            "'vote': the frame is cut off",
        ),
        (
            |transaction| {
                // More committed than there is.
                let committed = pb::LogId { term: 1, node_id: 1, index: 5_000 };
                let mut meta = transaction.open_table(META).unwrap();
                meta.insert(database::COMMITTED, frame(&committed).as_slice()).unwrap();
            },
            "entry 5000 was committed, and the log holds entries up to 3",
        ),
    ];
    for (change, words) in cases {
        let directory = stopped().await;
        tamper(directory.path(), change);
        let error = refusal(directory.path()).await;
        assert!(matches!(error, OpenError::Damaged { .. }), "{error}");
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn data_of_another_version_is_refused() {
    let directory = stopped().await;
    tamper(directory.path(), |transaction| {
        let mut meta = transaction.open_table(META).unwrap();
        meta.insert("data_version", frame(&pb::DataVersion { version: 9 }).as_slice()).unwrap();
    });
    let error = refusal(directory.path()).await;
    assert!(matches!(error, OpenError::Version { found: 9, .. }), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_of_another_program_is_refused() {
    let directory = stopped().await;
    let file = log_file(directory.path());
    fs::remove_file(&file).unwrap();
    redb::Database::create(&file).unwrap().close().unwrap();
    let error = refusal(directory.path()).await;
    assert!(error.to_string().contains("not a log of this program"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_cluster_is_not_started_among_other_files_or_over_old_snapshots() {
    let directory = fast_directory();
    fs::create_dir(directory.path().join("lost+found")).unwrap();
    fs::write(directory.path().join("raft.redb.tmp"), "cut short by a crash").unwrap();
    let file = directory.path().join("notes.txt");
    fs::write(&file, "mine").unwrap();
    let error = RaftStore::open(options(directory.path())).await.unwrap_err();
    assert!(matches!(&error, OpenError::Foreign { name, .. } if name == "notes.txt"), "{error}");
    assert_eq!(fs::read(&file).unwrap(), b"mine");
    fs::rename(&file, directory.path().join("snap-1-5.smgsnap")).unwrap();
    for bootstrap in [true, false] {
        let error = RaftStore::open(options(directory.path()).bootstrap(bootstrap)).await.unwrap_err();
        assert!(matches!(error, OpenError::LogMissing(_)), "{error}");
    }
    fs::remove_file(directory.path().join("snap-1-5.smgsnap")).unwrap();
    open(directory.path()).await.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_state_of_one_cluster_is_not_served_by_the_log_of_another() {
    let (one, other) = (fast_directory(), fast_directory());
    for directory in [&one, &other] {
        let options = RaftOptions { snapshot_every: 5, ..options(directory.path()) };
        let store = RaftStore::open(options).await.unwrap();
        propose_all(&store, (0..20).map(put_policy), 1).await;
        store.shutdown().await;
    }
    fs::copy(log_file(one.path()), log_file(other.path())).unwrap();
    let error = refusal(other.path()).await;
    assert!(matches!(error, OpenError::Damaged { .. }), "{error}");
}
