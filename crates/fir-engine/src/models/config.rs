//! [`ModelConfig`]: all that differs between models, as data; from GGUF's metadata or a `config.json`.

use std::path::Path;

use fir::moe::{Gate, Groups, Routing, Score};
use serde_json::Value as Json;

use super::rope::{RopeConfig, Scaling};
use crate::error::{Error, Result};
use crate::weights::gguf::Meta;

/// Sizes and rules of a model.
#[derive(Clone, Debug)]
pub struct ModelConfig {
    /// What its files call it.
    pub name: String,
    /// Family: `llama`, `qwen2`, `qwen3`, `qwen3moe`, `gemma3`, `deepseek2`, `deepseek3`, by GGUF's names.
    pub arch: String,
    /// Layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of a dense feed-forward layer.
    pub inter: usize,
    /// Query heads.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Elements of a head; with latent attention, of a query before compression.
    pub head_dim: usize,
    /// Tokens of the vocabulary: rows of the embedding.
    pub vocab: usize,
    /// Longest sequence it was made for.
    pub context: usize,
    /// Tokens that end an answer.
    pub eos: Vec<u32>,
    /// Token that begins a sequence.
    pub bos: Option<u32>,
    /// Added to mean squares.
    pub eps: f32,
    /// Rotation of queries and keys.
    pub rope: RopeConfig,
    /// The same for layers with a window, where it differs.
    pub rope_local: Option<RopeConfig>,
    /// Per layer: how many tokens a query sees, itself included.
    pub windows: Vec<Option<usize>>,
    /// Factor of the scores.
    pub sm_scale: f32,
    /// Bound of the scores: `c * tanh(score / c)`.
    pub attn_soft_cap: Option<f32>,
    /// Bound of the logits.
    pub final_soft_cap: Option<f32>,
    /// Factor of the embedding.
    pub embed_scale: f32,
    /// Function of the feed-forward layer's gate.
    pub gate: Gate,
    /// What a checkpoint's norm weights lack: 1 for Gemma.
    pub norm_shift: f32,
    /// Latent attention.
    pub mla: Option<MlaConfig>,
    /// Mixture of experts.
    pub moe: Option<MoeConfig>,
}

/// Latent attention's sizes.
#[derive(Clone, Copy, Debug)]
pub struct MlaConfig {
    /// Elements of a compressed query; 0 without compression.
    pub q_rank: usize,
    /// Elements of the compressed key and value.
    pub kv_rank: usize,
    /// Elements of a query head that do not rotate.
    pub nope: usize,
    /// Elements of a query head that rotate.
    pub rope: usize,
    /// Elements of a value head.
    pub v: usize,
}

/// A mixture of experts.
#[derive(Clone, Copy, Debug)]
pub struct MoeConfig {
    /// How many there are.
    pub experts: usize,
    /// How many a token uses.
    pub top_k: usize,
    /// Width of an expert.
    pub inter: usize,
    /// Width of the experts that all tokens use, together; 0 without.
    pub shared: usize,
    /// Layers before the first with experts.
    pub first: usize,
    /// Every so manyth layer after that has experts.
    pub step: usize,
    /// How experts are chosen.
    pub routing: Routing,
}

impl MoeConfig {
    /// Whether layer `i` has experts.
    pub(crate) fn at(&self, i: usize) -> bool {
        i >= self.first && (i + 1).is_multiple_of(self.step.max(1))
    }
}

