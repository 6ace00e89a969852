//! Errors in a checkpoint, with messages that name the file and the item in it.

use std::path::{Path, PathBuf};

/// The result of loading or using a model.
pub type Result<T> = std::result::Result<T, Error>;

/// The beginning of a file that Git LFS left in place of the real one.
pub(super) const LFS_POINTER: &[u8] = b"version https://git-lfs";
/// The fault of such a file.
pub(super) const LFS_PROBLEM: &str =
    "a Git LFS pointer, and not the file itself: fetch it with 'git lfs pull', or download it";

/// Why a model cannot be loaded or used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read or mapped.
    #[error("{}: {cause}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// The operating system's error.
        cause: std::io::Error,
    },
    /// A file does not conform to its format.
    #[error("{}: {problem}", file.display())]
    File {
        /// The file.
        file: PathBuf,
        /// The fault, and what was expected.
        problem: String,
    },
    /// A field of a JSON file has an invalid or unsupported value.
    #[error("{}: field '{field}': {problem}", file.display())]
    Field {
        /// The file.
        file: PathBuf,
        /// The field, with dots for nesting.
        field: String,
        /// The fault, and what is supported.
        problem: String,
    },
    /// A tensor is missing, misshapen or truncated.
    #[error("{}: tensor '{tensor}': {problem}", file.display())]
    Tensor {
        /// The file, or the directory if no file has the tensor.
        file: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// The fault, and what was expected.
        problem: String,
    },
    /// Text could not be turned into tokens, or back.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// The chat template rejected the messages or is itself invalid.
    #[error("chat template: {0}")]
    Template(String),
    /// The device refused the weights.
    #[error("weights: {0}")]
    Device(#[from] mixfleet_hal::Error),
}

impl Error {
    /// Whether a template made a text or a list beyond the limits of a rendering.
    pub fn is_template_limit(&self) -> bool {
        matches!(self, Error::Template(message) if message.contains(super::jinja::BEYOND))
    }

    pub(super) fn read(file: &Path, cause: std::io::Error) -> Self {
        Error::Read { file: file.to_owned(), cause }
    }

    pub(super) fn file(file: &Path, problem: impl Into<String>) -> Self {
        Error::File { file: file.to_owned(), problem: problem.into() }
    }

    pub(super) fn tensor(file: &Path, tensor: &str, problem: impl Into<String>) -> Self {
        Error::Tensor { file: file.to_owned(), tensor: tensor.to_owned(), problem: problem.into() }
    }
}
