//! Attention's rows: decode, prefill, mixed batches, cascades, block-sparse and latent attention, and plans.

mod compared;

use std::cell::RefCell;
use std::time::Instant;

use fir::attention::{
    BatchArgs, BatchPlan, BlockMask, CascadeArgs, CascadeLevel, CascadePlan, DecodeArgs, DecodePlan, MlaArgs, MlaPlan,
    MlaProblem, Problem, SparseArgs, SparsePlan, Split,
};
use fir::exec::Arch;
use fir::kv::{Kv, KvLayout, PageTable, PagedKv, PagedMla, Ragged, RaggedKv};
use fir::testing::Rng;
use fir::variant::{self, Params, Variant};
use fir::{DType, Error, Result, Tensor, jit};

use super::{Goal, Suite, Work};

const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const DIM: usize = 128;
/// KV tokens of the pool, of which every case takes its pages: 256 × 2048 and a little.
const POOL: usize = 540_672;

/// Requests × KV tokens, our goal and the best peer's time (FlashInfer 0.7.2's, FlashAttention-3's) in µs.
const DECODE: [(usize, u32, f64, &str); 12] = [
    (1, 2_048, 10.0, "26.2"),
    (1, 8_192, 15.0, "27.0"),
    (1, 32_768, 40.0, "53.3"),
    (1, 131_072, 130.0, "142.3"),
    (16, 512, 16.0, "31.1"),
    (16, 2_048, 40.0, "52.5"),
    (16, 8_192, 130.0, "141.4"),
    (64, 512, 40.0, "52.9"),
    (64, 2_048, 128.0, "139.8"),
    (64, 8_192, 485.0, "490.4"),
    (256, 512, 130.0, "149.9"),
    (256, 2_048, 485.0, "499.6"),
];
const DECODE_FP8: [(usize, u32, f64, &str); 3] =
    [(16, 8_192, 75.0, "104.2"), (64, 2_048, 75.0, "113.7"), (256, 2_048, 260.0, "410.1")];

