//! Images of a fleet: hosts get them from its registries and from each other.

use crate::daemon_world::{World, finishes};
use crate::scene::{DATA, digest, folder, host, import, refused};
use crate::streamed::content;
use serde_json::{Value, json};
use spillway_testkit::disk;
use spillway_testkit::etcd::{EtcdCluster, EtcdProgram};
use spillway_testkit::process::wait_until;
use std::collections::BTreeMap;
use std::fs;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(90);
/// Hosts for which a fleet has addresses.
const MOST_HOSTS: u8 = 8;

/// Hosts of a fleet, one member of etcd, and a registry that another host has pushed an image to.
struct Fleet {
    // They end before etcd does.
    hosts: Vec<World>,
    addresses: Vec<Ipv4Addr>,
    etcd: EtcdCluster,
    golden: World,
    /// The content of the image.
    file: PathBuf,
    /// The folder of the registry.
    shared: PathBuf,
}

impl Fleet {
    fn new(hosts: u8) -> Fleet {
        static FLEETS: AtomicU8 = AtomicU8::new(0);
        let golden = host();
        let file = import(&golden, "debian", 1);
        let shared = folder(&golden, "hub");
        golden.ok(&["image", "push", "debian", "hub"]);
        let etcd = EtcdCluster::start(1, EtcdProgram::Debian34).unwrap();
        // Addresses of this process alone, where nobody else takes a port.
        let [.., high, low] = std::process::id().to_be_bytes();
        let first = FLEETS.fetch_add(1, Ordering::Relaxed) * MOST_HOSTS + 1;
        let addresses: Vec<_> =
            (first..first + hosts).map(|last| Ipv4Addr::new(127, high | 0x80, low, last)).collect();
        let worker = disk::program().unwrap().with_file_name("spillway-worker").display().to_string();
        let host = |(n, address): (usize, &Ipv4Addr)| {
            World::with(|_| {
                let (fleet, name) = (format!("etcd://{}/site", etcd.addresses()), format!("h{n}"));
                let (listen, zone) = (format!("{address}:9445"), format!("z{n}"));
                let options = [
                    ["--worker", &worker],
                    ["--fleet", &fleet],
                    ["--fleet-listen", &listen],
                    ["--host-name", &name],
                    ["--zone", &zone],
                ];
                let options = options.into_iter().flatten();
                options.map(str::to_owned).collect()
            })
        };
        let fleet = Fleet {
            hosts: addresses.iter().enumerate().map(host).collect(),
            addresses,
            etcd,
            golden,
            file,
            shared,
        };
        fleet.hosts[0].ok(&["fleet", "init"]);
        fleet.until("all hosts are members", |fleet| {
            fleet.hosts.iter().all(|host| host.spillway(&["fleet", "status"]).0 == 0)
        });
        fleet.until("all hosts have said what space they have", |fleet| {
            let hosts = fleet.hosts[0].json(&["fleet", "hosts"]);
            hosts["items"].as_array().unwrap().iter().all(|host| host["memory_bytes"].is_u64())
        });
        fleet
    }

    fn until(&self, what: &str, holds: impl Fn(&Fleet) -> bool) {
        if wait_until(PATIENCE, || holds(self).then_some(())).is_none() {
            for host in &self.hosts {
                let shown = ["fleet catalog show desk", "fleet image list", "fleet hosts", "operation list"]
                    .map(|command| host.spillway(&command.split(' ').collect::<Vec<_>>()));
                println!("== {shown:#?}");
            }
            panic!("not so within {PATIENCE:?}: {what}");
        }
    }

    /// Adds the registry and the image to the fleet.
    fn add_image(&self, more: &[&str]) -> Value {
        let url = format!("file://{}", self.shared.display());
        self.hosts[0].ok(&["fleet", "registry", "add", "hub", &url]);
        let add = ["fleet", "image", "add", "desktop", "--from", "hub/debian"];
        self.hosts[0].json(&[&add[..], more].concat())
    }

    /// The image as a host sees it.
    fn image(&self, host: usize) -> Option<Value> {
        self.hosts[host].json(&["fleet", "image", "list"])["items"].as_array().unwrap().first().cloned()
    }

    /// Hosts that have all of the image, as host `by` sees it.
    fn whole(&self, by: usize) -> Vec<String> {
        let image = self.image(by).unwrap();
        image["whole"].as_array().unwrap().iter().map(|host| host.as_str().unwrap().to_owned()).collect()
    }

