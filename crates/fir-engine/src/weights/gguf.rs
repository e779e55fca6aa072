//! GGUF: one file with metadata, a table of tensors and their data.

use std::collections::HashMap;
use std::path::Path;

use fir::DType;
use fir::gemm::BlockFormat;

use super::{Entry, Kind, Map, Store};
use crate::error::{Error, Result};

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    Int(i64),
    Float(f64),
    Bool(bool),
    Text(String),
    List(Vec<Value>),
}

impl Value {
    pub(crate) fn int(&self) -> Option<i64> {
        match self {
            Self::Int(i) => Some(*i),
            _ => None,
        }
    }

    pub(crate) fn float(&self) -> Option<f64> {
        match self {
            Self::Float(x) => Some(*x),
            Self::Int(i) => Some(*i as f64),
            _ => None,
        }
    }

    pub(crate) fn text(&self) -> Option<&str> {
        match self {
            Self::Text(s) => Some(s),
            _ => None,
        }
    }

    pub(crate) fn list(&self) -> Option<&[Value]> {
        match self {
            Self::List(items) => Some(items),
            _ => None,
        }
    }
}

/// The metadata of a file.
#[derive(Debug)]
pub(crate) struct Meta {
    path: String,
    values: HashMap<String, Value>,
}

impl Meta {
    /// The metadata of a file alone.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        Ok(open(path)?.1)
    }

    pub(crate) fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }

    /// A text that must be there.
    pub(crate) fn text(&self, key: &str) -> Result<&str> {
        self.get(key).and_then(Value::text).ok_or_else(|| self.wrong(key, "a text"))
    }

    /// A whole number that must be there; the largest one if it is a list, as of layers that differ.
    pub(crate) fn number(&self, key: &str) -> Result<usize> {
        self.opt_number(key)?.ok_or_else(|| self.wrong(key, "a number"))
    }

    /// A whole number, if it is there.
    pub(crate) fn opt_number(&self, key: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let most = match value {
            Value::List(items) => items.iter().filter_map(Value::int).max(),
            other => other.int(),
        };
        most.and_then(|n| usize::try_from(n).ok()).map(Some).ok_or_else(|| self.wrong(key, "a number"))
    }

    /// A number with a fraction, if it is there.
    pub(crate) fn opt_float(&self, key: &str) -> Option<f64> {
        self.get(key).and_then(Value::float)
    }

    pub(crate) fn wrong(&self, key: &str, want: &str) -> Error {
        let got = self.get(key).map_or("missing".into(), |v| format!("{v:.60?}"));
        Error::Model { path: self.path.clone(), why: format!("metadata `{key}` is {got}, expected {want}") }
    }
}

/// Reads numbers and texts one after another; every read is checked against the end.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], String> {
        let end = self.at.checked_add(n).filter(|&e| e <= self.bytes.len());
        let end = end.ok_or_else(|| format!("cut off: {n} bytes wanted at {} of {}", self.at, self.bytes.len()))?;
        let part = &self.bytes[self.at..end];
        self.at = end;
        Ok(part)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        Ok(self.take(N)?.try_into().expect("as long as asked for"))
    }

    fn u32(&mut self) -> Result<u32, String> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, String> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A count of things that take at least `each` bytes of what is left.
    fn count(&mut self, each: usize) -> Result<usize, String> {
        let n = self.u64()?;
        let most = (self.bytes.len() - self.at) / each;
        usize::try_from(n).ok().filter(|&n| n <= most).ok_or_else(|| format!("a count of {n} where {most} fit"))
    }

    fn text(&mut self) -> Result<String, String> {
        let n = self.count(1)?;
        Ok(String::from_utf8_lossy(self.take(n)?).into_owned())
    }

    fn value(&mut self, kind: u32, depth: usize) -> Result<Value, String> {
        Ok(match kind {
            0 => Value::Int(self.array::<1>()?[0].into()),
            1 => Value::Int(i8::from_le_bytes(self.array()?).into()),
            2 => Value::Int(u16::from_le_bytes(self.array()?).into()),
            3 => Value::Int(i16::from_le_bytes(self.array()?).into()),
            4 => Value::Int(self.u32()?.into()),
            5 => Value::Int(i32::from_le_bytes(self.array()?).into()),
            6 => Value::Float(f32::from_le_bytes(self.array()?).into()),
            7 => Value::Bool(self.array::<1>()?[0] != 0),
            8 => Value::Text(self.text()?),
            9 if depth < 4 => {
                let kind = self.u32()?;
                let n = self.count(1)?;
                Value::List((0..n).map(|_| self.value(kind, depth + 1)).collect::<Result<_, _>>()?)
            }
            10 => Value::Int(i64::try_from(self.u64()?).map_err(|e| e.to_string())?),
            11 => Value::Int(i64::from_le_bytes(self.array()?)),
            12 => Value::Float(f64::from_le_bytes(self.array()?)),
            other => return Err(format!("a value of type {other}")),
        })
    }
}

/// Maps a file and reads its tables.
pub(super) fn open(path: &Path) -> Result<(Store, Meta)> {
    let map = Map::open(path)?;
    let shown = path.display().to_string();
    let (values, entries) = parse(map.bytes()).map_err(|why| Error::Model { path: shown.clone(), why })?;
    Ok((Store::new(path, vec![map], entries)?, Meta { path: shown, values }))
}

type Tables = (HashMap<String, Value>, HashMap<String, Entry>);

