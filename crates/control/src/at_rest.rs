//! A disk of mode `persistent` that nobody serves, to be read as a whole: what of it is its image's, what was written.
//!
//! Owns the reading of the file's map. Invariant: nobody can serve the disk while this value lives, and nothing is written
//! to the file: what its next start would do first (end a reset, believe the durable map) is only looked at as if done.

use crate::error::{ErrorKind, SupervisorError};
use crate::persistent::{self, BLOCK, PersistentFile};
use rustix::fs::{FlockOperation, flock};
use spillway_layout::persistent_file::{DATA_AT, DURABLE_AT, LIVE_AT};
use spillway_layout::{FileMap, state_map_bytes};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// The disk.
#[derive(Debug)]
pub struct DiskAtRest {
    file: File,
    path: PathBuf,
    size_bytes: u64,
    /// Where the map is that counts; none: a reset had begun, and everything is the image's.
    map_at: Option<u64>,
}

/// Where the content of a part of a disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// In the image, at the same place; zeroes where the image has ended.
    Image,
    /// In the disk's own file, at this byte.
    Own {
        /// Where.
        at: u64,
    },
    /// Nowhere: it is all zeroes.
    Zero,
}

/// A part of a disk that is of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its first byte.
    pub from: u64,
    /// How many.
    pub len: u64,
    /// Where they are.
    pub content: Content,
}

impl DiskAtRest {
    /// A disk of this image (`--image-id`, the image's size). Refused while anybody serves it.
    pub fn open(path: &Path, image_id: &str, image_bytes: u64) -> Result<DiskAtRest, SupervisorError> {
        let found = PersistentFile::open(path)?;
        let Some(size_bytes) = found.size_bytes() else {
            let message = format!("disk {}: it is not there: is its file system mounted?", path.display());
            return Err(SupervisorError::new(ErrorKind::Image, message));
        };
        found.check_image(path, image_bytes, &persistent::option_identity(image_id)?)?;
        let map = found.map_to_start_from();
        let (file, _) = found.into_parts();
        let map_at = match (persistent::has_mark(&file, path)?, map) {
            (true, _) => None,
            (false, FileMap::Live) => Some(LIVE_AT),
            (false, FileMap::Durable) => Some(DURABLE_AT + BLOCK),
        };
        Ok(DiskAtRest { file, path: path.to_owned(), size_bytes, map_at })
    }

    /// Size that its guest sees.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Its file, to read what is its own.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// All of it, in order.
    pub fn parts<E: From<SupervisorError>>(
        &self,
        mut each: impl FnMut(Part) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut tell = |state: u8, from: u64, to: u64| {
            let from = from * BLOCK;
            let len = (to * BLOCK).min(self.size_bytes) - from;
            let content = match state {
                0 => Content::Image,
                1 => Content::Own { at: DATA_AT + from },
                2 => Content::Zero,
                _ => {
                    let what = format!("its map is damaged, at block {}", from / BLOCK);
                    return Err(persistent::damaged(&self.path, &what).into());
                }
            };
            if len == 0 { Ok(()) } else { each(Part { from, len, content }) }
        };
        let blocks = self.size_bytes.div_ceil(BLOCK);
        let Some(map_at) = self.map_at else { return tell(0, 0, blocks) };
        let (mut state, mut from) = (0, 0);
        let mut buffer = vec![0; persistent::CHUNK];
        for (at, n) in persistent::chunks(0, state_map_bytes(persistent::blocks(self.size_bytes))) {
            let read = self.file.read_exact_at(&mut buffer[..n], map_at + at);
            read.map_err(|e| persistent::cannot("read the map of", &self.path, e))?;
            let states = buffer[..n].iter().flat_map(|byte| [0, 2, 4, 6].map(|shift| byte >> shift & 3));
            for (block, found) in (at * 4..blocks).zip(states) {
                if found != state {
                    tell(state, from, block)?;
                    (state, from) = (found, block);
                }
            }
        }
        tell(state, from, blocks)
    }
}

