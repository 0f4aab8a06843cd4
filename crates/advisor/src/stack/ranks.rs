//! A set of small numbers with ranks: how many are below a number, and which is the n-th.
//!
//! One bit each; a count for each 512 of them, a cache line; and a Fenwick tree over what 64 of these hold, which is so small
//! that it stays in the first cache. Invariant: counts and tree say what the bits do.

const WORDS: usize = 8;
const GROUP: usize = 64 * WORDS;
const GROUPS: usize = 64;
/// Numbers to a node of the tree.
const NODE: usize = GROUP * GROUPS;

/// A set of numbers with ranks.
pub(crate) struct Ranks {
    words: Vec<u64>,
    /// Of each group, how many are in it.
    groups: Vec<u16>,
    /// Of node i (from 1 on), how many are in the `i & -i` nodes up to it.
    tree: Vec<u32>,
    len: u32,
}

impl Ranks {
    /// An empty set of numbers below `end` or a little more.
    pub fn new(end: usize) -> Ranks {
        let groups = end.div_ceil(GROUP).max(1);
        let nodes = groups.div_ceil(GROUPS);
        // One more node makes the tree's last one a power of two or less.
        Ranks { words: vec![0; groups * WORDS], groups: vec![0; groups], tree: vec![0; nodes + 1], len: 0 }
    }

    /// The numbers below `n`, in a set for numbers below `end`.
    pub fn filled(n: usize, end: usize) -> Ranks {
        let mut ranks = Ranks::new(end);
        for (i, word) in ranks.words[..n.div_ceil(64)].iter_mut().enumerate() {
            *word = if (i + 1) * 64 <= n { u64::MAX } else { (1 << (n % 64)) - 1 };
        }
        ranks.count_again();
        ranks
    }

    /// Computes groups and tree from the bits.
    fn count_again(&mut self) {
        self.tree.fill(0);
        for (group, words) in self.groups.iter_mut().zip(self.words.chunks_exact(WORDS)) {
            *group = words.iter().map(|w| w.count_ones() as u16).sum();
        }
        for (node, groups) in self.groups.chunks(GROUPS).enumerate() {
            self.tree[node + 1] = groups.iter().map(|&g| u32::from(g)).sum();
        }
        self.len = self.tree.iter().sum();
        for node in 1..self.tree.len() {
            let up = node + (node & node.wrapping_neg());
            if up < self.tree.len() {
                self.tree[up] += self.tree[node];
            }
        }
    }

    /// Makes space for numbers below `end`, and for some more.
    #[inline]
    pub fn grow(&mut self, end: usize) {
        if end > self.end() {
            let groups = (end + end / 2).div_ceil(GROUP);
            self.words.resize(groups * WORDS, 0);
            self.groups.resize(groups, 0);
            self.tree.resize(groups.div_ceil(GROUPS) + 1, 0);
            self.count_again();
        }
    }

    /// The set can have numbers below this.
    pub fn end(&self) -> usize {
        self.words.len() * 64
    }

    pub fn len(&self) -> u32 {
        self.len
    }

    /// Bytes of memory that it uses.
    pub fn bytes(&self) -> usize {
        self.words.capacity() * 8 + self.groups.capacity() * 2 + self.tree.capacity() * 4
    }

    #[inline]
    pub fn contains(&self, n: u32) -> bool {
        self.words[n as usize / 64] >> (n % 64) & 1 != 0
    }

    /// Adds a number that is not in it.
    #[inline]
    pub fn insert(&mut self, n: u32) {
        debug_assert!(!self.contains(n));
        self.words[n as usize / 64] |= 1 << (n % 64);
        self.groups[n as usize / GROUP] += 1;
        self.len += 1;
        let mut node = n as usize / NODE + 1;
        while node < self.tree.len() {
            self.tree[node] += 1;
            node += node & node.wrapping_neg();
        }
    }

    /// Removes a number that is in it.
    #[inline]
    pub fn remove(&mut self, n: u32) {
        debug_assert!(self.contains(n));
        self.words[n as usize / 64] &= !(1 << (n % 64));
        self.groups[n as usize / GROUP] -= 1;
        self.len -= 1;
        let mut node = n as usize / NODE + 1;
        while node < self.tree.len() {
            self.tree[node] -= 1;
            node += node & node.wrapping_neg();
        }
    }

