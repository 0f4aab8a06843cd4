//! Creation of versions: imports from files and from addresses, and commits from machines' disks. Owns the numbers of versions, the records
//! of unfinished ones, and their operations.
//!
//! Invariant: a number is used once; an idempotency key is recorded in the transaction that records its version; a failed
//! or cancelled operation leaves neither file nor record; deleting the version that a commit is based on, or starting its
//! machine, conflicts with the commit.

use super::convert::{Conversion, ImportSource};
use super::digest::{self, ChunkDigest};
use super::files::{VersionFiles, highest};
use super::merged::MergedDisk;
use super::streamed::check_whole;
use super::{Images, key, reference};
use crate::error::HostError;
use crate::idempotency::IdempotentRequest;
use crate::operations::Progress;
use crate::registries::Downloads;
use crate::store::{Changes, StoredRecord};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use spillway_api::{
    ErrorCode, Image, ImageCommit, ImageDownload, ImageImport, ImageRef, ImageVersion, Name, Operation,
    Origin, Residency, StoreFolder, VersionState,
};
use spillway_image::size_fault;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::num::NonZeroU32;
use std::path::Path;
use std::sync::MutexGuard;
use utoipa::ToSchema;

/// Record of the last version number of an image. It outlives the image.
#[derive(Serialize, Deserialize, ToSchema)]
pub(super) struct LastVersion {
    version: u32,
}

impl StoredRecord for LastVersion {
    const PREFIX: &'static str = "last-versions/";
    const WORD: &'static str = "number";
}

impl Images {
    /// Begins to import a new version from a file. The flag is `true` if an earlier request with the same key began it;
    /// then the operation is as it was at its start.
    pub fn import(
        &self,
        name: &Name,
        import: ImageImport,
        key: &IdempotentRequest,
    ) -> Result<(Operation, bool), HostError> {
        if let Some(begun) = self.begun(key)? {
            return Ok((begun, true));
        }
        let source = ImportSource::open(Path::new(&import.path), import.format)?;
        let store = self.stores.for_images(import.store.as_ref())?;
        self.stores.check(&store)?;
        let found = source.look()?;
        let size_bytes = found.size_bytes;
        let origin = Origin::Import { path: import.path.clone(), format: import.format };
        let what = |number: u32| format!("import {name}:{number} from {}", import.path);
        self.begin(
            key,
            |changes| {
                let new = NewVersion {
                    name,
                    origin: &origin,
                    store: &store,
                    size_bytes,
                    notes: &found.notes,
                    pulled: None,
                    residency: None,
                };
                let version = new.record(changes)?;
                Ok((what(version.version), version))
            },
            move |images, version, progress| {
                images.make(version, false, progress, |files, _| {
                    source.convert(&files.partial_disk(), size_bytes, progress)
                })
            },
        )
    }

    /// Begins to download an image and to import it as a new version. The flag is `true` as with an import.
    pub fn download(
        &self,
        downloads: &Downloads,
        name: &Name,
        download: &ImageDownload,
        key: &IdempotentRequest,
    ) -> Result<(Operation, bool), HostError> {
        if let Some(begun) = self.begun(key)? {
            return Ok((begun, true));
        }
        let checked = downloads.check(download)?;
        let store = self.stores.for_images(download.store.as_ref())?;
        self.stores.check(&store)?;
        let (format, shown) = (download.format, checked.shown());
        let origin = Origin::Import { path: shown.clone(), format };
        let downloads = downloads.clone();
        self.begin(
            key,
            |changes| {
                let new = NewVersion {
                    name,
                    origin: &origin,
                    store: &store,
                    // Not known before the download.
                    size_bytes: 0,
                    notes: &[],
                    pulled: None,
                    residency: None,
                };
                let version = new.record(changes)?;
                Ok((format!("import {name}:{} from {shown}", version.version), version))
            },
            move |images, version, progress| {
                let store = images.stores.get(&version.store)?;
                let files = VersionFiles::of(&store.path, &version.image, version.version);
                let path = files.begin_download()?;
                let url = downloads.run(&checked, &path, progress)?;
                let source = ImportSource::open_download(&path, &url, format)?;
                let Conversion { size_bytes, notes } = source.look()?;
                let origin = Origin::Import { path: url, format };
                let version = ImageVersion { origin, size_bytes, notes, ..version.clone() };
                progress.begin_phase();
                images.make(&version, false, progress, |files, _| {
                    source.convert(&files.partial_disk(), size_bytes, progress)?;
                    files.end_download()
                })
            },
        )
    }

