//! A libvirt domain as a machine's VMM. Owns its definition, which exists from the start of a VMM until it is forgotten,
//! and the rights by which libvirt's QEMU reaches the machine's disk.
//!
//! Invariant: a domain without our metadata is never touched, whatever its name; ours is looked up by the machine's UUID.

use super::super::guest_agent::GuestAgent;
use super::super::run::{MachineFolder, RunRecord, VmmEnding};
use super::super::{blocking, disk, look};
use super::state::FirmwareState;
use super::{PROCESS, access, assumed_ending, ending, screen, tpm};
use crate::error::HostError;
use crate::hypervisor::domain;
use crate::hypervisor::libvirt::{DomainState, Libvirt};
use crate::hypervisor::qemu::{self, HostFiles};
use crate::processes::{self, ObservedProcess};
use crate::scopes::Scopes;
use spillway_api::{DisplayKind, ErrorCode, Machine, ResetEvent, Tpm};
use spillway_control::kvm::Accelerator;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// File of the domain's description, as it was given to libvirt.
const FILE: &str = "domain.xml";
/// Longest time until libvirt notices that a QEMU has ended.
const NOTICE: Duration = Duration::from_secs(20);
const LOOK: Duration = Duration::from_millis(20);

/// A machine's libvirt domain.
pub struct Domain {
    folder: MachineFolder,
    libvirt: Arc<Libvirt>,
    name: String,
    uuid: String,
    /// Why the domain is off, in libvirt's words.
    reason: Option<String>,
}

impl Domain {
    pub fn new(folder: MachineFolder, libvirt: Arc<Libvirt>, run: &RunRecord) -> Domain {
        let name = domain::name(folder.name());
        Domain { folder, libvirt, name, uuid: run.uuid.clone(), reason: None }
    }

    /// Whether the domain belongs to this run.
    pub fn is_of(&self, run: &RunRecord) -> bool {
        self.uuid == run.uuid
    }

    /// Finds out whether the process is alive. Asks libvirt only if the process is not recorded.
    pub async fn look(&self) -> Result<ObservedProcess, HostError> {
        let known = look(&self.folder, PROCESS).await?;
        if !matches!(known, ObservedProcess::None) {
            return Ok(known);
        }
        match self.state().await? {
            DomainState::Absent => Ok(ObservedProcess::None),
            // The domain is defined but was not started.
            DomainState::Off(reason) if ["unknown", "failed"].contains(&reason.as_str()) => {
                Ok(ObservedProcess::None)
            }
            DomainState::Off(_) => Ok(ObservedProcess::Ended),
            DomainState::On => self.adopt().await,
        }
    }

    /// Defines and starts the domain.
    pub async fn start(
        &mut self,
        machine: &Machine,
        run: &RunRecord,
        accelerator: &Accelerator,
        files: &HostFiles<'_>,
        scopes: &Scopes,
    ) -> Result<(), HostError> {
        // Catalogs of an earlier daemon may contain unsupported settings.
        domain::check_supported(&run.spec)
            .and_then(|()| domain::fits(self.folder.path()))
            .map_err(HostError::permanent)?;
        let ends_at_reboot = run.spec.reset() == ResetEvent::GuestReboot;
        let place = (self.folder.path(), disk::SOCKET);
        let text = domain::describe(machine, &run.spec, accelerator, place, files, ends_at_reboot);
        let (folder, owner) = (self.folder.clone(), self.libvirt.owner().await?);
        let group = owner.map(|(_, group)| group);
        let variables = files.uefi.map(|(_, variables)| variables);
        let own = [files.seed, files.data, files.scratch, variables].into_iter().flatten();
        let own: Vec<PathBuf> = own.map(|file| self.folder.path().join(file)).collect();
        let file = self.folder.path().join(FILE);
        let written = file.clone();
        let has_screen = run.spec.hardware.display == DisplayKind::Vnc;
        let tpm = (run.spec.hardware.tpm == Tpm::V2).then(|| FirmwareState::of(&self.folder, run));
        let scopes = scopes.clone();
        blocking(move || {
            if has_screen {
                screen::prepare(folder.path(), group)?;
            }
            if let Some(group) = group {
                access::grant(group, folder.path(), &[disk::SOCKET, qemu::SERIAL], &own)?;
            }
            if let Some(state) = tpm {
                tpm::start(folder.path(), &state, owner, &scopes)?;
            }
            fs::write(&written, text).map_err(|e| failed(&written, "cannot be written", e))
        })
        .await?;
        let Some(file) = file.to_str() else {
            let message = format!("{}: libvirt takes paths that are text", file.display());
            return Err(HostError::invalid(message));
        };
        if let Err(error) = self.libvirt.ask(&["define", file]).await {
            return Err(self.foreign_domain().await?.unwrap_or(error));
        }
        if ends_at_reboot {
            self.libvirt.listen_to(&self.name);
        }
        let start: &[&str] =
            if run.held { &["start", &self.uuid, "--paused"] } else { &["start", &self.uuid] };
        self.libvirt.ask(start).await?;
        self.seal(run).await
    }

    /// Subscribes to the domain's shutdown reasons, if the run needs them.
    pub async fn attach(&self, run: &RunRecord) -> Result<(), HostError> {
        if run.spec.reset() == ResetEvent::GuestReboot && !self.libvirt.listens_to(&self.name) {
            self.libvirt.listen_to(&self.name);
        }
        // The daemon that has started it may have died before it did this.
        self.seal(run).await
    }

