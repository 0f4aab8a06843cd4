//! Values of one metric of a run, second by second, from its samples.
//!
//! Invariants: a sum that goes back never makes a negative rate; what was not sampled is not known, and is not drawn;
//! nothing from before the work's begin counts.

use crate::numbers::plausible;
use crate::study::{Kind, Metric, Samples};
use std::collections::BTreeMap;

/// Longer than this between two samples is a gap, or three times what is usual for a machine.
const GAP_SECONDS: f64 = 3.0;
/// However rarely a machine is looked at, longer than this is a gap.
const LONGEST_SECONDS: f64 = 60.0;
/// A second is known once this share of it is.
const KNOWN: f64 = 0.5;

/// One metric of one run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Series {
    /// Second by second, all machines added up.
    pub seconds: Vec<Option<f64>>,
    /// By how much the sums grew, all machines added up; none for levels.
    pub total: Option<f64>,
    /// The mean of each machine over its own time.
    pub machines: Vec<f64>,
}

/// A run's rows by machine, each by time.
pub struct Rows<'a> {
    samples: &'a Samples,
    machines: Vec<Vec<usize>>,
}

impl<'a> Rows<'a> {
    /// Puts rows in order.
    pub fn of(samples: &'a Samples) -> Rows<'a> {
        let mut machines: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        for (i, row) in samples.rows.iter().enumerate() {
            machines.entry(row.machine).or_default().push(i);
        }
        let time = |i: &usize| samples.rows[*i].time_s;
        let mut machines: Vec<Vec<usize>> = machines.into_values().collect();
        machines.iter_mut().for_each(|rows| rows.sort_by(|a, b| time(a).total_cmp(&time(b))));
        Rows { samples, machines }
    }

    /// Returns one metric, or `None` if the run did not measure it.
    pub fn series(&self, metric: &Metric) -> Option<Series> {
        let place = |name: &&str| self.samples.columns.iter().position(|column| column == *name);
        let present: Vec<Option<usize>> = metric.columns.iter().map(place).collect();
        // A process that there is not uses no processor.
        let missing = |(name, column): (&&str, &Option<usize>)| column.is_none() && !name.starts_with("cpu.");
        if metric.columns.iter().zip(&present).any(missing) {
            return None;
        }
        let columns: Vec<usize> = present.into_iter().flatten().collect();
        let mut sum = Sum::default();
        let mut machines = Vec::new();
        let mut total = 0.0;
        for rows in &self.machines {
            let parts: Vec<Vec<(f64, f64)>> = columns.iter().map(|&c| self.points(rows, c)).collect();
            // A sum needs samples of all columns.
            let parts: Vec<Trace> =
                parts.iter().filter_map(|points| Trace::of(points, metric.kind, metric.scale)).collect();
            if parts.is_empty() || parts.len() < columns.len() && !metric.columns[0].starts_with("cpu.") {
                continue;
            }
            total += parts.iter().map(|part| part.total).sum::<f64>();
            machines.push(parts.iter().map(|part| part.mean).sum());
            sum.add(&parts);
        }
        if machines.is_empty() {
            return None;
        }
        let total = (metric.kind == Kind::Rate).then_some(total);
        Some(Series { seconds: sum.seconds(), total, machines })
    }

    /// The samples of a column, by time.
    fn points(&self, rows: &[usize], column: usize) -> Vec<(f64, f64)> {
        let known = |&i: &usize| {
            let row = &self.samples.rows[i];
            // Each is looked at when the work begins.
            if row.time_s < 0.0 {
                return None;
            }
            Some((row.time_s, row.values.get(column).copied().flatten().and_then(plausible)?))
        };
        rows.iter().filter_map(known).collect()
    }
}

/// One column of one machine: for each second what it amounts to, and how much of the second is known.
struct Trace {
    first: usize,
    seconds: Vec<(f64, f64)>,
    total: f64,
    mean: f64,
}

impl Trace {
    /// Returns `None` if no time lies between two samples.
    fn of(points: &[(f64, f64)], kind: Kind, scale: f64) -> Option<Trace> {
        let (begin, end) = (points.first()?.0, points.last()?.0);
        let first = begin.floor();
        let gap = gap(points);
        let mut seconds = vec![(0.0, 0.0); (end.ceil() - first).max(0.0) as usize];
        let (mut total, mut area, mut known) = (0.0, 0.0, 0.0);
        for pair in points.windows(2) {
            let [(t0, v0), (t1, v1)] = [pair[0], pair[1]];
            if t1 <= t0 {
                continue;
            }
            // At a time, as a straight line between the two says.
            let at = |t: f64| v0 + (v1 - v0) * (t - t0) / (t1 - t0);
            if kind == Kind::Rate {
                if v1 < v0 {
                    continue;
                }
                total += (v1 - v0) * scale;
            }
            if t1 - t0 > gap {
                continue;
            }
            let mut t = t0;
            while t < t1 {
                let second = t.floor();
                let next = (second + 1.0).min(t1);
                let part = match kind {
                    Kind::Rate => at(next) - at(t),
                    Kind::Level => (at(t) + at(next)) / 2.0 * (next - t),
                } * scale;
                if let Some(place) = seconds.get_mut((second - first) as usize) {
                    *place = (place.0 + part, place.1 + next - t);
                }
                (area, known) = (area + part, known + next - t);
                t = next;
            }
        }
        let span = end - begin;
        let mean = match kind {
            Kind::Rate if span > 0.0 => total / span,
            Kind::Level if known > 0.0 => area / known,
            _ => return None,
        };
        Some(Trace { first: first as usize, seconds, total, mean })
    }
}

/// Longest gap between two samples of this machine that is still interpolated.
fn gap(points: &[(f64, f64)]) -> f64 {
    let mut steps: Vec<f64> = points.windows(2).map(|pair| pair[1].0 - pair[0].0).collect();
    steps.sort_by(f64::total_cmp);
    let usual = steps.get(steps.len() / 2).copied().unwrap_or(1.0);
    (usual * 3.0).clamp(GAP_SECONDS, LONGEST_SECONDS)
}

/// Machines added up: the sum of those that are there, and none while one of them is not known.
#[derive(Default)]
struct Sum {
    seconds: Vec<(f64, bool, bool)>,
}

impl Sum {
    /// Adds a machine: the traces of its columns.
    fn add(&mut self, parts: &[Trace]) {
        let there = |part: &Trace| {
            let known = |second: &(f64, f64)| second.1 >= KNOWN;
            let from = part.first + part.seconds.iter().position(known)?;
            Some((from, part.first + part.seconds.iter().rposition(known)?))
        };
        let spans: Vec<(usize, usize)> = parts.iter().filter_map(there).collect();
        let (Some(from), Some(to)) = (spans.iter().map(|s| s.0).min(), spans.iter().map(|s| s.1).max())
        else {
            return;
        };
        if self.seconds.len() <= to {
            self.seconds.resize(to + 1, (0.0, false, false));
        }
        for (second, place) in self.seconds.iter_mut().enumerate().take(to + 1).skip(from) {
            place.1 = true;
            for part in parts {
                let cell = second.checked_sub(part.first).and_then(|i| part.seconds.get(i));
                match cell.filter(|cell| cell.1 >= KNOWN) {
                    Some((amount, share)) => place.0 += amount / share,
                    None => place.2 = true,
                }
            }
        }
    }

