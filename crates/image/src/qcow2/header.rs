//! The qcow2 header: what a base image may be. Owns the check, which supervisor and worker share; never reads a
//! file, never looks at the names of backing and data files: an image that needs one is refused.
//!
//! Invariant: an accepted header has only features that `image` carries out. Offsets and sizes as in QEMU's
//! `docs/interop/qcow2.txt`; all numbers are big-endian.

use crate::error::{ImageError, ImageErrorKind};
use std::borrow::Cow;

/// The first four bytes: `QFI\xfb`.
pub const MAGIC: [u8; 4] = [b'Q', b'F', b'I', 0xfb];
/// As much of the file's start as [`Header::parse`] looks at.
pub const HEADER_BYTES: usize = 112;

const V2_HEADER_BYTES: usize = 72;
const V3_HEADER_BYTES: u32 = 104;

const DIRTY: u64 = 1 << 0;
const CORRUPT: u64 = 1 << 1;
const EXTERNAL_DATA: u64 = 1 << 2;
const COMPRESSION_TYPE: u64 = 1 << 3;
const EXTENDED_L2: u64 = 1 << 4;

/// How compressed clusters are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// A raw deflate stream.
    Deflate,
    /// zstd frames.
    Zstd,
}

/// What is needed of the header to read the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// 2 or 3.
    pub version: u32,
    /// log2 of the cluster size: 9 to 21.
    pub cluster_bits: u32,
    /// Size that a disk sees.
    pub virtual_size: u64,
    /// Where the L1 table lies; a multiple of the cluster size.
    pub l1_offset: u64,
    /// How compressed clusters are compressed.
    pub compression: Compression,
}

fn unsupported(what: impl Into<Cow<'static, str>>, advice: &'static str) -> ImageError {
    ImageError::new(ImageErrorKind::Unsupported, what, advice)
}

fn damaged(what: impl Into<Cow<'static, str>>) -> ImageError {
    let advice = "run `qemu-img check` on it, or make it anew from its source";
    ImageError::new(ImageErrorKind::Damaged, what, advice)
}

const CONVERT: &str = "make a complete image with `qemu-img convert -O qcow2 OLD NEW`";

impl Header {
    /// Checks the first [`HEADER_BYTES`] of an image (fewer only if the file is shorter) against the size of
    /// its file.
    pub fn parse(bytes: &[u8], file_bytes: u64) -> Result<Header, ImageError> {
        if bytes.get(..4) != Some(&MAGIC) {
            return Err(ImageError::new(
                ImageErrorKind::Format,
                "is not a qcow2 image (its first bytes are not QFI\\xfb)",
                "if it is a raw image say so with --format raw, else convert it with `qemu-img convert -O qcow2`",
            ));
        }
        if bytes.len() < V2_HEADER_BYTES {
            return Err(damaged("ends inside its qcow2 header"));
        }
        let version = be32(bytes, 4);
        if version != 2 && version != 3 {
            return Err(unsupported(format!("is qcow2 of the unknown version {version}"), CONVERT));
        }
        let compression = if version == 3 { v3_features(bytes)? } else { Compression::Deflate };

        if be64(bytes, 8) != 0 {
            return Err(unsupported("needs a backing file, which is never followed", CONVERT));
        }
        match be32(bytes, 32) {
            0 => {}
            _ => {
                return Err(unsupported(
                    "is encrypted",
                    "decrypt it with `qemu-img convert` into a new image",
                ));
            }
        }
        let cluster_bits = be32(bytes, 20);
        if !(9..=21).contains(&cluster_bits) {
            return Err(damaged(format!(
                "has clusters of 2^{cluster_bits} bytes, outside qcow2's 512 bytes to 2 MiB"
            )));
        }
        let virtual_size = be64(bytes, 24);
        if virtual_size == 0 || !virtual_size.is_multiple_of(512) {
            return Err(ImageError::new(
                ImageErrorKind::Size,
                format!("has a virtual size of {virtual_size} bytes, not a positive multiple of 512"),
                "give it such a size with `qemu-img resize`",
            ));
        }

        let header = Header { version, cluster_bits, virtual_size, l1_offset: be64(bytes, 40), compression };
        let l1_entries = virtual_size.div_ceil(header.l2_coverage());
        if u64::from(be32(bytes, 36)) < l1_entries {
            return Err(damaged("has an L1 table too short for its virtual size"));
        }
        let l1_end = l1_entries.checked_mul(8).and_then(|len| header.l1_offset.checked_add(len));
        if header.l1_offset == 0
            || !header.l1_offset.is_multiple_of(header.cluster_bytes())
            || l1_end.is_none_or(|end| end > file_bytes)
        {
            return Err(damaged("has an L1 table that does not lie inside the file"));
        }
        Ok(header)
    }

    /// Bytes in a cluster.
    pub fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Entries in an L2 table.
    pub fn l2_entries(&self) -> u64 {
        self.cluster_bytes() / 8
    }

    /// Bytes of disk that one L2 table covers; at most 2^39.
    pub fn l2_coverage(&self) -> u64 {
        self.cluster_bytes() * self.l2_entries()
    }
}

/// The fields that version 3 adds: refuses what a base image may not have.
fn v3_features(bytes: &[u8]) -> Result<Compression, ImageError> {
    if bytes.len() < V3_HEADER_BYTES as usize || be32(bytes, 100) < V3_HEADER_BYTES {
        return Err(damaged("has a header too short for qcow2 version 3"));
    }
    let features = be64(bytes, 72);
    if features & CORRUPT != 0 {
        return Err(ImageError::new(
            ImageErrorKind::Damaged,
            "is marked corrupt",
            "repair it with `qemu-img check -r all`, or make it anew from its source",
        ));
    }
    if features & DIRTY != 0 {
        return Err(ImageError::new(
            ImageErrorKind::Damaged,
            "was not closed cleanly (it is marked dirty, or a machine still writes to it)",
            "close it, then repair it with `qemu-img check -r all`",
        ));
    }
    if features & EXTERNAL_DATA != 0 {
        return Err(unsupported("keeps its data in another file, which is never followed", CONVERT));
    }
    if features & EXTENDED_L2 != 0 {
        return Err(unsupported(
            "has subclusters (extended_l2), which Spillway does not read",
            "make a new image with `qemu-img convert -O qcow2 -o extended_l2=off OLD NEW`",
        ));
    }
    let unknown = features & !(DIRTY | CORRUPT | EXTERNAL_DATA | COMPRESSION_TYPE | EXTENDED_L2);
    if unknown != 0 {
        return Err(unsupported(
            format!("has features that Spillway does not know (incompatible bits {unknown:#x})"),
            CONVERT,
        ));
    }
    // The field is there only if the header is long enough; without it, and without the bit, it is 0.
    let kind = if be32(bytes, 100) > V3_HEADER_BYTES { bytes.get(104).copied().unwrap_or(0) } else { 0 };
    match (features & COMPRESSION_TYPE != 0, kind) {
        (false, 0) => Ok(Compression::Deflate),
        (true, 1) => Ok(Compression::Zstd),
        (bit, _) => Err(unsupported(
            format!("has the unknown compression type {kind} (feature bit {})", u8::from(bit)),
            "make a new image with `qemu-img convert -O qcow2 -c OLD NEW`",
        )),
    }
}

fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes; the caller checked the length"))
}

fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes; the caller checked the length"))
}
