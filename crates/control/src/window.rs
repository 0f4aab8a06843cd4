//! The figures of a disk, read from its shared memory without asking whoever serves it.
//!
//! Invariant: the memory is mapped to read only, and any bits there are figures.

use crate::stats::{
    BasePlane, Chunks, Collector, Discards, Evictions, Failed, Latencies, Latency, Map, Merges, Overflow,
    Plane, Planes, Promotions, Ram, SCHEMA, Stalls, Stats, Throttled,
};
use crate::{DiskLatency, LatencyHistogram};
use rustix::fs::SealFlags;
use rustix::io::Errno;
use spillway_layout::{Counters, Header, Histogram, LAYOUT_VERSION, Layout, MAGIC, get};
use std::os::fd::AsFd;

/// Why memory cannot be used as a disk's.
#[derive(Debug, thiserror::Error)]
pub enum WindowError {
    /// It is shorter than the counters.
    #[error("the memory of its counters has {found} bytes: at least {LEN} are needed")]
    TooShort {
        /// Its length.
        found: u64,
    },
    /// Its other holders could cut it short, which would end whoever has it mapped.
    #[error("the memory of its counters is not sealed against shrinking")]
    NotSealed,
    /// The host does not let it be measured or mapped.
    #[error("its counters cannot be mapped: {0}")]
    Map(#[from] Errno),
}

/// What is mapped: the header and the counters, in whole pages.
const LEN: usize = (Layout::COUNTERS_AT as usize + size_of::<Counters>()).next_multiple_of(4096);

/// A window on a disk's counters. It stays when the disk has ended, with what it counted last.
#[derive(Debug)]
pub struct Window {
    base: *mut std::ffi::c_void,
}

// SAFETY: an address that is valid wherever it is used, until `drop`; what is there is atomics, which are only read.
unsafe impl Send for Window {}
// SAFETY: as above.
unsafe impl Sync for Window {}

impl Window {
    /// Maps the counters of a `meta` memory, to read only.
    ///
    /// # Errors
    /// The memory is too short, could be shortened while it is mapped, or cannot be mapped.
    pub fn open(meta: impl AsFd) -> Result<Window, WindowError> {
        // Sealed first, measured then: it could be shortened in between. And what has no seals at all may be on a file system that hangs.
        if !rustix::fs::fcntl_get_seals(&meta)?.contains(SealFlags::SHRINK) {
            return Err(WindowError::NotSealed);
        }
        let found = rustix::fs::fstat(&meta)?.st_size as u64;
        if found < LEN as u64 {
            return Err(WindowError::TooShort { found });
        }
        let (prot, flags) = (rustix::mm::ProtFlags::READ, rustix::mm::MapFlags::SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), LEN, prot, flags, &meta, 0) }?;
        Ok(Window { base })
    }

    fn header(&self) -> &Header {
        // SAFETY: mapped until `drop`, page-aligned, plain atomics for which every bit pattern is valid; the
        // memory is sealed against shrinking.
        unsafe { &*self.base.cast() }
    }

    fn counters(&self) -> &Counters {
        // SAFETY: as above, and `LEN` ends behind them.
        unsafe { &*self.base.cast::<u8>().add(Layout::COUNTERS_AT as usize).cast::<Counters>() }
    }

    /// Whether a disk is there whose counters lie where those of this version do. There is none before the first worker has made it.
    pub fn is_of_this_version(&self) -> bool {
        let header = self.header();
        get(&header.magic) == MAGIC && get(&header.layout_version) == LAYOUT_VERSION
    }

    /// The disk's generation; 0 before the first worker has made the disk.
    pub fn generation(&self) -> u64 {
        Layout::generation(get(&self.header().generation))
    }

    /// The figures now. What the disk is, the caller adds.
    pub fn read(&self) -> Stats {
        Stats { latency: latencies(self.counters()), ..self.read_sums() }
    }

    /// The same where latencies have only their count and sum, and waits for chunks their 99th percentile: the others cost more than
    /// all the rest.
    pub fn read_sums(&self) -> Stats {
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
            latency: sums(c),
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

    /// How long requests of the disk of this process took, as histograms.
    pub fn latency(&self, disk_pid: u32) -> DiskLatency {
        let c = self.counters();
        let of = |histogram: &Histogram| histogram.buckets().collect::<LatencyHistogram>();
        DiskLatency {
            disk_pid,
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
        let _ = unsafe { rustix::mm::munmap(self.base, LEN) };
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

fn sums(c: &Counters) -> Latencies {
    let sum = |h: &Histogram| Latency { count: h.count(), sum_ns: h.sum_ns(), ..Latency::default() };
    let chunk = Latency { p99_ns: c.chunk_latency.quantile_ns(0.99), ..sum(&c.chunk_latency) };
    Latencies { read: sum(&c.read_latency), write: sum(&c.write_latency), chunk, ..Latencies::default() }
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
    use super::*;
    use rustix::fs::{MemfdFlags, fcntl_add_seals, ftruncate, memfd_create};
    use std::os::fd::OwnedFd;

    fn memory(len_bytes: u64, seals: SealFlags) -> OwnedFd {
        let memory = memfd_create("meta", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&memory, len_bytes).unwrap();
        fcntl_add_seals(&memory, seals).unwrap();
        memory
    }

    /// What a disk of this version has at its beginning.
    fn made() -> OwnedFd {
        let memory = memory(1 << 20, SealFlags::SHRINK);
        for (at, word) in [
            (std::mem::offset_of!(Header, magic), MAGIC),
            (std::mem::offset_of!(Header, layout_version), LAYOUT_VERSION),
        ] {
            rustix::io::pwrite(&memory, &word.to_ne_bytes(), at as u64).unwrap();
        }
        memory
    }

    #[test]
    fn memory_that_could_go_or_is_of_something_else_is_not_read() {
        let short = memory(LEN as u64 - 1, SealFlags::SHRINK);
        assert!(matches!(Window::open(&short), Err(WindowError::TooShort { .. })));
        assert!(matches!(Window::open(memory(1 << 20, SealFlags::GROW)), Err(WindowError::NotSealed)));
        let (end, _other) = rustix::pipe::pipe().unwrap();
        assert!(Window::open(end).is_err());
        assert!(Window::open(made()).unwrap().is_of_this_version());
        let empty = Window::open(memory(LEN as u64, SealFlags::SHRINK)).unwrap();
        assert!(!empty.is_of_this_version() && empty.generation() == 0);
        for at in [std::mem::offset_of!(Header, magic), std::mem::offset_of!(Header, layout_version)] {
            let other = made();
            rustix::io::pwrite(&other, &1u64.to_ne_bytes(), at as u64).unwrap();
            assert!(!Window::open(other).unwrap().is_of_this_version());
        }
    }

    #[test]
    fn the_keys_that_were_promised_are_there() {
        let meta = made();
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
        let meta = made();
        let window = Window::open(&meta).unwrap();
        let at = Layout::COUNTERS_AT + std::mem::offset_of!(Counters, ram_peak_bytes) as u64;
        rustix::io::pwrite(&meta, &77u64.to_ne_bytes(), at).unwrap();
        assert_eq!(window.read().ram.peak_bytes, 77);
    }
    #[test]
    fn each_histogram_has_its_own_counts() {
        let meta = made();
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
        let found = window.latency(7);
        assert_eq!(found.disk_pid, 7);
        let (all, sums) = (window.read().latency, window.read_sums().latency);
        for (of, with) in [(&all.read, &sums.read), (&all.write, &sums.write), (&all.chunk, &sums.chunk)] {
            assert_eq!((of.count, of.sum_ns), (with.count, with.sum_ns));
        }
        assert_eq!((all.chunk.p99_ns, all.chunk.count, all.write.count), (sums.chunk.p99_ns, 15, 11));
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
