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
    /// Through the host's page cache: all machines share one copy.
    Host,
    /// Past the page cache (O_DIRECT): every read reaches the store.
    None,
}

impl BaseCache {
    /// All ways, the usual one first.
    pub const ALL: [BaseCache; 2] = [BaseCache::Host, BaseCache::None];

    /// The word for it in the CLI and in documents.
    pub fn name(self) -> &'static str {
        match self {
            BaseCache::Host => "host",
            BaseCache::None => "none",
        }
    }
}
