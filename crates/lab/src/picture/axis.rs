//! The vertical axis of a chart: where a value is placed, and which values are written beside it.
//!
//! Invariant: an axis has two to six marks, and a value is never placed beyond the first or the last.

use crate::numbers::{decades, tick, ticks};

/// A linear axis from 0 on, or one by powers of ten.
pub(crate) struct Axis {
    /// Places of the marks, from the lowest on: values, or exponents of ten.
    marks: Vec<f64>,
    is_log: bool,
}

impl Axis {
    /// An axis from 0 to at least `most`.
    pub fn linear(most: f64) -> Axis {
        Axis { marks: ticks(most), is_log: false }
    }

    /// An axis by powers of ten, from at most `least` to at least `most`; both are above 0.
    pub fn log(least: f64, most: f64) -> Axis {
        Axis { marks: decades(least, most).into_iter().map(f64::from).collect(), is_log: true }
    }

    /// Whether marks are powers of ten.
    pub fn is_log(&self) -> bool {
        self.is_log
    }

    /// The places of the marks.
    pub fn marks(&self) -> &[f64] {
        &self.marks
    }

    /// The lowest and the highest place.
    pub fn ends(&self) -> (f64, f64) {
        (self.marks[0], self.marks[self.marks.len() - 1])
    }

    /// Whether a value can be placed: a logarithm has no 0.
    pub fn has(&self, value: f64) -> bool {
        value.is_finite() && (!self.is_log || value > 0.0)
    }

    /// The place of a value.
    pub fn place(&self, value: f64) -> f64 {
        let (low, high) = self.ends();
        (if self.is_log { value.max(1e-300).log10() } else { value }).clamp(low, high)
    }

    /// The value at a place.
    pub fn value(&self, place: f64) -> f64 {
        if self.is_log { 10f64.powf(place) } else { place }
    }

    /// The value of a mark, as it is written beside the axis.
    pub fn label(&self, mark: f64) -> String {
        let value = self.value(mark);
        tick(value, if self.is_log { value } else { self.marks[1] - self.marks[0] })
    }
}
