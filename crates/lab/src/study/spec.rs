//! A study as its file says it: what is compared, by which work, at which pace, how often.
//!
//! Owns the words of the file and what may stand beside what. Never starts anything.

use super::expect::{self, Expectation};
use super::metric::METRICS;
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Bytes of a text that is shown.
const MOST_TEXT_BYTES: usize = 4000;
const MOST_SCENARIOS: usize = 100;
const MOST_RUNS: u32 = 1000;
const MOST_MACHINES: u32 = 1000;
/// Of a run.
const MOST_SECONDS: u64 = 7 * 86400;
const MOST_REST_SECONDS: f64 = 3600.0;

/// A study's file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Study {
    /// Its name: small letters, digits and `-`.
    pub name: String,
    /// A heading.
    pub title: String,
    /// What it asks, in a few sentences.
    pub question: String,
    /// Which of the five published measurements it repeats, if one: `000` to `004`, or a part with a study of its own: `001-desktops`,
    /// `002-iometer`, `004-boot`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed_document: Option<String>,
    /// By what something is smaller than there, 4 is a quarter, and of what. Time is no part of it: reports compute that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale: Option<Scale>,
    /// The scenario that is 100%.
    pub baseline: String,
    /// The base image of all disks that do not say another.
    #[serde(default)]
    pub image: Image,
    /// Keys of the metrics that its report shows; none for all. Files hold all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub metrics: Vec<String>,
    /// What is done.
    pub work: Work,
    /// How often.
    #[serde(default)]
    pub runs: Runs,
    /// The shorter form: what is other there.
    #[serde(default)]
    pub quick: Quick,
    /// What is compared.
    #[serde(rename = "scenario")]
    pub scenarios: Vec<Scenario>,
    /// What it is to show.
    #[serde(default, rename = "expect", skip_serializing_if = "Vec::is_empty")]
    pub expectations: Vec<Expectation>,
}

/// How much smaller than what it repeats.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scale {
    /// The divisor.
    pub factor: f64,
    /// Of what.
    pub of: String,
}

/// Runs of each scenario.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Runs {
    /// How many.
    pub count: u32,
    /// The longest that one may take, in seconds; then it is dropped.
    pub limit_seconds: u64,
    /// What all random choices of the work come from: run N of every scenario does the same.
    pub seed: u64,
    /// Seconds of rest before each.
    pub rest_seconds: f64,
}

impl Default for Runs {
    fn default() -> Runs {
        Runs { count: 3, limit_seconds: 900, seed: 1, rest_seconds: 1.0 }
    }
}

/// The shorter form.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Quick {
    /// Runs of each scenario.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u32>,
    /// Machines of each scenario.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machines: Option<u32>,
    /// Parameters of the work that are other.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub work: BTreeMap<String, toml::Value>,
}

/// A base image.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Image {
    /// The Debian of `make image`, for machines to boot.
    #[default]
    Golden,
    /// Nothing but zeroes, so many bytes: `empty:4G`.
    Empty(u64),
}

impl TryFrom<String> for Image {
    type Error = String;

    fn try_from(text: String) -> Result<Image, String> {
        let bytes = |size: &str| {
            let (digits, shift) = match size.as_bytes().last()? {
                b'M' => (&size[..size.len() - 1], 20),
                b'G' => (&size[..size.len() - 1], 30),
                _ => (size, 0),
            };
            let bytes = digits.parse::<u64>().ok()?.checked_mul(1 << shift)?;
            (bytes > 0 && bytes % 4096 == 0 && bytes <= 1 << 44).then_some(bytes)
        };
        match text.split_once(':') {
            None if text == "golden" => Ok(Image::Golden),
            Some(("empty", size)) => {
                bytes(size).map(Image::Empty).ok_or_else(|| format!("'{size}' is not a size of an image"))
            }
            _ => Err(format!("'{text}' is no image: golden, or empty:SIZE such as empty:4G")),
        }
    }
}

impl From<Image> for String {
    fn from(image: Image) -> String {
        match image {
            Image::Golden => "golden".into(),
            Image::Empty(bytes) => format!("empty:{bytes}"),
        }
    }
}

