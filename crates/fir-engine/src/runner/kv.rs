//! [`KvCache`]: the pages of all layers.

use bytemuck::{cast_slice, cast_slice_mut};
use fir::kv::{KvLayout as Nhd, PagedKv, PagedKvMut, PagedMla, PagedMlaMut};
use fir::tensor::{E2m1x2, E4m3, E5m2};
use fir::{DType, TensorMut, TensorRef};
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
    layers: Vec<Vec<Block>>,
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
                Block::zeros(*dtype, [pages, page_size].iter().chain(per_token).copied().collect())
            });
            tensors.collect::<Result<Vec<_>>>()
        };
        let layers = (0..model.config().layers).map(|_| layer()).collect::<Result<Vec<_>>>()?;
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
        self.layers.iter().flatten().map(|b| b.bytes / self.pages.max(1)).sum()
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
        for block in self.layers.iter_mut().flatten() {
            let all = block.bytes_mut();
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
        for block in self.layers.iter().flatten() {
            let each = block.bytes / self.pages;
            to[at..at + each].copy_from_slice(&block.bytes()[page * each..(page + 1) * each]);
            at += each;
        }
        Ok(())
    }

    /// Fills a page of all layers with what [`Self::read_page`] gave.
    pub fn write_page(&mut self, page: u32, from: &[u8]) -> Result<()> {
        let page = self.check(page)?;
        self.check_len(from.len())?;
        let (mut at, pages) = (0, self.pages);
        for block in self.layers.iter_mut().flatten() {
            let all = block.bytes_mut();
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
            [k, v] => PagedKv::new(k.view()?, v.view()?, Nhd::Nhd)?,
            [k, v, ks, vs] => PagedKv::nvfp4(k.view()?, v.view()?, ks.view()?, vs.view()?, Nhd::Nhd)?,
            _ => return Err(Error::Config("a cache without keys".into())),
        })
    }

    pub(super) fn heads_mut(&mut self, layer: usize) -> Result<PagedKvMut<'_>> {
        Ok(match &mut self.layers[layer][..] {
            [k, v] => PagedKvMut::new(k.view_mut()?, v.view_mut()?, Nhd::Nhd)?,
            [k, v, ks, vs] => {
                PagedKvMut::nvfp4(k.view_mut()?, v.view_mut()?, ks.view_mut()?, vs.view_mut()?, Nhd::Nhd)?
            }
            _ => return Err(Error::Config("a cache without keys".into())),
        })
    }

    pub(super) fn latent(&self, layer: usize) -> Result<PagedMla<'_>> {
        Ok(PagedMla::new(self.layers[layer][0].view()?, self.layers[layer][1].view()?)?)
    }

    pub(super) fn latent_mut(&mut self, layer: usize) -> Result<PagedMlaMut<'_>> {
        match &mut self.layers[layer][..] {
            [ckv, kpe] => Ok(PagedMlaMut::new(ckv.view_mut()?, kpe.view_mut()?)?),
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

/// A layer's keys or values. The system gives memory of zeros when it is first written: a pool of half the machine is there
/// at once, where writing zeros to it would take seconds, and what no sequence has used is nobody's yet.
struct Block {
    words: Vec<u32>,
    /// Where it begins: at a line of the cache, as rows are read by whole ones.
    from: usize,
    bytes: usize,
    dtype: DType,
    shape: Vec<usize>,
}

/// Bytes of a line of the CPU's cache.
const LINE: usize = 64;

impl Block {
    fn zeros(dtype: DType, shape: Vec<usize>) -> Result<Self> {
        let too_much =
            || Error::Config(format!("a KV pool of {shape:?} {dtype} in each layer: there is no memory for it"));
        let bytes = shape.iter().try_fold(dtype.size(), |n, &d| n.checked_mul(d)).ok_or_else(too_much)?;
        let words = bytes.div_ceil(4) + LINE / 4;
        // `vec!` ends the process where this is an error.
        Vec::<u32>::new().try_reserve_exact(words).map_err(|_| too_much())?;
        let words = vec![0; words];
        let from = words.as_ptr().align_offset(LINE);
        Ok(Self { from: if from < LINE / 4 { from } else { 0 }, words, bytes, dtype, shape })
    }

    fn bytes(&self) -> &[u8] {
        &cast_slice(&self.words[self.from..])[..self.bytes]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut cast_slice_mut(&mut self.words[self.from..])[..self.bytes]
    }

    fn view(&self) -> Result<TensorRef<'_>> {
        let (bytes, shape) = (self.bytes(), &self.shape[..]);
        Ok(match self.dtype {
            DType::F32 => TensorRef::new::<f32>(cast_slice(bytes), shape),
            DType::F16 => TensorRef::new::<f16>(cast_slice(bytes), shape),
            DType::BF16 => TensorRef::new::<bf16>(cast_slice(bytes), shape),
            DType::E4M3 => TensorRef::new::<E4m3>(cast_slice(bytes), shape),
            DType::E5M2 => TensorRef::new::<E5m2>(cast_slice(bytes), shape),
            _ => TensorRef::new::<E2m1x2>(cast_slice(bytes), shape),
        }?)
    }

    fn view_mut(&mut self) -> Result<TensorMut<'_>> {
        let (dtype, shape) = (self.dtype, &self.shape[..]);
        let bytes: &mut [u8] = &mut cast_slice_mut(&mut self.words[self.from..])[..self.bytes];
        Ok(match dtype {
            DType::F32 => TensorMut::new::<f32>(cast_slice_mut(bytes), shape),
            DType::F16 => TensorMut::new::<f16>(cast_slice_mut(bytes), shape),
            DType::BF16 => TensorMut::new::<bf16>(cast_slice_mut(bytes), shape),
            DType::E4M3 => TensorMut::new::<E4m3>(cast_slice_mut(bytes), shape),
            DType::E5M2 => TensorMut::new::<E5m2>(cast_slice_mut(bytes), shape),
            _ => TensorMut::new::<E2m1x2>(cast_slice_mut(bytes), shape),
        }?)
    }
}
