//! What machines are promised of the host's memory and processors, and who is woken when there is more. Owns the budget.
//!
//! Invariant: whoever gives something back wakes those that wait and may fit now.

use super::registry::MachineRegistry;
use crate::error::HostError;
use crate::resources::budget::{Budget, Capacity, Need};
use spillway_api::{HostBudget, Name};
use std::sync::{Arc, Mutex, MutexGuard};

/// Admits machines to what the host has to promise.
pub struct Admission {
    budget: Mutex<Budget>,
    registry: Arc<MachineRegistry>,
}

impl Admission {
    /// With nothing promised of this.
    pub fn new(capacity: Capacity, registry: Arc<MachineRegistry>) -> Admission {
        Admission { budget: Mutex::new(Budget::new(capacity)), registry }
    }

    /// A machine has this, whether it fits or not: it runs already.
    pub fn note(&self, name: &Name, need: Need) {
        self.budget().note(name, need);
    }

    /// Promises a machine this of the host, or lets it wait.
    pub fn promise(&self, name: &Name, need: Need) -> Result<(), HostError> {
        let next = self.budget().promise(name, need)?;
        self.registry.wake(&next);
        Ok(())
    }

    /// What a machine is promised.
    pub fn promised(&self, name: &Name) -> Need {
        self.budget().promised(name)
    }

    /// A machine that waits is promised no more than this of what it had: others may have the rest.
    pub fn lower(&self, name: &Name, holds: Need) {
        let next = self.budget().lower(name, holds);
        self.registry.wake(&next);
    }

    /// A machine takes nothing of the host any more: others may.
    pub fn give_back(&self, name: &Name) {
        let next = self.budget().give_back(name);
        self.registry.wake(&next);
    }

    /// What is promised, and of how much.
    pub fn describe(&self) -> HostBudget {
        self.budget().describe()
    }

    fn budget(&self) -> MutexGuard<'_, Budget> {
        self.budget.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
