//! A job of `spillway-streamd`: one confined process for one piece of work. Owns what it may open, and how its errors become
//! the daemon's.

use crate::confined::{Confined, path_of};
use crate::error::HostError;
use crate::images::has_room;
use crate::operations::Progress;
use rustix::fs::{MemfdFlags, memfd_create};
use spillway_api::{ErrorCode, Registry};
use spillway_registry::RegistryErrorKind;
use spillway_registry::job::{JobMessage, JobOrder, Place, Work};
use std::fs::File;
use std::io::{Seek, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longest line of a job: a list of all images of a registry is one.
const MOST_LINE_BYTES: usize = 16 << 20;

/// Files that a job may open beside those of its registry.
#[derive(Default)]
pub struct JobFiles<'a> {
    /// Files that it may read, by their descriptors.
    pub reads: Vec<&'a File>,
    /// Folder whose files it may write.
    pub writes: Option<PathBuf>,
}

/// A job.
pub struct Job<'a> {
    /// The program `spillway-streamd`.
    pub program: &'a Path,
    /// What it is about, for errors that do not say it themselves.
    pub subject: String,
    /// Longest time for it.
    pub deadline: Duration,
}

impl Job<'_> {
    /// Carries out work on a registry. Returns its result.
    pub fn work_on(
        &self,
        registry: &Registry,
        work: Work,
        files: JobFiles<'_>,
        progress: &Progress,
    ) -> Result<JobMessage, HostError> {
        let Registry { name, url, .. } = registry;
        let credentials = match &registry.credentials {
            None => None,
            Some(path) => Some(File::open(path).map_err(|e| {
                let message = format!("registry {name}: the credentials in {}: {e}", path.display());
                HostError::new(ErrorCode::Unavailable, message)
            })?),
        };
        let place = place_of(registry, credentials.as_ref().map(|file| path_of(file).into()));
        let folder = url.strip_prefix("file://").map(Path::new);
        if let Some(folder) = folder.filter(|folder| !folder.is_dir()) {
            let message = format!("registry {name}: {}: there is no such folder", folder.display());
            return Err(HostError::invalid(message));
        }
        let JobFiles { reads, writes } = files;
        let reads = reads.into_iter().chain(&credentials).collect();
        self.run(&JobOrder::Registry { place, work }, JobFiles { reads, writes }, folder, progress)
    }

    /// Runs the process to its end. It may also change the files of `folder`. Returns its result.
    pub fn run(
        &self,
        order: &JobOrder,
        files: JobFiles<'_>,
        folder: Option<&Path>,
        progress: &Progress,
    ) -> Result<JobMessage, HostError> {
        let subject = &self.subject;
        let fault = |why: String| HostError::new(ErrorCode::Internal, format!("{subject}: {why}"));
        spillway_control::program::check_program(self.program).map_err(|e| {
            let message = format!("{subject}: {e}: the program is in the package spillway");
            HostError::new(ErrorCode::Unavailable, message)
        })?;
        let mut input: File =
            memfd_create("order", MemfdFlags::CLOEXEC).map_err(|e| fault(format!("no order: {e}")))?.into();
        serde_json::to_writer(&input, order).map_err(|e| fault(format!("no order: {e}")))?;
        input.flush().and_then(|()| input.rewind()).map_err(|e| fault(format!("no order: {e}")))?;
        let mut job = Confined::new(&self.program.to_string_lossy(), self.deadline)
            .arg("job")
            .stdin(input)
            .with_network();
        for file in files.reads {
            job = job.may_read(file);
        }
        if let Some(folder) = &files.writes {
            job = job.may_write(folder);
        }
        if let Some(folder) = folder {
            job = job.may_change(folder);
        }
        let mut lines = Lines::default();
        let ended = job.run(|said| {
            lines.hear(said, progress).map_err(fault)?;
            progress.goes_on()?;
            files.writes.as_ref().map_or(Ok(()), |folder| has_room(folder))
        })?;
        match (lines.last, order) {
            // It names its address itself.
            (Some(JobMessage::Failed { kind, message }), JobOrder::Download(_)) => {
                Err(HostError::new(code_of(kind), message))
            }
            (Some(JobMessage::Failed { kind, message }), JobOrder::Registry { .. }) => {
                Err(HostError::new(code_of(kind), format!("{subject}: {message}")))
            }
            (Some(last), _) if ended.success => Ok(last),
            _ => Err(fault(format!("spillway-streamd has ended without a result: {}", ended.complaint))),
        }
    }
}

/// Address of a registry, for `spillway-streamd`, with the path at which it finds the credentials.
pub fn place_of(registry: &Registry, credentials: Option<PathBuf>) -> Place {
    Place {
        url: registry.url.clone(),
        endpoint: registry.endpoint.clone(),
        region: registry.region.clone(),
        single_writer: registry.single_writer,
        credentials,
    }
}

/// What a job says, line by line.
#[derive(Default)]
struct Lines {
    begun: Vec<u8>,
    last: Option<JobMessage>,
}

impl Lines {
    fn hear(&mut self, said: &[u8], progress: &Progress) -> Result<(), String> {
        self.begun.extend_from_slice(said);
        while let Some(end) = self.begun.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.begun.drain(..=end).collect();
            let message = serde_json::from_slice(&line)
                .map_err(|e| format!("spillway-streamd says what is not understood: {e}"))?;
            match message {
                JobMessage::Progress(bytes) => progress.set_done(bytes),
                JobMessage::Total(bytes) => progress.set_total(bytes),
                other => self.last = Some(other),
            }
        }
        match self.begun.len() > MOST_LINE_BYTES {
            true => Err("spillway-streamd says too much".into()),
            false => Ok(()),
        }
    }
}

fn code_of(kind: RegistryErrorKind) -> ErrorCode {
    match kind {
        RegistryErrorKind::Absent => ErrorCode::NotFound,
        RegistryErrorKind::Denied | RegistryErrorKind::Unreachable => ErrorCode::Unavailable,
        RegistryErrorKind::Damaged => ErrorCode::Damaged,
        RegistryErrorKind::Exists => ErrorCode::Exists,
        RegistryErrorKind::Unsigned | RegistryErrorKind::Busy => ErrorCode::Conflict,
        RegistryErrorKind::Unsupported => ErrorCode::Invalid,
        RegistryErrorKind::Forbidden => ErrorCode::Forbidden,
        RegistryErrorKind::Local => ErrorCode::Unavailable,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_in_pieces_and_nonsense_ends_the_job() {
        let (mut lines, progress) = (Lines::default(), Progress::default());
        for piece in ["{\"prog", "ress\":7}\n\"forg", "", "otten\"\n{\"progress\":9}\n"] {
            lines.hear(piece.as_bytes(), &progress).unwrap();
        }
        assert_eq!(lines.last, Some(JobMessage::Forgotten));
        assert!(lines.hear(b"rubbish\n", &progress).is_err());
        assert!(Lines::default().hear(&vec![b'x'; MOST_LINE_BYTES + 1], &progress).is_err());
    }
}
