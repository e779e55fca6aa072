//! Which path leads where.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State as Shared};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, header};
use axum::middleware::{self, Next};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post};
use tower_http::cors::{AllowHeaders, AllowOrigin, Any, CorsLayer};

use crate::anthropic::messages;
use crate::conversation::blocking;
use crate::error::{ApiError, Result};
use crate::openai::{chat, completions, plain, responses};
use crate::openapi;
use crate::state::State;

const REQUEST_ID: &str = "x-request-id";

pub(crate) fn router(state: Arc<State>) -> Router {
    Router::new()
        .route("/", get(page))
        .route("/v1/chat/completions", post(chat::handle))
        .route("/v1/completions", post(completions::handle))
        .route("/v1/responses", post(responses::handle))
        .route("/v1/messages", post(messages::handle))
        .route("/v1/messages/count_tokens", post(messages::count))
        .route("/v1/embeddings", post(plain::embeddings))
        .route("/v1/models", get(plain::models))
        .route("/v1/models/{*model}", get(plain::model))
        .route("/tokenize", post(plain::tokenize))
        .route("/detokenize", post(plain::detokenize))
        .route("/health", get(health))
        .route("/ready", get(health))
        .route("/ping", get(health))
        .route("/load", get(load))
        .route("/reset_prefix_cache", post(reset_prefix_cache))
        .route("/metrics", get(metrics))
        .route("/version", get(version))
        .route("/openapi.json", get(document))
        .fallback(|r: Request| async move { ApiError::route(r.method().as_str(), r.uri().path()) })
        .method_not_allowed_fallback(|r: Request| async move { ApiError::method(r.method().as_str(), r.uri().path()) })
        .layer(middleware::from_fn_with_state(state.clone(), request_id))
        .layer(cors(&state.config.allow_origins))
        .with_state(state)
}

/// What browsers are told about pages of other origins. Without any, they are told nothing, and ask for nothing.
fn cors(origins: &[String]) -> CorsLayer {
    if origins.is_empty() {
        return CorsLayer::new();
    }
    let layer = CorsLayer::new()
        .allow_methods([Method::GET, Method::POST])
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([HeaderName::from_static(REQUEST_ID), header::RETRY_AFTER])
        .max_age(Duration::from_secs(3600));
    if origins.iter().any(|o| o == "*") {
        return layer.allow_origin(Any);
    }
    layer.allow_origin(AllowOrigin::list(origins.iter().filter_map(|o| HeaderValue::from_str(o).ok())))
}

/// Gives every answer the id that the request came with, or a fresh one.
async fn request_id(Shared(state): Shared<Arc<State>>, request: Request, next: Next) -> Response {
    let given = request.headers().get(REQUEST_ID).filter(|v| (1..=128).contains(&v.len()) && v.to_str().is_ok());
    let id = given.cloned().or_else(|| HeaderValue::from_str(&format!("req_{}", state.fresh_id())).ok());
    let mut response = next.run(request).await;
    if let Some(id) = id {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

/// 200 while requests are taken: loaded, not draining, engine alive.
async fn health(Shared(state): Shared<Arc<State>>) -> Result<&'static str> {
    state.open()?;
    Ok("ok\n")
}

/// Requests that have not been answered, for balancers.
async fn load(Shared(state): Shared<Arc<State>>) -> Response {
    axum::Json(serde_json::json!({"server_load": state.metrics.in_flight()})).into_response()
}

/// Forgets cached prefixes that nobody uses: between two measurements, say.
async fn reset_prefix_cache(Shared(state): Shared<Arc<State>>, headers: HeaderMap) -> Result<()> {
    state.keys.check(&headers)?;
    blocking(&state, |state| Ok(state.open()?.forget_prefixes()?)).await
}

async fn metrics(Shared(state): Shared<Arc<State>>) -> Result<Response> {
    let backend = state.backend()?;
    let text = state.metrics.text(backend.model(), &backend.stats(), state.config.vllm_metrics);
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response())
}

async fn version() -> Response {
    axum::Json(serde_json::json!({"version": env!("CARGO_PKG_VERSION")})).into_response()
}

async fn document() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], openapi::DOCUMENT.as_str()).into_response()
}

/// The chat page: one file, which loads nothing else and talks to this server alone.
async fn page() -> Response {
    const POLICY: &str =
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:";
    ([(header::CONTENT_SECURITY_POLICY, POLICY)], Html(include_str!("page.html"))).into_response()
}
