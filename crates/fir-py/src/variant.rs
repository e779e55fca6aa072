//! Attention variants, written as Python expressions: each operator builds the library's own tree.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

use fir::variant::{self as lib, Bool, Declare, F32, Hooks, I32, Llama31, ParamType, Transform};
use pyo3::basic::CompareOp;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::error::to_py;

/// Parameters that an expression reads, each once.
type Params = Vec<(String, ParamType)>;

#[derive(Clone)]
enum Tree {
    F32(F32),
    I32(I32),
    Bool(Bool),
}

/// A value of a hook: a number, an integer or a truth value that is not known before the kernel runs.
#[pyclass(frozen, name = "Expr", module = "fir.variant")]
#[derive(Clone)]
pub(crate) struct Expr {
    tree: Tree,
    params: Params,
}

fn joined(a: &Params, b: &Params) -> Params {
    let mut all = a.clone();
    all.extend(b.iter().filter(|p| !a.contains(p)).cloned());
    all
}

/// What stands in an expression: another one, or a constant.
#[derive(Clone)]
struct Operand(Expr);

impl<'a, 'py> FromPyObject<'a, 'py> for Operand {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let constant = |tree| Ok(Self(Expr { tree, params: vec![] }));
        if let Ok(expr) = object.cast::<Expr>() {
            return Ok(Self(expr.get().clone()));
        }
        if object.is_instance_of::<pyo3::types::PyBool>() {
            return constant(Tree::Bool(object.extract::<bool>()?.into()));
        }
        if object.is_instance_of::<pyo3::types::PyInt>() {
            return constant(Tree::I32(object.extract::<i32>()?.into()));
        }
        match object.extract::<f32>() {
            Ok(x) => constant(Tree::F32(x.into())),
            Err(_) => Err(PyTypeError::new_err(format!(
                "{} in an expression, expected an Expr, a float, an int or a bool",
                object.get_type().qualname()?
            ))),
        }
    }
}

impl Expr {
    fn kind(&self) -> &'static str {
        match self.tree {
            Tree::F32(_) => "f32",
            Tree::I32(_) => "i32",
            Tree::Bool(_) => "bool",
        }
    }

    /// As a number; integers are converted.
    fn f32(&self, what: &str) -> PyResult<F32> {
        match &self.tree {
            Tree::F32(x) => Ok(x.clone()),
            Tree::I32(x) => Ok(x.clone().to_f32()),
            Tree::Bool(_) => Err(self.refuse(what, "a number")),
        }
    }

    fn i32(&self, what: &str) -> PyResult<I32> {
        match &self.tree {
            Tree::I32(x) => Ok(x.clone()),
            _ => Err(self.refuse(what, "an integer")),
        }
    }

    fn bool(&self, what: &str) -> PyResult<Bool> {
        match &self.tree {
            Tree::Bool(x) => Ok(x.clone()),
            _ => Err(self.refuse(what, "a truth value")),
        }
    }

    fn refuse(&self, what: &str, want: &str) -> PyErr {
        PyTypeError::new_err(format!("{what}: got an expression of {}, expected {want}", self.kind()))
    }

    fn unary(&self, what: &str, f: impl FnOnce(F32) -> F32) -> PyResult<Self> {
        Ok(Self { tree: Tree::F32(f(self.f32(what)?)), params: self.params.clone() })
    }

    /// On integers if both are, else on numbers.
    fn arithmetic(
        &self,
        other: &Self,
        what: &str,
        ints: Option<fn(I32, I32) -> I32>,
        floats: Option<fn(F32, F32) -> F32>,
    ) -> PyResult<Self> {
        let params = joined(&self.params, &other.params);
        let tree = match (&self.tree, &other.tree, ints, floats) {
            (Tree::I32(a), Tree::I32(b), Some(f), _) => Tree::I32(f(a.clone(), b.clone())),
            (_, _, _, Some(f)) => Tree::F32(f(self.f32(what)?, other.f32(what)?)),
            _ => return Err((if matches!(self.tree, Tree::I32(_)) { other } else { self }).refuse(what, "integers")),
        };
        Ok(Self { tree, params })
    }

    fn logical(&self, other: &Self, what: &str, f: fn(Bool, Bool) -> Bool) -> PyResult<Self> {
        let tree = Tree::Bool(f(self.bool(what)?, other.bool(what)?));
        Ok(Self { tree, params: joined(&self.params, &other.params) })
    }
}

