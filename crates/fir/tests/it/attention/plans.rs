//! Latent, sparse and single attention, and merges.

use fir::attention::{
    BatchArgs, BatchPlan, BlockMask, DecodeArgs, DecodePlan, MlaArgs, MlaPlan, MlaProblem, Problem, SingleArgs,
    SparseArgs, SparsePlan, Split, VariableSparsePlan, merge_state, merge_state_in_place, merge_states, single_decode,
    single_prefill,
};
use fir::kv::{Kv, KvLayout, PageTable, PagedKv, PagedMla, Ragged, RaggedKv};
use fir::tensor::{Bool, Float};
use fir::testing::Rng;
use fir::variant::{self, Params};
use fir::{DType, Exec, Tensor, reference};
use proptest::prelude::*;

use super::case::{Expected, poisoned};
use crate::support::{FLOATS, assert_matches, every_exec};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn merge_is_associative(seed in 0u64..999, empty in 0usize..4) {
        let (exec, mut rng) = (Exec::cpu().unwrap(), Rng::new(seed));
        let states: Vec<(Tensor, Tensor)> = (0..3).map(|i| {
            // `empty` of 3 means none of them is.
            let lse: Vec<f32> = rng.normals(6).iter().map(|x| if i == empty { f32::NEG_INFINITY } else { 4.0 * x }).collect();
            (rng.tensor(DType::F32, &[2, 3, 16]), Tensor::from_slice(&lse, &[2, 3]).unwrap())
        }).collect();
        let merge = |a: &(Tensor, Tensor), b: &(Tensor, Tensor)| {
            let mut out = (poisoned(DType::F32, &[2, 3, 16]), poisoned(DType::F32, &[2, 3]));
            merge_state(&exec, (a.0.view(), a.1.view()), (b.0.view(), b.1.view()), (out.0.view_mut(), out.1.view_mut())).unwrap();
            out
        };
        let left = merge(&merge(&states[0], &states[1]), &states[2]);
        let right = merge(&states[0], &merge(&states[1], &states[2]));
        for (l, r) in [(&left.0, &right.0), (&left.1, &right.1)] {
            for (x, y) in l.as_slice::<f32>().unwrap().iter().zip(r.as_slice::<f32>().unwrap()) {
                // Each side rounds a handful of times at values of up to 6 and log-sum-exps of up to 24.
                prop_assert!(x == y || (x - y).abs() <= 4e-6 * y.abs().max(1.0), "{x} {y}");
            }
        }
    }

    #[test]
    fn any_split_of_the_kv_merges_to_the_whole(kv_len in 1usize..300, cut in 0usize..300, seed in 0u64..99) {
        let cut = cut.min(kv_len);
        let (exec, mut rng) = (Exec::cpu().unwrap(), Rng::new(seed));
        let q = rng.tensor(DType::F32, &[2, 4, 16]);
        let (k, v) = (rng.tensor(DType::F32, &[kv_len, 2, 16]), rng.tensor(DType::F32, &[kv_len, 2, 16]));
        let part = |range: std::ops::Range<usize>| {
            let mut state = (poisoned(DType::F32, &[2, 4, 16]), poisoned(DType::F32, &[2, 4]));
            single_prefill(&exec, SingleArgs {
                q: q.view(),
                k: k.view().slice(0, range.clone()).unwrap(),
                v: v.view().slice(0, range).unwrap(),
                layout: KvLayout::Nhd,
                variant: &variant::standard(),
                params: &Params::new(),
                sm_scale: None,
                out: state.0.view_mut(),
                lse: Some(state.1.view_mut()),
            }).unwrap();
            state
        };
        let (a, b, whole) = (part(0..cut), part(cut..kv_len), part(0..kv_len));
        let mut merged = (poisoned(DType::F32, &[2, 4, 16]), poisoned(DType::F32, &[2, 4]));
        let view = |s: &(Tensor, Tensor)| -> Vec<f32> {
            [s.0.as_slice::<f32>().unwrap(), s.1.as_slice::<f32>().unwrap()].concat()
        };
        merge_state(&exec, (a.0.view(), a.1.view()), (b.0.view(), b.1.view()), (merged.0.view_mut(), merged.1.view_mut())).unwrap();
        for (x, y) in view(&merged).iter().zip(view(&whole)) {
            prop_assert!((x - y).abs() <= 4e-6 * y.abs().max(1.0), "{x} {y}");
        }
        // Order-free, and the in-place form is the same merge.
        let forward = view(&merged);
        merge_state(&exec, (b.0.view(), b.1.view()), (a.0.view(), a.1.view()), (merged.0.view_mut(), merged.1.view_mut())).unwrap();
        for (x, y) in view(&merged).iter().zip(&forward) {
            prop_assert!((x - y).abs() <= 1e-6 * y.abs().max(1.0), "{x} {y}");
        }
        let mut in_place = (a.0.clone(), a.1.clone());
        merge_state_in_place(&exec, (in_place.0.view_mut(), in_place.1.view_mut()), (b.0.view(), b.1.view()), None).unwrap();
        prop_assert_eq!(view(&in_place), forward);
    }
}

