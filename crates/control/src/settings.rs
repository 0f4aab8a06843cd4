//! What is asked of whoever serves a disk, and what it says when it serves. Owns which settings go together; what a disk is
//! like are [`DiskSettings`].
//!
//! Invariant: a setting that would have no effect is refused.

use crate::console::ConsoleSockets;
use crate::disk_settings::{DiskSettings, SettingFault};
use crate::error::{ErrorKind, SupervisorError};
use serde::{Deserialize, Serialize};
use spillway_layout::{ImageFormat, Mode};
use std::path::{Path, PathBuf};

const OVERFLOW_DIR_DEFAULT: &str = "/var/tmp";
/// Queues offered when nothing is said: QEMU asks for one per vCPU.
const QUEUES_DEFAULT: u16 = 16;
const SOCKET_MODE_DEFAULT: u32 = 0o600;

/// A disk to be served: what it is like, where it is, who may come. What is left out has its usual value.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ServeSettings {
    /// What it is like.
    #[serde(flatten)]
    pub settings: DiskSettings,
    /// The base image, in all modes but `ephemeral`.
    pub image: Option<PathBuf>,
    /// The disk's own file, in modes `persistent` and `ephemeral`.
    pub disk: Option<PathBuf>,
    /// Which image it is, in mode `persistent`. By default told by its size and time.
    pub image_id: Option<String>,
    /// Format of the image. By default told by the extensions `.raw` and `.qcow2`.
    pub format: Option<ImageFormat>,
    /// What the image is compared with as it is read, if that is asked for: a raw image.
    pub digests: Option<Digests>,
    /// Where the image is opened, if it is streamed. `image` is then the path of its file in the cache.
    pub streamed: Option<Streamed>,
    /// Size that the guest sees. By default the image's.
    pub size_bytes: Option<u64>,
    /// Where the overflow or difference file lies. By default `/var/tmp`.
    pub overflow_dir: Option<PathBuf>,
    /// File of the storage model that slows down reads of the base image. By default none.
    pub base_model: Option<PathBuf>,
    /// File of the storage model that slows down the overflow or difference file, or the disk's own. By default none.
    pub overflow_model: Option<PathBuf>,
    /// Request queues offered to a VMM. By default 16.
    pub queues: Option<u16>,
    /// Where a VMM connects.
    pub vhost_user: Option<PathBuf>,
    /// Where NBD clients connect.
    pub nbd: Option<PathBuf>,
    /// Where `spillway stats` and `spillway reset` connect.
    pub control: Option<PathBuf>,
    /// Sockets of the console hub, if there is one. Their rights are always 0600.
    pub console: Option<ConsoleSockets>,
    /// Rights of the sockets. By default 0600.
    pub socket_mode: Option<u32>,
    /// Group of the sockets, by name or number. By default the server's own.
    pub socket_group: Option<String>,
    /// What the serial number is made of: a path that is the same at each start of the disk, and no other's. By default one of
    /// those above.
    pub identity: Option<PathBuf>,
}

impl ServeSettings {
    /// Where writes go.
    pub fn mode(&self) -> Mode {
        self.settings.mode()
    }

    /// What is served: the image, or the copy of one.
    pub fn image(&self) -> &Path {
        self.image.as_deref().or(self.disk.as_deref()).unwrap_or(Path::new(""))
    }

    /// Where the overflow or difference file lies.
    pub fn overflow_dir(&self) -> &Path {
        self.overflow_dir.as_deref().unwrap_or(Path::new(OVERFLOW_DIR_DEFAULT))
    }

    /// Request queues offered to a VMM.
    pub fn queues(&self) -> u16 {
        self.queues.unwrap_or(QUEUES_DEFAULT)
    }

    /// Rights of the sockets.
    pub fn socket_mode(&self) -> u32 {
        self.socket_mode.unwrap_or(SOCKET_MODE_DEFAULT)
    }

    /// What is the same at each start of the disk, and no other's.
    pub fn identity(&self) -> &Path {
        // A persistent disk may be served elsewhere.
        let own = self.disk.as_deref().filter(|_| self.mode() == Mode::Persistent);
        let socket = || self.sockets().into_iter().find_map(|(_, path)| path);
        self.identity.as_deref().or(own).or_else(socket).unwrap_or(self.image())
    }

