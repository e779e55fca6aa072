//! Norms over rows: RMS norm, Gemma's form of it, layer norm; fused with a residual's addition, or with quantization.
//!
//! Sums and products are f32 whatever the tensors' type. A row's result depends on that row alone.

pub use crate::args::{ModulatedArgs, Modulation};
use crate::cpu::{self, norm::Params};
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::error::{Error, Result};
use crate::exec::{Call, Exec};
use crate::tensor::{DType, Dims, TensorMut, TensorRef};

/// Scales each row of `x` to unit root mean square, then by `weight`.
///
/// `out[t, h] = x[t, h] / sqrt(mean_h(x[t, h]²) + eps) * weight[h]`
///
/// * `x`, `out`: `[tokens, hidden]` or `[tokens, heads, hidden]`, f32, f16 or bf16; rows contiguous
/// * `weight`: `[hidden]`, f32, f16 or bf16
pub fn rms_norm(exec: &Exec, x: TensorRef<'_>, weight: TensorRef<'_>, eps: f32, out: TensorMut<'_>) -> Result<()> {
    norm(exec, Params::rms("rms_norm", weight, eps), x, out)
}

/// [`rms_norm`] with Gemma's weights, which are stored less one.
///
/// `out[t, h] = x[t, h] / sqrt(mean_h(x[t, h]²) + eps) * (1 + weight[h])`
///
/// Shapes and types as in [`rms_norm`].
pub fn gemma_rms_norm(
    exec: &Exec,
    x: TensorRef<'_>,
    weight: TensorRef<'_>,
    eps: f32,
    out: TensorMut<'_>,
) -> Result<()> {
    norm(exec, Params { shift: 1.0, ..Params::rms("gemma_rms_norm", weight, eps) }, x, out)
}

/// Adds `x` to `residual`, and replaces `x` by the norm of the sum.
///
/// `s = x + residual; residual = s; x[t, h] = s[t, h] / sqrt(mean_h(s[t, h]²) + eps) * weight[h]`
///
/// The norm is of the sum in f32; only what is stored in `residual` is rounded to its type.
///
/// * `x`, `residual`: `[tokens, hidden]` or `[tokens, heads, hidden]`, both f32, f16 or bf16; rows contiguous
/// * `weight`: `[hidden]`, f32, f16 or bf16
pub fn fused_add_rms_norm(
    exec: &Exec,
    x: TensorMut<'_>,
    residual: TensorMut<'_>,
    weight: TensorRef<'_>,
    eps: f32,
) -> Result<()> {
    fused_add(exec, Params::rms("fused_add_rms_norm", weight, eps), x, residual)
}

/// [`fused_add_rms_norm`] with Gemma's weights, which are stored less one.
///
/// `s = x + residual; residual = s; x[t, h] = s[t, h] / sqrt(mean_h(s[t, h]²) + eps) * (1 + weight[h])`
///
/// Shapes and types as in [`fused_add_rms_norm`].
pub fn gemma_fused_add_rms_norm(
    exec: &Exec,
    x: TensorMut<'_>,
    residual: TensorMut<'_>,
    weight: TensorRef<'_>,
    eps: f32,
) -> Result<()> {
    fused_add(exec, Params { shift: 1.0, ..Params::rms("gemma_fused_add_rms_norm", weight, eps) }, x, residual)
}

/// Brings each row of `x` to mean 0 and variance 1, then scales and shifts its columns.
///
/// `out[t, h] = (x[t, h] - mean) / sqrt(mean_h((x[t, h] - mean)²) + eps) * gamma[h] + beta[h]`,
/// `mean = mean_h(x[t, h])`
///
/// * `x`, `out`: `[tokens, hidden]` or `[tokens, heads, hidden]`, f32, f16 or bf16; rows contiguous
/// * `gamma`, `beta`: `[hidden]`, f32, f16 or bf16
pub fn layer_norm(
    exec: &Exec,
    x: TensorRef<'_>,
    gamma: TensorRef<'_>,
    beta: TensorRef<'_>,
    eps: f32,
    out: TensorMut<'_>,
) -> Result<()> {
    let params = Params { weight_arg: "gamma", bias: Some(beta), ..Params::rms("layer_norm", gamma, eps) };
    norm(exec, params, x, out)
}

