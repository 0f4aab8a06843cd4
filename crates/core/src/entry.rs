//! One entry of the block map: where a block's newest content is, in 8 bytes, so that one store commits it.
//!
//! | bits | base | zero | RAM | overflow |
//! | --- | --- | --- | --- | --- |
//! | 63..62 | 0 | 1 | 2 | 3 |
//! | 61..32 | 0 | 0 | 0 | location in the file, in blocks |
//! | 31..0 | 0 | 0 | slot | CRC-32C of the block (0 in mode `direct`) |
//!
//! The entry holds the checksum, so location and checksum change together, and no table of checksums is needed.

use spillway_layout::{Location, Slot};

/// Where a block's newest content is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In the base image.
    Base,
    /// All zeroes: it takes no space.
    Zero,
    /// In this slot of the RAM tier.
    Ram(Slot),
    /// At this location of the overflow (difference) file, with this checksum.
    Overflow(Location, u32),
}

/// A packed [`Place`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry(u64);

const LOCATION_MASK: u64 = (1 << 30) - 1;

impl Entry {
    /// The base image's content; the all-zero word.
    pub const BASE: Entry = Entry(0);
    /// All zeroes.
    pub const ZERO: Entry = Entry(1 << 62);

    /// From the map's word. Every word is some entry; `attach` refuses those with stray bits.
    #[inline]
    pub fn from_bits(bits: u64) -> Entry {
        Entry(bits)
    }

    /// The map's word.
    #[inline]
    pub fn bits(self) -> u64 {
        self.0
    }

    /// In a slot.
    #[inline]
    pub fn ram(slot: Slot) -> Entry {
        Entry(2 << 62 | u64::from(slot.0))
    }

    /// In the overflow file.
    #[inline]
    pub fn overflow(location: Location, checksum: u32) -> Entry {
        Entry(3 << 62 | (u64::from(location.0) & LOCATION_MASK) << 32 | u64::from(checksum))
    }

    /// Unpacks the entry.
    #[inline]
    pub fn place(self) -> Place {
        match self.0 >> 62 {
            0 => Place::Base,
            1 => Place::Zero,
            2 => Place::Ram(Slot(self.0 as u32)),
            _ => Place::Overflow(Location((self.0 >> 32 & LOCATION_MASK) as u32), self.0 as u32),
        }
    }

    /// Whether the word is one that this program writes.
    pub fn is_well_formed(self) -> bool {
        let packed = match self.place() {
            Place::Base => Entry::BASE,
            Place::Zero => Entry::ZERO,
            Place::Ram(slot) => Entry::ram(slot),
            Place::Overflow(location, checksum) => Entry::overflow(location, checksum),
        };
        packed == self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_survive_packing() {
        for place in [
            Place::Base,
            Place::Zero,
            Place::Ram(Slot(0)),
            Place::Ram(Slot(u32::MAX)),
            Place::Overflow(Location(0), u32::MAX),
            Place::Overflow(Location((1 << 30) - 1), 0x1234_5678),
        ] {
            let entry = match place {
                Place::Base => Entry::BASE,
                Place::Zero => Entry::ZERO,
                Place::Ram(s) => Entry::ram(s),
                Place::Overflow(l, c) => Entry::overflow(l, c),
            };
            assert_eq!(entry.place(), place);
            assert!(entry.is_well_formed());
        }
        assert!(!Entry::from_bits(5).is_well_formed());
        assert!(!Entry::from_bits(2 << 62 | 1 << 40).is_well_formed());
    }
}
