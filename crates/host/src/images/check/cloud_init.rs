//! Checks whether cloud-init in an image takes a clone's identity only from the seed disk. Owns the rules of cloud-init:
//! its sources, its own seed, its cache, the kernel command line.
//!
//! Invariant: settings are read as text, in any layout of YAML; text that is not understood causes no finding.

use super::reader::{FileKind, Reader};
use super::rules::{LinuxSystem, finding, plain_files};
use crate::error::HostError;
use spillway_api::Finding;
use spillway_api::FindingKind::{CloudInitSeed, CloudInitSource, HostName, NoCloudInit};
use spillway_api::Severity::{Error, Warning};

const NOTHING_TELLS: &str =
    "nothing reads the machine's seed disk: clones have no name, host key or login of their own";
const SEED_WINS: &str = "what the image says wins over the seed disk: clones share an instance-id, so they keep the image's name, \
                         or have no SSH host keys and wait for minutes when they start";

/// Units that cloud-init needs to run.
const UNITS: [&str; 5] = [
    "cloud-init-local.service",
    "cloud-init-main.service",
    "cloud-init-network.service",
    "cloud-init.service",
    "cloud-init.target",
];

/// Returns the findings about cloud-init.
pub fn findings(system: &LinuxSystem) -> Result<Vec<Finding>, HostError> {
    let root = &system.root;
    let mut found = switched_off(root)?;
    if !found.is_empty() {
        let name = root.text("/etc/hostname")?.unwrap_or_default();
        if !matches!(name.trim(), "" | "localhost" | "localhost.localdomain") {
            found.push(finding(
                HostName,
                Warning,
                "/etc/hostname",
                "a host name is in the image",
                "all clones have it, as nothing gives them their own",
                "install cloud-init, or empty /etc/hostname",
            ));
        }
        return Ok(found);
    }
    found.extend(seed_folders(root)?);
    found.extend(configured(root)?);
    for (shown, text) in kernel_lines(system)? {
        found.extend(command_line(&shown, &text));
    }
    Ok(found)
}

/// Returns why cloud-init does not run at all.
fn switched_off(root: &Reader) -> Result<Vec<Finding>, HostError> {
    let off = |path: &str, what: &str, remedy: &str| {
        Ok(vec![finding(NoCloudInit, Warning, path, what, NOTHING_TELLS, remedy)])
    };
    if !(root.has("/usr/bin/cloud-init")? || root.has("/usr/local/bin/cloud-init")?) {
        return off("/usr/bin/cloud-init", "there is no cloud-init", "install cloud-init");
    }
    let disabled = "/etc/cloud/cloud-init.disabled";
    if root.has(disabled)? {
        return off(disabled, "cloud-init is switched off", "remove the file");
    }
    for unit in UNITS {
        // A unit is masked by a link of its name to /dev/null.
        let path = format!("/etc/systemd/system/{unit}");
        if root.find(&path)?.is_some_and(|entry| entry.kind == FileKind::Other) {
            return off(&path, "a unit of cloud-init is masked", &format!("systemctl unmask {unit}"));
        }
    }
    let identify = "/etc/cloud/ds-identify.cfg";
    let text = dense(&root.text(identify)?.unwrap_or_default());
    if says(&text, "policy", "disabled") {
        return off(identify, "cloud-init is switched off (policy: disabled)", "remove the setting");
    }
    Ok(vec![])
}

/// Folders that sources read before anything else.
fn seed_folders(root: &Reader) -> Result<Vec<Finding>, HostError> {
    let above = "/var/lib/cloud/seed";
    let mut found = Vec::new();
    for source in root.list(above)?.iter().filter(|entry| entry.kind != FileKind::File).take(MOST_SEEDS) {
        let path = format!("{above}/{}", source.name);
        let listed = root.list(&path)?;
        // An empty file contains no seed. A link may lead to one that does.
        if listed.iter().any(|e| e.kind == FileKind::Other || e.kind == FileKind::File && e.size_bytes > 0) {
            let what = format!("a seed of cloud-init is in the image, for the source {}", source.name);
            let remedy = "cloud-init clean --seed --logs, or rm -r /var/lib/cloud/seed";
            found.push(finding(CloudInitSeed, Error, path, &what, SEED_WINS, remedy));
        }
    }
    Ok(found)
}

