//! What breaks clones, and how it is told in a system's files. Owns the rules and their words.
//!
//! Invariant: a rule says what it found; where it could not look it says nothing, or that it could not look.

use super::reader::{Entry, EntryKind, Reader};
use crate::error::HostError;
use spillway_api::{Finding, FindingKind};

/// A Linux system in an image.
pub struct System<'a> {
    /// Its root file system.
    pub root: Reader<'a>,
    /// Its `/boot`, if that is a file system of its own.
    pub boot: Option<Reader<'a>>,
    /// Whether the root file system is mounted with discard when nothing else is said.
    pub discards: bool,
}

/// Files that a running system writes for itself alone. Empty ones do no harm.
struct Remnant {
    kind: FindingKind,
    folder: &'static str,
    is_one: fn(&str) -> bool,
    what: &'static str,
    why: &'static str,
    remedy: &'static str,
}

const LEASES_WHY: &str = "clones ask the DHCP server under one name and are given one address";
const LEASES_REMEDY: &str = "remove it before the image is made";
const SECRET_WHY: &str = "what one clone keeps secret with it, every other can read";
const AGENT_REMEDY: &str = "remove it, and let cloud-init enrol the agent when a machine first starts";

#[rustfmt::skip]
const REMNANTS: &[Remnant] = &[
    Remnant {
        kind: FindingKind::SshHostKeys, folder: "/etc/ssh",
        is_one: |name| name.starts_with("ssh_host_") && name.ends_with("_key"),
        what: "SSH host keys are in the image",
        why: "whoever has the image can pass for every clone; cloud-init replaces them only where it runs",
        remedy: "rm /etc/ssh/ssh_host_*",
    },
    Remnant {
        kind: FindingKind::SharedSecret, folder: "/var/lib/systemd",
        is_one: |name| name == "random-seed",
        what: "a seed of the random number generator is in the image",
        why: "clones begin with the same randomness, and their keys may be alike",
        remedy: "rm /var/lib/systemd/random-seed",
    },
    Remnant {
        kind: FindingKind::SharedSecret, folder: "/var/lib/systemd",
        is_one: |name| name == "credential.secret",
        what: "the key that systemd seals credentials with is in the image",
        why: SECRET_WHY, remedy: "rm /var/lib/systemd/credential.secret",
    },
    Remnant {
        kind: FindingKind::SharedSecret, folder: "/var/lib/NetworkManager",
        is_one: |name| name == "secret_key",
        what: "NetworkManager's key is in the image",
        why: "clones on one network make the same stable addresses of it",
        remedy: "rm /var/lib/NetworkManager/secret_key",
    },
    Remnant {
        kind: FindingKind::DhcpIdentity, folder: "/var/lib/dhcp",
        is_one: |name| name.contains("lease"),
        what: "leases of dhclient are in the image", why: LEASES_WHY, remedy: LEASES_REMEDY,
    },
    Remnant {
        kind: FindingKind::DhcpIdentity, folder: "/var/lib/dhclient",
        is_one: |name| name.contains("lease"),
        what: "leases of dhclient are in the image", why: LEASES_WHY, remedy: LEASES_REMEDY,
    },
    Remnant {
        kind: FindingKind::DhcpIdentity, folder: "/var/lib/NetworkManager",
        is_one: |name| name.ends_with(".lease"),
        what: "leases of NetworkManager are in the image", why: LEASES_WHY, remedy: LEASES_REMEDY,
    },
    Remnant {
        kind: FindingKind::DhcpIdentity, folder: "/var/lib/dhcpcd",
        is_one: |name| name == "duid" || name == "secret" || name.ends_with(".lease"),
        what: "the identity of dhcpcd is in the image", why: LEASES_WHY, remedy: LEASES_REMEDY,
    },
    Remnant {
        kind: FindingKind::DhcpIdentity, folder: "/etc",
        is_one: |name| name == "dhcpcd.duid",
        what: "the identity of dhcpcd is in the image", why: LEASES_WHY, remedy: LEASES_REMEDY,
    },
    Remnant {
        kind: FindingKind::NetworkCard, folder: "/etc/udev/rules.d",
        is_one: |name| name.ends_with("persistent-net.rules"),
        what: "names of network cards are bound to their addresses",
        why: "a clone's card has another address and gets another name, which nothing is set up for",
        remedy: "rm /etc/udev/rules.d/*persistent-net.rules",
    },
    Remnant {
        kind: FindingKind::AgentIdentity, folder: "/etc/nvme",
        is_one: |name| name == "hostnqn" || name == "hostid",
        what: "the host's NVMe name is in the image",
        why: "clones take each other's place at an NVMe target", remedy: "rm /etc/nvme/hostnqn /etc/nvme/hostid",
    },
    Remnant {
        kind: FindingKind::AgentIdentity, folder: "/etc/salt/pki/minion",
        is_one: |name| name == "minion.pem",
        what: "the key of a Salt minion is in the image", why: "clones are one minion to the master", remedy: AGENT_REMEDY,
    },
    Remnant {
        kind: FindingKind::AgentIdentity, folder: "/var/lib/tailscale",
        is_one: |name| name == "tailscaled.state",
        what: "a node of Tailscale is in the image", why: "clones are one node to the network", remedy: AGENT_REMEDY,
    },
];

