use fir::gemm::{Block, GroupedArgs, Scaled, batched_gemm, gemm, grouped_gemm, scaled_gemm};
use fir::kv::Ragged;
use fir::reference::gemm as reference;
use fir::testing::Rng;
use fir::{DType, Exec, Result, Tensor, TensorMut, TensorRef};

use super::scaled::Operand;
use crate::support::{FLOATS, assert_matches, every_exec};

fn grouped(exec: &Exec, x: Scaled<'_>, indptr: &Ragged, w: Scaled<'_>, ids: Option<&[i32]>, out: &mut Tensor) {
    let ids = ids.map(|ids| Tensor::from_slice(ids, &[ids.len()]).unwrap());
    let weight_indices = ids.as_ref().map(|ids| ids.view());
    grouped_gemm(exec, GroupedArgs { x, indptr, w, weight_indices, out: out.view_mut() }).unwrap();
}

/// A row that is a tensor of its own, and weights of another group that begin at an odd place.
#[test]
fn layouts_of_one_row_and_of_other_groups_change_no_bit_on_a_cpu() {
    let (n, k) = (5, 64);
    let mut rng = Rng::new(11);
    let (x, w) = (rng.tensor(DType::BF16, &[3, k]), rng.tensor(DType::BF16, &[2 * n * k + 1]));
    let w = TensorRef::strided(w.as_slice::<fir::tensor::bf16>().unwrap(), &[2, n, k], &[n * k + 1, k, 1]).unwrap();
    every_exec(|exec| {
        let Exec::Cpu(_) = exec else { return };
        let run = |x: TensorRef<'_>, groups: &[u32]| {
            let mut out = Tensor::zeros(DType::F32, &[x.shape()[0], n]).unwrap();
            grouped(exec, x.into(), &Ragged::from_lens(groups).unwrap(), w.into(), None, &mut out);
            out.view().to_f32_vec().unwrap()
        };
        let (both, first) = (run(x.view(), &[2, 1]), run(x.view().slice(0, 0..2).unwrap(), &[2, 0]));
        assert_eq!(both[..2 * n], first, "{exec:?}");
        let one = run(x.view().select(0, 0).unwrap().unsqueeze().unwrap(), &[1, 0]);
        assert_eq!(one, first[..n], "{exec:?}");
    });
}

/// Empty groups at both ends and in the middle, one row, and more than a block of rows.
const LENS: [u32; 7] = [0, 5, 1, 0, 60, 17, 0];

#[test]
fn groups_match_reference_and_are_products_of_their_own() {
    every_exec(|exec| {
        let mut rng = Rng::new(1);
        let indptr = Ragged::from_lens(&LENS).unwrap();
        for dtype in FLOATS {
            for (n, k) in [(70, 130), (1, 33), (128, 64)] {
                let (x, w) = (rng.tensor(dtype, &[83, k]), rng.tensor(dtype, &[7, n, k]));
                let mut out = Tensor::zeros(dtype, &[83, n]).unwrap();
                grouped(exec, x.view().into(), &indptr, w.view().into(), None, &mut out);
                let what = format!("{exec:?} {dtype} {n}x{k}");
                let own: Vec<usize> = (0..7).collect();
                assert_matches(&what, out.view(), n, |p| {
                    reference::grouped_gemm(p, x.view().into(), &indptr, w.view().into(), &own)
                });
                for (g, rows) in indptr.indptr().windows(2).enumerate() {
                    let rows = rows[0] as usize..rows[1] as usize;
                    let mut alone = Tensor::zeros(dtype, &[rows.len(), n]).unwrap();
                    let (x, w) = (x.view().slice(0, rows.clone()).unwrap(), w.view().select(0, g).unwrap());
                    gemm(exec, x, w, alone.view_mut()).unwrap();
                    let got = out.view().slice(0, rows).unwrap().to_f32_vec().unwrap();
                    assert_eq!(got, alone.view().to_f32_vec().unwrap(), "{what} group {g}");
                }
            }
        }
    });
}

