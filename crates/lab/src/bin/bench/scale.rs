//! Scale: what a disk costs as it grows from 4 GiB to 4 TiB, in time and in memory.
//!
//! Owns the order of the measurement: in each round a fresh disk of each size lives its whole life, beginning with
//! another size in each round. Invariant: all sizes get the same requests, as many and as far apart as they fit, so
//! that what differs is the size alone.

use crate::Options;
use crate::environment::{Environment, order};
use crate::scale_report::{Life, Memory, Scale, Size};
use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use spillway_testkit::disk::figure;
use spillway_testkit::footprint::{memfd_bytes, proportional_bytes};
use spillway_testkit::process::{wait_closely, wait_until};
use spillway_testkit::{Ask, Disk, Driver, Rng, Shape};
use std::collections::VecDeque;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Sizes of the disks.
const SIZES: [u64; 4] = [4 << 30, 64 << 30, 1 << 40, 4 << 40];
const RAM_BYTES: u64 = 1 << 30;
const OVERFLOW_BYTES: u64 = 8 << 30;
const BLOCK: usize = 4096;
/// Blocks that are written before it counts as used and idle.
const A_LITTLE: u64 = 1024;
const A_LITTLE_SPAN: u64 = 64 << 20;
/// Requests of the light load before the worker is killed and after it, and the span that they go to.
const LIGHT: u64 = 2000;
const LIGHT_SPAN: u64 = 1 << 30;
/// What a disk may hold after a reset beside what it held before the writes: two bytes for each region, its entries in
/// the directories of this generation and the last, and some counters.
const REGION_BYTES: u64 = 2 << 20;
const KEPT_OF_REGION: u64 = 2;
const KEPT_BYTES: u64 = 128 << 10;
/// How long anything may take before the disk counts as hung.
const PATIENCE: Duration = Duration::from_secs(60);

/// Measures all of it.
pub fn measure(options: &Options, environment: &Environment) -> Result<Scale> {
    let written_bytes = if options.quick { RAM_BYTES / 8 } else { RAM_BYTES };
    let mut sizes: Vec<Size> =
        SIZES.iter().map(|&bytes| Size { bytes, command: String::new(), lives: vec![] }).collect();
    for round in 0..options.rounds() {
        for i in order(&[(); SIZES.len()], round) {
            let size = &mut sizes[i];
            let (command, life) = live(environment, size.bytes, written_bytes)
                .with_context(|| format!("a disk of {} GiB", size.bytes >> 30))?;
            eprintln!(
                "bench: round {}/{}, {} GiB: reset acknowledged after {:.1} ms",
                round + 1,
                options.rounds(),
                size.bytes >> 30,
                life.reset_ms
            );
            size.command = command;
            size.lives.push(life);
        }
    }
    let origin = environment.origin.clone();
    Ok(Scale::new(origin, [RAM_BYTES, OVERFLOW_BYTES, written_bytes], sizes))
}

