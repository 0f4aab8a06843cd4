//! Leftovers: files that deleted machines have kept.

use crate::Name;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use utoipa::ToSchema;

/// Files of a machine that was deleted without its data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Leftover {
    /// UUID of the machine, by which its leftovers are deleted.
    pub uuid: String,
    /// Name that the machine had. A new machine may have this name by now.
    pub machine: Name,
    /// Name of the catalog that owned the machine.
    pub catalog: Name,
    /// Time at which the machine was deleted.
    #[schema(value_type = String, format = DateTime)]
    pub deleted: Timestamp,
    /// Path of the raw file of its data disk.
    #[schema(value_type = Option<String>)]
    pub data_disk: Option<PathBuf>,
    /// The machine's own disk, if it was of mode `persistent`.
    pub disk: Option<LeftoverDisk>,
    /// Space that the files use, in bytes; none if they cannot be seen.
    pub allocated_bytes: Option<u64>,
}

/// A leftover disk of mode `persistent`: its differences from a version of an image, which cannot be deleted while this
/// exists.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LeftoverDisk {
    /// Path of the file that is kept, on the daemon's host.
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// Name of the image that the disk was made from.
    pub image: Name,
    /// Version of that image, counted from 1.
    pub version: u32,
}
