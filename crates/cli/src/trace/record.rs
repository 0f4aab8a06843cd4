//! `spillway trace record`: what a disk is asked, until somebody says that it is enough.
//!
//! Invariant: what was recorded is in the file a second later; requests that came faster than they could be written are
//! counted, and told.

use super::Out;
use crate::error::{Exit, Failure};
use crate::output;
use indicatif::{ProgressBar, ProgressStyle};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use spillway_advisor::trace::{Head, TraceWriter};
use spillway_control::{Client, Signals};
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Between two looks into the ring, which holds a fraction of a second.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
/// How long what was recorded stays out of the file.
const FLUSH: Duration = Duration::from_secs(1);

/// Options of `trace record`.
#[derive(Debug, clap::Args)]
pub struct Record {
    /// Control socket of the disk
    #[arg(value_name = "SOCK")]
    control: PathBuf,
    #[command(flatten)]
    out: Out,
    /// Stop after this many seconds [default: at Ctrl-C, or when the disk ends]
    #[arg(long, value_name = "N")]
    seconds: Option<u64>,
    /// Print one JSON object at the end: requests, lost, seconds
    #[arg(long)]
    json: bool,
}

/// Records.
pub fn record(args: &Record) -> Result<(), Failure> {
    let signals = Signals::new()?;
    let mut recorder = Client::connect(&args.control)?.trace()?;
    let mut head = Head::new(recorder.disk["size_bytes"].as_u64().unwrap_or(0));
    let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    head.begin_unix_us = unix.as_micros() as u64;
    let serial = recorder.disk["serial"].as_str().unwrap_or_default();
    head.notes.insert("serial".into(), serial.into());
    let live = recorder.disk["live_bytes"].as_u64().unwrap_or(0);
    head.notes.insert("live_bytes".into(), live.to_string());
    head.notes.insert("by".into(), concat!("spillway ", env!("CARGO_PKG_VERSION")).into());
    let failed = |e: &_| args.out.failed(e);
    let mut writer = TraceWriter::new(args.out.create()?, &head).map_err(|e| failed(&e))?;

    let bar = ProgressBar::new_spinner();
    bar.set_style(ProgressStyle::with_template("{msg}").expect("the template is right"));
    let begun = Instant::now();
    let begin_us = monotonic_us();
    let until = args.seconds.map(|seconds| begun + Duration::from_secs(seconds));
    let (mut events, mut requests, mut lost, mut flushed) = (Vec::new(), 0, 0, begun);
    loop {
        let over = {
            let (ended, told) =
                (PollFd::new(&recorder.connection, PollFlags::IN), PollFd::new(&signals, PollFlags::IN));
            let mut fds = [ended, told];
            let ready = poll(&mut fds, Some(&LOOK)).unwrap_or(0) > 0;
            ready || until.is_some_and(|until| Instant::now() >= until)
        };
        // Also after the last look: what had come by then.
        lost += recorder.ring.read(&mut events);
        requests += events.len() as u64;
        for event in &mut events {
            event.time_us = event.time_us.saturating_sub(begin_us);
            writer.push(event).map_err(|e| failed(&e))?;
        }
        events.clear();
        if over || flushed.elapsed() >= FLUSH {
            writer.flush().map_err(|e| failed(&e))?;
            flushed = Instant::now();
            bar.set_message(format!(
                "{requests} requests in {} s: Ctrl-C ends it",
                begun.elapsed().as_secs()
            ));
        }
        if over {
            break;
        }
    }
    bar.finish_and_clear();
    // One with gaps is not whole: it gets no mark of its end.
    if lost == 0 {
        writer.finish().map_err(|e| failed(&e))?;
    }
    let seconds = begun.elapsed().as_secs_f64();
    if args.json {
        let said = serde_json::json!({ "requests": requests, "lost": lost, "seconds": seconds });
        output::print(&format!("{said}\n"))?;
    } else {
        output::complain(
            "notice",
            &format!("{requests} requests in {seconds:.1} s are in {}", args.out.out.display()),
        );
    }
    match lost {
        0 => Ok(()),
        lost => {
            let message = format!(
                "{lost} requests came faster than they could be written, and are missing: the trace has no mark of its end"
            );
            Err(Failure::new(Exit::Internal, message))
        }
    }
}

/// The clock that requests are told by.
fn monotonic_us() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000 + now.tv_nsec as u64 / 1000
}
