//! `cargo xtask bench-cpu`: our operators, PyTorch's on the CPU, and what the machine can do, in one run.
//!
//! Each side is a process that answers questions (`crates/fir/benches/compared.rs` and `.py`). Samples alternate, ours,
//! ceilings, theirs, so that what else happens on the machine happens to all of them; ratios are medians of those of
//! neighbours in time.

use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::bench;
use crate::step::{cargo, program};

/// What a case is held against, and the share of it that we want.
#[derive(Clone, Copy)]
enum Target {
    Read(f64),
    Copy(f64),
    AmxBf16(f64),
    AmxInt8(f64),
    /// Times as fast as torch; the share shown is of reading.
    Torch(f64),
    /// As many, of multiply-adds.
    TorchAndFma(f64),
}

impl Target {
    /// Name of its ceiling, as the answers have it, and whether it bounds bytes or operations.
    fn ceiling(self) -> (&'static str, &'static str) {
        match self {
            Self::Read(_) | Self::Torch(_) => ("read", "bytes"),
            Self::Copy(_) => ("copy", "bytes"),
            Self::TorchAndFma(_) => ("fma", "flops"),
            Self::AmxBf16(_) => ("amx_bf16", "flops"),
            Self::AmxInt8(_) => ("amx_int8", "flops"),
        }
    }

    /// In words, and whether these ratios reach it; `None` when it cannot be told.
    fn verdict(self, share: Option<f64>, times: Option<f64>) -> (String, Option<bool>) {
        match self {
            // A CPU without tiles: what torch does there is the measure.
            Self::AmxBf16(_) | Self::AmxInt8(_) if share.is_none() => {
                ("1 × torch, as there is no AMX".into(), times.map(|times| times >= 1.0))
            }
            Self::Read(want) | Self::Copy(want) | Self::AmxBf16(want) | Self::AmxInt8(want) => (
                format!("{:.0} % of {}", 100.0 * want, self.ceiling().0.replace('_', " ")),
                share.map(|share| share >= want),
            ),
            Self::Torch(want) | Self::TorchAndFma(want) => {
                (format!("{want} × torch"), times.map(|times| times >= want))
            }
        }
    }
}

/// The cases in the order of the table, with whether `--quick` has them.
fn cases() -> Vec<(String, Target, bool)> {
    let mut all = Vec::new();
    for (dtype, target) in [("bf16", Target::AmxBf16(0.45)), ("f32", Target::TorchAndFma(1.0))] {
        for tokens in [512, 2048, 8192] {
            all.push((format!("prefill/{dtype}/h32x8-d128-t{tokens}"), target, tokens < 2048));
        }
    }
    for batch in [1, 8, 32] {
        for kv in [512, 4096, 16384] {
            let id = format!("decode/bf16/h32x8-d128-b{batch}-kv{kv}");
            all.push((id, Target::Read(0.85), (batch, kv) == (8, 4096)));
        }
    }
    for dtype in ["f16", "f32"] {
        all.push((format!("decode/{dtype}/h32x8-d128-b8-kv4096"), Target::Read(0.85), false));
    }
    for batch in [1, 16] {
        all.push((format!("mla/bf16/h16-c512-r64-b{batch}-kv4096"), Target::Read(0.85), batch == 1));
    }
    for dtype in ["bf16", "f16", "f32"] {
        for m in [1, 8, 512, 2048] {
            let target = match (m, dtype) {
                (1 | 8, _) => Target::Read(0.85),
                (_, "bf16") => Target::AmxBf16(0.6),
                _ => Target::TorchAndFma(1.0),
            };
            all.push((format!("gemm/{dtype}/n4096-k4096-m{m}"), target, m == 1 || (m == 512 && dtype != "f16")));
        }
    }
    for m in [1, 16, 512, 2048] {
        // Packed once, as for a model.
        let target = if m > 32 { Target::AmxBf16(0.6) } else { Target::Read(0.85) };
        all.push((format!("packed_gemm/bf16/n4096-k4096-m{m}"), target, m == 512));
    }
    let formats = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"];
    for format in formats {
        // Larger than a share of the last-level cache.
        all.push((format!("block_gemm/{format}/n14336-k4096-m1"), Target::Read(0.85), format == "Q4_K"));
    }
    for format in ["Q4_0", "Q8_0", "Q4_K", "Q6_K"] {
        all.push((format!("block_gemm/{format}/n4096-k4096-m512"), Target::AmxInt8(0.4), format == "Q4_K"));
    }
    all.push(("scaled_gemm/e4m3/n14336-k4096-m1".into(), Target::Read(0.85), true));
    all.push(("scaled_gemm/e4m3/n4096-k4096-m512".into(), Target::TorchAndFma(1.0), false));
    all.push(("grouped_gemm/bf16/g16-n2048-k2048-m16".into(), Target::Read(0.85), false));
    all.push(("moe_ffn/bf16/e16x4-h2048-i1024-t16".into(), Target::Read(0.85), false));
    for dtype in ["bf16", "f32"] {
        all.push((format!("rms_norm/{dtype}/h4096-t16384"), Target::Copy(0.8), dtype == "bf16"));
    }
    all.push(("softmax/f32/v128256-b8".into(), Target::Torch(1.0), true));
    all.push(("top_p/f32/v128256-b8".into(), Target::Torch(10.0), true));
    all
}

