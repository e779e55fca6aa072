//! Attention: decode against the memory's speed, prefill against the arithmetic's, planning in microseconds.

mod support;

use fir::attention::{
    BatchArgs, BatchPlan, CascadeArgs, CascadeLevel, CascadePlan, DecodePlan, MlaArgs, MlaPlan, MlaProblem, Problem,
    Split,
};
use fir::kv::{Kv, KvLayout, PageTable, PagedKv, PagedMla, Ragged};
use fir::variant::{self, Params, Variant};
use fir::{DType, Exec, Tensor, reference};
use support::{Suite, Work, matches, random};

const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const DIM: usize = 128;

/// A batch of equal requests over pages of 16 in random-like order.
struct Batch {
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qo: Ragged,
    table: PageTable<'static>,
    layout: KvLayout,
}

impl Batch {
    fn new(
        batch: usize,
        q_len: usize,
        kv_len: usize,
        dtype: DType,
        kv_dtype: DType,
        page: usize,
        variant: Variant,
    ) -> Self {
        Self::with_heads((HEADS, KV_HEADS), batch, q_len, kv_len, dtype, kv_dtype, page, KvLayout::Nhd, variant)
    }

    #[expect(clippy::too_many_arguments, reason = "the axes of the benches")]
    fn with_heads(
        (heads, kv_heads): (usize, usize),
        batch: usize,
        q_len: usize,
        kv_len: usize,
        dtype: DType,
        kv_dtype: DType,
        page: usize,
        layout: KvLayout,
        variant: Variant,
    ) -> Self {
        let per = kv_len.div_ceil(page);
        let pages = batch * per;
        // An odd step visits every page of a power of two once, and no two neighbours after each other.
        let indices: Vec<i32> = (0..pages).map(|i| (i * 7919 % pages) as i32).collect();
        let indices = if pages.is_power_of_two() { indices } else { (0..pages as i32).collect() };
        let indptr: Vec<i32> = (0..=batch).map(|r| (r * per) as i32).collect();
        let table = PageTable::with_lens(page, pages, indptr, indices, &vec![kv_len as i32; batch]).unwrap();
        let shape = match layout {
            KvLayout::Nhd => [pages, page, kv_heads, DIM],
            KvLayout::Hnd => [pages, kv_heads, page, DIM],
        };
        Self {
            problem: Problem { kv_dtype, ..Problem::new(heads, kv_heads, DIM, dtype, variant) },
            q: random(1, dtype, &[batch * q_len, heads, DIM]),
            k: random(2, kv_dtype, &shape),
            v: random(3, kv_dtype, &shape),
            qo: Ragged::from_lens(&vec![q_len as u32; batch]).unwrap(),
            table,
            layout,
        }
    }

    fn kv(&self) -> Kv<'_> {
        Kv::Paged(PagedKv::new(self.k.view(), self.v.view(), self.layout).unwrap(), &self.table)
    }

    /// Bytes of KV read, and the operations of both products over the pairs that are seen.
    fn work(&self, causal: bool) -> Work {
        let p = &self.problem;
        let tokens: usize = self.table.lens().iter().map(|&n| n as usize).sum();
        let pairs: usize = self
            .qo
            .lens()
            .iter()
            .zip(self.table.lens())
            .map(|(&q, &kv)| {
                let (q, kv) = (q as usize, kv as usize);
                if causal { q * kv - q * q.saturating_sub(1) / 2 } else { q * kv }
            })
            .sum();
        Work { bytes: tokens * p.kv_heads * DIM * 2 * p.kv_dtype.size(), flops: pairs * p.qo_heads * DIM * 4 }
    }

    fn bench(&self, suite: &mut Suite, id: &str, exec: &Exec, params: &Params<'_>, causal: bool) {
        let plan = BatchPlan::new(exec, self.problem.clone(), &self.qo, self.table.lens(), Split::Balanced).unwrap();
        let out = Tensor::zeros(self.problem.out_dtype, &[self.qo.rows(), self.problem.qo_heads, DIM]).unwrap();
        suite.bench(
            id,
            self.work(causal),
            (out, plan.scratch()),
            |(out, scratch)| {
                let args = BatchArgs {
                    q: self.q.view(),
                    kv: self.kv(),
                    params,
                    sm_scale: None,
                    scratch,
                    out: out.view_mut(),
                    lse: None,
                };
                plan.run(exec, args).unwrap();
            },
            |(out, _)| self.check_first(out, params),
        );
    }

    /// Compares the last query token of the first request.
    fn check_first(&self, out: &Tensor, params: &Params<'_>) -> Result<(), String> {
        let (q_len, kv_len) = (self.qo.lens()[0] as usize, self.table.lens()[0]);
        let row = q_len - 1..q_len;
        let pages = self.table.pages(0);
        let table = PageTable::with_lens(
            self.table.page_size(),
            self.table.num_pages(),
            vec![0, pages.len() as i32],
            pages,
            &[kv_len as i32],
        );
        let (table, qo) = (table.unwrap(), Ragged::ones(1).unwrap());
        let Kv::Paged(pool, _) = self.kv() else { unreachable!() };
        let b = reference::attention::Batch {
            q: self.q.view().slice(0, row.clone()).unwrap(),
            qo: &qo,
            kv: Kv::Paged(pool, &table),
            variant: &self.problem.variant,
            params,
            sm_scale: f64::from(1.0 / (DIM as f32).sqrt()),
        };
        matches(out.view().slice(0, row).unwrap(), DIM, |p| Ok(reference::attention::batch(p, &b)?.0))
    }
}

