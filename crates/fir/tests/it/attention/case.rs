//! A batch with everything that can go wrong in it, and its reference.

use fir::attention::{BatchArgs, BatchPlan, Problem, Split};
use fir::kv::{Kv, KvLayout, PageTable, PagedKv, Ragged};
use fir::reference::{self, Precision};
use fir::tensor::{E4m3, Float};
use fir::testing::{Compare, Rng, compare};
use fir::variant::{Params, Variant};
use fir::{DType, Exec, Tensor, TensorRef};

/// Problem, lengths and layout of a case.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub problem: Problem,
    pub q_lens: Vec<u32>,
    pub kv_lens: Vec<u32>,
    pub page_size: usize,
    pub layout: KvLayout,
    /// Every value row is a unit vector, so that a skipped or doubled position shows in one element.
    pub one_hot: bool,
    pub scales: (f32, f32),
    pub seed: u64,
}

impl Case {
    /// Requests with no KV, one token, page borders and tile borders ± 1, and several query tokens.
    pub(crate) fn new(qo_heads: usize, kv_heads: usize, dim: usize, dtype: DType, variant: Variant) -> Self {
        Self {
            problem: Problem::new(qo_heads, kv_heads, dim, dtype, variant),
            q_lens: vec![1, 1, 0, 3, 1, 5, 1, 1],
            kv_lens: vec![0, 1, 7, 9, 15, 16, 17, 65],
            page_size: 8,
            layout: KvLayout::Nhd,
            one_hot: false,
            scales: (1.0, 1.0),
            seed: 1,
        }
    }
}

/// The tensors of a case.
pub(crate) struct Batch {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    block_scales: Option<[Tensor; 2]>,
    pub qo: Ragged,
    pub table: PageTable<'static>,
    layout: KvLayout,
    scales: (f32, f32),
}

impl Batch {
    pub(crate) fn new(case: &Case) -> Self {
        let (p, mut rng) = (&case.problem, Rng::new(case.seed));
        let qo = Ragged::from_lens(&case.q_lens).unwrap();
        let q = rng.tensor(p.q_dtype, &[qo.rows(), p.qo_heads, p.head_dim_qk]);
        let pages: Vec<usize> = case.kv_lens.iter().map(|&n| (n as usize).div_ceil(case.page_size)).collect();
        // Three pages more than needed, in random order; one slot more than needed per request, with a hostile id.
        let num_pages = pages.iter().sum::<usize>() + 3;
        let mut free: Vec<i32> = (0..num_pages as i32).collect();
        for i in (1..free.len()).rev() {
            free.swap(i, rng.below(i + 1));
        }
        let (mut indptr, mut indices) = (vec![0], vec![]);
        let mut used = vec![false; num_pages * case.page_size];
        for (r, &n) in pages.iter().enumerate() {
            for i in 0..n {
                let page = free.pop().unwrap();
                indices.push(page);
                let held = (case.kv_lens[r] as usize - i * case.page_size).min(case.page_size);
                used[page as usize * case.page_size..][..held].fill(true);
            }
            indices.push([i32::MIN, -1, num_pages as i32, i32::MAX][r % 4]);
            indptr.push(indices.len() as i32);
        }
        let lens: Vec<i32> = case.kv_lens.iter().map(|&n| n as i32).collect();
        let table = PageTable::with_lens(case.page_size, num_pages, indptr, indices, &lens).unwrap();
        let shape = |dim| match case.layout {
            KvLayout::Nhd => vec![num_pages, case.page_size, p.kv_heads, dim],
            KvLayout::Hnd => vec![num_pages, p.kv_heads, case.page_size, dim],
        };
        let at = |slot: usize, head: usize| match case.layout {
            KvLayout::Nhd => slot * p.kv_heads + head,
            KvLayout::Hnd => (slot / case.page_size * p.kv_heads + head) * case.page_size + slot % case.page_size,
        };
        let slots = num_pages * case.page_size;
        let mut fill = |dim: usize, one_hot: bool| -> (Tensor, Option<Tensor>) {
            if p.kv_dtype == DType::E2M1x2 {
                let n = slots * p.kv_heads * dim;
                let data: Vec<fir::tensor::E2m1x2> =
                    (0..n / 2).map(|_| fir::tensor::E2m1x2(rng.bits() as u8)).collect();
                let mut scales: Vec<E4m3> = (0..n / 16).map(|_| E4m3::from_f32(0.1 + rng.uniform())).collect();
                // Slots that hold nothing are NaN: a read of one shows.
                for slot in (0..slots).filter(|&s| !used[s]) {
                    for head in 0..p.kv_heads {
                        scales[at(slot, head) * dim / 16..][..dim / 16].fill(E4m3(0x7f));
                    }
                }
                let (mut s, mut t) = (shape(dim / 2), shape(dim / 16));
                (s[0], t[0]) = (num_pages, num_pages);
                return (Tensor::from_slice(&data, &s).unwrap(), Some(Tensor::from_slice(&scales, &t).unwrap()));
            }
            let mut data = vec![f32::NAN; slots * p.kv_heads * dim];
            for slot in (0..slots).filter(|&s| used[s]) {
                for head in 0..p.kv_heads {
                    let row = &mut data[at(slot, head) * dim..][..dim];
                    if one_hot {
                        row.fill(0.0);
                        row[slot % dim] = 1.0;
                    } else {
                        row.fill_with(|| rng.normal());
                    }
                }
            }
            (Tensor::from_f32(p.kv_dtype, &data, &shape(dim)).unwrap(), None)
        };
        let (k, ks) = fill(p.head_dim_qk, false);
        let (v, vs) = fill(p.head_dim_vo, case.one_hot);
        Self {
            q,
            k,
            v,
            block_scales: ks.zip(vs).map(|(a, b)| [a, b]),
            qo,
            table,
            layout: case.layout,
            scales: case.scales,
        }
    }

