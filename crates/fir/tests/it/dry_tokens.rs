//! The dry lane of rope, pages, quantization and merging: which kernels are launched, and how often.

use fir::attention::{merge_state, merge_states};
use fir::exec::{Arch, Gpu};
use fir::kv::{KvLayout, PageTable, PagedKvMut, Ragged};
use fir::page::{Slots, append_paged_kv};
use fir::quantize::{BitOrder, Block, nvfp4_scale, packbits, quantize_fp8, quantize_nvfp4, segment_packbits};
use fir::rope::{Angles, Positions, Roped, apply_rope, apply_rope_in_place, cos_sin_cache, rope_quantize};
use fir::variant::Rope;
use fir::{DType, Exec, Result, Tensor, jit};

/// Kernels and shapes of the launches of `work` on an H200 that is not there, and their parameters.
fn launches(work: impl FnOnce(&Exec) -> Result<()>) -> (Vec<String>, Vec<String>) {
    let gpu = Gpu::dry(Arch::HOPPER);
    work(&Exec::Cuda(gpu.clone())).unwrap();
    let kernels = jit::kernels();
    let taken = gpu.launches();
    for launch in &taken {
        assert!(kernels.iter().any(|k| k.name() == launch.kernel), "{} is not in jit::kernels()", launch.kernel);
    }
    taken.into_iter().map(|l| (format!("{}: {}", l.kernel.replace("fir::", ""), l.shape), l.params)).unzip()
}

fn zeros(dtype: DType, shape: &[usize]) -> Tensor {
    Tensor::zeros(dtype, shape).unwrap()
}

#[test]
fn queries_and_keys_rotate_in_one_launch() {
    let rotate = |nnz: usize, head_dim: usize, rope: Rope| {
        let [q, k] = [32, 8].map(|heads| zeros(DType::BF16, &[nnz, heads, head_dim]));
        let (at, mut q_out, mut k_out) = (zeros(DType::I64, &[nnz]), q.clone(), k.clone());
        let (names, params) = launches(|exec| {
            let at = Positions::Ids(at.view());
            apply_rope(exec, q.view(), k.view(), at, rope, q_out.view_mut(), k_out.view_mut())
        });
        let (q, k) = (&mut q_out, &mut k_out);
        let (in_place, _) =
            launches(|exec| apply_rope_in_place(exec, Positions::Ids(at.view()), rope, q.view_mut(), k.view_mut()));
        assert_eq!(names, in_place);
        (names, params)
    };
    // 320 units of 32 bytes a token; its 64 cosines and sines.
    let (names, params) = rotate(4096, 128, Rope::default());
    assert_eq!(names, ["tokens<bf16, bf16, 8>: grid [4096, 1, 1], block [160, 1, 1], smem 512, early"]);
    let has = |part: &str| assert!(params[0].contains(part), "{part} is not in {}", params[0]);
    has(
        "sides[0].from q, sides[0].to q_out, sides[0].block_scales none, sides[0].from_token 8192, sides[0].from_head 256",
    );
    has("sides[1].from k, sides[1].to k_out");
    has("sides[1].dim 128, sides[1].units 8, sides[1].first 256, sides[1].rotated 1, sides[1].paged 0");
    has("angles.positions positions, angles.indptr none");
    has("angles.pairs 64, angles.batch 0, angles.wide 1, angles.interleave 0");
    has("nnz 4096, units 320, count 2, paged 0");
    // Halves of 36 elements are no vectors, nor are rows of 84.
    let odd = rotate(64, 84, Rope { rotary_dim: Some(72), ..Rope::default() }).0;
    assert_eq!(odd, ["tokens<bf16, bf16, 1>: grid [64, 1, 1], block [256, 1, 1], smem 288, early"]);
}

