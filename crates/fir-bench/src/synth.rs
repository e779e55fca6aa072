//! Small workloads for definitions that have none, or whose files are absent: structure by the names of inputs, numbers drawn.

use std::collections::BTreeMap;
use std::path::Path;

use crate::array::Array;
use crate::error::{Error, Result};
use crate::inputs::{Rng, write_tensors};
use crate::schema::{DType, Definition, Input, Scalar, TensorSpec, Workload};

/// Requests of a batch: query tokens, and cached tokens among them the queries.
const REQUESTS: [(u64, u64); 4] = [(4, 70), (1, 1), (7, 130), (2, 64)];

/// A small workload of `definition`, with what it needs of files written under `root`; the seed decides all of it, its name too,
/// by which a benchmark draws.
pub fn synthesize(root: &Path, definition: &Definition, seed: u64) -> Result<Workload> {
    let mut rng = Rng::new(seed, definition.name());
    let axes = axes(definition);
    let mut given = Vec::new();
    for (name, spec) in definition.inputs() {
        if spec.shape.is_some()
            && let Some(array) = structure(definition, &axes, name, spec, &mut rng)?
        {
            given.push((name.as_str(), array));
        }
    }
    let folder = format!("./blob/workloads/{}/{}", definition.op_type(), definition.name());
    let path = format!("{folder}/{}_{seed}.safetensors", definition.name());
    if !given.is_empty() {
        let tensors: Vec<(&str, &Array)> = given.iter().map(|(name, array)| (*name, array)).collect();
        write_tensors(&root.join(&path), &tensors)?;
    }
    let input = |(name, spec): &(String, TensorSpec)| {
        let input = if spec.shape.is_none() {
            Input::Scalar(scalar(definition, name, spec))
        } else if given.iter().any(|(n, _)| n == name) {
            Input::Safetensors { path: path.clone(), tensor_key: name.clone() }
        } else {
            Input::Random
        };
        (name.clone(), input)
    };
    let inputs: Vec<_> = definition.inputs().iter().map(input).collect();
    let mut value = Workload::new(&axes, &inputs)?.to_value().clone();
    let [a, b, c, d] = [(); 4].map(|()| rng.bits());
    let (b, c) = ([b >> 16, b & 0xfff | 0x4000], [c >> 16 & 0x3fff | 0x8000, c & 0xffff]);
    value["uuid"] = format!("{a:08x}-{:04x}-{:04x}-{:04x}-{:04x}{d:08x}", b[0], b[1], c[0], c[1]).into();
    Workload::from_value(&value)
}

fn constant(definition: &Definition, axis: &str) -> Option<u64> {
    definition.axis(axis, &BTreeMap::new())
}

/// Pages of each request.
fn pages(definition: &Definition) -> Vec<u64> {
    let page = constant(definition, "page_size").unwrap_or(1).max(1);
    REQUESTS.iter().map(|(_, kv)| kv.div_ceil(page)).collect()
}

fn axes(definition: &Definition) -> BTreeMap<String, u64> {
    let batch = REQUESTS.len() as u64;
    let total_pages: u64 = pages(definition).iter().sum();
    let requests = definition.input("qo_indptr").is_some() || definition.input("kv_indptr").is_some();
    let value = |name: &str| match name {
        "batch_size" if requests => batch,
        "len_indptr" | "len_cu_seqlens" => batch + 1,
        "total_q" | "total_seq_len" => REQUESTS.iter().map(|(q, _)| q).sum(),
        "total_kv" => REQUESTS.iter().map(|(_, kv)| kv).sum(),
        "num_seqs" => batch,
        "num_kv_indices" => total_pages,
        "num_pages" if requests => total_pages + 3,
        // As many tokens as are chosen, and more.
        "num_pages" | "max_num_pages" => {
            let page = constant(definition, "page_size").unwrap_or(1).max(1);
            constant(definition, "topk").unwrap_or(64).div_ceil(page) + 3
        }
        "pool_size" | "state_cache_size" => 5,
        "max_seq_len" => 48,
        "num_qo_heads" => 4,
        "num_kv_heads" => 2,
        "seq_len" => 3,
        "M" => 6,
        _ => 3,
    };
    definition.var_axes().map(|name| (name.to_owned(), value(name))).collect()
}

