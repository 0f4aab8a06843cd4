//! Sockets in folders with long names: the address of one has 107 bytes (unix(7)), a folder's path may have more.
//!
//! Invariant: the path is good for as long as the value lives.

use crate::error::HostError;
use spillway_api::ErrorCode;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

/// A path by way of the folder, which is held open.
pub struct ShortPath {
    path: PathBuf,
    _folder: File,
}

impl ShortPath {
    /// To a socket in a folder.
    pub fn of(folder: &Path, name: &str) -> Result<ShortPath, HostError> {
        let failed = |e| HostError::new(ErrorCode::Internal, format!("{}: {e}", folder.display()));
        let opened = File::open(folder).map_err(failed)?;
        let path = PathBuf::from(format!("/proc/self/fd/{}/{name}", opened.as_raw_fd()));
        Ok(ShortPath { path, _folder: opened })
    }

    /// For `connect`.
    pub fn path(&self) -> &Path {
        &self.path
    }
}