    /// Number of members below `n`.
    #[inline]
    pub fn below(&self, n: u32) -> u32 {
        let n = n as usize;
        let (word, group, mut node) = (n / 64, n / GROUP, n / NODE);
        let mut sum = 0;
        let first = node * GROUPS;
        while node > 0 {
            sum += self.tree[node];
            node &= node - 1;
        }
        sum += self.groups[first..group].iter().map(|&g| u32::from(g)).sum::<u32>();
        sum += self.words[group * WORDS..word].iter().map(|w| w.count_ones()).sum::<u32>();
        if !n.is_multiple_of(64) {
            sum += (self.words[word] << (64 - n % 64)).count_ones();
        }
        sum
    }

    /// The `n`-th, from 0 on; there is one.
    pub fn nth(&self, n: u32) -> u32 {
        self.search(n, |count, _| count)
    }

    /// The lowest number that is not in it; there is one.
    pub fn first_missing(&self) -> u32 {
        if self.len as usize == self.end() {
            return self.len;
        }
        let node = self.descend(0, |count, size| size as u32 - count);
        let mut group = node * GROUPS;
        while usize::from(self.groups[group]) == GROUP {
            group += 1;
        }
        let mut word = group * WORDS;
        while self.words[word] == u64::MAX {
            word += 1;
        }
        word as u32 * 64 + self.words[word].trailing_ones()
    }

    /// The last node with no more than `n` of what `of` counts before it.
    fn descend(&self, n: u32, of: impl Fn(u32, usize) -> u32) -> usize {
        let (mut node, mut left) = (0, n);
        let mut step = (self.tree.len() - 1).next_power_of_two();
        while step > 0 {
            if let Some(&count) = self.tree.get(node + step) {
                let count = of(count, step * NODE);
                if count <= left && node + step < self.tree.len() - 1 {
                    node += step;
                    left -= count;
                }
            }
            step /= 2;
        }
        node
    }

    fn search(&self, n: u32, of: impl Fn(u32, usize) -> u32) -> u32 {
        debug_assert!(n < self.len);
        let node = self.descend(n, of);
        let mut left = n - self.below((node * NODE) as u32);
        let mut group = node * GROUPS;
        while u32::from(self.groups[group]) <= left {
            left -= u32::from(self.groups[group]);
            group += 1;
        }
        let mut word = group * WORDS;
        while self.words[word].count_ones() <= left {
            left -= self.words[word].count_ones();
            word += 1;
        }
        let mut bits = self.words[word];
        for _ in 0..left {
            bits &= bits - 1;
        }
        word as u32 * 64 + bits.trailing_zeros()
    }

    /// All members, in order.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        self.words.iter().enumerate().flat_map(|(i, &word)| {
            let mut bits = word;
            std::iter::from_fn(move || {
                let bit = bits.trailing_zeros();
                bits &= bits.wrapping_sub(1);
                (bit < 64).then_some(i as u32 * 64 + bit)
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn it_counts_like_a_set() {
        for end in [1_usize, 700, 40_000, 300_000] {
            let (mut ranks, mut model) = (Ranks::new(end), BTreeSet::new());
            let mut random = 88_172_645_463_325_252_u64;
            for round in 0..4_000 {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                // At first dense from below, so that the lowest missing is far up.
                let n = ((random >> 20) as usize % end) as u32;
                let n =
                    if round < 2_000 && !random.is_multiple_of(3) { ranks.first_missing().min(n) } else { n };
                if model.insert(n) {
                    ranks.insert(n);
                } else {
                    model.remove(&n);
                    ranks.remove(n);
                }
                assert_eq!(ranks.len() as usize, model.len());
                assert_eq!(ranks.below(n) as usize, model.range(..n).count());
                let missing = (0..).find(|m| !model.contains(m)).expect("one");
                assert_eq!(ranks.first_missing(), missing);
                if !model.is_empty() {
                    let i = random as usize % model.len();
                    assert_eq!(Some(&ranks.nth(i as u32)), model.iter().nth(i));
                }
            }
            assert!(ranks.iter().eq(model.iter().copied()));
            ranks.grow(end + 100_000);
            assert_eq!(ranks.below(end as u32) as usize, model.len());
        }
    }

    #[test]
    fn filled_is_full_up_to_there() {
        for n in [0, 1, 64, 511, 512, 33_000] {
            let ranks = Ranks::filled(n, n + 70_000);
            assert_eq!((ranks.len() as usize, ranks.first_missing() as usize), (n, n));
            assert!(ranks.iter().eq(0..n as u32));
        }
    }
}
