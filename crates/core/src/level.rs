//! The fill level of the write cache for people: normal, warning, critical. Owns the thresholds; never affects a write.
//!
//! Invariant: a level ends only some per cent below its threshold (hysteresis).

use crate::error::DiskError;

/// Per cent below its threshold at which a level ends, so that a cache around the threshold causes one event.
const HYSTERESIS_PERCENT: u8 = 5;

/// A level of the write cache, of both tiers together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Level {
    /// Below the thresholds.
    Normal = 0,
    /// Above the first one.
    Warning = 1,
    /// Above the second one.
    Critical = 2,
}

/// Where levels begin, in per cent of what the write cache may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thresholds {
    /// Of [`Level::Warning`].
    pub warning_percent: u8,
    /// Of [`Level::Critical`].
    pub critical_percent: u8,
}

impl Default for Thresholds {
    fn default() -> Self {
        Thresholds { warning_percent: 80, critical_percent: 90 }
    }
}

impl Thresholds {
    /// Refuses invalid thresholds.
    ///
    /// # Errors
    /// They are not in order, or not within 1 and 100.
    pub fn check(&self) -> Result<(), DiskError> {
        let Thresholds { warning_percent: warning, critical_percent: critical } = *self;
        if warning >= 1 && warning <= critical && critical <= 100 {
            return Ok(());
        }
        Err(DiskError::Spec(format!(
            "a warning at {warning}% and critical at {critical}%: both are 1 to 100, the warning first"
        )))
    }

    pub(crate) fn level(&self, used: u64, total: u64, before: Level) -> Level {
        let above = |percent: u8| used * 100 >= total * u64::from(percent);
        let reached = |level: Level, percent: u8| {
            above(percent) || before >= level && above(percent.saturating_sub(HYSTERESIS_PERCENT))
        };
        match () {
            () if reached(Level::Critical, self.critical_percent) => Level::Critical,
            () if reached(Level::Warning, self.warning_percent) => Level::Warning,
            () => Level::Normal,
        }
    }
}

impl Level {
    /// From its gauge; an unknown number is normal.
    pub(crate) fn of(gauge: u64) -> Level {
        match gauge {
            1 => Level::Warning,
            2 => Level::Critical,
            _ => Level::Normal,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_crossing_is_one_and_small_waves_are_none() {
        let thresholds = Thresholds::default();
        let mut level = Level::Normal;
        let mut crossings = Vec::new();
        let up = [0, 79, 80, 79, 81, 76, 89, 90, 89, 86, 91];
        let down = [85, 84, 79, 76, 75, 74, 79, 74, 0, 100, 0];
        for percent in up.into_iter().chain(down) {
            let next = thresholds.level(percent, 100, level);
            if next != level {
                crossings.push((percent, next));
            }
            level = next;
        }
        let expected = [
            (80, Level::Warning),
            (90, Level::Critical),
            (84, Level::Warning),
            (74, Level::Normal),
            (100, Level::Critical),
            (0, Level::Normal),
        ];
        assert_eq!(crossings, expected);
    }

    #[test]
    fn thresholds_that_make_no_sense_are_refused() {
        for (warning_percent, critical_percent) in [(0, 90), (90, 80), (80, 101)] {
            assert!(Thresholds { warning_percent, critical_percent }.check().is_err());
        }
        Thresholds { warning_percent: 100, critical_percent: 100 }.check().unwrap();
    }
}
