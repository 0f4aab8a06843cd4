//! A network of hosts: each in a network namespace of its own, with one interface, all on one bridge.
//!
//! Owns the namespaces: they end with the processes that hold them. Invariant: nothing of it is on the host's own network.

use rustix::thread::{UnshareFlags, unshare_unsafe};
use spillway_testkit::process::Server;
use std::path::Path;
use std::process::Command;

/// Address of the bridge, at which etcd is.
pub const BRIDGE: [u8; 4] = [10, 77, 0, 1];

/// A host's namespace.
pub struct HostNetwork {
    holder: Server,
    interface: String,
    /// Address of the host.
    pub address: String,
}

/// Gives this thread, and what it starts from here on, a network of its own with a bridge. `false`: this user may not, which is said.
pub fn leave_the_hosts_network() -> bool {
    // SAFETY: no other thread depends on which network this one has.
    #[expect(unsafe_code, reason = "rustix marks it so for what else can be left")]
    let left = unsafe { unshare_unsafe(UnshareFlags::NEWNET) };
    if let Err(e) = left {
        spillway_testkit::skip(&format!("no network namespace can be made ({e}): run the tests as root"));
        return false;
    }
    let [a, b, c, d] = BRIDGE;
    for words in [
        "link set lo up".to_owned(),
        "link add br0 type bridge".to_owned(),
        format!("address add {a}.{b}.{c}.{d}/24 dev br0"),
        "link set br0 up".to_owned(),
    ] {
        ip(&words);
    }
    true
}

/// Executes `ip`.
fn ip(words: &str) {
    let done = Command::new("ip").args(words.split(' ')).output().expect("iproute2 is installed");
    assert!(done.status.success(), "ip {words}: {}", String::from_utf8_lossy(&done.stderr));
}

impl HostNetwork {
    /// Makes the namespace of a host, of this number from 0 on.
    pub fn new(folder: &Path, number: usize) -> HostNetwork {
        let log = folder.join("network.log");
        let words = ["--net", "sleep", "infinity"].map(String::from);
        let holder = Server::start("unshare", "unshare", &words, None, &log).unwrap();
        let (pid, interface) = (holder.pid(), format!("v{number}"));
        // The program is in its own namespace once its namespace is not ours.
        let own = std::fs::read_link("/proc/thread-self/ns/net").unwrap();
        let is_apart = || std::fs::read_link(format!("/proc/{pid}/ns/net")).is_ok_and(|other| other != own);
        spillway_testkit::process::wait_until(std::time::Duration::from_secs(10), || {
            is_apart().then_some(())
        })
        .expect("unshare makes a namespace");
        let [a, b, c, _] = BRIDGE;
        let address = format!("{a}.{b}.{c}.{}", 10 + number);
        ip(&format!("link add {interface} type veth peer name eth0 netns {pid}"));
        ip(&format!("link set {interface} master br0 up"));
        let within = |words: &str| {
            let prefix = format!("--net=/proc/{pid}/ns/net ip {words}");
            let done = Command::new("nsenter").args(prefix.split(' ')).output().unwrap();
            assert!(done.status.success(), "nsenter {prefix}: {}", String::from_utf8_lossy(&done.stderr));
        };
        within("link set lo up");
        within(&format!("address add {address}/24 dev eth0"));
        within("link set eth0 up");
        HostNetwork { holder, interface, address }
    }

    /// The words by which a program is started in it.
    pub fn prefix(&self) -> Vec<String> {
        vec!["nsenter".into(), format!("--net=/proc/{}/ns/net", self.holder.pid())]
    }

    /// Cuts the host off from all others, or connects it again.
    pub fn cut(&self, is_cut: bool) {
        ip(&format!("link set {} {}", self.interface, if is_cut { "down" } else { "up" }));
    }
}
