//! The event log: lines of JSON in segment files whose space is allocated before they are written. Owns the folder.
//!
//! On a full file system the newest events are still written: into the spare segment, then over the oldest one.
//! Invariant: a file's name is the number of its first event; a line is read only if all lines before it can be read.

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use spillway_api::Event;
use std::collections::VecDeque;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Size of a segment.
const SEGMENT_BYTES: u64 = 1 << 20;
/// With the spare segment, all of them take 64 MiB: some 300,000 events.
const MOST_SEGMENTS: usize = 63;
/// Older events are removed.
const AGE: SignedDuration = SignedDuration::from_hours(7 * 24);
/// File of the log's state.
const STATE: &str = "state";
/// File of a segment that is still empty.
const SPARE: &str = "spare";
/// Size of the state file, which is overwritten in place: one sector.
const STATE_BYTES: usize = 512;
/// Numbers that are skipped after a sudden end of the host: some of them may have been used.
const JUMP: u64 = 1 << 20;

/// State of the whole log.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct LogState {
    history: u32,
    /// Boot of the host in which it was last written.
    boot: String,
    /// Whether all events were flushed.
    closed: bool,
}

/// A file of events.
#[derive(Clone, Debug)]
struct Segment {
    /// Number of its first event.
    first: u64,
    path: PathBuf,
}

/// The log.
pub struct EventLog {
    folder: PathBuf,
    state: LogState,
    /// Oldest first; the last one is written to.
    segments: VecDeque<Segment>,
    file: Arc<File>,
    /// Segments that were written to before, and may not be flushed.
    unflushed: Vec<Arc<File>>,
    /// Offset of the next line.
    at: u64,
}

/// The segments of the log at one moment, which are read without the log. One of them may be removed meanwhile, or be used again
/// for new events: what was read is good if [`EventLog::oldest`] is still that of the reader.
#[derive(Clone, Debug)]
pub struct LogReader {
    segments: VecDeque<Segment>,
}

/// What was found when the log was opened.
pub struct OpenedLog {
    /// Number of the next event.
    pub next: u64,
    /// Whether events may be missing, since the host ended without a regular end of the daemon.
    pub may_lack_some: bool,
}

impl EventLog {
    /// Opens the log in this folder, which is created if necessary.
    pub fn open(folder: &Path) -> io::Result<(EventLog, OpenedLog)> {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        let boot = String::from_utf8_lossy(&crate::processes::boot_id()?).trim().to_owned();
        let before = fs::read(folder.join(STATE)).ok();
        let before: Option<LogState> = before.and_then(|text| serde_json::from_slice(&text).ok());
        let may_lack_some = before.as_ref().is_some_and(|state| !state.closed && state.boot != boot);
        let history = before.map_or_else(new_history, |state| state.history);
        let mut segments = segments(folder, history)?;
        if segments.is_empty() {
            segments.push_back(Segment { first: 1, path: path(folder, history, 1) });
        }
        let Segment { path, first } =
            segments.back().cloned().unwrap_or(Segment { first: 1, path: folder.into() });
        let file = make_segment(&path)?;
        let (events, at) = lines(&file)?;
        // What follows an unreadable line is unknown, but clients may have seen it.
        let may_lack_some = may_lack_some | cut_off(&file, at)?;
        let next =
            events.last().map_or(first, |event| event.id.number + 1) + if may_lack_some { JUMP } else { 0 };
        let state = LogState { history, boot, closed: false };
        let (folder, file, unflushed) = (folder.to_owned(), Arc::new(file), Vec::new());
        let mut log = EventLog { folder, state, segments, file, unflushed, at };
        log.write_state()?;
        log.make_spare();
        log.forget_old(Timestamp::now(), MOST_SEGMENTS);
        Ok((log, OpenedLog { next, may_lack_some }))
    }

    /// Id of the log's history.
    pub fn history(&self) -> u32 {
        self.state.history
    }

    /// The files that may not be flushed: those that are full, oldest first, and the one that is written to.
    pub fn unflushed(&self) -> (Vec<Arc<File>>, Arc<File>) {
        (self.unflushed.clone(), Arc::clone(&self.file))
    }

    /// Notes that these full files were flushed. Until then who closes the log flushes them too.
    pub fn note_flushed(&mut self, full: &[Arc<File>]) {
        self.unflushed.retain(|file| !full.iter().any(|flushed| Arc::ptr_eq(flushed, file)));
    }

    /// Number of the oldest event that is kept, or of the first one to come.
    pub fn oldest(&self) -> Option<u64> {
        self.segments.front().map(|segment| segment.first)
    }

    /// Gives the log up, as after each error: the next daemon begins another history, so that it may use the same numbers again.
    pub fn give_up(self) {
        let _ = fs::remove_file(self.folder.join(STATE));
    }

