//! The disks of one run: each machine's, on the devices of its scenario, all fresh.
//!
//! Invariant: nothing of an earlier run is left for the next: devices, copies and overflow are new, and of the base image nothing is
//! in the host's page cache.

use super::spec::{Image, Scenario};
use super::watch::Source;
use crate::workload::WorkDisk;
use anyhow::{Context, Result, bail, ensure};
use spillway_testkit::guest::Kit;
use spillway_testkit::process::line;
use spillway_testkit::{Disk, NullDisk};
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Name of a machine's private copy of the image.
const COPY: &str = "copy.raw";
/// What a disk that does nothing claims to hold.
const NULL_BYTES: u64 = 8 << 30;

/// The disks of a run.
pub struct Disks {
    /// One a machine.
    pub disks: Vec<Served>,
    /// Commands as a user would give them.
    pub commands: Vec<String>,
}

/// A machine's.
pub enum Served {
    /// One of ours.
    Disk(Disk),
    /// One that does nothing.
    Null(NullDisk),
}

/// The base image of a scenario, made if need be.
pub fn base(image: &Image, kit: &Kit, scratch: &Path) -> Result<PathBuf> {
    match *image {
        Image::Golden => Ok(kit.golden()),
        Image::Empty(bytes) => {
            let path = scratch.join(format!("empty-{bytes}.raw"));
            let file = File::create(&path).with_context(|| format!("{}: cannot create", path.display()))?;
            file.set_len(bytes)?;
            Ok(path)
        }
    }
}

impl Disks {
    /// Starts them; everything of theirs lies in `dir`, but for devices, which lie in `memory`, a folder that is memory.
    pub fn start(
        spillway: &Path,
        scenario: &Scenario,
        image: &Path,
        dir: &Path,
        memory: &Path,
    ) -> Result<Disks> {
        let mut commands = Vec::new();
        let mut options = models(spillway, &scenario.storage, memory, &mut commands)?;
        for (name, value) in &scenario.disk {
            options.push(format!("--{name}"));
            options.extend((!value.is_empty()).then(|| value.clone()));
        }
        let mode = scenario.disk.get("mode").map_or("ram+overflow", String::as_str);
        let own = |machine: u32| dir.join(format!("m{machine}"));
        for own in (0..scenario.machines).map(own) {
            std::fs::create_dir(&own).with_context(|| format!("{}: cannot make", own.display()))?;
            if mode == "ephemeral" {
                clone(image, &own.join(COPY))?;
            }
        }
        forget(image)?;
        let mut disks = Vec::new();
        for machine in 0..scenario.machines {
            let own = own(machine);
            if scenario.null_disk {
                let disk = NullDisk::start(&own, NULL_BYTES)?;
                if machine == 0 {
                    commands.push(disk.command().to_string());
                }
                disks.push(Served::Null(disk));
                continue;
            }
            let text = |path: &Path| path.display().to_string();
            let mut all = match mode {
                "ephemeral" => vec!["--disk".into(), text(&own.join(COPY))],
                "persistent" => bail!("scenario '{}': a study's disks are disposable", scenario.name),
                "ram" => vec!["--image".into(), text(image)],
                _ => vec!["--image".into(), text(image), "--overflow-dir".into(), text(&own)],
            };
            all.extend(options.iter().cloned());
            let disk = Disk::serve(spillway, &own, &all)
                .with_context(|| format!("scenario '{}': its disk does not start", scenario.name))?;
            if machine == 0 {
                commands.push(disk.command().to_string());
            }
            disks.push(Served::Disk(disk));
        }
        Ok(Disks { disks, commands })
    }

    /// What the work is given.
    pub fn for_work(&self) -> Vec<WorkDisk> {
        let work = |disk: &Served| match disk {
            Served::Disk(disk) => WorkDisk::Served { vhost: disk.vhost() },
            Served::Null(disk) => WorkDisk::Null { vhost: disk.vhost() },
        };
        self.disks.iter().map(work).collect()
    }

    /// What is known of each from outside.
    pub fn sources(&self) -> Vec<Source> {
        let source = |disk: &Served| match disk {
            Served::Disk(disk) => Source::Control(disk.control()),
            Served::Null(disk) => Source::Process(disk.pid()),
        };
        self.disks.iter().map(source).collect()
    }

    /// Ends them. An error if one does not end well.
    pub fn stop(self) -> Result<()> {
        self.disks.into_iter().try_for_each(|disk| match disk {
            Served::Disk(disk) => disk.stop(),
            Served::Null(_) => Ok(()),
        })
    }
}

/// Makes the devices, and gives the options that put a disk on them.
fn models(
    spillway: &Path,
    storage: &BTreeMap<String, String>,
    dir: &Path,
    commands: &mut Vec<String>,
) -> Result<Vec<String>> {
    let mut made: BTreeMap<&str, PathBuf> = BTreeMap::new();
    let mut options = Vec::new();
    for (plane, model) in storage {
        let number = made.len();
        let file = match made.get(model.as_str()) {
            Some(file) => file.clone(),
            None => {
                let file = dir.join(format!("device-{number}"));
                let arguments: Vec<String> =
                    ["storage-model", "create", model, &file.display().to_string()].map(String::from).into();
                let output = Command::new(spillway).args(&arguments).output().context("spillway")?;
                ensure!(
                    output.status.success(),
                    "storage model '{model}': {}",
                    String::from_utf8_lossy(&output.stderr).trim()
                );
                commands.push(line("spillway", &arguments));
                made.insert(model, file.clone());
                file
            }
        };
        options.extend([format!("--{plane}-model"), file.display().to_string()]);
    }
    Ok(options)
}

/// A copy that shares what the file system lets it share, and keeps holes; all of it on the disk, and nothing in memory.
fn clone(from: &Path, to: &Path) -> Result<()> {
    let output = Command::new("cp").args(["--sparse=always", "--reflink=auto"]).arg(from).arg(to).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
    forget(to)
}

/// Takes a file out of the host's page cache.
fn forget(path: &Path) -> Result<()> {
    let cannot = || format!("{}: cannot be taken out of the page cache", path.display());
    let file = File::open(path).with_context(cannot)?;
    rustix::fs::fdatasync(&file).with_context(cannot)?;
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).with_context(cannot)
}
