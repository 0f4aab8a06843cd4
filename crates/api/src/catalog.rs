//! Catalogs: machines of one kind.

use crate::{ImageRef, Name};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// Limit of a RAM tier of which nothing is said.
pub const RAM_BYTES_DEFAULT: u64 = 256 << 20;
/// Limit of an overflow of which nothing is said.
pub const OVERFLOW_BYTES_DEFAULT: u64 = 10 << 30;
const MEMORY_BYTES_DEFAULT: u64 = 1 << 30;

/// What is wanted: so many machines of one image with one cache policy. What is left out has the value that `GET` shows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CatalogSpec {
    /// The image, and the version if it is to stay the same: without one, each start takes the published one.
    pub image: ImageRef,
    /// How many machines.
    #[serde(default)]
    pub count: u32,
    /// Whether a machine is somebody's own and keeps what is written.
    #[serde(default, rename = "type")]
    pub kind: CatalogKind,
    /// Where a disk's writes go. By default `ram+overflow`, for dedicated machines `persistent`.
    #[serde(default)]
    pub mode: Option<DiskMode>,
    /// Limit of a disk's RAM tier, in modes that have one. By default 256 MiB.
    #[serde(default)]
    pub ram_bytes: Option<u64>,
    /// What of it a disk always has.
    #[serde(default)]
    pub ram_guarantee_bytes: u64,
    /// Limit of a disk's overflow file, in modes that have one. By default 10 GiB.
    #[serde(default)]
    pub overflow_bytes: Option<u64>,
    /// The store for overflow, difference and data files; the first of class `local` if none is named.
    #[serde(default)]
    pub overflow_store: Option<Name>,
    /// What happens to a write when the cache is full.
    #[serde(default)]
    pub full: FullPolicy,
    /// How the image is read.
    #[serde(default)]
    pub base_cache: BaseCache,
    /// Processors of a machine.
    #[serde(default = "one")]
    pub vcpus: u32,
    /// Memory of a machine.
    #[serde(default = "memory_bytes")]
    pub memory_bytes: u64,
    /// How machines reach others.
    #[serde(default)]
    pub network: Network,
    /// Names of machines: a run of `#` stands for a number. By default the catalog's name and `-###`.
    #[serde(default)]
    pub naming: Option<String>,
    /// What throws away what a machine has written.
    #[serde(default)]
    pub reset: ResetEvent,
    /// Machines that are kept started, ready and unclaimed.
    #[serde(default)]
    pub warm: u32,
    /// Started when the daemon starts and kept so.
    #[serde(default)]
    pub autostart: bool,
    /// For people and selectors.
    #[serde(default)]
    pub labels: BTreeMap<Name, String>,
}

fn memory_bytes() -> u64 {
    MEMORY_BYTES_DEFAULT
}

fn one() -> u32 {
    1
}

/// Whether a machine is somebody's own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum CatalogKind {
    /// No: each is as good as the others, and forgets.
    #[default]
    Pooled,
    /// Yes: it keeps what is written.
    Dedicated,
}

/// Where a disk's writes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum DiskMode {
    /// To the RAM tier, then to the overflow.
    #[serde(rename = "ram+overflow")]
    RamOverflow,
    /// To the RAM tier alone.
    #[serde(rename = "ram")]
    Ram,
    /// Straight to the overflow.
    #[serde(rename = "overflow")]
    Overflow,
    /// In place in a difference file.
    #[serde(rename = "direct")]
    Direct,
    /// To a private copy of the image, destroyed when the machine stops.
    #[serde(rename = "ephemeral")]
    Ephemeral,
    /// To a file that outlives machine, daemon and host.
    #[serde(rename = "persistent")]
    Persistent,
}

/// What happens to a write when the cache is full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum FullPolicy {
    /// It waits for room.
    #[default]
    Pause,
    /// It fails.
    Fail,
}

/// How the image is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum BaseCache {
    /// Through the host's page cache, which all machines share.
    #[default]
    Host,
    /// Past it.
    None,
}

/// How machines reach others.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Network {
    /// Through the hypervisor, outward only.
    #[default]
    User,
    /// On a bridge of the host.
    Bridge(String),
    /// Not.
    None,
}

/// What throws away what a machine has written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ResetEvent {
    /// Its stop.
    #[default]
    PowerCycle,
    /// Its stop, and a reboot from within.
    GuestReboot,
    /// Only a request.
    Never,
}

/// A catalog as it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Catalog {
    /// Its name.
    pub name: Name,
    /// What is wanted.
    pub spec: CatalogSpec,
    /// What its machines take at their next start.
    pub version: u32,
    /// The versions that it has had, oldest first.
    pub history: Vec<HistoryEntry>,
    /// When it was made.
    #[schema(value_type = String, format = DateTime)]
    pub created: Timestamp,
    /// What may not be meant so.
    pub warnings: Vec<String>,
}

/// Asks for a catalog.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewCatalog {
    /// Its name.
    pub name: Name,
    /// What is wanted.
    pub spec: CatalogSpec,
}

/// A version that a catalog has had.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HistoryEntry {
    /// The image.
    pub image: Name,
    /// Its version.
    pub version: u32,
    /// Since when.
    #[schema(value_type = String, format = DateTime)]
    pub since: Timestamp,
}
