//! What the repository promises about its own files.

use std::fs;
use std::path::{Path, PathBuf};

/// Files in which `unsafe` may stand.
const FENCE: &[&str] = &[
    "cpu/arch/",
    "cpu/pool.rs",
    "cuda/driver.rs",
    "cuda/driver/",
    "cuda/nvrtc.rs",
    "cuda/own.rs",
    "tensor/foreign.rs",
    "tensor/foreign/",
    "tensor/large_pages.rs",
    "variant/text.rs",
];

/// Parts of the library that share a budget of lines, tests not counted. Raising one is a commit of its own.
const BUDGETS: &[(&[&str], usize)] = &[
    (&["tensor", "kv", "variant", "plan"], 7_500),
    (&["ops", "reference", "testing"], 10_000),
    (&["cpu"], 17_800),
    (&["cuda"], 9_950),
];

/// Files above this many lines are printed: there is probably a second noun in them.
const LONG_FILE: usize = 500;

/// Files that `ops/X.rs` lacks, with the reason.
const NO_TWIN: &[(&str, &str)] = &[];

pub(crate) fn src() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// All `.rs` files under `dir`, sorted.
pub(crate) fn rust_files(dir: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut dirs = vec![dir.to_owned()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(&dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                dirs.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                files.push(path);
            }
        }
    }
    files.sort();
    files
}

/// A file without its unit tests.
fn without_tests(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    match text.find("\n#[cfg(test)]\nmod ") {
        Some(at) => text[..at + 1].to_owned(),
        None => text,
    }
}

/// A file without its unit tests and without comments.
pub(crate) fn code(path: &Path) -> String {
    let text = without_tests(path);
    text.lines()
        .map(|line| line.split("//").next().unwrap_or_default())
        .fold(String::new(), |out, line| out + line + "\n")
}

fn has_word(text: &str, word: &str) -> bool {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').any(|w| w == word)
}

#[test]
fn readme_shows_the_first_example() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let (_, rest) = readme.split_once("```rust\n").expect("a rust block in README.md");
    let (shown, _) = rest.split_once("```").unwrap();
    let example = fs::read_to_string(root().join("crates/fir/examples/01_norm.rs")).unwrap();
    assert_eq!(shown, example, "README.md's first rust block is not examples/01_norm.rs");
}

#[test]
fn examples_are_numbered_and_short() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    for (i, path) in rust_files(&dir).iter().enumerate() {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        assert!(name.starts_with(&format!("{:02}_", i + 1)), "{name} is example {}", i + 1);
        let lines = fs::read_to_string(path).unwrap().lines().count();
        assert!(lines < 60, "{name} has {lines} lines, expected less than 60");
    }
}

#[test]
fn every_operator_has_the_same_name_everywhere() {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut missing = Vec::new();
    for op in rust_files(&src().join("ops")) {
        let name = op.strip_prefix(src().join("ops")).unwrap().to_owned();
        if name.ends_with("mod.rs") {
            continue;
        }
        // `attention/decode.rs` may be one of several in `attention.rs` or `attention/mod.rs`.
        let family = name.parent().filter(|p| *p != Path::new(""));
        let families = family.map(|p| [p.with_extension("rs"), p.join("mod.rs")]);
        for dir in ["src/reference", "src/cpu", "tests/it", "benches"] {
            let found =
                [&name].into_iter().chain(families.iter().flatten()).any(|f| package.join(dir).join(f).exists());
            let twin = format!("{dir}/{}", name.display());
            match (found, NO_TWIN.iter().any(|(file, _)| *file == twin)) {
                (false, false) => missing.push(format!("{twin} does not exist")),
                (true, true) => missing.push(format!("{twin} exists, but is listed as absent")),
                _ => {}
            }
        }
    }
    assert!(missing.is_empty(), "\n  {}\n", missing.join("\n  "));
}

#[test]
fn unsafe_stays_behind_its_fence() {
    for path in rust_files(&src()) {
        let name = path.strip_prefix(src()).unwrap().to_string_lossy().into_owned();
        let fenced = FENCE.iter().any(|f| name.starts_with(f));
        // The type of a C function is none: the compiler sees to calls of it.
        let code = code(&path).replace("unsafe extern \"C\" fn(*", "");
        assert!(fenced || !has_word(&code, "unsafe"), "{name} has unsafe code");
    }
}

#[test]
fn nothing_is_left_to_do() {
    let marks = ["todo", "unimplemented", "TODO", "FIXME", "XXX"];
    for dir in ["crates", "fuzz/fuzz_targets"] {
        for path in rust_files(&root().join(dir)) {
            // This file names them.
            if path.ends_with("tests/it/sources.rs") {
                continue;
            }
            let text = fs::read_to_string(&path).unwrap();
            let found = marks.iter().find(|mark| has_word(&text, mark));
            assert_eq!(found, None, "{}", path.display());
        }
    }
}

#[test]
#[expect(clippy::print_stdout, reason = "sizes are for the reader, also when they fit")]
fn sizes_stay_within_their_budget() {
    let sizes: Vec<(String, usize)> = rust_files(&src())
        .iter()
        .map(|path| {
            let name = path.strip_prefix(src()).unwrap().to_string_lossy().into_owned();
            (name, without_tests(path).lines().count())
        })
        .collect();
    for (name, lines) in sizes.iter().filter(|(_, lines)| *lines > LONG_FILE) {
        println!("long file: {name} has {lines} lines (soft limit {LONG_FILE})");
    }
    let mut over = Vec::new();
    for (parts, budget) in BUDGETS {
        let size = |part: &str| -> usize {
            sizes.iter().filter(|(name, _)| name.split('/').next() == Some(part)).map(|(_, lines)| lines).sum()
        };
        let total: usize = parts.iter().map(|part| size(part)).sum();
        let shown: Vec<_> = parts.iter().map(|part| format!("{part} {}", size(part))).collect();
        println!("{total:>6} of {budget} lines: {}", shown.join(", "));
        if total > *budget {
            over.push(format!("{} are {total} lines, budget {budget}", parts.join(" + ")));
        }
    }
    assert!(over.is_empty(), "{over:?}");
}
