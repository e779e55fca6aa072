//! The fields that every generating endpoint takes, checked and turned into the engine's [`Sampling`].

use std::collections::BTreeMap;
use std::fmt::Display;

use fir_engine::{Attention, Grammar, Sampling, Sparse};
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use crate::backend::{Backend, ModelInfo};
use crate::config::Limits;
use crate::error::{ApiError, Result};

/// Sampling and what goes with it.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub(crate) struct Common {
    /// The model's name, as `/v1/models` tells it.
    pub(crate) model: Option<String>,
    /// 0 takes the likeliest token; 1 by default.
    #[schemars(range(min = 0.0, max = 2.0))]
    temperature: Option<f32>,
    /// The likeliest tokens that together have this probability; 1 by default.
    #[schemars(range(min = 0.0, max = 1.0), extend("exclusiveMinimum" = 0))]
    top_p: Option<f32>,
    /// The likeliest so many tokens; 0 or -1 is all.
    #[schemars(range(min = -1, max = 2_147_483_647))]
    top_k: Option<i64>,
    /// Tokens with at least this share of the likeliest one's probability.
    #[schemars(range(min = 0.0, max = 1.0))]
    min_p: Option<f32>,
    /// Above 1 makes repetition less likely.
    #[schemars(range(min = 0.01, max = 10.0))]
    repetition_penalty: Option<f32>,
    #[schemars(range(min = -2.0, max = 2.0))]
    frequency_penalty: Option<f32>,
    #[schemars(range(min = -2.0, max = 2.0))]
    presence_penalty: Option<f32>,
    /// From token ids to what is added to their logits, -100 to 100.
    logit_bias: Option<BTreeMap<String, f32>>,
    /// The same seed gives the same answer.
    seed: Option<i64>,
    /// Answers to the one prompt.
    #[schemars(range(min = 1, max = 64))]
    n: Option<usize>,
    /// Texts that end the answer and are not part of it.
    stop: Option<OneOrMany>,
    /// Tokens that end the answer.
    stop_token_ids: Option<Vec<u32>>,
    /// No other tokens are chosen.
    allowed_token_ids: Option<Vec<u32>>,
    /// No end before so many tokens.
    min_tokens: Option<usize>,
    /// The model's own end does not end the answer.
    ignore_eos: Option<bool>,
    /// The answer comes as it is made, as server-sent events.
    pub(crate) stream: Option<bool>,
    #[serde(deserialize_with = "object")]
    stream_options: Option<StreamOptions>,
    /// What the answer must be an instance of.
    #[serde(deserialize_with = "object")]
    structured_outputs: Option<StructuredOutputs>,
    /// Larger runs first.
    priority: Option<i32>,
    /// Prefixes are shared only among requests with the same salt (and the same API key).
    #[schemars(length(max = 256))]
    pub(crate) cache_salt: Option<String>,
    /// Names the request in its answer's id.
    #[schemars(length(max = 128))]
    request_id: Option<String>,
    /// Taken and not used.
    user: Option<String>,
    /// What tokens attend to; all before them by default.
    #[serde(deserialize_with = "object")]
    attention: Option<AttentionField>,
    /// Words that must not come.
    bad_words: Option<Vec<String>>,
    /// The stop text that ended the answer is part of it.
    include_stop_str_in_output: Option<bool>,
    /// Only true, as special tokens are never part of the text.
    skip_special_tokens: Option<bool>,
    /// Only null; `/v1/completions` tells them with `echo` and `logprobs`.
    prompt_logprobs: Option<usize>,
}

/// What tokens attend to, for long texts.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "lowercase", deny_unknown_fields)]
enum AttentionField {
    /// The first and the last tokens, whatever lies between: a text of any length in the memory of these.
    Streaming {
        /// Tokens at the start that stay.
        #[serde(default = "sinks")]
        sinks: usize,
        /// Tokens at the end that stay.
        #[schemars(range(min = 1))]
        window: usize,
    },
    /// Tokens of the prompt see some blocks of it; those of the answer see all.
    Sparse {
        /// Tokens of a block.
        #[serde(default = "block")]
        #[schemars(range(min = 1))]
        block: usize,
        /// Blocks at the start that all see.
        #[serde(default = "one")]
        sinks: usize,
        /// Blocks before its own that a token sees.
        local: usize,
        /// Of those between, every so manyth; 0 is none.
        #[serde(default)]
        stride: usize,
    },
}

/// As many first tokens as models lean on, by the paper on streaming.
fn sinks() -> usize {
    4
}

