//! Fetches a whole image to a file. Owns the width of the requests. Chunks of zeroes are left as holes.

use super::{local, say};
use crate::store::RemoteStore;
use futures_util::{StreamExt, TryStreamExt, stream};
use spillway_registry::job::JobMessage;
use spillway_registry::{RegistryError, fetch_frame, index_of, open_frame, root_of};
use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

/// Requests at a time.
const WIDTH: usize = 16;
/// Blocks of zeroes of this size are left as holes.
const BLOCK_BYTES: usize = 4096;
/// Bytes between two lines of progress.
const STEP_BYTES: u64 = 16 << 20;

/// Writes a chunk, but for blocks of zeroes, which the file has already.
pub fn write_data(disk: &File, at: u64, plain: &[u8]) -> std::io::Result<()> {
    let is_zero = |block: &[u8]| block.iter().all(|byte| *byte == 0);
    let mut from = 0;
    while from < plain.len() {
        let blocks = plain[from..].chunks(BLOCK_BYTES);
        let data: usize = blocks.take_while(|block| !is_zero(block)).map(<[u8]>::len).sum();
        if data > 0 {
            disk.write_all_at(&plain[from..from + data], at + from as u64)?;
        }
        from += data + BLOCK_BYTES;
    }
    Ok(())
}

/// Fetches the image with this digest. Returns the bytes that were received, compressed.
pub async fn fetch(store: &RemoteStore, digest: &str, to: &Path) -> Result<u64, RegistryError> {
    let root = root_of(digest).ok_or_else(|| local(format!("{digest} is no digest of an image")))?;
    let index = Arc::new(index_of(store, &root).await?);
    let cannot = |e: std::io::Error| local(format!("the image cannot be written: {e}"));
    let disk = Arc::new(File::options().write(true).open(to).map_err(cannot)?);
    // All places of each chunk, so that it is fetched once.
    let mut places: HashMap<_, Vec<usize>> = HashMap::new();
    let mut done = 0;
    for (chunk, digest) in index.digests.iter().enumerate() {
        match index.is_zero(chunk) {
            true => done += index.len_of(chunk),
            false => places.entry(*digest).or_default().push(chunk),
        }
    }
    let mut places: Vec<_> = places.into_iter().collect();
    places.sort_unstable_by_key(|(_, chunks)| chunks[0]);
    let fetches = places.into_iter().map(|(digest, chunks)| {
        let (disk, index) = (Arc::clone(&disk), Arc::clone(&index));
        async move {
            let frame = fetch_frame(store, &digest).await?;
            let received = frame.len() as u64;
            let written = tokio::task::spawn_blocking(move || {
                let plain = open_frame(&frame, &digest, index.len_of(chunks[0]))?;
                for chunk in &chunks {
                    write_data(&disk, *chunk as u64 * index.chunk_bytes, &plain).map_err(cannot)?;
                }
                Ok::<_, RegistryError>(plain.len() as u64 * chunks.len() as u64)
            });
            Ok::<_, RegistryError>((received, written.await.map_err(local)??))
        }
    });
    let mut fetches = stream::iter(fetches).buffer_unordered(WIDTH);
    let mut received_bytes = 0;
    while let Some((received, written)) = fetches.try_next().await? {
        received_bytes += received;
        let before = done;
        done += written;
        if before / STEP_BYTES != done / STEP_BYTES {
            say(&JobMessage::Progress(done));
        }
    }
    Ok(received_bytes)
}
