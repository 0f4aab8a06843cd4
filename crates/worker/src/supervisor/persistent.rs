//! Prepares the file of a disk of mode `persistent` for a worker.
//!
//! Owns the steps before the disk is served: the file grows, an interrupted reset is finished, and the live map is copied from
//! the durable map unless the page cache is the one in which the live map was written. Invariants: the header names the page
//! cache only while the live map is valid in it; after an interruption at any point the next start finds the disk unchanged.

use super::Log;
use super::overflow::OverflowFile;
use super::past_cache::past_the_cache;
use rustix::fs::{AtFlags, FallocateFlags};
use rustix::io::Errno;
use spillway_control::persistent::{
    BLOCK, CHUNK, PersistentFile, blocks, cannot, chunks, damaged, has_mark, option_identity,
};
use spillway_control::{SupervisorError, named, page_cache};
use spillway_core::{BLOCK_BYTES, DiskSpec, FileMap, find_bad_state, state_map_bytes};
use spillway_layout::persistent_file::{DATA_AT, DURABLE_AT, HEADERS_AT, Header, LIVE_AT, SEAL_AT};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Returns the identity of the image that a disk was made from: `--image-id` if given, else derived from the file's size and
/// modification time.
pub(super) fn identity(
    image: &OwnedFd,
    option: Option<&str>,
    virtual_bytes: u64,
) -> Result<String, SupervisorError> {
    if let Some(text) = option {
        return option_identity(text);
    }
    let stat =
        rustix::fs::fstat(image).map_err(|e| SupervisorError::internal("cannot look at the image", e))?;
    if rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::BlockDevice {
        return Ok(format!("device size={virtual_bytes}"));
    }
    Ok(format!("size={} mtime={}.{:09}", stat.st_size, stat.st_mtime, stat.st_mtime_nsec))
}

/// Makes the file ready: gives it the size of the disk and a valid live map. A new file is linked to its path.
pub(super) fn make_ready(
    found: PersistentFile,
    path: &Path,
    spec: &DiskSpec,
    identity: &str,
    log: &mut Log,
) -> Result<OverflowFile, SupervisorError> {
    let failed = |e: io::Error| cannot("write", path, e);
    let map_bytes = state_map_bytes(spec.blocks());
    let len = DATA_AT + spec.file_bytes();
    if found.file().metadata().map_err(failed)?.len() < len {
        found.file().set_len(len).map_err(failed)?;
    }
    let map = found.map_to_start_from();
    let (file, mut header) = found.into_parts();
    if let Some(header) = &mut header
        && map == FileMap::Durable
    {
        forget_cache(&file, path, header)?;
    }
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
    file.sync_all().map_err(failed)?;
    let header = Header {
        sequence: header.as_ref().map_or(0, |h| h.sequence) + 1,
        size_bytes: spec.size_bytes,
        base_bytes: spec.base_bytes,
        cache,
        identity: identity.to_owned(),
    };
    let is_new = header.sequence == 1;
    write_header(&file, path, &header)?;
    let file = past_the_cache(file, path, spec.mode)?;
    if is_new {
        name(&file, path)?;
    }
    Ok(OverflowFile { fd: file.into(), direct: true })
}

/// Makes the header name no page cache, durably: until the next header is written, every start reads the durable map. This
/// precedes each change of a live map that is not in use. The header may name this page cache, and only a broken seal, or one
/// that could not be read this time, has shown that the live map is not valid.
fn forget_cache(file: &File, path: &Path, header: &mut Header) -> Result<(), SupervisorError> {
    if header.cache.take().is_none() {
        return Ok(());
    }
    header.sequence += 1;
    write_header(file, path, header)
}

/// Writes the header that counts from now on, durably.
fn write_header(file: &File, path: &Path, header: &Header) -> Result<(), SupervisorError> {
    let written = file.write_all_at(&header.encode(), header.slot_at()).and_then(|()| file.sync_all());
    written.map_err(|e| cannot("write", path, e))
}

