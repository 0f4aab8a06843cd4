//! Stores: folders with a class. Owns their records, the mark file in each, and the rules about what goes where.
//!
//! Invariant: a folder belongs to one store of one daemon at most; a store whose folder is not the one that was added
//! (its file system is not mounted) is not used.

use crate::error::HostError;
use crate::store::{Objects, RecordKind, StoredRecord};
use serde::{Deserialize, Serialize};
use spillway_api::{ErrorCode, Name, StoreClass, StoreFolder};
use std::fs::{DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use utoipa::ToSchema;

/// File that marks the folder of a store.
const MARK: &str = ".spillway-store";
/// Name of the mark until the store is recorded.
const NEW_MARK: &str = ".spillway-store.new";

/// Record of a store.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
struct StoreRecord {
    folder: StoreFolder,
    /// Content of the mark file.
    mark: String,
}

impl StoredRecord for StoreRecord {
    const PREFIX: &'static str = "stores/";
    const WORD: &'static str = "store";
}

/// Kinds of records of this module.
pub(crate) const RECORDS: [RecordKind; 1] = [RecordKind::of::<StoreRecord>()];

/// The stores of a host. A clone is the same stores.
#[derive(Clone)]
pub struct Stores {
    objects: Objects,
    /// Held while a store is added, so that no two take one folder.
    adding: Arc<Mutex<()>>,
}

impl Stores {
    /// Opens the recorded stores; creates the first one, `default`, in this folder.
    pub fn open(objects: Objects, default: &Path) -> Result<Stores, HostError> {
        let stores = Stores { objects, adding: Arc::default() };
        if stores.list()?.is_empty() && stores.objects.unreadable_names::<StoreRecord>().is_empty() {
            let name: Name = "default".parse().expect("it is a name");
            stores.add(StoreFolder { name, path: default.to_owned(), class: StoreClass::Local }, false)?;
        }
        Ok(stores)
    }

    /// Returns all stores, in the order of their names.
    pub fn list(&self) -> Result<Vec<StoreFolder>, HostError> {
        Ok(self.objects.list::<StoreRecord>()?.into_iter().map(|store| store.value.folder).collect())
    }

    /// Returns a store.
    pub fn get(&self, name: &Name) -> Result<StoreFolder, HostError> {
        Ok(self.kept(name)?.folder)
    }

    /// Adds a store. Its folder is created if necessary, and must be empty if it exists. With `dry_run` everything is
    /// checked and nothing created.
    pub fn add(&self, store: StoreFolder, dry_run: bool) -> Result<StoreFolder, HostError> {
        let _adding = self.adding.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let given = &store.path;
        let refuse =
            |why: &str| HostError::invalid(format!("{}: cannot be a store's folder: {why}", given.display()));
        if !given.is_absolute() {
            return Err(refuse("the path must be absolute"));
        }
        if self.objects.get::<StoreRecord>(store.name.as_str())?.is_some() {
            let message = format!("there is a store '{}' already", store.name);
            return Err(HostError::new(ErrorCode::Exists, message));
        }
        let path = real_path(given).map_err(|e| refuse(&e.to_string()))?;
        for other in self.list()? {
            if path.starts_with(&other.path) || other.path.starts_with(&path) {
                let (path, taken) = (path.display(), other.path.display());
                let message = format!("{path} and the store '{}' ({taken}) would share files", other.name);
                return Err(HostError::new(ErrorCode::Conflict, message));
            }
        }
        let mark = uuid::Uuid::new_v4().to_string();
        let is_empty = || {
            for entry in std::fs::read_dir(&path)? {
                let name = entry?.file_name();
                // The one exists in every new file system; the other was left by a daemon that was killed at this point.
                if name != "lost+found" && name != NEW_MARK {
                    let message = "it is not empty: give a folder of its own";
                    return Err(io::Error::new(io::ErrorKind::DirectoryNotEmpty, message));
                }
            }
            Ok(())
        };
        if dry_run {
            match is_empty() {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(refuse(&e.to_string())),
                _ => return Ok(StoreFolder { path, ..store }),
            }
        }
        let make = || {
            DirBuilder::new().recursive(true).mode(0o700).create(&path)?;
            is_empty()?;
            match std::fs::remove_file(path.join(NEW_MARK)) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
            let mut file = File::create_new(path.join(NEW_MARK))?;
            file.write_all(mark.as_bytes())?;
            file.sync_all()?;
            path.ancestors().try_for_each(|folder| File::open(folder)?.sync_all())
        };
        make().map_err(|e| refuse(&e.to_string()))?;
        let folder = StoreFolder { path, ..store };
        let kept = StoreRecord { folder: folder.clone(), mark };
        self.objects.change(|changes| {
            changes.put(folder.name.as_str(), &kept);
            Ok::<_, HostError>(())
        })?;
        self.check(&folder)?;
        Ok(folder)
    }

    /// Returns the store that contains a file.
    pub fn holding(&self, path: &Path) -> Result<Option<StoreFolder>, HostError> {
        Ok(self.list()?.into_iter().find(|store| path.starts_with(&store.path)))
    }

    /// Checks that a store's folder is the one that was added.
    pub fn check(&self, store: &StoreFolder) -> Result<(), HostError> {
        let kept = self.kept(&store.name)?;
        let path = store.path.display();
        let mut mark = std::fs::read_to_string(store.path.join(MARK));
        if mark.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::NotFound) {
            mark = mark.or_else(|e| name_mark(&store.path, &kept.mark).ok_or(e));
        }
        let why = match mark {
            Ok(mark) if mark == kept.mark => return Ok(()),
            Ok(_) => format!("{path} is the folder of another store"),
            Err(e) => format!("{path} is not the folder that was added ({e}): is its file system mounted?"),
        };
        Err(HostError::new(ErrorCode::Unavailable, format!("store {}: {why}", store.name)))
    }

    /// Chooses the store for an image's versions: the named one, else the first of class `shared`, then `local`.
    pub fn for_images(&self, named: Option<&Name>) -> Result<StoreFolder, HostError> {
        if let Some(name) = named {
            return self.get(name);
        }
        let stores = self.list()?;
        let of = |class| stores.iter().find(|store| store.class == class);
        let chosen = of(StoreClass::Shared).or_else(|| of(StoreClass::Local)).cloned();
        let none = "no store is of class shared or local: add one ('spillway store add'), or name another";
        chosen.ok_or_else(|| HostError::new(ErrorCode::Unavailable, none))
    }

    /// Chooses the store for a disk's files: the named one, else the first of class `local`.
    pub fn for_disks(&self, named: Option<&Name>) -> Result<StoreFolder, HostError> {
        if let Some(name) = named {
            return self.get(name);
        }
        let none = "no store is of class local: add one ('spillway store add'), or name another";
        let chosen = self.list()?.into_iter().find(|store| store.class == StoreClass::Local);
        chosen.ok_or_else(|| HostError::new(ErrorCode::Unavailable, none))
    }

    fn kept(&self, name: &Name) -> Result<StoreRecord, HostError> {
        match self.objects.get::<StoreRecord>(name.as_str())? {
            Some(store) => Ok(store.value),
            None => {
                let stores = self.list()?;
                let names = stores.iter().map(|store| store.name.as_str());
                Err(HostError::not_found(StoreRecord::WORD, name.as_str(), names))
            }
        }
    }
}

