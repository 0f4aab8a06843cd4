//! What Windows writes to the disk of a clone without need, what keeps blocks from being given back, and states of the
//! volume that must not be cloned.

use super::WindowsSystem;
use crate::images::check::rules::finding;
use spillway_api::{Finding, FindingKind, Severity};
use spillway_ntfs::NtfsError;

/// Flag of a setting that Windows may not change, in its first bit set: the times are not written.
const NO_LAST_ACCESS: u32 = 1;
/// Beginning of a file that a system was hibernated to. After it has gone on, the file begins with other words.
const HIBERNATED: &[u8] = b"hibr";
const FILE_SYSTEM: &str = r"HKLM\SYSTEM\CurrentControlSet\Control\FileSystem";

/// Returns the finding about the place of the page file, if any.
pub fn page_file(system: &WindowsSystem) -> Result<Vec<Finding>, NtfsError> {
    let key = system.current(r"Control\Session Manager\Memory Management");
    let files = system.system.texts(&key, "PagingFiles")?;
    // A question mark stands for the drive that Windows chooses.
    let here = files.iter().find(|file| {
        let drive = file.get(..2).unwrap_or_default();
        drive.eq_ignore_ascii_case("c:") || drive == "?:"
    });
    let Some(file) = here else { return Ok(vec![]) };
    Ok(vec![finding(
        FindingKind::PageFile,
        Severity::Note,
        r"HKLM\SYSTEM\CurrentControlSet\Control\Session Manager\Memory Management",
        &format!("the page file is on the system's drive ({})", super::shown(file)),
        "a clone writes memory that it is short of to its disposable disk, and so into the write cache",
        "put it on a scratch disk (PagingFiles), or give machines the memory that they need",
    )])
}

/// Returns the finding about discards, if any.
pub fn discard(system: &WindowsSystem) -> Result<Vec<Finding>, NtfsError> {
    let key = system.current(r"Control\FileSystem");
    if system.system.number(&key, "DisableDeleteNotification")?.unwrap_or(0) == 0 {
        return Ok(vec![]);
    }
    Ok(vec![finding(
        FindingKind::NoDiscard,
        Severity::Warning,
        FILE_SYSTEM,
        "nothing discards what deleted files leave behind (DisableDeleteNotification)",
        "their blocks stay in the write cache until the next reset: it fills up, and RAM is not given back",
        "fsutil behavior set DisableDeleteNotify 0",
    )])
}

/// Returns the finding about times of access, if any.
pub fn last_access(system: &WindowsSystem) -> Result<Vec<Finding>, NtfsError> {
    let key = system.current(r"Control\FileSystem");
    // Bit 1 says that Windows chooses, and bit 31 that the other bits are these. Without the value Windows decides when
    // it starts.
    match system.system.number(&key, "NtfsDisableLastAccessUpdate")? {
        Some(value) if value & NO_LAST_ACCESS == 0 => Ok(vec![finding(
            FindingKind::LastAccess,
            Severity::Note,
            FILE_SYSTEM,
            &format!(
                "times of the last access to files are written (NtfsDisableLastAccessUpdate is {value:#x})"
            ),
            "reads of files cause writes, which take space in the write cache of every clone",
            "fsutil behavior set disablelastaccess 1",
        )]),
        _ => Ok(vec![]),
    }
}

/// Returns the finding about scheduled defragmentation, if any.
pub fn defragmentation(system: &WindowsSystem) -> Result<Vec<Finding>, NtfsError> {
    let task = system.text_of("/Windows/System32/Tasks/Microsoft/Windows/Defrag/ScheduledDefrag")?;
    if !task.is_some_and(|task| is_enabled(&task)) {
        return Ok(vec![]);
    }
    Ok(vec![finding(
        FindingKind::Defragmentation,
        Severity::Warning,
        r"C:\Windows\System32\Tasks\Microsoft\Windows\Defrag\ScheduledDefrag",
        "the task ScheduledDefrag is enabled",
        "it moves files, and so writes blocks of the base image into the write cache of every clone",
        r#"Disable-ScheduledTask -TaskPath \Microsoft\Windows\Defrag\ -TaskName ScheduledDefrag"#,
    )])
}

/// Whether a task runs: unless its settings say that it does not.
fn is_enabled(task: &str) -> bool {
    let settings = task.split_once("<Settings>").and_then(|(_, rest)| rest.split_once("</Settings>"));
    let enabled = settings.and_then(|(settings, _)| settings.split_once("<Enabled>"));
    let value = enabled.and_then(|(_, rest)| rest.split_once('<')).map(|(value, _)| value.trim());
    !matches!(value, Some("false" | "0"))
}

/// Returns the findings about hibernation, and about a volume that needs chkdsk.
pub fn hibernation(system: &WindowsSystem) -> Result<Vec<Finding>, NtfsError> {
    let new = |severity, path: &str, what: &str, why: &str, remedy: &str| {
        finding(FindingKind::Hibernation, severity, path, what, why, remedy)
    };
    let mut found = Vec::new();
    if system.volume.is_dirty()? {
        let why = "Windows examines and repairs the disk at each start of a clone, which takes time and writes to it";
        let remedy = "chkdsk C: /f, shut Windows down, and commit it again";
        found.push(new(Severity::Warning, "C:", "the volume is marked for chkdsk", why, remedy));
    }
    let off = "powercfg /h off, and shut Windows down";
    let file = system.volume.open_file("/hiberfil.sys")?;
    let head = file.as_ref().map(|file| file.head(HIBERNATED.len())).transpose()?.unwrap_or_default();
    if head.eq_ignore_ascii_case(HIBERNATED) {
        let why =
            "clones resume one session whose memory does not know of their disks, which damages their files";
        found.push(new(Severity::Error, r"C:\hiberfil.sys", "Windows is hibernated", why, off));
        return Ok(found);
    }
    let power = system.current(r"Control\Power");
    let enabled = system.system.number(&power, "HibernateEnabled")?;
    if enabled.unwrap_or(u32::from(file.is_some())) == 0 {
        return Ok(found);
    }
    let session = system.current(r"Control\Session Manager\Power");
    let what = match system.system.number(&session, "HiberbootEnabled")? {
        Some(1..) => "hibernation and fast startup are enabled",
        _ => "hibernation is enabled",
    };
    let why =
        "a clone that hibernates, or shuts down with fast startup, writes its memory into the write cache";
    let path = r"HKLM\SYSTEM\CurrentControlSet\Control\Power";
    found.push(new(Severity::Warning, path, what, why, off));
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::is_enabled;

    #[test]
    fn a_task_is_enabled_unless_its_settings_say_otherwise() {
        let task = |settings: &str| {
            format!(
                "<Task><Triggers><T><Enabled>false</Enabled></T></Triggers><Settings>{settings}</Settings></Task>"
            )
        };
        assert!(!is_enabled(&task("<A>true</A><Enabled>false</Enabled>")));
        assert!(!is_enabled(&task("<Enabled> 0 </Enabled>")));
        assert!(is_enabled(&task("<Enabled>true</Enabled>")));
        assert!(is_enabled(&task("")) && is_enabled("") && is_enabled("<Settings><Enabled>"));
    }
}
