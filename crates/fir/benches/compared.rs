//! Our side of `cargo xtask bench-cpu`: operators beside another library, one case at a time.
//!
//! With `--serve` it answers lines of its standard input, each with a line of JSON:
//!
//! * `case ID` prepares a case, such as `decode/bf16/h32x8-d128-b8-kv4096`, and runs it once: the bytes and operations
//!   that it must do at the least, and a few numbers of the result, which the other side's have to equal.
//! * `sample MS` repeats it for so many milliseconds: the seconds of the fastest call.
//! * `ceilings` measures those once.
//! * `issued`: how many instructions per second the threads are given, by which one knows a neighbour.
//!
//! Inputs are numbers that both sides make from their places alone ([`number`]). Without `--serve` a small case of
//! every kind runs once.
#![allow(clippy::print_stdout, reason = "its answers")]

mod support;

use std::io::BufRead;
use std::time::{Duration, Instant};

use fir::attention::{BatchArgs, BatchPlan, MlaArgs, MlaPlan, MlaProblem, Problem, Scratch, Split};
use fir::gemm::{BlockFormat, BlockWeights, DenseWeights, GroupedArgs, Weights};
use fir::kv::{Kv, KvLayout, PageTable, PagedKv, PagedMla, Ragged};
use fir::moe::{self, FfnArgs, Gate};
use fir::sampling::{self, Draw, Filters, RngState};
use fir::tensor::{Block, Scaled};
use fir::variant::{self, Params};
use fir::{DType, Exec, Tensor, TensorRef, gemm, norm};
use support::ceilings::{Ceilings, issued};
use support::{Work, blocks};

/// An operator with its inputs.
trait Case {
    fn work(&self) -> Work;
    fn run(&mut self) -> fir::Result<()>;
    /// Eight numbers of the last row of the output; none where the two sides need not agree.
    fn result(&self) -> Vec<f32>;
}

/// One of every kind, for the check.
const SMALL: [&str; 12] = [
    "prefill/bf16/h4x2-d128-t130",
    "decode/f32/h4x2-d128-b2-kv100",
    "mla/bf16/h4-c512-r64-b2-kv70",
    "gemm/f16/n160-k256-m3",
    "packed_gemm/bf16/n160-k256-m3",
    "block_gemm/Q4_K/n160-k256-m3",
    "scaled_gemm/e4m3/n160-k256-m3",
    "grouped_gemm/bf16/g3-n160-k256-m2",
    "moe_ffn/bf16/e4x2-h128-i96-t3",
    "rms_norm/bf16/h300-t3",
    "softmax/f32/v3000-b2",
    "top_p/f32/v3000-b2",
];

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let exec = Exec::cpu().expect("FIR_CPU_* to be valid");
    if args.iter().any(|a| a == "--serve") {
        serve(&exec, args.iter().any(|a| a == "--quick"));
        return;
    }
    for id in SMALL {
        let case = prepared(&exec, id).unwrap_or_else(|e| panic!("{id}: {e}"));
        assert!(case.result().iter().all(|x| x.is_finite()), "{id}: {:?}", case.result());
    }
    println!("{} cases run once (`cargo xtask bench-cpu` times them)", SMALL.len());
}

fn serve(exec: &Exec, quick: bool) {
    let (mut case, mut ceilings) = (None, None);
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("a line of text");
        let (command, argument) = line.split_once(' ').unwrap_or((&line, ""));
        match command {
            "case" => {
                case = None; // Two large ones need not fit.
                match prepared(exec, argument) {
                    Ok(made) => {
                        let Work { bytes, flops } = made.work();
                        println!("{{\"bytes\": {bytes}, \"flops\": {flops}, \"result\": {:?}}}", made.result());
                        case = Some(made);
                    }
                    Err(e) => println!("{{\"error\": {:?}}}", e.to_string()),
                }
            }
            "sample" => {
                let time = Duration::from_millis(argument.parse().expect("milliseconds"));
                let case = case.as_deref_mut().expect("a case before its samples");
                println!("{{\"seconds\": {:e}}}", fastest(time, || case.run().expect("it ran before")));
            }
            "ceilings" => {
                let c = ceilings.get_or_insert_with(|| Ceilings::new(exec.workers(), quick));
                c.reset();
                c.memory_slice();
                // Each is short, and a neighbour on the same core halves it.
                (0..4).for_each(|_| c.arithmetic_slice());
                let r = c.best;
                println!(
                    "{{\"read\": {:e}, \"copy\": {:e}, \"fma\": {:e}, \"amx_bf16\": {:e}, \"amx_int8\": {:e}}}",
                    r.read, r.copy, r.fma, r.amx_bf16, r.amx_int8
                );
            }
            "issued" => println!("{{\"issued\": {:e}}}", issued(exec.workers())),
            _ => println!("{{\"error\": {:?}}}", format!("no command {command:?}")),
        }
    }
}

