//! The RAM tier's slots as this process sees them: a mapping of the `data` memory, and which of its pages the process
//! has not mapped yet.
//!
//! New slots that are filled many at a time are filled by write(2): the kernel gives each page its memory and its
//! content in one go, which costs a third of a page fault and a copy. Such pages are not in this process's page
//! tables until something touches them. Invariant: a bit of `unmapped` only says that to map the page is worth
//! asking for; it may be wrong either way.

use super::memory::Shared;
use libc::iovec;
use rustix::mm::Advice;
use spillway_core::{BLOCK_BYTES, Slot};
use std::ops::Range;

/// The slots.
pub struct Slots {
    memory: Shared,
    huge_pages: bool,
    /// One bit for each slot, in zeroed memory, so that an unused tier costs nothing.
    unmapped: Vec<u64>,
    /// Spare memory for the pieces of guest memory that are stored at once.
    pieces: Vec<iovec>,
}

impl Slots {
    /// Slots from the first byte of the memory on, which the host backs with huge pages or does not.
    pub fn new(memory: Shared, huge_pages: bool) -> Slots {
        let words = (memory.len_bytes() as usize / BLOCK_BYTES).div_ceil(64);
        Slots { memory, huge_pages, unmapped: vec![0; words], pieces: Vec::new() }
    }

    /// Whether new slots are better filled by [`Slots::store`] than through the mapping: with huge pages the mapping costs one
    /// fault for 512 of them.
    pub fn store_is_faster(&self) -> bool {
        !self.huge_pages
    }

    /// The content of one.
    #[inline]
    pub fn bytes(&mut self, slot: Slot) -> &mut [u8] {
        self.memory.bytes(slot.offset_bytes() as usize, BLOCK_BYTES)
    }

    /// The content of adjacent ones, mapped all at once where they are not.
    pub fn run(&mut self, first: Slot, slots: u32) -> &mut [u8] {
        let range = first.0..first.0 + slots;
        let (at, len) = (first.offset_bytes() as usize, slots as usize * BLOCK_BYTES);
        if self.any_unmapped(range.clone()) {
            self.set_unmapped(range, false);
            self.memory.advise(at, len, Advice::LinuxPopulateRead);
        }
        self.memory.bytes(at, len)
    }

    /// Asks the processor to fetch a slot's beginning.
    #[inline]
    pub fn prefetch(&self, slot: Slot) {
        self.memory.prefetch(slot.offset_bytes() as usize);
    }

    /// Gives adjacent free slots memory ahead of their use. To write zeroes there and map the pages then takes two thirds
    /// of what page faults, or MADV_POPULATE_WRITE, take.
    pub fn populate(&mut self, first: Slot, slots: u32) {
        const ZEROES: [u8; BLOCK_BYTES] = [0; BLOCK_BYTES];
        let (at, len) = (first.offset_bytes() as usize, slots as usize * BLOCK_BYTES);
        if self.huge_pages {
            return self.memory.advise(at, len, Advice::LinuxPopulateWrite);
        }
        self.pieces.clear();
        let zeroes = iovec { iov_base: ZEROES.as_ptr().cast_mut().cast(), iov_len: BLOCK_BYTES };
        self.pieces.resize(slots as usize, zeroes);
        // SAFETY: the kernel only reads the zeroes.
        unsafe { self.memory.store(at, &mut self.pieces) };
        self.memory.advise(at, len, Advice::LinuxPopulateRead);
    }

    /// Gives adjacent slots' memory back to the host.
    pub fn punch(&self, first: Slot, slots: u32) {
        self.memory.punch(first.offset_bytes(), u64::from(slots) * BLOCK_BYTES as u64);
    }

