//! What happens on the host, for those who listen. Owns the last events, in memory; each also goes to standard error,
//! where a journal keeps it.
//!
//! Invariant: numbers rise by one; who asks for what came after a number gets all that is still known, in order.

use jiff::Timestamp;
use spillway_api::{Event, EventKind};
use std::collections::VecDeque;
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::sync::watch;

/// Events that are known still.
const REMEMBERED: usize = 4096;

/// A line for whoever reads standard error. What runs does not end because nobody can.
pub fn say(line: &str) {
    // In one piece: others write there too.
    let _ = std::io::stderr().write_all(format!("spillwayd: {line}\n").as_bytes());
}

/// The events of a host. A clone is the same.
#[derive(Clone, Default)]
pub struct Events(Arc<Inner>);

#[derive(Default)]
struct Inner {
    known: Mutex<VecDeque<Event>>,
    /// How many there were, in the order of [`EventKind::ALL`].
    counts: [AtomicU64; EventKind::ALL.len()],
    last: watch::Sender<u64>,
}

impl Events {
    /// Something happens to an object, such as `machine/desk-001`.
    pub fn raise(&self, kind: EventKind, object: &str, text: impl Into<String>) {
        let mut known = self.known();
        let number = known.back().map_or(1, |event| event.number + 1);
        let event = Event { number, time: Timestamp::now(), kind, object: object.into(), text: text.into() };
        let line = format!("{object}: {}", event.text);
        if known.len() == REMEMBERED {
            known.pop_front();
        }
        known.push_back(event);
        self.counted(kind).fetch_add(1, Ordering::Relaxed);
        self.0.last.send_replace(number);
        drop(known);
        say(&line);
    }

    /// How many of a kind there were.
    pub fn count(&self, kind: EventKind) -> u64 {
        self.counted(kind).load(Ordering::Relaxed)
    }

    fn counted(&self, kind: EventKind) -> &AtomicU64 {
        let at = EventKind::ALL.iter().position(|other| *other == kind);
        &self.0.counts[at.expect("ALL has every kind")]
    }

    /// What came after this number and is known still. A number that no event has yet is one of an earlier daemon's: all
    /// came after it.
    pub fn after(&self, number: u64) -> Vec<Event> {
        let known = self.known();
        let is_ours = known.back().is_some_and(|last| number <= last.number);
        let number = if is_ours { number } else { 0 };
        known.iter().filter(|event| event.number > number).cloned().collect()
    }

    /// The number of the last one, as it rises.
    pub fn last(&self) -> watch::Receiver<u64> {
        self.0.last.subscribe()
    }

    fn known(&self) -> MutexGuard<'_, VecDeque<Event>> {
        self.0.known.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_comes_again_gets_what_it_has_not_seen() {
        let events = Events::default();
        let numbers = |after| events.after(after).iter().map(|event| event.number).collect::<Vec<_>>();
        assert!(numbers(7).is_empty());
        (0..3).for_each(|_| events.raise(EventKind::Memory, "host", "text"));
        assert_eq!((numbers(0), numbers(2), numbers(3)), (vec![1, 2, 3], vec![3], vec![]));
        // It was told of more by a daemon that is no more.
        assert_eq!(numbers(4), [1, 2, 3]);
        (0..REMEMBERED).for_each(|_| events.raise(EventKind::Memory, "host", "text"));
        assert_eq!((numbers(0).len(), numbers(0)[0]), (REMEMBERED, 4));
    }
}
