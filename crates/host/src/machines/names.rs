//! What the fleet lets machines with its names do on this host. Owns the last orders, until when they count, which of these machines
//! have VMMs, and the page of the guard.
//!
//! Invariant: a VMM is noted before it is started, and until it has ended. Orders count only while the lease is valid, whoever asks
//! late.

use super::registry::MachineRegistry;
use crate::error::HostError;
use crate::guard::{self, GuardMark, GuardPage, now};
use crate::processes::Process;
use spillway_api::{ErrorCode, IsolationAction, Name};
use spillway_fleet::Moment;
use spillway_fleet::named::{ISOLATION_MS, NameOrder, NamedOrders, RunningName, isolated};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Orders of the fleet for machines with its names.
pub struct NameGate {
    machines: PathBuf,
    page: OnceLock<Arc<GuardPage>>,
    state: Mutex<GateState>,
    registry: Arc<MachineRegistry>,
}

#[derive(Default)]
struct GateState {
    /// None: this daemon has had none yet.
    orders: Option<NamedOrders>,
    /// Until when the lease is valid that the orders follow from.
    until: Moment,
    /// Machines whose VMMs run, or are about to.
    running: BTreeMap<Name, RunningName>,
}

impl NameGate {
    /// Opens the gate of the machines below this folder. What runs of an earlier daemon is found by its marks.
    pub(super) fn open(machines: &Path, registry: Arc<MachineRegistry>) -> NameGate {
        let gate = NameGate {
            machines: machines.to_owned(),
            page: OnceLock::new(),
            state: Mutex::default(),
            registry,
        };
        if let Some(page) = guard::existing(machines) {
            let _ = gate.page.set(Arc::new(page));
        }
        for folder in guard::marked(machines) {
            let name = folder.file_name().and_then(|name| name.to_str()).and_then(|name| name.parse().ok());
            let Some(name) = name.filter(|_| guard::find(&folder).is_some()) else { continue };
            // One whose mark cannot be read is ended by the guard, too.
            let on_isolation =
                GuardMark::read(&folder).map_or(IsolationAction::Stop, |mark| mark.on_isolation);
            gate.state().running.insert(name, RunningName { on_isolation });
        }
        gate
    }

    fn state(&self) -> MutexGuard<'_, GateState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The page of the guard, which is made if there is none.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn page(&self) -> Result<Arc<GuardPage>, HostError> {
        if let Some(page) = self.page.get() {
            return Ok(Arc::clone(page));
        }
        let made = Arc::new(guard::open(&self.machines)?);
        Ok(Arc::clone(self.page.get_or_init(|| made)))
    }

    /// The page of the guard, if there is one.
    pub fn existing_page(&self) -> Option<Arc<GuardPage>> {
        self.page.get().cloned()
    }

    /// Folder of all machines.
    pub fn folder(&self) -> &Path {
        &self.machines
    }

    /// Machines whose VMMs run.
    pub fn running(&self) -> BTreeMap<Name, RunningName> {
        self.state().running.clone()
    }

    /// Takes orders that count until the lease is not valid any more. Wakes the machines if they are others than before.
    pub fn take(&self, orders: NamedOrders, until: Moment) {
        let is_new = {
            let mut state = self.state();
            let is_same = state.orders.as_ref().is_some_and(|before| {
                before.machines == orders.machines && before.has_lease == orders.has_lease
            });
            (state.orders, state.until) = (Some(orders), until);
            !is_same
        };
        if is_new {
            self.registry.wake_all();
        }
    }

    /// What is to be done with a machine.
    pub fn order(&self, machine: &Name, on_isolation: IsolationAction) -> NameOrder {
        let state = self.state();
        let told = state.orders.as_ref().and_then(|orders| orders.on_isolation.get(machine));
        // A VMM is what it was started as.
        let begun = state.running.get(machine).map(|running| running.on_isolation);
        let on_isolation = begun.or(told.copied()).unwrap_or(on_isolation);
        match &state.orders {
            Some(orders) if !orders.has_lease || now() < state.until => orders.order(machine, on_isolation),
            Some(_) => isolated(on_isolation),
            // This daemon has just begun, and the lease of the one before it is still valid.
            None if self.was_valid_before() => NameOrder::GoOn,
            None => isolated(on_isolation),
        }
    }

    fn was_valid_before(&self) -> bool {
        self.page.get().is_some_and(|page| now().after_ms(ISOLATION_MS) < page.deadline())
    }

    /// Notes that the VMM of a machine is about to be started, and marks its folder for the guard. The deadline that it must not be started
    /// after is returned, if the guard ends it.
    ///
    /// # Errors
    /// The machine may not be started now, or no guard looks after it.
    pub(super) fn begin(
        &self,
        machine: &Name,
        uuid: &str,
        on_isolation: IsolationAction,
        folder: &Path,
        pid_file: Option<PathBuf>,
    ) -> Result<Option<Arc<GuardPage>>, HostError> {
        let refuse = |why: &str| {
            Err(HostError::new(ErrorCode::Unavailable, format!("{machine} has a name of the fleet: {why}")))
        };
        if self.order(machine, on_isolation) != NameOrder::Run {
            return refuse("this host has no lease, or the fleet has not given the machine to it");
        }
        let told = self.state().orders.as_ref().and_then(|orders| orders.on_isolation.get(machine).copied());
        let on_isolation = told.unwrap_or(on_isolation);
        if on_isolation == IsolationAction::Keep {
            GuardMark::remove(folder)?;
            self.state().running.insert(machine.clone(), RunningName { on_isolation });
            return Ok(None);
        }
        let Some(page) = self.existing_page().filter(|page| guard::is_fresh(page) && !page.is_over()) else {
            return refuse("the guard that would end it in time does not run");
        };
        GuardMark { uuid: uuid.to_owned(), on_isolation, pid_file }.write(folder)?;
        self.state().running.insert(machine.clone(), RunningName { on_isolation });
        Ok(Some(page))
    }

    /// Notes that no VMM of a machine runs.
    pub(super) fn ended(&self, machine: &Name) {
        self.state().running.remove(machine);
    }
}

