//! Settings of catalogs. Owns the settings, their words and their defaults; the daemon checks combinations.

use super::Ready;
use crate::{ImageRef, Name};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// Default limit of a RAM tier.
pub const RAM_BYTES_DEFAULT: u64 = 256 << 20;
/// Default limit of an overflow.
pub const OVERFLOW_BYTES_DEFAULT: u64 = 10 << 30;
const MEMORY_BYTES_DEFAULT: u64 = 1 << 30;
const GRACE_SECONDS_DEFAULT: u32 = 60;
/// Secret settings: they are hidden from the role `read` and from logs.
const SECRETS: &[&str] = &["user_data"];

/// Settings of a catalog: a number of machines of one image with one cache policy. A setting that is left out has its
/// default.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CatalogSpec {
    /// Image of the catalog. With a version it stays at that one; without, each start takes the published one.
    pub image: ImageRef,
    /// Number of machines that the catalog has, from 0 on.
    #[serde(default)]
    pub count: u32,
    /// Whether machines are interchangeable, or keep what is written for one owner.
    #[serde(default, rename = "type")]
    pub kind: CatalogKind,
    /// Destination of a disk's writes. By default `ram+overflow`, for dedicated machines `persistent`.
    #[serde(default)]
    pub mode: Option<DiskMode>,
    /// Limit of a disk's RAM tier in bytes, in modes that have one. By default 256 MiB.
    #[serde(default)]
    pub ram_bytes: Option<u64>,
    /// Guaranteed part of the RAM tier, in bytes.
    #[serde(default)]
    pub ram_guarantee_bytes: u64,
    /// Limit of a disk's overflow file in bytes, in modes that have one. By default 10 GiB.
    #[serde(default)]
    pub overflow_bytes: Option<u64>,
    /// Store for overflow, difference and data files; by default the first of class `local`.
    #[serde(default)]
    pub overflow_store: Option<Name>,
    /// What happens to writes when the cache is full.
    #[serde(default)]
    pub full: FullPolicy,
    /// Limit of a disk's requests per second; 0: unlimited.
    #[serde(default)]
    pub iops: u64,
    /// Burst of requests that may begin at once; 0: what a tenth of a second allows.
    #[serde(default)]
    pub iops_burst: u64,
    /// Limit of a disk's read and written bytes per second; 0: unlimited.
    #[serde(default)]
    pub bandwidth_bytes: u64,
    /// Burst of bytes that may begin at once; 0: what a tenth of a second allows.
    #[serde(default)]
    pub bandwidth_burst_bytes: u64,
    /// Whether reads of the image use the host's page cache.
    #[serde(default)]
    pub base_cache: BaseCache,
    /// Whether each MiB of the image is compared with its digest before a disk uses it for the first time. A mismatch is
    /// an I/O error for the guest, and an event.
    #[serde(default)]
    pub verify_reads: bool,
    /// Size in bytes of a second disk of each machine, whose data outlives resets. It can grow.
    #[serde(default)]
    pub data_disk_bytes: Option<u64>,
    /// Store for data disks; by default the first of class `local`.
    #[serde(default)]
    pub data_disk_store: Option<Name>,
    /// Size in bytes of a disk for temporary data of pooled machines, which is empty at each start. It is in the first
    /// store of class `temp`.
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
    /// Pattern of machine names: a run of `#` stands for the number. By default the catalog's name and `-###`.
    #[serde(default)]
    pub naming: Option<String>,
    /// Event that discards what a machine has written. By default `power-cycle`, for dedicated machines `never`.
    #[serde(default)]
    pub reset: Option<ResetEvent>,
    /// Criterion by which a machine counts as ready. By default it does as soon as it runs.
    #[serde(default)]
    pub ready: Option<Ready>,
    /// Seconds that a guest gets to shut down before it is ended.
    #[serde(default = "grace_seconds")]
    pub grace_seconds: u32,
    /// Number of machines that are kept started, ready and unclaimed.
    #[serde(default)]
    pub warm: u32,
    /// Default duration of claims in seconds; 0: until they are released. The host's by default.
    #[serde(default)]
    pub claim_ttl_seconds: Option<u32>,
    /// Whether machines start with the daemon and are kept running.
    #[serde(default)]
    pub autostart: bool,
    /// User-data for cloud-init: text, at most 16 KiB.
    #[serde(default)]
    pub user_data: Option<String>,
    /// SSH public keys that may log in, each a line of `authorized_keys`.
    #[serde(default)]
    pub authorized_keys: Vec<String>,
    /// Kernel to start instead of the image's boot loader: an absolute path on the host.
    #[serde(default)]
    pub kernel: Option<String>,
    /// Initial RAM disk of that kernel: an absolute path on the host.
    #[serde(default)]
    pub initrd: Option<String>,
    /// Kernel command line, for machines that start from a kernel file.
    #[serde(default)]
    pub append: Option<String>,
    /// Labels for people and for selectors, as keys and values.
    #[serde(default)]
    pub labels: BTreeMap<Name, String>,
    /// Names of settings that were left out of this response, because the role `read` may not see them. A request with
    /// this field is refused, since the values would be lost.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub redacted: Vec<String>,
}