fn main() {
    let mut suite = Suite::new();
    let small = suite.checks_only();
    decode(&mut suite, small);
    prefill(&mut suite, small);
    variants(&mut suite, small);
    cascade(&mut suite, small);
    mla(&mut suite, small);
    plans(&mut suite);
}

fn decode(suite: &mut Suite, small: bool) {
    let none = Params::new();
    let (batch, kv_len) = if small { (2, 100) } else { (64, 4096) };
    for (dtype, kv_dtype) in
        [(DType::BF16, DType::BF16), (DType::F16, DType::F16), (DType::F32, DType::F32), (DType::BF16, DType::E4M3)]
    {
        let id = |level: &str| format!("attention/decode/h32x8-d128-p16-{kv_dtype}/b{batch}-kv{kv_len}/{level}");
        let levels = suite.levels();
        if !levels.iter().any(|(level, _)| suite.wants(&id(level))) {
            continue;
        }
        let b = Batch::new(batch, 1, kv_len, dtype, kv_dtype, 16, variant::standard());
        for (level, exec) in levels {
            b.bench(suite, &id(level), &exec, &none, false);
        }
    }
    let (level, exec) = suite.levels().pop().unwrap();
    for (heads, page, layout) in [
        ((8, 8), 16, KvLayout::Nhd),
        ((64, 8), 16, KvLayout::Nhd),
        ((32, 8), 1, KvLayout::Nhd),
        ((32, 8), 16, KvLayout::Hnd),
        ((32, 8), 64, KvLayout::Hnd),
    ] {
        let name = if layout == KvLayout::Nhd { "" } else { "-hnd" };
        let id =
            format!("attention/decode/h{}x{}-d128-p{page}{name}-bf16/b{batch}-kv{kv_len}/{level}", heads.0, heads.1);
        if !suite.wants(&id) {
            continue;
        }
        let b = Batch::with_heads(heads, batch, 1, kv_len, DType::BF16, DType::BF16, page, layout, variant::standard());
        b.bench(suite, &id, &exec, &none, false);
    }
    // The last: 1 MB of KV per worker of two, which stays in their caches, so that it is the arithmetic's time.
    for (batch, kv_len) in if small { [(1, 65), (3, 7), (2, 9)] } else { [(1, 65536), (64, 128), (2, 256)] } {
        let id = format!("attention/decode/h32x8-d128-p16-bf16/b{batch}-kv{kv_len}/{level}");
        if suite.wants(&id) {
            let b = Batch::new(batch, 1, kv_len, DType::BF16, DType::BF16, 16, variant::standard());
            b.bench(suite, &id, &exec, &none, false);
        }
    }
}

fn prefill(suite: &mut Suite, small: bool) {
    let len = if small { 70 } else { 1024 };
    let b = Batch::new(1, len, len, DType::BF16, DType::BF16, 16, variant::causal());
    for (level, exec) in suite.levels() {
        b.bench(
            suite,
            &format!("attention/prefill/h32x8-d128-p16-bf16-causal/b1-kv{len}/{level}"),
            &exec,
            &Params::new(),
            true,
        );
    }
}

