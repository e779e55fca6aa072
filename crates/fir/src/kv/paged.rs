//! [`PagedKv`]: the pool of pages, in any layout; [`PagedMla`]: that of latent attention.

use crate::error::{Error, Result};
use crate::tensor::{DType, Dims, TensorMut, TensorRef};

/// Order of the axes of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvLayout {
    /// `[page, token, head, dim]`
    Nhd,
    /// `[page, head, token, dim]`
    Hnd,
}

/// Keys and values as the kernels see them: `[pages, page_size, kv_heads, dim]` each, under any strides whose last
/// is 1, with what turns their bytes into numbers.
#[derive(Clone, Copy, Debug)]
pub struct KvPool<'a> {
    pub(crate) k: TensorRef<'a>,
    pub(crate) v: TensorRef<'a>,
    /// NVFP4's scales, e4m3, one per 16 elements: `[pages, page_size, kv_heads, dim / 16]`.
    pub(crate) block_scales: Option<[TensorRef<'a>; 2]>,
    pub(crate) k_scale: f32,
    pub(crate) v_scale: f32,
}

/// Number of elements that share a scale in NVFP4.
pub(crate) const NVFP4_BLOCK: usize = 16;

impl<'a> KvPool<'a> {
    /// From tensors in NHD order.
    pub(super) fn new(op: &'static str, k: TensorRef<'a>, v: TensorRef<'a>) -> Result<Self> {
        let pool = Self { k, v, block_scales: None, k_scale: 1.0, v_scale: 1.0 };
        Dims::of(op).bind("k", &k, &["pages", "page_size", "kv_heads", "head_dim_qk"])?.bind(
            "v",
            &v,
            &["pages", "page_size", "kv_heads", "head_dim_vo"],
        )?;
        for (arg, t) in [("k", &k), ("v", &v)] {
            if !matches!(t.dtype(), DType::F32 | DType::F16 | DType::BF16 | DType::E4M3 | DType::E5M2 | DType::E2M1x2) {
                return Err(Error::DType {
                    op,
                    arg,
                    got: t.dtype().name(),
                    want: "f32, f16, bf16, e4m3, e5m2 or e2m1x2".into(),
                });
            }
            check_last_axis(op, arg, t)?;
        }
        if k.dtype() != v.dtype() {
            return Err(Error::DType { op, arg: "v", got: v.dtype().name(), want: format!("{} as `k`", k.dtype()) });
        }
        Ok(pool)
    }

    pub(super) fn scaled(mut self, op: &'static str, k_scale: f32, v_scale: f32) -> Result<Self> {
        check_scale(op, "k_scale", k_scale)?;
        check_scale(op, "v_scale", v_scale)?;
        (self.k_scale, self.v_scale) = (k_scale, v_scale);
        Ok(self)
    }

    /// Number of pages.
    pub fn num_pages(&self) -> usize {
        self.k.shape()[0]
    }

    /// Tokens per page.
    pub fn page_size(&self) -> usize {
        self.k.shape()[1]
    }

    /// Heads of keys and values.
    pub fn kv_heads(&self) -> usize {
        self.k.shape()[2]
    }

    /// Elements of a key.
    pub fn head_dim_qk(&self) -> usize {
        self.k.shape()[3].saturating_mul(values_per_element(self.dtype()))
    }

    /// Elements of a value.
    pub fn head_dim_vo(&self) -> usize {
        self.v.shape()[3].saturating_mul(values_per_element(self.dtype()))
    }

    /// Element type; `E2M1x2` stands for NVFP4.
    pub fn dtype(&self) -> DType {
        self.k.dtype()
    }
}

pub(crate) fn values_per_element(dtype: DType) -> usize {
    if dtype == DType::E2M1x2 { 2 } else { 1 }
}

pub(crate) fn check_scale(op: &'static str, arg: &'static str, scale: f32) -> Result<()> {
    if scale.is_finite() && scale > 0.0 { Ok(()) } else { Err(Error::value(op, arg, scale, "a finite number above 0")) }
}

fn check_last_axis(op: &'static str, arg: &'static str, t: &TensorRef<'_>) -> Result<()> {
    let (dim, stride) = (t.shape()[t.shape().len() - 1], t.strides()[t.shape().len() - 1]);
    if dim > 1 && stride != 1 {
        return Err(Error::layout(op, arg, format!("stride {stride} of the last axis"), "1"));
    }
    Ok(())
}

fn nhd<'a>(op: &'static str, arg: &'static str, t: TensorRef<'a>, layout: KvLayout) -> Result<TensorRef<'a>> {
    if t.shape().len() != 4 {
        let axes = match layout {
            KvLayout::Nhd => "[pages, page_size, kv_heads, head_dim]",
            KvLayout::Hnd => "[pages, kv_heads, page_size, head_dim]",
        };
        return Err(Error::Rank { op, arg, got: t.shape().len(), want: 4, axes: axes.into() });
    }
    match layout {
        KvLayout::Nhd => Ok(t),
        KvLayout::Hnd => t.transpose(1, 2),
    }
}

