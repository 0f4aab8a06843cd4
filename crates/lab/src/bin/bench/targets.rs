//! The disks that are measured side by side: Spillway as shipped, and its peers.
//!
//! Owns their files and their processes. Invariant: all serve a disk of the same size, on the same core, and each
//! has been written over its whole span before anything is measured.

use anyhow::{Context, Result, bail};
use serde::Serialize;
use spillway_lab::{Driver, End, Load, Server, Shape};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Size of every disk: the span of seed 004's load.
pub const DISK_BYTES: u64 = 5 << 29;
/// The deepest queue that is measured.
pub const DEEPEST: usize = 64;

/// One kind of disk under measurement.
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

    /// Whether it is ours.
    pub fn is_spillway(self) -> bool {
        matches!(self, Kind::Spillway | Kind::SpillwayTight | Kind::SpillwayTighter)
    }
}

/// Where a bench works.
pub struct Place<'a> {
    /// The spillway program.
    pub spillway: &'a Path,
    /// A directory on the disk.
    pub disk: &'a Path,
    /// A directory on tmpfs.
    pub tmpfs: &'a Path,
    /// The core that serves.
    pub core: usize,
}

/// A disk that is being served, with the one connection that drives it.
pub struct Target {
    /// What it is.
    pub kind: Kind,
    /// Its connection.
    pub driver: Driver,
    /// Its process.
    pub server: Server,
    control: Option<PathBuf>,
    spillway: PathBuf,
}

impl Target {
    /// Starts a server and writes its disk over once.
    pub fn start(kind: Kind, place: &Place<'_>) -> Result<Target> {
        let key = serde_json::to_value(kind)?.as_str().unwrap_or("disk").to_string();
        let socket = place.disk.join(format!("{key}.vhost"));
        let control = place.disk.join(format!("{key}.control"));
        let base = place.disk.join("base.raw");
        if !base.exists() {
            std::fs::File::create(&base)?.set_len(DISK_BYTES)?;
        }
        let (program, arguments) = match kind {
            Kind::Spillway => (place.spillway, serve(&base, ["3G", "8G"], &socket, &control, place)),
            Kind::SpillwayTight => (place.spillway, serve(&base, ["1G", "8G"], &socket, &control, place)),
            Kind::SpillwayTighter => (place.spillway, serve(&base, ["1G", "3G"], &socket, &control, place)),
            Kind::Qcow2Tmpfs => (
                Path::new("qemu-storage-daemon"),
                daemon(&qcow2(&base, &place.tmpfs.join("overlay.qcow2"), ",aio=threads")?, &socket),
            ),
            Kind::Qcow2Disk => (
                Path::new("qemu-storage-daemon"),
                daemon(
                    &qcow2(&base, &place.disk.join("overlay.qcow2"), ",cache.direct=on,aio=io_uring")?,
                    &socket,
                ),
            ),
            Kind::NullCo => (
                Path::new("qemu-storage-daemon"),
                daemon(&[format!("driver=null-co,node-name=disk,size={DISK_BYTES}")], &socket),
            ),
        };
        let program = program.to_str().context("the program's path is not UTF-8")?;
        let log = place.disk.join(format!("{key}.log"));
        let mut server = Server::start(kind.name(), program, &arguments, Some(place.core), &log)?;
        server.wait_for(&socket, Duration::from_secs(30))?;
        let shape = Shape { depth: DEEPEST, request_bytes: 128 << 10, ..Shape::default() };
        let mut driver = Driver::connect_with(&socket, shape)
            .with_context(|| format!("{}\n{}", server.command, server.tail()))?;
        driver
            .run(&Load::fill(DISK_BYTES, 128 << 10))
            .with_context(|| format!("{}: writing the disk over\n{}", server.command, server.tail()))?;
        let control = kind.is_spillway().then_some(control);
        Ok(Target { kind, driver, server, control, spillway: place.spillway.to_path_buf() })
    }

    /// What `spillway stats --json` says; `None` for a peer.
    pub fn stats(&self) -> Result<Option<serde_json::Value>> {
        self.control.as_ref().map(|control| spillway_lab::disk::stats(&self.spillway, control)).transpose()
    }

    /// One point: a warm-up that is thrown away, then the measurement.
    pub fn measure(&mut self, load: Load, warm_up: Duration) -> Result<spillway_lab::Measured> {
        let warm = Load { end: End::After(warm_up), seed: load.seed ^ 0xaaaa, ..load };
        let measured = self.driver.run(&warm).and_then(|_| self.driver.run(&load));
        measured.with_context(|| format!("{}\n{}", self.server.command, self.server.tail()))
    }
}

fn serve(
    base: &Path,
    [ram, overflow]: [&str; 2],
    socket: &Path,
    control: &Path,
    place: &Place<'_>,
) -> Vec<String> {
    let text = |p: &Path| p.display().to_string();
    [
        "serve",
        "--image",
        &text(base),
        "--ram",
        ram,
        "--overflow",
        overflow,
        "--overflow-dir",
        &text(place.disk),
    ]
    .into_iter()
    .chain(["--vhost-user", &text(socket), "--control", &text(control)])
    .map(String::from)
    .collect()
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
fn daemon(nodes: &[String], socket: &Path) -> Vec<String> {
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
    ]);
    arguments
}
