//! The kernel library's operators as solutions.
//!
//! A solution of language `fir` names one of [`NAMES`] as its entry symbol; its entry file holds the parameters that the
//! definition's code has and its inputs have not, as JSON:
//!
//! | operator | of | parameters |
//! |---|---|---|
//! | `rms_norm`, `fused_add_rms_norm` | rmsnorm | `eps` (1e-6) |
//! | `gemm` | gemm | |
//! | `attention` | gqa_paged, gqa_ragged | |
//! | `mla` | mla_paged | |
//! | `rope` | rope | `interleave` (false) |
//! | `sample` | sampling | `seed` (0) |
//! | `moe` | moe, on the CPU | `top_k`; `routing`: `renormalize`, `deepseek`, `llama4` or `given`; `groups`, `[count, chosen]`; `weigh_input`, with one expert |
//!
//! Plans are made from inputs that a workload gives and does not draw, before a call is timed.

use std::sync::atomic::{AtomicU64, Ordering};

use fir::attention::{BatchArgs, BatchPlan, MlaArgs, MlaPlan, MlaProblem, Problem, Scratch, Split};
use fir::kv::{Kv, KvLayout, PagedMla, RaggedKv};
use fir::moe::{FfnArgs, Gate, Groups, RouteArgs, Routing, Score, moe_ffn, route};
use fir::philox::RngState;
use fir::rope::{Angles, Positions};
use fir::sampling::Draw;
use fir::tensor::{Block, Scaled, bf16};
use fir::variant::{Params, causal};
use fir::{Exec, PageTable, PagedKv, Ragged, gemm, norm, rope, sampling};
use serde_json::{Value, json};

use crate::array::Array;
use crate::error::{Error, Result};
use crate::schema::{DType, Definition, Solution};

/// Operators that a solution may name.
pub const NAMES: [&str; 8] = ["rms_norm", "fused_add_rms_norm", "gemm", "attention", "mla", "rope", "sample", "moe"];

/// The library's solution of a definition, where it has one; `author` is `fir`.
pub fn solution_for(definition: &Definition) -> Result<Option<Solution>> {
    let input = |name: &str| definition.input(name).is_some();
    let constant = |text: &str| -> Option<u64> {
        let at = definition.reference().find(text)? + text.len();
        let digits: String = definition.reference()[at..].chars().take_while(char::is_ascii_digit).collect();
        digits.parse().ok()
    };
    let (operator, params) = match definition.op_type() {
        "rmsnorm" => {
            let operator = if input("residual") { "fused_add_rms_norm" } else { "rms_norm" };
            (operator, json!({"eps": eps_of(definition)}))
        }
        "gemm" => ("gemm", json!({})),
        "gqa_paged" | "gqa_ragged" => ("attention", json!({})),
        "mla_paged" => ("mla", json!({})),
        "rope" => ("rope", json!({"interleave": definition.name().contains("gptj")})),
        "sampling" => ("sample", json!({"seed": 0})),
        "moe" => {
            let Some(top_k) = constant("TOP_K = ") else { return Ok(None) };
            let groups = constant("N_GROUP = ").zip(constant("TOPK_GROUP = "));
            let routing = match definition.reference() {
                _ if input("topk_ids") => "given",
                _ if input("routed_scaling_factor") => "deepseek",
                text if text.contains("torch.sigmoid(routing_logits") => "llama4",
                _ => "renormalize",
            };
            // Llama's experts are given their input times its weight, others weigh what comes out.
            let on_input = definition.reference().contains("[tok_idx] * w");
            let groups = groups.map(|(count, chosen)| [count, chosen]);
            ("moe", json!({"top_k": top_k, "routing": routing, "groups": groups, "weigh_input": on_input}))
        }
        _ => return Ok(None),
    };
    let value = json!({
        "name": format!("fir_{}", definition.name()), "definition": definition.name(), "author": "fir",
        "spec": {"language": "fir", "target_hardware": ["cpu", "cuda"], "entry_point": format!("params.json::{operator}")},
        "sources": [{"path": "params.json", "content": params.to_string()}],
    });
    Solution::from_value(&value).map(Some)
}

/// What a definition of a norm adds to the mean of the squares: its reference says `EPS = `, or it is 1e-6.
pub(crate) fn eps_of(definition: &Definition) -> f64 {
    let said = definition.reference().split("EPS = ").nth(1);
    said.and_then(|text| text.lines().next()?.trim().parse().ok()).unwrap_or(1e-6)
}

