//! Attaching: a disk from the memory that outlives the process, and in mode `persistent` from the map in its file.
//!
//! Owns the order in which what an earlier process left is looked at. Invariant: what cannot be is an error, and then nothing
//! was begun.

use crate::counters::{add, get, set};
use crate::disk::{Disk, RETESTS, TURN_BLOCKS};
use crate::drain::Drain;
use crate::error::DiskError;
use crate::health::OverflowHealth;
use crate::level::LevelWatch;
use crate::log::Log;
use crate::meta::Meta;
use crate::ops::Operations;
use crate::part::Parts;
use crate::promote::RecentReads;
use crate::ram::{DataMemory, RamTier};
use crate::spec::{DiskSpec, Mode};
use crate::states::StateMap;
use crate::table::Table;
use crate::units::BLOCK_BYTES;
use crate::written::WordPages;
use std::collections::{HashMap, VecDeque};

impl Disk {
    /// Attaches to the disk in `meta` with the slots in `data`; zeroed memory becomes a new one.
    ///
    /// # Errors
    /// The memory is another disk's or damaged, or `data` is smaller than the RAM limit.
    pub fn attach(meta: Meta, existing: bool, spec: DiskSpec, data: DataMemory) -> Result<Disk, DiskError> {
        if spec.mode == Mode::Persistent {
            return Err(DiskError::Spec("mode persistent needs the map in its file".into()));
        }
        Disk::attach_with(meta, existing, spec, data, None)
    }

    /// The same in mode `persistent`: new `meta` becomes what the live map says, which outlives it.
    ///
    /// # Errors
    /// The memory is another disk's, or it or the map is damaged.
    pub fn attach_persistent(
        meta: Meta,
        existing: bool,
        spec: DiskSpec,
        live: StateMap,
    ) -> Result<Disk, DiskError> {
        if spec.mode != Mode::Persistent {
            return Err(DiskError::Spec(format!("mode {} has no map in its file", spec.mode)));
        }
        let data = DataMemory { bytes: 0, huge_pages: false };
        Disk::attach_with(meta, existing, spec, data, Some(live))
    }

    fn attach_with(
        meta: Meta,
        existing: bool,
        spec: DiskSpec,
        data: DataMemory,
        mut live: Option<StateMap>,
    ) -> Result<Disk, DiskError> {
        crate::room::check_data(&spec, data)?;
        let data = if spec.mode.has_ram() { data } else { DataMemory { bytes: 0, huge_pages: false } };
        let word_pages = WordPages::none(meta.regions());
        let (health, level) =
            (OverflowHealth::adopt(meta.counters(), false), LevelWatch::adopt(meta.counters()));
        let mut disk = Disk {
            spec,
            ram: RamTier::new(spec.slots(), data),
            recent_reads: RecentReads::new(spec.slots()),
            log: Log::new(spec.shape, spec.segments()),
            meta,
            parts: Parts::new(),
            table: Table::new(),
            ops: Operations::new(),
            victim: None,
            unflushed: VecDeque::new(),
            behind: HashMap::new(),
            room_waiters: VecDeque::new(),
            part_waiters: VecDeque::new(),
            turn_waiters: VecDeque::new(),
            drain_waiters: Vec::new(),
            flush_waiters: Vec::new(),
            runnable: VecDeque::new(),
            drain: Drain::Done,
            now_ns: 0,
            waiting: 0,
            stalls_until_ns: 0,
            budget: TURN_BLOCKS,
            retests: RETESTS,
            evict_again: false,
            punch_after_ns: 0,
            no_punching: false,
            sequence: 0,
            batch: [0; 2],
            direct_blocks: 0,
            persistent: None,
            health,
            collect_again_ns: 0,
            full: false,
            told_full: false,
            level,
            overflowed: false,
            resetting: false,
            winding_down: false,
            file_emptied: false,
            // Whether it is clean is not known: to look is cheaper than to keep account.
            forget_from: Some(0),
            forget_words: false,
            word_pages,
            punches: 0,
            leaving: None,
            merging_slots: 0,
            picked: Vec::new(),
            slots_scratch: Vec::new(),
        };
        add(&disk.counters().restarts, u64::from(existing));
        if let Some(live) = &mut live {
            disk.load_states(live)?;
        }
        // A new disk too: memory whose header alone is zero must not pass for one that is zero everywhere.
        disk.adopt()?;
        if let Some(live) = live {
            disk.adopt_states(live);
        }
        disk.begin_draining(existing);
        let peak = get(&disk.counters().ram_peak_bytes) / BLOCK_BYTES as u64;
        disk.ram.remember_peak(peak);
        set(&disk.counters().ram_limit_bytes, u64::from(spec.slots()) * BLOCK_BYTES as u64);
        disk.publish_overflow_limit();
        // What an earlier worker has told of is not told again, but that it is over.
        disk.told_full = get(&disk.meta.counters().is_full) != 0;
        disk.full = disk.told_full;
        if disk.told_full && disk.spec.mode == Mode::Overflow && disk.log.room() > 0 {
            // Whether the file system has room shows when a write has succeeded.
            disk.health = OverflowHealth::adopt(disk.meta.counters(), true);
        }
        disk.publish_gauges();
        Ok(disk)
    }
}
