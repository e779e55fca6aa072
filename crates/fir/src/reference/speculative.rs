//! Verification of drafted tokens, request by request.

use super::sampling::inverse_cdf;

/// A verified request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Accepted drafts: the tokens of a chain, the nodes of a tree.
    pub path: Vec<usize>,
    /// Drafts of a chain that pass by themselves.
    pub accepted: usize,
    /// The token after the path; `None` if it would be drawn from what is no distribution.
    pub next: Option<usize>,
}

/// Verifies a chain of `drafts` with distributions `p[i]` and `q[i]`, taking uniforms in order: draft `i` passes if
/// `u · p[i][x] < q[i][x]`; the first that does not ends the path. It and those after it are tried once more, for
/// the count alone. The token after is drawn from `max(q - p, 0)`, or from `q` at the end or where that is nothing.
pub fn chain(drafts: &[usize], p: &[Vec<f64>], q: &[Vec<f64>], mut uniform: impl FnMut() -> f64) -> Verdict {
    let mut n = 0;
    while n < drafts.len() && uniform() * p[n][drafts[n]] < q[n][drafts[n]] {
        n += 1;
    }
    let accepted = n + (n..drafts.len()).filter(|&i| uniform() * p[i][drafts[i]] < q[i][drafts[i]]).count();
    let mut left = q[n].clone();
    if n < drafts.len() {
        left.iter_mut().zip(&p[n]).for_each(|(q, p)| *q = if *q < *p { 0.0 } else { *q - *p });
        if left.iter().all(|&x| x == 0.0) {
            left.clone_from(&q[n]);
        }
    }
    Verdict { path: drafts[..n].to_vec(), accepted, next: inverse_cdf(&left, uniform()) }
}

/// A request's tree: a node's token, its first child and its next sibling (-1 for none). Node 0 is the root.
#[derive(Clone, Debug)]
pub struct Tree {
    /// Token of each node.
    pub tokens: Vec<i64>,
    /// First child of each node.
    pub child: Vec<i64>,
    /// Next sibling of each node.
    pub sibling: Vec<i64>,
}

impl Tree {
    fn children(&self, node: usize) -> Vec<usize> {
        let mut found = Vec::new();
        let mut next = self.child[node];
        while next >= 0 {
            found.push(next as usize);
            next = self.sibling[next as usize];
        }
        found
    }
}

/// Verifies a tree against the distributions `q[node]`. At each node its children are tried in order: one is accepted
/// if the node's coin is less than the sum of `q` at the tokens tried so far, divided by `acc`, or if `q` at its token is
/// `single` or more. The token after the path is drawn by `last` from `q` without the tokens tried in vain.
pub fn tree(tree: &Tree, q: &[Vec<f64>], depth: usize, single: f64, acc: f64, coins: &[f64], last: f64) -> Verdict {
    let mut path = Vec::new();
    let mut node = 0;
    loop {
        let mut left = q[node].clone();
        let mut sum = 0.0;
        let mut accepted = None;
        if path.len() + 1 < depth {
            for child in tree.children(node) {
                let token = tree.tokens[child] as usize;
                sum += q[node][token];
                if coins[node] < sum / acc.max(1e-9f32.into()) || q[node][token] >= single {
                    accepted = Some(child);
                    break;
                }
                left[token] = 0.0;
            }
        }
        match accepted {
            Some(child) => {
                path.push(child);
                node = child;
            }
            None => {
                let left = if left.iter().all(|&x| x == 0.0) { &q[node] } else { &left };
                return Verdict { accepted: path.len(), path, next: inverse_cdf(left, last) };
            }
        }
    }
}

/// Verifies a tree against one token per node: the first child with the node's target token is accepted.
pub fn greedy(tree: &Tree, target: &[i64], depth: usize) -> Verdict {
    let mut path = Vec::new();
    let mut node = 0;
    while path.len() + 1 < depth {
        let Some(child) = tree.children(node).into_iter().find(|&c| tree.tokens[c] == target[node]) else { break };
        path.push(child);
        node = child;
    }
    Verdict { accepted: path.len(), path, next: Some(target[node] as usize) }
}