#[test]
fn merges_match_reference_with_empty_and_masked_states() {
    every_exec(|exec| {
        let mut rng = Rng::new(4);
        for dtype in FLOATS {
            for (states, dim) in [(0, 5), (1, 8), (2, 17), (3, 64), (5, 1)] {
                let (tokens, heads) = (7, 3);
                let o = rng.tensor(dtype, &[tokens, states, heads, dim]);
                let mut lse: Vec<f32> = rng.normals(tokens * states * heads).iter().map(|x| 5.0 * x).collect();
                for (i, l) in lse.iter_mut().enumerate() {
                    // Token 2 has nothing at all; every fifth state elsewhere is empty.
                    if i % 5 == 0 || i / (states * heads).max(1) == 2 {
                        *l = f32::NEG_INFINITY;
                    }
                }
                let lse = Tensor::from_slice(&lse, &[tokens, states, heads]).unwrap();
                let (mut out, mut lse_out) =
                    (poisoned(dtype, &[tokens, heads, dim]), poisoned(DType::F32, &[tokens, heads]));
                merge_states(exec, (o.view(), lse.view()), (out.view_mut(), lse_out.view_mut())).unwrap();
                // The reference takes rows of states: [tokens, heads, states].
                let o64 = reference::values(o.view().transpose(1, 2).unwrap()).unwrap();
                let lse64 = reference::values(lse.view().transpose(1, 2).unwrap()).unwrap();
                if states == 0 {
                    assert!(out.view().to_f32_vec().unwrap().iter().all(|&x| x == 0.0));
                    assert!(lse_out.as_slice::<f32>().unwrap().iter().all(|&x| x == f32::NEG_INFINITY));
                    continue;
                }
                let what = format!("{exec:?} {dtype} {states} {dim}");
                assert_matches(&what, out.view(), dim, |p| {
                    Ok(reference::attention::merge_states(p, &o64, &lse64, states, dim).0)
                });
                assert_matches(&what, lse_out.view(), 1, |p| {
                    Ok(reference::attention::merge_states(p, &o64, &lse64, states, dim).1)
                });
            }
        }
    });
}

#[test]
fn in_place_merge_leaves_masked_tokens_alone() {
    every_exec(|exec| {
        let mut rng = Rng::new(8);
        let (mut o, other) = (rng.tensor(DType::BF16, &[4, 2, 8]), rng.tensor(DType::BF16, &[4, 2, 8]));
        let (mut lse, other_lse) = (rng.tensor(DType::F32, &[4, 2]), rng.tensor(DType::F32, &[4, 2]));
        let mask = Tensor::from_slice(&[Bool(1), Bool(0), Bool(1), Bool(0)], &[4]).unwrap();
        let before = (o.clone(), lse.clone());
        merge_state_in_place(exec, (o.view_mut(), lse.view_mut()), (other.view(), other_lse.view()), Some(mask.view()))
            .unwrap();
        for token in 0..4 {
            let same = |a: &Tensor, b: &Tensor| {
                a.view().select(0, token).unwrap().to_f32_vec() == b.view().select(0, token).unwrap().to_f32_vec()
            };
            assert_eq!(same(&o, &before.0) && same(&lse, &before.1), token % 2 == 1, "{token}");
        }
    });
}

