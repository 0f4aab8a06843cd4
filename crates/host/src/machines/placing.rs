//! Private copies of an image for machines of mode `ephemeral`: chooses a store with enough space and makes the copy.
//! Owns the files until a disk's process has opened and unlinked them.
//!
//! Invariant: a file without the word `partial` in its name is a complete copy; no copy takes space that another one was
//! promised.

use super::belongings;
use super::disk;
use super::run::{MachineFolders, RunRecord};
use super::turns::{StoreSet, StoreTurns, Turn};
use crate::copying;
use crate::error::HostError;
use crate::stores::Stores;
use spillway_api::{ErrorCode, Machine, Name, StoreClass, StoreFolder};
use spillway_control::{Request, bytes};
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Folder for the copies in a store.
pub(super) const FOLDER: &str = "copies";

/// Number of copies that are made at the same time in the same stores: more would only compete for the same disks.
const COPIES: usize = 2;

/// Places private copies in stores.
pub struct Placement {
    stores: Stores,
    folders: MachineFolders,
    /// Held while a store is chosen for a copy.
    choosing: Mutex<()>,
    turns: StoreTurns,
}

impl Placement {
    /// Creates the placement in these stores, beside the copies of the runs in these folders.
    pub fn new(stores: Stores, folders: MachineFolders) -> Placement {
        // A copy takes as long as it takes.
        let turns = StoreTurns::new(COPIES, Duration::MAX);
        Placement { stores, folders, choosing: Mutex::default(), turns }
    }

    /// Waits for a turn to make a copy that is read and written in these stores.
    pub async fn turn(&self, stores: &StoreSet) -> Result<Turn, HostError> {
        self.turns.take(stores).await
    }

    /// Chooses a store for a machine's copy and records the choice before the next one is made, so that each sees what
    /// was promised before.
    pub fn reserve<T>(
        &self,
        machine: &Machine,
        size_bytes: u64,
        record: impl FnOnce(PathBuf) -> Result<T, HostError>,
    ) -> Result<T, HostError> {
        let _choosing = self.choosing.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        record(self.place(machine, size_bytes)?)
    }

    /// Returns the first store of class `cache`, then of `temp`, whose free space less what was promised to others
    /// exceeds the disk's size.
    fn place(&self, machine: &Machine, size_bytes: u64) -> Result<PathBuf, HostError> {
        // The record of an earlier choice must be visible to the later one.
        let others = self.folders.runs()?;
        let mut seen = Vec::new();
        for class in [StoreClass::Cache, StoreClass::Temp] {
            for store in self.stores.list()?.into_iter().filter(|store| store.class == class) {
                // A store that is not mounted has no space.
                if let Err(e) = self.stores.check(&store) {
                    seen.push(e.to_string());
                    continue;
                }
                let folder = store.path.join(FOLDER);
                let failed =
                    |e| HostError::new(ErrorCode::Internal, format!("{}: {e}", store.path.display()));
                let (_, free) = crate::resources::space::of(&store.path).map_err(failed)?;
                let reserved: u64 = others
                    .iter()
                    .filter(|(name, _)| *name != machine.name)
                    .map(|(name, run)| self.reserved(name, run, &folder))
                    .sum();
                let left = free.saturating_sub(reserved);
                if left > size_bytes {
                    return Ok(file(&store, machine));
                }
                seen.push(format!("{} has space for disks of less than {}", store.name, bytes(left)));
            }
        }
        let why = match seen.is_empty() {
            true => "no store is of class cache or temp: add one ('spillway store add')".into(),
            false => seen.join(", "),
        };
        let message = format!("no store has space for a private copy of {}: {why}", bytes(size_bytes));
        Err(HostError::new(ErrorCode::Exhausted, message))
    }

    /// Removes the copy of an earlier run: it takes space, and its guest may have written to it.
    pub fn forget(&self, machine: &Machine) -> Result<(), HostError> {
        for store in self.stores.list()? {
            let path = file(&store, machine);
            belongings::remove(&partial(&path))?;
            belongings::remove(&path)?;
        }
        Ok(())
    }