#[test]
fn positions_of_requests_and_tables_are_passed_on() {
    let [q, k] = [2, 1].map(|heads| zeros(DType::F16, &[5, heads, 64]));
    let (mut q_out, mut k_out, mut table) = (q.clone(), k.clone(), zeros(DType::F32, &[100, 64]));
    let (indptr, offsets) = (Ragged::from_lens(&[2, 0, 3]).unwrap(), zeros(DType::I32, &[3]));
    let (made, _) = launches(|exec| cos_sin_cache(exec, &Rope::default(), table.view_mut()));
    assert_eq!(made, ["cos_sin_cache<>: grid [13, 1, 1], block [256, 1, 1], smem 0, early"]);
    let (_, params) = launches(|exec| {
        let at = Positions::Ragged { indptr: &indptr, offsets: offsets.view() };
        let angles = Angles::Cache { table: table.view(), interleave: true };
        apply_rope(exec, q.view(), k.view(), at, angles, q_out.view_mut(), k_out.view_mut())
    });
    let has = |part: &str| assert!(params[0].contains(part), "{part} is not in {}", params[0]);
    has("angles.table table, angles.positions offsets, angles.indptr indptr");
    has("angles.table_stride 64, angles.table_rows 100, angles.position_stride 1");
    has("angles.pairs 32, angles.batch 3, angles.wide 0, angles.interleave 1");
}

#[test]
fn tensors_of_other_types_take_launches_of_their_own() {
    let (x, nope, at) = (zeros(DType::BF16, &[3, 2, 64]), zeros(DType::BF16, &[3, 2, 128]), zeros(DType::I32, &[3]));
    for (k_dtype, count) in [(DType::E4M3, 1), (DType::BF16, 2)] {
        let [mut q, mut k] = [DType::E4M3, k_dtype].map(|d| (zeros(d, &[3, 2, 64]), zeros(d, &[3, 2, 128])));
        let (names, _) = launches(|exec| {
            let [q, k] = [&mut q, &mut k].map(|(rope, rest)| Roped {
                rope: x.view(),
                rope_out: rope.view_mut(),
                nope: Some((nope.view(), rest.view_mut())),
                scale: 0.5,
            });
            rope_quantize(exec, q, k, Positions::Ids(at.view()), Rope::default())
        });
        assert_eq!(names.len(), count, "{names:?}");
    }
}

#[test]
fn appending_takes_pages_as_they_are() {
    let table = PageTable::with_lens(4, 9, vec![0, 2, 3], vec![3, 1, 8], &[5, 3]).unwrap();
    let (requests, at) = (zeros(DType::I32, &[2]), zeros(DType::I64, &[2]));
    let (slots, x) = (zeros(DType::I32, &[2]), zeros(DType::F16, &[2, 2, 32]));
    let tokens = Slots::Tokens { table: &table, batch_indices: requests.view(), positions: at.view() };
    for (dtype, slots, want) in [
        (DType::E5M2, tokens, "tokens<f16, e5m2, 8>"),
        (DType::F16, Slots::Mapping(slots.view()), "tokens<f16, f16, 8>"),
        (DType::E2M1x2, Slots::Mapping(slots.view()), "tokens<f16, e2m1x2, 16>"),
    ] {
        let each = if dtype == DType::E2M1x2 { 16 } else { 32 };
        // Heads before tokens.
        let [mut k, mut v] = [(); 2].map(|()| zeros(dtype, &[9, 2, 4, each]));
        let [mut ks, mut vs] = [(); 2].map(|()| zeros(DType::E4M3, &[9, 2, 4, 2]));
        let cache = if dtype == DType::E2M1x2 {
            PagedKvMut::nvfp4(k.view_mut(), v.view_mut(), ks.view_mut(), vs.view_mut(), KvLayout::Hnd)
        } else {
            PagedKvMut::new(k.view_mut(), v.view_mut(), KvLayout::Hnd)
        };
        let (names, params) = launches(|exec| append_paged_kv(exec, x.view(), x.view(), slots, cache.unwrap()));
        assert_eq!(names.len(), 1, "{names:?}");
        assert!(names[0].starts_with(want), "{names:?}");
        let bytes = each * dtype.size();
        let strides = format!("to_outer {}, sides[0].to_row {bytes}, sides[0].to_head {}", 8 * bytes, 4 * bytes);
        assert!(params[0].contains(&strides), "{strides} is not in {}", params[0]);
        assert!(params[0].contains("slots.pages 9, slots.page_size 4"), "{}", params[0]);
    }
}

