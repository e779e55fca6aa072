//! The one error type: every refusal names the operation, the argument and both values.

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong between an operator's signature and its kernel.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A named axis was bound to one size by an earlier argument and has another here.
    #[error("{op}: `{arg}` has {axis}={got}, but `{first}` bound {axis}={want}")]
    Dim {
        /// Operation.
        op: &'static str,
        /// Argument that disagrees.
        arg: &'static str,
        /// Name of the axis.
        axis: &'static str,
        /// Size in `arg`.
        got: usize,
        /// Argument that bound the axis.
        first: &'static str,
        /// Size in `first`.
        want: usize,
    },
    /// An argument has the wrong number of axes.
    #[error("{op}: `{arg}` has {got} axes, expected {want} {axes}")]
    Rank {
        /// Operation.
        op: &'static str,
        /// Argument.
        arg: &'static str,
        /// Number of axes it has.
        got: usize,
        /// Number of axes it must have.
        want: usize,
        /// Their names, for the reader.
        axes: String,
    },
    /// An argument has an element type that the operation does not take.
    #[error("{op}: `{arg}` is {got}, expected {want}")]
    DType {
        /// Operation.
        op: &'static str,
        /// Argument.
        arg: &'static str,
        /// Its element type.
        got: &'static str,
        /// The types that are taken.
        want: String,
    },
    /// Strides, alignment or extent of an argument do not fit the operation or its memory.
    #[error("{op}: layout of `{arg}`: {got}, expected {want}")]
    Layout {
        /// Operation.
        op: &'static str,
        /// Argument.
        arg: &'static str,
        /// What it is.
        got: String,
        /// What it must be.
        want: String,
    },
    /// An argument lies where the executor cannot use it.
    #[error("{op}: `{arg}` is in {got}, expected {want}")]
    Place {
        /// Operation.
        op: &'static str,
        /// Argument.
        arg: &'static str,
        /// Where it is.
        got: String,
        /// Where it must be.
        want: String,
    },
    /// A scalar, an index or a length is out of its range.
    #[error("{op}: `{arg}` is {got}, expected {want}")]
    Value {
        /// Operation.
        op: &'static str,
        /// Argument.
        arg: &'static str,
        /// Its value, with its index where it is one of many.
        got: String,
        /// The values that are taken.
        want: String,
    },
    /// A variant is ill-formed, or a parameter it declares is missing or of another type.
    #[error("variant `{variant}`: {what}: got {got}, expected {want}")]
    Variant {
        /// Name of the variant.
        variant: String,
        /// Hook or parameter.
        what: String,
        /// What it is.
        got: String,
        /// What it must be.
        want: String,
    },
    /// No kernel takes this problem; every candidate says why.
    #[error("{op}: no kernel for this problem:{}", .why.iter().map(|w| format!("\n  {w}")).collect::<String>())]
    Unsupported {
        /// Operation.
        op: &'static str,
        /// One line per candidate.
        why: Vec<String>,
    },
    /// A device, its driver or its compiler is missing or of no use.
    #[error("{what}: {got}; {hint}")]
    Unavailable {
        /// What was asked for.
        what: String,
        /// What was found.
        got: String,
        /// How to get it.
        hint: String,
    },
    /// A device's driver refused a call.
    #[error("{call}: the CUDA driver answered {code} ({name})")]
    Driver {
        /// The driver's function.
        call: &'static str,
        /// Its answer.
        code: i32,
        /// The driver's name for that.
        name: String,
    },
    /// A kernel's text did not compile.
    #[error("kernel `{kernel}` did not compile for {arch}; its source is {source_path}\n{log}")]
    Compile {
        /// Name of the kernel.
        kernel: String,
        /// Architecture.
        arch: String,
        /// File that the source was kept in.
        source_path: String,
        /// What the compiler said.
        log: String,
    },
    /// A file could not be read or written.
    #[error("{path}: {what}")]
    Io {
        /// The file or folder.
        path: String,
        /// What the system said.
        what: String,
    },
    /// An environment variable holds something that is not one of its values.
    #[error("environment variable {name}={got:?}, expected {want}")]
    Env {
        /// Name of the variable.
        name: &'static str,
        /// Its value.
        got: String,
        /// The values that are taken.
        want: String,
    },
}

impl Error {
    /// [`Error::Value`], from anything that prints.
    pub fn value(op: &'static str, arg: &'static str, got: impl ToString, want: impl ToString) -> Self {
        Self::Value { op, arg, got: got.to_string(), want: want.to_string() }
    }

    /// [`Error::Place`], from anything that prints.
    pub fn place(op: &'static str, arg: &'static str, got: impl ToString, want: impl ToString) -> Self {
        Self::Place { op, arg, got: got.to_string(), want: want.to_string() }
    }

    /// [`Error::Layout`], from anything that prints.
    pub fn layout(op: &'static str, arg: &'static str, got: impl ToString, want: impl ToString) -> Self {
        Self::Layout { op, arg, got: got.to_string(), want: want.to_string() }
    }
}
