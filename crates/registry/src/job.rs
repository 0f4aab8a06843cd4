//! Orders of the daemon to a job of `spillway-streamd`, and what the job says. Owns their form: one JSON object on standard
//! input, and one a line on standard output.

use crate::download::DownloadOrder;
use crate::{BootSets, CollectReport, ProbeReport, PushReport, RegistryError, RegistryErrorKind};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// What a job does, and where.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobOrder {
    /// Work on a registry.
    Registry {
        /// The registry.
        place: Place,
        /// What is done.
        work: Work,
    },
    /// The download of an image that is in no registry of ours. The answer is `Downloaded`.
    Download(DownloadOrder),
}

/// Address of a registry, and how it is used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// `s3://bucket/prefix`, `https://host/path`, `http://host/path` or `file:///folder`.
    pub url: String,
    /// Address of an S3 store other than that of AWS.
    pub endpoint: Option<String>,
    /// Region of an S3 store.
    pub region: Option<String>,
    /// Whether nobody else writes to the registry, so that the store need not tell two writers apart.
    pub single_writer: bool,
    /// File with the credentials, which the job may read. None: requests are not signed.
    pub credentials: Option<PathBuf>,
}

/// Work of a job on a registry.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Work {
    /// Finds out what the store is. The answer is `Probed`.
    Probe {
        /// Word for the object that is written for that and deleted; none to write nothing.
        id: Option<String>,
    },
    /// Makes an empty store a registry. The answer is `Founded`.
    Found,
    /// Pushes an image. The answer is `Pushed`.
    Push {
        /// Name of the image in the registry.
        name: String,
        /// Version of the image in the registry.
        version: u32,
        /// The disk, which the job may read.
        disk: PathBuf,
        /// The list of the digests of its chunks, which the job may read.
        digests: PathBuf,
        /// Size of the disk, in bytes.
        size_bytes: u64,
        /// Signature for this name and version.
        signature: Option<String>,
        /// Unique word for the push.
        id: String,
    },
    /// Finds an image and reads its manifest and index. The answer is `Resolved`.
    Resolve {
        /// Name of the image in the registry.
        name: String,
        /// Version; none for the highest.
        version: Option<u32>,
        /// Public keys of which one must have signed the image; none to require no signature.
        keys: Vec<String>,
    },
    /// Fetches the digests of an image's chunks, 32 bytes each. The answer is `Listed`.
    List {
        /// Digest of the image: `sha256:` and 64 hexadecimal digits.
        digest: String,
        /// An existing file, empty, which the job may write.
        to: PathBuf,
    },
    /// Writes the boot set of a catalog beside an image. The answer is `BootSetKept`.
    KeepBootSet {
        /// Digest of the image.
        digest: String,
        /// Name of the catalog.
        catalog: String,
        /// Numbers of the chunks, in the order of their first use.
        chunks: Vec<u32>,
    },
    /// Fetches a whole image. The answer is `Fetched`.
    Fetch {
        /// Digest of the image: `sha256:` and 64 hexadecimal digits.
        digest: String,
        /// An existing file of the image's size that reads as zeroes, which the job may write.
        to: PathBuf,
    },
    /// Collects garbage. The answer is `Collected`.
    Collect {
        /// Age from which an object can be garbage, in seconds.
        grace_seconds: i64,
        /// Least time between recording a candidate and deleting it, in seconds.
        gap_seconds: i64,
        /// Whether anything is recorded and deleted.
        deletes: bool,
        /// Unique word for the pass.
        id: String,
    },
    /// Deletes the name of a version. The answer is `Forgotten`.
    Forget {
        /// Name of the image in the registry.
        name: String,
        /// Version of the image in the registry.
        version: u32,
    },
}

/// What a job says. `Progress` and `Total` may come often; one of the others comes last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobMessage {
    /// So many bytes of the image are done.
    Progress(u64),
    /// So many bytes there are to do, as far as is known.
    Total(u64),
    /// What the store is.
    Probed(ProbeReport),
    /// The store is a registry.
    Founded,
    /// What was pushed.
    Pushed(PushReport),
    /// What was found.
    Resolved(ResolvedImage),
    /// The digests are in the file. These chunks machines read first, as far as the registry says so.
    Listed(BootSets),
    /// The boot set is in the registry.
    BootSetKept,
    /// So many bytes were received, compressed.
    Fetched(u64),
    /// What was garbage.
    Collected(CollectReport),
    /// The name is deleted.
    Forgotten,
    /// The image is in the file.
    Downloaded {
        /// Address for people; of an OCI registry with the digest of the manifest.
        url: String,
    },
    /// It failed.
    Failed {
        /// Kind of the error.
        kind: RegistryErrorKind,
        /// Message for people.
        message: String,
    },
}

/// An image that was found in a registry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResolvedImage {
    /// Version of the image in the registry.
    pub version: u32,
    /// Digest of the image: `sha256:` and 64 hexadecimal digits.
    pub digest: String,
    /// Size of the disk, in bytes.
    pub size_bytes: u64,
}

impl From<RegistryError> for JobMessage {
    fn from(error: RegistryError) -> JobMessage {
        JobMessage::Failed { kind: error.kind, message: error.message }
    }
}
