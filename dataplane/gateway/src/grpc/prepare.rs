//! A request, ready to be sent to any pair: read, rendered, tokenized.
//!
//! This is done once, whatever the number of attempts. Work that grows with the prompt is done off the threads that serve requests.

use std::sync::Arc;

use smg_apis::generation::{ChatPrompt, Prompt};
use smg_apis::{Answer, Api, Generation, Origin, Request, messages};
use smg_engines::Route;
use smg_engines::grpc::{self as wire, Ask, Rendezvous};
use smg_engines::sglang::Ranks;
use smg_fleet::Runtime;
use smg_services::engines::{sglang, tokenspeed, vllm};
use smg_text::forced;
use smg_text::reader::{Reader, Task};
use smg_text::template::TemplateError;
use smg_text::tokenizer::TokenizeError;
use smg_text::{Sample, SampleRules};
use uuid::Uuid;

use super::assemble::Assembly;
use super::client::EngineRequest;
use super::dispatch::Share;
use super::refusal::Refusal;
use super::tokenizers::Model;
use crate::core::Core;
use crate::dispatch::{Inbound, Job};
use crate::fleet::table::ModelPool;
use crate::fleet::worker::RoutedWorker;

/// Bodies of at most so many bytes are prepared where they were read: the way to another thread would take longer.
const SMALL: usize = 512;
/// The same for reading them, which is much faster than what follows.
const SMALL_TO_READ: usize = 64 * 1024;

/// One prompt as engines take it.
#[derive(Debug, Clone)]
pub struct TokenPrompt {
    /// Its tokens.
    pub ids: Arc<[u32]>,
    /// Whether it leaves the output inside the reasoning or behind it, if its end says so.
    opened: Option<bool>,
    /// Whether the output goes on with the text of the prompt, which then decides how its first tokens read.
    goes_on: bool,
}

/// A request, ready to be sent.
pub struct Prepared {
    request: Request,
    /// As engines are asked: without the prompt, and with what the model's parsers need.
    asked: Generation,
    /// The tools that were offered.
    model: Arc<Model>,
    /// Its prompts.
    pub prompts: Vec<TokenPrompt>,
    /// The texts of the prompts, where the answer repeats them.
    echoed: Vec<String>,
    /// Tokens that are a stop string each.
    stop_tokens: Vec<u32>,
    /// What the client calls it: part of the ids that engines see.
    pub base_id: String,
}

/// The API of a route; none where nothing is generated.
fn api_of(route: Route) -> Option<Api> {
    Some(match route {
        Route::ChatCompletions => Api::Chat,
        Route::Completions => Api::Completions,
        Route::Generate => Api::Generate,
        Route::Messages => Api::Messages,
        Route::Responses => Api::Responses,
        Route::Rerank | Route::CountTokens | Route::Embeddings | Route::Classify => return None,
    })
}

/// Prepares a request for `pool`.
///
/// # Errors
/// The request is at fault, or the model's tokenizer is not there.
pub async fn prepare(core: &Arc<Core>, inbound: &Inbound, pool: &ModelPool) -> Result<Arc<Prepared>, Refusal> {
    let Some(api) = api_of(inbound.route) else {
        return Err(Refusal::bad("pd_route_unsupported", "the route generates nothing"));
    };
    let bytes = inbound.body.bytes().clone();
    let length = bytes.len();
    let mut request = off_thread(core, length, SMALL_TO_READ, move || Ok(api.parse(&bytes)?)).await?;
    if let Request::Responses(response) = &mut request
        && let Some(previous) = response.previous_response_id.clone()
    {
        let kept = core.responses.get(&previous);
        let kept = kept.ok_or_else(|| smg_apis::responses::previous_response_not_found(&previous))?;
        response.continue_from(&kept.conversation);
    }
    let model = core.tokenizers.of(core, pool).await?;
    let base_id = request.generation().request_id.clone().unwrap_or_else(|| inbound.request_id.to_string());
    let work = move || build(request, model, base_id);
    let prepared = off_thread(core, length, SMALL, work).await?;
    Ok(Arc::new(prepared))
}

