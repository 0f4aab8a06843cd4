//! Workloads with all their real parts: a guest, served disks, the recorder. In software, so that they run anywhere.

#![allow(clippy::unwrap_used)]

use spillway_advisor::Operation;
use spillway_advisor::trace::TraceReader;
use spillway_lab::study::Engine;
use spillway_lab::workload::{
    RecordStage, Recording, Stage, Watcher, WorkDisk, WorkResult, figures, record, run,
};
use spillway_testkit::disk::{figure, program};
use spillway_testkit::guest::{Accelerator, Kit};
use spillway_testkit::process::wait_until;
use spillway_testkit::{Disk, NullDisk, has_program, skip};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// A session in seconds: pauses are a thousandth.
const SESSION: &str =
    "actions = 40\npace = 1000\nprofile_mb = 2\ndocuments_mb = 4\nmail_mb = 2\ncache_mb = 2\n";

/// How long a machine's work may take in software beside other tests.
const PATIENCE: Duration = Duration::from_secs(600);

/// Remembers what it was told.
#[derive(Default)]
struct Notes {
    begun: Mutex<Option<Instant>>,
    vmm: Mutex<Option<u32>>,
    vmm_ended: Mutex<u32>,
    inside: Mutex<Vec<(Instant, BTreeMap<String, f64>)>>,
}

impl Watcher for Notes {
    fn begin(&self) {
        *self.begun.lock().unwrap() = Some(Instant::now());
    }

    fn vmm(&self, machine: u32, pid: u32) {
        assert_eq!(machine, 0);
        *self.vmm.lock().unwrap() = Some(pid);
    }

    fn vmm_ends(&self, machine: u32) {
        assert_eq!(machine, 0);
        let pid = self.vmm.lock().unwrap().unwrap();
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let state = stat.rsplit(") ").next().unwrap().chars().next();
        assert!(matches!(state, Some('R' | 'S' | 'D')), "it runs until after this: {stat}");
        *self.vmm_ended.lock().unwrap() += 1;
    }

    fn inside(&self, _: u32, at: Instant, figures: &BTreeMap<String, f64>) {
        assert!(at <= Instant::now());
        self.inside.lock().unwrap().push((at, figures.clone()));
    }
}

fn kit() -> Option<Kit> {
    let kit = Kit::find();
    if kit.is_none() {
        skip("workloads: the guests are not built, run 'make image'");
    } else if !has_program("qemu-system-x86_64") {
        skip("workloads: qemu-system-x86_64 is not installed");
        return None;
    }
    kit
}

fn words(text: &str) -> BTreeMap<String, toml::Value> {
    toml::from_str::<toml::Table>(text).unwrap().into_iter().collect()
}

fn folder() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("w").tempdir_in("/var/tmp").unwrap()
}

/// Does work on some disks; on one that does nothing if there is none.
fn work(
    kit: &Kit,
    (workload, engine, text): (&str, Engine, &str),
    dir: &Path,
    disks: &[&Disk],
    recording: Option<&Recording>,
    watch: &Notes,
) -> anyhow::Result<WorkResult> {
    let served = |disk: &&Disk| WorkDisk::Served { vhost: disk.vhost() };
    let mut all: Vec<WorkDisk> = disks.iter().map(served).collect();
    let null = all.is_empty().then(|| tempfile::tempdir_in(dir).unwrap());
    let null = null.as_ref().map(|own| NullDisk::start(own.path(), 1 << 30).unwrap());
    all.extend(null.iter().map(|null| WorkDisk::Null { vhost: null.vhost() }));
    let stage = Stage {
        kit,
        accelerator: Accelerator::Tcg,
        parameters: &words(text),
        seed: 7,
        dir,
        disks: &all,
        recording,
        watch,
        deadline: Instant::now() + PATIENCE,
    };
    let done = run(workload, engine, &stage)?;
    // What is said of it beforehand is what it leaves, and a score if it is reached.
    let reported = figures(workload, engine, &words(text))?;
    let reported: BTreeSet<&str> = reported.iter().map(String::as_str).collect();
    let left = done.figures.keys().map(String::as_str).filter(|name| !name.starts_with("score."));
    assert_eq!(left.collect::<BTreeSet<_>>(), reported, "{workload}");
    Ok(done)
}

