//! Where a tensor's memory lies: bytes of this process, or an address on a device that only that device may use.

use crate::error::{Error, Result};

/// Where memory lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Place {
    /// This process's memory.
    Host,
    /// Memory of the CUDA device with this ordinal.
    Cuda(u32),
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Host => f.write_str("host memory"),
            Self::Cuda(ordinal) => write!(f, "memory of cuda:{ordinal}"),
        }
    }
}

/// A stretch of a device's memory. Plain data: whoever holds one sees to it that the memory lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) address: u64,
    pub(crate) len: usize,
    pub(crate) ordinal: u32,
}

/// Memory of a device that a tensor owns; dropped, it is freed.
pub(crate) trait DeviceMemory: std::any::Any + Send + Sync {
    /// All of it.
    fn span(&self) -> Span;
    /// A copy of it, on the same device.
    fn duplicate(&self) -> Result<Box<dyn DeviceMemory>>;
    /// Its first bytes; waits for what writes them.
    fn read(&self, out: &mut [u8]) -> Result<()>;
}

/// Memory that is read: from the first element to the end of what may be read.
#[derive(Clone, Copy)]
pub(super) enum Memory<'a> {
    Host(&'a [u8]),
    Device(Span),
}

/// Memory that is written.
pub(super) enum MemoryMut<'a> {
    Host(&'a mut [u8]),
    Device(Span),
}

impl Span {
    /// Without its first `start` bytes, of which there are as many.
    fn from(self, start: usize) -> Self {
        Self { address: self.address + start as u64, len: self.len - start, ..self }
    }
}

impl<'a> Memory<'a> {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Host(bytes) => bytes.len(),
            Self::Device(span) => span.len,
        }
    }

    /// Without its first `start` bytes, of which there are as many.
    pub(super) fn from(self, start: usize) -> Self {
        match self {
            Self::Host(bytes) => Self::Host(&bytes[start..]),
            Self::Device(span) => Self::Device(span.from(start)),
        }
    }

    pub(super) fn place(&self) -> Place {
        match self {
            Self::Host(_) => Place::Host,
            Self::Device(span) => Place::Cuda(span.ordinal),
        }
    }

    /// The bytes, if they are this process's.
    pub(super) fn host(self, op: &'static str, arg: &'static str) -> Result<&'a [u8]> {
        match self {
            Self::Host(bytes) => Ok(bytes),
            Self::Device(_) => Err(Error::place(op, arg, self.place(), Place::Host)),
        }
    }
}

impl<'a> MemoryMut<'a> {
    pub(super) fn as_ref(&self) -> Memory<'_> {
        match self {
            Self::Host(bytes) => Memory::Host(bytes),
            Self::Device(span) => Memory::Device(*span),
        }
    }

    pub(super) fn reborrow(&mut self) -> MemoryMut<'_> {
        match self {
            Self::Host(bytes) => MemoryMut::Host(bytes),
            Self::Device(span) => MemoryMut::Device(*span),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.as_ref().len()
    }

    /// Without its first `start` bytes, of which there are as many.
    pub(super) fn from(self, start: usize) -> Self {
        self.split_at(start).1
    }

    pub(super) fn split_at(self, at: usize) -> (Self, Self) {
        match self {
            Self::Host(bytes) => {
                let (a, b) = bytes.split_at_mut(at);
                (Self::Host(a), Self::Host(b))
            }
            Self::Device(span) => (Self::Device(Span { len: at, ..span }), Self::Device(span.from(at))),
        }
    }

    /// The bytes, if they are this process's.
    pub(super) fn host(self, op: &'static str, arg: &'static str) -> Result<&'a mut [u8]> {
        match self {
            Self::Host(bytes) => Ok(bytes),
            Self::Device(span) => Err(Error::place(op, arg, Place::Cuda(span.ordinal), Place::Host)),
        }
    }
}
