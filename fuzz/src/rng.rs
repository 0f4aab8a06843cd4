//! The model test's generator with the input in the place of chance: each decision takes a byte or a few, and
//! when they are used up the seed goes on, so that a run can be brought to its end.

use std::cell::RefCell;
use std::collections::VecDeque;

thread_local! {
    static BYTES: RefCell<VecDeque<u8>> = const { RefCell::new(VecDeque::new()) };
}

/// From here on decisions of this thread are these.
pub fn decide(bytes: &[u8]) {
    BYTES.with_borrow_mut(|b| {
        b.clear();
        b.extend(bytes);
    });
}

/// Whether the input has decisions left.
pub fn undecided() -> usize {
    BYTES.with_borrow(VecDeque::len)
}

#[derive(Clone)]
pub struct Rng(pub u64);

impl Rng {
    fn mix(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z ^ (z >> 27)
    }

    pub fn next(&mut self) -> u64 {
        BYTES.with_borrow_mut(VecDeque::pop_front).map_or_else(|| self.mix(), u64::from)
    }

    /// Below `n`, which is not 0.
    pub fn below(&mut self, n: u64) -> u64 {
        let width = (64 - (n - 1).leading_zeros()).div_ceil(8);
        let word = BYTES.with_borrow_mut(|bytes| {
            (bytes.len() >= width as usize)
                .then(|| bytes.drain(..width as usize).fold(0, |w, b| w << 8 | u64::from(b)))
        });
        word.unwrap_or_else(|| self.mix()) % n
    }

    pub fn chance(&mut self, one_in: u64) -> bool {
        self.below(one_in) == 0
    }
}