    /// Machines of the catalog on a host.
    fn machines(&self, host: usize) -> Vec<String> {
        let all = self.hosts[host].json(&["machine", "list"]);
        all["items"].as_array().unwrap().iter().map(|of| of["name"].as_str().unwrap().to_owned()).collect()
    }
}

/// Chunks that a host was brought, by where they were. A reply has none of them if the process that streams is late.
fn brought(host: &World) -> BTreeMap<String, u64> {
    let counted = || {
        let metrics = host.metrics();
        let counted = metrics.lines().filter_map(|line| {
            let (source, count) =
                line.strip_prefix("spillway_stream_chunks_total{source=\"")?.split_once("\"} ")?;
            Some((source.to_owned(), count.parse().ok()?))
        });
        Some(counted.collect::<BTreeMap<_, _>>()).filter(|counted| !counted.is_empty())
    };
    wait_until(PATIENCE, counted).unwrap_or_else(|| panic!("{}", host.metrics()))
}

/// Reads the whole disk of a machine.
fn read(host: &World, machine: &str) -> Vec<u8> {
    host.ok(&["machine", "start", machine, "--wait"]);
    let shown = host.json(&["machine", "show", machine]);
    let socket = shown["status"]["run"]["nbd_socket"].as_str().unwrap_or_else(|| panic!("{shown:#}"));
    content(host, &format!("nbd+unix:///?socket={socket}"))
}

#[test]
fn hosts_get_an_image_of_the_fleet_from_its_registry_once_and_from_each_other() {
    let fleet = Fleet::new(3);
    let [first, second, _] = &fleet.hosts[..] else { panic!() };
    refused(
        first,
        &["fleet", "image", "add", "desktop", "--from", "hub/debian"],
        66,
        &["spillway fleet registry add hub"],
    );
    let nowhere = fleet.golden.path("nowhere").display().to_string();
    refused(
        first,
        &["fleet", "registry", "add", "hub", &format!("file://{nowhere}")],
        2,
        &["there is no such folder"],
    );
    let added = fleet.add_image(&[]);
    assert_eq!((&added["version"], &added["source"]), (&json!(1), &json!("debian")), "{added}");
    assert_eq!(added["digest"], digest(&fleet.golden, "debian", 1).as_str());
    for (arguments, why) in [
        (&["fleet", "image", "add", "desktop:2", "--from", "hub/debian:1"][..], "the same number"),
        (&["fleet", "image", "add", "desktop", "--from", "hub/absent"], "absent"),
        (&["fleet", "registry", "remove", "hub"], "fleet image remove desktop:1"),
    ] {
        let (code, _, err) = second.spillway(arguments);
        assert!(code != 0 && err.contains(why), "{arguments:?}: {err}");
    }
    fleet.until("another host sees it", |fleet| fleet.image(1).is_some());
    assert_eq!(second.json(&["fleet", "registry", "list"])["items"][0]["name"], "hub");

    second.ok(&["fleet", "catalog", "create", "desk", "--image", "desktop", "--count", "3"]);
    fleet.until("each host has a machine", |fleet| (0..3).all(|host| fleet.machines(host).len() == 1));
    let expected = fs::read(&fleet.file).unwrap();
    for (n, host) in fleet.hosts.iter().enumerate() {
        assert!(read(host, &fleet.machines(n)[0]) == expected, "h{n}");
    }
    let counts: Vec<_> = fleet.hosts.iter().map(brought).collect();
    let sum = |source: &str| counts.iter().map(|of| of.get(source).copied().unwrap_or(0)).sum::<u64>();
    let distinct = DATA.len() as u64;
    println!("{counts:?}");
    // One after the other, so that the owner that is asked first has always the time to bring it.
    assert_eq!(sum("peer") + sum("store"), 3 * distinct, "{counts:?}");
    assert!(sum("store") <= distinct + 1 && sum("peer") >= 2 * distinct - 1, "{counts:?}");

    let used = second.spillway(&["fleet", "image", "remove", "desktop:1"]);
    assert!(used.0 != 0 && used.2.contains("the catalog desk of the fleet uses"), "{used:?}");
    let asked = format!("https://{}:9446/have/{}", fleet.addresses[0], "0".repeat(64));
    let stranger = finishes(Command::new("curl").args(["-sSk", "--max-time", "10", &asked]));
    assert!(stranger.0 != 0 && stranger.1.is_empty(), "{stranger:?}");
    assert!(stranger.2.contains("certificate") || stranger.2.contains("SSL"), "{stranger:?}");
}