fn block() -> usize {
    64
}

fn one() -> usize {
    1
}

/// One text or several.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "a text or a list of texts")]
pub(crate) enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
struct StreamOptions {
    /// A last chunk tells the usage.
    include_usage: Option<bool>,
    /// Only null or false.
    include_obfuscation: Option<bool>,
}

/// At most one of them.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct StructuredOutputs {
    /// A JSON schema.
    json: Option<Value>,
    /// A regular expression for the whole answer.
    regex: Option<String>,
    /// One of these texts.
    choice: Option<Vec<String>>,
    /// A grammar in Lark's notation.
    grammar: Option<String>,
}

/// `T` out of an object: serde would also take an array of its fields' values.
fn object<'de, D: Deserializer<'de>, T: serde::de::DeserializeOwned>(
    from: D,
) -> std::result::Result<Option<T>, D::Error> {
    let map = Option::<serde_json::Map<String, Value>>::deserialize(from)?;
    map.map(|map| serde_json::from_value(Value::Object(map)).map_err(serde::de::Error::custom)).transpose()
}

/// The names of the fields of `T`, from its schema.
pub(crate) fn fields<T: JsonSchema>() -> serde_json::Map<String, Value> {
    match schemars::schema_for!(T).remove("properties") {
        Some(Value::Object(fields)) => fields,
        _ => serde_json::Map::new(),
    }
}

/// `T` out of a body that may hold fields of others.
pub(crate) fn part<T: serde::de::DeserializeOwned>(body: &Value) -> Result<T> {
    serde_path_to_error::deserialize(body).map_err(|e| {
        let path = e.path().to_string();
        match path.as_str() {
            // Of the body itself: a field is missing.
            "." => ApiError::body(e.into_inner().to_string()),
            _ => ApiError::invalid(path.clone(), format!("`{path}`: {}", e.into_inner())),
        }
    })
}

/// An error if `value` is outside of `min..=max`.
pub(crate) fn within<T: PartialOrd + Display + Copy>(param: &str, value: T, min: T, max: T) -> Result<T> {
    if value >= min && value <= max {
        return Ok(value);
    }
    Err(ApiError::invalid(param, format!("`{param}` is {value}, but must be from {min} to {max}")))
}

impl Common {
    /// Whether the stream ends with a chunk that tells the usage.
    pub(crate) fn usage_chunk(&self) -> bool {
        self.stream_options.as_ref().is_some_and(|o| o.include_usage == Some(true))
    }

    /// Answers to each prompt.
    pub(crate) fn n(&self, limits: &Limits) -> Result<usize> {
        within("n", self.n.unwrap_or(1), 1, limits.n)
    }

    pub(crate) fn priority(&self) -> i32 {
        self.priority.unwrap_or(0)
    }

    /// The id of the answer.
    pub(crate) fn id(&self, prefix: &str, fresh: impl FnOnce() -> String) -> Result<String> {
        let id = match &self.request_id {
            None => fresh(),
            Some(id) => {
                within("request_id", id.len(), 1, 128)?;
                id.clone()
            }
        };
        Ok(format!("{prefix}-{id}"))
    }

    /// The engine's view, with everything checked that the engine does not know of.
    pub(crate) fn sampling(&self, model: &ModelInfo, limits: &Limits) -> Result<Sampling> {
        self.refuse()?;
        if let Some(asked) = self.model.as_deref().filter(|&m| m != model.id) {
            return Err(ApiError::model(asked, &model.id));
        }
        if let Some(salt) = &self.cache_salt {
            within("cache_salt", salt.len(), 0, 256)?;
        }
        let top_p = within("top_p", self.top_p.unwrap_or(1.0), 0.0, 1.0)?;
        if top_p == 0.0 {
            return Err(ApiError::invalid("top_p", "`top_p` is 0, but must be above it"));
        }
        Ok(Sampling {
            temperature: within("temperature", self.temperature.unwrap_or(1.0), 0.0, 2.0)?,
            top_p,
            top_k: within("top_k", self.top_k.unwrap_or(0), -1, i64::from(i32::MAX))?.max(0) as u32,
            min_p: within("min_p", self.min_p.unwrap_or(0.0), 0.0, 1.0)?,
            repetition_penalty: within("repetition_penalty", self.repetition_penalty.unwrap_or(1.0), 0.01, 10.0)?,
            frequency_penalty: within("frequency_penalty", self.frequency_penalty.unwrap_or(0.0), -2.0, 2.0)?,
            presence_penalty: within("presence_penalty", self.presence_penalty.unwrap_or(0.0), -2.0, 2.0)?,
            logit_bias: self.bias(model, limits)?,
            allowed_tokens: self.tokens("allowed_token_ids", &self.allowed_token_ids, usize::MAX, model)?,
            seed: self.seed.map(i64::cast_unsigned),
            min_tokens: within("min_tokens", self.min_tokens.unwrap_or(0), 0, model.context)?,
            stop: self.stop(limits)?,
            stop_ids: self
                .tokens("stop_token_ids", &self.stop_token_ids, limits.logit_bias, model)?
                .unwrap_or_default(),
            include_stop: self.include_stop_str_in_output.unwrap_or(false),
            ignore_eos: self.ignore_eos.unwrap_or(false),
            grammar: self.structured_outputs.as_ref().map(|s| s.grammar(limits)).transpose()?.flatten(),
            ..Sampling::default()
        })
    }

