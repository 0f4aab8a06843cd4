//! Collects the garbage of a registry: chunks that no image has, images that no name has, intents of pushes that died.
//! Owns what is garbage, and the order of the deletions.
//!
//! Invariants: what a name or an intent refers to is never deleted; a registry that cannot be read in whole is not touched.
//!
//! Two passes: one records candidates, a later one deletes those that are still garbage. The module `push` says how a
//! deletion and a push exclude each other. What it assumes of a store: an operation takes effect within an hour or never,
//! and its clock runs as fast as others do.

use crate::error::{RegistryError, RegistryErrorKind};
use crate::index::Index;
use crate::keys::{
    CHUNKS, GC, IMAGES, NAMES, UPLOADS, candidates_key, candidates_of, chunk_key, chunk_of, deleting_key,
    image_of, index_key, is_deleting, manifest_key, name_of,
};
use crate::objects::{ListedObject, Objects};
use crate::probe::check_format;
use crate::resolve::{NamedImage, index_of};
use futures_util::{StreamExt, TryStreamExt, stream};
use serde::{Deserialize, Serialize};
use spillway_image::MAX_DISK_BYTES;
use spillway_image::digests::{ChunkDigest, hex, unhex};
use std::collections::{BTreeSet, HashSet};

const WIDTH: usize = 16;
/// Most candidates of each kind in one pass; the rest is for the next.
const MOST_CANDIDATES: usize = 100_000;
/// Largest list of candidates that is read, in bytes.
const MOST_LIST_BYTES: u64 = 32 << 20;
/// Keys of one deletion, as S3 has it at most.
const BATCH: usize = 1000;
/// How long one pass deletes at most, in seconds.
const DELETING_SECONDS: i64 = 6 * 3600;
/// Age from which a mark of a deletion is one of a pass that was interrupted, in seconds.
const INTERRUPTED_SECONDS: i64 = 48 * 3600;
const MOST_NAME_BYTES: u64 = 4096;

/// How garbage is collected.
pub struct CollectOrder<'a, Clock: Fn() -> i64> {
    /// Seconds since 1970, by a clock that is near the store's.
    pub clock: Clock,
    /// Age from which an object can be garbage, in seconds.
    pub grace_seconds: i64,
    /// Least time between the pass that records a candidate and the one that deletes it, in seconds.
    pub gap_seconds: i64,
    /// Whether candidates are recorded and deleted; if not, it is only said what would be.
    pub deletes: bool,
    /// Unique word for this pass.
    pub id: &'a str,
}

/// What a pass found and did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CollectReport {
    /// Names with a version.
    pub names: u64,
    /// Images.
    pub images: u64,
    /// Chunks.
    pub chunks: u64,
    /// Size of all chunks, compressed, in bytes.
    pub chunk_bytes: u64,
    /// Pushes in progress, or interrupted.
    pub pushes: u64,
    /// Chunks that are garbage.
    pub garbage_chunks: u64,
    /// Size of these, compressed, in bytes.
    pub garbage_bytes: u64,
    /// Images that no name has.
    pub garbage_images: u64,
    /// Pushes that died.
    pub dead_pushes: u64,
    /// Objects that this pass deleted, or could delete: garbage that an earlier pass had recorded.
    pub deletable: u64,
    /// Whether these were deleted.
    pub has_deleted: bool,
}

/// Candidates of a pass, and what a deletion is about to take.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Doomed {
    pub chunks: BTreeSet<ChunkDigest>,
    pub images: BTreeSet<ChunkDigest>,
    pub intents: BTreeSet<String>,
}

/// The same as an object.
#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct DoomedObject {
    chunks: Vec<String>,
    images: Vec<String>,
    intents: Vec<String>,
}

impl Doomed {
    fn is_empty(&self) -> bool {
        self.chunks.is_empty() && self.images.is_empty() && self.intents.is_empty()
    }

