//! `sm90_prefill.cuh`: what it takes, its shapes, and the maps of its tensors for the copy engine.

use super::super::arch::Arch;
use super::super::driver::{self, TensorMap};
use super::super::exec::Gpu;
use super::super::params::{Address, params};
use super::form::KvTensor;
use super::{Rows, Spec};
use crate::error::Result;
use crate::tensor::DType;

/// Rows of a query tile: 64 for each of two warpgroups.
pub(super) const ROWS: usize = 128;

/// Units that are known at a time, each with where its rows stand.
const UNITS: usize = 4;

/// Most rows of a box: a tile of 64 or 128 positions begins at a multiple of it.
const BOX: usize = 64;

params! {
    /// What stands before `AttentionParams` in those of `sm90_prefill.cuh`.
    pub(super) struct Sm90Params = "fir::Sm90Params" {
        q: TensorMap,
        k: TensorMap,
        v: TensorMap,
        out: TensorMap,
        k_tail: TensorMap,
        v_tail: TensorMap,
        queue: Address,
        count: Address,
        heads: i32,
        heads_at_once: i32,
        box_tokens: i32,
        box_rows: i32,
        k_page: i32,
        v_page: i32,
        groups: i32,
        group_inverse: i32,
    }
}

/// Why the kernel does not take `s`, beside the reasons that it shares with `prefill.cuh`.
pub(super) fn refuses(s: &Spec, arch: Arch) -> Option<String> {
    match s {
        _ if arch != Arch::HOPPER => Some(format!("{arch} instead of {}", Arch::HOPPER)),
        _ if !matches!(s.kv, DType::BF16 | DType::F16 | DType::E4M3) || (s.q != s.kv && !widens_keys(s)) => {
            Some(format!("{} queries with {} keys and values", s.q, s.kv))
        }
        // A sum of e4m3 products has some 13 bits: enough for bf16 and its lse, not for those of f16.
        _ if s.q == DType::E4M3 && s.out != DType::BF16 => Some(format!("{} results of e4m3 products", s.out)),
        _ if s.q != DType::E4M3 && s.out != s.q && !s.states => Some(format!("{} results of {} queries", s.out, s.q)),
        _ if !s.dim_qk.is_multiple_of(line(s.kv)) || !s.dim_vo.is_multiple_of(line(s.kv)) || s.dim_vo > s.dim_qk => {
            let (qk, vo, line) = (s.dim_qk, s.dim_vo, line(s.kv));
            Some(format!("head dims {qk}, {vo}: no multiples of {line}, or values longer than keys"))
        }
        // The warpgroup that widens them leaves too few registers.
        _ if s.kv == DType::E4M3 && s.dim_vo > 128 => Some(format!("{} e4m3 columns of values above 128", s.dim_vo)),
        _ if s.group > ROWS => Some(format!("{} query heads per KV head are more than {ROWS}", s.group)),
        _ => None,
    }
}

/// Elements of 128 bytes, which rows are copied and multiplied in.
fn line(dtype: DType) -> usize {
    128 / dtype.size()
}

/// Whether e4m3 keys become what the queries are.
fn widens_keys(s: &Spec) -> bool {
    s.kv == DType::E4M3 && matches!(s.q, DType::BF16 | DType::F16)
}

/// Threads of a block: where rows are gathered, or e4m3 made wider, a warpgroup more, unless values have the registers.
pub(super) fn threads(s: &Spec, gathers: bool) -> u32 {
    if (gathers || s.kv == DType::E4M3) && s.dim_vo < 256 { 512 } else { 384 }
}

/// How much of a problem is in shared memory at a time.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    /// KV positions per step.
    pub(super) tile: usize,
    /// Units whose queries are there: the next one's come while one runs.
    pub(super) q_stages: usize,
}

impl Shape {
    pub(super) fn of(s: &Spec) -> Self {
        let one = s.dim_qk > 128 || widens_keys(s);
        Self { tile: if s.dim_qk > 192 { 64 } else { 128 }, q_stages: if one { 1 } else { 2 } }
    }

