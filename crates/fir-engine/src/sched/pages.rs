//! Who has which pages: sequences take them, the tree keeps what they leave, tiers what the tree cannot.

use super::{Admit, Branch, Scheduler, SeqId};
use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::kv::radix::{NodeId, Place};
use crate::kv::tier::{Fetch, Tier};

/// Admission leaves each running sequence room for so many tokens, so that it need not be cut off soon after.
const ROOM: usize = 64;
/// Pages asked of a tier ahead of the one that is waited for.
const AHEAD: usize = 8;

impl Scheduler {
    /// Brings back from the tiers what is known of `tokens`.
    pub(super) fn load(&mut self, salt: u64, tokens: &[u32], backend: &mut Backend) -> Result<Admit> {
        if self.tier.is_none() {
            return Ok(Admit::Yes);
        }
        let found = self.tree.find(salt, tokens);
        let path: Vec<NodeId> = found.nodes.iter().copied().chain(found.tail.map(|t| t.0)).collect();
        let mut held = Vec::new();
        let mut result = Admit::Yes;
        for (i, &node) in path.iter().enumerate() {
            if let Place::Tier(key) = self.tree.place(node) {
                if self.available() == 0 {
                    result = Admit::Full;
                    break;
                }
                let Some(tier) = &mut self.tier else { break };
                match tier.take(key) {
                    Fetch::Ready(bytes) => {
                        let page = self.alloc(backend)?.expect("a page was available");
                        backend.write_page(page, &bytes)?;
                        self.tree.restore(node, page);
                        self.counts.restored_tokens += self.limits.page_size as u64;
                    }
                    Fetch::Pending => {
                        for &next in path[i + 1..].iter().take(AHEAD) {
                            if let Place::Tier(key) = self.tree.place(next) {
                                tier.prefetch(key);
                            }
                        }
                        result = Admit::Later;
                        break;
                    }
                    Fetch::Missing => {
                        self.forget(key);
                        break;
                    }
                }
            }
            self.tree.lock(node);
            held.push(node);
        }
        held.iter().rev().for_each(|&n| self.tree.unlock(n));
        Ok(result)
    }

    /// Pages for `len` tokens of nobody's.
    pub(crate) fn borrow_pages(&mut self, len: usize, backend: &mut Backend) -> Result<Vec<u32>> {
        let need = len.div_ceil(self.limits.page_size);
        if need + self.reserve() > self.available() {
            let tokens = self.waiting.iter().map(|&(_, id)| self.seq(id).prompt).sum();
            return Err(Error::Busy { waiting: self.waiting.len(), tokens });
        }
        let mut pages = Vec::with_capacity(need);
        while pages.len() < need {
            pages.extend(self.alloc(backend)?);
        }
        Ok(pages)
    }

    pub(crate) fn return_pages(&mut self, pages: Vec<u32>) {
        pages.into_iter().for_each(|page| self.pool.free(page));
    }

    /// Forgets prefixes that nobody holds, wherever they lie; returns how many pages came free.
    pub(crate) fn forget_prefixes(&mut self) -> usize {
        let (mut gone, mut pages) = (Vec::new(), 0);
        while let Some(page) = self.tree.evict(None, &mut gone) {
            self.pool.free(page);
            pages += 1;
        }
        // What is left in a tier lies below a page that somebody holds.
        self.tree.forget_tiers(&mut gone);
        self.discard(&gone);
        pages
    }

    pub(super) fn available(&self) -> usize {
        self.pool.available() + self.tree.evictable()
    }

    /// Pages that running sequences will soon want.
    pub(super) fn reserve(&self) -> usize {
        let more = |&id: &SeqId| {
            let seq = self.seq(id);
            let len = (seq.tokens.len() + ROOM).min(seq.max_len) - seq.dropped;
            let len = len.min(self.limits.most_held(seq));
            len.div_ceil(self.limits.page_size).saturating_sub(seq.pages.len())
        };
        self.running.iter().map(more).sum()
    }

    pub(super) fn page(&self, node: NodeId) -> u32 {
        match self.tree.place(node) {
            Place::Pool(page) => page,
            Place::Tier(_) => unreachable!("a node that is held is in the pool"),
        }
    }

    pub(super) fn alloc(&mut self, backend: &mut Backend) -> Result<Option<u32>> {
        if let Some(page) = self.pool.alloc() {
            return Ok(Some(page));
        }
        let Some(coldest) = self.tree.coldest() else { return Ok(None) };
        let bytes = backend.page_bytes();
        let key = self.tier.as_mut().and_then(|t| t.reserve(bytes));
        if let (Some(key), Some(tier)) = (key, &mut self.tier) {
            let mut page = vec![0; bytes];
            backend.read_page(coldest, &mut page)?;
            tier.put(key, page);
        }
        let mut gone = Vec::new();
        let page = self.tree.evict(key, &mut gone);
        self.discard(&gone);
        self.counts.evictions += 1;
        Ok(page)
    }

