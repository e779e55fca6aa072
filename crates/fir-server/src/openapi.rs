//! `/openapi.json`: the interface, from the types that read and write it.

use std::sync::LazyLock;

use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value, json};

use crate::anthropic::messages;
use crate::error::ErrorBody;
use crate::openai::{chat, completions, plain, responses, types};
use crate::params::Common;

/// The document; it never changes.
pub(crate) static DOCUMENT: LazyLock<String> = LazyLock::new(|| document().to_string());

/// The schema of `T`, whose parts go to the document's components.
fn schema<T: JsonSchema>(types: &mut SchemaGenerator) -> Value {
    T::json_schema(types).to_value()
}

/// The schema of a body that is read as all of `parts`: no field is named twice, and no other is taken.
fn merged(parts: Vec<Value>, fields: &Map<String, Value>) -> Value {
    let (mut properties, mut required) = (Map::new(), Vec::new());
    for part in parts {
        if let Some(Value::Object(some)) = part.get("properties") {
            properties.extend(some.clone());
        }
        required.extend(part.get("required").and_then(Value::as_array).into_iter().flatten().cloned());
    }
    properties.retain(|name, _| fields.contains_key(name));
    json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
}

fn json_body(schema: Value) -> Value {
    json!({"required": true, "content": {"application/json": {"schema": schema}}})
}

fn json_answer(description: &str, schema: Value) -> Value {
    json!({"description": description, "content": {"application/json": {"schema": schema}}})
}

fn text_answer(description: &str, kind: &str) -> Value {
    json!({"description": description, "content": {kind: {"schema": {"type": "string"}}}})
}

/// An operation with the answers that all of its kind have; `guarded` ones want a key.
fn operation(summary: &str, ok: Value, body: Option<Value>, guarded: bool) -> Value {
    let mut answers = json!({"200": ok});
    let refusals: &[(&str, &str)] = match body {
        Some(_) => &[
            ("400", "The request cannot be done"),
            ("404", "There is no such model"),
            ("413", "The body is too large"),
            ("415", "The body is not declared as JSON"),
            ("429", "The queue is full; `Retry-After` says when to try again"),
            ("500", "The request failed"),
            ("503", "Loading, shutting down or stopped"),
        ],
        None => &[("404", "There is no such model"), ("503", "Loading, shutting down or stopped")],
    };
    let error = json!({"$ref": "#/components/schemas/Error"});
    for (status, description) in refusals {
        answers[status] = json_answer(description, error.clone());
    }
    let mut operation = json!({"summary": summary, "responses": answers});
    if guarded {
        operation["responses"]["401"] = json_answer("The key is missing or unknown", error);
        operation["security"] = json!([{"key": []}, {}]);
    }
    if let Some(body) = body {
        operation["requestBody"] = body;
    }
    operation
}

/// An answer that is JSON, or a stream of it when asked for.
fn streamed(description: &str, schema: Value) -> Value {
    let mut answer = json_answer(description, schema);
    answer["content"]["text/event-stream"] = json!({});
    answer
}

