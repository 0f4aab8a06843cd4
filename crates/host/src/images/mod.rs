//! Images and their versions: publish, tag, verify, delete. Owns their files and records.
//!
//! Invariant: a `ready` version has complete files, which never change; files without a record, or whose record says that
//! they are unfinished or being removed, are removed at the next start.

mod boot_choice;
mod check;
mod checks;
mod complaint;
mod convert;
mod digest;
mod files;
mod making;
mod merged;
mod residency;
mod sharing;
mod source;
mod streamed;

pub use boot_choice::BootChoice;
pub(crate) use convert::has_room;
pub use digest::CHUNK_BYTES;
pub use files::VersionFiles;
pub(crate) use making::check_none_committed;
pub use residency::WholeImages;
pub use streamed::BaseFile;

use crate::backup::{RESTORED, RestoreMark};
use crate::catalogs;
use crate::error::HostError;
use crate::machines::leftovers;
use crate::operations::Operations;
use crate::store::{Changes, Object, Objects, RecordKind, StoredRecord};
use crate::stores::Stores;
use crate::streaming::Streaming;
use crate::tags::Tag;
use digest::ChunkDigest;
use making::LastVersion;
use spillway_api::{
    Catalog, ErrorCode, HistoryEntry, Image, ImageDetails, ImageRef, ImageVersion, Name, Operation, Origin,
    StoreFolder, VersionState,
};
use spillway_image::size_fault;
use std::collections::BTreeMap;
use std::io::Read;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

/// Number of tags that an image has at most.
const MOST_TAGS: usize = 256;

impl StoredRecord for Image {
    const PREFIX: &'static str = "images/";
    const WORD: &'static str = "image";
}

impl StoredRecord for ImageVersion {
    const PREFIX: &'static str = "versions/";
    const WORD: &'static str = "version";
}

/// Kinds of records of this module.
pub(crate) const RECORDS: [RecordKind; 4] = [
    RecordKind::of::<Image>(),
    RecordKind::of::<ImageVersion>(),
    RecordKind::of::<LastVersion>(),
    RecordKind::of::<WholeImages>(),
];

/// The images of a host. A clone is the same images.
#[derive(Clone)]
pub struct Images {
    objects: Objects,
    operations: Operations,
    stores: Stores,
    streaming: Streaming,
    checks: checks::Checks,
    /// Held from the transaction that records a new version until its operation has begun.
    beginning: Arc<Mutex<()>>,
}

/// Conditions of a change.
#[derive(Clone, Copy, Debug, Default)]
pub struct ImageChangeTerms {
    /// Tag of the image on which it was decided: nothing is done if the image has another one.
    pub expected: Option<Tag>,
    /// Whether the object must not exist before.
    pub is_new: bool,
    /// Whether everything is checked and nothing changed.
    pub dry_run: bool,
}

/// Reference to a version, such as `debian:3`.
fn reference(image: &Name, version: u32) -> ImageRef {
    ImageRef { name: image.clone(), version: NonZeroU32::new(version) }
}

/// Key of a version in the store, which sorts by number.
pub(crate) fn key(image: &Name, version: u32) -> String {
    format!("{image}/{version:010}")
}

/// Refuses a version that is too large for a disk, which an earlier daemon may have accepted.
pub(crate) fn check_size(version: &ImageVersion) -> Result<(), HostError> {
    match size_fault(version.size_bytes) {
        Some(fault) => {
            let message = format!("{}:{} {fault}: import a smaller image", version.image, version.version);
            Err(HostError::invalid(message).permanent())
        }
        None => Ok(()),
    }
}

impl Images {
    /// Of a host that streams nothing.
    #[cfg(test)]
    pub fn of_whole(objects: &Objects, stores: &Stores) -> Images {
        let (operations, streaming) = (Operations::default(), Streaming::of_nothing(objects.clone()));
        let mut complain = |why: &str| panic!("{why}");
        Images::open(objects.clone(), operations, stores.clone(), streaming, &mut complain)
            .expect("its records can be read")
    }

