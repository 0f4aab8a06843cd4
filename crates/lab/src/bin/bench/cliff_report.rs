//! What the cliff looks like: as figures, as a table, as a chart, and where Spillway loses.
//!
//! Invariant: each figure shown is the median of the runs that are kept, and a loss is a loss by that figure, however
//! small.

use crate::cliff::Contender;
use crate::environment::{HostLatency, Origin};
use crate::report::{rate, time};
use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;
use spillway_lab::chart::{Dot, Panel, Scale, Series, Sheet};
use spillway_testkit::cores::median;
use spillway_testkit::steady::Settled;
use spillway_testkit::{Flow, Load, Measured};

/// Everything that was found, as it is kept.
#[derive(Serialize)]
pub struct Cliff {
    /// Form of this file.
    pub schema: u32,
    /// Where it was found.
    #[serde(flatten)]
    pub origin: Origin,
    /// Seconds measured per point and round.
    pub seconds: f64,
    /// Rounds.
    pub rounds: usize,
    /// Limit of Spillway's RAM tier.
    pub ram_bytes: u64,
    /// Limit of its overflow.
    pub overflow_bytes: u64,
    /// What was asked, but for the span.
    pub load: Load,
    /// The points.
    pub working_sets: Vec<WorkingSet>,
    /// Where Spillway is worse than a peer.
    pub losses: Vec<Loss>,
}

/// All disks at one working set.
#[derive(Serialize)]
pub struct WorkingSet {
    /// Its size in RAM tiers.
    pub tiers: f64,
    /// And in bytes.
    pub bytes: u64,
    /// How near cores and memory were before it was measured.
    pub before: HostLatency,
    /// And after it.
    pub after: HostLatency,
    /// The disks.
    pub disks: Vec<DiskPoint>,
}

/// One disk at one working set.
#[derive(Serialize)]
pub struct DiskPoint {
    /// Which.
    pub disk: Contender,
    /// How it was started.
    pub command: String,
    /// How it settled.
    pub settled: Settled,
    /// One measurement a round.
    pub runs: Vec<Measured>,
    /// Bytes written to the disk for each byte that was asked to be written, one a round; none where there is no disk,
    /// or where this user may not know.
    pub write_amplification: Vec<f64>,
    /// Where the requests went, one a round; Spillway's only.
    pub flows: Vec<Flow>,
}

/// Where Spillway is worse than a peer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Loss {
    /// In what.
    pub metric: Metric,
    /// Than which.
    pub peer: Contender,
    /// At which working set, in RAM tiers.
    pub tiers: f64,
    /// Spillway's figure.
    pub ours: f64,
    /// The peer's.
    pub theirs: f64,
}

/// What is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Requests a second.
    Iops,
    /// Median latency in nanoseconds.
    P50Ns,
    /// 99th percentile in nanoseconds.
    P99Ns,
    /// Bytes written to the disk for each byte written by the guest.
    WriteAmplification,
}

impl Metric {
    const ALL: [Metric; 4] = [Metric::Iops, Metric::P50Ns, Metric::P99Ns, Metric::WriteAmplification];

    fn name(self) -> &'static str {
        match self {
            Metric::Iops => "requests/s",
            Metric::P50Ns => "p50",
            Metric::P99Ns => "p99",
            Metric::WriteAmplification => "write amplification",
        }
    }

    fn title(self) -> &'static str {
        match self {
            Metric::Iops => "Requests a second (higher is better)",
            Metric::P50Ns => "Latency, p50 (lower is better)",
            Metric::P99Ns => "Latency, p99 (lower is better)",
            Metric::WriteAmplification => "Bytes to the disk / bytes written by the guest (lower is better)",
        }
    }

    fn scale(self) -> Scale {
        if self == Metric::WriteAmplification { Scale::Linear } else { Scale::Log }
    }

    fn write(self) -> fn(f64) -> String {
        match self {
            Metric::Iops => rate,
            Metric::P50Ns | Metric::P99Ns => time,
            Metric::WriteAmplification => |v| format!("{v:.2}"),
        }
    }

    fn is_worse(self, ours: f64, theirs: f64) -> bool {
        if self == Metric::Iops { ours < theirs } else { ours > theirs }
    }
}

impl DiskPoint {
    fn values(&self, metric: Metric) -> Vec<f64> {
        match metric {
            Metric::Iops => self.runs.iter().map(|r| r.iops).collect(),
            Metric::P50Ns => self.runs.iter().map(|r| r.p50_ns as f64).collect(),
            Metric::P99Ns => self.runs.iter().map(|r| r.p99_ns as f64).collect(),
            Metric::WriteAmplification => self.write_amplification.clone(),
        }
    }

