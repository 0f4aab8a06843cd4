//! Short paths for sockets: a socket address holds 107 bytes (unix(7)), and a folder's path may be longer.
//!
//! Invariant: the path is valid for as long as the value exists.

use crate::error::HostError;
use spillway_api::ErrorCode;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

/// A path through an open descriptor of the folder.
pub struct ShortPath {
    path: PathBuf,
    _folder: File,
}

impl ShortPath {
    /// Creates the path of a socket in a folder.
    pub fn of(folder: &Path, name: &str) -> Result<ShortPath, HostError> {
        let failed = |e| HostError::new(ErrorCode::Internal, format!("{}: {e}", folder.display()));
        let opened = File::open(folder).map_err(failed)?;
        let path = PathBuf::from(format!("/proc/self/fd/{}/{name}", opened.as_raw_fd()));
        Ok(ShortPath { path, _folder: opened })
    }

    /// Returns the path to connect to.
    pub fn path(&self) -> &Path {
        &self.path
    }
}
