//! QEMU's command line for a machine. Owns the names of its sockets, which are in the machine's folder; starts nothing
//! and opens nothing.
//!
//! Invariant: a name or path never becomes another option. QEMU opens only its own files (firmware) and connects to its
//! disk's socket; it inherits all other descriptors.

use super::uefi::Uefi;
use spillway_api::{
    CatalogSpec, DisplayKind, GuestSystem, Hardware, Machine, Network, Ready, Tpm, Video, WatchdogAction,
};
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
/// Socket of the trusted platform module's program.
pub const TPM: &str = "tpm.sock";
/// Machine type of a catalog that names none.
pub const MACHINE_TYPE: &str = "q35";
/// Set of descriptors of the firmware's variables; those of disks are counted from 1.
const VARIABLES_SET: u32 = 100;
/// Interfaces of Hyper-V for Windows, which KVM has: without them it reads slow clocks, and spins where it could yield.
pub const HYPER_V: [&str; 10] = [
    "hv-relaxed",
    "hv-vapic",
    "hv-spinlocks=0x1fff",
    "hv-vpindex",
    "hv-runtime",
    "hv-time",
    "hv-synic",
    "hv-stimer",
    "hv-frequencies",
    "hv-tlbflush",
];
/// Socket of the guest agent's port.
pub const AGENT: &str = "agent.sock";

/// Socket of the address to which a guest behind the user network phones home.
pub const PHONE: &str = "phone.sock";
/// That address, which exists in the guest's own network alone.
pub const PHONE_ADDRESS: &str = "10.0.2.100";

/// Whether a machine with these settings phones home through QEMU's user network.
pub fn phones(spec: &CatalogSpec) -> bool {
    (&spec.ready, &spec.hardware.network) == (&Some(Ready::PhoneHome), &Network::User)
}

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
    /// Operating system of the guest.
    pub guest: Option<GuestSystem>,
    /// UEFI firmware, and the machine's own variables. None: it has a BIOS.
    pub uefi: Option<(&'a Uefi, &'a Path)>,
}

impl HostFiles<'_> {
    /// Number of queues of the disk: one for each processor, up to the server's.
    pub fn queues(&self, spec: &CatalogSpec) -> u32 {
        self.most_queues.map_or(spec.hardware.vcpus, |most| most.min(spec.hardware.vcpus))
    }

    /// Whether the guest is Windows.
    pub fn is_windows(&self) -> bool {
        self.guest == Some(GuestSystem::Windows)
    }

    /// Whether the firmware protects its variables by system management mode.
    pub fn is_secure(&self) -> bool {
        self.uefi.is_some_and(|(uefi, _)| uefi.is_secure)
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
    /// Listening socket of the address to which the guest phones home.
    pub phone: Option<OwnedFd>,
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
    /// The variables of UEFI firmware, opened for reading and writing.
    pub variables: Option<OwnedFd>,
    /// For each network card a tap in its bridge, if it is in one.
    pub taps: Vec<Option<OwnedFd>>,
}

