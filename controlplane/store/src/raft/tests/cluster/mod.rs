//! Clusters of several members in one process, over real sockets and real directories.
//!
//! Each member has a loopback address of its own, 127.0.0.N, from which it also calls the others. What others call is a proxy before its
//! listener; the proxy knows a caller by its address, so any pair of members can be cut off from each other, one way or both.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use smg_net::serve::{ServeOptions, Server, Shutdown};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::cluster::Refusal;
use crate::suite::{PATIENCE, Site, acknowledged, eventually};

mod members;
mod partitions;
mod replication;

type Cuts = Arc<Mutex<BTreeSet<(IpAddr, IpAddr)>>>;

/// Carries connections to `listener` on to `target`, and stops doing so between addresses that are cut off from each other.
async fn proxy(listener: TcpListener, target: SocketAddr, cuts: Cuts) {
    let here = listener.local_addr().unwrap().ip();
    while let Ok((inbound, from)) = listener.accept().await {
        let (cuts, pair) = (Arc::clone(&cuts), (from.ip(), here));
        tokio::spawn(async move {
            let Ok(outbound) = TcpStream::connect(target).await else { return };
            let (inbound, outbound) = (inbound.into_split(), outbound.into_split());
            let carry = |mut from: tokio::net::tcp::OwnedReadHalf, mut to: tokio::net::tcp::OwnedWriteHalf| {
                let cuts = Arc::clone(&cuts);
                async move {
                    let mut buffer = vec![0; 64 * 1024];
                    while let Ok(length @ 1..) = from.read(&mut buffer).await {
                        // What was on its way when the cable was cut is lost, and nobody is told.
                        while cuts.lock().contains(&pair) {
                            tokio::time::sleep(Duration::from_millis(20)).await;
                        }
                        if to.write_all(&buffer[..length]).await.is_err() {
                            return;
                        }
                    }
                }
            };
            tokio::select! {
                () = carry(inbound.0, outbound.1) => {}
                () = carry(outbound.0, inbound.1) => {}
            }
        });
    }
}

/// One member's place: its address and its directory, which outlive its process.
struct Place {
    ip: IpAddr,
    address: String,
    listen: SocketAddr,
    directory: TempDir,
}

/// A running member.
struct Running {
    store: Arc<RaftStore>,
    server: Server,
    shutdown: Shutdown,
}

struct Cluster {
    places: Vec<Place>,
    running: Vec<Option<Running>>,
    cuts: Cuts,
    tune: fn(&mut RaftOptions),
}

/// Tests that run beside this one use other addresses.
fn next_ip() -> IpAddr {
    static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(1);
    let n = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed) + (std::process::id() % 60_000) * 200;
    IpAddr::V4(Ipv4Addr::from(0x7f00_0000 | (0x01_0000 + n % 0xfd_0000)))
}

impl Cluster {
    /// Places for `size` members, none of which runs.
    async fn prepare(size: usize, tune: fn(&mut RaftOptions)) -> Self {
        let cuts = Cuts::default();
        let mut places = Vec::new();
        for _ in 0..size {
            let ip = next_ip();
            let front = TcpListener::bind((ip, 0)).await.unwrap();
            let back = TcpListener::bind((ip, 0)).await.unwrap();
            let (address, listen) = (front.local_addr().unwrap(), back.local_addr().unwrap());
            tokio::spawn(proxy(front, listen, Arc::clone(&cuts)));
            places.push(Place { ip, address: address.to_string(), listen, directory: fast_directory() });
        }
        let running = places.iter().map(|_| None).collect();
        Self { places, running, cuts, tune }
    }

    /// A cluster whose first member has founded it and whose others have joined and become voters.
    async fn of(size: usize, tune: fn(&mut RaftOptions)) -> Self {
        let mut cluster = Self::prepare(size, tune).await;
        for n in 0..size {
            cluster.start(n).await;
        }
        cluster.until_voters(size).await;
        cluster
    }

