//! What the engine runs on: a model with its pages, or in tests a toy whose tokens are a function of what it reads back
//! through the page tables, so that a wrong page shows in the text.

use std::sync::Arc;

use crate::error::Result;
use crate::handle::Refused;
use crate::models::Model;
use crate::runner::{Batch, KvCache, Runner};
use crate::tokenizer::Detokenizer;
#[cfg(test)]
pub(crate) use toy::Toy;

/// A model, its pages and the buffers of its steps.
pub(crate) struct Running {
    pub model: Arc<Model>,
    pub kv: KvCache,
    pub runner: Runner,
}

pub(crate) enum Backend {
    Model(Box<Running>),
    #[cfg(test)]
    Toy(Toy),
}

impl Backend {
    /// Runs one step; logits are `[rows, vocab]`.
    pub(crate) fn step(&mut self, batch: &Batch<'_>) -> Result<&mut [f32]> {
        match self {
            Self::Model(m) => m.runner.step(m.model.exec(), &m.model, &mut m.kv, batch),
            #[cfg(test)]
            Self::Toy(toy) => toy.step(batch),
        }
    }

    /// Runs one step for the final states of all its tokens, `[tokens, width]`, and returns the width with them.
    pub(crate) fn hidden(&mut self, batch: &Batch<'_>) -> Result<(usize, &[f32])> {
        match self {
            Self::Model(m) => {
                let width = m.model.config().hidden;
                Ok((width, m.runner.hidden(m.model.exec(), &m.model, &mut m.kv, batch)?))
            }
            #[cfg(test)]
            Self::Toy(toy) => toy.hidden(batch),
        }
    }

    /// What the model cannot do.
    pub(crate) fn refused(&self) -> Refused {
        match self {
            Self::Model(m) => {
                let c = m.model.config();
                let simple = c.mla.is_none() && c.windows.iter().all(Option::is_none);
                let why = || format!("{} has a window or latent attention, and attends as it does", c.arch);
                Refused { streaming: m.runner.cannot_stream(), sparse: (!simple).then(why) }
            }
            #[cfg(test)]
            Self::Toy(_) => Refused::default(),
        }
    }

    pub(crate) fn vocab(&self) -> usize {
        match self {
            Self::Model(m) => m.model.config().vocab,
            #[cfg(test)]
            Self::Toy(toy) => toy.vocab,
        }
    }

    /// The text that is certain with this token.
    pub(crate) fn text(&self, so_far: &mut Detokenizer, id: u32) -> String {
        match self {
            Self::Model(m) => so_far.push(m.model.tokenizer(), id),
            #[cfg(test)]
            Self::Toy(_) => char::from(id as u8 % 26 + b'a').to_string(),
        }
    }

    pub(crate) fn page_bytes(&self) -> usize {
        match self {
            Self::Model(m) => m.kv.page_bytes(),
            #[cfg(test)]
            Self::Toy(toy) => toy.page_size * 4,
        }
    }

    pub(crate) fn copy_page(&mut self, from: u32, to: u32, tokens: usize) -> Result<()> {
        match self {
            Self::Model(m) => m.kv.copy_page(from, to, tokens),
            #[cfg(test)]
            Self::Toy(toy) => toy.copy_page(from, to, tokens),
        }
    }

    pub(crate) fn read_page(&self, page: u32, to: &mut [u8]) -> Result<()> {
        match self {
            Self::Model(m) => m.kv.read_page(page, to),
            #[cfg(test)]
            Self::Toy(toy) => toy.read_page(page, to),
        }
    }

    pub(crate) fn write_page(&mut self, page: u32, from: &[u8]) -> Result<()> {
        match self {
            Self::Model(m) => m.kv.write_page(page, from),
            #[cfg(test)]
            Self::Toy(toy) => toy.write_page(page, from),
        }
    }
}

#[cfg(test)]
mod toy {
    use crate::error::{Error, Result};
    use crate::runner::{Batch, Shared};