/// [`rms_norm`] of every head of the queries and of the keys, in place.
///
/// `q[t, h, d] = q[t, h, d] / sqrt(mean_d(q[t, h, d]²) + eps) * q_weight[d]`, and so for `k`
///
/// * `q`: `[tokens, qo_heads, head_dim]`, `k`: `[tokens, kv_heads, head_dim]`, f32, f16 or bf16; the last axis
///   contiguous, so both may be slices of one tensor of projections
/// * `q_weight`, `k_weight`: `[head_dim]`, f32, f16 or bf16
pub fn qk_rms_norm(
    exec: &Exec,
    q: TensorMut<'_>,
    k: TensorMut<'_>,
    q_weight: TensorRef<'_>,
    k_weight: TensorRef<'_>,
    eps: f32,
) -> Result<()> {
    const OP: &str = "qk_rms_norm";
    Dims::of(OP)
        .bind("q", &q, &["tokens", "qo_heads", "head_dim"])?
        .bind("k", &k, &["tokens", "kv_heads", "head_dim"])?
        .bind("q_weight", &q_weight, &["head_dim"])?
        .bind("k_weight", &k_weight, &["head_dim"])?;
    check_same(OP, "k", k.dtype(), "q", q.dtype())?;
    check_eps(OP, eps)?;
    let params = [("q_weight", q_weight), ("k_weight", k_weight)]
        .map(|(weight_arg, weight)| Params { weight_arg, ..Params::rms(OP, weight, eps) });
    match exec {
        Exec::Cpu(cpu) => cpu::norm::pair_in_place(cpu, params, ["q", "k"], [q, k]),
        #[cfg(feature = "cuda")]
        Exec::Cuda(gpu) => cuda::norm::pair_in_place(gpu, params.map(on_cuda), ["q", "k"], [q, k]),
    }
}

/// [`rms_norm`], divided by `scale` and rounded to fp8.
///
/// `out[t, h] = saturate(x[t, h] / sqrt(mean_h(x[t, h]²) + eps) * weight[h] / scale)`
///
/// * `x`: as in [`rms_norm`]; `out`: its shape, e4m3 or e5m2; results beyond the type's largest number become it
/// * `weight`: `[hidden]`, f32, f16 or bf16
/// * `scale`: more than 0
pub fn rms_norm_quant(
    exec: &Exec,
    x: TensorRef<'_>,
    weight: TensorRef<'_>,
    scale: f32,
    eps: f32,
    out: TensorMut<'_>,
) -> Result<()> {
    norm_quant(exec, Params { scale, ..Params::rms("rms_norm_quant", weight, eps) }, x, None, out)
}

/// Adds `x` to `residual`; the norm of the sum, divided by `scale` and rounded to fp8, goes to `out`.
///
/// `s = x + residual; residual = s; out[t, h] = saturate(s[t, h] / sqrt(mean_h(s[t, h]²) + eps) * weight[h] / scale)`
///
/// The norm is of the sum in f32; only what is stored in `residual` is rounded to its type.
///
/// * `x`, `residual`: as in [`fused_add_rms_norm`]; `out`: their shape, e4m3 or e5m2
/// * `weight`: `[hidden]`, f32, f16 or bf16
/// * `scale`: more than 0
pub fn fused_add_rms_norm_quant(
    exec: &Exec,
    x: TensorRef<'_>,
    residual: TensorMut<'_>,
    weight: TensorRef<'_>,
    scale: f32,
    eps: f32,
    out: TensorMut<'_>,
) -> Result<()> {
    let params = Params { scale, ..Params::rms("fused_add_rms_norm_quant", weight, eps) };
    norm_quant(exec, params, x, Some(residual), out)
}

