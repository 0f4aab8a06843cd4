//! A fleet of daemons that serve disks: three members of etcd, and a proxy before the port of each daemon for the others.
//!
//! Invariant: when it is dropped, everything of it has ended.

use crate::clients::{Answer, ask};
use serde_json::{Value, json};
use spillway_testkit::daemon::end_machines;
use spillway_testkit::disk;
use spillway_testkit::etcd::{EtcdCluster, EtcdOptions, EtcdProgram, EtcdProxy};
use spillway_testkit::process::{Server, wait_until};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long hosts may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A host of the fleet.
pub struct Host {
    folder: PathBuf,
    options: Vec<String>,
    server: Option<Server>,
    starts: u32,
    /// Before its port for other hosts.
    pub door: EtcdProxy,
}

/// A fleet.
pub struct World {
    pub hosts: Vec<Host>,
    pub etcd: EtcdCluster,
    dir: tempfile::TempDir,
}

impl World {
    /// Starts so many hosts, with so many machines each.
    pub fn new(hosts: usize, machines: usize) -> World {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let etcd = EtcdCluster::start_with(3, EtcdProgram::Debian34, &EtcdOptions::default()).unwrap();
        let image = dir.path().join("image.raw");
        std::fs::write(&image, vec![7; 4 << 20]).unwrap();
        let mut world = World { hosts: Vec::new(), etcd, dir };
        for number in 0..hosts {
            let folder = world.dir.path().join(format!("h{number}"));
            world.hosts.push(Host::new(folder, number, &world.etcd.addresses()));
        }
        world.hosts[0].send("POST", "/v1/fleet", "{}");
        world.until("all hosts are members", |world| {
            world.hosts.iter().all(|host| host.send("GET", "/v1/fleet", "")["membership"] == "member")
        });
        world.until("all hosts reach each other", |world| {
            let reaches = |host: &Host, other: usize| {
                let reach = host.send("GET", &format!("/v1/fleet/reach/h{other}"), "");
                // One that refuses this host gives a reason.
                reach["reaches"] == true && reach["why"].is_null()
            };
            world.hosts.iter().all(|host| (0..world.hosts.len()).all(|other| reaches(host, other)))
        });
        // A host that has not reported its budget gets no machines, and those of the others stay where they are.
        world.until("all hosts have reported", |world| {
            let hosts = world.hosts[0].send("GET", "/v1/fleet/hosts", "");
            hosts["items"].as_array().unwrap().iter().all(|host| !host["memory_bytes"].is_null())
        });
        let import = json!({ "path": image, "format": "raw" }).to_string();
        for host in &world.hosts {
            host.send("POST", "/v1/images/tiny/versions", &import);
        }
        let spec = json!({ "image": "tiny:1", "count": hosts * machines, "ram_bytes": 16 << 20, "overflow_bytes": 16 << 20, "autostart": true });
        world.hosts[0].send(
            "POST",
            "/v1/fleet/catalogs",
            &json!({ "name": "runner", "spec": spec }).to_string(),
        );
        world.until("all machines are ready", |world| {
            let shares = world.hosts[0].send("GET", "/v1/fleet/catalogs/runner", "");
            let shares = shares["shares"].as_array().unwrap();
            shares.len() == hosts && shares.iter().all(|share| share["ready"] == machines)
        });
        world
    }

    /// Sockets of all daemons.
    pub fn sockets(&self) -> Vec<PathBuf> {
        self.hosts.iter().map(|host| host.folder.join("sock")).collect()
    }

    /// Number of machines that are claimed; none if a daemon does not answer.
    pub fn claimed(&self) -> Option<usize> {
        let mut claimed = 0;
        for host in &self.hosts {
            let Answer { status: 200, body } = host.try_send("GET", "/v1/machines", "")? else { return None };
            claimed += body["items"].as_array()?.iter().filter(|machine| !machine["claim"].is_null()).count();
        }
        Some(claimed)
    }

