//! Serves the chunks that running disks ask for, from a cache on local disk, and from other hosts and registries what is missing
//! there.
//!
//! Invariant: rights go before the first thread is made and before anything is received. Nothing is kept in the cache before the
//! daemon has named all images, so that everything in it is counted.

mod budget;
mod by_digest;
mod cache;
mod connection;
mod control;
mod fill;
mod health;
mod image;
mod pace;
mod packets;
mod peers;
mod sandbox;
mod seeds;
mod source;
mod telling;

use cache::Cache;
use packets::{Connection, Listener};
use spillway_registry::serve::{CONTROL, ServeOrder, USERS};
use spillway_registry::{RegistryError, RegistryErrorKind};
use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// Pause before the next connection is accepted after descriptors ran out.
const OUT_OF_DESCRIPTORS: Duration = Duration::from_millis(100);

/// Serves until the process is ended. The sockets are in its working folder.
pub fn run(order: &str) -> ExitCode {
    match serve(order) {
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

/// Listens at a path; what an earlier process has left there is removed.
fn listen(path: &str) -> Result<OwnedFd, RegistryError> {
    let failed = |e: io::Error| local(format!("{path}: {e}"));
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(failed(e)),
        _ => {}
    }
    packets::listen(Path::new(path)).map_err(failed)
}

/// Raises the limit of descriptors to the highest that it can be: each user of an image and each request to a store has some.
fn allow_descriptors() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let most = getrlimit(Resource::Nofile).maximum;
    // If that fails, connections wait until others end.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most });
}

fn serve(order: &str) -> Result<(), RegistryError> {
    let order: ServeOrder = serde_json::from_str(order).map_err(|e| local(format!("no order: {e}")))?;
    allow_descriptors();
    let _already = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
    let (users, control) = (listen(USERS)?, listen(CONTROL)?);
    let opened = order.peers.as_ref().map(peers::open).transpose().map_err(local)?;
    for notice in sandbox::confine(&order) {
        eprintln!("spillway-streamd: {notice}");
    }
    // One thread for all sockets, since to wake another one takes longer than most steps. What may wait for a disk or a lock that is
    // held meanwhile, and what computes for long, is done in others.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(local)?;
    runtime.block_on(async move {
        let (users, control) = (Listener::new(users).map_err(local)?, Listener::new(control).map_err(local)?);
        let peers = match (opened, &order.peers) {
            (Some(opened), Some(order)) => Some(opened.begin(order).map_err(local)?),
            _ => None,
        };
        let of_cache = peers.as_ref().map(|(peers, _)| Arc::clone(peers));
        let cache = Arc::new(Cache::new(order, of_cache));
        if let Some((peers, entrance)) = peers {
            tokio::spawn(peers::serve(Arc::clone(&cache), peers, entrance));
        }
        let of_users = Arc::clone(&cache);
        tokio::join!(
            accept(&users, |connection| connection::serve(Arc::clone(&of_users), connection)),
            accept(&control, |connection| control::serve(Arc::clone(&cache), connection)),
        );
        Ok(())
    })
}

/// Serves each connection until the other side goes.
async fn accept<F>(listener: &Listener, serve: impl Fn(Connection) -> F)
where
    F: Future<Output = io::Result<()>> + Send + 'static,
{
    loop {
        match listener.accept().await {
            Ok(connection) => {
                let served = serve(connection);
                tokio::spawn(async move { _ = served.await });
            }
            Err(_) => tokio::time::sleep(OUT_OF_DESCRIPTORS).await,
        }
    }
}
