//! The prefix tree: which token sequences have their KV in pages, here or in a tier.
//!
//! A node is one page: up to `page_size` tokens after its parent's. Nodes with fewer tokens are leaves; their page can
//! be copied, never extended. Children are ordered by their tokens, so a lookup compares tokens and no hash, and the
//! child that shares most with a given text is a neighbour of the place where that text would stand.
//!
//! Each salt has a root of its own: requests of different salts share nothing and cannot time each other's prefixes.
//!
//! Laws, which `check` states and the property test holds against a list of sequences:
//!
//! * the nodes in the pool are closed upwards: a node's parent is in the pool if it is;
//! * locks grow upwards: whoever holds a node holds its ancestors, so that all unlocked nodes can be evicted;
//! * `lru` holds exactly the unlocked nodes in the pool without children there.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Bound;

/// Index of a node; reused after the node is gone.
pub(crate) type NodeId = usize;

/// Where a node's KV is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// A page of the pool.
    Pool(u32),
    /// A tier's entry of this key.
    Tier(u64),
}

#[derive(Debug)]
struct Node {
    tokens: Box<[u32]>,
    place: Place,
    parent: NodeId,
    children: Children,
    /// Children in the pool.
    resident: usize,
    locks: usize,
    used: u64,
}

/// What is known of a text.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Match {
    /// Nodes of whole pages from the start.
    pub nodes: Vec<NodeId>,
    /// A node whose first tokens continue them, and how many.
    pub tail: Option<(NodeId, usize)>,
}

#[derive(Debug)]
pub(crate) struct Tree {
    page_size: usize,
    nodes: Vec<Option<Node>>,
    vacant: Vec<NodeId>,
    roots: HashMap<u64, NodeId>,
    lru: BTreeSet<(u64, NodeId)>,
    clock: u64,
    resident: usize,
    evictable: usize,
    keys: HashMap<u64, NodeId>,
}

impl Tree {
    pub(crate) fn new(page_size: usize) -> Self {
        Self {
            page_size,
            nodes: Vec::new(),
            vacant: Vec::new(),
            roots: HashMap::new(),
            lru: BTreeSet::new(),
            clock: 0,
            resident: 0,
            evictable: 0,
            keys: HashMap::new(),
        }
    }

    /// Room for as many nodes as a pool of so many pages can have, and their roots, so that its list need not move.
    pub(crate) fn with_room(mut self, pages: usize) -> Self {
        self.nodes.reserve(pages + 64);
        self.vacant.reserve(pages + 64);
        self
    }

    /// Pages of the pool that belong to nodes.
    #[cfg(test)]
    pub(crate) fn resident(&self) -> usize {
        self.resident
    }

    /// Pages of the pool that `evict` can give, one after the other.
    pub(crate) fn evictable(&self) -> usize {
        self.evictable
    }

    pub(crate) fn place(&self, id: NodeId) -> Place {
        self.node(id).place
    }

    /// The longest known prefix of `tokens`.
    pub(crate) fn find(&self, salt: u64, tokens: &[u32]) -> Match {
        let mut found = Match::default();
        let Some(&root) = self.roots.get(&salt) else { return found };
        let (mut at, mut rest) = (root, tokens);
        while let Some((page, after)) = rest.split_at_checked(self.page_size) {
            let Some(&child) = self.node(at).children.get(page) else { break };
            found.nodes.push(child);
            (at, rest) = (child, after);
        }
        let shared = |(key, id): (&[u32], NodeId)| (common(key, rest), id);
        let children = &self.node(at).children;
        let shorter = before(children, rest).map(shared);
        let longer = at_or_after(children, rest).map(shared);
        let near = shorter.into_iter().chain(longer).filter(|&(n, _)| n > 0);
        found.tail = near.max_by_key(|&(n, _)| n).map(|(n, id)| (id, n));
        found
    }

