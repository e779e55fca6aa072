//! What one step runs: who is admitted, whose prompt goes on and how far, who gives up pages.
//!
//! A sequence is a list of tokens, of which the first `computed` have their KV in pages. Prefill and decode are the same
//! thing: a step computes some of the tokens that are not yet, and when it reaches the last one its logits give the
//! next. So a preempted sequence is one whose pages went to the tree, and coming back is finding them there.
//!
//! Why it cannot lock up: sequences stand in one order (arrival, shifted by priority). Pages are taken from the last
//! in that order for the first, a sequence alone always fits (checked when it is added), and a sequence that was cut off
//! keeps its place. So the first one ends, and then there is another first one.

mod batch;
pub(crate) mod cost;
pub(crate) mod group;
mod pages;
#[cfg(test)]
mod sim;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::kv::pool::Pool;
use crate::kv::radix::{NodeId, Place, Tree, common};
use crate::kv::tier::Tier;
use crate::request::Attention;
use crate::runner::Shared;
use cost::{Cost, Load};
use group::Groups;

pub(crate) use batch::Lists;

pub(crate) type SeqId = usize;

/// One level of priority is worth so much waiting: strict levels would let a busy one starve those below.
const LEVEL: Duration = Duration::from_secs(10);
/// Prompts are computed in chunks of so many tokens at least. Kernels have another road for few query rows, with another
/// rounding; so a prompt's tokens always take the one for many, whatever the batch and the cache have for them, and an
/// answer's tokens, which are computed one by one, the one for few. (A prompt shorter than this is one chunk.)
const CHUNK: usize = 9;
/// Prompts of streaming sequences are computed up to multiples of this, whatever the batch: what a token sees of those
/// before depends on where its chunk began.
const STREAM: usize = 64;
/// Rows of logits in a step for tokens of prompts, of which the probability is asked for: as many as the shortest chunk that
/// a step gives a prompt, so that there is always one that fits.
pub(crate) fn scored_rows(page_size: usize) -> usize {
    (2 * (CHUNK + page_size)).max(64)
}

/// Waiting sequences looked at in a step beyond those that are admitted.
const LOOK: usize = 64;

/// Sizes of a step.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    pub page_size: usize,
    /// Sequences that run at once.
    pub max_seqs: usize,
    /// New tokens in a step.
    pub max_tokens: usize,
    /// While answers are running, a step with a prompt in it should take no longer.
    pub itl_target_ms: Option<f64>,
    /// Whether prefixes are kept and shared.
    pub prefix_cache: bool,
    /// Whether shared prefixes are read together.
    pub cascade: bool,
}

/// A sequence in the engine.
#[derive(Debug)]
pub(crate) struct Seq {
    /// Prompt and answer.
    pub tokens: Vec<u32>,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// The longest it may become.
    pub max_len: usize,
    pub salt: u64,
    pub deadline: Option<Instant>,
    /// Of the prompt, what was found when it first ran.
    pub cached: usize,
    /// It has run.
    pub started: bool,
    /// Tokens of the prompt that need no row of logits any more, that of the next being known or not asked for.
    pub scored: usize,
    /// Guesses at what follows `tokens`, to be verified in the next step.
    pub drafts: Vec<u32>,
    /// Other guesses, in pages of their own.
    pub branch: Branch,
    pub attention: Attention,
    /// Tokens whose pages were given up, behind the first ones.
    dropped: usize,
    place: (i64, u64),
    computed: usize,
    pages: Vec<u32>,
    /// The nodes of its first pages, held.
    nodes: Vec<NodeId>,
}

/// A second chain of guesses at what follows a sequence: a tree whose root is the sequence's last token has two then.
///
/// It lies in a copy of the sequence's last page, and pages after that. So each chain is a plain sequence, whose rows have
/// the bits that they have when tokens come one by one, without a mask; and if it is the chain that was right, its pages
/// take the place of the others.
#[derive(Debug, Default)]
pub(crate) struct Branch {
    pub tokens: Vec<u32>,
    /// Its pages after those that it shares with the sequence; none if there was no room.
    pages: Vec<u32>,
    /// All of them, as the model gets them.
    all: Vec<u32>,
}

