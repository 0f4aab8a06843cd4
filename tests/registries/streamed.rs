//! Versions that are streamed: machines' disks read them as whole ones, and what needs all of an image is refused.

use crate::daemon_world::World;
use crate::scene::{DATA, MIB, SIZE, digest, folder, host, import};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use spillway_testkit::process::wait_until;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(60);

fn streamd(host: &World) -> Option<Pid> {
    let mut found = host.processes().into_iter().filter(|(_, line)| line.contains("spillway-streamd serve"));
    let first = found.next().map(|(pid, _)| pid);
    assert!(found.next().is_none(), "one is enough");
    first
}

fn cached(host: &World) -> PathBuf {
    let all = fs::read_dir(host.path("state/cache")).unwrap().map(|entry| entry.unwrap().path());
    let all: Vec<_> = all.collect();
    assert_eq!(all.len(), 1, "{all:?}");
    all[0].join("disk.raw")
}

fn cached_bytes(host: &World) -> u64 {
    fs::metadata(cached(host)).unwrap().blocks() * 512
}

/// A host whose cache has this size.
fn small_cache(size: &str) -> World {
    World::with(|_| {
        let worker = spillway_testkit::disk::program().unwrap().with_file_name("spillway-worker");
        let worker = worker.display().to_string();
        ["--worker", &worker, "--stream-cache-size", size].map(str::to_owned).into()
    })
}

/// A catalog of one machine on an image, whose disk is served. Where it is.
pub fn serve(host: &World, name: &str, image: &str) -> String {
    host.ok(&["catalog", "create", name, "--image", image, "--count", "1"]);
    let machine = format!("{name}-001");
    host.ok(&["machine", "start", &machine, "--wait"]);
    let shown = host.json(&["machine", "show", &machine]);
    let socket = shown["status"]["run"]["nbd_socket"].as_str().unwrap_or_else(|| panic!("{shown:#}"));
    format!("nbd+unix:///?socket={socket}")
}

/// All that a disk reads.
pub fn content(host: &World, nbd: &str) -> Vec<u8> {
    let to = host.path("read.raw");
    let done = Command::new("qemu-img").args(["convert", "-O", "raw", nbd]).arg(&to).output().unwrap();
    assert!(done.status.success(), "{done:?}");
    fs::read(to).unwrap()
}

fn reads(nbd: &str, at: u64) -> bool {
    let command = format!("read {at} {}", (SIZE - at).min(4096));
    Command::new("qemu-io").args(["-f", "raw", "-c", &command, nbd]).output().unwrap().status.success()
}

#[test]
fn a_streamed_version_reads_as_a_whole_one_and_chunks_come_as_they_are_read() {
    let (golden, mut other) = (host(), host());
    let file = import(&golden, "debian", 1);
    let shared = folder(&golden, "hub");
    golden.ok(&["image", "push", "debian", "hub"]);
    other.ok(&["registry", "add", "hub", &format!("file://{}", shared.display())]);
    assert!(streamd(&other).is_none(), "nothing is streamed");
    other.ok(&["image", "import", "debian", "--from", "hub/debian:1", "--residency", "lazy"]);
    assert_eq!(digest(&other, "debian", 1), digest(&golden, "debian", 1));
    assert_eq!((cached_bytes(&other), fs::metadata(cached(&other)).unwrap().len()), (0, SIZE));
    let nbd = serve(&other, "desk", "debian");
    assert!(reads(&nbd, DATA[3] * MIB) && cached_bytes(&other) <= 2 * MIB);
    // A daemon that dies, and the other process: the next ones go on.
    let first = streamd(&other).unwrap();
    other.kill();
    assert!(reads(&nbd, DATA[4] * MIB), "no daemon is needed");
    other.start();
    assert!(reads(&nbd, DATA[5] * MIB));
    assert_eq!(streamd(&other), Some(first));
    kill_process(first, Signal::KILL).unwrap();
    let read = content(&other, &nbd);
    assert!(read == fs::read(&file).unwrap());
    assert_ne!(streamd(&other), Some(first));
    assert!(cached_bytes(&other) <= (DATA.len() as u64 + 1) * MIB);
    // What was read is there when the registry is not.
    fs::rename(&shared, golden.path("away")).unwrap();
    kill_process(streamd(&other).unwrap(), Signal::KILL).unwrap();
    other.ok(&["machine", "reset", "desk-001", "--wait"]);
    let nbd = other.json(&["machine", "show", "desk-001"])["status"]["run"]["nbd_socket"].clone();
    assert!(content(&other, &format!("nbd+unix:///?socket={}", nbd.as_str().unwrap())) == read);
}

