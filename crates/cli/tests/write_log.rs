//! Power losses of mode `persistent` on real file systems: everything that a file system writes to its device, and each of its
//! flushes, is logged (QEMU's `blklogwrites`, in the format of dm-log-writes) while a machine writes and flushes. Then devices
//! are made as a power loss could have left them: what a flush had ended for, and any of what came later.
//!
//! Owns the replay, and what each sector may be. Invariant: a sector is what it was at the last FLUSH that had been answered, or
//! something that was written since. `SPILLWAY_POWER_LOSSES` says how many are looked at on each file system (8).

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

mod common;

use common::volume::{VOLUME_BYTES, Volume, kill, mount_for_this_thread_alone, runs, serve};
use common::{World, is_root, until};
use spillway_control::{Content, DiskAtRest, SupervisorError};
use spillway_testkit::{Rng, skip};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

const SECTOR: usize = 512;
const DISK_BYTES: u64 = 16 << 20;
/// Blocks that are written.
const BLOCKS: u64 = 1024;
const IMAGE: u64 = u64::MAX;

/// A loop device over a file that QEMU serves by FUSE, with a log of what is written to it.
struct LoggedDevice {
    daemon: Child,
    device: String,
    log: PathBuf,
}

impl LoggedDevice {
    /// `None`: this QEMU cannot do it.
    fn over(world: &World, image: &Path) -> Option<LoggedDevice> {
        let [log, export] = ["log", "export"].map(|name| world.path(name));
        for file in [&log, &export] {
            File::create(file).unwrap();
        }
        let file =
            |name: &str, path: &Path| format!("driver=file,node-name={name},filename={}", path.display());
        let mut daemon = Command::new("qemu-storage-daemon");
        daemon.arg("--blockdev").arg(file("image", image)).arg("--blockdev").arg(file("writes", &log));
        daemon.args([
            "--blockdev",
            "driver=blklogwrites,node-name=logged,file=image,log=writes,log-sector-size=512",
        ]);
        daemon
            .arg("--export")
            .arg(format!("type=fuse,id=export,node-name=logged,mountpoint={},writable=on", export.display()));
        let mut daemon = daemon.spawn().unwrap();
        let mut ended = false;
        until("it is exported", || {
            ended = daemon.try_wait().unwrap().is_some();
            ended || export.metadata().is_ok_and(|found| found.len() == VOLUME_BYTES)
        });
        if ended {
            return None;
        }
        let found = Command::new("losetup").args(["--find", "--show"]).arg(&export).output().unwrap();
        let device = String::from_utf8(found.stdout).unwrap().trim().to_owned();
        let logged = LoggedDevice { daemon, device, log };
        (!logged.device.is_empty()).then_some(logged)
    }

    /// Bytes of the log so far.
    fn logged(&self) -> u64 {
        self.log.metadata().unwrap().len()
    }
}

impl Drop for LoggedDevice {
    fn drop(&mut self) {
        if !self.device.is_empty() {
            let _ = Command::new("losetup").arg("--detach").arg(&self.device).output();
        }
        let pid = rustix::process::Pid::from_child(&self.daemon);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let _ = self.daemon.wait();
    }
}

/// One entry of the log, with where it ends there.
enum Entry {
    Flush,
    Write { at: u64, data: Vec<u8> },
    Zero { at: u64, len: u64 },
}

/// The log in the format of dm-log-writes: a superblock, then for each entry a sector that describes it, and its data.
fn entries(log: &[u8]) -> Vec<(u64, Entry)> {
    let word = |at: usize| u64::from_le_bytes(log[at..at + 8].try_into().unwrap());
    assert_eq!((word(0), word(8)), (0x6a_7366_7773_6872, 1), "magic and version");
    let (mut entries, mut at) = (Vec::new(), SECTOR);
    for _ in 0..word(16) {
        let [sector, sectors, flags] = [0, 8, 16].map(|field| word(at + field));
        at += SECTOR;
        let (to, len) = (sector * SECTOR as u64, sectors * SECTOR as u64);
        // Flush 1, FUA 2, discard 4.
        assert_eq!(flags & !7, 0);
        let mut found = Vec::new();
        if flags & 1 != 0 {
            found.push(Entry::Flush);
        }
        if flags & 4 != 0 {
            found.push(Entry::Zero { at: to, len });
        } else if len > 0 {
            found.push(Entry::Write { at: to, data: log[at..at + len as usize].to_vec() });
            at += len as usize;
        }
        if flags & 2 != 0 {
            found.push(Entry::Flush);
        }
        entries.extend(found.into_iter().map(|entry| (at as u64, entry)));
    }
    entries
}

fn apply(image: &File, entry: &Entry) {
    match entry {
        Entry::Flush => {}
        Entry::Write { at, data } => image.write_all_at(data, *at).unwrap(),
        Entry::Zero { at, len } => image.write_all_at(&vec![0; *len as usize], *at).unwrap(),
    }
}

/// What was written to each sector, with the number of the request, in order; and the requests that had ended when a FLUSH had
/// been answered, with the length of the log then.
struct History {
    sectors: Vec<Vec<(u64, u64)>>,
    flushes: Vec<(u64, u64)>,
}

