use fir::gemm::{Block, Scaled, scaled_gemm};
use fir::reference::gemm as reference;
use fir::testing::Rng;
use fir::{DType, Exec, Tensor, TensorMut, TensorRef};
use proptest::prelude::*;

use crate::support::{FLOATS, Wanted, assert_matches, every_exec};

const ODD: Block = Block { rows: 3, columns: 7 };
const FIFTY: Block = Block { rows: 1, columns: 50 };

/// A matrix with scales around 1, or none.
#[derive(Clone)]
pub(super) struct Operand {
    pub(super) data: Tensor,
    scales: Option<(Tensor, Block)>,
}

impl Operand {
    pub(super) fn new(rng: &mut Rng, dtype: DType, shape: &[usize], block: Option<Block>) -> Self {
        let (batch, matrix) = shape.split_at(shape.len() - 2);
        let scales = block.map(|block| {
            let counts = [batch, &block.counts(matrix[0], matrix[1])].concat();
            let values: Vec<f32> = rng.normals(counts.iter().product()).iter().map(|x| x.exp2()).collect();
            (Tensor::from_f32(DType::F32, &values, &counts).unwrap(), block)
        });
        Self { data: rng.tensor(dtype, shape), scales }
    }

    pub(super) fn view(&self) -> Scaled<'_> {
        match &self.scales {
            Some((scales, block)) => Scaled::new(self.data.view(), scales.view(), *block),
            // Blocks of no scales may be anything.
            None => Scaled { block: Block { rows: 1, columns: 0 }, ..self.data.view().into() },
        }
    }

    /// Row `r` alone; its block has one row or all.
    pub(super) fn row(&self, r: usize) -> Self {
        let one = |x: &Tensor, r: usize| {
            let values = x.view().slice(0, r..r + 1).unwrap().to_f32_vec().unwrap();
            Tensor::from_f32(x.dtype(), &values, &[1, x.shape()[1]]).unwrap()
        };
        let scales = self.scales.as_ref().map(|(s, block)| (one(s, if block.rows == 1 { r } else { 0 }), *block));
        Self { data: one(&self.data, r), scales }
    }
}

fn product(exec: &Exec, x: &Operand, w: &Operand, out: DType) -> Tensor {
    let mut out = Tensor::zeros(out, &[x.data.shape()[0], w.data.shape()[0]]).unwrap();
    scaled_gemm(exec, x.view(), w.view(), out.view_mut()).unwrap();
    out
}

/// Blocks of both sides: those that models use, and some that none does.
const BLOCKS: [(Option<Block>, Option<Block>); 13] = [
    (None, None),
    (None, Some(Block::TENSOR)),
    (Some(Block::TENSOR), Some(Block::TENSOR)),
    (Some(Block::ROW), Some(Block::ROW)),
    (Some(Block::GROUP), Some(Block::TILE)),
    (Some(Block::ROW), Some(Block::TILE)),
    (Some(Block::GROUP), Some(Block::ROW)),
    (Some(FIFTY), Some(ODD)),
    (None, Some(Block::GROUP)),
    (Some(Block { rows: 1, columns: 32 }), Some(Block { rows: 64, columns: 96 })),
    (Some(Block { rows: 1, columns: 256 }), Some(Block { rows: 128, columns: 64 })),
    (Some(Block::ROW), Some(Block { rows: 64, columns: 192 })),
    (Some(Block { rows: 1, columns: 512 }), Some(Block { rows: 48, columns: 256 })),
];

#[test]
fn matches_reference_for_every_pair_of_blocks() {
    every_exec(|exec| {
        let mut rng = Rng::new(1);
        for (x_block, w_block) in BLOCKS {
            for (m, n, k) in [(1, 5, 35), (3, 64, 128), (13, 67, 129), (25, 131, 300), (40, 70, 1100), (2, 33, 4000)] {
                let x = Operand::new(&mut rng, DType::E4M3, &[m, k], x_block);
                let w = Operand::new(&mut rng, DType::E4M3, &[n, k], w_block);
                let out = product(exec, &x, &w, DType::F32);
                let what = format!("{exec:?} {m}x{n}x{k} {x_block:?} {w_block:?}");
                assert_matches(&what, out.view(), n, |p| reference::scaled_gemm(p, x.view(), w.view()));
            }
        }
    });
}

