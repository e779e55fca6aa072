//! [`Hooks`]: a variant as the kernels take it: the text of its hooks, and its parameters at the end of theirs.

use super::super::call::Call;
use super::super::params::{Address, Kind, Twin};
use crate::error::Result;
use crate::tensor::TensorRef;
use crate::variant::{Bound, ParamType, Value, Variant, cuda_source};

/// A variant's C++ struct and how its parameters are laid out.
#[derive(Clone, Debug)]
pub(super) struct Hooks {
    pub(super) name: String,
    pub(super) text: String,
    /// Name, offset and kind.
    fields: Vec<(String, usize, Kind)>,
    size: usize,
}

impl Hooks {
    pub(super) fn new(variant: &Variant) -> Self {
        let (mut fields, mut size) = (Vec::new(), 0usize);
        for (name, ty) in variant.params() {
            let parts: &[(&str, Kind)] = match ty {
                ParamType::F32 => &[("", Kind::F32)],
                ParamType::I32 => &[("", Kind::I32)],
                ParamType::F32Tensor | ParamType::PerHead | ParamType::I32Tensor => {
                    &[(".data", Kind::Address), (".len", Kind::I32)]
                }
                ParamType::Bits => {
                    &[(".data", Kind::Address), (".indptr", Kind::Address), (".batch", Kind::I32), (".len", Kind::I32)]
                }
            };
            for &(part, kind) in parts {
                let bytes = if matches!(kind, Kind::Address) { 8 } else { 4 };
                let offset = size.next_multiple_of(bytes);
                fields.push((format!("{name}{part}"), offset, kind));
                size = offset + bytes;
            }
            // A struct with a pointer in it ends on a multiple of 8.
            if parts.len() > 1 {
                size = size.next_multiple_of(8);
            }
        }
        // C++ gives a struct without fields a byte.
        Self { name: variant.name().into(), text: cuda_source(variant), fields, size: size.max(1) }
    }

    /// The C++ type `cpp`: structs one after the other, each reached by a path, the variant's parameters behind the last.
    pub(super) fn twin(&self, cpp: &str, parts: &[(&str, &Twin)]) -> Twin {
        let (mut named, mut size, mut path) = (Vec::new(), 0, "");
        for (part_path, part) in parts {
            named.extend(part.all().map(|(name, at, kind)| (format!("{part_path}{name}"), size + at, kind)));
            (size, path) = (size + part.size, part_path);
        }
        named.extend(self.fields.iter().map(|(name, at, kind)| (format!("{path}variant.{name}"), size + at, *kind)));
        let size = (size + self.size).next_multiple_of(8);
        Twin { cpp: format!("{cpp}<{}>", self.name).into(), size, fields: &[], named }
    }

    /// Adds the values of the parameters to `bytes`, which end where they begin.
    pub(super) fn pack<'a>(&self, call: &mut Call<'a>, bound: &Bound<'a>, bytes: &mut Vec<u8>) -> Result<()> {
        const ARG: &str = "params";
        let begin = bytes.len();
        let mut fields = self.fields.iter();
        let mut put = |word: &[u8]| {
            if let Some(field) = fields.next() {
                bytes.resize(begin + field.1, 0);
                bytes.extend_from_slice(word);
            }
        };
        for value in bound.values() {
            let (data, indptr, len) = match *value {
                Value::F32(x) => {
                    put(&x.to_ne_bytes());
                    continue;
                }
                Value::I32(x) => {
                    put(&x.to_ne_bytes());
                    continue;
                }
                Value::F32s(x) => (call.read(ARG, TensorRef::new(x, &[x.len()])?)?, None, x.len()),
                Value::I32s(x) => (call.read(ARG, TensorRef::new(x, &[x.len()])?)?, None, x.len()),
                Value::Tensor(t) => (call.read(ARG, t)?, None, t.shape()[0]),
                Value::Bits { bytes, indptr } => {
                    let indptr = (call.read(ARG, TensorRef::new(indptr, &[indptr.len()])?)?, indptr.len() - 1);
                    (call.read(ARG, TensorRef::new(bytes, &[bytes.len()])?)?, Some(indptr), bytes.len())
                }
                Value::BitTensors { bytes, indptr } => {
                    let indptr = (call.read(ARG, indptr)?, indptr.shape()[0] - 1);
                    (call.read(ARG, bytes)?, Some(indptr), bytes.shape()[0])
                }
            };
            put(bytemuck::bytes_of(&data));
            if let Some((Address(address), batch)) = indptr {
                put(&address.to_ne_bytes());
                put(&(batch as i32).to_ne_bytes());
            }
            // Indices are i32: what lies past 2^31 - 1 cannot be meant.
            put(&len.min(i32::MAX as usize).try_into().unwrap_or(i32::MAX).to_ne_bytes());
        }
        bytes.resize((begin + self.size).next_multiple_of(8), 0);
        Ok(())
    }
}
