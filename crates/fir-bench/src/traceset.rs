//! [`TraceSet`]: a folder of definitions, solutions, workloads and traces.
//!
//! ```text
//! definitions/<op_type>/<definition>.json
//! solutions/<author>/<op_type>/<definition>/<solution>.json
//! workloads/<op_type>/<definition>.jsonl
//! traces/<author>/<op_type>/<definition>.jsonl
//! blob/workloads/<op_type>/<definition>/<definition>_<uuid>.safetensors
//! ```
//!
//! Reading takes any depth of folders, as upstream does; writing puts files where the table says.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::Write;
use std::path::{Component, Path, PathBuf};

use crate::error::{Error, Result};
use crate::schema::{Definition, Input, Solution, Trace, Workload};

/// Definitions, solutions, workloads and traces, and where they lie.
#[derive(Clone, Debug, Default)]
pub struct TraceSet {
    root: PathBuf,
    definitions: BTreeMap<String, Definition>,
    solutions: BTreeMap<String, Solution>,
    /// By definition, in the order of files and lines.
    workloads: BTreeMap<String, Vec<Trace>>,
    traces: BTreeMap<String, Vec<Trace>>,
}

impl TraceSet {
    /// An empty set that will be written to `root`.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), ..Self::default() }
    }

    /// Reads a folder.
    pub fn load(root: impl Into<PathBuf>) -> Result<Self> {
        let (set, mut faults) = Self::load_lenient(root)?;
        if faults.is_empty() { Ok(set) } else { Err(faults.swap_remove(0)) }
    }

    /// Reads a folder, leaving out what is wrong, and says what that was.
    pub fn load_lenient(root: impl Into<PathBuf>) -> Result<(Self, Vec<Error>)> {
        let mut set = Self::new(root);
        let mut faults = Vec::new();
        if !set.root.is_dir() {
            return Err(Error::refused("TraceSet::load", format!("{} is not a folder", set.root.display())));
        }
        for (path, text) in set.files("definitions", "json")? {
            let done = Definition::parse(&text, &path).and_then(|d| set.add_definition(d));
            faults.extend(done.err().map(|e| placed(e, &path)));
        }
        for (path, text) in set.files("solutions", "json")? {
            let done = Solution::parse(&text, &path).and_then(|s| set.add_solution(s));
            faults.extend(done.err().map(|e| placed(e, &path)));
        }
        for folder in ["workloads", "traces"] {
            for (path, text) in set.files(folder, "jsonl")? {
                for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
                    let place = format!("{path}:{}", i + 1);
                    let done = Trace::parse(line, &place).and_then(|trace| {
                        let rule = match (folder, trace.is_workload()) {
                            ("workloads", false) => "must be null in a file of workloads",
                            ("traces", true) => "must not be null in a file of traces",
                            _ => return set.insert(trace),
                        };
                        Err(Error::Schema { file: place.clone(), field: "solution".into(), rule: rule.into() })
                    });
                    faults.extend(done.err().map(|e| placed(e, &place)));
                }
            }
        }
        Ok((set, faults))
    }

    /// Text of all files of a kind in a folder, by path from the root, sorted.
    fn files(&self, folder: &str, extension: &str) -> Result<Vec<(String, String)>> {
        let mut found = Vec::new();
        walk(&self.root.join(folder), extension, &mut found)?;
        found.sort();
        let read = |path: PathBuf| {
            let text = fs::read_to_string(&path).map_err(Error::io(&path))?;
            let shown = path.strip_prefix(&self.root).unwrap_or(&path).display().to_string();
            Ok((shown, text))
        };
        found.into_iter().map(read).collect()
    }

    /// Where it lies.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// All definitions, by name.
    pub fn definitions(&self) -> impl Iterator<Item = &Definition> {
        self.definitions.values()
    }

    /// A definition.
    pub fn definition(&self, name: &str) -> Option<&Definition> {
        self.definitions.get(name)
    }

    /// All solutions, by name.
    pub fn solutions(&self) -> impl Iterator<Item = &Solution> {
        self.solutions.values()
    }

    /// A solution.
    pub fn solution(&self, name: &str) -> Option<&Solution> {
        self.solutions.get(name)
    }

    /// Solutions of a definition, by name.
    pub fn solutions_of(&self, definition: &str) -> impl Iterator<Item = &Solution> {
        self.solutions.values().filter(move |s| s.definition() == definition)
    }

    /// Workloads of a definition.
    pub fn workloads_of(&self, definition: &str) -> impl Iterator<Item = &Workload> {
        self.workloads.get(definition).into_iter().flatten().map(Trace::workload)
    }

    /// A workload, with the name of its definition.
    pub fn workload(&self, uuid: &str) -> Option<(&str, &Workload)> {
        let all =
            self.workloads.iter().flat_map(|(name, traces)| traces.iter().map(move |t| (name.as_str(), t.workload())));
        all.into_iter().find(|(_, w)| w.uuid() == uuid)
    }

    /// Traces of a definition, in the order they were made.
    pub fn traces_of(&self, definition: &str) -> impl Iterator<Item = &Trace> {
        self.traces.get(definition).into_iter().flatten()
    }

    /// All traces.
    pub fn traces(&self) -> impl Iterator<Item = &Trace> {
        self.traces.values().flatten()
    }

    /// Traces of a definition that passed within these errors.
    pub fn passed_within(&self, definition: &str, atol: f64, rtol: f64) -> impl Iterator<Item = &Trace> {
        let within = move |t: &&Trace| {
            t.passed().is_some_and(|(c, _)| c.max_absolute_error <= atol && c.max_relative_error <= rtol)
        };
        self.traces_of(definition).filter(within)
    }

    /// The trace of the largest speed-up, of equal ones the first, among those that passed within these errors on a
    /// workload with these axes.
    pub fn best(&self, definition: &str, axes: &BTreeMap<String, u64>, atol: f64, rtol: f64) -> Option<&Trace> {
        let fits = |t: &&Trace| axes.iter().all(|(name, value)| t.workload().axes().get(name) == Some(value));
        let speed = |t: &Trace| t.passed().map_or(0.0, |(_, p)| p.speedup_factor);
        self.passed_within(definition, atol, rtol).filter(fits).fold(None, |best, trace| match best {
            Some(best) if speed(best) >= speed(trace) => Some(best),
            _ => Some(trace),
        })
    }

    /// The fastest trace of each workload of a definition that passed within these errors, by the workload's name.
    pub fn best_by_workload(&self, definition: &str, atol: f64, rtol: f64) -> BTreeMap<&str, &Trace> {
        let latency = |t: &Trace| t.passed().map_or(f64::INFINITY, |(_, p)| p.latency_ms);
        let mut best: BTreeMap<&str, &Trace> = BTreeMap::new();
        for trace in self.passed_within(definition, atol, rtol) {
            let entry = best.entry(trace.workload().uuid()).or_insert(trace);
            if latency(trace) < latency(entry) {
                *entry = trace;
            }
        }
        best
    }

    /// Adds a definition; its name must be new.
    pub fn add_definition(&mut self, definition: Definition) -> Result<()> {
        insert_new("add_definition", &mut self.definitions, definition.name().to_owned(), definition)
    }

    /// Adds a solution; its name must be new.
    pub fn add_solution(&mut self, solution: Solution) -> Result<()> {
        insert_new("add_solution", &mut self.solutions, solution.name().to_owned(), solution)
    }

    /// Adds a trace or a workload, as read.
    fn insert(&mut self, trace: Trace) -> Result<()> {
        let side = if trace.is_workload() { &mut self.workloads } else { &mut self.traces };
        side.entry(trace.definition().to_owned()).or_default().push(trace);
        Ok(())
    }

    /// Adds a trace or a workload of a known definition and solution.
    pub fn add_trace(&mut self, trace: Trace) -> Result<()> {
        self.trace_file(&trace)?;
        self.insert(trace)
    }

    /// The file, from the root, that a trace belongs in.
    fn trace_file(&self, trace: &Trace) -> Result<PathBuf> {
        const OP: &str = "add_trace";
        let definition = trace.definition();
        let op_type = self
            .definitions
            .get(definition)
            .ok_or_else(|| Error::refused(OP, format!("definition `{definition}` is not in the set")))?
            .op_type();
        let mut path = match trace.solution() {
            None => PathBuf::from("workloads"),
            Some(name) => {
                let solution = self
                    .solutions
                    .get(name)
                    .ok_or_else(|| Error::refused(OP, format!("solution `{name}` is not in the set")))?;
                Path::new("traces").join(folder_name(solution.author())?)
            }
        };
        path.push(folder_name(op_type)?);
        path.push(format!("{}.jsonl", folder_name(definition)?));
        Ok(path)
    }

    /// Adds traces and appends them to their files, so that what was measured outlives a crash.
    pub fn append(&mut self, traces: Vec<Trace>) -> Result<()> {
        for trace in traces {
            let path = self.root.join(self.trace_file(&trace)?);
            make_parent(&path)?;
            let unfinished = fs::read(&path).is_ok_and(|bytes| bytes.last().is_some_and(|b| *b != b'\n'));
            let mut file = fs::OpenOptions::new().create(true).append(true).open(&path).map_err(Error::io(&path))?;
            let line = format!("{}{}\n", if unfinished { "\n" } else { "" }, trace.to_json());
            file.write_all(line.as_bytes()).map_err(Error::io(&path))?;
            self.insert(trace)?;
        }
        Ok(())
    }

    /// Adds a solution and writes its file, and no other.
    pub fn append_solution(&mut self, solution: Solution) -> Result<()> {
        let (path, text) = (self.root.join(self.solution_file(&solution)?), solution.to_json().to_owned());
        self.add_solution(solution)?;
        write(&path, &text)
    }

    /// Writes the whole set to a folder, in its layout; files that are there with these names are replaced. What was read from
    /// elsewhere in the same folder would be there twice.
    pub fn save(&self, root: impl AsRef<Path>) -> Result<()> {
        let root = root.as_ref();
        for definition in self.definitions.values() {
            let op_type = folder_name(definition.op_type())?;
            let path = root.join("definitions").join(op_type).join(format!("{}.json", folder_name(definition.name())?));
            write(&path, definition.to_json())?;
        }
        for solution in self.solutions.values() {
            write(&root.join(self.solution_file(solution)?), solution.to_json())?;
        }
        let mut lines: BTreeMap<PathBuf, String> = BTreeMap::new();
        for trace in self.workloads.values().chain(self.traces.values()).flatten() {
            let text = lines.entry(self.trace_file(trace)?).or_default();
            text.push_str(trace.to_json());
            text.push('\n');
        }
        lines.into_iter().try_for_each(|(path, text)| write(&root.join(path), &text))
    }

    /// The file, from the root, that a solution belongs in.
    pub fn solution_file(&self, solution: &Solution) -> Result<PathBuf> {
        let definition = solution.definition();
        let op_type = match self.definitions.get(definition) {
            Some(definition) => definition.op_type(),
            None => {
                return Err(Error::refused("solution_file", format!("definition `{definition}` is not in the set")));
            }
        };
        let folder = Path::new("solutions").join(folder_name(solution.author())?).join(folder_name(op_type)?);
        Ok(folder.join(folder_name(definition)?).join(format!("{}.json", folder_name(solution.name())?)))
    }

    /// Copies the files that workloads name into another folder, where it does not have them; how many.
    ///
    /// Files that are absent here, or named by a path that leaves the folder, stay where they are.
    pub fn copy_blobs(&self, to: impl AsRef<Path>) -> Result<usize> {
        let all = self.workloads.values().chain(self.traces.values()).flatten();
        let inputs = all.flat_map(|t| t.workload().inputs().iter().map(|(_, input)| input));
        let mut copied = 0;
        for input in inputs {
            let Input::Safetensors { path, .. } = input else { continue };
            let path = Path::new(path);
            let inside = path.components().all(|c| matches!(c, Component::Normal(_) | Component::CurDir));
            let (from, to) = (self.root.join(path), to.as_ref().join(path));
            if inside && from.is_file() && !to.exists() {
                make_parent(&to)?;
                fs::copy(&from, &to).map_err(Error::io(&from))?;
                copied += 1;
            }
        }
        Ok(copied)
    }

    /// Takes in another set. What has the same name must be the same; traces and workloads that are there already are not
    /// doubled. Returns how many documents were new.
    pub fn merge(&mut self, other: Self) -> Result<usize> {
        const OP: &str = "merge";
        let mut new = 0;
        for (name, definition) in other.definitions {
            match self.definitions.get(&name) {
                None => self.add_definition(definition)?,
                Some(ours) if same(ours.to_json(), definition.to_json()) => continue,
                Some(_) => return Err(Error::refused(OP, format!("definition `{name}` differs between the sets"))),
            }
            new += 1;
        }
        for (name, solution) in other.solutions {
            match self.solutions.get(&name) {
                None => self.add_solution(solution)?,
                Some(ours) if same(ours.to_json(), solution.to_json()) => continue,
                Some(_) => return Err(Error::refused(OP, format!("solution `{name}` differs between the sets"))),
            }
            new += 1;
        }
        for (ours, theirs) in [(&mut self.workloads, other.workloads), (&mut self.traces, other.traces)] {
            for (name, traces) in theirs {
                let ours = ours.entry(name).or_default();
                let mut known: HashMap<String, ()> = ours.iter().map(|t| (canonical(t.to_json()), ())).collect();
                for trace in traces {
                    if known.insert(canonical(trace.to_json()), ()).is_none() {
                        ours.push(trace);
                        new += 1;
                    }
                }
            }
        }
        Ok(new)
    }
}

