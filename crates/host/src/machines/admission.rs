//! Promises the host's memory and processors to machines, and wakes machines that wait for them. Owns the budget.
//!
//! Invariant: whoever returns a share of the budget wakes the waiting machines that may fit now.

use super::registry::MachineRegistry;
use crate::error::HostError;
use crate::resources::budget::{Budget, Capacity, Need};
use spillway_api::{HostBudget, Name};
use std::sync::{Arc, Mutex, MutexGuard};

/// Admits machines within the host's budget.
pub struct Admission {
    budget: Mutex<Budget>,
    registry: Arc<MachineRegistry>,
}

impl Admission {
    /// Creates an admission with nothing promised yet.
    pub fn new(capacity: Capacity, registry: Arc<MachineRegistry>) -> Admission {
        Admission { budget: Mutex::new(Budget::new(capacity)), registry }
    }

    /// Records what a machine that already runs uses, whether it fits or not.
    pub fn note(&self, name: &Name, need: Need) {
        self.budget().note(name, need);
    }

    /// Promises a machine its share of the budget, or puts it in the queue and returns what is missing.
    pub fn promise(&self, name: &Name, need: Need) -> Result<(), HostError> {
        let next = self.budget().promise(name, need)?;
        self.registry.wake(&next);
        Ok(())
    }

    /// Returns what a machine is promised.
    pub fn promised(&self, name: &Name) -> Need {
        self.budget().promised(name)
    }

    /// Lowers the promise of a waiting machine to what it still holds, so that others may have the rest.
    pub fn lower(&self, name: &Name, holds: Need) {
        let next = self.budget().lower(name, holds);
        self.registry.wake(&next);
    }

    /// Returns all that a machine was promised to the budget.
    pub fn give_back(&self, name: &Name) {
        let next = self.budget().give_back(name);
        self.registry.wake(&next);
    }

    /// Describes the budget and how much of it is promised.
    pub fn describe(&self) -> HostBudget {
        self.budget().describe()
    }

    fn budget(&self) -> MutexGuard<'_, Budget> {
        self.budget.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
