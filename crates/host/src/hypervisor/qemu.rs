//! QEMU as the machines' VMM: its command line. Owns the names of its sockets, which lie in the machine's folder;
//! starts nothing and opens nothing.
//!
//! Invariant: what a name or path holds never becomes another option. Of the host's files QEMU opens its own parts (firmware)
//! and connects to its disk's socket; all else it is given open.

use spillway_api::{CatalogSpec, Machine, Network, Ready};
use spillway_control::kvm::Accelerator;
use std::ffi::OsString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::Command;

/// The program.
pub const PROGRAM: &str = "qemu-system-x86_64";
/// Its monitor.
pub const MONITOR: &str = "qmp.sock";
/// The guest's first serial port.
pub const CONSOLE: &str = "console.sock";
/// The guest agent's port.
pub const AGENT: &str = "agent.sock";

/// What a machine gets besides its disk: files of the host.
#[derive(Clone, Debug, Default)]
pub struct Files<'a> {
    /// The cloud-init disk.
    pub seed: Option<&'a Path>,
    /// Its data disk.
    pub data: Option<&'a Path>,
    /// Its scratch disk.
    pub scratch: Option<&'a Path>,
    /// A port of this host's loopback, and the guest's that it is passed on to.
    pub forward: Option<(u16, u16)>,
    /// As many queues as the server of its own disk has.
    pub most_queues: Option<u32>,
}

impl Files<'_> {
    /// Queues of its own disk: one for each processor, if it has so many.
    pub fn queues(&self, spec: &CatalogSpec) -> u32 {
        self.most_queues.map_or(spec.vcpus, |most| most.min(spec.vcpus))
    }
}

/// What a QEMU is given open: it may run as a user who can open none of it.
pub struct Handles {
    /// Listens for the monitor's client.
    pub monitor: OwnedFd,
    /// Listens for the client of the first serial port.
    pub console: OwnedFd,
    /// Listens for the client of the guest agent's port.
    pub agent: OwnedFd,
    /// The data disk, to read and write.
    pub data: Option<OwnedFd>,
    /// The scratch disk, to read and write.
    pub scratch: Option<OwnedFd>,
    /// The cloud-init disk, to read.
    pub seed: Option<OwnedFd>,
    /// A kernel that everybody may read.
    pub kernel: Option<OwnedFd>,
    /// Its initrd, which everybody may read.
    pub initrd: Option<OwnedFd>,
    /// A tap in the machine's bridge.
    pub tap: Option<OwnedFd>,
}

impl Handles {
    /// All of them.
    pub fn all(&self) -> Vec<BorrowedFd<'_>> {
        let Handles { monitor, console, agent, data, scratch, seed, kernel, initrd, tap } = self;
        let some = [data, scratch, seed, kernel, initrd, tap].into_iter().flatten();
        [monitor, console, agent].into_iter().chain(some).map(AsFd::as_fd).collect()
    }
}

