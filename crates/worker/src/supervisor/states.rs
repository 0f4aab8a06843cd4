//! The states of the disk (write cache level, full, degraded) as subscribers of events know them. Owns the states that were
//! reported last; the worker owns the states themselves.
//!
//! Invariant: a change that a worker did not report before it died is reported when the next worker serves.

use spillway_control::Stats;

/// For each state, its events (kind and text), indexed by the value of its gauge.
const EVENTS: [&[(&str, &str)]; 4] = [
    &[
        ("normal", "the write cache is back to normal"),
        ("warning", "warning: much of the write cache is used"),
        ("critical", "critical: most of the write cache is used"),
    ],
    &[
        ("space-available", "the write cache has space again"),
        ("full", "the write cache is full: writes that need space wait or fail"),
    ],
    &[
        ("recovered", "no longer degraded: the overflow file can be written again"),
        ("degraded", "degraded: writes to the overflow file go on failing; check that disk"),
    ],
    &[
        ("chunks-arrive", "chunks of the image arrive again"),
        ("chunks-missing", "chunks of the image do not arrive: reads that need them wait"),
    ],
];

/// The states as they were reported last, as values of their gauges.
#[derive(Debug, Default)]
pub(super) struct ReportedStates([usize; 4]);

impl ReportedStates {
    /// Takes in an event. Returns false if the event is about a state and repeats what was reported last: the gauge was read
    /// before the worker's event arrived.
    pub fn update(&mut self, kind: &str) -> bool {
        let mut new = true;
        for (reported, events) in self.0.iter_mut().zip(EVENTS) {
            if let Some(state) = events.iter().position(|(name, _)| *name == kind) {
                new = *reported != state;
                *reported = state;
            }
        }
        new
    }

    /// Returns the events (kind and text) of all states that differ from what was reported last.
    pub fn outdated(&self, stats: &Stats) -> Vec<(&'static str, &'static str)> {
        let gauges = [stats.level, stats.is_full, stats.degraded, stats.chunks.stalled];
        let states = self.0.iter().zip(EVENTS).zip(gauges);
        let outdated = states.filter_map(|((&reported, events), gauge)| {
            events.get(gauge as usize).filter(|_| gauge as usize != reported)
        });
        outdated.copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_states_that_differ_are_reported() {
        let mut reported = ReportedStates::default();
        let mut stats = Stats::default();
        assert_eq!(reported.outdated(&stats), []);
        let kinds = ["critical", "full", "full", "notice", "space-available", "notice", "space-available"];
        assert_eq!(kinds.map(|kind| reported.update(kind)), [true, true, false, true, true, true, false]);
        (stats.level, stats.is_full, stats.degraded) = (2, 0, 1);
        assert_eq!(reported.outdated(&stats), [EVENTS[2][1]]);
        (stats.level, stats.is_full) = (0, 1);
        assert_eq!(reported.outdated(&stats), [EVENTS[0][0], EVENTS[1][1], EVENTS[2][1]]);
        stats.level = 77;
        assert_eq!(reported.outdated(&stats).len(), 2, "an impossible value is not reported");
    }
}
