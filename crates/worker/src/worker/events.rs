//! What has happened to the disk, as it is told: in which words, and how much of it. Sends nothing itself.
//!
//! Invariant: of each state the last change is told, sooner or later; everything else only as often as a log can bear.

use crate::channel::Start;
use spillway_core::{Errno, Event, FullPolicy, Level, Mode};
use std::mem::discriminant;

/// Events told to the supervisor in one second at most: of states, and of everything else.
const EVENTS_PER_SECOND: u32 = 20;
const SECOND_NS: u64 = 1_000_000_000;

/// What keeps the log from being flooded.
pub struct Pace {
    left: u32,
    since_ns: u64,
}

impl Pace {
    /// Nothing said yet.
    pub fn new() -> Pace {
        Pace { left: EVENTS_PER_SECOND, since_ns: 0 }
    }

    pub fn allows(&mut self, now_ns: u64) -> bool {
        if now_ns.saturating_sub(self.since_ns) > SECOND_NS {
            *self = Pace { left: EVENTS_PER_SECOND, since_ns: now_ns };
        }
        let allowed = self.left > 0;
        self.left = self.left.saturating_sub(1);
        allowed
    }
}

/// What an event says is the case until another one says otherwise: how full the cache is, whether writes wait, whether
/// the overflow can be written. `None`: it tells of something that has happened.
pub fn state_of(event: &Event) -> Option<usize> {
    match event {
        Event::Level(..) => Some(0),
        Event::Full | Event::SpaceAvailable => Some(1),
        Event::Degraded(_) | Event::Recovered => Some(2),
        Event::FirstOverflow
        | Event::ChecksumMismatch
        | Event::OverflowWriteFailed(_)
        | Event::OverflowReadFailed(_)
        | Event::SummaryUnusable => None,
    }
}

/// Changes of state still to be told. No other event takes their place, and when there are too many, those that were
/// undone meanwhile are left out: the last of each state is always told.
pub struct States {
    waiting: Vec<Event>,
    told: [Option<Event>; 3],
    pace: Pace,
}

impl States {
    /// Nothing told yet.
    pub fn new() -> States {
        States { waiting: Vec::new(), told: [None; 3], pace: Pace::new() }
    }

    /// When the next may be told, if any waits.
    pub fn deadline_ns(&self) -> Option<u64> {
        (!self.waiting.is_empty()).then_some(self.pace.since_ns + SECOND_NS + 1)
    }

