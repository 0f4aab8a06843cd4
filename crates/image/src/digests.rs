//! The digests of an image's chunks, and the form of their list. Owns no file.
//!
//! An image's digest is SHA-256 over one line that says the disk's size and the chunk's, and then the digests of all
//! chunks in order. So a chunk can be checked without the others, and two files with the same content have the same
//! digest whatever holes they have. The list is these digests, 32 bytes each, and nothing else.

use sha2::{Digest, Sha256};

/// Bytes that have a digest of their own; the last chunk may be shorter.
pub const CHUNK_BYTES: u64 = 1 << 20;
/// A chunk's.
pub type ChunkDigest = [u8; 32];

/// The digest of a whole chunk of zeroes.
pub const OF_ZEROES: ChunkDigest = [
    0x30, 0xe1, 0x49, 0x55, 0xeb, 0xf1, 0x35, 0x22, 0x66, 0xdc, 0x2f, 0xf8, 0x06, 0x7e, 0x68, 0x10, 0x46,
    0x07, 0xe7, 0x50, 0xab, 0xb9, 0xd3, 0xb3, 0x65, 0x82, 0xb8, 0xaf, 0x90, 0x9f, 0xcb, 0x58,
];

/// The digest of a chunk.
pub fn of_chunk(chunk: &[u8]) -> ChunkDigest {
    Sha256::digest(chunk).into()
}

/// Makes the digest of a chunk that comes in parts.
#[derive(Default)]
pub struct OfParts(Sha256);

impl OfParts {
    /// The next part.
    pub fn add(&mut self, part: &[u8]) {
        self.0.update(part);
    }

    /// The digest of all parts, as one chunk.
    pub fn finish(self) -> ChunkDigest {
        self.0.finalize().into()
    }
}

/// How long the list of a disk of this size is, in bytes.
pub fn list_bytes(size_bytes: u64) -> u64 {
    size_bytes.div_ceil(CHUNK_BYTES) * size_of::<ChunkDigest>() as u64
}

/// Makes the digest of an image from those of its chunks.
pub struct Root(Sha256);

impl Root {
    /// Of a disk of this size.
    pub fn new(size_bytes: u64) -> Root {
        Root(Sha256::new().chain_update(format!("spillway-image 1 {size_bytes} {CHUNK_BYTES}\n")))
    }

    /// The next chunk's.
    pub fn add(&mut self, digest: &ChunkDigest) {
        self.0.update(digest);
    }

    /// `sha256:` and 64 hexadecimal digits.
    pub fn finish(self) -> String {
        named(&self.finish_bytes())
    }

    /// The same as bytes.
    pub fn finish_bytes(self) -> ChunkDigest {
        self.0.finalize().into()
    }
}

/// Lower-case hexadecimal digits, two for each byte.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// An image's digest as people and APIs have it: `sha256:` and 64 lower-case hexadecimal digits.
pub fn named(root: &ChunkDigest) -> String {
    format!("sha256:{}", hex(root))
}

/// The bytes of an image's digest: `sha256:` and 64 lower-case hexadecimal digits.
pub fn root_of(digest: &str) -> Option<ChunkDigest> {
    digest.strip_prefix("sha256:").and_then(unhex)
}

/// 32 bytes from 64 lower-case hexadecimal digits.
pub fn unhex(text: &str) -> Option<ChunkDigest> {
    let digit = |b: u8| match b {
        b'0'..=b'9' => Some(b - b'0'),
        b'a'..=b'f' => Some(b - b'a' + 10),
        _ => None,
    };
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    if pairs.len() != 32 || !rest.is_empty() {
        return None;
    }
    let mut bytes = [0; 32];
    for (byte, [high, low]) in bytes.iter_mut().zip(pairs) {
        *byte = digit(*high)? << 4 | digit(*low)?;
    }
    Some(bytes)
}
