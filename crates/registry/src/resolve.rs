//! Finds an image in a registry, and fetches its chunks. Owns the order of the checks: the signature before the index,
//! the index before a chunk, a chunk's digest before a byte of it.

use crate::chunk::MOST_FRAME_BYTES;
use crate::error::{RegistryError, RegistryErrorKind};
use crate::index::Index;
use crate::keys::{NAMES, chunk_key, index_key, is_name, manifest_key, name_key, name_of, signature_key};
use crate::manifest::{MOST_MANIFEST_BYTES, Manifest};
use crate::objects::Objects;
use crate::probe::check_format;
use crate::signature::{MOST_SIGNATURE_BYTES, PublicKey, verify};
use serde::{Deserialize, Serialize};
use spillway_image::digests::{ChunkDigest, root_of};

/// Largest object of a name that is read, in bytes.
const MOST_NAME_BYTES: u64 = 4096;

/// Content of `names/NAME/V`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NamedImage {
    pub digest: String,
}

impl NamedImage {
    pub(crate) fn root(bytes: &[u8], key: &str) -> Result<ChunkDigest, RegistryError> {
        let named: NamedImage = serde_json::from_slice(bytes).map_err(|e| RegistryError::damaged(key, e))?;
        let root = root_of(&named.digest);
        root.ok_or_else(|| RegistryError::damaged(key, "its digest is none of an image"))
    }
}

/// An image of a registry.
#[derive(Clone, Debug)]
pub struct RemoteImage {
    /// Version that was found.
    pub version: u32,
    /// Digest of the image.
    pub root: ChunkDigest,
    /// Its manifest.
    pub manifest: Manifest,
    /// Its chunks.
    pub index: Index,
}

/// Versions of a name, the lowest first.
pub async fn versions(objects: &impl Objects, name: &str) -> Result<Vec<u32>, RegistryError> {
    let listed = objects.list(&format!("{NAMES}/{name}")).await?;
    let mut versions: Vec<u32> = listed
        .iter()
        .filter_map(|object| name_of(&object.key))
        .filter(|(n, _)| *n == name)
        .map(|(_, v)| v)
        .collect();
    versions.sort_unstable();
    Ok(versions)
}

/// Finds an image by its name, and reads its manifest and index. Without a version it is the highest.
pub async fn resolve(
    objects: &impl Objects,
    name: &str,
    version: Option<u32>,
    keys: &[PublicKey],
) -> Result<RemoteImage, RegistryError> {
    check_format(objects).await?;
    if !is_name(name) {
        return Err(RegistryError::absent(format!("'{}' is no name of an image", name.escape_debug())));
    }
    let version = match version {
        Some(version) => version,
        None => match versions(objects, name).await {
            Ok(versions) => {
                let none = || RegistryError::absent(format!("the registry has no image '{name}'"));
                versions.last().copied().ok_or_else(none)?
            }
            Err(e) if e.kind == RegistryErrorKind::Unsupported => {
                let message = format!("{}: name a version, such as {name}:1", e.message);
                return Err(RegistryError::new(e.kind, message));
            }
            Err(e) => return Err(e),
        },
    };
    let key = name_key(name, version);
    let named = objects.get(&key, MOST_NAME_BYTES).await?;
    let named =
        named.ok_or_else(|| RegistryError::absent(format!("the registry has no {name}:{version}")))?;
    let root = NamedImage::root(&named, &key)?;
    let bytes = required(objects, &manifest_key(&root), MOST_MANIFEST_BYTES).await?;
    let signature = match keys {
        [] => None,
        _ => objects.get(&signature_key(&root, name, version), MOST_SIGNATURE_BYTES).await?,
    };
    let signature = signature.map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    verify(keys, signature.as_deref(), &bytes, (name, version, &root))?;
    let (manifest, index) = read_index(objects, &root, &bytes).await?;
    Ok(RemoteImage { version, root, manifest, index })
}

/// Reads the index of an image whose manifest is known.
async fn read_index(
    objects: &impl Objects,
    root: &ChunkDigest,
    manifest_bytes: &[u8],
) -> Result<(Manifest, Index), RegistryError> {
    let of_manifest = |why: String| RegistryError::damaged(&manifest_key(root), why);
    let manifest = Manifest::parse(manifest_bytes, root).map_err(of_manifest)?;
    let key = index_key(root);
    let bytes = required(objects, &key, manifest.index_bytes()).await?;
    let index = manifest.index(&bytes).map_err(|why| RegistryError::damaged(&key, why))?;
    // It follows from the image, to the last byte.
    if manifest_bytes != Manifest::of(&index).to_bytes() {
        return Err(of_manifest("it is not written as a push writes it".into()));
    }
    Ok((manifest, index))
}

/// Reads the index of an image by its digest.
pub async fn index_of(objects: &impl Objects, root: &ChunkDigest) -> Result<Index, RegistryError> {
    let manifest = required(objects, &manifest_key(root), MOST_MANIFEST_BYTES).await?;
    read_index(objects, root, &manifest).await.map(|(_, index)| index)
}

/// Returns an object that must be there.
pub(crate) async fn required(
    objects: &impl Objects,
    key: &str,
    most_bytes: u64,
) -> Result<Vec<u8>, RegistryError> {
    let object = objects.get(key, most_bytes).await?;
    object.ok_or_else(|| RegistryError::damaged(key, "it is missing"))
}

/// Fetches the frame of a chunk, which is not compared with anything yet: see [`crate::open_frame`].
pub async fn fetch_frame(objects: &impl Objects, digest: &ChunkDigest) -> Result<Vec<u8>, RegistryError> {
    required(objects, &chunk_key(digest), MOST_FRAME_BYTES).await
}
