//! Runs a study: every scenario in turn, again and again, until each has its runs.
//!
//! Owns the order, and when a run does not count. **A run is dropped** when its work failed or took longer than its limit, when a
//! request of a machine failed or came back other than it was written, when a disk's worker ended in the middle of it, or when
//! nothing could be counted when the work began, or for more than [`BLIND`]. Dropped runs are kept, with the reason, and not repeated. What would
//! fail every run, as an option that `spillway serve` does not know, ends the study instead.

use super::disks::{Disks, Served, base};
use super::folder::{Folder, empty, json};
use super::record::{RunFacts, RunRecord, SCHEMA};
use super::spec::{Engine, Scenario};
use super::watch::{Observations, Watch};
use crate::stamp;
use crate::workload::{self, RecordStage, Recording, Stage, WorkResult};
use anyhow::{Context, Result};
use serde_json::Value;
use spillway_testkit::disk::went_wrong;
use spillway_testkit::guest::{Accelerator, Kit};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tempfile::TempDir;

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
    /// A folder on a disk, for what disks and machines need while they run.
    pub scratch: TempDir,
    /// A folder that is memory, for the devices of storage models.
    pub memory: TempDir,
}

impl Lab {
    /// A command as a user would give it, elsewhere.
    fn plain(&self, command: &str, [scratch, memory, results]: [&Path; 3]) -> String {
        let kit = (self.kit.dir(), ".cache/guest/current");
        // A run's own folder, then what all runs share.
        let shared = (self.scratch.path(), "$SCRATCH");
        let places = [(scratch, "$SCRATCH"), shared, (memory, "/dev/shm"), (results, "$RESULTS"), kit];
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
    let total = plan.len() as u32;
    let mut recording = None;
    for (i, planned) in plan.iter().enumerate() {
        if done[i].is_some() {
            continue;
        }
        let engine = study.engine(planned.scenario);
        if engine == Engine::Replay && recording.is_none() {
            progress.begin("recording the session that is asked again", i as u32, total, None);
            let asked = done.iter().flatten().any(|run| run.facts.engine == Engine::Replay.name());
            recording = Some(find_or_record(folder, lab, asked)?);
        }
        let left = time_left(&plan, &done);
        let what = format!("{}, run {}", planned.scenario.name, planned.run);
        progress.begin(&what, i as u32 + 1, total, left);
        std::thread::sleep(Duration::from_secs_f64(study.runs.rest_seconds));
        let record = do_run(folder, lab, planned, recording.as_ref().filter(|_| engine == Engine::Replay))
            .with_context(|| what.clone())?;
        progress.end(&record);
        done[i] = Some(record);
    }
    Ok(summary(folder, &done.into_iter().flatten().collect::<Vec<_>>()))
}

/// Counts the runs that are done.
fn summary(folder: &Folder, done: &[RunRecord]) -> Summary {
    let kept = |run: &&RunRecord| run.facts.dropped.is_none();
    let scenarios = &folder.record.study.scenarios;
    let empty =
        scenarios.iter().filter(|s| !done.iter().filter(kept).any(|run| run.facts.scenario == s.name));
    let kept_count = done.iter().filter(kept).count();
    Summary {
        kept: kept_count as u32,
        dropped: (done.len() - kept_count) as u32,
        empty: empty.count() as u32,
    }
}

/// Estimates the time of all runs that are not done, from the runs that are: of the same scenario, if there are some.
fn time_left(plan: &[Planned<'_>], done: &[Option<RunRecord>]) -> Option<Duration> {
    let mean = |of: &dyn Fn(&RunRecord) -> bool| -> Option<f64> {
        let took: Vec<f64> =
            done.iter().flatten().filter(|run| of(run)).map(|run| run.facts.seconds).collect();
        (!took.is_empty()).then(|| took.iter().sum::<f64>() / took.len() as f64)
    };
    let all = mean(&|_| true)?;
    let left = plan.iter().zip(done).filter(|(_, done)| done.is_none());
    let seconds = left.map(|(p, _)| mean(&|run| run.facts.scenario == p.scenario.name).unwrap_or(all)).sum();
    Some(Duration::from_secs_f64(seconds))
}

/// Finds the recording that all replays of a study use, or makes it. `asked`: there are runs that used it.
fn find_or_record(folder: &Folder, lab: &Lab, asked: bool) -> Result<Recording> {
    let dir = folder.dir().join("recording");
    match Recording::read(&dir) {
        Ok(recording) => return Ok(recording),
        Err(e) if asked => {
            return Err(e.context("runs that are there asked this recording; begin the study anew"));
        }
        // A recording that cannot be read was interrupted.
        Err(_) => {}
    }
    empty(&dir)?;
    let study = &folder.record.study;
    let stage = RecordStage {
        kit: &lab.kit,
        accelerator: lab.accelerator,
        program: &lab.spillway,
        parameters: &study.work.parameters,
        seed: study.runs.seed,
        scratch: lab.scratch.path(),
        dir: &dir,
        deadline: Instant::now() + Duration::from_secs(study.runs.limit_seconds),
    };
    workload::record(&study.work.workload, &stage).context("the session that is to be replayed")
}

/// Does one run, from fresh disks to its record.
fn do_run(
    folder: &Folder,
    lab: &Lab,
    planned: &Planned<'_>,
    recording: Option<&Recording>,
) -> Result<RunRecord> {
    let study = &folder.record.study;
    let (scenario, engine) = (planned.scenario, study.engine(planned.scenario));
    let dir = folder.prepare(&scenario.name, planned.run)?;
    let scratch = tempfile::Builder::new().prefix("run.").tempdir_in(lab.scratch.path())?;
    let memory = tempfile::Builder::new().prefix("run.").tempdir_in(&lab.memory)?;
    let (begun, begin) = (stamp::now(), Instant::now());
    let image = base(study.image(scenario), &lab.kit, lab.scratch.path())?;
    let disks = Disks::start(&lab.spillway, scenario, &image, scratch.path(), memory.path())?;
    let watch = Watch::start(&disks.sources())?;
    // All replays use the seed of the recording.
    let own = study.runs.seed.wrapping_add(u64::from(planned.run) - 1);
    let seed = recording.map_or(own, |recording| recording.actions.seed);
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
        Ok(done) => {
            let wrong = done.figures.iter().find(|(_, figure)| !figure.is_finite());
            match wrong.map(|(name, figure)| format!("the figure '{name}' is {figure}")) {
                None => (done, None),
                why => (WorkResult::default(), why),
            }
        }
        Err(e) => (WorkResult::default(), Some(format!("{e:#}"))),
    };
    let dropped = failed.or_else(|| drop_reason(&found, scenario));
    let commands = disks
        .commands
        .iter()
        .chain(&done.commands)
        .map(|c| lab.plain(c, [scratch.path(), memory.path(), &dir]));
    let commands = commands.collect();
    store_disk_output(&disks, &found, &dir)?;
    let stopped = disks.stop();
    let dropped = dropped.or_else(|| stopped.err().map(|e| format!("a disk did not end well: {e:#}")));
    let facts = RunFacts {
        scenario: scenario.name.clone(),
        run: planned.run,
        seed,
        begun,
        seconds: begin.elapsed().as_secs_f64(),
        engine: engine.name().into(),
        machines: scenario.machines,
        dropped,
        commands,
    };
    let record = RunRecord { schema: SCHEMA, facts, actions: done.actions, figures: done.figures };
    folder.keep(&record, &found.samples)?;
    Ok(record)
}

/// Returns why a run whose work ended well does not count; none if it does.
fn drop_reason(found: &Observations, scenario: &Scenario) -> Option<String> {
    for (machine, observed) in found.machines.iter().enumerate() {
        if !observed.begin_sampled {
            return Some(format!(
                "machine {machine}: its disk did not say what it had counted when the work began"
            ));
        }
        if observed.longest_gap > BLIND {
            return Some(format!(
                "machine {machine}: nothing was counted for {:.0} s",
                observed.longest_gap.as_secs_f64()
            ));
        }
        if scenario.null_disk {
            continue;
        }
        if let Some(wrong) = went_wrong(&observed.stats) {
            return Some(format!("machine {machine}: {wrong}"));
        }
    }
    None
}

/// Stores the last counters and the output of all disks.
fn store_disk_output(disks: &Disks, found: &Observations, dir: &Path) -> Result<()> {
    let all = found.machines.iter().enumerate().map(|(i, observed)| (format!("m{i}"), &observed.stats));
    json(&dir.join("stats.json"), &all.collect::<BTreeMap<String, &Value>>())?;
    for (i, disk) in disks.disks.iter().enumerate() {
        if let Served::Disk(disk) = disk {
            let path = dir.join(format!("m{i}-spillway.log"));
            std::fs::write(&path, disk.log()).with_context(|| format!("{}: cannot write", path.display()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::study::{Samples, watch::ObservedMachine};

    const GOOD: &str =
        r#"{"restarts":0,"checksum_mismatches":0,"failed":{"requests":0},"overflow":{"write_errors":0}}"#;

    /// Not even when the work began.
    const NEVER: u64 = u64::MAX;

    fn why(stats: &str, gap_s: u64) -> Option<String> {
        let observed = |stats: &str, gap_s| ObservedMachine {
            stats: serde_json::from_str(stats).unwrap(),
            longest_gap: Duration::from_secs(gap_s),
            begin_sampled: gap_s != NEVER,
        };
        let found = Observations {
            samples: Samples::default(),
            machines: vec![observed(GOOD, 1), observed(stats, gap_s)],
        };
        let scenario: Scenario = toml::from_str("name = 'a'\nwhat = 'it'").unwrap();
        drop_reason(&found, &scenario)
    }

    #[test]
    fn a_run_is_dropped_for_what_the_rule_says() {
        assert_eq!(why(GOOD, 1), None);
        assert_eq!(why(GOOD, 11).unwrap(), "machine 1: nothing was counted for 11 s");
        assert!(why(GOOD, NEVER).unwrap().contains("when the work began"));
        for (good, bad, words) in [
            ("\"requests\":0", "\"requests\":3", "3 requests failed"),
            ("\"restarts\":0", "\"restarts\":1", "1 workers ended"),
            ("\"write_errors\":0", "\"write_errors\":2", "2 writes of the overflow failed"),
            ("\"checksum_mismatches\":0,", "", "does not say how many blocks came back"),
        ] {
            let found = why(&GOOD.replace(good, bad), 1).unwrap();
            assert!(found.contains(words), "{found}");
        }
        assert!(why("null", 1).unwrap().contains("does not say"));
    }
}