/// The life of one disk, and how it was started.
fn live(environment: &Environment, size_bytes: u64, written_bytes: u64) -> Result<(String, Life)> {
    let files = tempfile::Builder::new().prefix("disk.").tempdir_in(environment.disk())?;
    let base = files.path().join("base.raw");
    std::fs::File::create(&base)?.set_len(size_bytes)?;
    let mib = |bytes: u64| format!("{}M", bytes >> 20);
    let (ram, overflow) = (mib(RAM_BYTES), mib(OVERFLOW_BYTES));
    let options = ["--ram", &ram, "--overflow", &overflow];

    let begin = Instant::now();
    let disk = Disk::start_with(&environment.spillway, files.path(), &base, &options)?;
    let ready_ms = milliseconds(begin);
    let ready = memory(&disk)?;

    let shape = Shape { depth: 16, request_bytes: BLOCK, ..Shape::default() };
    let mut driver = Driver::connect_with(&disk.vhost(), shape)?;
    scatter(&mut driver, A_LITTLE_SPAN, A_LITTLE)?;
    comes_to_rest(&disk)?;
    let idle = memory(&disk)?;

    let begin = Instant::now();
    scatter(&mut driver, size_bytes, written_bytes / BLOCK as u64)?;
    let write_seconds = begin.elapsed().as_secs_f64();
    comes_to_rest(&disk)?;
    let written = memory(&disk)?;
    let map_bytes = disk.figure("map.bytes")?;

    let mut rng = Rng::new(size_bytes);
    let undisturbed_ms = longest_ms(&mut driver, &mut rng)?;
    let worker = Pid::from_raw(disk.worker()?.try_into()?).context("a process id")?;
    kill_process(worker, Signal::KILL).context("cannot kill the worker")?;
    let death_ms = longest_ms(&mut driver, &mut rng)?;
    ensure!(disk.figure("restarts")? == 1, "the worker was to die once");

    drop(driver);
    let alone = wait_until(PATIENCE, || {
        let is_left = disk.figure("clients").ok()? == 0;
        (is_left && !Path::new(&format!("/proc/{}", worker.as_raw_nonzero())).exists()).then_some(())
    });
    alone.context("the VMM or the dead worker stay")?;
    comes_to_rest(&disk)?;
    let begin = Instant::now();
    let mut reset = Command::new(&environment.spillway);
    let status =
        reset.arg("reset").arg(disk.control()).stdin(Stdio::null()).stdout(Stdio::null()).status()?;
    let reset_ms = milliseconds(begin);
    ensure!(status.success(), "spillway reset ended with {status}");
    // The gauges say what the disk holds now, the memfds what the host has not got back yet.
    let kept = idle.meta_bytes + size_bytes / REGION_BYTES * KEPT_OF_REGION + KEPT_BYTES;
    let mut held = 0;
    let back = wait_closely(PATIENCE, || {
        let [slots, meta] =
            ["data", "meta"].map(|n| memfd_bytes(&[disk.supervisor()], &format!("spillway-{n}")));
        held = slots.ok()? + meta.ok()?.saturating_sub(kept);
        (held == 0).then_some(())
    });
    back.with_context(|| format!("{held} bytes of memory do not come back: {:?}", disk.stats()))?;
    let back_ms = milliseconds(begin);
    let after_reset = memory(&disk)?;

    let command = disk.command().replace(&environment.spillway.display().to_string(), "spillway");
    disk.stop()?;
    let life = Life {
        ready_ms,
        ready,
        idle,
        write_seconds,
        written,
        map_bytes,
        undisturbed_ms,
        death_ms,
        reset_ms,
        back_ms,
        after_reset,
    };
    Ok((command, life))
}

fn milliseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

/// What a disk holds now, the content of its RAM tier left out.
fn memory(disk: &Disk) -> Result<Memory> {
    let pids = [disk.supervisor(), disk.worker()?];
    let own_bytes = pids.iter().map(|&pid| proportional_bytes(pid)).sum::<Result<_>>()?;
    Ok(Memory { own_bytes, meta_bytes: memfd_bytes(&pids, "spillway-meta")? })
}

/// Writes so many blocks (a power of two), evenly spread over the span, in an order that jumps about: each in a region
/// of its own as far as there are so many.
fn scatter(driver: &mut Driver, span_bytes: u64, blocks: u64) -> Result<()> {
    let stride = span_bytes / blocks;
    let mut in_flight = VecDeque::new();
    for i in 0..=blocks + driver.depth() as u64 {
        if (i >= blocks || in_flight.len() == driver.depth())
            && let Some(oldest) = in_flight.pop_front()
        {
            let error = driver.finish(oldest, |_| {})?;
            ensure!(error == 0, "a write failed with errno {}", -error);
        }
        if i < blocks {
            // An odd factor visits each number below a power of two once.
            let offset = i.wrapping_mul(0x9e37_79b1) % blocks * stride;
            let write = Ask::Write { offset, len: BLOCK };
            in_flight.push_back(driver.start(write, |content| content.fill(i as u8 | 1))?);
        }
    }
    Ok(())
}

/// Waits until eviction has done what there was to do.
fn comes_to_rest(disk: &Disk) -> Result<()> {
    let mut last = None;
    let rest = wait_until(PATIENCE, || {
        let stats = disk.stats().ok()?;
        let moved = figure(&stats, "evictions.blocks").ok();
        let is_still = moved.is_some() && moved == std::mem::replace(&mut last, moved);
        (is_still && figure(&stats, "inflight").ok()? == 0).then_some(())
    });
    rest.context("eviction does not come to rest")
}

/// The longest of some requests, one at a time, each waited for asleep. Four of five are writes.
fn longest_ms(driver: &mut Driver, rng: &mut Rng) -> Result<f64> {
    let mut longest = 0.0f64;
    for i in 0..LIGHT {
        let offset = rng.below(LIGHT_SPAN / BLOCK as u64) * BLOCK as u64;
        let is_write = rng.below(5) > 0;
        let ask = if is_write { Ask::Write { offset, len: BLOCK } } else { Ask::Read { offset, len: BLOCK } };
        let begin = Instant::now();
        let buffer = driver.start(ask, |content| content.fill(i as u8 | 1))?;
        let error = driver.finish(buffer, |_| {})?;
        ensure!(error == 0, "{ask:?} failed with errno {}", -error);
        longest = longest.max(milliseconds(begin));
    }
    Ok(longest)
}