/// An operator with its parameters.
pub(crate) struct Operator {
    name: &'static str,
    params: Value,
    pub(crate) exec: Exec,
    /// Calls of a sampler so far: each has numbers of its own.
    calls: AtomicU64,
}

/// An operator ready for calls on tensors of one shape.
pub(crate) struct Prepared<'a> {
    operator: &'a Operator,
    state: State,
}

enum State {
    None,
    Attention { plan: BatchPlan, scratch: Scratch, kv: Held },
    Mla { plan: MlaPlan, scratch: Scratch, table: PageTable<'static> },
}

#[expect(clippy::large_enum_variant, reason = "one to a call")]
enum Held {
    Paged(PageTable<'static>),
    Ragged(Ragged),
}

/// Tensors by name.
struct Named<'a>(&'a [(&'a str, &'a Array)]);

impl<'a> Named<'a> {
    fn find(&self, name: &str) -> Option<&'a Array> {
        self.0.iter().find(|(n, _)| *n == name).map(|(_, a)| *a)
    }

    fn get(&self, name: &str) -> Result<&'a Array> {
        self.find(name).ok_or_else(|| Error::refused("fir", format!("there is no input `{name}`")))
    }

    /// An integer input that the workload gives.
    fn ids(&self, name: &str) -> Result<&'a [i32]> {
        let array = self.find(name).ok_or_else(|| {
            Error::refused("fir", format!("`{name}` must come from the workload, for a plan to be made of it"))
        })?;
        if array.dtype() != DType::Int32 {
            return Err(Error::refused("fir", format!("`{name}` is of {}, not int32", array.dtype())));
        }
        Ok(array.typed::<i32>())
    }

    fn number(&self, name: &str) -> Result<f32> {
        let array = self.get(name)?;
        if array.len() == 1 {
            Ok(array.get(0) as f32)
        } else {
            Err(Error::refused("fir", format!("`{name}` is not a number")))
        }
    }
}

fn dim(array: &Array, axis: usize) -> usize {
    array.shape().get(axis).copied().unwrap_or(0)
}

/// The executor of a device: `cpu`, or `cuda` with an ordinal, as torch names it.
pub(crate) fn exec_of(device: &str) -> Result<Exec> {
    let ordinal = device.strip_prefix("cuda").map(|rest| rest.trim_start_matches(':').parse().unwrap_or(0));
    Ok(ordinal.map_or_else(Exec::cpu, Exec::cuda)?)
}

impl Operator {
    /// `device` as in [`exec_of`].
    pub(crate) fn new(name: &str, params: &str, device: &str) -> Result<Self> {
        let known = NAMES.into_iter().find(|n| *n == name);
        let name = known.ok_or_else(|| {
            Error::refused("fir", format!("`{name}` is not an operator; there are {}", NAMES.join(", ")))
        })?;
        let params =
            serde_json::from_str(params).map_err(|e| Error::refused("fir", format!("parameters of `{name}`: {e}")))?;
        let exec = exec_of(device)?;
        if name == "moe" && !matches!(exec, Exec::Cpu(_)) {
            return Err(Error::refused("fir", "`moe` turns weights around, and does so on the CPU alone"));
        }
        Ok(Self { name, params, exec, calls: AtomicU64::new(0) })
    }