#[test]
fn latent_attention_matches_reference() {
    for (q_dtype, kv_dtype, out_dtype) in [
        (DType::F32, DType::F32, DType::F32),
        (DType::BF16, DType::BF16, DType::BF16),
        (DType::F16, DType::F16, DType::F16),
        (DType::BF16, DType::E4M3, DType::BF16),
        (DType::E4M3, DType::E5M2, DType::F32),
    ] {
        for (heads, ckv, kpe) in [(16, 512, 64), (3, 40, 8), (128, 24, 0), (16, 64, 0), (1, 512, 64)] {
            for (causal, scales) in [(false, (0.5, 2.0)), (true, (0.5, 2.0)), (true, (1.0, 1.0))] {
                let mut rng = Rng::new(2);
                let (q_lens, kv_lens) = ([1u32, 3, 1, 0, 1], [70i32, 9, 0, 5, 200]);
                let qo = Ragged::from_lens(&q_lens).unwrap();
                let page = 16;
                let pages: Vec<i32> = (0..40).rev().collect();
                let indptr = vec![0, 5, 6, 6, 7, 20];
                let table = PageTable::with_lens(page, 40, indptr, &pages[..], &kv_lens).unwrap();
                let problem =
                    MlaProblem { heads, head_dim_ckv: ckv, head_dim_kpe: kpe, q_dtype, kv_dtype, out_dtype, causal };
                let q_nope = rng.tensor(q_dtype, &[6, heads, ckv]);
                let q_pe = rng.tensor(q_dtype, &[6, heads, kpe]);
                let (c, p) = (rng.tensor(kv_dtype, &[40, page, ckv]), rng.tensor(kv_dtype, &[40, page, kpe]));
                let kv = PagedMla::new(c.view(), p.view()).unwrap().with_scales(scales.0, scales.1).unwrap();
                let sm_scale = 0.07f32;
                let variant = if causal { variant::causal() } else { variant::standard() };
                let b = reference::attention::Mla {
                    q_nope: q_nope.view(),
                    q_pe: q_pe.view(),
                    qo: &qo,
                    kv,
                    table: &table,
                    variant: &variant,
                    sm_scale: f64::from(sm_scale),
                };
                let expected = Expected::of(out_dtype, |p| reference::attention::mla(p, &b));
                every_exec(|exec| {
                    for split in [Split::Balanced, Split::Fixed(128)] {
                        let plan = MlaPlan::new(exec, problem, &qo, table.lens(), split).unwrap();
                        let mut out = poisoned(out_dtype, &[6, heads, ckv]);
                        let mut lse = poisoned(DType::F32, &[6, heads]);
                        plan.run(
                            exec,
                            MlaArgs {
                                q_nope: q_nope.view(),
                                q_pe: q_pe.view(),
                                kv,
                                table: &table,
                                sm_scale,
                                scratch: &mut plan.scratch(),
                                out: out.view_mut(),
                                lse: Some(lse.view_mut()),
                            },
                        )
                        .unwrap();
                        expected.check(&format!("{exec:?} {problem:?} {split:?}"), out.view(), Some(lse.view()));
                    }
                });
            }
        }
    }
}

