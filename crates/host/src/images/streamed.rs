//! Versions that are streamed: records and digests here, chunks in a registry and in the cache. Owns what cannot be done with them.
//!
//! Invariant: an image is in the cache as long as any version is it.

use super::residency::{Residencies, WholeImages};
use super::{Images, VersionFiles, check_size};
use crate::error::HostError;
use crate::images::CHUNK_BYTES;
use crate::streaming::{BootSet, BootSets, StreamedVersion};
use spillway_api::{
    CachedBootSet, CachedVersion, Catalog, ErrorCode, ImageDetails, ImageVersion, Name, Origin, Residency,
    StreamFigures, VersionState,
};
use spillway_control::Streamed;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// All of an image, in thousandths.
const WHOLE: u32 = 1000;

/// What a disk reads of a version.
#[derive(Clone, Debug)]
pub struct BaseFile {
    /// The file. Of a version that is streamed, the one in the cache, for people.
    pub path: PathBuf,
    /// How a version that is streamed is opened.
    pub streamed: Option<Streamed>,
    /// Size of the image, in bytes.
    pub size_bytes: u64,
}

/// Refuses a version of which only a part is here. `done` says what cannot be done.
pub(super) fn check_whole(version: &ImageVersion, done: &str) -> Result<(), HostError> {
    let Some(_) = version.residency else { return Ok(()) };
    let (name, number) = (&version.image, version.version);
    let message = format!(
        "{name}:{number} cannot be {done}: it is streamed: copy it under another name ('spillway image import NAME --from \
         REGISTRY/IMAGE:VERSION'), and use that"
    );
    Err(HostError::new(ErrorCode::Conflict, message).permanent())
}

impl Images {
    /// Returns what a disk reads of a ready version.
    pub fn base(&self, name: &Name, version: u32) -> Result<BaseFile, HostError> {
        let version = self.objects.change(|changes| self.ready(changes, name, version))?.value;
        check_size(&version)?;
        let size_bytes = version.size_bytes;
        if version.residency.is_some() {
            let digest = version.digest.as_deref().unwrap_or_default();
            let (streamed, path) = self.streaming.opened_at(digest)?;
            return Ok(BaseFile { path, streamed: Some(streamed), size_bytes });
        }
        let store = self.store_of(&version)?;
        let path = VersionFiles::of(&store.path, name, version.version).disk();
        Ok(BaseFile { path, streamed: None, size_bytes })
    }

    /// Returns the versions that are streamed and can be used.
    pub fn all_streamed(&self) -> Result<Vec<StreamedVersion>, HostError> {
        let all = Residencies::read(&self.objects)?;
        all.versions().iter().map(|version| self.streamed_version(version, &all)).collect()
    }

    /// What is told of a version to the process that brings its chunks.
    fn streamed_version(
        &self,
        version: &ImageVersion,
        all: &Residencies,
    ) -> Result<StreamedVersion, HostError> {
        let reference = format!("{}:{}", version.image, version.version);
        let store = self.stores.get(&version.store)?;
        let files = VersionFiles::of(&store.path, &version.image, version.version);
        let residency = version.digest.as_deref().and_then(|digest| all.of(digest));
        match (&version.origin, &version.digest, residency) {
            (Origin::Registry { registry, .. }, Some(digest), Some(residency)) => Ok(StreamedVersion {
                reference,
                digest: digest.clone(),
                size_bytes: version.size_bytes,
                registry: registry.clone(),
                residency,
                digests: files.digests(),
            }),
            _ => Err(files.damaged("its record names no registry, no digest or no residency".into())),
        }
    }

    /// Begins to serve a version, and to bring what its residency asks for, before that is recorded. With `dry_run` it is only checked
    /// whether the cache has space for that.
    ///
    /// # Errors
    /// The cache has no space, with the numbers.
    pub(super) fn stream(&self, version: &ImageVersion, dry_run: bool) -> Result<(), HostError> {
        let all = Residencies::read(&self.objects)?.with_version(version);
        self.streaming.serve(&self.streamed_version(version, &all)?, dry_run)
    }

    /// Begins to bring what a catalog, as it would be, asks for of a streamed version, or only checks whether there is space for that.
    /// If the catalog is not recorded then, call [`Images::look_at_residencies`].
    ///
    /// # Errors
    /// The cache has no space, with the numbers.
    pub fn stream_for(
        &self,
        catalog: &Catalog,
        version: &ImageVersion,
        dry_run: bool,
    ) -> Result<(), HostError> {
        let refused =
            |e: HostError| HostError { message: format!("catalog {}: {}", catalog.name, e.message), ..e };
        self.stream_if_more(version, dry_run, |all| all.with_catalog(catalog)).map_err(refused)
    }

