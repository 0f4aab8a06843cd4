//! Whether Windows has the drivers of virtio-win that a clone needs: viostor for its disk, netkvm for its network card.

use super::WindowsSystem;
use crate::images::check::rules::finding;
use spillway_api::{Finding, FindingKind, Severity};
use spillway_ntfs::NtfsError;

/// Values of `Start`: a driver that the boot loader loads, and one that is never loaded.
const BOOT: u32 = 0;
const DISABLED: u32 = 4;
const INSTALL: &str =
    "install the drivers of virtio-win while a virtio disk and a virtio network card are attached";

/// Returns the finding about the driver of virtio disks, if any.
pub fn disk(system: &WindowsSystem) -> Result<Vec<Finding>, NtfsError> {
    let what = match trouble(system, "viostor")? {
        Some(trouble) => trouble,
        None => {
            let key = system.current(r"Services\viostor");
            let start = system.system.number(&key, "Start")?;
            // What the key below says wins. Windows puts it there for drivers that the last start did not need.
            let instead = system.system.number(&format!(r"{key}\StartOverride"), "0")?;
            match (start, instead) {
                (Some(BOOT), None | Some(BOOT)) => return Ok(vec![]),
                (Some(BOOT), Some(other)) => {
                    format!("the driver viostor is not loaded by the boot loader: StartOverride says {other}")
                }
                (Some(other), _) => {
                    format!("the driver viostor is not loaded by the boot loader: Start is {other}, not 0")
                }
                (None, _) => "the driver viostor has no value Start".to_owned(),
            }
        }
    };
    let path = r"HKLM\SYSTEM\CurrentControlSet\Services\viostor";
    let why = "a clone's disk is a virtio disk: Windows stops with INACCESSIBLE_BOOT_DEVICE";
    Ok(vec![finding(FindingKind::NoVirtioDriver, Severity::Error, path, &what, why, INSTALL)])
}

/// Returns the finding about the driver of virtio network cards, if any.
pub fn network(system: &WindowsSystem) -> Result<Vec<Finding>, NtfsError> {
    let what = match trouble(system, "netkvm")? {
        Some(trouble) => trouble,
        None => match system.system.number(&system.current(r"Services\netkvm"), "Start")? {
            Some(DISABLED) => "the driver netkvm is disabled".to_owned(),
            _ => return Ok(vec![]),
        },
    };
    let path = r"HKLM\SYSTEM\CurrentControlSet\Services\netkvm";
    let why = "a clone's network card is a virtio card: it stays without a network";
    Ok(vec![finding(FindingKind::NoNetworkDriver, Severity::Warning, path, &what, why, INSTALL)])
}

/// Says why a driver is not there, if it is not.
fn trouble(system: &WindowsSystem, name: &str) -> Result<Option<String>, NtfsError> {
    let key = system.current(&format!(r"Services\{name}"));
    if !system.system.has(&key)? {
        return Ok(Some(format!("Windows has no driver {name}")));
    }
    let usual = format!(r"System32\drivers\{name}.sys");
    let path = system.system.text(&key, "ImagePath")?.filter(|path| !path.is_empty()).unwrap_or(usual);
    let file = file_of(&path);
    let is_there = system.volume.find(&file)?.is_some_and(|found| !found.is_folder);
    Ok((!is_there).then(|| format!("the file of the driver {name} is missing: {}", super::shown(&path))))
}

/// Converts the path of a driver to one on the system volume: it is relative to the folder of Windows, or begins with
/// that folder's name or with a drive.
fn file_of(path: &str) -> String {
    let path = path.replace('\\', "/");
    let path = path.strip_prefix("/??/").unwrap_or(&path);
    let after = |beginning: &str| {
        let head = path.get(..beginning.len())?;
        head.eq_ignore_ascii_case(beginning).then(|| &path[beginning.len()..])
    };
    if let Some(rest) = after("/SystemRoot/").or_else(|| after("%SystemRoot%/")) {
        return format!("/Windows/{rest}");
    }
    match path.split_once(':') {
        Some((_, rest)) => rest.to_owned(),
        None => format!("/Windows/{path}"),
    }
}

#[cfg(test)]
mod tests {
    use super::file_of;

    #[test]
    fn paths_of_drivers_are_those_of_files() {
        let file = "/Windows/System32/drivers/viostor.sys";
        for path in [
            r"System32\drivers\viostor.sys",
            r"\SystemRoot\System32\drivers\viostor.sys",
            r"%systemroot%\System32\drivers\viostor.sys",
            r"\??\C:\Windows\System32\drivers\viostor.sys",
            r"C:\Windows\System32\drivers\viostor.sys",
        ] {
            assert_eq!(file_of(path), file, "{path}");
        }
        assert_eq!(file_of("ä:é"), "é");
        assert_eq!(file_of("/systemrooté"), "/Windows//systemrooté");
    }
}