fn prepared(exec: &Exec, id: &str) -> fir::Result<Box<dyn Case>> {
    let mut case = case_of(exec, &Id::parse(id))?;
    case.run()?;
    Ok(case)
}

/// Seconds of the fastest call, or of the fastest millisecond of calls.
fn fastest(time: Duration, mut run: impl FnMut()) -> f64 {
    let (begin, mut calls, mut least) = (Instant::now(), 1u32, f64::INFINITY);
    while begin.elapsed() < time || least == f64::INFINITY {
        let start = Instant::now();
        for _ in 0..calls {
            run();
        }
        let took = start.elapsed();
        least = least.min(took.as_secs_f64() / f64::from(calls));
        if took < Duration::from_millis(1) {
            calls *= 2;
        }
    }
    least
}

/// `KIND/TYPE/SIZES`, type a tensor's or a weight format, sizes as in `h32x8-d128`: letters, then a number or two.
struct Id<'a> {
    kind: &'a str,
    of: &'a str,
    sizes: Vec<(&'a str, Vec<usize>)>,
}

impl<'a> Id<'a> {
    fn parse(id: &'a str) -> Self {
        let [kind, of, sizes] = id.split('/').collect::<Vec<_>>()[..] else { panic!("{id}: not KIND/TYPE/SIZES") };
        let sizes = sizes.split('-').map(|size| {
            let (name, numbers) = size.split_at(size.find(|c: char| c.is_ascii_digit()).unwrap_or(size.len()));
            (name, numbers.split('x').map(|n| n.parse().expect("a size")).collect())
        });
        Self { kind, of, sizes: sizes.collect() }
    }

    fn dtype(&self) -> DType {
        match self.of {
            "f32" => DType::F32,
            "f16" => DType::F16,
            "bf16" => DType::BF16,
            other => panic!("{}: no type {other}", self.kind),
        }
    }

    fn all(&self, name: &str) -> &[usize] {
        let found = self.sizes.iter().find(|(n, _)| *n == name);
        &found.unwrap_or_else(|| panic!("{}: no size {name}", self.kind)).1
    }

    fn size(&self, name: &str) -> usize {
        self.all(name)[0]
    }
}

/// Kinds of cases. Another one is a line here and in `compared.py`, and rows in xtask.
fn case_of(exec: &Exec, id: &Id<'_>) -> fir::Result<Box<dyn Case>> {
    Ok(match id.kind {
        "prefill" => Box::new(Attention::new(exec, id, 1, id.size("t"), id.size("t"))?),
        "decode" => Box::new(Attention::new(exec, id, id.size("b"), 1, id.size("kv"))?),
        "mla" => Box::new(Mla::new(exec, id)?),
        "gemm" => Box::new(Gemm::new(exec, id, false)?),
        "packed_gemm" => Box::new(Gemm::new(exec, id, true)?),
        "block_gemm" => Box::new(BlockGemm::new(exec, id)?),
        "scaled_gemm" => Box::new(ScaledGemm::new(exec, id)),
        "grouped_gemm" => Box::new(GroupedGemm::new(exec, id)?),
        "moe_ffn" => Box::new(MoeFfn::new(exec, id)),
        "rms_norm" => Box::new(RmsNorm::new(exec, id)),
        "softmax" => Box::new(Softmax::new(exec, id)),
        "top_p" => Box::new(TopP::new(exec, id)),
        other => panic!("no kind {other}"),
    })
}

/// Number `i` of tensor `seed`, in `[-1, 1)`: a hash. Tensors repeat theirs after 65536.
fn number(seed: u32, i: u32) -> f32 {
    let h = i.wrapping_mul(2_654_435_761).wrapping_add(seed.wrapping_mul(974_711));
    let h = (h ^ h >> 15).wrapping_mul(2_246_822_519);
    ((h ^ h >> 13) >> 8) as f32 / 8_388_608.0 - 1.0
}

