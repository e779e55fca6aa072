//! Running other programs: shown before, an error when they fail.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// A command line to run from the workspace's root.
pub(crate) struct Step {
    command: Command,
    shown: String,
}

/// `cargo` with space-separated arguments, on the toolchain that runs this.
pub(crate) fn cargo(args: &str) -> Step {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    Step::new(program, "cargo", args)
}

/// Any other program with space-separated arguments.
pub(crate) fn program(name: &str, args: &str) -> Step {
    Step::new(name, name, args)
}

impl Step {
    fn new(program: impl AsRef<OsStr>, name: &str, args: &str) -> Self {
        let mut command = Command::new(program);
        command.args(args.split_whitespace());
        Self { command, shown: format!("{name} {args}") }
    }

    /// Adds arguments that may have spaces in them.
    pub(crate) fn args(mut self, args: &[&str]) -> Self {
        self.command.args(args);
        args.iter().for_each(|a| self.shown += &format!(" {a:?}"));
        self
    }

    /// Sets an environment variable.
    pub(crate) fn env(mut self, name: &str, value: &str) -> Self {
        self.command.env(name, value);
        self.shown = format!("{name}={value:?} {}", self.shown);
        self
    }

    /// Sets some.
    pub(crate) fn envs(self, all: &[(&str, &str)]) -> Self {
        all.iter().fold(self, |step, (name, value)| step.env(name, value))
    }

    /// Runs it with its output on ours.
    pub(crate) fn run(mut self) -> Result<()> {
        println!("$ {}", self.shown);
        let status = self.command.status().with_context(|| format!("cannot start `{}`", self.shown))?;
        if !status.success() {
            bail!("`{}`: {status}", self.shown);
        }
        Ok(())
    }

    /// Runs it, shows its standard output line by line, and gives `line` each. Returns whether it succeeded.
    pub(crate) fn watch(mut self, mut line: impl FnMut(&str)) -> Result<bool> {
        println!("$ {}", self.shown);
        let start = || format!("cannot start `{}`", self.shown);
        let mut child = self.command.stdout(Stdio::piped()).spawn().with_context(start)?;
        let stdout = child.stdout.take().context("a piped stdout")?;
        for text in BufReader::new(stdout).lines() {
            let text = text?;
            println!("{text}");
            line(&text);
        }
        Ok(child.wait()?.success())
    }

    /// Runs it without showing anything; its standard output when it succeeds.
    pub(crate) fn quiet(mut self) -> Result<String> {
        let output = self.command.output().with_context(|| format!("cannot start `{}`", self.shown))?;
        if !output.status.success() {
            bail!("`{}`: {}\n{}", self.shown, output.status, String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

/// Names of the Rust files in a folder, without their extension, sorted.
pub(crate) fn rust_files(dir: &str) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir).with_context(|| format!("cannot read {dir}"))? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "rs") {
            names.extend(path.file_stem().map(|s| s.to_string_lossy().into_owned()));
        }
    }
    names.sort();
    Ok(names)
}
