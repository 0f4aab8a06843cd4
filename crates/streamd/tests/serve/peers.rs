//! Hosts that serve each other: several of the program at once, with certificates of an authority, and hosts of the test's that lie.

use crate::client::{Client, Got};
use crate::scene::{CHUNKS, Image, Registry, Streamd};
use crate::web::Fault;
use crate::wire::{Asker, Fake, Files, Manner, path_of};
use rustix::process::Signal;
use spillway_registry::serve::{PeerOrder, PeerTrust};
use spillway_testkit::certificate::Authority;
use spillway_testkit::process::wait_until;
use std::collections::BTreeMap;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Hosts for which a scene has addresses.
const MOST_HOSTS: u8 = 8;
const MAY_FETCH: &str = "spillway-may-fetch: 1\r\n";
/// No second source is asked: what is counted follows from the owners alone.
pub const NO_HEDGE: u64 = 600_000;
pub const HEDGE: u64 = 300;

/// Addresses, and files for hosts at them.
pub struct Scene {
    pub dir: tempfile::TempDir,
    pub authority: Authority,
    pub addresses: Vec<SocketAddr>,
}

impl Scene {
    pub fn new() -> Scene {
        static SCENES: AtomicU8 = AtomicU8::new(0);
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let authority = Authority::new(&dir.path().join("authority")).unwrap();
        // Addresses of this process alone, where nobody else takes a port.
        let [.., high, low] = std::process::id().to_be_bytes();
        let first = SCENES.fetch_add(1, Ordering::Relaxed) * MOST_HOSTS + 1;
        let ips: Vec<_> =
            (first..first + MOST_HOSTS).map(|last| Ipv4Addr::new(127, high | 0x80, low, last)).collect();
        let names: Vec<_> = ips.iter().map(|ip| format!("IP:{ip}")).collect();
        let scene = Scene { dir, authority, addresses: ips.iter().map(|ip| (*ip, 9444).into()).collect() };
        scene.authority.sign(&names.join(","), &scene.path("host.crt"), &scene.path("host.key")).unwrap();
        scene
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn name(&self, n: usize) -> String {
        format!("https://{}", self.addresses[n])
    }

    pub fn order(&self, n: usize, of: usize, hedge_milliseconds: u64) -> PeerOrder {
        PeerOrder {
            listen: self.addresses[n],
            name: self.name(n),
            trust: PeerTrust::Authority {
                file: self.authority.certificate(),
                hosts: (0..of).map(|n| self.name(n)).collect(),
            },
            certificate: self.path("host.crt"),
            key: self.path("host.key"),
            files_changed_ns: 0,
            upload_bytes_per_second: 1 << 40,
            hedge_milliseconds,
        }
    }

    /// Starts host `n` of so many.
    fn host(&self, registry: &Registry, n: usize, of: usize, hedge_milliseconds: u64) -> Streamd {
        self.start(registry, n, self.order(n, of, hedge_milliseconds))
    }

    pub fn start(&self, registry: &Registry, n: usize, order: PeerOrder) -> Streamd {
        let folder = self.path(&format!("host-{n}"));
        fs::create_dir_all(folder.join("cache")).unwrap();
        Streamd::start_in(registry, &folder, 1 << 30, Some(order)).swept()
    }

    fn fake(&self, n: usize, manner: Manner, image: &Image) -> Fake {
        Fake::start(self.addresses[n], self.with(&self.paths()), manner, image)
    }

    fn asker(&self, n: usize) -> Asker {
        Asker::connect(self.addresses[n], self.with(&self.paths()), true)
    }

    fn paths(&self) -> [PathBuf; 3] {
        [self.authority.certificate(), self.path("host.crt"), self.path("host.key")]
    }

    pub fn with<'a>(&self, [authority, certificate, key]: &'a [PathBuf; 3]) -> Files<'a> {
        Files { authority, certificate, key }
    }

    pub fn log(&self, n: usize) -> String {
        fs::read_to_string(self.path(&format!("host-{n}/log"))).unwrap()
    }
}

fn is_data(image: &Image, chunk: u32) -> bool {
    image.chunk(chunk).iter().any(|byte| *byte != 0)
}

