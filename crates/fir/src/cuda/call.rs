//! [`Call`]: one operator's arguments as addresses, its launches, and the copies of staged tensors.

use bytemuck::Pod;

use super::driver::{Buffer, Grid};
use super::exec::{Gpu, Kernel, Lane};
use super::params::{Address, Params};
use super::put;
use crate::error::{Error, Result};
use crate::tensor::{Place, TensorMut, TensorRef};

/// A call of one operator. Turns tensors into addresses once it has seen where they are, and lends the memory to the
/// launches until it ends.
pub(crate) struct Call<'a> {
    gpu: &'a Gpu,
    op: &'static str,
    /// Host tensors alone: those on the device need nothing kept.
    args: Vec<Arg<'a>>,
}

/// A host tensor of a call.
pub(super) struct Arg<'a> {
    pub(super) name: &'static str,
    /// Where its first element is on the device, or would be.
    pub(super) start: u64,
    pub(super) len: usize,
    /// The memory there; none on a dry run.
    buffer: Option<Buffer>,
    /// Where results go back to.
    out: Option<&'a mut [u8]>,
}

impl<'a> Call<'a> {
    /// Places of a staged tensor keep the host's alignment to this, so that kernels choose as they would for that memory.
    const ALIGNMENT: u64 = 16;

    pub(crate) fn new(gpu: &'a Gpu, op: &'static str) -> Self {
        Self { gpu, op, args: Vec::new() }
    }

