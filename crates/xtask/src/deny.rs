//! What may enter the dependency tree. `deny.toml` says it; cargo-deny checks it.
//!
//! `cargo xtask deny` builds cargo-deny, where it is not installed, into target/tools, which takes a minute. CI checks
//! licences and sources from `cargo metadata` against the same file unless cargo-deny is there. What is left out is said.

use std::collections::BTreeSet;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::step::{Step, cargo, program};

/// An unoptimised build: it takes a third of the time, and checking takes a second.
const INSTALL: &str = "install cargo-deny --version 0.20.2 --locked --debug --quiet --root target/tools";

/// All checks; `install` if cargo-deny is to be built where it is missing.
pub(crate) fn run(install: bool) -> Result<()> {
    let find = || {
        let here = |tool: &&str| program(tool, "--version").quiet().is_ok();
        ["cargo-deny", "target/tools/bin/cargo-deny"].into_iter().find(here)
    };
    let build = || cargo(INSTALL).run().ok().and_then(|()| find());
    let Some(tool) = find().or_else(|| if install { build() } else { None }) else {
        println!("cargo-deny is not here: checking licences and sources from `cargo metadata` instead.");
        println!("NOT checked: advisories, bans (`cargo xtask deny` does).");
        return own_check();
    };
    deny(tool, "check licenses bans sources").run()?;
    // The database is a git repository, which a machine that reaches package registries alone cannot fetch.
    match deny(tool, "fetch db").quiet() {
        Ok(_) => deny(tool, "check advisories").run(),
        Err(e) => {
            println!("NOT checked: advisories, as their database cannot be fetched: {e:#}");
            Ok(())
        }
    }
}

fn deny(tool: &str, args: &str) -> Step {
    program(tool, &format!("--all-features {args}"))
}

/// Checks that every dependency comes from crates.io under a licence that `deny.toml` allows.
fn own_check() -> Result<()> {
    let config = std::fs::read_to_string("deny.toml").context("deny.toml")?;
    let allowed = allow_list(&config)?;
    let metadata: Value = serde_json::from_str(&cargo("metadata --format-version 1 --locked --all-features").quiet()?)?;
    let packages = metadata["packages"].as_array().context("`packages` in cargo's metadata")?;
    let (mut bad, mut count) = (Vec::new(), 0);
    for package in packages {
        let name =
            format!("{} {}", package["name"].as_str().unwrap_or("?"), package["version"].as_str().unwrap_or("?"));
        let license = package["license"].as_str().unwrap_or("");
        if !satisfied(license, &allowed) {
            bad.push(format!("{name}: licence `{license}` is not allowed by deny.toml"));
        }
        match package["source"].as_str() {
            None | Some("registry+https://github.com/rust-lang/crates.io-index") => count += 1,
            Some(source) => bad.push(format!("{name}: source {source} is not crates.io")),
        }
    }
    ensure!(bad.is_empty(), "dependencies:\n  {}", bad.join("\n  "));
    println!("{count} packages: every licence allowed, every source a workspace member or crates.io");
    Ok(())
}

/// The strings of `allow = […]`.
fn allow_list(config: &str) -> Result<BTreeSet<String>> {
    let list = config.split_once("\nallow = [").and_then(|(_, rest)| rest.split_once(']')).map(|(list, _)| list);
    let names: BTreeSet<_> = list.context("no `allow = [` in deny.toml")?.split('"').skip(1).step_by(2).collect();
    Ok(names.into_iter().map(String::from).collect())
}

/// Whether an SPDX expression can be met with allowed licences alone; an ill-formed or empty one cannot.
fn satisfied(expression: &str, allowed: &BTreeSet<String>) -> bool {
    // Old manifests write `MIT/Apache-2.0`.
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let mut words = spaced.split_whitespace().peekable();
    any_of(&mut words, allowed).is_ok_and(|ok| ok && words.next().is_none())
}

type Words<'a> = std::iter::Peekable<std::str::SplitWhitespace<'a>>;

/// `a OR b OR …`
fn any_of(words: &mut Words<'_>, allowed: &BTreeSet<String>) -> Result<bool> {
    let mut ok = all_of(words, allowed)?;
    while words.next_if_eq(&"OR").is_some() {
        ok |= all_of(words, allowed)?;
    }
    Ok(ok)
}

/// `a AND b AND …`
fn all_of(words: &mut Words<'_>, allowed: &BTreeSet<String>) -> Result<bool> {
    let mut ok = one(words, allowed)?;
    while words.next_if_eq(&"AND").is_some() {
        ok &= one(words, allowed)?;
    }
    Ok(ok)
}

/// A licence, perhaps `WITH` an exception, or an expression in parentheses.
fn one(words: &mut Words<'_>, allowed: &BTreeSet<String>) -> Result<bool> {
    match words.next() {
        Some("(") => {
            let ok = any_of(words, allowed)?;
            ensure!(words.next() == Some(")"), "`)` expected");
            Ok(ok)
        }
        Some(word) if !matches!(word, ")" | "AND" | "OR" | "WITH") => {
            let mut name = word.to_owned();
            if words.next_if_eq(&"WITH").is_some() {
                name = format!("{name} WITH {}", words.next().context("an exception after WITH")?);
            }
            Ok(allowed.contains(&name))
        }
        other => bail!("a licence expected, got {other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn licence_expressions_are_read_as_spdx_says() {
        let allowed = allow_list("[licenses]\nallow = [\n  \"MIT\",\n  \"Apache-2.0\",\n  \"A WITH B\",\n]\n").unwrap();
        let ok = |expression| satisfied(expression, &allowed);
        assert!(ok("MIT") && ok("MIT/GPL-3.0") && ok("GPL-3.0 OR (MIT AND Apache-2.0)") && ok("A WITH B"));
        assert!(!ok("") && !ok("GPL-3.0") && !ok("MIT AND GPL-3.0") && !ok("A") && !ok("MIT WITH B"));
        assert!(!ok("(MIT") && !ok("MIT)") && !ok("OR MIT") && !ok("MIT Apache-2.0"));
        // AND binds tighter than OR.
        assert!(ok("MIT OR GPL-3.0 AND GPL-2.0"));
    }

    #[test]
    fn the_checked_in_list_is_found() {
        let config = include_str!("../../../deny.toml");
        assert!(allow_list(config).unwrap().contains("Apache-2.0"));
    }
}
