//! Inputs of a workload: drawn, given, or read from files.

use std::fs;
use std::path::Path;

use fir::philox::philox4x32;
use safetensors::{Dtype, SafeTensors};

use crate::array::Array;
use crate::error::{Error, Result};
use crate::schema::{DType, Definition, Facts, Input, Scalar, Workload};

/// A source of numbers that is a function of its seed.
#[derive(Clone, Debug)]
pub struct Rng {
    key: [u32; 2],
    at: u64,
    left: Vec<u32>,
}

impl Rng {
    /// The numbers of `seed` in `stream`; other streams are independent.
    pub fn new(seed: u64, stream: &str) -> Self {
        // FNV-1a: the stream's name decides the key together with the seed.
        let hash =
            stream.bytes().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
        let key = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ hash;
        Self { key: [key as u32, (key >> 32) as u32], at: 0, left: Vec::new() }
    }

    /// 32 random bits.
    pub fn bits(&mut self) -> u32 {
        if let Some(bits) = self.left.pop() {
            return bits;
        }
        let counter = [self.at as u32, (self.at >> 32) as u32, 0, 0];
        self.at += 1;
        self.left.extend(philox4x32(counter, self.key));
        self.left.pop().unwrap_or(0)
    }

    /// A number in `[0, 1)`.
    pub fn uniform(&mut self) -> f64 {
        f64::from(self.bits()) / 4_294_967_296.0
    }

    /// A whole number in `[from, to)`.
    pub fn integer(&mut self, from: i64, to: i64) -> i64 {
        from + (self.uniform() * (to - from) as f64) as i64
    }

    /// Two independent numbers of mean 0 and variance 1.
    fn normals(&mut self) -> [f32; 2] {
        let (u, v) = (1.0 - self.uniform(), self.uniform());
        let (r, a) = ((-2.0 * u.ln()).sqrt(), std::f64::consts::TAU * v);
        [(r * a.cos()) as f32, (r * a.sin()) as f32]
    }

    /// Fills with numbers of mean 0 and variance 1, whole ones in -1024..1024, or truth values.
    pub fn fill(&mut self, array: &mut Array) {
        match array.dtype() {
            DType::Float32 => {
                for pair in array.typed_mut::<f32>().chunks_mut(2) {
                    let normals = self.normals();
                    pair.copy_from_slice(&normals[..pair.len()]);
                }
            }
            DType::Float4E2m1 | DType::Int8 => array.bytes_mut().iter_mut().for_each(|b| *b = self.bits() as u8),
            DType::Float16 | DType::BFloat16 | DType::Float8E4m3 | DType::Float8E5m2 => {
                let limit = if array.dtype().bytes() == 1 { 2.0 } else { f32::INFINITY };
                let mut next = None;
                for i in 0..array.len() {
                    let x = next.take().unwrap_or_else(|| {
                        let [a, b] = self.normals();
                        next = Some(b);
                        a
                    });
                    array.set(i, f64::from(x.clamp(-limit, limit)));
                }
            }
            DType::Int64 | DType::Int32 | DType::Int16 => {
                (0..array.len()).for_each(|i| array.set(i, self.integer(-1024, 1024) as f64));
            }
            DType::Bool => array.bytes_mut().iter_mut().for_each(|b| *b = (self.bits() & 1) as u8),
        }
    }
}

/// One input, ready to be given to a solution.
#[derive(Clone, Debug)]
pub struct Ready {
    /// Its name.
    pub name: String,
    /// Its numbers; of no dimensions where `scalar`.
    pub array: Array,
    /// Whether it is a number rather than a tensor.
    pub scalar: bool,
    /// Whether its numbers may stand elsewhere in it: what was drawn, and what a file has that is no structure.
    pub random: bool,
}

/// What is known of a workload, for expressions: its axes, and the numbers of those inputs that are at hand.
pub(crate) struct Known<'a> {
    pub(crate) definition: &'a Definition,
    pub(crate) workload: &'a Workload,
    pub(crate) arrays: &'a [(String, Array)],
}

