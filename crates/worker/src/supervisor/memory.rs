//! The disk's memory: two memfds that outlive every worker, and the check that the host has enough memory. Never maps the
//! memfds.
//!
//! Invariant: `meta` has its final size and can neither shrink nor grow; `data` can never shrink, so that no
//! worker is ever killed by a mapping that lost its pages.

use rustix::fs::{MemfdFlags, SealFlags};
use spillway_control::{ErrorKind, SupervisorError, bytes};
use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// Creates a sparse, sealed memfd of a fixed size for the map and the counters.
pub(super) fn create_meta(len_bytes: u64) -> Result<OwnedFd, SupervisorError> {
    create("spillway-meta", len_bytes, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
}

/// A memfd for the slots; sparse, as large as the host's memory, so that the limit can grow while it serves, or
/// as large as a file of this process may be.
pub(super) fn create_data(limit_bytes: u64) -> Result<OwnedFd, SupervisorError> {
    let info = rustix::system::sysinfo();
    let host = (info.totalram as u64).saturating_mul(u64::from(info.mem_unit.max(1)));
    let len_bytes = host.max(limit_bytes).next_multiple_of(1 << 21);
    create("spillway-data", len_bytes.min(file_size_limit()), SealFlags::SHRINK)
}

/// A sealed memfd with these bytes, which nobody can change.
pub(super) fn create_fixed(name: &str, contents: &[u8]) -> Result<OwnedFd, SupervisorError> {
    let seals = SealFlags::SHRINK | SealFlags::GROW;
    let fd = create(name, contents.len() as u64, seals)?;
    let cannot = |e: rustix::io::Errno| SupervisorError::internal("cannot fill shared memory", e);
    let mut done = 0;
    while done < contents.len() {
        done += rustix::io::pwrite(&fd, &contents[done..], done as u64).map_err(cannot)?;
    }
    rustix::fs::fcntl_add_seals(&fd, SealFlags::WRITE | SealFlags::SEAL).map_err(cannot)?;
    Ok(fd)
}

fn create(name: &str, len_bytes: u64, seals: SealFlags) -> Result<OwnedFd, SupervisorError> {
    let cannot = |e: rustix::io::Errno| {
        let what = format!("cannot make {} of shared memory for the disk", bytes(len_bytes));
        SupervisorError::internal(&what, e)
    };
    let fd =
        rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(cannot)?;
    rustix::fs::ftruncate(&fd, len_bytes).map_err(cannot)?;
    rustix::fs::fcntl_add_seals(&fd, seals).map_err(cannot)?;
    Ok(fd)
}

/// Refuses a size above the process's file size limit (RLIMIT_FSIZE): a write beyond it would raise SIGXFSZ.
pub(super) fn check_file_size_limit(largest_bytes: u64) -> Result<(), SupervisorError> {
    let limit = file_size_limit();
    if largest_bytes <= limit {
        return Ok(());
    }
    Err(SupervisorError::new(
        ErrorKind::Options,
        format!(
            "files of {} are needed and this shell allows {}: raise it with 'ulimit -f unlimited'",
            bytes(largest_bytes),
            bytes(limit)
        ),
    ))
}

fn file_size_limit() -> u64 {
    rustix::process::getrlimit(rustix::process::Resource::Fsize).current.unwrap_or(u64::MAX)
}

/// Refuses a RAM limit that exceeds the available memory of the host or of this process's control group. `held_bytes` of it
/// are allocated already.
pub(super) fn check_ram_limit(ram_limit_bytes: u64, held_bytes: u64) -> Result<(), SupervisorError> {
    check_ram_limit_at(Path::new("/"), ram_limit_bytes, held_bytes)
}

fn check_ram_limit_at(root: &Path, ram_limit_bytes: u64, held_bytes: u64) -> Result<(), SupervisorError> {
    let too_much = |available: u64, whose: String| {
        SupervisorError::new(
            ErrorKind::Memory,
            format!(
                "RAM limit {} is more than the {} that are available {whose}: choose a smaller --ram or free memory",
                bytes(ram_limit_bytes),
                bytes(available)
            ),
        )
    };
    if let Some(available) = host_available(root).map(|free| free.saturating_add(held_bytes))
        && ram_limit_bytes > available
    {
        return Err(too_much(available, "on this host (MemAvailable)".into()));
    }
    for group in groups(root) {
        if let Some((limit, available)) = group.room()
            && ram_limit_bytes > available.saturating_add(held_bytes)
        {
            let whose = format!("in control group {} (limit {})", group.dir.display(), bytes(limit));
            return Err(too_much(available, whose));
        }
    }
    Ok(())
}

/// Reads the value of a line of a /proc file, in bytes. The file has it in kB.
fn kib_of(path: &Path, key: &str) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix(key))?;
    kib(line)
}