/// Requests × tokens, and for ragged KV, pages of 16 and pages of 1: our goal in TFLOP/s, and what others have.
type Prefill = (usize, u32, [(f64, &'static str); 3]);
const PREFILL: [Prefill; 3] = [
    (16, 1_024, [(490.0, "473 (fa2 311)"), (475.0, "393 (fa2 265)"), (441.0, "333 (fa2 260)")]),
    (4, 4_096, [(640.0, "616 (fa2 346)"), (620.0, "527 (fa2 330)"), (576.0, "475 (fa2 329)")]),
    (1, 16_384, [(690.0, "667 (fa2 368)"), (670.0, "584 (fa2 351)"), (621.0, "541 (fa2 350)")]),
];

/// Requests, shared and own tokens, goal in µs, FlashInfer's.
const CASCADE: [(usize, u32, u32, f64, &str); 4] = [
    (16, 8_192, 128, 30.0, "75"),
    (64, 8_192, 128, 60.0, "205"),
    (256, 8_192, 128, 150.0, "425"),
    (256, 32_768, 512, 450.0, "1141"),
];

/// Block of a 8192² mask of which a quarter is seen: goal and FlashInfer's in TFLOP/s.
const SPARSE: [(usize, f64, &str); 3] = [(128, 530.0, "497"), (64, 420.0, "277"), (16, 210.0, "135")];

/// Requests, KV tokens, query tokens, goal (µs, or TFLOP/s from 64 requests on), the best peer's.
const MLA: [(usize, u32, u32, f64, &str); 5] = [
    (16, 2_048, 1, 28.0, "35.1"),
    (64, 2_048, 1, 570.0, "546"),
    (64, 8_192, 1, 640.0, "608"),
    (128, 8_192, 1, 640.0, "601"),
    (64, 8_192, 2, 650.0, "626"),
];

/// Keys and values of one type, here and on the device, `[tokens, heads, dim]`, reused by all cases.
struct Pool {
    device: [Tensor; 2],
    host: [Tensor; 2],
}

impl Pool {
    fn new(suite: &Suite, dtype: DType) -> Result<Self> {
        let shape = [POOL, KV_HEADS, DIM];
        let (k, v) = (suite.repeated(11, dtype, &shape)?, suite.repeated(12, dtype, &shape)?);
        Ok(Self { device: [k.to_device(&suite.gpu)?, v.to_device(&suite.gpu)?], host: [k, v] })
    }

    /// Pages of `page` tokens in random order for requests of so many tokens.
    fn table(&self, suite: &Suite, page: usize, lens: &[u32]) -> Result<PageTable<'static>> {
        let pages = POOL / page;
        let mut ids: Vec<i32> = (0..pages as i32).collect();
        let mut rng = Rng::new(3);
        for i in (1..pages).rev() {
            ids.swap(i, rng.below(i + 1));
        }
        let mut indptr = vec![0i32];
        for len in lens {
            indptr.push(indptr.last().unwrap_or(&0) + len.div_ceil(page as u32) as i32);
        }
        ids.truncate(*indptr.last().unwrap_or(&0) as usize);
        let lens: Vec<i32> = lens.iter().map(|&n| n as i32).collect();
        PageTable::with_lens(page, pages, indptr, ids, &lens)?.to_device(&suite.gpu)
    }

    fn paged(tensors: &[Tensor; 2], page: usize) -> Result<PagedKv<'_>> {
        let shape = [POOL / page, page, KV_HEADS, DIM];
        PagedKv::new(tensors[0].view().reshape(&shape)?, tensors[1].view().reshape(&shape)?, KvLayout::Nhd)
    }

    /// Row `row` of head `head` of keys (0) or values (1).
    fn row(&self, which: usize, row: usize, head: usize) -> Result<Vec<f32>> {
        self.host[which].view().select(0, row)?.select(0, head)?.to_f32_vec()
    }
}

/// What `token` of `q` gets at `head` from positions that are at `rows` of the pool, in f64.
fn expected(pool: &Pool, q: &Tensor, token: usize, head: usize, rows: &[usize]) -> Result<Vec<f64>> {
    let (kv_head, q) = (head / (HEADS / KV_HEADS), q.view().select(0, token)?.select(0, head)?.to_f32_vec()?);
    let mut scores = Vec::with_capacity(rows.len());
    for &row in rows {
        let k = pool.row(0, row, kv_head)?;
        scores.push(q.iter().zip(&k).map(|(a, b)| f64::from(a * b)).sum::<f64>() / (DIM as f64).sqrt());
    }
    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let (mut out, mut sum) = (vec![0.0; DIM], 0.0);
    for (&row, score) in rows.iter().zip(scores) {
        let w = (score - top).exp();
        sum += w;
        out.iter_mut().zip(pool.row(1, row, kv_head)?).for_each(|(o, v)| *o += w * f64::from(v));
    }
    Ok(out.into_iter().map(|o| o / sum).collect())
}

/// Compares a row of 16-bit products, of which there are thousands, with the exact one: to 2 % of its largest element.
fn check_row(got: &Tensor, token: usize, head: usize, want: &[f64]) -> Result<()> {
    let got = got.view().select(0, token)?.select(0, head)?.to_f32_vec()?;
    let most = want.iter().fold(0.0f64, |m, x| m.max(x.abs()));
    let worst = got.iter().zip(want).map(|(g, w)| (f64::from(*g) - w).abs()).fold(0.0, f64::max);
    if worst <= 0.02 * most {
        return Ok(());
    }
    let what = format!("{worst} off at token {token}, head {head}");
    Err(Error::value("gpu", "result", what, format!("at most 2 % of {most}")))
}

pub(super) fn run(suite: &Suite) -> Result<()> {
    if !suite.wants("attention") {
        return Ok(());
    }
    first_calls(suite)?;
    let bf16 = Pool::new(suite, DType::BF16)?;
    for (batch, kv, goal, peer) in DECODE {
        decode(suite, &bf16, &format!("{batch} × {kv}"), &vec![kv; batch], Goal::Us(goal), peer)?;
    }
    let mut skewed = vec![512; 64];
    skewed[0] = 32_768;
    decode(suite, &bf16, "one of 32768 and 63 × 512", &skewed, Goal::Us(70.0), "105.6")?;
    let mut rng = Rng::new(5);
    let uniform: Vec<u32> = (0..128).map(|_| 1 + rng.below(8_192) as u32).collect();
    decode(suite, &bf16, "128 of 1 to 8192", &uniform, Goal::Us(460.0), "493.7")?;
    plans(suite)?;
    for (requests, tokens, [ragged, paged, rows]) in PREFILL {
        for (page, (goal, peer)) in [(0, ragged), (16, paged), (1, rows)] {
            prefill(suite, &bf16, [requests, page], [tokens; 2], true, Goal::Tflops(goal), peer)?;
        }
    }
    prefill(suite, &bf16, [1, 0], [16_384; 2], false, Goal::Tflops(700.0), "683 (fa2 387)")?;
    prefill(suite, &bf16, [4, 16], [512, 8_192], true, Goal::Us(480.0), "864")?;
    mixed(suite, &bf16)?;
    for (requests, shared, own, goal, peer) in CASCADE {
        cascade(suite, &bf16, requests, [shared, own], goal, peer)?;
    }
    compared::cascades(suite, &bf16)?;
    compared::fixed(suite, &bf16)?;
    drop(bf16);
    let fp8 = Pool::new(suite, DType::E4M3)?;
    for (batch, kv, goal, peer) in DECODE_FP8 {
        decode(suite, &fp8, &format!("{batch} × {kv}"), &vec![kv; batch], Goal::Us(goal), peer)?;
    }
    for q in [DType::BF16, DType::E4M3] {
        prefill_of(suite, &fp8, q, [4, 0], [4_096; 2], true, Goal::Tflops(800.0), "749 (q fp8 too)")?;
        prefill_of(suite, &fp8, q, [1, 0], [16_384; 2], true, Goal::Tflops(920.0), "877 (q fp8 too)")?;
    }
    drop(fp8);
    for (block, goal, peer) in SPARSE {
        sparse(suite, block, goal, peer)?;
    }
    for (requests, kv, q_len, goal, peer) in MLA {
        mla(suite, requests, [q_len, kv], goal, peer)?;
    }
    Ok(())
}

/// Seconds to compile the kernels that a first call meets, on one thread.
fn first_calls(suite: &Suite) -> Result<()> {
    let all = jit::kernels();
    let find = |parts: &[&str]| all.iter().find(|k| parts.iter().all(|p| k.name().contains(p)));
    for (name, parts, goal, peer) in [
        ("decode bf16", &["decode<", "Bf16, fir::Bf16, fir::Bf16, 128, 128, Standard"][..], 2.0, "17"),
        ("decode fp8", &["decode<", "Bf16, fir::E4m3, fir::Bf16, 128, 128, Standard"], 2.0, "66"),
        ("prefill causal bf16", &["prefill<", "Bf16, fir::Bf16, fir::Bf16, 128, 128, Causal"], 3.0, "245"),
        ("latent attention", &["plain<fir::Bf16, 1024"], 3.0, "29"),
        ("sampling", &["sampl"], 1.0, "139"),
    ] {
        let case = format!("attention, compiled anew: {name}, s");
        let (Some(source), true) = (find(parts), suite.wants(&case)) else { continue };
        let start = Instant::now();
        jit::compile(source, Arch::HOPPER)?;
        suite.row(&case, None, start.elapsed().as_secs_f64(), "", goal, peer);
    }
    Ok(())
}

/// Time of the host for a decode's plan, its copy queued.
fn plans(suite: &Suite) -> Result<()> {
    for (batch, goal, peer) in [(1usize, 10.0, "380"), (64, 10.0, "450"), (256, 10.0, "555")] {
        let case = format!("attention, decode plan of {batch}, host");
        if !suite.wants(&case) {
            continue;
        }
        let problem = Problem::new(HEADS, KV_HEADS, DIM, DType::BF16, variant::standard());
        let mut plan = DecodePlan::with_capacity(&suite.exec, problem, batch, Split::Balanced)?;
        let lens: Vec<u32> = (0..batch).map(|i| 500 + 37 * i as u32 % 2_048).collect();
        let mut times = Vec::new();
        for _ in 0..1_000 {
            let start = Instant::now();
            plan.refill(&lens)?;
            times.push(start.elapsed().as_secs_f64() * 1e6);
            suite.gpu.synchronize()?;
        }
        times.sort_by(f64::total_cmp);
        suite.row(&case, None, times[500], "", goal, peer);
    }
    Ok(())
}

fn decode(suite: &Suite, pool: &Pool, name: &str, lens: &[u32], goal: Goal, peer: &'static str) -> Result<()> {
    let case = format!("attention, decode bf16, KV {}, page 16, {name}", pool.device[0].dtype());
    if !suite.wants(&case) {
        return Ok(());
    }
    let table = pool.table(suite, 16, lens)?;
    decode_of(suite, pool, &case, &table, lens, Split::Balanced, goal, peer)
}

/// Decodes of requests whose pages are in `table`.
#[expect(clippy::too_many_arguments, reason = "a row of the table")]
fn decode_of(
    suite: &Suite,
    pool: &Pool,
    case: &str,
    table: &PageTable<'static>,
    lens: &[u32],
    split: Split,
    goal: Goal,
    peer: &'static str,
) -> Result<()> {
    const PAGE: usize = 16;
    let dtype = pool.device[0].dtype();
    let problem = Problem { kv_dtype: dtype, ..Problem::new(HEADS, KV_HEADS, DIM, DType::BF16, variant::standard()) };
    let plan = DecodePlan::new(&suite.exec, problem, lens, split)?;
    let scratch = RefCell::new(plan.scratch());
    let (q, q_host) = suite.random(1, &[lens.len(), HEADS, DIM])?;
    let out = RefCell::new(suite.gpu.zeros(DType::BF16, &[lens.len(), HEADS, DIM])?);
    let tokens: usize = lens.iter().map(|&n| n as usize).sum();
    suite.bench(
        case,
        Work::Bytes(2 * tokens * KV_HEADS * DIM * dtype.size()),
        goal,
        peer,
        || {
            let (mut scratch, mut out) = (scratch.borrow_mut(), out.borrow_mut());
            let (kv, params) = (Kv::Paged(Pool::paged(&pool.device, PAGE)?, table), &Params::new());
            let (scratch, out) = (&mut *scratch, out.view_mut());
            plan.run(&suite.exec, DecodeArgs { q: q.view(), kv, params, sm_scale: None, scratch, out, lse: None })
        },
        || {
            let out = out.borrow().to_host()?;
            for (r, head) in [(0, 3), (lens.len() - 1, 30), (lens.len() / 2, 17)] {
                let at = |j: usize| table.locate(r, j).map_or(0, |(page, slot)| page * PAGE + slot);
                let rows: Vec<usize> = (0..lens[r] as usize).map(at).collect();
                check_row(&out, r, head, &expected(pool, &q_host, r, head, &rows)?)?;
            }
            Ok(())
        },
    )
}

/// As [`prefill_of`], of bf16 queries.
fn prefill(
    suite: &Suite,
    pool: &Pool,
    shape: [usize; 2],
    lens: [u32; 2],
    causal: bool,
    goal: Goal,
    peer: &'static str,
) -> Result<()> {
    prefill_of(suite, pool, DType::BF16, shape, lens, causal, goal, peer)
}

/// `page` 0: ragged KV.
#[expect(clippy::too_many_arguments, reason = "a row of the table")]
fn prefill_of(
    suite: &Suite,
    pool: &Pool,
    q_dtype: DType,
    [requests, page]: [usize; 2],
    [q_len, kv_len]: [u32; 2],
    causal: bool,
    goal: Goal,
    peer: &'static str,
) -> Result<()> {
    let dtype = pool.device[0].dtype();
    let kind = if causal { "causal" } else { "full" };
    let layout = if page == 0 { "ragged".into() } else { format!("page {page}") };
    let on = if q_len == kv_len { String::new() } else { format!(" on {kv_len}") };
    let case = format!("attention, prefill {q_dtype}, KV {dtype}, {layout}, {kind}, {requests} × {q_len}{on}");
    if !suite.wants(&case) {
        return Ok(());
    }
    let (qo, kv_lens) = (Ragged::from_lens(&vec![q_len; requests])?, vec![kv_len; requests]);
    let variant = if causal { variant::causal() } else { variant::standard() };
    // What a causal mask shows: half of a square, and all before it.
    let seen = if causal { f64::from(kv_len) - f64::from(q_len) / 2.0 } else { f64::from(kv_len) };
    let flops = 4.0 * (requests * HEADS * DIM) as f64 * f64::from(q_len) * seen;
    let work = Work::Flops(flops);
    batch(suite, pool, &case, page, variant, (q_dtype, &qo), &kv_lens, Split::Balanced, work, goal, peer)
}

/// 63 decodes and a prefill of 2048, all with 2048 tokens cached.
fn mixed(suite: &Suite, pool: &Pool) -> Result<()> {
    let case = "attention, mixed bf16, page 16, 63 decodes and a prefill of 2048 on 2048";
    if !suite.wants(case) {
        return Ok(());
    }
    let mut q_lens = vec![1u32; 64];
    q_lens[63] = 2_048;
    let bytes = Work::Bytes(2 * 2 * 64 * 2_048 * KV_HEADS * DIM);
    let (qo, kv_lens) = (Ragged::from_lens(&q_lens)?, [2_048; 64]);
    let queries = (DType::BF16, &qo);
    let split = Split::Balanced;
    batch(suite, pool, case, 16, variant::causal(), queries, &kv_lens, split, bytes, Goal::Us(160.0), "233")
}

#[expect(clippy::too_many_arguments, reason = "one case")]
fn batch(
    suite: &Suite,
    pool: &Pool,
    case: &str,
    page: usize,
    variant: Variant,
    (q_dtype, qo): (DType, &Ragged),
    kv_lens: &[u32],
    split: Split,
    work: Work,
    goal: Goal,
    peer: &'static str,
) -> Result<()> {
    let causal = variant == variant::causal();
    let kv_dtype = pool.device[0].dtype();
    let problem = Problem { q_dtype, kv_dtype, ..Problem::new(HEADS, KV_HEADS, DIM, DType::BF16, variant) };
    let plan = BatchPlan::new(&suite.exec, problem, qo, kv_lens, split)?;
    let scratch = RefCell::new(plan.scratch());
    let ragged = Ragged::from_lens(kv_lens)?;
    let table = pool.table(suite, page.max(1), if page == 0 { &[] } else { kv_lens })?;
    let q_host = suite.repeated(1, q_dtype, &[qo.rows(), HEADS, DIM])?;
    let q = q_host.to_device(&suite.gpu)?;
    let out = RefCell::new(suite.gpu.zeros(DType::BF16, &[qo.rows(), HEADS, DIM])?);
    suite.bench(
        case,
        work,
        goal,
        peer,
        || {
            let (mut scratch, mut out) = (scratch.borrow_mut(), out.borrow_mut());
            let kv = if page == 0 {
                let [k, v] = &pool.device;
                let rows = 0..ragged.rows();
                Kv::Ragged(RaggedKv::new(k.view().slice(0, rows.clone())?, v.view().slice(0, rows)?, &ragged)?)
            } else {
                Kv::Paged(Pool::paged(&pool.device, page)?, &table)
            };
            let (q, params, scratch, out) = (q.view(), &Params::new(), &mut *scratch, out.view_mut());
            plan.run(&suite.exec, BatchArgs { q, kv, params, sm_scale: None, scratch, out, lse: None })
        },
        || {
            let out = out.borrow().to_host()?;
            for (r, part, head) in [(0, 0, 3), (qo.batch() - 1, 1, 30), (qo.batch() / 2, 2, 17)] {
                let (q_len, kv_len) = (qo.lens()[r] as usize, kv_lens[r] as usize);
                let q_idx = [0, q_len - 1, q_len / 2][part];
                let seen = if causal { kv_len - q_len + q_idx + 1 } else { kv_len };
                let at = |j: usize| match page {
                    0 => ragged.indptr()[r] as usize + j,
                    _ => table.locate(r, j).map_or(0, |(p, slot)| p * page + slot),
                };
                let rows: Vec<usize> = (0..seen).map(at).collect();
                let token = qo.indptr()[r] as usize + q_idx;
                check_row(&out, token, head, &expected(pool, &q_host, token, head, &rows)?)?;
            }
            Ok(())
        },
    )
}

/// Pages of what is shared, of what `requests` have of their own, and of both as one request would have them.
fn prefixed(suite: &Suite, pool: &Pool, requests: usize, [shared, own]: [u32; 2]) -> Result<[PageTable<'static>; 3]> {
    // One table for all, so that no page is in two of them.
    let mut lens = vec![shared];
    lens.extend(vec![own; requests]);
    let all = pool.table(suite, 16, &lens)?;
    let part = |rows: &[Vec<usize>]| -> Result<PageTable<'static>> {
        let (mut indptr, mut ids, mut sums) = (vec![0i32], Vec::new(), Vec::new());
        for row in rows {
            row.iter().for_each(|&r| ids.extend_from_slice(all.pages(r)));
            indptr.push(ids.len() as i32);
            sums.push(row.iter().map(|&r| lens[r] as i32).sum());
        }
        PageTable::with_lens(16, POOL / 16, indptr, ids, &sums)?.to_device(&suite.gpu)
    };
    let rows = |f: fn(usize) -> Vec<usize>| (1..=requests).map(f).collect::<Vec<_>>();
    Ok([part(&[vec![0]])?, part(&rows(|r| vec![r]))?, part(&rows(|r| vec![0, r]))?])
}

