//! What a disk is, as the options that `serve` and `run` share, and which of them go together.

use crate::error::Failure;
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use spillway_control::{BaseCache, Digests, FullPolicy, ImageFormat, Mode, Rate, ServeSettings};
use std::path::{Path, PathBuf};

const WARN_DEFAULT: u8 = 80;
const CRITICAL_DEFAULT: u8 = 90;
const RAM_DEFAULT: u64 = 256 << 20;
const OVERFLOW_DEFAULT: u64 = 10 << 30;
const OVERFLOW_DIR_DEFAULT: &str = "/var/tmp";
/// Queues offered when nothing is said: QEMU asks for one per vCPU.
const QUEUES_DEFAULT: u16 = 16;
pub(super) const MAX_QUEUES: i64 = 64;
const SOCKET_MODE_DEFAULT: u32 = 0o600;
/// In mode `ephemeral` the disk is a copy of one.
const NEED_AN_IMAGE: [(&str, &str); 5] = [
    ("mode", "ram+overflow"),
    ("mode", "ram"),
    ("mode", "overflow"),
    ("mode", "direct"),
    ("mode", "persistent"),
];

/// How much a disk may do in a second.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct RateLimit {
    /// Requests a second at most; 0: as many as it can
    #[arg(long, value_name = "N")]
    pub iops: Option<u64>,
    /// Requests that may begin at once beyond that [default: what a tenth of a second allows]
    #[arg(long, value_name = "N")]
    pub iops_burst: Option<u64>,
    /// Bytes of reads and writes a second at most, such as 35M; 0: as many as it can
    #[arg(long, value_name = "SIZE", value_parser = spillway_api::parse_size)]
    pub bandwidth: Option<u64>,
    /// Bytes that may begin at once beyond that [default: what a tenth of a second allows]
    #[arg(long, value_name = "SIZE", value_parser = spillway_api::parse_size)]
    pub bandwidth_burst: Option<u64>,
}

impl RateLimit {
    /// As a limit that is set anew.
    pub fn rate(self) -> spillway_api::Rate {
        spillway_api::Rate {
            iops: self.iops.unwrap_or(0),
            iops_burst: self.iops_burst.unwrap_or(0),
            bandwidth_bytes: self.bandwidth.unwrap_or(0),
            bandwidth_burst_bytes: self.bandwidth_burst.unwrap_or(0),
        }
    }
}

/// The same for a disk.
pub fn supervisor_rate(rate: spillway_api::Rate) -> Rate {
    let spillway_api::Rate { iops, iops_burst, bandwidth_bytes, bandwidth_burst_bytes } = rate;
    Rate { iops, iops_burst, bandwidth_bytes, bandwidth_burst_bytes }
}

