//! The endpoints that answer at once: models, tokens, embeddings.

use std::sync::{Arc, LazyLock};

use axum::Json;
use axum::extract::{Path, State as Shared};
use axum::http::HeaderMap;
use base64::prelude::{BASE64_STANDARD, Engine};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::completions::Prompt;
use super::messages::ChatMessages;
use crate::asked::Asked;
use crate::backend::ModelInfo;
use crate::conversation::{blocking, served};
use crate::error::{ApiError, Result};
use crate::params::{fields, part};
use crate::state::State;

/// The models there are.
#[derive(Serialize, JsonSchema)]
pub(crate) struct Models {
    object: &'static str,
    data: Vec<ModelObject>,
}

#[derive(Serialize, JsonSchema)]
pub(crate) struct ModelObject {
    id: String,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    /// Most tokens of a prompt and its answer.
    max_model_len: usize,
}

impl ModelObject {
    fn new(state: &State, model: &ModelInfo) -> Self {
        Self {
            id: model.id.clone(),
            object: "model",
            created: state.created,
            owned_by: "fir",
            max_model_len: model.context,
        }
    }
}

pub(crate) async fn models(Shared(state): Shared<Arc<State>>, headers: HeaderMap) -> Result<Json<Models>> {
    state.keys.check(&headers)?;
    let data = vec![ModelObject::new(&state, state.backend()?.model())];
    Ok(Json(Models { object: "list", data }))
}

pub(crate) async fn model(
    Shared(state): Shared<Arc<State>>,
    headers: HeaderMap,
    Path(name): Path<String>,
) -> Result<Json<ModelObject>> {
    state.keys.check(&headers)?;
    let model = state.backend()?.model();
    if name != model.id {
        return Err(ApiError::model(&name, &model.id));
    }
    Ok(Json(ModelObject::new(&state, model)))
}

/// A text or a conversation to be counted.
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct TokenizeRequest {
    model: Option<String>,
    /// A text; this or `messages`.
    prompt: Option<String>,
    messages: Option<ChatMessages>,
    /// Adds what the model wants at the beginning of a text; true by default.
    add_special_tokens: Option<bool>,
    /// Also tells the text of each token.
    return_token_strs: Option<bool>,
}

#[derive(Serialize, JsonSchema)]
pub(crate) struct Tokens {
    count: usize,
    max_model_len: usize,
    tokens: Vec<u32>,
    token_strs: Option<Vec<String>>,
}

pub(crate) static TOKENIZE: LazyLock<Map<String, Value>> = LazyLock::new(fields::<TokenizeRequest>);

pub(crate) async fn tokenize(Shared(state): Shared<Arc<State>>, asked: Asked) -> Result<Json<Tokens>> {
    served(&state)?;
    asked.known(&TOKENIZE)?;
    let request: TokenizeRequest = part(&asked.body)?;
    let work = move |state: &Arc<State>| {
        let backend = state.backend()?;
        check_model(&request.model, backend.model())?;
        let tokens = match (request.prompt, request.messages) {
            (Some(text), None) => backend.encode(&text, request.add_special_tokens != Some(false))?,
            (None, Some(messages)) => {
                let messages = Value::Array(messages.template_values()?);
                backend.encode(&backend.render(&messages, None, true, &Map::new())?, false)?
            }
            _ => return Err(ApiError::invalid("prompt", "one of `prompt` and `messages` must be given")),
        };
        let text = |&id: &u32| String::from_utf8_lossy(&backend.token_bytes(id)).into_owned();
        let token_strs = (request.return_token_strs == Some(true)).then(|| tokens.iter().map(text).collect());
        Ok(Tokens { count: tokens.len(), max_model_len: backend.model().context, tokens, token_strs })
    };
    Ok(Json(blocking(&state, work).await?))
}

#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct DetokenizeRequest {
    model: Option<String>,
    tokens: Vec<u32>,
}

#[derive(Serialize, JsonSchema)]
pub(crate) struct Detokenized {
    prompt: String,
}

pub(crate) static DETOKENIZE: LazyLock<Map<String, Value>> = LazyLock::new(fields::<DetokenizeRequest>);

