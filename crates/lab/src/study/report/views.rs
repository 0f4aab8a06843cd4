//! Host, machine and cache: each metric over time, beside the baseline, and in figures.
//!
//! Invariant: a metric without a value above 0 has no picture, only its name in a line of text.

use super::bars::{self, Bar};
use super::figures::{Figures, Spread, points, step, telling_unit};
use super::lines::{self, Line};
use super::numbers::{number, ratio};
use super::page::{Page, Table, figure, scenario};
use super::results::{Measured, Results};
use super::svg::Picture;
use crate::markup::plain;
use crate::study::{Better, Kind, METRICS, Metric, SUMS, View};
use anyhow::Result;

/// A metric as a report shows it.
pub struct Shown {
    /// Which.
    pub metric: &'static Metric,
    /// In the order of the study.
    pub figures: Vec<Option<Figures>>,
    /// Over time and as bars; none where there is nothing to see.
    pub pictures: Option<(Picture, Picture)>,
}

impl Shown {
    /// All metrics.
    pub fn all(results: &Results) -> Result<Vec<Shown>> {
        METRICS.iter().map(|metric| Shown::of(results, metric)).collect()
    }

    /// Sums over several, which only tables have.
    pub fn sums(results: &Results) -> [Shown; 2] {
        SUMS.each_ref().map(|metric| Shown::figures(results, metric))
    }

    fn figures(results: &Results, metric: &'static Metric) -> Shown {
        let figures = results.scenarios.iter().map(|measured| Figures::of(measured, metric)).collect();
        Shown { metric, figures, pictures: None }
    }

    fn of(results: &Results, metric: &'static Metric) -> Result<Shown> {
        let mut shown = Shown::figures(results, metric);
        let spreads = shown.telling();
        if spreads.iter().flatten().any(|spread| spread.high > 0.0) && results.shows(metric) {
            let points = |of: &Measured| points(of, metric, step(results));
            let lines = over_time(results, metric.title, metric.unit, step(results), &points)?;
            let what = if metric.kind == Kind::Rate { "total of the run" } else { "mean over the run" };
            shown.pictures =
                Some((lines, beside(results, metric.title, what, telling_unit(metric), &spreads)?));
        }
        Ok(shown)
    }

    /// By how much of the baseline's each scenario has: none where that is 0, or not known.
    pub fn relative(&self, results: &Results) -> Vec<Option<f64>> {
        let spreads = self.telling();
        let base = baseline(results, &spreads);
        spreads.iter().map(|spread| spread.as_ref()?.relative(base.as_ref())).collect()
    }

    /// What scenarios are compared by.
    fn telling(&self) -> Vec<Option<Spread>> {
        self.figures.iter().map(|f| f.as_ref()?.telling(self.metric)).collect()
    }
}

/// The baseline's value, in the order of the study.
fn baseline(results: &Results, spreads: &[Option<Spread>]) -> Option<Spread> {
    let name = &results.record.study.baseline;
    let place = results.scenarios.iter().position(|measured| measured.scenario.name == *name)?;
    spreads.get(place).copied().flatten().filter(|spread| spread.mean > 0.0)
}

