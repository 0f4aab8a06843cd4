//! Bytes as a trace, or as a text to be imported: every event that comes of them passed its check, and the engines take it;
//! what is written of them is read again.
//!
//! The first byte says what the others are: a trace's file, or one of the formats, or gzip.

use spillway_advisor::curve::{Curve, DEFAULT_GOAL, Point};
use spillway_advisor::estimate::{Bursts, collector_rewrites};
use spillway_advisor::import::{Format, Gunzip, Import, Options, Untar};
use spillway_advisor::lru::Lru;
use spillway_advisor::policy::Policy;
use spillway_advisor::shards::{Sample, Shards};
use spillway_advisor::trace::{End, Head, TraceReader, TraceWriter};
use spillway_advisor::{Event, Operation, share_budget};
use std::io::Read;

/// Most blocks that the engines are given one by one, so that one input does not take minutes.
const MOST_BLOCKS: u64 = 1 << 16;

/// Reads the bytes, and counts what comes of them.
pub fn trace_file(data: &[u8]) {
    let Some((&kind, bytes)) = data.split_first() else { return };
    match Format::ALL.get(usize::from(kind)) {
        Some(&format) => {
            let options = Options { skip_bad: true, ..Options::default() };
            let mut events = Vec::new();
            events.extend(Import::new(bytes, format, options).map_while(Result::ok));
            count(u64::MAX, &events);
            again(&events);
        }
        None if kind == 0xFF => {
            let mut out = Vec::new();
            // A thousand times what was packed is the most that can come out.
            let _unpacked = Gunzip::new(bytes).take(1 << 24).read_to_end(&mut out);
            out.clear();
            let _unpacked = Untar::new(bytes).take(1 << 24).read_to_end(&mut out);
        }
        None => {
            let Ok(mut reader) = TraceReader::new(bytes) else { return };
            let events: Vec<Event> = reader.by_ref().map_while(Result::ok).collect();
            assert!(events.len() <= bytes.len(), "more events than bytes");
            assert!(matches!(reader.read(), Ok(None)), "nothing follows the end");
            let end = reader.head().end_bytes();
            events.iter().for_each(|e| e.check(end).expect("the reader checks"));
            count(end, &events);
            again(&events);
        }
    }
}

fn count(disk_bytes: u64, events: &[Event]) {
    let mut lru = Lru::new(disk_bytes);
    let mut shards = Shards::new(disk_bytes, Sample { rate: 1.0, most_blocks: Some(64) });
    let mut policy = Policy::new(disk_bytes, &[64 << 10, 1 << 20], 1.0);
    let (mut bursts, mut left) = (Bursts::default(), MOST_BLOCKS);
    for event in events {
        if matches!(event.operation, Operation::Read | Operation::Write) {
            let Some(rest) = left.checked_sub(event.len_bytes / 4096 + 2) else { break };
            left = rest;
        }
        lru.event(event);
        shards.event(event);
        policy.event(event);
        bursts.event(event);
    }
    let (exact, sample) = (lru.profile(), shards.profile());
    assert_eq!(exact.totals().written_blocks, sample.totals().written_blocks);
    assert_eq!(exact.evicted_blocks(exact.totals().peak_live_blocks), 0, "everything fits");
    assert!(exact.evicted_blocks(0) <= exact.totals().written_blocks + exact.totals().read_blocks);
    let curves = [&exact, &sample].map(|profile| Curve::new(profile, DEFAULT_GOAL));
    for curve in &curves {
        let last = curve.curve.last().expect("points");
        assert_eq!((last.ram_bytes, last.overflow_write_bytes), (curve.zero_overflow_bytes, 0));
        assert!(curve.recommended_bytes <= curve.zero_overflow_bytes);
        bursts.urgent(last, 1 << 20);
    }
    let points: Vec<Point> = policy.outcomes().into_iter().map(Point::from).collect();
    points.iter().for_each(|point| _ = collector_rewrites(point, 1 << 30));
    let limits = share_budget(&[points, curves[0].curve.clone()], 2 << 20);
    assert!(limits.is_none_or(|limits| limits.iter().sum::<u64>() <= 2 << 20));
}

/// What is written is read.
fn again(events: &[Event]) {
    let mut writer = TraceWriter::new(Vec::new(), &Head::new(0)).expect("a small head");
    events.iter().for_each(|e| writer.push(e).expect("it passed its check"));
    let file = writer.finish().expect("memory");
    let mut reader = TraceReader::new(&file[..]).expect("just written");
    let read: Vec<Event> = reader.by_ref().map(|e| e.expect("just written")).collect();
    assert_eq!((read.as_slice(), reader.end()), (events, End::Whole));
}

/// A small trace, and a line or two of each format.
pub fn seeds() -> Vec<Vec<u8>> {
    let texts: [&str; 7] = [
        "8,0 1 1 0.000000000 697 Q W 223490 + 8 [sh]\n8,0 1 2 0.1 697 Q DS 8 + 64 [sh]\nCPU0\n",
        "fio version 2 iolog\nf open\nf write 0 4096\nf wait 10 0\nf trim 0 8192\n",
        "fio version 3 iolog\n1 f open\n2 f read 0 4096\n3 f sync 0 0\n",
        "128166372003061629,hm,1,Read,383496192,32768,413\n",
        "Timestamp,Response,IOType,LUN,Offset,Size\n1456135200.01,0.1,W,3,8192,4096\n",
        "419,W,8192,16384,1577808000000626\n",
        "1538323200,12910952,128,1,1063\n",
    ];
    let text = |(kind, text): (u8, &str)| [&[kind], text.as_bytes()].concat();
    let mut seeds: Vec<Vec<u8>> = (0..).zip(texts).map(text).collect();
    let mut writer = TraceWriter::new(vec![0x80], &Head::new(1 << 30)).expect("a small head");
    for (i, operation) in (0..).zip(Operation::ALL.into_iter().cycle().take(30)) {
        let range = if operation.has_range() { (i * 12_288 % 65_536, 8192) } else { (0, 0) };
        let event = Event { time_us: i * 100, operation, offset_bytes: range.0, len_bytes: range.1 };
        writer.push(&event).expect("inside the disk");
    }
    seeds.push(writer.finish().expect("memory"));
    let packed = [0x1F, 0x8B, 8, 0, 0, 0, 0, 0, 0, 3, 0x4B, 4, 0, 0x43, 0xBE, 0xB7, 0xE8, 1, 0, 0, 0];
    seeds.push([&[0xFF], &packed[..]].concat());
    seeds
}
