//! Tensors of other libraries as the library's views, without a copy, and where they are computed on.
//!
//! In order of preference: the C exchange interface of DLPack (a function per tensor, about 50 ns), attributes of a torch
//! tensor that has none, `__dlpack__`, `__cuda_array_interface__`.
//!
//! A tensor is borrowed for one call, in which the caller's reference keeps it alive. Nothing here can see whether
//! another thread writes it meanwhile: as with every extension that releases the interpreter's lock, that is the caller's
//! to see to.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::{Mutex, OnceLock};

use fir::exec::{Exec, Gpu};
use fir::tensor::dlpack::{
    DEVICE_CPU, DEVICE_CUDA, DlDataType, DlDevice, DlManagedTensor, DlManagedTensorVersioned, DlTensor, DlVersion,
};
use fir::tensor::{Foreign, Layout, MAX_RANK, Place};
use fir::{DType, TensorMut, TensorRef};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyCapsule, PyCapsuleMethods, PyDict, PyTuple, PyType};
use pyo3::{ffi, intern};

use crate::error::to_py;

/// A tensor that a call reads, or writes.
pub(crate) struct Arg {
    foreign: Foreign,
    /// Address of the first element.
    start: usize,
    /// The tensor before it was taken for one of another type, whose memory it is.
    _before: Option<Box<Arg>>,
    /// Whose CUDA stream it is computed on.
    stream: Stream,
}