    fn figure(&self, metric: Metric) -> Option<f64> {
        let mut values = self.values(metric);
        (!values.is_empty()).then(|| median(&mut values))
    }

    fn dot(&self, metric: Metric, tiers: f64) -> Option<Dot> {
        let values = self.values(metric);
        let low = values.iter().copied().fold(f64::INFINITY, f64::min);
        let high = values.iter().copied().fold(0.0, f64::max);
        Some(Dot { x: tiers, y: self.figure(metric)?, low, high })
    }
}

impl WorkingSet {
    fn figure(&self, disk: Contender, metric: Metric) -> Option<f64> {
        self.disks.iter().find(|d| d.disk == disk)?.figure(metric)
    }
}

/// Every figure in which a peer is better.
pub fn losses(working_sets: &[WorkingSet]) -> Vec<Loss> {
    let peers = Contender::ALL.into_iter().filter(|c| *c != Contender::Spillway);
    peers
        .flat_map(|peer| Metric::ALL.map(|metric| (peer, metric)))
        .flat_map(|(peer, metric)| working_sets.iter().map(move |set| (peer, metric, set)))
        .filter_map(|(peer, metric, set)| {
            let (ours, theirs) = (set.figure(Contender::Spillway, metric)?, set.figure(peer, metric)?);
            let loss = Loss { metric, peer, tiers: set.tiers, ours, theirs };
            metric.is_worse(ours, theirs).then_some(loss)
        })
        .collect()
}

impl Cliff {
    /// The losses, a line for each peer and metric.
    fn loss_lines(&self) -> Vec<String> {
        if self.losses.is_empty() {
            return vec!["Where we lose: nowhere in this run.".into()];
        }
        let lines = self.losses.chunk_by(|a, b| (a.peer, a.metric) == (b.peer, b.metric));
        lines
            .filter_map(|losses| {
                let first = losses.first()?;
                let write = first.metric.write();
                let at = |l: &Loss| format!("{} to {} at {}", write(l.ours), write(l.theirs), short(l.tiers));
                let all: Vec<String> = losses.iter().map(at).collect();
                let (metric, peer) = (first.metric.name(), first.peer.name());
                Some(format!("Where we lose: {metric} against {peer}: {} x RAM.", all.join(", ")))
            })
            .collect()
    }

    fn what(&self) -> String {
        format!(
            "4 KiB, 80% write, 90% random, uniform, QD{}; RAM tier {} MiB, overflow {} MiB; {} rounds of {} s a point, medians",
            self.load.depth,
            self.ram_bytes >> 20,
            self.overflow_bytes >> 20,
            self.rounds,
            self.seconds
        )
    }

    fn host_latency(&self) -> String {
        let times = || self.working_sets.iter().flat_map(|s| [s.before, s.after]);
        let span = |of: fn(HostLatency) -> f64| {
            let (low, high) = times().map(of).fold((f64::INFINITY, 0f64), |(l, h), v| (l.min(v), h.max(v)));
            format!("{low:.0} to {high:.0} ns")
        };
        format!(
            "Cross-core time {} from point to point; a bare 4 KiB copy to cold memory {}",
            span(|n| n.cross_core_ns),
            span(|n| n.cold_copy_ns)
        )
    }

    fn unsettled(&self) -> Option<String> {
        let restless: Vec<String> = self
            .working_sets
            .iter()
            .flat_map(|s| s.disks.iter().filter(|d| !d.settled.steady).map(move |d| (d.disk.name(), s.tiers)))
            .map(|(name, tiers)| format!("{name} at {}", short(tiers)))
            .collect();
        (!restless.is_empty())
            .then(|| format!("Not yet steady when measured, in the time for that: {}", restless.join("; ")))
    }

