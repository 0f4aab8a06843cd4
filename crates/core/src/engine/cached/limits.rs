//! Limits of the write cache that change while the disk serves.
//!
//! Owns the rules for such a change. Invariant: a change that is refused has no effect.

use crate::engine::cached::Cached;
use crate::engine::cached::space::MIN_RESERVE;
use crate::error::DiskError;
use crate::io::PARTS;
use crate::shared::Shared;
use spillway_layout::{BLOCK_BYTES, DiskSpec, bytes_in_words};
use spillway_policy::{RecentReads, kept_free};

impl Cached {
    /// Changes the limits: see [`crate::Disk::set_limits`].
    pub fn set_limits(&mut self, shared: &mut Shared, spec: DiskSpec) -> Result<(), DiskError> {
        let before = shared.spec;
        self.tiers.ram.data().check(&spec)?;
        self.check_file(shared, &spec)?;
        self.check_fits(&before, &spec)?;
        shared.spec = spec;
        if spec.overflow_limit_bytes != before.overflow_limit_bytes {
            self.tiers.log.set_total(spec.segments(), shared.map.meta());
        }
        if spec.ram_limit_bytes != before.ram_limit_bytes {
            self.tiers.ram.set_limit(spec.slots());
            self.recent_reads = RecentReads::new(spec.slots().into(), 1.0);
        }
        shared.publish_limits();
        // There is less space, too, for blocks beyond a RAM limit that was lowered before.
        self.lower_ram_ceiling(shared);
        Ok(())
    }

    /// Whether the file can get the size of the limit.
    fn check_file(&self, shared: &Shared, spec: &DiskSpec) -> Result<(), DiskError> {
        let (bytes, before) = (spec.overflow_limit_bytes, shared.spec.overflow_limit_bytes);
        if shared.drain.is_needed() && bytes > before {
            // The barrier punches the end of the file as it was when this process began.
            return refused("I/O of an earlier worker may still be in flight: try again".into());
        }
        if self.punching.impossible && bytes < before && self.tiers.log.in_file() > spec.segments() {
            return refused(format!(
                "the overflow file holds {}, and its file system cannot take parts of a file back",
                bytes_in_words(self.tiers.log.file_blocks() * BLOCK_BYTES as u64)
            ));
        }
        Ok(())
    }

    /// Whether a lower limit leaves space for the blocks in use: the overflow must hold its live blocks and those that the RAM
    /// tier evicts.
    fn check_fits(&self, before: &DiskSpec, spec: &DiskSpec) -> Result<(), DiskError> {
        let (ram, overflow) =
            (bytes_in_words(spec.ram_limit_bytes), bytes_in_words(spec.overflow_limit_bytes));
        let words = |blocks: u64| bytes_in_words(blocks * BLOCK_BYTES as u64);
        let evicted = self.tiers.beyond_ram(spec.slots());
        let live = self.tiers.log.live() + self.tiers.log.arriving;
        let capacity = if spec.mode.has_log() { self.tiers.log.capacity_of(spec.segments()) } else { 0 };
        if live + evicted <= capacity {
            return Ok(());
        }
        if spec.overflow_limit_bytes < before.overflow_limit_bytes {
            let segments = (live + evicted).div_ceil(self.tiers.log.data_blocks().into());
            return refused(format!(
                "overflow limit {overflow} is too small: {} live there or leave the RAM tier, and a twentieth, or \
                 {MIN_RESERVE} segments, must stay free; discard, or reset, to make space",
                bytes_in_words(segments * spec.segment_bytes())
            ));
        }
        if spec.ram_limit_bytes < before.ram_limit_bytes && evicted > 0 {
            return refused(format!(
                "RAM limit {ram} is too small: {} are in use, and the overflow has space for {}",
                words(self.tiers.ram.used().into()),
                words(capacity.saturating_sub(live))
            ));
        }
        Ok(())
    }

    /// While the tier shrinks to a lower RAM limit, writes get some of the slots that become free, as long as the log has space
    /// for all blocks beyond the limit, including those that these writes take and those that a turn evicts.
    pub(super) fn lower_ram_ceiling(&mut self, shared: &Shared) {
        let tiers = &mut self.tiers;
        if !tiers.ram.is_above_limit() {
            return;
        }
        let a_turn = u64::from(PARTS as u32 * shared.spec.shape.part_blocks);
        let beyond = tiers.beyond_ram(tiers.ram.limit());
        let spare = tiers.log.space().saturating_sub(beyond).saturating_sub(a_turn);
        let spare = if tiers.evicts() { spare } else { 0 };
        let shared_out = spare.min(kept_free(tiers.ram.limit().into()) / 2) as u32;
        tiers.ram.lower_ceiling(shared_out, spare > 0);
    }
}

fn refused<T>(why: String) -> Result<T, DiskError> {
    Err(DiskError::Spec(why))
}
