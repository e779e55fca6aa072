use fir::DType;
use fir::attention::{BatchPlan, Problem, Split};
use fir::kv::KvLayout;
use fir::testing::Rng;
use fir::variant::{self, Params};

use super::case::{Batch, Case, check_case, expected, run, run_plan};
use crate::support::{cases_of, every_exec};

const Q: [DType; 5] = [DType::F32, DType::F16, DType::BF16, DType::E4M3, DType::E5M2];
const KV: [DType; 6] = [DType::F32, DType::F16, DType::BF16, DType::E4M3, DType::E5M2, DType::E2M1x2];
const OUT: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

#[test]
fn matches_reference_for_every_combination_of_types() {
    for q_dtype in Q {
        for kv_dtype in KV {
            for out_dtype in OUT {
                let mut case = Case::new(4, 2, 32, DType::F32, variant::causal());
                case.problem = Problem { q_dtype, kv_dtype, out_dtype, ..case.problem };
                case.scales = (0.75, 1.5);
                check_case(&case, &Params::new());
            }
        }
    }
}

#[test]
fn matches_reference_for_head_dims_from_1_to_512() {
    for dim in [1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 48, 64, 80, 96, 128, 160, 256, 511, 512] {
        let mut case = Case::new(2, 1, dim, DType::F32, variant::causal());
        (case.q_lens, case.kv_lens) = (vec![2, 1], vec![70, 5]);
        check_case(&case, &Params::new());
    }
    for (head_dim_qk, head_dim_vo) in [(192, 128), (128, 192), (1, 512), (512, 1), (72, 40)] {
        let mut case = Case::new(2, 2, 64, DType::BF16, variant::causal());
        case.problem = Problem { head_dim_qk, head_dim_vo, ..case.problem };
        (case.q_lens, case.kv_lens) = (vec![2, 1], vec![70, 5]);
        check_case(&case, &Params::new());
    }
}

#[test]
fn a_row_starts_with_its_sink_also_where_the_mask_hides_the_first_tiles() {
    // A window that the plan knows leaves out the first three tiles of the longer requests.
    let window = variant::variant("SinkInWindow", |p| {
        let (q, k) = (variant::q_pos(), variant::kv_pos());
        variant::init(p.per_head("sink")).mask(k.clone().le(q.clone()) & (q - 20).le(k))
    })
    .unwrap();
    let sinks = [0.5, -1.0, 2.0, 3.0];
    for dtype in [DType::F32, DType::BF16] {
        let mut case = Case::new(4, 2, 32, dtype, window.clone());
        (case.q_lens, case.kv_lens) = (vec![2, 7, 1, 3], vec![300, 230, 300, 20]);
        check_case(&case, &Params::new().f32_tensor("sink", &sinks));
    }
}

#[test]
fn matches_reference_for_every_group_size() {
    for (qo, kv) in
        [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (6, 2), (7, 7), (8, 1), (12, 3), (16, 1), (71, 1), (130, 2)]
    {
        let mut case = Case::new(qo, kv, 24, DType::F16, variant::causal());
        (case.q_lens, case.kv_lens) = (vec![1, 3, 1], vec![66, 9, 1]);
        check_case(&case, &Params::new());
    }
}

#[test]
fn matches_reference_for_every_page_size_and_layout() {
    for page_size in [1, 2, 3, 5, 16, 64, 100] {
        for layout in [KvLayout::Nhd, KvLayout::Hnd] {
            let mut case = Case::new(4, 2, 40, DType::BF16, variant::causal());
            (case.page_size, case.layout) = (page_size, layout);
            case.kv_lens = vec![0, 1, page_size as u32, page_size as u32 + 1, 15, 16, 200, 65];
            check_case(&case, &Params::new());
        }
    }
}

#[test]
fn long_requests_are_cut_and_merged() {
    let mut case = Case::new(4, 2, 64, DType::BF16, variant::causal());
    (case.q_lens, case.kv_lens, case.page_size) = (vec![1, 150, 1, 0, 33], vec![700, 320, 3, 0, 33], 16);
    check_case(&case, &Params::new());
    (case.q_lens, case.kv_lens) = (vec![1], vec![900]);
    check_case(&case, &Params::new());
}

