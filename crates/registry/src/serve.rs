//! How the daemon starts and controls the process of `spillway-streamd` that serves the chunks of streamed images. Owns the form of
//! its order and of the packets on its control socket: one JSON object each, some with descriptors.

use crate::job::Place;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::path::PathBuf;

/// Name of the socket, in the folder in which the process is started, at which disks open images.
pub const USERS: &str = "streamd.sock";
/// Name of the control socket.
pub const CONTROL: &str = "streamd.ctl";
/// Largest packet on the control socket, in bytes.
pub const MOST_CONTROL_BYTES: usize = 128 << 10;
/// Version of these forms, and of what disks are answered. Processes of another version are replaced.
pub const SERVE_VERSION: u32 = 4;
/// Most members in a list, and most bytes of one.
pub const MOST_MEMBERS: usize = 1024;
/// Longest list of members, in bytes.
pub const MOST_MEMBERS_BYTES: u64 = 1 << 20;

/// What is served, and where: the argument of the process, as JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServeOrder {
    /// Folder of the cache, which belongs to this process alone.
    pub cache: PathBuf,
    /// Most bytes of chunks in it.
    pub budget_bytes: u64,
    /// Shortest time after which a second request is sent beside one to a store that has not ended.
    pub hedge_milliseconds: u64,
    /// Rate at which whole images are brought, in bytes a second.
    pub fill_bytes_per_second: u64,
    /// Folders that are registries, which the process may read.
    pub folders: Vec<PathBuf>,
    /// The other hosts; none: the process asks only registries, and listens at no port.
    pub peers: Option<PeerOrder>,
}

/// Hosts that serve each other chunks, over TLS with certificates on both sides.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PeerOrder {
    /// Address at which the others are answered.
    pub listen: SocketAddr,
    /// Address of this host in the lists of the others, such as `https://host:9444`.
    pub name: String,
    /// Who the others are.
    pub trust: PeerTrust,
    /// File of this host's certificate chain, PEM.
    pub certificate: PathBuf,
    /// File of its key, PEM.
    pub key: PathBuf,
    /// When one of these files was changed the last time, in nanoseconds since 1970: if that differs, another process is started.
    pub files_changed_ns: u64,
    /// Most bytes that are sent to the others each second.
    pub upload_bytes_per_second: u64,
    /// Shortest time after which another source is asked beside a host that has not answered.
    pub hedge_milliseconds: u64,
}

/// Whom a host exchanges chunks with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum PeerTrust {
    /// Hosts with certificates that an authority has signed.
    Authority {
        /// File of the authority's certificates, PEM.
        file: PathBuf,
        /// Addresses of the hosts, written in the same way on each of them. This host may be among them.
        hosts: Vec<String>,
    },
    /// The hosts that the daemon names by [`ControlRequest::Members`]; nobody before.
    Members,
}

/// A host that exchanges chunks with this one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PeerMember {
    /// Address, such as `https://host:9446`, written in the same way on each host.
    pub address: String,
    /// SHA-256 of its certificate (DER), in hexadecimal digits.
    pub certificate: String,
}

/// What the daemon asks for. Each is answered by one [`ControlReply`], in order.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ControlRequest {
    /// What the process is. Answered by `Hello`.
    Hello,
    /// Serves an image from now on. With it come the list of its digests and the credentials of its place, if it has some; their
    /// path says nothing. If the image is served already, its place is the new one. Answered by `Done`.
    Serve {
        /// Digest of the image: `sha256:` and 64 hexadecimal digits.
        digest: String,
        /// Size of the image, in bytes.
        size_bytes: u64,
        /// The registry that has its chunks.
        place: Place,
        /// Which chunks are brought before a disk needs them. What was asked before no longer counts.
        fill: Fill,
        /// Whether it is only checked that there is space for these chunks.
        dry_run: bool,
    },
    /// All images have been named: what else is in the cache is removed, and chunks are kept from now on. Answered by `Done`.
    Sweep {
        /// Digests of those that could not be named, as `sha256:HEX`: what is there of them stays.
        others: Vec<String>,
    },
    /// Serves an image no longer, and removes it from the cache. Refused while a disk uses it. Answered by `Done`.
    Forget {
        /// Digest of the image.
        digest: String,
    },
    /// Names the other hosts; those that were named before and are missing now count no more. With it comes a file with a list of
    /// [`PeerMember`] as JSON. Answered by `Done`.
    Members,
    /// Answered by `Figures`.
    Figures,
    /// Answered by `Image`.
    Image {
        /// Digest of the image.
        digest: String,
    },
}

/// Chunks that are brought before a disk needs them, and stay in the cache.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fill {
    /// None.
    #[default]
    Nothing,
    /// These, in this order.
    Chunks(Vec<u32>),
    /// All, at a limited rate.
    All,
}

/// What the process answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ControlReply {
    /// What it is.
    Hello {
        /// [`SERVE_VERSION`].
        version: u32,
        /// Version of the program.
        program: String,
        /// Its order.
        order: ServeOrder,
    },
    /// It is done.
    Done,
    /// It is not done, and nothing has changed.
    Refused(String),
    /// The cache as a whole.
    Figures(CacheFigures),
    /// One image.
    Image(ImageFigures),
}

/// Figures of the cache since the process was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CacheFigures {
    /// Bytes of chunks in the cache.
    pub used_bytes: u64,
    /// Most bytes of chunks in the cache.
    pub budget_bytes: u64,
    /// Chunks that were asked for and that were in the cache. Disks read chunks of which they know that they are there without asking.
    pub cache_chunks: u64,
    /// Their bytes.
    pub cache_bytes: u64,
    /// Chunks that were copied from another image in the cache, or from another place of the same one.
    pub seed_chunks: u64,
    /// Their bytes.
    pub seed_bytes: u64,
    /// Chunks that came from registries.
    pub store_chunks: u64,
    /// Their bytes, as they are in the images.
    pub store_bytes: u64,
    /// Bytes that were received for them.
    pub received_bytes: u64,
    /// Chunks that the cache had no space for.
    pub passed_chunks: u64,
    /// Chunks that were removed to make space.
    pub evicted_chunks: u64,
    /// How often a registry lacked a chunk, or sent another content than its digest says.
    pub wrong_chunks: u64,
    /// Chunks that are being brought.
    pub flights: u64,
    /// Chunks that came from other hosts.
    pub peer_chunks: u64,
    /// Their bytes.
    pub peer_bytes: u64,
    /// Chunks that were sent to other hosts.
    pub uploaded_chunks: u64,
    /// Bytes that were sent of chunks.
    pub uploaded_bytes: u64,
    /// How often another host sent wrong bytes, after which it was left alone.
    pub wrong_peers: u64,
    /// Requests of other hosts that were refused because of the upload limit.
    pub refused_uploads: u64,
}

/// What is in the cache of an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageFigures {
    /// Chunks that the image has.
    pub chunks: u64,
    /// Chunks that are in the cache, or are zeroes.
    pub present_chunks: u64,
    /// Bytes that they take there.
    pub present_bytes: u64,
    /// Chunks that were to be brought before a disk needs them, and are not there.
    pub unfilled_chunks: u64,
    /// All chunks were compared with their digests and are on the medium.
    pub is_whole: bool,
}
