//! Figures of one machine's disk that would be too large for the figures of all: how long its requests took, and where it was
//! written most. Owns the answers of the last moment.
//!
//! Invariant: a disk is asked the same at most once in a moment, and nobody waits longer than [`PATIENCE`] for it.

use super::recent::RecentAnswers;
use super::{PATIENCE, answer, connect_for};
use crate::error::HostError;
use crate::machines::run::MachineFolders;
use crate::machines::views::MachineReader;
use crate::machines::{View, blocking};
use serde::de::DeserializeOwned;
use spillway_api::{DirtyRanges, DiskLatency, ErrorCode, Name, bounds};
use spillway_control::Request;
use std::sync::Arc;
use std::time::Duration;

/// How long the latency of a disk is reused.
const LATENCY_FRESH: Duration = Duration::from_millis(400);
/// How long its ranges are reused: for them a word of each 2 MiB of the disk is read.
const RANGES_FRESH: Duration = Duration::from_secs(2);
/// Longest answer of a disk.
const MAX_ANSWER_BYTES: usize = 1 << 20;

/// Asks disks of machines one by one.
pub struct DiskFigures {
    reader: MachineReader,
    folders: MachineFolders,
    latencies: RecentAnswers<Name, DiskLatency>,
    ranges: RecentAnswers<Name, DirtyRanges>,
}

impl DiskFigures {
    /// Asks the disks of these machines.
    pub fn new(reader: MachineReader, folders: MachineFolders) -> DiskFigures {
        let (latencies, ranges) = (RecentAnswers::new(LATENCY_FRESH), RecentAnswers::new(RANGES_FRESH));
        DiskFigures { reader, folders, latencies, ranges }
    }

    /// Returns how long the requests of a machine's disk took.
    pub async fn latency(&self, name: &Name) -> Result<Arc<DiskLatency>, HostError> {
        let asked = self.latencies.get(name.clone(), self.ask(name, Request::Latency));
        in_time(name, asked).await
    }

    /// Returns the ranges of a machine's disk that were written most since its last reset, at most so many. The disk is asked for
    /// as many as anybody may want, so that who wants fewer asks it nothing else.
    pub async fn dirty_ranges(&self, name: &Name, limit: u32) -> Result<DirtyRanges, HostError> {
        let request = Request::Dirty { limit: bounds::LIMIT.most as u32 };
        let asked = self.ranges.get(name.clone(), self.ask(name, request));
        let mut found = DirtyRanges::clone(&*in_time(name, asked).await?);
        found.ranges.truncate(limit as usize);
        Ok(found)
    }

    async fn ask<T: DeserializeOwned>(&self, name: &Name, request: Request) -> Result<T, HostError> {
        let (reader, asked) = (self.reader.clone(), name.clone());
        check_served(&blocking(move || reader.view(&asked)).await?)?;
        let folder = self.folders.of(name).path().to_owned();
        let found = async {
            let mut lines = connect_for(&folder, MAX_ANSWER_BYTES).await?;
            answer(&mut lines, &request).await
        };
        found.await.map_err(|e: std::io::Error| {
            let message = format!("{name}: its disk cannot say it: {e}: restart the machine if its disk is of an earlier version");
            HostError::new(ErrorCode::Unavailable, message)
        })
    }
}

/// Refuses if the disk of this machine is not served.
pub fn check_served(view: &View) -> Result<(), HostError> {
    match view.status.run.as_ref().is_some_and(|run| run.disk_pid.is_some()) {
        true => Ok(()),
        false => {
            let message = format!("{} has no disk that is served: start it first", view.machine.name);
            Err(HostError::new(ErrorCode::Conflict, message))
        }
    }
}

async fn in_time<T>(name: &Name, asked: impl Future<Output = Result<T, HostError>>) -> Result<T, HostError> {
    tokio::time::timeout(PATIENCE, asked).await.unwrap_or_else(|_| {
        let message = format!("{name}: its disk has not answered in {} ms", PATIENCE.as_millis());
        Err(HostError::new(ErrorCode::Unavailable, message))
    })
}
