//! What figures were in the last hour, and in the last day, in memory: for charts that are not empty when they are opened. Owns a row
//! of numbers for each object and each 10 seconds, and for catalogs and the host for each minute of a day, too.
//!
//! Invariant: its memory is bounded: an hour of a machine takes 16 KB, and of at most 2,000 machines it is kept; an hour and
//! a day of a catalog take 79 KB. What was not seen is a gap, never an estimate.

use super::FigureCollector;
use crate::error::HostError;
use jiff::Timestamp;
use rustix::time::{ClockId, clock_gettime};
use spillway_api::{
    CatalogFigures, DiskCounters, DiskLevels, Figure, Figures, HISTORY_SERIES, History, HistorySeries,
    MachineFigures, Name,
};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::time::MissedTickBehavior;

/// Time between two rows.
const STEP: Duration = Duration::from_secs(10);
/// Rows of an hour.
const ROWS: usize = 360;
/// Rows of a day, each the mean of so many.
const DAY_ROWS: usize = 1440;
const IN_ONE: usize = 6;
/// Machines and catalogs whose history is kept: those that come first by name.
pub const MOST_MACHINES: usize = 2000;
const MOST_CATALOGS: usize = 200;

/// The values of all series at one time; NaN for what is not known.
type Row = [f32; HISTORY_SERIES.len()];
const UNKNOWN: Row = [f32::NAN; HISTORY_SERIES.len()];

/// What a history is about.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HistoryOf {
    /// All catalogs together.
    Host,
    /// The machines of a catalog together.
    Catalog(Name),
    /// A machine.
    Machine(Name),
}

/// The history of all objects.
#[derive(Default)]
pub struct Histories(Mutex<Table>);

#[derive(Default)]
struct Table {
    objects: BTreeMap<HistoryOf, ObjectHistory>,
    /// Number of rows so far.
    rows: u64,
    /// When the first one was added, by the clock of [`since_boot`], and the time of the figures of the last one.
    begun: Option<Duration>,
    until: Option<Timestamp>,
}

#[derive(Default)]
struct ObjectHistory {
    before: Option<(Duration, DiskCounters)>,
    hour: VecDeque<Row>,
    day: VecDeque<Row>,
    /// Machines have none.
    has_day: bool,
}

/// The state of an object at one time.
struct Seen {
    counters: DiskCounters,
    levels: DiskLevels,
    /// Fill level of the fullest write cache.
    fill: f64,
    /// Its disks have not answered in time: these are older figures.
    is_old: bool,
}

impl Histories {
    /// Keeps the history of these figures from now on.
    pub fn kept(figures: Arc<FigureCollector>) -> Arc<Histories> {
        let histories = Arc::<Histories>::default();
        tokio::spawn(Arc::clone(&histories).keep(figures));
        histories
    }

