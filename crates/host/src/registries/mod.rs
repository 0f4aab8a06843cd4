//! Registries of images, and other places that images are downloaded from. Owns the registries' records, the rules about the
//! other places, and what is checked before one is used; the program `spillway-streamd` does all traffic with them.
//!
//! Invariant: the daemon opens the file of a registry's credentials, and never reads it.

mod download;
mod job;

use crate::error::HostError;
use crate::operations::{Operations, Progress};
use crate::store::{Objects, RecordKind, StoredRecord};
pub use download::{Downloads, SourceRule};
use job::Job;
pub use job::{JobFiles, place_of};
use spillway_api::{
    CollectionOutcome, Empty, ErrorCode, ImageRef, ImageVersion, Name, Operation, OperationOutcome, Origin,
    Registry, RegistryCheck, RegistryCollection,
};
use spillway_registry::job::{JobMessage, Work};
use spillway_registry::{ProbeReport, PublicKey};
use std::num::NonZeroU32;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longest time to find out what is at an address.
const LOOK: Duration = Duration::from_secs(45);
/// Longest time to make an empty place a registry. With the look before, it is less than a client waits.
const FOUND: Duration = Duration::from_secs(12);
/// Longest time for a push, a pull, a collection or a download: a day, as an import.
const LONG: Duration = Duration::from_secs(86_400);
/// Grace and gap of a collection, in seconds.
const GRACE_SECONDS: u32 = 7 * 86_400;
const GAP_SECONDS: u32 = 86_400;
const MOST_URL_BYTES: usize = 1024;
/// Permissions with which others can read a file.
const READABLE_BY_OTHERS: u32 = 0o004;

impl StoredRecord for Registry {
    const PREFIX: &'static str = "registries/";
    const WORD: &'static str = "registry";
}

/// Kinds of records of this module.
pub(crate) const RECORDS: [RecordKind; 1] = [RecordKind::of::<Registry>()];

/// The registries that a host knows. A clone is the same registries.
#[derive(Clone)]
pub struct Registries {
    objects: Objects,
    operations: Operations,
    program: PathBuf,
}

impl Registries {
    /// Opens the recorded registries. `program` is `spillway-streamd`.
    pub fn new(objects: Objects, operations: Operations, program: PathBuf) -> Registries {
        Registries { objects, operations, program }
    }

    /// Returns all registries, in the order of their names.
    pub fn list(&self) -> Result<Vec<Registry>, HostError> {
        Ok(self.objects.list::<Registry>()?.into_iter().map(|registry| registry.value).collect())
    }

    /// Returns a registry.
    pub fn get(&self, name: &Name) -> Result<Registry, HostError> {
        match self.objects.get::<Registry>(name.as_str())? {
            Some(registry) => Ok(registry.value),
            None => {
                let all = self.list()?;
                let names = all.iter().map(|registry| registry.name.as_str());
                Err(HostError::not_found(Registry::WORD, name.as_str(), names))
            }
        }
    }

    /// Adds a registry, if its address can be used. An empty place becomes one. With `dry_run` everything is checked, and nothing
    /// recorded or made.
    pub fn add(&self, registry: Registry, dry_run: bool) -> Result<Registry, HostError> {
        let name = registry.name.clone();
        let exists = || HostError::new(ErrorCode::Exists, format!("there is a registry '{name}' already"));
        if self.objects.get::<Registry>(name.as_str())?.is_some() {
            return Err(exists());
        }
        let registry = self.prepare(registry, dry_run)?;
        if !dry_run {
            self.objects.change(|changes| {
                if changes.get::<Registry>(name.as_str())?.is_some() {
                    return Err(exists());
                }
                changes.put(name.as_str(), &registry);
                Ok(())
            })?;
        }
        Ok(registry)
    }

