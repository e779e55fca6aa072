//! Bad input to every plan and operator is refused with a message that names the operation, the argument and both
//! values: what it got and what it wants.

use fir::attention::{
    BatchArgs, BatchPlan, BlockMask, CascadeArgs, CascadeLevel, CascadePlan, DecodeArgs, DecodePlan, MlaArgs, MlaPlan,
    MlaProblem, Problem, Scratch, SingleArgs, SparseArgs, SparsePlan, Split, VariableSparsePlan, merge_state,
    merge_state_in_place, merge_states, single_decode, single_prefill,
};
use fir::kv::{Kv, KvLayout, PageTable, PagedKv, PagedMla, Ragged, RaggedKv};
use fir::tensor::Bool;
use fir::variant::{self, Params, Variant};
use fir::{DType, Error, Exec, Result, Tensor, TensorRef};

fn exec() -> Exec {
    Exec::cpu_with(fir::exec::Level::available()[0], 2).unwrap()
}

fn zeros(dtype: DType, shape: &[usize]) -> Tensor {
    Tensor::zeros(dtype, shape).unwrap()
}

fn f32s(shape: &[usize]) -> Tensor {
    zeros(DType::F32, shape)
}

#[track_caller]
fn refused<T>(result: Result<T>, parts: &[&str]) {
    let Err(e) = result else { panic!("accepted, expected a refusal with {parts:?}") };
    let message = e.to_string();
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}

/// Four query heads to two KV heads of 8.
fn problem() -> Problem {
    Problem::new(4, 2, 8, DType::F32, variant::causal())
}

/// Two requests, of 1 and 2 query tokens and 3 and 5 cached ones, in pages of 4; each field is right until a test
/// spoils it.
struct Setup {
    problem: Problem,
    planned: Vec<u32>,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: PageTable<'static>,
    out: Tensor,
    lse: Option<Tensor>,
    sm_scale: Option<f32>,
}

impl Setup {
    fn new() -> Self {
        Self {
            problem: problem(),
            planned: vec![3, 5],
            q: f32s(&[3, 4, 8]),
            k: f32s(&[6, 4, 2, 8]),
            v: f32s(&[6, 4, 2, 8]),
            table: table(4, 6),
            out: f32s(&[3, 4, 8]),
            lse: None,
            sm_scale: None,
        }
    }

    fn qo() -> Ragged {
        Ragged::from_lens(&[1, 2]).unwrap()
    }

    fn run_with(&mut self, params: &Params<'_>, scratch: Option<&mut Scratch>) -> Result<()> {
        let exec = exec();
        let plan = BatchPlan::new(&exec, self.problem.clone(), &Self::qo(), &self.planned, Split::Balanced)?;
        let mut own = plan.scratch();
        plan.run(
            &exec,
            BatchArgs {
                q: self.q.view(),
                kv: Kv::Paged(PagedKv::new(self.k.view(), self.v.view(), KvLayout::Nhd)?, &self.table),
                params,
                sm_scale: self.sm_scale,
                scratch: scratch.unwrap_or(&mut own),
                out: self.out.view_mut(),
                lse: self.lse.as_mut().map(Tensor::view_mut),
            },
        )
    }

    fn run(&mut self) -> Result<()> {
        self.run_with(&Params::new(), None)
    }
}

fn table(page_size: usize, pages: usize) -> PageTable<'static> {
    PageTable::with_lens(page_size, pages, vec![0, 1, 3], vec![2, 5, 0], &[3, 5]).unwrap()
}

#[track_caller]
fn batch_refuses(spoil: impl FnOnce(&mut Setup), parts: &[&str]) {
    let mut setup = Setup::new();
    spoil(&mut setup);
    refused(setup.run(), parts);
}

#[test]
fn problems_that_no_kernel_takes_say_why() {
    let plan = |spoil: &dyn Fn(&mut Problem)| {
        let mut p = problem();
        spoil(&mut p);
        BatchPlan::new(&exec(), p, &Setup::qo(), &[3, 5], Split::Balanced)
    };
    refused(plan(&|p| p.qo_heads = 5), &["BatchPlan", "qo_heads 5", "kv_heads 2"]);
    refused(plan(&|p| p.kv_heads = 0), &["BatchPlan", "qo_heads 4", "kv_heads 0"]);
    refused(plan(&|p| p.qo_heads = 0), &["BatchPlan", "qo_heads 0"]);
    refused(plan(&|p| p.qo_heads = usize::MAX - 1), &["BatchPlan", "qo_heads", "2^20"]);
    for dim in [0, 513, usize::MAX] {
        refused(plan(&|p| p.head_dim_qk = dim), &["BatchPlan", &format!("head_dim_qk {dim}"), "1..=512"]);
        refused(plan(&|p| p.head_dim_vo = dim), &["BatchPlan", &format!("head_dim_vo {dim}"), "1..=512"]);
    }
    refused(plan(&|p| p.q_dtype = DType::I32), &["BatchPlan", "q_dtype i32", "f32, f16, bf16, e4m3 or e5m2"]);
    refused(plan(&|p| p.kv_dtype = DType::U8), &["BatchPlan", "kv_dtype u8", "e2m1x2"]);
    refused(plan(&|p| p.out_dtype = DType::E4M3), &["BatchPlan", "out_dtype e4m3", "f32, f16 or bf16"]);
    refused(plan(&|p| p.kv_dtype = DType::E2M1x2), &["BatchPlan", "8, 8", "16"]);
    // All reasons at once.
    refused(plan(&|p| (p.head_dim_qk, p.q_dtype) = (0, DType::I8)), &["head_dim_qk 0", "q_dtype i8"]);
    // Every plan asks the same.
    let bad = || Problem { kv_heads: 3, ..problem() };
    refused(DecodePlan::new(&exec(), bad(), &[3], Split::Off), &["qo_heads 4", "kv_heads 3"]);
    let level = CascadeLevel { qo: &Setup::qo(), kv_lens: &[1, 1] };
    refused(CascadePlan::new(&exec(), bad(), &[level], Split::Off), &["qo_heads 4", "kv_heads 3"]);
    let mask = BlockMask { indptr: &[0, 1], indices: &[0], rows: 1, cols: 1, block_rows: 1, block_cols: 1 };
    refused(SparsePlan::new(&exec(), bad(), mask, Split::Off), &["qo_heads 4", "kv_heads 3"]);
    let (mask, sizes) = (zeros(DType::Bool, &[3, 1, 1]), zeros(DType::I32, &[3, 1]));
    let plan = VariableSparsePlan::new(&exec(), bad(), mask.view(), sizes.view(), sizes.view(), Split::Off);
    refused(plan, &["VariableSparsePlan", "qo_heads 4", "kv_heads 3"]);
}