    async fn seal(&self, run: &RunRecord) -> Result<(), HostError> {
        if run.spec.hardware.display == DisplayKind::None {
            return Ok(());
        }
        let folder = self.folder.clone();
        blocking(move || screen::seal(folder.path())).await
    }

    /// Returns the channel to the guest agent.
    pub fn agent(&self) -> GuestAgent {
        GuestAgent::Libvirt(Arc::clone(&self.libvirt), self.uuid.clone())
    }

    /// Presses the power button. Returns whether libvirt has confirmed it.
    pub async fn power_down(&self) -> bool {
        self.libvirt.ask(&["shutdown", &self.uuid, "--mode", "acpi"]).await.is_ok()
    }

    /// Stops the guest's processors, or lets them go on.
    pub async fn hold(&self, must_wait: bool) -> Result<bool, HostError> {
        let command = if must_wait { "suspend" } else { "resume" };
        match self.libvirt.ask(&[command, &self.uuid]).await {
            // An earlier daemon has done it, and not recorded it.
            Err(e) if !must_wait && e.message.contains("already running") => Ok(true),
            done => done.map(|_| true),
        }
    }

    /// Ends the process.
    pub async fn destroy(&self) {
        let _ = self.libvirt.ask(&["destroy", &self.uuid]).await;
    }

    /// Returns why the domain has ended, if its guest caused that.
    pub async fn why(&mut self, run: &RunRecord) -> Result<Option<VmmEnding>, HostError> {
        let DomainState::Off(reason) = self.off().await? else { return Ok(None) };
        let by_guest = reason == "shutdown";
        self.reason = Some(reason);
        Ok(match run.spec.reset() {
            _ if !by_guest => None,
            // libvirt itself does not tell the one from the other.
            ResetEvent::GuestReboot => {
                let reason = self.libvirt.reason(&self.name).await;
                Some(reason.as_deref().and_then(ending).unwrap_or_else(|| assumed_ending(run)))
            }
            ResetEvent::PowerCycle | ResetEvent::Never => Some(assumed_ending(run)),
        })
    }

    /// Why the domain is off, for people.
    pub fn last_words(&self) -> String {
        let reason = self.reason.as_deref().unwrap_or("unknown");
        format!("'{reason}', says libvirt, whose log of the domain {} may know more", self.name)
    }

    /// Removes the definition.
    pub async fn undefine(&mut self) -> Result<(), HostError> {
        if let DomainState::Off(_) = self.off().await? {
            self.libvirt
                .ask(&["undefine", &self.uuid, "--managed-save", "--snapshots-metadata", "--keep-nvram"])
                .await?;
        }
        self.libvirt.forget(&self.name);
        self.reason = None;
        Ok(())
    }

    /// Returns libvirt's state of a domain whose process has ended, once libvirt knows that.
    async fn off(&self) -> Result<DomainState, HostError> {
        let until = Instant::now() + NOTICE;
        loop {
            match self.state().await? {
                DomainState::On if Instant::now() < until => tokio::time::sleep(LOOK).await,
                DomainState::On => {
                    let message =
                        format!("domain {}: its QEMU has ended, and libvirt does not notice", self.name);
                    return Err(HostError::new(ErrorCode::Unavailable, message));
                }
                off => return Ok(off),
            }
        }
    }

    /// Returns libvirt's state of the domain. Fails if a domain that is not ours has its UUID.
    async fn state(&self) -> Result<DomainState, HostError> {
        let state = self.libvirt.state(&self.uuid).await?;
        if state != DomainState::Absent {
            let mark = self.libvirt.ask(&["metadata", &self.uuid, domain::NAMESPACE]).await;
            if !mark.is_ok_and(|mark| mark.contains(&self.uuid)) {
                return Err(not_ours(&format!("with the UUID {}", self.uuid)));
            }
        }
        Ok(state)
    }

    /// Error that names a foreign domain of the same name, if there is one.
    async fn foreign_domain(&self) -> Result<Option<HostError>, HostError> {
        let domains = self.libvirt.ask(&["list", "--all", "--uuid", "--name"]).await?;
        let others = domains.lines().filter_map(|line| line.trim().split_once(' '));
        let mut namesakes = others.filter(|(uuid, name)| name.trim() == self.name && *uuid != self.uuid);
        Ok(namesakes.next().map(|(uuid, _)| not_ours(&format!("'{}' (UUID {uuid})", self.name))))
    }

    /// Adopts the process that libvirt reports for the domain.
    async fn adopt(&self) -> Result<ObservedProcess, HostError> {
        let (file, name, uuid) = (self.libvirt.pid_file(&self.name), self.name.clone(), self.uuid.clone());
        let folder = self.folder.clone();
        blocking(move || {
            let text = fs::read_to_string(&file)
                .map_err(|e| failed(&file, "does not say which process it is", e))?;
            let pid = text.trim().parse().unwrap_or_default();
            match processes::adopt(folder.path(), PROCESS, pid, &uuid)? {
                ObservedProcess::None => {
                    let message =
                        format!("domain {name}: process {pid} of {} is not its QEMU", file.display());
                    Err(HostError::new(ErrorCode::Internal, message))
                }
                alive => Ok(alive),
            }
        })
        .await
    }
}

fn not_ours(which: &str) -> HostError {
    let message = format!(
        "libvirt has a domain {which} that is not this machine's, and is not changed: rename or remove it"
    );
    HostError::new(ErrorCode::Conflict, message)
}

fn failed(path: &Path, what: &str, error: io::Error) -> HostError {
    HostError::new(ErrorCode::Internal, format!("{} {what}: {error}", path.display()))
}
