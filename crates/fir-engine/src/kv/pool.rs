//! The free pages of the KV cache.

/// Page ids `0..pages`, each either free or in use; taking and giving back one is a push or a pop.
#[derive(Debug)]
pub(crate) struct Pool {
    free: Vec<u32>,
    used: Vec<bool>,
}

impl Pool {
    pub(crate) fn new(pages: u32) -> Self {
        // Low ids come first, so that a lightly loaded pool stays in few memory pages.
        Self { free: (0..pages).rev().collect(), used: vec![false; pages as usize] }
    }

    pub(crate) fn alloc(&mut self) -> Option<u32> {
        let page = self.free.pop()?;
        self.used[page as usize] = true;
        Some(page)
    }

    /// Gives `page` back. A page that is free already would be handed out twice: it is refused.
    pub(crate) fn free(&mut self, page: u32) {
        assert!(std::mem::take(&mut self.used[page as usize]), "page {page} is freed twice");
        self.free.push(page);
    }

    pub(crate) fn pages(&self) -> usize {
        self.used.len()
    }

    pub(crate) fn available(&self) -> usize {
        self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    proptest! {
        #[test]
        fn hands_out_each_page_once(ops in prop::collection::vec(any::<Option<u8>>(), 0..200)) {
            let mut pool = Pool::new(16);
            let mut held = Vec::new();
            for op in ops {
                match op {
                    None => match pool.alloc() {
                        Some(page) => held.push(page),
                        None => prop_assert_eq!(held.len(), 16),
                    },
                    Some(i) if !held.is_empty() => pool.free(held.swap_remove(i as usize % held.len())),
                    Some(_) => {}
                }
                prop_assert_eq!(held.iter().collect::<HashSet<_>>().len(), held.len());
                prop_assert_eq!(pool.available() + held.len(), pool.pages());
            }
        }
    }

    #[test]
    #[should_panic(expected = "page 3 is freed twice")]
    fn refuses_a_page_that_is_free() {
        Pool::new(4).free(3);
    }
}
