//! A recorded machine: every request of its whole life, and when its users did what.
//!
//! Owns `trace` and `actions.json` of its folder; the latter is written last, when the trace is whole and on the disk. Invariant: times are of the trace's clock, microseconds since it began. Requests are
//! told by that clock; what users did by the machine's, which is tied to the host's by the report that came with the least delay, and
//! to the trace's by its begin: some milliseconds too late in all.

use super::inside::orders;
use super::machines::{MachineTimeline, Task, work};
use super::settings::WorkloadSettings;
use super::stage::{RecordStage, Watcher};
use crate::study::folder::json;
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use spillway_advisor::trace::{End, TraceReader};
use spillway_testkit::disk::Disk;
use spillway_testkit::guest::GuestDisk;
use spillway_testkit::process::{Server, wait_until};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The disk that is recorded on: one that is not waited for. Its RAM takes what fits.
const DISK: [&str; 4] = ["--ram", "1G", "--overflow", "16G"];
/// How long it may take until the recorder is there.
const PATIENCE: Duration = Duration::from_secs(30);

/// Form of `actions.json`.
const SCHEMA: u32 = 1;

/// A recording that can be asked of disks.
#[derive(Clone, Debug, PartialEq)]
pub struct Recording {
    /// The file of the trace.
    pub trace: PathBuf,
    /// What the recorded machine did, and when.
    pub actions: RecordedSession,
}

/// What users did in the recorded session: the content of `actions.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecordedSession {
    /// Version of the file's form.
    pub schema: u32,
    /// The workload that was recorded.
    pub workload: String,
    /// Seed of the workload's random choices.
    pub seed: u64,
    /// When the machine was started.
    pub started_us: u64,
    /// When its work began; what is before that is the boot.
    pub begin_us: u64,
    /// When its work was done.
    pub done_us: u64,
    /// The users' actions, by when they began.
    pub actions: Vec<RecordedAction>,
}

/// Something that a user did.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecordedAction {
    /// Number of the session in the machine.
    pub session: u32,
    /// `logon`, `open`, `save`...
    pub name: String,
    /// When it began.
    pub begin_us: u64,
    /// When it had ended in the recorded machine.
    pub end_us: u64,
}

impl Recording {
    /// Finds one in its folder.
    pub fn read(dir: &Path) -> Result<Recording> {
        let path = dir.join("actions.json");
        let text =
            std::fs::read_to_string(&path).with_context(|| format!("{}: cannot read", path.display()))?;
        let actions: RecordedSession =
            serde_json::from_str(&text).with_context(|| format!("{}: no recording", path.display()))?;
        ensure!(actions.schema == SCHEMA, "{}: of another version of this program", path.display());
        ensure!(
            actions.started_us <= actions.begin_us && actions.begin_us <= actions.done_us,
            "{}: its work began before the machine was started, or was done before it began",
            path.display()
        );
        let trace = dir.join("trace");
        ensure!(trace.is_file(), "{}: no trace", trace.display());
        Ok(Recording { trace, actions })
    }
}

/// A recording is made without samples.
struct NoWatcher;

impl Watcher for NoWatcher {
    fn begin(&self) {}

    fn vmm(&self, _: u32, _: u32) {}

    fn vmm_ends(&self, _: u32) {}

    fn inside(&self, _: u32, _: Instant, _: &BTreeMap<String, f64>) {}
}

/// Records one machine from its start until its work is done.
pub fn record(workload: &str, settings: &WorkloadSettings, stage: &RecordStage<'_>) -> Result<Recording> {
    let (dir, trace) = (stage.dir, stage.dir.join("trace"));
    let text = |path: &Path| path.display().to_string();
    let at_work = tempfile::Builder::new().prefix("record.").tempdir_in(stage.scratch);
    let at_work = at_work.context("no folder for sockets")?;
    let overflow = text(dir);
    let options = [&DISK[..], &["--overflow-dir", &overflow]].concat();
    let disk = Disk::start_with(stage.program, at_work.path(), &stage.kit.golden(), &options)
        .context("the disk to record on")?;
    let arguments = ["trace", "record", &text(&disk.control()), "--out", &text(&trace)].map(String::from);
    let program = stage.program.to_str().context("the program's path is not UTF-8")?;
    let _ = std::fs::remove_file(&trace);
    let mut recorder = Server::start("recorder", program, &arguments, None, &dir.join("recorder.log"))?;
    let clock = Clock::of(&trace, &mut recorder)?;

    let task = Task {
        kit: stage.kit,
        accelerator: stage.accelerator,
        disks: vec![vec![GuestDisk::VhostUser(disk.vhost())]],
        orders: orders(settings, stage.seed, true),
        every: Duration::ZERO,
        dir,
        deadline: stage.deadline,
    };
    let (_, lives) = work(&task, &NoWatcher)?;
    let life = lives.first().context("no machine has lived")?;
    // The machine is gone: nothing is asked any more that the trace would not have.
    let status = recorder.stop()?;
    ensure!(status.success(), "the recorder ended with {status}: {}", recorder.tail());
    json(&dir.join("stats.json"), &disk.stats()?)?;
    disk.stop()?;
    keep(dir, &actions(workload, settings, stage.seed, life, &clock))?;
    Recording::read(dir)
}

