//! What of an image version breaks its clones.

use crate::Name;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What was found in an image version that clones of it should not share, or that they lack.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageCheck {
    /// Name of the image that was checked.
    pub image: Name,
    /// Version of the image that was checked, counted from 1.
    pub version: u32,
    /// Volumes of the disk: partitions and logical volumes, with what was found on each.
    pub volumes: Vec<Volume>,
    /// What firmware finds on the disk to start a machine with.
    pub boot: BootFacts,
    /// What breaks clones. Empty says something only if a volume is the system's root.
    pub findings: Vec<Finding>,
}

impl ImageCheck {
    /// Whether the system was found, and so was looked into.
    pub fn has_system(&self) -> bool {
        self.volumes.iter().any(|volume| volume.role == Some(VolumeRole::Root))
    }

    /// Findings that are more than notes.
    pub fn faults(&self) -> usize {
        self.findings.iter().filter(|finding| finding.severity != Severity::Note).count()
    }
}

/// What firmware finds on a disk to start a machine with. A catalog with a `kernel` needs none of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BootFacts {
    /// The kind of partition table.
    pub partition_table: PartitionTable,
    /// Whether the first sector has code that a BIOS runs.
    pub bios_code: bool,
    /// The number of the partition that is the EFI system partition. None: there is none.
    pub efi_partition: Option<u32>,
    /// The programs in the folders of `/EFI` on FAT file systems, such as `/EFI/BOOT/BOOTX64.EFI`. UEFI firmware without a
    /// memory of earlier starts looks for that one alone.
    pub efi_programs: Vec<String>,
}

impl BootFacts {
    /// Whether UEFI firmware of a new machine finds something to start.
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
    /// Its number in the partition table. None: the whole disk.
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

/// What a volume holds, by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum VolumeContent {
    /// ext2, ext3 or ext4: these can be looked into.
    Ext,
    /// An XFS file system of Linux.
    Xfs,
    /// A Btrfs file system of Linux.
    Btrfs,
    /// An NTFS file system of Windows.
    Ntfs,
    /// FAT: the EFI system partition, as a rule.
    Fat,
    /// A SquashFS file system, which is read-only.
    Squashfs,
    /// A physical volume of LVM.
    Lvm,
    /// A volume that is encrypted with LUKS: its content was not checked.
    Luks,
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
            VolumeContent::Swap => "swap",
            VolumeContent::Unknown => "unknown",
        }
    }
}

/// What a volume is for a system.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum VolumeRole {
    /// The root file system of the guest.
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
    /// Where, as the system itself would name it.
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
    /// Clones do not start, or take each other's place.
    Error,
    /// Clones work, and share a secret or lack something.
    Warning,
    /// A fact that does no harm where it is meant so. `image check --strict` passes with it.
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
    /// A machine-id is in the image.
    MachineId,
    /// The image contains SSH host keys, which all clones would share.
    SshHostKeys,
    /// There is no cloud-init, or it is switched off.
    NoCloudInit,
    /// cloud-init does not look for the seed disk, or leaves out a part of it.
    CloudInitSource,
    /// cloud-init takes an instance-id or user-data from the image itself before it looks at the seed disk.
    CloudInitSeed,
    /// A host name is in the image, and nothing gives the clone its own.
    HostName,
    /// The kernel cannot read a virtio disk when it starts.
    NoVirtioDriver,
    /// Firmware finds nothing on the disk that it could start.
    NoBootLoader,
    /// Nothing discards what files leave behind.
    NoDiscard,
    /// A seed of randomness, or the secret that credentials are sealed with.
    SharedSecret,
    /// What a DHCP client calls itself, and its leases.
    DhcpIdentity,
    /// The network is set up for one card only.
    NetworkCard,
    /// A file system is mounted from a device that the clone does not have.
    MountedDevice,
    /// An agent or initiator has been given an identity.
    AgentIdentity,
    /// Something could not be checked.
    NotChecked,
}
