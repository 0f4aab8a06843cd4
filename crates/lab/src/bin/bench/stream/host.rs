//! One host that streams: its daemon, its machines, and disks without a machine. Owns the host's folder.
//!
//! Invariant: a host that was just made has nothing of any image.

use super::site::{IMAGE_BYTES, Namespace, READY, Site};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use spillway_control::program::{ServeOrder, ServeOutput};
use spillway_control::{DiskSettings, Mode, ServeSettings, Streamed};
use spillway_testkit::daemon::{Daemon, end_machines};
use spillway_testkit::process::wait_until;
use spillway_testkit::{Driver, Server, Shape};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The image on hosts, and the catalog of machines on it.
pub const IMAGE: &str = "debian";
pub const CATALOG: &str = "desk";
/// A daemon tries KVM when it starts. That is no part of a machine's start.
const SETTLED: Duration = Duration::from_secs(4);
/// The longest that a machine may take to be ready.
const PATIENCE: Duration = Duration::from_secs(600);

/// What a host is made with.
#[derive(Clone, Copy)]
pub struct HostSettings {
    /// Which one it is.
    pub number: usize,
    /// Hosts that exchange chunks, itself among them; 0: it has none.
    pub peers: usize,
    /// Most bytes of its cache.
    pub cache_bytes: u64,
}

impl Default for HostSettings {
    fn default() -> HostSettings {
        HostSettings { number: 0, peers: 0, cache_bytes: 20 << 30 }
    }
}

/// A host.
pub struct Host {
    // The daemon ends before its network.
    daemon: Daemon,
    dir: PathBuf,
    _network: Namespace,
}

/// How long a machine took, in seconds from the command that starts it.
#[derive(Clone, Copy)]
pub struct Boot {
    /// Until its processors ran.
    pub running: f64,
    /// Until its guest said that it is ready.
    pub ready: f64,
}

impl Host {
    /// A host that has nothing.
    pub fn new(site: &Site, settings: HostSettings) -> Result<Host> {
        let dir = site.path(&format!("host-{}", settings.number));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir)?;
        let network = site.connect(settings.number)?;
        let mut options = vec![
            "--stream-cache-size".to_string(),
            settings.cache_bytes.to_string(),
            // All of an image as soon as the store gives it.
            "--stream-fill-rate".into(),
            "10G".into(),
            // Twenty machines on two processors.
            "--vcpu-overcommit".into(),
            "1000".into(),
        ];
        if settings.peers > 0 {
            options.extend(site.peer_options(settings.number, settings.peers)?);
        }
        let options: Vec<_> = options.iter().map(String::as_str).collect();
        let daemon = Daemon::start_within(&network.prefix(), &site.spillway, &dir, &options)?;
        daemon.ask(&["registry", "add", "far", &site.store.url()])?;
        std::thread::sleep(SETTLED);
        Ok(Host { daemon, dir, _network: network })
    }

    /// The daemon.
    pub fn daemon(&self) -> &Daemon {
        &self.daemon
    }

    /// Streams the image from the store. Returns how long the import took, in seconds.
    pub fn import(&self, image: &str, residency: &str) -> Result<f64> {
        let begun = Instant::now();
        let from = format!("far/{image}:1");
        self.daemon.ask(&["image", "import", image, "--from", &from, "--residency", residency])?;
        Ok(begun.elapsed().as_secs_f64())
    }

    /// What `image show` says of the streamed version.
    pub fn cached(&self, image: &str) -> Result<Value> {
        Ok(self.daemon.json(&["image", "show", image])?["cached"][0].clone())
    }

    /// A counter of what brings chunks.
    pub fn brought(&self, counter: &str) -> Result<u64> {
        let figures = self.daemon.get("/v1/figures")?;
        let counted = figures["stream"]["counters"][counter].as_u64();
        counted.with_context(|| format!("there is no counter {counter}: {figures}"))
    }

    /// Waits until the host needs no store for the image any more.
    pub fn wait_whole(&self, image: &str) -> Result<()> {
        let whole = wait_until(PATIENCE, || {
            self.cached(image).ok().filter(|cached| cached["is_whole"] == true).map(drop)
        });
        whole.with_context(|| format!("{image} is not whole within {PATIENCE:?}\n{}", self.daemon.tail()))
    }

    /// A catalog of machines on the Debian image.
    pub fn create_catalog(&self, site: &Site, catalog: &str, count: usize) -> Result<()> {
        let append = "console=ttyS0 quiet loglevel=4 panic=1 no_timer_check cryptomgr.notests nokaslr \
                      spillway.root=/dev/vda systemd.show_status=0";
        let (kernel, initrd) = (site.kit.kernel().display().to_string(), site.initrd.display().to_string());
        let (count, ready) = (count.to_string(), format!("serial:{READY}"));
        self.daemon.ask(&[
            "catalog",
            "create",
            catalog,
            "--image",
            IMAGE,
            "--count",
            &count,
            "--memory",
            "320M",
            "--ram",
            "64M",
            "--overflow",
            "2G",
            "--network",
            "none",
            "--ready",
            &ready,
            "--kernel",
            &kernel,
            "--initrd",
            &initrd,
            "--append",
            append,
        ])?;
        Ok(())
    }

    /// A machine's state.
    pub fn machine(&self, machine: &str) -> Result<Value> {
        self.daemon.json(&["machine", "show", machine])
    }

    /// Starts a machine and waits until it is ready.
    pub fn boot(&self, machine: &str) -> Result<Boot> {
        let begun = Instant::now();
        self.daemon.ask(&["machine", "start", machine])?;
        let running =
            self.until(machine, begun, Duration::from_millis(10), |status| status["phase"] == "running")?;
        let ready =
            self.until(machine, begun, Duration::from_millis(100), |status| status["ready"] == true)?;
        Ok(Boot { running, ready })
    }

    /// Waits for a state of a machine. Returns seconds since `begun`.
    pub fn until(
        &self,
        machine: &str,
        begun: Instant,
        pause: Duration,
        is_so: impl Fn(&Value) -> bool,
    ) -> Result<f64> {
        while begun.elapsed() < PATIENCE {
            let status = self.machine(machine)?["status"].clone();
            ensure!(status["phase"] != "failed", "{machine} has failed: {}", status["message"]);
            if is_so(&status) {
                return Ok(begun.elapsed().as_secs_f64());
            }
            std::thread::sleep(pause);
        }
        anyhow::bail!("{machine}: not within {PATIENCE:?}\n{}", self.daemon.tail())
    }

    /// Digest of the image's first version.
    pub fn digest(&self, image: &str) -> Result<String> {
        let shown = self.daemon.json(&["image", "show", image])?;
        let digest = shown["versions"][0]["digest"].as_str().context("a version has no digest")?;
        Ok(digest.to_owned())
    }

    /// A disk on the image without a machine.
    pub fn disk(&self, image: &str, name: &str) -> Result<Disk> {
        let socket = self.streamd().join("streamd.sock");
        let streamed = Streamed { socket, digest: self.digest(image)? };
        Disk::start(&self.dir.join(name), self.dir.join("disk.raw"), Some(streamed))
    }

    fn streamd(&self) -> PathBuf {
        self.dir.join("state/streamd")
    }

    /// The folder of the cache.
    pub fn cache(&self) -> PathBuf {
        self.dir.join("state/cache")
    }

    /// Process ids of `spillway-streamd`.
    pub fn streamd_pids(&self) -> Vec<u32> {
        let works_there =
            |pid: &u32| fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|cwd| cwd == self.streamd());
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(works_there).collect()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.daemon.ask(&["machine", "stop", "--all", "--force", "--wait"]);
        end_machines(&self.dir);
    }
}