    /// Begins to bring what the catalogs that follow the image ask for of a version that is about to be published, or only checks
    /// whether there is space for that. If it is not published then, call [`Images::look_at_residencies`].
    ///
    /// # Errors
    /// The cache has no space, with the numbers.
    pub(super) fn stream_to_publish(&self, version: &ImageVersion, dry_run: bool) -> Result<(), HostError> {
        let refused = |e: HostError| HostError {
            message: format!(
                "{}:{} for the catalogs that follow the image: {}",
                version.image, version.version, e.message
            ),
            ..e
        };
        self.stream_if_more(version, dry_run, |all| all.with_published(version)).map_err(refused)
    }

    /// Brings all of these versions that are streamed, as long as the fleet asks for it, and of others what else is asked for. Returns which
    /// are not brought whole, and why: there is no space for them, or they are not on this host.
    ///
    /// # Errors
    /// The records cannot be read.
    pub fn keep_whole(&self, wanted: &[(Name, u32)]) -> Result<BTreeMap<(Name, u32), HostError>, HostError> {
        let before = WholeImages::read(&self.objects)?;
        let (mut whole, mut refused) = (WholeImages::default(), BTreeMap::new());
        for (name, number) in wanted {
            let found = self.objects.change(|changes| self.ready(changes, name, *number));
            let kept = found.and_then(|found| {
                let version = found.value;
                // A version that is not streamed is whole.
                let (Some(_), Some(digest)) = (version.residency, &version.digest) else { return Ok(None) };
                if !before.digests.contains(digest) {
                    self.stream_if_more(&version, false, |all| all.with_whole(digest))?;
                }
                Ok(Some(digest.clone()))
            });
            match kept {
                Ok(digest) => whole.digests.extend(digest),
                Err(e) => drop(refused.insert((name.clone(), *number), e)),
            }
        }
        whole.record(&self.objects)?;
        if whole != before {
            self.look_at_residencies();
        }
        Ok(refused)
    }

    /// How much this host has of a ready version, in thousandths of what machines read until they are ready; without a recorded boot, of the
    /// whole image. The flag says that it has all of it. `None`: the version is not here.
    pub fn part(&self, name: &Name, number: u32) -> Result<Option<(u32, bool)>, HostError> {
        let key = super::key(name, number);
        let Some(version) = self.objects.get::<ImageVersion>(&key)?.map(|found| found.value) else {
            return Ok(None);
        };
        if version.state != VersionState::Ready {
            return Ok(None);
        }
        let (Some(_), Some(digest)) = (version.residency, &version.digest) else {
            return Ok(Some((WHOLE, true)));
        };
        let Some(found) = self.streaming.image(digest) else { return Ok(Some((0, false))) };
        if found.is_whole {
            return Ok(Some((WHOLE, true)));
        }
        let boot = self.streaming.boot_sets().of(digest)?.len() as u64;
        let fills_boot_set =
            Residencies::read(&self.objects)?.of(digest) == Some(Residency::Boot) && boot > 0;
        let (has, of) = match fills_boot_set {
            true => (boot.saturating_sub(found.unfilled_chunks), boot),
            false => (found.present_chunks, found.chunks),
        };
        let part = u128::from(has) * u128::from(WHOLE) / u128::from(of.max(1));
        Ok(Some((u32::try_from(part).unwrap_or(WHOLE).min(WHOLE), false)))
    }

    /// Whether this host is still bringing what machines read of a version until they are ready, as far as that is known.
    ///
    /// # Errors
    /// The records of the host cannot be read.
    pub fn lacks_boot_set(&self, name: &Name, number: u32) -> Result<bool, HostError> {
        let found = self.objects.get::<ImageVersion>(&super::key(name, number))?.map(|found| found.value);
        let streamed = found.filter(|version| version.residency.is_some()).and_then(|version| version.digest);
        let Some(digest) = streamed else { return Ok(false) };
        let is_boot = Residencies::read(&self.objects)?.of(&digest) == Some(Residency::Boot);
        if !is_boot || self.streaming.boot_sets().of(&digest)?.is_empty() {
            return Ok(false);
        }
        Ok(self.streaming.image(&digest).is_none_or(|image| !image.is_whole && image.unfilled_chunks > 0))
    }

    /// The boot sets of images.
    pub fn boot_sets(&self) -> &BootSets {
        self.streaming.boot_sets()
    }

