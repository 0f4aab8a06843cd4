//! Where a bench takes place: cores, folders, programs, and what the machine is.
//!
//! Owns the folders that all files lie in; they go when it does, or when the bench is interrupted. Invariant:
//! what a part needs is there before it starts anything.

use crate::{Options, Part, cliff};
use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use spillway_lab::Stamp;
use spillway_testkit::Server;
use spillway_testkit::cores::{self, Hardware};
use spillway_testkit::process::clean_up_when_interrupted;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// The place, and what stands in every report about it.
pub struct Environment {
    /// The spillway program.
    pub spillway: PathBuf,
    /// The core that drives and the one that serves.
    pub cores: [usize; 2],
    /// What every report begins with.
    pub origin: Origin,
    disk: TempDir,
    tmpfs: TempDir,
}

/// Where figures come from.
#[derive(Clone, Serialize)]
pub struct Origin {
    /// When, and with which Spillway.
    #[serde(flatten)]
    pub stamp: Stamp,
    /// Whether the points were short.
    pub quick: bool,
    /// The command that was run.
    pub command: String,
    /// What it ran on.
    pub hardware: Hardware,
    /// The core that drove and the core that served.
    pub cores: [usize; 2],
    /// The peers' program and its version.
    pub peer: String,
    /// The program that measures the bare disk, and its version.
    pub probe: String,
}

/// How near the cores and the memory are at one moment.
#[derive(Clone, Copy, Serialize)]
pub struct HostLatency {
    /// A cache line from one core to the other, one way.
    pub cross_core_ns: f64,
    /// A bare 4 KiB copy to a random place in memory.
    pub cold_copy_ns: f64,
}

impl Environment {
    /// Looks at the machine and makes the folders.
    pub fn prepare(options: &Options) -> Result<Environment> {
        let cores = two_cores(options)?;
        let cliff = if options.part.includes(Part::Cliff) { cliff::tmpfs_bytes(options) } else { 0 };
        let peers = if options.part.includes(Part::Peers) || options.part.includes(Part::FirstMinute) {
            3 << 30
        } else {
            0
        };
        let tmpfs_bytes = cliff.max(peers);
        ensure_space(&options.dir, 14 << 30)?;
        ensure_space(&options.tmpfs, tmpfs_bytes)?;
        memory(10 << 30)?;
        let spillway = match &options.spillway {
            Some(path) => path.clone(),
            None => std::env::current_exe()?.with_file_name("spillway"),
        };
        let disk = tempfile::Builder::new().prefix("spillway-bench.").tempdir_in(&options.dir)?;
        let tmpfs = tempfile::Builder::new().prefix("spillway-bench.").tempdir_in(&options.tmpfs)?;
        clean_up_when_interrupted(vec![disk.path().into(), tmpfs.path().into()])?;
        let stamp = Stamp::now(&spillway);
        ensure!(
            options.peers_only || stamp.spillway.is_some(),
            "{}: does not start: run 'make bench', which builds it",
            spillway.display()
        );
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        let origin = Origin {
            stamp,
            quick: options.quick,
            command: spillway_testkit::process::line("bench", &arguments),
            hardware: Hardware::look(&options.dir)?,
            cores,
            peer: version("qemu-storage-daemon")?,
            probe: version("fio")?,
        };
        Ok(Environment { spillway, cores, origin, disk, tmpfs })
    }

    /// Keeps this thread, and what it starts without a word about cores, on the core that drives.
    pub fn keep_to_core(&self) -> Result<()> {
        cores::pin(self.cores[0])
    }

    /// A folder on the disk.
    pub fn disk(&self) -> &Path {
        self.disk.path()
    }

    /// A folder on tmpfs.
    pub fn tmpfs(&self) -> &Path {
        self.tmpfs.path()
    }

    /// The core that serves.
    pub fn serving(&self) -> usize {
        self.cores[1]
    }