    /// Its "KV" of a token is the token; its logits are a hash of all tokens up to a row, as pages have them.
    pub(crate) struct Toy {
        pub page_size: usize,
        pub vocab: usize,
        cache: Vec<u32>,
        logits: Vec<f32>,
        /// Steps after which `step` fails or panics.
        pub fail_at: Option<(u64, bool)>,
        /// All new tokens, over all steps.
        pub computed: usize,
        pub steps: u64,
        /// Groups of more than one sequence that were read together.
        pub groups: u64,
        /// Takes this long for a step and for each token.
        pub pace: std::time::Duration,
    }

    impl Toy {
        pub(crate) fn new(pages: usize, page_size: usize, vocab: usize) -> Self {
            Self {
                page_size,
                vocab,
                cache: vec![u32::MAX; pages * page_size],
                logits: Vec::new(),
                fail_at: None,
                computed: 0,
                steps: 0,
                groups: 0,
                pace: std::time::Duration::ZERO,
            }
        }

        fn slot(&self, pages: &[u32], at: usize) -> usize {
            pages[at / self.page_size] as usize * self.page_size + at % self.page_size
        }

        pub(super) fn step(&mut self, batch: &Batch<'_>) -> Result<&mut [f32]> {
            self.steps += 1;
            if let Some((step, panics)) = self.fail_at
                && self.steps == step
            {
                assert!(!panics, "the toy panics");
                return Err(Error::Config("the toy fails".into()));
            }
            for &Shared { first, count, len } in batch.shared {
                let group = &batch.seqs[first..first + count];
                assert!(len.is_multiple_of(self.page_size) && count > 1, "{first} {count} {len}");
                for seq in group {
                    assert!(seq.past >= len);
                    assert_eq!(seq.pages[..len / self.page_size], group[0].pages[..len / self.page_size]);
                }
                self.groups += 1;
            }
            self.logits.clear();
            let mut row = 0;
            let mut wanted = batch.logits.iter().peekable();
            for seq in batch.seqs {
                for (i, &token) in batch.tokens[row..row + seq.new].iter().enumerate() {
                    let slot = self.slot(seq.pages, seq.past + i);
                    self.cache[slot] = token;
                }
                for i in 0..seq.new {
                    if wanted.next_if(|&&w| w as usize == row + i).is_some() {
                        let hash = (0..=seq.past + i).fold(0xcbf2_9ce4_8422_2325u64, |h, at| {
                            let token = self.cache[self.slot(seq.pages, at)];
                            (h ^ u64::from(token)).wrapping_mul(0x0100_0000_01b3).rotate_left(23)
                        });
                        let logit = |v: u64| {
                            let x = (hash ^ v.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xff51_afd7_ed55_8ccd);
                            ((x >> 40) as f32) / 4e6
                        };
                        self.logits.extend((0..self.vocab as u64).map(logit));
                    }
                }
                row += seq.new;
            }
            assert!(row == batch.tokens.len() && wanted.next().is_none(), "a batch that does not add up");
            self.computed += row;
            if !self.pace.is_zero() {
                std::thread::sleep(self.pace * (10 + row as u32));
            }
            Ok(&mut self.logits)
        }

        /// A token's state is itself, twice.
        pub(super) fn hidden(&mut self, batch: &Batch<'_>) -> Result<(usize, &[f32])> {
            let all = Batch { logits: &[], ..*batch };
            self.step(&all)?;
            self.logits = batch.tokens.iter().flat_map(|&t| [t as f32; 2]).collect();
            Ok((2, &self.logits))
        }

        pub(super) fn copy_page(&mut self, from: u32, to: u32, tokens: usize) -> Result<()> {
            let (from, to) = (from as usize * self.page_size, to as usize * self.page_size);
            self.cache.copy_within(from..from + tokens, to);
            Ok(())
        }

        pub(super) fn read_page(&self, page: u32, to: &mut [u8]) -> Result<()> {
            let from = &self.cache[page as usize * self.page_size..][..self.page_size];
            for (to, from) in to.chunks_exact_mut(4).zip(from) {
                to.copy_from_slice(&from.to_le_bytes());
            }
            Ok(())
        }

        pub(super) fn write_page(&mut self, page: u32, from: &[u8]) -> Result<()> {
            let to = &mut self.cache[page as usize * self.page_size..][..self.page_size];
            for (to, from) in to.iter_mut().zip(from.chunks_exact(4)) {
                *to = u32::from_le_bytes(from.try_into().expect("four bytes"));
            }
            Ok(())
        }
    }
}
