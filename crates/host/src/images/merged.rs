//! Merges the disk of a machine of mode `persistent` into a complete disk: the content of its image, and what the machine
//! has written over it. Owns the merging.
//!
//! Invariant: the image and the machine's file are only read, and nobody serves the disk while this value exists. Nothing
//! that the guest has written is interpreted.

use super::convert::has_room;
use super::files::VersionFiles;
use crate::copying;
use crate::error::HostError;
use crate::operations::Progress;
use rustix::fs::{FallocateFlags, fallocate};
use spillway_api::ErrorCode;
use spillway_control::{Content, DiskAtRest};
use std::fs::File;
use std::io;
use std::path::Path;

/// A disk that is being committed.
pub struct MergedDisk {
    image: File,
    disk: DiskAtRest,
}

impl MergedDisk {
    /// Opens the disk in `disk`, based on the image in `image`, whose id was `image_id` when it was served.
    pub fn open(image: &Path, disk: &Path, image_id: &str) -> Result<MergedDisk, HostError> {
        let open = || {
            let file = File::open(image)?;
            let bytes = file.metadata()?.len();
            Ok((file, bytes))
        };
        let failed = |e: io::Error| {
            HostError::new(ErrorCode::Internal, format!("{}: cannot be read: {e}", image.display()))
        };
        let (image, image_bytes) = open().map_err(failed)?;
        Ok(MergedDisk { image, disk: DiskAtRest::open(disk, image_id, image_bytes)? })
    }

    /// Size of the disk.
    pub fn size_bytes(&self) -> u64 {
        self.disk.size_bytes()
    }

    /// Writes the disk to a file of its size that reads as zeroes. Shares extents with the image where the file system
    /// can. Counts as half of the progress.
    pub fn fill(&self, files: &VersionFiles, to: &File, progress: &Progress) -> Result<(), HostError> {
        self.fill_over(files, to, copying::share(&self.image, to), progress)
    }

    /// Does the same for a file that reads as zeroes, or as the image if it shares its extents already.
    fn fill_over(
        &self,
        files: &VersionFiles,
        to: &File,
        is_shared: bool,
        progress: &Progress,
    ) -> Result<(), HostError> {
        let path = files.partial_disk();
        let folder = path.parent().unwrap_or(&path);
        let failed = |e: io::Error| files.failed("cannot be written", e);
        self.disk.parts(|part| {
            let goes_on = |done: u64| {
                progress.set_done(part.from + done);
                progress.goes_on()?;
                has_room(folder)
            };
            if is_shared && part.content != Content::Image {
                let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                fallocate(to, punch, part.from, part.len).map_err(|e| failed(e.into()))?;
            }
            match part.content {
                Content::Image if is_shared => Ok(()),
                Content::Image => {
                    let range = part.from..part.from + part.len;
                    copying::copy(&self.image, range, to, part.from, goes_on, failed)
                }
                Content::Own { at } => {
                    copying::copy(self.disk.file(), at..at + part.len, to, part.from, goes_on, failed)
                }
                Content::Zero => Ok(()),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spillway_control::persistent_file::{DATA_AT, DURABLE_AT, Header};
    use std::os::unix::fs::FileExt;

    const BLOCK: u64 = 4096;

    /// A disk of 16 blocks and a sector, over an image of 8 blocks and a sector: block 1 is written, 2 is zero, 3 is written
    /// with zeroes that take no space, as are 4 and 9 with some; the last sector too.
    fn disk(dir: &Path) -> (MergedDisk, Vec<u8>) {
        let [image, disk] = ["image", "disk"].map(|name| dir.join(name));
        let content: Vec<u8> = (0..8 * BLOCK + 512).map(|at| (at / 512) as u8 | 1).collect();
        std::fs::write(&image, &content).unwrap();
        let size_bytes = 16 * BLOCK + 512;
        let header = Header {
            sequence: 1,
            size_bytes,
            base_bytes: content.len() as u64,
            cache: None,
            identity: "id=golden:1".into(),
        };
        let file = File::create(&disk).unwrap();
        file.set_len(DATA_AT + 18 * BLOCK).unwrap();
        file.write_all_at(&header.encode(), header.slot_at()).unwrap();
        file.write_all_at(&[0b0110_0100, 0b0000_0001, 0b0000_0100, 0, 1], DURABLE_AT + BLOCK).unwrap();
        let mut merged = content;
        merged.resize(size_bytes as usize, 0);
        merged[2 * BLOCK as usize..5 * BLOCK as usize].fill(0);
        for (at, len) in [(BLOCK, BLOCK), (4 * BLOCK + 512, 512), (9 * BLOCK, 512), (16 * BLOCK, 512)] {
            let bytes = vec![0x80 | (at / BLOCK) as u8; len as usize];
            file.write_all_at(&bytes, DATA_AT + at).unwrap();
            merged[at as usize..][..len as usize].copy_from_slice(&bytes);
        }
        (MergedDisk::open(&image, &disk, "golden:1").unwrap(), merged)
    }

    #[test]
    fn what_was_written_is_over_the_image_whether_room_is_shared_or_not() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let (merged, expected) = disk(dir.path());
        let files = VersionFiles::of(dir.path(), &"golden".parse().unwrap(), 2);
        let to = files.begin(merged.size_bytes()).unwrap();
        // Here it stands for what the file system shares.
        let image = std::fs::read(dir.path().join("image")).unwrap();
        for is_shared in [false, true] {
            to.set_len(0).unwrap();
            to.set_len(merged.size_bytes()).unwrap();
            if is_shared {
                to.write_all_at(&image, 0).unwrap();
            }
            merged.fill_over(&files, &to, is_shared, &Progress::default()).unwrap();
            assert!(std::fs::read(files.partial_disk()).unwrap() == expected, "{is_shared}");
        }
        assert!(image != expected[..image.len()]);
    }

    #[test]
    fn another_image_or_one_that_is_gone_is_refused() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        drop(disk(dir.path()));
        let [image, disk, none] = ["image", "disk", "none"].map(|name| dir.path().join(name));
        for (image, disk, id, word) in [
            (&image, &disk, "golden:2", "made from another image"),
            (&disk, &disk, "golden:1", "made from another image"),
            (&none, &disk, "golden:1", "cannot be read"),
            (&image, &none, "golden:1", "is not there"),
            (&image, &image, "golden:1", "is not a disk of mode persistent"),
        ] {
            let error = MergedDisk::open(image, disk, id).map(drop).unwrap_err();
            assert!(error.message.contains(word), "{error}");
        }
    }
}