fn filled(seed: u32, dtype: DType, shape: &[usize], of: impl Fn(f32) -> f32) -> Tensor {
    let block: Vec<f32> = (0..1 << 16).map(|i| of(number(seed, i))).collect();
    let block = Tensor::from_f32(dtype, &block, &[1 << 16]).expect("a float type");
    let mut all = Tensor::zeros(dtype, shape).expect("memory");
    macro_rules! fill {
        ($t:ty) => {{
            let block = block.as_slice::<$t>().expect("its type");
            for part in all.as_mut_slice::<$t>().expect("its type").chunks_mut(1 << 16) {
                part.copy_from_slice(&block[..part.len()]);
            }
        }};
    }
    match dtype {
        DType::F32 => fill!(f32),
        DType::F16 => fill!(fir::tensor::f16),
        DType::E4M3 => fill!(fir::tensor::E4m3),
        _ => fill!(fir::tensor::bf16),
    }
    all
}

fn uniform(seed: u32, dtype: DType, shape: &[usize]) -> Tensor {
    filled(seed, dtype, shape, |x| x)
}

/// As a language model's: one in a hundred is near the largest.
fn logits(shape: &[usize]) -> Tensor {
    filled(1, DType::F32, shape, |x| 20.0 * x.powi(5))
}

/// The first eight numbers of the last entry of the first axis.
fn last(out: &Tensor) -> Vec<f32> {
    let rows = out.view().shape()[0];
    let mut row = out.view().slice(0, rows - 1..rows).and_then(|row| row.to_f32_vec()).expect("a float tensor");
    row.truncate(8);
    row
}

/// Requests of equal length over pages of 16 that lie far apart.
struct Attention {
    exec: Exec,
    plan: BatchPlan,
    params: Params<'static>,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: PageTable<'static>,
    scratch: Scratch,
    out: Tensor,
    work: Work,
}

const PAGE: usize = 16;

impl Attention {
    fn new(exec: &Exec, id: &Id<'_>, batch: usize, q_len: usize, kv_len: usize) -> fir::Result<Self> {
        let (heads, kv_heads, dim, dtype) = (id.all("h")[0], id.all("h")[1], id.size("d"), id.dtype());
        let causal = q_len > 1;
        let variant = if causal { variant::causal() } else { variant::standard() };
        let problem = Problem::new(heads, kv_heads, dim, dtype, variant);
        let table = scattered(PAGE, batch, kv_len)?;
        let cache = [table.num_pages(), PAGE, kv_heads, dim];
        let qo = Ragged::from_lens(&vec![q_len as u32; batch])?;
        let plan = BatchPlan::new(exec, problem, &qo, table.lens(), Split::Balanced)?;
        let pairs = batch * if causal { kv_len * (kv_len + 1) / 2 } else { kv_len };
        let size = dtype.size();
        Ok(Self {
            exec: exec.clone(),
            params: Params::new(),
            q: uniform(1, dtype, &[batch * q_len, heads, dim]),
            k: uniform(2, dtype, &cache),
            v: uniform(3, dtype, &cache),
            scratch: plan.scratch(),
            out: Tensor::zeros(dtype, &[batch * q_len, heads, dim])?,
            work: Work { bytes: 2 * batch * kv_len * kv_heads * dim * size, flops: pairs * heads * dim * 4 },
            plan,
            table,
        })
    }
}

/// A table of equal requests. Pages of one request lie far apart, but page `p` where a multiple of four pages away from
/// it would be, so that a cache of 65536 numbers over and over is the other side's contiguous one.
fn scattered(page: usize, batch: usize, kv_len: usize) -> fir::Result<PageTable<'static>> {
    let each = kv_len.div_ceil(page);
    let pages = batch * each;
    let step = if pages.is_power_of_two() { 7921 } else { 1 };
    let indices: Vec<i32> = (0..pages).map(|i| (i * step % pages) as i32).collect();
    let indptr: Vec<i32> = (0..=batch).map(|r| (r * each) as i32).collect();
    PageTable::with_lens(page, pages, indptr, indices, &vec![kv_len as i32; batch])
}

