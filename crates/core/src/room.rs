//! How much room there is: the limits, which can change, how much may live in the log, how much of the file it may take,
//! the reserve, and when free segments run short.
//!
//! Owns the arithmetic of the limits, and their change; never touches a block. Invariant: the file holds at most
//! `ceiling` segments. That is the limit, but after the limit was lowered it comes down step by step, as the
//! collector empties segments and they are punched out. The limit counts segments in the file, whatever their
//! index.

use crate::counters::set;
use crate::disk::Disk;
use crate::error::DiskError;
use crate::io::PARTS;
use crate::log::{COLLECTOR_OWN, Log};
use crate::meta::Meta;
use crate::promote::RecentReads;
use crate::ram::DataMemory;
use crate::spec::{DiskSpec, FullPolicy, Mode};
use crate::units::{BLOCK_BYTES, bytes_in_words};

/// Segments' worth of blocks that never live: two open segments, the collector's own, and some to gain from.
const MIN_RESERVE: u32 = 8;
/// More segments than usual that the collector keeps free while the file must shrink.
const TO_PUNCH: u32 = 2;

fn reserve(total: u32) -> u32 {
    MIN_RESERVE.max(total / 20)
}

impl Log {
    /// Blocks that may live in so many segments: what the reserve leaves, without which the collector had nothing
    /// to gain.
    fn capacity_of(&self, total: u32) -> u64 {
        u64::from(total.saturating_sub(reserve(total))) * u64::from(self.data_blocks())
    }

    /// Blocks that may live here.
    pub fn capacity(&self) -> u64 {
        self.capacity_of(self.total)
    }

    /// It holds more than its capacity: one block more, for a write that is to replace another.
    pub fn is_over(&self) -> bool {
        self.live() + self.arriving > self.capacity()
    }

    /// Blocks that may still come to live here.
    pub fn room(&self) -> u64 {
        self.capacity().saturating_sub(self.live() + self.arriving)
    }

    /// Segments in the file.
    pub fn in_file(&self) -> u32 {
        self.segments.len() - self.punched.len() as u32
    }

    /// Blocks of the file that segments take up, living or not.
    pub fn file_blocks(&self) -> u64 {
        u64::from(self.in_file()) * u64::from(self.shape.segment_blocks)
    }

    /// As many as they ever may for now.
    pub fn most_file_blocks(&self) -> u64 {
        u64::from(self.ceiling) * u64::from(self.shape.segment_blocks)
    }

    /// Free segments that the file holds.
    pub fn empties(&self) -> u32 {
        (self.empty.len() + self.doubtful.len()) as u32
    }

    /// Segments that can be opened.
    pub fn free_segments(&self) -> u32 {
        self.empties() + (self.ceiling - self.in_file())
    }

    /// Free segments below which the collector works.
    fn enough_free(&self) -> u32 {
        (reserve(self.total) / 4).max(COLLECTOR_OWN + 2)
    }

    /// What the file must come down to: the limit, unless more lives in it already when a process attaches.
    fn target(&self) -> u32 {
        let all = self.live() + self.arriving;
        if all <= self.capacity() {
            return self.total;
        }
        let full = all.div_ceil(self.data_blocks().into()) as u32;
        self.total.max(full + MIN_RESERVE.max(full / 19 + 1))
    }

    /// Free segments run short: time to collect. The rest of the reserve stays spread over the segments as dead
    /// blocks: the more of them the emptiest holds, the fewer blocks must move.
    pub fn wants_collection(&self) -> bool {
        let more = if self.ceiling > self.target() { TO_PUNCH } else { 0 };
        self.free_segments() + self.punching < self.enough_free() + more
    }

    /// The file must shrink, and there is an empty segment to spare.
    pub fn must_punch(&self) -> bool {
        self.ceiling > self.target() && self.empties() > 0 && self.free_segments() > self.enough_free()
    }

    /// Empty segments beyond those that are kept for reuse (`all`: those too).
    pub fn has_to_punch(&self, all: bool) -> bool {
        const KEEP_EMPTY: u32 = 4;
        self.empties() > if all { 0 } else { KEEP_EMPTY }
    }

    /// Lowers the ceiling to the limit, as far as the file allows.
    pub fn lower_ceiling(&mut self, meta: &Meta) {
        let spare = self.free_segments().saturating_sub(self.enough_free());
        let above = self.ceiling.saturating_sub(self.target());
        let lower = above.min(self.ceiling - self.in_file()).min(spare);
        if lower > 0 {
            self.ceiling -= lower;
            meta.set_ceiling(self.ceiling);
        }
    }

    /// When attaching: the ceiling that the process before has left, or more if the file holds more.
    pub fn adopt_ceiling(&mut self, meta: &Meta) {
        self.ceiling = self.total.max(meta.ceiling()).max(self.in_file());
        meta.set_ceiling(self.ceiling);
    }

    /// The file may take so many segments from here on, in which what lives here and the reserve fit. A larger number counts
    /// at once, a smaller one as soon as the file has shrunk to it.
    fn set_total(&mut self, total: u32, meta: &Meta) {
        self.total = total;
        self.ceiling = self.ceiling.max(total);
        meta.set_ceiling(self.ceiling);
        self.lower_ceiling(meta);
    }
}

