//! A machine's VMM, whoever runs it: what became of it, its start, its end and why. Owns the choice of the driver and
//! when the guest was asked to shut down.
//!
//! Invariant: a VMM that was started is found again by any later daemon, and is ended before it is forgotten.

mod handles;
mod libvirt;
mod qemu;

use super::ready::Agent;
use super::run::{Ending, Folder, Run};
use super::{blocking, last_words, look};
use crate::error::HostError;
use crate::hypervisor::libvirt::Libvirt;
use crate::hypervisor::qemu::Files;
use crate::hypervisor::qmp::Event;
use crate::processes::{self, Process, Seen};
use crate::scopes::Scopes;
use spillway_api::{ErrorCode, Hypervisor, Machine, ResetEvent};
use spillway_control::kvm::Accelerator;
use std::fs::{self, Permissions};
use std::future::pending;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::UnixStream;

/// What the process is called.
pub const PROCESS: &str = "vmm";
/// How long it may take to end when it is told to.
const QUIT: Duration = Duration::from_secs(5);

/// The VMM of a machine, whether it runs or not.
pub struct Vmm {
    folder: Folder,
    libvirt: Arc<Libvirt>,
    driver: Driver,
    asked: Option<Instant>,
    /// Until when it may do what it was asked, although nobody wants that any more.
    heeds_until: Option<Instant>,
}

/// Who runs it.
enum Driver {
    Nobody,
    Qemu(qemu::Qemu),
    Libvirt(libvirt::Domain),
}

impl Vmm {
    pub fn new(folder: Folder, libvirt: Arc<Libvirt>) -> Vmm {
        Vmm { folder, libvirt, driver: Driver::Nobody, asked: None, heeds_until: None }
    }

    /// What became of it.
    pub async fn look(&mut self, run: &Run) -> Result<Seen, HostError> {
        self.driver_for(run);
        match &self.driver {
            Driver::Libvirt(domain) => domain.look().await,
            Driver::Nobody | Driver::Qemu(_) => look(&self.folder, PROCESS).await,
        }
    }

    /// A run has the driver that it was begun with.
    fn driver_for(&mut self, run: &Run) {
        match (run.hypervisor, &self.driver) {
            (Hypervisor::None, Driver::Nobody) | (Hypervisor::Qemu, Driver::Qemu(_)) => {}
            (Hypervisor::Libvirt, Driver::Libvirt(domain)) if domain.is_of(run) => {}
            (Hypervisor::None, _) => self.driver = Driver::Nobody,
            (Hypervisor::Qemu, _) => self.driver = Driver::Qemu(qemu::Qemu::new(self.folder.clone())),
            (Hypervisor::Libvirt, _) => {
                let libvirt = Arc::clone(&self.libvirt);
                self.driver = Driver::Libvirt(libvirt::Domain::new(self.folder.clone(), libvirt, run));
            }
        }
    }

    /// Starts it on the machine's disk.
    pub async fn start(
        &mut self,
        machine: &Machine,
        run: &Run,
        accelerator: &Accelerator,
        files: &Files<'_>,
        scopes: &Scopes,
    ) -> Result<(), HostError> {
        self.is_gone();
        self.driver_for(run);
        match &mut self.driver {
            Driver::Nobody => Ok(()),
            Driver::Qemu(qemu) => qemu.start(machine, run, accelerator, files, scopes).await,
            // libvirt gives it a scope.
            Driver::Libvirt(domain) => domain.start(machine, run, accelerator, files).await,
        }
    }

    /// Listens to it, and learns what it is doing if nobody has listened, or asked it lately. What its guest has ended for is
    /// recorded then: an error if it cannot be.
    pub async fn attach(&mut self, process: &Process, run: &mut Run) -> Result<(), HostError> {
        match &mut self.driver {
            Driver::Nobody => Ok(()),
            Driver::Qemu(qemu) => qemu.attach(process, run).await,
            Driver::Libvirt(domain) => {
                domain.attach(run);
                Ok(())
            }
        }
    }

    /// The guest's console as it was before the guest began, once, if the guest was held until somebody read it.
    pub fn take_console(&mut self) -> Option<UnixStream> {
        match &mut self.driver {
            Driver::Qemu(qemu) => qemu.console.take(),
            Driver::Nobody | Driver::Libvirt(_) => None,
        }
    }

    /// Asks the guest to shut down, once. Until when it may take; `None`: it has, it will not, or it had its time.
    pub async fn shut_down(
        &mut self,
        process: &Process,
        run: &mut Run,
        grace: Duration,
    ) -> Result<Option<Instant>, HostError> {
        let (now, is_over) = (Instant::now(), |asked: Instant| asked + grace <= Instant::now());
        if self.has_heard_end(run) || self.asked.map_or(grace.is_zero(), is_over) {
            return Ok(None);
        }
        // One that cannot be asked has its time, and is ended.
        let hears = self.attach(process, run).await.is_ok();
        if self.has_heard_end(run) {
            return Ok(None);
        }
        if hears && !run.asked {
            run.asked = true;
            // It is for the next daemon. What can be written nowhere can be stopped nevertheless.
            let _ = self.folder.save_in_background(run).await;
        }
        if hears && self.asked.is_none() {
            match &mut self.driver {
                Driver::Nobody => {}
                Driver::Qemu(qemu) => qemu.power_down().await,
                Driver::Libvirt(domain) => domain.power_down().await,
            }
        }
        let asked = *self.asked.get_or_insert(now);
        Ok(Some(asked + grace).filter(|_| !is_over(asked)))
    }

