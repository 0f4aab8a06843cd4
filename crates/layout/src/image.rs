//! Words for base images: their formats, and how they are read.

use serde::{Deserialize, Serialize};

/// Format of a base image, said explicitly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ImageFormat {
    /// Plain bytes.
    Raw,
    /// QEMU's copy-on-write format, without backing or data file.
    Qcow2,
}

/// How the base image is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BaseCache {
    /// Through the host's page cache: one copy serves all machines.
    Host,
    /// Past it: every base read reaches the store.
    None,
}
