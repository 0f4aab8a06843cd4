//! Events of the host, for subscribers. Owns the events: the last ones in memory, those of a week in files. Each is also
//! written to standard error, where the journal keeps it.
//!
//! Invariant: numbers increase, also over restarts; a client that asks for the events after a given one gets all of them,
//! in order, or is told that some were lost. Whoever reads files or flushes them keeps nobody else waiting.

mod log;

use crate::error::HostError;
use jiff::Timestamp;
use log::{EventLog, LogReader};
use spillway_api::{ErrorCode, Event, EventId, EventKind};
use std::collections::VecDeque;
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use tokio::sync::watch;

/// Number of events in memory, and the largest in one response.
pub const MOST_AT_ONCE: usize = 4096;
/// Longest text of an event that is kept: parts of it may come from a guest.
const MOST_TEXT_BYTES: usize = 16 << 10;

/// Writes a line to standard error. Failures are ignored: the daemon continues if nobody reads it.
pub fn log_line(line: &str) {
    // Write it at once, since other processes write there too.
    let _ = std::io::stderr().write_all(format!("spillwayd: {line}\n").as_bytes());
}

/// The events of a host. A clone is the same events.
#[derive(Clone)]
pub struct Events(Arc<Inner>);

struct Inner {
    known: Mutex<EventBuffer>,
    /// Number of events since the daemon started, in the order of [`EventKind::ALL`].
    counts: [AtomicU64; EventKind::ALL.len()],
    last: watch::Sender<EventId>,
    /// Wakes the thread that flushes the files.
    written: SyncSender<()>,
}

struct EventBuffer {
    history: u32,
    /// Number of the next event.
    next: u64,
    /// The last events.
    recent: VecDeque<Event>,
    /// The files; `None` where they cannot be written.
    log: Option<EventLog>,
}

impl Default for Events {
    /// Creates events that are kept in memory only.
    fn default() -> Events {
        Events::with(EventBuffer { history: log::new_history(), next: 1, recent: VecDeque::new(), log: None })
    }
}

impl Events {
    /// Opens the events in this folder, which is created if necessary. If that fails, events are kept in memory, and
    /// `complain` is called.
    pub fn open(folder: &Path, complain: &mut dyn FnMut(&str)) -> Events {
        let (log, found) = match EventLog::open(folder) {
            Ok(opened) => opened,
            Err(e) => {
                complain(&format!("{}: events are kept in memory alone: {e}", folder.display()));
                return Events::default();
            }
        };
        // By what there is, and not by numbers: some are left out after the host has ended without a warning.
        let recent = log.reader().before(found.next, MOST_AT_ONCE);
        let known =
            EventBuffer { history: log.history(), next: found.next, recent: recent.into(), log: Some(log) };
        let events = Events::with(known);
        if found.may_lack_some {
            let text = "the host has ended before the last events were safe: some may be missing here";
            events.raise(EventKind::Lost, "host", text);
        }
        events
    }

    fn with(known: EventBuffer) -> Events {
        let (written, wakes) = sync_channel(1);
        let last = EventId { history: known.history, number: known.next.saturating_sub(1) };
        let last = watch::Sender::new(last);
        let inner = Inner { known: Mutex::new(known), counts: Default::default(), last, written };
        let inner = Arc::new(inner);
        let known = Arc::downgrade(&inner);
        // Without this thread the kernel decides when to write.
        let _ = std::thread::Builder::new().name("events".into()).spawn(move || make_durable(&known, &wakes));
        Events(inner)
    }

    /// Raises an event about an object, such as `machine/desk-001`.
    pub fn raise(&self, kind: EventKind, object: &str, text: impl Into<String>) {
        let mut text: String = text.into();
        if text.len() > MOST_TEXT_BYTES {
            text = String::from_utf8_lossy(&text.as_bytes()[..MOST_TEXT_BYTES]).into_owned();
        }
        let line = format!("{object}: {text}");
        let mut known = self.known();
        let number = known.next;
        known.next += 1;
        let id = EventId { history: known.history, number };
        let event = Event { id, time: Timestamp::now(), kind, object: object.into(), text };
        known.write(&event);
        if known.recent.len() == MOST_AT_ONCE {
            known.recent.pop_front();
        }
        known.recent.push_back(event);
        self.counted(kind).fetch_add(1, Ordering::Relaxed);
        self.0.last.send_replace(id);
        drop(known);
        // A wakeup that is pending already covers this event.
        let _ = self.0.written.try_send(());
        log_line(&line);
    }

