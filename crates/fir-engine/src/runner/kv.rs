//! [`KvCache`]: the pages of all layers.

use bytemuck::cast_slice;
use fir::kv::{KvLayout as Nhd, PagedKv, PagedKvMut, PagedMla, PagedMlaMut};
use fir::tensor::{E2m1x2, E4m3, E5m2};
use fir::{DType, Tensor};
use half::{bf16, f16};

use crate::error::{Error, Result};
use crate::models::{KvLayout, Model};

/// Element type of cached keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum KvType {
    /// 32 bits.
    F32,
    /// 16 bits, with f16's precision.
    F16,
    /// 16 bits, with f32's range.
    #[default]
    Bf16,
    /// 8 bits with three of mantissa; saturates at 448.
    E4m3,
    /// 8 bits with two of mantissa.
    E5m2,
    /// 4 bits with a scale per 16.
    Nvfp4,
}

impl KvType {
    pub(crate) fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::F16 => DType::F16,
            Self::Bf16 => DType::BF16,
            Self::E4m3 => DType::E4M3,
            Self::E5m2 => DType::E5M2,
            Self::Nvfp4 => DType::E2M1x2,
        }
    }
}

impl std::fmt::Display for KvType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::E4m3 => "e4m3",
            Self::E5m2 => "e5m2",
            Self::Nvfp4 => "nvfp4",
        })
    }
}

impl std::str::FromStr for KvType {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        Ok(match s {
            "f32" => Self::F32,
            "f16" => Self::F16,
            "bf16" => Self::Bf16,
            "e4m3" | "fp8" => Self::E4m3,
            "e5m2" => Self::E5m2,
            "nvfp4" | "fp4" => Self::Nvfp4,
            _ => return Err(Error::Config(format!("KV type {s:?}, expected f32, f16, bf16, e4m3, e5m2 or nvfp4"))),
        })
    }
}

/// The KV pool of all layers: allocated once.
pub struct KvCache {
    layout: KvLayout,
    kv_type: KvType,
    pages: usize,
    page_size: usize,
    /// Per layer: keys and values (or the latent vector and its rotary part), and for NVFP4 their scales.
    layers: Vec<Vec<Tensor>>,
}

impl KvCache {
    /// `pages` pages of `page_size` tokens for every layer of `model`.
    pub fn new(model: &Model, pages: usize, page_size: usize, kv_type: KvType) -> Result<Self> {
        let layout = model.kv_layout();
        if page_size == 0 || pages > i32::MAX as usize / page_size.max(1) {
            return Err(Error::Config(format!(
                "{pages} pages of {page_size} tokens: 1 to 2^31 - 1 tokens are possible"
            )));
        }
        let shapes = shapes(layout, kv_type)?;
        let layer = || {
            let tensors = shapes.iter().map(|(dtype, per_token)| {
                let shape: Vec<usize> = [pages, page_size].iter().chain(per_token).copied().collect();
                Tensor::zeros(*dtype, &shape)
            });
            tensors.collect::<fir::Result<Vec<_>>>()
        };
        let layers = (0..model.config().layers).map(|_| layer()).collect::<fir::Result<Vec<_>>>()?;
        Ok(Self { layout, kv_type, pages, page_size, layers })
    }

    /// Bytes of a page in all layers of `model` together.
    pub fn page_bytes_for(model: &Model, page_size: usize, kv_type: KvType) -> Result<usize> {
        let each = shapes(model.kv_layout(), kv_type)?
            .iter()
            .map(|(dtype, per_token)| dtype.size() * per_token.iter().product::<usize>())
            .sum::<usize>();
        Ok(each * page_size * model.config().layers)
    }

    /// Bytes of a page in all layers together: what [`Self::read_page`] and [`Self::write_page`] take.
    pub fn page_bytes(&self) -> usize {
        self.layers.iter().flatten().map(|t| bytes(t).len() / self.pages.max(1)).sum()
    }

    /// Pages of the pool.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Tokens per page.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// Type of its elements.
    pub fn kv_type(&self) -> KvType {
        self.kv_type
    }

    fn check(&self, page: u32) -> Result<usize> {
        let at = page as usize;
        if at < self.pages {
            return Ok(at);
        }
        Err(Error::Config(format!("page {page} of a pool of {}", self.pages)))
    }

    /// Copies the first `tokens` tokens of a page to another, in all layers.
    pub fn copy_page(&mut self, from: u32, to: u32, tokens: usize) -> Result<()> {
        let (from, to) = (self.check(from)?, self.check(to)?);
        if tokens > self.page_size {
            return Err(Error::Config(format!("{tokens} tokens of a page of {}", self.page_size)));
        }
        let (pages, page_size) = (self.pages, self.page_size);
        for t in self.layers.iter_mut().flatten() {
            let all = bytes_mut(t);
            let page = all.len() / pages;
            all.copy_within(from * page..from * page + page / page_size * tokens, to * page);
        }
        Ok(())
    }

    /// Copies a page of all layers to `to`, which has [`Self::page_bytes`].
    pub fn read_page(&self, page: u32, to: &mut [u8]) -> Result<()> {
        let page = self.check(page)?;
        self.check_len(to.len())?;
        let mut at = 0;
        for t in self.layers.iter().flatten() {
            let each = bytes(t).len() / self.pages;
            to[at..at + each].copy_from_slice(&bytes(t)[page * each..(page + 1) * each]);
            at += each;
        }
        Ok(())
    }

