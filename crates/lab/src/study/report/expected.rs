//! What a study was to show, and whether it did.
//!
//! Invariant: what was not measured does not hold.

use super::figures::{Figures, Spread, measure};
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
    /// The scenario's figure; none where a run has none.
    pub value: Option<Spread>,
    /// The other's, that it is divided by.
    pub base: Option<Spread>,
    /// The mean, or the ratio of both; none where it is not known, or divided by 0.
    pub found: Option<f64>,
    /// Whether that is within the bounds.
    pub holds: bool,
}

impl Expected {
    fn of(results: &Results, asked: &Expectation) -> Expected {
        let value_of = |name: &str| value(results, name, &asked.figure);
        let (value, base) = (value_of(&asked.scenario), asked.beside.as_deref().and_then(value_of));
        let found = match asked.beside {
            None => value.map(|value| value.mean),
            Some(_) => value.and_then(|value| value.relative(base.as_ref())),
        };
        let holds = found.is_some_and(|found| asked.holds(found));
        Expected { asked: asked.clone(), value, base, found, holds }
    }

    /// What was found, and what was to be.
    pub fn words(&self) -> String {
        format!("{}, to be {}", self.found(), self.bounds())
    }

    fn found(&self) -> String {
        match (self.value, self.base, self.found) {
            (None, ..) => "not measured".into(),
            (Some(value), None, Some(_)) if value.runs > 1 && value.low != value.high => {
                format!("{} ({} to {})", number(value.mean), number(value.low), number(value.high))
            }
            (Some(value), None, Some(_)) => number(value.mean),
            (Some(value), None, None) => format!("{} / not measured", number(value.mean)),
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
pub fn all(results: &Results) -> Vec<Expected> {
    results.record.study.expectations.iter().map(|asked| Expected::of(results, asked)).collect()
}

fn value(results: &Results, scenario: &str, figure: &str) -> Option<Spread> {
    let measured = results.scenario(scenario)?;
    match metric::named(figure) {
        Some(metric) => Figures::of(measured, metric)?.telling(metric),
        None => measure(measured, figure),
    }
}

/// The part of the answer.
pub fn part(page: &mut Page, all: &[Expected]) {
    if all.is_empty() {
        return;
    }
    page.part("expected", "What was expected");
    let mut table = Table::new("words", ["what", "figure", "to be", "found", ""]);
    for one in all {
        let beside = one.asked.beside.as_ref().map_or(String::new(), |base| format!(" / {base}"));
        let figure = format!("<code>{}</code>, {}", safe(&one.asked.figure), safe(&one.asked.scenario));
        table.row([
            safe(&one.asked.what),
            format!("{figure}{}", safe(&beside)),
            one.bounds(),
            one.found(),
            if one.holds { "holds".into() } else { "<b>does not hold</b>".to_string() },
        ]);
    }
    page.put(&table.html());
    page.say("note", "Said in the study's file. The mean of all runs that count.");
}
