//! A disk whose image is streamed: the program that serves it, the test in place of `spillway-streamd`, and a guest's driver.
#![allow(clippy::unwrap_used)]

mod source;

use rustix::fs::OFlags;
use rustix::process::{Pid, Signal, kill_process};
use source::{CHUNK, CHUNKS, Gives, ROOT, SIZE, Source};
use spillway_control::program::{ServeOrder, ServeOutput};
use spillway_control::{BaseCache, Client, DiskSettings, Mode, Request, ServeSettings, Stats, Streamed};
use spillway_testkit::{Ask, Driver};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(30);
/// How soon is answered what waits for no chunk.
const PROMPT: Duration = Duration::from_secs(3);

struct Disk {
    source: Source,
    child: Child,
    dir: tempfile::TempDir,
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        thread::sleep(Duration::from_millis(2));
    }
}

impl Disk {
    fn start(mode: Mode) -> Disk {
        Disk::with(mode, BaseCache::Host)
    }

    fn with(mode: Mode, base_cache: BaseCache) -> Disk {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let source = Source::new(dir.path());
        let digest = format!("sha256:{}", ROOT.map(|byte| format!("{byte:02x}")).concat());
        let settings = ServeSettings {
            settings: DiskSettings {
                mode: Some(mode),
                ram_bytes: mode.has_ram().then_some(8 << 20),
                base_cache: Some(base_cache),
                ..DiskSettings::default()
            },
            image: Some(dir.path().join("disk.raw")),
            streamed: Some(Streamed { socket: source.socket(), digest }),
            disk: (mode == Mode::Persistent).then(|| dir.path().join("own.disk")),
            image_id: (mode == Mode::Persistent).then(|| "golden:1".into()),
            vhost_user: Some(dir.path().join("vhost")),
            control: Some(dir.path().join("control")),
            ..ServeSettings::default()
        };
        let order = ServeOrder { settings, output: ServeOutput::Line };
        let mut command = Command::new(env!("CARGO_BIN_EXE_spillway-worker"));
        let log = std::fs::File::create(dir.path().join("log")).unwrap();
        let child = command.args(order.arguments().unwrap()).stderr(log).spawn().unwrap();
        let disk = Disk { source, child, dir };
        until("it serves", || Client::connect(&disk.control()).is_ok());
        disk
    }

    fn control(&self) -> PathBuf {
        self.dir.path().join("control")
    }

    fn ask(&self, request: &Request) -> serde_json::Value {
        Client::connect(&self.control()).unwrap().ask(request).unwrap()
    }

    fn stats(&self) -> Stats {
        serde_json::from_value(self.ask(&Request::Stats)).unwrap()
    }

    fn driver(&self) -> Driver {
        Driver::connect(&self.dir.path().join("vhost")).unwrap()
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap()
    }

    /// Whether the worker reads the file of the cache past the host's page cache.
    fn passes_the_page_cache(&self) -> bool {
        let process = PathBuf::from(format!("/proc/{}", self.stats().worker_pid));
        let files = std::fs::read_dir(process.join("fd")).unwrap().map(|entry| entry.unwrap());
        let file = self.source.file();
        let same = files.filter(|open| {
            std::fs::metadata(open.path()).is_ok_and(|found| (found.dev(), found.ino()) == file)
        });
        let flags: Vec<_> = same
            .map(|open| {
                let told = std::fs::read_to_string(process.join("fdinfo").join(open.file_name())).unwrap();
                let flags = told.lines().find_map(|line| line.strip_prefix("flags:")).unwrap();
                OFlags::from_bits_retain(u32::from_str_radix(flags.trim(), 8).unwrap())
            })
            .collect();
        assert!(!flags.is_empty(), "it has no such file open");
        flags.iter().all(|flags| flags.contains(OFlags::DIRECT))
    }

    /// Reads, and compares.
    fn reads(&self, driver: &mut Driver, offset: u64, len: usize) {
        let mut bytes = vec![0; len];
        driver.read_at(offset, &mut bytes).unwrap();
        assert!(bytes == self.source.content[offset as usize..offset as usize + len], "{len} from {offset}");
    }

    fn stop(mut self) -> (ExitStatus, Duration) {
        let begun = Instant::now();
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        (self.child.wait().unwrap(), begun.elapsed())
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            eprintln!("{}", self.log());
        }
    }
}

/// A read that is left in flight.
fn read(offset: u64) -> Ask {
    Ask::Read { offset, len: 4096 }
}

