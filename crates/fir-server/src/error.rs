//! Errors as OpenAI's clients expect them: a status, and one object in the body.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use schemars::JsonSchema;
use serde::Serialize;

/// Seconds after which a client may try again, where nothing better is known.
const RETRY_AFTER: u64 = 1;

/// A refusal or failure, as it goes to the client.
#[derive(Clone, Debug)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) body: ErrorBody,
    /// Seconds, sent as `Retry-After`.
    retry_after: Option<u64>,
}

/// The body of every answer that is not a success.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub(crate) struct ErrorBody {
    pub(crate) error: ErrorObject,
}

/// What went wrong.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub(crate) struct ErrorObject {
    /// A sentence with the values that do not fit.
    pub(crate) message: String,
    /// The class of error, such as `invalid_request_error`.
    #[serde(rename = "type")]
    pub(crate) kind: &'static str,
    /// The field at fault.
    pub(crate) param: Option<String>,
    /// A name for programs, such as `model_not_found`.
    pub(crate) code: Option<&'static str>,
}

pub(crate) type Result<T, E = ApiError> = std::result::Result<T, E>;

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        let error = ErrorObject { message: message.into(), kind, param: None, code: None };
        Self { status, body: ErrorBody { error }, retry_after: None }
    }

    fn code(mut self, code: &'static str) -> Self {
        self.body.error.code = Some(code);
        self
    }

    /// 400: `param` has a value that cannot be.
    pub(crate) fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        let mut error = Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message);
        error.body.error.param = Some(param.into());
        error
    }

    /// 400: the prompt and the answer do not fit the model's context.
    pub(crate) fn context(param: &str, message: impl Into<String>) -> Self {
        Self::invalid(param, message).code("context_length_exceeded")
    }

    /// 400: the body is no JSON.
    pub(crate) fn body(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// 401.
    pub(crate) fn key(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "authentication_error", message).code("invalid_api_key")
    }

    /// 404: no such model.
    pub(crate) fn model(asked: &str, have: &str) -> Self {
        let message = format!("the model `{asked}` does not exist; this server has `{have}`");
        let mut error = Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message).code("model_not_found");
        error.body.error.param = Some("model".into());
        error
    }

    /// 404: no such route.
    pub(crate) fn route(method: &str, path: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", format!("there is no {method} {path}"))
            .code("unknown_url")
    }

    /// 405.
    pub(crate) fn method(method: &str, path: &str) -> Self {
        let message = format!("{path} does not take {method}");
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", message).code("method_not_supported")
    }

    /// 413.
    pub(crate) fn too_large(limit: usize) -> Self {
        let message = format!("the body is larger than {limit} bytes");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message).code("body_too_large")
    }

    /// 415: browsers send other types across origins unasked, so only JSON is taken.
    pub(crate) fn content_type(found: &str) -> Self {
        let message = format!("the body must be application/json, but its Content-Type is `{found}`");
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "invalid_request_error", message)
    }

    /// 500.
    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// 503: loading, draining, stopped, or waited too long.
    pub(crate) fn unavailable(message: impl Into<String>, code: &'static str) -> Self {
        let mut error = Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message).code(code);
        error.retry_after = Some(RETRY_AFTER);
        error
    }
}

impl ApiError {
    /// The same, with `seconds` for a client to wait if it is one that a later try may not meet.
    pub(crate) fn retry_after(mut self, seconds: u64) -> Self {
        self.retry_after = self.retry_after.map(|_| seconds);
        self
    }
}

impl From<fir_engine::Error> for ApiError {
    fn from(error: fir_engine::Error) -> Self {
        use fir_engine::Error::{Busy, Request, Stopped};
        let message = error.to_string();
        match error {
            Request { field, .. } => Self::invalid(field, message),
            Busy { .. } => {
                let mut error =
                    Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message).code("queue_full");
                error.retry_after = Some(RETRY_AFTER);
                error
            }
            Stopped(_) => Self::unavailable(message, "engine_stopped"),
            _ => Self::internal(message),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        self.with_body(&self.body)
    }
}

impl ApiError {
    /// The answer with its status and headers, in the words of `body`.
    pub(crate) fn with_body(&self, body: &impl Serialize) -> Response {
        let mut response = (self.status, axum::Json(body)).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
