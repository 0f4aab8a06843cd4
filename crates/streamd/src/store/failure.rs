//! Errors of stores, in words. Owns what each answer means, and what to do about it.

use crate::causes::{root_cause, shortened};
use object_store::Error;
use spillway_registry::{RegistryError, RegistryErrorKind};
use std::error::Error as _;

/// Whether the store says that there is no such object. A store without the bucket says something else.
pub fn is_absent(error: &Error) -> bool {
    matches!(error, Error::NotFound { .. }) && !chain(error).contains("NoSuchBucket")
}

/// An error about an object, with what to do.
pub fn understood(url: &str, key: &str, error: &Error) -> RegistryError {
    let said = chain(error);
    let has = |words: &[&str]| words.iter().any(|word| said.contains(word));
    let what = if key.is_empty() { url.to_owned() } else { format!("{url}: {key}") };
    let (kind, why) = if has(&["NoSuchBucket"]) {
        (RegistryErrorKind::Absent, "the bucket does not exist: create it, or correct the address".to_owned())
    } else if has(&["InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken"]) {
        (RegistryErrorKind::Denied, "the registry refuses the credentials: correct their file".to_owned())
    } else if has(&["RequestTimeTooSkewed"]) {
        (
            RegistryErrorKind::Denied,
            "the clock of this host differs from the registry's: set the clock".to_owned(),
        )
    } else {
        match error {
            Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => (
                RegistryErrorKind::Denied,
                "the registry refuses it: are there credentials (--credentials), and may they do this?"
                    .to_owned(),
            ),
            Error::NotFound { .. } => (RegistryErrorKind::Absent, "it does not exist".to_owned()),
            Error::NotSupported { .. } | Error::NotImplemented { .. } => {
                (RegistryErrorKind::Unsupported, format!("the registry cannot do it ({})", shortened(&said)))
            }
            Error::Generic { store: "LocalFileSystem", .. } => (RegistryErrorKind::Local, shortened(&said)),
            _ => (
                RegistryErrorKind::Unreachable,
                format!("the registry does not answer as it should: {}", root_cause(error)),
            ),
        }
    };
    RegistryError::new(kind, format!("{what}: {why}"))
}

/// All that an error and its causes say.
fn chain(error: &Error) -> String {
    let mut said = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let words = error.to_string();
        if !said.contains(&words) {
            said += &format!(": {words}");
        }
        cause = error.source();
    }
    said
}
