//! Which blocks a sample takes, and a histogram that holds needs of any size in little memory.
//!
//! Invariants: whether a block is in a sample depends on the block alone; what a smaller sample takes a larger one takes too.

/// Number of hashes; a sample takes the blocks whose hash is below its threshold.
pub(crate) const HASHES: u32 = 1 << 24;

/// The hash by which blocks are chosen: of all its bits, so that neither neighbours nor strides are favoured.
#[inline]
pub(crate) fn hash(block: u32) -> u32 {
    let mut h = block ^ 0x5370_6C77;
    h = (h ^ h >> 16).wrapping_mul(0x85EB_CA6B);
    h = (h ^ h >> 13).wrapping_mul(0xC2B2_AE35);
    (h ^ h >> 16) >> 8
}

/// The threshold of a rate, at least one hash.
pub(crate) fn threshold(rate: f64) -> u32 {
    ((rate.clamp(0.0, 1.0) * f64::from(HASHES)).round() as u32).max(1)
}

/// The share of all blocks that a threshold takes.
pub(crate) fn rate(threshold: u32) -> f64 {
    f64::from(threshold) / f64::from(HASHES)
}

/// Cells to each power of two: a need is off by at most 1/128.
const SUB_BITS: u32 = 6;
const SUB: u32 = 1 << SUB_BITS;
const CELLS: usize = ((32 - SUB_BITS) * SUB + SUB) as usize;

/// A histogram of weights by need.
pub(crate) struct Needs {
    cells: Vec<f64>,
}

impl Needs {
    pub fn new() -> Needs {
        Needs { cells: vec![0.0; CELLS] }
    }

    #[inline]
    pub fn add(&mut self, need: u32, weight: f64) {
        self.cells[cell(need)] += weight;
    }

    /// Bytes of memory that it uses.
    pub fn bytes(&self) -> usize {
        self.cells.capacity() * size_of::<f64>()
    }

    /// Needs, growing, each in the middle of its cell, with their weights.
    pub fn iter(&self) -> impl Iterator<Item = (u32, f64)> {
        self.cells.iter().enumerate().map(|(i, &weight)| (middle(i), weight))
    }
}

#[inline]
fn cell(need: u32) -> usize {
    if need < 2 * SUB {
        return need as usize;
    }
    let power = 31 - need.leading_zeros() - SUB_BITS;
    (power * SUB + (need >> power)) as usize
}

fn middle(cell: usize) -> u32 {
    let cell = cell as u32;
    if cell < 2 * SUB {
        return cell;
    }
    let power = cell / SUB - 1;
    ((cell - power * SUB) << power) + (1 << power) / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_need_is_near_the_middle_of_its_cell() {
        let mut last = 0;
        for need in (0..5000).chain([1 << 20, (1 << 20) + 12_345, u32::MAX / 2, u32::MAX]) {
            let (at, middle) = (cell(need), middle(cell(need)));
            assert!(at >= last && at < CELLS, "{need}: {at}");
            last = at;
            assert!(f64::from(middle.abs_diff(need)) <= f64::from(need) / 64.0, "{need}: {middle}");
            assert_eq!(cell(middle), at);
        }
    }

    #[test]
    fn a_sample_is_as_large_as_its_rate_whatever_the_stride() {
        let threshold = threshold(0.01);
        for stride in [1, 2, 8, 256, 4096] {
            let n = (0..400_000_u32).filter(|i| hash(i.wrapping_mul(stride)) < threshold).count();
            assert!((3_700..4_300).contains(&n), "{n} of 400,000 at a stride of {stride}");
        }
    }
}
