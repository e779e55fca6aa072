use fir::kv::Ragged;
use fir::quantize::*;
use fir::reference::{Precision, quantize as reference};
use fir::tensor::{Bool, E2m1x2, E4m3, E5m2, E8m0, Element, Float};
use fir::testing::Rng;
use fir::{DType, Exec, Result, Tensor, TensorMut, TensorRef};

use crate::support::{FLOATS, every_exec};

const FP8: [DType; 2] = [DType::E4M3, DType::E5M2];
const ODD: Block = Block { rows: 3, columns: 5 };
/// The formulas with every step rounded to f32: what the kernels must give in every bit.
const STEPS: Precision = Precision::Naive(DType::F32);

fn zeros(dtype: DType, shape: &[usize]) -> Tensor {
    Tensor::zeros(dtype, shape).unwrap()
}

/// Every element as f64, of fp4 and e8m0 too.
fn numbers(x: TensorRef<'_>) -> Vec<f64> {
    let all: Vec<f32> = match x.dtype() {
        DType::E2M1x2 => {
            let x = x.typed::<E2m1x2>("t", "x").unwrap();
            x.layout().offsets().flat_map(|i| x.data()[i].to_f32()).collect()
        }
        DType::E8M0 => {
            let x = x.typed::<E8m0>("t", "x").unwrap();
            x.layout().offsets().map(|i| x.data()[i].to_f32()).collect()
        }
        _ => x.to_f32_vec().unwrap(),
    };
    all.into_iter().map(f64::from).collect()
}

#[track_caller]
fn assert_same(what: &str, got: &[f64], want: &[f64]) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!(g == w || (g.is_nan() && w.is_nan()), "{what}: element {i} is {g}, reference {w}");
    }
}

fn fp8(exec: &Exec, x: TensorRef<'_>, block: Block, dtype: DType) -> (Tensor, Tensor) {
    let [rows, k] = [x.shape()[0], x.shape()[1]];
    let (mut out, mut scales) = (zeros(dtype, &[rows, k]), zeros(DType::F32, &block.counts(rows, k)));
    quantize_fp8(exec, x, block, out.view_mut(), scales.view_mut()).unwrap();
    (out, scales)
}

/// Numbers of very different sizes, with a row of zeros.
fn spread(rng: &mut Rng, dtype: DType, rows: usize, k: usize) -> Tensor {
    let data: Vec<f32> = (0..rows * k)
        .map(|i| if i / k == 1 { 0.0 } else { rng.normal() * 2f32.powi(rng.below(24) as i32 - 12) })
        .collect();
    Tensor::from_f32(dtype, &data, &[rows, k]).unwrap()
}

#[test]
fn fp8_is_the_reference_in_every_bit() {
    every_exec(|exec| {
        let mut rng = Rng::new(1);
        for (rows, k) in [(1, 1), (5, 7), (3, 128), (2, 17), (130, 300), (7, 0), (0, 7)] {
            for dtype in FLOATS {
                let x = spread(&mut rng, dtype, rows, k);
                for (to, block) in FP8
                    .iter()
                    .flat_map(|&to| [Block::TENSOR, Block::ROW, Block::GROUP, Block::TILE, ODD].map(|b| (to, b)))
                {
                    let what = format!("{exec:?} {dtype} {to} {rows}x{k} {block:?}");
                    let (out, scales) = fp8(exec, x.view(), block, to);
                    let (want, want_scales) = reference::quantize_fp8(STEPS, x.view(), block, to).unwrap();
                    assert_same(&format!("{what} scales"), &numbers(scales.view()), &want_scales);
                    assert_same(&what, &numbers(out.view()), &want);
                    // Other scales, given; some saturate.
                    let other: Vec<f32> = numbers(scales.view()).iter().map(|&s| s as f32 * 0.3).collect();
                    let other = Tensor::from_f32(DType::F32, &other, scales.shape()).unwrap();
                    let mut out = zeros(to, &[rows, k]);
                    quantize_fp8_with_scales(exec, x.view(), other.view(), block, out.view_mut()).unwrap();
                    let other = numbers(other.view());
                    let want = reference::quantize_fp8_with_scales(STEPS, x.view(), &other, block, to).unwrap();
                    assert_same(&format!("{what} given"), &numbers(out.view()), &want);
                }
            }
        }
    });
}