/// A disk and its sockets: the options that `serve` and `run` share.
#[derive(Debug, Args)]
pub struct Disk {
    /// Base image: shared, only read (all modes but ephemeral)
    #[arg(long, value_name = "PATH", required_if_eq_any = NEED_AN_IMAGE)]
    pub image: Option<PathBuf>,
    /// Format of the image [default: by the extension .raw or .qcow2]
    #[arg(long, value_name = "FORMAT", value_parser = format())]
    pub format: Option<ImageFormat>,
    /// Size of the disk; larger than the image, the rest reads as zeroes [default: the image's]
    #[arg(long, value_parser = spillway_api::parse_size)]
    pub size: Option<u64>,
    /// Where writes go
    #[arg(long, value_parser = mode(), default_value = "ram+overflow")]
    pub mode: Mode,
    /// The disk's own file: kept, and made if it is not there (mode persistent); a raw copy of the image, which goes
    /// with the disk (mode ephemeral)
    #[arg(long, value_name = "PATH", required_if_eq_any = [("mode", "persistent"), ("mode", "ephemeral")])]
    pub disk: Option<PathBuf>,
    /// Which image it is, so that the disk is never put on another (mode persistent) [default: its size and time]
    #[arg(long, value_name = "TEXT")]
    pub image_id: Option<String>,
    /// Compare each MiB of the image with its digest before it is used for the first time: the list of SHA-256 digests,
    /// 32 bytes each
    #[arg(long, value_name = "PATH", requires = "digest")]
    pub digests: Option<PathBuf>,
    /// The image's digest, which says that the list is the right one: sha256:...
    #[arg(long, value_name = "DIGEST", requires = "digests")]
    pub digest: Option<String>,
    /// Read the image through the host's page cache, or past it [default: host]
    #[arg(long, value_name = "HOW", value_parser = base_cache())]
    pub base_cache: Option<BaseCache>,
    /// Limit of the RAM tier (modes ram+overflow, ram) [default: 256M]
    #[arg(long, value_name = "SIZE", value_parser = spillway_api::parse_size)]
    pub ram: Option<u64>,
    /// Limit of the overflow file (modes ram+overflow, overflow) [default: 10G]
    #[arg(long, value_name = "SIZE", value_parser = spillway_api::parse_size)]
    pub overflow: Option<u64>,
    /// Directory on a local disk for the overflow file (modes ram+overflow, overflow, direct) [default: /var/tmp]
    #[arg(long, value_name = "DIR")]
    pub overflow_dir: Option<PathBuf>,
    /// For measuring: the overflow file's store, or that of the disk's own file, is as slow as this storage model
    /// (all modes but ram)
    #[arg(long, value_name = "FILE")]
    pub overflow_model: Option<PathBuf>,
    /// For measuring: the base image's store is as slow as this storage model (all modes but ephemeral)
    #[arg(long, value_name = "FILE")]
    pub base_model: Option<PathBuf>,
    /// What happens to a write when the cache is full (modes ram+overflow, ram, overflow) [default: pause]
    #[arg(long, value_name = "POLICY", value_parser = full())]
    pub full: Option<FullPolicy>,
    /// Warn when so much of the write cache is used (modes ram+overflow, ram, overflow) [default: 80]
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(1..=100))]
    pub warn_at: Option<u8>,
    /// Call it critical when so much is used (modes ram+overflow, ram, overflow) [default: 90]
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(1..=100))]
    pub critical_at: Option<u8>,
    /// How much it may do in a second.
    #[command(flatten)]
    pub rate: RateLimit,
    /// Socket for a VMM
    #[arg(long, value_name = "SOCK")]
    pub vhost_user: Option<PathBuf>,
    /// Request queues offered to the VMM [default: 16; with run as many as --vcpus]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=MAX_QUEUES))]
    pub queues: Option<u16>,
    /// Socket for NBD clients
    #[arg(long, value_name = "SOCK")]
    pub nbd: Option<PathBuf>,
    /// Socket for 'spillway stats', 'reset', 'set', 'events' and 'upgrade'
    #[arg(long, value_name = "SOCK")]
    pub control: Option<PathBuf>,
    /// Rights of the sockets [default: 0600]
    #[arg(long, value_name = "MODE", value_parser = socket_mode)]
    pub socket_mode: Option<u32>,
    /// Group of the sockets, by name or number [default: this process's]
    #[arg(long, value_name = "GROUP")]
    pub socket_group: Option<String>,
}

fn mode() -> impl TypedValueParser<Value = Mode> {
    PossibleValuesParser::new(Mode::ALL.map(Mode::name)).try_map(|word| word.parse())
}

pub(super) fn full() -> impl TypedValueParser<Value = FullPolicy> {
    PossibleValuesParser::new([FullPolicy::Pause.name(), FullPolicy::Fail.name()])
        .try_map(|word| word.parse())
}

fn format() -> impl TypedValueParser<Value = ImageFormat> {
    PossibleValuesParser::new(["raw", "qcow2"]).map(|word| match word.as_str() {
        "raw" => ImageFormat::Raw,
        _ => ImageFormat::Qcow2,
    })
}

fn base_cache() -> impl TypedValueParser<Value = BaseCache> {
    PossibleValuesParser::new(["host", "none"]).map(|word| match word.as_str() {
        "host" => BaseCache::Host,
        _ => BaseCache::None,
    })
}

fn socket_mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text.strip_prefix("0o").unwrap_or(text), 8) {
        Ok(mode) if mode <= 0o777 && !text.starts_with('+') => Ok(mode),
        _ => Err("rights are an octal number up to 0777, such as 0660".into()),
    }
}

