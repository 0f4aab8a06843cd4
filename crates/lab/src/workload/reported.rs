//! What a machine has said, held to what it was asked.
//!
//! Invariant: a machine may say anything; what nobody asked, what comes out of turn, and less than was asked is an error.

use super::lines::Line;
use super::machines::Orders;
use anyhow::{Result, bail, ensure};
use serde_json::Value;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// What machines count, each second.
const COUNTED: [&str; 5] = ["reads", "read_bytes", "writes", "written_bytes", "cpu_s"];
/// What users do.
const ACTIONS: [&str; 8] = ["logon", "open", "edit", "save", "mail", "browse", "compress", "copy"];
/// What fio does before work begins.
const FILL: &str = "fill";

/// How far a machine has come, by the host's clock. Steps come in this order, each once.
#[derive(Default)]
pub struct Course {
    /// It has come up.
    pub up: Option<Instant>,
    /// It waits for the word to begin.
    pub ready: bool,
    /// It was told.
    pub told: Option<Instant>,
    /// It has counted what was before.
    pub begun: bool,
    /// It has done all.
    pub done: Option<Instant>,
}

impl Course {
    /// What it says must be what can come now; `boot`: to come up is all that it has to do.
    pub fn heard(&mut self, line: &Line, now: Instant, boot: bool) -> Result<()> {
        ensure!(self.done.is_none(), "it goes on when it is done");
        match line {
            Line::Up { .. } => {
                ensure!(self.up.is_none(), "it says twice that it is up");
                self.up = Some(now);
                self.ready = boot;
                self.done = boot.then_some(now);
            }
            Line::Ready { .. } => {
                ensure!(self.up.is_some() && !self.ready, "it is ready before it is up, or twice");
                self.ready = true;
            }
            Line::Fio { fio, .. } if fio == FILL => {
                ensure!(self.up.is_some() && !self.ready, "it fills its disk out of turn")
            }
            Line::Inside { begins: true, .. } => {
                ensure!(self.told.is_some() && !self.begun, "it begins before it was told to, or twice");
                self.begun = true;
            }
            Line::Action { .. } | Line::Fio { .. } => {
                ensure!(self.begun, "it did something before it began")
            }
            Line::Done { .. } => {
                ensure!(self.begun, "it is done before it began");
                self.done = Some(now);
            }
            Line::Inside { .. } => ensure!(self.up.is_some(), "it counts before it is up"),
            Line::Error { .. } => {}
        }
        Ok(())
    }
}

/// What a machine has said that it did. It may say anything: what was not asked of it is an error.
#[derive(Default)]
pub struct Reported {
    /// Who did what, from when, and how long in milliseconds.
    pub did: Vec<(u32, String, f64, f64)>,
    /// Loads of fio, from when, and what fio says.
    pub loads: Vec<(String, f64, Value)>,
    /// How often it has counted.
    looks: u64,
}

impl Reported {
    /// Somebody did something.
    pub fn action(
        &mut self,
        asked: &Orders,
        session: u32,
        name: String,
        at: f64,
        took_ms: f64,
    ) -> Result<()> {
        ensure!(session < asked.sessions, "it reports session {session}, and has {}", asked.sessions);
        ensure!(ACTIONS.contains(&name.as_str()), "it reports '{name}', which no user does");
        ensure!(self.did.len() < asked.actions, "it reports more than the {} actions asked", asked.actions);
        can_be(&name, at, took_ms)?;
        self.did.push((session, name, at, took_ms));
        Ok(())
    }

    /// Whether that is all that was asked.
    pub fn is_all(&self, asked: &Orders) -> Result<()> {
        let (did, least) = (self.did.len(), asked.least_actions);
        ensure!(did >= least, "it is done, and reports {did} actions of at least {least} asked");
        match asked.loads.iter().find(|name| self.loads.iter().all(|(of, ..)| of != *name)) {
            Some(name) => bail!("it is done, and reports nothing of the load '{name}'"),
            None => Ok(()),
        }
    }

    /// A load of fio has ended.
    pub fn load(&mut self, asked: &Orders, name: String, at: f64, took_ms: f64, json: Value) -> Result<()> {
        ensure!(asked.loads.contains(&name), "it reports the load '{name}', which nobody asked");
        ensure!(self.loads.iter().all(|(of, ..)| *of != name), "it reports the load '{name}' twice");
        can_be(&name, at, took_ms)?;
        self.loads.push((name, at, json));
        Ok(())
    }

    /// What was counted inside, by the names of samples, when it had been up for so long.
    pub fn counted(&mut self, up: Duration, inside: BTreeMap<String, f64>) -> Result<BTreeMap<String, f64>> {
        self.looks += 1;
        let looks = self.looks;
        ensure!(looks <= 2 * up.as_secs() + 16, "it has counted {looks} times in {} s", up.as_secs());
        for name in COUNTED {
            ensure!(inside.contains_key(name), "it does not count '{name}'");
        }
        let named = inside.into_iter().map(|(name, value)| {
            ensure!(COUNTED.contains(&name.as_str()), "it counts '{name}', which nobody asked");
            ensure!(value.is_finite() && value >= 0.0, "it counts {value} for '{name}'");
            Ok((format!("inside.{name}"), value))
        });
        named.collect()
    }
}

/// Whether what a machine did after it was told to begin was begun then: `after_s` later, by the host's clock, of a work of so
/// many seconds.
pub fn is_in_time(name: &str, after_s: f64, work_s: f64) -> Result<()> {
    // Clocks are tied to some milliseconds, and a guest's is faster or slower than the host's, by 500 ppm at most.
    let early = 0.1 + 5e-4 * work_s;
    ensure!(name == FILL || after_s > -early, "'{name}' began {:.3} s before it was to", -after_s);
    Ok(())
}

