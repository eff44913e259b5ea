//! How KV moves between engines: over real sockets, in one process or across several.
//!
//! A prefill engine listens on its bootstrap port (SGLang, Mooncake) and its side channel (NIXL, Mooncake, MoRI-IO); a
//! decode engine connects there and asks for the KV of one key. A MoRI-IO decode engine listens too: in WRITE mode the
//! prefill engine pushes the KV there. The wire is one JSON line each way and stands in for NIXL, Mooncake, MoRI-IO and
//! SGLang's own transfer; only Mooncake's `GET /query` (vLLM 0.32) has the shape of the real thing.
//! Closing the connection while an answer is due gives up the transfer.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use crate::ledger::{Key, Kv, Ledger};
use crate::text::Prompt;

/// Longest line either side accepts, in bytes.
const LONGEST_LINE: u64 = 64 * 1024;
/// Idle connections kept to one peer.
const IDLE_PER_PEER: usize = 256;

/// What an engine says to another.
#[derive(Debug, Serialize, Deserialize)]
enum Ask {
    Take(Take),
    /// MoRI-IO WRITE: here is the KV of this key.
    Push {
        key: Key,
        prompt: u64,
        tokens: usize,
    },
    /// MoRI-IO WRITE: are you there?
    Hello,
}

/// A decode engine asks for KV.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Take {
    pub(crate) key: Key,
    /// The engine that is believed to hold the KV, where the protocol names it.
    pub(crate) engine_id: Option<String>,
    /// Digest of the prompt whose KV is wanted.
    pub(crate) prompt: u64,
    /// Data parallel rank that is believed to have computed it.
    pub(crate) rank: Option<u64>,
    /// Whether to wait for a prefill that has not finished.
    pub(crate) wait: bool,
}

/// What the other engine answers.
#[derive(Debug, Serialize, Deserialize)]
enum Given {
    Kv { prompt: u64, tokens: usize },
    Done,
    Refused { reason: String, wrong_engine: bool },
}

/// Why a decode engine has no KV.
#[derive(Debug)]
pub(crate) enum NoKv {
    /// Nobody listens there, or the connection broke.
    Unreachable(String),
    /// Another engine listens there.
    WrongEngine,
    /// The engine there does not give this KV.
    Refused(String),
}

/// What the serving side needs to know of its engine; asked anew for each request since a restart changes it.
pub(crate) struct Holder {
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) engine_id: Arc<str>,
    pub(crate) side_channel: u16,
    /// Data parallel ranks. With several, each has its own engine id, `<engine id>_dp<rank>`.
    pub(crate) ranks: u64,
}

impl Holder {
    /// The ids under which the engine is known, by rank.
    fn ids(&self) -> Vec<String> {
        match self.ranks {
            0 | 1 => vec![self.engine_id.to_string()],
            ranks => (0..ranks).map(|rank| format!("{}_dp{rank}", self.engine_id)).collect(),
        }
    }

    fn is_called(&self, id: &str) -> bool {
        *id == *self.engine_id || self.ranks > 1 && self.ids().iter().any(|known| known == id)
    }
}

/// Serves one connection of a decode engine until it closes.
pub(crate) async fn serve(stream: TcpStream, holder: impl Fn() -> Holder) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut stream = BufReader::new(stream);
    loop {
        let Some(line) = read_line(&mut stream).await? else {
            return Ok(());
        };
        if line.starts_with("GET ") {
            return answer_query(&mut stream, &line, &holder()).await;
        }
        let holder = holder();
        let given = match serde_json::from_str(&line)? {
            Ask::Take(take) => tokio::select! {
                given = give(&take, &holder) => given,
                // One request at a time: anything readable now is the peer's end.
                _ = stream.fill_buf() => return Ok(()),
            },
            Ask::Push { key, prompt, tokens } => receive(&key, Prompt { digest: prompt, tokens }, &holder),
            Ask::Hello => Given::Done,
        };
        write_line(&mut stream, &given).await?;
    }
}