#[test]
fn a_boot_set_of_another_host_is_brought_before_anything_is_read() {
    let fleet = Fleet::new(1);
    let host = &fleet.hosts[0];
    fleet.add_image(&[]);
    let root = digest(&fleet.golden, "debian", 1).trim_start_matches("sha256:").to_owned();
    // Chunks 9, 2 and, beyond the image, 2000.
    let set = json!({ "boots": 2, "chunks": "120d9c1f" });
    fleet.etcd.put(&format!("/spillway/site/boot/{root}/desk"), &set.to_string()).unwrap();
    // What nobody can read harms nobody.
    fleet
        .etcd
        .put(&format!("/spillway/site/boot/{root}/lab"), r#"{"boots": 5, "chunks": "ffffffff"}"#)
        .unwrap();
    host.ok(&["fleet", "catalog", "create", "desk", "--image", "desktop", "--count", "1"]);
    let cached = |fleet: &Fleet| fleet.hosts[0].spillway(&["image", "show", "desktop", "--json"]).1;
    fleet.until("the set is brought", |fleet| {
        let shown: Value = serde_json::from_str(&cached(fleet)).unwrap_or_default();
        let of = &shown["cached"][0];
        let sets = json!([{ "catalog": "desk", "chunks": 3, "bytes": 2 << 20, "boots": 0 }]);
        of["boot_sets"] == sets && of["unfilled_chunks"] == 0 && of["present_bytes"].as_u64() == Some(2 << 20)
    });
    let asked: Vec<_> = brought(host).into_iter().filter(|(_, count)| *count > 0).collect();
    assert_eq!(asked, [("store".to_owned(), 2)], "{}", cached(&fleet));
    fleet.until("the host reports that", |fleet| {
        fleet.image(0).is_some_and(|image| image["parts"]["h0"] == 1000 && image["whole"] == json!([]))
    });
}

#[test]
fn full_copies_move_when_a_host_goes() {
    let mut fleet = Fleet::new(3);
    fleet.add_image(&["--full-copies", "2"]);
    fleet.until("two hosts have all of it", |fleet| fleet.whole(0).len() == 2);
    let first = fleet.whole(0);
    let number = |name: &str| name[1..].parse::<usize>().unwrap();
    let gone = number(&first[0]);
    let third = (0..3).find(|n| !first.contains(&format!("h{n}"))).unwrap();
    let has_image = |host: &World| host.spillway(&["image", "show", "desktop"]).0 == 0;
    assert!(!has_image(&fleet.hosts[third]), "two are enough");
    // The copies are of use when the registry is away.
    let away = fleet.golden.path("away");
    fs::rename(&fleet.shared, &away).unwrap();
    let stays = number(&first[1]);
    fleet.hosts[stays].ok(&["catalog", "create", "own", "--image", "desktop:1", "--count", "1"]);
    assert!(read(&fleet.hosts[stays], "own-001") == fs::read(&fleet.file).unwrap());
    fs::rename(&away, &fleet.shared).unwrap();

    fleet.hosts[gone].kill();
    fleet.until("another host has all of it", |fleet| {
        let whole = fleet.whole(third);
        whole.len() == 2 && whole.contains(&format!("h{third}"))
    });
    // The one that comes back has its copy, and the other one does not need to stay.
    fleet.hosts[gone].start();
    fleet.until("it is back", |fleet| {
        let shown = fleet.hosts[third].json(&["image", "show", "desktop"]);
        fleet.whole(third).contains(&first[0]) && shown["cached"][0]["residency"] == "boot"
    });
    let fewer = ["fleet", "image", "add", "desktop:1", "--from", "hub/debian"];
    fleet.hosts[third].ok(&fewer);
    fleet.until("nobody has to have all of it", |fleet| {
        let shown =
            |n: usize| fleet.hosts[n].json(&["image", "show", "desktop"])["cached"][0]["residency"].clone();
        (0..3).all(|n| shown(n) == "boot")
    });
}
