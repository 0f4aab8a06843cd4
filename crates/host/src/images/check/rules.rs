//! Rules about what breaks clones. Owns the rules that bind a system to other hardware, and the list of all rules.
//!
//! Invariant: a rule reports what it found; where it could not look it reports nothing, or that it could not look.

use super::reader::{FileKind, Reader};
use crate::error::HostError;
use spillway_api::{Finding, FindingKind, Severity};

/// A Linux system in an image.
pub struct LinuxSystem<'a> {
    /// Root file system.
    pub root: Reader<'a>,
    /// File system of `/boot`, if it is separate.
    pub boot: Option<Reader<'a>>,
    /// Whether the root file system is mounted with discard by default.
    pub discards: bool,
}

/// Returns what breaks clones of this system, kind by kind.
pub fn findings(system: &LinuxSystem) -> Result<Vec<Finding>, HostError> {
    let root = &system.root;
    let mut found = super::identities::find(root)?;
    found.extend(super::cloud_init::findings(system)?);
    found.extend(network_card(root)?);
    found.extend(mounted_devices(root)?);
    found.extend(super::kernel::driver(system)?);
    found.extend(discard(system)?);
    Ok(found)
}

/// Creates a finding.
pub fn finding(
    kind: FindingKind,
    severity: Severity,
    path: impl Into<String>,
    what: &str,
    why: &str,
    remedy: &str,
) -> Finding {
    let (what, why, remedy) = (what.into(), why.into(), remedy.into());
    Finding { kind, severity, path: path.into(), what, why, remedy }
}

/// Returns the paths of files with this suffix in a folder, sorted, at most 64.
pub fn plain_files(root: &Reader, folder: &str, end: &str) -> Result<Vec<String>, HostError> {
    let listed = root.list(folder)?;
    let files = listed.iter().filter(|entry| entry.kind == FileKind::File && entry.name.ends_with(end));
    let mut paths: Vec<String> = files.map(|entry| format!("{folder}/{}", entry.name)).collect();
    paths.sort();
    paths.truncate(64);
    Ok(paths)
}

fn network_card(root: &Reader) -> Result<Vec<Finding>, HostError> {
    // Files that select network cards, and the setting that selects by MAC address.
    const PLACES: [(&str, &str, &str); 6] = [
        ("/etc/netplan", ".yaml", "macaddress:"),
        ("/etc/systemd/network", ".network", "MACAddress="),
        ("/etc/systemd/network", ".link", "MACAddress="),
        ("/etc/sysconfig/network-scripts", "", "HWADDR="),
        ("/etc/sysconfig/network", "", "LLADDR="),
        ("/etc/NetworkManager/system-connections", ".nmconnection", "mac-address="),
    ];
    let mut found = Vec::new();
    for (folder, end, setting) in PLACES {
        for path in plain_files(root, folder, end)? {
            // cloud-init replaces its own file.
            if path.contains("cloud-init") {
                continue;
            }
            let text = root.text(&path)?.unwrap_or_default();
            if text.lines().any(|line| line.trim_start().starts_with(setting)) {
                found.push(finding(
                    FindingKind::NetworkCard,
                    Severity::Error,
                    path,
                    "the network is set up for a card with a certain address",
                    "a clone's card has another address: it stays without a network",
                    "remove the file, or the address from it: the seed disk says what the card is for",
                ));
            }
        }
    }
    Ok(found)
}

fn mounts(text: &str) -> impl Iterator<Item = [&str; 4]> {
    let lines = text
        .lines()
        .map(|line| line.split_whitespace())
        .map(|mut words| std::array::from_fn(|_| words.next().unwrap_or_default()));
    lines.filter(|[device, ..]: &[&str; 4]| !device.is_empty() && !device.starts_with('#'))
}

fn mounted_devices(root: &Reader) -> Result<Option<Finding>, HostError> {
    const OTHERS: [&str; 7] = [
        "/dev/sd",
        "/dev/hd",
        "/dev/nvme",
        "/dev/xvd",
        "/dev/mmcblk",
        "/dev/disk/by-id/",
        "/dev/disk/by-path/",
    ];
    let text = root.text("/etc/fstab")?.unwrap_or_default();
    let other = mounts(&text).find(|[device, _, kind, options]| {
        OTHERS.iter().any(|other| device.starts_with(other))
            && !matches!(*kind, "iso9660" | "udf" | "auto")
            && !options.split(',').any(|option| matches!(option, "noauto" | "nofail"))
    });
    Ok(other.map(|[device, ..]| {
        let device: String = device.chars().take(80).collect();
        finding(
            FindingKind::MountedDevice,
            Severity::Error,
            "/etc/fstab",
            &format!("it mounts {}", device.escape_debug()),
            "a clone's disk is /dev/vda: it does not start, or waits for a device that does not come",
            "mount by UUID or LABEL",
        )
    }))
}

fn discard(system: &LinuxSystem) -> Result<Option<Finding>, HostError> {
    let root = &system.root;
    let text = root.text("/etc/fstab")?.unwrap_or_default();
    let discards = |[_, at, _, options]: [&str; 4]| {
        at == "/" && options.split(',').any(|option| option == "discard" || option.starts_with("discard="))
    };
    let unit = "fstrim.timer";
    // A link of its name there masks the unit.
    let masked = root.has(&format!("/etc/systemd/system/{unit}"))?;
    let mut timed = false;
    for above in ["/etc/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system"] {
        timed |= !masked && root.has(&format!("{above}/timers.target.wants/{unit}"))?;
    }
    for folder in ["/etc/cron.daily", "/etc/cron.weekly", "/etc/periodic/daily", "/etc/periodic/weekly"] {
        timed |= root.has(&format!("{folder}/fstrim"))?;
    }
    if system.discards || timed || mounts(&text).any(discards) {
        return Ok(None);
    }
    Ok(Some(finding(
        FindingKind::NoDiscard,
        Severity::Warning,
        "/etc/systemd/system/timers.target.wants/fstrim.timer",
        "nothing discards what deleted files leave behind",
        "their blocks stay in the write cache until the next reset: it fills up, and RAM is not given back",
        "systemctl enable fstrim.timer, or mount / with the option discard",
    )))
}
