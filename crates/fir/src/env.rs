//! Every environment variable the library reads, once. A bad value is an error, not a default.

use crate::error::{Error, Result};

/// Folder of compiled kernels. Default: `fir` in `$XDG_CACHE_HOME`, or in `~/.cache`.
pub const FIR_CACHE_DIR: &str = "FIR_CACHE_DIR";
/// Folder of kernels that were compiled elsewhere, as `fir jit build --out` makes it: looked into first, never written. With
/// it a machine needs a driver and no compiler. Default: none.
pub const FIR_CUBIN_DIR: &str = "FIR_CUBIN_DIR";
/// Instruction level of the CPU kernels: `portable`, `avx2`, `avx512`, `amx`. Default: the highest this CPU has.
pub const FIR_CPU_LEVEL: &str = "FIR_CPU_LEVEL";
/// Sizes of the CPU kernels' blocks: `default`, or a file as `fir tune` writes them. Default: what that saved on this
/// machine, if it ran.
pub const FIR_CPU_TUNING: &str = "FIR_CPU_TUNING";
/// Threads of the CPU kernels. Default: the cores this process may use.
pub const FIR_CPU_THREADS: &str = "FIR_CPU_THREADS";
/// `1`: level `amx` is there on CPUs that have AVX-512 and no AMX, too; instructions of tiles are emulated, a thousand
/// times as slow. For tests (feature `testing`, Linux). Default: off.
pub const FIR_EMULATE_TILES: &str = "FIR_EMULATE_TILES";
/// NVRTC's library, or the folder it is in. Default: the one found in the CUDA toolkit, in Python's `nvidia` packages or on
/// the loader's path.
pub const FIR_NVRTC: &str = "FIR_NVRTC";
/// `1`: kernels for `compute-sanitizer --tool racecheck`, in which every lane of a warp tells a barrier of what it read or wrote by itself. The
/// tool does not see that one lane does it for all of them, who wait for each other first. Slower; default: off.
pub const FIR_RACECHECK: &str = "FIR_RACECHECK";
/// `1`: tests that need a GPU fail instead of skipping.
pub const FIR_REQUIRE_GPU: &str = "FIR_REQUIRE_GPU";
/// `1`: tests that need NVRTC fail instead of skipping.
pub const FIR_REQUIRE_NVRTC: &str = "FIR_REQUIRE_NVRTC";

/// The parsed value of `name`, `None` when it is not set.
pub(crate) fn read<T: std::str::FromStr>(name: &'static str, want: &str) -> Result<Option<T>> {
    match std::env::var(name) {
        Err(std::env::VarError::NotPresent) => Ok(None),
        Err(std::env::VarError::NotUnicode(s)) => {
            Err(Error::Env { name, got: s.to_string_lossy().into_owned(), want: want.into() })
        }
        Ok(s) => match s.parse() {
            Ok(x) => Ok(Some(x)),
            Err(_) => Err(Error::Env { name, got: s, want: want.into() }),
        },
    }
}
