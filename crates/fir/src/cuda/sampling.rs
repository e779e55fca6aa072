//! Sampling: which instantiation of `kernels/sampling.cuh`, and how many blocks share a row.

use super::call::Call;
use super::driver::Grid;
use super::exec::Gpu;
use super::jit::{Arch, Source};
use super::norm::cpp;
use super::params::{Address, params};
use super::rows::Rows;
use crate::error::{Error, Result};
use crate::filters::{FilterOrder, Filters, PerRow};
use crate::philox::RngState;
use crate::tensor::{DType, TensorMut, TensorRef};

params! {
    /// A number of each row, or one of all.
    pub(super) struct RowFloat = "fir::PerRow<float>" {
        each: Address,
        one: f32,
        unused: u32,
    }
}

params! {
    /// A count of each row, or one of all.
    pub(super) struct RowCount = "fir::PerRow<fir::u32>" {
        each: Address,
        one: u32,
        unused: u32,
    }
}

params! {
    pub(super) struct RngParams = "fir::Rng" {
        states: Address,
        /// Seed and offset.
        one: [u64; 2],
        per_row: u32,
        unused: u32,
    }
}

params! {
    struct SoftmaxParams = "fir::SoftmaxParams" {
        x: Address,
        out: Address,
        x_stride: u64,
        out_stride: u64,
        n: u32,
        unused: u32,
        temperature: RowFloat,
    }
}

params! {
    struct SampleParams = "fir::SampleParams" {
        x: Address,
        indices: Address,
        out: Address,
        valid: Address,
        x_stride: u64,
        rows: u64,
        out_stride: u64,
        valid_stride: u64,
        n: u32,
        wide_out: u32,
        wide_indices: u32,
        joint: u32,
        temperature: RowFloat,
        top_p: RowFloat,
        min_p: RowFloat,
        top_k: RowCount,
        rng: RngParams,
    }
}

params! {
    struct RenormParams = "fir::RenormParams" {
        x: Address,
        out: Address,
        x_stride: u64,
        out_stride: u64,
        n: u32,
        unused: u32,
        top_k: RowCount,
        top_p: RowFloat,
    }
}

impl RowFloat {
    fn new(call: &mut Call<'_>, arg: &'static str, values: PerRow<'_, f32>) -> Result<Self> {
        Ok(match values {
            PerRow::One(one) => Self { each: Address(0), one, unused: 0 },
            PerRow::Each(each) => Self { each: call.upload(arg, each)?, one: 0.0, unused: 0 },
        })
    }
}

impl RowCount {
    fn new(call: &mut Call<'_>, arg: &'static str, values: PerRow<'_, u32>) -> Result<Self> {
        Ok(match values {
            PerRow::One(one) => Self { each: Address(0), one, unused: 0 },
            PerRow::Each(each) => Self { each: call.upload(arg, each)?, one: 0, unused: 0 },
        })
    }
}

impl RngParams {
    pub(super) fn new(call: &mut Call<'_>, arg: &'static str, rng: PerRow<'_, RngState>) -> Result<Self> {
        let pair = |s: &RngState| [s.seed, s.offset];
        Ok(match rng {
            PerRow::One(state) => Self { states: Address(0), one: pair(&state), per_row: 0, unused: 0 },
            PerRow::Each(states) => {
                let states: Vec<_> = states.iter().map(pair).collect();
                Self { states: call.upload(arg, &states)?, one: [0; 2], per_row: 1, unused: 0 }
            }
        })
    }
}

/// The blocks that share a row, and where they keep it: see `kernels/rows.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Team {
    /// Blocks of a row: a cluster.
    pub(super) blocks: u32,
    /// Whether the row stays in shared memory, so that it is read once.
    pub(super) resident: bool,
    /// Bytes of dynamic shared memory of a block: the row, or lists of it.
    pub(super) smem: u32,
}

