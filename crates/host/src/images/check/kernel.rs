//! Checks whether the kernel that an image would start can read a virtio disk. Owns the names that distributions give to
//! kernels and initrds.

use super::initrd::{self, DriverPresence};
use super::reader::{FileKind, Reader};
use super::rules::{LinuxSystem, finding};
use crate::error::HostError;
use spillway_api::{Finding, FindingKind, Severity};

const WHY: &str =
    "a clone's disk is a virtio disk: the system does not find its root file system, and does not start";

/// Returns the finding about the kernel, if any.
pub fn driver(system: &LinuxSystem) -> Result<Option<Finding>, HostError> {
    let missing = |path: String, what: String, remedy: &str| {
        Ok(Some(finding(FindingKind::NoVirtioDriver, Severity::Error, path, &what, WHY, remedy)))
    };
    let unknown = |path: String, what: String| {
        let remedy = "boot a machine of it to be sure";
        Ok(Some(finding(
            FindingKind::NotChecked,
            Severity::Warning,
            path,
            &what,
            "whether it can start from a virtio disk is not known",
            remedy,
        )))
    };
    // On a boot partition the paths do not begin with /boot.
    let (boot, folder) = match &system.boot {
        Some(boot) => (boot, "/"),
        None => (&system.root, "/boot/"),
    };
    let Some(version) = newest(boot, folder)? else {
        return unknown("/boot".into(), "no kernel was found".into());
    };
    let Some(modules) = modules(&system.root, &version)? else {
        return unknown("/lib/modules".into(), format!("the kernel {version} has no modules there"));
    };
    let builtin = system.root.text(&format!("{modules}/modules.builtin"))?.unwrap_or_default();
    if builtin.lines().any(|line| line.ends_with("/virtio_blk.ko")) {
        return Ok(None);
    }
    let blocks = system.root.list(&format!("{modules}/kernel/drivers/block"))?;
    if !blocks.iter().any(|entry| entry.name.starts_with("virtio_blk.ko")) {
        let what = format!("the kernel {version} has no virtio_blk, neither built in nor as a module");
        return missing(modules, what, "install a kernel that has it");
    }
    let names = [
        format!("initrd.img-{version}"),
        format!("initramfs-{version}.img"),
        format!("initrd-{version}"),
        format!("initramfs-{version}"),
    ];
    let mut initrd = None;
    for name in names.iter().map(|name| format!("{folder}{name}")) {
        if initrd.is_none() && boot.find(&name)?.is_some_and(|entry| entry.kind == FileKind::File) {
            initrd = Some(name);
        }
    }
    let remake = "make it again with the driver: dracut --no-hostonly, or MODULES=most in initramfs.conf";
    let Some(path) = initrd else {
        let what =
            format!("the kernel {version} has virtio_blk as a module, and there is no initrd that loads it");
        return missing("/boot".into(), what, remake);
    };
    let shown = format!("/boot/{}", path.rsplit('/').next().unwrap_or_default());
    match initrd::driver(boot, &path)? {
        DriverPresence::Conversion => Ok(None),
        DriverPresence::Missing => missing(shown, "the initrd has no virtio_blk".into(), remake),
        DriverPresence::Unknown(why) => unknown(shown, format!("the initrd could not be looked into: {why}")),
    }
}

/// Returns the version of the kernel that starts by default.
fn newest(boot: &Reader, folder: &str) -> Result<Option<String>, HostError> {
    let listed = boot.list(if folder == "/" { "/" } else { "/boot" })?;
    let names = listed.iter().filter_map(|entry| {
        let version = entry.name.strip_prefix("vmlinuz-").or_else(|| entry.name.strip_prefix("vmlinux-"))?;
        let is_spare = ["rescue", "kdump", ".old", "fallback"].iter().any(|word| version.contains(word));
        (!is_spare).then_some(version)
    });
    Ok(names.max_by_key(|version| parts(version)).map(str::to_owned))
}

/// Returns the folder of its modules. Some distributions name the kernel by its flavour and the folder by its version.
fn modules(root: &Reader, version: &str) -> Result<Option<String>, HostError> {
    let listed = root.list("/lib/modules")?;
    let names = || listed.iter().map(|entry| entry.name.as_str());
    let same = names().find(|name| *name == version);
    let found = same.or_else(|| names().max_by_key(|name| parts(name)));
    Ok(found.map(|name| format!("/lib/modules/{name}")))
}

/// Numbers are compared as numbers: 6.10 is newer than 6.9.
fn parts(version: &str) -> Vec<(u64, &str)> {
    let mut parts = Vec::new();
    let mut rest = version;
    while !rest.is_empty() {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let (number, after) = rest.split_at(digits);
        let words = after.bytes().take_while(|byte| !byte.is_ascii_digit()).count();
        let (word, after) = after.split_at(words);
        parts.push((number.parse().unwrap_or(u64::MAX), word));
        rest = after;
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::parts;

    #[test]
    fn versions_are_sorted_as_people_do() {
        let mut versions =
            ["6.10.1-amd64", "6.9.12-amd64", "6.1.0-9-amd64", "6.1.0-37-amd64", "5.14.0-503.el9.x86_64"];
        versions.sort_by_key(|version| parts(version));
        assert_eq!(
            versions,
            ["5.14.0-503.el9.x86_64", "6.1.0-9-amd64", "6.1.0-37-amd64", "6.9.12-amd64", "6.10.1-amd64"]
        );
    }
}