#[test]
fn what_needs_the_whole_image_is_refused_and_so_is_what_would_take_it_away() {
    let host = host();
    import(&host, "debian", 1);
    let shared = folder(&host, "hub");
    host.ok(&["image", "push", "debian", "hub"]);
    host.ok(&["image", "import", "gold", "--from", "hub/debian:1", "--residency", "lazy"]);
    host.ok(&["image", "import", "twin", "--from", "hub/debian:1", "--residency", "lazy"]);
    let refused = |arguments: &[&str], why: &str| {
        let (code, _, err) = host.spillway(arguments);
        assert!(code != 0 && err.contains(why), "{arguments:?}: {err}");
    };
    refused(&["image", "push", "gold", "hub"], "gold:1 cannot be pushed: it is streamed");
    refused(&["image", "verify", "gold"], "gold:1 cannot be verified: it is streamed");
    refused(&["image", "check", "gold"], "gold:1 cannot be checked: it is streamed");
    refused(&["registry", "remove", "hub"], "is streamed from it: delete that version first");
    assert_eq!(host.json(&["image", "show", "gold"])["versions"][0]["residency"], "lazy");
    let nbd = serve(&host, "desk", "gold");
    assert!(reads(&nbd, 0));
    refused(&["image", "delete", "gold"], "the machine 'desk-001' runs with it");
    host.ok(&["machine", "stop", "desk-001", "--wait"]);
    host.ok(&["catalog", "delete", "desk"]);
    // Its twin is the same image: the chunks stay until the last of both is deleted.
    host.ok(&["image", "delete", "gold"]);
    assert!(cached_bytes(&host) > 0);
    host.ok(&["image", "delete", "twin"]);
    assert_eq!(fs::read_dir(host.path("state/cache")).unwrap().count(), 0);
    host.ok(&["registry", "remove", "hub"]);
    // Nothing half-made stays of an import that cannot be.
    host.ok(&["registry", "add", "hub", &format!("file://{}", shared.display())]);
    refused(&["image", "import", "gone", "--from", "hub/debian:7", "--residency", "full"], "debian:7");
    fs::remove_dir_all(shared.join("images")).unwrap();
    refused(&["image", "import", "gone", "--from", "hub/debian:1", "--residency", "full"], "damaged");
    refused(&["image", "show", "gone"], "there is no image 'gone'");
    assert_eq!(fs::read_dir(host.path("state/cache")).unwrap().count(), 0);
}

#[test]
fn an_image_with_residency_full_is_brought_by_itself() {
    let golden = host();
    let file = import(&golden, "debian", 1);
    let shared = folder(&golden, "hub");
    golden.ok(&["image", "push", "debian", "hub"]);
    let size = format!("{}", 4 * MIB);
    let small = small_cache(&size);
    for host in [&golden, &small] {
        if std::ptr::eq(host, &small) {
            host.ok(&["registry", "add", "hub", &format!("file://{}", shared.display())]);
        }
        let import = ["image", "import", "gold", "--from", "hub/debian:1", "--residency", "full"];
        let (code, _, err) = host.spillway(&import);
        if std::ptr::eq(host, &small) {
            // It says the numbers, and nothing is left of it.
            assert!(code != 0 && err.contains("--stream-cache-size") && err.contains(&size), "{err}");
            assert!(host.spillway(&["image", "show", "gold"]).2.contains("there is no image"));
            continue;
        }
        assert_eq!(code, 0, "{err}");
        let whole = wait_until(PATIENCE, || {
            let cached = host.json(&["image", "show", "gold"])["cached"][0].clone();
            (cached["is_whole"] == true).then_some(cached)
        });
        let whole: Value = whole.unwrap_or_else(|| panic!("{:#}", host.json(&["image", "show", "gold"])));
        assert_eq!((&whole["chunks"], &whole["present_chunks"]), (&25.into(), &25.into()), "{whole}");
        fs::rename(&shared, host.path("away")).unwrap();
        let nbd = serve(host, "desk", "gold");
        assert!(content(host, &nbd) == fs::read(&file).unwrap(), "the registry is not needed");
        fs::rename(host.path("away"), &shared).unwrap();
    }
}

/// The value of a metric's sample, without the prefix of all names; none if there is no such sample.
fn metric(host: &World, sample: &str) -> Option<f64> {
    let text = host.metrics();
    let value =
        text.lines().find_map(|line| line.strip_prefix("spillway_")?.strip_prefix(sample)?.strip_prefix(' '));
    value.map(|value| value.parse().unwrap())
}

