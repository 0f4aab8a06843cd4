//! The result: the overflow at every RAM limit, and the limits that stand out.
//!
//! Owns no method; what a method has found is a [`Profile`]. Invariant: along a curve nothing grows with the RAM.

use crate::event::BLOCK_BYTES;
use crate::limit::{limit_bytes, spread, staying_blocks};
use crate::policy::TierOutcome;
use crate::profile::{Profile, Totals};
use serde::{Deserialize, Serialize};

/// The least RAM limit of a disk.
pub const MIN_RAM_BYTES: u64 = 64 << 10;
/// Share of the written bytes that the RAM tier should absorb, where nobody says otherwise.
pub const DEFAULT_GOAL: f64 = 0.95;
/// Points of a curve that is asked for without limits.
const POINTS: usize = 64;

/// The overflow at one RAM limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Point {
    /// The RAM limit.
    pub ram_bytes: u64,
    /// Bytes that eviction writes to the overflow, over the whole trace.
    pub overflow_write_bytes: u64,
    /// Bytes that requests read from the overflow.
    pub overflow_read_bytes: u64,
    /// Most live bytes in the overflow at a time.
    pub peak_overflow_bytes: u64,
}

/// The overflow at all RAM limits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Curve {
    /// The points, by growing limit.
    pub curve: Vec<Point>,
    /// The least limit at which nothing is evicted.
    pub zero_overflow_bytes: u64,
    /// Where more RAM begins to bring little: the knee of the evicted bytes over the limit. None: there is no bend.
    pub knee_bytes: Option<u64>,
    /// The least limit that reaches the goal.
    pub recommended_bytes: u64,
    /// The goal: the share of the written bytes that the RAM tier absorbs.
    pub goal: f64,
    /// What the trace did, in blocks.
    pub totals: Totals,
    /// One block in this many was counted: 1 is exact.
    pub sampled_one_in: f64,
}

/// Computes the point of a limit.
pub fn point(profile: &Profile, ram_bytes: u64) -> Point {
    let staying = staying_blocks(ram_bytes);
    Point {
        ram_bytes,
        overflow_write_bytes: profile.evicted_blocks(staying) * BLOCK_BYTES,
        overflow_read_bytes: profile.overflow_read_blocks(staying) * BLOCK_BYTES,
        peak_overflow_bytes: profile.peak_overflow_blocks(staying) * BLOCK_BYTES,
    }
}

impl From<TierOutcome> for Point {
    fn from(tier: TierOutcome) -> Point {
        Point {
            ram_bytes: tier.ram_bytes,
            overflow_write_bytes: tier.evicted_blocks * BLOCK_BYTES,
            overflow_read_bytes: tier.overflow_read_blocks * BLOCK_BYTES,
            peak_overflow_bytes: tier.peak_overflow_blocks * BLOCK_BYTES,
        }
    }
}

/// `n` RAM limits, spaced by their logarithm, up to the one at which nothing overflows: for [`crate::policy::Policy`].
pub fn limits(zero_overflow_bytes: u64, n: usize) -> Vec<u64> {
    let most = staying_blocks(zero_overflow_bytes.max(MIN_RAM_BYTES));
    let least = (most / 1024).max(staying_blocks(MIN_RAM_BYTES));
    let mut limits: Vec<u64> = spread(least, most, n).into_iter().map(limit_bytes).collect();
    limits.dedup();
    limits
}

impl Curve {
    /// The curve at limits spaced by their logarithm, up to the one at which nothing overflows.
    pub fn new(profile: &Profile, goal: f64) -> Curve {
        let zero = profile.zero_overflow_bytes().max(MIN_RAM_BYTES);
        // Few traces say anything below a thousandth of what lives.
        let mut limits = limits(zero, POINTS);
        limits.push(zero);
        Curve::at(profile, goal, &limits)
    }

    /// The curve at these limits.
    pub fn at(profile: &Profile, goal: f64, limits: &[u64]) -> Curve {
        let mut limits = limits.to_vec();
        limits.sort_unstable();
        limits.dedup();
        let goal = goal.clamp(0.0, 1.0);
        let curve: Vec<Point> = limits.iter().map(|&limit| point(profile, limit)).collect();
        // The epsilon: 95% of 100 blocks leaves 5, not 4.999.
        let may_leave = (profile.totals().written_blocks as f64 * (1.0 - goal) + 1e-6) as u64;
        Curve {
            zero_overflow_bytes: profile.zero_overflow_bytes().max(MIN_RAM_BYTES),
            knee_bytes: find_knee(profile),
            recommended_bytes: profile.limit_for(may_leave).max(MIN_RAM_BYTES),
            goal,
            totals: profile.totals(),
            sampled_one_in: profile.scale(),
            curve,
        }
    }
}

/// Below this distance from the straight line a curve has no knee.
const MIN_BEND: f64 = 0.1;

/// The knee after Kneedle (Satopää and others): limits and evicted bytes are scaled to 0..1, and the knee is where the curve
/// lies farthest below the straight line between its ends. Taken of evenly spaced sizes, so that it is the bend that
/// someone sees who draws the curve.
fn find_knee(profile: &Profile) -> Option<u64> {
    const STEPS: u64 = 512;
    let end = staying_blocks(profile.zero_overflow_bytes());
    let sizes = (0..=STEPS).map(|i| end * i / STEPS).map(|size| (size, profile.evicted_blocks(size)));
    find_bend(sizes, end, profile.evicted_blocks(0)).map(|size| limit_bytes(size).max(MIN_RAM_BYTES))
}

/// The knee of a curve of which only some points are known: among them. `most_bytes` are evicted without any RAM, and none from
/// `end_bytes` of it on.
pub fn knee_of(points: &[Point], end_bytes: u64, most_bytes: u64) -> Option<u64> {
    find_bend(points.iter().map(|point| (point.ram_bytes, point.overflow_write_bytes)), end_bytes, most_bytes)
}

/// Finds the size that lies farthest below the straight line from all evicted to none.
fn find_bend(sizes: impl Iterator<Item = (u64, u64)>, end: u64, most: u64) -> Option<u64> {
    if most == 0 || end == 0 {
        return None;
    }
    let below =
        |(size, evicted): (u64, u64)| (1.0 - size as f64 / end as f64 - evicted as f64 / most as f64, size);
    let (bend, size) = sizes.map(below).fold((0.0, 0), |best, b| if b.0 > best.0 { b } else { best });
    (bend >= MIN_BEND).then_some(size)
}