impl CatalogSpec {
    /// Returns the default settings, with an image `x`.
    pub fn defaults() -> CatalogSpec {
        serde_json::from_str(r#"{"image": "x"}"#).expect("an image is enough")
    }

    /// Whether a setting is secret.
    pub fn is_secret(setting: &str) -> bool {
        SECRETS.contains(&setting)
    }

    /// Removes the secret settings and lists their names in `redacted`.
    pub fn redact(&mut self) {
        if self.user_data.take().is_some() {
            self.redacted = vec!["user_data".into()];
        }
    }

    /// Destination of the disks' writes.
    pub fn mode(&self) -> DiskMode {
        let usual = match self.kind {
            CatalogKind::Pooled => DiskMode::RamOverflow,
            CatalogKind::Dedicated => DiskMode::Persistent,
        };
        self.mode.unwrap_or(usual)
    }

    /// Event that discards what a machine has written; never for dedicated machines.
    pub fn reset(&self) -> ResetEvent {
        match self.kind {
            CatalogKind::Pooled => self.reset.unwrap_or(ResetEvent::PowerCycle),
            CatalogKind::Dedicated => ResetEvent::Never,
        }
    }

    /// Whether a machine's data outlives its stop. Such a disk stays on its version.
    pub fn keeps_writes(&self) -> bool {
        self.reset() == ResetEvent::Never
    }

    /// Limit of a disk's RAM tier; `None` in modes without one.
    pub fn ram_bytes(&self) -> Option<u64> {
        self.mode().has_ram().then(|| self.ram_bytes.unwrap_or(RAM_BYTES_DEFAULT))
    }

    /// Limit of a disk's overflow file; `None` in modes without one.
    pub fn overflow_bytes(&self) -> Option<u64> {
        self.mode().has_overflow().then(|| self.overflow_bytes.unwrap_or(OVERFLOW_BYTES_DEFAULT))
    }

    /// Rate limit of a disk.
    pub fn rate(&self) -> Rate {
        Rate {
            iops: self.iops,
            iops_burst: self.iops_burst,
            bandwidth_bytes: self.bandwidth_bytes,
            bandwidth_burst_bytes: self.bandwidth_burst_bytes,
        }
    }

    /// Pattern of machine names, for a catalog of this name.
    pub fn naming(&self, catalog: &Name) -> String {
        self.naming.clone().unwrap_or_else(|| format!("{catalog}-###"))
    }

    /// Fills in all defaults, so that equivalent settings are equal.
    pub fn with_defaults(&self, catalog: &Name) -> CatalogSpec {
        CatalogSpec {
            mode: Some(self.mode()),
            ram_bytes: self.ram_bytes(),
            overflow_bytes: self.overflow_bytes(),
            naming: Some(self.naming(catalog)),
            reset: Some(self.reset()),
            ..self.clone()
        }
    }

    /// Whether running machines apply a change of this setting; others apply at the next start.
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

/// Kind of the machines of a catalog.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum CatalogKind {
    /// Machines are interchangeable, and are reset.
    #[default]
    Pooled,
    /// Each machine belongs to one owner and keeps what is written.
    Dedicated,
}

/// Destination of a disk's writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum DiskMode {
    /// Writes go to the RAM tier, and are evicted to the overflow.
    #[serde(rename = "ram+overflow")]
    RamOverflow,
    /// Writes go to the RAM tier only.
    #[serde(rename = "ram")]
    Ram,
    /// Writes go to the overflow file, without a RAM tier.
    #[serde(rename = "overflow")]
    Overflow,
    /// Writes go in place to a difference file.
    #[serde(rename = "direct")]
    Direct,
    /// Writes go to a private copy of the image, which is destroyed when the machine stops.
    #[serde(rename = "ephemeral")]
    Ephemeral,
    /// Writes go to a file that outlives machine, daemon and host.
    #[serde(rename = "persistent")]
    Persistent,
}

impl DiskMode {
    /// Whether the mode has a RAM tier.
    pub fn has_ram(self) -> bool {
        matches!(self, DiskMode::RamOverflow | DiskMode::Ram)
    }

    /// Whether the mode has an overflow.
    pub fn has_overflow(self) -> bool {
        matches!(self, DiskMode::RamOverflow | DiskMode::Overflow)
    }

    /// Word of the mode in the API.
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

/// What happens to writes when the cache is full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum FullPolicy {
    /// The write waits until there is space; the guest sees a slow disk.
    #[default]
    Pause,
    /// The write fails with ENOSPC; the guest sees an error.
    Fail,
}

/// Rate limits of a disk, with bursts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Rate {
    /// Requests per second; 0: unlimited.
    pub iops: u64,
    /// Burst of requests that may begin at once; 0: what a tenth of a second allows.
    pub iops_burst: u64,
    /// Read and written bytes per second; 0: unlimited.
    pub bandwidth_bytes: u64,
    /// Burst of bytes that may begin at once; 0: what a tenth of a second allows.
    pub bandwidth_burst_bytes: u64,
}

/// Whether reads of the image use the host's page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum BaseCache {
    /// Reads go through the page cache of the host, which all machines share.
    #[default]
    Host,
    /// Reads bypass the page cache of the host (O_DIRECT).
    None,
}

/// Network to which the machines of a catalog are connected.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Network {
    /// User-mode network of the hypervisor: outgoing connections to everything that the host reaches, including services
    /// on its loopback.
    #[default]
    User,
    /// A bridge of the host, which is given by name.
    Bridge(String),
    /// The machines have no network card.
    None,
}

/// Event that discards what a machine has written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ResetEvent {
    /// Each stop of the machine discards what was written.
    PowerCycle,
    /// Each stop of the machine, and a reboot by its guest.
    GuestReboot,
    /// Only a request to reset discards what was written.
    Never,
}
