//! [`Model`]: a description of its layers and their weights, ready to run. What differs between families is data: in
//! the [`ModelConfig`], and in which optional weights a layer has.

pub(crate) mod config;
pub(crate) mod rope;

use std::path::Path;

use fir::gemm::dequantize_blocks;
use fir::{DType, Exec, Tensor};

pub use self::{
    config::{MlaConfig, ModelConfig, MoeConfig},
    rope::{RopeConfig, Scaling},
};
use crate::chat::ChatTemplate;
use crate::error::{Error, Result};
use crate::layers::{embed::Embedding, linear::Linear, moe::Experts};
use crate::tokenizer::Tokenizer;
use crate::weights::{Kind, Store, Stored};

/// A model's weights, ready to run on one executor.
pub struct Model {
    pub(crate) exec: Exec,
    config: ModelConfig,
    tokenizer: Tokenizer,
    chat: Option<ChatTemplate>,
    /// Type of the residual stream and of what the norms make of it.
    pub(crate) act: DType,
    /// Type of what is between two products.
    pub(crate) mid: DType,
    pub(crate) embed: Embedding,
    pub(crate) layers: Vec<Layer>,
    pub(crate) norm: Tensor,
    pub(crate) head: Linear,
}

/// One layer. A norm behind a sublayer is there in some families.
pub(crate) struct Layer {
    pub(crate) attn_norm: Tensor,
    pub(crate) attn: Attention,
    pub(crate) out: Linear,
    pub(crate) post_attn: Option<Tensor>,
    pub(crate) ffn_norm: Tensor,
    pub(crate) ffn: Ffn,
    pub(crate) post_ffn: Option<Tensor>,
}

pub(crate) enum Attention {
    /// Heads of keys and values.
    Full(Box<Full>),
    /// Latent attention.
    Mla(Box<Mla>),
}

/// Projections of attention with heads.
pub(crate) struct Full {
    /// Queries, keys and values in one product.
    pub(crate) qkv: Linear,
    /// Norms of the heads of queries and keys.
    pub(crate) norms: Option<(Tensor, Tensor)>,
}

/// Projections of latent attention, the key's absorbed into the query and the value's into the output.
pub(crate) struct Mla {
    /// To a compressed query and its norm, if queries are compressed.
    pub(crate) q_a: Option<(Linear, Tensor)>,
    /// To the heads' queries.
    pub(crate) q_b: Linear,
    /// To the compressed key and the rotary key.
    pub(crate) kv_a: Linear,
    pub(crate) kv_norm: Tensor,
    /// `[heads, kv_rank, nope]`
    pub(crate) k_b: Tensor,
    /// `[heads, v, kv_rank]`
    pub(crate) v_b: Tensor,
}

pub(crate) enum Ffn {
    /// Gate and up in one product, and down.
    Dense {
        gate_up: Linear,
        down: Linear,
    },
    Experts(Box<Experts>),
}

/// What a page of one layer's KV cache holds per token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvLayout {
    /// Keys and values of so many heads of so many elements each.
    Heads {
        /// Heads of keys and values.
        heads: usize,
        /// Elements of each.
        dim: usize,
    },
    /// Latent attention: one compressed vector and one rotary key.
    Latent {
        /// Elements of the compressed vector.
        ckv: usize,
        /// Elements of the rotary key.
        kpe: usize,
    },
}

impl Model {
    /// Loads a GGUF file, or a folder with `config.json`, `tokenizer.json` and `*.safetensors`.
    pub fn load(exec: &Exec, path: &Path) -> Result<Self> {
        let (store, meta) = Store::open(path)?;
        let (mut config, tokenizer, chat) = match &meta {
            Some(meta) => {
                let tokenizer = Tokenizer::from_gguf(meta)?;
                let chat = ChatTemplate::from_gguf(meta, &tokenizer)?;
                (ModelConfig::from_gguf(meta)?, tokenizer, chat)
            }
            None => {
                let tokenizer = Tokenizer::from_folder(path)?;
                let chat = ChatTemplate::from_folder(path)?;
                (ModelConfig::from_json(path)?, tokenizer, chat)
            }
        };
        if let Some(name) = path.file_stem().filter(|_| config.name.is_empty()) {
            config.name = name.to_string_lossy().into_owned();
        }
        Self::build(exec, &store, config, tokenizer, chat)
    }

