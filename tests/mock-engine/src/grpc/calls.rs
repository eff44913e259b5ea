//! The calls that a gRPC engine has received, and the requests that are inside it.
//!
//! A request is the engine's from its arrival until it is done, fails, or is aborted. What ended it is remembered, and so
//! is when its caller went away and when an abort came: a gateway's promises are about these moments.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use smg_services::engines::{sglang, tokenspeed, vllm};
use tokio_util::sync::CancellationToken;

use crate::record::Recorder;

/// What was asked for, as it came.
#[derive(Clone, Debug, PartialEq)]
pub enum Asked {
    /// Of SGLang.
    Sglang(Box<sglang::GenerateRequest>),
    /// Of vLLM.
    Vllm(Box<vllm::GenerateRequest>),
    /// Of TokenSpeed.
    TokenSpeed(Box<tokenspeed::GenerateRequest>),
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CallEnd {
    /// Its answer is out.
    Completed,
    /// It was refused, or failed.
    Failed(tonic::Code, String),
    /// `Abort` ended it.
    Aborted,
    /// Its caller was gone.
    Dropped,
    /// A fault ended it.
    Faulty,
}

/// A `Generate` call, as far as it has gone.
#[derive(Clone, Debug)]
pub struct Call {
    /// The request.
    pub asked: Asked,
    /// The call's metadata, in order.
    pub metadata: Vec<(String, String)>,
    /// When it arrived.
    pub arrived_at: Instant,
    /// When its first message was ready.
    pub first_message_at: Option<Instant>,
    /// When its caller dropped it, if that was before its end.
    pub dropped_at: Option<Instant>,
    /// When it ended.
    pub ended_at: Option<Instant>,
    /// How it ended; `None` = the request is inside the engine.
    pub end: Option<CallEnd>,
    /// Messages sent.
    pub messages: u64,
    /// The data-parallel rank that it ran on, where the engine has several.
    pub rank: Option<u64>,
}

impl Call {
    /// The request's id.
    pub fn request_id(&self) -> &str {
        match &self.asked {
            Asked::Sglang(request) => &request.request_id,
            Asked::Vllm(request) => &request.request_id,
            Asked::TokenSpeed(request) => &request.request_id,
        }
    }

    /// The request, if it is one of SGLang.
    pub fn sglang(&self) -> Option<&sglang::GenerateRequest> {
        if let Asked::Sglang(request) = &self.asked { Some(request) } else { None }
    }

    /// The request, if it is one of vLLM.
    pub fn vllm(&self) -> Option<&vllm::GenerateRequest> {
        if let Asked::Vllm(request) = &self.asked { Some(request) } else { None }
    }

    /// The request, if it is one of TokenSpeed.
    pub fn tokenspeed(&self) -> Option<&tokenspeed::GenerateRequest> {
        if let Asked::TokenSpeed(request) = &self.asked { Some(request) } else { None }
    }

    /// The prompt.
    pub fn token_ids(&self) -> &[u32] {
        let tokens = match &self.asked {
            Asked::Sglang(request) => request.tokenized.as_ref().map(|tokenized| &tokenized.input_ids),
            Asked::TokenSpeed(request) => request.tokenized.as_ref().map(|tokenized| &tokenized.input_ids),
            Asked::Vllm(request) => match &request.input {
                Some(vllm::generate_request::Input::Tokenized(tokenized)) => Some(&tokenized.input_ids),
                _ => None,
            },
        };
        tokens.map_or(&[], Vec::as_slice)
    }
}

/// An `Abort` for one request id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Abort {
    /// The request.
    pub request_id: String,
    /// The reason given; vLLM is given none.
    pub reason: String,
    /// When it came.
    pub at: Instant,
    /// Whether the request was inside the engine.
    pub known: bool,
}

/// A request inside the engine, or one that was.
pub(super) struct Open {
    call: Mutex<Call>,
    pub(super) aborted: CancellationToken,
    /// Nobody wants the answer any more, and the engine acts on it.
    pub(super) abandoned: CancellationToken,
    recorder: Arc<Recorder>,
}

impl Open {
    pub(super) fn first_message(&self) {
        self.call.lock().first_message_at.get_or_insert_with(Instant::now);
        self.recorder.changed();
    }

