//! Pushes an image to a registry. Owns the order of the writes.
//!
//! Invariant: a name exists only when all that it names does, and no garbage collection can take any of it. An interrupted
//! push leaves no name; the next one sends what is missing.
//!
//! A push and a deletion of garbage exclude each other as Dekker's algorithm does: the push writes its intent and then reads
//! the marks of deletions, a deletion writes its mark and then reads the intents. One of them sees the other. An intent that
//! a collection took for dead, because the push stood still for days, is found missing at the end, and the push begins
//! again.

use crate::collect::Doomed;
use crate::error::{RegistryError, RegistryErrorKind};
use crate::index::Index;
use crate::keys::{GC, chunk_key, index_key, intent_key, is_deleting, manifest_key, name_key, signature_key};
use crate::manifest::Manifest;
use crate::objects::Objects;
use crate::probe::check_format;
use crate::resolve::{NamedImage, index_of, versions};
use futures_util::{StreamExt, TryStreamExt, stream};
use spillway_image::digests::ChunkDigest;
use std::collections::{HashMap, HashSet};
use std::future::Future;

/// Requests at a time.
const WIDTH: usize = 16;
/// How long a push waits for a deletion of its chunks, in seconds, and how often it looks.
const DELETION_SECONDS: u64 = 600;
const LOOK_SECONDS: u64 = 2;
/// Most times that a push begins again because it stood still for days.
const MOST_ATTEMPTS: usize = 5;
const MOST_NAME_BYTES: u64 = 4096;

/// Where the chunks of a push come from.
pub trait ChunkSource: Sync {
    /// The frame of a chunk, whose content was compared with its digest.
    fn frame(&self, chunk: usize) -> impl Future<Output = Result<Vec<u8>, RegistryError>> + Send;

    /// So many more bytes of the image are in the registry.
    fn settled(&self, bytes: u64);
}

/// What is pushed.
pub struct PushOrder<'a> {
    /// Name of the image in the registry.
    pub name: &'a str,
    /// Version of the image in the registry.
    pub version: u32,
    /// Chunks of the image.
    pub index: &'a Index,
    /// Signature for this name and version, if there is one.
    pub signature: Option<&'a str>,
    /// Unique word for this push.
    pub id: &'a str,
}

/// What a push did.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct PushReport {
    /// Whether the version was in the registry already.
    pub was_there: bool,
    /// Different chunks of the image.
    pub chunks: u64,
    /// Of these, chunks of earlier versions of the same name.
    pub shared_chunks: u64,
    /// Of these, other chunks that the registry had: of other images, or sent by a push that was interrupted.
    pub found_chunks: u64,
    /// Chunks that were sent.
    pub sent_chunks: u64,
    /// Size of what was sent, compressed, in bytes.
    pub sent_bytes: u64,
}

/// Pushes an image. A version that the registry has already is not an error if it is the same image; what is missing of it is
/// sent.
pub async fn push(
    objects: &impl Objects,
    source: &impl ChunkSource,
    order: &PushOrder<'_>,
) -> Result<PushReport, RegistryError> {
    // An empty place may be one that is not mounted: it is not made a registry.
    check_format(objects).await?;
    let root = order.index.root();
    let was_there = is_named(objects, order, &root).await?;
    let mut report = PushReport::default();
    for attempt in 0..MOST_ATTEMPTS {
        let intent = intent_key(&format!("{}-{attempt}", order.id));
        objects.put(&intent, order.index.to_bytes()).await?;
        let pushed = push_with_intent(objects, source, order, &intent, was_there, &mut report).await;
        // Without an answer the intent stays until it is too old: the store may still make the name.
        if pushed.as_ref().is_err_and(|e| e.kind == RegistryErrorKind::Unreachable) {
            return pushed.map(|()| report);
        }
        // Whoever read the intents before this one goes away reads the name afterwards.
        let was_alive = objects.exists(&intent).await?;
        if pushed.is_err() || was_alive {
            objects.delete(vec![intent]).await?;
            return pushed.map(|()| PushReport { was_there, ..report });
        }
    }
    let message =
        "collections of garbage took this push for dead several times: is the clock of the registry right?";
    Err(RegistryError::new(RegistryErrorKind::Busy, message))
}

/// Whether the name is there. It is an error if it names another image.
async fn is_named(
    objects: &impl Objects,
    order: &PushOrder<'_>,
    root: &ChunkDigest,
) -> Result<bool, RegistryError> {
    let key = name_key(order.name, order.version);
    match objects.get(&key, MOST_NAME_BYTES).await? {
        None => Ok(false),
        Some(bytes) if NamedImage::root(&bytes, &key)? == *root => Ok(true),
        Some(_) => {
            let message = format!(
                "the registry has a {}:{} with another digest: push it as another version or name",
                order.name, order.version
            );
            Err(RegistryError::new(RegistryErrorKind::Exists, message))
        }
    }
}

