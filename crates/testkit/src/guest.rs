//! Real guests: what `scripts/guest-image` has built, booted by QEMU on a disk.
//!
//! Owns QEMU's command line and the guest's two serial ports: the console, and the port on which its work reports
//! line by line. Invariant: a [`Guest`] that is dropped has ended.

use crate::cpio::{Entry, archive};
use crate::process::{Server, wait_until};
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::{Duration, Instant};

/// The folder with the guests that `make image` builds.
#[derive(Clone, Debug)]
pub struct Kit {
    dir: PathBuf,
}

impl Kit {
    /// The kit of this checkout, or of `SPILLWAY_GUEST`; `None` when it has not been built.
    pub fn find() -> Option<Kit> {
        let dir = std::env::var_os("SPILLWAY_GUEST").map_or_else(
            || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache/guest/current"),
            PathBuf::from,
        );
        let kit = Kit { dir: dir.canonicalize().ok()? };
        [kit.golden(), kit.kernel(), kit.initrd()].iter().all(|f| f.is_file()).then_some(kit)
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// A Debian 12 with systemd: ext4 without a partition table, 2 GiB. Only to be read.
    pub fn golden(&self) -> PathBuf {
        self.dir.join("golden.raw")
    }

    /// The image with cloud-init, if the kit has one.
    pub fn cloud(&self) -> Option<PathBuf> {
        Some(self.dir.join("cloud.raw")).filter(|path| path.is_file())
    }

    /// The kernel's file.
    pub fn kernel(&self) -> PathBuf {
        self.dir.join("vmlinuz")
    }

    /// A file of those that start a guest by UEFI with Secure Boot: `shimx64.efi`, `grubx64.efi` or `vmlinuz`.
    pub fn uefi(&self, name: &str) -> PathBuf {
        self.dir.join("uefi").join(name)
    }

    /// The busybox initrd: alone a guest of its own, else the way into the golden image.
    pub fn initrd(&self) -> PathBuf {
        self.dir.join("initrd.cpio")
    }
}

/// Files of a payload that make a booted system start this unit once it is up (systemd.unit(5)).
pub fn service(name: &str, unit: &str) -> Vec<Entry> {
    let wants = "payload/systemd/multi-user.target.wants";
    vec![
        Entry::directory("payload/systemd"),
        Entry::file(&format!("payload/systemd/{name}.service"), 0o644, unit),
        Entry::directory(wants),
        Entry::link(&format!("{wants}/{name}.service"), &format!("../{name}.service")),
    ]
}

/// The disk of a guest.
#[derive(Clone, Debug)]
pub enum GuestDisk {
    /// Served on a vhost-user-blk socket.
    VhostUser(PathBuf),
    /// A raw file that the guest may write.
    Raw(PathBuf),
    /// Served on an NBD socket, by QEMU's own NBD client.
    Nbd(PathBuf),
    /// A raw file that is only read: what the guest writes goes to a file of QEMU's, and with it.
    Snapshot(PathBuf),
}

/// Settings of a guest: what it boots, and its disks.
#[derive(Clone, Debug)]
pub struct GuestSpec {
    /// Existing directory for the console's output and the guest's report.
    pub dir: PathBuf,
    /// Disks of the guest: /dev/vda, /dev/vdb...
    pub disks: Vec<GuestDisk>,
    /// Boot the system on /dev/vda instead of running `/payload/run` in the initrd.
    pub system: bool,
    /// Files under /payload (/run/payload in a system). The directory itself is there.
    pub payload: Vec<Entry>,
    /// Memory.
    pub memory_mib: u32,
    /// Number of processors.
    pub vcpus: u32,
    /// In hardware or in software.
    pub accelerator: Accelerator,
    /// Whether a reboot in the guest restarts the machine. Otherwise it ends the machine.
    pub reboots: bool,
}

/// How the guest's instructions are executed: by KVM or by emulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accelerator {
    /// In hardware.
    Kvm,
    /// In software.
    Tcg,
}

