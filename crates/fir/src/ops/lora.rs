//! Low-rank adapters of a mixture's experts: what a token's own adapter adds to each of its experts' products.
//!
//! An adapter has two matrices for an expert, `a` of `[rank, hidden]` and `b` of `[outputs, rank]`; a pair of a token and an
//! expert goes through both, [`adapt`] being one of them.

pub use crate::args::{AdaptArgs, RowOf};
use crate::cpu;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::error::{Error, Result};
use crate::exec::Exec;
use crate::tensor::{DType, Dims};

/// Multiplies each pair's row by the matrix of its token's adapter for its expert.
///
/// `out[o] += factors[p] * weights[a, e] · x[i]` for every pair `p`, `e = experts[p]`, `a = adapters[tokens[p]]`; `i` and `o`
/// are `p` or `tokens[p]`, as `x_of` and `out_of` say. Without `add` a pair's own row is written instead; rows of pairs that
/// are left out stay as they are.
///
/// Sums are f32. Where rows of `out` are of tokens, a CPU adds a token's pairs in order, a GPU in any order. Numbers that are
/// on a device nobody looks at before the kernel does, which leaves out pairs of an adapter, expert or row that there is not.
pub fn adapt(exec: &Exec, args: AdaptArgs<'_>) -> Result<()> {
    const OP: &str = "adapt";
    let mut dims = Dims::of(OP);
    dims.bind("tokens", &args.tokens, &["pairs"])?.bind("experts", &args.experts, &["pairs"])?;
    dims.bind("adapters", &args.adapters, &["tokens"])?;
    let rows = |of| if of == RowOf::Pair { "pairs" } else { "tokens" };
    dims.bind("x", &args.x, &[rows(args.x_of), "inputs"])?;
    dims.bind("weights", &args.weights, &["adapters", "experts", "outputs", "inputs"])?;
    if let Some(factors) = &args.factors {
        dims.bind("factors", factors, &["pairs"])?;
        if factors.dtype() != DType::F32 {
            return Err(Error::DType { op: OP, arg: "factors", got: factors.dtype().name(), want: "f32".into() });
        }
    }
    dims.bind("out", &args.out, &[rows(args.out_of), "outputs"])?;
    if args.weights.dtype() != args.x.dtype() {
        let want = format!("{} as `x`", args.x.dtype());
        return Err(Error::DType { op: OP, arg: "weights", got: args.weights.dtype().name(), want });
    }
    if args.out.dtype() != DType::F32 && args.out.dtype() != args.x.dtype() {
        let want = format!("f32, or {} as `x`", args.x.dtype());
        return Err(Error::DType { op: OP, arg: "out", got: args.out.dtype().name(), want });
    }
    if args.out_of == RowOf::Token && args.out.dtype() != DType::F32 {
        let want = "f32, as rows of several pairs are added up".into();
        return Err(Error::DType { op: OP, arg: "out", got: args.out.dtype().name(), want });
    }
    match exec {
        Exec::Cpu(cpu) => cpu::lora::adapt(cpu, OP, args),
        #[cfg(feature = "cuda")]
        Exec::Cuda(gpu) => cuda::lora::adapt(gpu, OP, args),
    }
}
