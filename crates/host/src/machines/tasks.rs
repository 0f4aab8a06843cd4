//! The tasks of machines, and what is known of each. Owns the tasks; what they do is the keeper's.
//!
//! Invariant: a machine that runs, or is to, has one task; each change of a record that concerns it wakes that task. What
//! the last task of one that is off knew stays known.

use super::Shared;
use super::blocking::blocking;
use super::keeper::Keeper;
use super::leftovers::LeftoverFiles;
use super::run::{Folder, Run};
use super::status::ObservedMachine;
use super::wanted::Wanted;
use crate::error::HostError;
use crate::store::{Changed, Kind, Revision};
use spillway_api::{Catalog, EventKind, Machine, Name, Power};
use std::collections::HashMap;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

/// Before what has failed is tried again.
const AGAIN: Duration = Duration::from_secs(10);
/// Changes of catalogs within this time wake machines once.
const TOGETHER: Duration = Duration::from_millis(50);

/// A machine of which something is known. While it has no task it stays so.
#[derive(Default)]
pub(super) struct TrackedMachine {
    pub(super) status: watch::Sender<ObservedMachine>,
    task: Option<Task>,
}

/// How a machine's task is woken.
#[derive(Default)]
struct Task {
    poke: Arc<Notify>,
    pokes: u64,
}

impl TrackedMachine {
    /// One of which this is known before it has a task.
    fn new(known: ObservedMachine) -> TrackedMachine {
        TrackedMachine { status: watch::Sender::new(known), task: None }
    }

    /// Wakes its task, if it has one.
    fn wake(&mut self) {
        if let Some(task) = &mut self.task {
            task.pokes += 1;
            task.poke.notify_one();
        }
    }

    /// How often its task was woken.
    fn pokes(&self) -> u64 {
        self.task.as_ref().map_or(0, |task| task.pokes)
    }
}

impl Shared {
    /// Machines that are off are so as it was wanted. Those that have a folder are to be looked at first, whatever is wanted.
    pub(super) fn begin_with(&self, runs: &[(Name, Run)]) -> Result<(), HostError> {
        let off =
            self.objects.list::<Wanted>()?.into_iter().filter(|wanted| wanted.value.power == Power::Off);
        let off =
            off.filter_map(|wanted| Some((wanted.name.parse().ok()?, ObservedMachine::off(wanted.revision))));
        let folder = |name: &Name| Folder::of(&self.parts.folder, name);
        let found = |name: &Name, run| (name.clone(), ObservedMachine::found(run, &folder(name)));
        let folders = self.folders()?;
        let there = folders.iter().map(|name| found(name, None));
        let runs = runs.iter().map(|(name, run)| found(name, Some(run)));
        // Of each the last of these holds.
        let known = off.chain(there).chain(runs);
        self.kept().extend(known.map(|(name, known)| (name, TrackedMachine::new(known))));
        Ok(())
    }

    /// Wakes the tasks of machines whose records change. A catalog concerns all of them: however often it changes, they
    /// are woken once in a while.
    pub(super) async fn follow(self: Arc<Shared>, mut changes: Receiver<Changed>) {
        let mut all_at: Option<Instant> = None;
        loop {
            let next = changes.recv();
            let changed = match all_at {
                None => next.await,
                Some(at) => match tokio::time::timeout_at(at, next).await {
                    Ok(changed) => changed,
                    Err(_) => {
                        self.poke_kept(|_| true);
                        all_at = None;
                        continue;
                    }
                },
            };
            self.stir.notify_one();
            match changed {
                Ok(changed) => {
                    if self.poke_for(&changed.keys) {
                        all_at.get_or_insert(Instant::now() + TOGETHER);
                    }
                }
                Err(RecvError::Lagged(_)) => self.poke_those_missed().await,
                Err(RecvError::Closed) => return,
            }
        }
    }

    /// It is not known which records have changed.
    async fn poke_those_missed(self: &Arc<Shared>) {
        loop {
            let shared = Arc::clone(self);
            let Err(e) = blocking(move || shared.poke_all()).await else { return };
            self.events.raise(EventKind::Failed, "host", format!("machines are not looked after: {e}"));
            tokio::time::sleep(AGAIN).await;
        }
    }

    /// Wakes those whose own records these are. Whether a catalog is among them.
    fn poke_for(self: &Arc<Shared>, keys: &[String]) -> bool {
        let mut is_for_all = false;
        for key in keys {
            let names_one = key.strip_prefix(Wanted::PREFIX).or_else(|| LeftoverFiles::machine_of(key));
            if let Some(name) = names_one
                && let Ok(name) = name.parse()
            {
                self.poke(&name);
            } else if let Some(name) = key.strip_prefix(Machine::PREFIX) {
                // One that has no task is off, and stays so.
                if let Ok(name) = name.parse::<Name>() {
                    self.kept().get_mut(&name).into_iter().for_each(TrackedMachine::wake);
                }
            } else {
                is_for_all |= key.starts_with(Catalog::PREFIX);
            }
        }
        is_for_all
    }

    pub(super) fn poke_all(self: &Arc<Shared>) -> Result<(), HostError> {
        self.poke_kept(|_| true);
        for wanted in self.objects.list::<Wanted>()? {
            if let Ok(name) = wanted.name.parse()
                && !self.is_settled(&name, wanted.revision)
            {
                self.poke(&name);
            }
        }
        self.doomed()?.iter().chain(&self.folders()?).for_each(|name| self.poke(name));
        Ok(())
    }

    /// Whether a machine is known to be what the record of this revision wants.
    fn is_settled(&self, name: &Name, wanted: Revision) -> bool {
        self.kept().get(name).is_some_and(|kept| kept.status.borrow().is_settled(wanted))
    }

    /// Wakes a machine's task; begins it if there is none.
    fn poke(self: &Arc<Shared>, name: &Name) {
        let mut kept = self.kept();
        let kept = kept.entry(name.clone()).or_default();
        kept.wake();
        if kept.task.is_none() {
            let poke = Arc::clone(&kept.task.insert(Task::default()).poke);
            let keeper = Keeper::new(Arc::clone(self), name.clone(), poke, kept.status.clone());
            tokio::spawn(keeper.keep());
        }
    }

    /// Wakes these, if they have tasks.
    pub(super) fn wake(&self, names: &[Name]) {
        if !names.is_empty() {
            let mut kept = self.kept();
            names.iter().for_each(|name| kept.get_mut(name).into_iter().for_each(TrackedMachine::wake));
        }
    }

    pub(super) fn poke_kept(&self, which: impl Fn(&Name) -> bool) {
        let mut kept = self.kept();
        kept.iter_mut().filter(|(name, _)| which(name)).for_each(|(_, kept)| kept.wake());
    }

    /// How often a machine's task was woken.
    pub(super) fn pokes(&self, name: &Name) -> u64 {
        self.kept().get(name).map_or(0, TrackedMachine::pokes)
    }

    /// A task that has nothing to keep ends, unless it was woken meanwhile.
    pub(super) fn let_go(&self, name: &Name, pokes: u64) -> bool {
        let mut all = self.kept();
        let Some(kept) = all.get_mut(name) else { return true };
        let goes = kept.pokes() == pokes;
        if goes {
            kept.task = None;
            // One that is no more, or of which nothing was ever wanted, is as one of which nothing is known.
            let is_recorded = kept.status.borrow().is_recorded();
            if !is_recorded {
                all.remove(name);
            }
        }
        goes
    }

    pub(super) fn kept(&self) -> MutexGuard<'_, HashMap<Name, TrackedMachine>> {
        self.kept.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
