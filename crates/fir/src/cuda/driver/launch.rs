//! Kernels on a device, and their launches.

use std::ffi::{CString, c_void};
use std::ptr;
use std::sync::Arc;

use super::super::arch::Arch;
use super::api::{Handle, call};
use super::{Context, Stream};
use crate::error::{Error, Result};

/// `CUlaunchConfig`.
#[repr(C)]
pub(super) struct Config {
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

const FUNCTION_STATIC_SHARED: i32 = 1;
const FUNCTION_DYNAMIC_SHARED: i32 = 8;
const FUNCTION_LARGE_CLUSTERS: i32 = 14;
const LAUNCH_CLUSTER: u32 = 4;
const LAUNCH_EARLY: u32 = 6;

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
    /// block before it touches what kernels write; or in one before it ends, if it needs nothing of the kernel ahead and that one
    /// has waited before it let this one start.
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
    /// [`super::super::call::Call`] alone calls this: it holds the borrows of all memory whose addresses are in `params`, and a
    /// kernel's text was compiled with an assertion that its parameter has the size and the fields of the Rust twin.
    pub(in super::super) fn launch(&self, stream: &Stream, grid: Grid, params: &[u8]) -> Result<()> {
        self.queue(stream, grid, &mut [params.as_ptr().cast_mut().cast()])
    }

    /// The same with any number of parameters, each of which has at least as many bytes as the kernel takes: see
    /// [`super::super::own::OwnKernel::launch`].
    pub(in super::super) fn launch_list(&self, stream: &Stream, grid: Grid, params: &[&[u8]]) -> Result<()> {
        let mut pointers: Vec<_> = params.iter().map(|p| p.as_ptr().cast_mut().cast()).collect();
        self.queue(stream, grid, &mut pointers)
    }

    /// `params`: where the parameters are.
    fn queue(&self, stream: &Stream, grid: Grid, params: &mut [*mut c_void]) -> Result<()> {
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
        let _current = self.context.enter()?;
        // Their bytes are copied before the call returns.
        call!(self.context.api, cuLaunchKernelEx(&config, self.raw, params.as_mut_ptr(), ptr::null_mut()))
    }
}

impl Drop for Function {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            let _ = call!(self.context.api, cuModuleUnload(self.module));
        }
    }
}
