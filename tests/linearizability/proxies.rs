//! The network between members: each is reached through a proxy that can be told to carry nothing of what a certain other one says.
//!
//! A member calls others from an address of its own, by which a proxy knows whose connection it carries.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::support::cluster::Place;

/// Who is cut off from whom: what the first one asks of the second one, and the answers to it.
type Cuts = BTreeSet<(usize, usize)>;

/// The proxies before all members.
pub struct Network {
    cuts: Arc<watch::Sender<Cuts>>,
    members: usize,
}

impl Network {
    /// Starts a proxy before each place.
    pub async fn before(places: &[Place]) -> Self {
        let cuts = Arc::new(watch::Sender::default());
        let own: Vec<SocketAddr> = places.iter().map(|place| place.peer_listen().parse().unwrap()).collect();
        for (to, place) in places.iter().enumerate() {
            let listener = TcpListener::bind(place.peer_address()).await.unwrap();
            tokio::spawn(accept(listener, to, own.clone(), Arc::clone(&cuts)));
        }
        Self { cuts, members: places.len() }
    }

    /// Cuts what one member asks of another one.
    pub fn cut(&self, from: usize, to: usize) {
        self.cuts.send_modify(|cuts| _ = cuts.insert((from, to)));
    }

    /// Cuts a member off from all others.
    pub fn isolate(&self, member: usize) {
        for other in (0..self.members).filter(|other| *other != member) {
            self.cut(member, other);
            self.cut(other, member);
        }
    }

    /// Makes everything whole again.
    pub fn mend(&self) {
        self.cuts.send_modify(Cuts::clear);
    }
}

async fn accept(listener: TcpListener, to: usize, own: Vec<SocketAddr>, cuts: Arc<watch::Sender<Cuts>>) {
    let member_at = |address: IpAddr| own.iter().position(|own| own.ip() == address);
    while let Ok((inbound, caller)) = listener.accept().await {
        let from = member_at(caller.ip()).expect("only members call members");
        tokio::spawn(carry(inbound, own[to], (from, to), cuts.subscribe()));
    }
}

/// Carries a connection. What is under way when it is cut comes when it is mended, and nobody is told.
async fn carry(inbound: TcpStream, target: SocketAddr, way: (usize, usize), cuts: watch::Receiver<Cuts>) {
    let Ok(outbound) = TcpStream::connect(target).await else { return };
    let (asked, answers) = inbound.into_split();
    let (answered, asks) = outbound.into_split();
    tokio::select! {
        () = copy(asked, asks, way, cuts.clone()) => {}
        () = copy(answered, answers, way, cuts) => {}
    }
}

async fn copy(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, way: (usize, usize), mut cuts: watch::Receiver<Cuts>) {
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(length @ 1..) = from.read(&mut buffer).await {
        let whole = cuts.wait_for(|cuts| !cuts.contains(&way)).await.is_ok();
        if !whole || to.write_all(&buffer[..length]).await.is_err() {
            return;
        }
    }
}
