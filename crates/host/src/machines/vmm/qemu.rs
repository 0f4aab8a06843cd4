//! QEMU as a machine's VMM: a process in the machine's folder, with a user of its own, and its monitor. Owns the
//! monitor's connection, and what was reported over it and could not be recorded yet.
//!
//! Invariant: a guest that ends is held until the reason is recorded. That does not depend on a single event: QEMU's
//! status is queried again and again.

use super::super::run::{MachineFolder, RunRecord, VmmEnding};
use super::super::{blocking, disk};
use super::handles::{self, Disks};
use super::state::FirmwareState;
use super::{PROCESS, assumed_ending, ending, grant_group, screen, tpm};
use crate::error::HostError;
use crate::guard::GuardPage;
use crate::guest_users;
use crate::hypervisor::qemu::{self, HostFiles};
use crate::hypervisor::qmp::{Event, Qmp};
use crate::processes::{self, Process};
use crate::scopes::{Scopes, is_there};
use crate::short_path::ShortPath;
use spillway_api::{DisplayKind, ErrorCode, Machine, ResetEvent, Tpm};
use spillway_control::kvm::Accelerator;
use std::future::pending;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest time until the monitor of a new QEMU accepts a connection.
const GREETING: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(5);
/// Pause between two connections to the monitor.
const PAUSE: Duration = Duration::from_secs(1);
/// How long an answer about the VMM's status is valid.
const TRUE_FOR: Duration = Duration::from_secs(20);

/// A machine's QEMU process.
pub struct Qemu {
    folder: MachineFolder,
    monitor: Option<Qmp>,
    /// When the monitor was last connected to.
    connected: Option<Instant>,
    /// Why the guest has ended, as reported. The record of the run may be behind.
    ending_seen: Option<VmmEnding>,
    /// When QEMU last answered a status query.
    answered: Option<Instant>,
}

impl Qemu {
    pub fn new(folder: MachineFolder) -> Qemu {
        Qemu { folder, monitor: None, connected: None, ending_seen: None, answered: None }
    }

    /// Starts QEMU on the machine's disk.
    pub async fn start(
        &mut self,
        machine: &Machine,
        run: &RunRecord,
        accelerator: &Accelerator,
        files: &HostFiles<'_>,
        (scopes, page): (&Scopes, Option<Arc<GuardPage>>),
    ) -> Result<(), HostError> {
        self.forget();
        let exits_at_reboot = run.spec.reset() == ResetEvent::GuestReboot;
        let device_group = match run.user {
            Some(_) => guest_users::device_group(accelerator)?,
            None => None,
        };
        let owned = |path: Option<&Path>| path.map(Path::to_owned);
        let disks = Disks {
            data: owned(files.data),
            scratch: owned(files.scratch),
            seed: owned(files.seed),
            variables: owned(files.uefi.map(|(_, variables)| variables)),
        };
        let (state, tpm_scopes) = (FirmwareState::of(&self.folder, run), scopes.clone());
        let (folder, spec, user) = (self.folder.clone(), run.spec.clone(), run.user);
        let handles = blocking(move || {
            if let Some(user) = user {
                // QEMU reaches the disk's socket through the folder.
                grant_group(folder.path(), user, 0o710)?;
                grant_group(&folder.path().join(disk::SOCKET), user, 0o660)?;
            }
            if spec.hardware.display == DisplayKind::Vnc {
                screen::prepare(folder.path(), user)?;
            }
            if spec.hardware.tpm == Tpm::V2 {
                tpm::start(folder.path(), &state, user.map(|user| (user, user)), &tpm_scopes)?;
            }
            handles::open(folder.path(), &spec, &disks)
        })
        .await?;
        let mut command =
            qemu::command(machine, &run.spec, accelerator, disk::SOCKET, files, &handles, exits_at_reboot);
        if run.held && run.spec.hardware.display == DisplayKind::None {
            command.arg("-S");
        }
        if let Some(user) = run.user.filter(|_| is_there(&command)) {
            command = guest_users::run_as(&command, user, device_group);
        }
        let folder = self.folder.clone();
        let command = scopes.place(folder.path(), PROCESS, command);
        blocking(move || {
            processes::start_until(folder.path(), PROCESS, command, &handles.all(), page).map(drop)
        })
        .await
    }

