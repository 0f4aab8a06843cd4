//! Versions that are pushed to registries and pulled from them. Owns what a pulled version is called here.
//!
//! Invariant: a version that was pulled has the number and the digest that it has in the registry, so that `debian:3` is the same
//! disk on every host.

use super::making::NewVersion;
use super::streamed::check_whole;
use super::{Images, VersionFiles, reference};
use crate::confined::path_of;
use crate::error::HostError;
use crate::idempotency::IdempotentRequest;
use crate::operations::Progress;
use crate::registries::{JobFiles, Registries, strange};
use spillway_api::{
    ErrorCode, ImageManifest, ImagePull, ImagePush, ImageRef, ImageVersion, Name, Operation,
    OperationOutcome, Origin, PushOutcome, Residency, VersionState,
};
use spillway_image::digests::{CHUNK_BYTES, list_bytes};
use spillway_registry::job::{JobMessage, ResolvedImage, Work};
use spillway_registry::{Index, Manifest, trusted_comment};
use std::fs::File;
use std::num::NonZeroU32;
use std::os::unix::fs::FileExt;
use std::path::Path;

impl Images {
    /// Returns the manifest that a version has in registries, for a signature.
    pub fn manifest(&self, name: &Name, number: u32) -> Result<ImageManifest, HostError> {
        let (version, files) = self.ready_files(name, number)?;
        let failed = |e| files.failed("cannot be read", e);
        let mut list = vec![0; list_bytes(version.size_bytes) as usize];
        File::open(files.digests()).and_then(|file| file.read_exact_at(&mut list, 0)).map_err(failed)?;
        let (digests, _) = list.as_chunks();
        let index =
            Index { size_bytes: version.size_bytes, chunk_bytes: CHUNK_BYTES, digests: digests.to_vec() };
        let manifest = Manifest::of(&index);
        if version.digest.as_ref() != Some(&manifest.digest) {
            return Err(
                files.damaged("its list of digests is not the one of its record: import it again".into())
            );
        }
        let text = String::from_utf8(manifest.to_bytes())
            .map_err(|e| HostError::new(ErrorCode::Internal, format!("a manifest is no text: {e}")))?;
        let trusted_comment = trusted_comment(name.as_str(), number, &index.root());
        Ok(ImageManifest { manifest: text, trusted_comment })
    }

    /// Begins to push a version to a registry, under the same name and number.
    pub fn push(
        &self,
        registries: &Registries,
        name: &Name,
        number: u32,
        push: ImagePush,
    ) -> Result<Operation, HostError> {
        let (version, files) = self.ready_files(name, number)?;
        check_whole(&version, "pushed")?;
        let registry = registries.get(&push.registry)?;
        let what = format!("push {name}:{number} to {}", push.registry);
        let operation = self.operations.describe(what, Some(reference(name, number)));
        let (registries, name) = (registries.clone(), name.to_string());
        self.operations.begin(operation, move |progress| {
            progress.set_total(version.size_bytes);
            let open = |path: &Path| File::open(path).map_err(|e| files.failed("cannot be read", e));
            let (disk, digests) = (open(&files.disk())?, open(&files.digests())?);
            let work = Work::Push {
                name,
                version: number,
                disk: path_of(&disk).into(),
                digests: path_of(&digests).into(),
                size_bytes: version.size_bytes,
                signature: push.signature,
                id: uuid::Uuid::new_v4().to_string(),
            };
            let job_files = JobFiles { reads: vec![&disk, &digests], writes: None };
            match registries.run(&registry, work, job_files, progress)? {
                JobMessage::Pushed(report) => {
                    progress.set_outcome(OperationOutcome::Pushed(PushOutcome {
                        was_there: report.was_there,
                        chunks: report.chunks,
                        shared_chunks: report.shared_chunks,
                        found_chunks: report.found_chunks,
                        sent_chunks: report.sent_chunks,
                        sent_bytes: report.sent_bytes,
                    }));
                    Ok(())
                }
                other => Err(strange(&other)),
            }
        })
    }

    /// An operation that was begun lately.
    pub fn operation(&self, id: u64) -> Option<Operation> {
        self.operations.list().into_iter().find(|operation| operation.id == id)
    }

    /// Begins to copy a version from a registry, or to stream it. If the host has it already, the operation changes at most its
    /// residency. The flag is `true` as with an import.
    pub fn pull(
        &self,
        registries: &Registries,
        name: &Name,
        pull: ImagePull,
        key: &IdempotentRequest,
    ) -> Result<(Operation, bool), HostError> {
        if let Some(begun) = self.begun(key)? {
            return Ok((begun, true));
        }
        let registry = registries.get(&pull.registry)?;
        let store = self.stores.for_images(pull.store.as_ref())?;
        self.stores.check(&store)?;
        let found = registries.resolve(&registry, &pull.image)?;
        let number = NonZeroU32::new(found.version);
        let image = ImageRef { name: pull.image.name.clone(), version: number };
        let what = format!("pull {name}:{} from {}/{image}", found.version, pull.registry);
        if let Some(there) = self.has(name, &found, &what)? {
            let change = changed_residency(&there, &pull)?;
            let operation = self.operations.describe(what, Some(reference(name, found.version)));
            let (images, name) = (self.clone(), name.clone());
            let begun = self.operations.begin(operation, move |_| {
                change.map_or(Ok(()), |residency| images.set_residency(&name, found.version, residency))
            });
            return begun.map(|operation| (operation, false));
        }
        let origin = Origin::Registry { registry: pull.registry.clone(), image };
        let new = NewVersion {
            name,
            origin: &origin,
            store: &store,
            size_bytes: found.size_bytes,
            notes: &[],
            pulled: Some((found.version, &found.digest)),
            residency: pull.residency,
        };
        let registries = registries.clone();
        let digest = found.digest.clone();
        self.begin(
            key,
            |changes| Ok((what.clone(), new.record(changes)?)),
            move |images, version, progress| match pull.residency {
                Some(_) => images.make_streamed(version, &registries, &pull.registry, progress),
                None => images.make(version, false, progress, |files, _| {
                    fetch(&registries, &pull.registry, digest, files, progress)
                }),
            },
        )
    }

