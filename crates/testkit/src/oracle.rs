//! What a disk should hold: for each sector, the number of its newest write. Checks what a disk returns.
//!
//! Owns no disk and does no I/O on one; the content of a sector follows from its place and its number alone, so
//! it need not be kept. Invariant: a sector's number names the newest write that was handed to the disk.

use crate::load::Rng;
use anyhow::{Context, Result, bail, ensure};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

const SECTOR: usize = 512;
const BLOCK: u64 = 4096;
/// The number of a sector that was never written.
const BASE: u32 = 0;
/// The number of a sector that was discarded or zeroed.
const ZERO: u32 = u32::MAX;

/// The expected content of a disk.
pub struct Oracle {
    numbers: Vec<u32>,
    next: u32,
    base: Option<File>,
    seed: u64,
}

impl Oracle {
    /// For a disk of `size_bytes` over a base image that reads as zeroes.
    pub fn new(size_bytes: u64, seed: u64) -> Oracle {
        Oracle {
            numbers: vec![BASE; (size_bytes / SECTOR as u64) as usize],
            next: BASE + 1,
            base: None,
            seed,
        }
    }

    /// For a disk over a raw base image; past its end the disk reads as zeroes.
    pub fn with_base(size_bytes: u64, seed: u64, base: &Path) -> Result<Oracle> {
        let file = File::open(base).with_context(|| format!("{}: cannot open", base.display()))?;
        Ok(Oracle { base: Some(file), ..Oracle::new(size_bytes, seed) })
    }

    /// Forgets every write, as a reset does.
    pub fn reset(&mut self) {
        self.numbers.fill(BASE);
    }

    fn sectors(&mut self, offset: u64, len: u64) -> &mut [u32] {
        let from = (offset / SECTOR as u64) as usize;
        &mut self.numbers[from..from + (len / SECTOR as u64) as usize]
    }

    fn fill(&self, sector: u64, number: u32, to: &mut [u8]) {
        let mut rng = Rng::new(self.seed ^ (sector << 32) ^ u64::from(number));
        for word in to.as_chunks_mut().0 {
            // Never zero: an all-zero block may be stored as nothing.
            *word = (rng.next_u64() | 1).to_le_bytes();
        }
    }

    /// Notes a write and makes its content.
    pub fn write(&mut self, offset: u64, content: &mut [u8]) {
        let number = self.next;
        self.next = if self.next == ZERO - 1 { BASE + 1 } else { self.next + 1 };
        self.sectors(offset, content.len() as u64).fill(number);
        for (i, sector) in content.chunks_exact_mut(SECTOR).enumerate() {
            self.fill(offset / SECTOR as u64 + i as u64, number, sector);
        }
    }

    /// Notes a discard: whole 4 KiB blocks read as zeroes afterwards, partial edges stay as they are.
    pub fn discarded(&mut self, offset: u64, len: u64) {
        let from = offset.next_multiple_of(BLOCK);
        let to = (offset + len) / BLOCK * BLOCK;
        if from < to {
            self.zeroed(from, to - from);
        }
    }

    /// Notes that exactly this range reads as zeroes.
    pub fn zeroed(&mut self, offset: u64, len: u64) {
        self.sectors(offset, len).fill(ZERO);
    }

    /// Checks what a disk returned for a range.
    pub fn check(&self, offset: u64, got: &[u8]) -> Result<()> {
        ensure!(got.len().is_multiple_of(SECTOR), "{} bytes are not whole sectors", got.len());
        let mut want = [0u8; SECTOR];
        for (i, sector) in got.chunks_exact(SECTOR).enumerate() {
            let index = offset / SECTOR as u64 + i as u64;
            let number = self.numbers[index as usize];
            match number {
                ZERO => want.fill(0),
                BASE => self.read_base(index, &mut want)?,
                _ => self.fill(index, number, &mut want),
            }
            if sector != want {
                bail!(
                    "sector {index} is wrong: it should hold {}, it holds {}",
                    self.name(number),
                    self.guess(index, sector)
                );
            }
        }
        Ok(())
    }

    /// Ranges of at most `piece` bytes that cover the whole disk, to read it through once.
    pub fn pieces(&self, piece: usize) -> impl Iterator<Item = (u64, usize)> + use<> {
        let size = self.numbers.len() as u64 * SECTOR as u64;
        (0..size.div_ceil(piece as u64)).map(move |i| {
            let offset = i * piece as u64;
            (offset, (size - offset).min(piece as u64) as usize)
        })
    }

    fn read_base(&self, sector: u64, to: &mut [u8; SECTOR]) -> Result<()> {
        to.fill(0);
        if let Some(file) = &self.base {
            let mut got = 0;
            while got < SECTOR {
                match file
                    .read_at(&mut to[got..], sector * SECTOR as u64 + got as u64)
                    .context("base image")?
                {
                    0 => break,
                    n => got += n,
                }
            }
        }
        Ok(())
    }

    fn name(&self, number: u32) -> String {
        match number {
            BASE => "the base image's content".into(),
            ZERO => "zeroes".into(),
            n => format!("write {n}"),
        }
    }

    /// Names what a wrong sector holds, as far as it can be told: an older write is another fault than a
    /// neighbour's content.
    fn guess(&self, sector: u64, got: &[u8]) -> String {
        if got.iter().all(|&b| b == 0) {
            return "zeroes".into();
        }
        let mut want = [0u8; SECTOR];
        let newest = self.next.saturating_sub(1);
        for number in (BASE + 1..=newest).rev().take(1_000_000) {
            self.fill(sector, number, &mut want[..8]);
            if want[..8] == got[..8] {
                return format!("write {number} to it");
            }
        }
        if self.read_base(sector, &mut want).is_ok() && want == got {
            return "the base image's content".into();
        }
        format!("something else, beginning with {:02x?}", &got[..16])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_checks_and_anything_else_does_not() {
        let mut oracle = Oracle::new(1 << 20, 7);
        let mut first = vec![0u8; 8192];
        oracle.write(4096, &mut first);
        oracle.check(4096, &first).unwrap();
        let mut second = vec![0u8; 4096];
        oracle.write(4096, &mut second);
        let error = oracle.check(4096, &first[..4096]).unwrap_err().to_string();
        assert!(error.contains("write 2") && error.contains("write 1 to it"), "{error}");
        assert!(oracle.check(8192, &second).is_err(), "content belongs to its place");
        oracle.check(8192, &first[4096..]).unwrap();
        oracle.check(0, &[0; 4096]).unwrap();
    }

    #[test]
    fn a_discard_zeroes_whole_blocks_and_write_zeroes_is_exact() {
        let mut oracle = Oracle::new(1 << 20, 7);
        let mut content = vec![0u8; 16384];
        oracle.write(0, &mut content);
        oracle.discarded(512, 8192);
        content[4096..8192].fill(0);
        oracle.check(0, &content).unwrap();
        oracle.zeroed(12288 + 512, 512);
        content[12288 + 512..12288 + 1024].fill(0);
        oracle.check(0, &content).unwrap();
    }

    #[test]
    fn untouched_sectors_are_those_of_the_base_image() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("base.raw");
        std::fs::write(&path, vec![0xab; 5120]).unwrap();
        let oracle = Oracle::with_base(1 << 20, 7, &path).unwrap();
        let mut want = vec![0xab; 5120];
        want.resize(8192, 0);
        oracle.check(0, &want).unwrap();
        want[5119] = 0;
        assert!(oracle.check(0, &want).is_err());
    }
}
