//! One scenario: a fresh disk, one machine that works on it, and the figures of both.
//!
//! Owns the processes of one run. Invariant: the counters are read after the machine has ended and before the
//! disk goes, so that they hold every request of the run.

use crate::progress::Progress;
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use spillway_lab::Disk;
use spillway_lab::cpio::Entry;
use spillway_lab::guest::{Accelerator, Guest, GuestDisk, GuestSpec, Kit};
use spillway_lab::process::{cpu_seconds, storage_bytes};
use std::path::Path;
use std::time::{Duration, Instant};

/// The longest that one machine may take.
const DEADLINE: Duration = Duration::from_secs(300);

/// What the steps of the work are, in their order; each is reported when it is done.
pub const STEPS: [(&str, &str); 6] = [
    ("boot", "booted"),
    ("logon", "logged on: 5 MB of small files"),
    ("copy", "copied 256 MB of files"),
    ("save", "saved documents again and again"),
    ("read", "read copies again and compared them"),
    ("trim", "deleted them and gave the room back"),
];

/// What is compared.
pub struct Scenario {
    /// Heading of its column.
    pub name: &'static str,
    /// What it stands for, in a sentence.
    pub what: &'static str,
    /// Its options of `spillway serve`.
    pub options: &'static [&'static str],
}

/// The scenarios of seed 000, in small.
pub const SCENARIOS: [Scenario; 3] = [
    Scenario {
        name: "direct",
        what: "every write in place in a difference file, past the host's cache: plain MCS, the baseline",
        options: &["--mode", "direct", "--base-cache", "none"],
    },
    Scenario {
        name: "RAM 256M",
        what: "256 MB of RAM, then the overflow",
        options: &["--ram", "256M", "--overflow", "10G"],
    },
    Scenario {
        name: "RAM 512M",
        what: "512 MB of RAM, then the overflow",
        options: &["--ram", "512M", "--overflow", "10G"],
    },
];

/// Reads and writes of one plane.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Plane {
    pub reads: u64,
    pub writes: u64,
    pub read_bytes: u64,
    pub written_bytes: u64,
}

/// The base image's plane: also what the host's page cache did not have.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct BasePlane {
    pub reads: u64,
    pub read_bytes: u64,
    pub store_reads: u64,
    pub store_read_bytes: u64,
}

/// All planes.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Planes {
    pub guest: Plane,
    pub ram: Plane,
    pub overflow: Plane,
    pub base: BasePlane,
}

/// The RAM tier.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Ram {
    pub used_bytes: u64,
    pub peak_bytes: u64,
}

/// The overflow or difference file.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Overflow {
    pub used_bytes: u64,
    pub file_bytes: u64,
}

/// Durations of one operation.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Latency {
    pub p50_ns: u64,
    pub p99_ns: u64,
    pub max_ns: u64,
}

/// Durations.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Latencies {
    pub read: Latency,
    pub write: Latency,
}

/// Discards.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Discards {
    pub count: u64,
    pub bytes: u64,
}

/// What is used of `spillway stats --json`.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Stats {
    pub planes: Planes,
    pub ram: Ram,
    pub overflow: Overflow,
    pub discards: Discards,
    pub latency: Latencies,
}

/// What the guest's kernel counted for its disk.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct GuestIo {
    pub reads: u64,
    pub read_sectors: u64,
    pub writes: u64,
    pub written_sectors: u64,
    pub discards: u64,
}

/// Processor time inside the guest, in hundredths of a second.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct GuestCpu {
    pub busy: u64,
    pub iowait: u64,
}

/// One report of the work.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Step {
    pub step: String,
    pub uptime: f64,
    pub io: GuestIo,
    pub cpu: GuestCpu,
}

/// What one scenario showed.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    pub name: &'static str,
    pub spillway: String,
    pub qemu: String,
    /// From QEMU's start until the work began.
    pub boot_seconds: f64,
    /// From QEMU's start until its end.
    pub total_seconds: f64,
    pub steps: Vec<Step>,
    pub qemu_cpu_seconds: f64,
    pub spillway_cpu_seconds: f64,
    /// What the kernel read from and wrote to devices for Spillway; `None` where this user may not know.
    pub storage_bytes: Option<(u64, u64)>,
    /// After the machine has powered off.
    pub stats: Stats,
    /// Everything that `spillway stats --json` said.
    pub all_stats: serde_json::Value,
}

