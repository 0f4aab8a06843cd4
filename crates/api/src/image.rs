//! Images and their versions.

use crate::Name;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ObjectBuilder, Schema, Type};
use utoipa::{PartialSchema, ToSchema};

/// A named image: its versions share the name, and one of them is published.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Image {
    /// Name of the image, unique on its host.
    pub name: Name,
    /// Version for requests that name none. None until the first import has ended.
    pub published: Option<u32>,
    /// Tags of the image: each names one of its versions.
    pub tags: BTreeMap<Name, u32>,
    /// Highest number that any version has had.
    pub newest: u32,
    /// When the first import began.
    #[schema(value_type = String, format = DateTime)]
    pub created: Timestamp,
}

/// An image with its versions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageDetails {
    /// The image and its tags.
    pub image: Image,
    /// Versions of the image, the oldest first.
    pub versions: Vec<ImageVersion>,
    /// What is on the host of the versions that are streamed, the oldest first; empty if that cannot be found out now.
    #[serde(default)]
    pub cached: Vec<CachedVersion>,
}

/// What is on the host of a version that is streamed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CachedVersion {
    /// Number of the version that is streamed.
    pub version: u32,
    /// Which chunks are brought before a disk needs them: the most of what the version has and of what catalogs ask for whose
    /// machines use it.
    pub residency: Residency,
    /// Number of chunks that the version has.
    pub chunks: u64,
    /// Number of chunks that are on the host, or are zeroes.
    pub present_chunks: u64,
    /// Bytes that they take in the cache.
    pub present_bytes: u64,
    /// Number of chunks of its boot sets: those that machines read until they are ready.
    pub boot_chunks: u64,
    /// Bytes that these chunks have in the image.
    #[serde(default)]
    pub boot_bytes: u64,
    /// Boot sets of the version, one for each catalog, by the names of the catalogs.
    #[serde(default)]
    pub boot_sets: Vec<CachedBootSet>,
    /// Number of chunks that its residency asks for and that are not there yet.
    pub unfilled_chunks: u64,
    /// Whether the version is complete: all chunks were compared and written to the medium, and the registry is not needed.
    pub is_whole: bool,
}

/// Chunks that machines of a catalog read of a version until they are ready.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CachedBootSet {
    /// Name of the catalog of those machines.
    pub catalog: String,
    /// Number of chunks of the boot set.
    pub chunks: u64,
    /// Bytes that the chunks of the boot set have in the image.
    pub bytes: u64,
    /// Number of boots that were recorded on this host; 0: the boot set came from the registry.
    pub boots: u64,
}

/// An immutable state of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageVersion {
    /// Name of the image that the version belongs to.
    pub image: Name,
    /// Number of the version, counted from 1.
    pub version: u32,
    /// State of the version, which says whether it can be used.
    pub state: VersionState,
    /// Where the content of the version came from.
    pub origin: Origin,
    /// Name of the store that contains the version.
    pub store: Name,
    /// Size of the disk, in bytes; 0 until it is known.
    pub size_bytes: u64,
    /// Space that the version uses in its store, including extents that are shared by reflink, in bytes; 0 until it is
    /// known.
    pub stored_bytes: u64,
    /// Digest of the list of the chunks' digests, `sha256:` and 64 hexadecimal digits.
    pub digest: Option<String>,
    /// For a version that is streamed from its registry: which of its chunks are brought before a disk needs them, at least.
    /// None: the version is not streamed, but a file in its store.
    #[serde(default)]
    pub residency: Option<Residency>,
    /// Notes about the import that its owner may not expect, such as another size.
    #[serde(default)]
    pub notes: Vec<String>,
    /// Time at which the import or commit of the version began.
    #[schema(value_type = String, format = DateTime)]
    pub created: Timestamp,
}

/// Which chunks of a streamed version are brought to the host before a disk needs them, from none to all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Residency {
    /// None: each chunk comes when a disk reads it for the first time.
    Lazy,
    /// Those that machines read until they are ready, as far as that was recorded. They stay in the cache.
    Boot,
    /// All, in the background at a limited rate. From then on the registry is not needed.
    Full,
}

impl Residency {
    /// The word of it.
    pub fn as_str(self) -> &'static str {
        match self {
            Residency::Lazy => "lazy",
            Residency::Boot => "boot",
            Residency::Full => "full",
        }
    }
}

/// State of an image version in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum VersionState {
    /// The content is being copied, from a file or a machine's disk.
    Importing,
    /// The version is complete and can be used.
    Ready,
    /// The version cannot be used any more: its files are being removed.
    Deleting,
}

/// Where a version came from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Origin {
    /// The version was imported from a file.
    Import {
        /// Its path on the host, or the address that it was downloaded from, without what follows a `?`.
        path: String,
        /// Format that the request named.
        format: SourceFormat,
    },
    /// The version was copied from a registry.
    Registry {
        /// Name of the registry on this host.
        registry: Name,
        /// Image in the registry, such as `debian:3`.
        image: ImageRef,
    },
    /// The version was committed from the disk of a machine.
    Commit {
        /// Name of the machine whose disk was committed.
        machine: Name,
        /// Version that the machine's disk was based on, such as `debian:3`.
        from: ImageRef,
    },
}

/// Format of a file to import. It is never guessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum SourceFormat {
    /// Raw format: the bytes of the disk.
    Raw,
    /// Format qcow2, which QEMU and clouds use.
    Qcow2,
    /// Format VMDK, which VMware products use.
    Vmdk,
    /// Format VHDX, which Hyper-V uses.
    Vhdx,
    /// Format VHD (vpc), which Virtual PC and Azure use.
    Vpc,
}

