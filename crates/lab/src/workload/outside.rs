//! The engine `host`: fio's loads by the lab's own generator through vhost-user, since fio has no engine for that.
//!
//! A worker is a queue, whose requests always take the same one. What fio keeps for each worker is kept for all of them here: one
//! generator draws, and a request that follows another follows the last one of any worker. Invariant: all disks are under
//! load for the same time.

use super::fio::{FioFigures, FioRun, runs};
use super::settings::Fio;
use super::stage::{Stage, WorkDisk, WorkResult};
use anyhow::{Context, Result, bail, ensure};
use spillway_testkit::driver::{Driver, Shape};
use spillway_testkit::load::{End, Load, Measured};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Bytes of a request that fills.
const FILL_BYTES: usize = 1 << 20;

/// Runs the loads from the host.
pub fn run(fio: &Fio, stage: &Stage<'_>) -> Result<WorkResult> {
    let sockets: Vec<&PathBuf> = stage
        .disks
        .iter()
        .map(|disk| match disk {
            WorkDisk::Served { vhost } => Ok(vhost),
            WorkDisk::Null { .. } => bail!("a null disk is a machine's: engine 'guest'"),
        })
        .collect::<Result<_>>()?;
    let all = runs(fio);
    let span = |size_mb: u32| u64::from(size_mb) << 20;
    let left = || stage.deadline.saturating_duration_since(Instant::now());
    if let (true, Some(size_mb)) = (fio.fill, all.iter().map(|run| run.size_mb).max()) {
        let fill = Load { seed: stage.seed, ..Load::fill(span(size_mb), FILL_BYTES) };
        let shape = Shape { queues: 1, depth: fill.depth, request_bytes: FILL_BYTES, deadline: left() };
        at_once(&sockets, |socket| Driver::connect_with(socket, shape)?.run(&fill))?;
    }
    let mut done = WorkResult::default();
    stage.watch.begin();
    let begun = Instant::now();
    for run in all {
        let time = Duration::from_secs(fio.seconds.into());
        ensure!(left() > time, "'{}' would take {time:?}, and {:?} are left", run.name(), left());
        let load = load(&run, time, stage.seed);
        let shape = Shape {
            queues: run.profile.workers as usize,
            depth: load.depth,
            request_bytes: load.request_bytes,
            deadline: left(),
        };
        let begin = Instant::now();
        let measured = at_once(&sockets, |socket| Driver::connect_with(socket, shape)?.run(&load))?;
        let path = stage.dir.join(format!("fio-{}.json", run.name()));
        std::fs::write(&path, serde_json::to_string(&(load, &measured))?)
            .with_context(|| format!("{}: cannot write", path.display()))?;
        let found: Vec<FioFigures> =
            measured.iter().map(|m| FioFigures::from_measured(m, load.request_bytes)).collect();
        FioFigures::add_figures(&found, &run.name(), (begin - begun).as_secs_f64(), &mut done.figures);
    }
    Ok(done)
}

fn load(run: &FioRun, time: Duration, seed: u64) -> Load {
    Load {
        request_bytes: run.profile.request_kib as usize * 1024,
        write_share: f64::from(run.profile.write_percent) / 100.0,
        discard_share: 0.0,
        random_share: f64::from(run.profile.random_percent) / 100.0,
        start_bytes: 0,
        span_bytes: u64::from(run.size_mb) << 20,
        depth: (run.profile.workers * run.profile.depth) as usize,
        end: End::After(time),
        seed,
        skew: None,
    }
}

/// The same with each disk, all at the same time.
fn at_once(sockets: &[&PathBuf], one: impl Fn(&Path) -> Result<Measured> + Sync) -> Result<Vec<Measured>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = sockets.iter().map(|socket| scope.spawn(|| one(socket))).collect();
        let ended = threads.into_iter().enumerate().map(|(i, thread)| match thread.join() {
            Ok(measured) => measured.with_context(|| format!("machine {i}")),
            Err(_) => bail!("machine {i}: its thread has panicked"),
        });
        ended.collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::fio::PROFILES;

    #[test]
    fn every_profile_fits_a_connection() {
        for profile in PROFILES {
            let run = FioRun { profile, size_mb: profile.size_mb, buffered: false };
            let load = load(&run, Duration::from_secs(1), 1);
            assert!(load.depth <= 256 && profile.workers <= 16, "{}", profile.name);
            assert!(load.span_bytes.is_multiple_of(load.request_bytes as u64), "{}", profile.name);
        }
    }
}
