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

/// A catalog of one machine on an image, whose disk is served. Where it is.
fn serve(host: &World, name: &str, image: &str) -> String {
    host.ok(&["catalog", "create", name, "--image", image, "--count", "1"]);
    let machine = format!("{name}-001");
    host.ok(&["machine", "start", &machine, "--wait"]);
    let shown = host.json(&["machine", "show", &machine]);
    let socket = shown["status"]["run"]["nbd_socket"].as_str().unwrap_or_else(|| panic!("{shown:#}"));
    format!("nbd+unix:///?socket={socket}")
}

/// All that a disk reads.
fn content(host: &World, nbd: &str) -> Vec<u8> {
    let to = host.path("read.raw");
    let done = Command::new("qemu-img").args(["convert", "-O", "raw", nbd]).arg(&to).output().unwrap();
    assert!(done.status.success(), "{done:?}");
    fs::read(to).unwrap()
}

fn reads(nbd: &str, at: u64) -> bool {
    let command = format!("read {at} 4096");
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
    let small = World::with(|_| {
        let worker = spillway_testkit::disk::program().unwrap().with_file_name("spillway-worker");
        let worker = worker.display().to_string();
        ["--worker", &worker, "--stream-cache-size", &size].map(str::to_owned).into()
    });
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