    /// Adds a row every 10 seconds. Never returns.
    async fn keep(self: Arc<Histories>, figures: Arc<FigureCollector>) {
        let mut ticks = tokio::time::interval(STEP);
        // After a pause of the host the rows in between are gaps.
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        loop {
            ticks.tick().await;
            match figures.all().await {
                Ok(figures) => self.add(&figures, since_boot()),
                // The next one may be there again; this is a gap.
                Err(_) => continue,
            }
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Adds a row of what was seen now.
    fn add(&self, figures: &Figures, now: Duration) {
        let seen = seen(figures);
        let mut table = self.table();
        let begun = *table.begun.get_or_insert(now);
        // By the time since the first row, so that delays do not add up.
        let steps = (now.saturating_sub(begun).as_secs_f64() / STEP.as_secs_f64()).round() as u64;
        let Some(steps) = (steps + 1).checked_sub(table.rows).filter(|steps| *steps > 0) else { return };
        table.until = Some(figures.time);
        let (first, end) = (table.rows, table.rows + steps);
        table.rows = end;
        table.objects.retain(|object, _| seen.contains_key(object));
        for (object, seen) in seen {
            let has_day = !matches!(object, HistoryOf::Machine(_));
            let history = table.objects.entry(object).or_insert_with(|| ObjectHistory::new(has_day));
            // What a machine has counted only grows: it is another one of this name.
            if !has_day && history.before.is_some_and(|(_, before)| seen.counters.is_behind(&before)) {
                *history = ObjectHistory::new(has_day);
            }
            let row = history.row(&seen, now);
            // Of a gap that is longer than the history, the last part.
            for number in first.max(end.saturating_sub(history.most_rows()))..end {
                history.push(if number + 1 == end { row } else { UNKNOWN }, number);
            }
        }
    }

    /// The last so many seconds of an object, at most a day; of a machine at most an hour. Without values if nothing of it has been
    /// kept.
    pub fn of(&self, object: &HistoryOf, seconds: u32) -> Result<History, HostError> {
        let hour = STEP * ROWS as u32;
        let is_day = Duration::from_secs(seconds.into()) > hour;
        if is_day && matches!(object, HistoryOf::Machine(_)) {
            let message = format!("of a machine, only the last {} seconds are kept", hour.as_secs());
            return Err(HostError::invalid(message));
        }
        let table = self.table();
        let nothing = ObjectHistory::default();
        let history = table.objects.get(object).unwrap_or(&nothing);
        let (rows, step) = if is_day { (&history.day, STEP * IN_ONE as u32) } else { (&history.hour, STEP) };
        let most = (u64::from(seconds).div_ceil(step.as_secs()) as usize).min(rows.len());
        let rows = rows.range(rows.len() - most..);
        let series = HISTORY_SERIES.iter().enumerate().map(|(n, name)| HistorySeries {
            name: (*name).into(),
            values: rows.clone().map(|row| Some(row[n]).filter(|value| value.is_finite())).collect(),
        });
        // The rows after the last whole minute are not a part of the day.
        let rest = if is_day { table.rows % IN_ONE as u64 } else { 0 };
        let until = table.until.unwrap_or_else(Timestamp::now);
        let until = until.checked_sub(STEP * rest as u32).unwrap_or(until);
        Ok(History { until, step_seconds: step.as_secs() as u32, series: series.collect() })
    }
}

impl ObjectHistory {
    /// Without rows, with the memory for all of them: what grows takes twice as much.
    fn new(has_day: bool) -> ObjectHistory {
        let day = VecDeque::with_capacity(if has_day { DAY_ROWS } else { 0 });
        ObjectHistory { before: None, hour: VecDeque::with_capacity(ROWS), day, has_day }
    }

    /// The rates since the last time, and the levels now.
    fn row(&mut self, seen: &Seen, now: Duration) -> Row {
        if seen.is_old {
            self.before = None;
            return UNKNOWN;
        }
        let before = self.before.replace((now, seen.counters));
        let mut row = UNKNOWN;
        if let Some((then, before)) = before
            && !seen.counters.is_behind(&before)
            && now > then
        {
            let (grown, seconds) = (seen.counters.since(&before), (now - then).as_secs_f64());
            let rates = [
                grown.guest.read_bytes,
                grown.guest.written_bytes,
                grown.ram.read_bytes,
                grown.ram.written_bytes,
                grown.overflow.read_bytes,
                grown.overflow.written_bytes,
                grown.base.read_bytes,
                grown.stalls,
            ];
            rates.iter().zip(&mut row).for_each(|(grown, value)| *value = (*grown as f64 / seconds) as f32);
        }
        let levels =
            [seen.levels.ram_used_bytes as f32, seen.levels.overflow_used_bytes as f32, seen.fill as f32];
        row[HISTORY_SERIES.len() - levels.len()..].copy_from_slice(&levels);
        row
    }

    /// Rows after which nothing of those before is kept.
    fn most_rows(&self) -> u64 {
        if self.has_day { (DAY_ROWS * IN_ONE) as u64 } else { ROWS as u64 }
    }

    fn push(&mut self, row: Row, number: u64) {
        push(&mut self.hour, row, ROWS);
        if self.has_day && (number + 1).is_multiple_of(IN_ONE as u64) {
            let minute = mean(self.hour.range(self.hour.len().saturating_sub(IN_ONE)..));
            push(&mut self.day, minute, DAY_ROWS);
        }
    }
}

/// The time since the host's boot, also that in which it was suspended: then rows are gaps.
fn since_boot() -> Duration {
    let time = clock_gettime(ClockId::Boottime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

fn push(rows: &mut VecDeque<Row>, row: Row, most: usize) {
    if rows.len() == most {
        rows.pop_front();
    }
    rows.push_back(row);
}

/// The mean of what is known of each series.
fn mean<'a>(rows: impl Iterator<Item = &'a Row> + Clone) -> Row {
    let of = |n: usize| {
        let known = rows.clone().map(|row| f64::from(row[n])).filter(|value| value.is_finite());
        let (sum, count) = known.fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
        // Without any it is not known either.
        (sum / count) as f32
    };
    std::array::from_fn(of)
}

/// The state of the host, and of its first catalogs and machines by name.
fn seen(figures: &Figures) -> HashMap<HistoryOf, Seen> {
    let mut fullest: HashMap<&Name, f64> = HashMap::new();
    for machine in &figures.machines {
        let fill = fullest.entry(&machine.catalog).or_default();
        *fill = fill.max(machine.levels.fill());
    }
    let mut host =
        Seen { counters: DiskCounters::default(), levels: DiskLevels::default(), fill: 0.0, is_old: false };
    let mut all = HashMap::new();
    for catalog in first(&figures.catalogs, MOST_CATALOGS, |catalog: &CatalogFigures| &catalog.name) {
        let fill = fullest.get(&catalog.name).copied().unwrap_or_default();
        // What a late disk has done would count as done when it answers again.
        let is_old = catalog.unresponsive_disks > 0;
        let seen = Seen { counters: catalog.counters, levels: catalog.levels, fill, is_old };
        all.insert(HistoryOf::Catalog(catalog.name.clone()), seen);
    }
    for catalog in &figures.catalogs {
        host.is_old |= catalog.unresponsive_disks > 0;
        host.counters.add(&catalog.counters);
        host.levels.add(&catalog.levels);
    }
    host.fill = fullest.values().copied().fold(0.0, f64::max);
    all.insert(HistoryOf::Host, host);
    for machine in first(&figures.machines, MOST_MACHINES, |machine: &MachineFigures| &machine.name) {
        let (counters, levels) = (machine.counters, machine.levels);
        let seen = Seen { counters, levels, fill: levels.fill(), is_old: machine.unresponsive };
        all.insert(HistoryOf::Machine(machine.name.clone()), seen);
    }
    all
}

/// Those that come first by name.
fn first<T>(all: &[T], most: usize, name: impl Fn(&T) -> &Name) -> Vec<&T> {
    let mut all: Vec<&T> = all.iter().collect();
    all.sort_by(|a, b| name(a).cmp(name(b)));
    all.truncate(most);
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use spillway_api::ErrorCode;

    fn figures(written: &[(&str, u64)]) -> Figures {
        let machines = written.iter().map(|(name, bytes)| {
            let mut counters = DiskCounters::default();
            counters.guest.written_bytes = *bytes;
            let levels = DiskLevels { ram_used_bytes: bytes / 2, ram_limit_bytes: 1000, ..DiskLevels::default() };
            serde_json::json!({ "name": name, "catalog": "desk", "phase": "running", "ready": true, "claimed": false,
                "unresponsive": false, "levels": levels, "counters": counters, "spared_bytes": 0 })
        });
        let machines: Vec<_> =
            machines.map(|machine| serde_json::from_value::<MachineFigures>(machine).unwrap()).collect();
        let (mut counters, mut levels) = (DiskCounters::default(), DiskLevels::default());
        machines.iter().for_each(|machine| {
            counters.add(&machine.counters);
            levels.add(&machine.levels);
        });
        let catalog = serde_json::json!({ "name": "desk", "machines": {}, "warm": 0, "disks": 1, "unresponsive_disks": 0,
            "levels": levels, "counters": counters, "spared_bytes": 0 });
        let catalogs = vec![serde_json::from_value(catalog).unwrap()];
        let (time, since) = (Timestamp::now(), Timestamp::now());
        Figures { time, since, catalogs, machines, stores: vec![], stream: None }
    }

    fn values(history: &History, name: &str) -> Vec<Option<f32>> {
        history.series.iter().find(|series| series.name == name).unwrap().values.clone()
    }

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    #[test]
    fn a_row_has_rates_and_levels_and_what_was_not_seen_is_a_gap() {
        let histories = Histories::default();
        let begun = since_boot();
        let at = |seconds: u64| begun + Duration::from_secs(seconds);
        assert_eq!(values(&histories.of(&HistoryOf::Host, 60).unwrap(), "fill"), []);
        histories.add(&figures(&[("desk-1", 100), ("desk-2", 0)]), at(0));
        histories.add(&figures(&[("desk-1", 600), ("desk-2", 800)]), at(10));
        // Nobody looked for 30 seconds.
        histories.add(&figures(&[("desk-1", 900), ("desk-2", 800)]), at(40));
        let host = histories.of(&HistoryOf::Host, 3600).unwrap();
        assert_eq!(host.step_seconds, 10);
        assert_eq!(values(&host, "guest_written_bytes"), [None, Some(130.0), None, None, Some(10.0)]);
        assert_eq!(values(&host, "ram_used_bytes"), [Some(50.0), Some(700.0), None, None, Some(850.0)]);
        let catalog = histories.of(&HistoryOf::Catalog(name("desk")), 20).unwrap();
        assert_eq!(values(&catalog, "fill"), [None, Some(0.45)], "of the fullest, in the last 20 seconds");
        let second = histories.of(&HistoryOf::Machine(name("desk-2")), 3600).unwrap();
        assert_eq!(values(&second, "guest_written_bytes"), [None, Some(80.0), None, None, Some(0.0)]);
        // Another machine of this name, whose counters begin anew; and one that has gone.
        histories.add(&figures(&[("desk-1", 50)]), at(50));
        let first = histories.of(&HistoryOf::Machine(name("desk-1")), 3600).unwrap();
        assert_eq!(
            (values(&first, "guest_written_bytes"), values(&first, "ram_used_bytes")),
            (vec![None], vec![Some(25.0)]),
            "nothing of the earlier one"
        );
        let gone = histories.of(&HistoryOf::Machine(name("desk-2")), 10).unwrap();
        assert_eq!(values(&gone, "guest_written_bytes"), []);
    }

    #[test]
    fn while_a_disk_is_late_nothing_is_known() {
        let histories = Histories::default();
        let begun = since_boot();
        let late = |figures: Figures| {
            let mut figures = figures;
            figures.catalogs[0].unresponsive_disks = 1;
            figures.machines[0].unresponsive = true;
            figures
        };
        let all = [
            figures(&[("desk-1", 0)]),
            figures(&[("desk-1", 100)]),
            late(figures(&[("desk-1", 100)])),
            figures(&[("desk-1", 900)]),
            figures(&[("desk-1", 1000)]),
        ];
        for (n, figures) in all.iter().enumerate() {
            histories.add(figures, begun + STEP * n as u32);
        }
        for of in [HistoryOf::Host, HistoryOf::Catalog(name("desk")), HistoryOf::Machine(name("desk-1"))] {
            let rates = values(&histories.of(&of, 3600).unwrap(), "guest_written_bytes");
            assert_eq!(rates, [None, Some(10.0), None, None, Some(10.0)], "{of:?}");
        }
        // A reading that comes a little late, and the next one in time.
        histories.add(&figures(&[("desk-1", 1160)]), begun + Duration::from_secs(56));
        histories.add(&figures(&[("desk-1", 1200)]), begun + Duration::from_secs(60));
        let rates = values(&histories.of(&HistoryOf::Host, 20).unwrap(), "guest_written_bytes");
        assert_eq!(rates.len(), 2, "{rates:?}");
    }

    #[test]
    fn a_day_is_kept_by_the_minute_and_nothing_is_kept_longer() {
        let histories = Histories::default();
        let begun = since_boot();
        let rows = (DAY_ROWS + 10) * IN_ONE;
        for n in 0..rows as u64 {
            histories.add(&figures(&[("desk-1", n * 20)]), begun + STEP * n as u32);
        }
        let (host, machine) = (HistoryOf::Host, HistoryOf::Machine(name("desk-1")));
        let day = histories.of(&host, 86_400).unwrap();
        let rates = values(&day, "guest_written_bytes");
        assert!(
            day.step_seconds == 60 && rates.len() == DAY_ROWS && rates.iter().all(|rate| *rate == Some(2.0))
        );
        let fill = values(&day, "fill");
        let (newest, last) = (fill[DAY_ROWS - 1].unwrap(), (rows - 1) as f32 * 10.0 / 1000.0);
        assert!((last - 0.06..last).contains(&newest), "the mean of the last minute: {newest} of {last}");
        assert_eq!(values(&histories.of(&machine, 3600).unwrap(), "fill").len(), ROWS);
        assert_eq!(histories.of(&machine, 3601).unwrap_err().problem().code, ErrorCode::Invalid);
        assert_eq!(histories.table().objects[&machine].day.len(), 0);
    }

    #[test]
    fn a_gap_of_a_month_takes_no_time_and_is_a_gap() {
        let (histories, begun) = (Histories::default(), since_boot());
        histories.add(&figures(&[("desk-1", 100)]), begun);
        let (month, asleep) = (Duration::from_secs(30 * 86_400), std::time::Instant::now());
        for n in 0..100 {
            histories.add(&figures(&[("desk-1", 100)]), begun + month * 1000 * (n + 1));
        }
        assert!(asleep.elapsed() < Duration::from_secs(20), "{:?}", asleep.elapsed());
        for (of, seconds, rows) in
            [(HistoryOf::Machine(name("desk-1")), 3600, ROWS), (HistoryOf::Host, 86_400, DAY_ROWS)]
        {
            let fill = values(&histories.of(&of, seconds).unwrap(), "fill");
            let known = fill.iter().filter(|fill| fill.is_some()).count();
            assert!(fill.len() == rows && known <= 1, "{of:?}: {known} of {}", fill.len());
        }
    }

    /// The clock counts the time in which the host is suspended. In a time namespace it has been, for many days.
    #[test]
    fn the_clock_goes_on_while_the_host_is_suspended() {
        const ASLEEP: u64 = 1_000_000;
        const IN_NAMESPACE: &str = "SPILLWAY_TEST_IN_TIME_NAMESPACE";
        if std::env::var_os(IN_NAMESPACE).is_some() {
            println!("since boot: {} s", since_boot().as_secs());
            return;
        }
        let own = "machines::figures::history::tests::the_clock_goes_on_while_the_host_is_suspended";
        let mut child = std::process::Command::new("unshare");
        child.args(["--map-root-user", "--time", "--boottime", &ASLEEP.to_string()]);
        child.arg(std::env::current_exe().unwrap()).args(["--exact", own, "--nocapture"]);
        let awake = since_boot().as_secs();
        let output = child.env(IN_NAMESPACE, "1").output();
        let Some(output) = output.ok().filter(|output| output.status.success()) else {
            return spillway_testkit::skip("a time namespace cannot be made");
        };
        let output = String::from_utf8_lossy(&output.stdout);
        let clock = output.split_once("since boot: ").and_then(|(_, rest)| rest.split_once(" s"));
        let clock: u64 = clock.expect("it is printed").0.parse().unwrap();
        assert!((ASLEEP + awake..ASLEEP + awake + 60).contains(&clock), "{clock} s, and {awake} s without");
    }

    #[test]
    fn of_too_many_machines_the_first_by_name_are_kept() {
        let names: Vec<String> = (0..MOST_MACHINES + 5).rev().map(|n| format!("desk-{n:05}")).collect();
        let written: Vec<(&str, u64)> = names.iter().map(|name| (name.as_str(), 1)).collect();
        let histories = Histories::default();
        histories.add(&figures(&written), since_boot());
        assert_eq!(histories.table().objects.len(), MOST_MACHINES + 2);
        let of = |machine| values(&histories.of(&HistoryOf::Machine(name(machine)), 10).unwrap(), "fill");
        assert_eq!((of("desk-01999").len(), of("desk-02000").len()), (1, 0));
    }
}
