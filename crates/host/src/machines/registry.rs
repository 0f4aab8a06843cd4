//! The tasks and the observed states of machines. Owns the handles of the tasks; the reconciler does their work.
//!
//! Invariant: a machine has one task at most. The last observed state of a machine that is off is kept.

use super::status::ObservedMachine;
use crate::store::Revision;
use spillway_api::Name;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::sync::{Notify, watch};

/// Observed states and tasks of machines, by name.
#[derive(Default)]
pub struct MachineRegistry {
    machines: Mutex<HashMap<Name, TrackedMachine>>,
    /// Notified when a change concerns more than one machine.
    change: Notify,
}

/// A machine with a known state. The state stays while the machine has no task.
#[derive(Default)]
struct TrackedMachine {
    status: watch::Sender<ObservedMachine>,
    task: Option<Task>,
}

/// Handle that wakes a machine's task.
#[derive(Default)]
struct Task {
    wakeup: Arc<Notify>,
    wakeups: u64,
}

/// Channels of a new task.
pub struct NewTask {
    /// Wakes the task.
    pub wakeup: Arc<Notify>,
    /// Publishes the state that the task observes.
    pub status: watch::Sender<ObservedMachine>,
}

impl TrackedMachine {
    /// Wakes the machine's task, if it has one.
    fn wake(&mut self) {
        if let Some(task) = &mut self.task {
            task.wakeups += 1;
            task.wakeup.notify_one();
        }
    }

    /// How often the task was woken.
    fn wakeups(&self) -> u64 {
        self.task.as_ref().map_or(0, |task| task.wakeups)
    }
}

impl MachineRegistry {
    /// Sets the observed states before tasks exist. The last entry of a machine counts.
    pub fn begin_with(&self, known: impl IntoIterator<Item = (Name, ObservedMachine)>) {
        let tracked = |known| TrackedMachine { status: watch::Sender::new(known), task: None };
        self.machines().extend(known.into_iter().map(|(name, known)| (name, tracked(known))));
    }

    /// Wakes a machine's task. If there is none, returns the channels of a new one, which the caller must start.
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

    /// Wakes the tasks of these machines.
    pub fn wake<'a>(&self, names: impl IntoIterator<Item = &'a Name>) {
        let mut machines = self.machines();
        for name in names {
            machines.get_mut(name).into_iter().for_each(TrackedMachine::wake);
        }
    }

    /// Wakes all tasks.
    pub fn wake_all(&self) {
        self.machines().values_mut().for_each(TrackedMachine::wake);
    }

    /// How often a machine's task was woken.
    pub fn wakeups(&self, name: &Name) -> u64 {
        self.machines().get(name).map_or(0, TrackedMachine::wakeups)
    }

    /// Removes a task that has nothing to do, unless it was woken more than `wakeups` times. Returns whether it was
    /// removed.
    pub fn end_task(&self, name: &Name, wakeups: u64) -> bool {
        let mut machines = self.machines();
        let Some(machine) = machines.get_mut(name) else { return true };
        let ends = machine.wakeups() == wakeups;
        if ends {
            machine.task = None;
            // A machine that was deleted, or has no desired state, is forgotten.
            let is_recorded = machine.status.borrow().is_recorded();
            if !is_recorded {
                machines.remove(name);
            }
        }
        ends
    }

    /// Returns the observed state of a machine.
    pub fn observed(&self, name: &Name) -> ObservedMachine {
        self.machines().get(name).map(|machine| machine.status.borrow().clone()).unwrap_or_default()
    }

    /// Subscribes to the observed state of a machine; `None`: nothing is known of it.
    pub fn subscribe(&self, name: &Name) -> Option<watch::Receiver<ObservedMachine>> {
        self.machines().get(name).map(|machine| machine.status.subscribe())
    }

    /// Waits until the tasks have examined what an earlier daemon has left of each machine.
    pub async fn wait_for_examinations(&self) {
        let machines: Vec<_> = self.machines().values().map(|machine| machine.status.subscribe()).collect();
        for mut machine in machines {
            // An error: nothing of the machine is left, and its task has ended.
            let _ = machine.wait_for(ObservedMachine::is_examined).await;
        }
    }

    /// Counts the machines for which `is` holds.
    pub fn count(&self, is: impl Fn(&Name, &ObservedMachine) -> bool) -> usize {
        self.machines().iter().filter(|(name, machine)| is(name, &machine.status.borrow())).count()
    }

    /// Whether a machine has reached the desired state of this revision.
    pub fn is_settled(&self, name: &Name, wanted: Revision) -> bool {
        self.machines().get(name).is_some_and(|machine| machine.status.borrow().is_settled(wanted))
    }

    /// Signals a change that concerns more than one machine.
    pub fn notify_change(&self) {
        self.change.notify_one();
    }

    /// Waits for such a change since the last call.
    pub async fn wait_for_change(&self) {
        self.change.notified().await;
    }

    fn machines(&self) -> MutexGuard<'_, HashMap<Name, TrackedMachine>> {
        self.machines.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machines::run::MachineFolders;
    use crate::machines::status::Status;
    use spillway_api::Phase;
    use tokio::task::yield_now;

    /// A registry with two machines that an earlier daemon has left, and one that was off; and their tasks.
    fn left() -> (Arc<MachineRegistry>, [Name; 2], [NewTask; 2]) {
        let registry = Arc::<MachineRegistry>::default();
        let [off, runs, gone] = ["off", "runs", "gone"].map(|name| name.parse::<Name>().unwrap());
        let folders = MachineFolders::new("/nowhere".into());
        let found = |name: &Name| (name.clone(), ObservedMachine::found(None, &folders.of(name)));
        registry.begin_with([(off, ObservedMachine::off(Revision(1))), found(&runs), found(&gone)]);
        let tasks = [&runs, &gone].map(|name| registry.wake_or_begin(name).unwrap());
        (registry, [runs, gone], tasks)
    }

    #[tokio::test]
    async fn examined_is_what_a_task_has_published_or_whose_task_has_ended() {
        let (registry, [_, gone], [runs, task]) = left();
        let waiting = {
            let registry = Arc::clone(&registry);
            tokio::spawn(async move { registry.wait_for_examinations().await })
        };
        yield_now().await;
        runs.status.send_modify(|known| known.update(Status::new(Phase::Running), Revision(1)));
        yield_now().await;
        assert!(!waiting.is_finished(), "the other one is not examined");
        drop(task);
        assert!(registry.end_task(&gone, 0));
        waiting.await.unwrap();
    }
}
