//! The figures of a disk, read from its shared memory without asking whoever serves it.
//!
//! Invariant: the memory is mapped to read only, and any bits there are figures.

use spillway_control::{
    BasePlane, Chunks, Collector, Discards, DiskLatency, Evictions, Failed, Latencies, Latency,
    LatencyHistogram, Map, Merges, Overflow, Plane, Planes, Promotions, Ram, SCHEMA, Stalls, Stats,
    SupervisorError, Throttled,
};
use spillway_core::{Counters, Histogram, Layout, Meta, get};
use std::os::fd::OwnedFd;

/// The supervisor's own window on the disk's counters.
#[derive(Debug)]
pub(super) struct Window {
    counters: *const Counters,
    base: *mut std::ffi::c_void,
    len: usize,
}

impl Window {
    /// Maps the counters of a `meta` memory, to read only.
    pub fn open(meta: &OwnedFd) -> Result<Window, SupervisorError> {
        let len = (Layout::COUNTERS_AT as usize + size_of::<Counters>()).next_multiple_of(4096);
        let (prot, flags) = (rustix::mm::ProtFlags::READ, rustix::mm::MapFlags::SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, prot, flags, meta, 0) }
            .map_err(|e| SupervisorError::internal("cannot map the counters", e))?;
        // SAFETY: `Layout` puts the counters inside the mapped length.
        let counters = unsafe { base.cast::<u8>().add(Layout::COUNTERS_AT as usize) }.cast::<Counters>();
        Ok(Window { counters, base, len })
    }

    /// The disk's generation; 0 before the first worker has made the disk.
    pub fn generation(&self) -> u64 {
        // SAFETY: the header page is mapped until `drop`, before the counters.
        unsafe { Meta::read_generation(self.base.cast()) }
    }

    fn counters(&self) -> &Counters {
        // SAFETY: mapped until `drop`, page-aligned, plain atomics for which every bit pattern is valid; the
        // memory is sealed against shrinking.
        unsafe { &*self.counters }
    }

    /// The figures now. What the disk is, the caller adds.
    pub fn read(&self) -> Stats {
        let c = self.counters();
        let plane = |p: &spillway_layout::Plane| Plane {
            reads: get(&p.reads),
            writes: get(&p.writes),
            read_bytes: get(&p.read_bytes),
            written_bytes: get(&p.written_bytes),
        };
        Stats {
            schema: SCHEMA,
            generation: self.generation(),
            planes: Planes {
                guest: plane(&c.guest),
                ram: plane(&c.ram),
                overflow: plane(&c.overflow),
                base: BasePlane {
                    reads: get(&c.base.reads),
                    writes: get(&c.base.writes),
                    read_bytes: get(&c.base.read_bytes),
                    written_bytes: get(&c.base.written_bytes),
                    store_reads: get(&c.store_reads),
                    store_read_bytes: get(&c.store_read_bytes),
                },
                zero: plane(&c.zero),
            },
            ram: Ram {
                used_bytes: get(&c.ram_used_bytes),
                limit_bytes: get(&c.ram_limit_bytes),
                peak_bytes: get(&c.ram_peak_bytes),
                huge_bytes: 0,
            },
            overflow: Overflow {
                used_bytes: get(&c.overflow_used_bytes),
                file_bytes: get(&c.overflow_file_bytes),
                limit_bytes: get(&c.overflow_limit_bytes),
                guest_bytes: get(&c.overflow_guest_bytes),
                guest_blocks: get(&c.overflow_guest_blocks),
                summaries: get(&c.summaries),
                lost_blocks: get(&c.lost_blocks),
                segments_punched: get(&c.segments_punched),
                write_errors: get(&c.overflow_write_errors),
                read_errors: get(&c.overflow_read_errors),
            },
            map: Map { bytes: get(&c.map_bytes) },
            evictions: Evictions {
                background: get(&c.evictions_background),
                urgent: get(&c.evictions_urgent),
                blocks: get(&c.evictions_blocks),
            },
            promotions: Promotions { blocks: get(&c.promoted_blocks) },
            collector: Collector {
                moved_blocks: get(&c.collector_moved_blocks),
                read_bytes: get(&c.collector_read_bytes),
            },
            merges: Merges {
                base_bytes: get(&c.merges_base_bytes),
                overflow_bytes: get(&c.merges_overflow_bytes),
            },
            discards: Discards { count: get(&c.discards), bytes: get(&c.discard_bytes) },
            write_zeroes: get(&c.write_zeroes),
            flushes: get(&c.flushes),
            stalls: Stalls { count: get(&c.stalls), ns: get(&c.stalls_ns) },
            throttled: Throttled { count: get(&c.throttled), ns: get(&c.throttled_ns) },
            failed: Failed {
                requests: get(&c.failed),
                read_bytes: get(&c.failed_read_bytes),
                written_bytes: get(&c.failed_written_bytes),
            },
            latency: latencies(c),
            inflight: get(&c.inflight),
            waiting: get(&c.waiting),
            resets: get(&c.resets),
            restarts: get(&c.restarts),
            checksum_mismatches: get(&c.checksum_mismatches),
            degraded: get(&c.degraded),
            level: get(&c.level),
            is_full: get(&c.is_full),
            chunks: chunks(c),
            ..Stats::default()
        }
    }

    /// How long requests took, as histograms.
    pub fn latency(&self) -> DiskLatency {
        let c = self.counters();
        let of = |histogram: &Histogram| histogram.buckets().collect::<LatencyHistogram>();
        DiskLatency {
            disk_pid: std::process::id(),
            read: of(&c.read_latency),
            write: of(&c.write_latency),
            overflow_read: of(&c.overflow_read_latency),
            overflow_write: of(&c.overflow_write_latency),
            base_read: of(&c.base_read_latency),
            chunk: of(&c.chunk_latency),
        }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: mapped by `open`, unmapped once; nothing refers to it beyond `self`.
        let _ = unsafe { rustix::mm::munmap(self.base, self.len) };
    }
}