    fn seconds(self) -> Vec<Option<f64>> {
        let second = |(sum, there, unknown): (f64, bool, bool)| (there && !unknown).then_some(sum);
        self.seconds.into_iter().map(second).collect()
    }
}

/// Fewer points of the same: the mean of each `step` seconds of which at least half are known.
pub fn coarse(seconds: &[Option<f64>], step: usize) -> Vec<Option<f64>> {
    let mean = |part: &[Option<f64>]| {
        let known: Vec<f64> = part.iter().copied().flatten().collect();
        (known.len() * 2 >= part.len() && !known.is_empty())
            .then(|| known.iter().sum::<f64>() / known.len() as f64)
    };
    seconds.chunks(step.max(1)).map(mean).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::study::METRICS;

    fn metric(key: &str) -> &'static Metric {
        METRICS.iter().find(|metric| metric.key == key).unwrap()
    }

    /// Rows of machine, time and one column.
    fn samples(column: &str, rows: &[(u32, f64, f64)]) -> Samples {
        let mut samples = Samples::default();
        for (machine, time, value) in rows {
            samples.add(*machine, *time, &[(column.to_string(), *value)].into());
        }
        samples
    }

    fn series(column: &str, key: &str, rows: &[(u32, f64, f64)]) -> Option<Series> {
        Rows::of(&samples(column, rows)).series(metric(key))
    }

    #[test]
    fn a_rate_is_what_a_sum_grows_by() {
        let rows = [(0, 0.0, 100.0), (0, 1.0, 110.0), (0, 2.0, 110.0), (0, 4.0, 150.0)];
        let found = series("planes.overflow.writes", "overflow-writes", &rows).unwrap();
        assert_eq!(found.seconds, [Some(10.0), Some(0.0), Some(20.0), Some(20.0)]);
        assert_eq!((found.total, found.machines), (Some(50.0), vec![12.5]));
    }