#[test]
fn one_hot_values_show_every_weight() {
    for dtype in [DType::F32, DType::BF16] {
        let mut case = Case::new(4, 2, 128, dtype, variant::causal());
        (case.q_lens, case.kv_lens, case.page_size, case.one_hot) = (vec![3, 1, 1], vec![64, 128, 63], 16, true);
        check_case(&case, &Params::new());
    }
}

#[test]
fn every_library_variant_matches_reference() {
    let mut rng = Rng::new(5);
    let heads = 4;
    let (slopes, sinks) = (rng.normals(heads), rng.normals(heads));
    let lens = ([1u32, 1, 0, 3, 1, 5, 1, 1], [0u32, 1, 7, 9, 15, 16, 17, 65]);
    // A bit per (query, position) of each request, each request's on a byte border.
    let (mut bytes, mut indptr, mut tree, mut tree_indptr) = (vec![], vec![0i32], vec![], vec![0i32]);
    for (q, kv) in lens.0.iter().zip(lens.1) {
        bytes.extend((0..(q * kv).div_ceil(8)).map(|_| rng.bits() as u8));
        indptr.push(bytes.len() as i32);
        tree.extend((0..(q * q).div_ceil(8)).map(|_| rng.bits() as u8));
        tree_indptr.push(tree.len() as i32);
    }
    let (prefix, items): (Vec<i32>, Vec<i32>) = (vec![0, 1, 3, 4, 5, 10, 16, 30], (0..8 * 20).map(|i| i % 5).collect());
    let window = |w| Params::new().i32("window_left", w);
    let causal = |v| variant::causal().and(v).unwrap();
    let cases = [
        (variant::standard(), Params::new()),
        (variant::causal(), Params::new()),
        (variant::sliding_window(), window(0)),
        (variant::sliding_window(), window(5)),
        (causal(variant::sliding_window()), window(7)),
        (causal(variant::sliding_window()), window(-1)),
        (variant::soft_cap(), Params::new().f32("soft_cap", 2.0)),
        (causal(variant::soft_cap()), Params::new().f32("soft_cap", 0.5)),
        (variant::alibi(), Params::new().f32_tensor("alibi_slopes", &slopes)),
        (causal(variant::alibi()), Params::new().f32_tensor("alibi_slopes", &slopes)),
        (variant::rope_llama(1e4, 1.0, false).unwrap(), Params::new()),
        (causal(variant::rope_llama(5e5, 2.0, true).unwrap()), Params::new()),
        (variant::sink(), Params::new().f32_tensor("sink", &sinks)),
        (causal(variant::sink()), Params::new().f32_tensor("sink", &sinks)),
        (variant::custom_mask(), Params::new().bits("mask", &bytes, &indptr)),
        (variant::tree_mask(), Params::new().bits("mask", &tree, &tree_indptr)),
        (variant::sigmoid(), Params::new().f32("bias", -1.0)),
        (causal(variant::sigmoid()), Params::new().f32("bias", 0.25)),
        (
            variant::multi_item(),
            Params::new()
                .i32_tensor("prefix_len", &prefix)
                .i32_tensor("token_pos_in_items", &items)
                .i32("token_pos_in_items_len", 20),
        ),
    ];
    for (variant, params) in cases {
        check_case(&Case::new(heads, 2, 32, DType::F32, variant.clone()), &params);
        check_case(&Case::new(heads, 4, 16, DType::BF16, variant), &params);
    }
}