    /// Subscribes to QEMU's events, and polls it if there was no subscription or the last answer is old. Records why the
    /// guest has ended.
    pub async fn attach(&mut self, process: &Process, run: &mut RunRecord) -> Result<(), HostError> {
        let is_true = self.answered.is_some_and(|answered| answered.elapsed() < TRUE_FOR);
        if self.monitor.is_none() || !is_true {
            self.look(process, run).await?;
        }
        self.record(run).await
    }

    /// Queries QEMU's status.
    async fn look(&mut self, process: &Process, run: &RunRecord) -> Result<(), HostError> {
        let monitor = match self.monitor.take() {
            Some(monitor) => Some(monitor),
            None => self.reach(process).await?,
        };
        // The process has ended, which the next step examines.
        let Some(mut monitor) = monitor else { return Ok(()) };
        let strange = |e| HostError::new(ErrorCode::Unavailable, format!("its VMM: {e}"));
        let status = match monitor.execute("query-status").await {
            Err(_) if process.ends_within(Duration::ZERO) => return Ok(()),
            status => status.map_err(strange)?,
        };
        if status["status"] == "prelaunch" {
            let folder = self.folder.clone();
            blocking(move || screen::seal(folder.path())).await?;
            // A guest that is held for its disk begins when that goes on.
            if !run.held {
                monitor.execute("cont").await.map_err(strange)?;
            }
        }
        if status["status"] == "shutdown" && self.ending_seen.is_none() {
            // The reason may be among the events that nobody has read.
            self.ending_seen =
                monitor.pending_events().find_map(reason).or_else(|| Some(assumed_ending(run)));
        }
        (self.monitor, self.answered) = (Some(monitor), Some(Instant::now()));
        Ok(())
    }

    /// Stops the guest's processors, or lets them go on. False: it cannot be told now.
    pub async fn hold(&mut self, must_wait: bool) -> Result<bool, HostError> {
        let Some(monitor) = &mut self.monitor else { return Ok(false) };
        let command = if must_wait { "stop" } else { "cont" };
        match monitor.execute(command).await {
            Ok(_) => Ok(true),
            Err(e) => {
                self.monitor = None;
                Err(HostError::new(ErrorCode::Unavailable, format!("its VMM: {e}")))
            }
        }
    }

    /// Records why the guest has ended, if that is known and not recorded.
    async fn record(&self, run: &mut RunRecord) -> Result<(), HostError> {
        if let (None, Some(ending_seen)) = (run.ending, self.ending_seen) {
            let mut ended = run.clone();
            ended.ending = Some(ending_seen);
            self.folder.save_in_background(&ended).await?;
            *run = ended;
        }
        Ok(())
    }

    /// Notes an event.
    pub fn note_event(&mut self, event: &Event) {
        // The first reason counts: another comes when the VMM is ended.
        self.ending_seen = self.ending_seen.or_else(|| reason(event));
    }

    /// Why the guest has ended, if it has and the run was not forgotten since.
    pub fn ending_seen(&self) -> Option<VmmEnding> {
        self.ending_seen
    }

    /// Forgets the ending, which belongs to an earlier VMM.
    pub fn forget(&mut self) {
        self.disconnect();
        self.ending_seen = None;
    }

    /// Whether a program in the guest has opened the agent's port. If that cannot be found out, one may have.
    pub async fn has_agent(&mut self) -> bool {
        let Some(monitor) = &mut self.monitor else { return true };
        let Ok(devices) = monitor.execute("query-chardev").await else { return true };
        let devices = devices.as_array().map_or(&[][..], Vec::as_slice);
        let agent = devices.iter().find(|device| device["label"] == "agent");
        agent.is_none_or(|agent| agent["frontend-open"] != false)
    }

    /// Presses the power button. Returns whether QEMU has confirmed it.
    pub async fn power_down(&mut self) -> bool {
        let Some(monitor) = &mut self.monitor else { return false };
        monitor.execute("system_powerdown").await.is_ok()
    }

    /// Tells QEMU to end.
    pub async fn quit(&mut self) {
        if let Some(monitor) = &mut self.monitor {
            let _ = monitor.execute("quit").await;
        }
    }

    /// Closes the connection to the monitor.
    pub fn disconnect(&mut self) {
        (self.monitor, self.connected, self.answered) = (None, None, None);
    }

    /// Waits for the next event; never returns without a subscription. Cancel safe.
    pub async fn event(&mut self) -> Option<Event> {
        let Some(monitor) = &mut self.monitor else { return pending().await };
        let said = monitor.event().await.ok();
        if said.is_none() {
            self.monitor = None;
        }
        said
    }

