//! What those who listen believe of the disk's states. Owns what was told last; the states themselves are the worker's.
//!
//! Invariant: what a worker found out and died with before it was told is told when the next one serves.

use spillway_control::Stats;

/// Of each state its events, by the gauge's value.
const TOLD: [&[(&str, &str)]; 3] = [
    &[
        ("normal", "the write cache is back to normal"),
        ("warning", "warning: much of the write cache is used"),
        ("critical", "critical: most of the write cache is used"),
    ],
    &[
        ("room", "the write cache has room again"),
        ("full", "the write cache is full: writes that need room wait or fail"),
    ],
    &[
        ("recovered", "no longer degraded: the overflow file can be written again"),
        ("degraded", "degraded: writes to the overflow file go on failing; check that disk"),
    ],
];

/// The states as they were told last, by their gauges' values.
#[derive(Debug, Default)]
pub(super) struct ReportedStates([usize; 3]);

impl ReportedStates {
    /// This is told. False: of a state, and what they believe already, as the gauge was seen before the worker's event.
    pub fn note(&mut self, kind: &str) -> bool {
        let mut new = true;
        for (reported, events) in self.0.iter_mut().zip(TOLD) {
            if let Some(state) = events.iter().position(|(name, _)| *name == kind) {
                new = *reported != state;
                *reported = state;
            }
        }
        new
    }

    /// What is not as they believe: kind and words.
    pub fn wrong(&self, stats: &Stats) -> Vec<(&'static str, &'static str)> {
        let gauges = [stats.level, stats.is_full, stats.degraded];
        let states = self.0.iter().zip(TOLD).zip(gauges);
        let wrong = states.filter_map(|((&reported, events), gauge)| {
            events.get(gauge as usize).filter(|_| gauge as usize != reported)
        });
        wrong.copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_told_is_told_and_nothing_else() {
        let mut reported = ReportedStates::default();
        let mut stats = Stats::default();
        assert_eq!(reported.wrong(&stats), []);
        let told = ["critical", "full", "full", "notice", "room", "notice", "room"];
        assert_eq!(told.map(|kind| reported.note(kind)), [true, true, false, true, true, true, false]);
        (stats.level, stats.is_full, stats.degraded) = (2, 0, 1);
        assert_eq!(reported.wrong(&stats), [TOLD[2][1]]);
        (stats.level, stats.is_full) = (0, 1);
        assert_eq!(reported.wrong(&stats), [TOLD[0][0], TOLD[1][1], TOLD[2][1]]);
        stats.level = 77;
        assert_eq!(reported.wrong(&stats).len(), 2, "what cannot be is not told");
    }
}
