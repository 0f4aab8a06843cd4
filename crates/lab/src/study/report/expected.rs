//! What a study was to show, and whether it did.
//!
//! Invariant: what was not measured does not hold.

use super::figures::Spread;
use super::measured::{is_sampled, metric_in_scenario};
use super::page::{Cell, Page, Table};
use super::results::Results;
use crate::numbers::number;
use crate::study::{Expectation, METRICS, SUMS, Scenario, Study, metric};
use crate::workload;
use anyhow::{Result, ensure};
use serde::Serialize;

/// An expectation, and what was found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CheckedExpectation {
    /// As the study has it.
    #[serde(flatten)]
    pub asked: Expectation,
    /// The scenario's figure; none where a run has none.
    pub value: Option<Spread>,
    /// The other's, that it is divided by.
    pub base: Option<Spread>,
    /// The mean, or the ratio of both; none where it is not known, or divided by 0.
    pub found: Option<f64>,
    /// Whether that is within the bounds.
    pub holds: bool,
}

impl CheckedExpectation {
    fn of(results: &Results, asked: &Expectation) -> CheckedExpectation {
        let value_of = |name: &str| value(results, name, &asked.figure);
        let (value, base) = (value_of(&asked.scenario), asked.beside.as_deref().and_then(value_of));
        let found = match asked.beside {
            None => value.map(|value| value.mean),
            Some(_) => value.and_then(|value| value.relative(base.as_ref())),
        };
        let holds = found.is_some_and(|found| asked.holds(found));
        CheckedExpectation { asked: asked.clone(), value, base, found, holds }
    }

    /// What was found, and what was to be.
    pub fn words(&self) -> String {
        format!("{}, to be {}", self.found(), self.bounds())
    }

    fn found(&self) -> String {
        match (self.value, self.base, self.found) {
            (None, ..) => "not measured in every run".into(),
            (Some(value), None, Some(_)) if value.runs > 1 && value.low != value.high => {
                format!("{} ({} to {})", number(value.mean), number(value.low), number(value.high))
            }
            (Some(value), None, Some(_)) => number(value.mean),
            (Some(value), None, None) => format!("{} / not measured in every run", number(value.mean)),
            (Some(value), Some(base), None) => format!("{} / {}", number(value.mean), number(base.mean)),
            (Some(value), Some(base), Some(found)) => {
                format!("{} ({} / {})", number(found), number(value.mean), number(base.mean))
            }
        }
    }

    fn bounds(&self) -> String {
        match (self.asked.least, self.asked.most) {
            (Some(least), Some(most)) => format!("{} to {}", number(least), number(most)),
            (Some(least), None) => format!("at least {}", number(least)),
            (None, Some(most)) => format!("at most {}", number(most)),
            (None, None) => "anything".into(),
        }
    }
}

/// All of a study.
pub fn all(results: &Results) -> Vec<CheckedExpectation> {
    results.record.study.expectations.iter().map(|asked| CheckedExpectation::of(results, asked)).collect()
}

/// None where a run has none.
fn value(results: &Results, scenario: &str, figure: &str) -> Option<Spread> {
    let measured = results.scenario(scenario)?;
    let found = match metric::named(figure) {
        Some(metric) => measured.figures(metric)?.telling(metric),
        None => measured.workload(figure),
    };
    found.filter(|found| found.runs == measured.runs.len())
}

/// Refuses a figure that a scenario cannot have, before it is run for hours.
pub fn check_expectations(study: &Study) -> Result<()> {
    for one in &study.expectations {
        for scenario in one.scenarios().filter_map(|name| study.scenario(name)) {
            let why = find_missing_figure(study, scenario, &one.figure)?;
            ensure!(why.is_none(), "expectation '{}': {}", one.what, why.unwrap_or_default());
        }
    }
    Ok(())
}

fn find_missing_figure(study: &Study, scenario: &Scenario, figure: &str) -> Result<Option<String>> {
    let name = &scenario.name;
    if let Some(metric) = metric::named(figure) {
        let metric = metric_in_scenario(metric, scenario);
        let mut sampled = metric.columns.iter().map(|column| is_sampled(column, study, scenario));
        // Of a processor's time, what there is.
        let known = if figure.starts_with("host-cpu") { sampled.any(|is| is) } else { sampled.all(|is| is) };
        return Ok((!known).then(|| format!("'{figure}' is not measured in scenario '{name}'")));
    }
    let parameters = study.parameters(scenario);
    let known = workload::figures(&study.work.workload, study.engine(scenario), &parameters)?;
    Ok((!known.iter().any(|known| known == figure)).then(|| {
        let metrics: Vec<_> = METRICS.iter().chain(&SUMS).map(|metric| metric.key).collect();
        let (metrics, known) = (metrics.join(", "), known.join(", "));
        format!("'{figure}' is neither a metric ({metrics}) nor a figure of scenario '{name}' ({known})")
    }))
}

