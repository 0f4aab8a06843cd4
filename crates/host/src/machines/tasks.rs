//! Starts and wakes the tasks of machines when records change. The reconciler does their work.
//!
//! Invariant: a machine that runs or should run has one task; each change of its records wakes that task.

use super::blocking::blocking;
use super::desired_state::DesiredState;
use super::leftovers::LeftoverFiles;
use super::reconciler::MachineReconciler;
use super::registry::NewTask;
use super::shared::MachineServices;
use crate::error::HostError;
use crate::store::{ChangeNotice, StoredRecord};
use spillway_api::{Catalog, EventKind, Machine, Name};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::Instant;

/// Delay before a failed read of the records is tried again.
const AGAIN: Duration = Duration::from_secs(10);
/// Changes of catalogs within this time wake machines once.
const TOGETHER: Duration = Duration::from_millis(50);

/// Starts and wakes the tasks of machines.
#[derive(Clone)]
pub struct TaskStarter {
    shared: Arc<MachineServices>,
}

impl TaskStarter {
    /// Creates a starter whose tasks use these services.
    pub fn new(shared: Arc<MachineServices>) -> TaskStarter {
        TaskStarter { shared }
    }

    /// Follows changes of records and wakes the tasks concerned. A change of a catalog wakes all tasks, at most once in a
    /// while.
    pub async fn follow(self, mut changes: Receiver<ChangeNotice>) {
        let registry = Arc::clone(&self.shared.registry);
        let mut all_at: Option<Instant> = None;
        loop {
            let next = changes.recv();
            let changed = match all_at {
                None => next.await,
                Some(at) => match tokio::time::timeout_at(at, next).await {
                    Ok(changed) => changed,
                    Err(_) => {
                        registry.wake_all();
                        all_at = None;
                        continue;
                    }
                },
            };
            registry.notify_change();
            match changed {
                Ok(changed) => {
                    if self.wake_for(&changed.keys) {
                        all_at.get_or_insert(Instant::now() + TOGETHER);
                    }
                }
                Err(RecvError::Lagged(_)) => self.wake_those_missed().await,
                Err(RecvError::Closed) => return,
            }
        }
    }

    /// Wakes all tasks, and starts one for each machine that may need it.
    pub fn wake_all(&self) -> Result<(), HostError> {
        self.shared.registry.wake_all();
        for wanted in self.shared.objects.list::<DesiredState>()? {
            if let Ok(name) = wanted.name.parse()
                && !self.shared.registry.is_settled(&name, wanted.revision)
            {
                self.wake_or_begin(&name);
            }
        }
        let (to_be_removed, there) = (self.shared.leftovers.to_be_removed()?, self.shared.folders.names()?);
        to_be_removed.iter().chain(&there).for_each(|name| self.wake_or_begin(name));
        Ok(())
    }

    /// Wakes all tasks, after an unknown number of changes was missed.
    async fn wake_those_missed(&self) {
        loop {
            let all = self.clone();
            let Err(e) = blocking(move || all.wake_all()).await else { return };
            let text = format!("machines cannot be reconciled: {e}");
            self.shared.events.raise(EventKind::Failed, "host", text);
            tokio::time::sleep(AGAIN).await;
        }
    }

    /// Wakes the machines that these keys belong to. Returns whether a catalog is among the keys.
    fn wake_for(&self, keys: &[String]) -> bool {
        let mut is_for_all = false;
        for key in keys {
            let names_one = key.strip_prefix(DesiredState::PREFIX).or_else(|| LeftoverFiles::machine_of(key));
            if let Some(name) = names_one
                && let Ok(name) = name.parse()
            {
                self.wake_or_begin(&name);
            } else if let Some(name) = key.strip_prefix(Machine::PREFIX) {
                // A machine without a task is off and stays so.
                if let Ok(name) = name.parse::<Name>() {
                    self.shared.registry.wake([&name]);
                }
            } else {
                is_for_all |= key.starts_with(Catalog::PREFIX);
            }
        }
        is_for_all
    }

    /// Wakes a machine's task, or starts one.
    fn wake_or_begin(&self, name: &Name) {
        if let Some(NewTask { wakeup, status }) = self.shared.registry.wake_or_begin(name) {
            let reconciler = MachineReconciler::new(Arc::clone(&self.shared), name.clone(), wakeup, status);
            tokio::spawn(reconciler.run());
        }
    }
}
