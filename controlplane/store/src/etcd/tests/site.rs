//! A real etcd on the loopback interface, and members that reach it through a proxy each.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};

use super::*;

fn free_port() -> u16 {
    std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port()
}

/// One process of etcd.
pub(super) struct Server {
    child: Child,
    directory: TempDir,
    pub client: u16,
    peer: u16,
}

impl Server {
    /// An etcd cluster of its own.
    pub async fn alone() -> Self {
        // In memory where there is one: what is tested here is not etcd's disk.
        let directory = TempDir::new_in("/dev/shm").unwrap_or_else(|_| TempDir::new().unwrap());
        let (client, peer) = (free_port(), free_port());
        let child = Self::spawn(directory.path(), client, peer);
        let server = Self { child, directory, client, peer };
        server.until_ready().await;
        server
    }

    fn spawn(directory: &Path, client: u16, peer: u16) -> Child {
        let of = |port: u16| format!("http://127.0.0.1:{port}");
        let log = std::fs::File::create(directory.join("log")).unwrap();
        let mut command = Command::new("etcd");
        command
            .args(["--name", "it", "--data-dir", directory.join("data").to_str().unwrap()])
            .args(["--listen-client-urls", &of(client), "--advertise-client-urls", &of(client)])
            .args(["--listen-peer-urls", &of(peer), "--initial-advertise-peer-urls", &of(peer)])
            .args(["--initial-cluster", &format!("it={}", of(peer))])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        command.spawn().unwrap_or_else(|error| {
            panic!("these tests need etcd, which cannot be started ({error}): install it, on Debian `apt-get install etcd-server`")
        })
    }

    async fn until_ready(&self) {
        let etcd = self.client();
        let asked = etcd.range(keys::one(b"ready".to_vec()), Instant::now() + suite::PATIENCE).await;
        asked.unwrap_or_else(|error| {
            panic!("{error}: {}", std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default())
        });
    }

    /// Calls to it, past any proxy.
    pub fn client(&self) -> Etcd {
        let url = format!("http://127.0.0.1:{}", self.client);
        Etcd::new(&[url], None, Arc::default()).unwrap()
    }

    /// Ends it at once.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Starts it again, on what it had.
    pub async fn restart(&mut self) {
        self.child = Self::spawn(self.directory.path(), self.client, self.peer);
        self.until_ready().await;
    }

    /// Starts it again, on nothing.
    pub async fn restart_empty(&mut self) {
        std::fs::remove_dir_all(self.directory.path().join("data")).unwrap();
        self.restart().await;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

async fn until(state: &mut values::Receiver<bool>, is_cut: bool) {
    let _ = state.wait_for(|cut| *cut == is_cut).await;
}

/// Carries connections to etcd, unless it is cut.
pub(super) struct Proxy {
    pub address: SocketAddr,
    cut: values::Sender<bool>,
    task: AbortHandle,
}

impl Proxy {
    async fn to(port: u16) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (cut, state) = values::channel(false);
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((mut inbound, _)) = listener.accept().await {
                let mut state = state.clone();
                connections.spawn(async move {
                    until(&mut state, false).await;
                    let Ok(mut outbound) = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await else { return };
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut inbound, &mut outbound) => return,
                        () = until(&mut state, true) => {}
                    }
                    // What was on its way is lost, and nobody is told: the connection stays open and silent.
                    until(&mut state, false).await;
                });
            }
        });
        Self { address, cut, task: task.abort_handle() }
    }

    /// Cuts the cable, or mends it.
    pub fn cut(&self, is_cut: bool) {
        self.cut.send_replace(is_cut);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Three places on one etcd.
pub(super) struct Members {
    pub server: Server,
    pub proxies: Vec<Proxy>,
    running: Vec<Option<Arc<EtcdStore>>>,
    tune: fn(&mut EtcdOptions),
}

impl Members {
    /// Three members that run.
    pub async fn three(tune: fn(&mut EtcdOptions)) -> Self {
        let server = Server::alone().await;
        let mut proxies = Vec::new();
        for _ in 0..3 {
            proxies.push(Proxy::to(server.client).await);
        }
        let mut members = Self { server, proxies, running: vec![None, None, None], tune };
        for n in 0..3 {
            members.start(n).await;
        }
        members
    }

    pub fn options(&self, n: usize) -> EtcdOptions {
        let mut options = EtcdOptions::new(vec![format!("http://{}", self.proxies[n].address)], "/smg/test");
        options.bootstrap = n == 0;
        options.api_address = format!("api-{n}:7400");
        options.lease = Duration::from_secs(2);
        (self.tune)(&mut options);
        options
    }

    pub fn member(&self, n: usize) -> &Arc<EtcdStore> {
        self.running[n].as_ref().unwrap()
    }
}

impl Site for Members {
    async fn start(&mut self, n: usize) {
        self.running[n] = Some(EtcdStore::open(self.options(n)).await.unwrap());
    }

    async fn kill(&mut self, n: usize) {
        // Its lease is not given back: etcd hears nothing more of it.
        self.proxies[n].cut(true);
        self.running[n].take().unwrap().shutdown().await;
        self.proxies[n] = Proxy::to(self.server.client).await;
    }

    fn store(&self, n: usize) -> Arc<dyn ClusterStore> {
        Arc::clone(self.member(n)) as Arc<dyn ClusterStore>
    }

    fn running(&self) -> Vec<usize> {
        (0..3).filter(|n| self.running[*n].is_some()).collect()
    }
}
