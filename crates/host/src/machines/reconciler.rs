//! Reconciles a machine with its desired state: one task for each machine that runs or should run. Owns the connection to
//! its VMM and the count of its recent failures; it reads the desired state and the processes anew at each step.
//!
//! Invariant: a step may be interrupted anywhere and repeated: the records and the processes show how far it came.
//! Observed state is polled again and again, and what cannot be recorded is remembered until it can be: no step depends
//! on a single event.

mod attempts;
mod end;
mod limits;
mod named;
mod observation;
mod place;
mod probe;
mod start;

use super::desired_state::DesiredState;
use super::firmware::Firmware;
use super::placing::FinishedCopy;
use super::run::{MachineFolder, RunRecord};
use super::shared::MachineServices;
use super::status::{ObservedMachine, Status};
use super::vmm::{self, Vmm};
use super::{blocking, disk};
use crate::error::HostError;
use crate::hypervisor::qmp::Event;
use crate::processes::{self, ObservedProcess, Process};
use crate::resources::budget::Need;
use crate::store::Revision;
use attempts::Attempts;
pub(super) use attempts::CRASHES;
use limits::DiskLimits;
use observation::{Observation, ObservedRun};
use probe::ReadinessProbe;
use spillway_api::{Catalog, ErrorCode, EventKind, Hypervisor, IsolationAction, Machine, Name, Phase, Power};
pub(super) use start::boot;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{Notify, watch};

/// Interval of steps when nothing happens.
const TICK: Duration = Duration::from_secs(30);

/// Delay before the removal of an earlier machine's files is tried again.
const AGAIN: Duration = Duration::from_secs(10);

/// Why a machine that runs does nothing.
const HELD: &str = "its guest is paused until chunks of its image arrive from the registry";

/// Why a disk does not answer whose guest is not paused.
const STALLED: &str = "its disk waits for chunks of its image, which do not arrive from the registry";

/// Reconciles one machine.
pub struct MachineReconciler {
    shared: Arc<MachineServices>,
    name: Name,
    folder: MachineFolder,
    wakeup: Arc<Notify>,
    status: watch::Sender<ObservedMachine>,
    vmm: Vmm,
    /// Events of the machine's disk.
    disk: disk::DiskEvents,
    /// Whether it is recorded that the machine's kept disk has been served.
    disk_recorded: bool,
    /// The copy of the image that is being made, if any.
    placing: Option<place::CopyInProgress>,
    /// Finds out when the guest is ready.
    probe: ReadinessProbe,
    /// Decides when what failed is tried again.
    attempts: Attempts,
    /// Limits of the disk, and whether they are the desired ones.
    limits: DiskLimits,
    /// Whether the event about the VMM's unexpected end was raised.
    vmm_end_reported: bool,
    /// Revision of the catalog that the last step read.
    catalog_seen: u64,
    /// Detects a guest that stays in its firmware.
    firmware: Firmware,
    /// Whether the event was raised that files of an earlier machine of this name cannot be removed.
    leftovers_reported: bool,
    /// Whether the event was raised that the machine waits for the host's budget.
    wait_reported: bool,
    /// Whether this daemon has granted the group of an external machine access to its disk.
    group_admitted: bool,
    /// What is done with the machine when its host is isolated, if it has a name of a fleet.
    named: Option<IsolationAction>,
    /// Revision of the desired state that the last step read.
    seen: Revision,
}

/// Outcome of a step.
enum StepOutcome {
    /// The next step can follow at once.
    Again,
    /// Wait for one of these conditions before the next step.
    Rest(WakeupConditions),
    /// Nothing of the machine is left; the task can end.
    Over,
}

/// What ended a wait.
enum Wakeup {
    Vmm(Event),
    Disk(String),
    /// The guest is ready.
    Ready,
    /// The private copy is complete, or has failed.
    Placed(Result<Option<FinishedCopy>, HostError>),
}

/// Conditions that end a wait, besides a wakeup and an event of the VMM.
struct WakeupConditions {
    disk: Option<OwnedFd>,
    vmm: Option<OwnedFd>,
    until: Instant,
}

impl WakeupConditions {
    fn until(until: Instant) -> WakeupConditions {
        WakeupConditions { disk: None, vmm: None, until }
    }

    fn at_most(self, time: Duration) -> WakeupConditions {
        WakeupConditions { until: self.until.min(Instant::now() + time), ..self }
    }

