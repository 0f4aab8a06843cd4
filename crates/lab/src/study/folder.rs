//! The folder that a study's results are kept in, as they come.
//!
//! Invariants: a run's record is written last, whole, and under its own name at once, so that a run is there or is not; nothing that
//! is there is changed; one program at a time writes to a folder.

use super::record::{self, RunRecord, StudyRecord};
use super::samples::Samples;
use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, flock};
use serde::Serialize;
use std::fs::File;
use std::io::{BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};

/// A folder of results, ours to write to.
pub struct Folder {
    dir: PathBuf,
    /// What holds for all runs.
    pub record: StudyRecord,
    _lock: File,
}

impl Folder {
    /// Makes one. Refuses a folder that has anything in it.
    pub fn create(dir: &Path, record: StudyRecord) -> Result<Folder> {
        let cannot = || format!("{}: cannot make a folder for results", dir.display());
        std::fs::create_dir_all(dir.join("runs")).with_context(cannot)?;
        if dir.join("study.json").exists() {
            bail!("{}: has a study's results already: 'spillway lab resume' goes on with it", dir.display());
        }
        let lock = locked(dir)?;
        let text = toml::to_string(&record.study).context("the study cannot be written")?;
        whole(&dir.join("study.toml"), |to| Ok(to.write_all(text.as_bytes())?))?;
        json(&dir.join("study.json"), &record)?;
        Ok(Folder { dir: dir.into(), record, _lock: lock })
    }

    /// One that has some already.
    pub fn open(dir: &Path) -> Result<Folder> {
        let record = record::read(&dir.join("study.json"))?;
        Ok(Folder { dir: dir.into(), record, _lock: locked(dir)? })
    }

    /// Where it is.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    fn run_dir(&self, scenario: &str, run: u32) -> PathBuf {
        self.dir.join("runs").join(format!("{scenario}-{run}"))
    }

    /// A run that has been done before.
    pub fn done(&self, scenario: &str, run: u32) -> Result<Option<RunRecord>> {
        let path = self.run_dir(scenario, run).join("run.json");
        if path.exists() { record::read(&path).map(Some) } else { Ok(None) }
    }

    /// An empty folder for a run's own files. What an interrupted one left there goes.
    pub fn prepare(&self, scenario: &str, run: u32) -> Result<PathBuf> {
        let dir = self.run_dir(scenario, run);
        empty(&dir)?;
        Ok(dir)
    }

    /// Keeps a run.
    pub fn keep(&self, run: &RunRecord, samples: &Samples) -> Result<()> {
        let dir = self.run_dir(&run.scenario, run.run);
        whole(&dir.join("samples.csv"), |to| Ok(samples.write(to)?))?;
        json(&dir.join("run.json"), run)
    }
}

/// Makes a folder, or makes it empty.
pub fn empty(dir: &Path) -> Result<()> {
    match std::fs::remove_dir_all(dir) {
        Err(e) if e.kind() != ErrorKind::NotFound => {
            Err(e).with_context(|| format!("{}: cannot be emptied", dir.display()))
        }
        _ => std::fs::create_dir_all(dir).with_context(|| format!("{}: cannot be made", dir.display())),
    }
}

/// Writes JSON.
pub fn json(path: &Path, value: &impl Serialize) -> Result<()> {
    whole(path, |to| {
        serde_json::to_writer_pretty(&mut *to, value)?;
        Ok(to.write_all(b"\n")?)
    })
}

/// Writes a file that has its name once it is whole and on the disk.
fn whole(path: &Path, write: impl FnOnce(&mut BufWriter<File>) -> Result<()>) -> Result<()> {
    let new = path.with_extension("new");
    let written = || -> Result<()> {
        let mut to = BufWriter::new(File::create(&new)?);
        write(&mut to)?;
        to.into_inner().map_err(|e| e.into_error())?.sync_all()?;
        std::fs::rename(&new, path)?;
        if let Some(dir) = path.parent() {
            File::open(dir)?.sync_all()?;
        }
        Ok(())
    };
    written().inspect_err(|_| drop(std::fs::remove_file(&new))).with_context(|| {
        format!(
            "{}: cannot write; runs that are done are kept: make room, then 'spillway lab resume'",
            path.display()
        )
    })
}

fn locked(dir: &Path) -> Result<File> {
    let path = dir.join(".lock");
    let open = File::options().create(true).truncate(false).write(true).open(&path);
    let lock = open.with_context(|| format!("{}: cannot open", path.display()))?;
    match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(lock),
        Err(rustix::io::Errno::WOULDBLOCK) => {
            bail!("{}: another program is at work in this folder", dir.display())
        }
        Err(e) => Err(e).with_context(|| format!("{}: cannot lock", path.display())),
    }
}
