//! Files of a version: `images/NAME/N/disk.raw` and `digests` in a store's folder. Owns their names, creation and
//! removal.
//!
//! Invariant: a folder without the word `partial` in its name is complete and durable; nothing in it is ever written.

use crate::error::HostError;
use spillway_api::{ErrorCode, Name};
use std::fs::{self, File, Permissions};
use std::io::{self, BufReader, BufWriter};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

const DISK: &str = "disk.raw";
const DIGESTS: &str = "digests";
/// File that was downloaded, until it has been converted to the disk.
const DOWNLOAD: &str = "download";

/// Paths of a version's files.
#[derive(Clone, Debug)]
pub struct VersionFiles {
    folder: PathBuf,
    partial: PathBuf,
}

impl VersionFiles {
    /// Returns the paths below a store's folder.
    pub fn of(store: &Path, image: &Name, version: u32) -> VersionFiles {
        let image = store.join("images").join(image.as_str());
        VersionFiles {
            folder: image.join(version.to_string()),
            partial: image.join(format!("{version}.partial")),
        }
    }

    /// Disk of a ready version.
    pub fn disk(&self) -> PathBuf {
        self.folder.join(DISK)
    }

    /// List of digests of a ready version.
    pub fn digests(&self) -> PathBuf {
        self.folder.join(DIGESTS)
    }

    /// Disk of an unfinished version.
    pub fn partial_disk(&self) -> PathBuf {
        self.partial.join(DISK)
    }

    /// Creates an empty disk, which reads as zeroes.
    pub fn begin(&self, size_bytes: u64) -> Result<File, HostError> {
        let make = || {
            fs::create_dir_all(&self.partial)?;
            let disk = self.partial_disk();
            let file = File::options().read(true).write(true).create_new(true).open(disk)?;
            file.set_len(size_bytes)?;
            Ok(file)
        };
        make().map_err(|e| self.failed("cannot be made", e))
    }

    /// Creates the folder of the version, with an empty file for a download.
    pub fn begin_download(&self) -> Result<PathBuf, HostError> {
        let path = self.partial.join(DOWNLOAD);
        let made = fs::create_dir_all(&self.partial).and_then(|()| File::create_new(&path));
        made.map(|_| path).map_err(|e| self.failed("cannot be made", e))
    }

    /// Removes a download, which has been converted.
    pub fn end_download(&self) -> Result<(), HostError> {
        fs::remove_file(self.partial.join(DOWNLOAD)).map_err(|e| self.failed("cannot be finished", e))
    }

    /// Creates the unfinished list of digests.
    pub fn begin_list(&self) -> Result<BufWriter<File>, HostError> {
        let list = File::create_new(self.partial.join(DIGESTS));
        list.map(BufWriter::new).map_err(|e| self.failed("cannot be made", e))
    }

    /// Creates the unfinished list of digests of a version that has no disk.
    pub fn begin_streamed(&self) -> Result<(File, PathBuf), HostError> {
        let path = self.partial.join(DIGESTS);
        let made = fs::create_dir_all(&self.partial).and_then(|()| File::create_new(&path));
        made.map(|file| (file, path)).map_err(|e| self.failed("cannot be made", e))
    }

    /// Makes the version complete and durable. Returns the space that it uses.
    pub fn finish(&self, disk: &File, list: BufWriter<File>) -> Result<u64, HostError> {
        let list = list.into_inner().map_err(io::IntoInnerError::into_error);
        list.and_then(|list| self.keep(&[disk, &list])).map_err(|e| self.failed("cannot be finished", e))
    }

    /// The same for a version that has no disk.
    pub fn finish_streamed(&self, list: &File) -> Result<u64, HostError> {
        self.keep(&[list]).map_err(|e| self.failed("cannot be finished", e))
    }

    fn keep(&self, files: &[&File]) -> io::Result<u64> {
        for file in files {
            file.set_permissions(Permissions::from_mode(0o444))?;
            file.sync_all()?;
        }
        sync(&self.partial)?;
        fs::rename(&self.partial, &self.folder)?;
        // Sync the image's folder, `images`, and the store's folder.
        self.folder.ancestors().skip(1).take(3).try_for_each(sync)?;
        files.iter().try_fold(0, |bytes, file| Ok(bytes + file.metadata()?.blocks() * 512))
    }

    /// Opens the disk of a ready version and its list of digests.
    pub fn open(&self) -> Result<(File, BufReader<File>), HostError> {
        let open = |name| File::open(self.folder.join(name)).map_err(|e| self.failed("cannot be read", e));
        Ok((open(DISK)?, BufReader::new(open(DIGESTS)?)))
    }

    /// Removes all files of the version, complete or not. The image's folder stays for its other versions, or until the
    /// next start.
    pub fn remove(&self) -> Result<(), HostError> {
        let absent = |e: &io::Error| e.kind() == io::ErrorKind::NotFound;
        let remove = || {
            // Rename first: a partly removed version must not pass for a complete one.
            fs::rename(&self.folder, &self.partial).or_else(|e| if absent(&e) { Ok(()) } else { Err(e) })?;
            fs::remove_dir_all(&self.partial).or_else(|e| if absent(&e) { Ok(()) } else { Err(e) })?;
            let image = self.folder.parent().unwrap_or(&self.folder);
            sync(image).or_else(|e| if absent(&e) { Ok(()) } else { Err(e) })
        };
        remove().map_err(|e| self.failed("cannot be removed", e))
    }

    /// Error of the file system.
    pub fn failed(&self, what: &str, error: io::Error) -> HostError {
        let code = match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorCode::Exhausted,
            _ => ErrorCode::Internal,
        };
        HostError::new(code, format!("{} {what}: {error}", self.folder.display()))
    }

    /// Error for damaged content.
    pub fn damaged(&self, why: String) -> HostError {
        HostError::new(ErrorCode::Damaged, format!("{} is damaged: {why}", self.folder.display()))
    }
}

/// Highest number of a version with files in a store, recorded or not; 0 if there is none. After a restore of older
/// records there may be unrecorded ones.
pub fn highest(store: &Path, image: &Name) -> u32 {
    let versions = folders(&store.join("images").join(image.as_str())).unwrap_or_default();
    let number = |path: &PathBuf| path.file_stem().and_then(|name| name.to_str()?.parse().ok());
    versions.iter().filter_map(number).max().unwrap_or(0)
}

/// Removes unfinished folders of an earlier daemon, and empty folders of images. Complete versions stay, whoever made
/// them.
pub fn sweep(store: &Path) -> io::Result<()> {
    let images = store.join("images");
    for image in folders(&images)? {
        for version in folders(&image)? {
            if version.extension().is_some_and(|extension| extension == "partial") {
                fs::remove_dir_all(&version)?;
            }
        }
        // This fails if the folder is not empty.
        let _ = fs::remove_dir(&image);
    }
    Ok(())
}

fn folders(path: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut folders = Vec::new();
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            folders.push(entry.path());
        }
    }
    Ok(folders)
}

fn sync(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}
