//! `cargo xtask server`: the Python clients of OpenAI and Anthropic and a fuzzer against the server, over its double; with
//! `--live` over a model too, and the chat page in a browser.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};

use crate::step::{cargo, program};

const VENV: &str = "target/server-venv";
const PACKAGES: &str = "openai==3.49.0 anthropic==2.8.0 schemathesis==4.32.5 prometheus-client==0.26.0 pytest==9.2.0 httpx==0.28.1 playwright==1.65.0";

/// A program that ends when this is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The environment of the clients.
pub(crate) fn install() -> Result<()> {
    // Made whole or not at all: an installation that was interrupted, or is of other packages, is made again.
    let ready = Path::new(VENV).join("ready");
    if fs::read_to_string(&ready).ok().as_deref() != Some(PACKAGES) {
        program("python3", &format!("-m venv {VENV}")).run()?;
        program(&format!("{VENV}/bin/python"), &format!("-m pip install --quiet --no-compile {PACKAGES}")).run()?;
        fs::write(ready, PACKAGES)?;
    }
    Ok(())
}

/// The contract over the double, then what only a model can show, if `live`.
pub(crate) fn run(live: bool) -> Result<()> {
    install()?;
    let python = format!("{VENV}/bin/python");
    let pytest =
        |file: &str| program(&python, &format!("-m pytest -q -p no:cacheprovider crates/fir-server/tests/{file}"));
    cargo("build --quiet --profile test --workspace --all-features --bins --examples").run()?;
    {
        let (_running, url) = double()?;
        pytest("contract.py").env("FIR_URL", &url).run()?;
        let checks = "--checks not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,negative_data_rejection,unsupported_method";
        let fuzz = format!(
            "run {url}/openapi.json {checks} --max-examples 30 --seed 1 --phases examples,coverage,fuzzing --workers 2"
        );
        program(&format!("{VENV}/bin/schemathesis"), &fuzz).run()?;
    }
    if live {
        // As users have it: in the profile of tests a real model is slow.
        cargo("build --quiet --release -p fir-cli").run()?;
        pytest("live.py").run()?;
    }
    Ok(())
}

/// The double behind a free port.
fn double() -> Result<(Running, String)> {
    let target = std::env::var("CARGO_TARGET_DIR").unwrap_or_else(|_| "target".into());
    let binary = format!("{target}/debug/examples/double");
    let mut child =
        Command::new(&binary).arg("127.0.0.1:0").stdout(Stdio::piped()).spawn().with_context(|| binary.clone())?;
    let stdout = child.stdout.take().context("a piped stdout")?;
    let running = Running(child);
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line)?;
    Ok((running, format!("http://{}", line.trim())))
}
