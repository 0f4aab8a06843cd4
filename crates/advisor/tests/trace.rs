//! The trace's format: what is written is read, a cut file reads up to there, and no bytes do harm.
//!
//! `SPILLWAY_SEED` repeats a run.

mod common;

use common::{Rng, seed};
use spillway_advisor::trace::{End, Head, TraceError, TraceReader, TraceWriter};
use spillway_advisor::{Event, Operation};

fn random_event(rng: &mut Rng, before: &Event) -> Event {
    let operation = Operation::ALL[rng.below(6) as usize];
    let time_us = before.time_us + [0, 1, 90, 1_000_000, 1 << 40][rng.below(5) as usize] * rng.below(3);
    if !operation.has_range() {
        return Event { time_us, operation, offset_bytes: 0, len_bytes: 0 };
    }
    let unit = [1, 512, 4096][rng.below(3) as usize];
    let len_bytes = if rng.below(2) == 0 { before.len_bytes } else { rng.below(64) * unit };
    let follows = before.offset_bytes + before.len_bytes;
    let offset_bytes = if rng.below(3) == 0 { follows } else { rng.below((1 << 40) / unit) * unit };
    Event { time_us, operation, offset_bytes: offset_bytes.min(1 << 41), len_bytes }
}

fn random_events(rng: &mut Rng, n: usize) -> Vec<Event> {
    let mut last = Event { time_us: 0, operation: Operation::Read, offset_bytes: 0, len_bytes: 4096 };
    let mut next = || {
        last = random_event(rng, &last);
        last
    };
    (0..n).map(|_| next()).collect()
}

fn written(head: &Head, events: &[Event]) -> Vec<u8> {
    let mut writer = TraceWriter::new(Vec::new(), head).expect("a small head");
    events.iter().for_each(|e| writer.push(e).expect("it is checked"));
    writer.finish().expect("memory")
}

fn head() -> Head {
    let mut head = Head::new(1 << 42);
    head.begin_unix_us = 1_700_000_000_000_000;
    head.notes.insert("machine".into(), "desk-1".into());
    head
}

#[test]
fn what_is_written_is_read() {
    let mut rng = Rng(seed());
    for n in [0, 1, 2, 1000, 50_000] {
        let events = random_events(&mut rng, n);
        let bytes = written(&head(), &events);
        let mut reader = TraceReader::new(&bytes[..]).expect("just written");
        assert_eq!(*reader.head(), head());
        let read: Vec<Event> = reader.by_ref().map(|e| e.expect("just written")).collect();
        assert_eq!(read, events);
        assert_eq!(reader.end(), End::Whole);
    }
}

#[test]
fn a_request_takes_a_few_bytes() {
    let event = |i: u64, offset_bytes| Event {
        time_us: i * 37,
        operation: Operation::Write,
        offset_bytes,
        len_bytes: 4096,
    };
    let sequential: Vec<Event> = (0..10_000).map(|i| event(i, i * 4096)).collect();
    let mut rng = Rng(1);
    let random: Vec<Event> = (0..10_000).map(|i| event(i, rng.below(1 << 20) * 4096)).collect();
    let (sequential, random) = (written(&head(), &sequential).len(), written(&head(), &random).len());
    assert!(sequential < 2 * 10_000 + 1000, "{sequential}");
    assert!(random < 6 * 10_000, "{random}");
}

#[test]
fn a_cut_file_reads_up_to_there_and_says_so() {
    let mut rng = Rng(seed());
    let events = random_events(&mut rng, 20_000);
    let bytes = written(&head(), &events);
    let whole_head = TraceReader::new(&bytes[..]).map(|_| ()).is_ok();
    assert!(whole_head);
    let mut last = 0;
    for cut in (0..bytes.len()).step_by(997).chain(bytes.len() - 13..bytes.len()) {
        let Ok(mut reader) = TraceReader::new(&bytes[..cut]) else {
            assert!(cut < 200, "the head is whole at {cut}");
            continue;
        };
        let read: Vec<Event> = reader.by_ref().map(|e| e.expect("cut, not damaged")).collect();
        assert!(read.len() >= last && read[..] == events[..read.len()]);
        last = read.len();
        let End::Cut { at } = reader.end() else { panic!("{:?} at {cut}", reader.end()) };
        assert!(at as usize <= cut);
    }
    assert_eq!(last, events.len(), "without the mark of the end all events are there");
}