/// Whose current stream counts.
#[derive(Clone, Copy)]
enum Stream {
    /// The device's default one.
    Default,
    /// That of a library with the C exchange interface.
    Exchange(&'static ExchangeApi),
    /// Torch's, without it.
    Torch,
}

/// DLPack's exchange interface: functions that a library's tensor type offers to C.
#[repr(C)]
struct ExchangeApi {
    version: DlVersion,
    previous: *const c_void,
    allocate: *const c_void,
    managed_from_object: *const c_void,
    managed_to_object: *const c_void,
    tensor_from_object: Option<unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> i32>,
    current_stream: Option<unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> i32>,
}

// SAFETY: a table of functions that its library never changes.
unsafe impl Sync for ExchangeApi {}

const EXCHANGE: &CStr = c"dlpack_exchange_api";

/// The type last seen with an exchange interface (torch's tensor, mostly), by address, and its interface.
static EXCHANGE_TYPE: PyOnceLock<(Py<PyType>, &'static ExchangeApi)> = PyOnceLock::new();

fn exchange_api(object: &Bound<'_, PyAny>) -> Option<&'static ExchangeApi> {
    let (py, kind) = (object.py(), object.get_type());
    if let Some((known, api)) = EXCHANGE_TYPE.get(py)
        && known.is(&kind)
    {
        return Some(api);
    }
    let capsule = kind.getattr(intern!(py, "__dlpack_c_exchange_api__")).ok()?.cast_into::<PyCapsule>().ok()?;
    let pointer = capsule.pointer_checked(Some(EXCHANGE)).ok()?.cast::<ExchangeApi>();
    // SAFETY: a capsule of this name holds the table, which lives as long as the process; the version has its place in
    // every one of them.
    let version = unsafe { (*pointer.as_ptr()).version };
    if version.major != 1 {
        return None;
    }
    // SAFETY: as above, and major version 1 says that the table is laid out as ours.
    let api: &'static ExchangeApi = unsafe { pointer.as_ref() };
    api.tensor_from_object?;
    let _ = EXCHANGE_TYPE.set(py, (kind.unbind(), api));
    Some(api)
}

/// The exception that a C function left behind.
fn raised(py: Python<'_>) -> PyErr {
    PyErr::take(py).unwrap_or_else(|| PyTypeError::new_err("the tensor's library refused to describe it"))
}

impl Arg {
    /// A borrowed tensor, told by `tensor`.
    ///
    /// # Safety
    /// `tensor` describes memory that lives while `self` does, with `shape` and `strides` of `ndim` entries (`strides` may
    /// be null), and which nobody else writes meanwhile.
    unsafe fn borrowed(tensor: DlTensor, read_only: bool, stream: Stream) -> PyResult<Self> {
        // SAFETY: the caller's promise.
        let foreign = unsafe { Foreign::lent(tensor, read_only) }.map_err(to_py)?;
        Ok(Self { foreign, start: start_of(&tensor), _before: None, stream })
    }

    /// Memory at an address where `self` is, of its element type.
    ///
    /// # Safety
    /// The memory is there while the result is used, or its part that is looked at, and nobody writes it meanwhile.
    pub(crate) unsafe fn at(&self, address: usize, mut shape: [i64; 4], mut strides: [i64; 4]) -> PyResult<Self> {
        let device = match self.place() {
            Place::Cuda(ordinal) => DlDevice { device_type: DEVICE_CUDA, device_id: ordinal as i32 },
            _ => DlDevice { device_type: DEVICE_CPU, device_id: 0 },
        };
        let tensor = DlTensor {
            data: ptr::with_exposed_provenance_mut(address),
            device,
            ndim: 4,
            dtype: DlDataType::from(self.dtype()),
            shape: shape.as_mut_ptr(),
            strides: strides.as_mut_ptr(),
            byte_offset: 0,
        };
        // SAFETY: the caller's promise; shape and strides are read before this returns.
        unsafe { Self::borrowed(tensor, true, self.stream) }
    }

    /// From torch's attributes: for versions without the exchange interface.
    fn from_torch(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = object.py();
        let data: usize = object.call_method0(intern!(py, "data_ptr"))?.extract()?;
        let mut shape = [0i64; MAX_RANK];
        let mut strides = [0i64; MAX_RANK];
        let rank = fill(&object.getattr(intern!(py, "shape"))?, &mut shape)?;
        fill(&object.call_method0(intern!(py, "stride"))?, &mut strides)?;
        let device = object.getattr(intern!(py, "device"))?;
        let device_type = match device.getattr(intern!(py, "type"))?.extract::<&str>()? {
            "cpu" => DEVICE_CPU,
            "cuda" => DEVICE_CUDA,
            other => return Err(PyValueError::new_err(format!("a tensor on {other}, expected cpu or cuda"))),
        };
        let device_id = device.getattr(intern!(py, "index"))?.extract::<Option<i32>>()?.unwrap_or(0);
        let dtype = torch_dtype(&object.getattr(intern!(py, "dtype"))?)?;
        let tensor = DlTensor {
            data: ptr::with_exposed_provenance_mut(data),
            device: DlDevice { device_type, device_id },
            ndim: rank as i32,
            dtype: DlDataType::from(dtype),
            shape: shape.as_mut_ptr(),
            strides: strides.as_mut_ptr(),
            byte_offset: 0,
        };
        // SAFETY: the caller of the operator holds the tensor during the call; shape and strides are read before this
        // returns.
        unsafe { Self::borrowed(tensor, false, Stream::Torch) }
    }

    /// By `__dlpack__`: the tensor is given back when the call is over.
    fn from_dlpack(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = object.py();
        let kwargs = PyDict::new(py);
        let device: (i32, i32) = object.call_method0(intern!(py, "__dlpack_device__"))?.extract()?;
        if device.0 == DEVICE_CUDA {
            kwargs.set_item(intern!(py, "stream"), 1)?; // The default stream, on which such tensors are computed.
        }
        kwargs.set_item(intern!(py, "max_version"), (1, 1))?;
        let name = intern!(py, "__dlpack__");
        let capsule = match object.call_method(name, (), Some(&kwargs)) {
            Err(e) if e.is_instance_of::<PyTypeError>(py) => {
                kwargs.del_item(intern!(py, "max_version"))?; // A library from before DLPack 1.0.
                object.call_method(name, (), Some(&kwargs))?
            }
            other => other?,
        };
        let capsule = capsule.cast_into::<PyCapsule>()?;
        let (foreign, start) = if let Ok(tensor) = capsule.pointer_checked(Some(c"dltensor_versioned")) {
            let tensor = tensor.cast::<DlManagedTensorVersioned>().as_ptr();
            rename(&capsule, c"used_dltensor_versioned")?;
            // SAFETY: a capsule of this name holds such a tensor; its version has its place in every one of them.
            let start = unsafe { if (*tensor).version.major == 1 { start_of(&(*tensor).dl_tensor) } else { 0 } };
            // SAFETY: the capsule gave the tensor away by being renamed.
            (unsafe { Foreign::from_dlpack(tensor) }, start)
        } else {
            let tensor = capsule.pointer_checked(Some(c"dltensor"))?.cast::<DlManagedTensor>().as_ptr();
            rename(&capsule, c"used_dltensor")?;
            // SAFETY: a capsule of this name holds such a tensor.
            let start = unsafe { start_of(&(*tensor).dl_tensor) };
            // SAFETY: as above.
            (unsafe { Foreign::from_dlpack_unversioned(tensor) }, start)
        };
        let foreign = foreign.map_err(to_py)?;
        Ok(Self { foreign, start, _before: None, stream: Stream::Default })
    }

    /// By `__cuda_array_interface__`, version 2 or 3.
    fn from_cuda_array(object: &Bound<'_, PyAny>, interface: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (address, read_only): (usize, bool) = interface.get_item("data")?.extract()?;
        let typestr: String = interface.get_item("typestr")?.extract()?;
        let dtype = match typestr.get(1..).unwrap_or_default() {
            "f4" => DType::F32,
            "f2" => DType::F16,
            "i1" => DType::I8,
            "i2" => DType::I16,
            "i4" => DType::I32,
            "i8" => DType::I64,
            "u1" => DType::U8,
            "u4" => DType::U32,
            "b1" => DType::Bool,
            _ => {
                return Err(PyTypeError::new_err(format!(
                    "typestr {typestr:?} of {} has no element type",
                    name_of(object)
                )));
            }
        };
        let (mut shape, mut strides) = ([0i64; MAX_RANK], [0i64; MAX_RANK]);
        let rank = fill(&interface.get_item("shape")?, &mut shape)?;
        let given = interface.get_item("strides").ok().filter(|s| !s.is_none());
        if let Some(given) = &given {
            fill(given, &mut strides)?;
            let size = dtype.size() as i64;
            if let Some(odd) = strides[..rank].iter().find(|&&s| s % size != 0) {
                return Err(PyValueError::new_err(format!("stride of {odd} bytes, expected a multiple of {size}")));
            }
            strides[..rank].iter_mut().for_each(|s| *s /= size);
        }
        let tensor = DlTensor {
            data: ptr::with_exposed_provenance_mut(address),
            // The interface does not tell which device; the address belongs to the first unless more are in use.
            device: DlDevice { device_type: DEVICE_CUDA, device_id: 0 },
            ndim: rank as i32,
            dtype: DlDataType::from(dtype),
            shape: shape.as_mut_ptr(),
            strides: if given.is_some() { strides.as_mut_ptr() } else { ptr::null_mut() },
            byte_offset: 0,
        };
        // SAFETY: as in `from_torch`.
        unsafe { Self::borrowed(tensor, read_only, Stream::Default) }
    }

    pub(crate) fn view(&self) -> fir::Result<TensorRef<'_>> {
        self.foreign.view()
    }

    pub(crate) fn view_mut(&mut self) -> fir::Result<TensorMut<'_>> {
        self.foreign.view_mut()
    }

    pub(crate) fn dtype(&self) -> DType {
        self.foreign.dtype()
    }

    pub(crate) fn layout(&self) -> &Layout {
        self.foreign.layout()
    }

    pub(crate) fn shape(&self) -> &[usize] {
        self.foreign.layout().shape()
    }

    pub(crate) fn place(&self) -> Place {
        self.foreign.place()
    }

    /// The same bytes as another type of the same size: packed fp4 and fp8 scales often come as `uint8`.
    pub(crate) fn taken_as(self, dtype: DType) -> PyResult<Self> {
        if self.dtype() == dtype {
            return Ok(self);
        }
        if dtype.size() != self.dtype().size() {
            return Err(PyTypeError::new_err(format!("a tensor of {}, expected {dtype}", self.dtype())));
        }
        let signed = |xs: &[usize]| {
            let mut out = [0i64; MAX_RANK];
            out.iter_mut().zip(xs).for_each(|(o, &x)| *o = x as i64);
            out
        };
        let (mut shape, mut strides) = (signed(self.shape()), signed(self.layout().strides()));
        let device = match self.place() {
            Place::Cuda(ordinal) => DlDevice { device_type: DEVICE_CUDA, device_id: ordinal as i32 },
            _ => DlDevice { device_type: DEVICE_CPU, device_id: 0 },
        };
        let tensor = DlTensor {
            data: ptr::with_exposed_provenance_mut(self.start),
            device,
            ndim: self.shape().len() as i32,
            dtype: DlDataType::from(dtype),
            shape: shape.as_mut_ptr(),
            strides: strides.as_mut_ptr(),
            byte_offset: 0,
        };
        // SAFETY: the memory is that of `self`, whose owner stays in `_before`; any byte is a value of these types.
        let taken = unsafe { Self::borrowed(tensor, self.foreign.is_read_only(), self.stream) }?;
        Ok(Self { _before: Some(Box::new(self)), ..taken })
    }

    /// Address of the first element and length up to the last, in bytes; none if there is none.
    fn range(&self) -> Option<(usize, usize)> {
        let len = self.layout().extent() * self.dtype().size();
        (len > 0).then_some((self.start, len))
    }

    /// Whether the two have a byte in common, as far as their extents tell; views that interleave have none.
    fn overlaps(&self, other: &Self) -> bool {
        let (Some((a, a_len)), Some((b, b_len))) = (self.range(), other.range()) else { return false };
        if a + a_len <= b || b + b_len <= a {
            return false;
        }
        !self.interleaves(other)
    }

    /// Whether the two are parts of one tensor, a constant step apart, that do not meet: keys and values of one cache.
    fn interleaves(&self, other: &Self) -> bool {
        let (Some((a, _)), Some((b, _))) = (self.range(), other.range()) else { return false };
        let (size, layout) = (self.dtype().size(), self.layout());
        let step = a.abs_diff(b);
        if layout != other.layout() || self.dtype() != other.dtype() || step == 0 || !step.is_multiple_of(size) {
            return false;
        }
        let rank = layout.shape().len();
        if rank + 1 > MAX_RANK {
            return false;
        }
        let (mut shape, mut strides) = ([2; MAX_RANK], [step / size; MAX_RANK]);
        shape[1..=rank].copy_from_slice(layout.shape());
        strides[1..=rank].copy_from_slice(layout.strides());
        Layout::strided("interleaved", "kv", &shape[..=rank], &strides[..=rank]).is_ok_and(|l| !l.may_alias())
    }

    /// Takes a contiguous copy in the place of host memory.
    fn copy(&mut self) -> PyResult<()> {
        let (layout, dtype, size) = (*self.layout(), self.dtype(), self.dtype().size());
        let Some((start, len)) = self.range() else { return Ok(()) };
        // SAFETY: `Foreign` checked that the layout's extent lies in memory that the caller lends.
        let from = unsafe { std::slice::from_raw_parts(ptr::with_exposed_provenance::<u8>(start), len) };
        let bytes: Vec<u8> = layout.offsets().flat_map(|i| &from[i * size..][..size]).copied().collect();
        let copy = Aligned::new(&bytes);
        self.start = copy.0.as_ptr().addr();
        self.foreign = Foreign::from_owner(Box::new(copy), dtype, layout.shape()).map_err(to_py)?;
        Ok(())
    }
}

fn start_of(tensor: &DlTensor) -> usize {
    tensor.data.expose_provenance() + tensor.byte_offset as usize
}

/// Bytes at an address that suits every element type.
struct Aligned(Vec<u64>, usize);

impl Aligned {
    fn new(bytes: &[u8]) -> Self {
        let words = bytes.chunks(8).map(|c| {
            let mut word = [0; 8];
            word[..c.len()].copy_from_slice(c);
            u64::from_ne_bytes(word)
        });
        Self(words.collect(), bytes.len())
    }
}

impl AsRef<[u8]> for Aligned {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the words hold at least `self.1` bytes, every one of them initialised.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.1) }
    }
}