/// Gives a new file its name, durably.
fn name(file: &File, path: &Path) -> Result<(), SupervisorError> {
    let from = format!("/proc/self/fd/{}", file.as_raw_fd());
    let (cwd, follow) = (rustix::fs::CWD, AtFlags::SYMLINK_FOLLOW);
    rustix::fs::linkat(cwd, &from, cwd, path, follow).map_err(|e| cannot("name", path, e))?;
    let dir = named::directory(path)?;
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(|e| cannot("keep the name of", path, e))
}

/// Allocates the blocks of headers and maps. On a full file system, a store into a hole of the live map would raise SIGBUS,
/// and no FLUSH could succeed without blocks for the durable map.
fn reserve(file: &File, path: &Path, map_bytes: u64, log: &mut Log) -> Result<(), SupervisorError> {
    for (at, len) in [(0, HEADERS_AT[1] + BLOCK), (LIVE_AT, map_bytes), (DURABLE_AT, BLOCK + map_bytes)] {
        match rustix::fs::fallocate(file, FallocateFlags::empty(), at, len) {
            Ok(()) => {}
            Err(Errno::OPNOTSUPP) => {
                log(&format!(
                    "the file system of {} cannot reserve space for the disk's map: keep some free",
                    path.display()
                ));
                break;
            }
            // XFS reserves new blocks before it checks whether it needs them.
            Err(Errno::NOSPC) => {
                write_again(file, at, len).map_err(|e| cannot("reserve space in", path, e))?
            }
            Err(e) => return Err(cannot("reserve space in", path, e)),
        }
    }
    Ok(())
}

/// Rewrites the range with its own content, so that holes get blocks. Fails if there are none.
fn write_again(file: &File, at: u64, len: u64) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK];
    chunks(at, len).try_for_each(|(at, n)| {
        file.read_exact_at(&mut buffer[..n], at)?;
        file.write_all_at(&buffer[..n], at)
    })
}

/// Fills a range with zeroes.
fn zero(file: &File, at: u64, len: u64) -> io::Result<()> {
    let flags = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
    match rustix::fs::fallocate(file, flags, at, len) {
        // XFS frees the old blocks before it allocates new ones.
        Err(Errno::OPNOTSUPP | Errno::NOSPC) => {
            let zeroes = vec![0; CHUNK];
            chunks(at, len).try_for_each(|(at, n)| file.write_all_at(&zeroes[..n], at))
        }
        result => Ok(result?),
    }
}

/// Finishes a reset whose mark is in the file. Returns whether there was one.
fn finish_reset(file: &File, path: &Path, map_bytes: u64) -> Result<bool, SupervisorError> {
    let failed = |e: io::Error| cannot("finish the reset of", path, e);
    if !has_mark(file, path)? {
        return Ok(false);
    }
    zero(file, LIVE_AT, map_bytes).map_err(failed)?;
    zero(file, DURABLE_AT + BLOCK, map_bytes).map_err(failed)?;
    // An error is harmless: blocks that cannot be freed are not read again.
    let data = file.metadata().map_err(failed)?.len().saturating_sub(DATA_AT);
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let _room = rustix::fs::fallocate(file, punch, DATA_AT, data);
    file.sync_all().map_err(failed)?;
    file.write_all_at(&[0; BLOCK_BYTES], DURABLE_AT).map_err(failed)?;
    file.sync_all().map_err(failed)?;
    Ok(true)
}

/// Copies the durable map over the live map. This is needed if the page cache is not the one in which the live map was
/// written: that map may refer to content that is not on the medium. Flushed content is kept.
fn copy_map(file: &File, path: &Path, map_bytes: u64) -> Result<(), SupervisorError> {
    let failed = |e: io::Error| cannot("read the map of", path, e);
    zero(file, LIVE_AT, map_bytes).map_err(failed)?;
    let mut buffer = vec![0; CHUNK];
    for (at, n) in chunks(0, map_bytes) {
        file.read_exact_at(&mut buffer[..n], DURABLE_AT + BLOCK + at).map_err(failed)?;
        if buffer[..n].iter().any(|&byte| byte != 0) {
            file.write_all_at(&buffer[..n], LIVE_AT + at).map_err(failed)?;
        }
    }
    Ok(())
}

/// Refuses a live map with an impossible entry.
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
