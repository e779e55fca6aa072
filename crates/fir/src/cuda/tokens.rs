//! Rows of tokens on their way, rotated or not, to rows or to pages: `kernels/tokens.cuh`, which rope and appending share.

use std::mem::offset_of;

use super::call::Call;
use super::driver::Grid;
use super::exec::Gpu;
use super::jit::Source;
use super::norm::{check_float, cpp};
use super::params::{Address, Field, Kind, Params};
use crate::error::{Error, Result};
use crate::kv::{NVFP4_BLOCK, PageTable, Ragged};
use crate::tensor::{DType, TensorMut, TensorRef};

/// The position of each token.
#[derive(Clone, Copy)]
pub(crate) enum Positions<'a> {
    Ids(TensorRef<'a>),
    /// Of each request's first token.
    Ragged {
        indptr: &'a Ragged,
        offsets: TensorRef<'a>,
    },
}

/// Where sines and cosines come from.
pub(crate) enum Angles<'a> {
    /// Radians per position of each pair.
    Formula(Vec<f64>),
    /// `[positions, 2 * pairs]`, f32: cosines, then sines.
    Table(TensorRef<'a>),
}

/// How sides that rotate do so.
pub(crate) struct Rotation<'a> {
    pub(crate) positions: Positions<'a>,
    pub(crate) angles: Angles<'a>,
    pub(crate) interleave: bool,
}

/// Where tokens go in a cache.
pub(crate) struct Pages<'a> {
    pub(crate) slots: Slots<'a>,
    pub(crate) pages: usize,
    pub(crate) page_size: usize,
}

#[derive(Clone, Copy)]
pub(crate) enum Slots<'a> {
    Tokens { table: &'a PageTable<'a>, requests: TensorRef<'a>, positions: TensorRef<'a> },
    Mapping(TensorRef<'a>),
}

/// What becomes of one tensor of the tokens.
pub(crate) struct Stream<'a> {
    /// `[nnz, heads, dim]` or `[nnz, dim]`, with its name; none: rotated where it is.
    pub(crate) from: Option<(&'static str, TensorRef<'a>)>,
    pub(crate) rotated: bool,
    /// What follows each row of `from` in `to`.
    pub(crate) rest: Option<(&'static str, TensorRef<'a>)>,
    /// As `from`, or `[pages, page_size, heads, dim]` or without heads.
    pub(crate) to: (&'static str, TensorMut<'a>),
    pub(crate) paged: bool,
    /// NVFP4's.
    pub(crate) block_scales: Option<TensorMut<'a>>,
    pub(crate) scale: f32,
}

/// Pairs whose frequencies are in the parameters.
const INLINE: usize = 128;
/// Sides of a launch.
const SIDES: usize = 5;
/// Threads of a block, at most.
const BLOCK: usize = 256;

/// `fir::Frequencies`.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct Frequencies {
    more: Address,
    fastest: f64,
    first: [f64; INLINE],
}

impl Frequencies {
    pub(super) fn new(call: &mut Call<'_>, all: &[f64]) -> Result<Self> {
        let (mut more, mut first) = (Address::default(), [0.0; INLINE]);
        match first.get_mut(..all.len()) {
            Some(first) => first.copy_from_slice(all),
            None => more = call.upload("frequencies", all)?,
        }
        Ok(Self { more, fastest: all.iter().fold(0.0, |m: f64, f| m.max(f.abs())), first })
    }
}

/// `fir::Angles`.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct AnglesParams {
    frequencies: Frequencies,
    table: Address,
    positions: Address,
    indptr: Address,
    table_stride: u64,
    table_rows: u64,
    position_stride: u64,
    pairs: u32,
    batch: u32,
    wide: u32,
    interleave: u32,
}

/// `fir::Slots`.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct SlotsParams {
    slots: Address,
    requests: Address,
    positions: Address,
    table: Address,
    ids: Address,
    slots_stride: u64,
    requests_stride: u64,
    positions_stride: u64,
    pages: u64,
    page_size: u32,
    batch: u32,
    wide_slots: u32,
    wide_requests: u32,
    wide_positions: u32,
    unused: u32,
}

