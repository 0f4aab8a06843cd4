//! What the fleet lets machines with its names do on this host. Owns the last orders, until when they count, which of these machines
//! have VMMs, and the page of the guard.
//!
//! Invariant: a VMM is noted before it is started, and until it has ended. Orders count only while the lease is valid, whoever asks
//! late. A daemon that has had no lease yet ends nothing that the lease of the one before lets run.

use super::registry::MachineRegistry;
use crate::error::HostError;
use crate::guard::{self, GuardMark, GuardPage, now};
use crate::processes::Process;
use spillway_api::{ErrorCode, IsolationAction, Name};
use spillway_fleet::Moment;
use spillway_fleet::named::{ISOLATION_MS, NameOrder, NamedOrders, RunningName, isolated};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Orders of the fleet for machines with its names.
pub struct NameGate {
    machines: PathBuf,
    page: Mutex<Option<Arc<GuardPage>>>,
    state: Mutex<GateState>,
    registry: Arc<MachineRegistry>,
}

#[derive(Default)]
struct GateState {
    /// None: this daemon has had none yet.
    orders: Option<NamedOrders>,
    /// Until when the lease is valid that the orders follow from.
    until: Moment,
    /// Whether this daemon has had a lease.
    had_lease: bool,
    /// Machines whose VMMs run, or are about to.
    running: BTreeMap<Name, RunningName>,
}

impl NameGate {
    /// Opens the gate of the machines below this folder. What runs of an earlier daemon is found by its marks.
    ///
    /// # Errors
    /// The folder of all machines cannot be read.
    pub(super) fn open(machines: &Path, registry: Arc<MachineRegistry>) -> Result<NameGate, HostError> {
        let page = guard::existing(machines).map(Arc::new);
        let gate = NameGate {
            machines: machines.to_owned(),
            page: Mutex::new(page),
            state: Mutex::default(),
            registry,
        };
        let marked = guard::marked(machines).map_err(|e| {
            HostError::new(ErrorCode::Internal, format!("{}: the machines there: {e}", machines.display()))
        })?;
        for marked in marked {
            let folder = marked.unwrap_or_else(|unknown| unknown.folder);
            let name = folder.file_name().and_then(|name| name.to_str()).and_then(|name| name.parse().ok());
            if let (Some(name), Some(running)) = (name, running_in(&folder)) {
                gate.state().running.insert(name, running);
            }
        }
        Ok(gate)
    }

    fn state(&self) -> MutexGuard<'_, GateState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The page of the guard, which is made if there is none.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn page(&self) -> Result<Arc<GuardPage>, HostError> {
        if let Some(page) = self.existing_page() {
            return Ok(page);
        }
        let made = Arc::new(guard::open(&self.machines)?);
        Ok(Arc::clone(self.held_page().get_or_insert(made)))
    }

    /// The page of the guard, if there is one.
    pub fn existing_page(&self) -> Option<Arc<GuardPage>> {
        self.held_page().clone()
    }

    /// Makes the page of the guard again, with its deadline, if its file was removed or replaced. Returns whether it was.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn restore_page(&self) -> Result<bool, HostError> {
        let page = self.existing_page();
        let Some(lost) = page.filter(|page| !page.is_at(&guard::page_path(&self.machines))) else {
            return Ok(false);
        };
        let made = Arc::new(guard::open_again(&self.machines, &lost)?);
        *self.held_page() = Some(made);
        Ok(true)
    }

    fn held_page(&self) -> MutexGuard<'_, Option<Arc<GuardPage>>> {
        self.page.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a machine needs the guard, now or soon.
    pub fn needs_guard(&self) -> bool {
        let state = self.state();
        let placed = state.orders.iter().flat_map(|orders| orders.on_isolation.values());
        let running = state.running.values().map(|running| &running.on_isolation);
        placed.chain(running).any(|action| *action != IsolationAction::Keep)
    }

    /// Looks again at what an earlier daemon has left and could not be read.
    pub fn look_again(&self) {
        let unknown = |running: &RunningName| running.uuid.is_none();
        let names = self.running().into_iter().filter(|(_, running)| unknown(running));
        for name in names.map(|(name, _)| name) {
            let found = running_in(&self.machines.join(name.as_str()));
            let mut state = self.state();
            // It may have been started meanwhile.
            if state.running.get(&name).is_some_and(unknown) {
                match found {
                    Some(found) => drop(state.running.insert(name, found)),
                    None => drop(state.running.remove(&name)),
                }
            }
        }
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
            state.had_lease |= orders.has_lease;
            (state.orders, state.until) = (Some(orders), until);
            !is_same
        };
        if is_new {
            self.registry.wake_all();
        }
    }

    /// The order for the machine with this UUID.
    pub fn order(&self, machine: &Name, uuid: &str, on_isolation: IsolationAction) -> NameOrder {
        let state = self.state();
        let told = state.orders.as_ref().and_then(|orders| orders.on_isolation.get(machine));
        // A VMM is what it was started as.
        let begun = state.running.get(machine).map(|running| running.on_isolation);
        let on_isolation = begun.or(told.copied()).unwrap_or(on_isolation);
        match &state.orders {
            Some(orders) if orders.has_lease && now() < state.until => {
                orders.order(machine, Some(uuid), on_isolation)
            }
            // This daemon has just begun, and the lease of the one before it is still valid.
            _ if !state.had_lease && self.was_valid_before() => NameOrder::GoOn,
            Some(orders) if !orders.has_lease => orders.order(machine, Some(uuid), on_isolation),
            _ => isolated(on_isolation),
        }
    }

    fn was_valid_before(&self) -> bool {
        self.existing_page().is_some_and(|page| now().after_ms(ISOLATION_MS) < page.deadline())
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
        if self.order(machine, uuid, on_isolation) != NameOrder::Run {
            return refuse("this host has no lease, or the fleet has not given the machine to it");
        }
        let told = self.state().orders.as_ref().and_then(|orders| orders.on_isolation.get(machine).copied());
        let on_isolation = told.unwrap_or(on_isolation);
        let running = RunningName { on_isolation, uuid: Some(uuid.to_owned()) };
        if on_isolation == IsolationAction::Keep {
            GuardMark::remove(folder)?;
            self.state().running.insert(machine.clone(), running);
            return Ok(None);
        }
        let is_guarded = |page: &Arc<GuardPage>| guard::is_fresh(page, &self.machines) && !page.is_over();
        let Some(page) = self.existing_page().filter(is_guarded) else {
            return refuse("the guard that would end it in time does not run");
        };
        GuardMark { uuid: uuid.to_owned(), on_isolation, pid_file }.write(folder)?;
        self.state().running.insert(machine.clone(), running);
        Ok(Some(page))
    }

    /// Notes that no VMM of a machine runs.
    pub(super) fn ended(&self, machine: &Name) {
        self.state().running.remove(machine);
    }
}

