use fir::exec::Level;
use fir::gemm::{
    BlockFormat, BlockWeights, GemmAddNormArgs, block_gemm, dequantize_blocks, gemm, gemm_add, gemm_add_rms_norm,
    gemm_bias, gemm_silu_mul,
};
use fir::reference::{Precision, gemm as reference};
use fir::testing::Rng;
use fir::{DType, Exec, Tensor, TensorMut, TensorRef, activation, norm};
use half::f16;
use proptest::prelude::*;

use crate::support::{FLOATS, assert_matches, every_exec};

/// `[blocks, bytes]` of every format, and the f32 values that the `gguf` package gives them; see `make_blocks.py`.
const GOLDEN: &[u8] = include_bytes!("../../golden/blocks.safetensors");

/// Where blocks hold f16 numbers.
fn halves(format: BlockFormat) -> &'static [usize] {
    match format.name() {
        "Q4_1" | "Q5_1" | "Q4_K" | "Q5_K" => &[0, 2],
        "Q2_K" => &[80, 82],
        "Q3_K" => &[108],
        "Q6_K" => &[208],
        _ => &[0],
    }
}

/// Random codes and scales; f16 numbers of both signs around 0.01.
fn random_blocks(rng: &mut Rng, format: BlockFormat, n: usize, k: usize) -> Vec<u8> {
    let mut data: Vec<u8> = (0..n * k / format.elements() * format.bytes()).map(|_| rng.bits() as u8).collect();
    for block in data.chunks_exact_mut(format.bytes()) {
        for &at in halves(format) {
            block[at..at + 2].copy_from_slice(&f16::from_f32(rng.normal() * 0.01).to_le_bytes());
        }
    }
    data
}

fn product(exec: &Exec, x: TensorRef<'_>, w: &BlockWeights, out: DType) -> Tensor {
    let mut out = Tensor::zeros(out, &[x.shape()[0], w.shape()[0]]).unwrap();
    block_gemm(exec, x, w, out.view_mut()).unwrap();
    out
}

/// Bits of f32 results; every NaN counts as the same.
fn bits(out: &Tensor) -> Vec<u32> {
    out.as_slice::<f32>().unwrap().iter().map(|x| if x.is_nan() { !0 } else { x.to_bits() }).collect()
}

#[test]
fn dequantized_blocks_are_the_golden_ones_bit_for_bit() {
    let golden = safetensors::SafeTensors::deserialize(GOLDEN).unwrap();
    every_exec(|exec| {
        for format in BlockFormat::ALL {
            let blocks = golden.tensor(&format!("{format}.blocks")).unwrap();
            let want = golden.tensor(&format!("{format}.values")).unwrap();
            let want: Vec<f32> =
                want.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
            let rows = blocks.shape()[0];
            assert_eq!(blocks.shape()[1], format.bytes());
            let mut out = Tensor::zeros(DType::F32, &[rows, format.elements()]).unwrap();
            dequantize_blocks(exec, format, blocks.data(), out.view_mut()).unwrap();
            let got = out.as_slice::<f32>().unwrap();
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                assert_eq!(got.to_bits(), want.to_bits(), "{format} element {i}: {got}, want {want}");
            }
            let exact = reference::dequantize_blocks(Precision::Naive(DType::F32), format, blocks.data());
            assert!(exact.iter().zip(&want).all(|(&e, &w)| e as f32 == w), "{format}");
            for dtype in FLOATS {
                let mut out = Tensor::zeros(dtype, &[rows, format.elements()]).unwrap();
                dequantize_blocks(exec, format, blocks.data(), out.view_mut()).unwrap();
                let want = Tensor::from_f32(dtype, &want, &[rows, format.elements()]).unwrap();
                assert_eq!(out.view().to_f32_vec().unwrap(), want.view().to_f32_vec().unwrap(), "{format} {dtype}");
            }
        }
    });
}

#[test]
fn rows_of_many_blocks_dequantize_in_order() {
    let exec = Exec::cpu().unwrap();
    let mut rng = Rng::new(1);
    for format in BlockFormat::ALL {
        let (rows, k) = (70, 3 * format.elements());
        let data = random_blocks(&mut rng, format, rows, k);
        let mut out = vec![-9.5f32; rows * (k + 5)];
        let view = TensorMut::strided(&mut out, &[rows, k], &[k + 5, 1]).unwrap();
        dequantize_blocks(&exec, format, &data, view).unwrap();
        let want = reference::dequantize_blocks(Precision::Naive(DType::F32), format, &data);
        for (got, want) in out.chunks_exact(k + 5).zip(want.chunks_exact(k)) {
            assert!(got.iter().zip(want).all(|(&g, &w)| f64::from(g) == w));
            assert_eq!(got[k..], [-9.5; 5]);
        }
    }
}

