//! The text of the kernels: every file under `kernels/`, in the binary.

/// Files by their path under `kernels/`, which is their name in `#include <fir/…>`.
pub(crate) const FILES: &[(&str, &str)] = &[
    ("activation.cuh", include_str!("../../kernels/activation.cuh")),
    ("attention/decode.cuh", include_str!("../../kernels/attention/decode.cuh")),
    ("attention/finite.cuh", include_str!("../../kernels/attention/finite.cuh")),
    ("attention/levels.cuh", include_str!("../../kernels/attention/levels.cuh")),
    ("attention/merge.cuh", include_str!("../../kernels/attention/merge.cuh")),
    ("attention/number.cuh", include_str!("../../kernels/attention/number.cuh")),
    ("attention/paged_kv.cuh", include_str!("../../kernels/attention/paged_kv.cuh")),
    ("attention/params.cuh", include_str!("../../kernels/attention/params.cuh")),
    ("attention/plain.cuh", include_str!("../../kernels/attention/plain.cuh")),
    ("attention/prefill.cuh", include_str!("../../kernels/attention/prefill.cuh")),
    ("attention/sm90_load.cuh", include_str!("../../kernels/attention/sm90_load.cuh")),
    ("attention/sm90_mla.cuh", include_str!("../../kernels/attention/sm90_mla.cuh")),
    ("attention/sm90_pipe.cuh", include_str!("../../kernels/attention/sm90_pipe.cuh")),
    ("attention/sm90_prefill.cuh", include_str!("../../kernels/attention/sm90_prefill.cuh")),
    ("attention/sm90_sparse.cuh", include_str!("../../kernels/attention/sm90_sparse.cuh")),
    ("attention/sm90_state.cuh", include_str!("../../kernels/attention/sm90_state.cuh")),
    ("attention/softmax.cuh", include_str!("../../kernels/attention/softmax.cuh")),
    ("attention/state.cuh", include_str!("../../kernels/attention/state.cuh")),
    ("attention/text.cuh", include_str!("../../kernels/attention/text.cuh")),
    ("attention/variant.cuh", include_str!("../../kernels/attention/variant.cuh")),
    ("base/cluster.cuh", include_str!("../../kernels/base/cluster.cuh")),
    ("base/cp_async.cuh", include_str!("../../kernels/base/cp_async.cuh")),
    ("base/fp4.cuh", include_str!("../../kernels/base/fp4.cuh")),
    ("base/math.cuh", include_str!("../../kernels/base/math.cuh")),
    ("base/mbarrier.cuh", include_str!("../../kernels/base/mbarrier.cuh")),
    ("base/mma.cuh", include_str!("../../kernels/base/mma.cuh")),
    ("base/reduce.cuh", include_str!("../../kernels/base/reduce.cuh")),
    ("base/tma.cuh", include_str!("../../kernels/base/tma.cuh")),
    ("base/types.cuh", include_str!("../../kernels/base/types.cuh")),
    ("base/vec.cuh", include_str!("../../kernels/base/vec.cuh")),
    ("base/wgmma.cuh", include_str!("../../kernels/base/wgmma.cuh")),
    ("bracket.cuh", include_str!("../../kernels/bracket.cuh")),
    ("gemm.cuh", include_str!("../../kernels/gemm.cuh")),
    ("gemm_any.cuh", include_str!("../../kernels/gemm_any.cuh")),
    ("gemm_blocks.cuh", include_str!("../../kernels/gemm_blocks.cuh")),
    ("gemm_common.cuh", include_str!("../../kernels/gemm_common.cuh")),
    ("lora.cuh", include_str!("../../kernels/lora.cuh")),
    ("modulate.cuh", include_str!("../../kernels/modulate.cuh")),
    ("moe.cuh", include_str!("../../kernels/moe.cuh")),
    ("norm.cuh", include_str!("../../kernels/norm.cuh")),
    ("page.cuh", include_str!("../../kernels/page.cuh")),
    ("philox.cuh", include_str!("../../kernels/philox.cuh")),
    ("put.cuh", include_str!("../../kernels/put.cuh")),
    ("quantize.cuh", include_str!("../../kernels/quantize.cuh")),
    ("rope.cuh", include_str!("../../kernels/rope.cuh")),
    ("rows.cuh", include_str!("../../kernels/rows.cuh")),
    ("sampling.cuh", include_str!("../../kernels/sampling.cuh")),
    ("select.cuh", include_str!("../../kernels/select.cuh")),
    ("sm90_gemm.cuh", include_str!("../../kernels/sm90_gemm.cuh")),
    ("speculative.cuh", include_str!("../../kernels/speculative.cuh")),
    ("tokens.cuh", include_str!("../../kernels/tokens.cuh")),
    ("topk.cuh", include_str!("../../kernels/topk.cuh")),
];

