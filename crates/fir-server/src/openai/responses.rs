//! `POST /v1/responses`: a conversation whose answer is a list of items. Nothing is stored, so each request has all of it.

use std::sync::{Arc, LazyLock};

use axum::Json;
use axum::extract::State as Shared;
use axum::response::{IntoResponse, Response};
use fir_engine::Grammar;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::chat::ToolMode;
use super::items::{Head, Items};
use super::messages::Content;
use crate::asked::Asked;
use crate::config::Limits;
use crate::conversation::{Conversation, Function, ToolChoice, blocking, served, set_effort};
use crate::error::{ApiError, Result};
use crate::generation::Update;
use crate::params::{Common, fields, part, schema_text, within};
use crate::state::{State, now};
use crate::stream;

/// What a response has beside the fields of [`Common`] that go with it.
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct ResponseRequest {
    input: Input,
    /// A system message before the input.
    instructions: Option<String>,
    #[schemars(range(min = 1))]
    max_output_tokens: Option<usize>,
    tools: Option<Vec<Tool>>,
    tool_choice: Option<ToolChoiceField>,
    parallel_tool_calls: Option<bool>,
    text: Option<TextField>,
    /// `message.output_text.logprobs` is the log probabilities of the answer's tokens; other words are taken and not used.
    include: Option<Vec<String>>,
    /// Alternatives with a log probability.
    #[schemars(range(min = 0, max = 20))]
    top_logprobs: Option<usize>,
    reasoning: Option<Reasoning>,
    /// Only null: nothing is stored.
    previous_response_id: Option<String>,
    /// Only null or false.
    background: Option<bool>,
    /// Only null.
    conversation: Option<Value>,
    /// Only null.
    prompt: Option<Value>,
}

/// Taken and not used.
#[derive(Debug, Deserialize, JsonSchema)]
#[expect(dead_code, reason = "clients send them")]
pub(crate) struct Ignored {
    max_tool_calls: Option<usize>,
    metadata: Option<Map<String, Value>>,
    prompt_cache_key: Option<String>,
    prompt_cache_retention: Option<String>,
    safety_identifier: Option<String>,
    service_tier: Option<String>,
    store: Option<bool>,
    truncation: Option<String>,
}

/// The fields of [`Common`] that are no part of this interface.
const NOT_HERE: [&str; 2] = ["n", "stop"];

/// Every field of a response.
pub(crate) static FIELDS: LazyLock<Map<String, Value>> = LazyLock::new(|| {
    let mut all = fields::<Common>();
    all.retain(|name, _| !NOT_HERE.contains(&name.as_str()));
    all.extend(fields::<ResponseRequest>());
    all.extend(fields::<Ignored>());
    all
});

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "a text or a list of items")]
enum Input {
    Text(String),
    Items(Vec<Item>),
}

/// A message, a call, or what a call gave.
#[derive(Debug, Deserialize, JsonSchema)]
struct Item {
    #[serde(rename = "type")]
    kind: Option<String>,
    role: Option<String>,
    content: Option<Content>,
    call_id: Option<String>,
    name: Option<String>,
    arguments: Option<String>,
    output: Option<Content>,
}

#[derive(Debug, Deserialize, JsonSchema)]
struct Tool {
    #[serde(rename = "type")]
    #[schemars(extend("const" = "function"))]
    kind: String,
    #[schemars(regex(pattern = r"^[a-zA-Z0-9_.-]{1,64}$"))]
    name: Option<String>,
    description: Option<String>,
    #[schemars(with = "Option<Map<String, Value>>")]
    parameters: Option<Value>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "none, auto, required or {\"type\": \"function\", \"name\": …}")]
enum ToolChoiceField {
    Mode(ToolMode),
    Named { name: String },
}

