//! Attention as an executor's [`Override`] sees it: the usual softmax, causal, of requests that fill their pages.

use std::sync::LazyLock;

use crate::error::Result;
use crate::exec::{Call, Exec, Override};
use crate::kv::{PageTable, Ragged};
use crate::tensor::{TensorMut, TensorRef};
use crate::variant::{Variant, causal, standard};

/// Where keys and values of a batch are.
pub(super) enum Index<'a> {
    Paged(&'a PageTable<'a>),
    Ragged(&'a Ragged),
}

/// What definitions compute: causal attention; of one query token each, also without a mask.
pub(super) fn is_usual(variant: &Variant, qo: &[i32]) -> bool {
    static USUAL: LazyLock<[Variant; 2]> = LazyLock::new(|| [causal(), standard()]);
    *variant == USUAL[0] || (*variant == USUAL[1] && decodes(qo))
}

fn decodes(qo: &[i32]) -> bool {
    qo.windows(2).all(|w| w[1] - w[0] == 1)
}

/// Asks `over`, of calls of `exec`; `ops` are its names for decodes and for anything else, `tensors` what is read of queries and cache.
pub(super) fn ask<'a>(
    (exec, over): (&Exec, &dyn Override),
    ops: [&'static str; 2],
    tensors: &[(&'static str, TensorRef<'a>)],
    (qo, index): (&'a [i32], Index<'a>),
    sm_scale: f32,
    (out, lse): (TensorMut<'a>, Option<TensorMut<'a>>),
) -> Result<bool> {
    let ints = |x: &'a [i32]| TensorRef::new(x, &[x.len()]);
    let op = ops[usize::from(!decodes(qo) || matches!(index, Index::Ragged(_)))];
    let last: Vec<i32>;
    let mut inputs: Vec<(&'static str, TensorRef<'_>)> = tensors.to_vec();
    if op == ops[1] {
        inputs.push(("qo_indptr", ints(qo)?));
    }
    match index {
        Index::Ragged(kv) => inputs.push(("kv_indptr", ints(kv.indptr())?)),
        Index::Paged(table) => {
            let (indptr, page) = (table.indptr(), table.page_size() as u32);
            let full = |(w, n): (&[i32], &u32)| (w[1] - w[0]) as u32 == n.div_ceil(page);
            let indices = table.indices().get(..indptr[indptr.len() - 1] as usize);
            // Ids that only a device knows, or slots to spare, which no definition has a word for.
            let Some(indices) = indices.filter(|_| indptr.windows(2).zip(table.lens()).all(full)) else {
                return Ok(false);
            };
            last = table.lens().iter().map(|&n| n.checked_sub(1).map_or(0, |n| n % page + 1) as i32).collect();
            inputs.extend([("kv_indptr", ints(indptr)?), ("kv_indices", ints(indices)?)]);
            inputs.push(("kv_last_page_len", TensorRef::new(&last, &[last.len()])?));
        }
    }
    let mut outputs: Vec<_> = [("output", out)].into_iter().chain(lse.map(|lse| ("lse", lse))).collect();
    let (place, stream) = exec.queue();
    over.call(Call { place, stream, op, inputs: &inputs, numbers: &[("sm_scale", sm_scale)], outputs: &mut outputs })
}