fn cascade(
    suite: &Suite,
    pool: &Pool,
    requests: usize,
    [shared, own]: [u32; 2],
    goal: f64,
    peer: &'static str,
) -> Result<()> {
    const PAGE: usize = 16;
    let case = format!("attention, cascade bf16, page 16, {requests} × ({shared} shared + {own})");
    if !suite.wants(&case) {
        return Ok(());
    }
    let tables = prefixed(suite, pool, requests, [shared, own])?;
    let (all, each) = (Ragged::from_lens(&[requests as u32])?, Ragged::ones(requests)?);
    let levels =
        [CascadeLevel { qo: &all, kv_lens: tables[0].lens() }, CascadeLevel { qo: &each, kv_lens: tables[1].lens() }];
    let problem = Problem::new(HEADS, KV_HEADS, DIM, DType::BF16, variant::causal());
    let plan = CascadePlan::new(&suite.exec, problem, &levels, Split::Balanced)?;
    let scratch = RefCell::new(plan.scratch());
    let (q, q_host) = suite.random(1, &[requests, HEADS, DIM])?;
    let out = RefCell::new(suite.gpu.zeros(DType::BF16, &[requests, HEADS, DIM])?);
    let tokens = shared as usize + requests * own as usize;
    suite.bench(
        &case,
        Work::Bytes(2 * 2 * tokens * KV_HEADS * DIM),
        Goal::Us(goal),
        peer,
        || {
            let (mut scratch, mut out) = (scratch.borrow_mut(), out.borrow_mut());
            let pages = Pool::paged(&pool.device, PAGE)?;
            let kv = &[Kv::Paged(pages, &tables[0]), Kv::Paged(pages, &tables[1])];
            let (q, params, scratch, out) = (q.view(), &Params::new(), &mut scratch[..], out.view_mut());
            plan.run(&suite.exec, CascadeArgs { q, kv, params, sm_scale: None, scratch, out, lse: None })
        },
        || {
            let out = out.borrow().to_host()?;
            for (r, head) in [(0, 3), (requests - 1, 30)] {
                let at = |(t, r, j): (usize, usize, usize)| {
                    tables[t].locate(r, j).map_or(0, |(page, slot)| page * PAGE + slot)
                };
                let prefix = (0..shared as usize).map(|j| at((0, 0, j)));
                let rows: Vec<usize> = prefix.chain((0..own as usize).map(|j| at((1, r, j)))).collect();
                check_row(&out, r, head, &expected(pool, &q_host, r, head, &rows)?)?;
            }
            Ok(())
        },
    )
}