impl Drop for DiskAtRest {
    /// At once, whoever was forked meanwhile and has the file too until it executes its program.
    fn drop(&mut self) {
        let _ = flock(&self.file, FlockOperation::Unlock);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page_cache::{cache_id, seal};
    use spillway_layout::persistent_file::{HEADER_BYTES, HEADERS_AT, Header, SEAL_AT};
    use spillway_layout::{BLOCK_BYTES, CacheId, RESET_MARK};

    /// A disk of 300 blocks and a sector, on an image of 200 blocks, as it is when nothing was written to it.
    fn made(path: &Path) -> File {
        let size_bytes = 300 * BLOCK + 512;
        let file = File::options().create_new(true).read(true).write(true).open(path).unwrap();
        file.set_len(DATA_AT + size_bytes.next_multiple_of(BLOCK) + BLOCK).unwrap();
        seal(&file, SEAL_AT);
        let (cache, identity) = (cache_id(&file, SEAL_AT), "id=golden:1".to_owned());
        let header = Header { sequence: 1, size_bytes, base_bytes: 200 * BLOCK, cache, identity };
        file.write_all_at(&header.encode(), header.slot_at()).unwrap();
        file
    }

    fn open(path: &Path) -> Result<DiskAtRest, SupervisorError> {
        DiskAtRest::open(path, "golden:1", 200 * BLOCK)
    }

    fn parts(path: &Path) -> Vec<(u64, u64, Content)> {
        let mut parts = Vec::new();
        let told = open(path).unwrap().parts(|part| {
            parts.push((part.from / BLOCK, part.len, part.content));
            Ok::<_, SupervisorError>(())
        });
        told.unwrap();
        parts
    }

    #[test]
    fn each_part_is_told_once_by_the_map_that_counts() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = dir.path().join("disk");
        let file = made(&path);
        assert_eq!(parts(&path), [(0, 300 * BLOCK + 512, Content::Image)]);
        // Blocks 5, 6, 8 and 10 are written, 9 is zero; the last sector is written too.
        file.write_all_at(&[0b0001_0100, 0b0001_1001], LIVE_AT + 1).unwrap();
        file.write_all_at(&[1], LIVE_AT + 75).unwrap();
        let own = |block: u64| Content::Own { at: DATA_AT + block * BLOCK };
        let expected = [
            (0, 5 * BLOCK, Content::Image),
            (5, 2 * BLOCK, own(5)),
            (7, BLOCK, Content::Image),
            (8, BLOCK, own(8)),
            (9, BLOCK, Content::Zero),
            (10, BLOCK, own(10)),
            (11, 289 * BLOCK, Content::Image),
            (300, 512, own(300)),
        ];
        assert_eq!(parts(&path), expected);
        // Another page cache: what is durable counts, and that is the image.
        let mut slots = [[0; HEADER_BYTES]; 2];
        slots.iter_mut().zip(HEADERS_AT).for_each(|(slot, at)| file.read_exact_at(slot, at).unwrap());
        let header = Header::choose(&slots).unwrap();
        let other = Header { cache: Some(CacheId([7; 16])), sequence: header.sequence + 1, ..header.clone() };
        file.write_all_at(&other.encode(), other.slot_at()).unwrap();
        file.write_all_at(&[2], DURABLE_AT + BLOCK).unwrap();
        assert_eq!(parts(&path)[..2], [(0, BLOCK, Content::Zero), (1, 299 * BLOCK + 512, Content::Image)]);
        let back = Header { sequence: other.sequence + 1, ..header };
        file.write_all_at(&back.encode(), back.slot_at()).unwrap();
        assert_eq!(parts(&path), expected);
        // A reset that had begun.
        file.write_all_at(&RESET_MARK, DURABLE_AT).unwrap();
        assert_eq!(parts(&path), [(0, 300 * BLOCK + 512, Content::Image)]);
    }

    #[test]
    fn what_is_no_disk_of_that_image_or_is_served_is_refused() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = dir.path().join("disk");
        let refused = |id, bytes, word: &str| {
            let error = DiskAtRest::open(&path, id, bytes).unwrap_err();
            assert!(error.to_string().contains(word), "{error}");
        };
        refused("golden:1", 200 * BLOCK, "is not there");
        assert!(!path.exists(), "it is not made");
        let file = made(&path);
        refused("golden:2", 200 * BLOCK, "made from another image");
        refused("golden:1", 201 * BLOCK, "made from another image");
        let held = open(&path).unwrap();
        refused("golden:1", 200 * BLOCK, "in use by process");
        drop(held);
        // Bits that are no state, a mark that is none, a file that was cut.
        file.write_all_at(&[3 << 2], LIVE_AT + 20).unwrap();
        let told = open(&path).unwrap().parts(|_| Ok::<_, SupervisorError>(()));
        assert!(told.unwrap_err().to_string().contains("at block 81"));
        file.write_all_at(&[1; BLOCK_BYTES], DURABLE_AT).unwrap();
        refused("golden:1", 200 * BLOCK, "mark of a reset is none");
        file.set_len(DATA_AT + BLOCK).unwrap();
        refused("golden:1", 200 * BLOCK, "cut short");
    }
}
