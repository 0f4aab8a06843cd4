//! The map of a disk that outlives its processes, in two bits a block: is it in the base image, in the file, or zero.
//! Owns the packing and its check; `persist` decides what is stored where, and when.
//!
//! A page of it covers 64 MiB of disk. Invariants: each block's two bits change by one store, so that whoever looks,
//! at any instant and at whatever became of a page that was being written, finds the old state or the new one. Once the disk
//! is attached nothing is read from the shared memory: it is the page cache of a file, which can fall back to an earlier
//! state when the kernel could not write it and has evicted it.

use crate::crash_points;
use spillway_layout::{
    BLOCK_BYTES, Block, BlockState, STATE_LOW_BITS as LOW, STATE_PAGE_BLOCKS,
    STATE_WORD_BLOCKS as WORD_BLOCKS,
};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Words of a page of the map.
const PAGE_WORDS: usize = BLOCK_BYTES / 8;

/// The map, in memory of the process, and its copy in shared memory that outlives the process. One thread, which owns the
/// disk, writes both.
pub struct StateMap {
    /// The shared memory: little-endian words.
    base: *mut u8,
    pages: u32,
    /// The states, which alone count while the disk is attached.
    words: Vec<u64>,
}

// SAFETY: the pointer is to memory that the creator promised for the lifetime of the value; there is one owner.
unsafe impl Send for StateMap {}

impl StateMap {
    /// Takes the shared memory for the map of a disk of so many blocks. The map itself is clear.
    ///
    /// # Safety
    /// `base` is page-aligned, readable and writable for [`spillway_layout::state_map_bytes`] bytes for as long as the value lives. Others may
    /// write to it, by whole words.
    pub unsafe fn new(base: *mut u8, blocks: u32) -> StateMap {
        let pages = blocks.div_ceil(STATE_PAGE_BLOCKS);
        StateMap { base, pages, words: vec![0; pages as usize * PAGE_WORDS] }
    }

    /// Reads the map from the shared memory.
    pub(crate) fn load(&mut self) {
        for index in 0..self.words.len() {
            let word = u64::from_le(self.shared(index).load(Ordering::Acquire));
            // Most are zero: no memory is allocated for those.
            if word != self.words[index] {
                self.words[index] = word;
            }
        }
    }

    /// The number of its pages.
    pub(crate) fn pages(&self) -> u32 {
        self.pages
    }

