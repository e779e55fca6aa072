//! The blocks of a message, and the events that tell of them as they grow.

use serde_json::{Map, Value, json};

use super::messages::RefusalBody;
use crate::generation::{Total, Update};
use crate::parse::Piece;
use crate::stream::{Encode, Step};

/// What is known of a message before its first token.
pub(crate) struct Head {
    pub(crate) id: String,
    pub(crate) model: String,
    /// The texts that may end it.
    pub(crate) stops: Vec<String>,
    /// Tokens of the prompt.
    pub(crate) prompt: usize,
}

/// A message so far. Its events are written whether or not anybody reads them, as those of a response are.
pub(crate) struct Blocks {
    head: Head,
    done: Vec<Value>,
    open: Option<Open>,
    calls: usize,
    /// Why it ended, and by which text.
    end: Option<(&'static str, Option<String>)>,
}

/// The block that grows.
struct Open {
    kind: Kind,
    id: String,
    name: String,
    text: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Thinking,
    Text,
    Call,
}

impl Open {
    /// The block with all of its text.
    fn value(&self) -> Value {
        match self.kind {
            Kind::Thinking => json!({"type": "thinking", "thinking": self.text, "signature": ""}),
            Kind::Text => json!({"type": "text", "text": self.text}),
            Kind::Call => {
                // Of a call that was cut off by its length, nothing can be said.
                let input: Map<String, Value> = serde_json::from_str(&self.text).unwrap_or_default();
                json!({"type": "tool_use", "id": self.id, "name": self.name, "input": input})
            }
        }
    }
}

impl Blocks {
    pub(crate) fn new(head: Head) -> Self {
        Self { head, done: Vec::new(), open: None, calls: 0, end: None }
    }

    /// The message as it is now.
    pub(crate) fn message(&self, total: Option<Total>) -> Value {
        let (reason, stop) = self.end.clone().map_or((None, None), |(reason, stop)| (Some(reason), stop));
        let total = total.unwrap_or(Total { prompt: self.head.prompt, ..Total::default() });
        json!({
            "id": self.head.id, "type": "message", "role": "assistant", "model": self.head.model, "content": self.done,
            "stop_reason": reason, "stop_sequence": stop, "usage": usage(total),
        })
    }

    /// Adds pieces of the text, with the events that tell of it.
    pub(crate) fn pieces(&mut self, pieces: Vec<Piece>, out: &mut String) {
        for piece in pieces {
            match piece {
                Piece::Reasoning(text) => self.text(Kind::Thinking, &text, out),
                Piece::Content(text) => self.text(Kind::Text, &text, out),
                Piece::Call(name) => {
                    self.calls += 1;
                    self.begin(Kind::Call, name, out);
                }
                Piece::Arguments(text) => self.delta(&text, out),
            }
        }
    }

    fn text(&mut self, kind: Kind, text: &str, out: &mut String) {
        if self.open.as_ref().is_none_or(|o| o.kind != kind) {
            self.begin(kind, String::new(), out);
        }
        self.delta(text, out);
    }

    fn begin(&mut self, kind: Kind, name: String, out: &mut String) {
        self.end_block(out);
        let index = self.done.len();
        let id = format!("toolu_{}{index:02x}", self.head.id.strip_prefix("msg_").unwrap_or(&self.head.id));
        let open = Open { kind, id, name, text: String::new() };
        event(out, "content_block_start", json!({"index": index, "content_block": open.value()}));
        self.open = Some(open);
    }

    fn delta(&mut self, text: &str, out: &mut String) {
        let index = self.done.len();
        let Some(open) = &mut self.open else { return };
        open.text += text;
        let delta = match open.kind {
            Kind::Thinking => json!({"type": "thinking_delta", "thinking": text}),
            Kind::Text => json!({"type": "text_delta", "text": text}),
            Kind::Call => json!({"type": "input_json_delta", "partial_json": text}),
        };
        event(out, "content_block_delta", json!({"index": index, "delta": delta}));
    }

    fn end_block(&mut self, out: &mut String) {
        let Some(open) = self.open.take() else { return };
        event(out, "content_block_stop", json!({"index": self.done.len()}));
        self.done.push(open.value());
    }

    /// The text has ended: by its length, by one of the stop texts, or by itself.
    pub(crate) fn close(&mut self, length: bool, stop: Option<usize>, out: &mut String) {
        self.end_block(out);
        let stop = stop.and_then(|i| self.head.stops.get(i)).cloned();
        let reason = match (length, &stop) {
            (true, _) => "max_tokens",
            (_, Some(_)) => "stop_sequence",
            _ if self.calls > 0 => "tool_use",
            _ => "end_turn",
        };
        self.end = Some((reason, stop));
    }
}

/// Tokens as Anthropic counts them: those of the cache beside the others.
fn usage(total: Total) -> Value {
    json!({
        "input_tokens": total.prompt - total.cached, "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": total.cached, "output_tokens": total.generated,
    })
}

fn event(out: &mut String, kind: &str, mut value: Value) {
    value["type"] = json!(kind);
    *out += &format!("event: {kind}\ndata: {value}\n\n");
}

impl Encode for Blocks {
    fn encode(&mut self, step: Step, out: &mut String) {
        match step {
            Step::Begin => event(out, "message_start", json!({"message": self.message(None)})),
            Step::Update(Update::Prompt { .. }) => {}
            Step::Update(Update::Token { pieces, .. }) => self.pieces(pieces, out),
            Step::Update(Update::End { pieces, length, stop, .. }) => {
                self.pieces(pieces, out);
                self.close(length, stop, out);
            }
            Step::End(total) => {
                let (reason, stop) = self.end.clone().unwrap_or(("end_turn", None));
                let delta = json!({"stop_reason": reason, "stop_sequence": stop});
                event(out, "message_delta", json!({"delta": delta, "usage": usage(total)}));
                event(out, "message_stop", json!({}));
            }
            Step::Failed(e) => {
                let body = serde_json::to_value(RefusalBody::new(&e)).unwrap_or_default();
                event(out, "error", body);
            }
        }
    }
}
