//! The thread of the guard that kills VMMs past the deadline, and the list of those that it knows. Owns the list.
//!
//! It reads the clock, the locked page and the list, and sends signals: it opens no file, writes nothing and waits for nobody who does.
//! Invariant: whoever is on the list is killed within one interval of the deadline, whatever becomes of the disks of the host.

use super::page::{GuardPage, now};
use crate::processes::Process;
use spillway_fleet::Moment;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Interval of looks at the clock.
pub(super) const INTERVAL: Duration = Duration::from_millis(50);

/// The VMM of a machine that the guard ends.
#[derive(Debug)]
pub(super) struct GuardedVmm {
    /// Folder of the machine.
    pub folder: PathBuf,
    /// The VMM.
    pub process: Process,
    /// Set by the killer when it has sent the first signal.
    was_killed: AtomicBool,
}

impl GuardedVmm {
    pub fn new(folder: PathBuf, process: Process) -> GuardedVmm {
        GuardedVmm { folder, process, was_killed: AtomicBool::new(false) }
    }

    pub fn is_alive(&self) -> bool {
        !self.process.ends_within(Duration::ZERO)
    }

    pub fn was_killed(&self) -> bool {
        self.was_killed.load(Ordering::Acquire)
    }

    fn kill(&self) {
        if self.is_alive() {
            self.process.kill();
            self.was_killed.store(true, Ordering::Release);
        }
    }
}

/// VMMs that the killer knows.
pub(super) type KillList = Vec<Arc<GuardedVmm>>;

/// What the two threads of the guard share.
#[derive(Default)]
pub(super) struct Killer {
    /// Held for moments alone: nobody opens a file meanwhile.
    list: Mutex<Arc<KillList>>,
    /// When the killer has last finished a round, in milliseconds.
    looked: AtomicU64,
    is_stopped: AtomicBool,
}

impl Killer {
    /// The present list.
    pub fn list(&self) -> Arc<KillList> {
        Arc::clone(&self.list.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Replaces the list.
    pub fn replace(&self, list: KillList) {
        let list = Arc::new(list);
        let before = std::mem::replace(&mut *self.list.lock().unwrap_or_else(PoisonError::into_inner), list);
        drop(before);
    }

    /// When the killer has last looked at the clock, and done what followed from it.
    pub fn looked(&self) -> Moment {
        Moment(self.looked.load(Ordering::Acquire))
    }

    /// Ends [`Killer::run`].
    pub fn stop(&self) {
        self.is_stopped.store(true, Ordering::Release);
    }

    /// Kills what is on the list past the deadline, again and again.
    pub fn run(&self, page: &GuardPage) {
        while !self.is_stopped.load(Ordering::Acquire) {
            let at = now();
            if page.is_over() {
                self.list().iter().filter(|_| page.is_over()).for_each(|vmm| vmm.kill());
            }
            self.looked.store(at.0, Ordering::Release);
            std::thread::sleep(INTERVAL);
        }
    }
}