    fn for_end_of(disk: Option<&Process>, vmm: Option<&Process>) -> Result<WakeupConditions, HostError> {
        let watch = |process: Option<&Process>| process.map(Process::watch).transpose();
        Ok(WakeupConditions { disk: watch(disk)?, vmm: watch(vmm)?, until: Instant::now() + TICK })
    }
}

impl MachineReconciler {
    pub fn new(
        shared: Arc<MachineServices>,
        name: Name,
        wakeup: Arc<Notify>,
        status: watch::Sender<ObservedMachine>,
    ) -> MachineReconciler {
        let folder = shared.folders.of(&name);
        let vmm = Vmm::new(folder.clone(), Arc::clone(&shared.libvirt));
        MachineReconciler {
            shared,
            name,
            folder,
            wakeup,
            status,
            vmm,
            disk: disk::DiskEvents::default(),
            disk_recorded: false,
            placing: None,
            probe: ReadinessProbe::default(),
            attempts: Attempts::default(),
            limits: DiskLimits::default(),
            vmm_end_reported: false,
            catalog_seen: 0,
            firmware: Firmware::default(),
            leftovers_reported: false,
            wait_reported: false,
            group_admitted: false,
            named: None,
            seen: Revision::default(),
        }
    }

    /// Runs until nothing of the machine is left.
    pub async fn run(mut self) {
        loop {
            let wakeups = self.shared.registry.wakeups(&self.name);
            let wait = match self.step().await {
                Ok(StepOutcome::Again) => continue,
                Ok(StepOutcome::Rest(wait)) if self.leftovers_reported => wait.at_most(AGAIN),
                Ok(StepOutcome::Rest(wait)) => wait,
                Ok(StepOutcome::Over) if self.shared.registry.end_task(&self.name, wakeups) => return,
                Ok(StepOutcome::Over) => continue,
                Err(error) => self.record_failure(&error),
            };
            let noted = match self.wait(wait).await {
                // The next step records these two, or a later one if it cannot.
                Some(Wakeup::Vmm(event)) => {
                    self.vmm.note_event(&event);
                    if let Some(text) = self.vmm.tell(&event) {
                        self.raise(EventKind::Crashed, &text);
                    }
                    Ok(())
                }
                Some(Wakeup::Disk(text)) => {
                    self.raise(EventKind::Disk, &text);
                    Ok(())
                }
                Some(Wakeup::Placed(made)) => self.finish_placing(made).await,
                Some(Wakeup::Ready) | None => Ok(()),
            };
            if let Err(error) = noted {
                let until = self.record_failure(&error).until;
                self.attempts.not_before(until);
            }
        }
    }

    async fn step(&mut self) -> Result<StepOutcome, HostError> {
        let observed = Observation::read(Arc::clone(&self.shared), self.name.clone(), self.folder.clone());
        let Observation { machine, wanted, revision, run } = observed.await?;
        if self.seen != revision {
            self.seen = revision;
            self.attempts.begin_anew();
        }
        let ObservedRun { run, damaged } = run?;
        let stranger = |machine: &Machine| run.as_ref().is_some_and(|run| run.uuid != machine.identity.uuid);
        match machine {
            Some(machine) if wanted.power == Power::On && !stranger(&machine) => {
                damaged.map_or(Ok(()), Err)?;
                self.bring_up(&machine, &wanted, run).await
            }
            Some(machine) if !stranger(&machine) => self.bring_down(&wanted, run, Some(&machine)).await,
            // The run belongs to a deleted machine, or to an earlier one of this name.
            machine => match self.bring_down(&wanted, run, None).await? {
                StepOutcome::Over if machine.is_some() && wanted.power == Power::On => Ok(StepOutcome::Again),
                next => Ok(next),
            },
        }
    }

