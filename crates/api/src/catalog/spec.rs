//! What is wanted of a catalog. Owns the settings, their words and what they are if nothing is said; which of them go
//! together is the daemon's to say.

use super::Ready;
use crate::{DiskMode, ImageRef, Name};
use serde::{Deserialize, Serialize};
use spillway_control::{DiskSettings, Rate};
use std::collections::BTreeMap;
use utoipa::ToSchema;

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
    /// Settings of the machines' disks.
    #[serde(flatten)]
    #[schema(inline)]
    pub disk: DiskSettings,
    /// Part of the limit of a disk's RAM tier that the disk always has.
    #[serde(default)]
    pub ram_guarantee_bytes: u64,
    /// The store for overflow, difference and data files; the first of class `local` if none is named.
    #[serde(default)]
    pub overflow_store: Option<Name>,
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
        self.disk.mode.unwrap_or(usual)
    }

    /// Settings of the machines' disks, with their mode.
    pub fn disk(&self) -> DiskSettings {
        DiskSettings { mode: Some(self.mode()), ..self.disk }
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
        self.mode().has_ram().then(|| self.disk().ram_bytes())
    }

    /// Limit of a disk's overflow file; none in modes without one.
    pub fn overflow_bytes(&self) -> Option<u64> {
        self.mode().has_log().then(|| self.disk().overflow_bytes())
    }

    /// How much a disk may do in a second.
    pub fn rate(&self) -> Rate {
        self.disk.rate()
    }

    /// Names of machines, for a catalog of this name.
    pub fn naming(&self, catalog: &Name) -> String {
        self.naming.clone().unwrap_or_else(|| format!("{catalog}-###"))
    }

    /// The same with every usual value said: equal for two that mean the same.
    pub fn said(&self, catalog: &Name) -> CatalogSpec {
        CatalogSpec {
            disk: self.disk().said(),
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

#[cfg(test)]
mod tests {
    use super::*;

    /// The settings of a disk are fields of the catalog's own, and still none is taken that there is not.
    #[test]
    fn what_is_flat_in_json_is_whole_and_nothing_else() {
        let read = |settings: &str| {
            serde_json::from_str::<CatalogSpec>(&format!(r#"{{"image": "debian", {settings}}}"#))
        };
        let spec = read(r#""mode": "ram", "ram_bytes": 18446744073709551615, "warm": 2"#).unwrap();
        assert_eq!(
            (spec.disk.mode, spec.disk.ram_bytes, spec.warm),
            (Some(DiskMode::Ram), Some(u64::MAX), 2)
        );
        let text = serde_json::to_value(&spec).unwrap();
        assert_eq!((&text["mode"], &text["overflow_bytes"]), (&"ram".into(), &serde_json::Value::Null));
        assert_eq!(serde_json::from_value::<CatalogSpec>(text).unwrap(), spec);
        for wrong in [r#""ram": 5"#, r#""disk": {}"#, r#""ram_bytes": -1"#, r#""mode": "fast""#] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
        assert!(read(r#""ram": 5"#).unwrap_err().to_string().contains("unknown field `ram`"));
    }
}