#[test]
fn dequantized_fp8_is_the_reference_in_every_bit() {
    every_exec(|exec| {
        let mut rng = Rng::new(2);
        for (rows, k) in [(1, 1), (5, 7), (3, 128), (130, 300)] {
            for (from, to) in FP8.iter().flat_map(|&from| FLOATS.map(|to| (from, to))) {
                for block in [Block::TENSOR, Block::ROW, Block::GROUP, Block::TILE, ODD] {
                    let (x, scales) = (rng.tensor(from, &[rows, k]), rng.tensor(DType::F32, &block.counts(rows, k)));
                    let mut out = zeros(to, &[rows, k]);
                    dequantize_fp8(exec, x.view(), scales.view(), block, out.view_mut()).unwrap();
                    let p = Precision::Naive(to);
                    let want = reference::dequantize_fp8(p, x.view(), &numbers(scales.view()), block).unwrap();
                    assert_same(&format!("{exec:?} {from} {to} {block:?}"), &numbers(out.view()), &want);
                }
            }
        }
    });
}

#[test]
fn fp8_is_as_near_as_its_steps_allow() {
    let exec = Exec::cpu().unwrap();
    let mut rng = Rng::new(3);
    let x = spread(&mut rng, DType::F32, 64, 256);
    for (dtype, step, least) in
        [(DType::E4M3, 2f64.powi(-4), 2f64.powi(-10)), (DType::E5M2, 2f64.powi(-3), 2f64.powi(-17))]
    {
        let (out, scales) = fp8(&exec, x.view(), Block::GROUP, dtype);
        let (out, scales) = (numbers(out.view()), numbers(scales.view()));
        for (i, x) in numbers(x.view()).into_iter().enumerate() {
            let error = (x - out[i] * scales[i / 128]).abs();
            assert!(error <= f64::max(x.abs() * step, scales[i / 128] * least) * 1.000_001, "{dtype} {x}: {error}");
        }
    }
}

/// All codes, eight rows of 32.
fn codes<T: Element>(make: impl Fn(u8) -> T) -> Tensor {
    let all: Vec<T> = (0..=255).map(make).collect();
    Tensor::from_slice(&all, &[8, 32]).unwrap()
}

#[test]
fn every_fp8_code_comes_back() {
    every_exec(|exec| {
        for (codes, largest) in [(codes(E4m3), 448.0), (codes(E5m2), 57344.0)] {
            let dtype = codes.dtype();
            for scale in [1.0, 0.37, 2f32.powi(-20), 3e20, f32::MIN_POSITIVE] {
                let scales = Tensor::from_slice(&[scale], &[1, 1]).unwrap();
                let (mut x, mut back) = (zeros(DType::F32, &[8, 32]), zeros(dtype, &[8, 32]));
                dequantize_fp8(exec, codes.view(), scales.view(), Block::TENSOR, x.view_mut()).unwrap();
                quantize_fp8_with_scales(exec, x.view(), scales.view(), Block::TENSOR, back.view_mut()).unwrap();
                // An infinity of e5m2 comes back as the largest number.
                let want: Vec<f64> = numbers(codes.view()).iter().map(|x| x.clamp(-largest, largest)).collect();
                assert_same(&format!("{exec:?} {dtype} {scale}"), &numbers(back.view()), &want);
                // A row that holds the largest number finds its scale again, up to a rounding, and the codes.
                let finite: Vec<f32> = numbers(x.view()).iter().map(|&x| x as f32).filter(|x| x.is_finite()).collect();
                let x = Tensor::from_f32(DType::F32, &finite, &[1, finite.len()]).unwrap();
                let (back, found) = fp8(exec, x.view(), Block::ROW, dtype);
                let want: Vec<f64> = want.into_iter().filter(|x| x.is_finite()).take(finite.len()).collect();
                if dtype == DType::E4M3 {
                    assert_same(&format!("{exec:?} {dtype} {scale} found"), &numbers(back.view()), &want);
                }
                let found = found.as_slice::<f32>().unwrap()[0];
                assert!((found / scale - 1.0).abs() < 1e-6, "{found} for {scale}");
            }
        }
    });
}

