//! Records of a fleet: what is kept in etcd, as JSON. Owns their types, and the version of their format.
//!
//! Invariant: a host reads nothing of a fleet whose format it does not know. What a record may hold is bounded before it is written, and
//! whoever can write to etcd is trusted as much as the hosts are.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use spillway_api::{
    FleetCatalogSpec, FleetRolloutState, HistoryEntry, Hypervisor, Identity, IsolationAction, Name, Registry,
    RolloutStrategy,
};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Version of the records that this program reads and writes.
pub const FORMAT: u32 = 1;
/// Longest record of a host's state, in bytes.
pub const MOST_STATUS_BYTES: usize = 16_384;

/// Record `meta`: what all hosts must understand.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetaRecord {
    /// Version of the records. A host that does not know it takes no part.
    pub format: u32,
    /// Identity of the fleet, so that a host does not take another one of the same name for its own.
    pub fleet_id: String,
    /// Time at which the fleet was created.
    pub created: Timestamp,
    /// Whether Spillway places machines. If not, another program writes the shares.
    pub placer: bool,
}

/// Record `hosts/HOST`: what is desired of a host. The host writes its zone and labels, people the rest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostRecord {
    /// Identity of the host, so that another one does not take its name.
    pub host_id: String,
    /// Zone of the host: hosts of a zone may fail together.
    pub zone: Name,
    /// Labels of the host, for `host_labels` of catalogs.
    #[serde(default)]
    pub labels: BTreeMap<Name, String>,
    /// Whether the host gets no further machines.
    #[serde(default)]
    pub is_cordoned: bool,
    /// Whether its machines are replaced by others elsewhere. Such a host gets no further ones, too.
    #[serde(default)]
    pub is_draining: bool,
    /// Epoch of the host that somebody has declared dead: it counts as lost as long as it has no later one.
    #[serde(default)]
    pub dead_epoch: Option<i64>,
    /// How other hosts reach the daemon, as in the last record `alive/HOST`: they are asked about the host when that record is gone. Its
    /// daemon writes it; none before it has done so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub door: Option<DoorRecord>,
}

/// How other hosts reach a daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DoorRecord {
    /// Address of the daemon, `HOST:PORT`.
    pub address: String,
    /// SHA-256 of the certificate that the daemon shows, in hexadecimal digits.
    pub certificate: String,
}

/// Record `alive/HOST`, which goes with the lease of the host. The revision that created it is the host's epoch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AliveRecord {
    /// Identity of the daemon's process: a daemon that finds another one here has lost its name.
    pub instance: String,
    /// Boot of the host (`/proc/sys/kernel/random/boot_id`), and the file that has its records.
    pub boot_id: String,
    /// Address at which other hosts reach the daemon, `HOST:PORT`.
    pub address: String,
    /// SHA-256 of the certificate that the daemon shows there, and to other hosts, in hexadecimal digits.
    pub certificate: String,
    /// Version of the program.
    pub version: String,
    /// What runs machines on the host.
    pub hypervisor: Hypervisor,
    /// Address at which other hosts get chunks of streamed images, `HOST:PORT`; none: the host sends none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peers: Option<String>,
    /// Lease that the record was written with. A host whose lease is another one writes the record again.
    #[serde(default)]
    pub lease: i64,
}

/// Record `status/HOST`: what a host has, and what its machines do. Written at most once in ten seconds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatusRecord {
    /// What the machines of the fleet may take together: the budget of the host without its own catalogs.
    pub budget: BudgetRecord,
    /// Catalogs of the fleet on the host.
    #[serde(default)]
    pub catalogs: BTreeMap<Name, CatalogStatus>,
    /// Parts of images that the host has, in thousandths of their boot sets, by image and version (`debian:3`). What is missing here
    /// is not on the host.
    #[serde(default)]
    pub images: BTreeMap<String, u32>,
    /// Versions of images of which the host has all (`debian:3`).
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub whole: BTreeSet<String>,
    /// Whether images or catalogs are left out, because the record would be too long.
    #[serde(default, skip_serializing_if = "is_false")]
    pub is_cut: bool,
}

