//! A load: what is asked of a disk, drawn from a seed and kept at a queue depth.
//!
//! Owns the choice of requests; `run` measures them. Invariant: the same load draws the same requests.

mod run;

use crate::driver::{Ask, Driver};
use anyhow::{Result, ensure};
use serde::Serialize;
use std::time::Duration;

/// Prefers some blocks: `of_requests` of all requests go to `to_blocks` of all blocks (0.9 and 0.3, say),
/// the rest to the others. The favoured blocks lie scattered over the span.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Skew {
    /// Share of the requests, 0 to 1.
    pub of_requests: f64,
    /// Share of the blocks, 0 to 1.
    pub to_blocks: f64,
}

/// When a load ends.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// After this time; what is in flight then is waited for and not counted.
    After(Duration),
    /// After this many requests.
    Count(u64),
}

/// What is asked of a disk.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Load {
    /// Bytes in a request: a multiple of 512.
    pub request_bytes: usize,
    /// Share of writes, 0 to 1.
    pub write_share: f64,
    /// Share of discards, 0 to 1, taken before the writes.
    pub discard_share: f64,
    /// Share of requests that go anywhere; the others follow the request before.
    pub random_share: f64,
    /// First byte that it touches.
    pub start_bytes: u64,
    /// Bytes of the disk that it touches, from `start_bytes` on.
    pub span_bytes: u64,
    /// Number of requests in flight.
    pub depth: usize,
    /// When it ends.
    pub end: End,
    /// The same seed draws the same requests.
    pub seed: u64,
    /// Blocks that are asked for more often.
    pub skew: Option<Skew>,
}

impl Load {
    /// The load of seed 004: 4 KiB, 80% writes, 90% random, over 2.5 GiB.
    pub fn seed_004(depth: usize, end: End) -> Load {
        Load {
            request_bytes: 4096,
            write_share: 0.8,
            discard_share: 0.0,
            random_share: 0.9,
            start_bytes: 0,
            span_bytes: 5 << 29,
            depth,
            end,
            seed: 4,
            skew: None,
        }
    }

    /// Every byte of a span written once, in order.
    pub fn fill(span_bytes: u64, request_bytes: usize) -> Load {
        Load {
            request_bytes,
            write_share: 1.0,
            random_share: 0.0,
            span_bytes,
            depth: 8,
            end: End::Count(span_bytes / request_bytes as u64),
            ..Load::seed_004(8, End::Count(0))
        }
    }

    fn check(&self, driver: &Driver) -> Result<()> {
        ensure!(
            self.request_bytes > 0 && self.request_bytes.is_multiple_of(512),
            "a request is a multiple of 512 bytes, not {}",
            self.request_bytes
        );
        ensure!(
            self.request_bytes <= driver.request_bytes() && self.depth <= driver.depth() && self.depth > 0,
            "{} requests of {} bytes do not fit a connection made for {} of {}",
            self.depth,
            self.request_bytes,
            driver.depth(),
            driver.request_bytes()
        );
        let end = self.start_bytes.checked_add(self.span_bytes);
        ensure!(
            self.span_bytes >= self.request_bytes as u64
                && end.is_some_and(|end| end <= driver.capacity_bytes())
                && self.start_bytes.is_multiple_of(512),
            "{} bytes from byte {} on do not fit a disk of {} bytes",
            self.span_bytes,
            self.start_bytes,
            driver.capacity_bytes()
        );
        Ok(())
    }
}

/// What was measured of a load.
#[derive(Clone, Debug, Serialize)]
pub struct Measured {
    /// Requests that were completed in time.
    pub requests: u64,
    /// Reads among them.
    pub reads: u64,
    /// Time over which they completed.
    pub seconds: f64,
    /// Requests a second.
    pub iops: f64,
    /// Mean latency in nanoseconds.
    pub mean_ns: f64,
    /// The time that half of all requests did not exceed.
    pub p50_ns: u64,
    /// The same for 99 of 100.
    pub p99_ns: u64,
    /// Highest latency in nanoseconds.
    pub max_ns: u64,
}

/// A generator of pseudo-random numbers (splitmix64): small, fast, the same everywhere.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// Starts from a seed.
    pub fn new(seed: u64) -> Rng {
        Rng(seed ^ 0x5350_494c_4c57_4159)
    }

    /// The next 64 bits.
    #[inline]
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Evenly below `n`, which is not 0.
    #[inline]
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(n)) >> 64) as u64
    }
}

/// A share as a threshold for 32 random bits.
fn threshold(share: f64) -> u64 {
    (share.clamp(0.0, 1.0) * (1u64 << 32) as f64) as u64
}

/// Draws requests.
struct Draw {
    rng: Rng,
    load: Load,
    blocks: u64,
    next: u64,
    discard_below: u64,
    write_below: u64,
    random_below: u64,
    hot_below: u64,
    hot_blocks: u64,
    stride: u64,
}

