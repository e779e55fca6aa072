//! A model's tensors as its files hold them, memory-mapped: GGUF, or safetensors with a `config.json`.

pub(crate) mod gguf;
mod map;
mod safetensors;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use fir::DType;
use fir::gemm::BlockFormat;
use half::{bf16, f16};

pub(crate) use self::map::{Map, Part};
use crate::error::{Error, Result};

/// How a tensor's elements are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// One of GGUF's block formats.
    Blocks(BlockFormat),
    /// f32, f16 or bf16.
    Dense(DType),
}

impl Kind {
    /// Bytes of `shape`, rows being whole blocks.
    fn bytes(self, shape: &[usize]) -> Option<usize> {
        let n = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d))?;
        match self {
            Self::Dense(dtype) => n.checked_mul(dtype.size()),
            Self::Blocks(format) => {
                let row = shape.last().copied().unwrap_or(1);
                let row_bytes = format.row_bytes("weights", row).ok()?;
                (n / row.max(1)).checked_mul(row_bytes)
            }
        }
    }
}

struct Entry {
    file: usize,
    kind: Kind,
    /// Outermost axis first.
    shape: Vec<usize>,
    range: std::ops::Range<usize>,
}

/// All tensors of a model.
pub(crate) struct Store {
    path: String,
    files: Vec<Arc<Map>>,
    entries: HashMap<String, Entry>,
    /// What stands before `layers.0` in a checkpoint's names; `None` for GGUF.
    prefix: Option<String>,
}

/// One tensor of a [`Store`].
#[derive(Clone)]
pub(crate) struct Stored<'a> {
    pub(crate) name: String,
    pub(crate) kind: Kind,
    pub(crate) shape: &'a [usize],
    pub(crate) data: &'a [u8],
    file: &'a Arc<Map>,
    start: usize,
}

impl<'a> Stored<'a> {
    /// Its bytes, for as long as they are held.
    pub(crate) fn part(&self) -> Part {
        Part::new(self.file.clone(), self.start..self.start + self.data.len())
    }

    /// Matrix `i` of a stack of them.
    pub(crate) fn select(&self, i: usize) -> Self {
        let each = self.data.len() / self.shape[0].max(1);
        let data = &self.data[i * each..(i + 1) * each];
        Self { shape: &self.shape[1..], data, start: self.start + i * each, ..self.clone() }
    }

    /// Every element as f32; refused for block formats.
    pub(crate) fn to_f32(&self) -> Result<Vec<f32>> {
        match self.kind {
            Kind::Dense(dtype) => Ok(widen(dtype, self.data)),
            Kind::Blocks(format) => Err(self.wrong(&format!("{format}: f32, f16 or bf16 expected"))),
        }
    }

    /// An error about this tensor.
    pub(crate) fn wrong(&self, why: &str) -> Error {
        Error::Model { path: self.name.clone(), why: why.to_string() }
    }

    /// Refuses another shape.
    pub(crate) fn expect(&self, shape: &[usize]) -> Result<()> {
        if self.shape == shape {
            return Ok(());
        }
        Err(self.wrong(&format!("has shape {:?}, but the model's configuration wants {shape:?}", self.shape)))
    }
}

/// Elements of f32, f16 or bf16, little-endian as both formats have them, of any alignment.
pub(crate) fn widen(dtype: DType, data: &[u8]) -> Vec<f32> {
    match dtype {
        DType::F16 => data.as_chunks::<2>().0.iter().map(|&b| f16::from_le_bytes(b).to_f32()).collect(),
        DType::BF16 => data.as_chunks::<2>().0.iter().map(|&b| bf16::from_le_bytes(b).to_f32()).collect(),
        _ => data.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect(),
    }
}

impl Store {
    /// Opens a `.gguf` file or a folder of safetensors. The metadata of a GGUF file comes along.
    pub(crate) fn open(path: &Path) -> Result<(Self, Option<gguf::Meta>)> {
        if path.is_dir() {
            return Ok((safetensors::open(path)?, None));
        }
        let (store, meta) = gguf::open(path)?;
        Ok((store, Some(meta)))
    }

    fn new(path: &Path, files: Vec<Arc<Map>>, entries: HashMap<String, Entry>) -> Result<Self> {
        let path = path.display().to_string();
        for (name, e) in &entries {
            let want = e.kind.bytes(&e.shape);
            if want != Some(e.range.len()) || e.range.end > files[e.file].bytes().len() {
                let why = format!(
                    "tensor `{name}` of shape {:?} ({:?}) lies at {:?} of a file of {} bytes: not whole",
                    e.shape,
                    e.kind,
                    e.range,
                    files[e.file].bytes().len()
                );
                return Err(Error::Model { path, why });
            }
        }
        Ok(Self { path, files, entries, prefix: None })
    }

    /// A tensor by the name that the file has for it.
    pub(crate) fn named(&self, name: &str) -> Option<Stored<'_>> {
        let e = self.entries.get(name)?;
        let file = &self.files[e.file];
        let data = &file.bytes()[e.range.clone()];
        Some(Stored { name: name.to_string(), kind: e.kind, shape: &e.shape, data, file, start: e.range.start })
    }

    /// A tensor of the whole model, or of layer `i`, by GGUF's name (`attn_q.weight`).
    pub(crate) fn find(&self, layer: Option<usize>, part: &str) -> Option<Stored<'_>> {
        self.named(&self.name(layer, part)?)
    }

    /// As [`Self::find`], for one that must be there.
    pub(crate) fn get(&self, layer: Option<usize>, part: &str) -> Result<Stored<'_>> {
        self.find(layer, part).ok_or_else(|| {
            let name = self.name(layer, part).unwrap_or_else(|| part.to_string());
            Error::Model { path: self.path.clone(), why: format!("there is no tensor `{name}`") }
        })
    }

    /// The name that this store has for GGUF's `part`.
    pub(crate) fn name(&self, layer: Option<usize>, part: &str) -> Option<String> {
        let Some(prefix) = &self.prefix else {
            return Some(layer.map_or(part.to_string(), |i| format!("blk.{i}.{part}")));
        };
        let (stem, end) = part.rsplit_once('.')?;
        let hf = safetensors::name_of(stem, prefix)?;
        Some(match layer {
            Some(i) => format!("{prefix}layers.{i}.{hf}.{end}"),
            None => format!("{hf}.{end}"),
        })
    }

    /// Whether any tensor is stored in blocks; else the narrowest type of the matrices.
    pub(crate) fn widest_of_matrices(&self) -> Kind {
        let matrices = || self.entries.values().filter(|e| e.shape.len() >= 2).map(|e| e.kind);
        if let Some(blocks) = matrices().find(|k| matches!(k, Kind::Blocks(_))) {
            return blocks;
        }
        let all_f32 = matrices().all(|k| k == Kind::Dense(DType::F32));
        Kind::Dense(if all_f32 { DType::F32 } else { DType::BF16 })
    }

    /// Whether it came from a checkpoint with HF's names and not from a GGUF file.
    pub(crate) fn is_checkpoint(&self) -> bool {
        self.prefix.is_some()
    }
}
