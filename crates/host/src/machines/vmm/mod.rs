//! The VMM of a machine, run by QEMU directly or by libvirt: its start, its shutdown, its end and the reason for that.
//! Owns the choice of the driver, and when the guest was asked to shut down.
//!
//! Invariant: every later daemon finds a VMM that was started, and a VMM is ended before it is forgotten.

mod access;
mod handles;
mod libvirt;
mod qemu;
mod screen;
mod shutdown;
mod state;
mod tpm;

pub use access::admit_group;
use access::grant_group;
use shutdown::Shutdown;
pub use state::FirmwareState;
pub use tpm::PROCESS as TPM_PROCESS;

use super::guest_agent::GuestAgent;
use super::run::{MachineFolder, RunRecord, VmmEnding};
use super::{blocking, last_words, look};
use crate::error::HostError;
use crate::guard::GuardPage;
use crate::hypervisor::libvirt::Libvirt;
use crate::hypervisor::qemu::HostFiles;
use crate::hypervisor::qmp::Event;
use crate::processes::{self, ObservedProcess, Process};
use crate::scopes::Scopes;
use spillway_api::{Hypervisor, Machine, ResetEvent};
use spillway_control::kvm::Accelerator;
use std::future::pending;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Name of the process.
pub const PROCESS: &str = "vmm";
/// Longest time until the VMM ends when it is told to.
const QUIT: Duration = Duration::from_secs(5);

/// Shortest time between two events of a watchdog.
const TELL_AGAIN: Duration = Duration::from_secs(60);

/// VMM of a machine, whether it runs or not.
pub struct Vmm {
    folder: MachineFolder,
    libvirt: Arc<Libvirt>,
    driver: VmmDriver,
    /// The shutdown that this daemon has asked the guest for.
    shutdown: Option<Shutdown>,
    /// Until when a shutdown that was requested counts, although it is not wanted any more.
    heeds_until: Option<Instant>,
    /// Whether this daemon has stopped the guest's processors, or let them go on.
    held: Option<bool>,
    /// When an event was last told of.
    told: Option<Instant>,
}

/// Driver of the VMM.
enum VmmDriver {
    Nobody,
    Qemu(qemu::Qemu),
    Libvirt(libvirt::Domain),
}

impl Vmm {
    pub fn new(folder: MachineFolder, libvirt: Arc<Libvirt>) -> Vmm {
        Vmm {
            folder,
            libvirt,
            driver: VmmDriver::Nobody,
            shutdown: None,
            heeds_until: None,
            held: None,
            told: None,
        }
    }

    /// Finds out whether the VMM is alive.
    pub async fn look(&mut self, run: &RunRecord) -> Result<ObservedProcess, HostError> {
        self.driver_for(run);
        match &self.driver {
            VmmDriver::Libvirt(domain) => domain.look().await,
            VmmDriver::Nobody | VmmDriver::Qemu(_) => look(&self.folder, PROCESS).await,
        }
    }

    /// Selects the driver that the run was started with.
    fn driver_for(&mut self, run: &RunRecord) {
        match (run.hypervisor, &self.driver) {
            (Hypervisor::None, VmmDriver::Nobody) | (Hypervisor::Qemu, VmmDriver::Qemu(_)) => {}
            (Hypervisor::Libvirt, VmmDriver::Libvirt(domain)) if domain.is_of(run) => {}
            (Hypervisor::None, _) => self.driver = VmmDriver::Nobody,
            (Hypervisor::Qemu, _) => self.driver = VmmDriver::Qemu(qemu::Qemu::new(self.folder.clone())),
            (Hypervisor::Libvirt, _) => {
                let libvirt = Arc::clone(&self.libvirt);
                self.driver = VmmDriver::Libvirt(libvirt::Domain::new(self.folder.clone(), libvirt, run));
            }
        }
    }

    /// Starts the VMM on the machine's disk, but not past the deadline of this page. With UEFI firmware its variables exist already.
    pub async fn start(
        &mut self,
        machine: &Machine,
        run: &RunRecord,
        accelerator: &Accelerator,
        files: &HostFiles<'_>,
        scopes: &Scopes,
        page: Option<Arc<GuardPage>>,
    ) -> Result<(), HostError> {
        self.disconnect();
        self.driver_for(run);
        match &mut self.driver {
            VmmDriver::Nobody => Ok(()),
            VmmDriver::Qemu(qemu) => qemu.start(machine, run, accelerator, files, (scopes, page)).await,
            // libvirt creates a scope for it.
            VmmDriver::Libvirt(domain) => domain.start(machine, run, accelerator, files, scopes).await,
        }
    }

