//! Counters and gauges of all I/O. They live in the disk's `meta` memory, so that they outlive the
//! process that counts, and can be read by another process at any time.
//!
//! One writer, the thread that owns the disk: adding is a plain load and store. The identities that hold
//! whenever no request is unfinished (`moved` is what failed requests had moved before they failed):
//!
//! - reads:  `guest.read_bytes + failed_read_bytes == ram.read_bytes + zero.read_bytes
//!   + (base.read_bytes - merges.base_bytes) + (overflow.read_bytes - merges.overflow_bytes - collector.read_bytes)`
//! - writes: `guest.written_bytes + failed_written_bytes == ram.written_bytes + zero.written_bytes + overflow_guest_bytes`
//! - file:   `overflow.written_bytes == 4096 * (evictions_blocks + collector_moved_blocks +
//!   overflow_guest_blocks + summaries + lost_blocks)`, once no write of the file is under way.

use crate::histogram::Histogram;
use crate::units::BLOCK_BYTES;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Adds to a counter (single writer).
#[inline]
pub fn add(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Relaxed).wrapping_add(n), Relaxed);
}

/// Sets a gauge.
#[inline]
pub fn set(gauge: &AtomicU64, n: u64) {
    gauge.store(n, Relaxed);
}

/// Reads a counter or gauge.
#[inline]
pub fn get(counter: &AtomicU64) -> u64 {
    counter.load(Relaxed)
}

/// One plane: a place that I/O goes to.
#[repr(C)]
pub struct Plane {
    /// Operations.
    pub reads: AtomicU64,
    /// Operations.
    pub writes: AtomicU64,
    /// Bytes.
    pub read_bytes: AtomicU64,
    /// Bytes.
    pub written_bytes: AtomicU64,
}

impl Plane {
    /// Counts one read.
    #[inline]
    pub fn read(&self, bytes: u64) {
        add(&self.reads, 1);
        add(&self.read_bytes, bytes);
    }

    /// Counts one write.
    #[inline]
    pub fn write(&self, bytes: u64) {
        add(&self.writes, 1);
        add(&self.written_bytes, bytes);
    }
}

/// Both sides of the identities: what the guest plane accounts for, and what the other planes served.
pub struct Balance {
    /// Bytes read by the guest, and served to it.
    pub read: (u64, u64),
    /// Bytes written by the guest, and taken from it.
    pub written: (u64, u64),
    /// Bytes of the blocks that were written to the file, and bytes written there.
    pub file: (u64, u64),
}

/// Wraps as the counters do: memory that a fault has changed gives odd figures, not a panic.
fn sum<const N: usize>(counters: [&AtomicU64; N]) -> u64 {
    counters.into_iter().fold(0, |sum, counter| sum.wrapping_add(get(counter)))
}

impl Counters {
    /// The two sides of each identity, as they are now.
    pub fn balance(&self) -> Balance {
        let merges = sum([&self.merges_base_bytes, &self.merges_overflow_bytes, &self.collector_read_bytes]);
        let served = [&self.ram, &self.zero, &self.base, &self.overflow].map(|plane| &plane.read_bytes);
        let file_blocks = sum([
            &self.evictions_blocks,
            &self.collector_moved_blocks,
            &self.overflow_guest_blocks,
            &self.summaries,
            &self.lost_blocks,
        ]);
        Balance {
            read: (sum([&self.guest.read_bytes, &self.failed_read_bytes]), sum(served).wrapping_sub(merges)),
            written: (
                sum([&self.guest.written_bytes, &self.failed_written_bytes]),
                sum([&self.ram.written_bytes, &self.zero.written_bytes, &self.overflow_guest_bytes]),
            ),
            file: (file_blocks.wrapping_mul(BLOCK_BYTES as u64), get(&self.overflow.written_bytes)),
        }
    }

    /// At attach: bytes that a dead process has moved for requests that it did not complete count as failed.
    pub fn write_off(&self) {
        let b = self.balance();
        add(&self.failed_read_bytes, b.read.1.wrapping_sub(b.read.0));
        add(&self.failed_written_bytes, b.written.1.wrapping_sub(b.written.0));
        let missing = b.file.1.wrapping_sub(b.file.0);
        add(&self.lost_blocks, missing.div_ceil(BLOCK_BYTES as u64));
        // Nothing, unless the memory was damaged.
        add(&self.overflow.written_bytes, missing.wrapping_neg() % BLOCK_BYTES as u64);
    }
}