#[test]
fn a_changed_bit_is_seen() {
    let mut rng = Rng(seed());
    let events = random_events(&mut rng, 300);
    let mut bytes = written(&head(), &events);
    for bit in 0..bytes.len() * 8 {
        bytes[bit / 8] ^= 1 << (bit % 8);
        let read = TraceReader::new(&bytes[..]).map(|mut r| {
            let n = r.by_ref().take_while(Result::is_ok).count();
            (n, r.end())
        });
        assert!(read.is_err() || read.is_ok_and(|r| r != (events.len(), End::Whole)), "bit {bit}");
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
}

/// Reads all there is, and returns how many events that were.
fn read_all(bytes: &[u8]) -> usize {
    let Ok(mut reader) = TraceReader::new(bytes) else { return 0 };
    let mut n = 0;
    while let Ok(Some(event)) = reader.read() {
        event.check(reader.head().end_bytes()).expect("a reader checks");
        n += 1;
        assert!(n <= bytes.len(), "more events than bytes");
    }
    assert!(matches!(reader.read(), Ok(None)), "nothing follows an error");
    n
}

#[test]
fn no_bytes_do_harm() {
    let mut rng = Rng(seed());
    let rounds = std::env::var("SPILLWAY_TRACE_ROUNDS").map_or(20_000, |n| n.parse().expect("a number"));
    let events = random_events(&mut rng, 200);
    let good = written(&head(), &events);
    let prefix = written(&head(), &[]).len() - 12;
    for _ in 0..rounds {
        let mut bytes = good.clone();
        for _ in 0..1 + rng.below(4) {
            let at = rng.below(bytes.len() as u64) as usize;
            match rng.below(4) {
                0 => bytes[at] ^= 1 << rng.below(8),
                1 => bytes[at] = rng.below(256) as u8,
                2 => bytes.truncate(at.max(1)),
                _ => drop(bytes.splice(at..at, (0..rng.below(9)).map(|_| rng.below(256) as u8))),
            }
        }
        read_all(&bytes);
        // Random records under a checksum that is right.
        let records: Vec<u8> = (0..1 + rng.below(300)).map(|_| rng.below(256) as u8).collect();
        let mut bytes = good[..prefix].to_vec();
        let mut frame = (records.len() as u32).to_le_bytes().to_vec();
        frame.extend((1 + rng.below(records.len() as u64) as u32).to_le_bytes());
        let checksum = crc32c::crc32c_append(crc32c::crc32c(&frame), &records);
        bytes.extend(frame);
        bytes.extend(checksum.to_le_bytes());
        bytes.extend(records);
        read_all(&bytes);
    }
}

#[test]
fn a_length_that_is_not_there_takes_no_memory() {
    let mut bytes = written(&head(), &[]);
    bytes.truncate(bytes.len() - 12);
    bytes.extend([0xFF; 12]);
    let mut reader = TraceReader::new(&bytes[..]).expect("the head is good");
    assert!(matches!(reader.read(), Err(TraceError::Damaged { .. })));
    assert!(matches!(TraceReader::new(&b"PK\x03\x04"[..]), Err(TraceError::NotATrace)));
    assert!(matches!(TraceReader::new(&b""[..]), Err(TraceError::NotATrace)));
    bytes[8] = 9;
    assert!(matches!(TraceReader::new(&bytes[..]), Err(TraceError::Version(9))));
}

#[test]
fn what_lies_outside_the_disk_is_not_written() {
    let mut writer = TraceWriter::new(Vec::new(), &Head::new(8192)).expect("a small head");
    let event = Event { time_us: 0, operation: Operation::Write, offset_bytes: 4096, len_bytes: 4097 };
    assert!(matches!(writer.push(&event), Err(TraceError::Event(_))));
}
