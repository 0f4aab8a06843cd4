//! The name of the page cache that a file's content is in, and the running kernel's number.
//!
//! Owns what the name is made of: the boot, the mounted instance of the file system, the file in it. Invariant: two files, two
//! mounts or two boots never have the same name; where that cannot be known for certain there is none.
//!
//! A file whose content was replaced in place, from a snapshot perhaps, is the same file, and has the header of the other. What
//! shows that is its *seal*: an extent that is reserved and was never written. Copies of a file do not have it: programs see a
//! hole there, or zeroes, and write neither as a reservation.
//!
//! A mounted instance (the kernel's *superblock*) has no number of its own that programs can ask for. The device's number comes
//! again with the next mount, as does the mount's id in `/proc`; the id that never comes again (`STATX_MNT_ID_UNIQUE`) is that of
//! one place where it is mounted, and a service with a mount namespace of its own has others at each start. But ext4, XFS and
//! btrfs keep a folder in sysfs for each instance, from its mount until it is gone, and the kernel gives each file there a
//! 64-bit inode number that never comes again before the next boot (`kernfs_node_id`; since Linux 5.5).

use rustix::fs::{FallocateFlags, Mode, OFlags};
use sha2::{Digest, Sha256};
use spillway_layout::CacheId;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};

const EXT4: u64 = 0xef53;
const XFS: u64 = 0x5846_5342;
const BTRFS: u64 = 0x9123_683e;
const SYSFS: u64 = 0x6265_6572;
/// `BTRFS_IOC_FS_INFO`, and where in its answer the id is.
const BTRFS_FS_INFO: libc::c_ulong = 0x8400_941f;
const BTRFS_FSID_AT: usize = 16;
/// `FS_IOC_FIEMAP`, its flag to write what is dirty first, and that of an extent that is only reserved.
const FIEMAP: libc::c_ulong = 0xc020_660b;
const FIEMAP_SYNC: u32 = 1;
const UNWRITTEN: u32 = 0x800;
/// Length of a seal.
const SEAL_BYTES: u64 = 4096;
/// Device names that a superblock has room for: a longer one it cuts short.
const MAX_DEVICE_NAME: usize = 31;

/// Names the page cache of an open file with a seal at this offset. `None`: it cannot be told from an earlier one, or what is
/// in it from a copy.
pub fn cache_id(file: &File, seal_at: u64) -> Option<CacheId> {
    if !is_sealed(file, seal_at) {
        return None;
    }
    let mut hash = Sha256::new();
    hash.update(b"spillway: page cache\n");
    hash.update(boot_id()?);
    hash.update(superblock(file)?.to_le_bytes());
    hash.update(handle(file)?);
    let name: [u8; 16] = hash.finalize()[..16].try_into().expect("a digest of 32 bytes");
    (name != [0; 16]).then_some(CacheId(name))
}

/// Gives a file its seal, if it has none. Where the file system cannot do that it has none afterwards.
pub fn seal(file: &File, at: u64) {
    if !is_sealed(file, at) {
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let _none = rustix::fs::fallocate(file, punch, at, SEAL_BYTES)
            .and_then(|()| rustix::fs::fallocate(file, FallocateFlags::KEEP_SIZE, at, SEAL_BYTES));
    }
}

/// Whether all of the seal is reserved and unwritten.
fn is_sealed(file: &File, at: u64) -> bool {
    #[derive(Default)]
    #[repr(C)]
    struct Extent {
        logical: u64,
        physical: u64,
        length: u64,
        reserved: [u64; 2],
        flags: u32,
        reserved_too: [u32; 3],
    }
    #[derive(Default)]
    #[repr(C)]
    struct Query {
        start: u64,
        length: u64,
        flags: u32,
        mapped: u32,
        count: u32,
        reserved: u32,
        extent: Extent,
    }
    let mut query = Query { start: at, length: SEAL_BYTES, flags: FIEMAP_SYNC, count: 1, ..Query::default() };
    // SAFETY: `query` is a `fiemap` with room for the one extent that it says, and the fd is open.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), FIEMAP as _, &raw mut query) };
    let Extent { logical, length, flags, .. } = query.extent;
    let is_whole = logical <= at && logical.saturating_add(length) >= at + SEAL_BYTES;
    result == 0 && query.mapped == 1 && is_whole && flags & UNWRITTEN != 0
}

/// The running kernel's number.
pub fn boot_id() -> Option<[u8; 16]> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let digits: String = text.trim().chars().filter(|&c| c != '-').collect();
    (digits.len() == 32).then(|| u128::from_str_radix(&digits, 16).ok())?.map(u128::to_be_bytes)
}