    /// Adds an event. After an error the log has to be given up.
    pub fn append(&mut self, event: &Event) -> io::Result<()> {
        if self.state.closed {
            self.state.closed = false;
            self.write_state()?;
        }
        let mut line = serde_json::to_vec(event)?;
        line.push(b'\n');
        if self.at + line.len() as u64 > SEGMENT_BYTES {
            self.begin_segment(event.id.number)?;
        }
        self.file.write_all_at(&line, self.at)?;
        self.at += line.len() as u64;
        Ok(())
    }

    /// The segments as they are now.
    pub fn reader(&self) -> LogReader {
        LogReader { segments: self.segments.clone() }
    }

    /// Flushes everything and records that.
    pub fn close(&mut self) -> io::Result<()> {
        let (full, last) = self.unflushed();
        full.iter().chain([&last]).try_for_each(|file| file.sync_data())?;
        self.state.closed = true;
        self.write_state()
    }

    /// Continues in another file: the spare segment, or the oldest one if there is no space for more.
    fn begin_segment(&mut self, first: u64) -> io::Result<()> {
        self.forget_old(Timestamp::now(), MOST_SEGMENTS - 1);
        let spare = self.folder.join(SPARE);
        let old = match spare.exists() {
            true => spare,
            false => {
                let oldest = self.segments.pop_front().map_or(spare, |segment| segment.path);
                overwrite_with_zeroes(&File::options().write(true).open(&oldest)?)?;
                oldest
            }
        };
        let path = path(&self.folder, self.state.history, first);
        fs::rename(&old, &path)?;
        let full = std::mem::replace(&mut self.file, Arc::new(make_segment(&path)?));
        self.unflushed.push(full);
        self.at = 0;
        self.segments.push_back(Segment { first, path });
        self.make_spare();
        Ok(())
    }

    /// Removes old segments, and the oldest while there are more than `most`.
    fn forget_old(&mut self, now: Timestamp, most: usize) {
        while self.segments.len() > 1 {
            // The next segment's first event is newer than all events of this one.
            let next = File::open(&self.segments[1].path).and_then(|file| first_line(&file)).ok().flatten();
            let is_old = next.is_some_and(|event| now.duration_since(event.time) > AGE);
            if !is_old && self.segments.len() <= most {
                return;
            }
            if let Some(old) = self.segments.pop_front() {
                let _ = fs::remove_file(old.path);
            }
        }
    }

    /// Creates the spare segment. Without space for it, a later call may succeed.
    fn make_spare(&self) {
        let path = self.folder.join(SPARE);
        if make_segment(&path).is_err() {
            let _ = fs::remove_file(path);
        }
    }

    fn write_state(&self) -> io::Result<()> {
        let mut text = serde_json::to_vec(&self.state)?;
        text.resize(STATE_BYTES, b' ');
        let path = self.folder.join(STATE);
        let file = File::options().create(true).truncate(false).write(true).mode(0o600).open(path)?;
        file.write_all_at(&text, 0)?;
        file.sync_data()
    }
}

impl LogReader {
    /// Number of the oldest event that was kept.
    pub fn oldest(&self) -> Option<u64> {
        self.segments.front().map(|segment| segment.first)
    }

    /// Reads at most `most` events from this number on. Unreadable ones are left out.
    pub fn from(&self, number: u64, most: usize) -> Vec<Event> {
        let begin = self.segments.iter().rposition(|segment| segment.first <= number).unwrap_or(0);
        let mut found = Vec::new();
        for segment in self.segments.iter().skip(begin) {
            let Ok((events, _)) = File::open(&segment.path).and_then(|file| lines(&file)) else { continue };
            found.extend(events.into_iter().filter(|event| event.id.number >= number));
            if found.len() >= most {
                found.truncate(most);
                break;
            }
        }
        found
    }

    /// Reads the last `most` events before this number, oldest first. Unreadable ones are left out.
    pub fn before(&self, number: u64, most: usize) -> Vec<Event> {
        let mut found = VecDeque::new();
        for segment in self.segments.iter().rev().skip_while(|segment| segment.first >= number) {
            let Ok((events, _)) = File::open(&segment.path).and_then(|file| lines(&file)) else { continue };
            for event in events.into_iter().rev().filter(|event| event.id.number < number) {
                if found.len() == most {
                    return found.into();
                }
                found.push_front(event);
            }
        }
        found.into()
    }
}

/// Creates the id of a new history.
pub fn new_history() -> u32 {
    let [a, b, c, d, ..] = uuid::Uuid::new_v4().into_bytes();
    u32::from_le_bytes([a, b, c, d])
}

