//! Machines and disks whose image comes from a far store: how soon they start, what they ask of the store, and what they do when it
//! is away, wrong or killed.
//!
//! Owns the rows, and the images in the store. Invariant: each row begins with hosts that have nothing.

mod away;
mod boots;
mod faults;
mod host;
mod push;
mod replays;
mod report;
mod site;

use crate::Options;
use crate::environment::Environment;
use anyhow::{Context, Result, ensure};
use host::IMAGE;
use report::{Figures, Report};
use rustix::fs::{SeekFrom, seek};
use site::{IMAGE_BYTES, Site};
use spillway_testkit::daemon::Daemon;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Rows in the order in which they are measured. The first needs a store without boot sets, and leaves one.
const ROWS: [(&str, Row, Often); 8] = [
    ("S1", boots::boots, Often::EachRound),
    ("S3", replays::hosts, Often::EachRound),
    ("S4", replays::disks, Often::EachRound),
    ("S5", replays::misses, Often::EachRound),
    ("S6", replays::resident, Often::EachRound),
    ("S10", push::pushes, Often::EachRound),
    ("S8", faults::wrong_bytes, Often::Once),
    ("S9", faults::kills, Often::Once),
];

/// Measures a row once.
type Row = fn(&Bench, &mut Figures) -> Result<()>;

/// How often a row is measured.
#[derive(PartialEq, Eq)]
enum Often {
    /// A median is taken over rounds.
    EachRound,
    /// It repeats what it does by itself.
    Once,
}

/// What rows have in common.
struct Bench<'a> {
    options: &'a Options,
    site: Site,
    /// The Debian image's file.
    disk: PathBuf,
    /// Its chunks that are not zeroes.
    data: Vec<u64>,
}

/// Measures all of it.
pub fn measure(options: &Options, environment: &Environment) -> Result<Report> {
    let takes = |row: &str| options.takes_row(row);
    let bench = Bench::new(options, environment)?;
    let mut figures = Figures::default();
    for round in 0..options.rounds() {
        eprintln!("bench: stream: round {}", round + 1);
        for (name, row, _) in ROWS.iter().filter(|(name, _, often)| takes(name) && *often == Often::EachRound)
        {
            row(&bench, &mut figures).with_context(|| format!("row {name}"))?;
        }
    }
    for (name, row, _) in ROWS.iter().filter(|(name, _, often)| takes(name) && *often == Often::Once) {
        row(&bench, &mut figures).with_context(|| format!("row {name}"))?;
    }
    if takes("S7") {
        away::away(&bench, &mut figures).context("row S7")?;
    }
    // The boots of S1 say what S2 asks.
    let checks = figures.checks(|row| takes(row) || row == "S2" && takes("S1"));
    Ok(Report { schema: 1, origin: environment.origin.clone(), figures: figures.0, checks })
}

impl<'a> Bench<'a> {
    fn new(options: &'a Options, environment: &Environment) -> Result<Bench<'a>> {
        let site = Site::new(environment)?;
        let disk = site.path("debian.raw");
        let copied =
            Command::new("cp").arg("--sparse=always").args([site.kit.golden(), disk.clone()]).status()?;
        ensure!(copied.success(), "{}: cannot be copied", site.kit.golden().display());
        File::options().write(true).open(&disk)?.set_len(IMAGE_BYTES)?;
        grow(&disk)?;
        publish(&site, IMAGE, &disk)?;
        let data = chunks_with_data(&disk)?;
        Ok(Bench { options, site, disk, data })
    }

    /// Pushes another image, of which each chunk with data differs from that of the first. Returns its file.
    fn publish_other(&self, name: &str) -> Result<PathBuf> {
        let path = self.site.path("other.raw");
        let copied = Command::new("cp").arg("--sparse=always").args([&self.disk, &path]).status()?;
        ensure!(copied.success(), "{}: cannot be copied", self.disk.display());
        let file = File::options().write(true).open(&path)?;
        for chunk in &self.data {
            file.write_all_at(format!("{name} {chunk}").as_bytes(), chunk << 20)?;
        }
        publish(&self.site, name, &path)?;
        Ok(path)
    }
}

/// Pushes an image to the store, from a host that has no other purpose.
fn publish(site: &Site, name: &str, disk: &Path) -> Result<()> {
    let folder = site.path(&format!("publisher-of-{name}"));
    fs::create_dir_all(&folder)?;
    let publisher = Daemon::start(&site.spillway, &folder, &[])?;
    publisher.ask(&["registry", "add", "hub", &format!("file://{}", site.hub().display())])?;
    publisher.ask(&["image", "import", name, &disk.display().to_string(), "--format", "raw"])?;
    publisher.ask(&["image", "push", name, "hub"])?;
    Ok(())
}

/// Makes the file system as large as its disk.
fn grow(disk: &Path) -> Result<()> {
    for command in [&["e2fsck", "-fy"][..], &["resize2fs"]] {
        let done = Command::new(command[0])
            .args(&command[1..])
            .arg(disk)
            .output()
            .context("e2fsprogs are needed")?;
        ensure!(done.status.code() < Some(4), "{}: {}", command[0], String::from_utf8_lossy(&done.stderr));
    }
    Ok(())
}

/// The chunks of a file that are not zeroes.
fn chunks_with_data(disk: &Path) -> Result<Vec<u64>> {
    let file = File::open(disk)?;
    let mut bytes = vec![0; 1 << 20];
    let mut found = Vec::new();
    let mut at = 0;
    while let Ok(data) = seek(&file, SeekFrom::Data(at)) {
        let chunk = data >> 20;
        file.read_exact_at(&mut bytes, chunk << 20)?;
        found.extend(bytes.iter().any(|byte| *byte != 0).then_some(chunk));
        at = (chunk + 1) << 20;
    }
    Ok(found)
}
