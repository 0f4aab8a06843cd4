//! What a process holds: memory of its own, memory in memfds, disk space in files without a name, fds.
//!
//! Reads /proc and owns nothing. Invariant: a file that several processes hold counts once.

use anyhow::{Context, Result, ensure};
use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Anonymous memory that is resident: what a process has for itself.
pub fn anonymous_bytes(pid: u32) -> Result<u64> {
    let path = format!("/proc/{pid}/status");
    let text = std::fs::read_to_string(&path).with_context(|| format!("{path}: cannot read"))?;
    let kib = text.lines().find_map(|l| l.strip_prefix("RssAnon:"));
    let kib = kib.and_then(|l| l.trim().strip_suffix(" kB")).and_then(|n| n.trim().parse::<u64>().ok());
    Ok(kib.with_context(|| format!("{path}: no RssAnon"))? << 10)
}

/// Memory that a process has mapped, by its share (PSS): a page that n processes have mapped counts 1/n for each, so
/// that the sum over all processes counts it once. Memfds are left out: [`memfd_bytes`] counts those, mapped or not.
pub fn proportional_bytes(pid: u32) -> Result<u64> {
    let path = format!("/proc/{pid}/smaps");
    let text = std::fs::read_to_string(&path).with_context(|| format!("{path}: cannot read"))?;
    let (mut is_memfd, mut mappings, mut kib) = (false, 0, 0);
    for line in text.lines() {
        if let Some(share) = line.strip_prefix("Pss:") {
            let share = share.trim().strip_suffix(" kB").and_then(|n| n.parse::<u64>().ok());
            let share = share.with_context(|| format!("{path}: {line}"))?;
            mappings += 1;
            kib += if is_memfd { 0 } else { share };
        } else if line.split(' ').next().is_some_and(|word| !word.ends_with(':')) {
            // The line that begins a mapping ends with its file.
            is_memfd = line.contains(" /memfd:");
        }
    }
    ensure!(mappings > 0, "{path}: it has nothing mapped");
    Ok(kib << 10)
}

/// Allocated bytes of the memfds whose name begins so, and that any of these processes has open.
pub fn memfd_bytes(pids: &[u32], name: &str) -> Result<u64> {
    let link_begins = format!("/memfd:{name}");
    allocated(pids, |link| link.to_string_lossy().starts_with(&link_begins))
}

/// Allocated bytes of the files below a directory that have no name any more and that one of these processes
/// has open.
pub fn nameless_bytes(pids: &[u32], dir: &Path) -> Result<u64> {
    allocated(pids, |link| link.starts_with(dir) && link.to_string_lossy().ends_with(" (deleted)"))
}

/// How many fds a process has open.
pub fn fds(pid: u32) -> Result<usize> {
    Ok(links(pid)?.len())
}

fn links(pid: u32) -> Result<Vec<(PathBuf, PathBuf)>> {
    let dir = format!("/proc/{pid}/fd");
    let entries = std::fs::read_dir(&dir).with_context(|| format!("{dir}: cannot read"))?;
    // One that was closed meanwhile is no more.
    Ok(entries.flatten().filter_map(|e| Some((e.path(), std::fs::read_link(e.path()).ok()?))).collect())
}

fn allocated(pids: &[u32], wanted: impl Fn(&Path) -> bool) -> Result<u64> {
    let (mut seen, mut bytes) = (HashSet::new(), 0);
    for &pid in pids {
        for (fd, link) in links(pid)? {
            if wanted(&link)
                && let Ok(file) = std::fs::metadata(&fd)
                && seen.insert((file.dev(), file.ino()))
            {
                bytes += file.blocks() * 512;
            }
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, memfd_create};
    use std::io::Write;

    #[test]
    fn a_memfd_and_a_nameless_file_count_once_with_what_they_hold() {
        let pid = std::process::id();
        let mut memory = std::fs::File::from(memfd_create("its-own", MemfdFlags::CLOEXEC).unwrap());
        let before = memfd_bytes(&[pid], "its").unwrap();
        memory.write_all(&[1; 3 << 20]).unwrap();
        let twice = memory.try_clone().unwrap();
        let grown = memfd_bytes(&[pid, pid], "its").unwrap() - before;
        assert!((3 << 20..4 << 20).contains(&grown), "{grown}");
        assert_eq!(memfd_bytes(&[pid], "another").unwrap(), 0);
        drop(twice);

        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let mut file = tempfile::tempfile_in(dir.path()).unwrap();
        file.write_all(&[1; 1 << 20]).unwrap();
        file.sync_all().unwrap();
        let held = nameless_bytes(&[pid], dir.path()).unwrap();
        assert!((1 << 20..2 << 20).contains(&held), "{held}");
        assert!(fds(pid).unwrap() > 4);
    }

    /// One test: two would see each other's memory, as both look at this process. Tests of other kinds, which do so too, take less.
    #[test]
    fn memory_grows_with_what_is_touched_and_a_share_but_for_memfds() {
        const HELD: u64 = 256 << 20;
        const OTHERS: u64 = 96 << 20;
        let pid = std::process::id();
        let before = (anonymous_bytes(pid).unwrap(), proportional_bytes(pid).unwrap());
        let held = vec![1u8; HELD as usize];
        let mut memory = crate::shared::SharedMemory::new(HELD as usize).unwrap();
        memory.slice(0, HELD as usize).fill(1);
        let after = (anonymous_bytes(pid).unwrap(), proportional_bytes(pid).unwrap());
        for (before, after) in [(before.0, after.0), (before.1, after.1)] {
            assert!((before + HELD - OTHERS..before + HELD + OTHERS).contains(&after), "{before} {after}");
        }
        drop((held, memory));
    }
}
