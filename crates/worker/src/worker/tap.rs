//! What the disk is asked, for those who look on: the sampled curve, which goes along always, and a recorder's ring, while
//! there is one.
//!
//! Owns both; changes nothing of a request. Invariant: each request is told once, in the order in which the disk took
//! them; one with blocks of all zeroes, which take no slot, in pieces: these are told as zeroes. One that is longer than a
//! trace's events may be is told in pieces too.

use spillway_advisor::curve::{Curve, DEFAULT_GOAL};
use spillway_advisor::shards::{Sample, Shards};
use spillway_advisor::{BLOCK_BYTES, Event, MAX_REQUEST_BYTES, Operation};
use spillway_control::trace_ring::{RingError, Writer};
use spillway_core::{self as core, Request, SECTOR_BYTES};
use std::os::fd::OwnedFd;

/// The requests' way to those who look on.
pub struct Tap {
    curve: Shards,
    since_ns: u64,
    /// From when, and from how many blocks, the write cache has filled.
    filling: (u64, u64),
    ring: Option<Writer>,
}

impl Tap {
    /// Of a disk of so many bytes, from now on. `fill` are the blocks in its write cache, and how many there may be.
    pub fn new(disk_bytes: u64, fill: (u64, u64), now_ns: u64) -> Tap {
        let curve = Shards::new(disk_bytes, Sample::default());
        Tap { curve, since_ns: now_ns, filling: (now_ns, fill.0), ring: None }
    }

    /// Somebody records, into this memory; or nobody any more.
    pub fn record(&mut self, memory: Option<OwnedFd>) -> Result<(), RingError> {
        self.ring = memory.map(|memory| Writer::open(&memory)).transpose()?;
        Ok(())
    }

    /// The disk has taken a request. Of a write, `zeroes` are the pieces that were all zeroes, by byte and length within it.
    #[inline]
    pub fn request(&mut self, request: &Request, zeroes: &mut Vec<(u32, u32)>, now_ns: u64) {
        let operation = match request.operation {
            core::Operation::Read => Operation::Read,
            core::Operation::Write { .. } => Operation::Write,
            core::Operation::WriteZeroes { .. } => Operation::WriteZeroes,
            core::Operation::Discard => Operation::Discard,
            core::Operation::Flush => Operation::Flush,
        };
        let event = Event {
            time_us: now_ns / 1000,
            operation,
            offset_bytes: request.sector * SECTOR_BYTES,
            len_bytes: u64::from(request.sectors) * SECTOR_BYTES,
        };
        if zeroes.is_empty() { self.tell(&event) } else { self.pieces(&event, zeroes) }
    }

    /// Everything that was written is forgotten.
    pub fn reset(&mut self, now_ns: u64) {
        self.filling = (now_ns, 0);
        let operation = Operation::Reset;
        self.tell(&Event { time_us: now_ns / 1000, operation, offset_bytes: 0, len_bytes: 0 });
        self.publish();
    }

    /// Recorders see what was told.
    #[inline]
    pub fn publish(&mut self) {
        if let Some(ring) = &mut self.ring {
            ring.publish();
        }
    }

    /// The curve up to now, as JSON: that of the advisor, `seconds` of it, what it takes, and how the write cache has filled
    /// since the worker began or the disk was reset.
    pub fn curve(&self, goal: Option<f64>, fill: (u64, u64), now_ns: u64) -> serde_json::Value {
        let curve = Curve::new(&self.curve.profile(), goal.unwrap_or(DEFAULT_GOAL));
        let mut json = serde_json::to_value(curve).expect("plain numbers");
        let since = |ns: u64| now_ns.saturating_sub(ns) as f64 / 1e9;
        json["seconds"] = since(self.since_ns).into();
        let ((filling_ns, from), (blocks, most)) = (self.filling, fill);
        json["fill"] = serde_json::json!({
            "seconds": since(filling_ns),
            "grown_bytes": blocks.saturating_sub(from) * BLOCK_BYTES,
            "left_bytes": most.saturating_sub(blocks) * BLOCK_BYTES,
        });
        json["memory_bytes"] = self.curve.memory_bytes().into();
        json
    }

    #[inline]
    fn tell(&mut self, event: &Event) {
        let moves = matches!(event.operation, Operation::Read | Operation::Write);
        if moves && event.len_bytes > MAX_REQUEST_BYTES {
            return self.tell_in_parts(event);
        }
        self.curve.event(event);
        if let Some(ring) = &mut self.ring {
            ring.push(event);
        }
    }

    #[cold]
    fn tell_in_parts(&mut self, event: &Event) {
        let end = event.offset_bytes + event.len_bytes;
        let mut at = event.offset_bytes;
        while at < end {
            let len_bytes = (end - at).min(MAX_REQUEST_BYTES);
            self.tell(&Event { offset_bytes: at, len_bytes, ..*event });
            at += len_bytes;
        }
    }