impl ModelConfig {
    /// From the metadata of a GGUF file.
    pub(crate) fn from_gguf(meta: &Meta) -> Result<Self> {
        let file_arch = meta.text("general.architecture")?.to_string();
        let arch = match file_arch.as_str() {
            "llama" | "qwen2" | "qwen3" | "qwen3moe" | "gemma3" | "deepseek2" => file_arch.clone(),
            _ => {
                let want = "llama, qwen2, qwen3, qwen3moe, gemma3 or deepseek2";
                return Err(meta.wrong("general.architecture", want));
            }
        };
        let key = |k: &str| format!("{file_arch}.{k}");
        let number = |k: &str| meta.number(&key(k));
        let maybe = |k: &str| meta.opt_number(&key(k));
        let float = |k: &str| meta.opt_float(&key(k));
        let (layers, hidden, heads) =
            (number("block_count")?, number("embedding_length")?, number("attention.head_count")?);
        let kv_heads = maybe("attention.head_count_kv")?.unwrap_or(heads);
        let mut head_dim = maybe("attention.key_length")?.unwrap_or(hidden / heads.max(1));
        let context = number("context_length")?;
        let gemma = arch == "gemma3";
        let mla = if arch == "deepseek2" {
            let kv_rank = number("attention.kv_lora_rank")?;
            let rope = number("rope.dimension_count")?;
            // Newer files state the heads as they are before compression under names of their own.
            let key_len = maybe("attention.key_length_mla")?.unwrap_or(head_dim);
            let v = maybe("attention.value_length_mla")?.or(maybe("attention.value_length")?).unwrap_or(key_len);
            head_dim = key_len;
            let nope = key_len
                .checked_sub(rope)
                .ok_or_else(|| meta.wrong(&key("rope.dimension_count"), "less than a head"))?;
            Some(MlaConfig { q_rank: maybe("attention.q_lora_rank")?.unwrap_or(0), kv_rank, nope, rope, v })
        } else {
            None
        };
        let rotary = mla.map_or(head_dim, |m| m.rope);
        let theta = float("rope.freq_base").unwrap_or(1e4);
        let factor = float("rope.scaling.factor").unwrap_or(1.0);
        let old = float("rope.scaling.original_context_length").unwrap_or(context as f64);
        let scaling = match meta.get(&key("rope.scaling.type")).and_then(|v| v.text()) {
            None | Some("none") => Scaling::None,
            Some("linear") => Scaling::Linear(factor),
            Some("yarn") => {
                let mscale = float("rope.scaling.yarn_log_multiplier").map(|m| m / 0.1);
                Scaling::Yarn {
                    factor,
                    old,
                    fast: 32.0,
                    slow: 1.0,
                    attention: mscale.map_or(1.0 + 0.1 * factor.ln(), |_| 1.0),
                    mscale,
                }
            }
            Some(_) => return Err(meta.wrong(&key("rope.scaling.type"), "none, linear or yarn")),
        };
        let interleave = matches!(arch.as_str(), "llama" | "deepseek2");
        let mut rope = RopeConfig { theta, rotary, interleave, scaling, factors: None };
        let window = maybe("attention.sliding_window")?.filter(|&w| w > 0 && gemma);
        // Five layers with a window, then one without.
        let windows = (0..layers).map(|i| window.filter(|_| (i + 1) % 6 != 0)).collect();
        let mut rope_local = None;
        if gemma {
            rope_local = Some(RopeConfig { theta: 1e4, scaling: Scaling::None, ..rope.clone() });
            rope.theta = float("rope.freq_base").unwrap_or(1e6);
        }
        let moe = match maybe("expert_count")?.filter(|&n| n > 0) {
            None => None,
            Some(experts) => {
                let sigmoid = maybe("expert_gating_func")? == Some(2);
                let groups = maybe("expert_group_count")?.filter(|&n| n > 1);
                let groups = groups.map(|count| -> Result<Groups> {
                    Ok(Groups { count, chosen: number("expert_group_used_count")? })
                });
                let renormalize = match meta.get(&key("expert_weights_norm")) {
                    Some(crate::weights::gguf::Value::Bool(b)) => *b,
                    _ => mla.is_none(),
                };
                let inter = maybe("expert_feed_forward_length")?.map_or_else(|| number("feed_forward_length"), Ok)?;
                Some(MoeConfig {
                    experts,
                    top_k: number("expert_used_count")?,
                    inter,
                    shared: maybe("expert_shared_count")?.unwrap_or(0) * inter,
                    first: maybe("leading_dense_block_count")?.unwrap_or(0),
                    step: 1,
                    routing: Routing {
                        score: if sigmoid { Score::Sigmoid } else { Score::Softmax },
                        renormalize,
                        groups: groups.transpose()?,
                        scale: float("expert_weights_scale").filter(|&s| s > 0.0).unwrap_or(1.0) as f32,
                    },
                })
            }
        };
        let name = meta.get("general.name").and_then(|v| v.text()).unwrap_or(&arch).to_string();
        let vocab = meta.get("tokenizer.ggml.tokens").and_then(|v| v.list()).map_or(0, <[_]>::len);
        let id = |k: &str| meta.get(k).and_then(|v| v.int()).and_then(|n| u32::try_from(n).ok());
        let mut eos: Vec<u32> =
            ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"]
                .into_iter()
                .filter_map(id)
                .collect();
        eos.dedup();
        let scale_of = 1.0 / (head_dim as f32).sqrt();
        let yarn = rope.scaling.mscale();
        let config = Self {
            name,
            layers,
            hidden,
            inter: number("feed_forward_length")?,
            heads,
            kv_heads,
            head_dim,
            vocab,
            context,
            eos,
            bos: id("tokenizer.ggml.bos_token_id"),
            eps: float("attention.layer_norm_rms_epsilon").unwrap_or(1e-5) as f32,
            rope,
            rope_local,
            windows,
            sm_scale: scale_of * yarn * yarn,
            attn_soft_cap: float("attn_logit_softcapping").map(|x| x as f32),
            final_soft_cap: float("final_logit_softcapping").map(|x| x as f32),
            embed_scale: if gemma { (hidden as f32).sqrt() } else { 1.0 },
            gate: if gemma { Gate::GeluTanh } else { Gate::Silu },
            norm_shift: 0.0,
            mla,
            moe,
            arch,
        };
        config.check(meta.text("general.architecture")?)
    }