#[test]
fn large_groups_match_reference_and_are_products_of_their_own() {
    every_exec(|exec| {
        let mut rng = Rng::new(6);
        // Groups of some tiles and a part of one, and of one row.
        let lens = [0, 70, 1, 0, 300, 129, 64];
        let indptr = Ragged::from_lens(&lens).unwrap();
        let rows = lens.iter().sum::<u32>() as usize;
        let own: Vec<usize> = (0..7).collect();
        for (dtype, block, to) in [
            (DType::BF16, None, DType::BF16),
            (DType::F16, None, DType::F32),
            (DType::E4M3, Some((Block::GROUP, Block::TILE)), DType::BF16),
        ] {
            for (n, k) in [(136, 272), (264, 64)] {
                let x = Operand::new(&mut rng, dtype, &[rows, k], block.map(|b| b.0));
                let w = Operand::new(&mut rng, dtype, &[7, n, k], block.map(|b| b.1));
                let mut out = Tensor::zeros(to, &[rows, n]).unwrap();
                grouped(exec, x.view(), &indptr, w.view(), None, &mut out);
                let what = format!("{exec:?} {dtype} {to} {n}x{k}");
                assert_matches(&what, out.view(), n, |p| reference::grouped_gemm(p, x.view(), &indptr, w.view(), &own));
                if block.is_none() {
                    let (x, w) = (x.data.view().slice(0, 371..500).unwrap(), w.data.view().select(0, 5).unwrap());
                    let mut alone = Tensor::zeros(to, &[129, n]).unwrap();
                    gemm(exec, x, w, alone.view_mut()).unwrap();
                    let got = out.view().slice(0, 371..500).unwrap().to_f32_vec().unwrap();
                    assert_eq!(got, alone.view().to_f32_vec().unwrap(), "{what}");
                }
            }
        }
    });
}

#[test]
fn groups_meet_the_weights_they_name() {
    every_exec(|exec| {
        let mut rng = Rng::new(2);
        let indptr = Ragged::from_lens(&LENS).unwrap();
        let (x, w) = (rng.tensor(DType::BF16, &[83, 96]), rng.tensor(DType::BF16, &[3, 50, 96]));
        let ids = [2, 0, 2, 1, 0, 1, 2];
        let mut out = Tensor::zeros(DType::BF16, &[83, 50]).unwrap();
        grouped(exec, x.view().into(), &indptr, w.view().into(), Some(&ids), &mut out);
        let weights = ids.map(|id| id as usize);
        assert_matches(&format!("{exec:?}"), out.view(), 50, |p| {
            reference::grouped_gemm(p, x.view().into(), &indptr, w.view().into(), &weights)
        });
    });
}

#[test]
fn scaled_groups_match_reference_and_are_products_of_their_own() {
    every_exec(|exec| {
        let mut rng = Rng::new(3);
        let (indptr, own) = (Ragged::from_lens(&LENS).unwrap(), [0, 1, 2, 3, 4, 5, 6]);
        for (x_type, x_block, w_block) in [
            (DType::E4M3, Some(Block::GROUP), Some(Block::TILE)),
            (DType::E5M2, Some(Block::ROW), Some(Block::ROW)),
            (DType::E4M3, Some(Block::TENSOR), Some(Block::TENSOR)),
            (DType::BF16, None, Some(Block::TILE)),
        ] {
            let x = Operand::new(&mut rng, x_type, &[83, 260], x_block);
            let w = Operand::new(&mut rng, DType::E4M3, &[7, 140, 260], w_block);
            let mut out = Tensor::zeros(DType::F32, &[83, 140]).unwrap();
            grouped(exec, x.view(), &indptr, w.view(), None, &mut out);
            let what = format!("{exec:?} {x_type} {x_block:?} {w_block:?}");
            assert_matches(&what, out.view(), 140, |p| reference::grouped_gemm(p, x.view(), &indptr, w.view(), &own));
            // The last row of the fifth group, alone.
            let (row, group) = (x.row(65), 4);
            let (w, mut alone) = (w.view(), Tensor::zeros(DType::F32, &[1, 140]).unwrap());
            let scales = w.scales.map(|s| s.select(0, group).unwrap());
            let w = Scaled { data: w.data.select(0, group).unwrap(), scales, ..w };
            scaled_gemm(exec, row.view(), w, alone.view_mut()).unwrap();
            assert_eq!(alone.as_slice::<f32>().unwrap(), &out.as_slice::<f32>().unwrap()[65 * 140..66 * 140], "{what}");
        }
    });
}

#[test]
fn batches_match_reference() {
    every_exec(|exec| {
        let mut rng = Rng::new(4);
        for (b, m, n, k) in [
            (1, 1, 1, 1),
            (3, 7, 33, 65),
            (5, 40, 20, 128),
            (2, 100, 72, 264),
            (4, 0, 3, 5),
            (0, 3, 4, 5),
            (2, 3, 4, 0),
        ] {
            let mut out = Tensor::zeros(DType::BF16, &[b, m, n]).unwrap();
            let (x, w) = (rng.tensor(DType::BF16, &[b, m, k]), rng.tensor(DType::BF16, &[b, n, k]));
            batched_gemm(exec, x.view().into(), w.view().into(), out.view_mut()).unwrap();
            assert_matches(&format!("{exec:?} {b} {m}x{n}x{k}"), out.view(), n, |p| {
                reference::batched_gemm(p, x.view().into(), w.view().into())
            });
            let x = Operand::new(&mut rng, DType::E4M3, &[b, m, k], Some(Block::GROUP));
            let w = Operand::new(&mut rng, DType::E4M3, &[b, n, k], Some(Block::TILE));
            batched_gemm(exec, x.view(), w.view(), out.view_mut()).unwrap();
            assert_matches(&format!("{exec:?} fp8 {b} {m}x{n}x{k}"), out.view(), n, |p| {
                reference::batched_gemm(p, x.view(), w.view())
            });
        }
    });
}