    /// Connects to the monitor as soon as it listens. `None`: the process has ended.
    async fn reach(&mut self, process: &Process) -> Result<Option<Qmp>, HostError> {
        // A monitor that accepts and closes at once would otherwise be retried without a pause.
        if let Some(last) = self.connected {
            tokio::time::sleep_until((last + PAUSE).into()).await;
        }
        let until = Instant::now() + GREETING;
        loop {
            match self.connect().await {
                Ok(monitor) => {
                    self.connected = Some(Instant::now());
                    return Ok(Some(monitor));
                }
                Err(_) if process.ends_within(Duration::ZERO) => return Ok(None),
                Err(_) if Instant::now() < until => tokio::time::sleep(LOOK).await,
                Err(e) => {
                    let message = format!("its VMM does not answer on {}: {e}", qemu::MONITOR);
                    return Err(HostError::new(ErrorCode::Unavailable, message));
                }
            }
        }
    }

    async fn connect(&self) -> io::Result<Qmp> {
        let socket = ShortPath::of(self.folder.path(), qemu::MONITOR).map_err(io::Error::other)?;
        Qmp::connect(socket.path()).await
    }
}

/// Returns why the guest has ended, if this event tells that.
fn reason(event: &Event) -> Option<VmmEnding> {
    match event.name.as_str() {
        "SHUTDOWN" => event.data["reason"].as_str().and_then(ending),
        // QEMU ends at once, as if its guest had shut down.
        "WATCHDOG" if event.data["action"] == "poweroff" => Some(VmmEnding::GuestShutdown),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::fs;
    use std::sync::Mutex;
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
    use tokio::net::UnixListener;
    use tokio::sync::watch;

    /// Of a monitor that closes once it has said how its VMM is.
    const CLOSES: &str = "closes";
    /// Of a monitor that refuses all commands but questions.
    const REFUSES: &str = "refuses";

    /// A machine's folder, with a process that stands for its QEMU and a monitor that answers with the status that is told.
    struct World {
        _dir: tempfile::TempDir,
        folder: MachineFolder,
        process: Process,
        status: watch::Sender<&'static str>,
        /// What the monitor was asked, without its handshake.
        asked: Arc<Mutex<Vec<String>>>,
        run: RunRecord,
    }

    impl World {
        fn new(reset: &str) -> World {
            let dir = tempfile::tempdir().unwrap();
            let folder = MachineFolder::of(dir.path(), &"desk-001".parse().unwrap());
            folder.make().unwrap();
            let mut sleep = std::process::Command::new("sleep");
            sleep.arg("1000");
            let process = processes::start(folder.path(), PROCESS, sleep).unwrap();
            let listener = UnixListener::bind(folder.path().join(qemu::MONITOR)).unwrap();
            let (status, now) = watch::channel("running");
            let asked = Arc::<Mutex<Vec<String>>>::default();
            let commands = Arc::clone(&asked);
            tokio::spawn(async move {
                loop {
                    let (mut stream, _) = listener.accept().await.unwrap();
                    let (input, mut output) = stream.split();
                    output.write_all(b"{\"QMP\":{}}\n").await.unwrap();
                    let mut lines = BufReader::new(input).lines();
                    let mut asked = 0;
                    while let Ok(Some(line)) = lines.next_line().await {
                        let command: Value = serde_json::from_str(&line).unwrap();
                        let command = command["execute"].as_str().unwrap().to_owned();
                        let is_question = command.starts_with("q");
                        if command != "qmp_capabilities" {
                            commands.lock().unwrap().push(command);
                        }
                        let status = *now.borrow();
                        let answer = match status == REFUSES && !is_question {
                            true => json!({ "error": { "desc": "not now" } }),
                            false => json!({ "return": { "status": status } }),
                        };
                        output.write_all(format!("{answer}\n").as_bytes()).await.unwrap();
                        asked += 1;
                        if status == CLOSES && asked == 2 {
                            break;
                        }
                    }
                }
            });
            let spec = json!({ "image": "debian", "reset": reset });
            let run = serde_json::from_value(json!({
                "uuid": "u", "boot": "b", "image": "debian", "version": 1, "spec": spec, "hypervisor": "qemu",
                "restarts": 0, "resets": 0, "queues": 1, "asked": false, "ready": true,
            }));
            World { _dir: dir, folder, process, status, asked, run: run.unwrap() }
        }

        /// Whether anything can be recorded.
        fn can_record(&self, can: bool) {
            let new = self.folder.path().join("run.json.new");
            if can { fs::remove_dir(new).unwrap() } else { fs::create_dir(new).unwrap() }
        }

        fn recorded(&self) -> Value {
            serde_json::from_slice::<Value>(&fs::read(self.folder.path().join("run.json")).unwrap()).unwrap()
                ["ending"]
                .clone()
        }
    }

    impl Drop for World {
        fn drop(&mut self) {
            let _ = self.process.end(Duration::ZERO);
        }
    }

    #[tokio::test]
    async fn an_end_that_cannot_be_recorded_is_recorded_when_it_can_be() {
        let shutdown = |reason: &str| Event { name: "SHUTDOWN".into(), data: json!({ "reason": reason }) };
        for (reason, ending) in [("guest-shutdown", "guest-shutdown"), ("guest-reset", "guest-reboot")] {
            let mut world = World::new("guest-reboot");
            let mut qemu = Qemu::new(world.folder.clone());
            qemu.attach(&world.process, &mut world.run).await.unwrap();
            world.can_record(false);
            qemu.note_event(&shutdown(reason));
            // Another comes when it is told to end; it is not the guest's.
            qemu.note_event(&shutdown("host-qmp-quit"));
            for _ in 0..2 {
                let error = qemu.attach(&world.process, &mut world.run).await.unwrap_err();
                assert!(error.message.contains("cannot be written"), "{error}");
                assert_eq!(world.run.ending, None, "nobody may act on what is not recorded");
            }
            // Whatever becomes of the connection.
            qemu.disconnect();
            world.can_record(true);
            qemu.attach(&world.process, &mut world.run).await.unwrap();
            assert!(world.run.ending.is_some());
            assert_eq!(world.recorded(), ending);
            qemu.forget();
            assert_eq!(qemu.ending_seen(), None);
        }
    }

    #[tokio::test]
    async fn a_monitor_that_closes_at_once_is_not_connected_to_without_a_pause() {
        let mut world = World::new("power-cycle");
        world.status.send_replace(CLOSES);
        let mut qemu = Qemu::new(world.folder.clone());
        qemu.attach(&world.process, &mut world.run).await.unwrap();
        assert_eq!(qemu.event().await, None, "it has closed");
        let soon = Duration::from_millis(50);
        let again = tokio::time::timeout(soon, qemu.attach(&world.process, &mut world.run)).await;
        assert!(again.is_err(), "it waits before it connects again");
        qemu.connected = Instant::now().checked_sub(PAUSE);
        qemu.attach(&world.process, &mut world.run).await.unwrap();
    }

    #[tokio::test]
    async fn a_guest_begins_once_its_screen_is_there_unless_it_is_held() {
        for (held, asked) in [(false, &["query-status", "cont"][..]), (true, &["query-status"])] {
            let mut world = World::new("power-cycle");
            world.status.send_replace("prelaunch");
            world.run.held = held;
            let mut qemu = Qemu::new(world.folder.clone());
            qemu.attach(&world.process, &mut world.run).await.unwrap();
            assert_eq!(*world.asked.lock().unwrap(), asked);
            // It begins with what lets it go on.
            assert!(qemu.hold(false).await.unwrap());
            assert_eq!(world.asked.lock().unwrap().last().unwrap(), "cont");
        }
    }

    #[tokio::test]
    async fn an_end_of_which_no_event_came_is_seen_by_asking() {
        for (reset, ending) in [("power-cycle", "guest-shutdown"), ("guest-reboot", "guest-reboot")] {
            let mut world = World::new(reset);
            let mut qemu = Qemu::new(world.folder.clone());
            qemu.attach(&world.process, &mut world.run).await.unwrap();
            world.status.send_replace("shutdown");
            qemu.attach(&world.process, &mut world.run).await.unwrap();
            assert_eq!(world.run.ending, None, "it has said a moment ago that it runs");
            qemu.answered = Instant::now().checked_sub(TRUE_FOR);
            qemu.attach(&world.process, &mut world.run).await.unwrap();
            assert_eq!(world.recorded(), ending);
        }
    }

    #[tokio::test]
    async fn the_button_is_pressed_at_once_without_an_agent_and_later_with_one() {
        use super::super::Vmm;
        use crate::hypervisor::libvirt::Libvirt;
        for has_agent in [false, true] {
            let mut world = World::new("power-cycle");
            if has_agent {
                let listener = UnixListener::bind(world.folder.path().join(qemu::AGENT)).unwrap();
                tokio::spawn(async move {
                    let (mut stream, _) = listener.accept().await.unwrap();
                    let (input, mut output) = stream.split();
                    let (mut lines, mut sync) = (BufReader::new(input), Vec::new());
                    lines.read_until(b'\n', &mut sync).await.unwrap();
                    let sync: Value = serde_json::from_slice(sync.strip_prefix(b"\xff").unwrap()).unwrap();
                    let answer = json!({ "return": sync["arguments"]["id"] });
                    output.write_all(b"\xff").await.unwrap();
                    output.write_all(format!("{answer}\n").as_bytes()).await.unwrap();
                    pending::<()>().await;
                });
            }
            let mut vmm = Vmm::new(
                world.folder.clone(),
                Arc::new(Libvirt::new("qemu:///system".into(), "/nonexistent".into())),
            );
            vmm.look(&world.run).await.unwrap();
            let presses =
                || world.asked.lock().unwrap().iter().filter(|asked| *asked == "system_powerdown").count();
            let grace = Duration::from_secs(8);
            let begun = Instant::now();
            let mut is_pressed_after = None;
            while is_pressed_after.is_none() && begun.elapsed() < grace {
                let until = vmm.shut_down(&world.process, &mut world.run, grace).await.unwrap().unwrap();
                is_pressed_after = (presses() > 0).then(|| begun.elapsed());
                if is_pressed_after.is_none() {
                    tokio::time::sleep_until(until.into()).await;
                }
            }
            let after = is_pressed_after.expect("it is pressed");
            // The agent has taken the request within a second, and the guest has half of its time then.
            assert_eq!(after >= grace / 2 - Duration::from_millis(100), has_agent, "{after:?}");
            vmm.shut_down(&world.process, &mut world.run, grace).await.unwrap();
            assert_eq!(presses(), 1, "once");
        }
    }

    #[tokio::test]
    async fn a_button_that_could_not_be_pressed_is_pressed_again() {
        use super::super::Vmm;
        use crate::hypervisor::libvirt::Libvirt;
        let mut world = World::new("power-cycle");
        let mut vmm = Vmm::new(
            world.folder.clone(),
            Arc::new(Libvirt::new("qemu:///system".into(), "/nonexistent".into())),
        );
        vmm.look(&world.run).await.unwrap();
        let grace = Duration::from_secs(100);
        vmm.attach(&world.process, &mut world.run).await.unwrap();
        for (status, most) in [(REFUSES, Duration::from_secs(2)), ("running", grace)] {
            world.status.send_replace(status);
            let until = vmm.shut_down(&world.process, &mut world.run, grace).await.unwrap().unwrap();
            let left = until.saturating_duration_since(Instant::now());
            assert!(left <= most && (status == REFUSES || left > Duration::from_secs(2)), "{left:?}");
            tokio::time::sleep(left.min(Duration::from_secs(1))).await;
        }
        vmm.shut_down(&world.process, &mut world.run, grace).await.unwrap();
        let asked = world.asked.lock().unwrap();
        assert_eq!(asked.iter().filter(|asked| *asked == "system_powerdown").count(), 2, "{asked:?}");
    }

    #[tokio::test]
    async fn a_guest_is_asked_to_end_whether_that_can_be_recorded_or_not() {
        use super::super::Vmm;
        use crate::hypervisor::libvirt::Libvirt;
        let mut world = World::new("power-cycle");
        let libvirt = Arc::new(Libvirt::new("qemu:///system".into(), "/nonexistent".into()));
        let mut vmm = Vmm::new(world.folder.clone(), libvirt);
        vmm.look(&world.run).await.unwrap();
        world.can_record(false);
        let grace = Duration::from_secs(100);
        assert!(vmm.shut_down(&world.process, &mut world.run, grace).await.unwrap().is_some());
        // It heeds that, and is not waited for any longer.
        vmm.note_event(&Event { name: "SHUTDOWN".into(), data: json!({ "reason": "guest-shutdown" }) });
        world.run.asked = false;
        assert!(vmm.shut_down(&world.process, &mut world.run, grace).await.unwrap().is_none());
    }
}
