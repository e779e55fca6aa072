//! What was said so far: messages as clients send them, made into what chat templates read.

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::error::{ApiError, Result};

/// A conversation, for endpoints that do not answer it.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(transparent)]
pub(crate) struct ChatMessages(Vec<ChatMessage>);

impl ChatMessages {
    pub(crate) fn template_values(self) -> Result<Vec<Value>> {
        template_messages(self.0)
    }
}

#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct ChatMessage {
    role: Role,
    content: Option<Content>,
    name: Option<String>,
    tool_calls: Option<Vec<PastCall>>,
    tool_call_id: Option<String>,
    reasoning_content: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Role {
    System,
    Developer,
    User,
    Assistant,
    Tool,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "a text or a list of parts")]
pub(crate) enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct Part {
    #[serde(rename = "type")]
    #[schemars(extend("enum" = ["text", "input_text", "output_text", "refusal"]))]
    kind: String,
    #[serde(alias = "refusal")]
    text: Option<String>,
}

#[derive(Debug, Deserialize, JsonSchema)]
struct PastCall {
    id: Option<String>,
    function: PastFunction,
}

#[derive(Debug, Deserialize, JsonSchema)]
struct PastFunction {
    name: String,
    /// JSON.
    arguments: String,
}

impl Content {
    /// The text of all parts, one to a line.
    pub(crate) fn text(self, param: &str) -> Result<String> {
        match self {
            Self::Text(text) => Ok(text),
            Self::Parts(parts) => {
                let mut lines = Vec::with_capacity(parts.len());
                for (i, Part { kind, text }) in parts.into_iter().enumerate() {
                    match text {
                        Some(text) if matches!(kind.as_str(), "text" | "input_text" | "output_text" | "refusal") => {
                            lines.push(text);
                        }
                        _ => {
                            let message = format!("`{param}[{i}]` is a `{kind}`, but this model reads text only");
                            return Err(ApiError::invalid(format!("{param}[{i}]"), message));
                        }
                    }
                }
                Ok(lines.join("\n"))
            }
        }
    }
}

/// Messages as chat templates expect them: content is text, arguments are objects.
pub(crate) fn template_messages(from: Vec<ChatMessage>) -> Result<Vec<Value>> {
    if from.is_empty() {
        return Err(ApiError::invalid("messages", "`messages` is empty"));
    }
    let mut messages = Vec::with_capacity(from.len());
    for (i, message) in from.into_iter().enumerate() {
        let role = match message.role {
            Role::System | Role::Developer => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        };
        let mut value = json!({"role": role});
        let calls = message.tool_calls.unwrap_or_default();
        match message.content {
            Some(content) => value["content"] = json!(content.text(&format!("messages[{i}].content"))?),
            None if message.role == Role::Assistant => value["content"] = json!(""),
            None => {
                let message = format!("`messages[{i}]` has the role `{role}`, but no content");
                return Err(ApiError::invalid(format!("messages[{i}].content"), message));
            }
        }
        if !calls.is_empty() {
            let mut list = Vec::with_capacity(calls.len());
            for (j, call) in calls.into_iter().enumerate() {
                let PastFunction { name, arguments } = call.function;
                let arguments: Map<String, Value> = serde_json::from_str(&arguments).map_err(|e| {
                    let param = format!("messages[{i}].tool_calls[{j}].function.arguments");
                    ApiError::invalid(param.clone(), format!("`{param}` is not a JSON object: {e}"))
                })?;
                list.push(
                    json!({"id": call.id, "type": "function", "function": {"name": name, "arguments": arguments}}),
                );
            }
            value["tool_calls"] = Value::Array(list);
        }
        for (key, text) in [
            ("name", message.name),
            ("tool_call_id", message.tool_call_id),
            ("reasoning_content", message.reasoning_content),
        ] {
            if let Some(text) = text {
                value[key] = json!(text);
            }
        }
        messages.push(value);
    }
    Ok(messages)
}
