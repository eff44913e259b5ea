//! How much one request may ask for. All are far above what clients of these APIs send; they bound what the gateway keeps.

/// Samples of one prompt (OpenAI, `n`).
pub const SAMPLES: i64 = 128;
/// Samples of all prompts together.
pub const SAMPLES_IN_ALL: usize = 2_048;
/// Messages of a conversation, or items of an input.
pub const MESSAGES: usize = 16_384;
/// Parts of one message.
pub const PARTS: usize = 4_096;
/// Tools offered.
pub const TOOLS: usize = 1_024;
/// Bytes in the name of a tool.
pub const NAME_BYTES: usize = 256;
/// Stop strings, and separately stop tokens.
pub const STOPS: usize = 256;
/// Bytes in one stop string.
pub const STOP_BYTES: usize = 4_096;
/// Tokens with a bias.
pub const BIASES: usize = 4_096;
/// Rivals listed beside each token (OpenAI, `top_logprobs`; the largest that the engines' APIs document).
pub const TOP_LOGPROBS: i64 = 20;
/// Strings to choose among.
pub const CHOICES: usize = 4_096;
/// Token ids fit the engines' 32-bit fields, in the signed form that some of them use.
pub const TOKEN_ID: i64 = i32::MAX as i64;
/// Bytes of a request id given by the client.
pub const ID_BYTES: usize = 512;
