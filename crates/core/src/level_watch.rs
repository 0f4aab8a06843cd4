//! Watches the level of the write cache, and sends an event when it changes.
//!
//! Invariant: one event for each crossing of a threshold.

use crate::error::DiskError;
use crate::io::{Event, Io};
use crate::level::{Level, Thresholds};
use spillway_layout::{Counters, get, set};

/// The level of the last event.
pub(crate) struct LevelWatch {
    thresholds: Thresholds,
    level: Level,
}

impl LevelWatch {
    /// Takes over the level of the last event of an earlier process, which is not sent again.
    pub fn adopt(c: &Counters) -> LevelWatch {
        LevelWatch { thresholds: Thresholds::default(), level: Level::of(get(&c.level)) }
    }

    pub fn set_thresholds(&mut self, thresholds: Thresholds) -> Result<(), DiskError> {
        thresholds.check()?;
        self.thresholds = thresholds;
        Ok(())
    }

    /// Sends an event if the level has changed, now that this much is used.
    pub fn watch<I: Io>(&mut self, io: &mut I, c: &Counters, used: u64, total: u64) {
        let level = self.thresholds.level(used, total, self.level);
        if level != self.level {
            self.level = level;
            set(&c.level, level as u64);
            io.event(Event::Level(level, (used * 100 / total.max(1)).min(100) as u8));
        }
    }
}
