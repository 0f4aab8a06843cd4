//! The daemon's life: its folder, its socket, its connections, its end. Owns these; knows nothing of what is kept.
//!
//! Invariant: one daemon has a folder; it can be killed at any instant, and the next one goes on. Connections are
//! bounded in number and in the time that they may keep silent.

use crate::api::{self, App};
use crate::catalogs::Catalogs;
use crate::confined;
use crate::images::Images;
use crate::operations::Operations;
use crate::store::{Objects, SqliteStore};
use crate::stores::Stores;
use anyhow::{Context, Result, bail};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustix::fs::{FlockOperation, Mode, flock};
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Semaphore;

/// Connections at a time; more wait to be let in.
const MOST_CONNECTIONS: usize = 256;
/// How long a request's head may take to come.
const HEAD: Duration = Duration::from_secs(30);

/// How it is started.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where everything is kept.
    pub state: PathBuf,
    /// Where it listens.
    pub socket: PathBuf,
    /// The socket's rights.
    pub socket_mode: u32,
}

/// Serves until it is told to end. What goes on then is broken off, which the next one undoes.
pub async fn run(settings: Settings, ready: impl FnOnce()) -> Result<()> {
    let state = std::path::absolute(&settings.state).context("--state")?;
    fs::create_dir_all(&state).with_context(|| format!("{}: cannot be made", state.display()))?;
    fs::set_permissions(&state, fs::Permissions::from_mode(0o700))
        .with_context(|| format!("{}: is not ours", state.display()))?;
    let _lock = lock(&state.join("lock"))?;
    let mut complain = |line: &str| eprintln!("spillwayd: warning: {line}");
    if !confined::is_supported() {
        complain(
            "this kernel has no Landlock: qemu-img is kept from sockets, devices and rights, not from files",
        );
    }
    let store = SqliteStore::open(&state.join("state.db"))?;
    let objects = Objects::new(Arc::new(store));
    let operations = Operations::default();
    let stores = Stores::open(objects.clone(), &state.join("store"))?;
    let images = Images::open(objects.clone(), operations.clone(), stores.clone(), &mut complain)?;
    let catalogs = Catalogs::open(objects, stores.clone())?;
    let app = App { catalogs, images, operations, stores };

    let listener = listen(&settings)?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    ready();
    tokio::select! {
        () = accept(listener, app) => {}
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    let _ = fs::remove_file(&settings.socket);
    Ok(())
}

/// Lets clients in for as long as it is asked.
async fn accept(listener: UnixListener, app: App) {
    let router = api::router(app);
    let places = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        let Ok((stream, _)) = listener.accept().await else {
            // Out of descriptors: others give some back.
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let service = TowerToHyperService::new(router.clone());
        let connection = hyper::server::conn::http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD)
            .serve_connection(TokioIo::new(stream), service);
        tokio::spawn(async move {
            let _place = place;
            let _ = connection.await;
        });
    }
}

/// Held for as long as the daemon lives.
fn lock(path: &Path) -> Result<File> {
    let file = File::options().create(true).truncate(false).write(true).open(path);
    let file = file.with_context(|| format!("{}: cannot be made", path.display()))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => {
            bail!("{}: another spillwayd has this folder: give another --state", path.display())
        }
        Err(e) => Err(e).with_context(|| path.display().to_string()),
    }
}

/// Nobody can connect before the rights are right. One that nobody listens on any more is replaced.
fn listen(settings: &Settings) -> Result<UnixListener> {
    let path = &settings.socket;
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).with_context(|| format!("{}: cannot be made", folder.display()))?;
    }
    if std::os::unix::net::UnixStream::connect(path).is_ok() {
        bail!("{}: somebody listens there: give another --socket", path.display());
    }
    match fs::symlink_metadata(path) {
        Ok(found) if !std::os::unix::fs::FileTypeExt::is_socket(&found.file_type()) => {
            bail!("{}: is there and no socket: give another --socket", path.display())
        }
        Ok(_) => fs::remove_file(path).with_context(|| format!("{}: cannot be replaced", path.display()))?,
        Err(_) => {}
    }
    let before = rustix::process::umask(Mode::from_raw_mode(0o177));
    let listener = UnixListener::bind(path);
    rustix::process::umask(before);
    let listener = listener.with_context(|| format!("{}: cannot be made", path.display()))?;
    fs::set_permissions(path, fs::Permissions::from_mode(settings.socket_mode))?;
    Ok(listener)
}
