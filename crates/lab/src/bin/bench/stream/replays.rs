//! Disks of the bench read what a boot reads, or chunks in any order, without a guest: so many hosts can do it at once on few cores.

use super::Bench;
use super::boots::chunk_gets;
use super::host::{Disk, Host, HostSettings, IMAGE};
use super::report::Figures;
use super::site::MOST_HOSTS;
use anyhow::{Context, Result, anyhow, ensure};
use spillway_testkit::process::cpu_seconds_of;
use spillway_testkit::{End, Load, Rng};
use std::time::{Duration, Instant};

/// Machines on one host.
const DISKS: usize = 20;
/// Chunks that are missed for one figure.
const MISSES: usize = 200;
const REST: Duration = Duration::from_secs(5);
/// Time in which hosts tell each other what they have.
const TOLD: Duration = Duration::from_secs(12);

/// The row S3: what one host reads alone, and eight at once that exchange chunks.
pub fn hosts(bench: &Bench, figures: &mut Figures) -> Result<()> {
    let chunks = bench.boot_set()?;
    let alone = {
        let host = Host::new(&bench.site, HostSettings::default())?;
        host.import(IMAGE, "lazy")?;
        let mut disks = vec![host.disk(IMAGE, "disk")?];
        replay(&mut disks, &chunks)?
    };
    let hosts = (0..MOST_HOSTS)
        .map(|number| {
            Host::new(&bench.site, HostSettings { number, peers: MOST_HOSTS, ..HostSettings::default() })
        })
        .collect::<Result<Vec<_>>>()?;
    hosts.iter().try_for_each(|host| host.import(IMAGE, "lazy").map(drop))?;
    let mut disks = hosts.iter().map(|host| host.disk(IMAGE, "disk")).collect::<Result<Vec<_>>>()?;
    bench.site.store.clear_figures();
    let slowest = replay(&mut disks, &chunks)?;
    figures.add("S3/alone", "one host reads a boot set, one chunk after the other", "s", alone);
    figures.add("S3/slowest", "eight hosts do so at once: the slowest", "s", slowest);
    let gets = chunk_gets(&bench.site.store.figures()) as f64 / bench.distinct(&chunks)? as f64;
    figures.add("S3/gets", "eight hosts at once: GETs for each chunk", "", gets);
    Ok(())
}

/// The row S4: twenty disks of one host read the same at once.
pub fn disks(bench: &Bench, figures: &mut Figures) -> Result<()> {
    let chunks = bench.boot_set()?;
    let host = Host::new(&bench.site, HostSettings::default())?;
    host.import(IMAGE, "lazy")?;
    let mut disks = (0..DISKS).map(|n| host.disk(IMAGE, &format!("disk-{n}"))).collect::<Result<Vec<_>>>()?;
    bench.site.store.clear_figures();
    let slowest = replay(&mut disks, &chunks)?;
    let seen = bench.site.store.figures();
    let most = seen.gets.iter().filter(|(path, _)| path.contains("chunks/")).map(|(_, count)| *count).max();
    let distinct = bench.distinct(&chunks)?;
    ensure!(
        chunk_gets(&seen) >= distinct,
        "the store was asked for {} of {distinct} different chunks of the boot set",
        chunk_gets(&seen)
    );
    figures.add("S4/gets", "20 disks at once: most GETs of one chunk", "", most.unwrap_or(0) as f64);
    figures.add("S4/slowest", "20 disks at once: the slowest", "s", slowest);
    Ok(())
}

