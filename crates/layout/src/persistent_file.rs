//! The file of mode `persistent`: what lies where in it, and its header. Owns the format; opens, reads and writes nothing.
//!
//! | at | what |
//! | --- | --- |
//! | 0, 4096 | the header, twice: that with the right checksum and the higher sequence counts |
//! | [`SEAL_AT`] | a page that is reserved and never written: it ends when another program writes a copy over the file |
//! | [`LIVE_AT`] | the live map: two bits a block, shared memory of whoever serves |
//! | [`DURABLE_AT`] | a page for the mark of a reset, then the durable map, of the same shape |
//! | [`DATA_AT`] | the blocks, each in its place, and behind them one that is never used |
//!
//! The maps have room for the largest disk, so that one that grows moves nothing; the file is sparse. A map has no checksum:
//! each block's bits are old or new whatever becomes of a page, and both are true. Invariant: a header that is decoded is one
//! that this program could have encoded; whatever else the bytes are is an error in words.

use crate::{CacheId, MAX_DISK_BYTES, SECTOR_BYTES};

/// Where the seal is.
pub const SEAL_AT: u64 = 1 << 20;
/// Where the live map begins.
pub const LIVE_AT: u64 = 2 << 20;
/// Where the page of the mark is, and behind it the durable map.
pub const DURABLE_AT: u64 = 258 << 20;
/// Where block 0 is.
pub const DATA_AT: u64 = 516 << 20;
/// Where the two headers are.
pub const HEADERS_AT: [u64; 2] = [0, 4096];
/// A header is one sector, so that a medium writes all of it or nothing.
pub const HEADER_BYTES: usize = 512;
/// Version of this layout.
const VERSION: u32 = 1;
const MAGIC: [u8; 16] = *b"SPILLWAY: DISK\n\0";
const CHECKSUM_AT: usize = 20;
const IDENTITY_AT: usize = 72;
/// Most bytes of what says which image it is.
pub const MAX_IDENTITY_BYTES: usize = HEADER_BYTES - IDENTITY_AT;

/// What the file says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// One more each time that it is written.
    pub sequence: u64,
    /// Size that the guest sees.
    pub size_bytes: u64,
    /// Virtual size of the base image.
    pub base_bytes: u64,
    /// The page cache that the live map is in; none where that has no name, and while a start copies the durable map over the
    /// live map. All zero on the medium.
    pub cache: Option<CacheId>,
    /// Which image it was made from.
    pub identity: String,
}

/// Why a sector is no header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeaderFault {
    /// It never was one.
    None,
    /// It is of another version of the layout.
    Version(u32),
    /// It is damaged: what.
    Damaged(&'static str),
}

impl Header {
    /// As it lies in the file. The identity has at most [`MAX_IDENTITY_BYTES`] bytes.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..16].copy_from_slice(&MAGIC);
        bytes[16..20].copy_from_slice(&VERSION.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.size_bytes.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.base_bytes.to_le_bytes());
        bytes[48..64].copy_from_slice(&self.cache.map_or([0; 16], |cache| cache.0));
        let identity = self.identity.as_bytes();
        bytes[64..72].copy_from_slice(&(identity.len() as u64).to_le_bytes());
        bytes[IDENTITY_AT..][..identity.len()].copy_from_slice(identity);
        let checksum = crc32c::crc32c(&bytes);
        bytes[CHECKSUM_AT..24].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// From bytes of whatever origin.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Header, HeaderFault> {
        if bytes[..16] != MAGIC {
            return Err(HeaderFault::None);
        }
        let mut without = *bytes;
        without[CHECKSUM_AT..24].fill(0);
        if u32_at(bytes, CHECKSUM_AT) != crc32c::crc32c(&without) {
            return Err(HeaderFault::Damaged("its checksum is wrong"));
        }
        let version = u32_at(bytes, 16);
        if version != VERSION {
            return Err(HeaderFault::Version(version));
        }
        let (size_bytes, base_bytes) = (u64_at(bytes, 32), u64_at(bytes, 40));
        if size_bytes == 0 || !size_bytes.is_multiple_of(SECTOR_BYTES) || size_bytes > MAX_DISK_BYTES {
            return Err(HeaderFault::Damaged("its size is none that a disk has"));
        }
        if base_bytes > size_bytes || !base_bytes.is_multiple_of(SECTOR_BYTES) {
            return Err(HeaderFault::Damaged("its image's size is none that an image has"));
        }
        let len = usize::try_from(u64_at(bytes, 64)).ok().filter(|&len| len <= MAX_IDENTITY_BYTES);
        let identity = len.and_then(|len| std::str::from_utf8(&bytes[IDENTITY_AT..IDENTITY_AT + len]).ok());
        let identity = identity.filter(|text| !text.contains(char::is_control));
        let identity = identity.ok_or(HeaderFault::Damaged("what names its image is no text"))?.to_owned();
        let cache = bytes[48..64].try_into().expect("sixteen bytes");
        let cache = (cache != [0; 16]).then_some(CacheId(cache));
        Ok(Header { sequence: u64_at(bytes, 24), size_bytes, base_bytes, cache, identity })
    }

    /// That of the two which counts.
    pub fn choose(slots: &[[u8; HEADER_BYTES]; 2]) -> Result<Header, HeaderFault> {
        let [first, second] = slots.each_ref().map(Header::decode);
        match (first, second) {
            (Ok(first), Ok(second)) => Ok(if first.sequence > second.sequence { first } else { second }),
            (Ok(header), Err(HeaderFault::None | HeaderFault::Damaged(_)))
            | (Err(HeaderFault::None | HeaderFault::Damaged(_)), Ok(header)) => Ok(header),
            // A later version of this program has been here.
            (Err(fault @ HeaderFault::Version(_)), _) | (_, Err(fault @ HeaderFault::Version(_))) => {
                Err(fault)
            }
            (Err(HeaderFault::None), Err(fault)) | (Err(fault), Err(_)) => Err(fault),
        }
    }

    /// Where it is to be written: never over the one that counts.
    pub fn slot_at(&self) -> u64 {
        HEADERS_AT[(self.sequence % 2) as usize]
    }
}

