//! Runs a study: every scenario in turn, again and again, until each has its runs.
//!
//! Owns the order, and when a run does not count. **A run is dropped** when its work failed or took longer than its limit, when a
//! request of a machine failed or came back other than it was written, when a disk's worker ended in the middle of it, or when
//! nothing could be counted for more than [`BLIND`]. Dropped runs are kept, with the reason, and not repeated. What would
//! fail every run, as an option that `spillway serve` does not know, ends the study instead.

use super::disks::{Disks, image};
use super::folder::{Folder, empty, json};
use super::record::{RunRecord, SCHEMA};
use super::spec::{Engine, Scenario};
use super::watch::{Found, Watch};
use crate::guest::{Accelerator, Kit};
use crate::stamp;
use crate::workload::{self, Done, RecordStage, Recording, Stage};
use anyhow::{Context, Result};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The longest time without a look at the counters in a run that counts.
pub const BLIND: Duration = Duration::from_secs(10);

/// What every run needs.
pub struct Lab {
    /// The `spillway` program.
    pub spillway: PathBuf,
    /// The guests.
    pub kit: Kit,
    /// How guests run here.
    pub accelerator: Accelerator,
    /// A folder on a disk, for what disks and machines need while they run; emptied after each run.
    pub scratch: PathBuf,
}

impl Lab {
    /// A command as a user would give it, elsewhere.
    fn plain(&self, command: &str, scratch: &Path, results: &Path) -> String {
        let places = [(scratch, "$SCRATCH"), (results, "$RESULTS"), (self.kit.dir(), ".cache/guest/current")];
        let plain = command.replacen(&self.spillway.display().to_string(), "spillway", 1);
        places.iter().fold(plain, |text, (path, name)| text.replace(&path.display().to_string(), name))
    }
}

/// What a study came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Runs that count.
    pub kept: u32,
    /// Runs that do not.
    pub dropped: u32,
    /// Scenarios without a run that counts.
    pub empty: u32,
}

/// Somebody who is told how far it is.
pub trait Progress {
    /// A run begins, or something before it: what, which of how many, and how long all that is left may take.
    fn begin(&mut self, what: &str, number: u32, of: u32, left: Option<Duration>);
    /// A run has ended.
    fn end(&mut self, run: &RunRecord);
}

/// One that is to be done.
struct Planned<'a> {
    scenario: &'a Scenario,
    run: u32,
}

/// Does what is not done yet.
pub fn run(folder: &Folder, lab: &Lab, progress: &mut dyn Progress) -> Result<Summary> {
    let study = &folder.record.study;
    let mut plan = Vec::new();
    for run in 1..=study.runs.count {
        plan.extend(study.scenarios.iter().map(|scenario| Planned { scenario, run }));
    }
    let mut done = Vec::new();
    for planned in &plan {
        done.push(folder.done(&planned.scenario.name, planned.run)?);
    }
    let image = image(study, &lab.kit, &lab.scratch)?;
    let total = plan.len() as u32;
    let mut recording = None;
    for (i, planned) in plan.iter().enumerate() {
        if done[i].is_some() {
            continue;
        }
        let engine = study.engine(planned.scenario);
        if engine == Engine::Replay && recording.is_none() {
            progress.begin("recording the session that is asked again", i as u32, total, None);
            recording = Some(recorded(folder, lab)?);
        }
        let left = time_left(&plan, &done);
        let what = format!("{}, run {}", planned.scenario.name, planned.run);
        progress.begin(&what, i as u32 + 1, total, left);
        std::thread::sleep(Duration::from_secs_f64(study.runs.rest_seconds));
        let record =
            one(folder, lab, planned, &image, recording.as_ref().filter(|_| engine == Engine::Replay))
                .with_context(|| what.clone())?;
        progress.end(&record);
        done[i] = Some(record);
    }
    Ok(summary(folder, &done.into_iter().flatten().collect::<Vec<_>>()))
}

/// What there is.
fn summary(folder: &Folder, done: &[RunRecord]) -> Summary {
    let kept = |run: &&RunRecord| run.dropped.is_none();
    let scenarios = &folder.record.study.scenarios;
    let empty = scenarios.iter().filter(|s| !done.iter().filter(kept).any(|run| run.scenario == s.name));
    let kept_count = done.iter().filter(kept).count();
    Summary {
        kept: kept_count as u32,
        dropped: (done.len() - kept_count) as u32,
        empty: empty.count() as u32,
    }
}