/// Counts the tokens that a message's prompt has, as `/v1/messages` would render it.
///
/// # Errors
/// As [`prepare`].
pub async fn count_tokens(core: &Arc<Core>, inbound: &Inbound, pool: &ModelPool) -> Result<u64, Refusal> {
    let bytes = inbound.body.bytes().clone();
    let length = bytes.len();
    let count = off_thread(core, length, SMALL_TO_READ, move || Ok(messages::parse_count(&bytes)?)).await?;
    let model = core.tokenizers.of(core, pool).await?;
    let work = move || Ok(render(&model, &count.prompt)?.ids.len() as u64);
    off_thread(core, length, SMALL, work).await
}

/// Runs work that grows with the prompt: here, if that has at most `small` bytes.
async fn off_thread<T: Send + 'static>(
    core: &Arc<Core>,
    bytes: usize,
    small: usize,
    work: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
) -> Result<T, Refusal> {
    core.heavy.run(bytes, small, work).await.unwrap_or_else(|_| {
        let message = "preparing the request failed";
        Err(Refusal::new(http::StatusCode::INTERNAL_SERVER_ERROR, "tokenization_failed", message))
    })
}

fn build(request: Request, model: Arc<Model>, base_id: String) -> Result<Prepared, Refusal> {
    let generation = request.generation();
    let tokenizer = &model.text.tokenizer;
    let prompts = match &generation.prompt {
        Prompt::Chat(chat) => vec![render(&model, chat)?],
        // As the engines themselves do: completions get the tokens that frame a text, native prompts are taken as they are.
        Prompt::Texts(texts) => {
            let framed = matches!(request, Request::Completions(_));
            let one = |text: &String| Ok(continued(model.text.encode(text, framed).map_err(tokenization)?));
            texts.iter().map(one).collect::<Result<_, Refusal>>()?
        }
        Prompt::Tokens(lists) => lists.iter().map(|ids| continued(ids.as_slice().into())).collect(),
    };
    let echoed = match &generation.prompt {
        _ if !request.echoes() => Vec::new(),
        Prompt::Texts(texts) => texts.clone(),
        _ => {
            let text = |prompt: &TokenPrompt| tokenizer.decode(&prompt.ids, true).map_err(tokenization);
            prompts.iter().map(text).collect::<Result<_, _>>()?
        }
    };
    let stop_tokens = generation.sampling.stop.iter().filter_map(|stop| tokenizer.single_token(stop)).collect();
    let asked = asked(generation, &model)?;
    Ok(Prepared { asked, prompts, echoed, stop_tokens, base_id, request, model })
}

/// What engines are asked: everything but the prompt, constrained where calls are demanded, with special tokens where the parsers look for
/// them.
fn asked(generation: &Generation, model: &Model) -> Result<Generation, Refusal> {
    let tools = tools_of(generation);
    let choice = &generation.reading.tools;
    let forced = forced::constraint(tools, choice);
    let forced = forced.map_err(|error| Refusal::bad("invalid_tool_configuration", error.to_string()))?;
    let mut reading = generation.reading.clone();
    if forced.is_none() && model.parsers.need_special_tokens(&reading, &model.text.tokenizer) {
        reading.skip_special_tokens = false;
    }
    Ok(Generation {
        model: None,
        request_id: None,
        prompt: Prompt::Texts(Vec::new()),
        sampling: generation.sampling.clone(),
        samples: generation.samples.max(1),
        stream: generation.stream,
        stream_usage: generation.stream_usage,
        logprobs: generation.logprobs,
        constraint: forced.or_else(|| generation.constraint.clone()),
        reading,
    })
}

fn tools_of(generation: &Generation) -> &[serde_json::Value] {
    match &generation.prompt {
        Prompt::Chat(chat) => &chat.tools,
        Prompt::Texts(_) | Prompt::Tokens(_) => &[],
    }
}

fn continued(ids: Arc<[u32]>) -> TokenPrompt {
    TokenPrompt { ids, opened: None, goes_on: true }
}

fn render(model: &Model, chat: &ChatPrompt) -> Result<TokenPrompt, Refusal> {
    let now = i64::try_from(smg_net::unix_millis() / 1000).unwrap_or(i64::MAX);
    let refused = |error: TemplateError| Refusal::bad(error.code(), error.to_string());
    let prompt = model.text.render(chat, now).map_err(refused)?;
    let opened = model.parsers.reasoning.opened_by(&prompt.text, prompt.continued.as_deref());
    let ids = model.text.encode(&prompt.text, false).map_err(tokenization)?;
    Ok(TokenPrompt { ids, opened, goes_on: prompt.continued.is_some() })
}

