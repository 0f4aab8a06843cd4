//! F3: hosts are cut off, daemons stand still or are killed, and power is lost, several at a time; meanwhile somebody looks at all VMMs there
//! are. A name of the fleet is never alive twice.
//!
//! `SPILLWAY_PARTITIONS=N` sets how often a host is disturbed, `SPILLWAY_SEED=N` which and how. Real time decides the rest: the same seed
//! need not fail again.

use crate::rng::Rng;
use crate::world::{Host, World};
use rustix::process::{Pid, Signal};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{JoinHandle, sleep};
use std::time::{Duration, Instant};

/// How often all processes are looked at.
const LOOK: Duration = Duration::from_millis(50);

/// A VMM that was seen: its host, its process id.
type Seen = (String, u32);

/// Looks at VMMs from a thread.
struct Lookout {
    ends: Arc<AtomicBool>,
    found: Arc<Mutex<Found>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Found {
    looks: u64,
    /// All VMMs that each name has had, in the order in which they were seen.
    of: BTreeMap<String, Vec<Seen>>,
    twice: Option<String>,
}

/// Names of machines that have a VMM below a folder, with its host. A process that has ended has no command line.
fn vmms(folder: &Path) -> Vec<(String, Seen)> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let Ok(works_in) = std::fs::read_link(entry.path().join("cwd")) else { continue };
        let Ok(below) = works_in.strip_prefix(folder) else { continue };
        let Some(host) = below.iter().next() else { continue };
        let words = std::fs::read_to_string(entry.path().join("cmdline")).unwrap_or_default();
        let words: Vec<&str> = words.split('\0').collect();
        let is_vmm = words[0].contains("qemu-system");
        let name = words.iter().position(|word| *word == "-name").and_then(|at| words.get(at + 1));
        if let Some(name) = name.filter(|_| is_vmm) {
            all.push(((*name).to_owned(), (host.to_str().unwrap().to_owned(), pid)));
        }
    }
    all
}

impl Lookout {
    fn new(folder: PathBuf) -> Lookout {
        let (ends, found) = (Arc::<AtomicBool>::default(), Arc::<Mutex<Found>>::default());
        let (until, into) = (Arc::clone(&ends), Arc::clone(&found));
        let thread = std::thread::spawn(move || {
            while !until.load(Ordering::Relaxed) {
                let mut now: BTreeMap<String, BTreeSet<Seen>> = BTreeMap::new();
                for (name, seen) in vmms(&folder) {
                    now.entry(name).or_default().insert(seen);
                }
                let mut found = into.lock().unwrap();
                found.looks += 1;
                for (name, vmms) in now {
                    if vmms.len() > 1 {
                        found.twice.get_or_insert(format!("{name} is alive twice: {vmms:?}"));
                    }
                    let known = found.of.entry(name).or_default();
                    known.extend(vmms.into_iter().filter(|vmm| !known.contains(vmm)).collect::<Vec<_>>());
                }
                drop(found);
                sleep(LOOK);
            }
        });
        Lookout { ends, found, thread: Some(thread) }
    }

    fn twice(&self) -> Option<String> {
        self.found.lock().unwrap().twice.clone()
    }
}

impl Drop for Lookout {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        let _ = self.thread.take().unwrap().join();
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Disturbance {
    /// The host reaches nobody.
    Cut,
    /// Its daemon stands still.
    Stopped,
    /// Both.
    StoppedAndCut,
    /// Its daemon is killed, and is started again later.
    Killed,
    /// Nothing of it runs, and later it starts.
    Off,
}

use Disturbance::{Cut, Killed, Off, Stopped, StoppedAndCut};

fn signal(host: &Host, signal: Signal) {
    let pid = host.daemon.as_ref().unwrap().pid();
    spillway_testkit::process::send_signal(Pid::from_raw(pid.cast_signed()).unwrap(), signal).unwrap();
}

impl Disturbance {
    fn begin(self, host: &mut Host) {
        if matches!(self, Stopped | StoppedAndCut) {
            signal(host, Signal::STOP);
        }
        match self {
            Cut | StoppedAndCut => host.network.cut(true),
            Killed => signal(host, Signal::KILL),
            Off => host.lose_power(),
            Stopped => {}
        }
    }