    /// Checks that a registry can be used from this host, and makes an empty place one; with `dry_run` it is only checked. Returns its
    /// settings as they are recorded.
    ///
    /// # Errors
    /// It cannot be used, with the reason.
    pub fn prepare(&self, mut registry: Registry, dry_run: bool) -> Result<Registry, HostError> {
        let name = registry.name.clone();
        check_url(&registry)?;
        for key in &mut registry.require_signature {
            let parsed =
                PublicKey::parse(key).map_err(|why| HostError::invalid(format!("{name}: the key: {why}")))?;
            *key = parsed.as_str().to_owned();
        }
        if let Some(path) = &registry.credentials {
            check_credentials(&name, path)?;
        }
        let found = self.probe(&registry)?;
        let writes = found.can_write == Some(true);
        if writes && found.can_create == Some(false) && !registry.single_writer {
            let message = format!(
                "{name}: this registry has no conditional writes (PUT with If-None-Match): if nobody else pushes to it, add it with \
                 --single-writer"
            );
            return Err(HostError::new(ErrorCode::Conflict, message));
        }
        if !writes && !found.is_registry {
            let message = format!(
                "{name}: there is no registry at {}, and none can be made there: correct the address, or add it first on a \
                 host that may write",
                registry.url
            );
            return Err(HostError::invalid(message));
        }
        if !dry_run && !found.is_registry {
            match self.ask(&registry, Work::Found, JobFiles::default(), FOUND)? {
                JobMessage::Founded => {}
                other => return Err(strange(&other)),
            }
        }
        Ok(registry)
    }

    /// Forgets a registry that no version is streamed from. What is in it stays.
    pub fn remove(&self, name: &Name, dry_run: bool) -> Result<Empty, HostError> {
        self.get(name)?;
        self.objects.change(|changes| {
            for version in changes.list_readable_below::<ImageVersion>("")? {
                let ImageVersion { image, version, origin, residency, .. } = version.value;
                if matches!(&origin, Origin::Registry { registry, .. } if residency.is_some() && registry == name) {
                    let message = format!(
                        "{name}: {image}:{version} is streamed from it: delete that version first ('spillway image delete \
                         {image}:{version}')"
                    );
                    return Err(HostError::new(ErrorCode::InUse, message));
                }
            }
            changes.delete::<Registry>(name.as_str());
            if dry_run {
                changes.forget();
            }
            Ok(Empty {})
        })
    }

    /// Finds out what is at the address of a registry.
    pub fn check(&self, name: &Name) -> Result<RegistryCheck, HostError> {
        let registry = self.get(name)?;
        let found = self.probe(&registry)?;
        let images = found.images.into_iter().filter_map(|(name, version)| {
            Some(ImageRef { name: name.parse().ok()?, version: Some(NonZeroU32::new(version)?) })
        });
        Ok(RegistryCheck {
            registry: name.clone(),
            is_registry: found.is_registry,
            can_list: found.can_list,
            can_write: found.can_write.unwrap_or(false),
            can_create: found.can_create.unwrap_or(false) && !registry.single_writer,
            images: images.collect(),
        })
    }

    fn probe(&self, registry: &Registry) -> Result<ProbeReport, HostError> {
        let is_web = registry.url.starts_with("http");
        let id = (!is_web).then(|| uuid::Uuid::new_v4().to_string());
        match self.ask(registry, Work::Probe { id }, JobFiles::default(), LOOK)? {
            JobMessage::Probed(report) => Ok(report),
            other => Err(strange(&other)),
        }
    }

    /// Deletes the name of a version from a registry. A collection of garbage removes what nothing else needs.
    pub fn forget_image(&self, name: &Name, image: &ImageRef) -> Result<Empty, HostError> {
        let registry = self.get(name)?;
        let version = image.version.ok_or_else(|| HostError::invalid(format!("{image}: name a version")))?;
        let work = Work::Forget { name: image.name.to_string(), version: version.get() };
        match self.ask(&registry, work, JobFiles::default(), LOOK)? {
            JobMessage::Forgotten => Ok(Empty {}),
            other => Err(strange(&other)),
        }
    }

    /// Begins a collection of garbage.
    pub fn collect(&self, name: &Name, order: RegistryCollection) -> Result<Operation, HostError> {
        let registry = self.get(name)?;
        let work = Work::Collect {
            grace_seconds: order.grace_seconds.unwrap_or(GRACE_SECONDS).into(),
            gap_seconds: order.gap_seconds.unwrap_or(GAP_SECONDS).into(),
            deletes: order.delete,
            id: uuid::Uuid::new_v4().to_string(),
        };
        let what = format!("collect garbage in the registry {name}");
        let operation = self.operations.describe(what, None);
        let registries = self.clone();
        self.operations.begin(operation, move |progress| {
            match registries.run(&registry, work, JobFiles::default(), progress)? {
                JobMessage::Collected(report) => {
                    progress.set_outcome(OperationOutcome::Collected(CollectionOutcome {
                        versions: report.names,
                        chunks: report.chunks,
                        chunk_bytes: report.chunk_bytes,
                        pushes: report.pushes,
                        garbage_chunks: report.garbage_chunks,
                        garbage_bytes: report.garbage_bytes,
                        garbage_images: report.garbage_images,
                        dead_pushes: report.dead_pushes,
                        deletable: report.deletable,
                        has_deleted: report.has_deleted,
                    }));
                    Ok(())
                }
                other => Err(strange(&other)),
            }
        })
    }

