//! Attaching: a disk from the memory that outlives the process, and in mode `persistent` from the map in its file.
//!
//! Owns the order in which the state of an earlier process is checked and adopted. Invariant: invalid state is an error, and
//! then no I/O was started.

use crate::admission::Admission;
use crate::disk::Disk;
use crate::drain::Drain;
use crate::engine::Engine;
use crate::engine::cached::{Cached, DataMemory};
use crate::engine::in_place::{InPlace, StateMap};
use crate::error::DiskError;
use crate::health::OverflowHealth;
use crate::level_watch::LevelWatch;
use crate::map::BlockMap;
use crate::meta::Meta;
use crate::ops::Operations;
use crate::shared::Shared;
use spillway_layout::{DiskSpec, Mode, add, get};

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

    /// The same in mode `persistent`: new `meta` is filled from the live map, which outlives it.
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
        data.check(&spec)?;
        let mut map = BlockMap::new(meta, &spec);
        add(&map.counters().restarts, u64::from(existing));
        if let Some(live) = &mut live {
            InPlace::load_states(&map, live)?;
        }
        let in_place = spec.mode.writes_in_place();
        let mut engine = match in_place {
            true => Engine::InPlace(Box::new(InPlace::new())),
            false => Engine::Cached(Box::new(Cached::new(&spec, data))),
        };
        // A new disk too: memory whose header alone is zero must not pass for one that is zero everywhere.
        map.adopt(|meta, block, place| engine.adopt(meta, block, place))?;
        // Events that an earlier worker has sent are not sent again; the event that ends such a state is.
        let full_event_sent = get(&map.counters().is_full) != 0;
        let (needs_drain, on_trial) = engine.finish_adopting(&map, existing, live);
        let shared = Shared {
            spec,
            admission: Admission::new(full_event_sent),
            ops: Operations::new(),
            health: OverflowHealth::adopt(map.counters(), full_event_sent && on_trial),
            drain: Drain::new(needs_drain),
            resetting: false,
            winding_down: false,
            map,
        };
        let level = LevelWatch::adopt(shared.counters());
        shared.publish_limits();
        let disk = Disk { shared, engine, level, batch: [0; 2] };
        disk.publish_gauges();
        Ok(disk)
    }
}