impl Team {
    const THREADS: u32 = 512;
    /// Elements that are summed as one, and that one block has whole.
    const UNIT: usize = 1024;
    /// Units of a block above which more blocks share the row: 64 KiB, of which an SM of 228 KiB holds three.
    const UNITS: usize = 16;
    const MOST_BLOCKS: u32 = 8;
    /// Blocks of resident rows on a multiprocessor.
    const RESIDENT: usize = 3;
    /// What static shared memory takes: less than 10 KiB, and some to spare.
    const STATIC: usize = 16 << 10;
    /// Shared memory for the lists of a row (`kernels/bracket.cuh`): a head, and the most that each unit uses; in all what lets two
    /// blocks be on a multiprocessor of 228 KiB. Rows of more units have none.
    const LISTS: usize = 4256;
    const LIST: usize = 800;
    const MOST_LISTS: usize = 104 << 10;
    const MOST_UNITS: usize = 512;

    /// For rows of `n` f32, with `extra` bytes of shared memory before them.
    pub(super) fn new(gpu: &Gpu, n: usize, extra: usize) -> Self {
        let (device, units) = (gpu.properties(), n.div_ceil(Self::UNIT));
        let most = if device.arch >= Arch::HOPPER { Self::MOST_BLOCKS } else { 1 };
        let mut blocks = 1;
        while blocks < most && units.div_ceil(blocks as usize) > Self::UNITS {
            blocks *= 2;
        }
        let bytes = (units.div_ceil(blocks as usize) * Self::UNIT * 4).saturating_add(extra);
        let resident = bytes.saturating_add(Self::STATIC) <= device.shared_per_block as usize;
        Self { blocks, resident, smem: if resident { bytes } else { extra } as u32 }
    }

    /// For a search in `rows` rows of `n` numbers. Rows that all have their place on the device at once stay there, as do short
    /// ones; more of them are read once by fewer blocks each, which share a multiprocessor with fewer others and need fewer barriers,
    /// with lists of what may be near a cutoff. Of 128,256 on an H200: 64 rows 41 µs instead of 66, 512 rows 135 instead of 368.
    fn searching(gpu: &Gpu, n: usize, rows: usize) -> Self {
        let (device, team, units) = (gpu.properties(), Self::new(gpu, n, 0), n.div_ceil(Self::UNIT));
        let (blocks, processors) = (team.blocks as usize, device.multiprocessors as usize);
        let at_once = blocks.saturating_mul(rows) <= Self::RESIDENT * processors;
        if units > Self::MOST_UNITS || team.resident && (at_once || team.blocks < Self::MOST_BLOCKS) {
            return team;
        }
        let most = Self::MOST_LISTS.min((device.shared_per_block as usize).saturating_sub(Self::STATIC));
        let blocks = match team.blocks {
            Self::MOST_BLOCKS if at_once => team.blocks,
            Self::MOST_BLOCKS if rows <= processors => 2,
            _ => 1,
        };
        Self { blocks, resident: false, smem: (Self::LISTS + units * Self::LIST).min(most) as u32 }
    }

    /// The launch for `rows` rows.
    pub(super) fn grid(&self, op: &'static str, rows: usize) -> Result<Grid> {
        let most = i32::MAX as usize / self.blocks as usize;
        if rows > most {
            return Err(Error::value(op, "batch", rows, format!("at most {most} on CUDA")));
        }
        let blocks = rows as u32 * self.blocks;
        Ok(Grid { smem: self.smem, cluster: self.blocks, ..Grid::new(blocks, Self::THREADS) })
    }

    /// Refuses rows for the search of a mass: rows that are read again and again add the first 12 bits of mantissas up in
    /// 32 bits, for at most 2^20 elements of a block.
    fn check_mass(&self, op: &'static str, n: usize) -> Result<()> {
        let most = (1 << 20) * self.blocks as usize;
        if self.resident || n <= most {
            return Ok(());
        }
        Err(Error::value(op, "vocab", n, format!("at most {most} for top_p on CUDA")))
    }
}

