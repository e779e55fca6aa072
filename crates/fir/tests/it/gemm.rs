mod blocks;
mod grouped;
mod scaled;

use fir::exec::{Cpu, Level};
use fir::gemm::{DenseWeights, GemmAddNormArgs, Weights, gemm, gemm_add, gemm_add_rms_norm, gemm_bias, gemm_silu_mul};
use fir::reference::gemm as reference;
use fir::testing::Rng;
use fir::{DType, Exec, Tensor, TensorMut, TensorRef};
use proptest::prelude::*;

use crate::support::{FLOATS, assert_matches, every_exec};

fn product(exec: &Exec, x: &Tensor, w: &Tensor, out: DType) -> Tensor {
    let mut out = Tensor::zeros(out, &[x.shape()[0], w.shape()[0]]).unwrap();
    gemm(exec, x.view(), w.view(), out.view_mut()).unwrap();
    out
}

#[test]
fn matches_reference_at_every_tail_length() {
    every_exec(|exec| {
        let mut rng = Rng::new(1);
        // Around the tiles (6 or 3 rows, 4 columns), the panels (64 columns), the blocks (2048 deep) and the vectors.
        let small = (1..15).flat_map(|m| [(m, 5, 35), (m, m, m), (m, 64, 16), (m, 67, 129)]);
        let large =
            [(1, 130, 2049), (13, 3, 2048), (25, 66, 2060), (60, 9, 64), (1, 1, 1), (2, 1, 5000), (40, 9, 4177)];
        for (i, (m, n, k)) in small.chain(large).enumerate() {
            let dtype = FLOATS[i % 3];
            let (x, w) = (rng.tensor(dtype, &[m, k]), rng.tensor(dtype, &[n, k]));
            let out = product(exec, &x, &w, dtype);
            assert_matches(&format!("{exec:?} {dtype} {m}x{n}x{k}"), out.view(), n, |p| {
                reference::gemm(p, x.view(), w.view())
            });
        }
    });
}

#[test]
fn matches_reference_for_every_mix_of_types() {
    every_exec(|exec| {
        let mut rng = Rng::new(2);
        for (xt, wt, ot) in
            FLOATS.into_iter().flat_map(|x| FLOATS.into_iter().flat_map(move |w| FLOATS.map(|o| (x, w, o))))
        {
            for m in [3, 20] {
                let (x, w) = (rng.tensor(xt, &[m, 77]), rng.tensor(wt, &[37, 77]));
                let out = product(exec, &x, &w, ot);
                assert_matches(&format!("{exec:?} {m} {xt} {wt} {ot}"), out.view(), 37, |p| {
                    reference::gemm(p, x.view(), w.view())
                });
            }
        }
    });
}

#[test]
fn long_sums_of_f32_are_exact() {
    every_exec(|exec| {
        let mut rng = Rng::new(6);
        // Tensor cores cut off what they add: over 1000 columns and more that shows, unless parts are added up outside.
        for (i, (m, n, k)) in
            [(3, 40, 1032), (20, 33, 4096), (40, 70, 1032), (70, 72, 4096), (24, 16, 1031)].into_iter().enumerate()
        {
            for dtype in [DType::F16, DType::BF16] {
                let (x, w) = (rng.tensor(dtype, &[m, k]), rng.tensor(dtype, &[n, k]));
                let out = product(exec, &x, &w, DType::F32);
                assert_matches(&format!("{exec:?} {i} {dtype} {m}x{n}x{k}"), out.view(), n, |p| {
                    reference::gemm(p, x.view(), w.view())
                });
            }
        }
    });
}

