//! Steps of a start: the run's record, its disk, its VMM, and the readiness of its guest.
//!
//! Invariant: each step may be interrupted and repeated.

use super::end::clear;
use super::{MachineReconciler, StepOutcome, TICK, WakeupConditions, named};
use crate::error::HostError;
use crate::hypervisor::qemu;
use crate::hypervisor::uefi::{self, Uefi};
use crate::images::BootChoice;
use crate::machines::belongings::Belongings;
use crate::machines::desired_state::{DesiredState, boot_id};
use crate::machines::phone_home;
use crate::machines::ready::{GuestNetwork, until_ready};
use crate::machines::run::{PrivateCopy, RunRecord};
use crate::machines::status::Status;
use crate::machines::vmm::FirmwareState;
use crate::machines::{belongings, blocking, disk, last_words, look};
use crate::processes::{self, ObservedProcess, Process};
use crate::resources::boots::{Boot, BootRank};
use spillway_api::{Catalog, CatalogSpec, DiskMode, ErrorCode, EventKind, Machine, Network, Phase, Ready};
use spillway_control::{Request, Touched};
use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::Notify;

/// Describes the boot of a machine.
pub(in crate::machines) fn boot<'a>(machine: &'a Machine, run: &RunRecord) -> Boot<'a> {
    Boot { name: &machine.name, catalog: &machine.catalog, is_checked: run.spec.ready.is_some() }
}

impl MachineReconciler {
    /// Starts a machine's disk: the first one, or another one after its process was lost with its data.
    pub(super) async fn bring_up_disk(
        &mut self,
        machine: &Machine,
        catalog: &Catalog,
        run: RunRecord,
        vmm: ObservedProcess,
    ) -> Result<StepOutcome, HostError> {
        self.publish(Status::new(Phase::Starting).of(&run, &self.folder));
        if let ObservedProcess::Alive(vmm) = &vmm {
            self.vmm.end(vmm).await?;
        }
        // A VMM that has ended by itself, or belongs to an earlier boot of the host, does not boot either.
        self.shared.boots.end(&self.name);
        if run.is_of_another_boot() {
            self.forget(run).await?;
            return Ok(StepOutcome::Again);
        }
        let process = look(&self.folder, disk::PROCESS).await?;
        if let ObservedProcess::Ended = process {
            let said = last_words(&self.folder, disk::PROCESS).await?;
            let lost = if run.kept.is_some() { "" } else { ", and with it what was written" };
            self.forget(run).await?;
            self.record_crash(&format!("its disk has ended{lost}: {said}"));
            return Ok(StepOutcome::Again);
        }
        // The disk has no data yet: the catalog's latest settings may be what lets it start.
        if run.is_outdated(catalog) {
            // A copy of the old version is not needed any more.
            self.stop_placing().await;
            self.forget(run).await?;
            return Ok(StepOutcome::Again);
        }
        let turn = self.shared.turn_to_start(&self.name, &run.spec, run.version).await?;
        if let Some(copy) = run.copy.clone() {
            let path = copy.path.clone();
            if !blocking(move || Ok(path.exists())).await? {
                return self.place(&run, copy);
            }
        }
        let (shared, folder, name) = (Arc::clone(&self.shared), self.folder.clone(), machine.name.clone());
        let (begun, size_bytes) = (run.clone(), machine.size_bytes);
        let started = blocking(move || {
            let source = disk::DiskSource { size_bytes, ..shared.source(&run)? };
            disk::start(folder.path(), &run, &source, &shared.parts.scopes)
                .map_err(|e| HostError { message: format!("{name}: {e}"), ..e })
                .inspect_err(|_| _ = processes::forget(folder.path(), disk::PROCESS))
        })
        .await;
        drop(turn);
        if started.as_ref().is_err_and(|e| e.is_permanent) {
            // The next start uses the catalog of that time. Until then others may have what this one was promised.
            self.forget(begun).await?;
            self.shared.admission.give_back(&self.name);
        }
        started.map(|_| StepOutcome::Again)
    }

