//! Settings of catalogs. Owns the settings, their words and their defaults; the daemon checks combinations.

use super::{Hardware, Ready, ScratchFormat, VmmKind};
use crate::{DiskMode, Hypervisor, ImageRef, Name, Residency};
use serde::{Deserialize, Serialize};
use spillway_control::{DiskSettings, Rate};
use std::collections::BTreeMap;
use utoipa::ToSchema;

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
    /// Chunks of a streamed version that are brought before a disk needs them, at least. Without it, those that the
    /// version asks for. A version that was copied is not affected.
    #[serde(default)]
    pub residency: Option<Residency>,
    /// Number of machines that the catalog has.
    #[serde(default)]
    pub count: u32,
    /// Whether machines are interchangeable, or keep what is written for one owner.
    #[serde(default, rename = "type")]
    pub kind: CatalogKind,
    /// Settings of the machines' disks.
    #[serde(flatten)]
    #[schema(inline)]
    pub disk: DiskSettings,
    /// Part of the limit of a disk's RAM tier that the disk always has.
    #[serde(default)]
    pub ram_guarantee_bytes: u64,
    /// Store for overflow, difference and data files; by default the first of class `local`.
    #[serde(default)]
    pub overflow_store: Option<Name>,
    /// Whether each MiB of the image is compared with its digest before its first use. A mismatch is an I/O error for the guest,
    /// and an event.
    #[serde(default)]
    pub verify_reads: bool,
    /// Size in bytes of a second disk of each machine, whose data outlives resets. It can grow.
    #[serde(default)]
    pub data_disk_bytes: Option<u64>,
    /// Store for data disks; by default the first of class `local`.
    #[serde(default)]
    pub data_disk_store: Option<Name>,
    /// Size in bytes of a disk for temporary data, which is empty after each reset. It is in the first store of class `temp`. Only
    /// pooled machines can have one.
    #[serde(default)]
    pub scratch_disk_bytes: Option<u64>,
    /// File system and label of scratch disks. Without it they are blank. With `ntfs:LABEL` or `ext4:LABEL` they have a partition
    /// with that file system. Requires `scratch_disk_bytes`: at least 64 MiB for NTFS, and 16 MiB for ext4.
    #[serde(default)]
    pub scratch_format: Option<ScratchFormat>,
    /// Virtual hardware of the machines.
    #[serde(flatten)]
    #[schema(inline)]
    pub hardware: Hardware,
    /// Pattern of machine names: a run of `#` stands for the number. By default the catalog's name and `-###`.
    #[serde(default)]
    pub naming: Option<String>,
    /// Event that discards what a machine has written. By default `power-cycle`, for dedicated machines `never`.
    #[serde(default)]
    pub reset: Option<ResetEvent>,
    /// Criterion by which a machine counts as ready. By default it does as soon as it runs.
    #[serde(default)]
    pub ready: Option<Ready>,
    /// Seconds that a guest has to shut down before it is ended.
    #[serde(default = "grace_seconds")]
    pub grace_seconds: u32,
    /// Number of machines that are kept ready and unclaimed.
    #[serde(default)]
    pub warm: u32,
    /// Default duration of claims in seconds; 0: until they are released. The host's by default.
    #[serde(default)]
    pub claim_ttl_seconds: Option<u32>,
    /// Whether machines start when they are created and when the host boots, and again when their guest ends. One that a client has
    /// stopped stays off until the host boots.
    #[serde(default)]
    pub autostart: bool,
    /// Place in the order of starts: lower ones first. Machines of catalogs with `autostart` start once those of lower orders are
    /// ready or have failed.
    #[serde(default)]
    pub start_order: u32,
    /// Seconds from then until they start. No effect in the lowest order.
    #[serde(default)]
    pub start_delay_seconds: u32,
    /// User-data for cloud-init. It is text of at most 16 KiB.
    #[serde(default)]
    pub user_data: Option<String>,
    /// SSH public keys that may log in. Each is a line of `authorized_keys`.
    #[serde(default)]
    pub authorized_keys: Vec<String>,
    /// Labels for people and for selectors. They are keys and values.
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

    /// Hypervisor of the machines, on a host with this one.
    pub fn hypervisor(&self, of_host: Hypervisor) -> Hypervisor {
        match self.hardware.vmm {
            VmmKind::Host => of_host,
            VmmKind::External => Hypervisor::None,
        }
    }

    /// Destination of the disks' writes.
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
        self.mode().has_ram().then(|| self.disk().ram_bytes())
    }

    /// Limit of a disk's overflow file; `None` in modes without one.
    pub fn overflow_bytes(&self) -> Option<u64> {
        self.mode().has_log().then(|| self.disk().overflow_bytes())
    }

    /// Rate limit of a disk.
    pub fn rate(&self) -> Rate {
        self.disk.rate()
    }

    /// Pattern of machine names, for a catalog of this name.
    pub fn naming(&self, catalog: &Name) -> String {
        self.naming.clone().unwrap_or_else(|| format!("{catalog}-###"))
    }

    /// Fills in all defaults, so that equivalent settings are equal.
    pub fn with_defaults(&self, catalog: &Name) -> CatalogSpec {
        CatalogSpec {
            disk: self.disk().with_defaults(),
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
            "residency",
            "start_delay_seconds",
            "start_order",
            "warm",
        ];
        live.contains(&setting)
    }

    /// Whether a catalog keeps the value of this setting that it was created with.
    pub fn is_fixed(setting: &str) -> bool {
        ["naming", "vmm"].contains(&setting)
    }
}

fn grace_seconds() -> u32 {
    GRACE_SECONDS_DEFAULT
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
