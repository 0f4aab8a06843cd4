//! Options of `spillway catalog create` for the hardware of its machines.
//!
//! Invariant: a setting without an option has its default.

use crate::error::Failure;
use crate::host::words::{NetworkWord, number, size, words};
use clap::Args;
use spillway_api::{
    DisplayKind, Firmware, GuestSystem, Hardware, Tpm, Video, VmmKind, WatchdogAction, bounds,
};
use std::path::{Path, PathBuf};

/// Whose VMM runs the machines.
pub const VMMS: &[&str] = &["host", "external"];
/// Operating systems of guests.
pub const GUESTS: &[&str] = &["linux", "windows"];
/// Firmware.
pub const FIRMWARE: &[&str] = &["bios", "uefi", "uefi-secure"];
/// Trusted platform modules.
pub const TPMS: &[&str] = &["none", "2.0"];
/// Screens.
pub const DISPLAYS: &[&str] = &["none", "vnc"];
/// Graphics cards.
pub const VIDEOS: &[&str] = &["vga", "virtio"];
/// What watchdogs do.
pub const WATCHDOGS: &[&str] = &["reset", "poweroff", "pause"];

/// Hardware of a catalog's machines.
#[derive(Debug, Args)]
pub struct HardwareOptions {
    /// Program that runs the machines: the hypervisor of this host, or one that somebody else starts on their disks
    #[arg(long, value_name = "WHOSE", value_parser = words::<VmmKind>(VMMS), default_value = "host")]
    vmm: VmmKind,
    /// Group that may connect to the disks of external machines, such as libvirt-qemu [default: the daemon's user alone]
    #[arg(long, value_name = "GROUP")]
    socket_group: Option<String>,
    #[arg(
        long, value_name = "N", default_value_t = 1, value_parser = number(&bounds::VCPUS),
        help = bounds::VCPUS.help("Processors of a machine")
    )]
    vcpus: u32,
    #[arg(
        long, value_name = "N", default_value_t = 1, value_parser = number(&bounds::SOCKETS),
        help = bounds::SOCKETS.help("Sockets among which the processors are distributed")
    )]
    sockets: u32,
    #[arg(
        long, value_name = "SIZE", value_parser = size(&bounds::MEMORY_BYTES), default_value = "1G",
        help = bounds::MEMORY_BYTES.help("Memory of a machine")
    )]
    memory: u64,
    /// Take the memory from the host's reserved huge pages of 2 MiB
    #[arg(long)]
    hugepages: bool,
    /// Model of the processors, such as host, max or Skylake-Server,+vmx [default: the host's own; max in emulation]
    #[arg(long = "cpu", value_name = "MODEL")]
    cpu_model: Option<String>,
    /// Machine type, such as pc-q35-7.2 [default: q35, the newest of that type]
    #[arg(long, value_name = "TYPE")]
    machine_type: Option<String>,
    /// Operating system of the guests [default: the one in the image]
    #[arg(long, value_name = "SYSTEM", value_parser = words::<GuestSystem>(GUESTS))]
    guest: Option<GuestSystem>,
    /// Firmware [default: uefi if the image starts only with UEFI, else bios]
    #[arg(long, value_name = "KIND", value_parser = words::<Firmware>(FIRMWARE))]
    firmware: Option<Firmware>,
    /// Trusted platform module
    #[arg(long, value_name = "VERSION", value_parser = words::<Tpm>(TPMS), default_value = "none")]
    tpm: Tpm,
    /// Network: user (QEMU's NAT), none, or bridge=NAME for a bridge of the host; given more than once, the machines have as
    /// many network cards
    #[arg(long, default_value = "user")]
    network: Vec<NetworkWord>,
    /// Screen of each machine, which 'GET /v1/machines/NAME/screen' of the API shows
    #[arg(long, value_name = "KIND", value_parser = words::<DisplayKind>(DISPLAYS), default_value = "none")]
    display: DisplayKind,
    /// Graphics card of machines with a screen [default: vga]
    #[arg(long, value_name = "CARD", value_parser = words::<Video>(VIDEOS))]
    video: Option<Video>,
    /// Give the machines a watchdog, which does this to a guest that hangs
    #[arg(long, value_name = "ACTION", value_parser = words::<WatchdogAction>(WATCHDOGS))]
    watchdog: Option<WatchdogAction>,
    /// Kernel to boot instead of the image's boot loader
    #[arg(long, value_name = "PATH")]
    kernel: Option<PathBuf>,
    /// Initial RAM disk of that kernel
    #[arg(long, value_name = "PATH")]
    initrd: Option<PathBuf>,
    /// Command line of that kernel
    #[arg(long, value_name = "LINE")]
    append: Option<String>,
    /// Further argument for QEMU, passed on unchecked; given once for each word, such as --extra-arg=-device
    /// --extra-arg=ich9-intel-hda
    #[arg(long = "extra-arg", value_name = "WORD", allow_hyphen_values = true)]
    extra_args: Vec<String>,
}

impl HardwareOptions {
    /// Returns the settings.
    pub fn hardware(self) -> Result<Hardware, Failure> {
        let mut networks = self.network.into_iter().map(|word| word.0);
        Ok(Hardware {
            vmm: self.vmm,
            socket_group: self.socket_group,
            vcpus: self.vcpus,
            sockets: self.sockets,
            memory_bytes: self.memory,
            hugepages: self.hugepages,
            cpu_model: self.cpu_model,
            machine_type: self.machine_type,
            guest: self.guest,
            firmware: self.firmware,
            tpm: self.tpm,
            network: networks.next().unwrap_or_default(),
            more_networks: networks.collect(),
            display: self.display,
            video: self.video,
            watchdog: self.watchdog,
            kernel: self.kernel.as_deref().map(absolute).transpose()?,
            initrd: self.initrd.as_deref().map(absolute).transpose()?,
            append: self.append,
            extra_args: self.extra_args,
        })
    }
}

/// A path that the daemon takes: it has a working directory of its own.
fn absolute(path: &Path) -> Result<String, Failure> {
    let whole = std::path::absolute(path).map_err(|e| Failure::usage(format!("{}: {e}", path.display())))?;
    let text = whole.into_os_string().into_string();
    text.map_err(|path| Failure::usage(format!("{path:?}: the path is not UTF-8")))
}
