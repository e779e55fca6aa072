//! The JIT lane: every kernel that dispatch may choose compiles, within its budget, with no GPU; and the cache of compiled
//! kernels keeps its promises.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use fir::exec::Arch;
use fir::jit::{self, Cubin, Origin, Source};

/// Most registers of a thread on sm_90a, and most bytes that its code may store for want of more, by family. A kernel of 256
/// threads with 32 registers fills a multiprocessor, one with 64 fills half of it. Families whose rows stay in shared memory
/// have three blocks of 512 threads on one, so that one row's barriers hide behind another's loads: they spill numbers of
/// the whole row, outside of the loops over its elements.
const BUDGETS: &[(&str, u32, u32)] = &[
    ("activation", 48, 0),
    // Bound by shared memory: two blocks of 128 threads to a multiprocessor, which has registers for 255 each.
    ("attention/decode", 255, 0),
    // For sm_86 the compiler stores six numbers; for sm_90a none.
    ("attention/levels", 64, 24),
    ("attention/merge", 64, 0),
    // Not made for speed.
    ("attention/plain", 255, 0),
    // 512 threads at the start; then 24, 168 and 160 by role, which the compiler does not count. 96 of Q and 128 of the output
    // leave little: numbers of a whole unit are spilled.
    ("attention/sm90_mla", 128, 32),
    // 128 accumulators and 64 scores; two blocks of 128 threads have registers for 255 each.
    ("attention/prefill", 255, 0),
    // What a thread of 384 has when they begin; two warpgroups then take 232 each. Their loops spill nothing, what stands
    // around them a few numbers of the unit.
    ("attention/sm90_prefill", 168, 80),
    // A block of 12 or 16 warps to a multiprocessor.
    ("attention/sm90_sparse", 168, 0),
    // Two blocks of 128 threads, or one of 256, to a multiprocessor: its registers hold 255 of each.
    ("gemm", 255, 0),
    ("gemm_any", 64, 0),
    ("gemm_blocks", 224, 0),
    ("lora", 64, 0),
    // A thread keeps up to 32 numbers of its row, and 32 more on their way.
    ("modulate", 128, 48),
    ("moe", 40, 0),
    ("norm", 64, 0),
    ("page", 32, 0),
    ("put", 32, 0),
    ("quantize", 128, 0),
    ("rope", 48, 0),
    ("sampling", 64, 192),
    // A block to a multiprocessor, whose warpgroups trade registers: 168 at the start, or all of 256 threads' 255.
    ("sm90_gemm", 255, 0),
    // For sm_120a, where 40 registers are left, the tree's kernel stores a number more than before it waits for its cluster: 116; for sm_90a 80.
    ("speculative", 64, 116),
    ("tokens", 128, 0),
    ("topk", 64, 256),
];

/// Bytes that a kernel may spill all the same, by parts of its name: accumulators of 256 columns beside fragments; addresses
/// beside the fragments of two tiles of rows that 8-bit keys and values are widened to, and beside the hooks of a variant.
const SPILLS: &[(&[&str], u32)] = &[
    (&[", 256, 256, "], 64),
    (&["fir::prefill<", "fir::E4m3, "], 160),
    (&["fir::prefill<", "fir::E5m2, "], 160),
    (&["fir::prefill<"], 64),
];

fn budget(source: &Source) -> (u32, u32) {
    let family = source.family();
    let found = BUDGETS.iter().find(|b| b.0 == family).unwrap_or_else(|| panic!("{family} has no budget"));
    let more =
        SPILLS.iter().find(|(parts, _)| parts.iter().all(|p| source.name().contains(p))).map_or(0, |(_, bytes)| *bytes);
    (found.1, found.2.max(more))
}

/// Whether there is a compiler; says so when not, and fails when there must be one.
#[expect(clippy::print_stderr, reason = "a skip must be seen")]
pub(crate) fn has_compiler() -> bool {
    match jit::compiler() {
        Ok(_) => true,
        Err(e) if std::env::var(fir::env::FIR_REQUIRE_NVRTC).is_ok_and(|v| v == "1") => panic!("{e}"),
        Err(e) => {
            eprintln!("skipped: {e}");
            false
        }
    }
}