#[test]
fn many_rows_match_reference_and_have_the_bits_of_few() {
    every_exec(|exec| {
        let mut rng = Rng::new(7);
        // Around the tiles that a GPU takes many rows in: 64, 128 or 256 rows, 32 to 256 columns, 64 or 128 deep. And pairs of more
        // than a CPU's block of them.
        let sizes = [(65, 40, 64), (300, 264, 72), (130, 520, 136), (257, 8, 200), (70, 12, 4176)];
        for (i, (m, n, k)) in sizes.into_iter().enumerate() {
            let dtype = [DType::BF16, DType::F16][i % 2];
            let (x, w) = (rng.tensor(dtype, &[m, k]), rng.tensor(dtype, &[n, k]));
            for to in [dtype, DType::F32] {
                let out = product(exec, &x, &w, to);
                let what = format!("{exec:?} {dtype} {to} {m}x{n}x{k}");
                assert_matches(&what, out.view(), n, |p| reference::gemm(p, x.view(), w.view()));
                for rows in [0..1, 20..60, m - 33..m] {
                    let few = x.view().slice(0, rows.clone()).unwrap();
                    let mut alone = Tensor::zeros(to, &[rows.len(), n]).unwrap();
                    gemm(exec, few, w.view(), alone.view_mut()).unwrap();
                    let got = out.view().slice(0, rows.clone()).unwrap().to_f32_vec().unwrap();
                    assert_eq!(got, alone.view().to_f32_vec().unwrap(), "{what} rows {rows:?}");
                }
            }
        }
    });
}

/// Sizes that make a GPU take each of its larger tiles: as large as leaves no multiprocessor idle.
#[cfg(feature = "cuda")]
#[test]
fn every_tile_of_a_gpu_matches_reference_and_has_the_bits_of_few_rows() {
    use fir::gemm::{Block, scaled_gemm};
    let Some(exec) = crate::support::gpu() else { return };
    let mut rng = Rng::new(8);
    for (m, n, k) in [(120, 4088, 72), (250, 4088, 72), (500, 4088, 136), (1000, 4088, 264), (60, 25_000, 64)] {
        let (x, w) = (rng.tensor(DType::BF16, &[m, k]), rng.tensor(DType::BF16, &[n, k]));
        let k8 = k.next_multiple_of(16);
        let a = scaled::Operand::new(&mut rng, DType::E4M3, &[m, k8], Some(Block::ROW));
        let b = scaled::Operand::new(&mut rng, DType::E4M3, &[n, k8], Some(Block::TILE));
        let ends = [0..8, m - 8..m];
        for to in [DType::BF16, DType::F32] {
            let out = product(exec, &x, &w, to);
            for rows in ends.clone() {
                let (few, got) = (x.view().slice(0, rows.clone()).unwrap(), out.view().slice(0, rows.clone()).unwrap());
                let what = format!("{to} {m}x{n}x{k} rows {rows:?}");
                assert_matches(&what, got, n, |p| reference::gemm(p, few, w.view()));
                let mut alone = Tensor::zeros(to, &[rows.len(), n]).unwrap();
                gemm(exec, few, w.view(), alone.view_mut()).unwrap();
                assert_eq!(got.to_f32_vec().unwrap(), alone.view().to_f32_vec().unwrap(), "{what}");
            }
        }
        let mut out = Tensor::zeros(DType::BF16, &[m, n]).unwrap();
        scaled_gemm(exec, a.view(), b.view(), out.view_mut()).unwrap();
        for r in [0, m - 1] {
            let (row, got) = (a.row(r), out.view().slice(0, r..r + 1).unwrap());
            let what = format!("e4m3 {m}x{n}x{k8} row {r}");
            assert_matches(&what, got, n, |p| reference::scaled_gemm(p, row.view(), b.view()));
            let mut alone = Tensor::zeros(DType::BF16, &[1, n]).unwrap();
            scaled_gemm(exec, row.view(), b.view(), alone.view_mut()).unwrap();
            assert_eq!(got.to_f32_vec().unwrap(), alone.view().to_f32_vec().unwrap(), "{what}");
        }
    }
}