    /// There are changes to be told.
    pub fn any_wait(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// More changes, in their order.
    pub fn extend(&mut self, events: Vec<Event>) {
        self.waiting.extend(events);
    }

    /// It is the last time: what waits may be told at once, of each state the last.
    pub fn hurry(&mut self) {
        self.pace = Pace::new();
    }

    /// What may be told now.
    pub fn take(&mut self, now_ns: u64) -> Vec<Event> {
        let mut taken = Vec::new();
        let mut waiting = std::mem::take(&mut self.waiting).into_iter().peekable();
        while waiting.peek().is_some() && self.pace.allows(now_ns) {
            let event = waiting.next().expect("looked at above");
            state_of(&event).into_iter().for_each(|state| self.told[state] = Some(event));
            taken.push(event);
        }
        let mut last = [None; 3];
        for event in waiting {
            state_of(&event).into_iter().for_each(|state| last[state] = Some(event));
        }
        for (last, told) in last.into_iter().zip(self.told) {
            self.waiting.extend(last.filter(|last| told.is_none_or(|told| !says_the_same(last, &told))));
        }
        taken
    }
}

fn says_the_same(a: &Event, b: &Event) -> bool {
    match (a, b) {
        (Event::Level(a, _), Event::Level(b, _)) => a == b,
        _ => discriminant(a) == discriminant(b),
    }
}

/// A word for programs, a line for people.
pub fn describe(event: Event, start: &Start) -> (&'static str, String) {
    match event {
        Event::FirstOverflow => {
            let why = if start.settings.mode() == Mode::Overflow {
                "the guest writes"
            } else {
                "the RAM tier is full"
            };
            ("first-overflow", format!("{why}: blocks go to the overflow from here on"))
        }
        Event::Level(Level::Normal, percent) => {
            ("normal", format!("the write cache is back to normal: {percent}% of it is used"))
        }
        Event::Level(Level::Warning, percent) => {
            ("warning", format!("warning: {percent}% of the write cache is used"))
        }
        Event::Level(Level::Critical, percent) => {
            let then = if start.settings.full() == FullPolicy::Fail { "fail with ENOSPC" } else { "wait" };
            (
                "critical",
                format!("critical: {percent}% of the write cache is used; when it is full, writes {then}"),
            )
        }
        Event::Full => {
            let then = match start.settings.full() {
                FullPolicy::Fail => "fail with ENOSPC",
                FullPolicy::Pause => {
                    "wait; discard, reset, or raise a limit with 'spillway set' to make space"
                }
            };
            ("full", format!("the write cache is full: writes that need space {then}"))
        }
        Event::SpaceAvailable => ("space-available", "the write cache has space again".into()),
        Event::ChecksumMismatch => (
            "checksum-mismatch",
            "a block read back from the overflow does not match its checksum: the guest got an I/O error"
                .into(),
        ),
        Event::OverflowWriteFailed(errno) => {
            let then = match (start.settings.mode(), start.settings.full()) {
                (Mode::RamOverflow, _) => "the blocks stay in RAM, it is tried again",
                (Mode::Overflow, FullPolicy::Pause) if errno == Errno::NO_SPACE => {
                    "the writes wait, it is tried again"
                }
                (Mode::Overflow, _) if errno != Errno::NO_SPACE => "it is tried elsewhere in the file",
                _ => "the guest got an I/O error",
            };
            ("overflow-write-failed", format!("a write to the overflow file failed: {errno}; {then}"))
        }
        Event::OverflowReadFailed(errno) => (
            "overflow-read-failed",
            format!("a read of the overflow file failed: {errno}; who needed it gets an I/O error"),
        ),
        Event::Degraded(errno) => {
            let then = match (start.settings.mode(), start.settings.full()) {
                (Mode::RamOverflow, _) => "what is not written stays in RAM",
                (Mode::Overflow, FullPolicy::Pause) if errno == Errno::NO_SPACE => "writes wait",
                _ => "writes fail",
            };
            let why = format!("writes to the overflow file go on failing: {errno}");
            ("degraded", format!("degraded: {why}; {then}; check that disk"))
        }
        Event::Recovered => {
            ("recovered", "no longer degraded: the overflow file can be written again".into())
        }
        Event::SummaryUnusable => (
            "summary-unusable",
            "a segment's summary cannot be read: its space comes back when its blocks are overwritten".into(),
        ),
    }
}

/// What is told of events.
pub(super) struct Telling {
    /// Of what has happened.
    pub pace: Pace,
    /// Of what is the case.
    pub states: States,
}

impl Telling {
    /// Nothing yet.
    pub fn new() -> Telling {
        Telling { pace: Pace::new(), states: States::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_flood_of_changes_the_last_of_each_state_is_told() {
        let mut states = States::new();
        let flap = |n| [Event::Full, Event::SpaceAvailable].into_iter().cycle().take(n).collect::<Vec<_>>();
        states.extend(vec![Event::Level(Level::Warning, 80)]);
        states.extend(flap(999));
        states.extend(vec![Event::Degraded(Errno::IO), Event::Level(Level::Critical, 90)]);
        let first = states.take(5 * SECOND_NS);
        assert_eq!(first.len(), EVENTS_PER_SECOND as usize);
        assert_eq!(first[0], Event::Level(Level::Warning, 80));
        // The last that was told is `Full`, so that it is full needs no second word.
        assert_eq!(first[19], Event::Full);
        assert!(states.take(5 * SECOND_NS + 1).is_empty());
        assert_eq!(states.deadline_ns(), Some(6 * SECOND_NS + 1));
        let rest = states.take(6 * SECOND_NS + 1);
        assert_eq!(rest, [Event::Level(Level::Critical, 90), Event::Degraded(Errno::IO)]);
        assert!(!states.any_wait() && states.deadline_ns().is_none());
        states.extend(flap(21));
        states.extend(vec![Event::SpaceAvailable]);
        assert_eq!(states.take(8 * SECOND_NS).len(), EVENTS_PER_SECOND as usize);
        assert!(!states.any_wait(), "what was told last holds again");
    }
}
