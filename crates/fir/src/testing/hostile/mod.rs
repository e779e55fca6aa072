//! Operators called with whatever bytes say: the fuzz target's and the test suite's common half.
//!
//! [`call`] reads an operator and its arguments from bytes and calls it. Arguments mostly fit each other, so that the
//! kernels are reached; now and then one has another size, rank, type or stride, and numbers are sometimes NaN or
//! `usize::MAX`. The operator may accept or refuse; it must not panic, nor read or write outside its tensors. Memory
//! ends where a tensor ends, so that the address sanitizer sees the first byte past it.
//!
//! A new operator adds a function like `rms_norm` and its line in [`TARGETS`].

mod attention;
mod cache;
mod moe;
mod quantize;
mod rows;
mod tokens;

use std::sync::OnceLock;

use crate::error::Result;
use crate::exec::{Exec, Level};
use crate::kv::{KvLayout, PageTable, PagedKv, Ragged, RaggedKv};
use crate::tensor::{DType, Layout, TensorMut, TensorRef};

type Target = fn(&Exec, &mut Bytes<'_>) -> Result<()>;

/// Everything that is called, by name.
pub const TARGETS: &[(&str, Target)] = &[
    ("tensor", tensor),
    ("PageTable", page_table),
    ("PagedKv", paged_kv),
    ("Ragged", ragged),
    ("activation", rows::activation),
    ("attention::BatchPlan", attention::batch),
    ("attention::CascadePlan", attention::cascade),
    ("attention::MlaPlan", attention::mla),
    ("attention::SparsePlan", attention::sparse),
    ("attention::VariableSparsePlan", attention::variable_sparse),
    ("attention::merge", attention::merge),
    ("attention::single", attention::single),
    ("gemm", rows::gemm),
    ("gemm::block_gemm", rows::block_gemm),
    ("gemm::dequantize_blocks", rows::dequantize_blocks),
    ("gemm::grouped_gemm", moe::grouped_gemm),
    ("gemm::scaled_gemm", moe::scaled_gemm),
    ("lora::adapt", moe::adapt),
    ("moe::moe_ffn", moe::ffn),
    ("moe::route", moe::route),
    ("moe::route_by_table", moe::route_by_table),
    ("norm::fused_add_rms_norm", rows::fused_add_rms_norm),
    ("norm::fused_add_rms_norm_quant", rows::fused_add_rms_norm_quant),
    ("norm::layer_norm", rows::layer_norm),
    ("norm::layer_norm_quant", rows::layer_norm_quant),
    ("norm::modulated_layer_norm", rows::modulated_layer_norm),
    ("norm::qk_rms_norm", rows::qk_rms_norm),
    ("norm::rms_norm", rows::rms_norm),
    ("page::append_paged_kv", cache::append_kv),
    ("page::append_paged_mla", cache::append_mla),
    ("page::seq_lens", cache::lengths),
    ("quantize::blocks", quantize::blocks),
    ("quantize::fp8", quantize::fp8),
    ("quantize::packbits", quantize::packbits),
    ("rope::apply_rope", cache::rope),
    ("rope::rope_quantize_append", cache::rope_append),
    ("sampling::renorm", tokens::renorm),
    ("sampling::sample", tokens::sample),
    ("speculative::chain", tokens::chain),
    ("speculative::tree", tokens::tree),
    ("topk::top_k", tokens::top_k),
    ("topk::transform", tokens::transform),
];

/// Reads a target and its arguments from `data` and calls it. Returns the target's index in [`TARGETS`], and what it
/// said.
///
/// # Panics
/// If the target panics or changes memory outside its output: a bug in it.
pub fn call(data: &[u8]) -> (usize, Result<()>) {
    static EXECS: OnceLock<Vec<Exec>> = OnceLock::new();
    let execs = EXECS.get_or_init(|| {
        let all = Level::available().into_iter().flat_map(|level| [1, 2].map(|threads| (level, threads)));
        all.map(|(level, threads)| Exec::cpu_with(level, threads).expect("an available level")).collect()
    });
    let mut bytes = Bytes { data, at: 0 };
    let target = bytes.below(TARGETS.len());
    let exec = &execs[bytes.below(execs.len())];
    (target, TARGETS[target].1(exec, &mut bytes))
}

/// Calls a target on a given executor with arguments read from `data`.
///
/// # Panics
/// As [`call`].
pub fn call_on(exec: &Exec, target: usize, data: &[u8]) -> Result<()> {
    TARGETS[target].1(exec, &mut Bytes { data, at: 0 })
}

/// Bytes read as arguments; zeros when they run out.
#[derive(Debug)]
pub struct Bytes<'a> {
    data: &'a [u8],
    at: usize,
}