#[test]
fn many_query_rows_match_reference_behind_every_kind_of_mask() {
    let mut rng = Rng::new(6);
    let (slopes, sinks) = (rng.normals(4), rng.normals(4));
    let causal = |v| variant::causal().and(v).unwrap();
    let (lens, kv_lens) = (vec![100u32, 1, 40, 9], vec![600u32, 70, 40, 300]);
    let (mut bytes, mut indptr) = (vec![], vec![0i32]);
    for (q, kv) in lens.iter().zip(&kv_lens) {
        bytes.extend((0..(q * kv).div_ceil(8)).map(|_| rng.bits() as u8));
        indptr.push(bytes.len() as i32);
    }
    let cases = [
        (variant::standard(), Params::new(), DType::BF16),
        (variant::causal(), Params::new(), DType::E4M3),
        (causal(variant::sliding_window()), Params::new().i32("window_left", 70), DType::BF16),
        (variant::sliding_window(), Params::new().i32("window_left", 300), DType::E5M2),
        (causal(variant::soft_cap()), Params::new().f32("soft_cap", 0.5), DType::BF16),
        (causal(variant::alibi()), Params::new().f32_tensor("alibi_slopes", &slopes), DType::BF16),
        (causal(variant::sink()), Params::new().f32_tensor("sink", &sinks), DType::E2M1x2),
        (variant::custom_mask(), Params::new().bits("mask", &bytes, &indptr), DType::BF16),
    ];
    for (variant, params, kv_dtype) in cases {
        let mut case = Case::new(4, 2, 32, DType::BF16, variant);
        (case.q_lens, case.kv_lens) = (lens.clone(), kv_lens.clone());
        (case.problem.kv_dtype, case.page_size) = (kv_dtype, 16);
        check_case(&case, &params);
    }
    for dim in [64, 96, 128] {
        let mut case = Case::new(6, 1, dim, DType::BF16, variant::causal());
        (case.q_lens, case.kv_lens, case.page_size, case.layout) = (vec![37, 50], vec![290, 50], 1, KvLayout::Hnd);
        check_case(&case, &Params::new());
    }
}

/// On Hopper scores are products of e4m3 where q is, which are sums of 13 bits, and weights f16: as near as plain bf16 code is.
#[test]
fn keys_and_values_of_e4m3_match_reference() {
    let case = |q: DType, heads: [usize; 2], dims: [usize; 2], variant| {
        let mut case = Case::new(heads[0], heads[1], dims[0], q, variant);
        (case.problem.kv_dtype, case.problem.head_dim_vo) = (DType::E4M3, dims[1]);
        case.problem.out_dtype = if q == DType::E4M3 { DType::BF16 } else { q };
        (case.q_lens, case.kv_lens, case.page_size) = (vec![100, 1, 0, 40, 9], vec![270, 70, 5, 40, 200], 16);
        case
    };
    let e4m3 = |variant| case(DType::E4M3, [4, 2], [128, 128], variant);
    let all = [([2, 1], [256, 128]), ([4, 4], [128, 128]), ([8, 2], [128, 128]), ([8, 1], [128, 128])];
    for &(heads, dims) in cases_of(&all, 1) {
        for variant in [variant::standard(), variant::causal()] {
            check_case(&case(DType::E4M3, heads, dims, variant), &Params::new());
        }
    }
    for q in [DType::BF16, DType::F16] {
        check_case(&case(q, [4, 2], [128, 128], variant::standard()), &Params::new());
        check_case(&case(q, [4, 1], [256, 128], variant::causal()), &Params::new());
    }
    let mut scaled = e4m3(variant::causal());
    (scaled.scales, scaled.page_size, scaled.layout) = ((0.75, 1.5), 64, KvLayout::Hnd);
    check_case(&scaled, &Params::new());
    let mut one_hot = e4m3(variant::causal());
    (one_hot.one_hot, one_hot.page_size) = (true, 8);
    check_case(&one_hot, &Params::new());
    let window = variant::causal().and(variant::sliding_window()).unwrap();
    check_case(&e4m3(window), &Params::new().i32("window_left", 70));
    // Small pages and results of f16 have another kernel.
    let mut small = e4m3(variant::causal());
    small.page_size = 1;
    check_case(&small, &Params::new());
    (small.page_size, small.problem.out_dtype) = (16, DType::F16);
    check_case(&small, &Params::new());
}