    /// Fills a page of all layers with what [`Self::read_page`] gave.
    pub fn write_page(&mut self, page: u32, from: &[u8]) -> Result<()> {
        let page = self.check(page)?;
        self.check_len(from.len())?;
        let (mut at, pages) = (0, self.pages);
        for t in self.layers.iter_mut().flatten() {
            let all = bytes_mut(t);
            let each = all.len() / pages;
            all[page * each..(page + 1) * each].copy_from_slice(&from[at..at + each]);
            at += each;
        }
        Ok(())
    }

    fn check_len(&self, len: usize) -> Result<()> {
        if len == self.page_bytes() {
            return Ok(());
        }
        Err(Error::Config(format!("a page of {len} bytes, expected {}", self.page_bytes())))
    }

    pub(super) fn layout(&self) -> KvLayout {
        self.layout
    }

    pub(super) fn layers(&self) -> usize {
        self.layers.len()
    }

    pub(super) fn heads(&self, layer: usize) -> Result<PagedKv<'_>> {
        Ok(match &self.layers[layer][..] {
            [k, v] => PagedKv::new(k.view(), v.view(), Nhd::Nhd)?,
            [k, v, ks, vs] => PagedKv::nvfp4(k.view(), v.view(), ks.view(), vs.view(), Nhd::Nhd)?,
            _ => return Err(Error::Config("a cache without keys".into())),
        })
    }

    pub(super) fn heads_mut(&mut self, layer: usize) -> Result<PagedKvMut<'_>> {
        Ok(match &mut self.layers[layer][..] {
            [k, v] => PagedKvMut::new(k.view_mut(), v.view_mut(), Nhd::Nhd)?,
            [k, v, ks, vs] => PagedKvMut::nvfp4(k.view_mut(), v.view_mut(), ks.view_mut(), vs.view_mut(), Nhd::Nhd)?,
            _ => return Err(Error::Config("a cache without keys".into())),
        })
    }

    pub(super) fn latent(&self, layer: usize) -> Result<PagedMla<'_>> {
        Ok(PagedMla::new(self.layers[layer][0].view(), self.layers[layer][1].view())?)
    }

    pub(super) fn latent_mut(&mut self, layer: usize) -> Result<PagedMlaMut<'_>> {
        match &mut self.layers[layer][..] {
            [ckv, kpe] => Ok(PagedMlaMut::new(ckv.view_mut(), kpe.view_mut())?),
            _ => Err(Error::Config("a latent cache without scales was expected".into())),
        }
    }
}

impl std::fmt::Debug for KvCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { layout, kv_type, pages, page_size, layers } = self;
        write!(f, "KvCache({} layers, {pages} pages of {page_size}, {layout:?}, {kv_type:?})", layers.len())
    }
}

/// Type and axes per token of a layer's tensors.
fn shapes(layout: KvLayout, kv_type: KvType) -> Result<Vec<(DType, Vec<usize>)>> {
    let dtype = kv_type.dtype();
    Ok(match (layout, kv_type) {
        (KvLayout::Heads { heads, dim }, KvType::Nvfp4) => {
            if !dim.is_multiple_of(16) {
                return Err(Error::Config(format!("NVFP4 with heads of {dim}, expected a multiple of 16")));
            }
            let (data, scales) = ((dtype, vec![heads, dim / 2]), (DType::E4M3, vec![heads, dim / 16]));
            vec![data.clone(), data, scales.clone(), scales]
        }
        (KvLayout::Heads { heads, dim }, _) => vec![(dtype, vec![heads, dim]), (dtype, vec![heads, dim])],
        (KvLayout::Latent { .. }, KvType::Nvfp4) => {
            return Err(Error::Config("NVFP4 with latent attention, expected another KV type".into()));
        }
        (KvLayout::Latent { ckv, kpe }, _) => vec![(dtype, vec![ckv]), (dtype, vec![kpe])],
    })
}

/// The memory of a cache's tensor, whose type is one of [`KvType`]'s.
fn bytes(t: &Tensor) -> &[u8] {
    let b = match t.dtype() {
        DType::F32 => t.as_slice::<f32>().map(cast_slice),
        DType::F16 => t.as_slice::<f16>().map(cast_slice),
        DType::BF16 => t.as_slice::<bf16>().map(cast_slice),
        DType::E4M3 => t.as_slice::<E4m3>().map(cast_slice),
        DType::E5M2 => t.as_slice::<E5m2>().map(cast_slice),
        _ => t.as_slice::<E2m1x2>().map(cast_slice),
    };
    b.unwrap_or(&[])
}

fn bytes_mut(t: &mut Tensor) -> &mut [u8] {
    let b = match t.dtype() {
        DType::F32 => t.as_mut_slice::<f32>().map(bytemuck::cast_slice_mut),
        DType::F16 => t.as_mut_slice::<f16>().map(bytemuck::cast_slice_mut),
        DType::BF16 => t.as_mut_slice::<bf16>().map(bytemuck::cast_slice_mut),
        DType::E4M3 => t.as_mut_slice::<E4m3>().map(bytemuck::cast_slice_mut),
        DType::E5M2 => t.as_mut_slice::<E5m2>().map(bytemuck::cast_slice_mut),
        _ => t.as_mut_slice::<E2m1x2>().map(bytemuck::cast_slice_mut),
    };
    b.unwrap_or_default()
}
