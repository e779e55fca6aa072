//! [`Batch`]: what a step runs; checked, and turned into the arrays that plans and kernels take.

use fir::attention::CascadeLevel;
use fir::kv::{PageTable, Ragged};

use super::{KvCache, Limits, SPLIT};
use crate::error::{Error, Result};
use crate::models::{KvLayout, ModelConfig};

/// One step of many sequences.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// All new tokens, sequence after sequence.
    pub tokens: &'a [u32],
    /// The sequences; those of [`Rule::Streaming`] come last.
    pub seqs: &'a [Seq<'a>],
    /// Rows of `tokens` whose logits are wanted, in ascending order.
    pub logits: &'a [u32],
    /// Sequences that begin with the same pages; in order, none in two groups, all of [`Rule::Model`].
    pub shared: &'a [Shared],
}

/// One sequence of a step.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seq<'a> {
    /// Its new tokens: so many of the batch's.
    pub new: usize,
    /// Tokens that are in its pages already.
    pub past: usize,
    /// Its pages, with room for both.
    pub pages: &'a [u32],
    /// What its new tokens attend to.
    pub rule: Rule,
}

/// What the new tokens of a sequence attend to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Rule {
    /// What the model says: all before them, or a window.
    #[default]
    Model,
    /// The same, but keys lie in its pages as they were before rotation, and are rotated as they are read, by their places
    /// in the pages: pages may be taken out of the middle between steps.
    Streaming,
    /// Some blocks of what was before.
    Sparse(Sparse),
}

/// Which blocks of keys a block of queries sees: the first, the nearest, and between them every so manyth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sparse {
    /// Tokens of a block; rounded up to whole pages.
    pub block: usize,
    /// Blocks at the start that all see.
    pub sinks: usize,
    /// Blocks before its own that a query sees.
    pub local: usize,
    /// Of those between, every so manyth, counted from its own; 0 is none.
    pub stride: usize,
}

impl Sparse {
    fn sees(&self, query: usize, key: usize) -> bool {
        let back = query - key;
        key < self.sinks || back <= self.local || (self.stride > 0 && back.is_multiple_of(self.stride))
    }
}

/// Consecutive sequences whose first `len` tokens are in the same pages, read once for all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shared {
    /// The first of them.
    pub first: usize,
    /// How many they are.
    pub count: usize,
    /// Tokens, in whole pages; at most what the shortest of them had before this step.
    pub len: usize,
}

/// Requests of one attention plan: query tokens, and the pages with what they see.
#[derive(Default)]
pub(super) struct Rows {
    pub(super) q_lens: Vec<u32>,
    pub(super) kv_lens: Vec<u32>,
    lens: Vec<i32>,
    indptr: Vec<i32>,
    indices: Vec<i32>,
    /// Query tokens of all.
    pub(super) tokens: usize,
}

impl Rows {
    fn with_capacity(requests: usize) -> Self {
        Self {
            q_lens: Vec::with_capacity(requests),
            kv_lens: Vec::with_capacity(requests),
            lens: Vec::with_capacity(requests),
            indptr: Vec::with_capacity(requests + 1),
            indices: Vec::with_capacity(requests * 64),
            tokens: 0,
        }
    }

    fn clear(&mut self) {
        let Self { q_lens, kv_lens, lens, indptr, indices, tokens } = self;
        q_lens.clear();
        kv_lens.clear();
        lens.clear();
        indptr.clear();
        indptr.push(0);
        indices.clear();
        *tokens = 0;
    }

    /// `tokens` query tokens that see the first `len` tokens of `pages`.
    fn push(&mut self, tokens: usize, pages: impl Iterator<Item = u32>, len: usize) {
        self.q_lens.push(tokens as u32);
        self.kv_lens.push(len as u32);
        self.lens.push(len as i32);
        self.indices.extend(pages.map(|p| p as i32));
        self.indptr.push(self.indices.len() as i32);
        self.tokens += tokens;
    }

    pub(super) fn qo(&self) -> Result<Ragged> {
        Ok(Ragged::from_lens(&self.q_lens)?)
    }

    pub(super) fn table(&self, kv: &KvCache) -> Result<PageTable<'_>> {
        Ok(PageTable::with_lens(kv.page_size(), kv.pages(), &self.indptr[..], &self.indices[..], &self.lens)?)
    }

    pub(super) fn level<'a>(&'a self, qo: &'a Ragged) -> CascadeLevel<'a> {
        CascadeLevel { qo, kv_lens: &self.kv_lens }
    }
}

