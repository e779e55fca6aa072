//! `cargo xtask bench`: runs the benches, and with `--update` writes their table.
//!
//! A bench prints `bench` and then its columns, with tabs between them; see crates/fir/benches/harness.rs.

use std::fmt::Write as _;
use std::fs;

use anyhow::{Context, Result, ensure};

use crate::step::{cargo, program};

const PAGE: &str = "docs/bench/cpu.md";
/// Sections below it are ours, text above it is not.
const MARK: &str = "<!-- below: written by `cargo xtask bench --update` -->\n";

pub(crate) fn run(op: Option<&str>, update: bool) -> Result<()> {
    let command = format!("bench -p fir-infer --bench ops --all-features -- {}", op.unwrap_or(""));
    let mut rows = Vec::new();
    let ok = cargo(command.trim_end()).watch(|line| {
        if let Some(columns) = line.strip_prefix("bench\t") {
            rows.push(columns.split('\t').map(String::from).collect::<Vec<_>>());
        }
    })?;
    ensure!(ok, "a bench failed");
    if update {
        let page = fs::read_to_string(PAGE).with_context(|| PAGE.to_owned())?;
        let how = format!("{}, {}, `cargo xtask bench{}`, {}", date()?, commit()?, arg(op), machine()?);
        fs::write(PAGE, updated(&page, &rows, &how)?)?;
        println!("wrote {} rows to {PAGE}", rows.len());
    }
    Ok(())
}

/// `page` with the sections of the operators in `rows` replaced or added, and the other sections kept.
fn updated(page: &str, rows: &[Vec<String>], how: &str) -> Result<String> {
    let (head, body) = page.split_once(MARK).with_context(|| format!("{PAGE} lacks its mark: {MARK}"))?;
    let mut sections: Vec<(String, String)> = body
        .split("\n## ")
        .skip(1)
        .filter_map(|section| section.split_once('\n'))
        .map(|(op, text)| (op.to_owned(), text.trim().to_owned()))
        .collect();
    let op = |row: &[String]| row[0].split('/').next().unwrap_or_default().to_owned();
    for row in rows {
        let op = op(row);
        if !sections.iter().any(|(name, _)| *name == op) {
            sections.push((op, String::new()));
        }
    }
    sections.sort();
    let mut out = format!("{head}{MARK}");
    for (name, old) in sections {
        let rows: Vec<_> = rows.iter().filter(|row| op(row) == name).collect();
        let text = if rows.is_empty() {
            old
        } else {
            let mut text = format!("{how}\n\n| bench | µs | GB/s | GFLOP/s |\n|---|---:|---:|---:|\n");
            for row in rows {
                writeln!(text, "| {} |", row.join(" | "))?;
            }
            text.trim_end().to_owned()
        };
        write!(out, "\n## {name}\n\n{text}\n")?;
    }
    Ok(out)
}

fn arg(op: Option<&str>) -> String {
    op.map(|op| format!(" {op}")).unwrap_or_default()
}

fn date() -> Result<String> {
    Ok(program("date", "-u +%F").quiet()?.trim().to_owned())
}

/// The commit the numbers belong to, and whether there is more than it in the tree.
fn commit() -> Result<String> {
    let hash = program("git", "rev-parse --short HEAD").quiet()?;
    let dirty = !program("git", "status --porcelain --untracked-files=no").quiet()?.is_empty();
    Ok(format!("commit {}{}", hash.trim(), if dirty { " with changes" } else { "" }))
}

fn machine() -> Result<String> {
    let info = fs::read_to_string("/proc/cpuinfo")?;
    let model = info.lines().find_map(|l| l.strip_prefix("model name")?.split_once(": ")).map_or("?", |(_, m)| m);
    Ok(format!("{model}, {} cores", std::thread::available_parallelism()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_keeps_its_head_and_the_sections_of_other_operators() {
        let row = |text: &str| text.split(' ').map(String::from).collect::<Vec<_>>();
        let page = format!("# CPU\n\ntext\n\n{MARK}\n## norm\n\nold\n\n## rope\n\nkept\n");
        let new = updated(&page, &[row("norm/rms/portable 1.0 2.0 3.0"), row("gemm/x 4 5 6")], "today").unwrap();
        assert_eq!(
            new,
            format!(
                "# CPU\n\ntext\n\n{MARK}\n## gemm\n\ntoday\n\n| bench | µs | GB/s | GFLOP/s |\n|---|---:|---:|---:|\n\
                 | gemm/x | 4 | 5 | 6 |\n\n## norm\n\ntoday\n\n| bench | µs | GB/s | GFLOP/s |\n|---|---:|---:|---:|\n\
                 | norm/rms/portable | 1.0 | 2.0 | 3.0 |\n\n## rope\n\nkept\n"
            )
        );
        assert_eq!(updated(&new, &[], "later").unwrap(), new);
        assert!(updated("no mark", &[], "today").is_err());
    }
}
