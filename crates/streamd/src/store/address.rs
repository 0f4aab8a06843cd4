//! Addresses of registries. Owns which are accepted, and the settings of each kind of client.

use super::RemoteStore;
use super::client::Connector;
use super::credentials::Credentials;
use object_store::RetryConfig;
use object_store::aws::AmazonS3Builder;
use object_store::http::HttpBuilder;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use spillway_registry::job::Place;
use spillway_registry::{RegistryError, RegistryErrorKind};
use std::sync::Arc;
use std::time::Duration;

/// Most times that a request is repeated.
const MOST_RETRIES: usize = 10;
/// Longest time without a byte of an answer: of a request that is repeated here, and of one that its sender repeats.
const SILENCE: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(10));

fn refused(place: &Place, why: &str) -> RegistryError {
    RegistryError::new(RegistryErrorKind::Unsupported, format!("{}: {why}", place.url))
}

/// Opens the store of an address.
pub fn open(
    place: &Place,
    credentials: Option<Credentials>,
    patience: Duration,
) -> Result<RemoteStore, RegistryError> {
    let (scheme, rest) = place.url.split_once("://").ok_or_else(|| {
        refused(place, "it is no address: give s3://BUCKET/PREFIX, https://HOST/PATH, http://HOST/PATH or file:///FOLDER")
    })?;
    if scheme != "s3" && (place.endpoint.is_some() || place.region.is_some() || credentials.is_some()) {
        return Err(refused(place, "endpoint, region and credentials are for s3:// only"));
    }
    match scheme {
        "s3" => s3(place, rest, credentials, patience),
        "https" | "http" => web(place, patience),
        "file" if patience.is_zero() => absent_folder(place, rest),
        "file" => folder(place, rest),
        _ => Err(refused(
            place,
            "give s3://BUCKET/PREFIX, https://HOST/PATH, http://HOST/PATH or file:///FOLDER",
        )),
    }
}

/// A client, and how often it repeats a request.
fn client(may_be_plain: bool, patience: Duration) -> (Connector, RetryConfig) {
    let (max_retries, silence) = if patience.is_zero() { (0, SILENCE.1) } else { (MOST_RETRIES, SILENCE.0) };
    let retry = RetryConfig { max_retries, retry_timeout: patience, ..RetryConfig::default() };
    (Connector { may_be_plain, silence }, retry)
}

fn s3(
    place: &Place,
    rest: &str,
    credentials: Option<Credentials>,
    patience: Duration,
) -> Result<RemoteStore, RegistryError> {
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    if bucket.is_empty() {
        return Err(refused(place, "it names no bucket: give s3://BUCKET/PREFIX"));
    }
    let is_plain = place.endpoint.as_ref().is_some_and(|endpoint| endpoint.starts_with("http://"));
    let (connector, retry) = client(is_plain, patience);
    let mut builder = AmazonS3Builder::new()
        .with_bucket_name(bucket)
        .with_region(place.region.as_deref().unwrap_or("us-east-1"))
        .with_http_connector(connector)
        .with_retry(retry);
    if let Some(endpoint) = &place.endpoint {
        builder = builder.with_endpoint(endpoint.trim_end_matches('/'));
    }
    builder = match credentials {
        None => builder.with_skip_signature(true),
        Some(read) => {
            let builder = builder.with_access_key_id(read.access_key).with_secret_access_key(read.secret_key);
            match read.session_token {
                Some(token) => builder.with_token(token),
                None => builder,
            }
        }
    };
    let store = builder.build().map_err(|e| refused(place, &e.to_string()))?;
    let prefix = prefix_of(place, prefix)?;
    Ok(RemoteStore {
        store: Arc::new(store),
        url: place.url.clone(),
        prefix,
        folder: None,
        is_read_only: false,
        creates: !place.single_writer,
    })
}

fn web(place: &Place, patience: Duration) -> Result<RemoteStore, RegistryError> {
    let (connector, retry) = client(place.url.starts_with("http://"), patience);
    let builder = HttpBuilder::new().with_url(&place.url).with_http_connector(connector).with_retry(retry);
    let store = builder.build().map_err(|e| refused(place, &e.to_string()))?;
    Ok(RemoteStore {
        store: Arc::new(store),
        url: place.url.clone(),
        prefix: Path::default(),
        folder: None,
        is_read_only: true,
        creates: false,
    })
}

fn folder(place: &Place, path: &str) -> Result<RemoteStore, RegistryError> {
    if !path.starts_with('/') {
        return Err(refused(place, "a folder is given as file:///FOLDER, with three slashes"));
    }
    let store = LocalFileSystem::new_with_prefix(path).map_err(|e| super::understood(&place.url, "", &e))?;
    Ok(RemoteStore {
        store: Arc::new(store.with_fsync(true)),
        url: place.url.clone(),
        prefix: Path::default(),
        folder: Some(path.into()),
        is_read_only: false,
        creates: true,
    })
}

/// A folder that is only read, and that may not be mounted now.
fn absent_folder(place: &Place, path: &str) -> Result<RemoteStore, RegistryError> {
    if !path.starts_with('/') {
        return Err(refused(place, "a folder is given as file:///FOLDER, with three slashes"));
    }
    let prefix =
        Path::from_absolute_path(path).map_err(|e| refused(place, &format!("its folder is no path: {e}")))?;
    Ok(RemoteStore {
        store: Arc::new(LocalFileSystem::new()),
        url: place.url.clone(),
        prefix,
        folder: None,
        is_read_only: true,
        creates: false,
    })
}

fn prefix_of(place: &Place, prefix: &str) -> Result<Path, RegistryError> {
    Path::parse(prefix.trim_matches('/')).map_err(|e| refused(place, &format!("its prefix is no path: {e}")))
}
