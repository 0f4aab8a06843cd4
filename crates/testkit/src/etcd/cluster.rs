//! A cluster of etcd on an address of the loopback network that is its own. Owns its processes, its folder and its ports.
//!
//! Invariant: a cluster that is dropped has ended, also members that were stopped.

use super::program::{EtcdProgram, etcdctl};
use crate::certificate::Authority;
use crate::process::{Server, wait_until};
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

/// How long a cluster may take until it serves.
const PATIENCE: Duration = Duration::from_secs(30);

/// How members of a cluster are started.
#[derive(Clone, Debug, Default)]
pub struct EtcdOptions {
    /// With TLS for clients, which must show a certificate of the cluster's authority.
    pub tls: bool,
    /// Further options of etcd's command line.
    pub more: Vec<String>,
    /// Address of all members; by default one of the loopback network that is the cluster's own.
    pub address: Option<Ipv4Addr>,
}

/// A record as etcd has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdRecord {
    /// Its bytes, which must be text.
    pub value: String,
    /// Revision that created its key.
    pub created: i64,
    /// Revision that last wrote it.
    pub modified: i64,
}

/// A running cluster.
pub struct EtcdCluster {
    members: Vec<Member>,
    program: PathBuf,
    folder: TempDir,
    authority: Option<Authority>,
}

struct Member {
    arguments: Vec<String>,
    client: SocketAddr,
    server: Option<Server>,
    is_frozen: bool,
}

impl EtcdCluster {
    /// Starts a cluster without TLS, and waits until it serves.
    pub fn start(members: usize, program: EtcdProgram) -> Result<EtcdCluster> {
        EtcdCluster::start_with(members, program, &EtcdOptions::default())
    }

    /// The same with options.
    pub fn start_with(members: usize, program: EtcdProgram, options: &EtcdOptions) -> Result<EtcdCluster> {
        let folder = tempfile::Builder::new().prefix("etcd-").tempdir()?;
        let authority = options.tls.then(|| Authority::new(&folder.path().join("tls"))).transpose()?;
        let address = options.address.unwrap_or_else(own_address);
        if let Some(authority) = &authority {
            let file = |name: &str| folder.path().join("tls").join(name);
            authority.sign(&format!("IP:{address}"), &file("server.crt"), &file("server.key"))?;
            authority.sign("DNS:host", &file("client.crt"), &file("client.key"))?;
        }
        let free = free_ports(address, 2 * members)?;
        let ports: Vec<(SocketAddr, SocketAddr)> = free.chunks(2).map(|two| (two[0], two[1])).collect();
        let names: Vec<String> =
            ports.iter().enumerate().map(|(i, (_, peer))| format!("m{i}=http://{peer}")).collect();
        let member = |(i, (client, peer)): (usize, &(SocketAddr, SocketAddr))| Member {
            arguments: arguments(i, *client, *peer, &names.join(","), folder.path(), options),
            client: *client,
            server: None,
            is_frozen: false,
        };
        let members = ports.iter().enumerate().map(member).collect();
        let mut cluster = EtcdCluster { members, program: program.path()?, folder, authority };
        (0..cluster.members.len()).try_for_each(|member| cluster.restart(member))?;
        (0..cluster.members.len()).try_for_each(|member| cluster.wait_ready(member))?;
        Ok(cluster)
    }

    /// Number of members.
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Whether it has no members.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Where a member serves clients.
    pub fn client_address(&self, member: usize) -> SocketAddr {
        self.members[member].client
    }

    /// Where all serve clients, as `HOST:PORT,HOST:PORT`.
    pub fn addresses(&self) -> String {
        let addresses: Vec<String> = self.members.iter().map(|member| member.client.to_string()).collect();
        addresses.join(",")
    }

    /// Path of a file for TLS: `ca.crt`, `client.crt`, `client.key`.
    pub fn tls_file(&self, name: &str) -> PathBuf {
        self.folder.path().join("tls").join(name)
    }

    /// The authority of its certificates, with TLS.
    pub fn authority(&self) -> Option<&Authority> {
        self.authority.as_ref()
    }

    /// Starts a member that was killed, with its data. Does not wait.
    pub fn restart(&mut self, member: usize) -> Result<()> {
        let log = self.log(member);
        let program = self.program.to_str().context("the path of etcd is not UTF-8")?;
        let member = &mut self.members[member];
        if member.server.is_none() {
            member.server = Some(Server::start("etcd", program, &member.arguments, None, &log)?);
        }
        Ok(())
    }

    /// Waits until a member serves clients, for which it needs most of the others.
    pub fn wait_ready(&mut self, member: usize) -> Result<()> {
        let log = self.log(member);
        let server = self.members[member].server.as_mut().context("the member was not started")?;
        let ready = wait_until(PATIENCE, || {
            let is_ready =
                std::fs::read_to_string(&log).is_ok_and(|text| text.contains("serving client traffic"));
            (is_ready || server.ended().ok().flatten().is_some()).then_some(is_ready)
        });
        ensure!(ready == Some(true), "{} is not ready\n{}", server.command, server.tail());
        Ok(())
    }

