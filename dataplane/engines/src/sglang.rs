//! SGLang over HTTP, and every other prefill that is not vLLM: both legs at once.
//!
//! The legs find each other through a rendezvous: the prefill's bootstrap server (host and port) and a room number that
//! both bodies carry. The prefill engine then pushes the KV cache to the decode engine. (SMG PD docs, Parallel Dispatch.)
//!
//! A room serves exactly one prompt and sample, so a batch needs one room per entry: the three fields become arrays of
//! equal length. SGLang spreads such arrays over the prompts of a batch, and over the samples of a chat request, but not
//! over the samples of a completion: these would all wait in one room and stall, so they are refused.

use std::fmt::Write as _;

use bytes::Bytes;
use smallvec::SmallVec;
use smg_fleet::policy::ClientHandoffFields;
use smg_fleet::url::WorkerUrl;

use crate::body::{ClientBody, Prompt, Route};
use crate::field::Field;
use crate::splice::{Edits, SplicedBody};

/// Most samples of one chat request. Each costs a room on both legs, and unlike a batch they cost the client nothing
/// to ask for.
pub const MAX_SAMPLES: u64 = 4096;

/// A request that parallel dispatch over HTTP cannot serve. The client's fault (400).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum UnsupportedRequest {
    /// Several samples of one prompt would share one rendezvous and stall.
    #[error(
        "parallel sampling ({samples} samples per prompt) is not supported by this model's HTTP prefill/decode workers \
         on {path}: all samples would share one KV transfer; serve this traffic with gRPC workers, or send n=1"
    )]
    ParallelSampling {
        /// Samples asked for per prompt.
        samples: u64,
        /// The route.
        path: &'static str,
    },
    /// More samples than [`MAX_SAMPLES`].
    #[error("`n` is {samples}, more than the {MAX_SAMPLES} samples one request may ask for")]
    TooManySamples {
        /// Samples asked for.
        samples: u64,
    },
}

impl UnsupportedRequest {
    /// The code in the error body and in `X-SMG-Error-Code`.
    pub const fn code(self) -> &'static str {
        match self {
            Self::ParallelSampling { .. } => "parallel_sampling_unsupported",
            Self::TooManySamples { .. } => "too_many_samples",
        }
    }
}

/// How many rooms a request needs, and whether they are written as a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// One prompt: plain values.
    Scalar,
    /// A batch (also of one prompt): arrays of this length.
    Array(usize),
}

impl Shape {
    /// The shape that `body` needs.
    ///
    /// # Errors
    /// The request cannot be served by a parallel pair over HTTP.
    pub fn of(body: &ClientBody) -> Result<Self, UnsupportedRequest> {
        let samples = body.samples();
        if body.route() == Route::ChatCompletions {
            return match usize::try_from(samples) {
                Ok(1) => Ok(Self::Scalar),
                Ok(rooms) if samples <= MAX_SAMPLES => Ok(Self::Array(rooms)),
                _ => Err(UnsupportedRequest::TooManySamples { samples }),
            };
        }
        if samples > 1 {
            return Err(UnsupportedRequest::ParallelSampling { samples, path: body.route().path() });
        }
        Ok(match body.prompt() {
            Prompt::Batch(prompts) => Self::Array(prompts),
            Prompt::One | Prompt::Other => Self::Scalar,
        })
    }

    /// Number of rooms to mint.
    pub fn rooms(self) -> usize {
        match self {
            Self::Scalar => 1,
            Self::Array(length) => length,
        }
    }
}

/// A room number from a random word. SGLang stores rooms as signed 64-bit integers, hence 0 … 2^63−1.
pub const fn room_from_random(random: u64) -> u64 {
    random & (u64::MAX >> 1)
}

/// The bootstrap host of the prefill worker at `url`: the host of the URL, IPv6 in brackets, whatever follows it (port,
/// path, rank suffix `@N`) dropped. None when `url` is no worker URL.
pub fn bootstrap_host(url: &str) -> Option<String> {
    let without_rank = match url.rsplit_once('@') {
        Some((base, rank)) if !rank.is_empty() && rank.bytes().all(|byte| byte.is_ascii_digit()) => base,
        _ => url,
    };
    WorkerUrl::parse(without_rank).ok().map(|url| url.host().to_owned())
}

/// Where the two legs of one attempt meet. Both bodies carry the same values; a new attempt needs a new rendezvous.
#[derive(Debug, Clone)]
pub struct Rendezvous {
    rooms: SmallVec<[u64; 1]>,
    host_json: Bytes,
    port_json: Bytes,
    room_json: Bytes,
}

impl Rendezvous {
    /// A rendezvous at the bootstrap server `host`:`port`; no port is written as `null`, which the engine may refuse.
    /// `random` is asked for one word per room.
    pub fn mint(host: &str, port: Option<u16>, shape: Shape, mut random: impl FnMut() -> u64) -> Self {
        let rooms: SmallVec<[u64; 1]> = (0..shape.rooms()).map(|_| room_from_random(random())).collect();
        let host = serde_json::Value::from(host).to_string();
        let port = port.map_or_else(|| "null".to_owned(), |port| port.to_string());
        match shape {
            Shape::Scalar => Self {
                host_json: host.into(),
                port_json: port.into(),
                room_json: rooms.first().map(u64::to_string).unwrap_or_default().into(),
                rooms,
            },
            Shape::Array(length) => Self {
                host_json: array(std::iter::repeat_n(host.as_str(), length)),
                port_json: array(std::iter::repeat_n(port.as_str(), length)),
                room_json: array(&rooms),
                rooms,
            },
        }
    }

    /// The rooms, one per prompt or chat sample.
    pub fn rooms(&self) -> &[u64] {
        &self.rooms
    }

    fn write(&self, edits: &mut Edits) {
        edits.set(Field::BootstrapHost, self.host_json.clone());
        edits.set(Field::BootstrapPort, self.port_json.clone());
        edits.set(Field::BootstrapRoom, self.room_json.clone());
    }
}

fn array(items: impl IntoIterator<Item = impl std::fmt::Display>) -> Bytes {
    let mut text = String::from("[");
    for (index, item) in items.into_iter().enumerate() {
        let separator = if index == 0 { "" } else { "," };
        // Writing to a string cannot fail.
        let _ = write!(text, "{separator}{item}");
    }
    text.push(']');
    text.into()
}

/// Data-parallel ranks of the chosen workers, for those that are one rank of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ranks {
    /// The prefill worker's rank.
    pub prefill: Option<u32>,
    /// The decode worker's rank.
    pub decode: Option<u32>,
}

/// The bodies of both legs.
#[derive(Debug, Clone)]
pub struct Legs {
    /// Goes to the prefill worker.
    pub prefill: SplicedBody,
    /// Goes to the decode worker.
    pub decode: SplicedBody,
}

/// Builds both legs around `rendezvous`.
pub fn legs(body: &ClientBody, client_fields: ClientHandoffFields, rendezvous: &Rendezvous, ranks: Ranks) -> Legs {
    let mut prefill = Edits::for_leg(body, client_fields);
    rendezvous.write(&mut prefill);
    let mut decode = prefill.clone();
    if let Some(rank) = ranks.prefill {
        prefill.set(Field::RoutedDpRank, rank.to_string());
    }
    if let Some(rank) = ranks.decode {
        decode.set(Field::RoutedDpRank, rank.to_string());
    }
    if let Some(rank) = ranks.prefill {
        decode.set(Field::DisaggPrefillDpRank, rank.to_string());
    }
    Legs { prefill: body.splice(&prefill), decode: body.splice(&decode) }
}
