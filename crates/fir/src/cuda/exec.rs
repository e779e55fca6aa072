//! [`Gpu`]: a device, a stream, and the kernels loaded so far.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, OnceLock};

use super::arch::Arch;
use super::driver::{Boxes, Buffer, Context, Function, Pinned, Properties, Stream, TensorMap};
use super::dry::{Launch, Recorder};
use super::jit::{self, Source};
use super::nvrtc::Nvrtc;
use crate::error::{Error, Result};
use crate::kv::{Ints, OnDevice, PageTable};
use crate::overrides::Override;
use crate::tensor::{DType, DeviceMemory, Layout, Place, Tensor, TensorRef};

/// A CUDA executor: a device and a stream on it. Cheap to clone; clones share both, and the loaded kernels.
///
/// Operators queue their work on the stream and return; outputs are there once it was waited for. Every tensor must be on
/// the device: see [`Tensor::to_device`], [`Gpu::zeros`] and [`crate::tensor::Foreign`].
#[derive(Clone)]
pub struct Gpu {
    device: Arc<Device>,
    lane: Lane,
    staged: bool,
    over: Option<Arc<dyn Override>>,
}

struct Device {
    properties: Properties,
    /// Major version of CUDA that the driver speaks.
    driver: i32,
    kernels: Mutex<HashMap<Source, Slot>>,
    /// Memory that copies start from, the longest unused first.
    staging: Mutex<VecDeque<Pinned>>,
}

/// Copies that may be under way before one is waited for.
const STAGED_COPIES: usize = 8;

type Slot = Arc<OnceLock<Result<Arc<Kernel>>>>;

#[derive(Clone)]
pub(super) enum Lane {
    Live(Stream),
    Dry(Arc<Recorder>),
}

/// A kernel that may be launched.
#[derive(Debug)]
pub(crate) struct Kernel {
    pub(super) source: Source,
    /// None on a dry run.
    pub(super) function: Option<Function>,
}

impl Kernel {
    /// Blocks of these sizes that one multiprocessor holds at a time; 1 on a dry run.
    #[expect(dead_code, reason = "for kernels whose grid fills the device once")]
    pub(crate) fn blocks_per_multiprocessor(&self, threads: u32, smem: u32) -> Result<u32> {
        self.function.as_ref().map_or(Ok(1), |f| f.blocks_per_multiprocessor(threads, smem))
    }
}

impl Gpu {
    /// The device with this ordinal, with a stream of its own.
    ///
    /// Says what is missing when there is no driver, no such device, one older than sm_80, or no NVRTC and no compiled
    /// kernels either.
    pub fn new(ordinal: u32) -> Result<Self> {
        let context = Context::new(ordinal)?;
        let driver = context.driver().0;
        if let Err(missing) = Nvrtc::get(driver)
            && !jit::any_built()?
        {
            return Err(missing);
        }
        let stream = Stream::new(&context)?;
        let properties = context.properties().clone();
        Ok(Self::with(properties, driver, Lane::Live(stream)))
    }

    /// No device at all: operators do everything up to the launch, which is recorded.
    pub fn dry(arch: Arch) -> Self {
        let (multiprocessors, shared_per_block) = arch.typical();
        let name = format!("no device, as {arch}");
        let properties =
            Properties { name, arch, multiprocessors, shared_per_block, l2_bytes: 50 << 20, memory_bytes: 80 << 30 };
        Self::with(properties, i32::MAX, Lane::Dry(Arc::default()))
    }

    fn with(properties: Properties, driver: i32, lane: Lane) -> Self {
        let device = Device { properties, driver, kernels: Mutex::default(), staging: Mutex::default() };
        Self { device: Arc::new(device), lane, staged: false, over: None }
    }

    /// The same device and stream, taking host tensors too: for tests and first steps. What a call reads is copied to the
    /// device before, what it writes is copied back after, and it waits.
    pub fn staged(&self) -> Self {
        Self { staged: true, ..self.clone() }
    }