/// Refuses what is not a vector without gaps.
pub(super) fn check_packed(op: &'static str, arg: &'static str, x: TensorRef<'_>) -> Result<()> {
    match (x.shape(), x.strides()) {
        (&[len], &[stride]) if len > 1 && stride != 1 => {
            Err(Error::layout(op, arg, format!("stride {stride}"), "1 on CUDA"))
        }
        _ => Ok(()),
    }
}

/// Whether ids are i64, for a kernel's parameters.
pub(super) fn is_wide(dtype: DType) -> u32 {
    u32::from(dtype == DType::I64)
}

/// Address and stride of an optional vector that is written.
pub(super) fn write_vector<'a>(
    call: &mut Call<'a>,
    arg: &'static str,
    x: Option<TensorMut<'a>>,
) -> Result<(Address, u64)> {
    x.map_or(Ok((Address(0), 0)), |x| {
        let stride = x.strides()[0] as u64;
        Ok((call.write(arg, x)?, stride))
    })
}

fn softmax_source(x: DType, resident: bool) -> Source {
    Source::new::<SoftmaxParams>("sampling.cuh", format!("fir::softmax<{}, {resident}>", cpp(x)))
}

fn sample_source(x: DType, logits: bool, [top_k, top_p]: [bool; 2], resident: bool) -> Source {
    // Kernels with both filters skip one that is not in use, a little slower.
    let both = (top_k || top_p) && logits;
    let (top_k, top_p) = (top_k || both, top_p || both);
    let name = format!("fir::sample<{}, {logits}, {top_k}, {top_p}, {resident}>", cpp(x));
    Source::new::<SampleParams>("sampling.cuh", name)
}

fn renorm_source(keep: &str, resident: bool) -> Source {
    Source::new::<RenormParams>("sampling.cuh", format!("fir::renorm<fir::Keep::{keep}, {resident}>"))
}

fn mask_source(x: DType, resident: bool) -> Source {
    Source::new::<RenormParams>("sampling.cuh", format!("fir::mask<{}, {resident}>", cpp(x)))
}

/// Every instantiation that the operators may choose.
pub(super) fn kernels() -> Vec<Source> {
    let mut all = Vec::new();
    for resident in [false, true] {
        for x in [DType::F32, DType::F16, DType::BF16] {
            all.extend([softmax_source(x, resident), mask_source(x, resident)]);
            all.extend([[false; 2], [true; 2]].map(|filters| sample_source(x, true, filters, resident)));
        }
        all.extend(["kTopK", "kTopP"].map(|keep| renorm_source(keep, resident)));
        for top_k in [false, true] {
            all.extend([false, true].map(|top_p| sample_source(DType::F32, false, [top_k, top_p], resident)));
        }
    }
    all
}

pub(crate) fn softmax<'a>(
    gpu: &'a Gpu,
    logits: TensorRef<'a>,
    temperature: PerRow<'_, f32>,
    out: TensorMut<'a>,
) -> Result<()> {
    const OP: &str = "softmax";
    let (dtype, rows) = (logits.dtype(), Rows::new(OP, "logits", logits.layout(), logits.dtype())?);
    Rows::new(OP, "out", out.layout(), DType::F32)?;
    let (x_stride, out_stride) = (logits.strides()[0] as u64, out.strides()[0] as u64);
    let mut call = Call::new(gpu, OP);
    let (x, out) = (call.read("logits", logits)?, call.write("out", out)?);
    if rows.is_empty() {
        return call.finish();
    }
    let team = Team::new(gpu, rows.row, 0);
    let grid = team.grid(OP, rows.rows)?;
    let temperature = RowFloat::new(&mut call, "temperature", temperature)?;
    let params = SoftmaxParams { x, out, x_stride, out_stride, n: rows.row as u32, unused: 0, temperature };
    call.launch(&*gpu.kernel(softmax_source(dtype, team.resident))?, grid, &params)?;
    call.finish()
}