#[test]
fn matches_reference_for_every_format_and_number_of_rows() {
    let mut rng = Rng::new(2);
    // From one block to several superblocks and, for blocks of 32, part of one.
    let cases: Vec<(usize, usize, usize)> = [1, 2, 3, 5, 8, 16, 17, 40, 100]
        .into_iter()
        .enumerate()
        .map(|(i, m)| (m, [1, 16, 37, 50, 67][i % 5], [1, 3, 2, 4][i % 4]))
        .collect();
    let data: Vec<_> = BlockFormat::ALL
        .into_iter()
        .flat_map(|format| cases.iter().map(move |&case| (format, case)))
        .enumerate()
        .map(|(i, (format, (m, n, blocks)))| {
            let k = if format.elements() == 32 { [32, 256, 288, 736][blocks - 1] } else { 256 * blocks };
            let x = rng.tensor(FLOATS[i % 3], &[m, k]);
            let data = random_blocks(&mut rng, format, n, k);
            let exact = reference::block_gemm(Precision::Exact, x.view(), format, &data, n).unwrap();
            let naive = reference::block_gemm(Precision::Naive(FLOATS[i / 3 % 3]), x.view(), format, &data, n).unwrap();
            (format, x, n, FLOATS[i / 3 % 3], data, exact, naive)
        })
        .collect();
    every_exec(|exec| {
        for (format, x, n, dtype, data, exact, naive) in &data {
            let w = BlockWeights::pack(exec, *format, data, *n, x.shape()[1]).unwrap();
            let out = product(exec, x.view(), &w, *dtype);
            let what = format!("{exec:?} {format} {:?} n {n} {} to {dtype}", x.shape(), x.dtype());
            assert_matches(&what, out.view(), *n, |p| {
                Ok(if p == Precision::Exact { exact.clone() } else { naive.clone() })
            });
        }
    });
}

/// What is done to sums on their way out gives the bits that it gives afterwards, unless these are rounded in between.
#[test]
fn epilogues_are_what_they_are_after_the_product() {
    let mut rng = Rng::new(10);
    // Three panels to a half, of which tiles take two at a time.
    let (n, k) = (48, 512);
    for (i, format) in BlockFormat::ALL.into_iter().enumerate() {
        let data = random_blocks(&mut rng, format, 2 * n, k);
        for m in [1, 7, 20, 50, 75, 130] {
            let x = rng.tensor(FLOATS[i % 3], &[m, k]);
            let (bias, start) = (rng.tensor(FLOATS[i % 3], &[2 * n]), rng.tensor(DType::F32, &[m, 2 * n]));
            let weight = rng.tensor(DType::F32, &[2 * n]);
            every_exec(|exec| {
                let w = BlockWeights::pack(exec, format, &data, 2 * n, k).unwrap();
                let sums = product(exec, x.view(), &w, DType::F32);
                let fresh = || Tensor::zeros(DType::F32, &[m, 2 * n]).unwrap();
                let mut out = fresh();
                let what = format!("{exec:?} {format} {m} rows");
                gemm(exec, x.view(), &w, out.view_mut()).unwrap();
                assert_eq!(bits(&out), bits(&sums), "{what}");

                let mut half = Tensor::zeros(DType::F32, &[m, n]).unwrap();
                let gated = gemm_silu_mul(exec, x.view(), &w, half.view_mut());
                if !matches!(exec, Exec::Cpu(_)) {
                    let want =
                        "gemm_silu_mul: `w` is blocks, whose products have no epilogue on a CUDA device, expected rows";
                    return assert_eq!(gated.unwrap_err().to_string(), want);
                }
                gated.unwrap();
                let mut want = Tensor::zeros(DType::F32, &[m, n]).unwrap();
                activation::silu_and_mul(exec, sums.view(), want.view_mut()).unwrap();
                assert_eq!(bits(&half), bits(&want), "{what}, gated");

                gemm_bias(exec, x.view(), &w, bias.view(), out.view_mut()).unwrap();
                let plus = |other: &[f32]| -> Vec<u32> {
                    let sums = sums.as_slice::<f32>().unwrap();
                    sums.iter().zip(other.iter().cycle()).map(|(a, b)| (a + b).to_bits()).collect()
                };
                assert_eq!(bits(&out), plus(&bias.view().to_f32_vec().unwrap()), "{what} and a bias");

                let added = plus(start.as_slice().unwrap());
                let copy = || Tensor::from_slice(start.as_slice::<f32>().unwrap(), &[m, 2 * n]).unwrap();
                let mut residual = copy();
                gemm_add(exec, x.view(), &w, residual.view_mut()).unwrap();
                assert_eq!(bits(&residual), added, "{what}, added");
                norm::rms_norm(exec, residual.view(), weight.view(), 1e-5, out.view_mut()).unwrap();
                let (mut residual, mut normed) = (copy(), fresh());
                let args = GemmAddNormArgs {
                    x: x.view(),
                    w: (&w).into(),
                    residual: residual.view_mut(),
                    weight: weight.view(),
                    eps: 1e-5,
                    out: normed.view_mut(),
                };
                gemm_add_rms_norm(exec, args).unwrap();
                assert_eq!((bits(&residual), bits(&normed)), (added, bits(&out)), "{what}, added, and the norm");
            });
        }
    }
}

