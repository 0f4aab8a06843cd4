//! One job for the daemon: reads its order from standard input, says what it does on standard output, and ends.
//!
//! Invariant: the last line is the result or the error; if there is none, the job was killed.

mod fetch;
mod push;

pub use fetch::write_data;

use crate::download::download;
use crate::store::{Credentials, RemoteStore};
use spillway_registry::job::{JobMessage, JobOrder, Place, ResolvedImage, Work};
use spillway_registry::{
    CollectOrder, Objects, PublicKey, RegistryError, RegistryErrorKind, boot_sets, check_format, collect,
    found, index_of, name_key, probe, put_boot_set, resolve, root_of,
};
use std::fs::File;
use std::io::{Read, Write};
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// How long a request is repeated while the store says that it cannot now.
const PATIENCE: Duration = Duration::from_secs(120);
/// Largest order, in bytes.
const MOST_ORDER_BYTES: u64 = 1 << 20;

/// Carries out the order.
pub fn run() -> ExitCode {
    let last = match carry_out() {
        Ok(last) => last,
        Err(e) => e.into(),
    };
    let failed = matches!(last, JobMessage::Failed { .. });
    say(&last);
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Writes a line. If nobody reads, the job has no use any more.
pub fn say(message: &JobMessage) {
    let mut line = serde_json::to_vec(message).expect("it has only numbers and texts");
    line.push(b'\n');
    if std::io::stdout().lock().write_all(&line).is_err() {
        std::process::exit(1);
    }
}

/// An error of this host.
pub fn local(why: impl std::fmt::Display) -> RegistryError {
    RegistryError::new(RegistryErrorKind::Local, why)
}

fn carry_out() -> Result<JobMessage, RegistryError> {
    let mut text = Vec::new();
    std::io::stdin().take(MOST_ORDER_BYTES).read_to_end(&mut text).map_err(local)?;
    let order: JobOrder = serde_json::from_slice(&text).map_err(|e| local(format!("no order: {e}")))?;
    // One provider of cryptography, the one that the daemon has too.
    let _already = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(local)?;
    runtime.block_on(async move {
        match order {
            JobOrder::Download(order) => download(order).await,
            JobOrder::Registry { place, work: what } => {
                let store = RemoteStore::open(&place, credentials_of(&place)?, PATIENCE)?;
                work(&store, what).await
            }
        }
    })
}

fn credentials_of(place: &Place) -> Result<Option<Credentials>, RegistryError> {
    let Some(path) = &place.credentials else { return Ok(None) };
    let cannot = |why: String| local(format!("{}: the file of the credentials {why}", place.url));
    let file = File::open(path).map_err(|e| cannot(format!("cannot be read: {e}")))?;
    Credentials::read(&file).map(Some).map_err(cannot)
}

async fn work(store: &RemoteStore, work: Work) -> Result<JobMessage, RegistryError> {
    match work {
        Work::Probe { id } => probe(store, id.as_deref()).await.map(JobMessage::Probed),
        Work::Found => found(store).await.map(|()| JobMessage::Founded),
        Work::Push { name, version, disk, digests, size_bytes, signature, id } => {
            let image = push::LocalImage::open(&disk, &digests, size_bytes)?;
            image.push(store, &name, version, signature.as_deref(), &id).await.map(JobMessage::Pushed)
        }
        Work::Resolve { name, version, keys } => {
            let keys: Result<Vec<_>, _> = keys.iter().map(|key| PublicKey::parse(key)).collect();
            let image = resolve(store, &name, version, &keys.map_err(local)?).await?;
            Ok(JobMessage::Resolved(ResolvedImage {
                version: image.version,
                digest: image.manifest.digest,
                size_bytes: image.manifest.size_bytes,
            }))
        }
        Work::List { digest, to } => {
            let root = root_of(&digest).ok_or_else(|| local(format!("{digest} is no digest of an image")))?;
            let digests = index_of(store, &root).await?.digests.concat();
            let written = File::options().write(true).open(&to).and_then(|mut file| file.write_all(&digests));
            written.map_err(|e| local(format!("the digests cannot be written: {e}")))?;
            // They are advice: without them the image is streamed all the same.
            Ok(JobMessage::Listed(boot_sets(store, &root).await.unwrap_or_default()))
        }
        Work::KeepBootSet { digest, catalog, chunks } => {
            let root = root_of(&digest).ok_or_else(|| local(format!("{digest} is no digest of an image")))?;
            put_boot_set(store, &root, &catalog, chunks).await.map(|()| JobMessage::BootSetKept)
        }
        Work::Fetch { digest, to } => fetch::fetch(store, &digest, &to).await.map(JobMessage::Fetched),
        Work::Collect { grace_seconds, gap_seconds, deletes, id } => {
            let order = CollectOrder { clock: now_seconds, grace_seconds, gap_seconds, deletes, id: &id };
            collect(store, &order).await.map(JobMessage::Collected)
        }
        Work::Forget { name, version } => {
            check_format(store).await?;
            let key = name_key(&name, version);
            if !store.exists(&key).await? {
                let message = format!("the registry has no {name}:{version}");
                return Err(RegistryError::new(RegistryErrorKind::Absent, message));
            }
            store.delete(vec![key]).await.map(|()| JobMessage::Forgotten)
        }
    }
}

fn now_seconds() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64)
}
