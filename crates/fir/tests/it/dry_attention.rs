//! The dry lane of attention: one launch per layer, whatever the batch, and what it is given.

use std::fmt::Write as _;

use fir::attention::{
    BatchArgs, BatchPlan, BlockMask, CascadeArgs, CascadeLevel, CascadePlan, DecodeArgs, DecodePlan, MlaArgs, MlaPlan,
    MlaProblem, Problem, SparseArgs, SparsePlan, Split,
};
use fir::exec::{Arch, Gpu, Launch};
use fir::kv::{Kv, KvLayout, PageTable, PagedKv, PagedMla, Ragged, RaggedKv};
use fir::variant::{self, Params};
use fir::{DType, Exec, Result, Tensor, jit};

/// The launches of `work` on an H200 that is not there.
fn record(work: impl FnOnce(&Exec) -> Result<()>) -> Vec<Launch> {
    let gpu = Gpu::dry(Arch::HOPPER);
    work(&Exec::Cuda(gpu.clone())).unwrap();
    gpu.launches()
}

/// The same as text, each of a kernel that the JIT lane compiles.
fn launches(work: impl FnOnce(&Exec) -> Result<()>) -> String {
    let (mut text, kernels) = (String::new(), jit::kernels());
    for launch in record(work) {
        assert!(kernels.iter().any(|k| k.name() == launch.kernel), "{} is not in jit::kernels()", launch.kernel);
        writeln!(text, "{launch}").unwrap();
    }
    text
}

fn zeros(dtype: DType, shape: &[usize]) -> Tensor {
    Tensor::zeros(dtype, shape).unwrap()
}

/// Requests of 700, 5, 0 and 300 tokens in pages of 16.
fn table() -> PageTable<'static> {
    let indptr = vec![0, 44, 45, 45, 64];
    PageTable::with_lens(16, 64, indptr, (0..64).rev().collect::<Vec<i32>>(), &[700, 5, 0, 300]).unwrap()
}

#[test]
fn a_decode_step_is_one_launch() {
    let (table, q) = (table(), zeros(DType::BF16, &[4, 32, 128]));
    let mut text = String::new();
    for kv in [DType::BF16, DType::E4M3] {
        let pool = zeros(kv, &[64, 2, 16, 8, 128]);
        let problem = Problem { kv_dtype: kv, ..Problem::new(32, 8, 128, DType::BF16, variant::standard()) };
        let (mut out, mut lse) = (zeros(DType::BF16, &[4, 32, 128]), zeros(DType::F32, &[4, 32]));
        text += &launches(|exec| {
            let mut plan = DecodePlan::with_capacity(exec, problem, 8, Split::Balanced)?;
            plan.refill(&[9; 8])?;
            plan.refill(table.lens())?;
            let scratch = &mut plan.scratch();
            // Two layers: nothing but addresses may differ.
            for _ in 0..2 {
                let kv = Kv::Paged(PagedKv::interleaved(pool.view(), KvLayout::Nhd)?.with_scales(0.5, 2.0)?, &table);
                let (params, out, lse) = (&Params::new(), out.view_mut(), Some(lse.view_mut()));
                plan.run(exec, DecodeArgs { q: q.view(), kv, params, sm_scale: None, scratch, out, lse })?;
            }
            Ok(())
        });
    }
    insta::assert_snapshot!(text);
}

#[test]
fn long_requests_are_a_launch_of_their_own() {
    let (table, d) = (table(), DType::BF16);
    let mut text = String::new();
    for lens in [[70, 5, 0, 9], [70, 1, 0, 1], [1, 1, 0, 1]] {
        let qo = Ragged::from_lens(&lens).unwrap();
        let pool = zeros(d, &[64, 2, 16, 2, 128]);
        let (q, mut out) = (zeros(d, &[qo.rows(), 8, 128]), zeros(d, &[qo.rows(), 8, 128]));
        writeln!(text, "# queries of {lens:?} tokens").unwrap();
        text += &launches(|exec| {
            let problem = Problem::new(8, 2, 128, d, variant::causal());
            let plan = BatchPlan::new(exec, problem, &qo, table.lens(), Split::Balanced)?;
            let kv = Kv::Paged(PagedKv::interleaved(pool.view(), KvLayout::Nhd)?, &table);
            let (q, scratch, out) = (q.view(), &mut plan.scratch(), out.view_mut());
            plan.run(exec, BatchArgs { q, kv, params: &Params::new(), sm_scale: None, scratch, out, lse: None })
        });
    }
    insta::assert_snapshot!(text);
}

