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

/// A folder of results that this process writes to.
pub struct Folder {
    dir: PathBuf,
    /// What holds for all runs.
    pub record: StudyRecord,
    _lock: File,
}

impl Folder {
    /// Creates a folder of results. Refuses a folder that has anything in it.
    pub fn create(dir: &Path, record: StudyRecord) -> Result<Folder> {
        record.study.check()?;
        let cannot = || format!("{}: cannot make a folder for results", dir.display());
        std::fs::create_dir_all(dir).with_context(cannot)?;
        if dir.join("study.json").exists() {
            bail!("{}: has a study's results already: 'spillway lab resume' continues it", dir.display());
        }
        if std::fs::read_dir(dir).with_context(cannot)?.next().is_some() {
            bail!("{}: is not empty: results have a folder of their own", dir.display());
        }
        let lock = lock_folder(dir)?;
        std::fs::create_dir(dir.join("runs")).with_context(cannot)?;
        let text = toml::to_string(&record.study).context("the study cannot be written")?;
        write_whole(&dir.join("study.toml"), |to| Ok(to.write_all(text.as_bytes())?))?;
        json(&dir.join("study.json"), &record)?;
        Ok(Folder { dir: dir.into(), record, _lock: lock })
    }

    /// Opens a folder that has results. Its record is checked as a study's file is: names become names of files.
    pub fn open(dir: &Path) -> Result<Folder> {
        let record: StudyRecord = record::read(&dir.join("study.json"))?;
        record.study.check().with_context(|| format!("{}", dir.join("study.json").display()))?;
        Ok(Folder { dir: dir.into(), record, _lock: lock_folder(dir)? })
    }

    /// The folder's path.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    fn run_dir(&self, scenario: &str, run: u32) -> PathBuf {
        self.dir.join("runs").join(format!("{scenario}-{run}"))
    }

    /// The record of a run that has been done.
    pub fn done(&self, scenario: &str, run: u32) -> Result<Option<RunRecord>> {
        let path = self.run_dir(scenario, run).join("run.json");
        if path.exists() { record::read(&path).map(Some) } else { Ok(None) }
    }

    /// Makes an empty folder for a run's own files. Files of an interrupted run are removed.
    pub fn prepare(&self, scenario: &str, run: u32) -> Result<PathBuf> {
        let dir = self.run_dir(scenario, run);
        empty(&dir)?;
        Ok(dir)
    }

    /// Stores a run.
    pub fn keep(&self, run: &RunRecord, samples: &Samples) -> Result<()> {
        let dir = self.run_dir(&run.facts.scenario, run.facts.run);
        write_whole(&dir.join("samples.csv"), |to| Ok(samples.write(to)?))?;
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
    write_whole(path, |to| {
        serde_json::to_writer_pretty(&mut *to, value)?;
        Ok(to.write_all(b"\n")?)
    })
}

/// Writes a file that has its name once it is whole and on the disk.
fn write_whole(path: &Path, write: impl FnOnce(&mut BufWriter<File>) -> Result<()>) -> Result<()> {
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
            "{}: cannot write; runs that are done are kept: free some space, then 'spillway lab resume'",
            path.display()
        )
    })
}

fn lock_folder(dir: &Path) -> Result<File> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::study::Study;
    use std::collections::BTreeMap;

    fn record(scenario: &str) -> StudyRecord {
        let text = "name = 'a'\ntitle = 'A'\nquestion = '?'\nbaseline = 'good'\n[work]\nworkload = 'boot'\nengine = 'guest'\n\
             [[scenario]]\nname = 'good'\nwhat = 'it'";
        let mut study = Study::parse(text).unwrap();
        (study.scenarios[0].name, study.baseline) = (scenario.into(), scenario.into());
        StudyRecord {
            schema: record::SCHEMA,
            study,
            quick: false,
            begun: String::new(),
            command: String::new(),
            versions: BTreeMap::new(),
            hardware: BTreeMap::new(),
        }
    }

    #[test]
    fn a_folder_with_anything_in_it_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().join("study.toml");
        std::fs::write(&own, "mine").unwrap();
        let error = Folder::create(dir.path(), record("good")).err().unwrap().to_string();
        assert!(error.contains("is not empty"), "{error}");
        assert_eq!(std::fs::read_to_string(&own).unwrap(), "mine");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_record_that_leads_elsewhere_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        json(&dir.path().join("study.json"), &record("../../elsewhere")).unwrap();
        let error = format!("{:#}", Folder::open(dir.path()).err().unwrap());
        assert!(error.contains("is no name"), "{error}");
        assert!(Folder::create(&dir.path().join("new"), record("../up")).is_err());
    }

    #[test]
    fn one_program_at_a_time_writes_to_a_folder() {
        let dir = tempfile::tempdir().unwrap();
        let results = dir.path().join("results");
        let first = Folder::create(&results, record("good")).unwrap();
        let error = Folder::open(&results).err().unwrap().to_string();
        assert!(error.contains("at work in this folder"), "{error}");
        drop(first);
        Folder::open(&results).unwrap();
    }
}
