//! [`Override`]: what is asked before an operator runs.

use std::fmt::Debug;

use crate::error::Result;
use crate::tensor::{Place, TensorMut, TensorRef};

/// A call of an operator whose arguments were checked, in the words of FlashInfer-Trace's definitions.
///
/// | `op` | inputs, then numbers | outputs |
/// |---|---|---|
/// | `rmsnorm` | `hidden_states`, `weight`; `eps` | `output` |
/// | `fused_add_rmsnorm` | `weight`; `eps` | `hidden_states`, `residual`: also inputs, written in place |
/// | `gemm` | `A`, `B` | `C` |
/// | `gqa_paged_decode` | `q`, `k_cache`, `v_cache`, `kv_indptr`, `kv_indices`, `kv_last_page_len`; `sm_scale` | `output`, `lse` if it is wanted |
/// | `gqa_paged_prefill_causal` | the same with `qo_indptr` before `kv_indptr` | the same |
/// | `gqa_ragged_prefill_causal` | `q`, `k`, `v`, `qo_indptr`, `kv_indptr`; `sm_scale` | the same |
/// | `mla_paged_decode`, `mla_paged_prefill_causal` | `q_nope`, `q_pe`, `ckv_cache`, `kpe_cache`, then as `gqa_paged` | the same |
///
/// Index tensors are in host memory, the others where the executor is.
#[derive(Debug)]
#[non_exhaustive]
pub struct Call<'c, 'a> {
    /// Where the executor is.
    pub place: Place,
    /// Handle of the stream that it queues work on; 0 on the CPU.
    pub stream: usize,
    /// What is computed.
    pub op: &'static str,
    /// Tensors that are read.
    pub inputs: &'c [(&'static str, TensorRef<'a>)],
    /// Numbers.
    pub numbers: &'c [(&'static str, f32)],
    /// Tensors that are written.
    pub outputs: &'c mut [(&'static str, TensorMut<'a>)],
}

/// Sees the calls of an executor's operators before they run, and may do them itself: how measured solutions take the place
/// of the library's kernels, and how workloads of a running program are recorded. See [`crate::Exec::with_override`].
pub trait Override: Debug + Send + Sync {
    /// Whether `call` is done. If it is not, the operator runs as usual; nothing may have been written then.
    fn call(&self, call: Call<'_, '_>) -> Result<bool>;
}
