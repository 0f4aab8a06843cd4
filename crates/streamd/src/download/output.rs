//! The file that a download fills. Owns its bound and its holes.
//!
//! Invariant: the file is never longer than the bound.

use super::unsupported;
use crate::job::write_data;
use std::fs::File;
use std::io::{self, Write};

/// Bytes that are collected before they are written: a multiple of the blocks of which holes consist.
const PART_BYTES: usize = 1 << 20;

/// The file.
pub struct Output {
    file: File,
    part: Vec<u8>,
    /// Bytes before the part.
    written_bytes: u64,
    most_bytes: u64,
}

impl Output {
    /// An empty file, for so many bytes.
    pub fn new(file: File, most_bytes: u64) -> Output {
        Output { file, part: Vec::with_capacity(PART_BYTES), written_bytes: 0, most_bytes }
    }

    /// Whether nothing was written.
    pub fn is_empty(&self) -> bool {
        self.written_bytes == 0 && self.part.is_empty()
    }

    /// Writes what is collected, and sets the length, which zeroes at the end do not.
    pub fn finish(&mut self) -> io::Result<()> {
        self.write_part()?;
        self.file.set_len(self.written_bytes)
    }

    fn write_part(&mut self) -> io::Result<()> {
        write_data(&self.file, self.written_bytes, &self.part)?;
        self.written_bytes += self.part.len() as u64;
        self.part.clear();
        Ok(())
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let len = bytes.len().min(PART_BYTES - self.part.len());
        if self.written_bytes + (self.part.len() + len) as u64 > self.most_bytes {
            let why = format!(
                "the image has more than {} bytes, which is the most that is downloaded",
                self.most_bytes
            );
            return Err(io::Error::other(unsupported(why)));
        }
        self.part.extend_from_slice(&bytes[..len]);
        if self.part.len() == PART_BYTES {
            self.write_part()?;
        }
        Ok(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn zeroes_become_holes_and_the_length_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let mut output = Output::new(File::create(&path).unwrap(), 1 << 30);
        assert!(output.is_empty());
        let mut all = vec![0; (8 << 20) + 777];
        all[5 << 20..(5 << 20) + 5000].fill(7);
        all.chunks(1000).for_each(|part| output.write_all(part).unwrap());
        output.finish().unwrap();
        assert!(!output.is_empty() && std::fs::read(&path).unwrap() == all);
        assert!(std::fs::metadata(&path).unwrap().blocks() * 512 < 1 << 20);
    }

    #[test]
    fn it_never_grows_beyond_its_bound() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let mut output = Output::new(File::create(&path).unwrap(), 3 << 20);
        output.write_all(&vec![7; 3 << 20]).unwrap();
        let refused = output.write_all(&[7]).unwrap_err();
        assert!(refused.to_string().contains("3145728 bytes"), "{refused}");
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 3 << 20);
    }
}
