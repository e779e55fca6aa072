//! Plans in CUDA graphs: recorded once, refilled, replayed.
#![cfg(feature = "cuda")]

use fir::attention::{BatchArgs, BatchPlan, DecodeArgs, DecodePlan, MlaArgs, MlaPlan, MlaProblem, Problem, Split};
use fir::exec::{Gpu, Graph};
use fir::kv::{Kv, KvLayout, PageTable, PagedKv, PagedMla, Ragged};
use fir::testing::Rng;
use fir::variant::{self, Params};
use fir::{DType, Exec, Tensor};

/// Three requests of up to 44 pages of 16 tokens, 8 query heads on 2, on a device.
struct Step {
    gpu: Gpu,
    exec: Exec,
    kv: Tensor,
    pages: Tensor,
}

impl Step {
    /// None where there is no GPU.
    fn new() -> Option<Self> {
        crate::support::gpu()?;
        let gpu = Gpu::new(0).unwrap();
        let kv = Tensor::from_f32(DType::BF16, &Rng::new(1).normals(132 * 2 * 16 * 2 * 128), &[132, 2, 16, 2, 128]);
        let pages: Vec<i32> = (0..132).map(|i| i * 7 % 132).collect();
        let kv = kv.unwrap().to_device(&gpu).unwrap();
        let pages = Tensor::from_slice(&pages, &[132]).unwrap().to_device(&gpu).unwrap();
        Some(Self { exec: Exec::Cuda(gpu.clone()), gpu, kv, pages })
    }

    fn rows(&self, seed: u64, tokens: usize) -> Tensor {
        let x = Tensor::from_f32(DType::BF16, &Rng::new(seed).normals(tokens * 8 * 128), &[tokens, 8, 128]);
        x.unwrap().to_device(&self.gpu).unwrap()
    }

    /// The table for so many tokens of each request: always the same pages.
    fn table(&self, lens: [u32; 3]) -> PageTable<'_> {
        let lens = lens.map(|n| n as i32);
        PageTable::on_device(&self.gpu, 16, 132, &[0, 44, 88, 132], self.pages.view(), &lens).unwrap()
    }

    fn kv<'a>(&'a self, table: &'a PageTable<'a>) -> Kv<'a> {
        Kv::Paged(PagedKv::interleaved(self.kv.view(), KvLayout::Nhd).unwrap(), table)
    }

    fn replay(&self, graph: &Graph, out: &Tensor) -> Vec<f32> {
        // SAFETY: everything that was recorded lives to the end of the test, and one thread uses it.
        #[expect(unsafe_code, reason = "addresses are recorded, not borrows")]
        unsafe { graph.launch(&self.gpu) }.unwrap();
        out.to_host().unwrap().view().to_f32_vec().unwrap()
    }
}

#[test]
fn a_decode_is_recorded_once_and_refilled() {
    let Some(step) = Step::new() else { return };
    let problem = Problem::new(8, 2, 128, DType::BF16, variant::causal());
    let mut plan = DecodePlan::with_capacity(&step.exec, problem, 3, Split::Balanced).unwrap();
    let (q, mut out, mut again) = (step.rows(2, 3), step.rows(3, 3), step.rows(3, 3));
    let first = [700, 5, 300];
    plan.refill(&first).unwrap();
    let (mut scratch, table) = (plan.scratch(), step.table(first));
    let run = |plan: &DecodePlan, table: &PageTable<'_>, scratch: &mut _, out: &mut Tensor| {
        let (kv, params) = (step.kv(table), &Params::new());
        plan.run(
            &step.exec,
            DecodeArgs { q: q.view(), kv, params, sm_scale: None, scratch, out: out.view_mut(), lse: None },
        )
    };
    run(&plan, &table, &mut scratch, &mut out).unwrap();
    let graph = Graph::capture(&step.gpu, || run(&plan, &table, &mut scratch, &mut out)).unwrap();
    let mut results = vec![];
    for lens in [first, [1, 704, 64], [33, 33, 33], first] {
        plan.refill(&lens).unwrap();
        let got = step.replay(&graph, &out);
        run(&plan, &step.table(lens), &mut scratch, &mut again).unwrap();
        assert_eq!(got, again.to_host().unwrap().view().to_f32_vec().unwrap(), "{lens:?}");
        results.push(got);
    }
    assert!(results[0] == results[3] && results[0] != results[1] && results[1] != results[2]);
}

#[test]
fn a_mixed_batch_is_recorded_once_and_refilled() {
    let Some(step) = Step::new() else { return };
    let problem = Problem::new(8, 2, 128, DType::BF16, variant::causal());
    let mut plan = BatchPlan::with_capacity(&step.exec, problem, 64, Split::Balanced).unwrap();
    let qo = Ragged::from_lens(&[60, 1, 9]).unwrap();
    let (q, mut out, mut again) = (step.rows(2, 70), step.rows(3, 70), step.rows(3, 70));
    let first = [700, 5, 300];
    plan.refill(&qo, &first).unwrap();
    let (mut scratch, table) = (plan.scratch(), step.table(first));
    let run = |plan: &BatchPlan, table: &PageTable<'_>, scratch: &mut _, out: &mut Tensor| {
        let (kv, params) = (step.kv(table), &Params::new());
        plan.run(
            &step.exec,
            BatchArgs { q: q.view(), kv, params, sm_scale: None, scratch, out: out.view_mut(), lse: None },
        )
    };
    run(&plan, &table, &mut scratch, &mut out).unwrap();
    let graph = Graph::capture(&step.gpu, || run(&plan, &table, &mut scratch, &mut out)).unwrap();
    let recorded = plan.recorded(&scratch);
    assert!(recorded.is_some());
    for lens in [first, [60, 704, 64], [512, 33, 700], first] {
        plan.refill(&qo, &lens).unwrap();
        assert_eq!(plan.recorded(&scratch), recorded);
        let got = step.replay(&graph, &out);
        run(&plan, &step.table(lens), &mut scratch, &mut again).unwrap();
        assert_eq!(got, again.to_host().unwrap().view().to_f32_vec().unwrap(), "{lens:?}");
    }
}