/// The VMM that runs in a machine's folder.
pub fn vmm_process(folder: &Path) -> Option<Process> {
    crate::processes::peek(folder, super::vmm::PROCESS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::processes;
    use std::collections::BTreeMap;
    use std::process::Command;

    fn orders(machine: &Name, order: NameOrder) -> NamedOrders {
        let machines = BTreeMap::from([(machine.clone(), order)]);
        NamedOrders { machines, has_lease: true, ..NamedOrders::default() }
    }

    #[test]
    fn orders_end_with_the_lease_and_a_later_daemon_finds_what_runs() {
        let dir = tempfile::tempdir().unwrap();
        let machines = dir.path().join("machines");
        let machine: Name = "desk-001".parse().unwrap();
        let folder = machines.join("desk-001");
        std::fs::create_dir_all(&folder).unwrap();
        let gate = NameGate::open(&machines, Arc::default());
        let stop = IsolationAction::Stop;
        assert_eq!(gate.order(&machine, stop), NameOrder::End, "nobody has said anything");
        gate.take(orders(&machine, NameOrder::Run), now().after_ms(60_000));
        assert_eq!(gate.order(&machine, stop), NameOrder::Run);
        let begin = |gate: &NameGate| gate.begin(&machine, "u", stop, &folder, None).map(drop);
        assert!(begin(&gate).unwrap_err().message.contains("guard"), "there is none");
        let page = gate.page().unwrap();
        page.look(now());
        page.set_deadline(now().after_ms(60_000));
        begin(&gate).unwrap();
        let mut sleep = Command::new("sleep");
        sleep.arg("1000");
        let vmm = processes::start(&folder, super::super::vmm::PROCESS, sleep).unwrap();
        let later = NameGate::open(&machines, Arc::default());
        assert_eq!(later.running(), gate.running());
        assert_eq!(later.running()[&machine].on_isolation, stop);
        assert_eq!(later.order(&machine, stop), NameOrder::GoOn, "the lease is still valid");
        page.set_deadline(now().after_ms(ISOLATION_MS));
        assert_eq!(later.order(&machine, stop), NameOrder::End);
        gate.take(orders(&machine, NameOrder::Run), now());
        assert_eq!(gate.order(&machine, stop), NameOrder::End, "who asks late has no lease");
        vmm.kill();
        assert!(vmm.ends_within(std::time::Duration::from_secs(5)));
        assert!(NameGate::open(&machines, Arc::default()).running().is_empty());
    }
}