/// The row S5: what one read waits for a chunk that is not there.
pub fn misses(bench: &Bench, figures: &mut Figures) -> Result<()> {
    let mut random = Rng::new(5);
    let mut chunks = bench.data.clone();
    (1..chunks.len()).rev().for_each(|n| chunks.swap(n, random.below(n as u64 + 1) as usize));
    ensure!(chunks.len() >= MISSES, "the image has {} chunks of data", chunks.len());
    let few = &chunks[..MISSES];
    {
        let host = Host::new(&bench.site, HostSettings::default())?;
        host.import(IMAGE, "lazy")?;
        let [p50, p99] = touch(&mut host.disk(IMAGE, "disk")?, few)?;
        figures.add("S5/store/p50", "a miss, the store 20 ms and 100 MB/s away: p50", "ms", p50);
        figures.add("S5/store/p99", "the same: p99", "ms", p99);
    }
    let host = |number| Host::new(&bench.site, HostSettings { number, peers: 3, ..HostSettings::default() });
    let hosts = (0..3).map(host).collect::<Result<Vec<_>>>()?;
    hosts.iter().try_for_each(|host| host.import(IMAGE, "lazy").map(drop))?;
    for host in &hosts[..2] {
        touch(&mut host.disk(IMAGE, "disk")?, few)?;
    }
    std::thread::sleep(TOLD);
    bench.site.store.clear_figures();
    let [p50, p99] = touch(&mut hosts[2].disk(IMAGE, "disk")?, few)?;
    figures.add("S5/peer/p50", "a miss that another host has: p50", "ms", p50);
    figures.add("S5/peer/p99", "the same: p99", "ms", p99);
    let gets = chunk_gets(&bench.site.store.figures()) as f64;
    figures.add("S5/peer/gets", "GETs at the store for those", "", gets);
    Ok(())
}

/// The row S6: an image that is all there, beside a file.
pub fn resident(bench: &Bench, figures: &mut Figures) -> Result<()> {
    let host = Host::new(&bench.site, HostSettings::default())?;
    host.import(IMAGE, "full")?;
    host.wait_whole(IMAGE)?;
    let mut streamed = host.disk(IMAGE, "streamed")?;
    let mut local = Disk::start(&bench.site.path("local"), bench.disk.clone(), None)?;
    let seconds = bench.options.seconds(4.0, 1.0);
    let load = Load {
        write_share: 0.0,
        random_share: 1.0,
        span_bytes: 512 << 20,
        ..Load::seed_004(16, End::After(Duration::from_secs_f64(seconds)))
    };
    let rate = |disk: &mut Disk| anyhow::Ok(disk.driver.run(&load)?.iops / 1e3);
    rate(&mut streamed)?;
    rate(&mut local)?;
    // Twice in turn, each once first: what the host does meanwhile meets both.
    let [a, b] = [rate(&mut streamed)?, rate(&mut local)?];
    let [c, d] = [rate(&mut local)?, rate(&mut streamed)?];
    figures.add(
        "S6/streamed",
        "random reads of 4 KiB, 16 at a time, of a streamed image that is here",
        "k/s",
        (a + d) / 2.0,
    );
    figures.add("S6/local", "the same of a local image", "k/s", (b + c) / 2.0);
    drop(local);
    let pids = [streamed.pids(), host.streamd_pids()].concat();
    ensure!(pids.len() >= 3, "the processes of a disk and of the cache: {pids:?}");
    let before = cpu_seconds_of(&pids)?;
    std::thread::sleep(REST);
    let used = (cpu_seconds_of(&pids)? - before) * 1e3;
    figures.add("S6/rest", "processor time of the disk and the cache in 5 s at rest", "ms", used);
    Ok(())
}

/// All disks read these chunks in their order, each at its own pace. Seconds until the slowest is done.
fn replay(disks: &mut [Disk], chunks: &[u64]) -> Result<f64> {
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let read = |disk| {
            scope.spawn(move || {
                let disk: &mut Disk = disk;
                chunks.iter().try_for_each(|chunk| disk.touch(*chunk).map(drop))
            })
        };
        let readers: Vec<_> = disks.iter_mut().map(read).collect();
        readers.into_iter().try_for_each(|reader| reader.join().map_err(|_| anyhow!("a reader panicked"))?)
    })?;
    Ok(begun.elapsed().as_secs_f64())
}

/// Reads of each chunk once: their p50 and p99, in milliseconds.
fn touch(disk: &mut Disk, chunks: &[u64]) -> Result<[f64; 2]> {
    let mut times = chunks.iter().map(|chunk| disk.touch(*chunk)).collect::<Result<Vec<_>>>()?;
    times.sort_by(f64::total_cmp);
    let at = |share: f64| times.get((times.len() as f64 * share) as usize).context("no chunk was read");
    Ok([at(0.5)? * 1e3, at(0.99)? * 1e3])
}