#[pymethods]
impl Expr {
    fn __add__(&self, other: Operand) -> PyResult<Self> {
        self.arithmetic(&other.0, "+", Some(|a, b| a + b), Some(|a, b| a + b))
    }
    fn __radd__(&self, other: Operand) -> PyResult<Self> {
        other.0.arithmetic(self, "+", Some(|a, b| a + b), Some(|a, b| a + b))
    }
    fn __sub__(&self, other: Operand) -> PyResult<Self> {
        self.arithmetic(&other.0, "-", Some(|a, b| a - b), Some(|a, b| a - b))
    }
    fn __rsub__(&self, other: Operand) -> PyResult<Self> {
        other.0.arithmetic(self, "-", Some(|a, b| a - b), Some(|a, b| a - b))
    }
    fn __mul__(&self, other: Operand) -> PyResult<Self> {
        self.arithmetic(&other.0, "*", Some(|a, b| a * b), Some(|a, b| a * b))
    }
    fn __rmul__(&self, other: Operand) -> PyResult<Self> {
        other.0.arithmetic(self, "*", Some(|a, b| a * b), Some(|a, b| a * b))
    }
    fn __truediv__(&self, other: Operand) -> PyResult<Self> {
        self.arithmetic(&other.0, "/", None, Some(|a, b| a / b))
    }
    fn __rtruediv__(&self, other: Operand) -> PyResult<Self> {
        other.0.arithmetic(self, "/", None, Some(|a, b| a / b))
    }
    fn __floordiv__(&self, other: Operand) -> PyResult<Self> {
        self.arithmetic(&other.0, "//", Some(|a, b| a / b), None)
    }
    fn __rfloordiv__(&self, other: Operand) -> PyResult<Self> {
        other.0.arithmetic(self, "//", Some(|a, b| a / b), None)
    }
    fn __mod__(&self, other: Operand) -> PyResult<Self> {
        self.arithmetic(&other.0, "%", Some(|a, b| a % b), None)
    }
    fn __rmod__(&self, other: Operand) -> PyResult<Self> {
        other.0.arithmetic(self, "%", Some(|a, b| a % b), None)
    }

    fn __and__(&self, other: Operand) -> PyResult<Self> {
        self.logical(&other.0, "&", |a, b| a & b)
    }
    fn __rand__(&self, other: Operand) -> PyResult<Self> {
        other.0.logical(self, "&", |a, b| a & b)
    }
    fn __or__(&self, other: Operand) -> PyResult<Self> {
        self.logical(&other.0, "|", |a, b| a | b)
    }
    fn __ror__(&self, other: Operand) -> PyResult<Self> {
        other.0.logical(self, "|", |a, b| a | b)
    }
    fn __invert__(&self) -> PyResult<Self> {
        Ok(Self { tree: Tree::Bool(!self.bool("~")?), params: self.params.clone() })
    }
    fn __neg__(&self) -> PyResult<Self> {
        match &self.tree {
            Tree::I32(x) => Ok(Self { tree: Tree::I32(-x.clone()), params: self.params.clone() }),
            _ => self.unary("-", |x| -x),
        }
    }
    fn __abs__(&self) -> PyResult<Self> {
        self.unary("abs", F32::abs)
    }

    fn __richcmp__(&self, other: Operand, op: CompareOp) -> PyResult<Self> {
        let b = &other.0;
        let tree = match (&self.tree, &b.tree) {
            (Tree::I32(x), Tree::I32(y)) => {
                let (x, y) = (x.clone(), y.clone());
                match op {
                    CompareOp::Lt => x.lt(y),
                    CompareOp::Le => x.le(y),
                    CompareOp::Gt => x.gt(y),
                    CompareOp::Ge => x.ge(y),
                    CompareOp::Eq => x.eq(y),
                    CompareOp::Ne => x.ne(y),
                }
            }
            _ => {
                let (x, y) = (self.f32("comparison")?, b.f32("comparison")?);
                match op {
                    CompareOp::Lt => x.lt(y),
                    CompareOp::Le => x.le(y),
                    CompareOp::Gt => x.gt(y),
                    CompareOp::Ge => x.ge(y),
                    CompareOp::Eq => x.clone().le(y.clone()) & x.ge(y),
                    CompareOp::Ne => !(x.clone().le(y.clone()) & x.ge(y)),
                }
            }
        };
        Ok(Self { tree: Tree::Bool(tree), params: joined(&self.params, &b.params) })
    }