fn chunks(c: &Counters) -> Chunks {
    Chunks {
        asked: get(&c.chunks_asked),
        found: get(&c.chunks_found),
        found_bytes: get(&c.chunks_found_bytes),
        missing: get(&c.chunks_missing),
        stalls: get(&c.chunk_stalls),
        stalled: get(&c.is_chunk_stalled),
    }
}

fn latencies(c: &Counters) -> Latencies {
    Latencies {
        read: latency(&c.read_latency),
        write: latency(&c.write_latency),
        overflow_read: latency(&c.overflow_read_latency),
        overflow_write: latency(&c.overflow_write_latency),
        base_read: latency(&c.base_read_latency),
        chunk: latency(&c.chunk_latency),
    }
}

fn latency(h: &Histogram) -> Latency {
    Latency {
        p50_ns: h.quantile_ns(0.5),
        p99_ns: h.quantile_ns(0.99),
        max_ns: h.max_ns(),
        count: h.count(),
        sum_ns: h.sum_ns(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::memory;
    use super::*;

    #[test]
    fn the_keys_that_were_promised_are_there() {
        let meta = memory::create_meta(1 << 20).unwrap();
        let stats = serde_json::to_value(Window::open(&meta).unwrap().read()).unwrap();
        let promised = "schema generation landlock inflight flushes map.bytes collector.moved_blocks \
            planes.guest.reads planes.ram.writes planes.overflow.read_bytes planes.base.written_bytes \
            planes.base.store_reads planes.base.store_read_bytes ram.used_bytes ram.limit_bytes ram.peak_bytes ram.huge_bytes \
            overflow.used_bytes overflow.file_bytes overflow.limit_bytes evictions.background evictions.urgent \
            evictions.blocks promotions.blocks discards.count discards.bytes stalls.count stalls.ns throttled.count throttled.ns latency.read.p50_ns \
            latency.write.p99_ns latency.read.max_ns";
        for key in promised.split_whitespace() {
            let pointer = format!("/{}", key.replace('.', "/"));
            assert!(stats.pointer(&pointer).is_some_and(serde_json::Value::is_u64), "{key}");
        }
    }

    #[test]
    fn what_the_disk_counts_is_seen_at_once() {
        let meta = memory::create_meta(1 << 20).unwrap();
        let window = Window::open(&meta).unwrap();
        let at = Layout::COUNTERS_AT + std::mem::offset_of!(Counters, ram_peak_bytes) as u64;
        rustix::io::pwrite(&meta, &77u64.to_ne_bytes(), at).unwrap();
        assert_eq!(window.read().ram.peak_bytes, 77);
    }
    #[test]
    fn each_histogram_has_its_own_counts() {
        let meta = memory::create_meta(1 << 20).unwrap();
        let window = Window::open(&meta).unwrap();
        // Behind the maximum and the sum, the buckets of 0 ns, 1 ns and so on.
        let histograms = [
            std::mem::offset_of!(Counters, read_latency),
            std::mem::offset_of!(Counters, write_latency),
            std::mem::offset_of!(Counters, overflow_read_latency),
            std::mem::offset_of!(Counters, overflow_write_latency),
            std::mem::offset_of!(Counters, base_read_latency),
            std::mem::offset_of!(Counters, chunk_latency),
        ];
        for (n, offset) in histograms.into_iter().enumerate() {
            let at = Layout::COUNTERS_AT + offset as u64 + 16 + 8 * n as u64;
            rustix::io::pwrite(&meta, &(n as u64 + 10).to_ne_bytes(), at).unwrap();
        }
        let found = window.latency();
        assert_eq!(found.disk_pid, std::process::id());
        let all = [
            &found.read,
            &found.write,
            &found.overflow_read,
            &found.overflow_write,
            &found.base_read,
            &found.chunk,
        ];
        for (n, histogram) in all.into_iter().enumerate() {
            assert_eq!(
                (&histogram.bounds_ns, &histogram.counts),
                (&vec![n as u64], &vec![n as u64 + 10]),
                "{n}"
            );
        }
    }
}