pub(crate) async fn detokenize(Shared(state): Shared<Arc<State>>, asked: Asked) -> Result<Json<Detokenized>> {
    let (backend, _) = served(&state)?;
    asked.known(&DETOKENIZE)?;
    let request: DetokenizeRequest = part(&asked.body)?;
    check_model(&request.model, backend.model())?;
    let tokens = Prompt::Tokens(request.tokens).tokens("tokens", backend.as_ref(), false)?;
    Ok(Json(Detokenized { prompt: backend.decode(&tokens.concat())? }))
}

/// Texts whose meaning is wanted as vectors.
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct EmbeddingRequest {
    model: Option<String>,
    input: Prompt,
    #[schemars(extend("enum" = ["float", "base64", null]))]
    encoding_format: Option<String>,
    /// Only null: vectors are as long as the model's hidden states.
    dimensions: Option<usize>,
    /// Taken and not used.
    #[expect(dead_code, reason = "clients send it")]
    user: Option<String>,
}

#[derive(Serialize, JsonSchema)]
pub(crate) struct Embeddings {
    object: &'static str,
    data: Vec<Embedding>,
    model: String,
    usage: EmbeddingUsage,
}

#[derive(Serialize, JsonSchema)]
pub(crate) struct Embedding {
    object: &'static str,
    index: usize,
    /// Numbers, or their bytes (f32, little-endian) in base64.
    embedding: Value,
}

#[derive(Serialize, JsonSchema)]
struct EmbeddingUsage {
    prompt_tokens: usize,
    total_tokens: usize,
}

pub(crate) static EMBEDDINGS: LazyLock<Map<String, Value>> = LazyLock::new(fields::<EmbeddingRequest>);

pub(crate) async fn embeddings(Shared(state): Shared<Arc<State>>, asked: Asked) -> Result<Json<Embeddings>> {
    served(&state)?;
    asked.known(&EMBEDDINGS)?;
    let request: EmbeddingRequest = part(&asked.body)?;
    Ok(Json(blocking(&state, move |state| request.answer(state)).await?))
}

impl EmbeddingRequest {
    fn answer(self, state: &State) -> Result<Embeddings> {
        let backend = state.backend()?;
        let info = backend.model();
        check_model(&self.model, info)?;
        let base64 = match self.encoding_format.as_deref() {
            None | Some("float") => false,
            Some("base64") => true,
            Some(other) => {
                let message = format!("`encoding_format` is `{other}`, but must be `float` or `base64`");
                return Err(ApiError::invalid("encoding_format", message));
            }
        };
        if let Some(asked) = self.dimensions {
            let message = format!("`dimensions` is {asked}, but vectors cannot be shortened");
            return Err(ApiError::invalid("dimensions", message));
        }
        let inputs = self.input.tokens("input", backend.as_ref(), true)?;
        let most = state.config.limits.n;
        if inputs.is_empty() || inputs.len() > most {
            let message = format!("`input` has {} texts, but from 1 to {most} are taken", inputs.len());
            return Err(ApiError::invalid("input", message));
        }
        let mut data = Vec::with_capacity(inputs.len());
        for (index, tokens) in inputs.iter().enumerate() {
            let most = info.context.min(state.config.limits.prompt);
            if tokens.is_empty() || tokens.len() > most {
                let message = format!("`input` has a text of {} tokens, but from 1 to {most} are taken", tokens.len());
                return Err(ApiError::context("input", message));
            }
            let vector = backend.embed(tokens)?;
            let embedding = if base64 { Value::String(base64_of(&vector)) } else { json!(vector) };
            data.push(Embedding { object: "embedding", index, embedding });
        }
        let prompt_tokens = inputs.iter().map(Vec::len).sum();
        let usage = EmbeddingUsage { prompt_tokens, total_tokens: prompt_tokens };
        Ok(Embeddings { object: "list", data, model: info.id.clone(), usage })
    }
}

/// 404 if another model is asked for.
fn check_model(asked: &Option<String>, model: &ModelInfo) -> Result<()> {
    match asked.as_deref().filter(|&m| m != model.id) {
        Some(asked) => Err(ApiError::model(asked, &model.id)),
        None => Ok(()),
    }
}

/// The vector's bytes in base64, as OpenAI's client asks for by default.
fn base64_of(vector: &[f32]) -> String {
    let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
    BASE64_STANDARD.encode(bytes)
}
