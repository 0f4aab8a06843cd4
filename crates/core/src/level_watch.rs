//! The level of the write cache that was told last.
//!
//! Invariant: one event for each crossing of a threshold.

use crate::error::DiskError;
use crate::io::{Event, Io};
use crate::level::{Level, Thresholds};
use spillway_layout::{Counters, get, set};

/// Tells of levels.
pub(crate) struct LevelWatch {
    thresholds: Thresholds,
    level: Level,
}

impl LevelWatch {
    /// What an earlier process has told of is not told again.
    pub fn adopt(c: &Counters) -> LevelWatch {
        LevelWatch { thresholds: Thresholds::default(), level: Level::of(get(&c.level)) }
    }

    pub fn set_thresholds(&mut self, thresholds: Thresholds) -> Result<(), DiskError> {
        thresholds.check()?;
        self.thresholds = thresholds;
        Ok(())
    }

    /// Tells of another level, now that this much is used.
    pub fn watch<I: Io>(&mut self, io: &mut I, c: &Counters, used: u64, total: u64) {
        let level = self.thresholds.level(used, total, self.level);
        if level != self.level {
            self.level = level;
            set(&c.level, level as u64);
            io.event(Event::Level(level, (used * 100 / total.max(1)).min(100) as u8));
        }
    }
}
