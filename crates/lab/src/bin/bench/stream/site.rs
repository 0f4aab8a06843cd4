//! Where images are streamed: a far store, and hosts on a switch with it. Owns the network namespaces and the files of both.
//!
//! Invariant: nothing of it outlives the bench. A namespace lives as long as the process that holds it, and that ends with the bench.

use crate::environment::Environment;
use anyhow::{Context, Result, bail, ensure};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use spillway_testkit::Server;
use spillway_testkit::certificate::Authority;
use spillway_testkit::cpio::{Entry, archive};
use spillway_testkit::guest::Kit;
use spillway_testkit::process::wait_until;
use spillway_testkit::store_proxy::{Origin, StoreModel, StoreProxy, StoreProxySettings};
use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Most hosts on the switch.
pub const MOST_HOSTS: usize = 8;
/// Size of the Debian image.
pub const IMAGE_BYTES: u64 = 10 << 30;
/// What a guest writes to its console when its system is up.
pub const READY: &str = "bench-ready";
/// Time from a request to the first byte of the store's answer, and the store's bandwidth.
const LATENCY: Duration = Duration::from_millis(20);
const BANDWIDTH: u64 = 100_000_000;
const STORE_PORT: u16 = 8080;
const PEER_PORT: u16 = 9444;

/// A network of its own, without anything in it but loopback.
pub struct Namespace {
    holder: Server,
}

impl Namespace {
    fn new(dir: &Path, name: &str) -> Result<Namespace> {
        let arguments = ["--net", "sleep", "infinity"].map(String::from);
        let mut holder = Server::start(name, "unshare", &arguments, None, &dir.join(format!("{name}.log")))?;
        let own = fs::read_link("/proc/self/ns/net")?;
        let path = PathBuf::from(format!("/proc/{}/ns/net", holder.pid()));
        let entered = wait_until(Duration::from_secs(5), || {
            let is_other = fs::read_link(&path).is_ok_and(|link| link != own);
            (is_other || holder.ended().ok().flatten().is_some()).then_some(is_other)
        });
        ensure!(entered == Some(true), "{}: {}", holder.command, holder.tail());
        let namespace = Namespace { holder };
        namespace.run(&["ip", "link", "set", "lo", "up"])?;
        // Reno, which each kernel has and each namespace may use, whatever this host has: BBR takes a virtual link for a slow one, and
        // holds back parts of answers for up to 0.1 s.
        namespace.run(&["sh", "-c", "echo reno > /proc/sys/net/ipv4/tcp_congestion_control"])?;
        Ok(namespace)
    }

    /// The words before a command that runs in it.
    pub fn prefix(&self) -> [String; 2] {
        ["nsenter".into(), format!("--net=/proc/{}/ns/net", self.holder.pid())]
    }

    fn run(&self, command: &[&str]) -> Result<()> {
        let [program, option] = self.prefix();
        let done = Command::new(program).arg(option).args(command).output().context("nsenter is needed")?;
        ensure!(
            done.status.success(),
            "{}: {}",
            command.join(" "),
            String::from_utf8_lossy(&done.stderr).trim()
        );
        Ok(())
    }

    /// Runs something in it, with all threads that are started there.
    fn enter<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let namespace = File::open(format!("/proc/{}/ns/net", self.holder.pid()))?;
        let run = || {
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
            work()
        };
        std::thread::scope(|scope| match scope.spawn(run).join() {
            Ok(result) => result,
            Err(_) => bail!("a thread in a namespace panicked"),
        })
    }
}

/// The store, the switch, and what hosts are made of.
pub struct Site {
    /// The spillway program.
    pub spillway: PathBuf,
    /// What guests boot.
    pub kit: Kit,
    /// The initrd, which makes guests say that they are ready.
    pub initrd: PathBuf,
    /// The store, as hosts see it.
    pub store: StoreProxy,
    switch: Namespace,
    authority: Authority,
    dir: PathBuf,
}

