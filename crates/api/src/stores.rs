//! Stores: folders that hold images and disks.

use crate::Name;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use utoipa::ToSchema;

/// A folder of the host that is used as a store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StoreFolder {
    /// Name of the store, unique on its host.
    pub name: Name,
    /// Absolute path of the folder, on the daemon's host.
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// Class of files that the store is for.
    pub class: StoreClass,
}

/// Class of a store: which files it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum StoreClass {
    /// Shared with other hosts; for images.
    Shared,
    /// On a disk of this host; for images, overflows, and disks that keep writes.
    Local,
    /// Fast, for data that can be made again; private copies, preferred to `temp`.
    Cache,
    /// Emptied when the host starts; for private copies and scratch disks.
    Temp,
}

/// A store and the space in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StoreDetails {
    /// Name of the store, unique on its host.
    pub name: Name,
    /// Absolute path of the folder, on the daemon's host.
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// Class of files that the store is for.
    pub class: StoreClass,
    /// Space in the store; none until it was measured for the first time.
    pub space: Option<Space>,
}

impl StoreDetails {
    /// Combines a store's settings with the space that was measured.
    pub fn new(folder: StoreFolder, space: Option<Space>) -> StoreDetails {
        let StoreFolder { name, path, class } = folder;
        StoreDetails { name, path, class, space }
    }
}

/// Space of a store's file system.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Space {
    /// Size of the file system, in bytes.
    pub total_bytes: u64,
    /// Free bytes of the file system that the store is on.
    pub free_bytes: u64,
    /// What the free space means for new machines.
    pub level: SpaceLevel,
    /// Seconds until the file system is full at the rate of the last minutes.
    pub seconds_to_full: Option<u64>,
}

/// Level of the used space in a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum SpaceLevel {
    /// There is enough space for all uses.
    #[default]
    Normal,
    /// More than 80% of the space are used, and less than 64 GiB are free.
    Warning,
    /// More than 90% of the space are used, and less than 16 GiB are free: machines whose overflow is in the store cannot
    /// be claimed.
    Critical,
}
