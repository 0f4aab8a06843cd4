//! What a host of many machines costs: disks that rest, images that many read at once, resets. Figures are printed; the
//! bounds are those that are promised. Nothing else runs meanwhile: it is a test program of its own.
//!
//! `SPILLWAY_IDLE` disks (40; 200 in `make soak`), `SPILLWAY_STORM` machines (4; 20).
#![allow(clippy::unwrap_used)]

#[path = "../machines/libvirtd.rs"]
#[allow(dead_code, reason = "the machines' tests use more of it")]
mod libvirtd;
#[path = "../machines/world.rs"]
#[allow(dead_code, reason = "the machines' tests use more of it")]
mod world;

use serde_json::Value;
use spillway_testkit::disk;
use spillway_testkit::load::Rng;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use world::World;

const MIB: u64 = 1 << 20;
const IMAGE_BYTES: u64 = 32 * MIB;

/// One at a time: each measures the whole host.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn number(variable: &str, default: u32) -> u32 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// What these processes have had of a processor.
fn cpu(pids: &[u32]) -> Duration {
    let ticks = |pid: &u32| -> Option<u64> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        // utime and stime, in hundredths of a second (proc(5), fields 14 and 15).
        Some(fields[11].parse::<u64>().ok()? + fields[12].parse::<u64>().ok()?)
    };
    Duration::from_millis(pids.iter().filter_map(ticks).sum::<u64>() * 10)
}

fn stats(world: &World, machine: &str) -> Value {
    let control = world.machine(machine)["status"]["run"]["control_socket"].as_str().unwrap().to_owned();
    let done = Command::new(disk::program().unwrap()).args(["stats", &control, "--json"]).output().unwrap();
    assert!(done.status.success(), "{done:?}");
    serde_json::from_slice(&done.stdout).unwrap()
}

/// Takes all files below a folder out of the host's page cache. Their bytes.
fn forget(folder: &Path) -> u64 {
    let mut bytes = 0;
    for entry in std::fs::read_dir(folder).unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() {
            bytes += forget(&path);
        } else {
            let file = std::fs::File::open(&path).unwrap();
            rustix::fs::fsync(&file).unwrap();
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
            bytes += file.metadata().unwrap().len();
        }
    }
    bytes
}