/// `fir::Side`.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Side {
    from: Address,
    to: Address,
    block_scales: Address,
    from_token: u64,
    from_head: u64,
    to_outer: u64,
    to_row: u64,
    to_head: u64,
    scales_outer: u64,
    scales_row: u64,
    scales_head: u64,
    dim: u32,
    units: u32,
    first: u32,
    rotated: u32,
    paged: u32,
    code: u32,
    scale: f32,
    inverse: f32,
}

/// `fir::TokensParams`.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct TokensParams {
    sides: [Side; SIDES],
    angles: AnglesParams,
    slots: SlotsParams,
    nnz: u32,
    units: u32,
    count: u32,
    paged: u32,
}

/// Fields of a part of [`TokensParams`], by the part's C++ name and its offset.
macro_rules! fields {
    ($prefix:literal, $base:expr, $part:ty, $($field:ident: $kind:ident)*) => {
        [$(Field { name: concat!($prefix, stringify!($field)), offset: $base + offset_of!($part, $field), kind: Kind::$kind }),*]
    };
}

/// As [`fields`], of a side.
macro_rules! side_fields {
    ($prefix:literal, $i:literal) => {
        fields!($prefix, offset_of!(TokensParams, sides) + $i * size_of::<Side>(), Side,
            from: Address to: Address block_scales: Address
            from_token: U64 from_head: U64 to_outer: U64 to_row: U64 to_head: U64
            scales_outer: U64 scales_row: U64 scales_head: U64
            dim: U32 units: U32 first: U32 rotated: U32 paged: U32 code: U32 scale: F32 inverse: F32)
    };
}

impl Params for TokensParams {
    const TYPE: &'static str = "fir::TokensParams";
    const FIELDS: &'static [Field] = &{
        const SIDE_FIELDS: [[Field; 19]; SIDES] = [
            side_fields!("sides[0].", 0),
            side_fields!("sides[1].", 1),
            side_fields!("sides[2].", 2),
            side_fields!("sides[3].", 3),
            side_fields!("sides[4].", 4),
        ];
        const FREQUENCIES: usize = offset_of!(TokensParams, angles) + offset_of!(AnglesParams, frequencies);
        const REST: [&[Field]; 4] = [
            &fields!("angles.frequencies.", FREQUENCIES, Frequencies, more: Address fastest: F64 first: F64),
            &fields!("angles.", offset_of!(TokensParams, angles), AnglesParams,
                table: Address positions: Address indptr: Address
                table_stride: U64 table_rows: U64 position_stride: U64 pairs: U32 batch: U32 wide: U32 interleave: U32),
            &fields!("slots.", offset_of!(TokensParams, slots), SlotsParams,
                slots: Address requests: Address positions: Address table: Address ids: Address
                slots_stride: U64 requests_stride: U64 positions_stride: U64 pages: U64
                page_size: U32 batch: U32 wide_slots: U32 wide_requests: U32 wide_positions: U32),
            &fields!("", 0, TokensParams, nnz: U32 units: U32 count: U32 paged: U32),
        ];
        let mut all = [SIDE_FIELDS[0][0]; SIDES * 19 + 3 + 10 + 14 + 4];
        let (mut at, mut part, mut i) = (0, 0, 0);
        while at < SIDES * 19 {
            all[at] = SIDE_FIELDS.as_flattened()[at];
            at += 1;
        }
        while at < all.len() {
            if i == REST[part].len() {
                (part, i) = (part + 1, 0);
                continue;
            }
            all[at] = REST[part][i];
            (at, i) = (at + 1, i + 1);
        }
        all
    };
}

/// The kernel for rows of `from` that become `to`. `each`: elements of a group, 1 for rows that are not aligned.
fn source(from: DType, to: DType, each: usize) -> Source {
    let to = if to == DType::E2M1x2 { "fir::e2m1x2" } else { cpp(to) };
    let name = format!("fir::tokens<{}, {to}, {each}>", cpp(from));
    Source::new::<TokensParams>("tokens.cuh", name)
}