fn sparse(suite: &Suite, block: usize, goal: f64, peer: &'static str) -> Result<()> {
    const N: usize = 8_192;
    let case = format!("attention, block-sparse bf16, 8192², a quarter of blocks of {block}");
    if !suite.wants(&case) {
        return Ok(());
    }
    let blocks = N / block;
    let (mut rng, mut indptr, mut indices) = (Rng::new(7), vec![0i32], Vec::new());
    for _ in 0..blocks {
        indices.extend((0..blocks as i32).filter(|_| rng.below(4) == 0));
        indptr.push(indices.len() as i32);
    }
    let mask = BlockMask { indptr: &indptr, indices: &indices, rows: N, cols: N, block_rows: block, block_cols: block };
    let problem = Problem::new(HEADS, HEADS, DIM, DType::BF16, variant::standard());
    let plan = SparsePlan::new(&suite.exec, problem, mask, Split::Balanced)?;
    let scratch = RefCell::new(plan.scratch());
    let [(q, q_host), (k, k_host), (v, v_host)] = [1, 2, 3]
        .map(|seed| suite.random(seed, &[N, HEADS, DIM]))
        .into_iter()
        .collect::<Result<Vec<_>>>()?
        .try_into()
        .map_err(|_| Error::value("gpu", "tensors", "other than three", "three"))?;
    let out = RefCell::new(suite.gpu.zeros(DType::BF16, &[N, HEADS, DIM])?);
    let flops = 4.0 * (indices.len() * block * block * HEADS * DIM) as f64;
    suite.bench(
        &case,
        Work::Flops(flops),
        Goal::Tflops(goal),
        peer,
        || {
            let (mut scratch, mut out) = (scratch.borrow_mut(), out.borrow_mut());
            let (q, k, v) = (q.view(), k.view(), v.view());
            let (params, scratch, out) = (&Params::new(), &mut *scratch, out.view_mut());
            plan.run(&suite.exec, SparseArgs { q, k, v, params, sm_scale: None, scratch, out, lse: None })
        },
        || {
            let out = out.borrow().to_host()?;
            for (token, head) in [(0, 3), (N - 1, 30), (4_000, 17)] {
                let row = token / block;
                let listed = &indices[indptr[row] as usize..indptr[row + 1] as usize];
                let columns = listed.iter().flat_map(|&b| b as usize * block..(b as usize + 1) * block);
                let numbers = |t: &Tensor, at: usize| t.view().select(0, at)?.select(0, head)?.to_f32_vec();
                let q = numbers(&q_host, token)?;
                let (mut want, mut sum) = (vec![0.0; DIM], 0.0);
                for column in columns {
                    let k = numbers(&k_host, column)?;
                    let score = q.iter().zip(&k).map(|(a, b)| f64::from(a * b)).sum::<f64>() / (DIM as f64).sqrt();
                    let w = score.exp();
                    sum += w;
                    want.iter_mut().zip(numbers(&v_host, column)?).for_each(|(o, v)| *o += w * f64::from(v));
                }
                want.iter_mut().for_each(|o| *o /= sum);
                check_row(&out, token, head, &want)?;
            }
            Ok(())
        },
    )
}

