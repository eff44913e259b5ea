//! vLLM's `MoRIIOConnector` over HTTP: KV over RDMA, pulled by decode (READ) or pushed by prefill (WRITE).
//!
//! A MoRI-IO decode engine never computes a prompt itself. Without its handoff it answers with text over KV that never
//! arrived (READ) or waits for a push that never comes (WRITE), and a handoff of a wrong shape can stop its scheduler
//! for every request. So nothing is assumed here: a decode leg exists only for a pair that was checked ([`Pair`]), a
//! request that was checked ([`check_request`]) and, unless both WRITE legs go out at once, a handoff that was checked
//! ([`Pair::check_handoff`]).
//!
//! HTTP engines report none of their MoRI-IO settings: they are worker labels ([`Settings`]; SMG PD docs, MoRI-IO).
//!
//! | dispatch | prefill leg names | decode leg carries |
//! |---|---|---|
//! | READ | nothing of the decode | the prefill's handoff, verbatim |
//! | WRITE, sequential | the decode's side channel | the prefill's handoff, verbatim |
//! | WRITE, concurrent | the decode's side channel | the prefill's side channel, minted here |

mod handoff;
mod request;

use std::fmt;
use std::net::IpAddr;

use bytes::Bytes;
use smg_fleet::policy::ClientHandoffFields;
use uuid::Uuid;

use crate::body::ClientBody;
use crate::field::Field;
use crate::splice::SplicedBody;
use crate::vllm;

pub use handoff::HandoffError;
pub use request::{RequestRefusal, check_request};

/// `handshake_port` of an engine whose label names none.
pub const DEFAULT_HANDSHAKE_PORT: u16 = 6301;
/// `notify_port` of an engine whose label names none.
pub const DEFAULT_NOTIFY_PORT: u16 = 61005;

/// Who moves the KV cache: `read_mode` of the engine's `kv_connector_extra_config`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Decode pulls it after the prefill leg.
    Read,
    /// Prefill pushes it.
    Write,
}

impl fmt::Display for Mode {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
        })
    }
}

/// When the two legs of a WRITE pair are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteDispatch {
    /// Decode after prefill.
    Sequential,
    /// Both at once.
    Concurrent,
}

/// What the labels of one worker say. Depends on the worker alone, so it can be kept with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    mode: Mode,
    /// Where peers reach its side channel; IPv6 as it was written, with or without brackets.
    host: String,
    handshake_port: u16,
    notify_port: u16,
    write_dispatch: WriteDispatch,
    tensor_parallel: Option<u32>,
}

/// A label with which a worker cannot take part.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LabelError {
    /// The engine's mode is not known.
    #[error("label `moriio_mode` is missing")]
    ModeMissing,
    /// A label has a value that means nothing.
    #[error("label `{name}` is `{value}`, it must be {expected}")]
    Invalid {
        /// The label.
        name: &'static str,
        /// Its value.
        value: String,
        /// What it has to be.
        expected: &'static str,
    },
    /// A handoff cannot say which rank holds the KV cache.
    #[error("it runs {0} data-parallel ranks, MoRI-IO pairs run one")]
    DataParallel(u32),
}

