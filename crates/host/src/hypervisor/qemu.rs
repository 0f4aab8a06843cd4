//! QEMU as the machines' VMM: its command line. Owns the names of its sockets, which lie in the machine's folder;
//! starts nothing.
//!
//! Invariant: what a name or path holds never becomes another option.

use spillway_api::{CatalogSpec, Machine, Network, Ready};
use spillway_worker::kvm::Accelerator;
use std::ffi::OsString;
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

/// What starts a machine in its folder, whose disk is served on `disk_socket` there.
pub fn command(
    machine: &Machine,
    spec: &CatalogSpec,
    accelerator: &Accelerator,
    disk_socket: &str,
    files: &Files,
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

    add("-chardev", format!("socket,id=monitor,path={MONITOR},server=on,wait=off").into());
    add("-mon", "chardev=monitor,mode=control".into());
    add("-chardev", format!("socket,id=console,path={CONSOLE},server=on,wait=off").into());
    add("-serial", "chardev:console".into());

    add("-chardev", format!("socket,id=disk,path={disk_socket},reconnect=1").into());
    // With a kernel of the host's the first place is that one's.
    let boot = if spec.kernel.is_some() { "" } else { ",bootindex=0" };
    add("-device", format!("vhost-user-blk-pci,chardev=disk,num-queues={}{boot}", files.queues(spec)).into());
    for (id, path, more) in [
        ("data", files.data, ",discard=unmap"),
        ("scratch", files.scratch, ",discard=unmap"),
        ("seed", files.seed, ",readonly=on"),
    ] {
        if let Some(path) = path {
            add("-drive", drive(id, path, more));
            add("-device", format!("virtio-blk-pci,drive={id},serial={id}").into());
        }
    }
    let mac = &machine.identity.mac;
    let (network, spawn) = match &spec.network {
        Network::None => (None, false),
        Network::User => {
            let forward = files
                .forward
                .map_or(String::new(), |(here, there)| format!(",hostfwd=tcp:127.0.0.1:{here}-:{there}"));
            (Some(format!("user,id=network{forward}")), false)
        }
        Network::Bridge(bridge) => {
            (Some(format!("bridge,id=network,br={}", bridge.replace(',', ",,"))), true)
        }
    };
    if let Some(network) = network {
        add("-netdev", network.into());
        add("-device", format!("virtio-net-pci,netdev=network,mac={mac},romfile=").into());
    }
    add("-device", "virtio-rng-pci".into());
    add("-device", "virtio-serial-pci".into());
    add("-chardev", format!("socket,id=agent,path={AGENT},server=on,wait=off").into());
    add("-device", "virtserialport,chardev=agent,name=org.qemu.guest_agent.0".into());

    for (name, file) in [("-kernel", &spec.kernel), ("-initrd", &spec.initrd)] {
        if let Some(file) = file {
            add(name, file.into());
        }
    }
    if spec.kernel.is_some() {
        add("-append", append(spec, accelerator).into());
    }
    // The bridge's helper is a program of its own, which takes rights.
    let children =
        if spawn { "elevateprivileges=children,spawn=allow" } else { "elevateprivileges=deny,spawn=deny" };
    add("-sandbox", format!("on,obsolete=deny,resourcecontrol=deny,{children}").into());
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

fn drive(id: &str, path: &Path, more: &str) -> OsString {
    let path = path.display().to_string().replace(',', ",,");
    // A guest is told that its disk is full: one that is stopped for it would wait for somebody to notice.
    format!("if=none,id={id},format=raw,werror=report,rerror=report,file={path}{more}").into()
}
