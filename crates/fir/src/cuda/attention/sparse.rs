//! `sm90_sparse.cuh`: what it takes, and its lists: the columns that any of a few neighbouring row blocks sees.

use std::sync::Arc;

use super::super::arch::Arch;
use super::super::call::Call;
use super::super::driver::{self, Buffer, Grid, TensorMap};
use super::super::exec::{Gpu, Kernel};
use super::super::jit::Source;
use super::super::params::{Address, params};
use super::form::cpp;
use super::{Rows, Spec, check_last, list, strides};
use crate::error::Result;
use crate::tensor::{DType, TensorMut, TensorRef};

params! {
    struct SparseParams = "fir::SparseParams" {
        k: TensorMap,
        v: TensorMap,
        q: Address,
        out: Address,
        lse: Address,
        q_token: u64,
        q_head: u64,
        out_token: u64,
        out_head: u64,
        lse_token: u64,
        lse_head: u64,
        lists: Address,
        columns: Address,
        seen: Address,
        tokens: i32,
        block_tokens: i32,
        group: i32,
        heads: i32,
        units: i32,
        scale: f32,
        pad: u64,
    }
}

/// Rows of a row block: one tile of a warp. Columns of a block that is copied.
const BLOCK: usize = 16;

/// Row blocks of a unit (a warp each), column blocks of a stage, and stages. 8192^2, a quarter of blocks of 16, on an H200, in
/// TFLOP/s: dim 128 with 7 warps 163, 11 193, 15 155 (they have 128 registers and spill); dim 64 with 11 165, 15 196; and with
/// columns in an even order 199 and 204.
fn shape(dim: usize) -> [usize; 3] {
    if dim == 128 { [11, 8, 3] } else { [15, 8, 6] }
}

fn source(dtype: DType, dim: usize) -> Source {
    let [warps, blocks, stages] = shape(dim);
    let name = format!("fir::sparse_sm90<fir::SparseConfig<{}, {dim}, {warps}, {blocks}, {stages}>>", cpp(dtype));
    Source::new::<SparseParams>("attention/sm90_sparse.cuh", name)
}

/// Every instantiation.
pub(super) fn kernels() -> Vec<Source> {
    [DType::BF16, DType::F16].into_iter().flat_map(|d| [64, 128].map(|dim| source(d, dim))).collect()
}

/// Which column blocks each row block sees: as `attention::BlockMask`.
#[derive(Clone, Copy)]
pub(crate) struct Mask<'a> {
    pub(crate) indptr: &'a [i32],
    pub(crate) indices: &'a [i32],
    pub(crate) rows: usize,
    pub(crate) block_rows: usize,
    pub(crate) block_cols: usize,
}

/// A mask as a device has it.
#[derive(Debug)]
pub(crate) struct Plan {
    gpu: Gpu,
    kernel: Arc<Kernel>,
    dtype: DType,
    dim: usize,
    group: usize,
    rows: usize,
    block_rows: usize,
    units: usize,
    /// Where columns and bits begin, and the end, in words; none of it on a dry run.
    offsets: [usize; 3],
    memory: Option<Buffer>,
}

impl Plan {
    /// None where the kernel does not take the problem, or neighbours have too little in common or to do: then every row block
    /// is a request of its own.
    pub(crate) fn new(gpu: &Gpu, spec: &Spec, kv_heads: usize, mask: Mask<'_>) -> Result<Option<Self>> {
        let properties = gpu.properties();
        let takes = properties.arch == Arch::HOPPER
            && matches!(spec.q, DType::BF16 | DType::F16)
            && [spec.kv, spec.out] == [spec.q; 2]
            && matches!(spec.dim_qk, 64 | 128)
            && spec.dim_vo == spec.dim_qk
            && spec.variant == crate::variant::standard()
            && mask.block_rows.saturating_mul(spec.group) <= BLOCK
            && mask.block_cols.is_multiple_of(BLOCK);
        let (dim, warps) = (spec.dim_qk, shape(spec.dim_qk)[0]);
        let units = mask.indptr.len().saturating_sub(1).div_ceil(warps);
        if !takes || units * kv_heads < properties.multiprocessors as usize {
            return Ok(None);
        }
        let Some(Lists { lists, columns, seen }) = Lists::new(mask, warps) else { return Ok(None) };
        let offsets = [lists.len(), lists.len() + columns.len(), lists.len() + columns.len() + seen.len()];
        let words: Vec<i32> = lists.into_iter().chain(columns).chain(seen.into_iter().map(|w| w as i32)).collect();
        let memory = gpu.stream().map(|stream| Buffer::new(stream, size_of_val(&words[..]))).transpose()?;
        memory.as_ref().map_or(Ok(()), |memory| gpu.send(&[bytemuck::cast_slice(&words)], memory))?;
        let kernel = gpu.kernel(source(spec.q, dim))?;
        let (rows, block_rows) = (mask.rows, mask.block_rows);
        Ok(Some(Self {
            gpu: gpu.clone(),
            kernel,
            dtype: spec.q,
            dim,
            group: spec.group,
            rows,
            block_rows,
            units,
            offsets,
            memory,
        }))
    }