/// Waits until samples have these values: what disks report is up to a second old.
fn assert_metrics(host: &World, wanted: &[(&str, u64)]) {
    let wrong = || {
        let found = wanted.iter().map(|(sample, value)| (*sample, metric(host, sample), Some(*value as f64)));
        found.filter(|(_, found, wanted)| found != wanted).collect::<Vec<_>>()
    };
    let all = wait_until(PATIENCE, || wrong().is_empty().then_some(()));
    assert!(all.is_some(), "sample, found, expected: {:?}", wrong());
}

#[test]
fn metrics_and_top_say_where_chunks_came_from() {
    let (golden, other) = (host(), host());
    import(&golden, "debian", 1);
    let shared = folder(&golden, "hub");
    golden.ok(&["image", "push", "debian", "hub"]);
    other.ok(&["registry", "add", "hub", &format!("file://{}", shared.display())]);
    assert_eq!(metric(&other, "stream_cache_limit_bytes"), None);
    assert!(other.json(&["top"])["stream"].is_null(), "nothing is streamed");
    other.ok(&["image", "import", "debian", "--from", "hub/debian:1", "--residency", "lazy"]);
    let nbd = serve(&other, "desk", "debian");
    assert!(DATA.iter().all(|chunk| reads(&nbd, chunk * MIB)));
    // The last chunk has 512 bytes, and a block of the file system to itself.
    let (chunks, whole) = (DATA.len() as u64, (DATA.len() as u64 - 1) * MIB);
    let (bytes, used) = (whole + 512, whole + 4096);
    assert_metrics(
        &other,
        &[
            ("stream_chunks_total{source=\"store\"}", chunks),
            ("stream_bytes_total{source=\"store\"}", bytes),
            ("stream_chunks_total{source=\"cache\"}", 0),
            ("stream_chunks_total{source=\"seed\"}", 0),
            ("stream_chunks_total{source=\"peer\"}", 0),
            ("stream_cache_used_bytes", used),
            ("stream_cache_limit_bytes", 20 << 30),
            ("stream_chunks_inflight", 0),
            ("stream_passed_chunks_total", 0),
            ("stream_wrong_chunks_total", 0),
            ("catalog_chunks_asked_total{catalog=\"desk\"}", chunks),
            ("catalog_chunks_found_total{catalog=\"desk\"}", 0),
            ("catalog_chunk_waits_total{catalog=\"desk\"}", chunks),
            ("catalog_chunks_missing{catalog=\"desk\"}", 0),
            ("machine_chunks_asked_total{catalog=\"desk\",machine=\"desk-001\"}", chunks),
        ],
    );
    let received = metric(&other, "stream_received_bytes_total").unwrap();
    assert!(received > 0.0 && received < bytes as f64, "they are compressed: {received}");
    let waited = metric(&other, "catalog_chunk_wait_seconds_total{catalog=\"desk\"}").unwrap();
    let p99 = metric(&other, "catalog_chunk_wait_p99_seconds{catalog=\"desk\"}").unwrap();
    assert!(p99 > 0.0 && p99 <= waited * 1.04, "{p99} of {waited}");
    // Another disk finds them, and asks for none.
    let lab = serve(&other, "lab", "debian");
    assert!(DATA.iter().all(|chunk| reads(&lab, chunk * MIB)));
    assert_metrics(
        &other,
        &[
            ("catalog_chunks_found_total{catalog=\"lab\"}", chunks),
            ("catalog_chunks_found_bytes_total{catalog=\"lab\"}", bytes),
            ("catalog_chunks_asked_total{catalog=\"lab\"}", 0),
            ("stream_chunks_total{source=\"store\"}", chunks),
        ],
    );
    let top = &other.json(&["top"])["stream"];
    assert_eq!((&top["saved_bytes"], &top["used_bytes"]), (&bytes.into(), &used.into()), "{top:#}");
    assert_eq!((&top["chunks_missing"], &top["chunk_rates"]["store"]), (&0.into(), &0.0.into()), "{top:#}");
    let table = other.ok(&["top"]);
    assert!(table.contains("stream cache 6.0 MiB of 20.0 GiB  saved 6.0 MiB"), "{table}");
    let stats = other.ok(&["machine", "stats", "lab-001"]);
    assert!(
        stats.contains("chunks asked 0, missing 0, stalls 0, chunks found 7, bytes found 6.0 MiB"),
        "{stats}"
    );
    let shown = other.ok(&["image", "show", "debian"]);
    assert!(shown.contains("version 1: residency lazy, 25 of 25 chunks are here (6.0 MiB)"), "{shown}");
    assert!(shown.contains("version 1: no boot set: no boot was recorded yet"), "{shown}");
}