    /// Plans for inputs of these shapes; `known` are those whose numbers the plan may look at.
    pub(crate) fn prepare(
        &self,
        known: &[(&str, &Array)],
        shapes: &[(&str, &Array)],
        outputs: &[(DType, Vec<usize>)],
    ) -> Result<Prepared<'_>> {
        let (known, shapes) = (Named(known), Named(shapes));
        let out_dtype = outputs.first().map_or(DType::Float32, |(d, _)| *d).fir();
        let state = match self.name {
            "attention" => {
                let q = shapes.get("q")?;
                let (heads, head_dim) = (dim(q, 1), dim(q, 2));
                let (kv_heads, held) = match shapes.find("k_cache") {
                    Some(k) => (dim(k, 2), Held::Paged(page_table(&self.exec, &known, k)?)),
                    None => (dim(shapes.get("k")?, 1), Held::Ragged(Ragged::new(known.ids("kv_indptr")?)?)),
                };
                let problem =
                    Problem { out_dtype, ..Problem::new(heads, kv_heads, head_dim, q.dtype().fir(), causal()) };
                let lens = match &held {
                    Held::Paged(table) => table.lens(),
                    Held::Ragged(indptr) => indptr.lens(),
                };
                let qo = match known.find("qo_indptr") {
                    Some(_) => Ragged::new(known.ids("qo_indptr")?)?,
                    None => Ragged::ones(lens.len())?,
                };
                let plan = BatchPlan::new(&self.exec, problem, &qo, lens, Split::Balanced)?;
                State::Attention { scratch: plan.scratch(), plan, kv: held }
            }
            "mla" => {
                let (q, ckv, kpe) = (shapes.get("q_nope")?, shapes.get("ckv_cache")?, shapes.get("kpe_cache")?);
                let table = page_table(&self.exec, &known, ckv)?;
                let qo = match known.find("qo_indptr") {
                    Some(_) => Ragged::new(known.ids("qo_indptr")?)?,
                    None => Ragged::ones(table.batch())?,
                };
                let problem = MlaProblem {
                    heads: dim(q, 1),
                    head_dim_ckv: dim(q, 2),
                    head_dim_kpe: dim(kpe, 2),
                    q_dtype: q.dtype().fir(),
                    kv_dtype: ckv.dtype().fir(),
                    out_dtype,
                    causal: true,
                };
                let plan = MlaPlan::new(&self.exec, problem, &qo, table.lens(), Split::Balanced)?;
                State::Mla { scratch: plan.scratch(), plan, table }
            }
            _ => State::None,
        };
        Ok(Prepared { operator: self, state })
    }

    fn param(&self, name: &str, usual: f64) -> f64 {
        self.params[name].as_f64().unwrap_or(usual)
    }
}

fn page_table(exec: &Exec, known: &Named<'_>, cache: &Array) -> Result<PageTable<'static>> {
    let (indptr, indices) = (known.ids("kv_indptr")?.to_vec(), known.ids("kv_indices")?.to_vec());
    let (pages, page_size) = (dim(cache, 0), dim(cache, 1));
    let batch = indptr.len().saturating_sub(1);
    let last = match known.find("kv_last_page_len") {
        // Some definitions give it as many entries as `kv_indptr` has: the last is of no request.
        Some(_) => known.ids("kv_last_page_len")?.iter().take(batch).copied().collect(),
        None => vec![page_size as i32; batch],
    };
    let table = PageTable::new(page_size, pages, indptr, indices, &last)?;
    Ok(if let Exec::Cuda(gpu) = exec { table.to_device(gpu)? } else { table })
}

impl Prepared<'_> {
    /// One call.
    pub(crate) fn run(&mut self, names: &[&str], args: &[Array], outs: &mut [Array]) -> Result<()> {
        let pairs: Vec<(&str, &Array)> = names.iter().copied().zip(args).collect();
        let (named, exec) = (Named(&pairs), &self.operator.exec);
        let count = outs.len();
        let wrong = || Error::refused("fir", format!("{count} outputs for `{}`", self.operator.name));
        let (first, rest) = outs.split_first_mut().ok_or_else(wrong)?;
        match (self.operator.name, &mut self.state) {
            ("rms_norm", _) => {
                let eps = self.operator.param("eps", 1e-6) as f32;
                norm::rms_norm(
                    exec,
                    named.get("hidden_states")?.view(),
                    named.get("weight")?.view(),
                    eps,
                    first.view_mut(),
                )?;
            }
            ("fused_add_rms_norm", _) => {
                // The operator works in place and the definition does not: `out` begins as the hidden states, and the
                // sum, which the definition does not return, goes to a copy of the residual.
                let eps = self.operator.param("eps", 1e-6) as f32;
                let mut residual = named.get("residual")?.clone();
                if first.is_here() {
                    first.bytes_mut().copy_from_slice(named.get("hidden_states")?.bytes());
                } else {
                    *first = named.get("hidden_states")?.clone();
                }
                let weight = named.get("weight")?.view();
                norm::fused_add_rms_norm(exec, first.view_mut(), residual.view_mut(), weight, eps)?;
            }
            ("gemm", _) => gemm::gemm(exec, named.get("A")?.view(), named.get("B")?.view(), first.view_mut())?,
            ("attention", State::Attention { plan, scratch, kv }) => {
                let kv = match kv {
                    Held::Paged(table) => {
                        let (k, v) = (named.get("k_cache")?.view(), named.get("v_cache")?.view());
                        Kv::Paged(PagedKv::new(k, v, KvLayout::Nhd)?, table)
                    }
                    Held::Ragged(indptr) => {
                        Kv::Ragged(RaggedKv::new(named.get("k")?.view(), named.get("v")?.view(), indptr)?)
                    }
                };
                let lse = rest.first_mut().map(|lse| lse.view_mut());
                let sm_scale = Some(named.number("sm_scale")?);
                let q = named.get("q")?.view();
                plan.run(
                    exec,
                    BatchArgs { q, kv, params: &Params::new(), sm_scale, scratch, out: first.view_mut(), lse },
                )?;
            }
            ("mla", State::Mla { plan, scratch, table }) => {
                let kv = PagedMla::new(named.get("ckv_cache")?.view(), named.get("kpe_cache")?.view())?;
                let (q_nope, q_pe) = (named.get("q_nope")?.view(), named.get("q_pe")?.view());
                let lse = rest.first_mut().map(|lse| lse.view_mut());
                let sm_scale = named.number("sm_scale")?;
                plan.run(exec, MlaArgs { q_nope, q_pe, kv, table, sm_scale, scratch, out: first.view_mut(), lse })?;
            }
            ("rope", _) => {
                let k_out = rest.first_mut().ok_or_else(wrong)?.view_mut();
                let interleave = self.operator.params["interleave"] == true;
                let angles = Angles::Cache { table: named.get("cos_sin_cache")?.view(), interleave };
                let positions = Positions::Ids(named.get("positions")?.view());
                rope::apply_rope(
                    exec,
                    named.get("q")?.view(),
                    named.get("k")?.view(),
                    positions,
                    angles,
                    first.view_mut(),
                    k_out,
                )?;
            }
            ("sample", _) => {
                let seed = self.operator.param("seed", 0.0) as u64;
                let offset = self.operator.calls.fetch_add(1, Ordering::Relaxed);
                let draw = Draw::new(RngState { seed, offset }, first.view_mut());
                sample(exec, &named, draw)?;
            }
            ("moe", _) => {
                moe(exec, &self.operator.params, &named, first)?;
            }
            _ => return Err(wrong()),
        }
        Ok(())
    }
}

