//! [`Definition`]: what is computed.

use std::collections::{BTreeMap, HashSet};
use std::fmt;

use serde_json::Value;

use super::constraint::{Expr, Facts};
use super::python;
use super::read::{At, parse, pretty};
use crate::error::{Error, Result};

named! {
    /// Element types of the schema.
    #[expect(missing_docs, reason = "the names say it")]
    pub enum DType {
        Float32 = "float32",
        Float16 = "float16",
        BFloat16 = "bfloat16",
        Float8E4m3 = "float8_e4m3fn",
        Float8E5m2 = "float8_e5m2",
        /// Two numbers to an element of one byte, as torch has it.
        Float4E2m1 = "float4_e2m1",
        Int64 = "int64",
        Int32 = "int32",
        Int16 = "int16",
        Int8 = "int8",
        Bool = "bool",
    }
}

impl DType {
    /// The type of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|d| d.name() == name)
    }

    /// The kernel library's name for it.
    pub fn fir(self) -> fir::DType {
        match self {
            Self::Float32 => fir::DType::F32,
            Self::Float16 => fir::DType::F16,
            Self::BFloat16 => fir::DType::BF16,
            Self::Float8E4m3 => fir::DType::E4M3,
            Self::Float8E5m2 => fir::DType::E5M2,
            Self::Float4E2m1 => fir::DType::E2M1x2,
            Self::Int64 => fir::DType::I64,
            Self::Int32 => fir::DType::I32,
            Self::Int16 => fir::DType::I16,
            Self::Int8 => fir::DType::I8,
            Self::Bool => fir::DType::Bool,
        }
    }

    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        self.fir().size()
    }

    /// Whether it holds whole numbers or booleans.
    pub fn is_integer(self) -> bool {
        matches!(self, Self::Int64 | Self::Int32 | Self::Int16 | Self::Int8 | Self::Bool)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A dimension by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    /// One value for all workloads.
    Const(u64),
    /// A value per workload.
    Var,
}

/// A tensor, or a number, that goes in or comes out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Names of its axes; `None` is a number.
    pub shape: Option<Vec<String>>,
    /// Type of its elements.
    pub dtype: DType,
    /// What it is.
    pub description: Option<String>,
}

/// A condition on axes and inputs.
#[derive(Clone, Debug, PartialEq)]
pub struct Constraint {
    /// As it is written, a Python expression.
    pub text: String,
    /// As it is evaluated; `None` when it uses more of Python than [`Expr`] has.
    pub expr: Option<Expr>,
}

/// What is computed: axes, tensors, and a reference in Python.
#[derive(Clone, Debug, PartialEq)]
pub struct Definition {
    text: String,
    name: String,
    op_type: String,
    axes: Vec<(String, Axis)>,
    inputs: Vec<(String, TensorSpec)>,
    outputs: Vec<(String, TensorSpec)>,
    reference: String,
    tags: Vec<String>,
    description: Option<String>,
    constraints: Vec<Constraint>,
}

impl Definition {
    /// Reads a definition; `file` is for messages.
    pub fn parse(text: &str, file: &str) -> Result<Self> {
        Self::read(text.into(), &parse(text, file)?, file)
    }

    /// A definition from its JSON.
    pub fn from_value(value: &Value) -> Result<Self> {
        Self::read(pretty(value), value, "definition")
    }

    fn read(text: String, value: &Value, file: &str) -> Result<Self> {
        let at = At::root(value, file);
        let axes = at.get("axes")?.entries()?;
        let axes = axes.into_iter().map(|(name, at)| Ok((name, axis(&at)?))).collect::<Result<Vec<_>>>()?;
        let known: HashSet<&str> = axes.iter().map(|(name, _)| name.as_str()).collect();
        let inputs = specs(&at.get("inputs")?, &known)?;
        let outputs = specs(&at.get("outputs")?, &known)?;
        if let Some((name, _)) = outputs.iter().find(|(name, _)| inputs.iter().any(|(i, _)| i == name)) {
            return Err(at.get("outputs")?.get(name)?.refuse("has the name of an input"));
        }
        let reference = at.get("reference")?;
        let functions = python::top_level_functions(&reference.non_empty()?).map_err(|e| reference.refuse(e))?;
        if !functions.iter().any(|f| f == "run") {
            return Err(reference.refuse("must define a function `run` at its top level"));
        }
        let constraints = at.texts("constraints")?.into_iter().map(|text| {
            python::is_expression(&text).map_err(|e| match at.get("constraints") {
                Ok(at) => at.refuse(format!("`{text}` {e}")),
                Err(e) => e,
            })?;
            Ok(Constraint { expr: Expr::parse(&text).ok(), text })
        });
        Ok(Self {
            name: at.get("name")?.non_empty()?,
            op_type: at.get("op_type")?.non_empty()?,
            reference: reference.text()?,
            tags: at.texts("tags")?,
            description: at.optional("description")?.map(|at| at.text()).transpose()?,
            constraints: constraints.collect::<Result<_>>()?,
            axes,
            inputs,
            outputs,
            text,
        })
    }

    /// Its JSON, byte for byte as it was read.
    pub fn to_json(&self) -> &str {
        &self.text
    }

