//! Stores: folders that hold images and disks.

use crate::Name;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use utoipa::ToSchema;

/// A folder and what it is good for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StoreFolder {
    /// Its name.
    pub name: Name,
    /// An absolute path on the host.
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// What it is good for.
    pub class: StoreClass,
}

/// What a store is good for.
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
