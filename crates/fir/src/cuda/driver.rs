//! The CUDA driver: context, streams, memory, events, modules and launches, as values that free themselves.
//!
//! libcuda is loaded when the first device is asked for, and its functions are looked up by name with the types below.
//! Answers are plain integers: a driver newer than this file may answer a code that no list of ours has.
//!
//! Only a device's primary context is used, so memory and streams are shared with other libraries in the process. It
//! is made current for the duration of a call and the caller's is put back, so that a program with several devices is
//! not moved to another one.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr;
use std::sync::{Arc, OnceLock};

use super::arch::Arch;
use crate::error::{Error, Result};
use crate::tensor::{DeviceMemory, Span};

/// A struct of functions that a shared library must have, all of which answer an integer.
macro_rules! library {
    ($(#[$doc:meta])* struct $name:ident { $($function:ident($($arg:ty),*);)* }) => {
        $(#[$doc])*
        #[allow(non_snake_case)]
        struct $name {
            $($function: unsafe extern "C" fn($($arg),*) -> i32,)*
        }
        impl $name {
            /// Looks every function up; the name of the first that is not there.
            ///
            /// # Safety
            /// The library's functions of these names have these types, and `library` is never closed.
            unsafe fn load(library: &libloading::Library) -> Result<Self, &'static str> {
                Ok(Self {
                    // SAFETY: the caller's promise.
                    $($function: *unsafe { library.get(stringify!($function)) }
                        .map_err(|_| stringify!($function))?,)*
                })
            }
        }
    };
}
pub(super) use library;

/// An opaque pointer of the driver's.
type Handle = *mut c_void;

library! {
    struct Api {
        cuCtxGetCurrent(*mut Handle);
        cuCtxPopCurrent_v2(*mut Handle);
        cuCtxPushCurrent_v2(Handle);
        cuDeviceGet(*mut i32, i32);
        cuDeviceGetAttribute(*mut i32, i32, i32);
        cuDeviceGetCount(*mut i32);
        cuDeviceGetDefaultMemPool(*mut Handle, i32);
        cuDeviceGetName(*mut c_char, i32, i32);
        cuDevicePrimaryCtxRelease_v2(i32);
        cuDevicePrimaryCtxRetain(*mut Handle, i32);
        cuDeviceTotalMem_v2(*mut usize, i32);
        cuDriverGetVersion(*mut i32);
        cuEventCreate(*mut Handle, u32);
        cuEventDestroy_v2(Handle);
        cuEventElapsedTime(*mut f32, Handle, Handle);
        cuEventRecord(Handle, Handle);
        cuEventSynchronize(Handle);
        cuFuncGetAttribute(*mut i32, i32, Handle);
        cuFuncSetAttribute(Handle, i32, i32);
        cuGetErrorName(i32, *mut *const c_char);
        cuInit(u32);
        cuLaunchKernelEx(*const Config, Handle, *mut *mut c_void, *mut *mut c_void);
        cuMemAllocAsync(*mut u64, usize, Handle);
        cuMemAllocHost_v2(*mut *mut c_void, usize);
        cuMemAlloc_v2(*mut u64, usize);
        cuMemFreeAsync(u64, Handle);
        cuMemFreeHost(*mut c_void);
        cuMemFree_v2(u64);
        cuMemPoolGetAttribute(Handle, i32, *mut c_void);
        cuMemPoolSetAttribute(Handle, i32, *mut c_void);
        cuMemcpyDtoDAsync_v2(u64, u64, usize, Handle);
        cuMemcpyDtoHAsync_v2(*mut c_void, u64, usize, Handle);
        cuMemcpyHtoDAsync_v2(u64, *const c_void, usize, Handle);
        cuMemsetD8Async(u64, u8, usize, Handle);
        cuModuleGetFunction(*mut Handle, Handle, *const c_char);
        cuModuleLoadData(*mut Handle, *const c_void);
        cuModuleUnload(Handle);
        cuOccupancyMaxActiveBlocksPerMultiprocessor(*mut i32, Handle, i32, usize);
        cuStreamCreate(*mut Handle, u32);
        cuStreamDestroy_v2(Handle);
        cuStreamSynchronize(Handle);
        cuStreamWaitEvent(Handle, Handle, u32);
    }
}

/// `CUlaunchConfig`.
#[repr(C)]
struct Config {
    grid: [u32; 3],
    block: [u32; 3],
    smem: u32,
    stream: Handle,
    attributes: *const Attribute,
    count: u32,
}

/// `CUlaunchAttribute`: its number, padding, and 64 bytes of value.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct Attribute {
    id: u32,
    padding: u32,
    value: [u32; 16],
}