/// Columns that fill no panel, and outputs of 16 bits, which are rounded once.
#[test]
fn epilogues_round_once_and_end_where_columns_do() {
    let mut rng = Rng::new(11);
    let (n, k) = (37, 512);
    for format in [BlockFormat::Q4_1, BlockFormat::Q8_0, BlockFormat::Q6K] {
        let data = random_blocks(&mut rng, format, n, k);
        for (m, dtype) in [1, 20, 50, 75].into_iter().flat_map(|m| FLOATS.map(|dtype| (m, dtype))) {
            let (x, bias, start) =
                (rng.tensor(DType::BF16, &[m, k]), rng.tensor(dtype, &[n]), rng.tensor(dtype, &[m, n]));
            every_exec(|exec| {
                let Exec::Cpu(_) = exec else { return };
                let w = BlockWeights::pack(exec, format, &data, n, k).unwrap();
                let sums = product(exec, x.view(), &w, DType::F32);
                let plus = |other: &Tensor| {
                    let (sums, other) = (sums.as_slice::<f32>().unwrap(), other.view().to_f32_vec().unwrap());
                    let all: Vec<f32> = sums.iter().zip(other.iter().cycle()).map(|(a, b)| a + b).collect();
                    Tensor::from_f32(dtype, &all, &[m, n]).unwrap().view().to_f32_vec().unwrap()
                };
                let what = format!("{exec:?} {format} {m} rows to {dtype}");
                let mut out = Tensor::zeros(dtype, &[m, n]).unwrap();
                gemm_bias(exec, x.view(), &w, bias.view(), out.view_mut()).unwrap();
                assert_eq!(out.view().to_f32_vec().unwrap(), plus(&bias), "{what} and a bias");
                let mut out = Tensor::from_f32(dtype, &start.view().to_f32_vec().unwrap(), &[m, n]).unwrap();
                gemm_add(exec, x.view(), &w, out.view_mut()).unwrap();
                assert_eq!(out.view().to_f32_vec().unwrap(), plus(&start), "{what}, added");
            });
        }
    }
}

#[test]
fn blocks_that_an_epilogue_cannot_take_are_refused() {
    let exec = Exec::cpu().unwrap();
    let w = BlockWeights::pack(&exec, BlockFormat::Q4_0, &[0; 80 * 18], 80, 32).unwrap();
    let t = |shape: &[usize]| Tensor::zeros(DType::F32, shape).unwrap();
    let refused = |k: usize, columns: usize| {
        let mut out = t(&[2, columns]);
        gemm_silu_mul(&exec, t(&[2, k]).view(), &w, out.view_mut()).unwrap_err().to_string()
    };
    // Halves of 40 rows do not begin with a panel.
    let want = "gemm_silu_mul: `w` is 80 rows, expected 2 * n, n a multiple of 16, as they are packed";
    assert_eq!(refused(32, 40), want);
    assert_eq!(refused(32, 39), "gemm_silu_mul: `w` is 80 rows, expected 2 * 39");
    assert_eq!(refused(31, 40), "gemm_silu_mul: `w` has k=32, but `x` bound k=31");
    let mut out = t(&[2, 79]);
    let err = gemm_add(&exec, t(&[2, 32]).view(), &w, out.view_mut()).unwrap_err();
    assert_eq!(err.to_string(), "gemm_add: `residual` has n=79, but `w` bound n=80");
}