fn rename(capsule: &Bound<'_, PyCapsule>, name: &'static CStr) -> PyResult<()> {
    // SAFETY: the capsule is live, and the name is static.
    if unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), name.as_ptr()) } != 0 {
        return Err(raised(capsule.py()));
    }
    Ok(())
}

fn name_of(object: &Bound<'_, PyAny>) -> String {
    object.get_type().qualname().map_or_else(|_| "?".into(), |n| n.to_string())
}

/// A tuple of sizes or strides; how many there are.
fn fill(tuple: &Bound<'_, PyAny>, out: &mut [i64; MAX_RANK]) -> PyResult<usize> {
    let tuple = tuple.cast::<PyTuple>()?;
    if tuple.len() > MAX_RANK {
        return Err(PyValueError::new_err(format!("{} axes, expected at most {MAX_RANK}", tuple.len())));
    }
    for (o, x) in out.iter_mut().zip(tuple.iter()) {
        *o = x.extract()?;
    }
    Ok(tuple.len())
}

/// A torch dtype, or its name, or that of the library or of numpy.
pub(crate) fn torch_dtype(object: &Bound<'_, PyAny>) -> PyResult<DType> {
    let text = object.str()?;
    let text = text.to_str()?;
    Ok(match text.strip_prefix("torch.").unwrap_or(text) {
        "float32" | "float" | "f32" => DType::F32,
        "float16" | "half" | "f16" => DType::F16,
        "bfloat16" | "bf16" => DType::BF16,
        "float8_e4m3fn" | "float8_e4m3" | "e4m3" => DType::E4M3,
        "float8_e5m2" | "e5m2" => DType::E5M2,
        "float8_e8m0fnu" | "e8m0" => DType::E8M0,
        "float4_e2m1fn_x2" | "e2m1x2" => DType::E2M1x2,
        "int8" | "i8" => DType::I8,
        "int16" | "i16" => DType::I16,
        "int32" | "i32" => DType::I32,
        "int64" | "i64" => DType::I64,
        "uint8" | "u8" => DType::U8,
        "uint32" | "u32" => DType::U32,
        "bool" => DType::Bool,
        other => {
            return Err(PyTypeError::new_err(format!(
                "dtype {other}, expected float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, float8_e8m0fnu, \
                 float4_e2m1fn_x2, int8, int16, int32, int64, uint8, uint32 or bool"
            )));
        }
    })
}

