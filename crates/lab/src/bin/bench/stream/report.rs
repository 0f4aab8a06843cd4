//! What the part about streamed images found, how it is shown, and what is promised of it.
//!
//! Owns the promised figures. Invariant: a figure that is compared is the median of the runs that are kept, or of their ratios
//! run by run; a promise whose figure was not measured is not kept.

use crate::checks::Asked::{self, AtLeast, AtMost};
use crate::checks::{Check, check};
use crate::environment::Origin;
use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;
use spillway_testkit::cores::median;

/// Everything that was found, as it is kept.
#[derive(Serialize)]
pub struct Report {
    /// Form of this file.
    pub schema: u32,
    /// Where it was found.
    #[serde(flatten)]
    pub origin: Origin,
    /// What was measured.
    pub figures: Vec<Figure>,
    /// What was asked for.
    pub checks: Vec<Check>,
}

/// One thing that was measured.
#[derive(Serialize)]
pub struct Figure {
    /// Its name for programs, such as `S1/first/ready`.
    pub key: &'static str,
    /// And for people.
    pub title: &'static str,
    /// Unit of all runs.
    pub unit: &'static str,
    /// One value a round.
    pub runs: Vec<f64>,
}

/// A row, what is asked of it, its limit, and what was found.
type Promise = (&'static str, &'static str, Asked, Option<(f64, String)>);

/// The figures as they come.
#[derive(Default)]
pub struct Figures(pub Vec<Figure>);

impl Figures {
    /// Adds a run of a figure.
    pub fn add(&mut self, key: &'static str, title: &'static str, unit: &'static str, value: f64) {
        eprintln!("bench: {key}: {title}: {value:.3} {unit}");
        match self.0.iter_mut().find(|figure| figure.key == key) {
            Some(figure) => figure.runs.push(value),
            None => self.0.push(Figure { key, title, unit, runs: vec![value] }),
        }
    }

    fn runs(&self, key: &str) -> Option<&[f64]> {
        self.0.iter().find(|figure| figure.key == key).map(|figure| &figure.runs[..])
    }

    /// The median, and words about it.
    fn middle(&self, key: &str) -> Option<(f64, String)> {
        let figure = self.0.iter().find(|figure| figure.key == key)?;
        let middle = median(&mut figure.runs.clone());
        Some((middle, format!("{middle:.3} {}, median of {}", figure.unit, figure.runs.len())))
    }

    /// The worst run.
    fn worst(&self, key: &str) -> Option<(f64, String)> {
        let figure = self.0.iter().find(|figure| figure.key == key)?;
        let worst = figure.runs.iter().copied().fold(f64::MIN, f64::max);
        Some((worst, format!("{worst:.3} {}, the worst of {}", figure.unit, figure.runs.len())))
    }

    /// The median of the ratios of runs of one round.
    fn ratio(&self, key: &str, to: &str) -> Option<(f64, String)> {
        let (a, b) = (self.runs(key)?, self.runs(to)?);
        let mut ratios: Vec<f64> = a.iter().zip(b).map(|(a, b)| a / b).collect();
        let words = format!(
            "{:.3} against {:.3}, median of {} pairs",
            median(&mut a.to_vec()),
            median(&mut b.to_vec()),
            ratios.len()
        );
        (!ratios.is_empty()).then(|| (median(&mut ratios), words))
    }

    /// Sets them against what the project promises, of the rows that were asked for.
    pub fn checks(&self, takes: impl Fn(&str) -> bool) -> Vec<Check> {
        let all = self.of_good_days().into_iter().chain(self.of_bad_days());
        let asked = all.filter(|(row, ..)| takes(row));
        asked.map(|(row, words, limit, found)| check(format!("{row}  {words}"), limit, found)).collect()
    }