/// What one case gave: seconds of the fastest call on each side, and the shares.
struct Row {
    id: String,
    ours: f64,
    theirs: Option<f64>,
    /// Amount per second, in GB or GFLOP, with its unit.
    rate: String,
    ceiling: f64,
    /// Medians of the ratios to the ceiling beside a sample, and to torch's sample beside it.
    share: Option<f64>,
    times: Option<f64>,
    /// Samples without a neighbour, and all.
    quiet: [usize; 2],
    target: Target,
}

pub(crate) fn run(filter: Option<&str>, quick: bool, update: bool) -> Result<()> {
    let wanted: Vec<_> = cases()
        .into_iter()
        .filter(|(id, _, small)| filter.is_none_or(|f| id.contains(f)) && (!quick || *small))
        .collect();
    ensure!(!wanted.is_empty(), "no case has {} in its name", filter.unwrap_or_default());
    let threads = std::thread::available_parallelism()?.to_string();
    let mut ours = Side::ours(&threads, quick)?;
    let mut theirs = match torch().and_then(|python| Side::torch(&python, &threads)) {
        Ok(side) => Some(side),
        Err(e) => {
            println!("torch is left out: {e:#}");
            None
        }
    };
    let begin = Instant::now();
    let mut rows = Vec::new();
    for (id, target, _) in wanted {
        let row = measured(&id, target, &mut ours, theirs.as_mut(), quick).with_context(|| id.clone())?;
        println!("{}", row.text());
        rows.push(row);
    }
    println!("{} cases in {:.0} s", rows.len(), begin.elapsed().as_secs_f64());
    if update {
        ensure!(filter.is_none() && !quick, "--update writes a whole run: without a filter and without --quick");
        let how = format!(
            "{}, {}, `cargo xtask bench-cpu --update`, {}, {threads} threads on either side{}.",
            bench::date()?,
            bench::commit()?,
            bench::machine()?,
            theirs.map_or(String::new(), |side| format!(", torch {}", side.version)),
        );
        bench::write_section(
            &format!("against torch: {}", bench::machine()?),
            &format!("{how}\n\n{INTRODUCTION}\n{}", table(&rows)),
        )?;
    }
    Ok(())
}

