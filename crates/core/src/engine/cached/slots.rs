//! Sets of slots, with the lowest and the highest found in a few steps at any size. Owns bits; knows no meaning of a set.
//!
//! Invariant: a bit above the lowest level is set exactly if the word below it is not zero.

/// Slots in a unit: 2 MiB, the size of a huge page.
pub(crate) const UNIT_SLOTS: u32 = 512;
/// Fewer blocks than this are written one by one: a call for them costs more than it saves.
pub(crate) const SHORTEST_STRETCH: u32 = 16;
const UNIT_WORDS: usize = UNIT_SLOTS as usize / 64;

/// A set of slots: one bit each, in zeroed memory, so that an unused part costs nothing.
pub(crate) struct SlotSet {
    /// From single slots up to one word.
    levels: Vec<Vec<u64>>,
    len: u32,
}

impl SlotSet {
    /// An empty set for slots below `end`.
    pub fn new(end: u32) -> SlotSet {
        let mut words = end.div_ceil(UNIT_SLOTS) as usize * UNIT_WORDS;
        let mut levels = vec![vec![0; words.max(1)]];
        while words > 1 {
            words = words.div_ceil(64);
            levels.push(vec![0; words]);
        }
        SlotSet { levels, len: 0 }
    }

    pub fn len(&self) -> u32 {
        self.len
    }

    pub fn contains(&self, slot: u32) -> bool {
        self.levels[0][slot as usize / 64] >> (slot % 64) & 1 != 0
    }

    /// Whether all slots of a unit are in it.
    #[inline]
    pub fn holds_unit(&self, unit: u32) -> bool {
        self.levels[0][unit as usize * UNIT_WORDS..][..UNIT_WORDS].iter().all(|&word| word == u64::MAX)
    }

    /// The lowest.
    pub fn first(&self) -> Option<u32> {
        self.find(u64::trailing_zeros)
    }

    /// Adds one that is not in it.
    #[inline]
    pub fn insert(&mut self, slot: u32) {
        debug_assert!(!self.contains(slot), "slot {slot} is in the set");
        self.len += 1;
        let mut at = slot as usize;
        for level in &mut self.levels {
            let word = &mut level[at / 64];
            let was = *word;
            *word |= 1 << (at % 64);
            if was != 0 {
                return;
            }
            at /= 64;
        }
    }

    /// Takes out one that is in it.
    #[inline]
    pub fn remove(&mut self, slot: u32) {
        debug_assert!(self.contains(slot), "slot {slot} is not in the set");
        self.len -= 1;
        let mut at = slot as usize;
        for level in &mut self.levels {
            let word = &mut level[at / 64];
            *word &= !(1 << (at % 64));
            if *word != 0 {
                return;
            }
            at /= 64;
        }
    }

    fn find(&self, in_word: impl Fn(u64) -> u32) -> Option<u32> {
        if self.len == 0 {
            return None;
        }
        let down = |at: usize, level: &Vec<u64>| at * 64 + in_word(level[at]) as usize;
        Some(self.levels.iter().rev().fold(0, down) as u32)
    }

    /// Takes out the lowest.
    #[inline]
    pub fn pop_first(&mut self) -> Option<u32> {
        let slot = self.first()?;
        self.remove(slot);
        Some(slot)
    }

    /// Takes out the highest.
    pub fn pop_last(&mut self) -> Option<u32> {
        let slot = self.find(|word| 63 - word.leading_zeros())?;
        self.remove(slot);
        Some(slot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn it_is_a_set() {
        for end in [1, 63, 512, 5_000, 300_000] {
            let (mut set, mut model) = (SlotSet::new(end), BTreeSet::new());
            let mut random = 88_172_645_463_325_252_u64;
            for _ in 0..20_000 {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                let slot = (random >> 20) as u32 % end;
                match random % 8 {
                    0 => assert_eq!(set.pop_first(), model.pop_first()),
                    1 => assert_eq!(set.pop_last(), model.pop_last()),
                    2 | 3 if model.remove(&slot) => set.remove(slot),
                    _ if model.insert(slot) => set.insert(slot),
                    _ => assert!(set.contains(slot)),
                }
                assert_eq!(set.len() as usize, model.len());
            }
            while let Some(slot) = model.pop_first() {
                assert_eq!(set.pop_first(), Some(slot));
            }
            assert_eq!((set.pop_first(), set.pop_last()), (None, None));
        }
    }
}