    /// A word of the shared memory.
    #[inline]
    fn shared(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.words.len());
        // SAFETY: inside the promised memory (checked: as many words as that has), aligned to a page.
        unsafe { &*self.base.cast::<AtomicU64>().add(index) }
    }

    /// A block's state; `None` if its bits are invalid.
    pub(crate) fn get(&self, block: Block) -> Option<BlockState> {
        let word = self.words[(block.0 / WORD_BLOCKS) as usize];
        match word >> (block.0 % WORD_BLOCKS * 2) & 3 {
            0 => Some(BlockState::Base),
            1 => Some(BlockState::File),
            2 => Some(BlockState::Zero),
            _ => None,
        }
    }

    /// Gives these blocks a state. Returns whether that changed any.
    #[cfg_attr(feature = "crash-points", track_caller)]
    pub(crate) fn set(&mut self, blocks: Range<u32>, state: BlockState) -> bool {
        let (mut at, mut changed) = (blocks.start, false);
        while at < blocks.end {
            let index = at / WORD_BLOCKS;
            let end = blocks.end.min((index + 1) * WORD_BLOCKS);
            let ones = u64::MAX >> (64 - 2 * (end - at));
            let mask = ones << (at % WORD_BLOCKS * 2);
            let old = self.words[index as usize];
            let new = old & !mask | (LOW * state as u64) & mask;
            if new != old {
                self.words[index as usize] = new;
                crash_points::store();
                self.shared(index as usize).store(new.to_le(), Ordering::Release);
                changed = true;
            }
            at = end;
        }
        changed
    }

    /// Gives a block a state in the map alone: the shared memory gets it by [`StateMap::store_page`].
    pub(crate) fn set_unshared(&mut self, block: Block, state: BlockState) {
        let shift = block.0 % WORD_BLOCKS * 2;
        let word = &mut self.words[(block.0 / WORD_BLOCKS) as usize];
        *word = *word & !(3 << shift) | (state as u64) << shift;
    }

    /// Makes every block one of the base image.
    #[cfg_attr(feature = "crash-points", track_caller)]
    pub(crate) fn clear(&mut self) {
        for index in 0..self.words.len() {
            if self.words[index] != 0 {
                self.words[index] = 0;
                crash_points::store();
                self.shared(index).store(0, Ordering::Release);
            }
        }
    }

    fn page_words(page: u32) -> Range<usize> {
        page as usize * PAGE_WORDS..(page as usize + 1) * PAGE_WORDS
    }

    /// Whether every block of a page is the base image's, in the map.
    pub(crate) fn is_clear(&self, page: u32) -> bool {
        self.words[Self::page_words(page)].iter().all(|&word| word == 0)
    }

    /// The same for the page in shared memory.
    pub(crate) fn is_shared_clear(&self, page: u32) -> bool {
        Self::page_words(page).all(|index| self.shared(index).load(Ordering::Relaxed) == 0)
    }

    /// Stores all of a page to shared memory, also what is there already: the kernel writes it to the file again.
    #[cfg_attr(feature = "crash-points", track_caller)]
    pub(crate) fn store_page(&self, page: u32) {
        for index in Self::page_words(page) {
            let (word, shared) = (self.words[index].to_le(), self.shared(index));
            if shared.load(Ordering::Relaxed) != word {
                crash_points::store();
            }
            shared.store(word, Ordering::Release);
        }
    }

    /// A page of the map as it is now, in the format of the file.
    pub(crate) fn copy_page(&self, page: u32, to: &mut [u8]) {
        for (to, word) in to.chunks_exact_mut(8).zip(&self.words[Self::page_words(page)]) {
            to.copy_from_slice(&word.to_le_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spillway_layout::{find_bad_state, state_map_bytes};

    fn map(memory: &mut [u64], blocks: u32) -> StateMap {
        assert!(memory.len() as u64 * 8 >= state_map_bytes(blocks));
        // SAFETY: long enough (checked), and the tests leave the memory alone while the map is used.
        unsafe { StateMap::new(memory.as_mut_ptr().cast(), blocks) }
    }

    #[test]
    fn each_block_has_its_state_and_no_other() {
        let blocks = STATE_PAGE_BLOCKS + 100;
        let mut memory = vec![0; 1024];
        let mut map = map(&mut memory, blocks);
        let mut known = vec![BlockState::Base; blocks as usize];
        let mut seed = 7u64;
        let mut below = |n: u32| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) as u32 % n
        };
        for _ in 0..2_000 {
            let first = below(blocks);
            let end = (first + 1 + below(100)).min(blocks);
            let state = [BlockState::Base, BlockState::File, BlockState::Zero][below(3) as usize];
            let changes = known[first as usize..end as usize].iter().any(|&s| s != state);
            assert_eq!(map.set(first..end, state), changes);
            known[first as usize..end as usize].fill(state);
        }
        for (block, &state) in (0..).zip(&known) {
            assert_eq!(map.get(Block(block)), Some(state), "block {block}");
        }
        let mut page = vec![0; BLOCK_BYTES];
        map.copy_page(1, &mut page);
        let packed =
            known[STATE_PAGE_BLOCKS as usize..].iter().rev().fold(0u128, |all, &s| all << 2 | s as u128);
        assert_eq!(page[..16], packed.to_le_bytes(), "four blocks a byte, the first lowest");
        assert_eq!(find_bad_state(&page), None);
        map.clear();
        assert!(map.is_clear(0) && map.is_clear(1) && map.is_shared_clear(0) && map.is_shared_clear(1));
    }

    /// The page cache may fall back to what the file has: then the map is still what it was, and makes it so again.
    #[test]
    fn what_becomes_of_the_shared_memory_changes_nothing() {
        let mut memory = vec![0; 512];
        let shared = memory.as_mut_ptr();
        let mut map = map(&mut memory, 1000);
        map.set(0..40, BlockState::File);
        // SAFETY: the memory is there as long as `memory`, and this thread alone uses it.
        unsafe { shared.write_volatile(0) };
        assert_eq!(map.get(Block(3)), Some(BlockState::File));
        let mut page = vec![0; BLOCK_BYTES];
        map.copy_page(0, &mut page);
        assert_eq!(page[..11], [0x55, 0x55, 0x55, 0x55, 0x55, 0x55, 0x55, 0x55, 0x55, 0x55, 0], "of the map");
        assert!(map.set(41..42, BlockState::Zero) && !map.set(0..8, BlockState::File));
        map.store_page(0);
        // SAFETY: the same.
        assert_eq!(unsafe { shared.read_volatile() }.to_le(), u64::from_le_bytes([0x55; 8]));
    }

    #[test]
    fn bits_that_are_no_state_are_found() {
        let mut page = vec![0b10_01_00_10; BLOCK_BYTES];
        assert_eq!(find_bad_state(&page), None);
        page[1000] = 0b00_11_00_01;
        assert_eq!(find_bad_state(&page), Some(4002));
        let mut memory = vec![0; 512];
        memory[3] = 3 << 10;
        let mut map = map(&mut memory, 1000);
        map.load();
        assert_eq!(map.get(Block(3 * 32 + 5)), None);
    }
}