/// Boxes of the copy engine lie in one page; where none of 8 rows does, rows come one by one. Both are compiled beforehand.
#[test]
fn pages_too_small_for_a_box_are_gathered() {
    let (d, lens) = (DType::BF16, [100u32, 37]);
    let (qo, kv_lens) = (Ragged::from_lens(&lens).unwrap(), Ragged::from_lens(&lens).unwrap());
    let problem = || Problem::new(8, 2, 128, d, variant::standard());
    let (q, mut out) = (zeros(d, &[137, 8, 128]), zeros(d, &[137, 8, 128]));
    let mut run = |kv: Kv<'_>| {
        let text = launches(|exec| {
            let plan = BatchPlan::new(exec, problem(), &qo, kv_lens.lens(), Split::Balanced)?;
            let (q, scratch, out) = (q.view(), &mut plan.scratch(), out.view_mut());
            plan.run(exec, BatchArgs { q, kv, params: &Params::new(), sm_scale: None, scratch, out, lse: None })
        });
        let rows = text.split("box_rows ").nth(1).and_then(|t| t.split(',').next()).unwrap().to_owned();
        (text.lines().next().unwrap().ends_with("true>>"), rows)
    };
    for (size, gathered, rows) in
        [(16, false, "16"), (24, false, "8"), (256, false, "64"), (12, true, "8"), (1, true, "8")]
    {
        let pages: Vec<usize> = lens.iter().map(|&l| (l as usize).div_ceil(size)).collect();
        let indptr = vec![0, pages[0] as i32, (pages[0] + pages[1]) as i32];
        let all = pages[0] + pages[1];
        let table = PageTable::with_lens(size, all, indptr, (0..all as i32).collect::<Vec<_>>(), &[100, 37]).unwrap();
        let pool = zeros(d, &[all, 2, size, 2, 128]);
        let kv = Kv::Paged(PagedKv::interleaved(pool.view(), KvLayout::Nhd).unwrap(), &table);
        assert_eq!(run(kv), (gathered, rows.to_owned()), "pages of {size}");
    }
    let rows = zeros(d, &[137, 2, 128]);
    let kv = Kv::Ragged(RaggedKv::new(rows.view(), rows.view(), &kv_lens).unwrap());
    assert_eq!(run(kv), (false, "64".to_owned()));
}

/// e4m3 queries, keys and values: wgmma where rows lie in boxes and the output is bf16, else as with 16-bit queries.
#[test]
fn queries_of_e4m3_are_multiplied_as_they_are() {
    let (d, lens) = (DType::E4M3, [100u32, 37]);
    let qo = Ragged::from_lens(&lens).unwrap();
    let q = zeros(d, &[137, 8, 128]);
    let run = |size: usize, out_dtype| {
        let pages: Vec<i32> = lens.iter().map(|&l| (l as usize).div_ceil(size) as i32).collect();
        let (indptr, all) = (vec![0, pages[0], pages[0] + pages[1]], (pages[0] + pages[1]) as usize);
        let table = PageTable::with_lens(size, all, indptr, (0..all as i32).collect::<Vec<_>>(), &[100, 37]).unwrap();
        let (pool, mut out) = (zeros(d, &[all, 2, size, 2, 128]), zeros(out_dtype, &[137, 8, 128]));
        let taken = record(|exec| {
            let problem = Problem { out_dtype, ..Problem::new(8, 2, 128, d, variant::standard()) };
            let plan = BatchPlan::new(exec, problem, &qo, &lens, Split::Balanced)?;
            let kv = Kv::Paged(PagedKv::interleaved(pool.view(), KvLayout::Nhd)?, &table);
            let (q, scratch, out) = (q.view(), &mut plan.scratch(), out.view_mut());
            plan.run(exec, BatchArgs { q, kv, params: &Params::new(), sm_scale: None, scratch, out, lse: None })
        });
        let [launch] = &taken[..] else { panic!("{} launches", taken.len()) };
        let name = launch.kernel.split('<').next().unwrap().to_owned();
        (name, launch.to_string().contains("block [512, 1, 1]"))
    };
    let wgmma = ("fir::prefill_sm90".to_owned(), true);
    assert_eq!([run(16, DType::BF16), run(64, DType::BF16)], [wgmma.clone(), wgmma]);
    assert_eq!([run(1, DType::BF16), run(16, DType::F16)], [(); 2].map(|()| ("fir::prefill".to_owned(), false)));
}

