//! The disk's self-check: every invariant that its own state can show. For tests, the simulator and fuzzers;
//! it visits every block and slot.

use crate::disk::Disk;
use crate::engine::Engine;
use crate::ops::Op;
use crate::table::Wait;
use spillway_layout::{BLOCK_BYTES, Block, get};

impl std::fmt::Debug for Disk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let operations = self.shared.ops.iter().filter(|op| !matches!(op, Op::Free));
        f.debug_struct("Disk")
            .field("spec", &self.shared.spec)
            .field("unfinished", &self.shared.admission.table().iter().collect::<Vec<_>>())
            .field("operations", &operations.collect::<Vec<_>>())
            .field("engine", &self.engine)
            .finish_non_exhaustive()
    }
}

impl Disk {
    /// The part of [`Disk::check`] that costs next to nothing: the limits, and the state of one block.
    pub fn check_step(&self, block: u32) {
        assert!(!self.shared.admission.has_finished(), "a request that has ended was not answered");
        if let Engine::Cached(e) = &self.engine {
            e.check_step(Block(block), self.shared.map.place(Block(block)));
        }
    }

    /// Panics if an invariant is broken, and names it.
    pub fn check(&self) {
        let blocks = (0..self.shared.spec.blocks()).map(Block);
        let placed = blocks.map(|block| (block, self.shared.map.place(block)));
        match &self.engine {
            Engine::Cached(e) => e.check(&self.shared, placed),
            Engine::InPlace(e) => e.check(placed),
        }
        let bytes = (self.shared.map.pages() * BLOCK_BYTES) as u64;
        assert_eq!(get(&self.counters().map_bytes), bytes, "map bytes");
        self.shared.admission.check();
        if self.unfinished() == 0 {
            self.check_counters();
        }
    }

    /// Slots that the blocks of a new write can take at once: the free ones, without the one that a full log keeps for writes
    /// that replace a block of it. None while other requests wait for slots.
    pub fn slots_to_take(&self) -> u32 {
        match &self.engine {
            Engine::Cached(e) if self.shared.admission.space_waiters() == 0 => e.slots_to_take(),
            _ => 0,
        }
    }

    /// Panics unless every unfinished request of a disk that is about to sleep has something to wait for. On a `healthy` disk
    /// without I/O errors there must be no space for those that wait for space.
    pub fn check_rest(&self, healthy: bool) {
        let admission = &self.shared.admission;
        for (id, a) in admission.table().iter() {
            let staged = if let Engine::Cached(e) = &self.engine { e.blocks_without_segment(id) } else { 0 };
            assert_eq!(a.pending as usize, staged, "operations of {a:?}");
            let waits = match a.wait {
                Wait::Space => admission.waits_for_space(id),
                Wait::Overlap => admission.table().blocker(a).is_some(),
                Wait::Part => !self.engine.can_take_part(),
                Wait::Writes => admission.table().earliest_writer().is_some_and(|writer| writer < a.sequence),
                Wait::Drain => self.shared.drain.is_needed(),
                Wait::Operations => a.pending > 0,
                Wait::Turn | Wait::Nothing => false,
            };
            assert!(waits, "nothing will wake {a:?}");
        }
        if healthy && let Engine::Cached(e) = &self.engine {
            e.check_rest(&self.shared);
        }
    }

    /// The identities of `counters`. No request is unfinished.
    fn check_counters(&self) {
        let b = self.counters().balance();
        assert_eq!(b.read.0, b.read.1, "bytes read: by the guest, by plane");
        assert_eq!(b.written.0, b.written.1, "bytes written: by the guest, by plane");
        if self.engine.parts().in_use() == 0 {
            assert_eq!(b.file.0, b.file.1, "bytes written to the file: by purpose, in all");
        }
    }
}
