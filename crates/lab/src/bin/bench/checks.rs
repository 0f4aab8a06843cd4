//! The figures that the project promises, set against those that were found.
//!
//! Owns the promised figures and nothing else. Invariant: a promise whose figure was not measured is not kept.

use crate::peers::DEPTH;
use crate::report::{Name, Point, Report, rate, time};
use crate::targets::Kind;
use serde::Serialize;

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

/// What is asked of a figure.
#[derive(Clone, Copy)]
pub enum Asked {
    /// So much or more.
    AtLeast(f64),
    /// So much or less.
    AtMost(f64),
}

impl Asked {
    /// Not a number meets nothing.
    fn is_met_by(self, found: f64) -> bool {
        match self {
            Asked::AtLeast(least) => found >= least,
            Asked::AtMost(most) => found <= most,
        }
    }
}

impl Check {
    /// As a line for people.
    pub fn line(&self) -> String {
        format!("{}  {}: {}", if self.pass { "PASS" } else { "FAIL" }, self.asked, self.found)
    }
}

/// Sets a report of the peers against what the project promises.
pub fn of(report: &Report) -> Vec<Check> {
    let times = |(name, kind), least, (peer_name, peer): (Name, Kind), words: &str| {
        let found = both(report, (name, DEPTH, kind), (peer_name, DEPTH, peer))
            .map(|(a, b)| (a.iops() / b.iops(), format!("{} against {}", rate(a.iops()), rate(b.iops()))));
        check(
            format!("{words}: at least {least} times the rate of {}", peer.name()),
            Asked::AtLeast(least),
            found,
        )
    };
    let (fits, tight, skewed) = (Name::Fits, Name::Tight, Name::Skewed);
    let mut checks = vec![
        times((fits, Kind::Spillway), 16.0, (fits, Kind::Qcow2Tmpfs), "in RAM, QD16"),
        times((fits, Kind::Spillway), 0.75, (fits, Kind::NullCo), "in RAM, QD16"),
        check(
            format!("in RAM, QD1: p50 at most 0.2 of that of {}", Kind::Qcow2Tmpfs.name()),
            Asked::AtMost(0.2),
            both(report, (fits, 1, Kind::Spillway), (fits, 1, Kind::Qcow2Tmpfs)).map(|(a, b)| {
                (a.p50_ns() / b.p50_ns(), format!("{} against {}", time(a.p50_ns()), time(b.p50_ns())))
            }),
        ),
        times((tight, Kind::SpillwayTight), 5.0, (tight, Kind::Qcow2Disk), "RAM for 40%, overflow 8G, QD16"),
        check(
            "RAM for 40%, overflow 8G, QD16: p99 in us at most 400".into(),
            Asked::AtMost(400.0),
            report.point(tight, DEPTH, Kind::SpillwayTight).map(|p| (p.p99_ns() / 1e3, time(p.p99_ns()))),
        ),
        check(
            "RAM for 40%, overflow 8G, QD16: at least 0.7 of the disk's bound".into(),
            Asked::AtLeast(0.7),
            report.bound.as_ref().map(|b| {
                let (ours, bound) = (b.middle(|r| r.measured.iops), b.middle(|r| r.bound_iops));
                (b.ratio(), format!("{} against {}", rate(ours), rate(bound)))
            }),
        ),
        times(
            (tight, Kind::SpillwayTighter),
            2.5,
            (tight, Kind::Qcow2Disk),
            "RAM for 40%, overflow 3G, QD16",
        ),
        times((skewed, Kind::SpillwayTight), 0.35, (skewed, Kind::Spillway), "RAM for 40%, skewed, QD16"),
    ];
    for target in report.targets.iter().filter(|t| t.kind.is_spillway()) {
        let (used, of) = target.at_rest;
        checks.push(check(
            format!("{}: CPU at rest, with a client connected, at most 0.005", target.kind.name()),
            Asked::AtMost(0.005),
            Some((used / of, format!("{:.0} ms in {of:.1} s", used * 1000.0))),
        ));
    }
    checks
}

type At = (Name, usize, Kind);

fn both(report: &Report, ours: At, peers: At) -> Option<(&Point, &Point)> {
    let point = |(name, depth, kind): At| report.point(name, depth, kind);
    point(ours).zip(point(peers))
}

/// Sets one figure, and what it was made of, against what is asked of it.
pub fn check(words: String, asked: Asked, found: Option<(f64, String)>) -> Check {
    let pass = found.as_ref().is_some_and(|(found, _)| asked.is_met_by(*found));
    let found = found.map_or_else(|| "not measured".into(), |(f, from)| format!("{f:.2} ({from})"));
    Check { asked: words, found, pass }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_passes_on_its_own_side_only() {
        let pass = |asked, found: f64| check(String::new(), asked, Some((found, String::new()))).pass;
        assert!(pass(Asked::AtLeast(2.5), 2.5) && !pass(Asked::AtLeast(2.5), 2.49));
        assert!(pass(Asked::AtMost(0.2), 0.2) && !pass(Asked::AtMost(0.2), 0.21));
        assert!(!pass(Asked::AtLeast(1.0), f64::NAN) && !pass(Asked::AtMost(1.0), f64::NAN));
    }

    #[test]
    fn what_was_not_measured_is_missed_and_said() {
        let missed = check("x".into(), Asked::AtMost(1.0), None);
        assert!(!missed.pass && missed.found == "not measured");
    }
}