impl History {
    /// A machine writes, discards and flushes.
    fn make(world: &World, device: &LoggedDevice, disk: &Path, rng: &mut Rng) -> History {
        let (server, mut driver) = serve(world, disk);
        let none = vec![(0, IMAGE)];
        let mut history =
            History { sectors: vec![none; (BLOCKS * 8) as usize], flushes: vec![(0, device.logged())] };
        for request in 1..2_000 {
            let (block, kind) = (rng.below(BLOCKS), rng.below(40));
            let (first, sectors) = match kind {
                0..2 => {
                    driver.flush().unwrap();
                    history.flushes.push((request, device.logged()));
                    continue;
                }
                2..6 => (0, 8),
                _ => {
                    let first = rng.below(8);
                    (first, 1 + rng.below(8 - first))
                }
            };
            let offset = block * 4096 + first * SECTOR as u64;
            let content = if kind < 4 { 0 } else { request };
            match content {
                0 => driver.discard(offset, sectors * SECTOR as u64).unwrap(),
                _ => driver
                    .write_at(offset, &request.to_le_bytes().repeat(sectors as usize * SECTOR / 8))
                    .unwrap(),
            }
            for sector in 0..sectors {
                history.sectors[(block * 8 + first + sector) as usize].push((request, content));
            }
        }
        drop(driver);
        kill(server);
        history
    }

    /// Compares a disk, found after a power loss when the log had this length. How many sectors are newer than they must be.
    fn check(&self, disk: &Path, log_bytes: u64) -> u64 {
        let flushed = self.flushes.iter().rfind(|&&(_, logged)| logged <= log_bytes).unwrap().0;
        let disk = DiskAtRest::open(disk, "golden:1", DISK_BYTES).unwrap();
        let mut newer = 0;
        let listed = disk.parts(|part| {
            let (first, end) = (part.from / SECTOR as u64, (part.from + part.len) / SECTOR as u64);
            for sector in first..end.min(self.sectors.len() as u64) {
                let mut bytes = [0; SECTOR];
                match part.content {
                    Content::Image => bytes.fill(0xff),
                    Content::Zero => {}
                    Content::Own { at } => {
                        disk.file().read_exact_at(&mut bytes, at + (sector - first) * SECTOR as u64).unwrap();
                    }
                }
                let content = u64::from_le_bytes(bytes[..8].try_into().unwrap());
                assert!(bytes == content.to_le_bytes().repeat(SECTOR / 8)[..], "sector {sector} is torn");
                let history = &self.sectors[sector as usize];
                let last = history.iter().rposition(|&(request, _)| request <= flushed).unwrap();
                let found = history[last..].iter().position(|&(_, written)| written == content);
                let Some(found) = found else {
                    panic!(
                        "sector {sector} is of request {content}, and {flushed} were flushed: {history:?}"
                    );
                };
                newer += u64::from(found > 0);
            }
            Ok::<_, SupervisorError>(())
        });
        listed.unwrap();
        newer
    }
}

fn lose_power(kind: &str) {
    if !is_root() {
        return skip("file systems can be mounted by root only");
    }
    mount_for_this_thread_alone();
    let losses = std::env::var("SPILLWAY_POWER_LOSSES").map_or(8, |text| text.parse().unwrap());
    let seed =
        std::env::var("SPILLWAY_SEED").map_or_else(|_| std::process::id().into(), |s| s.parse().unwrap());
    println!("SPILLWAY_SEED={seed}");
    let mut rng = Rng::new(seed);
    let world = World::new();
    std::fs::write(world.path("base.raw"), vec![0xff; DISK_BYTES as usize]).unwrap();
    let [start, written] = ["start", "written"].map(|name| Volume::of(&world, name));
    start.make(kind);
    start.copied(&written);
    let Some(device) = LoggedDevice::over(&world, &written.image) else {
        return skip("qemu-storage-daemon has no FUSE exports here");
    };
    // Unmounted before its device goes.
    let written = written;
    if !runs(Command::new("mount").arg(&device.device).arg(&written.at)) {
        return skip(&format!("this host mounts no loop device with {kind}"));
    }
    let history = History::make(&world, &device, &written.disk(), &mut rng);
    written.unmount();
    let log = device.log.clone();
    drop(device);
    let log = entries(&std::fs::read(log).unwrap());
    // From the first FLUSH that a machine was answered on: before that there is no disk.
    let (first, last) = (history.flushes[0].1, history.flushes.last().unwrap().1);
    let place = |bytes: u64| log.partition_point(|&(end, _)| end <= bytes);
    let mut ends: Vec<_> =
        (0..losses).map(|_| place(first) + rng.below((place(last) - place(first)) as u64) as usize).collect();
    ends.sort_unstable();
    let stable = File::options().write(true).open(&start.image).unwrap();
    let (lost, mut applied, mut newer) = (Volume::of(&world, "lost"), 0, 0);
    for end in ends {
        let flushed = log[..end].iter().rposition(|(_, entry)| matches!(entry, Entry::Flush)).unwrap_or(0);
        log[applied..flushed.max(applied)].iter().for_each(|(_, entry)| apply(&stable, entry));
        applied = flushed.max(applied);
        start.copied(&lost);
        let image = File::options().write(true).open(&lost.image).unwrap();
        // All, or any of them.
        let all = rng.below(4) == 0;
        for (_, entry) in log[applied..end].iter().filter(|_| all || rng.below(2) == 0) {
            apply(&image, entry);
        }
        drop(image);
        assert!(lost.mount(), "{kind} as it was left after {end} entries");
        newer += history.check(&lost.disk(), log[end - 1].0);
        lost.unmount();
    }
    println!(
        "{kind}: {losses} power losses of {} log entries, {} flushes, {newer} sectors newer than they must be",
        log.len(),
        history.flushes.len()
    );
}

#[test]
fn what_was_flushed_is_there_on_ext4() {
    lose_power("ext4");
}

#[test]
fn what_was_flushed_is_there_on_xfs() {
    lose_power("xfs");
}

#[test]
fn what_was_flushed_is_there_on_btrfs() {
    lose_power("btrfs");
}