#[test]
fn outputs_of_16_bits_match_reference_and_have_the_bits_of_few_rows() {
    let mut rng = Rng::new(10);
    for (i, (x_block, w_block)) in BLOCKS.into_iter().enumerate() {
        for (m, n, k) in [(2, 70, 1104), (3, 40, 144), (40, 200, 1104), (150, 72, 784), (514, 70, 304)] {
            let to = FLOATS[1 + i % 2];
            let x = Operand::new(&mut rng, DType::E4M3, &[m, k], x_block);
            let w = Operand::new(&mut rng, DType::E4M3, &[n, k], w_block);
            let wanted = Wanted::of(to, |p| reference::scaled_gemm(p, x.view(), w.view()));
            every_exec(|exec| {
                let out = product(exec, &x, &w, to);
                let what = format!("{exec:?} {m}x{n}x{k} {to} {x_block:?} {w_block:?}");
                wanted.check(&what, out.view(), n);
                if x_block.is_none_or(|b| b.rows == 1 || b == Block::TENSOR) {
                    let alone = product(exec, &x.row(m - 1), &w, to).view().to_f32_vec().unwrap();
                    assert_eq!(alone, out.view().to_f32_vec().unwrap()[(m - 1) * n..], "{what}");
                }
            });
        }
    }
}

#[test]
fn single_columns_match_reference() {
    every_exec(|exec| {
        let mut rng = Rng::new(9);
        for (x_block, w_block) in BLOCKS {
            // The naive error of a sum or two may be small by luck: columns are computed one by one, and compared together.
            let (m, n, k) = (2, 33, 4000);
            let x = Operand::new(&mut rng, DType::E4M3, &[m, k], x_block);
            let ws: Vec<_> = (0..n).map(|_| Operand::new(&mut rng, DType::E4M3, &[1, k], w_block)).collect();
            let mut all = vec![0f32; m * n];
            for (c, w) in ws.iter().enumerate() {
                for (r, &y) in product(exec, &x, w, DType::F32).as_slice::<f32>().unwrap().iter().enumerate() {
                    all[r * n + c] = y;
                }
            }
            let out = TensorRef::new(&all, &[m, n]).unwrap();
            assert_matches(&format!("{exec:?} {x_block:?} {w_block:?}"), out, n, |p| {
                let mut all = vec![0f64; m * n];
                for (c, w) in ws.iter().enumerate() {
                    for (r, y) in reference::scaled_gemm(p, x.view(), w.view())?.into_iter().enumerate() {
                        all[r * n + c] = y;
                    }
                }
                Ok(all)
            });
        }
    });
}

#[test]
fn matches_reference_for_every_mix_of_types() {
    every_exec(|exec| {
        let mut rng = Rng::new(2);
        for from in [DType::F32, DType::F16, DType::BF16, DType::E4M3, DType::E5M2] {
            for (weights, to) in [DType::E4M3, DType::E5M2].into_iter().flat_map(|w| FLOATS.map(|o| (w, o))) {
                for m in [3, 40] {
                    let x = Operand::new(&mut rng, from, &[m, 260], Some(Block::GROUP));
                    let w = Operand::new(&mut rng, weights, &[70, 260], Some(Block::TILE));
                    let out = product(exec, &x, &w, to);
                    assert_matches(&format!("{exec:?} {m} {from} {weights} {to}"), out.view(), 70, |p| {
                        reference::scaled_gemm(p, x.view(), w.view())
                    });
                }
            }
        }
    });
}

#[test]
fn strided_operands_match_reference_and_gaps_stay() {
    every_exec(|exec| {
        let mut rng = Rng::new(3);
        let (x, w) = (Operand::new(&mut rng, DType::E4M3, &[30, 300], None), rng.tensor(DType::E5M2, &[70, 310]));
        let x = x.data.view().slice(1, 20..220).unwrap();
        let w = w.view().slice(1, 100..300).unwrap();
        let scales = rng.normals(30 * 5 + 9);
        let xs = TensorRef::strided(&scales, &[30, 2], &[5, 1]).unwrap();
        let ws = TensorRef::strided(&scales, &[1, 2], &[1, 1]).unwrap();
        let (x, w) = (Scaled::new(x, xs, Block::GROUP), Scaled::new(w, ws, Block::TILE));
        let mut out = vec![-9.5f32; 30 * 90];
        scaled_gemm(exec, x, w, TensorMut::strided(&mut out, &[30, 70], &[90, 1]).unwrap()).unwrap();
        let got = TensorRef::strided(&out, &[30, 70], &[90, 1]).unwrap();
        assert_matches(&format!("{exec:?}"), got, 70, |p| reference::scaled_gemm(p, x, w));
        assert_eq!(out.iter().filter(|&&x| x == -9.5).count(), 30 * 20);
    });
}

