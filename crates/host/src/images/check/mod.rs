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
mod windows;

#[cfg(test)]
mod tests;

use super::BootChoice;
use crate::error::HostError;
use reader::Reader;
use rules::LinuxSystem;
use spillway_api::{
    BootFacts, Finding, Firmware, GuestSystem, Volume, VolumeContent, VolumeRole, WindowsVersion,
};
use std::fs::File;
use std::time::Instant;
use volumes::Extent;

/// Result of a check.
#[derive(Debug)]
pub struct CheckedVersion {
    /// Operating system of the guest.
    pub guest: Option<GuestSystem>,
    /// Version of Windows, if the guest is that.
    pub windows: Option<WindowsVersion>,
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
    use VolumeContent::{Bitlocker, Btrfs, Ext, Luks, Lvm, Ntfs, Swap, Xfs};
    let guest = match has(&[Ntfs, Bitlocker]) && !has(&[Ext, Xfs, Btrfs, Lvm, Luks, Swap]) {
        true => GuestSystem::Windows,
        false => GuestSystem::Linux,
    };
    BootChoice { firmware, guest }
}

/// Whether a disk has a volume that may be Windows' and can be looked into, whatever else is there.
pub fn has_ntfs(disk: &File) -> bool {
    let (_, extents) = volumes::volumes(disk);
    extents.iter().any(|extent| volumes::content(disk, extent) == VolumeContent::Ntfs)
}

/// Checks a disk, until this time.
pub fn check(disk: &File, until: Instant) -> Result<CheckedVersion, HostError> {
    let (table, extents) = volumes::volumes(disk);
    let mut found: Vec<Volume> = extents.iter().map(|extent| described(disk, extent)).collect();
    for (volume, extent) in found.iter_mut().zip(&extents) {
        (volume.role, volume.unread) = match volume.content {
            VolumeContent::Ext => linux_role(&Reader::new(disk, extent, until))?,
            VolumeContent::Ntfs => windows_role(disk, extent, until)?,
            _ => continue,
        };
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
    let root = found.iter().find(|volume| volume.role == Some(VolumeRole::Root));
    let guest = root.map(|root| match root.content {
        VolumeContent::Ntfs => GuestSystem::Windows,
        _ => GuestSystem::Linux,
    });
    let (windows, mut findings) = match (of(VolumeRole::Root), guest) {
        (Some(root), Some(GuestSystem::Windows)) => match windows::open(disk, root, until) {
            Ok(volume) => windows::findings(&volume, until)?,
            // It was open a moment ago.
            Err(_) => (None, Vec::new()),
        },
        (Some(root), _) => {
            let boot = of(VolumeRole::Boot).map(|boot| Reader::new(disk, boot, until));
            let discards = volumes::ext_discards(disk, root);
            let root = Reader::new(disk, root, until);
            (None, rules::findings(&LinuxSystem { root, boot, discards })?)
        }
        (None, _) => (None, Vec::new()),
    };
    findings.extend(boot::finding(&boot, &found, guest));
    // A stable sort keeps the order of the rules within a kind.
    findings.sort_by_key(|finding| (finding.severity, finding.kind));
    Ok(CheckedVersion { guest, windows, volumes: found, boot, findings })
}

/// Role of a volume, or the reason why it was not examined.
type RoleOrReason = (Option<VolumeRole>, Option<String>);

/// Returns the role of a volume of Linux.
fn linux_role(reader: &Reader) -> Result<RoleOrReason, HostError> {
    let listed = reader.list("/")?;
    let has = |name: &str| listed.iter().any(|entry| entry.name == name);
    Ok(if listed.is_empty() {
        (None, Some("debugfs cannot read it: is it damaged?".into()))
    } else if has("etc") && (has("usr") || has("bin")) {
        (Some(VolumeRole::Root), None)
    } else if listed.iter().any(|entry| entry.name.starts_with("vmlinuz-")) {
        (Some(VolumeRole::Boot), None)
    } else {
        (None, Some(NO_SYSTEM.into()))
    })
}

/// Returns the role of a volume of Windows.
fn windows_role(disk: &File, extent: &Extent, until: Instant) -> Result<RoleOrReason, HostError> {
    let is_system = windows::open(disk, extent, until).and_then(|volume| windows::is_system(&volume));
    windows::check_time(until)?;
    Ok(match is_system {
        Ok(true) => (Some(VolumeRole::Root), None),
        Ok(false) => (None, Some(NO_SYSTEM.into())),
        Err(why) => (None, Some(format!("it cannot be read: {why}"))),
    })
}

const NO_SYSTEM: &str = "it has no system";

fn described(disk: &File, extent: &Extent) -> Volume {
    let content = volumes::content(disk, extent);
    let unread = match content {
        VolumeContent::Ext | VolumeContent::Ntfs => None,
        VolumeContent::Bitlocker => Some("it is encrypted with BitLocker".into()),
        VolumeContent::Unknown => Some("what it holds is not known".into()),
        VolumeContent::Swap | VolumeContent::Fat => Some("no system is there".into()),
        other => {
            Some(format!("{} cannot be looked into: only ext2, ext3, ext4 and NTFS can", other.as_str()))
        }
    };
    let Extent { partition, offset_bytes, size_bytes, .. } = *extent;
    Volume { partition, offset_bytes, size_bytes, content, role: None, unread }
}