#[test]
fn splits_lengths_and_capacities_are_checked_when_planned() {
    let plan = |kv_lens: &[u32], split| BatchPlan::new(&exec(), problem(), &Setup::qo(), kv_lens, split);
    for n in [0, 1, 63, 65, u32::MAX] {
        let got = format!("Fixed({n})");
        refused(plan(&[3, 5], Split::Fixed(n)), &["BatchPlan", "`split`", &got, "multiple of 64"]);
        refused(mla_plan(mla(), Split::Fixed(n)), &["MlaPlan", "`split`", &got, "multiple of 64"]);
    }
    refused(plan(&[3], Split::Off), &["BatchPlan", "`kv_lens`", "batch=1", "batch=2"]);
    refused(plan(&[3, u32::MAX], Split::Off), &["BatchPlan", "`kv_lens`", "4294967295 at request 1", "2^31"]);
    refused(
        DecodePlan::with_capacity(&exec(), problem(), usize::MAX, Split::Off),
        &["BatchPlan", "`requests`", &usize::MAX.to_string(), "2^24"],
    );
    // A plan is made before its tensors are seen: what only claims to be large must cost nothing.
    let huge = Ragged::from_lens(&[i32::MAX as u32]).unwrap();
    refused(
        BatchPlan::new(&exec(), problem(), &huge, &[1], Split::Balanced),
        &["BatchPlan", "`qo`", "2147483647 tokens", "2^24"],
    );
    let many = Ragged::from_lens(&[1 << 24]).unwrap();
    let wide = Problem::new(64, 1, 8, DType::F32, variant::causal());
    refused(BatchPlan::new(&exec(), wide, &many, &[1], Split::Off), &["`qo`", "16777216 tokens of 64 heads", "2^28"]);
    refused(MlaPlan::new(&exec(), mla(), &huge, &[1], Split::Off), &["MlaPlan", "`qo`", "2147483647 tokens"]);
    let level = CascadeLevel { qo: &huge, kv_lens: &[1] };
    refused(
        CascadePlan::new(&exec(), problem(), &[level], Split::Off),
        &["CascadePlan", "`qo`", "2147483647 tokens", "2^24"],
    );
    let level = CascadeLevel { qo: &Setup::qo(), kv_lens: &[3, 5] };
    let mut cascade = CascadePlan::new(&exec(), problem(), &[level], Split::Off).unwrap();
    refused(cascade.refill(&[level, level]), &["CascadePlan", "`levels`", "levels=2", "levels=1"]);
    assert_eq!(cascade.recorded(&cascade.scratch()), None);
    let longest = i32::MAX as u32 - 64;
    refused(plan(&[longest, longest], Split::Fixed(64)), &["BatchPlan", "`split`", "Fixed(64)", "2^24 partial rows"]);
    for split in [Split::Balanced, Split::Off, Split::Fixed(1 << 30)] {
        let plan = plan(&[longest, longest], split).unwrap();
        assert!(plan.schedule().items().iter().all(|i| i.kv_end <= longest));
    }
}

