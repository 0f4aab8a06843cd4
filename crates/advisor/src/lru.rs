//! LRU caches of every size in one pass, exactly.
//!
//! A block comes to a cache when it is written. A read of one that is not there is read from the base image and changes
//! nothing; every other use takes it to the top; what is discarded or zeroed leaves. Invariant: what is said of a size is
//! what a cache of that size, simulated alone, would have done.

use crate::event::{Event, Step};
use crate::limit::spread;
use crate::overflow_peaks::OverflowPeaks;
use crate::profile::{Profile, Totals};
use crate::stack::Stack;

/// Sizes at which the peak of the overflow is counted, between one block and all that a trace can have.
const PEAK_SIZES: usize = 192;

/// Counts evictions and reads of the overflow for caches of every size.
pub struct Lru {
    disk_bytes: u64,
    stack: Stack,
    overflow_peaks: OverflowPeaks,
    totals: Totals,
    /// By need: blocks that every smaller cache had evicted before their next use, and reads of such blocks.
    evicted: Vec<u64>,
    read: Vec<u64>,
}

impl Lru {
    /// For a disk of this size; `u64::MAX` if it is not known.
    pub fn new(disk_bytes: u64) -> Lru {
        // Three in four sizes between 16 MiB and 256 GiB.
        let mut sizes = spread(1, 1 << 12, PEAK_SIZES / 8);
        sizes.extend(spread(1 << 12, 1 << 26, PEAK_SIZES * 3 / 4));
        sizes.extend(spread(1 << 26, 1 << 31, PEAK_SIZES / 8));
        sizes.dedup();
        Lru::with_sizes(disk_bytes, &sizes)
    }

    /// The same, and counts the peak of the overflow for caches of these sizes in blocks.
    pub fn with_sizes(disk_bytes: u64, sizes: &[u64]) -> Lru {
        let mut caches: Vec<u32> = sizes.iter().map(|&s| u32::try_from(s).unwrap_or(u32::MAX)).collect();
        caches.sort_unstable();
        caches.dedup();
        Lru {
            disk_bytes,
            stack: Stack::new(),
            overflow_peaks: OverflowPeaks::new(caches),
            totals: Totals::default(),
            evicted: Vec::new(),
            read: Vec::new(),
        }
    }

    /// Adds an event, which has passed its check.
    pub fn event(&mut self, event: &Event) {
        event.steps(self.disk_bytes, |step| self.step(step));
    }

    #[inline]
    fn step(&mut self, step: Step) {
        match step {
            Step::Read(block) => {
                self.totals.read_blocks += 1;
                if !self.touch(block, true) {
                    self.totals.base_read_blocks += 1;
                }
            }
            Step::Write { block, whole } => {
                self.totals.written_blocks += 1;
                if !self.touch(block, !whole) {
                    self.totals.new_blocks += 1;
                    let hole = self.stack.insert(block);
                    self.overflow_peaks.count_insert(&self.stack, hole);
                    let live = self.stack.len();
                    self.totals.peak_live_blocks = self.totals.peak_live_blocks.max(live.into());
                    if live as usize > self.evicted.len() {
                        self.evicted.resize((live as usize * 2).max(1024), 0);
                        self.read.resize(self.evicted.len(), 0);
                    }
                }
            }
            Step::Remove(blocks) => {
                for block in self.stack.in_range(blocks, |_| true) {
                    if let Some(what) = self.stack.remove(block) {
                        count(&mut self.evicted, what.need);
                        self.overflow_peaks.count_removal(&self.stack, what);
                    }
                }
            }
            Step::Reset => {
                for need in self.stack.needs() {
                    count(&mut self.evicted, need);
                }
                self.stack.clear();
                self.overflow_peaks.clear();
            }
        }
    }

    /// Counts the use of a block, if it is in the stack. `reads`: whether its old content is read.
    #[inline]
    fn touch(&mut self, block: u32, reads: bool) -> bool {
        let Some(what) = self.stack.touch(block) else { return false };
        count(&mut self.evicted, what.need);
        if reads {
            count(&mut self.read, what.need);
        }
        self.overflow_peaks.count_use(what);
        true
    }

    /// Bytes of memory that it uses.
    pub fn memory_bytes(&self) -> usize {
        self.stack.bytes() + (self.evicted.capacity() + self.read.capacity()) * 8
    }

    /// What was counted until now.
    pub fn profile(&self) -> Profile {
        let mut evicted = self.evicted.clone();
        self.stack.needs().for_each(|need| count(&mut evicted, need));
        let counts = (1..).zip(&evicted).zip(&self.read).map(|((need, &e), &r)| (need, e as f64, r as f64));
        let peaks = self.overflow_peaks.peaks().map(|(cache, peak)| (cache.into(), peak.into())).collect();
        Profile::new(self.totals, 1.0, counts, peaks)
    }
}

#[inline]
fn count(counts: &mut [u64], need: u32) {
    counts[need as usize - 1] += 1;
}