impl Seq {
    pub(crate) fn new(prompt: Vec<u32>, max_len: usize, salt: u64, deadline: Option<Instant>) -> Self {
        Self {
            prompt: prompt.len(),
            scored: prompt.len(),
            tokens: prompt,
            max_len,
            salt,
            deadline,
            cached: 0,
            started: false,
            drafts: Vec::new(),
            branch: Branch::default(),
            attention: Attention::Full,
            dropped: 0,
            place: (0, 0),
            computed: 0,
            pages: Vec::new(),
            nodes: Vec::new(),
        }
    }

    /// Tokens without KV; at least one, whose logits give the next.
    fn pending(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Tokens in its pages.
    fn held(&self) -> usize {
        self.computed - self.dropped
    }

    /// It only waits for its next token.
    pub(crate) fn decoding(&self) -> bool {
        self.pending() == 1 && self.tokens.len() > self.prompt
    }
}

/// A sequence's part of a step: `new` tokens, logits for the last `rows` of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Work {
    pub id: SeqId,
    pub new: usize,
    pub rows: usize,
    /// Tokens of the sequence's branch, which come after that, each with logits, behind its last token again.
    pub branch_rows: usize,
    /// Tokens before the last `rows` that have logits too: of a prompt.
    pub scored: usize,
}

/// What a step runs.
#[derive(Debug, Default)]
pub(crate) struct Step {
    pub works: Vec<Work>,
    pub shared: Vec<Shared>,
    pub load: Load,
    /// KV tokens that attention would read without groups, and reads with them.
    pub read_flat: usize,
    pub read: usize,
}

/// What the scheduler counts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub preemptions: u64,
    pub evictions: u64,
    pub queried_tokens: u64,
    pub hit_tokens: u64,
    pub restored_tokens: u64,
}

enum Admit {
    Yes,
    /// Something it can use is on its way; others may go first.
    Later,
    /// There is no room.
    Full,
}

pub(crate) struct Scheduler {
    pub limits: Limits,
    pub cost: Cost,
    pub counts: Counts,
    pool: Pool,
    tree: Tree,
    tier: Option<Tier>,
    seqs: Vec<Option<Seq>>,
    vacant: Vec<SeqId>,
    waiting: BTreeSet<((i64, u64), SeqId)>,
    running: Vec<SeqId>,
    start: Instant,
    serial: u64,
    /// Lists of steps that are over, for those to come.
    groups: Groups,
    spare: Step,
    works: Vec<Work>,
    order: Vec<SeqId>,
}

impl Limits {
    /// The most tokens that a sequence holds at once.
    fn most_held(&self, seq: &Seq) -> usize {
        let Attention::Streaming { sinks, window } = seq.attention else { return seq.max_len };
        seq.max_len.min(stream_room(self.page_size, sinks, window))
    }
}

/// Tokens that a streaming sequence has pages for: what it keeps, a block of its prompt, and the ends of pages.
pub(crate) fn stream_room(page_size: usize, sinks: usize, window: usize) -> usize {
    let pages = |n: usize| n.div_ceil(page_size);
    (pages(sinks).saturating_add(pages(window)).saturating_add(pages(STREAM) + 2)).saturating_mul(page_size)
}

impl Scheduler {
    pub(crate) fn new(limits: Limits, pages: usize, tier: Option<Tier>, start: Instant) -> Self {
        Self {
            cost: Cost::new(),
            counts: Counts::default(),
            pool: Pool::new(u32::try_from(pages).unwrap_or(u32::MAX)),
            tree: Tree::new(limits.page_size).with_room(pages),
            limits,
            tier,
            seqs: Vec::new(),
            vacant: Vec::new(),
            waiting: BTreeSet::new(),
            running: Vec::new(),
            start,
            serial: 0,
            groups: Groups::default(),
            spare: Step::default(),
            works: Vec::new(),
            order: Vec::new(),
        }
    }

    /// Takes a step back that is over.
    pub(crate) fn recycle(&mut self, step: Step) {
        self.spare = step;
    }

    /// The longest sequence that fits the pool.
    pub(crate) fn capacity(&self) -> usize {
        self.pool.pages() * self.limits.page_size
    }