/// [`layer_norm`], divided by `scale` and rounded to fp8.
///
/// `out[t, h] = saturate(((x[t, h] - mean) / sqrt(mean_h((x[t, h] - mean)²) + eps) * gamma[h] + beta[h]) / scale)`,
/// `mean = mean_h(x[t, h])`
///
/// * `x`, `gamma`, `beta`: as in [`layer_norm`]; `out`: the shape of `x`, e4m3 or e5m2
/// * `scale`: more than 0
pub fn layer_norm_quant(
    exec: &Exec,
    x: TensorRef<'_>,
    gamma: TensorRef<'_>,
    beta: TensorRef<'_>,
    scale: f32,
    eps: f32,
    out: TensorMut<'_>,
) -> Result<()> {
    let params = Params { weight_arg: "gamma", bias: Some(beta), scale, ..Params::rms("layer_norm_quant", gamma, eps) };
    norm_quant(exec, params, x, None, out)
}

/// What a diffusion transformer does between two layers: a gated sum with the residual, and its layer norm, modulated.
///
/// `s = residual + x * x_scale * gate; residual_out = s`,
/// `out[t, h] = (s[t, h] - mean) / sqrt(mean_h((s[t, h] - mean)²) + eps) * scale[t, h] + shift[t, h]`,
/// `mean = mean_h(s[t, h])`
///
/// The norm is of the sum in f32; only what is stored in `residual_out` is rounded to its type.
pub fn modulated_layer_norm(exec: &Exec, args: ModulatedArgs<'_>) -> Result<()> {
    const OP: &str = "modulated_layer_norm";
    let (x, axes) = (args.x, axes_of(args.x.shape()));
    let mut dims = Dims::of(OP);
    dims.bind("x", &x, axes)?;
    let terms = args.terms();
    let given = terms.map(|(t, rows, _)| (rows, t.rows)).into_iter().chain([("residual", args.residual)]);
    for (arg, t) in given.chain([("residual_out", Some(args.residual_out.as_ref())), ("out", Some(args.out.as_ref()))])
    {
        if let Some(t) = t {
            dims.bind(arg, &t, axes)?;
            check_same(OP, arg, t.dtype(), "x", x.dtype())?;
        }
    }
    for (arg, t) in terms.map(|(t, _, columns)| (columns, t.columns)).into_iter().chain([("x_scale", args.x_scale)]) {
        if let Some(t) = t {
            dims.bind(arg, &t, &[if arg == "x_scale" { "x_scales" } else { "hidden" }])?;
            if t.dtype() != DType::F32 {
                return Err(Error::DType { op: OP, arg, got: t.dtype().name(), want: "f32".into() });
            }
            if !t.layout().is_contiguous() {
                return Err(Error::layout(OP, arg, format!("stride {}", t.strides()[0]), "1"));
            }
        }
    }
    if args.x_scale.is_some() && dims.get("x_scales") != 1 {
        return Err(Error::value(OP, "x_scale", format!("{} numbers", dims.get("x_scales")), "one"));
    }
    check_eps(OP, args.eps)?;
    match exec {
        Exec::Cpu(cpu) => cpu::modulate::modulate(cpu, OP, args),
        #[cfg(feature = "cuda")]
        Exec::Cuda(gpu) => cuda::modulate::modulate(gpu, OP, args),
    }
}

fn norm(exec: &Exec, p: Params<'_>, x: TensorRef<'_>, out: TensorMut<'_>) -> Result<()> {
    check_same(p.op, "out", out.dtype(), "x", x.dtype())?;
    run(exec, p, x, None, out)
}

fn norm_quant(
    exec: &Exec,
    p: Params<'_>,
    x: TensorRef<'_>,
    residual: Option<TensorMut<'_>>,
    out: TensorMut<'_>,
) -> Result<()> {
    if !matches!(out.dtype(), DType::E4M3 | DType::E5M2) {
        return Err(Error::DType { op: p.op, arg: "out", got: out.dtype().name(), want: "e4m3 or e5m2".into() });
    }
    if !(p.scale > 0.0 && p.scale.is_finite() && (1.0 / p.scale).is_finite()) {
        return Err(Error::value(p.op, "scale", p.scale, "a number above 0, finite as is its inverse"));
    }
    run(exec, p, x, residual, out)
}

