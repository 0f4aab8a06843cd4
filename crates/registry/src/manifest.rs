//! Manifest of an image. Owns its form.
//!
//! A manifest follows from the image alone: two hosts that push one image write the same bytes, so that a signature of it
//! holds whoever pushed.

use crate::chunk::check_chunk_bytes;
use crate::index::Index;
use serde::{Deserialize, Serialize};
use spillway_image::digests::{ChunkDigest, named, root_of};
use spillway_image::size_fault;

/// Largest manifest that is read, in bytes.
pub const MOST_MANIFEST_BYTES: u64 = 4096;

/// What an image is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Format of the manifest: 1.
    pub format: u32,
    /// Digest of the image: `sha256:` and 64 hexadecimal digits.
    pub digest: String,
    /// Size of the disk, in bytes.
    pub size_bytes: u64,
    /// Size of each chunk but the last, in bytes.
    pub chunk_bytes: u64,
    /// How chunks are encoded: `zstd`.
    pub encoding: String,
    /// SHA-256 of the index, 64 hexadecimal digits.
    pub index_sha256: String,
}

impl Manifest {
    /// The manifest of an image.
    pub fn of(index: &Index) -> Manifest {
        Manifest {
            format: 1,
            digest: named(&index.root()),
            size_bytes: index.size_bytes,
            chunk_bytes: index.chunk_bytes,
            encoding: "zstd".into(),
            index_sha256: Index::file_digest(&index.to_bytes()),
        }
    }

    /// The object.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec_pretty(self).expect("it has only numbers and texts");
        bytes.push(b'\n');
        bytes
    }

    /// Reads the manifest of the image with this digest.
    ///
    /// # Errors
    /// Why it is not one that can be used, in words.
    pub fn parse(bytes: &[u8], root: &ChunkDigest) -> Result<Manifest, String> {
        #[derive(Deserialize)]
        struct Format {
            format: u32,
        }
        let format: Format = serde_json::from_slice(bytes).map_err(|e| format!("it is no manifest ({e})"))?;
        if format.format != 1 {
            return Err(format!("it has format {}; this version reads 1", format.format));
        }
        let manifest: Manifest = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
        if manifest.encoding != "zstd" {
            return Err("its chunks have an encoding that this version does not read".into());
        }
        check_chunk_bytes(manifest.chunk_bytes)?;
        if let Some(fault) = size_fault(manifest.size_bytes) {
            return Err(format!("its disk {fault}"));
        }
        if root_of(&manifest.digest) != Some(*root) {
            return Err("it is the manifest of another image".into());
        }
        Ok(manifest)
    }

    /// Reads the index that belongs to the manifest.
    ///
    /// # Errors
    /// Why it does not, in words.
    pub fn index(&self, bytes: &[u8]) -> Result<Index, String> {
        if Index::file_digest(bytes) != self.index_sha256 {
            return Err("it is not the index that the manifest names".into());
        }
        let index = Index::parse(bytes)?;
        if index.size_bytes != self.size_bytes || named(&index.root()) != self.digest {
            return Err("it is the index of another image".into());
        }
        Ok(index)
    }

    /// Size of the index, in bytes.
    pub fn index_bytes(&self) -> u64 {
        Index::file_bytes(self.size_bytes, self.chunk_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_and_its_index_belong_together() {
        let index = Index { size_bytes: (2 << 20) + 512, chunk_bytes: 1 << 20, digests: vec![[7; 32]; 3] };
        let manifest = Manifest::of(&index);
        assert_eq!(Manifest::parse(&manifest.to_bytes(), &index.root()).as_ref(), Ok(&manifest));
        assert_eq!(manifest.index(&index.to_bytes()).as_ref(), Ok(&index));
        assert_eq!(manifest.index_bytes(), index.to_bytes().len() as u64);
        let other = Index { size_bytes: 2 << 20, digests: vec![[7; 32]; 2], ..index.clone() };
        assert!(manifest.index(&other.to_bytes()).unwrap_err().contains("not the index"));
        let lies = Manifest { index_sha256: Index::file_digest(&other.to_bytes()), ..manifest.clone() };
        assert!(lies.index(&other.to_bytes()).unwrap_err().contains("another image"));
        let refused = |change: fn(&mut Manifest), word: &str| {
            let mut changed = manifest.clone();
            change(&mut changed);
            let why = Manifest::parse(&changed.to_bytes(), &index.root()).unwrap_err();
            assert!(why.contains(word), "{why}");
        };
        refused(|m| m.format = 2, "format 2");
        refused(|m| m.encoding = "xz".into(), "encoding");
        refused(|m| m.chunk_bytes = 4096, "out of range");
        refused(|m| m.chunk_bytes = 4 << 20, "this version reads");
        refused(|m| m.size_bytes = u64::MAX, "disk");
        refused(|m| m.digest = format!("sha256:{}", "0".repeat(64)), "another image");
        assert!(Manifest::parse(b"{}", &index.root()).is_err());
    }
}