    pub(crate) fn with_override(&self, over: Arc<dyn Override>) -> Self {
        Self { over: Some(over), ..self.clone() }
    }

    pub(crate) fn over(&self) -> Option<&dyn Override> {
        self.over.as_deref()
    }

    /// The same device on another stream of it.
    pub fn on_stream(&self, stream: &Stream) -> Result<Self> {
        match &self.lane {
            Lane::Live(own) if own.context().ordinal() == stream.context().ordinal() => {
                Ok(Self { lane: Lane::Live(stream.clone()), ..self.clone() })
            }
            _ => Err(Error::place("Gpu::on_stream", "stream", format!("{:?}", stream.context()), format!("{self:?}"))),
        }
    }

    /// What the device is.
    pub fn properties(&self) -> &Properties {
        &self.device.properties
    }

    /// The stream that work is queued on; none on a dry run.
    pub fn stream(&self) -> Option<&Stream> {
        match &self.lane {
            Lane::Live(stream) => Some(stream),
            Lane::Dry(_) => None,
        }
    }

    /// Where its tensors are; host memory on a dry run.
    pub(crate) fn place(&self) -> Place {
        self.stream().map_or(Place::Host, |s| Place::Cuda(s.context().ordinal()))
    }

    /// Waits until everything queued so far is done.
    pub fn synchronize(&self) -> Result<()> {
        self.stream().map_or(Ok(()), Stream::synchronize)
    }

    /// Zeros on the device. Dropped, they are freed in the order of this stream: whoever used them on another one waits for
    /// that first.
    pub fn zeros(&self, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        let layout = Layout::contiguous("Gpu::zeros", "shape", shape)?;
        let buffer = Buffer::new(self.live("Gpu::zeros")?, layout.len() * dtype.size())?;
        buffer.fill(0, layout.len() * dtype.size())?;
        Tensor::on_device(Box::new(buffer), dtype, layout)
    }

    /// What a dry run recorded since the last time.
    pub fn launches(&self) -> Vec<Launch> {
        match &self.lane {
            Lane::Live(_) => Vec::new(),
            Lane::Dry(recorder) => recorder.take(),
        }
    }

    /// The stream, of a device that is there.
    fn live(&self, op: &'static str) -> Result<&Stream> {
        self.stream().ok_or_else(|| Error::Unsupported { op, why: vec!["a dry run has no memory".into()] })
    }

    pub(super) fn lane(&self) -> &Lane {
        &self.lane
    }

    /// Major version of CUDA that the driver knows.
    pub(super) fn driver(&self) -> i32 {
        self.device.driver
    }

    pub(super) fn takes_host_tensors(&self) -> bool {
        self.staged || matches!(self.lane, Lane::Dry(_))
    }

    /// Queues a copy of `parts`, one after the other, to the beginning of `to`, on its stream. Each copy starts from pinned memory
    /// of its own, which is used again once that copy is done.
    pub(super) fn send(&self, parts: &[&[u8]], to: &Buffer) -> Result<()> {
        let len = parts.iter().map(|part| part.len()).sum();
        let free = {
            let mut staging = self.device.staging.lock().unwrap_or_else(|e| e.into_inner());
            if staging.len() < STAGED_COPIES { None } else { staging.pop_front() }
        };
        let mut pinned = match free.filter(|p| p.len() >= len) {
            Some(pinned) => pinned,
            None => Pinned::new(to.stream(), len.next_power_of_two().max(4096))?,
        };
        let sent = pinned.send(parts, to);
        self.device.staging.lock().unwrap_or_else(|e| e.into_inner()).push_back(pinned);
        sent
    }

    /// A map of a tensor for the copy engine.
    pub(super) fn tensor_map(&self, of: &Boxes<'_>) -> Result<TensorMap> {
        match &self.lane {
            Lane::Live(stream) => stream.context().tensor_map(of),
            Lane::Dry(_) => Ok(of.described()),
        }
    }

