//! What the first minute's part found, how it is shown, and what is promised of it.
//!
//! Owns the promised figures. Invariant: a figure shown is a median of the runs that are kept, and what is compared is
//! the median of the ratios of pairs; a promise whose figure was not measured is not kept.

use crate::checks::{Asked, Check, check};
use crate::environment::Origin;
use crate::first_minute::Host;
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
    pub rows: Vec<Row>,
    /// What was asked for.
    pub checks: Vec<Check>,
}

/// One thing that was measured on several sides.
#[derive(Serialize)]
pub struct Row {
    /// Its name for programs.
    pub key: &'static str,
    /// And for people.
    pub title: &'static str,
    /// Unit of all figures.
    pub unit: &'static str,
    /// What else ran.
    pub host: Host,
    /// Who was measured.
    pub sides: Vec<Side>,
}

/// One disk's figures, or a bare limit's.
#[derive(Serialize)]
pub struct Side {
    /// What it is.
    pub name: &'static str,
    /// One figure a round.
    pub runs: Vec<f64>,
}

impl Side {
    fn middle(&self) -> f64 {
        median(&mut self.runs.clone())
    }
}

impl Row {
    fn side(&self, name: &str) -> Option<&Side> {
        self.sides.iter().find(|s| s.name == name)
    }
}

impl Report {
    /// Prints it for people.
    pub fn print(&self) {
        println!();
        self.origin.lines().iter().for_each(|line| println!("{line}"));
        println!("{}", self.origin.cores_line());
        let mut table = Table::new();
        table.load_preset(presets::ASCII_MARKDOWN).set_header(["", "host", "side", "median", "runs"]);
        for row in &self.rows {
            for (i, side) in row.sides.iter().enumerate() {
                let (title, host) =
                    if i == 0 { (row.title, format!("{:?}", row.host)) } else { ("", String::new()) };
                let runs: Vec<_> = side.runs.iter().map(|r| format!("{r:.2}")).collect();
                let middle = format!("{:.2} {}", side.middle(), row.unit);
                table.add_row([title, &host.to_lowercase(), side.name, &middle, &runs.join(" ")]);
            }
        }
        if let Some(column) = table.column_mut(3) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        println!("\n{table}\n");
        self.checks.iter().for_each(|c| println!("{}", c.line()));
    }
}

/// Sets rows against what the project promises of them.
pub fn checks_of(rows: &[Row]) -> Vec<Check> {
    let row = |key: &str, host| rows.iter().find(|r: &&Row| r.key == key && r.host == host);
    let ratio = |ours: (&str, Host, &str), theirs: (&str, Host, &str)| {
        let (a, b) = (row(ours.0, ours.1)?.side(ours.2)?, row(theirs.0, theirs.1)?.side(theirs.2)?);
        let mut ratios: Vec<f64> = a.runs.iter().zip(&b.runs).map(|(a, b)| a / b).collect();
        let words = format!("median of {} pairs; {:.2} against {:.2}", ratios.len(), a.middle(), b.middle());
        (!ratios.is_empty()).then(|| (median(&mut ratios), words))
    };
    let mut checks = Vec::new();
    let mut asks = |words: String, asked, found| checks.push(check(words, asked, found));
    for host in [Host::Quiet, Host::Busy] {
        let ours = ("fresh-sequential", host, "spillway");
        let on = format!("{host:?}").to_lowercase();
        for (peer, least) in [
            ("qcow2 on tmpfs", 1.0),
            ("pwrite of 512 KiB into new memory", 0.9),
            ("the same pwrite for a client that sleeps", 0.9),
        ] {
            let found = ratio(ours, ("fresh-sequential", host, peer));
            asks(
                format!("{on} host, fresh sequential writes: at least {least} of {peer}"),
                Asked::AtLeast(least),
                found,
            );
        }
    }
    for side in ["RAM 256M", "RAM 512M"] {
        let found = ratio(("demo", Host::Quiet, side), ("demo", Host::Quiet, "mode direct"));
        asks(format!("the demo's write p99, {side}: at most 2 of mode direct"), Asked::AtMost(2.0), found);
    }
    for key in ["nbd-256k", "nbd-1m"] {
        let found = ratio((key, Host::Quiet, "spillway"), ("nbd-64k", Host::Quiet, "spillway"));
        asks(format!("{key}: at least 0.8 of the rate of 64 KiB"), Asked::AtLeast(0.8), found);
    }
    for key in ["asleep", "asleep-together"] {
        for peer in ["qcow2 on tmpfs", "null-co, stores nothing"] {
            let found = ratio((key, Host::Quiet, "spillway"), (key, Host::Quiet, peer));
            asks(format!("{key}, p50: at most that of {peer}"), Asked::AtMost(1.0), found);
        }
    }
    checks
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(key: &'static str, sides: &[(&'static str, &[f64])]) -> Row {
        let sides = sides.iter().map(|(name, runs)| Side { name, runs: runs.to_vec() }).collect();
        Row { key, title: "", unit: "", host: Host::Quiet, sides }
    }

    #[test]
    fn pairs_are_compared_and_what_was_not_measured_is_missed() {
        let rows = [
            row("nbd-64k", &[("spillway", &[1.0, 8.0, 4.0])]),
            row("nbd-1m", &[("spillway", &[1.0, 2.0, 4.0])]),
        ];
        let checks = checks_of(&rows);
        let of = |words: &str| checks.iter().find(|c| c.asked.starts_with(words)).expect("it is asked");
        assert!(of("nbd-1m").pass && of("nbd-1m").found.starts_with("1.00"), "{}", of("nbd-1m").found);
        assert!(!of("nbd-256k").pass && of("nbd-256k").found == "not measured");
    }
}