    /// Bytes of shared memory, `Sm90Config::kShared` of a variant with row contexts.
    pub(super) fn smem(self, s: &Spec) -> u32 {
        let row = s.dim_qk * s.q.size();
        // e4m3 as it comes: two tiles of values, or one of keys and of values.
        let raw = match s.kv {
            DType::E4M3 if widens_keys(s) => self.tile * (s.dim_qk + s.dim_vo),
            DType::E4M3 => 2 * self.tile * s.dim_vo,
            _ => 0,
        };
        let (q, kv) = (self.q_stages * ROWS * row.max(s.dim_vo * 2), 2 * self.tile * (row + s.dim_vo * 2) + raw);
        (q + kv + 224 + UNITS * 80 + 48 + UNITS * ROWS * 24) as u32
    }
}

/// Boxes that keys and values come in: rows of one, none of which crosses the end of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Boxes {
    rows: u64,
    /// Groups of 8 rows between pages, of keys and of values.
    pages: [u64; 2],
    /// Groups of the maps.
    groups: [u64; 2],
    /// Of ragged KV: rows, which requests may begin at any of.
    ragged: Option<u64>,
}

impl Boxes {
    /// None where rows must be gathered one by one: small pages, or pages that are no whole number of 8 rows apart.
    pub(super) fn new([k, v]: [KvTensor; 2], pages: u64, page_size: u64, ragged: bool) -> Option<Self> {
        if ragged {
            // A box begins at row r % 8 of group r / 8, so 15 rows to a group are said to be there; a group that has fewer
            // is not in the map, and its rows come from that of the tail.
            let groups = if page_size < 15 { 0 } else { (page_size - 15) / 8 + 1 };
            return Some(Self { rows: BOX as u64, pages: [0; 2], groups: [groups; 2], ragged: Some(page_size) });
        }
        let rows = 1 << page_size.trailing_zeros().min(BOX.trailing_zeros());
        let apart = |t: KvTensor| {
            // A single page is never stepped from.
            let step = if pages > 1 { t.page } else { 0 };
            (t.row > 0 && step.is_multiple_of(8 * t.row)).then(|| step / (8 * t.row))
        };
        let pages_apart = [apart(k)?, apart(v)?];
        let groups = pages_apart.map(|apart| pages.saturating_sub(1) * apart + page_size / 8);
        let fits = rows >= 8 && pages > 0 && groups.iter().all(|&g| g < 1 << 31);
        fits.then_some(Self { rows, pages: pages_apart, groups, ragged: None })
    }
}

/// What a row is multiplied by, over 2^22, to be its token.
fn group_inverse(group: usize) -> i32 {
    (1usize << 22).div_ceil(group) as i32
}

/// Everything before `AttentionParams`, but for the queue and the list.
pub(super) fn params(
    gpu: &Gpu,
    spec: &Spec,
    ([q, out], tokens): ([Rows; 2], usize),
    [k, v]: [KvTensor; 2],
    kv_heads: usize,
    boxes: Option<Boxes>,
) -> Result<Sm90Params> {
    let (group, heads, none) = (spec.group as u64, kv_heads as u64, TensorMap::default());
    // What is never stepped along has a stride of 0, which need not be true of maps.
    let or = |stride: u64, other: usize| if stride == 0 { 2 * other as u64 } else { stride };
    let box_tokens = ROWS / spec.group;
    let map = |dtype, start: Address, dims: &[u64], strides: &[u64], shape: &[u32]| {
        gpu.tensor_map(&driver::Boxes { start: start.0, dtype, dims, strides, shape, in_order: false })
    };
    let rows = |dtype, rows: Rows, dim: usize| {
        let (dims, shape) =
            ([dim as u64, group * heads, tokens as u64], [line(dtype) as u32, group as u32, box_tokens as u32]);
        map(dtype, rows.start, &dims, &[or(rows.head, dim), or(rows.token, dim)], &shape)
    };
    let q = rows(spec.q, q, spec.dim_qk)?;
    // States leave without a map.
    let out = if spec.states { none } else { rows(spec.out, out, spec.dim_vo)? };
    let line = line(spec.kv) as u64;
    let pool = |t: KvTensor, dim: usize, groups: u64, boxes: &Boxes| -> Result<[TensorMap; 2]> {
        let row = or(t.row, dim);
        let (lines, strides) = (dim as u64 / line, [row, 128, 8 * row, or(t.head, dim)]);
        let map = |rows, groups, block_groups| {
            let (dims, shape) = ([line, rows, lines, groups, heads], [line as u32, 8, lines as u32, block_groups, 1]);
            map(spec.kv, t.data, &dims, &strides, &shape)
        };
        let rows = if boxes.ragged.is_some() { 15 } else { 8 };
        let whole = if groups > 0 { map(rows, groups, boxes.rows as u32 / 8)? } else { none };
        Ok([whole, boxes.ragged.map_or(Ok(none), |rows| map(rows, 1, 1))?])
    };
    let ([k, k_tail], [v, v_tail]) = match &boxes {
        Some(b) => (pool(k, spec.dim_qk, b.groups[0], b)?, pool(v, spec.dim_vo, b.groups[1], b)?),
        None => ([none; 2], [none; 2]),
    };
    let b = boxes.unwrap_or(Boxes { rows: 8, pages: [0; 2], groups: [0; 2], ragged: None });
    Ok(Sm90Params {
        q,
        k,
        v,
        out,
        k_tail,
        v_tail,
        queue: Address(0),
        count: Address(0),
        heads: kv_heads as i32,
        heads_at_once: kv_heads as i32,
        box_tokens: box_tokens as i32,
        box_rows: b.rows as i32,
        k_page: b.pages[0] as i32,
        v_page: b.pages[1] as i32,
        groups: if b.ragged.is_some() { b.groups[0].min(i32::MAX as u64) as i32 } else { i32::MAX },
        group_inverse: group_inverse(spec.group),
    })
}

