//! The published figures that a study repeats, beside ours, and how far the two agree.
//!
//! Owns the judgement; the figures of each publication are in [`published`]. Invariant: what agrees is computed, never
//! said: by a factor, by direction, or not.

mod published;

use super::figures::Figures;
use super::page::{Cell, Page, Table};
use super::results::Results;
use super::scale;
use crate::numbers::{factor, number, ratio};
use crate::study::metric::named;
use serde::Serialize;

/// Figures whose ratio is at most this agree.
pub const WITHIN: f64 = 1.5;
/// Figures that differ by less than this share count as equal.
const EQUAL_WITHIN: f64 = 0.1;
/// A change by less than this share has no direction.
const LEAST_CHANGE: f64 = 0.05;
/// At most this share of the baseline counts as next to nothing.
const NEGLIGIBLE_SHARE: f64 = 0.05;

/// What a publication says of a figure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Published {
    /// This many times the baseline.
    Ratio(f64),
    /// This value, in our unit.
    Value(f64),
    /// Next to nothing of the baseline.
    Negligible,
    /// No noticeable difference.
    Unchanged,
    /// Less, without a figure.
    Falls,
    /// More, without a figure.
    Rises,
    /// It says nothing: the figure is ours only.
    Absent,
}

/// How far our figure and the published one agree.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "verdict", content = "factor")]
pub enum Verdict {
    /// Within [`WITHIN`]: how many times the larger is the smaller.
    Agrees(f64),
    /// The same direction; how many times theirs ours is, where theirs is a figure.
    Direction(Option<f64>),
    /// Neither in value nor in direction.
    Differs,
    /// One of both is not known.
    Unknown,
    /// It is no finding of its own, but what another row or the storage model gives already, or another measurement.
    NotJudged,
}

/// A published figure and ours.
#[derive(Clone, Debug, Serialize)]
pub struct ComparedFigure {
    /// What it is.
    pub what: String,
    /// What was published.
    pub theirs: String,
    /// What we measured.
    pub ours: String,
    /// How far they agree.
    #[serde(flatten)]
    pub verdict: Verdict,
    /// Why it may be so.
    pub note: &'static str,
}

/// What was published, and where our results have it.
struct Claim {
    what: String,
    theirs: Published,
    /// The published figures themselves.
    figures: &'static str,
    /// Our value, and what it is compared with; the ratio is what is judged.
    ours: Option<(f64, f64)>,
    counts: bool,
    note: &'static str,
}

/// All figures of the publication that a study repeats; none where it repeats none.
pub fn compare_figures(results: &Results) -> Vec<ComparedFigure> {
    let ours = StudyFigures(results);
    let claims = match results.record.study.seed_document.as_deref() {
        Some("000") => published::memory_and_overflow(&ours),
        Some("001") => published::session_hosts(&ours),
        Some("001-desktops") => published::desktops(&ours),
        Some("002") => published::logon_storm(&ours),
        Some("002-iometer") => published::iometer_on_a_filer(&ours),
        Some("003") => published::ephemeral(&ours),
        Some("004") => published::full_and_not(&ours),
        Some("004-boot") => published::boot(&ours),
        _ => Vec::new(),
    };
    claims.into_iter().map(Claim::judged).collect()
}

impl Claim {
    fn new(what: impl Into<String>, theirs: Published, ours: Option<(f64, f64)>) -> Claim {
        Claim { what: what.into(), theirs, figures: "", ours, counts: true, note: "" }
    }

    fn figures(mut self, figures: &'static str) -> Claim {
        self.figures = figures;
        self
    }

    /// Says why it is no finding of its own.
    fn given(mut self, why: &'static str) -> Claim {
        (self.counts, self.note) = (false, why);
        self
    }

    fn note(mut self, note: &'static str) -> Claim {
        self.note = note;
        self
    }

    fn judged(self) -> ComparedFigure {
        let value = self.ours.map(|(ours, base)| ours / base).filter(|value| value.is_finite());
        let of = |text: String| match self.figures {
            "" => text,
            figures => format!("{text} ({figures})"),
        };
        let theirs = match self.theirs {
            Published::Ratio(theirs) => of(ratio(theirs)),
            Published::Value(theirs) => of(number(theirs)),
            Published::Negligible => of("next to nothing".into()),
            Published::Unchanged => of("no difference".into()),
            Published::Falls => of("less".into()),
            Published::Rises => of("more".into()),
            Published::Absent => "-".into(),
        };
        let ours = match (self.ours, value) {
            (Some((ours, _)), Some(_)) if matches!(self.theirs, Published::Value(_)) => number(ours),
            (Some((ours, base)), Some(value)) => {
                format!("{} ({} / {})", ratio(value), number(ours), number(base))
            }
            _ => "not measured".into(),
        };
        let verdict = match value {
            None => Verdict::Unknown,
            Some(_) if !self.counts => Verdict::NotJudged,
            Some(value) => judge(self.theirs, value),
        };
        ComparedFigure { what: self.what, theirs, ours, verdict, note: self.note }
    }
}