const INTRODUCTION: &str = "\
Times are of the fastest call, `rate` and `ceiling` the best of the case. `fir is` and `share` are medians: of torch's \
time over\nours, sample by sample, and of a sample's rate over the ceiling named in the target, measured right before and \
after it;\nof `quiet` samples, if there are three: those before and after which the threads were given as many instructions per \
second as ever, but for\na fifth. Rates are over the bytes or operations that a case must do at the least. Caches are paged for fir (16 \
tokens, 64 for\nmla) and contiguous for torch, whose attention is `scaled_dot_product_attention`; its top-p is sort, sum \
and draw.\nBeside products with fp8 or block formats torch's is the one in bf16, and its mixture of experts is a loop over \
them.\n";

fn table(rows: &[Row]) -> String {
    let mut out = String::from(
        "| case | fir, µs | torch, µs | fir is | rate | ceiling | share | quiet | target | met |\n\
         |---|--:|--:|--:|--:|--:|--:|--:|---|---|\n",
    );
    for row in rows {
        let _ = writeln!(out, "| {} |", row.cells().join(" | "));
    }
    out
}

impl Row {
    fn cells(&self) -> [String; 10] {
        let (target, met) = self.target.verdict(self.share, self.times);
        let or_none = |x: Option<String>| x.unwrap_or_else(|| "-".into());
        [
            format!("`{}`", self.id),
            micros(self.ours),
            or_none(self.theirs.map(micros)),
            or_none(self.times.map(|t| format!("{t:.2} ×"))),
            self.rate.clone(),
            if self.ceiling > 0.0 { format!("{:.1}", self.ceiling / 1e9) } else { "-".into() },
            or_none(self.share.map(|s| format!("{:.0} %", 100.0 * s))),
            format!("{} of {}", self.quiet[0], self.quiet[1]),
            target,
            or_none(met.map(|met| if met { "yes" } else { "no" }.into())),
        ]
    }

    fn text(&self) -> String {
        let [id, ours, theirs, times, rate, ceiling, share, quiet, target, met] = self.cells();
        format!(
            "{id:<40} {ours:>10} µs, torch {theirs:>10} µs: {times:>9}  {rate:>15} of {ceiling:>7}: {share:>5}, \
             {quiet} quiet (target {target}: {met})"
        )
    }
}

/// Seconds in microseconds, with four digits.
fn micros(seconds: f64) -> String {
    let us = seconds * 1e6;
    format!("{us:.*}", (3 - us.max(1.0).log10() as i32).max(0) as usize)
}

fn measured(id: &str, target: Target, ours: &mut Side, theirs: Option<&mut Side>, quick: bool) -> Result<Row> {
    let case = ours.ask(&format!("case {id}"))?;
    let mut theirs = match theirs {
        Some(side) => {
            let answer = side.ask_or_error(&format!("case {id}"))?;
            if answer.get("error").is_none() {
                agree(&case["result"], &answer["result"])?;
                Some(side)
            } else {
                None
            }
        }
        None => None,
    };
    let (name, unit) = target.ceiling();
    let amount = number(&case, unit)?;
    let (mut own, mut other, mut ceilings) = (vec![], vec![], vec![number(&ours.ask("ceilings")?, name)?]);
    // Instructions given to the threads before and after a sample, and after torch's beside it.
    let mut issued: Vec<[f64; 3]> = vec![];
    let sample = if quick { "sample 20" } else { "sample 60" };
    let mut rounds = if quick { 3 } else { 9 };
    // Three times as many at most, for as many quiet ones.
    let mut more = 2 * rounds;
    while rounds > 0 {
        rounds -= 1;
        let before = number(&ours.ask("issued")?, "issued")?;
        own.push(number(&ours.ask(sample)?, "seconds")?);
        let after = number(&ours.ask("issued")?, "issued")?;
        ceilings.push(number(&ours.ask("ceilings")?, name)?);
        if let Some(side) = &mut theirs {
            other.push(number(&side.ask(sample)?, "seconds")?);
        }
        issued.push([before, after, number(&ours.ask("issued")?, "issued")?]);
        // A call of a second is long enough to be taken a few times only.
        if own.iter().chain(&other).any(|&seconds| seconds > 0.5) {
            (rounds, more) = (rounds.min(2), 0);
        }
        if more > 0 && !quiet(&issued, 2)[own.len() - 1] {
            (rounds, more) = (rounds + 1, more - 1);
        }
    }
    // A neighbour on the same core halves everything for seconds: so each sample with the ceilings right before and after.
    let beside = ceilings.windows(2).map(|two| f64::midpoint(two[0], two[1]));
    let share = own.iter().zip(beside).map(|(seconds, ceiling)| amount / seconds / ceiling);
    let share = median(among(share.collect(), &quiet(&issued, 2)));
    let times = other.iter().zip(&own).map(|(theirs, ours)| theirs / ours);
    let times = median(among(times.collect(), &quiet(&issued, 3)));
    let counted = quiet(&issued, 2).iter().filter(|&&quiet| quiet).count();
    let least = |all: &[f64]| all.iter().copied().fold(f64::INFINITY, f64::min);
    let ceiling = ceilings.iter().copied().fold(0.0, f64::max);
    Ok(Row {
        id: id.to_owned(),
        ours: least(&own),
        theirs: theirs.map(|_| least(&other)),
        times,
        rate: format!("{:.1} {}", amount / least(&own) / 1e9, if unit == "bytes" { "GB/s" } else { "GFLOP/s" }),
        ceiling,
        share: share.filter(|_| ceiling > 0.0),
        quiet: [counted, own.len()],
        target,
    })
}