fn u64_at(bytes: &[u8; HEADER_BYTES], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

fn u32_at(bytes: &[u8; HEADER_BYTES], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BLOCK_BYTES, state_map_bytes};

    fn header() -> Header {
        Header {
            sequence: 7,
            size_bytes: 10 << 30,
            base_bytes: 5 << 30,
            cache: Some(CacheId(*b"0123456789abcdef")),
            identity: "id=desk-7".into(),
        }
    }

    #[test]
    fn the_largest_disk_has_its_room() {
        let map = state_map_bytes((MAX_DISK_BYTES / BLOCK_BYTES as u64) as u32);
        let page = BLOCK_BYTES as u64;
        assert!(HEADERS_AT[1] + page <= SEAL_AT && SEAL_AT + page <= LIVE_AT && LIVE_AT + map <= DURABLE_AT);
        assert!(DURABLE_AT + page + map <= DATA_AT);
    }

    #[test]
    fn what_was_encoded_is_decoded_and_one_bit_makes_it_another() {
        let bytes = header().encode();
        assert_eq!(Header::decode(&bytes), Ok(header()));
        let unnamed = Header { cache: None, ..header() };
        assert_eq!(Header::decode(&unnamed.encode()), Ok(unnamed));
        for bit in 0..HEADER_BYTES * 8 {
            let mut changed = bytes;
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::decode(&changed).is_err(), "bit {bit}");
        }
        assert_eq!(Header::decode(&[0; HEADER_BYTES]), Err(HeaderFault::None));
    }

    /// With the right checksum, as an attacker would make it.
    #[test]
    fn what_cannot_be_is_refused_whatever_its_checksum() {
        let forge = |at: usize, with: &[u8]| {
            let mut bytes = header().encode();
            bytes[at..at + with.len()].copy_from_slice(with);
            bytes[CHECKSUM_AT..24].fill(0);
            let checksum = crc32c::crc32c(&bytes);
            bytes[CHECKSUM_AT..24].copy_from_slice(&checksum.to_le_bytes());
            Header::decode(&bytes)
        };
        assert_eq!(forge(16, &2u32.to_le_bytes()), Err(HeaderFault::Version(2)));
        for size in [0, 511, MAX_DISK_BYTES + 512, u64::MAX, 5 << 20] {
            assert!(matches!(forge(32, &size.to_le_bytes()), Err(HeaderFault::Damaged(_))), "size {size}");
        }
        for base in [1, u64::MAX, 11 << 30] {
            assert!(matches!(forge(40, &base.to_le_bytes()), Err(HeaderFault::Damaged(_))), "base {base}");
        }
        for len in [MAX_IDENTITY_BYTES as u64 + 1, u64::MAX] {
            assert!(
                matches!(forge(64, &len.to_le_bytes()), Err(HeaderFault::Damaged(_))),
                "identity of {len}"
            );
        }
        assert!(forge(72, &[0xff, 0xfe]).is_err() && forge(72, b"\x1b[2J").is_err());
        // Any bytes at all.
        let mut seed = 1u64;
        let mut decoded = 0;
        for _ in 0..200_000 {
            let mut noise = [0u8; 24];
            noise.iter_mut().for_each(|byte| {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                *byte = (seed >> 56) as u8;
            });
            let at = 24 + (seed >> 33) as usize % (HEADER_BYTES - 48);
            if let Ok(header) = forge(at, &noise[..1 + (seed >> 20) as usize % 24]) {
                assert_eq!(Header::decode(&header.encode()), Ok(header));
                decoded += 1;
            }
        }
        assert!(decoded > 100, "{decoded}");
    }

    #[test]
    fn the_newer_of_two_counts_and_a_damaged_one_does_not() {
        let of = |sequence| Header { sequence, ..header() };
        let (old, new) = (of(8), of(9));
        assert_eq!(Header::choose(&[old.encode(), new.encode()]), Ok(new.clone()));
        assert_eq!(Header::choose(&[new.encode(), old.encode()]), Ok(new.clone()));
        let mut torn = new.encode();
        torn[100] ^= 1;
        assert_eq!(Header::choose(&[old.encode(), torn]), Ok(old.clone()));
        assert_eq!(
            Header::choose(&[torn, [0; HEADER_BYTES]]),
            Err(HeaderFault::Damaged("its checksum is wrong"))
        );
        assert_eq!(Header::choose(&[[0; HEADER_BYTES]; 2]), Err(HeaderFault::None));
        assert_ne!(old.slot_at(), new.slot_at());
    }
}
