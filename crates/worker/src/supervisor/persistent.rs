//! The file of mode `persistent`, as the supervisor sees it: made, locked, checked, and made ready for a worker.
//!
//! Owns what happens to it while nobody serves it: growth, a reset that was cut off, and the live map from the durable one
//! unless this is the page cache in which the live one was written. Invariant: whatever ends this in the middle, the next one
//! finds the disk as it was.

use super::error::{ErrorKind, SupervisorError};
use super::overflow::OverflowFile;
use super::{Log, bytes, named, page_cache};
use crate::persistent_file::{
    DATA_AT, DURABLE_AT, HEADER_BYTES, HEADERS_AT, Header, HeaderFault, LIVE_AT, MAX_IDENTITY_BYTES, SEAL_AT,
};
use rustix::fs::{AtFlags, FallocateFlags, IFlags, Mode, OFlags};
use rustix::io::Errno;
use spillway_core::{BLOCK_BYTES, DiskSpec, FileMap, RESET_MARK, find_bad_state, state_map_bytes};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

pub(super) const BLOCK: u64 = BLOCK_BYTES as u64;
/// Bytes that are read and written at a time.
pub(super) const CHUNK: usize = 1 << 20;

/// What says which image a disk was made from: what `--image-id` says, else what can be seen of it.
pub(super) fn identity(
    image: &OwnedFd,
    said: Option<&str>,
    virtual_bytes: u64,
) -> Result<String, SupervisorError> {
    if let Some(text) = said {
        return said_identity(text);
    }
    let stat =
        rustix::fs::fstat(image).map_err(|e| SupervisorError::internal("cannot look at the image", e))?;
    if rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::BlockDevice {
        return Ok(format!("device size={virtual_bytes}"));
    }
    Ok(format!("size={} mtime={}.{:09}", stat.st_size, stat.st_mtime, stat.st_mtime_nsec))
}