/// What machines may take of a host together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BudgetRecord {
    /// Guarantees of caches, in bytes.
    pub guarantee_bytes: u64,
    /// Limits of caches, in bytes.
    pub limit_bytes: u64,
    /// Memory of guests, and limits of caches, in bytes.
    pub memory_bytes: u64,
    /// Processors of guests.
    pub vcpus: u64,
}

/// Machines of a catalog of the fleet on a host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CatalogStatus {
    /// Generation of the share that the host has carried out last.
    pub generation: u64,
    /// Version that new machines get.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub version: u32,
    /// Image that the version is of. Daemons from before rollouts do not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<Name>,
    /// Machines that there are.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub count: u32,
    /// Of these, those that are ready.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub ready: u32,
    /// Of all, those that are off, and nobody has asked for them.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub off: u32,
    /// Of the ones that are ready or off, those that have or will take the version.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub updated: u32,
    /// Of all, those that are claimed.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub claimed: u32,
    /// Of the claimed ones, those that are neither updated nor failed: nothing waits for them.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub spared: u32,
    /// Of all, those that failed to start.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub failed: u32,
    /// Why the host does not do what its share says, and will not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
    /// Generation of the share that the host has refused.
    #[serde(default, skip_serializing_if = "is_none")]
    pub refused_generation: u64,
    /// Version of that share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused_version: Option<VersionName>,
    /// What the host waits for before it does what its share says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<String>,
    /// Version that the host is to have before it is rolled out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<NextVersion>,
}

/// A version that a host brings before it is rolled out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NextVersion {
    /// The version.
    #[serde(flatten)]
    pub of: VersionName,
    /// Whether the host has it.
    #[serde(default)]
    pub is_here: bool,
    /// Why the host cannot get it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
    /// What the host waits for, which may pass: space in its cache, a registry that is away.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits: Option<String>,
}

impl CatalogStatus {
    /// Whether the host has refused its share of this generation.
    pub fn refuses(&self, generation: u64) -> bool {
        self.refused.is_some() && self.refused_generation == generation
    }

    /// Whether the host has refused this version, which its share says, and has not taken it. What it has refused before says nothing. A
    /// refusal that names no generation counts for each version: the host cannot read its share, or cannot give up what it has no share of.
    pub fn refuses_version(&self, of: &VersionName, share: &ShareRecord) -> bool {
        let is_other = |refused: &VersionName| refused != of;
        let is_this = self.refuses(share.generation) && !self.refused_version.as_ref().is_some_and(is_other);
        let names_none = self.refused.is_some() && self.refused_generation == 0;
        (is_this || names_none) && !of.is_taken(self)
    }
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

fn is_none(generation: &u64) -> bool {
    *generation == 0
}

fn is_false(flag: &bool) -> bool {
    !flag
}

/// Record `catalogs/CATALOG`: what people want of a catalog.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CatalogRecord {
    /// Settings of the catalog.
    pub spec: FleetCatalogSpec,
    /// Version of the image that all machines are to get.
    pub version: u32,
    /// How running machines get another version. By default two at a time on each host.
    #[serde(default = "default_strategy")]
    pub strategy: RolloutStrategy,
    /// Number of the change of the settings or the version, counted from 1.
    pub generation: u64,
    /// Versions that the catalog has had, oldest first, with the current one last.
    pub history: Vec<HistoryEntry>,
    /// Time at which the catalog was created.
    pub created: Timestamp,
}

/// How running machines get another version, unless somebody says otherwise.
pub fn default_strategy() -> RolloutStrategy {
    RolloutStrategy::Batch(2)
}

/// Record `share/HOST/CATALOG`: how many machines of a catalog a host is to have, and of which version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShareRecord {
    /// Number of machines.
    pub count: u32,
    /// Version of the image that they are to get.
    pub version: u32,
    /// Generation of the catalog that the share follows from.
    pub generation: u64,
    /// Image that the version is of; none: the catalog's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<Name>,
    /// Most machines that may be unavailable at the same time because they get the version; none: as the strategy of the catalog says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch: Option<u32>,
    /// Wave of the rollout in which the host got the version.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub wave: u32,
}

