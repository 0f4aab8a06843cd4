//! Settings of a disk. Catalogs, command line options, changes of a served disk and messages to its worker share this type.
//! Owns the defaults and ranges, and which setting is allowed in which mode.
//!
//! Invariant: a setting that would have no effect is refused.

use serde::{Deserialize, Serialize};
use spillway_layout::{BaseCache, FullPolicy, Mode, bytes_in_words};
use std::fmt;
use std::ops::RangeInclusive;

/// Limits that a RAM tier can have.
pub const RAM_BYTES: RangeInclusive<u64> = 64 << 10..=4 << 40;
/// Limits that an overflow file can have.
pub const OVERFLOW_BYTES: RangeInclusive<u64> = 16 << 20..=4 << 40;
/// Requests a second, and at once; 0: no limit.
pub const IOPS: RangeInclusive<u64> = 0..=1_000_000_000;
/// Bytes a second, and at once; 0: no limit.
pub const BANDWIDTH_BYTES: RangeInclusive<u64> = 0..=1 << 40;
/// Shares of the write cache from which on its fill level is told.
pub const PERCENT: RangeInclusive<u64> = 1..=100;

const RAM_BYTES_DEFAULT: u64 = 256 << 20;
const OVERFLOW_BYTES_DEFAULT: u64 = 10 << 30;
const WARN_AT_DEFAULT: u8 = 80;
const CRITICAL_AT_DEFAULT: u8 = 90;

/// Settings of a disk, of which each may be left out: then it has its usual value, or stays as it is where settings are
/// changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(default)]
pub struct DiskSettings {
    /// Where a disk's writes go. By default `ram+overflow`, for dedicated machines `persistent`.
    #[cfg_attr(feature = "schema", schema(schema_with = schema::modes))]
    pub mode: Option<Mode>,
    /// Limit of a disk's RAM tier, in modes that have one. By default 256 MiB.
    pub ram_bytes: Option<u64>,
    /// Limit of a disk's overflow file, in modes that have one. By default 10 GiB.
    pub overflow_bytes: Option<u64>,
    /// What happens to a write when the cache is full. By default `pause`.
    #[cfg_attr(feature = "schema", schema(schema_with = schema::policies))]
    pub full: Option<FullPolicy>,
    /// Percentage of the write cache in use from which on there is a warning. By default 80.
    pub warn_at: Option<u8>,
    /// Percentage of the write cache in use from which on the level is critical. By default 90.
    pub critical_at: Option<u8>,
    /// Requests a second that a disk may do. By default 0: as many as it can.
    pub iops: Option<u64>,
    /// Requests that may begin at once beyond that. By default 0: what a tenth of a second allows.
    pub iops_burst: Option<u64>,
    /// Bytes of reads and writes a second. By default 0: as many as it can.
    pub bandwidth_bytes: Option<u64>,
    /// Bytes that may begin at once beyond that. By default 0: what a tenth of a second allows.
    pub bandwidth_burst_bytes: Option<u64>,
    /// How the base image is read. By default `host`: through the host's page cache.
    #[cfg_attr(feature = "schema", schema(schema_with = schema::base_caches))]
    pub base_cache: Option<BaseCache>,
}

/// Words of settings, as an HTTP interface describes them.
#[cfg(feature = "schema")]
mod schema {
    use spillway_layout::{BaseCache, FullPolicy, Mode};
    use utoipa::openapi::schema::{Object, ObjectBuilder, SchemaType, Type};

    pub fn modes() -> Object {
        words(
            Mode::ALL.map(Mode::name),
            "Where a disk's writes go. By default `ram+overflow`, for dedicated machines `persistent`.",
        )
    }

    pub fn policies() -> Object {
        words(
            FullPolicy::ALL.map(FullPolicy::name),
            "What happens to a write when the cache is full. By default `pause`.",
        )
    }

    pub fn base_caches() -> Object {
        words(
            BaseCache::ALL.map(BaseCache::name),
            "How the base image is read. By default `host`: through the host's page cache.",
        )
    }