// The C compiler's sizes.
const _: () = assert!(size_of::<Config>() == 56 && size_of::<Attribute>() == 72);

const ATTRIBUTE_MULTIPROCESSORS: i32 = 16;
const ATTRIBUTE_L2_BYTES: i32 = 38;
const ATTRIBUTE_CAPABILITY: [i32; 2] = [75, 76];
const ATTRIBUTE_SHARED_PER_BLOCK: i32 = 97;
const ATTRIBUTE_MEMORY_POOLS: i32 = 115;
const FUNCTION_STATIC_SHARED: i32 = 1;
const FUNCTION_DYNAMIC_SHARED: i32 = 8;
const FUNCTION_LARGE_CLUSTERS: i32 = 14;
const LAUNCH_CLUSTER: u32 = 4;
const LAUNCH_EARLY: u32 = 6;
const POOL_RELEASE_THRESHOLD: i32 = 4;
const STREAM_NON_BLOCKING: u32 = 1;

/// The driver's functions, or why there are none.
fn api() -> Result<&'static Api> {
    static API: OnceLock<Result<Api>> = OnceLock::new();
    API.get_or_init(|| {
        let missing =
            |got: String, hint: &str| Error::Unavailable { what: "a CUDA device".into(), got, hint: hint.into() };
        // SAFETY: the driver's library runs no code of ours when it is loaded.
        let library = unsafe { libloading::Library::new("libcuda.so.1") }
            .map_err(|e| missing(e.to_string(), "an NVIDIA driver is needed, 525 or newer"))?;
        // Never closed: kernels and memory may outlive every value that we could tie it to.
        let library = Box::leak(Box::new(library));
        // SAFETY: these are the types of cuda.h, and the library was leaked.
        let api = unsafe { Api::load(library) }.map_err(|name| {
            missing(format!("libcuda.so.1 has no {name}"), "an NVIDIA driver of 525 or newer is needed")
        })?;
        // SAFETY: plain call of the first function that must be called.
        api.check("cuInit", unsafe { (api.cuInit)(0) })
            .map_err(|e| missing(e.to_string(), "see whether `nvidia-smi` lists a device"))?;
        Ok(api)
    })
    .as_ref()
    .map_err(Clone::clone)
}

impl Api {
    fn check(&self, call: &'static str, code: i32) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let mut name = ptr::null();
        // SAFETY: the driver writes a pointer to one of its constants, or null for a code it does not know.
        let known = unsafe { (self.cuGetErrorName)(code, &mut name) } == 0 && !name.is_null();
        let name = if known {
            // SAFETY: `name` is one of the driver's constant strings.
            unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
        } else {
            "unknown".into()
        };
        Err(Error::Driver { call, code, name })
    }
}

/// Calls a function of the driver and checks its answer.
macro_rules! call {
    ($api:expr, $function:ident($($arg:expr),* $(,)?)) => {{
        let api = $api;
        // SAFETY: every pointer below is to a live value of the type that the function writes or reads, every handle is
        // one that the driver gave us and that its owner has not freed; the context is current where it has to be.
        let code = unsafe { (api.$function)($($arg),*) };
        api.check(stringify!($function), code)
    }};
}

/// What a device is.
#[derive(Clone, Debug, PartialEq)]
pub struct Properties {
    /// Its name.
    pub name: String,
    /// Architecture that kernels are compiled for.
    pub arch: Arch,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Most shared memory of a block, in bytes.
    pub shared_per_block: u32,
    /// Bytes of its level-2 cache.
    pub l2_bytes: usize,
    /// Bytes of its memory.
    pub memory_bytes: usize,
}

/// A device's primary context, retained until the last user is gone.
pub(crate) struct Context {
    api: &'static Api,
    raw: Handle,
    device: i32,
    ordinal: u32,
    pools: bool,
    properties: Properties,
    /// CUDA version that the driver speaks: 13000 is 13.0.
    driver: i32,
}

// SAFETY: the driver's functions may be called from any thread; a context is made current in each call.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// Puts the caller's context back.
struct Current<'a>(Option<&'a Context>);

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if let Some(context) = self.0 {
            let mut popped = ptr::null_mut();
            // What was pushed comes off; there is nothing to do about a driver that is shutting down.
            let _ = call!(context.api, cuCtxPopCurrent_v2(&mut popped));
        }
    }
}