fn tokenization(error: TokenizeError) -> Refusal {
    Refusal::new(http::StatusCode::INTERNAL_SERVER_ERROR, "tokenization_failed", error.to_string())
}

impl Prepared {
    /// What is to be generated. The prompt is in [`Prepared::prompts`].
    pub fn generation(&self) -> &Generation {
        &self.asked
    }

    /// Whether no token is to be generated, and nothing else told that only an engine knows: then the prompt is counted and that is all.
    pub fn asks_for_nothing(&self) -> bool {
        self.asked.sampling.max_tokens == Some(0) && self.asked.logprobs.is_none()
    }

    /// The tokens of its first prompt, which decide where a request is placed.
    pub fn first_prompt(&self) -> Option<&[u32]> {
        self.prompts.first().map(|prompt| &*prompt.ids)
    }

    /// Tokens of the longest prompt.
    pub fn longest_prompt(&self) -> usize {
        self.prompts.iter().map(|prompt| prompt.ids.len()).max().unwrap_or(0)
    }

    /// What turns each sample's output into text, where engines are of this runtime.
    ///
    /// # Errors
    /// The prompt's tokens are not those of the model.
    pub fn assemblies(&self, runtime: Runtime) -> Result<Vec<Assembly>, Refusal> {
        let watches_alone = is_told_no_stops(runtime);
        // vLLM looks for stop strings behind `min_tokens` only. To the others these are tokens without one that ends the turn.
        let heeds_fewest = runtime == Runtime::Vllm;
        let (asked, sampling) = (&self.asked, &self.asked.sampling);
        let tools = tools_of(self.request.generation());
        let mut assemblies = Vec::new();
        for prompt in &self.prompts {
            for _ in 0..asked.samples {
                let random = Uuid::now_v7().as_u128();
                let task = Task { reading: &asked.reading, tools, opened: prompt.opened, random };
                let reader = Box::new(Reader::new(self.model.parsers, &task));
                let rules = SampleRules {
                    stop: sampling.stop.clone(),
                    stops_behind: if heeds_fewest { sampling.min_tokens.unwrap_or(0) } else { 0 },
                    stop_token_ids: sampling.stop_token_ids.clone(),
                    ignore_eos: sampling.ignore_eos,
                    keep_stop: sampling.keep_stop,
                    skip_special_tokens: asked.reading.skip_special_tokens,
                };
                let before: &[u32] = if prompt.goes_on { &prompt.ids } else { &[] };
                let text = Sample::new(Arc::clone(&self.model.text), before, rules, reader).map_err(tokenization)?;
                let number = u32::try_from(assemblies.len()).unwrap_or(u32::MAX);
                assemblies.push(Assembly::new(
                    number,
                    text,
                    Arc::clone(&self.model.text),
                    prompt.ids.len(),
                    watches_alone,
                ));
            }
        }
        Ok(assemblies)
    }

    /// Begins the answer, which comes from weights of this version, if the engine has said one.
    pub(super) fn begin_answer(&self, job: &Job<'_>, weight_version: Option<&str>) -> Box<dyn Answer> {
        let generation = self.request.generation();
        let prefix = api_of(job.request.route).map_or("", Api::id_prefix);
        let minted = || format!("{prefix}{}", Uuid::now_v7().simple());
        // Later requests name a response by its id: that is never the client's invention.
        let given = generation.request_id.clone().filter(|_| !matches!(self.request, Request::Responses(_)));
        let origin = Origin {
            id: given.unwrap_or_else(minted),
            created: smg_net::unix_millis() / 1000,
            model: generation.model.clone().unwrap_or_else(|| job.model.to_string()),
            prompt_tokens: self.prompts.iter().map(|prompt| u32::try_from(prompt.ids.len()).unwrap_or(u32::MAX)).sum(),
            weight_version: weight_version.map(str::to_owned),
        };
        self.request.answer(origin, self.echoed.clone())
    }

