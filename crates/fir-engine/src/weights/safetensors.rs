//! Safetensors: a folder with one file or several shards, and HF's names.

use std::collections::HashMap;
use std::path::Path;

use ::safetensors::{Dtype, SafeTensors};
use fir::DType;

use super::{Entry, Kind, Map, Store};
use crate::error::{Error, Result};

/// GGUF's name of a part and HF's, within a layer or of the whole model.
const NAMES: &[(&str, &str)] = &[
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("attn_q_a", "self_attn.q_a_proj"),
    ("attn_q_a_norm", "self_attn.q_a_layernorm"),
    ("attn_q_b", "self_attn.q_b_proj"),
    ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
    ("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
    ("attn_kv_b", "self_attn.kv_b_proj"),
    // With norms behind the sublayers (Gemma) these are four; without, the one before the feed-forward layer has the
    // name of the one behind attention: see `open`.
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("ffn_gate_inp", "mlp.gate"),
    ("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_experts.up_proj"),
    ("ffn_down_shexp", "mlp.shared_experts.down_proj"),
];

/// What may stand before `layers.0`.
const PREFIXES: [&str; 4] = ["model.", "language_model.model.", "model.language_model.", ""];

/// HF's name of GGUF's `stem`.
pub(super) fn name_of(stem: &str, prefix: &str) -> Option<String> {
    match stem {
        "token_embd" => Some(format!("{prefix}embed_tokens")),
        "output_norm" => Some(format!("{prefix}norm")),
        "output" => Some(match prefix {
            "language_model.model." => "language_model.lm_head".into(),
            _ => "lm_head".into(),
        }),
        _ => NAMES.iter().find(|(gguf, _)| *gguf == stem).map(|(_, hf)| (*hf).to_string()),
    }
}

/// Maps all shards of a folder.
pub(super) fn open(folder: &Path) -> Result<Store> {
    let shown = folder.display().to_string();
    let io = |source| Error::Io { path: shown.clone(), source };
    let wrong = |why: String| Error::Model { path: shown.clone(), why };
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            paths.push(path);
        }
    }
    paths.sort();
    if paths.is_empty() {
        return Err(wrong("there is no file *.safetensors in this folder".into()));
    }
    let (mut files, mut entries) = (Vec::new(), HashMap::new());
    for path in &paths {
        let map = Map::open(path)?;
        let at = |why: String| Error::Model { path: path.display().to_string(), why };
        let (head, table) = SafeTensors::read_metadata(map.bytes()).map_err(|e| at(e.to_string()))?;
        let data = head + 8;
        for (name, info) in table.tensors() {
            let kind = match info.dtype {
                Dtype::F32 => DType::F32,
                Dtype::F16 => DType::F16,
                Dtype::BF16 => DType::BF16,
                // Counters and the like are no weights; a weight of such a type is missed by its name.
                _ => continue,
            };
            let range = data + info.data_offsets.0..data + info.data_offsets.1;
            let entry = Entry { file: files.len(), kind: Kind::Dense(kind), shape: info.shape.clone(), range };
            entries.insert(name, entry);
        }
        files.push(map);
    }
    let prefix = PREFIXES.into_iter().find(|p| entries.contains_key(&format!("{p}embed_tokens.weight")));
    let prefix = prefix.ok_or_else(|| wrong("there is no tensor `model.embed_tokens.weight`".into()))?;
    // Without norms behind the sublayers, `post_attention_layernorm` is the one before the feed-forward layer.
    if !entries.contains_key(&format!("{prefix}layers.0.pre_feedforward_layernorm.weight")) {
        let renamed: Vec<String> =
            entries.keys().filter(|name| name.ends_with(".post_attention_layernorm.weight")).cloned().collect();
        for name in renamed {
            if let Some(entry) = entries.remove(&name) {
                entries.insert(name.replace("post_attention_layernorm", "pre_feedforward_layernorm"), entry);
            }
        }
    }
    let mut store = Store::new(folder, files, entries)?;
    store.prefix = Some(prefix.to_string());
    Ok(store)
}
