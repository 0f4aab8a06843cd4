//! Templates of formatted scratch disks, from which each reset copies the few blocks that are written. Owns their folder in a
//! store of class `temp`.
//!
//! Invariant: a file whose name ends in `.raw` is a complete template of the format and the size in its name; none of them
//! outlives the daemon.

use super::super::belongings::{failed, remove};
use super::partitions;
use crate::confined::Confined;
use crate::copying;
use crate::error::HostError;
use spillway_api::{ErrorCode, FileSystem, ScratchFormat};
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Folder for templates in a store.
pub const FOLDER: &str = "scratch-templates";
/// Number of templates that are kept. One of NTFS has 66 MiB for a disk of 16 GiB, and 193 MiB for one of 4 TiB.
const MOST_TEMPLATES: usize = 8;
/// Longest time to make a file system. It takes less than a second.
const DEADLINE: Duration = Duration::from_secs(60);
/// No such file: mke2fs then uses the settings that it was built with, whatever the host has.
const NO_CONFIGURATION: &str = "/nonexistent";

/// Returns the template for this format and size. Makes it if it does not exist.
pub fn template(store: &Path, format: &ScratchFormat, bytes: u64) -> Result<File, HostError> {
    let folder = store.join(FOLDER);
    let (word, label) = (format.system().word(), format.label());
    let path = folder.join(format!("{word}-{label}-{bytes}.raw"));
    match File::open(&path) {
        Ok(template) => return Ok(template),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(failed(&path, "cannot be read", e)),
    }
    let create = || DirBuilder::new().recursive(true).mode(0o700).create(&folder);
    create().map_err(|e| failed(&folder, "cannot be made", e))?;
    make_space(&folder)?;
    // Two starts that need the same one make it twice, and the last one stays.
    let [volume, disk] = ["volume", "disk"].map(|kind| WorkFile::new(&folder, kind));
    let (volume_file, disk_file) = (volume.create(partitions::volume_bytes(bytes))?, disk.create(bytes)?);
    make_file_system(&volume.0, format)?;
    let cannot = |e| failed(&path, "cannot be made", e);
    partitions::write(&disk_file, format.system(), bytes).map_err(cannot)?;
    let range = 0..partitions::volume_bytes(bytes);
    copying::copy(&volume_file, range, &disk_file, partitions::START_BYTES, |_| Ok(()), cannot)?;
    fs::rename(&disk.0, &path).map_err(cannot)?;
    Ok(disk_file)
}

/// Formats a file.
fn make_file_system(volume: &Path, format: &ScratchFormat) -> Result<(), HostError> {
    let start_sectors = (partitions::START_BYTES / partitions::SECTOR_BYTES).to_string();
    let (program, options) = match format.system() {
        // What it cannot learn of a file: the place of the partition, and a disk's geometry.
        FileSystem::Ntfs => (
            "mkntfs",
            vec!["-F", "-Q", "-q", "-s", "512", "-c", "4096", "-H", "255", "-S", "63", "-p", &start_sectors],
        ),
        FileSystem::Ext4 => {
            let lazy = "lazy_itable_init=1,lazy_journal_init=1,nodiscard";
            ("mke2fs", vec!["-F", "-q", "-t", "ext4", "-m", "0", "-E", lazy])
        }
    };
    let mut run = Confined::new(program, DEADLINE).env("MKE2FS_CONFIG", NO_CONFIGURATION).may_write(volume);
    for option in options {
        run = run.arg(option);
    }
    let done = run.arg("-L").arg(format.label()).arg(volume).run(|_| Ok(()))?;
    if !done.success {
        let message = format!("{program} cannot format a scratch disk: {}", done.complaint);
        return Err(HostError::new(ErrorCode::Internal, message));
    }
    Ok(())
}

/// Removes the oldest templates until there is space for another one.
fn make_space(folder: &Path) -> Result<(), HostError> {
    let cannot = |e| failed(folder, "cannot be read", e);
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(cannot)? {
        let path = entry.map_err(cannot)?.path();
        if path.extension().is_some_and(|extension| extension == "raw") {
            // Another start may have removed it meanwhile.
            let made =
                fs::metadata(&path).and_then(|found| found.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
            found.push((made, path));
        }
    }
    found.sort();
    let surplus = (found.len() + 1).saturating_sub(MOST_TEMPLATES);
    found.iter().take(surplus).try_for_each(|(_, path)| remove(path))
}

/// A file that is removed with this, unless it was renamed.
struct WorkFile(PathBuf);

impl WorkFile {
    fn new(folder: &Path, kind: &str) -> WorkFile {
        WorkFile(folder.join(format!("{}.{kind}", uuid::Uuid::new_v4())))
    }

    fn create(&self, bytes: u64) -> Result<File, HostError> {
        let file = File::options().create_new(true).read(true).write(true).mode(0o600).open(&self.0);
        let create = file.and_then(|file| file.set_len(bytes).map(|()| file));
        create.map_err(|e| failed(&self.0, "cannot be made", e))
    }
}

impl Drop for WorkFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