#[test]
fn epilogues_match_reference() {
    every_exec(|exec| {
        let mut rng = Rng::new(5);
        for (i, (m, n, k)) in
            [(1, 33, 40), (3, 64, 32), (7, 5, 300), (33, 96, 64), (40, 130, 77), (90, 77, 136)].into_iter().enumerate()
        {
            for dtype in FLOATS {
                let (x, w) = (rng.tensor(dtype, &[m, k]), rng.tensor(dtype, &[n, k]));
                let at = format!("{exec:?} {dtype} {m}x{n}x{k}");
                let bias = rng.tensor(FLOATS[i % 3], &[n]);
                let mut out = Tensor::zeros(dtype, &[m, n]).unwrap();
                gemm_bias(exec, x.view(), w.view(), bias.view(), out.view_mut()).unwrap();
                assert_matches(&format!("bias {at}"), out.view(), n, |p| {
                    reference::gemm_bias(p, x.view(), w.view(), bias.view())
                });

                let mut sum = rng.tensor(dtype, &[m, n]);
                let before = sum.clone();
                gemm_add(exec, x.view(), w.view(), sum.view_mut()).unwrap();
                assert_matches(&format!("add {at}"), sum.view(), n, |p| {
                    reference::gemm_add(p, x.view(), w.view(), before.view())
                });

                let weight = rng.tensor(dtype, &[n]);
                let mut residual = before.clone();
                let args = GemmAddNormArgs {
                    x: x.view(),
                    w: w.view().into(),
                    residual: residual.view_mut(),
                    weight: weight.view(),
                    eps: 1e-5,
                    out: out.view_mut(),
                };
                gemm_add_rms_norm(exec, args).unwrap();
                assert_eq!(residual.view().to_f32_vec().unwrap(), sum.view().to_f32_vec().unwrap());
                assert_matches(&format!("norm {at}"), out.view(), n, |p| {
                    fir::reference::norm::rms_norm(p, residual.view(), weight.view(), 1e-5)
                });

                let w = rng.tensor(dtype, &[2 * n, k]);
                gemm_silu_mul(exec, x.view(), w.view(), out.view_mut()).unwrap();
                assert_matches(&format!("silu {at}"), out.view(), n, |p| {
                    reference::gemm_silu_mul(p, x.view(), w.view())
                });
            }
        }
    });
}

/// Every epilogue's output, in f32 and in bf16.
fn all_epilogues(exec: &Exec, x: &Tensor, w: Weights<'_>, n: usize, with_pairs: bool) -> Vec<Vec<f32>> {
    let (m, mut rng) = (x.shape()[0], Rng::new(8));
    let mut list = vec![];
    for dtype in [DType::F32, DType::BF16] {
        let (bias, weight) = (rng.tensor(dtype, &[n]), rng.tensor(dtype, &[n]));
        let (mut out, mut sum) = (rng.tensor(dtype, &[m, n]), rng.tensor(dtype, &[m, n]));
        gemm(exec, x.view(), w, out.view_mut()).unwrap();
        list.push(out.view().to_f32_vec().unwrap());
        gemm_bias(exec, x.view(), w, bias.view(), out.view_mut()).unwrap();
        list.push(out.view().to_f32_vec().unwrap());
        gemm_add(exec, x.view(), w, sum.view_mut()).unwrap();
        let (residual, weight) = (sum.view_mut(), weight.view());
        gemm_add_rms_norm(exec, GemmAddNormArgs { x: x.view(), w, residual, weight, eps: 1e-5, out: out.view_mut() })
            .unwrap();
        list.extend([out.view().to_f32_vec().unwrap(), sum.view().to_f32_vec().unwrap()]);
        if with_pairs {
            let mut half = Tensor::zeros(dtype, &[m, n / 2]).unwrap();
            gemm_silu_mul(exec, x.view(), w, half.view_mut()).unwrap();
            list.push(half.view().to_f32_vec().unwrap());
        }
    }
    list
}

