//! The one error type of this crate.

use std::path::{Path, PathBuf};

/// What can go wrong between a file and a measured kernel.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file does not say what its schema asks for.
    #[error("{file}: `{field}`: {rule}")]
    Schema {
        /// File, with a line where it has several documents.
        file: String,
        /// Path of the field from the document's root.
        field: String,
        /// What it should be, and what it is.
        rule: String,
    },
    /// A file or folder could not be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's word.
        source: std::io::Error,
    },
    /// A question or a call that has no answer as it was put.
    #[error("{op}: {why}")]
    Refused {
        /// The operation.
        op: &'static str,
        /// The argument, its value, and what was wanted.
        why: String,
    },
    /// A solution could not be built.
    #[error("cannot build `{solution}`: {why}")]
    Build {
        /// Its name.
        solution: String,
        /// The compiler's word.
        why: String,
    },
    /// A worker process could not be started, or broke the protocol.
    #[error("worker `{worker}`: {why}")]
    Worker {
        /// The command that was run.
        worker: String,
        /// What happened.
        why: String,
    },
    /// The kernel library refused.
    #[error(transparent)]
    Fir(#[from] fir::Error),
}

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn refused(op: &'static str, why: impl Into<String>) -> Self {
        Self::Refused { op, why: why.into() }
    }

    pub(crate) fn io(path: impl AsRef<Path>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.as_ref().to_owned();
        move |source| Self::Io { path, source }
    }
}