/// Compiles on all cores, past the cache.
fn compile_all(jobs: &[(Source, Arch)]) -> Vec<(&Source, Arch, fir::Result<Cubin>)> {
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| {
                while let Some((source, arch)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let result = jit::compile(source, *arch);
                    done.lock().unwrap().push((source, *arch, result));
                }
            });
        }
    });
    done.into_inner().unwrap()
}

#[test]
#[expect(clippy::print_stdout, reason = "numbers are for the reader, also when they fit")]
fn every_kernel_compiles_for_sm_90a_within_its_budget() {
    if !has_compiler() {
        return;
    }
    let mut kernels = jit::kernels();
    let all = kernels.len();
    if std::env::var("FIR_TEST_EVERY_KERNEL").is_err() {
        let names: BTreeSet<_> = kernels.iter().map(|k| k.name().to_owned()).collect();
        // The same code but for the conversions.
        let pairs = [("fir::f16", "fir::bf16"), ("fir::F16", "fir::Bf16"), ("fir::E5m2", "fir::E4m3")];
        let twin = |name: &str| pairs.iter().fold(name.to_owned(), |name, (from, to)| name.replace(from, to));
        kernels.retain(|k| twin(k.name()) == k.name() || !names.contains(&twin(k.name())));
    }
    let left = all - kernels.len();
    let jobs: Vec<_> = kernels.into_iter().map(|k| (k, Arch::HOPPER)).collect();
    let (mut faults, mut most) = (Vec::new(), BTreeMap::new());
    for (source, _, result) in compile_all(&jobs) {
        let usage = match result {
            Ok(cubin) => cubin.usage,
            Err(e) => {
                faults.push(e.to_string());
                continue;
            }
        };
        let (registers, spilled) = budget(source);
        if usage.registers > registers || usage.spilled > spilled || usage.registers == 0 {
            faults.push(format!("{}: {usage:?}, budget {registers} registers, {spilled} bytes", source.name()));
        }
        let max: &mut (u32, u32) = most.entry(source.family()).or_default();
        *max = (usage.registers.max(max.0), usage.spilled.max(max.1));
    }
    println!("{} kernels; most registers and bytes spilled: {most:?}", jobs.len());
    println!(
        "{left} that are others with f16 for bf16 or e5m2 for e4m3 are left to FIR_TEST_EVERY_KERNEL=1 (`cargo xtask jit`)"
    );
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn one_kernel_of_each_file_compiles_for_every_architecture() {
    if !has_compiler() {
        return;
    }
    let families: BTreeMap<_, _> = jit::kernels().into_iter().map(|k| (k.family().to_owned(), k)).collect();
    // The last of a family: the one with the most in it. fp8 is done by bits before sm_89, so its stores are here too.
    let fp8 = jit::kernels().into_iter().find(|k| k.name().contains("e5m2"));
    let chosen = families.into_values().chain(fp8);
    let all = chosen.flat_map(|k| Arch::ALL.map(|arch| (k.clone(), arch)));
    let jobs: Vec<_> = all.filter(|(k, arch)| k.runs_on(*arch)).collect();
    for (source, arch, result) in compile_all(&jobs) {
        let usage = result.unwrap_or_else(|e| panic!("{e}")).usage;
        assert!(usage.spilled <= budget(source).1, "{} for {arch}: {usage:?}", source.name());
    }
}

/// Not a test of its own: the processes of the tests below, which must have another cache than this one.
#[test]
#[ignore = "started by other tests, in processes of their own"]
#[expect(clippy::print_stdout, reason = "read by the test that started it")]
fn child_builds_one_kernel() {
    let kernels = jit::kernels();
    let results: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3).map(|_| scope.spawn(|| jit::build(&kernels[0], Arch::HOPPER))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    for result in results {
        println!("origin: {:?}", result.unwrap().1);
    }
}

/// Runs [`child_builds_one_kernel`] with a cache in `dir`; where each of its threads found the kernel.
fn children(dir: &Path, count: usize) -> Vec<Vec<Origin>> {
    let start = |_| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "jit::child_builds_one_kernel", "--ignored", "--nocapture"]);
        command.env(fir::env::FIR_CACHE_DIR, dir).stdout(std::process::Stdio::piped()).spawn().unwrap()
    };
    let started: Vec<_> = (0..count).map(start).collect();
    started
        .into_iter()
        .map(|child| {
            let out = child.wait_with_output().unwrap();
            let text = String::from_utf8_lossy(&out.stdout).into_owned();
            assert!(out.status.success(), "{text}");
            let origins = text.lines().filter_map(|l| l.split_once("origin: ")).map(|(_, origin)| match origin {
                "Memory" => Origin::Memory,
                "Disk" => Origin::Disk,
                "Compiled" => Origin::Compiled,
                other => panic!("{other}"),
            });
            origins.collect()
        })
        .collect()
}

