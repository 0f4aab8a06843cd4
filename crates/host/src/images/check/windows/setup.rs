//! Whether Windows was generalised by sysprep, whether it is a member of a domain, and its version. Owns what Windows
//! Setup records of itself in the registry.
//!
//! States of Setup: <https://learn.microsoft.com/windows-hardware/manufacture/desktop/windows-setup-states>.

use super::{Registry, WindowsSystem, shown};
use crate::images::check::rules::finding;
use spillway_api::{Finding, FindingKind, Severity, WindowsVersion};
use spillway_ntfs::NtfsError;

const STATE: &str = r"HKLM\SOFTWARE\Microsoft\Windows\CurrentVersion\Setup\State";
const SETUP: &str = r"HKLM\SYSTEM\Setup";
const REMEDY: &str = "sysprep /generalize /oobe /shutdown, with an answer file (/unattend)";
const SHARED: &str = "all clones have the same machine SID. Microsoft supports clones only after sysprep /generalize; \
     Windows 11 24H2, Windows Server 2025 and later refuse Kerberos and NTLM between machines with the same SID. \
     cloudbase-init gives clones names of their own, but no SID";
/// Word for a setup that has come to its end.
const COMPLETE: &str = "IMAGE_STATE_COMPLETE";
/// First build of Windows 11, whose registry still says Windows 10.
const WINDOWS_11: u32 = 22_000;

/// Returns the word for how far Windows Setup is.
fn image_state(software: &Registry) -> Result<Option<String>, NtfsError> {
    software.text(r"Microsoft\Windows\CurrentVersion\Setup\State", "ImageState")
}

/// Whether Windows has gone through its setup.
pub fn is_complete(system: &WindowsSystem) -> Result<bool, NtfsError> {
    let state = system.software.as_ref().map_or(Ok(None), image_state)?;
    Ok(state.as_deref() == Some(COMPLETE))
}

/// Returns the findings about Setup.
pub fn generalized(system: &WindowsSystem) -> Result<Vec<Finding>, NtfsError> {
    let new = |severity, path: &str, what: &str, why: &str| {
        finding(FindingKind::NotGeneralized, severity, path, what, why, REMEDY)
    };
    // That there is no such hive is told already.
    let Some(software) = &system.software else { return Ok(vec![]) };
    let state = image_state(software)?;
    let mut found = Vec::new();
    // False if Windows has gone through its setup.
    let is_ready = match state.as_deref().unwrap_or_default() {
        "IMAGE_STATE_GENERALIZE_RESEAL_TO_OOBE" => true,
        "IMAGE_STATE_GENERALIZE_RESEAL_TO_AUDIT" => {
            let what = "Windows is generalised, and starts in audit mode";
            let why = "clones are never ready for users: they wait in audit mode for another sysprep";
            found.push(new(Severity::Warning, STATE, what, why));
            true
        }
        COMPLETE => {
            found.push(new(Severity::Warning, STATE, "Windows is not generalised", SHARED));
            false
        }
        "IMAGE_STATE_SPECIALIZE_RESEAL_TO_OOBE" | "IMAGE_STATE_SPECIALIZE_RESEAL_TO_AUDIT" => {
            let what = "Windows is specialised for one machine, and not generalised";
            found.push(new(Severity::Warning, STATE, what, SHARED));
            true
        }
        "IMAGE_STATE_UNDEPLOYABLE" => {
            let what = "a phase of Windows Setup, or sysprep, was interrupted";
            let why = "according to Microsoft such an image can never be deployed";
            found.push(new(Severity::Error, STATE, what, why));
            true
        }
        _ => {
            let why = "whether clones share the machine SID is not known";
            let what = "the registry does not say whether Windows is generalised";
            found.push(finding(FindingKind::NotChecked, Severity::Warning, STATE, what, why, REMEDY));
            true
        }
    };
    let number = |key: &str, name: &str| system.system.number(key, name);
    let mut runs = false;
    for name in ["SystemSetupInProgress", "OOBEInProgress", "SetupType"] {
        runs |= number("Setup", name)?.unwrap_or(0) != 0;
    }
    if runs && !is_ready {
        let command = system.system.text("Setup", "CmdLine")?.unwrap_or_default();
        let what = format!("Windows Setup is still in progress (CmdLine: '{}')", shown(&command));
        let why = "each clone goes on with Setup when it starts, and may wait for a person";
        found.push(new(Severity::Warning, SETUP, &what, why));
    }
    // Sysprep counts its phases. Both numbers are there from the first installation on. After `/generalize` the first one is 3, and
    // the next start of Windows sets it to 7: only then a lower one means that sysprep was interrupted.
    if is_ready {
        return Ok(found);
    }
    let status = r"Setup\Status\SysprepStatus";
    let phases = [("GeneralizationState", 7), ("CleanupState", 2)];
    for (name, done) in phases {
        if let Some(phase) = number(status, name)?.filter(|phase| *phase != done) {
            let what = format!("sysprep has not come to its end ({name} is {phase}, not {done})");
            let why = "what sysprep removes may still be there, and the next run of sysprep fails";
            found.push(new(Severity::Warning, &format!(r"HKLM\SYSTEM\{status}"), &what, why));
            break;
        }
    }
    Ok(found)
}

/// Returns the finding about membership in a domain, if any.
pub fn domain(system: &WindowsSystem) -> Result<Vec<Finding>, NtfsError> {
    let parameters = system.current(r"Services\Tcpip\Parameters");
    let name = system.system.text(&parameters, "Domain")?.unwrap_or_default();
    // Netlogon starts by itself (2) in members only; a domain's name alone may be a suffix for DNS.
    let netlogon = system.system.number(&system.current(r"Services\Netlogon"), "Start")?;
    let has_secret = match &system.security {
        Some(security) => security.has(r"Policy\Secrets\$MACHINE.ACC")?,
        None => false,
    };
    let path = match has_secret {
        true => r"HKLM\SECURITY\Policy\Secrets\$MACHINE.ACC",
        false if !name.is_empty() && netlogon == Some(2) => {
            r"HKLM\SYSTEM\CurrentControlSet\Services\Tcpip\Parameters"
        }
        false => return Ok(vec![]),
    };
    let what = match name.as_str() {
        "" => "Windows is a member of a domain".to_owned(),
        name => format!("Windows is a member of the domain '{}'", shown(name)),
    };
    let why = "clones share the password of one machine account, and lock each other out of the domain. Pools of \
               members of a domain are not supported";
    let remedy = "leave the domain (Remove-Computer) before sysprep /generalize";
    Ok(vec![finding(FindingKind::DomainMember, Severity::Error, path, &what, why, remedy)])
}

/// Returns the version of Windows.
pub fn version(software: &Registry) -> Result<WindowsVersion, NtfsError> {
    let key = r"Microsoft\Windows NT\CurrentVersion";
    let text = |name: &str| -> Result<Option<String>, NtfsError> {
        Ok(software.text(key, name)?.filter(|text| !text.is_empty()).map(|text| shown(&text)))
    };
    let build = text("CurrentBuild")?;
    let number = build.as_ref().and_then(|build| build.parse::<u32>().ok()).unwrap_or(0);
    let product = text("ProductName")?.map(|name| match name.strip_prefix("Windows 10") {
        Some(edition) if number >= WINDOWS_11 => format!("Windows 11{edition}"),
        _ => name,
    });
    let update = software.number(key, "UBR")?;
    let build = build.map(|build| match update {
        Some(update) => format!("{build}.{update}"),
        None => build,
    });
    Ok(WindowsVersion { product, edition: text("EditionID")?, build })
}
