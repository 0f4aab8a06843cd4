//! Boot sets: which chunks of an image machines of a catalog read until they are ready. Owns their records.
//!
//! Invariant: only the first boots count, so that a set does not change for ever. Sets are advice: without them each chunk comes
//! when it is needed.

use crate::error::HostError;
use crate::store::{Object, Objects, RecordKind, StoredRecord};
use serde::{Deserialize, Serialize};
use spillway_api::Name;
use spillway_registry::{BootSets as SharedSets, MOST_BOOT_CHUNKS};
use std::collections::{HashMap, HashSet};
use utoipa::ToSchema;

/// Boots that are recorded of each image and catalog.
const BOOTS: usize = 5;
/// Boots in which a chunk was read that is in the set.
const OFTEN: usize = 2;

/// The first boots of machines of a catalog on an image.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RecordedBoots {
    /// Chunks that each boot read, in the order of their first use.
    boots: Vec<Vec<u32>>,
    /// The set that came with the image from its registry.
    given: Vec<u32>,
}

impl StoredRecord for RecordedBoots {
    const PREFIX: &'static str = "boot-sets/";
    const WORD: &'static str = "boot set";
}

/// Kinds of records of this module.
pub(crate) const RECORDS: [RecordKind; 1] = [RecordKind::of::<RecordedBoots>()];

impl RecordedBoots {
    /// The set: what at least two boots read, or the only one, in the order of the first use.
    fn chunks(&self) -> Vec<u32> {
        let often = OFTEN.min(self.boots.len());
        if often == 0 {
            return self.given.clone();
        }
        let mut found: HashMap<u32, (usize, usize)> = HashMap::new();
        for boot in &self.boots {
            for (at, chunk) in boot.iter().enumerate() {
                let (count, first) = found.entry(*chunk).or_insert((0, at));
                (*count, *first) = (*count + 1, at.min(*first));
            }
        }
        let mut set: Vec<_> = found.into_iter().filter(|(_, (count, _))| *count >= often).collect();
        set.sort_unstable_by_key(|(chunk, (_, first))| (*first, *chunk));
        set.into_iter().map(|(chunk, _)| chunk).take(MOST_BOOT_CHUNKS).collect()
    }
}

/// The boot set of an image and a catalog.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BootSet {
    /// Name of the catalog.
    pub catalog: String,
    /// Its chunks, in the order of their first use.
    pub chunks: Vec<u32>,
    /// Number of boots that were recorded on this host. 0: the set came from a registry.
    pub boots: usize,
}

/// The boot sets of a host.
#[derive(Clone)]
pub struct BootSets {
    objects: Objects,
}

fn key(digest: &str, catalog: &str) -> String {
    format!("{}/{catalog}", digest.trim_start_matches("sha256:"))
}

impl BootSets {
    /// The recorded sets.
    pub fn new(objects: Objects) -> BootSets {
        BootSets { objects }
    }

    /// Whether another boot of the catalog's machines on this image is to be recorded.
    pub fn wants_more(&self, digest: &str, catalog: &Name) -> Result<bool, HostError> {
        let found = self.objects.get::<RecordedBoots>(&key(digest, catalog.as_str()))?;
        Ok(found.is_none_or(|found| found.value.boots.len() < BOOTS))
    }

    /// Records a boot. Returns the set, if others should learn of it now.
    pub fn record(
        &self,
        digest: &str,
        catalog: &Name,
        chunks: Vec<u32>,
    ) -> Result<Option<Vec<u32>>, HostError> {
        let key = key(digest, catalog.as_str());
        self.objects.change(|changes| {
            let mut found = changes.get::<RecordedBoots>(&key)?.map(|found| found.value).unwrap_or_default();
            if found.boots.len() >= BOOTS {
                return Ok(None);
            }
            found.boots.push(chunks.clone());
            changes.put(&key, &found);
            let count = found.boots.len();
            Ok((count == OFTEN || count == BOOTS).then(|| found.chunks()))
        })
    }

    /// Takes the sets that came with an image from its registry, for catalogs that have none here.
    pub fn take(&self, digest: &str, sets: &SharedSets) -> Result<(), HostError> {
        self.objects.change(|changes| {
            for (catalog, chunks) in &sets.catalogs {
                // The registry may be anybody's.
                let Ok(catalog) = catalog.parse::<Name>() else { continue };
                let key = key(digest, catalog.as_str());
                if changes.get::<RecordedBoots>(&key)?.is_none() {
                    changes.put(&key, &RecordedBoots { boots: vec![], given: chunks.clone() });
                }
            }
            Ok(())
        })
    }

