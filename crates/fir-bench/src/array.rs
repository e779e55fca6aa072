//! [`Array`]: a tensor of any of the schema's types in this process's memory.

use bytemuck::Pod;
use fir::tensor::{E2m1x2, E4m3, E5m2, Float, Place, TensorMut, TensorRef, bf16, f16};

use crate::error::{Error, Result};
use crate::schema::DType;

/// A dense tensor, row-major: here, or for the library's operators on a device, where its elements are out of reach.
#[derive(Clone)]
pub struct Array {
    dtype: DType,
    tensor: fir::Tensor,
}

impl std::fmt::Debug for Array {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Array({} {:?})", self.dtype, self.shape())
    }
}

impl Array {
    /// Zeros.
    pub fn zeros(dtype: DType, shape: &[usize]) -> Result<Self> {
        Ok(Self { dtype, tensor: fir::Tensor::zeros(dtype.fir(), shape)? })
    }

    /// Copies `bytes`, which must be as many as the shape needs.
    pub fn from_bytes(dtype: DType, shape: &[usize], bytes: &[u8]) -> Result<Self> {
        let mut array = Self::zeros(dtype, shape)?;
        if array.bytes().len() != bytes.len() {
            let why = format!("{} bytes for {shape:?} of {dtype}, which needs {}", bytes.len(), array.bytes().len());
            return Err(Error::refused("Array::from_bytes", why));
        }
        array.bytes_mut().copy_from_slice(bytes);
        Ok(array)
    }

    /// Copies a tensor of the kernel library; `None` if it is on a device, or of a type that the schema does not have.
    pub(crate) fn copy_of(view: TensorRef<'_>) -> Option<Self> {
        let dtype = DType::ALL.into_iter().find(|d| d.fir() == view.dtype())?;
        let mut array = Self::zeros(dtype, view.shape()).ok()?;
        let (from, size) = (view.host_bytes("Array::copy_of", "view").ok()?, dtype.bytes());
        for (to, at) in array.bytes_mut().chunks_exact_mut(size).zip(view.layout().offsets()) {
            to.copy_from_slice(&from[at * size..][..size]);
        }
        Some(array)
    }

    /// A number, as a tensor of no dimensions.
    pub fn scalar(dtype: DType, value: f64) -> Result<Self> {
        let mut array = Self::zeros(dtype, &[])?;
        array.set(0, value);
        Ok(array)
    }

    /// A copy where `exec`'s operators want it.
    pub(crate) fn on(&self, exec: &fir::Exec) -> Result<Self> {
        let tensor = match exec {
            fir::Exec::Cuda(gpu) => self.tensor.to_device(gpu)?,
            _ => self.tensor.clone(),
        };
        Ok(Self { dtype: self.dtype, tensor })
    }

    /// A copy here.
    pub(crate) fn to_host(&self) -> Result<Self> {
        Ok(Self { dtype: self.dtype, tensor: self.tensor.to_host()? })
    }

    /// Whether it is here.
    pub(crate) fn is_here(&self) -> bool {
        self.tensor.place() == Place::Host
    }

    /// Type of its elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Its dimensions.
    pub fn shape(&self) -> &[usize] {
        self.tensor.shape()
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape().iter().product()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its bytes; none where it is on a device.
    pub fn bytes(&self) -> &[u8] {
        self.tensor.view().host_bytes("Array::bytes", "self").unwrap_or_default()
    }

    /// Its bytes, for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.tensor.view_mut().into_host_bytes("Array::bytes_mut", "self").unwrap_or_default()
    }

    /// Its elements; the size of `T` must be the element's. None where it is on a device.
    pub fn typed<T: Pod>(&self) -> &[T] {
        debug_assert_eq!(size_of::<T>(), self.dtype.bytes());
        bytemuck::try_cast_slice(self.bytes()).unwrap_or_default()
    }

    /// Its elements, for writing.
    pub fn typed_mut<T: Pod>(&mut self) -> &mut [T] {
        debug_assert_eq!(size_of::<T>(), self.dtype.bytes());
        bytemuck::try_cast_slice_mut(self.bytes_mut()).unwrap_or_default()
    }

    /// An element as a number; of two packed ones the first.
    pub fn get(&self, i: usize) -> f64 {
        match self.dtype {
            DType::Float32 => f64::from(self.typed::<f32>()[i]),
            DType::Float16 => f64::from(self.typed::<f16>()[i].to_f32()),
            DType::BFloat16 => f64::from(self.typed::<bf16>()[i].to_f32()),
            DType::Float8E4m3 => f64::from(self.typed::<E4m3>()[i].to_f32()),
            DType::Float8E5m2 => f64::from(self.typed::<E5m2>()[i].to_f32()),
            DType::Float4E2m1 => f64::from(self.typed::<E2m1x2>()[i].to_f32()[0]),
            _ => self.integer(i) as f64,
        }
    }