    #[cold]
    fn pieces(&mut self, event: &Event, zeroes: &mut Vec<(u32, u32)>) {
        // Up to where it was told, and the zeroes from there on that were found.
        let (mut at, mut run) = (0, 0..0);
        for (zero_at, len) in zeroes.drain(..).map(|(at, len)| (u64::from(at), u64::from(len))) {
            let whole = (event.offset_bytes + zero_at).is_multiple_of(BLOCK_BYTES) && len == BLOCK_BYTES;
            if !whole || zero_at < run.end || zero_at + len > event.len_bytes {
                continue;
            }
            if zero_at > run.end {
                self.piece(event, at..run.start, event.operation);
                self.piece(event, run.clone(), Operation::WriteZeroes);
                (at, run) = (run.end, zero_at..zero_at);
            }
            run.end = zero_at + len;
        }
        self.piece(event, at..run.start, event.operation);
        self.piece(event, run.clone(), Operation::WriteZeroes);
        self.piece(event, run.end..event.len_bytes, event.operation);
    }

    fn piece(&mut self, of: &Event, range: std::ops::Range<u64>, operation: Operation) {
        if !range.is_empty() {
            let (offset_bytes, len_bytes) = (of.offset_bytes + range.start, range.end - range.start);
            self.tell(&Event { operation, offset_bytes, len_bytes, ..*of });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spillway_control::trace_ring::{Reader, create};
    use spillway_core::Token;

    fn write(sector: u64, sectors: u32) -> Request {
        Request { token: Token(0), operation: core::Operation::Write { fua: false }, sector, sectors }
    }

    #[test]
    fn blocks_of_zeroes_are_told_as_such() {
        let mut tap = Tap::new(1 << 30, (7, 10), 0);
        let fill = |tap: &Tap, blocks| tap.curve(None, (blocks, 10), 2_000_000_000)["fill"].to_string();
        assert_eq!(fill(&tap, 9), r#"{"grown_bytes":8192,"left_bytes":4096,"seconds":2.0}"#);
        assert_eq!(fill(&tap, 6), r#"{"grown_bytes":0,"left_bytes":16384,"seconds":2.0}"#);
        let memory = create().unwrap();
        let mut reader = Reader::open(&memory).unwrap();
        tap.record(Some(memory)).unwrap();
        // Bytes 2048 to 22528: of the blocks in between the second and third are zero, and half of the first.
        let mut zeroes = vec![(0, 2048), (6144, 4096), (10240, 4096)];
        tap.request(&write(4, 40), &mut zeroes, 5_000);
        tap.request(&write(0, 8), &mut zeroes, 6_000);
        tap.request(&write(8, 8), &mut vec![(0, 4096)], 7_000);
        tap.reset(8_000);
        let mut events = Vec::new();
        assert_eq!(reader.read(&mut events), 0);
        let told: Vec<_> =
            events.iter().map(|e| (e.time_us, e.operation, e.offset_bytes, e.len_bytes)).collect();
        assert_eq!(
            told,
            [
                (5, Operation::Write, 2048, 6144),
                (5, Operation::WriteZeroes, 8192, 8192),
                (5, Operation::Write, 16384, 6144),
                (6, Operation::Write, 0, 4096),
                (7, Operation::WriteZeroes, 4096, 4096),
                (8, Operation::Reset, 0, 0),
            ]
        );
        // Longer than an event may be.
        let long = Request { operation: core::Operation::Read, ..write(8, (1 << 22) + 8) };
        tap.request(&long, &mut Vec::new(), 8_500);
        tap.publish();
        assert_eq!(reader.read(&mut events), 0);
        let long = events.drain(told.len()..).map(|e| (e.operation, e.offset_bytes, e.len_bytes));
        let expected = [(4096, 1 << 30), (4096 + (1 << 30), 1 << 30), (4096 + (2 << 30), 4096)];
        assert!(long.eq(expected.map(|(at, len)| (Operation::Read, at, len))));
        // Nobody records any more; the curve goes on.
        tap.record(None).unwrap();
        tap.request(&write(0, 8), &mut Vec::new(), 9_000);
        tap.publish();
        assert_eq!((reader.read(&mut events), events.len()), (0, told.len()));
        assert_eq!(tap.curve(None, (0, 1), 2_000_000_000)["totals"]["written_blocks"], 6);
        assert_eq!(tap.curve(None, (0, 1), 2_000_000_000)["seconds"], 2.0);
        tap.reset(1_500_000_000);
        assert_eq!(fill(&tap, 6), r#"{"grown_bytes":24576,"left_bytes":16384,"seconds":0.5}"#);
    }
}