impl Settings {
    /// Reads a worker's labels. `url_host` is the host of its URL, its side channel's unless a label says otherwise.
    ///
    /// Values are trimmed; an empty one is as good as none.
    ///
    /// # Errors
    /// The first label with which the worker cannot take part.
    pub fn read<'a>(label: impl Fn(&str) -> Option<&'a str>, url_host: &str) -> Result<Self, LabelError> {
        let label = |name: &str| label(name).map(str::trim).filter(|value| !value.is_empty());
        let invalid = |name, value: &str, expected| LabelError::Invalid { name, value: value.to_owned(), expected };
        let number = |name: &'static str, expected, largest: u32| match label(name) {
            None => Ok(None),
            Some(value) => match decimal(value).and_then(|number| u32::try_from(number).ok()) {
                Some(number) if (1..=largest).contains(&number) => Ok(Some(number)),
                _ => Err(invalid(name, value, expected)),
            },
        };
        let port = |name, default| {
            let number = number(name, "a port from 1 to 65535", u32::from(u16::MAX))?;
            Ok(number.and_then(|number| u16::try_from(number).ok()).unwrap_or(default))
        };
        let mode = match label("moriio_mode") {
            None => return Err(LabelError::ModeMissing),
            Some(mode) if mode.eq_ignore_ascii_case("read") => Mode::Read,
            Some(mode) if mode.eq_ignore_ascii_case("write") => Mode::Write,
            Some(other) => return Err(invalid("moriio_mode", other, "`read` or `write`")),
        };
        let write_dispatch = match label("moriio_write_dispatch") {
            None => WriteDispatch::Sequential,
            Some(dispatch) if dispatch.eq_ignore_ascii_case("sequential") => WriteDispatch::Sequential,
            Some(dispatch) if dispatch.eq_ignore_ascii_case("concurrent") => WriteDispatch::Concurrent,
            Some(other) => return Err(invalid("moriio_write_dispatch", other, "`sequential` or `concurrent`")),
        };
        let host = label("moriio_host").unwrap_or(url_host);
        if host.contains(|character: char| character.is_whitespace() || character == '/') {
            return Err(invalid("moriio_host", host, "a host name or an address"));
        }
        if let Some(ranks @ 2..) = number("dp_size", "a count of at least 1", u32::MAX)? {
            return Err(LabelError::DataParallel(ranks));
        }
        Ok(Self {
            mode,
            host: host.to_owned(),
            handshake_port: port("moriio_handshake_port", DEFAULT_HANDSHAKE_PORT)?,
            notify_port: port("moriio_notify_port", DEFAULT_NOTIFY_PORT)?,
            write_dispatch,
            tensor_parallel: number("tp_size", "a count of at least 1", u32::MAX)?,
        })
    }

    /// `,"remote_host":…` and the ports: how a peer is told where this side channel is.
    fn write_side_channel(&self, out: &mut String) {
        let host = serde_json::Value::from(self.host.as_str());
        out.push_str(&format!(
            r#","remote_host":{host},"remote_handshake_port":{},"remote_notify_port":{}"#,
            self.handshake_port, self.notify_port
        ));
    }

    fn write_tensor_parallel(&self, out: &mut String) {
        if let Some(size) = self.tensor_parallel {
            out.push_str(&format!(r#","remote_tp_size":{size}"#));
        }
    }
}

/// What a plain decimal number stands for; none for anything else, signs included.
fn decimal(text: &str) -> Option<u64> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

/// A leg of a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leg {
    /// The prefill worker.
    Prefill,
    /// The decode worker.
    Decode,
}

impl fmt::Display for Leg {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        })
    }
}

/// Why two workers cannot be a MoRI-IO pair. For operators: it names labels and hosts.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PairRefusal {
    /// Only one of them has the connector.
    #[error("the {0} worker is not a MoRIIOConnector worker")]
    OtherConnector(Leg),
    /// A worker's labels.
    #[error("the {0} worker: {1}")]
    Labels(Leg, LabelError),
    /// One would push, the other pull.
    #[error("the prefill worker is in {prefill} mode, the decode worker in {decode} mode")]
    Modes {
        /// The prefill's mode.
        prefill: Mode,
        /// The decode's mode.
        decode: Mode,
    },
    /// The address of a side channel means something else on the machine of its peer.
    #[error("the {0} worker's side channel is on `{1}`, where its peer on another host cannot reach it")]
    Unreachable(Leg, String),
    /// Two engines cannot listen on one port of one host, so an engine would talk to itself.
    #[error("both workers have their side channel on `{0}` with the same handshake or notify port")]
    SharedSideChannel(String),
}

/// Two workers that can be a MoRI-IO pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pair<'a> {
    prefill: &'a Settings,
    decode: &'a Settings,
}

