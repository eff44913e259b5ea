//! Faults that a gRPC engine is told to have.
//!
//! As with [`crate::Fault`]: a fault says which calls it meets, how many, and what goes wrong; its parts combine.

use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use parking_lot::Mutex;

/// How an answer ends.
#[derive(Clone, Debug)]
pub(super) enum Ending {
    /// With a status other than OK.
    Status,
    /// The connection is cut.
    Cut,
    /// Nothing more comes and the call stays open.
    Stall,
    /// With OK, as if that had been all.
    Ok,
}

/// One fault. See the module's head.
#[derive(Clone, Debug)]
pub struct CallFault {
    method: &'static str,
    left: Option<u32>,
    pub(super) delay: Duration,
    pub(super) hang: bool,
    pub(super) status: Option<(tonic::Code, String)>,
    pub(super) trailers: Vec<(String, String)>,
    pub(super) end: Option<(u64, Ending)>,
    pub(super) lost: Option<u64>,
    pub(super) end_first: bool,
    pub(super) wrong_sample: bool,
    pub(super) empty_first: bool,
    pub(super) frames: Option<Bytes>,
}

impl CallFault {
    fn new(method: &'static str) -> Self {
        CallFault {
            method,
            left: None,
            delay: Duration::ZERO,
            hang: false,
            status: None,
            trailers: Vec::new(),
            end: None,
            lost: None,
            end_first: false,
            wrong_sample: false,
            empty_first: false,
            frames: None,
        }
    }

    /// A fault of `Generate`.
    pub fn generate() -> Self {
        Self::new("Generate")
    }

    /// A fault of another method, for example `GetServerInfo`. For these, [`CallFault::delay`], [`CallFault::hang`],
    /// [`CallFault::refuse`] and the raw answers apply.
    pub fn method(method: &'static str) -> Self {
        Self::new(method)
    }

    /// Only the next `calls` calls in scope meet it; without this, all do.
    pub fn times(mut self, calls: u32) -> Self {
        self.left = Some(calls);
        self
    }

    /// Waits before the engine sees the call.
    pub fn delay(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    /// Never answers, not even with headers; the engine has the request until it is aborted or dropped.
    pub fn hang(mut self) -> Self {
        self.hang = true;
        self
    }

    /// Answers with this status instead.
    pub fn refuse(mut self, code: tonic::Code, message: impl Into<String>) -> Self {
        self.status = Some((code, message.into()));
        self
    }

    /// Fails with this status after that many messages.
    pub fn fail_after(mut self, messages: u64, code: tonic::Code, message: impl Into<String>) -> Self {
        self.status = Some((code, message.into()));
        self.end = Some((messages, Ending::Status));
        self
    }

    /// Adds a trailer to the status.
    pub fn trailer(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.trailers.push((name.into(), value.into()));
        self
    }

    /// Cuts the connection after this many messages.
    pub fn cut_after(mut self, messages: u64) -> Self {
        self.end = Some((messages, Ending::Cut));
        self
    }

    /// Falls silent after this many messages.
    pub fn stall_after(mut self, messages: u64) -> Self {
        self.end = Some((messages, Ending::Stall));
        self
    }

    /// Ends the answer with OK after this many messages.
    pub fn end_after(mut self, messages: u64) -> Self {
        self.end = Some((messages, Ending::Ok));
        self
    }

    /// Leaves out this message, counted from 1; the others come as ever.
    pub fn lose(mut self, message: u64) -> Self {
        self.lost = Some(message);
        self
    }

    /// Sends the message that ends a sample first, then the others.
    pub fn out_of_order(mut self) -> Self {
        self.end_first = true;
        self
    }

    /// Numbers every message with a sample that was not asked for.
    pub fn wrong_sample(mut self) -> Self {
        self.wrong_sample = true;
        self
    }

    /// Sends a message with nothing in it first.
    pub fn empty_message(mut self) -> Self {
        self.empty_first = true;
        self
    }

    /// Answers with one frame whose message is these bytes; the engine does not see the call.
    pub fn garbage(mut self, message: &[u8]) -> Self {
        self.frames = Some(frame(message));
        self
    }

    /// Answers with one message of this many bytes; the engine does not see the call.
    pub fn too_large(self, bytes: usize) -> Self {
        self.garbage(&vec![0; bytes])
    }

    fn meets(&self, method: &str) -> bool {
        self.left != Some(0) && self.method == method
    }

    /// The status with its trailers.
    pub(super) fn refusal(&self) -> tonic::Status {
        let (code, message) =
            self.status.clone().unwrap_or_else(|| (tonic::Code::Internal, "the engine failed".to_owned()));
        let mut metadata = tonic::metadata::MetadataMap::new();
        for (name, value) in &self.trailers {
            let key = tonic::metadata::MetadataKey::from_bytes(name.as_bytes());
            if let (Ok(key), Ok(value)) = (key, value.parse()) {
                metadata.append(key, value);
            }
        }
        tonic::Status::with_metadata(code, message, metadata)
    }
}

/// A message as gRPC frames it: not compressed, its length, itself.
fn frame(message: &[u8]) -> Bytes {
    let mut frame = BytesMut::with_capacity(message.len() + 5);
    frame.put_u8(0);
    frame.put_u32(u32::try_from(message.len()).unwrap_or(u32::MAX));
    frame.put_slice(message);
    frame.freeze()
}

/// The faults an engine has at present.
#[derive(Default)]
pub(crate) struct CallFaults(Mutex<Vec<CallFault>>);

impl CallFaults {
    pub(crate) fn add(&self, fault: CallFault) {
        self.0.lock().push(fault);
    }

    pub(crate) fn clear(&self) {
        self.0.lock().clear();
    }

    /// The first fault that meets this call, counted down.
    pub(super) fn meeting(&self, method: &str) -> Option<CallFault> {
        let mut faults = self.0.lock();
        let fault = faults.iter_mut().find(|fault| fault.meets(method))?;
        if let Some(left) = &mut fault.left {
            *left -= 1;
        }
        let met = fault.clone();
        faults.retain(|fault| fault.left != Some(0));
        Some(met)
    }
}
