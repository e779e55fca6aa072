//! Quantization: how near it comes to the memory's speed.

mod support;

use fir::quantize::{self, BitOrder, Block};
use fir::reference::{Precision, quantize as reference};
use fir::tensor::{Bool, E2m1x2};
use fir::{DType, Tensor};
use support::{Suite, Work, random};

/// Exactly the reference's numbers, which rounds in f32 as the formulas do.
fn same(got: &[f32], want: &[f64]) -> Result<(), String> {
    match got.iter().zip(want).position(|(&got, &want)| f64::from(got) != want) {
        Some(i) => Err(format!("element {i}: {}, reference {}", got[i], want[i])),
        None => Ok(()),
    }
}

fn first_row(x: &Tensor) -> Vec<f32> {
    x.view().slice(0, 0..1).unwrap().to_f32_vec().unwrap()
}

fn first_fp4_row(x: &Tensor) -> Vec<f32> {
    x.as_slice::<E2m1x2>().unwrap()[..x.shape()[1]].iter().flat_map(|x| x.to_f32()).collect()
}

fn main() {
    let mut suite = Suite::new();
    let (k, levels, p) = (4096, suite.levels(), Precision::Naive(DType::F32));
    let batches: &[usize] = if suite.checks_only() { &[3] } else { &[64, 2048] };
    let zeros = |dtype, shape: &[usize]| Tensor::zeros(dtype, shape).unwrap();
    for dtype in [DType::F32, DType::BF16] {
        for &rows in batches {
            let x = random(1, dtype, &[rows, k]);
            let row = x.view().slice(0, 0..1).unwrap();
            let (elements, size) = (rows * k, dtype.size());
            for (level, exec) in &levels {
                let id = |op: &str| format!("{op}/k{k}-{dtype}/t{rows}/{level}");
                let fp8 = Work { bytes: elements * (size + 1), flops: 0 };
                let fp4 = Work { bytes: elements * size + elements / 2, flops: 0 };
                for (name, block, dtype) in [
                    ("quantize_fp8-tensor-e4m3", Block::TENSOR, DType::E4M3),
                    ("quantize_fp8-row-e4m3", Block::ROW, DType::E4M3),
                    ("quantize_fp8-1x128-e4m3", Block::GROUP, DType::E4M3),
                    ("quantize_fp8-1x128-e5m2", Block::GROUP, DType::E5M2),
                    ("quantize_fp8-128x128-e4m3", Block::TILE, DType::E4M3),
                ] {
                    let counts = block.counts(rows, k);
                    suite.bench(
                        &id(name),
                        fp8,
                        (zeros(dtype, &[rows, k]), zeros(DType::F32, &counts)),
                        |(out, scales)| {
                            quantize::quantize_fp8(exec, x.view(), block, out.view_mut(), scales.view_mut()).unwrap()
                        },
                        |(out, scales)| {
                            let scales: Vec<f64> = first_row(scales).into_iter().map(f64::from).collect();
                            let want = reference::quantize_fp8_with_scales(p, row, &scales, block, dtype);
                            same(&first_row(out), &want.unwrap())
                        },
                    );
                }
                suite.bench(
                    &id("quantize_mxfp8-e4m3"),
                    fp8,
                    (zeros(DType::E4M3, &[rows, k]), zeros(DType::E8M0, &[rows, k / 32])),
                    |(out, scales)| {
                        quantize::quantize_mxfp8(exec, x.view(), out.view_mut(), scales.view_mut()).unwrap()
                    },
                    |(out, _)| same(&first_row(out), &reference::quantize_mxfp8(row, DType::E4M3).unwrap().0),
                );
                suite.bench(
                    &id("quantize_mxfp4"),
                    fp4,
                    (zeros(DType::E2M1x2, &[rows, k / 2]), zeros(DType::E8M0, &[rows, k / 32])),
                    |(out, scales)| {
                        quantize::quantize_mxfp4(exec, x.view(), out.view_mut(), scales.view_mut()).unwrap()
                    },
                    |(out, _)| same(&first_fp4_row(out), &reference::quantize_mxfp4(row).unwrap().0),
                );
                suite.bench(
                    &id("quantize_nvfp4"),
                    fp4,
                    (zeros(DType::E2M1x2, &[rows, k / 2]), zeros(DType::E4M3, &[rows, k / 16])),
                    |(out, scales)| {
                        quantize::quantize_nvfp4(exec, x.view(), 0.002, out.view_mut(), scales.view_mut()).unwrap()
                    },
                    |(out, _)| same(&first_fp4_row(out), &reference::quantize_nvfp4(p, row, 0.002).unwrap().0),
                );
                let (mut codes, mut scales) =
                    (zeros(DType::E2M1x2, &[rows, k / 2]), zeros(DType::E4M3, &[rows, k / 16]));
                quantize::quantize_nvfp4(exec, x.view(), 0.002, codes.view_mut(), scales.view_mut()).unwrap();
                suite.bench(
                    &id("dequantize_nvfp4"),
                    fp4,
                    zeros(dtype, &[rows, k]),
                    |out| quantize::dequantize_nvfp4(exec, codes.view(), scales.view(), 0.002, out.view_mut()).unwrap(),
                    |out| {
                        let stored: Vec<f64> = first_fp4_row(&codes).into_iter().map(f64::from).collect();
                        let scales: Vec<f64> = first_row(&scales).into_iter().map(f64::from).collect();
                        let p = Precision::Naive(dtype);
                        same(&first_row(out), &reference::dequantize(p, &stored, &scales, 16, 0.002))
                    },
                );
            }
        }
    }
    let n = if suite.checks_only() { 5000 } else { 1 << 24 };
    let bits: Vec<Bool> = (0..n).map(|i| Bool(u8::from(i * 7 % 11 < 5))).collect();
    let x = Tensor::from_slice(&bits, &[n]).unwrap();
    for (level, exec) in &levels {
        suite.bench(
            &format!("packbits/little/n{n}/{level}"),
            Work { bytes: n + n / 8, flops: 0 },
            zeros(DType::U8, &[n.div_ceil(8)]),
            |out| quantize::packbits(exec, x.view(), BitOrder::Little, out.view_mut()).unwrap(),
            |out| {
                let bits: Vec<bool> = bits.iter().map(|b| b.get()).collect();
                let right = out.as_slice::<u8>().unwrap() == reference::packbits(&bits, true);
                if right { Ok(()) } else { Err("other bits than the reference".into()) }
            },
        );
    }
}
