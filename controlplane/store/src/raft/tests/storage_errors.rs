//! Disks that refuse: the store stops for good, keeps what it acknowledged, and says so.

use std::io::{self, Write};
use std::process::Command as Process;
use std::sync::atomic::{AtomicU64, Ordering};

use redb::StorageBackend;
use redb::backends::FileBackend;

use super::*;

/// A file whose n-th change or sync fails, once, as after a failed fsync that a retry would not repeat; a failed change is half made.
#[derive(Debug)]
struct Failing {
    file: FileBackend,
    plan: Arc<Plan>,
}

#[derive(Debug)]
struct Plan {
    /// Changes until the failure.
    left: AtomicU64,
    /// Changes since, which must not be.
    after: AtomicU64,
}

const NEVER: u64 = u64::MAX;
const FAILED: u64 = u64::MAX - 1;

impl Failing {
    fn step(&self) -> io::Result<()> {
        match self.plan.left.load(Ordering::SeqCst) {
            NEVER => Ok(()),
            FAILED => {
                self.plan.after.fetch_add(1, Ordering::SeqCst);
                Ok(())
            }
            0 => {
                self.plan.left.store(FAILED, Ordering::SeqCst);
                Err(io::Error::other("injected"))
            }
            left => {
                self.plan.left.store(left - 1, Ordering::SeqCst);
                Ok(())
            }
        }
    }
}

impl StorageBackend for Failing {
    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.file.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.step()?;
        self.file.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.step()?;
        self.file.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        if let Err(error) = self.step() {
            self.file.write(offset, &data[..data.len() / 2])?;
            return Err(error);
        }
        self.file.write(offset, data)
    }
}

/// Opens a store on a file that fails when its plan says so; never at first.
async fn open_failing(path: &Path) -> (Arc<RaftStore>, Arc<Plan>) {
    let opened = dir::open(path, true).unwrap();
    let lock = opened.lock;
    opened.database.close().unwrap();
    let plan = Arc::new(Plan { left: AtomicU64::new(NEVER), after: AtomicU64::new(0) });
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path.join("raft.redb")).unwrap();
    let backend = Failing { file: FileBackend::new(file).unwrap(), plan: Arc::clone(&plan) };
    let (database, recovered) = database::open_with(|builder| builder.create_with_backend(backend)).unwrap();
    let files = Files::new(path, dir::Opened { database, recovered, lock }).unwrap();
    (RaftStore::run(files, options(path)).await.unwrap(), plan)
}

/// Writes until the store fails. Returns what was acknowledged.
async fn write_until_failure(store: &Arc<RaftStore>, prefix: &str) -> Vec<String> {
    let writers = (0..4).map(|writer| async move {
        let mut acknowledged = Vec::new();
        for number in 0.. {
            let url = format!("http://{prefix}-{writer}-{number}:1");
            match store.propose(create(&url)).await {
                Ok(_) => acknowledged.push(url),
                Err(StoreError::Unknown(_) | StoreError::Failed(_)) => break,
                Err(other) => panic!("{other:?}"),
            }
        }
        acknowledged
    });
    futures::future::join_all(writers).await.concat()
}