/// An input that is not drawn freely; `None` for one that is.
fn structure(
    definition: &Definition,
    axes: &BTreeMap<String, u64>,
    name: &str,
    spec: &TensorSpec,
    rng: &mut Rng,
) -> Result<Option<Array>> {
    if !matches!(spec.dtype, DType::Int32 | DType::Int64) || matches!(name, "top_k") {
        return Ok(None);
    }
    let mut array = Array::zeros(spec.dtype, &definition.shape(spec, axes)?)?;
    let page = constant(definition, "page_size").unwrap_or(1).max(1);
    let mut offsets = |lens: &mut dyn Iterator<Item = u64>| {
        let mut at = 0;
        for (i, len) in lens.enumerate() {
            at += len;
            if i + 1 < array.len() {
                array.set(i + 1, at as f64);
            }
        }
    };
    let axis = |name: &str| definition.axis(name, axes).unwrap_or(1);
    let below = match name {
        "qo_indptr" | "cu_seqlens" => {
            offsets(&mut REQUESTS.iter().map(|(q, _)| *q));
            return Ok(Some(array));
        }
        "kv_indptr" if definition.input("kv_indices").is_some() => {
            offsets(&mut pages(definition).into_iter());
            return Ok(Some(array));
        }
        "kv_indptr" => {
            offsets(&mut REQUESTS.iter().map(|(_, kv)| *kv));
            return Ok(Some(array));
        }
        "kv_indices" => {
            let ids = shuffled(axis("num_pages"), rng);
            (0..array.len()).for_each(|i| array.set(i, ids.get(i).copied().unwrap_or(0) as f64));
            return Ok(Some(array));
        }
        "kv_last_page_len" => {
            for i in 0..array.len() {
                let tokens = REQUESTS.get(i).map_or(1, |(_, kv)| (kv - 1) % page + 1);
                array.set(i, tokens as f64);
            }
            return Ok(Some(array));
        }
        "seq_lens" => {
            let most = axis("max_num_pages") * page;
            (0..array.len()).for_each(|i| array.set(i, most.saturating_sub(i as u64 * page / 2) as f64));
            return Ok(Some(array));
        }
        "sparse_indices" => axis("num_pages") * page,
        "block_table" => {
            // A request has a page once; requests may share pages.
            let row = array.shape().last().copied().unwrap_or(1).max(1);
            for begin in (0..array.len()).step_by(row) {
                let ids = shuffled(axis("num_pages"), rng);
                (0..row).for_each(|i| array.set(begin + i, ids.get(i).copied().unwrap_or(0) as f64));
            }
            return Ok(Some(array));
        }
        "positions" => axis("max_seq_len"),
        "state_batch_indices" => axis("state_cache_size"),
        "initial_state_indices" => axis("pool_size"),
        "topk_ids" => {
            // An expert above the 16 bits of its weight, the experts of a row apart.
            let (experts, row) = (axis("num_experts").max(1), array.shape().last().copied().unwrap_or(1).max(1));
            for i in 0..array.len() {
                let weight = fir::tensor::bf16::from_f64(0.1 + rng.uniform());
                let expert = (i / row * 5 + i % row) as u64 % experts;
                array.set(i, (expert << 16 | u64::from(weight.to_bits())) as f64);
            }
            return Ok(Some(array));
        }
        _ => {
            let why = format!("`{}`: what its integer input `{name}` means is not known", definition.name());
            return Err(Error::refused("synthesize", why));
        }
    };
    // States belong to one request each; other indices may repeat.
    let unique = name.contains("state");
    for i in 0..array.len() {
        let x = if unique { (i as u64 + 1) % below.max(1) } else { rng.integer(0, below as i64) as u64 };
        array.set(i, x as f64);
    }
    Ok(Some(array))
}

/// Every number below `n` once, in any order.
fn shuffled(n: u64, rng: &mut Rng) -> Vec<u64> {
    let mut ids: Vec<u64> = (0..n).collect();
    for i in (1..ids.len()).rev() {
        ids.swap(i, rng.integer(0, i as i64 + 1) as usize);
    }
    ids
}

fn scalar(definition: &Definition, name: &str, spec: &TensorSpec) -> Scalar {
    let dims = ["head_dim", "qk_dim", "head_size"];
    let head = dims.iter().find_map(|axis| constant(definition, axis)).unwrap_or(192);
    match name {
        "sm_scale" | "scale" => Scalar::Float(1.0 / (head as f64).sqrt()),
        "routed_scaling_factor" => Scalar::Float(2.5),
        "eps" => Scalar::Float(1e-6),
        _ if spec.dtype == DType::Bool => Scalar::Bool(false),
        _ if spec.dtype.is_integer() => Scalar::Int(0),
        _ => Scalar::Float(1.0),
    }
}
