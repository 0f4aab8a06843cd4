//! Estimates of what a curve cannot say: what the collector of the overflow log would write again, and how much would have to
//! wait for the disk. By formulas, not by counting; [`Estimate`] says so wherever it is shown.
//!
//! Invariant: more overflow, or more bandwidth, never makes an estimate worse.

use crate::curve::Point;
use crate::event::{BLOCK_BYTES, Event, Operation};
use serde::{Deserialize, Serialize};

/// Bytes of a segment. Of all segments 8, or a twentieth, are the reserve and hold nothing live.
const SEGMENT_BYTES: u64 = 1 << 20;
const MIN_RESERVE: u64 = 8;
/// Of a segment's 256 blocks one is a summary.
const DATA_SHARE: f64 = 255.0 / 256.0;

/// A figure that was estimated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Estimate {
    /// Estimated bytes; none where the load does not fit at all.
    pub estimated_bytes: Option<u64>,
}

/// Estimates what the collector writes again, if the overflow may take this much of the disk.
///
/// Nothing is collected before the log has used up its limit. After that the share of the emptiest segment that is still
/// live is taken to be that of uniform writes: u with (u - 1) / ln u = how full the log is at
/// its fullest. Loads with hot and cold blocks do better, so it is an upper bound for most.
pub fn collector_rewrites(point: &Point, overflow_limit_bytes: u64) -> Estimate {
    let segments = overflow_limit_bytes / SEGMENT_BYTES;
    let live_segments = segments.saturating_sub(MIN_RESERVE.max(segments / 20));
    let capacity = (live_segments * SEGMENT_BYTES) as f64 * DATA_SHARE;
    let peak = point.peak_overflow_bytes as f64;
    if peak > capacity {
        return Estimate { estimated_bytes: None };
    }
    let after = point.overflow_write_bytes.saturating_sub(segments * SEGMENT_BYTES);
    if after == 0 || peak == 0.0 {
        return Estimate { estimated_bytes: Some(0) };
    }
    let fullness = peak / ((segments * SEGMENT_BYTES) as f64 * DATA_SHARE);
    let (mut low, mut high) = (1e-9, 1.0 - 1e-9);
    for _ in 0..60 {
        let u: f64 = (low + high) / 2.0;
        if (u - 1.0) / u.ln() < fullness { low = u } else { high = u }
    }
    Estimate { estimated_bytes: Some((after as f64 * low / (1.0 - low)) as u64) }
}

/// Microseconds of a window of [`Bursts`].
const WINDOW_US: u64 = 1_000_000;

/// A histogram of what was written in each second.
#[derive(Clone, Debug, Default)]
pub struct Bursts {
    window: u64,
    blocks: u64,
    /// For each quarter of a power of two: number of seconds, and the blocks of all of them.
    cells: Vec<(u64, u64)>,
    total: u64,
}

impl Bursts {
    /// Takes the next event.
    #[inline]
    pub fn event(&mut self, event: &Event) {
        if event.operation != Operation::Write || event.len_bytes == 0 {
            return;
        }
        let window = event.time_us / WINDOW_US;
        if window != self.window {
            self.close();
            self.window = window;
        }
        let first = event.offset_bytes / BLOCK_BYTES;
        self.blocks += (event.offset_bytes + event.len_bytes).div_ceil(BLOCK_BYTES) - first;
    }

    fn close(&mut self) {
        let blocks = std::mem::take(&mut self.blocks);
        if blocks == 0 {
            return;
        }
        let power = 63 - blocks.leading_zeros();
        let quarter = (blocks << (63 - power) >> 61) & 0b11;
        let cell = power as usize * 4 + quarter as usize;
        if cell >= self.cells.len() {
            self.cells.resize(cell + 1, (0, 0));
        }
        self.cells[cell].0 += 1;
        self.cells[cell].1 += blocks;
        self.total += blocks;
    }

    /// Estimates the bytes that writes would have to wait for, where the overflow's disk takes `bandwidth_bytes` a second.
    ///
    /// Each second is taken to evict the share of its writes that the whole trace does, and what eviction keeps free takes
    /// up a burst of that size; a second's burst is not carried over to the next.
    pub fn urgent(&self, point: &Point, bandwidth_bytes: u64) -> Estimate {
        let mut all = self.clone();
        all.close();
        if all.total == 0 {
            return Estimate { estimated_bytes: Some(0) };
        }
        let share = point.overflow_write_bytes as f64 / (all.total * BLOCK_BYTES) as f64;
        let reserve = spillway_policy::kept_free(point.ram_bytes / BLOCK_BYTES) * BLOCK_BYTES;
        let without_waiting = bandwidth_bytes as f64 + reserve as f64;
        let waits = |&(seconds, blocks): &(u64, u64)| {
            let each = (blocks * BLOCK_BYTES) as f64 / seconds.max(1) as f64 * share.min(1.0);
            (each - without_waiting).max(0.0) * seconds as f64
        };
        Estimate { estimated_bytes: Some(all.cells.iter().map(waits).sum::<f64>() as u64) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(overflow_write_bytes: u64, peak_overflow_bytes: u64) -> Point {
        Point { ram_bytes: 1 << 30, overflow_write_bytes, overflow_read_bytes: 0, peak_overflow_bytes }
    }

    #[test]
    fn the_collector_has_work_only_when_the_log_was_used_up() {
        let gib = 1 << 30;
        let bytes = |p, limit| collector_rewrites(&p, limit).estimated_bytes;
        assert_eq!(bytes(point(3 * gib, gib), 4 * gib), Some(0), "it fits without");
        assert_eq!(bytes(point(90 * gib, 4 * gib), 4 * gib), None, "it does not fit at all");
        let (tight, roomy) = (bytes(point(90 * gib, 3 * gib), 4 * gib), bytes(point(90 * gib, gib), 4 * gib));
        assert!(tight > roomy && roomy > Some(0), "{tight:?} {roomy:?}");
        // Half full, the emptiest segment is a fifth full: a quarter is written again.
        let half = bytes(point(44 * gib, 2 * gib), 4 * gib).expect("it fits") as f64 / (40 * gib) as f64;
        assert!((0.2..0.3).contains(&half), "{half}");
    }

    #[test]
    fn only_bursts_wait() {
        let mut bursts = Bursts::default();
        for second in 0..100 {
            let blocks = if second == 50 { 100_000 } else { 100 };
            let event = |len_bytes| Event {
                time_us: second * WINDOW_US,
                operation: Operation::Write,
                offset_bytes: 0,
                len_bytes,
            };
            bursts.event(&event(blocks * BLOCK_BYTES));
        }
        let all = point((100_000 + 9_900) * BLOCK_BYTES, 0);
        let waits = |bandwidth| bursts.urgent(&all, bandwidth).estimated_bytes.expect("a figure");
        assert_eq!(waits(1 << 30), 0);
        let mib = 1 << 20;
        let expected = 100_000 * BLOCK_BYTES - 100 * mib - 64 * mib;
        assert_eq!(waits(100 * mib), expected);
        assert!(waits(10 * mib) > waits(100 * mib));
    }
}