#[test]
fn batch_refuses_tensors_that_do_not_fit() {
    Setup::new().run().unwrap();
    batch_refuses(|s| s.q = f32s(&[3, 32]), &["BatchPlan::run", "`q`", "2 axes", "3 [tokens, qo_heads, head_dim]"]);
    batch_refuses(|s| s.q = f32s(&[4, 4, 8]), &["BatchPlan::run", "`q`", "tokens=4", "tokens=3"]);
    batch_refuses(|s| s.q = f32s(&[3, 2, 8]), &["BatchPlan::run", "`q`", "qo_heads=2", "qo_heads=4"]);
    batch_refuses(|s| s.q = f32s(&[3, 4, 9]), &["BatchPlan::run", "`q`", "head_dim=9", "head_dim=8"]);
    batch_refuses(|s| s.q = zeros(DType::BF16, &[3, 4, 8]), &["BatchPlan::run", "`q`", "bf16", "f32"]);
    batch_refuses(|s| s.out = f32s(&[3, 4]), &["BatchPlan::run", "`out`", "2 axes", "3 ["]);
    batch_refuses(|s| s.out = f32s(&[3, 4, 7]), &["BatchPlan::run", "`out`", "head_dim_vo=7", "head_dim_vo=8"]);
    batch_refuses(|s| s.out = zeros(DType::F16, &[3, 4, 8]), &["BatchPlan::run", "`out`", "f16", "f32"]);
    batch_refuses(|s| s.lse = Some(f32s(&[3, 3])), &["BatchPlan::run", "`lse`", "qo_heads=3", "qo_heads=4"]);
    batch_refuses(|s| s.lse = Some(f32s(&[12])), &["BatchPlan::run", "`lse`", "1 axes", "2 ["]);
    batch_refuses(|s| s.lse = Some(zeros(DType::BF16, &[3, 4])), &["BatchPlan::run", "`lse`", "bf16", "f32"]);
    batch_refuses(|s| s.k = f32s(&[6, 4, 16]), &["PagedKv", "`k`", "3 axes", "4 ["]);
    batch_refuses(|s| s.v = f32s(&[6, 5, 2, 8]), &["PagedKv", "`v`", "page_size=5", "page_size=4"]);
    batch_refuses(|s| s.v = zeros(DType::F16, &[6, 4, 2, 8]), &["PagedKv", "`v`", "f16", "f32"]);
    batch_refuses(|s| s.k = zeros(DType::I32, &[6, 4, 2, 8]), &["PagedKv", "`k`", "i32", "f32, f16"]);
    let both = |s: &mut Setup, dtype, shape: &[usize]| (s.k, s.v) = (zeros(dtype, shape), zeros(dtype, shape));
    batch_refuses(|s| both(s, DType::F32, &[6, 4, 4, 8]), &["BatchPlan::run", "`kv`", "kv_heads=4", "kv_heads=2"]);
    batch_refuses(|s| both(s, DType::F32, &[6, 4, 2, 9]), &["BatchPlan::run", "`kv`", "=9", "=8"]);
    batch_refuses(|s| both(s, DType::BF16, &[6, 4, 2, 8]), &["BatchPlan::run", "`kv`", "bf16", "f32, as planned"]);
}

#[test]
fn last_axes_must_be_contiguous() {
    let s = Setup::new();
    let (exec, plain) = (exec(), PagedKv::new(s.k.view(), s.v.view(), KvLayout::Nhd).unwrap());
    let turned = f32s(&[6, 4, 8, 2]);
    let turned = turned.view().transpose(2, 3).unwrap();
    refused(PagedKv::new(turned, s.v.view(), KvLayout::Nhd), &["PagedKv", "`k`", "stride 2 of the last axis", "1"]);
    refused(PagedKv::new(s.k.view(), turned, KvLayout::Nhd), &["PagedKv", "`v`", "stride 2 of the last axis", "1"]);
    let plan = BatchPlan::new(&exec, problem(), &Setup::qo(), &[3, 5], Split::Off).unwrap();
    let (wide_q, mut wide_out) = (f32s(&[3, 8, 4]), f32s(&[3, 8, 4]));
    let mut run = |q: TensorRef<'_>, spoil_out: bool| {
        let mut out = f32s(&[3, 4, 8]);
        let out = if spoil_out { wide_out.view_mut().transpose(1, 2).unwrap() } else { out.view_mut() };
        let (params, kv) = (Params::new(), Kv::Paged(plain, &s.table));
        let scratch = &mut plan.scratch();
        plan.run(&exec, BatchArgs { q, kv, params: &params, sm_scale: None, scratch, out, lse: None })
    };
    refused(
        run(wide_q.view().transpose(1, 2).unwrap(), false),
        &["BatchPlan::run", "`q`", "stride 4 of the last axis", "1"],
    );
    refused(run(s.q.view(), true), &["BatchPlan::run", "`out`", "stride 4 of the last axis", "1"]);
}

#[test]
fn kv_must_be_what_was_planned() {
    batch_refuses(|s| s.planned = vec![3, 4], &["BatchPlan::run", "`kv`", "5 tokens at request 1", "4, as planned"]);
    batch_refuses(
        |s| s.table = PageTable::with_lens(4, 6, vec![0, 1], vec![0], &[3]).unwrap(),
        &["BatchPlan::run", "`kv`", "batch=1", "batch=2"],
    );
    batch_refuses(|s| s.table = table(8, 6), &["BatchPlan::run", "`kv`", "page_size=4", "page_size=8"]);
    batch_refuses(|s| s.table = table(4, 7), &["BatchPlan::run", "`page table`", "7 pages", "pool's 6"]);
    // A table for a part of the pool is fine.
    let mut s = Setup::new();
    s.k = f32s(&[7, 4, 2, 8]);
    s.v = f32s(&[7, 4, 2, 8]);
    s.run().unwrap();
    refused(Ragged::new(&[0, 3, 2]), &["Ragged", "`indptr`", "2 after 3", "not decrease"]);
    refused(Ragged::new(&[1, 2]), &["Ragged", "`indptr`", "1 at its start", "0"]);
    refused(Ragged::new(&[]), &["Ragged", "`indptr`", "empty", "batch + 1"]);
    refused(Ragged::from_lens(&[u32::MAX, 1]), &["Ragged", "`lens`", "request 0", "2^31"]);
    let indptr = Ragged::from_lens(&[4, 5]).unwrap();
    let (k, short) = (f32s(&[9, 2, 8]), f32s(&[8, 2, 8]));
    refused(RaggedKv::new(short.view(), short.view(), &indptr), &["RaggedKv", "`indptr`", "9 rows", "8 rows"]);
    refused(RaggedKv::new(k.view(), short.view(), &indptr), &["RaggedKv", "`v`", "=8", "=9"]);
    refused(RaggedKv::new(s.k.view(), s.v.view(), &indptr), &["RaggedKv", "`k`", "4 axes", "3 ["]);
}