    /// Subscribes to the VMM's events, and polls it if there was no subscription or the last answer is old. Records why
    /// the guest has ended; returns an error if that cannot be recorded.
    pub async fn attach(&mut self, process: &Process, run: &mut RunRecord) -> Result<(), HostError> {
        match &mut self.driver {
            VmmDriver::Nobody => Ok(()),
            VmmDriver::Qemu(qemu) => qemu.attach(process, run).await,
            VmmDriver::Libvirt(domain) => domain.attach(run).await,
        }
    }

    /// Asks the guest to shut down. Returns when to look again, at its deadline at the latest; `None`: it has shut down, cannot
    /// be asked, or its time is over.
    pub async fn shut_down(
        &mut self,
        process: &Process,
        run: &mut RunRecord,
        grace: Duration,
    ) -> Result<Option<Instant>, HostError> {
        let is_over = |asked: Instant| asked + grace <= Instant::now();
        let asked = self.shutdown.as_ref().map(Shutdown::asked);
        if self.is_end_known(run) || asked.map_or(grace.is_zero(), is_over) {
            return Ok(None);
        }
        // One that cannot be asked has its time, and is ended.
        let hears = self.attach(process, run).await.is_ok();
        if self.is_end_known(run) {
            return Ok(None);
        }
        if hears && !run.asked {
            run.asked = true;
            // It is for the next daemon. What can be written nowhere can be stopped nevertheless.
            let _ = self.folder.save_in_background(run).await;
        }
        if self.shutdown.is_none() {
            let agent = match hears && self.has_agent().await {
                true => Some(self.agent()),
                false => None,
            };
            self.shutdown = Some(Shutdown::begin(agent, self.folder.path().to_owned()).await);
        }
        let Some(shutdown) = &mut self.shutdown else { return Ok(None) };
        let asked = shutdown.asked();
        let mut until = asked + grace;
        match shutdown.press_at(grace).await {
            Some(at) if at > Instant::now() => until = until.min(at),
            Some(_) => {
                let is_pressed = match &mut self.driver {
                    VmmDriver::Nobody => true,
                    VmmDriver::Qemu(_) | VmmDriver::Libvirt(_) if !hears => false,
                    VmmDriver::Qemu(qemu) => qemu.power_down().await,
                    VmmDriver::Libvirt(domain) => domain.power_down().await,
                };
                until = shutdown.note_press(is_pressed).map_or(until, |again| until.min(again));
            }
            None => {}
        }
        Ok(Some(until).filter(|_| !is_over(asked)))
    }

    /// Whether this daemon has asked the guest to shut down.
    pub fn is_shutting_down(&self) -> bool {
        self.shutdown.is_some()
    }

    /// Whether the guest may have an agent.
    async fn has_agent(&mut self) -> bool {
        match &mut self.driver {
            VmmDriver::Nobody => false,
            VmmDriver::Qemu(qemu) => qemu.has_agent().await,
            VmmDriver::Libvirt(_) => true,
        }
    }

    /// Cancels a shutdown that was requested earlier. Returns until when a shutdown of the guest counts as that one;
    /// `None`: the guest decides itself.
    pub async fn cancel_shutdown(
        &mut self,
        run: &mut RunRecord,
        grace: Duration,
    ) -> Result<Option<Instant>, HostError> {
        let asked = self.shutdown.take().map(|shutdown| shutdown.asked());
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

    /// Stops the guest's processors while its disk waits for chunks of the image, and lets them go on afterwards: a guest resets a
    /// disk that does not answer, and some drivers then damage the guest's memory. Returns what was done.
    pub async fn hold(
        &mut self,
        run: &mut RunRecord,
        must_wait: bool,
    ) -> Result<Option<&'static str>, HostError> {
        let is_done = self.held == Some(must_wait) && run.held == must_wait;
        if is_done || !must_wait && !run.held {
            return Ok(None);
        }
        if must_wait && !run.held {
            // It is recorded first: whoever finds them stopped lets them go on.
            run.held = true;
            self.folder.save_in_background(run).await?;
        }
        let held = match &mut self.driver {
            VmmDriver::Nobody => false,
            VmmDriver::Qemu(qemu) => qemu.hold(must_wait).await?,
            VmmDriver::Libvirt(domain) => domain.hold(must_wait).await?,
        };
        if !held {
            return Ok(None);
        }
        self.held = Some(must_wait);
        if !must_wait {
            run.held = false;
            self.folder.save_in_background(run).await?;
        }
        Ok(Some(match must_wait {
            true => "the guest is paused until chunks of its image arrive",
            false => "the guest goes on",
        }))
    }

    /// Returns the channel to the guest agent.
    pub fn agent(&self) -> GuestAgent {
        match &self.driver {
            VmmDriver::Libvirt(domain) => domain.agent(),
            VmmDriver::Nobody | VmmDriver::Qemu(_) => GuestAgent::Socket,
        }
    }