/// Draws by the definition's rules: a `top_k` that is no count of tokens keeps all, `top_p` of 0 or less the best.
fn sample(exec: &Exec, named: &Named<'_>, draw: Draw<'_>) -> Result<()> {
    let probs = named.get("probs")?;
    let vocab = probs.shape().last().copied().unwrap_or(0) as i64;
    let rows = dim(probs, 0);
    let top_p: Option<Vec<f32>> = named.find("top_p").map(|p| (0..rows).map(|i| p.get(i) as f32).collect());
    let greedy = |i: usize| top_p.as_ref().is_some_and(|p| p[i] <= 0.0);
    let top_k: Vec<u32> = (0..rows)
        .map(|i| match named.find("top_k").map(|k| k.integer(i)) {
            _ if greedy(i) => 1,
            Some(k) if k > 0 && k < vocab => k as u32,
            _ => vocab as u32,
        })
        .collect();
    let top_p: Vec<f32> =
        top_p.map_or(vec![1.0; rows], |p| p.iter().map(|p| if *p > 0.0 { p.min(1.0) } else { 1.0 }).collect());
    let (k, p) = (top_k.as_slice().into(), top_p.as_slice().into());
    Ok(sampling::top_k_top_p_sample(exec, probs.view(), k, p, fir::filters::FilterOrder::TopKFirst, draw)?)
}