#[test]
fn sizes_of_blocks_change_results_in_their_last_bits_only() {
    let mut case = Case::new(4, 1, 64, DType::BF16, variant::causal());
    (case.q_lens, case.kv_lens, case.page_size) = (vec![70, 1], vec![400, 9], 16);
    let batch = Batch::new(&case);
    let fir::Exec::Cpu(cpu) = fir::Exec::cpu().unwrap() else { unreachable!() };
    let exec = |text: &str| fir::Exec::Cpu(cpu.tuned(text.parse().unwrap()).unwrap());
    let expected = expected(&case, &batch, &Params::new());
    for text in ["", "attention_rows 32", "attention_span 64", "attention_rows 96\nattention_span 1024"] {
        let exec = exec(text);
        let (out, lse) = run(&exec, &case, &batch, &Params::new(), Split::Balanced, true);
        expected.check(&format!("{text:?}"), out.view(), Some(lse.view()));
        // A plan of one executor runs on another.
        let other = fir::Exec::cpu_with(fir::exec::Level::Portable, 2).unwrap();
        let plan = BatchPlan::new(&exec, case.problem.clone(), &batch.qo, &case.kv_lens, Split::Balanced).unwrap();
        let (out, lse) = run_plan(&plan, &other, &case, &batch, &Params::new(), true);
        expected.check(&format!("{text:?} on another"), out.view(), Some(lse.view()));
    }
}

#[test]
fn values_that_are_not_finite_stay_where_they_are_among_many_rows() {
    let mut case = Case::new(2, 1, 32, DType::BF16, variant::causal());
    (case.q_lens, case.kv_lens, case.page_size) = (vec![60], vec![300], 4);
    let mut batch = Batch::new(&case);
    let (page, slot) = batch.table.locate(0, 270).unwrap();
    let at = (page * case.page_size + slot) * 32;
    batch.v.as_mut_slice::<half::bf16>().unwrap()[at..at + 32].fill(half::bf16::INFINITY);
    every_exec(|exec| {
        let (out, _) = run(exec, &case, &batch, &Params::new(), Split::Off, true);
        let out = out.as_slice::<half::bf16>().unwrap();
        for token in 0..60 {
            let sees = token + 240 >= 270;
            assert_eq!(out[token * 64..][..64].iter().all(|x| x.is_finite()), !sees, "{exec:?} {token}");
        }
    });
}

#[test]
fn few_rows_match_reference_wherever_their_keys_lie() {
    for (qo, kv) in [(1, 1), (3, 3), (8, 2), (20, 4), (16, 1), (48, 3), (70, 7)] {
        for (page_size, layout) in [(1, KvLayout::Nhd), (5, KvLayout::Hnd), (16, KvLayout::Nhd), (64, KvLayout::Hnd)] {
            let mut case = Case::new(qo, kv, 64, DType::BF16, variant::causal());
            (case.page_size, case.layout) = (page_size, layout);
            (case.q_lens, case.kv_lens) = (vec![1, 1, 1, 2, 1], vec![0, 1, 64, 70, 333]);
            check_case(&case, &Params::new());
        }
    }
}

#[test]
fn numbers_that_are_not_finite_stay_where_they_are_among_few_rows() {
    let mut case = Case::new(8, 2, 64, DType::BF16, variant::causal());
    (case.q_lens, case.kv_lens, case.page_size) = (vec![1, 1, 1], vec![300, 70, 40], 16);
    for bad in [half::bf16::INFINITY, half::bf16::NAN] {
        let mut batch = Batch::new(&case);
        let at = |r: usize, position: usize, head: usize| {
            let (page, slot) = batch.table.locate(r, position).unwrap();
            ((page * case.page_size + slot) * 2 + head) * 64
        };
        let (value, key) = (at(0, 270, 1) + 5, at(1, 3, 0) + 8);
        batch.v.as_mut_slice::<half::bf16>().unwrap()[value] = bad;
        batch.k.as_mut_slice::<half::bf16>().unwrap()[key] = half::bf16::NAN;
        let params = Params::new();
        let expected = expected(&case, &batch, &params);
        every_exec(|exec| {
            for split in [Split::Balanced, Split::Fixed(64)] {
                let (out, lse) = run(exec, &case, &batch, &params, split, true);
                expected.check(&format!("{exec:?} {split:?} {bad}"), out.view(), Some(lse.view()));
            }
        });
    }
}