    /// Opens the recorded images. Undoes what an earlier daemon did not finish; if that fails, `complain` is called and
    /// the next start tries again.
    pub fn open(
        objects: Objects,
        operations: Operations,
        stores: Stores,
        streaming: Streaming,
        complain: &mut dyn FnMut(&str),
    ) -> Result<Images, HostError> {
        let checks = checks::Checks::default();
        let images = Images { objects, operations, stores, streaming, checks, beginning: Arc::default() };
        // A backup may be older than the end of an import or a deletion that it names.
        let is_restored = images.objects.get::<RestoreMark>(RESTORED).map_or(true, |mark| mark.is_some());
        for version in images.objects.list::<ImageVersion>()? {
            let undone = match version.value.state {
                VersionState::Ready => Ok(()),
                _ if is_restored => images.forget(&version.value),
                _ => images.remove(&version.value),
            };
            undone.unwrap_or_else(|e| complain(&e.message));
        }
        for store in images.stores.list()? {
            let swept = images.stores.check(&store).and_then(|()| {
                let failed = |e| HostError::new(ErrorCode::Internal, format!("store {}: {e}", store.name));
                files::sweep(&store.path).map_err(failed)
            });
            swept.unwrap_or_else(|e| complain(&e.message));
        }
        Ok(images)
    }

    /// Returns all images, in the order of their names.
    pub fn list(&self) -> Result<Vec<Image>, HostError> {
        Ok(self.objects.list()?.into_iter().map(|image| image.value).collect())
    }