impl Accelerator {
    /// KVM if a guest really comes up with it; there are machines on which `/dev/kvm` opens and guests hang.
    pub fn probe(kit: &Kit) -> Result<Accelerator> {
        if std::fs::File::options().read(true).write(true).open("/dev/kvm").is_err() {
            return Ok(Accelerator::Tcg);
        }
        let dir = tempfile::tempdir()?;
        let mut guest = Guest::start(
            kit,
            &GuestSpec {
                dir: dir.path().into(),
                disks: vec![],
                system: false,
                payload: vec![Entry::file(
                    "payload/run",
                    0o755,
                    "#!/bin/busybox sh\necho probed >/dev/ttyS1\n",
                )],
                memory_mib: 256,
                vcpus: 1,
                accelerator: Accelerator::Kvm,
                reboots: false,
            },
        )?;
        let up = wait_until(Duration::from_secs(6), || match guest.ended() {
            Ok(None) => guest.reports().iter().any(|l| l == "probed").then_some(true),
            _ => Some(guest.reports().iter().any(|l| l == "probed")),
        });
        guest.kill();
        Ok(if up == Some(true) { Accelerator::Kvm } else { Accelerator::Tcg })
    }

    /// The name of the accelerator in reports.
    pub fn name(self) -> &'static str {
        match self {
            Accelerator::Kvm => "KVM",
            Accelerator::Tcg => "TCG",
        }
    }
}

/// A running machine.
pub struct Guest {
    qemu: Server,
    console: PathBuf,
    report: PathBuf,
    started: Instant,
}

impl Guest {
    /// Starts QEMU.
    pub fn start(kit: &Kit, spec: &GuestSpec) -> Result<Guest> {
        Guest::start_with(kit, spec, &[])
    }

    /// Starts QEMU with further arguments.
    pub fn start_with(kit: &Kit, spec: &GuestSpec, further: &[&str]) -> Result<Guest> {
        let initrd = spec.dir.join("initrd.cpio");
        let mut bytes = std::fs::read(kit.initrd()).context("the guest's initrd cannot be read")?;
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        let payload: Vec<Entry> =
            std::iter::once(Entry::directory("payload")).chain(spec.payload.iter().cloned()).collect();
        bytes.extend(archive(&payload)?);
        std::fs::write(&initrd, bytes).with_context(|| format!("{}: cannot write", initrd.display()))?;
        let (console, report) = (spec.dir.join("console.log"), spec.dir.join("report.log"));
        // QEMU makes them when it opens them; until then nothing must be read that an earlier guest wrote.
        std::fs::write(&console, "")?;
        std::fs::write(&report, "")?;
        let mut arguments = arguments(kit, spec, &initrd, &console, &report);
        arguments.extend(further.iter().map(|argument| argument.to_string()));
        let started = Instant::now();
        let qemu = Server::start("QEMU", "qemu-system-x86_64", &arguments, None, &spec.dir.join("qemu.log"))?;
        Ok(Guest { qemu, console, report, started })
    }

    /// QEMU's process id.
    pub fn pid(&self) -> u32 {
        self.qemu.pid()
    }

    /// QEMU's command line.
    pub fn command(&self) -> &str {
        &self.qemu.command
    }

    /// When it was started.
    pub fn started(&self) -> Instant {
        self.started
    }

    /// Whether it has ended.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.qemu.ended()
    }

    /// The whole lines that its work has reported until now, on the second serial port.
    pub fn reports(&self) -> Vec<String> {
        whole_lines(&self.report)
    }

    /// The whole lines on its console until now.
    pub fn console(&self) -> Vec<String> {
        whole_lines(&self.console)
    }

    /// Text to show when a guest has failed.
    pub fn tail(&self) -> String {
        let lines = self.console();
        format!(
            "{}\n{}\n{}",
            self.command(),
            lines[lines.len().saturating_sub(20)..].join("\n"),
            self.qemu.tail()
        )
    }

    /// Waits for the guest to power itself off.
    pub fn wait(&mut self, deadline: Duration) -> Result<()> {
        match wait_until(deadline, || self.ended().transpose()) {
            Some(status) if status.as_ref().is_ok_and(ExitStatus::success) => Ok(()),
            Some(status) => bail!("QEMU ended with {}\n{}", status?, self.tail()),
            None => bail!("the guest did not end within {deadline:?}\n{}", self.tail()),
        }
    }

    /// Waits for a report that begins with these characters.
    pub fn wait_report(&mut self, beginning: &str, deadline: Duration) -> Result<String> {
        let found = wait_until(deadline, || {
            // Whether it ended is asked first: what it reported before its end is then all there.
            let ended = self.ended();
            let line = self.reports().into_iter().find(|l| l.starts_with(beginning));
            match (line, ended) {
                (Some(line), _) => Some(Ok(line)),
                (None, Ok(None)) => None,
                (None, Ok(Some(status))) => Some(Err(anyhow::anyhow!("QEMU ended with {status}"))),
                (None, Err(e)) => Some(Err(e)),
            }
        });
        match found {
            Some(line) => line.with_context(|| format!("no report '{beginning}'\n{}", self.tail())),
            None => bail!("no report '{beginning}' within {deadline:?}\n{}", self.tail()),
        }
    }

    /// Pulls the plug, and does not wait until it is out.
    pub fn kill_soon(&mut self) {
        self.qemu.kill_soon();
    }

    /// Kills the machine and waits, as a power failure would end it.
    pub fn kill(&mut self) {
        self.qemu.kill();
    }
}

