//! Whether a store is a registry, and what it can do. Owns `spillway.json`.

use crate::error::{RegistryError, RegistryErrorKind};
use crate::keys::{CHUNKS, FORMAT, IMAGES, NAMES, name_of};
use crate::objects::Objects;
use serde::{Deserialize, Serialize};

const MOST_FORMAT_BYTES: u64 = 4096;

/// Content of `spillway.json`.
#[derive(Serialize, Deserialize)]
struct Format {
    format: u32,
}

/// What a store was found to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbeReport {
    /// Whether the store is a registry.
    pub is_registry: bool,
    /// Whether objects can be listed, which the search for the highest version and the garbage collection need.
    pub can_list: bool,
    /// Whether objects can be written and deleted. None if that was not tried.
    pub can_write: Option<bool>,
    /// Whether two writers of one object are told apart. None if that was not tried.
    pub can_create: Option<bool>,
    /// Names of images with their versions, the lowest first; empty if the store cannot list.
    pub images: Vec<(String, u32)>,
}

/// Refuses a store that is no registry, or one of another format.
///
/// # Errors
/// That, or the store cannot say.
pub async fn check_format(objects: &impl Objects) -> Result<(), RegistryError> {
    match is_registry(objects).await? {
        true => Ok(()),
        false => Err(RegistryError::absent(format!(
            "this is no registry: it has no {FORMAT}. Correct its address, or mount its folder; 'spillway registry add' makes an empty place \
             a registry"
        ))),
    }
}

/// Whether there is a registry: if not, what it lacks says nothing of what it had.
///
/// # Errors
/// The store cannot say, or has another format.
pub async fn is_registry(objects: &impl Objects) -> Result<bool, RegistryError> {
    let Some(bytes) = objects.get(FORMAT, MOST_FORMAT_BYTES).await? else { return Ok(false) };
    let format: Format =
        serde_json::from_slice(&bytes).map_err(|e| RegistryError::damaged(FORMAT, format!("{e}")))?;
    match format.format {
        1 => Ok(true),
        other => {
            let message =
                format!("the registry has format {other}; this version reads 1: use a newer Spillway");
            Err(RegistryError::new(RegistryErrorKind::Unsupported, message))
        }
    }
}

/// Makes an empty store a registry. Does nothing if it is one.
///
/// # Errors
/// The store has objects of another program, another format, or cannot be written.
pub async fn found(objects: &impl Objects) -> Result<(), RegistryError> {
    if is_registry(objects).await? {
        return Ok(());
    }
    check_empty(objects).await?;
    let mut bytes = serde_json::to_vec(&Format { format: 1 }).expect("it is a number");
    bytes.push(b'\n');
    // Another host may have been faster.
    objects.create(FORMAT, bytes).await?;
    Ok(())
}

/// Refuses a store with objects where those of a registry are.
async fn check_empty(objects: &impl Objects) -> Result<(), RegistryError> {
    for folder in [CHUNKS, IMAGES, NAMES] {
        if !objects.list(folder).await?.is_empty() {
            let message = format!(
                "this is no registry, and has objects of another program below {folder}/: choose an empty prefix or folder"
            );
            return Err(RegistryError::new(RegistryErrorKind::Unsupported, message));
        }
    }
    Ok(())
}

/// Finds out what a store is, and, unless it is read only, what can be done with it. `id` names the objects that are
/// written for that, and deleted.
pub async fn probe(objects: &impl Objects, id: Option<&str>) -> Result<ProbeReport, RegistryError> {
    let is_registry = is_registry(objects).await?;
    let (can_list, images) = match objects.list(NAMES).await {
        Ok(listed) => {
            let mut images: Vec<_> = listed
                .iter()
                .filter_map(|object| name_of(&object.key))
                .map(|(name, version)| (name.to_owned(), version))
                .collect();
            images.sort();
            (true, images)
        }
        Err(e) if e.kind == RegistryErrorKind::Unsupported => (false, Vec::new()),
        Err(e) => return Err(e),
    };
    let mut report = ProbeReport { is_registry, can_list, can_write: None, can_create: None, images };
    if let Some(id) = id {
        let key = format!("probe/{id}");
        match objects.put(&key, b"probe".to_vec()).await {
            Ok(()) => {
                let second = objects.create(&key, b"probe".to_vec()).await;
                objects.delete(vec![key]).await?;
                report.can_write = Some(true);
                report.can_create = Some(matches!(second, Ok(false)));
                if !is_registry {
                    check_empty(objects).await?;
                }
            }
            Err(e) if matches!(e.kind, RegistryErrorKind::Denied | RegistryErrorKind::Unsupported) => {
                report.can_write = Some(false);
            }
            Err(e) => return Err(e),
        }
    }
    Ok(report)
}