    /// How near things are now.
    pub fn host_latency(&self) -> Result<HostLatency> {
        let [driving, serving] = self.cores;
        Ok(HostLatency {
            cross_core_ns: cores::cross_core_ns(driving, serving)?,
            cold_copy_ns: cores::cold_copy_ns(serving)?,
        })
    }

    /// How a server was started. Where the program lies says nothing.
    pub fn command(&self, server: &Server) -> String {
        server.command.replace(&self.spillway.display().to_string(), "spillway")
    }
}

impl Origin {
    /// What a figure says little without, a line each.
    pub fn lines(&self) -> Vec<String> {
        let h = &self.hardware;
        let gib = h.ram_bytes as f64 / f64::from(1 << 30);
        vec![
            format!("Hardware: {}, {} cores, {gib:.0} GiB, kernel {}", h.cpu, h.cores, h.kernel),
            format!("Disk:     {}", h.disk),
            format!("Memory:   huge pages for shared memory: {}", h.shmem_huge_pages),
            format!("Measured: {}; {}; {}", self.stamp, self.peer, self.probe),
            format!("Command:  {}", self.command),
        ]
    }
}

impl Origin {
    /// Which core did what, where one drove and another served.
    pub fn cores_line(&self) -> String {
        format!("Driver on core {}, each disk on core {}", self.cores[0], self.cores[1])
    }
}

/// The order in which a round takes its points: each load on its disks in turn, beginning with another disk in each
/// round, so that none is always first.
pub fn order<L: PartialEq>(loads: &[L], round: usize) -> Vec<usize> {
    let mut order = Vec::with_capacity(loads.len());
    for disks in loads.chunk_by(PartialEq::eq) {
        let begin = order.len();
        order.extend(begin..begin + disks.len());
        order[begin..].rotate_left(round % disks.len());
    }
    order
}

fn two_cores(options: &Options) -> Result<[usize; 2]> {
    let there = cores::available()?;
    match options.cores[..] {
        [] => match there[..] {
            [a, b, ..] => Ok([a, b]),
            _ => bail!("bench needs two cores, one to drive and one to serve: there is {}", there.len()),
        },
        [a, b] if a != b && there.contains(&a) && there.contains(&b) => Ok([a, b]),
        _ => bail!("--cores takes two different cores of {there:?}"),
    }
}

fn ensure_space(dir: &Path, bytes: u64) -> Result<()> {
    let stat = rustix::fs::statvfs(dir).with_context(|| format!("{}: cannot be used", dir.display()))?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    ensure!(
        free >= bytes,
        "{}: bench needs {} GiB there, {:.1} are free: give another folder with --dir or --tmpfs",
        dir.display(),
        bytes.div_ceil(1 << 30),
        free as f64 / f64::from(1 << 30)
    );
    Ok(())
}

fn memory(bytes: u64) -> Result<()> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let kib: u64 = text
        .lines()
        .find(|l| l.starts_with("MemAvailable"))
        .and_then(|l| l.split_whitespace().nth(1)?.parse().ok())
        .context("/proc/meminfo has no MemAvailable")?;
    ensure!(
        kib * 1024 >= bytes,
        "bench keeps all disks up at once and needs {} GiB of memory: {:.1} are available",
        bytes >> 30,
        kib as f64 / f64::from(1 << 20)
    );
    Ok(())
}

fn version(program: &str) -> Result<String> {
    let output = Command::new(program)
        .arg("--version")
        .output()
        .with_context(|| format!("{program} cannot be started: run 'make bench', or 'make install-deps'"))?;
    Ok(String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or(program).to_string())
}

#[cfg(test)]
mod tests {
    #[test]
    fn each_round_takes_all_points_and_begins_with_another_disk() {
        let loads = ["fits", "fits", "fits", "tight", "tight"];
        assert_eq!(super::order(&loads, 0), [0, 1, 2, 3, 4]);
        assert_eq!(super::order(&loads, 1), [1, 2, 0, 4, 3]);
        assert_eq!(super::order(&loads, 2), [2, 0, 1, 3, 4]);
    }
}
