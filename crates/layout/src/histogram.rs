//! A latency histogram of fixed size that lives in shared memory: one writer, any number of readers.
//!
//! Log-linear: 16 buckets to each power of two of nanoseconds, so a percentile is off by at most 1/32.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

const SUB_BITS: u32 = 4;
const SUB: usize = 1 << SUB_BITS;
/// Values from 2^40 ns (18 minutes) on share the last bucket.
const MAX_POWER: u32 = 40;
const BUCKETS: usize = (MAX_POWER - SUB_BITS + 1) as usize * SUB;

/// Counts of durations, with their exact maximum and sum.
#[repr(C)]
pub struct Histogram {
    max_ns: AtomicU64,
    sum_ns: AtomicU64,
    buckets: [AtomicU64; BUCKETS],
}

#[inline]
fn bucket_of(ns: u64) -> usize {
    let v = ns.min((1 << MAX_POWER) - 1);
    if v < SUB as u64 {
        return v as usize;
    }
    let power = 63 - v.leading_zeros();
    let sub = (v >> (power - SUB_BITS)) as usize & (SUB - 1);
    (power - SUB_BITS + 1) as usize * SUB + sub
}

/// The middle of a bucket.
fn value_of(bucket: usize) -> u64 {
    if bucket < SUB {
        return bucket as u64;
    }
    let shift = (bucket / SUB - 1) as u32;
    let low = ((SUB + bucket % SUB) as u64) << shift;
    low + (1u64 << shift) / 2
}

/// The greatest duration of a bucket.
fn end_of(bucket: usize) -> u64 {
    if bucket < SUB {
        return bucket as u64;
    }
    let shift = (bucket / SUB - 1) as u32;
    (((SUB + bucket % SUB + 1) as u64) << shift) - 1
}

impl Histogram {
    /// Adds `n` requests that took `ns` each.
    #[inline]
    pub fn record(&self, ns: u64, n: u64) {
        let bucket = &self.buckets[bucket_of(ns)];
        bucket.store(bucket.load(Relaxed).wrapping_add(n), Relaxed);
        self.sum_ns.store(self.sum_ns.load(Relaxed).wrapping_add(ns.wrapping_mul(n)), Relaxed);
        if ns > self.max_ns.load(Relaxed) {
            self.max_ns.store(ns, Relaxed);
        }
    }

    /// Number of requests recorded.
    pub fn count(&self) -> u64 {
        self.buckets.iter().fold(0, |sum, b| sum.wrapping_add(b.load(Relaxed)))
    }

    /// The slowest, exactly.
    pub fn max_ns(&self) -> u64 {
        self.max_ns.load(Relaxed)
    }

    /// Sum of all durations.
    pub fn sum_ns(&self) -> u64 {
        self.sum_ns.load(Relaxed)
    }

    /// The buckets that have counts, as the greatest duration of each and its count, by growing duration. Of the last
    /// bucket, whose durations have no bound, it is that of a bucket of its size.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64)> {
        let counts = self.buckets.iter().map(|bucket| bucket.load(Relaxed)).enumerate();
        counts.filter(|(_, count)| *count > 0).map(|(bucket, count)| (end_of(bucket), count))
    }

    /// The duration that a share `q` (0 to 1) of all requests did not exceed; 0 when there were none.
    pub fn quantile_ns(&self, q: f64) -> u64 {
        let total = self.count();
        if total == 0 {
            return 0;
        }
        let rank = ((total as f64 * q).ceil() as u64).clamp(1, total);
        let mut seen = 0;
        for (i, b) in self.buckets.iter().enumerate() {
            seen = u64::wrapping_add(seen, b.load(Relaxed));
            if seen >= rank {
                return value_of(i).min(self.max_ns());
            }
        }
        self.max_ns()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn empty() -> Box<Histogram> {
        Box::new(Histogram {
            max_ns: AtomicU64::new(0),
            sum_ns: AtomicU64::new(0),
            buckets: [const { AtomicU64::new(0) }; BUCKETS],
        })
    }

    #[test]
    fn quantiles_are_within_a_thirty_second_part() {
        let h = empty();
        for ns in 1..=100_000u64 {
            h.record(ns, 1);
        }
        for (q, want) in [(0.5, 50_000f64), (0.99, 99_000f64)] {
            let got = h.quantile_ns(q) as f64;
            assert!((got - want).abs() / want <= 1.0 / 32.0, "q{q}: {got} against {want}");
        }
        assert_eq!((h.max_ns(), h.count()), (100_000, 100_000));
    }

    #[test]
    fn a_bucket_ends_where_the_next_begins() {
        for bucket in 0..BUCKETS - 1 {
            let end = end_of(bucket);
            assert_eq!((bucket_of(end), bucket_of(end + 1)), (bucket, bucket + 1), "{end}");
        }
        let h = empty();
        [(7, 2), (1000, 3), (1023, 1), (1024, 4)].into_iter().for_each(|(ns, n)| h.record(ns, n));
        // 992 to 1023 ns are one bucket.
        assert_eq!(h.buckets().collect::<Vec<_>>(), [(7, 2), (1023, 4), (1087, 4)]);
    }

    #[test]
    fn buckets_are_monotonic_and_hold_their_own_value() {
        let mut last = 0;
        for power in 0..63u32 {
            for ns in [(1u64 << power), (1u64 << power) + (1u64 << power) / 3] {
                let b = bucket_of(ns);
                assert!(b >= last && b < BUCKETS);
                last = b;
                if power < MAX_POWER {
                    assert_eq!(bucket_of(value_of(b)), b);
                }
            }
        }
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
    }
}