/// Of samples, by the first `n` numbers of each, which had no neighbour: as many instructions as the best, but for a fifth.
fn quiet(issued: &[[f64; 3]], n: usize) -> Vec<bool> {
    let best = issued.as_flattened().iter().copied().fold(0.0, f64::max);
    issued.iter().map(|sample| sample[..n].iter().all(|&issued| issued >= 0.8 * best)).collect()
}

/// The quiet ones, if there are three or more; else all.
fn among(all: Vec<f64>, quiet: &[bool]) -> Vec<f64> {
    let some: Vec<f64> = all.iter().zip(quiet).filter_map(|(&x, &quiet)| quiet.then_some(x)).collect();
    if some.len() < 3 { all } else { some }
}

fn median(mut all: Vec<f64>) -> Option<f64> {
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied()
}

fn number(answer: &Value, name: &str) -> Result<f64> {
    answer[name].as_f64().with_context(|| format!("no number {name} in {answer}"))
}

/// Whether both results are the same up to the rounding of bf16: a wrong one has no speed.
fn agree(ours: &Value, theirs: &Value) -> Result<()> {
    let numbers = |x: &Value| x.as_array().map(|x| x.iter().filter_map(Value::as_f64).collect::<Vec<_>>());
    let (a, b) = (numbers(ours).unwrap_or_default(), numbers(theirs).unwrap_or_default());
    let largest = a.iter().chain(&b).fold(0f64, |m, x| m.max(x.abs()));
    let close = a.len() == b.len() && a.iter().zip(&b).all(|(a, b)| (a - b).abs() <= 0.02 * largest);
    ensure!(close, "the two sides differ:\n  fir   {a:?}\n  torch {b:?}");
    Ok(())
}

/// A process that answers a line with a line of JSON.
struct Side {
    child: Child,
    questions: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    version: String,
}

impl Side {
    fn ours(threads: &str, quick: bool) -> Result<Self> {
        let build = "build --release -p fir-infer --all-features --bench compared --message-format json";
        let messages = cargo(build).quiet()?;
        let binary = messages
            .lines()
            .filter_map(|line| serde_json::from_str::<Value>(line).ok())
            .filter(|m| m["target"]["name"] == "compared")
            .find_map(|m| m["executable"].as_str().map(String::from))
            .context("cargo named no binary of the bench")?;
        let mut command = Command::new(binary);
        command.arg("--serve").args(quick.then_some("--quick")).env("FIR_CPU_THREADS", threads);
        Self::start(command, String::new())
    }

