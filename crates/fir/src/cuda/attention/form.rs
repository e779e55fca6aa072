//! The kernels: C++ names, parameters, and the sizes of their blocks.

use super::super::arch::Arch;
use super::super::jit::Source;
use super::super::params::{Address, Twin, params};
use super::hooks::Hooks;
use super::hopper::{self, Sm90Params};
use super::{ROWS, Spec, mla};
use crate::tensor::DType;

/// A kernel that runs a work list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// `decode.cuh`: 16 rows against KV, on tensor cores.
    Decode,
    /// `prefill.cuh`: 64 to 256 rows, on tensor cores.
    Prefill,
    /// `sm90_prefill.cuh`: 128 rows, on those of Hopper.
    Hopper,
    /// `plain.cuh`: everything, in f32.
    Plain,
    /// `sm90_mla.cuh`: latent attention, 64 rows for each block of a cluster of so many.
    Mla(u32),
}

/// An instantiation, and how it is launched.
#[derive(Clone, Debug)]
pub(super) struct Instance {
    pub(super) form: Form,
    pub(super) source: Source,
    pub(super) threads: u32,
    pub(super) smem: u32,
    /// Blocks that a multiprocessor should hold.
    pub(super) blocks: u32,
    /// Most rows of a query tile, unless one token has more.
    pub(super) rows: usize,
}

params! {
    /// A tensor of a pool; strides in bytes.
    #[derive(Default)]
    pub(super) struct KvTensor = "fir::KvTensor" {
        data: Address,
        page: u64,
        row: u64,
        head: u64,
    }
}

impl KvTensor {
    /// Whether every row begins at a multiple of so many bytes.
    pub(super) fn is_multiple_of(&self, bytes: u64) -> bool {
        [self.data.0, self.page, self.row, self.head].iter().all(|x| x % bytes == 0)
    }
}

params! {
    /// Where rows end up.
    pub(super) struct OutParams = "fir::OutParams" {
        out: Address,
        lse: Address,
        out_token: u64,
        out_head: u64,
        lse_token: u64,
        lse_head: u64,
        partial_o: Address,
        partial_md: Address,
        merges: Address,
        counters: Address,
        tokens: Address,
    }
}

params! {
    /// Keys, values and where their rows are.
    pub(super) struct KvPool = "fir::KvPool" {
        k: KvTensor,
        v: KvTensor,
        k_scales: KvTensor,
        v_scales: KvTensor,
        indices: Address,
        indptr: Address,
        num_pages: u32,
        page_size: u32,
        page_shift: i32,
        dim_qk: i32,
        dim_vo: i32,
        k_scale: f32,
        v_scale: f32,
        pad: i32,
    }
}

params! {
    /// All but the variant's parameters, which follow.
    pub(super) struct AttentionParams = "fir::AttentionParams" {
        q: Address,
        q_token: u64,
        q_head: u64,
        items: Address,
        out: OutParams,
        kv: KvPool,
        sm_scale: f32,
        group: i32,
        team: i32,
        beside: i32,
    }
}

params! {
    /// What stands before [`AttentionParams`] in those of `plain.cuh`.
    pub(super) struct PlainParams = "fir::PlainParams" {
        q_pe: Address,
        q_pe_token: u64,
        q_pe_head: u64,
        kpe: KvTensor,
        dim_pe: i32,
        pe_factor: f32,
        q_type: i32,
        kv_type: i32,
    }
}

params! {
    /// What stands before [`AttentionParams`] in those of `prefill.cuh`.
    pub(super) struct PrefillParams = "fir::PrefillParams" {
        queue: Address,
        count: Address,
        heads: i32,
        pad: i32,
    }
}

/// Bits of an element, two of which E2M1x2 packs.
pub(super) fn bits(dtype: DType) -> usize {
    if dtype == DType::E2M1x2 { 4 } else { dtype.size() * 8 }
}

/// The type that keys and values of `dtype` are multiplied in on tensor cores.
pub(super) fn multiplied(dtype: DType) -> Option<DType> {
    match dtype {
        DType::F32 => None,
        DType::BF16 => Some(DType::BF16),
        _ => Some(DType::F16),
    }
}

/// C++ name of an element type.
pub(super) fn cpp(dtype: DType) -> &'static str {
    match dtype {
        DType::F16 => "fir::F16",
        DType::BF16 => "fir::Bf16",
        DType::E4M3 => "fir::E4m3",
        DType::E5M2 => "fir::E5m2",
        DType::E2M1x2 => "fir::E2m1",
        _ => "fir::F32",
    }
}

/// Number of an element type in `plain.cuh`.
pub(super) fn number(dtype: DType) -> i32 {
    match dtype {
        DType::F16 => 1,
        DType::BF16 => 2,
        DType::E4M3 => 3,
        DType::E5M2 => 4,
        DType::E2M1x2 => 5,
        _ => 0,
    }
}

/// Rows of a page that `decode.cuh` takes by one pointer.
pub(super) const RUN: usize = 16;