/// Renames the mark once it is recorded, so that no other folder is taken for an unfinished one.
fn name_mark(folder: &Path, mark: &str) -> Option<String> {
    let found = std::fs::read_to_string(folder.join(NEW_MARK)).ok().filter(|found| found == mark);
    if found.is_some() && std::fs::rename(folder.join(NEW_MARK), folder.join(MARK)).is_ok() {
        File::open(folder).and_then(|folder| folder.sync_all()).ok()?;
    }
    // Another process may have been faster.
    std::fs::read_to_string(folder.join(MARK)).ok()
}

/// Returns a path without links; its last parts need not exist. Creates nothing.
fn real_path(path: &Path) -> io::Result<PathBuf> {
    let there = path.ancestors().find(|part| part.symlink_metadata().is_ok()).unwrap_or(path);
    let rest = path.strip_prefix(there).unwrap_or(Path::new(""));
    if rest.components().any(|part| !matches!(part, std::path::Component::Normal(_))) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it has '..' where nothing is"));
    }
    Ok(if rest.as_os_str().is_empty() { there.canonicalize()? } else { there.canonicalize()?.join(rest) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::SqliteStore;

    fn stores(dir: &Path) -> Stores {
        let objects = Objects::new(Arc::new(SqliteStore::open(&dir.join("db")).unwrap()));
        Stores::open(objects, &dir.join("default")).unwrap()
    }

    fn folder(name: &str, path: PathBuf) -> StoreFolder {
        StoreFolder { name: name.parse().unwrap(), path, class: StoreClass::Local }
    }

    #[test]
    fn an_addition_that_was_broken_off_is_begun_anew_and_nobody_elses_folder_is_taken() {
        let dir = tempfile::tempdir().unwrap();
        // Killed before it was recorded, on a file system of its own.
        let default = dir.path().join("default");
        std::fs::create_dir_all(default.join("lost+found")).unwrap();
        std::fs::write(default.join(NEW_MARK), "of an earlier try").unwrap();
        let stores = stores(dir.path());
        let store = stores.get(&"default".parse().unwrap()).unwrap();
        stores.check(&store).unwrap();
        assert!(!default.join(NEW_MARK).exists() && default.join(MARK).exists());
        // Killed after.
        std::fs::rename(default.join(MARK), default.join(NEW_MARK)).unwrap();
        stores.check(&store).unwrap();
        assert!(default.join(MARK).exists());
        // Another's mark under either name is not ours.
        for name in [MARK, NEW_MARK] {
            let ours = std::fs::read(default.join(MARK)).unwrap();
            std::fs::remove_file(default.join(MARK)).unwrap();
            std::fs::write(default.join(name), "another's").unwrap();
            assert_eq!(stores.check(&store).unwrap_err().code, ErrorCode::Unavailable, "{name}");
            std::fs::write(default.join(MARK), ours).unwrap();
        }
        let other = dir.path().join("other");
        std::fs::create_dir(&other).unwrap();
        std::fs::write(other.join(MARK), "another daemon's").unwrap();
        let refused = stores.add(folder("other", other.clone()), false).unwrap_err();
        assert!(refused.message.contains("it is not empty"), "{refused}");
        assert_eq!(std::fs::read_to_string(other.join(MARK)).unwrap(), "another daemon's");
        assert_eq!(stores.holding(&default.join("disks/x")).unwrap(), Some(store));
        assert_eq!(stores.holding(&other.join("x")).unwrap(), None);
    }
}