    /// Iterates over the images after this name, in the order of their names, reading some at a time.
    pub fn list_after(&self, after: &str) -> impl Iterator<Item = Result<Image, HostError>> + use<'_> {
        self.objects.each_after::<Image>(after).map(|image| Ok(image?.value))
    }

    /// Returns an image with its versions.
    pub fn details(&self, name: &Name) -> Result<ImageDetails, HostError> {
        self.objects.change(|changes| self.details_within(changes, name))
    }

    /// Does the same in a transaction, which fails if the image changes before its commit.
    fn details_within(&self, changes: &mut Changes, name: &Name) -> Result<ImageDetails, HostError> {
        let image = self.image(changes, name)?.value;
        let versions = changes.list_readable_below::<ImageVersion>(&format!("{name}/"))?;
        let versions = versions.into_iter().map(|version| version.value).collect();
        Ok(ImageDetails { image, versions, cached: Vec::new() })
    }

    /// Returns the file of a ready version, which must be whole.
    pub fn disk(&self, name: &Name, version: u32) -> Result<PathBuf, HostError> {
        let version = self.objects.change(|changes| self.ready(changes, name, version))?.value;
        check_size(&version)?;
        streamed::check_whole(&version, "copied")?;
        let store = self.store_of(&version)?;
        Ok(VersionFiles::of(&store.path, name, version.version).disk())
    }

    /// Returns the list of a ready version's digests, and the digest of the list.
    pub fn digests(&self, name: &Name, version: u32) -> Result<(PathBuf, String), HostError> {
        let version = self.objects.change(|changes| self.ready(changes, name, version))?.value;
        let files = VersionFiles::of(&self.stores.get(&version.store)?.path, name, version.version);
        let digest = version.digest.ok_or_else(|| files.damaged("its record has no digest".into()))?;
        Ok((files.digests(), digest))
    }

    /// Returns the size of a ready version.
    pub fn size(&self, name: &Name, version: u32) -> Result<u64, HostError> {
        Ok(self.objects.change(|changes| self.ready(changes, name, version))?.value.size_bytes)
    }

    /// Publishes a version: requests without a version use it, and catalogs that follow the image are updated.
    pub fn publish(
        &self,
        name: &Name,
        version: u32,
        terms: ImageChangeTerms,
    ) -> Result<(Tag, Image), HostError> {
        let found = self.objects.change(|changes| self.ready(changes, name, version))?.value;
        self.stream_to_publish(&found, terms.dry_run)?;
        let published = self.change_image(name, terms, |image, changes| {
            check_size(&self.ready(changes, name, version)?.value)?;
            image.published = Some(version);
            catalogs::follow(changes, name, version)
        });
        if published.is_err() && found.residency.is_some() {
            self.look_at_residencies();
        }
        published
    }

    /// Sets a tag to a version; a version that had the tag loses it.
    pub fn tag(
        &self,
        name: &Name,
        tag: &Name,
        version: u32,
        terms: ImageChangeTerms,
    ) -> Result<(Tag, Image), HostError> {
        self.change_image(name, terms, |image, changes| {
            self.ready(changes, name, version)?;
            if let Some(tagged) = image.tags.get(tag).filter(|_| terms.is_new) {
                let message = format!("the tag '{tag}' exists already: it names {name}:{tagged}");
                return Err(HostError::new(ErrorCode::PreconditionFailed, message));
            }
            if image.tags.len() >= MOST_TAGS && !image.tags.contains_key(tag) {
                let message = format!(
                    "{name} has {MOST_TAGS} tags, and no image can have more: take one away first ('spillway image tag {name} TAG')"
                );
                return Err(HostError::new(ErrorCode::Conflict, message));
            }
            image.tags.insert(tag.clone(), version);
            Ok(())
        })
    }

    /// Removes a tag.
    pub fn untag(&self, name: &Name, tag: &Name, terms: ImageChangeTerms) -> Result<(Tag, Image), HostError> {
        self.change_image(name, terms, |image, _| match image.tags.remove(tag) {
            Some(_) => Ok(()),
            None => {
                let tags = image.tags.keys().map(Name::as_str);
                Err(HostError::not_found(&format!("tag of {name}"), tag.as_str(), tags))
            }
        })
    }

    /// Begins to read a version again and compare it with its digests.
    pub fn verify(&self, name: &Name, version: u32) -> Result<Operation, HostError> {
        let version = self.objects.change(|changes| self.ready(changes, name, version))?.value;
        streamed::check_whole(&version, "verified")?;
        let store = self.stores.get(&version.store)?;
        let files = VersionFiles::of(&store.path, name, version.version);
        let what = format!("verify {name}:{}", version.version);
        let operation = self.operations.describe(what, Some(reference(name, version.version)));
        self.operations.begin(operation, move |progress| {
            progress.set_total(version.size_bytes);
            let (disk, mut list) = files.open()?;
            let (mut at, mut differing, mut first) = (0, 0, None);
            let compare = |found: ChunkDigest| {
                let mut kept: ChunkDigest = [0; 32];
                list.read_exact(&mut kept).map_err(|_| files.damaged("its list of digests is cut off".into()))?;
                if kept != found {
                    differing += 1;
                    first.get_or_insert(at);
                }
                at += CHUNK_BYTES;
                Ok(())
            };
            let root = digest::read(&disk, progress, compare, |e| files.failed("cannot be read", e))?;
            match first {
                Some(first) => Err(files.damaged(format!(
                    "{differing} of its chunks of {CHUNK_BYTES} bytes differ, the first at byte {first}: import it again"
                ))),
                None if version.digest.as_ref() != Some(&root) => {
                    let size = version.size_bytes;
                    Err(files.damaged(format!("it is not the disk of {size} bytes that its record names: import it again")))
                }
                None => Ok(()),
            }
        })
    }

    /// Deletes a version that is not in use, and the image with its last version. Continues an interrupted deletion.
    pub fn delete_version(
        &self,
        name: &Name,
        version: u32,
        terms: ImageChangeTerms,
    ) -> Result<(), HostError> {
        let deleting = self.objects.change(|changes| {
            let before = self.details_within(changes, name)?;
            check_tag(&before, terms.expected)?;
            let found = self.version(changes, name, version)?.value;
            if found.state == VersionState::Deleting {
                return Ok(found);
            }
            self.check_ready(&found)?;
            let mut image = before.image;
            let others = changes.list_below::<ImageVersion>(&format!("{name}/"))?.len() > 1;
            let in_use = |why: String| HostError::new(ErrorCode::InUse, format!("{name}:{version}: {why}"));
            if image.published == Some(version) && others {
                return Err(in_use("it is published: publish another version first".into()));
            }
            self.check_unused(changes, name, Some(version))?;
            if let Some((tag, _)) = image.tags.iter().find(|(_, v)| **v == version) {
                return Err(in_use(format!("it is tagged '{tag}': take the tag away first")));
            }
            // Write the image even if it is unchanged: an import that begins now must conflict with this deletion.
            image.published = image.published.filter(|published| *published != version);
            changes.put(name.as_str(), &image);
            let deleting = ImageVersion { state: VersionState::Deleting, ..found };
            changes.put(&key(name, version), &deleting);
            if terms.dry_run {
                changes.forget();
            }
            Ok(deleting)
        })?;
        self.end_deletion([&deleting], terms)
    }

    /// Deletes an image with all its versions. Continues an interrupted deletion.
    pub fn delete(&self, name: &Name, terms: ImageChangeTerms) -> Result<(), HostError> {
        let deleting = self.objects.change(|changes| {
            let before = self.details_within(changes, name)?;
            check_tag(&before, terms.expected)?;
            let image = before.image;
            self.check_unused(changes, name, None)?;
            let versions = changes.list_below::<ImageVersion>(&format!("{name}/"))?;
            if let Some(busy) = versions.iter().find(|v| v.value.state == VersionState::Importing) {
                let number = busy.value.version;
                let message = format!("{name}:{number} is being made: wait for it, or cancel it");
                return Err(HostError::new(ErrorCode::Conflict, message));
            }
            for version in &versions {
                let deleting = ImageVersion { state: VersionState::Deleting, ..version.value.clone() };
                changes.put(&version.name, &deleting);
            }
            changes.put(name.as_str(), &Image { published: None, tags: BTreeMap::new(), ..image });
            if terms.dry_run {
                changes.forget();
            }
            Ok(versions)
        })?;
        self.end_deletion(deleting.iter().map(|version| &version.value), terms)
    }

    /// Removes versions that are marked as being deleted. A dry run only checks that their stores can be used.
    fn end_deletion<'a>(
        &self,
        versions: impl IntoIterator<Item = &'a ImageVersion>,
        terms: ImageChangeTerms,
    ) -> Result<(), HostError> {
        versions.into_iter().try_for_each(|version| match terms.dry_run {
            true => self.store_of(version).map(drop),
            false => self.remove(version),
        })
    }

    /// Returns the store of a version, if it can be used.
    fn store_of(&self, version: &ImageVersion) -> Result<StoreFolder, HostError> {
        let store = self.stores.get(&version.store)?;
        self.stores.check(&store)?;
        Ok(store)
    }

    /// Removes a version's files, then its record, and the image's record with the last version. May be repeated.
    fn remove(&self, version: &ImageVersion) -> Result<(), HostError> {
        let store = self.store_of(version)?;
        self.stop_streaming(version)?;
        VersionFiles::of(&store.path, &version.image, version.version).remove()?;
        self.forget(version)
    }

    /// Removes the record of a version, and of an image without another one.
    fn forget(&self, version: &ImageVersion) -> Result<(), HostError> {
        self.objects.change(|changes| {
            // Read the image first: an import writes it, so that no version can be added unnoticed before the list is
            // read.
            let image = changes.get::<Image>(version.image.as_str())?;
            let versions = changes.list_below::<ImageVersion>(&format!("{}/", version.image))?;
            changes.delete::<ImageVersion>(&key(&version.image, version.version));
            if versions.iter().all(|v| v.value.version == version.version) {
                changes.delete::<Image>(version.image.as_str());
            } else if let Some(image) = image {
                // An import that begins now must not treat this as the last version.
                changes.put(version.image.as_str(), &image.value);
            }
            Ok(())
        })
    }

    fn change_image(
        &self,
        name: &Name,
        terms: ImageChangeTerms,
        mut change: impl FnMut(&mut Image, &mut Changes) -> Result<(), HostError>,
    ) -> Result<(Tag, Image), HostError> {
        self.objects.change(|changes| {
            let mut details = self.details_within(changes, name)?;
            let before = check_tag(&details, terms.expected)?;
            change(&mut details.image, changes)?;
            if terms.dry_run {
                changes.forget();
                return Ok((before, details.image));
            }
            changes.put(name.as_str(), &details.image);
            Ok((Tag::of(&details), details.image))
        })
    }

    fn image(&self, changes: &mut Changes, name: &Name) -> Result<Object<Image>, HostError> {
        changes.get::<Image>(name.as_str())?.ok_or_else(|| self.no_image(name))
    }

    /// Returns a ready version. The transaction fails if that changes before its commit.
    fn ready(
        &self,
        changes: &mut Changes,
        name: &Name,
        version: u32,
    ) -> Result<Object<ImageVersion>, HostError> {
        let found = self.version(changes, name, version)?;
        self.check_ready(&found.value)?;
        Ok(found)
    }

    fn check_ready(&self, version: &ImageVersion) -> Result<(), HostError> {
        let why = match version.state {
            VersionState::Ready => return Ok(()),
            VersionState::Importing => match version.origin {
                Origin::Import { .. } => "its import has not ended",
                Origin::Commit { .. } => "its commit has not ended",
                Origin::Registry { .. } => "its pull has not ended",
            },
            VersionState::Deleting => "it is being deleted",
        };
        let message = format!("{}:{} cannot be used: {why}", version.image, version.version);
        Err(HostError::new(ErrorCode::Conflict, message))
    }

    fn version(
        &self,
        changes: &mut Changes,
        name: &Name,
        version: u32,
    ) -> Result<Object<ImageVersion>, HostError> {
        self.image(changes, name)?;
        if let Some(found) = changes.get::<ImageVersion>(&key(name, version))? {
            return Ok(found);
        }
        let numbers = self.objects.list_below::<ImageVersion>(&format!("{name}/"))?;
        let numbers: Vec<String> = numbers.iter().map(|v| v.value.version.to_string()).collect();
        let message = format!("there is no version {version} of {name}: there are {}", numbers.join(", "));
        Err(HostError::new(ErrorCode::NotFound, message))
    }

    /// Refuses if the version, or any of the image, is in use: by a catalog's history, since the catalog may be rolled
    /// back; by a leftover disk of a deleted machine; or by a commit.
    fn check_unused(
        &self,
        changes: &mut Changes,
        name: &Name,
        version: Option<u32>,
    ) -> Result<(), HostError> {
        for catalog in changes.list_below::<Catalog>("")? {
            let uses = |entry: &&HistoryEntry| {
                entry.image == *name && version.is_none_or(|version| entry.version == version)
            };
            if let Some(entry) = catalog.value.history.iter().find(uses) {
                let message = format!(
                    "{name}:{} is in the history of the catalog '{}': delete that first",
                    entry.version, catalog.name
                );
                return Err(HostError::new(ErrorCode::InUse, message));
            }
        }
        catalogs::check_no_removal(changes)?;
        leftovers::check_no_leftover_needs(changes, name, version)?;
        making::check_no_commit_reads(changes, name, version)
    }

    fn no_image(&self, name: &Name) -> HostError {
        let images = self.list().unwrap_or_default();
        HostError::not_found("image", name.as_str(), images.iter().map(|image| image.name.as_str()))
    }
}