fn mla(suite: &Suite, requests: usize, [q_len, kv_len]: [u32; 2], goal: f64, peer: &'static str) -> Result<()> {
    const LATENT: usize = 512;
    const ROPE: usize = 64;
    const MLA_HEADS: usize = 128;
    const PAGE: usize = 64;
    let case = format!("attention, latent bf16, page 64, {requests} × {kv_len}, query of {q_len}");
    if !suite.wants(&case) {
        return Ok(());
    }
    let (tokens, each) = (requests * q_len as usize, kv_len as usize / PAGE);
    let pages = requests * each;
    let ids: Vec<i32> = (0..pages).map(|i| (i * 7919 % pages) as i32).collect();
    let indptr: Vec<i32> = (0..=requests).map(|r| (r * each) as i32).collect();
    let table =
        PageTable::with_lens(PAGE, pages, indptr, ids, &vec![kv_len as i32; requests])?.to_device(&suite.gpu)?;
    let ckv_host = suite.repeated(1, DType::BF16, &[pages, PAGE, LATENT])?;
    let kpe_host = suite.repeated(2, DType::BF16, &[pages, PAGE, ROPE])?;
    let (ckv, kpe) = (ckv_host.to_device(&suite.gpu)?, kpe_host.to_device(&suite.gpu)?);
    let (q, q_host) = suite.random(3, &[tokens, MLA_HEADS, LATENT])?;
    let (q_pe, pe_host) = suite.random(4, &[tokens, MLA_HEADS, ROPE])?;
    let d = DType::BF16;
    let problem = MlaProblem {
        heads: MLA_HEADS,
        head_dim_ckv: LATENT,
        head_dim_kpe: ROPE,
        q_dtype: d,
        kv_dtype: d,
        out_dtype: d,
        causal: true,
    };
    let qo = Ragged::from_lens(&vec![q_len; requests])?;
    let plan = MlaPlan::new(&suite.exec, problem, &qo, table.lens(), Split::Balanced)?;
    let scratch = RefCell::new(plan.scratch());
    let out = RefCell::new(suite.gpu.zeros(d, &[tokens, MLA_HEADS, LATENT])?);
    let flops = 2.0 * (tokens * MLA_HEADS * (2 * LATENT + ROPE)) as f64 * f64::from(kv_len);
    let (goal, sm_scale) = (if requests < 64 { Goal::Us(goal) } else { Goal::Tflops(goal) }, 0.05);
    suite.bench(
        &case,
        Work::Flops(flops),
        goal,
        peer,
        || {
            let (mut scratch, mut out) = (scratch.borrow_mut(), out.borrow_mut());
            let (kv, scratch, out) = (PagedMla::new(ckv.view(), kpe.view())?, &mut *scratch, out.view_mut());
            let (q_nope, q_pe, table) = (q.view(), q_pe.view(), &table);
            plan.run(&suite.exec, MlaArgs { q_nope, q_pe, kv, table, sm_scale, scratch, out, lse: None })
        },
        || {
            let out = out.borrow().to_host()?;
            let (token, head) = (tokens - 1, 77);
            let numbers = |t: &Tensor, a: usize, b: usize| t.view().select(0, a)?.select(0, b)?.to_f32_vec();
            let (q, pe) = (numbers(&q_host, token, head)?, numbers(&pe_host, token, head)?);
            let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(a * b)).sum::<f64>();
            let (mut want, mut sum) = (vec![0.0; LATENT], 0.0);
            for j in 0..kv_len as usize {
                let (page, slot) = table.locate(requests - 1, j).unwrap_or_default();
                let c = numbers(&ckv_host, page, slot)?;
                let w = (f64::from(sm_scale) * (dot(&q, &c) + dot(&pe, &numbers(&kpe_host, page, slot)?))).exp();
                sum += w;
                want.iter_mut().zip(&c).for_each(|(o, v)| *o += w * f64::from(*v));
            }
            want.iter_mut().for_each(|o| *o /= sum);
            check_row(&out, token, head, &want)
        },
    )
}