    /// Takes one step towards a machine that runs.
    async fn bring_up(
        &mut self,
        machine: &Machine,
        wanted: &DesiredState,
        run: Option<RunRecord>,
    ) -> Result<StepOutcome, HostError> {
        // What failed before is no reason to let run what must not.
        if let Some(outcome) = named::obey(self, &machine.identity.uuid, run.as_ref()).await? {
            return Ok(outcome);
        }
        if let Some(until) = self.attempts.pauses_until() {
            return Ok(StepOutcome::Rest(WakeupConditions::until(until)));
        }
        if self.check_given_up(machine).await? {
            return Ok(StepOutcome::Rest(WakeupConditions::until(Instant::now() + TICK)));
        }
        if run.is_none() && !self.wait_reported {
            // Publish this before the catalog is read: a rollout trusts what the machine says that it runs.
            self.publish(Status::new(Phase::Starting));
        }
        self.remove_leftovers(Some(&machine.identity.uuid)).await;
        let Some(catalog) = self.catalog(machine).await? else {
            // The catalog was deleted, and its machines with it.
            return self.bring_down(wanted, run, None).await;
        };
        self.catalog_seen = catalog.revision;
        if self.named != named::named(&catalog) {
            self.named = named::named(&catalog);
            return Ok(StepOutcome::Again);
        }
        let Some(run) = run else {
            if let Some(wait) = self.wait_for_others(&catalog, wanted) {
                return Ok(StepOutcome::Rest(wait));
            }
            let need = Need::of(&catalog.spec, self.shared.parts.hypervisor);
            if let Some(status) = self.admit(need, Need::default()) {
                self.publish(status);
                return Ok(StepOutcome::Rest(WakeupConditions::until(Instant::now() + TICK)));
            }
            let begun = self.begin_run(machine, &catalog, wanted).await;
            if begun.as_ref().is_err_and(|e| e.is_permanent) {
                self.shared.admission.give_back(&self.name);
            }
            return begun.map(|()| StepOutcome::Again);
        };
        let vmm = self.vmm.look(&run).await?;
        let Some(disk) = disk::find(&self.folder).await? else {
            return self.bring_up_disk(machine, &catalog, run, vmm).await;
        };
        if run.kept.is_some() && !self.disk_recorded {
            let (files, name) = (Arc::clone(&self.shared.files), self.name.clone());
            self.disk_recorded = blocking(move || files.record_disk_made(name.as_str())).await?;
        }
        self.disk.listen(self.folder.path()).await;
        match vmm {
            ObservedProcess::None if run.hypervisor == Hypervisor::None => {
                self.serve_alone(machine, &catalog, wanted, run, disk).await
            }
            ObservedProcess::None if run.is_outdated(&catalog) || wanted.resets > run.resets => {
                self.power_cycle(machine, &catalog, run, wanted, disk).await
            }
            ObservedProcess::None => self.bring_up_vmm(machine, wanted, run, &disk).await,
            ObservedProcess::Ended => self.handle_vmm_end(machine, &catalog, run, wanted, disk).await,
            ObservedProcess::Alive(vmm) => {
                self.update_running(machine, &catalog, wanted, run, (&disk, &vmm)).await
            }
        }
    }

    /// Serves a disk for a VMM that somebody else starts.
    async fn serve_alone(
        &mut self,
        machine: &Machine,
        catalog: &Catalog,
        wanted: &DesiredState,
        mut run: RunRecord,
        disk: Process,
    ) -> Result<StepOutcome, HostError> {
        let is_asked = wanted.resets > run.resets || wanted.restarts > run.restarts;
        if is_asked || !run.ready && run.is_outdated(catalog) {
            return self.power_cycle(machine, catalog, run, wanted, disk).await;
        }
        // A machine that was off had returned its memory.
        let need = run.need();
        if !run.ready
            && let Some(status) = self.admit(need, need.without_guest())
        {
            self.publish(status.of(&run, &self.folder).by(&disk, None));
            return Ok(StepOutcome::Rest(WakeupConditions::for_end_of(Some(&disk), None)?));
        }
        self.adjust(catalog, &mut run).await?;
        if !self.group_admitted || !run.ready {
            // Each daemon does so again: systemd sets the rights of the state's folder when it starts one.
            let (folder, served) = (self.folder.clone(), run.clone());
            blocking(move || vmm::admit_group(&folder, &served)).await?;
            self.group_admitted = true;
        }
        if !run.ready {
            run.ready = true;
            self.folder.save_in_background(&run).await?;
        }
        Ok(StepOutcome::Rest(self.stay_running(catalog, &run, &disk, None).await?))
    }

