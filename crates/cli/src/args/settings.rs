//! What a disk is like, as options: those that `serve`, `run`, `set` and `catalog create` share. Owns their names and their
//! help; what they mean is `spillway_control`'s to say.
//!
//! Invariant: a setting `ram_bytes` is the option `--ram`: without its unit, with dashes.

use crate::host::words::{size, words};
use clap::Args;
use spillway_api::bounds;
use spillway_control::{BaseCache, DiskSettings, FullPolicy, Mode};

/// The words of modes.
pub const MODES: &[&str] = &["ram+overflow", "ram", "overflow", "direct", "ephemeral", "persistent"];
/// The words of policies.
pub const FULL: &[&str] = &["pause", "fail"];
/// How the image is read.
pub const BASE_CACHES: &[&str] = &["host", "none"];

/// How much a disk may do in a second.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct RateLimit {
    /// Limit of requests per second; 0: no limit
    #[arg(long, value_name = "N")]
    pub iops: Option<u64>,
    /// Requests that may exceed that limit in a burst [default: a tenth of --iops]
    #[arg(long, value_name = "N")]
    pub iops_burst: Option<u64>,
    /// Limit of bytes read and written per second, such as 35M; 0: no limit
    #[arg(long, value_name = "SIZE", value_parser = spillway_api::parse_size)]
    pub bandwidth: Option<u64>,
    /// Bytes that may exceed that limit in a burst [default: a tenth of --bandwidth]
    #[arg(long, value_name = "SIZE", value_parser = spillway_api::parse_size)]
    pub bandwidth_burst: Option<u64>,
}

impl RateLimit {
    fn settings(self) -> DiskSettings {
        DiskSettings {
            iops: self.iops,
            iops_burst: self.iops_burst,
            bandwidth_bytes: self.bandwidth,
            bandwidth_burst_bytes: self.bandwidth_burst,
            ..DiskSettings::default()
        }
    }
}

/// Limits of a disk, which can change while it is used.
#[derive(Clone, Copy, Debug, Args)]
pub struct LimitOptions {
    #[arg(
        long, value_name = "SIZE", value_parser = size(&bounds::RAM_BYTES),
        help = bounds::RAM_BYTES.help("Limit of the RAM tier, in modes ram+overflow and ram [default: 256M]")
    )]
    pub ram: Option<u64>,
    #[arg(
        long, value_name = "SIZE", value_parser = size(&bounds::OVERFLOW_BYTES),
        help = bounds::OVERFLOW_BYTES.help("Limit of the overflow file, in modes ram+overflow and overflow [default: 10G]")
    )]
    pub overflow: Option<u64>,
    /// What a write does when the write cache is full: pause (wait for space) or fail (ENOSPC), in modes ram+overflow, ram
    /// and overflow [default: pause]
    #[arg(long, value_name = "POLICY", value_parser = words::<FullPolicy>(FULL))]
    pub full: Option<FullPolicy>,
    /// Share of the write cache whose use raises the event 'warning', in modes ram+overflow, ram and overflow [default: 80]
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(1..=100))]
    pub warn_at: Option<u8>,
    /// Share of the write cache whose use raises the event 'critical', in the same modes [default: 90]
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(1..=100))]
    pub critical_at: Option<u8>,
    /// How much it may do in a second.
    #[command(flatten)]
    pub rate: RateLimit,
}

impl LimitOptions {
    /// As they were given.
    pub fn settings(&self) -> DiskSettings {
        DiskSettings {
            ram_bytes: self.ram,
            overflow_bytes: self.overflow,
            full: self.full,
            warn_at: self.warn_at,
            critical_at: self.critical_at,
            ..self.rate.settings()
        }
    }
}

/// What a disk is like.
#[derive(Clone, Copy, Debug, Args)]
pub struct DiskOptions {
    /// Cache mode: where writes go (see 'Modes' in 'spillway serve --help') [default: ram+overflow; of dedicated machines
    /// persistent]
    #[arg(long, value_parser = words::<Mode>(MODES))]
    pub mode: Option<Mode>,
    /// Its limits.
    #[command(flatten)]
    pub limits: LimitOptions,
    /// Read the image through the host's page cache (host), or past it with O_DIRECT (none) [default: host]
    #[arg(long, value_name = "HOW", value_parser = words::<BaseCache>(BASE_CACHES))]
    pub base_cache: Option<BaseCache>,
}

impl DiskOptions {
    /// As they were given.
    pub fn settings(&self) -> DiskSettings {
        DiskSettings { mode: self.mode, base_cache: self.base_cache, ..self.limits.settings() }
    }
}

/// The option of a setting.
pub fn option_of(setting: &str) -> String {
    format!("--{}", setting.strip_suffix("_bytes").unwrap_or(setting).replace('_', "-"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{Command, FromArgMatches};

    /// A setting that no option says would be one for programs alone.
    #[test]
    fn each_setting_has_its_option() {
        let settings = serde_json::to_value(DiskSettings::default().with_defaults()).unwrap();
        let command = DiskOptions::augment_args(Command::new("x"));
        for (setting, value) in settings.as_object().unwrap() {
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            let words = ["x".to_owned(), option_of(setting), text];
            let matches =
                command.clone().try_get_matches_from(words).unwrap_or_else(|e| panic!("{setting}: {e}"));
            let given = DiskOptions::from_arg_matches(&matches).unwrap().settings();
            assert_eq!(&serde_json::to_value(given).unwrap()[setting], value, "{setting}");
        }
    }
}
