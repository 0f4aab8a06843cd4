//! A fleet: real members of etcd, daemons in network namespaces, and real guests.
//!
//! Invariant: when it is dropped, everything of it has ended.

use crate::network::{BRIDGE, HostNetwork, leave_the_hosts_network};
use serde_json::{Value, json};
use spillway_testkit::cpio::{Entry, archive};
use spillway_testkit::daemon::{Daemon, end_machines};
use spillway_testkit::disk;
use spillway_testkit::etcd::{EtcdCluster, EtcdOptions, EtcdProgram};
use spillway_testkit::guest::Kit;
use spillway_testkit::process::wait_until;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long hosts and guests may take on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(300);

/// What a guest does: it says that it is up, and waits. With an image that begins with `ends` it ends at once.
const GUEST: &str = r#"#!/bin/busybox sh
exec </dev/ttyS0 >/dev/ttyS0
case "$(dd if=/dev/vda bs=64 count=1 2>/dev/null | head -n 1)" in ends*) poweroff -f ;; esac
echo WORKS
while read -r word; do echo $word; done
"#;

/// A host of the fleet.
pub struct Host {
    pub name: String,
    folder: PathBuf,
    pub network: HostNetwork,
    pub daemon: Option<Daemon>,
    options: Vec<String>,
}

/// A fleet.
pub struct World {
    // Hosts end before etcd does, and both before their folder.
    pub hosts: Vec<Host>,
    pub etcd: EtcdCluster,
    dir: tempfile::TempDir,
    kit: Kit,
}

/// How many hosts the tests have that hold for any number: 4, or as many as `SPILLWAY_FLEET_HOSTS` says.
pub fn hosts() -> usize {
    std::env::var("SPILLWAY_FLEET_HOSTS").map_or(4, |hosts| hosts.parse().unwrap())
}

impl World {
    /// Starts three members of etcd and so many hosts, and makes the fleet `site`. `None`: it cannot be done here, which is said.
    pub fn new(hosts: usize) -> Option<World> {
        World::with(hosts, EtcdProgram::Debian34)
    }

    /// The same with this program of etcd.
    pub fn with(hosts: usize, program: EtcdProgram) -> Option<World> {
        let Some(kit) = Kit::find() else {
            spillway_testkit::skip("the guest image is not built: run 'make image'");
            return None;
        };
        if let Err(why) = program.path() {
            spillway_testkit::skip(&format!("no etcd here: {why:#}"));
            return None;
        }
        if !leave_the_hosts_network() {
            return None;
        }
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let options = EtcdOptions { address: Some(BRIDGE.into()), ..EtcdOptions::default() };
        let etcd = EtcdCluster::start_with(3, program, &options).unwrap();
        let mut initrd = std::fs::read(kit.initrd()).unwrap();
        initrd.resize(initrd.len().next_multiple_of(4), 0);
        let payload = vec![Entry::directory("payload"), Entry::file("payload/run", 0o755, GUEST)];
        initrd.extend(archive(&payload).unwrap());
        std::fs::write(dir.path().join("initrd"), initrd).unwrap();
        let mut world = World { hosts: Vec::new(), etcd, dir, kit };
        for number in 0..hosts {
            world.add_host(number);
        }
        // On a busy machine etcd may take longer to begin than an answer may take.
        world.until("there is a fleet", |world| {
            let (status, answer) = world.hosts[0].try_send("POST", "/v1/fleet", "{}");
            assert!([200, 409, 503].contains(&status), "{answer}");
            world.hosts[0].fleet()["fleet_id"].is_string()
        });
        world.until("all hosts are members, and have reported what they have", |world| {
            let known = world.hosts[0].object("/v1/fleet/hosts");
            let has_reported = |host: &Value| host["memory_bytes"].is_u64();
            let reported =
                known["items"].as_array().unwrap().iter().filter(|host| has_reported(host)).count();
            reported == hosts && world.hosts.iter().all(|host| host.fleet()["membership"] == "member")
        });
        Some(world)
    }

    /// Folder of all hosts, each below its name.
    pub fn folder(&self) -> &Path {
        self.dir.path()
    }

    fn add_host(&mut self, number: usize) {
        let name = format!("h{number}");
        let folder = self.dir.path().join(&name);
        std::fs::create_dir(&folder).unwrap();
        let network = HostNetwork::new(&folder, number);
        let options = [
            "--hypervisor".into(),
            "qemu".into(),
            "--accelerator".into(),
            "tcg".into(),
            "--guest-users".into(),
            "none".into(),
            "--fleet".into(),
            format!("etcd://{}/site", self.etcd.addresses()),
            "--fleet-listen".into(),
            format!("{}:9445", network.address),
            "--host-name".into(),
            name.clone(),
            "--zone".into(),
            format!("z{}", number % 3),
        ];
        let mut host = Host { name, folder, network, daemon: None, options: options.into() };
        host.start();
        self.hosts.push(host);
    }

    /// Gives all hosts a version of an image: a disk that begins with this line.
    pub fn import(&self, image: &str, line: &str) {
        let file = self.dir.path().join("image.raw");
        let mut content = format!("{line}\n").into_bytes();
        content.resize(4 << 20, 0);
        std::fs::write(&file, content).unwrap();
        for host in &self.hosts {
            host.ask(&["image", "import", image, file.to_str().unwrap(), "--format", "raw"]);
        }
    }

