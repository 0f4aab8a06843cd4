//! A load of everything at once: requests of every kind and size, at any sector.
//!
//! Owns the choice of requests only; `load` runs them. Invariant: the same seed draws the same requests.

use crate::driver::{Ask, Driver};
use crate::load::{End, Rng};
use anyhow::{Result, ensure};

const SECTOR: u64 = 512;

/// What is asked of a disk: of a hundred requests 45 write, 43 read, 4 discard, 4 write zeroes, 4 flush. Half of
/// those sizes are below the square root of the largest, in sectors; discards and zeroes may be twice as large.
#[derive(Clone, Copy, Debug)]
pub struct Mixed {
    /// First byte that it touches.
    pub start_bytes: u64,
    /// Bytes of the disk that it touches.
    pub span_bytes: u64,
    /// Bytes in its largest request.
    pub largest_bytes: usize,
    /// Number of requests in flight.
    pub depth: usize,
    /// When it ends.
    pub end: End,
    /// The same seed draws the same requests.
    pub seed: u64,
}

impl Mixed {
    pub(crate) fn check(&self, driver: &Driver) -> Result<()> {
        let end = self.start_bytes.checked_add(self.span_bytes);
        ensure!(
            self.depth > 0
                && self.depth <= driver.depth()
                && self.largest_bytes as u64 >= SECTOR
                && self.largest_bytes <= driver.request_bytes()
                && self.largest_bytes as u64 <= self.span_bytes
                && end.is_some_and(|end| end <= driver.capacity_bytes()),
            "{self:?} does not fit the connection"
        );
        Ok(())
    }

    pub(crate) fn draw(&self, rng: &mut Rng) -> Ask {
        let kind = rng.below(100);
        let most = (self.largest_bytes as u64 / SECTOR) << u32::from((88..96).contains(&kind));
        let most = most.min(self.span_bytes / SECTOR);
        // Evenly over the exponents: small requests are as frequent as large ones.
        let sectors = (most as f64).powf(rng.below(1 << 20) as f64 / f64::from(1 << 20));
        let sectors = (sectors as u64 + rng.below(2)).clamp(1, most);
        let at = self.start_bytes + rng.below(self.span_bytes / SECTOR - sectors + 1) * SECTOR;
        let (offset, bytes) = (at, sectors * SECTOR);
        match kind {
            0..45 => Ask::Write { offset, len: bytes as usize },
            45..88 => Ask::Read { offset, len: bytes as usize },
            88..92 => Ask::Discard { offset, len: bytes },
            92..96 => Ask::WriteZeroes { offset, len: bytes, unmap: rng.below(2) == 0 },
            _ => Ask::Flush,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_and_size_comes_and_none_beyond_the_span() {
        let mixed = Mixed {
            start_bytes: 1 << 20,
            span_bytes: 4 << 20,
            largest_bytes: 4 << 20,
            depth: 1,
            end: End::Count(1),
            seed: 3,
        };
        let mut rng = Rng::new(mixed.seed);
        let (mut smallest, mut largest, mut odd, mut kinds) = (u64::MAX, 0, 0, [0; 5]);
        for _ in 0..20_000 {
            let (kind, offset, len) = match mixed.draw(&mut rng) {
                Ask::Write { offset, len } => (0, offset, len as u64),
                Ask::Read { offset, len } => (1, offset, len as u64),
                Ask::Discard { offset, len } => (2, offset, len),
                Ask::WriteZeroes { offset, len, .. } => (3, offset, len),
                Ask::Flush => {
                    kinds[4] += 1;
                    continue;
                }
            };
            kinds[kind] += 1;
            assert!(offset >= 1 << 20 && offset + len <= 5 << 20, "{offset} {len}");
            assert!(offset % SECTOR == 0 && len % SECTOR == 0 && len > 0);
            (smallest, largest) = (smallest.min(len), largest.max(len));
            odd += u64::from(offset % 4096 != 0);
        }
        assert!(kinds.iter().all(|&n| n > 300), "{kinds:?}");
        assert_eq!(smallest, 512);
        assert!(largest > 3 << 20 && odd > 10_000, "{largest} {odd}");
    }
}
