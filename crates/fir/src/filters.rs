//! What a sampler is told about each row: temperature and which tokens may be drawn.

/// A parameter of every row of a batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PerRow<'a, T> {
    /// The same for all rows.
    One(T),
    /// One value per row of the output, in order.
    Each(&'a [T]),
}

impl<T: Copy> PerRow<'_, T> {
    /// The value of row `r`.
    ///
    /// # Panics
    /// If there are values for fewer rows; operators check their number first.
    pub fn get(&self, r: usize) -> T {
        match self {
            Self::One(x) => *x,
            Self::Each(xs) => xs[r],
        }
    }
}

impl<T> From<T> for PerRow<'_, T> {
    fn from(x: T) -> Self {
        Self::One(x)
    }
}

impl<'a, T> From<&'a [T]> for PerRow<'a, T> {
    fn from(xs: &'a [T]) -> Self {
        Self::Each(xs)
    }
}

/// What `top_p` is a fraction of when there is a `top_k` as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum FilterOrder {
    /// Of the mass that `top_k` left: first one filter, then the other on its renormalised result.
    #[default]
    TopKFirst,
    /// Of the whole mass: both filters look at the same probabilities, and a token passes if it passes each.
    Joint,
}

/// Temperature and filters of a batch of rows. The default changes nothing: `..Filters::default()` fills in what a
/// caller does not use.
///
/// With `w` the row's weights (`exp(logit / temperature)`, or the probabilities), `above(i)` the tokens of greater
/// weight than token `i`, and `S` the row's mass (of the tokens that pass `top_k`, with [`FilterOrder::TopKFirst`]),
/// token `i` may be drawn if `w[i] > 0` and
///
/// ```text
/// |above(i)| < top_k    and    Σ above(i) < top_p · S    and    w[i] >= min_p · max w
/// ```
///
/// So the k-th largest weight and all its equals pass `top_k`, and `top_p` takes the fewest largest weights that reach
/// its share, with all equals of the last. Weights that do not sum to 1 mean the same as their normalised ones.
#[derive(Clone, Copy, Debug)]
pub struct Filters<'a> {
    /// Divides the logits: finite, 0 or more; 0 takes the largest logit, and of equal ones the first. Probabilities
    /// have none.
    pub temperature: PerRow<'a, f32>,
    /// Number of largest weights that pass: 1 or more; at least the vocabulary's size lets all pass.
    pub top_k: PerRow<'a, u32>,
    /// Share of the mass that passes, in `(0, 1]`.
    pub top_p: PerRow<'a, f32>,
    /// Least weight that passes, as a fraction of the largest, in `[0, 1]`.
    pub min_p: PerRow<'a, f32>,
    /// How `top_k` and `top_p` go together.
    pub order: FilterOrder,
}

impl Default for Filters<'_> {
    fn default() -> Self {
        Self {
            temperature: PerRow::One(1.0),
            top_k: PerRow::One(u32::MAX),
            top_p: PerRow::One(1.0),
            min_p: PerRow::One(0.0),
            order: FilterOrder::TopKFirst,
        }
    }
}
