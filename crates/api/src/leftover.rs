//! Leftovers: files that deleted machines have kept.

use crate::Name;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use utoipa::ToSchema;

/// What a machine has left that was deleted without its data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Leftover {
    /// The machine's UUID, by which it is deleted.
    pub uuid: String,
    /// Name that the machine had. A new machine may have this name by now.
    pub machine: Name,
    /// Name of the catalog that owned the machine.
    pub catalog: Name,
    /// Time at which the machine was deleted.
    #[schema(value_type = String, format = DateTime)]
    pub deleted: Timestamp,
    /// The file of its data disk, raw.
    #[schema(value_type = Option<String>)]
    pub data_disk: Option<PathBuf>,
    /// Data of the machine's own disk that is still kept.
    pub disk: Option<LeftDisk>,
    /// What the files take of their file system; nothing if they cannot be seen.
    pub allocated_bytes: Option<u64>,
}

/// A disk of mode `persistent` that is left: the differences to a version of an image, which stays while it does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LeftDisk {
    /// Path of the file that is kept, on the daemon's host.
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// Name of the image that the disk was made from.
    pub image: Name,
    /// Version of that image, counted from 1.
    pub version: u32,
}