    fn words<const N: usize>(words: [&str; N], description: &str) -> Object {
        let all = words.into_iter().map(Some).chain([None]);
        let kinds = SchemaType::from_iter([Type::String, Type::Null]);
        ObjectBuilder::new().schema_type(kinds).enum_values(Some(all)).description(Some(description)).build()
    }
}

/// Why a setting cannot be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingFault {
    /// Its name, as in JSON.
    pub setting: &'static str,
    /// Why, as a predicate of it. Other settings stand in it between backquotes.
    pub why: String,
}

impl SettingFault {
    /// A setting that is not for a mode.
    pub fn of_mode(setting: &'static str, mode: Mode, why: &str) -> SettingFault {
        let why = format!("is not for `mode` {mode}: {why}: leave it out or choose another mode");
        SettingFault { setting, why }
    }
}

impl fmt::Display for SettingFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.setting, self.why)
    }
}

impl std::error::Error for SettingFault {}

/// How much a disk may do in a second, and at once before that counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
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

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.iops, bytes_in_words(self.bandwidth_bytes)) {
            (0, _) if self.bandwidth_bytes == 0 => f.write_str("no limit of its rate"),
            (iops, _) if self.bandwidth_bytes == 0 => write!(f, "at most {iops} requests/s"),
            (0, bandwidth) => write!(f, "at most {bandwidth}/s"),
            (iops, bandwidth) => write!(f, "at most {iops} requests/s and {bandwidth}/s"),
        }
    }
}

impl DiskSettings {
    /// Where writes go.
    pub fn mode(&self) -> Mode {
        self.mode.unwrap_or(Mode::RamOverflow)
    }

    /// Limit of the RAM tier; 0 in modes without one.
    pub fn ram_bytes(&self) -> u64 {
        if self.mode().has_ram() { self.ram_bytes.unwrap_or(RAM_BYTES_DEFAULT) } else { 0 }
    }

    /// Limit of the overflow file; 0 in modes without one.
    pub fn overflow_bytes(&self) -> u64 {
        if self.mode().has_log() { self.overflow_bytes.unwrap_or(OVERFLOW_BYTES_DEFAULT) } else { 0 }
    }

    /// What happens to a write that finds no space.
    pub fn full(&self) -> FullPolicy {
        self.full.unwrap_or(FullPolicy::Pause)
    }

    /// From how many per cent of the write cache on there is a warning: one threshold that is said moves the usual value of
    /// the other out of its way.
    pub fn warn_at(&self) -> u8 {
        self.warn_at.unwrap_or(self.critical_at.unwrap_or(100).min(WARN_AT_DEFAULT))
    }

    /// The same for critical.
    pub fn critical_at(&self) -> u8 {
        self.critical_at.unwrap_or(self.warn_at().max(CRITICAL_AT_DEFAULT))
    }

    /// How much it may do in a second.
    pub fn rate(&self) -> Rate {
        Rate {
            iops: self.iops.unwrap_or(0),
            iops_burst: self.iops_burst.unwrap_or(0),
            bandwidth_bytes: self.bandwidth_bytes.unwrap_or(0),
            bandwidth_burst_bytes: self.bandwidth_burst_bytes.unwrap_or(0),
        }
    }

    /// How the base image is read.
    pub fn base_cache(&self) -> BaseCache {
        self.base_cache.unwrap_or(BaseCache::Host)
    }

    /// These settings with the default of each setting that is unset and that the mode has. Equal for two that have the
    /// same effect.
    #[must_use]
    pub fn with_defaults(&self) -> DiskSettings {
        let (mode, rate) = (self.mode(), self.rate());
        let has_cache = !mode.writes_in_place();
        DiskSettings {
            mode: Some(mode),
            ram_bytes: mode.has_ram().then(|| self.ram_bytes()),
            overflow_bytes: mode.has_log().then(|| self.overflow_bytes()),
            full: has_cache.then(|| self.full()),
            warn_at: has_cache.then(|| self.warn_at()),
            critical_at: has_cache.then(|| self.critical_at()),
            base_cache: (mode != Mode::Ephemeral).then(|| self.base_cache()),
            ..DiskSettings::default().with_rate(rate)
        }
    }