impl Bytes<'_> {
    /// The next byte.
    pub fn byte(&mut self) -> u8 {
        self.at += 1;
        self.data.get(self.at - 1).copied().unwrap_or(0)
    }

    /// A number in `0..n`, for `n` up to 256.
    pub fn below(&mut self, n: usize) -> usize {
        usize::from(self.byte()) % n.max(1)
    }

    /// A size: mostly up to 80 (past two vectors of every level, with every tail), at times 0, rarely absurd.
    pub fn size(&mut self) -> usize {
        match self.byte() {
            b @ 0..=239 => usize::from(b) % 80 + 1,
            240..=249 => 0,
            250 => 18_000,
            251 => 1 << 40,
            252 => usize::MAX / 8,
            253 => usize::MAX,
            _ => self.below(256) * self.below(64),
        }
    }

    /// A float: mostly ordinary, at times any bits at all.
    pub fn f32(&mut self) -> f32 {
        match self.byte() {
            b @ 0..=199 => f32::from(b) * 1e-2,
            _ => f32::from_le_bytes(std::array::from_fn(|_| self.byte())),
        }
    }

    /// An integer: mostly in `0..n`, at times any at all.
    pub fn i32(&mut self, n: i32) -> i32 {
        let any = i32::from_le_bytes(std::array::from_fn(|_| self.byte()));
        if self.byte() < 240 { any.rem_euclid(n.max(1)) } else { any }
    }

    /// f32, f16 or bf16.
    pub fn float(&mut self) -> DType {
        [DType::F32, DType::F16, DType::BF16][self.below(3)]
    }

    /// Any element type.
    pub fn dtype(&mut self) -> DType {
        use DType::{BF16, Bool, E2M1x2, E4M3, E5M2, E8M0, F16, F32, I8, I16, I32, I64, U8, U32};
        [F32, F16, BF16, E4M3, E5M2, E8M0, E2M1x2, I8, I16, I32, I64, U8, U32, Bool][self.below(14)]
    }

    /// A tensor as asked for, or one with a fault in it.
    pub fn tensor(&mut self, dtype: DType, shape: &[usize]) -> Arg {
        let (mut dtype, mut shape) = (dtype, shape.to_vec());
        // Rows may be apart.
        let gap = if self.byte() < 64 { self.below(8) } else { 0 };
        let mut strides = vec![1usize; shape.len()];
        for a in (1..shape.len()).rev() {
            strides[a - 1] = strides[a].wrapping_mul(shape[a].max(1)).wrapping_add(gap);
        }
        let mut missing = 0;
        if self.byte() >= 224 {
            let axis = self.below(shape.len());
            match self.below(8) {
                0 => dtype = self.dtype(),
                1 if !shape.is_empty() => shape[axis] = self.size(),
                2 if !shape.is_empty() => strides[axis] = self.size(),
                3 if !shape.is_empty() => strides[axis] = 0,
                4 if !shape.is_empty() => drop((shape.remove(axis), strides.remove(axis))),
                5 => {
                    shape.insert(axis, self.size());
                    strides.insert(axis, self.size());
                }
                6 => {
                    shape.reverse();
                    strides.reverse();
                }
                _ => missing = 1 + self.below(16),
            }
        }
        // Enough for operators to run in parallel (from 16k elements on); a layout that wants more is refused.
        let extent = Layout::strided("hostile", "shape", &shape, &strides).map_or(0, |l| l.extent()).min(20_000);
        let bytes = extent.saturating_sub(missing) * dtype.size();
        let seed = u64::from(self.byte());
        let words: Vec<u64> = (0..bytes.div_ceil(8) as u64).map(|i| pattern(seed, i)).collect();
        Arg { before: words.clone(), words, bytes, dtype, shape, strides }
    }

    /// i32 or i64.
    pub fn int(&mut self) -> DType {
        [DType::I32, DType::I64][self.below(2)]
    }

    /// A tensor of integers (or bools) with these values, in row-major order; now and then one is any number.
    pub fn ids(&mut self, dtype: DType, shape: &[usize], mut value: impl FnMut(&mut Self, usize) -> i64) -> Arg {
        let mut arg = self.tensor(dtype, shape);
        let elements = arg.view().map_or(0, |x| x.layout().len()).min(1 << 10);
        let spoilt = if self.byte() < 232 { usize::MAX } else { self.below(elements) };
        let any = i64::from(self.i32(64)) - 8;
        let values: Vec<i64> = (0..elements).map(|i| if i == spoilt { any } else { value(self, i) }).collect();
        arg.fill(&values);
        arg
    }

    /// True once in 32.
    pub fn rarely(&mut self) -> bool {
        self.byte() >= 248
    }
}

