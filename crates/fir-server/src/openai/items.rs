//! The items of a response, and the events that tell of them as they grow.

use std::sync::Arc;

use fir_engine::TokenLogprobs;
use serde_json::{Map, Value, json};

use super::types::ChatLogprob;
use crate::backend::Backend;
use crate::error::ErrorObject;
use crate::generation::{Total, Update};
use crate::parse::Piece;
use crate::stream::{Encode, Step};

/// What every event tells of its response.
pub(crate) struct Head {
    pub(crate) id: String,
    pub(crate) model: String,
    pub(crate) created: u64,
    pub(crate) backend: Arc<dyn Backend>,
    /// Fields of the request that the answer repeats.
    pub(crate) echo: Map<String, Value>,
}

/// A response so far. Its events are written whether or not anybody reads them: a response that is not streamed is the
/// last state of one that is.
pub(crate) struct Items {
    head: Head,
    done: Vec<Value>,
    open: Option<Open>,
    /// Log probabilities of tokens whose text is not certain yet.
    logprobs: Vec<Value>,
    /// Events so far.
    events: usize,
    cut: bool,
}

/// The item that grows.
struct Open {
    kind: Kind,
    id: String,
    /// Of a call.
    name: String,
    text: String,
    logprobs: Vec<Value>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Message,
    Call,
}

