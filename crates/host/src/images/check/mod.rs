//! Checks an image version for what breaks its clones: identities of the original machine, and missing requirements of a
//! clone. Owns the choice of the system's volumes.
//!
//! Invariant: the image is untrusted. It is read by confined programs and by code that trusts no length; whatever it
//! contains, the check ends in time, with findings or with the reason why not.

mod boot;
mod cloud_init;
mod fat;
mod identities;
mod initrd;
mod kernel;
mod reader;
mod rules;
mod volumes;

#[cfg(test)]
mod tests;

use super::BootChoice;
use crate::error::HostError;
use reader::Reader;
use rules::LinuxSystem;
use spillway_api::{BootFacts, Finding, Firmware, GuestSystem, Volume, VolumeContent, VolumeRole};
use std::fs::File;
use std::time::Instant;
use volumes::Extent;

/// Result of a check.
#[derive(Debug)]
pub struct CheckedVersion {
    /// Volumes of the disk, with what was examined.
    pub volumes: Vec<Volume>,
    /// What firmware finds.
    pub boot: BootFacts,
    /// Findings about clones.
    pub findings: Vec<Finding>,
}

/// Returns firmware and operating system that a disk needs, by its partition table and the first bytes of its volumes.
pub fn boot_choice(disk: &File) -> BootChoice {
    let (table, extents) = volumes::volumes(disk);
    let found: Vec<Volume> = extents.iter().map(|extent| described(disk, extent)).collect();
    let has = |contents: &[VolumeContent]| found.iter().any(|volume| contents.contains(&volume.content));
    let facts = boot::facts(disk, table, &found, &extents);
    let firmware = match facts.starts_with_uefi() && !facts.bios_code {
        true => Firmware::Uefi,
        false => Firmware::Bios,
    };
    use VolumeContent::{Btrfs, Ext, Luks, Lvm, Ntfs, Swap, Xfs};
    let guest = match has(&[Ntfs]) && !has(&[Ext, Xfs, Btrfs, Lvm, Luks, Swap]) {
        true => GuestSystem::Windows,
        false => GuestSystem::Linux,
    };
    BootChoice { firmware, guest }
}

/// Checks a disk, until this time.
pub fn check(disk: &File, until: Instant) -> Result<CheckedVersion, HostError> {
    let (table, extents) = volumes::volumes(disk);
    let mut found: Vec<Volume> = extents.iter().map(|extent| described(disk, extent)).collect();
    for (volume, extent) in found.iter_mut().zip(&extents) {
        if volume.content == VolumeContent::Ext {
            let listed = Reader::new(disk, extent, until).list("/")?;
            let has = |name: &str| listed.iter().any(|entry| entry.name == name);
            (volume.role, volume.unread) = if listed.is_empty() {
                (None, Some("debugfs cannot read it: is it damaged?".into()))
            } else if has("etc") && (has("usr") || has("bin")) {
                (Some(VolumeRole::Root), None)
            } else if listed.iter().any(|entry| entry.name.starts_with("vmlinuz-")) {
                (Some(VolumeRole::Boot), None)
            } else {
                (None, Some("it has no system".into()))
            };
        }
    }
    // Of several systems the first one is likely to start.
    for role in [VolumeRole::Root, VolumeRole::Boot] {
        for second in found.iter_mut().filter(|volume| volume.role == Some(role)).skip(1) {
            (second.role, second.unread) = (None, Some("it is a second system's".into()));
        }
    }
    let of = |role| {
        found.iter().zip(&extents).find(|(volume, _)| volume.role == Some(role)).map(|(_, extent)| extent)
    };
    let boot = boot::facts(disk, table, &found, &extents);
    let mut findings = match of(VolumeRole::Root) {
        None => Vec::new(),
        Some(root) => rules::findings(&LinuxSystem {
            root: Reader::new(disk, root, until),
            boot: of(VolumeRole::Boot).map(|boot| Reader::new(disk, boot, until)),
            discards: volumes::ext_discards(disk, root),
        })?,
    };
    findings.extend(boot::finding(&boot, &found));
    // A stable sort keeps the order of the rules within a kind.
    findings.sort_by_key(|finding| (finding.severity, finding.kind));
    Ok(CheckedVersion { volumes: found, boot, findings })
}

fn described(disk: &File, extent: &Extent) -> Volume {
    let content = volumes::content(disk, extent);
    let unread = match content {
        VolumeContent::Ext => None,
        VolumeContent::Unknown => Some("what it holds is not known".into()),
        VolumeContent::Swap | VolumeContent::Fat => Some("no system is there".into()),
        other => Some(format!("{} cannot be looked into: only ext2, ext3 and ext4 can", other.as_str())),
    };
    let Extent { partition, offset_bytes, size_bytes, .. } = *extent;
    Volume { partition, offset_bytes, size_bytes, content, role: None, unread }
}