impl Context {
    pub(crate) fn new(ordinal: u32) -> Result<Arc<Self>> {
        let api = api()?;
        let (mut driver, mut count, mut device) = (0, 0, 0);
        call!(api, cuDriverGetVersion(&mut driver))?;
        call!(api, cuDeviceGetCount(&mut count))?;
        if i64::from(ordinal) >= i64::from(count) {
            return Err(Error::value(
                "Exec::cuda",
                "ordinal",
                ordinal,
                format!("less than the {count} devices there are"),
            ));
        }
        call!(api, cuDeviceGet(&mut device, ordinal as i32))?;
        let attribute = |id: i32| -> Result<u32> {
            let mut value = 0;
            call!(api, cuDeviceGetAttribute(&mut value, id, device))?;
            Ok(value.try_into().unwrap_or(0))
        };
        let mut name = [0 as c_char; 128];
        call!(api, cuDeviceGetName(name.as_mut_ptr(), 127, device))?;
        // SAFETY: the driver wrote a string of at most 127 characters, and the last one is 0 as it was.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let mut memory_bytes = 0;
        call!(api, cuDeviceTotalMem_v2(&mut memory_bytes, device))?;
        let [major, minor] = ATTRIBUTE_CAPABILITY;
        let arch = Arch::of(attribute(major)?, attribute(minor)?);
        if arch < Arch::OLDEST {
            return Err(Error::Unavailable {
                what: format!("kernels for {name}"),
                got: format!("{arch}"),
                hint: format!("they need {} (Ampere) or newer", Arch::OLDEST),
            });
        }
        let properties = Properties {
            name,
            arch,
            multiprocessors: attribute(ATTRIBUTE_MULTIPROCESSORS)?,
            shared_per_block: attribute(ATTRIBUTE_SHARED_PER_BLOCK)?,
            l2_bytes: attribute(ATTRIBUTE_L2_BYTES)? as usize,
            memory_bytes,
        };
        let pools = attribute(ATTRIBUTE_MEMORY_POOLS)? != 0;
        let mut raw = ptr::null_mut();
        call!(api, cuDevicePrimaryCtxRetain(&mut raw, device))?;
        let context = Arc::new(Self { api, raw, device, ordinal, pools, properties, driver });
        if pools {
            context.keep_freed_memory()?;
        }
        Ok(context)
    }

    /// The default pool gives freed memory back at every wait, and the next allocation takes it again at some 100 µs.
    /// It keeps it instead, unless the program chose otherwise already.
    fn keep_freed_memory(&self) -> Result<()> {
        let (mut pool, mut threshold) = (ptr::null_mut(), 0u64);
        call!(self.api, cuDeviceGetDefaultMemPool(&mut pool, self.device))?;
        call!(self.api, cuMemPoolGetAttribute(pool, POOL_RELEASE_THRESHOLD, (&raw mut threshold).cast()))?;
        if threshold == 0 {
            threshold = u64::MAX;
            call!(self.api, cuMemPoolSetAttribute(pool, POOL_RELEASE_THRESHOLD, (&raw mut threshold).cast()))?;
        }
        Ok(())
    }

    pub(crate) fn properties(&self) -> &Properties {
        &self.properties
    }

    pub(crate) fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// CUDA version that the driver speaks, major and minor.
    pub(crate) fn driver(&self) -> (i32, i32) {
        (self.driver / 1000, self.driver % 1000 / 10)
    }

    /// Makes the context current until the value is dropped.
    fn enter(&self) -> Result<Current<'_>> {
        let mut current = ptr::null_mut();
        call!(self.api, cuCtxGetCurrent(&mut current))?;
        if current == self.raw {
            return Ok(Current(None));
        }
        call!(self.api, cuCtxPushCurrent_v2(self.raw))?;
        Ok(Current(Some(self)))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let _ = call!(self.api, cuDevicePrimaryCtxRelease_v2(self.device));
    }
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cuda:{} ({}, {})", self.ordinal, self.properties.name, self.properties.arch)
    }
}

/// A queue of work on a device: launches and copies on one stream run in order. Clones share it.
#[derive(Clone, Debug)]
pub struct Stream(Arc<StreamInner>);

#[derive(Debug)]
struct StreamInner {
    context: Arc<Context>,
    raw: Handle,
    owned: bool,
}

// SAFETY: a stream may be used from any thread.
unsafe impl Send for StreamInner {}
// SAFETY: as above; the driver serializes.
unsafe impl Sync for StreamInner {}