#[test]
fn packed_weights_give_the_bits_of_rows() {
    every_exec(|exec| {
        let mut rng = Rng::new(11);
        // Around a strip of 32 rows, a block of 512 rows of `x`, one of 256 weight rows, and the depth of 256.
        let sizes =
            [(1, 64, 40), (16, 33, 300), (17, 128, 96), (32, 1, 32), (33, 192, 520), (40, 300, 77), (90, 64, 1)];
        for (m, n, k) in sizes.into_iter().chain([(545, 320, 600), (70, 1100, 256)]) {
            let (x, w) = (rng.tensor(DType::BF16, &[m, k]), rng.tensor(DType::BF16, &[n, k]));
            let packed = DenseWeights::pack(exec, w.view()).unwrap();
            let is_tiled = matches!(exec, Exec::Cpu(cpu) if cpu.level() == Level::Amx);
            assert_eq!(packed.is_some(), is_tiled, "{exec:?}");
            let Some(packed) = packed else { continue };
            assert_eq!(packed.shape(), [n, k]);
            assert_eq!(packed.bytes(), 2 * n.next_multiple_of(32) * k.next_multiple_of(32));
            let pairs = n % 64 == 0;
            let want = all_epilogues(exec, &x, w.view().into(), n, pairs);
            let got = all_epilogues(exec, &x, (&packed).into(), n, pairs);
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                assert!(got.iter().zip(want).all(|(a, b)| a.to_bits() == b.to_bits()), "{exec:?} {m}x{n}x{k} {i}");
            }
        }
        assert!(DenseWeights::pack(exec, rng.tensor(DType::F32, &[3, 4]).view()).unwrap().is_none());
    });
}

#[test]
fn packed_weights_that_do_not_fit_are_refused() {
    every_exec(|exec| {
        let t = |dtype, shape: &[usize]| Tensor::zeros(dtype, shape).unwrap();
        let err = DenseWeights::pack(exec, t(DType::I32, &[3, 4]).view()).unwrap_err();
        assert_eq!(err.to_string(), "DenseWeights::pack: `w` is i32, expected f32, f16 or bf16");
        let err = DenseWeights::pack(exec, t(DType::BF16, &[3]).view()).unwrap_err();
        assert_eq!(err.to_string(), "DenseWeights::pack: `w` has 1 axes, expected 2 [n, k]");
        let Some(w) = DenseWeights::pack(exec, t(DType::BF16, &[80, 8]).view()).unwrap() else { return };
        let refused = |x: Tensor, columns: usize, exec: &Exec| {
            let mut out = t(DType::F32, &[2, columns]);
            gemm(exec, x.view(), &w, out.view_mut()).unwrap_err().to_string()
        };
        assert_eq!(refused(t(DType::BF16, &[2, 9]), 80, exec), "gemm: `w` has k=8, but `x` bound k=9");
        assert_eq!(refused(t(DType::BF16, &[2, 8]), 81, exec), "gemm: `out` has n=81, but `w` bound n=80");
        assert_eq!(refused(t(DType::F32, &[2, 8]), 80, exec), "gemm: `x` is f32, expected bf16, as `w` is packed");
        let portable = Exec::Cpu(Cpu::with(Level::Portable, 1).unwrap());
        assert_eq!(
            refused(t(DType::BF16, &[2, 8]), 80, &portable),
            "gemm: `w` is packed for level amx, on an executor of level portable, expected rows"
        );
        // Halves of 40 rows do not begin with a strip.
        let (x, mut out) = (t(DType::BF16, &[2, 8]), t(DType::F32, &[2, 40]));
        let err = gemm_silu_mul(exec, x.view(), &w, out.view_mut()).unwrap_err();
        assert_eq!(
            err.to_string(),
            "gemm_silu_mul: `w` is 80 rows, expected 2 * n, n a multiple of 32, as they are packed"
        );
    });
}

