//! Rows of matrix products: dense and of groups, bf16 and fp8.

use std::cell::RefCell;
use std::ops::Range;

use fir::gemm::{Block, GroupedArgs, Scaled, gemm, grouped_gemm};
use fir::kv::Ragged;
use fir::reference::{Precision, gemm as reference};
use fir::testing::{Compare, compare};
use fir::{DType, Error, Result, Tensor};

use super::{Goal, Suite, Work, check};

pub(super) fn run(suite: &Suite) -> Result<()> {
    if !suite.wants("gemm") {
        return Ok(());
    }
    // cuBLAS on the same machine, by the same protocol.
    for (m, n, k, goal, peer) in [
        (1, 4096, 4096, 17.8, "17.8"),
        (64, 4096, 4096, 17.7, "17.7"),
        (256, 4096, 4096, 23.7, "23.7"),
        (4096, 4096, 4096, 177.0, "176"),
        (8192, 8192, 8192, 1400.0, "1390"),
    ] {
        dense(suite, [m, n, k], goal, peer)?;
    }
    grouped(suite, DType::E4M3, [1, 4096], 140.0, "102 (cuBLAS, a scale per tensor)")?;
    grouped(suite, DType::BF16, [32, 256], 480.0, "598")?;
    grouped(suite, DType::BF16, [8, 64], 75.0, "196")?;
    grouped(suite, DType::E4M3, [32, 256], 480.0, "")
}

fn flops([m, n, k]: [usize; 3]) -> Work {
    Work::Flops(2.0 * m as f64 * n as f64 * k as f64)
}

fn dense(suite: &Suite, [m, n, k]: [usize; 3], goal: f64, peer: &'static str) -> Result<()> {
    let name = format!("gemm bf16 {m} × {n} × {k}");
    if !suite.wants(&name) {
        return Ok(());
    }
    let ((x, x_host), (w, w_host)) = (suite.random(1, &[m, k])?, suite.random(2, &[n, k])?);
    let out = RefCell::new(suite.gpu.zeros(DType::BF16, &[m, n])?);
    suite.bench(
        &name,
        flops([m, n, k]),
        Goal::Us(goal),
        peer,
        || gemm(&suite.exec, x.view(), w.view(), out.borrow_mut().view_mut()),
        || check(&out.borrow(), n, &x_host, |p, x| reference::gemm(p, x, w_host.view())),
    )
}

/// Numbers and scales, here and on the device.
struct Operand {
    host: Tensor,
    device: Tensor,
    scales: Option<([Tensor; 2], Block)>,
}

impl Operand {
    fn plain(suite: &Suite, seed: u64, dtype: DType, shape: &[usize]) -> Result<Self> {
        let host = suite.repeated(seed, dtype, shape)?;
        Ok(Self { device: host.to_device(&suite.gpu)?, host, scales: None })
    }

    /// e4m3 with scales from a half to 5/4.
    fn new(suite: &Suite, seed: u64, shape: &[usize], block: Block) -> Result<Self> {
        let (batch, matrix) = shape.split_at(shape.len() - 2);
        let counts = [batch, &block.counts(matrix[0], matrix[1])].concat();
        let numbers: Vec<f32> = (0..counts.iter().product()).map(|i: usize| 0.5 + (i % 7) as f32 / 8.0).collect();
        let scales = Tensor::from_f32(DType::F32, &numbers, &counts)?;
        let scales = [scales.to_device(&suite.gpu)?, scales];
        Ok(Self { scales: Some((scales, block)), ..Self::plain(suite, seed, DType::E4M3, shape)? })
    }

    fn view(&self) -> Scaled<'_> {
        match &self.scales {
            Some(([scales, _], block)) => Scaled::new(self.device.view(), scales.view(), *block),
            None => self.device.view().into(),
        }
    }

    /// Some rows here, each with scales of its own.
    fn rows(&self, rows: Range<usize>) -> Result<Scaled<'_>> {
        let data = self.host.view().slice(0, rows.clone())?;
        Ok(match &self.scales {
            Some(([_, scales], block)) => Scaled::new(data, scales.view().slice(0, rows)?, *block),
            None => data.into(),
        })
    }

    /// A matrix of a batch, here.
    fn matrix(&self, i: usize) -> Result<Scaled<'_>> {
        let data = self.host.view().select(0, i)?;
        Ok(match &self.scales {
            Some(([_, scales], block)) => Scaled::new(data, scales.view().select(0, i)?, *block),
            None => data.into(),
        })
    }
}

/// Groups of as many rows each, by weights of 4096 × 4096.
fn grouped(suite: &Suite, dtype: DType, [groups, each]: [usize; 2], goal: f64, peer: &'static str) -> Result<()> {
    const SIDE: usize = 4096;
    let name = format!("grouped gemm {dtype} {groups} × {each} rows, {SIDE}²");
    if !suite.wants(&name) {
        return Ok(());
    }
    let (x_block, w_block) = (Block::GROUP, Block::TILE);
    let (x_shape, w_shape) = ([groups * each, SIDE], [groups, SIDE, SIDE]);
    let operands = if dtype == DType::E4M3 {
        [Operand::new(suite, 1, &x_shape, x_block)?, Operand::new(suite, 2, &w_shape, w_block)?]
    } else {
        [Operand::plain(suite, 1, dtype, &x_shape)?, Operand::plain(suite, 2, dtype, &w_shape)?]
    };
    let [x, w] = &operands;
    let indptr = Ragged::from_lens(&vec![each as u32; groups])?;
    let out = RefCell::new(suite.gpu.zeros(DType::BF16, &[groups * each, SIDE])?);
    suite.bench(
        &name,
        flops([groups * each, SIDE, SIDE]),
        Goal::Us(goal),
        peer,
        || {
            let mut out = out.borrow_mut();
            let (x, w, out) = (x.view(), w.view(), out.view_mut());
            grouped_gemm(&suite.exec, GroupedArgs { x, indptr: &indptr, w, weight_indices: None, out })
        },
        || {
            // The last rows of the last group.
            let (rows, end) = (4, groups * each);
            let (got, x) = (out.borrow().to_host()?, x.rows(end - rows..end)?);
            let w = w.matrix(groups - 1)?;
            let of = |p| {
                if dtype == DType::E4M3 { reference::scaled_gemm(p, x, w) } else { reference::gemm(p, x.data, w.data) }
            };
            let (exact, naive) = (of(Precision::Exact)?, of(Precision::Naive(DType::BF16))?);
            compare(got.view().slice(0, end - rows..end)?, Compare { exact: &exact, naive: &naive, row: SIDE })
                .map_err(|e| Error::value("gpu", "result", e, "as the reference has it"))
        },
    )
}