#[derive(Debug, Deserialize, JsonSchema)]
struct TextField {
    format: Option<TextFormat>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
enum TextFormat {
    Text,
    JsonObject,
    JsonSchema {
        #[schemars(with = "Map<String, Value>")]
        schema: Value,
    },
}

#[derive(Debug, Deserialize, JsonSchema)]
struct Reasoning {
    effort: Option<String>,
}

pub(crate) async fn handle(Shared(state): Shared<Arc<State>>, asked: Asked) -> Result<Response> {
    let (backend, model) = served(&state)?;
    asked.known(&FIELDS)?;
    let common: Common = part(&asked.body)?;
    let request: ResponseRequest = part(&asked.body)?;
    let _: Ignored = part(&asked.body)?;
    let streams = common.stream == Some(true);
    let id = common.id("resp", || state.fresh_id())?;
    let asked_for = |field: &str| asked.body.get(field).cloned().unwrap_or(Value::Null);
    let mut echo = Map::new();
    for (field, default) in [
        ("instructions", Value::Null),
        ("max_output_tokens", Value::Null),
        ("metadata", json!({})),
        ("parallel_tool_calls", json!(true)),
        ("temperature", json!(1.0)),
        ("text", json!({"format": {"type": "text"}})),
        ("tool_choice", json!("auto")),
        ("tools", json!([])),
        ("top_logprobs", json!(0)),
        ("top_p", json!(1.0)),
    ] {
        let value = asked_for(field);
        echo.insert(field.into(), if value.is_null() { default } else { value });
    }
    let conversation = request.conversation(&state.config.limits)?;
    let salt = asked.salt;
    let mut generation = blocking(&state, move |state| conversation.start(state, &common, salt)).await?;
    let mut items = Items::new(Head { id, model, created: now(), backend: backend.clone(), echo });
    if streams {
        return stream::respond(&state, generation, items).await;
    }
    let mut unused = String::new();
    while let Some(update) = generation.next().await {
        unused.clear();
        let length = match update? {
            Update::Prompt { .. } => continue,
            Update::Token { pieces, logprobs, .. } => {
                items.token(pieces, logprobs.as_ref(), &mut unused);
                continue;
            }
            Update::End { pieces, length, .. } => {
                items.pieces(pieces, &mut unused);
                length
            }
        };
        items.close(&mut unused, length);
    }
    Ok(Json(items.response(Some(generation.total), None)).into_response())
}

impl ResponseRequest {
    fn conversation(self, limits: &Limits) -> Result<Conversation> {
        for (param, given) in [
            ("previous_response_id", self.previous_response_id.is_some()),
            ("background", self.background == Some(true)),
            ("conversation", self.conversation.is_some()),
            ("prompt", self.prompt.is_some()),
        ] {
            if given {
                return Err(ApiError::invalid(param, format!("`{param}`: is not offered, as nothing is stored")));
            }
        }
        let told = |word: &String| word == "message.output_text.logprobs";
        let logprobs = self.include.as_ref().is_some_and(|include| include.iter().any(told));
        let top = within("top_logprobs", self.top_logprobs.unwrap_or(0), 0, limits.logprobs)?;
        if top > 0 && !logprobs {
            let message = "`top_logprobs` needs `include` to have `message.output_text.logprobs`";
            return Err(ApiError::invalid("top_logprobs", message));
        }
        let mut tools = Vec::new();
        for (i, tool) in self.tools.unwrap_or_default().into_iter().enumerate() {
            let Some(name) = tool.name.filter(|_| tool.kind == "function") else {
                let message = format!("`tools[{i}]` is a `{}`, but only functions with a name are offered", tool.kind);
                return Err(ApiError::invalid(format!("tools[{i}]"), message));
            };
            tools.push(Function { name, description: tool.description, parameters: tool.parameters, strict: None });
        }
        let format = match self.text.and_then(|t| t.format) {
            None | Some(TextFormat::Text) => None,
            Some(TextFormat::JsonObject) => Some(Grammar::Json),
            Some(TextFormat::JsonSchema { schema }) => {
                Some(Grammar::JsonSchema(schema_text("text.format.schema", &schema, limits)?))
            }
        };
        let mut extra = Map::new();
        if let Some(effort) = self.reasoning.and_then(|r| r.effort) {
            set_effort(&mut extra, effort);
        }
        let mut messages = Vec::new();
        if let Some(text) = self.instructions {
            messages.push(json!({"role": "system", "content": text}));
        }
        match self.input {
            Input::Text(text) => messages.push(json!({"role": "user", "content": text})),
            Input::Items(items) => {
                for (i, item) in items.into_iter().enumerate() {
                    item.add(i, &mut messages)?;
                }
            }
        }
        if !messages.iter().any(|m| m["role"] != "system") {
            return Err(ApiError::invalid("input", "`input` has no message to answer"));
        }
        Ok(Conversation {
            messages,
            tools,
            choice: match self.tool_choice {
                None | Some(ToolChoiceField::Mode(ToolMode::Auto)) => ToolChoice::Auto,
                Some(ToolChoiceField::Mode(ToolMode::None)) => ToolChoice::None,
                Some(ToolChoiceField::Mode(ToolMode::Required)) => ToolChoice::Required,
                Some(ToolChoiceField::Named { name }) => ToolChoice::Named(name),
            },
            parallel: self.parallel_tool_calls != Some(false),
            format,
            continued: false,
            reply: true,
            extra,
            max_tokens: ("max_output_tokens", self.max_output_tokens),
            logprobs: logprobs.then_some(top),
        })
    }
}

impl Item {
    /// Adds what it says to the messages of a chat template.
    fn add(self, i: usize, messages: &mut Vec<Value>) -> Result<()> {
        let param = format!("input[{i}]");
        let wrong = |why: String| ApiError::invalid(param.clone(), format!("`{param}` {why}"));
        match self.kind.as_deref().unwrap_or("message") {
            "message" => {
                let role = match self.role.as_deref() {
                    Some("developer" | "system") => "system",
                    Some("user") => "user",
                    Some("assistant") => "assistant",
                    other => {
                        return Err(wrong(format!("has the role `{}`, which is none", other.unwrap_or(""))));
                    }
                };
                let content = self.content.ok_or_else(|| wrong("has no content".into()))?;
                messages.push(json!({"role": role, "content": content.text(&format!("{param}.content"))?}));
            }
            "function_call" => {
                let name = self.name.ok_or_else(|| wrong("is a call without a name".into()))?;
                let arguments: Map<String, Value> = serde_json::from_str(self.arguments.as_deref().unwrap_or("{}"))
                    .map_err(|e| wrong(format!("has arguments that are not a JSON object: {e}")))?;
                let call =
                    json!({"id": self.call_id, "type": "function", "function": {"name": name, "arguments": arguments}});
                // Calls of one answer are one message.
                match messages.last_mut().and_then(|m| m.get_mut("tool_calls")).and_then(Value::as_array_mut) {
                    Some(calls) => calls.push(call),
                    None => messages.push(json!({"role": "assistant", "content": "", "tool_calls": [call]})),
                }
            }
            "function_call_output" => {
                let output = self.output.ok_or_else(|| wrong("has no output".into()))?;
                let text = output.text(&format!("{param}.output"))?;
                messages.push(json!({"role": "tool", "content": text, "tool_call_id": self.call_id}));
            }
            // Thoughts of earlier answers are not shown to the model again.
            "reasoning" => {}
            other => return Err(wrong(format!("is a `{other}`, which is not offered"))),
        }
        Ok(())
    }
}
