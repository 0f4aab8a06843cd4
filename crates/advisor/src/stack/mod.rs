//! The stack of an LRU cache of every size at once, with blocks that are discarded.
//!
//! A block's *need* is the smallest cache that has held it without a break since it was last used: a cache of C blocks
//! has evicted it if its need is more than C. Where nothing is ever discarded that is its depth in the stack (Mattson).
//! A block that is discarded leaves a hole, in every cache that held it, which the next one that comes fills without an
//! eviction; and what was evicted stays evicted. So the depth alone would be wrong.
//!
//! Invariants: needs are different numbers and grow with the depth; so the needs of all blocks are a set, and the d-th
//! block's is the d-th of them. A new block takes the lowest that is missing for the top and moves the others
//! down by one; one that is used again does so up to its own; one that is discarded leaves its need missing.

mod ranks;
mod table;

pub(crate) use ranks::Ranks;
use std::ops::Range;
pub(crate) use table::Table;

/// Number of positions at first.
const MIN_POSITIONS: usize = 1 << 12;

/// An LRU stack with holes.
pub(crate) struct Stack {
    table: Table,
    /// Of each block, when it was last used: a larger position is a later use.
    positions: Ranks,
    next: usize,
    /// The needs of all blocks, less one. As long as none was discarded, only their number is kept.
    needs: Option<Ranks>,
    /// The lowest need, less one, that is missing there.
    missing: u32,
}

/// A use of a block, or its removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockUse {
    /// The block's need until now.
    pub need: u32,
    /// The least cache that had a hole.
    pub hole: u32,
}

impl Stack {
    pub fn new() -> Stack {
        Stack { table: Table::new(), positions: Ranks::new(MIN_POSITIONS), next: 0, needs: None, missing: 0 }
    }

    /// Number of blocks.
    pub fn len(&self) -> u32 {
        self.table.len() as u32
    }

    /// Bytes of memory that it uses.
    pub fn bytes(&self) -> usize {
        self.table.bytes() + self.positions.bytes() + self.needs.as_ref().map_or(0, Ranks::bytes)
    }

    /// Whether a block was discarded since the stack was cleared, so that there may be holes.
    pub fn may_have_holes(&self) -> bool {
        self.needs.is_some()
    }

    /// The lowest need, less one, that no block has.
    fn missing(&self) -> u32 {
        if self.needs.is_some() { self.missing } else { self.len() }
    }

    /// The need, less one, of the block at a depth.
    fn need_at(&self, depth: u32) -> u32 {
        match &self.needs {
            Some(needs) if depth >= self.missing => needs.nth(depth),
            _ => depth,
        }
    }

    /// Moves a block to the top, if it is in the stack.
    #[inline]
    pub fn touch(&mut self, block: u32) -> Option<BlockUse> {
        let old = self.table.get(block)?;
        let is_top = old as usize + 1 == self.next;
        let depth = if is_top { 0 } else { self.len() - 1 - self.positions.below(old) };
        let (need, missing) = (self.need_at(depth), self.missing());
        if !is_top {
            self.positions.remove(old);
            let position = self.take_position();
            self.table.insert(block, position);
        }
        if missing < need
            && let Some(needs) = &mut self.needs
        {
            needs.remove(need);
            needs.insert(missing);
            self.missing = needs.first_missing();
        }
        Some(BlockUse { need: need + 1, hole: missing + 1 })
    }

    /// Puts a block on top that is not in the stack. Returns the least cache that had a hole.
    pub fn insert(&mut self, block: u32) -> u32 {
        let missing = self.missing();
        let position = self.take_position();
        self.table.insert(block, position);
        if let Some(needs) = &mut self.needs {
            needs.grow(missing as usize + 1);
            needs.insert(missing);
            self.missing = needs.first_missing();
        }
        missing + 1
    }

    /// Removes a block.
    pub fn remove(&mut self, block: u32) -> Option<BlockUse> {
        let missing = self.missing();
        let old = self.table.remove(block)?;
        let all = self.positions.len();
        let depth = all - 1 - self.positions.below(old);
        self.positions.remove(old);
        if self.needs.is_none() {
            self.missing = all;
        }
        let need = self.need_at(depth);
        let needs = self.needs.get_or_insert_with(|| Ranks::filled(all as usize, all as usize + 1));
        needs.remove(need);
        self.missing = missing.min(need);
        Some(BlockUse { need: need + 1, hole: missing + 1 })
    }

    /// The blocks of a range that are in it, in no order, if all that are pass `may_be`. Costs no more than the stack
    /// is long.
    pub fn in_range(&self, range: Range<u32>, may_be: impl Fn(u32) -> bool) -> Vec<u32> {
        self.table.in_range(range, may_be)
    }

    /// The needs of all blocks, in order.
    pub fn needs(&self) -> Box<dyn Iterator<Item = u32> + '_> {
        match &self.needs {
            None => Box::new(1..=self.len()),
            Some(needs) => Box::new(needs.iter().map(|need| need + 1)),
        }
    }

    /// Number of live blocks that a cache of `blocks` blocks has evicted.
    pub fn evicted(&self, blocks: u32) -> u32 {
        match &self.needs {
            None => self.len().saturating_sub(blocks),
            Some(needs) if blocks as usize >= needs.end() => 0,
            Some(needs) => needs.len() - needs.below(blocks),
        }
    }

    /// Keeps only the blocks that `keep` accepts, as a sample of all: their needs shrink with their number.
    pub fn thin(&mut self, ratio: f64, keep: impl Fn(u32) -> bool) {
        let mut blocks: Vec<(u32, u32)> = self.table.iter().collect();
        blocks.sort_unstable_by_key(|&(_, position)| std::cmp::Reverse(position));
        let needs: Vec<u32> = self.needs().collect();
        let kept: Vec<(u32, u32)> = blocks
            .into_iter()
            .zip(needs)
            .filter(|&((block, _), _)| keep(block))
            .map(|((block, _), need)| (block, (f64::from(need) * ratio).ceil() as u32))
            .collect();
        self.clear();
        let mut scaled = Ranks::new(kept.last().map_or(0, |&(_, need)| need as usize) + kept.len());
        let mut least = 0;
        for &(_, need) in &kept {
            let need = need.max(least + 1);
            scaled.insert(need - 1);
            least = need;
        }
        for &(block, _) in kept.iter().rev() {
            let position = self.take_position();
            self.table.insert(block, position);
        }
        self.missing = scaled.first_missing();
        self.needs = Some(scaled);
    }

    /// Removes all blocks.
    pub fn clear(&mut self) {
        self.table.clear();
        self.positions = Ranks::new(MIN_POSITIONS);
        self.next = 0;
        self.needs = None;
    }

    /// Takes the next position. When all are used the blocks are moved together, or the number of positions grows.
    #[inline]
    fn take_position(&mut self) -> u32 {
        if self.next == self.positions.end() {
            self.compact();
        }
        let position = self.next as u32;
        self.positions.insert(position);
        self.next += 1;
        position
    }

    #[cold]
    fn compact(&mut self) {
        let n = self.positions.len() as usize;
        let positions = &self.positions;
        self.table.move_all(|p| if positions.contains(p) { positions.below(p) } else { p });
        self.positions = Ranks::filled(n, (4 * n).clamp(MIN_POSITIONS, u32::MAX as usize));
        self.next = n;
    }
}