#[test]
fn scales_must_be_finite() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        batch_refuses(|s| s.sm_scale = Some(bad), &["BatchPlan::run", "`sm_scale`", &bad.to_string(), "finite"]);
        for bad in [bad, 0.0, -1.0] {
            let s = Setup::new();
            let kv = || PagedKv::new(s.k.view(), s.v.view(), KvLayout::Nhd).unwrap();
            refused(kv().with_scales(bad, 1.0), &["PagedKv", "`k_scale`", &bad.to_string(), "above 0"]);
            refused(kv().with_scales(1.0, bad), &["PagedKv", "`v_scale`", &bad.to_string(), "above 0"]);
            let (ckv, kpe) = (f32s(&[1, 1, 8]), f32s(&[1, 1, 4]));
            let kv = || PagedMla::new(ckv.view(), kpe.view()).unwrap();
            refused(kv().with_scales(bad, 1.0), &["PagedMla", "`ckv_scale`", &bad.to_string(), "above 0"]);
            refused(kv().with_scales(1.0, bad), &["PagedMla", "`kpe_scale`", &bad.to_string(), "above 0"]);
        }
        refused(run_mla(|m| m.sm_scale = bad), &["MlaPlan::run", "`sm_scale`", &bad.to_string(), "finite"]);
    }
    refused(run_mla(|m| m.scales = (1e-38, 1e38)), &["MlaPlan::run", "`kv`", "kpe_scale", "ckv_scale", "finite"]);
}

#[test]
fn scratch_of_another_plan_is_refused() {
    let mut empty = Scratch::default();
    refused(
        Setup::new().run_with(&Params::new(), Some(&mut empty)),
        &["BatchPlan::run", "`scratch`", "tiles of 0", "`scratch()`"],
    );
    let wide = Problem { head_dim_qk: 512, head_dim_vo: 512, ..problem() };
    let small = BatchPlan::new(&exec(), problem(), &Setup::qo(), &[3, 5], Split::Off).unwrap();
    let large = BatchPlan::new(&exec(), wide, &Setup::qo(), &[3, 5], Split::Off).unwrap();
    let have = small.scratch().bytes();
    assert!(have < large.scratch().bytes());
    let mut s = Setup::new();
    s.problem = large.problem().clone();
    (s.q, s.out) = (f32s(&[3, 4, 512]), f32s(&[3, 4, 512]));
    (s.k, s.v) = (f32s(&[6, 4, 2, 512]), f32s(&[6, 4, 2, 512]));
    refused(s.run_with(&Params::new(), Some(&mut small.scratch())), &["BatchPlan::run", "`scratch`", "tiles of"]);
    s.run_with(&Params::new(), Some(&mut large.scratch())).unwrap();
    // A larger one will do.
    Setup::new().run_with(&Params::new(), Some(&mut large.scratch())).unwrap();
}

#[test]
fn variants_and_their_parameters_must_agree() {
    let refuses = |variant: Variant, params: Params<'_>, lse: bool, parts: &[&str]| {
        let mut s = Setup::new();
        s.problem.variant = variant;
        s.lse = lse.then(|| f32s(&[3, 4]));
        refused(s.run_with(&params, None), parts);
    };
    refuses(variant::sigmoid(), Params::new().f32("bias", 0.0), true, &["BatchPlan::run", "`lse`", "given", "softmax"]);
    refuses(variant::soft_cap(), Params::new(), false, &["SoftCap", "`soft_cap`", "no value", "f32"]);
    refuses(variant::soft_cap(), Params::new().i32("soft_cap", 3), false, &["SoftCap", "`soft_cap`", "i32 3", "f32"]);
    refuses(variant::soft_cap(), Params::new().f32("soft_cap", f32::NAN), false, &["`soft_cap`", "NaN", "a number"]);
    let twice = Params::new().f32("soft_cap", 1.0).f32("soft_cap", 1.0);
    refuses(variant::soft_cap(), twice, false, &["SoftCap", "`soft_cap`", "two values", "one"]);
    refuses(variant::causal(), Params::new().f32("x", 1.0), false, &["Causal", "`x`", "f32 1", "no parameter"]);
    let slopes = [0.0; 3];
    let per_head = Params::new().f32_tensor("alibi_slopes", &slopes);
    refuses(variant::alibi(), per_head, false, &["Alibi", "`alibi_slopes`", "[3]", "[4]"]);
    let bits = |bytes, indptr| Params::new().bits("mask", bytes, indptr);
    refuses(variant::custom_mask(), bits(&[0; 4], &[0, 4]), false, &["`mask`", "indptr [2]", "indptr [3]"]);
    refuses(variant::custom_mask(), bits(&[0; 4], &[0, 3, 2]), false, &["`mask`", "indptr[2] = 2", "decrease"]);
    refuses(variant::custom_mask(), bits(&[0; 4], &[0, 3, 5]), false, &["`mask`", "indptr[2] = 5", "4 bytes"]);
    refuses(variant::custom_mask(), bits(&[0; 4], &[-1, 3, 4]), false, &["`mask`", "indptr[0] = -1", "0 or more"]);
    // A short mask hides what it does not name.
    let mut s = Setup::new();
    s.problem.variant = variant::custom_mask();
    s.run_with(&bits(&[], &[0, 0, 0]), None).unwrap();
}