    /// The operator.
    pub(crate) fn op(&self) -> &'static str {
        self.op
    }

    /// Address of a tensor that the kernels read.
    pub(crate) fn read(&mut self, arg: &'static str, x: TensorRef<'a>) -> Result<Address> {
        match x.span() {
            Some(span) => self.on_device(arg, span.ordinal, span.address),
            None => {
                let len = x.layout().extent() * x.dtype().size();
                self.check_host(arg)?;
                self.stage(arg, &x.host_bytes(self.op, arg)?[..len]).map(|(address, _)| address)
            }
        }
    }

    /// Address of a tensor that the kernels write, or read and write. What lies between its rows stays.
    pub(crate) fn write(&mut self, arg: &'static str, x: TensorMut<'a>) -> Result<Address> {
        match x.as_ref().span() {
            Some(span) => self.on_device(arg, span.ordinal, span.address),
            None => {
                let len = x.layout().extent() * x.dtype().size();
                self.check_host(arg)?;
                let bytes = &mut x.into_host_bytes(self.op, arg)?[..len];
                let (address, staged) = self.stage(arg, bytes)?;
                if let Some(at) = staged {
                    self.args[at].out = Some(bytes);
                }
                Ok(address)
            }
        }
    }

    /// Address of a copy of values that the caller has in this process's memory whatever the device. A graph records up to
    /// [`put::MOST`] bytes as they are, and no more; of what is longer, long copies alone are waited for: others start from
    /// pinned memory that is kept.
    pub(crate) fn upload(&mut self, name: &'static str, values: &[impl Pod]) -> Result<Address> {
        const LONG: usize = 1 << 20;
        let bytes: &[u8] = bytemuck::cast_slice(values);
        if let (Lane::Live(stream), 1..=put::MOST) = (self.gpu.lane(), bytes.len()) {
            let buffer = Buffer::new(stream, bytes.len().next_multiple_of(8))?;
            put::put(self.op, self.gpu, bytes, &buffer)?;
            let start = buffer.address();
            self.args.push(Arg { name, start, len: bytes.len(), buffer: Some(buffer), out: None });
            return Ok(Address(start));
        }
        if bytes.len() > LONG {
            return self.stage(name, bytes).map(|(address, _)| address);
        }
        let address = self.scratch(name, bytes.len())?;
        match self.args.last() {
            Some(Arg { buffer: Some(buffer), .. }) if !bytes.is_empty() => self.gpu.send(&[bytes], buffer)?,
            _ => {}
        }
        Ok(address)
    }

    /// Address of memory with anything in it, for one kernel of the call to hand to the next.
    pub(crate) fn scratch(&mut self, name: &'static str, len: usize) -> Result<Address> {
        let (start, buffer) = match self.gpu.lane() {
            _ if len == 0 => return Ok(Address(0)),
            Lane::Live(stream) => {
                let buffer = Buffer::new(stream, len)?;
                (buffer.address(), Some(buffer))
            }
            Lane::Dry(_) => ((self.args.len() as u64 + 1) << 40, None),
        };
        self.args.push(Arg { name, start, len, buffer, out: None });
        Ok(Address(start))
    }

    fn on_device(&self, arg: &'static str, ordinal: u32, address: u64) -> Result<Address> {
        match self.gpu.lane() {
            Lane::Live(stream) if stream.context().ordinal() != ordinal => {
                let own = Place::Cuda(stream.context().ordinal());
                Err(Error::place(self.op, arg, Place::Cuda(ordinal), own))
            }
            _ => Ok(Address(address)),
        }
    }

    fn check_host(&self, arg: &'static str) -> Result<()> {
        if self.gpu.takes_host_tensors() {
            return Ok(());
        }
        let want =
            format!("memory of {:?} (`Tensor::to_device` copies it there, `Gpu::staged` takes it as it is)", self.gpu);
        Err(Error::place(self.op, arg, Place::Host, want))
    }

    /// Copies `bytes` to the device; their address there, and the number of their entry in `args`.
    fn stage(&mut self, name: &'static str, bytes: &[u8]) -> Result<(Address, Option<usize>)> {
        if bytes.is_empty() {
            return Ok((Address(0), None));
        }
        let shift = bytes.as_ptr().addr() as u64 % Self::ALIGNMENT;
        let (start, buffer) = match self.gpu.lane() {
            Lane::Live(stream) => {
                let buffer = Buffer::new(stream, bytes.len() + Self::ALIGNMENT as usize)?;
                buffer.write(shift as usize, bytes)?;
                (buffer.address() + shift, Some(buffer))
            }
            // Made up: one every 2^40 bytes.
            Lane::Dry(_) => (((self.args.len() as u64 + 1) << 40) + shift, None),
        };
        self.args.push(Arg { name, start, len: bytes.len(), buffer, out: None });
        Ok((Address(start), Some(self.args.len() - 1)))
    }

    /// Queues a launch.
    pub(crate) fn launch<P: Params>(&self, kernel: &Kernel, grid: Grid, params: &P) -> Result<()> {
        debug_assert_eq!(P::TYPE, kernel.source.params.cpp);
        self.launch_bytes(kernel, grid, bytemuck::bytes_of(params))
    }

    /// Queues a launch with a parameter that is made of several structs.
    pub(crate) fn launch_bytes(&self, kernel: &Kernel, grid: Grid, bytes: &[u8]) -> Result<()> {
        if bytes.len() != kernel.source.params.size {
            let want = format!("{}, as {} has", kernel.source.params.size, kernel.source.params.cpp);
            return Err(Error::value(self.op, "params", format!("{} bytes", bytes.len()), want));
        }
        match (self.gpu.lane(), &kernel.function) {
            (Lane::Live(stream), Some(function)) => function.launch(stream, grid, bytes),
            (Lane::Dry(recorder), _) => {
                recorder.record(self.op, &kernel.source, grid, bytes, &self.args);
                Ok(())
            }
            (Lane::Live(_), None) => Err(Error::Unsupported { op: self.op, why: vec!["a kernel of a dry run".into()] }),
        }
    }

    /// Whether anything was queued for its arguments.
    pub(crate) fn has_copies(&self) -> bool {
        self.args.iter().any(|arg| arg.buffer.is_some())
    }

    /// Names memory that a plan or its scratch lends to the launches, for the records of a dry run.
    pub(crate) fn name(&mut self, name: &'static str, start: u64, len: usize) {
        if let (Lane::Dry(_), 1..) = (self.gpu.lane(), len) {
            self.args.push(Arg { name, start, len, buffer: None, out: None });
        }
    }

    /// Copies staged results back, and waits for them; does nothing when all tensors are on the device.
    pub(crate) fn finish(self) -> Result<()> {
        for arg in self.args {
            if let (Some(buffer), Some(out)) = (arg.buffer, arg.out) {
                buffer.read((arg.start - buffer.address()) as usize, out)?;
            }
        }
        Ok(())
    }
}
