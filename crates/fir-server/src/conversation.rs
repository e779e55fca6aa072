//! A conversation with tools, as chat, responses and messages have it, made into one request of the engine.

use std::sync::Arc;
use std::time::Instant;

use fir_engine::{Attention, Grammar, Request, Sampling};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::auth::salted;
use crate::backend::{Backend, ModelInfo};
use crate::config::Limits;
use crate::error::{ApiError, Result};
use crate::generation::Generation;
use crate::params::{Common, schema_text, within};
use crate::parse::{Calls, Parser};
use crate::state::State;

/// A tool the model may call.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
pub(crate) struct Function {
    #[schemars(regex(pattern = r"^[a-zA-Z0-9_.-]{1,64}$"))]
    pub(crate) name: String,
    pub(crate) description: Option<String>,
    /// The JSON schema of its arguments.
    #[schemars(with = "Option<Map<String, Value>>")]
    pub(crate) parameters: Option<Value>,
    /// Forced calls always follow the schema; others as well as the model can.
    #[expect(dead_code, reason = "clients send it")]
    pub(crate) strict: Option<bool>,
}

/// Which tools are called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ToolChoice {
    None,
    Auto,
    Required,
    Named(String),
}

/// What is said so far, and how to answer.
#[derive(Debug)]
pub(crate) struct Conversation {
    /// As the chat template reads them.
    pub(crate) messages: Vec<Value>,
    pub(crate) tools: Vec<Function>,
    pub(crate) choice: ToolChoice,
    /// Several calls in one answer.
    pub(crate) parallel: bool,
    /// What the content must be an instance of.
    pub(crate) format: Option<Grammar>,
    /// The last message is the beginning of the answer.
    pub(crate) continued: bool,
    /// The template adds what makes the model answer.
    pub(crate) reply: bool,
    /// More variables of the template.
    pub(crate) extra: Map<String, Value>,
    /// The field of the limit, for messages, and its value.
    pub(crate) max_tokens: (&'static str, Option<usize>),
    pub(crate) logprobs: Option<usize>,
}

/// A request for the engine, and how its text is read.
struct Prepared {
    request: Request,
    parser: Parser,
    one_call: bool,
}

impl Conversation {
    /// Hands it to the engine: work for a thread that may block.
    pub(crate) fn start(self, state: &Arc<State>, common: &Common, salt: u64) -> Result<Generation> {
        let Prepared { request, parser, one_call } = self.prepare(state, common, salt)?;
        Generation::start(state, vec![request], &parser, one_call)
    }

    /// Checks, renders and encodes it.
    fn prepare(mut self, state: &State, common: &Common, salt: u64) -> Result<Prepared> {
        let (backend, limits) = (state.backend()?.as_ref(), &state.config.limits);
        let model = backend.model();
        let mut sampling = common.sampling(model, limits)?;
        self.check_tools(limits)?;
        let (calls, forced) = self.calls(model, limits)?;
        sampling.grammar = self.grammar(sampling.grammar.take(), forced)?;
        sampling.logprobs = self.logprobs;

        let (prompt, thinking) = self.tokens(backend)?;
        let request = engine_request(state, common, salt, prompt, sampling, ("messages", self.max_tokens))?;
        let one_call = !self.parallel;
        Ok(Prepared { request, parser: Parser::new(calls, thinking), one_call })
    }

    /// The tokens of its prompt, and whether it ends inside of a thought.
    pub(crate) fn tokens(&mut self, backend: &dyn Backend) -> Result<(Vec<u32>, bool)> {
        let tools: Vec<Value> = match self.choice {
            ToolChoice::None => Vec::new(),
            _ => self.tools.iter().map(Function::template_value).collect(),
        };
        let tools = (!tools.is_empty()).then_some(Value::Array(tools));
        let last = self.messages.last().and_then(|m| m["content"].as_str()).map(str::to_owned);
        let messages = Value::Array(std::mem::take(&mut self.messages));
        let reply = self.reply && !self.continued;
        let mut text = backend.render(&messages, tools.as_ref(), reply, &self.extra)?;
        if self.continued {
            // The template closes the last message; what follows its content is taken back.
            let last = last.as_deref().map(str::trim_end).filter(|l| !l.is_empty());
            let end = last.and_then(|last| text.rfind(last).map(|at| at + last.len()));
            text.truncate(end.ok_or_else(|| {
                ApiError::invalid(
                    "continue_final_message",
                    "`continue_final_message` needs a last message with content",
                )
            })?);
        }
        let thinking = text.trim_end().ends_with("<think>");
        Ok((backend.encode(&text, false)?, thinking))
    }