#[test]
fn cascade_levels_must_nest_and_be_all_there() {
    let exec = exec();
    let plan = |levels: &[(&[u32], &[u32])]| {
        let qo: Vec<_> = levels.iter().map(|l| Ragged::from_lens(l.0).unwrap()).collect();
        let levels: Vec<_> = levels.iter().zip(&qo).map(|(l, qo)| CascadeLevel { qo, kv_lens: l.1 }).collect();
        CascadePlan::new(&exec, problem(), &levels, Split::Off)
    };
    refused(plan(&[]), &["CascadePlan", "`levels`", "empty", "at least one"]);
    refused(plan(&[(&[3], &[4, 4]), (&[1, 2], &[1, 2])]), &["CascadePlan", "`kv_lens`", "groups=2", "groups=1"]);
    refused(plan(&[(&[4], &[4]), (&[1, 2], &[1, 2])]), &["CascadePlan", "`levels[..].qo`", "tokens=4", "tokens=3"]);
    let borders = &["CascadePlan", "`levels`", "ending at token 2", "borders of the last level"];
    refused(plan(&[(&[2, 1], &[4, 4]), (&[1, 2], &[1, 2])]), borders);
    // Also where the first group ends inside the first request.
    refused(plan(&[(&[2, 2], &[4, 4]), (&[4], &[1])]), borders);
    // Groups of the middle level join requests whose parts above differ.
    refused(
        plan(&[(&[1, 2], &[4, 5]), (&[3], &[6]), (&[1, 2], &[1, 2])]),
        &["CascadePlan", "group 0 of level 1", "4 and 5", "share all levels above"],
    );
    let long = i32::MAX as u32;
    refused(plan(&[(&[3], &[long]), (&[1, 2], &[long, 1])]), &["CascadePlan", "`kv_lens`", "at request 0", "2^31"]);
    refused(plan(&[(&[3], &[u32::MAX]), (&[1, 2], &[1, 1])]), &["CascadePlan", "`kv_lens`", "request 0", "2^31"]);

    let plan = plan(&[(&[3], &[4]), (&[1, 2], &[3, 5])]).unwrap();
    let (k, q) = (f32s(&[6, 4, 2, 8]), f32s(&[3, 4, 8]));
    let kv = PagedKv::new(k.view(), k.view(), KvLayout::Nhd).unwrap();
    let prefix = PageTable::with_lens(4, 6, vec![0, 1], vec![1], &[4]).unwrap();
    let own = table(4, 6);
    let levels = [Kv::Paged(kv, &prefix), Kv::Paged(kv, &own)];
    let run = |kv: &[Kv<'_>], scratch: &mut [Scratch]| {
        let (mut out, params) = (f32s(&[3, 4, 8]), Params::new());
        let out = out.view_mut();
        plan.run(&exec, CascadeArgs { q: q.view(), kv, params: &params, sm_scale: None, scratch, out, lse: None })
    };
    run(&levels, &mut plan.scratch()).unwrap();
    refused(run(&levels[..1], &mut plan.scratch()), &["CascadePlan::run", "`kv`", "levels=1", "levels=2"]);
    refused(run(&[], &mut plan.scratch()), &["CascadePlan::run", "`kv`", "levels=0", "levels=2"]);
    refused(run(&levels, &mut plan.scratch()[..2]), &["CascadePlan::run", "`scratch`", "=2", "=3"]);
    let mut spoilt = plan.scratch();
    spoilt[2] = Scratch::default();
    refused(run(&levels, &mut spoilt), &["CascadePlan::run", "`scratch`", "0 floats"]);
    let scaled = Kv::Paged(kv.with_scales(1.0, 2.0).unwrap(), &own);
    refused(run(&[levels[0], scaled], &mut plan.scratch()), &["CascadePlan::run", "v_scale 2 at level 1", "1"]);
    refused(run(&[levels[1], levels[0]], &mut plan.scratch()), &["CascadePlan::run", "`kv`", "batch=2", "batch=1"]);
}

fn mla() -> MlaProblem {
    MlaProblem {
        heads: 3,
        head_dim_ckv: 8,
        head_dim_kpe: 4,
        q_dtype: DType::F32,
        kv_dtype: DType::F32,
        out_dtype: DType::F32,
        causal: true,
    }
}

fn mla_plan(problem: MlaProblem, split: Split) -> Result<MlaPlan> {
    MlaPlan::new(&exec(), problem, &Setup::qo(), &[3, 5], split)
}

struct Mla {
    q_nope: Tensor,
    q_pe: Tensor,
    ckv: Tensor,
    kpe: Tensor,
    table: PageTable<'static>,
    scales: (f32, f32),
    sm_scale: f32,
    out: Tensor,
}

fn run_mla(spoil: impl FnOnce(&mut Mla)) -> Result<()> {
    let mut m = Mla {
        q_nope: f32s(&[3, 3, 8]),
        q_pe: f32s(&[3, 3, 4]),
        ckv: f32s(&[6, 4, 8]),
        kpe: f32s(&[6, 4, 4]),
        table: table(4, 6),
        scales: (1.0, 1.0),
        sm_scale: 1.0,
        out: f32s(&[3, 3, 8]),
    };
    spoil(&mut m);
    let plan = mla_plan(mla(), Split::Balanced)?;
    plan.run(
        &exec(),
        MlaArgs {
            q_nope: m.q_nope.view(),
            q_pe: m.q_pe.view(),
            kv: PagedMla::new(m.ckv.view(), m.kpe.view())?.with_scales(m.scales.0, m.scales.1)?,
            table: &m.table,
            sm_scale: m.sm_scale,
            scratch: &mut plan.scratch(),
            out: m.out.view_mut(),
            lse: None,
        },
    )
}