/// A disk that the bench itself reads, in place of a guest.
pub struct Disk {
    /// The connection.
    pub driver: Driver,
    /// Its process.
    pub server: Server,
}

impl Disk {
    /// Starts it on an image: a file, or one that is streamed.
    pub fn start(dir: &Path, image: PathBuf, streamed: Option<Streamed>) -> Result<Disk> {
        fs::create_dir_all(dir)?;
        let settings = ServeSettings {
            settings: DiskSettings {
                mode: Some(Mode::Ram),
                ram_bytes: Some(16 << 20),
                ..DiskSettings::default()
            },
            image: Some(image),
            streamed,
            vhost_user: Some(dir.join("vhost")),
            control: Some(dir.join("control")),
            ..ServeSettings::default()
        };
        let order = ServeOrder { settings, output: ServeOutput::Line };
        let program = std::env::current_exe()?.with_file_name("spillway-worker");
        let program = program.to_str().context("the program's path is not UTF-8")?;
        let arguments = order.arguments().map_err(|e| anyhow::anyhow!("{e}"))?;
        let mut server = Server::start("disk", program, &arguments, None, &dir.join("log"))?;
        server.wait_for(&dir.join("vhost"), Duration::from_secs(30))?;
        let shape = Shape { depth: 64, request_bytes: 1 << 20, ..Shape::default() };
        let shape = Shape { deadline: Duration::from_secs(300), ..shape };
        let driver = Driver::connect_with(&dir.join("vhost"), shape)?;
        ensure!(driver.capacity_bytes() <= IMAGE_BYTES, "the disk is larger than any image of the bench");
        Ok(Disk { driver, server })
    }

    /// Reads 4 KiB of a chunk. Returns seconds.
    pub fn touch(&mut self, chunk: u64) -> Result<f64> {
        let begun = Instant::now();
        self.driver.read_at(chunk << 20, &mut [0; 4096])?;
        Ok(begun.elapsed().as_secs_f64())
    }

    /// Its process and those below it.
    pub fn pids(&self) -> Vec<u32> {
        let own = self.server.pid();
        let children = fs::read_to_string(format!("/proc/{own}/task/{own}/children")).unwrap_or_default();
        let children = children.split_whitespace().filter_map(|pid| pid.parse().ok());
        std::iter::once(own).chain(children).collect()
    }
}
