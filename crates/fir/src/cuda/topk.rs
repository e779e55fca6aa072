//! The largest elements of rows: which instantiation of `kernels/topk.cuh`, and what places become.

use super::call::Call;
use super::exec::Gpu;
use super::jit::Source;
use super::norm::cpp;
use super::params::{Address, params};
use super::rows::Rows;
use super::sampling::{Team, check_packed, is_wide};
use crate::error::Result;
use crate::tensor::{DType, TensorMut, TensorRef};

params! {
    struct TopKParams = "fir::TopKParams" {
        x: Address,
        values: Address,
        indices: Address,
        raw: Address,
        x_stride: u64,
        values_stride: u64,
        indices_stride: u64,
        raw_stride: u64,
        lens: Address,
        starts: Address,
        offsets: Address,
        page_table: Address,
        requests: Address,
        page_starts: Address,
        table_stride: u64,
        n: u32,
        k: u32,
        table_rows: u32,
        table_columns: u32,
        page_shift: u32,
        room: u32,
        wide: u32,
        sorted: u32,
        /// `fir::Places`.
        places: u32,
        unused: u32,
    }
}

/// Entries that are sorted in shared memory: 32 KiB. More are sorted where they lie.
const ROOM: usize = 4096;

fn source(x: DType, resident: bool) -> Source {
    Source::new::<TopKParams>("topk.cuh", format!("fir::top_k<{}, {resident}>", cpp(x)))
}

/// Every instantiation that the operators may choose.
pub(super) fn kernels() -> Vec<Source> {
    let types = [DType::F32, DType::F16, DType::BF16];
    types.into_iter().flat_map(|x| [false, true].map(|resident| source(x, resident))).collect()
}

/// A kernel's launch and parameters, as far as all operators have them.
struct Plan {
    team: Team,
    rows: usize,
    params: TopKParams,
}

impl Plan {
    fn new(gpu: &Gpu, op: &'static str, arg: &'static str, x: TensorRef<'_>, k: usize, sorted: bool) -> Result<Self> {
        let rows = Rows::new(op, arg, x.layout(), x.dtype())?;
        let room = if sorted { k.min(ROOM) } else { 0 };
        let team = Team::new(gpu, rows.row, 0);
        let team = Team { smem: team.smem.max(8 * room as u32), ..team };
        let params = TopKParams {
            x_stride: x.strides()[0] as u64,
            n: rows.row as u32,
            k: k as u32,
            table_rows: 1,
            table_columns: 1,
            room: room as u32,
            sorted: u32::from(sorted),
            ..bytemuck::Zeroable::zeroed()
        };
        Ok(Self { team, rows: rows.rows, params })
    }

    fn launch(self, gpu: &Gpu, call: Call<'_>, x: DType) -> Result<()> {
        if self.rows > 0 && self.params.k > 0 {
            let kernel = gpu.kernel(source(x, self.team.resident))?;
            call.launch(&kernel, self.team.grid(call.op(), self.rows)?, &self.params)?;
        }
        call.finish()
    }
}

/// Address and stride of rows that are written.
fn write_rows<'a>(call: &mut Call<'a>, arg: &'static str, x: TensorMut<'a>) -> Result<(Address, u64)> {
    Rows::new(call.op(), arg, x.layout(), x.dtype())?;
    let stride = x.strides()[0] as u64;
    Ok((call.write(arg, x)?, stride))
}

/// Address of a vector of i32, if there is one.
fn read_vector<'a>(call: &mut Call<'a>, arg: &'static str, x: Option<TensorRef<'a>>) -> Result<Address> {
    x.map_or(Ok(Address(0)), |x| {
        check_packed(call.op(), arg, x)?;
        call.read(arg, x)
    })
}

pub(crate) fn top_k<'a>(
    gpu: &'a Gpu,
    x: TensorRef<'a>,
    sorted: bool,
    values: TensorMut<'a>,
    indices: TensorMut<'a>,
) -> Result<()> {
    let mut plan = Plan::new(gpu, "top_k", "x", x, indices.shape()[1], sorted)?;
    let mut call = Call::new(gpu, "top_k");
    let p = &mut plan.params;
    p.wide = is_wide(indices.dtype());
    p.x = call.read("x", x)?;
    (p.values, p.values_stride) = write_rows(&mut call, "values", values)?;
    (p.indices, p.indices_stride) = write_rows(&mut call, "indices", indices)?;
    plan.launch(gpu, call, x.dtype())
}

/// Rows of scores, all integers i32.
pub(crate) struct Scores<'a> {
    pub(crate) scores: TensorRef<'a>,
    pub(crate) lens: TensorRef<'a>,
    pub(crate) starts: Option<TensorRef<'a>>,
}

/// What places become.
#[expect(clippy::large_enum_variant, reason = "one per call, on the stack")]
pub(crate) enum Places<'a> {
    Ragged {
        offsets: TensorRef<'a>,
    },
    Paged {
        page_table: TensorRef<'a>,
        requests: Option<TensorRef<'a>>,
        page_starts: Option<TensorRef<'a>>,
        /// A power of two.
        page_size: usize,
        raw: Option<TensorMut<'a>>,
    },
}

pub(crate) fn transform<'a>(
    gpu: &'a Gpu,
    op: &'static str,
    scores: Scores<'a>,
    places: Places<'a>,
    out: TensorMut<'a>,
) -> Result<()> {
    let Scores { scores, lens, starts } = scores;
    let mut plan = Plan::new(gpu, op, "scores", scores, out.shape()[1], false)?;
    let mut call = Call::new(gpu, op);
    let p = &mut plan.params;
    p.x = call.read("scores", scores)?;
    p.lens = read_vector(&mut call, "lens", Some(lens))?;
    p.starts = read_vector(&mut call, "starts", starts)?;
    match places {
        Places::Ragged { offsets } => {
            p.places = 1;
            p.offsets = read_vector(&mut call, "offsets", Some(offsets))?;
        }
        Places::Paged { page_table, requests, page_starts, page_size, raw } => {
            p.places = 2;
            let table = Rows::new(op, "page_table", page_table.layout(), DType::I32)?;
            if table.is_empty() {
                p.n = 0; // no score can have a page
            } else {
                (p.table_rows, p.table_columns) = (table.rows as u32, table.row as u32);
            }
            p.table_stride = page_table.strides()[0] as u64;
            p.page_shift = page_size.trailing_zeros();
            p.page_table = call.read("page_table", page_table)?;
            p.requests = read_vector(&mut call, "requests", requests)?;
            p.page_starts = read_vector(&mut call, "page_starts", page_starts)?;
            if let Some(raw) = raw {
                (p.raw, p.raw_stride) = write_rows(&mut call, "raw", raw)?;
            }
        }
    }
    (p.indices, p.indices_stride) = write_rows(&mut call, "out", out)?;
    plan.launch(gpu, call, scores.dtype())
}