    fn __bool__(&self) -> PyResult<bool> {
        Err(PyTypeError::new_err(
            "an expression has no truth value before its kernel runs; use & | ~ and where(condition, a, b)",
        ))
    }

    fn __repr__(&self) -> String {
        format!("<fir.variant.Expr of {}>", self.kind())
    }
}

/// A leaf, by its name; see the list in `fir/variant.py`.
#[pyfunction]
fn leaf(name: &str) -> PyResult<Expr> {
    let tree = match name {
        "score" => Tree::F32(lib::score()),
        "o" => Tree::F32(lib::o()),
        "m" => Tree::F32(lib::m()),
        "d" => Tree::F32(lib::d()),
        "q_pos" => Tree::I32(lib::q_pos()),
        "kv_pos" => Tree::I32(lib::kv_pos()),
        "q_idx" => Tree::I32(lib::q_idx()),
        "q_len" => Tree::I32(lib::q_len()),
        "kv_len" => Tree::I32(lib::kv_len()),
        "batch" => Tree::I32(lib::batch()),
        "qo_head" => Tree::I32(lib::qo_head()),
        "kv_head" => Tree::I32(lib::kv_head()),
        other => return Err(PyTypeError::new_err(format!("no leaf {other:?}"))),
    };
    Ok(Expr { tree, params: vec![] })
}

/// A parameter that is one value: `f32`, `i32` or `per_head`.
#[pyfunction]
fn scalar_param(name: &str, kind: &str) -> PyResult<Expr> {
    // Expressions name their parameters; `variant` declares them in its own list.
    let mut declare = Declare::default();
    let (tree, ty) = match kind {
        "f32" => (Tree::F32(declare.f32(name)), ParamType::F32),
        "i32" => (Tree::I32(declare.i32(name)), ParamType::I32),
        "per_head" => (Tree::F32(declare.per_head(name)), ParamType::PerHead),
        other => {
            return Err(PyTypeError::new_err(format!("parameter of kind {other:?}, expected f32, i32 or per_head")));
        }
    };
    Ok(Expr { tree, params: vec![(name.into(), ty)] })
}

/// Element `index` of the f32 or i32 tensor that is the parameter `name`.
#[pyfunction]
fn tensor_param_at(name: &str, kind: &str, index: Operand) -> PyResult<Expr> {
    let (mut declare, i) = (Declare::default(), index.0.i32("index")?);
    let (tree, ty) = match kind {
        "f32" => (Tree::F32(declare.f32_tensor(name).at(i)), ParamType::F32Tensor),
        _ => (Tree::I32(declare.i32_tensor(name).at(i)), ParamType::I32Tensor),
    };
    Ok(Expr { tree, params: joined(&vec![(name.into(), ty)], &index.0.params) })
}

/// Bit `row * stride + col` of this request's segment of the packed bits that are the parameter `name`.
#[pyfunction]
fn bit_param_at(name: &str, row: Operand, col: Operand, stride: Operand) -> PyResult<Expr> {
    let bits = Declare::default().bits(name);
    let tree = Tree::Bool(bits.at(row.0.i32("row")?, col.0.i32("col")?, stride.0.i32("stride")?));
    let mut params = vec![(name.into(), ParamType::Bits)];
    for x in [&row, &col, &stride] {
        params = joined(&params, &x.0.params);
    }
    Ok(Expr { tree, params })
}

/// `tanh`, `exp`, `log`, `sigmoid`, `abs` or `sqrt`.
#[pyfunction]
fn function(name: &str, x: Operand) -> PyResult<Expr> {
    let f = match name {
        "tanh" => F32::tanh,
        "exp" => F32::exp,
        "log" => F32::log,
        "sigmoid" => F32::sigmoid,
        "abs" => F32::abs,
        "sqrt" => F32::sqrt,
        other => return Err(PyTypeError::new_err(format!("no function {other:?}"))),
    };
    x.0.unary(name, f)
}

