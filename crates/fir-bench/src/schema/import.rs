//! Reading definitions as FlashInfer itself emits them (`fi_trace`), a dialect that has drifted from the schema.

use serde_json::{Map, Value, json};

use super::definition::{DType, Definition};
use super::python;
use super::read::{At, parse};
use crate::error::Result;

/// Reads a definition of either dialect, and says what had to be changed to make it one of ours.
///
/// | emitted | becomes |
/// |---|---|
/// | a reference whose function is called `_x_reference` | the same with a `run` that calls it |
/// | no reference | one that raises `NotImplementedError` |
/// | a constant axis without a value | a variable one |
/// | element types that the schema does not have | the nearest that it has |
/// | an output with an input's name | dropped: the input is written in place |
/// | optional inputs and parameters | as they are, the mark stays as an unknown field |
pub fn import_definition(text: &str, file: &str) -> Result<(Definition, Vec<String>)> {
    let mut value = parse(text, file)?;
    if let Ok(definition) = Definition::parse(text, file) {
        return Ok((definition, Vec::new()));
    }
    let mut notes = Vec::new();
    At::root(&value, file).object()?;
    axes(&mut value["axes"], &mut notes);
    for side in ["inputs", "outputs"] {
        if let Some(specs) = value[side].as_object_mut() {
            specs.iter_mut().for_each(|(name, spec)| tensor(name, spec, &mut notes));
        }
    }
    overlaps(&mut value, &mut notes);
    unknown_axes(&mut value, &mut notes);
    reference(&mut value, &mut notes);
    for field in ["tags", "constraints"] {
        if value.get(field).is_some_and(Value::is_null) {
            value[field] = json!([]);
            notes.push(format!("`{field}` was null"));
        }
    }
    if value.get("op_type").is_none_or(|v| v.as_str().is_none_or(str::is_empty)) {
        value["op_type"] = "unknown".into();
        notes.push("`op_type` was missing".into());
    }
    Definition::parse(&super::read::pretty(&value), file).map(|definition| (definition, notes))
}

fn axes(axes: &mut Value, notes: &mut Vec<String>) {
    for (name, axis) in axes.as_object_mut().into_iter().flatten() {
        if axis["type"] == "const" && axis.get("value").is_none_or(|v| v.as_u64().is_none()) {
            *axis = json!({"type": "var"});
            notes.push(format!("axis `{name}` was constant without a value"));
        }
    }
}

fn tensor(name: &str, spec: &mut Value, notes: &mut Vec<String>) {
    let Some(spec) = spec.as_object_mut() else { return };
    spec.entry("shape").or_insert(Value::Null);
    let dtype = spec.get("dtype").and_then(Value::as_str).unwrap_or("unknown");
    if DType::from_name(dtype).is_none() {
        let nearest = match dtype {
            "uint8" => "int8",
            "float64" => "float32",
            "float4_e2m1fn_x2" | "float4_e2m1fn" => "float4_e2m1",
            // Indices, sizes, strings and types themselves: what is not known is mostly a number to index with.
            _ => "int32",
        };
        notes.push(format!("`{name}` had type {dtype}, read as {nearest}"));
        spec.insert("dtype".into(), nearest.into());
    }
}

fn overlaps(value: &mut Value, notes: &mut Vec<String>) {
    let inputs: Vec<String> = value["inputs"].as_object().into_iter().flat_map(Map::keys).cloned().collect();
    if let Some(outputs) = value["outputs"].as_object_mut() {
        outputs.retain(|name, _| {
            let both = inputs.contains(name);
            if both {
                notes.push(format!("output `{name}` is also an input and was dropped"));
            }
            !both
        });
    }
}

fn unknown_axes(value: &mut Value, notes: &mut Vec<String>) {
    let mut missing = Vec::new();
    for side in ["inputs", "outputs"] {
        for (_, spec) in value[side].as_object().into_iter().flatten() {
            for axis in spec["shape"].as_array().into_iter().flatten().filter_map(Value::as_str) {
                if value["axes"].get(axis).is_none() && !missing.iter().any(|m| m == axis) {
                    missing.push(axis.to_owned());
                }
            }
        }
    }
    for axis in missing {
        notes.push(format!("axis `{axis}` was not declared"));
        value["axes"][axis] = json!({"type": "var"});
    }
}

fn reference(value: &mut Value, notes: &mut Vec<String>) {
    let text = value.get("reference").and_then(Value::as_str).unwrap_or("").to_owned();
    let functions = python::top_level_functions(&text).unwrap_or_default();
    if functions.iter().any(|f| f == "run") {
        return;
    }
    let run = match functions.iter().rev().find(|f| f.ends_with("_reference")).or(functions.last()) {
        Some(name) => {
            notes.push(format!("`run` calls the reference's `{name}`"));
            format!("{text}\n\ndef run(*args, **kwargs):\n    return {name}(*args, **kwargs)\n")
        }
        None => {
            notes.push("there was no reference".into());
            "def run(*args):\n    raise NotImplementedError(\"this definition has no reference\")\n".into()
        }
    };
    value["reference"] = run.into();
}