impl Facts for Known<'_> {
    fn axis(&self, name: &str) -> Option<i64> {
        if let Some(Input::Scalar(Scalar::Int(i))) = self.workload.input(name) {
            return Some(*i);
        }
        self.definition.axis(name, self.workload.axes()).and_then(|v| i64::try_from(v).ok())
    }

    fn shape(&self, tensor: &str) -> Option<Vec<usize>> {
        self.definition.shape(self.definition.input(tensor)?, self.workload.axes()).ok()
    }

    fn element(&self, tensor: &str, index: i64) -> Option<i64> {
        let (_, of) =
            self.arrays.iter().find(|(n, a)| n == tensor && a.shape().len() == 1 && a.dtype().is_integer())?;
        let index = if index < 0 { index + of.len() as i64 } else { index };
        usize::try_from(index).ok().filter(|i| *i < of.len()).map(|i| of.integer(i))
    }
}

/// Draws and reads the inputs of a workload, in the order of the definition.
///
/// What a sampler is told is drawn as such: `probs` are distributions, `top_p` in `(0, 1)`, `top_k` from 1 on. What experts are
/// chosen by is different for each: of equals any may be chosen, and a solution that chose others would look wrong.
pub fn make_inputs(root: &Path, definition: &Definition, workload: &Workload, rng: &mut Rng) -> Result<Vec<Ready>> {
    let one = |(name, spec): &(String, crate::schema::TensorSpec)| {
        let input = workload.input(name).ok_or_else(|| {
            Error::refused("make_inputs", format!("workload {} has no input `{name}`", workload.uuid()))
        })?;
        let shape = definition.shape(spec, workload.axes())?;
        let array = match input {
            Input::Random => {
                let mut array = Array::zeros(spec.dtype, &shape)?;
                rng.fill(&mut array);
                match definition.op_type() {
                    "sampling" => shape_sampling(name, &mut array),
                    "moe" if name == "routing_logits" => apart(&mut array),
                    _ => {}
                }
                array
            }
            Input::Scalar(value) => Array::scalar(spec.dtype, value.as_f64())?,
            Input::Safetensors { path, tensor_key } => {
                let file = root.join(path);
                let bytes = fs::read(&file).map_err(Error::io(&file))?;
                let array = tensor_of(&bytes, path, tensor_key)?;
                if array.shape() != shape || array.dtype() != spec.dtype {
                    let got = format!("{} {:?}", array.dtype(), array.shape());
                    let why = format!("`{tensor_key}` of {path} is {got}, but `{name}` is {} {shape:?}", spec.dtype);
                    return Err(Error::refused("make_inputs", why));
                }
                array
            }
        };
        // Whole numbers of a file are indices and lengths. Others mean the same elsewhere, and have to move: a solution that
        // remembers its outputs would be right on inputs that are always the same.
        let random = match input {
            Input::Random => true,
            Input::Scalar(_) => false,
            Input::Safetensors { .. } => !spec.dtype.is_integer(),
        };
        Ok(Ready { name: name.clone(), array, scalar: spec.shape.is_none(), random })
    };
    definition.inputs().iter().map(one).collect()
}

/// Turns normal numbers into what a sampler is told.
fn shape_sampling(name: &str, array: &mut Array) {
    match name {
        "probs" if array.dtype() == DType::Float32 => {
            let row = array.shape().last().copied().unwrap_or(1).max(1);
            for row in array.typed_mut::<f32>().chunks_mut(row) {
                let sum: f64 = row.iter().map(|x| f64::from(*x).exp()).sum();
                row.iter_mut().for_each(|x| *x = (f64::from(*x).exp() / sum) as f32);
            }
        }
        "top_p" | "min_p" => {
            for i in 0..array.len() {
                let x = array.get(i);
                array.set(i, 0.02 + 0.96 / (1.0 + (-x).exp()));
            }
        }
        "top_k" => (0..array.len()).for_each(|i| {
            let k = array.integer(i).abs() + 1;
            array.set(i, k as f64);
        }),
        _ => {}
    }
}

/// Moves equal elements of a row apart, to the next larger ones that nothing else has.
fn apart(array: &mut Array) {
    let row = array.shape().last().copied().unwrap_or(1).max(1);
    for begin in (0..array.len()).step_by(row) {
        let mut order: Vec<usize> = (begin..begin + row).collect();
        order.sort_by(|a, b| array.get(*a).total_cmp(&array.get(*b)));
        for pair in order.windows(2) {
            let below = array.get(pair[0]);
            let mut step = below.abs() / 512.0 + 1e-6;
            while array.get(pair[1]) <= below {
                array.set(pair[1], below + step);
                step *= 2.0;
            }
        }
    }
}

