//! Which running sequences read a common prefix together: cascade attention's groups, chosen by what they save.

use crate::runner::{Shared, piece_of};

/// Reading a group's prefix apart costs each member a merge of partial results, about as much as so many KV tokens: a state
/// for every 256 tokens is written and read once per query head, and a KV token is read once per KV head.
const MERGE_TOKENS: usize = 32;
/// And a call of the thread pool per layer for their merge, in KV tokens: 20 µs at the most, in which a small model reads 0.6 MB.
const LAUNCH_TOKENS: usize = 768;

/// Finds groups; its lists are kept from step to step.
#[derive(Debug, Default)]
pub(crate) struct Groups {
    /// The order in which sequences stand side by side with those that share most.
    pub order: Vec<usize>,
    /// The groups that save most, in that order.
    pub chosen: Vec<Shared>,
    /// Whether a sequence is in one of them.
    pub grouped: Vec<bool>,
    /// Pages that neighbours in the order share.
    common: Vec<usize>,
    /// The most that runs from here on can save, and the run that begins here for that.
    saved: Vec<(usize, Option<Shared>)>,
}

impl Groups {
    /// Among `count` sequences, each with the whole pages that lie before this step's tokens.
    ///
    /// What a group shares is cut to a multiple of [`piece_of`] tokens, so that sharing changes no bit of its results.
    /// In the order a group is a run. What runs from one sequence on save follows from those after it.
    pub(crate) fn find<'a>(&mut self, count: usize, page_size: usize, past: impl Fn(usize) -> &'a [u32]) {
        let Self { order, chosen, grouped, common, saved } = self;
        let piece = piece_of(page_size);
        order.clear();
        order.extend(0..count);
        order.sort_unstable_by(|&a, &b| past(a).cmp(past(b)).then(a.cmp(&b)));
        let shared = |w: &[usize]| past(w[0]).iter().zip(past(w[1])).take_while(|(a, b)| a == b).count();
        common.clear();
        common.extend(order.windows(2).map(shared));
        chosen.clear();
        grouped.clear();
        grouped.resize(count, false);
        saved.clear();
        saved.resize(count + 1, (0, None));
        for first in (0..count).rev() {
            let mut best = (saved[first + 1].0, None);
            let mut pages = usize::MAX;
            for (end, next) in (first + 2..).zip(&common[first.min(common.len())..]) {
                pages = pages.min(*next);
                if pages == 0 {
                    break;
                }
                let run = Shared { first, count: end - first, len: pages * page_size / piece * piece };
                let together = saving(run) + saved[end].0;
                if together > best.0 {
                    best = (together, Some(run));
                }
            }
            saved[first] = best;
        }
        let mut at = 0;
        while at < count {
            match saved[at].1 {
                Some(run) => {
                    chosen.push(run);
                    order[at..at + run.count].iter().for_each(|&i| grouped[i] = true);
                    at += run.count;
                }
                None => at += 1,
            }
        }
    }
}

/// KV tokens that a group need not read, less what it costs.
fn saving(run: Shared) -> usize {
    ((run.count - 1) * run.len).saturating_sub(run.count * MERGE_TOKENS + LAUNCH_TOKENS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(lists: &[Vec<u32>]) -> (Vec<usize>, Vec<Shared>) {
        let mut groups = Groups::default();
        groups.find(lists.len(), 16, |i| &lists[i][..]);
        (groups.order, groups.chosen)
    }

    #[test]
    fn a_long_prefix_is_one_group_and_short_ones_none() {
        let list = |own: u32| (0..125).chain([1000 + own]).collect::<Vec<u32>>();
        let (_, got) = run(&(0..32).map(list).collect::<Vec<_>>());
        assert_eq!(got, [Shared { first: 0, count: 32, len: 1792 }]);
        assert_eq!(run(&[vec![1, 2], vec![1, 3]]).1, [], "16 tokens are not worth a launch");
        assert_eq!(run(&[]).1, []);
    }

    #[test]
    fn two_families_below_a_short_prefix_are_two_groups() {
        let list = |family: u32, own: u32| [1].into_iter().chain((0..50).map(|i| family + i)).chain([own]).collect();
        let lists: Vec<Vec<u32>> = (0..8).map(|i| list(100 + 100 * (i % 2), 1000 + i)).collect();
        let (order, got) = run(&lists);
        assert_eq!(got.iter().map(|g| (g.count, g.len)).collect::<Vec<_>>(), [(4, 768), (4, 768)]);
        for g in got {
            let first = lists[order[g.first]][1];
            assert!(order[g.first..g.first + g.count].iter().all(|&i| lists[i][1] == first));
        }
    }

    proptest! {
        /// Against all choices of runs, by brute force.
        #[test]
        fn no_other_choice_saves_more(lists in prop::collection::vec(prop::collection::vec(0..2u32, 0..8), 0..7)) {
            // Long pages make up for short lists.
            let lists: Vec<Vec<u32>> =
                lists.iter().map(|l| l.iter().flat_map(|&t| std::iter::repeat_n(t, 16)).collect()).collect();
            let (order, got) = run(&lists);
            let mut sorted = order.clone();
            sorted.sort_unstable();
            prop_assert_eq!(sorted, (0..lists.len()).collect::<Vec<_>>());
            let mut end = 0;
            for g in &got {
                prop_assert!(g.first >= end && g.count > 1 && g.len > 0);
                end = g.first + g.count;
                for w in order[g.first..end].windows(2) {
                    prop_assert_eq!(&lists[w[0]][..g.len / 16], &lists[w[1]][..g.len / 16]);
                }
            }
            prop_assert!(end <= lists.len());
            prop_assert_eq!(got.iter().map(|&g| saving(g)).sum::<usize>(), brute(&order, &lists, 0));
        }
    }

    /// The most that disjoint runs of `order[at..]` can save.
    fn brute(order: &[usize], lists: &[Vec<u32>], at: usize) -> usize {
        if at >= order.len() {
            return 0;
        }
        let mut most = brute(order, lists, at + 1);
        for end in at + 2..=order.len() {
            let first = &lists[order[at]];
            let len = order[at..end]
                .iter()
                .map(|&i| lists[i].iter().zip(first).take_while(|(a, b)| a == b).count())
                .min()
                .expect("two");
            let gain = saving(Shared { first: at, count: end - at, len: len / 16 * 256 });
            most = most.max(gain + brute(order, lists, end));
        }
        most
    }
}
