//! Machines.

use crate::{Catalog, Difference, ErrorCode, Name, Rate};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;
use utoipa::ToSchema;

/// A machine: an identity that outlives every reset.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Machine {
    /// Its name, and its guest's host name.
    pub name: Name,
    /// Name of the catalog that owns the machine.
    pub catalog: Name,
    /// Its number there, counted from 1.
    pub number: u32,
    /// What stays the same over resets.
    pub identity: Identity,
    /// Time at which the machine was added to its catalog.
    #[schema(value_type = String, format = DateTime)]
    pub created: Timestamp,
}

/// What stays the same over resets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Identity {
    /// The SMBIOS UUID. cloud-init's instance id is `iid-` and this.
    pub uuid: String,
    /// The address of its network card, administered locally.
    pub mac: String,
}

/// A machine with what is wanted of it and what it is now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MachineDetails {
    /// Name, catalog and desired state of the machine.
    #[serde(flatten)]
    pub machine: Machine,
    /// Whether it is to run.
    pub power: Power,
    /// The claim by which somebody has the machine; none if it is free.
    pub claim: Option<Claim>,
    /// Whether it is kept from being started and claimed.
    pub drained: bool,
    /// Observed state of the machine, as its reconciler last saw it.
    pub status: MachineStatus,
}

/// A machine is somebody's for a while.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Claim {
    /// Which one, of all that there ever were: who releases it can say so, and releases nobody else's.
    pub id: String,
    /// Who has the machine: the name of the token or the user that claimed it, or what the claim said.
    pub owner: String,
    /// For people and programs: what the claim said.
    pub labels: BTreeMap<Name, String>,
    /// Time at which the claim was made.
    #[schema(value_type = String, format = DateTime)]
    pub since: Timestamp,
    /// How long it lasts from when it was made or renewed; `null`: until it is released.
    pub ttl_seconds: Option<u32>,
    /// How long it still lasts; `null`: until it is released.
    pub left_seconds: Option<u64>,
}

/// Asks for a machine of a catalog.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewClaim {
    /// How long the claim lasts unless it is renewed; 0: until it is released. By default as the catalog says, else the host.
    #[serde(default)]
    pub ttl_seconds: Option<u32>,
    /// Take one that is not ready yet if none is, and start one if need be.
    #[serde(default)]
    pub any: bool,
    /// Who has the machine: 1 to 128 characters. By default the name of the token or the user that asks.
    #[serde(default)]
    pub owner: Option<String>,
    /// For people and programs: at most 16.
    #[serde(default)]
    pub labels: BTreeMap<Name, String>,
}

/// Asks for a claim to last longer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ClaimRenewal {
    /// How long it lasts from now on; 0: until it is released. By default as long as it was to last when it was made.
    #[serde(default)]
    pub ttl_seconds: Option<u32>,
}

/// Whether a machine is to run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Power {
    /// Desired state: the machine is off.
    #[default]
    Off,
    /// It is, and is started again if it ends by itself.
    On,
}

/// Observed state of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MachineStatus {
    /// Phase of the machine on its way from off to ready and back.
    pub phase: Phase,
    /// Whether it is what was wanted when this was asked, or cannot become so.
    pub settled: bool,
    /// Since when it is in this phase. `null`: since before the daemon began.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub since: Option<Timestamp>,
    /// Whether it runs and is ready, by what its catalog says of that.
    pub ready: bool,
    /// Where it can be reached, if that is known: an address, or an address and port of this host.
    pub address: Option<String>,
    /// Why it is not what is wanted, for people.
    pub message: Option<String>,
    /// The same for programs, if it has failed or waits.
    pub code: Option<ErrorCode>,
    /// Whether a failure is final: it is not tried again before the machine is started by somebody, or its catalog or the
    /// version that its catalog takes changes.
    pub permanent: bool,
    /// What it was started with, unless it is stopped.
    pub run: Option<MachineRun>,
}

