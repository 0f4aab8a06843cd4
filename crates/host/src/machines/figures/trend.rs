//! What a write cache held in the last half minute, and when it will be full if it goes on so: by the rule of `spillway top`.
//!
//! Invariant: at most eight readings are kept, whoever asks how often.

use spillway_api::DiskLevels;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// How far back growth is looked at.
const SPAN: Duration = Duration::from_secs(30);
/// Least time between two readings that are kept.
const STEP: Duration = Duration::from_secs(5);

/// Bytes that a write cache held, with their times, oldest first.
#[derive(Clone, Debug, Default)]
pub struct FillTrend(VecDeque<(Instant, u64)>);

impl FillTrend {
    /// Adds what the cache holds now. Returns the seconds until it is full; `None` if it does not grow.
    pub fn add(&mut self, now: Instant, levels: &DiskLevels) -> Option<u64> {
        let age = |at: Instant| now.saturating_duration_since(at);
        while self.0.get(1).is_some_and(|(at, _)| age(*at) >= SPAN) {
            self.0.pop_front();
        }
        let oldest = self.0.front();
        let to_full = oldest.and_then(|(at, was)| levels.seconds_to_full(*was, age(*at).as_secs_f64()));
        if self.0.back().is_none_or(|(at, _)| age(*at) >= STEP) {
            self.0.push_back((now, levels.used_bytes()));
        }
        to_full
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_of_the_last_half_minute_goes_on() {
        let begun = Instant::now();
        let mut trend = FillTrend::default();
        let mut at = |tenths: u64, used: u64| {
            let now = begun + Duration::from_millis(tenths * 100);
            let limits = DiskLevels {
                ram_limit_bytes: 600,
                overflow_limit_bytes: 400,
                ram_used_bytes: used.min(600),
                overflow_used_bytes: used.saturating_sub(600),
                ..DiskLevels::default()
            };
            (trend.add(now, &limits), trend.0.len())
        };
        assert_eq!(at(0, 100), (None, 1));
        assert_eq!(at(20, 120), (Some(88), 1), "10 each second, and 880 are left");
        for tenths in 21..300 {
            assert!(at(tenths, 120).1 <= 8);
        }
        // What grew more than half a minute ago counts no longer.
        assert_eq!(at(360, 120).0, None);
        assert_eq!(at(410, 720).0, Some(14), "600 in 31 s, and 280 are left");
        assert_eq!(at(420, 50).0, None, "it was reset");
        assert_eq!(at(430, 1000).0, Some(0));
    }
}