fn whole_lines(path: &Path) -> Vec<String> {
    let bytes = std::fs::read(path).unwrap_or_default();
    let whole = bytes.iter().rposition(|&b| b == b'\n').map_or(0, |at| at + 1);
    String::from_utf8_lossy(&bytes[..whole]).lines().map(|l| l.trim_end_matches('\r').to_string()).collect()
}

fn arguments(kit: &Kit, spec: &GuestSpec, initrd: &Path, console: &Path, report: &Path) -> Vec<String> {
    // A comma in a QEMU option's value is doubled.
    let text = |p: &Path| p.display().to_string().replace(',', ",,");
    let (accel, cpu) = match spec.accelerator {
        Accelerator::Kvm => ("kvm", "host"),
        Accelerator::Tcg => ("tcg,thread=multi", "qemu64"),
    };
    // Errors of the kernel (level 3) go to the console, what is less does not.
    let mut append = String::from("console=ttyS0 quiet loglevel=4 no_timer_check panic=1");
    if spec.accelerator == Accelerator::Tcg {
        // A tenth of the time until its first process.
        append.push_str(" cryptomgr.notests nokaslr");
    }
    if spec.system {
        append.push_str(" spillway.root=/dev/vda systemd.show_status=0");
    }
    let memory = spec.memory_mib;
    let mut all: Vec<String> = Vec::new();
    let mut add = |option: &str, value: String| all.extend([option.to_string(), value]);
    add("-accel", accel.into());
    add("-cpu", cpu.into());
    add("-machine", "q35,memory-backend=memory".into());
    add("-object", format!("memory-backend-memfd,id=memory,size={memory}M,share=on"));
    add("-m", format!("{memory}M"));
    add("-smp", spec.vcpus.to_string());
    add("-kernel", kit.kernel().display().to_string());
    add("-initrd", initrd.display().to_string());
    add("-append", append);
    add("-serial", format!("file:{}", text(console)));
    add("-serial", format!("file:{}", text(report)));
    for (i, disk) in spec.disks.iter().enumerate() {
        match disk {
            GuestDisk::VhostUser(socket) => {
                add("-chardev", format!("socket,id=disk{i},reconnect=1,path={}", text(socket)));
                add("-device", format!("vhost-user-blk-pci,chardev=disk{i},num-queues={}", spec.vcpus));
            }
            GuestDisk::Raw(path) => {
                add("-drive", format!("if=none,id=disk{i},format=raw,discard=unmap,file={}", text(path)));
                add("-device", format!("virtio-blk-pci,drive=disk{i}"));
            }
            GuestDisk::Snapshot(path) => {
                let file = text(path);
                add("-drive", format!("if=none,id=disk{i},format=raw,snapshot=on,file={file}"));
                add("-device", format!("virtio-blk-pci,drive=disk{i}"));
            }
            GuestDisk::Nbd(socket) => {
                let path = text(socket);
                add(
                    "-blockdev",
                    format!("driver=nbd,node-name=disk{i},server.type=unix,server.path={path},discard=unmap"),
                );
                add("-device", format!("virtio-blk-pci,drive=disk{i}"));
            }
        }
    }
    add("-display", "none".into());
    all.extend(["-nodefaults", "-no-user-config"].map(String::from));
    if !spec.reboots {
        all.push("-no-reboot".into());
    }
    all
}