/// Attention of dense `q`, `k`, `v` under a boolean mask `[heads, rows, cols]`, by one reference request per row.
fn masked_reference(q: &Tensor, k: &Tensor, v: &Tensor, sees: impl Fn(usize, usize, usize) -> bool) -> Expected {
    let (rows, heads, dim) = (q.shape()[0], q.shape()[1], q.shape()[2]);
    let (cols, kv_heads) = (k.shape()[0], k.shape()[1]);
    let of = |p| {
        let (mut o, mut lse) = (vec![], vec![]);
        for i in 0..rows {
            for h in 0..heads {
                let kh = h / (heads / kv_heads);
                let indices: Vec<i32> = (0..cols).filter(|&j| sees(kh, i, j)).map(|j| j as i32).collect();
                let table = PageTable::new(1, cols, vec![0, indices.len() as i32], indices, &[1]).unwrap();
                let head = |t: &'_ Tensor| -> Tensor {
                    let d = t.shape()[2];
                    let all = t.view().slice(1, kh..kh + 1).unwrap().to_f32_vec().unwrap();
                    Tensor::from_f32(t.dtype(), &all, &[cols, 1, 1, d]).unwrap()
                };
                let (k, v) = (head(k), head(v));
                let b = reference::attention::Batch {
                    q: q.view().slice(0, i..i + 1).unwrap().slice(1, h..h + 1).unwrap(),
                    qo: &Ragged::ones(1).unwrap(),
                    kv: Kv::Paged(PagedKv::new(k.view(), v.view(), KvLayout::Nhd).unwrap(), &table),
                    variant: &variant::standard(),
                    params: &Params::new(),
                    sm_scale: f64::from(1.0 / (dim as f32).sqrt()),
                };
                let (row_o, row_lse) = reference::attention::batch(p, &b)?;
                o.extend(row_o);
                lse.extend(row_lse);
            }
        }
        Ok((o, lse))
    };
    Expected::of(q.dtype(), of)
}

#[test]
fn block_and_vector_sparse_match_a_masked_reference() {
    for (block_rows, block_cols) in [(1, 1), (3, 4), (4, 1), (16, 16), (5, 7)] {
        let mut rng = Rng::new(6);
        let (rows, cols, heads, kv_heads, dim) = (13, 100, 4, 2, 20);
        let (q, k, v) = (
            rng.tensor(DType::F32, &[rows, heads, dim]),
            rng.tensor(DType::F32, &[cols, kv_heads, dim]),
            rng.tensor(DType::F32, &[cols, kv_heads, dim]),
        );
        let (mut indptr, mut indices) = (vec![0i32], vec![]);
        for r in 0..rows.div_ceil(block_rows) {
            // Row block 1 sees nothing.
            indices.extend((0..(cols / block_cols) as i32).filter(|_| r != 1 && rng.below(3) > 0));
            indptr.push(indices.len() as i32);
        }
        let sees = |_: usize, i: usize, j: usize| {
            let r = i / block_rows;
            indices[indptr[r] as usize..indptr[r + 1] as usize].contains(&((j / block_cols) as i32))
        };
        let expected = masked_reference(&q, &k, &v, sees);
        every_exec(|exec| {
            let problem = Problem::new(heads, kv_heads, dim, DType::F32, variant::standard());
            let mask = BlockMask { indptr: &indptr, indices: &indices, rows, cols, block_rows, block_cols };
            let plan = SparsePlan::new(exec, problem, mask, Split::Balanced).unwrap();
            let (mut out, mut lse) = (poisoned(DType::F32, &[rows, heads, dim]), poisoned(DType::F32, &[rows, heads]));
            plan.run(
                exec,
                SparseArgs {
                    q: q.view(),
                    k: k.view(),
                    v: v.view(),
                    params: &Params::new(),
                    sm_scale: None,
                    scratch: &mut plan.scratch(),
                    out: out.view_mut(),
                    lse: Some(lse.view_mut()),
                },
            )
            .unwrap();
            expected.check(&format!("{exec:?} {block_rows}x{block_cols}"), out.view(), Some(lse.view()));
        });
    }
}