    /// Updates a machine that runs: ends its VMM if desired, else applies what can change while it runs.
    async fn update_running(
        &mut self,
        machine: &Machine,
        catalog: &Catalog,
        wanted: &DesiredState,
        mut run: RunRecord,
        (disk, vmm): (&Process, &Process),
    ) -> Result<StepOutcome, HostError> {
        let attached = self.vmm.attach(vmm, &mut run).await;
        if run.ending.is_some() || wanted.resets > run.resets {
            self.publish(Status::new(Phase::Stopping).of(&run, &self.folder));
            self.vmm.end(vmm).await?;
            return Ok(StepOutcome::Again);
        }
        if wanted.restarts > run.restarts {
            self.publish(Status::new(Phase::Stopping).of(&run, &self.folder));
            if let Some(until) = self.shut_down(vmm, &mut run, wanted.grace()).await? {
                let wait = WakeupConditions::for_end_of(Some(disk), Some(vmm))?;
                let wait = WakeupConditions { until: until.min(wait.until), ..wait };
                return Ok(StepOutcome::Rest(named::with_orders(self, wait)));
            }
            self.vmm.end(vmm).await?;
            return Ok(StepOutcome::Again);
        }
        attached?;
        self.attempts.vmm_runs();
        self.hold(&mut run).await?;
        let heeds_until = self.vmm.cancel_shutdown(&mut run, wanted.grace()).await?;
        self.adjust(catalog, &mut run).await?;
        let ready = if run.spec.ready.is_none() { Some(None) } else { self.probe.answer() };
        if let (false, Some(address)) = (run.ready, ready) {
            self.record_ready(address).await?;
            self.record_boot(catalog, &run);
            return Ok(StepOutcome::Again);
        }
        self.probe(machine, &run);
        let wait = self.stay_running(catalog, &run, disk, Some(vmm)).await?;
        let wait = wait.at_most(self.firmware.next_look());
        let heeds_until = [heeds_until, self.follow_boot(machine, &run)].into_iter().flatten().min();
        Ok(StepOutcome::Rest(WakeupConditions {
            until: heeds_until.unwrap_or(wait.until).min(wait.until),
            ..wait
        }))
    }

    /// Stops the guest's processors, or lets them go on, as its disk waits for chunks of the image or does not.
    async fn hold(&mut self, run: &mut RunRecord) -> Result<(), HostError> {
        let is_paused = named::must_pause(self, run);
        match self.vmm.hold(run, is_paused || self.disk.is_stalled()).await? {
            Some(_) if is_paused => self.raise(EventKind::Fleet, named::PAUSED),
            // Its guest begins, or goes on when the host has its lease again.
            Some(_) if self.named.is_some() && !self.disk.is_stalled() => {}
            Some(text) => self.raise(EventKind::Disk, text),
            None => {}
        }
        Ok(())
    }

    /// Handles a running machine that needs no restart.
    async fn stay_running(
        &mut self,
        catalog: &Catalog,
        run: &RunRecord,
        disk: &Process,
        vmm: Option<&Process>,
    ) -> Result<WakeupConditions, HostError> {
        let status = Status::new(Phase::Running).of(run, &self.folder).by(disk, vmm).ready(run);
        let hint = match vmm {
            Some(_) => self.firmware.look(&self.folder, run).await,
            None => None,
        };
        let held = match (run.held, self.disk.is_stalled()) {
            (true, _) if named::must_pause(self, run) => Some(named::PAUSED.to_owned()),
            (true, _) => Some(HELD.to_owned()),
            (false, true) => Some(STALLED.to_owned()),
            (false, false) => None,
        };
        let status = status.with_pending(run.pending(catalog)).hint(held.or(hint));
        let is_crashing = self.attempts.is_crashing(Instant::now()).is_some();
        let status = status.unstable(is_crashing);
        self.publish(if run.ready { status.settled() } else { status });
        Ok(named::with_orders(self, WakeupConditions::for_end_of(Some(disk), vmm)?))
    }

    /// Promises the machine what it needs of the host's budget. Returns the status "waiting" if that does not fit;
    /// whoever returns enough wakes the machine. While it waits it keeps at most `holds`: what its last run had beyond
    /// that is for others.
    fn admit(&mut self, need: Need, holds: Need) -> Option<Status> {
        let Err(lacking) = self.shared.admission.promise(&self.name, need) else {
            self.wait_reported = false;
            return None;
        };
        self.shared.admission.lower(&self.name, holds);
        if !self.wait_reported {
            self.raise(EventKind::Waiting, &format!("it waits: {lacking}"));
        }
        self.wait_reported = true;
        Some(Status::new(Phase::Waiting).with_failure(&lacking).settled())
    }

