//! What changes while chunks are waited for: the place of the store, the images that are served, the space of the disk.

use crate::client::{Client, Got};
use crate::scene::{CHUNKS, Registry, Streamd, place_at};
use crate::web::{Fault, Web};
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
use spillway_image::asks::MOST_ASKED;
use spillway_registry::serve::{ControlReply, ControlRequest, Fill};
use std::collections::{HashMap, HashSet};
use std::fs;
use std::mem;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);

pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Each chunk arrives, and is right.
fn reads(client: &mut Client, registry: &Registry, n: usize) {
    for chunk in 0..CHUNKS {
        assert!(matches!(client.get(chunk), Got::Resident), "{chunk}");
        assert!(client.read(chunk) == registry.images[n].chunk(chunk), "{chunk}");
    }
}

/// Largest memory that the process has had, in bytes.
pub fn peak_bytes(process: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// What a process has open that has such a name.
fn open_files(process: u32, named: &str) -> usize {
    let fds = fs::read_dir(format!("/proc/{process}/fd")).unwrap();
    let links = fds.filter_map(|fd| fs::read_link(fd.unwrap().path()).ok());
    links.filter(|link| link.to_string_lossy().starts_with(named)).count()
}

fn sockets(process: u32) -> usize {
    open_files(process, "socket:")
}

/// Number of chunks in memory that the process has not sent to a disk yet.
fn passed_on(process: u32) -> usize {
    open_files(process, "/memfd:chunk")
}

#[test]
fn a_store_leads_nobody_elsewhere_and_fills_no_memory() {
    let registry = Registry::new(&[1]);
    let elsewhere = Web::new(&registry.shared());
    registry.web.redirect_to(&elsewhere);
    let streamd = Streamd::start(&registry, 1 << 30);
    let mut client = Client::open(&streamd.socket, &registry.images[0].root);
    let chunks = || registry.web.gets("/chunks/").values().sum::<u64>();
    for (chunk, fault) in [(0, Fault::Redirects), (1, Fault::Babbles)] {
        registry.web.forget();
        registry.web.set(fault);
        client.ask(chunk);
        until("it is asked again", || chunks() >= 3);
        registry.web.set(Fault::None);
        assert!(matches!(client.answer(), (got, Got::Resident) if got == chunk), "{fault:?}");
        assert!(client.read(chunk) == registry.images[0].chunk(chunk));
    }
    assert!(elsewhere.gets("/").is_empty());
    let log = fs::read_to_string(registry.shared().with_file_name("log")).unwrap();
    assert!(log.contains(&elsewhere.url) && log.contains("redirects are not followed"), "{log}");
    let peak = peak_bytes(streamd.id());
    assert!(peak < 200 << 20, "{peak} bytes");
}

#[test]
fn who_waits_gets_the_chunk_from_the_place_that_is_named_meanwhile() {
    let registry = Registry::new(&[1]);
    let other = Web::new(&registry.shared());
    let streamd = Streamd::start(&registry, 1 << 30);
    let mut client = Client::open(&streamd.socket, &registry.images[0].root);
    registry.web.set(Fault::Refuses);
    client.ask(0);
    until("it is refused", || registry.web.gets("/chunks/").values().sum::<u64>() >= 2);
    let named = streamd.serve_from(&registry, 0, Fill::Nothing, place_at(&other.url));
    assert_eq!(named, ControlReply::Done);
    assert!(matches!(client.answer(), (0, Got::Resident)));
    reads(&mut client, &registry, 0);
    let data = registry.images[0].data_chunks() as usize;
    assert_eq!(other.gets("/chunks/").values().copied().collect::<Vec<_>>(), vec![1; data]);
}

/// Lets a process open nothing more, or as much as before.
fn allow_descriptors(process: u32, allowed: bool) {
    // What it has just used is closed a moment after the answer: a lower number would be free then.
    let open = || {
        fs::read_dir(format!("/proc/{process}/fd"))
            .unwrap()
            .map(|fd| fd.unwrap().file_name())
            .collect::<HashSet<_>>()
    };
    let mut before = open();
    until("it opens and closes nothing", || {
        thread::sleep(Duration::from_millis(300));
        let now = open();
        mem::replace(&mut before, now.clone()) == now
    });
    let free = (0..).find(|fd| !Path::new(&format!("/proc/{process}/fd/{fd}")).exists());
    let limit = getrlimit(Resource::Nofile);
    let current = if allowed { limit.maximum } else { free };
    let process = Pid::from_raw(process as i32);
    prlimit(process, Resource::Nofile, Rlimit { current, maximum: limit.maximum }).unwrap();
}

#[test]
fn an_answer_that_cannot_be_given_ends_the_connection_and_is_given_on_the_next() {
    let registry = Registry::new(&[1]);
    // Nothing is kept: each chunk needs a descriptor to be passed on.
    let streamd = Streamd::start(&registry, 0);
    let open = || Client::open(&streamd.socket, &registry.images[0].root);
    let (mut client, mut other) = (open(), open());
    let right = |client: &mut Client, chunk| matches!(client.get(chunk), Got::Passed(bytes) if bytes == registry.images[0].chunk(chunk));
    assert!(right(&mut client, 0));
    allow_descriptors(streamd.id(), false);
    client.ask(1);
    assert!(client.try_answer().is_none(), "it would be waited for without end");
    allow_descriptors(streamd.id(), true);
    assert!(right(&mut open(), 1) && right(&mut other, 2), "the others go on");
}

#[test]
fn who_reads_no_answers_holds_up_nobody_and_gets_them_all() {
    let registry = Registry::new(&[1]);
    let streamd = Streamd::start(&registry, 0);
    let open = || Client::open(&streamd.socket, &registry.images[0].root);
    let data: Vec<_> = (0..CHUNKS).filter(|chunk| !matches!(chunk, 3 | 6)).collect();
    let mut silent = open();
    let asked: Vec<_> = (0..MOST_ASKED).map(|n| data[n % data.len()]).collect();
    asked.iter().for_each(|chunk| silent.ask(*chunk));
    let mut client = open();
    for chunk in &data {
        assert!(
            matches!(client.get(*chunk), Got::Passed(bytes) if bytes == registry.images[0].chunk(*chunk))
        );
    }
    let memory = passed_on(streamd.id());
    assert!(memory > 0 && memory <= MOST_ASKED, "{memory}: not all of them are on their way");
    let mut answered = HashMap::new();
    for _ in &asked {
        let (chunk, got) = silent.answer();
        assert!(matches!(got, Got::Passed(bytes) if bytes == registry.images[0].chunk(chunk)));
        *answered.entry(chunk).or_insert(0) += 1;
    }
    let often = |chunk| asked.iter().filter(|asked| *asked == chunk).count();
    assert!(data.iter().all(|chunk| answered[chunk] == often(chunk)));
    until("nothing is left in memory", || passed_on(streamd.id()) == 0);
}

#[test]
fn an_image_that_is_forgotten_ends_what_is_brought_for_it() {
    let registry = Registry::new(&[1]);
    let streamd = Streamd::start(&registry, 1 << 30);
    let before = sockets(streamd.id());
    let mut client = Client::open(&streamd.socket, &registry.images[0].root);
    registry.web.set(Fault::Hangs);
    (0..3).for_each(|chunk| client.ask(chunk));
    until("they are asked for", || registry.web.gets("/chunks/").len() == 3);
    assert!(matches!(streamd.forget(&registry, 0), ControlReply::Refused(_)), "it is used");
    drop(client);
    until("it is forgotten", || streamd.forget(&registry, 0) == ControlReply::Done);
    until("nothing is asked for any more", || sockets(streamd.id()) <= before);
    assert_eq!(streamd.figures().used_bytes, 0);
    registry.web.set(Fault::None);
    assert_eq!(streamd.serve(&registry, 0, Fill::Nothing), ControlReply::Done);
    reads(&mut Client::open(&streamd.socket, &registry.images[0].root), &registry, 0);
}

#[test]
fn an_image_that_is_named_beside_a_sweep_stays() {
    let registry = Registry::new(&[1, 2]);
    let streamd = Streamd::start(&registry, 1 << 30);
    for round in 0..40 {
        let other = Client::connect(&registry.shared().with_file_name(spillway_registry::serve::CONTROL));
        thread::scope(|scope| {
            let sweep = scope.spawn(|| other.control(&ControlRequest::Sweep { others: vec![] }, &[]));
            assert_eq!(streamd.serve(&registry, 1, Fill::Nothing), ControlReply::Done, "{round}");
            assert_eq!(sweep.join().unwrap(), ControlReply::Done, "{round}");
        });
        let mut client = Client::open(&streamd.socket, &registry.images[1].root);
        assert!(matches!(client.get(0), Got::Resident) && client.read(0) == registry.images[1].chunk(0));
        // In the folder that the next process finds.
        assert_eq!(fs::read_dir(registry.cache()).unwrap().count(), 2, "{round}");
        drop(client);
        assert_eq!(streamd.forget(&registry, 1), ControlReply::Done, "{round}");
        assert_eq!(fs::read_dir(registry.cache()).unwrap().count(), 1, "{round}");
    }
}

#[test]
fn an_image_is_forgotten_beside_a_sweep() {
    let registry = Registry::new(&[1, 2]);
    let streamd = Streamd::start(&registry, 1 << 30);
    for round in 0..40 {
        assert_eq!(streamd.serve(&registry, 1, Fill::All), ControlReply::Done, "{round}");
        let mut client = Client::open(&streamd.socket, &registry.images[1].root);
        reads(&mut client, &registry, 1);
        drop(client);
        let other = Client::connect(&registry.shared().with_file_name(spillway_registry::serve::CONTROL));
        thread::scope(|scope| {
            let sweep = scope.spawn(|| other.control(&ControlRequest::Sweep { others: vec![] }, &[]));
            assert_eq!(streamd.forget(&registry, 1), ControlReply::Done, "{round}");
            assert_eq!(sweep.join().unwrap(), ControlReply::Done, "{round}");
        });
        assert_eq!(fs::read_dir(registry.cache()).unwrap().count(), 1, "{round}");
        assert_eq!(streamd.figures().used_bytes, 0, "{round}");
    }
}

#[test]
fn an_image_is_complete_only_as_long_as_all_of_it_is_to_stay() {
    let registry = Registry::new(&[1]);
    let streamd = Streamd::start(&registry, 1 << 30);
    for fill in [Fill::Nothing, Fill::Chunks(vec![0, 1])] {
        assert_eq!(streamd.serve(&registry, 0, Fill::All), ControlReply::Done);
        until("all is there", || streamd.image(&registry, 0).is_whole);
        assert_eq!(streamd.figures().cache_chunks, 0, "nobody has asked for them");
        assert_eq!(streamd.serve(&registry, 0, fill), ControlReply::Done);
        assert!(!streamd.image(&registry, 0).is_whole);
    }
}

#[test]
fn an_image_that_is_named_late_is_counted_once() {
    let mut registry = Registry::new(&[1, 2]);
    let mut streamd = Streamd::start(&registry, 1 << 30);
    for image in &registry.images {
        assert!(matches!(Client::open(&streamd.socket, &image.root).get(0), Got::Resident));
    }
    streamd.kill();
    let late = registry.images.pop().unwrap();
    let streamd = Streamd::start_unswept(&registry, 1 << 30);
    let others = vec![late.digest()];
    assert_eq!(streamd.control.control(&ControlRequest::Sweep { others }, &[]), ControlReply::Done);
    assert_eq!(streamd.figures().used_bytes, 2 << 20);
    registry.images.push(late);
    assert_eq!(streamd.serve(&registry, 1, Fill::Nothing), ControlReply::Done);
    assert_eq!((streamd.figures().used_bytes, streamd.image(&registry, 1).present_bytes), (2 << 20, 1 << 20));
}

#[test]
fn a_folder_that_is_broken_holds_up_no_other() {
    let registry = Registry::new(&[1, 2, 3]);
    let streamd = Streamd::start(&registry, 2 << 20);
    let open = |n: usize| Client::open(&streamd.socket, &registry.images[n].root);
    for n in [0, 1] {
        assert!(matches!(open(n).get(0), Got::Resident));
    }
    // The one that was used longest ago.
    let folder = registry.images[0].digest().replace("sha256:", "");
    fs::remove_dir_all(registry.cache().join(folder)).unwrap();
    let mut third = open(2);
    assert!(matches!(third.get(0), Got::Resident) && third.read(0) == registry.images[2].chunk(0));
    assert_eq!(streamd.figures().evicted_chunks, 1);
}

/// A file system of a few chunks.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn new(at: &Path) -> Option<SmallDisk> {
        let mount = Command::new("mount").args(["-t", "tmpfs", "-o", "size=6m", "none"]).arg(at).status();
        if !mount.unwrap().success() {
            spillway_testkit::skip("mounting a file system is not allowed here");
            return None;
        }
        Some(SmallDisk(at.into()))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn a_full_file_system_passes_chunks_and_its_count_is_right() {
    let registry = Registry::new(&[1, 2]);
    let Some(_disk) = SmallDisk::new(&registry.cache()) else { return };
    let streamd = Streamd::start(&registry, 1 << 30);
    let mut client = Client::open(&streamd.socket, &registry.images[0].root);
    let mut kept = 0;
    for chunk in 0..CHUNKS {
        match client.get(chunk) {
            Got::Resident => kept += u64::from(client.read(chunk) == registry.images[0].chunk(chunk)),
            Got::Passed(bytes) => assert!(bytes == registry.images[0].chunk(chunk)),
            Got::Damaged => panic!("{chunk}"),
        }
    }
    let zeroes = u64::from(registry.images[0].zero_chunks());
    let figures = streamd.figures();
    assert!(figures.passed_chunks > 0 && kept > zeroes, "{figures:?}");
    // Space is given out in blocks.
    let surplus = figures.used_bytes - streamd.image(&registry, 0).present_bytes;
    assert!(surplus < 4096, "{figures:?}");
    // Another image takes the space of one that nobody uses.
    drop(client);
    let mut client = Client::open(&streamd.socket, &registry.images[1].root);
    until("its chunks are kept", || {
        matches!(client.get(0), Got::Resident) && client.read(0) == registry.images[1].chunk(0)
    });
    assert!(streamd.figures().evicted_chunks > 0);
}