#[test]
fn every_nvfp4_code_comes_back_under_every_scale() {
    every_exec(|exec| {
        // A block of all sixteen codes, ±6 among them, for each positive scale.
        let block: Vec<E2m1x2> = (0..8).map(|i| E2m1x2((2 * i) | ((2 * i + 1) << 4))).collect();
        let scales: Vec<E4m3> = (1..0x7f).map(E4m3).collect();
        let rows = scales.len();
        let codes = Tensor::from_slice(&block.repeat(rows), &[rows, 8]).unwrap();
        let scales = Tensor::from_slice(&scales, &[rows, 1]).unwrap();
        for scale in [1.0, 0.0137, 5e-30, 7e30] {
            let mut x = zeros(DType::F32, &[rows, 16]);
            dequantize_nvfp4(exec, codes.view(), scales.view(), scale, x.view_mut()).unwrap();
            let (mut back, mut found) = (zeros(DType::E2M1x2, &[rows, 8]), zeros(DType::E4M3, &[rows, 1]));
            quantize_nvfp4(exec, x.view(), scale, back.view_mut(), found.view_mut()).unwrap();
            assert_eq!(back.as_slice::<E2m1x2>().unwrap(), codes.as_slice::<E2m1x2>().unwrap(), "{exec:?} {scale}");
            assert_eq!(found.as_slice::<E4m3>().unwrap(), scales.as_slice::<E4m3>().unwrap(), "{exec:?} {scale}");
        }
    });
}

#[test]
fn every_mx_code_comes_back_under_every_scale() {
    every_exec(|exec| {
        // Up to the scales with which the largest number is still an f32.
        let four: Vec<E2m1x2> = (0..16).map(|i| E2m1x2((2 * i % 16) | ((2 * i % 16 + 1) << 4))).collect();
        let scales: Vec<E8m0> = (0..=252).map(E8m0).collect();
        let rows = scales.len();
        let codes = Tensor::from_slice(&four.repeat(rows), &[rows, 16]).unwrap();
        let scales = Tensor::from_slice(&scales, &[rows, 1]).unwrap();
        let mut x = zeros(DType::F32, &[rows, 32]);
        dequantize_mxfp4(exec, codes.view(), scales.view(), x.view_mut()).unwrap();
        let (mut back, mut found) = (zeros(DType::E2M1x2, &[rows, 16]), zeros(DType::E8M0, &[rows, 1]));
        quantize_mxfp4(exec, x.view(), back.view_mut(), found.view_mut()).unwrap();
        assert_eq!(back.as_slice::<E2m1x2>().unwrap(), codes.as_slice::<E2m1x2>().unwrap(), "{exec:?}");
        assert_eq!(found.as_slice::<E8m0>().unwrap(), scales.as_slice::<E8m0>().unwrap(), "{exec:?}");

        mxfp8_codes_come_back(exec, E4m3, 0x7e, 246);
        mxfp8_codes_come_back(exec, E5m2, 0x7b, 239);
    });
}

