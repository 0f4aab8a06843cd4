//! Figures: what the disks of machines hold and have done, by machine and by catalog.
//!
//! Counters only increase while the daemon runs, over resets and restarts of machines; levels rise and fall.

use crate::{Name, Phase};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A value that can be summed, and compared with an earlier one.
pub trait Figure: Sized {
    /// Adds the figures of another object to these.
    fn add(&mut self, other: &Self);
    /// Increase since an earlier value; 0 where it is less.
    fn since(&self, earlier: &Self) -> Self;
    /// Whether any part is less than in an earlier value.
    fn is_behind(&self, earlier: &Self) -> bool;
}

impl Figure for u64 {
    fn add(&mut self, other: &u64) {
        *self = self.saturating_add(*other);
    }

    fn since(&self, earlier: &u64) -> u64 {
        self.saturating_sub(*earlier)
    }

    fn is_behind(&self, earlier: &u64) -> bool {
        self < earlier
    }
}

macro_rules! figures {
    ($($(#[$doc:meta])* $name:ident { $($(#[$of:meta])* $field:ident: $type:ty,)+ })+) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
        #[serde(default)]
        pub struct $name { $($(#[$of])* pub $field: $type,)+ }

        impl Figure for $name {
            fn add(&mut self, other: &Self) {
                $(self.$field.add(&other.$field);)+
            }

            fn since(&self, earlier: &Self) -> Self {
                $name { $($field: self.$field.since(&earlier.$field),)+ }
            }

            fn is_behind(&self, earlier: &Self) -> bool {
                $(self.$field.is_behind(&earlier.$field))||+
            }
        }
    )+};
}

figures! {
    /// Counters of the operations on one storage plane.
    PlaneCounters {
        /// Read operations that have completed.
        reads: u64,
        /// Write operations that have completed.
        writes: u64,
        /// Bytes that those read operations moved.
        read_bytes: u64,
        /// Bytes that those write operations moved.
        written_bytes: u64,
    }
    /// Counters of a disk, or the sum over several disks, since their start.
    DiskCounters {
        /// Operations of guests that have completed.
        guest: PlaneCounters,
        /// Guest bytes that the RAM tier served or took.
        ram: PlaneCounters,
        /// Operations on the overflow or difference files, by guests, eviction and collector.
        overflow: PlaneCounters,
        /// Operations that the base image served.
        base: PlaneCounters,
        /// Operations that needed no storage, since the data was zero.
        zero: PlaneCounters,
        /// Base reads that the host's page cache did not serve.
        base_store_reads: u64,
        /// Bytes of the base image that were read from its store.
        base_store_read_bytes: u64,
        /// Blocks that were evicted from the RAM tier to the overflow.
        evicted_blocks: u64,
        /// Writes that waited for space.
        stalls: u64,
        /// Time for which writes waited for space, summed over them, in nanoseconds.
        stall_ns: u64,
        /// Time for which requests waited for rate limits, summed over them, in nanoseconds.
        throttled_ns: u64,
        /// Requests that ended with an error.
        failed_requests: u64,
        /// Writes to overflow files that failed.
        overflow_write_errors: u64,
        /// Reads from overflow files that failed.
        overflow_read_errors: u64,
        /// Blocks whose checksum did not match when they were read back.
        checksum_mismatches: u64,
        /// Resets that discarded what was written to a disk.
        resets: u64,
        /// Number of workers that were attached after the first.
        worker_restarts: u64,
        /// Reads of guests that have completed.
        read_count: u64,
        /// Time that those reads took, summed over them, in nanoseconds.
        read_ns: u64,
        /// Writes of guests that have completed.
        write_count: u64,
        /// Time that those writes took, summed over them, in nanoseconds.
        write_ns: u64,
    }
    /// Levels of disks, and how many disks have reached a state.
    DiskLevels {
        /// Bytes of the RAM tier that hold blocks.
        ram_used_bytes: u64,
        /// Limit of the RAM tier, in bytes.
        ram_limit_bytes: u64,
        /// Live bytes in the overflow files.
        overflow_used_bytes: u64,
        /// Size of the overflow files, in bytes.
        overflow_file_bytes: u64,
        /// Limit of the overflow files, in bytes; 0 for none.
        overflow_limit_bytes: u64,
        /// Memory of the block maps.
        map_bytes: u64,
        /// Requests of guests that are in flight.
        inflight: u64,
        /// Requests in flight that wait for space.
        waiting: u64,
        /// Disks whose write cache is at the level of warning, or above.
        warning: u64,
        /// Disks whose write cache is at the critical level.
        critical: u64,
        /// Disks whose write cache is full.
        full: u64,
        /// Disks whose overflow writes fail repeatedly.
        degraded: u64,
    }
    /// Numbers of the machines of a catalog, by state.
    MachineCounts {
        /// Number of machines in phase `stopped`.
        stopped: u64,
        /// Number of machines in phase `waiting`.
        waiting: u64,
        /// Number of machines in the phases `placing` and `starting`.
        starting: u64,
        /// Number of machines in phase `running`.
        running: u64,
        /// Number of machines in phase `stopping`.
        stopping: u64,
        /// Number of machines in phase `failed`.
        failed: u64,
        /// Number of machines whose guest is ready.
        ready: u64,
        /// Number of machines that a client has claimed.
        claimed: u64,
        /// Number of machines that are ready and that nobody has claimed.
        available: u64,
    }
}

impl DiskLevels {
    /// Fill level of the write cache, both tiers together: 0 to 1.
    pub fn fill(&self) -> f64 {
        let limit = self.ram_limit_bytes.saturating_add(self.overflow_limit_bytes);
        let used = self.ram_used_bytes.saturating_add(self.overflow_used_bytes);
        if limit == 0 { 0.0 } else { used as f64 / limit as f64 }
    }
}

/// Figures of a host at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Figures {
    /// Time at which the figures were read.
    #[schema(value_type = String, format = DateTime)]
    pub time: Timestamp,
    /// Time from which counters count: the start of the daemon.
    #[schema(value_type = String, format = DateTime)]
    pub since: Timestamp,
    /// Figures of all catalogs of the host.
    pub catalogs: Vec<CatalogFigures>,
    /// Figures of machines that have or had a disk since the daemon started.
    pub machines: Vec<MachineFigures>,
    /// Space of the stores that have answered in time.
    pub stores: Vec<StoreFigures>,
}

/// Sums over the machines of a catalog, including deleted ones.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CatalogFigures {
    /// Name of the catalog that the figures are about.
    pub name: Name,
    /// Number of machines of the catalog, by phase.
    pub machines: MachineCounts,
    /// Number of machines that the catalog keeps ready to be claimed.
    pub warm: u32,
    /// Number of disks that have reported their figures.
    pub disks: u64,
    /// Number of disks that have not reported in time; the sums contain their last known figures.
    pub unresponsive_disks: u64,
    /// Bytes that the disks of the catalog's machines hold now.
    pub levels: DiskLevels,
    /// Counters of the disks of the catalog's machines, since their start.
    pub counters: DiskCounters,
    /// Bytes written by guests that never reached a disk.
    pub spared_bytes: u64,
}

/// Figures of one machine of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MachineFigures {
    /// Name of the machine that the figures are about.
    pub name: Name,
    /// Name of the catalog that owns the machine.
    pub catalog: Name,
    /// Phase of the machine on its way from off to ready and back.
    pub phase: Phase,
    /// Whether the machine runs and its guest is ready.
    pub ready: bool,
    /// True while a client has claimed the machine.
    pub claimed: bool,
    /// Whether the machine's disk is served and has not reported in time; its figures are the last known.
    pub unresponsive: bool,
    /// Bytes that the disk of the machine holds now.
    pub levels: DiskLevels,
    /// Counters of the machine's disks, since their start.
    pub counters: DiskCounters,
    /// Bytes written by its guest that never reached a disk.
    pub spared_bytes: u64,
}

/// Space of one store of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StoreFigures {
    /// Name of the store that the figures are about.
    pub name: Name,
    /// Size of the file system of the store, in bytes.
    pub size_bytes: u64,
    /// Free bytes of the file system that the store is on.
    pub free_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_add_up_and_are_compared_field_by_field() {
        let mut sum = DiskCounters { stalls: 1, ..DiskCounters::default() };
        let guest = PlaneCounters { written_bytes: 5, ..PlaneCounters::default() };
        let more = DiskCounters { guest, stalls: 2, ..DiskCounters::default() };
        sum.add(&more);
        assert_eq!((sum.stalls, sum.guest.written_bytes), (3, 5));
        assert_eq!(sum.since(&more), DiskCounters { stalls: 1, ..DiskCounters::default() });
        assert!(more.is_behind(&sum) && !sum.is_behind(&more) && !sum.is_behind(&sum));
        let less = DiskCounters { guest: PlaneCounters::default(), stalls: 9, ..sum };
        assert!(less.is_behind(&sum), "one that is less is enough, however deep");
    }

    #[test]
    fn fill_is_of_both_tiers() {
        let levels = DiskLevels {
            ram_used_bytes: 1,
            ram_limit_bytes: 2,
            overflow_limit_bytes: 2,
            ..DiskLevels::default()
        };
        assert_eq!((levels.fill(), DiskLevels::default().fill()), (0.25, 0.0));
    }
}
