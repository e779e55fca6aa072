//! The native worker: compiled solutions, on CPU tensors; CUDA kernels, on a GPU's; and the kernel library's operators, on either.
//!
//! It answers the questions of `worker.py`, with the same rules: inputs at new places with other numbers for every call,
//! outputs poisoned before it and looked at again after it, caches cold.

use std::fs;
use std::hint::black_box;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use fir::Exec;
use fir::exec::KernelArg;
use serde_json::{Value, json};

use super::kernel::Kernel;
use crate::array::{Array, Roll};
use crate::build::{Arg, Library};
use crate::error::{Error, Result};
use crate::inputs::Ready;
use crate::ops::{Operator, Prepared, exec_of};
use crate::schema::DType;

/// Serves a benchmark over the socket at `path` until it closes; or answers the questions of a file, `*.json`, on standard output.
pub fn serve_native(path: &Path) -> Result<()> {
    if path.extension().is_some_and(|e| e == "json") {
        let text = fs::read_to_string(path).map_err(Error::io(path))?;
        let questions: Vec<Value> = serde_json::from_str(&text).map_err(|e| refuse(e.to_string()))?;
        let mut worker = Native::default();
        for question in questions {
            let answer = worker.answer(&question)?;
            writeln!(std::io::stdout(), "{answer}").map_err(Error::io(path))?;
        }
        return Ok(());
    }
    let stream = UnixStream::connect(path).map_err(Error::io(path))?;
    let mut to = stream.try_clone().map_err(Error::io(path))?;
    let mut worker = Native::default();
    for line in BufReader::new(stream).lines() {
        let Ok(line) = line else { break };
        let question: Value = serde_json::from_str(&line).unwrap_or_default();
        let answer = worker.answer(&question).unwrap_or_else(|e| {
            let kind = if question["op"] == "build" { "build" } else { "run" };
            json!({"error": kind, "log": e.to_string()})
        });
        if writeln!(to, "{answer}").is_err() {
            break;
        }
    }
    Ok(())
}

#[derive(Default)]
enum Code {
    #[default]
    None,
    Library(Library),
    Fir(Box<Operator>),
    /// Where it runs, and the names of its outputs.
    Kernel(Box<(Kernel, Exec, Vec<String>)>),
}

#[derive(Default)]
struct Native {
    code: Code,
}

pub(super) fn refuse(why: impl Into<String>) -> Error {
    Error::refused("worker", why)
}

pub(super) fn text<'a>(value: &'a Value, field: &str) -> Result<&'a str> {
    value[field].as_str().ok_or_else(|| refuse(format!("`{field}` is missing")))
}

pub(super) fn list<'a>(value: &'a Value, field: &str) -> Result<&'a Vec<Value>> {
    value[field].as_array().ok_or_else(|| refuse(format!("`{field}` is missing")))
}

fn shape_of(spec: &Value) -> Result<(DType, Vec<usize>)> {
    let name = text(spec, "dtype")?;
    let dtype = DType::from_name(name).ok_or_else(|| refuse(format!("type {name}")))?;
    let shape = list(spec, "shape")?.iter().map(|n| n.as_u64().unwrap_or(0) as usize).collect();
    Ok((dtype, shape))
}

fn load(spec: &Value) -> Result<Ready> {
    let name = text(spec, "name")?.to_owned();
    let array = match spec.get("value") {
        Some(value) => {
            let number = value.as_f64().or(value.as_bool().map(|b| f64::from(u8::from(b))));
            Array::scalar(shape_of(spec)?.0, number.ok_or_else(|| refuse(format!("`{name}` is {value}")))?)?
        }
        None => {
            let (dtype, shape) = shape_of(spec)?;
            let file = text(spec, "file")?;
            Array::from_bytes(dtype, &shape, &fs::read(file).map_err(Error::io(file))?)?
        }
    };
    Ok(Ready { name, array, scalar: spec.get("value").is_some(), random: spec["random"] == true })
}

fn roll_of(value: &Value) -> Roll {
    Roll { first: value[0].as_u64().unwrap_or(0) as usize, last: value[1].as_u64().unwrap_or(0) as usize }
}

fn poisoned(specs: &[Value]) -> Result<Vec<Array>> {
    let one = |spec: &Value| {
        let (dtype, shape) = shape_of(spec)?;
        let mut array = Array::zeros(dtype, &shape)?;
        array.poison();
        Ok(array)
    };
    specs.iter().map(one).collect()
}

fn described(outputs: &[Array]) -> Value {
    outputs.iter().map(|o| json!({"shape": o.shape(), "dtype": o.dtype().name()})).collect()
}

fn store(outputs: &[Array], files: &Value) -> Result<()> {
    for (output, file) in outputs.iter().zip(files.as_array().into_iter().flatten()) {
        let file = file.as_str().ok_or_else(|| refuse("`files` are not names"))?;
        fs::write(file, output.bytes()).map_err(Error::io(file))?;
    }
    Ok(())
}

