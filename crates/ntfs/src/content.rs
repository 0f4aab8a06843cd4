//! Content of an attribute: in its record, or in clusters of the volume. Owns the map from offsets to clusters.

use crate::record::Attribute;
use crate::{ByteSource, NtfsError, bytes};

/// Number of runs of one content.
const MOST_RUNS: usize = 1 << 18;

/// Content of an attribute.
pub enum Content {
    /// The bytes are in the record.
    Resident(Vec<u8>),
    /// The bytes are in clusters.
    Clusters(Clusters),
}

/// Clusters of a content.
#[derive(Default)]
pub struct Clusters {
    runs: Vec<Run>,
    /// Number of clusters in the runs.
    clusters: u64,
    size_bytes: u64,
    /// What follows reads as zeroes.
    written_bytes: u64,
}

struct Run {
    /// Number of the first cluster within the content.
    first: u64,
    /// Place on the volume, in clusters. None: the clusters read as zeroes.
    at: Option<u64>,
}

impl Clusters {
    /// Adds the next part of the content.
    pub fn push(&mut self, part: Attribute) -> Result<(), NtfsError> {
        if self.runs.is_empty() {
            (self.size_bytes, self.written_bytes) = part.sizes()?;
        }
        let damaged = NtfsError::Damaged("list of clusters");
        for (len, at) in part.runs()? {
            if self.runs.len() >= MOST_RUNS {
                return Err(damaged);
            }
            self.runs.push(Run { first: self.clusters, at });
            self.clusters = self.clusters.checked_add(len).ok_or(damaged)?;
        }
        Ok(())
    }

    /// Number of clusters that it has so far.
    pub fn clusters(&self) -> u64 {
        self.clusters
    }

    fn read(
        &self,
        source: &impl ByteSource,
        cluster_bytes: u64,
        at: u64,
        to: &mut [u8],
    ) -> Result<(), NtfsError> {
        let damaged = NtfsError::Damaged("list of clusters");
        let (mut at, mut to) = (at, to);
        while !to.is_empty() {
            if at >= self.written_bytes {
                to.fill(0);
                return Ok(());
            }
            let cluster = at / cluster_bytes;
            if cluster >= self.clusters {
                return Err(damaged);
            }
            let n = self.runs.partition_point(|run| run.first <= cluster).checked_sub(1).ok_or(damaged)?;
            let end = self.runs.get(n + 1).map_or(self.clusters, |next| next.first);
            // The end of a run is behind `at`, and may be behind the end of any disk.
            let left = end.saturating_mul(cluster_bytes).min(self.written_bytes) - at;
            let len = usize::try_from(left).unwrap_or(usize::MAX).min(to.len());
            let (piece, further) = to.split_at_mut(len);
            match self.runs[n].at {
                None => piece.fill(0),
                Some(place) => {
                    let start = place.checked_add(cluster - self.runs[n].first).ok_or(damaged)?;
                    let start = start.checked_mul(cluster_bytes).ok_or(damaged)?;
                    source.read_at(start.checked_add(at % cluster_bytes).ok_or(damaged)?, piece)?;
                }
            }
            (at, to) = (at + len as u64, further);
        }
        Ok(())
    }
}

impl Content {
    /// Size in bytes.
    pub fn len_bytes(&self) -> u64 {
        match self {
            Content::Resident(bytes) => bytes.len() as u64,
            Content::Clusters(clusters) => clusters.size_bytes,
        }
    }

    /// Reads bytes, all of which must be inside it.
    pub fn read(
        &self,
        source: &impl ByteSource,
        cluster_bytes: u64,
        at: u64,
        to: &mut [u8],
    ) -> Result<(), NtfsError> {
        if at.checked_add(to.len() as u64).is_none_or(|end| end > self.len_bytes()) {
            return Err(NtfsError::Unreadable);
        }
        match self {
            Content::Resident(content) => {
                let at = usize::try_from(at).map_err(|_| NtfsError::Unreadable)?;
                to.copy_from_slice(bytes::part(content, at, to.len())?);
                Ok(())
            }
            Content::Clusters(clusters) => clusters.read(source, cluster_bytes, at, to),
        }
    }
}

/// A file of a volume, open to be read.
pub struct NtfsFile<'a, S> {
    pub(crate) source: &'a S,
    pub(crate) cluster_bytes: u64,
    pub(crate) content: Content,
}

impl<S: ByteSource> ByteSource for NtfsFile<'_, S> {
    fn len_bytes(&self) -> u64 {
        self.content.len_bytes()
    }

    fn read_at(&self, at: u64, buffer: &mut [u8]) -> Result<(), NtfsError> {
        self.content.read(self.source, self.cluster_bytes, at, buffer)
    }
}

impl<S: ByteSource> NtfsFile<'_, S> {
    /// Reads the beginning of the file, at most this many bytes.
    pub fn head(&self, most_bytes: usize) -> Result<Vec<u8>, NtfsError> {
        let len = usize::try_from(self.len_bytes()).unwrap_or(usize::MAX).min(most_bytes);
        let mut bytes = vec![0; len];
        self.read_at(0, &mut bytes)?;
        Ok(bytes)
    }
}