/// All finite codes in blocks that hold the largest one, under each scale up to `last`.
fn mxfp8_codes_come_back<T: Float>(exec: &Exec, make: impl Fn(u8) -> T, largest: u8, last: u8) {
    let finite: Vec<u8> = (0..=255).filter(|c| c & 0x7f <= largest).collect();
    for scale in 0..=last {
        let mut row = Vec::new();
        for codes in finite.chunks(31) {
            row.extend(codes.iter().map(|&c| make(c)));
            row.resize(row.len().next_multiple_of(32), make(largest));
        }
        let (n, scales) = (row.len(), vec![E8m0(scale); row.len() / 32]);
        let codes = Tensor::from_slice(&row, &[1, n]).unwrap();
        let scales = Tensor::from_slice(&scales, &[1, n / 32]).unwrap();
        let (mut x, mut back, mut found) = (zeros(DType::F32, &[1, n]), zeros(T::DTYPE, &[1, n]), scales.clone());
        dequantize_mxfp8(exec, codes.view(), scales.view(), x.view_mut()).unwrap();
        quantize_mxfp8(exec, x.view(), back.view_mut(), found.view_mut()).unwrap();
        assert_eq!(back.as_slice::<T>().unwrap(), row, "{exec:?} {} {scale}", T::DTYPE);
        assert_eq!(found.as_slice::<E8m0>().unwrap(), scales.as_slice::<E8m0>().unwrap(), "{exec:?} {scale}");
    }
}

#[test]
fn block_formats_are_the_reference_in_every_bit() {
    every_exec(|exec| {
        let mut rng = Rng::new(5);
        for (rows, k) in [(1, 32), (3, 64), (40, 544), (3, 0), (0, 32)] {
            for dtype in FLOATS {
                let x = spread(&mut rng, dtype, rows, k);
                let what = format!("{exec:?} {dtype} {rows}x{k}");
                for to in FP8 {
                    let (mut out, mut scales) = (zeros(to, &[rows, k]), zeros(DType::E8M0, &[rows, k / 32]));
                    quantize_mxfp8(exec, x.view(), out.view_mut(), scales.view_mut()).unwrap();
                    let (want, want_scales) = reference::quantize_mxfp8(x.view(), to).unwrap();
                    assert_same(&format!("{what} {to}"), &numbers(out.view()), &want);
                    assert_same(&format!("{what} {to} scales"), &numbers(scales.view()), &want_scales);
                    let mut back = zeros(dtype, &[rows, k]);
                    dequantize_mxfp8(exec, out.view(), scales.view(), back.view_mut()).unwrap();
                    let want = reference::dequantize(Precision::Naive(dtype), &want, &want_scales, 32, 1.0);
                    assert_same(&format!("{what} {to} back"), &numbers(back.view()), &want);
                }
                let (mut out, mut scales) = (zeros(DType::E2M1x2, &[rows, k / 2]), zeros(DType::E8M0, &[rows, k / 32]));
                quantize_mxfp4(exec, x.view(), out.view_mut(), scales.view_mut()).unwrap();
                let (want, want_scales) = reference::quantize_mxfp4(x.view()).unwrap();
                assert_same(&format!("{what} mxfp4"), &numbers(out.view()), &want);
                assert_same(&format!("{what} mxfp4 scales"), &numbers(scales.view()), &want_scales);
                let mut back = zeros(dtype, &[rows, k]);
                dequantize_mxfp4(exec, out.view(), scales.view(), back.view_mut()).unwrap();
                let want = reference::dequantize(Precision::Naive(dtype), &want, &want_scales, 32, 1.0);
                assert_same(&format!("{what} mxfp4 back"), &numbers(back.view()), &want);

                let scale = nvfp4_scale(exec, x.view()).unwrap();
                let most = numbers(x.view()).into_iter().fold(0.0, |m, x| f64::max(m, x.abs()));
                assert_eq!(scale, (most as f32 / 2688.0).max(f32::MIN_POSITIVE), "{what}");
                let (mut out, mut scales) = (zeros(DType::E2M1x2, &[rows, k / 2]), zeros(DType::E4M3, &[rows, k / 16]));
                quantize_nvfp4(exec, x.view(), scale, out.view_mut(), scales.view_mut()).unwrap();
                let (want, want_scales) = reference::quantize_nvfp4(STEPS, x.view(), scale).unwrap();
                assert_same(&format!("{what} nvfp4"), &numbers(out.view()), &want);
                assert_same(&format!("{what} nvfp4 scales"), &numbers(scales.view()), &want_scales);
                dequantize_nvfp4(exec, out.view(), scales.view(), scale, back.view_mut()).unwrap();
                let want = reference::dequantize(Precision::Naive(dtype), &want, &want_scales, 16, scale);
                assert_same(&format!("{what} nvfp4 back"), &numbers(back.view()), &want);
                // Half of the widest step is a quarter of the number, or of the unit below 1.
                for (i, (x, y)) in numbers(x.view()).into_iter().zip(want).enumerate() {
                    let unit = want_scales[i / 16] * f64::from(scale);
                    let room = if dtype == DType::BF16 { 1.02 } else { 1.003 };
                    let allowed = f64::max(x.abs() * 0.25, unit * 0.25) * room;
                    // A block whose scale is subnormal in e4m3 has a coarser one, and a tiny block none.
                    if want_scales[i / 16] >= 2f64.powi(-6) {
                        assert!((x - y).abs() <= allowed, "{what}: {x} became {y}");
                    }
                }
            }
        }
    });
}