/// The arrays of a step. Its tokens are those of sequences with shared pages first (and of all before the last such), then
/// plain ones, then streaming ones.
pub(super) struct Input {
    /// What tokens are rotated by.
    pub(super) positions: Vec<usize>,
    pub(super) slots: Vec<i32>,
    levels: Vec<Rows>,
    used: usize,
    pub(super) plain: Rows,
    pub(super) streaming: Rows,
}

fn wrong(field: &'static str, why: String) -> Error {
    Error::Request { field, why }
}

impl Input {
    pub(super) fn new(limits: Limits) -> Self {
        let Limits { max_tokens, max_seqs, .. } = limits;
        Self {
            positions: Vec::with_capacity(max_tokens),
            slots: Vec::with_capacity(max_tokens),
            levels: Vec::new(),
            used: 0,
            plain: Rows::with_capacity(max_seqs),
            streaming: Rows::default(),
        }
    }

    /// Checks a batch and takes it over.
    pub(super) fn fill(&mut self, c: &ModelConfig, kv: &KvCache, batch: &Batch<'_>, limits: Limits) -> Result<()> {
        let Batch { tokens, seqs, logits, shared } = *batch;
        for (field, got, most) in [
            ("tokens", tokens.len(), limits.max_tokens),
            ("seqs", seqs.len(), limits.max_seqs),
            ("logits", logits.len(), limits.max_logits),
        ] {
            if got > most {
                return Err(wrong(field, format!("{got} in a step, at most {most}")));
            }
        }
        let new: usize = seqs.iter().map(|s| s.new).sum();
        if new != tokens.len() {
            return Err(wrong("seqs", format!("have {new} new tokens, but `tokens` are {}", tokens.len())));
        }
        if let Some(t) = tokens.iter().find(|&&t| t as usize >= c.vocab) {
            return Err(wrong("tokens", format!("{t} is no token of a vocabulary of {}", c.vocab)));
        }
        if logits.windows(2).any(|w| w[0] >= w[1]) || logits.last().is_some_and(|&r| r as usize >= tokens.len()) {
            return Err(wrong("logits", format!("are not ascending rows below {}", tokens.len())));
        }
        let size = kv.page_size();
        self.positions.clear();
        self.slots.clear();
        self.plain.clear();
        self.streaming.clear();
        for (s, seq) in seqs.iter().enumerate() {
            check(c, kv, s, seq)?;
            let streams = seq.rule == Rule::Streaming;
            for at in seq.past..seq.past + seq.new {
                // By nothing, if keys are rotated when they are read.
                self.positions.push(if streams { 0 } else { at });
                self.slots.push((seq.pages[at / size] as usize * size + at % size) as i32);
            }
        }
        let first = self.group(shared, seqs, kv)?;
        for (s, seq) in seqs.iter().enumerate().skip(first) {
            if !self.streaming.q_lens.is_empty() && seq.rule != Rule::Streaming {
                return Err(wrong("seqs", format!("sequence {s} of {:?} after a streaming one", seq.rule)));
            }
            let len = seq.past + seq.new;
            let pages = seq.pages[..len.div_ceil(size)].iter().copied();
            match seq.rule {
                Rule::Model => self.plain.push(seq.new, pages, len),
                Rule::Streaming => self.streaming.push(seq.new, pages, len),
                Rule::Sparse(sparse) => self.sparse(sparse, seq, size),
            }
        }
        Ok(())
    }

    /// One request for each block of queries, with the pages of the blocks that it sees. Its own tokens come last, so that
    /// those after a query are hidden as ever.
    fn sparse(&mut self, sparse: Sparse, seq: &Seq<'_>, size: usize) {
        let pages_of = sparse.block.div_ceil(size).max(1);
        let block = pages_of * size;
        let (mut at, end) = (seq.past, seq.past + seq.new);
        while at < end {
            let query = at / block;
            let next = end.min((query + 1) * block);
            let seen = |key: &usize| sparse.sees(query, *key);
            let before = (0..query).filter(seen).count() * block;
            let own = &seq.pages[query * pages_of..next.div_ceil(size)];
            let others = (0..query).filter(seen).flat_map(|b| &seq.pages[b * pages_of..(b + 1) * pages_of]);
            self.plain.push(next - at, others.chain(own).copied(), before + next - query * block);
            at = next;
        }
    }