/// Number of seed folders that are read.
const MOST_SEEDS: usize = 16;

/// Returns the findings about the settings. Files are read in cloud-init's order; the last value of a name counts.
fn configured(root: &Reader) -> Result<Vec<Finding>, HostError> {
    let mut found = Vec::new();
    let (mut sources, mut keeps_cache, mut keeps_name) = (None, None, None);
    for path in configs(root)? {
        let text = root.text(&path)?.unwrap_or_default();
        if let Some(list) = datasources(&text) {
            sources = Some((path.clone(), list));
        }
        let text = dense(&text);
        keeps_cache = switch(&text, "manual_cache_clean").map(|is| (is, path.clone())).or(keeps_cache);
        keeps_name = switch(&text, "preserve_hostname").map(|is| (is, path.clone())).or(keeps_name);
        if says(&text, "network", "config:disabled") {
            found.push(finding(
                CloudInitSource,
                Warning,
                path.clone(),
                "cloud-init may not set up the network",
                "what the seed disk says of the machine's card is not used",
                "remove the setting (installers leave it behind)",
            ));
        }
        if says(&text, "vendor_data", "enabled:false") {
            found.push(finding(
                CloudInitSource,
                Warning,
                path.clone(),
                "cloud-init takes no vendor-data",
                "a machine's host key is there: it gets another after every reset",
                "remove the setting",
            ));
        }
        found.extend(source_settings(&path, &text));
    }
    let only = |list: &[String]| match list {
        [] => "cloud-init looks for nothing".to_owned(),
        _ => format!("cloud-init looks for {} only", list.join(", ")),
    };
    if let Some((path, list)) = sources.filter(|(_, list)| !list.iter().any(|source| source == "NoCloud")) {
        let remedy = "add NoCloud to datasource_list, or remove the setting";
        found.push(finding(CloudInitSource, Error, path, &only(&list), NOTHING_TELLS, remedy));
    }
    let identify = "/etc/cloud/ds-identify.cfg";
    let text = dense(&root.text(identify)?.unwrap_or_default());
    if let Some(source) = text.lines().find_map(|line| line.strip_prefix("datasource:"))
        && source != "nocloud"
    {
        let source: String = source.chars().take(40).collect();
        let what = only(&[source.escape_debug().to_string()]);
        found.push(finding(CloudInitSource, Error, identify, &what, NOTHING_TELLS, "remove the setting"));
    }
    found.extend(kept_instance(root, keeps_cache)?);
    if let Some((true, path)) = keeps_name {
        found.push(finding(
            HostName,
            Warning,
            path,
            "cloud-init leaves the host name as it is in the image (preserve_hostname)",
            "all clones have one name",
            "remove the setting",
        ));
    }
    Ok(found)
}

/// Checks the settings of the source that reads the seed disk.
fn source_settings(path: &str, dense: &str) -> Vec<Finding> {
    let mut found = Vec::new();
    for rest in dense.lines().filter_map(|line| line.strip_prefix("datasource:")) {
        let Some((_, settings)) = rest.split_once("nocloud:") else { continue };
        let own = ["meta-data:", "user-data:", "vendor-data:", "seedfrom:"];
        if let Some(own) = own.iter().find(|own| settings.contains(**own)) {
            let what = format!(
                "a seed of cloud-init is in its settings (datasource, NoCloud, {})",
                &own[..own.len() - 1]
            );
            found.push(finding(CloudInitSeed, Error, path, &what, SEED_WINS, "remove the setting"));
        }
        if let Some((_, label)) = settings.split_once("fs_label:")
            && !label.starts_with("cidata")
        {
            let what = "cloud-init looks for a seed disk of another label than cidata (fs_label)";
            found.push(finding(CloudInitSource, Error, path, what, NOTHING_TELLS, "remove the setting"));
        }
    }
    found
}

