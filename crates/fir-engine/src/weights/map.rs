//! Mapped files: the one place of this crate with `unsafe`.
#![allow(unsafe_code)]

use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use crate::error::{Error, Result};

/// A file's bytes.
pub(crate) struct Map(memmap2::Mmap);

impl Map {
    /// Maps the file read-only.
    pub(crate) fn open(path: &Path) -> Result<Arc<Self>> {
        let io = |source| Error::Io { path: path.display().to_string(), source };
        let file = File::open(path).map_err(io)?;
        // SAFETY: nobody writes a model's file while it is in use: `pull` renames finished files into place and never
        // opens one for writing again; for a path of the user's own the user keeps it, as with every mapped program.
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(io)?;
        Ok(Arc::new(Self(map)))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Some bytes of a mapped file, which stays mapped as long as they are held.
#[derive(Clone)]
pub(crate) struct Part {
    map: Arc<Map>,
    range: Range<usize>,
}

impl Part {
    pub(crate) fn new(map: Arc<Map>, range: Range<usize>) -> Self {
        Self { map, range }
    }
}

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        &self.map.bytes()[self.range.clone()]
    }
}
