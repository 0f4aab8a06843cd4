//! Changes of a catalog's settings that are refused, wherever the catalog is. Owns these rules and their words.
//!
//! Invariant: data that machines keep is discarded only on explicit request.

use crate::{CatalogSpec, DiskMode};

/// Why settings cannot become others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusedChange {
    /// A sentence without its subject's name.
    pub why: String,
    /// Whether it can be allowed that data which machines keep is discarded.
    pub discards_data: bool,
}

impl CatalogSpec {
    /// Why these settings cannot become those; none: they can. `discard_data` allows that data which machines keep is discarded.
    pub fn refused_change(&self, after: &CatalogSpec, discard_data: bool) -> Option<RefusedChange> {
        let because = |why: &str| Some(RefusedChange { why: why.to_owned(), discards_data: false });
        if self.hardware.vmm != after.hardware.vmm {
            return because("its vmm cannot be changed: make another");
        }
        match (self.data_disk_bytes, after.data_disk_bytes) {
            (Some(before), Some(after)) if after < before => {
                return because("its data disks can grow, not shrink");
            }
            (Some(_), None) if !discard_data => {
                let why = "its machines would lose their data disks".into();
                return Some(RefusedChange { why, discards_data: true });
            }
            (Some(_), Some(_)) if self.data_disk_store != after.data_disk_store => {
                return because("its data disks stay in their store: data_disk_store cannot be changed");
            }
            _ => {}
        }
        if [self, after].iter().all(|spec| spec.mode() == DiskMode::Persistent)
            && self.overflow_store != after.overflow_store
        {
            return because("its machines' disks stay in their store: overflow_store cannot be changed");
        }
        if !self.keeps_writes() || discard_data {
            return None;
        }
        let thrown_away_by = match () {
            () if self.kind != after.kind => "type",
            () if self.mode() != after.mode() => "mode",
            () if self.image.name != after.image.name => "image",
            () if !after.keeps_writes() => "reset",
            () => return None,
        };
        let why = format!("its machines keep their data, and another {thrown_away_by} would discard it");
        Some(RefusedChange { why, discards_data: true })
    }
}