    /// Begins to commit a machine's disk, which contains changes to a version of an image. Nobody can serve the disk
    /// meanwhile. `may_begin` may refuse. The flag is `true` as with an import.
    pub fn commit(
        &self,
        name: &Name,
        commit: &ImageCommit,
        (image, number): (&Name, u32),
        disk: &Path,
        key: &IdempotentRequest,
        mut may_begin: impl FnMut(&mut Changes) -> Result<(), HostError>,
    ) -> Result<(Operation, bool), HostError> {
        let machine = &commit.machine;
        let base = self.objects.change(|changes| self.ready(changes, image, number))?.value;
        check_whole(&base, "committed to")?;
        // Use the store of the base version, so that they can share extents.
        let store = self.stores.get(&base.store)?;
        self.stores.check(&store)?;
        let from = reference(image, number);
        let base = VersionFiles::of(&store.path, image, number).disk();
        let merged = MergedDisk::open(&base, disk, &from.to_string())
            .map_err(|e| HostError::new(e.code, format!("{machine} cannot be committed: {e}")))?;
        let size_bytes = merged.size_bytes();
        let origin = Origin::Commit { machine: machine.clone(), from };
        let record = |changes: &mut Changes| {
            may_begin(changes)?;
            self.ready(changes, image, number)?;
            // Write the image unchanged, so that a concurrent deletion of the version conflicts with this commit.
            let written_over = self.image(changes, image)?.value;
            changes.put(image.as_str(), &written_over);
            let new = NewVersion {
                name,
                origin: &origin,
                store: &store,
                size_bytes,
                notes: &[],
                pulled: None,
                residency: None,
            };
            let version = new.record(changes)?;
            Ok((format!("commit {machine} as {name}:{}", version.version), version))
        };
        let publish = commit.publish;
        self.begin(key, record, move |images, version, progress| {
            images.make(version, publish, progress, |files, to| merged.fill(files, to, progress))
        })
    }

    /// Returns the operation that an earlier request with this key has begun.
    pub fn begun(&self, key: &IdempotentRequest) -> Result<Option<Operation>, HostError> {
        if !key.has_key() {
            return Ok(None);
        }
        let _beginning = self.beginning();
        self.objects.change(|changes| key.made(changes))
    }

    fn beginning(&self) -> MutexGuard<'_, ()> {
        self.beginning.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Records a version with `record`, which also says in words what is done, and begins the operation that makes it.
    pub(super) fn begin(
        &self,
        key: &IdempotentRequest,
        mut record: impl FnMut(&mut Changes) -> Result<(String, ImageVersion), HostError>,
        make: impl FnOnce(&Images, &ImageVersion, &Progress) -> Result<(), HostError> + Send + 'static,
    ) -> Result<(Operation, bool), HostError> {
        let _beginning = self.beginning();
        let recorded = self.objects.change(|changes| {
            if let Some(begun) = key.made::<Operation>(changes)? {
                return Ok(Err(begun));
            }
            let (what, version) = record(changes)?;
            let operation = self.operations.describe(what, Some(reference(&version.image, version.version)));
            key.record(changes, &operation);
            Ok::<_, HostError>(Ok((operation, version)))
        })?;
        let (operation, version) = match recorded {
            Ok(new) => new,
            Err(begun) => return Ok((begun, true)),
        };
        let (images, unfinished) = (self.clone(), version.clone());
        let begun = self.operations.begin(operation, move |progress| {
            let made = make(&images, &version, progress);
            made.map_err(|why| match images.remove(&version) {
                Ok(()) => why,
                Err(left) => HostError::new(why.code, format!("{why}; until the next start {left}")),
            })
        });
        if begun.is_err() {
            let forgotten = self.objects.change(|changes| {
                key.forget(changes);
                Ok::<_, HostError>(())
            });
            self.remove(&unfinished)?;
            forgotten?;
        }
        Ok((begun?, false))
    }

    /// Writes the content of a version and marks it as ready.
    pub(super) fn make(
        &self,
        version: &ImageVersion,
        publish: bool,
        progress: &Progress,
        fill: impl FnOnce(&VersionFiles, &File) -> Result<(), HostError>,
    ) -> Result<(), HostError> {
        // The disk is written, then read for its digests.
        progress.set_total(2 * version.size_bytes);
        let store = self.stores.get(&version.store)?;
        let files = VersionFiles::of(&store.path, &version.image, version.version);
        let disk = files.begin(version.size_bytes)?;
        fill(&files, &disk)?;
        progress.set_done(version.size_bytes);
        let failed = |e| files.failed("cannot be read back", e);
        // The read must return what is on the medium.
        disk.sync_all().map_err(failed)?;
        let mut list = files.begin_list()?;
        let keep =
            |digest: ChunkDigest| list.write_all(&digest).map_err(|e| files.failed("cannot be written", e));
        let digest = digest::read(&disk, progress, keep, failed)?;
        if version.digest.as_ref().is_some_and(|expected| *expected != digest) {
            return Err(files.damaged("it is not the image that the registry has: pull it again".into()));
        }
        let stored_bytes = files.finish(&disk, list)?;
        self.record_ready(version, publish, stored_bytes, &digest)
    }

