//! One scenario: a catalog, its machine at work on a fresh disk, and the figures of both.
//!
//! Owns the commands of one run. Invariant: the counters are read when the machine's work is done, before its disk goes,
//! so that they hold every request of it.

use crate::progress::Progress;
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use spillway_testkit::console;
use spillway_testkit::cpio::{Entry, archive};
use spillway_testkit::daemon::Daemon;
use spillway_testkit::guest::Kit;
use spillway_testkit::process::{cpu_seconds, line, storage_bytes};
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// What the golden image is called.
pub const IMAGE: &str = "debian";
/// The longest that one machine may take.
const DEADLINE: Duration = Duration::from_secs(300);

/// What the steps of the work are, in their order; each is reported when it is done.
pub const STEPS: [(&str, &str); 6] = [
    ("boot", "booted"),
    ("logon", "logged on: 5 MB of small files"),
    ("copy", "copied 256 MB of files"),
    ("save", "saved documents again and again"),
    ("read", "read copies again and compared them"),
    ("trim", "deleted them and gave the space back"),
];

/// What is compared.
pub struct Scenario {
    /// Heading of its column.
    pub name: &'static str,
    /// What it stands for, in a sentence.
    pub what: &'static str,
    /// The catalog that its machine is of.
    pub catalog: &'static str,
    /// Its options of `spillway catalog create`.
    pub options: &'static [&'static str],
}

/// The scenarios of seed 000, in small.
pub const SCENARIOS: [Scenario; 3] = [
    Scenario {
        name: "direct",
        catalog: "direct",
        what: "every write in place in a difference file, past the host's cache: plain MCS, the baseline",
        options: &["--mode", "direct", "--base-cache", "none"],
    },
    Scenario {
        name: "RAM 256M",
        catalog: "ram-256m",
        what: "256 MB of RAM, then the overflow",
        options: &["--ram", "256M", "--overflow", "10G"],
    },
    Scenario {
        name: "RAM 512M",
        catalog: "ram-512m",
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

/// What is used of `spillway machine stats --json`.
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
    /// The command that made its catalog.
    pub spillway: String,
    /// What of it makes the difference.
    pub options: &'static [&'static str],
    /// From the catalog's making until the work began.
    pub boot_seconds: f64,
    /// The same until it was done.
    pub total_seconds: f64,
    pub steps: Vec<Step>,
    pub qemu_cpu_seconds: f64,
    pub spillway_cpu_seconds: f64,
    /// What the kernel read from and wrote to devices for Spillway; `None` where this user may not know.
    pub storage_bytes: Option<(u64, u64)>,
    /// When the work was done.
    pub stats: Stats,
    /// Everything that `spillway machine stats --json` said.
    pub all_stats: serde_json::Value,
}

impl Outcome {
    /// The guest's last word on its own I/O.
    pub fn last(&self) -> Option<&Step> {
        self.steps.last()
    }
}

/// What all of them share: the daemon with the image, and what its machines boot.
pub struct Host {
    pub daemon: Daemon,
    kernel: PathBuf,
    initrd: PathBuf,
}

impl Host {
    /// A daemon of the demo's own, which imports the golden image.
    pub fn new(spillway: &Path, kit: &Kit, dir: &Path) -> Result<Host> {
        let initrd = dir.join("initrd.cpio");
        let payload = [
            Entry::directory("payload"),
            Entry::file("payload/work", 0o755, include_str!("../../../guest/work.sh")),
            Entry::directory("payload/systemd"),
            Entry::file("payload/systemd/work.service", 0o644, include_str!("../../../guest/work.service")),
            Entry::directory("payload/systemd/multi-user.target.wants"),
            Entry::link("payload/systemd/multi-user.target.wants/work.service", "../work.service"),
            // A login there would take the console from the work.
            Entry::link("payload/systemd/serial-getty@ttyS0.service", "/dev/null"),
        ];
        let mut bytes = std::fs::read(kit.initrd()).context("the guest's initrd cannot be read")?;
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes.extend(archive(&payload)?);
        std::fs::write(&initrd, bytes).with_context(|| format!("{}: cannot write", initrd.display()))?;
        let daemon = Daemon::start(spillway, dir, &[])?;
        daemon.ask(&["image", "import", IMAGE, &kit.golden().display().to_string(), "--format", "raw"])?;
        Ok(Host { daemon, kernel: kit.kernel(), initrd })
    }

    /// What the commands of a scenario are.
    pub fn commands(&self, scenario: &Scenario) -> [Vec<String>; 2] {
        let append = "console=ttyS0 quiet loglevel=4 panic=1 spillway.root=/dev/vda systemd.show_status=0";
        let catalog = scenario.catalog;
        let (kernel, initrd) = (self.kernel.display().to_string(), self.initrd.display().to_string());
        let create = ["catalog", "create", catalog, "--image", IMAGE, "--count", "1", "--memory", "768M"];
        let boot = ["--network", "none", "--kernel", &kernel, "--initrd", &initrd, "--append", append];
        let machine = format!("{catalog}-001");
        let words = |words: &[&str]| words.iter().map(ToString::to_string).collect();
        [
            words(&[&create[..], scenario.options, &boot].concat()),
            words(&["machine", "start", &machine, "--wait"]),
        ]
    }
}

