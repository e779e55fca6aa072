//! Calls of the kernel library's operators, as an executor's override sees them, in the words of definitions.

use fir::exec::Call;
use fir::tensor::TensorRef;
use serde_json::{Map, Value, json};

use crate::error::{Error, Result};
use crate::ops::eps_of;
use crate::schema::{DType, Definition};
use crate::traceset::TraceSet;

/// An input of a call.
#[derive(Clone, Copy, Debug)]
pub enum Given<'a> {
    /// A tensor.
    Tensor(TensorRef<'a>),
    /// A number.
    Number(f64),
}

impl Given<'_> {
    /// Its shape; `None` for a number.
    pub fn shape(&self) -> Option<&[usize]> {
        match self {
            Self::Tensor(t) => Some(t.shape()),
            Self::Number(_) => None,
        }
    }
}

/// A tensor of a call that is read, also where it is written in place.
fn tensor<'t>(call: &'t Call<'_, '_>, name: &str) -> Option<TensorRef<'t>> {
    let read = call.inputs.iter().find(|(n, _)| *n == name).map(|(_, t)| *t);
    read.or_else(|| call.outputs.iter().find(|(n, _)| *n == name).map(|(_, t)| t.as_ref()))
}

fn number(call: &Call<'_, '_>, name: &str) -> Option<f32> {
    call.numbers.iter().find(|(n, _)| *n == name).map(|(_, x)| *x)
}

/// The name of a call's definition, by FlashInfer-Trace's rules.
pub(crate) fn name_of(call: &Call<'_, '_>) -> Option<String> {
    let dim = |name: &str, axis: usize| tensor(call, name).and_then(|t| t.shape().get(axis).copied());
    let op = call.op;
    Some(match op {
        "rmsnorm" | "fused_add_rmsnorm" => format!("{op}_h{}", dim("weight", 0)?),
        "gemm" => format!("gemm_n{}_k{}", dim("B", 0)?, dim("B", 1)?),
        "gqa_paged_decode" | "gqa_paged_prefill_causal" => {
            let (heads, kv, d, page) = (dim("q", 1)?, dim("k_cache", 2)?, dim("q", 2)?, dim("k_cache", 1)?);
            format!("{op}_h{heads}_kv{kv}_d{d}_ps{page}")
        }
        "gqa_ragged_prefill_causal" => format!("{op}_h{}_kv{}_d{}", dim("q", 1)?, dim("k", 1)?, dim("q", 2)?),
        "mla_paged_decode" | "mla_paged_prefill_causal" => {
            let (heads, ckv, kpe, page) = (dim("q_nope", 1)?, dim("q_nope", 2)?, dim("q_pe", 2)?, dim("ckv_cache", 1)?);
            format!("{op}_h{heads}_ckv{ckv}_kpe{kpe}_ps{page}")
        }
        _ => return None,
    })
}

/// The inputs of `definition` in its order, if the call is one of it: all of them, of its types, and the same constants.
pub(crate) fn inputs_of<'t>(definition: &Definition, call: &'t Call<'_, '_>) -> Option<Vec<Given<'t>>> {
    if number(call, "eps").is_some_and(|eps| eps != eps_of(definition) as f32) {
        return None;
    }
    let one = |(name, spec): &(String, crate::schema::TensorSpec)| match spec.shape {
        None => number(call, name).map(|x| Given::Number(f64::from(x))),
        Some(_) => tensor(call, name).filter(|t| t.dtype() == spec.dtype.fir()).map(Given::Tensor),
    };
    definition.inputs().iter().map(one).collect()
}

/// The definition in `set` that a call is of, by its name, or by its name with what is unusual about it; where there is
/// neither, the first of the two that is free, with a reference of ours, for operators that have one.
pub(crate) fn definition_of(set: &TraceSet, call: &Call<'_, '_>) -> Result<Option<Definition>> {
    let Some(name) = name_of(call) else { return Ok(None) };
    let first = call.inputs.first().map(|(_, t)| t.dtype().name()).unwrap_or_default();
    let eps = number(call, "eps").map_or(String::new(), |eps| format!("_eps{eps:e}"));
    for name in [name.clone(), format!("{name}_{first}{eps}")] {
        match set.definition(&name) {
            Some(definition) if inputs_of(definition, call).is_some() => return Ok(Some(definition.clone())),
            Some(_) => {}
            None => return written(&name, call),
        }
    }
    Ok(None)
}

const NORM: &str = "import torch\n\nEPS = {eps}\n\n\n@torch.no_grad()\ndef run({args}):\n    x = {x}\n    \
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight.float()\n    return y.to(hidden_states.dtype)\n";

const GEMM: &str =
    "import torch\n\n\n@torch.no_grad()\ndef run(A, B):\n    return (A.float() @ B.float().T).to(A.dtype)\n";

const PAGED: &str = r#"import math

import torch