    /// Records that a version can be used, whose files are complete.
    pub(super) fn record_ready(
        &self,
        version: &ImageVersion,
        publish: bool,
        stored_bytes: u64,
        digest: &str,
    ) -> Result<(), HostError> {
        self.objects.change(|changes| {
            let mut image = self.image(changes, &version.image)?;
            let ready = ImageVersion {
                state: VersionState::Ready,
                stored_bytes,
                digest: Some(digest.to_owned()),
                ..version.clone()
            };
            if publish || image.value.published.is_none() {
                image.value.published = Some(version.version);
                changes.put(version.image.as_str(), &image.value);
                crate::catalogs::follow(changes, &version.image, version.version)?;
            }
            changes.put(&key(&version.image, version.version), &ready);
            Ok(())
        })
    }
}

/// Data of a new version, before it is recorded.
pub(super) struct NewVersion<'a> {
    pub name: &'a Name,
    pub origin: &'a Origin,
    pub store: &'a StoreFolder,
    pub size_bytes: u64,
    pub notes: &'a [String],
    /// Number and digest of a version that is pulled from a registry. Others get the next number.
    pub pulled: Option<(u32, &'a str)>,
    /// Of a version that is streamed.
    pub residency: Option<Residency>,
}

impl NewVersion<'_> {
    /// Records the unfinished version, and the image if it is the first one.
    pub fn record(&self, changes: &mut Changes) -> Result<ImageVersion, HostError> {
        let NewVersion { name, origin, store, size_bytes, notes, pulled, residency } = *self;
        if let Some(fault) = size_fault(size_bytes) {
            return Err(HostError::invalid(format!("{name}: its disk {fault}")));
        }
        let image = changes.get::<Image>(name.as_str())?.map(|image| image.value);
        // Numbers are never reused, even after a deletion or a failure; only what is pulled is the same image each time.
        let last = changes.get::<LastVersion>(name.as_str())?.map_or(0, |last| last.value.version);
        let last = last.max(highest(&store.path, name));
        let number = match pulled {
            None => last.checked_add(1).ok_or_else(|| {
                HostError::new(
                    ErrorCode::Exhausted,
                    format!("{name} has the highest version that there can be"),
                )
            })?,
            Some((number, _)) if changes.get::<ImageVersion>(&key(name, number))?.is_some() => {
                let message = format!("{name}:{number} is being pulled by another request: wait for it");
                return Err(HostError::new(ErrorCode::Conflict, message));
            }
            Some((number, _)) => number,
        };
        let newest = last.max(number);
        let mut image = image.unwrap_or_else(|| Image {
            name: name.clone(),
            published: None,
            tags: BTreeMap::new(),
            newest,
            created: Timestamp::now(),
        });
        image.newest = newest;
        let version = ImageVersion {
            image: name.clone(),
            version: number,
            state: VersionState::Importing,
            origin: origin.clone(),
            store: store.name.clone(),
            size_bytes,
            stored_bytes: 0,
            digest: pulled.map(|(_, digest)| digest.to_owned()),
            residency,
            notes: notes.to_vec(),
            created: Timestamp::now(),
        };
        changes.put(name.as_str(), &LastVersion { version: newest });
        changes.put(name.as_str(), &image);
        changes.put(&key(name, number), &version);
        Ok(version)
    }
}

/// Returns the commits in progress: the version, the machine, and the base of its disk.
fn commits(changes: &mut Changes) -> Result<Vec<(ImageVersion, Name, ImageRef)>, HostError> {
    // An unreadable one was not begun by this daemon, and no others are in progress.
    let all = changes.list_readable_below::<ImageVersion>("")?.into_iter().map(|version| version.value);
    let under_way = all.filter(|version| version.state == VersionState::Importing);
    let commit = |version: ImageVersion| match version.origin.clone() {
        Origin::Commit { machine, from } => Some((version, machine, from)),
        Origin::Import { .. } | Origin::Registry { .. } => None,
    };
    Ok(under_way.filter_map(commit).collect())
}

/// Refuses if the disk of one of these machines is being committed. The machines' records must have been read in this
/// transaction: a commit writes them when it begins.
pub(crate) fn check_none_committed<'a>(
    changes: &mut Changes,
    machines: impl IntoIterator<Item = &'a Name>,
) -> Result<(), HostError> {
    let commits = commits(changes)?;
    for name in machines {
        if let Some((version, ..)) = commits.iter().find(|(_, machine, _)| machine == name) {
            let message = format!(
                "{name} is being committed as {}:{}: wait for that, or cancel it ('spillway operation list')",
                version.image, version.version
            );
            return Err(HostError::new(ErrorCode::Conflict, message));
        }
    }
    Ok(())
}