    fn end(self, host: &mut Host) {
        if matches!(self, Cut | StoppedAndCut | Off) {
            host.network.cut(false);
        }
        match self {
            Stopped | StoppedAndCut => signal(host, Signal::CONT),
            Killed => host.daemon.as_mut().unwrap().restart().unwrap(),
            Off => host.start(),
            Cut => {}
        }
    }
}

#[test]
fn a_name_is_alive_once_whatever_is_cut_or_stands_still() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let (all, seed) = (number("SPILLWAY_PARTITIONS").unwrap_or(3), number("SPILLWAY_SEED").unwrap_or(0));
    println!("SPILLWAY_SEED={seed} SPILLWAY_PARTITIONS={all}");
    let hosts = if all < 10 { 4 } else { 8 };
    let Some(mut world) = World::new(hosts) else { return };
    let lookout = Lookout::new(world.folder().canonicalize().unwrap());
    world.import("tiny", "v1");
    let settings = json!({ "identity": "named", "on_isolation": "stop" });
    world.create("desk", &world.spec("tiny:1", hosts as u32, settings));
    world.until("all machines are ready", |world| world.ready_count("desk") == hosts);

    let mut random = Rng(seed);
    let mut open: Vec<(usize, Disturbance, Instant)> = Vec::new();
    let (mut begun, mut counts) = (0, BTreeMap::<String, u64>::new());
    let begin = Instant::now();
    while begun < all || !open.is_empty() {
        let over = lookout.twice().is_some();
        let (ended, left): (Vec<_>, Vec<_>) =
            open.into_iter().partition(|(_, _, until)| over || Instant::now() >= *until);
        ended.into_iter().for_each(|(host, disturbance, _)| disturbance.end(&mut world.hosts[host]));
        open = left;
        assert_eq!(lookout.twice(), None, "after {begun} disturbances: {counts:?}");
        // More than a third at once is left to the brake, now and then.
        let most = hosts / 3 + usize::from(random.chance(8));
        let host = random.below(hosts as u64) as usize;
        if begun < all && open.len() < most && open.iter().all(|(of, ..)| *of != host) {
            let disturbance = *random.pick(&[Cut, Stopped, StoppedAndCut, Killed, Off]);
            let is_long = random.chance(2);
            let seconds = 5 + random.below(if is_long { 80 } else { 25 });
            disturbance.begin(&mut world.hosts[host]);
            open.push((host, disturbance, Instant::now() + Duration::from_secs(seconds)));
            begun += 1;
            *counts.entry(format!("{disturbance:?}")).or_default() += 1;
        }
        sleep(Duration::from_millis(500));
    }
    world.until("all are members, and each name is ready", |world| {
        let is_member = |host: &Host| host.fleet()["membership"] == "member";
        world.hosts.iter().all(is_member) && world.ready_count("desk") == hosts
    });
    assert_eq!(lookout.twice(), None);
    let found = lookout.found.lock().unwrap();
    let vmms: usize = found.of.values().map(Vec::len).sum();
    let moves = |vmms: &Vec<Seen>| vmms.windows(2).filter(|two| two[0].0 != two[1].0).count();
    let moved: usize = found.of.values().map(moves).sum();
    println!(
        "{all} disturbances of {hosts} hosts within {:.0} s: {counts:?}; {} names had {vmms} VMMs and moved {moved} times; \
         {} looks at all of them, and none was alive twice",
        begin.elapsed().as_secs_f64(),
        found.of.len(),
        found.looks
    );
    assert_eq!(found.of.len(), hosts, "every name was seen");
    assert!(all < 50 || (moved as u64 > all / 20 && vmms as u64 > all / 5), "too little happened");
}