    fn check_tools(&self, limits: &Limits) -> Result<()> {
        if self.tools.len() > limits.tools {
            let message = format!("`tools` has {} entries, but at most {} are taken", self.tools.len(), limits.tools);
            return Err(ApiError::invalid("tools", message));
        }
        for (i, tool) in self.tools.iter().enumerate() {
            let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
            if !(1..=64).contains(&tool.name.len()) || !tool.name.chars().all(fits) {
                let message = format!(
                    "`tools[{i}]` has the name `{}`, but a name is 1 to 64 letters, digits, `_`, `-` or `.`",
                    tool.name
                );
                return Err(ApiError::invalid(format!("tools[{i}].function.name"), message));
            }
            if let Some(schema) = &tool.parameters {
                schema_text(&format!("tools[{i}].function.parameters"), schema, limits)?;
            }
            if self.tools[..i].iter().any(|t| t.name == tool.name) {
                let message = format!("`tools[{i}]` has the name `{}` of another tool", tool.name);
                return Err(ApiError::invalid(format!("tools[{i}].function.name"), message));
            }
        }
        Ok(())
    }

    /// How calls are found in the text, and what forces them.
    fn calls(&self, model: &ModelInfo, limits: &Limits) -> Result<(Calls, Option<Grammar>)> {
        let missing = |what: String| ApiError::invalid("tool_choice", format!("`tool_choice` {what}"));
        Ok(match &self.choice {
            ToolChoice::None => (Calls::None, None),
            ToolChoice::Auto if self.tools.is_empty() => (Calls::None, None),
            ToolChoice::Auto => (Calls::Free(model.tools, self.tools.iter().map(|t| t.name.clone()).collect()), None),
            ToolChoice::Required if self.tools.is_empty() => {
                return Err(missing("is `required`, but `tools` is empty".into()));
            }
            ToolChoice::Required => {
                let schema = calls_schema(&self.tools, self.parallel);
                (Calls::Array, Some(Grammar::JsonSchema(schema_text("tools", &schema, limits)?)))
            }
            ToolChoice::Named(name) => {
                let Some(tool) = self.tools.iter().find(|t| t.name == *name) else {
                    return Err(missing(format!("names `{name}`, which is not one of `tools`")));
                };
                let schema = schema_text("tools", &tool.schema(), limits)?;
                (Calls::Of(name.clone()), Some(Grammar::JsonSchema(schema)))
            }
        })
    }

    /// The one thing that the text must be an instance of.
    fn grammar(&self, structured: Option<Grammar>, forced: Option<Grammar>) -> Result<Option<Grammar>> {
        let given = [
            ("structured_outputs", structured.is_some()),
            ("response_format", self.format.is_some()),
            ("tool_choice", forced.is_some() || (!self.tools.is_empty() && self.choice == ToolChoice::Auto)),
        ];
        let given: Vec<&str> = given.iter().filter(|g| g.1).map(|g| g.0).collect();
        if let [first, second, ..] = given[..] {
            let message = format!(
                "`{first}` and `{second}` cannot both say what the answer looks like; with tools, set `tool_choice` to `none`"
            );
            return Err(ApiError::invalid(first, message));
        }
        Ok(structured.or_else(|| self.format.clone()).or(forced))
    }
}

/// A request for the engine, if prompt and answer fit the context. `limit` has the fields' names and the limit asked for.
pub(crate) fn engine_request(
    state: &State,
    common: &Common,
    salt: u64,
    prompt: Vec<u32>,
    mut sampling: Sampling,
    (field, (max_field, max_tokens)): (&str, (&str, Option<usize>)),
) -> Result<Request> {
    let backend = state.backend()?.as_ref();
    let model = backend.model();
    let attention = common.attention()?;
    // What streams forgets its middle, so that a text of any length fits.
    let streams = matches!(attention, Attention::Streaming { .. });
    let context = if streams { usize::MAX } else { model.context };
    let (length, most) = (prompt.len(), context.min(state.config.limits.prompt));
    if prompt.is_empty() {
        return Err(ApiError::invalid(field, format!("`{field}` has no tokens")));
    }
    if length > most || length >= context {
        let message = format!("`{field}` has {length} tokens, but at most {} fit", most.min(context - 1));
        return Err(ApiError::context(field, message));
    }
    let room = context - length;
    if let Some(asked) = max_tokens {
        within(max_field, asked, 1, usize::MAX)?;
        if asked > room {
            let message = format!(
                "this model's context is {context} tokens, but {length} of `{field}` and {asked} of `{max_field}` are {}",
                length.saturating_add(asked)
            );
            return Err(ApiError::context(max_field, message));
        }
    }
    sampling.max_tokens = max_tokens.unwrap_or(room.min(model.context));
    sampling.bad_tokens = common.bad_tokens(backend, &state.config.limits)?;
    if sampling.min_tokens > sampling.max_tokens {
        let message =
            format!("`min_tokens` is {}, but at most {} are generated", sampling.min_tokens, sampling.max_tokens);
        return Err(ApiError::invalid("min_tokens", message));
    }
    Ok(Request {
        prompt,
        sampling,
        n: common.n(&state.config.limits)?,
        priority: common.priority(),
        deadline: state.config.queue_timeout.map(|t| Instant::now() + t),
        salt: common.cache_salt.as_deref().map_or(salt, |text| salted(salt, text)),
        attention,
    })
}

/// How much a model shall think, as templates have it: OpenAI's word, and that of Qwen's.
pub(crate) fn set_effort(extra: &mut Map<String, Value>, effort: String) {
    if effort == "none" {
        extra.entry("enable_thinking").or_insert(Value::Bool(false));
    }
    extra.entry("reasoning_effort").or_insert(Value::String(effort));
}

/// Runs what may take milliseconds on a thread for it.
pub(crate) async fn blocking<T: Send + 'static>(
    state: &Arc<State>,
    work: impl FnOnce(&Arc<State>) -> Result<T> + Send + 'static,
) -> Result<T> {
    let state = state.clone();
    let done = tokio::task::spawn_blocking(move || work(&state)).await;
    done.map_err(|e| ApiError::internal(format!("a request could not be read: {e}")))?
}