    /// From `config.json` (and `generation_config.json`, for the tokens that end an answer).
    pub(crate) fn from_json(folder: &Path) -> Result<Self> {
        let path = folder.join("config.json");
        let shown = path.display().to_string();
        let outer = read_json(&path)?;
        // Models that also see have their language part inside.
        let text = outer.get("text_config").unwrap_or(&outer);
        let j = Fields { json: text, path: &shown };
        let kind = j.text("model_type")?;
        let arch = match kind {
            "llama" | "mistral" => "llama",
            "qwen2" => "qwen2",
            "qwen3" => "qwen3",
            "qwen3_moe" => "qwen3moe",
            "gemma3_text" | "gemma3" => "gemma3",
            "deepseek_v2" => "deepseek2",
            "deepseek_v3" => "deepseek3",
            other => {
                let want = "llama, mistral, qwen2, qwen3, qwen3_moe, gemma3_text, deepseek_v2 or deepseek_v3";
                return Err(j.wrong("model_type", other, want));
            }
        };
        let gemma = arch == "gemma3";
        let (layers, hidden, heads) =
            (j.number("num_hidden_layers")?, j.number("hidden_size")?, j.number("num_attention_heads")?);
        let mla = if arch.starts_with("deepseek") {
            Some(MlaConfig {
                q_rank: j.maybe("q_lora_rank")?.unwrap_or(0),
                kv_rank: j.number("kv_lora_rank")?,
                nope: j.number("qk_nope_head_dim")?,
                rope: j.number("qk_rope_head_dim")?,
                v: j.number("v_head_dim")?,
            })
        } else {
            None
        };
        let head_dim = match mla {
            Some(m) => m.nope + m.rope,
            None => j.maybe("head_dim")?.unwrap_or(hidden / heads.max(1)),
        };
        let kv_heads = j.maybe("num_key_value_heads")?.unwrap_or(heads);
        let context = j.maybe("max_position_embeddings")?.unwrap_or(2048);
        let rotary = mla.map_or(head_dim, |m| m.rope);
        let interleave = mla.is_some() && text.get("rope_interleave").and_then(Json::as_bool).unwrap_or(true);
        let rope_of =
            |kind: &str, theta: f64| RopeConfig::from_json(text, &shown, kind, theta, rotary, interleave, context);
        let (rope, rope_local) = if gemma {
            let local = rope_of("sliding_attention", j.float("rope_local_base_freq").unwrap_or(1e4))?;
            (rope_of("full_attention", j.float("rope_theta").unwrap_or(1e6))?, Some(local))
        } else {
            (rope_of("full_attention", j.float("rope_theta").unwrap_or(1e4))?, None)
        };
        let windows = windows(&j, arch, layers)?;
        let moe = moe_of(&j, arch)?;
        let scale_dim = j.float("query_pre_attn_scalar").filter(|_| gemma).unwrap_or(head_dim as f64);
        let yarn = rope.scaling.mscale();
        let gate = match text.get("hidden_act").or(text.get("hidden_activation")).and_then(Json::as_str) {
            Some("silu") => Gate::Silu,
            Some("gelu_pytorch_tanh") => Gate::GeluTanh,
            Some("gelu") => Gate::Gelu,
            None => {
                if gemma {
                    Gate::GeluTanh
                } else {
                    Gate::Silu
                }
            }
            Some(other) => return Err(j.wrong("hidden_act", other, "silu, gelu or gelu_pytorch_tanh")),
        };
        let generation = folder.join("generation_config.json");
        let generation = if generation.exists() { Some(read_json(&generation)?) } else { None };
        let mut eos = Vec::new();
        for from in [generation.as_ref(), Some(text), Some(&outer)].into_iter().flatten() {
            for id in ids(from.get("eos_token_id")) {
                if !eos.contains(&id) {
                    eos.push(id);
                }
            }
        }
        let config = Self {
            name: folder.file_name().map_or(arch.into(), |n| n.to_string_lossy().into_owned()),
            arch: arch.to_string(),
            layers,
            hidden,
            inter: j.number("intermediate_size")?,
            heads,
            kv_heads,
            head_dim,
            vocab: j.number("vocab_size")?,
            context,
            eos,
            bos: ids(text.get("bos_token_id")).first().copied(),
            eps: j.float("rms_norm_eps").unwrap_or(1e-6) as f32,
            rope,
            rope_local,
            windows,
            sm_scale: (1.0 / scale_dim.sqrt()) as f32 * yarn * yarn,
            attn_soft_cap: j.float("attn_logit_softcapping").map(|x| x as f32),
            final_soft_cap: j.float("final_logit_softcapping").map(|x| x as f32),
            embed_scale: if gemma { (hidden as f32).sqrt() } else { 1.0 },
            gate,
            norm_shift: if gemma { 1.0 } else { 0.0 },
            mla,
            moe,
        };
        config.check(&shown)
    }