async fn assert_failed_for_good(store: &Arc<RaftStore>) {
    let mut failure = store.failure();
    let reason = failure.wait_for(Option::is_some).await.unwrap().clone().unwrap();
    assert_eq!(store.propose(create("http://late:1")).await, Err(StoreError::Failed(reason.clone())));
    assert_eq!(store.read_barrier().await, Err(StoreError::Failed(reason)));
    let mut leadership = store.leadership();
    leadership.wait_for(|now| *now == Leadership::Follower).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_write_stops_the_store_and_loses_nothing_acknowledged() {
    let mut total = 0;
    for round in 0..40 {
        let directory = fast_directory();
        let (store, plan) = open_failing(directory.path()).await;
        plan.left.store(round * 3, Ordering::SeqCst);
        let acknowledged = write_until_failure(&store, &format!("r{round}")).await;
        assert_failed_for_good(&store).await;
        let served = store.local();
        store.shutdown().await;
        assert_eq!(plan.left.load(Ordering::SeqCst), FAILED);
        assert_eq!(plan.after.load(Ordering::SeqCst), 0, "the file was touched after the failure");

        let store = open(directory.path()).await;
        let state = store.local();
        for url in &acknowledged {
            assert!(served.worker_by_url(url).is_some(), "{url} was readable before");
            assert!(state.worker_by_url(url).is_some(), "round {round}: {url} was acknowledged and is lost");
        }
        assert_eq!(state.revision(), 1 + state.workers().count() as u64);
        store.shutdown().await;
        total += acknowledged.len();
    }
    assert!(total > 100, "{total}");
}

/// A file system of a few MiB, if this process may mount one.
struct SmallDisk(TempDir);

impl SmallDisk {
    fn mount(bytes: u64) -> Option<Self> {
        let directory = TempDir::new().unwrap();
        let size = format!("size={bytes}");
        let mounted = Process::new("mount").args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(directory.path()).output();
        match mounted {
            Ok(output) if output.status.success() => Some(Self(directory)),
            other => {
                println!("skipped: this process may not mount a small file system ({other:?})");
                None
            }
        }
    }

    /// Fills the disk but for some bytes, as another program would. Returns the file to remove.
    fn fill_but(&self, bytes: u64) -> PathBuf {
        let hog = self.0.path().join("hog");
        let mut file = std::fs::File::create(&hog).unwrap();
        let page = [1; 4096];
        while file.write_all(&page).is_ok() {}
        let full = file.metadata().unwrap().len();
        file.set_len(full - bytes).unwrap();
        hog
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Process::new("umount").arg("-l").arg(self.0.path()).output();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_stops_the_store_and_with_space_again_it_has_everything() {
    let Some(disk) = SmallDisk::mount(4 << 20) else { return };
    let path = disk.0.path().join("data");
    let store = open(&path).await;
    let hog = disk.fill_but(64 << 10);
    let acknowledged = write_until_failure(&store, "full").await;
    assert!(!acknowledged.is_empty());
    assert_failed_for_good(&store).await;
    let reason = store.failure().borrow().clone().unwrap();
    assert!(reason.contains("No space left on device"), "{reason}");
    store.shutdown().await;

    match RaftStore::open(options(&path)).await {
        Ok(store) => store.shutdown().await,
        Err(error) => assert!(error.to_string().contains("No space left on device"), "{error}"),
    }
    std::fs::remove_file(&hog).unwrap();
    let store = open(&path).await;
    for url in &acknowledged {
        assert!(store.local().worker_by_url(url).is_some(), "{url} was acknowledged and is lost");
    }
    store.propose(create("http://again:1")).await.unwrap();
    store.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_without_room_for_a_new_cluster_is_told_so_and_can_be_used_later() {
    let Some(disk) = SmallDisk::mount(1 << 20) else { return };
    let hog = disk.fill_but(16 << 10);
    let path = disk.0.path().join("data");
    let error = RaftStore::open(options(&path)).await.unwrap_err();
    assert!(error.to_string().contains("No space left on device"), "{error}");
    std::fs::remove_file(&hog).unwrap();
    open(&path).await.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_that_cannot_be_written_stops_the_store_and_loses_nothing() {
    let directory = fast_directory();
    let options = RaftOptions { snapshot_every: 30, ..options(directory.path()) };
    let store = RaftStore::open(options.clone()).await.unwrap();
    // A directory where the file should go makes its creation fail.
    for index in 0..200 {
        for term in 1..3 {
            let name = format!("snap-{term}-{index}{}{}", dir::SNAPSHOT, dir::UNFINISHED);
            std::fs::create_dir(directory.path().join(name)).unwrap();
        }
    }
    let acknowledged = write_until_failure(&store, "snap").await;
    assert_failed_for_good(&store).await;
    assert!(store.failure().borrow().as_ref().unwrap().contains("writing a snapshot failed"));
    store.shutdown().await;
    for name in dir::names(directory.path()).unwrap() {
        if name.ends_with(dir::UNFINISHED) {
            std::fs::remove_dir(directory.path().join(name)).unwrap();
        }
    }
    let store = RaftStore::open(options).await.unwrap();
    for url in &acknowledged {
        assert!(store.local().worker_by_url(url).is_some(), "{url} was acknowledged and is lost");
    }
    store.shutdown().await;
}
