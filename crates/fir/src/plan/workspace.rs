//! [`Scratch`]: memory a run needs besides its tensors, sized exactly by the plan.

use std::sync::Mutex;

use crate::error::{Error, Result};

/// Memory of one call in flight; a plan's `scratch()` makes one of the right size. Two calls at once need two.
#[derive(Debug, Default)]
pub struct Scratch {
    /// Rows of partial results: output, then its `m` and `d`.
    partials: Vec<f32>,
    /// A tile buffer per worker.
    tiles: Vec<Tile>,
}

/// One worker's buffer; the lock is never waited for.
pub(crate) type Tile = Mutex<Vec<f32>>;

impl Scratch {
    pub(crate) fn new(partials: usize, workers: usize, tile: usize) -> Self {
        Self { partials: vec![0.0; partials], tiles: (0..workers).map(|_| Mutex::new(vec![0.0; tile])).collect() }
    }

    /// Bytes it holds.
    pub fn bytes(&self) -> usize {
        let tile = self.tiles.first().map_or(0, |t| t.lock().map_or(0, |t| t.len()));
        (self.partials.len() + tile * self.tiles.len()) * size_of::<f32>()
    }

    /// The first `partials` floats of partial results and the workers' tiles, each of at least `tile` floats.
    pub(crate) fn take(&mut self, op: &'static str, partials: usize, tile: usize) -> Result<(&mut [f32], &[Tile])> {
        let have = (self.partials.len(), self.tiles.iter_mut().map(|t| t.get_mut().map_or(0, |t| t.len())).min());
        if have.0 < partials || have.1.is_none_or(|t| t < tile) {
            return Err(Error::value(
                op,
                "scratch",
                format!("{} floats of partial results and tiles of {}", have.0, have.1.unwrap_or(0)),
                format!("{partials} and {tile}, as this plan's `scratch()` makes"),
            ));
        }
        Ok((&mut self.partials[..partials], &self.tiles))
    }
}