    /// Sizes that no forward could use.
    fn check(self, path: &str) -> Result<Self> {
        let wrong = |why: String| Err(Error::Model { path: path.into(), why });
        for (name, n) in [
            ("layers", self.layers),
            ("hidden size", self.hidden),
            ("heads", self.heads),
            ("KV heads", self.kv_heads),
            ("head size", self.head_dim),
            ("vocabulary", self.vocab),
            ("context", self.context),
        ] {
            if n == 0 || n > 1 << 28 {
                return wrong(format!("{name} is {n}, expected 1 to 2^28"));
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return wrong(format!("{} heads are no multiple of {} KV heads", self.heads, self.kv_heads));
        }
        if !self.rope.rotary.is_multiple_of(2) {
            return wrong(format!("{} elements of a head rotate, expected an even number", self.rope.rotary));
        }
        if let Some(moe) = &self.moe
            && (moe.top_k == 0 || moe.top_k > moe.experts)
        {
            return wrong(format!("{} experts of {} for a token", moe.top_k, moe.experts));
        }
        Ok(self)
    }

    /// Width of all projections of a token that attention begins with: queries, keys, values.
    pub(crate) fn qkv(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }
}

/// Per layer, how many tokens a query sees.
fn windows(j: &Fields<'_>, arch: &str, layers: usize) -> Result<Vec<Option<usize>>> {
    let window = j.maybe("sliding_window")?.filter(|&w| w > 0);
    if let Some(types) = j.json.get("layer_types").and_then(Json::as_array) {
        if types.len() < layers {
            return Err(j.wrong("layer_types", &format!("{} layers", types.len()), &layers.to_string()));
        }
        return Ok(types.iter().take(layers).map(|t| window.filter(|_| t == "sliding_attention")).collect());
    }
    let pattern = j.maybe("sliding_window_pattern")?.unwrap_or(6).max(1);
    let sliding = j.json.get("use_sliding_window").and_then(Json::as_bool).unwrap_or(arch == "llama");
    let first = j.maybe("max_window_layers")?.unwrap_or(0);
    Ok((0..layers)
        .map(|i| match arch {
            "gemma3" => window.filter(|_| (i + 1) % pattern != 0),
            "llama" => window,
            _ => window.filter(|_| sliding && i >= first),
        })
        .collect())
}

fn moe_of(j: &Fields<'_>, arch: &str) -> Result<Option<MoeConfig>> {
    let yes = |name: &str, or: bool| j.json.get(name).and_then(Json::as_bool).unwrap_or(or);
    Ok(match arch {
        "qwen3moe" => {
            if j.json.get("mlp_only_layers").and_then(Json::as_array).is_some_and(|l| !l.is_empty()) {
                return Err(j.wrong("mlp_only_layers", "a list", "an empty one"));
            }
            Some(MoeConfig {
                experts: j.maybe("num_local_experts")?.map_or_else(|| j.number("num_experts"), Ok)?,
                top_k: j.number("num_experts_per_tok")?,
                inter: j.number("moe_intermediate_size")?,
                shared: 0,
                first: 0,
                step: j.maybe("decoder_sparse_step")?.unwrap_or(1),
                routing: Routing { renormalize: yes("norm_topk_prob", false), ..Routing::default() },
            })
        }
        "deepseek2" | "deepseek3" if j.maybe("n_routed_experts")?.is_some() => {
            let v3 = arch == "deepseek3";
            let count = j.maybe("n_group")?.unwrap_or(1);
            let limited = v3 || j.json.get("topk_method").and_then(Json::as_str) == Some("group_limited_greedy");
            if !v3 && limited && count > 1 {
                let want = "greedy: groups are chosen by their best two experts, as version 3 does";
                return Err(j.wrong("topk_method", "group_limited_greedy", want));
            }
            let groups =
                if limited && count > 1 { Some(Groups { count, chosen: j.number("topk_group")? }) } else { None };
            let inter = j.number("moe_intermediate_size")?;
            Some(MoeConfig {
                experts: j.number("n_routed_experts")?,
                top_k: j.number("num_experts_per_tok")?,
                inter,
                shared: j.maybe("n_shared_experts")?.unwrap_or(0) * inter,
                first: j.maybe("first_k_dense_replace")?.unwrap_or(0),
                step: j.maybe("moe_layer_freq")?.unwrap_or(1),
                routing: Routing {
                    score: if v3 { Score::Sigmoid } else { Score::Softmax },
                    renormalize: v3 && yes("norm_topk_prob", true),
                    groups,
                    scale: j.float("routed_scaling_factor").unwrap_or(1.0) as f32,
                },
            })
        }
        _ => None,
    })
}

fn ids(value: Option<&Json>) -> Vec<u32> {
    let one = |v: &Json| v.as_u64().and_then(|n| u32::try_from(n).ok());
    match value {
        Some(Json::Array(list)) => list.iter().filter_map(one).collect(),
        Some(v) => one(v).into_iter().collect(),
        None => vec![],
    }
}

/// A JSON file.
pub(crate) fn read_json(path: &Path) -> Result<Json> {
    let shown = path.display().to_string();
    let text = std::fs::read_to_string(path).map_err(|source| Error::Io { path: shown.clone(), source })?;
    serde_json::from_str(&text).map_err(|e| Error::Model { path: shown, why: e.to_string() })
}

/// Fields of a JSON object, with errors that name them.
pub(crate) struct Fields<'a> {
    pub(crate) json: &'a Json,
    pub(crate) path: &'a str,
}

impl<'a> Fields<'a> {
    pub(crate) fn wrong(&self, name: &str, got: &str, want: &str) -> Error {
        Error::Model { path: self.path.into(), why: format!("`{name}` is {got}, expected {want}") }
    }

    pub(crate) fn text(&self, name: &str) -> Result<&'a str> {
        self.json.get(name).and_then(Json::as_str).ok_or_else(|| self.wrong(name, "missing", "a text"))
    }

    pub(crate) fn number(&self, name: &str) -> Result<usize> {
        self.maybe(name)?.ok_or_else(|| self.wrong(name, "missing", "a number"))
    }

    pub(crate) fn maybe(&self, name: &str) -> Result<Option<usize>> {
        match self.json.get(name) {
            None | Some(Json::Null) => Ok(None),
            Some(v) => {
                let n = v.as_u64().and_then(|n| usize::try_from(n).ok());
                n.map(Some).ok_or_else(|| self.wrong(name, &v.to_string(), "a whole number, 0 or more"))
            }
        }
    }

    pub(crate) fn float(&self, name: &str) -> Option<f64> {
        self.json.get(name).and_then(Json::as_f64)
    }
}