fn fp4_rows() -> Source {
    Source::new::<TokensParams>("tokens.cuh", "fir::fp4_rows<>".into())
}

/// Every instantiation that [`run`] may choose.
pub(super) fn kernels() -> Vec<Source> {
    let mut all = vec![fp4_rows()];
    for from in [DType::F32, DType::F16, DType::BF16] {
        for to in [DType::F32, DType::F16, DType::BF16, DType::E4M3, DType::E5M2] {
            all.extend([1, 16 / from.size()].map(|each| source(from, to, each)));
        }
        all.push(source(from, DType::E2M1x2, NVFP4_BLOCK));
    }
    all
}

/// A side with what decides its kernel.
struct Lowered {
    side: Side,
    heads: usize,
    from: DType,
    to: DType,
    /// Whether groups of 16 bytes, or blocks of NVFP4, may be read and written.
    vector: bool,
}

/// Sends `streams` of `nnz` tokens on their way: one launch for those of the same types.
pub(crate) fn run<'a>(
    gpu: &'a Gpu,
    op: &'static str,
    nnz: usize,
    rotation: Option<Rotation<'a>>,
    pages: Option<Pages<'a>>,
    streams: Vec<Stream<'a>>,
) -> Result<()> {
    let mut call = Call::new(gpu, op);
    if nnz > i32::MAX as usize {
        return Err(Error::value(op, "nnz", nnz, "at most 2^31 - 1 tokens on CUDA"));
    }
    let angles = match rotation {
        Some(rotation) => rotation.lower(&mut call, nnz)?,
        None => bytemuck::Zeroable::zeroed(),
    };
    let slots = match pages {
        Some(pages) => pages.lower(&mut call)?,
        None => bytemuck::Zeroable::zeroed(),
    };
    let (mut vectors, mut gathers) = (Vec::new(), Vec::new());
    for stream in streams {
        let sides = stream.lower(&mut call, nnz, angles.pairs as usize)?;
        // Blocks of NVFP4 that are no thread's as a whole are gathered.
        let gather = sides.iter().any(|s| s.to == DType::E2M1x2 && !s.vector);
        if gather { gathers.push(sides) } else { vectors.extend(sides) }
    }
    if nnz == 0 {
        return call.finish();
    }
    let params = |sides: &[&Lowered]| TokensParams {
        sides: std::array::from_fn(|i| sides.get(i).map_or_else(bytemuck::Zeroable::zeroed, |s| s.side)),
        // Where nothing rotates, nobody looks for angles.
        angles: if sides.iter().any(|s| s.side.rotated != 0) { angles } else { bytemuck::Zeroable::zeroed() },
        slots,
        nnz: nnz as u32,
        units: 0,
        count: sides.len() as u32,
        paged: u32::from(sides.iter().any(|s| s.side.paged != 0)),
    };
    vectors.retain(|s| s.heads > 0 && s.side.dim > 0);
    while let Some(first) = vectors.first() {
        let (from, to, vector) = (first.from, first.to, first.vector);
        let same: Vec<&Lowered> = vectors.iter().filter(|s| (s.from, s.to, s.vector) == (from, to, vector)).collect();
        let mut params = params(&same);
        let each = match to {
            _ if !vector => 1,
            DType::E2M1x2 => NVFP4_BLOCK,
            _ => 16 / from.size(),
        };
        let mut units = 0usize;
        for (side, lowered) in params.sides.iter_mut().zip(&same) {
            let turned = if side.rotated != 0 { angles.pairs as usize } else { 0 };
            let per_row = turned / each + (side.dim as usize - 2 * turned).div_ceil(2 * each);
            (side.units, side.first) = (per_row as u32, units as u32);
            units = units.saturating_add(per_row.saturating_mul(lowered.heads));
        }
        if units > i32::MAX as usize {
            return Err(Error::value(op, "heads", format!("{units} parts of a token"), "at most 2^31 - 1 on CUDA"));
        }
        params.units = units as u32;
        launch(gpu, &call, source(from, to, each), &params)?;
        vectors.retain(|s| (s.from, s.to, s.vector) != (from, to, vector));
    }
    for sides in gathers {
        let mut params = params(&sides.iter().collect::<Vec<_>>());
        let row = sides.iter().map(|s| s.side.dim as usize).sum::<usize>() / NVFP4_BLOCK;
        let units = row.saturating_mul(sides[0].heads);
        if units > i32::MAX as usize {
            return Err(Error::value(op, "heads", format!("{units} blocks of a token"), "at most 2^31 - 1 on CUDA"));
        }
        (params.sides[0].units, params.units) = (row as u32, units as u32);
        if units > 0 {
            launch(gpu, &call, fp4_rows(), &params)?;
        }
    }
    call.finish()
}