@torch.no_grad()
def run({args}):
    output, lse = torch.zeros_like(q), torch.full(q.shape[:2], -math.inf, device=q.device)
    group = q.shape[1] // k_cache.shape[2]
    for r in range(len(kv_indptr) - 1):
        pages = kv_indices[kv_indptr[r]:kv_indptr[r + 1]].long()
        n = (len(pages) - 1) * k_cache.shape[1] + int(kv_last_page_len[r]) if len(pages) else 0
        k, v = (c[pages].flatten(0, 1)[:n].float().repeat_interleave(group, 1) for c in (k_cache, v_cache))
        begin, end = {range}
        logits = torch.einsum("qhd,khd->qhk", q[begin:end].float(), k) * sm_scale
        last = torch.arange(n - (end - begin), n, device=q.device)
        logits.masked_fill_((torch.arange(n, device=q.device) > last[:, None])[:, None], -math.inf)
        lse[begin:end] = torch.logsumexp(logits, -1) / math.log(2)
        output[begin:end] = torch.einsum("qhk,khd->qhd", torch.softmax(logits, -1).nan_to_num(0), v).to(q.dtype)
    return output, lse
"#;

/// A definition of a call, for operators that have a reference here.
fn written(name: &str, call: &Call<'_, '_>) -> Result<Option<Definition>> {
    let decode = call.op == "gqa_paged_decode";
    let rows = if decode { "batch_size" } else { "total_q" };
    // Inputs with their axes, those that vary marked, and outputs; inputs that the call does not have are left out.
    type Specs<'a> = &'a [(&'a str, &'a [&'a str])];
    let cache: &[&str] = &["num_pages?", "page_size", "num_kv_heads", "head_dim"];
    let hidden: &[&str] = &["batch_size?", "hidden_size"];
    let (rows_q, rows_lse) = ([&format!("{rows}?"), "num_qo_heads", "head_dim"], [&format!("{rows}?"), "num_qo_heads"]);
    let norm: Specs<'_> = &[("hidden_states", hidden), ("residual", hidden), ("weight", &["hidden_size"])];
    let attended: Specs<'_> = &[("output", &rows_q), ("lse", &rows_lse)];
    let paged: Specs<'_> = &[
        ("q", &rows_q),
        ("k_cache", cache),
        ("v_cache", cache),
        ("qo_indptr", &["len_indptr?"]),
        ("kv_indptr", &["len_indptr?"]),
        ("kv_indices", &["num_kv_indices?"]),
        ("kv_last_page_len", &["batch_size?"]),
    ];
    let (op_type, inputs, outputs, reference): (&str, Specs<'_>, Specs<'_>, String) = match call.op {
        "rmsnorm" => ("rmsnorm", norm, &[("output", hidden)], NORM.replace("{x}", "hidden_states.float()")),
        "fused_add_rmsnorm" => {
            let text = NORM.replace("{x}", "hidden_states.float() + residual.float()");
            ("rmsnorm", norm, &[("output", hidden)], text)
        }
        "gemm" => ("gemm", &[("A", &["M?", "K"]), ("B", &["N", "K"])], &[("C", &["M?", "N"])], GEMM.into()),
        "gqa_paged_decode" | "gqa_paged_prefill_causal" => {
            let range = if decode { "r, r + 1" } else { "int(qo_indptr[r]), int(qo_indptr[r + 1])" };
            ("gqa_paged", paged, attended, PAGED.replace("{range}", range))
        }
        _ => return Ok(None),
    };
    let (mut axes, mut specs, mut names) = (Map::new(), Map::new(), Vec::new());
    let dtype = |t: TensorRef<'_>| {
        let known = DType::ALL.into_iter().find(|d| d.fir() == t.dtype());
        known.map(DType::name).ok_or_else(|| Error::refused("record", format!("type {} has no definition", t.dtype())))
    };
    let plain = |axes: &[&str]| axes.iter().map(|a| a.trim_end_matches('?').to_owned()).collect::<Vec<_>>();
    for (input, of) in inputs {
        let Some(t) = tensor(call, input) else { continue };
        if t.shape().len() != of.len() {
            return Ok(None);
        }
        for (axis, n) in of.iter().zip(t.shape()) {
            let value = if axis.ends_with('?') { json!({"type": "var"}) } else { json!({"type": "const", "value": n}) };
            axes.insert(axis.trim_end_matches('?').to_owned(), value);
        }
        specs.insert((*input).into(), json!({"shape": plain(of), "dtype": dtype(t)?}));
        names.push(*input);
    }
    for (name, _) in call.numbers.iter().filter(|(name, _)| *name != "eps") {
        specs.insert((*name).into(), json!({"shape": null, "dtype": "float32"}));
        names.push(*name);
    }
    let result = call.outputs.first().map(|(_, t)| dtype(t.as_ref())).transpose()?;
    let output = |(name, of): &(&str, &[&str])| {
        let dtype = if *name == "lse" { Some("float32") } else { result };
        ((*name).to_owned(), json!({"shape": plain(of), "dtype": dtype}))
    };
    let eps = number(call, "eps").map_or(String::new(), |eps| format!("{eps:e}"));
    Definition::from_value(&json!({
        "name": name, "op_type": op_type, "description": format!("{} as a running program called it", call.op),
        "axes": axes, "inputs": specs, "outputs": outputs.iter().map(output).collect::<Map<String, Value>>(),
        "reference": reference.replace("{eps}", &eps).replace("{args}", &names.join(", ")),
    }))
    .map(Some)
}