#[test]
fn rows_that_are_not_aligned_and_f32_go_through_the_plain_kernel() {
    let (qo, kv_lens) = (Ragged::from_lens(&[3, 1]).unwrap(), Ragged::from_lens(&[40, 9]).unwrap());
    let mut text = String::new();
    for (dtype, pad) in [(DType::F32, 0), (DType::BF16, 8), (DType::BF16, 1)] {
        let wide = zeros(dtype, &[49, 2, 128 + pad]);
        let (q, mut out) = (zeros(dtype, &[4, 4, 128]), zeros(dtype, &[4, 4, 128]));
        let slopes = [0.5, 0.25, 0.125, 1.0];
        let (variant, params) = (variant::alibi(), Params::new().f32_tensor("alibi_slopes", &slopes));
        let taken = record(|exec| {
            let problem = Problem::new(4, 2, 128, dtype, variant);
            let plan = BatchPlan::new(exec, problem, &qo, kv_lens.lens(), Split::Fixed(64))?;
            let rows = wide.view().slice(2, 0..128)?;
            let kv = Kv::Ragged(RaggedKv::new(rows, rows, &kv_lens)?);
            let (q, scratch, out) = (q.view(), &mut plan.scratch(), out.view_mut());
            plan.run(exec, BatchArgs { q, kv, params: &params, sm_scale: None, scratch, out, lse: None })
        });
        for launch in taken {
            writeln!(text, "# {dtype}, rows of {}\n{launch}", 128 + pad).unwrap();
        }
    }
    insta::assert_snapshot!(text);
}

#[test]
fn a_cascade_is_a_launch_per_level_and_one_to_merge() {
    let (table, prefix) = (table(), PageTable::with_lens(16, 64, vec![0, 2], vec![7, 8], &[32]).unwrap());
    let (all, each) = (Ragged::from_lens(&[4]).unwrap(), Ragged::ones(4).unwrap());
    let (q, pool, mut out) =
        (zeros(DType::BF16, &[4, 8, 128]), zeros(DType::BF16, &[64, 16, 2, 128]), zeros(DType::BF16, &[4, 8, 128]));
    let text = launches(|exec| {
        let levels = [CascadeLevel { qo: &all, kv_lens: &[32] }, CascadeLevel { qo: &each, kv_lens: table.lens() }];
        let problem = Problem::new(8, 2, 128, DType::BF16, variant::causal());
        let plan = CascadePlan::new(exec, problem, &levels, Split::Balanced)?;
        let pool = PagedKv::new(pool.view(), pool.view(), KvLayout::Nhd)?;
        let kv = &[Kv::Paged(pool, &prefix), Kv::Paged(pool, &table)];
        let (scratch, out, params) = (&mut plan.scratch()[..], out.view_mut(), &Params::new());
        plan.run(exec, CascadeArgs { q: q.view(), kv, params, sm_scale: None, scratch, out, lse: None })
    });
    insta::assert_snapshot!(text);
}

/// Row blocks of up to 16 rows share a launch of their own where they have columns in common and fill the device.
#[test]
fn small_row_blocks_that_share_columns_are_one_launch() {
    let (d, rows, cols, blocks) = (DType::BF16, 355, 96, 23);
    let kernel = |heads: usize, mask: BlockMask<'_>, split: Split, dim: usize| {
        let (q, kv, mut out) =
            (zeros(d, &[rows, heads, dim]), zeros(d, &[cols, heads, dim]), zeros(d, &[rows, heads, dim]));
        let text = launches(|exec| {
            let problem = Problem::new(heads, heads, dim, d, variant::standard());
            let plan = SparsePlan::new(exec, problem, mask, split)?;
            let (q, k, v, scratch, out) = (q.view(), kv.view(), kv.view(), &mut plan.scratch(), out.view_mut());
            let params = &Params::new();
            plan.run(exec, SparseArgs { q, k, v, params, sm_scale: None, scratch, out, lse: None })
        });
        assert_eq!(text.matches("SparsePlan::run:").count() + text.matches("BatchPlan::run:").count(), 1, "{text}");
        text
    };
    let all: Vec<i32> = (0..blocks).flat_map(|_| 0..6).collect();
    let indptr: Vec<i32> = (0..=blocks).map(|r| 6 * r).collect();
    let mask = BlockMask { indptr: &indptr, indices: &all, rows, cols, block_rows: 16, block_cols: 16 };
    let text = kernel(70, mask, Split::Balanced, 128);
    assert!(text.contains("fir::sparse_sm90<fir::SparseConfig<fir::Bf16, 128, 11, 8, 3>>"), "{text}");
    let numbers = "tokens 355, block_tokens 16, group 1, heads 70, units 3";
    assert!(text.contains(numbers) && text.contains("grid [132, 1, 1], block [384, 1, 1], smem 196656"), "{text}");
    // Too few to fill the device; bits that may not depend on neighbours.
    assert!(kernel(8, mask, Split::Balanced, 128).contains("fir::decode<"));
    assert!(kernel(70, mask, Split::Fixed(64), 128).contains("fir::decode<"));
}

