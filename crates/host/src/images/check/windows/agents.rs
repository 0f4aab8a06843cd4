//! Whether Windows has the agents that a machine is set up and shut down with: cloudbase-init and the QEMU guest agent.

use super::{WindowsSystem, setup};
use crate::images::check::rules::finding;
use spillway_api::{Finding, FindingKind, Severity};
use spillway_ntfs::NtfsError;

const FOLDER: &str = "/Program Files/Cloudbase Solutions/Cloudbase-Init/conf";
const CONF: &str = r"C:\Program Files\Cloudbase Solutions\Cloudbase-Init\conf\cloudbase-init.conf";
const SERVICE: &str = r"HKLM\SYSTEM\CurrentControlSet\Services\cloudbase-init";
const NOTHING_TELLS: &str = "a clone takes no name, network or login from its seed disk";
const SOURCE: &str = "cloudbaseinit.metadata.services.nocloudservice.NoCloudConfigDriveService";
/// Values of `Start` of a service: it starts with Windows; it is disabled.
const AUTO: u32 = 2;
const DISABLED: u32 = 4;

/// Returns the finding about cloudbase-init, if any.
pub fn cloudbase_init(system: &WindowsSystem) -> Result<Vec<Finding>, NtfsError> {
    let new = |kind, path: &str, what: &str, remedy: &str| {
        Ok(vec![finding(kind, Severity::Warning, path, what, NOTHING_TELLS, remedy)])
    };
    let Some(conf) = system.text_of(&format!("{FOLDER}/cloudbase-init.conf"))? else {
        let remedy = format!("install cloudbase-init, with metadata_services={SOURCE}");
        return new(FindingKind::NoCloudInit, CONF, "cloudbase-init is not installed", &remedy);
    };
    let Some(start) = system.system.number(&system.current(r"Services\cloudbase-init"), "Start")? else {
        let remedy = "install cloudbase-init again";
        return new(FindingKind::NoCloudInit, SERVICE, "cloudbase-init has no service", remedy);
    };
    if start != AUTO && !is_enabled_by_setup(system)? {
        let what = match start {
            DISABLED => "cloudbase-init is disabled".to_owned(),
            start => format!("cloudbase-init does not start by itself (Start is {start}, not {AUTO})"),
        };
        return new(FindingKind::NoCloudInit, SERVICE, &what, "sc config cloudbase-init start= auto");
    }
    let what = match setting(&conf, "metadata_services") {
        // Without the setting it looks for other sources.
        None => "cloudbase-init does not look for a seed disk unless metadata_services names it",
        Some(services) if services.to_ascii_lowercase().contains("nocloudservice") => return Ok(vec![]),
        Some(_) => "cloudbase-init does not look for a seed disk: metadata_services has no nocloudservice",
    };
    new(FindingKind::CloudInitSource, CONF, what, &format!("metadata_services={SOURCE}"))
}

/// Whether Setup has yet to run its script, which sets cloudbase-init to start with Windows: so that it does not start during Setup.
fn is_enabled_by_setup(system: &WindowsSystem) -> Result<bool, NtfsError> {
    if setup::is_complete(system)? {
        return Ok(false);
    }
    let script = system.text_of("/Windows/Setup/Scripts/SetupComplete.cmd")?.unwrap_or_default();
    let mut lines = script.lines().map(str::to_ascii_lowercase);
    Ok(lines.any(|line| line.contains("cloudbase-init") && line.contains("auto")))
}

/// Returns the last value of a setting. Lines that begin with a space continue the one before.
fn setting(conf: &str, name: &str) -> Option<String> {
    let mut found: Option<String> = None;
    let mut is_inside = false;
    for line in conf.lines().filter(|line| !line.trim_start().starts_with(['#', ';'])) {
        if line.starts_with([' ', '\t']) {
            if let Some(value) = found.as_mut().filter(|_| is_inside) {
                value.push_str(line.trim());
            }
            continue;
        }
        let (key, value) = line.split_once(['=', ':']).unwrap_or((line, ""));
        is_inside = key.trim() == name;
        if is_inside {
            found = Some(value.trim().to_owned());
        }
    }
    found
}

/// Returns the finding about the QEMU guest agent, if any.
pub fn guest_agent(system: &WindowsSystem) -> Result<Vec<Finding>, NtfsError> {
    for name in ["QEMU-GA", "QEMU Guest Agent"] {
        if system.system.has(&system.current(&format!(r"Services\{name}")))? {
            return Ok(vec![]);
        }
    }
    Ok(vec![finding(
        FindingKind::NoGuestAgent,
        Severity::Note,
        r"HKLM\SYSTEM\CurrentControlSet\Services\QEMU-GA",
        "the QEMU guest agent is not installed",
        "catalogs cannot wait for it (ready = agent), and machines are shut down by their power button (ACPI) only",
        "install qemu-ga of virtio-win",
    )])
}

#[cfg(test)]
mod tests {
    use super::setting;

    #[test]
    fn settings_are_read_as_cloudbase_init_reads_them() {
        let value = |conf: &str| setting(conf, "metadata_services");
        assert_eq!(value("[DEFAULT]\r\nmetadata_services = a,b\r\nx=1\r\n").as_deref(), Some("a,b"));
        assert_eq!(value("metadata_services=a,\n  b,\n\tc\nx=1\n  d\n").as_deref(), Some("a,b,c"));
        assert_eq!(value("metadata_services=a\nmetadata_services=b\n").as_deref(), Some("b"));
        assert_eq!(value("#metadata_services=a\n; metadata_services=b\nxmetadata_services=c\n"), None);
        assert_eq!(value(""), None);
    }
}
