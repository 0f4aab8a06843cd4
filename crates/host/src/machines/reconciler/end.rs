//! Steps that end something: a machine that should be off, or a VMM between two starts.
//!
//! Invariant: each step may be interrupted and repeated; the files of a run are removed only when none of its processes
//! runs.

use super::{MachineReconciler, StepOutcome, WakeupConditions, named};
use crate::error::HostError;
use crate::machines::desired_state::DesiredState;
use crate::machines::run::{MachineFolder, RunRecord, VmmEnding};
use crate::machines::status::Status;
use crate::machines::{belongings, blocking, disk, last_words, look, vmm};
use crate::processes::{self, ObservedProcess, Process};
use spillway_api::{Catalog, EventKind, Machine, Phase, Power, ResetEvent};
use spillway_control::{DiskSettings, Request, STOPPED_CLEANLY};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Smallest size of a RAM tier.
const LEAST_RAM_BYTES: u64 = 64 << 10;
/// Processes of a machine, in the order in which they are ended.
const PROCESSES: [&str; 3] = [vmm::PROCESS, vmm::TPM_PROCESS, disk::PROCESS];

impl MachineReconciler {
    /// Takes one step towards a machine that is off, or towards nothing if `machine` is `None` because it was deleted. A
    /// deleted machine gets its grace only for data that is kept.
    pub(super) async fn bring_down(
        &mut self,
        wanted: &DesiredState,
        run: Option<RunRecord>,
        machine: Option<&Machine>,
    ) -> Result<StepOutcome, HostError> {
        let gently = machine.is_some();
        self.probe.stop();
        self.stop_placing().await;
        self.shared.boots.end(&self.name);
        let was_there = run.is_some();
        if let Some(mut run) = run {
            let vmm = self.vmm.look(&run).await?;
            let is_resting = gently && run.keeps_disk_while_off();
            if matches!(vmm, ObservedProcess::Alive(_)) || !is_resting {
                self.publish(Status::new(Phase::Stopping).of(&run, &self.folder));
            }
            if let ObservedProcess::Alive(vmm) = vmm {
                if let Some(machine) = machine {
                    named::learn(self, machine).await?;
                }
                let grace = match gently {
                    true => wanted.grace(),
                    // The machine was deleted and its data is kept: let its guest write everything first.
                    false if run.keeps_files() && !self.is_to_be_removed(&run).await? => {
                        Duration::from_secs(run.spec.grace_seconds.into())
                    }
                    false => Duration::ZERO,
                };
                if let Some(until) = self.shut_down(&vmm, &mut run, grace).await? {
                    let wait = WakeupConditions::for_end_of(None, Some(&vmm))?;
                    let wait = WakeupConditions { until: until.min(wait.until), ..wait };
                    return Ok(StepOutcome::Rest(named::with_orders(self, wait)));
                }
                self.vmm.end(&vmm).await?;
            }
            let disk = disk::find(&self.folder).await?;
            if disk.is_none() && is_resting {
                self.report_loss(&run).await?;
            }
            if let Some(disk) = disk {
                if is_resting {
                    return self.stay_without_vmm(run, &disk).await;
                }
                self.shared.figures.note_last(&self.name, disk.pid()).await;
                blocking(move || disk::end(&disk)).await?;
            }
            self.check_final_flush(&run).await?;
            self.forget(run).await?;
        }
        let (shared, folder, name) = (Arc::clone(&self.shared), self.folder.clone(), self.name.clone());
        let was_left = blocking(move || {
            let was_left = clear(&folder)?;
            shared.admission.give_back(&name);
            shared.users().give_back(&name);
            Ok(was_left)
        })
        .await?;
        self.remove_leftovers(machine.map(|machine| machine.identity.uuid.as_str())).await;
        self.shared.names.ended(&self.name);
        if was_there || was_left {
            self.raise(EventKind::Stopped, "it is stopped");
        }
        self.attempts.forget();
        self.wait_reported = false;
        let stopped = Status::new(Phase::Stopped);
        // A machine that should run starts once the earlier one of its name has ended.
        let is_off = wanted.power == Power::Off;
        self.publish(if is_off { stopped.settled() } else { stopped });
        // The removal of leftover files is tried again.
        Ok(if is_off && self.leftovers_reported {
            StepOutcome::Rest(WakeupConditions::for_end_of(None, None)?)
        } else {
            StepOutcome::Over
        })
    }