impl<'a> Pair<'a> {
    /// Checks a pair. A worker's settings are `None` when it has another connector.
    ///
    /// # Errors
    /// Why they are no pair.
    pub fn check(
        prefill: Option<&'a Result<Settings, LabelError>>,
        decode: Option<&'a Result<Settings, LabelError>>,
    ) -> Result<Self, PairRefusal> {
        let usable = |leg, settings: Option<&'a Result<Settings, LabelError>>| match settings {
            None => Err(PairRefusal::OtherConnector(leg)),
            Some(Err(error)) => Err(PairRefusal::Labels(leg, error.clone())),
            Some(Ok(settings)) => Ok(settings),
        };
        let pair = Self { prefill: usable(Leg::Prefill, prefill)?, decode: usable(Leg::Decode, decode)? };
        let (prefill, decode) = (pair.prefill, pair.decode);
        if prefill.mode != decode.mode {
            return Err(PairRefusal::Modes { prefill: prefill.mode, decode: decode.mode });
        }
        if prefill.mode == Mode::Read {
            return Ok(pair);
        }
        let (prefill_host, decode_host) = (Host::of(&prefill.host), Host::of(&decode.host));
        if decode_host.is_local() && !prefill_host.is_local() {
            return Err(PairRefusal::Unreachable(Leg::Decode, decode.host.clone()));
        }
        if pair.is_concurrent() && prefill_host.is_local() && !decode_host.is_local() {
            return Err(PairRefusal::Unreachable(Leg::Prefill, prefill.host.clone()));
        }
        let same_host = prefill_host == decode_host || prefill_host.is_local() && decode_host.is_local();
        let same_port = prefill.handshake_port == decode.handshake_port || prefill.notify_port == decode.notify_port;
        if same_host && same_port {
            return Err(PairRefusal::SharedSideChannel(decode.host.clone()));
        }
        Ok(pair)
    }

    /// Whether both legs are sent at once: WRITE, if the decode worker asks for it.
    pub fn is_concurrent(&self) -> bool {
        self.decode.mode == Mode::Write && self.decode.write_dispatch == WriteDispatch::Concurrent
    }

    /// `kv_transfer_params` of the prefill leg.
    fn prefill_params(&self, transfer_id: &TransferId) -> Bytes {
        let mut params = format!(
            r#"{{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"transfer_id":"{transfer_id}","remote_dp_size":1"#
        );
        self.decode.write_tensor_parallel(&mut params);
        if self.decode.mode == Mode::Write {
            self.decode.write_side_channel(&mut params);
        }
        params.push('}');
        params.into()
    }

    /// `kv_transfer_params` of a decode leg that is sent before the prefill has answered.
    pub fn decode_params(&self, transfer_id: &TransferId) -> Bytes {
        let mut params = format!(
            r#"{{"do_remote_decode":false,"do_remote_prefill":true,"remote_engine_id":null,"remote_block_ids":null,"transfer_id":"{transfer_id}","remote_dp_size":1"#
        );
        self.prefill.write_side_channel(&mut params);
        self.prefill.write_tensor_parallel(&mut params);
        params.push('}');
        params.into()
    }

    /// The prefill leg's body. The connector hands over only when the answer ends by its one-token cap, so whatever
    /// could end it earlier goes; the token itself is thrown away.
    pub fn prefill_leg(
        &self,
        body: &ClientBody,
        client_fields: ClientHandoffFields,
        transfer_id: &TransferId,
    ) -> SplicedBody {
        let mut edits = vllm::prefill_edits(body, client_fields);
        edits.set(Field::IgnoreEos, Bytes::from_static(b"true"));
        edits.remove(Field::Stop);
        edits.remove(Field::StopTokenIds);
        edits.set(Field::KvTransferParams, self.prefill_params(transfer_id));
        body.splice(&edits)
    }

    /// Finds and checks the handoff in a prefill response (2xx) of this pair. What it returns is the prefill's own
    /// text, for [`vllm::decode_leg`].
    ///
    /// # Errors
    /// Why it must not reach a decode engine, or, with both legs in flight, why no push will come.
    pub fn check_handoff(&self, response: &Bytes, transfer_id: &TransferId) -> Result<Bytes, HandoffError> {
        let told = self.is_concurrent().then_some((self.prefill.handshake_port, self.prefill.notify_port));
        handoff::check(response, &transfer_id.0, told)
    }
}

/// Names the transfer of one attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TransferId(String);

impl TransferId {
    /// The id made of `transfer`, which must be a new version 7 UUID for every attempt.
    pub fn new(transfer: Uuid) -> Self {
        Self(format!("tx-{}", transfer.simple()))
    }
}

impl fmt::Display for TransferId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// A side channel's host, so that spellings of one host are equal.
#[derive(Debug, PartialEq, Eq)]
enum Host {
    Address(IpAddr),
    Name(String),
}

impl Host {
    fn of(text: &str) -> Self {
        let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
        match bare.parse::<IpAddr>() {
            Ok(address) => Self::Address(address.to_canonical()),
            Err(_) => Self::Name(text.trim_end_matches('.').to_ascii_lowercase()),
        }
    }

    /// Whether it means the machine that reads it.
    fn is_local(&self) -> bool {
        match self {
            Self::Address(address) => address.is_loopback() || address.is_unspecified(),
            Self::Name(name) => name == "localhost",
        }
    }
}