    fn build(
        exec: &Exec,
        store: &Store,
        mut config: ModelConfig,
        tokenizer: Tokenizer,
        chat: Option<ChatTemplate>,
    ) -> Result<Self> {
        // Weights of f32 are computed with as they are; bf16 is what matrix units take, f16 is rounded to it. Products
        // with blocks take any type: there the residual stays f32, as it is read and written by vectors alone.
        let (act, mid) = match store.widest_of_matrices() {
            Kind::Blocks(_) => (DType::F32, DType::BF16),
            Kind::Dense(dtype) => (dtype, dtype),
        };
        if let Some(factors) = store.find(None, "rope_freqs.weight").filter(|_| !store.is_checkpoint()) {
            config.rope.factors = Some(factors.to_f32()?);
        }
        let embed = store.get(None, "token_embd.weight")?;
        if embed.shape.len() != 2 || embed.shape[1] != config.hidden {
            return Err(embed.wrong(&format!("has shape {:?}, expected [vocab, {}]", embed.shape, config.hidden)));
        }
        config.vocab = embed.shape[0];
        let head = store.find(None, "output.weight").unwrap_or_else(|| embed.clone());
        head.expect(&[config.vocab, config.hidden])?;
        let load = Loader { exec, store, config: &config, dtype: mid, packs: act == mid };
        let layers = (0..config.layers).map(|i| load.layer(i)).collect::<Result<Vec<_>>>()?;
        let norm = load.norm(None, "output_norm", config.hidden)?;
        Ok(Self {
            exec: exec.clone(),
            embed: Embedding::new(&embed, config.embed_scale),
            head: Linear::stack(exec, &[head], config.hidden, mid)?,
            layers,
            norm,
            act,
            mid,
            tokenizer,
            chat,
            config,
        })
    }

    /// Sizes and rules.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Text to tokens and back.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// How a chat becomes a prompt, if the model was made for chats.
    pub fn chat(&self) -> Option<&ChatTemplate> {
        self.chat.as_ref()
    }

    /// The executor it was loaded for.
    pub fn exec(&self) -> &Exec {
        &self.exec
    }

    /// What a page of one layer is.
    pub fn kv_layout(&self) -> KvLayout {
        match self.config.mla {
            Some(m) => KvLayout::Latent { ckv: m.kv_rank, kpe: m.rope },
            None => KvLayout::Heads { heads: self.config.kv_heads, dim: self.config.head_dim },
        }
    }
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Model").field("config", &self.config).finish_non_exhaustive()
    }
}

/// What all weights of a model are loaded with.
struct Loader<'a> {
    exec: &'a Exec,
    store: &'a Store,
    config: &'a ModelConfig,
    dtype: DType,
    /// Whether activations have that type, too, and dense weights may be packed for it.
    packs: bool,
}