/// What breaks clones of this system, kind by kind.
pub fn findings(system: &System) -> Result<Vec<Finding>, HostError> {
    let root = &system.root;
    let mut found = machine_id(root)?;
    for remnant in REMNANTS {
        found.extend(remnant.look(root)?);
    }
    found.extend(iscsi(root)?);
    found.extend(cloud_init(root)?);
    found.extend(network_card(root)?);
    found.extend(mounted_devices(root)?);
    found.extend(super::kernel::driver(system)?);
    found.extend(discard(system)?);
    // Stable: the order of the rules within a kind.
    found.sort_by_key(|finding| finding.kind);
    Ok(found)
}

/// A finding in these words.
pub fn finding(kind: FindingKind, path: impl Into<String>, what: &str, why: &str, remedy: &str) -> Finding {
    Finding { kind, path: path.into(), what: what.into(), why: why.into(), remedy: remedy.into() }
}

impl Remnant {
    fn look(&self, root: &Reader) -> Result<Option<Finding>, HostError> {
        let listed = root.list(self.folder)?;
        let is_one = |entry: &&Entry| {
            entry.kind == EntryKind::File && entry.size_bytes > 0 && (self.is_one)(&entry.name)
        };
        let mut names = listed.iter().filter(is_one);
        let Some(first) = names.next() else { return Ok(None) };
        let more = match names.count() {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let path = format!("{}/{}{more}", self.folder, first.name);
        Ok(Some(finding(self.kind, path, self.what, self.why, self.remedy)))
    }
}

fn machine_id(root: &Reader) -> Result<Vec<Finding>, HostError> {
    let mut found = Vec::new();
    // The second is what systemd takes when the first is empty.
    for path in ["/etc/machine-id", "/var/lib/dbus/machine-id"] {
        let text = root.text(path)?.unwrap_or_default();
        if !matches!(text.trim(), "" | "uninitialized") {
            found.push(finding(
                FindingKind::MachineId,
                path,
                "a machine-id is in the image",
                "clones share it: DHCP servers give them one address, and logs take them for one machine",
                "truncate -s 0 /etc/machine-id && rm -f /var/lib/dbus/machine-id",
            ));
        }
    }
    Ok(found)
}

fn iscsi(root: &Reader) -> Result<Option<Finding>, HostError> {
    let path = "/etc/iscsi/initiatorname.iscsi";
    let text = root.text(path)?.unwrap_or_default();
    // Or it says that the name is to be made.
    let is_named = text.lines().any(|line| line.trim_start().starts_with("InitiatorName="));
    Ok(is_named.then(|| {
        finding(
            FindingKind::AgentIdentity,
            path,
            "the name of the iSCSI initiator is in the image",
            "clones log in to a target in each other's place",
            "put GenerateName=yes there instead (Debian), or have it made when a machine first starts",
        )
    }))
}

fn cloud_init(root: &Reader) -> Result<Vec<Finding>, HostError> {
    use FindingKind::{CloudInitSource, HostName, NoCloudInit};
    let mut found = Vec::new();
    let disabled = "/etc/cloud/cloud-init.disabled";
    let installed = root.has("/usr/bin/cloud-init")? || root.has("/usr/local/bin/cloud-init")?;
    let nothing_tells =
        "nothing reads the machine's seed disk: clones have no name, host key or login of their own";
    if !installed {
        let remedy = "install cloud-init";
        found.push(finding(
            NoCloudInit,
            "/usr/bin/cloud-init",
            "there is no cloud-init",
            nothing_tells,
            remedy,
        ));
    } else if root.has(disabled)? {
        found.push(finding(
            NoCloudInit,
            disabled,
            "cloud-init is switched off",
            nothing_tells,
            "remove the file",
        ));
    }
    if !found.is_empty() {
        let name = root.text("/etc/hostname")?.unwrap_or_default();
        if !matches!(name.trim(), "" | "localhost" | "localhost.localdomain") {
            found.push(finding(
                HostName,
                "/etc/hostname",
                "a host name is in the image",
                "all clones have it, as nothing gives them their own",
                "install cloud-init, or empty /etc/hostname",
            ));
        }
        return Ok(found);
    }
    let mut sources = None;
    for path in cloud_configs(root)? {
        let text = root.text(&path)?.unwrap_or_default();
        if let Some(list) = datasources(&text) {
            sources = Some((path.clone(), list));
        }
        let dense = dense(&text);
        if says(&dense, "network", "config:disabled") {
            found.push(finding(
                CloudInitSource,
                path.clone(),
                "cloud-init may not set up the network",
                "what the seed disk says of the machine's card is not used",
                "remove the setting (installers leave it behind)",
            ));
        }
        if says(&dense, "vendor_data", "enabled:false") {
            found.push(finding(
                CloudInitSource,
                path,
                "cloud-init takes no vendor-data",
                "a machine's host key is there: it gets another after every reset",
                "remove the setting",
            ));
        }
    }
    if let Some((path, list)) = sources.filter(|(_, list)| !list.iter().any(|source| source == "NoCloud")) {
        let what = format!(
            "cloud-init looks for {} only",
            if list.is_empty() { "nothing".into() } else { list.join(", ") }
        );
        let remedy = "add NoCloud to datasource_list, or remove the setting";
        found.push(finding(CloudInitSource, path, &what, nothing_tells, remedy));
    }
    Ok(found)
}

/// In the order in which cloud-init reads them.
fn cloud_configs(root: &Reader) -> Result<Vec<String>, HostError> {
    let mut names: Vec<String> = plain_files(root, "/etc/cloud/cloud.cfg.d", ".cfg")?;
    names.insert(0, "/etc/cloud/cloud.cfg".into());
    Ok(names)
}

/// Paths of a folder's files that end so, sorted, the first 64.
fn plain_files(root: &Reader, folder: &str, end: &str) -> Result<Vec<String>, HostError> {
    let listed = root.list(folder)?;
    let files = listed.iter().filter(|entry| entry.kind == EntryKind::File && entry.name.ends_with(end));
    let mut paths: Vec<String> = files.map(|entry| format!("{folder}/{}", entry.name)).collect();
    paths.sort();
    paths.truncate(64);
    Ok(paths)
}

/// Without comments, spaces and the ends of lines, but for a mark where each line begins at its left edge.
fn dense(text: &str) -> String {
    let mut dense = String::new();
    for line in
        text.lines().map(|line| line.split(" #").next().unwrap_or("")).filter(|line| !line.starts_with('#'))
    {
        if line.starts_with(|first: char| !first.is_whitespace()) {
            dense.push('\n');
        }
        dense.extend(
            line.chars()
                .filter(|c| !c.is_whitespace() && !"'\"{},".contains(*c))
                .map(|c| c.to_ascii_lowercase()),
        );
    }
    dense.push('\n');
    dense
}

/// Whether a mapping at the left edge has a setting, however it is laid out.
fn says(dense: &str, mapping: &str, setting: &str) -> bool {
    let beginning = format!("{mapping}:");
    dense.lines().filter_map(|line| line.strip_prefix(&beginning)).any(|rest| rest.contains(setting))
}

/// The sources of a `datasource_list`, in one line or several.
fn datasources(text: &str) -> Option<Vec<String>> {
    let mut lines = text.lines().filter(|line| !line.trim_start().starts_with('#'));
    let rest = lines.find_map(|line| line.strip_prefix("datasource_list:"))?;
    let mut list = rest.to_owned();
    let follows = |line: &&str| line.trim_start().starts_with('-') || line.starts_with([' ', '\t', ']']);
    lines.take_while(follows).for_each(|line| {
        list.push(' ');
        list.push_str(line);
    });
    let list = list.split(']').next().unwrap_or_default();
    let words = list.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    Some(words.take(16).map(str::to_owned).collect())
}

fn network_card(root: &Reader) -> Result<Vec<Finding>, HostError> {
    // Where cards are chosen, and the setting that chooses by address.
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
            // cloud-init writes its own anew.
            if path.contains("cloud-init") {
                continue;
            }
            let text = root.text(&path)?.unwrap_or_default();
            if text.lines().any(|line| line.trim_start().starts_with(setting)) {
                found.push(finding(
                    FindingKind::NetworkCard,
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
            "/etc/fstab",
            &format!("it mounts {}", device.escape_debug()),
            "a clone's disk is /dev/vda: it does not start, or waits for a device that does not come",
            "mount by UUID or LABEL",
        )
    }))
}

