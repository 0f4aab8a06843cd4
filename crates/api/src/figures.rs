//! Figures: what the disks of machines hold and have done, by machine and by catalog.
//!
//! Counters only increase while the daemon runs, over resets and restarts of machines; levels rise and fall.

use crate::choice::{Choice, Choosable, serialize_part};
use crate::{Name, Phase};
use jiff::Timestamp;
use serde::ser::SerializeMap;
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

/// A value of which the greatest of several objects counts, and not their sum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Greatest(pub u64);

impl Figure for Greatest {
    fn add(&mut self, other: &Greatest) {
        self.0 = self.0.max(other.0);
    }

    fn since(&self, _earlier: &Greatest) -> Greatest {
        *self
    }

    fn is_behind(&self, _earlier: &Greatest) -> bool {
        false
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

        impl Choosable for $name {
            fn choose(choice: &mut Choice, path: &[&str]) -> bool {
                const NAMES: &[&str] = &[$(stringify!($field)),+];
                let Some((first, rest)) = path.split_first() else {
                    *choice = Choice::All;
                    return true;
                };
                let Some(at) = NAMES.iter().position(|name| name == first) else { return false };
                $(if *first == stringify!($field) {
                    return choice.choose::<$type>(at, NAMES.len(), rest);
                })+
                false
            }

            fn serialize_parts<M: SerializeMap>(&self, parts: &[Choice], map: &mut M) -> Result<(), M::Error> {
                let mut parts = parts.iter();
                $(serialize_part(map, stringify!($field), &self.$field, parts.next())?;)+
                Ok(())
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
        /// Chunks of streamed images that disks asked `spillway-streamd` for, because they did not know them in the cache.
        chunks_asked: u64,
        /// Chunks of streamed images that were on this host, or were zeroes, when a disk read them for the first time.
        chunks_found: u64,
        /// Bytes that those chunks have in the image.
        chunks_found_bytes: u64,
        /// Waits for chunks of streamed images that have ended.
        chunk_waits: u64,
        /// Time that those waits took, summed over them, in nanoseconds.
        chunk_wait_ns: u64,
        /// Times that reads of a disk waited for a chunk for 10 seconds or more.
        chunk_stalls: u64,
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
        /// Chunks of streamed images that reads wait for.
        chunks_missing: u64,
        /// Disks whose reads have waited for a chunk of a streamed image for 10 seconds or more.
        stalled: u64,
        /// Time in which 99% of a disk's waits for chunks have ended, since its start, in nanoseconds. Of several disks, the greatest.
        #[schema(value_type = u64)]
        chunk_wait_p99_ns: Greatest,
    }
    /// Counters of the process that brings the chunks of streamed images, since it was started. It outlives the daemon.
    StreamCounters {
        /// Chunks that were asked for and were in the cache. Disks read chunks of which they know that they are there without asking.
        cache_chunks: u64,
        /// Bytes that those chunks have in the image.
        cache_bytes: u64,
        /// Chunks that were copied from another image on this host.
        seed_chunks: u64,
        /// Bytes that those chunks have in the image.
        seed_bytes: u64,
        /// Chunks that came from other hosts.
        peer_chunks: u64,
        /// Bytes that those chunks have in the image.
        peer_bytes: u64,
        /// Chunks that came from registries.
        store_chunks: u64,
        /// Bytes of those chunks, as they are in the images.
        store_bytes: u64,
        /// Bytes that registries sent for chunks, which are compressed there.
        received_bytes: u64,
        /// Chunks that were passed to disks and not kept, since the cache had no space or could not be written.
        passed_chunks: u64,
        /// Chunks that were removed from the cache to make space.
        evicted_chunks: u64,
        /// How often a registry lacked a chunk, or sent another content than its digest says.
        wrong_chunks: u64,
        /// Chunks that were sent to other hosts.
        uploaded_chunks: u64,
        /// Bytes of chunks that were sent to other hosts.
        uploaded_bytes: u64,
        /// How often another host sent wrong bytes, after which it was not asked for 10 minutes.
        wrong_peers: u64,
        /// Requests of other hosts that were refused because of the upload limit.
        refused_uploads: u64,
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
    /// Bytes that the write cache holds, both tiers together.
    pub fn used_bytes(&self) -> u64 {
        self.ram_used_bytes.saturating_add(self.overflow_used_bytes)
    }

    /// Limit of the write cache in bytes, both tiers together.
    pub fn limit_bytes(&self) -> u64 {
        self.ram_limit_bytes.saturating_add(self.overflow_limit_bytes)
    }

    /// Fill level of the write cache, both tiers together: 0 to 1.
    pub fn fill(&self) -> f64 {
        let (used, limit) = (self.used_bytes(), self.limit_bytes());
        if limit == 0 { 0.0 } else { used as f64 / limit as f64 }
    }

    /// Seconds until both tiers are full if they go on growing as they did since they held `was_bytes`, so many seconds ago. `None`
    /// if they have not grown, or have no limit.
    pub fn seconds_to_full(&self, was_bytes: u64, seconds: f64) -> Option<u64> {
        let limit = self.limit_bytes();
        let grown = self.used_bytes().checked_sub(was_bytes).filter(|grown| *grown > 0 && limit > 0)?;
        let left = limit.saturating_sub(self.used_bytes());
        (seconds > 0.0).then_some((left as f64 * seconds / grown as f64) as u64)
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
    /// Cache of streamed images; null if no version is streamed, or its process has not answered in time.
    #[serde(default)]
    pub stream: Option<StreamFigures>,
}

impl Figures {
    /// Bytes of chunks that a registry need not send, since they were in the cache, in another image or on another host.
    pub fn stream_saved_bytes(&self) -> u64 {
        let found = self.catalogs.iter().map(|catalog| catalog.counters.chunks_found_bytes);
        let came = self.stream.map(|stream| stream.counters).unwrap_or_default();
        found.sum::<u64>() + came.cache_bytes + came.seed_bytes + came.peer_bytes
    }
}

/// Cache of the streamed images of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StreamFigures {
    /// Bytes of chunks in the cache.
    pub used_bytes: u64,
    /// Largest number of bytes of chunks in the cache.
    pub limit_bytes: u64,
    /// Number of chunks that are being brought.
    pub inflight: u64,
    /// Counters of the process that brings the chunks.
    pub counters: StreamCounters,
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
    /// Number of disks whose figures are read.
    pub disks: u64,
    /// Number of disks that did not answer when they were asked last, which is every 5 seconds; the sums contain their last known figures.
    pub unresponsive_disks: u64,
    /// Bytes that the disks of the catalog's machines hold now.
    pub levels: DiskLevels,
    /// Counters of the disks of the catalog's machines, since their start.
    pub counters: DiskCounters,
    /// Bytes written by guests that never reached a disk.
    pub spared_bytes: u64,
    /// Machine with the fullest write cache; null if none holds anything.
    #[serde(default)]
    pub fullest: Option<MachineFill>,
    /// Machine whose write cache will be full first; null if none grows.
    #[serde(default)]
    pub first_full: Option<MachineForecast>,
}

/// How full the write cache of a machine is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MachineFill {
    /// Name of the machine that the fill is about.
    pub name: Name,
    /// Bytes that its write cache holds, both tiers together.
    pub used_bytes: u64,
    /// Limit of its write cache in bytes, both tiers together.
    pub limit_bytes: u64,
}

/// When the write cache of a machine will be full.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MachineForecast {
    /// Name of the machine that the forecast is about.
    pub name: Name,
    /// Seconds until its write cache is full, if it goes on growing as in the last 30 seconds.
    pub seconds: u64,
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
    /// Whether the machine's disk is served and did not answer when it was asked last, which is every 5 seconds; its figures may be older.
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
    fn the_greatest_wait_counts() {
        let of =
            |ns| DiskLevels { chunks_missing: 1, chunk_wait_p99_ns: Greatest(ns), ..DiskLevels::default() };
        let mut sum = of(5);
        [of(9), of(2)].iter().for_each(|other| sum.add(other));
        assert_eq!((sum.chunks_missing, sum.chunk_wait_p99_ns), (3, Greatest(9)));
        assert_eq!(serde_json::to_value(sum).unwrap()["chunk_wait_p99_ns"], 9);
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
