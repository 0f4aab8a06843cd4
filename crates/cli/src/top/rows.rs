//! What `spillway top` shows: rows made of two moments' figures, what can be sorted by, what is left out. Owns the
//! columns; draws nothing.
//!
//! Invariant: a rate is of the time between two moments of the same daemon; without two there is none.

use super::By;
use crate::host::word;
use serde::Serialize;
use spillway_api::{DiskCounters, DiskLevels, Figure, Figures};
use spillway_control::bytes;
use spillway_control::counters::{Counter, shown};
use std::cmp::Ordering;
use std::collections::{HashMap, VecDeque};

/// How long back growth is looked at to say when a cache is full.
const TREND_SECONDS: f64 = 30.0;

/// A machine, or a catalog.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Row {
    pub name: String,
    pub catalog: String,
    pub state: String,
    pub fill: f64,
    pub levels: DiskLevels,
    pub spared_bytes: u64,
    /// Per second; `null` before there are two moments.
    pub rates: Option<Rates>,
    /// `null`: it does not grow.
    pub seconds_to_full: Option<u64>,
}

/// By the second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Rates {
    pub reads: f64,
    pub writes: f64,
    pub read_bytes: f64,
    pub written_bytes: f64,
    pub ram_bytes: f64,
    pub overflow_bytes: f64,
    pub base_bytes: f64,
    /// Mean time of a guest's request.
    pub latency_us: f64,
}

/// The moments that rows are made of, the newest last.
#[derive(Debug, Default)]
pub struct Moments(VecDeque<Figures>);

impl Moments {
    /// What is so now.
    pub fn add(&mut self, figures: Figures) {
        // The counters of another daemon begin anew, and the clock may have been set back.
        let follows = |last: &Figures| last.since == figures.since && last.time <= figures.time;
        if !self.0.back().is_none_or(follows) {
            self.0.clear();
        }
        // The daemon's answer may be the one that it gave before.
        if self.0.back().is_some_and(|last| last.time == figures.time) {
            return;
        }
        self.0.push_back(figures);
        while self.0.len() > 2 && self.passed(&self.0[1]) >= TREND_SECONDS {
            self.0.pop_front();
        }
    }

    pub fn last(&self) -> Option<&Figures> {
        self.0.back()
    }

    /// The moment before the last, and the seconds since then; none if no time has passed.
    pub fn previous(&self) -> Option<(f64, &Figures)> {
        let before = self.0.iter().rev().nth(1)?;
        Some((self.passed(before), before)).filter(|(seconds, _)| *seconds > 0.0)
    }

    /// Seconds from that moment to the last.
    fn passed(&self, from: &Figures) -> f64 {
        self.last().map_or(0.0, |last| last.time.duration_since(from.time).as_secs_f64())
    }

    /// Of each machine or catalog what it is, and what it was lately.
    pub fn rows(&self, by: By) -> Vec<Row> {
        let Some(now) = self.last() else { return Vec::new() };
        let before = self.previous().map(|(seconds, figures)| (seconds, index(figures, by)));
        let oldest = self.0.front().map(|figures| (self.passed(figures), index(figures, by)));
        let mut rows = match by {
            By::Machine => now.machines.iter().map(machine).collect::<Vec<_>>(),
            By::Catalog => now.catalogs.iter().map(catalog).collect(),
        };
        let now = index(now, by);
        for row in &mut rows {
            let Some((counters, levels)) = now.get(row.name.as_str()) else { continue };
            if let Some((seconds, before)) = &before {
                let was = before.get(row.name.as_str()).map_or_else(DiskCounters::default, |was| *was.0);
                row.rates = Some(rates(&counters.since(&was), *seconds));
            }
            if let Some((seconds, oldest)) = oldest.as_ref().filter(|(seconds, _)| *seconds > 0.0) {
                let was = oldest.get(row.name.as_str()).map(|was| *was.1);
                row.seconds_to_full = was.and_then(|was| levels.seconds_to_full(was.used_bytes(), *seconds));
            }
        }
        rows
    }
}

type Index<'a> = HashMap<&'a str, (&'a DiskCounters, &'a DiskLevels)>;

fn index(figures: &Figures, by: By) -> Index<'_> {
    match by {
        By::Machine => figures.machines.iter().map(|m| (m.name.as_str(), (&m.counters, &m.levels))).collect(),
        By::Catalog => figures.catalogs.iter().map(|c| (c.name.as_str(), (&c.counters, &c.levels))).collect(),
    }
}

