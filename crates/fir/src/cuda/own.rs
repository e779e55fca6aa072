//! [`OwnKernel`]: a kernel in CUDA C++ of the caller's own, on tensors of a device.
#![allow(unsafe_code)]

use super::driver::{Function, Grid};
use super::exec::Gpu;
use super::jit::{self, Cubin};
use crate::error::{Error, Result};
use crate::tensor::{Place, TensorMut, TensorRef};

const OP: &str = "OwnKernel";

/// A kernel of the caller's own, loaded on a device.
#[derive(Debug)]
pub struct OwnKernel {
    function: Function,
    ordinal: u32,
}

/// Blocks of a launch, threads of a block, and the bytes of shared memory that a block asks for beside what it declares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchSize {
    /// Blocks, by axis.
    pub grid: [u32; 3],
    /// Threads of a block, by axis.
    pub block: [u32; 3],
    /// Dynamic shared memory of a block, in bytes.
    pub shared: u32,
}

/// An argument of a kernel.
#[derive(Debug)]
#[non_exhaustive]
pub enum KernelArg<'a> {
    /// The address of a tensor's first element, to be read.
    Read(TensorRef<'a>),
    /// The address of a tensor's first element, to be read and written.
    Write(TensorMut<'a>),
    /// `int`
    I32(i32),
    /// `long long`
    I64(i64),
    /// `float`
    F32(f32),
}

impl OwnKernel {
    /// Compiles the kernel `name` of `text` and loads it, as [`jit::compile_text`] and [`Self::load`] do.
    pub fn new(gpu: &Gpu, text: &str, name: &str, options: &[String]) -> Result<Self> {
        Self::load(gpu, &jit::compile_own(text, name, options, gpu.properties().arch, gpu.driver())?)
    }

    /// Loads a kernel that was compiled for the device's architecture.
    pub fn load(gpu: &Gpu, cubin: &Cubin) -> Result<Self> {
        let stream = gpu.stream().ok_or_else(dry)?;
        let function = Function::load(stream.context(), &cubin.image, &cubin.symbol)?;
        Ok(Self { function, ordinal: stream.context().ordinal() })
    }

    /// Queues a launch on the stream of `gpu`, an executor of the device that the kernel was loaded on, and returns.
    ///
    /// # Safety
    /// The kernel takes parameters of these types, in this order. It reads and writes no memory but that of its arguments and its own, writes
    /// to none that is to be [read](KernelArg::Read), and the tensors and `self` live until the stream has come past it, or the graph that it is
    /// recorded in is gone.
    pub unsafe fn launch(&self, gpu: &Gpu, size: LaunchSize, args: &mut [KernelArg<'_>]) -> Result<()> {
        let stream = gpu.stream().ok_or_else(dry)?;
        if size.grid.contains(&0) || size.block.contains(&0) {
            return Err(Error::value(OP, "size", format!("{size:?}"), "a block and a thread at least"));
        }
        let own = self.ordinal;
        if stream.context().ordinal() != own {
            return Err(Error::place(OP, "gpu", Place::Cuda(stream.context().ordinal()), Place::Cuda(own)));
        }
        let address = |x: TensorRef<'_>| match x.span() {
            Some(span) if span.ordinal == own => Ok(span.address.to_le_bytes()),
            Some(span) => Err(Error::place(OP, "args", Place::Cuda(span.ordinal), Place::Cuda(own))),
            None => Err(Error::place(OP, "args", Place::Host, Place::Cuda(own))),
        };
        let mut words = Vec::with_capacity(args.len());
        for arg in args {
            words.push(match arg {
                KernelArg::Read(x) => address(*x)?,
                KernelArg::Write(x) => address(x.as_ref())?,
                KernelArg::I32(x) => i64::from(*x).to_le_bytes(),
                KernelArg::I64(x) => x.to_le_bytes(),
                KernelArg::F32(x) => u64::from(x.to_bits()).to_le_bytes(),
            });
        }
        // The driver copies as many of the bytes as the parameter has.
        let params: Vec<&[u8]> = words.iter().map(|w| &w[..]).collect();
        let grid = Grid { grid: size.grid, block: size.block, smem: size.shared, cluster: 1, early: false };
        self.function.launch_list(stream, grid, &params)
    }
}

fn dry() -> Error {
    Error::Unsupported { op: OP, why: vec!["a dry run has no device to load it on".into()] }
}
