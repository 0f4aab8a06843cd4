//! What a study was to show, and whether it did.
//!
//! Invariant: what was not measured does not hold.

use super::figures::{Figures, measure};
use super::numbers::number;
use super::page::{Page, Table, safe};
use super::results::Results;
use crate::study::{Expectation, metric};
use serde::Serialize;

/// An expectation, and what was found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Expected {
    /// As the study has it.
    #[serde(flatten)]
    pub asked: Expectation,
    /// The mean of all runs, or the ratio of two; none where it was not measured, or divided by 0.
    pub found: Option<f64>,
    /// Whether that is within the bounds.
    pub holds: bool,
}

impl Expected {
    fn of(results: &Results, asked: &Expectation) -> Expected {
        let value = |name: &str| value(results, name, &asked.figure);
        let found = match &asked.beside {
            None => value(&asked.scenario),
            Some(base) => value(&asked.scenario).zip(value(base)).map(|(value, base)| value / base),
        };
        let found = found.filter(|found| found.is_finite());
        Expected { asked: asked.clone(), found, holds: found.is_some_and(|found| asked.holds(found)) }
    }

    /// What was found, and what was to be.
    pub fn words(&self) -> String {
        let found = self.found.map_or_else(|| "not measured".into(), number);
        format!("{found}, to be {}", self.bounds())
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
pub fn all(results: &Results) -> Vec<Expected> {
    results.record.study.expectations.iter().map(|asked| Expected::of(results, asked)).collect()
}

fn value(results: &Results, scenario: &str, figure: &str) -> Option<f64> {
    let measured = results.scenario(scenario)?;
    let found = match metric::named(figure) {
        Some(metric) => Figures::of(measured, metric)?.telling(metric),
        None => measure(measured, figure),
    };
    Some(found?.mean)
}

/// The part of the answer.
pub fn part(page: &mut Page, all: &[Expected]) {
    if all.is_empty() {
        return;
    }
    page.part("expected", "What it was to show");
    let mut table = Table::new("words", ["what", "figure", "to be", "found", ""]);
    for one in all {
        let beside = one.asked.beside.as_ref().map_or(String::new(), |base| format!(" / {base}"));
        let figure = format!("<code>{}</code>, {}", safe(&one.asked.figure), safe(&one.asked.scenario));
        table.row([
            safe(&one.asked.what),
            format!("{figure}{}", safe(&beside)),
            one.bounds(),
            one.found.map_or_else(|| "not measured".into(), number),
            if one.holds { "holds".into() } else { "<b>does not hold</b>".to_string() },
        ]);
    }
    page.put(&table.html());
    page.say("note", "Said in the study's file, before it was run. Over a run, and the mean of all runs.");
}
