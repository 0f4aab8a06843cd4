//! Boot sets: the chunks of an image that machines read until they are ready, for each catalog. Owns the form of their object,
//! `images/<root>/boot.json`, which says only what is brought first: a wrong one costs time, and no more.

use crate::error::RegistryError;
use crate::keys::boot_key;
use crate::objects::Objects;
use crate::probe::check_format;
use serde::{Deserialize, Serialize};
use spillway_image::digests::ChunkDigest;
use std::collections::BTreeMap;

/// Largest object, in bytes.
const MOST_BYTES: u64 = 1 << 20;
/// Chunks of a set, and sets of an image, that are taken.
pub const MOST_BOOT_CHUNKS: usize = 8192;
const MOST_SETS: usize = 64;

/// The sets of an image, by the name of the catalog in which they were recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BootSets {
    /// Numbers of chunks, in the order of their first use.
    pub catalogs: BTreeMap<String, Vec<u32>>,
}

impl BootSets {
    /// All chunks of all sets, each once, in their order.
    pub fn chunks(&self) -> Vec<u32> {
        let mut seen = std::collections::HashSet::new();
        let all = self.catalogs.values().flatten().copied();
        all.filter(|chunk| seen.insert(*chunk)).take(MOST_BOOT_CHUNKS).collect()
    }
}

/// Reads the sets of an image. What cannot be understood is none.
pub async fn boot_sets(objects: &impl Objects, root: &ChunkDigest) -> Result<BootSets, RegistryError> {
    let bytes = objects.get(&boot_key(root), MOST_BYTES).await?;
    let mut sets: BootSets = bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
    sets.catalogs.values_mut().for_each(|chunks| chunks.truncate(MOST_BOOT_CHUNKS));
    while sets.catalogs.len() > MOST_SETS {
        sets.catalogs.pop_last();
    }
    Ok(sets)
}

/// Adds the set of a catalog to those of an image, or replaces it. Of two that are written at once, one may be lost.
pub async fn put_boot_set(
    objects: &impl Objects,
    root: &ChunkDigest,
    catalog: &str,
    chunks: Vec<u32>,
) -> Result<(), RegistryError> {
    check_format(objects).await?;
    let mut sets = boot_sets(objects, root).await?;
    sets.catalogs.insert(catalog.to_owned(), chunks);
    let bytes = serde_json::to_vec(&sets).expect("it has only numbers and texts");
    objects.put(&boot_key(root), bytes).await
}
