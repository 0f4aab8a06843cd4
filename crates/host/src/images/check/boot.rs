//! What firmware finds on a disk to start a machine with: code in the first sector for a BIOS, programs on FAT for UEFI.
//! Owns these facts and the finding about missing ones.
//!
//! Invariant: this reads no file of the system, so it works for every disk.

use super::fat;
use super::rules;
use super::volumes::{self, Extent};
use spillway_api::{
    BootFacts, Finding, FindingKind, GuestSystem, PartitionTable, Severity, Volume, VolumeContent,
};
use std::fs::File;

const REMEDY: &str = "install a boot loader (grub-install), or give its catalogs a kernel (--kernel)";
/// Windows cannot be started by a kernel that the host gives.
const REMEDY_WINDOWS: &str = "install Windows on this disk again, or repair its start (bcdboot)";

/// Returns the facts about a disk with these volumes.
pub fn facts(
    disk: &File,
    partition_table: PartitionTable,
    found: &[Volume],
    extents: &[Extent],
) -> BootFacts {
    let fat = found.iter().zip(extents).filter(|(volume, _)| volume.content == VolumeContent::Fat);
    BootFacts {
        partition_table,
        bios_code: has_bios_code(disk, partition_table, found, extents),
        efi_partition: extents.iter().find(|extent| extent.is_efi).and_then(|extent| extent.partition),
        efi_programs: fat.flat_map(|(_, extent)| fat::efi_programs(disk, extent)).take(64).collect(),
    }
}

/// Whether the first sector has code that a BIOS can start the disk with. Windows writes its code there on each disk with a GPT as
/// well, where that code finds nothing to go on with: only UEFI starts such a Windows.
fn has_bios_code(disk: &File, table: PartitionTable, found: &[Volume], extents: &[Extent]) -> bool {
    let is_windows =
        found.iter().any(|volume| matches!(volume.content, VolumeContent::Ntfs | VolumeContent::Bitlocker));
    let goes_on = || extents.iter().any(|extent| extent.is_bios) || volumes::has_active_partition(disk);
    let counts = table != PartitionTable::Gpt || !is_windows || goes_on();
    counts && volumes::has_bios_code(disk)
}

/// Returns a finding if no firmware can start the disk.
pub fn finding(boot: &BootFacts, found: &[Volume], guest: Option<GuestSystem>) -> Option<Finding> {
    let remedy = if guest == Some(GuestSystem::Windows) { REMEDY_WINDOWS } else { REMEDY };
    let missing = |severity, path: &str, what: &str, why: &str| {
        Some(rules::finding(FindingKind::NoBootLoader, severity, path, what, why, remedy))
    };
    let stays = "a machine without a kernel of its catalog's stays at its firmware, and is never ready";
    if boot.bios_code || boot.starts_with_uefi() {
        return None;
    }
    if let Some(program) = boot.efi_programs.first() {
        let what = format!(
            "the disk has {program}, and no /EFI/BOOT/BOOTX64.EFI, which the firmware of a new machine looks for"
        );
        return missing(Severity::Error, "/EFI/BOOT", &what, stays);
    }
    // A file system without a partition table is meant for a kernel that is given by the host.
    let is_bare = boot.partition_table == PartitionTable::None
        && found.iter().any(|volume| volume.content != VolumeContent::Unknown);
    let severity = if is_bare { Severity::Warning } else { Severity::Error };
    let what = "the disk has no boot loader, neither for a BIOS nor for UEFI";
    missing(severity, "the first sector", what, stays)
}