#[test]
fn not_numbers_and_infinities_go_where_the_docs_say() {
    const INF: f32 = f32::INFINITY;
    every_exec(|exec| {
        let mut data = vec![1.0f32; 64];
        (data[3], data[7], data[9]) = (f32::NAN, -2.0, 0.0);
        (data[40], data[41]) = (INF, -INF);
        let x = Tensor::from_f32(DType::F32, &data, &[2, 32]).unwrap();
        for (to, largest) in [(DType::E4M3, 448.0), (DType::E5M2, 57344.0)] {
            let (out, scales) = fp8(exec, x.view(), Block::ROW, to);
            let (out, scales) = (numbers(out.view()), numbers(scales.view()));
            assert_eq!(scales, [f64::from(2.0 / largest as f32), f64::from(f32::MAX / largest as f32)]);
            assert!(out[3].is_nan() && out[7] == -largest && out[9] == 0.0);
            assert_eq!((out[40], out[41], out[42]), (largest, -largest, 0.0));
            let (mut out, mut scales) = (zeros(to, &[2, 32]), zeros(DType::E8M0, &[2, 1]));
            quantize_mxfp8(exec, x.view(), out.view_mut(), scales.view_mut()).unwrap();
            let out = numbers(out.view());
            assert!(out.iter().enumerate().all(|(i, x)| x.is_nan() == (i == 3)));
            assert_eq!((out[40], out[41], out[42]), (largest, -largest, 0.0));
            assert_eq!(scales.as_slice::<E8m0>().unwrap()[1], E8m0(254));
            // A zero scale that is given: 0 * inf is NaN, the rest saturates.
            let (zero, mut out) = (zeros(DType::F32, &[1, 1]), zeros(to, &[2, 32]));
            quantize_fp8_with_scales(exec, x.view(), zero.view(), Block::TENSOR, out.view_mut()).unwrap();
            let out = numbers(out.view());
            assert!(out[9].is_nan() && out[7] == -largest && out[41] == -largest);
        }
        // fp4 has no NaN, so the scale is: everything read back from the block is NaN.
        let (mut out, mut scales, mut back) =
            (zeros(DType::E2M1x2, &[2, 16]), zeros(DType::E8M0, &[2, 1]), zeros(DType::F32, &[2, 32]));
        quantize_mxfp4(exec, x.view(), out.view_mut(), scales.view_mut()).unwrap();
        assert_eq!(scales.as_slice::<E8m0>().unwrap(), [E8m0(255), E8m0(254)]);
        assert_eq!(numbers(out.view())[8], 6.0 * 0.0);
        assert_eq!(numbers(out.view())[40..43], [6.0, -6.0, 0.0]);
        dequantize_mxfp4(exec, out.view(), scales.view(), back.view_mut()).unwrap();
        assert!(numbers(back.view())[..32].iter().all(|x| x.is_nan()));
        let mut scales = zeros(DType::E4M3, &[2, 2]);
        quantize_nvfp4(exec, x.view(), 1.0, out.view_mut(), scales.view_mut()).unwrap();
        let got = numbers(scales.view());
        assert!(got[0].is_nan() && got[1] == 0.171875 && got[2] == 448.0, "{got:?}");
        assert_eq!(numbers(out.view())[40..43], [6.0, -6.0, 0.0]);
        dequantize_nvfp4(exec, out.view(), scales.view(), 1.0, back.view_mut()).unwrap();
        assert!(numbers(back.view())[..16].iter().all(|x| x.is_nan()));
        assert_eq!(numbers(back.view())[40], 6.0 * 448.0);
        assert_eq!(nvfp4_scale(exec, x.view()).unwrap(), f32::MAX / 2688.0);
        assert_eq!(nvfp4_scale(exec, zeros(DType::BF16, &[0, 4]).view()).unwrap(), f32::MIN_POSITIVE);
    });
}

