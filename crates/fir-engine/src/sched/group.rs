//! Which running sequences read a common prefix together: cascade attention's groups, chosen by what they save.

use crate::runner::{Shared, piece_of};

/// Reading a group's prefix apart costs each member a merge of partial results, about as much as so many KV tokens: a state
/// for every 256 tokens is written and read once per query head, and a KV token is read once per KV head.
const MERGE_TOKENS: usize = 32;
/// And launches per layer for the pieces and their merge, in KV tokens: 20 µs, in which a small model reads 0.6 MB.
const LAUNCH_TOKENS: usize = 768;

/// A sequence's pages that lie before this step's tokens.
pub(crate) struct Member<'a> {
    pub pages: &'a [u32],
    /// Whole pages of the past.
    pub whole: usize,
}

/// The order in which sequences stand side by side with those that share most, and the groups that save most.
///
/// What a group shares is cut to a multiple of [`piece_of`] tokens, so that sharing changes no bit of its results.
/// In that order a group is a run. `saved[i]` is the most that runs from `i` on can save; it follows from those after it.
pub(crate) fn groups(members: &[Member<'_>], page_size: usize) -> (Vec<usize>, Vec<Shared>) {
    let piece = piece_of(page_size);
    let past = |i: usize| &members[i].pages[..members[i].whole];
    let mut order: Vec<usize> = (0..members.len()).collect();
    order.sort_by(|&a, &b| past(a).cmp(past(b)));
    let common = |w: &[usize]| past(w[0]).iter().zip(past(w[1])).take_while(|(a, b)| a == b).count();
    let shared: Vec<usize> = order.windows(2).map(common).collect();
    let mut saved = vec![0; order.len() + 1];
    let mut group = vec![None; order.len()];
    for first in (0..order.len()).rev() {
        saved[first] = saved[first + 1];
        let mut pages = usize::MAX;
        for (end, next) in (first + 2..).zip(&shared[first.min(shared.len())..]) {
            pages = pages.min(*next);
            if pages == 0 {
                break;
            }
            let run = Shared { first, count: end - first, len: pages * page_size / piece * piece };
            let together = saving(run) + saved[end];
            if together > saved[first] {
                saved[first] = together;
                group[first] = Some(run);
            }
        }
    }
    let mut chosen = Vec::new();
    let mut at = 0;
    while at < order.len() {
        match group[at] {
            Some(run) => {
                chosen.push(run);
                at += run.count;
            }
            None => at += 1,
        }
    }
    (order, chosen)
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
        let members: Vec<_> = lists.iter().map(|p| Member { pages: p, whole: p.len() }).collect();
        groups(&members, 16)
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