impl Outcome {
    /// The guest's last word on its own I/O.
    pub fn last(&self) -> Option<&Step> {
        self.steps.last()
    }
}

/// Runs one.
pub fn run(
    scenario: &Scenario,
    spillway: &Path,
    kit: &Kit,
    accelerator: Accelerator,
    work: &Path,
    progress: &mut Progress,
) -> Result<Outcome> {
    let dir = tempfile::Builder::new().prefix("spillway-demo.").tempdir_in(work)?;
    let disk = Disk::start_with(spillway, dir.path(), &kit.golden(), scenario.options)?;
    ensure!(
        disk.report["overflow_direct"] == true,
        "{} has no O_DIRECT, so the host's page cache would take part: name another directory with --dir",
        work.display()
    );

    let mut guest = Guest::start(
        kit,
        &GuestSpec {
            dir: dir.path().into(),
            disks: vec![GuestDisk::VhostUser(disk.vhost())],
            system: true,
            payload: vec![
                Entry::file("payload/work", 0o755, include_str!("../../../guest/work.sh")),
                Entry::directory("payload/systemd"),
                Entry::file(
                    "payload/systemd/work.service",
                    0o644,
                    include_str!("../../../guest/work.service"),
                ),
                Entry::directory("payload/systemd/multi-user.target.wants"),
                Entry::link("payload/systemd/multi-user.target.wants/work.service", "../work.service"),
            ],
            memory_mib: 768,
            vcpus: 1,
            accelerator,
            reboots: false,
        },
    )?;
    let watched = watch(&mut guest, progress).with_context(|| format!("spillway said:\n{}", disk.log()))?;

    let all_stats = disk.stats()?;
    let stats = Stats::deserialize(&all_stats).context("spillway stats lacks a figure")?;
    let spillway_cpu_seconds = cpu_seconds(disk.supervisor());
    let storage_bytes = storage_bytes(disk.supervisor());
    // Where program and guest lie says nothing.
    let plain = |command: &str| {
        let command = command.replace(&spillway.display().to_string(), "spillway");
        command.replace(&kit.dir().display().to_string(), ".cache/guest/current")
    };
    let outcome = Outcome {
        name: scenario.name,
        spillway: plain(disk.command()),
        qemu: plain(guest.command()),
        boot_seconds: watched.boot_seconds,
        total_seconds: watched.total_seconds,
        steps: watched.steps,
        qemu_cpu_seconds: watched.cpu_seconds,
        spillway_cpu_seconds,
        storage_bytes,
        stats,
        all_stats,
    };
    disk.stop()?;
    Ok(outcome)
}

struct Watched {
    boot_seconds: f64,
    total_seconds: f64,
    cpu_seconds: f64,
    steps: Vec<Step>,
}

/// Follows the work until the machine has powered off.
fn watch(guest: &mut Guest, progress: &mut Progress) -> Result<Watched> {
    let (mut seen, mut done) = (0, false);
    let mut watched = Watched { boot_seconds: 0.0, total_seconds: 0.0, cpu_seconds: 0.0, steps: vec![] };
    loop {
        let ended = guest.ended()?;
        // While it has not ended its processor time can be read; the last reading stays.
        watched.cpu_seconds = cpu_seconds(guest.pid()).max(watched.cpu_seconds);
        for line in guest.reports().into_iter().skip(seen) {
            seen += 1;
            let value: serde_json::Value = serde_json::from_str(&line)
                .with_context(|| format!("the guest reported '{line}'\n{}", guest.tail()))?;
            if let Some(error) = value.get("error") {
                bail!("in the guest: {error}\n{}", guest.tail());
            } else if value.get("done").is_some() {
                done = true;
            } else {
                let step: Step =
                    serde_json::from_value(value).with_context(|| format!("the guest reported '{line}'"))?;
                if watched.steps.is_empty() {
                    watched.boot_seconds = guest.started().elapsed().as_secs_f64();
                }
                progress.step(&step.step);
                watched.steps.push(step);
            }
        }
        if let Some(status) = ended {
            ensure!(
                status.success() && done && watched.steps.len() == STEPS.len(),
                "the machine ended with {status} before its work was done\n{}",
                guest.tail()
            );
            watched.total_seconds = guest.started().elapsed().as_secs_f64();
            return Ok(watched);
        }
        let now = Instant::now();
        ensure!(
            now - guest.started() < DEADLINE,
            "the machine did not finish within {DEADLINE:?}\n{}",
            guest.tail()
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}