#[test]
fn maxima_that_grow_late_are_followed() {
    // Scores of the first positions are small, those of some later ones 2^16 and 2^100 times their weight, and of one
    // request all are small but for the last position.
    let mut case = Case::new(4, 2, 64, DType::BF16, variant::causal());
    (case.q_lens, case.kv_lens, case.page_size) = (vec![40, 33, 70, 1], vec![600, 300, 70, 400], 16);
    for grown in [16.0, 100.0, 4000.0] {
        let mut batch = Batch::new(&case);
        let mut grow = |r: usize, position: usize| {
            let (page, slot) = batch.table.locate(r, position).unwrap();
            let row = (page * case.page_size + slot) * 2 * 64;
            for x in &mut batch.k.as_mut_slice::<half::bf16>().unwrap()[row..row + 2 * 64] {
                *x = half::bf16::from_f32(x.to_f32() * grown);
            }
        };
        for (r, position) in
            [(0, 100), (0, 101), (0, 250), (0, 257), (0, 511), (0, 560), (1, 299), (3, 63), (3, 200), (3, 399)]
        {
            grow(r, position);
        }
        (10..40).for_each(|position| grow(2, position));
        let params = Params::new();
        let expected = expected(&case, &batch, &params);
        every_exec(|exec| {
            for split in [Split::Balanced, Split::Fixed(64), Split::Off] {
                let (out, lse) = run(exec, &case, &batch, &params, split, true);
                expected.check(&format!("{exec:?} {split:?} {grown}"), out.view(), Some(lse.view()));
            }
        });
    }
}

#[test]
fn values_that_are_not_finite_stay_where_they_are() {
    // Position 3 of every request is NaN or infinite: rows that do not see it must not notice.
    for bad in [f32::NAN, f32::INFINITY] {
        let mut case = Case::new(2, 1, 20, DType::F32, variant::causal());
        (case.q_lens, case.kv_lens, case.page_size) = (vec![6, 6], vec![6, 70], 4);
        let mut batch = Batch::new(&case);
        for r in 0..2 {
            let (page, slot) = batch.table.locate(r, 3).unwrap();
            let at = (page * case.page_size + slot) * 20;
            batch.v.as_mut_slice::<f32>().unwrap()[at..at + 20].fill(bad);
        }
        every_exec(|exec| {
            let (out, lse) = run(exec, &case, &batch, &Params::new(), Split::Balanced, true);
            let out = out.as_slice::<f32>().unwrap();
            assert!(lse.as_slice::<f32>().unwrap().iter().all(|x| x.is_finite()));
            for token in 0..12 {
                let sees = token >= 3;
                assert_eq!(out[token * 40..][..40].iter().all(|x| x.is_finite()), !sees, "{exec:?} {bad} {token}");
            }
        });
    }
}

#[test]
fn fixed_split_is_batch_invariant_to_the_bit() {
    let mut case = Case::new(8, 2, 64, DType::BF16, variant::causal());
    (case.q_lens, case.kv_lens, case.page_size) = (vec![1, 20, 1, 1, 7, 1], vec![500, 150, 64, 1, 260, 999], 16);
    let batch = Batch::new(&case);
    every_exec(|exec| {
        for split in [Split::Fixed(64), Split::Fixed(256), Split::Off] {
            let (all, all_lse) = run(exec, &case, &batch, &Params::new(), split, true);
            for r in 0..case.q_lens.len() {
                // The same request alone, through a table of its own.
                let rows = batch.qo.indptr()[r] as usize..batch.qo.indptr()[r + 1] as usize;
                let qo = fir::Ragged::from_lens(&[case.q_lens[r]]).unwrap();
                let pages = batch.table.pages(r);
                let table = fir::PageTable::with_lens(
                    16,
                    batch.table.num_pages(),
                    vec![0, pages.len() as i32],
                    pages,
                    &[case.kv_lens[r] as i32],
                )
                .unwrap();
                let fir::kv::Kv::Paged(pool, _) = batch.kv() else { unreachable!() };
                let plan = BatchPlan::new(exec, case.problem.clone(), &qo, &[case.kv_lens[r]], split).unwrap();
                let mut out = super::case::poisoned(DType::BF16, &[rows.len(), 8, 64]);
                let mut lse = super::case::poisoned(DType::F32, &[rows.len(), 8]);
                plan.run(
                    exec,
                    fir::attention::BatchArgs {
                        q: batch.q.view().slice(0, rows.clone()).unwrap(),
                        kv: fir::kv::Kv::Paged(pool, &table),
                        params: &Params::new(),
                        sm_scale: None,
                        scratch: &mut plan.scratch(),
                        out: out.view_mut(),
                        lse: Some(lse.view_mut()),
                    },
                )
                .unwrap();
                let bits = |t: &fir::Tensor, per: usize, rows: std::ops::Range<usize>| -> Vec<u32> {
                    t.view().to_f32_vec().unwrap()[rows.start * per..rows.end * per]
                        .iter()
                        .map(|x| x.to_bits())
                        .collect()
                };
                assert_eq!(
                    bits(&out, 8 * 64, 0..rows.len()),
                    bits(&all, 8 * 64, rows.clone()),
                    "{exec:?} {split:?} request {r}"
                );
                assert_eq!(bits(&lse, 8, 0..rows.len()), bits(&all_lse, 8, rows), "{exec:?} {split:?} request {r}");
            }
        }
    });
}