    fn len(&self) -> usize {
        self.chunks.len() + self.images.len() + self.intents.len()
    }

    fn to_bytes(&self) -> Vec<u8> {
        let texts = |digests: &BTreeSet<ChunkDigest>| digests.iter().map(|digest| hex(digest)).collect();
        let object = DoomedObject {
            chunks: texts(&self.chunks),
            images: texts(&self.images),
            intents: self.intents.iter().cloned().collect(),
        };
        serde_json::to_vec(&object).expect("it has only texts")
    }

    /// Reads a list; `None` if there is none of this key.
    pub(crate) async fn read(objects: &impl Objects, key: &str) -> Result<Option<Doomed>, RegistryError> {
        let Some(bytes) = objects.get(key, MOST_LIST_BYTES).await? else { return Ok(None) };
        let object: DoomedObject =
            serde_json::from_slice(&bytes).map_err(|e| RegistryError::damaged(key, format!("{e}")))?;
        let digests = |texts: Vec<String>| texts.iter().map(|text| unhex(text)).collect::<Option<_>>();
        let parsed = (digests(object.chunks), digests(object.images));
        let (Some(chunks), Some(images)) = parsed else {
            return Err(RegistryError::damaged(key, "it lists something that is no digest"));
        };
        Ok(Some(Doomed { chunks, images, intents: object.intents.into_iter().collect() }))
    }

    /// What both have.
    fn both(&self, other: &Doomed) -> Doomed {
        let common = |a: &BTreeSet<ChunkDigest>, b| a.intersection(b).copied().collect();
        Doomed {
            chunks: common(&self.chunks, &other.chunks),
            images: common(&self.images, &other.images),
            intents: self.intents.intersection(&other.intents).cloned().collect(),
        }
    }

    fn add(&mut self, other: Doomed) {
        self.chunks.extend(other.chunks);
        self.images.extend(other.images);
        self.intents.extend(other.intents);
    }

    fn shorten(mut self) -> Doomed {
        self.chunks = self.chunks.into_iter().take(MOST_CANDIDATES).collect();
        self.images = self.images.into_iter().take(MOST_CANDIDATES).collect();
        self.intents = self.intents.into_iter().take(MOST_CANDIDATES).collect();
        self
    }
}

/// What names, images and intents refer to.
struct References {
    chunks: HashSet<ChunkDigest>,
    images: HashSet<ChunkDigest>,
    names: u64,
    /// Objects of all images.
    image_objects: Vec<ListedObject>,
    intents: Vec<ListedObject>,
}

impl References {
    /// Reads all of them. The intents come first: a push writes its name before it deletes its intent.
    async fn read(objects: &impl Objects) -> Result<References, RegistryError> {
        let intents = objects.list(UPLOADS).await?;
        let uploads = stream::iter(&intents).map(|listed| intent_index(objects, listed)).buffered(WIDTH);
        let uploads: Vec<Option<Index>> = uploads.try_collect().await?;
        let listed = objects.list(NAMES).await?;
        let names = stream::iter(&listed).map(|name| named_root(objects, &name.key)).buffered(WIDTH);
        let named: Vec<Option<ChunkDigest>> = names.try_collect().await?;
        let image_objects = objects.list(IMAGES).await?;
        let roots: BTreeSet<ChunkDigest> =
            image_objects.iter().filter_map(|object| image_of(&object.key)).collect();
        let mut images: HashSet<ChunkDigest> = named.iter().flatten().copied().collect();
        let indexes = stream::iter(&roots)
            .map(|root| image_index(objects, root, images.contains(root)))
            .buffered(WIDTH);
        let indexes: Vec<Option<Index>> = indexes.try_collect().await?;
        let missing = images.iter().find(|root| !roots.contains(*root));
        if let Some(root) = missing {
            return Err(RegistryError::damaged(&manifest_key(root), "a name needs it, and it is missing"));
        }
        images.extend(uploads.iter().flatten().map(Index::root));
        let all = uploads.into_iter().chain(indexes).flatten();
        let chunks = all.flat_map(|index| index.digests).collect();
        Ok(References { chunks, images, names: listed.len() as u64, image_objects, intents })
    }
}