fn variants(suite: &mut Suite, small: bool) {
    let (batch, kv_len) = if small { (1, 70) } else { (16, 4096) };
    let slopes = vec![0.01f32; HEADS];
    let (level, exec) = suite.levels().pop().unwrap();
    let own = variant::variant("OwnSoftCap", |p| {
        let cap = p.f32("soft_cap");
        variant::logits(cap.clone() * (variant::score() / cap).tanh())
    });
    for (name, variant, params) in [
        ("standard", variant::standard(), Params::new()),
        ("soft_cap", variant::soft_cap(), Params::new().f32("soft_cap", 30.0)),
        ("own_soft_cap", own.unwrap(), Params::new().f32("soft_cap", 30.0)),
        ("alibi", variant::alibi(), Params::new().f32_tensor("alibi_slopes", &slopes)),
        ("window1024", variant::sliding_window(), Params::new().i32("window_left", 1023)),
        ("rope", variant::rope_llama(1e4, 1.0, false).unwrap(), Params::new()),
    ] {
        let b = Batch::new(batch, 1, kv_len, DType::BF16, DType::BF16, 16, variant);
        b.bench(
            suite,
            &format!("attention/variant/{name}-h32x8-d128-p16-bf16/b{batch}-kv{kv_len}/{level}"),
            &exec,
            &params,
            false,
        );
    }
}

fn cascade(suite: &mut Suite, small: bool) {
    let (batch, shared, own) = if small { (3, 64, 20) } else { (32, 4096, 256) };
    let (level, exec) = suite.levels().pop().unwrap();
    let page = 16;
    let (shared_pages, own_pages) = (shared / page, own / page + 1);
    let pages = shared_pages + batch * own_pages;
    let shape = [pages, page, KV_HEADS, DIM];
    let (k, v) = (random(2, DType::BF16, &shape), random(3, DType::BF16, &shape));
    let q = random(1, DType::BF16, &[batch, HEADS, DIM]);
    let pool = PagedKv::new(k.view(), v.view(), KvLayout::Nhd).unwrap();
    let of = |r: usize| (shared_pages + r * own_pages..shared_pages + (r + 1) * own_pages).map(|p| p as i32);
    let prefix: Vec<i32> = (0..shared_pages as i32).collect();
    let top =
        PageTable::with_lens(page, pages, vec![0, shared_pages as i32], prefix.clone(), &[shared as i32]).unwrap();
    let indptr: Vec<i32> = (0..=batch).map(|r| (r * own_pages) as i32).collect();
    let bottom = PageTable::with_lens(
        page,
        pages,
        indptr,
        (0..batch).flat_map(of).collect::<Vec<_>>(),
        &vec![own as i32; batch],
    )
    .unwrap();
    let indptr: Vec<i32> = (0..=batch).map(|r| (r * (shared_pages + own_pages)) as i32).collect();
    let flat_pages: Vec<i32> = (0..batch).flat_map(|r| prefix.iter().copied().chain(of(r))).collect();
    let flat = PageTable::with_lens(page, pages, indptr, flat_pages, &vec![(shared + own) as i32; batch]).unwrap();
    let problem = Problem::new(HEADS, KV_HEADS, DIM, DType::BF16, variant::standard());
    let (params, ones, all) =
        (Params::new(), Ragged::ones(batch).unwrap(), Ragged::from_lens(&[batch as u32]).unwrap());
    let row = KV_HEADS * DIM * 2 * 2;
    let flops = batch * (shared + own) * HEADS * DIM * 4;
    let plan = BatchPlan::new(&exec, problem.clone(), &ones, flat.lens(), Split::Balanced).unwrap();
    let mut flat_out = Tensor::zeros(DType::BF16, &[batch, HEADS, DIM]).unwrap();
    let run_flat = |out: &mut Tensor, scratch: &mut fir::attention::Scratch| {
        let args = BatchArgs {
            q: q.view(),
            kv: Kv::Paged(pool, &flat),
            params: &params,
            sm_scale: None,
            scratch,
            out: out.view_mut(),
            lse: None,
        };
        plan.run(&exec, args).unwrap();
    };
    run_flat(&mut flat_out, &mut plan.scratch());
    let id = |kind: &str| format!("attention/{kind}/h32x8-d128-p16-bf16/b{batch}-shared{shared}-own{own}/{level}");
    suite.bench(
        &id("flat"),
        Work { bytes: batch * (shared + own) * row, flops },
        (flat_out.clone(), plan.scratch()),
        |(out, scratch)| run_flat(out, scratch),
        |_| Ok(()),
    );
    let levels = [CascadeLevel { qo: &all, kv_lens: top.lens() }, CascadeLevel { qo: &ones, kv_lens: bottom.lens() }];
    let plan = CascadePlan::new(&exec, problem, &levels, Split::Balanced).unwrap();
    suite.bench(
        &id("cascade"),
        Work { bytes: (shared + batch * own) * row, flops },
        (flat_out.clone(), plan.scratch()),
        |(out, scratch)| {
            let kv = &[Kv::Paged(pool, &top), Kv::Paged(pool, &bottom)];
            let args = CascadeArgs {
                q: q.view(),
                kv,
                params: &params,
                sm_scale: None,
                scratch,
                out: out.view_mut(),
                lse: None,
            };
            plan.run(&exec, args).unwrap();
        },
        |(out, _)| {
            let (a, b) = (out.view().to_f32_vec().unwrap(), flat_out.view().to_f32_vec().unwrap());
            let worst = a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
            // One rounding of bf16 at 1.
            if worst <= 1.0 / 128.0 { Ok(()) } else { Err(format!("cascade differs from flat by {worst}")) }
        },
    );
}

