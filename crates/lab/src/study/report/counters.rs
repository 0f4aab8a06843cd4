//! All counters of the disks, as `spillway stats` names them: what no metric shows stands here.
//!
//! Invariant: a counter is its growth since the work began, all machines added up; a level is the highest that any machine had.

use super::figures::Spread;
use super::page::{Cell, Page, Table};
use super::results::Results;
use crate::numbers::plausible;
use crate::study::Samples;
use spillway_control::counters::{Kind, of_key};
use std::collections::{BTreeMap, BTreeSet};

/// What says what a disk is, not what it did.
const IDENTITY: [&str; 5] = ["base_bytes", "size_bytes", "schema", "landlock", "worker_pid"];
/// A counter in all scenarios.
pub struct Counter<'a> {
    /// Its key.
    pub key: &'a str,
    /// Whether it is a level.
    pub is_level: bool,
    /// In the order of the study.
    pub scenarios: Vec<Option<Spread>>,
}

fn is_level(key: &str) -> bool {
    of_key(key).is_some_and(|counter| counter.kind == Kind::Gauge)
        || [".p50_ns", ".p99_ns", ".max_ns"].iter().any(|end| key.ends_with(end))
}

/// Those of a run, by key.
pub fn of_run(samples: &Samples) -> BTreeMap<String, f64> {
    let mut found = BTreeMap::new();
    for (i, key) in samples.columns.iter().enumerate() {
        let own = !key.starts_with("inside.") && !key.starts_with("cpu.");
        if !own || IDENTITY.contains(&key.as_str()) {
            continue;
        }
        // First, last and highest of each machine while it worked.
        let mut machines: BTreeMap<u32, (f64, f64, f64)> = BTreeMap::new();
        for row in samples.rows.iter().filter(|row| row.time_s >= 0.0) {
            let Some(value) = row.values.get(i).copied().flatten().and_then(plausible) else { continue };
            let seen = machines.entry(row.machine).or_insert((value, value, value));
            *seen = (seen.0, value, seen.2.max(value));
        }
        let value = match is_level(key) {
            true => machines.values().map(|seen| seen.2).reduce(f64::max),
            false => {
                machines.values().map(|seen| (seen.1 - seen.0).max(0.0)).reduce(|sum, grown| sum + grown)
            }
        };
        found.extend(value.map(|value| (key.clone(), value)));
    }
    found
}

/// All counters, by key.
pub fn all(results: &Results) -> Vec<Counter<'_>> {
    let keys: BTreeSet<&str> =
        results.scenarios.iter().flat_map(|scenario| scenario.counters.keys().map(String::as_str)).collect();
    let counter = |key| {
        let scenarios = results.scenarios.iter().map(|scenario| scenario.counters.get(key).copied());
        Counter { key, is_level: is_level(key), scenarios: scenarios.collect() }
    };
    keys.into_iter().map(counter).collect()
}

/// Adds the table of the counters that are not 0 everywhere.
pub fn add_part(page: &mut Page, results: &Results, counters: &[Counter]) {
    if counters.is_empty() {
        return;
    }
    page.part("counters", "All counters of the disks");
    let mut table = Table::by_scenario("figures", "counter", results);
    let (shown, zero): (Vec<_>, Vec<_>) =
        counters.iter().partition(|one| one.scenarios.iter().flatten().any(|spread| spread.high > 0.0));
    for one in shown {
        let level = if one.is_level { "highest" } else { "" };
        let cells = one.scenarios.iter().map(|spread| Cell::figure(spread.as_ref()));
        table.row([Cell::code(one.key).and_small(level)].into_iter().chain(cells));
    }
    page.table(table);
    let zero: Vec<&str> = zero.iter().map(|one| one.key).collect();
    page.say(
        "note",
        &format!(
            "Growth since the work began, all machines added up; of a level the highest that any machine had, from the disk's birth on \
             for percentiles. 0 everywhere: {}.",
            if zero.is_empty() { "none".into() } else { zero.join(", ") }
        ),
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_grow_and_levels_are_the_highest() {
        let mut samples = Samples::default();
        let mut add = |machine, time_s, evicted: f64, used: f64| {
            let known = [("evictions.blocks", evicted), ("ram.used_bytes", used), ("size_bytes", 9.0)];
            samples.add(machine, time_s, &known.map(|(key, value)| (key.to_string(), value)).into());
        };
        add(0, -1.0, 1.0, 100.0);
        add(0, 0.0, 5.0, 10.0);
        add(1, 0.0, 0.0, 7.0);
        add(0, 1.0, 8.0, 30.0);
        add(1, 1.0, 2.0, 8.0);
        add(0, 2.0, 9.0, 20.0);
        let found = of_run(&samples);
        assert_eq!(
            found,
            [("evictions.blocks".to_string(), 6.0), ("ram.used_bytes".to_string(), 30.0)].into()
        );
    }

    #[test]
    fn levels_are_the_gauges_of_the_table_of_counters() {
        assert!(is_level("ram.used_bytes") && is_level("waiting") && is_level("latency.read.p99_ns"));
        assert!(!is_level("flushes") && !is_level("latency.read.count") && !is_level("unheard.of"));
    }
}
