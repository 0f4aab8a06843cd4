//! When a disk has settled under a load: its rate follows no trend, and its log has been written over once.
//!
//! Owns the judgement, not the load. Invariant: a disk whose overflow still grows is not steady, however even its
//! rate: the collector, which costs later, has not begun.

use anyhow::Result;
use serde::Serialize;
use serde_json::Value;
use std::time::Duration;

/// Windows whose rates are compared: the later half with the earlier.
const WINDOWS: usize = 6;
/// How far the means of the two halves may lie apart.
const TREND: f64 = 0.05;
/// By how much an overflow file has to grow to count as growing.
const GROWTH: f64 = 0.01;

/// What the overflow file has come to.
#[derive(Clone, Copy, Debug)]
pub struct LogLevel {
    /// Bytes that the file holds, live or not.
    pub file_bytes: u64,
    /// Bytes ever written to it.
    pub written_bytes: u64,
}

impl LogLevel {
    /// From what `spillway stats --json` says.
    pub fn of(stats: &Value) -> Result<LogLevel> {
        Ok(LogLevel {
            file_bytes: crate::disk::figure(stats, "overflow.file_bytes")?,
            written_bytes: crate::disk::figure(stats, "planes.overflow.written_bytes")?,
        })
    }
}

/// Looks at one window of a load after the other.
#[derive(Debug, Default)]
pub struct Steady {
    rates: Vec<f64>,
    largest_bytes: u64,
    grown_at_bytes: u64,
}

impl Steady {
    /// Adds a window: the rate in it, and the log at its end if the disk has one. Whether the disk is steady now.
    pub fn add(&mut self, iops: f64, log: Option<LogLevel>) -> bool {
        self.rates.push(iops);
        let turned = log.is_none_or(|log| self.turned(log));
        turned && self.has_no_trend()
    }

    fn turned(&mut self, log: LogLevel) -> bool {
        if log.file_bytes as f64 > self.largest_bytes as f64 * (1.0 + GROWTH) || self.rates.len() == 1 {
            self.largest_bytes = self.largest_bytes.max(log.file_bytes);
            self.grown_at_bytes = log.written_bytes;
        }
        log.written_bytes - self.grown_at_bytes.min(log.written_bytes) >= self.largest_bytes
    }

    fn has_no_trend(&self) -> bool {
        let Some(last) = self.rates.len().checked_sub(WINDOWS).map(|from| &self.rates[from..]) else {
            return false;
        };
        let (earlier, later) = last.split_at(WINDOWS / 2);
        let (earlier, later): (f64, f64) = (earlier.iter().sum(), later.iter().sum());
        (later - earlier).abs() <= TREND * earlier
    }
}

/// How long a disk is watched until it is steady.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// One window.
    pub window: Duration,
    /// All of them.
    pub most: Duration,
}

/// How a disk settled.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Settled {
    /// Seconds of load that it took.
    pub seconds: f64,
    /// Whether it was steady then; else patience had ended.
    pub steady: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(file_bytes: u64, written_bytes: u64) -> Option<LogLevel> {
        Some(LogLevel { file_bytes, written_bytes })
    }

    #[test]
    fn an_even_rate_is_steady_and_a_falling_one_is_not() {
        let mut even = Steady::default();
        // Noise without a trend.
        let verdicts: Vec<bool> =
            [100.0, 110.0, 90.0, 91.0, 109.0, 100.0].map(|iops| even.add(iops, None)).to_vec();
        assert_eq!(verdicts, [false, false, false, false, false, true]);
        let mut falling = Steady::default();
        assert!((0..20).all(|i| !falling.add(1000.0 * 0.95f64.powi(i), None)));
    }

    #[test]
    fn a_log_that_grows_is_not_steady_and_must_turn_once_after() {
        let mut steady = Steady::default();
        assert!((1..=10).all(|i| !steady.add(100.0, log(i * 1000, i * 1000))), "it grows");
        assert!(!steady.add(100.0, log(10_000, 19_999)), "not written over yet");
        assert!(steady.add(100.0, log(10_000, 20_000)));
        // Given back in part and used again: no growth.
        assert!(steady.add(100.0, log(9_000, 21_000)));
        assert!(steady.add(100.0, log(10_000, 22_000)));
    }

    #[test]
    fn what_was_written_before_is_no_turn() {
        let mut steady = Steady::default();
        assert!((0..8).all(|_| !steady.add(100.0, log(1000, 50_000))));
        assert!(steady.add(100.0, log(1000, 51_000)));
    }

    #[test]
    fn a_log_that_is_not_used_need_not_turn() {
        let mut steady = Steady::default();
        assert_eq!((0..6).filter(|_| steady.add(100.0, log(0, 0))).count(), 1);
    }
}