/// The arrays of a page table; mostly those of a valid one.
#[derive(Debug)]
pub struct Pages {
    /// Tokens per page.
    pub page_size: usize,
    /// Pages of the pool.
    pub num_pages: usize,
    /// `[batch + 1]`
    pub indptr: Vec<i32>,
    /// Page ids.
    pub indices: Vec<i32>,
    /// `[batch]`
    pub last_page_len: Vec<i32>,
}

impl Pages {
    /// The table, if these are one's arrays.
    pub fn table(&self) -> Result<PageTable<'_>> {
        PageTable::new(self.page_size, self.num_pages, &self.indptr, &self.indices, &self.last_page_len)
    }
}

impl Bytes<'_> {
    /// Offsets of up to 7 requests with up to `most` entries each.
    pub fn indptr(&mut self, most: usize) -> Vec<i32> {
        let mut indptr = vec![0];
        for _ in 0..self.below(8) {
            indptr.push(indptr[indptr.len() - 1] + self.below(most + 1) as i32);
        }
        self.spoil(&mut indptr);
        indptr
    }

    /// A page table's arrays, over a pool of up to 16 pages of up to 20 tokens.
    pub fn pages(&mut self) -> Pages {
        let (page_size, num_pages) = (self.below(20) + 1, self.below(16) + 1);
        let indptr = self.indptr(4);
        let slots = indptr.iter().copied().max().unwrap_or(0).clamp(0, 64) + self.below(3) as i32;
        let mut indices: Vec<i32> = (0..slots).map(|_| self.below(num_pages) as i32).collect();
        let mut last_page_len: Vec<i32> = (1..indptr.len()).map(|_| self.below(page_size) as i32 + 1).collect();
        self.spoil(&mut indices);
        self.spoil(&mut last_page_len);
        let page_size = if self.byte() < 248 { page_size } else { self.size() };
        Pages { page_size, num_pages, indptr, indices, last_page_len }
    }

    /// Now and then replaces an entry by any number, or drops one.
    fn spoil(&mut self, values: &mut Vec<i32>) {
        let at = self.below(values.len());
        match self.byte() {
            0..=239 => {}
            b if b % 2 == 0 && !values.is_empty() => values[at] = self.i32(32) - 8,
            _ => drop(values.pop()),
        }
    }
}

/// Word `i` of a tensor's memory: small floats in every type for half of the seeds, any bits for the others.
fn pattern(seed: u64, i: u64) -> u64 {
    let z = (seed << 32 | i).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ z >> 31).wrapping_mul(0x94d0_49bb_1331_11eb);
    // 0x3c is the high byte of numbers near 1e-2 in f32 and bf16, of 1.0 in f16.
    if seed < 128 { z & 0x80ff_80ff_80ff_80ff | 0x3c00_3c00_3c00_3c00 } else { z ^ z >> 29 }
}

/// Memory with a claim about its layout, which may be false.
#[derive(Debug)]
pub struct Arg {
    /// The tensor's memory is the last `bytes` of these.
    words: Vec<u64>,
    before: Vec<u64>,
    bytes: usize,
    dtype: DType,
    shape: Vec<usize>,
    strides: Vec<usize>,
}

impl Arg {
    fn layout(&self) -> Result<Layout> {
        Layout::strided("hostile", "strides", &self.shape, &self.strides)
    }

    fn start(&self) -> usize {
        8 * self.words.len() - self.bytes
    }