    /// The kernel, compiled and loaded unless it was before.
    pub(crate) fn kernel(&self, source: Source) -> Result<Arc<Kernel>> {
        let slot = {
            let mut kernels = self.device.kernels.lock().unwrap_or_else(|e| e.into_inner());
            match kernels.get(&source) {
                Some(slot) => slot.clone(),
                None => kernels.entry(source.clone()).or_default().clone(),
            }
        };
        slot.get_or_init(|| {
            let function = match &self.lane {
                Lane::Dry(_) => None,
                Lane::Live(stream) => {
                    let (cubin, _) = jit::cubin(&source, self.device.properties.arch, self.device.driver)?;
                    Some(Function::load(stream.context(), &cubin.image, &cubin.symbol)?)
                }
            };
            Ok(Arc::new(Kernel { source, function }))
        })
        .clone()
    }
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.lane {
            Lane::Live(stream) => write!(f, "{:?}", stream.context())?,
            Lane::Dry(_) => f.write_str(&self.device.properties.name)?,
        }
        f.write_str(if self.staged { ", staged" } else { "" })
    }
}

impl Tensor {
    /// A copy on the device of `gpu`, from the host or from that device; waits for it.
    pub fn to_device(&self, gpu: &Gpu) -> Result<Self> {
        const OP: &str = "Tensor::to_device";
        let (view, stream) = (self.view(), gpu.live(OP)?);
        let bytes = view.layout().len() * self.dtype().size();
        let layout = *view.layout();
        match view.span() {
            None => {
                let buffer = Buffer::new(stream, bytes)?;
                buffer.write(0, &view.host_bytes(OP, "self")?[..bytes])?;
                Self::on_device(Box::new(buffer), self.dtype(), layout)
            }
            Some(span) if span.ordinal == stream.context().ordinal() => Ok(self.clone()),
            Some(_) => Err(Error::place(OP, "self", self.place(), format!("host memory, or {gpu:?}"))),
        }
    }
}

impl<'a> PageTable<'a> {
    /// The table with a copy on the device of `gpu`, for all layers of a step. The copy is queued on its stream;
    /// nobody waits.
    pub fn to_device(&self, gpu: &Gpu) -> Result<Self> {
        self.clone().into_device(gpu)
    }

    /// [`Self::to_device`] of a table that is not needed without it.
    pub fn into_device(self, gpu: &Gpu) -> Result<Self> {
        self.into_device_over(gpu, None)
    }

    /// [`Self::into_device`] into the memory of a table that nobody needs any more, if it has enough of it on that stream and no
    /// clones: a step of 256 requests took 6 to 9 µs more to plan on the host of an H200 with memory allocated for each, and ids looked at
    /// twice. What still reads that table on other streams must be waited for.
    pub fn into_device_over(self, gpu: &Gpu, spent: Option<PageTable<'_>>) -> Result<Self> {
        const OP: &str = "PageTable::to_device";
        self.check_host(OP)?;
        let [indptr, indices] = ints(OP, gpu, [self.indptr(), self.indices()], spent)?;
        Ok(self.with_device(OnDevice { indptr, indices }))
    }

    /// A table whose page ids are on a device already, `[slots]`, i32, contiguous; the rest as in
    /// [`PageTable::with_lens`]. Nobody looks at the ids before the kernels do, which take an id past the pool for that of
    /// its last page.
    pub fn on_device(
        gpu: &Gpu,
        page_size: usize,
        num_pages: usize,
        indptr: &[i32],
        indices: TensorRef<'a>,
        lens: &[i32],
    ) -> Result<Self> {
        const OP: &str = "PageTable::on_device";
        let slots = check_ints(OP, "indices", gpu, indices)?;
        let [indptr_there, _] = ints(OP, gpu, [indptr, &[]], None)?;
        let device = OnDevice { indptr: indptr_there, indices: Ints::Borrowed(indices) };
        Self::with_device_ids(page_size, num_pages, indptr.to_vec(), device, slots, lens)
    }

