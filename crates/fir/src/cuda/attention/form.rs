//! The kernels: C++ names, parameters, and the sizes of their blocks.

use super::super::jit::Source;
use super::super::params::{Address, Twin, params};
use super::hooks::Hooks;
use super::{ROWS, Spec};
use crate::tensor::DType;

/// A kernel that runs a work list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// `decode.cuh`: 16 rows against KV, on tensor cores.
    Decode,
    /// `plain.cuh`: everything, in f32.
    Plain,
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
}

/// A tensor of a pool; strides in bytes.
#[derive(Clone, Copy, Default)]
pub(super) struct KvTensor {
    pub(super) data: Address,
    pub(super) page: u64,
    pub(super) row: u64,
    pub(super) head: u64,
}

impl KvTensor {
    /// Whether every row begins at a multiple of so many bytes.
    pub(super) fn is_multiple_of(&self, bytes: u64) -> bool {
        [self.data.0, self.page, self.row, self.head].iter().all(|x| x % bytes == 0)
    }
}

params! {
    /// All but the variant's parameters, which follow.
    pub(super) struct DecodeParams = "fir::DecodeParams" {
        q: Address,
        q_token: u64,
        q_head: u64,
        items: Address,
        out in "out.out": Address,
        lse in "out.lse": Address,
        out_token in "out.out_token": u64,
        out_head in "out.out_head": u64,
        lse_token in "out.lse_token": u64,
        lse_head in "out.lse_head": u64,
        partial_o in "out.partial_o": Address,
        partial_md in "out.partial_md": Address,
        merges in "out.merges": Address,
        counters in "out.counters": Address,
        tokens in "out.tokens": Address,
        k in "kv.k.data": Address,
        k_page in "kv.k.page": u64,
        k_row in "kv.k.row": u64,
        k_head in "kv.k.head": u64,
        v in "kv.v.data": Address,
        v_page in "kv.v.page": u64,
        v_row in "kv.v.row": u64,
        v_head in "kv.v.head": u64,
        k_scales in "kv.k_scales.data": Address,
        k_scales_page in "kv.k_scales.page": u64,
        k_scales_row in "kv.k_scales.row": u64,
        k_scales_head in "kv.k_scales.head": u64,
        v_scales in "kv.v_scales.data": Address,
        v_scales_page in "kv.v_scales.page": u64,
        v_scales_row in "kv.v_scales.row": u64,
        v_scales_head in "kv.v_scales.head": u64,
        indices in "kv.indices": Address,
        indptr in "kv.indptr": Address,
        num_pages in "kv.num_pages": u32,
        page_size in "kv.page_size": u32,
        page_shift in "kv.page_shift": i32,
        dim_qk in "kv.dim_qk": i32,
        dim_vo in "kv.dim_vo": i32,
        k_scale in "kv.k_scale": f32,
        v_scale in "kv.v_scale": f32,
        pad in "kv.pad": i32,
        sm_scale: f32,
        group: i32,
    }
}

params! {
    /// What stands before [`DecodeParams`] in those of `plain.cuh`.
    pub(super) struct PlainParams = "fir::PlainParams" {
        q_pe: Address,
        q_pe_token: u64,
        q_pe_head: u64,
        kpe in "kpe.data": Address,
        kpe_page in "kpe.page": u64,
        kpe_row in "kpe.row": u64,
        kpe_head in "kpe.head": u64,
        dim_pe: i32,
        pe_factor: f32,
        q_type: i32,
        kv_type: i32,
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

/// Head dims that `decode.cuh` is instantiated for.
const DIMS: [usize; 5] = [64, 96, 128, 192, 256];

impl Form {
    /// The instantiation for `spec` on a device whose blocks have at most `shared` bytes.
    pub(super) fn instance(self, spec: &Spec, hooks: &Hooks, shared: u32) -> Instance {
        let out = if spec.states { "fir::State" } else { cpp(spec.out) };
        let decode = Twin::of::<DecodeParams>();
        match self {
            Self::Decode => {
                let dim =
                    |d: usize| DIMS.into_iter().find(|&n| n >= d && (bits(spec.kv) > 4 || n % 64 == 0)).unwrap_or(d);
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
                // 41 KB on their way keep an H200's memory busy; three stages of four warps are 96 KB per block.
                let shapes = [(4, 3), (4, 2), (2, 2)];
                let (warps, stages) =
                    shapes.into_iter().find(|&(w, s)| smem(w, s) <= shared as usize).unwrap_or((2, 2));
                let smem = smem(warps, stages) as u32;
                let most = if qk > 128 { 1 } else { 2 };
                let blocks = ((shared + 1024) / (smem + 1024)).clamp(1, most);
                let (q, kv) = (cpp(spec.q), cpp(spec.kv));
                let name = format!(
                    "fir::decode<fir::DecodeConfig<{q}, {kv}, {out}, {qk}, {vo}, {}, {warps}, {stages}, {tile}>, {most}>",
                    hooks.name
                );
                let params = hooks.twin(&decode.cpp, &[("", &decode)]);
                let source = Source { file: "attention/decode.cuh", name, prelude: hooks.text.clone(), params };
                Instance { form: self, source, threads: 32 * warps as u32, smem, blocks }
            }
            Self::Plain => {
                let dim = (spec.dim_qk + spec.dim_pe.unwrap_or(0)).max(spec.dim_vo);
                let most = dim.next_power_of_two().max(128);
                let name = format!("fir::plain<{out}, {most}, {}>", hooks.name);
                let plain = Twin::of::<PlainParams>();
                let params = hooks.twin(&plain.cpp, &[("", &plain), ("decode.", &decode)]);
                let source = Source { file: "attention/plain.cuh", name, prelude: hooks.text.clone(), params };
                let smem = (ROWS * most * 4) as u32;
                Instance { form: self, source, threads: 128, smem, blocks: if most > 128 { 2 } else { 4 } }
            }
        }
    }
}
