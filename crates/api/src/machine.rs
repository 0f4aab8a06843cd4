//! Machines, their claims and their actions.

use crate::{Catalog, Difference, DisplayKind, ErrorCode, Name, Rate};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;
use utoipa::ToSchema;

/// A machine: an identity that outlives every reset.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Machine {
    /// Name of the machine, and host name of its guest.
    pub name: Name,
    /// Name of the catalog that owns the machine.
    pub catalog: Name,
    /// Number of the machine in its catalog, counted from 1.
    pub number: u32,
    /// Identity of the machine, which outlives resets.
    pub identity: Identity,
    /// Size of the machine's disk, if it was given one. By default the image's.
    #[serde(default)]
    pub size_bytes: Option<u64>,
    /// Time at which the machine was added to its catalog.
    #[schema(value_type = String, format = DateTime)]
    pub created: Timestamp,
}

/// A machine that is added to a catalog whose VMM is external.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewMachine {
    /// Name of the machine, of which a host has one.
    pub name: Name,
    /// Size of the machine's disk, which is at least the image's. By default the image's.
    #[serde(default)]
    pub size_bytes: Option<u64>,
}

/// Size of a machine's disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MachineSize {
    /// Size of the disk from the machine's next start on, in bytes: at least as large as before.
    pub size_bytes: u64,
}

/// Identity of a machine, which outlives resets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Identity {
    /// UUID of the machine in SMBIOS. cloud-init's instance id is `iid-` followed by it.
    pub uuid: String,
    /// MAC address of its first network card, locally administered. Those of further cards differ from it in their first byte.
    pub mac: String,
}

impl Identity {
    /// Returns the MAC address of the network card with this number, counted from 0.
    pub fn mac_of_card(&self, number: usize) -> String {
        // The two lowest bits of the first byte say that it is one card's address, and locally administered.
        let first = self.mac.get(..2).and_then(|byte| u8::from_str_radix(byte, 16).ok());
        match (first, self.mac.get(2..)) {
            (Some(first), Some(rest)) => format!("{:02x}{rest}", first.wrapping_add(4 * number as u8)),
            _ => self.mac.clone(),
        }
    }
}

/// A machine with its desired and its observed state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MachineDetails {
    /// Name, catalog and desired state of the machine.
    #[serde(flatten)]
    pub machine: Machine,
    /// Desired power of the machine.
    pub power: Power,
    /// The claim on the machine; none if it is free.
    pub claim: Option<Claim>,
    /// Whether the machine is drained: it is neither started nor claimed.
    pub drained: bool,
    /// Observed state of the machine, as its reconciler last saw it.
    pub status: MachineStatus,
}

/// Claim of a machine by an owner, for a while.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Claim {
    /// Unique id of the claim. A client that gives it cannot release the claim of another.
    pub id: String,
    /// Owner of the machine: from the claim, else the name of the token or the user that claimed it.
    pub owner: String,
    /// Labels of the claim, for people and programs.
    pub labels: BTreeMap<Name, String>,
    /// Time at which the claim was made.
    #[schema(value_type = String, format = DateTime)]
    pub since: Timestamp,
    /// Duration of the claim in seconds, from when it was made or renewed; `null`: until it is released.
    pub ttl_seconds: Option<u32>,
    /// Remaining seconds of the claim; `null`: until it is released.
    pub left_seconds: Option<u64>,
}

/// Asks for a claim of a machine of a catalog.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewClaim {
    /// Duration of the claim in seconds unless it is renewed; 0: until it is released. By default the catalog's, else the
    /// host's.
    #[serde(default)]
    pub ttl_seconds: Option<u32>,
    /// Whether to take a machine that is not ready yet if none is, and to start one if necessary.
    #[serde(default)]
    pub any: bool,
    /// Owner of the claim: 1 to 128 characters. By default the name of the token or the user that sends the request.
    #[serde(default)]
    pub owner: Option<String>,
    /// Labels of the claim for people and programs, at most 16.
    #[serde(default)]
    pub labels: BTreeMap<Name, String>,
}

/// Asks for the renewal of a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ClaimRenewal {
    /// Duration in seconds from now on; 0: until it is released. By default as long as when it was made.
    #[serde(default)]
    pub ttl_seconds: Option<u32>,
}

/// Desired power of a machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Power {
    /// Desired state: the machine is off.
    #[default]
    Off,
    /// Desired state: the machine runs, and is restarted if it ends unexpectedly.
    On,
}

/// Observed state of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MachineStatus {
    /// Phase of the machine on its way from off to ready and back.
    pub phase: Phase,
    /// Whether the machine had reached its desired state at the time of the response, or cannot reach it.
    pub settled: bool,
    /// Time at which the machine entered this phase. `null`: before the daemon started.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub since: Option<Timestamp>,
    /// Whether the machine runs and its guest is ready, by the catalog's criterion.
    pub ready: bool,
    /// Address of the guest if it is known: an address, or an address and port of this host.
    pub address: Option<String>,
    /// Reason why the machine has not reached its desired state, for people.
    pub message: Option<String>,
    /// Error code of that reason, if the machine has failed or waits.
    pub code: Option<ErrorCode>,
    /// Whether a failure is permanent: the machine is not retried before a client starts it, or its catalog or the
    /// version for its catalog changes.
    pub permanent: bool,
    /// What the machine was started with, unless it is stopped.
    pub run: Option<MachineRun>,
}

