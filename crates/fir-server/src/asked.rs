//! A body, read the same way by every endpoint: key first, then type and size, then JSON.

use std::sync::Arc;

use axum::extract::{FromRequest, Request};
use axum::http::header;
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
        if told.is_some_and(|told| told > limit) {
            return Err(ApiError::too_large(limit));
        }
        let bytes = axum::body::to_bytes(request.into_body(), limit).await.map_err(|e| {
            let large = std::error::Error::source(&e).is_some_and(|e| e.to_string().contains("length limit"));
            if large { ApiError::too_large(limit) } else { ApiError::body(format!("the body could not be read: {e}")) }
        })?;
        let body: Value =
            serde_json::from_slice(&bytes).map_err(|e| ApiError::body(format!("the body is not JSON: {e}")))?;
        if !body.is_object() {
            return Err(ApiError::body("the body is JSON, but not an object"));
        }
        Ok(Self { body, salt, _flight: state.metrics.enter() })
    }
}
