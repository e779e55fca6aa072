//! Mixtures of experts: launches of `kernels/moe.cuh`, and the experts' layers through `gemm.cuh`.
//!
//! Nothing waits for the device: its own kernel sorts the rows by expert and lists the tiles of the products, of which
//! the host knows the most there can be.

use super::call::Call;
use super::driver::Grid;
use super::exec::Gpu;
use super::gemm::{Chosen, Gate, GemmParams, Kind, Shape, Side, type_code};
use super::jit::Source;
use super::norm::check_float;
use super::params::{Address, params};
use super::tokens::check_last_axis;
use crate::args::TableRouteArgs;
use crate::error::{Error, Result};
use crate::routing::{Groups, Routing, Score};
use crate::tensor::{DType, Scaled, TensorMut, TensorRef};

params! {
    struct RouteParams = "fir::RouteParams" {
        logits: Address,
        bias: Address,
        ids: Address,
        weights: Address,
        logits_stride: u64,
        ids_stride: u64,
        weights_stride: u64,
        tokens: u32,
        experts: u32,
        top_k: u32,
        groups: u32,
        chosen: u32,
        logits_type: u32,
        bias_type: u32,
        bias_stride: u32,
        sigmoid: u32,
        renormalize: u32,
        scale: f32,
        unused: u32,
    }
}

params! {
    struct DispatchParams = "fir::DispatchParams" {
        ids: Address,
        pairs: Address,
        tiles_0 in "tiles[0]": Address,
        tiles_1 in "tiles[1]": Address,
        token_stride: u64,
        choice_stride: u64,
        count: u32,
        top_k: u32,
        experts: u32,
        wide: u32,
        tile_rows: [u32; 2],
        tile_counts: [u32; 2],
    }
}

params! {
    struct CombineParams = "fir::CombineParams" {
        results: Address,
        ids: Address,
        weights: Address,
        out: Address,
        results_stride: u64,
        token_stride: u64,
        choice_stride: u64,
        weights_stride: u64,
        out_stride: u64,
        hidden: u32,
        top_k: u32,
        experts: u32,
        wide: u32,
        out_type: u32,
        vector: u32,
    }
}

params! {
    struct TableParams = "fir::TableParams" {
        logits: Address,
        tokens: Address,
        table: Address,
        ids: Address,
        weights: Address,
        logits_stride: u64,
        tokens_stride: u64,
        table_stride: u64,
        ids_stride: u64,
        weights_stride: u64,
        vocabulary: u64,
        count: u32,
        experts: u32,
        top_k: u32,
        logits_type: u32,
        wide: u32,
        has_shared: u32,
        shared: f32,
        unused: u32,
    }
}

fn table_source() -> Source {
    Source::new::<TableParams>("moe.cuh", "fir::route_by_table<>".into())
}

fn route_source() -> Source {
    Source::new::<RouteParams>("moe.cuh", "fir::route<>".into())
}

fn dispatch_source() -> Source {
    Source::new::<DispatchParams>("moe.cuh", "fir::dispatch<>".into())
}

fn combine_source() -> Source {
    Source::new::<CombineParams>("moe.cuh", "fir::combine<>".into())
}

pub(super) fn kernels() -> Vec<Source> {
    vec![route_source(), table_source(), dispatch_source(), combine_source()]
}

/// Tokens of a block of `route`: a warp each.
const ROUTED: u32 = 4;
/// Bytes of rows between the products that are held at once: more tokens are taken in turns.
const HELD: usize = 1 << 30;

/// A routing of tokens.
pub(crate) struct Route<'a> {
    pub(crate) routing: Routing,
    pub(crate) logits: TensorRef<'a>,
    pub(crate) bias: Option<TensorRef<'a>>,
    pub(crate) ids: TensorMut<'a>,
    pub(crate) weights: TensorMut<'a>,
}