fn parse(bytes: &[u8]) -> Result<Tables, String> {
    let mut r = Reader { bytes, at: 0 };
    let magic: [u8; 4] = r.array()?;
    if &magic != b"GGUF" {
        return Err(format!("starts with {magic:?}, which is not a GGUF file"));
    }
    let version = r.u32()?;
    if !(2..=3).contains(&version) {
        return Err(format!("GGUF version {version}, expected 2 or 3"));
    }
    // A tensor's entry takes 24 bytes and a value 13 at the least.
    let (tensors, count) = (r.count(24)?, r.count(13)?);
    let mut values = HashMap::with_capacity(count);
    for _ in 0..count {
        let key = r.text()?;
        let kind = r.u32()?;
        let value = r.value(kind, 0).map_err(|why| format!("metadata `{key}`: {why}"))?;
        values.insert(key, value);
    }
    let align = match values.get("general.alignment").and_then(Value::int) {
        None => 32,
        Some(n) => usize::try_from(n).ok().filter(|n| n.is_power_of_two()).ok_or(format!("alignment {n}"))?,
    };
    let mut table = Vec::with_capacity(tensors);
    for _ in 0..tensors {
        let name = r.text()?;
        let rank = r.u32()?;
        if rank > 4 {
            return Err(format!("tensor `{name}` has {rank} axes, expected at most 4"));
        }
        // Innermost first in the file.
        let mut shape = (0..rank)
            .map(|_| usize::try_from(r.u64()?).map_err(|e| e.to_string()))
            .collect::<Result<Vec<_>, String>>()?;
        shape.reverse();
        let (kind, offset) = (r.u32()?, r.u64()?);
        table.push((name, shape, kind, offset));
    }
    let data = r.at.next_multiple_of(align);
    let mut entries = HashMap::with_capacity(tensors);
    for (name, shape, kind, offset) in table {
        let kind = kind_of(kind).map_err(|why| format!("tensor `{name}`: {why}"))?;
        let range = kind.bytes(&shape).and_then(|n| {
            let start = data.checked_add(usize::try_from(offset).ok()?)?;
            Some(start..start.checked_add(n)?).filter(|r| r.end <= bytes.len())
        });
        let range = range.ok_or_else(|| format!("tensor `{name}` of shape {shape:?} does not lie in the file"))?;
        entries.insert(name, Entry { file: 0, kind, shape, range });
    }
    Ok((values, entries))
}

fn kind_of(id: u32) -> Result<Kind, String> {
    Ok(match id {
        0 => Kind::Dense(DType::F32),
        1 => Kind::Dense(DType::F16),
        30 => Kind::Dense(DType::BF16),
        _ => Kind::Blocks(BlockFormat::from_gguf(id).map_err(|e| match name_of(id) {
            Some(name) => format!("{name} is not one of the formats that are read: {e}"),
            None => format!("its type is not one that is known: {e}"),
        })?),
    })
}

/// Formats that exist and are not read.
fn name_of(id: u32) -> Option<&'static str> {
    Some(match id {
        9 => "Q8_1",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        40 => "NVFP4",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(out: &mut Vec<u8>, s: &str) {
        out.extend((s.len() as u64).to_le_bytes());
        out.extend(s.as_bytes());
    }

    /// One text in the metadata and one 2 × 3 tensor of f32.
    fn file() -> Vec<u8> {
        let mut f = b"GGUF".to_vec();
        f.extend(3u32.to_le_bytes());
        f.extend(1u64.to_le_bytes());
        f.extend(1u64.to_le_bytes());
        text(&mut f, "general.architecture");
        f.extend(8u32.to_le_bytes());
        text(&mut f, "llama");
        text(&mut f, "w");
        f.extend(2u32.to_le_bytes());
        f.extend(3u64.to_le_bytes());
        f.extend(2u64.to_le_bytes());
        f.extend(0u32.to_le_bytes());
        f.extend(0u64.to_le_bytes());
        f.resize(f.len().next_multiple_of(32) + 24, 1);
        f
    }

    #[test]
    fn a_file_is_read_outermost_axis_first() {
        let (values, entries) = parse(&file()).unwrap();
        assert_eq!(values["general.architecture"], Value::Text("llama".into()));
        assert_eq!(entries["w"].shape, [2, 3]);
        assert_eq!(entries["w"].range.len(), 24);
    }

    #[test]
    fn a_format_that_is_not_read_is_named_with_its_tensor() {
        let mut f = file();
        // The tensor's type stands before its offset, which ends the table.
        let at = f.windows(9).position(|w| w == b"\x01\0\0\0\0\0\0\0w").unwrap() + 9 + 4 + 16;
        f[at..at + 4].copy_from_slice(&16u32.to_le_bytes());
        let said = parse(&f).err().unwrap();
        assert!(said.contains("tensor `w`: IQ2_XXS is not one of the formats that are read"), "{said}");
    }

    #[test]
    fn no_prefix_of_a_file_is_a_file_and_none_panics() {
        let whole = file();
        for n in 0..whole.len() {
            assert!(parse(&whole[..n]).is_err(), "{n} of {} bytes", whole.len());
        }
    }

    #[test]
    fn no_changed_byte_panics() {
        let whole = file();
        for at in 0..whole.len() {
            for with in [0, 1, 0x7f, 0xff] {
                let mut changed = whole.clone();
                changed[at] = with;
                let _ = parse(&changed);
            }
        }
    }
}