#[test]
fn a_batch_is_its_matrices_and_a_row_stands_alone() {
    every_exec(|exec| {
        let mut rng = Rng::new(6);
        let x = rng.tensor(DType::BF16, &[3, 70, 160]);
        for block in [Block::TENSOR, Block::ROW, Block::GROUP, Block::TILE, ODD] {
            let [row_blocks, column_blocks] = block.counts(70, 160);
            let (mut out, mut scales) =
                (zeros(DType::E4M3, &[3, 70, 160]), zeros(DType::F32, &[3, row_blocks, column_blocks]));
            quantize_fp8(exec, x.view(), block, out.view_mut(), scales.view_mut()).unwrap();
            let mut given = zeros(DType::E4M3, &[3, 70, 160]);
            quantize_fp8_with_scales(exec, x.view(), scales.view(), block, given.view_mut()).unwrap();
            assert_eq!(given.as_slice::<E4m3>().unwrap(), out.as_slice::<E4m3>().unwrap());
            let mut back = zeros(DType::F32, &[3, 70, 160]);
            dequantize_fp8(exec, out.view(), scales.view(), block, back.view_mut()).unwrap();
            for b in 0..3 {
                let one = x.view().select(0, b).unwrap();
                let (want, want_scales) = fp8(exec, one, block, DType::E4M3);
                let got = (out.view().select(0, b).unwrap(), scales.view().select(0, b).unwrap());
                assert_eq!(numbers(got.0), numbers(want.view()), "{exec:?} {block:?} {b}");
                assert_eq!(numbers(got.1), numbers(want_scales.view()), "{exec:?} {block:?} {b}");
                let mut alone = zeros(DType::F32, &[70, 160]);
                dequantize_fp8(exec, got.0, got.1, block, alone.view_mut()).unwrap();
                assert_eq!(numbers(back.view().select(0, b).unwrap()), numbers(alone.view()));
                if block.rows == 1 {
                    let (row, _) = fp8(exec, one.slice(0, 69..70).unwrap(), block, DType::E4M3);
                    assert_eq!(numbers(row.view()), numbers(got.0)[69 * 160..]);
                }
            }
        }
        let (mut out, mut scales) = (zeros(DType::E2M1x2, &[3, 70, 80]), zeros(DType::E4M3, &[3, 70, 10]));
        quantize_nvfp4(exec, x.view(), 0.01, out.view_mut(), scales.view_mut()).unwrap();
        let one = x.view().select(0, 2).unwrap().slice(0, 69..70).unwrap();
        let (mut row, mut row_scales) = (zeros(DType::E2M1x2, &[1, 80]), zeros(DType::E4M3, &[1, 10]));
        quantize_nvfp4(exec, one, 0.01, row.view_mut(), row_scales.view_mut()).unwrap();
        assert_eq!(row.as_slice::<E2m1x2>().unwrap(), &out.as_slice::<E2m1x2>().unwrap()[209 * 80..]);
        assert_eq!(row_scales.as_slice::<E4m3>().unwrap(), &scales.as_slice::<E4m3>().unwrap()[209 * 10..]);
    });
}