    /// It is to go on, whatever it was asked before. Until when a guest that shuts down does so because it was asked;
    /// `None`: one that does wants it itself.
    pub async fn goes_on(&mut self, run: &mut Run, grace: Duration) -> Result<Option<Instant>, HostError> {
        let asked = self.asked.take();
        if !run.asked {
            return Ok(None);
        }
        self.heeds_until = asked.map(|asked| asked + grace).or(self.heeds_until);
        // An earlier daemon may have asked it.
        let until = *self.heeds_until.get_or_insert_with(|| Instant::now() + grace);
        if until > Instant::now() {
            return Ok(Some(until));
        }
        (self.heeds_until, run.asked) = (None, false);
        self.folder.save_in_background(run).await?;
        Ok(None)
    }

    /// How its guest agent is asked.
    pub fn agent(&self) -> Agent {
        match &self.driver {
            Driver::Libvirt(domain) => domain.agent(),
            Driver::Nobody | Driver::Qemu(_) => Agent::Ours,
        }
    }

    /// Ends it, whatever its guest does.
    pub async fn end(&mut self, process: &Process) -> Result<(), HostError> {
        match &mut self.driver {
            Driver::Nobody => {}
            Driver::Qemu(qemu) => qemu.quit().await,
            Driver::Libvirt(domain) => domain.destroy().await,
        }
        self.is_gone();
        let process = process.try_clone()?;
        blocking(move || if process.ends_within(QUIT) { Ok(()) } else { process.end(QUIT) }).await
    }

    /// One that has ended: nobody is spoken to any more, and it is written down why it has, if that can be known.
    pub async fn has_ended(&mut self, run: &mut Run) -> Result<(), HostError> {
        self.is_gone();
        if run.ending.is_some() {
            return Ok(());
        }
        run.ending = match &mut self.driver {
            Driver::Nobody => None,
            Driver::Qemu(qemu) => qemu.heard(),
            Driver::Libvirt(domain) => domain.why(run).await?,
        };
        match run.ending {
            Some(_) => self.folder.save_in_background(run).await,
            None => Ok(()),
        }
    }

    /// The last that one said that has ended by itself, for people.
    pub async fn last_words(&self) -> Result<String, HostError> {
        match &self.driver {
            Driver::Libvirt(domain) => Ok(domain.last_words()),
            Driver::Nobody | Driver::Qemu(_) => last_words(&self.folder, PROCESS).await,
        }
    }

    /// Forgets one that has ended, or was never there; nothing is left of it.
    pub async fn forget(&mut self) -> Result<(), HostError> {
        self.is_gone();
        match &mut self.driver {
            Driver::Nobody => {}
            Driver::Qemu(qemu) => qemu.forget(),
            Driver::Libvirt(domain) => domain.undefine().await?,
        }
        let folder = self.folder.clone();
        blocking(move || processes::forget(folder.path(), PROCESS)).await
    }

    /// What it says next; never, while nobody listens. May be given up at any time.
    pub async fn event(&mut self) -> Option<Event> {
        match &mut self.driver {
            Driver::Qemu(qemu) => qemu.event().await,
            Driver::Nobody | Driver::Libvirt(_) => pending().await,
        }
    }

    /// Takes note of what it has said. What is to be recorded of it the next step records.
    pub fn hear(&mut self, event: &Event) {
        if let Driver::Qemu(qemu) = &mut self.driver {
            qemu.hear(event);
        }
    }

    /// Whether its guest has ended, as far as is known: whether that is recorded already or not.
    fn has_heard_end(&self, run: &Run) -> bool {
        let heard = if let Driver::Qemu(qemu) = &self.driver { qemu.heard() } else { None };
        run.ending.is_some() || heard.is_some()
    }

    fn is_gone(&mut self) {
        (self.asked, self.heeds_until) = (None, None);
        if let Driver::Qemu(qemu) = &mut self.driver {
            qemu.is_gone();
        }
    }
}

/// Of the reasons of QEMU's `SHUTDOWN` event (QEMU, run-state.json: ShutdownCause) those that are the guest's.
fn ending(reason: &str) -> Option<Ending> {
    match reason {
        "guest-reset" => Some(Ending::GuestReboot),
        "guest-shutdown" => Some(Ending::GuestShutdown),
        _ => None,
    }
}

/// Of a guest that has ended when nobody listened. A machine that comes back from a reboot comes back clean.
fn unheard(run: &Run) -> Ending {
    match run.spec.reset() {
        ResetEvent::GuestReboot => Ending::GuestReboot,
        ResetEvent::PowerCycle | ResetEvent::Never => Ending::GuestShutdown,
    }
}

/// Lets a VMM that runs with this group come to a file or through a folder.
fn give(path: &Path, group: u32, rights: u32) -> Result<(), HostError> {
    chown(path, None, Some(group))
        .and_then(|()| fs::set_permissions(path, Permissions::from_mode(rights)))
        .map_err(|e| {
            let message =
                format!("{} cannot be given to group {group}, which its QEMU has: {e}", path.display());
            HostError::new(ErrorCode::Internal, message)
        })
}
