//! The reset: a new generation of the disk. What an earlier one left is given back in the turns that follow.
//!
//! Owns when a reset may happen, and its order; how the map is forgotten is the map's. Invariant: whoever attaches after a
//! death in the middle finds the old generation whole, or the new one. Why: `docs/design/008-reset-by-generation.md`.

use crate::counters::{add, set};
use crate::disk::Disk;
use crate::io::Io;
use crate::persist::Mark;
use crate::promote::RecentReads;
use crate::spec::Mode;

impl Disk {
    /// Throws away everything written since the image, by one store; the memory goes back to the host in the
    /// turns that follow. Returns false while operations are under way, or an earlier reset's memory is not back:
    /// call again after each [`Disk::end_turn`] until it is true. No request may be unfinished or arrive meanwhile.
    pub fn reset<I: Io>(&mut self, io: &mut I) -> bool {
        assert!(self.table.is_empty(), "a reset needs a quiet disk");
        assert!(self.spec.mode != Mode::Ephemeral, "there is nothing that it could be reset to");
        self.resetting = true;
        let under_way =
            self.parts.in_use() > 0 || self.victim.is_some() || self.punches > 0 || self.holds_requests();
        if under_way || self.forget_from.is_some() {
            return false;
        }
        if !self.is_marked_for_reset(io) {
            return false;
        }
        if self.spec.mode.writes_in_place() && !self.file_emptied {
            // The map is still the old one, but nobody reads: the disk is quiet, and whoever attaches after a
            // death in the middle finishes the reset.
            self.meta.begin_reset();
            self.forget_states();
            self.direct_blocks = 0;
            self.file_emptied = true;
            self.empty_file(io);
            return false;
        }
        (self.resetting, self.file_emptied) = (false, false);
        self.meta.reset();
        self.ram.reset();
        self.recent_reads = RecentReads::new(self.spec.slots());
        self.log.reset(&self.meta);
        (self.full, self.overflowed) = (false, false);
        self.forget_from = Some(0);
        let c = self.meta.counters();
        self.word_pages.clear();
        set(&c.map_bytes, 0);
        add(&c.resets, 1);
        self.publish_gauges();
        true
    }

    /// In mode `persistent` the medium says first that all of it is forgotten: what it says of each block takes longer.
    fn is_marked_for_reset<I: Io>(&mut self, io: &mut I) -> bool {
        let Some(p) = &self.persistent else { return true };
        match p.mark {
            Mark::Written => true,
            _ if self.file_emptied => true,
            Mark::Unwritten if !p.is_busy() && !self.health.rests(self.now_ns) => {
                self.write_mark(io, true);
                false
            }
            Mark::Unwritten | Mark::UnderWay => false,
        }
    }
}
