//! What a bench found: the points, the targets of the issue against them, and how both are shown.
//!
//! Invariant: every figure shown is a median of the runs that the JSON file keeps.

use crate::targets::Kind;
use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;
use spillway_lab::cores::{Hardware, median};
use spillway_lab::{Load, Measured, Stamp};

/// Everything that was found, as it is kept.
#[derive(Serialize)]
pub struct Report {
    /// Form of this file.
    pub schema: u32,
    /// When, and with which Spillway.
    #[serde(flatten)]
    pub stamp: Stamp,
    /// Whether the points were short.
    pub quick: bool,
    /// Seconds measured per point and run.
    pub seconds: f64,
    /// The command that was run.
    pub command: String,
    /// What it ran on.
    pub hardware: Hardware,
    /// The core that drove and the core that served.
    pub cores: [usize; 2],
    /// The peers' program and its version.
    pub peer: String,
    /// The disks.
    pub targets: Vec<TargetLine>,
    /// The rounds.
    pub rounds: Vec<Round>,
    /// The points.
    pub points: Vec<Point>,
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
    /// Cross-core time before it, in nanoseconds one way.
    pub cross_core_before_ns: f64,
    /// And after it.
    pub cross_core_after_ns: f64,
    /// Time of a bare 4 KiB copy to a random place in memory, before it.
    pub cold_copy_before_ns: f64,
    /// And after it.
    pub cold_copy_after_ns: f64,
}

/// One load at one depth on one disk.
#[derive(Serialize)]
pub struct Point {
    /// `fits` or `tight`.
    pub name: &'static str,
    /// What was asked.
    pub load: Load,
    /// On which disk.
    pub kind: Kind,
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

    fn p99_ns(&self) -> f64 {
        median(&mut self.runs.iter().map(|r| r.p99_ns as f64).collect::<Vec<_>>())
    }

    fn max_ns(&self) -> f64 {
        self.runs.iter().map(|r| r.max_ns as f64).fold(0.0, f64::max)
    }
}

/// One thing that was asked for, and whether it came out so.
#[derive(Serialize)]
pub struct Check {
    /// What was asked for.
    pub asked: String,
    /// What was found.
    pub found: String,
    /// Whether that is enough.
    pub pass: bool,
}

impl Report {
    fn point(&self, name: &str, depth: usize, kind: Kind) -> Option<&Point> {
        self.points.iter().find(|p| p.name == name && p.load.depth == depth && p.kind == kind)
    }

    /// Sets the findings against what the project promises.
    pub fn check(&mut self) {
        let mut checks = Vec::new();
        let mut ratio = |what: &str, least: f64, name: &str, depth, ours: Kind, peer: Kind| {
            if let (Some(a), Some(b)) = (self.point(name, depth, ours), self.point(name, depth, peer)) {
                let found = a.iops() / b.iops();
                checks.push(Check {
                    asked: format!("{what}: at least {least} times the rate of {}", peer.name()),
                    found: format!("{found:.2} ({} against {})", rate(a.iops()), rate(b.iops())),
                    pass: found >= least,
                });
            }
        };
        ratio("fits, QD16", 10.0, "fits", 16, Kind::Spillway, Kind::Qcow2Tmpfs);
        ratio("fits, QD16", 0.5, "fits", 16, Kind::Spillway, Kind::NullCo);
        let tight = "RAM for 40%, overflow 8G, QD16";
        ratio(tight, 2.5, "tight", 16, Kind::SpillwayTight, Kind::Qcow2Disk);
        if let (Some(a), Some(b)) =
            (self.point("fits", 1, Kind::Spillway), self.point("fits", 1, Kind::Qcow2Tmpfs))
        {
            let found = a.p50_ns() / b.p50_ns();
            checks.push(Check {
                asked: format!("fits, QD1: p50 at most a third of that of {}", b.kind.name()),
                found: format!("{found:.2} ({} against {})", time(a.p50_ns()), time(b.p50_ns())),
                pass: found <= 1.0 / 3.0,
            });
        }
        for target in self.targets.iter().filter(|t| t.kind.is_spillway()) {
            let (used, of) = target.at_rest;
            checks.push(Check {
                asked: format!("{}: no CPU at rest, with a client connected", target.kind.name()),
                found: format!("{:.0} ms in {of:.1} s", used * 1000.0),
                pass: used <= of * 0.005,
            });
        }
        self.checks = checks;
    }

    /// Prints everything for people.
    pub fn print(&self) {
        let h = &self.hardware;
        println!(
            "\nHardware: {}, {} cores, {:.0} GiB, kernel {}",
            h.cpu,
            h.cores,
            gib(h.ram_bytes),
            h.kernel
        );
        println!("Disk:     {}", h.disk);
        println!("Memory:   huge pages for shared memory: {}", h.shmem_huge_pages);
        println!("Measured: {}; {}", self.stamp, self.peer);
        for target in &self.targets {
            println!("  {:<30} {}", target.kind.name(), target.what);
        }
        println!(
            "Driver on core {}, each disk on core {}; {} rounds, {} s a point; medians (best run - worst run)",
            self.cores[0],
            self.cores[1],
            self.rounds.len(),
            self.seconds
        );
        for (i, r) in self.rounds.iter().enumerate() {
            println!(
                "Round {}:  cross-core time {:.0} ns before, {:.0} ns after; a bare 4 KiB copy to cold memory {:.0} ns before, {:.0} ns after",
                i + 1,
                r.cross_core_before_ns,
                r.cross_core_after_ns,
                r.cold_copy_before_ns,
                r.cold_copy_after_ns
            );
        }
        for (name, title) in [
            ("fits", "Working set in RAM: 4 KiB, 80% write, 90% random, 2.5 GiB"),
            ("tight", "RAM for 40% of the working set: 4 KiB, 80% write, uniform over 2.5 GiB"),
        ] {
            if self.points.iter().any(|p| p.name == name) {
                println!("\n{title}");
                println!("{}", self.table(name));
            }
        }
        println!();
        for c in &self.checks {
            println!("{}  {}: {}", if c.pass { "PASS" } else { "FAIL" }, c.asked, c.found);
        }
    }

    fn table(&self, name: &str) -> Table {
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

fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

/// Requests a second, short.
fn rate(iops: f64) -> String {
    match iops {
        n if n >= 1e6 => format!("{:.2} M", n / 1e6),
        n if n >= 1e4 => format!("{:.0} k", n / 1e3),
        n => format!("{n:.0}"),
    }
}

/// A duration, short.
fn time(ns: f64) -> String {
    match ns {
        n if n >= 1e6 => format!("{:.1} ms", n / 1e6),
        n if n >= 1e4 => format!("{:.0} us", n / 1e3),
        n => format!("{:.1} us", n / 1e3),
    }
}
