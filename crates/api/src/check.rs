//! Results of checking an image version for content that breaks its clones.

use crate::Name;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Result of a check: what clones of an image version should not share, or lack.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageCheck {
    /// Name of the image that was checked.
    pub image: Name,
    /// Version of the image that was checked, counted from 1.
    pub version: u32,
    /// Operating system that the image has. None: no system was found that can be examined.
    pub guest: Option<GuestSystem>,
    /// Version of Windows, as its registry states it. None: the guest is another system, or the registry cannot be read.
    pub windows: Option<WindowsVersion>,
    /// Volumes of the disk: partitions and logical volumes, with what was found on each.
    pub volumes: Vec<Volume>,
    /// What firmware finds on the disk to start a machine with.
    pub boot: BootFacts,
    /// Findings about the system. Without a volume with role `root`, an empty list means nothing.
    pub findings: Vec<Finding>,
}

impl ImageCheck {
    /// Whether the system was found and checked.
    pub fn has_system(&self) -> bool {
        self.volumes.iter().any(|volume| volume.role == Some(VolumeRole::Root))
    }

    /// Number of findings that are more than notes.
    pub fn faults(&self) -> usize {
        self.findings.iter().filter(|finding| finding.severity != Severity::Note).count()
    }
}

/// Operating system of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum GuestSystem {
    /// A Linux distribution, or another system that takes the same hardware.
    Linux,
    /// Windows.
    Windows,
}

impl GuestSystem {
    /// Returns the word for this system.
    pub fn as_str(self) -> &'static str {
        match self {
            GuestSystem::Linux => "linux",
            GuestSystem::Windows => "windows",
        }
    }
}

/// Version of Windows in an image.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct WindowsVersion {
    /// Name of the product, such as `Windows 11 Pro`.
    pub product: Option<String>,
    /// Edition, such as `Professional` or `ServerStandard`.
    pub edition: Option<String>,
    /// Number of the build and of its update, such as `26100.4061`.
    pub build: Option<String>,
}

/// What firmware finds on a disk to start a machine with. A catalog with a `kernel` needs none of this.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BootFacts {
    /// Kind of the partition table.
    pub partition_table: PartitionTable,
    /// Whether the first sector contains code that a BIOS can start the disk with.
    pub bios_code: bool,
    /// Number of the EFI system partition. None: there is none.
    pub efi_partition: Option<u32>,
    /// Programs in the folders of `/EFI` on FAT file systems, such as `/EFI/BOOT/BOOTX64.EFI`. UEFI firmware without
    /// stored boot entries starts only that one.
    pub efi_programs: Vec<String>,
}

impl BootFacts {
    /// Whether UEFI firmware of a new machine finds a program to start.
    pub fn starts_with_uefi(&self) -> bool {
        const FALLBACKS: [&str; 3] =
            ["/EFI/BOOT/BOOTX64.EFI", "/EFI/BOOT/BOOTAA64.EFI", "/EFI/BOOT/BOOTIA32.EFI"];
        self.efi_programs.iter().any(|program| FALLBACKS.contains(&program.as_str()))
    }
}

/// Kind of partition table that the image has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum PartitionTable {
    /// The disk has no partition table.
    #[default]
    None,
    /// A master boot record (MS-DOS).
    Mbr,
    /// GUID partition table (GPT), with its protective MBR.
    Gpt,
}

/// A partition, or the whole disk if it has no partition table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Volume {
    /// Number of the partition. None: the volume is the whole disk.
    pub partition: Option<u32>,
    /// Offset of the volume from the start of the disk, in bytes.
    pub offset_bytes: u64,
    /// Size of the volume, in bytes.
    pub size_bytes: u64,
    /// File system or other content that was recognised on the volume.
    pub content: VolumeContent,
    /// Role of the volume in the system that was examined.
    pub role: Option<VolumeRole>,
    /// Reason why the volume was not examined; none if it was.
    pub unread: Option<String>,
}

