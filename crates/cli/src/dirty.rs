//! `spillway stats --dirty` and `spillway machine stats --dirty`: where the guest wrote most since the last reset, as a table or as JSON.
//!
//! Invariant: an offset is shown as a whole number of bytes, so that it can be pasted into a calculation.

use crate::args::Stats as Args;
use crate::error::{Exit, Failure};
use crate::output;
use crate::table::percent;
use serde_json::Value;
use spillway_api::DirtyRanges;
use spillway_control::counters::group;
use spillway_control::{Client, Dirty, DirtyRange, Request, bytes};
use std::fmt::Write;

/// The unit that the disk counts in.
const BLOCK_BYTES: u64 = 4096;

/// Shows the ranges that were written most.
pub fn dirty(args: &Args, client: &mut Client) -> Result<(), Failure> {
    let limit = args.top.unwrap_or(Dirty::ROWS_DEFAULT);
    let value = client.ask(&Request::Dirty { limit })?;
    let text = if args.json { format!("{value:#}\n") } else { table(&read(value)?) };
    output::print(&text).map(|_| ())
}

/// The table of a machine's disk, as the daemon has it.
pub fn of_machine(ranges: &DirtyRanges) -> String {
    let range = |range: &spillway_api::DirtyRange| DirtyRange {
        offset_bytes: range.offset_bytes,
        length_bytes: range.length_bytes,
        written_bytes: range.written_bytes,
    };
    table(&Dirty {
        generation: ranges.generation,
        size_bytes: ranges.size_bytes,
        written_bytes: ranges.written_bytes,
        ranges_total: ranges.ranges_total,
        ranges: ranges.ranges.iter().map(range).collect(),
        ..Dirty::default()
    })
}

fn read(value: Value) -> Result<Dirty, Failure> {
    serde_json::from_value(value).map_err(|e| {
        Failure::new(
            Exit::Unavailable,
            format!(
                "the worker's answer cannot be read ({e}): use a spillway of the same version as the worker"
            ),
        )
    })
}

/// A line for each range, after one for all of the disk.
fn table(dirty: &Dirty) -> String {
    let mut out = format!(
        "disk of {}, generation {}: {} written\n",
        bytes(dirty.size_bytes),
        dirty.generation,
        bytes(dirty.written_bytes)
    );
    if dirty.ranges.is_empty() {
        return out;
    }
    let _ =
        writeln!(out, "\n{:>16}{:>12}{:>16}{:>12}{:>8}", "offset", "length", "blocks", "written", "share");
    for range in &dirty.ranges {
        let _ = writeln!(
            out,
            "{:>16}{:>12}{:>16}{:>12}{:>8}",
            range.offset_bytes,
            bytes(range.length_bytes),
            group(range.written_bytes / BLOCK_BYTES),
            bytes(range.written_bytes),
            percent(range.written_bytes, dirty.written_bytes)
        );
    }
    let shown = dirty.ranges.len() as u64;
    if dirty.ranges_total > shown {
        let rest =
            dirty.ranges.iter().fold(dirty.written_bytes, |rest, r| rest.saturating_sub(r.written_bytes));
        let _ = writeln!(
            out,
            "{} more with {} ({}): --top N shows more",
            group(dirty.ranges_total - shown),
            bytes(rest),
            percent(rest, dirty.written_bytes)
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_says_where_and_how_much() {
        let range = |offset_bytes, length_bytes, written_bytes| DirtyRange {
            offset_bytes,
            length_bytes,
            written_bytes,
        };
        let dirty = Dirty {
            size_bytes: 10 << 30,
            generation: 3,
            written_bytes: 8 << 30,
            ranges_total: 1002,
            ranges: vec![range(4_294_967_296, 64 << 20, 6 << 30), range(0, 2 << 20, 1 << 30)],
            ..Dirty::default()
        };
        let text = table(&dirty);
        let lines: Vec<Vec<&str>> = text.lines().map(|l| l.split_whitespace().collect()).collect();
        assert_eq!(lines[0].join(" "), "disk of 10.0 GiB, generation 3: 8.0 GiB written");
        assert_eq!(lines[3].join(" "), "4294967296 64.0 MiB 1,572,864 6.0 GiB 75.0%");
        assert_eq!(lines[4].join(" "), "0 2.0 MiB 262,144 1.0 GiB 12.5%");
        assert_eq!(lines[5].join(" "), "1,000 more with 1.0 GiB (12.5%): --top N shows more");
    }

    #[test]
    fn nothing_written_is_one_line_and_nonsense_is_no_panic() {
        assert_eq!(table(&Dirty::default()).lines().count(), 1);
        let most = DirtyRange { offset_bytes: u64::MAX, length_bytes: u64::MAX, written_bytes: u64::MAX };
        let ranges = vec![most.clone(), most];
        let dirty = Dirty { ranges, ranges_total: u64::MAX, ..Dirty::default() };
        assert_eq!(table(&dirty).lines().count(), 6);
    }
}