impl<'a, 'py> FromPyObject<'a, 'py> for Arg {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let (py, object) = (object.py(), &*object);
        if let Some(api) = exchange_api(object) {
            let mut tensor = std::mem::MaybeUninit::<DlTensor>::uninit();
            let describe = api.tensor_from_object.ok_or_else(|| raised(py))?;
            // SAFETY: the function is that of the object's own type, and the interpreter's lock is held.
            if unsafe { describe(object.as_ptr().cast(), tensor.as_mut_ptr()) } != 0 {
                return Err(raised(py));
            }
            // SAFETY: it answered 0, so it filled the struct; what it tells stays while the caller holds the object.
            return unsafe { Self::borrowed(tensor.assume_init(), false, Stream::Exchange(api)) };
        }
        let has = |name| object.hasattr(name).unwrap_or(false);
        if has("data_ptr") && has("stride") && has("is_cuda") {
            return Self::from_torch(object);
        }
        if has("__dlpack__") && has("__dlpack_device__") {
            return Self::from_dlpack(object);
        }
        match object.getattr("__cuda_array_interface__") {
            Ok(interface) => Self::from_cuda_array(object, &interface),
            Err(_) => Err(PyTypeError::new_err(format!(
                "{}, expected a tensor: torch's, or one with __dlpack__ or __cuda_array_interface__",
                name_of(object)
            ))),
        }
    }
}