/// Where the work is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// Inside of real machines.
    Guest,
    /// Once inside of a real machine that is recorded; then the record is asked of each disk.
    Replay,
    /// From the host, through vhost-user.
    Host,
}

impl Engine {
    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            Engine::Guest => "guest",
            Engine::Replay => "replay",
            Engine::Host => "host",
        }
    }
}

/// What is done.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Work {
    /// The workload's name.
    pub workload: String,
    /// Where.
    pub engine: Engine,
    /// Parameters of the workload: its own words.
    #[serde(flatten)]
    pub parameters: BTreeMap<String, toml::Value>,
}

/// What is compared.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// Its name: small letters, digits and `-`.
    pub name: String,
    /// What it is, in a sentence.
    pub what: String,
    /// Options of `spillway serve` in the words of that command: mode, ram, overflow, base-cache...
    #[serde(default)]
    pub disk: BTreeMap<String, String>,
    /// The devices that it stands on, by plane (`base`, `overflow`): a storage model's name or parameters. Planes with the
    /// same words share one device, as all machines of the scenario do.
    #[serde(default)]
    pub storage: BTreeMap<String, String>,
    /// No disk of Spillway's at all: the guest's own ceiling on a disk that does nothing.
    #[serde(default, skip_serializing_if = "is_false")]
    pub null_disk: bool,
    /// Another base image than the study's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<Image>,
    /// Machines at a time.
    #[serde(default = "one")]
    pub machines: u32,
    /// Parameters of the work that are other here.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub work: BTreeMap<String, toml::Value>,
    /// Another engine than the study's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<Engine>,
}

fn one() -> u32 {
    1
}

fn is_false(value: &bool) -> bool {
    !value
}

