//! The thread of the guard that looks at the folders of machines. Owns what the killer knows, the sign that the guard looks, and the log.
//!
//! It may wait for a disk, and nobody waits for it. Invariant: the guard counts as one only while the killer runs and the folders were read a
//! moment ago; what could not be read is known as it was before.

use super::killer::{GuardedVmm, KillList, Killer};
use super::mark::marked;
use super::page::{GuardPage, now};
use super::{SLOT_PROCESSES, find, folder};
use crate::events::log_line;
use crate::processes;
use spillway_fleet::Moment;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Interval of looks at the folders before the deadline, so that what runs is known when it comes.
pub(super) const FOLDERS_MS: u64 = 500;

/// Looks at the folders of machines.
pub(super) struct GuardLookout<'a> {
    machines: &'a Path,
    page: &'a GuardPage,
    killer: &'a Killer,
    /// Slot of the page, and kind of the guard.
    place: (usize, u64),
    /// When all folders were last read.
    read: Option<Moment>,
    /// When they were last tried.
    tried: Option<Moment>,
    /// VMMs of which it was not said yet that they were killed.
    untold: Vec<Arc<GuardedVmm>>,
    was_over: bool,
    /// What was last said of folders that cannot be read.
    told: Option<String>,
}

impl<'a> GuardLookout<'a> {
    pub fn new(
        machines: &'a Path,
        page: &'a GuardPage,
        killer: &'a Killer,
        place: (usize, u64),
    ) -> GuardLookout<'a> {
        let (read, tried, untold, was_over, told) = (None, None, Vec::new(), false, None);
        GuardLookout { machines, page, killer, place, read, tried, untold, was_over, told }
    }

    /// Takes one look.
    pub fn look(&mut self) {
        let (at, is_over) = (now(), self.page.is_over());
        if is_over || self.tried.is_none_or(|tried| at.since_ms(tried) >= FOLDERS_MS) {
            self.tried = Some(at);
            let read = self.read_folders();
            if read.is_ok() {
                self.read = Some(at);
            }
            self.tell_failure(read.err());
        }
        if let Some(read) = self.read {
            let (slot, kind) = self.place;
            // What was read counts until the next reading is due.
            self.page.look(slot, kind, self.killer.looked().min(read.after_ms(FOLDERS_MS)));
        }
        self.tell_kills(is_over);
    }

    /// Whether nothing is left to guard: the page was removed, and no VMM of a marked machine runs.
    pub fn is_done(&self) -> bool {
        !self.page.is_linked()
            && self.read.is_some()
            && self.read == self.tried
            && self.killer.list().is_empty()
    }

    fn read_folders(&mut self) -> io::Result<()> {
        let before = self.killer.list();
        let known: BTreeMap<&Path, &Arc<GuardedVmm>> =
            before.iter().filter(|vmm| vmm.is_alive()).map(|vmm| (vmm.folder.as_path(), vmm)).collect();
        let (mut list, mut done) = (KillList::new(), Ok(()));
        for marked in marked(self.machines)? {
            let marked = marked.map_err(|unknown| (unknown.folder, unknown.error));
            let (folder, unread) =
                marked.map_or_else(|(folder, e)| (folder, Some(e)), |folder| (folder, None));
            // A VMM that runs is the one of its folder.
            if let Some(vmm) = known.get(folder.as_path()) {
                list.push(Arc::clone(vmm));
            } else if unread.is_none() {
                match find(&folder) {
                    Ok(Some(process)) => list.push(self.note(folder.clone(), process)),
                    Ok(None) => {}
                    Err(e) => done = Err(named(&folder, &e)),
                }
            }
            if let Some(e) = unread {
                done = Err(named(&folder, &e));
            }
        }
        self.killer.replace(list);
        done
    }

    fn note(&mut self, folder: PathBuf, process: processes::Process) -> Arc<GuardedVmm> {
        let vmm = Arc::new(GuardedVmm::new(folder, process));
        self.untold.push(Arc::clone(&vmm));
        vmm
    }

    fn tell_failure(&mut self, failed: Option<io::Error>) {
        let why = failed.map(|e| format!("guard: the folders of machines cannot be read: {e}"));
        if let Some(why) = why.as_ref().filter(|why| self.told.as_ref() != Some(why)) {
            self.log(why);
        }
        self.told = why;
    }

    /// Says of each VMM once that it was killed, after the fact.
    fn tell_kills(&mut self, is_over: bool) {
        if is_over && !self.was_over && !self.untold.is_empty() {
            self.log("guard: the deadline is over: the host has no lease");
        }
        self.was_over = is_over;
        let (killed, others): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.untold).into_iter().partition(|vmm| vmm.was_killed());
        for vmm in killed {
            let (folder, pid) = (vmm.folder.display(), vmm.process.pid());
            self.log(&format!("guard: the VMM in {folder} was killed (process {pid})"));
        }
        // The killer may still have a list with one that has ended.
        self.untold = others.into_iter().filter(|vmm| vmm.is_alive() || Arc::strong_count(vmm) > 1).collect();
    }

    fn log(&self, line: &str) {
        processes::bound_log(&folder(self.machines), SLOT_PROCESSES[self.place.0]);
        log_line(line);
    }
}

fn named(folder: &Path, e: &io::Error) -> io::Error {
    io::Error::new(e.kind(), format!("{}: {e}", folder.display()))
}
