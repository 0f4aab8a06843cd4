//! What must never happen: a wrong byte, whatever a store, another host or a file of the cache gives, and whenever the process
//! with the cache is killed.

use super::Bench;
use super::host::{Disk, Host, HostSettings, IMAGE};
use super::report::Figures;
use super::site::far;
use anyhow::{Context, Result, anyhow, ensure};
use rustix::process::{Pid, Signal, kill_process};
use spillway_testkit::store_proxy::{StoreFault, StoreModel};
use spillway_testkit::{Ask, Rng};
use std::collections::VecDeque;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Faults of each kind of source.
const STORE_FAULTS: u64 = 10_000;
const CACHE_FAULTS: u64 = 2_000;
const KILLS: usize = 200;
/// A second image, and the time for which each of them is used.
const OTHER: &str = "debian-other";
const TURN: Duration = Duration::from_millis(1500);
/// Requests in flight.
const DEPTH: usize = 64;

/// What became of reads.
#[derive(Default)]
struct Outcome {
    /// They had a byte that is not the image's.
    wrong: u64,
    /// They failed.
    failed: u64,
}

impl Outcome {
    fn add(&mut self, other: Outcome) {
        self.wrong += other.wrong;
        self.failed += other.failed;
    }
}

/// The row S8.
pub fn wrong_bytes(bench: &Bench, figures: &mut Figures) -> Result<()> {
    let share = if bench.options.quick { 10 } else { 1 };
    let mut outcome = Outcome::default();
    let of_store = wrong_store(bench, STORE_FAULTS / share, &mut outcome)?;
    figures.add("S8/store", "wrong and cut bodies of the store, and other faults of it", "", of_store as f64);
    figures.add(
        "S8/failed",
        "reads that failed because the store had no right bytes",
        "",
        outcome.failed as f64,
    );
    bench.site.store.set_model(StoreModel::default())?;
    let of_store_failed = outcome.failed;
    let wrong_peers = wrong_peers(bench, &mut outcome)?;
    figures.add("S8/peers", "hosts that sent a wrong chunk, and were asked no more", "", wrong_peers as f64);
    let of_files = wrong_files(bench, CACHE_FAULTS / share, &mut outcome)?;
    ensure!(outcome.failed == of_store_failed, "reads failed although the store had the right bytes");
    bench.site.store.set_model(far())?;
    figures.add(
        "S8/files",
        "chunks with a wrong bit in the file of a cache, found by a read and brought again",
        "",
        of_files as f64,
    );
    figures.add("S8/faults", "all of these", "", (of_store + wrong_peers + of_files) as f64);
    figures.add("S8/wrong", "reads of disks that had a wrong byte", "", outcome.wrong as f64);
    Ok(())
}

/// A store that is wrong nearly always.
fn wrong_store(bench: &Bench, wanted: u64, outcome: &mut Outcome) -> Result<u64> {
    let content = File::open(&bench.disk)?;
    let store = &bench.site.store;
    let mut faults = 0;
    while faults < wanted {
        let host = Host::new(&bench.site, HostSettings::default())?;
        host.import(IMAGE, "lazy")?;
        store.clear_figures();
        store.set_model(broken())?;
        let mend = || {
            if store.figures().total_faults() + faults >= wanted {
                let _ = store.set_model(StoreModel::default());
            }
        };
        outcome.add(read_all(&mut host.disk(IMAGE, "disk")?, &bench.data, &content, mend)?);
        store.set_model(StoreModel::default())?;
        faults += store.figures().total_faults();
    }
    Ok(faults)
}

/// Three hosts, of which each asks those before it, whose files were changed. Returns how often one was found to be wrong.
fn wrong_peers(bench: &Bench, outcome: &mut Outcome) -> Result<u64> {
    let content = File::open(&bench.disk)?;
    let host = |number| Host::new(&bench.site, HostSettings { number, peers: 3, ..HostSettings::default() });
    let hosts = (0..3).map(host).collect::<Result<Vec<_>>>()?;
    hosts.iter().try_for_each(|host| host.import(IMAGE, "lazy").map(drop))?;
    let mut random = Rng::new(8);
    for host in &hosts {
        outcome.add(read_all(&mut host.disk(IMAGE, "disk")?, &bench.data, &content, || ())?);
        // The next one finds out, and goes on with another source.
        damage(&host.cache(), &bench.data, &mut random)?;
    }
    let found = hosts.iter().map(|host| host.brought("wrong_peers")).sum::<Result<u64>>()?;
    ensure!(found > 0, "no host was found to be wrong");
    Ok(found)
}