    fn torch(python: &str, threads: &str) -> Result<Self> {
        let mut command = Command::new(python);
        command.args(["crates/fir/benches/compared.py", threads]).envs([TORCH_ENV, ("OMP_NUM_THREADS", threads)]);
        Self::start(command, TORCH.trim_start_matches("torch==").to_owned())
    }

    fn start(mut command: Command, version: String) -> Result<Self> {
        let start = format!("cannot start {command:?}");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context(start)?;
        let questions = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().context("a piped stdout")?);
        Ok(Self { child, questions, answers, version })
    }

    /// The answer, also when it says `error`.
    fn ask_or_error(&mut self, question: &str) -> Result<Value> {
        let mut line = String::new();
        let sent = self.questions.as_mut().map(|q| writeln!(q, "{question}").and_then(|()| q.flush()));
        if !matches!(sent, Some(Ok(()))) || self.answers.read_line(&mut line)? == 0 {
            bail!("no answer to `{question}`: {}", self.child.wait()?);
        }
        serde_json::from_str(&line).with_context(|| line)
    }

    fn ask(&mut self, question: &str) -> Result<Value> {
        let answer = self.ask_or_error(question)?;
        ensure!(answer.get("error").is_none(), "`{question}`: {}", answer["error"]);
        Ok(answer)
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        drop(self.questions.take());
        let _ = self.child.wait();
    }
}

const TORCH: &str = "torch==2.11.0";

/// The CUDA packages without which torch's libraries cannot be loaded even for a CPU: they run code when they are.
const CUDA: &str = "nvidia-cuda-runtime==13.0.96 nvidia-cuda-cupti==13.0.85";

/// What torch needs besides.
const NEEDS: &str = "filelock typing_extensions sympy networkx jinja2 fsspec numpy";

/// oneDNN takes the sizes of tiles from a CPUID leaf that virtual machines hide, and then dies of an illegal
/// instruction; below that level it does not ask.
const TORCH_ENV: (&str, &str) = ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16");

/// What tests run with. Two of them run at a time, and torch's threads that wait for work take the core of the
/// other's: with one each they are twice as fast. Random cases are the same in every run, so that only a change can
/// break it; `cargo test` alone and `cargo xtask fuzz` draw others. AMX is tested where there is none, too.
pub(crate) const TEST_ENV: [(&str, &str); 4] =
    [TORCH_ENV, ("OMP_NUM_THREADS", "1"), ("PROPTEST_RNG_SEED", "20261116"), ("FIR_EMULATE_TILES", "1")];

/// A Python that has torch; made under target/ at the first call, 1.4 GB instead of 5 with all of CUDA.
///
/// PyPI has torch with CUDA only. Most of the CUDA libraries it links are not needed for a CPU, only asked for when
/// torch is loaded, so empty ones of their names do: functions are bound when they are called, never.
pub(crate) fn torch() -> Result<String> {
    let (dir, ready) = ("target/torch", "target/torch/ready");
    let python = format!("{dir}/bin/python");
    if !Path::new(ready).exists() {
        program("python3", &format!("-m venv {dir}")).run()?;
        let pip = format!("{dir}/bin/pip");
        program(&pip, &format!("install -q --disable-pip-version-check --no-compile --no-deps {TORCH} {CUDA}"))
            .run()?;
        // Of what torch lists, pip says that most is missing: so it is.
        program(&pip, &format!("install -q --disable-pip-version-check --no-compile {NEEDS}")).quiet()?;
        stand_ins(&python)?;
        // Bytecode of what is imported, even where the environment says to write none: every worker would compile it anew, for 1.3 s.
        program(&python, "-c").args(&["import torch"]).env("PYTHONDONTWRITEBYTECODE", "").run()?;
        fs::write(ready, TORCH)?;
    }
    Ok(python)
}

