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

/// The steps that a machine has done, by the host's clock. They come in this order, each once.
#[derive(Default)]
pub struct MachineProgress {
    /// When it was up.
    pub up: Option<Instant>,
    /// Set when it waits to be told to begin.
    pub ready: bool,
    /// When it was told to begin.
    pub told: Option<Instant>,
    /// Set when it has counted what was before the work.
    pub begun: bool,
    /// When it had done everything.
    pub done: Option<Instant>,
}

impl MachineProgress {
    /// Takes a line that the machine reports; an error if it cannot come now. `boot`: to come up is all that the machine has to do.
    pub fn accept(&mut self, line: &Line, now: Instant, boot: bool) -> Result<()> {
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

/// What a machine has reported. Guests are not trusted: a report of what was not asked is an error.
#[derive(Default)]
pub struct MachineReport {
    /// Actions: session, name, when it began in seconds, and how long it took in milliseconds.
    pub did: Vec<(u32, String, f64, f64)>,
    /// Loads of fio: name, when it began in seconds, and fio's JSON.
    pub loads: Vec<(String, f64, Value)>,
    /// Samples that it has reported of itself.
    looks: u64,
}

impl MachineReport {
    /// Takes the report of an action.
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
        check_times(&name, at, took_ms)?;
        self.did.push((session, name, at, took_ms));
        Ok(())
    }

    /// Checks that everything that was asked has been reported.
    pub fn check_complete(&self, asked: &Orders) -> Result<()> {
        let (did, least) = (self.did.len(), asked.least_actions);
        ensure!(did >= least, "it is done, and reports {did} actions of at least {least} asked");
        match asked.loads.iter().find(|name| self.loads.iter().all(|(of, ..)| of != *name)) {
            Some(name) => bail!("it is done, and reports nothing of the load '{name}'"),
            None => Ok(()),
        }
    }

    /// Takes the report of a load of fio that has ended.
    pub fn load(&mut self, asked: &Orders, name: String, at: f64, took_ms: f64, json: Value) -> Result<()> {
        ensure!(asked.loads.contains(&name), "it reports the load '{name}', which nobody asked");
        ensure!(self.loads.iter().all(|(of, ..)| *of != name), "it reports the load '{name}' twice");
        check_times(&name, at, took_ms)?;
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
fn check_times(name: &str, at: f64, took_ms: f64) -> Result<()> {
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
        let mut course = MachineProgress::default();
        for early in [&ready, &done, &action, &inside, &begins, &fill, &load] {
            course.accept(early, now, false).unwrap_err();
        }
        course.accept(&up, now, false).unwrap();
        course.accept(&up, now, false).unwrap_err();
        course.accept(&inside, now, false).unwrap();
        course.accept(&fill, now, false).unwrap();
        course.accept(&ready, now, false).unwrap();
        for early in [&ready, &done, &action, &begins, &fill, &load] {
            course.accept(early, now, false).unwrap_err();
        }
        course.told = Some(now);
        for early in [&ready, &done, &action, &fill, &load] {
            course.accept(early, now, false).unwrap_err();
        }
        course.accept(&begins, now, false).unwrap();
        course.accept(&begins, now, false).unwrap_err();
        course.accept(&inside, now, false).unwrap();
        course.accept(&action, now, false).unwrap();
        course.accept(&load, now, false).unwrap();
        course.accept(&fill, now, false).unwrap_err();
        course.accept(&done, now, false).unwrap();
        course.accept(&action, now, false).unwrap_err();
        let mut boots = MachineProgress::default();
        boots.accept(&up, now, true).unwrap();
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
        let mut reported = MachineReport::default();
        refused(reported.action(&asked, 2, save(), 1.0, 1.0), "session 2");
        refused(reported.action(&asked, 0, "sing".into(), 1.0, 1.0), "'sing'");
        refused(reported.action(&asked, 0, save(), 1.0, -1.0), "-1 ms");
        refused(reported.action(&asked, 0, save(), f64::INFINITY, 1.0), "inf s");
        reported.action(&asked, 0, save(), 1.0, 1.0).unwrap();
        refused(reported.check_complete(&asked), "1 actions of at least 2");
        reported.action(&asked, 1, save(), 1.0, 1.0).unwrap();
        refused(reported.action(&asked, 0, save(), 1.0, 1.0), "more than the 2");
        refused(reported.check_complete(&asked), "fill");
        let mut reported = MachineReport::default();
        refused(reported.load(&asked, "../../a".into(), 1.0, 1.0, Value::Null), "../../a");
        refused(reported.load(&asked, "a".into(), f64::NAN, 1.0, Value::Null), "NaN s");
        reported.load(&asked, "a".into(), 1.0, 1.0, Value::Null).unwrap();
        refused(reported.load(&asked, "a".into(), 1.0, 1.0, Value::Null), "twice");
        let nothing_else = Orders { loads: vec!["a".into()], ..Orders::default() };
        reported.check_complete(&nothing_else).unwrap();

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
            MachineReport::default().counted(Duration::ZERO, all)
        };
        let known = with("reads", 8.0).unwrap();
        assert_eq!((known.len(), known["inside.reads"], known["inside.writes"]), (5, 8.0, 7.0));
        for (name, value) in
            [("temperature", 1.0), ("reads", -1.0), ("cpu_s", f64::NAN), ("writes", f64::INFINITY)]
        {
            refused(with(name, value), name);
        }
        let mut reported = MachineReport::default();
        refused(reported.counted(Duration::ZERO, BTreeMap::new()), "'reads'");
        let all: BTreeMap<String, f64> = COUNTED.map(|name| (name.to_string(), 7.0)).into();
        let most = (0..1000).take_while(|_| reported.counted(Duration::from_secs(2), all.clone()).is_ok());
        assert_eq!(most.count(), 19, "one has been refused before");
    }
}