#[test]
fn latent_attention_refuses_what_does_not_fit() {
    run_mla(|_| {}).unwrap();
    let plan = |p| mla_plan(p, Split::Off);
    refused(plan(MlaProblem { heads: 0, ..mla() }), &["MlaPlan", "heads 0", "1..=2^20"]);
    refused(plan(MlaProblem { head_dim_ckv: 0, ..mla() }), &["MlaPlan", "head_dim_ckv 0", "1..=512"]);
    refused(plan(MlaProblem { head_dim_ckv: 513, ..mla() }), &["MlaPlan", "head_dim_ckv 513", "1..=512"]);
    refused(plan(MlaProblem { head_dim_kpe: 513, ..mla() }), &["MlaPlan", "head_dim_kpe 513", "0..=512"]);
    refused(plan(MlaProblem { kv_dtype: DType::E2M1x2, ..mla() }), &["MlaPlan", "kv_dtype e2m1x2", "f32, f16"]);
    refused(plan(MlaProblem { out_dtype: DType::E5M2, ..mla() }), &["MlaPlan", "out_dtype e5m2", "f32, f16"]);
    refused(
        MlaPlan::new(&exec(), mla(), &Setup::qo(), &[3], Split::Off),
        &["MlaPlan", "`kv_lens`", "batch=1", "batch=2"],
    );
    let run = "MlaPlan::run";
    refused(run_mla(|m| m.q_nope = f32s(&[3, 24])), &[run, "`q_nope`", "2 axes", "3 ["]);
    refused(run_mla(|m| m.q_pe = f32s(&[3, 3, 5])), &[run, "`q_pe`", "head_dim=5", "head_dim=4"]);
    refused(run_mla(|m| m.q_nope = zeros(DType::F16, &[3, 3, 8])), &[run, "`q_nope`", "f16", "f32, as planned"]);
    refused(run_mla(|m| m.kpe = f32s(&[6, 4, 5])), &[run, "`kpe`", "head_dim_kpe=5", "head_dim_kpe=4"]);
    refused(run_mla(|m| m.kpe = f32s(&[5, 4, 4])), &["PagedMla", "`kpe`", "pages=5", "pages=6"]);
    refused(run_mla(|m| m.kpe = zeros(DType::F16, &[6, 4, 4])), &["PagedMla", "`kpe`", "f16", "f32 as `ckv`"]);
    refused(run_mla(|m| m.table = table(5, 6)), &[run, "`kv`", "page_size=4", "page_size=5"]);
    refused(run_mla(|m| m.table = table(4, 9)), &[run, "`page table`", "9 pages", "pool's 6"]);
    refused(run_mla(|m| m.out = f32s(&[3, 3, 4])), &[run, "`out`", "head_dim_vo=4", "head_dim_vo=8"]);
    let longer = PageTable::with_lens(4, 6, vec![0, 1, 3], vec![2, 5, 0], &[3, 6]).unwrap();
    refused(run_mla(|m| m.table = longer), &[run, "`kv`", "6 tokens at request 1", "5, as planned"]);
}

#[test]
fn block_masks_must_lie_in_the_matrix() {
    let mask = BlockMask { indptr: &[0, 1, 2], indices: &[1, 0], rows: 3, cols: 8, block_rows: 2, block_cols: 4 };
    let plan = |mask| SparsePlan::new(&exec(), problem(), mask, Split::Balanced);
    plan(mask).unwrap().scratch();
    refused(
        plan(BlockMask { block_rows: 0, ..mask }),
        &["SparsePlan", "`block_rows, block_cols`", "0, 4", "1 or more"],
    );
    refused(
        plan(BlockMask { block_cols: 0, ..mask }),
        &["SparsePlan", "`block_rows, block_cols`", "2, 0", "1 or more"],
    );
    refused(plan(BlockMask { rows: 5, ..mask }), &["SparsePlan", "`indptr`", "row_blocks=2", "row_blocks=3"]);
    refused(plan(BlockMask { indptr: &[], ..mask }), &["SparsePlan", "`indptr`", "row_blocks=0", "row_blocks=2"]);
    refused(plan(BlockMask { indices: &[2, 0], ..mask }), &["`indices`", "2 at slot 0", "0 to 1", "2 pages"]);
    refused(plan(BlockMask { indices: &[-1, 0], ..mask }), &["`indices`", "-1 at slot 0", "0 to 1"]);
    refused(plan(BlockMask { indptr: &[0, 2, 1], ..mask }), &["`indptr`", "1 after 2", "not decrease"]);
    refused(plan(BlockMask { indptr: &[0, 1, 3], ..mask }), &["`indptr`", "3 at its end", "2 indices"]);
    // 2^32 + 1 rows in one block are not one row.
    let rows = (1 << 32) + 1;
    let huge = BlockMask { indptr: &[0, 0], rows, block_rows: usize::MAX, ..mask };
    refused(plan(huge), &["SparsePlan", "`rows`", &rows.to_string(), "2^31"]);

    let (exec, plan) = (exec(), plan(mask).unwrap());
    let run = |q: &[usize], k: &[usize], v: &[usize]| {
        let (q, k, v, mut out, params) = (f32s(q), f32s(k), f32s(v), f32s(&[3, 4, 8]), Params::new());
        let (scratch, out) = (&mut plan.scratch(), out.view_mut());
        let (q, k, v) = (q.view(), k.view(), v.view());
        plan.run(&exec, SparseArgs { q, k, v, params: &params, sm_scale: None, scratch, out, lse: None })
    };
    run(&[3, 4, 8], &[8, 2, 8], &[8, 2, 8]).unwrap();
    refused(run(&[2, 4, 8], &[8, 2, 8], &[8, 2, 8]), &["`q`", "tokens=2", "tokens=3"]);
    refused(run(&[3, 4, 8], &[9, 2, 8], &[9, 2, 8]), &["SparsePlan::run", "`k`", "cols=9", "cols=8"]);
    refused(run(&[3, 4, 8], &[8, 2, 8], &[8, 1, 8]), &["SparsePlan::run", "`v`", "kv_heads=1", "kv_heads=2"]);
    refused(run(&[3, 4, 8], &[8, 16], &[8, 2, 8]), &["SparsePlan::run", "`k`", "2 axes", "3 ["]);
}