    /// An element of an integer type; floats are cut off.
    pub fn integer(&self, i: usize) -> i64 {
        match self.dtype {
            DType::Int64 => self.typed::<i64>()[i],
            DType::Int32 => i64::from(self.typed::<i32>()[i]),
            DType::Int16 => i64::from(self.typed::<i16>()[i]),
            DType::Int8 => i64::from(self.typed::<i8>()[i]),
            DType::Bool => i64::from(self.typed::<u8>()[i] != 0),
            _ => self.get(i) as i64,
        }
    }

    /// Rounds a number into an element; both of two packed ones.
    pub fn set(&mut self, i: usize, x: f64) {
        match self.dtype {
            DType::Float32 => self.typed_mut::<f32>()[i] = x as f32,
            DType::Float16 => self.typed_mut::<f16>()[i] = f16::from_f64(x),
            DType::BFloat16 => self.typed_mut::<bf16>()[i] = bf16::from_f64(x),
            DType::Float8E4m3 => self.typed_mut::<E4m3>()[i] = E4m3::from_f32(x as f32),
            DType::Float8E5m2 => self.typed_mut::<E5m2>()[i] = E5m2::from_f32(x as f32),
            DType::Float4E2m1 => self.typed_mut::<E2m1x2>()[i] = E2m1x2::from_f32([x as f32; 2]),
            DType::Int64 => self.typed_mut::<i64>()[i] = x as i64,
            DType::Int32 => self.typed_mut::<i32>()[i] = x as i32,
            DType::Int16 => self.typed_mut::<i16>()[i] = x as i16,
            DType::Int8 => self.typed_mut::<i8>()[i] = x as i8,
            DType::Bool => self.typed_mut::<u8>()[i] = u8::from(x != 0.0),
        }
    }

    /// It, for the kernel library.
    pub fn view(&self) -> TensorRef<'_> {
        self.tensor.view()
    }

    /// It, for the kernel library to write.
    pub fn view_mut(&mut self) -> TensorMut<'_> {
        self.tensor.view_mut()
    }

    /// Fills it with bytes that are NaN in every float type and no index of anything.
    pub fn poison(&mut self) {
        self.bytes_mut().fill(0xff);
    }

    /// `self`, moved around by `roll`: the first axis by one number and the last by the other, as torch's `roll` does.
    ///
    /// Random numbers stay as random, rows stay rows of the same numbers, and every element of a result changes.
    pub fn rolled_into(&self, roll: Roll, to: &mut Self) {
        let (rows, row, first) = match self.shape() {
            [] => (1, 1, 1),
            [n] => (1, *n, 1),
            [first, .., last] => (self.len() / last.max(&1), *last, *first),
        };
        let row_bytes = row * self.dtype.bytes();
        if row_bytes == 0 || rows == 0 {
            return;
        }
        let shift_rows = roll.first % first.max(1) * (rows / first.max(1));
        let cut = roll.last % row * self.dtype.bytes();
        let (from, to) = (self.bytes(), to.bytes_mut());
        for (i, source) in from.chunks_exact(row_bytes).enumerate() {
            let at = (i + shift_rows) % rows * row_bytes;
            let target = &mut to[at..at + row_bytes];
            target[cut..].copy_from_slice(&source[..row_bytes - cut]);
            target[..cut].copy_from_slice(&source[row_bytes - cut..]);
        }
    }
}

/// How far a tensor is moved around.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Roll {
    /// Along the first axis; tensors of one axis have none but the last.
    pub first: usize,
    /// Along the last axis.
    pub last: usize,
}

impl Roll {
    /// As it is.
    pub const NONE: Self = Self { first: 0, last: 0 };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rolling_moves_as_torch_does() {
        // torch.roll(torch.arange(12).view(2, 2, 3), (1, 2), (0, -1))
        let mut a = Array::zeros(DType::Int32, &[2, 2, 3]).unwrap();
        a.typed_mut::<i32>().iter_mut().enumerate().for_each(|(i, x)| *x = i as i32);
        let mut b = a.clone();
        a.rolled_into(Roll { first: 1, last: 2 }, &mut b);
        assert_eq!(b.typed::<i32>(), [7, 8, 6, 10, 11, 9, 1, 2, 0, 4, 5, 3]);
        let mut c = Array::zeros(DType::Float32, &[0, 3]).unwrap();
        c.clone().rolled_into(Roll { first: 5, last: 7 }, &mut c);
    }
}