impl Function {
    /// As chat templates expect tools.
    fn template_value(&self) -> Value {
        let mut function = json!({"name": self.name, "parameters": self.schema()});
        if let Some(description) = &self.description {
            function["description"] = json!(description);
        }
        json!({"type": "function", "function": function})
    }

    /// The schema of its arguments; any object without one.
    fn schema(&self) -> Value {
        self.parameters.clone().unwrap_or_else(|| json!({"type": "object", "properties": {}}))
    }
}

/// The schema of an array of calls. Definitions move to its root, under the tool's name.
fn calls_schema(tools: &[Function], parallel: bool) -> Value {
    let (mut variants, mut shared) = (Vec::new(), Map::new());
    for tool in tools {
        let mut arguments = tool.schema();
        for key in ["$defs", "definitions"] {
            let moved = arguments.as_object_mut().and_then(|a| a.remove(key));
            let Some(Value::Object(moved)) = moved else { continue };
            let from = format!("#/{key}/");
            let to = format!("{}.", tool.name);
            rename_refs(&mut arguments, &from, &to);
            for (name, mut schema) in moved {
                rename_refs(&mut schema, &from, &to);
                shared.insert(format!("{to}{name}"), schema);
            }
        }
        variants.push(json!({
            "type": "object",
            "properties": {"name": {"const": tool.name}, "arguments": arguments},
            "required": ["name", "arguments"],
            "additionalProperties": false,
        }));
    }
    // Without an end a model may call forever.
    let most = if parallel { 16 } else { 1 };
    json!({"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": variants}, "$defs": shared})
}

fn rename_refs(schema: &mut Value, from: &str, to: &str) {
    match schema {
        Value::Object(fields) => {
            for (key, value) in fields {
                match value {
                    Value::String(target) if key == "$ref" => {
                        if let Some(name) = target.strip_prefix(from) {
                            *target = format!("#/$defs/{to}{name}");
                        }
                    }
                    value => rename_refs(value, from, to),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| rename_refs(item, from, to)),
        _ => {}
    }
}

/// The model's name and the engine, if requests may begin.
pub(crate) fn served(state: &State) -> Result<(&Arc<dyn Backend>, String)> {
    let backend = state.open()?;
    Ok((backend, backend.model().id.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn definitions_of_two_tools_do_not_meet() {
        let tool = |name: &str, parameters: Value| Function {
            name: name.into(),
            description: None,
            parameters: Some(parameters),
            strict: None,
        };
        let a = json!({"type": "object", "properties": {"x": {"$ref": "#/$defs/P"}}, "$defs": {"P": {"type": "integer"}, "Q": {"$ref": "#/$defs/P"}}});
        let b = json!({"type": "object", "properties": {"x": {"items": [{"$ref": "#/definitions/P"}]}}, "definitions": {"P": {"type": "string"}}});
        let schema = calls_schema(&[tool("a", a), tool("b", b)], false);
        assert_eq!(schema["maxItems"], 1);
        assert_eq!(schema["items"]["anyOf"][0]["properties"]["arguments"]["properties"]["x"]["$ref"], "#/$defs/a.P");
        assert_eq!(
            schema["items"]["anyOf"][1]["properties"]["arguments"]["properties"]["x"]["items"][0]["$ref"],
            "#/$defs/b.P"
        );
        assert_eq!(
            schema["$defs"],
            json!({"a.P": {"type": "integer"}, "a.Q": {"$ref": "#/$defs/a.P"}, "b.P": {"type": "string"}})
        );
    }
}