#[test]
fn strided_groups_match_and_gaps_stay() {
    every_exec(|exec| {
        let mut rng = Rng::new(5);
        let indptr = Ragged::from_lens(&[4, 0, 9]).unwrap();
        let (x, w) = (rng.normals(13 * 50), rng.normals(3 * 1000));
        let x = TensorRef::strided(&x, &[13, 37], &[50, 1]).unwrap();
        let w = TensorRef::strided(&w, &[3, 20, 37], &[1000, 41, 1]).unwrap();
        let mut out = vec![-9.5f32; 13 * 30];
        let into = TensorMut::strided(&mut out, &[13, 20], &[30, 1]).unwrap();
        let args = GroupedArgs { x: x.into(), indptr: &indptr, w: w.into(), weight_indices: None, out: into };
        grouped_gemm(exec, args).unwrap();
        let got = TensorRef::strided(&out, &[13, 20], &[30, 1]).unwrap();
        assert_matches(&format!("{exec:?}"), got, 20, |p| {
            reference::grouped_gemm(p, x.into(), &indptr, w.into(), &[0, 1, 2])
        });
        assert_eq!(out.iter().filter(|&&x| x == -9.5).count(), 13 * 10);
    });
}

#[test]
fn bad_arguments_are_named() {
    let exec = Exec::cpu().unwrap();
    let t = |dtype, shape: &[usize]| Tensor::zeros(dtype, shape).unwrap();
    let check = |got: Result<()>, want: &str| assert_eq!(got.unwrap_err().to_string(), want);
    use DType::{BF16, E4M3, F32};
    let indptr = Ragged::from_lens(&[2, 3]).unwrap();
    let run = |x: Scaled<'_>, w: Scaled<'_>, ids: Option<&[i64]>, mut out: Tensor| {
        let ids = ids.map(|ids| Tensor::from_slice(ids, &[ids.len()]).unwrap());
        let weight_indices = ids.as_ref().map(|ids| ids.view());
        grouped_gemm(&exec, GroupedArgs { x, indptr: &indptr, w, weight_indices, out: out.view_mut() })
    };
    let (x, w, out) = (t(BF16, &[5, 8]), t(BF16, &[2, 4, 8]), t(F32, &[5, 4]));
    let (xs, ws) = (Scaled::from(x.view()), Scaled::from(w.view()));
    check(
        run(t(BF16, &[6, 8]).view().into(), ws, None, t(F32, &[6, 4])),
        "grouped_gemm: `indptr` has tokens=5, but `x` bound tokens=6",
    );
    check(
        run(xs, t(BF16, &[3, 4, 8]).view().into(), None, out.clone()),
        "grouped_gemm: `indptr` has weights=2, but `w` bound weights=3",
    );
    check(
        run(xs, ws, Some(&[0]), out.clone()),
        "grouped_gemm: `weight_indices` has groups=1, but `indptr` bound groups=2",
    );
    check(
        run(xs, ws, Some(&[0, 2]), out.clone()),
        "grouped_gemm: `weight_indices` is 2 at 1, expected 0 or more and less than 2",
    );
    check(
        run(Scaled::new(x.view(), t(F32, &[1, 1]).view(), Block::TENSOR), ws, None, out.clone()),
        "grouped_gemm: `x.scales` is given, expected none with `w` of bf16",
    );
    let (x8, w8) = (t(E4M3, &[5, 8]), t(E4M3, &[2, 4, 8]));
    check(
        run(
            Scaled::new(x8.view(), t(F32, &[3, 1]).view(), Block { rows: 2, columns: Block::ALL }),
            w8.view().into(),
            None,
            out,
        ),
        "grouped_gemm: `x.scales` is blocks of 2 rows, expected blocks of one row or of all",
    );
    check(
        batched_gemm(&exec, ws, t(BF16, &[3, 4, 8]).view().into(), t(F32, &[2, 4, 4]).view_mut()),
        "batched_gemm: `w` has batch=3, but `x` bound batch=2",
    );
}
