//! Serves the chunks that running disks ask for, from a cache on local disk, and from registries what is missing there.

mod budget;
mod cache;
mod connection;
mod image;
mod packets;
mod source;

use crate::store::RemoteStore;
use cache::Cache;
use image::CachedImage;
use packets::Listener;
use serde::Deserialize;
use spillway_registry::job::Place;
use spillway_registry::{RegistryError, RegistryErrorKind, index_of, root_of};
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// Largest order, in bytes.
const MOST_ORDER_BYTES: u64 = 1 << 20;
/// Pause before the next connection is accepted after descriptors ran out.
const OUT_OF_DESCRIPTORS: Duration = Duration::from_millis(100);

/// What is served: one JSON object on standard input.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ServeOrder {
    /// Path of the socket.
    socket: PathBuf,
    /// Folder of the cache, which belongs to this process alone.
    cache: PathBuf,
    /// Most bytes of chunks in it.
    budget_bytes: u64,
    /// Time after which a second request is sent beside one to a store that has not ended.
    hedge_milliseconds: u64,
    /// The images.
    images: Vec<StreamedImage>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StreamedImage {
    /// Digest of the image: `sha256:` and 64 hexadecimal digits.
    digest: String,
    /// The registry that has it.
    place: Place,
}

/// Serves until the process is ended.
pub fn run() -> ExitCode {
    match serve() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("spillway-streamd: error: {e}");
            ExitCode::FAILURE
        }
    }
}

fn local(why: impl std::fmt::Display) -> RegistryError {
    RegistryError::new(RegistryErrorKind::Local, why)
}

fn serve() -> Result<(), RegistryError> {
    let mut text = Vec::new();
    std::io::stdin().take(MOST_ORDER_BYTES).read_to_end(&mut text).map_err(local)?;
    let order: ServeOrder = serde_json::from_slice(&text).map_err(|e| local(format!("no order: {e}")))?;
    let _already = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(local)?;
    runtime.block_on(async move {
        let cache = Arc::new(Cache::new(
            order.cache.clone(),
            order.budget_bytes,
            Duration::from_millis(order.hedge_milliseconds),
        ));
        for StreamedImage { digest, place } in &order.images {
            let root = root_of(digest).ok_or_else(|| local(format!("{digest} is no digest of an image")))?;
            // What is missing is asked for again by what fetches it.
            let store = RemoteStore::open(place, Duration::ZERO)?;
            // Without the store, what an earlier process has kept is served all the same.
            let index = match CachedImage::kept_index(&order.cache, &root) {
                Some(index) => index,
                None => index_of(&store, &root).await?,
            };
            cache.serve(index, store).map_err(|e| local(format!("the cache of {digest}: {e}")))?;
        }
        cache.shrink_to_budget().map_err(local)?;
        let socket = order.socket.display();
        let listener = Listener::bind(&order.socket).map_err(|e| local(format!("{socket}: {e}")))?;
        // An error is ignored: nobody may read it.
        let _ = writeln!(std::io::stdout(), "spillway-streamd: ready on {socket}");
        loop {
            let Ok(connection) = listener.accept().await else {
                tokio::time::sleep(OUT_OF_DESCRIPTORS).await;
                continue;
            };
            let cache = Arc::clone(&cache);
            // It ends when the other side goes.
            tokio::spawn(async move { _ = connection::serve(cache, connection).await });
        }
    })
}