/// Content of a volume, recognised by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum VolumeContent {
    /// An ext2, ext3 or ext4 file system, which the check can read.
    Ext,
    /// An XFS file system of Linux.
    Xfs,
    /// A Btrfs file system of Linux.
    Btrfs,
    /// An NTFS file system of Windows, which the check can read.
    Ntfs,
    /// A FAT file system, usually the EFI system partition.
    Fat,
    /// A SquashFS file system, which is read-only.
    Squashfs,
    /// A physical volume of LVM.
    Lvm,
    /// A volume that is encrypted with LUKS: its content was not checked.
    Luks,
    /// A volume that is encrypted with BitLocker: its content was not checked.
    Bitlocker,
    /// Swap space of Linux, without files.
    Swap,
    /// Content that is not recognised, or none.
    Unknown,
}

impl VolumeContent {
    /// Returns the words that people are shown for this content.
    pub fn as_str(self) -> &'static str {
        match self {
            VolumeContent::Ext => "ext2/3/4",
            VolumeContent::Xfs => "XFS",
            VolumeContent::Btrfs => "Btrfs",
            VolumeContent::Ntfs => "NTFS",
            VolumeContent::Fat => "FAT",
            VolumeContent::Squashfs => "SquashFS",
            VolumeContent::Lvm => "LVM",
            VolumeContent::Luks => "LUKS",
            VolumeContent::Bitlocker => "BitLocker",
            VolumeContent::Swap => "swap",
            VolumeContent::Unknown => "unknown",
        }
    }
}

/// Role of a volume in the system.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum VolumeRole {
    /// The root file system of a Linux guest, or the volume of Windows that has its system folder.
    Root,
    /// The file system that the guest mounts at `/boot`.
    Boot,
}

/// One thing that breaks clones.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Finding {
    /// Kind of the finding, a stable word for programs.
    pub kind: FindingKind,
    /// How much the finding matters: error, warning or note.
    pub severity: Severity,
    /// Path of the cause, as the guest sees it.
    pub path: String,
    /// What was found, in words for people.
    pub what: String,
    /// Why the finding breaks machines that are cloned from the image.
    pub why: String,
    /// What to do to the image so that the finding goes away.
    pub remedy: String,
}

/// How much a finding matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Clones do not start, or replace each other.
    Error,
    /// Clones work, but share a secret or lack something.
    Warning,
    /// Information that is harmless if intended. `image check --strict` ignores it.
    Note,
}

impl Severity {
    /// Returns the words that people are shown for this severity.
    pub fn as_str(self) -> &'static str {
        match self {
            Severity::Error => "error",
            Severity::Warning => "warning",
            Severity::Note => "note",
        }
    }
}

/// Kind of a finding, a stable word for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FindingKind {
    /// The image contains a machine-id, which all clones would share.
    MachineId,
    /// The image contains SSH host keys, which all clones would share.
    SshHostKeys,
    /// cloud-init (in Windows: cloudbase-init) is not installed, or is disabled.
    NoCloudInit,
    /// cloud-init (in Windows: cloudbase-init) does not read the seed disk, or ignores a part of it.
    CloudInitSource,
    /// cloud-init uses an instance-id or user-data of the image before it reads the seed disk.
    CloudInitSeed,
    /// The image contains a host name, and nothing gives the clone its own.
    HostName,
    /// The kernel has no driver for virtio disks when it starts.
    NoVirtioDriver,
    /// Windows has no driver for virtio network cards.
    NoNetworkDriver,
    /// Firmware finds nothing on the disk that it could start.
    NoBootLoader,
    /// Nothing discards the blocks of deleted files.
    NoDiscard,
    /// The image contains a random seed, or the key that credentials are sealed with.
    SharedSecret,
    /// The image contains the identity of a DHCP client, or its leases.
    DhcpIdentity,
    /// The network is configured for one particular card.
    NetworkCard,
    /// A file system is mounted from a device that the clone does not have.
    MountedDevice,
    /// The image contains the identity of an agent or an initiator.
    AgentIdentity,
    /// Windows was not generalised by sysprep, or setup will stop for a person.
    NotGeneralized,
    /// Windows is a member of a domain, whose machine account all clones would share.
    DomainMember,
    /// Windows is hibernated, or can be, or its volume is marked for chkdsk.
    Hibernation,
    /// Windows writes its page file to the disk of the clone.
    PageFile,
    /// Windows writes the time of each access to a file.
    LastAccess,
    /// Windows defragments its disk by a scheduled task.
    Defragmentation,
    /// The QEMU guest agent is not installed.
    NoGuestAgent,
    /// A part of the image could not be checked.
    NotChecked,
}
