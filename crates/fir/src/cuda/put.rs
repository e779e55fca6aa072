//! Small arrays of the host, written by a kernel (`put.cuh`): nobody waits, and a graph records the values.

use bytemuck::Zeroable as _;

use super::driver::{Buffer, Grid};
use super::exec::Gpu;
use super::jit::Source;
use super::params::{Address, params};
use crate::error::{Error, Result};

/// Words of a launch: half of the 4096 bytes that parameters may have.
const WORDS: usize = 256;

/// Most bytes that are worth it: eight launches.
pub(super) const MOST: usize = 8 * 8 * WORDS;

params! {
    struct PutParams = "fir::PutParams" {
        to: Address,
        words: u32,
        pad: u32,
        values: [u64; WORDS],
    }
}

fn source() -> Source {
    Source::new::<PutParams>("put.cuh", "fir::put".into())
}

pub(super) fn kernels() -> Vec<Source> {
    vec![source()]
}

/// Queues a copy of `bytes`, at most [`MOST`], to the beginning of `to`, which has room for whole words of 8.
pub(super) fn put(op: &'static str, gpu: &Gpu, bytes: &[u8], to: &Buffer) -> Result<()> {
    let kernel = gpu.kernel(source())?;
    let Some(function) = &kernel.function else {
        return Err(Error::Unsupported { op, why: vec!["a kernel of a dry run".into()] });
    };
    for (i, part) in bytes.chunks(8 * WORDS).enumerate() {
        let to_here = Address(to.address() + (i * 8 * WORDS) as u64);
        let mut params = PutParams { to: to_here, words: part.len().div_ceil(8) as u32, ..PutParams::zeroed() };
        bytemuck::bytes_of_mut(&mut params.values)[..part.len()].copy_from_slice(part);
        function.launch(to.stream(), Grid::new(1, 128), bytemuck::bytes_of(&params))?;
    }
    Ok(())
}