    /// Writes integers to the first elements, each cut to the element's size.
    fn fill(&mut self, values: &[i64]) {
        if self.view().is_ok()
            && let Ok(layout) = self.layout()
        {
            let (start, size) = (self.start(), self.dtype.size());
            let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.words);
            for (at, value) in layout.offsets().zip(values) {
                let at = start + at * size;
                bytes[at..at + size].copy_from_slice(&value.to_le_bytes()[..size]);
            }
        }
        self.before.clone_from(&self.words);
    }

    /// The tensor, if its layout fits its memory.
    pub fn view(&self) -> Result<TensorRef<'_>> {
        TensorRef::from_bytes(&bytemuck::cast_slice(&self.words)[self.start()..], self.dtype, self.layout()?)
    }

    /// The tensor for writing, if its layout fits its memory and reaches no element twice.
    pub fn view_mut(&mut self) -> Result<TensorMut<'_>> {
        let (start, layout) = (self.start(), self.layout()?);
        TensorMut::from_bytes(&mut bytemuck::cast_slice_mut(&mut self.words)[start..], self.dtype, layout)
    }

    /// Checks that nothing but the tensor's elements was written.
    ///
    /// # Panics
    /// If a byte between or before them changed.
    pub fn assert_only_elements_written(&self) {
        let (now, before): (&[u8], &[u8]) = (bytemuck::cast_slice(&self.words), bytemuck::cast_slice(&self.before));
        let mut outside = vec![true; now.len()];
        let elements = self.view().and_then(|_| self.layout()).map(|l| l.offsets().collect::<Vec<_>>());
        for at in elements.unwrap_or_default() {
            let at = self.start() + at * self.dtype.size();
            outside[at..at + self.dtype.size()].fill(false);
        }
        for (i, _) in outside.iter().enumerate().filter(|&(_, outside)| *outside) {
            assert_eq!(now[i], before[i], "byte {i} is outside {:?} strides {:?}", self.shape, self.strides);
        }
    }
}

/// Slices, selects, transposes and reshapes at random; then reads everything left.
fn tensor(_: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let (dtype, rank) = (b.float(), b.below(5));
    let shape: Vec<usize> = (0..rank).map(|_| b.size() % 9).collect();
    let arg = b.tensor(dtype, &shape);
    let mut x = arg.view()?;
    for _ in 0..b.below(6) {
        x = match b.below(4) {
            0 => x.slice(b.below(5), b.size() % 10..b.size() % 10)?,
            1 => x.select(b.below(5), b.size() % 10)?,
            2 => x.transpose(b.below(5), b.below(5))?,
            _ => x.reshape(&[b.size(), b.size()])?,
        };
    }
    // A layout of stride 0 may claim more elements than could ever be listed.
    if x.layout().len() <= 1 << 16 {
        assert_eq!(x.to_f32_vec()?.len(), x.layout().len());
    }
    Ok(())
}

/// Every token of a table that was accepted lies in a page of the pool.
fn page_table(_: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let pages = b.pages();
    let table = pages.table()?;
    for (r, &len) in table.lens().iter().enumerate() {
        assert_eq!(table.pages(r).len(), (len as usize).div_ceil(table.page_size()));
        for pos in 0..(len as usize).min(1 << 10) {
            let (page, slot) = table.locate(r, pos).expect("a token of the request");
            assert!(page < pages.num_pages && slot < pages.page_size);
        }
        assert_eq!(table.locate(r, len as usize), None);
    }
    assert_eq!(table.locate(table.batch(), 0), None);
    Ok(())
}

fn paged_kv(_: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let (dtype, layout) = (b.dtype(), if b.byte() < 128 { KvLayout::Nhd } else { KvLayout::Hnd });
    let shape: Vec<usize> = (0..4).map(|_| b.size() % 12).collect();
    if b.byte() < 128 {
        let (k, v) = (b.tensor(dtype, &shape), b.tensor(dtype, &shape));
        PagedKv::new(k.view()?, v.view()?, layout)?.with_scales(b.f32(), b.f32()).map(drop)
    } else {
        let kv = b.tensor(dtype, &[shape[0], 2, shape[1], shape[2], shape[3]]);
        PagedKv::interleaved(kv.view()?, layout).map(drop)
    }
}

fn ragged(_: &Exec, b: &mut Bytes<'_>) -> Result<()> {
    let (indptr, dtype) = (b.indptr(9), b.float());
    let ragged = Ragged::new(&indptr)?;
    assert_eq!(ragged.lens().iter().map(|&n| n as usize).sum::<usize>(), ragged.rows());
    let shape = [ragged.rows().min(100), b.size() % 5, b.size()];
    let (k, v) = (b.tensor(dtype, &shape), b.tensor(dtype, &shape));
    RaggedKv::new(k.view()?, v.view()?, &ragged).map(drop)
}