fn insert_new<T>(op: &'static str, map: &mut BTreeMap<String, T>, name: String, value: T) -> Result<()> {
    if map.contains_key(&name) {
        return Err(Error::refused(op, format!("`{name}` is there already")));
    }
    map.insert(name, value);
    Ok(())
}

/// A document without its spelling, to compare.
fn canonical(text: &str) -> String {
    crate::schema::parse(text, "").map_or_else(|_| text.to_owned(), |value| value.to_string())
}

fn same(a: &str, b: &str) -> bool {
    a == b || canonical(a) == canonical(b)
}

/// An error with its file, where it did not know it.
fn placed(error: Error, file: &str) -> Error {
    match error {
        Error::Refused { why, .. } => Error::Schema { file: file.into(), field: "$".into(), rule: why },
        other => other,
    }
}

/// A name as the name of a file: what would leave the folder is refused.
fn folder_name(name: &str) -> Result<&str> {
    if name.is_empty() || name == "." || name == ".." || name.contains(['/', '\\', '\0']) {
        return Err(Error::refused("TraceSet", format!("{name:?} cannot be the name of a file")));
    }
    Ok(name)
}

fn walk(folder: &Path, extension: &str, found: &mut Vec<PathBuf>) -> Result<()> {
    let entries = match fs::read_dir(folder) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(Error::io(folder))?,
    };
    for entry in entries {
        let path = entry.map_err(Error::io(folder))?.path();
        if path.is_dir() {
            walk(&path, extension, found)?;
        } else if path.extension().is_some_and(|e| e == extension) {
            found.push(path);
        }
    }
    Ok(())
}

fn make_parent(path: &Path) -> Result<()> {
    path.parent().map_or(Ok(()), |folder| fs::create_dir_all(folder).map_err(Error::io(folder)))
}

/// Writes a file and the folders above it.
pub(crate) fn write(path: &Path, text: &str) -> Result<()> {
    make_parent(path)?;
    fs::write(path, text).map_err(Error::io(path))
}
