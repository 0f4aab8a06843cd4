//! What a run lends its work, and what it gets back.
//!
//! Owns nothing: sockets, folders and the sampler belong to the run. Invariant: work that has returned, well or not, has
//! left no process behind.

use super::recording::Recording;
use crate::study::Action;
use spillway_testkit::guest::{Accelerator, Kit};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// What a run gives its work.
pub struct Stage<'a> {
    /// Kernel and images of the guests.
    pub kit: &'a Kit,
    /// How guests run: in hardware or in software.
    pub accelerator: Accelerator,
    /// The study's words for the workload.
    pub parameters: &'a BTreeMap<String, toml::Value>,
    /// What all random choices come from.
    pub seed: u64,
    /// The run's folder, which is there: raw data go into it.
    pub dir: &'a Path,
    /// A disk for each machine.
    pub disks: &'a [WorkDisk],
    /// What is asked of each disk again; only of use to the engine `replay`.
    pub recording: Option<&'a Recording>,
    /// Who samples the machines.
    pub watch: &'a dyn Watcher,
    /// When the work counts as failed.
    pub deadline: Instant,
}

/// The disk that a machine works on.
#[derive(Clone, Debug)]
pub enum WorkDisk {
    /// A disk of Spillway.
    Served {
        /// Its vhost-user-blk socket.
        vhost: PathBuf,
    },
    /// A null disk.
    Null {
        /// Its vhost-user-blk socket.
        vhost: PathBuf,
    },
}

/// Who looks on while work is done: the run's sampler.
pub trait Watcher: Sync {
    /// The work begins: this is time 0.
    fn begin(&self);
    /// A machine's VMM is this process.
    fn vmm(&self, machine: u32, pid: u32);
    /// A machine's VMM is ended after this: what it has used is known now, and no more comes.
    fn vmm_ends(&self, machine: u32);
    /// What a machine has counted inside until that time: `inside.reads`, `inside.read_bytes`, `inside.writes`,
    /// `inside.written_bytes`, `inside.cpu_s`.
    fn inside(&self, machine: u32, at: Instant, known: &BTreeMap<String, f64>);
}

/// The results of the work.
#[derive(Clone, Debug, Default)]
pub struct WorkResult {
    /// What users did, by time.
    pub actions: Vec<Action>,
    /// What it measured by itself, by name.
    pub figures: BTreeMap<String, f64>,
    /// Commands as they were given.
    pub commands: Vec<String>,
}

/// What a recording is made of: a machine of its own, on a disk of its own.
pub struct RecordStage<'a> {
    /// The guests; the disk is of their golden image.
    pub kit: &'a Kit,
    /// How guests run: in hardware or in software.
    pub accelerator: Accelerator,
    /// The program `spillway`.
    pub program: &'a Path,
    /// The study's words for the workload.
    pub parameters: &'a BTreeMap<String, toml::Value>,
    /// What all random choices come from.
    pub seed: u64,
    /// For the disk's sockets while it lasts: a folder with a short path.
    pub scratch: &'a Path,
    /// Where the recording goes: an existing folder on a local disk.
    pub dir: &'a Path,
    /// When the work counts as failed.
    pub deadline: Instant,
}
