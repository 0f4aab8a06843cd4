//! What is wanted of a catalog. Owns the settings, their words and what they are if nothing is said; which of them go
//! together is the daemon's to say.

use super::Ready;
use crate::{ImageRef, Name};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// Limit of a RAM tier of which nothing is said.
pub const RAM_BYTES_DEFAULT: u64 = 256 << 20;
/// Limit of an overflow of which nothing is said.
pub const OVERFLOW_BYTES_DEFAULT: u64 = 10 << 30;
const MEMORY_BYTES_DEFAULT: u64 = 1 << 30;
const GRACE_SECONDS_DEFAULT: u32 = 60;
/// Settings that hold secrets: the role `read` does not see them, and no log has them.
const SECRETS: &[&str] = &["user_data"];

/// What is wanted: so many machines of one image with one cache policy. What is left out has its usual value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CatalogSpec {
    /// The image, and the version if it is to stay the same: without one, each start takes the published one.
    pub image: ImageRef,
    /// Number of machines that the catalog has, from 0 on.
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
    /// Requests a second that a disk may do; 0: as many as it can.
    #[serde(default)]
    pub iops: u64,
    /// Of them, those that may begin at once; 0: what a tenth of a second allows.
    #[serde(default)]
    pub iops_burst: u64,
    /// Bytes of reads and writes a second; 0: as many as it can.
    #[serde(default)]
    pub bandwidth_bytes: u64,
    /// Of them, those that may begin at once; 0: what a tenth of a second allows.
    #[serde(default)]
    pub bandwidth_burst_bytes: u64,
    /// How the image is read.
    #[serde(default)]
    pub base_cache: BaseCache,
    /// Compare each MiB of the image with its digest before a disk uses it for the first time. What differs is an I/O error
    /// for the guest, and an event.
    #[serde(default)]
    pub verify_reads: bool,
    /// A second disk of each machine, which keeps what is written over resets. It can grow.
    #[serde(default)]
    pub data_disk_bytes: Option<u64>,
    /// The store for data disks; the first of class `local` if none is named.
    #[serde(default)]
    pub data_disk_store: Option<Name>,
    /// A disk for what can be made again, of pooled machines, empty at each start. It is in the first store of class `temp`.
    #[serde(default)]
    pub scratch_disk_bytes: Option<u64>,
    /// Number of virtual processors of each machine.
    #[serde(default = "one")]
    pub vcpus: u32,
    /// Memory of each machine, in bytes: whole MiB.
    #[serde(default = "memory_bytes")]
    pub memory_bytes: u64,
    /// Network to which each machine is connected.
    #[serde(default)]
    pub network: Network,
    /// Names of machines: a run of `#` stands for a number. By default the catalog's name and `-###`.
    #[serde(default)]
    pub naming: Option<String>,
    /// What throws away what a machine has written. By default `power-cycle`, for dedicated machines `never`.
    #[serde(default)]
    pub reset: Option<ResetEvent>,
    /// When a machine counts as ready. By default as soon as it runs.
    #[serde(default)]
    pub ready: Option<Ready>,
    /// How long a guest has to shut down by itself, before it is stopped.
    #[serde(default = "grace_seconds")]
    pub grace_seconds: u32,
    /// Machines that are kept started, ready and unclaimed.
    #[serde(default)]
    pub warm: u32,
    /// How long a claim of a machine lasts that does not say so itself; 0: until it is released. By default as the host says.
    #[serde(default)]
    pub claim_ttl_seconds: Option<u32>,
    /// Started when the daemon starts and kept so.
    #[serde(default)]
    pub autostart: bool,
    /// For cloud-init: text, at most 16 KiB.
    #[serde(default)]
    pub user_data: Option<String>,
    /// SSH keys that cloud-init lets in, each a line of `authorized_keys`.
    #[serde(default)]
    pub authorized_keys: Vec<String>,
    /// A kernel to start instead of the image's boot loader: an absolute path on the host.
    #[serde(default)]
    pub kernel: Option<String>,
    /// Its initial RAM disk: an absolute path on the host.
    #[serde(default)]
    pub initrd: Option<String>,
    /// Kernel command line, for machines that start from a kernel file.
    #[serde(default)]
    pub append: Option<String>,
    /// Labels for people and for selectors, as keys and values.
    #[serde(default)]
    pub labels: BTreeMap<Name, String>,
    /// Names of settings that were left out of this response, since the role `read` may not see them. A request that has
    /// this is refused: what was left out would be lost.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub redacted: Vec<String>,
}