#[test]
fn each_chunk_is_asked_for_once_and_what_is_there_waits_for_none() {
    let disk = Disk::start(Mode::Ram);
    let mut driver = disk.driver();
    disk.reads(&mut driver, 0, 64 << 10);
    disk.reads(&mut driver, CHUNK - 4096, 8192);
    assert_eq!(disk.source.asked(), [0, 1]);
    disk.source.set(Gives::Nothing);
    let places: Vec<_> = (0..4).map(|n| 5 * CHUNK + n * 8192).chain([9 * CHUNK]).collect();
    let waiting: Vec<_> = places.iter().map(|at| driver.start(read(*at), |_| {}).unwrap()).collect();
    let begun = Instant::now();
    (0..16).for_each(|n| disk.reads(&mut driver, n * 4096, 4096));
    driver.write_at(9 * CHUNK + 8192, &[9; 4096]).unwrap();
    assert!(begun.elapsed() < PROMPT, "{:?}", begun.elapsed());
    assert!(waiting.iter().all(|buffer| !driver.is_finished(*buffer)));
    let chunks = disk.stats().chunks;
    assert_eq!((chunks.asked, chunks.missing, chunks.stalls, chunks.found), (4, 2, 0, 0));
    disk.source.set(Gives::Chunks);
    for (at, buffer) in places.into_iter().zip(waiting) {
        let at = at as usize;
        let is_right =
            driver.finish(buffer, |got| assert!(got[..4096] == disk.source.content[at..at + 4096]));
        assert_eq!(is_right.unwrap(), 0);
    }
    assert_eq!(disk.source.asked(), [0, 1, 5, 9]);
    // Part of a block of a chunk that is missing, and the end of the image.
    driver.write_at(11 * CHUNK + 512, &[8; 512]).unwrap();
    let mut block = [0; 4096];
    driver.read_at(11 * CHUNK, &mut block).unwrap();
    let at = 11 * CHUNK as usize;
    assert!(block[..512] == disk.source.content[at..at + 512] && block[512..1024] == [8; 512]);
    assert!(block[1024..] == disk.source.content[at + 1024..at + 4096]);
    disk.reads(&mut driver, SIZE - 4608, 4608);
    let stats = disk.stats();
    assert_eq!((stats.chunks.asked, stats.chunks.missing, stats.latency.chunk.count), (6, 0, 6));
    // What a boot reads is asked once, and noted anew after a reset.
    let touched = || disk.ask(&Request::Touched)["chunks"].as_array().unwrap().clone();
    assert_eq!(touched(), [0, 1, 5, 9, 11, 15]);
    disk.reads(&mut driver, 2 * CHUNK, 4096);
    assert!(touched().is_empty());
    disk.ask(&Request::Reset { force: true, discard_data: false });
    drop(driver);
    let mut driver = disk.driver();
    disk.reads(&mut driver, 5 * CHUNK, 4096);
    disk.reads(&mut driver, 0, 4096);
    assert_eq!(touched(), [5, 0]);
    // Each that is there is counted once for each generation of the disk, and the last one is shorter.
    disk.reads(&mut driver, 0, 4096);
    let found = || (disk.stats().chunks.found, disk.stats().chunks.found_bytes);
    assert_eq!(found(), (2, 2 * CHUNK));
    disk.reads(&mut driver, SIZE - 4096, 4096);
    assert_eq!(found(), (3, 2 * CHUNK + (SIZE - 1) % CHUNK + 1));
    assert_eq!(disk.stats().chunks.asked, 7);
    drop(driver);
    assert!(disk.stop().0.success());
}

#[test]
fn chunks_may_be_passed_on_and_only_a_damaged_one_is_an_error() {
    let disk = Disk::start(Mode::RamOverflow);
    let mut driver = disk.driver();
    disk.source.set(Gives::Passes);
    (0..u64::from(CHUNKS) - 1).for_each(|n| disk.reads(&mut driver, n * CHUNK + 12_288, 200 << 10));
    let once = disk.source.asked().len();
    assert!(once >= 15);
    disk.reads(&mut driver, 12_288, 4096);
    assert_eq!(disk.source.asked().len(), once + 1, "the cache has not kept it");
    disk.source.set(Gives::Damaged);
    let error = driver.read_at(3 * CHUNK, &mut [0; 4096]).unwrap_err();
    assert_eq!(error.downcast_ref::<std::io::Error>().unwrap().raw_os_error(), Some(5), "{error}");
    until("it is told", || {
        disk.log().contains("no registry has the 1048576 bytes of the image from 3145728 on")
    });
    disk.source.set(Gives::Chunks);
    disk.reads(&mut driver, 3 * CHUNK, 4096);
}