/// Phase of a machine on its way from off to ready and back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Nothing of it runs, and nothing that it wrote is kept but by mode `persistent`.
    Stopped,
    /// It is to run, and the host's budget has no space for it now. It starts as soon as others give enough back.
    Waiting,
    /// Its private copy of the image is being made.
    Placing,
    /// Its disk or its VMM is being started.
    Starting,
    /// Its VMM runs; with hypervisor `none` its disk is served.
    Running,
    /// It was asked to end.
    Stopping,
    /// It could not be started. It is tried again after a while, unless the failure is permanent.
    Failed,
}

/// What a machine was started with. Paths are of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MachineRun {
    /// Name of the image that the running machine started from.
    pub image: Name,
    /// Version of that image, counted from 1.
    pub version: u32,
    /// Whether the next start will take another version or other settings.
    pub outdated: bool,
    /// These: what they are, and what they are after it. The image is `NAME:VERSION`; `user_data` is not shown.
    pub pending: Vec<Difference>,
    /// The limit of its disk's RAM tier now, in modes that have one.
    pub ram_bytes: Option<u64>,
    /// The limit of its disk's overflow now, in modes that have one.
    pub overflow_bytes: Option<u64>,
    /// How much its disk may do in a second now.
    pub rate: Rate,
    /// Hypervisor that runs this machine.
    pub hypervisor: Hypervisor,
    /// The process that serves its disk.
    pub disk_pid: Option<u32>,
    /// Process id of the VMM, on the daemon's host.
    pub vmm_pid: Option<u32>,
    /// The vhost-user socket of its disk.
    #[schema(value_type = String)]
    pub disk_socket: PathBuf,
    /// The control socket of its disk, for `spillway stats` and the others.
    #[schema(value_type = String)]
    pub control_socket: PathBuf,
    /// Its serial console, a unix socket for one client at a time.
    #[schema(value_type = Option<String>)]
    pub console_socket: Option<PathBuf>,
    /// Unix socket at which the disk of the machine is exported over NBD.
    #[schema(value_type = Option<String>)]
    pub nbd_socket: Option<PathBuf>,
    /// How often its VMM has ended by itself since it was last asked to start.
    pub crashes: u32,
}

/// Hypervisor that runs the machines of a host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Hypervisor {
    /// QEMU, started by the daemon.
    #[default]
    Qemu,
    /// QEMU, started by the host's libvirt as a domain of its.
    Libvirt,
    /// Somebody else: the daemon serves disks.
    None,
}

/// Asks machines to do something.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MachineAction {
    /// Action that is applied to each selected machine.
    pub action: Action,
    /// Machines that the action is applied to.
    pub select: Selector,
    /// At once: nobody inside is asked to shut down first.
    #[serde(default)]
    pub force: bool,
    /// For a reset: what machines keep may be thrown away.
    #[serde(default)]
    pub discard_data: bool,
    /// How long the guest may take to shut down before it is ended; as its catalog says if nothing is said.
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
    /// To shut down and run again; what its catalog resets at a power cycle is reset.
    Restart,
    /// To end at once and run again on a clean disk, if it runs.
    Reset,
    /// To stop, as soon as nobody has claimed it, and not to start or be claimed again.
    Drain,
    /// To be startable and claimable again.
    Undrain,
}

/// Which machines: those that fit all that is named. To do something with all of them needs `all`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Selector {
    /// Selects the machines of these names.
    #[serde(default)]
    pub names: Vec<Name>,
    /// Selects all machines of this catalog.
    #[serde(default)]
    pub catalog: Option<Name>,
    /// Those whose catalog has all these labels.
    #[serde(default)]
    pub labels: BTreeMap<Name, String>,
    /// Selects all machines of the host.
    #[serde(default)]
    pub all: bool,
}

impl Selector {
    /// Whether it may choose machines of this catalog.
    pub fn chooses(&self, catalog: &Catalog) -> bool {
        let labels = &catalog.spec.labels;
        self.catalog.as_ref().is_none_or(|name| catalog.name == *name)
            && self.labels.iter().all(|(key, value)| labels.get(key) == Some(value))
    }
}
