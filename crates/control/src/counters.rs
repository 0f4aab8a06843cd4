//! The counters and gauges of a disk, one row each: name, unit, kind, help, the short name in tables for people, and the name
//! that users of Citrix's cache know. JSON keys, Prometheus, `spillway stats` and `top`, the names of MCS storage optimization
//! and the table in `docs/counters.md` come from here.
//!
//! Invariant: every number of [`Stats`] has its row, but for latencies, which are distributions; rows of one metric stand
//! together.

mod table;

use crate::stats::Stats;
use spillway_layout::bytes_in_words as bytes;
pub use table::COUNTERS;

/// A counter or gauge.
#[derive(Clone, Copy, Debug)]
pub struct Counter {
    /// Its key in the JSON figures, with a dot between levels.
    pub key: &'static str,
    /// Its name for Prometheus, without the prefix `spillway_`.
    pub metric: &'static str,
    /// The label that tells it from others of that name, and its value.
    pub label: Option<(&'static str, &'static str)>,
    /// Whether it only grows.
    pub kind: Kind,
    /// What it counts.
    pub unit: Unit,
    /// What it says, as a sentence.
    pub help: &'static str,
    /// Its name in tables for people, of at most three words; empty if no table shows it.
    pub short: &'static str,
    /// Its name in Citrix's performance object "Citrix MCS Storage Driver".
    pub mcsio: Option<&'static str>,
    /// Its value.
    pub value: fn(&Stats) -> u64,
}

/// Whether a figure only grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It does, from the disk's birth on.
    Counter,
    /// It goes up and down.
    Gauge,
}

/// What a figure counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Bytes.
    Bytes,
    /// Blocks of 4 KiB.
    Blocks,
    /// Nanoseconds; Prometheus has seconds.
    Nanoseconds,
    /// Things of which the help speaks.
    Things,
}

impl Kind {
    /// Its word, which is Prometheus's too.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
        }
    }
}

impl Unit {
    /// Its word; none for plain numbers.
    pub fn name(self) -> &'static str {
        match self {
            Unit::Bytes => "bytes",
            Unit::Blocks => "blocks",
            Unit::Nanoseconds => "ns",
            Unit::Things => "",
        }
    }

    /// A figure of this unit as people read it: `64.0 MiB`, `1.5 ms`, `7 blocks`, `1,234,567`.
    pub fn text(self, n: u64) -> String {
        match self {
            Unit::Bytes => bytes(n),
            Unit::Nanoseconds => nanoseconds(n),
            Unit::Blocks => format!("{} block{}", group(n), if n == 1 { "" } else { "s" }),
            Unit::Things => group(n),
        }
    }
}

/// Thousands apart: `1,234,567`.
pub fn group(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

fn nanoseconds(ns: u64) -> String {
    match ns {
        0..1_000 => format!("{ns} ns"),
        1_000..1_000_000 => format!("{:.1} us", ns as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} ms", ns as f64 / 1e6),
        _ => format!("{:.2} s", ns as f64 / 1e9),
    }
}

impl Counter {
    const fn new(key: &'static str, metric: &'static str, kind: Kind, value: fn(&Stats) -> u64) -> Counter {
        Counter {
            key,
            metric,
            label: None,
            kind,
            unit: Unit::Things,
            help: "",
            short: "",
            mcsio: None,
            value,
        }
    }

    const fn of(self, unit: Unit, help: &'static str) -> Counter {
        Counter { unit, help, ..self }
    }

    const fn by(self, label: &'static str, value: &'static str) -> Counter {
        Counter { label: Some((label, value)), ..self }
    }

    const fn short(self, short: &'static str) -> Counter {
        Counter { short, ..self }
    }

    const fn mcsio(self, name: &'static str) -> Counter {
        Counter { mcsio: Some(name), ..self }
    }

    /// Its value as people read it.
    pub fn text(&self, stats: &Stats) -> String {
        self.unit.text((self.value)(stats))
    }
}

/// The row of a key, found when this is compiled if it is asked for as a constant. The key must be in the table, and its row must
/// have a short name.
pub const fn shown(key: &str) -> &'static Counter {
    let mut i = 0;
    while i < COUNTERS.len() {
        if is_same(COUNTERS[i].key.as_bytes(), key.as_bytes()) {
            assert!(!COUNTERS[i].short.is_empty(), "a counter without a short name");
            return &COUNTERS[i];
        }
        i += 1;
    }
    panic!("no counter of this key")
}

const fn is_same(a: &[u8], b: &[u8]) -> bool {
    let mut i = 0;
    while i < a.len() && i < b.len() && a[i] == b[i] {
        i += 1;
    }
    i == a.len() && i == b.len()
}

/// The row of a key.
pub fn of_key(key: &str) -> Option<&'static Counter> {
    COUNTERS.iter().find(|counter| counter.key == key)
}

/// The first row of a metric.
pub fn of_metric(metric: &str) -> Option<&'static Counter> {
    COUNTERS.iter().find(|counter| counter.metric == metric)
}