    /// Fetches the digests of a version's chunks, begins to serve the chunks, and records that the version can be used.
    fn make_streamed(
        &self,
        version: &ImageVersion,
        registries: &Registries,
        registry: &Name,
        progress: &Progress,
    ) -> Result<(), HostError> {
        progress.set_total(version.size_bytes);
        let store = self.stores.get(&version.store)?;
        let files = VersionFiles::of(&store.path, &version.image, version.version);
        let digest =
            version.digest.clone().ok_or_else(|| files.damaged("its record has no digest".into()))?;
        let (list, path) = files.begin_streamed()?;
        let folder = path.parent().map(Path::to_owned);
        let work = Work::List { digest: digest.clone(), to: path };
        match registries.run(
            &registries.get(registry)?,
            work,
            JobFiles { reads: vec![], writes: folder },
            progress,
        )? {
            JobMessage::Listed(boot_sets) => self.streaming.boot_sets().take(&digest, &boot_sets)?,
            other => return Err(strange(&other)),
        }
        let stored_bytes = files.finish_streamed(&list)?;
        self.stream(version, false)?;
        progress.set_done(version.size_bytes);
        self.record_ready(version, false, stored_bytes, &digest)?;
        self.look_at_residencies();
        Ok(())
    }

    /// The version, if the host has it already. It is an error if it has another one of that number.
    fn has(&self, name: &Name, found: &ResolvedImage, what: &str) -> Result<Option<ImageVersion>, HostError> {
        let number = found.version;
        let there = self.objects.get::<ImageVersion>(&super::key(name, number))?;
        match there.map(|there| there.value) {
            None => Ok(None),
            Some(there) if there.digest.as_ref() != Some(&found.digest) => {
                let message = format!(
                    "{what}: this host has a {name}:{number} with another digest: give the image another name here ('image import \
                     NAME --from'), or delete that version"
                );
                Err(HostError::new(ErrorCode::Exists, message))
            }
            Some(there) if there.state == VersionState::Ready => Ok(Some(there)),
            Some(_) => {
                let message = format!("{what}: {name}:{number} is being made or deleted: wait for that");
                Err(HostError::new(ErrorCode::Conflict, message))
            }
        }
    }

    /// A ready version and its files.
    fn ready_files(&self, name: &Name, number: u32) -> Result<(ImageVersion, VersionFiles), HostError> {
        let version = self.objects.change(|changes| self.ready(changes, name, number))?.value;
        let store = self.store_of(&version)?;
        let files = VersionFiles::of(&store.path, name, number);
        Ok((version, files))
    }
}

/// The residency that a version of this host gets by a pull. None: it stays as it is.
///
/// # Errors
/// The pull asks for a copy, and the version is streamed: its disks read the file in the cache; or the other way round.
fn changed_residency(there: &ImageVersion, pull: &ImagePull) -> Result<Option<Residency>, HostError> {
    let (name, number, from) = (&there.image, there.version, &pull.registry);
    match (there.residency, pull.residency) {
        (None, None) => Ok(None),
        (None, Some(asked)) => {
            let message = format!(
                "{name}:{number} has no residency {}: it is copied, and all of it is on this host. To stream it, give the image another \
                 name here ('spillway image import NAME --from {from}/{}:{number} --residency {}')",
                asked.as_str(),
                pull.image.name,
                asked.as_str(),
            );
            Err(HostError::new(ErrorCode::Conflict, message))
        }
        (Some(is), Some(asked)) => Ok(Some(asked).filter(|asked| *asked != is)),
        (Some(is), None) => {
            let message = format!(
                "{name}:{number} cannot be copied: it is streamed on this host (residency {}), and stays so until it is deleted. To \
                 bring all its chunks, ask for residency full ('spillway image import {name} --from {from}/{}:{number} --residency \
                 full'); for a copy, give the image another name here ('spillway image import NAME --from {from}/{}:{number}')",
                is.as_str(),
                pull.image.name,
                pull.image.name,
            );
            Err(HostError::new(ErrorCode::Conflict, message))
        }
    }
}

/// Fetches the content of a version. Its digest is compared when it is read back.
fn fetch(
    registries: &Registries,
    registry: &Name,
    digest: String,
    files: &VersionFiles,
    progress: &Progress,
) -> Result<(), HostError> {
    let disk = files.partial_disk();
    let folder = disk.parent().map(Path::to_owned);
    let work = Work::Fetch { digest, to: disk };
    let job_files = JobFiles { reads: vec![], writes: folder };
    match registries.run(&registries.get(registry)?, work, job_files, progress)? {
        JobMessage::Fetched(_) => Ok(()),
        other => Err(strange(&other)),
    }
}