#[test]
fn who_waits_for_a_registry_that_is_away_can_be_seen() {
    let (golden, other) = (host(), host());
    import(&golden, "debian", 1);
    let (shared, away) = (folder(&golden, "hub"), golden.path("away"));
    golden.ok(&["image", "push", "debian", "hub"]);
    other.ok(&["registry", "add", "hub", &format!("file://{}", shared.display())]);
    other.ok(&["image", "import", "debian", "--from", "hub/debian:1", "--residency", "lazy"]);
    let nbd = serve(&other, "desk", "debian");
    fs::rename(&shared, &away).unwrap();
    let is_read = std::thread::scope(|scope| {
        let reader = scope.spawn(|| reads(&nbd, DATA[3] * MIB));
        assert_metrics(
            &other,
            &[
                ("catalog_chunks_missing{catalog=\"desk\"}", 1),
                ("catalog_disks_stalled{catalog=\"desk\"}", 1),
                ("catalog_chunk_stalls_total{catalog=\"desk\"}", 1),
                ("stream_chunks_inflight", 1),
            ],
        );
        let why = || other.json(&["machine", "show", "desk-001"])["status"]["message"].clone();
        let said = wait_until(PATIENCE, || why().as_str().map(str::to_owned));
        assert!(said.is_some_and(|why| why.contains("waits for chunks of its image")));
        assert!(other.ok(&["machine", "list"]).contains("running: its disk waits for chunks"));
        let top = other.json(&["top"]);
        assert_eq!(top["rows"][0]["state"], "stalled", "{top:#}");
        assert_eq!(
            (&top["stream"]["chunks_missing"], &top["stream"]["disks_stalled"]),
            (&1.into(), &1.into())
        );
        fs::rename(&away, &shared).unwrap();
        reader.join().unwrap()
    });
    assert!(is_read);
    assert_metrics(
        &other,
        &[
            ("catalog_chunks_missing{catalog=\"desk\"}", 0),
            ("catalog_disks_stalled{catalog=\"desk\"}", 0),
            ("catalog_chunk_stalls_total{catalog=\"desk\"}", 1),
        ],
    );
    let p99 = metric(&other, "catalog_chunk_wait_p99_seconds{catalog=\"desk\"}").unwrap();
    assert!(p99 > 9.6, "{p99}");
    let gone = || other.json(&["machine", "show", "desk-001"])["status"]["message"].is_null().then_some(());
    assert!(wait_until(PATIENCE, gone).is_some());
}

/// What is in the cache of the only version of an image.
fn figures(host: &World, image: &str) -> Value {
    host.json(&["image", "show", image])["cached"][0].clone()
}

fn until_it_is(host: &World, image: &str, what: &str, is: impl Fn(&Value) -> bool) {
    let found = wait_until(PATIENCE, || Some(figures(host, image)).filter(|cached| is(cached)));
    assert!(found.is_some(), "{what}: {:#}", figures(host, image));
}

