//! Divides a budget of RAM between machines, by what each would save with more.
//!
//! Invariants: what is given out never exceeds the budget; each machine has at least its least limit; and a machine's next
//! step is taken only when no other's saves more for each byte.

use crate::curve::Point;
use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// A machine's next step up its curve.
struct BudgetStep {
    machine: usize,
    /// Index in the hull of the point that the step leads to.
    to: usize,
    /// Bytes of RAM that the step takes, and bytes of overflow that it saves.
    ram: u64,
    saves: u64,
}

impl BudgetStep {
    fn gain(&self) -> f64 {
        self.saves as f64 / self.ram as f64
    }
}

impl Ord for BudgetStep {
    fn cmp(&self, other: &BudgetStep) -> Ordering {
        self.gain().total_cmp(&other.gain()).then(other.machine.cmp(&self.machine))
    }
}
impl PartialOrd for BudgetStep {
    fn partial_cmp(&self, other: &BudgetStep) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl PartialEq for BudgetStep {
    fn eq(&self, other: &BudgetStep) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}
impl Eq for BudgetStep {}

/// Divides a budget between machines by their curves: the RAM limit of each, in their order. None: the budget is less than
/// what the first points of all take.
///
/// Greedy on the lower convex hull of each curve, where each step saves less for each byte than the one before. That is the
/// least overflow in all that the budget allows, but for a rest that is smaller than the next step, which the
/// steps that still fit take.
pub fn share_budget(curves: &[Vec<Point>], budget_bytes: u64) -> Option<Vec<u64>> {
    let hulls: Vec<Vec<Point>> = curves.iter().map(|c| hull(c)).collect();
    let least = |hull: &Vec<Point>| hull.first().map_or(0, |p| p.ram_bytes);
    let mut limits: Vec<u64> = hulls.iter().map(least).collect();
    let mut left = limits.iter().try_fold(budget_bytes, |left, &limit| left.checked_sub(limit))?;
    let next = |machine: usize, to: usize| {
        let (from, point) = (hulls[machine].get(to - 1)?, hulls[machine].get(to)?);
        let saves = from.overflow_write_bytes - point.overflow_write_bytes;
        Some(BudgetStep { machine, to, ram: point.ram_bytes - from.ram_bytes, saves })
    };
    let mut steps: BinaryHeap<BudgetStep> = (0..hulls.len()).filter_map(|m| next(m, 1)).collect();
    while let Some(step) = steps.pop() {
        if step.ram > left {
            continue;
        }
        left -= step.ram;
        limits[step.machine] += step.ram;
        steps.extend(next(step.machine, step.to + 1));
    }
    Some(limits)
}

/// The lower convex hull of a curve, by growing limit, without points that save nothing.
fn hull(curve: &[Point]) -> Vec<Point> {
    let mut hull: Vec<Point> = Vec::new();
    for &point in curve {
        let saves = |from: &Point, to: &Point| {
            i128::from(from.overflow_write_bytes) - i128::from(to.overflow_write_bytes)
        };
        let takes = |from: &Point, to: &Point| i128::from(to.ram_bytes) - i128::from(from.ram_bytes);
        if hull.last().is_some_and(|last| takes(last, &point) <= 0 || saves(last, &point) <= 0) {
            continue;
        }
        while let [.., a, b] = hull[..]
            && saves(&a, &b) * takes(&b, &point) < saves(&b, &point) * takes(&a, &b)
        {
            hull.pop();
        }
        hull.push(point);
    }
    hull
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(points: &[(u64, u64)]) -> Vec<Point> {
        let point = |&(ram_bytes, overflow_write_bytes): &(u64, u64)| Point {
            ram_bytes,
            overflow_write_bytes,
            overflow_read_bytes: 0,
            peak_overflow_bytes: 0,
        };
        points.iter().map(point).collect()
    }

    #[test]
    fn a_hull_leaves_out_what_lies_above_it() {
        let hull = hull(&curve(&[(1, 100), (2, 99), (3, 60), (4, 50), (5, 50), (6, 0)]));
        let at: Vec<u64> = hull.iter().map(|p| p.ram_bytes).collect();
        assert_eq!(at, [1, 3, 6]);
    }

    #[test]
    fn a_budget_goes_where_it_saves_most() {
        let hungry = curve(&[(1, 1000), (5, 200), (9, 100)]);
        let modest = curve(&[(1, 100), (2, 10), (9, 0)]);
        let share = |budget| share_budget(&[hungry.clone(), modest.clone()], budget);
        assert_eq!(share(1), None);
        assert_eq!(share(2), Some(vec![1, 1]));
        assert_eq!(share(6), Some(vec![5, 1]));
        assert_eq!(share(7), Some(vec![5, 2]));
        assert_eq!(share(100), Some(vec![9, 9]));
        assert_eq!(share(5), Some(vec![1, 2]), "what fits, where the best does not");
        assert_eq!(share_budget(&[], 5), Some(vec![]));
    }

    #[test]
    fn it_is_the_best_that_there_is_on_convex_curves() {
        // All divisions of small budgets, one by one.
        let convex =
            |scale: u64| curve(&(0..6).map(|i| (i + 1, scale * (5 - i) * (5 - i))).collect::<Vec<_>>());
        let curves = [convex(3), convex(7), convex(1)];
        for budget in 3..18_u64 {
            let limits = share_budget(&curves, budget).expect("one each");
            let overflow = |limits: &[u64]| -> u64 {
                curves.iter().zip(limits).map(|(c, &l)| c[l as usize - 1].overflow_write_bytes).sum()
            };
            let mut best = u64::MAX;
            for a in 1..=6 {
                for b in 1..=6 {
                    for c in (1..=6).filter(|c| a + b + c <= budget) {
                        best = best.min(overflow(&[a, b, c]));
                    }
                }
            }
            assert!(limits.iter().sum::<u64>() <= budget);
            assert_eq!(overflow(&limits), best, "{budget}: {limits:?}");
        }
    }
}