/// The machine with a name of the fleet that runs in this folder, or may run there. One whose mark cannot be read is ended by the guard, too.
fn running_in(folder: &Path) -> Option<RunningName> {
    if !guard::may_run(folder) {
        return None;
    }
    let mark = GuardMark::read(folder).ok().flatten();
    let on_isolation = mark.as_ref().map_or(IsolationAction::Stop, |mark| mark.on_isolation);
    Some(RunningName { on_isolation, uuid: mark.map(|mark| mark.uuid) })
}

/// The VMM that runs in a machine's folder.
///
/// # Errors
/// Nobody can tell whether one runs.
pub fn vmm_process(folder: &Path) -> io::Result<Option<Process>> {
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
        let gate = NameGate::open(&machines, Arc::default()).unwrap();
        let stop = IsolationAction::Stop;
        assert_eq!(gate.order(&machine, "u", stop), NameOrder::End, "nobody has said anything");
        gate.take(orders(&machine, NameOrder::Run), now().after_ms(60_000));
        assert_eq!(gate.order(&machine, "u", stop), NameOrder::Run);
        let begin = |gate: &NameGate| gate.begin(&machine, "u", stop, &folder, None).map(drop);
        assert!(begin(&gate).unwrap_err().message.contains("guard"), "there is none");
        let page = gate.page().unwrap();
        guard::look(&page, &machines);
        page.set_deadline(now().after_ms(60_000));
        begin(&gate).unwrap();
        let mut sleep = Command::new("sleep");
        sleep.arg("1000");
        let vmm = processes::start(&folder, super::super::vmm::PROCESS, sleep).unwrap();
        let later = NameGate::open(&machines, Arc::default()).unwrap();
        assert_eq!(later.running(), gate.running());
        assert_eq!(later.running()[&machine].on_isolation, stop);
        assert_eq!(later.order(&machine, "u", stop), NameOrder::GoOn, "the lease is still valid");
        // It has looked at the records before it has a lease.
        later.take(NamedOrders::default(), Moment(0));
        assert_eq!(later.order(&machine, "u", stop), NameOrder::GoOn, "the same lease");
        let others = orders(&machine, NameOrder::End);
        later.take(NamedOrders { has_lease: false, ..others }, Moment(0));
        assert_eq!(
            later.order(&machine, "u", stop),
            NameOrder::GoOn,
            "the same lease, whatever the records say"
        );
        assert!(later.needs_guard(), "it runs, whatever is placed here");
        page.set_deadline(now().after_ms(ISOLATION_MS));
        assert_eq!(later.order(&machine, "u", stop), NameOrder::End);
        gate.take(orders(&machine, NameOrder::Run), now());
        assert_eq!(gate.order(&machine, "u", stop), NameOrder::End, "who asks late has no lease");
        page.set_deadline(now().after_ms(60_000));
        assert_eq!(gate.order(&machine, "u", stop), NameOrder::End, "it has had one");
        vmm.kill();
        assert!(vmm.ends_within(std::time::Duration::from_secs(5)));
        assert!(NameGate::open(&machines, Arc::default()).unwrap().running().is_empty());
        // Nobody can tell whether it has a mark: it may run.
        std::os::unix::fs::symlink("desk-002", machines.join("desk-002")).unwrap();
        let unsure = NameGate::open(&machines, Arc::default()).unwrap();
        let other: Name = "desk-002".parse().unwrap();
        assert_eq!(unsure.running()[&other], RunningName { on_isolation: stop, uuid: None });
        unsure.look_again();
        assert!(unsure.running().contains_key(&other));
        std::fs::remove_file(machines.join("desk-002")).unwrap();
        unsure.look_again();
        assert!(unsure.running().is_empty());
        assert!(!later.restore_page().unwrap());
        std::fs::remove_file(guard::page_path(&machines)).unwrap();
        assert!(later.restore_page().unwrap());
        assert_eq!(later.page().unwrap().deadline(), page.deadline());
        assert_eq!(guard::open(&machines).unwrap().deadline(), page.deadline());
    }
}
