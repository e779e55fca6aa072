//! What the endpoints answer.

use fir_engine::{Logprob, TokenLogprobs};
use schemars::JsonSchema;
use serde::Serialize;

use crate::backend::Backend;
use crate::generation::Total;

/// Written instead of minus infinity, which JSON has no word for.
const IMPOSSIBLE: f32 = -9999.0;

/// Names the build; answers of one build to one seed are the same.
pub(crate) const FINGERPRINT: &str = concat!("fir-", env!("CARGO_PKG_VERSION"));

#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub(crate) struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    prompt_tokens_details: PromptDetails,
    completion_tokens_details: CompletionDetails,
}

#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
struct PromptDetails {
    /// Tokens found in the prefix cache.
    cached_tokens: usize,
}

#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
struct CompletionDetails {
    /// Tokens of thoughts.
    reasoning_tokens: usize,
}

impl From<Total> for Usage {
    fn from(total: Total) -> Self {
        Self {
            prompt_tokens: total.prompt,
            completion_tokens: total.generated,
            total_tokens: total.prompt + total.generated,
            prompt_tokens_details: PromptDetails { cached_tokens: total.cached },
            completion_tokens_details: CompletionDetails { reasoning_tokens: total.reasoning },
        }
    }
}

/// One answer to a chat.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ChatCompletion {
    pub(crate) id: String,
    #[schemars(extend("const" = "chat.completion"))]
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) system_fingerprint: &'static str,
    pub(crate) choices: Vec<ChatChoice>,
    pub(crate) usage: Usage,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ChatChoice {
    pub(crate) index: usize,
    pub(crate) message: Message,
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: FinishReason,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FinishReason {
    Stop,
    Length,
    ToolCalls,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Message {
    pub(crate) role: &'static str,
    pub(crate) content: Option<String>,
    pub(crate) refusal: Option<String>,
    /// What the model thought before it answered.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) tool_calls: Vec<ToolCall>,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub(crate) struct ToolCall {
    pub(crate) id: String,
    #[serde(rename = "type")]
    pub(crate) kind: &'static str,
    pub(crate) function: FunctionCall,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub(crate) struct FunctionCall {
    pub(crate) name: String,
    /// JSON.
    pub(crate) arguments: String,
}

#[derive(Debug, Default, Serialize, JsonSchema)]
pub(crate) struct ChatLogprobs {
    pub(crate) content: Vec<ChatLogprob>,
    pub(crate) refusal: Option<Vec<ChatLogprob>>,
}

/// Of one token: before temperature and filters.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub(crate) struct ChatLogprob {
    pub(crate) token: String,
    pub(crate) logprob: f32,
    pub(crate) bytes: Vec<u8>,
    pub(crate) top_logprobs: Vec<TopLogprob>,
}

#[derive(Clone, Debug, Serialize, JsonSchema)]
pub(crate) struct TopLogprob {
    pub(crate) token: String,
    pub(crate) logprob: f32,
    pub(crate) bytes: Vec<u8>,
}

impl TopLogprob {
    fn new(backend: &dyn Backend, of: &Logprob) -> Self {
        let bytes = backend.token_bytes(of.id);
        Self { token: String::from_utf8_lossy(&bytes).into_owned(), logprob: of.logprob.max(IMPOSSIBLE), bytes }
    }
}

impl ChatLogprob {
    pub(crate) fn new(backend: &dyn Backend, of: &TokenLogprobs) -> Self {
        let TopLogprob { token, logprob, bytes } = TopLogprob::new(backend, &of.chosen);
        let top_logprobs = of.top.iter().map(|l| TopLogprob::new(backend, l)).collect();
        Self { token, logprob, bytes, top_logprobs }
    }
}

/// A part of a streamed chat.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ChatChunk<'a> {
    pub(crate) id: &'a str,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: &'a str,
    pub(crate) system_fingerprint: &'static str,
    pub(crate) choices: Vec<ChunkChoice>,
    /// Null in all but the last, and only if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) usage: Option<Option<Usage>>,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ChunkChoice {
    pub(crate) index: usize,
    pub(crate) delta: Delta,
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: Option<FinishReason>,
}

#[derive(Debug, Default, Serialize, JsonSchema)]
pub(crate) struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tool_calls: Option<Vec<ToolCallDelta>>,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ToolCallDelta {
    pub(crate) index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub(crate) kind: Option<&'static str>,
    pub(crate) function: FunctionDelta,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct FunctionDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) name: Option<String>,
    pub(crate) arguments: String,
}

/// Texts that continue prompts; in a stream, a part of them.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Completion {
    pub(crate) id: String,
    #[schemars(extend("const" = "text_completion"))]
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) system_fingerprint: &'static str,
    pub(crate) choices: Vec<CompletionChoice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) usage: Option<Option<Usage>>,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct CompletionChoice {
    pub(crate) index: usize,
    pub(crate) text: String,
    pub(crate) logprobs: Option<CompletionLogprobs>,
    pub(crate) finish_reason: Option<FinishReason>,
}

#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub(crate) struct CompletionLogprobs {
    pub(crate) tokens: Vec<String>,
    /// Null for the first token of a prompt, which follows nothing.
    pub(crate) token_logprobs: Vec<Option<f32>>,
    pub(crate) top_logprobs: Vec<Option<std::collections::BTreeMap<String, f32>>>,
    /// Where each token begins in the text, in characters.
    pub(crate) text_offset: Vec<usize>,
}
