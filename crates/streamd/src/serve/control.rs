//! The daemon's connection: which images are served, from where, and what is in the cache. Owns no state.
//!
//! Invariant: each request has one answer, in order. Credentials come as a descriptor and are never answered.

use super::cache::Cache;
use super::health::StoreAt;
use super::packets::Connection;
use crate::store::Credentials;
use spillway_image::digests::{CHUNK_BYTES, list_bytes};
use spillway_image::size_fault;
use spillway_registry::serve::{ControlReply, ControlRequest, MOST_CONTROL_BYTES, SERVE_VERSION};
use spillway_registry::{Index, root_of};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// Serves a connection until it ends.
pub async fn serve(cache: Arc<Cache>, connection: Connection) -> io::Result<()> {
    let mut packet = vec![0; MOST_CONTROL_BYTES];
    loop {
        let (received, fds) = connection.receive_with_fds(&mut packet).await?;
        if received.is_empty() {
            return Ok(());
        }
        let reply = match serde_json::from_slice(received) {
            Ok(request) => {
                let cache = Arc::clone(&cache);
                let done = tokio::task::spawn_blocking(move || carry_out(&cache, request, fds));
                done.await.map_err(io::Error::other)?.unwrap_or_else(ControlReply::Refused)
            }
            Err(e) => ControlReply::Refused(format!("the request is not understood: {e}")),
        };
        connection.send(&serde_json::to_vec(&reply).map_err(io::Error::other)?, &[]).await?;
    }
}

fn carry_out(cache: &Arc<Cache>, request: ControlRequest, fds: Vec<OwnedFd>) -> Result<ControlReply, String> {
    let root = |digest: &str| root_of(digest).ok_or_else(|| format!("{digest} is no digest of an image"));
    let in_cache = |e: io::Error| format!("the cache: {e}");
    match request {
        ControlRequest::Hello => {
            let program = env!("CARGO_PKG_VERSION").into();
            Ok(ControlReply::Hello { version: SERVE_VERSION, program, order: cache.order().clone() })
        }
        ControlRequest::Serve { digest, size_bytes, place, fill, dry_run } => {
            let mut fds = fds.into_iter();
            let list = fds.next().ok_or("the list of digests is missing")?;
            let index = read_index(&digest, size_bytes, &list.into())?;
            let credentials = fds.next().map(|file| {
                Credentials::read(&file.into())
                    .map_err(|why| format!("{}: the file of the credentials {why}", place.url))
            });
            let at = StoreAt { place, credentials: credentials.transpose()? };
            let image = cache.serve(index, at)?;
            cache.fill(&image, &fill, dry_run).map(|()| ControlReply::Done)
        }
        ControlRequest::Sweep { others } => {
            let others: Option<Vec<_>> = others.iter().map(|digest| root_of(digest)).collect();
            let others = others.ok_or("a digest of an image is none")?;
            cache.sweep(&others).map(|()| ControlReply::Done).map_err(in_cache)
        }
        ControlRequest::Forget { digest } => match cache.forget(&root(&digest)?) {
            Ok(true) => Ok(ControlReply::Done),
            Ok(false) => Err(format!("{digest}: a disk uses it")),
            Err(e) => Err(in_cache(e)),
        },
        ControlRequest::Members => {
            let list = fds.into_iter().next().ok_or("the list of members is missing")?;
            cache.peers().ok_or("it exchanges no chunks with other hosts")?.take_members(list.into())?;
            Ok(ControlReply::Done)
        }
        ControlRequest::Figures => Ok(ControlReply::Figures(cache.figures())),
        ControlRequest::Image { digest } => {
            let image = cache.image(&root(&digest)?);
            let image = image.ok_or_else(|| format!("{digest} is not served"))?;
            Ok(ControlReply::Image(image.cached.figures()))
        }
    }
}

/// The digests of an image, if they are.
fn read_index(digest: &str, size_bytes: u64, list: &File) -> Result<Index, String> {
    if size_bytes == 0 || size_fault(size_bytes).is_some() {
        return Err(format!("{digest}: no image has {size_bytes} bytes"));
    }
    let mut bytes = vec![0; list_bytes(size_bytes) as usize];
    list.read_exact_at(&mut bytes, 0).map_err(|e| format!("{digest}: the list of digests: {e}"))?;
    let (digests, _) = bytes.as_chunks();
    let index = Index { size_bytes, chunk_bytes: CHUNK_BYTES, digests: digests.to_vec() };
    match root_of(digest) == Some(index.root()) {
        true => Ok(index),
        false => Err(format!("{digest}: the list of digests is of another image")),
    }
}
