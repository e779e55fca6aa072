//! `POST /v1/messages` and `/v1/messages/count_tokens`.

use std::sync::{Arc, LazyLock};

use axum::Json;
use axum::extract::State as Shared;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use fir_engine::Grammar;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::blocks::{Blocks, Head};
use crate::asked::Asked;
use crate::config::Limits;
use crate::conversation::{Conversation, Function, ToolChoice, blocking, served, set_effort};
use crate::error::{ApiError, Result};
use crate::generation::Update;
use crate::params::{Common, fields, part, schema_text};
use crate::state::State;
use crate::stream;

/// A conversation to be counted or answered.
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct MessagesRequest {
    /// The model's name, as `/v1/models` tells it.
    model: Option<String>,
    #[schemars(length(min = 1))]
    messages: Vec<Message>,
    /// A system message before them.
    system: Option<Content>,
    tools: Option<Vec<Tool>>,
    tool_choice: Option<Choice>,
    thinking: Option<Thinking>,
    output_config: Option<OutputConfig>,
}

/// What an answer needs beside that.
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct Answering {
    /// Most tokens of the answer.
    #[schemars(range(min = 1))]
    max_tokens: usize,
    #[schemars(range(min = 0.0, max = 2.0))]
    temperature: Option<f32>,
    #[schemars(range(min = 0.0, max = 1.0), extend("exclusiveMinimum" = 0))]
    top_p: Option<f32>,
    #[schemars(range(min = -1, max = 2_147_483_647))]
    top_k: Option<i64>,
    /// Texts that end the answer and are not part of it.
    stop_sequences: Option<Vec<String>>,
    /// The answer comes as it is made, as server-sent events.
    stream: Option<bool>,
}

/// Taken and not used.
#[derive(Debug, Deserialize, JsonSchema)]
#[expect(dead_code, reason = "clients send them")]
pub(crate) struct Ignored {
    cache_control: Option<Map<String, Value>>,
    context_management: Option<Map<String, Value>>,
    diagnostics: Option<Map<String, Value>>,
    inference_geo: Option<String>,
    metadata: Option<Map<String, Value>>,
    service_tier: Option<String>,
    speed: Option<String>,
    user_profile_id: Option<String>,
    workspace_id: Option<String>,
}

#[derive(Debug, Deserialize, JsonSchema)]
struct Message {
    role: Role,
    content: Content,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Role {
    User,
    Assistant,
    System,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "a text or a list of blocks")]
enum Content {
    Text(String),
    Blocks(Vec<Block>),
}

/// Text, a thought, a call, or what a call gave.
#[derive(Debug, Deserialize, JsonSchema)]
struct Block {
    #[serde(rename = "type")]
    #[schemars(extend("enum" = ["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]))]
    kind: String,
    text: Option<String>,
    thinking: Option<String>,
    id: Option<String>,
    name: Option<String>,
    input: Option<Map<String, Value>>,
    tool_use_id: Option<String>,
    content: Option<Content>,
}

#[derive(Debug, Deserialize, JsonSchema)]
struct Tool {
    #[serde(rename = "type")]
    #[schemars(extend("enum" = ["custom", null]))]
    kind: Option<String>,
    #[schemars(regex(pattern = r"^[a-zA-Z0-9_.-]{1,64}$"))]
    name: String,
    description: Option<String>,
    #[schemars(with = "Option<Map<String, Value>>")]
    input_schema: Option<Value>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "lowercase")]
enum Choice {
    Auto { disable_parallel_tool_use: Option<bool> },
    Any { disable_parallel_tool_use: Option<bool> },
    Tool { name: String, disable_parallel_tool_use: Option<bool> },
    None,
}

#[derive(Debug, Deserialize, JsonSchema)]
struct Thinking {
    #[serde(rename = "type")]
    #[schemars(extend("enum" = ["enabled", "adaptive", "between_tools", "disabled"]))]
    kind: String,
}

/// What the answer looks like.
#[derive(Debug, Deserialize, JsonSchema)]
struct OutputConfig {
    /// Given to the chat template.
    effort: Option<String>,
    format: Option<OutputFormat>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
enum OutputFormat {
    JsonSchema {
        #[schemars(with = "Map<String, Value>")]
        schema: Value,
    },
}

/// Every field of a conversation to be counted.
pub(crate) static COUNTED: LazyLock<Map<String, Value>> = LazyLock::new(|| {
    let mut all = fields::<MessagesRequest>();
    all.extend(fields::<Ignored>());
    all
});

/// Every field of one to be answered.
pub(crate) static FIELDS: LazyLock<Map<String, Value>> = LazyLock::new(|| {
    let mut all = COUNTED.clone();
    all.extend(fields::<Answering>());
    all
});

/// An error in Anthropic's form.
pub(crate) struct Refusal(ApiError);

/// The body of every answer that is not a success.
#[derive(Serialize, JsonSchema)]
pub(crate) struct RefusalBody {
    #[serde(rename = "type")]
    #[schemars(extend("const" = "error"))]
    kind: &'static str,
    error: RefusalObject,
}

#[derive(Serialize, JsonSchema)]
struct RefusalObject {
    #[serde(rename = "type")]
    kind: &'static str,
    message: String,
}

impl RefusalBody {
    pub(crate) fn new(error: &ApiError) -> Self {
        let kind = match error.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            status if status.is_server_error() => "api_error",
            _ => "invalid_request_error",
        };
        // The one field that has another name here.
        let message = error.body.error.message.replace("`stop`", "`stop_sequences`");
        Self { kind: "error", error: RefusalObject { kind, message } }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let body = RefusalBody::new(&self.0);
        self.0.with_body(&body)
    }
}