/// The index of an intent; `None` if its push has ended meanwhile.
async fn intent_index(objects: &impl Objects, listed: &ListedObject) -> Result<Option<Index>, RegistryError> {
    let most = Index::file_bytes(MAX_DISK_BYTES, spillway_image::digests::CHUNK_BYTES);
    let Some(bytes) = objects.get(&listed.key, most).await? else { return Ok(None) };
    let index = Index::parse(&bytes).map_err(|why| RegistryError::damaged(&listed.key, why))?;
    Ok(Some(index))
}

/// The image of a name; `None` if the name was deleted meanwhile.
async fn named_root(objects: &impl Objects, key: &str) -> Result<Option<ChunkDigest>, RegistryError> {
    if name_of(key).is_none() {
        return Err(RegistryError::damaged(key, "it is no name of an image with a version"));
    }
    let Some(bytes) = objects.get(key, MOST_NAME_BYTES).await? else { return Ok(None) };
    NamedImage::root(&bytes, key).map(Some)
}

/// The index of an image. One that no name has may be half made or half deleted.
async fn image_index(
    objects: &impl Objects,
    root: &ChunkDigest,
    is_named: bool,
) -> Result<Option<Index>, RegistryError> {
    if is_named {
        return index_of(objects, root).await.map(Some);
    }
    let key = index_key(root);
    let most = Index::file_bytes(MAX_DISK_BYTES, spillway_image::digests::CHUNK_BYTES);
    let Some(bytes) = objects.get(&key, most).await? else { return Ok(None) };
    Index::parse(&bytes).map(Some).map_err(|why| RegistryError::damaged(&key, why))
}

/// Finds what is garbage now.
async fn find(
    objects: &impl Objects,
    grace_seconds: i64,
    now_seconds: i64,
) -> Result<(Doomed, CollectReport), RegistryError> {
    let references = References::read(objects).await?;
    let chunks = objects.list(CHUNKS).await?;
    let is_old = |object: &ListedObject| object.modified_seconds < now_seconds - grace_seconds;
    let mut garbage = Doomed::default();
    let mut report = CollectReport {
        names: references.names,
        chunks: chunks.len() as u64,
        chunk_bytes: chunks.iter().map(|chunk| chunk.size_bytes).sum(),
        pushes: references.intents.len() as u64,
        ..CollectReport::default()
    };
    for object in &chunks {
        let Some(digest) = chunk_of(&object.key) else {
            return Err(RegistryError::damaged(&object.key, "it is no chunk: who put it there?"));
        };
        if is_old(object) && !references.chunks.contains(&digest) {
            report.garbage_bytes += object.size_bytes;
            garbage.chunks.insert(digest);
        }
    }
    let mut images = BTreeSet::new();
    let mut young = HashSet::new();
    for object in &references.image_objects {
        let root = image_of(&object.key);
        let root = root.ok_or_else(|| RegistryError::damaged(&object.key, "it belongs to no image"))?;
        images.insert(root);
        if !is_old(object) {
            young.insert(root);
        }
    }
    report.images = images.len() as u64;
    let is_garbage = |root: &ChunkDigest| !references.images.contains(root) && !young.contains(root);
    garbage.images = images.into_iter().filter(is_garbage).collect();
    let dead = references.intents.iter().filter(|object| is_old(object));
    garbage.intents = dead.map(|object| object.key.clone()).collect();
    report.garbage_chunks = garbage.chunks.len() as u64;
    report.garbage_images = garbage.images.len() as u64;
    report.dead_pushes = garbage.intents.len() as u64;
    Ok((garbage.shorten(), report))
}

