//! The disks that are measured side by side: Spillway as shipped, and its peers.
//!
//! Owns their files and their processes. Invariant: what [`Target::start`] gives serves from the same core as all others,
//! and has been written over its whole span, in order, before anything is measured.

use crate::environment::Environment;
use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde_json::Value;
use spillway_testkit::steady::{LogLevel, Patience, Settled, Steady};
use spillway_testkit::{Driver, End, Load, Measured, Server, Shape};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// The deepest queue that is measured.
pub const DEEPEST: usize = 64;
const GIB: u64 = 1 << 30;

/// A program that serves a disk, and with what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Serving {
    /// Spillway in the mode `ram+overflow`.
    Spillway {
        /// Limit of the RAM tier.
        ram_bytes: u64,
        /// Limit of the overflow.
        overflow_bytes: u64,
    },
    /// Spillway in the mode `direct`.
    Direct,
    /// QEMU's copy-on-write overlay on tmpfs.
    Qcow2Tmpfs,
    /// The same on disk, past the page cache.
    Qcow2Disk,
    /// QEMU's device that stores nothing.
    NullCo,
}

/// One kind of disk in the peers' part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Spillway with RAM for the whole span.
    Spillway,
    /// Spillway with RAM for 40% of the span, and an overflow with much slack.
    SpillwayTight,
    /// The same with an overflow hardly larger than the span: the collector has to work.
    SpillwayTighter,
    /// QEMU's copy-on-write overlay on tmpfs.
    Qcow2Tmpfs,
    /// The same on disk, past the page cache.
    Qcow2Disk,
    /// QEMU's device that stores nothing: the transport's own limit.
    NullCo,
}

impl Kind {
    /// Every kind, in the order of the table.
    pub const ALL: [Kind; 6] = [
        Kind::Spillway,
        Kind::Qcow2Tmpfs,
        Kind::Qcow2Disk,
        Kind::NullCo,
        Kind::SpillwayTight,
        Kind::SpillwayTighter,
    ];

    /// The name in the table.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Spillway => "spillway, RAM 3G",
            Kind::SpillwayTight => "spillway, RAM 1G, overflow 8G",
            Kind::SpillwayTighter => "spillway, RAM 1G, overflow 3G",
            Kind::Qcow2Tmpfs => "qcow2 on tmpfs",
            Kind::Qcow2Disk => "qcow2 on disk, O_DIRECT",
            Kind::NullCo => "null-co (stores nothing)",
        }
    }

    /// What it is, and what was chosen for it.
    pub fn what(self) -> &'static str {
        match self {
            Kind::Spillway => "the working set fits the RAM tier",
            Kind::SpillwayTight => "RAM for 40% of it; an overflow with much slack",
            Kind::SpillwayTighter => "the same with little slack, so that the collector has to work",
            Kind::Qcow2Tmpfs => {
                "qemu-storage-daemon, overlay through tmpfs's page cache, aio=threads (the default)"
            }
            Kind::Qcow2Disk => "the same daemon, overlay on the disk, cache.direct=on, aio=io_uring",
            Kind::NullCo => {
                "the same daemon, read-zeroes=off (the default): neither stores nor fills, the transport's limit"
            }
        }
    }

    /// How it is served.
    pub fn serving(self) -> Serving {
        match self {
            Kind::Spillway => Serving::Spillway { ram_bytes: 3 * GIB, overflow_bytes: 8 * GIB },
            Kind::SpillwayTight => Serving::Spillway { ram_bytes: GIB, overflow_bytes: 8 * GIB },
            Kind::SpillwayTighter => Serving::Spillway { ram_bytes: GIB, overflow_bytes: 3 * GIB },
            Kind::Qcow2Tmpfs => Serving::Qcow2Tmpfs,
            Kind::Qcow2Disk => Serving::Qcow2Disk,
            Kind::NullCo => Serving::NullCo,
        }
    }

    /// Whether it is ours.
    pub fn is_spillway(self) -> bool {
        self.serving().is_spillway()
    }
}

impl Serving {
    fn is_spillway(self) -> bool {
        matches!(self, Serving::Spillway { .. } | Serving::Direct)
    }
}

/// A disk that is being served, with the one connection that drives it.
pub struct Target {
    // Fields drop in this order: the connection goes before its process, the files go last.
    driver: Driver,
    /// Its process.
    pub server: Server,
    control: Option<PathBuf>,
    nbd: PathBuf,
    _files: tempfile::TempDir,
    _tmpfs: tempfile::TempDir,
}

impl Target {
    /// Starts a server on the core that serves, and writes its disk over once.
    pub fn start(serving: Serving, disk_bytes: u64, environment: &Environment) -> Result<Target> {
        let shape = Shape { depth: DEEPEST, request_bytes: 128 << 10, ..Shape::default() };
        let mut target = Target::fresh(serving, disk_bytes, environment, Some(environment.serving()), shape)?;
        let server = &target.server;
        target
            .driver
            .run(&Load::fill(disk_bytes, 128 << 10))
            .with_context(|| format!("{}: writing the disk over\n{}", server.command, server.tail()))?;
        Ok(target)
    }