fn path(folder: &Path, history: u32, first: u64) -> PathBuf {
    folder.join(format!("{history:08x}-{first:020}"))
}

/// Lists the segments of a history, oldest first. Removes those of other histories, which nobody can ask for.
fn segments(folder: &Path, history: u32) -> io::Result<VecDeque<Segment>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let Some((of, first)) = name.split_once('-') else { continue };
        match (u32::from_str_radix(of, 16), first.parse()) {
            (Ok(of), Ok(first)) if of == history => found.push(Segment { first, path }),
            (Ok(_), Ok(_)) => fs::remove_file(&path)?,
            _ => {}
        }
    }
    found.sort_by_key(|segment| segment.first);
    Ok(found.into())
}

/// Creates a file whose space is allocated, filled with zeroes after the current contents.
fn make_segment(path: &Path) -> io::Result<File> {
    let file = File::options().create(true).truncate(false).read(true).write(true).mode(0o600).open(path)?;
    let zeroes = vec![0; 64 << 10];
    let mut at = file.metadata()?.len();
    while at < SEGMENT_BYTES {
        let part = (SEGMENT_BYTES - at).min(zeroes.len() as u64) as usize;
        file.write_all_at(&zeroes[..part], at)?;
        at += part as u64;
    }
    Ok(file)
}

fn overwrite_with_zeroes(file: &File) -> io::Result<()> {
    let zeroes = vec![0; 64 << 10];
    (0..SEGMENT_BYTES / zeroes.len() as u64)
        .try_for_each(|n| file.write_all_at(&zeroes, n * zeroes.len() as u64))
}

/// Reads the events of a segment, and the offset of the next line.
fn lines(file: &File) -> io::Result<(Vec<Event>, u64)> {
    let mut text = vec![0; SEGMENT_BYTES as usize];
    let read = read_at_most(file, &mut text)?;
    let (mut events, mut at) = (Vec::new(), 0);
    while let Some(length) = text[at..read].iter().position(|byte| *byte == b'\n') {
        let Ok(event) = serde_json::from_slice(&text[at..at + length]) else { break };
        events.push(event);
        at += length + 1;
    }
    Ok((events, at as u64))
}

/// Removes everything after the last readable line. Returns whether there was anything.
fn cut_off(file: &File, at: u64) -> io::Result<bool> {
    let mut rest = vec![0; SEGMENT_BYTES.saturating_sub(at) as usize];
    let mut read = 0;
    while read < rest.len() {
        match file.read_at(&mut rest[read..], at + read as u64)? {
            0 => break,
            n => read += n,
        }
    }
    let is_cut_off = rest.iter().any(|byte| *byte != 0);
    if is_cut_off {
        rest.fill(0);
        file.write_all_at(&rest, at)?;
    }
    Ok(is_cut_off)
}

/// Reads the first event of a segment.
fn first_line(file: &File) -> io::Result<Option<Event>> {
    let mut text = vec![0; 64 << 10];
    let read = read_at_most(file, &mut text)?;
    let line = text[..read].split(|byte| *byte == b'\n').next().unwrap_or_default();
    Ok(serde_json::from_slice(line).ok())
}

