//! The physical bound of an overfull disk: what the bare disk's random reads allow it at most.
//!
//! Of the requests, a share has to read the overflow; no disk can answer more requests a second than its storage
//! gives random reads, beside the writer that eviction is, divided by that share. Owns that measurement. Invariant: the
//! rate, the share and the eviction of a round are of one run, and the bare disk is measured right after it.

use crate::environment::Environment;
use crate::report::{rate, time};
use crate::targets::{Kind, Serving, Target};
use crate::{Options, peers, warm_up};
use anyhow::{Context, Result, ensure};
use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;
use spillway_lab::probe::{Probe, Probed};
use spillway_testkit::cores::median;
use spillway_testkit::steady::Settled;
use spillway_testkit::{Flow, Load, Measured};

/// The bound, as it is kept.
#[derive(Serialize)]
pub struct Bound {
    /// Which disk.
    pub kind: Kind,
    /// What was asked of it.
    pub load: Load,
    /// Spillway and the bare disk in turn.
    pub rounds: Vec<BoundRound>,
}

/// One round.
#[derive(Serialize)]
pub struct BoundRound {
    /// How the disk settled before.
    pub settled: Settled,
    /// Spillway under the load.
    pub measured: Measured,
    /// Where its requests went.
    pub flow: Flow,
    /// Bytes a second that left the RAM tier: what the bare disk's writer writes.
    pub evicted_bytes_per_second: f64,
    /// Share of the guest's requests that read the overflow.
    pub overflow_read_share: f64,
    /// The bare disk.
    pub disk: Probed,
    /// Requests a second that it allows.
    pub bound_iops: f64,
    /// Spillway's rate against that.
    pub ratio: f64,
}

impl Bound {
    /// The middle round's share of the bound.
    pub fn ratio(&self) -> f64 {
        self.middle(|r| r.ratio)
    }

    /// The middle of something over the rounds.
    pub fn middle(&self, of: impl Fn(&BoundRound) -> f64) -> f64 {
        median(&mut self.rounds.iter().map(of).collect::<Vec<_>>())
    }
}

impl Bound {
    /// Prints it for people.
    pub fn print(&self) {
        println!(
            "\nThe disk's bound on that load at QD{}: its random reads beside a writer as fast as eviction, by the share of requests that read the overflow",
            self.load.depth
        );
        let mut table = Table::new();
        table.load_preset(presets::ASCII_MARKDOWN);
        table.set_header([
            "round",
            "evicted",
            "disk's reads/s",
            "beside",
            "share",
            "bound",
            "spillway",
            "p99",
            "spillway / bound",
        ]);
        for (i, r) in self.rounds.iter().enumerate() {
            table.add_row([
                (i + 1).to_string(),
                megabytes(r.evicted_bytes_per_second),
                rate(r.disk.read_iops),
                megabytes(r.disk.write_bytes_per_second),
                format!("{:.1}%", r.overflow_read_share * 100.0),
                rate(r.bound_iops),
                rate(r.measured.iops),
                time(r.measured.p99_ns as f64),
                format!("{:.2}", r.ratio),
            ]);
        }
        for column in table.column_iter_mut() {
            column.set_cell_alignment(CellAlignment::Right);
        }
        println!("{table}");
        let slow = self.rounds.iter().filter(|r| !r.disk.writer_kept_up()).count();
        if slow > 0 {
            println!(
                "The writer fell behind in {slow} of these rounds: reads had more of the disk, and the bound is too high"
            );
        }
        println!("Spillway / bound: {:.2}", self.ratio());
    }
}

fn megabytes(bytes_per_second: f64) -> String {
    format!("{:.0} MB/s", bytes_per_second / 1e6)
}

/// Measures it. No other disk may be up: overflow and bare file take the space in turn.
pub fn measure(options: &Options, environment: &Environment, seconds: f64) -> Result<Bound> {
    let kind = Kind::SpillwayTight;
    let Serving::Spillway { overflow_bytes, .. } = kind.serving() else {
        anyhow::bail!("{} has no overflow", kind.name());
    };
    let load = peers::overfull(peers::DEPTH, seconds);
    let mut rounds = Vec::new();
    for round in 0..options.rounds() {
        let load = Load { seed: load.seed + round as u64 * 1000, ..load };
        let (settled, measured, flow) = {
            let mut target = Target::start(kind.serving(), load.span_bytes, environment)?;
            let settled = target.settle(load, options.patience(seconds))?;
            target.warm(load, warm_up(seconds))?;
            let (measured, flow) = flowing(&mut target, &load)?;
            (settled, measured, flow)
        };
        let evicted_bytes_per_second = flow.evicted_bytes as f64 / measured.seconds;
        let overflow_read_share = flow.overflow_read_share(load.request_bytes);
        ensure!(overflow_read_share > 0.0, "no request read the overflow: {flow:?}");
        let disk = Probe {
            dir: environment.disk(),
            file_bytes: overflow_bytes,
            depth: load.depth,
            write_bytes_per_second: evicted_bytes_per_second as u64,
            seconds,
            cores: environment.cores,
        }
        .run()?;
        let bound_iops = disk.read_iops / overflow_read_share;
        let ratio = measured.iops / bound_iops;
        eprintln!(
            "bench: round {}, the disk's bound: {bound_iops:.0} requests/s, Spillway / bound {ratio:.2}",
            round + 1
        );
        rounds.push(BoundRound {
            settled,
            measured,
            flow,
            evicted_bytes_per_second,
            overflow_read_share,
            disk,
            bound_iops,
            ratio,
        });
    }
    Ok(Bound { kind, load, rounds })
}

/// Runs a load on a disk of ours, and says where its requests went.
pub fn flowing(target: &mut Target, load: &Load) -> Result<(Measured, Flow)> {
    let before = target.stats()?.context("this disk has no counters")?;
    let measured = target.run(load)?;
    let after = target.stats()?.context("this disk has no counters")?;
    Ok((measured, Flow::between(&before, &after)?))
}