fn mla(suite: &mut Suite, small: bool) {
    let (batch, kv_len, heads): (usize, usize, usize) = if small { (2, 70, 16) } else { (16, 4096, 16) };
    let page = 64usize;
    let pages = batch * kv_len.div_ceil(page);
    let (ckv, kpe) = (random(1, DType::BF16, &[pages, page, 512]), random(2, DType::BF16, &[pages, page, 64]));
    let (q_nope, q_pe) = (random(3, DType::BF16, &[batch, heads, 512]), random(4, DType::BF16, &[batch, heads, 64]));
    let indptr: Vec<i32> = (0..=batch).map(|r| (r * kv_len.div_ceil(page)) as i32).collect();
    let table =
        PageTable::with_lens(page, pages, indptr, (0..pages as i32).collect::<Vec<_>>(), &vec![kv_len as i32; batch])
            .unwrap();
    let qo = Ragged::ones(batch).unwrap();
    let problem = MlaProblem {
        heads,
        head_dim_ckv: 512,
        head_dim_kpe: 64,
        q_dtype: DType::BF16,
        kv_dtype: DType::BF16,
        out_dtype: DType::BF16,
        causal: false,
    };
    for (level, exec) in suite.levels() {
        let plan = MlaPlan::new(&exec, problem, &qo, table.lens(), Split::Balanced).unwrap();
        let kv = PagedMla::new(ckv.view(), kpe.view()).unwrap();
        suite.bench(
            &format!("attention/mla/h{heads}-ckv512-kpe64-p64-bf16/b{batch}-kv{kv_len}/{level}"),
            Work { bytes: batch * kv_len * 576 * 2, flops: batch * kv_len * heads * (576 + 512) * 2 },
            (Tensor::zeros(DType::BF16, &[batch, heads, 512]).unwrap(), plan.scratch()),
            |(out, scratch)| {
                let args = MlaArgs {
                    q_nope: q_nope.view(),
                    q_pe: q_pe.view(),
                    kv,
                    table: &table,
                    sm_scale: 0.07,
                    scratch,
                    out: out.view_mut(),
                    lse: None,
                };
                plan.run(&exec, args).unwrap();
            },
            |(out, _)| {
                let (one, pages) = (Ragged::ones(1).unwrap(), table.pages(0));
                let table =
                    PageTable::with_lens(page, table.num_pages(), vec![0, pages.len() as i32], pages, &[kv_len as i32])
                        .unwrap();
                let b = reference::attention::Mla {
                    q_nope: q_nope.view().slice(0, 0..1).unwrap(),
                    q_pe: q_pe.view().slice(0, 0..1).unwrap(),
                    qo: &one,
                    kv,
                    table: &table,
                    variant: &variant::standard(),
                    sm_scale: f64::from(0.07f32),
                };
                matches(out.view().slice(0, 0..1).unwrap(), 512, |p| Ok(reference::attention::mla(p, &b)?.0))
            },
        );
    }
}

fn plans(suite: &mut Suite) {
    // The GPU's is a dry one: all but the copy of the list.
    let cpu = ("decode", Exec::cpu().unwrap());
    #[cfg(feature = "cuda")]
    let execs = [cpu, ("decode-gpu", Exec::Cuda(fir::exec::Gpu::dry(fir::exec::Arch::HOPPER)))];
    #[cfg(not(feature = "cuda"))]
    let execs = [cpu];
    for (name, exec) in &execs {
        for batch in [1usize, 64, 256] {
            let lens: Vec<u32> = (0..batch as u32).map(|i| 100 + i * 37 % 4000).collect();
            let problem = Problem::new(HEADS, KV_HEADS, DIM, DType::BF16, variant::standard());
            let plan = DecodePlan::with_capacity(exec, problem, batch, Split::Balanced).unwrap();
            suite.bench(
                &format!("attention/plan/h32x8-d128-bf16/b{batch}/{name}"),
                Work::default(),
                plan,
                |plan| plan.refill(&lens).unwrap(),
                |plan| {
                    let items = plan.schedule().items().len();
                    if items >= batch { Ok(()) } else { Err(format!("{items} items")) }
                },
            );
        }
    }
}
