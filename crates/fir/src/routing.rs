//! How a mixture of experts turns a token's logits into experts and their weights.

/// What a logit becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Score {
    /// `e^logit / Σ e^logit` over all experts.
    #[default]
    Softmax,
    /// `1 / (1 + e^-logit)`.
    Sigmoid,
}

/// Experts in groups, of which a token uses a few.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Groups {
    /// How many groups there are: consecutive experts, as many in each.
    pub count: usize,
    /// From how many of them a token's experts are taken.
    pub chosen: usize,
}

/// A rule of routing.
///
/// The default is a softmax whose chosen weights are made to sum to 1: as Mixtral has it, where a softmax over the chosen
/// logits is the same thing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    /// What a logit becomes.
    pub score: Score,
    /// Whether the chosen scores are divided by their sum.
    pub renormalize: bool,
    /// Groups that are chosen first, by the sum of their two largest scores; all experts at once when not given.
    pub groups: Option<Groups>,
    /// Factor of every weight.
    pub scale: f32,
}

impl Default for Routing {
    fn default() -> Self {
        Self { score: Score::Softmax, renormalize: true, groups: None, scale: 1.0 }
    }
}

impl Routing {
    /// DeepSeek-V3: sigmoid scores, 4 of 8 groups, weights that sum to 2.5.
    pub fn deepseek_v3() -> Self {
        let groups = Some(Groups { count: 8, chosen: 4 });
        Self { score: Score::Sigmoid, renormalize: true, groups, scale: 2.5 }
    }

    /// Llama 4: the expert of the largest logit, weighed by its sigmoid.
    pub fn llama4() -> Self {
        Self { score: Score::Sigmoid, renormalize: false, groups: None, scale: 1.0 }
    }
}