impl Drop for StreamInner {
    fn drop(&mut self) {
        if self.owned
            && let Ok(_current) = self.context.enter()
        {
            // The driver lets queued work finish first.
            let _ = call!(self.context.api, cuStreamDestroy_v2(self.raw));
        }
    }
}

impl Stream {
    /// A stream of its own, which does not wait for the default one.
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self> {
        let (_current, mut raw) = (context.enter()?, ptr::null_mut());
        call!(context.api, cuStreamCreate(&mut raw, STREAM_NON_BLOCKING))?;
        Ok(Self(Arc::new(StreamInner { context: context.clone(), raw, owned: true })))
    }

    /// Another library's stream on the device of `self`, by its handle: a `cudaStream_t` or `CUstream`; 0 is the default
    /// stream.
    ///
    /// # Safety
    /// `handle` is 0 or a stream of the device's primary context, and lives until the value and all that was made with
    /// it are dropped.
    pub unsafe fn foreign(&self, handle: usize) -> Self {
        let raw = ptr::with_exposed_provenance_mut(handle);
        Self(Arc::new(StreamInner { context: self.0.context.clone(), raw, owned: false }))
    }

    /// Its handle, a `CUstream`.
    pub fn handle(&self) -> usize {
        self.0.raw.expose_provenance()
    }

    /// Waits until everything on it is done.
    pub fn synchronize(&self) -> Result<()> {
        let _current = self.0.context.enter()?;
        call!(self.0.context.api, cuStreamSynchronize(self.0.raw))
    }

    /// A mark after what is on it now.
    pub fn record(&self) -> Result<Event> {
        let (_current, mut raw) = (self.0.context.enter()?, ptr::null_mut());
        call!(self.0.context.api, cuEventCreate(&mut raw, 0))?;
        let event = Event { context: self.0.context.clone(), raw };
        call!(event.context.api, cuEventRecord(raw, self.0.raw))?;
        Ok(event)
    }

    /// Lets what comes next wait for `event`, which may be of another stream.
    pub fn wait(&self, event: &Event) -> Result<()> {
        let _current = self.0.context.enter()?;
        call!(self.0.context.api, cuStreamWaitEvent(self.0.raw, event.raw, 0))
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.0.context
    }
}

/// A mark on a stream.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    raw: Handle,
}

// SAFETY: an event may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Waits for it.
    pub fn synchronize(&self) -> Result<()> {
        let _current = self.context.enter()?;
        call!(self.context.api, cuEventSynchronize(self.raw))
    }

    /// Milliseconds from `earlier` to this; waits for both.
    pub fn since(&self, earlier: &Event) -> Result<f32> {
        let (_current, mut ms) = (self.context.enter()?, 0.0);
        for event in [earlier, self] {
            call!(self.context.api, cuEventSynchronize(event.raw))?;
        }
        call!(self.context.api, cuEventElapsedTime(&mut ms, earlier.raw, self.raw))?;
        Ok(ms)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            let _ = call!(self.context.api, cuEventDestroy_v2(self.raw));
        }
    }
}

/// Memory of a device, freed in the order of its stream.
pub(crate) struct Buffer {
    stream: Stream,
    address: u64,
    len: usize,
}

