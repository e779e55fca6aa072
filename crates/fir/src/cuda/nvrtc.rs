//! NVRTC: CUDA C++ text to a cubin, in memory.
//!
//! The library is looked for, in this order, as [`env::FIR_NVRTC`] says, in the CUDA toolkit, in Python's `nvidia`
//! packages and on the loader's path; of one place the newest that the driver can load.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_void};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::Mutex;

use super::driver::library;
use crate::env;
use crate::error::{Error, Result};

type Program = *mut c_void;

library! {
    struct Api {
        nvrtcAddNameExpression(Program, *const c_char);
        nvrtcCompileProgram(Program, i32, *const *const c_char);
        nvrtcCreateProgram(*mut Program, *const c_char, *const c_char, i32, *const *const c_char, *const *const c_char);
        nvrtcDestroyProgram(*mut Program);
        nvrtcGetCUBIN(Program, *mut c_char);
        nvrtcGetCUBINSize(Program, *mut usize);
        nvrtcGetLoweredName(Program, *const c_char, *mut *const c_char);
        nvrtcGetProgramLog(Program, *mut c_char);
        nvrtcGetProgramLogSize(Program, *mut usize);
        nvrtcVersion(*mut i32, *mut i32);
    }
}

/// The answer to a program that does not compile.
const COMPILATION: i32 = 6;

/// A loaded NVRTC.
pub(crate) struct Nvrtc {
    api: Api,
    version: (i32, i32),
    path: PathBuf,
}

/// What is compiled: a text, the headers it may include, and one kernel in it.
pub(crate) struct Job<'a> {
    pub(crate) text: &'a str,
    /// Name as in `#include <name>`, and text.
    pub(crate) headers: &'a [(String, &'a str)],
    pub(crate) options: &'a [String],
    /// C++ name of the kernel with its template arguments.
    pub(crate) kernel: &'a str,
}

/// A compiled kernel.
pub(crate) struct Output {
    pub(crate) cubin: Vec<u8>,
    /// The kernel's name in the cubin.
    pub(crate) symbol: String,
    pub(crate) log: String,
}

impl Nvrtc {
    /// The newest library whose major version is at most `limit`, the driver's.
    pub(crate) fn get(limit: i32) -> Result<&'static Self> {
        static LOADED: Mutex<BTreeMap<i32, Result<&'static Nvrtc>>> = Mutex::new(BTreeMap::new());
        let mut loaded = LOADED.lock().unwrap_or_else(|e| e.into_inner());
        loaded.entry(limit).or_insert_with(|| Self::find(limit)).clone()
    }

    /// Its version, major and minor.
    pub(crate) fn version(&self) -> (i32, i32) {
        self.version
    }

    /// The file it was loaded from.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    fn find(limit: i32) -> Result<&'static Self> {
        let mut tried = Vec::new();
        for path in candidates()? {
            match Self::load(&path) {
                Ok(nvrtc) if nvrtc.version.0 <= limit => return Ok(Box::leak(Box::new(nvrtc))),
                Ok(nvrtc) => tried.push(format!(
                    "{} is version {}.{}, whose kernels this driver cannot load (it speaks CUDA {limit}): update the driver, \
                     or install an older NVRTC",
                    path.display(),
                    nvrtc.version.0,
                    nvrtc.version.1
                )),
                // The loader's path is tried blindly: what is not there need not be told.
                Err(_) if path.components().count() == 1 => {}
                Err(e) => tried.push(e),
            }
        }
        if tried.is_empty() {
            tried.push(
                "no libnvrtc.so.13 or .12 in a CUDA toolkit, in Python's packages or on the loader's path".into(),
            );
        }
        let major = if limit < 13 { "-cu12" } else { "" };
        Err(Error::Unavailable {
            what: "NVRTC, which compiles kernels".into(),
            got: tried.join("; "),
            hint: format!("`pip install nvidia-cuda-nvrtc{major}`, or set {} to its file", env::FIR_NVRTC),
        })
    }

    fn load(path: &Path) -> Result<Self, String> {
        let error = |e: libloading::Error| format!("{}: {e}", path.display());
        // NVRTC opens its builtins by name alone: a copy that is open already is found, wherever it lies.
        if let Some(folder) = path.parent().filter(|f| f.is_absolute()) {
            for builtins in files(folder, "libnvrtc-builtins.so") {
                // SAFETY: NVIDIA's library of tables; loading it runs nothing of ours.
                std::mem::forget(unsafe { libloading::Library::new(builtins) });
            }
        }
        // SAFETY: as above.
        let library = unsafe { libloading::Library::new(path) }.map_err(error)?;
        let library = Box::leak(Box::new(library));
        // SAFETY: these are the types of nvrtc.h, and the library was leaked.
        let api = unsafe { Api::load(library) }.map_err(|name| format!("{}: no {name}", path.display()))?;
        let mut version = (0, 0);
        // SAFETY: two integers are written.
        let code = unsafe { (api.nvrtcVersion)(&mut version.0, &mut version.1) };
        if code != 0 {
            return Err(format!("{}: nvrtcVersion answered {code}", path.display()));
        }
        Ok(Self { api, version, path: path.to_owned() })
    }

    /// Compiles `job`; the compiler's log when it cannot.
    pub(crate) fn compile(&self, job: &Job<'_>) -> Result<Output, String> {
        let text = |s: &str| CString::new(s).map_err(|_| "a 0 in the source".to_owned());
        let texts = |list: &mut dyn Iterator<Item = &str>| list.map(text).collect::<Result<Vec<_>, _>>();
        let pointers = |list: &[CString]| list.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
        let (source, kernel) = (text(job.text)?, text(job.kernel)?);
        let headers = texts(&mut job.headers.iter().map(|h| h.1))?;
        let names = texts(&mut job.headers.iter().map(|h| h.0.as_str()))?;
        // Its own cache, of 12.9 and later, would leave the log empty that registers are read from; ours keeps both.
        let fresh = (self.version() >= (12, 9)).then_some("--no-cache");
        let options = texts(&mut job.options.iter().map(String::as_str).chain(fresh))?;
        let mut guard = Guard { api: &self.api, program: ptr::null_mut() };
        // SAFETY: all strings end in 0 and live through the call, which copies them; the counts are the lists'.
        let code = unsafe {
            (self.api.nvrtcCreateProgram)(
                &mut guard.program,
                source.as_ptr(),
                c"fir.cu".as_ptr(),
                headers.len() as i32,
                pointers(&headers).as_ptr(),
                pointers(&names).as_ptr(),
            )
        };
        check("nvrtcCreateProgram", code)?;
        let program = guard.program;
        // SAFETY: `program` is live until `guard` is dropped, here and below.
        check("nvrtcAddNameExpression", unsafe { (self.api.nvrtcAddNameExpression)(program, kernel.as_ptr()) })?;
        // SAFETY: as above; the options end in 0.
        let code =
            unsafe { (self.api.nvrtcCompileProgram)(program, options.len() as i32, pointers(&options).as_ptr()) };
        let mut len = 0;
        // SAFETY: a size is written.
        check("nvrtcGetProgramLogSize", unsafe { (self.api.nvrtcGetProgramLogSize)(program, &mut len) })?;
        let mut log = vec![0u8; len.max(1)];
        // SAFETY: `log` has the size that was asked for.
        check("nvrtcGetProgramLog", unsafe { (self.api.nvrtcGetProgramLog)(program, log.as_mut_ptr().cast()) })?;
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned();
        if code == COMPILATION {
            return Err(log);
        }
        check("nvrtcCompileProgram", code).map_err(|e| format!("{e}\n{log}"))?;
        // SAFETY: a size is written.
        check("nvrtcGetCUBINSize", unsafe { (self.api.nvrtcGetCUBINSize)(program, &mut len) })?;
        let mut cubin = vec![0u8; len];
        // SAFETY: `cubin` has the size that was asked for.
        check("nvrtcGetCUBIN", unsafe { (self.api.nvrtcGetCUBIN)(program, cubin.as_mut_ptr().cast()) })?;
        let mut symbol = ptr::null();
        // SAFETY: a pointer is written, to a string of the program's.
        check("nvrtcGetLoweredName", unsafe { (self.api.nvrtcGetLoweredName)(program, kernel.as_ptr(), &mut symbol) })?;
        // SAFETY: the string lives as long as the program, and is copied here.
        let symbol = unsafe { CStr::from_ptr(symbol) }.to_string_lossy().into_owned();
        Ok(Output { cubin, symbol, log })
    }
}