/// A few elements far over the others, in some rows too many of them: at every level, device and number of rows the same bits.
#[test]
fn large_elements_are_multiplied_on_their_own() {
    let mut rng = Rng::new(8);
    for (i, format) in BlockFormat::ALL.into_iter().enumerate() {
        let (n, k) = (37, if format.elements() == 32 { 736 } else { 768 });
        let data = random_blocks(&mut rng, format, n, k);
        for m in [1, 2, 7, 20, 50, 75, 130] {
            let mut x = rng.normals(m * k);
            for cell in x.chunks_mut(k).flat_map(|row| row.chunks_mut(256)) {
                for _ in 0..rng.below(7) {
                    cell[rng.below(cell.len())] = [20.0, -35.0, 700.0, -1e5][rng.below(4)];
                }
            }
            let x = Tensor::from_f32(FLOATS[i % 3], &x, &[m, k]).unwrap();
            let portable = Exec::cpu_with(Level::Portable, 1).unwrap();
            let w = BlockWeights::pack(&portable, format, &data, n, k).unwrap();
            let want = product(&portable, x.view(), &w, DType::F32);
            assert_matches(&format!("{format} {m} rows"), want.view(), n, |p| {
                reference::block_gemm(p, x.view(), format, &data, n)
            });
            every_exec(|exec| {
                let w = BlockWeights::pack(exec, format, &data, n, k).unwrap();
                assert_eq!(bits(&product(exec, x.view(), &w, DType::F32)), bits(&want), "{exec:?} {format} {m} rows");
            });
        }
    }
}

/// What one element of a thousand times the others costs these: nothing. Without it being taken out all of them would be 0.
#[test]
fn a_large_element_does_not_spoil_the_others() {
    let mut rng = Rng::new(9);
    let (n, k) = (16, 256);
    let data = random_blocks(&mut rng, BlockFormat::Q4_1, n, k);
    let weights = reference::product_weights(Precision::Exact, BlockFormat::Q4_1, &data, k);
    let plain = rng.normals(k);
    let mut large = plain.clone();
    large[77] = 3000.0;
    every_exec(|exec| {
        let w = BlockWeights::pack(exec, BlockFormat::Q4_1, &data, n, k).unwrap();
        let error = |x: &[f32]| {
            let out = product(exec, TensorRef::new(x, &[1, k]).unwrap(), &w, DType::F32);
            let exact = weights.chunks(k).map(|w| w.iter().zip(x).map(|(w, &x)| w * f64::from(x)).sum::<f64>());
            let errors =
                out.as_slice::<f32>().unwrap().iter().zip(exact).map(|(&got, want)| (f64::from(got) - want).abs());
            errors.fold(0.0, f64::max)
        };
        let (plain, large) = (error(&plain), error(&large));
        assert!(large < 2.0 * plain, "{exec:?}: {large} beside {plain}");
    });
}

/// More panels than a GPU has blocks at a time, and more cells than a block has warps.
#[test]
fn wide_and_deep_weights_give_every_device_the_same_bits() {
    let mut rng = Rng::new(6);
    let (n, k) = (4300, 2304);
    for format in [BlockFormat::Q4_0, BlockFormat::Q4K, BlockFormat::Q8_0] {
        let data = random_blocks(&mut rng, format, n, k);
        for m in [3, 9] {
            let x = rng.tensor(DType::BF16, &[m, k]);
            let portable = Exec::cpu_with(Level::Portable, 1).unwrap();
            let w = BlockWeights::pack(&portable, format, &data, n, k).unwrap();
            let want = bits(&product(&portable, x.view(), &w, DType::F32));
            every_exec(|exec| {
                let w = BlockWeights::pack(exec, format, &data, n, k).unwrap();
                assert_eq!(bits(&product(exec, x.view(), &w, DType::F32)), want, "{exec:?} {format} {m} rows");
            });
        }
    }
}

#[test]
fn the_packed_form_is_hardly_larger_than_the_file() {
    let exec = Exec::cpu().unwrap();
    for format in BlockFormat::ALL {
        let data = vec![0; 32 * 2048 / format.elements() * format.bytes()];
        let w = BlockWeights::pack(&exec, format, &data, 32, 2048).unwrap();
        assert_eq!((w.shape(), w.format()), ([32, 2048], format));
        assert!(w.bytes() >= data.len() && w.bytes() * 1000 <= data.len() * 1037, "{format}: {}", w.bytes());
        if format.elements() == 32 {
            // A step to 256 weights, of two bytes.
            let steps = if format == BlockFormat::Q8_0 { 0 } else { 2 * 32 * 2048 / 256 };
            assert_eq!(w.bytes(), data.len() + steps, "{format}");
        }
    }
}

