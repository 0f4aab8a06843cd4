//! Space in stores: how full they are, and when they will be full. Owns the recent readings.
//!
//! Invariant: reaching a level raises one event, and a level is left only when there is clearly more space again.

use spillway_api::{Space, SpaceLevel};
use spillway_control::bytes;
use std::collections::VecDeque;
use std::path::Path;
use std::time::{Duration, Instant};

const WARNING_PERCENT: u64 = 80;
const CRITICAL_PERCENT: u64 = 90;
/// On a large file system a tenth is much: with more free space than this there is no warning.
const WARNING_BYTES: u64 = 64 << 30;
const CRITICAL_BYTES: u64 = 16 << 30;
/// Hysteresis: a level is left this far below its threshold.
const CLEARLY_PERCENT: u64 = 2;
/// Period of readings that the forecast uses.
const WINDOW: Duration = Duration::from_secs(300);
/// A shorter period is not enough for a forecast.
const LEAST_WINDOW: Duration = Duration::from_secs(20);

/// Recent readings of a store.
#[derive(Debug, Default)]
pub struct SpaceHistory {
    seen: VecDeque<(Instant, u64)>,
    level: SpaceLevel,
}

impl SpaceHistory {
    /// Adds a reading. Returns the state of the store, and whether its level has changed.
    pub fn look(&mut self, now: Instant, total_bytes: u64, free_bytes: u64) -> (Space, bool) {
        self.seen.push_back((now, free_bytes));
        while self.seen.front().is_some_and(|(at, _)| now.duration_since(*at) > WINDOW) {
            self.seen.pop_front();
        }
        let level = level(self.level, total_bytes, free_bytes);
        let changed = level != self.level;
        self.level = level;
        let space =
            Space { total_bytes, free_bytes, level, seconds_to_full: self.seconds_to_full(now, free_bytes) };
        (space, changed)
    }

    /// Time until the store is full at its recent rate.
    fn seconds_to_full(&self, now: Instant, free_bytes: u64) -> Option<u64> {
        let (at, free_then) = self.seen.front()?;
        let elapsed = now.duration_since(*at);
        let filled = free_then.checked_sub(free_bytes).filter(|filled| *filled > 0)?;
        let seconds = u128::from(free_bytes) * elapsed.as_millis() / u128::from(filled) / 1000;
        (elapsed >= LEAST_WINDOW).then_some(u64::try_from(seconds).unwrap_or(u64::MAX))
    }
}

fn level(before: SpaceLevel, total_bytes: u64, free_bytes: u64) -> SpaceLevel {
    let used = u128::from(total_bytes.saturating_sub(free_bytes));
    let is = |level: SpaceLevel, percent: u64, least_bytes: u64| {
        // A level is left only when there is clearly more space.
        let (percent, least_bytes) = match before >= level {
            true => (percent - CLEARLY_PERCENT, least_bytes + least_bytes / 8),
            false => (percent, least_bytes),
        };
        used * 100 >= u128::from(total_bytes) * u128::from(percent) && free_bytes < least_bytes
    };
    if total_bytes == 0 {
        SpaceLevel::Normal
    } else if is(SpaceLevel::Critical, CRITICAL_PERCENT, CRITICAL_BYTES) {
        SpaceLevel::Critical
    } else if is(SpaceLevel::Warning, WARNING_PERCENT, WARNING_BYTES) {
        SpaceLevel::Warning
    } else {
        SpaceLevel::Normal
    }
}

/// Total size of a file system, and the free space for us.
pub fn of(path: &Path) -> std::io::Result<(u64, u64)> {
    let stat = rustix::fs::statvfs(path)?;
    Ok((stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize))
}

/// Describes the space for people.
pub fn words(space: &Space) -> String {
    let left = format!("{} of {} are left", bytes(space.free_bytes), bytes(space.total_bytes));
    let when = space.seconds_to_full.map(|seconds| match seconds {
        0..60 => ", full in less than a minute".into(),
        60..7200 => format!(", full in {} minutes", seconds / 60),
        _ => format!(", full in {} hours", seconds / 3600),
    });
    match space.level {
        SpaceLevel::Normal => format!("there is space again: {left}"),
        SpaceLevel::Warning => format!("warning: {left}{}", when.unwrap_or_default()),
        SpaceLevel::Critical => {
            format!("critical: {left}{}: no machines are given away", when.unwrap_or_default())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_told_once_and_time_is_forecast() {
        let mut history = SpaceHistory::default();
        let begun = Instant::now();
        let mut told = Vec::new();
        for (second, free) in
            [500, 400, 300, 200, 150, 90, 95, 105, 110, 121, 150, 190, 210, 221].into_iter().enumerate()
        {
            let (space, changed) = history.look(begun + Duration::from_secs(10 * second as u64), 1000, free);
            if changed {
                told.push((space.level, free));
            }
            match second {
                1 => assert_eq!(space.seconds_to_full, None, "too early to tell"),
                // 300 in 30 s, and 200 are left.
                3 => assert_eq!(space.seconds_to_full, Some(20)),
                _ => {}
            }
        }
        let expected = [
            (SpaceLevel::Warning, 200),
            (SpaceLevel::Critical, 90),
            (SpaceLevel::Warning, 121),
            (SpaceLevel::Normal, 221),
        ];
        assert_eq!(told, expected);
        let gib = 1 << 30;
        assert_eq!(level(SpaceLevel::Normal, 4096 * gib, 100 * gib), SpaceLevel::Normal, "much is left");
        assert_eq!(level(SpaceLevel::Normal, 4096 * gib, 50 * gib), SpaceLevel::Warning);
        assert_eq!(level(SpaceLevel::Normal, 4096 * gib, 10 * gib), SpaceLevel::Critical);
        // What happened long ago tells nothing.
        let (space, _) = history.look(begun + Duration::from_secs(3600), 1000, 221);
        assert_eq!(space.seconds_to_full, None);
    }
}