/// Asks for all chunks of an image at once, and compares them.
pub fn read_all(host: &Streamd, image: &Image) {
    let mut client = Client::open(&host.socket, &image.root);
    (0..CHUNKS).for_each(|chunk| client.ask(chunk));
    for _ in 0..CHUNKS {
        let (chunk, got) = client.answer();
        assert!(matches!(got, Got::Resident), "{chunk}: {got:?}");
        assert!(client.has(chunk) && client.read(chunk) == image.chunk(chunk), "{chunk}");
    }
}

pub fn hex(root: &[u8; 32]) -> String {
    root.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn gets(registry: &Registry) -> BTreeMap<String, u64> {
    registry.web.gets("/chunks/")
}

#[test]
fn hosts_ask_the_store_once_for_each_chunk() {
    let (scene, registry) = (Scene::new(), Registry::new(&[1, 2]));
    let hosts: Vec<_> = (0..4).map(|n| scene.host(&registry, n, 4, NO_HEDGE)).collect();
    thread::scope(|scope| {
        for host in &hosts {
            for image in &registry.images {
                scope.spawn(move || read_all(host, image));
            }
        }
    });
    let gets = gets(&registry);
    let distinct = registry.images.iter().map(|image| u64::from(image.data_chunks())).sum::<u64>();
    let total = gets.values().sum::<u64>();
    assert_eq!(gets.len() as u64, distinct);
    assert!(total * 100 <= distinct * 105, "{total} requests for {distinct} chunks: {gets:?}");
    let figures: Vec<_> = hosts.iter().map(Streamd::figures).collect();
    let sum = |of: fn(&spillway_registry::serve::CacheFigures) -> u64| figures.iter().map(of).sum::<u64>();
    assert_eq!(sum(|host| host.store_chunks), total);
    // Each host has each chunk from the store or from another host.
    assert_eq!(sum(|host| host.peer_chunks), 4 * distinct - total);
    assert_eq!(sum(|host| host.uploaded_chunks), sum(|host| host.peer_chunks));
    assert_eq!(sum(|host| host.uploaded_bytes), sum(|host| host.peer_bytes));
    assert!(figures.iter().filter(|host| host.store_chunks > 0).count() > 1, "they share the work");
    assert_eq!(sum(|host| host.wrong_peers + host.refused_uploads), 0);
}

#[test]
fn hosts_that_are_dead_or_hang_hold_up_nobody() {
    // So many chunks that each host owns some, whatever their addresses are.
    let (scene, registry) = (Scene::new(), Registry::new(&[1, 2, 3, 4]));
    let mut hosts: Vec<_> = (0..4).map(|n| scene.host(&registry, n, 5, HEDGE)).collect();
    hosts[2].kill();
    hosts[3].signal(Signal::STOP);
    let hangs = scene.fake(4, Manner::Hangs, &registry.images[0]);
    let begun = Instant::now();
    thread::scope(|threads| {
        for host in &hosts[..2] {
            for image in &registry.images {
                threads.spawn(move || read_all(host, image));
            }
        }
    });
    // A deadline of one second for each owner, as long as nothing is known of the hosts.
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    assert!(!hangs.asked().is_empty());
    // Both ask the owners that are left.
    assert!(hosts[0].figures().peer_chunks + hosts[1].figures().peer_chunks > 0);
    hosts[3].signal(Signal::CONT);
}

#[test]
fn a_host_that_dies_or_stops_while_it_sends_is_replaced_by_another_source() {
    let registry = &Registry::new(&[1]);
    let image = &registry.images[0];
    thread::scope(|threads| {
        for manner in [Manner::Cuts, Manner::Stalls] {
            threads.spawn(move || {
                let scene = Scene::new();
                let fake = scene.fake(1, manner, image);
                let host = scene.host(registry, 0, 2, HEDGE);
                let begun = Instant::now();
                read_all(&host, image);
                assert!(begun.elapsed() < Duration::from_secs(9), "{manner:?} {:?}", begun.elapsed());
                let figures = host.figures();
                assert_eq!((figures.peer_chunks, figures.wrong_peers), (0, 0), "{manner:?}");
                assert!(!fake.asked().is_empty(), "{manner:?}");
            });
        }
    });
}

#[test]
fn a_host_that_comes_back_is_asked_again() {
    let (scene, registry) = (Scene::new(), Registry::new(&[1]));
    let image = &registry.images[0];
    let host = scene.host(&registry, 0, 2, NO_HEDGE);
    let mut client = Client::open(&host.socket, &image.root);
    assert!(matches!(client.get(0), Got::Resident) && host.figures().store_chunks == 1);
    let back = scene.fake(1, Manner::Right, image);
    back.wait_until_seen();
    // It is the first owner of some chunks, and says that it has the others; only the program's own steps are left to be waited for.
    let mut chunks = (1..CHUNKS).filter(|chunk| is_data(image, *chunk));
    while host.figures().peer_chunks == 0 {
        assert!(matches!(client.get(chunks.next().expect("who is seen is asked")), Got::Resident));
        thread::sleep(Duration::from_millis(400));
    }
}

#[test]
fn nothing_wrong_is_taken_from_a_host_that_lies_and_it_is_left_alone() {
    let registry = Registry::new(&[1]);
    let image = &registry.images[0];
    for manner in [Manner::Flips, Manner::Long, Manner::Short] {
        let scene = Scene::new();
        let liar = scene.fake(1, manner, image);
        let host = scene.host(&registry, 0, 2, HEDGE);
        let mut client = Client::open(&host.socket, &image.root);
        for chunk in 0..CHUNKS {
            assert!(matches!(client.get(chunk), Got::Resident));
            assert!(client.read(chunk) == image.chunk(chunk), "{manner:?} {chunk}");
        }
        let (figures, asked) = (host.figures(), liar.asked());
        assert_eq!(
            (figures.wrong_peers, figures.peer_chunks, asked.len()),
            (1, 0, 1),
            "{manner:?} {asked:?}"
        );
        assert_eq!(figures.store_chunks, u64::from(image.data_chunks()));
        let said = format!("the peer {} sent wrong bytes for the chunk {}", scene.name(1), &asked[0][6..]);
        assert_eq!(scene.log(0).matches(&said).count(), 1, "{}", scene.log(0));
    }
}

#[test]
fn who_has_no_certificate_of_the_authority_is_not_answered() {
    let (scene, registry) = (Scene::new(), Registry::new(&[1]));
    let image = &registry.images[0];
    let stranger = Authority::new(&scene.path("stranger")).unwrap();
    let ip = format!("IP:{}", scene.addresses[1].ip());
    stranger.sign(&ip, &scene.path("stranger.crt"), &scene.path("stranger.key")).unwrap();
    let (certificate, key) = (scene.path("stranger.crt"), scene.path("stranger.key"));
    let (ours, theirs) = (scene.authority.certificate(), stranger.certificate());
    let files = |authority| Files { authority, certificate: &certificate, key: &key };
    // It has our authority's certificate, as everybody may, and listens where a host should.
    let fake = Fake::start(scene.addresses[1], files(&ours), Manner::Right, image);
    let host = scene.host(&registry, 0, 2, HEDGE);
    let have = format!("/have/{}", hex(&image.root));
    for (has_certificate, authority) in [(false, &ours), (true, &ours), (true, &theirs)] {
        let mut asker = Asker::connect(scene.addresses[0], files(authority), has_certificate);
        assert!(asker.ask("GET", &have, "").is_none());
    }
    assert_eq!(scene.asker(0).get(&have, "").status, 200);
    read_all(&host, image);
    assert_eq!((fake.asked().len(), host.figures().peer_chunks), (0, 0));
}

#[test]
fn a_request_is_never_passed_on() {
    let (scene, registry) = (Scene::new(), Registry::new(&[1]));
    let image = &registry.images[0];
    let fakes: Vec<_> = (1..4).map(|n| scene.fake(n, Manner::Right, image)).collect();
    let host = scene.host(&registry, 0, 4, HEDGE);
    let mut asker = scene.asker(0);
    let data: Vec<_> = (0..CHUNKS).filter(|chunk| is_data(image, *chunk)).map(|n| image.chunk(n)).collect();
    for chunk in &data {
        assert_eq!(asker.get(&path_of(chunk), "").status, 404);
    }
    assert!(gets(&registry).is_empty(), "only an owner that may fetch asks the store");
    let mut fetched = 0;
    for chunk in &data {
        match asker.get(&path_of(chunk), MAY_FETCH) {
            answered if answered.status == 200 => {
                assert!(answered.body == *chunk);
                fetched += 1;
            }
            answered => assert_eq!((answered.status, answered.body.len()), (404, 0)),
        }
    }
    let gets = gets(&registry).values().sum::<u64>();
    assert_eq!((host.figures().store_chunks, gets), (fetched, fetched));
    // Nobody was asked for a chunk that another host wanted.
    assert!(fakes.iter().all(|fake| fake.asked().is_empty()));
    // The same chunks for a disk of this host do come from others.
    read_all(&host, image);
    assert!(fakes.iter().any(|fake| !fake.asked().is_empty()) && host.figures().peer_chunks > 0);
}

#[test]
fn uploads_are_limited() {
    let (scene, registry) = (Scene::new(), Registry::new(&[1]));
    let image = &registry.images[0];
    // One chunk at once, and the next one much later.
    let order = PeerOrder { upload_bytes_per_second: 1, ..scene.order(0, 2, HEDGE) };
    let host = scene.start(&registry, 0, order);
    read_all(&host, image);
    let mut asker = scene.asker(0);
    assert_eq!(asker.get(&path_of(image.chunk(0)), "").status, 200);
    let refused = asker.get(&path_of(image.chunk(1)), "");
    assert!(refused.status == 503 && refused.header.contains("retry-after: 10"), "{refused:?}");
    // What is not there costs nothing, and neither does what a host has.
    assert_eq!(asker.get(&path_of(b"x"), "").status, 404);
    assert_eq!(asker.get(&format!("/have/{}", hex(&image.root)), "").status, 200);
    assert_eq!((host.figures().refused_uploads, host.figures().uploaded_chunks), (1, 1));
    // Whoever is refused goes on with another source.
    let other = scene.host(&registry, 1, 2, HEDGE);
    read_all(&other, image);
    assert_eq!(other.figures().store_chunks, u64::from(image.data_chunks()));
    assert!(host.figures().refused_uploads > 1);
}

#[test]
fn what_was_not_sent_does_not_count_as_uploaded() {
    let (scene, registry) = (Scene::new(), Registry::new(&[1]));
    let image = &registry.images[0];
    // One chunk at once, and the next one much later.
    let order = PeerOrder { upload_bytes_per_second: 1, ..scene.order(0, 1, HEDGE) };
    let host = scene.start(&registry, 0, order);
    assert!(matches!(Client::open(&host.socket, &image.root).get(0), Got::Resident));
    registry.web.set(Fault::Hangs);
    let mut gone = scene.asker(0);
    gone.send("GET", &path_of(image.chunk(1)), MAY_FETCH);
    let asked = || (gets(&registry).len() == 2).then_some(());
    assert!(wait_until(Duration::from_secs(60), asked).is_some(), "the only host is the owner of all");
    drop(gone);
    let path = path_of(image.chunk(0));
    let sent = || (scene.asker(0).get(&path, "").status == 200).then_some(());
    assert!(wait_until(Duration::from_secs(60), sent).is_some(), "{:?}", host.figures());
    assert_eq!(scene.asker(0).get(&path, "").status, 503);
}

#[test]
fn what_a_host_has_and_nothing_else_is_answered() {
    let (scene, registry) = (Scene::new(), Registry::new(&[1, 2]));
    let image = &registry.images[0];
    let host = scene.host(&registry, 0, 1, HEDGE);
    let mut client = Client::open(&host.socket, &image.root);
    for chunk in [0, 9, CHUNKS - 1] {
        assert!(matches!(client.get(chunk), Got::Resident));
    }
    let mut asker = scene.asker(0);
    // Chunks 3 and 6 are zeroes, which every host has.
    assert_eq!(asker.get(&format!("/have/{}", hex(&image.root)), "").body, [0b0100_1001, 0b0000_0110]);
    let (path, absent) = (path_of(image.chunk(9)), path_of(image.chunk(1)));
    assert!(asker.get(&path, "").body == image.chunk(9));
    assert!(asker.get(&path_of(image.chunk(3)), "").body == image.chunk(3));
    let head = asker.ask("HEAD", &path, "").unwrap();
    assert!(head.status == 200 && head.header.contains("content-length: 1048576"), "{head:?}");
    assert_eq!(asker.ask("HEAD", &absent, MAY_FETCH).unwrap().status, 404);
    for (method, path, status) in [
        ("POST", path.as_str(), 405),
        ("DELETE", &path, 405),
        ("GET", &absent, 404),
        ("GET", "/", 404),
        ("GET", "/../disk.raw", 404),
        ("GET", &format!("/have/{}", hex(&[7; 32])), 404),
    ] {
        assert_eq!(asker.ask(method, path, "").unwrap().status, status, "{method} {path}");
    }
    assert_eq!(asker.ask("GET", &path, "Content-Length: 1\r\n").unwrap().status, 400);
    let large = format!("x: {}\r\n", "x".repeat(64 << 10));
    assert!(scene.asker(0).ask("GET", &path, &large).is_none_or(|answered| answered.status == 431));
    // Before the chunks of an earlier process were compared again, they are not named; they are sent after that.
    drop((client, host));
    let _host = scene.host(&registry, 0, 1, HEDGE);
    let mut asker = scene.asker(0);
    assert_eq!(asker.get(&format!("/have/{}", hex(&image.root)), "").body, [0b0100_1000, 0]);
    assert!(asker.get(&path, "").body == image.chunk(9));
}

#[test]
fn a_chunk_that_the_registry_has_lost_comes_from_any_host() {
    let (scene, registry) = (Scene::new(), Registry::new(&[1]));
    let image = &registry.images[0];
    let _empty: Vec<_> = (1..4).map(|n| scene.fake(n, Manner::Empty, image)).collect();
    let right = scene.fake(4, Manner::Right, image);
    fs::remove_dir_all(registry.shared().join("chunks")).unwrap();
    let host = scene.host(&registry, 0, 5, HEDGE);
    read_all(&host, image);
    assert_eq!(host.figures().peer_chunks, u64::from(image.data_chunks()));
    assert!(!right.asked().is_empty());
}

fn authority(order: &mut PeerOrder) -> (&mut PathBuf, &mut Vec<String>) {
    match &mut order.trust {
        PeerTrust::Authority { file, hosts } => (file, hosts),
        PeerTrust::Members => panic!("it has an authority"),
    }
}

#[test]
fn an_order_that_cannot_be_used_is_refused_with_its_reason() {
    let scene = Scene::new();
    let order = |change: fn(&mut PeerOrder, &Path)| {
        let mut order = scene.order(0, 1, HEDGE);
        change(&mut order, scene.dir.path());
        order
    };
    fs::write(scene.path("open.key"), fs::read(scene.path("host.key")).unwrap()).unwrap();
    let other = scene.authority.sign("DNS:other", &scene.path("other.crt"), &scene.path("other.key"));
    other.unwrap();
    for (order, why) in [
        (order(|order, dir| order.certificate = dir.join("absent")), "--peer-cert"),
        (order(|order, dir| order.key = dir.join("absent")), "--peer-key"),
        (order(|order, dir| order.key = dir.join("open.key")), "chmod 0600"),
        (
            order(|order, dir| authority(order).0.clone_from(&dir.join("host.key"))),
            "there is no certificate in it",
        ),
        (order(|order, dir| order.key = dir.join("other.key")), "do not go together"),
        (order(|order, _| order.listen = ([192, 0, 2, 1], 9).into()), "--peer-listen 192.0.2.1:9"),
        (order(|order, _| authority(order).1.push("http://host".into())), "--peer http://host"),
    ] {
        let said = Streamd::refuses(scene.dir.path(), order);
        assert!(said.contains(why), "{why}: {said}");
    }
}