#[test]
fn offsets_and_pages_may_be_in_buffers_of_the_callers() {
    let Some(step) = Step::new() else { return };
    let problem = Problem::new(8, 2, 128, DType::BF16, variant::causal());
    let mut plan = BatchPlan::with_capacity(&step.exec, problem, 3, Split::Balanced).unwrap();
    let q = step.rows(2, 3);
    let (indptr, lens) = ([0, 1, 45, 132], [16, 700, 1100]);
    let offsets = Tensor::from_slice(&[0i32, 1, 45, 132, 99], &[5]).unwrap().to_device(&step.gpu).unwrap();
    plan.refill(&Ragged::ones(3).unwrap(), &lens.map(|n| n as u32)).unwrap();
    let run = |table: fir::Result<PageTable<'_>>| {
        let (table, mut out, mut scratch) = (table.unwrap(), step.rows(3, 3), plan.scratch());
        let (kv, params) = (step.kv(&table), &Params::new());
        let args = BatchArgs {
            q: q.view(),
            kv,
            params,
            sm_scale: None,
            scratch: &mut scratch,
            out: out.view_mut(),
            lse: None,
        };
        plan.run(&step.exec, args).unwrap();
        out.to_host().unwrap().view().to_f32_vec().unwrap()
    };
    let ids = step.pages.view();
    let own = run(PageTable::on_device(&step.gpu, 16, 132, &indptr, ids, &lens));
    assert_eq!(run(PageTable::in_buffers(&step.gpu, 16, 132, (&indptr, offsets.view()), ids, &lens)), own);
    let short = PageTable::in_buffers(&step.gpu, 16, 132, (&[0; 9], offsets.view()), ids, &[0; 8]);
    assert!(short.unwrap_err().to_string().contains("`indptr`"));
}

#[test]
fn latent_attention_is_recorded_once_and_refilled() {
    let Some(step) = Step::new() else { return };
    let tensor = |seed, shape: &[usize]| {
        let x = Tensor::from_f32(DType::BF16, &Rng::new(seed).normals(shape.iter().product()), shape);
        x.unwrap().to_device(&step.gpu).unwrap()
    };
    let (ckv, kpe) = (tensor(4, &[132, 16, 512]), tensor(5, &[132, 16, 64]));
    for (heads, causal, q_len) in [(128, false, 1), (16, false, 1), (128, true, 2), (16, true, 3)] {
        let bf16 = DType::BF16;
        let types = (bf16, bf16, bf16);
        let problem = MlaProblem {
            heads,
            head_dim_ckv: 512,
            head_dim_kpe: 64,
            q_dtype: types.0,
            kv_dtype: types.1,
            out_dtype: types.2,
            causal,
        };
        let (qo, tokens) = (Ragged::from_lens(&[q_len; 3]).unwrap(), 3 * q_len as usize);
        let (q_nope, q_pe) = (tensor(6, &[tokens, heads, 512]), tensor(7, &[tokens, heads, 64]));
        let [mut out, mut again] = [(); 2].map(|()| tensor(8, &[tokens, heads, 512]));
        let mut plan = MlaPlan::with_capacity(&step.exec, problem, 3 * q_len as usize, Split::Balanced).unwrap();
        // Short at first: nothing is cut, and nothing merged, while the graph is recorded.
        let first = [40, 5, 33];
        plan.refill(&qo, &first).unwrap();
        let (mut scratch, table) = (plan.scratch(), step.table(first));
        let run = |plan: &MlaPlan, table: &PageTable<'_>, scratch: &mut _, out: &mut Tensor| {
            let kv = PagedMla::new(ckv.view(), kpe.view())?;
            let (q_nope, q_pe, out) = (q_nope.view(), q_pe.view(), out.view_mut());
            plan.run(&step.exec, MlaArgs { q_nope, q_pe, kv, table, sm_scale: 0.1, scratch, out, lse: None })
        };
        run(&plan, &table, &mut scratch, &mut out).unwrap();
        let graph = Graph::capture(&step.gpu, || run(&plan, &table, &mut scratch, &mut out)).unwrap();
        let recorded = plan.recorded(&scratch);
        let mut results = vec![];
        for lens in [first, [700, 5, 300], [3, 704, 704], [64, 64, 64], first] {
            plan.refill(&qo, &lens).unwrap();
            assert!(recorded.is_some() && plan.recorded(&scratch) == recorded);
            let got = step.replay(&graph, &out);
            run(&plan, &step.table(lens), &mut scratch, &mut again).unwrap();
            assert_eq!(got, again.to_host().unwrap().view().to_f32_vec().unwrap(), "{heads} {lens:?}");
            results.push(got);
        }
        assert!(results[0] == results[4] && results[0] != results[1] && results[1] != results[2]);
    }
}

#[test]
fn what_waits_is_refused_while_recording() {
    let Some(step) = Step::new() else { return };
    let error = Graph::capture(&step.gpu, || step.gpu.synchronize());
    assert!(error.is_err());
    // The stream is as good as before.
    assert_eq!(step.rows(2, 1).to_host().unwrap().shape(), [1, 8, 128]);
    assert!(Graph::capture(&Gpu::dry(fir::exec::Arch::HOPPER), || Ok(())).is_err());
}