    /// Number of events of a kind since the daemon started.
    pub fn count(&self, kind: EventKind) -> u64 {
        self.counted(kind).load(Ordering::Relaxed)
    }

    fn counted(&self, kind: EventKind) -> &AtomicU64 {
        let at = EventKind::ALL.iter().position(|other| *other == kind);
        &self.0.counts[at.expect("ALL has every kind")]
    }

    /// Returns the last events, oldest first, and the id of the last one.
    pub fn newest(&self, most: usize) -> (EventId, Vec<Event>) {
        self.find(|known| {
            let id = EventId { history: known.history, number: known.next - 1 };
            (id, known.before(known.next, most.min(MOST_AT_ONCE)))
        })
    }

    /// Returns the id after which the last events begin.
    pub fn before_newest(&self, most: usize) -> EventId {
        let (last, events) = self.newest(most);
        events.first().map_or(last, |first| EventId { number: first.id.number - 1, ..first.id })
    }

    /// Returns the last events before this one, oldest first. None: no earlier ones are kept.
    pub fn before(&self, before: EventId, most: usize) -> Result<Vec<Event>, HostError> {
        let (is_ours, events) = self.find(|known| match before.history == known.history {
            true => (true, known.before(before.number, most.min(MOST_AT_ONCE))),
            false => (false, Place::Memory(Vec::new())),
        });
        if !is_ours {
            let message = format!("{before} belongs to another history of this host, whose events were lost");
            return Err(HostError::new(ErrorCode::NotFound, message));
        }
        Ok(events)
    }

    /// Returns the first events after this one, oldest first. If some of them are not known any more, or there is no such event,
    /// the first one says so.
    pub fn after(&self, after: EventId, most: usize) -> Vec<Event> {
        let most = most.min(MOST_AT_ONCE);
        let (lost, events) = self.find(|known| {
            let oldest = known.oldest();
            let is_ours = after.history == known.history && after.number < known.next;
            if is_ours && after.number + 1 >= oldest {
                return (None, known.from(after.number + 1, most));
            }
            let what = match after.history == known.history {
                true => "are not kept any more",
                false => "belong to another history of this host, which was lost",
            };
            let id = EventId { history: known.history, number: oldest - 1 };
            let text = format!("events were lost: those after {after} {what}; what is known begins here");
            let lost =
                Event { id, time: Timestamp::now(), kind: EventKind::Lost, object: "host".into(), text };
            (Some(lost), known.from(oldest, most.saturating_sub(1)))
        });
        lost.into_iter().chain(events).collect()
    }

    /// Chooses events, and returns them with what else was chosen. Files are read while nothing is locked.
    fn find<T>(&self, choose: impl Fn(&EventBuffer) -> (T, Place)) -> (T, Vec<Event>) {
        loop {
            let (chosen, place) = choose(&self.known());
            let (files, events) = match place {
                Place::Memory(events) => return (chosen, events),
                Place::FilesFrom(files, number, most) => (files.oldest(), files.from(number, most)),
                Place::FilesBefore(files, number, most) => (files.oldest(), files.before(number, most)),
            };
            // A file that was removed meanwhile, or used again, may be missing in what was read.
            if self.known().log.as_ref().is_some_and(|log| log.oldest() == files) {
                return (chosen, events);
            }
        }
    }

    /// Whether there is no event after this one, and none was lost.
    pub fn is_last(&self, id: EventId) -> bool {
        *self.0.last.borrow() == id
    }

    /// Subscribes to the id of the last event.
    pub fn last(&self) -> watch::Receiver<EventId> {
        self.0.last.subscribe()
    }