    /// Queues one layer, of arguments that were checked; false if their alignment is not the kernel's.
    #[expect(clippy::too_many_arguments, reason = "the tensors of one kernel")]
    pub(crate) fn run<'a>(
        &'a self,
        gpu: &'a Gpu,
        op: &'static str,
        q: TensorRef<'a>,
        [k, v]: [TensorRef<'a>; 2],
        sm_scale: f32,
        out: TensorMut<'a>,
        lse: Option<TensorMut<'a>>,
    ) -> Result<bool> {
        list::check(op, &self.gpu, gpu)?;
        let mut call = Call::new(gpu, op);
        let (cols, kv_heads) = (k.shape()[0] as u64, k.shape()[1] as u64);
        let rows = Rows::new(&mut call, "q", q)?;
        let [k, v] = [Rows::new(&mut call, "k", k)?, Rows::new(&mut call, "v", v)?];
        let [lse_token, lse_head] = lse.as_ref().map_or([0; 2], |lse| strides(lse.layout(), 1));
        let lse = lse.map_or(Ok(Address(0)), |lse| call.write("lse", lse))?;
        check_last(op, "out", out.layout())?;
        let [out_token, out_head] = strides(out.layout(), 2);
        let out = call.write("out", out)?;
        let fits = [rows.start.0, rows.token, rows.head, out.0, out_token, out_head].iter().all(|x| x % 4 == 0)
            && [k, v].iter().all(|t| [t.start.0, t.token, t.head].iter().all(|x| x % 16 == 0));
        if !fits || cols < 8 {
            return Ok(false);
        }
        let map = |t: Rows| {
            // What is never stepped along has a stride of 0, which need not be true of maps.
            let or = |stride: u64| if stride == 0 { 2 * self.dim as u64 } else { stride };
            let (halves, token) = (self.dim as u64 / 64, or(t.token));
            gpu.tensor_map(&driver::Boxes {
                start: t.start.0,
                dtype: self.dtype,
                dims: &[64, 8, halves, cols / 8, kv_heads],
                strides: &[token, 128, 8 * token, or(t.head)],
                shape: &[64, 8, halves as u32, BLOCK as u32 / 8, 1],
                in_order: false,
            })
        };
        let (Ok(k), Ok(v)) = (map(k), map(v)) else { return Ok(false) };
        let start = self.memory.as_ref().map_or(7 << 60, Buffer::address);
        let at = |i: usize| Address(start + 4 * i as u64);
        call.name("lists", start, 4 * self.offsets[2]);
        let params = SparseParams {
            k,
            v,
            q: rows.start,
            out,
            lse,
            q_token: rows.token,
            q_head: rows.head,
            out_token,
            out_head,
            lse_token,
            lse_head,
            lists: at(0),
            columns: at(self.offsets[0]),
            seen: at(self.offsets[1]),
            tokens: self.rows as i32,
            block_tokens: self.block_rows as i32,
            group: self.group as i32,
            heads: kv_heads as i32,
            units: self.units as i32,
            scale: sm_scale * std::f32::consts::LOG2_E,
            pad: 0,
        };
        let [warps, blocks, stages] = shape(self.dim);
        let smem = (stages * (2 * blocks * BLOCK * self.dim * 2 + 16)) as u32;
        let grid = Grid { smem, ..Grid::new(gpu.properties().multiprocessors, 32 * (warps as u32 + 1)) };
        let other = list::enter(&self.gpu, gpu)?;
        call.launch(&self.kernel, grid, &params)?;
        if other {
            list::leave(&self.gpu, gpu)?;
        }
        call.finish()?;
        Ok(true)
    }
}

/// Start and length of each unit's list; the columns of all; for each row block a bit for each of them.
#[derive(Debug, PartialEq, Eq)]
struct Lists {
    lists: Vec<i32>,
    columns: Vec<i32>,
    seen: Vec<u32>,
}