/// Small row blocks of a mask that fills a GPU share what they read there: blocks that nobody sees, that all see, and a row block
/// that sees none.
#[test]
fn small_row_blocks_of_many_heads_match_a_masked_reference() {
    for (dtype, dim, heads, group, block_rows, block_cols) in
        [(DType::BF16, 64, 70, 1, 16, 16), (DType::F16, 128, 66, 2, 6, 32), (DType::BF16, 128, 66, 1, 7, 16)]
    {
        let mut rng = Rng::new(9);
        let (blocks, cols, kv_heads) = (23, 96, heads / group);
        let rows = (blocks - 1) * block_rows + 3;
        let [q, k, v] =
            [(rows, heads), (cols, kv_heads), (cols, kv_heads)].map(|(n, h)| rng.tensor(dtype, &[n, h, dim]));
        let (mut indptr, mut indices) = (vec![0i32], vec![]);
        for r in 0..blocks {
            indices
                .extend((0..(cols / block_cols) as i32).filter(|&c| r != 5 && c != 1 && (c == 2 || rng.below(2) > 0)));
            indptr.push(indices.len() as i32);
        }
        // The same as requests of a row block each, whose pages are column blocks.
        let ends = vec![block_cols as i32; blocks];
        let table = PageTable::new(block_cols, cols / block_cols, indptr.clone(), indices.clone(), &ends).unwrap();
        let lens: Vec<u32> = (0..blocks).map(|r| block_rows.min(rows - r * block_rows) as u32).collect();
        let pages = |t: &'_ Tensor| t.clone().reshaped(&[cols / block_cols, block_cols, kv_heads, dim]).unwrap();
        let pool = [pages(&k), pages(&v)];
        let b = reference::attention::Batch {
            q: q.view(),
            qo: &Ragged::from_lens(&lens).unwrap(),
            kv: Kv::Paged(PagedKv::new(pool[0].view(), pool[1].view(), KvLayout::Nhd).unwrap(), &table),
            variant: &variant::standard(),
            params: &Params::new(),
            sm_scale: f64::from(1.0 / (dim as f32).sqrt()),
        };
        let expected = Expected::of(dtype, |p| reference::attention::batch(p, &b));
        every_exec(|exec| {
            let problem = Problem::new(heads, kv_heads, dim, dtype, variant::standard());
            let mask = BlockMask { indptr: &indptr, indices: &indices, rows, cols, block_rows, block_cols };
            let plan = SparsePlan::new(exec, problem, mask, Split::Balanced).unwrap();
            let (mut out, mut lse) = (poisoned(dtype, &[rows, heads, dim]), poisoned(DType::F32, &[rows, heads]));
            let (q, k, v, params) = (q.view(), k.view(), v.view(), &Params::new());
            let (scratch, to, sums) = (&mut plan.scratch(), out.view_mut(), Some(lse.view_mut()));
            plan.run(exec, SparseArgs { q, k, v, params, sm_scale: None, scratch, out: to, lse: sums }).unwrap();
            expected.check(&format!("{exec:?} {dtype} {dim} {block_rows}x{block_cols}"), out.view(), Some(lse.view()));
        });
    }
}