fn document() -> Value {
    let mut settings = SchemaSettings::draft2020_12();
    settings.definitions_path = "/components/schemas".into();
    settings.meta_schema = None;
    // What is read may leave fields out that what is written always has, and the other way round.
    let answers = &mut SchemaGenerator::new(settings.clone().for_serialize());
    let types = &mut SchemaGenerator::new(settings);
    let common = schema::<Common>(types);
    let chat_body =
        merged(vec![common.clone(), schema::<chat::ChatRequest>(types), schema::<chat::Ignored>(types)], &chat::FIELDS);
    let text_body = merged(vec![common.clone(), schema::<completions::CompletionRequest>(types)], &completions::FIELDS);
    let response_body = merged(
        vec![common, schema::<responses::ResponseRequest>(types), schema::<responses::Ignored>(types)],
        &responses::FIELDS,
    );
    let message_body = merged(
        vec![
            schema::<messages::MessagesRequest>(types),
            schema::<messages::Answering>(types),
            schema::<messages::Ignored>(types),
        ],
        &messages::FIELDS,
    );
    let counted = merged(
        vec![schema::<messages::MessagesRequest>(types), schema::<messages::Ignored>(types)],
        &messages::COUNTED,
    );
    let message = json!({
        "type": "object",
        "required": ["id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"],
        "properties": {
            "type": {"const": "message"},
            "content": {"type": "array", "items": {"type": "object", "required": ["type"]}},
            "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
        },
    });
    let tokenize = merged(vec![schema::<plain::TokenizeRequest>(types)], &plain::TOKENIZE);
    let detokenize = merged(vec![schema::<plain::DetokenizeRequest>(types)], &plain::DETOKENIZE);
    let embed = merged(vec![schema::<plain::EmbeddingRequest>(types)], &plain::EMBEDDINGS);
    let response = json!({
        "type": "object",
        "required": ["id", "object", "created_at", "model", "status", "output", "usage"],
        "properties": {
            "object": {"const": "response"},
            "status": {"enum": ["completed", "incomplete", "failed", "in_progress"]},
            "output": {"type": "array", "items": {"type": "object", "required": ["id", "type"]}},
        },
    });
    let post = |summary, ok, body| json!({"post": operation(summary, ok, Some(json_body(body)), true)});
    let get = |summary, ok, guarded| json!({"get": operation(summary, ok, None, guarded)});
    // Errors have another form there.
    let refused = |mut path: Value| {
        for (status, answer) in path["post"]["responses"].as_object_mut().into_iter().flatten() {
            if status != "200" {
                answer["content"]["application/json"]["schema"]["$ref"] = json!("#/components/schemas/Refusal");
            }
        }
        path
    };
    let paths = json!({
        "/v1/chat/completions": post("Answers a conversation", streamed("The answer", schema::<types::ChatCompletion>(answers)), chat_body),
        "/v1/completions": post("Continues texts", streamed("The continuations", schema::<types::Completion>(answers)), text_body),
        "/v1/responses": post("Answers a conversation with a list of items", streamed("The answer", response), response_body),
        "/v1/messages": refused(post("Answers a conversation in Anthropic's form", streamed("The answer", message), message_body)),
        "/v1/messages/count_tokens": refused(post("Counts the tokens of a conversation", json_answer("The number", schema::<messages::Count>(answers)), counted)),
        "/v1/embeddings": post("Turns texts into vectors", json_answer("The vectors", schema::<plain::Embeddings>(answers)), embed),
        "/tokenize": post("Turns a text into tokens", json_answer("The tokens", schema::<plain::Tokens>(answers)), tokenize),
        "/detokenize": post("Turns tokens into a text", json_answer("The text", schema::<plain::Detokenized>(answers)), detokenize),
        "/v1/models": get("Lists the models", json_answer("The models", schema::<plain::Models>(answers)), true),
        "/v1/models/{model}": {
            "get": operation("Describes a model", json_answer("The model", schema::<plain::ModelObject>(answers)), None, true),
            "parameters": [{"name": "model", "in": "path", "required": true, "schema": {"type": "string", "minLength": 1}}],
        },
        "/health": get("Whether the engine lives", text_answer("It does", "text/plain; charset=utf-8"), false),
        "/ready": get("Whether requests are taken", text_answer("They are", "text/plain; charset=utf-8"), false),
        "/ping": get("Whether requests are taken", text_answer("They are", "text/plain; charset=utf-8"), false),
        "/load": get("How many requests have not been answered", json_answer("The number", json!({"type": "object", "required": ["server_load"]})), false),
        "/reset_prefix_cache": {"post": operation("Forgets cached prefixes", json!({"description": "They are forgotten"}), None, true)},
        "/metrics": get("Counters for Prometheus", text_answer("The counters", "text/plain; version=0.0.4; charset=utf-8"), false),
        "/version": get("The version", json_answer("The version", json!({"type": "object", "required": ["version"]})), false),
    });
    let (error, refusal) = (schema::<ErrorBody>(answers), schema::<messages::RefusalBody>(answers));
    let mut components = types.take_definitions(true);
    components.extend(answers.take_definitions(true));
    components.insert("Error".into(), error);
    components.insert("Refusal".into(), refusal);
    json!({
        "openapi": "3.1.0",
        "info": {"title": "fir", "version": env!("CARGO_PKG_VERSION"), "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every `$ref` of the document.
    fn refs<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
        match value {
            Value::Object(fields) => {
                found.extend(fields.get("$ref").and_then(Value::as_str));
                fields.values().for_each(|v| refs(v, found));
            }
            Value::Array(items) => items.iter().for_each(|v| refs(v, found)),
            _ => {}
        }
    }

    #[test]
    fn every_reference_leads_somewhere() {
        let document = document();
        let mut found = Vec::new();
        refs(&document, &mut found);
        assert!(found.len() > 20, "{found:?}");
        for target in found {
            let path = target.strip_prefix('#').unwrap();
            assert!(document.pointer(path).is_some(), "{target}");
        }
    }

    #[test]
    fn bodies_list_the_fields_that_are_read() {
        let document = document();
        for (path, fields) in [
            ("~1v1~1chat~1completions", &*chat::FIELDS),
            ("~1v1~1responses", &*responses::FIELDS),
            ("~1v1~1messages", &*messages::FIELDS),
        ] {
            let at = format!("/paths/{path}/post/requestBody/content/application~1json/schema/properties");
            let told = document.pointer(&at).and_then(Value::as_object).unwrap();
            assert_eq!(told.len(), fields.len(), "{path}");
            assert!(told.keys().all(|name| fields.contains_key(name)), "{path}");
        }
        assert_eq!(
            document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]["required"],
            json!(["messages"])
        );
    }
}
