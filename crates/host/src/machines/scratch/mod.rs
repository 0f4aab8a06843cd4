//! Scratch disks: temporary data of pooled machines, which is gone after each reset.

mod format;
mod partitions;

use super::belongings::{failed, make, remove};
use crate::copying;
use crate::error::HostError;
use spillway_api::ScratchFormat;
use std::fs::File;
use std::path::Path;

pub use format::FOLDER as TEMPLATES;

/// Folder for scratch disks in a store.
pub const FOLDER: &str = "scratch";

/// Creates an empty scratch disk with this file system, and replaces what was there.
pub fn empty(path: &Path, bytes: u64, format: Option<&ScratchFormat>) -> Result<(), HostError> {
    remove(path)?;
    make(path, bytes)?;
    let Some(format) = format else { return Ok(()) };
    let store = path.parent().and_then(Path::parent).unwrap_or(Path::new("/"));
    let template = format::template(store, format, bytes)?;
    let cannot = |e| failed(path, "cannot be formatted", e);
    let disk = File::options().read(true).write(true).open(path).map_err(cannot)?;
    if copying::share(&template, &disk) {
        return Ok(());
    }
    // Nothing of it has to survive a power loss.
    copying::copy(&template, 0..bytes, &disk, 0, |_| Ok(()), cannot)
}