impl Buffer {
    /// Memory with anything in it. A buffer of no bytes has no address.
    pub(crate) fn new(stream: &Stream, len: usize) -> Result<Self> {
        let (context, mut address) = (stream.context(), 0);
        if len > 0 {
            let _current = context.enter()?;
            if context.pools {
                call!(context.api, cuMemAllocAsync(&mut address, len, stream.0.raw))?;
            } else {
                call!(context.api, cuMemAlloc_v2(&mut address, len))?;
            }
        }
        Ok(Self { stream: stream.clone(), address, len })
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Sets the first `len` bytes.
    pub(crate) fn fill(&self, byte: u8, len: usize) -> Result<()> {
        self.check(0, len)?;
        if len == 0 {
            return Ok(());
        }
        let context = self.stream.context();
        let _current = context.enter()?;
        call!(context.api, cuMemsetD8Async(self.address, byte, len, self.stream.0.raw))
    }

    /// Copies `bytes` to `at`. They must not change until the stream was waited for: pinned memory is read later.
    fn queue_write(&self, at: usize, bytes: &[u8]) -> Result<()> {
        self.check(at, bytes.len())?;
        if bytes.is_empty() {
            return Ok(());
        }
        let (context, to) = (self.stream.context(), self.address + at as u64);
        let _current = context.enter()?;
        call!(context.api, cuMemcpyHtoDAsync_v2(to, bytes.as_ptr().cast(), bytes.len(), self.stream.0.raw))
    }

    /// Copies `bytes` to `at`, and waits.
    pub(crate) fn write(&self, at: usize, bytes: &[u8]) -> Result<()> {
        let queued = self.queue_write(at, bytes);
        self.stream.synchronize().and(queued)
    }

    /// Copies from `at` into `out`, after what is on the stream, and waits.
    pub(crate) fn read(&self, at: usize, out: &mut [u8]) -> Result<()> {
        self.check(at, out.len())?;
        if out.is_empty() {
            return Ok(());
        }
        let (context, from) = (self.stream.context(), self.address + at as u64);
        let _current = context.enter()?;
        let queued =
            call!(context.api, cuMemcpyDtoHAsync_v2(out.as_mut_ptr().cast(), from, out.len(), self.stream.0.raw));
        self.stream.synchronize().and(queued)
    }

    fn check(&self, at: usize, len: usize) -> Result<()> {
        if at.checked_add(len).is_some_and(|end| end <= self.len) {
            return Ok(());
        }
        Err(Error::value("copy", "bytes", format!("{len} at {at}"), format!("within {}", self.len)))
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes of {:?}", self.len, self.stream.context())
    }
}

/// Pinned memory of the host, from which a device copies while the host goes on.
pub(crate) struct Pinned {
    context: Arc<Context>,
    start: *mut c_void,
    len: usize,
    /// After the copy that reads it.
    busy: Option<Event>,
}

// SAFETY: plain memory, which one owner writes.
unsafe impl Send for Pinned {}
// SAFETY: shared, it is not touched at all.
unsafe impl Sync for Pinned {}

impl Pinned {
    pub(crate) fn new(stream: &Stream, len: usize) -> Result<Self> {
        let (context, mut start) = (stream.context().clone(), ptr::null_mut());
        if len > 0 {
            let _current = context.enter()?;
            call!(context.api, cuMemAllocHost_v2(&mut start, len))?;
        }
        Ok(Self { context, start, len, busy: None })
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Queues a copy of `bytes` to the beginning of `to`. Waits for its own last copy alone.
    pub(crate) fn send(&mut self, bytes: &[u8], to: &Buffer) -> Result<()> {
        if bytes.len() > self.len {
            return Err(Error::value("copy", "bytes", bytes.len(), format!("at most {}", self.len)));
        }
        if bytes.is_empty() {
            return Ok(());
        }
        if let Some(event) = self.busy.take() {
            event.synchronize()?;
        }
        // SAFETY: `len` bytes are ours from `start` on, and no copy reads them: the last one was waited for.
        let memory = unsafe { std::slice::from_raw_parts_mut(self.start.cast::<u8>(), bytes.len()) };
        memory.copy_from_slice(bytes);
        let queued = to.queue_write(0, memory);
        match to.stream.record() {
            Ok(event) => self.busy = Some(event),
            // Without a mark there is only this way to know when the copy is over.
            Err(_) => to.stream.synchronize()?,
        }
        queued
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Some(event) = &self.busy {
            let _ = event.synchronize();
        }
        if self.len > 0
            && let Ok(_current) = self.context.enter()
        {
            let _ = call!(self.context.api, cuMemFreeHost(self.start));
        }
    }
}

impl DeviceMemory for Buffer {
    fn span(&self) -> Span {
        Span { address: self.address, len: self.len, ordinal: self.stream.context().ordinal }
    }

    fn duplicate(&self) -> Result<Box<dyn DeviceMemory>> {
        let (context, copy) = (self.stream.context(), Self::new(&self.stream, self.len)?);
        if self.len > 0 {
            let _current = context.enter()?;
            call!(context.api, cuMemcpyDtoDAsync_v2(copy.address, self.address, self.len, self.stream.0.raw))?;
        }
        Ok(Box::new(copy))
    }