/// Makes a recording of a trace that is there: it is one once `actions.json` is.
fn keep(dir: &Path, actions: &RecordedSession) -> Result<()> {
    let trace = dir.join("trace");
    whole(&trace)?;
    let synced = File::open(&trace).and_then(|file| file.sync_all());
    synced.with_context(|| format!("{}: cannot sync", trace.display()))?;
    json(&dir.join("actions.json"), actions)
}

/// One that was cut off would leave another state, and nobody would notice.
pub fn whole(trace: &Path) -> Result<()> {
    let end = || -> Result<End> {
        let mut reader = TraceReader::new(BufReader::with_capacity(256 << 10, File::open(trace)?))?;
        while reader.read()?.is_some() {}
        Ok(reader.end())
    };
    let path = trace.display();
    let end = end().with_context(|| format!("{path}: cannot read the trace"))?;
    ensure!(end == End::Whole, "{path}: the trace is cut off, record it again");
    Ok(())
}

fn actions(
    workload: &str,
    settings: &WorkloadSettings,
    seed: u64,
    life: &MachineTimeline,
    clock: &Clock,
) -> RecordedSession {
    let mut did: Vec<RecordedAction> = life
        .did
        .iter()
        .map(|did| RecordedAction {
            session: did.session,
            name: did.name.clone(),
            begin_us: clock.us(did.begin),
            end_us: clock.us(did.begin + did.took),
        })
        .collect();
    let (started_us, done_us) = (clock.us(life.started), clock.us(life.done));
    let boots = matches!(settings, WorkloadSettings::Boot(_));
    if boots {
        did.push(RecordedAction { session: 0, name: "boot".into(), begin_us: started_us, end_us: done_us });
    }
    did.sort_by_key(|d| d.begin_us);
    RecordedSession {
        schema: SCHEMA,
        workload: workload.into(),
        seed,
        started_us,
        begin_us: if boots { started_us } else { clock.us(life.told) },
        done_us,
        actions: did,
    }
}

/// The begin of a trace, from which its times count.
struct Clock(Instant);

impl Clock {
    /// Waits until the recorder has written the trace's head, which says it by the time of day.
    fn of(trace: &Path, recorder: &mut Server) -> Result<Clock> {
        let mut ended = None;
        let found = wait_until(PATIENCE, || {
            ended = recorder.ended().ok().flatten();
            let reader = File::open(trace).ok().and_then(|file| TraceReader::new(file).ok());
            reader.map(|r| Some(r.head().begin_unix_us)).or(ended.map(|_| None))
        });
        let begin_unix_us = found.flatten().with_context(|| {
            format!("the recorder did not begin: {}\n{}", recorder.command, recorder.tail())
        })?;
        let (now, unix) = (Instant::now(), SystemTime::now().duration_since(UNIX_EPOCH)?);
        let ago = unix.saturating_sub(Duration::from_micros(begin_unix_us));
        now.checked_sub(ago).map(Clock).context("the trace began before this machine did")
    }

    fn us(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.0).as_micros()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spillway_advisor::trace::{Head, TraceWriter};
    use spillway_advisor::{Event, Operation};

    #[test]
    fn it_is_a_recording_once_its_trace_is_whole() {
        let dir = tempfile::tempdir().unwrap();
        let trace = dir.path().join("trace");
        let mut writer = TraceWriter::new(Vec::new(), &Head::new(1 << 20)).unwrap();
        let event = Event { time_us: 5, operation: Operation::Write, offset_bytes: 0, len_bytes: 4096 };
        writer.push(&event).unwrap();
        let bytes = writer.finish().unwrap();
        let actions = RecordedSession {
            schema: SCHEMA,
            workload: "boot".into(),
            seed: 1,
            started_us: 0,
            begin_us: 0,
            done_us: 9,
            actions: Vec::new(),
        };

        let error = |result: Result<()>| format!("{:#}", result.unwrap_err());
        assert!(error(keep(dir.path(), &actions)).contains("trace: cannot read"));
        std::fs::write(&trace, &bytes[..bytes.len() - 1]).unwrap();
        assert!(error(keep(dir.path(), &actions)).contains("cut off"));
        let missing = error(Recording::read(dir.path()).map(drop));
        assert!(missing.contains("actions.json: cannot read"), "{missing}");
        std::fs::write(&trace, &bytes).unwrap();
        keep(dir.path(), &actions).unwrap();
        assert_eq!(Recording::read(dir.path()).unwrap(), Recording { trace, actions });
        assert!(!dir.path().join("actions.new").exists());
    }
}
