//! The small vectors around page tables; appending itself is [`tokens`](super::tokens)'.

use super::call::Call;
use super::driver::Grid;
use super::exec::Gpu;
use super::jit::Source;
use super::params::{Address, params};
use super::tokens::integers;
use crate::error::{Error, Result};
use crate::kv::Ragged;
use crate::tensor::{TensorMut, TensorRef};

params! {
    struct PageParams = "fir::PageParams" {
        indptr: Address,
        lens: Address,
        first: Address,
        second: Address,
        lens_stride: u64,
        first_stride: u64,
        second_stride: u64,
        batch: u32,
        count: u32,
        wide: u32,
        page_size: u32,
    }
}

fn source(name: &str) -> Source {
    Source::new::<PageParams>("page.cuh", format!("fir::{name}<>"))
}

/// Every instantiation.
pub(super) fn kernels() -> Vec<Source> {
    ["batch_indices_positions", "seq_lens"].map(source).to_vec()
}

pub(crate) fn batch_indices_positions<'a>(
    gpu: &'a Gpu,
    op: &'static str,
    indptr: &Ragged,
    lens: TensorRef<'a>,
    requests: TensorMut<'a>,
    positions: TensorMut<'a>,
) -> Result<()> {
    let mut call = Call::new(gpu, op);
    let (lens, lens_stride, wide) = integers(&mut call, "seq_lens", lens)?;
    let (first_stride, second_stride) = (requests.strides()[0] as u64, positions.strides()[0] as u64);
    let params = PageParams {
        indptr: call.upload("indptr", indptr.indptr())?,
        lens,
        first: call.write("batch_indices", requests)?,
        second: call.write("positions", positions)?,
        lens_stride,
        first_stride,
        second_stride,
        batch: indptr.batch() as u32,
        count: indptr.rows() as u32,
        wide,
        page_size: 0,
    };
    launch(gpu, call, "batch_indices_positions", params.count, &params)
}

pub(crate) fn seq_lens<'a>(
    gpu: &'a Gpu,
    op: &'static str,
    indptr: &Ragged,
    last_page_len: TensorRef<'a>,
    page_size: usize,
    out: TensorMut<'a>,
) -> Result<()> {
    let page_size =
        u32::try_from(page_size).map_err(|_| Error::value(op, "page_size", page_size, "at most 2^32 - 1 on CUDA"))?;
    let mut call = Call::new(gpu, op);
    let (lens, lens_stride, wide) = integers(&mut call, "last_page_len", last_page_len)?;
    let first_stride = out.strides()[0] as u64;
    let params = PageParams {
        indptr: call.upload("indptr", indptr.indptr())?,
        lens,
        first: call.write("out", out)?,
        second: Address::default(),
        lens_stride,
        first_stride,
        second_stride: 0,
        batch: indptr.batch() as u32,
        count: indptr.batch() as u32,
        wide,
        page_size,
    };
    launch(gpu, call, "seq_lens", params.count, &params)
}

fn launch(gpu: &Gpu, call: Call<'_>, name: &str, threads: u32, params: &PageParams) -> Result<()> {
    if threads > 0 {
        let grid = Grid { early: true, ..Grid::new(threads.div_ceil(256), 256) };
        call.launch(&*gpu.kernel(source(name))?, grid, params)?;
    }
    call.finish()
}
