//! `fir trace`: folders of definitions, solutions, workloads and traces; see `fir_bench`.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use axum::Router;
use axum::extract::{Path as Segment, State};
use axum::http::{StatusCode, header};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::get;
use clap::{Args, Subcommand};
use fir_bench::benchmark::{self, Config, Evaluating, Event};
use fir_bench::profile::{Tool, profile};
use fir_bench::schema::{Trace, import_definition};
use fir_bench::validate::{Severity, validate};
use fir_bench::{TraceSet, apply, ops, report, score, synth};
use indicatif::{ProgressBar, ProgressStyle};

/// Options of `fir trace`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Clone, Debug)]
enum Command {
    /// Tells everything that is wrong or missing in a trace set; fails if something is wrong
    Validate {
        /// Folder of the set; FIB_DATASET_PATH unless given
        folder: Option<PathBuf>,
        /// The report as JSON
        #[arg(long)]
        json: bool,
    },
    /// Runs solutions on workloads and appends the traces to the set
    Run(Box<Run>),
    /// Writes what was measured, as Markdown or as HTML with plots
    Report {
        /// Folder of the set
        folder: Option<PathBuf>,
        /// One HTML file instead of Markdown
        #[arg(long)]
        html: bool,
        /// File to write; standard output unless given
        #[arg(short, long)]
        output: Option<PathBuf>,
    },
    /// Prints the fastest solution of each workload, and authors by their speed-up over a baseline
    Best {
        /// Folder of the set
        folder: Option<PathBuf>,
        /// Only this definition
        #[arg(long)]
        definition: Option<String>,
        /// Largest absolute error
        #[arg(long, default_value_t = f64::INFINITY)]
        atol: f64,
        /// Largest relative error
        #[arg(long, default_value_t = f64::INFINITY)]
        rtol: f64,
        /// Author of the solutions to compare with
        #[arg(long, default_value = score::BASELINE)]
        baseline: String,
    },
    /// Puts several sets into one folder
    Merge {
        /// Folders of the sets
        #[arg(required = true)]
        folders: Vec<PathBuf>,
        /// Folder to write
        #[arg(short, long)]
        output: PathBuf,
    },
    /// Writes the HTML report beside a set and prints where
    Visualize {
        /// Folder of the set
        folder: Option<PathBuf>,
    },
    /// Shows a set in the browser
    Serve {
        /// Folder of the set
        folder: Option<PathBuf>,
        /// Address to listen at
        #[arg(long, default_value = "127.0.0.1:8001")]
        listen: String,
    },
    /// Reads a definition as FlashInfer emits it and prints one that fits the schema
    Import {
        /// The JSON file
        file: PathBuf,
    },
    /// Adds small workloads to definitions that have none, and the library's own solutions
    Synthesize {
        /// Folder of the set
        folder: Option<PathBuf>,
        /// Decides what is drawn
        #[arg(long, default_value_t = 0)]
        seed: u64,
    },
    /// Runs one call of a solution under a profiler
    Profile {
        /// Folder of the set
        folder: Option<PathBuf>,
        /// The solution
        #[arg(long)]
        solution: String,
        /// The workload's uuid; the definition's first unless given
        #[arg(long)]
        workload: Option<String>,
        /// `ncu`, or a tool of compute-sanitizer: memcheck, racecheck, initcheck, synccheck
        #[arg(long, default_value = "ncu")]
        tool: String,
        /// A Python that has torch; FIR_PYTHON, or python3, unless given
        #[arg(long)]
        python: Option<PathBuf>,
        /// A CUDA device, or `cpu`
        #[arg(long, default_value = "cuda:0")]
        device: String,
    },
    /// A native worker of a benchmark
    #[command(hide = true)]
    Worker {
        /// Its socket
        socket: PathBuf,
    },
}