    /// Flushes all events before the daemon ends.
    pub fn close(&self) {
        let mut known = self.known();
        if let Some(Err(e)) = known.log.as_mut().map(EventLog::close) {
            log_line(&format!("warning: the last events may be lost: {e}"));
        }
    }

    fn known(&self) -> MutexGuard<'_, EventBuffer> {
        self.0.known.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Where chosen events are: in files those from a number on, or before one, and at most so many.
enum Place {
    Memory(Vec<Event>),
    FilesFrom(LogReader, u64, usize),
    FilesBefore(LogReader, u64, usize),
}

impl EventBuffer {
    fn write(&mut self, event: &Event) {
        if let Some(Err(e)) = self.log.as_mut().map(|log| log.append(event)) {
            self.give_up(&e);
        }
    }

    /// Does without files from now on.
    fn give_up(&mut self, why: &std::io::Error) {
        log_line(&format!("warning: events are in memory alone until the daemon starts again: {why}"));
        if let Some(log) = self.log.take() {
            log.give_up();
        }
    }

    /// Number of the oldest known event, or of the next one.
    fn oldest(&self) -> u64 {
        let in_memory = self.recent.front().map_or(self.next, |event| event.id.number);
        self.log.as_ref().and_then(EventLog::oldest).map_or(in_memory, |oldest| oldest.min(in_memory))
    }

    /// Finds the first events from this number on.
    fn from(&self, number: u64, most: usize) -> Place {
        match &self.log {
            Some(log) if self.recent.front().is_some_and(|first| number < first.id.number) => {
                Place::FilesFrom(log.reader(), number, most)
            }
            _ => {
                let begin = self.recent.partition_point(|event| event.id.number < number);
                Place::Memory(self.recent.range(begin..).take(most).cloned().collect())
            }
        }
    }