    /// Prints it for people.
    pub fn print(&self) {
        println!();
        self.origin.lines().iter().for_each(|line| println!("{line}"));
        println!("{}", self.origin.cores_line());
        println!("{}\n\nThe cliff: {}", self.host_latency(), self.what());
        let mut table = Table::new();
        table.load_preset(presets::ASCII_MARKDOWN);
        let mut header = vec!["working set / RAM", "disk"];
        header.extend(Metric::ALL.map(Metric::name));
        header.extend(["settled in", "spillway is"]);
        table.set_header(header);
        for set in &self.working_sets {
            let ours = set.figure(Contender::Spillway, Metric::Iops);
            for disk in &set.disks {
                let mut row = vec![short(set.tiers), disk.disk.name().to_string()];
                let figure = |m: Metric| disk.figure(m).map_or_else(|| "-".into(), |v| m.write()(v));
                row.extend(Metric::ALL.map(figure));
                let Settled { seconds, steady } = disk.settled;
                row.push(format!("{seconds:.1} s{}", if steady { "" } else { ", not steady" }));
                let theirs = disk.figure(Metric::Iops).filter(|_| disk.disk != Contender::Spillway);
                row.push(ours.zip(theirs).map_or_else(String::new, |(a, b)| format!("{:.2} x", a / b)));
                table.add_row(row);
            }
        }
        for column in table.column_iter_mut().skip(2) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        println!("{table}");
        self.unsettled().into_iter().chain(self.loss_lines()).for_each(|line| println!("{line}"));
    }

    /// The chart.
    pub fn sheet(&self) -> Sheet {
        let mut notes = self.origin.lines();
        notes.push(self.host_latency());
        notes.extend(self.unsettled());
        notes.extend(self.loss_lines());
        Sheet {
            title: "What happens when the RAM tier is full".into(),
            subtitle: vec![self.what(), "Thin lines: the best and the worst round".into()],
            panels: Metric::ALL.map(|metric| self.panel(metric)).into(),
            notes,
        }
    }

    fn panel(&self, metric: Metric) -> Panel {
        let dots = |disk: Contender| {
            let point = |set: &WorkingSet| {
                set.disks.iter().find(|d| d.disk == disk).and_then(|d| d.dot(metric, set.tiers))
            };
            self.working_sets.iter().filter_map(point).collect()
        };
        Panel {
            title: metric.title().into(),
            x_label: "working set / RAM tier".into(),
            mark: Some((1.0, "RAM tier full".into())),
            scale: metric.scale(),
            write: metric.write(),
            series: Contender::ALL.map(|disk| Series { name: disk.name().into(), dots: dots(disk) }).into(),
        }
    }
}

/// A size in RAM tiers.
fn short(tiers: f64) -> String {
    let text = format!("{tiers:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(disk: Contender, iops: f64, p99_ns: u64, write_amplification: Vec<f64>) -> DiskPoint {
        let run = |iops| Measured {
            requests: 1,
            reads: 0,
            seconds: 1.0,
            iops,
            mean_ns: 1.0,
            p50_ns: 1,
            p99_ns,
            max_ns: 9,
        };
        DiskPoint {
            disk,
            command: String::new(),
            settled: Settled { seconds: 1.0, steady: true },
            // One run that was disturbed says nothing.
            runs: vec![run(iops), run(iops), run(1.0)],
            write_amplification,
            flows: vec![],
        }
    }

    fn set(tiers: f64, disks: Vec<DiskPoint>) -> WorkingSet {
        let near = HostLatency { cross_core_ns: 1.0, cold_copy_ns: 1.0 };
        WorkingSet { tiers, bytes: 1, before: near, after: near, disks }
    }

    #[test]
    fn a_loss_is_a_median_that_a_peer_betters_and_nothing_else() {
        use Contender::{Qcow2Disk, Qcow2Tmpfs, Spillway};
        let sets = [
            set(
                0.5,
                vec![
                    disk(Spillway, 900.0, 5, vec![0.0]),
                    disk(Qcow2Disk, 80.0, 70, vec![1.0]),
                    disk(Qcow2Tmpfs, 100.0, 60, vec![]),
                ],
            ),
            set(
                4.0,
                vec![
                    disk(Spillway, 90.0, 50, vec![1.5]),
                    disk(Qcow2Disk, 80.0, 40, vec![1.0]),
                    disk(Qcow2Tmpfs, 100.0, 60, vec![]),
                ],
            ),
        ];
        let loss = |metric, peer, ours, theirs| Loss { metric, peer, tiers: 4.0, ours, theirs };
        assert_eq!(
            losses(&sets),
            [
                loss(Metric::P99Ns, Qcow2Disk, 50.0, 40.0),
                loss(Metric::WriteAmplification, Qcow2Disk, 1.5, 1.0),
                loss(Metric::Iops, Qcow2Tmpfs, 90.0, 100.0),
            ]
        );
    }

    #[test]
    fn working_sets_are_written_short() {
        assert_eq!([0.5, 0.75, 1.0, 1.25, 4.0, 10.0].map(short), ["0.5", "0.75", "1", "1.25", "4", "10"]);
    }
}
