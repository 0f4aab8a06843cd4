//! What a disk is, as the options that `serve` and `run` share. Which of them go together is `spillway_control`'s to say.

use super::settings::{DiskOptions, option_of};
use crate::error::Failure;
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use spillway_control::{Digests, ImageFormat, ServeSettings, SettingFault};
use std::path::PathBuf;

pub(super) const MAX_QUEUES: i64 = 64;
/// In mode `ephemeral` the disk is a copy of one.
const NEED_AN_IMAGE: [(&str, &str); 5] = [
    ("mode", "ram+overflow"),
    ("mode", "ram"),
    ("mode", "overflow"),
    ("mode", "direct"),
    ("mode", "persistent"),
];

/// A disk and its sockets: the options that `serve` and `run` share.
#[derive(Debug, Args)]
pub struct Disk {
    /// Base image, which is shared and never written (required in all modes but ephemeral)
    #[arg(long, value_name = "PATH", required_if_eq_any = NEED_AN_IMAGE)]
    pub image: Option<PathBuf>,
    /// Format of the image [default: by the extension .raw or .qcow2]
    #[arg(long, value_name = "FORMAT", value_parser = format())]
    pub format: Option<ImageFormat>,
    /// Size of the disk, such as 40G; what lies beyond the image's end reads as zeroes [default: the image's]
    #[arg(long, value_parser = spillway_api::parse_size)]
    pub size: Option<u64>,
    /// Mode, caches and limits of the disk.
    #[command(flatten)]
    pub like: DiskOptions,
    /// The disk's own file. Mode persistent: created if it does not exist, and kept. Mode ephemeral: a raw copy of the
    /// image, which is deleted when the disk is ready
    #[arg(long, value_name = "PATH", required_if_eq_any = [("mode", "persistent"), ("mode", "ephemeral")])]
    pub disk: Option<PathBuf>,
    /// Text that identifies the image, so that the disk is never used with another one (mode persistent) [default: the
    /// image's size and modification time]
    #[arg(long, value_name = "TEXT")]
    pub image_id: Option<String>,
    /// Verify each MiB of the image before its first use. The file has the SHA-256 digests of all of them, 32 bytes each
    #[arg(long, value_name = "PATH", requires = "digest")]
    pub digests: Option<PathBuf>,
    /// With --digests: digest of the image, sha256:..., which that file must match
    #[arg(long, value_name = "DIGEST", requires = "digests")]
    pub digest: Option<String>,
    /// Folder on a local disk for the overflow file (modes ram+overflow, overflow, direct) [default: /var/tmp]
    #[arg(long, value_name = "DIR")]
    pub overflow_dir: Option<PathBuf>,
    /// For measurements: make the overflow file, or the disk's own file, as slow as this storage model (all modes but ram;
    /// see 'spillway storage-model')
    #[arg(long, value_name = "FILE")]
    pub overflow_model: Option<PathBuf>,
    /// For measurements: make the base image as slow as this storage model (all modes but ephemeral)
    #[arg(long, value_name = "FILE")]
    pub base_model: Option<PathBuf>,
    /// vhost-user socket to create, for a VMM
    #[arg(long, value_name = "SOCK")]
    pub vhost_user: Option<PathBuf>,
    /// Request queues offered to the VMM [default: 16; with run as many as --vcpus]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=MAX_QUEUES))]
    pub queues: Option<u16>,
    /// NBD socket to create, for NBD clients
    #[arg(long, value_name = "SOCK")]
    pub nbd: Option<PathBuf>,
    /// Control socket to create, for 'spillway stats', 'reset', 'set', 'events' and 'upgrade'
    #[arg(long, value_name = "SOCK")]
    pub control: Option<PathBuf>,
    /// Permissions of the sockets, octal [default: 0600]
    #[arg(long, value_name = "MODE", value_parser = socket_mode)]
    pub socket_mode: Option<u32>,
    /// Group of the sockets, by name or number [default: this process's]
    #[arg(long, value_name = "GROUP")]
    pub socket_group: Option<String>,
}

fn format() -> impl TypedValueParser<Value = ImageFormat> {
    PossibleValuesParser::new(["raw", "qcow2"]).map(|word| match word.as_str() {
        "raw" => ImageFormat::Raw,
        _ => ImageFormat::Qcow2,
    })
}

fn socket_mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text.strip_prefix("0o").unwrap_or(text), 8) {
        Ok(mode) if mode <= 0o777 && !text.starts_with('+') => Ok(mode),
        _ => Err("permissions are an octal number up to 0777, such as 0660".into()),
    }
}

impl Disk {
    /// As they were given.
    pub fn settings(&self) -> ServeSettings {
        ServeSettings {
            console: None,
            settings: self.like.settings(),
            image: self.image.clone(),
            disk: self.disk.clone(),
            image_id: self.image_id.clone(),
            format: self.format,
            digests: self.digests.clone().zip(self.digest.clone()).map(|(list, root)| Digests { list, root }),
            streamed: None,
            size_bytes: self.size,
            overflow_dir: self.overflow_dir.clone(),
            base_model: self.base_model.clone(),
            overflow_model: self.overflow_model.clone(),
            queues: self.queues,
            vhost_user: self.vhost_user.clone(),
            nbd: self.nbd.clone(),
            control: self.control.clone(),
            socket_mode: self.socket_mode,
            socket_group: self.socket_group.clone(),
            identity: None,
        }
    }
}

/// Settings that do not go together, in the words of the options.
impl From<SettingFault> for Failure {
    fn from(fault: SettingFault) -> Failure {
        let parts = fault.why.split('`').enumerate();
        let why: String =
            parts.map(|(i, text)| if i % 2 == 1 { option_of(text) } else { text.into() }).collect();
        Failure::usage(format!("{} {why}", option_of(fault.setting)))
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