impl Handles {
    /// All descriptors.
    pub fn all(&self) -> Vec<BorrowedFd<'_>> {
        let Handles { monitor, console, agent, phone, data, scratch, seed, kernel, initrd, variables, taps } =
            self;
        let some = [console, phone, data, scratch, seed, kernel, initrd, variables]
            .into_iter()
            .chain(taps)
            .flatten();
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
    line.processors();
    line.firmware();
    line.consoles();
    line.disks(disk_socket);
    line.network();
    line.agent();
    line.boot();
    line.screen();
    // The last ones win where an option is given twice.
    line.command.args(&spec.hardware.extra_args);
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
        let uuid = &self.machine.identity.uuid;
        let hardware = &self.spec.hardware;
        let mib = hardware.memory_bytes >> 20;
        self.add("-name", self.machine.name.as_str());
        self.add("-uuid", uuid);
        self.add("-smbios", format!("type=1,manufacturer=Spillway,serial={uuid}"));
        let graphics = match hardware.display {
            DisplayKind::None => "off",
            DisplayKind::Vnc => "on",
        };
        let machine_type = hardware.machine_type.as_deref().unwrap_or(MACHINE_TYPE);
        let smm = if self.files.is_secure() { ",smm=on" } else { "" };
        let hpet = if self.files.is_windows() { ",hpet=off" } else { "" };
        let kind = format!("{machine_type},memory-backend=memory,graphics={graphics},usb=off{smm}{hpet}");
        self.add("-machine", kind);
        self.add("-m", format!("{mib}M"));
        let pages = if hardware.hugepages { ",hugetlb=on,hugetlbsize=2M" } else { "" };
        self.add("-object", format!("memory-backend-memfd,id=memory,size={mib}M,share=on{pages}"));
        self.add("-display", "none");
        // A guest that shuts down is held until its reason was queried.
        let at_reboot = if exits_at_reboot { "shutdown" } else { "reset" };
        let watchdog = match hardware.watchdog {
            None => "",
            Some(WatchdogAction::Reset) => ",watchdog=reset",
            Some(WatchdogAction::Poweroff) => ",watchdog=poweroff",
            Some(WatchdogAction::Pause) => ",watchdog=pause",
        };
        self.add("-action", format!("reboot={at_reboot},shutdown=pause{watchdog}"));
        if self.files.is_windows() {
            // Windows takes the clock for local time, and counts ticks that come late.
            self.add("-rtc", "base=localtime,driftfix=slew");
        }
    }

    fn processors(&mut self) {
        let Hardware { vcpus, sockets, cpu_model, .. } = &self.spec.hardware;
        let (accel, usual) = match self.accelerator {
            Accelerator::Kvm => ("kvm", "host"),
            Accelerator::Tcg(_) => ("tcg", "max"),
        };
        let mut model = cpu_model.as_deref().unwrap_or(usual).to_owned();
        if self.files.is_windows() && *self.accelerator == Accelerator::Kvm {
            HYPER_V.iter().for_each(|interface| model.extend([",", interface]));
        }
        self.add("-accel", accel);
        self.add("-cpu", model);
        let cores = vcpus / (*sockets).max(1);
        self.add("-smp", format!("cpus={vcpus},sockets={sockets},cores={cores},threads=1"));
    }

    /// Adds UEFI firmware and the trusted platform module.
    fn firmware(&mut self) {
        if let (Some((uefi, _)), Some(variables)) = (self.files.uefi, &self.handles.variables) {
            let code = uefi.code.to_string_lossy().replace(',', ",,");
            self.add("-drive", format!("if=pflash,unit=0,format=raw,readonly=on,file={code}"));
            self.add("-add-fd", format!("fd={},set={VARIABLES_SET}", variables.as_raw_fd()));
            let file = format!("file=/dev/fdset/{VARIABLES_SET},auto-read-only=off");
            self.add("-drive", format!("if=pflash,unit=1,format=raw,{file}"));
            if uefi.is_secure {
                // Only code in system management mode changes the variables. What a guest does in a suspended machine is not
                // verified.
                self.add("-global", "driver=cfi.pflash01,property=secure,value=on");
                self.add("-global", "ICH9-LPC.disable_s3=1");
            }
        }
        if self.spec.hardware.tpm == Tpm::V2 {
            self.add("-chardev", format!("socket,id=tpm,path={TPM}"));
            self.add("-tpmdev", "emulator,id=tpm,chardev=tpm");
            self.add("-device", "tpm-crb,tpmdev=tpm");
        }
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
        let boot = if self.spec.hardware.kernel.is_some() { "" } else { ",bootindex=0" };
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
        if let Some(phone) = &self.handles.phone {
            self.add("-chardev", listener("phone", phone));
        }
        for (card, network) in self.spec.hardware.networks().enumerate() {
            let tap = self.handles.taps.get(card).and_then(Option::as_ref);
            let network = match (network, tap) {
                (Network::User, _) => {
                    // The first card's network is the one on which the guest is asked whether it is ready.
                    let forward =
                        self.files.forward.filter(|_| card == 0).map_or(String::new(), |(here, there)| {
                            format!(",hostfwd=tcp:127.0.0.1:{here}-:{there}")
                        });
                    let phone = match &self.handles.phone {
                        Some(_) if card == 0 => format!(",guestfwd=tcp:{PHONE_ADDRESS}:80-chardev:phone"),
                        Some(_) | None => String::new(),
                    };
                    format!("user,id=network{card}{forward}{phone}")
                }
                (Network::Bridge(_), Some(tap)) => format!("tap,id=network{card},fd={}", tap.as_raw_fd()),
                (Network::None, _) | (Network::Bridge(_), None) => continue,
            };
            let mac = self.machine.identity.mac_of_card(card);
            self.add("-netdev", network);
            self.add("-device", format!("virtio-net-pci,netdev=network{card},mac={mac},romfile="));
        }
    }

    /// Adds the source of entropy, the guest agent's port and the watchdog.
    fn agent(&mut self) {
        self.add("-device", "virtio-rng-pci");
        self.add("-device", "virtio-serial-pci");
        self.add("-chardev", listener("agent", &self.handles.agent));
        self.add("-device", "virtserialport,chardev=agent,name=org.qemu.guest_agent.0");
        if self.spec.hardware.watchdog.is_some() {
            self.add("-device", "i6300esb");
        }
    }

    /// Adds a kernel given by the host, and restricts QEMU itself.
    fn boot(&mut self) {
        for (name, file) in [("-kernel", &self.handles.kernel), ("-initrd", &self.handles.initrd)] {
            if let Some(file) = file {
                // The path does not depend on the folder of the file.
                self.add(name, format!("/proc/self/fd/{}", file.as_raw_fd()));
            }
        }
        if self.spec.hardware.kernel.is_some() {
            self.add("-append", append(self.spec, self.accelerator));
        }
        self.add("-sandbox", "on,obsolete=deny,resourcecontrol=deny,elevateprivileges=deny,spawn=deny");
        self.command.args(["-nodefaults", "-no-user-config"]);
    }

    /// Adds a screen, the last device: without it the guest finds the others where they were.
    fn screen(&mut self) {
        if let Some(video) = self.spec.hardware.video() {
            self.add(
                "-device",
                match video {
                    Video::Vga => "VGA",
                    Video::Virtio => "virtio-vga",
                },
            );
            // A pointer that is where the viewer's is. Windows has no driver of its own for virtio's.
            match self.files.is_windows() {
                true => {
                    self.add("-device", "qemu-xhci");
                    self.add("-device", "usb-tablet");
                }
                false => self.add("-device", "virtio-tablet-pci"),
            }
            self.add("-vnc", format!("unix:{SCREEN_FOLDER}/{SCREEN},share=force-shared"));
            // The guest starts when QEMU may not write in that folder any more.
            self.command.arg("-S");
        }
    }
}

/// Builds the kernel command line for a kernel given by the host.
pub fn append(spec: &CatalogSpec, accelerator: &Accelerator) -> String {
    let mut append = spec.hardware.append.clone().unwrap_or_default();
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

#[cfg(test)]
#[path = "qemu_tests.rs"]
mod tests;