#[test]
fn blocks_that_are_too_large_take_three_launches() {
    let quantize = |block: Block, shape: [usize; 2]| {
        let [rows, columns] = block.counts(shape[0], shape[1]);
        let (x, mut out, mut scales) =
            (zeros(DType::BF16, &shape), zeros(DType::E4M3, &shape), zeros(DType::F32, &[rows, columns]));
        launches(|exec| quantize_fp8(exec, x.view(), block, out.view_mut(), scales.view_mut())).0
    };
    assert_eq!(
        quantize(Block::ROW, [300, 4096]),
        ["quantize_fp8<bf16, e4m3, true>: grid [300, 1, 1], block [256, 1, 1], smem 0, early"]
    );
    assert_eq!(
        quantize(Block::GROUP, [3, 4100]),
        ["quantize_fp8<bf16, e4m3, false>: grid [4, 1, 1], block [256, 1, 1], smem 0, early"]
    );
    assert_eq!(
        quantize(Block::TENSOR, [300, 4096]),
        [
            "fill_scales<>: grid [1, 1, 1], block [256, 1, 1], smem 0, early",
            "largest_fp8<bf16, true>: grid [300, 1, 1], block [256, 1, 1], smem 0, early",
            "scale_fp8<bf16, e4m3, true, true>: grid [300, 1, 1], block [256, 1, 1], smem 0, early",
        ]
    );
    // Nothing to round, and a scale for it.
    assert_eq!(quantize(Block::TENSOR, [0, 64]), ["fill_scales<>: grid [1, 1, 1], block [256, 1, 1], smem 0, early"]);
}

#[test]
fn codes_bits_and_states_are_one_launch_each() {
    let (x, mut codes, mut scales) =
        (zeros(DType::F32, &[4, 64]), zeros(DType::E2M1x2, &[4, 32]), zeros(DType::E4M3, &[4, 4]));
    let (bits, mut bytes, mut cut) = (zeros(DType::Bool, &[19]), zeros(DType::U8, &[3]), zeros(DType::U8, &[4]));
    let indptr = Ragged::from_lens(&[9, 0, 10]).unwrap();
    let [o, all] = [&[6, 2, 128][..], &[6, 3, 2, 128]].map(|shape| zeros(DType::BF16, shape));
    let [lse, lses] = [&[6, 2][..], &[6, 3, 2]].map(|shape| zeros(DType::F32, shape));
    let (mut out, mut lse_out) = (o.clone(), lse.clone());
    let (names, _) = launches(|exec| {
        quantize_nvfp4(exec, x.view(), 0.5, codes.view_mut(), scales.view_mut())?;
        assert_eq!(nvfp4_scale(exec, x.view())?, f32::MIN_POSITIVE);
        packbits(exec, bits.view(), BitOrder::Big, bytes.view_mut())?;
        segment_packbits(exec, bits.view(), &indptr, BitOrder::Little, cut.view_mut())?;
        let state = (o.view(), lse.view());
        merge_state(exec, state, state, (out.view_mut(), lse_out.view_mut()))?;
        merge_states(exec, (all.view(), lses.view()), (out.view_mut(), lse_out.view_mut()))
    });
    let names: Vec<_> = names.iter().map(|n| n.split(':').next().unwrap()).collect();
    assert_eq!(
        names,
        [
            "quantize_blocks<float, Nvfp4, true>",
            "largest_fp8<float, true>",
            "packbits<>",
            "packbits<>",
            "merge_states<bf16, true, true>",
            "merge_states<bf16, false, true>",
        ]
    );
}

#[test]
fn nothing_to_do_launches_nothing() {
    let (x, at) = (zeros(DType::F16, &[0, 4, 64]), zeros(DType::I32, &[0]));
    let (mut q, mut k) = (x.clone(), x.clone());
    let at = Positions::Ids(at.view());
    let (names, _) =
        launches(|exec| apply_rope(exec, x.view(), x.view(), at, Rope::default(), q.view_mut(), k.view_mut()));
    assert!(names.is_empty(), "{names:?}");
    let (empty, mut out) = (zeros(DType::Bool, &[0]), zeros(DType::U8, &[0]));
    assert!(launches(|exec| packbits(exec, empty.view(), BitOrder::Big, out.view_mut())).0.is_empty());
}
