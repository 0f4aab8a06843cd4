//! Where the guest wrote most since the last reset, as ranges of the disk, read from its shared memory without
//! asking whoever serves it. Never maps that memory: reading a hole of it so would allocate it.
//!
//! Invariant: within a range no region was written more than twice as much as another; and, whatever the memory
//! holds, no more than the rows that were asked for are kept.

use rustix::io::Errno;
use spillway_control::{Dirty, DirtyRange, SupervisorError};
use spillway_core::{BLOCK_BYTES, Layout, REGION_BYTES, Written};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::os::fd::OwnedFd;

/// Words that are read at once.
const CHUNK_WORDS: usize = 4096;

/// Looks into a `meta` memory. Which disk it is, the caller adds.
pub(super) fn dirty_ranges(
    meta: &OwnedFd,
    layout: &Layout,
    size_bytes: u64,
    rows: u32,
) -> Result<Dirty, SupervisorError> {
    let read = |at: u64, buffer: &mut [u8]| read_exact(meta, at, buffer);
    let cannot = |e: Errno| SupervisorError::internal("cannot read what was written", e);
    let mut generation = [0; 8];
    read(Layout::GENERATION_AT, &mut generation).map_err(cannot)?;
    let generation = Layout::generation(u64::from_ne_bytes(generation));

    let mut ranges = Ranges::new(rows as usize);
    let mut buffer = vec![0; CHUNK_WORDS * size_of::<Written>()];
    let area = layout.written_range();
    for at in area.clone().step_by(buffer.len()) {
        let chunk = &mut buffer[..((area.end - at) as usize).min(CHUNK_WORDS * size_of::<Written>())];
        read(at, chunk).map_err(cannot)?;
        for word in chunk.as_chunks().0 {
            ranges.add(Written::from_bits(u64::from_ne_bytes(*word)).blocks(generation));
        }
    }
    let (blocks, ranges_total, ranges) = ranges.end();
    let bytes = |blocks: u64| blocks.saturating_mul(BLOCK_BYTES as u64);
    let range = |range: Range| {
        let offset_bytes = range.first.0 as u64 * REGION_BYTES;
        DirtyRange {
            offset_bytes,
            length_bytes: (range.regions as u64 * REGION_BYTES).min(size_bytes.saturating_sub(offset_bytes)),
            written_bytes: bytes(range.blocks),
        }
    };
    Ok(Dirty {
        schema: Dirty::SCHEMA,
        generation,
        size_bytes,
        region_bytes: REGION_BYTES,
        written_bytes: bytes(blocks),
        ranges_total,
        ranges: ranges.into_iter().map(range).collect(),
        ..Dirty::default()
    })
}

