//! How the worker attaches to a disk: from what the supervisor has said and the memory that it holds.
//!
//! Owns the order; what is in the memory is the core's to judge. Invariant: the disk goes before the memory that it points
//! into.

use super::cannot_duplicate;
use super::error::{Error, ErrorKind};
use super::memory::Shared;
use super::slots::Slots;
use crate::channel::Start;
use spillway_core::{
    DataMemory, Disk, DiskError, DiskSpec, Layout, LogShape, Meta, Mode, StateMap, Thresholds,
    state_map_bytes,
};
use spillway_layout::persistent_file;
use std::os::fd::OwnedFd;

/// A disk, and the memory that it points into.
pub struct Attached {
    pub disk: Disk,
    pub meta: Shared,
    /// The live map of mode `persistent`.
    pub live: Option<Shared>,
    pub slots: Option<Slots>,
}

/// What the supervisor wants the disk to be.
pub fn spec_of(start: &Start) -> Result<DiskSpec, Error> {
    let spec = DiskSpec {
        size_bytes: start.size_bytes,
        base_bytes: start.base_bytes,
        mode: start.settings.mode(),
        full: start.settings.full(),
        ram_limit_bytes: start.settings.ram_bytes(),
        overflow_limit_bytes: start.settings.overflow_bytes(),
        shape: LogShape::default(),
    };
    spec.check().map_err(|e| cannot_attach(DiskError::Spec(e)))?;
    Ok(spec)
}

/// Attaches to the disk in `meta`, with the slots in `data` and, in mode `persistent`, the map in `file`.
pub fn attach(
    meta: OwnedFd,
    data: Option<OwnedFd>,
    file: Option<&OwnedFd>,
    spec: DiskSpec,
    start: &Start,
) -> Result<Attached, Error> {
    let memory = Shared::map(meta, Layout::of(&spec).len_bytes(), "the disk's memory `meta`")?;
    let slots =
        data.map(|fd| Shared::map(fd, spec.ram_limit_bytes, "the disk's memory `data`")).transpose()?;
    let data = DataMemory {
        bytes: slots.as_ref().map_or(0, Shared::len_bytes),
        huge_pages: slots.as_ref().is_some_and(Shared::use_huge_pages),
    };
    // SAFETY: the mapping is as long as the layout, is given out with the disk, which goes before it, and its writer is
    // this process alone; the supervisor only reads.
    let (meta, existing) =
        unsafe { Meta::open(memory.base(), &spec, start.disk_id) }.map_err(cannot_attach)?;
    let live = match (spec.mode, file) {
        (Mode::Persistent, Some(file)) => Some(map_live(file, &spec)?),
        _ => None,
    };
    let attached = match &live {
        Some(live) => {
            // SAFETY: the mapping is as long as the map, is given out with the disk, which goes before it, and is this process's
            // alone: the file is locked by those that hold it.
            let states = unsafe { StateMap::new(live.base(), spec.blocks()) };
            Disk::attach_persistent(meta, existing, spec, states)
        }
        None => Disk::attach(meta, existing, spec, data),
    };
    let mut disk = attached.map_err(cannot_attach)?;
    let thresholds = Thresholds {
        warning_percent: start.settings.warn_at(),
        critical_percent: start.settings.critical_at(),
    };
    disk.set_thresholds(thresholds).map_err(cannot_attach)?;
    let slots = slots.map(|memory| Slots::new(memory, data.huge_pages));
    Ok(Attached { disk, meta: memory, live, slots })
}

fn cannot_attach(source: DiskError) -> Error {
    Error::new(ErrorKind::Disk, "the worker cannot go on with the disk").because(source)
}

fn map_live(file: &OwnedFd, spec: &DiskSpec) -> Result<Shared, Error> {
    let own = file.try_clone().map_err(cannot_duplicate)?;
    Shared::map_file(
        own,
        persistent_file::LIVE_AT,
        state_map_bytes(spec.blocks()),
        "the disk's file, which holds its block map",
    )
}
