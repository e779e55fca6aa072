//! `cargo xtask bench`: runs the benches, and with `--update` writes their tables.

use std::fmt::Write as _;
use std::fs;

use anyhow::{Context, Result, ensure};

use crate::step::{cargo, program, rust_files};

const PAGE: &str = "docs/bench/cpu.md";
/// Sections below it are ours, text above it is not.
const MARK: &str = "<!-- below: written by `cargo xtask bench --update` -->\n";

pub(crate) fn run(op: Option<&str>, update: bool) -> Result<()> {
    let mut all = rust_files("crates/fir/benches")?;
    // `cargo xtask bench-cpu` runs the one, `cargo xtask gpu-bundle` takes the other to where a GPU is.
    all.retain(|name| name != "compared" && name != "gpu");
    let names: Vec<_> = all.iter().filter(|name| op.is_none_or(|op| op == *name)).collect();
    ensure!(!names.is_empty(), "no bench is called {}; there are {}", op.unwrap_or_default(), all.join(", "));
    for name in names {
        let mut table = String::new();
        let format = if update { "-- --markdown" } else { "" };
        let ok = cargo(format!("bench -p fir-infer --all-features --bench {name} {format}").trim_end())
            .watch(|line| table.extend([line, "\n"]))?;
        ensure!(ok, "bench `{name}` failed");
        if update {
            // Section by section, so that an hour of benches is not lost to a failure in the last one.
            let how = format!("{}, {}, `cargo xtask bench {name} --update`, {}", date()?, commit()?, machine()?);
            write_section(name, &format!("{how}.\n\n{}", table.trim()))?;
        }
    }
    Ok(())
}

/// Replaces a section of the page of benches, or adds it.
pub(crate) fn write_section(name: &str, text: &str) -> Result<()> {
    let page = fs::read_to_string(PAGE).with_context(|| PAGE.to_owned())?;
    fs::write(PAGE, updated(&page, name, text)?)?;
    println!("wrote section {name} of {PAGE}");
    Ok(())
}

/// `page` with the section `name` replaced, or added where the alphabet has it.
fn updated(page: &str, name: &str, text: &str) -> Result<String> {
    let (head, body) = page.split_once(MARK).with_context(|| format!("{PAGE} lacks its mark: {MARK}"))?;
    let mut sections: Vec<(&str, &str)> = body
        .split("\n## ")
        .skip(1)
        .filter_map(|section| section.split_once('\n'))
        .map(|(name, text)| (name, text.trim()))
        .filter(|(old, _)| *old != name)
        .chain([(name, text)])
        .collect();
    sections.sort_unstable();
    let mut out = format!("{head}{MARK}");
    for (name, text) in sections {
        write!(out, "\n## {name}\n\n{text}\n")?;
    }
    Ok(out)
}

pub(crate) fn date() -> Result<String> {
    Ok(program("date", "-u +%F").quiet()?.trim().to_owned())
}

/// The commit the numbers belong to, and whether there is more than it in the sources.
pub(crate) fn commit() -> Result<String> {
    let hash = program("git", "rev-parse --short HEAD").quiet()?;
    let changes = program("git", "status --porcelain --untracked-files=no -- crates").quiet()?;
    Ok(format!("commit {}{}", hash.trim(), if changes.is_empty() { "" } else { " with changes" }))
}

/// Its family and model too: virtual machines have one name for many.
pub(crate) fn machine() -> Result<String> {
    let info = fs::read_to_string("/proc/cpuinfo")?;
    let field = |name: &str| {
        let fields = info.lines().filter_map(|line| line.split_once(':'));
        fields.filter(|(key, _)| key.trim() == name).map(|(_, value)| value.trim()).next().unwrap_or("?")
    };
    let [name, family, model] = ["model name", "cpu family", "model"].map(field);
    Ok(format!("{name} (family {family}, model {model}), {} cores", std::thread::available_parallelism()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_keeps_its_head_and_the_sections_of_other_operators() {
        let page = format!("# CPU\n\ntext\n\n{MARK}\n## norm\n\nold\n\n## rope\n\nkept\n");
        let new = updated(&page, "norm", "new\n\n| a |").unwrap();
        assert_eq!(new, format!("# CPU\n\ntext\n\n{MARK}\n## norm\n\nnew\n\n| a |\n\n## rope\n\nkept\n"));
        let more = updated(&new, "gemm", "first").unwrap();
        assert!(more.starts_with(&format!("# CPU\n\ntext\n\n{MARK}\n## gemm\n\nfirst\n\n## norm\n\nnew")));
        assert_eq!(updated(&more, "gemm", "first").unwrap(), more);
        assert!(updated("no mark", "norm", "x").is_err());
    }
}