    /// [`Self::on_device`] whose offsets are in the caller's memory there too, `[batch + 1]` or more, i32, and the same
    /// numbers as `indptr`: a graph that was recorded with the table reads what stands in both when it is replayed.
    pub fn in_buffers(
        gpu: &Gpu,
        page_size: usize,
        num_pages: usize,
        indptr: (&[i32], TensorRef<'a>),
        indices: TensorRef<'a>,
        lens: &[i32],
    ) -> Result<Self> {
        const OP: &str = "PageTable::in_buffers";
        let slots = check_ints(OP, "indices", gpu, indices)?;
        let (host, offsets) = indptr;
        let room = check_ints(OP, "indptr", gpu, offsets)?;
        if room < host.len() {
            return Err(Error::layout(OP, "indptr", format!("[{room}]"), format!("[{}] or more", host.len())));
        }
        let device = OnDevice { indptr: Ints::Borrowed(offsets), indices: Ints::Borrowed(indices) };
        Self::with_device_ids(page_size, num_pages, host.to_vec(), device, slots, lens)
    }
}

/// How many numbers a list of i32 on the device of `gpu` has.
fn check_ints(op: &'static str, arg: &'static str, gpu: &Gpu, list: TensorRef<'_>) -> Result<usize> {
    if list.dtype() != DType::I32 {
        return Err(Error::DType { op, arg, got: list.dtype().name(), want: "i32".into() });
    }
    if list.shape().len() != 1 || !list.layout().is_contiguous() {
        let got = format!("shape {:?}, strides {:?}", list.shape(), list.strides());
        return Err(Error::layout(op, arg, got, "one axis, contiguous"));
    }
    let own = gpu.live(op)?.context().ordinal();
    if list.place() != Place::Cuda(own) {
        return Err(Error::place(op, arg, list.place(), Place::Cuda(own)));
    }
    Ok(list.shape()[0])
}

/// Copies of two lists on the device, queued as one: with memory and a copy of its own for each, a plan of 256 took 5 µs more.
/// Into the memory of `spent`, if that will do.
fn ints(op: &'static str, gpu: &Gpu, lists: [&[i32]; 2], spent: Option<PageTable<'_>>) -> Result<[Ints<'static>; 2]> {
    const LINE: usize = 32;
    let [first, second] = lists.map(|list| list.len());
    let at = first.next_multiple_of(LINE);
    let (stream, len) = (gpu.live(op)?, (at + second) * size_of::<i32>());
    let spent = spent.and_then(PageTable::into_device_memory).and_then(Tensor::into_device_memory);
    let spent = spent.and_then(|memory| (memory as Box<dyn Any>).downcast::<Buffer>().ok());
    let buffer = match spent.filter(|b| b.stream().handle() == stream.handle() && b.span().len >= len) {
        Some(buffer) => buffer,
        // Requests grow from step to step.
        None => Box::new(Buffer::new(stream, len.next_power_of_two())?),
    };
    let rest = &[0; LINE][..at - first];
    gpu.send(&[lists[0], rest, lists[1]].map(bytemuck::cast_slice), &buffer)?;
    let layout = Layout::contiguous(op, "values", &[at + second])?;
    let all = Arc::new(Tensor::on_device(buffer, DType::I32, layout)?);
    Ok([Ints::Owned(all.clone(), 0, first), Ints::Owned(all, at, second)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_may_be_shared_by_threads() {
        fn shared<T: Send + Sync>() {}
        shared::<Gpu>();
        shared::<Stream>();
        shared::<Tensor>();
    }

    #[test]
    fn a_dry_run_has_no_memory_and_says_so() {
        let gpu = Gpu::dry(Arch::HOPPER).staged();
        assert_eq!(format!("{gpu:?}"), "no device, as sm_90a, staged");
        let refused = gpu.zeros(DType::F32, &[4]).unwrap_err().to_string();
        assert_eq!(refused, "Gpu::zeros: no kernel for this problem:\n  a dry run has no memory");
        assert!(gpu.stream().is_none() && gpu.synchronize().is_ok() && gpu.launches().is_empty());
    }
}
