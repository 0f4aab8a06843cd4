//! The guard: a process that ends the VMMs of machines with names of a fleet when their deadline is over, whatever the daemon does
//! ([061](../../../../docs/design/061-named-machines.md)). Owns its loop, and how the daemon starts it.
//!
//! It decides nothing, and reads nothing but its page, the clock and the folders of machines. Invariant: past the deadline each VMM of a
//! machine whose folder is marked is killed within one interval of being seen, until the deadline moves on.

mod mark;
mod page;

pub use mark::{GuardMark, MARK, marked};
pub use page::{GuardPage, now};

use crate::error::HostError;
use crate::events::log_line;
use crate::machines::vmm_process;
use crate::processes::{self, ObservedProcess, Process};
use crate::scopes::Scopes;
use spillway_api::ErrorCode;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Interval of looks at the clock.
const INTERVAL: Duration = Duration::from_millis(50);
/// Interval of looks at the folders before the deadline, so that what runs is known when it comes.
const FOLDERS_MS: u64 = 2_000;
/// Time since its last look after which a guard counts as none.
const FRESH_MS: u64 = 2_000;
/// Name of the process, and of its subcommand.
pub const PROCESS: &str = "guard";
const PAGE: &str = "page";

/// Folder of the guard beside the folder of all machines.
pub fn folder(machines: &Path) -> PathBuf {
    machines.with_file_name("guard")
}

/// Opens the page of the guard of these machines, if there was ever one.
pub fn existing(machines: &Path) -> Option<GuardPage> {
    let path = folder(machines).join(PAGE);
    path.exists().then(|| GuardPage::open(&path).ok())?
}

/// Opens the page of the guard of these machines, or makes it.
///
/// # Errors
/// The folder or the file cannot be made.
pub fn open(machines: &Path) -> Result<GuardPage, HostError> {
    let folder = folder(machines);
    let failed = |e: std::io::Error| {
        HostError::new(ErrorCode::Internal, format!("{}: the page of the guard: {e}", folder.display()))
    };
    fs::create_dir_all(&folder).map_err(failed)?;
    GuardPage::open(&folder.join(PAGE)).map_err(failed)
}

/// Whether a guard has looked lately.
pub fn is_fresh(page: &GuardPage) -> bool {
    now().since_ms(page.looked()) < FRESH_MS
}

/// Starts the guard of these machines, if none runs.
///
/// # Errors
/// It cannot be started.
pub fn begin(machines: &Path, scopes: &Scopes) -> Result<(), HostError> {
    let folder = folder(machines);
    if let ObservedProcess::Alive(_) = processes::look(&folder, PROCESS)? {
        return Ok(());
    }
    let program = std::env::current_exe().map_err(|e| {
        HostError::new(ErrorCode::Internal, format!("the guard: the daemon's own program is not found: {e}"))
    })?;
    // A program that was replaced while it runs.
    let program = program.to_string_lossy().trim_end_matches(" (deleted)").to_owned();
    let mut command = Command::new(program);
    command.arg(PROCESS).arg(std::path::absolute(machines).unwrap_or_else(|_| machines.to_owned()));
    let command = scopes.place(&folder, PROCESS, command);
    processes::start(&folder, PROCESS, command).map(drop)
}

/// Guards the machines below this folder, until the page is removed.
///
/// # Errors
/// The page cannot be opened.
pub fn run(machines: &Path) -> Result<(), HostError> {
    let page = open(machines)?;
    // Whoever is short of memory is to end something else. Not every guard may ask for that.
    let _ = fs::write("/proc/self/oom_score_adj", "-1000");
    let mut known: BTreeMap<PathBuf, Process> = BTreeMap::new();
    let (mut seen, mut was_over) = (None, false);
    while page.is_linked() {
        let at = now();
        page.look(at);
        let is_over = page.is_over();
        if is_over && !was_over && !known.is_empty() {
            log_line("guard: the deadline is over: the host has no lease");
        }
        was_over = is_over;
        if is_over {
            // Those that are known are ended before any file is looked at.
            end(&known, &page);
        }
        if is_over || seen.is_none_or(|seen| at.since_ms(seen) >= FOLDERS_MS) {
            known = marked(machines)
                .into_iter()
                .filter_map(|folder| Some((folder.clone(), find(&folder)?)))
                .collect();
            seen = Some(at);
        }
        if is_over {
            end(&known, &page);
        }
        std::thread::sleep(INTERVAL);
    }
    Ok(())
}

/// The VMM that runs in a machine's folder.
pub fn find(folder: &Path) -> Option<Process> {
    vmm_process(folder).or_else(|| {
        let mark = GuardMark::read(folder)?;
        let pid = fs::read_to_string(mark.pid_file?).ok()?.trim().parse().ok()?;
        processes::peek_by_argument(pid, &mark.uuid, PROCESS)
    })
}

fn end(known: &BTreeMap<PathBuf, Process>, page: &GuardPage) {
    for (folder, process) in known.iter().filter(|_| page.is_over()) {
        if !process.ends_within(Duration::ZERO) {
            log_line(&format!(
                "guard: the VMM in {} is killed (process {})",
                folder.display(),
                process.pid()
            ));
            process.kill();
        }
    }
}

#[cfg(test)]
mod tests;