    fn read(&self, out: &mut [u8]) -> Result<()> {
        self.read(0, out)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let context = self.stream.context();
        if self.len > 0
            && let Ok(_current) = context.enter()
        {
            let _ = if context.pools {
                call!(context.api, cuMemFreeAsync(self.address, self.stream.0.raw))
            } else {
                call!(context.api, cuMemFree_v2(self.address))
            };
        }
    }
}

/// How a kernel is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grid {
    /// Blocks.
    pub(crate) grid: [u32; 3],
    /// Threads of a block.
    pub(crate) block: [u32; 3],
    /// Dynamic shared memory of a block, in bytes.
    pub(crate) smem: u32,
    /// Blocks of a cluster; 1 for none. Needs sm_90.
    pub(crate) cluster: u32,
    /// Starts before the kernel ahead of it has ended (sm_90 on): the kernel must run `griddepcontrol.wait` in every
    /// block before it touches memory.
    pub(crate) early: bool,
}

impl Grid {
    /// Blocks in a row, of threads in a row.
    pub(crate) const fn new(blocks: u32, threads: u32) -> Self {
        Self { grid: [blocks, 1, 1], block: [threads, 1, 1], smem: 0, cluster: 1, early: false }
    }
}

/// A kernel on a device.
#[derive(Debug)]
pub(crate) struct Function {
    context: Arc<Context>,
    module: Handle,
    raw: Handle,
}

// SAFETY: a module may be used from any thread.
unsafe impl Send for Function {}
// SAFETY: as above; its attributes are set before it is shared.
unsafe impl Sync for Function {}

impl Function {
    /// Loads a cubin and finds the kernel `symbol` in it.
    pub(crate) fn load(context: &Arc<Context>, cubin: &[u8], symbol: &str) -> Result<Self> {
        let name = CString::new(symbol).map_err(|_| Error::value("Function::load", "symbol", symbol, "no 0 in it"))?;
        let (_current, mut module, mut raw) = (context.enter()?, ptr::null_mut(), ptr::null_mut());
        // The driver finds the end of an image by its headers, which a checked file holds whole.
        call!(context.api, cuModuleLoadData(&mut module, cubin.as_ptr().cast()))?;
        let mut function = Self { context: context.clone(), module, raw };
        call!(context.api, cuModuleGetFunction(&mut raw, module, name.as_ptr()))?;
        function.raw = raw;
        // As much as the device has, once: what a launch asks for decides how many blocks run beside each other.
        let mut fixed = 0;
        call!(context.api, cuFuncGetAttribute(&mut fixed, FUNCTION_STATIC_SHARED, raw))?;
        let most = context.properties.shared_per_block as i32 - fixed;
        call!(context.api, cuFuncSetAttribute(raw, FUNCTION_DYNAMIC_SHARED, most))?;
        if context.properties.arch >= Arch::HOPPER {
            call!(context.api, cuFuncSetAttribute(raw, FUNCTION_LARGE_CLUSTERS, 1))?;
        }
        Ok(function)
    }

    /// Blocks of these sizes that one multiprocessor holds at a time.
    pub(crate) fn blocks_per_multiprocessor(&self, threads: u32, smem: u32) -> Result<u32> {
        let (_current, mut blocks) = (self.context.enter()?, 0);
        call!(
            self.context.api,
            cuOccupancyMaxActiveBlocksPerMultiprocessor(&mut blocks, self.raw, threads as i32, smem as usize)
        )?;
        Ok(blocks.try_into().unwrap_or(0))
    }

    /// Queues it on `stream` with one parameter, of these bytes.
    ///
    /// [`super::call::Call`] alone calls this: it holds the borrows of all memory whose addresses are in `params`, and a
    /// kernel's text was compiled with an assertion that its parameter has the size and the fields of the Rust twin.
    pub(super) fn launch(&self, stream: &Stream, grid: Grid, params: &[u8]) -> Result<()> {
        let mut attributes = [Attribute { id: 0, padding: 0, value: [0; 16] }; 2];
        let mut count = 0;
        if grid.cluster > 1 {
            attributes[count].id = LAUNCH_CLUSTER;
            attributes[count].value[..3].copy_from_slice(&[grid.cluster, 1, 1]);
            count += 1;
        }
        if grid.early && self.context.properties.arch >= Arch::HOPPER {
            attributes[count].id = LAUNCH_EARLY;
            attributes[count].value[0] = 1;
            count += 1;
        }
        let config = Config {
            grid: grid.grid,
            block: grid.block,
            smem: grid.smem,
            stream: stream.0.raw,
            attributes: attributes.as_ptr(),
            count: count as u32,
        };
        let mut pointers = [params.as_ptr().cast_mut().cast::<c_void>()];
        let _current = self.context.enter()?;
        // The parameter's bytes are copied before the call returns.
        call!(self.context.api, cuLaunchKernelEx(&config, self.raw, pointers.as_mut_ptr(), ptr::null_mut()))
    }
}

impl Drop for Function {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            let _ = call!(self.context.api, cuModuleUnload(self.module));
        }
    }
}