    /// What is promised while everything works.
    fn of_good_days(&self) -> Vec<Promise> {
        vec![
            (
                "S1",
                "start: a VMM runs, first time ever, within 0.5 s",
                AtMost(0.5),
                self.middle("S1/first/running"),
            ),
            (
                "S1",
                "start: a VMM runs, with a boot set, within 0.5 s",
                AtMost(0.5),
                self.middle("S1/set/running"),
            ),
            (
                "S1",
                "ready, first time ever: at most 1.6 of a local boot",
                AtMost(1.6),
                self.ratio("S1/first/ready", "S1/local/ready"),
            ),
            (
                "S1",
                "ready, with a boot set: at most 1.15 of a local boot",
                AtMost(1.15),
                self.ratio("S1/set/ready", "S1/local/ready"),
            ),
            (
                "S2",
                "bytes from the store for a boot: at most 1.15 of its boot set",
                AtMost(1.15),
                self.ratio("S2/boot", "S2/set"),
            ),
            ("S2", "the same: at most 8% of the image", AtMost(8.0), self.middle("S2/share")),
            ("S3", "8 hosts at once: at most 1.05 GETs of a chunk", AtMost(1.05), self.middle("S3/gets")),
            (
                "S3",
                "the slowest of 8 hosts: at most 1.5 of one alone",
                AtMost(1.5),
                self.ratio("S3/slowest", "S3/alone"),
            ),
            ("S4", "20 disks on a host: each chunk once", AtMost(1.0), self.worst("S4/gets")),
            ("S5", "a miss, p50: at most 32 ms", AtMost(32.0), self.middle("S5/store/p50")),
            ("S5", "a miss, p99: at most 60 ms", AtMost(60.0), self.middle("S5/store/p99")),
            ("S5", "a miss, from another host, p50: at most 5 ms", AtMost(5.0), self.middle("S5/peer/p50")),
            (
                "S6",
                "a resident image: at least 0.99 of the rate of a local one",
                AtLeast(0.99),
                self.ratio("S6/streamed", "S6/local"),
            ),
            ("S6", "at rest: no processor time", AtMost(0.0), self.worst("S6/rest")),
        ]
    }

    /// What is promised when stores are away or wrong, and processes are killed; and of pushes.
    fn of_bad_days(&self) -> Vec<Promise> {
        vec![
            ("S7", "store away: no I/O error", AtMost(0.0), self.worst("S7/errors")),
            ("S7", "store away, residency full: no pause", AtMost(0.0), self.worst("S7/full/pauses")),
            ("S7", "store away: guests stopped within 10 s", AtMost(10.0), self.middle("S7/stopped")),
            ("S7", "store back: guests go on within 1 s", AtMost(1.0), self.middle("S7/resumed")),
            (
                "S8",
                "faults of stores, hosts and cache files: at least 10,000",
                AtLeast(10_000.0),
                self.worst("S8/faults"),
            ),
            ("S8", "wrong bytes: none", AtMost(0.0), self.worst("S8/wrong")),
            ("S9", "spillway-streamd killed 200 times", AtLeast(200.0), self.worst("S9/kills")),
            ("S9", "chunks removed meanwhile: some", AtLeast(1.0), self.worst("S9/removed")),
            ("S9", "wrong bytes: none", AtMost(0.0), self.worst("S9/wrong")),
            (
                "S9",
                "longest wait of a guest around a kill, p99: at most 1 s",
                AtMost(1.0),
                self.worst("S9/pause"),
            ),
            ("S9", "the cache over its budget: never", AtMost(0.0), self.worst("S9/over")),
            ("S10", "push: at least 250 MB/s for each core", AtLeast(250.0), self.middle("S10/rate")),
            (
                "S10",
                "a version with 1% changed: at most 1.2 of the changed chunks sent",
                AtMost(1.2),
                self.ratio("S10/sent", "S10/changed"),
            ),
        ]
    }
}

impl Report {
    /// Prints it for people.
    pub fn print(&self) {
        println!();
        self.origin.lines().iter().for_each(|line| println!("{line}"));
        let mut table = Table::new();
        table.load_preset(presets::ASCII_MARKDOWN).set_header(["", "median", "unit", "runs"]);
        for figure in &self.figures {
            let runs: Vec<_> = figure.runs.iter().map(|run| format!("{run:.3}")).collect();
            let middle = format!("{:.3}", median(&mut figure.runs.clone()));
            let title = format!("{} {}", figure.key, figure.title);
            table.add_row([title.as_str(), &middle, figure.unit, &runs.join(" ")]);
        }
        if let Some(column) = table.column_mut(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        println!("\n{table}\n");
        self.checks.iter().for_each(|check| println!("{}", check.line()));
    }
}
