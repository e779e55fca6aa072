//! [`Hooks`]: a variant as the kernels take it: the text of its hooks, and its parameters at the end of theirs.

use super::super::call::Call;
use super::super::params::{Address, Kind, Twin};
use crate::error::Result;
use crate::tensor::TensorRef;
use crate::variant::{Bound, KNOWN, ParamType, Value, Variant, cuda, cuda_source};

/// A variant's C++ struct and how its parameters are laid out.
#[derive(Clone, Debug)]
pub(super) struct Hooks {
    pub(super) name: String,
    pub(super) text: String,
    /// Name, offset and kind.
    fields: Vec<(String, usize, Kind)>,
    size: usize,
    /// For hooks of text: which of [`KNOWN`] stand behind the declared parameters.
    known: Vec<&'static str>,
    /// For each declared parameter, whether its address is all that there is.
    pointers: Vec<bool>,
}

/// What hooks of text are told of a run besides their parameters.
#[derive(Clone, Copy)]
pub(super) struct Known {
    pub(super) sm_scale: f32,
    pub(super) qo_heads: i32,
    pub(super) kv_heads: i32,
}

impl Hooks {
    pub(super) fn new(variant: &Variant) -> Self {
        let (mut fields, mut size) = (Vec::new(), 0usize);
        let known = KNOWN.iter().copied().filter(|k| variant.is_cuda_text() && variant.params().all(|p| p.0 != k.0));
        let known: Vec<_> = known.collect();
        for (name, ty) in variant.params().chain(known.iter().copied()) {
            let parts: &[(&str, Kind)] = match ty {
                ParamType::F32 => &[("", Kind::F32)],
                ParamType::I32 => &[("", Kind::I32)],
                ParamType::F32Tensor | ParamType::PerHead | ParamType::I32Tensor => {
                    &[(".data", Kind::Address), (".len", Kind::I32)]
                }
                ParamType::Tensor(_) => &[("", Kind::Address)],
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
        let known = known.iter().map(|k| k.0).collect();
        let pointers = variant.params().map(|p| matches!(p.1, ParamType::Tensor(_))).collect();
        Self { name: cuda::cuda_type(variant), text: cuda_source(variant), fields, size: size.max(1), known, pointers }
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
    pub(super) fn pack<'a>(
        &self,
        call: &mut Call<'a>,
        bound: &Bound<'a>,
        known: Known,
        bytes: &mut Vec<u8>,
    ) -> Result<()> {
        const ARG: &str = "params";
        let begin = bytes.len();
        let mut fields = self.fields.iter();
        let mut put = |word: &[u8]| {
            if let Some(field) = fields.next() {
                bytes.resize(begin + field.1, 0);
                bytes.extend_from_slice(word);
            }
        };
        for (value, pointer) in bound.values().iter().zip(&self.pointers) {
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
                Value::Tensor(t) => (call.read(ARG, t)?, None, t.layout().len()),
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
            if *pointer {
                continue;
            }
            if let Some((Address(address), batch)) = indptr {
                put(&address.to_ne_bytes());
                put(&(batch as i32).to_ne_bytes());
            }
            // Indices are i32: what lies past 2^31 - 1 cannot be meant.
            put(&len.min(i32::MAX as usize).try_into().unwrap_or(i32::MAX).to_ne_bytes());
        }
        for name in &self.known {
            match *name {
                "sm_scale" => put(&known.sm_scale.to_ne_bytes()),
                "num_qo_heads" => put(&known.qo_heads.to_ne_bytes()),
                _ => put(&known.kv_heads.to_ne_bytes()),
            }
        }
        bytes.resize((begin + self.size).next_multiple_of(8), 0);
        Ok(())
    }
}