/// What a draw takes.
pub(crate) struct Sample<'a> {
    pub(crate) op: &'static str,
    /// Whether `x` are logits; else probabilities.
    pub(crate) logits: bool,
    pub(crate) x: TensorRef<'a>,
    pub(crate) indices: Option<TensorRef<'a>>,
    pub(crate) filters: Filters<'a>,
    pub(crate) rng: PerRow<'a, RngState>,
    pub(crate) out: TensorMut<'a>,
    pub(crate) valid: Option<TensorMut<'a>>,
}

pub(crate) fn sample<'a>(gpu: &'a Gpu, args: Sample<'a>) -> Result<()> {
    let Sample { op, logits, x, indices, filters, rng, out, valid } = args;
    let (arg, dtype, batch) = (if logits { "logits" } else { "probs" }, x.dtype(), out.shape()[0]);
    let (rows, x_stride) = (Rows::new(op, arg, x.layout(), dtype)?, x.strides()[0] as u64);
    if let Some(indices) = indices {
        check_packed(op, "indices", indices)?;
        if rows.rows == 0 && batch > 0 {
            return Err(Error::value(op, arg, "0 rows", "1 or more with `indices`"));
        }
    }
    let (wide_out, out_stride) = (is_wide(out.dtype()), out.strides()[0] as u64);
    let wide_indices = indices.map_or(0, |i| is_wide(i.dtype()));
    let mut call = Call::new(gpu, op);
    let x = call.read(arg, x)?;
    let indices = indices.map_or(Ok(Address(0)), |i| call.read("indices", i))?;
    let out = call.write("out", out)?;
    let (valid, valid_stride) = write_vector(&mut call, "valid", valid)?;
    if batch == 0 {
        return call.finish();
    }
    let (by_k, by_p) = (filters.top_k != PerRow::One(u32::MAX), filters.top_p != PerRow::One(1.0));
    let team = if logits { Team::new(gpu, rows.row, 0) } else { Team::searching(gpu, rows.row, batch) };
    let grid = team.grid(op, batch)?;
    if by_p {
        team.check_mass(op, rows.row)?;
    }
    let params = SampleParams {
        x,
        indices,
        out,
        valid,
        x_stride,
        rows: rows.rows as u64,
        out_stride,
        valid_stride,
        n: rows.row as u32,
        wide_out,
        wide_indices,
        joint: u32::from(filters.order == FilterOrder::Joint),
        temperature: RowFloat::new(&mut call, "temperature", filters.temperature)?,
        top_p: RowFloat::new(&mut call, "top_p", filters.top_p)?,
        min_p: RowFloat::new(&mut call, "min_p", filters.min_p)?,
        top_k: RowCount::new(&mut call, "top_k", filters.top_k)?,
        rng: RngParams::new(&mut call, "rng", rng)?,
    };
    let kernel = gpu.kernel(sample_source(dtype, logits, [by_k, by_p], team.resident))?;
    call.launch(&kernel, grid, &params)?;
    call.finish()
}

pub(crate) fn top_k_renorm<'a>(
    gpu: &'a Gpu,
    op: &'static str,
    probs: TensorRef<'a>,
    top_k: PerRow<'_, u32>,
    out: TensorMut<'a>,
) -> Result<()> {
    let team = Team::searching(gpu, probs.shape()[1], probs.shape()[0]);
    filter(gpu, op, ("probs", probs), team, renorm_source("kTopK", team.resident), (top_k, PerRow::One(1.0)), out)
}

pub(crate) fn top_p_renorm<'a>(
    gpu: &'a Gpu,
    op: &'static str,
    probs: TensorRef<'a>,
    top_p: PerRow<'_, f32>,
    out: TensorMut<'a>,
) -> Result<()> {
    let n = probs.shape()[1];
    let team = Team::searching(gpu, n, probs.shape()[0]);
    team.check_mass(op, n)?;
    let all = PerRow::One(u32::MAX);
    filter(gpu, op, ("probs", probs), team, renorm_source("kTopP", team.resident), (all, top_p), out)
}