    /// Stores bytes in adjacent slots from the start of the first one on. `gather` names the memory that they are in.
    /// How many bytes arrived: less than all of them where that memory is gone, or the host has none for the slots.
    ///
    /// # Safety
    /// What `gather` names must be memory that may be copied to these slots.
    pub unsafe fn store<E>(
        &mut self,
        first: Slot,
        slots: u32,
        gather: impl FnOnce(&mut dyn FnMut(*mut u8, usize)) -> Result<(), E>,
    ) -> Result<usize, E> {
        let mut pieces = std::mem::take(&mut self.pieces);
        pieces.clear();
        let gathered = gather(&mut |at, len| pieces.push(iovec { iov_base: at.cast(), iov_len: len }));
        let stored = gathered.map(|()| {
            let room = slots as usize * BLOCK_BYTES;
            debug_assert!(pieces.iter().map(|piece| piece.iov_len).sum::<usize>() <= room);
            self.set_unmapped(first.0..first.0 + slots, true);
            // SAFETY: promised by the caller.
            unsafe { self.memory.store(first.offset_bytes() as usize, &mut pieces) }
        });
        self.pieces = pieces;
        stored
    }

    fn any_unmapped(&self, slots: Range<u32>) -> bool {
        words(slots).any(|(word, mask)| self.unmapped[word] & mask != 0)
    }

    fn set_unmapped(&mut self, slots: Range<u32>, unmapped: bool) {
        for (word, mask) in words(slots) {
            if unmapped {
                self.unmapped[word] |= mask;
            } else {
                self.unmapped[word] &= !mask;
            }
        }
    }
}

/// The words that a range of bits lies in, each with its bits of the range.
fn words(bits: Range<u32>) -> impl Iterator<Item = (usize, u64)> {
    (bits.start / 64..bits.end.div_ceil(64)).map(move |word| {
        let (from, to) = (bits.start.max(word * 64) % 64, bits.end.min((word + 1) * 64) - word * 64);
        (word as usize, u64::MAX >> (64 - (to - from)) << from)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

    fn slots(n: u64) -> Slots {
        let file = memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&file, n * BLOCK_BYTES as u64).unwrap();
        fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
        Slots::new(Shared::map(file, 0, "test").unwrap(), false)
    }

    #[test]
    fn a_range_of_bits_is_cut_at_words() {
        assert_eq!(words(0..64).collect::<Vec<_>>(), [(0, u64::MAX)]);
        assert_eq!(words(3..5).collect::<Vec<_>>(), [(0, 0b11000)]);
        assert_eq!(words(63..130).collect::<Vec<_>>(), [(0, 1 << 63), (1, u64::MAX), (2, 0b11)]);
    }

    #[test]
    fn what_is_stored_is_there_and_is_mapped_once() {
        let mut slots = slots(300);
        let content: Vec<u8> = (0..200 * BLOCK_BYTES).map(|i| (i / 7) as u8).collect();
        let (head, tail) = content.split_at(12_345);
        let gather = |each: &mut dyn FnMut(*mut u8, usize)| {
            for piece in [head, tail] {
                each(piece.as_ptr().cast_mut(), piece.len());
            }
            Ok::<_, ()>(())
        };
        // SAFETY: both pieces are slices of ours.
        assert_eq!(unsafe { slots.store(Slot(60), 200, gather) }, Ok(content.len()));
        assert!(slots.any_unmapped(60..61) && !slots.any_unmapped(0..60) && !slots.any_unmapped(260..300));
        assert_eq!(slots.run(Slot(60), 200), content);
        assert!(!slots.any_unmapped(0..300));
        assert_eq!(slots.bytes(Slot(59)), [0; BLOCK_BYTES]);
        assert_eq!(slots.bytes(Slot(260)), [0; BLOCK_BYTES]);
    }

    #[test]
    fn memory_that_is_gone_ends_it_where_it_is_gone() {
        let gone = memfd_create("gone", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&gone, 4 * BLOCK_BYTES as u64).unwrap();
        let guest = Shared::map_file(gone.try_clone().unwrap(), 0, 4 * BLOCK_BYTES as u64, "guest").unwrap();
        ftruncate(&gone, 2 * BLOCK_BYTES as u64).unwrap();
        let mut slots = slots(4);
        let gather = |each: &mut dyn FnMut(*mut u8, usize)| {
            each(guest.base(), 4 * BLOCK_BYTES);
            Ok::<_, ()>(())
        };
        // SAFETY: the mapping is ours; that its memory is gone is what is tested.
        assert_eq!(unsafe { slots.store(Slot(0), 4, gather) }, Ok(2 * BLOCK_BYTES));
    }
}
