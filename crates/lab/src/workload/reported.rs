//! What a machine has said, held to what it was asked.
//!
//! Invariant: a machine may say anything; what nobody asked, what comes out of turn, and less than was asked is an error.

use super::lines::Line;
use super::machines::Orders;
use anyhow::{Result, bail, ensure};
use serde_json::Value;
use std::collections::BTreeMap;
use std::time::Instant;

/// What machines count.
const COUNTED: [&str; 5] = ["reads", "read_bytes", "writes", "written_bytes", "cpu_s"];

/// How far a machine has come, by the host's clock. Steps come in this order, each once.
#[derive(Default)]
pub struct Course {
    /// It has come up.
    pub up: Option<Instant>,
    /// It waits for the word to begin.
    pub ready: bool,
    /// It was told.
    pub told: Option<Instant>,
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
            Line::Action { .. } => {
                ensure!(self.told.is_some(), "it did something before it was told to begin")
            }
            Line::Done { .. } => {
                ensure!(self.told.is_some(), "it is done before it was told to begin");
                self.done = Some(now);
            }
            Line::Inside { .. } | Line::Fio { .. } | Line::Error { .. } => {}
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
}

/// Whether a machine may have done this.
fn can_be(name: &str, at: f64, took_ms: f64) -> Result<()> {
    let can_be = at.is_finite() && (0.0..1e9).contains(&took_ms);
    ensure!(can_be, "it reports '{name}' at {at} s for {took_ms} ms");
    Ok(())
}

/// What was counted inside, by the names of samples.
pub fn counted(inside: BTreeMap<String, f64>) -> Result<BTreeMap<String, f64>> {
    let named = inside.into_iter().map(|(name, value)| {
        ensure!(COUNTED.contains(&name.as_str()), "it counts '{name}', which nobody asked");
        ensure!(value.is_finite() && value >= 0.0, "it counts {value} for '{name}'");
        Ok((format!("inside.{name}"), value))
    });
    named.collect()
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
        let mut course = Course::default();
        for early in [&ready, &done, &action] {
            course.heard(early, now, false).unwrap_err();
        }
        course.heard(&up, now, false).unwrap();
        course.heard(&up, now, false).unwrap_err();
        course.heard(&ready, now, false).unwrap();
        for early in [&ready, &done, &action] {
            course.heard(early, now, false).unwrap_err();
        }
        course.told = Some(now);
        course.heard(&action, now, false).unwrap();
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

        let inside = |name: &str, value| counted(BTreeMap::from([(name.to_string(), value)]));
        assert_eq!(inside("reads", 7.0).unwrap(), BTreeMap::from([("inside.reads".to_string(), 7.0)]));
        for (name, value) in
            [("temperature", 1.0), ("reads", -1.0), ("cpu_s", f64::NAN), ("writes", f64::INFINITY)]
        {
            refused(inside(name, value).map(drop), name);
        }
    }
}
