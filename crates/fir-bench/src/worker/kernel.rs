//! CUDA kernels of solutions, compiled by NVRTC and launched by what `launch.json` says.
#![allow(unsafe_code)]

use std::fs;
use std::path::Path;

use fir::Exec;
use fir::exec::{Arch, KernelArg, LaunchSize, OwnKernel};
use serde_json::Value;

use super::native::{list, refuse, text};
use crate::error::{Error, Result};

/// A CUDA kernel, and how it is launched: see [`crate::build::launch`]. Without a device it was compiled, and that is all.
pub(crate) struct Kernel {
    loaded: Option<OwnKernel>,
    launch: Value,
}

impl Kernel {
    /// Compiles what a request of [`crate::build::build`] names, and loads it where `exec` is a GPU.
    pub(crate) fn new(q: &Value, exec: &Exec) -> Result<Self> {
        let (folder, symbol) = (Path::new(text(q, "folder")?), text(q, "entry_symbol")?);
        let file = folder.join(text(q, "entry_file")?);
        let source = fs::read_to_string(&file).map_err(Error::io(&file))?;
        let strings = |field: &str| -> Result<Vec<String>> {
            Ok(list(q, field)?.iter().filter_map(Value::as_str).map(str::to_owned).collect())
        };
        let mut options = strings("flags")?;
        options.push(format!("-I{}", folder.display()));
        options.extend(strings("include_paths")?.iter().map(|p| format!("-I{p}")));
        let loaded = match exec {
            Exec::Cuda(gpu) => Some(OwnKernel::new(gpu, &source, symbol, &options)?),
            _ => fir::jit::compile_text(&source, symbol, &options, Arch::HOPPER).map(|_| None)?,
        };
        Ok(Self { loaded, launch: Value::Null })
    }

    /// How it is launched from now on.
    pub(crate) fn set_launch(&mut self, launch: &Value) {
        self.launch = launch.clone();
    }

    /// Queues a launch on `exec`, or on another stream of its device by its handle; `find` gives the tensors and scalars of the
    /// definition by name, each once. Tensors, and that stream, live until it has come past the launch.
    pub(crate) fn run<'t>(
        &self,
        exec: &Exec,
        stream: Option<usize>,
        mut find: impl FnMut(&str) -> Option<KernelArg<'t>>,
    ) -> Result<()> {
        let (Some(kernel), Exec::Cuda(gpu)) = (&self.loaded, exec) else {
            return Err(refuse("a kernel was compiled, and there is no GPU to run it on"));
        };
        let number = |value: &Value| value.as_f64().unwrap_or(0.0);
        let mut list = Vec::new();
        for arg in self.launch["args"].as_array().into_iter().flatten() {
            list.push(match (arg["tensor"].as_str(), arg["type"].as_str()) {
                (Some(name), _) => find(name).ok_or_else(|| refuse(format!("`{name}` is given twice")))?,
                (_, Some("f32")) => KernelArg::F32(number(&arg["value"]) as f32),
                (_, Some("i64")) => KernelArg::I64(number(&arg["value"]) as i64),
                _ => KernelArg::I32(number(&arg["value"]) as i32),
            });
        }
        let three =
            |field: &str| [0, 1, 2].map(|i| self.launch[field][i].as_u64().unwrap_or(0).min(u32::MAX.into()) as u32);
        let shared = self.launch["shared"].as_u64().unwrap_or(0).min(u32::MAX.into()) as u32;
        let size = LaunchSize { grid: three("grid"), block: three("block"), shared };
        let other = match (stream, gpu.stream()) {
            // SAFETY: it is the stream of an executor that is borrowed by the call, or its user's; it is dropped here.
            (Some(handle), Some(own)) => Some(gpu.on_stream(&unsafe { own.foreign(handle) })?),
            _ => None,
        };
        let gpu = other.as_ref().unwrap_or(gpu);
        // SAFETY: that it keeps to its tensors, and that the launch has an argument for each parameter, is for the solution to
        // keep: in a benchmark in a process made for it, and where it is deployed after a benchmark saw it do so.
        Ok(unsafe { kernel.launch(gpu, size, &mut list) }?)
    }
}