/// Scales in steps: 11 bits of f16 stay if they are not far below the largest, and what is lost of others is bounded.
#[test]
fn weights_of_products_are_those_of_the_file_or_near() {
    let mut rng = Rng::new(8);
    for format in BlockFormat::ALL {
        let (n, k) = (40, 800 / format.elements() * format.elements() + format.elements());
        let mut data = random_blocks(&mut rng, format, n, k);
        let weights = |data: &[u8]| {
            let product = reference::product_weights(Precision::Exact, format, data, k);
            (product, reference::dequantize_blocks(Precision::Exact, format, data))
        };
        let (product, file) = weights(&data);
        let bits = match format.name() {
            "Q4_0" | "Q4_1" => 4,
            "Q5_0" | "Q5_1" => 5,
            _ => {
                assert_eq!(product, file, "{format}");
                continue;
            }
        };
        let levels = match halves(format).len() == 1 {
            true => [-f64::from(1 << (bits - 1)), f64::from((1 << (bits - 1)) - 1)],
            false => [0.0, f64::from((1 << bits) - 1)],
        };
        let (mut lost, half) = (0, |b: &[u8], at: usize| f16::from_le_bytes([b[at], b[at + 1]]).to_f64());
        for (r, row) in data.chunks_exact(data.len() / n).enumerate() {
            for (c, cell) in row.chunks(8 * format.bytes()).enumerate() {
                let most = cell.chunks_exact(format.bytes()).fold(0f64, |most, block| {
                    let m = if halves(format).len() > 1 { half(block, 2) } else { 0.0 };
                    levels.iter().fold(most, |most, q| most.max((half(block, 0) * q + m).abs()))
                });
                for e in r * k + 256 * c..(r * k + 256 * (c + 1)).min((r + 1) * k) {
                    let off = (product[e] - file[e]).abs();
                    assert!(off <= most * 1e-3, "{format} {e}: {} for {}, of {most}", product[e], file[e]);
                    lost += usize::from(off > 0.0);
                }
            }
        }
        assert!(lost > 0, "{format}: nothing was rounded, so nothing was shown");
        // Like scales, as those of a real model's blocks: 1 to 1.5, and minima of half their range.
        for block in data.chunks_exact_mut(format.bytes()) {
            let d = f16::from_f32(0.01 + rng.below(100) as f32 * 5e-5);
            block[..2].copy_from_slice(&d.to_le_bytes());
            if halves(format).len() > 1 {
                let m = f16::from_f32(d.to_f32() * -0.5 * levels[1] as f32);
                block[2..4].copy_from_slice(&m.to_le_bytes());
            }
        }
        let (product, file) = weights(&data);
        if bits == 4 {
            assert_eq!(product, file, "{format}");
        }
    }
}

/// Largest codes, scales and activations: where an integer sum would wrap or saturate first.
#[test]
fn extreme_codes_and_scales_match_the_reference() {
    let mut rng = Rng::new(3);
    for fill in [0x00, 0xff, 0x80, 0x7f] {
        // One and two rows, which some levels add up by themselves, nine, and as many as go through tiles.
        for (format, m) in BlockFormat::ALL.into_iter().flat_map(|format| [1, 2, 9, 66].map(|m| (format, m))) {
            let (n, k) = (16, 512);
            let mut data = vec![fill; n * k / format.elements() * format.bytes()];
            for block in data.chunks_exact_mut(format.bytes()) {
                for &at in halves(format) {
                    // The largest, the least subnormal, negative ones.
                    let bits = [0x7bffu16, 0xfbff, 0x0001, 0x83ff, 0x3c00][rng.below(5)];
                    block[at..at + 2].copy_from_slice(&bits.to_le_bytes());
                }
            }
            let sign = |i: usize| if i / k % 3 == 1 && i % 2 == 1 { -1.0 } else { 1.0 };
            let x: Vec<f32> = (0..m * k).map(|i| sign(i) * [1.0, -1.0][i / k % 2]).collect();
            let x = Tensor::from_slice(&x, &[m, k]).unwrap();
            every_exec(|exec| {
                let w = BlockWeights::pack(exec, format, &data, n, k).unwrap();
                let out = product(exec, x.view(), &w, DType::F32);
                assert_matches(&format!("{exec:?} {format} of {fill:#x}, {m} rows"), out.view(), n, |p| {
                    reference::block_gemm(p, x.view(), format, &data, n)
                });
            });
        }
    }
}

