//! The file of mode `ephemeral`: a full copy of an image, which whoever starts the disk has made for it alone.
//!
//! Owns its checks and its name's end. Invariant: it is taken only if nothing else is or was seen to use it, and once it is
//! served it has no name: its space goes with its last holder.

use super::overflow::OverflowFile;
use super::past_cache::past_the_cache;
use rustix::fs::OFlags;
use spillway_control::{ErrorKind, SupervisorError, bytes, named};
use spillway_core::{DiskSpec, SECTOR_BYTES};
use spillway_image::is_locked_by_qemu;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

fn refuse(kind: ErrorKind, path: &Path, what: &str) -> SupervisorError {
    SupervisorError::new(kind, format!("disk {}: {what}", path.display()))
}

/// Opens the copy, locked. Its size in bytes too.
pub(super) fn open(path: &Path) -> Result<(File, u64), SupervisorError> {
    let Some(file) = named::open(path, OFlags::NOFOLLOW)? else {
        return Err(refuse(
            ErrorKind::Image,
            path,
            "does not exist: mode ephemeral takes a raw copy of the image: cp --sparse=always IMAGE DISK, or qemu-img convert \
             -O raw",
        ));
    };
    named::lock(&file, path)?;
    let metadata = file.metadata().map_err(|e| SupervisorError::internal("cannot look at the disk", e))?;
    if metadata.nlink() != 1 {
        return Err(refuse(
            ErrorKind::Image,
            path,
            "it has other names (hard links), whose content would change: give the disk a copy of its own",
        ));
    }
    if is_locked_by_qemu(&file) {
        return Err(refuse(
            ErrorKind::InUse,
            path,
            "it is in use as an image (its QEMU image lock is taken): give the disk a copy of its own",
        ));
    }
    let len = metadata.len();
    if len == 0 || !len.is_multiple_of(SECTOR_BYTES) {
        return Err(refuse(
            ErrorKind::Image,
            path,
            &format!("it has {len} bytes, not a positive multiple of 512: is the copy complete, and raw?"),
        ));
    }
    Ok((file, len))
}

/// Makes it what a worker can serve: long enough, past the page cache.
pub(super) fn make_ready(
    file: File,
    path: &Path,
    spec: &DiskSpec,
    copied_bytes: u64,
) -> Result<OverflowFile, SupervisorError> {
    if spec.size_bytes < copied_bytes {
        return Err(refuse(
            ErrorKind::Options,
            path,
            &format!("it has {}: leave --size out or make it larger", bytes(copied_bytes)),
        ));
    }
    let file = past_the_cache(file, path, spec.mode)?;
    let file = OverflowFile { fd: file.into(), direct: true };
    file.lengthen(spec.file_bytes())?;
    Ok(file)
}

/// The copy is the disk's from here on: nobody else finds it.
pub(super) fn take_name(path: &Path, file: &OverflowFile) -> Result<(), SupervisorError> {
    let cannot = |e| {
        let advice = "let this user change its folder";
        SupervisorError::on_path(ErrorKind::Create, "cannot remove the name of disk", path, e, advice)
    };
    let (here, ours) =
        (rustix::fs::lstat(path).map_err(cannot)?, rustix::fs::fstat(&file.fd).map_err(cannot)?);
    if (here.st_dev, here.st_ino) != (ours.st_dev, ours.st_ino) {
        return Err(refuse(
            ErrorKind::Create,
            path,
            "something else took its place: leave it alone while it is served",
        ));
    }
    rustix::fs::unlink(path).map_err(cannot)
}