impl Disk {
    /// What is asked of the disk's server, or why these do not go together.
    pub fn settings(&self) -> Result<ServeSettings, Failure> {
        let mode = self.mode;
        let unused = [
            ("--ram", self.ram.is_some() && !mode.has_ram(), "it has no RAM tier"),
            (
                "--overflow",
                self.overflow.is_some() && !mode.has_log(),
                match mode.writes_in_place() {
                    true => "its file is as large as the disk",
                    false => "it has no overflow",
                },
            ),
            (
                "--overflow-dir",
                self.overflow_dir.is_some() && (mode.has_named_file() || !mode.has_file()),
                match mode.has_named_file() {
                    true => "its file is that of --disk",
                    false => "it has no overflow",
                },
            ),
            ("--full", self.full.is_some() && mode.writes_in_place(), "its limit is the file system's"),
            ("--warn-at", self.warn_at.is_some() && mode.writes_in_place(), "it has no write cache"),
            ("--critical-at", self.critical_at.is_some() && mode.writes_in_place(), "it has no write cache"),
            ("--image", self.image.is_some() && mode == Mode::Ephemeral, "its disk is a full copy of one"),
            ("--format", self.format.is_some() && mode == Mode::Ephemeral, "its disk is raw"),
            ("--digests", self.digests.is_some() && mode == Mode::Ephemeral, "its disk is written to"),
            ("--overflow-model", self.overflow_model.is_some() && !mode.has_file(), "it has no overflow"),
            (
                "--base-model",
                self.base_model.is_some() && mode == Mode::Ephemeral,
                "its disk is a full copy of one, whose store is that of --overflow-model",
            ),
            (
                "--base-cache",
                self.base_cache.is_some() && mode == Mode::Ephemeral,
                "it has no image to read, and its disk is read past the cache",
            ),
            ("--disk", self.disk.is_some() && !mode.has_named_file(), "it has no file that is kept"),
            (
                "--image-id",
                self.image_id.is_some() && mode != Mode::Persistent,
                "it knows no image of an earlier start",
            ),
        ];
        if let Some((option, _, why)) = unused.into_iter().find(|(_, given, _)| *given) {
            return Err(Failure::usage(format!(
                "{option} is not for --mode {mode}: {why}: leave {option} out or choose another mode"
            )));
        }
        for (i, (option, path)) in self.sockets().enumerate() {
            if let (Some(path), Some((other, _))) = (path, self.sockets().take(i).find(|(_, p)| *p == path)) {
                return Err(Failure::usage(format!(
                    "{other} and {option} are both {}: give each a socket of its own",
                    path.display()
                )));
            }
        }
        // One that is given moves the other's default out of its way.
        let warn_at = self.warn_at.unwrap_or(self.critical_at.unwrap_or(100).min(WARN_DEFAULT));
        let critical_at = self.critical_at.unwrap_or(warn_at.max(CRITICAL_DEFAULT));
        if warn_at > critical_at {
            return Err(Failure::usage(format!(
                "--warn-at {warn_at} is above --critical-at {critical_at}: the warning comes first"
            )));
        }
        if self.socket_group.as_deref() == Some("") {
            return Err(Failure::usage("--socket-group is empty: name a group or leave it out"));
        }
        let image = self
            .image
            .as_ref()
            .or(self.disk.as_ref())
            .ok_or_else(|| Failure::usage("nothing to serve: name the base image with --image"))?;
        Ok(ServeSettings {
            image: image.clone(),
            disk: self.disk.clone(),
            image_id: self.image_id.clone(),
            format: self.format,
            digests: self.digests.clone().zip(self.digest.clone()).map(|(list, root)| Digests { list, root }),
            base_cache: self.base_cache.unwrap_or(BaseCache::Host),
            size_bytes: self.size,
            mode,
            full: self.full.unwrap_or(FullPolicy::Pause),
            warn_at,
            critical_at,
            rate: supervisor_rate(self.rate.rate()),
            ram_limit_bytes: self.ram.unwrap_or(RAM_DEFAULT),
            overflow_limit_bytes: self.overflow.unwrap_or(OVERFLOW_DEFAULT),
            overflow_dir: self.overflow_dir.clone().unwrap_or_else(|| Path::new(OVERFLOW_DIR_DEFAULT).into()),
            base_model: self.base_model.clone(),
            overflow_model: self.overflow_model.clone(),
            queues: self.queues.unwrap_or(QUEUES_DEFAULT),
            vhost_user: self.vhost_user.clone(),
            nbd: self.nbd.clone(),
            control: self.control.clone(),
            socket_mode: self.socket_mode.unwrap_or(SOCKET_MODE_DEFAULT),
            socket_group: self.socket_group.clone(),
            identity: self.identity().unwrap_or(image).clone(),
        })
    }

    /// What is the same at each start of the disk, and no other's.
    fn identity(&self) -> Option<&PathBuf> {
        // A persistent disk may be served elsewhere.
        let own = self.disk.as_ref().filter(|_| self.mode == Mode::Persistent);
        own.or_else(|| self.sockets().find_map(|(_, path)| path.as_ref()))
    }

    /// The sockets that other programs connect to.
    pub(super) fn sockets(&self) -> impl Iterator<Item = (&'static str, &Option<PathBuf>)> {
        [("--vhost-user", &self.vhost_user), ("--nbd", &self.nbd), ("--control", &self.control)].into_iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_are_octal() {
        assert_eq!(socket_mode("0660"), Ok(0o660));
        assert_eq!(socket_mode("600"), Ok(0o600));
        for bad in ["", "0888", "1777", "rw", "+600", "-1"] {
            assert!(socket_mode(bad).is_err(), "{bad}");
        }
    }
}