/// Makes one pass.
pub async fn collect<Clock: Fn() -> i64>(
    objects: &impl Objects,
    order: &CollectOrder<'_, Clock>,
) -> Result<CollectReport, RegistryError> {
    check_format(objects).await?;
    let begun = (order.clock)();
    let (garbage, mut report) = find(objects, order.grace_seconds, begun).await?;
    let lists = objects.list(GC).await?;
    let mut recorded = Doomed::default();
    let mut used = Vec::new();
    for listed in &lists {
        let Some(recorded_seconds) = candidates_of(&listed.key) else { continue };
        // By both clocks: the store's is not the host's.
        if recorded_seconds.max(listed.modified_seconds) <= begun - order.gap_seconds {
            recorded.add(Doomed::read(objects, &listed.key).await?.unwrap_or_default());
            used.push(listed.key.clone());
        }
    }
    let doomed = recorded.both(&garbage);
    report.deletable = doomed.len() as u64;
    if !order.deletes {
        return Ok(report);
    }
    let interrupted = lists
        .iter()
        .filter(|listed| is_deleting(&listed.key) && listed.modified_seconds < begun - INTERRUPTED_SECONDS);
    let interrupted: Vec<String> = interrupted.map(|listed| listed.key.clone()).collect();
    if !interrupted.is_empty() {
        objects.delete(interrupted).await?;
    }
    if !doomed.is_empty() {
        delete(objects, order, &doomed).await?;
        report.has_deleted = true;
    }
    let rest = Doomed {
        chunks: garbage.chunks.difference(&doomed.chunks).copied().collect(),
        images: garbage.images.difference(&doomed.images).copied().collect(),
        intents: garbage.intents.difference(&doomed.intents).cloned().collect(),
    };
    if !rest.is_empty() {
        objects.put(&candidates_key(begun, order.id), rest.to_bytes()).await?;
    }
    if !used.is_empty() {
        objects.delete(used).await?;
    }
    Ok(report)
}

/// Deletes what is still garbage, while pushes can see that it is being deleted.
async fn delete<Clock: Fn() -> i64>(
    objects: &impl Objects,
    order: &CollectOrder<'_, Clock>,
    doomed: &Doomed,
) -> Result<(), RegistryError> {
    // First, and before the intents are read below: a push that finds its intent at its end was never ignored.
    if !doomed.intents.is_empty() {
        objects.delete(doomed.intents.iter().cloned().collect()).await?;
    }
    let mark = deleting_key(order.id);
    let marked_seconds = (order.clock)();
    objects.put(&mark, doomed.to_bytes()).await?;
    let deleted = async {
        let now = References::read(objects).await?;
        let roots = without(&doomed.images, &now.images);
        let of_images = now.image_objects.iter().map(|object| object.key.clone());
        let images = of_images.filter(|key| image_of(key).is_some_and(|root| roots.contains(&root)));
        let chunks = without(&doomed.chunks, &now.chunks);
        let keys: Vec<String> = images.chain(chunks.iter().map(chunk_key)).collect();
        for batch in keys.chunks(BATCH) {
            // Pushes stop believing in the mark some time after this.
            if (order.clock)() > marked_seconds + DELETING_SECONDS {
                let message = "the deletion took too long and was broken off: the next pass goes on";
                return Err(RegistryError::new(RegistryErrorKind::Unreachable, message));
            }
            objects.delete(batch.to_vec()).await?;
        }
        Ok(())
    };
    // Without an answer the mark stays until it is too old: the store may still carry out the deletion.
    let deleted = deleted.await;
    if !deleted.as_ref().is_err_and(|e| e.kind == RegistryErrorKind::Unreachable) {
        objects.delete(vec![mark]).await?;
    }
    deleted
}

/// What is in one set and not in the other.
fn without(all: &BTreeSet<ChunkDigest>, other: &HashSet<ChunkDigest>) -> BTreeSet<ChunkDigest> {
    all.iter().filter(|digest| !other.contains(*digest)).copied().collect()
}