/// Refuses to change an image whose tag is not the one that the client has read. Returns the tag.
fn check_tag(details: &ImageDetails, expected: Option<Tag>) -> Result<Tag, HostError> {
    let tag = Tag::of(details);
    tag.check(&format!("image {}", details.image.name), expected)?;
    Ok(tag)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::idempotency::IdempotentRequest;
    use crate::store::SqliteStore;
    use spillway_api::{ImageImport, SourceFormat};
    use std::path::Path;
    use std::time::Duration;

    fn open(objects: &Objects, dir: &Path) -> Images {
        let stores = Stores::open(objects.clone(), &dir.join("store")).unwrap();
        let mut complain = |why: &str| panic!("{why}");
        Images::open(
            objects.clone(),
            Operations::default(),
            stores,
            Streaming::of_nothing(objects.clone()),
            &mut complain,
        )
        .unwrap()
    }

    async fn import(images: &Images, dir: &Path) -> u32 {
        let (name, path) = ("debian".parse().unwrap(), dir.join("disk").display().to_string());
        let import = ImageImport { path, format: SourceFormat::Raw, store: None };
        let begun = images.import(&name, import, &IdempotentRequest::default()).unwrap().0;
        images.operations.wait(begun.id, Duration::from_secs(30)).await.unwrap();
        let version = images.list().unwrap()[0].newest;
        images.disk(&name, version).unwrap();
        version
    }

    /// Writes the records of a time at which the import of version 1 or its deletion had not ended.
    fn turn_back(objects: &Objects, state: VersionState, is_restored: bool) {
        objects
            .change(|changes| {
                let name = key(&"debian".parse().unwrap(), 1);
                let version = changes.get::<ImageVersion>(&name)?.unwrap().value;
                changes.put(&name, &ImageVersion { state, ..version });
                if is_restored {
                    changes.put(RESTORED, &RestoreMark {});
                }
                Ok::<_, HostError>(())
            })
            .unwrap();
    }

    #[tokio::test]
    async fn a_restore_keeps_the_files_of_versions_that_its_backup_calls_unfinished() {
        for state in [VersionState::Importing, VersionState::Deleting] {
            let dir = tempfile::tempdir().unwrap();
            std::fs::write(dir.path().join("disk"), [7; 4096]).unwrap();
            let objects = Objects::new(Arc::new(SqliteStore::open(&dir.path().join("db")).unwrap()));
            assert_eq!(import(&open(&objects, dir.path()), dir.path()).await, 1);
            let disk = dir.path().join("store/images/debian/1/disk.raw");
            turn_back(&objects, state, true);
            assert_eq!(open(&objects, dir.path()).list().unwrap(), [], "{state:?}: it has no record");
            assert_eq!(std::fs::read(&disk).unwrap(), [7; 4096], "{state:?}");
            // Whoever comes later does not touch it, and takes another number.
            objects
                .change(|changes| {
                    changes.delete::<RestoreMark>(RESTORED);
                    Ok::<_, HostError>(())
                })
                .unwrap();
            assert_eq!(import(&open(&objects, dir.path()), dir.path()).await, 2, "{state:?}");
            assert_eq!(std::fs::read(&disk).unwrap(), [7; 4096], "{state:?}");
        }
    }

    /// Of the daemon's own records, which no restore has replaced.
    #[tokio::test]
    async fn an_unfinished_version_is_removed_at_the_next_start() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("disk"), [7; 4096]).unwrap();
        let objects = Objects::new(Arc::new(SqliteStore::open(&dir.path().join("db")).unwrap()));
        import(&open(&objects, dir.path()), dir.path()).await;
        turn_back(&objects, VersionState::Importing, false);
        assert_eq!(open(&objects, dir.path()).list().unwrap(), []);
        assert!(!dir.path().join("store/images/debian").exists());
    }
}
