//! `spillway trace info`: what a trace holds.

use super::{Format, Source};
use crate::advise::ram;
use crate::error::Failure;
use crate::output;
use crate::table::percent;
use spillway_advisor::shards::{Sample, Shards};
use spillway_advisor::{BLOCK_BYTES, Operation, limit_bytes};
use spillway_control::bytes;
use spillway_control::counters::group;
use std::fmt::Write;
use std::path::PathBuf;

/// Options of `trace info`.
#[derive(Debug, clap::Args)]
pub struct Info {
    /// Trace file; - for standard input. Unpacked if the name ends in .gz, .tar or .tgz
    #[arg(value_name = "TRACE")]
    trace: PathBuf,
    #[command(flatten)]
    format: Format,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Shows it.
pub fn info(args: &Info) -> Result<(), Failure> {
    let mut source = Source::open(&args.trace, &args.format)?;
    let disk_bytes = Some(source.head().disk_bytes).filter(|bytes| *bytes > 0);
    let mut sample = Shards::new(disk_bytes.unwrap_or(u64::MAX), Sample { rate: 1.0, ..Sample::default() });
    let (mut counts, mut moved, mut last_us, mut end_bytes) = ([0_u64; 6], [0_u64; 6], 0, 0);
    while let Some(event) = source.next()? {
        let operation = event.operation as usize;
        counts[operation] += 1;
        moved[operation] = moved[operation].saturating_add(event.len_bytes);
        last_us = event.time_us;
        end_bytes = end_bytes.max(event.offset_bytes + event.len_bytes);
        sample.event(&event);
    }
    source.tell_end();
    let (head, totals) = (source.head(), sample.profile().totals());
    let seconds = last_us as f64 / 1e6;
    let words = ["reads", "writes", "write_zeroes", "discards", "flushes", "resets"];
    if args.json {
        let mut json = serde_json::json!({
            "disk_bytes": head.disk_bytes, "begin_unix_us": head.begin_unix_us, "notes": head.notes, "seconds": seconds,
            "end": source.end(), "end_bytes": end_bytes, "peak_live_bytes": totals.peak_live_blocks * BLOCK_BYTES,
        });
        for (i, word) in words.iter().enumerate() {
            json[word] = serde_json::json!({ "requests": counts[i], "bytes": moved[i] });
        }
        return output::print(&format!("{json:#}\n")).map(drop);
    }
    let mut out = String::new();
    let size =
        disk_bytes.map_or("a disk of unknown size".into(), |size| format!("a disk of {}", bytes(size)));
    let all: u64 = counts.iter().sum();
    let _ = writeln!(out, "{size}, {} requests in {seconds:.1} s", group(all));
    let _ = writeln!(out, "\n{:<14}{:>16}{:>8}{:>14}", "", "requests", "share", "bytes");
    for operation in Operation::ALL {
        let i = operation as usize;
        if counts[i] > 0 {
            let word = words[i].replace('_', " ");
            let _ = writeln!(
                out,
                "{word:<14}{:>16}{:>8}{:>14}",
                group(counts[i]),
                percent(counts[i], all),
                bytes(moved[i])
            );
        }
    }
    let (live, written) = (totals.peak_live_blocks, totals.written_blocks * BLOCK_BYTES);
    let _ = writeln!(
        out,
        "\nIn whole blocks {} were written; about {} lived at a time at most, which a RAM tier of {} holds.",
        bytes(written),
        bytes(live * BLOCK_BYTES),
        ram(limit_bytes(live))
    );
    output::print(&out).map(drop)
}