    /// Holds a node of the pool: it is not evicted until `unlock`. Its parent must be held.
    pub(crate) fn lock(&mut self, id: NodeId) {
        self.clock += 1;
        let clock = self.clock;
        let node = self.node_mut(id);
        debug_assert!(matches!(node.place, Place::Pool(_)));
        node.locks += 1;
        let (first, used) = (node.locks == 1, node.used);
        node.used = clock;
        if first {
            self.evictable -= 1;
            self.lru.remove(&(used, id));
        }
    }

    /// Lets go of a node. Children are let go of before their parents.
    pub(crate) fn unlock(&mut self, id: NodeId) {
        self.clock += 1;
        let clock = self.clock;
        let node = self.node_mut(id);
        node.locks -= 1;
        node.used = clock;
        if node.locks == 0 {
            let leaf = node.resident == 0;
            self.evictable += 1;
            if leaf {
                self.lru.insert((clock, id));
            }
        }
    }

    /// Makes `page` the KV of `tokens` (a page of them, or fewer) after `parent`, or after the root of `salt`.
    ///
    /// Returns the node that has these tokens and whether it took the page: if not, the page stays the caller's.
    /// Fewer tokens than a page are not taken when a longer node has them; a shorter leaf that they continue goes, and
    /// what it held is returned as `freed`.
    pub(crate) fn insert(&mut self, salt: u64, parent: Option<NodeId>, tokens: &[u32], page: u32) -> Inserted {
        debug_assert!((1..=self.page_size).contains(&tokens.len()));
        let parent = parent.unwrap_or_else(|| self.root(salt));
        if let Some(&id) = self.node(parent).children.get(tokens) {
            let taken = matches!(self.node(id).place, Place::Tier(_));
            // Computed anew while a tier has it: the page is at hand, and the tier's copy need not be read.
            let freed = taken.then(|| self.restore(id, page));
            return Inserted { node: id, taken, freed: freed.flatten().map(Place::Tier) };
        }
        if tokens.len() < self.page_size
            && let Some((key, id)) = at_or_after(&self.node(parent).children, tokens)
            && key.starts_with(tokens)
        {
            return Inserted { node: id, taken: false, freed: None };
        }
        let shorter = before(&self.node(parent).children, tokens);
        let shorter = shorter.filter(|(key, _)| tokens.starts_with(key)).map(|(_, id)| id);
        self.clock += 1;
        let node = Node {
            tokens: tokens.into(),
            place: Place::Pool(page),
            parent,
            children: BTreeMap::new(),
            resident: 0,
            locks: 0,
            used: self.clock,
        };
        let id = self.add(node);
        self.node_mut(parent).children.insert(tokens.into(), id);
        self.became_resident(id);
        // Last, as a root without children would go.
        let freed = shorter.map(|id| {
            let place = self.node(id).place;
            self.detach(id);
            place
        });
        Inserted { node: id, taken: true, freed }
    }

    /// Takes the least recently used page that nobody holds. With a `key` the node stays, as an entry of the tier;
    /// without one it goes, and with it what tiers have below it, which `gone` receives.
    pub(crate) fn evict(&mut self, key: Option<u64>, gone: &mut Vec<u64>) -> Option<u32> {
        let &(_, id) = self.lru.first()?;
        let Place::Pool(page) = self.node(id).place else { unreachable!("lru holds nodes of the pool") };
        self.left_pool(id);
        match key {
            Some(key) => {
                self.node_mut(id).place = Place::Tier(key);
                self.keys.insert(key, id);
            }
            None => self.drop_subtree(id, gone),
        }
        Some(page)
    }

    /// The page that `evict` would take next.
    pub(crate) fn coldest(&self) -> Option<u32> {
        self.lru.first().map(|&(_, id)| match self.node(id).place {
            Place::Pool(page) => page,
            Place::Tier(_) => unreachable!("lru holds nodes of the pool"),
        })
    }

