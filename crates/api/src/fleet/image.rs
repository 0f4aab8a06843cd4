//! Images of a fleet: versions that all hosts have from a registry, and how many of them are to have all of it.
//!
//! Owns their fields, decides nothing. Invariant: a version has one number, in the registry and on each host.

use crate::{ImageRef, Name};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// Asks for a version of an image to be one of the fleet's, or for another number of copies of one that is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewFleetImage {
    /// Image of the fleet, such as `debian:3`. The version has the number that it has in the registry, which may be left out.
    pub image: ImageRef,
    /// Registry of the fleet that has the image.
    pub registry: Name,
    /// Image in the registry, such as `debian-golden:3`. Without a version it is that of `image`, or else the highest.
    pub source: ImageRef,
    /// Number of hosts that have all of the image, whether or not they have machines of it.
    #[serde(default)]
    pub full_copies: u32,
}

/// A version of an image of a fleet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FleetImage {
    /// Name of the image, for catalogs of the fleet.
    pub image: Name,
    /// Number of the version, in the registry and on each host.
    pub version: u32,
    /// Digest by which hosts know the content of the version.
    pub digest: String,
    /// Size of the image, in bytes.
    pub size_bytes: u64,
    /// Registry that hosts have it from.
    pub registry: Name,
    /// Name of the image in the registry.
    pub source: Name,
    /// Number of hosts that are to have all of it, at least.
    pub full_copies: u32,
    /// Hosts that are alive and have reported that they have all of it, in the order of their names.
    pub whole: Vec<Name>,
    /// Hosts that are alive and have reported a part, and how much of what machines read until they are ready they have, in thousandths.
    pub parts: BTreeMap<Name, u32>,
    /// Catalogs of the fleet whose machines have it, or are to have it.
    pub catalogs: Vec<Name>,
}