/// Shared memory of a block that needs no asking, in bytes.
const SHARED: usize = 48 << 10;

fn launch(gpu: &Gpu, call: &Call<'_>, source: Source, params: &TokensParams) -> Result<()> {
    let units = params.units as usize;
    let turns = units.div_ceil(BLOCK);
    let threads = units.div_ceil(turns).next_multiple_of(32) as u32;
    let grid = Grid { smem: params.angles.pairs * 8, early: true, ..Grid::new(params.nnz, threads) };
    call.launch(&*gpu.kernel(source)?, grid, params)
}

/// A vector of integers: address, stride and whether they have 64 bits.
pub(super) fn integers<'a>(call: &mut Call<'a>, arg: &'static str, x: TensorRef<'a>) -> Result<(Address, u64, u32)> {
    let (stride, wide) = (x.strides()[0] as u64, u32::from(x.dtype() == DType::I64));
    Ok((call.read(arg, x)?, stride, wide))
}

impl<'a> Rotation<'a> {
    fn lower(self, call: &mut Call<'a>, nnz: usize) -> Result<AnglesParams> {
        let op = call.op();
        let pairs = match &self.angles {
            Angles::Formula(frequencies) => frequencies.len(),
            Angles::Table(table) => table.shape()[1] / 2,
        };
        if pairs * 8 > SHARED {
            return Err(Error::value(op, "rotary_dim", 2 * pairs, format!("at most {} on CUDA", SHARED / 4)));
        }
        let mut angles: AnglesParams = bytemuck::Zeroable::zeroed();
        (angles.pairs, angles.interleave) = (pairs as u32, u32::from(self.interleave));
        match self.angles {
            Angles::Formula(all) => angles.frequencies = Frequencies::new(call, &all)?,
            Angles::Table(table) => {
                if table.dtype() != DType::F32 {
                    return Err(Error::DType { op, arg: "table", got: table.dtype().name(), want: "f32".into() });
                }
                check_last_axis(op, "table", table.shape(), table.strides())?;
                (angles.table_rows, angles.table_stride) = (table.shape()[0] as u64, table.strides()[0] as u64);
                angles.table = call.read("table", table)?;
                // A table of no rows has no address, and stands for no positions.
                if angles.table.0 == 0 && nnz > 0 {
                    return Err(Error::value(op, "table", "no rows", "a row for each position"));
                }
            }
        }
        match self.positions {
            Positions::Ids(ids) => {
                (angles.positions, angles.position_stride, angles.wide) = integers(call, "positions", ids)?;
            }
            Positions::Ragged { indptr, offsets } => {
                (angles.positions, angles.position_stride, angles.wide) = integers(call, "offsets", offsets)?;
                angles.batch = indptr.batch() as u32;
                angles.indptr = call.upload("indptr", indptr.indptr())?;
            }
        }
        Ok(angles)
    }
}