    pub(super) fn sent(&self) {
        self.call.lock().messages += 1;
    }

    pub(super) fn dropped(&self) {
        let mut call = self.call.lock();
        if call.end.is_none() {
            call.dropped_at.get_or_insert_with(Instant::now);
        }
        drop(call);
        self.recorder.changed();
    }
}

/// See the module's head.
pub(crate) struct Calls {
    capacity: usize,
    recorder: Arc<Recorder>,
    remembered: Mutex<VecDeque<Arc<Open>>>,
    open: Mutex<HashMap<String, Arc<Open>>>,
    aborts: Mutex<VecDeque<Abort>>,
}

impl Calls {
    pub(crate) fn new(capacity: usize, recorder: Arc<Recorder>) -> Self {
        Calls { capacity, recorder, remembered: Mutex::default(), open: Mutex::default(), aborts: Mutex::default() }
    }

    /// A request arrives; false when its id is in use.
    pub(super) fn arrived(
        &self,
        asked: Asked,
        metadata: Vec<(String, String)>,
        rank: Option<u64>,
    ) -> (Arc<Open>, bool) {
        let call = Call {
            asked,
            metadata,
            arrived_at: Instant::now(),
            first_message_at: None,
            dropped_at: None,
            ended_at: None,
            end: None,
            messages: 0,
            rank,
        };
        let id = call.request_id().to_owned();
        let open = Arc::new(Open {
            call: Mutex::new(call),
            aborted: CancellationToken::new(),
            abandoned: CancellationToken::new(),
            recorder: Arc::clone(&self.recorder),
        });
        if self.capacity > 0 {
            let mut remembered = self.remembered.lock();
            if remembered.len() == self.capacity {
                remembered.pop_front();
            }
            remembered.push_back(Arc::clone(&open));
        }
        let is_new = {
            let mut all = self.open.lock();
            let is_new = !all.contains_key(&id);
            if is_new {
                all.insert(id, Arc::clone(&open));
            }
            is_new
        };
        self.recorder.changed();
        (open, is_new)
    }

    /// A request ends.
    pub(super) fn ended(&self, open: &Arc<Open>, end: CallEnd) {
        let id = {
            let mut call = open.call.lock();
            call.ended_at.get_or_insert_with(Instant::now);
            call.end.get_or_insert(end);
            call.request_id().to_owned()
        };
        let mut all = self.open.lock();
        if all.get(&id).is_some_and(|known| Arc::ptr_eq(known, open)) {
            all.remove(&id);
        }
        drop(all);
        self.recorder.changed();
    }

    /// A fault ends an answer, however far the engine had come with it.
    pub(super) fn spoilt(&self, open: &Arc<Open>) {
        self.ended(open, CallEnd::Faulty);
        open.call.lock().end = Some(CallEnd::Faulty);
        open.abandoned.cancel();
    }

    /// An abort comes for `request_id`; ends what `means` says it means. True if it meant any request.
    pub(super) fn abort(&self, request_id: &str, reason: &str, means: impl Fn(&str) -> bool) -> bool {
        let meant: Vec<Arc<Open>> =
            self.open.lock().iter().filter(|(id, _)| means(id)).map(|(_, open)| Arc::clone(open)).collect();
        let known = !meant.is_empty();
        let abort = Abort { request_id: request_id.to_owned(), reason: reason.to_owned(), at: Instant::now(), known };
        {
            let mut aborts = self.aborts.lock();
            if aborts.len() == self.capacity {
                aborts.pop_front();
            }
            aborts.push_back(abort);
        }
        for open in meant {
            open.aborted.cancel();
        }
        self.recorder.changed();
        known
    }

    pub(crate) fn all(&self) -> Vec<Call> {
        self.remembered.lock().iter().map(|open| open.call.lock().clone()).collect()
    }

    pub(crate) fn open(&self) -> Vec<String> {
        self.open.lock().keys().cloned().collect()
    }

    pub(crate) fn aborts(&self) -> Vec<Abort> {
        self.aborts.lock().iter().cloned().collect()
    }

    pub(crate) fn clear(&self) {
        self.remembered.lock().clear();
        self.aborts.lock().clear();
    }
}