    /// Gives the tree the pages that are whole now.
    pub(super) fn publish(&mut self, id: SeqId) {
        if !self.limits.prefix_cache || !self.seq(id).attention.shares() {
            return;
        }
        let page_size = self.limits.page_size;
        let mut seq = self.seqs[id].take().expect("a sequence that is here");
        for at in seq.nodes.len()..seq.computed / page_size {
            let tokens = &seq.tokens[at * page_size..][..page_size];
            let got = self.tree.insert(seq.salt, seq.nodes.last().copied(), tokens, seq.pages[at]);
            if !got.taken {
                // Another computed the same at the same time; one is enough.
                self.pool.free(seq.pages[at]);
                seq.pages[at] = self.page(got.node);
            }
            self.tree.lock(got.node);
            seq.nodes.push(got.node);
            self.freed(got.freed);
        }
        self.seqs[id] = Some(seq);
    }

    /// Gives all pages of a sequence to the tree, or back to the pool.
    pub(super) fn release(&mut self, id: SeqId) {
        self.publish(id);
        let page_size = self.limits.page_size;
        let mut seq = self.seqs[id].take().expect("a sequence that is here");
        for at in seq.nodes.len()..seq.pages.len() {
            let written = seq.computed.saturating_sub(at * page_size).min(page_size);
            let mut taken = false;
            if written > 0 && self.limits.prefix_cache && seq.attention.shares() {
                let tokens = &seq.tokens[at * page_size..][..written];
                let got = self.tree.insert(seq.salt, seq.nodes.last().copied(), tokens, seq.pages[at]);
                taken = got.taken;
                self.freed(got.freed);
            }
            if !taken {
                self.pool.free(seq.pages[at]);
            }
        }
        seq.nodes.drain(..).rev().for_each(|n| self.tree.unlock(n));
        seq.pages.clear();
        (seq.computed, seq.dropped) = (0, 0);
        self.seqs[id] = Some(seq);
    }

    /// Gives a sequence's branch its pages, if there are any that nobody else will soon want; else there is no branch.
    pub(super) fn grow_branch(&mut self, id: SeqId, backend: &mut Backend) -> Result<()> {
        let page_size = self.limits.page_size;
        let seq = self.seq(id);
        let (held, more) = (seq.held(), seq.branch.tokens.len());
        if more == 0 {
            return Ok(());
        }
        let common = held / page_size;
        let need = (held + 1 + more).div_ceil(page_size) - common;
        if self.available() < self.reserve() + need {
            self.seq_mut(id).branch = Branch::default();
            return Ok(());
        }
        let mut pages = Vec::with_capacity(need);
        while pages.len() < need {
            match self.alloc(backend)? {
                Some(page) => pages.push(page),
                None => {
                    self.return_pages(pages);
                    self.seq_mut(id).branch = Branch::default();
                    return Ok(());
                }
            }
        }
        if !held.is_multiple_of(page_size) {
            backend.copy_page(self.seq(id).pages[common], pages[0], held % page_size)?;
        }
        let seq = self.seq_mut(id);
        seq.branch.all = seq.pages[..common].iter().chain(&pages).copied().collect();
        seq.branch.pages = pages;
        Ok(())
    }

    /// Its branch was the right one: what it wrote is the sequence's.
    pub(crate) fn take_branch(&mut self, id: SeqId) {
        let page_size = self.limits.page_size;
        let seq = self.seq_mut(id);
        let common = seq.held() / page_size;
        let own = seq.pages.split_off(common);
        let branch = std::mem::take(&mut seq.branch);
        seq.pages.extend(branch.pages);
        self.return_pages(own);
    }

    /// Gives up a sequence's branch.
    pub(crate) fn cut_branch(&mut self, id: SeqId) {
        let branch = std::mem::take(&mut self.seq_mut(id).branch);
        self.return_pages(branch.pages);
    }

    fn freed(&mut self, place: Option<Place>) {
        match place {
            Some(Place::Pool(page)) => self.pool.free(page),
            Some(Place::Tier(key)) => self.discard(&[key]),
            None => {}
        }
    }

    pub(super) fn forget_lost(&mut self) {
        let lost = self.tier.as_mut().map(Tier::lost).unwrap_or_default();
        lost.into_iter().for_each(|key| self.forget(key));
    }

    fn forget(&mut self, key: u64) {
        let mut gone = Vec::new();
        self.tree.forget(key, &mut gone);
        self.discard(&gone);
    }

    fn discard(&mut self, keys: &[u64]) {
        if let Some(tier) = &mut self.tier {
            keys.iter().for_each(|&key| tier.discard(key));
        }
    }
}
