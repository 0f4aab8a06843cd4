//! The file of mode `persistent` while nobody serves it: opened, locked, checked, read.
//!
//! Owns what can be said of it without changing anything that it holds. Invariant: nobody else serves the disk while the file is
//! held here.

use crate::error::{ErrorKind, SupervisorError};
use crate::{bytes, named, page_cache};
use rustix::fs::{IFlags, Mode, OFlags};
use rustix::io::Errno;
use spillway_layout::persistent_file::{
    DATA_AT, DURABLE_AT, HEADER_BYTES, HEADERS_AT, Header, HeaderFault, MAX_IDENTITY_BYTES, SEAL_AT,
};
use spillway_layout::{BLOCK_BYTES, FileMap, RESET_MARK};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Bytes of a block.
pub const BLOCK: u64 = BLOCK_BYTES as u64;
/// Bytes that are read and written at a time.
pub const CHUNK: usize = 1 << 20;

/// What says which image a disk was made from, by `--image-id`.
pub fn option_identity(text: &str) -> Result<String, SupervisorError> {
    let identity = format!("id={text}");
    if text.is_empty() || text.contains(char::is_control) || identity.len() > MAX_IDENTITY_BYTES {
        return Err(SupervisorError::new(
            ErrorKind::Options,
            format!(
                "--image-id is a line of at most {} bytes of text: shorten it",
                MAX_IDENTITY_BYTES - "id=".len()
            ),
        ));
    }
    Ok(identity)
}

/// The file of a disk, locked; what it says of itself, if it said anything before.
#[derive(Debug)]
pub struct PersistentFile {
    file: File,
    header: Option<Header>,
}

impl PersistentFile {
    /// Opens it, or makes it without a name yet.
    pub fn open(path: &Path) -> Result<PersistentFile, SupervisorError> {
        match named::open(path, OFlags::empty())? {
            Some(file) => {
                named::lock(&file, path)?;
                let header = read_header(&file, path)?;
                let least = DATA_AT + header.size_bytes.next_multiple_of(BLOCK) + BLOCK;
                let len = file.metadata().map_err(|e| cannot("measure", path, e))?.len();
                if len < least {
                    return Err(damaged(
                        path,
                        &format!("it has {} and should have {}: it was cut short", bytes(len), bytes(least)),
                    ));
                }
                Ok(PersistentFile { file, header: Some(header) })
            }
            None => {
                let dir = named::directory(path)?;
                let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::TMPFILE;
                let made = match rustix::fs::open(dir, flags, Mode::RUSR | Mode::WUSR) {
                    Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::ISDIR | Errno::NOENT) => {
                        return Err(SupervisorError::new(
                            ErrorKind::Create,
                            format!(
                                "disk {}: the file system of its folder has no O_TMPFILE: name a folder on \
                                 ext4 or XFS with --disk",
                                path.display()
                            ),
                        ));
                    }
                    made => made.map_err(|e| cannot("make", path, e))?,
                };
                named::lock(&made, path)?;
                never_copy_on_write(&made);
                Ok(PersistentFile { file: made.into(), header: None })
            }
        }
    }

    /// The size that it has; `None` for a new one.
    pub fn size_bytes(&self) -> Option<u64> {
        self.header.as_ref().map(|header| header.size_bytes)
    }

    /// Which of its maps tells where each block is.
    pub fn map_to_start_from(&self) -> FileMap {
        let recorded = self.header.as_ref().and_then(|header| header.cache);
        FileMap::to_start_from(recorded, page_cache::cache_id(&self.file, SEAL_AT))
    }

    /// The file, still locked, and what it said of itself.
    pub fn into_parts(self) -> (File, Option<Header>) {
        (self.file, self.header)
    }

    /// The file, to look at.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Refuses a disk of another image, or of another size that it cannot take.
    pub fn check(
        &self,
        path: &Path,
        size_bytes: u64,
        base_bytes: u64,
        identity: &str,
    ) -> Result<(), SupervisorError> {
        self.check_image(path, base_bytes, identity)?;
        match &self.header {
            Some(header) if size_bytes < header.size_bytes => Err(SupervisorError::new(
                ErrorKind::Options,
                format!(
                    "disk {}: it has {} bytes, and a disk does not shrink: leave --size out or make it larger",
                    path.display(),
                    header.size_bytes
                ),
            )),
            _ => Ok(()),
        }
    }

    /// Refuses a disk of another image.
    pub fn check_image(&self, path: &Path, base_bytes: u64, identity: &str) -> Result<(), SupervisorError> {
        match &self.header {
            Some(header) if header.base_bytes != base_bytes || header.identity != identity => {
                Err(SupervisorError::new(
                    ErrorKind::Image,
                    format!(
                        "disk {}: it was made from another image ({}, {} bytes; this one is {identity}, {base_bytes} bytes): \
                         name that one with --image; if only its time has changed, give it back with touch -d @TIME, or \
                         name images with --image-id",
                        path.display(),
                        header.identity,
                        header.base_bytes
                    ),
                ))
            }
            _ => Ok(()),
        }
    }
}