/// Finds a stored instance that cloud-init takes for the clone's own, whatever the seed disk contains.
fn kept_instance(root: &Reader, keeps: Option<(bool, String)>) -> Result<Option<Finding>, HostError> {
    let marker = "/var/lib/cloud/instance/manual-clean";
    let is_cached = root.has("/var/lib/cloud/instance")?
        || root.list("/var/lib/cloud/instances")?.iter().any(|entry| entry.kind == FileKind::Folder);
    let path = match keeps {
        Some((true, path)) if is_cached => path,
        _ if root.has(marker)? => marker.to_owned(),
        _ => return Ok(None),
    };
    let what =
        "cloud-init keeps the instance that it has seen before (manual_cache_clean), and one is in the image";
    let why = "cloud-init takes every clone for that instance: it gives them no name, host key or login of their own";
    let remedy = "remove the setting, then cloud-init clean --logs";
    Ok(Some(finding(CloudInitSeed, Error, path, what, why, remedy)))
}

/// Returns the texts that contain a kernel command line, with their paths in the system.
fn kernel_lines(system: &LinuxSystem) -> Result<Vec<(String, String)>, HostError> {
    let root = &system.root;
    let mut found = Vec::new();
    let mut take = |reader: &Reader, prefix: &str, path: String| -> Result<(), HostError> {
        if let Some(text) = reader.text(&path)? {
            found.push((format!("{prefix}{path}"), text));
        }
        Ok(())
    };
    for path in ["/etc/default/grub", "/etc/kernel/cmdline"] {
        take(root, "", path.into())?;
    }
    for path in plain_files(root, "/etc/default/grub.d", ".cfg")? {
        take(root, "", path)?;
    }
    // On a boot partition the paths do not begin with /boot.
    let (boot, prefix, folder) = match &system.boot {
        Some(boot) => (boot, "/boot", ""),
        None => (root, "", "/boot"),
    };
    for path in ["grub/grub.cfg", "grub2/grub.cfg", "extlinux/extlinux.conf", "syslinux/syslinux.cfg"] {
        take(boot, prefix, format!("{folder}/{path}"))?;
    }
    for path in plain_files(boot, &format!("{folder}/loader/entries"), ".conf")? {
        take(boot, prefix, path)?;
    }
    Ok(found)
}

/// Finds parameters for cloud-init on a kernel command line. One finding of each kind is enough, since menus repeat their
/// lines.
fn command_line(path: &str, text: &str) -> Vec<Finding> {
    let mut found: Vec<Finding> = Vec::new();
    let lines = text.lines().filter(|line| !line.trim_start().starts_with('#'));
    let words = lines.flat_map(|line| line.split(|c: char| c.is_whitespace() || "'\"".contains(c)));
    for word in words {
        // GRUB escapes the separators of commands.
        let word = word.replace('\\', "");
        let new = match word.split_once('=') {
            Some(("cloud-init", "disabled")) => {
                let what = "the kernel's command line switches cloud-init off";
                finding(NoCloudInit, Warning, path, what, NOTHING_TELLS, "take cloud-init=disabled out")
            }
            Some(("network-config", "disabled")) => finding(
                CloudInitSource,
                Warning,
                path,
                "the kernel's command line keeps cloud-init from setting up the network",
                "what the seed disk says of the machine's card is not used",
                "take network-config=disabled out",
            ),
            Some(("ds" | "ci.ds" | "ci.datasource", value)) => {
                let (source, arguments) = value.split_once(';').unwrap_or((value, ""));
                let source = source.to_ascii_lowercase();
                let is_ours = matches!(source.as_str(), "nocloud" | "nocloud-net");
                let own = ["s=", "seedfrom=", "i=", "instance-id=", "h=", "local-hostname="];
                let has_own =
                    arguments.split(';').any(|argument| own.iter().any(|own| argument.starts_with(own)));
                let remedy = "take it out of the command line, and make the menu of the boot loader again";
                match (is_ours, has_own) {
                    (true, false) => continue,
                    (true, true) => {
                        let what = "the kernel's command line gives cloud-init a seed (ds=nocloud;...)";
                        finding(CloudInitSeed, Error, path, what, SEED_WINS, remedy)
                    }
                    (false, _) => {
                        let source: String = source.chars().take(40).collect();
                        let source = source.escape_debug();
                        let what =
                            format!("the kernel's command line lets cloud-init look for {source} only");
                        finding(CloudInitSource, Error, path, &what, NOTHING_TELLS, remedy)
                    }
                }
            }
            _ => continue,
        };
        if !found.iter().any(|other| other.kind == new.kind) {
            found.push(new);
        }
    }
    found
}