/// The file of a cache that was changed while its process was ended. Returns how many chunks were found to be wrong.
fn wrong_files(bench: &Bench, wanted: u64, outcome: &mut Outcome) -> Result<u64> {
    let content = File::open(&bench.disk)?;
    let mut read = |host: &Host| -> Result<()> {
        outcome.add(read_all(&mut host.disk(IMAGE, "disk")?, &bench.data, &content, || ())?);
        Ok(())
    };
    let host = Host::new(&bench.site, HostSettings::default())?;
    host.import(IMAGE, "lazy")?;
    read(&host)?;
    let (mut found, mut random) = (0, Rng::new(80));
    while found < wanted {
        kill(&host)?;
        damage(&host.cache(), &bench.data, &mut random)?;
        wait_for_another(&host)?;
        read(&host)?;
        // Everything was there: the new process brings only what is wrong.
        let brought = host.brought("store_chunks")?;
        ensure!(brought > 0, "no chunk was found to be wrong");
        found += brought;
    }
    Ok(found)
}

/// The row S9: a cache that is too small for two images, of which a disk uses one at a time: chunks of the other are removed.
pub fn kills(bench: &Bench, figures: &mut Figures) -> Result<()> {
    let cache_bytes = (bench.data.len() as u64 / 4) << 20;
    let host = Host::new(&bench.site, HostSettings { cache_bytes, ..HostSettings::default() })?;
    let other = bench.publish_other(OTHER)?;
    let images = [(IMAGE, File::open(&bench.disk)?), (OTHER, File::open(&other)?)];
    images.iter().try_for_each(|(image, _)| host.import(image, "lazy").map(drop))?;
    let wanted = if bench.options.quick { KILLS / 10 } else { KILLS };
    let (ends, over, most) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let (cache, data) = (host.cache(), &bench.data);
    let (killed, (waits, wrong)) = std::thread::scope(|scope| {
        let reader = scope.spawn(|| read_until(&host, &images, data, &ends));
        let watcher = scope.spawn(|| watch(&cache, cache_bytes, &ends, &over, &most));
        let mut random = Rng::new(9);
        let killed = (0..wanted).try_fold((0, 0), |(killed, removed), _| -> Result<(usize, u64)> {
            std::thread::sleep(Duration::from_millis(300 + random.below(700)));
            // A process that has just begun does not answer yet, and has removed little.
            let removed = removed + host.brought("evicted_chunks").unwrap_or(0);
            Ok((killed + kill(&host)?, removed))
        });
        ends.store(true, Ordering::Relaxed);
        watcher.join().map_err(|_| anyhow!("the watcher panicked"))?;
        let read = reader.join().map_err(|_| anyhow!("the reader panicked"))?;
        anyhow::Ok((killed?, read?))
    })?;
    let (killed, removed) = killed;
    let mut waits = waits;
    waits.sort_by(f64::total_cmp);
    let at =
        |share: f64| waits.get((waits.len() as f64 * share) as usize).copied().context("nothing was read");
    figures.add("S9/kills", "times that spillway-streamd was killed", "", killed as f64);
    figures.add(
        "S9/removed",
        "chunks that were removed meanwhile to make space, at least",
        "",
        removed as f64,
    );
    figures.add("S9/reads", "reads of chunks meanwhile, one at a time", "", waits.len() as f64);
    figures.add("S9/p50", "a read: p50", "ms", at(0.5)? * 1e3);
    // Of the longest wait after each kill, the 99th of 100: there are as many long waits as kills at most.
    let longest = &waits[waits.len().saturating_sub(wanted)..];
    let pause = longest.get((longest.len() as f64 * 0.99) as usize).copied().context("nothing was read")?;
    figures.add("S9/pause", "the longest wait after a kill: p99", "s", pause);
    figures.add("S9/wrong", "reads that had a wrong byte or failed", "", wrong as f64);
    figures.add(
        "S9/most",
        "most bytes in the cache, of its budget",
        "%",
        most.into_inner() as f64 * 1e2 / cache_bytes as f64,
    );
    figures.add("S9/over", "times that it was over its budget", "", over.into_inner() as f64);
    Ok(())
}

/// All faults of bodies, and others.
fn broken() -> StoreModel {
    let chances = [
        (StoreFault::FlippedBit, 0.3),
        (StoreFault::OtherObject, 0.3),
        (StoreFault::CutBody, 0.25),
        (StoreFault::Reset, 0.05),
        (StoreFault::Status503, 0.04),
    ];
    StoreModel { faults: chances.into(), at: "/chunks/".into(), ..StoreModel::default() }
}

