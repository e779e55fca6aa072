//! `POST /v1/chat/completions`.

use std::sync::{Arc, LazyLock};

use axum::Json;
use axum::extract::State as Shared;
use axum::response::{IntoResponse, Response};
use fir_engine::Grammar;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::messages::{ChatMessage, template_messages};
use super::types::{
    ChatChoice, ChatChunk, ChatCompletion, ChatLogprob, ChatLogprobs, ChunkChoice, Delta, FINGERPRINT, FinishReason,
    FunctionCall, FunctionDelta, Message, ToolCall, ToolCallDelta, Usage,
};
use crate::asked::Asked;
use crate::backend::Backend;
use crate::config::Limits;
use crate::conversation::{Conversation, Function, ToolChoice, blocking, served, set_effort};
use crate::error::{ApiError, Result};
use crate::generation::{Generation, Update};
use crate::params::{Common, fields, part, schema_text, within};
use crate::parse::Piece;
use crate::state::{State, now};
use crate::stream::{self, Encode, Step};

/// What a chat has beside [`Common`].
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct ChatRequest {
    #[schemars(length(min = 1))]
    messages: Vec<ChatMessage>,
    /// Most tokens of an answer; as many as fit by default.
    #[schemars(range(min = 1))]
    max_completion_tokens: Option<usize>,
    /// The old name of `max_completion_tokens`.
    #[schemars(range(min = 1))]
    max_tokens: Option<usize>,
    /// Log probabilities of the answer's tokens, before temperature and filters.
    logprobs: Option<bool>,
    #[schemars(range(min = 0, max = 20))]
    top_logprobs: Option<usize>,
    response_format: Option<ResponseFormat>,
    tools: Option<Vec<Tool>>,
    tool_choice: Option<ToolChoiceField>,
    parallel_tool_calls: Option<bool>,
    /// Given to the chat template.
    reasoning_effort: Option<String>,
    /// False: the template does not ask for an answer.
    add_generation_prompt: Option<bool>,
    /// The last message is the beginning of the answer.
    continue_final_message: Option<bool>,
    /// More variables of the chat template.
    chat_template_kwargs: Option<Map<String, Value>>,
    /// Only null: the model's own is used.
    chat_template: Option<Value>,
    /// Only `["text"]`.
    modalities: Option<Vec<String>>,
    /// Only null; `tools` took its place.
    functions: Option<Value>,
    /// Only null; `tool_choice` took its place.
    function_call: Option<Value>,
    /// Only null.
    audio: Option<Value>,
    /// Only null.
    web_search_options: Option<Value>,
}

/// Taken and not used.
#[derive(Debug, Deserialize, JsonSchema)]
#[expect(dead_code, reason = "clients send them")]
pub(crate) struct Ignored {
    metadata: Option<Map<String, Value>>,
    service_tier: Option<String>,
    store: Option<bool>,
    prediction: Option<Map<String, Value>>,
    prompt_cache_key: Option<String>,
    prompt_cache_retention: Option<String>,
    safety_identifier: Option<String>,
    verbosity: Option<String>,
}

#[derive(Debug, Deserialize, JsonSchema)]
struct Tool {
    #[serde(rename = "type")]
    #[schemars(extend("const" = "function"))]
    kind: String,
    function: Function,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "none, auto, required or {\"type\": \"function\", \"function\": {\"name\": …}}")]
enum ToolChoiceField {
    Mode(ToolMode),
    Named { function: NamedFunction },
}

#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ToolMode {
    None,
    Auto,
    Required,
}