    /// Asks the guest to shut down, once. Returns its deadline; `None`: it has to be ended now. A guest whose processors are stopped,
    /// because chunks of its image do not arrive, cannot shut down: it is ended at once if the end of the run discards what it has
    /// written. Otherwise chunks may arrive within its time, and it goes on then. One with a name of the fleet that must not run has no time.
    pub(super) async fn shut_down(
        &mut self,
        vmm: &Process,
        run: &mut RunRecord,
        grace: Duration,
    ) -> Result<Option<Instant>, HostError> {
        if named::must_pause(self, run) {
            return Ok(None);
        }
        // They would keep the agent's channel, which has one client at a time. Whoever asks the agent of a guest that is shutting down
        // may do so.
        self.probe.stop();
        if !self.vmm.is_shutting_down() {
            self.shared.guests.calls.end_of(&self.name);
        }
        if run.held || self.disk.is_stalled() {
            self.disk.listen(self.folder.path()).await;
            // A VMM that does not answer is no reason to wait longer.
            let _ = self.hold(run).await;
        }
        if run.held && run.keeps_nothing() && !grace.is_zero() {
            self.raise(
                EventKind::Disk,
                "its guest cannot shut down, since chunks of its image do not arrive from the registry: it is ended at once",
            );
            return Ok(None);
        }
        self.vmm.shut_down(vmm, run, grace).await
    }

    /// Whether the deleted machine's data is removed with it.
    async fn is_to_be_removed(&self, run: &RunRecord) -> Result<bool, HostError> {
        let (left, name, uuid) = (Arc::clone(&self.shared.leftovers), self.name.clone(), run.uuid.clone());
        blocking(move || left.is_to_be_removed(&name, &uuid)).await
    }

    /// Reports that data was lost: only the disk's process had it, and that has ended.
    async fn report_loss(&self, run: &RunRecord) -> Result<(), HostError> {
        if let (false, ObservedProcess::Ended) =
            (run.is_of_another_boot(), look(&self.folder, disk::PROCESS).await?)
        {
            let said = last_words(&self.folder, disk::PROCESS).await?;
            self.raise(
                EventKind::Crashed,
                &format!("its disk has ended, and with it what was written: {said}"),
            );
        }
        Ok(())
    }

    /// Checks that a kept disk has flushed everything at its end, as its log says. Reports it otherwise, before the log
    /// is removed.
    async fn check_final_flush(&self, run: &RunRecord) -> Result<(), HostError> {
        let Some(path) = run.kept.as_ref().filter(|_| !run.is_of_another_boot()) else { return Ok(()) };
        let ObservedProcess::Ended = look(&self.folder, disk::PROCESS).await? else { return Ok(()) };
        let said = last_words(&self.folder, disk::PROCESS).await?;
        if !said.ends_with(STOPPED_CLEANLY) {
            let text = format!(
                "its disk has not ended cleanly ({said}): what its guest has not flushed may be lost if the host loses its \
                 power before the machine is started and stopped again: {}",
                path.display()
            );
            self.raise(EventKind::Disk, &text);
        }
        Ok(())
    }

    /// Forgets a VMM that has ended or never existed, and stops to answer its guest.
    async fn forget_vmm(&mut self) -> Result<(), HostError> {
        self.probe.end();
        self.vmm.forget().await
    }

    /// Removes the files of a run of which nothing runs. Its record goes first: after an interruption the other files are
    /// removed before the machine's next run, or when the next daemon starts.
    pub(super) async fn forget(&mut self, run: RunRecord) -> Result<(), HostError> {
        self.forget_vmm().await?;
        let files: Vec<_> = run.copy.map(|copy| copy.path).into_iter().chain(run.scratch).collect();
        let turn = self.shared.turn_at(files.clone()).await?;
        let folder = self.folder.clone();
        blocking(move || {
            let _turn = turn;
            folder.remove()?;
            files.iter().try_for_each(|path| belongings::remove(path))
        })
        .await
    }

    /// Keeps a stopped machine whose disk holds its data until the host goes down: in the overflow, so that it uses no
    /// memory.
    async fn stay_without_vmm(
        &mut self,
        mut run: RunRecord,
        disk: &Process,
    ) -> Result<StepOutcome, HostError> {
        let least = DiskSettings { ram_bytes: Some(LEAST_RAM_BYTES), ..DiskSettings::default() };
        let evicts = run.ram_bytes.is_some_and(|ram_bytes| ram_bytes > LEAST_RAM_BYTES);
        if evicts {
            run.ram_bytes = least.ram_bytes;
        }
        (run.ready, run.ending, run.asked, self.wait_reported) = (false, None, false, false);
        let (folder, saved) = (self.folder.clone(), run.clone());
        blocking(move || {
            if evicts {
                disk::ask(folder.path(), &Request::Set(least))?;
            }
            folder.save(&saved)
        })
        .await?;
        self.forget_vmm().await?;
        self.shared.admission.give_back(&self.name);
        self.publish(Status::new(Phase::Stopped).of(&run, &self.folder).by(disk, None).settled());
        self.remove_leftovers(Some(&run.uuid)).await;
        Ok(StepOutcome::Rest(WakeupConditions::for_end_of(Some(disk), None)?))
    }