#[test]
fn strided_operands_match_reference_and_gaps_stay() {
    every_exec(|exec| {
        let mut rng = Rng::new(3);
        let (x, w) = (rng.normals(30 * 50), rng.normals(70 * 41));
        let x = TensorRef::strided(&x, &[30, 37], &[50, 1]).unwrap();
        let w = TensorRef::strided(&w, &[70, 37], &[41, 1]).unwrap();
        let mut out = vec![-9.5f32; 30 * 90];
        gemm(exec, x, w, TensorMut::strided(&mut out, &[30, 70], &[90, 1]).unwrap()).unwrap();
        let got = TensorRef::strided(&out, &[30, 70], &[90, 1]).unwrap();
        assert_matches(&format!("{exec:?}"), got, 70, |p| reference::gemm(p, x, w));
        assert_eq!(out.iter().filter(|&&x| x == -9.5).count(), 30 * 20);
    });
}

#[test]
fn empty_sides_give_zeros_or_nothing() {
    every_exec(|exec| {
        for (m, n, k) in [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0), (30, 100, 0)] {
            let (x, w) = (Tensor::zeros(DType::BF16, &[m, k]).unwrap(), Tensor::zeros(DType::BF16, &[n, k]).unwrap());
            let mut out = Tensor::from_f32(DType::F32, &vec![5.0; m * n], &[m, n]).unwrap();
            gemm(exec, x.view(), w.view(), out.view_mut()).unwrap();
            assert_eq!(out.as_slice::<f32>().unwrap(), vec![0.0; m * n]);
        }
        // More rows than memory holds, and no column: nothing to do, and nothing to allocate.
        let (row, w) = ([half::bf16::ONE; 4], Tensor::zeros(DType::BF16, &[0, 4]).unwrap());
        let x = TensorRef::strided(&row, &[1 << 40, 4], &[0, 1]).unwrap();
        gemm(exec, x, w.view(), TensorMut::new::<f32>(&mut [], &[1 << 40, 0]).unwrap()).unwrap();
        // As many rows and elements as would be 32 GB, one row in memory: refused before it is copied.
        let row = vec![half::bf16::ONE; 1 << 17];
        let x = TensorRef::strided(&row, &[1 << 17, 1 << 17], &[0, 1]).unwrap();
        let (w, mut out) = (Tensor::zeros(DType::BF16, &[1, 1 << 17]).unwrap(), vec![0f32; 1 << 17]);
        let refused = gemm(exec, x, w.view(), TensorMut::new(&mut out, &[1 << 17, 1]).unwrap());
        assert!(refused.unwrap_err().to_string().starts_with("gemm: layout of `x`: 17179869184 elements"));
    });
}