impl<'a> Pages<'a> {
    fn lower(self, call: &mut Call<'a>) -> Result<SlotsParams> {
        let op = call.op();
        let fits = |n: usize| u32::try_from(n).ok();
        let (Some(_), Some(page_size)) = (fits(self.pages), fits(self.page_size)) else {
            let got = format!("{} pages of {}", self.pages, self.page_size);
            return Err(Error::value(op, "cache", got, "at most 2^32 - 1 of each on CUDA"));
        };
        let mut slots: SlotsParams = bytemuck::Zeroable::zeroed();
        (slots.pages, slots.page_size) = (self.pages as u64, page_size);
        match self.slots {
            Slots::Mapping(mapping) => {
                (slots.slots, slots.slots_stride, slots.wide_slots) = integers(call, "slots", mapping)?;
            }
            Slots::Tokens { table, requests, positions } => {
                (slots.requests, slots.requests_stride, slots.wide_requests) =
                    integers(call, "batch_indices", requests)?;
                (slots.positions, slots.positions_stride, slots.wide_positions) =
                    integers(call, "positions", positions)?;
                slots.batch = table.batch() as u32;
                let mut words: Vec<u32> = table.lens().to_vec();
                if let Some(device) = table.device() {
                    words.extend(table.indptr()[..table.batch()].iter().map(|&start| start as u32));
                    slots.ids = call.read("page table", device.indices.view())?;
                } else {
                    let pages = || (0..table.batch()).map(|r| table.pages(r));
                    words.extend(
                        pages().scan(0, |start, ids| Some(std::mem::replace(start, *start + ids.len() as u32))),
                    );
                    slots.ids = call.upload("page table", &pages().flatten().copied().collect::<Vec<_>>())?;
                }
                slots.table = call.upload("table", &words)?;
            }
        }
        Ok(slots)
    }
}