/// What counts of a disk's work.
fn written(disk: &Disk) -> u64 {
    disk.figure("planes.guest.written_bytes").unwrap()
}

#[test]
fn the_same_seed_does_the_same_work_and_a_recording_of_it_exactly_the_same() {
    let Some(kit) = kit() else { return };
    let dir = folder();
    let fresh = |name: &str| fresh(&kit, dir.path(), name);

    let recording = recorded(&kit, dir.path(), "knowledge-worker", SESSION);
    let actions = &recording.actions;
    assert_eq!(actions.actions.len(), 41, "a logon and forty: {actions:?}");
    assert_eq!(actions.actions[0].name, "logon");
    assert!(actions.actions.iter().all(|a| (actions.begin_us..=actions.done_us).contains(&a.begin_us)));
    let counted = counted(dir.path());
    let traced = Traced::of(&recording);
    assert!(traced.boot > 500 && traced.work > 100, "{traced:?}");

    // A machine of its own does the same by its seed.
    let disk = fresh("again");
    let watch = Notes::default();
    let done =
        work(&kit, ("knowledge-worker", Engine::Guest, SESSION), dir.path(), &[&disk], None, &watch).unwrap();
    let names = |of: Vec<&str>| of.join(" ");
    assert_eq!(
        names(done.actions.iter().map(|a| a.name.as_str()).collect()),
        names(actions.actions.iter().map(|a| a.name.as_str()).collect())
    );
    assert_eq!(*watch.vmm_ended.lock().unwrap(), 1, "its end is told once");
    let begun = watch.begun.lock().unwrap().unwrap();
    let now_s = begun.elapsed().as_secs_f64();
    assert!(done.actions.iter().all(|a| a.took_ms >= 0.0 && a.at_s > -0.1 && a.at_s < now_s));
    assert!(done.figures["boot_s"] > 0.5 && done.figures["logon_s"] > 0.0, "{:?}", done.figures);
    let mut inside = watch.inside.lock().unwrap();
    // Two processes of the machine count: when its work begins, and each second.
    inside.sort_by_key(|look| look.0);
    assert!(
        inside.windows(2).all(|pair| pair[1].1["inside.writes"] >= pair[0].1["inside.writes"]),
        "{inside:?}"
    );
    let first_action = done.actions.iter().map(|a| a.at_s).fold(f64::INFINITY, f64::min);
    let looks = inside.iter().filter_map(|look| look.0.checked_duration_since(begun));
    let first_look = looks.map(|after| after.as_secs_f64()).fold(f64::INFINITY, f64::min);
    assert!(
        first_look < first_action + 0.1,
        "what was before the work is known: {first_look}, {first_action}"
    );
    let last_action = done.actions.iter().map(|a| a.at_s + a.took_ms / 1000.0).fold(0.0, f64::max);
    assert!((inside.last().unwrap().0 - begun).as_secs_f64() > last_action, "it counts when all is done");
    let (first, last) = (&inside.first().unwrap().1, &inside.last().unwrap().1);
    assert!(last["inside.cpu_s"] > 0.0);
    // The bytes of the work, without those of the boot, which vary more. The guest's lazy writer comes each second, and of what a
    // browser's cache deletes again a slower run has written more: of one work 26.0 MB in 4 s, and up to 27.5 MB in 9 s and more
    // were measured.
    let one = traced.work_written_bytes as f64;
    let other = last["inside.written_bytes"] - first["inside.written_bytes"];
    let durations = [(actions.done_us - actions.begin_us) as f64 / 1e6, last_action];
    println!("the same seed wrote {one} and {other} bytes in {durations:.1?} s");
    let allowed = 0.02 * one + f64::from(2 << 20);
    assert!((one - other).abs() <= allowed, "{one} and {other} bytes in {durations:.1?} s");
    let whole = written(&disk) as f64;
    assert!(
        (last["inside.written_bytes"] - whole).abs() <= 0.01 * whole,
        "the guest counted the same: {last:?}"
    );
    drop((inside, disk));

    // Replayed on three disks: the bytes are the same to the last.
    let disks = ["a", "b", "c"].map(fresh);
    let all: Vec<&Disk> = disks.iter().collect();
    let what = ("knowledge-worker", Engine::Replay, SESSION);
    let done = work(&kit, what, dir.path(), &all, Some(&recording), &Notes::default()).unwrap();
    // Blocks of zeroes that were written as data are told as zeroes: they are no written bytes any more.
    let data = counted("planes.guest.written_bytes") - counted("planes.zero.written_bytes");
    assert_eq!(traced.written_bytes, data);
    for disk in &disks {
        assert_eq!(written(disk), traced.written_bytes);
        for key in ["planes.guest.read_bytes", "planes.guest.reads", "flushes"] {
            assert_eq!(disk.figure(key).unwrap(), counted(key), "{key}");
        }
    }
    assert_eq!(done.figures["replay.requests"] as u64, 3 * (traced.boot + traced.work));
    let logons: Vec<_> = done.actions.iter().filter(|a| a.name == "logon").map(|a| a.machine).collect();
    assert_eq!(logons, [0, 1, 2]);
    assert!(done.actions.iter().all(|a| a.took_ms < 60_000.0), "{:?}", done.actions);
    let without = done.figures["replay.actions_without_requests"] as usize;
    assert_eq!(done.actions.len() + without, 123);

    // As fast as the disks answer, nobody waits for anything.
    let full = format!("{SESSION}speed = 'full'\n");
    let disk = fresh("full");
    let what = ("knowledge-worker", Engine::Replay, full.as_str());
    let done = work(&kit, what, dir.path(), &[&disk], Some(&recording), &Notes::default()).unwrap();
    assert_eq!((written(&disk), done.actions.len()), (traced.written_bytes, 0));

    let error = work(
        &kit,
        ("session-host", Engine::Replay, ""),
        dir.path(),
        &all,
        Some(&recording),
        &Notes::default(),
    );
    assert!(format!("{:#}", error.unwrap_err()).contains("knowledge-worker"), "a recording of other work");
}

