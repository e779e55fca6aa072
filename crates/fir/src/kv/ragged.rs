//! [`Ragged`]: offsets of requests that lie one after another; [`RaggedKv`]: their keys and values.

use super::KvPool;
use crate::error::{Error, Result};
use crate::tensor::{DType, TensorRef};

/// Offsets of a batch of requests over rows: request `r` owns rows `indptr[r]..indptr[r + 1]`. Validated when made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ragged {
    indptr: Vec<i32>,
    lens: Vec<u32>,
}

impl Ragged {
    /// From `[batch + 1]` offsets that start at 0 and do not decrease.
    pub fn new(indptr: &[i32]) -> Result<Self> {
        check_indptr("Ragged", "indptr", indptr)?;
        let lens = indptr.windows(2).map(|w| (w[1] - w[0]) as u32).collect();
        Ok(Self { indptr: indptr.to_vec(), lens })
    }

    /// From the requests' lengths.
    pub fn from_lens(lens: &[u32]) -> Result<Self> {
        let mut indptr = Vec::with_capacity(lens.len() + 1);
        let mut at = 0i32;
        indptr.push(0);
        for (r, &len) in lens.iter().enumerate() {
            at = i32::try_from(len).ok().and_then(|len| at.checked_add(len)).ok_or_else(|| {
                Error::value("Ragged", "lens", format!("over 2^31 rows at request {r}"), "at most 2^31 - 1 in all")
            })?;
            indptr.push(at);
        }
        Ok(Self { indptr, lens: lens.to_vec() })
    }

    /// One row each: a decode batch.
    pub fn ones(batch: usize) -> Result<Self> {
        if batch > i32::MAX as usize {
            return Err(Error::value("Ragged", "batch", batch, "at most 2^31 - 1"));
        }
        Ok(Self { indptr: (0..=batch as i32).collect(), lens: vec![1; batch] })
    }

    /// Number of requests.
    pub fn batch(&self) -> usize {
        self.lens.len()
    }

    /// Rows of all requests.
    pub fn rows(&self) -> usize {
        self.indptr[self.indptr.len() - 1] as usize
    }

    /// Rows of each request.
    pub fn lens(&self) -> &[u32] {
        &self.lens
    }

    /// Offsets, `[batch + 1]`.
    pub fn indptr(&self) -> &[i32] {
        &self.indptr
    }
}

/// Starts at 0 and does not decrease.
pub(super) fn check_indptr(op: &'static str, arg: &'static str, indptr: &[i32]) -> Result<()> {
    match indptr.first() {
        Some(0) => {}
        Some(x) => return Err(Error::value(op, arg, format!("{x} at its start"), "0")),
        None => return Err(Error::value(op, arg, "empty", "batch + 1 offsets")),
    }
    match indptr.windows(2).position(|w| w[0] > w[1]) {
        Some(r) => Err(Error::value(
            op,
            arg,
            format!("{} after {}, decreasing at request {r}", indptr[r + 1], indptr[r]),
            "offsets that do not decrease",
        )),
        None => Ok(()),
    }
}

/// Keys and values of requests that lie one after another.
#[derive(Clone, Copy, Debug)]
pub struct RaggedKv<'a> {
    pool: KvPool<'a>,
    indptr: &'a Ragged,
}

impl<'a> RaggedKv<'a> {
    /// * `k`: `[rows, kv_heads, head_dim_qk]`, `v`: `[rows, kv_heads, head_dim_vo]`, at least `indptr.rows()` rows
    pub fn new(k: TensorRef<'a>, v: TensorRef<'a>, indptr: &'a Ragged) -> Result<Self> {
        const OP: &str = "RaggedKv";
        let three = |arg, t: TensorRef<'a>| {
            if t.shape().len() != 3 {
                return Err(Error::Rank {
                    op: OP,
                    arg,
                    got: t.shape().len(),
                    want: 3,
                    axes: "[rows, kv_heads, head_dim]".into(),
                });
            }
            // One page of all rows.
            t.unsqueeze()
        };
        let pool = KvPool::new(OP, three("k", k)?, three("v", v)?)?;
        if pool.dtype() == DType::E2M1x2 {
            let want = "a type without block scales (NVFP4 is paged)".into();
            return Err(Error::DType { op: OP, arg: "k", got: "e2m1x2", want });
        }
        if indptr.rows() > pool.page_size() {
            return Err(Error::value(
                OP,
                "indptr",
                format!("{} rows", indptr.rows()),
                format!("at most the {} rows of `k`", pool.page_size()),
            ));
        }
        Ok(Self { pool, indptr })
    }

    /// With a scale for all keys and one for all values: `value = stored * scale`.
    pub fn with_scales(self, k_scale: f32, v_scale: f32) -> Result<Self> {
        Ok(Self { pool: self.pool.scaled("RaggedKv", k_scale, v_scale)?, ..self })
    }

    /// The memory.
    pub fn pool(&self) -> &KvPool<'a> {
        &self.pool
    }

    /// Offsets of the requests.
    pub fn indptr(&self) -> &'a Ragged {
        self.indptr
    }
}