/// Refuses if a version is being committed on top of this one, or of any version of the image.
pub(super) fn check_no_commit_reads(
    changes: &mut Changes,
    image: &Name,
    version: Option<u32>,
) -> Result<(), HostError> {
    let reads = |from: &ImageRef| {
        from.name == *image
            && version.is_none_or(|version| from.version.map(NonZeroU32::get) == Some(version))
    };
    match commits(changes)?.into_iter().find(|(_, _, from)| reads(from)) {
        Some((_, machine, from)) => {
            let message = format!(
                "{from}: the commit of the machine '{machine}' reads it: wait for that, or cancel it"
            );
            Err(HostError::new(ErrorCode::InUse, message))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operations::Operations;
    use crate::store::failing::FailingStore;
    use crate::store::{Objects, SqliteStore, Store};
    use crate::stores::Stores;
    use spillway_api::{OperationState, SourceFormat};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    /// The daemon ends after the transaction that records the version.
    #[tokio::test]
    async fn a_key_is_recorded_with_its_version() {
        let dir = tempfile::tempdir().unwrap();
        let (left, file) = (Arc::new(AtomicUsize::new(usize::MAX)), dir.path().join("disk"));
        std::fs::write(&file, [7; 4096]).unwrap();
        let store: Arc<dyn Store> = Arc::new(SqliteStore::open(&dir.path().join("db")).unwrap());
        let images = |store: Arc<dyn Store>| {
            let objects = Objects::new(store);
            let stores = Stores::open(objects.clone(), &dir.path().join("store")).unwrap();
            let mut complain = |why: &str| panic!("{why}");
            Images::open(
                objects.clone(),
                Operations::default(),
                stores,
                crate::streaming::Streaming::of_nothing(objects),
                &mut complain,
            )
            .unwrap()
        };
        let name: Name = "debian".parse().unwrap();
        let path = file.display().to_string();
        let import = ImageImport { path, format: SourceFormat::Raw, store: None };
        let key = IdempotentRequest::new("ci", "imports/debian", "1", &import);
        let first = images(Arc::new(FailingStore::counted(Arc::clone(&store), Arc::clone(&left))));
        left.store(1, Ordering::Relaxed);
        let (begun, is_repeated) = first.import(&name, import.clone(), &key).unwrap();
        assert!(!is_repeated);
        let ended = first.operations.wait(begun.id, Duration::from_secs(30)).await.unwrap();
        assert!(matches!(ended.state, OperationState::Failed { .. }), "{ended:?}");

        let second = images(store);
        assert_eq!(second.import(&name, import, &key).unwrap(), (begun, true));
        assert_eq!(second.list().unwrap(), [], "no other one is made");
    }

    /// What could not be begun has no key.
    #[test]
    fn an_import_that_is_refused_leaves_no_key() {
        let dir = tempfile::tempdir().unwrap();
        let objects = Objects::new(Arc::new(SqliteStore::open(&dir.path().join("db")).unwrap()));
        let stores = Stores::open(objects.clone(), &dir.path().join("store")).unwrap();
        let mut complain = |why: &str| panic!("{why}");
        let images = Images::open(
            objects.clone(),
            Operations::default(),
            stores,
            crate::streaming::Streaming::of_nothing(objects),
            &mut complain,
        )
        .unwrap();
        let (name, file): (Name, _) = ("debian".parse().unwrap(), dir.path().join("disk"));
        std::fs::write(&file, [7; 4096]).unwrap();
        let path = file.display().to_string();
        let import = ImageImport { path, format: SourceFormat::Raw, store: None };
        let key = IdempotentRequest::new("ci", "imports/debian", "1", &import);
        // As many as may run at a time.
        let (ends, end) = std::sync::mpsc::channel::<()>();
        let end = Arc::new(std::sync::Mutex::new(end));
        let busy = std::iter::from_fn(|| {
            let operation = images.operations.describe("busy".into(), None);
            let end = Arc::clone(&end);
            let waits = move |_: &Progress| {
                let _ = end.lock().map(|end| end.recv());
                Ok(())
            };
            images.operations.begin(operation, waits).ok()
        });
        assert_eq!(busy.count(), 8);
        let refused = images.import(&name, import.clone(), &key).unwrap_err();
        assert_eq!(refused.code, ErrorCode::Exhausted);
        assert_eq!((images.list().unwrap(), images.begun(&key).unwrap()), (vec![], None));
        drop(ends);
    }
}