async fn give(take: &Take, holder: &Holder) -> Given {
    if take.engine_id.as_deref().is_some_and(|id| !holder.is_called(id)) {
        return Given::Refused { reason: "another engine".to_owned(), wrong_engine: true };
    }
    let taken = holder.ledger.take(&take.key, take.prompt, take.rank, take.wait).await;
    match taken {
        Ok(kv) => Given::Kv { prompt: kv.prompt.digest, tokens: kv.prompt.tokens },
        Err(reason) => Given::Refused { reason, wrong_engine: false },
    }
}

/// Files KV that was pushed here, for the decode request that waits for it or will.
fn receive(key: &Key, prompt: Prompt, holder: &Holder) -> Given {
    match holder.ledger.begin(key) {
        Ok(hold) => {
            hold.ready(Kv { prompt, rank: None });
            hold.keep();
            Given::Done
        }
        Err(reason) => Given::Refused { reason, wrong_engine: false },
    }
}

/// Mooncake's bootstrap: rank → engine id and worker addresses, as vLLM 0.32 answers.
async fn answer_query(stream: &mut Connection, request: &str, holder: &Holder) -> io::Result<()> {
    while read_line(stream).await?.is_some_and(|line| !line.is_empty()) {}
    let (status, body) = if request.starts_with("GET /query ") {
        let port = holder.side_channel;
        let ranks: Vec<String> = holder
            .ids()
            .iter()
            .enumerate()
            .map(|(rank, id)| {
                format!(r#""{rank}":{{"engine_id":"{id}","worker_addr":{{"0":{{"0":"tcp://127.0.0.1:{port}"}}}}}}"#)
            })
            .collect();
        ("200 OK", format!("{{{}}}", ranks.join(",")))
    } else {
        ("404 Not Found", r#"{"detail":"Not Found"}"#.to_owned())
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nserver: uvicorn\r\ncontent-length: {}\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).await?;
    stream.shutdown().await
}

type Peer = (String, u16);
type Connection = BufReader<TcpStream>;

/// The asking side: connections to other engines, kept for the next request.
#[derive(Default)]
pub(crate) struct Fabric {
    idle: Mutex<HashMap<Peer, Vec<Connection>>>,
}

impl Fabric {
    /// Fetches the KV that `take` describes from the engine at `host:port`.
    pub(crate) async fn take(&self, host: &str, port: u16, take: &Take) -> Result<Kv, NoKv> {
        match self.ask(host, port, &Ask::Take(take.clone())).await? {
            // The text comes from the KV that was handed over, not from what the decode engine read by itself.
            Given::Kv { prompt, tokens } => Ok(Kv { prompt: Prompt { digest: prompt, tokens }, rank: None }),
            Given::Done => Err(NoKv::Refused("not an answer to this".to_owned())),
            Given::Refused { wrong_engine: true, .. } => Err(NoKv::WrongEngine),
            Given::Refused { reason, .. } => Err(NoKv::Refused(reason)),
        }
    }

    /// Pushes KV to the engine at `host:port`; false when it did not take it.
    pub(crate) async fn push(&self, host: &str, port: u16, key: &Key, prompt: Prompt) -> bool {
        let push = Ask::Push { key: key.clone(), prompt: prompt.digest, tokens: prompt.tokens };
        matches!(self.ask(host, port, &push).await, Ok(Given::Done))
    }

    /// Whether an engine listens at `host:port`.
    pub(crate) async fn hello(&self, host: &str, port: u16) -> bool {
        matches!(self.ask(host, port, &Ask::Hello).await, Ok(Given::Done))
    }

    async fn ask(&self, host: &str, port: u16, ask: &Ask) -> Result<Given, NoKv> {
        let unreachable = |error: io::Error| NoKv::Unreachable(error.to_string());
        let peer = (host.trim_start_matches('[').trim_end_matches(']').to_owned(), port);
        let mut stream = match self.reuse(&peer) {
            Some(stream) => stream,
            None => {
                let stream = TcpStream::connect((peer.0.as_str(), port)).await.map_err(unreachable)?;
                stream.set_nodelay(true).map_err(unreachable)?;
                BufReader::new(stream)
            }
        };
        write_line(&mut stream, ask).await.map_err(unreachable)?;
        let line = read_line(&mut stream)
            .await
            .map_err(unreachable)?
            .ok_or_else(|| NoKv::Unreachable("the other engine closed".to_owned()))?;
        let given =
            serde_json::from_str(&line).map_err(|error| NoKv::Unreachable(format!("not an engine: {error}")))?;
        let mut idle = self.idle.lock();
        let streams = idle.entry(peer).or_default();
        if streams.len() < IDLE_PER_PEER {
            streams.push(stream);
        }
        Ok(given)
    }

    /// An idle connection that its peer has not closed.
    fn reuse(&self, peer: &Peer) -> Option<Connection> {
        let mut idle = self.idle.lock();
        let streams = idle.get_mut(peer)?;
        while let Some(stream) = streams.pop() {
            let state = stream.get_ref().try_read(&mut [0]);
            if state.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock) {
                return Some(stream);
            }
        }
        None
    }

    /// Asks a Mooncake bootstrap (`http://host:port`) where the engine `engine_id` has its side channel.
    pub(crate) async fn query(&self, address: &str, engine_id: &str) -> Result<Peer, NoKv> {
        let unreachable = |error: io::Error| NoKv::Unreachable(error.to_string());
        let (host, port) = split_address(address, "http://")
            .ok_or_else(|| NoKv::Unreachable(format!("{address} is no bootstrap address")))?;
        let mut stream = TcpStream::connect((host.as_str(), port)).await.map_err(unreachable)?;
        let request = format!("GET /query HTTP/1.1\r\nhost: {host}:{port}\r\n\r\n");
        stream.write_all(request.as_bytes()).await.map_err(unreachable)?;
        let mut answer = String::new();
        stream.take(LONGEST_LINE).read_to_string(&mut answer).await.map_err(unreachable)?;
        #[derive(Deserialize)]
        struct Rank {
            engine_id: String,
            worker_addr: HashMap<String, HashMap<String, String>>,
        }
        let body = answer.split("\r\n\r\n").nth(1).unwrap_or_default();
        let ranks: HashMap<String, Rank> = serde_json::from_str(body)
            .map_err(|error| NoKv::Unreachable(format!("not a bootstrap server: {error}")))?;
        let rank = ranks.into_values().find(|rank| rank.engine_id == engine_id).ok_or(NoKv::WrongEngine)?;
        rank.worker_addr
            .values()
            .flat_map(HashMap::values)
            .find_map(|address| split_address(address, "tcp://"))
            .ok_or_else(|| NoKv::Unreachable("the bootstrap names no worker".to_owned()))
    }
}

/// `<scheme>host:port` with an optional path, IPv6 without its brackets.
fn split_address(address: &str, scheme: &str) -> Option<Peer> {
    let authority = address.strip_prefix(scheme)?.split('/').next()?;
    let (host, port) = authority.rsplit_once(':')?;
    let host = host.trim_start_matches('[').trim_end_matches(']');
    Some((host.to_owned(), port.parse().ok()?))
}

async fn read_line(stream: &mut Connection) -> io::Result<Option<String>> {
    let mut line = String::new();
    let length = stream.take(LONGEST_LINE).read_line(&mut line).await?;
    Ok((length > 0).then(|| line.trim_end_matches(['\r', '\n']).to_owned()))
}

async fn write_line(stream: &mut Connection, value: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    stream.write_all(&line).await
}

/// Waits as a real engine does on a transfer that cannot happen.
pub(crate) async fn starve(patience: Duration) {
    tokio::time::sleep(patience).await;
}