impl Open {
    /// The item as it is now; `part` is its content.
    fn value(&self, status: &str, part: Option<Value>) -> Value {
        let content: Vec<Value> = part.into_iter().collect();
        match self.kind {
            Kind::Reasoning => {
                json!({"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content})
            }
            Kind::Message => {
                json!({"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content})
            }
            Kind::Call => json!({
                "id": self.id, "type": "function_call", "status": status, "call_id": format!("call_{}", self.id),
                "name": self.name, "arguments": self.text,
            }),
        }
    }

    /// Its content; calls have none.
    fn part(&self) -> Option<Value> {
        match self.kind {
            Kind::Reasoning => Some(json!({"type": "reasoning_text", "text": self.text})),
            Kind::Message => {
                Some(json!({"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}))
            }
            Kind::Call => None,
        }
    }

    /// What its text is called in events.
    fn event(&self) -> &'static str {
        match self.kind {
            Kind::Reasoning => "reasoning_text",
            Kind::Message => "output_text",
            Kind::Call => "function_call_arguments",
        }
    }
}

impl Items {
    pub(crate) fn new(head: Head) -> Self {
        Self { head, done: Vec::new(), open: None, logprobs: Vec::new(), events: 0, cut: false }
    }

    /// The response as it is now: in progress without `total`, failed with `error`.
    pub(crate) fn response(&self, total: Option<Total>, error: Option<&ErrorObject>) -> Value {
        let Head { id, model, created, echo, .. } = &self.head;
        let status = match (error, total) {
            (Some(_), _) => "failed",
            (None, None) => "in_progress",
            (None, Some(_)) if self.cut => "incomplete",
            (None, Some(_)) => "completed",
        };
        let mut response = json!({
            "id": id, "object": "response", "created_at": created, "model": model, "status": status,
            "output": self.done, "store": false, "previous_response_id": null,
            "error": error.map(|e| json!({"code": "server_error", "message": e.message})),
            "incomplete_details": (status == "incomplete").then(|| json!({"reason": "max_output_tokens"})),
            "usage": total.map(|t| json!({
                "input_tokens": t.prompt, "input_tokens_details": {"cached_tokens": t.cached},
                "output_tokens": t.generated, "output_tokens_details": {"reasoning_tokens": t.reasoning},
                "total_tokens": t.prompt + t.generated,
            })),
        });
        if let Some(fields) = response.as_object_mut() {
            fields.extend(echo.clone());
        }
        response
    }

    fn event(&mut self, out: &mut String, kind: &str, mut value: Value) {
        value["type"] = json!(kind);
        value["sequence_number"] = json!(self.events);
        self.events += 1;
        *out += &format!("event: {kind}\ndata: {value}\n\n");
    }

    /// Adds a token and the pieces of text that became certain with it.
    pub(crate) fn token(&mut self, pieces: Vec<Piece>, logprobs: Option<&TokenLogprobs>, out: &mut String) {
        if let Some(of) = logprobs {
            let value = serde_json::to_value(ChatLogprob::new(self.head.backend.as_ref(), of));
            self.logprobs.push(value.unwrap_or_default());
        }
        self.pieces(pieces, out);
    }

    /// Adds pieces of the text, with the events that tell of it.
    pub(crate) fn pieces(&mut self, pieces: Vec<Piece>, out: &mut String) {
        for piece in pieces {
            match piece {
                Piece::Reasoning(text) => self.text(Kind::Reasoning, "rs", &text, out),
                Piece::Content(text) => self.text(Kind::Message, "msg", &text, out),
                Piece::Call(name) => self.begin(Kind::Call, "fc", name, out),
                Piece::Arguments(text) => self.delta(&text, out),
            }
        }
    }

    fn text(&mut self, kind: Kind, prefix: &str, text: &str, out: &mut String) {
        if self.open.as_ref().is_none_or(|o| o.kind != kind) {
            self.begin(kind, prefix, String::new(), out);
        }
        self.delta(text, out);
    }

    fn begin(&mut self, kind: Kind, prefix: &str, name: String, out: &mut String) {
        self.end_item("completed", out);
        let number = self.done.len();
        let id = format!("{prefix}_{}{number:02x}", self.head.id.strip_prefix("resp-").unwrap_or(&self.head.id));
        let open = Open { kind, id, name, text: String::new(), logprobs: Vec::new() };
        let (item, part, id) = (open.value("in_progress", None), open.part(), open.id.clone());
        self.event(out, "response.output_item.added", json!({"output_index": number, "item": item}));
        if let Some(part) = part {
            let value = json!({"item_id": id, "output_index": number, "content_index": 0, "part": part});
            self.event(out, "response.content_part.added", value);
        }
        self.open = Some(open);
    }

    fn delta(&mut self, text: &str, out: &mut String) {
        let number = self.done.len();
        let Some(open) = &mut self.open else { return };
        open.text += text;
        // Only what is answered has them, not what is thought or called.
        let logprobs = std::mem::take(&mut self.logprobs);
        let kind = format!("response.{}.delta", open.event());
        let mut value = json!({"item_id": open.id, "output_index": number, "delta": text});
        if open.kind != Kind::Call {
            value["content_index"] = json!(0);
        }
        if open.kind == Kind::Message {
            open.logprobs.extend(logprobs.iter().cloned());
            value["logprobs"] = Value::Array(logprobs);
        }
        self.event(out, &kind, value);
    }

    fn end_item(&mut self, status: &str, out: &mut String) {
        let Some(open) = self.open.take() else { return };
        let number = self.done.len();
        let place = json!({"item_id": open.id, "output_index": number});
        let mut value = place.clone();
        if open.kind == Kind::Call {
            value["arguments"] = json!(open.text);
            value["name"] = json!(open.name);
        } else {
            value["text"] = json!(open.text);
            value["content_index"] = json!(0);
        }
        if open.kind == Kind::Message {
            value["logprobs"] = json!(open.logprobs);
        }
        self.event(out, &format!("response.{}.done", open.event()), value);
        let part = open.part();
        if let Some(part) = &part {
            let mut value = place;
            value["content_index"] = json!(0);
            value["part"] = part.clone();
            self.event(out, "response.content_part.done", value);
        }
        let item = open.value(status, part);
        self.event(out, "response.output_item.done", json!({"output_index": number, "item": item}));
        self.done.push(item);
    }

    /// The text has ended; `cut` by its length.
    pub(crate) fn close(&mut self, out: &mut String, cut: bool) {
        self.cut = cut;
        if self.open.is_none() && self.done.is_empty() {
            self.begin(Kind::Message, "msg", String::new(), out);
        }
        self.end_item(if cut { "incomplete" } else { "completed" }, out);
    }
}

impl Encode for Items {
    fn encode(&mut self, step: Step, out: &mut String) {
        match step {
            Step::Begin => {
                for kind in ["response.created", "response.in_progress"] {
                    let response = self.response(None, None);
                    self.event(out, kind, json!({"response": response}));
                }
            }
            Step::Update(Update::Prompt { .. }) => {}
            Step::Update(Update::Token { pieces, logprobs, .. }) => self.token(pieces, logprobs.as_ref(), out),
            Step::Update(Update::End { pieces, length, .. }) => {
                self.pieces(pieces, out);
                self.close(out, length);
            }
            Step::End(total) => {
                let response = self.response(Some(total), None);
                let kind = if self.cut { "response.incomplete" } else { "response.completed" };
                self.event(out, kind, json!({"response": response}));
            }
            Step::Failed(e) => {
                let response = self.response(None, Some(&e.body.error));
                self.event(out, "response.failed", json!({"response": response}));
            }
        }
    }
}