/// The one CPU executor of this process.
fn cpu() -> fir::Result<Exec> {
    static CPU: OnceLock<fir::Result<Exec>> = OnceLock::new();
    CPU.get_or_init(Exec::cpu).clone()
}

/// The device with this ordinal; its kernels are loaded once.
fn gpu(ordinal: u32) -> fir::Result<Gpu> {
    static GPUS: Mutex<Vec<(u32, Gpu)>> = Mutex::new(Vec::new());
    let mut gpus = GPUS.lock().unwrap_or_else(|e| e.into_inner());
    if let Some((_, gpu)) = gpus.iter().find(|(n, _)| *n == ordinal) {
        return Ok(gpu.clone());
    }
    let gpu = Gpu::new(ordinal)?;
    gpus.push((ordinal, gpu.clone()));
    Ok(gpu)
}

/// The executor of memory at `place`, without a stream of the caller's.
pub(crate) fn exec_at(place: Place) -> PyResult<Exec> {
    match place {
        Place::Host => cpu(),
        Place::Cuda(ordinal) => gpu(ordinal).map(Exec::Cuda),
        _ => Err(fir::Error::value("exec", "device", place, "host memory or a CUDA device")),
    }
    .map_err(to_py)
}

/// Where a tensor is computed on: the CPU, or its device on the stream that its library works on now.
pub(crate) fn exec_of(py: Python<'_>, tensor: &Arg) -> PyResult<Exec> {
    let Place::Cuda(ordinal) = tensor.place() else { return exec_at(tensor.place()) };
    let handle = match tensor.stream {
        Stream::Default => 0,
        Stream::Exchange(api) => {
            let mut stream = ptr::null_mut();
            let current = api.current_stream.ok_or_else(|| raised(py))?;
            // SAFETY: a function of the tensor's library, which asks for a kind of device and an ordinal.
            if unsafe { current(DEVICE_CUDA, ordinal as i32, &mut stream) } != 0 {
                return Err(raised(py));
            }
            stream.addr()
        }
        Stream::Torch => {
            static TORCH: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
            TORCH.import(py, "torch._C", "_cuda_getCurrentRawStream")?.call1((ordinal,))?.extract()?
        }
    };
    if let Some((at, exec)) = LAST.take().filter(|(at, _)| *at == (ordinal, handle)) {
        LAST.set(Some((at, exec.clone())));
        return Ok(exec);
    }
    let gpu = gpu(ordinal).map_err(to_py)?;
    let Some(own) = gpu.stream() else { return Ok(Exec::Cuda(gpu)) };
    // SAFETY: the stream that the tensor's library works on, of the primary context; such libraries keep theirs for the life of the
    // process, and one that its maker destroyed is not used again: see `LAST`.
    let stream = unsafe { own.foreign(handle) };
    let exec = gpu.on_stream(&stream).map(Exec::Cuda).map_err(to_py)?;
    LAST.set(Some(((ordinal, handle), exec.clone())));
    Ok(exec)
}