#[test]
fn bad_arguments_are_named() {
    let exec = Exec::cpu().unwrap();
    let check = |x: (DType, &[usize]), w: (DType, &[usize]), out: (DType, &[usize]), want: &str| {
        let t = |(dtype, shape)| Tensor::zeros(dtype, shape).unwrap();
        let got = gemm(&exec, t(x).view(), t(w).view(), t(out).view_mut());
        assert_eq!(got.unwrap_err().to_string(), want);
    };
    use DType::{BF16, F32, I32};
    check((F32, &[2, 8]), (F32, &[3, 9]), (F32, &[2, 3]), "gemm: `w` has k=9, but `x` bound k=8");
    check((F32, &[2, 8]), (F32, &[3, 8]), (F32, &[2, 4]), "gemm: `out` has n=4, but `w` bound n=3");
    check((F32, &[8]), (F32, &[3, 8]), (F32, &[2, 3]), "gemm: `x` has 1 axes, expected 2 [m, k]");
    check((I32, &[2, 8]), (F32, &[3, 8]), (F32, &[2, 3]), "gemm: `x` is i32, expected f32, f16 or bf16");
    check((BF16, &[2, 8]), (I32, &[3, 8]), (F32, &[2, 3]), "gemm: `w` is i32, expected f32, f16 or bf16");
    check((BF16, &[2, 8]), (BF16, &[3, 8]), (I32, &[2, 3]), "gemm: `out` is i32, expected f32, f16 or bf16");
    let t = |shape: &[usize]| Tensor::zeros(F32, shape).unwrap();
    let err = gemm_silu_mul(&exec, t(&[2, 8]).view(), t(&[7, 8]).view(), t(&[2, 3]).view_mut()).unwrap_err();
    assert_eq!(err.to_string(), "gemm_silu_mul: `w` is 7 rows, expected 2 * 3");
    let err =
        gemm_bias(&exec, t(&[2, 8]).view(), t(&[3, 8]).view(), t(&[4]).view(), t(&[2, 3]).view_mut()).unwrap_err();
    assert_eq!(err.to_string(), "gemm_bias: `bias` has n=4, but `w` bound n=3");
    let (x, w, weight, mut residual, mut out) = (t(&[2, 8]), t(&[3, 8]), t(&[3]), t(&[2, 3]), t(&[2, 3]));
    let args = GemmAddNormArgs {
        x: x.view(),
        w: w.view().into(),
        residual: residual.view_mut(),
        weight: weight.view(),
        eps: f32::NAN,
        out: out.view_mut(),
    };
    assert!(gemm_add_rms_norm(&exec, args).unwrap_err().to_string().contains("`eps` is NaN"));
    let x = Tensor::zeros(F32, &[8, 2]).unwrap();
    let turned = x.view().transpose(0, 1).unwrap();
    let w = Tensor::zeros(F32, &[3, 8]).unwrap();
    let err = gemm(&exec, turned, w.view(), Tensor::zeros(F32, &[2, 3]).unwrap().view_mut()).unwrap_err();
    assert_eq!(err.to_string(), "gemm: layout of `x`: stride 2 of the last axis, expected 1");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn sizes_of_blocks_change_no_bit(m in 1usize..200, n in 1usize..150, k in 1usize..300, seed in any::<u64>(), pick in 0usize..4) {
        let mut rng = Rng::new(seed);
        let (x, w) = (rng.tensor(DType::BF16, &[m, k]), rng.tensor(DType::BF16, &[n, k]));
        let text = ["gemm_depth 32\ngemm_block 32", "gemm_depth 64\ngemm_block 96", "gemm_block 64", "gemm_depth 1024"][pick];
        let Exec::Cpu(cpu) = Exec::cpu().unwrap() else { unreachable!() };
        let tuned = Exec::Cpu(cpu.tuned(text.parse().unwrap()).unwrap());
        let plain = Exec::Cpu(cpu.tuned(Default::default()).unwrap());
        let (a, b) = (product(&plain, &x, &w, DType::F32), product(&tuned, &x, &w, DType::F32));
        prop_assert_eq!(a.as_slice::<f32>().unwrap(), b.as_slice::<f32>().unwrap());
    }

    #[test]
    fn a_row_has_the_same_bits_whatever_is_beside_it(
        m in 1usize..80, n in 1usize..150, k in 0usize..1200, pick in any::<u64>(), threads in 1usize..5,
        dtype in prop::sample::select(&FLOATS[..]),
    ) {
        let mut rng = Rng::new(pick);
        let (x, w) = (rng.tensor(dtype, &[m, k]), rng.tensor(dtype, &[n, k]));
        let row = rng.below(m);
        let alone = Tensor::from_f32(dtype, &x.view().slice(0, row..row + 1).unwrap().to_f32_vec().unwrap(), &[1, k]).unwrap();
        for level in fir::exec::Level::available() {
            let one = product(&Exec::cpu_with(level, 1).unwrap(), &alone, &w, DType::F32);
            let all = product(&Exec::cpu_with(level, threads).unwrap(), &x, &w, DType::F32);
            prop_assert_eq!(one.as_slice::<f32>().unwrap(), &all.as_slice::<f32>().unwrap()[row * n..][..n]);
        }
    }
}