/// The figures that users of MCS storage optimization know, in Citrix's order.
pub fn of_mcsio() -> impl Iterator<Item = (&'static str, &'static Counter)> {
    COUNTERS.iter().filter_map(|counter| Some((counter.mcsio?, counter)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;
    use std::fmt::Write;
    use std::path::Path;

    /// Numbers that are no figures.
    const NONE: [&str; 2] = ["schema", "worker_pid"];

    fn numbers(at: &str, value: &mut Value, next: &mut u64, all: &mut Vec<(String, u64)>) {
        match value {
            Value::Object(fields) => {
                for (name, inner) in fields {
                    let at = if at.is_empty() { name.clone() } else { format!("{at}.{name}") };
                    numbers(&at, inner, next, all);
                }
            }
            Value::Number(_) if !at.starts_with("latency.") && !NONE.contains(&at) => {
                *next += 1;
                *value = (*next).into();
                all.push((at.to_owned(), *next));
            }
            _ => {}
        }
    }

    #[test]
    fn each_number_of_the_json_has_one_row_with_its_value() {
        let mut json = serde_json::to_value(Stats::default()).unwrap();
        let (mut next, mut all) = (0, Vec::new());
        numbers("", &mut json, &mut next, &mut all);
        let stats: Stats = serde_json::from_value(json).unwrap();
        for (key, value) in &all {
            let rows: Vec<_> = COUNTERS.iter().filter(|row| row.key == key).collect();
            assert_eq!(rows.len(), 1, "{key}");
            assert_eq!((rows[0].value)(&stats), *value, "{key}");
        }
        assert_eq!(COUNTERS.len(), all.len());
    }

    #[test]
    fn rows_of_one_metric_stand_together_and_say_the_same() {
        let mut begun: Vec<&Counter> = Vec::new();
        for row in COUNTERS {
            assert_eq!(row.kind == Kind::Counter, row.metric.ends_with("_total"), "{}", row.key);
            assert!(row.short.split(' ').count() <= 3, "{}", row.key);
            assert!(row.help.ends_with('.') && row.help.split(' ').count() > 1, "{}", row.key);
            assert_eq!(row.unit == Unit::Bytes, row.metric.contains("bytes"), "{}", row.key);
            match begun.iter().position(|other| other.metric == row.metric) {
                None => begun.push(row),
                Some(at) => {
                    assert_eq!(at, begun.len() - 1, "{}: not beside the others of its metric", row.key);
                    assert_eq!((row.help, row.kind), (begun[at].help, begun[at].kind), "{}", row.key);
                }
            }
        }
        assert_eq!(of_mcsio().count(), 8);
    }

    #[test]
    fn figures_are_written_by_their_unit() {
        let texts = [
            (Unit::Bytes, 64 << 20, "64.0 MiB"),
            (Unit::Nanoseconds, 900, "900 ns"),
            (Unit::Nanoseconds, 12_345, "12.3 us"),
            (Unit::Nanoseconds, 2_000_000, "2.0 ms"),
            (Unit::Nanoseconds, 3_210_000_000, "3.21 s"),
            (Unit::Blocks, 1_234_567, "1,234,567 blocks"),
            (Unit::Blocks, 1, "1 block"),
            (Unit::Things, 999, "999"),
        ];
        for (unit, n, text) in texts {
            assert_eq!(unit.text(n), text);
        }
        let mut stats = Stats::default();
        stats.ram.used_bytes = 4096;
        assert_eq!(shown("ram.used_bytes").text(&stats), "4.0 KiB");
    }

    /// SPILLWAY_WRITE=1 writes the table.
    #[test]
    fn the_table_in_the_documents_is_this_one() {
        const BEGIN: &str = "<!-- counters: begin -->\n";
        const END: &str = "<!-- counters: end -->";
        let mut table = String::from(
            "| key | Prometheus name, after the prefix `spillway_` | kind | unit | meaning | MCS storage optimization |\n\
             | --- | --- | --- | --- | --- | --- |\n",
        );
        for row in COUNTERS {
            let label =
                row.label.map(|(label, value)| format!("{{{label}=\"{value}\"}}")).unwrap_or_default();
            let (kind, unit) = (row.kind.name(), row.unit.name());
            let _ = writeln!(
                table,
                "| `{}` | `{}{label}` | {kind} | {unit} | {} | {} |",
                row.key,
                row.metric,
                row.help,
                row.mcsio.unwrap_or_default()
            );
        }
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/counters.md");
        let text = std::fs::read_to_string(&page).unwrap();
        let (before, rest) = text.split_once(BEGIN).unwrap();
        let (found, after) = rest.split_once(END).unwrap();
        if std::env::var_os("SPILLWAY_WRITE").is_some() {
            std::fs::write(&page, format!("{before}{BEGIN}{table}{END}{after}")).unwrap();
            return;
        }
        // What a row says is said there alone.
        let is_row = |key: &str| COUNTERS.iter().any(|row| row.key == key);
        let describes = |line: &&str| line.split('|').nth(1).is_some_and(|keys| keys.split('`').any(is_row));
        let lines = before.lines().chain(after.lines()).filter(|line| !line.ends_with("| as above |"));
        assert_eq!(lines.filter(describes).collect::<Vec<_>>(), [""; 0], "described twice");
        assert_eq!(found, table, "write it with SPILLWAY_WRITE=1 cargo test -p spillway-control counters");
    }
}