    /// Finds the last events before this number.
    fn before(&self, number: u64, most: usize) -> Place {
        let end = self.recent.partition_point(|event| event.id.number < number);
        let is_older = |oldest: u64| self.recent.front().is_some_and(|first| oldest < first.id.number);
        match &self.log {
            Some(log) if end < most && log.oldest().is_some_and(is_older) => {
                Place::FilesBefore(log.reader(), number, most)
            }
            _ => Place::Memory(self.recent.range(end.saturating_sub(most)..end).cloned().collect()),
        }
    }
}

/// Flushes the files repeatedly, until the events are dropped.
fn make_durable(inner: &Weak<Inner>, wakes: &Receiver<()>) {
    while wakes.recv().is_ok() {
        let Some(inner) = inner.upgrade() else { return };
        let known = || inner.known.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let Some((full, last)) = known().log.as_ref().map(EventLog::unflushed) else { continue };
        let failed = full.iter().chain([&last]).find_map(|file| file.sync_data().err());
        let mut known = known();
        match (failed, &mut known.log) {
            // Each file tells of an error once: what is on the disk is not known.
            (Some(e), Some(_)) => known.give_up(&e),
            (None, Some(log)) => log.note_flushed(&full),
            (_, None) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spillway_testkit::process::wait_until;
    use std::time::Duration;

    const PATIENCE: Duration = Duration::from_secs(20);

    fn open(dir: &Path) -> Events {
        Events::open(dir, &mut |line| panic!("{line}"))
    }

    fn numbers(events: &Events, after: Option<EventId>) -> Vec<u64> {
        all(events, after).iter().map(|event| event.id.number).collect()
    }

    /// The events after this one, or the last ones.
    fn all(events: &Events, after: Option<EventId>) -> Vec<Event> {
        match after {
            Some(after) => events.after(after, MOST_AT_ONCE),
            None => events.newest(MOST_AT_ONCE).1,
        }
    }

    fn raise(events: &Events, count: usize) {
        (0..count).for_each(|n| events.raise(EventKind::Memory, "host", format!("{n}")));
    }

    #[test]
    fn who_comes_again_gets_what_it_has_not_seen() {
        let events = Events::default();
        assert!(numbers(&events, None).is_empty());
        raise(&events, 3);
        let id = |number| Some(EventId { history: all(&events, None)[0].id.history, number });
        assert_eq!(numbers(&events, None), [1, 2, 3]);
        assert_eq!([0, 1, 2, 3, 4].map(|most| events.before_newest(most).number), [3, 2, 1, 0, 0]);
        assert_eq!((numbers(&events, id(0)), numbers(&events, id(2))), (vec![1, 2, 3], vec![3]));
        assert!(numbers(&events, id(3)).is_empty());
        raise(&events, MOST_AT_ONCE);
        assert_eq!((numbers(&events, None).len(), numbers(&events, None)[0]), (MOST_AT_ONCE, 4));
        // In memory alone no more are kept.
        let told = all(&events, id(2));
        assert_eq!((told[0].kind, told[0].id.number, told[1].id.number), (EventKind::Lost, 3, 4));
    }

    /// A consumer that was told of some goes on over restarts of the daemon, however it ended.
    #[test]
    fn a_restart_loses_nothing_and_numbers_go_on() {
        let dir = tempfile::tempdir().unwrap();
        let events = open(dir.path());
        raise(&events, 3);
        let last = all(&events, None)[1].id;
        for closes in [true, false] {
            let events = open(dir.path());
            raise(&events, 2);
            if closes {
                events.close();
            }
        }
        let events = open(dir.path());
        assert_eq!(numbers(&events, Some(last)), [3, 4, 5, 6, 7]);
        assert_eq!(numbers(&events, None), [1, 2, 3, 4, 5, 6, 7]);
        let texts: Vec<String> = all(&events, Some(last)).into_iter().map(|event| event.text).collect();
        assert_eq!(texts, ["2", "0", "1", "0", "1"]);
        // More than is in memory comes from the files, part by part.
        raise(&events, MOST_AT_ONCE + 10);
        let (mut after, mut heard) = (last, Vec::new());
        loop {
            let told = all(&events, Some(after));
            let Some(newest) = told.last() else { break };
            after = newest.id;
            heard.extend(told.into_iter().map(|event| event.id.number));
        }
        assert!(heard == (3..=17 + MOST_AT_ONCE as u64).collect::<Vec<_>>());
    }

    #[test]
    fn older_ones_are_read_back_to_the_first() {
        let dir = tempfile::tempdir().unwrap();
        for events in [open(dir.path()), Events::default()] {
            assert!(events.newest(5).1.is_empty());
            raise(&events, MOST_AT_ONCE + 10);
            let (newest, last) = events.newest(3);
            let number = |event: &Event| event.id.number;
            let next = MOST_AT_ONCE as u64 + 11;
            assert_eq!(last.iter().map(number).collect::<Vec<_>>(), [next - 3, next - 2, next - 1]);
            assert_eq!(newest, last[2].id);
            assert_eq!(events.newest(usize::MAX).1.len(), MOST_AT_ONCE);
            let (mut before, mut heard) = (last[0].id, Vec::new());
            loop {
                let older = events.before(before, 1000).unwrap();
                let Some(first) = older.first() else { break };
                before = first.id;
                assert!(older.len() <= 1000);
                heard.splice(0..0, older.iter().map(number));
            }
            let kept = if events.known().log.is_some() { 1 } else { 11 };
            assert!(heard == (kept..next - 3).collect::<Vec<_>>(), "{:?}", heard.first());
            // An id that is still to come is after all; one of another history is of none.
            let to_come = EventId { number: next + 5, ..newest };
            assert_eq!(events.before(to_come, 1).unwrap()[0].id, newest);
            let foreign = EventId { history: newest.history ^ 1, ..newest };
            assert_eq!(events.before(foreign, 1).unwrap_err().code, ErrorCode::NotFound);
            let first = EventId { number: kept - 1, ..newest };
            let [a, b, ..] = &events.after(first, 2)[..] else { panic!("too few") };
            assert_eq!((a.id.number, b.id.number, events.after(first, 2).len()), (kept, kept + 1, 2));
        }
    }

    /// A file of events that cannot be read for a while, since its disk is slow, keeps nobody waiting but who asks for its events.
    /// If it is removed meanwhile, the answer says so.
    #[test]
    fn a_slow_disk_delays_only_who_reads_from_it() {
        let dir = tempfile::tempdir().unwrap();
        let events = open(dir.path());
        // Of two files.
        let text = "x".repeat(300);
        (0..MOST_AT_ONCE + 100).for_each(|_| events.raise(EventKind::Memory, "host", text.as_str()));
        let (newest, _) = events.newest(1);
        let pipe = dir.path().join("pipe");
        events.known().log.as_ref().unwrap().make_oldest_hang(&pipe);
        let first = EventId { number: 0, ..newest };
        let (sender, thread) = std::sync::mpsc::channel();
        let reader = events.clone();
        let reader = std::thread::spawn(move || {
            sender.send(rustix::thread::gettid().as_raw_nonzero()).unwrap();
            reader.after(first, 10)
        });
        let stat = format!("/proc/self/task/{}/stat", thread.recv().unwrap());
        let sleeps = || std::fs::read_to_string(&stat).unwrap().contains(") S ").then_some(());
        wait_until(PATIENCE, sleeps).expect("it waits for the pipe");
        let (sender, raised) = std::sync::mpsc::channel();
        let raiser = events.clone();
        std::thread::spawn(move || {
            raiser.raise(EventKind::Memory, "host", "meanwhile");
            sender.send(raiser.newest(1).1).unwrap();
        });
        let raised = raised.recv_timeout(PATIENCE).expect("nobody else waits");
        assert_eq!(raised[0].text, "meanwhile");
        events.known().log.as_mut().unwrap().forget_oldest();
        assert!(!reader.is_finished());
        std::fs::File::options().write(true).open(pipe).unwrap();
        let answer = reader.join().unwrap();
        assert_eq!((answer[0].kind, answer[0].id.number, answer[1].id.number), (EventKind::Lost, 101, 102));
    }

    #[test]
    fn what_was_lost_is_told_in_words() {
        let dir = tempfile::tempdir().unwrap();
        let events = open(dir.path());
        raise(&events, 3);
        let last = all(&events, None)[2].id;
        // The folder is another one: a backup without events, a disk that was replaced.
        std::fs::remove_dir_all(dir.path()).unwrap();
        let events = open(dir.path());
        raise(&events, 5);
        let told = all(&events, Some(last));
        assert_eq!((told.len(), told[0].kind, told[0].id.number), (6, EventKind::Lost, 0));
        assert!(
            told[0].text.contains(&last.to_string()) && told[0].text.contains("lost"),
            "{}",
            told[0].text
        );
        assert_eq!(numbers(&events, Some(told[0].id)), [1, 2, 3, 4, 5], "it is told once");
        // One that nobody was ever told of.
        let never = EventId { number: 100, ..told[1].id };
        assert_eq!(all(&events, Some(never))[0].kind, EventKind::Lost);
    }

    #[test]
    fn a_host_that_lost_its_power_may_have_lost_events() {
        let dir = tempfile::tempdir().unwrap();
        let events = open(dir.path());
        raise(&events, 3);
        let ids: Vec<EventId> = all(&events, None).iter().map(|event| event.id).collect();
        drop(events);
        // As another start of the host finds it, with the last event not on the medium.
        log::tests::is_of_another_boot(dir.path());
        log::tests::lose_last(dir.path());
        let events = open(dir.path());
        let in_memory: Vec<u64> = events.known().recent.iter().map(|event| event.id.number).collect();
        assert_eq!(in_memory[..2], [1, 2], "the last ones are answered from memory");
        raise(&events, 1);
        for seen in [ids[1], ids[2]] {
            let told = all(&events, Some(seen));
            assert_eq!((told.len(), told[0].kind), (2, EventKind::Lost), "{told:?}");
            assert!(told[0].id.number > ids[2].number, "no number is given twice");
        }
        // In order nothing is lost.
        events.close();
        let before = numbers(&events, None).len();
        log::tests::is_of_another_boot(dir.path());
        assert_eq!(numbers(&open(dir.path()), None).len(), before);
    }
}