impl Lists {
    /// None if a row block lists a column twice, or neighbours have hardly a column in common.
    fn new(mask: Mask<'_>, warps: usize) -> Option<Self> {
        let (mut lists, mut columns, mut seen) = (Vec::new(), Vec::new(), Vec::new());
        let (per, row_blocks) = (mask.block_cols / BLOCK, mask.indptr.len() - 1);
        let most = mask.indices.iter().max().map_or(0, |&c| c as usize + 1) * per;
        // Who sees each column, for the unit at hand.
        let mut by = vec![0u16; most];
        for unit in (0..row_blocks).step_by(warps) {
            let mut own = Vec::new();
            for block in unit..(unit + warps).min(row_blocks) {
                for &c in &mask.indices[mask.indptr[block] as usize..mask.indptr[block + 1] as usize] {
                    let (first, bit) = (c as usize * per, 1 << (block - unit));
                    for (i, by) in by[first..first + per].iter_mut().enumerate() {
                        match *by {
                            0 => own.push(first + i),
                            others if others & bit != 0 => return None,
                            _ => {}
                        }
                        *by |= bit;
                    }
                }
            }
            let own = even(own, &by);
            let (first, words) = (columns.len(), own.len().div_ceil(32));
            lists.extend([first as i32, own.len() as i32]);
            let bits = seen.len();
            seen.resize(bits + warps * words, 0u32);
            for (i, &c) in own.iter().enumerate() {
                for w in ones(by[c]) {
                    seen[bits + w * words + i / 32] |= 1 << (i % 32);
                }
                columns.push(c as i32);
                by[c] = 0;
            }
            columns.resize(first + 32 * words, 0);
        }
        let (read, used) = (columns.len(), mask.indices.len() * per);
        (used * 4 >= read * 5).then_some(Self { lists, columns, seen })
    }
}

/// Numbers of the bits that are set.
fn ones(mut bits: u16) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let first = (bits != 0).then(|| bits.trailing_zeros() as usize);
        bits &= bits.wrapping_sub(1);
        first
    })
}

/// Columns in an order in which all row blocks come to theirs evenly: a warp that has much at once holds up the ring.
fn even(mut columns: Vec<usize>, by: &[u16]) -> Vec<usize> {
    // How far ahead a column is looked for.
    const AHEAD: usize = 24;
    let count = columns.len() as i64;
    let bits = |c: usize| ones(by[c]);
    let (mut all, mut sent) = ([0i64; 16], [0i64; 16]);
    columns.iter().for_each(|&c| bits(c).for_each(|w| all[w] += 1));
    for i in 0..columns.len() {
        // Columns sent beyond a warp's share, times their number.
        let lead: [i64; 16] = std::array::from_fn(|w| sent[w] * count - (i as i64 + 1) * all[w]);
        let end = (i + AHEAD).min(columns.len());
        let cost = |&at: &usize| bits(columns[at]).map(|w| 2 * lead[w] + count).sum::<i64>();
        if let Some(best) = (i..end).min_by_key(cost) {
            // The others keep their order, so that none waits for ever.
            columns[i..=best].rotate_right(1);
        }
        bits(columns[i]).for_each(|w| sent[w] += 1);
    }
    columns
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every (row block, column) of a mask is in the lists once, and nothing else.
    #[test]
    fn lists_are_the_mask() {
        let (mut indptr, mut indices) = (vec![0], Vec::new());
        for block in 0..37 {
            indices.extend((0..40).filter(|c| (c * 7 + block * 3) % 4 == 0));
            indptr.push(indices.len() as i32);
        }
        for (block_cols, warps) in [(16, 11), (48, 15)] {
            let mask = Mask { indptr: &indptr, indices: &indices, rows: 37 * 16, block_rows: 16, block_cols };
            let lists = Lists::new(mask, warps).unwrap();
            let per = block_cols / 16;
            for block in 0..37usize {
                let (first, count) =
                    (lists.lists[block / warps * 2] as usize, lists.lists[block / warps * 2 + 1] as usize);
                assert_eq!(first % 32, 0);
                let seen = &lists.seen[first / 32 * warps + block % warps * count.div_ceil(32)..];
                let mut got: Vec<i32> = (0..count)
                    .filter(|i| seen[i / 32] >> (i % 32) & 1 == 1)
                    .map(|i| lists.columns[first + i])
                    .collect();
                got.sort_unstable();
                let own = &indices[indptr[block] as usize..indptr[block + 1] as usize];
                let want: Vec<i32> = own.iter().flat_map(|&c| c * per as i32..(c + 1) * per as i32).collect();
                assert_eq!(got, want, "row block {block}");
            }
        }
        // A column twice; nothing in common.
        let mask = |indptr: &'static [i32], indices: &'static [i32]| Mask {
            indptr,
            indices,
            rows: 32,
            block_rows: 16,
            block_cols: 16,
        };
        assert_eq!(Lists::new(mask(&[0, 2, 3], &[1, 1, 0]), 11), None);
        assert_eq!(Lists::new(mask(&[0, 1, 2], &[1, 0]), 11), None);
    }
}