/// Bytes of `   12 kB`.
pub(super) fn kib(text: &str) -> Option<u64> {
    text.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

fn host_available(root: &Path) -> Option<u64> {
    kib_of(&root.join("proc/meminfo"), "MemAvailable:")
}

/// A control group with a memory controller.
struct Group {
    dir: PathBuf,
    files: [&'static str; 3],
}

const V1: [&str; 3] = ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"];
const V2: [&str; 3] = ["memory.max", "memory.current", "inactive_file"];

impl Group {
    /// The group's limit, and the memory that is available below it if the page cache shrinks. `None` without a limit.
    fn room(&self) -> Option<(u64, u64)> {
        let number =
            |name: &str| -> Option<u64> { fs::read_to_string(self.dir.join(name)).ok()?.trim().parse().ok() };
        let [limit, used, inactive] = self.files;
        // Without a limit v2 says "max" and v1 a number beyond all memory.
        let limit = number(limit).filter(|&l| l < 1 << 62)?;
        let used = number(used)?;
        let stat = fs::read_to_string(self.dir.join("memory.stat")).unwrap_or_default();
        let cache: u64 = stat
            .lines()
            .filter_map(|l| l.split_once(' '))
            .filter(|(key, _)| *key == inactive || *key == inactive.replace("inactive", "active"))
            .filter_map(|(_, value)| value.trim().parse::<u64>().ok())
            .fold(0, u64::saturating_add);
        Some((limit, limit.saturating_sub(used.saturating_sub(cache))))
    }
}

/// The memory control groups that this process is in, and all above them.
fn groups(root: &Path) -> Vec<Group> {
    let read = |name: &str| fs::read_to_string(root.join(name)).unwrap_or_default();
    let (membership, mounts) = (read("proc/self/cgroup"), read("proc/self/mountinfo"));
    let mut groups = Vec::new();
    for line in membership.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
            continue;
        };
        let (files, kind) = match controllers {
            "" => (V2, "cgroup2"),
            c if c.split(',').any(|c| c == "memory") => (V1, "cgroup"),
            _ => continue,
        };
        let Some((mount_root, mount)) = mount_of(&mounts, kind) else { continue };
        // In a container the mount shows a part of the tree only: what lies above it cannot be seen.
        let inside = path.strip_prefix(mount_root.trim_end_matches('/')).unwrap_or("");
        let mut dir = root.join(mount.trim_start_matches('/'));
        let top = dir.clone();
        dir.push(inside.trim_start_matches('/'));
        for dir in dir.ancestors().take_while(|d| d.starts_with(&top)) {
            groups.push(Group { dir: dir.to_owned(), files });
        }
    }
    groups
}

/// Root and mount point of the hierarchy with the memory controller.
fn mount_of<'a>(mounts: &'a str, kind: &str) -> Option<(&'a str, &'a str)> {
    mounts.lines().find_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        let mut after = after.split(' ');
        let (fs_type, _, options) = (after.next()?, after.next()?, after.next()?);
        let memory = kind == "cgroup2" || options.split(',').any(|o| o == "memory");
        let mut before = before.split(' ').skip(3);
        (fs_type == kind && memory).then(|| Some((before.next()?, before.next()?))).flatten()
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    const MEMINFO: (&str, &str) =
        ("proc/meminfo", "MemTotal:  8388608 kB\nMemFree: 1 kB\nMemAvailable:    4194304 kB\n");

    #[test]
    fn the_hosts_memory_bounds_the_limit() {
        let root = tree(&[MEMINFO]);
        check_ram_limit_at(root.path(), 4 << 30, 0).unwrap();
        let error = check_ram_limit_at(root.path(), (4 << 30) + 1, 0).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Memory);
        assert!(
            error.to_string().contains("4.0 GiB") && error.to_string().contains("MemAvailable"),
            "{error}"
        );
    }

    #[test]
    fn a_parent_control_group_bounds_it_too() {
        let root = tree(&[
            MEMINFO,
            ("proc/self/cgroup", "0::/a.slice/b.scope\n"),
            (
                "proc/self/mountinfo",
                "30 20 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n",
            ),
            ("sys/fs/cgroup/a.slice/memory.max", "1073741824\n"),
            ("sys/fs/cgroup/a.slice/memory.current", "805306368\n"),
            ("sys/fs/cgroup/a.slice/memory.stat", "anon 1\ninactive_file 268435456\nactive_file 0\n"),
            ("sys/fs/cgroup/a.slice/b.scope/memory.max", "max\n"),
            ("sys/fs/cgroup/a.slice/b.scope/memory.current", "1\n"),
        ]);
        check_ram_limit_at(root.path(), 512 << 20, 0).unwrap();
        let error = check_ram_limit_at(root.path(), 513 << 20, 0).unwrap_err();
        assert!(error.to_string().contains("a.slice") && error.to_string().contains("512.0 MiB"), "{error}");
        assert!(!error.to_string().contains("b.scope"), "{error}");
    }

    #[test]
    fn version_one_is_read_inside_a_container() {
        let root = tree(&[
            MEMINFO,
            ("proc/self/cgroup", "4:memory:/docker/abc/inner\n0::/\n"),
            (
                "proc/self/mountinfo",
                "31 20 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
                 32 20 0:28 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
            ),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "104857600\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "0\n"),
            ("sys/fs/cgroup/memory/inner/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/inner/memory.usage_in_bytes", "0\n"),
        ]);
        check_ram_limit_at(root.path(), 100 << 20, 0).unwrap();
        check_ram_limit_at(root.path(), 101 << 20, 0).unwrap_err();
    }

    #[test]
    fn memory_keeps_its_size() {
        let meta = create_meta(1 << 20).unwrap();
        for len in [0, 2 << 20] {
            assert!(rustix::fs::ftruncate(&meta, len).is_err(), "{len}");
        }
        let data = create_data(64 << 20).unwrap();
        let len = rustix::fs::fstat(&data).unwrap().st_size as u64;
        assert!(len >= 64 << 20);
        assert!(rustix::fs::ftruncate(&data, len - 4096).is_err());
        assert_eq!(rustix::fs::fstat(&data).unwrap().st_blocks, 0);
    }
}
