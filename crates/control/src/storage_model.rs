//! A storage model: one imagined device that all disks which stand on it share, in a file that they map. It says when a
//! request to the store would have been done there; who does the real one waits until then.
//!
//! Owns the arithmetic and the shared state, which is five words, each changed by one compare-and-swap: a process
//! may be killed between any two instructions and leaves nothing half done. Invariants: the device does one seek at a time; in any
//! stretch of time it moves no more than its bandwidth and its burst allow; time never goes back. Whatever is in the file, the
//! arithmetic ends at its bounds: it may make a disk slow, and no more.

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use serde::Serialize;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};

const MAGIC: u64 = u64::from_le_bytes(*b"SPLWMODL");
const LEN: usize = 4096;
/// Bits of the device's time, in units of about a microsecond: nine years since the host's start. Above them is where its head is.
const TIME_BITS: u32 = 48;
const UNIT_NS: u64 = 1024;
const NS_PER_SECOND: u64 = 1_000_000_000;

/// Limits of a simulated device. A limit of 0 is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Parameters {
    /// Time that each request takes in addition, for any number of requests at once.
    pub latency_ns: u64,
    /// Time of a seek, before a request that does not begin where the last one ended. Such a device serves one request
    /// at a time.
    pub seek_ns: u64,
    /// Bytes a second.
    pub bandwidth_bytes: u64,
    /// Bytes that may pass beyond that after a rest, as a new device has had one.
    pub bandwidth_burst_bytes: u64,
    /// Bytes a second in a burst; 0: all of it at once.
    pub bandwidth_peak_bytes: u64,
    /// Requests a second.
    pub iops: u64,
    /// Requests that may pass beyond that after a rest.
    pub iops_burst: u64,
    /// Requests a second in a burst; 0: all of it at once.
    pub iops_peak: u64,
}

/// The models that have names.
pub const NAMED: [(&str, &str, Parameters); 5] = [
    (
        "hdd-seed-004",
        "a disk of 459 random requests a second, and 35 MB/s in order",
        Parameters {
            // 1 / 459 s, less what 4 KiB take.
            seek_ns: NS_PER_SECOND / 459 - 4096 * NS_PER_SECOND / 35_000_000,
            bandwidth_bytes: 35_000_000,
            ..NONE
        },
    ),
    (
        "filer-1600-iops",
        "a filer that gives 1,600 requests a second",
        Parameters { latency_ns: 500_000, iops: 1600, ..NONE },
    ),
    (
        "premium-disk-p10",
        "a cloud's disk: 500 requests and 100 MB a second, or 3,500 and 170 MB for half an hour after a rest",
        Parameters {
            latency_ns: 1_000_000,
            iops: 500,
            iops_burst: (3500 - 500) * 1800,
            iops_peak: 3500,
            bandwidth_bytes: 100_000_000,
            bandwidth_burst_bytes: 70_000_000 * 1800,
            bandwidth_peak_bytes: 170_000_000,
            ..NONE
        },
    ),
    (
        "sata-ssd",
        "an SSD on SATA: 80 us, 90,000 requests and 520 MB a second",
        Parameters { latency_ns: 80_000, iops: 90_000, bandwidth_bytes: 520_000_000, ..NONE },
    ),
    (
        "nvme",
        "an NVMe disk: 20 us, 500,000 requests and 3 GB a second",
        Parameters { latency_ns: 20_000, iops: 500_000, bandwidth_bytes: 3_000_000_000, ..NONE },
    ),
];

const NONE: Parameters = Parameters {
    latency_ns: 0,
    seek_ns: 0,
    bandwidth_bytes: 0,
    bandwidth_burst_bytes: 0,
    bandwidth_peak_bytes: 0,
    iops: 0,
    iops_burst: 0,
    iops_peak: 0,
};

impl Parameters {
    /// Encodes the limits as in the file.
    fn words(&self) -> [u64; 8] {
        let p = self;
        let (bytes, burst, peak) = (p.bandwidth_bytes, p.bandwidth_burst_bytes, p.bandwidth_peak_bytes);
        [p.latency_ns, p.seek_ns, bytes, burst, peak, p.iops, p.iops_burst, p.iops_peak]
    }

    fn of(words: [u64; 8]) -> Parameters {
        let [latency_ns, seek_ns, bandwidth_bytes, bandwidth_burst_bytes, bandwidth_peak_bytes, ..] = words;
        let [.., iops, iops_burst, iops_peak] = words;
        Parameters {
            latency_ns,
            seek_ns,
            bandwidth_bytes,
            bandwidth_burst_bytes,
            bandwidth_peak_bytes,
            iops,
            iops_burst,
            iops_peak,
        }
    }
}

