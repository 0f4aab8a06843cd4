//! Memory pressure: when the host is short of memory, caches first give back what they have above their guarantees. Owns
//! the share of that which they may currently use.
//!
//! Invariant: no cache shrinks below its guarantee, and all grow back when memory is available again.

use super::budget::Need;
use std::fs;
use std::io;

/// The whole share above the guarantee.
const WHOLE: u32 = 1000;
/// Smallest cache that works.
const LEAST_BYTES: u64 = 1 << 20;

/// Share that caches may use of what is above their guarantees, in thousandths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachePressure(u32);

impl Default for CachePressure {
    fn default() -> CachePressure {
        CachePressure(WHOLE)
    }
}

impl CachePressure {
    /// Current limit of a cache.
    pub fn limit_bytes(self, need: Need) -> u64 {
        let above = need.limit_bytes.saturating_sub(need.guarantee_bytes);
        let allowed = (u128::from(above) * u128::from(self.0) / u128::from(WHOLE)) as u64;
        (need.guarantee_bytes + allowed).max(LEAST_BYTES).min(need.limit_bytes) & !4095
    }

    /// Share one second later, given the available memory: a quarter less while there is too little, a twentieth more
    /// when there is clearly enough.
    pub fn after(self, available_bytes: u64, floor_bytes: u64) -> CachePressure {
        if available_bytes < floor_bytes {
            CachePressure(self.0 * 3 / 4)
        } else if available_bytes > floor_bytes.saturating_add(floor_bytes / 4) {
            CachePressure((self.0 + WHOLE / 20).min(WHOLE))
        } else {
            self
        }
    }

    /// Whether caches are currently reduced.
    pub fn is_on(self) -> bool {
        self.0 < WHOLE
    }
}

/// Memory that is available without swapping, by the kernel's estimate (proc(5)).
pub fn available_bytes() -> io::Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.map(|kib| kib << 10).ok_or_else(|| io::Error::other("/proc/meminfo has no MemAvailable"))
}

/// Whether the host swaps: a cache in memory may then be slower than none.
pub fn has_swap() -> bool {
    // The first line is a title.
    fs::read_to_string("/proc/swaps").is_ok_and(|text| text.lines().count() > 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caches_shrink_to_their_guarantee_and_come_back() {
        let need = Need { guarantee_bytes: 64 << 20, limit_bytes: 256 << 20, ..Need::default() };
        let none = Need { limit_bytes: 256 << 20, ..Need::default() };
        let mut squeeze = CachePressure::default();
        assert_eq!((squeeze.limit_bytes(need), squeeze.is_on()), (256 << 20, false));
        squeeze = squeeze.after(9, 10);
        assert_eq!((squeeze.limit_bytes(need), squeeze.is_on()), ((64 + 144) << 20, true));
        // Just above the floor nothing changes, so that it does not swing.
        assert_eq!(squeeze.after(11, 10), squeeze);
        for _ in 0..100 {
            let before = squeeze.limit_bytes(need);
            squeeze = squeeze.after(0, 10);
            assert!(squeeze.limit_bytes(need) <= before);
        }
        assert_eq!((squeeze.limit_bytes(need), squeeze.limit_bytes(none)), (64 << 20, LEAST_BYTES));
        for _ in 0..20 {
            squeeze = squeeze.after(100, 10);
        }
        assert_eq!((squeeze.limit_bytes(need), squeeze.is_on()), (256 << 20, false));
        assert_eq!(squeeze.limit_bytes(Need { limit_bytes: 64 << 10, ..Need::default() }), 64 << 10);
    }

    #[test]
    fn the_host_says_what_is_available() {
        assert!(available_bytes().unwrap() > 1 << 20);
    }
}