impl Loader<'_> {
    /// A norm's weights, in f32 and with what the checkpoint leaves out.
    fn norm(&self, layer: Option<usize>, part: &str, len: usize) -> Result<Tensor> {
        self.norm_of(self.store.get(layer, &format!("{part}.weight"))?, len)
    }

    fn opt_norm(&self, i: usize, part: &str, len: usize) -> Result<Option<Tensor>> {
        self.store.find(Some(i), &format!("{part}.weight")).map(|s| self.norm_of(s, len)).transpose()
    }

    fn norm_of(&self, from: Stored<'_>, len: usize) -> Result<Tensor> {
        from.expect(&[len])?;
        let values: Vec<f32> = from.to_f32()?.iter().map(|w| w + self.config.norm_shift).collect();
        Ok(Tensor::from_slice(&values, &[len])?)
    }

    /// The stacked matrices `[n, k]` with their biases, if they have any.
    fn linear(&self, i: usize, parts: &[(&str, usize)], k: usize) -> Result<Linear> {
        let mut stored = Vec::new();
        for (part, n) in parts {
            let s = self.store.get(Some(i), &format!("{part}.weight"))?;
            s.expect(&[*n, k])?;
            stored.push(s);
        }
        let has = parts.iter().any(|(part, _)| self.store.find(Some(i), &format!("{part}.bias")).is_some());
        let mut bias = Vec::new();
        for (part, n) in parts.iter().filter(|_| has) {
            match self.store.find(Some(i), &format!("{part}.bias")) {
                Some(b) => {
                    b.expect(&[*n])?;
                    bias.extend(b.to_f32()?);
                }
                None => bias.resize(bias.len() + n, 0.0),
            }
        }
        let linear = Linear::stack(self.exec, &stored, k, self.dtype)?.with_bias(has.then_some(bias))?;
        if self.packs { linear.packed(self.exec) } else { Ok(linear) }
    }

    fn layer(&self, i: usize) -> Result<Layer> {
        let c = self.config;
        let (attn, attn_width) = match c.mla {
            Some(m) => (self.mla(i)?, c.heads * m.v),
            None => (self.full(i)?, c.heads * c.head_dim),
        };
        let ffn = match c.moe.filter(|moe| moe.at(i)) {
            Some(_) => Ffn::Experts(Box::new(Experts::load(self.exec, self.store, c, i, self.dtype)?)),
            None => Ffn::Dense {
                gate_up: self.linear(i, &[("ffn_gate", c.inter), ("ffn_up", c.inter)], c.hidden)?,
                down: self.linear(i, &[("ffn_down", c.hidden)], c.inter)?,
            },
        };
        Ok(Layer {
            attn_norm: self.norm(Some(i), "attn_norm", c.hidden)?,
            attn,
            out: self.linear(i, &[("attn_output", c.hidden)], attn_width)?,
            post_attn: self.opt_norm(i, "post_attention_norm", c.hidden)?,
            ffn_norm: self.norm(Some(i), "ffn_norm", c.hidden)?,
            ffn,
            post_ffn: self.opt_norm(i, "post_ffw_norm", c.hidden)?,
        })
    }

    fn full(&self, i: usize) -> Result<Attention> {
        let c = self.config;
        let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let norms = match (self.opt_norm(i, "attn_q_norm", c.head_dim)?, self.opt_norm(i, "attn_k_norm", c.head_dim)?) {
            (Some(q), Some(k)) => Some((q, k)),
            _ => None,
        };
        let qkv = self.linear(i, &[("attn_q", q), ("attn_k", kv), ("attn_v", kv)], c.hidden)?;
        Ok(Attention::Full(Box::new(Full { qkv, norms })))
    }

    fn mla(&self, i: usize) -> Result<Attention> {
        let c = self.config;
        let Some(m) = c.mla else { return Err(Error::Config("latent attention without its sizes".into())) };
        let q = c.heads * c.head_dim;
        let (q_a, q_b) = if m.q_rank > 0 {
            let a =
                (self.linear(i, &[("attn_q_a", m.q_rank)], c.hidden)?, self.norm(Some(i), "attn_q_a_norm", m.q_rank)?);
            (Some(a), self.linear(i, &[("attn_q_b", q)], m.q_rank)?)
        } else {
            (None, self.linear(i, &[("attn_q", q)], c.hidden)?)
        };
        let (k_b, v_b) = self.absorbed(i)?;
        Ok(Attention::Mla(Box::new(Mla {
            q_a,
            q_b,
            kv_a: self.linear(i, &[("attn_kv_a_mqa", m.kv_rank + m.rope)], c.hidden)?,
            kv_norm: self.norm(Some(i), "attn_kv_a_norm", m.kv_rank)?,
            k_b,
            v_b,
        })))
    }

    /// The two halves of the up-projection, by head: of keys `[heads, kv_rank, nope]`, of values `[heads, v, kv_rank]`.
    fn absorbed(&self, i: usize) -> Result<(Tensor, Tensor)> {
        let c = self.config;
        let Some(m) = c.mla else { return Err(Error::Config("latent attention without its sizes".into())) };
        let (k_shape, v_shape) = ([c.heads, m.kv_rank, m.nope], [c.heads, m.v, m.kv_rank]);
        if let (Some(k), Some(v)) =
            (self.store.find(Some(i), "attn_k_b.weight"), self.store.find(Some(i), "attn_v_b.weight"))
        {
            k.expect(&k_shape)?;
            v.expect(&v_shape)?;
            let (k, v) = (self.values(&k)?, self.values(&v)?);
            return Ok((Tensor::from_f32(self.dtype, &k, &k_shape)?, Tensor::from_f32(self.dtype, &v, &v_shape)?));
        }
        let both = self.store.get(Some(i), "attn_kv_b.weight")?;
        both.expect(&[c.heads * (m.nope + m.v), m.kv_rank])?;
        let both = self.values(&both)?;
        let mut k = vec![0.0; c.heads * m.kv_rank * m.nope];
        let mut v = Vec::with_capacity(c.heads * m.v * m.kv_rank);
        for (h, rows) in both.chunks_exact((m.nope + m.v) * m.kv_rank).enumerate() {
            let (keys, values) = rows.split_at(m.nope * m.kv_rank);
            let to = &mut k[h * m.kv_rank * m.nope..][..m.kv_rank * m.nope];
            for (r, row) in keys.chunks_exact(m.kv_rank).enumerate() {
                for (l, &x) in row.iter().enumerate() {
                    to[l * m.nope + r] = x;
                }
            }
            v.extend_from_slice(values);
        }
        Ok((Tensor::from_f32(self.dtype, &k, &k_shape)?, Tensor::from_f32(self.dtype, &v, &v_shape)?))
    }

    /// Every element in f32, of blocks too.
    fn values(&self, s: &Stored<'_>) -> Result<Vec<f32>> {
        let Kind::Blocks(format) = s.kind else { return s.to_f32() };
        let k = s.shape.last().copied().unwrap_or(1);
        let rows = s.shape.iter().product::<usize>() / k.max(1);
        let mut out = Tensor::zeros(DType::F32, &[rows, k])?;
        dequantize_blocks(self.exec, format, s.data, out.view_mut())?;
        Ok(out.as_slice::<f32>()?.to_vec())
    }
}