#[test]
fn what_is_not_finite_spoils_its_row_or_column_alone() {
    let mut rng = Rng::new(4);
    for (format, m) in BlockFormat::ALL.into_iter().flat_map(|format| [(format, 11), (format, 70)]) {
        let (n, k) = (20, 512);
        let mut x = rng.normals(m * k);
        let mut data = random_blocks(&mut rng, format, n, k);
        let clean =
            reference::block_gemm(Precision::Exact, TensorRef::new(&x, &[m, k]).unwrap(), format, &data, n).unwrap();
        x[3 * k + 5] = f32::NAN;
        x[7 * k + 500] = f32::INFINITY;
        let row_bytes = data.len() / n;
        for (j, bits) in [(2, 0x7c00u16), (17, 0x7e00)] {
            data[j * row_bytes + halves(format)[0]..][..2].copy_from_slice(&bits.to_le_bytes());
        }
        every_exec(|exec| {
            let w = BlockWeights::pack(exec, format, &data, n, k).unwrap();
            let out = product(exec, TensorRef::new(&x, &[m, k]).unwrap(), &w, DType::F32);
            for (i, (&got, &clean)) in out.as_slice::<f32>().unwrap().iter().zip(&clean).enumerate() {
                let (row, column) = (i / n, i % n);
                match (row, column) {
                    (3 | 7, _) => assert!(got.is_nan(), "{format} [{row}, {column}] = {got}"),
                    (_, 2 | 17) => assert!(!got.is_finite(), "{format} [{row}, {column}] = {got}"),
                    _ => assert!((f64::from(got) - clean).abs() < 1e-3 * (1.0 + clean.abs()), "{format} {got} {clean}"),
                }
            }
        });
    }
}

#[test]
fn tiny_and_huge_activations_keep_their_definition() {
    let mut rng = Rng::new(5);
    // Subnormal scales, rounded by as much as a third; zeros; the largest numbers.
    for x in [190.0 * 1e-45, 60.0 * 1e-45, 1e-40, 0.0, -0.0, 1e38, f32::MAX] {
        let x: Vec<f32> = (0..3 * 256).map(|_| x * (rng.below(3) as f32 - 1.0)).collect();
        let x = Tensor::from_slice(&x, &[3, 256]).unwrap();
        let data = random_blocks(&mut rng, BlockFormat::Q6K, 5, 256);
        every_exec(|exec| {
            let w = BlockWeights::pack(exec, BlockFormat::Q6K, &data, 5, 256).unwrap();
            let out = product(exec, x.view(), &w, DType::F32);
            let want = reference::block_gemm(Precision::Exact, x.view(), BlockFormat::Q6K, &data, 5).unwrap();
            for (&got, want) in out.as_slice::<f32>().unwrap().iter().zip(want) {
                let want = want as f32;
                let near = (got - want).abs() <= want.abs() * 1e-6 + 1e-44;
                assert!(near || got == want, "{exec:?}: {got}, want {want}");
            }
        });
    }
}

#[test]
fn rows_apart_match_reference_and_gaps_stay() {
    let mut rng = Rng::new(6);
    let data = random_blocks(&mut rng, BlockFormat::Q5_0, 35, 64);
    let x = rng.normals(12 * 70);
    let x = TensorRef::strided(&x, &[12, 64], &[70, 1]).unwrap();
    every_exec(|exec| {
        let w = BlockWeights::pack(exec, BlockFormat::Q5_0, &data, 35, 64).unwrap();
        let mut out = vec![-9.5f32; 12 * 40];
        block_gemm(exec, x, &w, TensorMut::strided(&mut out, &[12, 35], &[40, 1]).unwrap()).unwrap();
        let got = TensorRef::strided(&out, &[12, 35], &[40, 1]).unwrap();
        assert_matches(&format!("{exec:?}"), got, 35, |p| reference::block_gemm(p, x, BlockFormat::Q5_0, &data, 35));
        assert_eq!(out.iter().filter(|&&x| x == -9.5).count(), 12 * 5);
    });
}