impl<'a> Stream<'a> {
    /// One side, or two where something follows each row.
    fn lower(self, call: &mut Call<'a>, nnz: usize, pairs: usize) -> Result<Vec<Lowered>> {
        let (op, (to_arg, to), to_dtype) = (call.op(), (self.to.0, &self.to.1), self.to.1.dtype());
        let fp4 = to_dtype == DType::E2M1x2;
        if !matches!(to_dtype, DType::F32 | DType::F16 | DType::BF16 | DType::E4M3 | DType::E5M2 | DType::E2M1x2) {
            return Err(Error::DType {
                op,
                arg: to_arg,
                got: to_dtype.name(),
                want: "f32, f16, bf16, e4m3 or e5m2".into(),
            });
        }
        let from_shape = self.from.map(|(_, x)| (x.shape().to_vec(), x.strides().to_vec(), x.dtype()));
        let (shape, strides, dtype) =
            from_shape.unwrap_or_else(|| (to.shape().to_vec(), to.strides().to_vec(), to_dtype));
        let from_arg = self.from.map_or(to_arg, |(arg, _)| arg);
        check_float(op, from_arg, dtype)?;
        check_last_axis(op, from_arg, &shape, &strides)?;
        check_last_axis(op, to_arg, to.shape(), to.strides())?;
        let (to_shape, to_strides) = (to.shape().to_vec(), to.strides().to_vec());
        let (heads, dim) = if shape.len() == 3 { (shape[1], shape[2]) } else { (1, shape[1]) };
        if dim > i32::MAX as usize {
            return Err(Error::value(op, from_arg, format!("{dim} elements in a row"), "at most 2^31 - 1 on CUDA"));
        }
        let head_stride = |strides: &[usize], axis: usize, rank: usize| if rank > axis + 1 { strides[axis] } else { 0 };
        // Strides of axes of one entry may be anything.
        let bytes = |elements: usize, dtype: DType| elements.wrapping_mul(dtype.size()) as u64;
        let [to_outer, to_row, to_head] = places(&to_strides, self.paged);
        let mut side: Side = bytemuck::Zeroable::zeroed();
        side.from_token = bytes(strides[0], dtype);
        side.from_head = bytes(head_stride(&strides, 1, shape.len()), dtype);
        (side.to_outer, side.to_row, side.to_head) =
            (bytes(to_outer, to_dtype), bytes(to_row, to_dtype), bytes(to_head, to_dtype));
        (side.dim, side.code, side.scale) = (dim as u32, code(dtype), self.scale);
        (side.rotated, side.paged) = (u32::from(self.rotated), u32::from(self.paged));
        // The product with the inverse of a power of two is the quotient, where the inverse is no subnormal.
        let power = self.scale.to_bits() & 0x7f_ffff == 0 && (1.0 / self.scale).is_normal();
        side.inverse = if power { 1.0 / self.scale } else { 0.0 };
        if let Some(block_scales) = self.block_scales {
            let strides = block_scales.strides().to_vec();
            check_last_axis(op, to_arg, block_scales.layout().shape(), &strides)?;
            let [outer, row, head] = places(&strides, true);
            (side.scales_outer, side.scales_row, side.scales_head) = (outer as u64, row as u64, head as u64);
            side.block_scales = call.write("block_scales", block_scales)?;
        }
        side.to = call.write(to_arg, self.to.1)?;
        side.from = match self.from {
            Some((arg, x)) => call.read(arg, x)?,
            None => side.to,
        };
        let aligned = |side: &Side, from: DType| {
            let each = if fp4 { NVFP4_BLOCK } else { 16 / from.size() };
            let to_bytes = if fp4 { 8 } else { (each * to_dtype.size()).min(16) } as u64;
            let used = |n: usize, stride: u64| if n > 1 { stride } else { 0 };
            let reads = [side.from.0, used(nnz, side.from_token), used(heads, side.from_head)];
            let outer = if self.paged { to_shape[0] } else { nnz };
            let row = if self.paged { used(to_shape[1], side.to_row) } else { 0 };
            let writes = [side.to.0, used(outer, side.to_outer), row, used(heads, side.to_head)];
            reads.iter().all(|a| a.is_multiple_of(16))
                && writes.iter().all(|a| a.is_multiple_of(to_bytes))
                && (side.dim as usize).is_multiple_of(each)
                && (side.rotated == 0 || pairs.is_multiple_of(each))
        };
        let vector = aligned(&side, dtype);
        let mut sides = vec![Lowered { side, heads, from: dtype, to: to_dtype, vector }];
        if let Some((arg, rest)) = self.rest {
            check_float(op, arg, rest.dtype())?;
            check_last_axis(op, arg, rest.shape(), rest.strides())?;
            let (shape, strides, from) = (rest.shape(), rest.strides(), rest.dtype());
            let mut side = Side { rotated: 0, ..side };
            side.from_token = bytes(strides[0], from);
            side.from_head = bytes(head_stride(strides, 1, shape.len()), from);
            (side.dim, side.code) = (shape[shape.len() - 1] as u32, code(from));
            side.to.0 += if fp4 { dim as u64 / 2 } else { bytes(dim, to_dtype) };
            if fp4 {
                side.block_scales.0 += (dim / NVFP4_BLOCK) as u64;
            }
            side.from = call.read(arg, rest)?;
            let vector = aligned(&side, from);
            sides.push(Lowered { side, heads, from, to: to_dtype, vector });
        }
        Ok(sides)
    }
}

/// Strides of tokens or pages, of rows in a page, and of heads.
fn places(strides: &[usize], paged: bool) -> [usize; 3] {
    match (paged, strides) {
        (true, &[page, row, head, _]) => [page, row, head],
        (true, &[page, row, _]) => [page, row, 0],
        (false, &[token, head, _]) => [token, 0, head],
        _ => [strides[0], 0, 0],
    }
}

/// The kernel's number for a type that it reads.
fn code(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        _ => 2,
    }
}

pub(super) fn check_last_axis(op: &'static str, arg: &'static str, shape: &[usize], strides: &[usize]) -> Result<()> {
    match (shape.last(), strides.last()) {
        (Some(&dim), Some(&stride)) if dim > 1 && stride != 1 => {
            Err(Error::layout(op, arg, format!("stride {stride} of the last axis"), "1"))
        }
        _ => Ok(()),
    }
}