impl SourceFormat {
    /// Returns the name that qemu-img has for the format.
    pub fn as_str(self) -> &'static str {
        match self {
            SourceFormat::Raw => "raw",
            SourceFormat::Qcow2 => "qcow2",
            SourceFormat::Vmdk => "vmdk",
            SourceFormat::Vhdx => "vhdx",
            SourceFormat::Vpc => "vpc",
        }
    }
}

/// Asks for a version made from a file on the host, which the daemon must be able to read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ImageImport {
    /// Absolute path of the file to import, on the daemon's host.
    pub path: String,
    /// Format of the file; it is never guessed.
    pub format: SourceFormat,
    /// Name of the store for the version; none for the default one.
    #[serde(default)]
    pub store: Option<Name>,
}

/// Asks for a version made from a file that the daemon downloads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ImageDownload {
    /// Address of the file: `https://HOST/PATH`, `http://HOST/PATH`, or `oci://REGISTRY/REPOSITORY[:TAG][@sha256:HEX]` for the
    /// file below `disk/` in an image of an OCI registry. It has no user and password.
    pub url: String,
    /// Format of the file; it is never guessed.
    pub format: SourceFormat,
    /// SHA-256 that the file at a web server must have: 64 hexadecimal digits; none to compare nothing.
    #[serde(default)]
    pub sha256: Option<String>,
    /// Name of the store for the version; none for the default one.
    #[serde(default)]
    pub store: Option<Name>,
}

impl ImageDownload {
    /// Returns the request for a log: without what may be a secret in its address, which is not checked yet.
    pub fn without_secrets(&self) -> ImageDownload {
        let shown = self.url.split('?').next().unwrap_or_default();
        // Only a digest follows an '@' that follows no name of a user.
        let has_user = shown.split('@').skip(1).any(|part| !part.starts_with("sha256:"));
        let url = if has_user { "(secret)" } else { shown };
        ImageDownload { url: url.to_owned(), ..self.clone() }
    }
}

/// Asks for a version made from a machine's disk: the image with what the machine has written over it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ImageCommit {
    /// Name of the machine, which must be off and of mode `persistent`.
    pub machine: Name,
    /// Whether the version is published when it is ready. The first version of an image always is.
    #[serde(default)]
    pub publish: bool,
}

/// Chooses a version to be published or tagged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VersionChoice {
    /// Number of the version to choose, counted from 1.
    pub version: u32,
}

/// Reference to an image and, if a number follows, a version: `debian`, `debian:3`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ImageRef {
    /// Name of the image.
    pub name: Name,
    /// Version of the image; none for the published one.
    pub version: Option<NonZeroU32>,
}

impl FromStr for ImageRef {
    type Err = String;

    fn from_str(text: &str) -> Result<ImageRef, String> {
        let (name, version) = match text.split_once(':') {
            Some((name, version)) => (name, Some(version)),
            None => (text, None),
        };
        let plain = |v: &str| !v.is_empty() && v.bytes().all(|b| b.is_ascii_digit());
        let version = version.map(|v| {
            let number = plain(v).then(|| v.parse().ok()).flatten();
            number.ok_or_else(|| format!("'{}' is no version: they are counted from 1", v.escape_debug()))
        });
        Ok(ImageRef { name: name.parse().map_err(|e| format!("{e}"))?, version: version.transpose()? })
    }
}

impl TryFrom<String> for ImageRef {
    type Error = String;

    fn try_from(text: String) -> Result<ImageRef, String> {
        text.parse()
    }
}

impl From<ImageRef> for String {
    fn from(image: ImageRef) -> String {
        image.to_string()
    }
}

impl PartialSchema for ImageRef {
    fn schema() -> RefOr<Schema> {
        let pattern = "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(:[1-9][0-9]{0,9})?$";
        ObjectBuilder::new().schema_type(Type::String).pattern(Some(pattern)).into()
    }
}

impl ToSchema for ImageRef {}

impl fmt::Display for ImageRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.version {
            Some(version) => write!(f, "{}:{version}", self.name),
            None => write!(f, "{}", self.name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_has_no_secret_of_an_address() {
        let shown = |url: &str| {
            let download =
                ImageDownload { url: url.into(), format: SourceFormat::Raw, sha256: None, store: None };
            download.without_secrets().url
        };
        for url in ["https://host/a", "oci://host/a@sha256:12", "rubbish", ""] {
            assert_eq!(shown(url), url);
        }
        assert_eq!(shown("https://host/a?secret#x?y"), "https://host/a");
        for url in [
            "https://me:secret@host/a",
            "https:/me:secret@host",
            "me:secret@sha256:@host",
            "oci://secret@host/a@sha256:1",
        ] {
            assert_eq!(shown(url), "(secret)", "{url}");
        }
    }

    #[test]
    fn an_image_is_named_with_or_without_a_version() {
        for text in ["debian", "debian:1", "a-b:4294967295"] {
            assert_eq!(text.parse::<ImageRef>().map(|i| i.to_string()), Ok(text.to_owned()));
        }
        for text in
            ["", ":1", "debian:", "debian:0", "debian:+1", "debian:1:2", "debian:4294967296", "Debian"]
        {
            assert!(text.parse::<ImageRef>().is_err(), "{text}");
        }
    }
}