#[derive(Debug, Deserialize, JsonSchema)]
struct NamedFunction {
    name: String,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ResponseFormat {
    Text,
    JsonObject,
    JsonSchema { json_schema: NamedSchema },
}

#[derive(Debug, Deserialize, JsonSchema)]
struct NamedSchema {
    #[expect(dead_code, reason = "clients send it")]
    name: Option<String>,
    #[schemars(with = "Option<Map<String, Value>>")]
    schema: Option<Value>,
}

/// Every field of a chat.
pub(crate) static FIELDS: LazyLock<Map<String, Value>> = LazyLock::new(|| {
    let mut all = fields::<Common>();
    all.extend(fields::<ChatRequest>());
    all.extend(fields::<Ignored>());
    all
});

pub(crate) async fn handle(Shared(state): Shared<Arc<State>>, asked: Asked) -> Result<Response> {
    let (backend, model) = served(&state)?;
    asked.known(&FIELDS)?;
    let common: Common = part(&asked.body)?;
    let chat: ChatRequest = part(&asked.body)?;
    let _: Ignored = part(&asked.body)?;
    let (streams, usage) = (common.stream == Some(true), common.usage_chunk());
    let id = common.id("chatcmpl", || state.fresh_id())?;
    let conversation = chat.conversation(&state.config.limits)?;
    let with_logprobs = conversation.logprobs.is_some();
    let choices = common.n(&state.config.limits)?;
    let generation = blocking(&state, move |state| conversation.start(state, &common, asked.salt)).await?;
    let head = Head { id, model, created: now(), backend: backend.clone(), logprobs: with_logprobs };
    if streams {
        let calls = vec![0; choices];
        return stream::respond(&state, generation, ChatStream { head, usage, calls }).await;
    }
    collect(generation, head, choices).await
}

impl ChatRequest {
    fn conversation(self, limits: &Limits) -> Result<Conversation> {
        self.refuse()?;
        let top = within("top_logprobs", self.top_logprobs.unwrap_or(0), 0, limits.logprobs)?;
        let logprobs = match self.logprobs {
            Some(true) => Some(top),
            _ if self.top_logprobs.is_some_and(|n| n > 0) => {
                return Err(ApiError::invalid("top_logprobs", "`top_logprobs` needs `logprobs` to be true"));
            }
            _ => None,
        };
        let mut tools = Vec::new();
        for (i, tool) in self.tools.unwrap_or_default().into_iter().enumerate() {
            if tool.kind != "function" {
                let message = format!("`tools[{i}]` is a `{}`, but only functions are offered", tool.kind);
                return Err(ApiError::invalid(format!("tools[{i}].type"), message));
            }
            tools.push(tool.function);
        }
        let choice = match self.tool_choice {
            None | Some(ToolChoiceField::Mode(ToolMode::Auto)) => ToolChoice::Auto,
            Some(ToolChoiceField::Mode(ToolMode::None)) => ToolChoice::None,
            Some(ToolChoiceField::Mode(ToolMode::Required)) => ToolChoice::Required,
            Some(ToolChoiceField::Named { function }) => ToolChoice::Named(function.name),
        };
        let format = match self.response_format {
            None | Some(ResponseFormat::Text) => None,
            Some(ResponseFormat::JsonObject) => Some(Grammar::Json),
            Some(ResponseFormat::JsonSchema { json_schema }) => {
                let param = "response_format.json_schema.schema";
                let schema = json_schema.schema.unwrap_or_else(|| json!({"type": "object"}));
                Some(Grammar::JsonSchema(schema_text(param, &schema, limits)?))
            }
        };
        let mut extra = self.chat_template_kwargs.unwrap_or_default();
        if let Some(effort) = self.reasoning_effort {
            set_effort(&mut extra, effort);
        }
        let max_tokens = match self.max_completion_tokens {
            None => ("max_tokens", self.max_tokens),
            some => {
                within("max_tokens", self.max_tokens.unwrap_or(1), 1, usize::MAX)?;
                ("max_completion_tokens", some)
            }
        };
        Ok(Conversation {
            messages: template_messages(self.messages)?,
            tools,
            choice,
            parallel: self.parallel_tool_calls != Some(false),
            format,
            continued: self.continue_final_message == Some(true),
            reply: self.add_generation_prompt != Some(false),
            extra,
            max_tokens,
            logprobs,
        })
    }

    /// Errors for what is known and not offered.
    fn refuse(&self) -> Result<()> {
        for (param, given, why) in [
            ("functions", self.functions.is_some(), "is not offered; use `tools`"),
            ("function_call", self.function_call.is_some(), "is not offered; use `tool_choice`"),
            ("chat_template", self.chat_template.is_some(), "cannot be set by a request"),
            ("audio", self.audio.is_some(), "is not offered"),
            ("web_search_options", self.web_search_options.is_some(), "is not offered"),
            (
                "modalities",
                self.modalities.as_ref().is_some_and(|m| m.iter().any(|m| m != "text")),
                "only text is offered",
            ),
        ] {
            if given {
                return Err(ApiError::invalid(param, format!("`{param}`: {why}")));
            }
        }
        Ok(())
    }
}

/// What all parts of an answer have.
struct Head {
    id: String,
    model: String,
    created: u64,
    backend: Arc<dyn Backend>,
    logprobs: bool,
}

impl Head {
    fn call_id(&self, choice: usize, call: usize) -> String {
        let id = self.id.strip_prefix("chatcmpl-").unwrap_or(&self.id);
        format!("call_{id}{choice:02x}{call:02x}")
    }
}

/// The whole answer at once.
async fn collect(mut generation: Generation, head: Head, choices: usize) -> Result<Response> {
    let empty = |index| ChatChoice {
        index,
        message: Message {
            role: "assistant",
            content: None,
            refusal: None,
            reasoning_content: None,
            tool_calls: vec![],
        },
        logprobs: head.logprobs.then(ChatLogprobs::default),
        finish_reason: FinishReason::Stop,
    };
    let mut answers: Vec<ChatChoice> = (0..choices).map(empty).collect();
    while let Some(update) = generation.next().await {
        let (choice, pieces) = match update? {
            // Nobody has asked.
            Update::Prompt { .. } => continue,
            Update::Token { choice, pieces, logprobs } => {
                if let (Some(to), Some(of)) = (&mut answers[choice].logprobs, &logprobs) {
                    to.content.push(ChatLogprob::new(head.backend.as_ref(), of));
                }
                (choice, pieces)
            }
            Update::End { choice, pieces, length, .. } => {
                if length {
                    answers[choice].finish_reason = FinishReason::Length;
                }
                (choice, pieces)
            }
        };
        let message = &mut answers[choice].message;
        for piece in pieces {
            match piece {
                Piece::Reasoning(text) => *message.reasoning_content.get_or_insert_default() += &text,
                Piece::Content(text) => *message.content.get_or_insert_default() += &text,
                Piece::Call(name) => {
                    let id = head.call_id(choice, message.tool_calls.len());
                    let function = FunctionCall { name, arguments: String::new() };
                    message.tool_calls.push(ToolCall { id, kind: "function", function });
                }
                Piece::Arguments(text) => {
                    if let Some(call) = message.tool_calls.last_mut() {
                        call.function.arguments += &text;
                    }
                }
            }
        }
    }
    for answer in &mut answers {
        let message = &mut answer.message;
        match (message.tool_calls.is_empty(), answer.finish_reason) {
            (true, _) => _ = message.content.get_or_insert_default(),
            (false, FinishReason::Stop) => answer.finish_reason = FinishReason::ToolCalls,
            (false, _) => {}
        }
    }
    let usage = Usage::from(generation.total);
    let Head { id, model, created, .. } = head;
    let object = "chat.completion";
    Ok(Json(ChatCompletion { id, object, created, model, system_fingerprint: FINGERPRINT, choices: answers, usage })
        .into_response())
}

struct ChatStream {
    head: Head,
    /// A last chunk tells the usage.
    usage: bool,
    /// Calls so far, per choice.
    calls: Vec<usize>,
}

impl ChatStream {
    fn chunk(&self, choices: Vec<ChunkChoice>, usage: Option<Usage>, out: &mut String) {
        let Head { id, model, created, .. } = &self.head;
        let chunk = ChatChunk {
            id,
            object: "chat.completion.chunk",
            created: *created,
            model,
            system_fingerprint: FINGERPRINT,
            choices,
            usage: self.usage.then_some(usage),
        };
        stream::data(out, &chunk);
    }