fn read_exact(fd: &OwnedFd, mut at: u64, mut buffer: &mut [u8]) -> Result<(), Errno> {
    while !buffer.is_empty() {
        match rustix::io::pread(fd, &mut *buffer, at) {
            Ok(0) => return Err(Errno::IO),
            Ok(n) => {
                buffer = &mut buffer[n..];
                at += n as u64;
            }
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Regions in a row; ordered by what was written there, the first of equals foremost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Range {
    blocks: u64,
    first: Reverse<usize>,
    regions: usize,
    /// Blocks written to the region that was written least, and most.
    bounds: (u64, u64),
}

/// Gathers the regions of a disk, one after the other.
struct Ranges {
    rows: usize,
    next: usize,
    open: Option<Range>,
    /// The hottest so far.
    kept: BinaryHeap<Reverse<Range>>,
    blocks: u64,
    total: u64,
}

impl Ranges {
    fn new(rows: usize) -> Ranges {
        Ranges { rows, next: 0, open: None, kept: BinaryHeap::new(), blocks: 0, total: 0 }
    }

    /// The next region, to which so many blocks were written.
    fn add(&mut self, blocks: u64) {
        let region = self.next;
        self.next += 1;
        if blocks == 0 {
            return self.close();
        }
        self.blocks = self.blocks.saturating_add(blocks);
        let alike =
            |&Range { bounds: (least, most), .. }: &Range| most.max(blocks).div_ceil(2) <= least.min(blocks);
        match self.open.as_mut().filter(|range| alike(range)) {
            Some(range) => {
                range.regions += 1;
                range.blocks = range.blocks.saturating_add(blocks);
                range.bounds = (range.bounds.0.min(blocks), range.bounds.1.max(blocks));
            }
            None => {
                self.close();
                self.open =
                    Some(Range { blocks, first: Reverse(region), regions: 1, bounds: (blocks, blocks) });
            }
        }
    }

    fn close(&mut self) {
        if let Some(range) = self.open.take() {
            self.total += 1;
            self.kept.push(Reverse(range));
            if self.kept.len() > self.rows {
                self.kept.pop();
            }
        }
    }

    /// Blocks written to all of the disk, number of ranges, and the hottest of them, most first.
    fn end(mut self) -> (u64, u64, Vec<Range>) {
        self.close();
        (
            self.blocks,
            self.total,
            self.kept.into_sorted_vec().into_iter().map(|Reverse(range)| range).collect(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::memory;
    use super::*;
    use spillway_core::{DiskSpec, FullPolicy, LogShape, Mode};

    fn ranges(rows: usize, regions: &[u64]) -> Vec<(usize, usize, u64)> {
        let mut ranges = Ranges::new(rows);
        regions.iter().for_each(|&blocks| ranges.add(blocks));
        let (blocks, total, kept) = ranges.end();
        assert_eq!(blocks, regions.iter().sum::<u64>());
        assert!(kept.len() <= rows && kept.len() as u64 <= total);
        kept.iter().map(|range| (range.first.0, range.regions, range.blocks)).collect()
    }

    #[test]
    fn regions_are_one_range_as_long_as_none_has_twice_anothers() {
        assert_eq!(ranges(9, &[]), []);
        assert_eq!(ranges(9, &[0, 0, 3, 0]), [(2, 1, 3)]);
        assert_eq!(ranges(9, &[512, 512, 256, 511]), [(0, 4, 1791)]);
        assert_eq!(ranges(9, &[512, 255]), [(0, 1, 512), (1, 1, 255)]);
        assert_eq!(ranges(9, &[3, 1]), [(0, 1, 3), (1, 1, 1)]);
        // Not step by step: from the first to the last it would be eight times.
        assert_eq!(ranges(9, &[100, 200, 400, 800]), [(2, 2, 1200), (0, 2, 300)]);
        assert_eq!(ranges(9, &[100, 0, 100]), [(0, 1, 100), (2, 1, 100)]);
    }

    #[test]
    fn the_hottest_are_kept() {
        let regions: Vec<u64> = (1..1000).flat_map(|n| [n * 7 % 1000, 0]).collect();
        let hottest = ranges(3, &regions);
        assert_eq!(hottest.iter().map(|r| r.2).collect::<Vec<_>>(), [999, 998, 997]);
        assert_eq!(ranges(1, &[5, 0, 5, 0, 5]), [(0, 1, 5)], "the first of equals");
    }

    fn spec() -> DiskSpec {
        DiskSpec {
            size_bytes: (3 << 30) + 4096,
            base_bytes: 0,
            mode: Mode::Ram,
            full: FullPolicy::Fail,
            ram_limit_bytes: 1 << 20,
            overflow_limit_bytes: 0,
            shape: LogShape::default(),
        }
    }

    #[test]
    fn reading_it_takes_no_memory() {
        let layout = Layout::of(&spec());
        let meta = memory::create_meta(layout.len_bytes()).unwrap();
        let word = |region: u64, blocks: u32, generation: u64| {
            let bits = Written::from_bits(0).plus(blocks, generation).bits();
            let at = layout.written_range().start + region * 8;
            rustix::io::pwrite(&meta, &bits.to_ne_bytes(), at).unwrap();
        };
        rustix::io::pwrite(&meta, &9u64.to_ne_bytes(), Layout::GENERATION_AT).unwrap();
        word(1, 40, 9);
        word(2, 1 << 30, 8);
        word(1536, 1, 9);
        let before = rustix::fs::fstat(&meta).unwrap().st_blocks;
        let dirty = dirty_ranges(&meta, &layout, spec().size_bytes, 20).unwrap();
        assert_eq!(rustix::fs::fstat(&meta).unwrap().st_blocks, before);
        assert_eq!((dirty.generation, dirty.written_bytes, dirty.ranges_total), (9, 41 * 4096, 2));
        // The disk ends in the middle of its last region.
        let rows: Vec<_> =
            dirty.ranges.iter().map(|r| (r.offset_bytes, r.length_bytes, r.written_bytes)).collect();
        assert_eq!(rows, [(2 << 20, 2 << 20, 40 * 4096), (3 << 30, 4096, 4096)]);
    }

    #[test]
    fn memory_that_makes_no_sense_is_read() {
        let layout = Layout::of(&spec());
        let meta = memory::create_meta(layout.len_bytes()).unwrap();
        let len = layout.len_bytes() - layout.written_range().start;
        rustix::io::pwrite(&meta, &vec![0xff; len as usize], layout.written_range().start).unwrap();
        rustix::io::pwrite(&meta, &u64::MAX.to_ne_bytes(), Layout::GENERATION_AT).unwrap();
        let dirty = dirty_ranges(&meta, &layout, spec().size_bytes, 1).unwrap();
        assert_eq!((dirty.ranges_total, dirty.ranges[0].length_bytes), (1, spec().size_bytes));
        assert_eq!(dirty.written_bytes, dirty.ranges[0].written_bytes);
    }
}
