//! Converts an untrusted file to a raw disk, with qemu-img in a confined process. Owns the rules about what is refused.
//!
//! Invariant: the format is the requested one; a file that refers to others (a backing file, a data file, extents) is
//! refused, and qemu-img could not open them anyway. No QEMU program can open the file for writing meanwhile, and writes
//! of any other program are detected afterwards.

use super::complaint::in_plain_words;
use super::source;
use crate::confined::{Confined, path_of};
use crate::error::HostError;
use crate::operations::Progress;
use rustix::fs::{FileType, Mode, OFlags};
use serde::Deserialize;
use spillway_api::{ErrorCode, SourceFormat};
use spillway_control::bytes;
use spillway_image::{keep_writers_out, qcow2_damage, size_fault};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Longest time for qemu-img to read a header.
const LOOK: Duration = Duration::from_secs(30);
/// Longest time for a conversion: a day.
const CONVERSION: Duration = Duration::from_secs(86_400);
/// Space that must stay free; a twentieth of the file system if that is less.
const LEAST_FREE_BYTES: u64 = 1 << 30;

/// Used part of `qemu-img info --output=json`.
#[derive(Deserialize)]
struct QemuImgInfo {
    #[serde(rename = "virtual-size")]
    virtual_size: u64,
    #[serde(rename = "backing-filename")]
    backing: Option<String>,
    #[serde(default)]
    encrypted: bool,
    #[serde(rename = "format-specific")]
    specific: Option<FormatDetails>,
}

#[derive(Deserialize)]
struct FormatDetails {
    #[serde(default)]
    data: FormatData,
}

#[derive(Default, Deserialize)]
struct FormatData {
    #[serde(rename = "data-file")]
    data_file: Option<String>,
    #[serde(default)]
    extents: Vec<ExtentFile>,
}

#[derive(Deserialize)]
struct ExtentFile {
    filename: Option<String>,
}

/// Result of an import.
#[derive(Debug)]
pub struct Conversion {
    /// Size of the disk.
    pub size_bytes: u64,
    /// Notes about what the user may not expect.
    pub notes: Vec<String>,
}

/// A file that is being imported. It is opened once, so that the checked content is the converted one. While this exists
/// it is locked against writers, like a base image that is served.
pub struct ImportSource {
    file: File,
    format: SourceFormat,
    /// Path or address, for people.
    path: PathBuf,
    /// Length and time of the last write when it was opened. Writers that ignore QEMU's locks change them.
    opened: (u64, Option<SystemTime>),
}