#[test]
fn the_other_process_and_the_worker_may_die_at_any_time() {
    let disk = Disk::with(Mode::Ram, BaseCache::None);
    let mut driver = disk.driver();
    disk.reads(&mut driver, 0, 4096);
    assert!(disk.passes_the_page_cache());
    for round in 1..6 {
        disk.source.set(Gives::Nothing);
        let waiting = driver.start(read(round * CHUNK), |_| {}).unwrap();
        until("it is asked for", || disk.source.asked().contains(&(round as u32)));
        if round % 2 == 1 {
            disk.source.die();
            if round == 3 {
                disk.source.lose_files();
            }
            // What is there is read without it.
            (0..round.min(2)).for_each(|n| disk.reads(&mut driver, n * CHUNK, 4096));
            thread::sleep(Duration::from_millis(200));
            disk.source.listen();
        }
        if round >= 4 {
            let worker = disk.stats().worker_pid as i32;
            kill_process(Pid::from_raw(worker).unwrap(), Signal::KILL).unwrap();
        }
        disk.source.set(Gives::Chunks);
        let at = (round * CHUNK) as usize;
        let is_right =
            driver.finish(waiting, |got| assert!(got[..4096] == disk.source.content[at..at + 4096]));
        assert_eq!(is_right.unwrap(), 0, "{round}");
        (0..=round).for_each(|n| disk.reads(&mut driver, n * CHUNK + 4096, 4096));
    }
    assert!(disk.log().contains("the image has another file in the cache now"), "{}", disk.log());
    assert!(disk.passes_the_page_cache(), "also in the other file");
}

#[test]
fn a_chunk_that_does_not_come_is_told_and_keeps_nobody_from_the_end() {
    let disk = Disk::start(Mode::Ram);
    let mut driver = disk.driver();
    driver.write_at(0, &[1; 4096]).unwrap();
    disk.source.set(Gives::Nothing);
    let begun = Instant::now();
    let waiting = driver.start(read(7 * CHUNK), |_| {}).unwrap();
    until("it is told", || disk.log().contains("have not arrived for 10 seconds"));
    assert!(begun.elapsed() > Duration::from_secs(9) && begun.elapsed() < Duration::from_secs(15));
    let chunks = disk.stats().chunks;
    assert_eq!((chunks.stalled, chunks.stalls, chunks.missing), (1, 1, 1));
    disk.source.set(Gives::Chunks);
    assert_eq!(driver.finish(waiting, |_| {}).unwrap(), 0);
    until("it is told", || disk.log().contains("chunks of the image arrive again"));
    assert_eq!(disk.stats().chunks.stalled, 0);
    // Another program takes the disk over, and the request with it.
    disk.source.set(Gives::Nothing);
    let waiting = driver.start(read(8 * CHUNK), |_| {}).unwrap();
    until("it is asked for", || disk.source.asked().contains(&8));
    let (begun, first) = (Instant::now(), disk.stats().worker_pid);
    disk.ask(&Request::Upgrade { binary: env!("CARGO_BIN_EXE_spillway-worker").into() });
    assert!(begun.elapsed() < PROMPT, "{:?}", begun.elapsed());
    assert_ne!(disk.stats().worker_pid, first);
    disk.source.set(Gives::Chunks);
    let at = 8 * CHUNK as usize;
    let is_right = driver.finish(waiting, |got| assert!(got[..4096] == disk.source.content[at..at + 4096]));
    assert_eq!(is_right.unwrap(), 0);
    // A reset, and the end.
    disk.source.set(Gives::Nothing);
    let _waiting = driver.start(read(9 * CHUNK), |_| {}).unwrap();
    until("it is asked for", || disk.source.asked().contains(&9));
    let begun = Instant::now();
    disk.ask(&Request::Reset { force: true, discard_data: false });
    assert!(begun.elapsed() < PROMPT, "{:?}", begun.elapsed());
    drop(driver);
    let mut driver = disk.driver();
    let _waiting = driver.start(read(10 * CHUNK), |_| {}).unwrap();
    until("it is asked for", || disk.source.asked().contains(&10));
    let (status, took) = disk.stop();
    assert!(status.success() && took < PROMPT, "{status} {took:?}");
}

#[test]
fn a_persistent_disk_has_one_too() {
    let disk = Disk::start(Mode::Persistent);
    let mut driver = disk.driver();
    driver.write_at(2 * CHUNK + 512, &[5; 512]).unwrap();
    driver.flush().unwrap();
    disk.reads(&mut driver, 2 * CHUNK, 512);
    disk.reads(&mut driver, 2 * CHUNK + 1024, 65_536);
    drop(driver);
    assert!(disk.stop().0.success());
}
