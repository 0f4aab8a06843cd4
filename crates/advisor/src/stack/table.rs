//! Blocks and their positions: an open table of 8 bytes an entry.
//!
//! Owns no order. Eight blocks that lie beside each other on the disk have neighbouring cells, one cache line, so that a
//! long request costs one miss for each eight blocks. Invariants: between a block's home and its cell no cell is empty; at
//! most half of the cells are taken.

use std::ops::Range;

/// No block: blocks have 31 bits.
const EMPTY: u32 = u32::MAX;
const MIN_BITS: u32 = 6;

#[derive(Clone, Copy)]
struct Cell {
    block: u32,
    position: u32,
}

const NONE: Cell = Cell { block: EMPTY, position: 0 };

/// A hash table from blocks to positions.
pub(crate) struct Table {
    cells: Vec<Cell>,
    bits: u32,
    len: usize,
}

impl Table {
    pub fn new() -> Table {
        Table { cells: vec![NONE; 1 << MIN_BITS], bits: MIN_BITS, len: 0 }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Bytes of memory that it uses.
    pub fn bytes(&self) -> usize {
        self.cells.capacity() * size_of::<Cell>()
    }

    #[inline]
    fn home(&self, block: u32) -> usize {
        let group = (block >> 3).wrapping_mul(0x9E37_79B1);
        let group = (group ^ group >> 15).wrapping_mul(0x85EB_CA6B) >> (35 - self.bits);
        (group << 3 | block & 7) as usize
    }

    /// The block's cell, or the empty one where it would be.
    #[inline]
    fn find(&self, block: u32) -> usize {
        let mask = self.cells.len() - 1;
        let mut at = self.home(block);
        while self.cells[at].block != block && self.cells[at].block != EMPTY {
            at = (at + 1) & mask;
        }
        at
    }

    #[inline]
    pub fn get(&self, block: u32) -> Option<u32> {
        let cell = self.cells[self.find(block)];
        (cell.block == block).then_some(cell.position)
    }

    /// Sets the position of a block. Returns the one that it had.
    #[inline]
    pub fn insert(&mut self, block: u32, position: u32) -> Option<u32> {
        let at = self.find(block);
        let cell = &mut self.cells[at];
        if cell.block == block {
            return Some(std::mem::replace(&mut cell.position, position));
        }
        *cell = Cell { block, position };
        self.len += 1;
        if self.len * 2 > self.cells.len() {
            self.resize(self.bits + 1);
        }
        None
    }

    /// Removes a block. Blocks that it kept from their homes move up.
    pub fn remove(&mut self, block: u32) -> Option<u32> {
        let mut hole = self.find(block);
        let cell = self.cells[hole];
        if cell.block != block {
            return None;
        }
        let mask = self.cells.len() - 1;
        let mut at = hole;
        loop {
            at = (at + 1) & mask;
            let next = self.cells[at];
            if next.block == EMPTY {
                break;
            }
            let from_home = at.wrapping_sub(self.home(next.block)) & mask;
            if from_home >= at.wrapping_sub(hole) & mask {
                self.cells[hole] = next;
                hole = at;
            }
        }
        self.cells[hole] = NONE;
        self.len -= 1;
        // What goes through all cells is to cost what there is, not what once was.
        if self.bits > MIN_BITS && self.len * 8 < self.cells.len() {
            self.resize(self.bits - 1);
        }
        Some(cell.position)
    }

    fn resize(&mut self, bits: u32) {
        let old = std::mem::replace(&mut self.cells, vec![NONE; 1 << bits]);
        self.bits = bits;
        for cell in old.into_iter().filter(|c| c.block != EMPTY) {
            let at = self.find(cell.block);
            self.cells[at] = cell;
        }
    }

    /// Changes all positions.
    pub fn move_all(&mut self, to: impl Fn(u32) -> u32) {
        for cell in self.cells.iter_mut().filter(|c| c.block != EMPTY) {
            cell.position = to(cell.position);
        }
    }

    /// All blocks and their positions, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (u32, u32)> {
        self.cells.iter().filter(|c| c.block != EMPTY).map(|c| (c.block, c.position))
    }

    /// The blocks of a range, in no order, if all that are there pass `may_be`. Costs no more than there are blocks, or cells.
    pub fn in_range(&self, range: Range<u32>, may_be: impl Fn(u32) -> bool) -> Vec<u32> {
        if range.len() > self.cells.len() {
            return self.iter().map(|(block, _)| block).filter(|block| range.contains(block)).collect();
        }
        range.filter(|&block| may_be(block) && self.get(block).is_some()).collect()
    }

    pub fn clear(&mut self) {
        *self = Table::new();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn it_is_a_map() {
        for range in [40, 3_000, u32::MAX] {
            let (mut table, mut model) = (Table::new(), HashMap::new());
            let mut random = 88_172_645_463_325_252_u64;
            for n in 0..60_000 {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                let block = ((random >> 20) % u64::from(range)) as u32;
                match random % 5 {
                    0 | 1 => assert_eq!(table.remove(block), model.remove(&block)),
                    2 => assert_eq!(table.get(block), model.get(&block).copied()),
                    _ => assert_eq!(table.insert(block, n), model.insert(block, n)),
                }
                assert_eq!(table.len(), model.len());
            }
            assert_eq!(table.iter().collect::<HashMap<_, _>>(), model);
            assert!(table.bytes() <= 16 * 16 * model.len().max(64), "it has shrunk: {}", table.bytes());
            table.move_all(|p| p + 1);
            assert!(model.iter().all(|(&block, &p)| table.get(block) == Some(p + 1)));
        }
    }
}