/// KV heads that are taken before the next ones: as many as have their `rows` of keys and values in two fifths of a level-2 cache
/// of `l2` bytes, but enough for two units per worker. On an H200 (TFLOP/s, 16 x 1024 causal, 8 heads): 8 at once 421, 4 471, 2
/// 488, 1 481.
pub(super) fn heads_at_once(s: &Spec, rows: u64, heads: usize, l2: usize, [items, workers]: [usize; 2]) -> usize {
    let per_head = rows * (s.kv.size() * (s.dim_qk + s.dim_vo)) as u64;
    let in_cache = (l2 as u64 * 2 / 5) / per_head.max(1);
    (in_cache as usize).max((2 * workers).div_ceil(items.max(1))).clamp(1, heads.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(page: u64, row: u64) -> KvTensor {
        KvTensor { page, row, ..KvTensor::default() }
    }

    #[test]
    fn boxes_are_pages_or_none() {
        let nhd = |size: u64| [tensor(size * 2048, 2048); 2];
        for (size, rows) in [(8, 8), (16, 16), (24, 8), (64, 64), (128, 64), (48, 16)] {
            let b = Boxes::new(nhd(size), 10, size, false).unwrap();
            assert_eq!((b.rows, b.pages[0], b.groups[1]), (rows, size / 8, 10 * size / 8), "{size}");
        }
        for size in [1, 2, 4, 12, 20] {
            assert_eq!(Boxes::new(nhd(size), 10, size, false), None, "{size}");
        }
        // Keys and values in one tensor: pages are two apart. Pages that are not whole groups apart.
        assert_eq!(Boxes::new([tensor(2 * 16 * 2048, 2048); 2], 3, 16, false).unwrap().groups, [2 * 4 + 2; 2]);
        assert_eq!(Boxes::new([tensor(16 * 2048 + 256, 2048); 2], 3, 16, false), None);
        // No box of ragged rows passes the last one.
        for rows in [0, 14, 15, 22, 23, 1000] {
            let b = Boxes::new(nhd(1), 1, rows, true).unwrap();
            assert!(b.groups[0] == 0 || 8 * (b.groups[0] - 1) + 15 <= rows, "{rows}");
        }
    }

    #[test]
    fn rows_are_tokens() {
        for (group, row) in (1..=ROWS).flat_map(|g| (0..ROWS).map(move |r| (g, r))) {
            let product = row as i32 * group_inverse(group);
            assert_eq!((product >> 22) as usize, row / group, "row {row} of {group} heads");
        }
    }

    #[test]
    fn heads_stay_in_the_cache() {
        let spec = Spec {
            op: "test",
            many: false,
            q: DType::BF16,
            kv: DType::BF16,
            out: DType::BF16,
            dim_qk: 128,
            dim_vo: 128,
            dim_pe: None,
            group: 4,
            states: false,
            variant: crate::variant::standard(),
        };
        let at_once = |rows, items| heads_at_once(&spec, rows, 8, 50 << 20, [items, 132]);
        assert_eq!([at_once(16384, 512), at_once(1024, 32), at_once(1 << 20, 1000), at_once(32768, 64)], [2, 8, 1, 5]);
        assert_eq!(at_once(0, 0), 8);
    }
}