fn read_bytes(pid: u64) -> u64 {
    let io = std::fs::read_to_string(format!("/proc/{pid}/io")).unwrap();
    io.lines().find_map(|line| line.strip_prefix("read_bytes: ")).unwrap().parse().unwrap()
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

#[test]
fn disks_at_rest_cost_no_processor() {
    let _alone = alone();
    let Some(world) = World::new("none") else { return };
    let count = number("SPILLWAY_IDLE", 40);
    world.import("golden", "version-1");
    let begun = Instant::now();
    world.ok(&[
        "catalog",
        "create",
        "desk",
        "--image",
        "golden",
        "--count",
        &count.to_string(),
        "--ram",
        "8M",
    ]);
    world.ok(&["machine", "start", "--catalog", "desk", "--wait"]);
    let started = begun.elapsed();
    let pids: Vec<u32> = world
        .processes()
        .iter()
        .map(|process| process.split(' ').next().unwrap().parse().unwrap())
        .chain([world.daemon_pid()])
        .collect();
    // Each disk's supervisor and worker, and the daemon.
    assert_eq!(pids.len() as u32, 2 * count + 1);
    let over = Duration::from_secs(10);
    // What was begun by the start has ended.
    std::thread::sleep(Duration::from_secs(2));
    let before = cpu(&pids);
    std::thread::sleep(over);
    let used = cpu(&pids) - before;
    println!(
        "{count} disks started in {started:.1?}; at rest all of them and the daemon took {used:?} in {over:?}"
    );
    assert!(used < over / 50, "{used:?} of {over:?}");
}

#[test]
fn a_boot_storm_reads_the_image_once() {
    let _alone = alone();
    let Some(world) = World::new("qemu") else { return };
    let count = number("SPILLWAY_STORM", 4);
    // Nothing of it is a hole.
    let image = world.path("full.raw");
    let mut random = Rng::new(1);
    let words = (0..IMAGE_BYTES / 8).flat_map(|_| random.below(u64::MAX).to_le_bytes());
    std::fs::write(&image, words.collect::<Vec<u8>>()).unwrap();
    world.ok(&["image", "import", "golden", image.to_str().unwrap(), "--format", "raw"]);
    // As on a host that has just been started.
    let forgotten = forget(&world.path("state/store"));
    assert!(forgotten >= IMAGE_BYTES, "{forgotten}");
    world.catalog("desk", count, &["--image", "golden", "--ram", "8M"]);
    world.ok(&["machine", "start", "--catalog", "desk", "--wait", "--timeout", "600"]);
    let names: Vec<String> = (1..=count).map(|n| format!("desk-{n:03}")).collect();
    // All read all of it, at the same time.
    std::thread::scope(|scope| {
        for name in &names {
            let world = &world;
            scope.spawn(move || {
                // Its shell listens.
                world.tell(name, "state", "STATE");
                let line = world.tell_slow(name, "all", "READ", world::BOOT);
                assert_eq!(line, format!("READ {IMAGE_BYTES}"), "{name}");
            });
        }
    });
    let all: Vec<Value> = names.iter().map(|name| stats(&world, name)).collect();
    let sum =
        |field: &str| all.iter().map(|stats| stats["planes"]["base"][field].as_u64().unwrap()).sum::<u64>();
    let (store, base) = (sum("store_read_bytes"), sum("read_bytes"));
    // What the kernel says of each worker: bytes that it caused to be read from a device (proc(5), /proc/PID/io).
    let device: u64 = all.iter().map(|stats| read_bytes(stats["worker_pid"].as_u64().unwrap())).sum();
    println!(
        "{count} machines read {} MiB of an image of {} MiB, {:.1} MiB of it from its store; waited for: {:.1} MiB",
        base / MIB,
        IMAGE_BYTES / MIB,
        device as f64 / MIB as f64,
        store as f64 / MIB as f64
    );
    assert!(base >= u64::from(count) * IMAGE_BYTES, "{base}");
    // What the kernel reads ahead is not waited for, and not counted there. It may be ahead of all of them from the blocks on
    // that the daemon looked at: then nothing is.
    assert!(store <= IMAGE_BYTES, "{store}");
    // Its first blocks were looked at by the daemon.
    let close = IMAGE_BYTES - MIB..IMAGE_BYTES + IMAGE_BYTES / 10;
    assert!(close.contains(&device), "{device} of {IMAGE_BYTES}");
}

#[test]
fn a_reset_is_quick() {
    let _alone = alone();
    let Some(world) = World::new("none") else { return };
    let big = world.path("big.raw");
    std::fs::File::create(&big).unwrap().set_len(1024 * MIB).unwrap();
    world.ok(&["image", "import", "big", big.to_str().unwrap(), "--format", "raw"]);
    world.ok(&["catalog", "create", "desk", "--image", "big", "--count", "1", "--ram", "128M"]);
    world.ok(&["machine", "start", "desk-001", "--wait"]);
    let run = world.machine("desk-001")["status"]["run"].clone();
    let (nbd, control) = (run["nbd_socket"].as_str().unwrap(), run["control_socket"].as_str().unwrap());
    let mut times = Vec::new();
    for _ in 0..5 {
        let written = Command::new("qemu-io")
            .args(["-f", "raw", "-c", "write -P 7 0 64M", &format!("nbd+unix:///?socket={nbd}")])
            .output()
            .unwrap();
        assert!(written.status.success(), "{written:?}");
        let mut socket = UnixStream::connect(control).unwrap();
        let begun = Instant::now();
        socket.write_all(b"{\"command\": \"reset\"}\n").unwrap();
        let mut answer = String::new();
        BufReader::new(socket).read_line(&mut answer).unwrap();
        times.push(begun.elapsed());
        assert!(answer.starts_with(r#"{"ok""#), "{answer}");
    }
    let disk = median(times.clone());
    println!("a disk with 64 MiB written is reset in {disk:.1?} (all: {times:.1?})");
    assert!(disk < Duration::from_millis(10), "{times:?}");
    drop(world);

    let Some(world) = World::new("qemu") else { return };
    world.import("golden", "version-1");
    world.catalog("desk", 1, &["--image", "golden", "--ram", "8M"]);
    world.ok(&["machine", "start", "desk-001", "--wait"]);
    let mut times = Vec::new();
    for _ in 0..5 {
        // A guest that does something.
        world.tell("desk-001", "state", "STATE");
        let vmm = |world: &World| -> Option<u64> {
            let machine: Value = serde_json::from_str(&world.get("/v1/machines/desk-001")).unwrap();
            machine["status"]["run"]["vmm_pid"].as_u64()
        };
        let before = vmm(&world);
        let begun = Instant::now();
        world.ask(
            "POST",
            "/v1/machine-actions",
            r#"{"action": "reset", "force": true, "select": {"names": ["desk-001"]}}"#,
        );
        while vmm(&world).is_none_or(|pid| Some(pid) == before) {
            assert!(begun.elapsed() < Duration::from_secs(30), "no VMM is started again");
            std::thread::sleep(Duration::from_millis(2));
        }
        times.push(begun.elapsed());
    }
    let again = median(times.clone());
    println!("a machine that is reset has a VMM again after {again:.1?} (all: {times:.1?})");
    assert!(again < Duration::from_millis(500), "{times:?}");
}