    /// Errors for what is known and not offered.
    fn refuse(&self) -> Result<()> {
        let no = |param: &str, asked: bool, why: &str| match asked {
            true => Err(ApiError::invalid(param, format!("`{param}`: {why}"))),
            false => Ok(()),
        };
        let streams = self.stream == Some(true);
        no("stream_options", self.stream_options.is_some() && !streams, "only goes with `stream`: true")?;
        let obfuscate = self.stream_options.as_ref().is_some_and(|o| o.include_obfuscation == Some(true));
        no("stream_options.include_obfuscation", obfuscate, "is not offered")?;
        no(
            "skip_special_tokens",
            self.skip_special_tokens == Some(false),
            "special tokens are never part of the text",
        )?;
        no(
            "prompt_logprobs",
            self.prompt_logprobs.is_some(),
            "is not offered; /v1/completions tells them with `echo` and `logprobs`",
        )
    }

    /// What tokens attend to.
    pub(crate) fn attention(&self) -> Result<Attention> {
        Ok(match self.attention {
            None => Attention::Full,
            Some(AttentionField::Streaming { sinks, window }) => {
                Attention::Streaming { sinks, window: within("attention.window", window, 1, usize::MAX)? }
            }
            Some(AttentionField::Sparse { block, sinks, local, stride }) => {
                let block = within("attention.block", block, 1, usize::MAX)?;
                Attention::Sparse(Sparse { block, sinks, local, stride })
            }
        })
    }

    /// The tokens of words that must not come, at the start of a text and after a space.
    pub(crate) fn bad_tokens(&self, backend: &dyn Backend, limits: &Limits) -> Result<Vec<Vec<u32>>> {
        let words = self.bad_words.as_deref().unwrap_or_default();
        if words.len() > limits.logit_bias {
            let message =
                format!("`bad_words` has {} entries, but at most {} are taken", words.len(), limits.logit_bias);
            return Err(ApiError::invalid("bad_words", message));
        }
        let mut lists = Vec::with_capacity(2 * words.len());
        for word in words {
            if word.trim().is_empty() || word.len() > limits.stop_bytes {
                let most = limits.stop_bytes;
                let message = format!("`bad_words` has a word of {} bytes, but must be from 1 to {most}", word.len());
                return Err(ApiError::invalid("bad_words", message));
            }
            for text in [word.trim_start().to_owned(), format!(" {}", word.trim_start())] {
                lists.push(backend.encode(&text, false)?);
            }
        }
        lists.retain(|list| !list.is_empty());
        lists.sort_unstable();
        lists.dedup();
        Ok(lists)
    }

    fn stop(&self, limits: &Limits) -> Result<Vec<String>> {
        let texts = match &self.stop {
            None => return Ok(Vec::new()),
            Some(OneOrMany::One(text)) => vec![text.clone()],
            Some(OneOrMany::Many(texts)) => texts.clone(),
        };
        if texts.len() > limits.stop {
            let message = format!("`stop` has {} texts, but at most {} are taken", texts.len(), limits.stop);
            return Err(ApiError::invalid("stop", message));
        }
        for text in &texts {
            if text.is_empty() || text.len() > limits.stop_bytes {
                let message =
                    format!("`stop` has a text of {} bytes, but must be from 1 to {}", text.len(), limits.stop_bytes);
                return Err(ApiError::invalid("stop", message));
            }
        }
        Ok(texts)
    }