    /// Records what the machine starts with, and creates the files that it needs besides its disk.
    pub(super) async fn begin_run(
        &mut self,
        machine: &Machine,
        catalog: &Catalog,
        wanted: &DesiredState,
    ) -> Result<(), HostError> {
        let _turn = self.shared.turn_to_start(&self.name, &catalog.spec, catalog.version).await?;
        let (shared, folder) = (Arc::clone(&self.shared), self.folder.clone());
        let (machine, catalog, wanted) = (machine.clone(), catalog.clone(), wanted.clone());
        let run = blocking(move || {
            let belongings = shared.files.belongings(&machine, &catalog, wanted.resets)?;
            let spec = catalog.spec;
            let kept = belongings.disk.as_ref();
            let version = kept.map_or(catalog.version, |disk| disk.version);
            // Check this first: a disk that can never be served takes no space.
            match spec.mode() {
                DiskMode::Ephemeral => shared.images.disk(&spec.image.name, version).map(drop)?,
                _ => shared.images.base(&spec.image.name, version).map(drop)?,
            }
            let mut run = RunRecord {
                uuid: machine.identity.uuid.clone(),
                boot: boot_id(),
                image: spec.image.name.clone(),
                version,
                kept: kept.map(|disk| disk.path.clone()),
                copy: None,
                hypervisor: spec.hypervisor(shared.parts.hypervisor),
                restarts: wanted.restarts,
                resets: wanted.resets,
                data: belongings.data,
                scratch: shared.files.scratch(&machine, &spec)?,
                ending: None,
                asked: false,
                ready: false,
                held: false,
                address: None,
                port: None,
                phone_secret: None,
                user: None,
                ram_bytes: spec.ram_bytes(),
                overflow_bytes: spec.overflow_bytes(),
                rate: spec.rate(),
                queues: spec.hardware.vcpus,
                boot_choice: BootChoice::of(&spec, || shared.images.boot_choice(&spec.image.name, version))?,
                spec,
            };
            clear(&folder)?;
            folder.make()?;
            belongings::write_seed(folder.path(), &machine, &run.spec, &belongings.host_key, None)?;
            run.empty_scratch()?;
            if run.spec.mode() != DiskMode::Ephemeral {
                folder.save(&run)?;
                return Ok(run);
            }
            let size_bytes = shared.images.size(&run.image, run.version)?;
            shared.placement.forget(&machine)?;
            shared.placement.reserve(&machine, size_bytes, |path| {
                run.copy = Some(PrivateCopy { path, size_bytes, is_shared: false });
                folder.save(&run)
            })?;
            Ok(run)
        })
        .await?;
        self.disk_recorded = false;
        self.publish(Status::new(Phase::Starting).of(&run, &self.folder));
        Ok(())
    }

    /// Applies the catalog's settings to the next VMM of a machine whose disk is still served, except those of the disk
    /// itself.
    pub(super) async fn renew(
        &self,
        machine: &Machine,
        catalog: &Catalog,
        wanted: &DesiredState,
        mut run: RunRecord,
    ) -> Result<RunRecord, HostError> {
        let _turn = self.shared.turn_to_start(&self.name, &catalog.spec, catalog.version).await?;
        let (shared, folder, resets) = (Arc::clone(&self.shared), self.folder.clone(), wanted.resets);
        let (machine, catalog) = (machine.clone(), catalog.clone());
        blocking(move || {
            let belongings = shared.files.belongings(&machine, &catalog, resets)?;
            let of = |spec: &CatalogSpec| (spec.scratch_disk_bytes, spec.scratch_format.clone());
            let before = of(&run.spec);
            run.spec = run.next(&catalog.spec);
            run.boot_choice =
                BootChoice::of(&run.spec, || shared.images.boot_choice(&run.image, run.version))?;
            run.data = belongings.data;
            if of(&run.spec) != before {
                run.scratch.as_deref().map_or(Ok(()), belongings::remove)?;
                run.scratch = shared.files.scratch(&machine, &run.spec)?;
                run.empty_scratch()?;
            }
            belongings::write_seed(folder.path(), &machine, &run.spec, &belongings.host_key, None)?;
            Ok(run)
        })
        .await
    }

    /// Lets the machines of catalogs of a lower order start before a machine that the daemon starts by itself. `None`: it may
    /// start now.
    pub(super) fn wait_for_others(
        &self,
        catalog: &Catalog,
        wanted: &DesiredState,
    ) -> Option<WakeupConditions> {
        if !catalog.spec.autostart || wanted.is_awaited() {
            return None;
        }
        let CatalogSpec { start_order, start_delay_seconds, .. } = catalog.spec;
        let wait = self.shared.order.may_start(&self.name, start_order, start_delay_seconds).err()?;
        self.publish(Status::new(Phase::Starting).hint(Some(wait.to_string())));
        let most = Instant::now() + TICK;
        Some(WakeupConditions::until(wait.until.map_or(most, |until| until.min(most))))
    }