#[test]
fn variable_block_sparse_matches_a_masked_reference() {
    let mut rng = Rng::new(7);
    let (heads, kv_heads, rows, cols, dim) = (4, 2, 11, 90, 24);
    let row_sizes = [4i32, 0, 6, 1, 3, 3, 3, 2];
    let col_sizes = [10i32, 30, 0, 49, 1, 40, 40, 5, 3, 2];
    let mask: Vec<Bool> = (0..kv_heads * 4 * 5).map(|_| Bool(u8::from(rng.below(2) == 0))).collect();
    let block = |sizes: &[i32], x: usize| {
        let mut end = 0;
        sizes.iter().position(|&n| {
            end += n as usize;
            x < end
        })
    };
    let sees = |h: usize, i: usize, j: usize| {
        let (r, c) = (block(&row_sizes[h * 4..][..4], i).unwrap(), block(&col_sizes[h * 5..][..5], j).unwrap());
        mask[(h * 4 + r) * 5 + c].get()
    };
    // Heads first, as the operator takes them.
    let (q, k, v) = (
        rng.tensor(DType::F32, &[heads, rows, dim]),
        rng.tensor(DType::F32, &[kv_heads, cols, dim]),
        rng.tensor(DType::F32, &[kv_heads, cols, dim]),
    );
    let tokens_first = |t: &Tensor| {
        let s = t.shape();
        Tensor::from_f32(DType::F32, &t.view().transpose(0, 1).unwrap().to_f32_vec().unwrap(), &[s[1], s[0], s[2]])
            .unwrap()
    };
    let expected = masked_reference(&tokens_first(&q), &tokens_first(&k), &tokens_first(&v), sees);
    every_exec(|exec| {
        let problem = Problem::new(heads, kv_heads, dim, DType::F32, variant::standard());
        let mask = Tensor::from_slice(&mask, &[kv_heads, 4, 5]).unwrap();
        let (rs, cs) = (
            Tensor::from_slice(&row_sizes, &[kv_heads, 4]).unwrap(),
            Tensor::from_slice(&col_sizes, &[kv_heads, 5]).unwrap(),
        );
        let plan = VariableSparsePlan::new(exec, problem, mask.view(), rs.view(), cs.view(), Split::Balanced).unwrap();
        let (mut out, mut lse) = (poisoned(DType::F32, &[heads, rows, dim]), poisoned(DType::F32, &[heads, rows]));
        plan.run(
            exec,
            SparseArgs {
                q: q.view(),
                k: k.view(),
                v: v.view(),
                params: &Params::new(),
                sm_scale: None,
                scratch: &mut plan.scratch(),
                out: out.view_mut(),
                lse: Some(lse.view_mut()),
            },
        )
        .unwrap();
        let lse = tokens_first(&lse.reshaped(&[heads, rows, 1]).unwrap()).reshaped(&[rows, heads]).unwrap();
        expected.check(&format!("{exec:?}"), tokens_first(&out).view(), Some(lse.view()));
    });
}

#[test]
fn single_and_ragged_and_decode_match_reference() {
    let mut rng = Rng::new(11);
    let (heads, kv_heads, dim) = (6, 2, 48);
    for layout in [KvLayout::Nhd, KvLayout::Hnd] {
        for (q_len, kv_len) in [(1, 1), (5, 5), (3, 130), (1, 0), (70, 70)] {
            let q = rng.tensor(DType::BF16, &[q_len, heads, dim]);
            let shape = if layout == KvLayout::Nhd { [kv_len, kv_heads, dim] } else { [kv_heads, kv_len, dim] };
            let (k, v) = (rng.tensor(DType::BF16, &shape), rng.tensor(DType::BF16, &shape));
            let nhd = |t: &'_ Tensor| -> Vec<f32> {
                let t = t.view();
                if layout == KvLayout::Nhd { t } else { t.transpose(0, 1).unwrap() }.to_f32_vec().unwrap()
            };
            let flat = |t: &Tensor| Tensor::from_f32(DType::BF16, &nhd(t), &[kv_len, kv_heads, dim]).unwrap();
            let (kn, vn) = (flat(&k), flat(&v));
            let (qo, kv_indptr) =
                (Ragged::from_lens(&[q_len as u32]).unwrap(), Ragged::from_lens(&[kv_len as u32]).unwrap());
            let kv = Kv::Ragged(RaggedKv::new(kn.view(), vn.view(), &kv_indptr).unwrap());
            assert!(RaggedKv::new(kn.view(), vn.view(), &kv_indptr).unwrap().with_scales(f32::NAN, 1.0).is_err());
            let b = reference::attention::Batch {
                q: q.view(),
                qo: &qo,
                kv,
                variant: &variant::causal(),
                params: &Params::new(),
                sm_scale: f64::from(1.0 / (dim as f32).sqrt()),
            };
            let expected = Expected::of(DType::BF16, |p| reference::attention::batch(p, &b));
            every_exec(|exec| {
                let (mut out, mut lse) =
                    (poisoned(DType::BF16, &[q_len, heads, dim]), poisoned(DType::F32, &[q_len, heads]));
                let (variant, params) = (variant::causal(), Params::new());
                let what = format!("{exec:?} {layout:?} {q_len} {kv_len}");
                let mut args = SingleArgs {
                    q: q.view(),
                    k: k.view(),
                    v: v.view(),
                    layout,
                    variant: &variant,
                    params: &params,
                    sm_scale: None,
                    out: out.view_mut(),
                    lse: Some(lse.view_mut()),
                };
                if q_len == 1 {
                    args.q = args.q.select(0, 0).unwrap();
                    args.out = args.out.select(0, 0).unwrap();
                    args.lse = args.lse.map(|lse| lse.select(0, 0).unwrap());
                    single_decode(exec, args).unwrap();
                } else {
                    single_prefill(exec, args).unwrap();
                }
                expected.check(&what, out.view(), Some(lse.view()));
                if q_len == 1 {
                    let problem = Problem::new(heads, kv_heads, dim, DType::BF16, variant::causal());
                    let mut plan = DecodePlan::with_capacity(exec, problem, 4, Split::Balanced).unwrap();
                    plan.refill(&[9, 9, 9]).unwrap();
                    plan.refill(&[kv_len as u32]).unwrap();
                    let (mut out, scratch) = (poisoned(DType::BF16, &[1, heads, dim]), &mut plan.scratch());
                    plan.run(
                        exec,
                        DecodeArgs {
                            q: q.view(),
                            kv,
                            params: &params,
                            sm_scale: None,
                            scratch,
                            out: out.view_mut(),
                            lse: None,
                        },
                    )
                    .unwrap();
                    expected.check(&what, out.view(), None);
                }
            });
        }
    }
}

