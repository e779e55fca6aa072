//! Profilers on one call of a solution: `ncu` and `compute-sanitizer`.

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::json;

use crate::build::{self, Caller};
use crate::error::{Error, Result};
use crate::inputs::{Known, Rng, make_inputs};
use crate::schema::{Definition, Solution, Workload};
use crate::worker::{Session, script};

/// A profiler, with its own arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tool {
    /// Nsight Compute: `ncu --set detailed` and these.
    Ncu(Vec<String>),
    /// NVIDIA's sanitizer with one of its tools: `memcheck`, `racecheck`, `initcheck` or `synccheck`.
    Sanitizer(String),
    /// Any other command that takes a command to run.
    Command(Vec<String>),
}

impl Tool {
    fn words(&self) -> Result<Vec<OsString>> {
        let words = |list: &[&str]| list.iter().map(OsString::from).collect::<Vec<_>>();
        Ok(match self {
            Self::Ncu(more) => {
                let mut all = words(&["ncu", "--set", "detailed", "--page", "details"]);
                all.extend(more.iter().map(OsString::from));
                all
            }
            Self::Sanitizer(tool) => {
                if !["memcheck", "racecheck", "initcheck", "synccheck"].contains(&tool.as_str()) {
                    let why = format!("{tool:?} is not memcheck, racecheck, initcheck or synccheck");
                    return Err(Error::refused("profile", why));
                }
                words(&["compute-sanitizer", "--tool", tool])
            }
            Self::Command(all) => all.iter().map(OsString::from).collect(),
        })
    }
}

/// Runs a solution once on a workload under a profiler, in a worker of the user's Python or of the command `native`, and returns what
/// that printed.
#[expect(clippy::too_many_arguments, reason = "what runs, and on what")]
pub fn profile(
    tool: &Tool,
    python: &Path,
    native: &[OsString],
    device: &str,
    root: &Path,
    definition: &Definition,
    solution: &Solution,
    workload: &Workload,
) -> Result<String> {
    let session = Session::new()?;
    let inputs = make_inputs(root, definition, workload, &mut Rng::new(0, workload.uuid()))?;
    let specs = session.write(&inputs)?;
    let (outputs, files) = session.outputs(definition, workload)?;
    let launch = build::launch(definition, solution, &Known { definition, workload, arrays: &[] })?;
    let run =
        json!({"op": "run", "inputs": specs, "roll": [0, 0], "outputs": outputs, "files": files, "launch": launch});
    let questions = session.folder.join("questions.json");
    let both = json!([build::build(definition, solution, device)?, run]);
    fs::write(&questions, both.to_string()).map_err(Error::io(&questions))?;
    let words = tool.words()?;
    let (program, args) = words.split_first().ok_or_else(|| Error::refused("profile", "no command was given"))?;
    let mut command = Command::new(program);
    match build::caller(solution) {
        Caller::Python => command.args(args).arg(python).arg(script(&session)?),
        Caller::Native => command.args(args).args(native),
    };
    let output = command.arg(&questions).output();
    let output =
        output.map_err(|e| Error::refused("profile", format!("{} cannot be started: {e}", program.display())))?;
    let text = [output.stdout, output.stderr].map(|b| String::from_utf8_lossy(&b).into_owned()).concat();
    if output.status.success() {
        Ok(text)
    } else {
        Err(Error::refused("profile", format!("{}\n{text}", output.status)))
    }
}
