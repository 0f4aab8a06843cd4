//! Virtual hardware of a catalog's machines. Owns the settings, their words and their defaults; the daemon checks
//! combinations.

use crate::GuestSystem;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

const MEMORY_BYTES_DEFAULT: u64 = 1 << 30;

/// Virtual hardware of the machines of a catalog. A setting that is left out has its default.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Hardware {
    /// Whether the host's hypervisor runs the machines, or a program that somebody else starts.
    pub vmm: VmmKind,
    /// Group that may connect to disks of external machines. Without one only the daemon's user may.
    pub socket_group: Option<String>,
    /// Number of virtual processors of each machine.
    pub vcpus: u32,
    /// Number of processor sockets. The virtual processors are distributed evenly among them. Editions of Windows for desktops use
    /// at most two.
    pub sockets: u32,
    /// Memory of each machine, in bytes: whole MiB.
    pub memory_bytes: u64,
    /// Whether the memory consists of huge pages of 2 MiB. The host must have reserved them.
    pub hugepages: bool,
    /// Model of the processors. Without one it is the host's, or `max` in emulation. Features may follow:
    /// `Skylake-Server,+vmx,-hle`.
    pub cpu_model: Option<String>,
    /// Machine type. By default `q35`. That is the newest of its type. Others have a version, such as `pc-q35-7.2`.
    pub machine_type: Option<String>,
    /// Operating system of the guests. By default the image's, or `linux`. Clock and pointer are chosen for it.
    pub guest: Option<GuestSystem>,
    /// Firmware of each machine. By default `uefi` if the image starts only with UEFI, else `bios`.
    pub firmware: Option<Firmware>,
    /// Trusted platform module of each machine.
    pub tpm: Tpm,
    /// Network to which each machine is connected.
    pub network: Network,
    /// Networks of further network cards, in their order.
    pub more_networks: Vec<Network>,
    /// Screen of each machine. The console shows it on the tab Screen, and the API as a WebSocket.
    pub display: DisplayKind,
    /// Graphics card of a machine with a screen. By default `vga`.
    pub video: Option<Video>,
    /// What a watchdog does to a guest that does not answer. By default there is none.
    pub watchdog: Option<WatchdogAction>,
    /// Kernel to start instead of the image's boot loader. It is an absolute path on the host.
    pub kernel: Option<String>,
    /// Initial RAM disk of that kernel. It is an absolute path on the host.
    pub initrd: Option<String>,
    /// Command line of that kernel.
    pub append: Option<String>,
    /// Further arguments of QEMU. Each is an element. They are passed on unchecked.
    pub extra_args: Vec<String>,
}

impl Default for Hardware {
    fn default() -> Hardware {
        Hardware {
            vmm: VmmKind::Host,
            socket_group: None,
            vcpus: 1,
            sockets: 1,
            memory_bytes: MEMORY_BYTES_DEFAULT,
            hugepages: false,
            cpu_model: None,
            machine_type: None,
            guest: None,
            firmware: None,
            tpm: Tpm::None,
            network: Network::User,
            more_networks: Vec::new(),
            display: DisplayKind::None,
            video: None,
            watchdog: None,
            kernel: None,
            initrd: None,
            append: None,
            extra_args: Vec::new(),
        }
    }
}

impl Hardware {
    /// Networks of all network cards, in their order.
    pub fn networks(&self) -> impl Iterator<Item = &Network> {
        std::iter::once(&self.network).chain(&self.more_networks)
    }

    /// Graphics card; none without a screen.
    pub fn video(&self) -> Option<Video> {
        match self.display {
            DisplayKind::None => None,
            DisplayKind::Vnc => Some(self.video.unwrap_or(Video::Vga)),
        }
    }
}

/// Program that runs the machines of a catalog.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum VmmKind {
    /// The hypervisor that the daemon was started with.
    #[default]
    Host,
    /// One that somebody else starts. The daemon only serves the disks.
    External,
}

/// Firmware that a machine starts with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Firmware {
    /// A BIOS (SeaBIOS), which starts the code in the first sector of the disk.
    Bios,
    /// UEFI (OVMF), with variables of its own for each machine.
    Uefi,
    /// UEFI that starts only programs with a signature that Microsoft's certificates verify.
    UefiSecure,
}

/// Trusted platform module of a machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum Tpm {
    /// The machines have none.
    #[default]
    #[serde(rename = "none")]
    None,
    /// TPM 2.0 (swtpm), with a state of its own for each machine.
    #[serde(rename = "2.0")]
    V2,
}

/// Network to which a network card of a machine is connected.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Network {
    /// User-mode network of the hypervisor: outgoing connections to everything that the host reaches, including services
    /// on its loopback.
    #[default]
    User,
    /// A bridge of the host, which is given by name.
    Bridge(String),
    /// The machines have no network card.
    None,
}

/// Screen of the machines of a catalog.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum DisplayKind {
    /// The machines have no graphics card.
    #[default]
    None,
    /// A graphics card, a pointer and a keyboard, which are reached over `GET /v1/machines/{name}/screen`.
    Vnc,
}

/// Graphics card of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Video {
    /// A VGA card with 16 MiB, for which every system has a driver.
    Vga,
    /// A virtio card without 3D, for any resolution. Windows needs its driver from virtio-win.
    Virtio,
}

/// What a watchdog does to a guest that does not answer it any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum WatchdogAction {
    /// Reboots the guest.
    Reset,
    /// Turns the machine off, as if its guest had shut down.
    Poweroff,
    /// Stops the guest's processors, so that its memory can be examined.
    Pause,
}