impl Draw {
    fn new(load: Load) -> Draw {
        let blocks = load.span_bytes / load.request_bytes as u64;
        let hot_blocks = load.skew.map_or(0, |s| ((blocks as f64 * s.to_blocks) as u64).clamp(1, blocks));
        // Multiplying by a number without a common divisor scatters the favoured blocks over the span.
        let mut stride = (blocks as f64 * 0.618_034) as u64 | 1;
        while gcd(stride, blocks) != 1 {
            stride += 2;
        }
        Draw {
            rng: Rng::new(load.seed),
            blocks,
            next: 0,
            discard_below: threshold(load.discard_share),
            write_below: threshold(load.discard_share + load.write_share),
            random_below: threshold(load.random_share),
            hot_below: threshold(load.skew.map_or(0.0, |s| s.of_requests)),
            hot_blocks,
            stride,
            load,
        }
    }

    #[inline]
    fn draw(&mut self) -> Ask {
        let dice = self.rng.next_u64();
        if dice >> 32 < self.random_below {
            self.next = if self.load.skew.is_none() {
                self.rng.below(self.blocks)
            } else {
                let hot = self.rng.next_u64() >> 32 < self.hot_below || self.hot_blocks == self.blocks;
                let rank = if hot {
                    self.rng.below(self.hot_blocks)
                } else {
                    self.hot_blocks + self.rng.below(self.blocks - self.hot_blocks)
                };
                (u128::from(rank) * u128::from(self.stride) % u128::from(self.blocks)) as u64
            };
        }
        let len = self.load.request_bytes;
        let offset = self.load.start_bytes + self.next * len as u64;
        self.next += 1;
        if self.next >= self.blocks {
            self.next = 0;
        }
        let kind = dice & 0xffff_ffff;
        if kind < self.discard_below {
            Ask::Discard { offset, len: len as u64 }
        } else if kind < self.write_below {
            Ask::Write { offset, len }
        } else {
            Ask::Read { offset, len }
        }
    }
}

fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::run::range;
    use super::*;

    fn drawn(load: Load, n: usize) -> Vec<Ask> {
        let mut draw = Draw::new(load);
        (0..n).map(|_| draw.draw()).collect()
    }

    #[test]
    fn shares_and_span_come_out_as_asked() {
        let load = Load { discard_share: 0.05, ..Load::seed_004(1, End::Count(1)) };
        let asks = drawn(load, 200_000);
        let share =
            |f: &dyn Fn(&Ask) -> bool| asks.iter().filter(|a| f(a)).count() as f64 / asks.len() as f64;
        assert!((share(&|a| matches!(a, Ask::Write { .. })) - 0.8).abs() < 0.01);
        assert!((share(&|a| matches!(a, Ask::Discard { .. })) - 0.05).abs() < 0.01);
        let followed = asks.windows(2).filter(|w| range(w[0]).1 == range(w[1]).0).count() as f64;
        assert!((followed / asks.len() as f64 - 0.1).abs() < 0.01);
        assert!(asks.iter().all(|a| range(*a).1 <= load.span_bytes && range(*a).0.is_multiple_of(4096)));
    }

    #[test]
    fn the_same_seed_draws_the_same_requests() {
        let load = Load::seed_004(1, End::Count(1));
        assert_eq!(drawn(load, 1000), drawn(load, 1000));
        assert_ne!(drawn(load, 1000), drawn(Load { seed: 5, ..load }, 1000));
    }

    #[test]
    fn skew_favours_the_share_of_blocks_that_was_asked_for() {
        let blocks = 1000u64;
        let load = Load {
            span_bytes: blocks * 4096,
            random_share: 1.0,
            skew: Some(Skew { of_requests: 0.9, to_blocks: 0.3 }),
            ..Load::seed_004(1, End::Count(1))
        };
        let mut hits = vec![0u32; blocks as usize];
        for ask in drawn(load, 300_000) {
            hits[(range(ask).0 / 4096) as usize] += 1;
        }
        assert!(hits.iter().all(|&h| h > 0), "every block is asked for");
        hits.sort_unstable_by(|a, b| b.cmp(a));
        let hot: u32 = hits[..300].iter().sum();
        assert!((f64::from(hot) / 300_000.0 - 0.9).abs() < 0.01, "{hot}");
    }

    #[test]
    fn a_fill_touches_every_block_once_in_order() {
        let asks = drawn(Load::fill(1 << 20, 1 << 16), 16);
        let offsets: Vec<_> = asks.iter().map(|a| range(*a).0 >> 16).collect();
        assert_eq!(offsets, (0..16).collect::<Vec<_>>());
        assert!(asks.iter().all(|a| matches!(a, Ask::Write { .. })));
    }
}