/// Destroys the program.
struct Guard<'a> {
    api: &'a Api,
    program: Program,
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: `nvrtcCreateProgram` made it and nobody destroyed it.
            unsafe { (self.api.nvrtcDestroyProgram)(&mut self.program) };
        }
    }
}

fn check(call: &str, code: i32) -> Result<(), String> {
    if code == 0 { Ok(()) } else { Err(format!("{call} answered {code}")) }
}

/// Files that may be NVRTC, the best first; the last are names for the loader.
fn candidates() -> Result<Vec<PathBuf>> {
    if let Some(given) = env::read::<PathBuf>(env::FIR_NVRTC, "a file or a folder")? {
        if given.is_dir() {
            return Ok(files(&given, "libnvrtc.so"));
        }
        return Ok(vec![given]);
    }
    let variable = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let mut folders = Vec::new();
    for toolkit in
        ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(|name| variable(name)).chain([PathBuf::from("/usr/local/cuda")])
    {
        folders.extend([toolkit.join("lib64"), toolkit.join("targets/x86_64-linux/lib")]);
    }
    // Installation prefixes of Python: a virtual environment's, and that of the `python3` that would run.
    let on_path = variable("PATH")
        .into_iter()
        .flat_map(|path| std::env::split_paths(&path).filter(|dir| dir.join("python3").exists()).collect::<Vec<_>>());
    let prefixes = ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(|name| variable(name));
    let prefixes = prefixes.chain(on_path.filter_map(|bin| bin.parent().map(Path::to_owned)));
    for prefix in prefixes.chain(variable("HOME").map(|home| home.join(".local"))) {
        for lib in [prefix.join("lib"), prefix.join("local/lib")] {
            for python in files(&lib, "python3") {
                for packages in [python.join("site-packages"), python.join("dist-packages")] {
                    folders.extend(["cu13/lib", "cuda_nvrtc/lib"].map(|p| packages.join("nvidia").join(p)));
                }
            }
        }
    }
    let mut found: Vec<PathBuf> = folders.iter().flat_map(|folder| files(folder, "libnvrtc.so")).collect();
    found.extend(["libnvrtc.so.13", "libnvrtc.so.12"].map(PathBuf::from));
    Ok(found)
}

/// What in `folder` begins with `start`, the highest number first.
fn files(folder: &Path, start: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<_> = entries
        .map(|e| e.path())
        .filter(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with(start)))
        .collect();
    found.sort();
    found.reverse();
    found
}