/// Content of the file, which all disks that use it map.
#[repr(C)]
struct Shared {
    magic: AtomicU64,
    parameters: [AtomicU64; 8],
    /// The kernel whose clock the times below are by; 0: none yet.
    boot_id: [AtomicU64; 2],
    /// Until when the head is busy, and where it is then.
    head: AtomicU64,
    /// Until when what has passed is paid for: requests, and bytes.
    requests: AtomicU64,
    bytes: AtomicU64,
    /// The limits that apply during a burst.
    peak_requests: AtomicU64,
    peak_bytes: AtomicU64,
}

/// Why a file cannot be used as a storage model.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The file is shorter than a model.
    #[error("it has {found} bytes, fewer than a storage model")]
    TooShort {
        /// Length of the file, in bytes.
        found: u64,
    },
    /// The file does not contain a model.
    #[error("it begins with other bytes than a storage model")]
    NoModel,
    /// The host does not let it be measured or mapped.
    #[error("it cannot be mapped: {0}")]
    Map(#[from] Errno),
}

/// A device, mapped.
pub struct Model {
    shared: *const Shared,
    parameters: Parameters,
}

// SAFETY: an address that is valid wherever it is used, until `drop`; what is there is atomics.
unsafe impl Send for Model {}

impl Model {
    /// Returns the content of a new model's file.
    pub fn file(parameters: Parameters) -> Vec<u8> {
        let words = [[MAGIC].as_slice(), &parameters.words()].concat();
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        bytes.resize(LEN, 0);
        bytes
    }

    /// Maps a model's file. A program that changes the file can make the disks that use it slow. A program that
    /// truncates it ends the workers of these disks.
    pub fn open(file: impl AsFd) -> Result<Model, ModelError> {
        let found = rustix::fs::fstat(&file)?.st_size as u64;
        if found < LEN as u64 {
            return Err(ModelError::TooShort { found });
        }
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), LEN, prot, flags, file, 0) }?;
        let mut model = Model { shared: base.cast_const().cast(), parameters: NONE };
        let word = |word: &AtomicU64| word.load(Ordering::Relaxed);
        if word(&model.shared().magic) != MAGIC {
            return Err(ModelError::NoModel);
        }
        model.parameters = Parameters::of(model.shared().parameters.each_ref().map(word));
        Ok(model)
    }

    /// For who hands the file to workers, before that. With another start of the host (or one that is not known) time began
    /// anew: what is owed by the old one's is nothing now.
    pub fn begin_boot(&self, boot_id: Option<[u8; 16]>) {
        let number = u128::from_ne_bytes(boot_id.unwrap_or_default());
        let Shared { boot_id: words, head, requests, bytes, peak_requests, peak_bytes, .. } = self.shared();
        let now = [number as u64, (number >> 64) as u64];
        if number == 0 || words.each_ref().map(|word| word.load(Ordering::Relaxed)) != now {
            let times = [head, requests, bytes, peak_requests, peak_bytes];
            times.into_iter().for_each(|word| word.store(0, Ordering::Relaxed));
            words.iter().zip(now).for_each(|(word, now)| word.store(now, Ordering::Relaxed));
        }
    }

    fn shared(&self) -> &Shared {
        // SAFETY: mapped until `drop`, aligned to a page; any bits are numbers.
        unsafe { &*self.shared }
    }

    /// Limits of the device.
    pub fn parameters(&self) -> Parameters {
        self.parameters
    }

    /// Bytes of a file are asked for now, in so many requests: when that would be done, on the same clock.
    pub fn begin(&self, now_ns: u64, file: u64, offset: u64, len: u64, requests: u64) -> u64 {
        let p = &self.parameters;
        let moving = cost(len, p.bandwidth_bytes);
        let mut done = now_ns;
        if p.seek_ns > 0 {
            done = self.seek(now_ns, file, offset, len, moving);
        } else if moving > 0 {
            let burst = cost(p.bandwidth_burst_bytes, p.bandwidth_bytes);
            done = pass(&self.shared().bytes, now_ns, moving, burst);
            if p.bandwidth_peak_bytes > 0 {
                let at_peak = cost(len, p.bandwidth_peak_bytes);
                done = done.max(pass(&self.shared().peak_bytes, now_ns, at_peak, 0));
            }
        }
        if p.iops > 0 && requests > 0 {
            let (all, burst) = (cost(requests, p.iops), cost(p.iops_burst, p.iops));
            done = done.max(pass(&self.shared().requests, now_ns, all, burst));
            if p.iops_peak > 0 {
                let at_peak = cost(requests, p.iops_peak);
                done = done.max(pass(&self.shared().peak_requests, now_ns, at_peak, 0));
            }
        }
        done.saturating_add(p.latency_ns)
    }

    /// The head goes there when it has done all else.
    fn seek(&self, now_ns: u64, file: u64, offset: u64, len: u64, moving: u64) -> u64 {
        let (from, to) = (place(file, offset), place(file, offset.wrapping_add(len)));
        let mut done = 0;
        let _ = self.shared().head.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |head| {
            let (busy, at) = ((head & ((1 << TIME_BITS) - 1)) * UNIT_NS, head >> TIME_BITS);
            let seek = if at == from { 0 } else { self.parameters.seek_ns };
            done = busy.max(now_ns).saturating_add(seek).saturating_add(moving);
            Some(done.div_ceil(UNIT_NS) & ((1 << TIME_BITS) - 1) | to << TIME_BITS)
        });
        done
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        // SAFETY: our own mapping, of which no reference is left.
        let _ = unsafe { rustix::mm::munmap(self.shared.cast_mut().cast(), LEN) };
    }
}