/// Reads these chunks whole, many at a time; those that fail, because a store had no right bytes for them, again. After each read
/// `each` is called.
fn read_all(disk: &mut Disk, chunks: &[u64], content: &File, each: impl Fn()) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let mut expected = vec![0; 1 << 20];
    let (mut waiting, mut asked) = (VecDeque::from(chunks.to_vec()), VecDeque::new());
    loop {
        while asked.len() < DEPTH
            && let Some(chunk) = waiting.pop_front()
        {
            let ask = Ask::Read { offset: chunk << 20, len: 1 << 20 };
            asked.push_back((chunk, disk.driver.start(ask, |_| {})?));
        }
        let Some((chunk, buffer)) = asked.pop_front() else { return Ok(outcome) };
        content.read_exact_at(&mut expected, chunk << 20)?;
        let mut is_right = false;
        match disk.driver.finish(buffer, |got| is_right = got[..expected.len()] == expected[..])? {
            0 => outcome.wrong += u64::from(!is_right),
            _ => {
                outcome.failed += 1;
                waiting.push_back(chunk);
            }
        }
        each();
    }
}

/// Reads and compares chunks in any order until it is told to end, of one image after the other. Seconds of each read, and how many
/// were wrong.
fn read_until(
    host: &Host,
    images: &[(&str, File)],
    chunks: &[u64],
    ends: &AtomicBool,
) -> Result<(Vec<f64>, u64)> {
    let mut random = Rng::new(90);
    let (mut waits, mut wrong) = (Vec::new(), 0);
    let (mut got, mut expected) = (vec![0; 64 << 10], vec![0; 64 << 10]);
    for (image, content) in images.iter().cycle() {
        let mut disk = start(host, image)?;
        let until = Instant::now() + TURN;
        while Instant::now() < until {
            if ends.load(Ordering::Relaxed) {
                return Ok((waits, wrong));
            }
            let chunk = chunks[random.below(chunks.len() as u64) as usize];
            let offset = (chunk << 20) + (random.below(16) << 16);
            let begun = Instant::now();
            let read = disk.driver.read_at(offset, &mut got);
            waits.push(begun.elapsed().as_secs_f64());
            content.read_exact_at(&mut expected, offset)?;
            wrong += u64::from(read.is_err() || got != expected);
        }
    }
    Ok((waits, wrong))
}

/// Starts a disk, again if the process that it needs has just been killed.
fn start(host: &Host, image: &str) -> Result<Disk> {
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        match host.disk(image, "disk") {
            Err(_) if Instant::now() < until => std::thread::sleep(Duration::from_millis(20)),
            started => return started,
        }
    }
}

/// Looks how much is in the cache's folder, again and again.
fn watch(cache: &Path, budget: u64, ends: &AtomicBool, over: &AtomicU64, most: &AtomicU64) {
    while !ends.load(Ordering::Relaxed) {
        let used: u64 = disks_in(cache)
            .iter()
            .filter_map(|file| file.metadata().ok())
            .map(|meta| meta.blocks() * 512)
            .sum();
        over.fetch_add(u64::from(used > budget), Ordering::Relaxed);
        most.fetch_max(used, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn disks_in(cache: &Path) -> Vec<PathBuf> {
    let images = fs::read_dir(cache).into_iter().flatten().flatten();
    images.map(|image| image.path().join("disk.raw")).filter(|file| file.is_file()).collect()
}

/// Changes one bit of each of these chunks.
fn damage(cache: &Path, chunks: &[u64], random: &mut Rng) -> Result<()> {
    let files = disks_in(cache);
    ensure!(files.len() == 1, "files of images in the cache: {files:?}");
    let file = File::options().read(true).write(true).open(&files[0])?;
    for chunk in chunks {
        let at = (chunk << 20) + random.below(1 << 20);
        let mut byte = [0];
        file.read_exact_at(&mut byte, at)?;
        file.write_all_at(&[byte[0] ^ 1 << random.below(8)], at)?;
    }
    Ok(())
}

/// Kills the process with the cache. Returns how many there were: none, if it has not been started again yet.
fn kill(host: &Host) -> Result<usize> {
    let mut killed = 0;
    for pid in host.streamd_pids() {
        let pid = Pid::from_raw(pid as i32).context("a process has no id")?;
        killed += usize::from(kill_process(pid, Signal::KILL).is_ok());
    }
    Ok(killed)
}

fn wait_for_another(host: &Host) -> Result<()> {
    let there = spillway_testkit::process::wait_until(Duration::from_secs(30), || {
        (host.cached(IMAGE).ok()?["chunks"].as_u64()? > 0).then_some(())
    });
    there.context("spillway-streamd was not started again")
}
