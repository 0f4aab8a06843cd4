//! Registries: stores of images that hosts share. Owns the format of one (names of objects, manifest, index, frames,
//! signatures) and the order in which objects are written and deleted.
//!
//! Does no I/O of its own: what it does goes through [`Objects`], which an S3 store, a web server, a folder or a simulated
//! store implement. All that is read is hostile: each length has a bound, and no content is used before it was compared with
//! its digest.
//!
//! ```text
//! spillway.json                      the format; a registry begins with it
//! chunks/ab12/<64 hex>.cacnk         a chunk: one zstd frame; the name is the SHA-256 of the plain bytes
//! images/<64 hex>/image.json         manifest of an image; the folder's name is the image's digest
//! images/<64 hex>/image.caibx        index: the digest of each chunk
//! images/<64 hex>/NAME@V.minisig     signature of the manifest for this name and version
//! images/<64 hex>/boot.json          chunks that machines read until they are ready; advice, and may be missing
//! names/NAME/V                       which image a version is; written once
//! uploads/<uuid>.caibx               intent of a push: index of an image whose chunks are being sent
//! gc/<seconds>-<uuid>.json           candidates that a pass of the garbage collection found
//! gc/<uuid>.deleting                 candidates that a pass is deleting now
//! ```
//!
//! Chunks and index are those of casync and desync: both can rebuild an image without Spillway.

mod boot;
mod chunk;
mod collect;
pub mod download;
mod error;
mod index;
pub mod job;
mod keys;
mod manifest;
mod objects;
mod probe;
mod push;
mod resolve;
pub mod serve;
mod signature;

pub use boot::{BootSets, MOST_BOOT_CHUNKS, boot_sets, put_boot_set};
pub use chunk::{MOST_FRAME_BYTES, compress, open_frame};
pub use collect::{CollectOrder, CollectReport, collect};
pub use error::{RegistryError, RegistryErrorKind};
pub use index::Index;
pub use keys::{chunk_key, is_name, name_key};
pub use manifest::Manifest;
pub use objects::{ListedObject, Objects};
pub use probe::{ProbeReport, check_format, found, is_registry, probe};
pub use push::{ChunkSource, PushOrder, PushReport, push};
pub use resolve::{RemoteImage, fetch_frame, index_of, resolve, versions};
pub use signature::{PublicKey, trusted_comment};
pub use spillway_image::digests::root_of;