/// By what the runs until now have taken, of the same scenario if there are some.
fn time_left(plan: &[Planned<'_>], done: &[Option<RunRecord>]) -> Option<Duration> {
    let mean = |of: &dyn Fn(&RunRecord) -> bool| -> Option<f64> {
        let took: Vec<f64> = done.iter().flatten().filter(|run| of(run)).map(|run| run.seconds).collect();
        (!took.is_empty()).then(|| took.iter().sum::<f64>() / took.len() as f64)
    };
    let all = mean(&|_| true)?;
    let left = plan.iter().zip(done).filter(|(_, done)| done.is_none());
    let seconds = left.map(|(p, _)| mean(&|run| run.scenario == p.scenario.name).unwrap_or(all)).sum();
    Some(Duration::from_secs_f64(seconds))
}

/// The session that all replays of a study ask: recorded once, before the first.
fn recorded(folder: &Folder, lab: &Lab) -> Result<Recording> {
    let dir = folder.dir().join("recording");
    if dir.join("actions.json").exists() {
        return Recording::read(&dir);
    }
    empty(&dir)?;
    let study = &folder.record.study;
    let stage = RecordStage {
        kit: &lab.kit,
        accelerator: lab.accelerator,
        program: &lab.spillway,
        parameters: &study.work.parameters,
        seed: study.runs.seed,
        dir: &dir,
        deadline: Instant::now() + Duration::from_secs(study.runs.limit_seconds),
    };
    workload::record(&study.work.workload, &stage).context("the session that is to be replayed")
}

/// One run, from fresh disks to its record.
fn one(
    folder: &Folder,
    lab: &Lab,
    planned: &Planned<'_>,
    image: &Path,
    recording: Option<&Recording>,
) -> Result<RunRecord> {
    let study = &folder.record.study;
    let (scenario, engine) = (planned.scenario, study.engine(planned.scenario));
    let dir = folder.prepare(&scenario.name, planned.run)?;
    let scratch = tempfile::Builder::new().prefix("run.").tempdir_in(&lab.scratch)?;
    let (begun, begin) = (stamp::now(), Instant::now());
    let disks = Disks::start(&lab.spillway, scenario, image, scratch.path())?;
    let watch = Watch::start(&disks.controls())?;
    let seed = study.runs.seed.wrapping_add(u64::from(planned.run) - 1);
    let stage = Stage {
        kit: &lab.kit,
        accelerator: lab.accelerator,
        parameters: &study.parameters(scenario),
        seed,
        dir: &dir,
        disks: &disks.for_work(),
        recording,
        watch: &watch,
        deadline: begin + Duration::from_secs(study.runs.limit_seconds),
    };
    let worked = workload::run(&study.work.workload, engine, &stage);
    let found = watch.finish();
    let (done, failed) = match worked {
        Ok(done) => (done, None),
        Err(e) => (Done::default(), Some(format!("{e:#}"))),
    };
    let dropped = failed.or_else(|| why_not(&found));
    let commands = disks.commands.iter().chain(&done.commands).map(|c| lab.plain(c, scratch.path(), &dir));
    let commands = commands.collect();
    raw(&disks, &found.stats, &dir)?;
    let stopped = disks.stop();
    let dropped = dropped.or_else(|| stopped.err().map(|e| format!("a disk did not end well: {e:#}")));
    let record = RunRecord {
        schema: SCHEMA,
        scenario: scenario.name.clone(),
        run: planned.run,
        seed,
        begun,
        seconds: begin.elapsed().as_secs_f64(),
        engine: engine.name().into(),
        machines: scenario.machines,
        dropped,
        commands,
        actions: done.actions,
        figures: done.figures,
    };
    folder.keep(&record, &found.samples)?;
    Ok(record)
}

/// Why a run whose work ended well does not count.
fn why_not(found: &Found) -> Option<String> {
    if found.longest_gap > BLIND {
        return Some(format!("nothing was counted for {:.0} s", found.longest_gap.as_secs_f64()));
    }
    for (machine, stats) in found.stats.iter().enumerate().filter(|(_, stats)| !stats.is_null()) {
        let figure = |key: &str| crate::disk::figure(stats, key).unwrap_or(0);
        let wrong: [(&str, u64); 4] = [
            ("requests failed", figure("failed.requests")),
            ("blocks came back other than they were written", figure("checksum_mismatches")),
            ("workers ended", figure("restarts")),
            ("writes of the overflow failed", figure("overflow.write_errors")),
        ];
        if let Some((what, count)) = wrong.into_iter().find(|(_, count)| *count > 0) {
            return Some(format!("machine {machine}: {count} {what}"));
        }
    }
    None
}

/// What the disks said, as they said it.
fn raw(disks: &Disks, stats: &[Value], dir: &Path) -> Result<()> {
    let all: BTreeMap<String, &Value> = stats.iter().enumerate().map(|(i, s)| (format!("m{i}"), s)).collect();
    json(&dir.join("stats.json"), &all)?;
    for (i, disk) in disks.disks.iter().enumerate() {
        if let Some(disk) = disk {
            let path = dir.join(format!("m{i}-spillway.log"));
            std::fs::write(&path, disk.log()).with_context(|| format!("{}: cannot write", path.display()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::study::Samples;

    fn found(stats: &str, gap_s: u64) -> Found {
        let stats = vec![Value::Null, serde_json::from_str(stats).unwrap()];
        Found { samples: Samples::default(), stats, longest_gap: Duration::from_secs(gap_s) }
    }

    #[test]
    fn a_run_is_dropped_for_what_the_rule_says() {
        let good = r#"{"restarts":0,"checksum_mismatches":0,"failed":{"requests":0}}"#;
        assert_eq!(why_not(&found(good, 1)), None);
        assert_eq!(why_not(&found(good, 11)).unwrap(), "nothing was counted for 11 s");
        assert_eq!(
            why_not(&found(r#"{"failed":{"requests":3}}"#, 1)).unwrap(),
            "machine 1: 3 requests failed"
        );
        assert_eq!(why_not(&found(r#"{"restarts":1}"#, 1)).unwrap(), "machine 1: 1 workers ended");
    }
}
