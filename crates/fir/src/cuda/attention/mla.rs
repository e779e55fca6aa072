//! Latent attention on Hopper: `sm90_mla.cuh` and its merge.

use super::super::driver::{Boxes, Grid, TensorMap};
use super::super::exec::Gpu;
use super::super::jit::Source;
use super::super::params::{Address, Twin, params};
use super::form::{AttentionParams, Form, Instance, KvTensor, cpp};
use super::hooks::Hooks;
use super::{Rows, Spec};
use crate::cuda::arch::Arch;
use crate::error::Result;
use crate::tensor::DType;

params! {
    /// What stands before [`AttentionParams`] in those of `sm90_mla.cuh`.
    pub(super) struct MlaParams = "fir::MlaParams" {
        ckv: TensorMap,
        kpe: TensorMap,
        q_pe: Address,
        q_pe_token: u64,
        q_pe_head: u64,
        merge_count: Address,
        box_rows: i32,
        pad: i32,
    }
}

/// Rows of a block.
const ROWS: usize = 64;
/// Elements of the two parts.
const DIMS: [usize; 2] = [512, 64];
const THREADS: u32 = 512;
/// Bytes of shared memory, as `MlaConfig` counts them: 5 halves of tiles of 32 KB, 3 of kpe, 3 of Q and 2 of P of 8 KB;
/// factors, states, and 22 barriers.
const SHARED: u32 = 5 * 32768 + 8 * 8192 + 2 * 256 + 512 + 22 * 8;

/// The forms that take `spec` on this device, that for few rows first; and how many of the query heads are one row tile's.
/// `None`: no form here does.
pub(super) fn forms(arch: Arch, shared: u32, spec: &Spec) -> Option<(Vec<Form>, usize)> {
    let types = [spec.q, spec.kv, spec.out];
    let same = types == [DType::BF16; 3] || types == [DType::F16; 3];
    let dims = spec.dim_pe.map(|pe| [spec.dim_qk, pe]);
    if arch != Arch::HOPPER || shared < SHARED || !same || dims != Some(DIMS) || spec.states {
        return None;
    }
    // A pair of blocks reads its positions once. Heads that fit one block go alone, unless there are more tokens of them.
    let most = if spec.group > ROWS { 2 * ROWS } else { ROWS };
    let group = (1..=most).rev().find(|g| spec.group.is_multiple_of(*g))?;
    let forms = if spec.group > ROWS { vec![Form::Mla(2)] } else { vec![Form::Mla(1), Form::Mla(2)] };
    Some((forms, group))
}

fn source(spec: &Spec, hooks: &Hooks, cluster: u32, kernel: &str) -> Source {
    let (own, common) = (Twin::of::<MlaParams>(), Twin::of::<AttentionParams>());
    let mut params = hooks.twin(&own.cpp, &[("", &own), ("common.", &common)]);
    // The maps are aligned to 64 bytes, and so is what holds them.
    params.size = params.size.next_multiple_of(64);
    let name = format!("fir::{kernel}<fir::MlaConfig<{}, {}, {}, {cluster}>>", cpp(spec.kv), cpp(spec.out), hooks.name);
    Source { file: "attention/sm90_mla.cuh", name, prelude: hooks.text.clone(), params }
}

pub(super) fn instance(spec: &Spec, hooks: &Hooks, cluster: u32) -> Instance {
    let source = source(spec, hooks, cluster, "mla_sm90");
    let rows = ROWS * cluster as usize;
    Instance { form: Form::Mla(cluster), source, threads: THREADS, smem: SHARED, blocks: 1, rows }
}

/// The kernel that merges what an instance of `cluster` blocks has cut, and its launch for so many merges.
pub(super) fn merge(spec: &Spec, hooks: &Hooks, cluster: u32) -> Source {
    source(spec, hooks, cluster, "mla_merge")
}

/// `merges`: none if they are not known, as in a graph, whose blocks take turns then.
pub(super) fn merge_grid(gpu: &Gpu, merges: Option<usize>, cluster: u32) -> Grid {
    let all = gpu.properties().multiprocessors * 8;
    let blocks = merges.map_or(all, |merges| merges as u32 * (ROWS as u32 / 4) * cluster);
    // Four rows to a block, which starts while the last parts are written, and waits for them.
    Grid { early: true, ..Grid::new(blocks, 256) }
}