/// The smaller, or the larger.
#[pyfunction]
fn extremum(largest: bool, a: Operand, b: Operand) -> PyResult<Expr> {
    match largest {
        true => a.0.arithmetic(&b.0, "maximum", Some(|a, b| a.max(b)), Some(|a, b| a.max(b))),
        false => a.0.arithmetic(&b.0, "minimum", Some(|a, b| a.min(b)), Some(|a, b| a.min(b))),
    }
}

/// `a` where the condition holds, else `b`.
#[pyfunction]
#[pyo3(name = "where")]
fn choose(condition: Operand, a: Operand, b: Operand) -> PyResult<Expr> {
    let tree = Tree::F32(condition.0.bool("where")?.select(a.0.f32("where")?, b.0.f32("where")?));
    Ok(Expr { tree, params: joined(&joined(&condition.0.params, &a.0.params), &b.0.params) })
}

/// A rotation of queries or keys by their positions.
#[pyclass(frozen, eq, name = "Rope", module = "fir.variant")]
#[derive(Clone, PartialEq)]
pub(crate) struct Rope(pub(crate) lib::Rope);

#[pymethods]
impl Rope {
    #[new]
    #[pyo3(signature = (theta=1e4, scale=1.0, *, interleave=false, rotary_dim=None, low_freq_factor=None, high_freq_factor=4.0, old_context_len=8192.0))]
    fn new(
        theta: f32,
        scale: f32,
        interleave: bool,
        rotary_dim: Option<usize>,
        low_freq_factor: Option<f32>,
        high_freq_factor: f32,
        old_context_len: f32,
    ) -> Self {
        let llama31 =
            low_freq_factor.map(|low_freq_factor| Llama31 { low_freq_factor, high_freq_factor, old_context_len });
        Self(lib::Rope { theta, scale, interleave, rotary_dim, llama31 })
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}

/// What is done to a score between `q · k` and softmax, and around it.
#[pyclass(frozen, eq, hash, name = "Variant", module = "fir.variant")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Variant(pub(crate) lib::Variant);

#[pymethods]
impl Variant {
    /// Its name.
    #[getter]
    fn name(&self) -> &str {
        self.0.name()
    }

    /// Its parameters, by name, with their types.
    #[getter]
    fn params(&self) -> Vec<(String, String)> {
        self.0.params().map(|(name, ty)| (name.to_owned(), ty.to_string())).collect()
    }

    /// Whether weights are normalised by softmax.
    #[getter]
    fn softmax(&self) -> bool {
        self.0.normalize() == lib::Normalize::Softmax
    }

    /// The same under another name.
    fn named(&self, name: &str) -> PyResult<Self> {
        self.0.named(name).map(Self).map_err(to_py)
    }

    /// Both: masks hold together, one logits hook after the other.
    fn __and__(&self, other: &Self) -> PyResult<Self> {
        self.0.clone().and(other.0.clone()).map(Self).map_err(to_py)
    }

    /// A number that equal variants share.
    #[getter]
    fn key(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.0.hash(&mut hasher);
        hasher.finish()
    }