#[test]
fn strided_rows_match_and_gaps_stay() {
    every_exec(|exec| {
        let mut rng = Rng::new(7);
        let data = rng.normals(6 * 50);
        let x = TensorRef::strided(&data, &[6, 32], &[50, 1]).unwrap();
        let plain = Tensor::from_f32(DType::F32, &x.to_f32_vec().unwrap(), &[6, 32]).unwrap();
        for block in [Block::ROW, Block { rows: 4, columns: 9 }] {
            let counts = block.counts(6, 32);
            let (mut out, mut scales) = (vec![E4m3(0x55); 6 * 40], vec![-9.0f32; counts[0] * 7]);
            let (out_at, scales_at) = ([40, 1], [7, 1]);
            quantize_fp8(
                exec,
                x,
                block,
                TensorMut::strided(&mut out, &[6, 32], &out_at).unwrap(),
                TensorMut::strided(&mut scales, &counts, &scales_at).unwrap(),
            )
            .unwrap();
            let (want, want_scales) = fp8(exec, plain.view(), block, DType::E4M3);
            let (got, got_scales) = (
                TensorRef::strided(&out, &[6, 32], &out_at).unwrap(),
                TensorRef::strided(&scales, &counts, &scales_at).unwrap(),
            );
            assert_eq!(numbers(got), numbers(want.view()));
            assert_eq!(numbers(got_scales), numbers(want_scales.view()));
            assert!(out.chunks(40).all(|row| row[32..].iter().all(|&x| x == E4m3(0x55))));
            assert!(scales.chunks(7).all(|row| row[counts[1]..].iter().all(|&x| x == -9.0)));
        }
    });
}

#[test]
fn packed_bits_are_the_reference() {
    every_exec(|exec| {
        let mut rng = Rng::new(8);
        // Any byte but 0 is true. The last is long enough for several threads.
        for n in (0usize..40).chain([63, 64, 65, 1000, 600_001]) {
            let x: Vec<Bool> = (0..n).map(|_| Bool((rng.bits() & rng.bits()) as u8)).collect();
            let bits: Vec<bool> = x.iter().map(|x| x.get()).collect();
            for (order, little) in [(BitOrder::Big, false), (BitOrder::Little, true)] {
                let mut out = vec![0xaau8; n.div_ceil(8)];
                let (x, len) = (TensorRef::new(&x, &[n]).unwrap(), out.len());
                packbits(exec, x, order, TensorMut::new(&mut out, &[len]).unwrap()).unwrap();
                assert_eq!(out, reference::packbits(&bits, little), "{exec:?} {n} {order:?}");
            }
        }
        let lens = [0, 3, 8, 9, 0, 400_000, 1, 100_000];
        let indptr = Ragged::from_lens(&lens).unwrap();
        let x: Vec<Bool> = (0..indptr.rows()).map(|_| Bool(rng.below(2) as u8)).collect();
        let packed = packed_indptr(&indptr).unwrap();
        assert_eq!(packed.lens(), [0, 1, 1, 2, 0, 50_000, 1, 12_500]);
        for (order, little) in [(BitOrder::Big, false), (BitOrder::Little, true)] {
            let mut out = zeros(DType::U8, &[packed.rows()]);
            segment_packbits(exec, TensorRef::new(&x, &[x.len()]).unwrap(), &indptr, order, out.view_mut()).unwrap();
            let mut want = Vec::new();
            for s in indptr.indptr().windows(2) {
                let bits: Vec<bool> = x[s[0] as usize..s[1] as usize].iter().map(|x| x.get()).collect();
                want.extend(reference::packbits(&bits, little));
            }
            assert_eq!(out.as_slice::<u8>().unwrap(), want);
        }
    });
}