/// A line for each scenario. `step` seconds lie between two points.
pub fn over_time(
    results: &Results,
    title: &str,
    unit: &str,
    step: usize,
    points: &dyn Fn(&Measured) -> Vec<Option<Spread>>,
) -> Result<Picture> {
    let line =
        |(place, measured): (usize, &'_ Measured)| (place, plain(&measured.scenario.name), points(measured));
    let found: Vec<_> = results.scenarios.iter().enumerate().map(line).collect();
    let known = |points: &[Option<Spread>]| points.iter().any(Option::is_some);
    let lines: Vec<Line> = found
        .iter()
        .filter(|(_, _, points)| known(points))
        .map(|(place, name, points)| Line { name, place: *place, points: points.clone() })
        .collect();
    lines::draw(&format!("{title}: over time"), unit, step, &lines)
}

/// A bar for each scenario, in percent of the baseline; `what` the values are, in the order of the study.
pub fn beside(
    results: &Results,
    title: &str,
    what: &str,
    unit: &str,
    spreads: &[Option<Spread>],
) -> Result<Picture> {
    let base = baseline(results, spreads);
    let names: Vec<String> = results.scenarios.iter().map(|m| plain(&m.scenario.name)).collect();
    let bar = |(place, spread): (usize, &Option<Spread>)| {
        let spread = *spread;
        let relative = spread.and_then(|s| s.relative(base.as_ref()));
        // In percent of the baseline, or as it is.
        let scale = base.map_or(1.0, |base| 100.0 / base.mean);
        let words = match (spread, relative) {
            (None, _) => "not measured".into(),
            (Some(s), Some(relative)) => format!("{} \u{b7} {} {unit}", ratio(relative), number(s.mean)),
            (Some(s), None) => format!("{} {unit}", number(s.mean)),
        };
        Bar {
            name: &names[place],
            place,
            value: spread.map(|s| s.mean * scale),
            spread: spread.filter(|s| s.runs > 1).map(|s| (s.low * scale, s.high * scale)),
            words,
        }
    };
    let bars: Vec<Bar> = spreads.iter().enumerate().map(bar).collect();
    let name = plain(&results.record.study.baseline);
    let (head, axis) = match base {
        Some(_) => (format!("{what}, {name} = 100%"), "%"),
        None => (what.to_string(), unit),
    };
    bars::draw(&format!("{title}: beside {name}"), Some(&head), Some(axis), &bars)
}

/// One chapter.
pub fn chapter(page: &mut Page, results: &Results, shown: &[Shown], view: View) {
    let (id, title, words) = match view {
        View::Host => ("host", "Host view", "What the host's storage and processors had to do."),
        View::Machine => {
            ("machine", "Machine view", "What machines asked for, and what they counted themselves.")
        }
        View::Cache => ("cache", "Cache view", "Where the cache served it."),
    };
    page.chapter(id, title);
    page.say("sub", words);
    let (mut zero, mut missing) = (Vec::new(), Vec::new());
    for one in shown.iter().filter(|one| one.metric.view == view && results.shows(one.metric)) {
        match (&one.pictures, one.figures.iter().flatten().next()) {
            (Some(pictures), _) => metric(page, results, one, pictures),
            (None, Some(_)) => zero.push(one.metric.title),
            (None, None) => missing.push(one.metric.title),
        }
    }
    for (what, titles) in [("Zero in all scenarios", zero), ("Not measured in any scenario", missing)] {
        if !titles.is_empty() {
            page.say("note", &format!("{what}: {}.", titles.join("; ")));
        }
    }
}

fn metric(page: &mut Page, results: &Results, shown: &Shown, (lines, bars): &(Picture, Picture)) {
    let metric = shown.metric;
    page.put("<section class=\"metric\">");
    page.part(metric.key, metric.title);
    let lower =
        if metric.better == Better::Lower && !results.is_by_time() { "Lower is better. " } else { "" };
    let without = if baseline(results, &shown.telling()).is_none() {
        "No baseline value: shown as they are. "
    } else {
        ""
    };
    pair(page, (lines, format!("{lower}{}", runs_words(results))), (bars, format!("{lower}{without}")));
    let note = results.note(metric);
    if !note.is_empty() {
        page.say("note", &format!("Note: {note}."));
    }
    page.put(&table(results, shown).html());
    page.put("</section>");
}

/// Two pictures side by side, with their captions.
pub fn pair(page: &mut Page, left: (&Picture, String), right: (&Picture, String)) {
    page.put("<div class=\"pair\">");
    for (picture, caption) in [left, right] {
        page.put(&format!("<figure>{}<figcaption>{caption}</figcaption></figure>", picture.inline()));
    }
    page.put("</div>");
}

/// What the lines' bands are.
pub fn runs_words(results: &Results) -> String {
    let counts: Vec<usize> = results.scenarios.iter().map(|m| m.runs.len()).filter(|n| *n > 0).collect();
    match (counts.iter().min(), counts.iter().max()) {
        (_, Some(1)) => "One run: no spread is known.".into(),
        (Some(1), Some(_)) => {
            "Line: mean of the runs; band: lowest to highest. Scenarios with one run have none: \
                               no spread is known."
                .into()
        }
        (Some(low), Some(high)) if low != high => {
            format!("Line: mean of {low} to {high} runs; band: lowest to highest.")
        }
        (_, Some(runs)) => format!("Line: mean of {runs} runs; band: lowest to highest."),
        _ => String::new(),
    }
}

fn table(results: &Results, shown: &Shown) -> Table {
    let metric = shown.metric;
    let several = shown.figures.iter().flatten().any(|f| f.machines > 1);
    let mut head = vec![String::new(), "of the baseline".into()];
    if metric.kind == Kind::Rate {
        head.push(format!("total, {}", telling_unit(metric)));
    }
    head.extend(["mean", "95th percentile", "peak"].map(|what| format!("{what}, {}", metric.unit)));
    if several {
        head.push("mean machine".into());
        head.push("95th percentile of machines".into());
    }
    let mut table = Table::new("figures", head);
    let relative = shown.relative(results);
    let has_baseline = baseline(results, &shown.telling()).is_some();
    for (place, measured) in results.scenarios.iter().enumerate() {
        let mut row = vec![scenario(place, &measured.scenario.name)];
        let Some(f) = &shown.figures[place] else {
            row.push("<span class=\"none\">not measured</span>".into());
            table.row(row);
            continue;
        };
        row.push(match relative[place] {
            Some(relative) => ratio(relative),
            None if has_baseline => "-".into(),
            None => "<span class=\"none\">no baseline value</span>".into(),
        });
        if metric.kind == Kind::Rate {
            row.push(figure(f.total.as_ref()));
        }
        row.extend([&f.mean, &f.p95, &f.peak].map(|spread| figure(spread.as_ref())));
        if several {
            row.extend([&f.machine_mean, &f.machine_p95].map(|spread| figure(spread.as_ref())));
        }
        table.row(row);
    }
    table
}