    /// Ends the VMM, whatever its guest does.
    pub async fn end(&mut self, process: &Process) -> Result<(), HostError> {
        match &mut self.driver {
            VmmDriver::Nobody => {}
            VmmDriver::Qemu(qemu) => qemu.quit().await,
            VmmDriver::Libvirt(domain) => domain.destroy().await,
        }
        self.disconnect();
        let process = process.try_clone()?;
        blocking(move || if process.ends_within(QUIT) { Ok(()) } else { process.end(QUIT) }).await
    }

    /// Disconnects from a VMM that has ended, and records why it has ended if that can be known.
    pub async fn record_end(&mut self, run: &mut RunRecord) -> Result<(), HostError> {
        self.disconnect();
        if run.ending.is_some() {
            return Ok(());
        }
        run.ending = match &mut self.driver {
            VmmDriver::Nobody => None,
            VmmDriver::Qemu(qemu) => qemu.ending_seen(),
            VmmDriver::Libvirt(domain) => domain.why(run).await?,
        };
        match run.ending {
            Some(_) => self.folder.save_in_background(run).await,
            None => Ok(()),
        }
    }

    /// Returns the last output of a VMM that has ended by itself, for people.
    pub async fn last_words(&self) -> Result<String, HostError> {
        match &self.driver {
            VmmDriver::Libvirt(domain) => Ok(domain.last_words()),
            VmmDriver::Nobody | VmmDriver::Qemu(_) => last_words(&self.folder, PROCESS).await,
        }
    }

    /// Forgets a VMM that has ended or never existed, and removes what is left of it.
    pub async fn forget(&mut self) -> Result<(), HostError> {
        self.disconnect();
        match &mut self.driver {
            VmmDriver::Nobody => {}
            VmmDriver::Qemu(qemu) => qemu.forget(),
            VmmDriver::Libvirt(domain) => domain.undefine().await?,
        }
        let folder = self.folder.clone();
        blocking(move || {
            tpm::end(folder.path())?;
            processes::forget(folder.path(), PROCESS)
        })
        .await
    }

    /// Waits for the next event; never returns without a subscription. Cancel safe.
    pub async fn event(&mut self) -> Option<Event> {
        match &mut self.driver {
            VmmDriver::Qemu(qemu) => qemu.event().await,
            VmmDriver::Nobody | VmmDriver::Libvirt(_) => pending().await,
        }
    }

    /// Notes an event. The next step records what it means.
    pub fn note_event(&mut self, event: &Event) {
        if let VmmDriver::Qemu(qemu) = &mut self.driver {
            qemu.note_event(event);
        }
    }

    /// Returns what people should know of an event. A guest that lets its watchdog expire again and again is told of now and then.
    pub fn tell(&mut self, event: &Event) -> Option<String> {
        let action = event.data["action"].as_str().filter(|_| event.name == "WATCHDOG")?;
        if self.told.is_some_and(|told| told.elapsed() < TELL_AGAIN) {
            return None;
        }
        self.told = Some(Instant::now());
        Some(format!("its guest does not answer its watchdog any more: {action}"))
    }

    /// Whether the guest is known to have ended, recorded or not.
    fn is_end_known(&self, run: &RunRecord) -> bool {
        let ending_seen = if let VmmDriver::Qemu(qemu) = &self.driver { qemu.ending_seen() } else { None };
        run.ending.is_some() || ending_seen.is_some()
    }

    fn disconnect(&mut self) {
        (self.shutdown, self.heeds_until, self.held) = (None, None, None);
        if let VmmDriver::Qemu(qemu) = &mut self.driver {
            qemu.disconnect();
        }
    }
}

/// Removes what the firmware and the trusted platform module of a machine have kept. Its VMM has ended.
pub fn forget_firmware(folder: &MachineFolder, run: &RunRecord) -> Result<(), HostError> {
    tpm::end(folder.path())?;
    FirmwareState::of(folder, run).remove()
}

/// Maps the reason of QEMU's `SHUTDOWN` event to an ending.
fn ending(reason: &str) -> Option<VmmEnding> {
    match reason {
        "guest-reset" => Some(VmmEnding::GuestReboot),
        "guest-shutdown" => Some(VmmEnding::GuestShutdown),
        _ => None,
    }
}

/// Ending of a guest that ended while nobody was subscribed.
fn assumed_ending(run: &RunRecord) -> VmmEnding {
    match run.spec.reset() {
        ResetEvent::GuestReboot => VmmEnding::GuestReboot,
        ResetEvent::PowerCycle | ResetEvent::Never => VmmEnding::GuestShutdown,
    }
}
