//! [`Batch`]: what a step runs; checked, and turned into the arrays that plans and kernels take.

use fir::attention::CascadeLevel;
use fir::kv::{PageTable, Ragged};

use super::{KvCache, Limits};
use crate::error::{Error, Result};
use crate::models::ModelConfig;

/// One step of many sequences.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// All new tokens, sequence after sequence.
    pub tokens: &'a [u32],
    /// The sequences.
    pub seqs: &'a [Seq<'a>],
    /// Rows of `tokens` whose logits are wanted, in ascending order.
    pub logits: &'a [u32],
    /// Sequences that begin with the same pages; in order, none in two groups.
    pub shared: &'a [Shared],
}

/// One sequence of a step.
#[derive(Clone, Copy, Debug)]
pub struct Seq<'a> {
    /// Its new tokens: so many of the batch's.
    pub new: usize,
    /// Tokens that are in its pages already.
    pub past: usize,
    /// Its pages, with room for both.
    pub pages: &'a [u32],
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

/// The arrays of a step.
pub(super) struct Input {
    pub(super) q_lens: Vec<u32>,
    pub(super) kv_lens: Vec<u32>,
    pub(super) positions: Vec<usize>,
    lens: Vec<i32>,
    indptr: Vec<i32>,
    indices: Vec<i32>,
    slots: Vec<i32>,
    groups: Vec<Shared>,
}

fn wrong(field: &'static str, why: String) -> Error {
    Error::Request { field, why }
}

impl Input {
    pub(super) fn new(limits: Limits) -> Self {
        let Limits { max_tokens, max_seqs, .. } = limits;
        Self {
            q_lens: Vec::with_capacity(max_seqs),
            kv_lens: Vec::with_capacity(max_seqs),
            positions: Vec::with_capacity(max_tokens),
            lens: Vec::with_capacity(max_seqs),
            indptr: Vec::with_capacity(max_seqs + 1),
            indices: Vec::with_capacity(max_seqs * 64),
            slots: Vec::with_capacity(max_tokens),
            groups: Vec::with_capacity(max_seqs),
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
        let (size, pages) = (kv.page_size(), kv.pages());
        self.clear();
        self.indptr.push(0);
        for (s, seq) in seqs.iter().enumerate() {
            let len = seq.past + seq.new;
            if len > c.context {
                return Err(wrong("seqs", format!("sequence {s} of {len} tokens, but the context is {}", c.context)));
            }
            let held = len.div_ceil(size);
            if seq.pages.len() < held {
                let got = seq.pages.len();
                return Err(wrong(
                    "seqs",
                    format!("sequence {s} of {len} tokens has {got} pages of {size}, not {held}"),
                ));
            }
            if let Some(p) = seq.pages[..held].iter().find(|&&p| p as usize >= pages) {
                return Err(wrong("seqs", format!("sequence {s} has page {p} of a pool of {pages}")));
            }
            self.q_lens.push(seq.new as u32);
            self.kv_lens.push(len as u32);
            self.lens.push(len as i32);
            self.indices.extend(seq.pages[..held].iter().map(|&p| p as i32));
            self.indptr.push(self.indices.len() as i32);
            for at in seq.past..len {
                self.positions.push(at);
                self.slots.push((seq.pages[at / size] as usize * size + at % size) as i32);
            }
        }
        self.group(shared, seqs, size)
    }

    fn clear(&mut self) {
        let Self { q_lens, kv_lens, positions, lens, indptr, indices, slots, groups } = self;
        q_lens.clear();
        kv_lens.clear();
        positions.clear();
        lens.clear();
        indptr.clear();
        indices.clear();
        slots.clear();
        groups.clear();
    }

    /// Cuts all sequences into groups: those given, and each of the others alone with nothing shared.
    fn group(&mut self, shared: &[Shared], seqs: &[Seq<'_>], size: usize) -> Result<()> {
        if shared.is_empty() {
            return Ok(());
        }
        let mut next = 0;
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
            self.groups.extend((next..g.first).map(|first| Shared { first, count: 1, len: 0 }));
            self.groups.push(*g);
            next = end;
        }
        self.groups.extend((next..seqs.len()).map(|first| Shared { first, count: 1, len: 0 }));
        Ok(())
    }

    /// Slot of each new token.
    pub(super) fn slots(&self) -> &[i32] {
        &self.slots
    }

    /// Pages of the sequences.
    pub(super) fn table(&self, kv: &KvCache) -> Result<PageTable<'_>> {
        Ok(PageTable::with_lens(kv.page_size(), kv.pages(), &self.indptr[..], &self.indices[..], &self.lens)?)
    }

    /// The step as two levels, if sequences share pages: the groups' shared pages, and what each sequence has alone.
    pub(super) fn cascade(&self, kv: &KvCache) -> Result<Option<Levels>> {
        if self.groups.is_empty() {
            return Ok(None);
        }
        let size = kv.page_size();
        let (mut shared, mut own) = (Rows::default(), Rows::default());
        for g in &self.groups {
            let members = g.first..g.first + g.count;
            let pages = |s: usize| &self.indices[self.indptr[s] as usize..self.indptr[s + 1] as usize];
            let tokens = self.q_lens[members.clone()].iter().sum();
            shared.push(tokens, &pages(g.first)[..g.len / size], g.len);
            for s in members {
                own.push(self.q_lens[s], &pages(s)[g.len / size..], self.kv_lens[s] as usize - g.len);
            }
        }
        Ok(Some(Levels { shared: shared.level(kv)?, own: own.level(kv)? }))
    }
}

/// The two levels of a step with shared pages.
pub(super) struct Levels {
    pub(super) shared: Level,
    pub(super) own: Level,
}

/// Groups of query tokens with their pages.
pub(super) struct Level {
    qo: Ragged,
    kv_lens: Vec<u32>,
    pub(super) table: PageTable<'static>,
}

impl Level {
    pub(super) fn as_level(&self) -> CascadeLevel<'_> {
        CascadeLevel { qo: &self.qo, kv_lens: &self.kv_lens }
    }
}

#[derive(Default)]
struct Rows {
    q_lens: Vec<u32>,
    kv_lens: Vec<u32>,
    indptr: Vec<i32>,
    indices: Vec<i32>,
}

impl Rows {
    fn push(&mut self, tokens: u32, pages: &[i32], len: usize) {
        self.q_lens.push(tokens);
        self.kv_lens.push(len as u32);
        self.indices.extend_from_slice(pages);
        self.indptr.push(self.indices.len() as i32);
    }

    fn level(mut self, kv: &KvCache) -> Result<Level> {
        self.indptr.insert(0, 0);
        let lens: Vec<i32> = self.kv_lens.iter().map(|&n| n as i32).collect();
        let table = PageTable::with_lens(kv.page_size(), kv.pages(), self.indptr, self.indices, &lens)?;
        Ok(Level { qo: Ragged::from_lens(&self.q_lens)?, kv_lens: self.kv_lens, table })
    }
}