/// A version of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VersionName {
    /// The image.
    pub image: Name,
    /// Number of the version.
    pub version: u32,
}

impl fmt::Display for VersionName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.image, self.version)
    }
}

/// Record `rollouts/CATALOG`: how far another version of a catalog is. Which hosts have it, their shares say.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RolloutRecord {
    /// Version before.
    pub from: VersionName,
    /// Version that is rolled out.
    pub to: VersionName,
    /// Generation of the catalog that asks for it.
    pub generation: u64,
    /// What the rollout does.
    pub state: FleetRolloutState,
    /// Why it has halted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// Number of the wave, counted from 0.
    #[serde(default)]
    pub wave: u32,
    /// Number of hosts that had machines when the waves began; 0: they have not.
    #[serde(default)]
    pub hosts: u32,
    /// Whether all hosts get the version at once, without bringing it first.
    #[serde(default)]
    pub at_once: bool,
    /// Most machines that may fail.
    #[serde(default)]
    pub max_failed: u32,
    /// Machines that had failed when somebody has resumed it.
    #[serde(default)]
    pub tolerated: u32,
    /// Time without progress after which it halts, in seconds.
    pub deadline_seconds: u32,
    /// How often it was resumed.
    #[serde(default)]
    pub resumes: u32,
    /// Time at which it was asked for.
    pub since: Timestamp,
    /// Time of the last change of its state or wave.
    pub changed: Timestamp,
}

/// Record `named/CATALOG/MACHINE`: a machine with a name of the fleet, and the host that has it.
///
/// The placer writes it in one transaction with [`PlaceRecord`]. A host may run the machine only if both name it and its present epoch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamedRecord {
    /// Number in the machine's name.
    pub number: u32,
    /// Identity of the machine, which it keeps on whatever host it is.
    pub identity: Identity,
    /// Host that has it, or is to give it up; none: it is on no host.
    #[serde(default)]
    pub host: Option<Name>,
    /// Epoch of that host; 0 if there is none.
    #[serde(default)]
    pub epoch: i64,
    /// Whether the host has it, or is to give it up.
    pub state: NameState,
    /// What that host does when it is isolated, as it was told when it got the machine.
    #[serde(default)]
    pub on_isolation: IsolationAction,
}

/// What becomes of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NameState {
    /// It is on no host.
    Free,
    /// It is on a host.
    Placed,
    /// Its host is to give it up, and deletes the record `place/HOST/CATALOG/MACHINE` when nothing of it runs any more.
    Leaving,
}

/// Record `place/HOST/CATALOG/MACHINE`: a machine with a name of the fleet that a host is to have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlaceRecord {
    /// Epoch of the host for which this counts.
    pub epoch: i64,
    /// Number in the machine's name.
    pub number: u32,
    /// Identity of the machine.
    pub identity: Identity,
    /// What the host does with it when it is isolated.
    #[serde(default)]
    pub on_isolation: IsolationAction,
    /// Whether the host is to give it up.
    #[serde(default)]
    pub is_leaving: bool,
}

/// Record `images/IMAGE/VERSION`: where hosts have a version from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageRecord {
    /// Digest of the version.
    pub digest: String,
    /// Registry of the fleet that it is streamed from.
    pub registry: Name,
    /// Name of the image in the registry.
    pub name: Name,
    /// Size of the image, in bytes.
    pub size_bytes: u64,
    /// Hosts that are to have all of it, at least.
    #[serde(default)]
    pub full_copies: u32,
}

/// Record `registries/REGISTRY`: a registry that all hosts use. Its file of credentials is one of each host.
pub type RegistryRecord = Registry;

/// Record `leader/placer`, which goes with the lease of the host that places. The revision that created it is its term.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacerRecord {
    /// Host whose daemon places.
    pub host: Name,
    /// Identity of the daemon's process.
    pub instance: String,
}