fn machine(machine: &spillway_api::MachineFigures) -> Row {
    let mut state = if machine.ready { "ready".into() } else { word(&machine.phase) };
    if machine.levels.full > 0 {
        state = "full".into();
    } else if machine.unresponsive {
        state = "unresponsive".into();
    } else if machine.levels.stalled > 0 {
        state = "stalled".into();
    } else if machine.claimed {
        state.push_str(", claimed");
    }
    Row {
        name: machine.name.to_string(),
        catalog: machine.catalog.to_string(),
        state,
        fill: machine.levels.fill(),
        levels: machine.levels,
        spared_bytes: machine.spared_bytes,
        ..Row::default()
    }
}

fn catalog(catalog: &spillway_api::CatalogFigures) -> Row {
    let m = &catalog.machines;
    let all = m.stopped + m.waiting + m.starting + m.running + m.stopping + m.failed;
    let mut state = format!("{}/{all}", m.running);
    for (number, what) in [
        (m.failed, "failed"),
        (catalog.levels.full, "full"),
        (catalog.unresponsive_disks, "unresponsive"),
        (catalog.levels.stalled, "stalled"),
        (m.claimed, "claimed"),
    ] {
        if number > 0 {
            state.push_str(&format!(", {number} {what}"));
        }
    }
    Row {
        name: catalog.name.to_string(),
        catalog: catalog.name.to_string(),
        state,
        fill: catalog.levels.fill(),
        levels: catalog.levels,
        spared_bytes: catalog.spared_bytes,
        ..Row::default()
    }
}

fn rates(grown: &DiskCounters, seconds: f64) -> Rates {
    let by_second = |figure: u64| figure as f64 / seconds;
    let both = |plane: &spillway_api::PlaneCounters| by_second(plane.read_bytes + plane.written_bytes);
    let requests = (grown.read_count + grown.write_count).max(1);
    Rates {
        reads: by_second(grown.guest.reads),
        writes: by_second(grown.guest.writes),
        read_bytes: by_second(grown.guest.read_bytes),
        written_bytes: by_second(grown.guest.written_bytes),
        ram_bytes: both(&grown.ram),
        overflow_bytes: both(&grown.overflow),
        base_bytes: both(&grown.base),
        latency_us: (grown.read_ns + grown.write_ns) as f64 / requests as f64 / 1000.0,
    }
}

/// What a row shows at a place, and what rows are sorted by there.
pub struct Column {
    title: Title,
    pub text: fn(&Row) -> String,
    order: fn(&Row, &Row) -> Ordering,
}