/// What starts a machine in its folder, whose disk is served on `disk_socket` there.
pub fn command(
    machine: &Machine,
    spec: &CatalogSpec,
    accelerator: &Accelerator,
    disk_socket: &str,
    files: &Files,
    handles: &Handles,
    exits_at_reboot: bool,
) -> Command {
    let (accel, cpu) = match accelerator {
        Accelerator::Kvm => ("kvm", "host"),
        Accelerator::Tcg(_) => ("tcg", "max"),
    };
    let uuid = &machine.identity.uuid;
    let mib = spec.memory_bytes >> 20;
    let mut command = Command::new(PROGRAM);
    let mut add = |name: &str, value: OsString| _ = command.arg(name).arg(value);
    add("-name", machine.name.as_str().into());
    add("-uuid", uuid.into());
    add("-smbios", format!("type=1,manufacturer=Spillway,serial={uuid}").into());
    add("-machine", "q35,memory-backend=memory,graphics=off,usb=off".into());
    add("-accel", accel.into());
    add("-cpu", cpu.into());
    add("-smp", spec.vcpus.to_string().into());
    add("-m", format!("{mib}M").into());
    add("-object", format!("memory-backend-memfd,id=memory,size={mib}M,share=on").into());
    add("-display", "none".into());
    // A guest that shuts down is held until it is asked why.
    let at_reboot = if exits_at_reboot { "shutdown" } else { "reset" };
    add("-action", format!("reboot={at_reboot},shutdown=pause").into());

    add("-chardev", listener("monitor", &handles.monitor));
    add("-mon", "chardev=monitor,mode=control".into());
    add("-chardev", listener("console", &handles.console));
    add("-serial", "chardev:console".into());

    add("-chardev", format!("socket,id=disk,path={disk_socket},reconnect=1").into());
    // With a kernel of the host's the first place is that one's.
    let boot = if spec.kernel.is_some() { "" } else { ",bootindex=0" };
    add("-device", format!("vhost-user-blk-pci,chardev=disk,num-queues={}{boot}", files.queues(spec)).into());
    let drives = [
        ("data", &handles.data, "discard=unmap"),
        ("scratch", &handles.scratch, "discard=unmap"),
        ("seed", &handles.seed, "readonly=on"),
    ];
    for (set, (id, file, more)) in (1..).zip(drives) {
        if let Some(file) = file {
            add("-add-fd", format!("fd={},set={set}", file.as_raw_fd()).into());
            // A guest is told that its disk is full: one that is stopped for it would wait for somebody to notice.
            let errors = "werror=report,rerror=report";
            // The file is opened once, as it is used.
            let file = format!("file=/dev/fdset/{set},auto-read-only=off");
            add("-drive", format!("if=none,id={id},format=raw,{errors},{file},{more}").into());
            add("-device", format!("virtio-blk-pci,drive={id},serial={id}").into());
        }
    }
    let mac = &machine.identity.mac;
    let network = match (&spec.network, &handles.tap) {
        (Network::User, _) => {
            let forward = files
                .forward
                .map_or(String::new(), |(here, there)| format!(",hostfwd=tcp:127.0.0.1:{here}-:{there}"));
            Some(format!("user,id=network{forward}"))
        }
        (Network::Bridge(_), Some(tap)) => Some(format!("tap,id=network,fd={}", tap.as_raw_fd())),
        (Network::None, _) | (Network::Bridge(_), None) => None,
    };
    if let Some(network) = network {
        add("-netdev", network.into());
        add("-device", format!("virtio-net-pci,netdev=network,mac={mac},romfile=").into());
    }
    add("-device", "virtio-rng-pci".into());
    add("-device", "virtio-serial-pci".into());
    add("-chardev", listener("agent", &handles.agent));
    add("-device", "virtserialport,chardev=agent,name=org.qemu.guest_agent.0".into());

    for (name, file) in [("-kernel", &handles.kernel), ("-initrd", &handles.initrd)] {
        if let Some(file) = file {
            // Whatever folder it lies in.
            add(name, format!("/proc/self/fd/{}", file.as_raw_fd()).into());
        }
    }
    if spec.kernel.is_some() {
        add("-append", append(spec, accelerator).into());
    }
    add("-sandbox", "on,obsolete=deny,resourcecontrol=deny,elevateprivileges=deny,spawn=deny".into());
    command.args(["-nodefaults", "-no-user-config"]);
    if matches!(spec.ready, Some(Ready::Serial(_))) {
        // It begins when its console is read.
        command.arg("-S");
    }
    command
}

/// The command line of a kernel of the host's.
pub fn append(spec: &CatalogSpec, accelerator: &Accelerator) -> String {
    let mut append = spec.append.clone().unwrap_or_default();
    if matches!(accelerator, Accelerator::Tcg(_)) {
        // In software the timer may be late when the kernel looks whether it ticks.
        append.push_str(" no_timer_check");
    }
    append.trim().to_owned()
}

/// One client at a time, who may come at any time.
fn listener(id: &str, socket: &OwnedFd) -> OsString {
    format!("socket,id={id},fd={},server=on,wait=off", socket.as_raw_fd()).into()
}