    /// Waits until something happens, and returns what.
    async fn wait(&mut self, wait: WakeupConditions) -> Option<Wakeup> {
        tokio::select! {
            () = self.wakeup.notified() => None,
            () = processes::ended(wait.disk) => None,
            () = processes::ended(wait.vmm) => None,
            () = tokio::time::sleep_until(wait.until.into()) => None,
            event = self.vmm.event() => event.map(Wakeup::Vmm),
            text = self.disk.next() => text.map(Wakeup::Disk),
            made = place::placed(&mut self.placing) => Some(Wakeup::Placed(made)),
            () = self.probe.answers() => Some(Wakeup::Ready),
        }
    }

    /// Removes the leftover files of earlier machines of this name. The machine starts whether that succeeds or not. The
    /// machine's own files are kept if it is deleted now: it may still run.
    pub(super) async fn remove_leftovers(&mut self, uuid: Option<&str>) {
        let disposed = self.remove_marked_leftovers(uuid.map(str::to_owned)).await;
        if let (Err(e), false) = (&disposed, self.leftovers_reported) {
            self.raise(
                EventKind::Failed,
                &format!("the files of an earlier machine of its name cannot be removed: {e}"),
            );
        }
        self.leftovers_reported = disposed.is_err();
    }

    async fn remove_marked_leftovers(&self, but: Option<String>) -> Result<(), HostError> {
        let (left, name, uuid) = (Arc::clone(&self.shared.leftovers), self.name.clone(), but.clone());
        let files = blocking(move || left.files_to_remove(&name, uuid.as_deref())).await?;
        let turn = self.shared.turn_at(files).await?;
        let (left, name) = (Arc::clone(&self.shared.leftovers), self.name.clone());
        blocking(move || {
            let _turn = turn;
            left.remove_marked(&name, but.as_deref())
        })
        .await
    }

    async fn catalog(&self, machine: &Machine) -> Result<Option<Catalog>, HostError> {
        let (shared, name) = (Arc::clone(&self.shared), machine.catalog.clone());
        let found = blocking(move || Ok(shared.objects.get::<Catalog>(name.as_str())?)).await?;
        Ok(found.map(|catalog| catalog.value))
    }

    /// Whether the machine has failed permanently, and neither its desired state nor its catalog has changed since.
    async fn check_given_up(&mut self, machine: &Machine) -> Result<bool, HostError> {
        let Some((wanted, catalog)) = self.attempts.given_up() else { return Ok(false) };
        let now = self.catalog(machine).await?.map(|catalog| catalog.revision);
        if (self.seen, now) == (wanted, Some(catalog)) {
            return Ok(true);
        }
        self.attempts.take_up();
        Ok(false)
    }

    fn publish(&self, status: Status) {
        let status = status.with_crashes(self.attempts.crashes());
        self.status.send_modify(|known| known.update(status, self.seen));
        self.shared.registry.notify_change();
    }

    fn raise(&self, kind: EventKind, text: &str) {
        self.shared.events.raise(kind, &format!("machine/{}", self.name), text);
    }

    fn record_failure(&mut self, error: &HostError) -> WakeupConditions {
        let why = self.attempts.fail(error, self.seen, self.catalog_seen);
        let seen = self.seen;
        self.status.send_modify(|known| known.record_failure(&why, seen));
        let text = if error.is_permanent { &why.message } else { &error.message };
        // A retry that fails like the one before is no event.
        if self.attempts.is_new(text) {
            self.raise(EventKind::Failed, text);
        }
        match why.is_permanent {
            true => WakeupConditions::until(Instant::now() + TICK),
            false => WakeupConditions::until(Instant::now() + self.attempts.pause()),
        }
    }

    /// Records that the VMM or the disk has ended unexpectedly. After several times the machine counts as failed,
    /// although it is restarted.
    fn record_crash(&mut self, why: &str) {
        self.attempts.crash(Instant::now());
        self.raise(EventKind::Crashed, why);
        if let Some(often) = self.attempts.is_crashing(Instant::now()) {
            let error = HostError::new(ErrorCode::Internal, format!("{often}, and is tried again: {why}"));
            let (seen, crashes) = (self.seen, self.attempts.crashes());
            self.status.send_modify(|known| {
                known.record_failure(&error, seen);
                known.set_crashes(crashes);
            });
            self.shared.registry.notify_change();
        }
    }
}

#[cfg(test)]
mod tests;
