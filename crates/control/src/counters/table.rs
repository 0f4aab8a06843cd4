//! The rows of the table of counters. Owns nothing else.

use super::Counter;
use super::Kind::{self, Counter as Total, Gauge};
use super::Unit::{Blocks, Bytes, Nanoseconds, Things};
use crate::stats::{Plane, Stats};

impl Plane {
    fn of_base(s: &Stats) -> Plane {
        let b = &s.planes.base;
        Plane { reads: b.reads, writes: b.writes, read_bytes: b.read_bytes, written_bytes: b.written_bytes }
    }
}

const fn row(key: &'static str, metric: &'static str, kind: Kind, value: fn(&Stats) -> u64) -> Counter {
    Counter::new(key, metric, kind, value)
}

const READS: &str = "Read operations by plane.";
const WRITES: &str = "Write operations by plane.";
const READ: &str = "Bytes read by plane.";
const WRITTEN: &str = "Bytes written by plane.";
const EVICTIONS: &str = "Eviction writes; urgent: while a guest write waited.";
const MERGES: &str = "Bytes read to complete blocks that were written in part.";

/// All of them.
#[rustfmt::skip]
pub const COUNTERS: &[Counter] = &[
    row("ram.used_bytes", "ram_used_bytes", Gauge, |s| s.ram.used_bytes).of(Bytes, "RAM tier in use.").short("RAM tier").mcsio("Cache memory used"),
    row("ram.limit_bytes", "ram_limit_bytes", Gauge, |s| s.ram.limit_bytes).of(Bytes, "Limit of the RAM tier.").mcsio("Cache memory target size"),
    row("ram.peak_bytes", "ram_peak_bytes", Gauge, |s| s.ram.peak_bytes).of(Bytes, "Most of the RAM tier that was ever in use.").short("peak"),
    row("ram.huge_bytes", "ram_huge_bytes", Gauge, |s| s.ram.huge_bytes).of(Bytes, "Memory of the RAM tier that is mapped by huge pages."),
    row("overflow.used_bytes", "overflow_used_bytes", Gauge, |s| s.overflow.used_bytes).of(Bytes, "Live bytes in the overflow file.").short("overflow").mcsio("Cache disk used"),
    row("overflow.limit_bytes", "overflow_limit_bytes", Gauge, |s| s.overflow.limit_bytes).of(Bytes, "Limit of the overflow file; 0 for none.").mcsio("Cache disk size"),
    row("overflow.file_bytes", "overflow_file_bytes", Gauge, |s| s.overflow.file_bytes).of(Bytes, "Bytes that the overflow file holds.").short("file"),
    row("size_bytes", "disk_size_bytes", Gauge, |s| s.size_bytes).of(Bytes, "Size that the guest sees."),
    row("base_bytes", "disk_base_bytes", Gauge, |s| s.base_bytes).of(Bytes, "Size of the base image."),
    row("generation", "disk_generation", Gauge, |s| s.generation).of(Things, "Generation of the disk: 1 when created, one more after each reset.").short("generation"),
    row("clients", "clients", Gauge, |s| s.clients).of(Things, "Connections to the exports.").short("clients"),
    row("level", "fill_level", Gauge, |s| s.level).of(Things, "How full the write cache is: 0 normal, 1 warning, 2 critical."),
    row("is_full", "full", Gauge, |s| s.is_full).of(Things, "1 while the write cache is full: writes that need space wait or fail."),
    row("degraded", "degraded", Gauge, |s| s.degraded).of(Things, "1 while overflow writes fail repeatedly.").short("degraded"),
    row("map.bytes", "map_bytes", Gauge, |s| s.map.bytes).of(Bytes, "Memory of the block map.").short("block map"),
    row("landlock", "landlock_version", Gauge, |s| s.landlock.into()).of(Things, "Version of the Landlock that confines the worker; 0 for none."),
    row("inflight", "requests_inflight", Gauge, |s| s.inflight).of(Things, "Unfinished requests.").short("in flight"),
    row("waiting", "requests_waiting", Gauge, |s| s.waiting).of(Things, "Unfinished requests that wait for space.").short("waiting for space"),
    row("chunks.missing", "chunks_missing", Gauge, |s| s.chunks.missing).of(Things, "Chunks of a streamed image that reads wait for.").short("missing"),
    row("chunks.stalled", "chunks_stalled", Gauge, |s| s.chunks.stalled).of(Things, "1 while reads have waited for a chunk for 10 seconds or more."),

    row("planes.guest.reads", "reads_total", Total, |s| s.planes.guest.reads).of(Things, READS).short("reads").by("plane", "guest"),
    row("planes.ram.reads", "reads_total", Total, |s| s.planes.ram.reads).of(Things, READS).short("reads").by("plane", "ram"),
    row("planes.overflow.reads", "reads_total", Total, |s| s.planes.overflow.reads).of(Things, READS).short("reads").by("plane", "overflow"),
    row("planes.base.reads", "reads_total", Total, |s| Plane::of_base(s).reads).of(Things, READS).short("reads").by("plane", "base"),
    row("planes.zero.reads", "reads_total", Total, |s| s.planes.zero.reads).of(Things, READS).short("reads").by("plane", "zero"),
    row("planes.guest.writes", "writes_total", Total, |s| s.planes.guest.writes).of(Things, WRITES).short("writes").by("plane", "guest"),
    row("planes.ram.writes", "writes_total", Total, |s| s.planes.ram.writes).of(Things, WRITES).short("writes").by("plane", "ram"),
    row("planes.overflow.writes", "writes_total", Total, |s| s.planes.overflow.writes).of(Things, WRITES).short("writes").by("plane", "overflow"),
    row("planes.base.writes", "writes_total", Total, |s| Plane::of_base(s).writes).of(Things, WRITES).short("writes").by("plane", "base"),
    row("planes.zero.writes", "writes_total", Total, |s| s.planes.zero.writes).of(Things, WRITES).short("writes").by("plane", "zero"),
    row("planes.guest.read_bytes", "read_bytes_total", Total, |s| s.planes.guest.read_bytes).of(Bytes, READ).short("read").by("plane", "guest"),
    row("planes.ram.read_bytes", "read_bytes_total", Total, |s| s.planes.ram.read_bytes).of(Bytes, READ).short("read").by("plane", "ram"),
    row("planes.base.read_bytes", "read_bytes_total", Total, |s| Plane::of_base(s).read_bytes).of(Bytes, READ).short("read").by("plane", "base").mcsio("System disk bytes read"),
    row("planes.overflow.read_bytes", "read_bytes_total", Total, |s| s.planes.overflow.read_bytes).of(Bytes, READ).short("read").by("plane", "overflow").mcsio("Cache disk bytes read"),
    row("planes.zero.read_bytes", "read_bytes_total", Total, |s| s.planes.zero.read_bytes).of(Bytes, READ).short("read").by("plane", "zero"),
    row("planes.guest.written_bytes", "written_bytes_total", Total, |s| s.planes.guest.written_bytes).of(Bytes, WRITTEN).short("written").by("plane", "guest"),
    row("planes.ram.written_bytes", "written_bytes_total", Total, |s| s.planes.ram.written_bytes).of(Bytes, WRITTEN).short("written").by("plane", "ram"),
    row("planes.base.written_bytes", "written_bytes_total", Total, |s| Plane::of_base(s).written_bytes).of(Bytes, WRITTEN).short("written").by("plane", "base").mcsio("System disk bytes written"),
    row("planes.overflow.written_bytes", "written_bytes_total", Total, |s| s.planes.overflow.written_bytes).of(Bytes, WRITTEN).short("written").by("plane", "overflow").mcsio("Cache disk bytes written"),
    row("planes.zero.written_bytes", "written_bytes_total", Total, |s| s.planes.zero.written_bytes).of(Bytes, WRITTEN).short("written").by("plane", "zero"),
    row("planes.base.store_reads", "base_store_reads_total", Total, |s| s.planes.base.store_reads).of(Things, "Base reads past the host's page cache."),
    row("planes.base.store_read_bytes", "base_store_read_bytes_total", Total, |s| s.planes.base.store_read_bytes).of(Bytes, "Bytes of base reads past the host's page cache."),
    row("chunks.asked", "chunks_asked_total", Total, |s| s.chunks.asked).of(Things, "Chunks of a streamed image that the disk asked spillway-streamd for, because it did not know them in the cache.").short("chunks asked"),
    row("chunks.found", "chunks_found_total", Total, |s| s.chunks.found).of(Things, "Chunks of a streamed image that were on this host, or were zeroes, when the disk first read them.").short("chunks found"),
    row("chunks.found_bytes", "chunks_found_bytes_total", Total, |s| s.chunks.found_bytes).of(Bytes, "Bytes of chunks that were on this host, or were zeroes, when the disk first read them.").short("bytes found"),
    row("chunks.stalls", "chunk_stalls_total", Total, |s| s.chunks.stalls).of(Things, "Times that reads waited for a chunk for 10 seconds or more.").short("stalls"),
    row("evictions.background", "evictions_total", Total, |s| s.evictions.background).of(Things, EVICTIONS).short("background writes").by("kind", "background"),
    row("evictions.urgent", "evictions_total", Total, |s| s.evictions.urgent).of(Things, EVICTIONS).short("urgent writes").by("kind", "urgent"),
    row("evictions.blocks", "evicted_blocks_total", Total, |s| s.evictions.blocks).of(Blocks, "Blocks moved from RAM tier to overflow.").short("evicted"),
    row("promotions.blocks", "promoted_blocks_total", Total, |s| s.promotions.blocks).of(Blocks, "Blocks moved from overflow to RAM tier.").short("promoted"),
    row("collector.moved_blocks", "collector_moved_blocks_total", Total, |s| s.collector.moved_blocks).of(Blocks, "Blocks moved within the overflow.").short("moved by collector"),
    row("collector.read_bytes", "collector_read_bytes_total", Total, |s| s.collector.read_bytes).of(Bytes, "Bytes read to move blocks within the overflow."),
    row("overflow.guest_bytes", "overflow_guest_bytes_total", Total, |s| s.overflow.guest_bytes).of(Bytes, "Guest bytes written straight to the file."),
    row("overflow.guest_blocks", "overflow_guest_blocks_total", Total, |s| s.overflow.guest_blocks).of(Blocks, "Blocks written for guest bytes that go straight to the file."),
    row("overflow.summaries", "overflow_summaries_total", Total, |s| s.overflow.summaries).of(Blocks, "Blocks in which segments list what they hold."),
    row("overflow.lost_blocks", "overflow_lost_blocks_total", Total, |s| s.overflow.lost_blocks).of(Blocks, "Blocks written to the overflow whose copy was not used."),
    row("overflow.segments_punched", "overflow_segments_punched_total", Total, |s| s.overflow.segments_punched).of(Things, "Segments given back to the file system."),
    row("overflow.write_errors", "overflow_write_errors_total", Total, |s| s.overflow.write_errors).of(Things, "Overflow writes that failed.").short("overflow write errors"),
    row("overflow.read_errors", "overflow_read_errors_total", Total, |s| s.overflow.read_errors).of(Things, "Overflow reads that failed.").short("overflow read errors"),
    row("merges.base_bytes", "merge_read_bytes_total", Total, |s| s.merges.base_bytes).of(Bytes, MERGES).by("from", "base"),
    row("merges.overflow_bytes", "merge_read_bytes_total", Total, |s| s.merges.overflow_bytes).of(Bytes, MERGES).by("from", "overflow"),
    row("discards.count", "discards_total", Total, |s| s.discards.count).of(Things, "Discard requests completed.").short("discards"),
    row("discards.bytes", "discarded_bytes_total", Total, |s| s.discards.bytes).of(Bytes, "Bytes of RAM and overflow given back.").short("given back"),
    row("write_zeroes", "write_zeroes_total", Total, |s| s.write_zeroes).of(Things, "Write-zeroes requests completed."),
    row("flushes", "flushes_total", Total, |s| s.flushes).of(Things, "Flushes completed.").short("flushes"),
    row("stalls.count", "stalls_total", Total, |s| s.stalls.count).of(Things, "Writes that waited for space.").short("stalls"),
    row("stalls.ns", "stall_seconds_total", Total, |s| s.stalls.ns).of(Nanoseconds, "How long writes waited for space.").short("time waited"),
    row("throttled.count", "throttled_total", Total, |s| s.throttled.count).of(Things, "Times that requests waited for the rate limit.").short("rate limited"),
    row("throttled.ns", "throttled_seconds_total", Total, |s| s.throttled.ns).of(Nanoseconds, "How long requests waited for the rate limit.").short("time waited"),
    row("failed.requests", "failed_requests_total", Total, |s| s.failed.requests).of(Things, "Requests that ended with an error.").short("failed requests"),
    row("failed.read_bytes", "failed_read_bytes_total", Total, |s| s.failed.read_bytes).of(Bytes, "Bytes read by requests that ended with an error, or were canceled when their client stopped its queues."),
    row("failed.written_bytes", "failed_written_bytes_total", Total, |s| s.failed.written_bytes).of(Bytes, "Bytes written by requests that ended with an error, or were canceled when their client stopped its queues."),
    row("resets", "resets_total", Total, |s| s.resets).of(Things, "Resets of the disk."),
    row("restarts", "worker_restarts_total", Total, |s| s.restarts).of(Things, "Workers attached after the first.").short("worker restarts"),
    row("checksum_mismatches", "checksum_mismatches_total", Total, |s| s.checksum_mismatches).of(Things, "Blocks read back that did not match their checksum.").short("checksum mismatches"),
];
