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
    /// An absolute path on the host.
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// Class of files that the store is for.
    pub class: StoreClass,
}

/// Class of a store: which files it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum StoreClass {
    /// Other hosts see it too: images.
    Shared,
    /// On a disk of this host: images, overflows, disks that keep writes.
    Local,
    /// Fast and for what can be made again: private copies, before `temp`.
    Cache,
    /// Emptied when the host starts: private copies, scratch disks.
    Temp,
}

/// A store and the space in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StoreDetails {
    /// Name of the store, unique on its host.
    pub name: Name,
    /// An absolute path on the host.
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

/// How full a store's file system is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Space {
    /// Size of the file system, in bytes.
    pub total_bytes: u64,
    /// Free bytes of the file system that the store is on.
    pub free_bytes: u64,
    /// What the free space means for new machines.
    pub level: SpaceLevel,
    /// When it is full, if it fills on as it did in the last minutes.
    pub seconds_to_full: Option<u64>,
}

/// What it means how full a store is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum SpaceLevel {
    /// There is enough space for all uses.
    #[default]
    Normal,
    /// More than 80% are used, and less than 64 GiB are left.
    Warning,
    /// More than 90% are used, and less than 16 GiB are left: machines whose overflow is there are not given away.
    Critical,
}
