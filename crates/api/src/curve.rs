//! Curves, which show what every size of a disk's RAM tier would have done. Owns the format; the disk counts.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The curve of a disk since its worker began: what an LRU cache of each size would have done with the same requests, counted on a
/// sample of the blocks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskCurve {
    /// Age of the curve, in seconds: the time since the worker began to count or the disk was reset.
    pub seconds: f64,
    /// Sampling rate: one block in this many was counted; 1: all were.
    pub sampled_one_in: f64,
    /// Points of the curve, by growing RAM limit.
    pub curve: Vec<CurvePoint>,
    /// Smallest limit at which nothing would have been evicted.
    pub zero_overflow_bytes: u64,
    /// Limit from which on more RAM brings little; none if the curve has no bend.
    pub knee_bytes: Option<u64>,
    /// Smallest limit that reaches the goal.
    pub recommended_bytes: u64,
    /// Goal: share of the written bytes that the RAM tier should absorb.
    pub goal: f64,
    /// Totals of what the guest did, in blocks of 4 KiB.
    pub totals: CurveTotals,
    /// Memory that the counting uses, in bytes.
    pub memory_bytes: u64,
    /// Speed at which the write cache fills.
    pub fill: Fill,
}

/// How a write cache, RAM and overflow together, has filled since its worker started or its disk was reset, whichever was
/// later.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Fill {
    /// Seconds since the worker began or the disk was reset, whichever was later.
    pub seconds: f64,
    /// Growth in that time, in bytes; 0 if it holds less than before.
    pub grown_bytes: u64,
    /// Bytes by which it may grow until it is full.
    pub left_bytes: u64,
}

impl Fill {
    /// Seconds until it is full at this rate; 0 if it is full. None if it does not fill.
    pub fn seconds_to_full(&self) -> Option<u64> {
        let seconds = self.left_bytes as f64 * self.seconds / self.grown_bytes as f64;
        match self.left_bytes {
            0 => Some(0),
            _ => (self.grown_bytes > 0 && self.seconds > 0.0).then_some(seconds as u64),
        }
    }
}

/// One point of the curve: what this RAM limit would have done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CurvePoint {
    /// RAM limit that this point is about, in bytes.
    pub ram_bytes: u64,
    /// Bytes that eviction would have written to the overflow.
    pub overflow_write_bytes: u64,
    /// Bytes that requests would have read from the overflow.
    pub overflow_read_bytes: u64,
    /// Largest number of live bytes in the overflow at any time.
    pub peak_overflow_bytes: u64,
}

/// Totals of what a guest did, in blocks of 4 KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CurveTotals {
    /// Blocks that the guest has written, each as often as it was written, without zeroes.
    pub written_blocks: u64,
    /// Blocks that guests have read, of 4 KiB.
    pub read_blocks: u64,
    /// Blocks among them that were read from the base image.
    pub base_read_blocks: u64,
    /// Blocks that were written for the first time, or again after they were discarded.
    pub new_blocks: u64,
    /// Largest number of live blocks at any time.
    pub peak_live_blocks: u64,
}

impl DiskCurve {
    /// Bytes that would have been evicted with this limit, interpolated linearly between two points.
    pub fn overflow_write_bytes(&self, ram_bytes: u64) -> u64 {
        self.at(ram_bytes).overflow_write_bytes
    }

    /// The point of this limit, interpolated linearly between two points; beyond the ends, that of the end.
    fn at(&self, ram_bytes: u64) -> CurvePoint {
        let at = self.curve.partition_point(|point| point.ram_bytes < ram_bytes);
        let before = at.checked_sub(1).and_then(|before| self.curve.get(before));
        let (before, after) = match (before, self.curve.get(at)) {
            (Some(before), Some(after)) => (before, after),
            (Some(end), None) | (None, Some(end)) => return CurvePoint { ram_bytes, ..*end },
            (None, None) => return CurvePoint { ram_bytes, ..CurvePoint::default() },
        };
        // The points are those of a worker, which may be in no order.
        let span = after.ram_bytes.saturating_sub(before.ram_bytes).max(1);
        let share = (ram_bytes.saturating_sub(before.ram_bytes) as f64 / span as f64).min(1.0);
        let between = |of: fn(&CurvePoint) -> u64| {
            let fall = of(before).saturating_sub(of(after));
            of(before).saturating_sub((fall as f64 * share) as u64)
        };
        CurvePoint {
            ram_bytes,
            overflow_write_bytes: between(|point| point.overflow_write_bytes),
            overflow_read_bytes: between(|point| point.overflow_read_bytes),
            peak_overflow_bytes: between(|point| point.peak_overflow_bytes),
        }
    }

    /// Bytes that the guest has written, in whole blocks.
    pub fn written_bytes(&self) -> u64 {
        self.totals.written_blocks.saturating_mul(4096)
    }
}

