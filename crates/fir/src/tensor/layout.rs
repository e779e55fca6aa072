//! Shape and strides, in elements. At most [`MAX_RANK`] axes, so a view is a plain value without a heap.

use crate::error::{Error, Result};

/// Most axes a tensor may have.
pub const MAX_RANK: usize = 6;

/// Sizes or strides of up to [`MAX_RANK`] axes; derefs to a slice.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Axes {
    rank: u8,
    values: [usize; MAX_RANK],
}

impl Axes {
    /// Copies `values`, of which there are at most [`MAX_RANK`].
    fn new(op: &'static str, arg: &'static str, values: &[usize]) -> Result<Self> {
        if values.len() > MAX_RANK {
            return Err(Error::Rank { op, arg, got: values.len(), want: MAX_RANK, axes: "at most".into() });
        }
        let mut a = Self { rank: values.len() as u8, values: [0; MAX_RANK] };
        a.values[..values.len()].copy_from_slice(values);
        Ok(a)
    }

    fn remove(&mut self, axis: usize) {
        self.values.copy_within(axis + 1.., axis);
        self.rank -= 1;
    }
}

impl std::ops::Deref for Axes {
    type Target = [usize];
    fn deref(&self) -> &[usize] {
        &self.values[..self.rank as usize]
    }
}

impl std::ops::DerefMut for Axes {
    fn deref_mut(&mut self) -> &mut [usize] {
        &mut self.values[..self.rank as usize]
    }
}

impl std::fmt::Debug for Axes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Debug::fmt(&**self, f)
    }
}

/// Where each index of a tensor lies: `offset(i) = Σ i[a] * strides[a]`.
///
/// The extent (one past the largest offset) never overflows `usize`: it is checked when the layout is made, and no
/// operation on a layout makes it larger.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Layout {
    shape: Axes,
    strides: Axes,
}

impl Layout {
    /// Row-major layout of `shape`.
    pub fn contiguous(op: &'static str, arg: &'static str, shape: &[usize]) -> Result<Self> {
        let shape = Axes::new(op, arg, shape)?;
        let mut strides = shape;
        let mut step = 1usize;
        for a in (0..shape.len()).rev() {
            strides[a] = step;
            step = step
                .checked_mul(shape[a].max(1))
                .ok_or_else(|| Error::layout(op, arg, format!("shape {shape:?}"), "a size that fits usize"))?;
        }
        let layout = Self { shape, strides };
        layout
            .checked_extent()
            .ok_or_else(|| Error::layout(op, arg, format!("shape {shape:?}"), "a number of bytes that fits usize"))?;
        Ok(layout)
    }

    /// Any layout; strides count elements and may be zero.
    pub fn strided(op: &'static str, arg: &'static str, shape: &[usize], strides: &[usize]) -> Result<Self> {
        let (shape, strides) = (Axes::new(op, arg, shape)?, Axes::new(op, arg, strides)?);
        if shape.len() != strides.len() {
            return Err(Error::Rank { op, arg, got: strides.len(), want: shape.len(), axes: "strides".into() });
        }
        let layout = Self { shape, strides };
        layout.checked_extent().ok_or_else(|| {
            Error::layout(
                op,
                arg,
                format!("shape {shape:?} with strides {strides:?}"),
                "offsets and a number of elements that fit usize",
            )
        })?;
        Ok(layout)
    }