/// Routing, then the experts that are here, in f32. Definitions have gates last, so the halves of the first product are turned
/// around.
fn moe(exec: &Exec, params: &Value, named: &Named<'_>, out: &mut Array) -> Result<()> {
    let (w1, w2, rule) = (named.get("gemm1_weights")?, named.get("gemm2_weights")?, params["routing"].as_str());
    let mut x = widened(named.get("hidden_states")?, named.find("hidden_states_scale"))?;
    let (tokens, local) = (dim(&x, 0), dim(w1, 0));
    let number = |value: &Value| value.as_u64().unwrap_or(1) as usize;
    let top_k = number(&params["top_k"]);
    let mut ids = Array::zeros(DType::Int32, &[tokens, top_k])?;
    let mut weights = Array::zeros(DType::Float32, &[tokens, top_k])?;
    if let Some(packed) = named.find("topk_ids") {
        // An expert above its weight's 16 bits.
        for (i, p) in packed.typed::<i32>().iter().enumerate() {
            ids.typed_mut::<i32>()[i] = p >> 16;
            weights.typed_mut::<f32>()[i] = bf16::from_bits(*p as u16).to_f32();
        }
    } else {
        let deepseek = rule == Some("deepseek");
        let groups = params["groups"].as_array().filter(|g| g.len() == 2);
        let groups = groups.map(|g| Groups { count: number(&g[0]), chosen: number(&g[1]) });
        let score = if deepseek || rule == Some("llama4") { Score::Sigmoid } else { Score::Softmax };
        let scale = named.find("routed_scaling_factor").map_or(1.0, |s| s.get(0) as f32);
        let routing = Routing { score, renormalize: rule != Some("llama4"), groups, scale };
        let bias = named.find("routing_bias").filter(|_| deepseek).map(Array::view);
        let (logits, ids, weights) = (named.get("routing_logits")?.view(), ids.view_mut(), weights.view_mut());
        route(exec, routing, RouteArgs { logits, bias, ids, weights })?;
    }
    let offset = named.find("local_expert_offset").map_or(0, |o| o.integer(0));
    for id in ids.typed_mut::<i32>() {
        let here = i64::from(*id) - offset;
        *id = if (0..local as i64).contains(&here) { here as i32 } else { -1 };
    }
    if params["weigh_input"] == true {
        let hidden = dim(&x, 1).max(1);
        let rows = x.typed_mut::<f32>().chunks_mut(hidden).zip(weights.typed::<f32>().chunks(top_k));
        rows.for_each(|(row, w)| row.iter_mut().for_each(|x| *x *= w[0]));
        weights.typed_mut::<f32>().fill(1.0);
    }
    let turned = halves_turned(w1);
    let (one, two): (Array, Array);
    let (w_gate_up, w_down) = if let Some(scales) = named.find("gemm1_weights_scale") {
        one = halves_turned(scales);
        let down = Scaled::new(w2.view(), named.get("gemm2_weights_scale")?.view(), Block::TILE);
        (Scaled::new(turned.view(), one.view(), Block::TILE), down)
    } else if let Some(up) = named.find("output1_scales_scalar") {
        let pairs = named.get("output1_scales_gate_scalar")?.typed::<f32>().iter().zip(up.typed::<f32>());
        let pairs: Vec<f32> = pairs.flat_map(|(gate, up)| [*gate, *up]).collect();
        one = Array::from_bytes(DType::Float32, &[local, 2, 1], bytemuck::cast_slice(&pairs))?;
        two = Array::from_bytes(DType::Float32, &[local, 1, 1], named.get("output2_scales_scalar")?.bytes())?;
        let half = Block { rows: dim(w1, 1) / 2, columns: Block::ALL };
        (Scaled::new(turned.view(), one.view(), half), Scaled::new(w2.view(), two.view(), Block::TENSOR))
    } else {
        (turned.view().into(), w2.view().into())
    };
    let (ids, weights, mut wide) = (ids.view(), weights.view(), Array::zeros(DType::Float32, x.shape())?);
    let to = wide.view_mut();
    moe_ffn(exec, FfnArgs { x: x.view(), ids, weights, w_gate_up, w_down, gate: Gate::Silu, out: to })?;
    (0..out.len()).for_each(|i| out.set(i, wide.get(i)));
    Ok(())
}

/// `x[t, h]`, times `scale[h / 128, t]` if there are scales, in f32.
fn widened(x: &Array, scale: Option<&Array>) -> Result<Array> {
    let (tokens, hidden) = (dim(x, 0), dim(x, 1));
    let mut wide = Array::zeros(DType::Float32, &[tokens, hidden])?;
    for (i, o) in wide.typed_mut::<f32>().iter_mut().enumerate() {
        let by = scale.map_or(1.0, |s| s.typed::<f32>()[i % hidden / 128 * tokens + i / hidden]);
        *o = x.get(i) as f32 * by;
    }
    Ok(wide)
}

/// The two halves of each expert's rows in the other order.
fn halves_turned(w: &Array) -> Array {
    let mut turned = w.clone();
    let expert = w.bytes().len() / dim(w, 0).max(1);
    if expert > 0 {
        let pairs = turned.bytes_mut().chunks_exact_mut(expert).zip(w.bytes().chunks_exact(expert));
        pairs.for_each(|(to, from)| {
            let half = expert / 2;
            to[..half].copy_from_slice(&from[half..]);
            to[half..].copy_from_slice(&from[..half]);
        });
    }
    turned
}