    /// Starts a server whose disk nobody has written to; without `core` on any.
    pub fn fresh(
        serving: Serving,
        disk_bytes: u64,
        environment: &Environment,
        core: Option<usize>,
        shape: Shape,
    ) -> Result<Target> {
        let files = tempfile::Builder::new().prefix("disk.").tempdir_in(environment.disk())?;
        let tmpfs = tempfile::Builder::new().prefix("disk.").tempdir_in(environment.tmpfs())?;
        let [socket, nbd, control, base] =
            ["vhost", "nbd", "control", "base.raw"].map(|name| files.path().join(name));
        std::fs::File::create(&base)?.set_len(disk_bytes)?;
        let daemon_program = Path::new("qemu-storage-daemon");
        let (program, nodes) = match serving {
            Serving::Spillway { .. } | Serving::Direct => (environment.spillway.as_path(), vec![]),
            Serving::Qcow2Tmpfs => {
                (daemon_program, qcow2(&base, &tmpfs.path().join("overlay.qcow2"), ",aio=threads")?)
            }
            Serving::Qcow2Disk => {
                let overlay = files.path().join("overlay.qcow2");
                (daemon_program, qcow2(&base, &overlay, ",cache.direct=on,aio=io_uring")?)
            }
            Serving::NullCo => {
                (daemon_program, vec![format!("driver=null-co,node-name=disk,size={disk_bytes}")])
            }
        };
        let arguments = match serving {
            Serving::Spillway { ram_bytes, overflow_bytes } => {
                let limits = ["--ram".into(), mib(ram_bytes), "--overflow".into(), mib(overflow_bytes)];
                serve(&base, limits.to_vec(), files.path())
            }
            Serving::Direct => serve(&base, vec!["--mode".into(), "direct".into()], files.path()),
            _ => daemon(&nodes, &socket, &nbd),
        };
        let name = program.to_str().context("the program's path is not UTF-8")?;
        let mut server = Server::start(name, name, &arguments, core, &files.path().join("log"))?;
        server.wait_for(&socket, Duration::from_secs(30))?;
        let driver = Driver::connect_with(&socket, shape)
            .with_context(|| format!("{}\n{}", server.command, server.tail()))?;
        let control = serving.is_spillway().then_some(control);
        Ok(Target { server, driver, control, nbd, _files: files, _tmpfs: tmpfs })
    }

    /// What `spillway stats --json` says; `None` for a peer.
    pub fn stats(&self) -> Result<Option<Value>> {
        self.control.as_deref().map(spillway_testkit::disk::stats).transpose()
    }

    /// Where an NBD client connects; a peer's export is named `nbd`.
    pub fn nbd(&self) -> &Path {
        &self.nbd
    }

    /// Runs a load.
    pub fn run(&mut self, load: &Load) -> Result<Measured> {
        let measured = self.driver.run(load);
        measured.with_context(|| format!("{}\n{}", self.server.command, self.server.tail()))
    }

    /// Runs a load with a client that sleeps while it waits.
    pub fn run_asleep(&mut self, load: &Load) -> Result<Measured> {
        let measured = self.driver.run_asleep(load);
        measured.with_context(|| format!("{}\n{}", self.server.command, self.server.tail()))
    }

    /// Runs a load for a while and throws its figures away.
    pub fn warm(&mut self, load: Load, time: Duration) -> Result<()> {
        self.run(&Load { end: End::After(time), seed: load.seed ^ 0xaaaa, ..load }).map(drop)
    }

    /// Runs a load until the disk is steady under it, or patience ends.
    pub fn settle(&mut self, load: Load, patience: Patience) -> Result<Settled> {
        let mut steady = Steady::default();
        let mut seconds = 0.0;
        for window in 0.. {
            let seed = load.seed ^ 0xbbbb ^ (window << 32);
            let measured = self.run(&Load { end: End::After(patience.window), seed, ..load })?;
            seconds += measured.seconds;
            let log = self.stats()?.map(|stats| LogLevel::of(&stats)).transpose()?;
            let steady = steady.add(measured.iops, log);
            if steady || seconds >= patience.most.as_secs_f64() {
                return Ok(Settled { seconds, steady });
            }
        }
        bail!("patience has no end")
    }
}

fn mib(bytes: u64) -> String {
    format!("{}M", bytes >> 20)
}

fn serve(base: &Path, mode: Vec<String>, dir: &Path) -> Vec<String> {
    let text = |p: &Path| p.display().to_string();
    let mut arguments = vec!["serve".to_string(), "--image".into(), text(base)];
    arguments.extend(mode);
    arguments.extend(["--overflow-dir".into(), text(dir)]);
    for socket in ["vhost-user", "nbd", "control"] {
        let name = if socket == "vhost-user" { "vhost" } else { socket };
        arguments.extend([format!("--{socket}"), text(&dir.join(name))]);
    }
    arguments
}

fn qcow2(base: &Path, overlay: &Path, options: &str) -> Result<Vec<String>> {
    let output = Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"])
        .args([base, overlay])
        .output()
        .context("qemu-img cannot be started: run 'make install-deps'")?;
    if !output.status.success() {
        bail!("qemu-img create {}: {}", overlay.display(), String::from_utf8_lossy(&output.stderr));
    }
    Ok(vec![
        format!("driver=file,node-name=file,filename={}{options}", overlay.display()),
        "driver=qcow2,node-name=disk,file=file".into(),
    ])
}

/// Served from its main loop: with an I/O thread of its own it took 24 us instead of 2.6 at QD1, and the same at
/// greater depth.
fn daemon(nodes: &[String], socket: &Path, nbd: &Path) -> Vec<String> {
    let mut arguments = Vec::new();
    for node in nodes {
        arguments.extend(["--blockdev".to_string(), node.clone()]);
    }
    arguments.extend([
        "--export".to_string(),
        format!(
            "type=vhost-user-blk,id=export,node-name=disk,addr.type=unix,addr.path={},writable=on",
            socket.display()
        ),
        "--nbd-server".to_string(),
        format!("addr.type=unix,addr.path={}", nbd.display()),
        "--export".to_string(),
        "type=nbd,id=nbd,node-name=disk,name=nbd,writable=on".to_string(),
    ]);
    arguments
}