impl ImportSource {
    /// Opens a regular file. Nothing else is opened, since that alone may have effects.
    pub fn open(path: &Path, format: SourceFormat) -> Result<ImportSource, HostError> {
        let failed = |e: rustix::io::Errno| {
            let e = io::Error::from(e);
            HostError::invalid(format!("{}: {e}: spillwayd must be able to read it", path.display()))
        };
        if !path.is_absolute() {
            return Err(HostError::invalid(format!("'{}': the path must be absolute", path.display())));
        }
        let found = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).map_err(failed)?;
        let kind = rustix::fs::fstat(&found).map_err(failed)?;
        if !FileType::from_raw_mode(kind.st_mode).is_file() {
            return Err(HostError::invalid(format!("{}: not a regular file", path.display())));
        }
        let again = format!("/proc/self/fd/{}", found.as_raw_fd());
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
        let file: File = rustix::fs::open(again, flags, Mode::empty()).map_err(failed)?.into();
        keep_writers_out(&file, path).map_err(|e| HostError::new(ErrorCode::InUse, e.to_string()))?;
        let opened = last_write(&file);
        Ok(ImportSource { file, format, path: path.to_owned(), opened })
    }

    /// Opens a file that was downloaded from this address.
    pub fn open_download(path: &Path, url: &str, format: SourceFormat) -> Result<ImportSource, HostError> {
        let source = ImportSource::open(path, format)?;
        Ok(ImportSource { path: PathBuf::from(url), ..source })
    }

    /// Refuses a file that was written to since it was opened: its content may be inconsistent.
    fn check_unchanged(&self) -> Result<(), HostError> {
        if last_write(&self.file) == self.opened {
            return Ok(());
        }
        let path = self.path.display();
        let message = format!(
            "{path}: another program wrote to it while it was imported: stop that program, and import it again"
        );
        Err(HostError::new(ErrorCode::InUse, message))
    }

    /// Checks whether the file can be imported, and what results.
    pub fn look(&self) -> Result<Conversion, HostError> {
        let own = source::look(&self.file, self.format).map_err(|why| self.refuse(&why))?;
        if self.format == SourceFormat::Qcow2
            && let Some(damage) = qcow2_damage(&self.file, &self.path)
        {
            return Err(HostError::invalid(damage.to_string()));
        }
        let name = path_of(&self.file);
        let outcome = Confined::new("qemu-img", LOOK)
            .arg("info")
            .arg("--output=json")
            .arg("-U")
            .arg("-f")
            .arg(self.format.as_str())
            .arg(&name)
            .may_read(&self.file)
            .run(|_| Ok(()))?;
        if !outcome.success {
            return Err(self.refuse(&in_plain_words(&outcome.complaint, &name)));
        }
        let info: QemuImgInfo = serde_json::from_slice(&outcome.said)
            .map_err(|e| self.refuse(&format!("qemu-img says what is not understood: {e}")))?;
        if info.backing.is_some() {
            return Err(self.refuse("it has a backing file: make one file of both first (qemu-img convert)"));
        }
        if info.encrypted {
            return Err(self.refuse("it is encrypted: decrypt it first (qemu-img convert)"));
        }
        let data = info.specific.map(|s| s.data).unwrap_or_default();
        let elsewhere = data.extents.iter().filter_map(|e| e.filename.as_deref()).any(|f| f != name);
        if data.data_file.is_some() || elsewhere {
            return Err(self.refuse("its content is in another file: make it one (qemu-img convert)"));
        }
        if info.virtual_size == 0 {
            return Err(self.refuse("its disk has no bytes: was it copied whole?"));
        }
        if let Some(fault) = size_fault(info.virtual_size) {
            return Err(self.refuse(&format!("its disk {fault}: make it smaller (qemu-img resize --shrink)")));
        }
        // A disk consists of whole sectors.
        let size_bytes = info.virtual_size.next_multiple_of(512);
        let resized = own.recorded_bytes.and_then(|recorded| self.resized(recorded, size_bytes));
        Ok(Conversion { size_bytes, notes: own.note.into_iter().chain(resized).collect() })
    }

    /// Returns a note if the conversion changes the size that the file records.
    fn resized(&self, recorded_bytes: u64, size_bytes: u64) -> Option<String> {
        let (before, after) = (bytes(recorded_bytes), bytes(size_bytes));
        let sizes = format!(
            "the file records a disk of {recorded_bytes} bytes ({before}), and the version has {size_bytes} ({after})"
        );
        match size_bytes {
            _ if size_bytes == recorded_bytes => None,
            _ if self.format == SourceFormat::Vpc => Some(format!(
                "{sizes}: of a VHD qemu-img counts whole cylinders, as Virtual PC does, unless Hyper-V made it"
            )),
            _ if size_bytes > recorded_bytes => Some(format!("{sizes}: zeroes fill its last sector")),
            _ => Some(format!("{sizes}: what lies beyond is left out")),
        }
    }

    /// Writes the disk to an existing file that reads as zeroes; zeroes become holes. Counts as half of the progress.
    pub fn convert(&self, to: &Path, size_bytes: u64, progress: &Progress) -> Result<(), HostError> {
        // Nothing else is opened, whatever the file refers to by now.
        let mut options = serde_json::json!({
            "driver": self.format.as_str(),
            "file": { "driver": "file", "locking": "off", "filename": path_of(&self.file) },
        });
        if matches!(self.format, SourceFormat::Qcow2 | SourceFormat::Vmdk) {
            options["backing"] = serde_json::Value::Null;
        }
        let folder = to.parent().unwrap_or(to);
        let mut line = Vec::new();
        let outcome = Confined::new("qemu-img", CONVERSION)
            .arg("convert")
            .arg("-p")
            .arg("-n")
            .arg("-O")
            .arg("raw")
            .arg("-S")
            .arg("4k")
            .arg("--target-is-zero")
            .arg(format!("json:{options}"))
            .arg(to)
            .may_read(&self.file)
            // Allow the folder, not the file: a rule on the file would keep its content for a while after it is deleted.
            .may_write(folder)
            .run(|said| {
                line.extend_from_slice(said);
                if let Some(percent) = last_percent(&line) {
                    progress.set_done((size_bytes as f64 * percent / 100.0) as u64);
                }
                let surplus = line.len().saturating_sub(64);
                line.drain(..surplus);
                progress.goes_on()?;
                has_room(folder)
            })?;
        // Check this before any error that a half-written file may have caused.
        self.check_unchanged()?;
        if outcome.success {
            return Ok(());
        }
        let complaint = outcome.complaint;
        if complaint.contains("No space left on device") {
            return Err(no_room(folder));
        }
        Err(self.refuse(&in_plain_words(&complaint, &path_of(&self.file))))
    }

    fn refuse(&self, why: &str) -> HostError {
        let format = self.format.as_str();
        HostError::invalid(format!("{}: not imported as {format}: {why}", self.path.display()))
    }
}