    fn delta(&self, index: usize, delta: Delta, logprobs: &mut Option<ChatLogprobs>, out: &mut String) {
        let logprobs = logprobs.take();
        self.chunk(vec![ChunkChoice { index, delta, logprobs, finish_reason: None }], None, out);
    }

    fn pieces(&mut self, index: usize, pieces: Vec<Piece>, logprobs: &mut Option<ChatLogprobs>, out: &mut String) {
        for piece in pieces {
            let mut delta = Delta::default();
            match piece {
                Piece::Reasoning(text) => delta.reasoning_content = Some(text),
                Piece::Content(text) => delta.content = Some(text),
                Piece::Call(name) => {
                    let call = self.calls[index];
                    self.calls[index] += 1;
                    delta.tool_calls = Some(vec![ToolCallDelta {
                        index: call,
                        id: Some(self.head.call_id(index, call)),
                        kind: Some("function"),
                        function: FunctionDelta { name: Some(name), arguments: String::new() },
                    }]);
                }
                Piece::Arguments(arguments) => {
                    delta.tool_calls = Some(vec![ToolCallDelta {
                        index: self.calls[index].saturating_sub(1),
                        id: None,
                        kind: None,
                        function: FunctionDelta { name: None, arguments },
                    }]);
                }
            }
            self.delta(index, delta, logprobs, out);
        }
    }
}

impl Encode for ChatStream {
    fn encode(&mut self, step: Step, out: &mut String) {
        match step {
            Step::Begin => {
                for index in 0..self.calls.len() {
                    let delta = Delta { role: Some("assistant"), content: Some(String::new()), ..Delta::default() };
                    self.delta(index, delta, &mut None, out);
                }
            }
            Step::Update(Update::Prompt { .. }) => {}
            Step::Update(Update::Token { choice, pieces, logprobs }) => {
                let content = |of| ChatLogprobs {
                    content: vec![ChatLogprob::new(self.head.backend.as_ref(), of)],
                    refusal: None,
                };
                let mut logprobs = logprobs.as_ref().filter(|_| self.head.logprobs).map(content);
                self.pieces(choice, pieces, &mut logprobs, out);
                if logprobs.is_some() {
                    // No text is certain yet, but the token is.
                    let delta = Delta { content: Some(String::new()), ..Delta::default() };
                    self.delta(choice, delta, &mut logprobs, out);
                }
            }
            Step::Update(Update::End { choice: index, pieces, length, .. }) => {
                self.pieces(index, pieces, &mut None, out);
                let finish_reason = Some(match length {
                    true => FinishReason::Length,
                    false if self.calls[index] > 0 => FinishReason::ToolCalls,
                    false => FinishReason::Stop,
                });
                self.chunk(
                    vec![ChunkChoice { index, delta: Delta::default(), logprobs: None, finish_reason }],
                    None,
                    out,
                );
            }
            Step::End(total) => {
                if self.usage {
                    self.chunk(vec![], Some(total.into()), out);
                }
                out.push_str("data: [DONE]\n\n");
            }
            Step::Failed(e) => stream::data(out, &e.body),
        }
    }
}