impl Case for Attention {
    fn work(&self) -> Work {
        self.work
    }
    fn run(&mut self) -> fir::Result<()> {
        let args = BatchArgs {
            q: self.q.view(),
            kv: Kv::Paged(PagedKv::new(self.k.view(), self.v.view(), KvLayout::Nhd)?, &self.table),
            params: &self.params,
            sm_scale: None,
            scratch: &mut self.scratch,
            out: self.out.view_mut(),
            lse: None,
        };
        self.plan.run(&self.exec, args)
    }
    fn result(&self) -> Vec<f32> {
        last(&self.out)
    }
}

/// Decode over a latent cache, pages of 64.
struct Mla {
    exec: Exec,
    plan: MlaPlan,
    q_nope: Tensor,
    q_pe: Tensor,
    ckv: Tensor,
    kpe: Tensor,
    table: PageTable<'static>,
    scratch: Scratch,
    out: Tensor,
    work: Work,
}

impl Mla {
    fn new(exec: &Exec, id: &Id<'_>) -> fir::Result<Self> {
        let (heads, c, r, dtype) = (id.size("h"), id.size("c"), id.size("r"), id.dtype());
        let (batch, kv_len) = (id.size("b"), id.size("kv"));
        let problem = MlaProblem {
            heads,
            head_dim_ckv: c,
            head_dim_kpe: r,
            q_dtype: dtype,
            kv_dtype: dtype,
            out_dtype: dtype,
            causal: false,
        };
        let table = scattered(64, batch, kv_len)?;
        let plan = MlaPlan::new(exec, problem, &Ragged::ones(batch)?, table.lens(), Split::Balanced)?;
        let tokens = batch * kv_len;
        Ok(Self {
            exec: exec.clone(),
            q_nope: uniform(1, dtype, &[batch, heads, c]),
            q_pe: uniform(2, dtype, &[batch, heads, r]),
            ckv: uniform(3, dtype, &[table.num_pages(), 64, c]),
            kpe: uniform(4, dtype, &[table.num_pages(), 64, r]),
            scratch: plan.scratch(),
            out: Tensor::zeros(dtype, &[batch, heads, c])?,
            work: Work { bytes: tokens * (c + r) * dtype.size(), flops: tokens * heads * (2 * c + r) * 2 },
            plan,
            table,
        })
    }
}

impl Case for Mla {
    fn work(&self) -> Work {
        self.work
    }
    fn run(&mut self) -> fir::Result<()> {
        let args = MlaArgs {
            q_nope: self.q_nope.view(),
            q_pe: self.q_pe.view(),
            kv: PagedMla::new(self.ckv.view(), self.kpe.view())?,
            table: &self.table,
            sm_scale: 0.07,
            scratch: &mut self.scratch,
            out: self.out.view_mut(),
            lse: None,
        };
        self.plan.run(&self.exec, args)
    }
    fn result(&self) -> Vec<f32> {
        last(&self.out)
    }
}

/// `x · wᵀ`, weights packed before where that is of use.
struct Gemm {
    exec: Exec,
    x: Tensor,
    w: Tensor,
    packed: Option<DenseWeights>,
    out: Tensor,
    work: Work,
}

impl Gemm {
    fn new(exec: &Exec, id: &Id<'_>, packed: bool) -> fir::Result<Self> {
        let (n, k, m, dtype) = (id.size("n"), id.size("k"), id.size("m"), id.dtype());
        let w = uniform(2, dtype, &[n, k]);
        Ok(Self {
            exec: exec.clone(),
            x: uniform(1, dtype, &[m, k]),
            packed: if packed { DenseWeights::pack(exec, w.view())? } else { None },
            w,
            out: uniform(3, dtype, &[m, n]),
            work: Work { bytes: (m * k + n * k + m * n) * dtype.size(), flops: 2 * m * n * k },
        })
    }
}

impl Case for Gemm {
    fn work(&self) -> Work {
        self.work
    }
    fn run(&mut self) -> fir::Result<()> {
        let w = self.packed.as_ref().map_or_else(|| self.w.view().into(), Weights::from);
        gemm::gemm(&self.exec, self.x.view(), w, self.out.view_mut())
    }
    fn result(&self) -> Vec<f32> {
        last(&self.out)
    }
}

