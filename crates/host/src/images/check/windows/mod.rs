//! Checks Windows in an image: its NTFS volume and its registry. Owns how they are opened and read; the rules are in
//! the modules below.
//!
//! Invariant: the image is untrusted. What reads it (`spillway_ntfs`) trusts no length, and fails when the time is up; a
//! rule that cannot read what it needs says so, and the other rules go on.

mod agents;
mod disk;
mod drivers;
mod setup;

#[cfg(test)]
pub mod tests;

use super::rules::finding;
use super::volumes::Extent;
use crate::error::HostError;
use spillway_api::{ErrorCode, Finding, FindingKind, Severity, WindowsVersion};
use spillway_ntfs::{ByteSource, Hive, NtfsError, NtfsFile, NtfsVolume};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Instant;

/// Folder of the registry's hives.
const HIVES: &str = "/Windows/System32/config";
/// Largest file that is read as text.
const MOST_TEXT_BYTES: usize = 256 << 10;
/// Longest text of an image that is shown, in characters.
const MOST_SHOWN: usize = 80;

/// An NTFS volume in an image.
pub type Volume<'a> = NtfsVolume<DiskVolume<'a>>;

/// Place of a volume on a disk, to be read until some time.
pub struct DiskVolume<'a> {
    disk: &'a File,
    extent: &'a Extent,
    until: Instant,
}

impl ByteSource for DiskVolume<'_> {
    fn len_bytes(&self) -> u64 {
        self.extent.size_bytes
    }

    fn read_at(&self, at: u64, buffer: &mut [u8]) -> Result<(), NtfsError> {
        let end = at.checked_add(buffer.len() as u64).filter(|end| *end <= self.extent.size_bytes);
        let at = end.and_then(|_| self.extent.offset_bytes.checked_add(at));
        let at = at.filter(|_| Instant::now() < self.until).ok_or(NtfsError::Unreadable)?;
        self.disk.read_exact_at(buffer, at).map_err(|_| NtfsError::Unreadable)
    }
}

/// Opens an NTFS volume.
pub fn open<'a>(disk: &'a File, extent: &'a Extent, until: Instant) -> Result<Volume<'a>, NtfsError> {
    NtfsVolume::open(DiskVolume { disk, extent, until })
}

/// Whether Windows starts from this volume.
pub fn is_system(volume: &Volume) -> Result<bool, NtfsError> {
    Ok(volume.find(&format!("{HIVES}/SYSTEM"))?.is_some_and(|found| !found.is_folder))
}

/// A hive of the registry.
pub struct Registry<'a>(Hive<NtfsFile<'a, DiskVolume<'a>>>);

impl Registry<'_> {
    /// Whether a key exists.
    fn has(&self, key: &str) -> Result<bool, NtfsError> {
        Ok(self.0.key(key)?.is_some())
    }

    fn value(&self, key: &str, name: &str) -> Result<Option<spillway_ntfs::Value>, NtfsError> {
        self.0.key(key)?.map_or(Ok(None), |key| self.0.value(&key, name))
    }

    /// Returns a number; none if there is no such value, or it is no number.
    fn number(&self, key: &str, name: &str) -> Result<Option<u32>, NtfsError> {
        Ok(self.value(key, name)?.and_then(|value| value.number()))
    }

    /// Returns a text; none if there is no such value, or it is no text.
    fn text(&self, key: &str, name: &str) -> Result<Option<String>, NtfsError> {
        Ok(self.value(key, name)?.and_then(|value| value.text()))
    }

    /// Returns a list of texts, which is empty if there is no such value.
    fn texts(&self, key: &str, name: &str) -> Result<Vec<String>, NtfsError> {
        Ok(self.value(key, name)?.and_then(|value| value.texts()).unwrap_or_default())
    }
}

/// Windows in an image.
pub struct WindowsSystem<'a> {
    volume: &'a Volume<'a>,
    system: Registry<'a>,
    software: Option<Registry<'a>>,
    security: Option<Registry<'a>>,
    /// Key of the settings that the next start uses, in the hive SYSTEM.
    control_set: String,
}

impl WindowsSystem<'_> {
    /// Path of a key below the settings that the next start uses.
    fn current(&self, key: &str) -> String {
        format!(r"{}\{key}", self.control_set)
    }

    /// Returns the beginning of a file's text; none if there is no such file.
    fn text_of(&self, path: &str) -> Result<Option<String>, NtfsError> {
        let file = self.volume.open_file(path)?;
        file.map(|file| file.head(MOST_TEXT_BYTES).map(|bytes| decoded(&bytes))).transpose()
    }
}

type Rule = fn(&WindowsSystem) -> Result<Vec<Finding>, NtfsError>;

