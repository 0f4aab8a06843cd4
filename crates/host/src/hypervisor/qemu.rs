//! QEMU's command line for a machine. Owns the names of its sockets, which are in the machine's folder; starts nothing
//! and opens nothing.
//!
//! Invariant: a name or path never becomes another option. QEMU opens only its own files (firmware) and connects to its
//! disk's socket; it inherits all other descriptors.

use spillway_api::{CatalogSpec, DisplayKind, Machine, Network};
use spillway_control::kvm::Accelerator;
use std::ffi::OsString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::Command;

/// The program.
pub const PROGRAM: &str = "qemu-system-x86_64";
/// Socket of the monitor.
pub const MONITOR: &str = "qmp.sock";
/// Socket of the console hub, for clients of the guest's first serial port.
pub const CONSOLE: &str = "console.sock";
/// Socket of the console hub, for the VMM.
pub const SERIAL: &str = "serial.sock";
/// Folder of the screen's socket, in which the VMM may write until its guest runs.
pub const SCREEN_FOLDER: &str = "vnc";
/// Socket of the screen, in that folder.
pub const SCREEN: &str = "sock";
/// Socket of the guest agent's port.
pub const AGENT: &str = "agent.sock";

/// Files of the host for a machine, besides its disk.
#[derive(Clone, Debug, Default)]
pub struct HostFiles<'a> {
    /// The cloud-init disk.
    pub seed: Option<&'a Path>,
    /// The data disk.
    pub data: Option<&'a Path>,
    /// The scratch disk.
    pub scratch: Option<&'a Path>,
    /// Port of the host's loopback, and the guest's port that it is forwarded to.
    pub forward: Option<(u16, u16)>,
    /// Number of queues that the disk's server offers.
    pub most_queues: Option<u32>,
}

impl HostFiles<'_> {
    /// Number of queues of the disk: one for each processor, up to the server's.
    pub fn queues(&self, spec: &CatalogSpec) -> u32 {
        self.most_queues.map_or(spec.vcpus, |most| most.min(spec.vcpus))
    }
}

/// Descriptors that QEMU inherits: it may run as a user who could open none of them.
pub struct Handles {
    /// Listening socket of the monitor.
    pub monitor: OwnedFd,
    /// Connection of the first serial port to the console hub. A disk that an earlier version of the daemon has started has
    /// no hub.
    pub console: Option<OwnedFd>,
    /// Listening socket of the guest agent's port.
    pub agent: OwnedFd,
    /// The data disk, opened for reading and writing.
    pub data: Option<OwnedFd>,
    /// The scratch disk, opened for reading and writing.
    pub scratch: Option<OwnedFd>,
    /// The cloud-init disk, opened for reading.
    pub seed: Option<OwnedFd>,
    /// The kernel, which everybody may read.
    pub kernel: Option<OwnedFd>,
    /// The initrd, which everybody may read.
    pub initrd: Option<OwnedFd>,
    /// A tap in the machine's bridge.
    pub tap: Option<OwnedFd>,
}

impl Handles {
    /// All descriptors.
    pub fn all(&self) -> Vec<BorrowedFd<'_>> {
        let Handles { monitor, console, agent, data, scratch, seed, kernel, initrd, tap } = self;
        let some = [console, data, scratch, seed, kernel, initrd, tap].into_iter().flatten();
        [monitor, agent].into_iter().chain(some).map(AsFd::as_fd).collect()
    }
}

/// Builds the command that starts a machine in its folder, whose disk is served on `disk_socket` there.
pub fn command(
    machine: &Machine,
    spec: &CatalogSpec,
    accelerator: &Accelerator,
    disk_socket: &str,
    files: &HostFiles,
    handles: &Handles,
    exits_at_reboot: bool,
) -> Command {
    let mut line = CommandLine { command: Command::new(PROGRAM), machine, spec, accelerator, files, handles };
    line.guest(exits_at_reboot);
    line.consoles();
    line.disks(disk_socket);
    line.network();
    line.agent();
    line.boot();
    line.screen();
    line.command
}

/// A command line under construction. The guest finds devices in the order of the options.
struct CommandLine<'a> {
    command: Command,
    machine: &'a Machine,
    spec: &'a CatalogSpec,
    accelerator: &'a Accelerator,
    files: &'a HostFiles<'a>,
    handles: &'a Handles,
}