/// Length of a file, and the time of its last write if its file system records that.
fn last_write(file: &File) -> (u64, Option<SystemTime>) {
    file.metadata().map_or((0, None), |found| (found.len(), found.modified().ok()))
}

/// Refuses to fill a file system completely: that would harm everything on it, the daemon's records first.
pub fn has_room(folder: &Path) -> Result<(), HostError> {
    let Ok(system) = rustix::fs::statvfs(folder) else { return Ok(()) };
    let [all, free] = [system.f_blocks, system.f_bavail].map(|blocks| blocks.saturating_mul(system.f_frsize));
    if free < (all / 20).min(LEAST_FREE_BYTES) { Err(no_room(folder)) } else { Ok(()) }
}

fn no_room(folder: &Path) -> HostError {
    let message =
        format!("{}: its file system is all but full: make space in the image store", folder.display());
    HostError::new(ErrorCode::Exhausted, message)
}

/// Parses the last complete percentage of the form `(12.34/100%)`.
fn last_percent(said: &[u8]) -> Option<f64> {
    let said = String::from_utf8_lossy(said);
    let (before, _) = said.rsplit_once("/100%")?;
    let (_, number) = before.rsplit_once('(')?;
    number.trim().parse().ok().filter(|n| (0.0..=100.0).contains(n))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    /// QEMU's locks keep QEMU's programs out. Others do not ask for them.
    #[test]
    fn what_another_program_writes_to_meanwhile_is_not_imported() {
        let dir = tempfile::tempdir().unwrap();
        let [path, to] = ["disk", "to"].map(|name| dir.path().join(name));
        let writer = File::create(&path).unwrap();
        writer.set_len(1 << 20).unwrap();
        // Long ago: two writes within a tick of the clock have the same time.
        writer.set_modified(SystemTime::UNIX_EPOCH).unwrap();
        let convert = |before: &dyn Fn()| {
            File::create(&to).unwrap().set_len(1 << 20).unwrap();
            let source = ImportSource::open(&path, SourceFormat::Raw).unwrap();
            let size_bytes = source.look().unwrap().size_bytes;
            before();
            source.convert(&to, size_bytes, &Progress::default())
        };
        convert(&|| ()).unwrap();
        let error = convert(&|| writer.write_all_at(&[7; 512], 4096).unwrap()).unwrap_err();
        let says = error.message.starts_with(path.to_str().unwrap()) && error.message.contains("wrote to it");
        assert!(error.code == ErrorCode::InUse && says, "{error:?}");
        let error = convert(&|| writer.set_len(4096).unwrap()).unwrap_err();
        assert_eq!(error.code, ErrorCode::InUse, "it has become shorter: {error:?}");
        convert(&|| ()).unwrap();
    }

    #[test]
    fn progress_is_read_from_what_qemu_img_says() {
        assert_eq!(last_percent(b"    (1.00/100%)\r    (12.34/100%)\r    (13"), Some(12.34));
        for said in ["", "(", "(x/100%)", "100%", "(101.0/100%)"] {
            assert_eq!(last_percent(said.as_bytes()), None);
        }
    }
}