    /// Kills a member (SIGKILL).
    pub fn kill(&mut self, member: usize) {
        let member = &mut self.members[member];
        if let Some(mut server) = member.server.take() {
            server.kill();
        }
        member.is_frozen = false;
    }

    /// Stops a member (SIGSTOP).
    pub fn freeze(&mut self, member: usize) -> Result<()> {
        let member = &mut self.members[member];
        member.is_frozen = true;
        member.server.as_mut().context("the member does not run")?.pause()
    }

    /// Lets a member go on that was stopped.
    pub fn thaw(&mut self, member: usize) -> Result<()> {
        let member = &mut self.members[member];
        member.is_frozen = false;
        member.server.as_mut().context("the member does not run")?.resume()
    }

    /// Whether a member runs and is not stopped.
    pub fn is_well(&self, member: usize) -> bool {
        self.members[member].server.is_some() && !self.members[member].is_frozen
    }

    /// The member that is leader, as those that are well say.
    pub fn leader(&self) -> Result<usize> {
        let (_, leader) = self.status(self.first_well()?)?;
        let well = (0..self.len()).filter(|member| self.is_well(*member));
        let found = well.into_iter().find(|member| self.status(*member).is_ok_and(|(id, _)| id == leader));
        found.context("the leader does not answer")
    }

    /// Identity of a member, as etcd has it.
    pub fn member_id(&self, member: usize) -> Result<u64> {
        Ok(self.status(member)?.0)
    }

    /// Identity of a member, and that of its leader.
    fn status(&self, member: usize) -> Result<(u64, u64)> {
        let answer: Value =
            serde_json::from_str(&self.ctl_at(member, &["endpoint", "status", "-w", "json"])?)?;
        let status = &answer[0]["Status"];
        let number = |value: &Value| value.as_u64().context("a status without numbers");
        Ok((number(&status["header"]["member_id"])?, number(&status["leader"])?))
    }

    fn first_well(&self) -> Result<usize> {
        (0..self.len()).find(|member| self.is_well(*member)).context("no member is well")
    }

    /// Writes a record.
    pub fn put(&self, key: &str, value: &str) -> Result<()> {
        self.ctl(&["put", "--", key, value]).map(drop)
    }

    /// Deletes a record.
    pub fn delete(&self, key: &str) -> Result<()> {
        self.ctl(&["del", "--", key]).map(drop)
    }

    /// All records below a prefix, by their keys without it, and the revision at which they are so.
    pub fn records(&self, prefix: &str) -> Result<(i64, BTreeMap<String, EtcdRecord>)> {
        read_fields(&self.ctl(&["get", "--prefix", "-w", "fields", "--", prefix])?, prefix)
    }

    /// Compacts all but the present revision. That revision.
    pub fn compact(&self) -> Result<i64> {
        let (revision, _) = self.records("/none/")?;
        // It may be compacted already.
        match self.ctl(&["compact", &revision.to_string()]) {
            Err(error) if !format!("{error:#}").contains("has been compacted") => Err(error),
            _ => Ok(revision),
        }
    }

    /// Gives space that is free in the files of a member back.
    pub fn defragment(&self, member: usize) -> Result<()> {
        self.ctl_at(member, &["defrag"]).map(drop)
    }

    /// Saves a backup of all records to a file.
    pub fn save(&self, file: &Path) -> Result<()> {
        let file = file.to_str().context("the path of the backup is not UTF-8")?;
        self.ctl(&["snapshot", "save", file]).map(drop)
    }

    /// Ends all members, gives them the records of a backup in place of their own, and starts them. The program must be 3.4: a later
    /// `etcdctl` does not restore.
    pub fn restore(&mut self, file: &Path) -> Result<()> {
        (0..self.len()).for_each(|member| self.kill(member));
        for (number, member) in self.members.iter().enumerate() {
            let data = self.folder.path().join(format!("m{number}"));
            std::fs::remove_dir_all(&data).with_context(|| data.display().to_string())?;
            let taken = ["--name=", "--data-dir=", "--initial-cluster=", "--initial-advertise-peer-urls="];
            let options =
                member.arguments.iter().filter(|text| taken.iter().any(|name| text.starts_with(name)));
            let mut etcdctl = Command::new(etcdctl()?);
            etcdctl.env("ETCDCTL_API", "3").args(["snapshot", "restore"]).arg(file).args(options);
            let done = etcdctl.output().context("etcdctl cannot be started")?;
            ensure!(done.status.success(), "etcdctl: {}", String::from_utf8_lossy(&done.stderr));
            // What an earlier process has said does not count.
            let _ = std::fs::remove_file(self.log(number));
        }
        (0..self.len()).try_for_each(|member| self.restart(member))?;
        (0..self.len()).try_for_each(|member| self.wait_ready(member))
    }

    /// What `etcdctl` prints when it asks the first member that is well.
    pub fn ctl(&self, arguments: &[&str]) -> Result<String> {
        self.ctl_at(self.first_well()?, arguments)
    }