impl Site {
    /// Makes it. The store is empty.
    pub fn new(environment: &Environment) -> Result<Site> {
        ensure!(rustix::process::geteuid().is_root(), "the part 'stream' needs root, for network namespaces");
        let kit = Kit::find().context("the guest image is missing: run 'make image'")?;
        let dir = environment.disk().join("site");
        let hub = dir.join("hub");
        fs::create_dir_all(&hub)?;
        let initrd = dir.join("initrd.cpio");
        fs::write(&initrd, initrd_that_tells(&kit)?)?;
        let switch = Namespace::new(&dir, "switch")?;
        switch.run(&["ip", "link", "add", "hosts", "type", "bridge"])?;
        switch.run(&["ip", "address", "add", &format!("{}/24", address(1)), "dev", "hosts"])?;
        switch.run(&["ip", "link", "set", "hosts", "up"])?;
        let store = switch.enter(|| {
            let settings = StoreProxySettings::new(Origin::Folder(hub.clone()));
            let listen = SocketAddr::from((address(1), STORE_PORT));
            StoreProxy::start(StoreProxySettings { listen, model: far(), ..settings })
        })?;
        let authority = Authority::new(&dir.join("authority"))?;
        Ok(Site { spillway: environment.spillway.clone(), kit, initrd, store, switch, authority, dir })
    }

    /// The folder that is the registry.
    pub fn hub(&self) -> PathBuf {
        self.dir.join("hub")
    }

    /// A file or folder of the site.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// A namespace on the switch for host `number`, counted from 0.
    pub fn connect(&self, number: usize) -> Result<Namespace> {
        let namespace = Namespace::new(&self.dir, &format!("network-{number}"))?;
        let (port, pid) = (format!("host-{number}"), namespace.holder.pid().to_string());
        let name = format!("up-{}", namespace.holder.pid());
        let pair = ["ip", "link", "add", &name, "type", "veth", "peer", "name", "eth0", "netns", &pid];
        self.switch.run(&pair).with_context(|| port.clone())?;
        self.switch.run(&["ip", "link", "set", &name, "master", "hosts", "up"])?;
        let own = format!("{}/24", host_address(number));
        namespace.run(&["ip", "address", "add", &own, "dev", "eth0"])?;
        namespace.run(&["ip", "link", "set", "eth0", "up"])?;
        Ok(namespace)
    }

    /// Options of a daemon that serves chunks to so many hosts, itself among them.
    pub fn peer_options(&self, number: usize, of: usize) -> Result<Vec<String>> {
        let (certificate, key) = (self.path("host.crt"), self.path("host.key"));
        if !certificate.exists() {
            let names: Vec<_> = (0..MOST_HOSTS).map(|n| format!("IP:{}", host_address(n))).collect();
            self.authority.sign(&names.join(","), &certificate, &key)?;
        }
        let url = |n| format!("https://{}:{PEER_PORT}", host_address(n));
        let text = |path: PathBuf| path.display().to_string();
        let mut options: Vec<String> = (0..of).flat_map(|n| ["--peer".into(), url(n)]).collect();
        let pairs = [
            ("--peer-listen", format!("{}:{PEER_PORT}", host_address(number))),
            ("--peer-name", url(number)),
            ("--peer-cert", text(certificate)),
            ("--peer-key", text(key)),
            ("--peer-ca", text(self.authority.certificate())),
            ("--peer-upload", "1000M".into()),
        ];
        options.extend(pairs.into_iter().flat_map(|(option, value)| [option.to_string(), value]));
        Ok(options)
    }
}

/// The store that all figures are of.
pub fn far() -> StoreModel {
    StoreModel { latency_ns: LATENCY.as_nanos() as u64, bandwidth_bytes: BANDWIDTH, ..StoreModel::default() }
}

fn address(last: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, 0, last)
}

fn host_address(number: usize) -> Ipv4Addr {
    address(10 + number as u8)
}

/// The kit's initrd, and a unit that writes a line to the console when the system is up.
fn initrd_that_tells(kit: &Kit) -> Result<Vec<u8>> {
    let unit = format!(
        "[Unit]\nDescription=Tells that the system is up\nDefaultDependencies=no\nAfter=multi-user.target\n\
         [Service]\nType=oneshot\nExecStart=/bin/echo {READY}\nStandardOutput=file:/dev/ttyS0\n"
    );
    let payload = [
        Entry::directory("payload"),
        Entry::directory("payload/systemd"),
        Entry::file("payload/systemd/tell.service", 0o644, unit),
        Entry::directory("payload/systemd/multi-user.target.wants"),
        Entry::link("payload/systemd/multi-user.target.wants/tell.service", "../tell.service"),
        // A login there would take the console.
        Entry::link("payload/systemd/serial-getty@ttyS0.service", "/dev/null"),
    ];
    let mut bytes = fs::read(kit.initrd()).context("the guest's initrd cannot be read")?;
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes.extend(archive(&payload)?);
    Ok(bytes)
}