impl Study {
    /// Reads and checks one. An error says where in the file.
    pub fn read(path: &Path) -> Result<Study> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("{}: cannot read", path.display()))?;
        Study::parse(&text).with_context(|| format!("{}", path.display()))
    }

    /// The same from text.
    pub fn parse(text: &str) -> Result<Study> {
        let study: Study = toml::from_str(text)?;
        study.check()?;
        Ok(study)
    }

    /// Whether it can be, whoever wrote it: names that can be names of files, and nothing without bounds.
    pub fn check(&self) -> Result<()> {
        check_name(&self.name)?;
        check_text("title", &self.title)?;
        check_text("question", &self.question)?;
        ensure!(!self.scenarios.is_empty(), "it has no scenario");
        check_count("scenario", self.scenarios.len(), MOST_SCENARIOS)?;
        for (i, scenario) in self.scenarios.iter().enumerate() {
            check_name(&scenario.name)?;
            check_text("what", &scenario.what).with_context(|| format!("scenario '{}'", scenario.name))?;
            ensure!(scenario.machines > 0, "scenario '{}' has no machines", scenario.name);
            check_count("machines", scenario.machines, MOST_MACHINES)
                .with_context(|| format!("scenario '{}'", scenario.name))?;
            let twice = self.scenarios[..i].iter().any(|earlier| earlier.name == scenario.name);
            ensure!(!twice, "two scenarios are called '{}'", scenario.name);
            for plane in scenario.storage.keys() {
                ensure!(
                    ["base", "overflow"].contains(&plane.as_str()),
                    "scenario '{}': a storage model is for 'base' or 'overflow', not '{plane}'",
                    scenario.name
                );
            }
            ensure!(
                !scenario.null_disk || (scenario.disk.is_empty() && scenario.storage.is_empty()),
                "scenario '{}': a null disk has neither options nor storage",
                scenario.name
            );
            // One recording serves all of them.
            let ours = |word: &String| ["speed", "threshold_ms", "start_every_s"].contains(&word.as_str());
            ensure!(
                self.engine(scenario) != Engine::Replay || scenario.work.keys().all(ours),
                "scenario '{}': what is replayed is one recording for all: only its speed can be other here",
                scenario.name
            );
            ensure!(
                self.engine(scenario) != Engine::Replay || *self.image(scenario) == Image::Golden,
                "scenario '{}': what is replayed was recorded on the golden image: image = \"golden\"",
                scenario.name
            );
        }
        ensure!(
            self.scenarios.iter().any(|s| s.name == self.baseline),
            "the baseline '{}' is none of its scenarios",
            self.baseline
        );
        for key in &self.metrics {
            let known = METRICS.iter().map(|metric| metric.key);
            ensure!(
                known.clone().any(|known| known == key),
                "'{key}' is no metric: {}",
                known.collect::<Vec<_>>().join(", ")
            );
        }
        expect::check(self)?;
        if let Some(scale) = &self.scale {
            check_text("scale.of", &scale.of)?;
            ensure!(scale.factor.is_finite() && scale.factor > 0.0, "scale.factor is a divisor");
        }
        ensure!(self.runs.count > 0 && self.quick.count != Some(0), "it has no runs");
        check_count("runs.count", self.runs.count.max(self.quick.count.unwrap_or(0)), MOST_RUNS)?;
        ensure!(self.quick.machines != Some(0), "its shorter form has no machines");
        check_count("quick.machines", self.quick.machines.unwrap_or(0), MOST_MACHINES)?;
        ensure!(self.runs.limit_seconds > 0, "no run may take any time");
        check_count("runs.limit_seconds", self.runs.limit_seconds, MOST_SECONDS)?;
        ensure!(
            (0.0..=MOST_REST_SECONDS).contains(&self.runs.rest_seconds),
            "runs.rest_seconds is a time, of at most {MOST_REST_SECONDS} s"
        );
        Ok(())
    }

    /// The shorter form.
    #[must_use]
    pub fn quick(mut self) -> Study {
        let quick = self.quick.clone();
        self.runs.count = quick.count.unwrap_or(self.runs.count);
        self.work.parameters.extend(quick.work);
        match quick.machines {
            Some(machines) => self.with_machines(machines),
            None => self,
        }
    }

    /// With so many machines in each scenario.
    #[must_use]
    pub fn with_machines(mut self, machines: u32) -> Study {
        self.scenarios.iter_mut().for_each(|s| s.machines = machines);
        self
    }

    /// A scenario by its name.
    pub fn scenario(&self, name: &str) -> Option<&Scenario> {
        self.scenarios.iter().find(|s| s.name == name)
    }

    /// The parameters of a scenario's work.
    pub fn parameters(&self, scenario: &Scenario) -> BTreeMap<String, toml::Value> {
        let mut parameters = self.work.parameters.clone();
        parameters.extend(scenario.work.clone());
        parameters
    }

    /// A number among them.
    pub fn number(&self, scenario: &Scenario, word: &str) -> Option<f64> {
        let value = scenario.work.get(word).or_else(|| self.work.parameters.get(word))?;
        value.as_float().or_else(|| value.as_integer().map(|n| n as f64))
    }

    /// What a scenario's disks are of.
    pub fn image<'a>(&'a self, scenario: &'a Scenario) -> &'a Image {
        scenario.image.as_ref().unwrap_or(&self.image)
    }

    /// Where a scenario's work is done.
    pub fn engine(&self, scenario: &Scenario) -> Engine {
        scenario.engine.unwrap_or(self.work.engine)
    }
}

/// Names become names of files.
fn check_name(name: &str) -> Result<()> {
    let good = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if name.is_empty() || name.len() > 60 || name.starts_with('-') || !name.chars().all(good) {
        bail!("'{name}' is no name: small letters, digits and '-'");
    }
    Ok(())
}

pub(super) fn check_text(what: &str, text: &str) -> Result<()> {
    ensure!(text.len() <= MOST_TEXT_BYTES, "{what}: {} bytes, {MOST_TEXT_BYTES} are the most", text.len());
    Ok(())
}