pub(crate) fn top_k_mask_logits<'a>(
    gpu: &'a Gpu,
    op: &'static str,
    logits: TensorRef<'a>,
    top_k: PerRow<'_, u32>,
    out: TensorMut<'a>,
) -> Result<()> {
    let team = Team::searching(gpu, logits.shape()[1], logits.shape()[0]);
    let source = mask_source(logits.dtype(), team.resident);
    filter(gpu, op, ("logits", logits), team, source, (top_k, PerRow::One(1.0)), out)
}

/// Rows to rows, by `source` and `team`.
fn filter<'a>(
    gpu: &'a Gpu,
    op: &'static str,
    (arg, x): (&'static str, TensorRef<'a>),
    team: Team,
    source: Source,
    (top_k, top_p): (PerRow<'_, u32>, PerRow<'_, f32>),
    out: TensorMut<'a>,
) -> Result<()> {
    let rows = Rows::new(op, arg, x.layout(), x.dtype())?;
    Rows::new(op, "out", out.layout(), out.dtype())?;
    let (x_stride, out_stride) = (x.strides()[0] as u64, out.strides()[0] as u64);
    let mut call = Call::new(gpu, op);
    let (x, out) = (call.read(arg, x)?, call.write("out", out)?);
    if rows.is_empty() {
        return call.finish();
    }
    let (grid, kernel) = (team.grid(op, rows.rows)?, gpu.kernel(source)?);
    let top_k = RowCount::new(&mut call, "top_k", top_k)?;
    let top_p = RowFloat::new(&mut call, "top_p", top_p)?;
    let params = RenormParams { x, out, x_stride, out_stride, n: rows.row as u32, unused: 0, top_k, top_p };
    call.launch(&kernel, grid, &params)?;
    call.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_resident_while_they_fit() {
        let (hopper, ampere) = (Gpu::dry(Arch::HOPPER), Gpu::dry(Arch::OLDEST));
        for (gpu, n, extra, blocks, resident, smem) in [
            (&hopper, 0, 0, 1, true, 0),
            (&hopper, 16 << 10, 0, 1, true, 64 << 10),
            (&hopper, (16 << 10) + 1, 0, 2, true, 36 << 10),
            (&hopper, 128_256, 0, 8, true, 64 << 10),
            (&hopper, 425_984, 0, 8, true, 208 << 10),
            (&hopper, 425_985, 0, 8, false, 0),
            (&hopper, 425_984, 16 << 10, 8, false, 16 << 10),
            (&ampere, 32_000, 0, 1, true, 128 << 10),
            (&ampere, 128_256, 0, 1, false, 0),
            (&hopper, usize::MAX >> 13, 0, 8, false, 0),
        ] {
            assert_eq!(Team::new(gpu, n, extra), Team { blocks, resident, smem }, "{n} of {gpu:?}");
        }
    }

    #[test]
    fn many_long_rows_are_listed() {
        let (hopper, ampere) = (Gpu::dry(Arch::HOPPER), Gpu::dry(Arch::OLDEST));
        assert_eq!(hopper.properties().multiprocessors, 132);
        for (gpu, n, rows, blocks, resident, smem) in [
            (&hopper, 128_256, 49, 8, true, 64 << 10),
            (&hopper, 128_256, 50, 2, false, 4256 + 126 * 800),
            (&hopper, 128_256, 132, 2, false, 4256 + 126 * 800),
            (&hopper, 128_256, 133, 1, false, 4256 + 126 * 800),
            (&hopper, 151_936, 512, 1, false, 104 << 10),
            (&hopper, 64 << 10, 512, 4, true, 64 << 10),
            (&hopper, 425_984, 1, 8, true, 208 << 10),
            (&hopper, 500_000, 1, 8, false, 104 << 10),
            (&hopper, 600_001, 64, 8, false, 0),
            (&ampere, 32_000, 512, 1, true, 128 << 10),
            (&ampere, 128_256, 1, 1, false, 4256 + 126 * 800),
        ] {
            assert_eq!(Team::searching(gpu, n, rows), Team { blocks, resident, smem }, "{rows} of {n} on {gpu:?}");
        }
    }
}
