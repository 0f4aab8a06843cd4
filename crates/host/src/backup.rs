//! Backups of the records: `spillwayd backup` and `spillwayd restore`. Owns the file of a backup: a SQLite database with
//! all records, and nothing else of the state folder.
//!
//! Invariant: a backup is the state between two transactions, and gets its name only when it is complete; a restore
//! overwrites nothing.

use crate::failure::Failure;
use crate::state_folder::{DATABASE, is_ours, try_lock};
use crate::store::{Objects, RecordKind, SqliteStore, StoreError, StoredRecord, Summary};
use anyhow::{Context, Result, bail};
use axum::http::HeaderValue;
use serde::{Deserialize, Serialize};
use spillway_api::client::Client;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use utoipa::ToSchema;

/// Kinds of records of this module.
pub(crate) const RECORDS: [RecordKind; 1] = [RecordKind::of::<RestoreMark>()];

/// Mark in records that were restored from a backup, until a daemon has processed it.
#[derive(Serialize, Deserialize, ToSchema)]
pub(crate) struct RestoreMark {}

impl StoredRecord for RestoreMark {
    const PREFIX: &'static str = "restored/";
    const WORD: &'static str = "host";
    const IS_A_MARK: bool = true;
}

/// Name of the mark of a restore.
pub(crate) const RESTORED: &str = "records";

/// Response header with the state folder of a backup.
pub const STATE_HEADER: &str = "spillway-state";

/// Records of a running daemon.
#[derive(Clone)]
pub struct StateStore {
    /// The state folder.
    pub folder: PathBuf,
    /// Its store.
    pub store: Arc<SqliteStore>,
}

impl StateStore {
    /// The folder as a header value.
    pub fn header(&self) -> HeaderValue {
        let value = HeaderValue::from_bytes(self.folder.as_os_str().as_bytes());
        value.unwrap_or(HeaderValue::from_static(""))
    }
}

/// Copies the records of a state folder into a file, which is replaced if it exists. Asks the daemon that runs there, if
/// any.
pub fn backup(state: &Path, socket: &Path, file: &Path) -> Result<Summary> {
    let state = std::path::absolute(state).context("--state")?;
    let database = state.join(DATABASE);
    if !database.exists() {
        bail!(Failure::missing(format!(
            "{}: does not exist: give the state folder of the daemon with --state",
            database.display()
        )));
    }
    let mut name = file
        .file_name()
        .with_context(|| format!("{}: is not the path of a file", file.display()))?
        .to_owned();
    name.push(".partial");
    let partial = file.with_file_name(name);
    let made = copy_to(&state, socket, &partial).and_then(|summary| {
        fs::rename(&partial, file)
            .with_context(|| format!("{}: cannot create the backup", file.display()))?;
        sync_folder_of(file)?;
        Ok(summary)
    });
    if made.is_err() {
        let _ = fs::remove_file(&partial);
    }
    made
}

fn copy_to(state: &Path, socket: &Path, to: &Path) -> Result<Summary> {
    let cannot = || format!("{}: cannot write the backup", to.display());
    let mut out = private(to).with_context(cannot)?;
    match try_lock(state)? {
        Some(_lock) => out.write_all(&SqliteStore::copy_of(&state.join(DATABASE))?).with_context(cannot)?,
        None => {
            let client = Client::new(socket)?;
            let of = client.copy("/v1/host/backup", STATE_HEADER, &mut out)?;
            if of.as_deref() != Some(state.as_os_str().as_bytes()) {
                let of = of.map(|of| String::from_utf8_lossy(&of).into_owned()).unwrap_or_default();
                bail!(Failure::usage(format!(
                    "the daemon on {} keeps its state in '{of}', not in {}: say the right --state and --socket",
                    socket.display(),
                    state.display()
                )));
            }
        }
    }
    let of = state.join(DATABASE);
    let summary =
        SqliteStore::finish_copy(to, &of).with_context(|| format!("{} is not copied", of.display()))?;
    out.sync_all().with_context(cannot)?;
    Ok(summary)
}

/// Restores a backup into a state folder without records.
pub fn restore(state: &Path, file: &Path) -> Result<Summary> {
    let state = std::path::absolute(state).context("--state")?;
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&state)
        .with_context(|| format!("{}: cannot create the state folder", state.display()))?;
    is_ours(&state)?;
    let Some(_lock) = try_lock(&state)? else {
        bail!(Failure::refused(format!("{}: a spillwayd uses this folder: stop it first", state.display())));
    };
    let database = state.join(DATABASE);
    if database.exists() {
        bail!(Failure::refused(format!(
            "{}: exists, and a restore overwrites nothing: move it and {DATABASE}-wal away first, or give another --state",
            database.display()
        )));
    }
    let partial = state.join("restored.partial");
    let put = || -> Result<Summary> {
        let mut from =
            File::open(file).with_context(|| format!("{}: cannot read the backup", file.display()))?;
        let mut to = private(&partial)
            .with_context(|| format!("{}: cannot create the restored records", partial.display()))?;
        io::copy(&mut from, &mut to)
            .with_context(|| format!("{}: cannot copy the backup", file.display()))?;
        let summary = SqliteStore::finish_copy(&partial, file)
            .with_context(|| format!("{}: the backup is not restored", file.display()))?;
        mark(&partial).with_context(|| format!("{}: cannot be marked", partial.display()))?;
        to.sync_all()?;
        // Remove what is left of an earlier database.
        for rest in ["-wal", "-shm", "-journal"] {
            match fs::remove_file(state.join(format!("{DATABASE}{rest}"))) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e.into()),
                _ => {}
            }
        }
        fs::rename(&partial, &database)
            .with_context(|| format!("{}: cannot put the restored records in place", database.display()))?;
        sync_folder_of(&database)?;
        Ok(summary)
    };
    let done = put();
    if done.is_err() {
        let _ = fs::remove_file(&partial);
    }
    done
}

/// Tells the next daemon that what runs may be newer than these records.
fn mark(records: &Path) -> Result<()> {
    let objects = Objects::new(Arc::new(SqliteStore::open(records)?));
    Ok(objects.change(|changes| {
        changes.put(RESTORED, &RestoreMark {});
        Ok::<_, StoreError>(())
    })?)
}

/// Creates a file that only its owner can read: it contains secrets.
fn private(path: &Path) -> io::Result<File> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    File::options().create_new(true).write(true).mode(0o600).open(path)
}

fn sync_folder_of(path: &Path) -> Result<()> {
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    File::open(folder).and_then(|folder| folder.sync_all()).with_context(|| folder.display().to_string())
}
