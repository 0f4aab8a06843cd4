//! How much other hosts are sent. Owns the bytes that may be sent at once.
//!
//! Invariant: in any time, no more is given out than the rate times this time and one burst.

use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Smallest burst: one chunk, or a slow limit would never let one through.
const LEAST_BURST: u64 = spillway_image::digests::CHUNK_BYTES;

/// The limit.
pub struct UploadLimit {
    bytes_per_second: u64,
    /// Bytes that may be sent now, and since when.
    left: Mutex<(u64, Instant)>,
}

impl UploadLimit {
    /// A limit of so many bytes a second, and of those of a second at once.
    pub fn new(bytes_per_second: u64) -> UploadLimit {
        let bytes_per_second = bytes_per_second.max(1);
        let left = Mutex::new((bytes_per_second.max(LEAST_BURST), Instant::now()));
        UploadLimit { bytes_per_second, left }
    }

    fn burst(&self) -> u64 {
        self.bytes_per_second.max(LEAST_BURST)
    }

    /// Counts bytes that are about to be sent.
    ///
    /// # Errors
    /// They are too many now; the time after which they are not.
    pub fn take(&self, bytes: u64, now: Instant) -> Result<(), Duration> {
        let mut left = self.left.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let passed = now.saturating_duration_since(left.1);
        let gained = u128::from(self.bytes_per_second) * passed.as_nanos() / 1_000_000_000;
        let there = (u128::from(left.0) + gained).min(u128::from(self.burst())) as u64;
        // While it is less than a byte, the time is counted on from where it was.
        if gained > 0 {
            *left = (there, now);
        }
        match there.checked_sub(bytes) {
            Some(rest) => {
                left.0 = rest;
                Ok(())
            }
            None => Err(Duration::from_secs_f64((bytes - there) as f64 / self.bytes_per_second as f64)),
        }
    }

    /// Bytes that were counted are not sent.
    pub fn give_back(&self, bytes: u64) {
        let mut left = self.left.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        left.0 = left.0.saturating_add(bytes).min(self.burst());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spillway_testkit::Rng;

    const MIB: u64 = 1 << 20;

    #[test]
    fn it_is_never_exceeded_and_all_of_it_can_be_used() {
        for rate in [1, 700_000, 2 * MIB, 100 * MIB] {
            let limit = UploadLimit::new(rate);
            let (mut random, mut now, mut sent) = (Rng::new(rate), Instant::now(), 0u64);
            let begun = now;
            for _ in 0..2_000 {
                match limit.take(MIB, now) {
                    Ok(()) => sent += MIB,
                    Err(wait) => now += wait + Duration::from_nanos(random.below(1_000)),
                }
                let most = rate as f64 * (now - begun).as_secs_f64() + rate.max(MIB) as f64 + 1.0;
                assert!(sent as f64 <= most, "{sent} bytes at {rate}");
            }
            let could = rate as f64 * (now - begun).as_secs_f64();
            assert!(sent as f64 >= could * 0.99, "{sent} of {could} bytes at {rate}");
        }
    }

    #[test]
    fn what_was_not_sent_is_given_back() {
        let limit = UploadLimit::new(MIB);
        let now = Instant::now();
        assert!(limit.take(MIB, now).is_ok());
        let wait = limit.take(MIB, now).unwrap_err();
        assert!(wait > Duration::from_millis(900) && wait <= Duration::from_secs(1), "{wait:?}");
        limit.give_back(MIB);
        assert!(limit.take(MIB, now).is_ok());
        limit.give_back(u64::MAX);
        assert!(limit.take(MIB, now).is_ok() && limit.take(1, now).is_err());
    }
}