#[test]
fn empty_sides_give_zeros_or_nothing() {
    every_exec(|exec| {
        let mut rng = Rng::new(4);
        for (x_block, w_block) in BLOCKS {
            for (m, n, k) in [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0), (40, 100, 0)] {
                let x = Operand::new(&mut rng, DType::E4M3, &[m, k], x_block);
                let w = Operand::new(&mut rng, DType::E5M2, &[n, k], w_block);
                let mut out = Tensor::from_f32(DType::F32, &vec![5.0; m * n], &[m, n]).unwrap();
                scaled_gemm(exec, x.view(), w.view(), out.view_mut()).unwrap();
                assert_eq!(out.as_slice::<f32>().unwrap(), vec![0.0; m * n]);
            }
        }
    });
}

#[test]
fn not_numbers_reach_their_row_and_column_alone() {
    every_exec(|exec| {
        let mut rng = Rng::new(5);
        let x = Operand::new(&mut rng, DType::E4M3, &[20, 256], None);
        let w = Operand::new(&mut rng, DType::E4M3, &[40, 256], None);
        let mut scales = [1.0f32; 40];
        (scales[3], scales[21]) = (f32::NAN, f32::NAN);
        let xs = TensorRef::new(&scales, &[20, 2]).unwrap();
        let mut out = Tensor::zeros(DType::F32, &[20, 40]).unwrap();
        scaled_gemm(exec, Scaled::new(x.data.view(), xs, Block::GROUP), w.view(), out.view_mut()).unwrap();
        let out = out.as_slice::<f32>().unwrap();
        assert!(out.iter().enumerate().all(|(i, y)| y.is_nan() == (i / 40 == 1 || i / 40 == 10)), "{exec:?}");
    });
}

#[test]
fn bad_arguments_are_named() {
    let exec = Exec::cpu().unwrap();
    let t = |dtype, shape: &[usize]| Tensor::zeros(dtype, shape).unwrap();
    let check = |x: Scaled<'_>, w: Scaled<'_>, mut out: Tensor, want: &str| {
        assert_eq!(scaled_gemm(&exec, x, w, out.view_mut()).unwrap_err().to_string(), want);
    };
    use DType::{BF16, E4M3, F32, I32};
    let (x, w, out, s) = (t(E4M3, &[2, 256]), t(E4M3, &[3, 256]), t(F32, &[2, 3]), t(F32, &[2, 2]));
    let (xv, wv) = (x.view(), w.view());
    check(xv.into(), t(E4M3, &[3, 9]).view().into(), out.clone(), "scaled_gemm: `w` has k=9, but `x` bound k=256");
    check(xv.into(), wv.into(), t(F32, &[2, 4]), "scaled_gemm: `out` has n=4, but `w` bound n=3");
    check(xv.into(), t(BF16, &[3, 256]).view().into(), out.clone(), "scaled_gemm: `w` is bf16, expected e4m3 or e5m2");
    check(
        t(I32, &[2, 256]).view().into(),
        wv.into(),
        out.clone(),
        "scaled_gemm: `x` is i32, expected f32, f16, bf16, e4m3 or e5m2",
    );
    check(xv.into(), wv.into(), t(I32, &[2, 3]), "scaled_gemm: `out` is i32, expected f32, f16 or bf16");
    check(
        Scaled::new(xv, s.view(), Block::ROW),
        wv.into(),
        out.clone(),
        "scaled_gemm: `x.scales` is [2, 2], expected [2, 1]",
    );
    check(
        xv.into(),
        Scaled::new(wv, t(BF16, &[1, 2]).view(), Block::TILE),
        out.clone(),
        "scaled_gemm: `w.scales` is bf16, expected f32",
    );
    check(
        Scaled::new(xv, s.view(), Block { rows: 1, columns: 0 }),
        wv.into(),
        out,
        "scaled_gemm: `x.scales` is 1 × 0 blocks, expected at least 1 × 1",
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn a_row_has_the_same_bits_whatever_is_beside_it(
        m in 1usize..80, n in 1usize..150, k in 0usize..1200, pick in any::<u64>(), threads in 1usize..5,
        blocks in prop::sample::select(&BLOCKS[..]),
        dtype in prop::sample::select(&[DType::E4M3, DType::BF16, DType::F16][..]),
    ) {
        let mut rng = Rng::new(pick);
        let x = Operand::new(&mut rng, dtype, &[m, k], blocks.0);
        let w = Operand::new(&mut rng, DType::E4M3, &[n, k], blocks.1);
        let row = rng.below(m);
        for level in fir::exec::Level::available() {
            let one = product(&Exec::cpu_with(level, 1).unwrap(), &x.row(row), &w, DType::F32);
            let all = product(&Exec::cpu_with(level, threads).unwrap(), &x, &w, DType::F32);
            prop_assert_eq!(one.as_slice::<f32>().unwrap(), &all.as_slice::<f32>().unwrap()[row * n..][..n]);
        }
    }
}