#[test]
fn variable_blocks_must_add_up() {
    let exec = exec();
    let mask = Tensor::from_slice(&[Bool(1); 8], &[2, 2, 2]).unwrap();
    let sizes = |x: [i32; 4]| Tensor::from_slice(&x, &[2, 2]).unwrap();
    let plan = |rows: [i32; 4], cols: [i32; 4]| {
        let (rows, cols) = (sizes(rows), sizes(cols));
        VariableSparsePlan::new(&exec, problem(), mask.view(), rows.view(), cols.view(), Split::Off)
    };
    let op = "VariableSparsePlan";
    refused(plan([1, 2, 3, 1], [4, 4, 5, 3]), &[op, "`row_sizes`", "4 in all", "3 as for the first"]);
    refused(plan([1, 2, 2, 1], [4, 4, 5, 4]), &[op, "`col_sizes`", "9 in all", "8 as for the first"]);
    refused(plan([1, 2, -1, 4], [4, 4, 5, 3]), &[op, "`row_sizes`", "-1 at block 2", "0 or more"]);
    let most = i32::MAX;
    refused(plan([1, 2, 2, 1], [most, most, most, most]), &[op, "`col_sizes`", "4294967294 in all", "2^31"]);
    refused(plan([1, 2, 2, 1], [most, 0, 0, most]), &[op, "`mask`", "2^28"]);
    refused(plan([most, 0, 0, most], [1, 0, 0, 1]), &["`qo`", "2147483647 tokens", "2^24"]);
    let few = Tensor::from_slice(&[4i32, 4], &[2, 1]).unwrap();
    let two = sizes([1, 2, 2, 1]);
    let plan3 = |m: TensorRef<'_>, r: TensorRef<'_>, c: TensorRef<'_>| {
        VariableSparsePlan::new(&exec, problem(), m, r, c, Split::Off)
    };
    refused(plan3(mask.view(), two.view(), few.view()), &[op, "`col_sizes`", "col_blocks=1", "col_blocks=2"]);
    refused(plan3(two.view(), two.view(), two.view()), &[op, "`mask`", "2 axes", "3 ["]);
    let ints = zeros(DType::I32, &[2, 2, 2]);
    refused(plan3(ints.view(), two.view(), two.view()), &[op, "`mask`", "i32", "bool"]);
    // One element in memory, 2^41 claimed.
    let claim = TensorRef::strided(&[Bool(1)], &[2, 1 << 20, 1 << 20], &[0, 0, 0]).unwrap();
    let many = zeros(DType::I32, &[2, 1 << 20]);
    refused(plan3(claim, many.view(), many.view()), &[op, "`mask`", "2199023255552", "2^24"]);

    let plan = plan([1, 2, 2, 1], [4, 4, 5, 3]).unwrap();
    let run = |q: &[usize], k: &[usize]| {
        let (q, k, mut out, params) = (f32s(q), f32s(k), f32s(&[4, 3, 8]), Params::new());
        let (scratch, out, q, k) = (&mut plan.scratch(), out.view_mut(), q.view(), k.view());
        plan.run(&exec, SparseArgs { q, k, v: k, params: &params, sm_scale: None, scratch, out, lse: None })
    };
    run(&[4, 3, 8], &[2, 8, 8]).unwrap();
    refused(run(&[4, 2, 8], &[2, 8, 8]), &["VariableSparsePlan::run", "`q`", "rows=2", "rows=3"]);
    refused(run(&[4, 3, 8], &[2, 7, 8]), &["VariableSparsePlan::run", "`k`", "cols=7", "cols=8"]);
    refused(run(&[2, 3, 8], &[2, 8, 8]), &["VariableSparsePlan::run", "`q`", "qo_heads=2", "qo_heads=4"]);
}