    /// Takes the sequences up to the last that shares pages, as levels; how many they are.
    ///
    /// A level is a piece of every sequence's KV of [`SPLIT`] tokens, cut where flat attention cuts: pieces have the same
    /// bits then, and are added up in the same order, whether they were read for one sequence or for all of a group.
    /// Latent attention has two levels, what is shared and what is not.
    fn group(&mut self, shared: &[Shared], seqs: &[Seq<'_>], kv: &KvCache) -> Result<usize> {
        self.used = 0;
        let size = kv.page_size();
        let latent = matches!(kv.layout(), KvLayout::Latent { .. });
        let piece = if latent { usize::MAX } else { piece_of(size) };
        let mut next = 0;
        let mut groups = Vec::new();
        for g in shared {
            let end = g.first.checked_add(g.count).filter(|&e| e <= seqs.len() && g.first >= next && g.count > 0);
            let Some(end) = end else {
                return Err(wrong("shared", format!("{g:?} after sequence {next} of {}", seqs.len())));
            };
            let members = &seqs[g.first..end];
            let whole = g.len.is_multiple_of(size) && members.iter().all(|s| s.past >= g.len);
            let held = g.len / size;
            if !whole || members.iter().any(|s| s.pages[..held] != members[0].pages[..held]) {
                let why = format!("{g:?} is not the same whole pages of {size} at the start of all its sequences");
                return Err(wrong("shared", why));
            }
            groups.extend((next..g.first).map(|first| Shared { first, count: 1, len: 0 }));
            groups.push(*g);
            next = end;
        }
        if let Some(seq) = seqs[..next].iter().find(|s| s.rule != Rule::Model) {
            return Err(wrong("shared", format!("a sequence of {:?} in or before a group", seq.rule)));
        }
        let pieces = |g: &Shared| if latent { 1 } else { g.len.div_ceil(piece) };
        // Where piece `level` of a sequence of `len` tokens ends; the last ends with it.
        let ends = |g: &Shared, len: usize, level: usize| {
            let common = pieces(g);
            let (from, n) = if level < common { (0, level) } else { (g.len, level - common) };
            let cut = (from / piece).saturating_add(n + 1).saturating_mul(piece);
            if level < common { cut.min(g.len) } else { cut.min(len) }
        };
        let longest = |g: &Shared| {
            let own = |s: &Seq<'_>| (s.past + s.new).div_ceil(piece) - g.len / piece;
            let own = seqs[g.first..g.first + g.count].iter().map(own).max();
            pieces(g) + own.unwrap_or(0).max(1)
        };
        let levels = groups.iter().map(longest).max().unwrap_or(0);
        for level in 0..levels {
            if self.levels.len() == self.used {
                self.levels.push(Rows::default());
            }
            let rows = &mut self.levels[self.used];
            self.used += 1;
            rows.clear();
            for g in &groups {
                let members = &seqs[g.first..g.first + g.count];
                let common = pieces(g);
                let mut push = |seq: &Seq<'_>, tokens: usize| {
                    let len = seq.past + seq.new;
                    let from = if level == 0 { 0 } else { ends(g, len, level - 1) };
                    let to = ends(g, len, level);
                    rows.push(tokens, seq.pages[from / size..to.div_ceil(size)].iter().copied(), to - from);
                };
                if level < common {
                    push(&members[0], members.iter().map(|s| s.new).sum());
                } else {
                    members.iter().for_each(|s| push(s, s.new));
                }
            }
        }
        Ok(next)
    }

    /// The levels of the sequences that share pages; none if no two do.
    pub(super) fn levels(&self) -> &[Rows] {
        &self.levels[..self.used]
    }
}

fn check(c: &ModelConfig, kv: &KvCache, s: usize, seq: &Seq<'_>) -> Result<()> {
    let (size, pages, len) = (kv.page_size(), kv.pages(), seq.past + seq.new);
    if len > c.context {
        return Err(wrong("seqs", format!("sequence {s} of {len} tokens, but the context is {}", c.context)));
    }
    let held = len.div_ceil(size);
    if seq.pages.len() < held {
        let got = seq.pages.len();
        return Err(wrong("seqs", format!("sequence {s} of {len} tokens has {got} pages of {size}, not {held}")));
    }
    if let Some(p) = seq.pages[..held].iter().find(|&&p| p as usize >= pages) {
        return Err(wrong("seqs", format!("sequence {s} has page {p} of a pool of {pages}")));
    }
    if seq.rule != Rule::Model && (c.mla.is_some() || c.windows.iter().any(Option::is_some)) {
        let why = format!("sequence {s} of {:?}, but {} has a window or latent attention", seq.rule, c.arch);
        return Err(wrong("seqs", why));
    }
    Ok(())
}

/// Tokens of a level's pieces for pages of `page_size`: whole pages, and whole pieces of flat attention. A prefix of a
/// multiple of it is read for a group with the bits that it has for one sequence.
pub(crate) fn piece_of(page_size: usize) -> usize {
    let (mut x, mut y) = (SPLIT as usize, page_size);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    SPLIT as usize / x * page_size
}