/// The curves of a catalog's machines, added up: what each size of all their RAM tiers would have done.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CatalogCurve {
    /// Number of machines of the catalog whose disks are served and have a RAM tier.
    pub machines: u32,
    /// Number of those whose curves are added: the first 256 by name, without disks that have not answered in time.
    pub disks: u32,
    /// Age of the youngest curve, in seconds.
    pub seconds: f64,
    /// Sampling rate of the curve with the fewest samples: one block in this many was counted.
    pub sampled_one_in: f64,
    /// Points of the sum, at most 96, by growing RAM limit of each machine.
    pub curve: Vec<CurvePoint>,
    /// Smallest limit at which nothing would have been evicted from any of the disks.
    pub zero_overflow_bytes: u64,
    /// Limit from which on more RAM brings little to any of the disks; null if no curve has a bend.
    pub knee_bytes: Option<u64>,
    /// Smallest limit with which each of the disks reaches the goal.
    pub recommended_bytes: u64,
    /// Goal: share of the written bytes that each RAM tier should absorb.
    pub goal: f64,
    /// Bytes that the guests have written, in whole blocks.
    pub written_bytes: u64,
}

impl CatalogCurve {
    /// Largest number of points.
    pub const MOST_POINTS: usize = 96;

    /// Adds the curves of disks, of so many machines; `None` without any.
    pub fn sum(curves: &[DiskCurve], machines: usize) -> Option<CatalogCurve> {
        let first = curves.first()?;
        let mut limits: Vec<u64> =
            curves.iter().flat_map(|curve| &curve.curve).map(|p| p.ram_bytes).collect();
        limits.sort_unstable();
        limits.dedup();
        if limits.len() > CatalogCurve::MOST_POINTS {
            // With both ends.
            let last = CatalogCurve::MOST_POINTS - 1;
            limits = (0..=last).map(|n| limits[n * (limits.len() - 1) / last]).collect();
        }
        let point = |limit: u64| {
            let zero = CurvePoint { ram_bytes: limit, ..CurvePoint::default() };
            curves.iter().map(|curve| curve.at(limit)).fold(zero, |sum, point| CurvePoint {
                ram_bytes: limit,
                overflow_write_bytes: sum.overflow_write_bytes.saturating_add(point.overflow_write_bytes),
                overflow_read_bytes: sum.overflow_read_bytes.saturating_add(point.overflow_read_bytes),
                peak_overflow_bytes: sum.peak_overflow_bytes.saturating_add(point.peak_overflow_bytes),
            })
        };
        let most = |of: fn(&DiskCurve) -> u64| curves.iter().map(of).max().unwrap_or(0);
        Some(CatalogCurve {
            machines: u32::try_from(machines).unwrap_or(u32::MAX),
            disks: u32::try_from(curves.len()).unwrap_or(u32::MAX),
            seconds: curves.iter().map(|curve| curve.seconds).fold(f64::INFINITY, f64::min),
            sampled_one_in: curves.iter().map(|curve| curve.sampled_one_in).fold(1.0, f64::max),
            curve: limits.into_iter().map(point).collect(),
            zero_overflow_bytes: most(|curve| curve.zero_overflow_bytes),
            knee_bytes: curves.iter().filter_map(|curve| curve.knee_bytes).max(),
            recommended_bytes: most(|curve| curve.recommended_bytes),
            goal: first.goal,
            written_bytes: curves.iter().map(DiskCurve::written_bytes).fold(0, u64::saturating_add),
        })
    }
}

/// RAM limits of the curve metrics, the same for all disks: 64 MiB to 64 GiB.
pub const CURVE_LIMITS: [u64; 11] = [
    64 << 20,
    128 << 20,
    256 << 20,
    512 << 20,
    1 << 30,
    2 << 30,
    4 << 30,
    8 << 30,
    16 << 30,
    32 << 30,
    64 << 30,
];

/// Metrics of the curve of one disk, or summed over many.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CurveFigures {
    /// Bytes that would have been evicted with each of [`CURVE_LIMITS`].
    pub overflow_write_bytes: [u64; CURVE_LIMITS.len()],
    /// Bytes that guests have written.
    pub written_bytes: u64,
    /// Smallest limit at which nothing would have been evicted; the largest over several disks.
    pub zero_overflow_bytes: u64,
    /// Smallest limit that reaches the goal; the largest over several disks.
    pub recommended_bytes: u64,
}

impl CurveFigures {
    /// Adds the metrics of another disk.
    pub fn add(&mut self, other: &CurveFigures) {
        for (sum, bytes) in self.overflow_write_bytes.iter_mut().zip(other.overflow_write_bytes) {
            *sum = sum.saturating_add(bytes);
        }
        self.written_bytes = self.written_bytes.saturating_add(other.written_bytes);
        self.zero_overflow_bytes = self.zero_overflow_bytes.max(other.zero_overflow_bytes);
        self.recommended_bytes = self.recommended_bytes.max(other.recommended_bytes);
    }
}