    getters! {
        /// Its name, unique in a trace set.
        name: str,
        /// The family it belongs to.
        op_type: str,
        /// Its axes, in order.
        axes: [(String, Axis)],
        /// What goes in, in the order of the call.
        inputs: [(String, TensorSpec)],
        /// What comes out, in the order of the call.
        outputs: [(String, TensorSpec)],
        /// Python source with a function `run`.
        reference: str,
        /// Words about it, mostly `key:value`.
        tags: [String],
    }

    /// What it is.
    pub fn description(&self) -> Option<&str> {
        self.description.as_deref()
    }

    /// Conditions on axes and inputs.
    pub fn constraints(&self) -> &[Constraint] {
        &self.constraints
    }

    /// Names of the axes that a workload gives values.
    pub fn var_axes(&self) -> impl Iterator<Item = &str> {
        self.axes.iter().filter(|(_, a)| *a == Axis::Var).map(|(name, _)| name.as_str())
    }

    /// An input's spec.
    pub fn input(&self, name: &str) -> Option<&TensorSpec> {
        self.inputs.iter().find(|(n, _)| n == name).map(|(_, spec)| spec)
    }

    /// Value of an axis, given those of the variable ones.
    pub fn axis(&self, name: &str, vars: &BTreeMap<String, u64>) -> Option<u64> {
        match self.axes.iter().find(|(n, _)| n == name)?.1 {
            Axis::Const(value) => Some(value),
            Axis::Var => vars.get(name).copied(),
        }
    }

    /// Sizes of a tensor's dimensions; empty for a number.
    pub fn shape(&self, spec: &TensorSpec, vars: &BTreeMap<String, u64>) -> Result<Vec<usize>> {
        let names = spec.shape.iter().flatten();
        let sizes = names.map(|name| {
            let value = self
                .axis(name, vars)
                .ok_or_else(|| Error::refused("shape", format!("`{}` needs a value for axis `{name}`", self.name)))?;
            usize::try_from(value).map_err(|_| Error::refused("shape", format!("axis `{name}` = {value} is too large")))
        });
        sizes.collect()
    }

    /// Values of the variable axes, from the shapes of the inputs in order (`None` for numbers).
    pub fn axes_of(&self, shapes: &[Option<&[usize]>]) -> Result<BTreeMap<String, u64>> {
        const OP: &str = "axes_of";
        if shapes.len() != self.inputs.len() {
            let why = format!("`{}` has {} inputs, not {}", self.name, self.inputs.len(), shapes.len());
            return Err(Error::refused(OP, why));
        }
        let mut values = BTreeMap::new();
        for ((input, spec), shape) in self.inputs.iter().zip(shapes) {
            let (Some(names), Some(shape)) = (&spec.shape, shape) else { continue };
            if names.len() != shape.len() {
                let why = format!("`{input}` has {} dimensions, not {}", shape.len(), names.len());
                return Err(Error::refused(OP, why));
            }
            for (name, &size) in names.iter().zip(*shape) {
                let size = size as u64;
                let want = match self.axes.iter().find(|(n, _)| n == name) {
                    Some((_, Axis::Const(value))) => *value,
                    _ => *values.entry(name.clone()).or_insert(size),
                };
                if want != size {
                    return Err(Error::refused(OP, format!("`{input}` has {name} = {size}, not {want}")));
                }
            }
        }
        match self.var_axes().find(|name| !values.contains_key(*name)) {
            Some(name) => Err(Error::refused(OP, format!("no input of `{}` has axis `{name}`", self.name))),
            None => Ok(values),
        }
    }

    /// Constraints that `facts` prove wrong.
    pub fn broken_constraints(&self, facts: &dyn Facts) -> Vec<&Constraint> {
        let wrong = |c: &&Constraint| c.expr.as_ref().and_then(|e| e.eval(facts)).is_some_and(|v| !v.truth());
        self.constraints.iter().filter(wrong).collect()
    }
}

fn axis(at: &At<'_>) -> Result<Axis> {
    let value = at.find("value")?;
    let kind = match at.find("type")? {
        Some(kind) => kind.text()?,
        None => if value.is_some() { "const" } else { "var" }.into(),
    };
    if let Some(at) = at.optional("description")? {
        at.text()?;
    }
    match kind.as_str() {
        "const" => Ok(Axis::Const(at.get("value")?.size()?)),
        "var" => Ok(Axis::Var),
        other => Err(at.get("type")?.refuse(format!("must be \"const\" or \"var\", not {other:?}"))),
    }
}

fn specs(at: &At<'_>, axes: &HashSet<&str>) -> Result<Vec<(String, TensorSpec)>> {
    let specs = at.entries()?.into_iter().map(|(name, at)| {
        let shape = at.get("shape")?;
        let names = |shape: &At<'_>| {
            let names = shape.list()?.into_iter().map(|at| {
                let name = at.text()?;
                if axes.contains(name.as_str()) {
                    Ok(name)
                } else {
                    Err(at.refuse(format!("{name:?} is not among `axes`")))
                }
            });
            names.collect::<Result<Vec<_>>>()
        };
        let dtype = at.get("dtype")?.one_of(&DType::ALL, DType::name)?;
        let description = at.optional("description")?.map(|at| at.text()).transpose()?;
        Ok((
            name,
            TensorSpec { shape: if shape.value.is_null() { None } else { Some(names(&shape)?) }, dtype, description },
        ))
    });
    specs.collect()
}
