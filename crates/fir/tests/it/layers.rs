//! The modules of the library stand in layers; a module uses only those below its own.

use std::collections::BTreeMap;
use std::path::Path;

use crate::sources::{code, rust_files, src};

/// Bottom first; names on one line may not use each other.
const LAYERS: &[&[&str]] = &[
    &["error"],
    &["env", "filters", "routing"],
    &["philox"],
    &["tensor"],
    &["args", "kv", "variant", "overrides"],
    &["plan"],
    &["reference", "cpu", "cuda"],
    &["exec"],
    &["ops"],
    &["tune"],
    &["testing"],
];

#[test]
fn modules_use_only_layers_below_them() {
    let level: BTreeMap<&str, usize> =
        LAYERS.iter().enumerate().flat_map(|(level, names)| names.iter().map(move |&name| (name, level))).collect();
    let mut faults = Vec::new();
    for path in rust_files(&src()) {
        let inside = path.strip_prefix(src()).unwrap();
        let parts = modules(inside);
        // lib.rs names every layer.
        let Some(module) = parts.first() else { continue };
        let Some(own) = level.get(module.as_str()) else {
            faults.push(format!("{}: `{module}` stands in no layer", inside.display()));
            continue;
        };
        for used in crate_uses(&code(&path), parts.len()) {
            match level.get(used.as_str()) {
                _ if used == *module => {}
                Some(other) if other < own => {}
                Some(_) => faults.push(format!("{}: `{module}` uses `{used}`", inside.display())),
                None => {
                    faults.push(format!("{}: `crate::{used}` is no module: name the one it is in", inside.display()))
                }
            }
        }
    }
    assert!(faults.is_empty(), "\n  {}\n", faults.join("\n  "));
}

/// Path of the module that a file holds: `cpu/norm.rs` → cpu, norm; `cpu/mod.rs` → cpu; `lib.rs` → none.
fn modules(file: &Path) -> Vec<String> {
    let mut parts: Vec<String> =
        file.with_extension("").components().map(|c| c.as_os_str().to_string_lossy().into_owned()).collect();
    if parts.last().is_some_and(|last| last == "mod" || last == "lib") {
        parts.pop();
    }
    parts
}

/// Names that `text`, in a module `depth` below the root, takes from the root: by `crate::x`, `crate::{x, y::z}`, or
/// `super::` often enough to get there.
fn crate_uses(text: &str, depth: usize) -> Vec<String> {
    let to_root = "super::".repeat(depth);
    let roots = text.split("crate::").skip(1).chain(text.split(to_root.as_str()).skip(1));
    let mut uses: Vec<String> = roots.flat_map(first_names).collect();
    uses.retain(|name| name != "super" && name != "self");
    uses.sort();
    uses.dedup();
    uses
}

/// The name that `rest` begins with, or each one at the first level of the braces that it begins with.
fn first_names(rest: &str) -> Vec<String> {
    let name =
        |text: &str| -> String { text.trim_start().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect() };
    let Some(list) = rest.strip_prefix('{') else { return vec![name(rest)] };
    let (mut depth, mut names, mut start) = (0, Vec::new(), 0);
    for (i, c) in list.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' | '}' if depth == 0 => {
                names.push(name(&list[start..i]));
                start = i + 1;
                if c == '}' {
                    break;
                }
            }
            _ => {}
        }
    }
    names.retain(|n| !n.is_empty());
    names
}

#[test]
fn every_form_of_use_is_seen() {
    let uses = |text: &str, depth| crate_uses(text, depth);
    assert_eq!(uses("use crate::cpu::norm; let x = crate::exec::Exec::cpu();", 2), ["cpu", "exec"]);
    assert_eq!(
        uses("use crate::{\n    error::{Error, Result},\n    plan::Schedule, tensor,\n};", 1),
        ["error", "plan", "tensor"]
    );
    assert_eq!(uses("pub(in crate::kv) fn f() { $crate::ops::x() }", 1), ["kv", "ops"]);
    assert_eq!(uses("use super::tensor; use super::{env, error};", 1), ["env", "error", "tensor"]);
    assert_eq!(uses("use super::rows; use super::super::kv::Ragged;", 2), ["kv"]);
    assert_eq!(modules(Path::new("cpu/arch/mod.rs")), ["cpu", "arch"]);
    assert_eq!(modules(Path::new("exec.rs")), ["exec"]);
    assert!(modules(Path::new("lib.rs")).is_empty());
}