    fn bias(&self, model: &ModelInfo, limits: &Limits) -> Result<Vec<(u32, f32)>> {
        let Some(bias) = &self.logit_bias else { return Ok(Vec::new()) };
        if bias.len() > limits.logit_bias {
            let message =
                format!("`logit_bias` has {} entries, but at most {} are taken", bias.len(), limits.logit_bias);
            return Err(ApiError::invalid("logit_bias", message));
        }
        let entry = |(key, &value): (&String, &f32)| {
            let Some(id) = key.parse().ok().filter(|&id: &u32| (id as usize) < model.vocab) else {
                let message = format!("`logit_bias` names token `{key}`, but tokens go from 0 to {}", model.vocab - 1);
                return Err(ApiError::invalid("logit_bias", message));
            };
            Ok((id, within("logit_bias", value, -100.0, 100.0)?))
        };
        bias.iter().map(entry).collect()
    }

    fn tokens(&self, param: &str, ids: &Option<Vec<u32>>, most: usize, model: &ModelInfo) -> Result<Option<Vec<u32>>> {
        let Some(ids) = ids else { return Ok(None) };
        if ids.len() > most.min(model.vocab) {
            let most = most.min(model.vocab);
            let message = format!("`{param}` has {} entries, but at most {most} are taken", ids.len());
            return Err(ApiError::invalid(param, message));
        }
        if let Some(id) = ids.iter().find(|&&id| id as usize >= model.vocab) {
            let message = format!("`{param}` names token {id}, but tokens go from 0 to {}", model.vocab - 1);
            return Err(ApiError::invalid(param, message));
        }
        Ok(Some(ids.clone()))
    }
}

impl StructuredOutputs {
    fn grammar(&self, limits: &Limits) -> Result<Option<Grammar>> {
        let param = "structured_outputs";
        let given = [self.json.is_some(), self.regex.is_some(), self.choice.is_some(), self.grammar.is_some()];
        let given = given.iter().filter(|&&g| g).count();
        if given > 1 {
            let message = format!("`{param}` has {given} of json, regex, choice and grammar, but must have one");
            return Err(ApiError::invalid(param, message));
        }
        let sized = |name: &str, text: &str| match text.len() > limits.schema {
            true => Err(too_long(&format!("{param}.{name}"), text.len(), limits)),
            false => Ok(text.to_owned()),
        };
        Ok(match self {
            // Some clients send the schema as its text.
            Self { json: Some(Value::String(text)), .. } => {
                let schema = serde_json::from_str(text)
                    .map_err(|e| ApiError::invalid("structured_outputs.json", format!("`{param}.json`: {e}")))?;
                Some(Grammar::JsonSchema(schema_text("structured_outputs.json", &schema, limits)?))
            }
            Self { json: Some(schema), .. } => {
                Some(Grammar::JsonSchema(schema_text("structured_outputs.json", schema, limits)?))
            }
            Self { regex: Some(text), .. } => Some(Grammar::Regex(sized("regex", text)?)),
            Self { grammar: Some(text), .. } => Some(Grammar::Lark(sized("grammar", text)?)),
            Self { choice: Some(texts), .. } => {
                if texts.is_empty() || texts.iter().any(String::is_empty) {
                    return Err(ApiError::invalid(
                        "structured_outputs.choice",
                        format!("`{param}.choice` needs texts that are not empty"),
                    ));
                }
                sized("choice", &texts.concat())?;
                Some(Grammar::Choice(texts.clone()))
            }
            _ => None,
        })
    }
}

fn too_long(param: &str, found: usize, limits: &Limits) -> ApiError {
    ApiError::invalid(param, format!("`{param}` has {found} bytes, but at most {} are taken", limits.schema))
}

/// A schema's text, if it is of a size that may be compiled.
pub(crate) fn schema_text(param: &str, schema: &Value, limits: &Limits) -> Result<String> {
    if !schema.is_object() {
        return Err(ApiError::invalid(param, format!("`{param}` must be a JSON schema: an object")));
    }
    let depth = depth(schema);
    if depth > limits.schema_depth {
        let message = format!("`{param}` is {depth} levels deep, but at most {} are taken", limits.schema_depth);
        return Err(ApiError::invalid(param, message));
    }
    let text = schema.to_string();
    if text.len() > limits.schema { Err(too_long(param, text.len(), limits)) } else { Ok(text) }
}

/// Levels of objects and arrays; serde_json's own limit of 128 bounds the recursion.
fn depth(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(depth).max().unwrap_or(0),
        Value::Object(fields) => 1 + fields.values().map(depth).max().unwrap_or(0),
        _ => 0,
    }
}