    #[test]
    fn what_was_before_the_work_does_not_count() {
        let rows = [(0, -10.0, 0.0), (0, -0.5, 1000.0), (0, 0.5, 1010.0), (0, 1.5, 1020.0)];
        let found = series("planes.ram.reads", "ram-reads", &rows).unwrap();
        assert_eq!(found.total, Some(10.0));
        assert_eq!(found.seconds, [Some(10.0), Some(10.0)]);
        assert_eq!(series("planes.ram.reads", "ram-reads", &[(0, -2.0, 0.0), (0, -1.0, 9.0)]), None);
    }

    #[test]
    fn a_sum_that_goes_back_is_no_negative_rate() {
        let rows = [(0, 0.0, 50.0), (0, 1.0, 60.0), (0, 2.0, 3.0), (0, 3.0, 4.0)];
        let found = series("cpu.worker_s", "host-cpu-worker", &rows).unwrap();
        assert_eq!(found.seconds, [Some(1000.0), None, Some(100.0)]);
        assert_eq!(found.total, Some(1100.0));
    }

    #[test]
    fn gaps_stay_gaps_and_their_growth_is_in_the_total() {
        let rows = [(0, 0.0, 0.0), (0, 1.0, 1.0), (0, 2.0, 2.0), (0, 9.0, 100.0), (0, 10.0, 101.0)];
        let found = series("planes.ram.reads", "ram-reads", &rows).unwrap();
        assert_eq!(found.total, Some(101.0));
        assert_eq!(found.seconds[..3], [Some(1.0), Some(1.0), None]);
        assert_eq!(found.seconds[8..], [None, Some(1.0)]);
    }

    #[test]
    fn machines_add_up_and_one_that_has_ended_is_not_missed() {
        let rows = [(0, 0.0, 0.0), (0, 1.0, 5.0), (0, 2.0, 10.0), (3, 0.0, 7.0), (3, 1.0, 8.0)];
        let found = series("planes.ram.reads", "ram-reads", &rows).unwrap();
        assert_eq!(found.seconds, [Some(6.0), Some(5.0)]);
        assert_eq!(found.machines, [5.0, 1.0]);
    }

    #[test]
    fn a_machine_that_is_not_known_for_a_while_leaves_the_sum_unknown() {
        let mut rows: Vec<(u32, f64, f64)> =
            (0..=20).map(|t| (0, f64::from(t), 10.0 * f64::from(t))).collect();
        rows.extend((0..=20).filter(|t| !(5..15).contains(t)).map(|t| (1, f64::from(t), f64::from(t))));
        let found = series("planes.ram.reads", "ram-reads", &rows).unwrap();
        assert_eq!((found.seconds[2], found.seconds[10], found.seconds[18]), (Some(11.0), None, Some(11.0)));
        assert_eq!(found.total, Some(220.0));
    }

    #[test]
    fn levels_have_no_total() {
        let rows = [(0, 0.0, 2e6), (0, 1.0, 4e6), (0, 2.0, 4e6)];
        let found = series("ram.used_bytes", "ram-used", &rows).unwrap();
        assert_eq!(found.seconds, [Some(3.0), Some(4.0)]);
        assert_eq!((found.total, found.machines), (None, vec![3.5]));
    }

    #[test]
    fn a_metric_needs_its_columns_but_for_processes_that_there_are_not() {
        let rows = [(0, 0.0, 0.0), (0, 1.0, 0.5)];
        assert_eq!(series("inside.reads", "driver-reads", &rows), None);
        assert_eq!(series("cpu.worker_s", "host-cpu", &rows).unwrap().seconds, [Some(50.0)]);
    }

    #[test]
    fn strange_values_are_not_known() {
        let rows =
            [(0, 0.0, 1.0), (0, 1.0, f64::NAN), (0, 2.0, f64::INFINITY), (0, 2.5, -7.0), (0, 3.0, 4.0)];
        let found = series("planes.ram.reads", "ram-reads", &rows).unwrap();
        assert_eq!(found.seconds, [Some(1.0); 3]);
        assert_eq!(series("planes.ram.reads", "ram-reads", &[(0, 0.0, 1.0)]), None);
        assert_eq!(series("planes.ram.reads", "ram-reads", &[]), None);
    }

    #[test]
    fn longer_runs_are_drawn_with_fewer_points() {
        let seconds = [Some(1.0), Some(3.0), None, None, Some(5.0)];
        assert_eq!(coarse(&seconds, 2), [Some(2.0), None, Some(5.0)]);
        assert_eq!(coarse(&[], 0), []);
    }
}