    /// Handles a VMM that has ended although the machine should run.
    pub(super) async fn handle_vmm_end(
        &mut self,
        machine: &Machine,
        catalog: &Catalog,
        mut run: RunRecord,
        wanted: &DesiredState,
        disk: Process,
    ) -> Result<StepOutcome, HostError> {
        self.probe.stop();
        self.shared.boots.end(&self.name);
        // Nobody may claim the machine until the reason is known.
        self.publish(Status::new(Phase::Stopping).of(&run, &self.folder));
        let asked = run.asked || wanted.resets > run.resets || wanted.restarts > run.restarts;
        if !asked {
            self.vmm.record_end(&mut run).await?;
        }
        match run.ending {
            _ if asked => {}
            // Its catalog starts it again, or others wait for it: a guest that never becomes ready is no guest that is done.
            Some(VmmEnding::GuestShutdown) if self.ended_early(&run) && is_needed(catalog) => {
                if !self.vmm_end_reported {
                    self.vmm_end_reported = true;
                    self.record_crash("its guest has shut down before it was ready");
                }
            }
            Some(VmmEnding::GuestShutdown) if !catalog.spec.autostart => {
                if self.want_off().await? {
                    return Ok(StepOutcome::Again);
                }
            }
            Some(_) => {}
            // Reported already; the result could not be recorded.
            None if self.vmm_end_reported => {}
            None => {
                self.vmm_end_reported = true;
                let said = self.vmm.last_words().await?;
                self.record_crash(&format!("its VMM has ended by itself: {said}"));
            }
        }
        if self.attempts.is_crashing(Instant::now()).is_none() {
            self.publish(Status::new(Phase::Starting).of(&run, &self.folder));
        }
        self.power_cycle(machine, catalog, run, wanted, disk).await
    }

    /// Whether the guest has ended before it was ready; without a check of that, right after its start.
    fn ended_early(&self, run: &RunRecord) -> bool {
        !run.ready || run.spec.ready.is_none() && self.attempts.has_just_begun()
    }

    /// Prepares the disk between two starts of a VMM: resets it if it should forget, or ends it so that a disk of another
    /// version takes its place.
    pub(super) async fn power_cycle(
        &mut self,
        machine: &Machine,
        catalog: &Catalog,
        mut run: RunRecord,
        wanted: &DesiredState,
        disk: Process,
    ) -> Result<StepOutcome, HostError> {
        let forgets = wanted.resets > run.resets
            || run.spec.reset() != ResetEvent::Never
            || !run.disk_stays(&catalog.spec);
        // A private copy cannot be reset. A kept disk is served again, or discarded at the start of the next run.
        let is_remade = run.copy.is_some() || run.kept.is_some() && (forgets || run.is_outdated(catalog));
        if is_remade || forgets && run.is_outdated_after_reset(catalog) {
            self.shared.figures.note_last(&self.name, disk.pid()).await;
            blocking(move || disk::end(&disk)).await?;
            self.check_final_flush(&run).await?;
            self.forget(run).await?;
            return Ok(StepOutcome::Again);
        }
        if run.is_outdated(catalog) {
            run = self.renew(machine, catalog, wanted, run).await?;
        }
        (run.restarts, run.resets, run.ready) = (wanted.restarts, wanted.resets, false);
        // If this is interrupted before the VMM is forgotten, its end was neither a crash nor requested by its guest.
        (run.ending, run.asked) = (None, true);
        let folder = self.folder.clone();
        blocking(move || {
            if forgets {
                disk::reset(folder.path())?;
                run.empty_scratch()?;
                vmm::forget_firmware(&folder, &run)?;
            }
            folder.save(&run)
        })
        .await?;
        self.forget_vmm().await?;
        if forgets {
            self.raise(EventKind::Reset, "its disk has been reset");
        }
        Ok(StepOutcome::Again)
    }

    /// Records that the machine should be off after its guest has shut down, unless its desired state has changed since.
    /// Returns whether it did.
    async fn want_off(&self) -> Result<bool, HostError> {
        let (shared, name, seen) = (Arc::clone(&self.shared), self.name.clone(), self.seen);
        blocking(move || {
            shared.objects.change(|changes| {
                let found =
                    changes.get::<DesiredState>(name.as_str())?.filter(|found| found.revision == seen);
                let Some(found) = found else { return Ok(false) };
                changes.put(name.as_str(), &DesiredState { power: Power::Off, ..found.value });
                Ok(true)
            })
        })
        .await
    }
}

/// Whether its catalog wants the machine on, whatever its guest does: it starts it by itself, keeps some ready, or brings
/// machines to another version.
fn is_needed(catalog: &Catalog) -> bool {
    catalog.spec.autostart || catalog.spec.warm > 0 || catalog.rollout.is_some()
}

/// Ends the processes in a folder without a readable record, and removes the folder. Returns whether it existed.
pub(super) fn clear(folder: &MachineFolder) -> Result<bool, HostError> {
    for name in PROCESSES {
        if let ObservedProcess::Alive(process) = processes::look(folder.path(), name)? {
            disk::end(&process)?;
        }
    }
    folder.remove()
}

/// Whether a process runs in a folder.
pub(super) fn is_alive(folder: &MachineFolder) -> Result<bool, HostError> {
    let mut is_alive = false;
    for name in PROCESSES {
        is_alive |= matches!(processes::look(folder.path(), name)?, ObservedProcess::Alive(_));
    }
    Ok(is_alive)
}