/// Holds a ratio of ours against theirs.
fn judge(theirs: Published, ours: f64) -> Verdict {
    let direction = |value: f64| match value {
        v if v < 1.0 - LEAST_CHANGE => -1,
        v if v > 1.0 + LEAST_CHANGE => 1,
        _ => 0,
    };
    let when = |agrees: bool| if agrees { Verdict::Direction(None) } else { Verdict::Differs };
    match theirs {
        Published::Absent => Verdict::Unknown,
        Published::Falls => when(direction(ours) < 0),
        Published::Rises => when(direction(ours) > 0),
        Published::Unchanged if (ours - 1.0).abs() <= EQUAL_WITHIN => Verdict::Agrees(apart(ours, 1.0)),
        Published::Unchanged => Verdict::Differs,
        Published::Negligible if ours <= NEGLIGIBLE_SHARE => Verdict::Agrees(1.0),
        Published::Negligible => when(direction(ours) < 0),
        Published::Ratio(_) | Published::Value(_) if ours <= 0.0 => Verdict::Differs,
        Published::Ratio(theirs) | Published::Value(theirs) if apart(ours, theirs) <= WITHIN => {
            Verdict::Agrees(apart(ours, theirs))
        }
        Published::Ratio(theirs) if direction(ours) == direction(theirs) => {
            Verdict::Direction(Some(ours / theirs))
        }
        Published::Ratio(_) | Published::Value(_) => Verdict::Differs,
    }
}

/// The larger of two values divided by the smaller.
fn apart(a: f64, b: f64) -> f64 {
    (a / b).max(b / a)
}

impl Verdict {
    fn words(self) -> String {
        match self {
            Verdict::Agrees(apart) if apart < 1.1 => "agrees".into(),
            Verdict::Agrees(apart) => {
                format!("agrees within a factor of {}", number((apart * 100.0).ceil() / 100.0))
            }
            Verdict::Direction(Some(value)) if value > 1.0 => {
                format!("in direction only: ours is {} theirs", factor(value))
            }
            Verdict::Direction(Some(value)) => {
                format!("in direction only: theirs is {} ours", factor(1.0 / value))
            }
            Verdict::Direction(None) => "agrees in direction".into(),
            Verdict::Differs => "does not agree".into(),
            Verdict::Unknown => "cannot be compared".into(),
            Verdict::NotJudged => "not judged".into(),
        }
    }
}

/// One sentence on all of them.
pub fn sentence(all: &[ComparedFigure]) -> String {
    let count = |of: fn(&Verdict) -> bool| all.iter().filter(|b| of(&b.verdict)).count();
    let agree = count(|v| matches!(v, Verdict::Agrees(_)));
    let direction = count(|v| matches!(v, Verdict::Direction(_)));
    let differ = count(|v| matches!(v, Verdict::Differs));
    let unknown = count(|v| matches!(v, Verdict::Unknown));
    let compared = agree + direction + differ;
    let given = count(|v| matches!(v, Verdict::NotJudged));
    if compared == 0 && given == 0 {
        return "None of the published figures could be compared: these scenarios did not measure them."
            .into();
    }
    if compared == 0 {
        let unknown = if unknown > 0 { format!(" {unknown} were not measured.") } else { String::new() };
        return format!("None of the published figures is judged here, for the reason under each.{unknown}");
    }
    let rest = if unknown > 0 { format!(" {unknown} could not be compared.") } else { String::new() };
    let names = |what: &str, of: fn(&Verdict) -> bool| {
        let names: Vec<&str> = all.iter().filter(|b| of(&b.verdict)).map(|b| b.what.as_str()).collect();
        if names.is_empty() { String::new() } else { format!(" {what}: {}.", names.join("; ")) }
    };
    let named = names("What agrees", |v| matches!(v, Verdict::Agrees(_)))
        + &names("In direction", |v| matches!(v, Verdict::Direction(_)))
        + &names("What does not", |v| matches!(v, Verdict::Differs));
    let given = match given {
        0 => String::new(),
        _ => format!(" {given} more are not counted, for the reason under each."),
    };
    format!(
        "Of {compared} figures, {agree} agree within a factor of {WITHIN}, {direction} in direction only, and {differ} do not \
         agree.{named}{rest}{given}"
    )
}