#[test]
fn interleaved_and_strided_pools_match_plain_ones() {
    let exec = Exec::cpu().unwrap();
    let mut rng = Rng::new(12);
    let (pages, size, heads, dim) = (6, 4, 2, 16);
    // Keys and values side by side in one row of 2 * dim, as some engines keep them.
    let both = rng.tensor(DType::F16, &[pages, size, heads, 2 * dim]);
    let (k, v) = (both.view().slice(3, 0..dim).unwrap(), both.view().slice(3, dim..2 * dim).unwrap());
    let stacked: Vec<f32> = (0..pages)
        .flat_map(|p| {
            [k.select(0, p).unwrap().to_f32_vec().unwrap(), v.select(0, p).unwrap().to_f32_vec().unwrap()].concat()
        })
        .collect();
    let stacked = Tensor::from_f32(DType::F16, &stacked, &[pages, 2, size, heads, dim]).unwrap();
    let table = PageTable::new(size, pages, &[0, 3, 5][..], &[5, 0, 2, 1, 3][..], &[2, 4]).unwrap();
    let q = rng.tensor(DType::F16, &[2, 4, dim]);
    let run = |pool: PagedKv<'_>| {
        let problem = Problem::new(4, heads, dim, DType::F16, variant::standard());
        let plan = BatchPlan::new(&exec, problem, &Ragged::ones(2).unwrap(), table.lens(), Split::Balanced).unwrap();
        let mut out = poisoned(DType::F16, &[2, 4, dim]);
        let kv = Kv::Paged(pool, &table);
        let (params, scratch) = (&Params::new(), &mut plan.scratch());
        plan.run(&exec, BatchArgs { q: q.view(), kv, params, sm_scale: None, scratch, out: out.view_mut(), lse: None })
            .unwrap();
        out.as_slice::<fir::tensor::f16>().unwrap().iter().map(|x| Float::to_f32(*x)).collect::<Vec<_>>()
    };
    let strided = run(PagedKv::new(k, v, KvLayout::Nhd).unwrap());
    assert_eq!(strided, run(PagedKv::interleaved(stacked.view(), KvLayout::Nhd).unwrap()));
    assert!(strided.iter().all(|x| x.is_finite()));
}