/// Puts an empty library in place of each that torch's cannot find.
fn stand_ins(python: &str) -> Result<()> {
    let output =
        Command::new(python).args(["-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).output()?;
    let folder = format!("{}/torch/lib", String::from_utf8_lossy(&output.stdout).trim());
    let empty = format!("{folder}/empty.c");
    fs::write(&empty, "")?;
    // Whatever runs in this environment binds functions when they are called, so that an empty library is enough.
    fs::write(format!("{folder}/../../lazy.pth"), "import os, sys; sys.setdlopenflags(os.RTLD_LAZY)\n")?;
    for library in ["libtorch_global_deps.so", "libtorch_python.so"] {
        let needed = program("ldd", &format!("{folder}/{library}")).quiet()?;
        for name in needed.lines().filter_map(|l| l.trim().split_once(" => not found")).map(|(name, _)| name) {
            program("cc", &format!("-shared -Wl,-soname,{name} -o {folder}/{name} {empty}")).quiet()?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_held_against_the_ratio_they_name() {
        assert_eq!(Target::Read(0.85).verdict(Some(0.9), None), ("85 % of read".into(), Some(true)));
        assert_eq!(Target::AmxBf16(0.6).verdict(Some(0.5), Some(9.0)), ("60 % of amx bf16".into(), Some(false)));
        assert_eq!(Target::Torch(10.0).verdict(Some(0.1), Some(12.0)), ("10 × torch".into(), Some(true)));
        assert_eq!(Target::TorchAndFma(1.0).verdict(Some(0.9), None).1, None);
    }

    #[test]
    fn case_names_are_unique_and_some_are_quick() {
        let all = cases();
        let names: std::collections::BTreeSet<_> = all.iter().map(|(id, ..)| id).collect();
        assert_eq!(names.len(), all.len());
        assert!((5..20).contains(&all.iter().filter(|(.., quick)| *quick).count()));
    }

    #[test]
    fn results_agree_up_to_the_rounding_of_bf16() {
        let json = |text: &str| serde_json::from_str::<Value>(text).unwrap();
        assert!(agree(&json("[1.0, -0.5]"), &json("[1.004, -0.498]")).is_ok());
        assert!(agree(&json("[1.0, -0.5]"), &json("[1.0, 0.5]")).is_err());
        assert!(agree(&json("[1.0]"), &json("[1.0, 0.5]")).is_err());
        assert!(agree(&json("[]"), &json("[]")).is_ok());
    }

    #[test]
    fn samples_beside_a_neighbour_are_left_out_unless_few_remain() {
        let issued = [[10.0, 9.0, 5.0], [10.0, 5.0, 9.0], [9.0, 8.0, 8.5], [8.1, 9.9, 10.0]];
        assert_eq!(quiet(&issued, 2), [true, false, true, true]);
        assert_eq!(quiet(&issued, 3), [false, false, true, true]);
        let all = vec![1.0, 2.0, 3.0, 4.0];
        assert_eq!(among(all.clone(), &quiet(&issued, 2)), [1.0, 3.0, 4.0]);
        assert_eq!(among(all.clone(), &quiet(&issued, 3)), all);
        // Not measured: all count.
        assert_eq!(quiet(&[[0.0; 3]; 2], 3), [true; 2]);
    }

    #[test]
    fn rows_show_what_was_measured() {
        let row = Row {
            id: "gemm/f32/m1".into(),
            ours: 1e-3,
            theirs: Some(2e-3),
            rate: "20.0 GB/s".into(),
            ceiling: 40e9,
            share: Some(0.5),
            times: Some(2.0),
            quiet: [7, 12],
            target: Target::Read(0.85),
        };
        let shown =
            "| `gemm/f32/m1` | 1000 | 2000 | 2.00 × | 20.0 GB/s | 40.0 | 50 % | 7 of 12 | 85 % of read | no |\n";
        assert!(table(&[row]).ends_with(shown));
    }
}