#[test]
fn kernels_of_the_callers_own_are_compiled_and_need_a_device_to_be_loaded() {
    if !has_compiler() {
        return;
    }
    let text = "__global__ void twice(float* x, int n) { int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) x[i] *= K; }";
    let compiled = |options: &[String]| jit::compile_text(text, "twice", options, Arch::HOPPER);
    let cubin = compiled(&["-DK=2".into()]).unwrap();
    assert!(cubin.usage.registers > 0, "{:?}", cubin.usage);
    let wrong = compiled(&[]).unwrap_err().to_string();
    assert!(wrong.contains("\"K\" is undefined"), "{wrong}");
    let dry = fir::exec::OwnKernel::load(&fir::exec::Gpu::dry(Arch::HOPPER), &cubin).unwrap_err().to_string();
    assert!(dry.contains("a dry run has no device"), "{dry}");
}

#[test]
fn a_folder_of_kernels_needs_no_compiler() {
    if !has_compiler() {
        return;
    }
    let dir = std::env::temp_dir().join(format!("fir-jit-folder-{}", std::process::id()));
    jit::build_into(&dir.join("cubins"), &jit::kernels()[0], Arch::HOPPER).unwrap();
    let child = |folder: &str| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "jit::child_builds_one_kernel", "--ignored", "--nocapture"]);
        command.env(fir::env::FIR_NVRTC, "/nonexistent/libnvrtc.so").env(fir::env::FIR_CACHE_DIR, dir.join("cache"));
        let out = command.env(fir::env::FIR_CUBIN_DIR, dir.join(folder)).output().unwrap();
        let text = [out.stdout, out.stderr].concat();
        (out.status.success(), String::from_utf8_lossy(&text).into_owned())
    };
    let (found, text) = child("cubins");
    assert!(found && text.contains("origin: Disk"), "{text}");
    let (found, text) = child("elsewhere");
    assert!(!found && text.contains("NVRTC, which compiles kernels") && text.contains("pip install"), "{text}");
    assert!(!dir.join("cache").exists(), "nothing is written");
    std::fs::remove_dir_all(&dir).unwrap();
}

fn once(origins: &[Origin], first: Origin) -> bool {
    origins.len() == 3
        && origins.iter().filter(|o| **o == first).count() == 1
        && origins.iter().filter(|o| **o == Origin::Memory).count() == 2
}

#[test]
fn kernels_are_compiled_once_and_shared_by_processes() {
    if !has_compiler() {
        return;
    }
    let dir = std::env::temp_dir().join(format!("fir-jit-lane-{}", std::process::id()));
    // Two race: each compiles or finds what the other wrote, one of its threads alone.
    for origins in children(&dir, 2) {
        assert!(once(&origins, Origin::Compiled) || once(&origins, Origin::Disk), "{origins:?}");
    }
    let files = || -> Vec<_> { std::fs::read_dir(dir.join("kernels")).unwrap().map(|e| e.unwrap().path()).collect() };
    assert_eq!(files().len(), 1, "one kernel, no temporary file: {:?}", files());
    assert!(once(&children(&dir, 1)[0], Origin::Disk));
    // A torn file is compiled again and mended.
    let whole = std::fs::read(&files()[0]).unwrap();
    std::fs::write(&files()[0], &whole[..whole.len() - 7]).unwrap();
    assert!(once(&children(&dir, 1)[0], Origin::Compiled));
    assert_eq!(std::fs::read(&files()[0]).unwrap(), whole, "compiling is reproducible");
    std::fs::remove_dir_all(&dir).unwrap();
    // A file where the folder should be: nothing can be kept, and everything works.
    std::fs::write(&dir, "in the way").unwrap();
    assert!(once(&children(&dir, 1)[0], Origin::Compiled));
    std::fs::remove_file(&dir).unwrap();
}