#[test]
fn a_recording_tells_all_data_and_of_zeroes_at_most_those_that_had_to_wait() {
    let Some(kit) = kit() else { return };
    let dir = folder();
    let recording = recorded(&kit, dir.path(), "file-copy", "actions = 8\npace = 1000\nmegabytes = 32\n");
    let (traced, counted) = (Traced::of(&recording), counted(dir.path()));
    let (total, zero) = (counted("planes.guest.written_bytes"), counted("planes.zero.written_bytes"));
    // Never less than the data: a curve of it predicts too much, not too little.
    assert!(traced.written_bytes > 32 << 20, "{traced:?}");
    assert!((total - zero..=total).contains(&traced.written_bytes), "{traced:?}; {total}, zeroes {zero}");
}

#[test]
fn a_device_carries_so_many_sessions_and_no_more() {
    let Some(kit) = kit() else { return };
    let dir = folder();
    let text = "actions = 10\npace = 40\nlogon_every_s = 1\nprofile_mb = 2\ndocuments_mb = 4\nmail_mb = 2\ncache_mb = 2\n";
    let recording = recorded(&kit, dir.path(), "logon-storm", text);
    // A device that carries not quite two sessions of this pace, which is the slower the busier the host was.
    let seconds = (recording.actions.done_us - recording.actions.begin_us) as f64 / 1e6;
    let rate = Traced::of(&recording).work as f64 / seconds;
    let few = format!("iops={}", (1.7 * rate).ceil());
    let scores = [few.as_str(), "iops=100000"].map(|model| {
        let file = dir.path().join(format!("{model}.model"));
        let mut create = std::process::Command::new(program().unwrap());
        create.args(["storage-model", "create", model]).arg(&file);
        assert!(create.status().unwrap().success());
        // All stand on the one device.
        let fresh = |i: usize| {
            let at = dir.path().join(format!("{model}-{i}"));
            std::fs::create_dir(&at).unwrap();
            let options = ["--mode", "direct", "--overflow-model", file.to_str().unwrap()];
            Disk::start(&at, &kit.golden(), &options).unwrap()
        };
        let disks: Vec<Disk> = (0..6).map(fresh).collect();
        let all: Vec<&Disk> = disks.iter().collect();
        let what = ("logon-storm", Engine::Replay, text);
        let done = work(&kit, what, dir.path(), &all, Some(&recording), &Notes::default()).unwrap();
        done.figures.get("score.sessions").copied()
    });
    assert!(
        matches!(scores, [Some(2.0..=6.0), None]),
        "{scores:?} with {few}, {rate:.1} requests/s in a session"
    );
}