impl From<&DiskCurve> for CurveFigures {
    fn from(curve: &DiskCurve) -> CurveFigures {
        CurveFigures {
            overflow_write_bytes: CURVE_LIMITS.map(|limit| curve.overflow_write_bytes(limit)),
            written_bytes: curve.written_bytes(),
            zero_overflow_bytes: curve.zero_overflow_bytes,
            recommended_bytes: curve.recommended_bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn between_two_points_it_is_straight() {
        let point = |ram_bytes, overflow_write_bytes| CurvePoint {
            ram_bytes,
            overflow_write_bytes,
            overflow_read_bytes: 0,
            peak_overflow_bytes: 0,
        };
        let curve = DiskCurve {
            seconds: 1.0,
            sampled_one_in: 1.0,
            curve: vec![point(100, 1000), point(200, 500), point(300, 0)],
            zero_overflow_bytes: 300,
            knee_bytes: None,
            recommended_bytes: 300,
            goal: 0.95,
            totals: CurveTotals {
                written_blocks: 1,
                read_blocks: 0,
                base_read_blocks: 0,
                new_blocks: 1,
                peak_live_blocks: 1,
            },
            memory_bytes: 0,
            fill: Fill { seconds: 10.0, grown_bytes: 500, left_bytes: 5000 },
        };
        for (seconds, grown_bytes, left_bytes, full) in
            [(10.0, 500, 5000, Some(100)), (10.0, 0, 5000, None), (0.0, 9, 5000, None), (10.0, 0, 0, Some(0))]
        {
            let fill = Fill { seconds, grown_bytes, left_bytes };
            assert_eq!(fill.seconds_to_full(), full, "{fill:?}");
        }
        for (ram, evicted) in
            [(0, 1000), (100, 1000), (150, 750), (200, 500), (290, 50), (300, 0), (u64::MAX, 0)]
        {
            assert_eq!(curve.overflow_write_bytes(ram), evicted, "{ram}");
        }
        // Points of a worker in no order are answered somehow, and end nothing.
        let strange =
            DiskCurve { curve: vec![point(u64::MAX, 7), point(3, u64::MAX), point(2, 0)], ..curve.clone() };
        for ram in [0, 1, 2, 3, 4, u64::MAX] {
            let _ = strange.overflow_write_bytes(ram);
        }
        // Of two disks: the sums, and the size at which none of them overflows.
        let large = DiskCurve {
            curve: vec![point(1 << 20, 900), point(1 << 30, 100)],
            zero_overflow_bytes: 2 << 30,
            ..curve.clone()
        };
        let mut both = CurveFigures::from(&curve);
        both.add(&CurveFigures::from(&large));
        assert_eq!(
            (both.written_bytes, both.zero_overflow_bytes, both.recommended_bytes),
            (8192, 2 << 30, 300)
        );
        assert_eq!(both.overflow_write_bytes[4..], [100; 7]);
        assert!((800..900).contains(&both.overflow_write_bytes[0]), "{both:?}");
        let sum = CatalogCurve::sum(&[curve.clone(), large.clone()], 3).unwrap();
        let points: Vec<_> = sum.curve.iter().map(|p| (p.ram_bytes, p.overflow_write_bytes)).collect();
        assert_eq!(points, [(100, 1900), (200, 1400), (300, 900), (1 << 20, 900), (1 << 30, 100)]);
        assert_eq!((sum.machines, sum.disks, sum.written_bytes), (3, 2, 8192));
        assert_eq!(
            (sum.zero_overflow_bytes, sum.recommended_bytes, sum.knee_bytes, sum.goal),
            (2 << 30, 300, None, 0.95)
        );
        let [young, fine] = [
            DiskCurve { seconds: 0.5, knee_bytes: Some(150), ..curve.clone() },
            DiskCurve {
                curve: (0..500).map(|n| point(n * 4096, 500 - n)).collect(),
                sampled_one_in: 8.0,
                ..large
            },
        ];
        let sum = CatalogCurve::sum(&[young, fine, curve.clone()], 3).unwrap();
        assert_eq!((sum.seconds, sum.sampled_one_in, sum.knee_bytes), (0.5, 8.0, Some(150)));
        assert_eq!(sum.curve.len(), CatalogCurve::MOST_POINTS);
        let [first, .., last] = &sum.curve[..] else { panic!("{sum:?}") };
        assert_eq!((first.ram_bytes, first.overflow_write_bytes), (0, 2500));
        assert_eq!((last.ram_bytes, last.overflow_write_bytes), (499 * 4096, 1));
        assert_eq!(CatalogCurve::sum(&[], 0), None);
        assert_eq!(DiskCurve { curve: vec![], ..curve }.overflow_write_bytes(5), 0);
    }
}