    /// Takes the set of another host of the fleet, unless boots were recorded here. Returns whether that changed anything.
    pub fn take_shared(&self, digest: &str, catalog: &Name, chunks: &[u32]) -> Result<bool, HostError> {
        let key = key(digest, catalog.as_str());
        self.objects.change(|changes| {
            let found = changes.get::<RecordedBoots>(&key)?.map(|found| found.value).unwrap_or_default();
            if !found.boots.is_empty() || found.given == chunks {
                return Ok(false);
            }
            let given = chunks.iter().copied().take(MOST_BOOT_CHUNKS).collect();
            changes.put(&key, &RecordedBoots { boots: vec![], given });
            Ok(true)
        })
    }

    /// The sets of an image, by catalog.
    pub fn by_catalog(&self, digest: &str) -> Result<Vec<BootSet>, HostError> {
        let prefix = key(digest, "");
        let all = self.objects.list_below::<RecordedBoots>(&prefix)?;
        let set = |found: &Object<RecordedBoots>| BootSet {
            catalog: found.name.strip_prefix(&prefix).unwrap_or(&found.name).to_owned(),
            chunks: found.value.chunks(),
            boots: found.value.boots.len(),
        };
        Ok(all.iter().map(set).collect())
    }

    /// The chunks of all sets of an image, each once.
    pub fn of(&self, digest: &str) -> Result<Vec<u32>, HostError> {
        let mut seen = HashSet::new();
        let chunks = self.by_catalog(digest)?.into_iter().flat_map(|set| set.chunks);
        Ok(chunks.filter(|chunk| seen.insert(*chunk)).take(MOST_BOOT_CHUNKS).collect())
    }

    /// Forgets the sets of an image that the host has no longer.
    pub fn forget(&self, digest: &str) -> Result<(), HostError> {
        self.objects.change(|changes| {
            for found in changes.list_below::<RecordedBoots>(&key(digest, ""))? {
                changes.delete::<RecordedBoots>(&found.name);
            }
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{SqliteStore, Store};
    use std::sync::Arc;

    #[test]
    fn a_set_is_what_two_of_the_first_boots_read() {
        let dir = tempfile::tempdir().unwrap();
        let store: Arc<dyn Store> = Arc::new(SqliteStore::open(&dir.path().join("db")).unwrap());
        let sets = BootSets::new(Objects::new(store));
        let (desk, lab) = ("desk".parse().unwrap(), "lab".parse().unwrap());
        let mut shared = SharedSets::default();
        shared.catalogs.insert("desk".into(), vec![9, 8]);
        shared.catalogs.insert("no name".into(), vec![1]);
        sets.take("sha256:ab", &shared).unwrap();
        assert_eq!(sets.of("sha256:ab").unwrap(), [9, 8]);
        let set = |catalog: &str, chunks: &[u32], boots| BootSet {
            catalog: catalog.into(),
            chunks: chunks.to_vec(),
            boots,
        };
        assert_eq!(sets.by_catalog("sha256:ab").unwrap(), [set("desk", &[9, 8], 0)]);
        assert!(sets.of("sha256:a").unwrap().is_empty());
        let boots: [&[u32]; 6] = [&[4, 2, 7], &[2, 4, 5], &[7, 1], &[], &[3, 1], &[3, 6]];
        let known: [&[u32]; 6] = [&[4, 2, 7], &[2, 4], &[2, 4, 7], &[2, 4, 7], &[2, 4, 7, 1], &[2, 4, 7, 1]];
        for (n, (boot, known)) in boots.iter().zip(known).enumerate() {
            assert_eq!(sets.wants_more("sha256:ab", &desk).unwrap(), n < 5);
            let told = sets.record("sha256:ab", &desk, boot.to_vec()).unwrap();
            assert_eq!(told.as_deref(), (n == 1 || n == 4).then_some(known), "{n}");
            assert_eq!(sets.of("sha256:ab").unwrap(), known, "{n}");
        }
        sets.record("sha256:ab", &lab, vec![1, 70]).unwrap();
        assert_eq!(sets.of("sha256:ab").unwrap(), [2, 4, 7, 1, 70]);
        let known = [set("desk", &[2, 4, 7, 1], 5), set("lab", &[1, 70], 1)];
        assert_eq!(sets.by_catalog("sha256:ab").unwrap(), known);
        assert!(!sets.take_shared("sha256:ab", &desk, &[5]).unwrap(), "boots of this host count more");
        let (other, late) = ("sha256:cd", "late".parse().unwrap());
        assert!(sets.take_shared(other, &late, &[5, 6]).unwrap());
        assert!(!sets.take_shared(other, &late, &[5, 6]).unwrap());
        assert!(sets.take_shared(other, &late, &[6]).unwrap(), "a better one of more boots");
        assert_eq!(sets.by_catalog(other).unwrap(), [set("late", &[6], 0)]);
        sets.forget("sha256:ab").unwrap();
        assert!(sets.of("sha256:ab").unwrap().is_empty() && sets.wants_more("sha256:ab", &desk).unwrap());
    }
}
