//! Memory of a device, and memory of the host that it copies from.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use super::api::call;
use super::{Context, Event, Stream};
use crate::error::{Error, Result};
use crate::tensor::{DeviceMemory, Span};

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
    /// After the last copy that read it, if there was one.
    copied: Option<Event>,
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
        Ok(Self { context, start, len, copied: None })
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Queues a copy of `parts`, one after the other, to the beginning of `to`. Waits for its own last copy alone.
    pub(crate) fn send(&mut self, parts: &[&[u8]], to: &Buffer) -> Result<()> {
        let len = parts.iter().map(|part| part.len()).sum();
        if len > self.len {
            return Err(Error::value("copy", "bytes", len, format!("at most {}", self.len)));
        }
        if len == 0 {
            return Ok(());
        }
        if let Some(event) = &self.copied {
            event.synchronize()?;
        }
        // SAFETY: `len` bytes are ours from `start` on, and no copy reads them: the last one was waited for.
        let memory = unsafe { std::slice::from_raw_parts_mut(self.start.cast::<u8>(), len) };
        let mut rest = &mut *memory;
        for part in parts {
            let (here, others) = rest.split_at_mut(part.len());
            here.copy_from_slice(part);
            rest = others;
        }
        let queued = to.queue_write(0, memory);
        let marked = match &self.copied {
            Some(event) => to.stream.record_again(event),
            None => to.stream.mark().map(|event| self.copied = Some(event)),
        };
        // Without a mark there is only this way to know when the copy is over.
        marked.or_else(|_| to.stream.synchronize())?;
        queued
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Some(event) = &self.copied {
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