/// `x · wᵀ`, `x` of bf16 and `w` in a block format: random bits, so the other side has weights of its own.
struct BlockGemm {
    exec: Exec,
    x: Tensor,
    w: BlockWeights,
    out: Tensor,
    work: Work,
}

impl BlockGemm {
    fn new(exec: &Exec, id: &Id<'_>) -> fir::Result<Self> {
        let (n, k, m, format) = (id.size("n"), id.size("k"), id.size("m"), id.of.parse::<BlockFormat>()?);
        let w = BlockWeights::pack(exec, format, &blocks(format, n, k), n, k)?;
        Ok(Self {
            exec: exec.clone(),
            x: uniform(1, DType::BF16, &[m, k]),
            out: uniform(3, DType::BF16, &[m, n]),
            work: Work { bytes: w.bytes() + 2 * m * (k + n), flops: 2 * m * n * k },
            w,
        })
    }
}

impl Case for BlockGemm {
    fn work(&self) -> Work {
        self.work
    }
    fn run(&mut self) -> fir::Result<()> {
        gemm::block_gemm(&self.exec, self.x.view(), &self.w, self.out.view_mut())
    }
    fn result(&self) -> Vec<f32> {
        Vec::new()
    }
}

/// `x · wᵀ`, `x` of bf16 and `w` of e4m3 with a scale per 128 × 128.
struct ScaledGemm {
    exec: Exec,
    x: Tensor,
    w: Tensor,
    scales: Tensor,
    out: Tensor,
    work: Work,
}

impl ScaledGemm {
    fn new(exec: &Exec, id: &Id<'_>) -> Self {
        let (n, k, m) = (id.size("n"), id.size("k"), id.size("m"));
        assert_eq!(id.of, "e4m3");
        Self {
            exec: exec.clone(),
            x: uniform(1, DType::BF16, &[m, k]),
            w: uniform(2, DType::E4M3, &[n, k]),
            scales: uniform(4, DType::F32, &Block::TILE.counts(n, k)),
            out: uniform(3, DType::BF16, &[m, n]),
            work: Work { bytes: n * k + 2 * m * (k + n), flops: 2 * m * n * k },
        }
    }
}

impl Case for ScaledGemm {
    fn work(&self) -> Work {
        self.work
    }
    fn run(&mut self) -> fir::Result<()> {
        let w = Scaled::new(self.w.view(), self.scales.view(), Block::TILE);
        gemm::scaled_gemm(&self.exec, self.x.view().into(), w, self.out.view_mut())
    }
    fn result(&self) -> Vec<f32> {
        last(&self.out)
    }
}

/// Groups of `m` rows, each by weights of its own.
struct GroupedGemm {
    exec: Exec,
    x: Tensor,
    indptr: Ragged,
    w: Tensor,
    out: Tensor,
    work: Work,
}

impl GroupedGemm {
    fn new(exec: &Exec, id: &Id<'_>) -> fir::Result<Self> {
        let (groups, n, k, m, dtype) = (id.size("g"), id.size("n"), id.size("k"), id.size("m"), id.dtype());
        Ok(Self {
            exec: exec.clone(),
            x: uniform(1, dtype, &[groups * m, k]),
            indptr: Ragged::from_lens(&vec![m as u32; groups])?,
            w: uniform(2, dtype, &[groups, n, k]),
            out: uniform(3, dtype, &[groups * m, n]),
            work: Work { bytes: groups * (m * k + n * k + m * n) * dtype.size(), flops: 2 * groups * m * n * k },
        })
    }
}

impl Case for GroupedGemm {
    fn work(&self) -> Work {
        self.work
    }
    fn run(&mut self) -> fir::Result<()> {
        let (x, w, out) = (self.x.view().into(), self.w.view().into(), self.out.view_mut());
        gemm::grouped_gemm(&self.exec, GroupedArgs { x, indptr: &self.indptr, w, weight_indices: None, out })
    }
    fn result(&self) -> Vec<f32> {
        last(&self.out)
    }
}

/// A mixture of `e` experts, so many to a token, who follow one another from token to token.
struct MoeFfn {
    exec: Exec,
    x: Tensor,
    ids: Vec<i32>,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    out: Tensor,
    work: Work,
}

