//! Latent attention of the sizes that models have: many heads, whole pages, tails, and requests that are cut.

use fir::attention::{MlaArgs, MlaPlan, MlaProblem, Split};
use fir::kv::{PageTable, PagedMla, Ragged};
use fir::testing::Rng;
use fir::{DType, Tensor, reference, variant};

use super::case::{Expected, poisoned};
use crate::support::{cases_of, every_exec};

/// One batch: `heads`, page size, and (query tokens, KV tokens) of each request.
struct Batch {
    heads: usize,
    page: usize,
    lens: &'static [(u32, i32)],
    causal: bool,
    dtype: DType,
}

fn check(batch: &Batch, split: &[Split]) {
    const CKV: usize = 512;
    const KPE: usize = 64;
    let &Batch { heads, page, lens, causal, dtype } = batch;
    let mut rng = Rng::new(heads as u64 + page as u64);
    let q_lens: Vec<u32> = lens.iter().map(|l| l.0).collect();
    let kv_lens: Vec<i32> = lens.iter().map(|l| l.1).collect();
    let qo = Ragged::from_lens(&q_lens).unwrap();
    let mut indptr = vec![0];
    for &len in &kv_lens {
        indptr.push(indptr[indptr.len() - 1] + (len as usize).div_ceil(page) as i32);
    }
    let pages = indptr[indptr.len() - 1] as usize + 2;
    // In no order; two pages are nobody's.
    let indices: Vec<i32> = (0..pages as i32 - 2).rev().map(|i| i + 1).collect();
    let mut owned = vec![false; pages * page];
    for (r, &len) in kv_lens.iter().enumerate() {
        for j in 0..len as usize {
            owned[indices[indptr[r] as usize + j / page] as usize * page + j % page] = true;
        }
    }
    let mut pool = |dim: usize| {
        let mut x = rng.tensor(DType::F32, &[pages * page, dim]).view().to_f32_vec().unwrap();
        for (row, _) in x.chunks_exact_mut(dim).zip(&owned).filter(|(_, owned)| !**owned) {
            row.fill(f32::NAN);
        }
        Tensor::from_f32(dtype, &x, &[pages, page, dim]).unwrap()
    };
    let (ckv, kpe) = (pool(CKV), pool(KPE));
    let table = PageTable::with_lens(page, pages, indptr, &indices[..], &kv_lens).unwrap();
    let tokens = qo.rows();
    let (q_nope, q_pe) = (rng.tensor(dtype, &[tokens, heads, CKV]), rng.tensor(dtype, &[tokens, heads, KPE]));
    let kv = PagedMla::new(ckv.view(), kpe.view()).unwrap();
    let variant = if causal { variant::causal() } else { variant::standard() };
    let sm_scale = 0.06f32;
    let b = reference::attention::Mla {
        q_nope: q_nope.view(),
        q_pe: q_pe.view(),
        qo: &qo,
        kv,
        table: &table,
        variant: &variant,
        sm_scale: f64::from(sm_scale),
    };
    let expected = Expected::of(dtype, |p| reference::attention::mla(p, &b));
    let (q_dtype, kv_dtype, out_dtype) = (dtype, dtype, dtype);
    let problem = MlaProblem { heads, head_dim_ckv: CKV, head_dim_kpe: KPE, q_dtype, kv_dtype, out_dtype, causal };
    every_exec(|exec| {
        for &split in split {
            let plan = MlaPlan::new(exec, problem, &qo, table.lens(), split).unwrap();
            let mut out = poisoned(dtype, &[tokens, heads, CKV]);
            let mut lse = poisoned(DType::F32, &[tokens, heads]);
            let mut scratch = plan.scratch();
            // Twice: a run leaves nothing behind that the next would see.
            for _ in 0..2 {
                let (q_nope, q_pe, out, lse) = (q_nope.view(), q_pe.view(), out.view_mut(), Some(lse.view_mut()));
                let args = MlaArgs { q_nope, q_pe, kv, table: &table, sm_scale, scratch: &mut scratch, out, lse };
                plan.run(exec, args).unwrap();
            }
            let what = format!("{exec:?} {problem:?} pages of {page}, {lens:?}, {split:?}");
            expected.check(&what, out.view(), Some(lse.view()));
        }
    });
}

#[test]
fn latent_decodes_of_many_heads_match_reference() {
    let lens = &[(1, 64), (1, 0), (1, 1), (1, 300), (1, 129)][..];
    let all = [(20, 24), (128, 1), (128, 64), (64, 16), (96, 8), (160, 32), (128, 12)];
    for &(heads, page) in cases_of(&all, 2) {
        let batch = Batch { heads, page, lens, causal: false, dtype: DType::BF16 };
        check(&batch, &[Split::Balanced, Split::Fixed(64)]);
    }
    check(&Batch { heads: 128, page: 64, lens, causal: true, dtype: DType::F16 }, &[Split::Balanced, Split::Off]);
    // Long units have an order of their own on a GPU, and begin and end beside short ones.
    let lens = &[(1, 70), (1, 3_100), (1, 9)][..];
    for &heads in cases_of(&[4, 66], 1) {
        check(&Batch { heads, page: 16, lens, causal: false, dtype: DType::BF16 }, &[Split::Off]);
    }
}

#[test]
fn latent_attention_of_several_tokens_matches_reference() {
    let lens = &[(2, 130), (4, 64), (3, 2), (1, 70), (0, 5), (9, 9)][..];
    for (heads, page) in [(128, 64), (16, 16), (48, 128)] {
        let batch = Batch { heads, page, lens, causal: true, dtype: DType::BF16 };
        check(&batch, &[Split::Balanced, Split::Fixed(64)]);
    }
}
