//! The last block of a segment, which names the block at each of its positions.
//!
//! Owns the layout: magic, checksum of the rest, segment, count, owners; 32-bit little-endian words. Invariant: a summary of
//! another segment, or a damaged one, is never used.

#[cfg(test)]
use spillway_layout::BLOCK_BYTES;

/// First bytes of a summary block.
const MAGIC: u32 = u32::from_le_bytes(*b"SPLS");
/// Bytes of a summary before its owners.
const HEADER: usize = 16;

/// Fills a block with the summary of a segment.
pub(super) fn write_summary(page: &mut [u8], segment: u32, owners: &[u32]) {
    page.fill(0);
    page[0..4].copy_from_slice(&MAGIC.to_le_bytes());
    page[8..12].copy_from_slice(&segment.to_le_bytes());
    page[12..16].copy_from_slice(&(owners.len() as u32).to_le_bytes());
    for (to, owner) in page[HEADER..].chunks_exact_mut(4).zip(owners) {
        to.copy_from_slice(&owner.to_le_bytes());
    }
    let checksum = crc32c::crc32c(&page[8..]);
    page[4..8].copy_from_slice(&checksum.to_le_bytes());
}

/// The owners that a segment's summary names, if it belongs to that segment and is undamaged.
pub(super) fn read_summary(page: &[u8], segment: u32, most: usize) -> Option<Vec<u32>> {
    let word = |at: usize| Some(u32::from_le_bytes(page.get(at..at + 4)?.try_into().ok()?));
    let n = word(12)? as usize;
    if word(0)? != MAGIC || word(8)? != segment || n > most || word(4)? != crc32c::crc32c(&page[8..]) {
        return None;
    }
    (0..n).map(|i| word(HEADER + 4 * i)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_is_read_back_and_a_harmed_one_is_not() {
        let mut page = vec![0xAA; BLOCK_BYTES];
        let owners: Vec<u32> = (0..255).map(|i| i * 7).collect();
        write_summary(&mut page, 9, &owners);
        assert_eq!(read_summary(&page, 9, 255).as_deref(), Some(&owners[..]));
        assert_eq!(read_summary(&page, 8, 255), None, "another segment's");
        for bit in [0, 5 * 8, 9 * 8 + 1, 13 * 8, 700 * 8] {
            page[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(read_summary(&page, 9, 255), None, "bit {bit}");
            page[bit / 8] ^= 1 << (bit % 8);
        }
        assert_eq!(read_summary(&page[..100], 9, 255), None, "cut short");
    }
}