fn read_at_most(file: &File, buffer: &mut [u8]) -> io::Result<usize> {
    let mut read = 0;
    while read < buffer.len() {
        match file.read_at(&mut buffer[read..], read as u64) {
            Ok(0) => break,
            Ok(n) => read += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(read)
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use spillway_api::{EventId, EventKind};

    /// Makes it look as if another start of the host had written it.
    pub fn is_of_another_boot(folder: &Path) {
        let path = folder.join(STATE);
        let mut state: LogState = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        state.boot = "another".into();
        fs::write(path, serde_json::to_vec(&state).unwrap()).unwrap();
    }

    /// The last event did not reach the medium.
    pub fn lose_last(folder: &Path) {
        let (log, _) = EventLog::open_as_it_is(folder);
        let file = File::options().read(true).write(true).open(&log).unwrap();
        let (events, at) = lines(&file).unwrap();
        let length = serde_json::to_vec(events.last().unwrap()).unwrap().len() as u64 + 1;
        file.write_all_at(&vec![0; length as usize], at - length).unwrap();
    }

    impl EventLog {
        /// Puts a pipe with this second name in place of the oldest segment: who reads it waits until the pipe is written to.
        pub fn make_oldest_hang(&self, pipe: &Path) {
            let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
            rustix::fs::mknodat(rustix::fs::CWD, pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
            fs::remove_file(&self.segments[0].path).unwrap();
            fs::hard_link(pipe, &self.segments[0].path).unwrap();
        }

        /// Removes the oldest segment, as if the log were full.
        pub fn forget_oldest(&mut self) {
            self.forget_old(Timestamp::now(), self.segments.len() - 1);
        }

        fn open_as_it_is(folder: &Path) -> (PathBuf, LogState) {
            let state: LogState = serde_json::from_slice(&fs::read(folder.join(STATE)).unwrap()).unwrap();
            (segments(folder, state.history).unwrap().back().unwrap().path.clone(), state)
        }
    }

    fn event(history: u32, number: u64, time: Timestamp) -> Event {
        let id = EventId { history, number };
        Event { id, time, kind: EventKind::Memory, object: "host".into(), text: "x".repeat(10_000) }
    }

    fn fill(log: &mut EventLog, numbers: std::ops::Range<u64>, time: Timestamp) {
        let history = log.history();
        numbers.for_each(|number| log.append(&event(history, number, time)).unwrap());
    }

    fn numbers(log: &EventLog) -> Vec<u64> {
        log.reader().from(0, usize::MAX).iter().map(|event| event.id.number).collect()
    }

    #[test]
    fn a_week_is_kept_and_so_many_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let (mut log, opened) = EventLog::open(dir.path()).unwrap();
        assert_eq!((opened.next, opened.may_lack_some), (1, false));
        let now = Timestamp::now();
        let old = now - SignedDuration::from_hours(7 * 24 + 1);
        fill(&mut log, 1..301, old);
        fill(&mut log, 301..401, now);
        let kept = numbers(&log);
        // Each segment has about 100: those go of which all are old.
        assert!(kept[0] > 100 && kept[0] <= 301 && kept.last() == Some(&400), "{kept:?}");
        assert!(kept == (kept[0]..401).collect::<Vec<_>>());
        assert_eq!(log.oldest(), Some(kept[0]));
        fill(&mut log, 401..8001, now);
        let kept = numbers(&log);
        assert!(kept == (kept[0]..8001).collect::<Vec<_>>());
        let taken: u64 =
            fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().metadata().unwrap().len()).sum();
        assert!(
            taken <= (MOST_SEGMENTS as u64 + 1) * SEGMENT_BYTES + STATE_BYTES as u64 && kept.len() > 6000,
            "{taken} {}",
            kept.len()
        );
        let older: Vec<u64> = log.reader().before(7990, 500).iter().map(|event| event.id.number).collect();
        assert!(older == (7490..7990).collect::<Vec<_>>(), "of several segments");
        assert_eq!(log.reader().before(kept[0] + 2, 500).len(), 2);
        drop(log);
        let (log, opened) = EventLog::open(dir.path()).unwrap();
        assert!(opened.next == 8001 && numbers(&log) == kept);
    }

    #[test]
    fn a_full_file_is_flushed_by_who_closes_the_log_until_it_is_known_to_be() {
        let dir = tempfile::tempdir().unwrap();
        let (mut log, _) = EventLog::open(dir.path()).unwrap();
        let (full, first) = log.unflushed();
        assert!(full.is_empty());
        fill(&mut log, 1..150, Timestamp::now());
        // What was flushed while it was written to may have got more since.
        log.note_flushed(&full);
        let (full, second) = log.unflushed();
        assert!(full.len() == 1 && Arc::ptr_eq(&full[0], &first) && !Arc::ptr_eq(&first, &second));
        assert_eq!(log.unflushed().0.len(), 1, "who asks has not flushed it yet");
        fill(&mut log, 150..250, Timestamp::now());
        log.note_flushed(&full);
        let (full, _) = log.unflushed();
        assert!(full.len() == 1 && Arc::ptr_eq(&full[0], &second));
    }

    #[test]
    fn what_is_cut_off_or_damaged_ends_what_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let (mut log, _) = EventLog::open(dir.path()).unwrap();
        fill(&mut log, 1..6, Timestamp::now());
        let (path, _) = EventLog::open_as_it_is(dir.path());
        let file = File::options().write(true).open(&path).unwrap();
        // In the middle of the fourth.
        file.write_all_at(&[0xff; 8], 35_000).unwrap();
        drop(log);
        let (mut log, opened) = EventLog::open(dir.path()).unwrap();
        assert_eq!((numbers(&log), opened.next), (vec![1, 2, 3], 4 + JUMP));
        assert!(opened.may_lack_some, "numbers behind it were told");
        fill(&mut log, 4 + JUMP..5 + JUMP, Timestamp::now());
        assert_eq!(numbers(&log), [1, 2, 3, 4 + JUMP]);
        fs::write(dir.path().join(STATE), "no state").unwrap();
        let (log, opened) = EventLog::open(dir.path()).unwrap();
        assert_eq!((numbers(&log), opened.next), (vec![], 1), "another history");
    }
}