/// Adds the chapter.
pub fn add_chapter(page: &mut Page, results: &Results, all: &[ComparedFigure]) {
    let Some(document) = &results.record.study.seed_document else { return };
    page.chapter("published", "Beside the published figures");
    if all.is_empty() {
        return page.say("note", &format!("No figures of the publication '{document}' are known here."));
    }
    page.say("", &sentence(all));
    let mut table = Table::new("words beside", ["what", "published", "ours", "agreement"]);
    for one in all {
        let cells = [&one.theirs, &one.ours, &one.verdict.words()].map(Cell::text);
        table.row([Cell::text(&one.what).and_small(one.note)].into_iter().chain(cells));
    }
    page.table(table);
    for words in scale::words(results) {
        page.say("note", &words);
    }
    for other in published::elsewhere(document) {
        page.say("note", &format!("Measured by a study of its own. {other}"));
    }
    page.say(
        "note",
        &format!(
            "Ratios: their machines, disks and guests were others, so that values themselves can agree only by chance, or \
             where a storage model was made after theirs. Our thresholds: a figure agrees within a factor of {WITHIN}; no \
             difference is at most {:.0}%, a direction more than {:.0}%, next to nothing at most {:.0}% of the baseline.",
            EQUAL_WITHIN * 100.0,
            LEAST_CHANGE * 100.0,
            NEGLIGIBLE_SHARE * 100.0
        ),
    );
}

/// Our results, as the publications ask for them.
struct StudyFigures<'a>(&'a Results);

impl StudyFigures<'_> {
    /// A metric's figures in a scenario.
    fn figures(&self, scenario: &str, key: &str) -> Option<&Figures> {
        self.0.scenario(scenario)?.figures(named(key)?)
    }

    /// What a metric adds up to.
    fn total(&self, scenario: &str, key: &str) -> Option<f64> {
        Some(self.figures(scenario, key)?.total?.mean)
    }

    /// A metric's totals in two scenarios.
    fn totals(&self, key: &str, scenario: &str, base: &str) -> Option<(f64, f64)> {
        Some((self.total(scenario, key)?, self.total(base, key)?))
    }

    /// What a metric is over time, in two scenarios.
    fn means(&self, key: &str, scenario: &str, base: &str) -> Option<(f64, f64)> {
        let mean = |name| Some(self.figures(name, key)?.mean?.mean);
        Some((mean(scenario)?, mean(base)?))
    }

    /// A workload's figure.
    fn measure(&self, scenario: &str, name: &str) -> Option<f64> {
        Some(self.0.scenario(scenario)?.workload(name)?.mean)
    }

    /// A workload's figure in two scenarios.
    fn measures(&self, name: &str, scenario: &str, base: &str) -> Option<(f64, f64)> {
        Some((self.measure(scenario, name)?, self.measure(base, name)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agreement_is_by_factor_by_direction_or_not() {
        let agrees = |theirs, ours| matches!(judge(theirs, ours), Verdict::Agrees(_));
        assert!(agrees(Published::Ratio(0.61), 0.5) && agrees(Published::Value(459.13), 470.0));
        assert_eq!(judge(Published::Ratio(0.5), 0.25), Verdict::Direction(Some(0.5)));
        assert_eq!(judge(Published::Ratio(0.5), 1.2), Verdict::Differs);
        assert_eq!(judge(Published::Ratio(0.5), 0.0), Verdict::Differs);
        assert!(agrees(Published::Negligible, 0.0) && agrees(Published::Unchanged, 1.08));
        assert_eq!(judge(Published::Negligible, 0.3), Verdict::Direction(None));
        assert_eq!(judge(Published::Unchanged, 1.3), Verdict::Differs);
        assert_eq!(judge(Published::Rises, 1.01), Verdict::Differs);
        assert_eq!(judge(Published::Falls, 0.2), Verdict::Direction(None));
    }

    #[test]
    fn a_value_that_is_far_off_does_not_agree() {
        assert_eq!(judge(Published::Value(100.0), 1000.0), Verdict::Differs);
    }

    #[test]
    fn the_sentence_counts() {
        let claims = [
            Claim::new("a", Published::Ratio(2.0), Some((4.0, 2.0))),
            Claim::new("b", Published::Rises, Some((4.0, 2.0))),
            Claim::new("c", Published::Falls, Some((4.0, 2.0))),
            Claim::new("d", Published::Ratio(2.0), Some((4.0, 0.0))),
            Claim::new("e", Published::Ratio(2.0), None),
            Claim::new("f", Published::Ratio(2.0), Some((4.0, 2.0))).given("it is a"),
        ];
        let all: Vec<ComparedFigure> = claims.into_iter().map(Claim::judged).collect();
        let expected = "Of 3 figures, 1 agree within a factor of 1.5, 1 in direction only, and 1 do not agree. What agrees: a. In direction: b. What does not: c. 2 could not be \
                        compared. 1 more are not counted, for the reason under each.";
        assert_eq!(sentence(&all), expected);
        assert_eq!(all[0].ours, "200% (4 / 2)");
        assert!(sentence(&[]).contains("did not measure them"));
        assert_eq!(
            sentence(&all[5..]),
            "None of the published figures is judged here, for the reason under each."
        );
        assert!(
            sentence(&all[4..]).ends_with("is judged here, for the reason under each. 1 were not measured.")
        );
        let verdicts = [&all[0], &all[4], &all[5]].map(|one| one.verdict.words());
        assert_eq!(verdicts, ["agrees", "cannot be compared", "not judged"]);
    }
}
