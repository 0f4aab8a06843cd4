//! The index of an image: the digest of each of its chunks, in the form of casync's `.caibx`. Owns that form.
//!
//! A `.caibx` is a header, a table of 40 bytes per chunk (the offset of the chunk's end, and its digest), and a tail;
//! all numbers are little-endian. Ours has chunks of one size, and SHA-256 as digest (no feature flag).

use crate::chunk::check_chunk_bytes;
use sha2::{Digest, Sha256};
use spillway_image::digests::{ChunkDigest, OF_ZEROES, Root, hex};

/// Types and marks of casync's `caformat.h`.
const INDEX_TYPE: u64 = 0x9682_4d9c_7b12_9ff9;
const TABLE_TYPE: u64 = 0xe75b_9e11_2f17_417d;
const TAIL_MARK: u64 = 0x4b4f_050e_5549_ecd1;
const HEADER_BYTES: u64 = 48;
const TABLE_HEADER_BYTES: u64 = 16;
const ITEM_BYTES: u64 = 40;
const TAIL_BYTES: u64 = 40;

/// The chunks of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Index {
    /// Size of the image, in bytes.
    pub size_bytes: u64,
    /// Size of each chunk but the last, in bytes.
    pub chunk_bytes: u64,
    /// Digest of each chunk's plain bytes.
    pub digests: Vec<ChunkDigest>,
}

impl Index {
    /// The image's digest: what its version has as `digest`, and its folder in the registry as name.
    pub fn root(&self) -> ChunkDigest {
        let mut root = Root::new(self.size_bytes);
        self.digests.iter().for_each(|digest| root.add(digest));
        root.finish_bytes()
    }

    /// Size of a chunk, in bytes.
    pub fn len_of(&self, chunk: usize) -> u64 {
        (self.size_bytes - chunk as u64 * self.chunk_bytes).min(self.chunk_bytes)
    }

    /// Whether a chunk is known to be all zeroes, so that nobody has to fetch it.
    pub fn is_zero(&self, chunk: usize) -> bool {
        self.digests[chunk] == OF_ZEROES
    }

    /// Size of the `.caibx` of an image of this size.
    pub fn file_bytes(size_bytes: u64, chunk_bytes: u64) -> u64 {
        HEADER_BYTES + TABLE_HEADER_BYTES + size_bytes.div_ceil(chunk_bytes) * ITEM_BYTES + TAIL_BYTES
    }

    /// The `.caibx`.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(Index::file_bytes(self.size_bytes, self.chunk_bytes) as usize);
        let mut put = |number: u64| bytes.extend_from_slice(&number.to_le_bytes());
        [HEADER_BYTES, INDEX_TYPE, 0, self.chunk_bytes, self.chunk_bytes, self.chunk_bytes]
            .into_iter()
            .for_each(&mut put);
        // The table is as long as the file says, which casync writes as the largest number.
        [u64::MAX, TABLE_TYPE].into_iter().for_each(&mut put);
        for (chunk, digest) in self.digests.iter().enumerate() {
            let end = chunk as u64 * self.chunk_bytes + self.len_of(chunk);
            bytes.extend_from_slice(&end.to_le_bytes());
            bytes.extend_from_slice(digest);
        }
        let table = TABLE_HEADER_BYTES + self.digests.len() as u64 * ITEM_BYTES + TAIL_BYTES;
        for number in [0, 0, HEADER_BYTES, table, TAIL_MARK] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    /// Reads a `.caibx`.
    ///
    /// # Errors
    /// Why it is not one of ours, in words.
    pub fn parse(bytes: &[u8]) -> Result<Index, String> {
        let (numbers, rest) = bytes.as_chunks::<8>();
        let number = |at: usize| numbers.get(at).map(|bytes| u64::from_le_bytes(*bytes));
        if !rest.is_empty() || number(0) != Some(HEADER_BYTES) || number(1) != Some(INDEX_TYPE) {
            return Err("it is no index of casync".into());
        }
        if number(2) != Some(0) {
            return Err("its digests are not SHA-256, or it is an index of files".into());
        }
        let [least, average, most] = [3, 4, 5].map(number);
        let chunk_bytes = average.filter(|_| least == average && most == average);
        let chunk_bytes = chunk_bytes.ok_or("its chunks have different sizes")?;
        check_chunk_bytes(chunk_bytes)?;
        if number(6) != Some(u64::MAX) || number(7) != Some(TABLE_TYPE) {
            return Err("it has no table".into());
        }
        let table = &bytes[(HEADER_BYTES + TABLE_HEADER_BYTES) as usize..];
        let end = table.len().checked_sub(TAIL_BYTES as usize).ok_or("it is cut off")?;
        let (items, tail) = table.split_at(end);
        let (items, rest) = items.as_chunks::<{ ITEM_BYTES as usize }>();
        let length = TABLE_HEADER_BYTES + table.len() as u64;
        let expected: Vec<u8> = [0, 0, HEADER_BYTES, length, TAIL_MARK]
            .iter()
            .flat_map(|number: &u64| number.to_le_bytes())
            .collect();
        if !rest.is_empty() || tail != expected {
            return Err("it is cut off".into());
        }
        let mut index = Index { size_bytes: 0, chunk_bytes, digests: Vec::with_capacity(items.len()) };
        for item in items {
            let (offset, digest) = item.split_first_chunk::<8>().ok_or("it is cut off")?;
            let end = u64::from_le_bytes(*offset);
            // Every chunk but the last is whole.
            let is_last = index.digests.len() + 1 == items.len();
            let len = end.checked_sub(index.size_bytes).filter(|len| (1..=chunk_bytes).contains(len));
            match len {
                Some(len) if len == chunk_bytes || is_last => {}
                _ => return Err(format!("chunk {} has a wrong size", index.digests.len())),
            }
            index.size_bytes = end;
            index.digests.push(digest.try_into().map_err(|_| "it is cut off")?);
        }
        Ok(index)
    }

    /// SHA-256 of the `.caibx`, as a manifest has it.
    pub fn file_digest(bytes: &[u8]) -> String {
        hex(&Sha256::digest(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index(size_bytes: u64) -> Index {
        let chunk_bytes = 1 << 20;
        let digests = (0..size_bytes.div_ceil(chunk_bytes)).map(|n| [n as u8; 32]).collect();
        Index { size_bytes, chunk_bytes, digests }
    }

    #[test]
    fn an_index_is_read_as_it_was_written() {
        for size in [0, 512, 1 << 20, (1 << 20) + 512, (5 << 20) - 512] {
            let index = index(size);
            let bytes = index.to_bytes();
            assert_eq!(bytes.len() as u64, Index::file_bytes(size, 1 << 20));
            assert_eq!(Index::parse(&bytes), Ok(index));
        }
    }

    #[test]
    fn a_changed_or_cut_index_is_refused_or_another_one() {
        let good = index((3 << 20) + 512);
        let bytes = good.to_bytes();
        for len in 0..bytes.len() {
            assert!(Index::parse(&bytes[..len]).is_err(), "{len}");
        }
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 0x40;
            assert_ne!(Index::parse(&changed).as_ref(), Ok(&good), "{at}");
        }
    }
}