    /// Whether the machine of a claim is ready.
    pub fn is_ready(&self, claim: &Value) -> bool {
        let host: usize = claim["host"].as_str().unwrap()[1..].parse().unwrap();
        let machine = self.hosts[host].send(
            "GET",
            &format!("/v1/machines/{}", claim["machine"]["name"].as_str().unwrap()),
            "",
        );
        machine["status"]["ready"] == true && machine["status"]["settled"] == true
    }

    /// Waits until something holds.
    pub fn until(&self, what: &str, holds: impl Fn(&World) -> bool) {
        if wait_until(PATIENCE, || holds(self).then_some(())).is_none() {
            for host in &self.hosts {
                println!(
                    "== {}\n{}",
                    host.folder.display(),
                    host.server.as_ref().map_or_else(String::new, Server::tail)
                );
                for path in ["/v1/fleet", "/v1/machines"] {
                    println!(
                        "{:#}",
                        host.try_send("GET", path, "").map_or(Value::Null, |answer| answer.body)
                    );
                }
            }
            panic!("not so within {PATIENCE:?}: {what}");
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for host in &mut self.hosts {
            host.kill();
        }
        end_machines(self.dir.path());
    }
}

impl Host {
    fn new(folder: PathBuf, number: usize, etcd: &str) -> Host {
        std::fs::create_dir(&folder).unwrap();
        // Nobody else takes the port while the daemon is down: the address is of this host alone.
        let [a, b, ..] = std::process::id().to_le_bytes();
        let ip = format!("127.{}.{b}.{}", a.max(1), 10 + number);
        let listen = TcpListener::bind((ip.as_str(), 0)).unwrap().local_addr().unwrap();
        let door = EtcdProxy::start(listen).unwrap();
        let options = [
            ("--hypervisor", "none".to_owned()),
            ("--fleet", format!("etcd://{etcd}/site")),
            ("--fleet-listen", listen.to_string()),
            ("--fleet-address", door.address().to_string()),
            ("--host-name", format!("h{number}")),
        ];
        let options = options.into_iter().flat_map(|(name, value)| [name.to_owned(), value]).collect();
        let mut host = Host { folder, options, server: None, starts: 0, door };
        host.start();
        host
    }

    /// Starts its daemon, and waits until it answers.
    pub fn start(&mut self) {
        let program = disk::daemon_program().unwrap().display().to_string();
        let path = |name: &str| self.folder.join(name).display().to_string();
        let mut options = vec!["--state".to_owned(), path("state"), "--socket".to_owned(), path("sock")];
        options.extend(self.options.iter().cloned());
        self.starts += 1;
        let log = self.folder.join(format!("log-{}", self.starts));
        let mut server = Server::start("spillwayd", &program, &options, None, &log).unwrap();
        let is_ready =
            |log: &Path| std::fs::read_to_string(log).unwrap_or_default().contains("spillwayd: ready on");
        let ready = wait_until(PATIENCE, || {
            (is_ready(&log) || server.ended().unwrap().is_some()).then(|| is_ready(&log))
        });
        assert_eq!(ready, Some(true), "{}", server.tail());
        self.server = Some(server);
    }

    /// Kills its daemon. Its machines go on.
    pub fn kill(&mut self) {
        if let Some(mut server) = self.server.take() {
            server.kill();
        }
    }

    /// Stops its daemon, or lets it go on.
    pub fn pause(&mut self, is_paused: bool) {
        let server = self.server.as_mut().unwrap();
        if is_paused { server.pause().unwrap() } else { server.resume().unwrap() }
    }

    fn try_send(&self, method: &str, path: &str, body: &str) -> Option<Answer> {
        ask(&self.folder.join("sock"), method, path, "", body, None)
    }

    /// Sends a request that must succeed.
    pub fn send(&self, method: &str, path: &str, body: &str) -> Value {
        let answer = self.try_send(method, path, body).unwrap();
        assert!((200..300).contains(&answer.status), "{method} {path}: {:#}", answer.body);
        answer.body
    }
}