    pub(crate) fn kv(&self) -> Kv<'_> {
        let kv = match &self.block_scales {
            Some([ks, vs]) => PagedKv::nvfp4(self.k.view(), self.v.view(), ks.view(), vs.view(), self.layout),
            None => PagedKv::new(self.k.view(), self.v.view(), self.layout),
        };
        Kv::Paged(kv.unwrap().with_scales(self.scales.0, self.scales.1).unwrap(), &self.table)
    }
}

/// A reference's results, exact and naive.
pub(crate) struct Expected {
    pub exact: reference::attention::States,
    pub naive: reference::attention::States,
}

impl Expected {
    pub(crate) fn of(out: DType, f: impl Fn(Precision) -> fir::Result<reference::attention::States>) -> Self {
        Self { exact: f(Precision::Exact).unwrap(), naive: f(Precision::Naive(out)).unwrap() }
    }

    #[track_caller]
    pub(crate) fn check(&self, what: &str, out: TensorRef<'_>, lse: Option<TensorRef<'_>>) {
        let row = *out.shape().last().unwrap();
        if let Err(e) = compare(out, Compare { exact: &self.exact.0, naive: &self.naive.0, row }) {
            panic!("{what}: o: {e}");
        }
        if let Some(lse) = lse
            && let Err(e) = compare(lse, Compare { exact: &self.exact.1, naive: &self.naive.1, row: 1 })
        {
            panic!("{what}: lse: {e}");
        }
    }
}

/// Runs `case` through a [`BatchPlan`] on every executor and split, and compares with the reference.
#[track_caller]
pub(crate) fn check_case(case: &Case, params: &Params<'_>) {
    let batch = Batch::new(case);
    let expected = expected(case, &batch, params);
    let softmax = case.problem.variant.normalize() == fir::variant::Normalize::Softmax;
    crate::support::every_exec(|exec| {
        for split in [Split::Balanced, Split::Fixed(64), Split::Off] {
            let (out, lse) = run(exec, case, &batch, params, split, softmax);
            let what = format!("{exec:?} {split:?} {case:?}");
            expected.check(&what, out.view(), softmax.then(|| lse.view()));
        }
    });
}

/// What `case` should give.
pub(crate) fn expected(case: &Case, batch: &Batch, params: &Params<'_>) -> Expected {
    let p = &case.problem;
    let sm_scale = 1.0 / (p.head_dim_qk as f32).sqrt();
    let b = reference::attention::Batch {
        q: batch.q.view(),
        qo: &batch.qo,
        kv: batch.kv(),
        variant: &p.variant,
        params,
        sm_scale: f64::from(sm_scale),
    };
    Expected::of(p.out_dtype, |precision| reference::attention::batch(precision, &b))
}

pub(crate) fn run(
    exec: &Exec,
    case: &Case,
    batch: &Batch,
    params: &Params<'_>,
    split: Split,
    lse: bool,
) -> (Tensor, Tensor) {
    let plan = BatchPlan::new(exec, case.problem.clone(), &batch.qo, &case.kv_lens, split).unwrap();
    run_plan(&plan, exec, case, batch, params, lse)
}

pub(crate) fn run_plan(
    plan: &BatchPlan,
    exec: &Exec,
    case: &Case,
    batch: &Batch,
    params: &Params<'_>,
    lse: bool,
) -> (Tensor, Tensor) {
    let p = &case.problem;
    let mut out = poisoned(p.out_dtype, &[batch.qo.rows(), p.qo_heads, p.head_dim_vo]);
    let mut lse_out = poisoned(DType::F32, &[batch.qo.rows(), p.qo_heads]);
    plan.run(
        exec,
        BatchArgs {
            q: batch.q.view(),
            kv: batch.kv(),
            params,
            sm_scale: None,
            scratch: &mut plan.scratch(),
            out: out.view_mut(),
            lse: lse.then(|| lse_out.view_mut()),
        },
    )
    .unwrap();
    (out, lse_out)
}

/// An output that shows every element that is not written.
pub(crate) fn poisoned(dtype: DType, shape: &[usize]) -> Tensor {
    let n = shape.iter().product();
    Tensor::from_f32(dtype, &vec![f32::NAN; n], shape).unwrap()
}