#[test]
fn a_boot_is_work_of_its_own_in_machines_and_as_a_recording() {
    let Some(kit) = kit() else { return };
    let dir = folder();
    let fresh = |name: &str| fresh(&kit, dir.path(), name);
    let disk = fresh("guest");
    let watch = Notes::default();
    let done = work(&kit, ("boot", Engine::Guest, ""), dir.path(), &[&disk], None, &watch).unwrap();
    let [boot] = &done.actions[..] else { panic!("{:?}", done.actions) };
    assert_eq!((boot.name.as_str(), boot.machine), ("boot", 0));
    assert!(boot.took_ms > 500.0 && done.figures["boot_s"] == boot.took_ms / 1000.0, "{done:?}");
    assert!(disk.figure("planes.guest.read_bytes").unwrap() > 10 << 20, "it read a system");

    let recording = recorded(&kit, dir.path(), "boot", "");
    let counted = counted(dir.path());
    let disks = ["a", "b"].map(fresh);
    let all: Vec<&Disk> = disks.iter().collect();
    let what = ("boot", Engine::Replay, "start_every_s = 1");
    let done = work(&kit, what, dir.path(), &all, Some(&recording), &Notes::default()).unwrap();
    let booted: Vec<_> = done.actions.iter().map(|a| (a.name.as_str(), a.machine)).collect();
    assert_eq!(booted, [("boot", 0), ("boot", 1)]);
    for disk in &disks {
        assert_eq!(disk.figure("planes.guest.read_bytes").unwrap(), counted("planes.guest.read_bytes"));
    }
}

/// A machine of its own at that work, recorded.
fn recorded(kit: &Kit, dir: &Path, workload: &str, text: &str) -> Recording {
    let place = dir.join("recorded");
    std::fs::create_dir(&place).unwrap();
    let stage = RecordStage {
        kit,
        accelerator: Accelerator::Tcg,
        program: &program().unwrap(),
        parameters: &words(text),
        seed: 7,
        scratch: dir,
        dir: &place,
        deadline: Instant::now() + PATIENCE,
    };
    record(workload, &stage).unwrap()
}

/// A disk of the golden image in a folder of its own.
fn fresh(kit: &Kit, dir: &Path, name: &str) -> Disk {
    let at = dir.join(name);
    std::fs::create_dir(&at).unwrap();
    Disk::start(&at, &kit.golden(), &["--ram", "256M"]).unwrap()
}

/// What the disk of a recording has counted.
fn counted(dir: &Path) -> impl Fn(&str) -> u64 {
    let text = std::fs::read_to_string(dir.join("recorded/stats.json")).unwrap();
    let stats: serde_json::Value = serde_json::from_str(&text).unwrap();
    move |key| figure(&stats, key).unwrap()
}