impl Disk {
    /// Changes the limits of the RAM tier and of the overflow while the disk serves: both, or neither.
    ///
    /// What is in use beyond a lower RAM limit is evicted in the turns that follow, and goes back to the host with all other
    /// memory beyond it. A lower overflow limit counts at once for what may live there, and the file shrinks to it in the
    /// background; for a higher one the file ([`DiskSpec::file_bytes`]) must be long enough before.
    ///
    /// # Errors
    /// Nothing is changed: the mode does not have what is to be limited, a limit cannot be, there is no memory for it, what is in
    /// use and the reserve do not fit, the file system cannot take parts of a file back, or the overflow is to grow while I/O of
    /// an earlier worker may still be under way, which passes.
    pub fn set_limits(&mut self, ram_bytes: u64, overflow_bytes: u64) -> Result<(), DiskError> {
        let before = self.spec;
        let spec = DiskSpec { ram_limit_bytes: ram_bytes, overflow_limit_bytes: overflow_bytes, ..before };
        let (ram_changes, overflow_changes) =
            (ram_bytes != before.ram_limit_bytes, overflow_bytes != before.overflow_limit_bytes);
        if ram_changes && !spec.mode.has_ram() {
            return refused(format!("mode {} has no RAM tier", spec.mode));
        }
        if overflow_changes && !spec.mode.has_log() {
            return refused(format!("mode {} has no overflow limit", spec.mode));
        }
        check_data(&spec, self.ram.data())?;
        self.check_file(&spec)?;
        self.check_fits(&spec)?;
        self.spec = spec;
        if overflow_changes {
            self.log.set_total(spec.segments(), &self.meta);
            self.publish_overflow_limit();
        }
        if ram_changes {
            self.ram.set_limit(spec.slots());
            self.recent_reads = RecentReads::new(spec.slots());
            set(&self.counters().ram_limit_bytes, u64::from(spec.slots()) * BLOCK_BYTES as u64);
        }
        // Less room, too, for what is beyond a RAM limit that fell before.
        self.lower_ram_ceiling();
        Ok(())
    }

    /// Whether the file can become what the limit says.
    fn check_file(&self, spec: &DiskSpec) -> Result<(), DiskError> {
        let (bytes, before) = (spec.overflow_limit_bytes, self.spec.overflow_limit_bytes);
        if self.is_draining() && bytes > before {
            // The barrier punches the end of the file as it was when this process began.
            return refused("I/O of an earlier worker may still be under way: try again".into());
        }
        if self.no_punching && bytes < before && self.log.in_file() > spec.segments() {
            return refused(format!(
                "the overflow file holds {}, and its file system cannot take parts of a file back",
                bytes_in_words(self.log.file_blocks() * BLOCK_BYTES as u64)
            ));
        }
        Ok(())
    }

    /// Whether a limit that falls leaves room for what is in use: in the overflow for what lives there and what leaves the RAM
    /// tier.
    fn check_fits(&self, spec: &DiskSpec) -> Result<(), DiskError> {
        let (ram, overflow) =
            (bytes_in_words(spec.ram_limit_bytes), bytes_in_words(spec.overflow_limit_bytes));
        let words = |blocks: u64| bytes_in_words(blocks * BLOCK_BYTES as u64);
        let leaving = self.beyond_ram(spec.slots());
        let living = self.log.live() + self.log.arriving;
        let capacity = if spec.mode.has_log() { self.log.capacity_of(spec.segments()) } else { 0 };
        if living + leaving <= capacity {
            return Ok(());
        }
        if spec.overflow_limit_bytes < self.spec.overflow_limit_bytes {
            let segments = (living + leaving).div_ceil(self.log.data_blocks().into());
            return refused(format!(
                "overflow limit {overflow} is too small: {} live there or leave the RAM tier, and a twentieth, or \
                 {MIN_RESERVE} segments, must stay free; discard, or reset, to make room",
                bytes_in_words(segments * spec.segment_bytes())
            ));
        }
        if spec.ram_limit_bytes < self.spec.ram_limit_bytes && leaving > 0 {
            return refused(format!(
                "RAM limit {ram} is too small: {} are in use, and the overflow has room for {}",
                words(self.ram.used().into()),
                words(capacity.saturating_sub(living))
            ));
        }
        Ok(())
    }

    /// While a RAM limit that has fallen is being reached, writes get some of the slots that come free: as long as the
    /// log has room for all that is beyond the limit, what they take up and what a turn's evictions free included.
    pub(crate) fn lower_ram_ceiling(&mut self) {
        if !self.ram.is_above_limit() {
            return;
        }
        let a_turn = u64::from(PARTS as u32 * self.spec.shape.part_blocks);
        let spare = self.log.room().saturating_sub(self.beyond_ram(self.ram.limit())).saturating_sub(a_turn);
        let spare = if self.spec.mode == Mode::RamOverflow { spare } else { 0 };
        self.ram.lower_ceiling(spare.min(u64::from(self.free_target() / 2)) as u32, spare > 0);
    }

    /// Blocks that such a limit of the RAM tier makes leave it. What is being evicted has its place already.
    fn beyond_ram(&self, slots: u32) -> u64 {
        (self.ram.used() - self.ram.evicting()).saturating_sub(slots).into()
    }

    /// Changes what happens to writes that find no room, those that wait now included.
    pub fn set_full_policy(&mut self, full: FullPolicy) {
        self.spec.full = full;
    }

    pub(crate) fn publish_overflow_limit(&self) {
        let bytes = u64::from(self.spec.segments()) * self.spec.segment_bytes();
        set(&self.counters().overflow_limit_bytes, bytes);
    }
}

fn refused<T>(why: String) -> Result<T, DiskError> {
    Err(DiskError::Spec(why))
}

/// Refuses a RAM limit for which there is no memory.
pub(crate) fn check_data(spec: &DiskSpec, data: DataMemory) -> Result<(), DiskError> {
    spec.check()?;
    if spec.slots() > data.slots() && spec.mode.has_ram() {
        let (limit, most) = (bytes_in_words(spec.ram_limit_bytes), bytes_in_words(data.bytes));
        return Err(DiskError::Spec(format!("RAM limit {limit} is more than the {most} that there can be")));
    }
    Ok(())
}
