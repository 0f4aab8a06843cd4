//! The store of a registry: S3, a web server or a folder. Owns its client, and how its errors are understood.
//!
//! Invariant: credentials leave this module only in requests to the store.

mod address;
mod credentials;
mod failure;

pub use credentials::Credentials;
use failure::understood;
use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutOptions};
use spillway_registry::job::Place;
use spillway_registry::{ListedObject, Objects, RegistryError, RegistryErrorKind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A registry's store.
pub struct RemoteStore {
    store: Arc<dyn ObjectStore>,
    /// Address, for people.
    url: String,
    prefix: Path,
    is_read_only: bool,
    /// Whether objects are created in one step.
    creates: bool,
}

impl RemoteStore {
    /// Opens a store. Sends nothing yet. A request that fails is repeated for so long; for no time, never.
    pub fn open(
        place: &Place,
        credentials: Option<Credentials>,
        patience: Duration,
    ) -> Result<RemoteStore, RegistryError> {
        address::open(place, credentials, patience)
    }

    fn path(&self, key: &str) -> Path {
        key.split('/').fold(self.prefix.clone(), |path, part| path.join(part))
    }

    fn failed(&self, key: &str, error: &object_store::Error) -> RegistryError {
        understood(&self.url, key, error)
    }

    fn check_writable(&self, key: &str) -> Result<(), RegistryError> {
        if self.is_read_only {
            let message = format!("{}: {key} cannot be written: a web server is only read", self.url);
            return Err(RegistryError::new(RegistryErrorKind::Unsupported, message));
        }
        Ok(())
    }
}

impl RemoteStore {
    /// Gets an object as [`Objects::get`] does, and notes when the answer has begun.
    pub async fn get_noting(
        &self,
        key: &str,
        most_bytes: u64,
        has_begun: &AtomicBool,
    ) -> Result<Option<Vec<u8>>, RegistryError> {
        let found = match self.store.get(&self.path(key)).await {
            Ok(found) => found,
            Err(e) if failure::is_absent(&e) => return Ok(None),
            Err(e) => return Err(self.failed(key, &e)),
        };
        let too_large = || {
            let message = format!("{}: {key} is damaged: it is larger than {most_bytes} bytes", self.url);
            RegistryError::new(RegistryErrorKind::Damaged, message)
        };
        if found.meta.size > most_bytes {
            return Err(too_large());
        }
        has_begun.store(true, Ordering::Release);
        let mut bytes = Vec::with_capacity(found.meta.size as usize);
        let mut body = found.into_stream();
        while let Some(part) = body.try_next().await.map_err(|e| self.failed(key, &e))? {
            if (bytes.len() + part.len()) as u64 > most_bytes {
                return Err(too_large());
            }
            bytes.extend_from_slice(&part);
        }
        Ok(Some(bytes))
    }
}

impl Objects for RemoteStore {
    async fn get(&self, key: &str, most_bytes: u64) -> Result<Option<Vec<u8>>, RegistryError> {
        self.get_noting(key, most_bytes, &AtomicBool::new(false)).await
    }

    async fn exists(&self, key: &str) -> Result<bool, RegistryError> {
        match self.store.head(&self.path(key)).await {
            Ok(_) => Ok(true),
            Err(e) if failure::is_absent(&e) => Ok(false),
            Err(e) => Err(self.failed(key, &e)),
        }
    }

    async fn put(&self, key: &str, content: Vec<u8>) -> Result<(), RegistryError> {
        self.check_writable(key)?;
        let put = self.store.put(&self.path(key), content.into()).await;
        put.map(drop).map_err(|e| self.failed(key, &e))
    }

    async fn create(&self, key: &str, content: Vec<u8>) -> Result<bool, RegistryError> {
        self.check_writable(key)?;
        if !self.creates {
            if self.exists(key).await? {
                return Ok(false);
            }
            return self.put(key, content).await.map(|()| true);
        }
        let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        match self.store.put_opts(&self.path(key), content.into(), options).await {
            Ok(_) => Ok(true),
            Err(object_store::Error::AlreadyExists { .. } | object_store::Error::Precondition { .. }) => {
                Ok(false)
            }
            Err(e) => Err(self.failed(key, &e)),
        }
    }

    async fn list(&self, folder: &str) -> Result<Vec<ListedObject>, RegistryError> {
        if self.is_read_only {
            let message = format!("{}: objects of a web server cannot be listed", self.url);
            return Err(RegistryError::new(RegistryErrorKind::Unsupported, message));
        }
        let prefix = self.path(folder);
        let mut listed = Vec::new();
        let mut objects = self.store.list(Some(&prefix));
        while let Some(object) = objects.next().await {
            let object = match object {
                Ok(object) => object,
                // A folder that was never made has nothing in it.
                Err(e) if failure::is_absent(&e) => break,
                Err(e) => return Err(self.failed(folder, &e)),
            };
            let parts: Option<Vec<_>> = object.location.prefix_match(&self.prefix).map(Iterator::collect);
            let Some(parts) = parts else { continue };
            listed.push(ListedObject {
                key: parts.iter().map(|part| part.as_ref()).collect::<Vec<_>>().join("/"),
                modified_seconds: object.last_modified.timestamp(),
                size_bytes: object.size,
            });
        }
        Ok(listed)
    }

    async fn delete(&self, keys: Vec<String>) -> Result<(), RegistryError> {
        let Some(first) = keys.first().cloned() else { return Ok(()) };
        self.check_writable(&first)?;
        let paths: Vec<_> = keys.iter().map(|key| Ok(self.path(key))).collect();
        let mut deleted = self.store.delete_stream(stream::iter(paths).boxed());
        while let Some(done) = deleted.next().await {
            match done {
                Err(e) if !failure::is_absent(&e) => return Err(self.failed(&first, &e)),
                _ => {}
            }
        }
        Ok(())
    }

    async fn pause(&self, seconds: u64) {
        tokio::time::sleep(Duration::from_secs(seconds)).await;
    }
}