pub(crate) fn route<'a>(gpu: &'a Gpu, op: &'static str, r: Route<'a>) -> Result<()> {
    let Route { routing, logits, bias, ids, weights } = r;
    check_float(op, "logits", logits.dtype())?;
    for (arg, got, want) in [("ids", ids.dtype(), DType::I32), ("weights", weights.dtype(), DType::F32)] {
        if got != want {
            return Err(Error::DType { op, arg, got: got.name(), want: want.name().into() });
        }
    }
    check_last_axis(op, "logits", logits.shape(), logits.strides())?;
    check_last_axis(op, "ids", ids.shape(), ids.strides())?;
    check_last_axis(op, "weights", weights.shape(), weights.strides())?;
    let (tokens, experts, top_k) = (logits.shape()[0], logits.shape()[1], ids.shape()[1]);
    if ids.layout().is_empty() {
        return Ok(());
    }
    let Groups { count, chosen } = routing.groups.unwrap_or(Groups { count: 1, chosen: 1 });
    let smem = ROUTED as usize * 8 * (experts + count);
    let most = gpu.properties().shared_per_block as usize;
    if smem > most {
        let want = format!("at most {} with their groups on this device", most / (8 * ROUTED as usize));
        return Err(Error::value(op, "experts", experts, want));
    }
    if tokens > i32::MAX as usize {
        return Err(Error::value(op, "tokens", tokens, "at most 2^31 - 1 on CUDA"));
    }
    let mut call = Call::new(gpu, op);
    let mut params = RouteParams {
        logits_stride: logits.strides()[0] as u64,
        ids_stride: ids.strides()[0] as u64,
        weights_stride: weights.strides()[0] as u64,
        tokens: tokens as u32,
        experts: experts as u32,
        top_k: top_k as u32,
        groups: count as u32,
        chosen: chosen as u32,
        logits_type: type_code(logits.dtype()),
        sigmoid: (routing.score == Score::Sigmoid).into(),
        renormalize: routing.renormalize.into(),
        scale: routing.scale,
        ..bytemuck::Zeroable::zeroed()
    };
    params.logits = call.read("logits", logits)?;
    if let Some(bias) = bias {
        check_float(op, "bias", bias.dtype())?;
        let stride = bias.strides()[0];
        if stride > u32::MAX as usize {
            return Err(Error::layout(op, "bias", format!("stride {stride}"), "at most 2^32 - 1 on CUDA"));
        }
        (params.bias_type, params.bias_stride) = (type_code(bias.dtype()), stride as u32);
        params.bias = call.read("bias", bias)?;
    }
    params.ids = call.write("ids", ids)?;
    params.weights = call.write("weights", weights)?;
    let kernel = gpu.kernel(route_source())?;
    let grid = Grid::new(params.tokens.div_ceil(ROUTED), 32 * ROUTED);
    call.launch(&kernel, Grid { smem: smem as u32, early: true, ..grid }, &params)?;
    call.finish()
}

pub(crate) fn route_by_table<'a>(gpu: &'a Gpu, op: &'static str, r: TableRouteArgs<'a>) -> Result<()> {
    check_float(op, "logits", r.logits.dtype())?;
    let wide = match r.tokens.dtype() {
        DType::I32 => 0,
        DType::I64 => 1,
        other => return Err(Error::DType { op, arg: "tokens", got: other.name(), want: "i32 or i64".into() }),
    };
    check_last_axis(op, "logits", r.logits.shape(), r.logits.strides())?;
    check_last_axis(op, "table", r.table.shape(), r.table.strides())?;
    check_last_axis(op, "ids", r.ids.shape(), r.ids.strides())?;
    check_last_axis(op, "weights", r.weights.shape(), r.weights.strides())?;
    let (tokens, top_k) = (r.tokens.shape()[0], r.table.shape()[1]);
    for (arg, n) in [("tokens", tokens), ("top_k", top_k)] {
        if n > i32::MAX as usize {
            return Err(Error::value(op, arg, n, "at most 2^31 - 1 on CUDA"));
        }
    }
    let mut params = TableParams {
        logits_stride: r.logits.strides()[0] as u64,
        tokens_stride: r.tokens.strides()[0] as u64,
        table_stride: r.table.strides()[0] as u64,
        ids_stride: r.ids.strides()[0] as u64,
        weights_stride: r.weights.strides()[0] as u64,
        vocabulary: r.table.shape()[0] as u64,
        count: tokens as u32,
        experts: r.logits.shape()[1] as u32,
        top_k: top_k as u32,
        logits_type: type_code(r.logits.dtype()),
        wide,
        has_shared: r.shared.is_some().into(),
        shared: r.shared.unwrap_or(0.0),
        ..bytemuck::Zeroable::zeroed()
    };
    let is_empty = r.ids.layout().is_empty();
    let mut call = Call::new(gpu, op);
    (params.logits, params.tokens) = (call.read("logits", r.logits)?, call.read("tokens", r.tokens)?);
    params.table = call.read("table", r.table)?;
    (params.ids, params.weights) = (call.write("ids", r.ids)?, call.write("weights", r.weights)?);
    if !is_empty {
        let grid = Grid::new(params.count.div_ceil(ROUTED), 32 * ROUTED);
        let kernel = gpu.kernel(table_source())?;
        call.launch(&kernel, Grid { early: true, ..grid }, &params)?;
    }
    call.finish()
}

