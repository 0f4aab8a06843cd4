//! What the peers' part found, and how it is shown.
//!
//! Invariant: every figure shown is a median of the runs that the JSON file keeps.

use crate::bound::Bound;
use crate::checks::Check;
use crate::environment::{HostLatency, Origin};
use crate::targets::Kind;
use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;
use spillway_testkit::cores::median;
use spillway_testkit::steady::Settled;
use spillway_testkit::{Load, Measured};

/// Everything that was found, as it is kept.
#[derive(Serialize)]
pub struct Report {
    /// Form of this file.
    pub schema: u32,
    /// Where it was found.
    #[serde(flatten)]
    pub origin: Origin,
    /// Seconds measured per point and run.
    pub seconds: f64,
    /// The disks.
    pub targets: Vec<TargetLine>,
    /// The rounds.
    pub rounds: Vec<Round>,
    /// The points.
    pub points: Vec<Point>,
    /// What the bare disk allows; `None` without Spillway.
    pub bound: Option<Bound>,
    /// What was asked for.
    pub checks: Vec<Check>,
}

/// One disk under measurement.
#[derive(Serialize)]
pub struct TargetLine {
    /// What it is.
    pub kind: Kind,
    /// What was chosen for it.
    pub what: &'static str,
    /// How it was started.
    pub command: String,
    /// Processor seconds that its idle process used, of how many.
    pub at_rest: (f64, f64),
    /// Its counters at the end, where it has them.
    pub stats: Option<serde_json::Value>,
}

/// One round over all points.
#[derive(Serialize)]
pub struct Round {
    /// How near cores and memory were before it.
    pub before: HostLatency,
    /// And after it.
    pub after: HostLatency,
}

/// A load over all depths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Name {
    /// The working set fits the RAM tier.
    Fits,
    /// RAM for 40% of it, uniform.
    Tight,
    /// RAM for 40% of it, most requests to some of the blocks.
    Skewed,
}

impl Name {
    const ALL: [Name; 3] = [Name::Fits, Name::Tight, Name::Skewed];

    fn title(self) -> &'static str {
        match self {
            Name::Fits => "Working set in RAM: 4 KiB, 80% write, 90% random, 2.5 GiB",
            Name::Tight => "RAM for 40% of the working set: 4 KiB, 80% write, uniform over 2.5 GiB",
            Name::Skewed => {
                "RAM for 40% of the working set, skewed: 4 KiB, 80% write, 90% of requests to 30% of 2.5 GiB"
            }
        }
    }

    /// What progress calls it.
    pub fn word(self) -> &'static str {
        match self {
            Name::Fits => "fits",
            Name::Tight => "tight",
            Name::Skewed => "skewed",
        }
    }
}

/// One load at one depth on one disk.
#[derive(Serialize)]
pub struct Point {
    /// Which of the loads.
    pub name: Name,
    /// What was asked.
    pub load: Load,
    /// On which disk.
    pub kind: Kind,
    /// How the disk settled before each; nothing where all is in RAM.
    pub settled: Vec<Settled>,
    /// One measurement a round.
    pub runs: Vec<Measured>,
    /// Processor microseconds that the serving process used for a request, one a round.
    pub cpu_us: Vec<f64>,
}

impl Point {
    /// The middle run's requests a second.
    pub fn iops(&self) -> f64 {
        median(&mut self.runs.iter().map(|r| r.iops).collect::<Vec<_>>())
    }

    /// The middle p50.
    pub fn p50_ns(&self) -> f64 {
        median(&mut self.runs.iter().map(|r| r.p50_ns as f64).collect::<Vec<_>>())
    }

    /// The middle p99.
    pub fn p99_ns(&self) -> f64 {
        median(&mut self.runs.iter().map(|r| r.p99_ns as f64).collect::<Vec<_>>())
    }

    fn max_ns(&self) -> f64 {
        self.runs.iter().map(|r| r.max_ns as f64).fold(0.0, f64::max)
    }
}

impl Report {
    /// A point that was measured.
    pub fn point(&self, name: Name, depth: usize, kind: Kind) -> Option<&Point> {
        self.points.iter().find(|p| p.name == name && p.load.depth == depth && p.kind == kind)
    }

    /// Prints everything for people.
    pub fn print(&self) {
        println!();
        self.origin.lines().iter().for_each(|line| println!("{line}"));
        println!("{}", self.origin.cores_line());
        for target in &self.targets {
            println!("  {:<30} {}", target.kind.name(), target.what);
        }
        println!("{} rounds, {} s a point; medians (best run - worst run)", self.rounds.len(), self.seconds);
        for (i, r) in self.rounds.iter().enumerate() {
            println!(
                "Round {}:  cross-core time {:.0} ns before, {:.0} ns after; a bare 4 KiB copy to cold memory {:.0} ns before, {:.0} ns after",
                i + 1,
                r.before.cross_core_ns,
                r.after.cross_core_ns,
                r.before.cold_copy_ns,
                r.after.cold_copy_ns
            );
        }
        for name in Name::ALL {
            if self.points.iter().any(|p| p.name == name) {
                println!("\n{}\n{}", name.title(), self.table(name));
            }
        }
        let restless: usize =
            self.points.iter().flat_map(|p| &p.settled).filter(|settled| !settled.steady).count();
        if restless > 0 {
            println!("{restless} runs began before their disk was steady: the time for that was too short");
        }
        if let Some(bound) = &self.bound {
            bound.print();
        }
        println!();
        self.checks.iter().for_each(|c| println!("{}", c.line()));
    }

    fn table(&self, name: Name) -> Table {
        let mut table = Table::new();
        table.load_preset(presets::ASCII_MARKDOWN);
        table.set_header([
            "QD",
            "disk",
            "requests/s",
            "best - worst",
            "p50",
            "p99",
            "max",
            "CPU us/request",
            "spillway is",
        ]);
        for p in self.points.iter().filter(|p| p.name == name) {
            // Where two of ours took the load, in their order.
            let ours: Vec<String> = self
                .points
                .iter()
                .filter(|o| o.name == name && o.load.depth == p.load.depth)
                .filter(|o| o.kind.is_spillway() && !p.kind.is_spillway())
                .map(|o| format!("{:.2} x", o.iops() / p.iops()))
                .collect();
            let best = p.runs.iter().map(|r| r.iops).fold(0.0, f64::max);
            let worst = p.runs.iter().map(|r| r.iops).fold(f64::INFINITY, f64::min);
            table.add_row([
                p.load.depth.to_string(),
                p.kind.name().to_string(),
                rate(p.iops()),
                format!("{} - {}", rate(best), rate(worst)),
                time(p.p50_ns()),
                time(p.p99_ns()),
                time(p.max_ns()),
                format!("{:.2}", median(&mut p.cpu_us.clone())),
                ours.join(", "),
            ]);
        }
        for column in [0, 2, 4, 5, 6, 7, 8] {
            if let Some(c) = table.column_mut(column) {
                c.set_cell_alignment(CellAlignment::Right);
            }
        }
        table
    }
}

/// Requests a second, short.
pub fn rate(iops: f64) -> String {
    match iops {
        n if n >= 1e6 => format!("{:.2} M", n / 1e6),
        n if n >= 1e4 => format!("{:.0} k", n / 1e3),
        n => format!("{n:.0}"),
    }
}

/// A duration, short.
pub fn time(ns: f64) -> String {
    match ns {
        n if n >= 1e6 => format!("{:.1} ms", n / 1e6),
        n if n >= 1e4 => format!("{:.0} us", n / 1e3),
        n => format!("{:.1} us", n / 1e3),
    }
}