impl Native {
    fn answer(&mut self, question: &Value) -> Result<Value> {
        match text(question, "op")? {
            "build" => self.build(question),
            "run" => self.run(question),
            "time" => self.time(question),
            other => Err(refuse(format!("`{other}` is not an operation"))),
        }
    }

    fn build(&mut self, q: &Value) -> Result<Value> {
        self.code = match text(q, "kind")? {
            "fir" => {
                Code::Fir(Box::new(Operator::new(text(q, "entry_symbol")?, text(q, "params")?, text(q, "device")?)?))
            }
            "nvrtc" => {
                let exec = exec_of(text(q, "device")?)?;
                let outputs = list(q, "output_names")?.iter().filter_map(Value::as_str).map(str::to_owned).collect();
                Code::Kernel(Box::new((Kernel::new(q, &exec)?, exec, outputs)))
            }
            _ => Code::Library(Library::open(Path::new(text(q, "library")?), text(q, "entry_symbol")?)?),
        };
        Ok(json!({}))
    }

    /// What is done before a call is timed: an operator's plan, made from inputs that are not drawn.
    fn prepare(&self, bases: &[Ready], outputs: &[Value]) -> Result<Option<Prepared<'_>>> {
        let Code::Fir(operator) = &self.code else { return Ok(None) };
        let known: Vec<(&str, &Array)> =
            bases.iter().filter(|b| !b.random).map(|b| (b.name.as_str(), &b.array)).collect();
        let shapes: Vec<(&str, &Array)> = bases.iter().map(|b| (b.name.as_str(), &b.array)).collect();
        let outputs = outputs.iter().map(shape_of).collect::<Result<Vec<_>>>()?;
        operator.prepare(&known, &shapes, &outputs).map(Some)
    }

    fn call(
        &self,
        prepared: &mut Option<Prepared<'_>>,
        names: &[&str],
        args: &mut [Array],
        outs: &mut [Array],
    ) -> Result<()> {
        match (&self.code, prepared) {
            (Code::Library(library), _) => {
                let arg = |a| -> Arg<'_> {
                    let a: &mut Array = a;
                    let (dtype, shape) = (a.dtype(), a.shape().to_vec());
                    Arg::written(a.bytes_mut(), dtype, &shape)
                };
                library.call(&args.iter_mut().chain(outs).map(arg).collect::<Vec<_>>())
            }
            (Code::Fir(_), Some(prepared)) => prepared.run(names, args, outs),
            (Code::Kernel(kernel), _) => {
                let (kernel, exec, outputs) = &**kernel;
                let mut outs: Vec<_> = outs.iter_mut().map(Some).collect();
                let mut find = |name: &str| {
                    Some(match names.iter().position(|n| *n == name).map(|i| &args[i]) {
                        Some(x) if x.shape().is_empty() && x.dtype().is_integer() => {
                            KernelArg::I32(x.integer(0) as i32)
                        }
                        Some(x) if x.shape().is_empty() => KernelArg::F32(x.get(0) as f32),
                        Some(x) => KernelArg::Read(x.view()),
                        None => {
                            let at = outputs.iter().position(|n| n == name)?;
                            KernelArg::Write(outs.get_mut(at)?.take()?.view_mut())
                        }
                    })
                };
                kernel.run(exec, None, &mut find)
            }
            _ => Err(refuse("nothing was built")),
        }
    }

    /// One call on copies of `args` and `outs` where the code wants them; its milliseconds. What it made of them is in the
    /// originals, inputs only if `back` asks for them.
    fn timed(
        &self,
        prepared: &mut Option<Prepared<'_>>,
        names: &[&str],
        args: &mut [Array],
        outs: &mut [Array],
        cold: &mut [u8],
        back: bool,
    ) -> Result<f64> {
        let Some((Exec::Cuda(gpu), stream)) = self.stream() else {
            cold.iter_mut().for_each(|b| *b = b.wrapping_add(1));
            black_box(&mut *cold);
            let begin = Instant::now();
            self.call(prepared, names, args, outs)?;
            return Ok(begin.elapsed().as_secs_f64() * 1e3);
        };
        let exec = Exec::Cuda(gpu.clone());
        // Numbers, and a sampler's for each row, are arguments and not tensors.
        let input = |(name, a): (&&str, &Array)| {
            let here = a.shape().is_empty() || matches!(*name, "top_k" | "top_p");
            if here { Ok(a.clone()) } else { a.on(&exec) }
        };
        let mut there = names.iter().zip(args.iter()).map(input).collect::<Result<Vec<_>>>()?;
        let mut made = outs.iter().map(|a| a.on(&exec)).collect::<Result<Vec<_>>>()?;
        // Zeros over all of its cache, some 30 µs, and again: half a millisecond in which the device wakes up and the call is
        // queued, so that no launch is waited for.
        for _ in 0..16 {
            drop(gpu.zeros(fir::DType::U8, &[cold.len().max(1)])?);
        }
        let begin = stream.record()?;
        self.call(prepared, names, &mut there, &mut made)?;
        let end = stream.record()?;
        end.synchronize()?;
        for (to, from) in outs.iter_mut().zip(&made).chain(args.iter_mut().zip(&there).filter(|_| back)) {
            *to = from.to_host()?;
        }
        Ok(f64::from(end.since(&begin)?))
    }

    /// The executor and its stream, of code on a GPU.
    fn stream(&self) -> Option<(&Exec, &fir::exec::Stream)> {
        let exec = match &self.code {
            Code::Fir(operator) => &operator.exec,
            Code::Kernel(kernel) => &kernel.1,
            _ => return None,
        };
        let Exec::Cuda(gpu) = exec else { return None };
        Some((exec, gpu.stream()?))
    }

    /// Takes what a request says of the launch.
    fn set_launch(&mut self, q: &Value) {
        if let Code::Kernel(kernel) = &mut self.code {
            kernel.0.set_launch(&q["launch"]);
        }
    }

    fn run(&mut self, q: &Value) -> Result<Value> {
        self.set_launch(q);
        let bases = list(q, "inputs")?.iter().map(load).collect::<Result<Vec<_>>>()?;
        let specs = list(q, "outputs")?;
        let names: Vec<&str> = bases.iter().map(|b| b.name.as_str()).collect();
        let mut prepared = self.prepare(&bases, specs)?;
        let mut args: Vec<Array> = bases.iter().map(|b| b.array.clone()).collect();
        place(&bases, roll_of(&q["roll"]), &mut args);
        let originals = args.clone();
        let mut outs = poisoned(specs)?;
        let ms = self.timed(&mut prepared, &names, &mut args, &mut outs, &mut [], true)?;
        store(&outs, &q["files"])?;
        Ok(json!({"outputs": described(&outs), "edited": edited(&names, &args, &originals), "ms": ms}))
    }

    fn time(&mut self, q: &Value) -> Result<Value> {
        self.set_launch(q);
        let bases = list(q, "inputs")?.iter().map(load).collect::<Result<Vec<_>>>()?;
        let specs = list(q, "outputs")?;
        let names: Vec<&str> = bases.iter().map(|b| b.name.as_str()).collect();
        let mut prepared = self.prepare(&bases, specs)?;
        let warmup = q["warmup"].as_u64().unwrap_or(0) as usize;
        let keep: Vec<u64> = list(q, "keep")?.iter().filter_map(Value::as_u64).collect();
        let mut cold = vec![0u8; q["cold"].as_u64().unwrap_or(0) as usize];
        let (mut times, mut kept, mut touched, mut late) = (Vec::new(), Vec::new(), Vec::<String>::new(), false);
        // Two places for inputs and outputs, used in turn.
        let mut places: Vec<Vec<Array>> = vec![bases.iter().map(|b| b.array.clone()).collect(); 2];
        let mut outputs = [poisoned(specs)?, poisoned(specs)?];
        for (i, roll) in list(q, "rolls")?.iter().enumerate() {
            let (args, outs) = (&mut places[i % 2], &mut outputs[i % 2]);
            place(&bases, roll_of(roll), args);
            outs.iter_mut().for_each(Array::poison);
            let wanted = keep.contains(&(i as u64));
            let originals = if wanted { args.clone() } else { Vec::new() };
            let ms = self.timed(&mut prepared, &names, args, outs, &mut cold, wanted)?;
            if wanted {
                let first = outs.clone();
                touched.extend(edited(&names, args, &originals));
                std::thread::sleep(Duration::from_millis(5));
                late |= first.iter().zip(outs.iter()).any(|(a, b)| a.bytes() != black_box(b).bytes());
                store(&first, &q["files"][kept.len()])?;
                kept.push(described(&first));
            }
            if i >= warmup {
                times.push(ms);
            }
        }
        touched.sort();
        touched.dedup();
        Ok(json!({"times": times, "kept": kept, "edited": touched, "late": late, "leak_us": 0}))
    }
}

/// Inputs at `args`, those that are random moved around.
fn place(bases: &[Ready], roll: Roll, args: &mut [Array]) {
    for (base, arg) in bases.iter().zip(args) {
        base.array.rolled_into(if base.random { roll } else { Roll::NONE }, arg);
    }
}

fn edited(names: &[&str], args: &[Array], originals: &[Array]) -> Vec<String> {
    let pairs = names.iter().zip(args.iter().zip(originals));
    // What was compiled elsewhere may have written through the pointers it was given.
    pairs.filter(|(_, (a, o))| black_box(a).bytes() != o.bytes()).map(|(n, _)| n.to_string()).collect()
}