    pub(crate) fn add(&mut self, mut seq: Seq, priority: i32, now: Instant) -> Result<SeqId> {
        if self.limits.most_held(&seq) > self.capacity() || seq.tokens.is_empty() {
            let why = format!(
                "{} tokens with {} in the prompt, but the cache holds {}",
                seq.max_len,
                seq.prompt,
                self.capacity()
            );
            return Err(Error::Request { field: "prompt", why });
        }
        let waited = now.duration_since(self.start).as_micros() as i64;
        self.serial += 1;
        seq.place = (waited.saturating_sub(i64::from(priority) * LEVEL.as_micros() as i64), self.serial);
        let place = seq.place;
        let id = match self.vacant.pop() {
            Some(id) => {
                self.seqs[id] = Some(seq);
                id
            }
            None => {
                self.seqs.push(Some(seq));
                self.seqs.len() - 1
            }
        };
        self.waiting.insert((place, id));
        Ok(id)
    }

    pub(crate) fn seq(&self, id: SeqId) -> &Seq {
        self.seqs[id].as_ref().expect("a sequence that is here")
    }

    pub(crate) fn seq_mut(&mut self, id: SeqId) -> &mut Seq {
        self.seqs[id].as_mut().expect("a sequence that is here")
    }

    /// Its pages, and how many of its tokens are in them.
    pub(crate) fn kv(&self, id: SeqId) -> (&[u32], usize) {
        let seq = self.seq(id);
        (&seq.pages, seq.computed)
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    pub(crate) fn running(&self) -> &[SeqId] {
        &self.running
    }

    /// Pages in the pool, and those that nobody uses or that can be had by forgetting prefixes.
    pub(crate) fn pages(&self) -> (usize, usize) {
        (self.pool.pages(), self.available())
    }

    /// Ends the tier's thread and removes its files. Nothing is scheduled after that.
    pub(crate) fn close_tier(&mut self) {
        self.tier = None;
    }

    pub(crate) fn tier(&self) -> Option<&Tier> {
        self.tier.as_ref()
    }

    /// Sequences that wait past their deadline and have never run.
    pub(crate) fn expired(&self, now: Instant) -> Vec<SeqId> {
        let late = |id: &SeqId| !self.seq(*id).started && self.seq(*id).deadline.is_some_and(|d| d <= now);
        self.waiting.iter().map(|&(_, id)| id).filter(late).collect()
    }

    /// Takes a sequence out; its KV stays for others to find.
    pub(crate) fn remove(&mut self, id: SeqId) -> Seq {
        self.cut_branch(id);
        self.release(id);
        self.running.retain(|&r| r != id);
        let seq = self.seqs[id].take().expect("a sequence that is here");
        self.waiting.remove(&(seq.place, id));
        self.vacant.push(id);
        seq
    }

    /// What became of a sequence's part of a step: `computed` more tokens have KV, and `next` follow.
    pub(crate) fn advance(&mut self, id: SeqId, computed: usize, next: &[u32]) {
        let seq = self.seq_mut(id);
        seq.tokens.extend_from_slice(next);
        seq.drafts.clear();
        seq.computed += computed;
        debug_assert!(seq.computed <= seq.tokens.len());
        self.slide(id);
        self.publish(id);
    }

    /// The longest that a streaming sequence keeps, if it is one: what is dropped goes page by page.
    fn slide(&mut self, id: SeqId) {
        let page_size = self.limits.page_size;
        let seq = self.seqs[id].as_mut().expect("a sequence that is here");
        let Attention::Streaming { sinks, window } = seq.attention else { return };
        let first = sinks.div_ceil(page_size);
        let keep = (first + window.div_ceil(page_size)) * page_size;
        while seq.held() >= keep + page_size {
            // It is the next to be written.
            let page = seq.pages.remove(first);
            seq.pages.push(page);
            seq.dropped += page_size;
        }
    }

    /// Chooses what the next step runs. Nothing runs if it is empty.
    pub(crate) fn schedule(&mut self, backend: &mut Backend) -> Result<Step> {
        self.forget_lost();
        let (mut works, mut order) = (std::mem::take(&mut self.works), std::mem::take(&mut self.order));
        works.clear();
        order.clear();
        order.extend_from_slice(&self.running);
        let mut load = Load::default();
        order.sort_unstable_by_key(|&id| self.seq(id).place);
        for &id in &order {
            if !self.running.contains(&id) || !self.seq(id).decoding() || !self.make_room(id, backend)? {
                continue;
            }
            let seq = self.seq(id);
            let new = 1 + seq.drafts.len();
            let branch_rows = seq.branch.tokens.len();
            load = load.plus(Load::of(seq.held(), new, new));
            if branch_rows > 0 {
                load = load.plus(Load::of(seq.held(), 1 + branch_rows, branch_rows));
            }
            works.push(Work { id, new, rows: new, branch_rows, scored: 0 });
        }
        let decoders = works.len();
        let mut most = self.limits.max_tokens.saturating_sub(load.tokens);
        if let (Some(target), true) = (self.limits.itl_target_ms, decoders > 0) {
            let first = self.prefilling().min_by_key(|&id| self.seq(id).place);
            let past = first.map_or(0, |id| self.seq(id).computed);
            // Half of it is a chunk to the end of a page: prompts must end some day, whatever the target.
            let within = self.cost.prefill_within(load, past, most, target);
            most = most.min(within.max(2 * (CHUNK + self.limits.page_size)));
        }
        let before = self.running.len();
        self.admit_waiting(most, backend)?;
        // Those that came back with all their pages go on where they were.
        for &id in self.running[before..].iter().filter(|&&id| self.seq(id).decoding()) {
            load = load.plus(Load::of(self.seq(id).held(), 1, 1));
            works.push(Work { id, new: 1, rows: 1, branch_rows: 0, scored: 0 });
            most = most.saturating_sub(1);
        }
        self.split(most, &mut works, &mut load);
        let step = self.group(&works, load);
        (self.works, self.order) = (works, order);
        Ok(step)
    }

    fn prefilling(&self) -> impl Iterator<Item = SeqId> {
        self.running.iter().copied().filter(|&id| !self.seq(id).decoding())
    }

    /// Pages for the next token and its drafts. If there are none, the last sequence in order gives up its own; if that
    /// is this one, it does not run.
    fn make_room(&mut self, id: SeqId, backend: &mut Backend) -> Result<bool> {
        let page_size = self.limits.page_size;
        loop {
            let seq = self.seq(id);
            let have = seq.pages.len() * page_size;
            if have > seq.held() {
                // Guesses are not worth a page of somebody else's.
                let room = have - seq.held() - 1;
                let want = seq.drafts.len();
                if want > room
                    && self.available() > self.reserve()
                    && let Some(page) = self.alloc(backend)?
                {
                    self.seq_mut(id).pages.push(page);
                    continue;
                }
                self.seq_mut(id).drafts.truncate(room);
                self.grow_branch(id, backend)?;
                return Ok(true);
            }
            if let Some(page) = self.alloc(backend)? {
                self.seq_mut(id).pages.push(page);
                continue;
            }
            let last = self.running.iter().copied().max_by_key(|&r| self.seq(r).place).expect("this one runs");
            self.preempt(last);
            if last == id {
                return Ok(false);
            }
        }
    }

    /// Sends a sequence back to wait; its pages are the tree's.
    fn preempt(&mut self, id: SeqId) {
        self.cut_branch(id);
        self.release(id);
        self.running.retain(|&r| r != id);
        self.seq_mut(id).drafts.clear();
        self.waiting.insert((self.seq(id).place, id));
        self.counts.preemptions += 1;
    }

    fn admit_waiting(&mut self, most: usize, backend: &mut Backend) -> Result<()> {
        let queue: Vec<SeqId> = self.waiting.iter().take(self.limits.max_seqs + LOOK).map(|&(_, id)| id).collect();
        let mut passed_over = 0;
        for id in queue {
            // As `split` will deal it out: the first prompt may take what others leave, and these may take half.
            let first = self.prefilling().min_by_key(|&id| self.seq(id).place);
            let (mut all, mut others) = (0, 0);
            for other in self.prefilling() {
                all += self.seq(other).pending();
                others += if Some(other) == first { 0 } else { self.seq(other).pending() };
            }
            let room = all < most || others < most.div_ceil(2);
            if !room || most == 0 || self.running.len() >= self.limits.max_seqs || passed_over >= LOOK {
                break;
            }
            match self.admit(id, backend)? {
                Admit::Yes => {}
                Admit::Later => passed_over += 1,
                Admit::Full => break,
            }
        }
        Ok(())
    }

    /// How much of a sequence may be taken from what is known: not the last token, whose logits are needed; and of the
    /// prompt all or no more than leaves a chunk of [`CHUNK`].
    fn knowable(&self, id: SeqId) -> usize {
        let seq = self.seq(id);
        // What was asked about the prompt's tokens comes out of computing them.
        if !seq.attention.shares() || seq.scored < seq.prompt {
            return 0;
        }
        if seq.tokens.len() > seq.prompt {
            let found = self.tree.find(seq.salt, &seq.tokens[..seq.tokens.len() - 1]);
            if found.nodes.len() * self.limits.page_size + found.tail.map_or(0, |t| t.1) >= seq.prompt {
                return seq.tokens.len() - 1;
            }
        }
        seq.prompt.saturating_sub(CHUNK)
    }

    /// Gives a waiting sequence its pages: known ones, a copy of one that is known in part, and empty ones.
    fn admit(&mut self, id: SeqId, backend: &mut Backend) -> Result<Admit> {
        let page_size = self.limits.page_size;
        let (salt, len) = (self.seq(id).salt, self.limits.most_held(self.seq(id)).min(self.seq(id).tokens.len()));
        let known = self.seq(id).tokens[..self.knowable(id)].to_vec();
        let mut tail = None;
        let mut nodes = Vec::new();
        if self.limits.prefix_cache {
            let whole = self.tree.find(salt, &known).nodes.len() * page_size;
            let mut best = 0;
            for &other in &self.running {
                let seq = self.seq(other);
                if seq.salt != salt {
                    continue;
                }
                let shared = common(&seq.tokens, &known);
                if shared / page_size * page_size > whole.max(seq.computed) {
                    return Ok(Admit::Later); // it is computing what this one needs
                }
                // The page that it is writing, as far as it is written.
                let have = shared.min(seq.computed).saturating_sub(whole).min(page_size);
                if have > best && seq.pages.len() > whole / page_size {
                    best = have;
                    tail = Some((seq.pages[whole / page_size], have));
                }
            }
            match self.load(salt, &known, backend)? {
                Admit::Yes => {}
                other => return Ok(other),
            }
            let found = self.tree.find(salt, &known);
            if found.nodes.len() * page_size != whole {
                tail = None; // a tier had lost a page, or gave one
            }
            if let Some((node, n)) = found.tail
                && n > tail.map_or(0, |(_, n)| n)
                && let Place::Pool(page) = self.tree.place(node)
            {
                tail = Some((page, n));
            }
            nodes = found.nodes;
            let here = |n: &&NodeId| matches!(self.tree.place(**n), Place::Pool(_));
            let resident = nodes.iter().take_while(here).count();
            if resident < nodes.len() {
                nodes.truncate(resident);
                tail = None;
            }
        }
        nodes.iter().for_each(|&n| self.tree.lock(n));
        let need = len.div_ceil(page_size) - nodes.len();
        let reserve = if self.running.is_empty() { 0 } else { self.reserve() };
        if self.available() < need + reserve {
            nodes.iter().rev().for_each(|&n| self.tree.unlock(n));
            return Ok(Admit::Full);
        }
        let mut pages: Vec<u32> = nodes.iter().map(|&n| self.page(n)).collect();
        let mut computed = nodes.len() * page_size;
        for i in 0..need {
            let page = self.alloc(backend)?.expect("as many pages as were counted");
            // The first empty page takes the copy at once: the page copied from is nobody's, and might be the next to go.
            // (If it is the very one that went, what it holds is in place.)
            if let (0, Some((from, n))) = (i, tail) {
                backend.copy_page(from, page, n)?;
                computed += n;
            }
            pages.push(page);
        }
        let seq = self.seq_mut(id);
        (seq.pages, seq.nodes, seq.computed) = (pages, nodes, computed);
        if !std::mem::replace(&mut seq.started, true) {
            seq.cached = computed.min(seq.prompt);
            let (prompt, cached) = (seq.prompt, seq.cached);
            self.counts.queried_tokens += prompt as u64;
            self.counts.hit_tokens += cached as u64;
        }
        let place = self.seq(id).place;
        self.waiting.remove(&(place, id));
        self.running.push(id);
        Ok(Admit::Yes)
    }
}