/// Phase of a machine on its way from off to ready and back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Nothing of the machine runs. Its data is discarded, except in mode `persistent`.
    Stopped,
    /// The machine should run, but does not fit into the host's budget. It starts as soon as others return enough.
    Waiting,
    /// The private copy of its image is being made.
    Placing,
    /// The disk or the VMM of the machine is being started.
    Starting,
    /// The VMM of the machine runs; with hypervisor `none` its disk is served.
    Running,
    /// The machine was asked to shut down, or is being ended.
    Stopping,
    /// The machine could not be started. It is retried after a while, unless the failure is permanent.
    Failed,
}

/// What a machine was started with. Paths are on the daemon's host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MachineRun {
    /// Name of the image that the running machine started from.
    pub image: Name,
    /// Version of that image, counted from 1.
    pub version: u32,
    /// Whether the next start will take another version or other settings.
    pub outdated: bool,
    /// Settings that the next start will change, with their values before and after. The image is `NAME:VERSION`;
    /// `user_data` is not shown.
    pub pending: Vec<Difference>,
    /// Current limit of the disk's RAM tier, in modes that have one.
    pub ram_bytes: Option<u64>,
    /// Current limit of the disk's overflow, in modes that have one.
    pub overflow_bytes: Option<u64>,
    /// Current rate limit of the disk.
    pub rate: Rate,
    /// Hypervisor that runs this machine.
    pub hypervisor: Hypervisor,
    /// Id of the process that serves the disk.
    pub disk_pid: Option<u32>,
    /// Process id of the VMM, on the daemon's host.
    pub vmm_pid: Option<u32>,
    /// Path of the disk's vhost-user socket.
    #[schema(value_type = String)]
    pub disk_socket: PathBuf,
    /// Path of the disk's control socket, for `spillway stats` and others.
    #[schema(value_type = String)]
    pub control_socket: PathBuf,
    /// Unix socket of the console hub, for `spillway machine console`.
    #[schema(value_type = Option<String>)]
    pub console_socket: Option<PathBuf>,
    /// Screen that the running machine was started with.
    pub display: DisplayKind,
    /// Unix socket at which the disk of the machine is exported over NBD.
    #[schema(value_type = Option<String>)]
    pub nbd_socket: Option<PathBuf>,
    /// How often the VMM has ended unexpectedly since the machine was last asked to start.
    pub crashes: u32,
}

/// Hypervisor that runs the machines of a host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Hypervisor {
    /// QEMU, started by the daemon.
    #[default]
    Qemu,
    /// QEMU, started as a domain by the host's libvirt.
    Libvirt,
    /// Another program: the daemon only serves disks.
    None,
}

/// Asks for an action on machines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MachineAction {
    /// Action that is applied to each selected machine.
    pub action: Action,
    /// Machines that the action is applied to.
    pub select: Selector,
    /// Whether guests are ended at once, without being asked to shut down.
    #[serde(default)]
    pub force: bool,
    /// For a reset: whether data that machines keep may be discarded.
    #[serde(default)]
    pub discard_data: bool,
    /// Seconds that a guest gets to shut down before it is ended; the catalog's by default.
    #[serde(default)]
    pub grace_seconds: Option<u32>,
}

/// An action that a machine can be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// Switches the machine on, if it is off.
    Start,
    /// Switches the machine off, after its grace period.
    Stop,
    /// Shuts the machine down and starts it again. Its disk is reset if the catalog says so for a power cycle.
    Restart,
    /// Ends the machine at once, and starts it again on a fresh disk if it was running.
    Reset,
    /// Stops the machine as soon as it is not claimed, and keeps it from being started or claimed.
    Drain,
    /// Allows the machine to be started and claimed again.
    Undrain,
}

/// Selects the machines that match all given fields. Selecting all machines requires `all`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Selector {
    /// Selects the machines of these names.
    #[serde(default)]
    pub names: Vec<Name>,
    /// Selects all machines of this catalog.
    #[serde(default)]
    pub catalog: Option<Name>,
    /// Selects machines whose catalog has all these labels.
    #[serde(default)]
    pub labels: BTreeMap<Name, String>,
    /// Selects all machines of the host.
    #[serde(default)]
    pub all: bool,
}

impl Selector {
    /// Whether machines of this catalog may match.
    pub fn chooses(&self, catalog: &Catalog) -> bool {
        let labels = &catalog.spec.labels;
        self.catalog.as_ref().is_none_or(|name| catalog.name == *name)
            && self.labels.iter().all(|(key, value)| labels.get(key) == Some(value))
    }
}