    /// The same of this member.
    pub fn ctl_at(&self, member: usize, arguments: &[&str]) -> Result<String> {
        let scheme = if self.authority.is_some() { "https" } else { "http" };
        let mut etcdctl = Command::new(etcdctl()?);
        etcdctl.env("ETCDCTL_API", "3").args(["--dial-timeout=2s", "--command-timeout=5s"]);
        etcdctl.arg(format!("--endpoints={scheme}://{}", self.members[member].client));
        if self.authority.is_some() {
            for (option, file) in [("cacert", "ca.crt"), ("cert", "client.crt"), ("key", "client.key")] {
                etcdctl.arg(format!("--{option}={}", self.tls_file(file).display()));
            }
        }
        let done = etcdctl.args(arguments).output().context("etcdctl cannot be started")?;
        if !done.status.success() {
            bail!("etcdctl {}: {}", arguments.join(" "), String::from_utf8_lossy(&done.stderr));
        }
        Ok(String::from_utf8(done.stdout)?)
    }

    fn log(&self, member: usize) -> PathBuf {
        self.folder.path().join(format!("m{member}.log"))
    }
}

/// An address of this host that no other cluster has, so that nobody takes a port while a member is down.
fn own_address() -> Ipv4Addr {
    let [a, b, c, ..] = RandomState::new().hash_one(0).to_le_bytes();
    // Not 127.0.0.1, nor one that ends with 0 or 255.
    Ipv4Addr::new(127, a.max(1), b, c.clamp(2, 254))
}

/// Ports that nobody has, each another one: all are held until the last was found.
fn free_ports(address: Ipv4Addr, count: usize) -> Result<Vec<SocketAddr>> {
    let listeners: Vec<TcpListener> = (0..count)
        .map(|_| TcpListener::bind((address, 0)))
        .collect::<Result<_, _>>()
        .with_context(|| format!("{address}: no port"))?;
    Ok(listeners.iter().map(TcpListener::local_addr).collect::<Result<_, _>>()?)
}

fn arguments(
    member: usize,
    client: SocketAddr,
    peer: SocketAddr,
    all: &str,
    folder: &Path,
    options: &EtcdOptions,
) -> Vec<String> {
    let scheme = if options.tls { "https" } else { "http" };
    let (client, peer) = (format!("{scheme}://{client}"), format!("http://{peer}"));
    let data = folder.join(format!("m{member}")).display().to_string();
    let mut arguments = Vec::new();
    let mut give = |name: &str, value: &str| arguments.push(format!("--{name}={value}"));
    give("name", &format!("m{member}"));
    give("data-dir", &data);
    give("listen-client-urls", &client);
    give("advertise-client-urls", &client);
    give("listen-peer-urls", &peer);
    give("initial-advertise-peer-urls", &peer);
    give("initial-cluster", all);
    give("initial-cluster-state", "new");
    give("logger", "zap");
    if options.tls {
        let file = |name: &str| folder.join("tls").join(name).display().to_string();
        give("cert-file", &file("server.crt"));
        give("key-file", &file("server.key"));
        give("trusted-ca-file", &file("ca.crt"));
        give("client-cert-auth", "true");
    }
    arguments.extend(options.more.iter().cloned());
    arguments
}

/// Reads what `etcdctl get -w fields` prints: lines of `"NAME" : VALUE`, the header first.
fn read_fields(text: &str, prefix: &str) -> Result<(i64, BTreeMap<String, EtcdRecord>)> {
    let mut revision = None;
    let mut records = BTreeMap::new();
    let mut key = String::new();
    let mut record = EtcdRecord { value: String::new(), created: 0, modified: 0 };
    for line in text.lines().filter(|line| !line.is_empty()) {
        let (name, value) =
            line.split_once(" : ").with_context(|| format!("etcdctl has printed {line:?}"))?;
        let number = || value.parse::<i64>().with_context(|| format!("{line:?} has no number"));
        let words = || serde_json::from_str::<String>(value).with_context(|| format!("{line:?} has no text"));
        match name {
            "\"Revision\"" => revision = Some(number()?),
            "\"Key\"" => key = words()?,
            "\"CreateRevision\"" => record.created = number()?,
            "\"ModRevision\"" => record.modified = number()?,
            "\"Value\"" => {
                record.value = words()?;
                let key = key.strip_prefix(prefix).context("a key without the prefix")?;
                records.insert(key.to_owned(), record.clone());
            }
            _ => {}
        }
    }
    Ok((revision.context("etcdctl has printed no revision")?, records))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fields_of_etcdctl_are_read() {
        let text = "\"ClusterID\" : 1\n\"Revision\" : 9\n\"Key\" : \"/a/x\"\n\"CreateRevision\" : 3\n\
                    \"ModRevision\" : 7\n\"Version\" : 2\n\"Value\" : \"{\\\"a\\\":1}\"\n\"Lease\" : 0\n\"More\" : false\n";
        let (revision, records) = read_fields(text, "/a/").unwrap();
        let record = EtcdRecord { value: "{\"a\":1}".into(), created: 3, modified: 7 };
        assert_eq!((revision, records), (9, [("x".to_owned(), record)].into()));
        assert!(read_fields("?", "").is_err() && read_fields("", "").is_err());
    }
}