/// A pool of pages with keys and values, borrowed.
#[derive(Clone, Copy, Debug)]
pub struct PagedKv<'a>(KvPool<'a>);

const OP: &str = "PagedKv";

impl<'a> PagedKv<'a> {
    /// Keys and values in a tensor each.
    ///
    /// * `k`: `[pages, page_size, kv_heads, head_dim_qk]` (NHD) or `[pages, kv_heads, page_size, head_dim_qk]` (HND)
    /// * `v`: as `k`, with `head_dim_vo`; strides of its own
    ///
    /// f32, f16, bf16, e4m3 or e5m2; for NVFP4 see [`Self::nvfp4`]. Any strides, the last 1.
    pub fn new(k: TensorRef<'a>, v: TensorRef<'a>, layout: KvLayout) -> Result<Self> {
        let pool = KvPool::new(OP, nhd(OP, "k", k, layout)?, nhd(OP, "v", v, layout)?)?;
        if pool.dtype() == DType::E2M1x2 {
            return Err(Error::DType {
                op: OP,
                arg: "k",
                got: "e2m1x2",
                want: "a type without block scales (see `nvfp4`)".into(),
            });
        }
        Ok(Self(pool))
    }

    /// Keys and values in one tensor `[pages, 2, …]`, the rest as in [`Self::new`].
    pub fn interleaved(kv: TensorRef<'a>, layout: KvLayout) -> Result<Self> {
        if kv.shape().len() != 5 || kv.shape()[1] != 2 {
            return Err(Error::layout(
                OP,
                "kv",
                format!("shape {:?}", kv.shape()),
                "[pages, 2, page_size, kv_heads, head_dim] or its HND form",
            ));
        }
        Self::new(kv.select(1, 0)?, kv.select(1, 1)?, layout)
    }

    /// NVFP4: packed e2m1 in `k` and `v` (`E2M1x2`, last axis `head_dim / 2`), an e4m3 scale per 16 elements in
    /// `k_block_scales` and `v_block_scales` (last axis `head_dim / 16`), and a scale each for all:
    /// `value = e2m1 * block_scale * scale`.
    pub fn nvfp4(
        k: TensorRef<'a>,
        v: TensorRef<'a>,
        k_block_scales: TensorRef<'a>,
        v_block_scales: TensorRef<'a>,
        layout: KvLayout,
    ) -> Result<Self> {
        let mut pool = KvPool::new(OP, nhd(OP, "k", k, layout)?, nhd(OP, "v", v, layout)?)?;
        if pool.dtype() != DType::E2M1x2 {
            return Err(Error::DType { op: OP, arg: "k", got: pool.dtype().name(), want: "e2m1x2".into() });
        }
        let scales =
            [nhd(OP, "k_block_scales", k_block_scales, layout)?, nhd(OP, "v_block_scales", v_block_scales, layout)?];
        for (arg, data, s) in [("k_block_scales", &pool.k, &scales[0]), ("v_block_scales", &pool.v, &scales[1])] {
            if s.dtype() != DType::E4M3 {
                return Err(Error::DType { op: OP, arg, got: s.dtype().name(), want: "e4m3".into() });
            }
            check_last_axis(OP, arg, s)?;
            let mut want = [0; 4];
            want.copy_from_slice(data.shape());
            want[3] /= NVFP4_BLOCK / 2;
            if !data.shape()[3].is_multiple_of(NVFP4_BLOCK / 2) || s.shape() != want {
                return Err(Error::layout(
                    OP,
                    arg,
                    format!("shape {:?}", s.shape()),
                    format!("{want:?}: one per 16 elements of {:?} pairs", data.shape()),
                ));
            }
        }
        pool.block_scales = Some(scales);
        Ok(Self(pool))
    }

    /// With a scale for all keys and one for all values: `value = stored * scale`.
    pub fn with_scales(self, k_scale: f32, v_scale: f32) -> Result<Self> {
        self.0.scaled(OP, k_scale, v_scale).map(Self)
    }

    /// The memory.
    pub fn pool(&self) -> &KvPool<'a> {
        &self.0
    }
}

/// A pool of pages with keys and values, for writing: what an append writes to.
#[derive(Debug)]
pub struct PagedKvMut<'a> {
    pub(crate) k: TensorMut<'a>,
    pub(crate) v: TensorMut<'a>,
    pub(crate) block_scales: Option<[TensorMut<'a>; 2]>,
    pub(crate) k_scale: f32,
    pub(crate) v_scale: f32,
}

impl<'a> PagedKvMut<'a> {
    /// As [`PagedKv::new`].
    pub fn new(k: TensorMut<'a>, v: TensorMut<'a>, layout: KvLayout) -> Result<Self> {
        PagedKv::new(k.as_ref(), v.as_ref(), layout)?;
        Ok(Self { k: nhd_mut(k, layout)?, v: nhd_mut(v, layout)?, block_scales: None, k_scale: 1.0, v_scale: 1.0 })
    }

