//! CUDA kernels of solutions, compiled by NVRTC and launched by what `launch.json` says.
#![allow(unsafe_code)]

use std::fs;
use std::path::Path;

use fir::Exec;
use fir::exec::{Arch, KernelArg, LaunchSize, OwnKernel};
use serde_json::Value;

use super::native::{list, refuse, text};
use crate::array::Array;
use crate::error::{Error, Result};
use crate::ops::exec_of;

/// A CUDA kernel, with the device that it is loaded on; without one it was compiled, and that is all.
pub(super) struct Kernel {
    loaded: Option<(Exec, OwnKernel)>,
    /// Names of the outputs, and how it is launched on what comes next: see [`crate::build::launch`].
    outputs: Vec<String>,
    launch: Value,
}

impl Kernel {
    pub(super) fn new(q: &Value) -> Result<Self> {
        let (folder, symbol) = (Path::new(text(q, "folder")?), text(q, "entry_symbol")?);
        let file = folder.join(text(q, "entry_file")?);
        let source = fs::read_to_string(&file).map_err(Error::io(&file))?;
        let strings = |field: &str| -> Result<Vec<String>> {
            Ok(list(q, field)?.iter().filter_map(Value::as_str).map(str::to_owned).collect())
        };
        let mut options = strings("flags")?;
        options.push(format!("-I{}", folder.display()));
        options.extend(strings("include_paths")?.iter().map(|p| format!("-I{p}")));
        let exec = exec_of(text(q, "device")?)?;
        let kernel = match &exec {
            Exec::Cuda(gpu) => Some(OwnKernel::new(gpu, &source, symbol, &options)?),
            _ => fir::jit::compile_text(&source, symbol, &options, Arch::HOPPER).map(|_| None)?,
        };
        let loaded = kernel.map(|kernel| (exec, kernel));
        Ok(Self { loaded, outputs: strings("output_names")?, launch: Value::Null })
    }

    /// The device, if there is one.
    pub(super) fn exec(&self) -> Option<&Exec> {
        self.loaded.as_ref().map(|(exec, _)| exec)
    }

    /// How it is launched from now on.
    pub(super) fn set_launch(&mut self, launch: &Value) {
        self.launch = launch.clone();
    }

    pub(super) fn run(&self, names: &[&str], args: &[Array], outs: &mut [Array]) -> Result<()> {
        let (_, kernel) =
            self.loaded.as_ref().ok_or_else(|| refuse("a kernel was compiled, and there is no GPU to run it on"))?;
        let number = |value: &Value| value.as_f64().unwrap_or(0.0);
        let mut outs: Vec<_> = outs.iter_mut().map(Some).collect();
        let mut list = Vec::new();
        for arg in self.launch["args"].as_array().into_iter().flatten() {
            list.push(match (arg["tensor"].as_str(), arg["type"].as_str()) {
                (Some(name), _) => match names.iter().position(|n| *n == name).map(|i| &args[i]) {
                    Some(x) if x.shape().is_empty() && x.dtype().is_integer() => KernelArg::I32(x.integer(0) as i32),
                    Some(x) if x.shape().is_empty() => KernelArg::F32(x.get(0) as f32),
                    Some(x) => KernelArg::Read(x.view()),
                    None => {
                        let at = self.outputs.iter().position(|n| n == name);
                        let out = at.and_then(|at| outs.get_mut(at)?.take());
                        KernelArg::Write(out.ok_or_else(|| refuse(format!("`{name}` is given twice")))?.view_mut())
                    }
                },
                (_, Some("f32")) => KernelArg::F32(number(&arg["value"]) as f32),
                (_, Some("i64")) => KernelArg::I64(number(&arg["value"]) as i64),
                _ => KernelArg::I32(number(&arg["value"]) as i32),
            });
        }
        let three =
            |field: &str| [0, 1, 2].map(|i| self.launch[field][i].as_u64().unwrap_or(0).min(u32::MAX.into()) as u32);
        let shared = self.launch["shared"].as_u64().unwrap_or(0).min(u32::MAX.into()) as u32;
        let size = LaunchSize { grid: three("grid"), block: three("block"), shared };
        // SAFETY: what a solution does to memory is its author's word, as that of any code that is benchmarked here; this process is there to
        // die of it. Tensors live until the caller has waited for the stream.
        Ok(unsafe { kernel.launch(size, &mut list) }?)
    }
}
