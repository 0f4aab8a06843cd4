//! Registries: places of images that hosts share.

use crate::{ImageRef, Name, Residency};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use utoipa::ToSchema;

/// A registry: a bucket, a folder or a web server with images for many hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Registry {
    /// Name of the registry, unique on its host.
    pub name: Name,
    /// Address: `s3://BUCKET/PREFIX`, `https://HOST/PATH` (read only) or `file:///FOLDER`.
    pub url: String,
    /// For `s3`: address of the S3 service, if it is not that of AWS.
    #[serde(default)]
    pub endpoint: Option<String>,
    /// For `s3`: region of the bucket; none for `us-east-1`.
    #[serde(default)]
    pub region: Option<String>,
    /// For `s3`: absolute path of a file with credentials, as AWS's tools write it, on the daemon's host. None: requests
    /// are not signed. The content of the file is never shown or kept.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub credentials: Option<PathBuf>,
    /// Public keys of minisign. If there are any, images are only taken if one of these has signed them.
    #[serde(default)]
    pub require_signature: Vec<String>,
    /// Whether nobody else writes to the registry. Needed for S3 services without conditional writes.
    #[serde(default)]
    pub single_writer: bool,
}

/// What was found at the address of a registry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RegistryCheck {
    /// Name of the registry that was tried.
    pub registry: Name,
    /// Whether there is a registry at the address.
    pub is_registry: bool,
    /// Whether objects can be listed, which a search for the highest version and the garbage collection need.
    pub can_list: bool,
    /// Whether objects can be written and deleted.
    pub can_write: bool,
    /// Whether the registry has conditional writes (`PUT` with `If-None-Match`). Without them it needs `single_writer`, with which they
    /// are not used.
    pub can_create: bool,
    /// Versions of images in the registry, in the order of their names and numbers; empty if it cannot list.
    pub images: Vec<ImageRef>,
}

/// Asks for an image version to be copied to a registry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ImagePush {
    /// Name of the registry to copy to.
    pub registry: Name,
    /// Signature of the version's manifest by minisign (the content of the `.minisig` file), with the trusted comment that
    /// the manifest's response names.
    #[serde(default)]
    pub signature: Option<String>,
}

/// Asks for an image version to be copied from a registry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ImagePull {
    /// Name of the registry to copy from.
    pub registry: Name,
    /// Image in the registry, such as `debian:3`. Without a version it is the highest. The version has the same number
    /// on this host.
    pub image: ImageRef,
    /// Name of the store for the version; none for the default one.
    #[serde(default)]
    pub store: Option<Name>,
    /// Streams the version instead of copying it: its disks start at once, and chunks come from the registry as they are
    /// needed. Changes the residency of a version that is streamed already. None: the whole version is copied.
    #[serde(default)]
    pub residency: Option<Residency>,
}

/// The manifest of an image version, for a signature.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageManifest {
    /// Content of the manifest. The signature covers exactly these bytes.
    pub manifest: String,
    /// Trusted comment that the signature must have.
    pub trusted_comment: String,
}

/// Asks for a collection of a registry's garbage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RegistryCollection {
    /// Whether garbage is recorded, and what an earlier collection had recorded is deleted. If not, nothing is changed.
    #[serde(default)]
    pub delete: bool,
    /// Age from which an object can be garbage, in seconds; 7 days by default, at least 1 hour.
    #[serde(default)]
    pub grace_seconds: Option<u32>,
    /// Least time between the collection that records an object and the one that deletes it, in seconds; 1 day by default,
    /// at least 1 hour.
    #[serde(default)]
    pub gap_seconds: Option<u32>,
}

/// Result of a push: what was sent, and what was there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PushOutcome {
    /// Whether the registry had the version already.
    pub was_there: bool,
    /// Different chunks (of 1 MiB) of the image.
    pub chunks: u64,
    /// Of these, chunks that versions of the same name in the registry have too.
    pub shared_chunks: u64,
    /// Of these, other chunks that the registry had: of other images, or from an interrupted push.
    pub found_chunks: u64,
    /// Of these, chunks that were sent.
    pub sent_chunks: u64,
    /// Size of the sent chunks, compressed, in bytes.
    pub sent_bytes: u64,
}

/// Result of a collection of garbage.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CollectionOutcome {
    /// Image versions in the registry.
    pub versions: u64,
    /// Number of chunks in the registry.
    pub chunks: u64,
    /// Size of all chunks, compressed, in bytes.
    pub chunk_bytes: u64,
    /// Pushes that are in progress or were interrupted.
    pub pushes: u64,
    /// Chunks that no version needs, older than the grace.
    pub garbage_chunks: u64,
    /// Size of these, compressed, in bytes.
    pub garbage_bytes: u64,
    /// Images that no version needs, older than the grace.
    pub garbage_images: u64,
    /// Pushes that were interrupted longer ago than the grace.
    pub dead_pushes: u64,
    /// Of all this, what an earlier collection had recorded long enough ago: what is deleted, or would be.
    pub deletable: u64,
    /// Whether that was deleted by this collection.
    pub has_deleted: bool,
}
