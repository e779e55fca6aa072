//! Dry runs: launches as text, for tests of everything up to the launch on machines without a GPU.

use std::sync::Mutex;

use super::call::Arg;
use super::driver::Grid;
use super::jit::Source;
use super::params;

/// A launch that a dry run recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Operator.
    pub op: &'static str,
    /// C++ name of the kernel with its template arguments.
    pub kernel: String,
    /// Grid, block, shared memory and cluster, as text.
    pub shape: String,
    /// The kernel's parameters by name; addresses as the argument they are of.
    pub params: String,
}

impl std::fmt::Display for Launch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}\n  {}\n  {}", self.op, self.kernel, self.shape, self.params)
    }
}

/// The launches of a dry run, in order.
#[derive(Default)]
pub(super) struct Recorder(Mutex<Vec<Launch>>);

impl Recorder {
    pub(super) fn take(&self) -> Vec<Launch> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(|e| e.into_inner()))
    }

    pub(super) fn record(&self, op: &'static str, source: &Source, grid: Grid, bytes: &[u8], args: &[Arg<'_>]) {
        let name = |address: u64| {
            let inside = args.iter().find(|a| (a.start..a.start + a.len.max(1) as u64).contains(&address));
            match inside {
                _ if address == 0 => "none".into(),
                Some(arg) if arg.start == address => arg.name.into(),
                Some(arg) => format!("{}+{}", arg.name, address - arg.start),
                None => format!("{address:#x}"),
            }
        };
        let Grid { grid, block, smem, cluster, early } = grid;
        let mut shape = format!("grid {grid:?}, block {block:?}, smem {smem}");
        if cluster > 1 {
            shape += &format!(", cluster {cluster}");
        }
        if early {
            shape += ", early";
        }
        let params = params::show(bytes, &source.params, &name);
        let launch = Launch { op, kernel: source.name.clone(), shape, params };
        self.0.lock().unwrap_or_else(|e| e.into_inner()).push(launch);
    }
}