/// `file` and all that it includes, each once, in the order of [`FILES`].
pub(crate) fn with_includes(file: &str) -> Vec<(&'static str, &'static str)> {
    let (mut seen, mut open) = (vec![false; FILES.len()], vec![file]);
    while let Some(name) = open.pop() {
        if let Some(at) = FILES.iter().position(|(n, _)| *n == name)
            && !std::mem::replace(&mut seen[at], true)
        {
            open.extend(includes(FILES[at].1).filter_map(|path| path.strip_prefix("<fir/")?.strip_suffix('>')));
        }
    }
    FILES.iter().zip(seen).filter(|(_, seen)| *seen).map(|(file, _)| *file).collect()
}

/// What follows `#include` in each line that has it.
fn includes(text: &str) -> impl Iterator<Item = &str> {
    text.lines()
        .filter_map(|line| line.trim_start().strip_prefix('#')?.trim_start().strip_prefix("include").map(str::trim))
}

/// FNV-1a of 128 bits. It names cached kernels: two texts of one kernel would have to meet by chance of 1 in 2^128, and
/// a cached file repeats the kernel's name, architecture and compiler, which are compared.
#[derive(Clone, Copy)]
pub(crate) struct Hash(u128);

impl Hash {
    pub(crate) const fn new() -> Self {
        Self(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d)
    }

    /// Takes in `bytes` and their number, so that no two lists of strings read alike.
    pub(crate) fn add(&mut self, bytes: &[u8]) -> &mut Self {
        for &byte in (bytes.len() as u64).to_le_bytes().iter().chain(bytes) {
            self.0 = (self.0 ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
        }
        self
    }

    pub(crate) fn finish(self) -> u128 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_file_is_in_the_table() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
        let (mut on_disk, mut folders) = (Vec::new(), vec![root.clone()]);
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                } else {
                    on_disk.push(path.strip_prefix(&root).unwrap().to_string_lossy().into_owned());
                }
            }
        }
        on_disk.sort();
        assert_eq!(on_disk, FILES.iter().map(|(name, _)| *name).collect::<Vec<_>>());
    }

    #[test]
    fn kernels_include_only_each_other() {
        for (name, text) in FILES {
            for include in includes(text) {
                let inside = include.strip_prefix("<fir/").and_then(|p| p.strip_suffix('>'));
                assert!(inside.is_some_and(|p| FILES.iter().any(|(n, _)| *n == p)), "{name} includes {include}");
            }
        }
    }

    #[test]
    fn hash_is_fnv_1a() {
        // Of no string at all, and of one letter (its length, eight bytes, comes first).
        assert_eq!(Hash::new().finish(), 0x6c62272e07bb014262b821756295c58d);
        let mut by_hand = Hash::new().0;
        for byte in [1u8, 0, 0, 0, 0, 0, 0, 0, b'a'] {
            by_hand = (by_hand ^ u128::from(byte)).wrapping_mul((1 << 88) + 0x13b);
        }
        assert_eq!(Hash::new().add(b"a").finish(), by_hand);
        assert_ne!(Hash::new().add(b"ab").add(b"c").finish(), Hash::new().add(b"a").add(b"bc").finish());
    }
}
