//! By how much a study's time is shorter than that of what it repeats.
//!
//! Invariant: computed from the parameters that the runs had, in either form of a study; never said by its file.

use super::results::Results;
use crate::numbers::{factor, number};
use crate::study::{Engine, Scenario, Study};

/// Seconds between two logons in the publication that a study repeats.
fn published_logon_s(study: &Study) -> Option<f64> {
    match study.seed_document.as_deref() {
        Some("001" | "001-desktops") => Some(30.0),
        Some("002") => Some(15.0),
        _ => None,
    }
}

/// The time of a scenario's work.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Times {
    /// By what the work divides users' pauses.
    pace: f64,
    /// How fast the recording was asked; none for as fast as disks answer.
    speed: Option<f64>,
    /// Between two logons as they were recorded, where there are several.
    logon_every_s: Option<f64>,
    /// The same in the publication.
    published_s: Option<f64>,
}

impl Times {
    /// None where no user waits.
    fn of(study: &Study, scenario: &Scenario) -> Option<Times> {
        let number = |word: &str| study.number(scenario, word).filter(|n| n.is_finite() && *n > 0.0);
        // As the workloads have it where nothing is said.
        let logon_every_s = match study.work.workload.as_str() {
            "session-host" => Some(number("logon_every_s").unwrap_or(30.0)),
            "logon-storm" => Some(number("logon_every_s").unwrap_or(15.0)),
            "knowledge-worker" | "file-copy" | "boot" => None,
            _ => return None,
        };
        let full = study.parameters(scenario).get("speed").and_then(toml::Value::as_str) == Some("full");
        let speed = match study.engine(scenario) {
            Engine::Replay if full => None,
            Engine::Replay => Some(number("speed").unwrap_or(1.0)),
            Engine::Guest | Engine::Host => Some(1.0),
        };
        let published_s = published_logon_s(study);
        Some(Times { pace: number("pace").unwrap_or(1.0), speed, logon_every_s, published_s })
    }

    /// What is other than in the publication, or than with real users; none where nothing is.
    fn words(&self) -> Option<String> {
        let Some(speed) = self.speed else {
            return Some("the recording was asked as fast as disks answer: no time is a user's".into());
        };
        let mut words = Vec::new();
        let pauses = self.pace * speed;
        if pauses != 1.0 {
            let how = match (self.pace != 1.0, speed != 1.0) {
                (true, true) => format!("pace {} x speed {}", number(self.pace), number(speed)),
                (true, false) => format!("pace {}", number(self.pace)),
                _ => format!("speed {}", number(speed)),
            };
            words.push(format!("users' pauses are divided by {} ({how})", number(pauses)));
        }
        if speed != 1.0 {
            words.push(format!("what machines compute between requests by {}", number(speed)));
        }
        let logon_s = self.logon_every_s.map(|seconds| seconds / speed);
        match (logon_s, self.published_s) {
            (Some(ours), Some(theirs)) if ours != theirs => words.push(format!(
                "a logon comes every {} s and not every {} s ({} as often)",
                number(ours),
                number(theirs),
                factor(theirs / ours)
            )),
            (Some(ours), None) if !words.is_empty() => {
                words.push(format!("a logon comes every {} s", number(ours)));
            }
            _ => {}
        }
        (!words.is_empty()).then(|| words.join("; "))
    }
}

/// Sentences on it, by scenarios where they differ; none where time is what it was there.
pub fn words(results: &Results) -> Vec<String> {
    let study = &results.record.study;
    let mut groups: Vec<(Option<String>, Vec<&str>)> = Vec::new();
    for scenario in &study.scenarios {
        let words = Times::of(study, scenario).and_then(|times| times.words());
        match groups.iter_mut().find(|(known, _)| *known == words) {
            Some((_, names)) => names.push(&scenario.name),
            None => groups.push((words, vec![&scenario.name])),
        }
    }
    let all = groups.len() == 1;
    let sentence = |(words, names): (Option<String>, Vec<&str>)| {
        let of = if all { String::new() } else { format!(" of {}", names.join(", ")) };
        Some(format!("Time is scaled{of}: {}.", words?))
    };
    groups.into_iter().filter_map(sentence).collect()
}

/// Whether rates per second of a scenario are not those of the publication.
pub fn is_scaled(study: &Study, scenario: &Scenario) -> bool {
    Times::of(study, scenario).is_some_and(|times| times.words().is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is said of all scenarios of a shipped study, in its long and its shorter form.
    fn said(name: &str) -> [Option<String>; 2] {
        let study = crate::study::shipped().unwrap().into_iter().find(|s| s.name == name).unwrap();
        [study.clone(), study.quick()].map(|study| {
            let of = |scenario| Times::of(&study, scenario).and_then(|times| times.words());
            let all: Vec<_> = study.scenarios.iter().map(of).collect();
            assert!(all.iter().all(|one| *one == all[0]), "{all:?}");
            assert_eq!(is_scaled(&study, &study.scenarios[0]), all[0].is_some());
            all[0].clone()
        })
    }

    #[test]
    fn shipped_studies_say_their_own_time_in_both_forms() {
        // In the long forms of three there are real users, and real logons.
        for (name, scaled) in [
            ("seed-000", [false, true]),
            ("seed-001", [true, true]),
            ("seed-001-desktops", [false, true]),
            ("seed-002", [false, true]),
            ("seed-002-iometer", [false, false]),
            ("seed-003", [false, false]),
            ("seed-004", [false, false]),
            ("seed-004-boot", [false, false]),
        ] {
            assert_eq!(said(name).map(|words| words.is_some()), scaled, "{name}");
        }
        for name in ["seed-000", "seed-001", "seed-001-desktops", "seed-002"] {
            let study = crate::study::shipped().unwrap().into_iter().find(|s| s.name == name).unwrap();
            for (study, words) in [study.clone(), study.quick()].iter().zip(said(name)) {
                let Some(words) = words else { continue };
                let of = |word: &str| {
                    let value = study.work.parameters.get(word)?;
                    value.as_float().or_else(|| value.as_integer().map(|n| n as f64))
                };
                let speed = of("speed").unwrap_or(1.0);
                let pauses = format!("pauses are divided by {} (pace", number(of("pace").unwrap() * speed));
                assert!(words.contains(&pauses), "{name}: {words}");
                let logons = of("logon_every_s").map(|s| format!("every {} s and not", number(s / speed)));
                assert_eq!(words.contains("a logon"), logons.is_some(), "{name}: {words}");
                assert!(logons.is_none_or(|logons| words.contains(&logons)), "{name}: {words}");
            }
        }
    }

    #[test]
    fn time_is_what_pace_speed_and_logons_make_of_it() {
        let times = Times { pace: 40.0, speed: Some(4.0), logon_every_s: Some(6.0), published_s: Some(30.0) };
        let expected = "users' pauses are divided by 160 (pace 40 x speed 4); what machines compute between requests by 4; \
                        a logon comes every 1.5 s and not every 30 s (\u{d7}20 as often)";
        assert_eq!(times.words().as_deref(), Some(expected));
        let slow = Times { pace: 1.0, speed: Some(0.5), ..times };
        assert!(slow.words().unwrap().contains("divided by 0.5 (speed 0.5)"));
        let real = Times { pace: 1.0, speed: Some(1.0), logon_every_s: Some(30.0), published_s: Some(30.0) };
        assert_eq!(real.words(), None);
        assert_eq!(Times { published_s: None, ..real }.words(), None);
        assert!(Times { speed: None, ..real }.words().unwrap().contains("no time is a user's"));
    }
}