/// Head dims that the kernels on tensor cores are instantiated for.
const DIMS: [usize; 5] = [64, 96, 128, 192, 256];

/// Warps, tiles of 16 rows to each, KV positions per step, and blocks of `prefill.cuh` by the greater head dim, the first
/// that fits a block's shared memory. On an H200 (TFLOP/s, 4 x 4096 causal): dim 128 355, 64 281, 256 305, 192 with 128 351;
/// the second shapes, for devices of 99 KB, 267 at 256 and 316 at 192 with 128.
const PREFILL: [(usize, [[usize; 4]; 2]); 3] = [
    (128, [[4, 2, 64, 2], [4, 2, 32, 2]]),
    (192, [[8, 2, 64, 1], [4, 2, 32, 2]]),
    (256, [[8, 1, 64, 1], [4, 1, 32, 2]]),
];

impl Form {
    /// Blocks that work as one.
    pub(super) fn cluster(self) -> u32 {
        if let Self::Mla(cluster) = self { cluster } else { 1 }
    }

    /// The form that takes its place where `runs` (of [`Form::instance`]) are not: [`Form::Hopper`] gathers no rows of e4m3.
    pub(super) fn where_runs(self, s: &Spec, runs: bool) -> Self {
        if self == Self::Hopper && s.kv == DType::E4M3 && !runs { Self::Prefill } else { self }
    }

    /// Why it does not take `spec` on a device of `arch`, if it does not.
    pub(super) fn refuses(self, s: &Spec, arch: Arch) -> Option<String> {
        if matches!(self, Self::Plain | Self::Mla(_)) {
            return None;
        }
        if self == Self::Hopper
            && let Some(why) = hopper::refuses(s, arch)
        {
            return Some(why);
        }
        let Some(multiply) = multiplied(s.kv) else { return Some(format!("{} keys and values", s.kv)) };
        let bits = bits(s.kv);
        let why = match s {
            _ if s.dim_pe.is_some() => "latent attention".into(),
            _ if self == Self::Decode && s.group > ROWS => {
                format!("{} query heads per KV head are more than {ROWS}", s.group)
            }
            // The least rows of a tile that any of its shapes has.
            _ if self == Self::Prefill && s.group > 64 => {
                format!("{} query heads per KV head are more than 64", s.group)
            }
            _ if self == Self::Prefill && bits == 4 => format!("{} keys and values", s.kv),
            _ if s.dim_qk.max(s.dim_vo) > 256 => format!("head dims {}, {} above 256", s.dim_qk, s.dim_vo),
            _ if [s.dim_qk, s.dim_vo]
                .iter()
                .any(|d| !(d * bits).is_multiple_of(128) || (bits == 4 && !d.is_multiple_of(64))) =>
            {
                format!("{} rows of {} and {} elements", s.kv, s.dim_qk, s.dim_vo)
            }
            // The products' operands have 11 or 8 significant bits; the output may not have more.
            _ if s.out == DType::F32 || (s.out == DType::F16 && multiply == DType::BF16) => {
                format!("{} results of {multiply} products", s.out)
            }
            _ if s.q == DType::F32 || (s.q == DType::F16 && multiply == DType::BF16) => {
                format!("{} queries in {multiply} products", s.q)
            }
            // Rotated keys would be rounded to 16 bits before the product.
            _ if s.variant.rotates_keys() => format!("{} keys that are rotated", s.kv),
            _ if self != Self::Decode && s.variant.rotates_queries() => "queries that are rotated".into(),
            _ => return None,
        };
        Some(why)
    }

