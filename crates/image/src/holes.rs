//! The holes of an image's file. Owns the questions to its file system, which may wait for the store: they are asked in a
//! thread ([`super::BaseReader`]).
//!
//! Invariant: zero is said only of what the file system says is a hole within the file. Whatever it does not answer, and
//! all of a block device, is plain bytes.

use super::error::ImageError;
use super::extents::{Extent, ExtentKind, MOST_EXTENTS};
use super::reader::Contents;
use super::source::{Source, StoreRead};
use rustix::fs::{FileType, SeekFrom, fstat, seek};
use rustix::io::Errno;
use spillway_layout::SECTOR_BYTES;
use std::fs::File;
use std::io;

/// A file with its holes. Nobody else uses the file's position.
pub struct FileHoles {
    file: File,
    bytes: u64,
    has_some: bool,
}

impl FileHoles {
    /// Of an open file of so many bytes.
    pub fn new(file: File, bytes: u64) -> FileHoles {
        let has_some = fstat(&file).is_ok_and(|stat| {
            let held = (stat.st_blocks as u64).saturating_mul(512);
            FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile && held < bytes
        });
        FileHoles { file, bytes, has_some }
    }

    /// What an extent that lies plain in the file is made of, in order: plain bytes, and zeroes where the file has holes.
    pub fn split(&self, plain: Extent, file_offset: u64) -> impl Iterator<Item = Extent> {
        let mut done = 0;
        std::iter::from_fn(move || {
            let (at, end) = (file_offset + done, file_offset + plain.len);
            if at >= end {
                return None;
            }
            let data = self.data_from(at);
            let (to, kind) = match data > at {
                true => (data, ExtentKind::Zero),
                false => (self.hole_after(at), ExtentKind::Raw { file_offset: at }),
            };
            let len = to.min(end) - at;
            let piece = Extent { offset: plain.offset + done, len, kind };
            done += len;
            Some(piece)
        })
    }

    /// The first sector from `at` on that is not known to be in a hole.
    fn data_from(&self, at: u64) -> u64 {
        if !self.has_some {
            return at;
        }
        match seek(&self.file, SeekFrom::Data(at)) {
            Ok(data) => (data / SECTOR_BYTES * SECTOR_BYTES).max(at),
            // There is only a hole; or the file has become shorter, and reads there fail.
            Err(Errno::NXIO) if self.is_whole() => self.bytes,
            Err(_) => at,
        }
    }

    /// The first sector behind `at` that may be in a hole.
    fn hole_after(&self, at: u64) -> u64 {
        if !self.has_some {
            return u64::MAX;
        }
        let hole = seek(&self.file, SeekFrom::Hole(at)).map(|hole| hole.next_multiple_of(SECTOR_BYTES));
        hole.ok().filter(|hole| *hole > at).unwrap_or(u64::MAX)
    }

    fn is_whole(&self) -> bool {
        fstat(&self.file).is_ok_and(|stat| stat.st_size as u64 >= self.bytes)
    }
}

/// A raw image whose content is read elsewhere.
pub struct Holes {
    source: Source,
    holes: FileHoles,
    size_bytes: u64,
}

impl Holes {
    /// Of an open file; `direct` says that it is open O_DIRECT.
    pub fn new(file: File, size_bytes: u64, direct: bool) -> Result<Holes, ImageError> {
        let again =
            file.try_clone().map_err(|e| ImageError::resources("cannot be opened a second time", &e))?;
        let source = Source::new(again, direct).map_err(|e| ImageError::io("cannot be measured", &e))?;
        Ok(Holes { source, holes: FileHoles::new(file, size_bytes), size_bytes })
    }
}

impl Contents for Holes {
    fn read(&mut self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.source.read_exact(out, offset)
    }

    fn extents(&mut self, offset: u64) -> Vec<Extent> {
        let len = self.size_bytes.saturating_sub(offset);
        let rest = Extent { offset, len, kind: ExtentKind::Raw { file_offset: offset } };
        self.holes.split(rest, offset).take(MOST_EXTENTS).collect()
    }

    fn take_traffic(&mut self) -> Vec<StoreRead> {
        self.source.take_traffic()
    }
}