/// Adds the table of what was expected, if anything was.
pub fn add_part(page: &mut Page, all: &[CheckedExpectation]) {
    if all.is_empty() {
        return;
    }
    page.part("expected", "What was expected");
    let mut table = Table::new("words", ["what", "figure", "to be", "found", ""]);
    for one in all {
        let beside = one.asked.beside.as_ref().map_or(String::new(), |base| format!(" / {base}"));
        table.row([
            Cell::text(&one.asked.what),
            Cell::code(&one.asked.figure).and_text(&format!(", {}{beside}", one.asked.scenario)),
            Cell::text(one.bounds()),
            Cell::text(one.found()),
            if one.holds { Cell::text("holds") } else { Cell::default().and_bold("does not hold") },
        ]);
    }
    page.table(table);
    page.say("note", "Said in the study's file. The mean of all runs that count.");
}

#[cfg(test)]
mod tests {
    use super::*;

    const STUDY: &str = "name = 'a'\ntitle = 'A'\nquestion = '?'\nbaseline = 'good'\n[work]\nworkload = 'fio'\nengine = 'guest'\n\
                         [[scenario]]\nname = 'good'\nwhat = 'it'\n[[scenario]]\nname = 'better'\nwhat = 'it'\n\
                         [[expect]]\nwhat = ''\nfigure = 'guest-reads'\nscenario = 'better'\nbeside = 'good'\nmost = 0.5";

    /// Two scenarios, and an expectation of the second beside the first.
    fn why(workload: &str, engine: &str, figure: &str, of_all: &str) -> Option<String> {
        let text =
            STUDY.replace("'fio'", &format!("'{workload}'")).replace("'guest'", &format!("'{engine}'"));
        let text =
            text.replace("what = 'it'\n", &format!("what = 'it'\n{of_all}\n")).replace("guest-reads", figure);
        check_expectations(&Study::parse(&text).unwrap()).err().map(|e| format!("{e:#}"))
    }

    #[test]
    fn what_no_scenario_can_have_is_refused() {
        let null = "null_disk = true";
        for (workload, engine, figure, of_all) in [
            ("boot", "guest", "host-io", ""),
            ("boot", "guest", "boot_s", ""),
            ("boot", "replay", "boot_s", ""),
            ("fio", "host", "host-cpu", ""),
            ("fio", "guest", "host-cpu", null),
            ("fio", "guest", "machine-reads", null),
            ("fio", "guest", "driver-writes", null),
            ("fio", "guest", "fio.iometer-citrix.p99_ms", null),
            ("session-host", "replay", "logon_s", ""),
            ("knowledge-worker", "guest", "driver-writes", ""),
        ] {
            assert_eq!(why(workload, engine, figure, of_all), None, "{workload} {engine}");
        }
        let full = "work = { speed = 'full' }";
        for (workload, engine, figure, of_all) in [
            ("boot", "guest", "host-oi", ""),
            ("boot", "guest", "logon_s", ""),
            ("boot", "guest", "machine-reads", ""),
            ("boot", "replay", "boot_s", full),
            ("boot", "replay", "machine-reads", ""),
            ("fio", "host", "fio.iometer-ctirix.iops", ""),
            ("fio", "guest", "guest-reads", null),
            ("file-copy", "guest", "logon_s", ""),
            ("session-host", "guest", "score.sessions", ""),
            ("knowledge-worker", "replay", "logon_s", full),
        ] {
            let found = why(workload, engine, figure, of_all).unwrap_or_default();
            assert!(found.contains(&format!("'{figure}' is n")), "{workload} {figure}: {found}");
            assert!(found.contains("scenario 'better'"), "{found}");
        }
        // What it is divided by must be known, too.
        let text = STUDY.replacen("what = 'it'\n", "what = 'it'\nnull_disk = true\n", 1);
        let error = format!("{:#}", check_expectations(&Study::parse(&text).unwrap()).unwrap_err());
        assert!(error.contains("'guest-reads' is not measured in scenario 'good'"), "{error}");
    }
}
