//! The disk of an image as the source of a push. Owns its files. Each chunk is compared with its digest before it is sent.

use super::{local, say};
use crate::store::RemoteStore;
use spillway_image::digests::{CHUNK_BYTES, ChunkDigest, list_bytes, of_chunk};
use spillway_registry::job::JobMessage;
use spillway_registry::{
    ChunkSource, Index, PushOrder, PushReport, RegistryError, RegistryErrorKind, compress, push,
};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes between two lines of progress.
const STEP_BYTES: u64 = 16 << 20;

/// A local image.
pub struct LocalImage {
    disk: Arc<File>,
    index: Index,
    settled_bytes: AtomicU64,
}

impl LocalImage {
    /// Opens the disk and reads the list of its digests.
    pub fn open(disk: &Path, digests: &Path, size_bytes: u64) -> Result<LocalImage, RegistryError> {
        let cannot = |e: std::io::Error| local(format!("the image cannot be read: {e}"));
        let disk = File::open(disk).map_err(cannot)?;
        let mut list = vec![0; list_bytes(size_bytes) as usize];
        File::open(digests).and_then(|file| file.read_exact_at(&mut list, 0)).map_err(cannot)?;
        let (digests, _) = list.as_chunks();
        let index = Index { size_bytes, chunk_bytes: CHUNK_BYTES, digests: digests.to_vec() };
        Ok(LocalImage { disk: Arc::new(disk), index, settled_bytes: AtomicU64::new(0) })
    }

    /// Pushes it.
    pub async fn push(
        &self,
        store: &RemoteStore,
        name: &str,
        version: u32,
        signature: Option<&str>,
        id: &str,
    ) -> Result<PushReport, RegistryError> {
        push(store, self, &PushOrder { name, version, index: &self.index, signature, id }).await
    }
}

impl ChunkSource for LocalImage {
    async fn frame(&self, chunk: usize) -> Result<Vec<u8>, RegistryError> {
        let (disk, digest, len) =
            (Arc::clone(&self.disk), self.index.digests[chunk], self.index.len_of(chunk));
        let at = chunk as u64 * self.index.chunk_bytes;
        let read = tokio::task::spawn_blocking(move || frame(&disk, at, len, &digest)).await;
        read.map_err(local)?
    }

    fn settled(&self, bytes: u64) {
        let before = self.settled_bytes.fetch_add(bytes, Ordering::Relaxed);
        let now = before + bytes;
        if before / STEP_BYTES != now / STEP_BYTES {
            say(&JobMessage::Progress(now));
        }
    }
}

fn frame(disk: &File, at: u64, len: u64, digest: &ChunkDigest) -> Result<Vec<u8>, RegistryError> {
    let mut plain = vec![0; len as usize];
    disk.read_exact_at(&mut plain, at)
        .map_err(|e| local(format!("the image cannot be read at byte {at}: {e}")))?;
    if of_chunk(&plain) != *digest {
        let message = format!(
            "the image on this host is damaged: the {len} bytes from byte {at} are not what their digest says. Import it again"
        );
        return Err(RegistryError::new(RegistryErrorKind::Damaged, message));
    }
    Ok(compress(&plain))
}
