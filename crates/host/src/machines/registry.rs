//! Which machines have a task, and what is known of each. Owns the handles of the tasks; what they do is the reconciler's.
//!
//! Invariant: a machine has one task at most. What the last task of one that is off knew stays known.

use super::status::ObservedMachine;
use crate::store::Revision;
use spillway_api::Name;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::sync::{Notify, watch};

/// The machines of which something is known.
#[derive(Default)]
pub struct MachineRegistry {
    machines: Mutex<HashMap<Name, TrackedMachine>>,
    /// Something has changed that concerns more than one machine.
    change: Notify,
}

/// A machine of which something is known. While it has no task it stays so.
#[derive(Default)]
struct TrackedMachine {
    status: watch::Sender<ObservedMachine>,
    task: Option<Task>,
}

/// How a machine's task is woken.
#[derive(Default)]
struct Task {
    wakeup: Arc<Notify>,
    wakeups: u64,
}

/// What a task that is to begin is given.
pub struct NewTask {
    /// Wakes it.
    pub wakeup: Arc<Notify>,
    /// Takes what it finds out.
    pub status: watch::Sender<ObservedMachine>,
}

impl TrackedMachine {
    /// Wakes its task, if it has one.
    fn wake(&mut self) {
        if let Some(task) = &mut self.task {
            task.wakeups += 1;
            task.wakeup.notify_one();
        }
    }

    /// How often its task was woken.
    fn wakeups(&self) -> u64 {
        self.task.as_ref().map_or(0, |task| task.wakeups)
    }
}

impl MachineRegistry {
    /// Takes in what is known before there are tasks. Of each machine the last of these holds.
    pub fn begin_with(&self, known: impl IntoIterator<Item = (Name, ObservedMachine)>) {
        let tracked = |known| TrackedMachine { status: watch::Sender::new(known), task: None };
        self.machines().extend(known.into_iter().map(|(name, known)| (name, tracked(known))));
    }

    /// Wakes a machine's task. What to begin one with, if there is none: whoever asks must begin it.
    pub fn wake_or_begin(&self, name: &Name) -> Option<NewTask> {
        let mut machines = self.machines();
        let machine = machines.entry(name.clone()).or_default();
        machine.wake();
        if machine.task.is_some() {
            return None;
        }
        let wakeup = Arc::clone(&machine.task.insert(Task::default()).wakeup);
        Some(NewTask { wakeup, status: machine.status.clone() })
    }

    /// Wakes these, if they have tasks.
    pub fn wake<'a>(&self, names: impl IntoIterator<Item = &'a Name>) {
        let mut machines = self.machines();
        for name in names {
            machines.get_mut(name).into_iter().for_each(TrackedMachine::wake);
        }
    }

    /// Wakes all that have tasks.
    pub fn wake_all(&self) {
        self.machines().values_mut().for_each(TrackedMachine::wake);
    }

    /// How often a machine's task was woken.
    pub fn wakeups(&self, name: &Name) -> u64 {
        self.machines().get(name).map_or(0, TrackedMachine::wakeups)
    }

    /// A task that has nothing to keep ends, unless it was woken more often than this. Whether it does.
    pub fn end_task(&self, name: &Name, wakeups: u64) -> bool {
        let mut machines = self.machines();
        let Some(machine) = machines.get_mut(name) else { return true };
        let ends = machine.wakeups() == wakeups;
        if ends {
            machine.task = None;
            // One that is no more, or of which nothing was ever wanted, is as one of which nothing is known.
            let is_recorded = machine.status.borrow().is_recorded();
            if !is_recorded {
                machines.remove(name);
            }
        }
        ends
    }

    /// What is known of a machine.
    pub fn observed(&self, name: &Name) -> ObservedMachine {
        self.machines().get(name).map(|machine| machine.status.borrow().clone()).unwrap_or_default()
    }

    /// Told of what becomes known of a machine; `None`: nothing is known of it.
    pub fn subscribe(&self, name: &Name) -> Option<watch::Receiver<ObservedMachine>> {
        self.machines().get(name).map(|machine| machine.status.subscribe())
    }

    /// How many machines are so.
    pub fn count(&self, is: impl Fn(&Name, &ObservedMachine) -> bool) -> usize {
        self.machines().iter().filter(|(name, machine)| is(name, &machine.status.borrow())).count()
    }

    /// Whether a machine is known to be what the record of this revision wants.
    pub fn is_settled(&self, name: &Name, wanted: Revision) -> bool {
        self.machines().get(name).is_some_and(|machine| machine.status.borrow().is_settled(wanted))
    }

    /// Something has changed that concerns more than one machine.
    pub fn notify_change(&self) {
        self.change.notify_one();
    }

    /// Until something has that nobody has waited for yet.
    pub async fn wait_for_change(&self) {
        self.change.notified().await;
    }

    fn machines(&self) -> MutexGuard<'_, HashMap<Name, TrackedMachine>> {
        self.machines.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