pub(super) fn check_count<T: PartialOrd + std::fmt::Display>(what: &str, count: T, most: T) -> Result<()> {
    ensure!(count <= most, "{what}: {count}, {most} are the most");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"
        name = "small"
        title = "A small one"
        question = "Does it work?"
        baseline = "direct"
        image = "empty:1G"
        [work]
        workload = "fio"
        engine = "host"
        profiles = ["fio-4k-x1"]
        seconds = 30
        [runs]
        count = 5
        [quick]
        count = 1
        machines = 2
        work = { seconds = 3 }
        [[scenario]]
        name = "direct"
        what = "in place"
        disk = { mode = "direct" }
        storage = { overflow = "hdd-seed-004" }
        [[scenario]]
        name = "ram"
        what = "in RAM"
        disk = { ram = "1G" }
    "#;

    #[test]
    fn a_file_is_read_and_its_shorter_form_is_shorter() {
        let study = Study::parse(FILE).unwrap();
        assert_eq!((study.runs.count, study.image.clone()), (5, Image::Empty(1 << 30)));
        assert_eq!(study.work.parameters["seconds"].as_integer(), Some(30));
        assert_eq!(study.scenario("ram").unwrap().machines, 1);
        let again = Study::parse(&toml::to_string(&study).unwrap()).unwrap();
        assert_eq!(again, study);
        let quick = study.quick();
        assert_eq!((quick.runs.count, quick.scenarios[1].machines), (1, 2));
        assert_eq!(quick.work.parameters["seconds"].as_integer(), Some(3));
        assert_eq!(quick.work.parameters["profiles"].as_array().map(Vec::len), Some(1));
    }

    #[test]
    fn what_cannot_be_is_refused_in_words() {
        for (from, to, why) in [
            ("name = \"small\"", "name = \"../up\"", "is no name"),
            ("name = \"ram\"", "name = \"direct\"", "two scenarios"),
            ("baseline = \"direct\"", "baseline = \"none\"", "is none of its scenarios"),
            ("empty:1G", "empty:17", "is not a size"),
            ("what = \"in RAM\"", "what = \"in RAM\"\nimage = \"full\"", "is no image"),
            (
                "image = \"empty:1G\"",
                "metrics = [\"host-reads\", \"temperature\"]",
                "'temperature' is no metric: host-cpu, ",
            ),
            ("empty:1G", "full", "is no image"),
            ("overflow = \"hdd", "ram = \"hdd", "storage model is for"),
            ("count = 5", "count = 0", "no runs"),
            ("what = \"in RAM\"", "wath = \"in RAM\"", "unknown field `wath`"),
        ] {
            assert!(FILE.contains(from), "{from}");
            let error = format!("{:#}", Study::parse(&FILE.replacen(from, to, 1)).unwrap_err());
            assert!(error.contains(why), "{why}: {error}");
        }
    }

    #[test]
    fn nothing_is_without_bounds() {
        let study = || Study::parse(FILE).unwrap();
        let refused = |change: &dyn Fn(&mut Study), why: &str| {
            let mut study = study();
            change(&mut study);
            let error = format!("{:#}", study.check().unwrap_err());
            assert!(error.contains(why), "{why}: {error}");
        };
        refused(&|s| s.title = "t".repeat(4001), "title: 4001 bytes");
        refused(&|s| s.question = "t".repeat(1 << 20), "question");
        refused(&|s| s.scenarios[1].what = "t".repeat(4001), "scenario 'ram': what");
        refused(&|s| s.runs.count = 1001, "runs.count: 1001");
        refused(&|s| s.quick.count = Some(u32::MAX), "runs.count");
        refused(&|s| s.quick.machines = Some(1001), "quick.machines");
        refused(&|s| s.quick.machines = Some(0), "shorter form has no machines");
        refused(&|s| s.scenarios[0].machines = 1001, "machines: 1001");
        refused(&|s| s.runs.limit_seconds = u64::MAX, "limit_seconds");
        for seconds in [3601.0, -1.0, f64::NAN, f64::INFINITY] {
            refused(&|s| s.runs.rest_seconds = seconds, "rest_seconds");
        }
        for factor in [0.0, -4.0, f64::NAN] {
            refused(&|s| s.scale = Some(Scale { factor, of: "RAM".into() }), "scale.factor");
        }
        let many = |s: &mut Study| {
            let more = s.scenarios[1].clone();
            s.scenarios.extend((0..99).map(|i| Scenario { name: format!("more-{i}"), ..more.clone() }));
        };
        refused(&many, "scenario: 101");
        let mut most = study();
        (most.runs.count, most.runs.limit_seconds, most.runs.rest_seconds) = (1000, 7 * 86400, 3600.0);
        (most.scenarios[0].machines, most.title) = (1000, "t".repeat(4000));
        most.check().unwrap();
    }
}