/// All rules, with the place that each of them is about.
const RULES: [(&str, Rule); 11] = [
    (r"HKLM\SOFTWARE\Microsoft\Windows\CurrentVersion\Setup\State", setup::generalized),
    (r"HKLM\SYSTEM\Setup", setup::domain),
    (r"HKLM\SYSTEM\CurrentControlSet\Services\viostor", drivers::disk),
    (r"HKLM\SYSTEM\CurrentControlSet\Services\netkvm", drivers::network),
    (r"HKLM\SYSTEM\CurrentControlSet\Control\Session Manager\Memory Management", disk::page_file),
    (r"HKLM\SYSTEM\CurrentControlSet\Control\FileSystem", disk::discard),
    (r"HKLM\SYSTEM\CurrentControlSet\Control\FileSystem", disk::last_access),
    (r"C:\Windows\System32\Tasks\Microsoft\Windows\Defrag\ScheduledDefrag", disk::defragmentation),
    (r"C:\hiberfil.sys", disk::hibernation),
    (r"C:\Program Files\Cloudbase Solutions\Cloudbase-Init", agents::cloudbase_init),
    (r"HKLM\SYSTEM\CurrentControlSet\Services\QEMU-GA", agents::guest_agent),
];

/// Returns the version of Windows on this volume, and what breaks its clones.
pub fn findings(
    volume: &Volume,
    until: Instant,
) -> Result<(Option<WindowsVersion>, Vec<Finding>), HostError> {
    let mut found = Vec::new();
    let [system, software, security] = ["SYSTEM", "SOFTWARE", "SECURITY"].map(|name| {
        let hive = hive(volume, name);
        let why = match &hive {
            Err(why) => why.to_string(),
            Ok(Some(Registry(hive))) if hive.is_dirty() => "Windows was not shut down".to_owned(),
            Ok(None) if name == "SOFTWARE" => "it is missing".to_owned(),
            Ok(_) => return hive.ok().flatten(),
        };
        found.push(unread(&format!(r"C:\Windows\System32\config\{name}"), &why));
        hive.ok().flatten()
    });
    let mut version = None;
    if let Some(system) = system {
        // The next start uses the set `Default`; `Current` is the one of the start before.
        let select = |name| system.number("Select", name).ok().flatten().filter(|set| *set != 0);
        let next = select("Default").or_else(|| select("Current")).unwrap_or(1);
        let control_set = format!("ControlSet{next:03}");
        let system = WindowsSystem { volume, system, software, security, control_set };
        version = system.software.as_ref().and_then(|software| setup::version(software).ok());
        for (place, rule) in RULES {
            found.extend(rule(&system).unwrap_or_else(|why| vec![unread(place, &why.to_string())]));
        }
    }
    check_time(until)?;
    Ok((version, found))
}

/// Returns an error if the time is up, when reads fail whatever the image is.
pub fn check_time(until: Instant) -> Result<(), HostError> {
    match Instant::now() < until {
        true => Ok(()),
        false => Err(HostError::new(ErrorCode::Internal, "NTFS: it took too long")),
    }
}

fn hive<'a>(volume: &'a Volume<'a>, name: &str) -> Result<Option<Registry<'a>>, NtfsError> {
    let file = volume.open_file(&format!("{HIVES}/{name}"))?;
    file.map(|file| Hive::open(file).map(Registry)).transpose()
}

/// The finding that something could not be read.
fn unread(path: &str, why: &str) -> Finding {
    finding(
        FindingKind::NotChecked,
        Severity::Warning,
        path,
        &format!("it could not be examined, or may be out of date: {why}"),
        "what the check says of Windows may be incomplete",
        "start the machine of the image, shut it down (not by hibernation), and commit it again",
    )
}

/// Decodes a text file of Windows.
fn decoded(bytes: &[u8]) -> String {
    let utf16 = |bytes: &[u8]| {
        let units: Vec<u16> =
            bytes.chunks_exact(2).map(|unit| u16::from_le_bytes([unit[0], unit[1]])).collect();
        String::from_utf16_lossy(&units)
    };
    match bytes {
        [0xff, 0xfe, rest @ ..] => utf16(rest),
        [0xef, 0xbb, 0xbf, rest @ ..] => String::from_utf8_lossy(rest).into_owned(),
        // Without a mark: every second byte of plain English is zero.
        [_, 0, ..] => utf16(bytes),
        _ => String::from_utf8_lossy(bytes).into_owned(),
    }
}

/// Makes a text of the image safe to be shown.
fn shown(text: &str) -> String {
    text.chars().take(MOST_SHOWN).collect::<String>().escape_debug().to_string()
}