/// What a trace holds.
#[derive(Debug, Default)]
struct Traced {
    /// Requests of the boot.
    boot: u64,
    /// Requests of the work.
    work: u64,
    /// Bytes that are no zeroes.
    written_bytes: u64,
    /// Of these, the work's.
    work_written_bytes: u64,
}

impl Traced {
    fn of(recording: &Recording) -> Traced {
        let mut traced = Traced::default();
        for event in TraceReader::new(std::fs::File::open(&recording.trace).unwrap()).unwrap() {
            let event = event.unwrap();
            let boot = event.time_us < recording.actions.begin_us;
            *(if boot { &mut traced.boot } else { &mut traced.work }) += 1;
            if event.operation == Operation::Write {
                traced.written_bytes += event.len_bytes;
                traced.work_written_bytes += if boot { 0 } else { event.len_bytes };
            }
        }
        traced
    }
}

#[test]
fn fio_runs_in_a_machine_on_a_disk_of_ours_and_on_none() {
    let Some(kit) = kit() else { return };
    let dir = folder();
    let disk = Disk::start(dir.path(), &kit.golden(), &["--ram", "256M"]).unwrap();
    let text = "profiles = ['iometer-citrix']\nseconds = 3\nsize_mb = 64\n";
    // On the served disk's file system, also buffered; on a null disk as such.
    let both = format!("{text}buffered = true\n");
    let names = ["iometer-citrix", "iometer-citrix-buffered"];
    for (disks, text, names) in [(&[&disk][..], both.as_str(), &names[..]), (&[], text, &names[..1])] {
        let done =
            work(&kit, ("fio", Engine::Guest, text), dir.path(), disks, None, &Notes::default()).unwrap();
        assert_eq!(done.figures.keys().filter(|key| key.ends_with(".iops")).count(), names.len());
        for name in names {
            let of = |key: &str| done.figures[&format!("fio.{name}.{key}")];
            assert!(of("iops") > 1.0 && of("mb_s") > 0.0, "{:?}", done.figures);
            assert!(
                of("p50_ms") <= of("p99_ms") && of("p99_ms") <= of("max_ms") * 1.01,
                "{:?}",
                done.figures
            );
            let path = dir.path().join(format!("machine-0/fio-{name}.json"));
            let report: serde_json::Value =
                serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
            assert!(report["jobs"][0]["job_runtime"].as_u64().unwrap() >= 3000, "{report}");
        }
        let began = |name: &str| done.figures[&format!("fio.{name}.began_s")];
        assert!(began(names[0]) < 1.0, "time 0 is when all is filled: {:?}", done.figures);
        assert!(names.windows(2).all(|pair| began(pair[1]) >= began(pair[0]) + 3.0), "{:?}", done.figures);
        assert!(done.actions.is_empty(), "no user has done anything: {:?}", done.actions);
    }
    assert!(written(&disk) > 64 << 20, "what was filled was written");

    let done =
        work(&kit, ("fio", Engine::Host, text), dir.path(), &[&disk], None, &Notes::default()).unwrap();
    assert!(done.figures["fio.iometer-citrix.iops"] > 100.0, "{:?}", done.figures);
}

#[test]
fn a_machine_that_ends_early_is_an_error_with_its_console() {
    let Some(kit) = kit() else { return };
    let dir = folder();
    let disk = Disk::start(dir.path(), &kit.golden(), &[]).unwrap();
    let watch = Notes::default();
    let error = std::thread::scope(|scope| {
        scope.spawn(|| {
            // It works already: it has counted.
            let counted = || (!watch.inside.lock().unwrap().is_empty()).then_some(());
            wait_until(PATIENCE, counted).unwrap();
            let pid = watch.vmm.lock().unwrap().unwrap();
            let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        });
        work(&kit, ("file-copy", Engine::Guest, ""), dir.path(), &[&disk], None, &watch).unwrap_err()
    });
    let text = format!("{error:#}");
    assert!(text.contains("machine 0: it ended before its work was done"), "{text}");
    assert!(text.contains("qemu-system-x86_64"), "its command: {text}");
}