    /// The same with this rate.
    #[must_use]
    pub fn with_rate(&self, rate: Rate) -> DiskSettings {
        DiskSettings {
            iops: Some(rate.iops),
            iops_burst: Some(rate.iops_burst),
            bandwidth_bytes: Some(rate.bandwidth_bytes),
            bandwidth_burst_bytes: Some(rate.bandwidth_burst_bytes),
            ..*self
        }
    }

    /// These settings with others that are said. A burst is of its rate: another rate of which no more is said has the usual
    /// one.
    #[must_use]
    pub fn changed(&self, change: &DiskSettings) -> DiskSettings {
        let burst =
            |given: Option<u64>, rate: Option<u64>, now: Option<u64>| given.or(rate.map(|_| 0)).or(now);
        DiskSettings {
            mode: change.mode.or(self.mode),
            ram_bytes: change.ram_bytes.or(self.ram_bytes),
            overflow_bytes: change.overflow_bytes.or(self.overflow_bytes),
            full: change.full.or(self.full),
            warn_at: change.warn_at.or(self.warn_at),
            critical_at: change.critical_at.or(self.critical_at),
            iops: change.iops.or(self.iops),
            iops_burst: burst(change.iops_burst, change.iops, self.iops_burst),
            bandwidth_bytes: change.bandwidth_bytes.or(self.bandwidth_bytes),
            bandwidth_burst_bytes: burst(
                change.bandwidth_burst_bytes,
                change.bandwidth_bytes,
                self.bandwidth_burst_bytes,
            ),
            base_cache: change.base_cache.or(self.base_cache),
        }
    }

    /// Refuses what the mode does not have, what is out of its range, and thresholds in the wrong order.
    pub fn check(&self) -> Result<(), SettingFault> {
        let mode = self.mode();
        let in_place = mode.writes_in_place();
        let no_cache = match mode {
            Mode::Ephemeral => "it writes to a private copy of the image, which excludes a write cache",
            _ => "it has no write cache that could be full",
        };
        let no_overflow = match mode {
            Mode::Ephemeral => no_cache,
            _ if in_place => "its file is as large as the disk",
            _ => "it has no overflow",
        };
        let no_ram = if mode == Mode::Ephemeral { no_cache } else { "it has no RAM tier" };
        for (setting, is_unused, why) in [
            ("ram_bytes", self.ram_bytes.is_some() && !mode.has_ram(), no_ram),
            ("overflow_bytes", self.overflow_bytes.is_some() && !mode.has_log(), no_overflow),
            ("full", self.full.is_some() && in_place, no_cache),
            ("warn_at", self.warn_at.is_some() && in_place, no_cache),
            ("critical_at", self.critical_at.is_some() && in_place, no_cache),
            (
                "base_cache",
                self.base_cache.is_some() && mode == Mode::Ephemeral,
                "it has no image to read, and its disk is read past the cache",
            ),
        ] {
            if is_unused {
                return Err(SettingFault::of_mode(setting, mode, why));
            }
        }
        for (setting, value, range) in [
            ("ram_bytes", self.ram_bytes, RAM_BYTES),
            ("overflow_bytes", self.overflow_bytes, OVERFLOW_BYTES),
            ("warn_at", self.warn_at.map(u64::from), PERCENT),
            ("critical_at", self.critical_at.map(u64::from), PERCENT),
            ("iops", self.iops, IOPS),
            ("iops_burst", self.iops_burst, IOPS),
            ("bandwidth_bytes", self.bandwidth_bytes, BANDWIDTH_BYTES),
            ("bandwidth_burst_bytes", self.bandwidth_burst_bytes, BANDWIDTH_BYTES),
        ] {
            if let Some(value) = value.filter(|value| !range.contains(value)) {
                return Err(SettingFault { setting, why: out_of_range(setting, value, &range) });
            }
        }
        let (warn_at, critical_at) = (self.warn_at(), self.critical_at());
        if warn_at > critical_at {
            let why = format!("is {warn_at}, above `critical_at`, {critical_at}: the warning comes first");
            return Err(SettingFault { setting: "warn_at", why });
        }
        Ok(())
    }
}