impl CatalogSpec {
    /// Settings of which nothing is said but an image, `x`.
    pub fn usual() -> CatalogSpec {
        serde_json::from_str(r#"{"image": "x"}"#).expect("an image is enough")
    }

    /// Whether a setting holds a secret.
    pub fn is_secret(setting: &str) -> bool {
        SECRETS.contains(&setting)
    }

    /// Leaves secrets out and names them in `redacted`.
    pub fn redact(&mut self) {
        if self.user_data.take().is_some() {
            self.redacted = vec!["user_data".into()];
        }
    }

    /// Where the disks' writes go.
    pub fn mode(&self) -> DiskMode {
        let usual = match self.kind {
            CatalogKind::Pooled => DiskMode::RamOverflow,
            CatalogKind::Dedicated => DiskMode::Persistent,
        };
        self.mode.unwrap_or(usual)
    }

    /// What throws away what a machine has written. Of dedicated machines nothing does.
    pub fn reset(&self) -> ResetEvent {
        match self.kind {
            CatalogKind::Pooled => self.reset.unwrap_or(ResetEvent::PowerCycle),
            CatalogKind::Dedicated => ResetEvent::Never,
        }
    }

    /// Whether a machine has at its next start what it has written before. Such a disk stays on its version.
    pub fn keeps_writes(&self) -> bool {
        self.reset() == ResetEvent::Never
    }

    /// Limit of a disk's RAM tier; none in modes without one.
    pub fn ram_bytes(&self) -> Option<u64> {
        self.mode().has_ram().then(|| self.ram_bytes.unwrap_or(RAM_BYTES_DEFAULT))
    }

    /// Limit of a disk's overflow file; none in modes without one.
    pub fn overflow_bytes(&self) -> Option<u64> {
        self.mode().has_overflow().then(|| self.overflow_bytes.unwrap_or(OVERFLOW_BYTES_DEFAULT))
    }

    /// How much a disk may do in a second.
    pub fn rate(&self) -> Rate {
        Rate {
            iops: self.iops,
            iops_burst: self.iops_burst,
            bandwidth_bytes: self.bandwidth_bytes,
            bandwidth_burst_bytes: self.bandwidth_burst_bytes,
        }
    }

    /// Names of machines, for a catalog of this name.
    pub fn naming(&self, catalog: &Name) -> String {
        self.naming.clone().unwrap_or_else(|| format!("{catalog}-###"))
    }

    /// The same with every usual value said: equal for two that mean the same.
    pub fn said(&self, catalog: &Name) -> CatalogSpec {
        CatalogSpec {
            mode: Some(self.mode()),
            ram_bytes: self.ram_bytes(),
            overflow_bytes: self.overflow_bytes(),
            naming: Some(self.naming(catalog)),
            reset: Some(self.reset()),
            ..self.clone()
        }
    }

    /// Whether a change of this setting reaches machines that run; others are taken at the next start.
    pub fn is_live(setting: &str) -> bool {
        let live = [
            "autostart",
            "bandwidth_burst_bytes",
            "bandwidth_bytes",
            "claim_ttl_seconds",
            "count",
            "grace_seconds",
            "iops",
            "iops_burst",
            "labels",
            "overflow_bytes",
            "ram_bytes",
            "ram_guarantee_bytes",
            "warm",
        ];
        live.contains(&setting)
    }
}

fn grace_seconds() -> u32 {
    GRACE_SECONDS_DEFAULT
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
    /// Writes go to the overflow file, without a RAM tier.
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

impl DiskMode {
    /// Whether there is a RAM tier.
    pub fn has_ram(self) -> bool {
        matches!(self, DiskMode::RamOverflow | DiskMode::Ram)
    }

    /// Whether there is an overflow.
    pub fn has_overflow(self) -> bool {
        matches!(self, DiskMode::RamOverflow | DiskMode::Overflow)
    }

    /// Its word in the interface.
    pub fn as_str(self) -> &'static str {
        match self {
            DiskMode::RamOverflow => "ram+overflow",
            DiskMode::Ram => "ram",
            DiskMode::Overflow => "overflow",
            DiskMode::Direct => "direct",
            DiskMode::Ephemeral => "ephemeral",
            DiskMode::Persistent => "persistent",
        }
    }
}

/// What happens to a write when the cache is full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum FullPolicy {
    /// The write waits until there is room; the guest sees a slow disk.
    #[default]
    Pause,
    /// The write fails with ENOSPC; the guest sees an error.
    Fail,
}

/// How much a disk may do in a second, and at once before that counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Rate {
    /// Requests a second; 0: as many as it can.
    pub iops: u64,
    /// Requests that may begin at once; 0: what a tenth of a second allows.
    pub iops_burst: u64,
    /// Bytes of reads and writes a second; 0: as many as it can.
    pub bandwidth_bytes: u64,
    /// Bytes that may begin at once; 0: what a tenth of a second allows.
    pub bandwidth_burst_bytes: u64,
}

/// How the image is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum BaseCache {
    /// Through the host's page cache, which all machines share.
    #[default]
    Host,
    /// Reads bypass the page cache of the host (O_DIRECT).
    None,
}

/// Network to which the machines of a catalog are connected.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Network {
    /// Through the hypervisor, outward only: to all that the host reaches, also to what listens on the host's loopback.
    #[default]
    User,
    /// On a bridge of the host.
    Bridge(String),
    /// The machines have no network card.
    None,
}

/// What throws away what a machine has written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ResetEvent {
    /// Each stop of the machine discards what was written.
    PowerCycle,
    /// Its stop, and a reboot from within.
    GuestReboot,
    /// Only a request to reset discards what was written.
    Never,
}
