//! The CUDA driver: context, streams, memory, events, modules and launches, as values that free themselves.
//!
//! libcuda is loaded when the first device is asked for, and its functions are looked up by name with the types below.
//! Answers are plain integers: a driver newer than this file may answer a code that no list of ours has.
//!
//! Only a device's primary context is used, so memory and streams are shared with other libraries in the process. It
//! is made current for the duration of a call and the caller's is put back, so that a program with several devices is
//! not moved to another one.
#![allow(unsafe_code)]

mod api;
mod graph;
mod launch;
mod memory;
mod tensor_map;

use std::ffi::{CStr, c_char};
use std::ptr;
use std::sync::Arc;

pub(super) use self::api::library;
use self::api::{Api, Handle, api, call};
pub use self::graph::Graph;
pub(crate) use self::launch::{Function, Grid};
pub(crate) use self::memory::{Buffer, Pinned};
pub(crate) use self::tensor_map::{Boxes, TensorMap};
use super::arch::Arch;
use crate::error::{Error, Result};

const ATTRIBUTE_MULTIPROCESSORS: i32 = 16;
const ATTRIBUTE_L2_BYTES: i32 = 38;
const ATTRIBUTE_CAPABILITY: [i32; 2] = [75, 76];
const ATTRIBUTE_SHARED_PER_BLOCK: i32 = 97;
const ATTRIBUTE_MEMORY_POOLS: i32 = 115;
const POOL_RELEASE_THRESHOLD: i32 = 4;
const STREAM_NON_BLOCKING: u32 = 1;
const EVENT_WITHOUT_TIME: u32 = 2;

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
        self.new_mark(0)
    }

    /// [`Self::record`] without a time, which is cheaper.
    pub(crate) fn mark(&self) -> Result<Event> {
        self.new_mark(EVENT_WITHOUT_TIME)
    }

    fn new_mark(&self, flags: u32) -> Result<Event> {
        let (_current, mut raw) = (self.0.context.enter()?, ptr::null_mut());
        call!(self.0.context.api, cuEventCreate(&mut raw, flags))?;
        let event = Event { context: self.0.context.clone(), raw };
        self.record_again(&event)?;
        Ok(event)
    }

    /// Moves `event` after what is on the stream now.
    pub(crate) fn record_again(&self, event: &Event) -> Result<()> {
        let _current = self.0.context.enter()?;
        call!(self.0.context.api, cuEventRecord(event.raw, self.0.raw))
    }

    /// Lets what comes next wait for `event`, which may be of another stream.
    pub fn wait(&self, event: &Event) -> Result<()> {
        let _current = self.0.context.enter()?;
        call!(self.0.context.api, cuStreamWaitEvent(self.0.raw, event.raw, 0))
    }

    /// Whether what is queued on it goes into a graph now.
    pub(crate) fn is_recorded(&self) -> Result<bool> {
        let (_current, mut status) = (self.0.context.enter()?, 0);
        call!(self.0.context.api, cuStreamIsCapturing(self.0.raw, &mut status))?;
        Ok(status != 0)
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