    /// Serves a version with what a change of the records asks for, if that is more than before.
    fn stream_if_more(
        &self,
        version: &ImageVersion,
        dry_run: bool,
        change: impl FnOnce(Residencies) -> Residencies,
    ) -> Result<(), HostError> {
        let (Some(_), Some(digest)) = (version.residency, version.digest.as_deref()) else { return Ok(()) };
        let before = Residencies::read(&self.objects)?;
        let is = before.of(digest);
        let after = change(before);
        match after.of(digest) > is {
            true => self.streaming.serve(&self.streamed_version(version, &after)?, dry_run),
            false => Ok(()),
        }
    }

    /// Lets what is recorded decide again what is brought.
    pub fn look_at_residencies(&self) {
        self.streaming.changed();
    }

    /// Changes the residency of a ready version that is streamed.
    pub(super) fn set_residency(
        &self,
        name: &Name,
        number: u32,
        residency: Residency,
    ) -> Result<(), HostError> {
        let after = |found| ImageVersion { residency: Some(residency), ..found };
        let found = self.objects.change(|changes| self.ready(changes, name, number))?.value;
        self.stream(&after(found), false)?;
        let changed = self.objects.change(|changes| {
            let found = self.ready(changes, name, number)?.value;
            changes.put(&super::key(name, number), &after(found));
            Ok(())
        });
        self.look_at_residencies();
        changed
    }

    /// Removes the chunks of a version that is being removed, unless another one is the same image.
    pub(super) fn stop_streaming(&self, version: &ImageVersion) -> Result<(), HostError> {
        let (Some(_), Some(digest)) = (version.residency, &version.digest) else { return Ok(()) };
        let is_other =
            |other: &StreamedVersion| other.reference != format!("{}:{}", version.image, version.version);
        let others = self.all_streamed()?;
        if others.iter().any(|other| other.digest == *digest && is_other(other)) {
            return Ok(());
        }
        self.streaming.forget(digest)?;
        self.streaming.boot_sets().forget(digest)
    }

    /// Figures of the cache; none if no version is streamed, or the process that brings chunks does not answer.
    pub fn stream_figures(&self) -> Option<StreamFigures> {
        let figures = self.streaming.figures()?;
        let is_used = self.all_streamed().is_ok_and(|versions| !versions.is_empty());
        is_used.then_some(figures)
    }

    /// What is in the cache of the versions that are streamed.
    pub fn cached(&self, details: &ImageDetails) -> Result<Vec<CachedVersion>, HostError> {
        let streamed = details.versions.iter().filter(|version| version.residency.is_some());
        let (all, mut cached) = (Residencies::read(&self.objects)?, Vec::new());
        for version in streamed {
            let Some(digest) = &version.digest else { continue };
            let Some(residency) = all.of(digest) else { continue };
            let Some(found) = self.streaming.image(digest) else { continue };
            let boot_sets = self.streaming.boot_sets();
            // The last chunk may be shorter.
            let bytes = |chunks: &[u32]| -> u64 {
                let begins = chunks.iter().map(|chunk| u64::from(*chunk) * CHUNK_BYTES);
                begins.map(|begin| version.size_bytes.saturating_sub(begin).min(CHUNK_BYTES)).sum()
            };
            let set = |set: BootSet| CachedBootSet {
                chunks: set.chunks.len() as u64,
                bytes: bytes(&set.chunks),
                boots: set.boots as u64,
                catalog: set.catalog,
            };
            let boot = boot_sets.of(digest)?;
            cached.push(CachedVersion {
                version: version.version,
                residency,
                chunks: found.chunks,
                present_chunks: found.present_chunks,
                present_bytes: found.present_bytes,
                boot_chunks: boot.len() as u64,
                boot_bytes: bytes(&boot),
                boot_sets: boot_sets.by_catalog(digest)?.into_iter().map(set).collect(),
                unfilled_chunks: found.unfilled_chunks,
                is_whole: found.is_whole,
            });
        }
        Ok(cached)
    }

    /// Whether another boot of machines of the catalog on this version is to be recorded, and of which version then.
    pub fn records_boot(
        &self,
        name: &Name,
        version: u32,
        catalog: &Name,
    ) -> Result<Option<StreamedVersion>, HostError> {
        let version = self.objects.change(|changes| self.ready(changes, name, version))?.value;
        if version.residency.is_none() {
            return Ok(None);
        }
        let streamed = self.streamed_version(&version, &Residencies::read(&self.objects)?)?;
        let wanted = self.streaming.boot_sets().wants_more(&streamed.digest, catalog)?;
        Ok(Some(streamed).filter(|_| wanted))
    }

    /// Records what a machine of the catalog read of the version until it was ready.
    pub fn record_boot(
        &self,
        version: &StreamedVersion,
        catalog: &Name,
        chunks: Vec<u32>,
    ) -> Result<(), HostError> {
        self.streaming.record_boot(version, catalog, chunks)
    }
}
