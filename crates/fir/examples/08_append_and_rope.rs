//! A model's own order: rotate queries and keys, append keys and values to the cache, attend.

use fir::attention::{BatchArgs, BatchPlan, Problem, SingleArgs, Split, single_prefill};
use fir::kv::{Kv, KvLayout, PageTable, PagedKv, PagedKvMut};
use fir::page::{Slots, append_paged_kv, batch_indices_positions};
use fir::rope::{Positions, apply_rope_in_place};
use fir::variant::{self, Params, Rope};
use fir::{DType, Exec, Ragged, Tensor, TensorMut, TensorRef};

fn main() -> fir::Result<()> {
    let exec = Exec::cpu()?;
    let (pages, page_size, heads, dim, nnz) = (4, 4, 2, 32, 6);
    let shape = [nnz, heads, dim];
    let wave = |step: f32| {
        let data: Vec<f32> = (0..nnz * heads * dim).map(|i| (i as f32 * step).sin()).collect();
        Tensor::from_f32(DType::F32, &data, &shape)
    };
    let (mut q, mut k, v) = (wave(0.9)?, wave(0.4)?, wave(0.6)?);
    let (plain_q, plain_k) = (q.clone(), k.clone());

    // A prompt of 6 tokens, for which pages 3 and 0 were taken. Which request, and where in it, is each token?
    let (new, lens) = (Ragged::from_lens(&[nnz as u32])?, [nnz as i32]);
    let table = PageTable::with_lens(page_size, pages, &[0, 2][..], &[3, 0][..], &lens)?;
    let (mut requests, mut positions) = ([0i32; 6], [0i32; 6]);
    let (to_r, to_p) = (TensorMut::new(&mut requests, &[nnz])?, TensorMut::new(&mut positions, &[nnz])?);
    batch_indices_positions(&exec, &new, TensorRef::new(&lens, &[1])?, to_r, to_p)?;
    let (batch_indices, positions) = (TensorRef::new(&requests, &[nnz])?, TensorRef::new(&positions, &[nnz])?);

    // Rotate in place, and write to the pages.
    apply_rope_in_place(&exec, Positions::Ids(positions), Rope::default(), q.view_mut(), k.view_mut())?;
    let cache = || Tensor::zeros(DType::F32, &[pages, page_size, heads, dim]);
    let (mut k_cache, mut v_cache) = (cache()?, cache()?);
    let to = PagedKvMut::new(k_cache.view_mut(), v_cache.view_mut(), KvLayout::Nhd)?;
    append_paged_kv(&exec, k.view(), v.view(), Slots::Tokens { table: &table, batch_indices, positions }, to)?;

    // Attend over the cache.
    let problem = Problem::new(heads, heads, dim, DType::F32, variant::causal());
    let plan = BatchPlan::new(&exec, problem, &new, table.lens(), Split::Balanced)?;
    let kv = Kv::Paged(PagedKv::new(k_cache.view(), v_cache.view(), KvLayout::Nhd)?, &table);
    let (params, mut got) = (&Params::new(), Tensor::zeros(DType::F32, &shape)?);
    let (scratch, out) = (&mut plan.scratch(), got.view_mut());
    plan.run(&exec, BatchArgs { q: q.view(), kv, params, sm_scale: None, scratch, out, lse: None })?;

    // The same in one call on what was not rotated: a variant rotates on the fly.
    let variant = &variant::causal().and(variant::rope_llama(1e4, 1.0, false)?)?;
    let mut want = Tensor::zeros(DType::F32, &shape)?;
    let (q, k, v, out, layout) = (plain_q.view(), plain_k.view(), v.view(), want.view_mut(), KvLayout::Nhd);
    single_prefill(&exec, SingleArgs { q, k, v, layout, variant, params, sm_scale: None, out, lse: None })?;
    let pairs = got.as_slice::<f32>()?.iter().zip(want.as_slice::<f32>()?);
    let apart = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    println!("rotated before and on the fly: {apart:.1e} apart");
    assert!(apart < 1e-5);
    Ok(())
}
