//! Writing to the terminal. A reader that has gone (`spillway stats | head -1`) is no failure; a full disk is.
//!
//! Invariant: nothing here panics, whatever has become of standard output.

use crate::error::{ErrorKind, SupervisorError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{self, Write};

/// Writes text to standard output. `false`: nobody reads it any more.
pub fn print(text: &str) -> Result<bool, SupervisorError> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(e) => {
            let what = "cannot write to standard output";
            Err(SupervisorError::caused(ErrorKind::Create, what, e, "see where it goes"))
        }
    }
}

/// Folds the paragraphs of an error about arguments, as clap writes them, into one line; the usage below them is left to
/// `--help`.
pub fn in_one_line(text: &str) -> String {
    let text = text.split("\n\nUsage:").next().unwrap_or(text);
    let text = text.split("\n\nFor more information").next().unwrap_or(text);
    let paragraphs: Vec<String> =
        text.split("\n\n").map(|p| p.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    let line = paragraphs.join("; ");
    format!("{}: see --help", line.strip_prefix("error: ").unwrap_or(&line))
}

/// One line on standard error: `spillway: error: ...`.
pub fn complain(severity: &str, message: &str) {
    let _ = writeln!(io::stderr(), "spillway: {severity}: {message}");
}

/// Where a supervisor's log lines go. A line that nobody takes is dropped: a pipe that is not read, or a terminal that was
/// stopped, must not keep a disk from its next worker.
pub fn log() -> Box<dyn FnMut(&str)> {
    Box::new(|line| {
        let stderr = io::stderr();
        let mut out = [PollFd::new(&stderr, PollFlags::OUT)];
        if matches!(poll(&mut out, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(1..)) {
            // As much as a pipe that has space takes at once.
            let line: String = line.chars().take(1000).collect();
            complain("notice", &line);
        }
    })
}
