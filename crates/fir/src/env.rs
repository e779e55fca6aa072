//! Every environment variable the library reads, once. A bad value is an error, not a default.

use crate::error::{Error, Result};

/// Instruction level of the CPU kernels: `portable`, `avx2`, `avx512`, `amx`. Default: the highest this CPU has.
pub const FIR_CPU_LEVEL: &str = "FIR_CPU_LEVEL";
/// Sizes of the CPU kernels' blocks: `default`, or a file as `fir tune` writes them. Default: what that saved on this
/// machine, if it ran.
pub const FIR_CPU_TUNING: &str = "FIR_CPU_TUNING";
/// Threads of the CPU kernels. Default: the cores this process may use.
pub const FIR_CPU_THREADS: &str = "FIR_CPU_THREADS";

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
