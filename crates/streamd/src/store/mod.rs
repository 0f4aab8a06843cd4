//! The store of a registry: S3, a web server or a folder. Owns its client, and how its errors are understood.
//!
//! Invariant: credentials leave this module only in requests to the store.

mod address;
mod client;
mod credentials;
mod failure;
mod folder;

pub use credentials::Credentials;
use failure::understood;
use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload};
use spillway_registry::job::Place;
use spillway_registry::{ListedObject, Objects, RegistryError, RegistryErrorKind};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::time::timeout;

/// How often an object is created that somebody else creates at the same time, and the pause after the first time.
const MOST_CONFLICTS: u32 = 5;
const AFTER_CONFLICT: Duration = Duration::from_millis(200);
/// Longest list of objects: those of chunks of 16 TiB.
const MOST_LISTED: usize = 16 << 20;
/// Longest time until the next object of a list comes. A list comes in pages, and a store may send empty ones for ever.
const LIST_SILENCE: Duration = Duration::from_secs(600);

/// A registry's store.
pub struct RemoteStore {
    store: Arc<dyn ObjectStore>,
    /// Address, for people.
    url: String,
    prefix: Path,
    /// The folder that is the registry, if it is one.
    folder: Option<PathBuf>,
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
        let content = PutPayload::from(content);
        for attempt in 1..=MOST_CONFLICTS {
            let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
            match self.store.put_opts(&self.path(key), content.clone(), options).await {
                Ok(_) => return Ok(true),
                Err(object_store::Error::AlreadyExists { .. } | object_store::Error::Precondition { .. }) => {
                }
                Err(e) => return Err(self.failed(key, &e)),
            }
            // Stores say this too (409) of two that write at the same time, of which the other may never end.
            if self.exists(key).await? {
                return Ok(false);
            }
            tokio::time::sleep(AFTER_CONFLICT * attempt).await;
        }
        let message = format!(
            "{}: {key} cannot be written: the registry says that somebody else writes it, and it does not appear: try again",
            self.url
        );
        Err(RegistryError::new(RegistryErrorKind::Busy, message))
    }

    async fn list(&self, folder: &str) -> Result<Vec<ListedObject>, RegistryError> {
        if self.is_read_only {
            let message = format!("{}: objects of a web server cannot be listed", self.url);
            return Err(RegistryError::new(RegistryErrorKind::Unsupported, message));
        }
        if let Some(root) = self.folder.clone() {
            let key = folder.to_owned();
            let listed = tokio::task::spawn_blocking(move || folder::list(&root, &key)).await;
            let listed = listed.map_err(io::Error::other).and_then(|listed| listed);
            return listed.map_err(|e| {
                RegistryError::new(RegistryErrorKind::Local, format!("{}: {folder}: {e}", self.url))
            });
        }
        let prefix = self.path(folder);
        let (mut listed, mut came) = (Vec::new(), 0);
        let endless = |why: &str| {
            let message = format!("{}: the list of {folder} has no end: {why}", self.url);
            RegistryError::new(RegistryErrorKind::Damaged, message)
        };
        let mut objects = self.store.list(Some(&prefix));
        let silent = |_| endless(&format!("no object has come for {} s", LIST_SILENCE.as_secs()));
        while let Some(object) = timeout(LIST_SILENCE, objects.next()).await.map_err(silent)? {
            let object = object.map_err(|e| self.failed(folder, &e))?;
            came += 1;
            if came > MOST_LISTED {
                return Err(endless(&format!("it has more than {MOST_LISTED} objects")));
            }
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::TcpListener;
    use std::thread;

    /// An S3 store that answers PUT and HEAD with these, one after the other and then with the last. Returns its address.
    fn store(puts: &'static [u16], heads: &'static [u16]) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        // It ends with the test's process.
        thread::spawn(move || {
            let (mut put, mut head) = (puts.iter().peekable(), heads.iter().peekable());
            for stream in listener.incoming().map_while(Result::ok) {
                let (mut reader, mut writer) = (BufReader::new(stream.try_clone().unwrap()), stream);
                let (mut first, mut len) = (String::new(), 0);
                reader.read_line(&mut first).unwrap();
                loop {
                    let mut line = String::new();
                    if reader.read_line(&mut line).unwrap() <= 2 {
                        break;
                    }
                    if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
                        len = value.trim().parse().unwrap();
                    }
                }
                reader.read_exact(&mut vec![0; len]).unwrap();
                let answers = if first.starts_with("PUT") { &mut put } else { &mut head };
                let status = **answers.peek().unwrap();
                if answers.len() > 1 {
                    answers.next();
                }
                let rest = "ETag: \"1\"\r\nLast-Modified: Fri, 27 Nov 2026 20:00:00 GMT\r\nContent-Length: 0\r\nConnection: close";
                write!(writer, "HTTP/1.1 {status} Said\r\n{rest}\r\n\r\n").unwrap();
            }
        });
        address
    }

    async fn creates(puts: &'static [u16], heads: &'static [u16]) -> Result<bool, RegistryErrorKind> {
        let _already = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
        let place = Place {
            url: "s3://images/golden".into(),
            endpoint: Some(store(puts, heads)),
            region: None,
            single_writer: false,
            credentials: None,
        };
        let store = RemoteStore::open(&place, None, Duration::ZERO).unwrap();
        store.create("chunks/ab/c", vec![1; 100]).await.map_err(|e| e.kind)
    }

    #[tokio::test]
    async fn a_conflict_is_no_proof_that_somebody_has_made_the_object() {
        assert_eq!(creates(&[200], &[404]).await, Ok(true));
        assert_eq!(creates(&[412], &[200]).await, Ok(false));
        assert_eq!(creates(&[409], &[200]).await, Ok(false));
        // Who was faster has failed.
        assert_eq!(creates(&[409, 409, 200], &[404]).await, Ok(true));
        // Who was faster has not ended yet.
        assert_eq!(creates(&[409], &[404, 404, 200]).await, Ok(false));
        assert_eq!(creates(&[409], &[404]).await, Err(RegistryErrorKind::Busy));
    }
}
