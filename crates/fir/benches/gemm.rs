//! Dense products: near the memory's speed for few rows, near the multiply-adds' for many.

mod support;

use fir::gemm::{Block, GroupedArgs, Scaled};
use fir::kv::Ragged;
use fir::reference::{Precision, gemm as reference};
use fir::{DType, gemm};
use support::{Suite, Work, matches, random};

fn main() {
    let mut suite = Suite::new();
    let levels = suite.levels();
    let (batches, sides): (&[usize], &[(usize, usize)]) = if suite.checks_only() {
        (&[1, 40], &[(160, 256)])
    } else {
        (&[1, 8, 64, 512], &[(2048, 2048), (14336, 4096)])
    };
    for &(n, k) in sides {
        for dtype in [DType::F32, DType::BF16] {
            let w = random(1, dtype, &[n, k]);
            for &m in batches {
                let (x, out) = (random(2, dtype, &[m, k]), random(3, dtype, &[m, n]));
                let work = Work { bytes: (m * k + n * k + m * n) * dtype.size(), flops: 2 * m * n * k };
                for (level, exec) in &levels {
                    suite.bench(
                        &format!("gemm/n{n}-k{k}-{dtype}/m{m}/{level}"),
                        work,
                        out.clone(),
                        |out| gemm::gemm(exec, x.view(), w.view(), out.view_mut()).unwrap(),
                        |out| {
                            // The last rows and columns: what remains after whole tiles and panels.
                            let (x, w) = (x.view().slice(0, m - 1..m).unwrap(), w.view().slice(0, n - 100..n).unwrap());
                            let got = out.view().slice(0, m - 1..m).unwrap().slice(1, n - 100..n).unwrap();
                            matches(got, 100, |p| reference::gemm(p, x, w))
                        },
                    );
                }
                if m == 1 && n * k <= 1 << 22 {
                    suite.bench(
                        &format!("gemm/n{n}-k{k}-{dtype}/m{m}/reference"),
                        work,
                        Vec::new(),
                        |out| *out = reference::gemm(Precision::Exact, x.view(), w.view()).unwrap(),
                        |out| if out.len() == n { Ok(()) } else { Err(format!("{} elements", out.len())) },
                    );
                }
            }
        }
    }
    scaled(&mut suite);
    grouped(&mut suite);
}

/// fp8 by fp8 in DeepSeek's blocks, and bf16 by fp8 with a scale per channel.
fn scaled(suite: &mut Suite) {
    let levels = suite.levels();
    let (n, k) = if suite.checks_only() { (256, 384) } else { (4096, 7168) };
    let batches: &[usize] = if suite.checks_only() { &[1, 40] } else { &[1, 8, 64, 512] };
    let w = random(1, DType::E4M3, &[n, k]);
    for (name, x_type, x_block, w_block) in [
        ("e4m3-1x128-128x128", DType::E4M3, Block::GROUP, Block::TILE),
        ("bf16-channel", DType::BF16, Block::TENSOR, Block::ROW),
    ] {
        let w_scales = random(2, DType::F32, &w_block.counts(n, k));
        let w_scaled = Scaled::new(w.view(), w_scales.view(), w_block);
        for &m in batches {
            let (x, x_scales) = (random(3, x_type, &[m, k]), random(4, DType::F32, &x_block.counts(m, k)));
            let x_scaled = Scaled::new(x.view(), x_scales.view(), x_block);
            let work = Work { bytes: m * k * x_type.size() + n * k + 2 * m * n, flops: 2 * m * n * k };
            for (level, exec) in &levels {
                suite.bench(
                    &format!("scaled_gemm/n{n}-k{k}-{name}/m{m}/{level}"),
                    work,
                    random(5, DType::BF16, &[m, n]),
                    |out| gemm::scaled_gemm(exec, x_scaled, w_scaled, out.view_mut()).unwrap(),
                    |out| {
                        let last = |x: Scaled<'_>, at: usize| -> (usize, usize) {
                            (at, if x.block.rows == Block::ALL { 0 } else { at / x.block.rows })
                        };
                        let ((r, rs), (c, cs)) = (last(x_scaled, m - 1), last(w_scaled, n - 128));
                        let x_last = Scaled::new(
                            x.view().slice(0, r..m).unwrap(),
                            x_scales.view().slice(0, rs..x_scales.shape()[0]).unwrap(),
                            x_block,
                        );
                        let w_last = Scaled::new(
                            w.view().slice(0, c..n).unwrap(),
                            w_scales.view().slice(0, cs..w_scales.shape()[0]).unwrap(),
                            w_block,
                        );
                        let got = out.view().slice(0, r..m).unwrap().slice(1, c..n).unwrap();
                        matches(got, 128, |p| reference::scaled_gemm(p, x_last, w_last))
                    },
                );
            }
        }
    }
}

/// Experts of equal share.
fn grouped(suite: &mut Suite) {
    let levels = suite.levels();
    let (groups, n, k) = if suite.checks_only() { (3, 96, 128) } else { (16, 1024, 2048) };
    let w = random(1, DType::BF16, &[groups, n, k]);
    for each in [1, 16] {
        let indptr = Ragged::from_lens(&vec![each as u32; groups]).unwrap();
        let (m, x) = (groups * each, random(2, DType::BF16, &[groups * each, k]));
        for (level, exec) in &levels {
            suite.bench(
                &format!("grouped_gemm/g{groups}-n{n}-k{k}-bf16/m{m}/{level}"),
                Work { bytes: (m * k + groups * n * k + m * n) * 2, flops: 2 * m * n * k },
                random(3, DType::BF16, &[m, n]),
                |out| {
                    let (x, w, out) = (x.view().into(), w.view().into(), out.view_mut());
                    let args = GroupedArgs { x, indptr: &indptr, w, weight_indices: None, out };
                    gemm::grouped_gemm(exec, args).unwrap();
                },
                |out| {
                    let (x, w) = (x.view().slice(0, m - 1..m).unwrap(), w.view().select(0, groups - 1).unwrap());
                    matches(out.view().slice(0, m - 1..m).unwrap(), n, |p| reference::gemm(p, x, w))
                },
            );
        }
    }
}