/// What stands above a column.
enum Title {
    /// What is no counter of a disk.
    Own(&'static str),
    /// A counter's short name.
    Level(&'static Counter),
    /// A counter's short name, by the second.
    Rate(&'static Counter),
    /// The plane of a counter, all bytes of which are added up, by the second.
    PlaneRate(&'static Counter),
}

impl Column {
    /// As it stands above the column.
    pub fn title(&self) -> String {
        match self.title {
            Title::Own(title) => title.to_owned(),
            Title::Level(counter) => counter.short.to_uppercase(),
            Title::Rate(counter) => format!("{}/s", counter.short.to_uppercase()),
            Title::PlaneRate(counter) => {
                format!("{}/s", counter.label.map_or("", |(_, plane)| plane).to_uppercase())
            }
        }
    }
}

/// Most important first: what does not fit on a screen is left out from the end.
pub const COLUMNS: [Column; 15] = [
    Column { title: Title::Own("NAME"), text: |r| r.name.clone(), order: |a, b| a.name.cmp(&b.name) },
    Column { title: Title::Own("STATE"), text: |r| r.state.clone(), order: |a, b| a.state.cmp(&b.state) },
    Column {
        title: Title::Own("FILL"),
        text: |r| format!("{:.1}%", r.fill * 100.0),
        order: |a, b| b.fill.total_cmp(&a.fill),
    },
    Column {
        title: Title::Own("FULL IN"),
        text: |r| r.seconds_to_full.map_or("-".into(), duration),
        order: |a, b| a.seconds_to_full.unwrap_or(u64::MAX).cmp(&b.seconds_to_full.unwrap_or(u64::MAX)),
    },
    Column {
        title: Title::Own("SPARED"),
        text: |r| bytes(r.spared_bytes),
        order: |a, b| b.spared_bytes.cmp(&a.spared_bytes),
    },
    Column {
        title: Title::Rate(shown("planes.guest.written_bytes")),
        text: |r| rate(r, |r| r.written_bytes),
        order: |a, b| more(a, b, |r| r.written_bytes),
    },
    Column {
        title: Title::Rate(shown("planes.guest.read_bytes")),
        text: |r| rate(r, |r| r.read_bytes),
        order: |a, b| more(a, b, |r| r.read_bytes),
    },
    Column {
        title: Title::PlaneRate(shown("planes.overflow.written_bytes")),
        text: |r| rate(r, |r| r.overflow_bytes),
        order: |a, b| more(a, b, |r| r.overflow_bytes),
    },
    Column {
        title: Title::PlaneRate(shown("planes.ram.written_bytes")),
        text: |r| rate(r, |r| r.ram_bytes),
        order: |a, b| more(a, b, |r| r.ram_bytes),
    },
    Column {
        title: Title::PlaneRate(shown("planes.base.read_bytes")),
        text: |r| rate(r, |r| r.base_bytes),
        order: |a, b| more(a, b, |r| r.base_bytes),
    },
    Column {
        title: Title::Own("IOPS"),
        text: |r| r.rates.map_or("-".into(), |r| format!("{:.0}", r.reads + r.writes)),
        order: |a, b| more(a, b, |r| r.reads + r.writes),
    },
    Column {
        title: Title::Own("LATENCY"),
        text: |r| r.rates.map_or("-".into(), |r| format!("{:.0} us", r.latency_us)),
        order: |a, b| more(a, b, |r| r.latency_us),
    },
    Column {
        title: Title::Level(RAM_USED),
        text: |r| RAM_USED.unit.text(r.levels.ram_used_bytes),
        order: |a, b| b.levels.ram_used_bytes.cmp(&a.levels.ram_used_bytes),
    },
    Column {
        title: Title::Level(OVERFLOW_USED),
        text: |r| OVERFLOW_USED.unit.text(r.levels.overflow_used_bytes),
        order: |a, b| b.levels.overflow_used_bytes.cmp(&a.levels.overflow_used_bytes),
    },
    Column {
        title: Title::Level(MISSING),
        text: |r| MISSING.unit.text(r.levels.chunks_missing),
        order: |a, b| b.levels.chunks_missing.cmp(&a.levels.chunks_missing),
    },
];

const RAM_USED: &Counter = shown("ram.used_bytes");
const OVERFLOW_USED: &Counter = shown("overflow.used_bytes");
const MISSING: &Counter = shown("chunks.missing");

/// Which column has this title, whatever the case.
pub fn column(title: &str) -> Option<usize> {
    COLUMNS.iter().position(|column| column.title().eq_ignore_ascii_case(title))
}

/// Those that have the text in their name, their catalog's or their state, in the order of a column.
pub fn arrange(rows: &mut Vec<Row>, filter: &str, column: usize, reverse: bool) {
    rows.retain(|row| [&row.name, &row.catalog, &row.state].iter().any(|text| text.contains(filter)));
    rows.sort_by(|a, b| {
        let order = (COLUMNS[column].order)(a, b);
        let order = if reverse { order.reverse() } else { order };
        order.then_with(|| a.name.cmp(&b.name))
    });
}

fn rate(row: &Row, of: fn(&Rates) -> f64) -> String {
    row.rates.as_ref().map_or("-".into(), |rates| bytes(of(rates) as u64))
}

/// The one with more comes first; one that has none, last.
fn more(a: &Row, b: &Row, of: fn(&Rates) -> f64) -> Ordering {
    let figure = |row: &Row| row.rates.as_ref().map_or(-1.0, of);
    figure(b).total_cmp(&figure(a))
}

/// `45 s`, `12 min`, `3 h 20 min`, `5 d`.
fn duration(seconds: u64) -> String {
    match seconds {
        0..=119 => format!("{seconds} s"),
        120..=7199 => format!("{} min", seconds / 60),
        7200..=172_799 => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{} d", seconds / 86400),
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use serde_json::json;

    /// At this second a machine's RAM tier holds so much, its guest has written so much.
    pub fn moment(second: u64, of: &[(&str, u64, u64)]) -> Figures {
        let levels = |used: u64| json!({ "ram_used_bytes": used, "ram_limit_bytes": 1000 });
        let counters = |written: u64| {
            json!({ "guest": { "written_bytes": written, "writes": written / 10 },
                    "ram": { "written_bytes": written }, "write_count": written / 10, "write_ns": written * 500 })
        };
        let machine = |(name, used, written): &(&str, u64, u64)| {
            json!({ "name": name, "catalog": "desk", "phase": "running", "ready": true, "claimed": false,
                    "unresponsive": false, "levels": levels(*used), "counters": counters(*written), "spared_bytes": 0 })
        };
        serde_json::from_value(json!({
            "time": format!("2026-01-01T00:00:{second:02}Z"), "since": "2025-12-31T00:00:00Z",
            "machines": of.iter().map(machine).collect::<Vec<_>>(), "stores": [],
            "catalogs": [{ "name": "desk", "machines": {}, "warm": 0, "disks": of.len(), "unresponsive_disks": 0,
                "levels": levels(of.iter().map(|m| m.1).sum()), "counters": counters(of.iter().map(|m| m.2).sum()),
                "spared_bytes": 7 }],
        }))
        .unwrap()
    }

    #[test]
    fn rates_are_of_the_last_interval_and_trends_of_more() {
        let mut moments = Moments::default();
        assert!(moments.rows(By::Machine).is_empty());
        moments.add(moment(0, &[("a", 100, 0)]));
        assert_eq!(moments.rows(By::Machine)[0].rates, None);
        moments.add(moment(10, &[("a", 200, 500)]));
        // The same answer once more is no other moment.
        moments.add(moment(10, &[("a", 200, 500)]));
        moments.add(moment(12, &[("a", 220, 600)]));
        let row = &moments.rows(By::Machine)[0];
        let rates = row.rates.unwrap();
        assert_eq!(
            (rates.written_bytes, rates.writes, rates.ram_bytes, rates.latency_us),
            (50.0, 5.0, 50.0, 5.0)
        );
        assert_eq!(row.seconds_to_full, Some(78), "120 in 12 s, and 780 are left");
        assert_eq!(moments.rows(By::Catalog)[0].rates.unwrap().written_bytes, 50.0);
        moments.add(moment(13, &[("a", 90, 600)]));
        assert_eq!(moments.rows(By::Machine)[0].seconds_to_full, None, "it shrinks");
        // Another daemon's counters are not compared with those of the last.
        let mut other = moment(14, &[("a", 90, 5)]);
        other.since = other.time;
        moments.add(other);
        assert_eq!(moments.rows(By::Machine)[0].rates, None);
    }

    #[test]
    fn what_is_long_ago_is_forgotten() {
        let mut moments = Moments::default();
        (0..60).for_each(|second| moments.add(moment(second, &[("a", 0, 0)])));
        assert!((30..=32).contains(&moments.0.len()), "{}", moments.0.len());
    }

    #[test]
    fn every_column_sorts_and_filters_are_of_names_and_states() {
        let mut moments = Moments::default();
        moments.add(moment(0, &[("a", 0, 0), ("b", 0, 0), ("c", 0, 0)]));
        moments.add(moment(1, &[("a", 10, 300), ("b", 30, 100), ("c", 20, 200)]));
        let sorted = |title: &str, reverse| {
            let mut rows = moments.rows(By::Machine);
            arrange(&mut rows, "", column(title).unwrap(), reverse);
            rows.iter().map(|row| row.name.clone()).collect::<String>()
        };
        assert_eq!(sorted("name", false), "abc");
        assert_eq!(sorted("name", true), "cba");
        assert_eq!(sorted("FILL", false), "bca");
        assert_eq!(sorted("written/s", false), "acb");
        assert_eq!(sorted("full in", false), "bca");
        for column in 0..COLUMNS.len() {
            let mut rows = moments.rows(By::Machine);
            arrange(&mut rows, "", column, false);
            assert_eq!(rows.len(), 3);
        }
        let mut rows = moments.rows(By::Machine);
        arrange(&mut rows, "b", 0, false);
        assert_eq!(rows.len(), 1);
        assert_eq!(column("nothing"), None);
    }

    #[test]
    fn times_are_short() {
        assert_eq!(
            [5, 119, 120, 7199, 7300, 900_000].map(duration),
            ["5 s", "119 s", "2 min", "119 min", "2 h 1 min", "10 d"]
        );
    }
}