    /// As [`PagedKv::nvfp4`].
    pub fn nvfp4(
        k: TensorMut<'a>,
        v: TensorMut<'a>,
        k_block_scales: TensorMut<'a>,
        v_block_scales: TensorMut<'a>,
        layout: KvLayout,
    ) -> Result<Self> {
        PagedKv::nvfp4(k.as_ref(), v.as_ref(), k_block_scales.as_ref(), v_block_scales.as_ref(), layout)?;
        let scales = [nhd_mut(k_block_scales, layout)?, nhd_mut(v_block_scales, layout)?];
        Ok(Self {
            k: nhd_mut(k, layout)?,
            v: nhd_mut(v, layout)?,
            block_scales: Some(scales),
            k_scale: 1.0,
            v_scale: 1.0,
        })
    }

    /// As [`PagedKv::with_scales`]: what is appended is divided by the scale.
    pub fn with_scales(self, k_scale: f32, v_scale: f32) -> Result<Self> {
        check_scale(OP, "k_scale", k_scale)?;
        check_scale(OP, "v_scale", v_scale)?;
        Ok(Self { k_scale, v_scale, ..self })
    }
}

fn nhd_mut(t: TensorMut<'_>, layout: KvLayout) -> Result<TensorMut<'_>> {
    match layout {
        KvLayout::Nhd => Ok(t),
        KvLayout::Hnd => t.transpose(1, 2),
    }
}

/// The cache of latent attention: a compressed vector and a rotary part per token, shared by all heads.
#[derive(Clone, Copy, Debug)]
pub struct PagedMla<'a> {
    pub(crate) ckv: TensorRef<'a>,
    pub(crate) kpe: TensorRef<'a>,
    pub(crate) ckv_scale: f32,
    pub(crate) kpe_scale: f32,
}

const MLA: &str = "PagedMla";

impl<'a> PagedMla<'a> {
    /// * `ckv`: `[pages, page_size, head_dim_ckv]`
    /// * `kpe`: `[pages, page_size, head_dim_kpe]`; its last axis may be 0
    ///
    /// f32, f16, bf16, e4m3 or e5m2, the two alike. Any strides, the last 1.
    pub fn new(ckv: TensorRef<'a>, kpe: TensorRef<'a>) -> Result<Self> {
        Dims::of(MLA).bind("ckv", &ckv, &["pages", "page_size", "head_dim_ckv"])?.bind(
            "kpe",
            &kpe,
            &["pages", "page_size", "head_dim_kpe"],
        )?;
        for (arg, t) in [("ckv", &ckv), ("kpe", &kpe)] {
            if !matches!(t.dtype(), DType::F32 | DType::F16 | DType::BF16 | DType::E4M3 | DType::E5M2) {
                return Err(Error::DType {
                    op: MLA,
                    arg,
                    got: t.dtype().name(),
                    want: "f32, f16, bf16, e4m3 or e5m2".into(),
                });
            }
            check_last_axis(MLA, arg, t)?;
        }
        if ckv.dtype() != kpe.dtype() {
            return Err(Error::DType {
                op: MLA,
                arg: "kpe",
                got: kpe.dtype().name(),
                want: format!("{} as `ckv`", ckv.dtype()),
            });
        }
        Ok(Self { ckv, kpe, ckv_scale: 1.0, kpe_scale: 1.0 })
    }

    /// With a scale for each part: `value = stored * scale`.
    pub fn with_scales(self, ckv_scale: f32, kpe_scale: f32) -> Result<Self> {
        check_scale(MLA, "ckv_scale", ckv_scale)?;
        check_scale(MLA, "kpe_scale", kpe_scale)?;
        Ok(Self { ckv_scale, kpe_scale, ..self })
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.ckv.dtype()
    }
}

/// The cache of latent attention, for writing.
#[derive(Debug)]
pub struct PagedMlaMut<'a> {
    pub(crate) ckv: TensorMut<'a>,
    pub(crate) kpe: TensorMut<'a>,
    pub(crate) ckv_scale: f32,
    pub(crate) kpe_scale: f32,
}

impl<'a> PagedMlaMut<'a> {
    /// As [`PagedMla::new`].
    pub fn new(ckv: TensorMut<'a>, kpe: TensorMut<'a>) -> Result<Self> {
        PagedMla::new(ckv.as_ref(), kpe.as_ref())?;
        Ok(Self { ckv, kpe, ckv_scale: 1.0, kpe_scale: 1.0 })
    }

    /// As [`PagedMla::with_scales`]: what is appended is divided by the scale.
    pub fn with_scales(self, ckv_scale: f32, kpe_scale: f32) -> Result<Self> {
        check_scale(MLA, "ckv_scale", ckv_scale)?;
        check_scale(MLA, "kpe_scale", kpe_scale)?;
        Ok(Self { ckv_scale, kpe_scale, ..self })
    }
}