    /// Settings of a catalog whose guests boot in some seconds, with more of them.
    pub fn spec(&self, image: &str, count: u32, more: Value) -> Value {
        let path = |name: &Path| name.display().to_string();
        let mut spec = json!({
            "image": image, "count": count, "ram_bytes": 64 << 20, "memory_bytes": 128 << 20, "autostart": true,
            "network": "none", "ready": "serial:WORKS", "grace_seconds": 0, "lost_after_seconds": 20,
            "kernel": path(&self.kit.kernel()), "initrd": path(&self.dir.path().join("initrd")),
            "append": "console=ttyS0 quiet loglevel=4 panic=1 cryptomgr.notests nokaslr no_timer_check",
        });
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        spec
    }

    /// Creates a catalog of the fleet.
    pub fn create(&self, name: &str, spec: &Value) -> Value {
        self.hosts[0].send("POST", "/v1/fleet/catalogs", &json!({ "name": name, "spec": spec }).to_string())
    }

    /// Host of this name.
    pub fn host(&self, name: &str) -> &Host {
        self.hosts.iter().find(|host| host.name == name).unwrap()
    }

    /// The first host whose daemon runs.
    pub fn first(&self) -> &Host {
        self.hosts.iter().find(|host| host.daemon.is_some()).unwrap()
    }

    /// Waits until something holds.
    pub fn until(&self, what: &str, holds: impl Fn(&World) -> bool) {
        self.until_within(PATIENCE, what, holds);
    }

    /// The same, within this time.
    pub fn until_within(&self, within: Duration, what: &str, holds: impl Fn(&World) -> bool) {
        let found = wait_until(within, || holds(self).then_some(()));
        if found.is_none() {
            for host in self.hosts.iter().filter(|host| host.daemon.is_some()) {
                println!("== {}: {:#}\n{}", host.name, host.fleet(), host.daemon.as_ref().unwrap().tail());
            }
            println!("{:#}", self.first().object("/v1/fleet/catalogs"));
            panic!("not so within {within:?}: {what}");
        }
    }

    /// All machines that run on hosts whose daemons run, by host: those that are ready.
    pub fn ready(&self, catalog: &str) -> Vec<(String, usize)> {
        let of = |host: &Host| {
            let machines = host.object("/v1/machines");
            let is_ready = |machine: &&Value| {
                machine["catalog"] == catalog
                    && machine["status"]["phase"] == "running"
                    && machine["status"]["ready"] == true
            };
            machines["items"].as_array().unwrap().iter().filter(is_ready).count()
        };
        let running = self.hosts.iter().filter(|host| host.daemon.is_some());
        running.map(|host| (host.name.clone(), of(host))).collect()
    }

    /// Number of ready machines on hosts whose daemons run.
    pub fn ready_count(&self, catalog: &str) -> usize {
        self.ready(catalog).iter().map(|(_, count)| count).sum()
    }

    /// Shares of a catalog that are not 0: host and number of machines that it is to have.
    pub fn shares(&self, catalog: &str) -> Vec<(String, u64)> {
        let catalog = self.first().object(&format!("/v1/fleet/catalogs/{catalog}"));
        let shares = catalog["shares"].as_array().unwrap().iter();
        let of =
            |share: &Value| (share["host"].as_str().unwrap().to_owned(), share["wanted"].as_u64().unwrap());
        shares.map(of).filter(|(_, wanted)| *wanted > 0).collect()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // Machines of hosts that were killed, too.
        self.hosts.clear();
        end_machines(self.dir.path());
    }
}

impl Host {
    /// Starts its daemon.
    pub fn start(&mut self) {
        let options: Vec<&str> = self.options.iter().map(String::as_str).collect();
        let daemon =
            Daemon::start_within(&self.network.prefix(), &disk::program().unwrap(), &self.folder, &options);
        self.daemon = Some(daemon.unwrap());
    }

    /// Ends all processes of the host at once, as a loss of power does.
    pub fn lose_power(&mut self) {
        let daemon = self.daemon.take().unwrap();
        rustix::process::kill_process(
            rustix::process::Pid::from_raw(daemon.pid().cast_signed()).unwrap(),
            rustix::process::Signal::KILL,
        )
        .unwrap();
        end_machines(&self.folder);
        self.network.cut(true);
        drop(daemon);
    }

    /// The socket of its daemon.
    pub fn socket(&self) -> PathBuf {
        self.folder.join("sock")
    }

    /// What `spillway` prints.
    pub fn ask(&self, arguments: &[&str]) -> String {
        self.daemon.as_ref().unwrap().ask(arguments).unwrap()
    }

    /// What the daemon has at this path.
    pub fn object(&self, path: &str) -> Value {
        self.send("GET", path, "")
    }

    /// The fleet as this host sees it.
    pub fn fleet(&self) -> Value {
        self.object("/v1/fleet")
    }

    /// Sends a request that must succeed.
    pub fn send(&self, method: &str, path: &str, body: &str) -> Value {
        let (status, answer) = self.try_send(method, path, body);
        assert_eq!(status, 200, "{} {method} {path}: {answer}", self.name);
        answer
    }

    /// Sends a request: the status and the body of the answer.
    pub fn try_send(&self, method: &str, path: &str, body: &str) -> (u16, Value) {
        let mut stream = UnixStream::connect(self.socket()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let length = body.len();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, serde_json::from_str(body).unwrap_or_else(|e| panic!("{path}: {e}: {body}")))
    }
}