/// The number of the mounted instance that the file is in: of its folder in sysfs.
fn superblock(file: &File) -> Option<u64> {
    if cfg!(not(target_pointer_width = "64")) {
        // Inode numbers have 32 bits there.
        return None;
    }
    let path = match magic(file)? {
        EXT4 => Path::new("/sys/fs/ext4").join(device(file)?),
        XFS => Path::new("/sys/fs/xfs").join(device(file)?),
        BTRFS => Path::new("/sys/fs/btrfs").join(btrfs_id(file)?),
        _ => return None,
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = rustix::fs::open(path, flags, Mode::empty()).ok()?;
    if magic(&folder)? != SYSFS {
        return None;
    }
    rustix::fs::fstat(&folder).ok().map(|stat| stat.st_ino)
}

fn magic(file: impl AsFd) -> Option<u64> {
    // Which type it has is the platform's.
    rustix::fs::fstatfs(file).ok().map(|shape| shape.f_type as u64)
}

/// The kernel's name of the block device that the file is on, as sysfs writes it.
fn device(file: &File) -> Option<PathBuf> {
    let dev = rustix::fs::fstat(file).ok()?.st_dev;
    let link = format!("/sys/dev/block/{}:{}", rustix::fs::major(dev), rustix::fs::minor(dev));
    let target = std::fs::read_link(link).ok()?;
    let name = target.file_name()?;
    (name.len() <= MAX_DEVICE_NAME).then(|| name.into())
}

/// The id by which sysfs names a btrfs: as devices come and go, none of them does.
fn btrfs_id(file: &File) -> Option<PathBuf> {
    let mut info = [0u64; 1024 / 8];
    // SAFETY: the call fills the 1024 bytes that its number says, which `info` has, and the fd is open.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), BTRFS_FS_INFO as _, info.as_mut_ptr()) };
    if result != 0 {
        return None;
    }
    let word = |at: usize| info[at / 8].to_ne_bytes();
    let id = u128::from_be_bytes([word(BTRFS_FSID_AT), word(BTRFS_FSID_AT + 8)].concat().try_into().ok()?);
    let digits = format!("{id:032x}");
    let parts = [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]];
    Some(parts.join("-").into())
}

/// What the kernel names the file by within its file system: inode and generation, on btrfs the subvolume too. A snapshot of a
/// subvolume has the inodes of the original.
fn handle(file: &File) -> Option<Vec<u8>> {
    #[repr(C)]
    struct Handle {
        bytes: u32,
        kind: i32,
        handle: [u8; libc::MAX_HANDLE_SZ as usize],
    }
    let mut handle =
        Handle { bytes: libc::MAX_HANDLE_SZ as u32, kind: 0, handle: [0; libc::MAX_HANDLE_SZ as usize] };
    let mut mount = 0;
    // SAFETY: `handle` is a `file_handle` with room for as many bytes as it says, the path is empty and ends with a zero, and
    // the fd is open; the call keeps none of the pointers.
    let result = unsafe {
        libc::name_to_handle_at(
            file.as_raw_fd(),
            c"".as_ptr(),
            (&raw mut handle).cast(),
            &raw mut mount,
            libc::AT_EMPTY_PATH,
        )
    };
    let bytes = handle.handle.get(..handle.bytes as usize)?;
    (result == 0 && !bytes.is_empty()).then(|| [&handle.kind.to_le_bytes(), bytes].concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    const AT: u64 = 64 << 10;

    #[test]
    fn each_file_has_a_name_of_its_own_that_it_keeps() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let make = |name: &str| {
            let file = File::create(dir.path().join(name)).unwrap();
            file.set_len(2 * AT).unwrap();
            seal(&file, AT);
            file
        };
        let (one, two) = (make("one"), make("two"));
        let Some(id) = cache_id(&one, AT) else {
            // No file system for which this is known: the tests of mode `persistent` make their own.
            assert!(![EXT4, XFS, BTRFS].contains(&magic(&one).unwrap()));
            return;
        };
        assert_ne!(Some(id), cache_id(&two, AT));
        let again = || cache_id(&File::open(dir.path().join("one")).unwrap(), AT);
        assert_eq!(Some(id), again());
        one.write_all_at(&[1; 4096], AT - 4096).unwrap();
        one.write_all_at(&[1; 4096], AT + 4096).unwrap();
        one.sync_all().unwrap();
        assert_eq!(Some(id), again(), "what is written beside the seal does nothing to it");
    }

    /// Whatever program it was: one that truncates first, or not, that writes zeroes or leaves holes.
    #[test]
    fn a_copy_that_is_written_over_a_file_breaks_its_seal() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let [file, copy] = ["file", "copy"].map(|name| dir.path().join(name));
        let made = File::create(&file).unwrap();
        made.set_len(2 * AT).unwrap();
        seal(&made, AT);
        if cache_id(&made, AT).is_none() {
            assert!(![EXT4, XFS, BTRFS].contains(&magic(&made).unwrap()));
            return;
        }
        std::fs::copy(&file, &copy).unwrap();
        for line in ["cp --sparse=never", "cp --sparse=always", "cp", "dd bs=64k conv=notrunc status=none"] {
            let mut words = line.split(' ');
            let mut command = std::process::Command::new(words.next().unwrap());
            command.args(words);
            let operand = |name: &str, path: &Path| format!("{name}{}", path.display());
            match line.starts_with("dd") {
                true => command.args([operand("if=", &copy), operand("of=", &file)]),
                false => command.args([&copy, &file]),
            };
            assert!(command.status().unwrap().success(), "{line}");
            let found = File::options().read(true).write(true).open(&file).unwrap();
            assert_eq!(cache_id(&found, AT), None, "{line}");
            seal(&found, AT);
            assert!(cache_id(&found, AT).is_some(), "{line}");
        }
    }

    #[test]
    fn memory_has_none() {
        let file = File::from(rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        file.set_len(2 * AT).unwrap();
        seal(&file, AT);
        assert_eq!(cache_id(&file, AT), None);
    }
}