    fn checked_extent(&self) -> Option<usize> {
        self.shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d.max(1)))?;
        if self.shape.contains(&0) {
            return Some(0);
        }
        let last = self
            .shape
            .iter()
            .zip(&*self.strides)
            .try_fold(0usize, |sum, (&d, &s)| sum.checked_add((d - 1).checked_mul(s)?))?;
        // Byte offsets must fit too, whatever the element type (8 bytes at most).
        last.checked_add(1)?.checked_mul(8).map(|b| b / 8)
    }

    /// Sizes of the axes.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Strides of the axes, in elements.
    pub fn strides(&self) -> &[usize] {
        &self.strides
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// One past the largest offset; 0 when empty.
    pub fn extent(&self) -> usize {
        if self.is_empty() {
            return 0;
        }
        1 + self.shape.iter().zip(&*self.strides).map(|(&d, &s)| (d - 1) * s).sum::<usize>()
    }

    /// Whether the elements lie in row-major order without gaps.
    pub fn is_contiguous(&self) -> bool {
        let mut step = 1;
        self.is_empty()
            || self.shape.iter().zip(&*self.strides).rev().all(|(&d, &s)| {
                let ok = d == 1 || s == step;
                step *= d;
                ok
            })
    }

    /// Whether some offset is reached by two indices, as far as sorting the strides can tell (may say yes for a
    /// layout that interleaves axes without collision; never says no for one that collides).
    pub fn may_alias(&self) -> bool {
        if self.is_empty() {
            return false;
        }
        let mut axes: Vec<(usize, usize)> =
            self.strides.iter().copied().zip(self.shape.iter().copied()).filter(|&(_, d)| d > 1).collect();
        axes.sort_unstable();
        let mut reach = 0usize;
        for (stride, dim) in axes {
            if stride <= reach {
                return true;
            }
            reach += (dim - 1) * stride;
        }
        false
    }

    /// Refuses a layout that claims more elements than could be listed: one of stride 0 may claim 2^60 of them with
    /// one in memory. Broadcasts of up to 2^24 pass.
    pub(crate) fn check_listed(&self, op: &'static str, arg: &'static str) -> Result<()> {
        if self.len() > 1 << 24 && self.may_alias() {
            return Err(Error::layout(
                op,
                arg,
                format!("{} elements with strides {:?}", self.len(), &*self.strides),
                "at most 2^24 where strides reach an element twice",
            ));
        }
        Ok(())
    }

    /// The layout with a new axis of size 1 (and stride 1) before the others, or after them.
    pub(crate) fn with_unit(&self, op: &'static str, last: bool) -> Result<Self> {
        let (mut shape, mut strides) = (self.shape.to_vec(), self.strides.to_vec());
        let at = if last { shape.len() } else { 0 };
        shape.insert(at, 1);
        strides.insert(at, 1);
        Self::strided(op, "self", &shape, &strides)
    }

    /// The layout with `axis` cut to `len` entries; the caller moves the start.
    pub(crate) fn narrow(mut self, axis: usize, len: usize) -> Self {
        self.shape[axis] = len;
        self
    }

    /// The layout without `axis`.
    pub(crate) fn without(mut self, axis: usize) -> Self {
        self.shape.remove(axis);
        self.strides.remove(axis);
        self
    }

    /// The layout with `a` and `b` exchanged.
    pub(crate) fn transpose(mut self, a: usize, b: usize) -> Self {
        self.shape.swap(a, b);
        self.strides.swap(a, b);
        self
    }

    /// Offsets of all elements in row-major order.
    pub fn offsets(&self) -> impl Iterator<Item = usize> + use<> {
        let layout = *self;
        let n = layout.len();
        (0..n).map(move |mut i| {
            let mut at = 0;
            for a in (0..layout.shape.len()).rev() {
                at += i % layout.shape[a] * layout.strides[a];
                i /= layout.shape[a];
            }
            at
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contiguous_layout_has_row_major_strides() {
        let l = Layout::contiguous("t", "x", &[2, 3, 4]).unwrap();
        assert_eq!(l.strides(), [12, 4, 1]);
        assert_eq!((l.len(), l.extent()), (24, 24));
        assert!(l.is_contiguous() && !l.may_alias());
        assert_eq!(l.offsets().collect::<Vec<_>>(), (0..24).collect::<Vec<_>>());
    }

    #[test]
    fn overflowing_layouts_are_refused() {
        assert!(Layout::contiguous("t", "x", &[usize::MAX, 2]).is_err());
        // The elements can be counted, their bytes cannot.
        assert!(Layout::contiguous("t", "x", &[usize::MAX / 4]).is_err());
        assert!(Layout::contiguous("t", "x", &[usize::MAX / 4, 0]).is_ok());
        assert!(Layout::strided("t", "x", &[3, 2], &[usize::MAX / 2, 1]).is_err());
        assert!(Layout::strided("t", "x", &[1 << 40, 1 << 40], &[0, 0]).is_err());
        assert!(Layout::contiguous("t", "x", &[1; 7]).is_err());
    }

    #[test]
    fn aliasing_is_seen() {
        let l = |shape: &[usize], strides: &[usize]| Layout::strided("t", "x", shape, strides).unwrap();
        assert!(l(&[4, 4], &[0, 1]).may_alias());
        assert!(l(&[4, 4], &[3, 1]).may_alias());
        assert!(!l(&[4, 4], &[8, 2]).may_alias());
        assert!(!l(&[4, 1], &[1, 0]).may_alias());
        assert!(!l(&[0, 4], &[0, 0]).may_alias());
    }
}