/// All counters, gauges and histograms of a disk. All zero at birth.
#[repr(C)]
pub struct Counters {
    /// Completed requests of the guest.
    pub guest: Plane,
    /// Guest bytes served from or taken by the RAM tier.
    pub ram: Plane,
    /// Bytes read from and written to the overflow file (or difference file).
    pub overflow: Plane,
    /// Bytes read from the base image. Its writes stay zero.
    pub base: Plane,
    /// Guest bytes that needed no storage: reads of zero blocks, writes of zeroes.
    pub zero: Plane,
    /// Base reads that were not in the host's page cache.
    pub store_reads: AtomicU64,
    /// Their bytes.
    pub store_read_bytes: AtomicU64,
    /// Guest bytes written straight to the overflow or difference file.
    pub overflow_guest_bytes: AtomicU64,
    /// Blocks written for them.
    pub overflow_guest_blocks: AtomicU64,
    /// Summary blocks written.
    pub summaries: AtomicU64,
    /// Blocks written to the overflow for nothing: changed meanwhile, or the write failed.
    pub lost_blocks: AtomicU64,
    /// Bytes read from the base image to complete a partly written block.
    pub merges_base_bytes: AtomicU64,
    /// The same from the overflow, and what reads of part of a block fetched beyond it.
    pub merges_overflow_bytes: AtomicU64,
    /// Bytes that failed or canceled reads had moved.
    pub failed_read_bytes: AtomicU64,
    /// Bytes that failed or canceled writes had moved.
    pub failed_written_bytes: AtomicU64,
    /// Requests that completed with an error.
    pub failed: AtomicU64,

    /// Gauge: bytes of slots in use.
    pub ram_used_bytes: AtomicU64,
    /// Gauge: limit of the RAM tier.
    pub ram_limit_bytes: AtomicU64,
    /// Gauge: most that was ever in use.
    pub ram_peak_bytes: AtomicU64,
    /// Gauge: live bytes in the overflow (difference) file.
    pub overflow_used_bytes: AtomicU64,
    /// Gauge: bytes of segments that the file holds, live or not.
    pub overflow_file_bytes: AtomicU64,
    /// Gauge: limit of the overflow file; 0 means none of its own.
    pub overflow_limit_bytes: AtomicU64,
    /// Gauge: memory of the block map: 4 KiB per mapped region, and per page of [`crate::Written`] words.
    pub map_bytes: AtomicU64,
    /// Gauge: unfinished requests.
    pub inflight: AtomicU64,
    /// Gauge: of those, how many wait for space.
    pub waiting: AtomicU64,

    /// Eviction writes started while no write waited.
    pub evictions_background: AtomicU64,
    /// Eviction writes started while a write waited.
    pub evictions_urgent: AtomicU64,
    /// Blocks that moved from the RAM tier to the overflow.
    pub evictions_blocks: AtomicU64,
    /// Blocks that came back from the overflow to the RAM tier because they were read again and again.
    pub promoted_blocks: AtomicU64,
    /// Live blocks that the collector moved.
    pub collector_moved_blocks: AtomicU64,
    /// Bytes that it read for that.
    pub collector_read_bytes: AtomicU64,
    /// Segments punched out of the file.
    pub segments_punched: AtomicU64,
    /// Discard requests completed.
    pub discards: AtomicU64,
    /// Bytes of RAM tier and overflow that discards and write-zeroes gave back.
    pub discard_bytes: AtomicU64,
    /// Write-zeroes requests completed.
    pub write_zeroes: AtomicU64,
    /// Flushes completed.
    pub flushes: AtomicU64,
    /// Writes that had to wait for space.
    pub stalls: AtomicU64,
    /// How long they waited, in all.
    pub stalls_ns: AtomicU64,
    /// Times that requests waited for the disk's rate limit.
    pub throttled: AtomicU64,
    /// How long they waited, in all: time in which there was such a request.
    pub throttled_ns: AtomicU64,
    /// Resets; the generation is one more.
    pub resets: AtomicU64,
    /// Blocks read back that did not match their checksum.
    pub checksum_mismatches: AtomicU64,
    /// Overflow writes that failed.
    pub overflow_write_errors: AtomicU64,
    /// Overflow reads that failed.
    pub overflow_read_errors: AtomicU64,
    /// Gauge: 1 while overflow writes fail again and again, else 0.
    pub degraded: AtomicU64,
    /// Gauge: how full the write cache is, as the core's `Level`.
    pub level: AtomicU64,
    /// Gauge: 1 from the core's `Event::Full` to its `Event::SpaceAvailable`, else 0.
    pub is_full: AtomicU64,
    /// Workers attached to this memory after the first.
    pub restarts: AtomicU64,
    /// Chunks of a streamed image that this disk's reads had to ask for.
    pub chunks_asked: AtomicU64,
    /// Gauge: of those, how many have not come.
    pub chunks_missing: AtomicU64,
    /// Times that one was missing for so long that the guest should be stopped.
    pub chunk_stalls: AtomicU64,
    /// Gauge: 1 while one is, else 0.
    pub is_chunk_stalled: AtomicU64,
    /// Chunks of a streamed image that were on this host, or were zeroes, when this disk read them for the first time.
    pub chunks_found: AtomicU64,
    /// Their bytes.
    pub chunks_found_bytes: AtomicU64,

    /// Guest reads, from acceptance to completion.
    pub read_latency: Histogram,
    /// Guest writes.
    pub write_latency: Histogram,
    /// Overflow reads as the host saw them.
    pub overflow_read_latency: Histogram,
    /// Overflow writes as the host saw them.
    pub overflow_write_latency: Histogram,
    /// Base reads that had to wait for the store.
    pub base_read_latency: Histogram,
    /// Chunks of a streamed image, from the question to the answer.
    pub chunk_latency: Histogram,
}