    /// The instantiation for `spec` on a device whose blocks have at most `shared` bytes. `runs`: aligned runs of [`RUN`]
    /// positions lie in one page; of [`Form::Hopper`], boxes do ([`hopper::Boxes`]).
    pub(super) fn instance(self, spec: &Spec, hooks: &Hooks, shared: u32, runs: bool) -> Instance {
        let out = if spec.states { "fir::State" } else { cpp(spec.out) };
        let common = Twin::of::<AttentionParams>();
        let dim = |d: usize| DIMS.into_iter().find(|&n| n >= d && (bits(spec.kv) > 4 || n % 64 == 0)).unwrap_or(d);
        let (q, kv) = (cpp(spec.q), cpp(spec.kv));
        let prelude = hooks.text.clone();
        match self {
            Self::Decode => {
                let vo = dim(spec.dim_vo);
                // Warps exchange rows of the output through a stage of keys and values, which must have the room.
                let qk = dim(spec.dim_qk).max(vo);
                let tile = 256 / bits(spec.kv);
                let smem = |warps: usize, stages: usize| {
                    let scales = if bits(spec.kv) == 4 { (qk + vo) / 16 } else { 0 };
                    let stage = (tile * ((qk + vo) * bits(spec.kv) / 8 + scales)).next_multiple_of(128);
                    let fixed = (warps * stages * (stage + 8) + warps * 128 + (warps + 1) * 4).next_multiple_of(16);
                    let rope = spec.variant.rotates_keys() || spec.variant.rotates_queries();
                    fixed + if qk > 128 { qk * 32 } else { 0 } + if rope { qk * 8 } else { 0 }
                };
                // 41 KB on their way keep an H200's memory busy; three stages of four warps are 96 KB per block. Twice as
                // many blocks of half the size end sooner where each has a request or more (64 x 512: 49 us against 54,
                // 256 x 512: 150 and 156, one of 32768 and 63 x 512: 90 and 95) and later where all share one (1 x 8192:
                // 29 and 24).
                let small = spec.many && bits(spec.kv) == 16 && qk <= 128;
                let shapes = [(if small { 2 } else { 4 }, 3), (4, 2), (2, 2)];
                let (warps, stages) =
                    shapes.into_iter().find(|&(w, s)| smem(w, s) <= shared as usize).unwrap_or((2, 2));
                let smem = smem(warps, stages) as u32;
                let most = if qk > 128 { 1 } else { 8 / warps as u32 };
                let blocks = ((shared + 1024) / (smem + 1024)).clamp(1, most);
                let run = if runs && bits(spec.kv) > 4 { RUN } else { 1 };
                let name = format!(
                    "fir::decode<fir::DecodeConfig<{q}, {kv}, {out}, {qk}, {vo}, {}, {warps}, {stages}, {tile}, {run}>, {most}>",
                    hooks.name
                );
                let params = hooks.twin(&common.cpp, &[("", &common)]);
                let source = Source { file: "attention/decode.cuh", name, prelude, params };
                Instance { form: self, source, threads: 32 * warps as u32, smem, blocks, rows: ROWS }
            }
            Self::Prefill => {
                let (qk, vo) = (dim(spec.dim_qk), dim(spec.dim_vo));
                let smem = |[warps, m, tile, _]: [usize; 4]| {
                    let rows = 16 * m * warps;
                    // q, factors and contexts of rows, two stages, places, a flag: the most that `PrefillConfig` may need.
                    rows * (qk * 2 + 4 + 24) + 2 * tile * (qk + vo) * bits(spec.kv) / 8 + 16 * tile + 16
                };
                let shapes = PREFILL.into_iter().find(|(most, _)| *most >= qk.max(vo)).unwrap_or(PREFILL[2]).1;
                let shape = shapes.into_iter().find(|s| smem(*s) <= shared as usize).unwrap_or(shapes[1]);
                let ([warps, m, tile, most], smem) = (shape, smem(shape) as u32);
                let blocks = ((shared + 1024) / (smem + 1024)).clamp(1, most as u32);
                let name = format!(
                    "fir::prefill<fir::PrefillConfig<{q}, {kv}, {out}, {qk}, {vo}, {}, {warps}, {m}, {tile}, 2>, {most}>",
                    hooks.name
                );
                let own = Twin::of::<PrefillParams>();
                let params = hooks.twin(&own.cpp, &[("", &own), ("common.", &common)]);
                let source = Source { file: "attention/prefill.cuh", name, prelude, params };
                Instance { form: self, source, threads: 32 * warps as u32, smem, blocks, rows: 16 * m * warps }
            }
            Self::Mla(cluster) => mla::instance(spec, hooks, cluster),
            Self::Hopper => {
                let shape = hopper::Shape::of(spec);
                let name = format!(
                    "fir::prefill_sm90<fir::Sm90Config<{q}, {kv}, {out}, {}, {}, {}, {}, {}, {}>>",
                    spec.dim_qk, spec.dim_vo, hooks.name, shape.tile, shape.q_stages, !runs
                );
                let own = Twin::of::<Sm90Params>();
                let mut params = hooks.twin(&own.cpp, &[("", &own), ("common.", &common)]);
                // Maps stand on multiples of 64 bytes, and so does what holds them.
                params.size = params.size.next_multiple_of(64);
                let source = Source { file: "attention/sm90_prefill.cuh", name, prelude, params };
                Instance {
                    form: self,
                    source,
                    threads: hopper::threads(spec, !runs),
                    smem: shape.smem(spec),
                    blocks: 1,
                    rows: hopper::ROWS,
                }
            }
            Self::Plain => {
                let dim = (spec.dim_qk + spec.dim_pe.unwrap_or(0)).max(spec.dim_vo);
                let most = dim.next_power_of_two().max(128);
                let name = format!("fir::plain<{out}, {most}, {}>", hooks.name);
                let own = Twin::of::<PlainParams>();
                let params = hooks.twin(&own.cpp, &[("", &own), ("common.", &common)]);
                let source = Source { file: "attention/plain.cuh", name, prelude, params };
                let (smem, blocks) = ((ROWS * most * 4) as u32, if most > 128 { 2 } else { 4 });
                Instance { form: self, source, threads: 128, smem, blocks, rows: ROWS }
            }
        }
    }
}