impl From<ApiError> for Refusal {
    fn from(error: ApiError) -> Self {
        Self(error)
    }
}

pub(crate) async fn handle(
    Shared(state): Shared<Arc<State>>,
    asked: std::result::Result<Asked, ApiError>,
) -> std::result::Result<Response, Refusal> {
    Ok(answer(state, asked?).await?)
}

pub(crate) async fn count(
    Shared(state): Shared<Arc<State>>,
    asked: std::result::Result<Asked, ApiError>,
) -> std::result::Result<Json<Count>, Refusal> {
    Ok(Json(counted(state, asked?).await?))
}

/// How long a conversation is.
#[derive(Serialize, JsonSchema)]
pub(crate) struct Count {
    input_tokens: usize,
}

async fn counted(state: Arc<State>, asked: Asked) -> Result<Count> {
    served(&state)?;
    asked.known(&COUNTED)?;
    let request: MessagesRequest = part(&asked.body)?;
    let _: Ignored = part(&asked.body)?;
    let work = move |state: &Arc<State>| {
        let backend = state.backend()?;
        if let Some(model) = request.model.as_deref().filter(|&m| m != backend.model().id) {
            return Err(ApiError::model(model, &backend.model().id));
        }
        let (tokens, _) = request.conversation(None, &state.config.limits)?.tokens(backend.as_ref())?;
        Ok(Count { input_tokens: tokens.len() })
    };
    blocking(&state, work).await
}

async fn answer(state: Arc<State>, asked: Asked) -> Result<Response> {
    let (_, model) = served(&state)?;
    asked.known(&FIELDS)?;
    let request: MessagesRequest = part(&asked.body)?;
    let Answering { max_tokens, temperature, top_p, top_k, stop_sequences, stream } = part(&asked.body)?;
    let _: Ignored = part(&asked.body)?;
    let common: Common = part(&json!({
        "model": request.model, "temperature": temperature, "top_p": top_p, "top_k": top_k, "stop": stop_sequences,
        "stream": stream,
    }))?;
    let conversation = request.conversation(Some(max_tokens), &state.config.limits)?;
    let salt = asked.salt;
    let mut generation = blocking(&state, move |state| conversation.start(state, &common, salt)).await?;
    let head = Head {
        id: format!("msg_{}", state.fresh_id()),
        model,
        stops: stop_sequences.unwrap_or_default(),
        prompt: generation.prompt,
    };
    let mut blocks = Blocks::new(head);
    if stream == Some(true) {
        return stream::respond(&state, generation, blocks).await;
    }
    let mut unused = String::new();
    while let Some(update) = generation.next().await {
        unused.clear();
        match update? {
            Update::Prompt { .. } => {}
            Update::Token { pieces, .. } => blocks.pieces(pieces, &mut unused),
            Update::End { pieces, length, stop, .. } => {
                blocks.pieces(pieces, &mut unused);
                blocks.close(length, stop, &mut unused);
            }
        }
    }
    Ok(Json(blocks.message(Some(generation.total))).into_response())
}

