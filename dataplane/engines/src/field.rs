//! The top-level request fields this gateway reads or writes, by name.
//!
//! Everything else in a request is the business of client and engine and has no name here. Resolving a key to a
//! [`Field`] once, when the body is parsed, is what makes escaped spellings (`"\u006eame"`) and duplicates harmless:
//! edits speak of fields, never of key texts.

macro_rules! fields {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)+) => {
        /// A top-level request field known to the gateway.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Field {
            $($(#[$doc])* $variant,)+
        }

        impl Field {
            /// Every field, in declaration order.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)+];

            /// The field's name on the wire. It never needs JSON escapes.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }

            /// The field called `name` (already unescaped), if the gateway knows it.
            pub fn from_name(name: &str) -> Option<Self> {
                match name {
                    $($name => Some(Self::$variant),)+
                    _ => None,
                }
            }
        }
    };
}

fields! {
    /// The model the client asks for.
    Model = "model",
    /// Whether the client wants server-sent events.
    Stream = "stream",
    /// Options of a stream; invalid without `stream`.
    StreamOptions = "stream_options",
    /// Number of samples.
    N = "n",
    /// Whether the answer goes on behind its end-of-sequence token.
    IgnoreEos = "ignore_eos",
    /// Texts that end the answer.
    Stop = "stop",
    /// Tokens that end the answer.
    StopTokenIds = "stop_token_ids",
    /// vLLM's beam search, which runs several sequences.
    UseBeamSearch = "use_beam_search",
    /// The request's id, for engines that got none in a header.
    RequestId = "request_id",
    /// Lower bound of the output length.
    MinTokens = "min_tokens",
    /// Output cap of completions and older chat requests.
    MaxTokens = "max_tokens",
    /// Output cap of newer chat requests.
    MaxCompletionTokens = "max_completion_tokens",
    /// Output cap of responses.
    MaxOutputTokens = "max_output_tokens",
    /// Prompt of a completion: text, texts, token ids or lists of token ids.
    Prompt = "prompt",
    /// Prompts of a completion as embeddings: one, or a list.
    PromptEmbeds = "prompt_embeds",
    /// Chat messages.
    Messages = "messages",
    /// System prompt of Anthropic messages.
    System = "system",
    /// Input of a response, an embedding or a classification.
    Input = "input",
    /// System prompt of a response.
    Instructions = "instructions",
    /// The response that another goes on from.
    PreviousResponseId = "previous_response_id",
    /// Query of a reranking.
    Query = "query",
    /// Prompt of SGLang's `/generate` as token ids.
    InputIds = "input_ids",
    /// Prompt of SGLang's `/generate` as text.
    Text = "text",
    /// Sampling parameters of SGLang's `/generate`.
    SamplingParams = "sampling_params",
    /// Keeps the KV of equal prompts apart (vLLM, SGLang).
    CacheSalt = "cache_salt",
    /// Keeps the KV of equal prompts apart (SGLang).
    ExtraKey = "extra_key",
    /// Adapter that serves the request (SGLang).
    LoraPath = "lora_path",
    /// The request's id (SGLang).
    Rid = "rid",
    /// Log probabilities, OpenAI routes.
    Logprobs = "logprobs",
    /// Log probabilities of the prompt (vLLM).
    PromptLogprobs = "prompt_logprobs",
    /// Whether the answer begins with the prompt.
    Echo = "echo",
    /// Log probabilities, `/generate`.
    ReturnLogprob = "return_logprob",
    /// vLLM's handoff of a prompt's KV cache.
    KvTransferParams = "kv_transfer_params",
    /// vLLM's handoff of an encoder's cache.
    EcTransferParams = "ec_transfer_params",
    /// More parameters of vLLM's sampling, among them, unchecked, its handoffs (vLLM 0.32).
    VllmXargs = "vllm_xargs",
    /// Host of SGLang's bootstrap server.
    BootstrapHost = "bootstrap_host",
    /// Port of SGLang's bootstrap server.
    BootstrapPort = "bootstrap_port",
    /// Room in which two SGLang legs meet.
    BootstrapRoom = "bootstrap_room",
    /// Data-parallel rank that serves this leg.
    RoutedDpRank = "routed_dp_rank",
    /// Data-parallel rank that computed the prefill.
    DisaggPrefillDpRank = "disagg_prefill_dp_rank",
    /// Data-parallel rank of a regular leg.
    DataParallelRank = "data_parallel_rank",
}

/// Fields by which legs find each other. Whoever sets one steers where an engine fetches its KV cache from, and one
/// incomplete handoff is enough to stop a vLLM decode server, so clients may not send them by default.
pub const HANDOFF_FIELDS: [Field; 8] = [
    Field::KvTransferParams,
    Field::EcTransferParams,
    Field::BootstrapHost,
    Field::BootstrapPort,
    Field::BootstrapRoom,
    Field::RoutedDpRank,
    Field::DisaggPrefillDpRank,
    Field::DataParallelRank,
];

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;

    #[test]
    fn names_resolve_to_their_field_and_need_no_escapes() {
        for field in Field::ALL {
            assert_eq!(Field::from_name(field.name()), Some(*field));
            assert!(field.name().bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'));
        }
        assert_eq!(Field::from_name("temperature"), None);
    }
}