/// Blocks of a disk of this size.
pub fn blocks(size_bytes: u64) -> u32 {
    size_bytes.div_ceil(BLOCK) as u32
}

/// The operating system refuses something on the file.
pub fn cannot(what: &str, path: &Path, error: impl Into<io::Error>) -> SupervisorError {
    let advice = "see that there is space and that this user may write there, or name another with --disk";
    SupervisorError::on_path(ErrorKind::Create, &format!("cannot {what} disk"), path, error, advice)
}

/// The file contradicts itself.
pub fn damaged(path: &Path, what: &str) -> SupervisorError {
    let advice = "take it from a backup, or name another with --disk";
    SupervisorError::new(ErrorKind::Image, format!("disk {}: {what}: {advice}", path.display()))
}

fn read_header(file: &File, path: &Path) -> Result<Header, SupervisorError> {
    let mut slots = [[0; HEADER_BYTES]; 2];
    for (slot, at) in slots.iter_mut().zip(HEADERS_AT) {
        match file.read_exact_at(slot, at) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => slot.fill(0),
            Err(e) => return Err(cannot("read", path, e)),
        }
    }
    Header::choose(&slots).map_err(|fault| match fault {
        HeaderFault::None => SupervisorError::new(
            ErrorKind::Image,
            format!(
                "disk {}: it is not a disk of mode persistent, and is not changed: name another with --disk, which is made \
                 if it is not there",
                path.display()
            ),
        ),
        HeaderFault::Version(version) => SupervisorError::new(
            ErrorKind::Image,
            format!(
                "disk {}: it has layout {version}, which this program does not know: use a newer one",
                path.display()
            ),
        ),
        HeaderFault::Damaged(what) => damaged(path, &format!("its header is damaged, {what}")),
    })
}

/// On btrfs a block that is written again would be written elsewhere, so that reserved space is none: a new file is made
/// one of which no block is. Other file systems have no such flag, and need none.
fn never_copy_on_write(file: &OwnedFd) {
    if let Ok(flags) = rustix::fs::ioctl_getflags(file) {
        let _not_btrfs = rustix::fs::ioctl_setflags(file, flags | IFlags::NOCOW);
    }
}

/// A range in pieces of at most [`CHUNK`] bytes: where each begins, and how long it is.
pub fn chunks(at: u64, len: u64) -> impl Iterator<Item = (u64, usize)> {
    (at..at + len).step_by(CHUNK).map(move |from| (from, (at + len - from).min(CHUNK as u64) as usize))
}

/// Whether the file has the mark of a reset that has begun and not ended.
pub fn has_mark(file: &File, path: &Path) -> Result<bool, SupervisorError> {
    let mut mark = [0; BLOCK_BYTES];
    file.read_exact_at(&mut mark, DURABLE_AT).map_err(|e| cannot("read the mark of", path, e))?;
    let (word, rest) = mark.split_at(RESET_MARK.len());
    if rest.iter().any(|&byte| byte != 0) || word != RESET_MARK && word.iter().any(|&byte| byte != 0) {
        return Err(damaged(path, "its mark of a reset is none"));
    }
    Ok(word == RESET_MARK)
}