fn discard(system: &System) -> Result<Option<Finding>, HostError> {
    let root = &system.root;
    let text = root.text("/etc/fstab")?.unwrap_or_default();
    let discards = |[_, at, _, options]: [&str; 4]| {
        at == "/" && options.split(',').any(|option| option == "discard" || option.starts_with("discard="))
    };
    let unit = "fstrim.timer";
    // A link of that name there masks it.
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
        "/etc/systemd/system/timers.target.wants/fstrim.timer",
        "nothing discards what deleted files leave behind",
        "their blocks stay in the write cache until the next reset: it fills up, and RAM is not given back",
        "systemctl enable fstrim.timer, or mount / with the option discard",
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_sources_are_read_in_any_layout() {
        let lists = |text| datasources(text).unwrap();
        for text in [
            "datasource_list: [ Azure, None ]\n",
            "a: b\ndatasource_list: ['Azure', \"None\"] # NoCloud\n",
            "datasource_list:\n- Azure\n- None\nx:\n- NoCloud\n",
            "datasource_list:\n  - Azure\n  - None\nNoCloud: {}\n",
            "datasource_list: [\n  Azure,\n  None\n]\nNoCloud: 1\n",
        ] {
            assert_eq!(lists(text), ["Azure", "None"], "{text}");
        }
        assert_eq!(lists("datasource_list: []"), [""; 0]);
        assert_eq!(datasources("# datasource_list: [ Azure ]\nx: 1\n"), None);
    }

    #[test]
    fn settings_are_found_in_any_layout() {
        for text in [
            "network: {config: disabled}\n",
            "network:\n  config: disabled\n",
            "x: 1\nnetwork: { 'config': \"disabled\" }",
        ] {
            assert!(says(&dense(text), "network", "config:disabled"), "{text}");
        }
        for text in [
            "# network: {config: disabled}\n",
            "network: {version: 2}\nother: {config: disabled}\n",
            "my_network: {config: disabled}\n",
        ] {
            assert!(!says(&dense(text), "network", "config:disabled"), "{text}");
        }
    }
}