#[test]
fn single_and_decode_refuse_what_does_not_fit() {
    let exec = exec();
    let single = |decode: bool, q: &[usize], k: &[usize], v: &[usize], out: &[usize]| {
        let (q, k, v, mut out) = (f32s(q), f32s(k), f32s(v), f32s(out));
        let args = SingleArgs {
            q: q.view(),
            k: k.view(),
            v: v.view(),
            layout: KvLayout::Nhd,
            variant: &variant::causal(),
            params: &Params::new(),
            sm_scale: None,
            out: out.view_mut(),
            lse: None,
        };
        if decode { single_decode(&exec, args) } else { single_prefill(&exec, args) }
    };
    single(false, &[2, 4, 8], &[5, 2, 8], &[5, 2, 6], &[2, 4, 6]).unwrap();
    single(true, &[4, 8], &[5, 2, 8], &[5, 2, 6], &[4, 6]).unwrap();
    refused(single(false, &[4, 8], &[5, 2, 8], &[5, 2, 8], &[4, 8]), &["single_prefill", "`q`", "2 axes", "3 ["]);
    refused(single(false, &[2, 4, 8], &[5, 16], &[5, 2, 8], &[2, 4, 8]), &["single_prefill", "`k`", "2 axes", "3 ["]);
    refused(single(false, &[2, 4, 8], &[5, 2, 8], &[4, 2, 8], &[2, 4, 8]), &["`v`", "=4", "=5"]);
    refused(single(false, &[2, 4, 8], &[5, 2, 8], &[5, 2, 8], &[3, 4, 8]), &["`out`", "tokens=3", "tokens=2"]);
    refused(single(false, &[2, 4, 8], &[5, 3, 8], &[5, 3, 8], &[2, 4, 8]), &["qo_heads 4", "kv_heads 3"]);
    refused(single(false, &[2, 4, 9], &[5, 2, 8], &[5, 2, 8], &[2, 4, 8]), &["`kv`", "head_dim_qk=8", "head_dim_qk=9"]);
    refused(single(false, &[2, 4, 0], &[5, 2, 0], &[5, 2, 8], &[2, 4, 8]), &["head_dim_qk 0", "1..=512"]);
    refused(single(true, &[2, 4, 8], &[5, 2, 8], &[5, 2, 8], &[2, 4, 8]), &["`q`", "4 axes", "3"]);

    let plan = DecodePlan::new(&exec, problem(), &[3, 5], Split::Off).unwrap();
    let s = Setup::new();
    let kv = PagedKv::new(s.k.view(), s.v.view(), KvLayout::Nhd).unwrap();
    let run = |q: &[usize]| {
        let (q, mut out, params) = (f32s(q), f32s(&[2, 4, 8]), Params::new());
        let (kv, scratch, out) = (Kv::Paged(kv, &s.table), &mut plan.scratch(), out.view_mut());
        plan.run(&exec, DecodeArgs { q: q.view(), kv, params: &params, sm_scale: None, scratch, out, lse: None })
    };
    run(&[2, 4, 8]).unwrap();
    refused(run(&[3, 4, 8]), &["`q`", "tokens=3", "tokens=2"]);
    refused(run(&[2, 32]), &["`q`", "2 axes", "3 ["]);
}

#[test]
fn merges_refuse_states_that_differ() {
    let exec = exec();
    let (o, lse, wide, half) = (f32s(&[3, 4, 8]), f32s(&[3, 4]), f32s(&[3, 4, 9]), zeros(DType::F16, &[3, 4, 8]));
    let merge = |b: &Tensor, b_lse: &Tensor| {
        let (mut out, mut out_lse) = (o.clone(), lse.clone());
        let out = (out.view_mut(), out_lse.view_mut());
        merge_state(&exec, (o.view(), lse.view()), (b.view(), b_lse.view()), out)
    };
    merge(&o, &lse).unwrap();
    refused(merge(&wide, &lse), &["merge_state", "`o_b`", "head_dim=9", "head_dim=8"]);
    refused(merge(&half, &lse), &["merge_state", "`o_b`", "f16", "f32"]);
    refused(merge(&o, &o), &["merge_state", "`lse_b`", "3 axes", "2 ["]);
    refused(merge(&o, &zeros(DType::F16, &[3, 4])), &["merge_state", "`lse_b`", "f16", "f32"]);

    let in_place = |mask: Option<TensorRef<'_>>| {
        let (mut a, mut a_lse) = (o.clone(), lse.clone());
        merge_state_in_place(&exec, (a.view_mut(), a_lse.view_mut()), (o.view(), lse.view()), mask)
    };
    in_place(None).unwrap();
    let (short, ints) = (zeros(DType::Bool, &[2]), zeros(DType::I32, &[3]));
    refused(in_place(Some(short.view())), &["merge_state_in_place", "`mask`", "tokens=2", "tokens=3"]);
    refused(in_place(Some(ints.view())), &["merge_state_in_place", "`mask`", "i32", "bool"]);

    let states = |o: &Tensor, lse: TensorRef<'_>| {
        let (mut out, mut out_lse) = (f32s(&[3, 4, 8]), f32s(&[3, 4]));
        merge_states(&exec, (o.view(), lse), (out.view_mut(), out_lse.view_mut()))
    };
    states(&f32s(&[3, 5, 4, 8]), f32s(&[3, 5, 4]).view()).unwrap();
    refused(states(&o, lse.view()), &["merge_states", "`o`", "3 axes", "4 ["]);
    refused(states(&f32s(&[3, 5, 4, 8]), f32s(&[3, 6, 4]).view()), &["merge_states", "`lse`", "states=6", "states=5"]);
    // No head, states without end; then 2^50 states that are one.
    let (none, none_lse) = (f32s(&[3, 1 << 50, 0, 8]), f32s(&[3, 1 << 50, 0]));
    let (mut out, mut out_lse) = (f32s(&[3, 0, 8]), f32s(&[3, 0]));
    let into = (out.view_mut(), out_lse.view_mut());
    merge_states(&exec, (none.view(), none_lse.view()), into).unwrap();
    let (o, claim) = (f32s(&[1, 1 << 50, 1, 0]), [0f32]);
    let claim = TensorRef::strided(&claim, &[1, 1 << 50, 1], &[0, 0, 0]).unwrap();
    let (mut out, mut out_lse) = (f32s(&[1, 1, 0]), f32s(&[1, 1]));
    let into = (out.view_mut(), out_lse.view_mut());
    refused(merge_states(&exec, (o.view(), claim), into), &["merge_states", "`lse`", "1125899906842624", "2^24"]);
}

#[test]
fn memory_that_is_not_there_is_refused() {
    let result = Tensor::zeros(DType::F32, &[1 << 58]);
    refused(result, &["Tensor::zeros", "`shape`", "288230376151711744", "memory"]);
    assert!(matches!(Tensor::zeros(DType::F32, &[usize::MAX / 4]), Err(Error::Layout { .. })));
}
