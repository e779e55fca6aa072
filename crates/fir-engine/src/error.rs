//! What can go wrong between a request and its answer.

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// One error type for the crate; each message names what was asked for and what was found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A request asks for what cannot be done; the server answers 400.
    #[error("`{field}`: {why}")]
    Request {
        /// The field of the request.
        field: &'static str,
        /// What is wrong with its value, with the value.
        why: String,
    },
    /// The queue is full; the server answers 429.
    #[error("the queue is full: {waiting} requests with {tokens} prompt tokens wait")]
    Busy {
        /// Requests that wait.
        waiting: usize,
        /// Their prompt tokens.
        tokens: usize,
    },
    /// A model's files cannot be used.
    #[error("{path}: {why}")]
    Model {
        /// The file or folder.
        path: String,
        /// What is wrong with it.
        why: String,
    },
    /// The engine has stopped, with the reason it gave.
    #[error("the engine has stopped: {0}")]
    Stopped(String),
    /// The configuration contradicts itself or the machine.
    #[error("config: {0}")]
    Config(String),
    /// An operator refused or failed.
    #[error(transparent)]
    Op(#[from] fir::Error),
    /// A file could not be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: String,
        /// The system's reason.
        source: std::io::Error,
    },
}