/// Types of tensors in files.
const DTYPES: [(DType, Dtype); 10] = [
    (DType::Float32, Dtype::F32),
    (DType::Float16, Dtype::F16),
    (DType::BFloat16, Dtype::BF16),
    (DType::Float8E4m3, Dtype::F8_E4M3),
    (DType::Float8E5m2, Dtype::F8_E5M2),
    (DType::Int64, Dtype::I64),
    (DType::Int32, Dtype::I32),
    (DType::Int16, Dtype::I16),
    (DType::Int8, Dtype::I8),
    (DType::Bool, Dtype::BOOL),
];

/// A tensor of a safetensors file's bytes.
pub(crate) fn tensor_of(bytes: &[u8], path: &str, key: &str) -> Result<Array> {
    const OP: &str = "safetensors";
    if bytes.starts_with(b"version https://git-lfs") {
        return Err(Error::refused(OP, format!("{path} is a pointer of Git LFS; `git lfs pull` fetches the file")));
    }
    let file = SafeTensors::deserialize(bytes).map_err(|e| Error::refused(OP, format!("{path}: {e}")))?;
    let tensor = file.tensor(key).map_err(|e| Error::refused(OP, format!("{path}: `{key}`: {e}")))?;
    let dtype = DTYPES.into_iter().find(|(_, stored)| *stored == tensor.dtype()).map(|(dtype, _)| dtype);
    let refuse = || format!("{path}: `{key}` is of {:?}, which the schema does not have", tensor.dtype());
    let dtype = dtype.ok_or_else(|| Error::refused(OP, refuse()))?;
    Array::from_bytes(dtype, tensor.shape(), tensor.data())
}

/// Writes tensors to a safetensors file.
pub fn write_tensors(path: &Path, tensors: &[(&str, &Array)]) -> Result<()> {
    let views = tensors.iter().map(|(name, array)| tensor_view(name, array)).collect::<Result<Vec<_>>>()?;
    let bytes = safetensors::serialize(views, None).map_err(|e| Error::refused(WRITE, e.to_string()))?;
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(Error::io(folder))?;
    }
    fs::write(path, bytes).map_err(Error::io(path))
}

const WRITE: &str = "write_tensors";

fn tensor_view<'a>(name: &str, array: &'a Array) -> Result<(String, safetensors::tensor::TensorView<'a>)> {
    let dtype = DTYPES.into_iter().find(|(dtype, _)| *dtype == array.dtype()).map(|(_, stored)| stored);
    let dtype = dtype.ok_or_else(|| Error::refused(WRITE, format!("`{name}`: packed float4 cannot be stored")))?;
    let view = safetensors::tensor::TensorView::new(dtype, array.shape().to_vec(), array.bytes());
    Ok((name.to_owned(), view.map_err(|e| Error::refused(WRITE, format!("`{name}`: {e}")))?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_were_moved_apart_have_no_equals_and_hardly_change() {
        let mut array = Array::zeros(DType::BFloat16, &[3, 256]).unwrap();
        Rng::new(4, "equals").fill(&mut array);
        array.set(700, 0.0);
        array.set(701, 0.0);
        let before: Vec<f64> = (0..array.len()).map(|i| array.get(i)).collect();
        let equals = |of: &dyn Fn(usize) -> f64| {
            let mut rows = (0..3).map(|r| (0..256).map(|i| of(r * 256 + i)).collect::<Vec<_>>()).collect::<Vec<_>>();
            rows.iter_mut().for_each(|row| row.sort_by(f64::total_cmp));
            rows.iter().flat_map(|row| row.windows(2)).filter(|w| w[0] == w[1]).count()
        };
        assert!(equals(&|i| before[i]) > 10);
        apart(&mut array);
        assert_eq!(equals(&|i| array.get(i)), 0);
        let most = (0..array.len()).map(|i| (array.get(i) - before[i]).abs()).fold(0.0, f64::max);
        assert!(most < 0.05, "{most}");
    }
}
