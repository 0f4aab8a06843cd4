//! What a study is to show, as its file says it: a figure, and its bounds.
//!
//! Owns the words and whether a value is within them; the values are the report's.

use super::spec::{Study, check_count, check_text};
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};

const MOST: usize = 100;

/// A figure that is to be within bounds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Expectation {
    /// What that means, in a sentence.
    pub what: String,
    /// A metric's key: what it adds up to over a run, or a level's mean. Or a figure of the workload, as `boot_s`. The mean of all runs.
    pub figure: String,
    /// Of which scenario.
    pub scenario: String,
    /// Divided by the same of this scenario.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beside: Option<String>,
    /// At least so much.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub least: Option<f64>,
    /// At most so much.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub most: Option<f64>,
}

impl Expectation {
    /// Whether a value is within the bounds.
    pub fn holds(&self, value: f64) -> bool {
        // Also false of what is no number.
        self.least.is_none_or(|least| value >= least) && self.most.is_none_or(|most| value <= most)
    }

    /// The scenarios that it is about.
    pub fn scenarios(&self) -> impl Iterator<Item = &str> {
        std::iter::once(self.scenario.as_str()).chain(self.beside.as_deref())
    }

    /// Whether it can be true or false of a study.
    fn check(&self, study: &Study) -> Result<()> {
        for name in self.scenarios() {
            ensure!(study.scenario(name).is_some(), "'{name}' is none of its scenarios");
        }
        let bounds = [self.least, self.most];
        // No figure is below 0.
        ensure!(
            bounds.iter().flatten().all(|bound| *bound >= 0.0 && bound.is_finite()),
            "its bounds are no figures"
        );
        ensure!(
            self.beside.as_ref() != Some(&self.scenario),
            "it is divided by itself, so that it says nothing"
        );
        match bounds {
            [None, None] => bail!("it has neither 'least' nor 'most', so that it cannot fail"),
            [Some(least), None] => {
                ensure!(least > 0.0, "everything is at least {least}, so that it cannot fail")
            }
            [Some(least), Some(most)] => {
                ensure!(least <= most, "nothing is at least {least} and at most {most}")
            }
            _ => {}
        }
        Ok(())
    }
}

/// Whether all can be true or false of a study.
pub fn check(study: &Study) -> Result<()> {
    check_count("expect", study.expectations.len(), MOST)?;
    for one in &study.expectations {
        check_text("expect.what", &one.what)?;
        check_text("expect.figure", &one.figure)?;
        one.check(study).with_context(|| format!("expectation '{}'", one.what))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const STUDY: &str = "name = 'a'\ntitle = 'A'\nquestion = '?'\nbaseline = 'good'\n[work]\nworkload = 'boot'\nengine = 'guest'\n\
                         [[scenario]]\nname = 'good'\nwhat = 'it'\n[[scenario]]\nname = 'better'\nwhat = 'it'\n[[expect]]\n";

    fn read(expect: &str) -> Result<Study> {
        Study::parse(&format!("{STUDY}{expect}"))
    }

    #[test]
    fn what_cannot_fail_is_refused() {
        let whole = "what = 'less'\nfigure = 'host-io'\nscenario = 'better'\nbeside = 'good'\nmost = 0.5";
        let study = read(whole).unwrap();
        assert_eq!(Study::parse(&toml::to_string(&study).unwrap()).unwrap(), study);
        for (from, to, why) in [
            ("most = 0.5", "", "cannot fail"),
            ("most = 0.5", "least = 0", "cannot fail"),
            ("most = 0.5", "most = nan", "no figures"),
            ("most = 0.5", "most = -1", "no figures"),
            ("'good'", "'better'", "divided by itself"),
            ("most = 0.5", "most = 0.5\nleast = 0.6", "nothing is at least 0.6 and at most 0.5"),
            ("'better'", "'best'", "'best' is none of its scenarios"),
            ("'good'", "'best'", "'best' is none of its scenarios"),
            ("most", "moist", "unknown field"),
        ] {
            let error = format!("{:#}", read(&whole.replacen(from, to, 1)).unwrap_err());
            assert!(error.contains(why), "{why}: {error}");
        }
        let long = format!("what = '{}'\nfigure = 'host-io'\nscenario = 'good'\nmost = 1", "t".repeat(4001));
        let error = format!("{:#}", read(&long).unwrap_err());
        assert!(error.contains("4001 bytes") && error.len() < 200, "{error}");
    }

    #[test]
    fn bounds_are_within_them() {
        let of = |least, most| {
            let text = "what = ''\nfigure = 'boot_s'\nscenario = 'good'";
            Expectation { least, most, ..toml::from_str(text).unwrap() }
        };
        let both = of(Some(0.95), Some(1.05));
        assert_eq!(
            [0.94, 0.95, 1.05, 1.06, f64::NAN].map(|v| both.holds(v)),
            [false, true, true, false, false]
        );
        assert!(of(None, Some(0.0)).holds(0.0) && !of(None, Some(0.0)).holds(1.0));
        assert!(of(Some(2.0), None).holds(9.0) && !of(Some(2.0), None).holds(1.9));
    }
}