#[test]
fn empty_sides_give_zeros_or_nothing() {
    let mut rng = Rng::new(7);
    let x = rng.tensor(DType::BF16, &[70, 256]);
    let all = BlockFormat::ALL.map(|format| (format, random_blocks(&mut rng, format, 100, 256)));
    every_exec(|exec| {
        for (m, n, k) in [(0, 3, 256), (3, 0, 256), (3, 4, 0), (0, 0, 0), (30, 100, 0), (70, 100, 0)] {
            for (format, data) in &all {
                // What a product leaves in scratch memory is not the next one's.
                let format = *format;
                product(exec, x.view(), &BlockWeights::pack(exec, format, data, 100, 256).unwrap(), DType::F32);
                let data = vec![0; n * k / format.elements() * format.bytes()];
                let w = BlockWeights::pack(exec, format, &data, n, k).unwrap();
                let x = Tensor::zeros(DType::BF16, &[m, k]).unwrap();
                let mut out = Tensor::from_f32(DType::F32, &vec![5.0; m * n], &[m, n]).unwrap();
                block_gemm(exec, x.view(), &w, out.view_mut()).unwrap();
                assert_eq!(out.as_slice::<f32>().unwrap(), vec![0.0; m * n]);
            }
        }
        // More rows than memory holds, and no column: nothing to do, and nothing to allocate.
        let w = BlockWeights::pack(exec, BlockFormat::Q8_0, &[], 0, 1 << 60).unwrap();
        assert_eq!(w.bytes(), 0);
        let w = BlockWeights::pack(exec, BlockFormat::Q8_0, &[], 0, 32).unwrap();
        let row = [half::bf16::ONE; 32];
        let x = TensorRef::strided(&row, &[1 << 40, 32], &[0, 1]).unwrap();
        block_gemm(exec, x, &w, TensorMut::new::<f32>(&mut [], &[1 << 40, 0]).unwrap()).unwrap();
    });
}

#[test]
fn formats_have_names_and_numbers() {
    for format in BlockFormat::ALL {
        assert_eq!(format.to_string().parse::<BlockFormat>(), Ok(format));
        assert_eq!(BlockFormat::from_gguf(format.gguf()), Ok(format));
    }
    let err = BlockFormat::from_gguf(9).unwrap_err().to_string();
    assert!(err.starts_with("BlockFormat: `id` is 9, expected 2 (Q4_0), 3 (Q4_1)"), "{err}");
    let err = "q4_k".parse::<BlockFormat>().unwrap_err().to_string();
    assert!(err.starts_with("BlockFormat: `name` is \"q4_k\", expected Q4_0, Q4_1"), "{err}");
}

#[test]
fn bad_arguments_are_named() {
    let exec = &Exec::cpu().unwrap();
    let pack = |format, bytes: usize, n, k| match BlockWeights::pack(exec, format, &vec![0; bytes], n, k) {
        Ok(_) => panic!("accepted"),
        Err(e) => e.to_string(),
    };
    use BlockFormat::{Q4_0, Q4K};
    assert_eq!(pack(Q4K, 144, 1, 128), "BlockWeights::pack: `k` is 128, expected a multiple of 256, the block of Q4_K");
    let want = "BlockWeights::pack: `data.len()` is 143, expected 1 rows of 144 bytes (256 elements of Q4_K)";
    assert_eq!(pack(Q4K, 143, 1, 256), want);
    let huge = usize::MAX / 32 * 32;
    assert!(pack(Q4_0, 18, usize::MAX, 32).contains("`data.len()` is 18, expected 18446744073709551615 rows"));
    assert!(pack(Q4_0, 18, 2, huge).contains("`data.len()` is 18"));
    assert!(pack(BlockFormat::Q8_0, 18, 2, huge).contains("a row of Q8_0 that memory can hold"));

    let w = BlockWeights::pack(exec, Q4_0, &[0; 3 * 18], 3, 32).unwrap();
    assert_eq!(format!("{w:?}"), "BlockWeights { format: Q4_0, shape: [3, 32] }");
    let check = |x: (DType, &[usize]), out: (DType, &[usize]), want: &str| {
        let t = |(dtype, shape)| Tensor::zeros(dtype, shape).unwrap();
        assert_eq!(block_gemm(exec, t(x).view(), &w, t(out).view_mut()).unwrap_err().to_string(), want);
    };
    use DType::{F32, I32};
    check((F32, &[2, 31]), (F32, &[2, 3]), "block_gemm: `w` has k=32, but `x` bound k=31");
    check((F32, &[2, 32]), (F32, &[2, 4]), "block_gemm: `out` has n=4, but `w` bound n=3");
    check((F32, &[2, 32]), (F32, &[3, 3]), "block_gemm: `out` has m=3, but `x` bound m=2");
    check((F32, &[32]), (F32, &[2, 3]), "block_gemm: `x` has 1 axes, expected 2 [m, k]");
    check((I32, &[2, 32]), (F32, &[2, 3]), "block_gemm: `x` is i32, expected f32, f16 or bf16");
    check((F32, &[2, 32]), (I32, &[2, 3]), "block_gemm: `out` is i32, expected f32, f16 or bf16");

    let check = |bytes: usize, out: (DType, &[usize]), want: &str| {
        let mut out = Tensor::zeros(out.0, out.1).unwrap();
        let err = dequantize_blocks(exec, Q4_0, &vec![0; bytes], out.view_mut()).unwrap_err();
        assert_eq!(err.to_string(), want);
    };
    check(18, (F32, &[1, 33]), "dequantize_blocks: `k` is 33, expected a multiple of 32, the block of Q4_0");
    let want = "dequantize_blocks: `data.len()` is 18, expected 2 rows of 18 bytes (32 elements of Q4_0)";
    check(18, (F32, &[2, 32]), want);
    check(18, (F32, &[32]), "dequantize_blocks: `out` has 1 axes, expected 2 [rows, k]");
    check(18, (I32, &[1, 32]), "dequantize_blocks: `out` is i32, expected f32, f16 or bf16");
}