    /// Makes `page` the place of a node whose KV a tier had; returns the tier's key. Its parent must be in the pool.
    pub(crate) fn restore(&mut self, id: NodeId, page: u32) -> Option<u64> {
        let Place::Tier(key) = self.node(id).place else { return None };
        self.keys.remove(&key);
        self.node_mut(id).place = Place::Pool(page);
        self.became_resident(id);
        Some(key)
    }

    /// Forgets the tier's entry `key`, and what is below it, whose keys `gone` receives.
    pub(crate) fn forget(&mut self, key: u64, gone: &mut Vec<u64>) {
        if let Some(&id) = self.keys.get(&key) {
            self.drop_subtree(id, gone);
        }
    }

    /// Forgets everything that lies in a tier; `gone` receives the keys.
    pub(crate) fn forget_tiers(&mut self, gone: &mut Vec<u64>) {
        while let Some(&id) = self.keys.values().next() {
            self.drop_subtree(id, gone);
        }
    }

    fn node(&self, id: NodeId) -> &Node {
        self.nodes[id].as_ref().expect("a node that is in the tree")
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node {
        self.nodes[id].as_mut().expect("a node that is in the tree")
    }

    fn add(&mut self, node: Node) -> NodeId {
        match self.vacant.pop() {
            Some(id) => {
                self.nodes[id] = Some(node);
                id
            }
            None => {
                self.nodes.push(Some(node));
                self.nodes.len() - 1
            }
        }
    }

    fn root(&mut self, salt: u64) -> NodeId {
        if let Some(&id) = self.roots.get(&salt) {
            return id;
        }
        // A root has no page; its lock is never let go of, and its salt stands where other nodes have a parent.
        let root = Node {
            tokens: Box::default(),
            place: Place::Tier(salt),
            parent: NodeId::MAX,
            children: BTreeMap::new(),
            resident: 0,
            locks: 1,
            used: 0,
        };
        let id = self.add(root);
        self.roots.insert(salt, id);
        id
    }

    fn became_resident(&mut self, id: NodeId) {
        self.resident += 1;
        self.evictable += 1;
        let (parent, used) = (self.node(id).parent, self.node(id).used);
        self.lru.insert((used, id));
        let parent_node = self.node_mut(parent);
        parent_node.resident += 1;
        let used = parent_node.used;
        self.lru.remove(&(used, parent));
    }

    /// Bookkeeping for an unlocked node without resident children whose page is taken.
    fn left_pool(&mut self, id: NodeId) {
        let (parent, used) = (self.node(id).parent, self.node(id).used);
        self.lru.remove(&(used, id));
        self.resident -= 1;
        self.evictable -= 1;
        let node = self.node_mut(parent);
        node.resident -= 1;
        if node.resident == 0 && node.locks == 0 {
            let used = node.used;
            self.lru.insert((used, parent));
        }
    }

    /// Removes a leaf that nobody holds.
    fn detach(&mut self, id: NodeId) {
        if matches!(self.node(id).place, Place::Pool(_)) {
            self.left_pool(id);
        }
        self.drop_subtree(id, &mut Vec::new());
    }

    /// Removes a node that has left the pool, and all below it.
    fn drop_subtree(&mut self, id: NodeId, gone: &mut Vec<u64>) {
        let parent = self.node(id).parent;
        let tokens = std::mem::take(&mut self.node_mut(id).tokens);
        self.node_mut(parent).children.remove(&tokens);
        let mut stack = vec![id];
        while let Some(id) = stack.pop() {
            let node = self.nodes[id].take().expect("a node that is in the tree");
            self.vacant.push(id);
            stack.extend(node.children.values());
            if let Place::Tier(key) = node.place
                && self.keys.remove(&key).is_some()
            {
                gone.push(key);
            }
        }
        // A root that nothing hangs on goes: salts come and go.
        let root = self.node(parent);
        if root.parent == NodeId::MAX
            && root.children.is_empty()
            && let Place::Tier(salt) = root.place
        {
            self.roots.remove(&salt);
            self.nodes[parent] = None;
            self.vacant.push(parent);
        }
    }
}

/// What became of a page that was offered to the tree.
#[derive(Debug)]
pub(crate) struct Inserted {
    /// The node that has the tokens (or more).
    pub node: NodeId,
    /// The page is the node's now.
    pub taken: bool,
    /// What a node that went, or the node's former place, held.
    pub freed: Option<Place>,
}

type Children = BTreeMap<Box<[u32]>, NodeId>;

fn before<'a>(children: &'a Children, tokens: &[u32]) -> Option<(&'a [u32], NodeId)> {
    let mut range = children.range::<[u32], _>((Bound::Unbounded, Bound::Excluded(tokens)));
    range.next_back().map(|(key, &id)| (&**key, id))
}