impl MessagesRequest {
    fn conversation(self, max_tokens: Option<usize>, limits: &Limits) -> Result<Conversation> {
        if self.messages.is_empty() {
            return Err(ApiError::invalid("messages", "`messages` is empty"));
        }
        let mut tools = Vec::new();
        for (i, tool) in self.tools.unwrap_or_default().into_iter().enumerate() {
            if let Some(kind) = tool.kind.filter(|k| k != "custom") {
                let message = format!("`tools[{i}]` is a `{kind}`, but only custom tools are offered");
                return Err(ApiError::invalid(format!("tools[{i}].type"), message));
            }
            let Tool { name, description, input_schema, .. } = tool;
            tools.push(Function { name, description, parameters: input_schema, strict: None });
        }
        let (choice, one) = match self.tool_choice {
            None => (ToolChoice::Auto, None),
            Some(Choice::None) => (ToolChoice::None, None),
            Some(Choice::Auto { disable_parallel_tool_use: one }) => (ToolChoice::Auto, one),
            Some(Choice::Any { disable_parallel_tool_use: one }) => (ToolChoice::Required, one),
            Some(Choice::Tool { name, disable_parallel_tool_use: one }) => (ToolChoice::Named(name), one),
        };
        // Who does not ask for thoughts gets none, where the template can say so.
        let thinks = match self.thinking.as_ref().map(|t| t.kind.as_str()) {
            None | Some("disabled") => false,
            Some("enabled" | "adaptive" | "between_tools") => true,
            Some(other) => {
                let message =
                    format!("`thinking.type` is `{other}`, but must be enabled, adaptive, between_tools or disabled");
                return Err(ApiError::invalid("thinking.type", message));
            }
        };
        let mut extra = Map::from_iter([("enable_thinking".to_owned(), Value::Bool(thinks))]);
        let OutputConfig { effort, format } = self.output_config.unwrap_or(OutputConfig { effort: None, format: None });
        if let Some(effort) = effort {
            set_effort(&mut extra, effort);
        }
        let schema = format.map(|OutputFormat::JsonSchema { schema }| schema);
        let schema = schema.map(|s| schema_text("output_config.format.schema", &s, limits)).transpose()?;
        let mut messages = Vec::new();
        if let Some(system) = self.system {
            messages.push(json!({"role": "system", "content": system.text("system")?}));
        }
        let continued = self.messages.last().is_some_and(|m| m.role == Role::Assistant);
        for (i, message) in self.messages.into_iter().enumerate() {
            message.add(i, &mut messages)?;
        }
        Ok(Conversation {
            messages,
            tools,
            choice,
            parallel: one != Some(true),
            format: schema.map(Grammar::JsonSchema),
            continued,
            reply: true,
            extra,
            max_tokens: ("max_tokens", max_tokens),
            logprobs: None,
        })
    }
}

impl Content {
    /// The text of all blocks, one to a line.
    fn text(self, param: &str) -> Result<String> {
        match self {
            Self::Text(text) => Ok(text),
            Self::Blocks(blocks) => {
                let text = |(i, block): (usize, Block)| block.text(&format!("{param}[{i}]"));
                Ok(blocks.into_iter().enumerate().map(text).collect::<Result<Vec<_>>>()?.join("\n"))
            }
        }
    }
}

impl Block {
    fn text(self, param: &str) -> Result<String> {
        match (self.kind.as_str(), self.text) {
            ("text", Some(text)) => Ok(text),
            (kind, _) => {
                let message = format!("`{param}` is a `{kind}`, but this model reads text only");
                Err(ApiError::invalid(param, message))
            }
        }
    }
}

impl Message {
    /// Adds what it says to the messages of a chat template: results of calls are messages of their own.
    fn add(self, i: usize, messages: &mut Vec<Value>) -> Result<()> {
        let param = format!("messages[{i}].content");
        let role = match self.role {
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::System => "system",
        };
        let blocks = match self.content {
            Content::Text(text) => {
                messages.push(json!({"role": role, "content": text}));
                return Ok(());
            }
            Content::Blocks(blocks) => blocks,
        };
        let (mut texts, mut calls, mut thoughts) = (Vec::new(), Vec::new(), Vec::new());
        let before = messages.len();
        for (j, block) in blocks.into_iter().enumerate() {
            let param = format!("{param}[{j}]");
            let wrong = |why: &str| ApiError::invalid(param.clone(), format!("`{param}` {why}"));
            match (block.kind.as_str(), self.role) {
                ("tool_result", Role::User) => {
                    let id = block.tool_use_id.ok_or_else(|| wrong("is a result without `tool_use_id`"))?;
                    let content = block.content.map_or(Ok(String::new()), |c| c.text(&format!("{param}.content")))?;
                    messages.push(json!({"role": "tool", "content": content, "tool_call_id": id}));
                }
                ("tool_use", Role::Assistant) => {
                    let name = block.name.ok_or_else(|| wrong("is a call without a name"))?;
                    let arguments = block.input.unwrap_or_default();
                    calls.push(
                        json!({"id": block.id, "type": "function", "function": {"name": name, "arguments": arguments}}),
                    );
                }
                ("thinking", Role::Assistant) => thoughts.extend(block.thinking),
                ("redacted_thinking", Role::Assistant) => {}
                _ => texts.push(block.text(&param)?),
            }
        }
        // A message of results alone says nothing more.
        if texts.is_empty() && calls.is_empty() && messages.len() > before {
            return Ok(());
        }
        let mut message = json!({"role": role, "content": texts.join("\n")});
        if !calls.is_empty() {
            message["tool_calls"] = Value::Array(calls);
        }
        if !thoughts.is_empty() {
            message["reasoning_content"] = Value::String(thoughts.join("\n"));
        }
        messages.push(message);
        Ok(())
    }
}