/// Runs one.
pub fn run(scenario: &Scenario, host: &Host, progress: &mut Progress) -> Result<Outcome> {
    let daemon = &host.daemon;
    let machine = format!("{}-001", scenario.catalog);
    let commands = host.commands(scenario);
    let started = Instant::now();
    for command in &commands {
        daemon.ask(&command.iter().map(String::as_str).collect::<Vec<_>>())?;
    }
    let run = daemon.json(&["machine", "show", &machine])?["status"]["run"].clone();
    let text = |name: &str| run[name].as_str().with_context(|| format!("the machine has no {name}"));
    let pid = |name: &str| run[name].as_u64().with_context(|| format!("the machine has no {name}"));
    ensure!(
        is_direct(Path::new(text("control_socket")?))?,
        "the overflow has no O_DIRECT, so the host's page cache would take part: name another folder with --dir"
    );
    let (disk, vmm) = (pid("disk_pid")? as u32, pid("vmm_pid")? as u32);
    let mut console = Console::connect(Path::new(text("console_socket")?))?;
    let watched = watch(&mut console, vmm, started, progress)
        .with_context(|| format!("the daemon said:\n{}\nthe guest:\n{}", daemon.tail(), console.tail()))?;

    let all_stats = daemon.json(&["machine", "stats", &machine])?;
    let stats = Stats::deserialize(&all_stats).context("the disk's figures lack one")?;
    let (spillway_cpu_seconds, storage_bytes) = (cpu_seconds(disk), storage_bytes(disk));
    daemon.ask(&["machine", "stop", &machine, "--force", "--wait"])?;
    Ok(Outcome {
        name: scenario.name,
        // Where kernel and initrd lie says nothing.
        spillway: line("spillway", &commands[0]).replace(
            &host.kernel.parent().map_or("".into(), |dir| dir.display().to_string()),
            ".cache/guest/current",
        ),
        options: scenario.options,
        boot_seconds: watched.boot_seconds,
        total_seconds: watched.total_seconds,
        steps: watched.steps,
        qemu_cpu_seconds: watched.cpu_seconds,
        spillway_cpu_seconds,
        storage_bytes,
        stats,
        all_stats,
    })
}

/// Whether a disk writes past the host's page cache.
fn is_direct(control: &Path) -> Result<bool> {
    let mut socket =
        UnixStream::connect(control).with_context(|| format!("{}: no disk", control.display()))?;
    socket.set_read_timeout(Some(Duration::from_secs(10)))?;
    socket.write_all(b"{\"command\": \"ping\"}\n")?;
    let mut answer = String::new();
    BufReader::new(socket).read_line(&mut answer)?;
    let answer: serde_json::Value = serde_json::from_str(&answer)?;
    Ok(answer["ok"]["overflow_direct"] == true)
}

struct Watched {
    boot_seconds: f64,
    total_seconds: f64,
    cpu_seconds: f64,
    steps: Vec<Step>,
}

/// Follows the work until it is done.
fn watch(console: &mut Console, vmm: u32, started: Instant, progress: &mut Progress) -> Result<Watched> {
    let mut watched = Watched { boot_seconds: 0.0, total_seconds: 0.0, cpu_seconds: 0.0, steps: vec![] };
    while let Some(text) = console.next_report(started + DEADLINE)? {
        let value: serde_json::Value =
            serde_json::from_str(&text).with_context(|| format!("the guest reported '{text}'"))?;
        if let Some(error) = value.get("error") {
            bail!("in the guest: {error}");
        } else if value.get("done").is_some() {
            ensure!(watched.steps.len() == STEPS.len(), "the machine's work ended before it was done");
            watched.total_seconds = started.elapsed().as_secs_f64();
            watched.cpu_seconds = cpu_seconds(vmm);
            return Ok(watched);
        }
        let step: Step =
            serde_json::from_value(value).with_context(|| format!("the guest reported '{text}'"))?;
        if watched.steps.is_empty() {
            watched.boot_seconds = started.elapsed().as_secs_f64();
        }
        progress.step(&step.step);
        watched.steps.push(step);
    }
    bail!("the machine did not finish within {DEADLINE:?}")
}

/// A machine's console. What its work reports are objects, one a line.
struct Console {
    hub: console::Console,
    /// How much of its output was looked at.
    seen: usize,
    heard: VecDeque<String>,
}

impl Console {
    fn connect(socket: &Path) -> Result<Console> {
        let hub =
            console::Console::connect(socket).with_context(|| format!("{}: no console", socket.display()))?;
        Ok(Console { hub, seen: 0, heard: VecDeque::new() })
    }

    /// `None`: it is too late.
    fn next_report(&mut self, until: Instant) -> Result<Option<String>> {
        while Instant::now() < until {
            let Some(end) = self.hub.output[self.seen..].iter().position(|byte| *byte == b'\n') else {
                ensure!(!self.hub.has_ended, "the machine has ended");
                self.hub.receive(Duration::from_secs(1)).context("its console")?;
                continue;
            };
            let line = &self.hub.output[self.seen..self.seen + end];
            let text = String::from_utf8_lossy(line).trim().to_owned();
            self.seen += end + 1;
            // Firmware clears the screen and ends no line.
            if let Some(report) = text.find("{\"") {
                return Ok(Some(text[report..].to_owned()));
            }
            self.heard.push_back(text);
            if self.heard.len() > 20 {
                self.heard.pop_front();
            }
        }
        Ok(None)
    }

    /// What it said last that was no report.
    fn tail(&self) -> String {
        self.heard.iter().cloned().collect::<Vec<_>>().join("\n")
    }
}