/// A latent decode of 128 heads in bf16 with pages of so many rows, as launches.
fn latent(page: usize, kpe_scale: f32) -> String {
    let (lens, mut indptr) = ([700i32, 5, 0, 300], vec![0i32]);
    indptr.extend(lens.iter().scan(0, |end, &len| {
        *end += (len as usize).div_ceil(page) as i32;
        Some(*end)
    }));
    let pages = indptr[4] as usize;
    let table = PageTable::with_lens(page, pages, indptr, (0..pages as i32).rev().collect::<Vec<_>>(), &lens).unwrap();
    let qo = Ragged::ones(4).unwrap();
    let (heads, d) = (128, DType::BF16);
    let (ckv, kpe) = (zeros(d, &[pages, page, 512]), zeros(d, &[pages, page, 64]));
    let (q_nope, q_pe, mut out) = (zeros(d, &[4, heads, 512]), zeros(d, &[4, heads, 64]), zeros(d, &[4, heads, 512]));
    launches(|exec| {
        let (q_dtype, kv_dtype, out_dtype) = (d, d, d);
        let problem =
            MlaProblem { heads, head_dim_ckv: 512, head_dim_kpe: 64, q_dtype, kv_dtype, out_dtype, causal: true };
        let plan = MlaPlan::new(exec, problem, &qo, table.lens(), Split::Balanced)?;
        let kv = PagedMla::new(ckv.view(), kpe.view())?.with_scales(1.0, kpe_scale)?;
        let (scratch, q_nope, q_pe, out) = (&mut plan.scratch(), q_nope.view(), q_pe.view(), out.view_mut());
        plan.run(exec, MlaArgs { q_nope, q_pe, kv, table: &table, sm_scale: 0.1, scratch, out, lse: None })
    })
}

#[test]
fn latent_attention_is_a_launch_and_a_merge() {
    insta::assert_snapshot!(latent(16, 1.0));
}

#[test]
fn latent_attention_in_odd_pages_goes_through_the_plain_kernel() {
    for (page, scale) in [(15, 1.0), (17, 1.0), (16, 2.0)] {
        let text = latent(page, scale);
        assert!(text.starts_with("MlaPlan::run: fir::plain<") && text.matches("MlaPlan::run").count() == 1, "{text}");
    }
}

#[test]
fn a_refilled_latent_plan_stays_where_it_is() {
    let gpu = Gpu::dry(Arch::HOPPER);
    let (exec, bf16) = (Exec::Cuda(gpu.clone()), DType::BF16);
    for heads in [16, 128] {
        let problem = MlaProblem {
            heads,
            head_dim_ckv: 512,
            head_dim_kpe: 64,
            q_dtype: bf16,
            kv_dtype: bf16,
            out_dtype: bf16,
            causal: true,
        };
        let ones = Ragged::ones(3).unwrap();
        let mut plan = MlaPlan::with_capacity(&exec, problem, 3, Split::Balanced).unwrap();
        plan.refill(&ones, &[100, 5, 300]).unwrap();
        let scratch = plan.scratch();
        let recorded = plan.recorded(&scratch);
        assert!(recorded.is_some() && plan.tokens() == 3);
        // Cut into as many parts as there are workers, or not at all: the same memory and launches.
        for lens in [[1, 1, 1], [9000, 4, 70_000], [64, 64, 64]] {
            plan.refill(&ones, &lens).unwrap();
            assert_eq!(plan.recorded(&scratch), recorded, "{heads} {lens:?}");
        }
        let more = Ragged::ones(900).unwrap();
        plan.refill(&more, &[64; 900]).unwrap();
        // A dry run's lists are nowhere; there is room for them all the same.
        assert_eq!(plan.tokens(), 900);
    }
}

#[test]
fn plans_and_executors_of_two_kinds_refuse_each_other() {
    let (gpu, cpu) = (Exec::dry(Arch::HOPPER), Exec::cpu().unwrap());
    let problem = Problem::new(4, 2, 64, DType::F32, variant::standard());
    let (q, pool, mut out) =
        (zeros(DType::F32, &[1, 4, 64]), zeros(DType::F32, &[1, 16, 2, 64]), zeros(DType::F32, &[1, 4, 64]));
    let table = PageTable::with_lens(16, 1, vec![0, 1], vec![0], &[7]).unwrap();
    for (planned, run) in [(&gpu, &cpu), (&cpu, &gpu)] {
        let plan = DecodePlan::new(planned, problem.clone(), &[7], Split::Balanced).unwrap();
        let kv = Kv::Paged(PagedKv::new(pool.view(), pool.view(), KvLayout::Nhd).unwrap(), &table);
        let (params, scratch, out) = (&Params::new(), &mut plan.scratch(), out.view_mut());
        let error = plan.run(run, DecodeArgs { q: q.view(), kv, params, sm_scale: None, scratch, out, lse: None });
        let text = error.unwrap_err().to_string();
        assert!(text.starts_with("BatchPlan::run: `exec` is") && text.ends_with("as planned"), "{text}");
    }
}
