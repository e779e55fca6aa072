//! [`Workload`]: on what a definition is computed.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::definition::Definition;
use super::read::At;
use crate::error::{Error, Result};

/// A number of a workload; its kind is kept.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scalar {
    /// A whole number.
    Int(i64),
    /// Any other.
    Float(f64),
    /// Yes or no.
    Bool(bool),
}

impl Scalar {
    /// It as a float.
    pub fn as_f64(self) -> f64 {
        match self {
            Self::Int(i) => i as f64,
            Self::Float(f) => f,
            Self::Bool(b) => f64::from(u8::from(b)),
        }
    }
}

/// Where an input comes from.
#[derive(Clone, Debug, PartialEq)]
pub enum Input {
    /// Drawn anew.
    Random,
    /// A number.
    Scalar(Scalar),
    /// A tensor in a file.
    Safetensors {
        /// Relative to the trace set's root, or whole.
        path: String,
        /// Its name in the file.
        tensor_key: String,
    },
}

/// Values of a definition's variable axes, and where its inputs come from.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    value: Value,
    uuid: String,
    axes: BTreeMap<String, u64>,
    inputs: Vec<(String, Input)>,
}

impl Workload {
    /// A workload from its JSON.
    pub fn from_value(value: &Value) -> Result<Self> {
        Self::read(&At::root(value, "workload"))
    }

    /// A workload of these axes and inputs, under a fresh name.
    pub fn new(axes: &BTreeMap<String, u64>, inputs: &[(String, Input)]) -> Result<Self> {
        let inputs: Map<String, Value> = inputs.iter().map(|(name, input)| (name.clone(), input.to_value())).collect();
        Self::from_value(&json!({"axes": axes, "inputs": inputs, "uuid": fresh_uuid()?}))
    }

    pub(super) fn read(at: &At<'_>) -> Result<Self> {
        let axes = at.get("axes")?.entries()?.into_iter().map(|(name, at)| Ok((name, at.size()?)));
        let inputs = at.get("inputs")?.entries()?.into_iter().map(|(name, at)| Ok((name, input(&at)?)));
        Ok(Self {
            uuid: at.get("uuid")?.non_empty()?,
            axes: axes.collect::<Result<_>>()?,
            inputs: inputs.collect::<Result<_>>()?,
            value: at.value.clone(),
        })
    }

    /// Its JSON, with every field it was read with.
    pub fn to_value(&self) -> &Value {
        &self.value
    }

    getters! {
        /// Its name, unique in a trace set.
        uuid: str,
        /// Values of the variable axes.
        axes: BTreeMap<String, u64>,
        /// Where its inputs come from.
        inputs: [(String, Input)],
    }

    /// One of them.
    pub fn input(&self, name: &str) -> Option<&Input> {
        self.inputs.iter().find(|(n, _)| n == name).map(|(_, input)| input)
    }

    /// What keeps it from being a workload of `definition`, stricter than the schema: exactly its variable axes, from 1 on,
    /// and exactly its inputs.
    pub fn faults(&self, definition: &Definition) -> Vec<String> {
        let mut faults = Vec::new();
        for name in definition.var_axes() {
            match self.axes.get(name) {
                None => faults.push(format!("axis `{name}` has no value")),
                Some(0) => faults.push(format!("axis `{name}` is 0")),
                Some(_) => {}
            }
        }
        let known = |name: &str| definition.var_axes().any(|n| n == name);
        faults
            .extend(self.axes.keys().filter(|name| !known(name)).map(|n| format!("axis `{n}` is not a variable one")));
        for (name, spec) in definition.inputs() {
            match (self.input(name), &spec.shape) {
                (None, _) => faults.push(format!("input `{name}` is missing")),
                (Some(Input::Scalar(_)), Some(_)) => faults.push(format!("input `{name}` is a tensor, not a number")),
                (Some(Input::Safetensors { .. }), None) => {
                    faults.push(format!("input `{name}` is a number, not a tensor"))
                }
                _ => {}
            }
        }
        let surplus = self.inputs.iter().filter(|(name, _)| definition.input(name).is_none());
        faults.extend(surplus.map(|(name, _)| format!("input `{name}` is not one of `{}`", definition.name())));
        faults
    }
}

impl Input {
    /// Its JSON.
    pub fn to_value(&self) -> Value {
        match self {
            Self::Random => json!({"type": "random"}),
            Self::Scalar(Scalar::Int(i)) => json!({"type": "scalar", "value": i}),
            Self::Scalar(Scalar::Float(f)) => json!({"type": "scalar", "value": f}),
            Self::Scalar(Scalar::Bool(b)) => json!({"type": "scalar", "value": b}),
            Self::Safetensors { path, tensor_key } => {
                json!({"type": "safetensors", "path": path, "tensor_key": tensor_key})
            }
        }
    }
}

fn input(at: &At<'_>) -> Result<Input> {
    let kind = at.get("type")?;
    match kind.text()?.as_str() {
        "random" => Ok(Input::Random),
        "scalar" => {
            let value = at.get("value")?;
            let scalar = match value.value {
                Value::Bool(b) => Some(Scalar::Bool(*b)),
                Value::Number(n) => n.as_i64().map(Scalar::Int).or_else(|| n.as_f64().map(Scalar::Float)),
                _ => None,
            };
            let refuse = || value.refuse(format!("must be a number or a boolean, not {}", value.value));
            Ok(Input::Scalar(scalar.ok_or_else(refuse)?))
        }
        "safetensors" => Ok(Input::Safetensors {
            path: at.get("path")?.non_empty()?,
            tensor_key: at.get("tensor_key")?.non_empty()?,
        }),
        other => Err(kind.refuse(format!("must be \"random\", \"scalar\" or \"safetensors\", not {other:?}"))),
    }
}

/// A random UUID of version 4.
pub(crate) fn fresh_uuid() -> Result<String> {
    let path = "/dev/urandom";
    let mut bytes = [0u8; 16];
    let mut file = std::fs::File::open(path).map_err(Error::io(path))?;
    std::io::Read::read_exact(&mut file, &mut bytes).map_err(Error::io(path))?;
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let hex: Vec<String> = bytes.iter().map(|b| format!("{b:02x}")).collect();
    Ok([&hex[..4], &hex[4..6], &hex[6..8], &hex[8..10], &hex[10..]].map(|part| part.concat()).join("-"))
}