impl MoeFfn {
    fn new(exec: &Exec, id: &Id<'_>) -> Self {
        let (experts, top_k, hidden, inter) = (id.all("e")[0], id.all("e")[1], id.size("h"), id.size("i"));
        let (tokens, dtype) = (id.size("t"), id.dtype());
        let used = (tokens * top_k).min(experts);
        Self {
            exec: exec.clone(),
            x: uniform(1, dtype, &[tokens, hidden]),
            ids: (0..tokens * top_k).map(|i| (i % experts) as i32).collect(),
            weights: uniform(4, DType::F32, &[tokens, top_k]),
            up: uniform(2, dtype, &[experts, 2 * inter, hidden]),
            down: uniform(3, dtype, &[experts, hidden, inter]),
            out: uniform(5, dtype, &[tokens, hidden]),
            work: Work {
                bytes: (used * 3 * inter * hidden + 2 * tokens * hidden) * dtype.size(),
                flops: 6 * tokens * top_k * inter * hidden,
            },
        }
    }
}

impl Case for MoeFfn {
    fn work(&self) -> Work {
        self.work
    }
    fn run(&mut self) -> fir::Result<()> {
        let ids = TensorRef::new(&self.ids, self.weights.view().shape())?;
        let args = FfnArgs {
            x: self.x.view(),
            ids,
            weights: self.weights.view(),
            w_gate_up: self.up.view().into(),
            w_down: self.down.view().into(),
            gate: Gate::Silu,
            out: self.out.view_mut(),
        };
        moe::moe_ffn(&self.exec, args)
    }
    fn result(&self) -> Vec<f32> {
        last(&self.out)
    }
}

struct RmsNorm {
    exec: Exec,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
}

impl RmsNorm {
    fn new(exec: &Exec, id: &Id<'_>) -> Self {
        let (shape, dtype) = ([id.size("t"), id.size("h")], id.dtype());
        let (x, weight, out) = (uniform(1, dtype, &shape), uniform(2, dtype, &shape[1..]), uniform(3, dtype, &shape));
        Self { exec: exec.clone(), x, weight, out }
    }
}

impl Case for RmsNorm {
    fn work(&self) -> Work {
        let elements: usize = self.x.view().shape().iter().product();
        Work { bytes: 2 * elements * self.x.dtype().size(), flops: 4 * elements }
    }
    fn run(&mut self) -> fir::Result<()> {
        norm::rms_norm(&self.exec, self.x.view(), self.weight.view(), 1e-6, self.out.view_mut())
    }
    fn result(&self) -> Vec<f32> {
        last(&self.out)
    }
}

struct Softmax {
    exec: Exec,
    x: Tensor,
    out: Tensor,
}

impl Softmax {
    fn new(exec: &Exec, id: &Id<'_>) -> Self {
        let shape = [id.size("b"), id.size("v")];
        Self { exec: exec.clone(), x: logits(&shape), out: logits(&shape) }
    }
}

impl Case for Softmax {
    fn work(&self) -> Work {
        Work { bytes: self.x.view().shape().iter().product::<usize>() * 8, flops: 0 }
    }
    fn run(&mut self) -> fir::Result<()> {
        sampling::softmax(&self.exec, self.x.view(), 1.0.into(), self.out.view_mut())
    }
    fn result(&self) -> Vec<f32> {
        last(&self.out)
    }
}

/// A token from each row of logits, out of the likeliest that hold nine tenths of the mass.
struct TopP {
    exec: Exec,
    x: Tensor,
    out: Tensor,
}

impl TopP {
    fn new(exec: &Exec, id: &Id<'_>) -> Self {
        let (batch, vocab) = (id.size("b"), id.size("v"));
        let out = Tensor::zeros(DType::I32, &[batch]).expect("memory");
        Self { exec: exec.clone(), x: logits(&[batch, vocab]), out }
    }
}

impl Case for TopP {
    fn work(&self) -> Work {
        Work { bytes: self.x.view().shape().iter().product::<usize>() * 4, flops: 0 }
    }
    fn run(&mut self) -> fir::Result<()> {
        let filters = Filters { top_p: 0.9.into(), ..Filters::default() };
        let draw = Draw::new(RngState { seed: 1, offset: 0 }, self.out.view_mut());
        sampling::sample(&self.exec, self.x.view(), filters, draw)
    }
    fn result(&self) -> Vec<f32> {
        Vec::new()
    }
}