    /// Space that a run's copy may still take on its file system. A copy that shares extents with the image may grow to
    /// its full size.
    fn reserved(&self, name: &Name, run: &RunRecord, folder: &Path) -> u64 {
        let Some(copy) = run.copy.as_ref().filter(|copy| copy.path.starts_with(folder)) else { return 0 };
        if copy.is_shared {
            return copy.size_bytes;
        }
        let named =
            [copy.path.clone(), partial(&copy.path)].into_iter().find_map(|path| fs::metadata(path).ok());
        let taken = match named {
            Some(file) => file.blocks() * 512,
            // The disk's process has opened it: ask how much it has written.
            None => disk::ask(self.folders.of(name).path(), &Request::Stats)
                .ok()
                .and_then(|stats| stats["overflow"]["file_bytes"].as_u64())
                .unwrap_or(0),
        };
        copy.size_bytes.saturating_sub(taken)
    }
}

/// A finished copy.
#[derive(Debug)]
pub struct FinishedCopy {
    /// Whether it shares extents with the image.
    pub is_shared: bool,
}

/// Copies an image, by sharing extents where the file system can. The copy is complete, and gets its name in `finish`.
/// `None`: the copy was cancelled.
pub fn copy(image: &Path, to: &Path, unwanted: &AtomicBool) -> Result<Option<FinishedCopy>, HostError> {
    let partial = partial(to);
    let failed = |e: io::Error| {
        let code = match e.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorCode::Exhausted,
            _ => ErrorCode::Internal,
        };
        HostError::new(code, format!("{} cannot be copied to {}: {e}", image.display(), to.display()))
    };
    let goes_on = |_| match unwanted.load(Ordering::Relaxed) {
        false => Ok(()),
        true => Err(HostError::new(ErrorCode::Cancelled, "nobody wants the copy any more")),
    };
    let open = || {
        if let Some(folder) = to.parent() {
            DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        }
        let source = File::open(image)?;
        let target = File::options().create(true).truncate(true).write(true).mode(0o600).open(&partial)?;
        let size = source.metadata()?.len();
        Ok((source, target, size))
    };
    let copy = || {
        let (source, target, size) = open().map_err(failed)?;
        let is_shared = copying::share(&source, &target);
        if !is_shared {
            target.set_len(size).map_err(failed)?;
            copying::copy(&source, 0..size, &target, 0, goes_on, failed)?;
        }
        // Write errors show here, not when a guest reads.
        target.sync_all().map_err(failed)?;
        Ok(FinishedCopy { is_shared })
    };
    let copied: Result<FinishedCopy, HostError> = copy();
    if copied.is_err() {
        let _ = fs::remove_file(&partial);
    }
    match copied {
        Ok(made) => Ok(Some(made)),
        Err(stopped) if stopped.code == ErrorCode::Cancelled => Ok(None),
        Err(error) => Err(error),
    }
}

/// Gives a complete copy its final name.
pub fn finish(to: &Path) -> Result<(), HostError> {
    let failed = |e| HostError::new(ErrorCode::Internal, format!("{} cannot be named: {e}", to.display()));
    fs::rename(partial(to), to).map_err(failed)
}

/// Path of a machine's copy in a store.
fn file(store: &StoreFolder, machine: &Machine) -> PathBuf {
    store.path.join(FOLDER).join(format!("{}-{}.raw", machine.name, machine.identity.uuid))
}

fn partial(path: &Path) -> PathBuf {
    path.with_extension("partial")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn a_copy_is_whole_and_has_the_same_holes() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let (image, to) = (dir.path().join("image"), dir.path().join("copies/a.raw"));
        let file = File::create(&image).unwrap();
        file.set_len(64 << 20).unwrap();
        for at in [0, 5 << 20, (64 << 20) - 4096] {
            file.write_all_at(&[7; 4096], at).unwrap();
        }
        assert!(copy(&image, &to, &AtomicBool::new(false)).unwrap().is_some());
        assert!(!to.exists(), "it is not finished");
        finish(&to).unwrap();
        assert!(fs::read(&image).unwrap() == fs::read(&to).unwrap());
        assert!(fs::metadata(&to).unwrap().blocks() * 512 < 1 << 20);
        let (unwanted, nowhere) = (dir.path().join("copies/b.raw"), dir.path().join("image/c.raw"));
        // Where files can be shared it is there at once, requested or not.
        if copy(&image, &unwanted, &AtomicBool::new(true)).unwrap().is_none() {
            assert_eq!(fs::read_dir(dir.path().join("copies")).unwrap().count(), 1);
        }
        assert!(copy(&image, &nowhere, &AtomicBool::new(false)).is_err());
    }
}