fn at_or_after<'a>(children: &'a Children, tokens: &[u32]) -> Option<(&'a [u32], NodeId)> {
    let mut range = children.range::<[u32], _>((Bound::Included(tokens), Bound::Unbounded));
    range.next().map(|(key, &id)| (&**key, id))
}

/// Length of the common prefix.
pub(crate) fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
impl Tree {
    /// The laws of the module's text.
    fn check(&self) {
        let mut resident = 0;
        let mut evictable = 0;
        for (id, node) in self.nodes.iter().enumerate().filter_map(|(id, n)| Some((id, n.as_ref()?))) {
            if node.parent == NodeId::MAX {
                assert!(!node.children.is_empty(), "an empty root stays");
                continue;
            }
            let parent = self.node(node.parent);
            assert_eq!(parent.children.get(&node.tokens), Some(&id));
            assert!(node.children.is_empty() || node.tokens.len() == self.page_size);
            assert!(parent.locks >= node.locks || parent.parent == NodeId::MAX);
            let here = matches!(node.place, Place::Pool(_));
            let below = node.children.values().filter(|&&c| matches!(self.node(c).place, Place::Pool(_))).count();
            assert_eq!(node.resident, below);
            assert!(here || below == 0);
            assert!(here || node.locks == 0);
            resident += usize::from(here);
            evictable += usize::from(here && node.locks == 0);
            assert_eq!(self.lru.contains(&(node.used, id)), here && node.locks == 0 && below == 0);
        }
        assert_eq!((resident, evictable), (self.resident, self.evictable));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::pool::Pool;
    use proptest::prelude::*;

    const PAGE: usize = 4;

    /// Inserts a whole sequence as an engine does when a request ends; returns the nodes of its whole pages.
    fn put(tree: &mut Tree, pool: &mut Pool, salt: u64, tokens: &[u32]) -> Vec<NodeId> {
        let mut nodes: Vec<NodeId> = Vec::new();
        for page_tokens in tokens.chunks(PAGE) {
            let Some(page) = pool.alloc() else { break };
            let got = tree.insert(salt, nodes.last().copied(), page_tokens, page);
            if !got.taken {
                pool.free(page);
            }
            if let Some(Place::Pool(page)) = got.freed {
                pool.free(page);
            }
            if page_tokens.len() == PAGE {
                nodes.push(got.node);
            }
        }
        nodes
    }

    #[test]
    fn a_tail_is_found_beside_whole_pages() {
        let (mut tree, mut pool) = (Tree::new(PAGE), Pool::new(16));
        put(&mut tree, &mut pool, 0, &[1, 2, 3, 4, 5, 6, 7, 8]);
        put(&mut tree, &mut pool, 0, &[1, 2, 3, 4, 5, 6]); // inside the former: no new page
        assert_eq!(tree.resident(), 2);
        let got = tree.find(0, &[1, 2, 3, 4, 5, 6, 9]);
        assert_eq!((got.nodes.len(), got.tail.map(|t| t.1)), (1, Some(2)));
        assert_eq!(tree.find(1, &[1, 2, 3, 4]), Match::default(), "another salt sees nothing");
        put(&mut tree, &mut pool, 0, &[9, 8]);
        put(&mut tree, &mut pool, 0, &[9, 8, 7]); // the shorter leaf goes
        assert_eq!(tree.resident(), 3);
        tree.check();
    }

    /// An operation on the tree of the property test.
    #[derive(Clone, Debug)]
    enum Op {
        Put(u64, Vec<u32>),
        Find(u64, Vec<u32>),
        Hold(u64, Vec<u32>),
        Release,
        Evict(bool),
        Forget(usize),
    }

    fn ops() -> impl Strategy<Value = Vec<Op>> {
        let text = || prop::collection::vec(0..3u32, 1..14);
        let op = prop_oneof![
            4 => (0..2u64, text()).prop_map(|(s, t)| Op::Put(s, t)),
            4 => (0..2u64, text()).prop_map(|(s, t)| Op::Find(s, t)),
            2 => (0..2u64, text()).prop_map(|(s, t)| Op::Hold(s, t)),
            2 => Just(Op::Release),
            4 => any::<bool>().prop_map(Op::Evict),
            1 => (0..8usize).prop_map(Op::Forget),
        ];
        prop::collection::vec(op, 1..60)
    }

    proptest! {
        #[test]
        fn agrees_with_a_list_of_sequences(ops in ops()) {
            let (mut tree, mut pool) = (Tree::new(PAGE), Pool::new(24));
            let mut texts: Vec<(u64, Vec<u32>)> = Vec::new();
            let mut held: Vec<Vec<NodeId>> = Vec::new();
            let mut tiers: Vec<u64> = Vec::new();
            let (mut evicted, mut next_key) = (false, 0);
            for op in ops {
                match op {
                    Op::Put(salt, text) => {
                        if pool.available() * PAGE >= text.len() + PAGE {
                            put(&mut tree, &mut pool, salt, &text);
                            texts.push((salt, text));
                        }
                    }
                    Op::Find(salt, text) => {
                        let got = tree.find(salt, &text);
                        let tokens = got.nodes.len() * PAGE + got.tail.map_or(0, |t| t.1);
                        let best = texts.iter().filter(|t| t.0 == salt).map(|t| common(&t.1, &text)).max().unwrap_or(0);
                        prop_assert!(tokens <= best, "{} tokens found, {} known", tokens, best);
                        if !evicted {
                            prop_assert_eq!(tokens, best);
                        }
                    }
                    Op::Hold(salt, text) => {
                        let found = tree.find(salt, &text).nodes;
                        let here = found.into_iter().take_while(|&n| matches!(tree.place(n), Place::Pool(_)));
                        let nodes: Vec<_> = here.collect();
                        nodes.iter().for_each(|&n| tree.lock(n));
                        held.push(nodes);
                    }
                    Op::Release => {
                        if let Some(nodes) = held.pop() {
                            nodes.iter().rev().for_each(|&n| tree.unlock(n));
                        }
                    }
                    Op::Evict(keep) => {
                        next_key += 1;
                        let (coldest, mut gone) = (tree.coldest(), Vec::new());
                        let page = tree.evict(keep.then_some(next_key), &mut gone);
                        prop_assert_eq!(page, coldest);
                        if let Some(page) = page {
                            evicted |= !keep;
                            pool.free(page);
                            if keep {
                                tiers.push(next_key);
                            }
                        }
                    }
                    Op::Forget(i) => {
                        if !tiers.is_empty() {
                            evicted = true;
                            let key = tiers.swap_remove(i % tiers.len());
                            tree.forget(key, &mut Vec::new());
                        }
                    }
                }
                tree.check();
                prop_assert_eq!(tree.resident() + pool.available(), pool.pages());
            }
            // All that nobody holds can be had.
            while let Some(nodes) = held.pop() {
                nodes.iter().rev().for_each(|&n| tree.unlock(n));
            }
            while let Some(page) = tree.evict(None, &mut Vec::new()) {
                pool.free(page);
            }
            prop_assert_eq!(pool.available(), pool.pages());
        }
    }
}