/// Whether a machine may have done this.
fn can_be(name: &str, at: f64, took_ms: f64) -> Result<()> {
    let can_be = at.is_finite() && (0.0..1e9).contains(&took_ms);
    ensure!(can_be, "it reports '{name}' at {at} s for {took_ms} ms");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_come_in_their_order() {
        let now = Instant::now();
        let line = |text: &str| serde_json::from_str::<Line>(text).unwrap();
        let (up, ready, done) = (line(r#"{"up":1}"#), line(r#"{"ready":1}"#), line(r#"{"done":1}"#));
        let action = line(r#"{"action":"save","session":0,"at":1,"took_ms":1}"#);
        let inside = line(r#"{"inside":{},"at":1,"begins":false}"#);
        let begins = line(r#"{"inside":{},"at":1,"begins":true}"#);
        let [fill, load] = ["fill", "fio-4k-x1"]
            .map(|name| line(&format!(r#"{{"fio":"{name}","at":1,"took_ms":1,"json":{{}}}}"#)));
        let mut course = Course::default();
        for early in [&ready, &done, &action, &inside, &begins, &fill, &load] {
            course.heard(early, now, false).unwrap_err();
        }
        course.heard(&up, now, false).unwrap();
        course.heard(&up, now, false).unwrap_err();
        course.heard(&inside, now, false).unwrap();
        course.heard(&fill, now, false).unwrap();
        course.heard(&ready, now, false).unwrap();
        for early in [&ready, &done, &action, &begins, &fill, &load] {
            course.heard(early, now, false).unwrap_err();
        }
        course.told = Some(now);
        for early in [&ready, &done, &action, &fill, &load] {
            course.heard(early, now, false).unwrap_err();
        }
        course.heard(&begins, now, false).unwrap();
        course.heard(&begins, now, false).unwrap_err();
        course.heard(&inside, now, false).unwrap();
        course.heard(&action, now, false).unwrap();
        course.heard(&load, now, false).unwrap();
        course.heard(&fill, now, false).unwrap_err();
        course.heard(&done, now, false).unwrap();
        course.heard(&action, now, false).unwrap_err();
        let mut boots = Course::default();
        boots.heard(&up, now, true).unwrap();
        assert!(boots.ready && boots.done == Some(now));
    }

    #[test]
    fn a_report_of_what_nobody_asked_is_refused() {
        let asked = Orders {
            sessions: 2,
            least_actions: 2,
            actions: 2,
            loads: vec!["fill".into(), "a".into()],
            ..Orders::default()
        };
        let refused = |result: Result<()>, named: &str| {
            let error = format!("{:#}", result.unwrap_err());
            assert!(error.contains(named), "{error}");
        };
        let save = || String::from("save");
        let mut reported = Reported::default();
        refused(reported.action(&asked, 2, save(), 1.0, 1.0), "session 2");
        refused(reported.action(&asked, 0, "sing".into(), 1.0, 1.0), "'sing'");
        refused(reported.action(&asked, 0, save(), 1.0, -1.0), "-1 ms");
        refused(reported.action(&asked, 0, save(), f64::INFINITY, 1.0), "inf s");
        reported.action(&asked, 0, save(), 1.0, 1.0).unwrap();
        refused(reported.is_all(&asked), "1 actions of at least 2");
        reported.action(&asked, 1, save(), 1.0, 1.0).unwrap();
        refused(reported.action(&asked, 0, save(), 1.0, 1.0), "more than the 2");
        refused(reported.is_all(&asked), "fill");
        let mut reported = Reported::default();
        refused(reported.load(&asked, "../../a".into(), 1.0, 1.0, Value::Null), "../../a");
        refused(reported.load(&asked, "a".into(), f64::NAN, 1.0, Value::Null), "NaN s");
        reported.load(&asked, "a".into(), 1.0, 1.0, Value::Null).unwrap();
        refused(reported.load(&asked, "a".into(), 1.0, 1.0, Value::Null), "twice");
        let nothing_else = Orders { loads: vec!["a".into()], ..Orders::default() };
        reported.is_all(&nothing_else).unwrap();

        is_in_time("save", -0.05, 1.0).unwrap();
        is_in_time("save", -1.7, 3600.0).unwrap();
        is_in_time("fill", -9.0, 1.0).unwrap();
        refused(is_in_time("save", -0.2, 1.0), "'save' began 0.200 s before");
        refused(is_in_time("save", -2.0, 3600.0), "'save' began 2.000 s before");
    }

    #[test]
    fn a_count_of_what_nobody_asked_is_refused() {
        let refused = |result: Result<BTreeMap<String, f64>>, named: &str| {
            let error = format!("{:#}", result.unwrap_err());
            assert!(error.contains(named), "{error}");
        };
        let with = |name: &str, value| {
            let mut all: BTreeMap<String, f64> = COUNTED.map(|name| (name.to_string(), 7.0)).into();
            all.insert(name.into(), value);
            Reported::default().counted(Duration::ZERO, all)
        };
        let known = with("reads", 8.0).unwrap();
        assert_eq!((known.len(), known["inside.reads"], known["inside.writes"]), (5, 8.0, 7.0));
        for (name, value) in
            [("temperature", 1.0), ("reads", -1.0), ("cpu_s", f64::NAN), ("writes", f64::INFINITY)]
        {
            refused(with(name, value), name);
        }
        let mut reported = Reported::default();
        refused(reported.counted(Duration::ZERO, BTreeMap::new()), "'reads'");
        let all: BTreeMap<String, f64> = COUNTED.map(|name| (name.to_string(), 7.0)).into();
        let most = (0..1000).take_while(|_| reported.counted(Duration::from_secs(2), all.clone()).is_ok());
        assert_eq!(most.count(), 19, "one has been refused before");
    }
}