async fn push_with_intent(
    objects: &impl Objects,
    source: &impl ChunkSource,
    order: &PushOrder<'_>,
    intent: &str,
    was_there: bool,
    report: &mut PushReport,
) -> Result<(), RegistryError> {
    let (index, root) = (order.index, order.index.root());
    wait_for_deletions(objects, index, &root).await?;
    // Who pushes a version again may do so to repair it: then each chunk is looked for.
    let earlier = if was_there { HashSet::new() } else { chunks_of_others(objects, order).await? };
    send_chunks(objects, source, order, &earlier, report).await?;
    let manifest = Manifest::of(index);
    write_once(objects, &index_key(&root), index.to_bytes()).await?;
    write_once(objects, &manifest_key(&root), manifest.to_bytes()).await?;
    if let Some(signature) = order.signature {
        let key = signature_key(&root, order.name, order.version);
        objects.put(&key, signature.as_bytes().to_vec()).await?;
    }
    if !objects.exists(intent).await? {
        return Ok(());
    }
    let named = serde_json::to_vec(&NamedImage { digest: manifest.digest }).expect("it is a text");
    if objects.create(&name_key(order.name, order.version), named).await?
        || is_named(objects, order, &root).await?
    {
        return Ok(());
    }
    let message = "somebody has made the name and deleted it again: push again";
    Err(RegistryError::new(RegistryErrorKind::Busy, message))
}

/// Waits until no deletion can take what this push needs.
async fn wait_for_deletions(
    objects: &impl Objects,
    index: &Index,
    root: &ChunkDigest,
) -> Result<(), RegistryError> {
    let mine: HashSet<&ChunkDigest> = index.digests.iter().collect();
    let mut waited = 0;
    loop {
        let mut hinders = None;
        for listed in objects.list(GC).await?.into_iter().filter(|object| is_deleting(&object.key)) {
            // One that is gone by now has ended.
            let doomed = Doomed::read(objects, &listed.key).await?.unwrap_or_default();
            if doomed.images.contains(root) || doomed.chunks.iter().any(|chunk| mine.contains(chunk)) {
                hinders = Some(listed.key);
            }
        }
        let Some(key) = hinders else { return Ok(()) };
        if waited >= DELETION_SECONDS {
            let message = format!(
                "a collection of garbage is deleting chunks of this image ({key}): push again when it has ended. If it was \
                 interrupted, the next 'registry gc --delete' ends it after two days"
            );
            return Err(RegistryError::new(RegistryErrorKind::Busy, message));
        }
        objects.pause(LOOK_SECONDS).await;
        waited += LOOK_SECONDS;
    }
}

/// The chunks of the other versions with this name. To be called after the intent was written: what these versions have stays.
async fn chunks_of_others(
    objects: &impl Objects,
    order: &PushOrder<'_>,
) -> Result<HashSet<ChunkDigest>, RegistryError> {
    let mut earlier: HashSet<ChunkDigest> = HashSet::new();
    let others = versions(objects, order.name).await?.into_iter().filter(|version| *version != order.version);
    for version in others {
        let key = name_key(order.name, version);
        // Deleted since it was listed.
        let Some(named) = objects.get(&key, MOST_NAME_BYTES).await? else { continue };
        let index = match NamedImage::root(&named, &key) {
            Ok(root) => index_of(objects, &root).await,
            Err(e) => Err(e),
        };
        match index {
            Ok(index) => earlier.extend(index.digests),
            // It is not the version that is pushed: each chunk is looked for.
            Err(e) if e.kind == RegistryErrorKind::Damaged => {}
            Err(e) => return Err(e),
        }
    }
    Ok(earlier)
}

/// Sends the chunks that are missing, and not among the earlier ones.
async fn send_chunks(
    objects: &impl Objects,
    source: &impl ChunkSource,
    order: &PushOrder<'_>,
    earlier: &HashSet<ChunkDigest>,
    report: &mut PushReport,
) -> Result<(), RegistryError> {
    let index = order.index;
    // The first place of each, and how many bytes of the image are such chunks.
    let mut different: HashMap<ChunkDigest, (usize, u64)> = HashMap::new();
    for (chunk, digest) in index.digests.iter().enumerate() {
        different.entry(*digest).or_insert((chunk, 0)).1 += index.len_of(chunk);
    }
    *report = PushReport { chunks: different.len() as u64, ..PushReport::default() };
    let mut missing: Vec<(ChunkDigest, usize, u64)> = Vec::new();
    for (digest, (chunk, bytes)) in different {
        match earlier.contains(&digest) {
            true => {
                report.shared_chunks += 1;
                source.settled(bytes);
            }
            false => missing.push((digest, chunk, bytes)),
        }
    }
    // In the order of the disk, which is how it is read fastest.
    missing.sort_unstable_by_key(|(_, chunk, _)| *chunk);
    let sends = missing.into_iter().map(|(digest, chunk, bytes)| async move {
        let key = chunk_key(&digest);
        let sent = match objects.exists(&key).await? {
            true => None,
            false => {
                let frame = source.frame(chunk).await?;
                let frame_bytes = frame.len() as u64;
                // Another push may send the same chunk; its frame may differ, its content cannot.
                objects.create(&key, frame).await?.then_some(frame_bytes)
            }
        };
        source.settled(bytes);
        Ok::<_, RegistryError>(sent)
    });
    let mut sends = stream::iter(sends).buffer_unordered(WIDTH);
    while let Some(sent) = sends.try_next().await? {
        report.found_chunks += u64::from(sent.is_none());
        report.sent_chunks += u64::from(sent.is_some());
        report.sent_bytes += sent.unwrap_or(0);
    }
    Ok(())
}

/// Writes an object whose content follows from its key; a damaged one is replaced.
async fn write_once(objects: &impl Objects, key: &str, content: Vec<u8>) -> Result<(), RegistryError> {
    if objects.create(key, content.clone()).await? {
        return Ok(());
    }
    let there = objects.get(key, content.len() as u64).await;
    if there.is_ok_and(|there| there.as_ref() == Some(&content)) {
        return Ok(());
    }
    objects.put(key, content).await
}