    /// Starts the VMM of a machine whose disk is served, when it is its turn to boot.
    pub(super) async fn bring_up_vmm(
        &mut self,
        machine: &Machine,
        wanted: &DesiredState,
        run: RunRecord,
        disk: &Process,
    ) -> Result<StepOutcome, HostError> {
        // A machine whose disk was served while it was off had returned its memory.
        let need = run.need();
        if let Some(status) = self.admit(need, need.without_guest()) {
            self.publish(status.of(&run, &self.folder).by(disk, None));
            return Ok(StepOutcome::Rest(WakeupConditions::for_end_of(Some(disk), None)?));
        }
        let rank = match () {
            () if wanted.is_awaited() => BootRank::Requested,
            // Its last VMM has ended, and its disk is ready for another one.
            () if run.asked => BootRank::Returning,
            () => BootRank::Unrequested,
        };
        if let Err(wait) = self.shared.boots.take(boot(machine, &run), rank) {
            let status = Status::new(Phase::Starting).of(&run, &self.folder).by(disk, None);
            self.publish(status.hint(Some(wait.to_string())));
            let rest = WakeupConditions::for_end_of(Some(disk), None)?;
            let until = wait.until.map_or(rest.until, |until| until.min(rest.until));
            return Ok(StepOutcome::Rest(WakeupConditions { until, ..rest }));
        }
        let begun = self.begin_vmm(machine, run).await;
        if begun.is_err() {
            self.shared.boots.end(&self.name);
        }
        begun
    }

    async fn begin_vmm(&mut self, machine: &Machine, mut run: RunRecord) -> Result<StepOutcome, HostError> {
        self.publish(Status::new(Phase::Starting).of(&run, &self.folder));
        // The state so far belongs to the last VMM.
        // A guest with a name of the fleet begins when its order was asked for once more.
        let is_held = self.named.is_some();
        (run.ending, run.asked, run.ready, run.held, run.address) = (None, false, false, is_held, None);
        run.port = self.port_for(&run)?;
        run.phone_secret = (run.spec.ready == Some(Ready::PhoneHome)).then(phone_home::secret).transpose()?;
        run.user = self.shared.users().take(&self.name, &run.uuid)?;
        self.folder.save_in_background(&run).await?;
        self.tell_where_to_phone(machine, &run).await?;
        let started = self.start_vmm(machine, &run).await;
        if started.as_ref().is_err_and(|e| e.is_permanent) {
            self.shared.admission.lower(&self.name, run.need().without_guest());
        }
        started.map(|()| StepOutcome::Again)
    }

    /// Writes the seed disk again, with the URL of this boot, of a guest that phones home.
    async fn tell_where_to_phone(&self, machine: &Machine, run: &RunRecord) -> Result<(), HostError> {
        let Some(url) = phone_home::url(run, self.shared.parts.phone_home)? else { return Ok(()) };
        let (shared, folder) = (Arc::clone(&self.shared), self.folder.clone());
        let (machine, spec) = (machine.clone(), run.spec.clone());
        blocking(move || {
            let name = machine.name.as_str();
            let Some(found) = shared.objects.get::<Belongings>(name)? else {
                return Err(HostError::not_found("machine", name, []));
            };
            belongings::write_seed(folder.path(), &machine, &spec, &found.value.host_key, Some(&url))
        })
        .await
    }

    /// Ends the turn of a machine that has booted, and records the one of a machine that boots, which an earlier daemon may
    /// have started. Returns when to look again.
    pub(super) fn follow_boot(&self, machine: &Machine, run: &RunRecord) -> Option<Instant> {
        let boot = boot(machine, run);
        if !run.ready {
            self.shared.boots.note(boot);
            return None;
        }
        let until = self.shared.boots.counts_until(&self.name).filter(|_| !boot.is_checked);
        if until.is_none() {
            self.shared.boots.end(&self.name);
        }
        until
    }

    pub(super) async fn start_vmm(&mut self, machine: &Machine, run: &RunRecord) -> Result<(), HostError> {
        self.probe.end();
        let accelerator = self.shared.accelerator().await?;
        let _turn = self.shared.turn_to_start(&self.name, &run.spec, run.version).await?;
        let forward = match (run.port, &run.spec.ready) {
            (Some(here), Some(Ready::Tcp(there))) => Some((here, there.get())),
            _ => None,
        };
        let seed = self.folder.path().join(belongings::SEED);
        let uefi = self.prepare_firmware(run).await?;
        let files = qemu::HostFiles {
            seed: Some(&seed),
            data: run.data.as_deref(),
            scratch: run.scratch.as_deref(),
            forward,
            most_queues: Some(run.queues),
            guest: Some(run.boot_choice.guest),
            uefi: uefi.as_ref().map(|(uefi, variables)| (uefi, variables.as_path())),
        };
        let page = named::begin(self, run)?;
        self.vmm.start(machine, run, accelerator, &files, &self.shared.parts.scopes, page).await?;
        self.vmm_end_reported = false;
        self.attempts.vmm_begins();
        self.firmware.begins();
        self.raise(EventKind::Started, &format!("it starts on {}:{}", run.image, run.version));
        Ok(())
    }