/// Returns the configuration files in the order in which cloud-init reads them.
fn configs(root: &Reader) -> Result<Vec<String>, HostError> {
    let mut names: Vec<String> = plain_files(root, "/etc/cloud/cloud.cfg.d", ".cfg")?;
    names.insert(0, "/etc/cloud/cloud.cfg".into());
    Ok(names)
}

/// Whether a top-level setting is true.
fn switch(dense: &str, name: &str) -> Option<bool> {
    let beginning = format!("{name}:");
    let value = dense.lines().filter_map(|line| line.strip_prefix(&beginning)).next_back()?;
    Some(matches!(value, "true" | "yes" | "on" | "1"))
}

/// Removes comments, spaces and line ends; marks the lines that begin at the left edge.
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

/// Whether a top-level mapping has a setting, in any layout.
fn says(dense: &str, mapping: &str, setting: &str) -> bool {
    let beginning = format!("{mapping}:");
    dense.lines().filter_map(|line| line.strip_prefix(&beginning)).any(|rest| rest.contains(setting))
}

/// Parses the sources of a `datasource_list`, in one line or several.
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

    #[test]
    fn a_command_line_is_read_as_boot_loaders_write_it() {
        let kinds =
            |text: &str| command_line("x", text).into_iter().map(|found| found.kind).collect::<Vec<_>>();
        for text in [
            "GRUB_CMDLINE_LINUX=\"quiet ds=nocloud;s=/golden/\"",
            "  linux /vmlinuz root=UUID=1 ds=nocloud-net\\;s=http://10.0.0.1/ quiet\n  linux /b ds=nocloud\\;i=a",
            "options ro 'ds=nocloud;h=golden'",
            "root=/dev/vda1 ci.ds=NoCloud;instance-id=golden",
        ] {
            assert_eq!(kinds(text), [CloudInitSeed], "{text}");
        }
        assert_eq!(kinds("linux /x ds=ec2 cloud-init=disabled"), [CloudInitSource, NoCloudInit]);
        for text in ["ds=nocloud", "ds=nocloud-net quiet", "# ds=ec2", "fields=ds", "cloud-init=enabled", ""]
        {
            assert_eq!(kinds(text), [], "{text}");
        }
    }

    #[test]
    fn the_seed_disk_is_not_looked_for_by_another_label() {
        let kinds = |text: &str| {
            let found = source_settings("x", &dense(text));
            found.into_iter().map(|found| found.kind).collect::<Vec<_>>()
        };
        assert_eq!(kinds("datasource:\n  NoCloud:\n    fs_label: other\n"), [CloudInitSource]);
        assert_eq!(kinds("datasource: {NoCloud: {fs_label: null}}\n"), [CloudInitSource]);
        assert_eq!(kinds("datasource:\n  NoCloud: {seedfrom: 'http://10.0.0.1/'}\n"), [CloudInitSeed]);
        for text in [
            "datasource:\n  NoCloud:\n    fs_label: cidata\n",
            "datasource:\n  Ec2: {timeout: 5}\n",
            "my_datasource: {NoCloud: {seedfrom: x}}\n",
        ] {
            assert_eq!(kinds(text), [], "{text}");
        }
    }
}