thread_local! {
    /// The executor of a device and a stream that a thread called last: most calls are on the same. Taken only when the tensor's
    /// library names that stream once more.
    static LAST: Cell<Option<((u32, usize), Exec)>> = const { Cell::new(None) };
}

/// Gets a call ready: where it runs, told by the first tensor, and copies of the inputs whose memory an output shares.
///
/// Two outputs that meet are refused; so are they on a device together with an input, unless the two are the same
/// elements, as kernels read a row before they write it.
pub(crate) fn prepare(py: Python<'_>, inputs: &mut [&mut Arg], outputs: &[&Arg]) -> PyResult<Exec> {
    let first = inputs.first().map(|a| &**a).or(outputs.first().copied());
    let exec = exec_of(py, first.ok_or_else(|| PyValueError::new_err("no tensor"))?)?;
    for (i, a) in outputs.iter().enumerate() {
        if outputs[..i].iter().any(|b| a.overlaps(b)) {
            return Err(PyValueError::new_err(format!("outputs {} and another share memory", i + 1)));
        }
    }
    for input in inputs.iter_mut() {
        let Some(output) = outputs.iter().find(|o| input.overlaps(o)) else { continue };
        match input.place() {
            Place::Host => input.copy()?,
            _ if input.range() == output.range() && input.layout() == output.layout() => {}
            _ => {
                return Err(PyValueError::new_err("an output shares memory with an input, and is not the same tensor"));
            }
        }
    }
    Ok(exec)
}