    fn ask<'a>(&'a self, worker: &'a RoutedWorker, share: &'a Share) -> Ask<'a> {
        let samples = if share.sample.is_some() { 1 } else { share.samples };
        // An engine that does not know the stop strings would go on behind them: it has to tell each token.
        let watched = is_told_no_stops(worker.engine()) && !self.asked.sampling.stop.is_empty();
        Ask {
            request_id: &share.dispatch_id,
            generation: &self.asked,
            token_ids: self.prompts.get(share.prompt).map_or(&[], |prompt| &prompt.ids),
            stop_tokens: &self.stop_tokens,
            defaults: &worker.sampling_defaults,
            samples,
            stream: self.asked.stream || watched,
        }
    }

    /// The request of one dispatch for engines of the runtime of `worker`, whose sampling defaults count.
    ///
    /// # Errors
    /// The engine cannot be asked that.
    pub(super) fn for_engine(&self, worker: &RoutedWorker, share: &Share) -> Result<Stamped, Refusal> {
        let ask = self.ask(worker, share);
        let refused = |error: wire::RequestError| Refusal::bad("invalid_value", error.to_string()).of_the_wire();
        Ok(match worker.engine() {
            Runtime::Vllm => Stamped::Vllm(wire::vllm::request(&ask).map_err(refused)?),
            Runtime::Tokenspeed => {
                let request = wire::tokenspeed::request(&ask).map_err(refused)?;
                Stamped::Tokenspeed(match share.sample {
                    Some(sample) => wire::tokenspeed::sample(&request, sample),
                    None => request,
                })
            }
            _ => {
                let request = wire::sglang::request(&ask).map_err(refused)?;
                Stamped::Sglang(match share.sample {
                    Some(sample) => wire::sglang::sample(&request, sample),
                    None => request,
                })
            }
        })
    }

    /// The same where the engine is vLLM.
    ///
    /// # Errors
    /// The engine cannot be asked that.
    pub(super) fn for_vllm(&self, worker: &RoutedWorker, share: &Share) -> Result<vllm::GenerateRequest, Refusal> {
        let request = wire::vllm::request(&self.ask(worker, share));
        request.map_err(|error| Refusal::bad("invalid_value", error.to_string()).of_the_wire())
    }
}

/// Whether engines of this runtime are not told the stop strings: SGLang's run without a tokenizer.
fn is_told_no_stops(runtime: Runtime) -> bool {
    !matches!(runtime, Runtime::Vllm | Runtime::Tokenspeed)
}

/// A request in the dialect of an engine.
pub(super) enum Stamped {
    /// SGLang's.
    Sglang(sglang::GenerateRequest),
    /// vLLM's.
    Vllm(vllm::GenerateRequest),
    /// TokenSpeed's.
    Tokenspeed(tokenspeed::GenerateRequest),
}

impl Stamped {
    /// For a worker that serves alone, or one rank of it.
    pub fn alone(self, rank: Option<u32>) -> EngineRequest {
        let rank = rank.and_then(|rank| i32::try_from(rank).ok());
        match self {
            Self::Sglang(mut request) => {
                request.data_parallel_rank = rank;
                EngineRequest::Sglang(Box::new(request))
            }
            Self::Vllm(mut request) => {
                request.data_parallel_rank = rank;
                EngineRequest::Vllm(Box::new(request))
            }
            Self::Tokenspeed(request) => EngineRequest::Tokenspeed(Box::new(request)),
        }
    }

    /// For a prefill and a decode that meet at `rendezvous`.
    pub fn around(self, rendezvous: &Rendezvous, ranks: Ranks) -> (EngineRequest, EngineRequest) {
        match self {
            Self::Tokenspeed(request) => {
                let legs = wire::tokenspeed::legs(request, rendezvous);
                (EngineRequest::Tokenspeed(Box::new(legs.prefill)), EngineRequest::Tokenspeed(Box::new(legs.decode)))
            }
            Self::Sglang(request) => {
                let legs = wire::sglang::legs(request, rendezvous, ranks);
                (EngineRequest::Sglang(Box::new(legs.prefill)), EngineRequest::Sglang(Box::new(legs.decode)))
            }
            Self::Vllm(request) => {
                (EngineRequest::Vllm(Box::new(request.clone())), EngineRequest::Vllm(Box::new(request)))
            }
        }
    }
}