#[test]
fn a_catalog_asks_for_more_of_a_version_until_it_goes() {
    let host = host();
    import(&host, "debian", 1);
    folder(&host, "hub");
    host.ok(&["image", "push", "debian", "hub"]);
    let take = |name: &str, residency: &str| {
        host.ok(&["image", "import", name, "--from", "hub/debian:1", "--residency", residency]);
    };
    take("gold", "lazy");
    let is = |residency: &'static str| move |cached: &Value| cached["residency"] == residency;
    until_it_is(&host, "gold", "its own", is("lazy"));
    assert_eq!(cached_bytes(&host), 0);
    host.ok(&["catalog", "create", "boots", "--image", "gold", "--residency", "boot"]);
    until_it_is(&host, "gold", "of a catalog", is("boot"));
    host.ok(&["catalog", "create", "desk", "--image", "gold", "--residency", "full"]);
    until_it_is(&host, "gold", "whole", |cached| cached["is_whole"] == true && cached["residency"] == "full");
    assert!(
        host.ok(&["catalog", "show", "desk"])
            .lines()
            .any(|line| line.starts_with("residency") && line.ends_with("full"))
    );
    assert!(host.ok(&["image", "show", "gold"]).contains("residency full, 25 of 25 chunks are here"));
    assert_eq!(host.json(&["image", "show", "gold"])["versions"][0]["residency"], "lazy");
    host.ok(&["catalog", "delete", "desk"]);
    until_it_is(&host, "gold", "the next most", is("boot"));
    host.ok(&["catalog", "delete", "boots"]);
    until_it_is(&host, "gold", "its own again", is("lazy"));
    // The residency of the version itself can be changed; a twin has the same chunks.
    take("gold", "boot");
    let own = || host.json(&["image", "show", "gold"])["versions"][0]["residency"].clone();
    assert_eq!((own(), figures(&host, "gold")["residency"].clone()), ("boot".into(), "boot".into()));
    take("twin", "full");
    until_it_is(&host, "gold", "of its twin", is("full"));
    assert_eq!(own(), "boot");
    host.ok(&["image", "delete", "twin"]);
    until_it_is(&host, "gold", "without its twin", is("boot"));
    // It cannot become a copy, and is none for those who need one.
    let refused = |arguments: &[&str], why: &str| {
        let (code, _, err) = host.spillway(arguments);
        assert!(code != 0 && err.contains(why), "{arguments:?}: {err}");
    };
    let whole = "'spillway image import gold --from hub/debian:1 --residency full'";
    refused(&["image", "import", "gold", "--from", "hub/debian:1"], whole);
    host.ok(&["image", "import", "copy", "--from", "hub/debian:1"]);
    refused(
        &["image", "import", "copy", "--from", "hub/debian:1", "--residency", "lazy"],
        "copy:1 has no residency lazy: it is copied",
    );
    refused(
        &["catalog", "create", "copies", "--image", "gold", "--mode", "ephemeral"],
        "mode ephemeral copies",
    );
    // A version that is whole is not affected.
    host.ok(&["catalog", "create", "whole", "--image", "debian", "--residency", "full"]);
}

#[test]
fn a_catalog_that_needs_more_than_the_cache_has_is_refused() {
    let golden = host();
    import(&golden, "debian", 1);
    let shared = folder(&golden, "hub");
    golden.ok(&["image", "push", "debian", "hub"]);
    let size = format!("{}", 4 * MIB);
    let small = small_cache(&size);
    small.ok(&["registry", "add", "hub", &format!("file://{}", shared.display())]);
    small.ok(&["image", "import", "gold", "--from", "hub/debian:1", "--residency", "lazy"]);
    let create = ["catalog", "create", "desk", "--image", "gold", "--residency", "full"];
    for more in [&["--dry-run"][..], &[]] {
        let (code, _, err) = small.spillway(&[&create[..], more].concat());
        let says = ["catalog desk", "--stream-cache-size", &size].iter().all(|words| err.contains(words));
        assert!(code != 0 && says, "{err}");
        assert!(small.spillway(&["catalog", "show", "desk"]).2.contains("there is no catalog"));
    }
    assert_eq!(figures(&small, "gold")["residency"], "lazy");
    small.ok(&["catalog", "create", "desk", "--image", "gold", "--residency", "boot"]);
    let file = small.path("desk.toml");
    fs::write(&file, "[catalogs.desk]\nimage = \"gold\"\nresidency = \"full\"\n").unwrap();
    let (code, _, err) = small.spillway(&["catalog", "apply", "-f", file.to_str().unwrap()]);
    assert!(code != 0 && err.contains(&size), "{err}");
    assert_eq!(small.json(&["catalog", "show", "desk"])["spec"]["residency"], "boot");
    assert_eq!(cached_bytes(&small), 0);
    // A version that is published is for the catalogs that follow the image.
    import(&golden, "debian", 2);
    golden.ok(&["image", "push", "debian:2", "hub"]);
    let size = format!("{}", 10 * MIB);
    let medium = small_cache(&size);
    medium.ok(&["registry", "add", "hub", &format!("file://{}", shared.display())]);
    medium.ok(&["image", "import", "gold", "--from", "hub/debian:1", "--residency", "lazy"]);
    medium.ok(&["catalog", "create", "desk", "--image", "gold", "--residency", "full"]);
    medium.ok(&["image", "import", "gold", "--from", "hub/debian:2", "--residency", "lazy"]);
    let (code, _, err) = medium.spillway(&["image", "publish", "gold:2"]);
    assert!(
        code != 0 && err.contains("for the catalogs that follow the image") && err.contains(&size),
        "{err}"
    );
    assert_eq!(medium.json(&["catalog", "show", "desk"])["version"], 1);
    assert_eq!(medium.json(&["image", "list"])["items"][0]["published"], 1);
    medium.ok(&["catalog", "delete", "desk"]);
    medium.ok(&["image", "publish", "gold:2"]);
}