    fn __repr__(&self) -> String {
        format!("<fir.variant.Variant {} {:?}>", self.0.name(), self.params())
    }
}

/// Steps of a vector transform: rotations and factors.
#[derive(FromPyObject)]
enum VectorStep {
    Rope(Rope),
    Factor(Operand),
}

fn transform(steps: &[VectorStep], params: &mut Params) -> PyResult<Transform> {
    let mut all = Transform::default();
    for step in steps {
        all = match step {
            VectorStep::Rope(r) => all.rope(r.0),
            VectorStep::Factor(x) => {
                *params = joined(params, &x.0.params);
                all.scale(x.0.f32("a factor")?)
            }
        };
    }
    Ok(all)
}

/// A variant of the given hooks.
#[pyfunction]
#[pyo3(signature = (name, *, query=None, key=None, value=None, logits=None, mask=None, init=None, output=None, softmax=true))]
#[expect(clippy::too_many_arguments, reason = "the closed set of hooks")]
fn variant(
    name: &str,
    query: Option<Vec<VectorStep>>,
    key: Option<Vec<VectorStep>>,
    value: Option<Vec<VectorStep>>,
    logits: Option<Operand>,
    mask: Option<Operand>,
    init: Option<Operand>,
    output: Option<Operand>,
    softmax: bool,
) -> PyResult<Variant> {
    let (mut hooks, mut params): (Hooks, Params) = (lib::plain(), vec![]);
    if let Some(steps) = query {
        hooks = hooks.query(transform(&steps, &mut params)?);
    }
    if let Some(steps) = key {
        hooks = hooks.key(transform(&steps, &mut params)?);
    }
    if let Some(steps) = value {
        hooks = hooks.value(transform(&steps, &mut params)?);
    }
    for x in [&logits, &mask, &init, &output].into_iter().flatten() {
        params = joined(&params, &x.0.params);
    }
    if let Some(x) = &logits {
        hooks = hooks.logits(x.0.f32("logits")?);
    }
    if let Some(x) = &mask {
        hooks = hooks.mask(x.0.bool("mask")?);
    }
    if let Some(x) = &init {
        hooks = hooks.init(x.0.f32("init")?);
    }
    if let Some(x) = &output {
        hooks = hooks.output(x.0.f32("output")?);
    }
    if !softmax {
        hooks = hooks.normalize_none();
    }
    let build = |declare: &mut Declare| {
        for (name, ty) in &params {
            match ty {
                ParamType::F32 => drop(declare.f32(name)),
                ParamType::I32 => drop(declare.i32(name)),
                ParamType::F32Tensor => drop(declare.f32_tensor(name)),
                ParamType::I32Tensor => drop(declare.i32_tensor(name)),
                ParamType::PerHead => drop(declare.per_head(name)),
                _ => drop(declare.bits(name)),
            }
        }
        hooks
    };
    lib::variant(name, build).map(Variant).map_err(to_py)
}

/// A variant of the library, by its name.
#[pyfunction]
fn library(name: &str) -> PyResult<Variant> {
    Ok(Variant(match name {
        "standard" => lib::standard(),
        "causal" => lib::causal(),
        "sliding_window" => lib::sliding_window(),
        "soft_cap" => lib::soft_cap(),
        "alibi" => lib::alibi(),
        "sink" => lib::sink(),
        "custom_mask" => lib::custom_mask(),
        "tree_mask" => lib::tree_mask(),
        "sigmoid" => lib::sigmoid(),
        "multi_item" => lib::multi_item(),
        other => return Err(PyTypeError::new_err(format!("no variant {other:?}"))),
    }))
}

/// Rotates queries and keys on the fly.
#[pyfunction]
fn rope_variant(rope: &Rope) -> PyResult<Variant> {
    let r = rope.0;
    lib::variant("Rope", |_| lib::query(lib::rope(r)).key(lib::rope(r))).map(Variant).map_err(to_py)
}

/// The CUDA text of a variant's hooks for head dims `dim_qk` and `dim_vo`.
#[pyfunction]
fn cuda_source(variant: &Variant) -> String {
    lib::cuda_source(&variant.0)
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Expr>()?;
    module.add_class::<Rope>()?;
    module.add_class::<Variant>()?;
    module.add_function(wrap_pyfunction!(leaf, module)?)?;
    module.add_function(wrap_pyfunction!(scalar_param, module)?)?;
    module.add_function(wrap_pyfunction!(tensor_param_at, module)?)?;
    module.add_function(wrap_pyfunction!(bit_param_at, module)?)?;
    module.add_function(wrap_pyfunction!(function, module)?)?;
    module.add_function(wrap_pyfunction!(extremum, module)?)?;
    module.add_function(wrap_pyfunction!(choose, module)?)?;
    module.add_function(wrap_pyfunction!(variant, module)?)?;
    module.add_function(wrap_pyfunction!(library, module)?)?;
    module.add_function(wrap_pyfunction!(rope_variant, module)?)?;
    module.add_function(wrap_pyfunction!(cuda_source, module)?)
}
