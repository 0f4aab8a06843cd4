//! What is asked of whoever serves a disk, and what it says when it serves.

use crate::limits::Rate;
use serde::{Deserialize, Serialize};
use spillway_layout::{BaseCache, FullPolicy, ImageFormat, Mode};
use std::path::PathBuf;

/// What is asked of a disk, its exports and its control socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServeSettings {
    /// The base image. In mode `ephemeral` there is none: the same as `disk`.
    pub image: PathBuf,
    /// The disk's own file, in modes `persistent` and `ephemeral`.
    pub disk: Option<PathBuf>,
    /// Which image it is, in mode `persistent`; `None`: told by its size and time.
    pub image_id: Option<String>,
    /// Its format; `None`: told by the extensions `.raw` and `.qcow2`.
    pub format: Option<ImageFormat>,
    /// What it is compared with as it is read, if that is asked for: a raw image.
    pub digests: Option<Digests>,
    /// How it is read.
    pub base_cache: BaseCache,
    /// Size that the guest sees; `None`: the image's.
    pub size_bytes: Option<u64>,
    /// Where writes go.
    pub mode: Mode,
    /// What happens when there is no room.
    pub full: FullPolicy,
    /// Limit of the RAM tier, where the mode has one.
    pub ram_limit_bytes: u64,
    /// Limit of the overflow file, where the mode has a log.
    pub overflow_limit_bytes: u64,
    /// Where the overflow or difference file lies.
    pub overflow_dir: PathBuf,
    /// The storage model that the base image's store is to be as slow as.
    pub base_model: Option<PathBuf>,
    /// The same for the store of the overflow or difference file, or of the disk's own.
    pub overflow_model: Option<PathBuf>,
    /// Request queues offered to a VMM.
    pub queues: u16,
    /// Where a VMM connects.
    pub vhost_user: Option<PathBuf>,
    /// Where NBD clients connect.
    pub nbd: Option<PathBuf>,
    /// Where `spillway stats` and `spillway reset` connect.
    pub control: Option<PathBuf>,
    /// From how many per cent of the write cache on there is a warning.
    pub warn_at: u8,
    /// The same for critical.
    pub critical_at: u8,
    /// How much it may do in a second.
    pub rate: Rate,
    /// Rights of the sockets.
    pub socket_mode: u32,
    /// Their group, by name or number.
    pub socket_group: Option<String>,
    /// What the serial number is made of: a path that is the same at each start of the disk.
    pub identity: PathBuf,
}

/// What an image is compared with as it is read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Digests {
    /// The file of its chunks' digests, 32 bytes each.
    pub list: PathBuf,
    /// The image's digest: `sha256:` and 64 hexadecimal digits.
    pub root: String,
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
