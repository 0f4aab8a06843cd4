//! The shipped program on huge pages, which hosts do not give to shared memory unless they are told to.
//!
//! Turns a switch of the whole host, and so is a program of its own: cargo runs it beside no other tests. Invariant: the
//! switch is as it was when the test ends.

#![allow(clippy::unwrap_used, reason = "a test ends where a step fails")]

#[allow(dead_code, reason = "each test program uses its part")]
#[path = "system/world.rs"]
mod world;

use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process};
use spillway_testkit::disk::figure;
use spillway_testkit::footprint::memfd_bytes;
use spillway_testkit::{Driver, Load, Oracle, Shape, skip};
use std::fs::File;
use world::{MIB, World, until};

const SWITCH: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
const HUGE: u64 = 2 * MIB;

/// The host's switch, held against other runs of this test and put back at the end.
struct Switch {
    before: String,
    _held: File,
}

impl Switch {
    fn turn_to(setting: &str) -> Result<Switch, String> {
        let explain = |e: std::io::Error| format!("{SWITCH}: {e}: huge pages are not tested");
        let held = File::open(SWITCH).map_err(explain)?;
        flock(&held, FlockOperation::LockExclusive).map_err(|e| explain(e.into()))?;
        let text = std::fs::read_to_string(SWITCH).map_err(explain)?;
        let before =
            text.split(['[', ']']).nth(1).ok_or(format!("{SWITCH}: '{text}' names no setting"))?.to_string();
        std::fs::write(SWITCH, setting).map_err(explain)?;
        Ok(Switch { before, _held: held })
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        std::fs::write(SWITCH, &self.before).unwrap();
    }
}

/// How often the kernel had no huge page for shared memory that was to have one.
fn refusals() -> u64 {
    let text = std::fs::read_to_string("/proc/vmstat").unwrap();
    let of = |line: &str| line.strip_prefix("thp_file_fallback ").and_then(|n| n.parse().ok());
    text.lines().find_map(of).unwrap_or(0)
}

#[test]
fn a_disk_on_huge_pages_outlives_its_worker_and_gives_all_memory_back() {
    let Some(world) = World::new(&[]) else { return };
    let switch = match Switch::turn_to("advise") {
        Ok(switch) => switch,
        Err(why) => return skip(&why),
    };
    let before = refusals();
    let image = world.image(8 * MIB);
    let disk = world.serve(&image, &["--size", "64M", "--ram", "32M", "--overflow", "128M"]);
    let mut oracle = Oracle::with_base(64 * MIB, 91, &image).unwrap();
    let shape = Shape { depth: 8, request_bytes: 1 << 20, ..Shape::default() };
    let mut driver = Driver::connect_with(&disk.vhost(), shape).unwrap();
    let held = || memfd_bytes(&[disk.supervisor()], "spillway-data").unwrap();
    let huge = || disk.figure("ram.huge_bytes").unwrap();

    driver.run_checked(&Load::fill(16 * MIB, 1 << 20), &mut oracle).unwrap();
    let (first, memory) = (huge(), held());
    if first < HUGE && refusals() > before {
        return skip("the kernel has no huge page to give (thp_file_fallback has grown)");
    }
    // All of its memory, and none of the driver's.
    assert!((16 * MIB..=memory).contains(&first), "{first} bytes of {memory} in huge pages: {}", disk.log());
    assert!(memory <= 32 * MIB, "{memory} bytes are held");

    let worker = disk.worker().unwrap();
    kill_process(Pid::from_raw(worker as i32).unwrap(), Signal::KILL).unwrap();
    until("another worker serves", &disk, || disk.worker().is_ok_and(|pid| pid != worker));
    let second = huge();
    driver.verify(&oracle).unwrap();
    let third = huge();
    println!(
        "of {memory} bytes in huge pages: {first}, with the next worker {second}, after a read of all {third}"
    );
    // The figure is of what the one that serves now has touched.
    assert!(second < first && third >= 16 * MIB, "{second} {third}");
    driver.run_checked(&Load { start_bytes: 16 * MIB, ..Load::fill(4 * MIB, 1 << 20) }, &mut oracle).unwrap();
    driver.verify(&oracle).unwrap();
    assert_eq!(disk.figure("restarts").unwrap(), 1);

    driver.discard(0, 64 * MIB).unwrap();
    oracle.discarded(0, 64 * MIB);
    until("all memory is back", &disk, || held() == 0);
    let stats = disk.stats().unwrap();
    assert_eq!(
        (figure(&stats, "ram.huge_bytes").unwrap(), figure(&stats, "ram.used_bytes").unwrap()),
        (0, 0)
    );
    driver.verify(&oracle).unwrap();
    drop(driver);
    disk.stop().unwrap();
    let setting = switch.before.clone();
    drop(switch);
    assert!(std::fs::read_to_string(SWITCH).unwrap().contains(&format!("[{setting}]")));
}