fn out_of_range(setting: &str, value: u64, range: &RangeInclusive<u64>) -> String {
    let text = |n: u64| if setting.ends_with("_bytes") { bytes_in_words(n) } else { n.to_string() };
    let (least, most) = (*range.start(), *range.end());
    match value < least {
        true => format!("is {}, too small: the least is {}", text(value), text(least)),
        false => format!("is {}, too large: the most is {}", text(value), text(most)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: DiskSettings = DiskSettings {
        mode: None,
        ram_bytes: None,
        overflow_bytes: None,
        full: None,
        warn_at: None,
        critical_at: None,
        iops: None,
        iops_burst: None,
        bandwidth_bytes: None,
        bandwidth_burst_bytes: None,
        base_cache: None,
    };

    #[test]
    fn what_is_said_as_usual_is_the_same_and_can_be_in_every_mode() {
        for mode in Mode::ALL {
            let settings = DiskSettings { mode: Some(mode), ..NONE };
            let complete = settings.with_defaults();
            assert_eq!(complete.check(), Ok(()), "{mode}");
            assert_eq!(complete.with_defaults(), complete, "{mode}");
            assert_eq!((complete.ram_bytes(), complete.rate()), (settings.ram_bytes(), settings.rate()));
        }
    }

    #[test]
    fn what_cannot_be_is_refused_by_its_name() {
        let of = |mode| DiskSettings { mode: Some(mode), ..NONE };
        for (settings, setting, why) in [
            (DiskSettings { ram_bytes: Some(1 << 20), ..of(Mode::Direct) }, "ram_bytes", "no RAM tier"),
            (
                DiskSettings { overflow_bytes: Some(1 << 30), ..of(Mode::Ram) },
                "overflow_bytes",
                "no overflow",
            ),
            (
                DiskSettings { full: Some(FullPolicy::Pause), ..of(Mode::Persistent) },
                "full",
                "`mode` persistent",
            ),
            (
                DiskSettings { base_cache: Some(BaseCache::Host), ..of(Mode::Ephemeral) },
                "base_cache",
                "no image",
            ),
            (DiskSettings { ram_bytes: Some(1), ..NONE }, "ram_bytes", "the least is 64.0 KiB"),
            (DiskSettings { iops: Some(u64::MAX), ..NONE }, "iops", "the most is 1000000000"),
            (DiskSettings { critical_at: Some(101), ..NONE }, "critical_at", "the most is 100"),
            (DiskSettings { warn_at: Some(95), critical_at: Some(90), ..NONE }, "warn_at", "comes first"),
        ] {
            let fault = settings.check().unwrap_err();
            assert!(fault.setting == setting && fault.why.contains(why), "{settings:?}: {fault}");
        }
    }

    #[test]
    fn a_threshold_that_is_said_moves_the_other() {
        let thresholds = |warn_at, critical_at| {
            let settings = DiskSettings { warn_at, critical_at, ..NONE };
            (settings.warn_at(), settings.critical_at())
        };
        assert_eq!(thresholds(None, None), (80, 90));
        assert_eq!(thresholds(Some(95), None), (95, 95));
        assert_eq!(thresholds(None, Some(50)), (50, 50));
    }

    #[test]
    fn a_change_keeps_what_it_does_not_name_but_for_the_burst_of_another_rate() {
        let now = DiskSettings { iops: Some(100), iops_burst: Some(50), ram_bytes: Some(1 << 20), ..NONE };
        let changed = now.changed(&DiskSettings { iops: Some(200), ..NONE });
        assert_eq!(changed, DiskSettings { iops: Some(200), iops_burst: Some(0), ..now });
        let burst = now.changed(&DiskSettings { iops_burst: Some(7), ..NONE });
        assert_eq!(burst, DiskSettings { iops_burst: Some(7), ..now });
        assert_eq!(now.changed(&NONE), now);
    }
}
