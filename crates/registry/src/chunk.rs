//! Chunks as objects: one zstd frame each. Owns the bounds of a chunk and of its frame.

use crate::error::RegistryError;
use crate::keys::chunk_key;
use spillway_image::digests::{CHUNK_BYTES, ChunkDigest, of_chunk};

/// Sizes of chunks that the format allows, in bytes.
const CHUNK_SIZES: std::ops::RangeInclusive<u64> = 256 << 10..=4 << 20;
/// zstd's fastest regular level: the bytes are sent once, and read many times.
const LEVEL: i32 = 1;
/// Largest frame that is read, in bytes: a chunk that cannot be compressed, with what zstd adds to it.
pub const MOST_FRAME_BYTES: u64 = CHUNK_BYTES + (CHUNK_BYTES >> 8) + 64;

/// Refuses a chunk size that the format does not allow, or that this version does not read.
pub fn check_chunk_bytes(chunk_bytes: u64) -> Result<(), String> {
    if !CHUNK_SIZES.contains(&chunk_bytes) || !chunk_bytes.is_power_of_two() {
        return Err(format!(
            "chunks of {chunk_bytes} bytes are out of range: the format has 256 KiB to 4 MiB, a power of two"
        ));
    }
    if chunk_bytes != CHUNK_BYTES {
        return Err(format!("it has chunks of {chunk_bytes} bytes; this version reads {CHUNK_BYTES}"));
    }
    Ok(())
}

/// The frame of a chunk.
pub fn compress(plain: &[u8]) -> Vec<u8> {
    let mut frame = Vec::with_capacity(zstd_safe::compress_bound(plain.len()));
    // It fails only if the frame does not fit.
    zstd_safe::compress(&mut frame, plain, LEVEL).expect("the bound is zstd's own");
    frame
}

/// The plain bytes of a frame. It is an error if they are not of this length, or have another digest.
pub fn open_frame(frame: &[u8], digest: &ChunkDigest, len: u64) -> Result<Vec<u8>, RegistryError> {
    // One byte more than allowed shows that there are too many; no frame makes this grow.
    let mut plain = Vec::with_capacity(len as usize + 1);
    let damaged = |why: &str| RegistryError::damaged(&chunk_key(digest), why);
    zstd_safe::decompress(&mut plain, frame).map_err(|_| damaged("it is no zstd frame of this length"))?;
    if plain.len() as u64 != len || of_chunk(&plain) != *digest {
        return Err(damaged("its content is not what its name says"));
    }
    Ok(plain)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RegistryErrorKind;

    #[test]
    fn a_frame_is_read_only_as_the_chunk_that_it_should_be() {
        let plain: Vec<u8> = (0..CHUNK_BYTES).map(|n| ((n * n) >> 7) as u8).collect();
        let (digest, frame) = (of_chunk(&plain), compress(&plain));
        assert!(frame.len() as u64 <= MOST_FRAME_BYTES);
        assert_eq!(open_frame(&frame, &digest, CHUNK_BYTES).as_ref(), Ok(&plain));
        let other = of_chunk(b"other");
        let bomb = compress(&vec![0; 64 << 20]);
        let cases = [
            (&frame[..], &other, CHUNK_BYTES),
            (&frame, &digest, CHUNK_BYTES - 1),
            (&frame[..frame.len() - 1], &digest, CHUNK_BYTES),
            (&bomb, &digest, CHUNK_BYTES),
            (b"", &digest, CHUNK_BYTES),
            (&plain, &digest, CHUNK_BYTES),
        ];
        for (frame, digest, len) in cases {
            let refused = open_frame(frame, digest, len).unwrap_err();
            assert_eq!(refused.kind, RegistryErrorKind::Damaged);
        }
    }

    #[test]
    fn no_chunk_has_a_frame_larger_than_the_bound() {
        assert!(zstd_safe::compress_bound(CHUNK_BYTES as usize) as u64 <= MOST_FRAME_BYTES);
    }
}
