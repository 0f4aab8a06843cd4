//! A host of a fleet without machines, beside a single member of etcd.

use serde_json::Value;
use spillway_testkit::daemon::Daemon;
use spillway_testkit::disk;
use spillway_testkit::etcd::{EtcdCluster, EtcdOptions, EtcdProgram};
use spillway_testkit::process::wait_until;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

/// Where the records of the fleet are.
pub const PREFIX: &str = "/spillway/site/";
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A member of etcd with more options. `None`: there is no such etcd here, which is said.
pub fn etcd(program: EtcdProgram, more: &[String]) -> Option<EtcdCluster> {
    if let Err(why) = program.path() {
        spillway_testkit::skip(&format!("no etcd here: {why:#}"));
        return None;
    }
    let options = EtcdOptions { more: more.to_vec(), ..EtcdOptions::default() };
    Some(EtcdCluster::start_with(1, program, &options).unwrap())
}

/// A host of the fleet.
pub struct Host {
    folder: PathBuf,
    options: Vec<String>,
}

impl Host {
    /// One that keeps its files below this folder.
    pub fn new(folder: &Path, name: &str, etcd: &EtcdCluster) -> Host {
        std::fs::create_dir_all(folder).unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let options = [
            "--hypervisor=none".into(),
            format!("--fleet=etcd://{}/site", etcd.addresses()),
            format!("--fleet-listen=127.0.0.1:{port}"),
            "--fleet-peer-listen=none".into(),
            format!("--host-name={name}"),
        ];
        Host { folder: folder.into(), options: options.into() }
    }

    pub fn start(&self) -> Daemon {
        let options: Vec<&str> = self.options.iter().map(String::as_str).collect();
        Daemon::start(&disk::program().unwrap(), &self.folder, &options).unwrap()
    }

    pub fn accept(&self) -> Output {
        let program = disk::program().unwrap().with_file_name("spillwayd");
        let mut command = Command::new(program);
        command.arg("accept-restored-fleet").arg("--state").arg(self.folder.join("state")).output().unwrap()
    }
}

/// Waits until what the daemon says of its fleet is so.
pub fn until(daemon: &Daemon, what: &str, holds: impl Fn(&Value) -> bool) {
    let seen = || daemon.get("/v1/fleet").unwrap();
    let found = wait_until(PATIENCE, || holds(&seen()).then_some(()));
    assert!(found.is_some(), "not within {PATIENCE:?}: {what}: {:#}\n{}", seen(), daemon.tail());
}

pub fn is_member(fleet: &Value) -> bool {
    fleet["membership"] == "member"
}

/// Whether a host takes no part, for a reason that says this.
pub fn is_refused(fleet: &Value, reason: &str) -> bool {
    let said = fleet["reason"].as_str().unwrap_or_default();
    fleet["membership"] == "refused" && said.contains(reason)
}