    fn options(&self, n: usize) -> RaftOptions {
        let place = &self.places[n];
        let mut options = RaftOptions::new(place.directory.path(), &place.address);
        options.with_peers = true;
        options.source = Some(place.ip);
        options.api_address = format!("api-{n}:7400");
        options.patience = Patience { heartbeat: Duration::from_millis(150), election: Duration::from_millis(800) };
        options.settle = Duration::from_millis(200);
        if n == 0 {
            options.bootstrap = true;
        } else {
            options.join = vec![self.places[0].address.clone()];
        }
        (self.tune)(&mut options);
        options
    }

    async fn start(&mut self, n: usize) {
        let options = self.options(n);
        self.start_with(n, options).await;
    }

    async fn start_with(&mut self, n: usize, options: RaftOptions) {
        let store = RaftStore::open(options).await.unwrap();
        let shutdown = Shutdown::default();
        let server = Server::new(ServeOptions::default(), shutdown.clone());
        let listener = smg_net::serve::bind(self.places[n].listen).unwrap();
        let (serving, service) = (server.clone(), store.peer_service());
        tokio::spawn(async move { serving.listen(listener, service).await });
        self.running[n] = Some(Running { store, server, shutdown });
    }

    /// Ends a member as a crash would: nobody is told, connections break.
    async fn kill(&mut self, n: usize) {
        let Running { store, server, shutdown } = self.running[n].take().unwrap();
        shutdown.now();
        server.drain(Duration::ZERO).await;
        store.shutdown().await;
    }

    fn store(&self, n: usize) -> &Arc<RaftStore> {
        &self.running[n].as_ref().unwrap().store
    }

    fn stores(&self) -> impl Iterator<Item = &Arc<RaftStore>> {
        self.running.iter().flatten().map(|running| &running.store)
    }

    /// Waits until one of the members that run leads with a quorum; returns its place.
    async fn leader(&self) -> usize {
        eventually("a leader", || {
            let leads = |n: &usize| self.running[*n].as_ref().is_some_and(|r| r.store.leads() && r.store.contact());
            (0..self.places.len()).find(leads)
        })
        .await
    }

    /// Waits until every running member sees so many voters, committed.
    async fn until_voters(&self, count: usize) {
        eventually(&format!("{count} voters"), || {
            let sees = |store: &Arc<RaftStore>| {
                let metrics = store.raft.metrics().borrow_watched().clone();
                metrics.committed_membership_config.get_joint_config().len() == 1
                    && metrics.committed_membership_config.voter_ids().count() == count
            };
            self.stores().all(sees).then_some(())
        })
        .await;
    }

    /// Waits until all members that run have the same state, and returns it.
    async fn until_equal(&self) -> Arc<State> {
        eventually("equal states", || {
            let states: Vec<Arc<State>> = self.stores().map(|store| store.local()).collect();
            let bytes = smg_state::codec::encode_state(&states[0]);
            let same = states.iter().all(|state| smg_state::codec::encode_state(state) == bytes);
            same.then(|| Arc::clone(&states[0]))
        })
        .await
    }

    /// Cuts a member off from all others, or joins it to them again.
    fn isolate(&self, n: usize, isolated: bool) {
        for other in (0..self.places.len()).filter(|other| *other != n) {
            for (from, to) in [(n, other), (other, n)] {
                self.cut(from, to, isolated);
            }
        }
    }

    /// Cuts the calls of one member to another.
    fn cut(&self, from: usize, to: usize, is_cut: bool) {
        let pair = (self.places[from].ip, self.places[to].ip);
        let mut cuts = self.cuts.lock();
        if is_cut {
            cuts.insert(pair);
        } else {
            cuts.remove(&pair);
        }
    }

    async fn stop(mut self) {
        for n in 0..self.places.len() {
            if self.running[n].is_some() {
                self.kill(n).await;
            }
        }
    }
}

impl Site for Cluster {
    async fn start(&mut self, n: usize) {
        Cluster::start(self, n).await;
    }

    async fn kill(&mut self, n: usize) {
        Cluster::kill(self, n).await;
    }

    fn store(&self, n: usize) -> Arc<dyn ClusterStore> {
        Arc::clone(Cluster::store(self, n)) as Arc<dyn ClusterStore>
    }

    fn running(&self) -> Vec<usize> {
        (0..self.places.len()).filter(|n| self.running[*n].is_some()).collect()
    }
}

crate::suite::store_suite!(Cluster::of(3, |_| {}));