    /// The sockets that other programs connect to, by the names of their settings.
    pub fn sockets(&self) -> [(&'static str, Option<&Path>); 5] {
        let console = self.console.as_ref();
        [
            ("vhost_user", self.vhost_user.as_deref()),
            ("nbd", self.nbd.as_deref()),
            ("control", self.control.as_deref()),
            ("console.clients", console.map(|console| console.clients.as_path())),
            ("console.vmm", console.map(|console| console.vmm.as_path())),
        ]
    }

    /// Refuses settings that do not go together.
    pub fn check(&self) -> Result<(), SettingFault> {
        self.settings.check()?;
        let mode = self.mode();
        let is_ephemeral = mode == Mode::Ephemeral;
        let no_overflow = match mode.has_named_file() {
            true => "its file is that of `disk`",
            false => "it has no overflow",
        };
        for (setting, is_unused, why) in [
            (
                "overflow_dir",
                self.overflow_dir.is_some() && (mode.has_named_file() || !mode.has_file()),
                no_overflow,
            ),
            ("image", self.image.is_some() && is_ephemeral, "its disk is a full copy of one"),
            ("format", self.format.is_some() && is_ephemeral, "its disk is raw"),
            ("digests", self.digests.is_some() && is_ephemeral, "its disk is written to"),
            ("streamed", self.streamed.is_some() && is_ephemeral, "its disk is a full copy of the image"),
            ("overflow_model", self.overflow_model.is_some() && !mode.has_file(), "it has no overflow"),
            (
                "base_model",
                self.base_model.is_some() && is_ephemeral,
                "its disk is a full copy of one, whose store is that of `overflow_model`",
            ),
            ("disk", self.disk.is_some() && !mode.has_named_file(), "it has no file that is kept"),
            (
                "image_id",
                self.image_id.is_some() && mode != Mode::Persistent,
                "it knows no image of an earlier start",
            ),
        ] {
            if is_unused {
                return Err(SettingFault::of_mode(setting, mode, why));
            }
        }
        let fault = |setting, why: String| Err(SettingFault { setting, why });
        let sockets = self.sockets();
        for (i, (setting, path)) in sockets.into_iter().enumerate() {
            if let (Some(path), Some(&(other, _))) = (path, sockets[..i].iter().find(|(_, p)| *p == path)) {
                let path = path.display();
                return fault(
                    other,
                    format!("and `{setting}` are both {path}: give each a socket of its own"),
                );
            }
        }
        if self.socket_group.as_deref() == Some("") {
            return fault("socket_group", "is empty: name a group or leave it out".into());
        }
        if self.image.is_none() && !is_ephemeral {
            return fault("image", "is missing: there is nothing to serve without a base image".into());
        }
        if self.streamed.is_some() && (self.digests.is_some() || self.format == Some(ImageFormat::Qcow2)) {
            let why = "is for raw images, and its chunks are compared with their digests anyway: leave out `digests` and `format`";
            return fault("streamed", why.into());
        }
        if self.disk.is_none() && mode.has_named_file() {
            return fault("disk", format!("is missing: `mode` {mode} needs a file"));
        }
        if self.vhost_user.is_none() && self.nbd.is_none() {
            let why = "and `nbd` are missing: nobody could reach this disk without a socket for a VMM or for NBD clients";
            return fault("vhost_user", why.into());
        }
        if self.queues.is_some() && self.vhost_user.is_none() {
            return fault("queues", "is for `vhost_user`: leave it out or give both".into());
        }
        Ok(())
    }
}

impl From<SettingFault> for SupervisorError {
    fn from(fault: SettingFault) -> SupervisorError {
        SupervisorError::new(ErrorKind::Options, fault.to_string())
    }
}

/// What an image is compared with as it is read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Digests {
    /// The file of its chunks' digests, 32 bytes each.
    pub list: PathBuf,
    /// The image's digest: `sha256:` and 64 hexadecimal digits.
    pub root: String,
}

/// An image whose chunks come from registries, through `spillway-streamd`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Streamed {
    /// Socket at which that process opens images.
    pub socket: PathBuf,
    /// The image's digest: `sha256:` and 64 hexadecimal digits.
    pub digest: String,
}

/// What is served, where, by whom: what `serve --json` prints when it is ready.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "named as the options of `spillway serve`")]
pub struct Report {
    pub pid: u32,
    pub worker_pid: u32,
    pub image: String,
    pub disk: Option<String>,
    pub format: ImageFormat,
    pub mode: String,
    pub full: String,
    pub size_bytes: u64,
    pub base_bytes: u64,
    pub ram_limit_bytes: u64,
    pub overflow_limit_bytes: u64,
    pub overflow_direct: bool,
    pub serial: String,
    pub vhost_user: Option<String>,
    pub nbd: Option<String>,
    pub control: Option<String>,
}