fn run(
    exec: &Exec,
    p: Params<'_>,
    x: TensorRef<'_>,
    residual: Option<TensorMut<'_>>,
    mut out: TensorMut<'_>,
) -> Result<()> {
    let axes = axes_of(x.shape());
    let mut dims = Dims::of(p.op);
    dims.bind("x", &x, axes)?;
    if let Some(residual) = &residual {
        check_same(p.op, "residual", residual.dtype(), "x", x.dtype())?;
        dims.bind("residual", residual, axes)?;
    }
    check_columns(&mut dims, &p)?;
    dims.bind("out", &out, axes)?;
    check_eps(p.op, p.eps)?;
    let done = exec.overridden(|over| {
        let (inputs, numbers) = (&[("hidden_states", x), ("weight", p.weight)], &[("eps", p.eps)]);
        let outputs = &mut [("output", out.reborrow())];
        let (place, stream) = exec.queue();
        Ok(p.op == "rms_norm" && over.call(Call { place, stream, op: "rmsnorm", inputs, numbers, outputs })?)
    })?;
    match exec {
        _ if done => Ok(()),
        Exec::Cpu(cpu) => cpu::norm::norm(cpu, p, x, residual, out),
        #[cfg(feature = "cuda")]
        Exec::Cuda(gpu) => cuda::norm::norm(gpu, on_cuda(p), x, residual, out),
    }
}

fn fused_add(exec: &Exec, p: Params<'_>, mut x: TensorMut<'_>, mut residual: TensorMut<'_>) -> Result<()> {
    let axes = axes_of(x.shape());
    let mut dims = Dims::of(p.op);
    dims.bind("x", &x, axes)?.bind("residual", &residual, axes)?;
    check_columns(&mut dims, &p)?;
    check_same(p.op, "residual", residual.dtype(), "x", x.dtype())?;
    check_eps(p.op, p.eps)?;
    let done = exec.overridden(|over| {
        let (inputs, numbers) = (&[("weight", p.weight)], &[("eps", p.eps)]);
        let outputs = &mut [("hidden_states", x.reborrow()), ("residual", residual.reborrow())];
        let (place, stream) = exec.queue();
        let call = Call { place, stream, op: "fused_add_rmsnorm", inputs, numbers, outputs };
        Ok(p.op == "fused_add_rms_norm" && over.call(call)?)
    })?;
    match exec {
        _ if done => Ok(()),
        Exec::Cpu(cpu) => cpu::norm::fused_add(cpu, p, x, residual),
        #[cfg(feature = "cuda")]
        Exec::Cuda(gpu) => cuda::norm::fused_add(gpu, on_cuda(p), x, residual),
    }
}

#[cfg(feature = "cuda")]
fn on_cuda(p: Params<'_>) -> cuda::norm::Norm<'_> {
    let Params { op, weight, weight_arg, shift, bias, scale, eps } = p;
    cuda::norm::Norm { op, weight: (weight_arg, weight), shift, bias, scale, eps }
}

fn axes_of(shape: &[usize]) -> &'static [&'static str] {
    if shape.len() == 3 { &["tokens", "heads", "hidden"] } else { &["tokens", "hidden"] }
}

fn check_columns(dims: &mut Dims, p: &Params<'_>) -> Result<()> {
    dims.bind(p.weight_arg, &p.weight, &["hidden"])?;
    if let Some(beta) = &p.bias {
        dims.bind("beta", beta, &["hidden"])?;
    }
    Ok(())
}

fn check_same(op: &'static str, arg: &'static str, got: DType, first: &str, want: DType) -> Result<()> {
    if got == want {
        return Ok(());
    }
    Err(Error::DType { op, arg, got: got.name(), want: format!("{want} as `{first}`") })
}

fn check_eps(op: &'static str, eps: f32) -> Result<()> {
    if eps >= 0.0 && eps.is_finite() { Ok(()) } else { Err(Error::value(op, "eps", eps, "a finite number, 0 or more")) }
}
