//! Overhead: what recording, and another program's extra work, cost each request on the data path.
//!
//! Owns the pairs. Two disks live side by side, and the same load runs on one and then the other, beginning with the other in
//! each pair. The load is as much as one thread can ask, so that each nanosecond shows; what it would be at 500,000
//! requests a second follows. The recorder is stopped while it is measured: the ring is written and nobody reads it, so
//! that its own processor time, of which two cores have none to spare, is not counted.

use crate::Options;
use crate::ground::Ground;
use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;
use spillway_lab::cores;
use spillway_lab::{Disk, Driver, End, Load, Shape};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// What a request may take at 500,000 a second.
const BUDGET_NS: f64 = 2000.0;
const SPAN: u64 = 5 << 29;

/// One side of the pairs.
struct Side {
    disk: Disk,
    driver: Driver,
    recorder: Option<Child>,
    /// Nanoseconds a request, of each pair.
    ns: Vec<f64>,
    _files: tempfile::TempDir,
}

impl Side {
    fn new(ground: &Ground, program: &Path, records: bool) -> Result<Side> {
        let files = tempfile::Builder::new().prefix("disk.").tempdir_in(ground.disk())?;
        let base = files.path().join("base.raw");
        std::fs::File::create(&base)?.set_len(SPAN)?;
        let disk = Disk::start_with(program, files.path(), &base, &["--ram", "3G", "--overflow", "4G"])?;
        cores::pin_process(disk.worker()?, ground.serving())?;
        let shape = Shape { depth: 16, request_bytes: 64 << 10, ..Shape::default() };
        let mut driver = Driver::connect_with(&disk.vhost(), shape)?;
        driver.run(&Load::fill(SPAN, 64 << 10))?;
        let mut recorder = None;
        if records {
            let mut command = Command::new(program);
            command.args(["trace", "record", "--out", "-"]).arg(disk.control());
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            let child = command.spawn().context("the recorder")?;
            std::thread::sleep(Duration::from_millis(500));
            let pid = Pid::from_raw(child.id().try_into()?).context("a process id")?;
            kill_process(pid, Signal::STOP).context("the recorder has ended")?;
            recorder = Some(child);
        }
        Ok(Side { disk, driver, recorder, ns: Vec::new(), _files: files })
    }

    fn measure(&mut self, time: Duration) -> Result<()> {
        let load = |time| Load { span_bytes: SPAN, ..Load::seed_004(16, End::After(time)) };
        self.driver.run(&load(time / 6))?;
        let measured = self.driver.run(&load(time))?;
        self.ns.push(1e9 / measured.iops);
        Ok(())
    }

    fn end(mut self) -> Result<()> {
        if let Some(recorder) = &mut self.recorder {
            let ended = recorder.try_wait()?;
            ensure!(ended.is_none(), "the recorder has ended: {ended:?}");
            recorder.kill()?;
            recorder.wait()?;
        }
        drop(self.driver);
        self.disk.stop()
    }
}

/// What the pairs have come to.
#[derive(Serialize)]
pub struct Overhead {
    what: String,
    pairs: usize,
    /// Medians: of each side, and of the differences of the pairs.
    before_ns: f64,
    after_ns: f64,
    added_ns: f64,
    /// The quarter and three quarters of those differences.
    added_quartiles_ns: [f64; 2],
    /// What was added, as a share of what a request may take at 500,000 a second.
    share_at_500k: f64,
    /// The same of the load that was measured, at as many as there can be.
    share_at_most: f64,
}

/// Measures pairs: recording beside not recording; and, with `--against`, this program beside another.
pub fn measure(options: &Options, ground: &Ground) -> Result<Vec<Overhead>> {
    let mut found =
        vec![pairs(options, ground, "recording", (&ground.spillway, false), (&ground.spillway, true))?];
    if let Some(against) = &options.against {
        found.push(pairs(options, ground, "this program", (against, false), (&ground.spillway, false))?);
    }
    Ok(found)
}

fn pairs(
    options: &Options,
    ground: &Ground,
    what: &str,
    before: (&PathBuf, bool),
    after: (&PathBuf, bool),
) -> Result<Overhead> {
    let mut sides = [before, after]
        .map(|(program, records)| Side::new(ground, program, records))
        .into_iter()
        .collect::<Result<Vec<_>>>()?;
    ground.keep_to_core()?;
    let time = Duration::from_secs_f64(options.seconds(1.0, 0.3));
    let pairs = options.rounds.map_or(20, usize::from);
    for pair in 0..pairs {
        for side in [pair % 2, 1 - pair % 2] {
            sides[side].measure(time)?;
        }
    }
    let mut added: Vec<f64> =
        sides[1].ns.iter().zip(&sides[0].ns).map(|(after, before)| after - before).collect();
    let [before_ns, after_ns] = [0, 1].map(|side| quantile(&mut sides[side].ns.clone(), 0.5));
    let added_ns = quantile(&mut added, 0.5);
    let quartiles = [quantile(&mut added, 0.25), quantile(&mut added, 0.75)];
    sides.into_iter().try_for_each(Side::end)?;
    Ok(Overhead {
        what: what.into(),
        pairs,
        before_ns,
        after_ns,
        added_ns,
        added_quartiles_ns: quartiles,
        share_at_500k: added_ns / BUDGET_NS,
        share_at_most: added_ns / before_ns,
    })
}

fn quantile(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(((values.len() - 1) as f64 * share).round() as usize).copied().unwrap_or(f64::NAN)
}

/// For people.
pub fn print(found: &[Overhead]) {
    for one in found {
        println!(
            "{}: {:.1} ns a request before, {:.1} after; {:+.1} ns (quartiles {:+.1}, {:+.1}), {} pairs: {:+.2}% of a request's time at \
             500,000 a second, {:+.2}% at as many as there can be",
            one.what,
            one.before_ns,
            one.after_ns,
            one.added_ns,
            one.added_quartiles_ns[0],
            one.added_quartiles_ns[1],
            one.pairs,
            one.share_at_500k * 100.0,
            one.share_at_most * 100.0
        );
    }
}