/// The same, of what `--image-id` says.
pub(super) fn said_identity(text: &str) -> Result<String, SupervisorError> {
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
pub(super) struct PersistentFile {
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
                                "disk {}: the file system of its directory has no O_TMPFILE: name a directory on \
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

    /// The file, still locked.
    pub fn into_file(self) -> File {
        self.file
    }

    /// Refuses a disk of another image, or of another size that it cannot take.
    pub fn check(&self, path: &Path, spec: &DiskSpec, identity: &str) -> Result<(), SupervisorError> {
        self.check_image(path, spec.base_bytes, identity)?;
        match &self.header {
            Some(header) if spec.size_bytes < header.size_bytes => Err(SupervisorError::new(
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

    /// Makes it what a worker can serve: of this size, with a live map that counts. A new one has its name afterwards.
    pub fn make_ready(
        self,
        path: &Path,
        spec: &DiskSpec,
        identity: &str,
        log: &mut Log,
    ) -> Result<OverflowFile, SupervisorError> {
        let said = |e: io::Error| cannot("write", path, e);
        let map_bytes = state_map_bytes(spec.blocks());
        let len = DATA_AT + spec.file_bytes();
        if self.file.metadata().map_err(said)?.len() < len {
            self.file.set_len(len).map_err(said)?;
        }
        let map = self.map_to_start_from();
        let PersistentFile { file, header } = self;
        page_cache::seal(&file, SEAL_AT);
        let cache = page_cache::cache_id(&file, SEAL_AT);
        if cache.is_none() {
            log(&format!(
                "disk {}: it cannot be told whether its file system is mounted anew (it can on ext4, XFS and btrfs, with \
                 sysfs at /sys): if all processes die, what was not flushed is lost",
                path.display()
            ));
        }
        if let Some(header) = &header {
            let old_map = state_map_bytes(blocks(header.size_bytes));
            if finish_reset(&file, path, old_map)? {
                log(&format!(
                    "disk {}: a reset that had begun is finished: it is its image again",
                    path.display()
                ));
            }
            if map == FileMap::Durable {
                copy_map(&file, path, old_map)?;
            }
        }
        reserve(&file, path, map_bytes, log)?;
        check_map(&file, path, map_bytes)?;
        file.sync_all().map_err(said)?;
        let header = Header {
            sequence: header.as_ref().map_or(0, |h| h.sequence) + 1,
            size_bytes: spec.size_bytes,
            base_bytes: spec.base_bytes,
            cache,
            identity: identity.to_owned(),
        };
        let is_new = header.sequence == 1;
        file.write_all_at(&header.encode(), header.slot_at()).map_err(said)?;
        file.sync_all().map_err(said)?;
        let file = named::past_the_cache(file, path, spec.mode)?;
        if is_new {
            name(&file, path)?;
        }
        Ok(OverflowFile { fd: file.into(), direct: true })
    }
}

/// The file gets its name, and keeps it.
fn name(file: &File, path: &Path) -> Result<(), SupervisorError> {
    let from = format!("/proc/self/fd/{}", file.as_raw_fd());
    let (cwd, follow) = (rustix::fs::CWD, AtFlags::SYMLINK_FOLLOW);
    rustix::fs::linkat(cwd, &from, cwd, path, follow).map_err(|e| cannot("name", path, e))?;
    let dir = named::directory(path)?;
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(|e| cannot("keep the name of", path, e))
}

pub(super) fn blocks(size_bytes: u64) -> u32 {
    size_bytes.div_ceil(BLOCK) as u32
}

pub(super) fn cannot(what: &str, path: &Path, error: impl Into<io::Error>) -> SupervisorError {
    let advice = "see that there is room and that this user may write there, or name another with --disk";
    SupervisorError::on_path(ErrorKind::Create, &format!("cannot {what} disk"), path, error, advice)
}

pub(super) fn damaged(path: &Path, what: &str) -> SupervisorError {
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
                "disk {}: it is no disk of mode persistent, and is left alone: name another with --disk, which is made \
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

/// On btrfs a block that is written again would be written elsewhere, so that reserved room is none: a new file is made
/// one of which no block is. Other file systems have no such flag, and need none.
fn never_copy_on_write(file: &OwnedFd) {
    if let Ok(flags) = rustix::fs::ioctl_getflags(file) {
        let _not_btrfs = rustix::fs::ioctl_setflags(file, flags | IFlags::NOCOW);
    }
}

/// Headers and maps have all of their room from here on. A store into a hole of the live map would be a deadly signal on a
/// full file system, and no FLUSH would ever end without room for the durable one.
fn reserve(file: &File, path: &Path, map_bytes: u64, log: &mut Log) -> Result<(), SupervisorError> {
    for (at, len) in [(0, HEADERS_AT[1] + BLOCK), (LIVE_AT, map_bytes), (DURABLE_AT, BLOCK + map_bytes)] {
        match rustix::fs::fallocate(file, FallocateFlags::empty(), at, len) {
            Ok(()) => {}
            Err(Errno::OPNOTSUPP) => {
                log(&format!(
                    "the file system of {} cannot reserve room for the disk's map: keep some free",
                    path.display()
                ));
                break;
            }
            // XFS asks for new room before it looks whether it is needed.
            Err(Errno::NOSPC) => {
                write_again(file, at, len).map_err(|e| cannot("reserve room in", path, e))?
            }
            Err(e) => return Err(cannot("reserve room in", path, e)),
        }
    }
    Ok(())
}

/// Writes what is there: where the range has no room it gets some, or there is an error.
fn write_again(file: &File, at: u64, len: u64) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK];
    chunks(at, len).try_for_each(|(at, n)| {
        file.read_exact_at(&mut buffer[..n], at)?;
        file.write_all_at(&buffer[..n], at)
    })
}

/// A range is all zeroes afterwards.
fn zero(file: &File, at: u64, len: u64) -> io::Result<()> {
    let flags = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
    match rustix::fs::fallocate(file, flags, at, len) {
        // XFS lets the old room go before it takes new room.
        Err(Errno::OPNOTSUPP | Errno::NOSPC) => {
            let zeroes = vec![0; CHUNK];
            chunks(at, len).try_for_each(|(at, n)| file.write_all_at(&zeroes[..n], at))
        }
        result => Ok(result?),
    }
}

pub(super) fn chunks(at: u64, len: u64) -> impl Iterator<Item = (u64, usize)> {
    (at..at + len).step_by(CHUNK).map(move |from| (from, (at + len - from).min(CHUNK as u64) as usize))
}

/// Whether the file has the mark of a reset that has begun and not ended.
pub(super) fn has_mark(file: &File, path: &Path) -> Result<bool, SupervisorError> {
    let mut mark = [0; BLOCK_BYTES];
    file.read_exact_at(&mut mark, DURABLE_AT).map_err(|e| cannot("read the mark of", path, e))?;
    let (word, rest) = mark.split_at(RESET_MARK.len());
    if rest.iter().any(|&byte| byte != 0) || word != RESET_MARK && word.iter().any(|&byte| byte != 0) {
        return Err(damaged(path, "its mark of a reset is none"));
    }
    Ok(word == RESET_MARK)
}

/// Ends a reset whose mark the file has. Whether it had one.
fn finish_reset(file: &File, path: &Path, map_bytes: u64) -> Result<bool, SupervisorError> {
    let said = |e: io::Error| cannot("finish the reset of", path, e);
    if !has_mark(file, path)? {
        return Ok(false);
    }
    zero(file, LIVE_AT, map_bytes).map_err(said)?;
    zero(file, DURABLE_AT + BLOCK, map_bytes).map_err(said)?;
    // What cannot be given back is not read any more.
    let data = file.metadata().map_err(said)?.len().saturating_sub(DATA_AT);
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let _room = rustix::fs::fallocate(file, punch, DATA_AT, data);
    file.sync_all().map_err(said)?;
    file.write_all_at(&[0; BLOCK_BYTES], DURABLE_AT).map_err(said)?;
    file.sync_all().map_err(said)?;
    Ok(true)
}

/// Not in the page cache of the live map: that may tell of content that is not on the medium, and what was flushed counts.
fn copy_map(file: &File, path: &Path, map_bytes: u64) -> Result<(), SupervisorError> {
    let said = |e: io::Error| cannot("read the map of", path, e);
    zero(file, LIVE_AT, map_bytes).map_err(said)?;
    let mut buffer = vec![0; CHUNK];
    for (at, n) in chunks(0, map_bytes) {
        file.read_exact_at(&mut buffer[..n], DURABLE_AT + BLOCK + at).map_err(said)?;
        if buffer[..n].iter().any(|&byte| byte != 0) {
            file.write_all_at(&buffer[..n], LIVE_AT + at).map_err(said)?;
        }
    }
    Ok(())
}

/// Refuses a live map that says what cannot be.
fn check_map(file: &File, path: &Path, map_bytes: u64) -> Result<(), SupervisorError> {
    let mut buffer = vec![0; CHUNK];
    for (at, n) in chunks(0, map_bytes) {
        file.read_exact_at(&mut buffer[..n], LIVE_AT + at).map_err(|e| cannot("read the map of", path, e))?;
        if let Some(block) = find_bad_state(&buffer[..n]) {
            return Err(damaged(path, &format!("its map is damaged, at block {}", at * 4 + block)));
        }
    }
    Ok(())
}
