//! How the daemon keeps a guard: it starts one, and another one in its place if that does not look any more.
//!
//! Owns the decision which of two guards stays. Invariant: a guard that runs is not killed before another one looks: what it knows already it
//! may still end, whatever keeps it from reading folders.

use super::page::{GuardPage, SLOTS};
use super::{PROCESS, SLOT_PROCESSES, folder, kind, program};
use crate::error::HostError;
use crate::processes::{self, ObservedProcess, Process};
use crate::scopes::Scopes;
use spillway_api::ErrorCode;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Longest time until a guard that was started looks.
const BEGINS: Duration = Duration::from_secs(5);
/// Most different texts for people while no guard looks.
const MOST_TOLD: usize = 16;
/// Longest time until a guard that was killed has ended.
const ENDS: Duration = Duration::from_secs(1);

/// Keeps the guard of the machines of a host.
#[derive(Debug)]
pub struct GuardKeeper {
    machines: PathBuf,
    scopes: Scopes,
    /// Program and first argument that a guard is started with, instead of the daemon's own program.
    command: Option<[OsString; 2]>,
    /// The slot in which a guard was last started, and when.
    begun: Option<(usize, Instant)>,
    /// What was said since a guard has last looked.
    told: BTreeSet<String>,
}

impl GuardKeeper {
    /// Keeps the guard of the machines below this folder. Nothing is started yet.
    pub fn new(machines: &Path, scopes: Scopes) -> GuardKeeper {
        GuardKeeper {
            machines: machines.to_owned(),
            scopes,
            command: None,
            begun: None,
            told: BTreeSet::new(),
        }
    }

    /// Starts a guard if none looks, and ends those that are not needed any more. Returns what people should know and do not know yet: that
    /// another one is started, or that none can be, or that those that were started do not look.
    pub fn tend(&mut self, page: Result<&GuardPage, HostError>) -> Option<String> {
        let text = match page.and_then(|page| self.step(page)) {
            Ok(text) => text?,
            Err(e) => format!("no machine with a name of the fleet can start: {}", e.message),
        };
        let is_new = self.told.len() < MOST_TOLD && self.told.insert(text.clone());
        is_new.then_some(text)
    }

    fn step(&mut self, page: &GuardPage) -> Result<Option<String>, HostError> {
        let (folder, kind) = (folder(&self.machines), kind(&self.machines));
        let mut running = Vec::new();
        for (slot, name) in SLOT_PROCESSES.iter().enumerate() {
            if let ObservedProcess::Alive(process) = processes::look(&folder, name)? {
                running.push((slot, process));
            }
        }
        if let Some(fresh) = (0..SLOTS).find(|slot| page.is_fresh(*slot, kind)) {
            self.begun = None;
            self.told.clear();
            running.iter().filter(|(slot, _)| *slot != fresh).for_each(|(_, process)| process.kill());
            return Ok(None);
        }
        if self.begun.is_some_and(|(slot, at)| at.elapsed() < BEGINS && is_among(&running, slot)) {
            return Ok(None);
        }
        let Some(free) = (0..SLOTS).find(|slot| !is_among(&running, *slot)) else {
            return Err(self.give_up(&running));
        };
        self.begin(&folder, free)?;
        let stuck = running.first().map(|(_, process)| {
            format!(
                "the guard of machines with names of the fleet (process {}) does not look any more, is of another version, or has lost its \
                 page: another one takes its place",
                process.pid()
            )
        });
        Ok(stuck)
    }

    fn begin(&mut self, folder: &Path, slot: usize) -> Result<(), HostError> {
        let name = SLOT_PROCESSES[slot];
        let [program, argument] = match &self.command {
            Some(command) => command.clone(),
            None => [program()?, PROCESS.into()],
        };
        let mut command = Command::new(program);
        command.arg(argument);
        command.arg(std::path::absolute(&self.machines).unwrap_or_else(|_| self.machines.clone()));
        command.arg("--slot").arg(slot.to_string());
        processes::bound_log(folder, name);
        let command = self.scopes.place(folder, name, command);
        processes::start(folder, name, command)?;
        self.begun = Some((slot, Instant::now()));
        Ok(())
    }

    /// Ends the guard that was started last, of two that do not look: the other one may know VMMs.
    fn give_up(&mut self, running: &[(usize, Process)]) -> HostError {
        let last = self.begun.take().map_or(SLOTS - 1, |(slot, _)| slot);
        for (_, process) in running.iter().filter(|(slot, _)| *slot == last) {
            process.kill();
            process.ends_within(ENDS);
        }
        let message =
            "the guard that would end it in time does not look at the folders of machines: its log says why";
        HostError::new(ErrorCode::Unavailable, message)
    }
}

fn is_among(running: &[(usize, Process)], slot: usize) -> bool {
    running.iter().any(|(of, _)| *of == slot)
}

#[cfg(test)]
mod tests {
    use super::super::{now, open};
    use super::*;

    fn is_alive(folder: &Path, slot: usize) -> bool {
        matches!(processes::look(folder, SLOT_PROCESSES[slot]).unwrap(), ObservedProcess::Alive(_))
    }

    /// A program that runs stands for a guard, and the test for what it says.
    #[test]
    fn a_guard_that_does_not_look_is_replaced_by_one_that_does() {
        let dir = tempfile::tempdir().unwrap();
        let machines = dir.path().join("machines");
        let page = open(&machines).unwrap();
        let folder = folder(&machines);
        let script = dir.path().join("program");
        std::fs::write(&script, "exec sleep 1000\n").unwrap();
        let command = Some(["/bin/sh".into(), script.into_os_string()]);
        let mut keeper = GuardKeeper { command, ..GuardKeeper::new(&machines, Scopes::None) };
        let mut tend = |is_late: bool| {
            if is_late {
                keeper.begun = keeper.begun.map(|(slot, at)| (slot, at.checked_sub(BEGINS).unwrap()));
            }
            keeper.tend(Ok(&page)).unwrap_or_default()
        };
        assert_eq!((tend(false), is_alive(&folder, 0)), (String::new(), true));
        assert_eq!((tend(false), is_alive(&folder, 1)), (String::new(), false), "it has its time");
        assert!(tend(true).contains("another one takes its place"));
        assert!([0, 1].iter().all(|slot| is_alive(&folder, *slot)), "it is not killed yet");
        page.look(1, kind(&machines) + 1, now());
        assert!(tend(true).contains("does not look at the folders"), "it is of another version");
        assert_eq!([0, 1].map(|slot| is_alive(&folder, slot)), [true, false], "the first one knows more");
        assert_eq!((tend(false), is_alive(&folder, 1)), (String::new(), true), "it was said already");
        page.look(1, kind(&machines), now());
        assert_eq!(tend(false), "");
        let until = Instant::now() + Duration::from_secs(5);
        while is_alive(&folder, 0) {
            assert!(Instant::now() < until, "it is ended when another one looks");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(is_alive(&folder, 1));
        let ObservedProcess::Alive(last) = processes::look(&folder, SLOT_PROCESSES[1]).unwrap() else {
            panic!()
        };
        last.kill();
    }
}