/// Options of `fir trace run`.
#[derive(Args, Clone, Debug)]
struct Run {
    /// Folder of the set; FIB_DATASET_PATH unless given
    folder: Option<PathBuf>,
    /// A Python that has torch; FIR_PYTHON, or python3, unless given
    #[arg(long)]
    python: Option<PathBuf>,
    /// `cpu`, or a CUDA device such as cuda:0; several, as in cuda:0,cuda:1, share the definitions
    #[arg(long, default_value = "cpu")]
    device: String,
    /// Calls before those that count
    #[arg(long)]
    warmup_runs: Option<usize>,
    /// Calls of a trial that count
    #[arg(long)]
    iterations: Option<usize>,
    /// Trials, each with inputs of its own
    #[arg(long)]
    num_trials: Option<usize>,
    /// Relative error up to which an element is right
    #[arg(long)]
    rtol: Option<f64>,
    /// Absolute error up to which an element is right
    #[arg(long)]
    atol: Option<f64>,
    /// Share of the elements that must be right
    #[arg(long)]
    required_matched_ratio: Option<f64>,
    /// Seconds for a solution on a workload
    #[arg(long, default_value_t = 300)]
    timeout: u64,
    /// MiB of memory for a worker
    #[arg(long, default_value_t = 16 << 10)]
    memory: u64,
    /// A new process for every workload of a solution
    #[arg(long)]
    isolated: bool,
    /// Leaves out what has a trace
    #[arg(long)]
    resume: bool,
    /// Writes no traces
    #[arg(long)]
    no_save: bool,
    /// Does not time the reference
    #[arg(long)]
    no_profile_baseline: bool,
    /// Only these definitions
    #[arg(long)]
    definitions: Vec<String>,
    /// Only these solutions
    #[arg(long)]
    solutions: Vec<String>,
    /// Decides what is drawn
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

fn folder(given: &Option<PathBuf>) -> PathBuf {
    given.clone().unwrap_or_else(apply::dataset_folder)
}

/// The Python to use.
fn python_of(given: &Option<PathBuf>) -> PathBuf {
    let named = || std::env::var_os("FIR_PYTHON").map(PathBuf::from);
    given.clone().or_else(named).unwrap_or_else(|| "python3".into())
}

pub(crate) fn run(options: &Options, out: &mut impl Write) -> Result<bool> {
    match &options.command {
        Command::Validate { folder: f, json } => check(&folder(f), *json, out),
        Command::Run(options) => bench(options, out),
        Command::Report { folder: f, html, output } => {
            let set = TraceSet::load(folder(f))?;
            let text = if *html { report::html(&set) } else { report::markdown(&set) };
            match output {
                Some(path) => std::fs::write(path, text).with_context(|| path.display().to_string())?,
                None => write!(out, "{text}")?,
            }
            Ok(true)
        }
        Command::Best { folder: f, definition, atol, rtol, baseline } => {
            best(&TraceSet::load(folder(f))?, definition.as_deref(), [*atol, *rtol], baseline, out)
        }
        Command::Merge { folders, output } => {
            let mut merged = TraceSet::new(output);
            for folder in folders {
                let set = TraceSet::load(folder)?;
                set.copy_blobs(output)?;
                let new = merged.merge(set).with_context(|| folder.display().to_string())?;
                writeln!(out, "{}: {new} new", folder.display())?;
            }
            merged.save(output)?;
            Ok(true)
        }
        Command::Visualize { folder: f } => {
            let folder = folder(f);
            let path = folder.join("reports/report.html");
            let text = report::html(&TraceSet::load(&folder)?);
            std::fs::create_dir_all(folder.join("reports"))?;
            std::fs::write(&path, text)?;
            writeln!(out, "{}", path.display())?;
            Ok(true)
        }
        Command::Serve { folder: f, listen } => serve(TraceSet::load(folder(f))?, listen, out),
        Command::Import { file } => {
            let text = std::fs::read_to_string(file).with_context(|| file.display().to_string())?;
            let (definition, notes) = import_definition(&text, &file.display().to_string())?;
            notes.iter().for_each(|note| eprintln!("{}: {note}", definition.name()));
            write!(out, "{}", definition.to_json())?;
            Ok(true)
        }
        Command::Synthesize { folder: f, seed } => synthesize(&folder(f), *seed, out),
        Command::Profile { folder: f, solution, workload, tool, python, device } => {
            let set = TraceSet::load(folder(f))?;
            let solution = set.solution(solution).with_context(|| format!("there is no solution `{solution}`"))?;
            let name = solution.definition();
            let definition = set.definition(name).with_context(|| format!("there is no definition `{name}`"))?;
            let mut all = set.workloads_of(name);
            let found = all.find(|w| workload.as_ref().is_none_or(|uuid| uuid == w.uuid()));
            let found = found.with_context(|| format!("`{name}` has no such workload"))?;
            let tool = match tool.as_str() {
                "ncu" => Tool::Ncu(Vec::new()),
                other => Tool::Sanitizer(other.to_owned()),
            };
            let text = profile(&tool, &python_of(python), &native()?, device, set.root(), definition, solution, found)?;
            write!(out, "{text}")?;
            Ok(true)
        }
        Command::Worker { socket } => {
            fir_bench::worker::serve_native(socket)?;
            Ok(true)
        }
    }
}

fn check(folder: &Path, json: bool, out: &mut impl Write) -> Result<bool> {
    let (_, report) = validate(folder)?;
    let [fine, warned, wrong] = report.counts();
    if json {
        writeln!(out, "{:#}", report.to_value())?;
    } else {
        for f in &report.findings {
            writeln!(out, "{}: {}: {}", f.severity, f.about, f.message)?;
        }
        let (d, w) = (report.definitions.len(), report.workloads);
        writeln!(out, "{d} definitions, {w} workloads, {} solutions, {} traces", report.solutions, report.traces)?;
        writeln!(out, "{fine} ok, {warned} with warnings, {wrong} with errors")?;
    }
    Ok(!report.findings.iter().any(|f| f.severity == Severity::Error))
}

/// The command of a native worker: this program's.
fn native() -> Result<Vec<std::ffi::OsString>> {
    let this = std::env::current_exe().context("this program's own path")?;
    Ok(vec![this.into(), "trace".into(), "worker".into()])
}

fn bench(options: &Run, out: &mut impl Write) -> Result<bool> {
    let mut set = TraceSet::load(folder(&options.folder))?;
    let mut config = Config::new(python_of(&options.python), native()?);
    let some = |list: &[String]| (!list.is_empty()).then(|| list.to_vec());
    config.device = options.device.clone();
    config.isolated = options.isolated;
    config.resume = options.resume;
    config.save = !options.no_save;
    config.profile_baseline = !options.no_profile_baseline;
    config.timeout = Duration::from_secs(options.timeout);
    config.memory = options.memory << 20;
    config.definitions = some(&options.definitions);
    config.solutions = some(&options.solutions);
    config.seed = options.seed;
    config.evaluating = Evaluating {
        warmup_runs: options.warmup_runs,
        iterations: options.iterations,
        num_trials: options.num_trials,
        rtol: options.rtol,
        atol: options.atol,
        required_matched_ratio: options.required_matched_ratio,
        sampling_draws: None,
    };
    for (name, value) in [("--rtol", options.rtol), ("--atol", options.atol)] {
        if value.is_some_and(|v| v.is_nan() || v <= 0.0) {
            bail!("{name} {}: expected a number greater than 0", value.unwrap_or_default());
        }
    }
    if options.required_matched_ratio.is_some_and(|r| !(r > 0.0 && r <= 1.0)) {
        bail!("--required-matched-ratio: expected a number in (0, 1]");
    }
    let bar = if std::io::stderr().is_terminal() { ProgressBar::new(0) } else { ProgressBar::hidden() };
    bar.set_style(ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}")?);
    let mut failed = 0;
    let mut lines = Vec::new();
    let traces = benchmark::run(&mut set, &config, &mut |event| match event {
        Event::Done { trace, progress: (done, of) } => {
            bar.set_length(of as u64);
            bar.set_position(done as u64);
            bar.set_message(trace.solution().unwrap_or_default().to_owned());
            lines.push(line(trace));
            failed += usize::from(trace.passed().is_none());
        }
        Event::Skipped { definition, workload, why } => {
            lines.push(format!("skipped {definition}, workload {workload}: {why}"))
        }
        _ => {}
    })?;
    bar.finish_and_clear();
    for line in lines {
        writeln!(out, "{line}")?;
    }
    writeln!(out, "{} traces, {} passed", traces.len(), traces.len() - failed)?;
    Ok(true)
}

/// A trace in a line.
fn line(trace: &Trace) -> String {
    let axes: Vec<String> = trace.workload().axes().iter().map(|(n, v)| format!("{n}={v}")).collect();
    let status = trace.evaluation().map_or("", |e| e.status().name());
    let name = trace.solution().unwrap_or_default();
    let numbers = trace.passed().map_or(String::new(), |(c, p)| {
        format!(
            "  {:.4} ms, {:.2} times the reference's speed, error {:.1e}",
            p.latency_ms, p.speedup_factor, c.max_absolute_error
        )
    });
    format!("{status:<20} {name} [{}]{numbers}", axes.join(" "))
}

fn best(
    set: &TraceSet,
    only: Option<&str>,
    [atol, rtol]: [f64; 2],
    baseline: &str,
    out: &mut impl Write,
) -> Result<bool> {
    if let Some(name) = only
        && set.definition(name).is_none()
    {
        bail!("{name}: not among the definitions of {}", set.root().display());
    }
    for definition in set.definitions().filter(|d| only.is_none_or(|o| o == d.name())) {
        let found = set.best_by_workload(definition.name(), atol, rtol);
        if !found.is_empty() {
            writeln!(out, "{}", definition.name())?;
            for trace in found.values() {
                writeln!(out, "  {}", line(trace))?;
            }
        }
    }
    for ranked in score::rank_authors(set, baseline)? {
        let s = &ranked.score;
        let (wins, n) = (s.win_rate * 100.0, s.workloads);
        writeln!(
            out,
            "{}: {:.3} times the speed of `{baseline}`, wins {wins:.0} % of {n} workloads",
            ranked.author, s.avg_speedup
        )?;
    }
    Ok(true)
}

fn synthesize(folder: &Path, seed: u64, out: &mut impl Write) -> Result<bool> {
    let mut set = TraceSet::load(folder)?;
    let definitions: Vec<_> = set.definitions().cloned().collect();
    for definition in &definitions {
        let name = definition.name();
        if set.workloads_of(name).next().is_none() {
            match synth::synthesize(folder, definition, seed) {
                Ok(workload) => {
                    set.append(vec![Trace::of_workload(name, &workload)?])?;
                    writeln!(out, "{name}: a workload")?;
                }
                Err(e) => writeln!(out, "{e}")?,
            }
        }
        if let Some(solution) = ops::solution_for(definition)?
            && set.solution(solution.name()).is_none()
        {
            set.append_solution(solution)?;
            writeln!(out, "{name}: the library's solution")?;
        }
    }
    Ok(true)
}

type Shared = State<Arc<TraceSet>>;

/// The pages of a set.
fn routes(set: TraceSet) -> Router {
    let missing = || (StatusCode::NOT_FOUND, Html(report::page("Not found", "<h1>Not found</h1>"))).into_response();
    let definition = move |State(set): Shared, Segment(name): Segment<String>| async move {
        set.definition(&name).map_or_else(missing, |d| Html(report::definition_page(&set, d)).into_response())
    };
    let json = move |State(set): Shared, Segment(name): Segment<String>| async move {
        let found = set
            .definition(&name)
            .map(|d| d.to_json().to_owned())
            .or(set.solution(&name).map(|s| s.to_json().to_owned()));
        found.map_or_else(missing, |text| ([(header::CONTENT_TYPE, "application/json")], text).into_response())
    };
    let compare = move |State(set): Shared, Segment((a, b)): Segment<(String, String)>| async move {
        match (set.solution(&a), set.solution(&b)) {
            (Some(a), Some(b)) => Html(report::compare_page(&set, a, b)).into_response(),
            _ => missing(),
        }
    };
    Router::new()
        .route("/", get(|State(set): Shared| async move { Html(report::index(&set)) }))
        .route("/report", get(|State(set): Shared| async move { Html(report::html(&set)) }))
        .route("/definitions/{name}", get(definition))
        .route("/json/{name}", get(json))
        .route("/compare/{a}/{b}", get(compare))
        .fallback(move || async move { Response::from(missing()) })
        .with_state(Arc::new(set))
}

fn serve(set: TraceSet, listen: &str, out: &mut impl Write) -> Result<bool> {
    let runtime = tokio::runtime::Runtime::new()?;
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind(listen).await.with_context(|| listen.to_owned())?;
        writeln!(out, "http://{}", listener.local_addr()?)?;
        out.flush()?;
        let stop = async { drop(tokio::signal::ctrl_c().await) };
        axum::serve(listener, routes(set)).with_graceful_shutdown(stop).await?;
        Ok(true)
    })
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::TcpStream;

    use clap::Parser;
    use fir_bench::record::{Dump, Keep, Recorder};
    use fir_engine::{Engine, Model, Request, Sampling};

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    /// What `fir trace` with these arguments prints, and whether it went well.
    fn trace(args: &[&str]) -> Result<(bool, String)> {
        let line = Line::try_parse_from([&["trace"], args].concat())?;
        let mut out = Vec::new();
        let fine = run(&line.options, &mut out)?;
        Ok((fine, String::from_utf8(out)?))
    }

    /// A test's own folder, which is not there yet.
    fn folder(name: &str) -> PathBuf {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/tmp/trace").join(name);
        let _ = std::fs::remove_dir_all(&root);
        root
    }

    /// A set of one definition, with a solution that passed and one that did not.
    fn example(name: &str) -> String {
        let root = folder(name);
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write(
            "definitions/op/d.json",
            r#"{"name": "d", "op_type": "op", "description": "doubles", "axes": {"n": {"type": "var"}},
            "inputs": {"x": {"shape": ["n"], "dtype": "float32"}}, "outputs": {"y": {"shape": ["n"], "dtype": "float32"}},
            "reference": "def run(x):\n    return x * 2\n"}"#,
        );
        for (author, solution) in [("ann", "s1"), ("baseline", "s2")] {
            let text = format!(
                r#"{{"name": "{solution}", "definition": "d", "author": "{author}", "spec": {{"language": "python",
                "target_hardware": ["cpu"], "entry_point": "m.py::run"}}, "sources": [{{"path": "m.py", "content": "a < b"}}]}}"#
            );
            write(&format!("solutions/{author}/op/d/{solution}.json"), &text);
            let ms = if author == "ann" { 1.0 } else { 2.0 };
            let text = format!(
                r#"{{"definition": "d", "workload": {{"axes": {{"n": 4}}, "inputs": {{"x": {{"type": "random"}}}}, "uuid": "w"}},
                "solution": "{solution}", "evaluation": {{"status": "PASSED", "environment": {{"hardware": "h"}}, "timestamp": "t",
                "correctness": {{}}, "performance": {{"latency_ms": {ms}, "reference_latency_ms": 2.0, "speedup_factor": 1.5}}}}}}"#
            );
            write(&format!("traces/{author}/op/d.jsonl"), &text.replace('\n', " "));
        }
        let workload =
            r#"{"definition": "d", "workload": {"axes": {"n": 4}, "inputs": {"x": {"type": "random"}}, "uuid": "w"}}"#;
        write("workloads/op/d.jsonl", workload);
        root.display().to_string()
    }

    #[test]
    fn a_set_is_validated_merged_and_ranked() {
        let root = example("ranked");
        let (fine, said) = trace(&["validate", &root]).unwrap();
        assert!(fine && said.ends_with("1 ok, 0 with warnings, 0 with errors\n"), "{said}");
        let (_, said) = trace(&["best", &root]).unwrap();
        assert!(
            said.contains("s1 [n=4]  1.0000 ms") && said.contains("ann: 2.000 times the speed of `baseline`"),
            "{said}"
        );
        let merged = folder("ranked-merged").display().to_string();
        let (_, said) = trace(&["merge", &root, &root, "-o", &merged]).unwrap();
        assert!(said.contains(": 6 new\n") && said.contains(": 0 new\n"), "{said}");
        assert!(trace(&["report", &merged]).unwrap().1.contains("| s1 | ann | 1 of 1 | 1.500 |"));
        let (_, path) = trace(&["visualize", &merged]).unwrap();
        assert!(std::fs::read_to_string(path.trim()).unwrap().contains("<svg"));
        std::fs::write(format!("{root}/definitions/op/e.json"), "{}").unwrap();
        let (fine, said) = trace(&["validate", &root]).unwrap();
        assert!(!fine && said.contains("error: definitions/op/e.json: `axes`: is required"), "{said}");
        assert!(trace(&["best", &merged, "--definition", "none"]).is_err());
    }

    /// Folders may be laid out otherwise: what is added goes to its place, and nothing that was there is written again.
    #[test]
    fn what_is_synthesized_is_added_to_a_set_of_any_layout() {
        let root = folder("flat");
        std::fs::create_dir_all(root.join("definitions")).unwrap();
        let text = r#"{"name": "rmsnorm_h8", "op_type": "rmsnorm", "axes": {"n": {"type": "var"}, "h": {"type": "const", "value": 8}},
            "inputs": {"hidden_states": {"shape": ["n", "h"], "dtype": "float32"}, "weight": {"shape": ["h"], "dtype": "float32"}},
            "outputs": {"output": {"shape": ["n", "h"], "dtype": "float32"}}, "reference": "def run(hidden_states, weight):\n    pass\n"}"#;
        std::fs::write(root.join("definitions/flat.json"), text).unwrap();
        let folder = root.to_str().unwrap();
        let (_, said) = trace(&["synthesize", folder]).unwrap();
        assert_eq!(said, "rmsnorm_h8: a workload\nrmsnorm_h8: the library's solution\n");
        assert_eq!(trace(&["synthesize", folder]).unwrap().1, "");
        let set = TraceSet::load(&root).unwrap();
        assert_eq!(
            (set.definitions().count(), set.workloads_of("rmsnorm_h8").count(), set.solutions().count()),
            (1, 1, 1)
        );
    }

    #[test]
    fn a_running_engine_is_recorded() {
        let root = folder("recorded");
        let recorder = Arc::new(Recorder::new(TraceSet::new(&root), Dump::Integers, Keep::FirstByLengths(1)));
        let exec = fir::Exec::cpu().unwrap().with_override(recorder.clone());
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fir-engine/tests/golden/llama");
        let model = Arc::new(Model::load(&exec, &path).unwrap());
        let config = fir_engine::Config { memory: Some(64 << 20), page_size: 4, drafts: 0, ..Default::default() };
        let handle = Engine::start(model, config).unwrap();
        let sampling = Sampling { max_tokens: 4, ignore_eos: true, ..Sampling::default() };
        let request = Request { prompt: (3..20).collect(), sampling, ..Request::default() };
        let (tx, rx) = std::sync::mpsc::channel();
        handle.submit(request, move |event| tx.send(event).is_ok()).unwrap();
        let failed = rx.iter().find(|event| matches!(event, fir_engine::Event::Failed(_)));
        assert!(failed.is_none(), "{failed:?}");
        drop(handle);
        let (fine, said) = trace(&["validate", root.to_str().unwrap()]).unwrap();
        assert!(fine, "{said}");
        let set = TraceSet::load(&root).unwrap();
        let names: Vec<&str> = set.definitions().map(|d| d.name()).collect();
        for kind in
            ["gqa_paged_decode_h4_kv2_d16_ps4", "gqa_paged_prefill_causal_h4_kv2_d16_ps4", "rmsnorm_h64", "gemm_n"]
        {
            assert!(names.iter().any(|n| n.starts_with(kind)), "{kind}: {names:?}, {:?}", recorder.missed());
        }
    }

    #[test]
    fn a_set_is_shown_to_browsers() {
        let set = TraceSet::load(example("shown")).unwrap();
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        runtime.spawn(async { axum::serve(listener, routes(set)).await });
        let get = |path: &str| {
            let mut stream = TcpStream::connect(address).unwrap();
            write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).unwrap();
            text
        };
        for (path, status, has) in [
            ("/", "200", "<a href=\"/definitions/d\">d</a>"),
            ("/definitions/d", "200", "a &lt; b"),
            ("/compare/s2/s1", "200", "<td class=n>2.000"),
            ("/report", "200", "<svg"),
            ("/json/s1", "200", "\"author\": \"ann\""),
            ("/definitions/none", "404", "Not found"),
            ("/compare/s1/none", "404", "Not found"),
            ("/nowhere", "404", "Not found"),
        ] {
            let text = get(path);
            assert!(text.starts_with(&format!("HTTP/1.1 {status}")) && text.contains(has), "{path}: {text}");
        }
        // What a browser makes of them, where there is one.
        let is_there = |name: &&str| std::process::Command::new(name).arg("--version").output().is_ok();
        let Some(browser) = ["chromium", "google-chrome"].into_iter().find(is_there) else {
            return eprintln!("skipped: no Chromium");
        };
        for (path, has) in [
            ("/", "<td><a href=\"/definitions/d\">d</a></td><td>op</td>"),
            ("/definitions/d", "<pre>a &lt; b</pre>"),
            ("/compare/s2/s1", "<td class=\"n\">2.000</td></tr>"),
            ("/report", "</path></svg>"),
        ] {
            let mut command = std::process::Command::new(browser);
            command.args(["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]);
            let shown = command.arg(format!("http://{address}{path}")).output().unwrap();
            let page = String::from_utf8_lossy(&shown.stdout);
            assert!(page.contains(has), "{path}: {page} {}", String::from_utf8_lossy(&shown.stderr));
        }
    }
}