/// Feed-forward layers of experts; shapes and types are checked by the caller.
pub(crate) struct Ffn<'a> {
    pub(crate) x: TensorRef<'a>,
    /// `[tokens, top_k]`, i32 or i64.
    pub(crate) ids: TensorRef<'a>,
    pub(crate) weights: TensorRef<'a>,
    pub(crate) w_gate_up: Scaled<'a>,
    pub(crate) w_down: Scaled<'a>,
    pub(crate) gate: Gate,
    pub(crate) out: TensorMut<'a>,
}

pub(crate) fn ffn<'a>(gpu: &'a Gpu, op: &'static str, f: Ffn<'a>) -> Result<()> {
    let Ffn { x, ids, weights, w_gate_up, w_down, gate, out } = f;
    check_float(op, "x", x.dtype())?;
    if !matches!(w_gate_up.data.dtype(), DType::F32 | DType::F16 | DType::BF16 | DType::E4M3 | DType::E5M2) {
        let want = "f32, f16, bf16, e4m3 or e5m2".into();
        return Err(Error::DType { op, arg: "w_gate_up", got: w_gate_up.data.dtype().name(), want });
    }
    let wide = match ids.dtype() {
        DType::I32 => 0,
        DType::I64 => 1,
        other => return Err(Error::DType { op, arg: "ids", got: other.name(), want: "i32 or i64".into() }),
    };
    check_last_axis(op, "weights", weights.shape(), weights.strides())?;
    check_last_axis(op, "out", out.shape(), out.strides())?;
    let ([tokens, hidden], top_k) = ([x.shape()[0], x.shape()[1]], ids.shape()[1]);
    let (experts, inter) = (w_down.data.shape()[0], w_down.data.shape()[2]);
    if out.layout().is_empty() {
        return Ok(());
    }
    for (arg, n) in [("tokens", tokens), ("experts", experts), ("top_k", top_k), ("inter", inter)] {
        if n > i32::MAX as usize {
            return Err(Error::value(op, arg, n, "at most 2^31 - 1 on CUDA"));
        }
    }
    let dtype = x.dtype();
    // Rows in between begin on 16 bytes.
    let (middle_stride, result_stride) = (inter.next_multiple_of(8), hidden.next_multiple_of(8));
    let row = middle_stride.saturating_mul(dtype.size()).saturating_add(result_stride.saturating_mul(4));
    let each = (HELD / row.saturating_mul(top_k).max(1)).clamp(1, tokens);
    let pairs = each
        .checked_mul(top_k)
        .filter(|&n| n <= i32::MAX as usize)
        .ok_or_else(|| Error::value(op, "top_k", top_k, "at most 2^31 - 1 on CUDA"))?;

    let mut call = Call::new(gpu, op);
    let (xs, out_type) = (Side::new(&mut call, ["x", "x.scales"], x.into())?, out.dtype());
    let up = Side::new(&mut call, ["w_gate_up", "w_gate_up.scales"], w_gate_up)?;
    let down = Side::new(&mut call, ["w_down", "w_down.scales"], w_down)?;
    let (out_stride, ids_strides) = (out.strides()[0] as u64, [ids.strides()[0] as u64, ids.strides()[1] as u64]);
    let weights_stride = weights.strides()[0] as u64;
    let (ids, weights, out) = (call.read("ids", ids)?, call.read("weights", weights)?, call.write("out", out)?);
    let sizes = [pairs * 4, pairs * middle_stride * dtype.size(), pairs * result_stride * 4];
    let sorted = call.scratch("pairs", sizes[0])?;
    let middle_at = call.scratch("middle", sizes[1])?;
    let results = call.scratch("results", sizes[2])?;
    let middle = Side::of_rows(middle_at, dtype, [pairs, inter], middle_stride);

    let shape = Shape { groups: experts, rows: pairs, listed: true, indptr: None };
    let chosen = [
        Chosen::new(gpu, Kind { gathered: true, ..Kind::new(&xs, &up, true) }, &shape, inter),
        Chosen::new(gpu, Kind::new(&middle, &down, false), &shape, hidden),
    ];
    let [tile_rows, tile_counts] =
        [chosen.each_ref().map(|c| c.rows), chosen.each_ref().map(|c| (pairs as u32) / c.rows + experts as u32)];
    let mut tiles = [Address(0); 2];
    for (tiles, count) in tiles.iter_mut().zip(tile_counts) {
        *tiles = call.scratch("tiles", count as usize * 12)?;
    }

    let id_size = if wide == 1 { 8 } else { 4 };
    for from in (0..tokens).step_by(each) {
        let now = each.min(tokens - from);
        let past = |start: Address, stride: u64, size: u64| Address(start.0 + from as u64 * stride * size);
        let ids = past(ids, ids_strides[0], id_size);
        if top_k > 0 && experts > 0 {
            let count = (now * top_k) as u32;
            let dispatch = DispatchParams {
                ids,
                pairs: sorted,
                tiles_0: tiles[0],
                tiles_1: tiles[1],
                token_stride: ids_strides[0],
                choice_stride: ids_strides[1],
                count,
                top_k: top_k as u32,
                experts: experts as u32,
                wide,
                tile_rows,
                tile_counts,
            };
            let kernel = gpu.kernel(dispatch_source())?;
            call.launch(&kernel, Grid { early: true, ..Grid::new(experts as u32, 1024) }, &dispatch)?;
            let mut params = GemmParams::new(&xs, &up, inter).to(middle_at, dtype, [0, middle_stride as u64], true);
            params.x = past(params.x, params.x_stride, dtype.size() as u64);
            (params.tiles, params.row_tiles, params.gate) = (tiles[0], tile_counts[0], gate as u32);
            (params.x_rows, params.x_share) = (sorted, top_k as u32);
            chosen[0].launch(gpu, &call, params, 1)?;
            let mut params =
                GemmParams::new(&middle, &down, hidden).to(results, DType::F32, [0, result_stride as u64], true);
            (params.tiles, params.row_tiles, params.out_rows) = (tiles[1], tile_counts[1], sorted);
            chosen[1].launch(gpu, &call, params, 1)?;
        }
        let out = past(out, out_stride, dtype.size() as u64);
        let combine = CombineParams {
            results,
            ids,
            weights: past(weights, weights_stride, 4),
            out,
            results_stride: result_stride as u64,
            token_stride: ids_strides[0],
            choice_stride: ids_strides[1],
            weights_stride,
            out_stride,
            hidden: hidden as u32,
            top_k: top_k as u32,
            experts: experts as u32,
            wide,
            out_type: type_code(out_type),
            vector: (out.0.is_multiple_of(16) && (out_stride * dtype.size() as u64).is_multiple_of(16)).into(),
        };
        let parts = hidden.div_ceil(8 * 256);
        let kernel = gpu.kernel(combine_source())?;
        let grid = Grid { grid: [now as u32, parts as u32, 1], early: true, ..Grid::new(0, 256) };
        call.launch(&kernel, grid, &combine)?;
    }
    call.finish()
}