#[test]
fn rows_have_the_same_bits_among_hundreds() {
    let mut rng = Rng::new(11);
    use BlockFormat::{Q4_1, Q5_0, Q6K, Q8_0};
    for (format, n, k) in [(Q4_1, 96, 576), (Q5_0, 50, 928), (Q8_0, 33, 800), (Q6K, 40, 512)] {
        let data = random_blocks(&mut rng, format, n, k);
        for (level, dtype) in Level::available().into_iter().flat_map(|l| FLOATS.map(|d| (l, d))) {
            let (exec, x) = (Exec::cpu_with(level, 2).unwrap(), rng.tensor(dtype, &[600, k]));
            let w = BlockWeights::pack(&exec, format, &data, n, k).unwrap();
            let all = bits(&product(&exec, x.view(), &w, DType::F32));
            for (from, to) in [(0, 512), (124, 600), (512, 600), (590, 600)] {
                let some = bits(&product(&exec, x.view().slice(0, from..to).unwrap(), &w, DType::F32));
                let differ = some.iter().zip(&all[from * n..]).filter(|(a, b)| a != b).count();
                assert_eq!(differ, 0, "{level} {format} {dtype} {n} x {k}: rows {from}..{to}");
            }
        }
    }
}

/// More activations than stay in a core's cache are multiplied cell by cell, by two panels at a time: here by five.
#[test]
fn many_deep_rows_have_the_bits_of_few() {
    let mut rng = Rng::new(12);
    for format in [BlockFormat::Q4_1, BlockFormat::Q8_0, BlockFormat::Q4K, BlockFormat::Q6K] {
        let (n, k) = (80, 1792);
        let (x, data) = (rng.tensor(DType::BF16, &[512, k]), random_blocks(&mut rng, format, n, k));
        for level in Level::available() {
            let exec = Exec::cpu_with(level, 1).unwrap();
            let w = BlockWeights::pack(&exec, format, &data, n, k).unwrap();
            let all = bits(&product(&exec, x.view(), &w, DType::F32));
            for (from, to) in [(0, 10), (500, 512)] {
                let some = bits(&product(&exec, x.view().slice(0, from..to).unwrap(), &w, DType::F32));
                assert_eq!(some, all[from * n..to * n], "{level} {format}: rows {from}..{to}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn every_level_batch_and_thread_count_gives_the_same_bits(
        m in 1usize..130, n in 1usize..100, blocks in 1usize..30, pick in any::<u64>(), threads in 1usize..5,
        format in prop::sample::select(&BlockFormat::ALL[..]), dtype in prop::sample::select(&FLOATS[..]),
    ) {
        let mut rng = Rng::new(pick);
        let k = if format.elements() == 32 { 32 * blocks } else { 256 * (1 + blocks / 8) };
        let (x, data) = (rng.tensor(dtype, &[m, k]), random_blocks(&mut rng, format, n, k));
        let portable = Exec::cpu_with(Level::Portable, 1).unwrap();
        let w = BlockWeights::pack(&portable, format, &data, n, k).unwrap();
        let want = bits(&product(&portable, x.view(), &w, DType::F32));
        let row = rng.below(m);
        let alone = x.view().slice(0, row..row + 1).unwrap();
        for level in Level::available() {
            let exec = Exec::cpu_with(level, threads).unwrap();
            prop_assert_eq!(&bits(&product(&exec, x.view(), &w, DType::F32)), &want, "{}", level);
            let few = x.view().slice(0, row.saturating_sub(5)..row + 1).unwrap();
            let few = bits(&product(&exec, few, &w, DType::F32));
            prop_assert_eq!(&few[few.len() - n..], &want[row * n..][..n], "{} few", level);
            prop_assert_eq!(&bits(&product(&exec, alone, &w, DType::F32))[..], &want[row * n..][..n], "{} alone", level);
        }
    }
}
