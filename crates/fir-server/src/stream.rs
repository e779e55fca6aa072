//! Server-sent events: an answer as it is made.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::Response;
use serde::Serialize;

use crate::error::{ApiError, Result};
use crate::generation::{Generation, Total, Update};
use crate::state::State;

/// What an endpoint writes into its stream.
pub(crate) enum Step {
    Begin,
    Update(Update),
    End(Total),
    Failed(ApiError),
}

/// How an endpoint writes its stream: each step's events, appended to `out`.
pub(crate) trait Encode: Send + 'static {
    fn encode(&mut self, step: Step, out: &mut String);
}

/// Appends one event without a name.
pub(crate) fn data(out: &mut String, value: &impl Serialize) {
    match serde_json::to_string(value) {
        Ok(json) => {
            out.push_str("data: ");
            out.push_str(&json);
            out.push_str("\n\n");
        }
        // Our own types always are JSON; should one not be, the stream says so instead of going silent.
        Err(e) => out.push_str(&format!(": {e}\n\n")),
    }
}

/// Streams `generation`. What fails before the first token, or in the time of one keep-alive, still has a status of its own.
pub(crate) async fn respond(state: &Arc<State>, mut generation: Generation, encoder: impl Encode) -> Result<Response> {
    let keep_alive = state.config.keep_alive;
    if let Ok(result) = tokio::time::timeout(keep_alive, generation.peek()).await {
        result?;
    }
    let source = Source { generation, encoder, steps: VecDeque::from([Step::Begin]), ended: false };
    let stream = futures_util::stream::unfold(source, move |mut source| async move {
        // `next` loses nothing when it is dropped at an await, so a timeout is only a pause.
        let text = match tokio::time::timeout(keep_alive, source.next()).await {
            Ok(text) => text?,
            Err(_) => ": keep-alive\n\n".to_owned(),
        };
        Some((Ok::<_, Infallible>(Bytes::from(text)), source))
    });
    let mut response = Response::new(Body::from_stream(stream));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    Ok(response)
}

struct Source<E> {
    generation: Generation,
    encoder: E,
    steps: VecDeque<Step>,
    ended: bool,
}

impl<E: Encode> Source<E> {
    /// Everything that can be written by now, at least one event; none after the end.
    async fn next(&mut self) -> Option<String> {
        let mut out = String::new();
        loop {
            while let Some(step) = self.steps.pop_front() {
                self.ended |= matches!(step, Step::End(_) | Step::Failed(_));
                self.encoder.encode(step, &mut out);
            }
            if self.ended {
                return (!out.is_empty()).then_some(out);
            }
            let update = match out.is_empty() {
                true => self.generation.next().await,
                // What is already there goes out with it, in one write.
                false => match self.generation.ready() {
                    None if !self.generation.done() => return Some(out),
                    update => update,
                },
            };
            self.steps.push_back(match update {
                Some(Ok(update)) => Step::Update(update),
                Some(Err(e)) => Step::Failed(e),
                None => Step::End(self.generation.total),
            });
        }
    }
}