    /// Runs a short job.
    pub fn ask(
        &self,
        registry: &Registry,
        work: Work,
        files: JobFiles<'_>,
        deadline: Duration,
    ) -> Result<JobMessage, HostError> {
        self.job(registry, deadline).work_on(registry, work, files, &Progress::default())
    }

    /// Runs a long job, with its progress.
    pub fn run(
        &self,
        registry: &Registry,
        work: Work,
        files: JobFiles<'_>,
        progress: &Progress,
    ) -> Result<JobMessage, HostError> {
        self.job(registry, LONG).work_on(registry, work, files, progress)
    }

    fn job(&self, registry: &Registry, deadline: Duration) -> Job<'_> {
        Job { program: &self.program, subject: format!("registry {}", registry.name), deadline }
    }

    /// Finds an image in a registry.
    pub fn resolve(
        &self,
        registry: &Registry,
        image: &ImageRef,
    ) -> Result<spillway_registry::job::ResolvedImage, HostError> {
        let work = Work::Resolve {
            name: image.name.to_string(),
            version: image.version.map(NonZeroU32::get),
            keys: registry.require_signature.clone(),
        };
        match self.ask(registry, work, JobFiles::default(), LOOK)? {
            JobMessage::Resolved(found) => Ok(found),
            other => Err(strange(&other)),
        }
    }
}

/// Refuses an address that is none, or has a password in it: addresses are shown.
fn check_url(registry: &Registry) -> Result<(), HostError> {
    let Registry { name, url, endpoint, .. } = registry;
    for address in [Some(url), endpoint.as_ref()].into_iter().flatten() {
        let refuse = |why: &str| HostError::invalid(format!("{name}: '{}': {why}", address.escape_debug()));
        let (scheme, rest) = address.split_once("://").unwrap_or(("", address));
        let known = if address == url { &["s3", "https", "http", "file"][..] } else { &["https", "http"] };
        if !known.contains(&scheme) || address.len() > MOST_URL_BYTES {
            let forms = match address == url {
                true => "give s3://BUCKET/PREFIX, https://HOST/PATH, http://HOST/PATH or file:///FOLDER",
                false => "an endpoint is given as https://HOST or http://HOST",
            };
            return Err(refuse(forms));
        }
        if address.chars().any(|c| c.is_control() || c.is_whitespace() || "?#\\".contains(c)) {
            return Err(refuse("an address has no spaces, '?', '#' or '\\'"));
        }
        if rest.split('/').next().is_some_and(|host| host.contains('@')) {
            return Err(HostError::invalid(format!(
                "{name}: an address has no user and password: give a file of credentials (--credentials)"
            )));
        }
    }
    Ok(())
}

/// Refuses a file of credentials that cannot be used, or that anybody can read.
fn check_credentials(name: &Name, path: &Path) -> Result<(), HostError> {
    let refuse =
        |why: String| HostError::invalid(format!("{name}: the credentials in {}: {why}", path.display()));
    if !path.is_absolute() {
        return Err(refuse("the path must be absolute".into()));
    }
    let found = std::fs::metadata(path)
        .map_err(|e| refuse(format!("{e}: spillwayd must be able to read the file")))?;
    if !found.is_file() {
        return Err(refuse("it is no file".into()));
    }
    if found.mode() & READABLE_BY_OTHERS != 0 {
        return Err(refuse("everybody can read the file: take that right away (chmod o-rwx)".into()));
    }
    Ok(())
}

/// Error for a message that does not belong to the work.
pub fn strange(message: &JobMessage) -> HostError {
    HostError::new(ErrorCode::Internal, format!("spillway-streamd answered something else: {message:?}"))
}
