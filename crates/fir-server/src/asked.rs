//! A body, read the same way by every endpoint: key first, then type and size, then JSON.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{FromRequest, Request};
use axum::http::header;
use futures_util::StreamExt;
use serde_json::{Map, Value};

use crate::error::{ApiError, Result};
use crate::metrics::InFlight;
use crate::state::State;

/// A JSON object somebody with a key has sent.
pub(crate) struct Asked {
    pub(crate) body: Value,
    /// By which this client's prefixes are shared.
    pub(crate) salt: u64,
    /// Until it is answered, or the engine has it, a drain waits for it.
    _flight: InFlight,
}

impl Asked {
    /// An error if the body has a field that is not `known`: a misspelt option must not be ignored in silence.
    pub(crate) fn known(&self, known: &Map<String, Value>) -> Result<()> {
        let fields = self.body.as_object().into_iter().flat_map(|o| o.keys());
        match fields.into_iter().find(|&f| !known.contains_key(f)) {
            Some(field) => Err(ApiError::invalid(field, format!("`{field}` is not a field of this request"))),
            None => Ok(()),
        }
    }
}

impl FromRequest<Arc<State>> for Asked {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &Arc<State>) -> Result<Self> {
        let salt = state.keys.check(request.headers())?;
        let kind = request.headers().get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or("");
        let json = kind.split(';').next().is_some_and(|k| k.trim().eq_ignore_ascii_case("application/json"));
        if !json {
            return Err(ApiError::content_type(kind));
        }
        let limit = state.config.limits.body;
        let told = request.headers().get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<usize>().ok());
        let bytes = read(request.into_body(), limit, told).await?;
        let body: Value =
            serde_json::from_slice(&bytes).map_err(|e| ApiError::body(format!("the body is not JSON: {e}")))?;
        if !body.is_object() {
            return Err(ApiError::body("the body is JSON, but not an object"));
        }
        Ok(Self { body, salt, _flight: state.metrics.enter() })
    }
}

/// A client that is still sending would not hear that it sends too much: for so long the rest is taken and dropped.
const DISCARD: Duration = Duration::from_secs(2);

/// The bytes of a body, at most `limit`; `told` is its length, if the client has said it.
async fn read(body: Body, limit: usize, told: Option<usize>) -> Result<Vec<u8>> {
    let mut stream = body.into_data_stream();
    let mut bytes = Vec::with_capacity(told.unwrap_or(0).min(limit));
    let mut large = told.is_some_and(|told| told > limit);
    while !large && let Some(part) = stream.next().await {
        let part = part.map_err(|e| ApiError::body(format!("the body could not be read: {e}")))?;
        large = bytes.len() + part.len() > limit;
        bytes.extend_from_slice(&part);
    }
    if !large {
        return Ok(bytes);
    }
    let _ = tokio::time::timeout(DISCARD, async { while let Some(Ok(_)) = stream.next().await {} }).await;
    Err(ApiError::too_large(limit))
}
