//! Versions that are streamed: records and digests here, chunks in a registry and in the cache. Owns what cannot be done with them.
//!
//! Invariant: an image is in the cache as long as any version is it.

use super::{Images, VersionFiles, check_size};
use crate::error::HostError;
use crate::streaming::StreamedVersion;
use spillway_api::{CachedVersion, ErrorCode, ImageDetails, ImageVersion, Name, Origin, VersionState};
use spillway_control::Streamed;
use std::path::PathBuf;

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
        "{name}:{number} cannot be {done}: it is streamed, and not whole on this host: copy it ('spillway image pull') under \
         another name"
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
        let all = self.objects.list::<ImageVersion>()?.into_iter().map(|version| version.value);
        let used = all.filter(|version| version.residency.is_some() && version.state == VersionState::Ready);
        used.map(|version| self.streamed_version(&version)).collect()
    }

    /// What is told of a version to the process that brings its chunks.
    pub(super) fn streamed_version(&self, version: &ImageVersion) -> Result<StreamedVersion, HostError> {
        let reference = format!("{}:{}", version.image, version.version);
        let store = self.stores.get(&version.store)?;
        let files = VersionFiles::of(&store.path, &version.image, version.version);
        match (&version.origin, &version.digest, version.residency) {
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

    /// What is in the cache of the versions that are streamed.
    pub fn cached(&self, details: &ImageDetails) -> Result<Vec<CachedVersion>, HostError> {
        let streamed = details.versions.iter().filter(|version| version.residency.is_some());
        let mut cached = Vec::new();
        for version in streamed {
            let Some(digest) = &version.digest else { continue };
            let Some(found) = self.streaming.image(digest) else { continue };
            cached.push(CachedVersion {
                version: version.version,
                chunks: found.chunks,
                present_chunks: found.present_chunks,
                present_bytes: found.present_bytes,
                boot_chunks: self.streaming.boot_sets().of(digest)?.len() as u64,
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
        let streamed = self.streamed_version(&version)?;
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