/// Everything that is compiled ahead.
pub(super) fn kernels(specs: &[Spec]) -> Vec<Source> {
    let (arch, shared) = (Arch::HOPPER, Arch::HOPPER.typical().1);
    let mut all = Vec::new();
    for spec in specs {
        let hooks = Hooks::new(&spec.variant);
        for form in forms(arch, shared, &Spec { group: 1, ..spec.clone() }).map_or(vec![], |f| f.0) {
            if let Form::Mla(cluster) = form {
                all.extend(["mla_sm90", "mla_merge"].map(|kernel| source(spec, &hooks, cluster, kernel)));
            }
        }
    }
    all
}

/// One run's tensors, where they matter for whether and how this kernel takes them.
pub(super) struct Tensors {
    pub(super) q_pe: Rows,
    pub(super) pe_factor: f32,
    pub(super) ckv: KvTensor,
    pub(super) kpe: KvTensor,
    pub(super) pages: u64,
    pub(super) page_size: u32,
}

impl Tensors {
    /// Whether they can be read by boxes: pages of whole groups of 8 rows, rows and starts on 16 bytes. A factor of the second
    /// part would be rounded into the query.
    pub(super) fn fit(&self) -> bool {
        let q_pe = [self.q_pe.start.0, self.q_pe.token, self.q_pe.head].iter().all(|x| x % 16 == 0);
        let far = |t: &KvTensor| t.page.max(8 * t.row) < 1 << 40;
        let pool = self.kpe.is_multiple_of(16) && far(&self.ckv) && far(&self.kpe) && self.pages > 0;
        q_pe && pool && self.page_size.is_multiple_of(8) && self.pe_factor == 1.0
    }

    /// The kernel's own parameters.
    pub(super) fn params(&self, gpu: &Gpu, dtype: DType, merge_count: Address) -> Result<MlaParams> {
        // Of 8, 16 or 32 rows, as they divide a page; a block of a pair asks for 32 of a tile.
        let rows = 1 << self.page_size.trailing_zeros().min(5);
        let groups = u64::from(self.page_size / 8);
        let (pages, ckv, kpe) = (self.pages, &self.ckv, &self.kpe);
        let ckv = Boxes {
            start: ckv.data.0,
            dtype,
            dims: &[64, 8, 8, groups, pages],
            strides: &[ckv.row, 128, 8 * ckv.row, ckv.page],
            shape: &[64, 8, 4, rows / 8, 1],
            in_order: false,
        };
        let kpe = Boxes {
            start: kpe.data.0,
            dtype,
            dims: &[64, 8, groups, pages],
            strides: &[kpe.row, 8 * kpe.row, kpe.page],
            shape: &[64, 8, rows / 8, 1],
            in_order: false,
        };
        Ok(MlaParams {
            ckv: gpu.tensor_map(&ckv)?,
            kpe: gpu.tensor_map(&kpe)?,
            q_pe: self.q_pe.start,
            q_pe_token: self.q_pe.token,
            q_pe_head: self.q_pe.head,
            merge_count,
            box_rows: rows as i32,
            pad: 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::variant::standard;

    #[test]
    fn heads_are_cut_into_equal_row_tiles() {
        let spec = |group, kv| Spec {
            op: "test",
            many: false,
            q: DType::BF16,
            kv,
            out: DType::BF16,
            dim_qk: 512,
            dim_vo: 512,
            dim_pe: Some(64),
            group,
            states: false,
            variant: standard(),
        };
        let (one, two) = (Form::Mla(1), Form::Mla(2));
        let of = |group| forms(Arch::HOPPER, 232_448, &spec(group, DType::BF16)).unwrap();
        assert_eq!(of(16), (vec![one, two], 16));
        assert_eq!(of(64), (vec![one, two], 64));
        assert_eq!(of(128), (vec![two], 128));
        assert_eq!(of(160), (vec![two], 80));
        assert_eq!(of(256), (vec![two], 128));
        assert_eq!(of(131), (vec![two], 1));
        let none = [
            forms(Arch::HOPPER, 232_448, &spec(128, DType::E4M3)),
            forms(Arch::HOPPER, 99_000, &spec(128, DType::BF16)),
            forms(Arch::of(10, 0), 232_448, &spec(128, DType::BF16)),
        ];
        assert!(none.iter().all(Option::is_none));
    }
}