/// Time that this number of units takes at a rate of units per second.
fn cost(units: u64, per_second: u64) -> u64 {
    match per_second {
        0 => 0,
        _ => u64::try_from(u128::from(units) * u128::from(NS_PER_SECOND) / u128::from(per_second))
            .unwrap_or(u64::MAX),
    }
}

/// A place on the device, in 16 bits: two that differ are the same once in 65,536.
fn place(file: u64, offset: u64) -> u64 {
    (file.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (offset / 512).wrapping_mul(0xC2B2_AE3D_27D4_EB4F))
        >> TIME_BITS
}

/// Admits a request of this cost, and returns when it is done: at once while the debt is below the burst, else when the
/// debt has fallen to it.
fn pass(until: &AtomicU64, now_ns: u64, cost_ns: u64, burst_ns: u64) -> u64 {
    let mut done = 0;
    let _ = until.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |owed_until| {
        let next = owed_until.max(now_ns).saturating_add(cost_ns);
        // Without debt the request passes at once.
        done = next.saturating_sub(burst_ns.max(cost_ns)).max(now_ns);
        Some(next)
    });
    done
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Seek, Write};

    fn model(name: &str) -> (std::fs::File, Model) {
        let parameters = NAMED.iter().find(|(known, ..)| *known == name).unwrap().2;
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&Model::file(parameters)).unwrap();
        let model = Model::open(&file).unwrap();
        assert_eq!(model.parameters(), parameters);
        (file, model)
    }

    /// Measures how many requests per second complete with `depth` in flight.
    fn rate(model: &Model, depth: usize, len: u64, random: bool) -> f64 {
        // When all that was asked before is done.
        let word = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let Shared { head, requests, bytes, .. } = model.shared();
        let busy = (word(head) & ((1 << TIME_BITS) - 1)) * UNIT_NS;
        let begin = busy.max(word(requests)).max(word(bytes)).max(5 * NS_PER_SECOND);
        let (mut now, mut random_at) = (begin, 1_u64);
        let mut under_way = std::collections::BinaryHeap::new();
        let mut next = 0;
        let requests = 20_000;
        for _ in 0..requests {
            while under_way.len() >= depth {
                let std::cmp::Reverse(done) = under_way.pop().unwrap();
                now = now.max(done);
            }
            random_at = random_at.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let at = if random { random_at >> 24 << 12 } else { next };
            under_way.push(std::cmp::Reverse(model.begin(now, 7, at, len, 1)));
            next = at + len;
        }
        let last = under_way.into_iter().map(|done| done.0).max().unwrap();
        f64::from(requests) * 1e9 / (last - begin) as f64
    }

    fn near(found: f64, expected: f64) {
        assert!((found / expected - 1.0).abs() < 0.02, "{found} and not {expected}");
    }

    #[test]
    fn each_does_what_its_name_says() {
        let (_file, disk) = model("hdd-seed-004");
        near(rate(&disk, 1, 4096, true), 459.0);
        near(rate(&disk, 64, 4096, true), 459.0);
        near(rate(&disk, 1, 1 << 20, false) * f64::from(1 << 20), 35e6);
        let (_file, filer) = model("filer-1600-iops");
        near(rate(&filer, 64, 4096, true), 1600.0);
        let (_file, ssd) = model("sata-ssd");
        near(rate(&ssd, 1, 4096, true), 1e9 / 80_000.0);
        near(rate(&ssd, 64, 4096, true), 90_000.0);
        near(rate(&ssd, 16, 1 << 20, true) * f64::from(1 << 20), 520e6);
        let (_file, nvme) = model("nvme");
        near(rate(&nvme, 1, 4096, true), 1e9 / 20_000.0);
        near(rate(&nvme, 64, 4096, true), 500_000.0);
        near(rate(&nvme, 16, 1 << 20, true) * f64::from(1 << 20), 3e9);
        let (_file, p10) = model("premium-disk-p10");
        near(rate(&p10, 256, 4096, true), 3500.0);
        near(rate(&p10, 16, 1 << 20, true) * f64::from(1 << 20), 170e6);
    }

    #[test]
    fn a_burst_is_as_long_and_as_high_as_it_may_be() {
        let burst = Parameters { iops: 500, iops_burst: 3500, ..NONE };
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&Model::file(burst)).unwrap();
        // 3,500 at once, and then 500 a second.
        near(rate(&Model::open(&file).unwrap(), 256, 4096, true), 20_000.0 / ((20_000.0 - 3500.0) / 500.0));
        let peak = Parameters { iops_peak: 1000, ..burst };
        file.rewind().unwrap();
        file.write_all(&Model::file(peak)).unwrap();
        // Twice as fast as by itself until 3,500 more than by itself have passed: 7,000 in 7 s.
        near(rate(&Model::open(&file).unwrap(), 256, 4096, true), 20_000.0 / (7.0 + 13_000.0 / 500.0));
    }

    #[test]
    fn who_shares_a_device_shares_what_it_can_do() {
        let (file, one) = model("hdd-seed-004");
        let other = Model::open(&file).unwrap();
        let now = NS_PER_SECOND;
        let done: Vec<u64> =
            (0..100).map(|i| [&one, &other][i % 2].begin(now, i as u64, 1 << 30, 4096, 1)).collect();
        assert!(done.windows(2).all(|pair| pair[1] > pair[0]));
        near((done[99] - now) as f64, 100.0 * 1e9 / 459.0);
        // Two that read in order, in turn, seek each time.
        let begin = done[99];
        let last = (0..100).map(|i| one.begin(begin, i % 2, i / 2 * 4096, 4096, 1)).max().unwrap();
        near((last - begin) as f64, 100.0 * 1e9 / 459.0);
    }

    #[test]
    fn time_begins_anew_with_the_host() {
        let (_file, disk) = model("hdd-seed-004");
        disk.begin_boot(Some([1; 16]));
        // A host that has run for four years.
        let long = disk.begin(1 << 57, 7, 0, 1 << 30, 1);
        assert!(long > 1 << 57);
        assert!(disk.begin(1 << 57, 7, 1 << 40, 4096, 1) > long, "one at a time");
        disk.begin_boot(Some([1; 16]));
        assert!(disk.begin(1000, 7, 0, 4096, 1) > long, "the same start: what is owed stays");
        disk.begin_boot(Some([2; 16]));
        assert!(disk.begin(1000, 7, 0, 4096, 1) < NS_PER_SECOND);
        disk.begin_boot(None);
        assert!(disk.begin(1000, 7, 0, 4096, 1) < NS_PER_SECOND);
    }

    #[test]
    fn a_file_of_any_numbers_is_borne() {
        let mut file = tempfile::tempfile().unwrap();
        for seek_ns in [0, u64::MAX] {
            let most = u64::MAX;
            let all = Parameters {
                latency_ns: most,
                seek_ns,
                bandwidth_bytes: 1,
                bandwidth_burst_bytes: most,
                bandwidth_peak_bytes: 1,
                iops: 1,
                iops_burst: most,
                iops_peak: 1,
            };
            file.rewind().unwrap();
            file.write_all(&Model::file(all)).unwrap();
            let model = Model::open(&file).unwrap();
            let Shared { head, requests, bytes, .. } = model.shared();
            [head, requests, bytes].into_iter().for_each(|word| word.store(most, Ordering::Relaxed));
            assert_eq!(model.begin(most, most, most, most, most), most);
        }
    }

    #[test]
    fn what_is_no_model_is_refused() {
        let mut file = tempfile::tempfile().unwrap();
        assert!(matches!(Model::open(&file), Err(ModelError::TooShort { found: 0 })));
        file.write_all(&[7; LEN]).unwrap();
        assert!(matches!(Model::open(&file), Err(ModelError::NoModel)));
    }
}
