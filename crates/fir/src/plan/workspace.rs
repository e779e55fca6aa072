//! [`Scratch`]: memory a run needs besides its tensors, sized exactly by the plan.

use std::sync::Mutex;

use crate::error::{Error, Result};
#[cfg(feature = "cuda")]
use crate::tensor::{DeviceMemory, Span};

/// Memory of one call in flight; a plan's `scratch()` makes one of the right size. Two calls at once need two.
#[derive(Debug, Default)]
pub struct Scratch {
    /// Rows of partial results: output, then its `m` and `d`.
    partials: Vec<f32>,
    /// A tile buffer per worker.
    tiles: Vec<Tile>,
    #[cfg(feature = "cuda")]
    device: Option<OnDevice>,
}

/// What a device's kernels need: counters, zero before and after each of them, and floats.
#[cfg(feature = "cuda")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DeviceSizes {
    pub(crate) counters: usize,
    pub(crate) floats: usize,
}

#[cfg(feature = "cuda")]
impl DeviceSizes {
    /// Bytes before the floats, which begin at a multiple of 256.
    pub(crate) fn counter_bytes(self) -> usize {
        (self.counters * size_of::<u32>()).next_multiple_of(256)
    }

    pub(crate) fn bytes(self) -> usize {
        self.counter_bytes() + self.floats * size_of::<f32>()
    }

    pub(crate) fn max(self, other: Self) -> Self {
        Self { counters: self.counters.max(other.counters), floats: self.floats.max(other.floats) }
    }
}

/// Memory of a device; nothing on a dry run. An allocation that failed is reported by the run that needs it.
#[cfg(feature = "cuda")]
struct OnDevice {
    memory: Result<Option<Box<dyn DeviceMemory>>>,
    sizes: DeviceSizes,
}

#[cfg(feature = "cuda")]
impl std::fmt::Debug for OnDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.sizes)
    }
}

/// One worker's buffer; the lock is never waited for.
pub(crate) type Tile = Mutex<Vec<f32>>;

impl Scratch {
    pub(crate) fn new(partials: usize, workers: usize, tile: usize) -> Self {
        let tiles = (0..workers).map(|_| Mutex::new(vec![0.0; tile])).collect();
        Self {
            partials: vec![0.0; partials],
            tiles,
            #[cfg(feature = "cuda")]
            device: None,
        }
    }

    /// Of a device's memory: `sizes.bytes()`, the counters 0.
    #[cfg(feature = "cuda")]
    pub(crate) fn on_device(sizes: DeviceSizes, memory: Result<Option<Box<dyn DeviceMemory>>>) -> Self {
        Self { device: Some(OnDevice { memory, sizes }), ..Self::default() }
    }

    /// Whether it is large enough.
    #[cfg(feature = "cuda")]
    pub(crate) fn holds(&self, sizes: DeviceSizes) -> bool {
        self.device.as_ref().is_some_and(|d| sizes.max(d.sizes) == d.sizes)
    }

    /// Where its counters and its floats are, and on which device; none on a dry run.
    #[cfg(feature = "cuda")]
    pub(crate) fn take_device(&mut self, op: &'static str, sizes: DeviceSizes) -> Result<Option<[Span; 2]>> {
        let have = self.device.as_ref().map(|d| d.sizes).unwrap_or_default();
        let Some(device) = self.device.as_ref().filter(|_| self.holds(sizes)) else {
            let (got, want) = (format!("{have:?} on a device"), format!("{sizes:?}, as this plan's `scratch()` makes"));
            return Err(Error::value(op, "scratch", got, want));
        };
        let Some(memory) = device.memory.as_ref().map_err(Clone::clone)? else { return Ok(None) };
        let all = memory.span();
        let head = have.counter_bytes();
        let floats = Span { address: all.address + head as u64, len: all.len.saturating_sub(head), ..all };
        Ok(Some([Span { len: head, ..all }, floats]))
    }

    /// Bytes it holds.
    pub fn bytes(&self) -> usize {
        let tile = self.tiles.first().map_or(0, |t| t.lock().map_or(0, |t| t.len()));
        let host = (self.partials.len() + tile * self.tiles.len()) * size_of::<f32>();
        #[cfg(feature = "cuda")]
        return host + self.device.as_ref().map_or(0, |d| d.sizes.bytes());
        #[cfg(not(feature = "cuda"))]
        host
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
