//! Cascade: requests that share a prefix read it once, and get the same result.

use fir::attention::{CascadeArgs, CascadeLevel, CascadePlan, DecodeArgs, DecodePlan, Problem, Split};
use fir::kv::{Kv, KvLayout, PageTable, PagedKv};
use fir::variant::{self, Params};
use fir::{DType, Exec, Ragged, Tensor};

fn main() -> fir::Result<()> {
    let exec = Exec::cpu()?;
    let (pages, page_size, qo_heads, kv_heads, dim) = (7, 4, 4, 2, 32);
    let wave = |step: f32, shape: &[usize]| {
        let data: Vec<f32> = (0..shape.iter().product::<usize>()).map(|i| (i as f32 * step).sin()).collect();
        Tensor::from_f32(DType::BF16, &data, shape)
    };
    let (k, v) = (wave(0.3, &[pages, page_size, kv_heads, dim])?, wave(0.7, &[pages, page_size, kv_heads, dim])?);
    let q = wave(1.1, &[3, qo_heads, dim])?;
    let cache = PagedKv::new(k.view(), v.view(), KvLayout::Nhd)?;
    let problem = Problem::new(qo_heads, kv_heads, dim, DType::BF16, variant::causal());
    let params = Params::new();

    // Three decodes. Pages 6 and 1 hold 8 tokens that all share; of their own they have 5, 1 and 4 tokens.
    // Flat: every request names the shared pages.
    let indices = [6, 1, 0, 3, 6, 1, 2, 6, 1, 5];
    let flat = PageTable::with_lens(page_size, pages, &[0, 4, 7, 10][..], &indices[..], &[13, 9, 12])?;
    let plan = DecodePlan::new(&exec, problem.clone(), flat.lens(), Split::Balanced)?;
    let (kv, scratch) = (Kv::Paged(cache, &flat), &mut plan.scratch());
    let mut want = Tensor::zeros(DType::BF16, q.shape())?;
    let (q, out) = (q.view(), want.view_mut());
    plan.run(&exec, DecodeArgs { q, kv, params: &params, sm_scale: None, scratch, out, lse: None })?;

    // Cascade: one group of all three query tokens over the shared pages, then each request alone.
    let shared = PageTable::with_lens(page_size, pages, &[0, 2][..], &[6, 1][..], &[8])?;
    let own = PageTable::with_lens(page_size, pages, &[0, 2, 3, 4][..], &[0, 3, 2, 5][..], &[5, 1, 4])?;
    let (everyone, each) = (Ragged::from_lens(&[3])?, Ragged::ones(3)?);
    let levels =
        [CascadeLevel { qo: &everyone, kv_lens: shared.lens() }, CascadeLevel { qo: &each, kv_lens: own.lens() }];
    let plan = CascadePlan::new(&exec, problem, &levels, Split::Balanced)?;
    let (kv, scratch) = ([Kv::Paged(cache, &shared), Kv::Paged(cache, &own)], &mut plan.scratch());
    let mut got = Tensor::zeros(DType::BF16, q.shape())?;
    let out = got.view_mut();
    plan.run(&exec, CascadeArgs { q, kv: &kv, params: &params, sm_scale: None, scratch, out, lse: None })?;

    let (got, want) = (got.view().to_f32_vec()?, want.view().to_f32_vec()?);
    let apart = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    println!("cascade and flat differ by {apart:.1e} at most");
    assert!(apart <= 1.0 / 128.0); // a bf16 below 2 is at most this far from its neighbour
    Ok(())
}