impl CommandLine<'_> {
    fn add(&mut self, name: &str, value: impl Into<OsString>) {
        self.command.arg(name).arg(value.into());
    }

    /// Adds identity, processors, memory, and what ends QEMU.
    fn guest(&mut self, exits_at_reboot: bool) {
        let (accel, cpu) = match self.accelerator {
            Accelerator::Kvm => ("kvm", "host"),
            Accelerator::Tcg(_) => ("tcg", "max"),
        };
        let uuid = &self.machine.identity.uuid;
        let mib = self.spec.memory_bytes >> 20;
        self.add("-name", self.machine.name.as_str());
        self.add("-uuid", uuid);
        self.add("-smbios", format!("type=1,manufacturer=Spillway,serial={uuid}"));
        let graphics = match self.spec.display {
            DisplayKind::None => "off",
            DisplayKind::Vnc => "on",
        };
        self.add("-machine", format!("q35,memory-backend=memory,graphics={graphics},usb=off"));
        self.add("-accel", accel);
        self.add("-cpu", cpu);
        self.add("-smp", self.spec.vcpus.to_string());
        self.add("-m", format!("{mib}M"));
        self.add("-object", format!("memory-backend-memfd,id=memory,size={mib}M,share=on"));
        self.add("-display", "none");
        // A guest that shuts down is held until its reason was queried.
        let at_reboot = if exits_at_reboot { "shutdown" } else { "reset" };
        self.add("-action", format!("reboot={at_reboot},shutdown=pause"));
    }

    /// Adds the monitor and the first serial port.
    fn consoles(&mut self) {
        self.add("-chardev", listener("monitor", &self.handles.monitor));
        self.add("-mon", "chardev=monitor,mode=control");
        self.add(
            "-chardev",
            match &self.handles.console {
                Some(connection) => format!("socket,id=console,fd={}", connection.as_raw_fd()),
                None => "null,id=console".into(),
            },
        );
        self.add("-serial", "chardev:console");
    }

    /// Adds the machine's disk and the disks that are files of the host.
    fn disks(&mut self, disk_socket: &str) {
        self.add("-chardev", format!("socket,id=disk,path={disk_socket},reconnect=1"));
        // A kernel given by the host takes the first place in the boot order.
        let boot = if self.spec.kernel.is_some() { "" } else { ",bootindex=0" };
        let queues = self.files.queues(self.spec);
        self.add("-device", format!("vhost-user-blk-pci,chardev=disk,num-queues={queues}{boot}"));
        let drives = [
            ("data", &self.handles.data, "discard=unmap"),
            ("scratch", &self.handles.scratch, "discard=unmap"),
            ("seed", &self.handles.seed, "readonly=on"),
        ];
        for (set, (id, file, more)) in (1..).zip(drives) {
            if let Some(file) = file {
                self.add("-add-fd", format!("fd={},set={set}", file.as_raw_fd()));
                // Report errors to the guest: a guest that is paused for a full disk would wait until somebody notices.
                let errors = "werror=report,rerror=report";
                // The file is opened once, in the mode in which it is used.
                let file = format!("file=/dev/fdset/{set},auto-read-only=off");
                self.add("-drive", format!("if=none,id={id},format=raw,{errors},{file},{more}"));
                self.add("-device", format!("virtio-blk-pci,drive={id},serial={id}"));
            }
        }
    }

    fn network(&mut self) {
        let mac = &self.machine.identity.mac;
        let network = match (&self.spec.network, &self.handles.tap) {
            (Network::User, _) => {
                let forward = self
                    .files
                    .forward
                    .map_or(String::new(), |(here, there)| format!(",hostfwd=tcp:127.0.0.1:{here}-:{there}"));
                Some(format!("user,id=network{forward}"))
            }
            (Network::Bridge(_), Some(tap)) => Some(format!("tap,id=network,fd={}", tap.as_raw_fd())),
            (Network::None, _) | (Network::Bridge(_), None) => None,
        };
        if let Some(network) = network {
            self.add("-netdev", network);
            self.add("-device", format!("virtio-net-pci,netdev=network,mac={mac},romfile="));
        }
    }

    /// Adds the source of entropy and the guest agent's port.
    fn agent(&mut self) {
        self.add("-device", "virtio-rng-pci");
        self.add("-device", "virtio-serial-pci");
        self.add("-chardev", listener("agent", &self.handles.agent));
        self.add("-device", "virtserialport,chardev=agent,name=org.qemu.guest_agent.0");
    }

    /// Adds a kernel given by the host, and restricts QEMU itself.
    fn boot(&mut self) {
        for (name, file) in [("-kernel", &self.handles.kernel), ("-initrd", &self.handles.initrd)] {
            if let Some(file) = file {
                // The path does not depend on the folder of the file.
                self.add(name, format!("/proc/self/fd/{}", file.as_raw_fd()));
            }
        }
        if self.spec.kernel.is_some() {
            self.add("-append", append(self.spec, self.accelerator));
        }
        self.add("-sandbox", "on,obsolete=deny,resourcecontrol=deny,elevateprivileges=deny,spawn=deny");
        self.command.args(["-nodefaults", "-no-user-config"]);
    }

    /// Adds a screen, the last device: without it the guest finds the others where they were.
    fn screen(&mut self) {
        if self.spec.display == DisplayKind::Vnc {
            self.add("-device", "VGA");
            // A pointer that is where the viewer's is.
            self.add("-device", "virtio-tablet-pci");
            self.add("-vnc", format!("unix:{SCREEN_FOLDER}/{SCREEN},share=force-shared"));
            // The guest starts when QEMU may not write in that folder any more.
            self.command.arg("-S");
        }
    }
}

/// Builds the kernel command line for a kernel given by the host.
pub fn append(spec: &CatalogSpec, accelerator: &Accelerator) -> String {
    let mut append = spec.append.clone().unwrap_or_default();
    if matches!(accelerator, Accelerator::Tcg(_)) {
        // In emulation the timer may be late when the kernel checks it.
        append.push_str(" no_timer_check");
    }
    append.trim().to_owned()
}

/// Describes a socket that accepts one client at a time.
fn listener(id: &str, socket: &OwnedFd) -> OsString {
    format!("socket,id={id},fd={},server=on,wait=off", socket.as_raw_fd()).into()
}
