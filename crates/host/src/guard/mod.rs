//! The guard: a process that ends the VMMs of machines with names of a fleet when their deadline is over, whatever the daemon does
//! ([061](../../../../docs/design/061-named-machines.md)). Owns how it runs, and who is a guard.
//!
//! It decides nothing, and reads nothing but its page, the clock and the folders of machines. One thread kills, and another one looks at the
//! folders. Invariant: past the deadline each VMM of a machine whose folder is marked is killed within one interval of being seen, until the
//! deadline moves on.

mod keeper;
mod killer;
mod lookout;
mod mark;
mod page;

pub use keeper::GuardKeeper;
pub use mark::{GuardMark, MARK, UnknownMark, marked};
pub use page::{GuardPage, now};

use crate::error::HostError;
use crate::events::log_line;
use crate::machines::vmm_process;
use crate::processes::{self, Process};
use killer::{INTERVAL, Killer};
use lookout::GuardLookout;
use page::SLOTS;
use rustix::mm::{MlockAllFlags, mlockall};
use spillway_api::ErrorCode;
use std::ffi::OsString;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Name of the subcommand.
const PROCESS: &str = "guard";
/// Names of the processes, by slot.
const SLOT_PROCESSES: [&str; SLOTS] = [PROCESS, "guard-2"];
const PAGE: &str = "page";
/// Stack of the thread that kills: all of it is locked in memory.
const STACK_BYTES: usize = 128 << 10;

/// Folder of the guard beside the folder of all machines.
fn folder(machines: &Path) -> PathBuf {
    machines.with_file_name("guard")
}

/// Path of the page of the guard of these machines.
pub fn page_path(machines: &Path) -> PathBuf {
    folder(machines).join(PAGE)
}

/// Opens the page of the guard of these machines, if there was ever one.
pub fn existing(machines: &Path) -> Option<GuardPage> {
    let path = page_path(machines);
    path.exists().then(|| GuardPage::open(&path).ok())?
}

/// Opens the page of the guard of these machines, or makes it.
///
/// # Errors
/// The folder or the file cannot be made.
pub fn open(machines: &Path) -> Result<GuardPage, HostError> {
    make_page(machines, GuardPage::open)
}

/// Makes a page with the deadline of this one, which was removed or replaced.
///
/// # Errors
/// The folder or the file cannot be made.
pub fn open_again(machines: &Path, page: &GuardPage) -> Result<GuardPage, HostError> {
    make_page(machines, |path| GuardPage::replace(path, page.deadline()))
}

fn make_page(
    machines: &Path,
    make: impl FnOnce(&Path) -> io::Result<GuardPage>,
) -> Result<GuardPage, HostError> {
    let folder = folder(machines);
    let made = fs::create_dir_all(&folder).and_then(|()| make(&folder.join(PAGE)));
    made.map_err(|e| {
        HostError::new(ErrorCode::Internal, format!("{}: the page of the guard: {e}", folder.display()))
    })
}

/// Whether a guard of this version looks after these machines.
pub fn is_fresh(page: &GuardPage, machines: &Path) -> bool {
    let kind = kind(machines);
    (0..SLOTS).any(|slot| page.is_fresh(slot, kind))
}

/// Says that a guard looks now, in its place.
#[cfg(test)]
pub fn look(page: &GuardPage, machines: &Path) {
    page.look(0, kind(machines), now());
}

/// Number of the kind of guards that this program starts for these machines: another version, or the same for other machines, has another
/// one. It is not 0.
fn kind(machines: &Path) -> u64 {
    let mut hasher = DefaultHasher::new();
    let machines = std::path::absolute(machines).unwrap_or_else(|_| machines.to_owned());
    (env!("CARGO_PKG_VERSION"), machines).hash(&mut hasher);
    hasher.finish() | 1
}

/// The program that runs.
fn program() -> Result<OsString, HostError> {
    let program = std::env::current_exe().map_err(|e| {
        HostError::new(ErrorCode::Internal, format!("the guard: the daemon's own program is not found: {e}"))
    })?;
    // A program that was replaced while it runs.
    Ok(program.to_string_lossy().trim_end_matches(" (deleted)").into())
}

/// Guards the machines below this folder as a process of its own, until the page is removed and nothing is left to guard.
///
/// # Errors
/// The page cannot be opened.
pub fn run(machines: &Path, slot: usize) -> Result<(), HostError> {
    // Whoever is short of memory is to end something else. Not every guard may ask for that.
    let _ = fs::write("/proc/self/oom_score_adj", "-1000");
    if let Err(e) = mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE) {
        log_line(&format!(
            "guard: its memory cannot be locked, and may be on a disk that does not answer: {e}"
        ));
    }
    guard(machines, slot)
}

/// Guards the machines below this folder.
fn guard(machines: &Path, slot: usize) -> Result<(), HostError> {
    let slot = slot.min(SLOTS - 1);
    let page = Arc::new(open(machines)?);
    let killer = Arc::new(Killer::default());
    let (killing, of) = (Arc::clone(&killer), Arc::clone(&page));
    let thread = std::thread::Builder::new().name("killer".into()).stack_size(STACK_BYTES);
    let thread = thread.spawn(move || killing.run(&of)).map_err(|e| {
        HostError::new(ErrorCode::Exhausted, format!("the guard: its thread cannot be started: {e}"))
    })?;
    let mut lookout = GuardLookout::new(machines, &page, &killer, (slot, kind(machines)));
    while !lookout.is_done() {
        lookout.look();
        std::thread::sleep(INTERVAL);
    }
    killer.stop();
    let _ = thread.join();
    Ok(())
}

/// The VMM that runs in a machine's folder.
///
/// # Errors
/// Nobody can tell whether one runs.
pub fn find(folder: &Path) -> io::Result<Option<Process>> {
    if let Some(process) = vmm_process(folder)? {
        return Ok(Some(process));
    }
    let Some(GuardMark { uuid, pid_file: Some(file), .. }) = GuardMark::read(folder)? else {
        return Ok(None);
    };
    let text = mark::read_if_there(&file)?.unwrap_or_default();
    let pid = String::from_utf8_lossy(&text).trim().parse().ok();
    Ok(pid.and_then(|pid| processes::peek_by_argument(pid, &uuid, PROCESS)))
}

/// Whether a VMM runs in a folder that is marked. What cannot be read may run.
pub fn may_run(folder: &Path) -> bool {
    let runs = || Ok::<_, io::Error>(mark::is_marked(folder)? && find(folder)?.is_some());
    runs().unwrap_or(true)
}

#[cfg(test)]
mod tests;