/// What a serving engine's steps rest on: tokens of a prompt have the same bits however it is cut, as long as a piece has more
/// tokens than the road for few query rows takes. (On a GPU the number of rows chooses the kernel.)
#[test]
fn a_piece_of_a_prompt_has_the_bits_of_the_whole() {
    let (heads, dim, len) = (3, 64, 900usize);
    for dtype in [DType::BF16, DType::F32] {
        let mut case = Case::new(heads, 1, dim, dtype, variant::causal());
        (case.q_lens, case.kv_lens, case.page_size) = (vec![len as u32], vec![len as u32], 16);
        let batch = Batch::new(&case);
        let fir::kv::Kv::Paged(pool, _) = batch.kv() else { unreachable!() };
        every_exec(|exec| {
            let fir::Exec::Cpu(cpu) = exec else { return };
            // Scores of a few, and of tens, whose maxima come late. 512 = 3 × 170 + 2: of tiles of 512 rows the last has 6,
            // which alone are few.
            let few = [&[304, 320, 336, 900][..], &[16, 256, 768, 900]];
            let all = [(None, &few[..]), (Some(1.0), &[&[512, 684, 900], &[288, 880, 900]])];
            // Portable code takes as long as all the rest.
            let is_portable = cpu.level() == fir::exec::Level::Portable;
            for (sm_scale, pieces) in all.into_iter().skip(usize::from(is_portable)) {
                let rows = |start: usize, end: usize| {
                    let pages = &batch.table.pages(0)[..end.div_ceil(16)];
                    let indptr = vec![0, pages.len() as i32];
                    let table =
                        fir::PageTable::with_lens(16, batch.table.num_pages(), indptr, pages, &[end as i32]).unwrap();
                    let qo = fir::Ragged::from_lens(&[(end - start) as u32]).unwrap();
                    let plan =
                        BatchPlan::new(exec, case.problem.clone(), &qo, &[end as u32], Split::Fixed(256)).unwrap();
                    let mut out = super::case::poisoned(dtype, &[end - start, heads, dim]);
                    let args = fir::attention::BatchArgs {
                        q: batch.q.view().slice(0, start..end).unwrap(),
                        kv: fir::kv::Kv::Paged(pool, &table),
                        params: &Params::new(),
                        sm_scale,
                        scratch: &mut plan.scratch(),
                        out: out.view_mut(),
                        lse: None,
                    };
                    plan.run(exec, args).unwrap();
                    out.view().to_f32_vec().unwrap()
                };
                let all = rows(0, len);
                for &ends in pieces {
                    for piece in [&[0][..], ends].concat().windows(2) {
                        let (start, end) = (piece[0], piece[1]);
                        let got = rows(start, end);
                        let whole = &all[start * heads * dim..];
                        let differ = got.iter().zip(whole).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
                        assert_eq!(differ, 0, "{exec:?} {dtype} {sm_scale:?}: numbers of {start}..{end} that differ");
                    }
                }
            }
        });
    }
}

/// A GPU's plan for 64 requests and more runs other blocks than one for fewer.
#[test]
fn matches_reference_for_many_requests() {
    let mut case = Case::new(8, 2, 128, DType::BF16, variant::causal());
    case.q_lens = vec![1; 70];
    case.kv_lens = (0..70).map(|r| r * 29 % 180).collect();
    (case.kv_lens[9], case.page_size) = (1500, 16);
    check_case(&case, &Params::new());
}