    /// Finds UEFI firmware and creates the machine's variables, if its firmware is UEFI.
    async fn prepare_firmware(&self, run: &RunRecord) -> Result<Option<(Uefi, PathBuf)>, HostError> {
        let machine_type = run.spec.hardware.machine_type.clone();
        let machine_type = machine_type.unwrap_or_else(|| qemu::MACHINE_TYPE.into());
        let (firmware, state) = (run.boot_choice.firmware, FirmwareState::of(&self.folder, run));
        blocking(move || {
            let Some(found) = uefi::find(firmware, &machine_type)? else { return Ok(None) };
            let variables = state.prepare_variables(&found)?;
            Ok(Some((found, variables)))
        })
        .await
    }

    /// Returns a port that is free now, for a guest behind QEMU's user network whose readiness is a TCP service.
    pub(super) fn port_for(&self, run: &RunRecord) -> Result<Option<u16>, HostError> {
        if !matches!((&run.spec.ready, &run.spec.hardware.network), (Some(Ready::Tcp(_)), Network::User)) {
            return Ok(None);
        }
        let failed = |e| HostError::new(ErrorCode::Exhausted, format!("no port of this host is free: {e}"));
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(failed)?;
        listener.local_addr().map(|address| Some(address.port())).map_err(failed)
    }

    /// Starts the readiness probe, unless the guest is ready or the probe runs. Answers the guest's calls, if it phones home.
    pub(super) fn probe(&mut self, machine: &Machine, run: &RunRecord) {
        let called = self.answer_calls(run);
        if let (false, Some(ready), false) = (run.ready, run.spec.ready.clone(), self.probe.is_running()) {
            if let Some(called) = called {
                self.probe.begin(async move {
                    called.notified().await;
                    None
                });
                return;
            }
            let place = match (run.port, &run.spec.hardware.network) {
                (Some(port), _) => GuestNetwork::Forwarded(port),
                (None, Network::Bridge(bridge)) => {
                    GuestNetwork::Bridge(bridge.clone(), machine.identity.mac.clone())
                }
                (None, Network::User | Network::None) => GuestNetwork::Nowhere,
            };
            let (folder, agent) = (self.folder.clone(), self.vmm.agent());
            let (events, object) = (self.shared.events.clone(), format!("machine/{}", self.name));
            let tell = move |text: &str| events.raise(EventKind::Failed, &object, text);
            self.probe.begin(async move { until_ready(folder.path(), &agent, &ready, &place, tell).await });
        }
    }

    /// Answers the calls of a guest that phones home, ready or not. Returns what is notified of each call.
    fn answer_calls(&mut self, run: &RunRecord) -> Option<Arc<Notify>> {
        let secret = run.phone_secret.clone().filter(|_| run.spec.ready == Some(Ready::PhoneHome))?;
        let has_door = phone_home::has_own_door(run);
        let (calls, is_adopted) = (Arc::clone(&self.shared.guests.phone), self.attempts.is_adopted());
        let (folder, of_guest) = (self.folder.clone(), secret.clone());
        let answers = |called: Arc<Notify>| async move {
            match has_door {
                true => phone_home::answer_at_door(folder.path(), &of_guest, is_adopted, &called).await,
                false => calls.answer_to(&of_guest, called).await,
            }
        };
        Some(self.probe.answer_calls(&secret, answers))
    }

    pub(super) async fn record_ready(&mut self, address: Option<String>) -> Result<(), HostError> {
        let folder = self.folder.clone();
        blocking(move || match folder.load()? {
            Some(run) => folder.save(&RunRecord { ready: true, address, ..run }),
            None => Ok(()),
        })
        .await?;
        self.probe.stop();
        self.raise(EventKind::Ready, "it is ready");
        Ok(())
    }

    /// Records what the disk of a machine that has become ready has read of a streamed image. It is advice: nobody waits for it, and
    /// a failure loses no more than that.
    pub(super) fn record_boot(&self, catalog: &Catalog, run: &RunRecord) {
        // One that is ready as soon as it runs has read nothing yet.
        if run.spec.ready.is_none() {
            return;
        }
        let (shared, folder) = (Arc::clone(&self.shared), self.folder.clone());
        let (catalog, run) = (catalog.name.clone(), run.clone());
        tokio::task::spawn_blocking(move || {
            let Some(version) = shared.images.records_boot(&run.image, run.version, &catalog)? else {
                return Ok(());
            };
            let touched = disk::ask(folder.path(), &Request::Touched)?;
            let touched: Touched = serde_json::from_value(touched)
                .map_err(|e| HostError::new(ErrorCode::Internal, format!("the disk: {e}")))?;
            match touched.chunks.is_empty() {
                true => Ok(()),
                false => shared.images.record_boot(&version, &catalog, touched.chunks),
            }
        });
    }
}
