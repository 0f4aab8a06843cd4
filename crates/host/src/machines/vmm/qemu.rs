//! QEMU as a machine's VMM: a process in the machine's folder, and the conversation with it. Owns the monitor's
//! connection.
//!
//! Invariant: a guest that ends is held until somebody has asked why.

use super::super::run::{Folder, Run};
use super::super::short_path::ShortPath;
use super::super::{blocking, disk};
use super::{PROCESS, unheard};
use crate::error::HostError;
use crate::hypervisor::qemu::{self, Files};
use crate::hypervisor::qmp::{Event, Qmp};
use crate::machines::ready::connect_console;
use crate::processes::{self, Process};
use crate::scopes::Scopes;
use spillway_api::{ErrorCode, Machine, ResetEvent};
use spillway_worker::kvm::Accelerator;
use std::future::pending;
use std::io;
use std::time::{Duration, Instant};
use tokio::net::UnixStream;

/// How long one that was started may take to answer.
const GREETING: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(5);

/// A machine's QEMU.
pub struct Qemu {
    folder: Folder,
    monitor: Option<Qmp>,
    /// The guest's console, read from before the guest began.
    pub console: Option<UnixStream>,
}

impl Qemu {
    pub fn new(folder: Folder) -> Qemu {
        Qemu { folder, monitor: None, console: None }
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
        let exits_at_reboot = run.spec.reset() == ResetEvent::GuestReboot;
        let command = qemu::command(machine, &run.spec, accelerator, disk::SOCKET, files, exits_at_reboot);
        let folder = self.folder.clone();
        let command = scopes.place(folder.path(), PROCESS, command);
        blocking(move || processes::start(folder.path(), PROCESS, command).map(drop)).await
    }

    /// Listens to it, and learns what it is doing if nobody has listened before.
    pub async fn attach(&mut self, process: &Process, run: &mut Run) -> Result<(), HostError> {
        if self.monitor.is_some() {
            return Ok(());
        }
        let until = Instant::now() + GREETING;
        let mut monitor = loop {
            match self.connect().await {
                Ok(monitor) => break monitor,
                // It has ended, and is looked into for that.
                Err(_) if process.ends_within(Duration::ZERO) => return Ok(()),
                Err(_) if Instant::now() < until => tokio::time::sleep(LOOK).await,
                Err(e) => {
                    let message = format!("its VMM does not answer on {}: {e}", qemu::MONITOR);
                    return Err(HostError::new(ErrorCode::Unavailable, message));
                }
            }
        };
        let strange = |e| HostError::new(ErrorCode::Internal, format!("its VMM: {e}"));
        let status = monitor.execute("query-status").await.map_err(strange)?;
        if status["status"] == "prelaunch" {
            // Held: nothing that it says is to be missed.
            self.console = Some(connect_console(self.folder.path()).await.map_err(strange)?);
            monitor.execute("cont").await.map_err(strange)?;
        }
        self.monitor = Some(monitor);
        if status["status"] == "shutdown" && run.ending.is_none() {
            run.ending = Some(unheard(run));
            self.folder.save_in_background(run).await?;
        }
        Ok(())
    }

    /// Presses the power button.
    pub async fn power_down(&mut self) {
        if let Some(monitor) = &mut self.monitor {
            let _ = monitor.execute("system_powerdown").await;
        }
    }

    /// Tells it to end.
    pub async fn quit(&mut self) {
        if let Some(monitor) = &mut self.monitor {
            let _ = monitor.execute("quit").await;
        }
    }

    /// Nobody is spoken to any more.
    pub fn is_gone(&mut self) {
        (self.monitor, self.console) = (None, None);
    }

    /// What it says next; never, while nobody listens. May be given up at any time.
    pub async fn event(&mut self) -> Option<Event> {
        let Some(monitor) = &mut self.monitor else { return pending().await };
        let said = monitor.event().await.ok();
        if said.is_none() {
            self.monitor = None;
        }
        said
    }

    async fn connect(&self) -> io::Result<Qmp> {
        let socket = ShortPath::of(self.folder.path(), qemu::MONITOR).map_err(io::Error::other)?;
        Qmp::connect(socket.path()).await
    }
}
