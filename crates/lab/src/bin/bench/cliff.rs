//! The cliff: one load over working sets from half the RAM tier to four times as much.
//!
//! Owns the order of the measurement: for each working set fresh disks, each written over and run until it is steady,
//! then measured in turn, beginning with another disk in each round. Invariant: the three figures at one working set
//! were taken in the same minutes, and nothing that an earlier working set left is under any of them.

use crate::bound::flowing;
use crate::cliff_report::{Cliff, DiskPoint, WorkingSet, losses};
use crate::environment::{Environment, order};
use crate::targets::{Serving, Target};
use crate::{Options, peers, warm_up};
use anyhow::Result;
use serde::Serialize;
use spillway_testkit::process::storage_bytes;
use spillway_testkit::{End, Load};
use std::time::Duration;

/// Working sets, in hundredths of the RAM tier.
const WORKING_SETS: [u64; 10] = [50, 75, 90, 100, 125, 150, 200, 250, 300, 400];
/// The same when it has to be quick.
const FEW_WORKING_SETS: [u64; 5] = [50, 100, 150, 250, 400];
/// The overflow's limit, in RAM tiers.
const OVERFLOW_TIERS: u64 = 8;

/// The disks of the cliff.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Contender {
    /// Mode `ram+overflow`.
    Spillway,
    /// QEMU's overlay on the same disk, past the page cache.
    Qcow2Disk,
    /// QEMU's overlay on tmpfs, which has no bound.
    Qcow2Tmpfs,
}

impl Contender {
    /// All, in the order of the chart.
    pub const ALL: [Contender; 3] = [Contender::Spillway, Contender::Qcow2Disk, Contender::Qcow2Tmpfs];

    /// The name in table and chart.
    pub fn name(self) -> &'static str {
        match self {
            Contender::Spillway => "spillway, ram+overflow",
            Contender::Qcow2Disk => "qcow2 on the same disk, O_DIRECT",
            Contender::Qcow2Tmpfs => "qcow2 on tmpfs (all of it in RAM)",
        }
    }

    fn serving(self, ram_bytes: u64) -> Serving {
        match self {
            Contender::Spillway => {
                Serving::Spillway { ram_bytes, overflow_bytes: ram_bytes * OVERFLOW_TIERS }
            }
            Contender::Qcow2Disk => Serving::Qcow2Disk,
            Contender::Qcow2Tmpfs => Serving::Qcow2Tmpfs,
        }
    }
}

fn ram_bytes(options: &Options) -> u64 {
    if options.quick { 256 << 20 } else { 1 << 30 }
}

/// What the overlay on tmpfs takes at most, its tables included.
pub fn tmpfs_bytes(options: &Options) -> u64 {
    ram_bytes(options) * 5
}

/// Measures all of it.
pub fn measure(options: &Options, environment: &Environment) -> Result<Cliff> {
    let seconds = options.seconds(20.0, 1.0);
    let ram_bytes = ram_bytes(options);
    let sizes: &[u64] = if options.quick { &FEW_WORKING_SETS } else { &WORKING_SETS };
    let end = End::After(Duration::from_secs_f64(seconds));
    let load = Load::seed_004(peers::DEPTH, end);
    let mut working_sets = Vec::new();
    for hundredths in sizes {
        let bytes = ram_bytes * hundredths / 100 / (1 << 20) * (1 << 20);
        let load = Load { span_bytes: bytes, ..load };
        working_sets.push(working_set(options, environment, load, ram_bytes)?);
    }
    let overflow_bytes = ram_bytes * OVERFLOW_TIERS;
    let origin = environment.origin.clone();
    let rounds = options.rounds();
    let losses = losses(&working_sets);
    Ok(Cliff { schema: 1, origin, seconds, rounds, ram_bytes, overflow_bytes, load, working_sets, losses })
}

fn working_set(
    options: &Options,
    environment: &Environment,
    load: Load,
    ram_bytes: u64,
) -> Result<WorkingSet> {
    let tiers = load.span_bytes as f64 / ram_bytes as f64;
    let mut disks = Vec::new();
    let mut points = Vec::new();
    for contender in Contender::ALL {
        let mut disk = Target::start(contender.serving(ram_bytes), load.span_bytes, environment)?;
        let settled = disk.settle(load, options.patience(load_seconds(&load)))?;
        points.push(DiskPoint {
            disk: contender,
            command: environment.command(&disk.server),
            settled,
            runs: vec![],
            write_amplification: vec![],
            flows: vec![],
        });
        disks.push(disk);
    }
    let before = environment.host_latency()?;
    for round in 0..options.rounds() {
        for i in order(&[(); Contender::ALL.len()], round) {
            let load = Load { seed: load.seed + round as u64 * 1000, ..load };
            take(&mut disks[i], &mut points[i], load)?;
        }
        let rates: Vec<String> =
            points.iter().filter_map(|p| Some(format!("{:.0}", p.runs.last()?.iops))).collect();
        eprintln!(
            "bench: working set {tiers:.2} x RAM, round {}/{}: {} requests/s",
            round + 1,
            options.rounds(),
            rates.join(" / ")
        );
    }
    let after = environment.host_latency()?;
    Ok(WorkingSet { tiers, bytes: load.span_bytes, before, after, disks: points })
}

/// Measures one disk once.
fn take(disk: &mut Target, point: &mut DiskPoint, load: Load) -> Result<()> {
    disk.warm(load, warm_up(load_seconds(&load)))?;
    let pid = disk.server.pid();
    let measured = match point.disk {
        Contender::Spillway => {
            let (measured, flow) = flowing(disk, &load)?;
            point.write_amplification.push(flow.write_amplification());
            point.flows.push(flow);
            measured
        }
        // The overlay is all that this process writes to a disk.
        Contender::Qcow2Disk => {
            let before = storage_bytes(pid);
            let measured = disk.run(&load)?;
            if let (Some((_, from)), Some((_, to))) = (before, storage_bytes(pid)) {
                let asked = (measured.requests - measured.reads) * load.request_bytes as u64;
                point.write_amplification.push((to - from) as f64 / asked.max(1) as f64);
            }
            measured
        }
        // Nothing of it reaches a disk.
        Contender::Qcow2Tmpfs => disk.run(&load)?,
    };
    point.runs.push(measured);
    Ok(())
}

fn load_seconds(load: &Load) -> f64 {
    match load.end {
        End::After(time) => time.as_secs_f64(),
        End::Count(_) => 0.0,
    }
}