#[test]
fn bad_arguments_are_named() {
    let exec = &Exec::cpu().unwrap();
    let t = |dtype, shape: &[usize]| zeros(dtype, shape);
    let check = |got: Result<()>, want: &str| assert_eq!(got.unwrap_err().to_string(), want);
    let x = t(DType::F32, &[2, 64]);
    let quantize = |x: &Tensor, block, mut out: Tensor, mut scales: Tensor| {
        quantize_fp8(exec, x.view(), block, out.view_mut(), scales.view_mut())
    };
    let (out, scales) = (t(DType::E4M3, &[2, 64]), t(DType::F32, &[2, 1]));
    check(
        quantize(&x, Block::GROUP, t(DType::E4M3, &[2, 63]), scales.clone()),
        "quantize_fp8: `out` has k=63, but `x` bound k=64",
    );
    check(
        quantize(&x, Block::TENSOR, out.clone(), scales.clone()),
        "quantize_fp8: `scales` has row blocks=2, but `x` bound row blocks=1",
    );
    check(
        quantize(&x, Block { rows: 0, columns: 1 }, out.clone(), scales.clone()),
        "quantize_fp8: `block` is 0 × 1, expected at least 1 × 1",
    );
    check(quantize(&x, Block::GROUP, x.clone(), scales.clone()), "quantize_fp8: `out` is f32, expected e4m3 or e5m2");
    check(
        quantize(&out, Block::GROUP, out.clone(), scales.clone()),
        "quantize_fp8: `x` is e4m3, expected f32, f16 or bf16",
    );
    check(
        quantize(&x, Block::GROUP, out.clone(), t(DType::BF16, &[2, 1])),
        "quantize_fp8: `scales` is bf16, expected f32",
    );
    check(
        dequantize_fp8(exec, out.view(), scales.view(), Block::ROW, out.clone().view_mut()),
        "dequantize_fp8: `out` is e4m3, expected f32, f16 or bf16",
    );
    check(
        quantize_mxfp8(exec, t(DType::F32, &[2, 48]).view(), out.clone().view_mut(), scales.clone().view_mut()),
        "quantize_mxfp8: `x` is 48 wide, expected a multiple of 32",
    );
    check(
        quantize_mxfp8(exec, x.view(), out.clone().view_mut(), t(DType::E8M0, &[2, 3]).view_mut()),
        "quantize_mxfp8: `scales` has k / 32=3, but `x` bound k / 32=2",
    );
    check(
        quantize_mxfp4(exec, x.view(), t(DType::U8, &[2, 32]).view_mut(), t(DType::E8M0, &[2, 2]).view_mut()),
        "quantize_mxfp4: `out` is u8, expected e2m1x2",
    );
    check(
        dequantize_mxfp4(exec, t(DType::E2M1x2, &[2, 31]).view(), t(DType::E8M0, &[2, 2]).view(), x.clone().view_mut()),
        "dequantize_mxfp4: `x` has k / 2=31, but `out` bound k / 2=32",
    );
    for (scale, got) in [(0.0, "0"), (-1.0, "-1"), (f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
        let (mut codes, mut scales) = (t(DType::E2M1x2, &[2, 32]), t(DType::E4M3, &[2, 4]));
        check(
            quantize_nvfp4(exec, x.view(), scale, codes.view_mut(), scales.view_mut()),
            &format!("quantize_nvfp4: `scale` is {got}, expected a finite number above 0"),
        );
    }
    check(nvfp4_scale(exec, out.view()).map(drop), "nvfp4_scale: `x` is e4m3, expected f32, f16 or bf16");
    let bits = t(DType::Bool, &[9]);
    check(
        packbits(exec, bits.view(), BitOrder::Big, t(DType::U8, &[3]).view_mut()),
        "packbits: `out` has ⌈n / 8⌉=3, but `x` bound ⌈n / 8⌉=2",
    );
    check(
        packbits(exec, t(DType::U8, &[9]).view(), BitOrder::Big, t(DType::U8, &[2]).view_mut()),
        "packbits: `x` is u8, expected bool",
    );
    check(
        segment_packbits(
            exec,
            bits.view(),
            &Ragged::from_lens(&[4, 4]).unwrap(),
            BitOrder::Big,
            t(DType::U8, &[2]).view_mut(),
        ),
        "segment_packbits: `x` has n=9, but `indptr` bound n=8",
    );
}
